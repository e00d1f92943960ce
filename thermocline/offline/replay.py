"""Replay a trace through caches of neurons, without a model: hits, misses, and the time that they take.

The caller says which neurons are pinned and how many slots the others share. Times come from `plan/cost.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thermocline.offline.cache_policies import F64, POLICIES, Bool
from thermocline.offline.need_trace import Trace
from thermocline.plan.cost import TOKEN_US, head_columns, step_us
from thermocline.plan.disk.cache_split import Share
from thermocline.plan.problem import Problem


@dataclass(frozen=True)
class ReplayCounts:
    """The numbers of neurons that are needed, and that are read from disk, in each step and layer."""

    needed: F64  # [steps, layers]
    missed: F64

    @property
    def hit_rate(self) -> float:
        return 1.0 - float(self.missed.sum()) / max(1.0, float(self.needed.sum()))


def needs_of(trace: Trace, layer: int, batch: int) -> Bool:
    """Return the neurons that each step needs [steps, neurons], if it decodes `batch` parts of the trace."""
    active = trace.layer(layer)
    steps = len(active) // batch
    parts = active[: steps * batch].reshape(batch, steps, -1)
    found: Bool = np.asarray(parts.any(axis=0))
    return found


def replay(
    trace: Trace, shares: Sequence[Share], frequency: Sequence[F64], policy: str, batch: int = 1
) -> ReplayCounts:
    """Replay a trace with a cache policy.

    `shares` says for each layer (in a mixture: for each of its experts) how many of the first neurons are
    pinned and how many slots the others have. `frequency` has each layer's frequencies by a profile.
    """
    needed, missed, n = [], [], trace.experts
    for i, frequencies in enumerate(frequency):
        needs = needs_of(trace, i, batch)
        parts = zip(
            np.split(needs, n, axis=1), shares[i * n : (i + 1) * n], np.split(frequencies, n), strict=True
        )
        needed.append(np.count_nonzero(needs, axis=1).astype(np.float64))
        missed.append(sum((_missed(*part, policy) for part in parts), np.zeros(len(needs))))
    return ReplayCounts(np.stack(needed, axis=1), np.stack(missed, axis=1))


def _missed(needs: Bool, share: Share, frequency: F64, policy: str) -> F64:
    """Return how many neurons each step reads, [steps]."""
    steps, neurons = needs.shape
    if share.places >= neurons:
        return np.zeros(steps)
    made = POLICIES[policy](needs, share.quota, frequency, share.hot)
    return np.array([len(made.step(np.flatnonzero(row))) for row in needs], np.float64)


def even_shares(neurons: int, parts: int, share: float) -> list[Share]:
    """Return slots for a share of the neurons of each of `parts` layers or experts, with none pinned."""
    return [Share(0, max(1, round(share * neurons)))] * parts


# ---- times


@dataclass(frozen=True)
class Times:
    """The times of all steps, in microseconds."""

    us: F64
    waited_us: F64  # the part of `us` spent waiting for the disk

    @property
    def tokens_per_s(self) -> float:
        return 1e6 / float(self.us.mean())


def times(p: Problem, counts: ReplayCounts) -> Times:
    """Return the times of a replay. A layer's reads run beside its own FFN, and none begin earlier."""
    work = p.work()
    v = p.speeds(work)
    us = np.zeros(len(counts.needed))
    waited = us.copy()
    for i, layer in enumerate(p.layers(work)):
        took, idle = step_us(layer, v, work, counts.needed[:, i], counts.missed[:, i])
        us += took
        waited += idle
    head = head_columns(p.sizes, v, gpu=False).cpu_us[0]
    return Times(us + head + TOKEN_US, waited)
