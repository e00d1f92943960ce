"""Sample a token from logits: penalties, top-k, top-p, min-p, temperature, draw.

Temperature comes last, as in llama.cpp.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import NumericalError, UsageError
from thermocline.ops.interface import BANNED, CANDIDATES, F32, ChosenToken, TokenDraw
from thermocline.text.grammar import Constraint, Grammar

F64 = NDArray[np.float64]
Ids = NDArray[np.int64]
LARGEST = 1e38  # the bound of logits and of biases: float32 holds more than three times that
SORTED = 4096  # the most tokens that are sorted: 0.05 ms
BINS, DEEPEST = 1024, 64  # bins of logits; all odds below e^-64 are in the last one
BLOCK = 8192  # logits that are put into bins at once


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens. The defaults are llama.cpp's."""

    max_tokens: int | None = 256  # None: until the model stops or the context is full; 0: the prompt is read
    temperature: float = 0.8  # 0: greedy, the lowest id among equals
    top_k: int = 40  # keep the k most likely; 0: all
    top_p: float = 0.95  # then the fewest that together have this probability; 1: all
    min_p: float = 0.05  # then those at least this fraction as likely as the best; 0: all
    repeat_penalty: float = 1.0  # divides positive logits of recent tokens, multiplies negative ones; 1: off
    repeat_last_n: int = 64  # "recent" means the last so many tokens, with the prompt; -1: all; 0: none
    presence_penalty: float = 0.0  # subtracted from the logit of every recent token
    frequency_penalty: float = 0.0  # subtracted once per recent occurrence
    seed: int | None = None  # None: chosen at random and reported
    stop: tuple[str, ...] = ()  # end before the first of these; they are not part of the text
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # id -> added to its logit; -inf bans it
    logprobs: int | None = None  # report the token's log probability and this many alternatives
    ignore_eos: bool = False  # ban the end-of-sequence tokens, and stop_ids
    stop_ids: tuple[int, ...] = ()  # tokens that end the text besides the model's own end-of-sequence tokens
    prompt_logprobs: int | None = None  # like logprobs, for the prompt's tokens after the first
    grammar: Grammar | None = None  # the whole text must follow it; applied before the other filters
    # Tokens without text that no stop string reaches across -> whether one may be in the text behind them.
    marks: Mapping[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 0, None, optional=True)
        _check_float("temperature", self.temperature, 0, math.inf)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, 0, 1)
        _check_float("min_p", self.min_p, 0, 1)
        _check_float("repeat_penalty", self.repeat_penalty, 0, math.inf, above=True)
        _check_int("repeat_last_n", self.repeat_last_n, -1, None)
        _check_float("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _check_float("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        _check_int("seed", self.seed, 0, 2**64 - 1, optional=True)
        _check_int("logprobs", self.logprobs, 0, None, optional=True)
        _check_int("prompt_logprobs", self.prompt_logprobs, 0, None, optional=True)
        if not isinstance(self.grammar, Grammar | None):
            raise UsageError(f"grammar is a {type(self.grammar).__name__}; give a Grammar, or None")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise UsageError(f"stop is {self.stop!r}; it must be a tuple of non-empty strings")
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or token < 0:
                raise UsageError(f"logit_bias has the token {token!r}; tokens are integers from 0")
            if bias != -math.inf and not _finite(bias):
                raise UsageError(
                    f"logit_bias[{token}] is {bias}; it must be a number, or -inf to ban the token"
                )


def _finite(value: float) -> bool:
    return abs(value) <= sys.float_info.max  # math.isfinite cannot be asked of 10**400


def _check_int(name: str, value: int | None, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    good = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not good or (high is not None and value is not None and value > high):
        range_ = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} is {value!r}; it must be a whole number {range_}{' or None' * optional}")


def _check_float(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _finite(value) or not low <= value <= high or (above and value == low):
        bound = "any finite number" if low == -math.inf else f"{'above' if above else 'at least'} {low}"
        raise UsageError(
            f"{name} is {value!r}; it must be {bound}{f' and at most {high}' * (high < math.inf)}"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities from the model itself: before penalties, filters and temperature."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...]  # (id, log probability) of the most likely, best first

    @staticmethod
    def of(logits: F32, token: int, n: int) -> TokenLogprobs:
        """Return those of `token` and of the `n` most likely tokens. `logits` [vocab_size] are finite."""
        x = logits.astype(np.float64)
        x -= x.max()
        x -= math.log(np.exp(x).sum())
        ids = best(logits, min(n, len(logits))) if n else ()
        return TokenLogprobs(float(x[token]), tuple((int(i), float(x[i])) for i in ids))


def check_finite(logits: F32) -> None:
    """Raise NumericalError if a logit is NaN or infinite."""
    if not np.isfinite(logits).all():
        at = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise _damaged(float(logits[at]), at)


def _damaged(logit: float, token: int) -> NumericalError:
    return NumericalError(
        f"the model's logits hold {logit} (token {token}): its weights are damaged; "
        "check the pack with `thermocline verify`"
    )


def largest(logits: F32, k: int) -> Ids:
    """Return the ids of the k largest logits, sorted by id. Among equals lower ids win. k = 0 means all."""
    if not 0 < k < len(logits):
        return np.arange(len(logits))
    smallest = np.partition(logits, -k)[-k]
    ids = np.flatnonzero(logits >= smallest)
    return np.delete(ids, np.flatnonzero(logits[ids] == smallest)[k - len(ids) :]) if len(ids) > k else ids


def best(logits: F32, k: int) -> Ids:
    """Return the ids of the k largest logits, best first; among equals the lower id. k = 0 means all."""
    ids = largest(logits, k)
    return ids[np.argsort(-logits[ids], kind="stable")]


def ordered(x: F32, ids: Ids) -> Ids:
    """Sort few ids best first; leave many ids as they are.

    `reached` does not need an order, and sorting 152,000 ids takes 11 ms.
    """
    return ids[np.argsort(-x[ids], kind="stable")] if len(ids) <= SORTED else ids


def odds(x: NDArray[np.floating], peak: float, temperature: float) -> F64:
    """Return how likely each logit of x is, relative to a logit of `peak`."""
    y = x.astype(np.float64)
    y -= peak
    with np.errstate(over="ignore"):  # at a tiny temperature all but the best become exp(-inf) = 0
        y /= temperature
    return np.exp(y, out=y)


def reached(x: F32, temperature: float, share: float, side: Literal["left", "right"]) -> int:
    """Return the index at which the cumulated odds reach `share` of all odds.

    Odds are added in the order of falling x, the first of equals first. `side` "left" is the first sum that
    is not less than the share, "right" the first that is more. An x with odds of 0 is never returned. Sums
    of bins find the right bin, and only that bin is sorted. Bins are added in another order than a sorted
    list, which makes no difference except for a share within 1e-12 of a border.
    """
    peak, target, at = float(x.max()), math.nan, None
    while len(x) > SORTED and x.max() > x.min():
        bins, each = _bins(x, peak, temperature)
        sums = np.cumsum(each)
        target = share * float(sums[-1]) if at is None else target
        here = _first(sums, target, side)
        target -= float(sums[here - 1]) if here else 0.0
        inside = np.flatnonzero(bins == here)
        x, at = x[inside], inside if at is None else at[inside]
    order = np.argsort(-x, kind="stable")
    sums = np.cumsum(odds(x[order], peak, temperature))
    found = order[_first(sums, share * float(sums[-1]) if at is None else target, side)]
    return int(found if at is None else at[found])


def _first(sums: F64, target: float, side: Literal["left", "right"]) -> int:
    """Return the index at which `sums` reach `target`. Rounding may have put it beyond the last sum."""
    return min(int(np.searchsorted(sums, target, side)), int(np.searchsorted(sums, sums[-1])))


def _bins(x: F32, peak: float, temperature: float) -> tuple[NDArray[np.int16], F64]:
    """Return each x's bin, and each bin's sum of odds. The first bin has the largest x, but not the smallest.

    x is processed in pieces of `BLOCK`: new memory for all of x costs more than the exponentials.
    """
    top = float(x.max())
    # Banned tokens are at -inf, which a temperature of 1e307 would let through: DEEPEST of it is inf, too.
    depth = min(top - float(x.min()), max(DEEPEST * temperature, 1e-30), sys.float_info.max)
    bins, sums = np.empty(len(x), np.int16), np.zeros(BINS)
    for i in range(0, len(x), BLOCK):
        part = x[i : i + BLOCK]
        below = top - part.astype(np.float64)
        with np.errstate(over="ignore"):
            below *= (BINS - 1) / depth
        into = np.minimum(below, BINS - 1, out=below).astype(np.int64)
        sums += np.bincount(into, odds(part, peak, temperature), BINS)
        bins[i : i + BLOCK] = into
    return bins, sums


def nucleus(x: F32, top_p: float) -> Ids:
    """Return the fewest tokens that together have this probability, in the order of x."""
    if top_p == 1:
        return np.flatnonzero(x > -math.inf)
    last = reached(x, 1.0, top_p, "left")
    keep, equals = x > x[last], np.flatnonzero(x == x[last])
    keep[equals[equals <= last]] = True
    return np.flatnonzero(keep)


def likely(x: F32, top_p: float, min_p: float) -> Ids:
    """Return the tokens that top-p and then min-p keep, `ordered`.

    Both keep the beginning of the same order, so min-p may go first, which leaves fewer tokens to sort.
    """
    if len(x) > SORTED and min_p == 0:
        return ordered(x, nucleus(x, top_p))
    p = odds(x, float(x.max()), 1.0)
    left = np.flatnonzero((p >= min_p) & (x > -math.inf))  # banned tokens are never drawn
    if len(left) > SORTED:
        return ordered(x, min(left, nucleus(x, top_p), key=len))
    left = ordered(x, left)
    return left[: int(np.searchsorted(np.cumsum(p[left] / p.sum()), top_p)) + 1] if top_p < 1 else left


def kept(logits: F32, params: SamplingParams) -> Ids:
    """Return the tokens that top-k, then top-p, then min-p keep, `ordered`. There is at least one."""
    if not 0 < params.top_k < len(logits):
        return likely(logits, params.top_p, params.min_p)
    ids = ordered(logits, largest(logits, params.top_k))
    return ids[likely(logits[ids], params.top_p, params.min_p)]


class Sampler:
    """One request's sampling state: its random generator and its recent tokens.

    Each request has its own, so that other requests do not change its answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Iterable[int] = (),
        banned: tuple[int, ...] = (),
        constraint: Constraint | None = None,
    ) -> None:
        for token in params.logit_bias:
            if token >= vocab_size:
                raise UsageError(
                    f"logit_bias has the token {token}; the model's tokens are 0 to {vocab_size - 1}"
                )
        self.params, self._constraint = params, constraint
        self.seed = secrets.randbits(32) if params.seed is None else params.seed
        self._rng = np.random.Generator(np.random.Philox(self.seed))
        self._numbers: deque[float] = deque()  # drawn of it, and not used yet
        bias = {**params.logit_bias, **dict.fromkeys(banned, -math.inf)}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        bounded = (b if b == -math.inf else min(max(b, -LARGEST), LARGEST) for b in bias.values())
        self._bias = np.fromiter(bounded, np.float32, len(bias))
        penalised = (
            params.repeat_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._window = params.repeat_last_n if penalised else 0
        bans = bool(np.all(self._bias == -math.inf)) and len(bias) <= BANNED
        few = params.temperature == 0 or 0 < params.top_k <= CANDIDATES
        alone = bans and few and not self._window and constraint is None and params.logprobs is None
        self._drawn = alone and vocab_size >= CANDIDATES + BANNED
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        for token in prompt if self._window else ():
            self._remember(token)

    def sample(self, logits: F32) -> int:
        """Choose a token from logits [vocab_size] without changing them. NumericalError, UsageError."""
        check_finite(logits)
        logits = self._adjusted(logits)
        token = self._draw(logits) if self.params.temperature > 0 else int(logits.argmax())
        self._took(token)
        return token

    def draw(self, later: int = 0) -> TokenDraw | None:
        """Return how the token after `later` others is chosen, if that takes nothing but its logits.

        None: only `sample` can choose it.
        """
        if not self._drawn:
            return None
        p, banned = self.params, tuple(self._bias_ids.tolist())
        if p.temperature == 0:
            return TokenDraw(1, 1.0, 0.0, 1.0, 0.0, banned)
        return TokenDraw(p.top_k, p.top_p, p.min_p, p.temperature, self._number(later), banned)

    def accept(self, choice: ChosenToken) -> int:
        """Take a token that was chosen as `draw()` said. NumericalError."""
        if choice.odd is not None:
            raise _damaged(choice.odd, choice.token)
        self._took(choice.token)
        return choice.token

    def _took(self, token: int) -> None:
        if self.params.temperature > 0:
            self._numbers.popleft()
        self._remember(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    def _number(self, later: int = 0) -> float:
        """Return the random number of the token after `later` others. It stays the same until it is used."""
        while len(self._numbers) <= later:
            self._numbers.append(self._rng.random())
        return self._numbers[later]

    @property
    def complete(self) -> bool:
        """Return whether the grammar is complete, so that nothing may follow."""
        return self._constraint is not None and self._constraint.is_complete()

    def _draw(self, logits: F32) -> int:
        """Draw a token at the request's temperature. Each token takes one random number, whatever is kept."""
        params, u = self.params, self._number()
        if params.top_k == params.min_p == 0 and params.top_p == 1:
            return reached(logits, params.temperature, u, "right")
        ids = kept(logits, params)
        return int(ids[reached(logits[ids], params.temperature, u, "right")])

    def _adjusted(self, logits: F32) -> F32:
        """Return the logits with bias, penalties and constraint applied: a copy if there are any."""
        allowed = None if self._constraint is None else self._constraint.allowed()
        if not len(self._bias_ids) and not self._counts and allowed is None:
            return logits
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        if self._counts:
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            logits[ids] = self._penalised(logits[ids])
        if allowed is not None:
            logits[~allowed] = -math.inf
        if logits.max() == -math.inf:
            grammar = "" if allowed is None else "the grammar, "
            raise UsageError(f"{grammar}logit_bias and ignore_eos ban every token of the model; allow some")
        return logits

    def _penalised(self, x: F32) -> F32:
        """Apply penalties. A factor near 0 and huge penalties ban no token and make no NaN."""
        params = self.params
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        with np.errstate(all="ignore"):
            factor = np.float32(params.repeat_penalty)
            cost = np.nan_to_num(params.presence_penalty + params.frequency_penalty * counts)
            y = np.nan_to_num(np.where(x > 0, x / factor, x * factor)) - cost.astype(np.float32)
        return np.where(x == -math.inf, x, np.clip(y, -LARGEST, LARGEST)).astype(np.float32)

    def _remember(self, token: int) -> None:
        if not self._window:
            return
        self._recent.append(token)
        self._counts[token] += 1
        if 0 < self._window < len(self._recent):
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
