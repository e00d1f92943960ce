"""Make predictors for a synthetic model (`thermocline synth --active`) from its own gates, for measurements.

    python bench/engine/synthetic_predictors.py PACK [--kind svd] [--rank 128] [--missed 0.005]
        [--tokens N] [--ram GIB]

svd is the best approximation of the gates of that rank (randomised, one power iteration); sign takes the
gates' signs. All thresholds of a layer are shifted by the largest amount that loses at most `--missed` of
the mass of activations over random tokens. The pack is sorted by hotness first (unless `synth
--hottest-first` did that) and gets a profile, as from `thermocline profile`; a sorted pack gets the
intended activity. --ram limits the memory in which tokens are computed. Unlike `thermocline train`, this
needs no text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.synthetic import TRUTH
from thermocline.engine.decoder import bind
from thermocline.model import quant
from thermocline.offline.bench import random_tokens
from thermocline.offline.evaluate import Reader
from thermocline.ops import reference
from thermocline.ops.interface import F32, FFNStats
from thermocline.pack.activity_profile import BUCKETS, Profile, write_profile
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import (
    FILE,
    LayerPredictor,
    Predictors,
    scores,
    stored_bytes,
    write_predictors,
)
from thermocline.pack.reorder import hottest_first, write_reordered
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

SEED = 7
COUNTED = 65536  # tokens that `intended` speaks of: as many as `thermocline profile` is advised to count
I64 = NDArray[np.int64]
F16 = NDArray[np.float16]


class Recorder:
    """Ops that keep what each FFN reads (normed) and the activations it finds."""

    def __init__(self, ops: Any, pack: Pack, norms: list[Any]) -> None:
        self.ops, self.spec, self.norms = ops, pack.spec, norms
        self.found: list[tuple[F32, F16]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ops, name)

    def ffn_add(self, x: F32, h: F32, bound: Any, sparsity: str, stats: FFNStats, **more: Any) -> None:
        n, s = self.norms[len(self.found) % len(self.norms)], self.spec  # long texts come in pieces
        normed = h.copy() if n is None else reference.norm(h, n.weight, n.bias, s.norm_eps, s.norm)
        active = np.zeros((len(x), s.n_experts * s.ffn_dim), np.float32)
        self.ops.ffn_add(x, h, bound, sparsity, stats, active, **more)
        self.found.append((normed, active.astype(np.float16)))  # 26 GB of weights leave room for no more


def record(pack: Pack, tokens: int, seed: int, ram: float | None) -> list[tuple[F32, F16]]:
    """For each layer: inputs [tokens, dim], activations [tokens, neurons]."""
    options = EngineOptions(context=tokens, max_batch=1, ram=ram)
    loaded = Session.open(pack, options, fits=ram is None).loaded
    ops = Recorder(loaded.ops, pack, [layer.ffn_norm for layer in loaded.weights.layers])
    texts = np.array([random_tokens(pack.spec, seed, tokens)], np.int32)
    Reader(bind(pack.spec, loaded.weights, ops), ops, context=tokens).prompt(texts, tokens)
    layers = (ops.found[i :: pack.spec.n_layers] for i in range(pack.spec.n_layers))
    return [(np.concatenate([x for x, _ in part]), np.concatenate([a for _, a in part])) for part in layers]


def gate_of(pack: Pack, i: int) -> tuple[F32, F32]:
    """Weights [neurons, dim] and bias [neurons] of a layer's gates, all experts'."""
    name, n = f"layers.{i}.gate", pack.spec.n_experts * pack.spec.ffn_dim
    rows = read_tensor(pack, f"{name}.weight").reshape(n, -1)
    gate = quant.decode(pack.tensors[f"{name}.weight"].format, rows, pack.spec.dim)
    bias = f"{name}.bias"
    stored = (
        read_tensor(pack, bias).view(np.float32).ravel() if bias in pack.tensors else np.zeros(n, np.float32)
    )
    return gate, stored


def low_rank(gate: F32, rank: int, seed: int) -> tuple[F32, F32]:
    rng = np.random.default_rng(seed)
    sketch = gate @ rng.standard_normal((gate.shape[1], rank + 16), dtype=np.float32)
    basis = np.linalg.qr(gate @ (gate.T @ np.linalg.qr(sketch)[0]))[0]
    u, d, v = np.linalg.svd(basis.T @ gate, full_matrices=False)
    root = np.sqrt(d[:rank])
    return root[:, None] * v[:rank], (basis @ u[:, :rank]) * root


def predictor_of(pack: Pack, i: int, kind: str, rank: int) -> LayerPredictor:
    """With the thresholds of a perfect predictor: minus the bias."""
    gate, bias = gate_of(pack, i)
    experts = pack.spec.n_experts
    if kind == "sign":
        signs = np.packbits(gate > 0, axis=1, bitorder="little")
        return LayerPredictor("sign", None, None, signs, -bias, 0, experts)
    first, second = low_rank(gate, rank, i)
    ideal = LayerPredictor("svd", first, second, None, -bias, 0, experts)
    as_stored = Predictors.of(pack.spec, [ideal] * pack.spec.n_layers).layer(i)
    assert as_stored is not None
    return as_stored


def shifted(p: LayerPredictor, x: F32, active: F16, missed: float) -> LayerPredictor:
    margin = scores(p, x) - p.threshold
    mass = np.abs(active[active != 0]).astype(np.float64)
    order = np.argsort(margin[active != 0])
    lost = np.cumsum(mass[order]) <= missed * mass.sum()
    shift = margin[active != 0][order][int(lost.sum())]
    return replace(p, threshold=p.threshold + np.float32(shift))


def hot_neurons(pack: Pack, i: int, kind: str, rank: int, active: F16) -> int:
    """Those whose gate row, read always, costs less than being asked about and read when needed."""
    gate = pack.tensors[f"layers.{i}.gate.weight"].stride
    _, asking = stored_bytes(pack.spec, kind, rank)
    return int(((active != 0).mean(axis=0) > 1 - asking / gate).sum())


def profile_of(found: list[tuple[F32, F16]], places: list[I64], ids: list[int], experts: int) -> Profile:
    """What `thermocline profile` would count over the recorded tokens."""
    tokens = len(found[0][1])
    windows = tuple(tokens // b for b in BUCKETS)

    def counts(active: F16) -> I64:
        each = zip(BUCKETS, windows, strict=True)
        cut = ((active[: n * b].reshape(n, b, -1) != 0).any(axis=1) for b, n in each)
        return np.stack([c.sum(axis=0, dtype=np.int64).reshape(experts, -1) for c in cut])

    every = tuple(counts(active[:, place]) for (_, active), place in zip(found, places, strict=True))
    return Profile(
        BUCKETS, windows, tokens, hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest(), every
    )


def intended(pack: Pack) -> Profile:
    """Return the profile that counting would give in the long run if activity were exactly as intended.

    A mixture's neurons are needed so rarely that a few hundred tokens would show accidental hot neurons.
    """
    with np.load(pack.path / TRUTH) as truth:
        activity, label = truth["activity"].astype(np.float64), str(truth["label"])
    windows = tuple(COUNTED // b for b in BUCKETS)

    def counts(p: NDArray[np.float64]) -> I64:
        each = zip(BUCKETS, windows, strict=True)
        return np.stack([np.round((1 - (1 - p) ** b) * n).astype(np.int64) for b, n in each])

    digest = hashlib.sha256(label.encode()).hexdigest()
    return Profile(BUCKETS, windows, COUNTED, digest, tuple(counts(p) for p in activity))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what comes from disk
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("--kind", choices=["svd", "sign"], default="svd")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--missed", type=float, default=0.005)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ram", type=float)
    args = parser.parse_args()
    pack = Pack.open(args.pack)
    found = record(pack, args.tokens, SEED, args.ram)
    n = pack.spec.n_experts
    known = "hottest_first" in pack.source["name"]
    if known:
        places = [np.arange(n * pack.spec.ffn_dim)] * len(found)
    else:
        places = [hottest_first((active != 0).sum(axis=0).reshape(n, -1)) for _, active in found]
        write_reordered(pack, args.pack, places, lambda _: None, drop=(FILE,), overwrite=True)
        pack = Pack.open(args.pack)
    ids = random_tokens(pack.spec, SEED, args.tokens)
    write_profile(args.pack, intended(pack) if known else profile_of(found, places, ids, n))
    layers: list[LayerPredictor] = []
    asked: list[float] = []
    fractions: list[float] = []
    for i, ((x, recorded), place) in enumerate(zip(found, places, strict=True)):
        active = recorded[:, place]
        p = shifted(predictor_of(pack, i, args.kind, args.rank), x, active, args.missed)
        p = replace(p, hot=hot_neurons(pack, i, args.kind, args.rank, active))
        named = p.predicted(x).reshape(len(x), n, -1)
        chosen = (active != 0).reshape(named.shape).any(axis=2, keepdims=True)  # experts, by what they did
        asked.append(float((named & chosen).mean()))
        fractions.append(float((active != 0).mean()))
        layers.append(p)
        print(f"layer {i}: {asked[-1]:.1%} predicted, {fractions[-1]:.1%} active, {p.hot} hot", flush=True)
    about = {key: getattr(args, key) for key in ("kind", "rank", "missed", "tokens")}
    about |= {"predicted_fraction": statistics.mean(asked), "active_fraction": statistics.mean(fractions)}
    write_predictors(pack, layers, about)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
