"""A pack in less memory than its weights: `arrange.py`'s answer in an arena, and the neurons left on disk.

Owns where in the arena everything is, and what the disk did. Must not know budgets, requests or flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thermocline import _native, weights
from thermocline.arrange import DEPTH, Arrangement, buffer_bytes, resident
from thermocline.decoder import Weights
from thermocline.layout import TensorInfo
from thermocline.pack import Pack
from thermocline.predictor import Predictors
from thermocline.records import Records
from thermocline.sizes import aligned
from thermocline.weights import LoadedWeights

Progress = Callable[[int, int], None]

SLICE_BYTES = 256 << 20  # read between two looks at Ctrl-C


@dataclass(frozen=True)
class DiskCounts:
    """What the disk did."""

    needed: int = 0  # records that tokens asked for
    missed: int = 0  # of those, read from disk
    reads: int = 0
    bytes: int = 0
    waited_ns: int = 0  # of all threads, with nothing else to do


@dataclass(frozen=True)
class Store:
    """The neurons of a loaded model that take turns in memory."""

    reader: _native.Reader
    rows: tuple[_native.DiskRows, ...]  # every layer's bundles, then, where they are here, its gate rows
    arrangement: Arrangement

    @property
    def how(self) -> str:
        """How it reads, for a person."""
        return self.reader.how

    def counts(self) -> DiskCounts:
        """Since the weights were loaded."""
        stats = [r.stats() for r in self.rows]
        keys = ("needed", "missed", "reads", "bytes", "waited_ns")
        return DiskCounts(*(sum(s[key] for s in stats) for key in keys))


# ---- places in the arena


@dataclass(frozen=True)
class Map:
    """Where everything goes. A pool is all places of records of one kind and length."""

    tensors: dict[str, TensorInfo]  # resident ones by name; of a layer's rows on disk, their whole pool
    runs: tuple[tuple[int, int, int], ...]  # of weights.bin: from byte, to byte, where in the arena
    pools: dict[tuple[str, int], TensorInfo]  # by kind and stride
    bytes: int


def mapped(pack: Pack, a: Arrangement) -> Map:
    placed: dict[str, TensorInfo] = {}
    runs: list[tuple[int, int, int]] = []
    end = 0
    for name in resident(pack.spec, pack.tensors, gates=a.gates is not None):
        t = pack.tensors[name]
        placed[name] = replace(t, offset=end)
        if runs and runs[-1][1] == t.offset:
            runs[-1] = (runs[-1][0], t.offset + aligned(t.bytes), runs[-1][2])
        else:
            runs.append((t.offset, t.offset + aligned(t.bytes), end))
        end += aligned(t.bytes)
    pools: dict[tuple[str, int], TensorInfo] = {}
    for kind, shares in _kinds(a):
        of = [pack.tensors[f"layers.{i}.{kind}"] for i in range(pack.spec.n_layers)]
        for stride in sorted({t.stride for t in of}):
            slots = sum(s.places for s, t in zip(shares, of, strict=True) if t.stride == stride)
            like = next(t for t in of if t.stride == stride)
            slots += _native.STREAM_SLOTS
            shape = (slots, *like.shape[2:])
            pools[kind, stride] = TensorInfo(like.format, shape, end, slots * stride, stride)
            end += aligned(slots * stride)
        placed |= {f"layers.{i}.{kind}": pools[kind, t.stride] for i, t in enumerate(of)}
    return Map(placed, tuple(runs), pools, end)


def _kinds(a: Arrangement) -> list[tuple[str, Sequence[Any]]]:
    return [("bundle", a.bundles), *([("gate.weight", a.gates)] if a.gates is not None else [])]


# ---- loading


def load(
    pack: Pack,
    a: Arrangement,
    records: Records,
    *,
    threads: int,
    predictors: Predictors | None = None,
    disable: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[LoadedWeights, Store]:
    """Raises as `weights.load` does. `disable`: of `SWITCHES`, what the disk tier is to do without."""
    ops = weights.new_ops(threads)
    m = mapped(pack, a)
    arena = weights.new_arena(m.bytes, str(pack.path))
    _fill(arena, pack, m.runs, progress)
    made = weights.assemble(pack.spec, m.tensors, arena, ops)
    if predictors is not None:
        made = weights.with_predictors(made, predictors)
    size = buffer_bytes([stride for _, stride in m.pools])
    reader = _native.Reader(str(pack.weights_path), depth=DEPTH, buffer_bytes=size)
    pools = {k: _native.SlotPool(arena, p.offset, p.stride, p.shape[0]) for k, p in m.pools.items()}
    switched = sum(SWITCHES[name] for name in disable)
    rows: list[_native.DiskRows] = []
    for kind, shares in _kinds(a):
        for i, share in enumerate(shares):
            name = f"layers.{i}.{kind}"
            t = pack.tensors[name]
            crcs = (records.bundle if kind == "bundle" else records.gate)[i]
            where = f"{pack.weights_path}: {name}"
            pool = pools[kind, t.stride]
            rows.append(
                _native.DiskRows(
                    pool, reader, t.offset, len(crcs), share.hot, share.quota, crcs, where, switched
                )
            )
    for r in rows:
        r.load()
    arena.gather_pages()
    return LoadedWeights(_with_disk(made, rows), ops, a.bytes), Store(reader, tuple(rows), a)


SWITCHES = {
    "bundle": _native.NO_BUNDLE,  # up and down in one read
    "cache": _native.NO_CACHE,  # records stay from one token to the next
    "pipeline": _native.NO_PIPELINE,  # computing what is there while the rest is read
}


def _with_disk(made: Weights, rows: Sequence[_native.DiskRows]) -> Weights:
    n = len(made.layers)
    gates: Sequence[_native.DiskRows | None] = rows[n:] or [None] * n
    layers = zip(made.layers, rows[:n], gates, strict=True)
    return replace(
        made, layers=tuple(replace(x, ffn=replace(x.ffn, disk=b, gate_disk=g)) for x, b, g in layers)
    )


def _fill(
    arena: _native.Arena, pack: Pack, runs: Sequence[tuple[int, int, int]], progress: Progress | None
) -> None:
    done, size = 0, sum(end - begin for begin, end, _ in runs)
    edge = weights.new_arena(pack.block_bytes, "a block")
    for begin, end, to in runs:
        for first, last in _pieces(begin, end, pack.block_bytes):
            block = first // pack.block_bytes * pack.block_bytes
            if block == first and (last % pack.block_bytes == 0 or last == pack.weights_bytes):
                weights.read_blocks(arena, pack, first, last, to + first - begin)
            else:  # a block is checked whole
                stop = min(pack.weights_bytes, block + pack.block_bytes)
                weights.read_blocks(edge, pack, block, stop, 0)
                arena.copy(to + first - begin, edge, first - block, last - first)
            done += last - first
            if progress is not None:
                progress(done, size)


def _pieces(begin: int, end: int, block: int) -> Iterator[tuple[int, int]]:
    """[begin, end) cut at its first and its last border of blocks, and between them into slices."""
    first, last = -(-begin // block) * block, end // block * block
    if first > last:
        yield begin, end
        return
    if begin < first:
        yield begin, first
    for at in range(first, last, SLICE_BYTES):
        yield at, min(last, at + SLICE_BYTES)
    if last < end:
        yield last, end
