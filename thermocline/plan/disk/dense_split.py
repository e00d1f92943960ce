"""A dense model whose FFNs do not all fit in memory: which rows are there, and what the others come through.

Each matrix has its first rows in memory, as large a part in every layer, so that a thread computes with them
while the others arrive. `run` and `plan` ask the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thermocline import _native
from thermocline.errors import OutOfBudget
from thermocline.model.sizes import aligned
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import ALIGN, TensorInfo
from thermocline.ops.interface import CPU
from thermocline.plan.disk.disk_split import looked_up, part_of, resident, resident_parts, tables_left
from thermocline.plan.memory import gib_up, size_down, size_up
from thermocline.plan.placement import DISK, LayerPlacement, NeuronRange, Placement

PHASES = (("gate", "up"), ("down",))  # the matrices whose rows come together
# Records in memory on their way, each in a buffer of its own: read, or being read by at most half as many
# reads, or being computed. A record's bytes, but for rows that are longer.
WINDOW, RECORD_BYTES = 32, 1 << 20
LEAST_PIECE = 16 << 10  # the core takes no buffers that are smaller
UNIT = 32  # rows: whole groups of rows, whatever the processor; as many are arranged at a time
LEAST = 1  # records of a phase in memory
ARRANGING = 16  # threads that rows are arranged for, at least
RECORD_TABLE_BYTES = 32  # the core's, of a record


@dataclass(frozen=True)
class Phase:
    """Matrices of a layer that are multiplied side by side. `each`: rows of a record."""

    tensors: tuple[str, ...]
    strides: tuple[int, ...]
    rows: int
    each: int

    @staticmethod
    def of(tensors: Mapping[str, TensorInfo], layer: int, parts: tuple[str, ...]) -> Phase:
        names = tuple(n for part in parts if (n := f"layers.{layer}.{part}.weight") in tensors)
        found = [tensors[n] for n in names]
        strides, rows = tuple(t.stride for t in found), found[0].shape[1]
        each = max(UNIT, RECORD_BYTES // len(names) // max(strides) // UNIT * UNIT)
        return Phase(names, strides, rows, min(rows, each))

    @property
    def records(self) -> int:
        return -(-self.rows // self.each)

    @property
    def record_bytes(self) -> int:
        """Return a record's bytes in its buffer, with what is read around each matrix's rows."""
        return sum(aligned(self.each * stride) + 2 * ALIGN for stride in self.strides)

    @property
    def arranged_bytes(self) -> int:
        """Return the bytes of the rows that a thread arranges at a time."""
        unit = _native.limits().slot_alignment
        return sum(-(-UNIT * stride // unit) * unit for stride in self.strides)

    def held_rows(self, records: int) -> int:
        """Return the rows of each matrix that are in memory with so many records."""
        return min(self.rows, records * self.each)

    def held_bytes(self, records: int) -> int:
        """Return the memory of so many records."""
        return sum(aligned(self.held_rows(records) * stride) for stride in self.strides)

    def left_bytes(self, records: int) -> int:
        """Return the bytes of rows that come from disk."""
        return (self.rows - self.held_rows(records)) * sum(self.strides)


@dataclass(frozen=True)
class Dense:
    """The weights that memory is divided for: a model's, or those of a shape that could be one."""

    spec: ModelSpec
    tensors: Mapping[str, TensorInfo]
    threads: int = 1  # of a session, which arrange rows

    @cached_property
    def layers(self) -> dict[int, tuple[Phase, ...]]:
        """By layer, where it has an FFN."""
        layers = (i for i in range(self.spec.n_layers) if self.spec.ffn(i).experts)
        return {i: tuple(Phase.of(self.tensors, i, parts) for parts in PHASES) for i in layers}

    @property
    def phases(self) -> list[Phase]:
        return [p for phases in self.layers.values() for p in phases]

    @cached_property
    def resident(self) -> list[str]:
        """The tensors that are in memory whole, in file order."""
        left = {name for p in self.phases for name in p.tensors}
        return [n for n in resident(self.spec, self.tensors, gates=False) if n not in left]

    @property
    def buffers(self) -> int:
        """Return the records on their way at most: no more than there are, and two."""
        return min(WINDOW, max(2, sum(p.records - LEAST for p in self.phases)))

    @property
    def piece_bytes(self) -> int:
        """Return the bytes of a buffer."""
        return max(LEAST_PIECE, max(p.record_bytes for p in self.phases))

    @property
    def buffer_bytes(self) -> int:
        """Return all that a stream takes besides the rows that are held."""
        tables = RECORD_TABLE_BYTES * sum(p.records for p in self.phases)
        planar = UNIT * max(max(p.strides) for p in self.phases)  # of a group, on their way
        arranged = max(p.arranged_bytes for p in self.phases) + planar + 2 * _native.limits().slot_alignment
        return self.buffers * self.piece_bytes + max(ARRANGING, self.threads) * arranged + tables


@dataclass(frozen=True)
class DenseSplit:
    """A budget divided among a model's parts. `parts` add up to all the memory that is ever taken."""

    parts: dict[str, int]
    held: dict[int, tuple[int, ...]]  # records in memory, of each phase of each layer with an FFN
    dense: Dense

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Return the share of the FFNs' bytes that are in memory."""
        whole = sum(p.left_bytes(0) for p in self.dense.phases)
        return 1 - sum(map(self.streamed_bytes, self.held)) / whole

    def streamed_bytes(self, layer: int) -> int:
        """Return what a step reads of a layer."""
        return sum(p.left_bytes(n) for p, n in zip(self.dense.layers[layer], self.held[layer], strict=True))

    def rows(self, layer: int) -> tuple[int, ...]:
        """Return the rows in memory, of gate and up, and of down."""
        return tuple(p.held_rows(n) for p, n in zip(self.dense.layers[layer], self.held[layer], strict=True))

    @property
    def left_on_disk(self) -> dict[str, int]:
        """Part -> bytes that are not in memory at a time."""
        d = self.dense
        parts = tables_left(d.spec, d.tensors)
        for i, phases in d.layers.items():
            for p, held in zip(phases, self.rows(i), strict=True):
                for name, stride in zip(p.tensors, p.strides, strict=True):
                    parts[part_of(name)] = parts.get(part_of(name), 0) + (p.rows - held) * stride
        return parts


# ---- dividing


def divide(d: Dense, budget: int, others: Mapping[str, int], *, limit: str = "allowed") -> DenseSplit:
    """Within `budget` bytes, of which `others` are taken. OutOfBudget with what would be enough.

    `limit`: what the budget is, for the error.
    """
    parts = _fixed(d, others)
    room = budget - least_bytes(d, others)
    if room < 0:
        need = least_bytes(d, others)
        taken = ", ".join(f"{size_up(size)} {part}" for part, size in others.items())
        raise OutOfBudget(
            f"with its FFNs on disk the model still needs {size_up(need)} of memory "
            f"({size_up(need - sum(others.values()))} weights and buffers, {taken}), {size_down(budget)} is "
            f"{limit}; use --ram {gib_up(need)}, a shorter context or a smaller weight format"
        )
    held = _even(d, room)
    for i, phases in d.layers.items():
        for p, n in zip(phases, held[i], strict=True):
            for name, stride in zip(p.tensors, p.strides, strict=True):
                part = part_of(name)
                parts[part] = parts.get(part, 0) + aligned(p.held_rows(n) * stride)
    return DenseSplit(parts, held, d)


def least_bytes(d: Dense, others: Mapping[str, int]) -> int:
    """Return the smallest budget that can be divided."""
    return sum(_fixed(d, others).values()) + sum(p.held_bytes(LEAST) for p in d.phases)


def _even(d: Dense, room: int) -> dict[int, tuple[int, ...]]:
    """Return the records that each phase has in memory, as large a part of each as `room` bytes allow.

    The last record of all comes from disk: where that fits too, there is nothing to divide.
    """
    owner, part, size = [], [], []
    for i, p in enumerate(d.phases):
        more = np.arange(LEAST, p.records)
        owner.append(np.full(len(more), i))
        part.append((more + 1) / p.records)
        size.append(np.diff([p.held_bytes(n) for n in range(LEAST, p.records + 1)]))
    owners = np.concatenate(owner)
    order = np.lexsort((owners, np.concatenate(part)))[:-1]
    taken = owners[order[np.cumsum(np.concatenate(size)[order]) <= room]]
    held = LEAST + np.bincount(taken, minlength=len(d.phases))
    each = iter(held.tolist())
    return {i: tuple(next(each) for _ in phases) for i, phases in d.layers.items()}


def _fixed(d: Dense, others: Mapping[str, int]) -> dict[str, int]:
    """Part -> bytes of all but the rows that are held."""
    parts = resident_parts(others, d.spec, d.tensors, d.resident)
    parts["disk buffers"] = parts.get("disk buffers", 0) + d.buffer_bytes
    return parts


# ---- as a placement


def placed(s: DenseSplit, context: int, kv_tokens: int) -> Placement:
    """Place a model with the rows that its FFNs have in RAM."""
    spec = s.dense.spec
    held = {i: s.rows(i) for i in s.held}
    layers = tuple(
        LayerPlacement(CPU, None, (NeuronRange(CPU, spec.ffn(i).width, held=held.get(i)),))
        for i in range(spec.n_layers)
    )
    tables = tuple(looked_up(spec, s.dense.tensors))
    return Placement(layers, CPU, context, kv_tokens, {CPU: s.parts, DISK: s.left_on_disk}, tables)


def split_of(d: Dense, placement: Placement) -> DenseSplit:
    """Return the rows that a placement holds."""
    held = {}
    for i, phases in d.layers.items():
        rows = placement.layers[i].ranges[0].held
        assert rows is not None, "a layer with an FFN"
        held[i] = tuple(-(-n // p.each) for p, n in zip(phases, rows, strict=True))
    return DenseSplit(dict(placement.bytes.get(CPU, {})), held, d)
