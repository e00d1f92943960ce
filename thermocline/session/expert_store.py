"""A mixture in less memory than its experts: `expert_split.py`'s answer in an arena, and experts on disk.

Owns the places in the arena, and the counts of the disk's reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline import _native
from thermocline.model.sizes import aligned
from thermocline.model.tensors import TensorInfo
from thermocline.ops.cpu import CpuOps, disk_error
from thermocline.ops.interface import DiskCounts, Weights
from thermocline.pack import blocks
from thermocline.plan.disk.expert_split import ExpertSplit, Record, Slab
from thermocline.session import embedding_rows, resident, weights
from thermocline.session.weights import Filled, LoadedWeights, PackInMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thermocline.ops.device_rows import DeviceRows
    from thermocline.pack.stored_model import FileRows, Progress, StoredModel


@dataclass(frozen=True)
class ExpertStore:
    """The experts of a loaded model that take turns in memory."""

    files: _native.ExpertFiles
    layers: tuple[_native.DiskExperts, ...]

    @property
    def how(self) -> str:
        """How it reads, for a person."""
        return self.files.how

    def counts(self) -> DiskCounts:
        """Since the weights were loaded."""
        stats = [x.stats() for x in self.layers]
        return DiskCounts(*(sum(s[key] for s in stats) for key in DiskCounts._fields))


@dataclass(frozen=True)
class ReadBudget:
    """A bound on what steps read of the experts on disk, `token_bytes` for each token of an answer."""

    files: _native.ExpertFiles
    token_bytes: int

    def begin_step(self, answers: int) -> None:
        """Bound the step that begins, of so many answers' tokens. 0: of prompts, which read all they need."""
        self.files.begin_step(answers * self.token_bytes if answers else None)

    def begin_exact_step(self, answers: int) -> None:
        """Let the step read all that it needs, and leave no trace of it in the caches."""
        self.files.begin_step(read_only=True)


@dataclass(frozen=True)
class Places:
    """The places of all tensors in an arena; of an expert's matrices, those in the first slot of the pool."""

    tensors: dict[str, TensorInfo]
    runs: tuple[tuple[int, int, int], ...]  # of weights.bin: from byte, to byte, where in the arena
    pools: dict[int, tuple[int, int]]  # by stride: where its slots begin, how many there are
    bytes: int


def places(model: StoredModel, s: ExpertSplit) -> Places:
    m = s.mixture
    placed: dict[str, TensorInfo] = {}
    runs: list[tuple[int, int, int]] = []
    end = 0
    for name in m.resident:
        t = model.tensors[name]
        placed[name] = replace(t, offset=end)
        runs.append((t.offset, t.offset + t.bytes, end))
        end += aligned(t.bytes)
    rows, end = embedding_rows.placed(m.spec, m.tensors, end)
    placed |= rows
    pools: dict[int, tuple[int, int]] = {}
    for stride in m.strides:
        slots = m.passing + sum(n for i, n in s.slots.items() if m.records[i].stride == stride)
        pools[stride] = end, slots
        end += aligned(slots * stride)
    for r in m.records.values():
        for slab in r.slabs:
            t, at = model.tensors[slab.tensor], pools[r.stride][0] + slab.at
            placed[slab.tensor] = replace(t, shape=(1, *t.shape[1:]), offset=at, bytes=slab.bytes)
    return Places(placed, tuple(runs), pools, end)


def load(
    model: StoredModel,
    s: ExpertSplit,
    *,
    threads: int,
    switches: int = 0,
    progress: Progress | None = None,
) -> tuple[LoadedWeights[CpuOps], ExpertStore]:
    """Raises as `weights.load` does. `switches`: what the disk tier is to do without."""
    ops = weights.new_ops(threads)
    made, store, filled = opened(model, s, ops, threads=threads, switches=switches, progress=progress)
    return LoadedWeights(made, ops, s.bytes, filled), store


def opened(
    model: StoredModel,
    s: ExpertSplit,
    ops: CpuOps,
    *,
    threads: int,
    switches: int = 0,
    on_gpus: Mapping[str, Mapping[str, DeviceRows]] | None = None,
    whole: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
    progress: Progress | None = None,
) -> tuple[Weights, ExpertStore, Filled]:
    """`load`'s. `on_gpus`, `whole`: as `PackInMemory`'s, where experts are elsewhere, too."""
    p = places(model, s)
    arena = blocks.new_arena(p.bytes, str(model.path))
    tables = embedding_rows.in_arena(model, p.tensors, arena)
    made = PackInMemory(model.spec, p.tensors, arena, ops, on_gpus or {}, tables=tables, whole=whole or {})
    made = resident.read(model, made, p.runs, s.mixture.resident, progress)
    assembled = weights.assemble(made, str(model.path))
    try:
        files = resident.files_of(model, depth=s.mixture.depth, piece_bytes=s.mixture.piece_bytes)
        layers = _experts(made, model, s, p, files, switches)
        for x in layers.values():
            x.load(threads)
    except _native.DiskError as e:
        raise disk_error(e) from None
    arena.gather_pages()
    filled = Filled.of(arena, ((to, to + end - begin) for begin, end, to in p.runs))
    return _with_disk(assembled, layers), ExpertStore(files, tuple(layers.values())), filled


def _experts(
    made: PackInMemory,
    model: StoredModel,
    s: ExpertSplit,
    p: Places,
    files: _native.ExpertFiles,
    switches: int,
) -> dict[int, _native.DiskExperts]:
    """Return the experts of each layer that has some, with the slots that `ExpertSplit` gives them."""
    passing, routing = s.mixture.passing, s.mixture.routing
    pools = {
        stride: _native.SlotPool(made.arena, at, stride, slots, passing)
        for stride, (at, slots) in p.pools.items()
    }
    found = {}
    for i, r in s.mixture.records.items():
        here = s.mixture.here(i)
        rows = [_rows(model, r, e) for e in here]
        runs = [[resident.row_run(made, x.tensor, f, x.at) for x, f in each] for each in rows]
        of = ", of the experts beside the GPU" if i in s.mixture.elsewhere else ""  # which errors count
        names = [f"{slab.tensor}{of}" for slab, _ in rows[0]]
        planar = all(f.planar for _, f in rows[0])
        found[i] = _native.DiskExperts(
            pools[r.stride], files, runs, s.slots[i], names, planar=planar, disable=switches,
            likely=None if routing is None else routing.likely[i][here],
        )  # fmt: skip
    return found


def _rows(model: StoredModel, r: Record, expert: int) -> list[tuple[Slab, FileRows]]:
    """Return where an expert's rows are, and where they go to in a slot."""
    every = ((x, model.file_rows(x.tensor, expert * x.rows, x.rows, x.at)) for x in r.slabs)
    return [(x, f) for x, found in every for f in found]


def _with_disk(made: Weights, layers: dict[int, _native.DiskExperts]) -> Weights:
    placed = (replace(x, experts_on_disk=layers.get(i)) for i, x in enumerate(made.layers))
    return replace(made, layers=tuple(placed))
