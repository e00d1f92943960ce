"""A mixture's routing played through caches: the hits of every policy, and of Belady's, which is the ceiling.

Policies of the core are its own code (`plan/disk/expert_hits.py`), the others `cache_policies.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from thermocline.offline.cache_policies import POLICIES as OF_NEURONS
from thermocline.offline.cache_policies import S3FIFO, Belady, Maker
from thermocline.offline.routing.statistics import Choices
from thermocline.plan.disk.expert_hits import F32, I32, POLICY, Bool, missed, needs_of

# The engine's first, the ceiling last.
POLICIES = (POLICY, *(name for name in OF_NEURONS if name != "belady"), "belady")
IN_PYTHON: dict[str, Maker] = {"s3fifo": S3FIFO, "belady": Belady}
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)  # of a layer's experts, that have slots


@dataclass(frozen=True)
class Ceiling:
    """The hits of a policy in one size of the cache, from the first token on."""

    held: float  # share of the experts of each layer
    slots: int
    policy: str
    hit_rate: float
    missed_per_token: float  # experts that are read, of all layers
    missed_by_layer: tuple[float, ...]


def ceilings(
    found: Choices, policies: Sequence[str], likely: Mapping[int, F32] | None = None, batch: int = 1
) -> Iterator[Ceiling]:
    """Yield each size and policy. `likely`: of layer number n of `found`, by a profile: what is there first.

    `batch`: steps decode so many parts of the trace together.
    """
    active = found.chosen[0].shape[1]
    needs = [needs_of(chosen, found.experts, batch) for chosen in found.chosen]
    needed, tokens = sum(int(n.sum()) for n in needs), len(needs[0]) * batch
    for held in SHARES:
        slots = max(1, round(held * found.experts))
        for policy in policies:
            each = [
                int(played(n, slots, policy, active, None if likely is None else likely[i]).sum())
                for i, n in enumerate(needs)
            ]
            by_layer = tuple(m / tokens for m in each)
            yield Ceiling(held, slots, policy, 1 - sum(each) / needed, sum(by_layer), by_layer)


def played(needs: Bool, slots: int, policy: str, active: int, likely: F32 | None) -> I32:
    """Return how many experts of a layer each step reads, [steps]."""
    if policy not in IN_PYTHON:
        return missed(needs, slots, likely, active, policy)
    if slots >= needs.shape[1]:
        return np.zeros(len(needs), np.int32)
    frequency = np.zeros(needs.shape[1], np.float32) if likely is None else likely
    order = np.argsort(-frequency, kind="stable")  # these policies begin with the first ones
    made = IN_PYTHON[policy](needs[:, order], slots, frequency[order].astype(np.float64), 0)
    return np.array([len(made.step(np.flatnonzero(row))) for row in needs[:, order]], np.int32)
