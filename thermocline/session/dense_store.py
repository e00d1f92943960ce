"""A dense model in less memory than its FFNs: `dense_split.py`'s answer in an arena, and the stream of rows.

Owns the places in the arena, and the counts of the disk's reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline import _native
from thermocline.errors import OutOfBudget
from thermocline.model.sizes import aligned
from thermocline.model.tensors import TensorInfo
from thermocline.ops.cpu import CpuOps, disk_error
from thermocline.ops.interface import DiskCounts, Layer, Weights
from thermocline.pack import blocks
from thermocline.plan.disk.dense_split import DenseSplit, Phase
from thermocline.session import embedding_rows, resident, weights
from thermocline.session.weights import Filled, LoadedWeights, PackInMemory

if TYPE_CHECKING:
    from thermocline.pack.stored_model import FileRows, Progress, StoredModel


@dataclass(frozen=True)
class DenseStore:
    """The rows of a loaded model's FFNs that come in a stream."""

    files: _native.ExpertFiles
    stream: _native.DenseStream

    @property
    def how(self) -> str:
        """How it reads, for a person."""
        return self.files.how

    def counts(self) -> DiskCounts:
        """Since the weights were loaded."""
        stats = self.stream.stats()
        return DiskCounts(*(stats[key] for key in DiskCounts._fields))


@dataclass(frozen=True)
class HeldPlaces:
    """The places of all tensors in an arena; of an FFN's matrices, those of the rows that are held."""

    tensors: dict[str, TensorInfo]
    runs: tuple[tuple[int, int, int], ...]  # of weights.bin: from byte, to byte, where in the arena
    bytes: int


def places(model: StoredModel, s: DenseSplit) -> HeldPlaces:
    d = s.dense
    held = {name: model.tensors[name] for name in d.resident}
    for i, phases in d.layers.items():
        for p, rows in zip(phases, s.rows(i), strict=True):
            for name in p.tensors:
                t = model.tensors[name]
                held[name] = replace(t, shape=(1, rows, *t.shape[2:]), bytes=rows * t.stride)
    placed: dict[str, TensorInfo] = {}
    runs, end = [], 0
    for name, t in held.items():
        placed[name] = replace(t, offset=end)
        runs.append((t.offset, t.offset + t.bytes, end))
        end += aligned(t.bytes)
    rows_of_tables, end = embedding_rows.placed(d.spec, d.tensors, end)
    return HeldPlaces(placed | rows_of_tables, tuple(runs), end)


def load(
    model: StoredModel, s: DenseSplit, *, threads: int, progress: Progress | None = None
) -> tuple[LoadedWeights[CpuOps], DenseStore]:
    """Raises as `weights.load` does."""
    ops, p = weights.new_ops(threads), places(model, s)
    arena = blocks.new_arena(p.bytes, str(model.path))
    tables = embedding_rows.in_arena(model, p.tensors, arena)
    made = PackInMemory(model.spec, p.tensors, arena, ops, tables=tables)
    made = resident.read(model, made, p.runs, s.dense.resident, progress)
    assembled = weights.assemble(made, str(model.path))
    arena.gather_pages()
    try:
        files = resident.files_of(model, depth=s.dense.buffers, piece_bytes=s.dense.piece_bytes)
        stream = _stream(made, model, s, files, threads)
    except _native.DiskError as e:
        raise disk_error(e) from None
    filled = Filled.of(arena, ((to, to + end - begin) for begin, end, to in p.runs))
    return LoadedWeights(_with_stream(assembled, s, stream), ops, s.bytes, filled), DenseStore(files, stream)


def _stream(
    made: PackInMemory,
    model: StoredModel,
    s: DenseSplit,
    files: _native.ExpertFiles,
    threads: int,
) -> _native.DenseStream:
    """Begin to read the rows that are not held. Raises OutOfBudget where the system has no thread for it."""
    ffns, planar = [], True
    for i in _streamed(s):
        phases: list[list[_native._StreamedMatrix]] = []
        for p, held in zip(s.dense.layers[i], s.rows(i), strict=True):
            rows = [_all_rows(model, p, name) for name in p.tensors]
            planar &= all(f.planar for f in rows)
            runs = (resident.row_run(made, name, f) for name, f in zip(p.tensors, rows, strict=True))
            names = (f.tensor for f in rows)
            phases.append([(run, held, name) for run, name in zip(runs, names, strict=True)])
        (first, (down,)), (up_rows, down_rows) = phases, (p.each for p in s.dense.layers[i])
        ffns.append((first, up_rows, down, down_rows))
    try:
        return _native.DenseStream(files, ffns, threads, planar=planar)
    except RuntimeError:
        raise OutOfBudget("the system has no thread more for this process; use fewer") from None


def _all_rows(model: StoredModel, p: Phase, name: str) -> FileRows:
    (rows,) = model.file_rows(name, 0, p.rows, 0)
    assert rows.order is None and rows.rows == p.rows, "an FFN's matrix is one piece of a file"
    return rows


def _streamed(s: DenseSplit) -> list[int]:
    """Return the layers that have rows on disk."""
    return [i for i in s.held if s.streamed_bytes(i)]


def _with_stream(made: Weights, s: DenseSplit, stream: _native.DenseStream) -> Weights:
    numbers = {layer: n for n, layer in enumerate(_streamed(s))}

    def streamed(i: int, layer: Layer) -> Layer:
        if i not in numbers:
            return layer
        (f,) = layer.experts
        part = replace(f.part, stream=stream.layer(numbers[i]))
        return replace(layer, experts=(f.with_part(part),))

    return replace(made, layers=tuple(streamed(i, x) for i, x in enumerate(made.layers)))
