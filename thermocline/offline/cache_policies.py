"""Cache policies that a replay compares: which of a layer's neurons are in its slots.

A step needs a set of neurons; those without a slot are read from disk. At first the slots hold the lowest
numbers, which are the hottest neurons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bool = NDArray[np.bool_]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# LFU (LOG, "Cache policies"): steps after which a use counts half, and steps for which the profile counts.
HALF_LIFE, PRIOR = 64.0, 16.0
SMALL_SHARE, MAX_USES = 0.1, 3  # S3-FIFO: the share of slots for new neurons, and the most uses counted


class Policy(Protocol):
    """A cache policy for one layer."""

    def step(self, needed: I64) -> I64:
        """Serve a step. Return the neurons of `needed` that were not in slots. Both are ascending."""


Maker = Callable[
    [Bool, int, F64], Policy
]  # needs [steps, neurons], slots, each neuron's frequency by a profile


class Pinned:
    """Never replaces a neuron."""

    def __init__(self, needs: Bool, slots: int, frequency: F64) -> None:
        self._slots = slots

    def step(self, needed: I64) -> I64:
        return needed[needed >= self._slots]


class Scored:
    """After each step, keeps the neurons with the highest scores among those in slots and those read."""

    def __init__(self, needs: Bool, slots: int, frequency: F64) -> None:
        neurons = needs.shape[1]
        self._slots, self._steps = slots, 0
        self._inside = np.arange(neurons) < slots
        self._score = np.zeros(neurons)
        self._bias = np.arange(neurons) / neurons / -2  # less than any difference of scores

    def _use(self, needed: I64) -> None:
        raise NotImplementedError

    def step(self, needed: I64) -> I64:
        missed = needed[~self._inside[needed]]
        self._steps += 1
        self._use(needed)
        if len(missed):
            self._inside[missed] = True
            there = np.flatnonzero(self._inside)
            gone = len(there) - self._slots
            if gone > 0:
                order = self._score[there] + self._bias[there]
                self._inside[there[np.argpartition(order, gone - 1)[:gone]]] = False
        return missed


class LRU(Scored):
    """Keeps the most recently used neurons."""

    def _use(self, needed: I64) -> None:
        self._score[needed] = self._steps


class LFU(Scored):
    """Counts uses, with less weight for old ones, on top of the frequencies of a profile."""

    def __init__(self, needs: Bool, slots: int, frequency: F64) -> None:
        super().__init__(needs, slots, frequency)
        self._bias = PRIOR * frequency + 1e-6 * self._bias

    def _use(self, needed: I64) -> None:
        self._score *= 0.5 ** (1 / HALF_LIFE)
        self._score[needed] += 1


class Belady(Scored):
    """Knows the trace and keeps the neurons that are needed next. No policy can miss less often."""

    def __init__(self, needs: Bool, slots: int, frequency: F64) -> None:
        super().__init__(needs, slots, frequency)
        self._next = next_uses(needs)
        self._score[:] = -self._next[0]

    def _use(self, needed: I64) -> None:
        self._score[needed] = -self._next[self._steps][needed]


def next_uses(needs: Bool) -> NDArray[np.int32]:
    """Return the next step that needs each neuron, from each step on [steps + 1, neurons].

    A neuron that is not needed again has the value `steps`.
    """
    steps = len(needs)
    out = np.full((steps + 1, needs.shape[1]), steps, np.int32)
    for i in range(steps - 1, -1, -1):
        out[i] = np.where(needs[i], i, out[i + 1])
    return out


class S3FIFO:
    """S3-FIFO, with two queues: new neurons that are not used again leave soon and are remembered a while."""

    def __init__(self, needs: Bool, slots: int, frequency: F64) -> None:
        neurons = needs.shape[1]
        self._slots, self._small_slots = slots, max(1, round(SMALL_SHARE * slots))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque(range(min(slots, neurons)))
        self._left: dict[int, None] = {}  # in the order of leaving
        self._inside = np.arange(neurons) < slots
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
    "pinned": Pinned,
    "lru": LRU,
    "s3fifo": S3FIFO,
    "lfu": LFU,
    "belady": Belady,
}
