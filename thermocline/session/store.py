"""A pack in less memory than its weights: `disk_split.py`'s answer in an arena, and the neurons left on disk.

Owns the places in the arena, and the counts of the disk's reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thermocline import _native
from thermocline.engine.kv_cache import Storage, in_ram
from thermocline.model.sizes import aligned
from thermocline.model.tensors import TensorInfo
from thermocline.ops.cpu import CpuOps, disk_error
from thermocline.ops.interface import CPU, FFN, DiskCounts, Layer, NeuronCache, Weights
from thermocline.pack import blocks
from thermocline.plan.disk.disk_split import (
    DEPTH,
    Arrangement,
    buffer_bytes,
    resident,
)
from thermocline.session import dense_store, embedding_rows, expert_store, weights
from thermocline.session.weights import Filled, LoadedWeights

if TYPE_CHECKING:
    from thermocline.ops.device_places import DevicePlaces
    from thermocline.ops.device_rows import DeviceRows
    from thermocline.ops.interface import OpaqueOps
    from thermocline.pack.checksums import NeuronChecksums
    from thermocline.pack.pack import Pack
    from thermocline.pack.predictor import Predictors
    from thermocline.pack.stored_model import Progress, StoredModel
    from thermocline.plan.disk.dense_split import DenseSplit
    from thermocline.plan.disk.expert_split import ExpertSplit
    from thermocline.session.expert_store import ExpertStore, ReadBudget


@dataclass(frozen=True)
class Store:
    """The neurons of a loaded model that take turns in memory."""

    reader: _native.Reader
    rows: tuple[_native.DiskRows, ...]  # all experts' bundles, then, where they are here, gate rows
    arrangement: Arrangement

    @property
    def how(self) -> str:
        """How it reads, for a person."""
        return self.reader.how

    def counts(self) -> DiskCounts:
        """Since the weights were loaded."""
        stats = [r.stats() for r in self.rows]
        return DiskCounts(*(sum(s[key] for s in stats) for key in DiskCounts._fields))


class OnDisk(Protocol):
    """Weights of FFNs that are read when a token needs them."""

    @property
    def how(self) -> str: ...
    def counts(self) -> DiskCounts: ...


def load_experts(
    model: StoredModel,
    s: ExpertSplit,
    *,
    threads: int,
    predictors: Predictors | None = None,
    disable: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[LoadedWeights[CpuOps], ExpertStore]:
    """Do as `load`, with whole experts in place of neurons."""
    made, there = expert_store.load(
        model, s, threads=threads, switches=switches_of(disable), progress=progress
    )
    if predictors is not None:
        made = replace(made, weights=weights.with_predictors(made.weights, predictors))
    return made, there


def read_budget(there: ExpertStore, mb: float | None) -> ReadBudget | None:
    """Return the budget of so many MB for each token of an answer; None: there is none."""
    return None if mb is None else expert_store.ReadBudget(there.files, int(mb * 1e6))


def load_rows(
    model: StoredModel, s: DenseSplit, *, threads: int, progress: Progress | None = None
) -> tuple[LoadedWeights[CpuOps], OnDisk]:
    """Do as `load`, with rows of FFNs that come in a stream."""
    return dense_store.load(model, s, threads=threads, progress=progress)


# ---- places in the arena


@dataclass(frozen=True)
class Map:
    """The places of all tensors in an arena. A pool is all slots for records of one kind and length."""

    # Resident ones by name; of tables on disk, one row; of neurons there, their whole pool.
    tensors: dict[str, TensorInfo]
    runs: tuple[tuple[int, int, int], ...]  # of weights.bin: from byte, to byte, where in the arena
    pools: dict[tuple[str, int], TensorInfo]  # by kind and stride
    bytes: int


def mapped(pack: Pack, a: Arrangement) -> Map:
    c = a.contents
    placed: dict[str, TensorInfo] = {}
    runs: list[tuple[int, int, int]] = []
    end = 0
    for name in resident(c.spec, c.tensors, gates=a.gates is not None):
        t, size = c.tensors[name], c.held_bytes(name)
        here = size // (t.stride * t.shape[0])  # rows of each expert
        shape = t.shape if size == t.bytes else (t.shape[0], here, *t.shape[2:])
        placed[name] = replace(t, shape=shape, offset=end, bytes=size)
        for at, (begin, stop) in enumerate(c.held(name)):
            _run(runs, begin, stop, end + at * size // len(c.held(name)))
        end += aligned(size)
    rows, end = embedding_rows.placed(c.spec, c.tensors, end)
    placed |= rows
    pools: dict[tuple[str, int], TensorInfo] = {}
    for kind, shares in a.kinds:
        of, places = c.of_kind(kind), a.places(shares)
        for stride in sorted({t.stride for t in of.values()}):
            slots = sum(places[i] for i, t in of.items() if t.stride == stride)
            like = next(t for t in of.values() if t.stride == stride)
            slots += _native.limits().stream_slots
            shape = (1, slots, *like.shape[2:])
            pools[kind, stride] = TensorInfo(like.format, shape, end, slots * stride, stride)
            end += aligned(slots * stride)
        for i, t in of.items():  # of one stride, but perhaps of several formats
            there = replace(pools[kind, t.stride], format=t.format, down_format=t.down_format)
            placed[f"layers.{i}.{kind}"] = there
    return Map(placed, tuple(runs), pools, end)


def _run(runs: list[tuple[int, int, int]], begin: int, end: int, to: int) -> None:
    """One more; or the last one is longer, where both lie alike in file and arena, with what is between."""
    if runs and begin - runs[-1][0] == to - runs[-1][2]:
        runs[-1] = (runs[-1][0], end, runs[-1][2])
    else:
        runs.append((begin, end, to))


# ---- loading


@dataclass(frozen=True)
class Opened:
    """A session's weights, as there was room for them."""

    loaded: LoadedWeights[OpaqueOps]
    store: OnDisk | None = None  # where a part of the FFNs comes from disk
    storage: Storage = in_ram  # of keys and values
    places: DevicePlaces | None = None  # copies those that are on a device
    read_budget: ReadBudget | None = None  # where one was asked for, and experts are on disk


def load(
    pack: Pack,
    a: Arrangement,
    records: NeuronChecksums,
    *,
    threads: int,
    predictors: Predictors | None = None,
    disable: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[LoadedWeights[CpuOps], Store]:
    """Raises as `weights.load` does. `disable`: what the disk tier is to do without."""
    ops = weights.new_ops(threads)
    made, store, filled = opened(pack, a, records, ops, disable=disable, progress=progress)
    if predictors is not None:
        made = weights.with_predictors(made, predictors)
    return LoadedWeights(made, ops, a.bytes, filled), store


def opened(
    pack: Pack,
    a: Arrangement,
    records: NeuronChecksums,
    ops: CpuOps,
    *,
    on_gpus: Mapping[str, Mapping[str, DeviceRows]] | None = None,
    disable: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[Weights, Store, Filled]:
    """`load`'s, without predictors. `on_gpus`: as `PackInMemory`'s."""
    m = mapped(pack, a)
    arena = blocks.new_arena(m.bytes, str(pack.path))
    pack.read_runs(arena, m.runs, progress)
    tables = embedding_rows.in_arena(pack, m.tensors, arena)
    in_memory = weights.PackInMemory(pack.spec, m.tensors, arena, ops, on_gpus or {}, tables=tables)
    made = weights.assemble(in_memory, str(pack.path))
    size = buffer_bytes([stride for _, stride in m.pools])
    reader = _native.Reader(str(pack.weights_path), depth=DEPTH, buffer_bytes=size)
    rows = _rows(pack, a, records, m, arena, reader, switches_of(disable))
    try:
        for r in filter(None, rows):
            r.load()
    except _native.DiskError as e:
        raise disk_error(e) from None
    arena.gather_pages()
    filled = Filled.of(arena, ((to, to + end - begin) for begin, end, to in m.runs))
    return _with_disk(made, rows), Store(reader, tuple(filter(None, rows)), a), filled


def _rows(
    pack: Pack,
    a: Arrangement,
    records: NeuronChecksums,
    m: Map,
    arena: _native.Arena,
    reader: _native.Reader,
    switches: int,
) -> list[_native.DiskRows | None]:
    """Return the rows on disk with the slots that `Arrangement` gives them; None where all are on a GPU."""
    pools = {k: _native.SlotPool(arena, p.offset, p.stride, p.shape[1]) for k, p in m.pools.items()}
    c, experts, known = a.contents, pack.spec.n_experts, a.contents.hotness.ordered
    made: list[_native.DiskRows | None] = []
    for kind, shares in a.kinds:
        checksums = records.bundle if kind == "bundle" else records.gate
        for at, (share, x) in enumerate(zip(shares, c.rows(kind), strict=True)):
            i, expert = divmod(at, experts)
            neurons = len(x.need)
            if not neurons:
                made.append(None)
                continue
            first, t = expert * pack.spec.ffn_dim + c.first(i), pack.tensors[f"layers.{i}.{kind}"]
            name = f"{pack.weights_path}: layers.{i}.{kind}"
            made.append(
                _native.DiskRows(
                    pools[kind, t.stride],
                    reader,
                    t.offset + first * t.stride,
                    neurons,
                    share.hot,
                    share.quota,
                    checksums[i][first : first + neurons],
                    name + (f", expert {expert}" if experts > 1 else ""),
                    switches,
                    x.need.astype(np.float32) if known else None,
                )
            )
    return made


def switches_of(disable: Sequence[str]) -> int:
    """`options.SWITCHES` as the core takes them."""
    bits = {"bundle": _native.NO_BUNDLE, "cache": _native.NO_CACHE, "pipeline": _native.NO_PIPELINE}
    return sum(bits[name] for name in set(disable))


def _with_disk(made: Weights, rows: Sequence[_native.DiskRows | None]) -> Weights:
    n = sum(len(x.experts) for x in made.layers)
    gates: Sequence[_native.DiskRows | None] = rows[n:] or [None] * n
    each = iter(zip(rows[:n], gates, strict=True))

    def cached(f: FFN, bundles: _native.DiskRows | None, of_gates: _native.DiskRows | None) -> FFN:
        part = f.on(CPU)
        if part is None or bundles is None:
            return f
        return f.with_part(replace(part, cache=NeuronCache(bundles, of_gates)))

    def placed(layer: Layer) -> Layer:
        return replace(layer, experts=tuple(cached(f, *next(each)) for f in layer.experts))

    return replace(made, layers=tuple(map(placed, made.layers)))
