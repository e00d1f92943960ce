"""An FFN whose neurons are on disk gives the bits of memory: whatever is cached, evicted, or read late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import bad_reads
import numpy as np
import pytest
from numpy.typing import NDArray

from thermocline import _native
from thermocline.model import quant
from thermocline.model.modes import SPARSITIES
from thermocline.model.spec import ACTIVATIONS

F32 = NDArray[np.float32]
DIM, NEURONS = 96, 700
HERE = 1536  # where the bundles begin in the file: a multiple of 512


@dataclass(frozen=True)
class Neurons:
    """One random FFN: gate rows and bundle records as they are stored."""

    format: str
    gate: NDArray[np.uint8]  # [neurons, row bytes]
    records: NDArray[np.uint8]  # [neurons, stride]
    bias: F32 | None
    gated: bool
    file: Path
    gate_at: int  # in the file
    gate_stride: int

    @property
    def row(self) -> int:
        return int(self.gate.shape[1])

    @property
    def stride(self) -> int:
        return int(self.records.shape[1])


def neurons(
    path: Path, fmt: str = "f32", *, gated: bool = True, bias: bool = False, neurons: int = NEURONS
) -> Neurons:
    rng = np.random.default_rng(7)

    def rows(scale: float) -> NDArray[np.uint8]:
        values = (scale * rng.standard_normal((neurons, DIM))).astype(np.float32)
        return quant.encode(fmt, values).reshape(neurons, -1)

    gate, down = rows(1.0), rows(0.3)
    parts = [rows(1.0), down] if gated else [down]
    stride = -(-sum(p.shape[1] for p in parts) // 64) * 64
    records = rng.integers(0, 255, (neurons, stride), dtype=np.uint8)  # padding: anything
    records[:, : sum(p.shape[1] for p in parts)] = np.concatenate(parts, axis=1)
    gate_stride = -(-gate.shape[1] // 64) * 64
    gates = np.zeros((neurons, gate_stride), np.uint8)
    gates[:, : gate.shape[1]] = gate
    gate_at = HERE + records.size + 512
    content = bytes(HERE) + records.tobytes() + bytes(512) + gates.tobytes()
    path.write_bytes(content + bytes(-len(content) % 4096))
    biases = (0.3 * rng.standard_normal(neurons)).astype(np.float32) if bias else None
    return Neurons(fmt, gate, records, biases, gated, path, gate_at, gate_stride)


@dataclass
class Case:
    """The same FFN, twice: in memory and on disk."""

    made: Neurons
    activation: str = "relu"
    up_relu: bool = False
    sub_norm: bool = False
    predictor: tuple[F32, float] | None = None  # scores' matrix, threshold

    def _ffn(
        self,
        gate: _native.Matrix,
        parts: list[_native.Matrix],
        *,
        disk: _native.DiskRows | None = None,
        gate_disk: _native.DiskRows | None = None,
    ) -> _native.FFN:
        n = len(self.made.gate)
        sub = _native.Norm(np.linspace(0.5, 1.5, n, dtype=np.float32), None, 1e-5, False)
        predictor = None
        if self.predictor is not None:
            matrix, threshold = self.predictor
            arena = _native.Arena(matrix.nbytes)
            arena.write(0, np.ascontiguousarray(matrix).view(np.uint8).ravel())
            second = _native.Matrix(arena, 0, quant.FORMATS["f32"].id, n, DIM, 4 * DIM)
            predictor = _native.Predictor(None, second, np.full(n, threshold, np.float32), 40, False)
        bias = self.made.bias
        return _native.FFN(
            norm=None,
            gate=_native.Linear(gate, bias if gate_disk is None else None),
            up=parts[0] if self.made.gated else None,
            down=parts[-1],
            down_bias=np.linspace(-1, 1, DIM, dtype=np.float32),
            activation=ACTIVATIONS.index(self.activation),
            threshold=0.0,
            up_relu=self.up_relu,
            bundles=True,
            sub_norm=sub if self.sub_norm else None,
            join=_native.Join(None, 1.0),
            predictor=predictor,
            disk=disk,
            gate_disk=gate_disk,
            gate_bias=bias if gate_disk is not None else None,
        )

    def _parts(self, arena: _native.Arena, at: int, rows: int) -> list[_native.Matrix]:
        m = self.made
        fmt = quant.FORMATS[m.format].id
        offsets = (at, at + m.row) if m.gated else (at,)
        return [_native.Matrix(arena, o, fmt, rows, DIM, m.stride) for o in offsets]

    def _gate(self, arena: _native.Arena) -> _native.Matrix:
        m = self.made
        return _native.Matrix(arena, 0, quant.FORMATS[m.format].id, len(m.gate), DIM, m.row)

    def in_memory(self) -> _native.FFN:
        m = self.made
        at = -(-m.gate.size // 64) * 64
        arena = _native.Arena(at + m.records.size)
        arena.write(0, m.gate.ravel())
        arena.write(at, m.records.ravel())
        return self._ffn(self._gate(arena), self._parts(arena, at, len(m.gate)))

    def on_disk(
        self,
        hot: int,
        quota: int,
        *,
        gates: tuple[int, int] | None = None,
        disable: int = 0,
        likely: F32 | None = None,
        depth: int = 8,
        method: str = "",
        buffer_bytes: int = 8192,
        path: Path | None = None,
        reader: _native.Reader | None = None,
    ) -> tuple[_native.FFN, _native.DiskRows]:
        m = self.made
        n, slots = len(m.gate), hot + quota + _native.limits().stream_slots
        if reader is None:
            reader = _native.Reader(
                str(path or m.file), depth=depth, buffer_bytes=buffer_bytes, method=method
            )
        at = -(-m.gate.size // 64) * 64
        arena = _native.Arena(at + slots * m.stride)
        arena.write(0, m.gate.ravel())
        pool = _native.SlotPool(arena, at, m.stride, slots)
        crc = np.array([_native.crc32c(r) for r in m.records], np.uint32)
        rows = _native.DiskRows(pool, reader, HERE, n, hot, quota, crc, "layers.3.bundle", disable, likely)
        rows.load()
        parts = self._parts(arena, at, slots)
        if gates is None:
            return self._ffn(self._gate(arena), parts, disk=rows), rows
        gate, gate_rows = self._gates_on_disk(reader, *gates, disable)
        return self._ffn(gate, parts, disk=rows, gate_disk=gate_rows), rows

    def _gates_on_disk(
        self, reader: _native.Reader, hot: int, quota: int, disable: int
    ) -> tuple[_native.Matrix, _native.DiskRows]:
        m = self.made
        slots = hot + quota + _native.limits().stream_slots
        arena = _native.Arena(slots * m.gate_stride)
        pool = _native.SlotPool(arena, 0, m.gate_stride, slots)
        crc = np.array([_native.crc32c(bytes(r) + bytes(m.gate_stride - m.row)) for r in m.gate], np.uint32)
        rows = _native.DiskRows(
            pool,
            reader,
            m.gate_at,
            len(m.gate),
            hot,
            quota,
            crc,
            "layers.3.gate",
            disable & ~_native.NO_BUNDLE,
        )
        rows.load()
        fmt = quant.FORMATS[m.format].id
        return _native.Matrix(arena, 0, fmt, slots, DIM, m.gate_stride), rows


def calls(seed: int = 0, tokens: tuple[int, ...] = (1, 3, 1, 9, 1, 70, 2, 1)) -> Iterator[F32]:
    rng = np.random.default_rng(seed)
    for n in tokens:
        yield rng.standard_normal((n, DIM)).astype(np.float32)


def run(
    ffn: _native.FFN,
    sparsity: str,
    *,
    threads: int = 2,
    isa: str = "",
    record: bool = False,
    ahead: float | None = None,
) -> list[bytes]:
    """The bytes of each call. `ahead`: reads are begun beforehand, for an input that is so far off."""
    context = _native.Context(threads, isa)
    rng = np.random.default_rng(1)
    out = []
    for h in calls():
        if ahead is not None:
            about = h + np.float32(ahead) * rng.standard_normal(h.shape).astype(np.float32)
            context.read_ahead(about, ffn, SPARSITIES[sparsity])
        out.append(call(context, ffn, h, sparsity, record=record))
    return out


def call(context: _native.Context, ffn: _native.FFN, h: F32, sparsity: str, *, record: bool = False) -> bytes:
    x = np.ones_like(h)
    kept = np.zeros((len(h), ffn.neurons), np.float32) if record else None
    counts = context.ffn_add(x, h, ffn, SPARSITIES[sparsity], kept)
    return x.tobytes() + (b"" if kept is None else kept.tobytes()) + bytes(str(counts), "ascii")


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A call that would wait for ever is ended."""

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


QUOTAS = (0, 1, 2, 7, 64, 255, 256, 300, 443)


@pytest.mark.parametrize("sparsity", ["exact", "off"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("hot", [0, 256, 512])
def test_any_number_of_slots_gives_the_bits_of_memory(
    tmp_path: Path, hot: int, threads: int, sparsity: str
) -> None:
    case = Case(neurons(tmp_path / "f"))
    wanted = run(case.in_memory(), sparsity)
    for quota in QUOTAS:
        ffn, _ = case.on_disk(hot, min(quota, NEURONS - hot))
        assert run(ffn, sparsity, threads=threads) == wanted, quota


def scores(n: int = NEURONS) -> tuple[F32, float]:
    return np.random.default_rng(3).standard_normal((n, DIM)).astype(np.float32), 4.0


def kind(path: Path, name: str) -> Case:
    """FFNs that take other ways through the walk."""
    match name:
        case "dReLU":
            return Case(neurons(path, "q8_0"), up_relu=True)
        case "ungated with biases":
            return Case(neurons(path, "f16", gated=False, bias=True))
        case "ReLU², sub-norm":
            return Case(neurons(path, "f32"), activation="relu2", sub_norm=True)
        case "no zeros":
            return Case(neurons(path, "q4_0"), activation="silu")
        case "predicted":
            return Case(neurons(path, "q4_0", bias=True), predictor=scores())
        case "predicted dReLU":
            return Case(neurons(path, "bf16"), up_relu=True, predictor=scores())
        case _:
            raise AssertionError(name)


NAMES = ("dReLU", "ungated with biases", "ReLU², sub-norm", "no zeros", "predicted", "predicted dReLU")


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_ffn_gives_the_bits_of_memory(tmp_path: Path, name: str) -> None:
    """Gate rows on disk too: two phases, the bundle is read only where the gate survives."""
    case = kind(tmp_path / "f", name)
    sparsity = "predict" if case.predictor else "exact"
    for isa in ("scalar", ""):
        wanted = run(case.in_memory(), sparsity, isa=isa)
        for gates in (None, (0, 1), (256, 30), (0, 700)):
            ffn, _ = case.on_disk(256, 60, gates=gates)
            assert run(ffn, sparsity, isa=isa) == wanted, gates


@pytest.mark.parametrize("name", NAMES)
def test_many_tokens_give_the_bits_of_memory_whether_listed_or_streamed(tmp_path: Path, name: str) -> None:
    """Up to 64 tokens what they need is listed before it is read; more read all."""
    case = kind(tmp_path / "f", name)
    sparsity = "predict" if case.predictor else "exact"
    for gates in (None, (0, 7), (256, 30)):
        ffn, _ = case.on_disk(100, 60, gates=gates)
        memory, context = case.in_memory(), _native.Context(2, "")
        for h in calls(5, (5, 64, 65, 4, 33, 6)):
            assert call(context, ffn, h, sparsity) == call(context, memory, h, sparsity), (gates, len(h))


def test_a_step_of_many_tokens_reads_what_some_token_needs(tmp_path: Path) -> None:
    """It read every record that was not in memory, as a long prompt does; and what it read was not kept."""
    made = neurons(tmp_path / "f", bias=True)
    rare = replace(made, bias=np.full(NEURONS, -22, np.float32))  # 1 to 2 % active
    hot, quota = 0, 100
    ffn, rows = Case(rare).on_disk(hot, quota)
    context = _native.Context(1, "")
    (h,) = calls(9, (8,))
    needed = np.maximum(h @ quant_rows(made).T - 22, 0).any(axis=0)
    assert 20 < needed.sum() < quota
    call(context, ffn, h, "exact")
    first = rows.stats()
    assert (first["needed"], first["missed"]) == (needed.sum(), needed[quota:].sum())
    call(context, ffn, h, "exact")
    assert rows.stats()["missed"] == first["missed"]  # all of it was kept: nothing else was asked for yet


@pytest.mark.parametrize(("hot", "quota"), [(0, 3), (0, 60), (0, 300), (256, 40), (100, 250)])
@pytest.mark.parametrize("profiled", [False, True])
def test_a_replay_misses_in_each_step_what_the_engine_misses(
    tmp_path: Path, hot: int, quota: int, profiled: bool
) -> None:
    """The same policy code over the same slots; one thread, so that chunks are asked for in one order."""
    rng = np.random.default_rng(4)
    plain = neurons(tmp_path / "f", gated=False, bias=True)
    made = replace(plain, bias=rng.uniform(-30, -5, NEURONS).astype(np.float32))  # few to half are active
    likely = np.sort(rng.random(NEURONS)).astype(np.float32)[::-1].copy() if profiled else None
    ffn, rows = Case(made).on_disk(hot, quota, likely=likely)
    memory, context = Case(made).in_memory(), _native.Context(1)
    replayed = _native.CacheReplay("lfu", neurons=NEURONS, hot=hot, slots=quota, likely=likely)
    found, missed = np.empty(NEURONS, np.int32), 0
    for h in calls(6, (1,) * 40 + (3, 1) * 20):
        record = np.zeros((len(h), NEURONS), np.float32)
        context.ffn_add(np.ones_like(h), h, memory, SPARSITIES["exact"], record)
        needed = np.flatnonzero(record.any(axis=0)).astype(np.int32)
        call(context, ffn, h, "exact")
        missed += replayed.step(needed, found)
        assert rows.stats()["missed"] == missed
    assert rows.stats()["needed"] > missed > 100


def quant_rows(made: Neurons) -> F32:
    return made.gate.view(np.float32)


@pytest.mark.parametrize("disable", range(8))
@pytest.mark.parametrize("method", ["", "threads"])
def test_switches_and_ways_to_read_change_no_bit(tmp_path: Path, disable: int, method: str) -> None:
    case = Case(neurons(tmp_path / "f", "q8_0"))
    ffn, _ = case.on_disk(256, 50, disable=disable, method=method, depth=3)
    assert run(ffn, "exact") == run(case.in_memory(), "exact")


# ---- reads that are begun before the call


@pytest.mark.parametrize("gates", [None, (0, 33), (0, 300), (100, 100)])
@pytest.mark.parametrize("quota", [0, 50, 300])
@pytest.mark.parametrize("ahead", [0.0, 0.3, 10.0])
def test_reading_ahead_changes_no_bit(
    tmp_path: Path, ahead: float, quota: int, gates: tuple[int, int] | None
) -> None:
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    wanted = run(case.in_memory(), "predict")
    for threads in (1, 2):
        ffn, _ = case.on_disk(0, quota, gates=gates, depth=4)
        for _ in range(2):
            assert run(ffn, "predict", threads=threads, ahead=ahead) == wanted


def test_what_was_read_ahead_is_not_read_again(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    found = []
    for ahead in (None, 0.0):
        ffn, rows = case.on_disk(0, 100)
        run(ffn, "predict", ahead=ahead)
        found.append(rows.stats())
    assert found[0]["needed"] == found[1]["needed"]
    for key in ("missed", "bytes"):  # who is evicted depends on the order of reads, a little
        assert found[1][key] <= 1.05 * found[0][key]


def test_reading_ahead_begins_reads_only_where_something_is_predicted(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    context, h = _native.Context(2), next(calls())
    for sparsity, disable in (("exact", 0), ("off", 0), ("predict", _native.NO_PIPELINE), ("predict", 0)):
        ffn, rows = case.on_disk(0, 0, disable=disable, depth=256)
        context.read_ahead(h, ffn, SPARSITIES[sparsity])
        assert bool(rows.stats()["reads"]) == (sparsity == "predict" and not disable)


def early_figures(
    context: _native.Context,
    ffn: _native.FFN,
    rows: _native.DiskRows,
    draw: Callable[[], tuple[F32, F32]],
    n: int,
) -> tuple[int, int]:
    """Return (late, in vain) of n calls: records that were not asked for early, and those nobody needed."""
    before = rows.stats()
    for _ in range(n):
        about, h = draw()
        context.read_ahead(about, ffn, SPARSITIES["predict"])
        call(context, ffn, h, "predict")
    found = {key: value - before[key] for key, value in rows.stats().items()}
    return found["missed"] - found["early_used"], found["early"] - found["early_used"]


@pytest.mark.parametrize("off", [0.3, 1.0])
def test_a_late_record_costs_what_three_read_in_vain_do_in_each_layer(tmp_path: Path, off: float) -> None:
    """Trained gates say less before attention than planted ones: each layer finds a threshold of its own."""
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=(scores()[0], -1e9))  # the gate alone decides
    ffn, rows = case.on_disk(0, 0)
    context, rng = _native.Context(1), np.random.default_rng(0)

    def draw() -> tuple[F32, F32]:
        h, noise = rng.standard_normal((2, 1, DIM)).astype(np.float32)
        return h + np.float32(off) * noise, h

    first = early_figures(context, ffn, rows, draw, 5)
    early_figures(context, ffn, rows, draw, 60)
    late, vain = early_figures(context, ffn, rows, draw, 60)
    assert 2.5 < vain / late < 3.6, (first, late, vain)
    assert late / 60 < 0.8 * first[0] / 5


def test_reads_that_nobody_comes_for_are_let_go(tmp_path: Path) -> None:
    """A step that ends between the two: the next one begins anew, and so can a layer's end."""
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    wanted = run(case.in_memory(), "predict")
    context, inputs = _native.Context(2), list(calls(seed=5))
    ffn, _ = case.on_disk(0, 60, gates=(0, 60), depth=4)
    for h in inputs:
        context.read_ahead(h, ffn, SPARSITIES["predict"])
    assert run(ffn, "predict") == wanted
    context.read_ahead(inputs[0], ffn, SPARSITIES["predict"])
    del ffn, _
    other, _ = case.on_disk(0, 60)
    context.read_ahead(inputs[0], other, SPARSITIES["predict"])
    assert run(other, "predict") == wanted


@pytest.mark.parametrize("method", ["io_uring", "threads"])
def test_reads_begun_for_one_layer_do_not_disturb_anothers(tmp_path: Path, method: str) -> None:
    """Ctrl-C while attention is computed: the next step begins with the first layer, and its reads have the
    same buffers. It took the other's for its own, and waited without end.
    """
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    reader = _native.Reader(str(tmp_path / "f"), depth=16, buffer_bytes=8192, method=method)
    left, _ = case.on_disk(0, 60, gates=(0, 60), reader=reader)
    called, _ = case.on_disk(0, 60, gates=(0, 60), reader=reader)
    context = _native.Context(2)
    for h, wanted in zip(calls(), run(case.in_memory(), "predict"), strict=True):
        context.read_ahead(h[:1], left, SPARSITIES["predict"])
        with within(20):
            assert call(context, called, h, "predict") == wanted
    assert run(left, "predict") == run(case.in_memory(), "predict")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads: that is what is tried
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_process_is_refused_and_does_not_hang(tmp_path: Path, threads: int) -> None:
    """The reads are its parent's: it asked again and again for one that never came."""
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    ffn, _ = case.on_disk(0, 60, depth=16)
    context, h = _native.Context(threads), next(calls())
    context.read_ahead(h, ffn, SPARSITIES["predict"])
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            call(context, ffn, h, "predict")
        except RuntimeError as e:
            os._exit(0 if "forked" in str(e) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert call(context, ffn, h, "predict") == run(case.in_memory(), "predict")[0]


@pytest.mark.parametrize("record", [False, True])
def test_reads_begun_for_one_token_do_not_disturb_a_prompts(tmp_path: Path, record: bool) -> None:
    """Nor a recorded token's, which goes the prompts' way."""
    case = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores())
    ffn, _ = case.on_disk(0, 60, gates=(0, 60), depth=16)
    context, wanted = _native.Context(2), run(case.in_memory(), "predict", record=record)
    for h, bits in zip(calls(), wanted, strict=True):
        context.read_ahead(h[:1], ffn, SPARSITIES["predict"])
        with within(20):
            assert call(context, ffn, h, "predict", record=record) == bits


def test_what_is_recorded_is_the_same(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f", "f16"))
    ffn, _ = case.on_disk(0, 100)
    assert run(ffn, "exact", record=True) == run(case.in_memory(), "exact", record=True)


def test_many_threads_share_few_slots(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f", "q8_0", neurons=3000))
    wanted = run(case.in_memory(), "exact")
    for threads in (3, 9):
        ffn, _ = case.on_disk(256, 5)
        assert run(ffn, "exact", threads=threads) == wanted


def test_what_was_needed_most_is_kept(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f"))
    ffn, rows = case.on_disk(0, 400)
    context = _native.Context(1)
    h = np.random.default_rng(1).standard_normal((1, DIM)).astype(np.float32)
    missed = []
    for _ in range(4):
        before = rows.stats()["missed"]
        context.ffn_add(np.ones_like(h), h, ffn, SPARSITIES["exact"])
        missed.append(rows.stats()["missed"] - before)
    assert 100 < missed[0] < 300, "the first 400 were there"
    assert missed[1:] == [0, 0, 0], "all active ones (half of 700) fit"


@pytest.mark.parametrize("threads", [1, 3])
def test_more_misses_than_the_call_has_slots_evict_nothing_likelier(tmp_path: Path, threads: int) -> None:
    neurons_, quota = 4000, 300
    likely = np.zeros(neurons_, np.float32)
    likely[:quota] = 1
    ffn, rows = Case(neurons(tmp_path / "f", "q8_0", neurons=neurons_)).on_disk(0, quota, likely=likely)
    context = _native.Context(threads)
    for i, h in enumerate(calls(tokens=(1,) * 4)):
        call(context, ffn, h, "off")
        assert rows.stats()["missed"] == (i + 1) * (neurons_ - quota)


def test_slots_follow_what_the_profile_says_is_likely(tmp_path: Path) -> None:
    """A neuron needed once does not push out those of which half the tokens are said to need each."""
    made = neurons(tmp_path / "f")
    likely = np.zeros(NEURONS, np.float32)
    likely[:300] = 0.5
    case = Case(made)
    ffn, rows = case.on_disk(0, 300, likely=likely)
    context = _native.Context(1)
    for h in calls(tokens=(1,) * 6):
        context.ffn_add(np.ones_like(h), h, ffn, SPARSITIES["exact"])
    stats = rows.stats()
    hits = stats["needed"] - stats["missed"]
    assert abs(hits / stats["needed"] - 300 / NEURONS) < 0.05


def test_a_prompt_says_which_neurons_its_continuation_needs(tmp_path: Path) -> None:
    """Its 70 tokens outweigh a profile that speaks for others; one token does not.

    One thread: neurons needed equally often push each other out in the order in which they are asked for.
    """
    made = neurons(tmp_path / "f")
    likely = np.zeros(NEURONS, np.float32)
    likely[:100] = 1
    context, h = _native.Context(1), next(calls(seed=3))
    hits = []
    for tokens in (1, 70):
        ffn, rows = Case(made).on_disk(0, 100, likely=likely)
        for n in (tokens, 1, 1):  # the second call reads what the first one spoke for
            before = rows.stats()
            x = np.repeat(h, n, axis=0)
            context.ffn_add(np.ones_like(x), x, ffn, SPARSITIES["exact"])
        after = rows.stats()
        needed, missed = (after[key] - before[key] for key in ("needed", "missed"))
        hits.append(needed - missed)
    assert hits[0] < 70 and hits[1] == 100


def test_slots_go_back_to_the_pool(tmp_path: Path) -> None:
    made = neurons(tmp_path / "f")
    arena = _native.Arena((100 + _native.limits().stream_slots) * made.stride)
    pool = _native.SlotPool(arena, 0, made.stride, 100 + _native.limits().stream_slots)
    reader = _native.Reader(str(made.file), depth=2, buffer_bytes=8192)
    crc = np.zeros(NEURONS, np.uint32)
    for _ in range(3):
        rows = _native.DiskRows(pool, reader, HERE, NEURONS, 60, 40, crc)
        assert pool.free == 0
        with pytest.raises(ValueError, match="too few slots"):
            _native.DiskRows(pool, reader, HERE, NEURONS, 0, 1, crc)
        del rows
        assert pool.free == 100


# ---- faults


@pytest.mark.parametrize("many", [False, True])
def test_a_damaged_record_is_named_and_the_rest_lives_on(tmp_path: Path, many: bool) -> None:
    case = Case(neurons(tmp_path / "f", "q8_0", bias=True))
    wanted = run(case.in_memory(), "off")
    ffn, _ = case.on_disk(100, 50)
    content = bytearray((tmp_path / "f").read_bytes())
    at = HERE + 444 * case.made.stride + 3
    content[at] ^= 1
    (tmp_path / "f").write_bytes(content)
    x = np.ones((9 if many else 1, DIM), np.float32)
    context = _native.Context(2)
    for _ in range(3):
        with pytest.raises(_native.DiskError) as error:
            context.ffn_add(x.copy(), x, ffn, SPARSITIES["off"])
        assert error.value.args == (0, "layers.3.bundle", 444, True)  # the file was written to
    content[at] ^= 1
    (tmp_path / "f").write_bytes(content)
    assert run(ffn, "off") == wanted


def guessed_in_vain(case: Case, seed: int) -> tuple[F32, F32, int]:
    """An input, a guess at it, and a neuron whose gate is open for the guess and that no cache has yet.

    The input does not need the neuron, nor its gate.
    """
    assert case.predictor is not None
    (matrix, threshold), rng = case.predictor, np.random.default_rng(seed)
    h, guess = (rng.standard_normal((1, DIM)).astype(np.float32) for _ in range(2))
    gates = quant.decode(case.made.format, case.made.gate, DIM) @ guess[0]
    found = (matrix @ guess[0] > threshold + 2) & (gates > 2) & (matrix @ h[0] < threshold - 2)
    return h, guess, int(np.flatnonzero(found)[-1])


@contextmanager
def damaged(m: Neurons, neuron: int) -> Iterator[None]:
    whole = m.file.read_bytes()
    content = bytearray(whole)
    content[HERE + neuron * m.stride] ^= 1
    content[m.gate_at + neuron * m.gate_stride] ^= 1
    m.file.write_bytes(content)
    try:
        yield
    finally:
        m.file.write_bytes(whole)


@pytest.mark.parametrize("gates", [None, (0, 60)])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_read_ahead_in_vain_may_be_damaged(
    tmp_path: Path, threads: int, gates: tuple[int, int] | None
) -> None:
    """The call ended with the error of a neuron that it did not need."""
    case, context = Case(neurons(tmp_path / "f", "q8_0"), predictor=scores()), _native.Context(threads)
    memory = case.in_memory()
    for seed in range(4):
        h, guess, neuron = guessed_in_vain(case, seed)
        ffn, rows = case.on_disk(0, 60, gates=gates)
        with damaged(case.made, neuron):
            context.read_ahead(guess, ffn, SPARSITIES["predict"])
            with within(20):
                assert call(context, ffn, h, "predict") == call(context, memory, h, "predict")
            assert gates or rows.stats()["early"] > 0
            context.read_ahead(guess, ffn, SPARSITIES["predict"])
            with pytest.raises(_native.DiskError) as error:
                call(context, ffn, guess, "predict")
            assert error.value.args[2] == neuron
        assert run(ffn, "predict", ahead=0.3) == run(memory, "predict"), "no slot is lost"


def test_a_file_that_ends_early_is_said_to(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f"))
    ffn, _ = case.on_disk(0, 50)
    size = HERE + 300 * case.made.stride // 512 * 512
    with (tmp_path / "f").open("r+b") as f:
        f.truncate(size)
    with pytest.raises(_native.DiskError) as error:
        run(ffn, "off")
    assert error.value.args[0] == -1 and error.value.args[2] >= 290


def test_hot_neurons_that_cannot_be_read_are_an_error_of_loading(tmp_path: Path) -> None:
    case = Case(neurons(tmp_path / "f"))
    with (tmp_path / "f").open("r+b") as f:
        f.truncate(HERE + 4096)
    with pytest.raises(_native.DiskError, match=r"layers\.3\.bundle"):
        case.on_disk(256, 0)


FAULTS = """
import ctypes, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_disk import *
from thermocline import _native
bad, seen = ctypes.CDLL(None).bad_reads, ctypes.CDLL(None).bad_reads_seen
bad(b"none")
path, method = Path(sys.argv[2]), sys.argv[3]
case = Case(neurons(path, "q8_0", neurons=600), predictor=scores(600))
wanted = run(case.in_memory(), "predict")
errors = met = 0
each = [b"%s %d" % (kind, n) for n in range(1, 400, STEP) for kind in (b"eio", b"end")]
ffn, _ = case.on_disk(0, 60, gates=(0, 60), method=method, depth=4)
for how in (b"short", b"interrupted", b"busy", *each):
    bad(how)
    try:
        assert run(ffn, "predict", ahead=0.3 if sys.argv[4:] else None) == wanted, how
    except _native.DiskError as e:
        errors += 1
        assert how[:3] in (b"eio", b"end"), (how, e)
        assert e.args[0] == (5 if how[:3] == b"eio" else -1) and e.args[1].startswith("layers.3."), (how, e)
        assert 0 <= e.args[2] < 600
    met += how in each and seen() >= int(how.split()[1])
    bad(b"none")
    assert run(ffn, "predict") == wanted, how
print(met, errors)
"""


@pytest.mark.parametrize("step", [35, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [(), ("ahead",)])
@pytest.mark.parametrize("method", ["io_uring", "threads"])
def test_whichever_read_fails_there_are_the_same_bits_or_an_error(
    tmp_path: Path, method: str, ahead: tuple[str, ...], step: int
) -> None:
    """Every `step`th read of some calls, in a process of its own; afterwards all is well again.

    A call of few tokens that has reads ahead begins again, and a read fails once: it ends few calls or none.
    """
    code = FAULTS.replace("STEP", str(step))
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, os.pathsep.join(sys.path), str(tmp_path / "f"), method, *ahead],
        env={**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "none")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    met, errors = map(int, run.stdout.split())
    assert met > 140 // step and errors <= met
    assert ahead or errors > 140 // step


STOPPED = """
import ctypes, os, signal, sys, threading, time
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_disk import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
case = Case(neurons(Path(sys.argv[2]), "q8_0"))
wanted = run(case.in_memory(), "off")
ffn, _ = case.on_disk(0, 60, method="threads")

def stopped(work):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        work()
        raise AssertionError("not stopped")
    except KeyboardInterrupt:
        print(time.monotonic() - begin)

def call(tokens):
    h = np.ones((tokens, DIM), np.float32)
    return lambda: _native.Context(2).ffn_add(h.copy(), h, ffn, SPARSITIES["off"])

for tokens in (1, 9):
    bad(b"slow 1000")
    stopped(call(tokens))
    bad(b"none")
    assert run(ffn, "off") == wanted
bad(b"slow 60000")
stopped(call(1))
stopped(call(1))  # which has to wait for what the first left behind
stopped(lambda: case.on_disk(100, 60, method="threads"))
"""


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    """Each read takes a second, then a minute. What is still under way when the call ends spoils nothing,
    and the process does not wait for it.
    """
    begin = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-P", "-c", STOPPED, os.pathsep.join(sys.path), str(tmp_path / "f")],
        env={**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "none")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == 5 and all(0.3 <= float(line) < 40 for line in run.stdout.split())
    assert time.monotonic() - begin < 50


ASKED = """
import ctypes, os, sys, threading
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_disk import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
case = Case(neurons(Path(sys.argv[2]), "q8_0"))
wanted = run(case.in_memory(), "off")
ffn, _ = case.on_disk(0, 60, method="threads", depth=64)
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
bad(b"slow 51")
for _ in range(2):
    assert run(ffn, "off") == wanted
"""


def test_a_signal_looked_for_while_the_last_read_ends_hangs_nobody(tmp_path: Path) -> None:
    """The thread that looks waits for Python, milliseconds here, and all may be done when it is back."""
    command = [sys.executable, "-P", "-c", ASKED, os.pathsep.join(sys.path), str(tmp_path / "f")]
    environment = {**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "none")}
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0
