"""The cache policies that a replay compares: which neurons of a layer are in its slots, step by step.

A step needs a set of neurons; those without a slot are read. At first the lowest numbers, the hottest, are
there. The policies that the engine can run are the core's own code (csrc/storage/policy.h); S3-FIFO and
Belady's optimum, which it cannot, are here to compare with.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from thermocline import _native

Bool = NDArray[np.bool_]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

SMALL_SHARE, MAX_USES = 0.1, 3  # S3-FIFO: of the slots, for what is new; uses that are counted


class Policy(Protocol):
    """A cache policy for one layer."""

    def step(self, needed: I64) -> I64:
        """Return which of `needed` were not there. Both ascending."""


class Maker(Protocol):
    def __call__(self, needs: Bool, slots: int, frequency: F64, hot: int) -> Policy:
        """Return a cache at its start.

        `needs` [steps, neurons]: the trace that will be played. `frequency` [neurons]: each neuron's by a
        profile. Neurons [0, `hot`) are always there; the others share `slots`.
        """


class Native:
    """The engine's cache with a policy of the core: an engine of one thread misses the same neurons."""

    def __init__(self, policy: str, needs: Bool, slots: int, frequency: F64, hot: int) -> None:
        neurons = needs.shape[1]
        likely = frequency.astype(np.float32)
        self._cache = _native.CacheReplay(policy, neurons=neurons, hot=hot, slots=slots, likely=likely)
        self._missed = np.empty(neurons, np.int32)

    def step(self, needed: I64) -> I64:
        n = self._cache.step(needed.astype(np.int32), self._missed)
        return np.sort(self._missed[:n]).astype(np.int64)


def native(policy: str) -> Maker:
    """Return the maker of a policy that the core has."""

    def made(needs: Bool, slots: int, frequency: F64, hot: int) -> Policy:
        return Native(policy, needs, slots, frequency, hot)

    return made


class Belady:
    """Knows the trace, and keeps what is needed next: no policy can miss less often.

    When a step is over, the best of what was there and of what was read stay.
    """

    def __init__(self, needs: Bool, slots: int, frequency: F64, hot: int) -> None:
        neurons = needs.shape[1]
        self._slots, self._steps, self._hot = slots, 0, hot
        self._inside = np.arange(neurons) < hot + slots
        self._next = next_uses(needs)
        self._score = -self._next[0].astype(np.float64)
        self._bias = np.arange(neurons) / neurons / -2  # less than any difference of scores

    def step(self, needed: I64) -> I64:
        missed = needed[~self._inside[needed]]
        self._steps += 1
        self._score[needed] = -self._next[self._steps][needed]
        if len(missed):
            self._inside[missed] = True
            there = self._hot + np.flatnonzero(self._inside[self._hot :])
            gone = len(there) - self._slots
            if gone > 0:
                order = self._score[there] + self._bias[there]
                self._inside[there[np.argpartition(order, gone - 1)[:gone]]] = False
        return missed


def next_uses(needs: Bool) -> NDArray[np.int32]:
    """Return the first step from each one on that needs a neuron, [steps + 1, neurons]; `steps`: none."""
    steps = len(needs)
    out = np.full((steps + 1, needs.shape[1]), steps, np.int32)
    for i in range(steps - 1, -1, -1):
        out[i] = np.where(needs[i], i, out[i + 1])
    return out


class S3FIFO:
    """S3-FIFO, with two queues: new neurons that are not used again leave soon and are remembered a while."""

    def __init__(self, needs: Bool, slots: int, frequency: F64, hot: int) -> None:
        neurons = needs.shape[1]
        self._slots, self._small_slots = slots, max(1, round(SMALL_SHARE * slots))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque(range(hot, min(hot + slots, neurons)))
        self._left: dict[int, None] = {}  # in the order of leaving
        self._inside = np.arange(neurons) < hot + slots
        self._uses = np.zeros(neurons, np.int8)

    def step(self, needed: I64) -> I64:
        there = self._inside[needed]
        hit, missed = needed[there], needed[~there]
        self._uses[hit] = np.minimum(self._uses[hit] + 1, MAX_USES)
        for neuron in missed.tolist():
            while len(self._small) + len(self._main) >= self._slots:
                self._evict()
            self._inside[neuron], self._uses[neuron] = True, 0
            (self._main if self._left.pop(neuron, 0) is None else self._small).append(neuron)
        return missed

    def _evict(self) -> None:
        """Evict one neuron, or move one from one queue to the other."""
        small = len(self._small) >= self._small_slots or not self._main
        neuron = (self._small if small else self._main).popleft()
        uses = self._uses[neuron]
        if uses > (1 if small else 0):
            self._uses[neuron] = 0 if small else uses - 1
            self._main.append(neuron)
            return
        self._inside[neuron] = False
        if small:
            self._left[neuron] = None
            if len(self._left) > self._slots - self._small_slots:
                del self._left[next(iter(self._left))]


POLICIES: dict[str, Maker] = {
    "pinned": native("pinned"),
    "lru": native("lru"),
    "s3fifo": S3FIFO,
    "lfu": native("lfu"),
    "belady": Belady,
}
