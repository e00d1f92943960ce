"""How often each neuron is needed: from a profile, from a pack's counts, or from a curve said to be one.

Owns the sources of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.synthetic_weights import ACTIVE, HOTTEST, activities
from thermocline.files.bounded import open_regular, read_at
from thermocline.model.spec import ModelSpec
from thermocline.pack.activity_profile import Profile, open_profile
from thermocline.pack.pack import Pack
from thermocline.pack.stored_model import StoredModel

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Hotness:
    """`at(layer, batch)`: the probability that a step of `batch` tokens needs each neuron, expert by expert,
    each one's hottest first.
    """

    source: str  # for a person
    measured: bool
    at: Callable[[int, int], F64]
    key: Callable[[int], int] = int  # equal for layers known to be alike
    ordered: bool = True  # do neurons lie in that order?
    excess: float | None = None  # gate rows that predictors name for an active neuron; None: not measured


@dataclass(frozen=True)
class Curve:
    """The assumed activity of a model without a profile (synthetic_weights.py has the words)."""

    active: float | None = None
    skew: float = 0.26

    def hotness(self, spec: ModelSpec) -> Hotness:
        active = ACTIVE if self.active is None else self.active
        neurons = spec.n_experts * spec.ffn_dim
        return assumed(spec.n_layers, neurons, active, self.skew, spec.n_experts, spec.routed(1))


def of_pack(pack: StoredModel, curve: Curve, excess: float | None = None) -> Hotness:
    """Return the hotness of a pack: by its profile, else its authors' counts, else `curve`.

    A curve that says how many neurons are active comes first."""
    spec = pack.spec
    sparse = pack if isinstance(pack, Pack) and spec.sparse else None  # others have no profile
    profile = None if sparse is None else open_profile(sparse)
    if profile is not None and curve.active is None:
        return replace(profiled(profile), excess=excess)
    found = None if sparse is None or curve.active is not None else counted(sparse)
    found = found or curve.hotness(spec)
    return replace(found, ordered=profile is not None, excess=excess)


def profiled(profile: Profile) -> Hotness:
    """A batch between two buckets counts as the larger, one beyond the largest as that."""

    def at(layer: int, batch: int) -> F64:
        bucket = min((b for b in profile.buckets if b >= batch), default=max(profile.buckets))
        p = profile.hotness(layer, bucket)
        experts = profile.counts[layer].shape[1]
        return hottest_first(np.where(p > 0, p, _unseen(profile, layer)), experts)

    return Hotness(f"profile of {profile.tokens:,} tokens", True, at)


def _unseen(profile: Profile, layer: int) -> float:
    """Return the probability of a neuron that was never active: as Good and Turing estimate it."""
    counts = profile.counts[layer][0]
    never = int(np.count_nonzero(counts == 0))
    return int(np.count_nonzero(counts == 1)) / profile.tokens / never if never else 0.0


def independent(
    each: Sequence[F64], source: str, *, measured: bool, key: Callable[[int], int] = int
) -> Hotness:
    """Tokens of a batch need neurons independently: an upper bound, since real ones agree more."""
    return Hotness(source, measured, lambda layer, batch: 1.0 - (1.0 - each[layer]) ** batch, key)


def assumed(
    layers: int, neurons: int, active: float, skew: float, experts: int = 1, routed: float = 1.0
) -> Hotness:
    """Return one power law for every layer, each expert with its share; UsageError where there is none.

    `routed`: of a mixture's experts, those that a token goes to; `active` is of their neurons.
    """
    curve = routed * activities(neurons, active, skew).reshape(-1, experts).T.ravel()
    source = f"assumed: {active:.0%} of the neurons active, {skew:.0%} of them make 80 % of the activations"
    return independent([curve] * layers, source, measured=False, key=lambda layer: 0)


def counted(pack: Pack) -> Hotness | None:
    """From a pack's `activation_count` tensors; the one counted most is taken to be nearly always active."""
    names = [f"layers.{i}.activation_count" for i in range(pack.spec.n_layers)]
    if not all(name in pack.tensors for name in names):
        return None
    fd, _ = open_regular(pack.weights_path)
    with open(fd, "rb"):
        counts = [
            read_at(fd, t.offset, t.bytes, pack.weights_path).view("<f4").astype(np.float64)
            for t in (pack.tensors[name] for name in names)
        ]
    most = max(float(c.max()) for c in counts)
    if not (np.isfinite(most) and most > 0 and all(float(c.min()) >= 0 for c in counts)):
        return None
    each = [hottest_first(c * (HOTTEST / most), pack.spec.n_experts) for c in counts]
    return independent(each, "activation counts of the model's authors", measured=True)


def hottest_first(p: F64, experts: int = 1) -> F64:
    """Within each expert."""
    return np.sort(p.reshape(experts, -1), axis=1)[:, ::-1].ravel()


def in_turn(p: F64, experts: int) -> F64:
    """Each expert's hottest, then each one's second, and so on: as a GPU takes them."""
    return hottest_first(p, experts).reshape(experts, -1).T.ravel()
