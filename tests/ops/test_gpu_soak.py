"""Random requests on random placements, with trouble: whoever finishes has the tokens that it has alone.

    SOAK_S=600 python -m pytest tests/test_gpu_soak.py -s       # ten minutes instead of six seconds

Each round is a session of its own on the stand-in: prompts of all lengths that share beginnings, up to four
requests at a time that come and go, steps that Ctrl-C or a fault of the device breaks off, requests that are
given up, contexts filled to the last position. Then nothing is left of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import placements
import pytest
import torch
from test_gpu import opt_pack, pack_of, storage

from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.request import Request
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import DeviceFailure
from thermocline.model.quant import decode
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_sizes import StepLimits
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan.placement import Placement
from thermocline.session import gpu_weights

pytestmark = pytest.mark.oracle

SECONDS = float(os.environ.get("SOAK_S", "6"))
CONTEXT, BATCH = 64, 4
# Nats by which a likelihood may differ. Other batches are added up in another order: 1e-5, or 1e-4 where that
# rounds a key to another f16. Where weights have blocks the CPU makes int8 of activations: 0.02.
ROUNDING = {"f32": 1e-3, "f16": 1e-3, "q4_0": 0.1}
GROWTH_BYTES = 16 << 20  # of a process in all its rounds


class Unruly(StandIn):
    """Every so often a call fails as a driver's would, or Ctrl-C comes in the midst of it."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.rng, self.trouble, self.met = rng, 0.0, Counter[str]()

    def _maybe(self, likelier: float = 1.0) -> None:
        if self.rng.random() < self.trouble * likelier:
            error = DeviceFailure("stand-in: it failed") if self.rng.random() < 0.5 else KeyboardInterrupt()
            self.met[type(error).__name__] += 1
            raise error

    def run(self, kernel: Any, *args: Any) -> None:
        self._maybe()
        super().run(kernel, *args)

    def copy(self, to: Any, source: Any) -> None:
        self._maybe()
        super().copy(to, source)

    def call(self, task: Any) -> None:
        self._maybe(4)
        super().call(task)

    def wait(self, tasks: Sequence[Any], mark: object = None) -> None:
        self._maybe(20)
        super().wait(tasks, mark)


def lossless(pack: Pack) -> Predictors:
    """Those of all neurons that may be active, and of some that are not: the gates' own singular vectors."""
    s, layers = pack.spec, []
    for i in range(s.n_layers):
        t = pack.tensors[f"layers.{i}.gate.weight"]
        rows = read_tensor(pack, f"layers.{i}.gate.weight").reshape(-1, t.stride)
        gate = decode(t.format, rows, s.dim)
        u, d, v = np.linalg.svd(gate, full_matrices=False)
        never = np.full(s.ffn_dim, -0.5 * float(np.abs(gate).sum(1).mean()), np.float32)
        layers.append(LayerPredictor("svd", v, np.ascontiguousarray(u * d), None, never, 0))
    return Predictors.of(s, layers)


@dataclass(frozen=True)
class Model:
    pack: Pack
    predictors: Predictors | None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Model]:
    def at(name: str) -> Path:
        return tmp_path_factory.mktemp(name)

    sparse = [pack_of(at("f32"), "f32"), pack_of(at("q4"), "q4_0"), opt_pack(at("opt"), "f32")]
    dense = [
        pack_of(at("silu"), "f16", hidden_act="silu"),
        pack_of(at("tied"), "f32", tie_word_embeddings=True),
    ]
    return [*(Model(p, lossless(p)) for p in sparse[:1]), *(Model(p, None) for p in [*sparse, *dense])]


def random_places(pack: Pack, rng: np.random.Generator) -> Placement:
    s = pack.spec
    counts = [0, 32, 96, 256, s.ffn_dim] if s.sparse else [0, s.ffn_dim]
    layers = tuple(
        placements.layer(s, bool(rng.integers(2)), bool(rng.integers(2)), int(rng.choice(counts)))
        for _ in range(s.n_layers)
    )
    return Placement(layers, "gpu:0" if rng.integers(2) else "cpu")


@dataclass
class Session:
    """An engine over one placement, and one that serves a request at a time."""

    model: Model
    places: Placement
    sparsity: str
    send_from: int
    rng: np.random.Generator
    device: Unruly = field(init=False)
    weights: Weights = field(init=False)

    def __post_init__(self) -> None:
        self.device = Unruly(self.rng)
        self.ops, self.other = self._ops(), self._ops()
        predictors = self.model.predictors if self.sparsity == "predict" else None
        self.weights = gpu_weights.load(
            self.model.pack, self.places, (self.device,), self.ops.cpu, predictors=predictors
        )
        tokens = int(self.rng.integers(CONTEXT, BATCH * CONTEXT + 1))
        self.engine = self._engine(self.ops, tokens, BATCH, int(self.rng.choice([7, 16, 64])))

    def _ops(self) -> GpuOps:
        s = self.model.pack.spec
        limits = StepLimits(CONTEXT + BATCH, BATCH, CONTEXT, BLOCK, s.ffn_dim)
        return GpuOps((self.device,), torch_kernels, CpuOps(1), s, limits, self.send_from)

    def _engine(self, ops: GpuOps, tokens: int, batch: int, chunk: int) -> Engine:
        settings = EngineSettings(CONTEXT, batch, self.sparsity, prefill_chunk=chunk, kv_tokens=tokens)
        return Engine(self.model.pack.spec, self.weights, ops, settings, storage=storage(self.places))

    def alone(self, r: Request) -> Request:
        """The same again, in a cache and with recordings of its own."""
        self.other.forget()  # a cache's recordings are of it alone
        engine = self._engine(self.other, CONTEXT, 1, CONTEXT)
        again = engine.submit(r.ids[: r.n_prompt], r.params)
        while again.finish_reason is None:
            engine.step()
        return again

    def close(self) -> None:
        self.device.close()


def prompts(rng: np.random.Generator, vocab: int) -> list[list[int]]:
    """Of three beginnings, cut anywhere, with anything behind: often whole blocks in common."""
    roots = [rng.integers(3, vocab, CONTEXT).tolist() for _ in range(3)]
    made = []
    for _ in range(int(rng.integers(8, 16))):
        cut = int(rng.choice([1, 5, BLOCK, BLOCK + 1, CONTEXT - 1, CONTEXT, int(rng.integers(1, CONTEXT))]))
        own = rng.integers(3, vocab, int(rng.integers(0, CONTEXT - cut + 1))).tolist()
        made.append(roots[int(rng.integers(3))][:cut] + own)
    return made


def served(s: Session, found: Counter[str]) -> list[Request]:
    """All requests to their end, some given up, whatever breaks a step off."""
    rng, engine = s.rng, s.engine
    coming = prompts(rng, s.model.pack.spec.vocab_size)
    requests: list[Request] = []
    s.device.trouble = float(rng.choice([0, 0.001, 0.004]))
    while coming or engine.running or engine.waiting:
        for _ in range(int(rng.integers(0, 4)) if coming else 0):
            if coming:
                room = int(rng.choice([1, 2, 9, CONTEXT]))
                params = SamplingParams(
                    max_tokens=room, temperature=float(rng.choice([0, 0.8])), seed=int(rng.integers(1 << 30)),
                    ignore_eos=bool(rng.integers(2)), logprobs=8
                )  # fmt: skip
                requests.append(engine.submit(coming.pop(), params))
        try:
            engine.step()
            found["steps"] += 1
        except (DeviceFailure, KeyboardInterrupt):
            found["broken off"] += 1
            if engine.running and rng.random() < 0.5:
                engine.cancel(engine.running[int(rng.integers(len(engine.running)))])
        if rng.random() < 0.02 and requests:
            engine.cancel(requests[int(rng.integers(len(requests)))])
    s.device.trouble = 0
    return requests


def differs(r: Request, alone: Request, tolerance: float, found: Counter[str]) -> str | None:
    """How, beyond rounding: likelihoods that differ, or a token where they do not differ enough for it."""
    for i, (a, b) in enumerate(zip(r.token_ids, alone.token_ids, strict=False)):
        here, there = (dict(x.logprobs[i].top) for x in (r, alone))
        off = max(abs(here[t] - there[t]) for t in {*here} & {*there})
        if off > tolerance:
            return f"token {i}: {off:.1e} nats, {here}, alone {there}"
        if a != b:  # rounding decided, between two that are as likely or at a border of what is drawn
            found["swapped in q4_0" if tolerance == ROUNDING["q4_0"] else "swapped"] += 1
            top = sorted(there.values())[-2:]
            greedy = r.params.temperature == 0
            return f"token {i} is {a}, alone {b}: {there}" if greedy and top[1] - top[0] > tolerance else None
    return None if len(r.token_ids) == len(alone.token_ids) else "another length"


def one_round(model: Model, rng: np.random.Generator, found: Counter[str]) -> weakref.ref[GpuOps]:
    modes = ["exact", "off"] if model.pack.spec.sparse else ["off"]
    sparsity = "predict" if model.predictors is not None else str(rng.choice(modes))
    # With blocks of q4_0 the CPU rounds activations and the device does not: sent or not, tokens may differ.
    sends = model.pack.weight_format == "f32" and rng.random() < 0.5
    s = Session(
        model, random_places(model.pack, rng), sparsity, int(rng.choice([3, 12])) if sends else 1 << 31, rng
    )
    try:
        for _ in range(2):
            requests = served(s, found)
            s.engine.check_integrity()
            assert s.engine.kv.used == 0
            recorded = s.ops.recorded
            assert all(tokens <= 16 for tokens, *_ in recorded)
            assert len(recorded) <= 16 * BATCH + 2 * BATCH  # logits, or tokens in two turns
            tasks = {key: len(p.tasks) for key, p in recorded.items()}
            assert len({(n, k.sparsity) for k, n in tasks.items() if k.tokens > 4}) <= 4, tasks
            for r in requests:
                found[str(r.finish_reason)] += 1
                if r.finish_reason in ("length", "stop"):
                    found["tokens"] += len(r.token_ids)
                    found["tokens in q4_0"] += len(r.token_ids) * (model.pack.weight_format == "q4_0")
                    found["reused"] += r.cached
                    assert r.error is None and len(r.ids) <= CONTEXT + 1
                    why = differs(r, s.alone(r), ROUNDING[model.pack.weight_format], found)
                    assert why is None, (why, s.sparsity, s.places, s.send_from, s.device.met)
        found.update(s.device.met)
        return weakref.ref(s.ops)
    finally:
        s.close()


def resident_bytes() -> int:
    """Without what the C library keeps for later, where it can be told not to."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


def test_whatever_happens_beside_it_a_request_has_the_tokens_that_it_has_alone(models: list[Model]) -> None:
    torch.set_num_threads(1)
    seed = int(os.environ.get("SOAK_SEED", "0"))
    found, begin, rounds, at_first = Counter[str](), time.monotonic(), 0, 0
    threads = threading.active_count()
    while time.monotonic() - begin < SECONDS or rounds < len(models):
        rng = np.random.default_rng([seed, rounds])
        try:
            left = one_round(models[rounds % len(models)], rng, found)
        except BaseException as e:
            e.add_note(f"SOAK_SEED={seed}, round {rounds}")
            raise
        gc.collect()
        assert left() is None, "something keeps a session that has ended"
        assert threading.active_count() == threads
        rounds += 1
        if rounds == len(models):
            at_first = resident_bytes()
    print(f"{rounds} rounds, {dict(found)}, {(resident_bytes() - at_first) / 2**20:+.1f} MiB")
    assert found["swapped"] <= 2 + found["tokens"] / 1000
    # Likelihoods in q4_0 differ by 0.02 to 0.04: 11 draws of 4,470 tokens, of all formats, fell between.
    assert found["swapped in q4_0"] <= 3 + found["tokens in q4_0"] / 20
    assert found["length"] > rounds and found["reused"] and found["broken off"] and found["cancelled"]
    assert resident_bytes() - at_first < GROWTH_BYTES
