"""A memory budget divided among neurons: which are pinned, and how many places the others share.

Rows are records of one size, a neuron each: of a layer, hottest first. The first `hot` of them are always in
memory; the rest take turns in `quota` places. Pure numbers: must not know files, tensors or the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

CHUNK = 256  # neurons that are pinned together: those of one partial sum (csrc/ffn.cpp)
ADAPTIVE = 0.25  # of the places, those that rows take turns in: text drifts from what was counted
LEAST = 256  # places for a layer's rows that take turns, where it has so many
SLOT_BYTES = 32  # of the tables, beside a place itself
ROW_BYTES = 16  # of the tables, for each neuron: its checksum and where it is
# What the disk reads in the time that one more read costs it: a byte pinned saves more where rows are short.
OPERATION_BYTES = 16 << 10


@dataclass(frozen=True)
class Rows:
    """One layer's rows of one kind. `need`: the probability that a step needs each."""

    stride: int  # bytes of a place
    need: F64
    ordered: bool  # are they hottest first? else none is pinned

    @property
    def place_bytes(self) -> int:
        return self.stride + SLOT_BYTES

    @property
    def least_bytes(self) -> int:
        """Below this they cannot be on disk."""
        return self.table_bytes + min(LEAST, len(self.need)) * self.place_bytes

    @property
    def table_bytes(self) -> int:
        return ROW_BYTES * len(self.need)


@dataclass(frozen=True)
class Share:
    """What a layer's rows have of the memory."""

    hot: int  # a multiple of CHUNK, or all
    quota: int

    @property
    def places(self) -> int:
        return self.hot + self.quota


def split(rows: Sequence[Rows], room: int) -> list[Share] | None:
    """`room` bytes for places and tables; None where that is too little.

    Pinned are the chunks whose absence would cost the disk most for their bytes. The other places are divided
    as one cache of all rows would be in the long run: with a life of T steps after its last use, a row that
    a step needs with probability p is there with 1 - (1 - p)^T, and T is what fills the room.
    """
    room -= sum(x.table_bytes for x in rows)
    if sum(x.place_bytes * len(x.need) for x in rows) <= room:
        return [Share(len(x.need), 0) for x in rows]
    least = sum(x.least_bytes - x.table_bytes for x in rows)
    if least > room:
        return None
    hot = _pinned(rows, room - max(least, int(ADAPTIVE * room)))
    room -= sum(n * x.place_bytes for n, x in zip(hot, rows, strict=True))
    return [Share(n, q) for n, q in zip(hot, _quotas(rows, hot, room), strict=True)]


def _pinned(rows: Sequence[Rows], room: int) -> list[int]:
    """Of each, how many: chunks in order of what they save, until the first that does not fit."""
    value, size, owner = [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for i, x in enumerate(rows):
        if not x.ordered:
            continue
        starts = np.arange(0, len(x.need), CHUNK)
        counts = np.diff(np.append(starts, len(x.need)))
        means = np.minimum.accumulate(np.add.reduceat(x.need, starts) / counts)  # a chunk after those before
        value.append(means * ((x.stride + OPERATION_BYTES) / x.place_bytes))
        size.append(counts * x.place_bytes)
        owner.append(np.full(len(starts), i))
    order = np.argsort(-np.concatenate(value), kind="stable")
    sizes, owners = np.concatenate(size)[order], np.concatenate(owner)[order]
    taken = np.cumsum(sizes) <= room
    hot = np.bincount(owners[taken], minlength=len(rows)) * CHUNK
    return [min(int(n), len(x.need)) for n, x in zip(hot, rows, strict=True)]


def _quotas(rows: Sequence[Rows], hot: Sequence[int], room: int) -> list[int]:
    """Of each, how many places: all of `room`, whole and never over it."""
    cold = [x.need[n:] for x, n in zip(rows, hot, strict=True)]

    def places(life: float) -> list[int]:
        there = (_present(need, life) if len(need) else 0.0 for need in cold)
        return [
            min(len(need), max(min(LEAST, len(need)), int(n))) for n, need in zip(there, cold, strict=True)
        ]

    def fits(life: float) -> bool:
        return sum(n * x.place_bytes for n, x in zip(places(life), rows, strict=True)) <= room

    low, high = 0.0, 1.0
    while fits(high) and high < 1e15:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return places(low)


def _present(need: F64, life: float) -> float:
    """How many of the rows are expected in a cache where a row stays `life` steps after its last use."""
    return float(-np.expm1(life * np.log1p(-np.minimum(need, 1 - 1e-12))).sum())


def misses(need: F64, share: Share) -> float:
    """Rows that a step is expected to need and not find, where tokens draw their neurons independently."""
    cold = need[share.hot :]
    if share.quota >= len(cold):
        return 0.0
    if share.quota == 0:
        return float(cold.sum())
    low, high = 0.0, 1.0
    while _present(cold, high) < share.quota and high < 1e15:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _present(cold, middle) < share.quota else (low, middle)
    return float((cold * np.exp(low * np.log1p(-np.minimum(cold, 1 - 1e-12)))).sum())
