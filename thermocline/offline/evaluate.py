"""Measure how well a model predicts a text (perplexity), and how far two models are apart (divergence).

Windows, scores and statistics are those of llama-perplexity. A `Reader` holds a loaded model; several readers
may share its weights.

    texts = windows(tokenizer, text, context)
    model = bind(for_context(spec, context), loaded.weights, loaded.ops)
    predict, exact = (Reader(model, loaded.ops, context=context, sparsity=s) for s in ("predict", "exact"))
    divergence(predict, exact, texts).kld
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.engine.decoder import Model, forward, state_storage
from thermocline.engine.kv_cache import BLOCK as KV_BLOCK
from thermocline.engine.kv_cache import (
    PLAIN,
    CacheTypes,
    KVCache,
    Storage,
    block_counts,
    blocks_for,
    bytes_for,
    in_ram,
)
from thermocline.engine.prefill_budget import PREFILL_CHUNK
from thermocline.engine.request import check_writes
from thermocline.engine.sampler import check_finite
from thermocline.engine.state_pool import StateTurns
from thermocline.errors import UsageError
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32, FEW, I32, Batch, FFNStats
from thermocline.text.tokenizer import Tokenizer

F64 = NDArray[np.float64]
Progress = Callable[[int, int], None]  # windows done, windows in all
PIECE = PREFILL_CHUNK  # tokens of a forward pass, as in the engine's prefill
GPU_PIECE = 8  # tokens whose logits a GPU gives: of as many answers, by default, its buffers are made
LOGITS = 1 << 24  # logits of a reader at a time: 64 MiB
BLOCK = 1 << 17  # logits in f64 at a time: 1 MiB, which stays in the second-level cache
SMALLEST = 4  # tokens of the smallest window: one is predicted from the two before it


# ---- the text


def windows(tokenizer: Tokenizer, text: str, context: int, limit: int | None = None) -> I32:
    """Cut a text's tokens into at most `limit` windows [windows, context].

    If texts begin with a special token, it replaces the first token of each window. An incomplete window at
    the end is left out. UsageError if the text is too short for one window.
    """
    ids = np.array(tokenizer.encode(text), np.int32)
    count = len(ids) // context
    if count == 0:
        raise UsageError(
            f"the text has {len(ids)} tokens, a window needs {context}; "
            "give a longer text or a smaller context"
        )
    cut = ids[: min(count, limit or count) * context].reshape(-1, context)
    begin = tokenizer.encode("")[:1]
    if begin == tokenizer.encode("a")[:1]:  # otherwise there is no such token, or it ends texts
        cut[:, 0] = begin
    return cut


def check_context(spec: ModelSpec, context: int) -> None:
    check_writes(spec)
    if not SMALLEST <= context <= spec.max_context:
        raise UsageError(
            f"windows of {context} tokens were asked for; this model reads {SMALLEST} to {spec.max_context}"
        )


def reader_bytes(spec: ModelSpec, context: int, types: CacheTypes = PLAIN, side: int = 1) -> int:
    """Return the bytes of a reader, and of scoring what it reads, beside the session with its weights."""
    return bytes_for(spec, side * blocks_for(context) * KV_BLOCK, types) + scoring_bytes(spec)


def scoring_bytes(spec: ModelSpec) -> int:
    """Return the bytes of a reader without its keys and values, and of scoring what it reads."""
    logits = 2 * 4 * logit_rows(spec.vocab_size) * spec.vocab_size  # those of the steps, and all of a piece
    scored = 6 * 8 * max(BLOCK, spec.vocab_size)  # of both models in f64, their exponentials, differences
    return logits + scored


def positions_for(readers: int, context: int) -> int:
    """Return the positions of a cache that so many readers share."""
    return readers * blocks_for(context) * KV_BLOCK


def cache_for(
    spec: ModelSpec,
    context: int,
    *,
    readers: int = 1,
    types: CacheTypes = PLAIN,
    storage: Storage = in_ram,
) -> KVCache:
    """Return a cache of keys and values for readers of one model: a GPU's recordings of steps are of one."""
    blocks = block_counts(spec, positions_for(readers, context), context, PIECE)
    return KVCache(spec, *blocks, chunk=PIECE, types=types, storage=storage)


def logit_rows(vocab: int) -> int:
    """Return the tokens whose logits a reader gives at a time."""
    return max(1, min(PIECE, LOGITS // vocab))


# ---- the model


class Reader:
    """A loaded model that reads windows of text with one sparsity mode and returns the logits of next tokens.

    The mode "predict" only saves work for few tokens, so it reads as it generates: token by token. Up to 4
    windows (`side`) are read together, a token of each. Reading them together is faster, but a neuron
    predicted for one token is then computed for the others, so the mode looks closer to exact than it is
    for a single answer. `stats` count the tokens read, without prompts.

    model    from `decoder.bind`, with `for_context`; readers may share it, and `ops`
    step     tokens of a window in a forward pass; None: as many as the mode allows
    cache    keys and values, perhaps other readers' too; None: its own, in RAM and f16
    begin_step  told before each forward pass how many tokens it reads as answers' tokens; 0: as a prompt
    """

    def __init__(
        self,
        model: Model,
        ops: Any,
        *,
        context: int,
        sparsity: str = "exact",
        side: int = 1,
        step: int | None = None,
        cache: KVCache | None = None,
        begin_step: Callable[[int], None] | None = None,
    ) -> None:
        check_context(model.spec, context)
        assert 1 <= side <= FEW
        self.model, self.ops, self.context, self.sparsity, self.side = model, ops, context, sparsity, side
        self.step = step or (1 if sparsity == "predict" else PIECE // side)
        assert sparsity != "predict" or side * self.step <= FEW, "more tokens are read exactly"
        self.stats, self._begin_step = FFNStats(), begin_step
        self._kv = cache or cache_for(model.spec, context, readers=side)
        self._states = StateTurns(model.spec, side, state_storage(model, ops))
        self._tables = [self._kv.open([]) for _ in range(side)]

    def close(self) -> None:
        """Give its blocks back to a cache that others use after it."""
        for table in self._tables:
            self._kv.close(table)

    def prompt(self, texts: I32, stop: int) -> None:
        """Read positions [0, stop) as a prompt: without predictors."""
        sparsity = "exact" if self.sparsity == "predict" else self.sparsity
        for ids, at in _cuts(texts, 0, stop, PIECE // self.side):
            self._forward(ids, at, sparsity, FFNStats(), wanted=False)

    def read(self, texts: I32, start: int, stop: int) -> F32:
        """Return logits [windows, positions, vocab] of positions [start, stop), after all earlier ones."""
        parts = []
        for ids, at in _cuts(texts, start, stop, self.step):
            logits = self._forward(ids, at, self.sparsity, self.stats, wanted=True)
            parts.append(logits.reshape(*ids.shape, -1))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _forward(self, ids: I32, start: int, sparsity: str, stats: FFNStats, *, wanted: bool) -> F32:
        """Run ids [windows, positions] from position `start` on. Return logits [tokens, vocab], if wanted."""
        n, length = ids.shape
        if start == 0:  # windows have released the first blocks of the texts before
            for table in self._tables:
                self._kv.begin_again(table, self.context)
        tokens = np.arange(n * length, dtype=np.int32)
        tables = self._kv.tables(self._tables[:n], [start + length] * n)
        state_from, state_to = self._states.step(n, first=start == 0)
        batch = Batch(
            ids=np.ascontiguousarray(ids).ravel(),
            positions=start + tokens % length,
            sequence=tokens // length,
            block_table=tables[0],
            logit_rows=tokens if wanted else tokens[:0],
            window_table=tables[-1],
            state_from=state_from,
            state_to=state_to,
        )
        if self._begin_step is not None:
            self._begin_step(ids.size if wanted else 0)
        layers = self._states.layers
        logits = forward(self.model, self._kv, batch, self.ops, sparsity=sparsity, stats=stats, states=layers)
        for table in self._tables[:n]:
            self._kv.release_passed(table, start + length)
        return logits


def _cuts(texts: I32, start: int, stop: int, step: int) -> Iterator[tuple[I32, int]]:
    for at in range(start, stop, step):
        yield texts[:, at : min(at + step, stop)], at


def _groups(readers: Sequence[Reader], texts: I32, progress: Progress | None) -> Iterator[I32]:
    """Yield the windows that the readers read together."""
    side, count = readers[0].side, len(texts)
    assert all(r.side == side and r.context == texts.shape[1] for r in readers)
    for first in range(0, count, side):
        yield texts[first : first + side]
        if progress is not None:
            progress(min(first + side, count), count)


def _pieces(readers: Sequence[Reader], texts: I32) -> Iterator[tuple[I32, list[F32]]]:
    """Yield (scored tokens, each reader's logits for them), a part of the windows at a time.

    The first half of a window is read as a prompt, and the second half is scored.
    """
    context, side = readers[0].context, readers[0].side
    for reader in readers:
        reader.prompt(texts, context // 2)
    vocab = max(r.model.spec.vocab_size for r in readers)
    length = max(1, logit_rows(vocab) // side)
    for start in range(context // 2, context - 1, length):
        stop = min(start + length, context - 1)
        logits = [r.read(texts, start, stop).reshape(-1, vocab) for r in readers]
        yield texts[:, start + 1 : stop + 1].ravel(), logits


# ---- scores of tokens


@dataclass(frozen=True)
class Comparison:
    """Scores of two models for the same tokens, [tokens] each."""

    nll: F64  # negative log probability of the token
    base_nll: F64
    kld: F64  # sum of base * log(base / own) over the vocabulary
    same_top: NDArray[np.bool_]  # whether both models find the same token likeliest

    @staticmethod
    def join(parts: Sequence[Comparison]) -> Comparison:
        rows = [(p.nll, p.base_nll, p.kld, p.same_top) for p in parts]
        return Comparison(*map(np.concatenate, zip(*rows, strict=True)))


def nll(logits: F32, targets: I32) -> F64:
    """Return negative log probabilities: logits [n, vocab], targets [n] -> [n]. Raises NumericalError."""
    return np.concatenate([-_picked(_log_softmax(logits[b]), targets[b]) for b in _blocks(logits)])


def compare(logits: F32, base: F32, targets: I32) -> Comparison:
    """Compare the logits of two models, [n, vocab] each. Equal logits have a divergence of exactly 0."""
    return Comparison.join([_compare(logits[b], base[b], targets[b]) for b in _blocks(logits)])


def _compare(logits: F32, base: F32, targets: I32) -> Comparison:
    q, p = _log_softmax(logits), _log_softmax(base)
    kld = (np.exp(p) * (p - q)).sum(axis=1)
    same_top = q.argmax(axis=1) == p.argmax(axis=1)
    return Comparison(-_picked(q, targets), -_picked(p, targets), kld, same_top)


def _blocks(logits: F32) -> Iterator[slice]:
    rows = max(1, BLOCK // logits.shape[1])
    return (slice(at, at + rows) for at in range(0, len(logits), rows))


def _log_softmax(logits: F32) -> F64:
    for row in logits[~np.isfinite(logits).all(axis=1)]:
        check_finite(row)
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x


def _picked(x: F64, targets: I32) -> F64:
    picked: F64 = x[np.arange(len(x)), targets]
    return picked


def scores(reader: Reader, texts: I32, progress: Progress | None = None) -> Iterator[F64]:
    """Yield negative log probabilities, for `reader.side` windows at a time."""
    for group in _groups([reader], texts, progress):
        yield np.concatenate([nll(own, targets) for targets, (own,) in _pieces([reader], group)])


def comparisons(
    reader: Reader, base: Reader, texts: I32, progress: Progress | None = None
) -> Iterator[Comparison]:
    """Yield comparisons of two readers, for `reader.side` windows at a time.

    Only the logits of one piece are in memory.
    """
    for group in _groups([reader, base], texts, progress):
        pieces = _pieces([reader, base], group)
        yield Comparison.join([compare(own, other, targets) for targets, (own, other) in pieces])


# ---- statistics over tokens


@dataclass(frozen=True)
class Estimate:
    """A mean, or a value derived from one, with its standard error (NaN for a single token)."""

    value: float
    error: float

    @staticmethod
    def mean(x: NDArray[Any]) -> Estimate:
        error = float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.nan
        return Estimate(float(x.mean(dtype=np.float64)), error)

    @staticmethod
    def exp_mean(x: F64) -> Estimate:
        log = Estimate.mean(x)
        value = math.exp(min(log.value, 700.0))
        return Estimate(value, value * log.error)


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model on a text."""

    tokens: int  # scored tokens
    nll: Estimate
    perplexity: Estimate

    @staticmethod
    def of(nll: F64) -> Perplexity:
        return Perplexity(len(nll), Estimate.mean(nll), Estimate.exp_mean(nll))


@dataclass(frozen=True)
class Divergence:
    """A model's predictions compared with a base's, token by token. Errors are of paired differences."""

    own: Perplexity
    base: Perplexity
    ratio: Estimate  # own perplexity / base perplexity
    kld: Estimate  # in nats
    kld_p99: float
    kld_max: float
    same_top: Estimate  # share of tokens
    delta_p: Estimate  # probability of the right token, own - base
    delta_p_rms: Estimate

    @staticmethod
    def of(c: Comparison) -> Divergence:
        delta = np.exp(-c.nll) - np.exp(-c.base_nll)
        square = Estimate.mean(delta**2)
        rms = math.sqrt(square.value)
        return Divergence(
            own=Perplexity.of(c.nll),
            base=Perplexity.of(c.base_nll),
            ratio=Estimate.exp_mean(c.nll - c.base_nll),
            kld=Estimate.mean(c.kld),
            kld_p99=float(np.percentile(c.kld, 99)),
            kld_max=float(c.kld.max()),
            same_top=Estimate.mean(c.same_top),
            delta_p=Estimate.mean(delta),
            delta_p_rms=Estimate(rms, square.error / (2 * rms) if rms else 0.0),
        )


def perplexity(reader: Reader, texts: I32, progress: Progress | None = None) -> Perplexity:
    """Return a reader's perplexity on `texts`: windows as long as its context. Raises NumericalError."""
    return Perplexity.of(np.concatenate([*scores(reader, texts, progress)]))


def divergence(reader: Reader, base: Reader, texts: I32, progress: Progress | None = None) -> Divergence:
    """Return the divergence of two readers on `texts`: windows as long as their context. NumericalError."""
    return Divergence.of(Comparison.join([*comparisons(reader, base, texts, progress)]))
