"""How many requests find their expert in memory: of a mixture's own text, or as published routing has it.

Own text is the trace of a profile, played through the core's own cache (`_native.replay_experts`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.model.spec import ModelSpec
from thermocline.pack.route_profile import RouteProfile, open_routes, path_of
from thermocline.pack.stored_model import StoredModel

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Choices = NDArray[np.integer]  # [tokens, experts a token takes]

POLICY = "experts"  # the engine's: csrc/storage/policy.h
WAVES = 2  # of a token's experts: one is computed while the next is read
PLAYED = 2048  # tokens of a profile's trace
# Shares of a layer's experts at which a curve is played: between them it is taken to be straight.
PLAYED_AT = (0.02, 0.04, 0.08, 0.13, 0.2, 0.28, 0.37, 0.5, 0.65, 0.83)

# Share of a layer's experts that have a slot -> requests that find theirs in memory. Published routing of
# Qwen3-30B-A3B and Gemma 4 26B (6 of 128 experts a token), replayed with the core's policy from its first
# token on: their mean. gpt-oss-120b, of fewer tokens, has .73 at a fifth and .80 at two fifths.
HELD = np.array([0.0, 0.023, 0.031, 0.047, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0])
FOUND = np.array([0.0, 0.24, 0.29, 0.37, 0.55, 0.75, 0.85, 0.91, 0.95, 0.976, 1.0])
ROUTED = 6 / 128
# How much the share of slots counts for less where a token goes to a larger share of the experts. Of Qwen3's
# experts grouped at random, this expects at most 3 points too many hits; too few by at most 5 where they are
# grouped by 2, by 11 where by 4.
COARSER = 0.7


def published(spec: ModelSpec, slots: int, experts: int | None = None) -> float:
    """Return the share of requests for a layer's experts that published routing finds in so many slots.

    Where a token goes to a larger share of them, as large a share of slots holds fewer tokens' experts.
    `experts`: that requests are for, where the others are elsewhere; None: all.
    """
    share = slots / (experts or spec.n_experts)
    coarser = max(1.0, spec.n_experts_active / spec.n_experts / ROUTED)
    return max(share, float(np.interp(share / coarser**COARSER, HELD, FOUND)))


def needs_of(chosen: Choices, experts: int, batch: int = 1) -> Bool:
    """Return the experts that each step needs, [steps, experts], if it decodes `batch` parts of a trace."""
    n = len(chosen) // batch
    on = np.zeros((batch * n, experts), np.bool_)
    np.put_along_axis(on, chosen[: batch * n].astype(np.int64), True, axis=1)
    return np.asarray(on.reshape(batch, n, experts).any(axis=0))


def missed(needs: Bool, slots: int, likely: F32 | None, active: int, policy: str = POLICY) -> I32:
    """Return how many experts of a layer each step reads, [steps], with a policy of the core.

    `active`: the experts that a token takes.
    """
    out = np.zeros(len(needs), np.int32)
    if slots < needs.shape[1]:
        ids, ends = np.nonzero(needs)[1].astype(np.int32), np.cumsum(np.count_nonzero(needs, axis=1))
        _native.replay_experts(
            policy, ids, ends.astype(np.int64), out,
            experts=needs.shape[1], slots=slots, passing=WAVES * active, likely=likely,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class OwnRouting:
    """A mixture's own routing: how likely a token takes each expert, and what its tokens chose."""

    tokens: int  # of the profile
    experts: int
    active: int
    likely: Mapping[int, F32]  # by layer [experts]
    chosen: Mapping[int, Choices]  # by layer
    elsewhere: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # by layer, experts on a GPU
    played: dict[tuple[int, int, int], I32] = field(default_factory=dict, compare=False)  # by `missed`

    @staticmethod
    def of(p: RouteProfile) -> OwnRouting:
        likely = {i: (c / p.tokens).astype(np.float32) for i, c in p.counts.items()}
        first = next(iter(p.counts))
        return OwnRouting(p.tokens, len(p.counts[first]), p.traced[first].shape[1], likely, p.traced)

    def ranked(self, layer: int) -> list[int]:
        """Return a layer's experts, those that tokens go to most first."""
        return [int(e) for e in np.argsort(-self.likely[layer], kind="stable")]

    def without(self, elsewhere: Mapping[int, tuple[int, ...]]) -> OwnRouting:
        """Return the same of the other experts."""
        return replace(self, elsewhere=elsewhere, played={})

    def here(self, layer: int) -> I64:
        """Return the experts that are not elsewhere."""
        return np.setdiff1d(np.arange(self.experts), self.elsewhere.get(layer, ()))

    def needs(self, layer: int, batch: int = 1) -> Bool:
        """Return which of those each step of the trace needs, if it decodes `batch` tokens."""
        return needs_of(self.chosen[layer][:PLAYED], self.experts, batch)[:, self.here(layer)]

    def needed(self, layer: int, batch: int = 1) -> F64:
        """Return the share of such steps that need each of them."""
        return np.asarray(self.needs(layer, batch).mean(axis=0))

    def requests(self, layer: int) -> float:
        """Return how many of them a token needs."""
        return float(self.needed(layer).sum())

    def missed(self, layer: int, slots: int, batch: int = 1) -> I32:
        """Return how many of a layer's experts each step of the trace reads, if it decodes `batch` tokens.

        A step that needs none does not reach the cache.
        """
        at = layer, slots, batch
        if at not in self.played:
            needs = self.needs(layer, batch)
            out, some = np.zeros(len(needs), np.int32), needs.any(axis=1)
            out[some] = missed(needs[some], slots, self.likely[layer][self.here(layer)], self.active)
            self.played[at] = out
        return self.played[at]

    def found(self, layer: int, slots: int) -> float:
        """Return the share of a layer's requests that find their expert in memory."""
        requests = self.requests(layer)
        return 1.0 - float(self.missed(layer, slots).mean()) / requests if requests else 1.0

    def curve(self, layer: int) -> F64:
        """Return `found` for every number of slots, [experts here + 1], as the concave curve above it.

        So no slot is worth less than the next, and slots can be given one by one.
        """
        n = len(self.here(layer))
        at = sorted({max(1, round(share * n)) for share in PLAYED_AT})
        points = [(0, 0.0), *((k, self.found(layer, k)) for k in at if k < n), (n, 1.0)]
        x, y = zip(*_above(points), strict=True)
        curve: F64 = np.interp(np.arange(n + 1), x, y)
        return curve


def _above(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points of the upper concave hull, from left to right."""
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) > (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def own_routing(model: StoredModel) -> OwnRouting | None:
    """Return what a mixture's profile says; None if it has none. Raises BadFile for a damaged one."""
    profile = open_routes(model)
    return None if profile is None else OwnRouting.of(profile)


def routing_hash(model: StoredModel) -> dict[str, str]:
    """Return the sha256 of a model's profile of routing, by its name in a plan; nothing if it has none."""
    path = path_of(model)
    return {"routes": hashlib.sha256(path.read_bytes()).hexdigest()} if path.exists() else {}
