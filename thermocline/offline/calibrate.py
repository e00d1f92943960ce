"""When a predictor's score means active: the threshold of every neuron, from samples.

Errors have a price, in bytes, so that all choices are one: which gate rows are read, which neurons are not
asked about, which rank and kind a layer gets, are what costs the fewest bytes, with those of errors. An error
is the square of what is missed, |h| times the norm of the down row: missed contributions are nearly
orthogonal, and a model's divergence grows with their squares. Must not know packs, nor how scores are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from thermocline.ops.interface import F32

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

# What missing all that a layer adds would cost, as a multiple of its gate's bytes. The bundled model is at a
# divergence of 0.005 between 10 and 100.
PRICES: F64 = 10.0 ** np.arange(-1.0, 4.01, 0.125)
TYPICAL = int(np.abs(PRICES - 50).argmin())


@dataclass(frozen=True)
class Activity:
    """Tokens of one layer: what the gate saw, and which neurons were active, ordered by token."""

    x: F32  # [n, dim]
    indptr: I64  # [n + 1]: token t's entries of the next two
    neuron: I64  # [nnz]
    mass: F32  # [nnz]: |h| times the norm of the down row
    neurons: int
    chosen: NDArray[np.bool_] | None = None  # [n, experts]: where a mixture's tokens went; None: one expert

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
        """[neurons]: the share of tokens that go to its expert."""
        if self.chosen is None:
            return np.ones(self.neurons, np.float32)
        return np.repeat(self.chosen.mean(axis=0, dtype=np.float32), self.per_expert)

    def asks(self) -> NDArray[np.bool_]:
        """[n, neurons]: does the token go to its expert."""
        if self.chosen is None:
            return np.ones((self.n, self.neurons), np.bool_)
        return np.repeat(self.chosen, self.per_expert, axis=1)

    def of_expert(self, e: int) -> I64:
        """The tokens that go there."""
        return np.arange(self.n) if self.chosen is None else np.flatnonzero(self.chosen[:, e])

    @property
    def token(self) -> I64:
        """[nnz]."""
        return np.repeat(np.arange(self.n), np.diff(self.indptr))

    @property
    def energy(self) -> float:
        return float((self.mass.astype(np.float64) ** 2).sum())

    def take(self, tokens: I64) -> Activity:
        """Of these tokens, in this order."""
        counts = np.diff(self.indptr)[tokens]
        indptr = np.concatenate([[0], np.cumsum(counts)])
        at = np.arange(indptr[-1]) + np.repeat(self.indptr[tokens] - indptr[:-1], counts)
        chosen = None if self.chosen is None else self.chosen[tokens]
        return Activity(self.x[tokens], indptr, self.neuron[at], self.mass[at], self.neurons, chosen)

    def dense(self) -> F32:
        """[n, neurons]: mass."""
        out = np.zeros((self.n, self.neurons), np.float32)
        out[self.token, self.neuron] = self.mass
        return out

    def by_neuron(self) -> Iterator[tuple[I64, F64]]:
        """For every neuron: the tokens that need it, and the square of its mass there."""
        order = np.argsort(self.neuron, kind="stable")
        tokens, squares = self.token[order], self.mass[order].astype(np.float64) ** 2
        ends = np.searchsorted(self.neuron[order], np.arange(self.neurons + 1))
        for begin, end in pairwise(ends):
            yield tokens[begin:end], squares[begin:end]


@dataclass(frozen=True)
class Curves:
    """For every price: each neuron's best threshold, and what it does. Shares are of tokens and of energy."""

    threshold: F32  # [prices, neurons]
    predicted: F32  # [prices, neurons]
    missed: F32  # [prices, neurons]
    asked: F32  # [neurons]: the share of tokens that go to its expert
    experts: int = 1


def curves(scores: F32, a: Activity) -> Curves:
    """scores [n, neurons] of the same tokens."""
    shape = (len(PRICES), a.neurons)
    threshold, predicted_share, missed = (np.empty(shape, np.float32) for _ in range(3))
    out = Curves(threshold, predicted_share, missed, a.asked, a.experts)
    own = [a.of_expert(e) for e in range(a.experts)]
    energy = max(a.energy, 1e-30)
    price = PRICES[:, None] * (float(a.asked.sum()) / energy)
    columns = np.ascontiguousarray(scores.T)
    for i, (tokens, squares) in enumerate(a.by_neuron()):
        mine = own[i // a.per_expert]
        cuts, predicted, caught = _cuts(columns[i][mine], np.searchsorted(mine, tokens), squares)
        best = (predicted / a.n - price * caught).argmin(axis=1)
        out.threshold[:, i] = cuts[best]
        out.predicted[:, i] = predicted[best] / a.n
        out.missed[:, i] = (squares.sum() - caught[best]) / energy
    return out


def _cuts(score: F32, tokens: I64, squares: F64) -> tuple[F32, I64, F64]:
    """One neuron's thresholds worth a look: above all scores, then below each active token's score.

    -> (threshold, tokens at or above it, their squares), of each. A threshold is half-way to the next score;
    where no score was seen, below all.
    """
    if not len(score):
        return np.array([-np.inf], np.float32), np.zeros(1, np.int64), np.zeros(1)
    ordered = np.sort(score)
    best_first = np.argsort(-score[tokens], kind="stable")
    below = np.searchsorted(ordered, score[tokens][best_first], "left")
    edge = np.concatenate([[-np.inf], ordered]).astype(np.float32)
    half = ((edge[below] + ordered[below]) / np.float32(2)).astype(np.float32)
    above = np.nextafter(ordered[-1:], np.float32(np.inf))
    caught = np.concatenate([[0.0], np.cumsum(squares[best_first])])
    return np.concatenate([above, half]), np.concatenate([[0], len(score) - below]), caught


@dataclass(frozen=True)
class Costs:
    """Bytes read for a token."""

    first: int  # whatever is asked; of a mixture, by all chosen experts
    ask: int  # for each neuron that is asked about
    gate: int  # a gate row


@dataclass(frozen=True)
class Choice:
    """One layer at one price."""

    threshold: F32  # [neurons]
    hot: int  # of each expert neurons [0, hot) are computed without asking: asking costs more than it saves
    bytes: float  # of predictor and gate, for a token
    objective: float  # with the errors, in bytes


def choose(c: Curves, costs: Costs, price: int) -> Choice:
    """The best of a layer's thresholds and break-even at `PRICES[price]`."""
    share = c.asked.astype(np.float64)

    def by_place(of_neurons: F64) -> F64:
        """[neurons of an expert]: of all experts."""
        summed: F64 = of_neurons.reshape(c.experts, -1).sum(axis=0)
        return summed

    error = by_place(c.missed[price].astype(np.float64)) * (PRICES[price] * float(share.sum()) * costs.gate)
    asked = by_place(share * costs.ask + c.predicted[price].astype(np.float64) * costs.gate)
    gate = by_place(share * costs.gate)
    # Total with the first `hot` not asked, for every `hot`: theirs are gate rows, of the others what is left.
    done = np.concatenate([[0.0], np.cumsum(gate - (asked + error))])
    hot = int(done.argmin())
    read = costs.first + float(gate[:hot].sum()) + float(asked[hot:].sum())
    return Choice(c.threshold[price], hot, read, read + float(error[hot:].sum()))


@dataclass(frozen=True)
class Figures:
    """What predictions did on samples."""

    active: float  # fraction of neurons
    predicted: float
    recall: float  # of the active ones, those predicted
    missed_mass: float  # share of all mass
    missed_energy: float  # share of all squares of mass

    @staticmethod
    def of(predicted: NDArray[np.bool_], a: Activity) -> Figures:
        """predicted [n, neurons], of which those of the chosen experts count."""
        predicted = predicted & a.asks()
        missed = ~predicted[a.token, a.neuron]
        mass = a.mass.astype(np.float64)
        size = a.n * a.neurons
        return Figures(
            active=len(a.neuron) / size,
            predicted=float(predicted.mean()),
            recall=1.0 - float(missed.mean()) if len(missed) else 1.0,
            missed_mass=float(mass[missed].sum() / max(mass.sum(), 1e-30)),
            missed_energy=float((mass[missed] ** 2).sum() / max(a.energy, 1e-30)),
        )
