"""A trace played through caches of neurons, instead of a model: what is found, read, and how long it takes.

Which neurons are pinned and how many places the others share is for others to say; the time is `plan`'s
(`cost.py`). Must not know flags, nor how a trace is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thermocline.offline.cache_policies import F64, POLICIES, Bool
from thermocline.offline.need_trace import Trace
from thermocline.plan.cache_split import Share
from thermocline.plan.cost import TOKEN_US, head_columns, step_us
from thermocline.plan.problem import Problem


@dataclass(frozen=True)
class Counts:
    """Of each step and layer, the neurons that are needed, and those that are read from disk."""

    needed: F64  # [steps, layers]
    missed: F64

    @property
    def hit_rate(self) -> float:
        return 1.0 - float(self.missed.sum()) / max(1.0, float(self.needed.sum()))


def needs_of(trace: Trace, layer: int, batch: int) -> Bool:
    """[steps, neurons]: what a step needs that decodes `batch` parts of the trace side by side."""
    active = trace.layer(layer)
    steps = len(active) // batch
    parts = active[: steps * batch].reshape(batch, steps, -1)
    found: Bool = np.asarray(parts.any(axis=0))
    return found


def replay(
    trace: Trace, shares: Sequence[Share], frequency: Sequence[F64], policy: str, batch: int = 1
) -> Counts:
    """`shares`: of each layer, of a mixture of each of its experts, how many of the first are pinned, and how
    many places the others have. `frequency`: of each layer.
    """
    needed, missed, n = [], [], trace.experts
    for i, frequencies in enumerate(frequency):
        needs = needs_of(trace, i, batch)
        parts = zip(
            np.split(needs, n, axis=1), shares[i * n : (i + 1) * n], np.split(frequencies, n), strict=True
        )
        needed.append(np.count_nonzero(needs, axis=1).astype(np.float64))
        missed.append(sum((_missed(*part, policy) for part in parts), np.zeros(len(needs))))
    return Counts(np.stack(needed, axis=1), np.stack(missed, axis=1))


def _missed(needs: Bool, share: Share, frequency: F64, policy: str) -> F64:
    """Return how many neurons each step reads, [steps]."""
    steps, neurons = needs.shape
    if share.places >= neurons:
        return np.zeros(steps)
    made = POLICIES[policy](needs, share.quota, frequency, share.hot)
    return np.array([len(made.step(np.flatnonzero(row))) for row in needs], np.float64)


def even_shares(neurons: int, parts: int, share: float) -> list[Share]:
    """Places for so many of the neurons of each of `parts` layers or experts, none of them pinned."""
    return [Share(0, max(1, round(share * neurons)))] * parts


# ---- how long that takes


@dataclass(frozen=True)
class Times:
    """Of each step, in microseconds."""

    us: F64
    waited_us: F64  # of them, for the disk

    @property
    def tokens_per_s(self) -> float:
        return 1e6 / float(self.us.mean())


def times(p: Problem, counts: Counts) -> Times:
    """A layer's reads run beside its own FFN, as the pipeline has them; nothing runs ahead of its layer."""
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
