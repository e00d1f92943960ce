"""Measure how a model's neurons are active: what caches, predictors and early reads can make of it.

    python bench/engine/activity_statistics.py PACK [--text FILE ...] [--passages 6] [--rank R] [--json]

Each passage has 448 tokens and begins with an empty context and a cache of the hottest neurons. Every tenth
passage of a text is measured; frequencies are counted over the others. Without texts, tokens are random, and
frequencies are those that `thermocline synth` intended.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.synthetic import TRUTH
from thermocline.engine.decoder import ffn_input
from thermocline.offline.activity import Passages
from thermocline.offline.bench import random_tokens, text_tokens
from thermocline.offline.cache_policies import POLICIES
from thermocline.offline.training.fit_svd import svd
from thermocline.offline.training.fits import gate_rows
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, FFNStats, opaque
from thermocline.pack.pack import Pack
from thermocline.session import weights

Bool = NDArray[np.bool_]
F64 = NDArray[np.float64]

TOKENS = 448  # of a passage: the bundled model's context is 512
EVERY = 10  # passages of a text, of which one is measured
HELD = (0.1, 0.3, 0.6)  # shares of a layer's neurons that have slots
LAGS = (1, 8, 32)
POLICY = "lfu"  # the engine's
HOT_SHARE = 0.8  # `skew` is the share of neurons that makes this share of all activations
MISSED = 0.02  # of the activations' mass, what a predictor may miss


@dataclass(frozen=True)
class ActivityStatistics:
    """What makes a model's activity kind or unkind. Means over layers; shares from 0 to 1.

    active   share of active neurons
    skew     share of neurons that makes 80 % of the activations
    varies   deviation of a token's active neurons, over their mean
    hits     of the engine's cache, by the share of neurons that have slots
    overlap  share of a token's active neurons that an earlier token has too, by the distance between them
    lasting  share of a passage's later half that falls on the earlier half's hottest 30 % of the neurons:
             it is smaller the more topics drift
    early    share that is right of as many neurons as are active, if gates read the residual stream before
             the layer's attention
    ahead    the same, if they read the FFN input of the layer before; the median of the layers
    named    neurons that a predictor names for an active one, if it misses 2 % of the activations' mass
    """

    active: float
    skew: float
    varies: float
    hits: dict[str, float]
    overlap: dict[str, float]
    lasting: float
    early: float
    ahead: float
    named: float


@dataclass(frozen=True)
class Passage:
    """What one layer saw of a passage [tokens, dim], and what it did [tokens, neurons]."""

    before: F32  # the residual stream before attention
    read: F32  # the same behind it
    record: F32

    @property
    def active(self) -> Bool:
        active: Bool = self.record != 0
        return active


class Watch(CpuOps):
    """The native ops. They keep what each layer of a dense FFN sees and does."""

    def begin(self) -> None:
        self.before: list[list[F32]] = []
        self.found: list[list[tuple[F32, F32]]] = []

    def step(self, *args: Any, **more: Any) -> Any:
        self._layer = 0
        return super().step(*args, **more)

    def begin_ffn(
        self, x: F32, bound: Any, sparsity: str, *, shares: F32 | None = None, apart: bool = False
    ) -> F32:
        if self._layer == len(self.before):
            self.before.append([])
            self.found.append([])
        self.before[self._layer].append(x.copy())
        return x.copy() if apart else x

    def ffn_add(
        self,
        x: F32,
        h: F32,
        bound: Any,
        sparsity: str,
        stats: FFNStats,
        record: F32 | None = None,
        *,
        shares: F32 | None = None,
    ) -> None:
        read, record = h.copy(), np.empty((len(x), bound.neurons), np.float32)
        super().ffn_add(x, h, bound, sparsity, stats, record, shares=shares)
        self.found[self._layer].append((read, record))
        self._layer += 1


class Watched:
    """A dense ReLU model whose layers are watched."""

    def __init__(self, pack: Pack, threads: int) -> None:
        assert pack.spec.sparse and pack.spec.n_experts == 1, "a dense ReLU model"
        self.pack, self.spec = pack, pack.spec
        self._loaded = weights.load(pack, threads=threads)
        self._ops = Watch(threads)
        self._passages = Passages(self.spec, self._loaded.weights, opaque(self._ops), TOKENS)

    def read(self, ids: Sequence[int]) -> list[Passage]:
        """Compute a passage. -> what each layer saw and did."""
        self._ops.begin()
        for _ in self._passages.compute(np.asarray(ids, np.int32)):
            pass
        return [
            Passage(np.concatenate(before), *(np.concatenate(part) for part in zip(*found, strict=True)))
            for before, found in zip(self._ops.before, self._ops.found, strict=True)
        ]

    def normed(self, layer: int, stream: F32) -> F32:
        return ffn_input(self.spec, self._loaded.weights.layers[layer], stream, opaque(self._ops))

    def margins(self, layer: int, stream: F32) -> F32:
        """Return how far each gate is above its threshold if it reads this stream [tokens, neurons]."""
        gate = self._loaded.weights.layers[layer].experts[0].part.gate
        return self._ops.matmul(gate.weight, self.normed(layer, stream), gate.bias) - np.float32(
            self.spec.activation_threshold
        )


def measure(
    model: Watched,
    measured: Sequence[Sequence[int]],
    fitted: Sequence[Sequence[int]],
    frequency: Sequence[F64],
    rank: int,
) -> ActivityStatistics:
    """Return the statistics of the `measured` passages. A predictor of `rank` is fitted to the `fitted`.

    `frequency`: how often each neuron of each layer is active [neurons].
    """
    # by layer, then by passage
    layers = list(zip(*(model.read(ids) for ids in measured), strict=True))
    inputs = list(zip(*([p.read for p in model.read(ids)] for ids in fitted), strict=True))
    active = [[p.active for p in passages] for passages in layers]

    def foreseen(i: int, streams: Sequence[F32]) -> float:
        return right(np.concatenate([model.margins(i, x) for x in streams]), np.concatenate(active[i]))

    return ActivityStatistics(
        active=_mean(a.mean() for each in active for a in each),
        skew=_mean(map(skew, frequency)),
        varies=_mean(_varies(np.concatenate([a.sum(axis=1) for a in each])) for each in active),
        hits={f"{s:.0%}": _mean(map(lambda a, f: hits(a, f, s), active, frequency)) for s in HELD},
        overlap={str(lag): _mean(overlap(each, lag) for each in active) for lag in LAGS},
        lasting=_mean(map(lasting, active)),
        early=_mean(foreseen(i, [p.before for p in each]) for i, each in enumerate(layers)),
        # The first layer can make nearly all that the second's gates read: the bundled model's has 18 %.
        ahead=float(np.median([foreseen(i, [p.read for p in layers[i - 1]]) for i in range(1, len(layers))])),
        named=_mean(named(model, i, np.concatenate(inputs[i]), each, rank) for i, each in enumerate(layers)),
    )


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _varies(counts: NDArray[np.int64]) -> float:
    return float(counts.std() / counts.mean())


def skew(frequency: F64) -> float:
    """Return the share of neurons that makes `HOT_SHARE` of the activations."""
    most = -np.sort(-frequency)
    return float(np.searchsorted(most.cumsum(), HOT_SHARE * most.sum()) / len(most))


def hits(passages: Sequence[Bool], frequency: F64, share: float) -> float:
    """Return the share of active neurons that the engine's cache finds, over passages of one layer."""
    order = np.argsort(-frequency, kind="stable")
    missed = 0
    for active in passages:
        needs = active[:, order]
        cache = POLICIES[POLICY](needs, round(share * len(order)), frequency[order], 0)
        missed += sum(len(cache.step(np.flatnonzero(row))) for row in needs)
    return 1 - missed / sum(int(a.sum()) for a in passages)


def overlap(passages: Sequence[Bool], lag: int) -> float:
    """Return the share of a token's active neurons that the token `lag` before has, too."""
    both = sum(int((a[lag:] & a[:-lag]).sum()) for a in passages)
    return both / sum(int(a[lag:].sum()) for a in passages)


def lasting(passages: Sequence[Bool], share: float = 0.3) -> float:
    """Return the share of later halves' activations on the neurons that were hottest in the earlier."""
    found = total = 0
    for active in passages:
        earlier, later = (half.sum(axis=0) for half in np.array_split(active, 2))
        hottest = np.argsort(-earlier, kind="stable")[: round(share * active.shape[1])]
        found, total = found + int(later[hottest].sum()), total + int(later.sum())
    return found / total


def right(guess: F32, active: Bool) -> float:
    """Return the share of the best guesses that are active, of as many as are active."""
    count = int(active.sum())
    return float(active.ravel()[np.argpartition(guess.ravel(), -count)[-count:]].mean())


def named(model: Watched, layer: int, fitted: F32, measured: Sequence[Passage], rank: int) -> float:
    """Return how many neurons a layer's predictor names for an active one. All share one threshold."""
    first, second = svd(gate_rows(model.pack, layer), model.normed(layer, fitted), rank, seed=layer)
    read, record = (
        np.concatenate(part) for part in zip(*((p.read, p.record) for p in measured), strict=True)
    )
    scores = (model.normed(layer, read) @ first.T) @ second.T
    bias = f"layers.{layer}.gate.bias"
    assert bias not in model.pack.tensors, "gates without biases"
    active = record != 0
    mass = np.abs(record[active]).astype(np.float64)
    order = np.argsort(scores[active])
    threshold = scores[active][order][np.searchsorted(mass[order].cumsum(), MISSED * mass.sum())]
    return float((scores >= threshold).sum() / active.sum())


# ---- tokens


def of_texts(
    model: Watched, texts: Sequence[Path], passages: int
) -> tuple[list[list[int]], list[list[int]], list[F64]]:
    """Return (passages to measure, passages to fit predictors to, frequencies).

    `passages` are measured of each text. Frequencies are over all others.
    """
    measured: list[list[int]] = []
    others: list[list[int]] = []
    for path in texts:
        ids = text_tokens(model.pack, path, TOKENS * EVERY * passages)
        cut = [ids[at : at + TOKENS] for at in range(0, len(ids), TOKENS)]
        measured += cut[::EVERY]
        others += [p for i, p in enumerate(cut) if i % EVERY]
    counts = [np.zeros(model.spec.ffn_dim) for _ in range(model.spec.n_layers)]
    for ids in others:
        for count, passage in zip(counts, model.read(ids), strict=True):
            count += passage.active.sum(axis=0)
    return measured, others[::EVERY], [count / (len(others) * TOKENS) for count in counts]


def of_random_tokens(model: Watched, passages: int) -> tuple[list[list[int]], list[list[int]], list[F64]]:
    """Return the same of a synthetic model: as many passages are measured as fitted to."""
    ids = random_tokens(model.spec, 1, 2 * passages * TOKENS)
    cut = [ids[at : at + TOKENS] for at in range(0, len(ids), TOKENS)]
    with np.load(model.pack.path / TRUTH) as truth:
        frequency = list(truth["activity"][:, 0].astype(np.float64))
    return cut[:passages], cut[passages:], frequency


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], help="texts to read (default: random tokens)"
    )
    parser.add_argument("--passages", type=int, default=6, help="passages to measure (of each text)")
    parser.add_argument(
        "--rank", type=int, help="of the predictors (default: a quarter of the model's width)"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = Watched(Pack.open(args.pack), args.threads)
    tokens = (
        of_texts(model, args.text, args.passages) if args.text else of_random_tokens(model, args.passages)
    )
    about = asdict(measure(model, *tokens, args.rank or model.spec.dim // 4))
    if args.json:
        print(json.dumps(about))
        return
    for name, value in about.items():
        said = value if isinstance(value, dict) else {"": value}
        print(f"{name:8} " + "  ".join(f"{key} {v:.3f}".strip() for key, v in said.items()))


if __name__ == "__main__":
    main()
