"""A mixture's routing played through caches: the hits of every policy, and of Belady's, which is the ceiling.

Policies of the core are its own code (`plan/disk/expert_hits.py`), the others `cache_policies.py`'s.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.offline.cache_policies import POLICIES as OF_NEURONS
from thermocline.offline.cache_policies import S3FIFO, Belady, Maker
from thermocline.offline.routing.statistics import Choices
from thermocline.plan.disk.expert_hits import F32, I32, POLICY, Bool, missed, needs_of

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers
    from thermocline.offline.routing.statistics import I64 as Chosen

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
    found: Choices,
    policies: Sequence[str],
    likely: Mapping[int, F32] | None = None,
    batch: int = 1,
    *,
    across: Workers | None = None,
    progress: Callable[[int, int], None] = lambda done, layers: None,
) -> list[Ceiling]:
    """Return each size and policy. `likely`: of layer number n of `found`, by a profile: what is there first.

    `batch`: steps decode so many parts of the trace together. `across`: who plays the layers; None: this
    process.
    """
    work = PlayedLayers(found.experts, tuple(policies), batch)
    layers = [(chosen, None if likely is None else likely[i]) for i, chosen in enumerate(found.chosen)]
    local: Generator[LayerPlayed] = (work.play(layer) for layer in layers)
    played_layers: list[LayerPlayed] = []
    with contextlib.closing(local if across is None else across.map(work, layers, 0)) as found_by_layer:
        for layer in found_by_layer:
            played_layers.append(layer)
            progress(len(played_layers), len(layers))
    needed, tokens = sum(x.needed for x in played_layers), played_layers[0].steps * batch
    rows = []
    for i, (held, policy) in enumerate(itertools.product(SHARES, policies)):
        each = [x.missed[i] for x in played_layers]
        by_layer = tuple(m / tokens for m in each)
        rows.append(
            Ceiling(
                held, _slots(held, found.experts), policy, 1 - sum(each) / needed, sum(by_layer), by_layer
            )
        )
    return rows


def _slots(held: float, experts: int) -> int:
    return max(1, round(held * experts))


@dataclass(frozen=True)
class LayerPlayed:
    """A layer's sums."""

    needed: int  # experts of all steps
    steps: int
    missed: tuple[int, ...]  # of each size and each policy in it


@dataclass(frozen=True)
class PlayedLayers:
    """Playing a layer through every cache, here or in a worker."""

    experts: int
    policies: tuple[str, ...]
    batch: int

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[Callable[[tuple[Chosen, F32 | None]], LayerPlayed]]:
        yield self.play

    def play(self, layer: tuple[Chosen, F32 | None]) -> LayerPlayed:
        chosen, likely = layer
        needs = needs_of(chosen, self.experts, self.batch)
        missed = tuple(
            int(played(needs, _slots(held, self.experts), policy, chosen.shape[1], likely).sum())
            for held, policy in itertools.product(SHARES, self.policies)
        )
        return LayerPlayed(int(needs.sum()), len(needs), missed)


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
