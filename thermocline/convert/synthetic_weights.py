"""The mathematics of a random model: sizes that keep its activations sane, and sparsity planted in its gates.

Says which numbers (deviations, offsets, how often each neuron is active); must not know files or formats.

A planted neuron's gate is N(offset, 1) over tokens, so its offset sets how often it is active. The offset
needs something constant to act on: the gate's bias where the model has one, else the first `BLOCK` columns of
the residual stream, which hold the same constant in every embedding and which nothing writes to afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported, UsageError
from thermocline.model.activations import activate, route
from thermocline.model.spec import ModelSpec

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

BLOCK = 32  # columns of a quantisation block: what is planted in a row begins and ends with one
LOGIT_SD = 2.5  # as trained models have: the likeliest of 32000 tokens is then about 4 deviations out
HOT_SHARE = 0.8  # `skew` is the fraction of neurons that makes this share of all activations
ACTIVE = 0.1  # of a ReLU model's neurons, unless said otherwise: what PowerInfer found in a block, on average
HOTTEST = 0.98  # no neuron is active more often
# A planted gate's variance: what all gates of a layer share, which makes some tokens livelier than others
# (without it the active fraction varies by 8 %); what no predictor explains; the rest is in `rank` columns.
MOOD_SHARE, NOISE_SHARE = 0.12, 0.1
MOODS = 3  # directions of it that depth passes through: near layers are lively together, far ones are not
# Variance that all layers together add to the residual stream. Attention averages values over positions, so
# that a tenth or so of its part is left in a context of a hundred tokens.
FFN_ADDS, ATTENTION_ADDS, AVERAGED = 0.8, 0.2, 0.1


def activities(neurons: int, active: float, skew: float) -> F64:
    """How often each neuron is active, hottest first: a power law, cut off at `HOTTEST`, with mean `active`,
    whose first `skew` of the neurons make `HOT_SHARE` of the activations. UsageError if there is none.
    """
    x = (np.arange(neurons) + 0.5) / neurons
    hot = x < skew

    def law(steepness: float) -> F64:
        shape = x**-steepness

        def cut(scale: float) -> F64:
            return np.minimum(HOTTEST, scale * shape)

        return cut(_bisect(lambda scale: float(cut(scale).mean()), active, 0.0, 1.0 / float(shape[-1])))

    def share(steepness: float) -> float:
        p = law(steepness)
        return float(p[hot].sum() / p.sum())

    steepest = 8.0
    if share(steepest) < HOT_SHARE:
        raise UsageError(
            f"--active {active:g} --skew {skew:g}: no power law has so many neurons active, and "
            f"{HOT_SHARE:.0%} of activations in so few; try a larger --skew or a smaller --active"
        )
    return law(_bisect(share, HOT_SHARE, 0.0, steepest))


def _bisect(f: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where the increasing `f` reaches `target`."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < target else (low, middle)
    return (low + high) / 2


def random_order(n: int, seed: int, *name: int) -> I64:
    """A permutation of range(n), the same on every machine and with every version of numpy."""
    return np.argsort(np.random.PCG64(np.random.SeedSequence([seed, *name])).random_raw(n), kind="stable")


@dataclass(frozen=True)
class SyntheticSparsity:
    """What is asked for: the mean active fraction (of a mixture's chosen experts), its skew (see
    `activities`), the rank of the gates, and whether neurons lie as in a profiled pack.
    """

    active: float
    skew: float
    rank: int
    hottest_first: bool = False


@dataclass(frozen=True)
class WeightStatistics:
    """Standard deviations of the weights of each kind, and what is planted."""

    spec: ModelSpec
    seed: int
    embed_sd: float
    down_sd: float
    planting: SyntheticSparsity | None
    constant: bool  # the first BLOCK columns of the residual stream are constant
    # Where neurons' values are never negative (ungated, dReLU), 2 i and 2 i + 1 are about equally hot, with
    # opposite down rows. Without this the hot neurons' mean, the same for every token, is nearly all
    # that later layers see (0.04 planned gave 0.02).
    mirrored: bool
    # [neurons of all experts] intended where tokens go there, hottest first; empty: nothing is planted
    activities: F64
    quantiles: F64  # [neurons] offsets of gates in deviations, hottest first; one 0 where nothing is planted

    @classmethod
    def of(
        cls, spec: ModelSpec, seed: int, planting: SyntheticSparsity | None, gate_bias: bool
    ) -> WeightStatistics:
        """Raises UsageError or Unsupported where the planting does not fit the model."""
        drelu = spec.up_activation == "relu"
        p, quantiles = np.empty(0), np.zeros(1)
        if planting is not None:
            _check(spec, planting, gate_bias)
            p = activities(spec.n_experts * spec.ffn_dim, planting.active, planting.skew)
            each = np.sqrt(p) if drelu else p  # gate and up are independent: both must be positive
            quantiles = np.array([NormalDist().inv_cdf(q) for q in each.tolist()])
        mean, square = _moments(spec.activation, spec.activation_threshold, quantiles)
        if drelu:
            mean_up, square_up = _moments("relu", 0.0, quantiles)
            mean, square = mean * mean_up, square * square_up
        mirrored = planting is not None and (drelu or not spec.gated) and spec.ffn_dim % 2 == 0
        power = float(np.mean(square - mean**2 if mirrored else square))
        return cls(
            spec=spec,
            seed=seed,
            # A tied head must not see the token's own embedding above all others: it is small in the sum.
            embed_sd=LOGIT_SD / math.sqrt(spec.dim) if spec.tied_head else 1.0,
            down_sd=math.sqrt(FFN_ADDS / spec.n_layers / (spec.ffn_dim * power * _mixed(spec))),
            planting=planting,
            constant=planting is not None and not gate_bias,
            mirrored=mirrored,
            activities=p,
            quantiles=quantiles,
        )

    @property
    def attn_out_sd(self) -> float:
        return math.sqrt(ATTENTION_ADDS / self.spec.n_layers / (self.spec.n_heads * self.spec.head_dim))

    @property
    def constant_value(self) -> float:
        """Of the residual stream's constant columns: about as large as the others."""
        return self.embed_sd

    def normalised(self, layer: int) -> tuple[float, float]:
        """Of the FFN norm's output: (deviation of a column over tokens, value of the constant columns)."""
        if not self.constant:
            return 1.0, 0.0
        s, c = self.spec, self.constant_value
        grown = (layer + 1) * AVERAGED * ATTENTION_ADDS + layer * FFN_ADDS
        variance = self.embed_sd**2 + grown / s.n_layers
        rms = math.sqrt(((s.dim - BLOCK) * variance + BLOCK * c**2) / s.dim)
        return math.sqrt(variance) / rms, c / rms

    def heat(self, layer: int) -> I64:
        """[neurons]: each neuron's place among the layer's, 0 the hottest."""
        assert self.planting is not None
        alike = 2 if self.mirrored else 1
        first = alike * random_order(len(self.activities) // alike, self.seed, layer, 1)
        place: I64 = (first[:, None] + np.arange(alike)).reshape(self.spec.n_experts, -1)
        return (np.sort(place, axis=1) if self.planting.hottest_first else place).reshape(-1)

    def offsets(self, layer: int, threshold: float) -> F32:
        """[neurons]: what each gate of the layer is on average."""
        deviation, _ = self.normalised(layer)
        offsets: F32 = (threshold + deviation * self.quantiles[self.heat(layer)]).astype(np.float32)
        return offsets

    def moods(self, layer: int) -> F64:
        """[MOODS]: the weights all gates of a layer have in the blocks of columns after the constant one."""
        place = (MOODS - 1) * layer / max(1, self.spec.n_layers - 1) - np.arange(MOODS)
        near: F64 = np.cos(np.clip(place, -1.0, 1.0) * (math.pi / 2))  # squares add up to 1
        return near * math.sqrt(MOOD_SHARE / BLOCK)

    def column_sd(self, layer: int) -> F32:
        """[blocks]: deviations of a gate row's weights: `rank` loud columns, the same in a whole layer."""
        assert self.planting is not None
        first = MOODS + (1 if self.constant else 0)
        usable, loud = self.spec.dim // BLOCK - first, self.planting.rank // BLOCK
        noise = NOISE_SHARE if usable > loud else 0.0
        sd = np.full(first + usable, math.sqrt(noise / (max(1, usable - loud) * BLOCK)))
        order = random_order(usable, self.seed, layer, 2)
        sd[first + order[:loud]] = math.sqrt((1 - MOOD_SHARE - noise) / self.planting.rank)
        sd[first - MOODS : first] = self.moods(layer)
        return sd.astype(np.float32)

    def truth(self) -> F32:
        """[n_layers, n_experts, ffn_dim]: how often each neuron is meant to be active."""
        s = self.spec
        rows = [self.activities[self.heat(i)].reshape(s.n_experts, s.ffn_dim) for i in range(s.n_layers)]
        return np.array(rows, np.float32) * np.float32(s.n_experts_active / s.n_experts)


def _check(spec: ModelSpec, planting: SyntheticSparsity, gate_bias: bool) -> None:
    room = spec.dim // BLOCK * BLOCK - BLOCK * (MOODS + (0 if gate_bias else 1))
    if spec.dim % BLOCK or room < BLOCK:
        raise Unsupported(
            f"sparsity cannot be planted in a model {spec.dim} wide: it takes multiples of {BLOCK}"
        )
    if planting.rank % BLOCK or not BLOCK <= planting.rank <= room:
        raise UsageError(f"--rank {planting.rank} must be a multiple of {BLOCK} from {BLOCK} to {room}")
    if not gate_bias and spec.norm != "rms":
        raise Unsupported(
            f"sparsity can be planted behind an RMS norm or a gate bias, not behind {spec.norm}"
        )


def _mixed(spec: ModelSpec) -> float:
    """The power of a mixture's answer over an expert's: the mean sum of squared weights, logits N(0, 1)."""
    if spec.n_experts == 1:
        return 1.0
    raw = np.random.PCG64(0).random_raw(max(64, 16384 // spec.n_experts) * spec.n_experts)
    normal = np.array([NormalDist().inv_cdf((int(r >> 11) + 0.5) / 2**53) for r in raw.tolist()])
    weights = route(normal.reshape(-1, spec.n_experts).astype(np.float32), spec.n_experts_active)
    return float((weights.astype(np.float64) ** 2).sum(axis=1).mean())


def _moments(activation: str, threshold: float, quantiles: F64) -> tuple[F64, F64]:
    """E[h] and E[h**2], h = activation(g), g normal around a neuron's offset; 512 neurons are enough."""
    step = -(-len(quantiles) // 512)
    offsets = threshold + quantiles[step // 2 :: step] if len(quantiles) > 1 else quantiles
    g = np.linspace(-8.0, 8.0, 1601)
    weight = np.exp(-(g**2) / 2) / np.exp(-(g**2) / 2).sum()
    h = activate((offsets[:, None] + g).astype(np.float32), activation, threshold).astype(np.float64)
    return h @ weight, h**2 @ weight
