"""A mixture whose experts take turns in memory: what one is on disk, and how many a budget has room for.

All that every token needs is resident. `run` and `plan` ask the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from thermocline import _native
from thermocline.errors import OutOfBudget
from thermocline.model.sizes import aligned
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import ALIGN, TensorInfo
from thermocline.ops.interface import CPU
from thermocline.plan.disk.cache_split import OPERATION_BYTES
from thermocline.plan.disk.disk_split import (
    looked_up,
    resident,
    resident_parts,
    tables_left,
    tensors_beside,
)
from thermocline.plan.disk.expert_hits import WAVES, OwnRouting, published
from thermocline.plan.memory import gib_up, size_down, size_up
from thermocline.plan.placement import DISK, LayerPlacement, NeuronRange, Placement

DEPTH, PIECE_BYTES = 64, 256 << 10  # reads in flight, and of how many bytes: a slab is read in such pieces
SLABS = ("gate.weight", "up.weight", "down.weight", "bundle")  # an expert's; a bundle has up and down
LEAST = 1  # slots of a layer
EVEN = 0.2  # of a slot's worth: so much less is a layer's last than its first, beside what it saves
GROUP_ROWS = 32  # of a thread that arranges them
ARRANGED_ROWS = 512  # of all, at least: 16 threads
RUN_TABLE_BYTES = 320  # the core's tables of a slab: where it lies in the file, its checksums


@dataclass(frozen=True)
class Slab:
    """One of an expert's tensors: `rows` rows, or records of a bundle, from byte `at` of a slot on."""

    tensor: str
    at: int
    rows: int
    stride: int

    @property
    def bytes(self) -> int:
        return self.rows * self.stride


@dataclass(frozen=True)
class Record:
    """An expert of a layer, as it lies in a slot. Layers of one stride share a pool of slots."""

    slabs: tuple[Slab, ...]
    stride: int

    @staticmethod
    def of(tensors: Mapping[str, TensorInfo], layer: int) -> Record:
        limits = _native.limits()
        at, end, slabs = 0, 0, []

        def begin_after(end: int) -> int:
            return -(-end // limits.slot_alignment) * limits.slot_alignment

        for part in SLABS:
            name = f"layers.{layer}.{part}"
            if name not in tensors:
                continue  # not gated, or in the bundle
            rows, stride = tensors[name].shape[1], tensors[name].stride
            slabs.append(Slab(name, at, rows, stride))
            end = at + rows * stride
            at = begin_after(end)
        # Kernels read a little behind a matrix: never into the next slot, which may be filled meanwhile.
        return Record(tuple(slabs), begin_after(end + limits.arena_padding))

    @property
    def bytes(self) -> int:
        """Return the bytes that are read for it."""
        return sum(s.bytes for s in self.slabs)


@dataclass(frozen=True)
class Mixture:
    """The weights that memory is divided for: a model's, or those of a shape that could be one."""

    spec: ModelSpec
    tensors: Mapping[str, TensorInfo]
    routing: OwnRouting | None = field(default=None, compare=False)  # by its profile, where it has one
    elsewhere: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by layer, experts on a GPU
    threads: int = 1  # of a session, which arrange rows

    def beside(self, placement: Placement) -> Mixture:
        """Return what RAM and disk hold beside a GPU."""
        there = {i: x.whole for i, x in enumerate(placement.layers) if x.whole}
        routing = None if self.routing is None else self.routing.without(there)
        tensors = tensors_beside(self.spec, self.tensors, placement)
        return Mixture(self.spec, tensors, routing, there, self.threads)

    def here(self, layer: int) -> list[int]:
        """Return the experts of a layer that RAM and disk hold."""
        there = self.elsewhere.get(layer, ())
        return [e for e in range(self.spec.n_experts) if e not in there]

    @cached_property
    def counts(self) -> dict[int, int]:
        """How many those are, by layer that has some."""
        layers = (i for i in range(self.spec.n_layers) if self.spec.ffn(i).experts > 1)
        return {i: n for i in layers if (n := len(self.here(i)))}

    @cached_property
    def records(self) -> dict[int, Record]:
        """By layer, where it has experts."""
        return {i: Record.of(self.tensors, i) for i in self.counts}

    @cached_property
    def resident(self) -> list[str]:
        """The tensors that are in memory whole, in file order."""
        left = {s.tensor for r in self.records.values() for s in r.slabs}
        bundles = [n for n in self.tensors if n.endswith(".bundle")]  # also of layers without experts
        names = {*resident(self.spec, self.tensors, gates=False), *bundles} - left
        return sorted(names, key=lambda n: self.tensors[n].offset)

    @property
    def strides(self) -> list[int]:
        """The strides of the pools."""
        return sorted({r.stride for r in self.records.values()})

    @property
    def passing(self) -> int:
        """Slots of each pool that belong to the running call."""
        return WAVES * self.spec.n_experts_active

    @property
    def depth(self) -> int:
        """Return how many reads are in flight at most."""
        return DEPTH

    @property
    def piece_bytes(self) -> int:
        """Return what is read at a time: some rows of a slab, or all, with what is read around them."""
        slabs = [s for r in self.records.values() for s in r.slabs]
        longest, row = (aligned(max(x)) + 2 * ALIGN for x in ([s.bytes for s in slabs], self._rows))
        return max(row, min(PIECE_BYTES, longest))

    @property
    def _rows(self) -> list[int]:
        """The bytes of rows."""
        return [s.stride for r in self.records.values() for s in r.slabs]

    @property
    def arranging_bytes(self) -> int:
        """Return what threads take besides, to arrange rows."""
        return max(ARRANGED_ROWS, GROUP_ROWS * self.threads) * max(self._rows)

    @property
    def buffer_bytes(self) -> int:
        """Return what reads take, and what they pass through."""
        passing = sum(self.passing * stride + ALIGN for stride in self.strides)
        each, slab = _native.limits().record_table_bytes, RUN_TABLE_BYTES
        tables = sum(self.counts[i] * (each + slab * len(r.slabs)) for i, r in self.records.items())
        return self.depth * self.piece_bytes + passing + self.arranging_bytes + tables

    @property
    def bytes(self) -> int:
        """Return the bytes of all experts."""
        return sum(self.counts[i] * r.bytes for i, r in self.records.items())


@dataclass(frozen=True)
class ExpertSplit:
    """A budget divided among a mixture's parts. `parts` add up to all the memory that is ever taken."""

    parts: dict[str, int]
    slots: dict[int, int]  # experts that each layer with experts has in memory at a time
    mixture: Mixture

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Return the share of all experts that have a slot, or are on a GPU."""
        there = sum(map(len, self.mixture.elsewhere.values()))
        return (sum(self.slots.values()) + there) / (sum(self.mixture.counts.values()) + there)

    @property
    def left_on_disk(self) -> dict[str, int]:
        """Part -> bytes that are not in memory at a time."""
        m = self.mixture
        held = sum(n * m.records[i].bytes for i, n in self.slots.items())
        return tables_left(m.spec, m.tensors) | {"experts": m.bytes - held}

    def hits(self, layer: int) -> float:
        """Return the share of requests for a layer's experts that are expected to find them in memory."""
        m, n = self.mixture, self.slots[layer]
        return published(m.spec, n, m.counts[layer]) if m.routing is None else m.routing.found(layer, n)


# ---- dividing


def divide(m: Mixture, budget: int, others: Mapping[str, int], *, limit: str = "allowed") -> ExpertSplit:
    """Within `budget` bytes, of which `others` are taken. OutOfBudget with what would be enough.

    `limit`: what the budget is, for the error.
    """
    parts = _fixed(m, others)
    room = budget - sum(parts.values())
    slots = _even(m, room) if m.routing is None else _by_value(m, m.routing, room)
    if slots is None:
        need = least_bytes(m, others)
        taken = ", ".join(f"{size_up(size)} {part}" for part, size in others.items())
        raise OutOfBudget(
            f"with its experts on disk the model still needs {size_up(need)} of memory "
            f"({size_up(need - sum(others.values()))} weights and slots, {taken}), {size_down(budget)} is "
            f"{limit}; use --ram {gib_up(need)}, a shorter context or a smaller weight format"
        )
    parts["experts"] = sum(n * _slot_bytes(m.records[i]) for i, n in slots.items())
    return ExpertSplit(parts, slots, m)


def least_bytes(m: Mixture, others: Mapping[str, int]) -> int:
    """Return the smallest budget that can be divided."""
    return sum(_fixed(m, others).values()) + LEAST * sum(map(_slot_bytes, m.records.values()))


def _even(m: Mixture, room: int) -> dict[int, int] | None:
    """Return as many slots for each layer, where nobody knows how they differ; None: too little room.

    Like layers miss alike, so the next slot saves most where there are fewest.
    """
    if room < LEAST * sum(map(_slot_bytes, m.records.values())):
        return None
    slots = dict.fromkeys(m.records, 0)
    # Layers with fewer experts, the others being on a GPU, have all of theirs first.
    while lack := [i for i, n in m.counts.items() if slots[i] < n]:
        each = sum(_slot_bytes(m.records[i]) for i in lack)
        more = min(room // each, min(m.counts[i] - slots[i] for i in lack))
        if not more:
            break
        for i in lack:
            slots[i] += more
        room -= more * each
    for i in lack:  # what is left, one by one
        if (nbytes := _slot_bytes(m.records[i])) <= room:
            slots[i] += 1
            room -= nbytes
    return slots


def _by_value(m: Mixture, routing: OwnRouting, room: int) -> dict[int, int] | None:
    """Return slots for each layer; None where there is too little room.

    They go one by one to the layer that then reads fewest bytes for those that the slot takes. Layers that
    differ by little, as chance does, get about as many: waits grow faster than misses.
    """
    room -= LEAST * sum(map(_slot_bytes, m.records.values()))
    if room < 0:
        return None
    value, number, owner = [], [], []
    for i, r in m.records.items():
        saved = np.diff(routing.curve(i))[LEAST:] * routing.requests(i)
        saved *= 1 - EVEN * np.arange(len(saved)) / len(saved)
        value.append(saved * (r.bytes + OPERATION_BYTES) / _slot_bytes(r))
        number.append(np.arange(len(saved)))
        owner.append(np.full(len(saved), i))
    owners = np.concatenate(owner)
    order = np.lexsort((owners, np.concatenate(number), -np.concatenate(value)))
    sizes = np.array([_slot_bytes(m.records[int(i)]) for i in owners[order]])
    taken = owners[order[np.cumsum(sizes) <= room]]
    return {i: LEAST + int(np.count_nonzero(taken == i)) for i in m.records}


def _slot_bytes(r: Record) -> int:
    return r.stride + _native.limits().slot_table_bytes


def _fixed(m: Mixture, others: Mapping[str, int]) -> dict[str, int]:
    """Part -> bytes of all but the slots that layers keep."""
    parts = resident_parts(others, m.spec, m.tensors, m.resident)
    parts["disk buffers"] = parts.get("disk buffers", 0) + m.buffer_bytes
    return parts


# ---- as a placement


def placed(s: ExpertSplit, context: int, kv_tokens: int, beside_gpu: Placement | None = None) -> Placement:
    """Place a mixture with the slots that its experts have in RAM. `beside_gpu`: what a GPU has of it."""
    spec, tables = s.mixture.spec, tuple(looked_up(s.mixture.spec, s.mixture.tensors))
    if beside_gpu is not None:
        layers = tuple(_with_slots(x, s.slots.get(i)) for i, x in enumerate(beside_gpu.layers))
        taken = {**beside_gpu.bytes, CPU: s.parts, DISK: s.left_on_disk}
        return Placement(layers, beside_gpu.head, context, kv_tokens, taken, tables)
    layers = tuple(
        LayerPlacement(CPU, None, (NeuronRange(CPU, spec.ffn(i).width, experts=s.slots.get(i)),))
        for i in range(spec.n_layers)
    )
    return Placement(layers, CPU, context, kv_tokens, {CPU: s.parts, DISK: s.left_on_disk}, tables)


def _with_slots(x: LayerPlacement, slots: int | None) -> LayerPlacement:
    return replace(x, ranges=tuple(replace(r, experts=slots) if r.device == CPU else r for r in x.ranges))


def split_of(m: Mixture, placement: Placement) -> ExpertSplit:
    """Return the slots that a placement gives to experts."""
    held = (None if x.rest is None else x.rest.experts for x in placement.layers)
    return ExpertSplit(dict(placement.bytes[CPU]), {i: n for i, n in enumerate(held) if n is not None}, m)
