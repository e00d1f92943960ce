"""Experts that come from disk give the bits of memory: whatever is cached, evicted, or read late."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bad_reads
import numpy as np
import pytest
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.model import block_layout, quant
from thermocline.model.modes import SPARSITIES
from thermocline.model.spec import ACTIVATIONS, PLAIN_ROUTER, Router
from thermocline.ops.cpu import disk_error, native_rule

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
EXPERTS, ACTIVE = 12, 3
DEPTH, PIECE = 8, 16384
NAMES = ("blk.3.ffn_gate_exps.weight", "blk.3.ffn_up_exps.weight", "blk.3.ffn_down_exps.weight")
PLAIN = _native.Join(None, 1.0)
SCALES: F32 = np.linspace(1, 2, EXPERTS, dtype=np.float32)  # of experts, where a router has some


def aligned(n: int, to: int = 64) -> int:
    return -(-n // to) * to


def state(path: Path) -> tuple[str, tuple[int, int, int, int]]:
    s = os.stat(path)
    return str(path), (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


@dataclass(frozen=True)
class Slab:
    """One matrix of all experts: planar rows, and where they begin in the file that has them."""

    format: str
    planar: U8  # [experts, rows, bytes]
    columns: int
    part: int = 0
    at: tuple[int, ...] = ()  # of each expert

    @property
    def rows(self) -> int:
        return int(self.planar.shape[1])

    @property
    def stride(self) -> int:
        return int(self.planar.shape[2])

    @property
    def bytes(self) -> int:
        return self.rows * self.stride


@dataclass(frozen=True)
class Model:
    """Random experts, as a GGUF (of perhaps two parts) has them, or as a pack has them."""

    slabs: tuple[Slab, ...]  # gate, perhaps up, down
    files: tuple[Path, ...]
    dim: int
    neurons: int
    packed: bool
    bias: bool
    shared: bool
    rng: int = 11
    router: Router = PLAIN_ROUTER

    @property
    def offsets(self) -> list[int]:
        """Where each slab begins in a slot, and where the slot ends: behind what a kernel may read."""
        ends = [0]
        for s in self.slabs:
            ends.append(aligned(ends[-1] + s.bytes))
        ends[-1] = aligned(ends[-2] + self.slabs[-1].bytes + _native.limits().arena_padding)
        return ends


def model(
    directory: Path,
    formats: Sequence[str] = ("q4_0", "q4_0", "q4_0"),
    *,
    dim: int = 256,
    neurons: int = 512,
    parts: int = 1,
    packed: bool = False,
    gated: bool = True,
    bias: bool = False,
    shared: bool = False,
) -> Model:
    rng = np.random.default_rng(5)
    shapes = ((neurons, dim), (neurons, dim), (dim, neurons))
    chosen = [(f, s) for i, (f, s) in enumerate(zip(formats, shapes, strict=True)) if gated or i != 1]
    contents = [bytearray(rng.bytes(77)) for _ in range(parts)]  # slabs begin anywhere
    slabs = []
    for n, (fmt, (rows, columns)) in enumerate(chosen):
        values = rng.standard_normal((EXPERTS * rows, columns), np.float32) / np.float32(columns**0.5)
        planar = quant.encode(fmt, values)
        stored = planar if packed else block_layout.to_gguf(fmt, planar)
        each = stored.reshape(EXPERTS, rows, -1)
        part, at = n % parts, []
        for e in range(EXPERTS):
            at.append(len(contents[part]))
            contents[part] += each[e].tobytes()
        contents[part] += rng.bytes(33)
        slabs.append(Slab(fmt, planar.reshape(EXPERTS, rows, -1), columns, part, tuple(at)))
    last = slabs[-1].part
    del contents[last][-33:]  # the file ends with a slab, at no multiple of anything
    files = []
    for i, content in enumerate(contents):
        files.append(directory / f"model-{i}.gguf")
        files[-1].write_bytes(content)
    return Model(tuple(slabs), tuple(files), dim, neurons, packed, bias, shared)


@dataclass
class Bound:
    """A mixture over all experts in memory, or over slots."""

    mixture: _native.Mixture
    context: _native.Context
    rows: _native.DiskExperts | None = None
    kept: list[Any] = field(default_factory=list)

    def guess(self, h: F32) -> None:
        """Read ahead for what the router picks for `h`."""
        self.context.read_ahead(h, self.mixture, SPARSITIES["exact"])

    def run(self, h: F32, record: bool = False) -> bytes:
        x = np.ones_like(h)
        neurons = np.zeros((len(h), self.mixture.neurons), np.float32) if record else None
        counts = self.context.moe_add(x, h, self.mixture, SPARSITIES["exact"], neurons)
        return x.tobytes() + (b"" if neurons is None else neurons.tobytes()) + str(counts).encode()

    def stats(self) -> dict[str, int]:
        assert self.rows is not None
        return self.rows.stats()


def mixture(m: Model, matrices: Sequence[Sequence[_native.Matrix]], disk: _native.DiskExperts | None) -> Any:
    rng = np.random.default_rng(m.rng)

    def floats(*shape: int) -> F32:
        return rng.standard_normal(shape, np.float32)

    def plain(values: F32) -> _native.Matrix:
        arena = _native.Arena(values.nbytes)
        arena.write(0, np.ascontiguousarray(values).view(np.uint8).ravel())
        rows, columns = values.shape
        return _native.Matrix(arena, 0, quant.FORMATS["f32"].id, rows, columns, 4 * columns)

    def ffn(
        gate: _native.Matrix, up: _native.Matrix | None, down: _native.Matrix, neurons: int
    ) -> _native.FFN:
        biases = [floats(neurons), floats(neurons), floats(m.dim)] if m.bias else [None] * 3
        return _native.FFN(
            norm=None,
            gate=_native.Linear(gate, biases[0]),
            up=up,
            down=down,
            down_bias=biases[2],
            activation=ACTIVATIONS.index("silu"),
            threshold=0.0,
            up_relu=False,
            bundles=False,
            sub_norm=None,
            join=PLAIN,
            up_bias=biases[1] if up is not None else None,
        )

    experts = tuple(
        ffn(each[0], each[1] if len(each) == 3 else None, each[-1], m.neurons) for each in matrices
    )
    router = _native.Linear(plain(floats(EXPERTS, m.dim)), None)
    wide = 96
    every = plain(floats(wide, m.dim)), plain(floats(wide, m.dim)), plain(floats(m.dim, wide))
    return _native.Mixture(
        norm=_native.Norm(1 + floats(m.dim) / np.float32(8), None, 1e-5, False),
        router=router,
        experts=experts,
        active=ACTIVE,
        join=PLAIN,
        rule=native_rule(m.router),
        expert_scale=SCALES if m.router.expert_scale else None,
        shared=ffn(*every, wide) if m.shared else None,
        disk=disk,
    )


def matrices(m: Model, arena: _native.Arena, at: int, native: _native.Context, *, grouped: bool) -> list[Any]:
    made = []
    for s, offset in zip(m.slabs, m.offsets, strict=False):
        group = native.group if grouped else 1
        shape = s.rows, s.columns, s.stride
        made.append(_native.Matrix(arena, at + offset, quant.FORMATS[s.format].id, *shape, group))
    return made


def grouped(m: Model, native: _native.Context) -> bool:
    return all(s.rows % native.group == 0 and quant.FORMATS[s.format].block > 1 for s in m.slabs)


def in_memory(m: Model, *, threads: int = 2, isa: str = "", groups: bool = False) -> Bound:
    native = _native.Context(threads, isa)
    slot = m.offsets[-1]
    arena = _native.Arena(EXPERTS * slot)
    every = []
    for e in range(EXPERTS):
        for s, at in zip(m.slabs, m.offsets, strict=False):
            arena.write(e * slot + at, s.planar[e].ravel())
        planar = matrices(m, arena, e * slot, native, grouped=False)
        every.append([native.interleaved(arena, w) if groups else w for w in planar])
    return Bound(mixture(m, every, None), native)


def on_disk(
    m: Model,
    quota: int,
    passing: int = 6,
    *,
    threads: int = 2,
    isa: str = "",
    groups: bool = False,
    files: _native.ExpertFiles | None = None,
    load: bool = True,
    disable: int = 0,
    method: str = "",
    names: Sequence[str] = NAMES,
    piece: int = PIECE,
    first: int = 0,
) -> Bound:
    """`first`: which of `files` is the model's first one."""
    native = _native.Context(threads, isa)
    slots, slot = quota + passing, m.offsets[-1]
    arena = _native.Arena(slots * slot)
    pool = _native.SlotPool(arena, 0, slot, slots, passing)
    files = files or _native.ExpertFiles(
        list(map(state, m.files)), depth=DEPTH, piece_bytes=piece, method=method
    )
    group = native.group if groups else 1
    runs = [
        [
            (s.format, s.columns, first + s.part, s.at[e], s.rows, to, s.stride, None, group, 0)
            for s, to in zip(m.slabs, m.offsets, strict=False)
        ]
        for e in range(EXPERTS)
    ]
    rows = _native.DiskExperts(
        pool, files, runs, quota, names[: len(m.slabs)], planar=m.packed, disable=disable
    )
    if load:
        rows.load(threads)
    each = matrices(m, arena, 0, native, grouped=groups)
    return Bound(mixture(m, [each] * EXPERTS, rows), native, rows, [arena, pool])


def calls(dim: int, tokens: Sequence[int] = (1, 1, 3, 1, 40, 1, 2, 70, 1, 8), seed: int = 0) -> Iterator[F32]:
    rng = np.random.default_rng(seed)
    for n in tokens:
        yield rng.standard_normal((n, dim)).astype(np.float32)


def assert_bits_of_memory(m: Model, memory: Bound, disk: Bound, tokens: Sequence[int] = ()) -> None:
    for i, h in enumerate(calls(m.dim, tokens) if tokens else calls(m.dim)):
        assert disk.run(h) == memory.run(h), (i, len(h))


QUOTAS = ((0, 1), (0, 2), (1, 1), (3, 6), (7, 2), (EXPERTS, 1), (EXPERTS - 1, 24))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_slots_gives_the_bits_of_memory(tmp_path: Path, threads: int) -> None:
    """Fewer slots than a token's experts, too: the experts of a call come in waves."""
    m = model(tmp_path, shared=True)
    memory = in_memory(m)
    for quota, passing in QUOTAS:
        assert_bits_of_memory(m, memory, on_disk(m, quota, passing, threads=threads))


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_every_format_gives_the_bits_of_memory(
    tmp_path: Path, format: str, packed: bool, groups: bool
) -> None:
    m = model(tmp_path, (format,) * 3, neurons=256, dim=256, packed=packed)
    native = _native.Context(1)
    if groups and not grouped(m, native):
        pytest.skip("rows of this format are never in groups")
    memory, disk = in_memory(m, groups=groups), on_disk(m, 4, groups=groups)
    assert_bits_of_memory(m, memory, disk, (1, 3, 1, 40, 1))


KINDS = {
    "formats of its own for each matrix": ({"formats": ("q4_k", "q5_k", "q6_k")}, True),
    "floats beside blocks": ({"formats": ("f16", "q8_0", "q4_0")}, False),
    "biases": ({"bias": True}, True),
    "ungated": ({"gated": False, "bias": True}, False),
    "two parts": ({"parts": 2, "shared": True}, True),
    "three parts": ({"parts": 3}, False),
    "a pack": ({"packed": True, "shared": True, "bias": True}, True),
    "groups that end within a piece": ({"dim": 1024, "neurons": 288}, False),
    "rows of a piece each": ({"formats": ("f32", "f32", "f32"), "neurons": 1792, "dim": 64}, False),
}


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_mixture_gives_the_bits_of_memory(tmp_path: Path, name: str, isa: str) -> None:
    options, can_group = KINDS[name]
    m = model(tmp_path, **options)  # type: ignore[arg-type]
    for groups in {False, can_group and grouped(m, _native.Context(1, isa))}:
        memory, disk = in_memory(m, isa=isa, groups=groups), on_disk(m, 4, isa=isa, groups=groups)
        assert_bits_of_memory(m, memory, disk, (1, 4, 1, 1, 33, 1))


@pytest.mark.parametrize("method", ["threads", "io_uring"])
@pytest.mark.parametrize("disable", [_native.NO_CACHE, _native.NO_PIPELINE, 7])
def test_switches_change_no_bit(tmp_path: Path, method: str, disable: int) -> None:
    m = model(tmp_path)
    assert_bits_of_memory(m, in_memory(m), on_disk(m, 5, disable=disable, method=method))


def test_a_recorded_call_gives_the_neurons_of_memory(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m, 2)
    for h in calls(m.dim, (1, 9, 30)):
        assert disk.run(h, record=True) == memory.run(h, record=True)


def test_layers_share_the_slots_that_are_the_calls(tmp_path: Path) -> None:
    """Two layers, one pool: what passes for one is gone for the other."""
    m = model(tmp_path)
    native, slot, quota, passing = _native.Context(2), m.offsets[-1], 3, 2
    arena = _native.Arena((2 * quota + passing) * slot)
    pool = _native.SlotPool(arena, 0, slot, 2 * quota + passing, passing)
    files = _native.ExpertFiles(list(map(state, m.files)), depth=DEPTH, piece_bytes=PIECE)
    layers = []
    for order in (range(EXPERTS), range(EXPERTS - 1, -1, -1)):
        runs = [
            [(s.format, s.columns, s.part, s.at[e], s.rows, to, s.stride, None, 1, 0)
             for s, to in zip(m.slabs, m.offsets, strict=False)]
            for e in order
        ]  # fmt: skip
        rows = _native.DiskExperts(pool, files, runs, quota, NAMES)
        rows.load()
        each = matrices(m, arena, 0, native, grouped=False)
        layers.append(Bound(mixture(m, [each] * EXPERTS, rows), native, rows))
    assert pool.free == 0
    turned = replace(m, slabs=tuple(replace(s, planar=s.planar[::-1]) for s in m.slabs))
    memory = [in_memory(m), in_memory(turned)]
    for h in calls(m.dim):
        for layer, wanted in zip(layers, memory, strict=True):
            assert layer.run(h) == wanted.run(h)


# ---- what is read ahead


@pytest.mark.parametrize("method", ["threads", "io_uring"])
@pytest.mark.parametrize("disable", [0, _native.NO_CACHE, _native.NO_PIPELINE])
@pytest.mark.parametrize(("quota", "passing"), [(0, 1), (3, 2), (6, 6)])
def test_no_guess_changes_a_bit_or_an_expert(
    tmp_path: Path, quota: int, passing: int, disable: int, method: str
) -> None:
    """Guesses that are right, wrong, and for a call of many tokens that comes in place of theirs."""
    m = model(tmp_path, shared=True)
    memory = in_memory(m)
    plain, ahead = (on_disk(m, quota, passing, disable=disable, method=method) for _ in range(2))
    others = list(calls(m.dim, seed=1))
    for i, h in enumerate(calls(m.dim)):
        ahead.guess(h if i % 2 else others[i])
        if i % 3 == 0:
            ahead.guess(others[i])
        assert ahead.run(h) == plain.run(h) == memory.run(h), i
    found, wanted = ahead.stats(), plain.stats()
    assert (found["needed"], found["missed"]) == (wanted["needed"], wanted["missed"])
    assert (found["early"] > 0) == (disable != _native.NO_PIPELINE)
    if disable == _native.NO_CACHE:
        assert 0 < found["early_used"] <= found["early"]


def test_a_right_guess_reads_nothing_twice(tmp_path: Path) -> None:
    m = model(tmp_path, neurons=32)
    disk, plain = on_disk(m, 0), on_disk(m, 0)
    for h in calls(m.dim, (1,) * 8):
        disk.guess(h)
        assert disk.run(h) == plain.run(h)
    found, wanted = disk.stats(), plain.stats()
    assert (found["reads"], found["bytes"]) == (wanted["reads"], wanted["bytes"])
    assert found["early_used"] == found["early"] > 0


def test_a_layer_that_is_guessed_badly_is_seldom_guessed(tmp_path: Path) -> None:
    m = model(tmp_path)
    disk = on_disk(m, 4)
    for h in calls(m.dim, (1,) * 60):
        disk.guess(-h)  # what the router likes least
        disk.run(h)
    assert disk.stats()["early_used"] == 0
    assert 0 < disk.stats()["early"] < 60


@dataclass(frozen=True)
class Layers:
    """Layers behind one queue of reads, each of which reads ahead for those behind it; their models."""

    models: tuple[Model, ...]
    disk: tuple[Bound, ...]

    @staticmethod
    def of(
        directory: Path,
        quota: int | Sequence[int] = 2,
        passing: int = 6,
        *,
        layers: int = 2,
        neurons: int = 512,
        depth: int = DEPTH,
        method: str = "",
        disable: int = 0,
    ) -> Layers:
        models = []
        for i, name in enumerate(("first", "second", "third", "fourth")[:layers]):
            (directory / name).mkdir()
            models.append(replace(model(directory / name, neurons=neurons, shared=True), rng=11 + i))
        names = [state(m.files[0]) for m in models]
        files = _native.ExpertFiles(names, depth=depth, piece_bytes=PIECE, method=method)
        quotas = [quota] * layers if isinstance(quota, int) else quota
        bound = [
            on_disk(m, quotas[i], passing, files=files, first=i, disable=disable)
            for i, m in enumerate(models)
        ]
        for one, other in pairwise(bound):
            one.mixture.before(other.mixture)
        return Layers(tuple(models), tuple(bound))


@pytest.mark.parametrize("method", ["threads", "io_uring"])
@pytest.mark.parametrize("disable", [0, _native.NO_CACHE, _native.NO_PIPELINE])
@pytest.mark.parametrize("depth", [2, DEPTH, 64])
def test_no_guess_beside_the_layer_before_changes_a_bit_or_an_expert(
    tmp_path: Path, depth: int, disable: int, method: str
) -> None:
    """Guesses that are right, wrong, made twice, or for calls that never come or have many tokens."""
    both = Layers.of(tmp_path, neurons=256, depth=depth, disable=disable, method=method)
    memory = [in_memory(m) for m in both.models]
    plain = [on_disk(m, 2, disable=disable) for m in both.models]
    (first, second), others = both.disk, list(calls(256, seed=1))
    for i, h in enumerate(calls(256)):
        assert first.run(h) == plain[0].run(h) == memory[0].run(h), i
        if i % 4 == 1:
            continue  # its call never comes
        if i % 4 == 2:
            second.guess(others[i])
        for each in (h, others[i]) if i % 3 else (others[i],):
            assert second.run(each) == plain[1].run(each) == memory[1].run(each), i
    for layer, wanted in zip(both.disk, plain, strict=True):
        found, alone = layer.stats(), wanted.stats()
        assert (found["needed"], found["missed"]) == (alone["needed"], alone["missed"])
    ahead = disable != _native.NO_PIPELINE and depth > 3
    assert (second.stats()["early"] > 0) == ahead and (second.stats()["early_used"] > 0) == ahead


def test_a_right_guess_beside_the_layer_before_reads_nothing_twice(tmp_path: Path) -> None:
    both = Layers.of(tmp_path, 0, neurons=32, depth=32)
    first, second = both.disk
    alone = on_disk(both.models[1], 0)
    for h in calls(256, (1,) * 8):
        first.run(h)
        assert second.run(h) == alone.run(h)
    found, wanted = second.stats(), alone.stats()
    assert (found["reads"], found["bytes"]) == (wanted["reads"], wanted["bytes"])
    assert found["early_used"] == found["early"] == found["missed"] > 0


def test_a_layer_that_is_guessed_badly_beside_the_one_before_may_still_be_guessed_by_itself(
    tmp_path: Path,
) -> None:
    first, second = Layers.of(tmp_path, 0, neurons=32, depth=32).disk
    for h in calls(256, (1,) * 60):
        first.run(h)
        second.guess(-h)
        second.run(-h)  # what the router likes least of what the layer before has read
    found = second.stats()
    assert 60 < found["early_used"] < found["early"] < found["early_used"] + 60


def test_wrong_bytes_that_a_layer_before_has_read_are_told_if_they_are_needed(tmp_path: Path) -> None:
    both = Layers.of(tmp_path, 0, neurons=32, depth=32)
    first, second = both.disk
    assert_wrong_bytes_are_told_if_needed(both.models[1], second, first.run)


# ---- two layers before


@pytest.mark.parametrize("method", ["threads", "io_uring"])
@pytest.mark.parametrize("disable", [0, _native.NO_CACHE, _native.NO_PIPELINE])
@pytest.mark.parametrize("depth", [2, DEPTH, 64])
def test_no_guess_two_layers_before_changes_a_bit_or_an_expert(
    tmp_path: Path, depth: int, disable: int, method: str
) -> None:
    """Guesses that are right, wrong, or for calls that never come or have many tokens."""
    all_three = Layers.of(tmp_path, layers=3, neurons=128, depth=depth, disable=disable, method=method)
    memory = [in_memory(m) for m in all_three.models]
    plain = [on_disk(m, 2, disable=disable) for m in all_three.models]
    others = list(calls(256, seed=1))
    for i, h in enumerate(calls(256)):
        for n, each in enumerate(all_three.disk):
            if i % 5 == n + 1:
                break  # the step ends here
            for x in (h, others[i]) if i % 3 == n else (h,):
                assert each.run(x) == plain[n].run(x) == memory[n].run(x), (i, n)
    for layer, wanted in zip(all_three.disk, plain, strict=True):
        found, alone = layer.stats(), wanted.stats()
        assert (found["needed"], found["missed"]) == (alone["needed"], alone["missed"])
    ahead = disable != _native.NO_PIPELINE and depth > 3
    assert (all_three.disk[2].stats()["early_used"] > 0) == ahead


def test_a_right_guess_two_layers_before_reads_nothing_twice(tmp_path: Path) -> None:
    """The layer between would guess something else: what is found was asked for before it."""
    all_three = Layers.of(tmp_path, 0, layers=3, neurons=32, depth=128)
    first, second, third = all_three.disk
    memory, used = in_memory(all_three.models[2]), 0
    for h in calls(256, (1,) * 4):
        before = third.stats()["early"]
        first.run(h)
        assert third.stats()["early"] == before + ACTIVE
        second.run(-h)
        begun = third.stats()
        assert begun["early"] <= before + 2 * ACTIVE
        assert third.run(h) == memory.run(h)
        used += ACTIVE
        found = third.stats()
        assert (found["early_used"], found["reads"]) == (used, begun["reads"])


def test_the_next_layer_is_read_ahead_before_the_one_behind_it(tmp_path: Path) -> None:
    """An expert has three pieces. So the next layer's nine want more buffers than guesses may have."""
    first, second, third = Layers.of(tmp_path, 0, layers=3, neurons=32, depth=DEPTH).disk
    (h,) = calls(256, (1,))
    first.run(h)
    assert second.stats()["early"] > 0 and third.stats()["early"] == 0


def test_what_a_layer_guessed_wrongly_two_layers_before_has_its_buffers_no_longer(tmp_path: Path) -> None:
    first, second, third = Layers.of(tmp_path, 0, layers=3, neurons=32, depth=128).disk
    (h,) = calls(256, (1,))
    for n in (1, 2):
        first.run(h)
        assert third.stats()["early"] == n * ACTIVE  # none of them lies there from before
        second.run(h)
        third.run(-h)
    assert third.stats()["early_used"] == 0


def test_a_call_drops_what_was_read_ahead_for_layers_that_have_been_passed_over(tmp_path: Path) -> None:
    first, _, third, fourth = Layers.of(tmp_path, 0, layers=4, neurons=32, depth=128).disk
    (h,) = calls(256, (1,))
    for n in (1, 2, 3):
        first.run(h)
        assert third.stats()["early"] == n * ACTIVE
        fourth.run(h)


def test_a_layer_that_is_guessed_badly_two_layers_before_is_still_guessed_by_the_next(
    tmp_path: Path,
) -> None:
    first, second, third = Layers.of(tmp_path, 0, layers=3, neurons=32, depth=128).disk
    for h in calls(256, (1,) * 60):
        first.run(h)
        second.run(-h)  # what the routers like least of what the first layer has read
        third.run(-h)
    found = third.stats()
    assert found["early_used"] == 60 * ACTIVE < found["early"] < found["early_used"] + 60


def test_wrong_bytes_that_were_read_two_layers_before_are_told_if_they_are_needed(tmp_path: Path) -> None:
    all_three = Layers.of(tmp_path, 0, layers=3, neurons=32, depth=128)
    first, second, third = all_three.disk

    def guess(h: F32) -> None:
        first.run(h)
        second.run(-h)

    assert_wrong_bytes_are_told_if_needed(all_three.models[2], third, guess)


def test_only_the_next_layer_of_the_same_queue_can_be_read_ahead_beside_another(tmp_path: Path) -> None:
    m = model(tmp_path)
    one, other = on_disk(m, 2), on_disk(m, 2)
    first, _, third = Layers.of(tmp_path, layers=3).disk
    with pytest.raises(ValueError, match="of the next layer"):
        first.mixture.before(third.mixture)
    for next_one in (other.mixture, in_memory(m).mixture, one.mixture):
        with pytest.raises(ValueError):
            one.mixture.before(next_one)


# ---- what is kept, and what is counted


def test_what_is_counted_adds_up(tmp_path: Path) -> None:
    m = model(tmp_path, neurons=256)
    disk = on_disk(m, 6)
    loaded = disk.stats()
    record = sum(s.bytes for s in m.slabs)
    assert loaded["needed"] == loaded["missed"] == loaded["streamed"] == 0
    assert 6 * record <= loaded["bytes"] <= 6 * record + loaded["reads"] * 2 * 4096
    needed = missed = 0
    for h in calls(m.dim, (1,) * 30):
        before = disk.stats()
        disk.run(h)
        now = disk.stats()
        assert now["needed"] - before["needed"] == ACTIVE
        read, new = now["bytes"] - before["bytes"], now["missed"] - before["missed"]
        assert new * record <= read <= new * (record + 3 * 3 * 2 * 4096)
        needed, missed = needed + ACTIVE, missed + new
    assert (disk.stats()["needed"], disk.stats()["missed"]) == (needed, missed)
    assert 0 < missed < needed
    (h,) = calls(m.dim, (50,))
    disk.run(h)
    assert disk.stats()["streamed"] > 0


def test_a_repeated_token_finds_its_experts(tmp_path: Path) -> None:
    m = model(tmp_path)
    disk = on_disk(m, 6, load=False)
    (h,) = calls(m.dim, (1,))
    disk.run(h)
    first = disk.stats()
    assert (first["needed"], first["missed"]) == (ACTIVE, ACTIVE)
    for _ in range(5):
        disk.run(h)
    assert disk.stats()["missed"] == ACTIVE and disk.stats()["bytes"] == first["bytes"]


def test_no_expert_of_a_few_tokens_makes_room_for_another(tmp_path: Path) -> None:
    """Tokens that need nearly all experts, of which nearly all have slots."""
    m = model(tmp_path, neurons=256)
    disk = on_disk(m, EXPERTS - 2, 2)
    for h in calls(m.dim, (4,) * 10):
        before = disk.stats()
        disk.run(h)
        assert disk.stats()["missed"] - before["missed"] <= 2


def test_a_prompt_leaves_the_experts_that_it_used_most(tmp_path: Path) -> None:
    """Where all that was in memory stayed until its turn, what came before it passed: 20 were missed."""
    m = model(tmp_path, neurons=256)
    disk, missed = on_disk(m, 6, 2), 0
    others, often = calls(m.dim, (60, 20))
    for h in often:
        disk.run(np.concatenate([others, np.repeat(h[None], 10, axis=0)]))
        before = disk.stats()["missed"]
        disk.run(h[None])
        missed += disk.stats()["missed"] - before
    assert missed <= 10


# ---- what goes wrong


def failed(disk: Bound, h: F32) -> BadFile | IOFailure:
    with pytest.raises(_native.DiskError) as e:
        disk.run(h)
    return disk_error(e.value)


def damaged(m: Model, slab: int, expert: int, at: int, data: bytes) -> None:
    """Bytes of an expert, overwritten; the file keeps its time."""
    s = m.slabs[slab]
    path = m.files[s.part]
    before = os.stat(path)
    with path.open("r+b") as f:
        f.seek(s.at[expert] + at)
        f.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def chosen(m: Model, h: F32) -> list[int]:
    """The experts that a token goes to, as those that change its answer when they are missing."""
    memory = in_memory(m)
    x = np.zeros((1, m.dim), np.float32)
    record = np.zeros((1, memory.mixture.neurons), np.float32)
    memory.context.moe_add(x, h, memory.mixture, SPARSITIES["exact"], record)
    return list(np.flatnonzero(np.abs(record.reshape(EXPERTS, -1)).sum(axis=1)))


def test_other_bytes_than_at_first_are_told_and_the_cache_lives_on(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m, 0, 6)
    (h,) = calls(m.dim, (1,))
    wanted = memory.run(h)
    assert disk.run(h) == wanted
    expert = chosen(m, h)[1]
    before = m.files[0].read_bytes()
    damaged(m, 2, expert, 1000, b"\x55\xaa\x00\x01")
    error = failed(disk, h)
    assert isinstance(error, BadFile)
    assert f"{m.files[0]}: blk.3.ffn_down_exps.weight, expert {expert}: checksum mismatch" in str(error)
    begin = m.slabs[2].at[expert] + 1000
    damaged(m, 2, expert, 1000, before[begin : begin + 4])
    assert disk.run(h) == wanted


def assert_wrong_bytes_are_told_if_needed(m: Model, disk: Bound, guess: Callable[[F32], object]) -> None:
    """`guess`: reads ahead for a token."""
    memory = in_memory(m)
    (h,) = calls(m.dim, (1,))
    for each in (h, -h):
        assert disk.run(each) == memory.run(each)
    damaged(m, 2, chosen(m, h)[0], 1000, b"\x55\xaa\x00\x01")
    guess(h)
    assert disk.run(-h) == memory.run(-h)
    guess(h)
    assert "checksum mismatch" in str(failed(disk, h))
    guess(h)
    assert disk.run(-h) == memory.run(-h)


def test_wrong_bytes_that_were_read_ahead_are_told_if_they_are_needed(tmp_path: Path) -> None:
    m = model(tmp_path, neurons=32)
    disk = on_disk(m, 0, 6)
    assert_wrong_bytes_are_told_if_needed(m, disk, disk.guess)


@pytest.mark.parametrize("packed", [False, True])
def test_a_scale_that_is_no_number_is_told(tmp_path: Path, packed: bool) -> None:
    m = model(tmp_path, packed=packed)
    (h,) = calls(m.dim, (1,))
    expert = chosen(m, h)[0]
    at = m.slabs[1].stride - 2 if packed else 0  # of row 0: the last scale, or the first
    damaged(m, 1, expert, at, b"\x00\x7e")
    error = failed(on_disk(m, 0, 6), h)
    assert isinstance(error, BadFile)
    assert f"blk.3.ffn_up_exps.weight, expert {expert}: a scale is not a finite number" in str(error)


def test_a_file_that_was_changed_is_told_at_the_first_read_of_an_expert(tmp_path: Path) -> None:
    """No checksum is known yet: only the file's time says that its bytes may be others."""
    m = model(tmp_path)
    disk = on_disk(m, 0, 6)
    os.utime(m.files[0], ns=(1, 1))
    (h,) = calls(m.dim, (1,))
    error = failed(disk, h)
    assert isinstance(error, IOFailure) and "has changed since it was opened" in str(error)


def test_a_file_that_has_changed_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    m = model(tmp_path)
    files = list(map(state, m.files))
    with m.files[0].open("ab") as f:
        f.write(b"more")
    with pytest.raises(_native.DiskError) as e:
        _native.ExpertFiles(files, depth=DEPTH, piece_bytes=PIECE)
    assert str(m.files[0]) in str(disk_error(e.value)) and "has changed" in str(disk_error(e.value))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        _native.ExpertFiles([*files, (str(tmp_path / "nowhere"), files[0][1])], depth=8, piece_bytes=PIECE)


def test_a_file_that_ends_early_is_told_and_the_cache_lives_on(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m, 4)
    whole = m.files[0].read_bytes()
    os.truncate(m.files[0], m.slabs[2].at[1])
    told = 0
    for h in calls(m.dim, (1,) * 6):
        try:
            assert disk.run(h) == memory.run(h)
        except _native.DiskError as e:
            assert "the file ends early" in str(disk_error(e)) or "has changed" in str(disk_error(e))
            told += 1
    assert told
    m.files[0].write_bytes(whole)
    again = on_disk(m, 4)
    assert_bits_of_memory(m, memory, again)


FAULTS = """
import ctypes, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_disk_experts import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
bad(b"none")
method = sys.argv[3]
m = model(Path(sys.argv[2]), parts=2, shared=True, neurons=256)
memory = in_memory(m)
inputs = list(calls(m.dim, (1, 9, 1, 2)))
wanted = [memory.run(h) for h in inputs]
disk = on_disk(m, 2, 2, method=method)
three = dict(layers=3, method=method, neurons=128, depth=256)
layers = Layers.of(Path(sys.argv[2]), **three)
files = [file for each in (m, *layers.models) for file in each.files]
for each in layers.models:
    wanted += [in_memory(each).run(h) for h in inputs]
errors = 0
def run():
    found = [[], [], [], []]
    for h, guessed in zip(inputs, (inputs[0], None, inputs[0], inputs[3]), strict=True):
        if guessed is not None:
            disk.guess(guessed)
        for i, each in enumerate((disk, *layers.disk)):
            found[i].append(each.run(h))
    return sum(found, [])
each = [b"%s %d" % (kind, n) for n in range(1, 400, STEP) for kind in (b"eio", b"end")]
for how in (b"short", b"interrupted", b"busy", *each, b"eio_from 1", b"eio_from 100"):
    bad(how)
    try:
        assert run() == wanted, how
    except _native.DiskError as e:
        errors += 1
        assert how[:3] in (b"eio", b"end"), (how, e)
        error, name, *rest = e.args
        assert error == (5 if how[:3] == b"eio" else -1) and rest == [-1, False], (how, e)
        assert any(name.startswith(f"{file}: ") for file in files), name
        assert "_exps.weight, expert " in name, name
    bad(b"none")
    assert run() == wanted, how
for guesses in (1, 2):  # what was read ahead fails; then the disk is well again before the call
    for n, h in enumerate(inputs):
        bad(b"eio_from 1")
        disk.guess(h)
        bad(b"none")
        for _ in range(guesses - 1):
            disk.guess(h)
        assert disk.run(h) == wanted[n], (guesses, n)
assert disk.stats()["early"] > disk.stats()["early_used"] > 0
assert all(each.stats()["early_used"] > 0 for each in layers.disk[1:])
(Path(sys.argv[2]) / "kept").mkdir()
layers = Layers.of(Path(sys.argv[2]) / "kept", (EXPERTS, 0, 0), **three)
for _ in range(2):  # all that is read beside the first layer's call is for those behind it, and fails
    before = [each.stats()["early"] for each in layers.disk]
    bad(b"eio_from 1")
    found = [layers.disk[0].run(inputs[0])]
    bad(b"none")
    begun = [each.stats()["early"] - x for each, x in zip(layers.disk, before, strict=True)]
    assert begun == [0, ACTIVE, ACTIVE], begun
    found += [each.run(inputs[0]) for each in layers.disk[1:]]
    assert found == [in_memory(each).run(inputs[0]) for each in layers.models]
print(errors)
"""


@pytest.mark.parametrize("step", [29, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["io_uring", "threads"])
def test_whichever_read_fails_there_are_the_same_bits_or_an_error(
    tmp_path: Path, method: str, step: int
) -> None:
    """Every `step`th read of some calls, in a process of its own; afterwards all is well again.

    A thread that took the last reads of a call, of which one failed, once slept for others that never came.
    """
    code = FAULTS.replace("STEP", str(step))
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, os.pathsep.join(sys.path), str(tmp_path), method],
        env={**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "none")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 300 // step


FORBIDDEN = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_disk_experts import *
from thermocline import _native
m = model(Path(sys.argv[2]))
files = _native.ExpertFiles(list(map(state, m.files)), depth=DEPTH, piece_bytes=PIECE)
assert "threads" in files.how and "io_uring refused: EPERM" in files.how, files.how
assert_bits_of_memory(m, in_memory(m), on_disk(m, 3, files=files))
"""


def test_without_io_uring_threads_read(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", FORBIDDEN, os.pathsep.join(sys.path), str(tmp_path)],
        env={**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "forbidden")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


STOPPED = """
import ctypes, os, signal, sys, threading, time
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_disk_experts import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
m = model(Path(sys.argv[2]))
memory, disk = in_memory(m), on_disk(m, 3, method="threads")
for h in calls(m.dim, (1, 9)):
    bad(b"slow 1000")
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        disk.guess(h[:1])
        disk.run(h)
        raise AssertionError("not stopped")
    except KeyboardInterrupt:
        print(time.monotonic() - begin)
    bad(b"none")
    assert disk.run(h) == memory.run(h)
"""


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", STOPPED, os.pathsep.join(sys.path), str(tmp_path)],
        env={**os.environ, **bad_reads.environment(bad_reads.library(tmp_path), "none")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == 2 and all(0.3 <= float(line) < 40 for line in run.stdout.split())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads: that is what is tried
def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m, 1)
    (h,) = calls(m.dim, (3,))
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            disk.run(h)
        except RuntimeError as e:
            os._exit(0 if "forked" in str(e) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert disk.run(h) == memory.run(h)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    m = model(tmp_path)
    with pytest.raises(ValueError, match="more slots than experts"):
        on_disk(m, EXPERTS + 1)
    with pytest.raises(ValueError, match="differ in their slabs"):
        on_disk(m, 2, names=NAMES[:2])
    with pytest.raises(ValueError, match="number of slots"):
        on_disk(m, 2, 0)
    with pytest.raises(ValueError, match="row is larger than a piece"):
        on_disk(model(tmp_path, ("f32",) * 3, dim=32, neurons=8192), 2)
    other = model(tmp_path, dim=512)
    bound = on_disk(other, 2)
    small = matrices(other, _native.Arena(10 * other.offsets[-1]), 0, bound.context, grouped=False)
    with pytest.raises(ValueError, match="not over the pool's first slot"):
        mixture(other, [small] * EXPERTS, bound.rows)


def test_offsets_are_as_the_slots_say() -> None:
    m = Model((Slab("q4_0", np.zeros((1, 3, 18), np.uint8), 32),) * 2, (), 32, 3, False, False, False)
    assert m.offsets == [0, 64, 192] and all(b - a >= m.slabs[0].bytes for a, b in pairwise(m.offsets))
