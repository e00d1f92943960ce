"""A memory budget divided among neurons: how many of each layer have slots in memory.

Rows are records of one size, a neuron each, of one layer. This is arithmetic on numbers alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thermocline import _native

F64 = NDArray[np.float64]

STEP = 32  # places that are given at a time
LEAST = 4  # places of a layer, of a mixture each expert: there are hundreds of these
# What the disk reads in the time that one more read costs it: memory saves more where rows are short.
OPERATION_BYTES = 32 << 10


@dataclass(frozen=True)
class NeuronRows:
    """One layer's (or expert's) rows of one kind. `need`: the probability that a step needs each."""

    stride: int  # bytes of a place
    need: F64  # the largest first
    asked: float = 1.0  # of steps, those that need any: of an expert's, those that go there

    @property
    def place_bytes(self) -> int:
        return self.stride + _native.limits().slot_table_bytes

    @property
    def least(self) -> int:
        return min(LEAST, len(self.need))

    @property
    def table_bytes(self) -> int:
        return _native.limits().record_table_bytes * len(self.need)

    @property
    def least_bytes(self) -> int:
        """Below this they cannot be on disk."""
        return self.table_bytes + self.least * self.place_bytes


@dataclass(frozen=True)
class Share:
    """Memory for a layer's rows: `hot`, all of them, or `quota` slots in which they take turns.

    Part of them pinned would only cost: text has hot neurons of its own (LOG, "Cache policies").
    """

    hot: int
    quota: int

    @property
    def places(self) -> int:
        return self.hot + self.quota


def split(rows: Sequence[NeuronRows], room: int) -> list[Share] | None:
    """`room` bytes for places and tables; None where that is too little.

    Places go, some at a time, to whoever then misses fewest reads for the bytes. A cache that keeps what it
    needed most often, beginning with what the profile says, holds about the hottest rows.
    """
    room -= sum(x.least_bytes for x in rows)
    if room < 0:
        return None
    value, size, owner = [], [], []
    for i, x in enumerate(rows):
        starts = np.arange(x.least, len(x.need), STEP)
        counts = np.diff(np.append(starts, len(x.need)))
        saved = np.add.reduceat(x.need, starts) / counts if len(starts) else np.empty(0)
        value.append(saved * ((x.stride + OPERATION_BYTES) / x.place_bytes))
        size.append(counts)
        owner.append(np.full(len(starts), i))
    counts, owners = np.concatenate(size), np.concatenate(owner)
    order = np.argsort(-np.concatenate(value), kind="stable")
    place_bytes = np.array([x.place_bytes for x in rows])[owners[order]]
    taken = order[np.cumsum(counts[order] * place_bytes) <= room]
    places = np.bincount(owners[taken], weights=counts[taken], minlength=len(rows)).astype(np.int64)
    every = ((x.least + int(n), len(x.need)) for x, n in zip(rows, places, strict=True))
    return [Share(n, 0) if n == neurons else Share(0, n) for n, neurons in every]


@dataclass(frozen=True)
class Fetch:
    """Reads from disk that a step is expected to need for some rows."""

    rows: float
    reads: float
    bytes: float


def fetch(x: NeuronRows, share: Share, *, ordered: bool) -> Fetch:
    """Return a step's reads, if steps draw their neurons independently and the hottest ones have the slots.

    `ordered`: rows lie as `x.need` has them. Rows near each other are read at once, with the bytes between.
    """
    missed = x.need[share.places :] / x.asked
    if not len(missed):
        return Fetch(0.0, 0.0, 0.0)
    p = missed if ordered else np.full(len(x.need), missed.sum() / len(x.need))
    absent = np.log1p(-np.minimum(p, 1 - 1e-9))
    between, reads = np.zeros(len(p)), p.copy()
    nbytes = p * x.stride
    for gap in range(
        _native.limits().gap_bytes // x.stride + 1
    ):  # the row before that is missed is `gap` rows away
        if gap + 1 >= len(p):
            break
        near = p[gap + 1 :] * p[: -gap - 1] * np.exp(between[gap + 1 :])
        reads[gap + 1 :] -= near
        nbytes[gap + 1 :] += near * gap * x.stride
        between[gap + 1 :] += absent[: -gap - 1]
    return Fetch(*(x.asked * float(each.sum()) for each in (p, reads, nbytes)))
