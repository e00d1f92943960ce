"""Calibrate predictors: find the threshold of every neuron's score from samples.

Errors have a price in bytes. So one measure, bytes per token with the price of errors, decides which gate
rows are read, which neurons are not scored, and which rank and kind a layer gets. The error of a missed
neuron is the square of its mass, |h| times the norm of the down row: missed contributions are nearly
orthogonal, and a model's divergence grows with their squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.ops.interface import F32

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# The price of missing everything that a layer adds, as a multiple of its gate's bytes. The bundled model
# reaches a divergence of 0.005 between 10 and 100.
PRICES: F64 = 10.0 ** np.arange(-1.0, 4.01, 0.125)
SCORED = 1024  # neurons whose scores are computed at a time
TYPICAL = int(np.abs(PRICES - 50).argmin())


@dataclass(frozen=True)
class LayerSamples:
    """Samples of one layer: the gate's inputs and the active neurons, ordered by token."""

    x: F32  # [n, dim]
    indptr: I64  # [n + 1]: token t's entries of the next two
    neuron: I64  # [nnz]
    mass: F32  # [nnz]: |h| times the norm of the down row
    neurons: int
    chosen: NDArray[np.bool_] | None = None  # [n, experts]: the experts of each token; None: one expert

    @property
    def n(self) -> int:
        return len(self.x)

    @property
    def experts(self) -> int:
        return 1 if self.chosen is None else self.chosen.shape[1]

    @property
    def per_expert(self) -> int:
        return self.neurons // self.experts

    @property
    def asked(self) -> F32:
        """Return the share of tokens that go to each neuron's expert [neurons]."""
        if self.chosen is None:
            return np.ones(self.neurons, np.float32)
        return np.repeat(self.chosen.mean(axis=0, dtype=np.float32), self.per_expert)

    def asks(self) -> NDArray[np.bool_]:
        """Return whether each token goes to each neuron's expert [n, neurons]."""
        if self.chosen is None:
            return np.ones((self.n, self.neurons), np.bool_)
        return np.repeat(self.chosen, self.per_expert, axis=1)

    def of_expert(self, e: int) -> I64:
        """Return the tokens that go to expert `e`."""
        return np.arange(self.n) if self.chosen is None else np.flatnonzero(self.chosen[:, e])

    @property
    def token(self) -> I64:
        """Return the token of each entry [nnz]."""
        return np.repeat(np.arange(self.n), np.diff(self.indptr))

    @property
    def energy(self) -> float:
        return float((self.mass.astype(np.float64) ** 2).sum())

    def take(self, tokens: I64) -> LayerSamples:
        """Return the samples of these tokens, in this order."""
        counts = np.diff(self.indptr)[tokens]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(indptr[-1]) + np.repeat(self.indptr[tokens] - indptr[:-1], counts)
        chosen = None if self.chosen is None else self.chosen[tokens]
        return LayerSamples(self.x[tokens], indptr, self.neuron[at], self.mass[at], self.neurons, chosen)

    def dense(self) -> F32:
        """Return the mass of every neuron for every token [n, neurons]."""
        out = np.zeros((self.n, self.neurons), np.float32)
        out[self.token, self.neuron] = self.mass
        return out

    def by_neuron(self) -> Iterator[tuple[I64, F64]]:
        """Yield for every neuron the tokens that need it, and its mass for them."""
        order = np.argsort(self.neuron, kind="stable")
        tokens, mass = self.token[order], self.mass[order]
        ends = np.searchsorted(self.neuron[order], np.arange(self.neurons + 1))
        for begin, end in pairwise(ends):
            yield tokens[begin:end], mass[begin:end].astype(np.float64)


@dataclass(frozen=True)
class Curves:
    """Each neuron's best threshold at every price, and its effect."""

    threshold: F32  # [prices, neurons]
    predicted: F32  # [prices, neurons]: share of tokens for which the neuron is predicted active
    missed: F32  # [prices, neurons]: share of the layer's energy that is missed
    missed_mass: F32  # [prices, neurons]: share of the layer's mass that is missed
    missed_count: F32  # [prices, neurons]: share of the layer's active neurons that are missed
    asked: F32  # [neurons]: share of tokens that go to its expert
    active: float  # share of neurons that are active
    experts: int = 1


def curves(scores: Callable[[int, int], F32], a: LayerSamples) -> Curves:
    """Find the best thresholds at every price.

    `scores(begin, end)` are those of neurons [begin, end) for the samples' tokens, [n, end - begin]: of all
    neurons at once they would be twice as large as all else.
    """
    shape = (len(PRICES), a.neurons)
    threshold, predicted_share, missed, missed_mass, missed_count = np.empty((5, *shape), np.float32)
    own = [a.of_expert(e) for e in range(a.experts)]
    energy, mass = max(a.energy, 1e-30), max(float(a.mass.sum(dtype=np.float64)), 1e-30)
    price = PRICES[:, None] * (float(a.asked.sum()) / energy)
    for i, (tokens, masses) in enumerate(a.by_neuron()):
        if i % SCORED == 0:
            columns = np.ascontiguousarray(scores(i, min(i + SCORED, a.neurons)).T)
        mine = own[i // a.per_expert]
        cuts, predicted, caught = _cuts(columns[i % SCORED][mine], np.searchsorted(mine, tokens), masses)
        best = (predicted / a.n - price * caught.squares).argmin(axis=1)
        threshold[:, i] = cuts[best]
        predicted_share[:, i] = predicted[best] / a.n
        missed[:, i] = (caught.squares[-1] - caught.squares[best]) / energy
        missed_mass[:, i] = (caught.mass[-1] - caught.mass[best]) / mass
        missed_count[:, i] = (caught.number[-1] - caught.number[best]) / max(len(a.neuron), 1)
    active = len(a.neuron) / (a.n * a.neurons)
    return Curves(threshold, predicted_share, missed, missed_mass, missed_count, a.asked, active, a.experts)


class Caught(NamedTuple):
    """Sums over the tokens that each threshold of a neuron catches, the highest first; the last has all."""

    squares: F64  # of mass
    mass: F64
    number: F64


def _cuts(score: F32, tokens: I64, mass: F64) -> tuple[F32, I64, Caught]:
    """Return one neuron's candidate thresholds: above all scores, and below each active token's score.

    The result is (thresholds, number of tokens at or above each, what they catch). A threshold is half-way
    to the next lower score. Without any scores, the only threshold is below all scores.
    """
    if not len(score):
        return np.array([-np.inf], np.float32), np.zeros(1, np.int64), Caught(*np.zeros((3, 1)))
    ordered = np.sort(score)
    best_first = np.argsort(-score[tokens], kind="stable")
    below = np.searchsorted(ordered, score[tokens][best_first], "left")
    edge = np.concatenate([[-np.inf], ordered]).astype(np.float32)
    half = ((edge[below] + ordered[below]) / np.float32(2)).astype(np.float32)
    above = np.nextafter(ordered[-1:], np.float32(np.inf))
    ordered_mass = mass[best_first]
    each = (ordered_mass**2, ordered_mass, np.ones(len(tokens)))
    caught = Caught(*(np.concatenate([[0.0], np.cumsum(x)]) for x in each))
    return np.concatenate([above, half]), np.concatenate([[0], len(score) - below]), caught


@dataclass(frozen=True)
class Costs:
    """Bytes that a predictor and a gate read for a token."""

    first: int  # the predictor's fixed part, for all chosen experts
    ask: int  # for each neuron that is scored
    gate: int  # for each gate row


@dataclass(frozen=True)
class PredictionQuality:
    """The quality of predictions on samples. Only neurons of the chosen experts count."""

    active: float  # share of neurons that are active
    predicted: float  # share of neurons that are predicted active
    recall: float  # share of the active neurons that are predicted
    missed_mass: float  # share of all mass that is missed
    missed_energy: float  # share of all squares of mass that is missed

    @staticmethod
    def of(c: Curves, price: int, hot: int) -> PredictionQuality:
        """Return the quality at a price, if neurons [0, hot) of each expert count as active."""
        scored = np.arange(len(c.asked)) % (len(c.asked) // c.experts) >= hot

        def missed(share: F32) -> float:
            return float(share[price][scored].sum(dtype=np.float64))

        predicted = np.where(scored, c.predicted[price], c.asked)
        return PredictionQuality(
            active=c.active,
            predicted=float(predicted.mean(dtype=np.float64)),
            recall=1.0 - missed(c.missed_count),
            missed_mass=missed(c.missed_mass),
            missed_energy=missed(c.missed),
        )

    @staticmethod
    def exact(a: LayerSamples) -> PredictionQuality:
        """Return the quality of reading every gate row."""
        return PredictionQuality(len(a.neuron) / (a.n * a.neurons), float(a.asked.mean()), 1.0, 0.0, 0.0)


@dataclass(frozen=True)
class OperatingPoint:
    """The thresholds of one layer at one price, and their cost."""

    threshold: F32  # [neurons]
    hot: int  # neurons [0, hot) of each expert are not scored: that would cost more than it saves
    bytes: float  # bytes of predictor and gate for a token
    objective: float  # the same, with the price of errors
    quality: PredictionQuality


def choose_operating_point(c: Curves, costs: Costs, price: int) -> OperatingPoint:
    """Return a layer's thresholds at `PRICES[price]`, with the number of hot neurons that costs least."""
    share = c.asked.astype(np.float64)

    def by_place(of_neurons: F64) -> F64:
        """Add up the values of all experts: [neurons] -> [neurons of an expert]."""
        summed: F64 = of_neurons.reshape(c.experts, -1).sum(axis=0)
        return summed

    error = by_place(c.missed[price].astype(np.float64)) * (PRICES[price] * float(share.sum()) * costs.gate)
    asked = by_place(share * costs.ask + c.predicted[price].astype(np.float64) * costs.gate)
    gate = by_place(share * costs.gate)
    # The change of the total for every `hot`: neurons below it read their gate rows and are not scored.
    done = np.concatenate([[0.0], np.cumsum(gate - (asked + error))])
    hot = int(done.argmin())
    read = costs.first + float(gate[:hot].sum()) + float(asked[hot:].sum())
    quality = PredictionQuality.of(c, price, hot)
    return OperatingPoint(c.threshold[price], hot, read, read + float(error[hot:].sum()), quality)
