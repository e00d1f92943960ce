"""The statistics of routing that decide how well a cache of experts works, means over layers.

Every figure is of the tokens in their order, one sequence. Hits are counted after the first quarter.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

HELD = (0.1, 0.2, 0.4)  # shares of a layer's experts: those that are hottest, or that a cache holds
LAGS = (1, 2, 4, 8, 16, 32)
WARM = 0.25  # of the tokens
HALF_LIFE = 16  # tokens, of the decayed frequency


@dataclass(frozen=True)
class Choices:
    """The experts that consecutive tokens chose in the layers that have routers."""

    chosen: tuple[I64, ...]  # by layer [tokens, experts a token takes]
    experts: int
    source: str


@dataclass(frozen=True)
class RoutingStatistics:
    """How uneven, how lasting and how much alike between layers choices are.

    skew     share of the choices that fall on the hottest experts, by the share of experts
    overlap  share of a token's experts that an earlier token has too, by the distance between them: all of it
             that a static preference, topics and the text's repetition bring
    lru, decayed  hits of a cache for a share of the experts: least recently used, or decayed frequency
    touched  share of the experts that some token chose
    alike    correlation between one layer and the next of how many experts two tokens share
    """

    tokens: int
    layers: int
    experts: int
    active: int
    skew: dict[str, float]
    overlap: dict[str, float]
    lru: dict[str, float]
    decayed: dict[str, float]
    touched: float
    alike: float | None
    overlap_by_layer: list[float]


def measure(found: Choices) -> RoutingStatistics:
    """Return the statistics of some choices, at least two tokens'."""
    layers, experts = [_marked(c, found.experts) for c in found.chosen], found.experts
    tokens, active = found.chosen[0].shape
    held = {f"{share:.0%}": max(1, round(share * experts)) for share in HELD}
    counts = [-np.sort(-on.sum(axis=0)) / (tokens * active) for on in layers]
    lags = [lag for lag in LAGS if lag < tokens]
    overlaps = {
        lag: [float((on[lag:] * on[:-lag]).sum()) / active / (tokens - lag) for on in layers] for lag in lags
    }
    return RoutingStatistics(
        tokens=tokens,
        layers=len(layers),
        experts=experts,
        active=active,
        skew={name: _mean(c[:n].sum() for c in counts) for name, n in held.items()},
        overlap={str(lag): _mean(each) for lag, each in overlaps.items()},
        lru={name: _mean(hit_rate(c, n, 0) for c in found.chosen) for name, n in held.items()},
        decayed={name: _mean(hit_rate(c, n, HALF_LIFE) for c in found.chosen) for name, n in held.items()},
        touched=_mean(np.count_nonzero(c) / experts for c in counts),
        alike=_alike(layers, active),
        overlap_by_layer=overlaps[1],
    )


def hit_rate(chosen: I64, slots: int, half_life: float) -> float:
    """Return the share of choices [tokens, active] that a cache of so many experts holds, in its later part.

    When a token is over, those with the best score stay, and all that it took where they fit. A score is
    Σ 2^(-age / half_life) over an expert's uses. A `half_life` of 0 is least recently used.
    """
    score: dict[int, float] = {}
    inside: set[int] = set()
    hits = asked = 0
    fade = 2.0 ** (-1 / half_life) if half_life else 0.0
    for t, needed in enumerate(chosen.tolist()):
        if t >= WARM * len(chosen):
            hits += sum(e in inside for e in needed)
            asked += len(needed)
        score = {e: s * fade for e, s in score.items()} if half_life else score
        for place, e in enumerate(needed):  # a token's own: the last that it named came last
            score[e] = score.get(e, 0.0) + 1 if half_life else t + place / len(needed)
        now = set(needed)
        others = heapq.nlargest(max(0, slots - len(now)), inside - now, key=score.__getitem__)
        inside = now.union(others) if len(now) <= slots else set(needed[-slots:])
    return hits / max(1, asked)


def _marked(chosen: I64, experts: int) -> NDArray[np.float32]:
    on = np.zeros((len(chosen), experts), np.float32)
    np.put_along_axis(on, chosen, 1, axis=1)
    return on


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))


def _alike(layers: Sequence[NDArray[np.float32]], active: int) -> float | None:
    """Return the mean correlation of two tokens' common experts between a layer and the next."""
    tokens = min(len(layers[0]), 1024)
    pairs = np.triu_indices(tokens, 1)
    shared = ((on[:tokens] @ on[:tokens].T)[pairs] for on in layers)
    before, found = next(shared), []
    for after in shared:
        if before.std() > 0 and after.std() > 0:
            found.append(float(np.corrcoef(before, after)[0, 1]))
        before = after
    return _mean(found) if found else None
