"""Which neurons of a layer hold its slots: the policies a replay compares, one step of a model at a time.

A step needs a set of neurons. Those without a slot are read and take one, in place of neurons the step does not
need; where even those are too few, the rest is read and dropped. At first the lowest numbers, which are the
hottest, are there. Must not know what a slot holds, nor what a read costs.
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

HALF_LIFE = 128.0  # steps after which a use counts half, in LFU (LOG, "Cache policies")
SMALL_SHARE, MAX_USES = 0.1, 3  # of S3-FIFO: of the slots, for what is new; uses that are counted


class Policy(Protocol):
    def step(self, needed: I64) -> I64:
        """What of `needed` was not there. Both ascending."""


class Pinned:
    """Nothing is ever replaced."""

    def __init__(self, needs: Bool, slots: int) -> None:
        self._slots = slots

    def step(self, needed: I64) -> I64:
        return needed[needed >= self._slots]


class Scored:
    """Evicts what has the lowest score; of equals the higher number, which is the colder neuron."""

    def __init__(self, needs: Bool, slots: int) -> None:
        neurons = needs.shape[1]
        self._slots, self._now = slots, 0
        self._inside = np.arange(neurons) < slots
        self._score = np.zeros(neurons)
        self._lower = np.arange(neurons) / neurons / 2  # less than any difference of scores

    def _use(self, needed: I64) -> None:
        raise NotImplementedError

    def step(self, needed: I64) -> I64:
        missed = needed[~self._inside[needed]]
        self._use(needed)
        self._now += 1
        if len(missed):
            self._replace(needed, missed)
        return missed

    def _replace(self, needed: I64, missed: I64) -> None:
        rest = self._inside.copy()
        rest[needed] = False
        victims = np.flatnonzero(rest)
        free = self._slots - int(np.count_nonzero(self._inside))
        gone = min(len(victims), len(missed) - free)
        if gone > 0:
            order = self._score[victims] - self._lower[victims]
            self._inside[victims[np.argpartition(order, gone - 1)[:gone]]] = False
        self._inside[missed[: free + max(0, gone)]] = True


class LRU(Scored):
    def _use(self, needed: I64) -> None:
        self._score[needed] = self._now + 1


class LFU(Scored):
    """Uses are counted, and count half after HALF_LIFE steps."""

    half_life = HALF_LIFE

    def _use(self, needed: I64) -> None:
        self._score *= 0.5 ** (1 / self.half_life)
        self._score[needed] += 1


class Belady(Scored):
    """Evicts what is needed last: no policy can miss less often. It knows the trace."""

    def __init__(self, needs: Bool, slots: int) -> None:
        super().__init__(needs, slots)
        self._next = next_uses(needs)
        self._score[:] = -self._next[0]

    def _use(self, needed: I64) -> None:
        self._score[needed] = -self._next[self._now + 1][needed]


def next_uses(needs: Bool) -> NDArray[np.int32]:
    """[steps + 1, neurons]: the first step from this one on that needs the neuron; `steps + 1`: none does."""
    steps = len(needs)
    out = np.full((steps + 1, needs.shape[1]), steps + 1, np.int32)
    for i in range(steps - 1, -1, -1):
        out[i] = np.where(needs[i], i, out[i + 1])
    return out


class S3FIFO:
    """Two queues: what is new and unused leaves soon; what leaves is remembered for a while."""

    def __init__(self, needs: Bool, slots: int) -> None:
        neurons = needs.shape[1]
        self._slots, self._small_slots = slots, max(1, round(SMALL_SHARE * slots))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque(range(min(slots, neurons)))
        self._ghost: dict[int, None] = {}  # in the order of leaving
        self._inside = np.arange(neurons) < slots
        self._uses = np.zeros(neurons, np.int8)
        self._kept = np.zeros(neurons, np.bool_)  # of this step

    def step(self, needed: I64) -> I64:
        there = self._inside[needed]
        hit, missed = needed[there], needed[~there]
        self._uses[hit] = np.minimum(self._uses[hit] + 1, MAX_USES)
        self._kept[needed] = True
        self._spent = {id(self._small): False, id(self._main): False}
        for neuron in missed.tolist():
            if len(self._small) + len(self._main) >= self._slots and not self._evict():
                break
            self._inside[neuron] = True
            self._uses[neuron] = 0
            (self._main if self._ghost.pop(neuron, 0) is None else self._small).append(neuron)
        self._kept[needed] = False
        return missed

    def _evict(self) -> bool:
        """One, unless the step needs all there are."""
        if len(self._small) >= self._small_slots:
            return self._from(self._small) or self._from(self._main)
        return self._from(self._main) or self._from(self._small)

    def _from(self, queue: deque[int]) -> bool:
        """Once a queue has only what the step needs, that stays so until the step is over."""
        kept = 0
        while kept < len(queue) and not self._spent[id(queue)]:
            neuron = queue.popleft()
            kept = kept + 1 if self._kept[neuron] else 0
            if self._kept[neuron]:
                queue.append(neuron)
            elif queue is self._small and self._uses[neuron] > 1:
                self._uses[neuron] = 0
                self._main.append(neuron)
            elif queue is self._main and self._uses[neuron] > 0:
                self._uses[neuron] -= 1
                queue.append(neuron)
            else:
                self._leave(neuron, queue is self._small)
                return True
        self._spent[id(queue)] = True
        return False

    def _leave(self, neuron: int, remembered: bool) -> None:
        self._inside[neuron] = False
        if remembered:
            self._ghost[neuron] = None
            if len(self._ghost) > self._slots - self._small_slots:
                del self._ghost[next(iter(self._ghost))]


POLICIES: dict[str, Callable[[Bool, int], Policy]] = {
    "pinned": Pinned,
    "lru": LRU,
    "s3fifo": S3FIFO,
    "lfu": LFU,
    "belady": Belady,
}
