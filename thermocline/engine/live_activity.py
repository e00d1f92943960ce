"""Sums over decode steps, by layer and tier, for a live view of which neurons and experts are active."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thermocline.ops.interface import DiskCounts, ExpertUse, FFNStats


@dataclass(frozen=True)
class ExpertActivity:
    """The use of a layer's experts."""

    n: int  # experts of the layer
    used: tuple[tuple[int, int], ...]  # (expert, tokens that went to it), by number; experts that were used
    needed: int  # experts on disk that steps asked for
    missed: int  # of those, experts that were not in memory


@dataclass(frozen=True)
class LayerActivity:
    """Shares of a layer's neurons."""

    active: float  # not zero, for the mean token
    computed: float  # with up and down rows read, in the mean step
    asked: float  # with gate rows read, in the mean step
    experts: ExpertActivity | None = None  # None: there is no router


@dataclass(frozen=True)
class ActivityReport:
    """The decode steps since the last report. Prompts do not count: they are computed densely."""

    tokens: int
    seconds: float
    bytes: float  # weights, keys and values read from memory
    layers: tuple[LayerActivity, ...] | None  # None: a GPU's recorded step counts all layers together
    disk: DiskCounts | None  # None: all neurons are in memory
    on_gpu: bool  # whether a GPU computes at least a part


class ActivityMeter:
    """Collects decode steps. Adding a step appends to lists; `take` adds them up."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu
        self._clear()

    def _clear(self) -> None:
        self._tokens, self._seconds, self._bytes = 0, 0.0, 0.0
        self._layers: list[list[int]] = []
        self._experts: list[list[ExpertUse | None]] = []
        self._all = [0, 0, 0]  # neurons, rows and gates that dense steps would have had, of all layers
        self._disk: DiskCounts | None = None

    def counting(self) -> FFNStats:
        """Return statistics for a step to fill in before it is added."""
        return FFNStats(layers=[], experts=[])

    def add(
        self, stats: FFNStats, *, tokens: int, seconds: float, bytes: float, disk: DiskCounts | None
    ) -> None:
        self._tokens += tokens
        self._seconds += seconds
        self._bytes += bytes
        if stats.layers:
            self._layers.append(stats.layers)
            self._all[0] += stats.neurons
            self._all[1] += stats.rows_dense
            self._all[2] += stats.gates_dense
        if stats.experts:
            self._experts.append(stats.experts)
        if disk is not None:
            known = self._disk or DiskCounts()
            self._disk = DiskCounts(*(a + b for a, b in zip(known, disk, strict=True)))

    def take(self) -> ActivityReport | None:
        """Return the report of the steps since the last call, or None if there were none."""
        if not self._tokens:
            return None
        layers = self._shares() if self._layers else None
        found = ActivityReport(self._tokens, self._seconds, self._bytes, layers, self._disk, self._on_gpu)
        self._clear()
        return found

    def _shares(self) -> tuple[LayerActivity, ...]:
        counts = np.array(self._layers, np.int64).sum(axis=0).reshape(-1, 3)  # [layers, counts]
        of_one = np.array(self._all) / len(counts)  # a model's layers are all of one size
        made = [LayerActivity(*shares) for shares in (counts / of_one).tolist()]
        if not self._experts:
            return tuple(made)
        experts = map(_used, zip(*self._experts, strict=True))  # of each layer, the uses of all steps
        return tuple(replace(x, experts=e) for x, e in zip(made, experts, strict=True))


def _used(steps: tuple[ExpertUse | None, ...]) -> ExpertActivity | None:
    uses = [u for u in steps if u is not None]
    if not uses:
        return None
    tokens: NDArray[np.int64] = np.array([u.tokens for u in uses], np.int64).sum(axis=0)
    used = tuple((int(e), int(tokens[e])) for e in np.flatnonzero(tokens))
    return ExpertActivity(len(tokens), used, sum(u.needed for u in uses), sum(u.missed for u in uses))
