"""Requests in, tokens out: continuous batching over one forward pass, and each run's figures.

Owns requests and scheduling. Must not know files, HTTP or flags; `llm.py` is the public way in.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thermocline.decoder import F32, Batch, DiskCounts, FFNStats, Norm, Weights, bind, for_context, forward
from thermocline.errors import BadFile, IOFailure, NumericalError, ThermoclineError, UsageError
from thermocline.kv import BlockTable, KVCache, bytes_for, in_ram, room_for
from thermocline.sampler import Sampler, SamplingParams, TokenLogprobs
from thermocline.spec import ModelSpec
from thermocline.tokenizer import Detokenizer, Tokenizer
from thermocline.watch import Watch

PREFILL_CHUNK = 256  # tokens of prompts in a step

# ---- what a request gives back


@dataclass(frozen=True)
class Figures:
    """What one request cost. Decode figures are None where nothing was decoded (fewer than two tokens)."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, whose keys and values were already there
    tokens: int
    first_token_s: float | None  # from submission
    prompt_tokens_per_s: float | None  # the prompt's uncached tokens over the time to the first token
    tokens_per_s: float | None  # tokens after the first, over their time
    active_fraction: float | None  # neurons that were not zero, while decoding
    rows_fraction: float | None  # up and down rows read, of those a dense pass reads, while decoding
    predicted_fraction: float | None  # gate rows read, likewise
    bytes_per_token: (
        int | None
    )  # weights and KV read from memory per decoded token (a batch shares its weights)
    logits_hash: str  # over the logits of every token: equal hashes, equal runs
    token_ms_p99: float | None = None  # of the tokens after the first; 1000 / tokens_per_s is their mean
    disk: DiskCounts | None = None  # while decoding, a batch's shared; None: all neurons are in memory


@dataclass(frozen=True)
class Completion:
    text: str  # up to the stop string or end-of-text token
    token_ids: list[int]  # everything sampled, an end-of-text token included
    finish_reason: str | None  # "stop", "length" or "cancelled"; None while it runs
    seed: int  # repeats this completion
    logprobs: list[TokenLogprobs] | None
    figures: Figures

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; -inf where there are none, or none was asked for."""
        return sum(t.logprob for t in self.logprobs) / len(self.logprobs) if self.logprobs else -math.inf


@dataclass(frozen=True)
class Chunk:
    """One token. Its text may be empty (half a character, a possible stop string) or end earlier ones."""

    text: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None  # on the last one


# ---- one request


class StopMatcher:
    """Lets text through up to the first stop string, holding back an end that may become one."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certainly part of the answer, whether a stop string ended it)."""
        if not self._stop:
            return text, False
        text = self._held + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = len(text) - max(overlap(text, s) for s in self._stop)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next(n for n in range(min(len(text), len(stop) - 1), -1, -1) if text.endswith(stop[:n]))


@dataclass
class Request:
    """One prompt on its way. Position p's keys and values are in the cache for all p < computed."""

    params: SamplingParams
    sampler: Sampler
    ids: list[int]  # the prompt, then what was sampled
    n_prompt: int
    limit: int  # tokens to generate at most: max_tokens, or what the context leaves
    detokenizer: Detokenizer | None
    matcher: StopMatcher
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    cached: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)  # not fetched yet
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: ThermoclineError | None = None  # why it cannot go on; whoever waits for chunks raises it
    submitted_s: float = 0.0
    admitted_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    decode: FFNStats = field(default_factory=FFNStats)
    decode_bytes: float = 0.0
    token_s: list[float] = field(default_factory=list)  # of each token after the first
    disk: DiskCounts | None = None
    digest: int = 0

    @property
    def token_ids(self) -> list[int]:
        return self.ids[self.n_prompt :]

    def completion(self) -> Completion:
        """The answer so far; final once there is a finish_reason."""
        logprobs = None if self.params.logprobs is None else list(self.logprobs)
        return Completion(
            "".join(self.text),
            self.token_ids,
            self.finish_reason,
            self.sampler.seed,
            logprobs,
            self.figures(),
        )

    def figures(self) -> Figures:
        n, d = len(self.ids) - self.n_prompt, self.decode
        decoded = n - 1 if n > 1 else None
        return Figures(
            prompt_tokens=self.n_prompt,
            cached_tokens=self.cached,
            tokens=n,
            first_token_s=self.first_s - self.submitted_s if n else None,
            prompt_tokens_per_s=_ratio(self.n_prompt - self.cached, self.first_s - self.admitted_s)
            if n
            else None,
            tokens_per_s=_ratio(decoded, self.last_s - self.first_s),
            active_fraction=_ratio(d.active, d.neurons) if decoded else None,
            rows_fraction=_ratio(d.rows, d.rows_dense) if decoded else None,
            predicted_fraction=_ratio(d.predicted, d.gates_dense) if decoded else None,
            bytes_per_token=round(self.decode_bytes / decoded) if decoded else None,
            logits_hash=f"{self.digest:08x}",
            token_ms_p99=1e3 * percentile(self.token_s, 0.99) if self.token_s else None,
            disk=self.disk if decoded else None,
        )


def request_for(
    spec: ModelSpec,
    context: int,
    tokenizer: Tokenizer | None,
    prompt: Sequence[int],
    params: SamplingParams,
) -> Request:
    """A request for any engine of this model and context. Needs no weights: a bad one is refused at once."""
    ids = list(prompt)
    if not ids and spec.bos_id is not None:
        ids = [spec.bos_id]
    _check_prompt(spec, context, ids)
    if params.stop and tokenizer is None:
        raise UsageError("stop strings need a tokenizer, and this engine has none")
    banned = spec.eos_ids + params.stop_ids if params.ignore_eos else ()
    room = context - len(ids) + 1  # the last token is never fed back, so it needs no position
    return Request(
        params=params,
        sampler=Sampler(params, spec.vocab_size, ids, banned),
        ids=ids,
        n_prompt=len(ids),
        limit=room if params.max_tokens is None else min(params.max_tokens, room),
        detokenizer=_detokenizer(tokenizer, ids),
        matcher=StopMatcher(params.stop),
    )


def _check_prompt(spec: ModelSpec, context: int, ids: list[int]) -> None:
    if not ids:
        raise UsageError("the prompt is empty, and this model has no beginning-of-text token; give some text")
    if len(ids) > context:
        raise UsageError(
            f"the prompt has {len(ids)} tokens, the context holds {context} "
            f"(the model's limit is {spec.max_context}); shorten the prompt or raise the context"
        )
    if min(ids) < 0 or max(ids) >= spec.vocab_size:
        raise UsageError(
            f"the prompt has token ids from {min(ids)} to {max(ids)}; "
            f"the model's are 0 to {spec.vocab_size - 1}"
        )


def _detokenizer(tokenizer: Tokenizer | None, ids: list[int]) -> Detokenizer | None:
    if tokenizer is None:
        return None
    return Detokenizer(tokenizer, continuing=any(not tokenizer.is_special(i) for i in ids))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all are not above."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _ratio(part: float | None, whole: float) -> float | None:
    return None if part is None or whole <= 0 else part / whole


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) of one request: its share of a step."""

    request: Request
    start: int
    stop: int


# ---- bytes


@dataclass(frozen=True)
class Traffic:
    """What one decode step reads from memory."""

    fixed_bytes: int  # every matrix but gate, up and down, norms and biases, once per step
    gate_bytes: float  # one gate row
    row_bytes: float  # one up or down row
    position_bytes: int  # keys and values of one position

    @staticmethod
    def of(spec: ModelSpec, weights: Weights) -> Traffic:
        gates = 0.0
        fixed = _nbytes(weights.head.weight, weights.head.bias) + _norm_bytes(weights.out_norm)
        for layer in weights.layers:
            fixed += _norm_bytes(layer.attn_norm) + _norm_bytes(layer.ffn_norm)
            fixed += _nbytes(layer.qkv.weight, layer.qkv.bias, layer.attn_out.weight, layer.attn_out.bias)
            fixed += _nbytes(layer.router)
            for f in layer.experts:
                fixed += _nbytes(f.down_bias)
                gates += _nbytes(f.gate.weight) / f.gate.weight.shape[0]
                gates += _nbytes(f.gate.bias) / spec.ffn_dim
        ffn = weights.layers[0].experts[0]
        places = ffn.down.shape[0] if ffn.bundles else spec.ffn_dim  # on disk neurons take turns in them
        row = _nbytes(ffn.up, ffn.down) / (places * (2 if ffn.up is not None else 1))
        return Traffic(fixed, gates / (spec.n_layers * spec.n_experts), row, bytes_for(spec, 1))


def _nbytes(*arrays: Any) -> int:
    return sum(a.nbytes for a in arrays if a is not None)


def _norm_bytes(norm: Norm | None) -> int:
    return 0 if norm is None else _nbytes(norm.weight, norm.bias)


# ---- the engine


class Engine:
    """Continuous batching. One thread at a time submits, steps and cancels (`LLM` holds a lock).

    A request is admitted when the cache has room for all it may need: a running one never waits for memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        ops: Any,
        *,
        context: int,
        tokenizer: Tokenizer | None = None,
        max_batch: int = 8,
        sparsity: str = "exact",
        prefill_chunk: int = PREFILL_CHUNK,
        kv_tokens: int | None = None,
        disk: Callable[[], DiskCounts] | None = None,
        storage: Callable[[int, tuple[int, ...]], Any] = in_ram,
    ) -> None:
        """`kv_tokens`: positions the cache holds for all requests; default: `max_batch` full contexts.

        `disk`: what it did so far, where not all neurons are in memory. `storage`: as `KVCache`'s.
        """
        kv_tokens = context * max_batch if kv_tokens is None else kv_tokens
        assert kv_tokens >= context, "one request must always fit"
        self.spec, self.ops = spec, ops
        self.model = bind(for_context(spec, context), weights, ops)
        self.context, self.max_batch, self.prefill_chunk = context, max_batch, prefill_chunk
        self.sparsity = sparsity
        self.tokenizer = tokenizer
        room = room_for(spec, kv_tokens, context, prefill_chunk)
        self.kv = KVCache(spec, *room, chunk=prefill_chunk, storage=storage)
        self.traffic = Traffic.of(spec, weights)
        self._disk = disk
        self.watch: Watch | None = None  # gets what answers' steps did, while there is one
        self.computing = False  # in `forward`: an exception there costs the step and nothing else
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt of token ids. Its chunks appear in `request.chunks` as `step` is called."""
        return self.queue(request_for(self.spec, self.context, self.tokenizer, prompt, params))

    def queue(self, request: Request) -> Request:
        request.submitted_s = time.perf_counter()
        self.waiting.append(request)
        return request

    def step(self) -> bool:
        """One turn: schedule, forward, sample, emit; first a token for each answer, then a chunk of prompts.

        They go through `forward` apart: an answer does not read a long prompt's neurons.
        False when there is nothing left to do.
        """
        self._admit()
        for schedule in (self._answer_spans, self._prompt_spans):
            spans = schedule()
            if not spans:
                continue
            try:
                self._run(spans)
            except (BadFile, IOFailure) as error:  # of the disk; those whose neurons it has go on
                for span in spans:
                    self._run_alone(span, error if len(spans) == 1 else None)
        return bool(self.waiting or self.running)

    def _run(self, spans: list[Span]) -> None:
        before = self._disk() if self._disk is not None else None
        begin = time.perf_counter()
        logits, stats = self._forward(spans)
        read_bytes = self._account(spans, stats, before)
        ready = [s.request for s in spans if s.stop == len(s.request.ids)]
        for request, row in zip(ready, logits, strict=True):
            self._emit(request, row)
        if self.watch is not None and spans[0].start >= spans[0].request.n_prompt:
            disk = None if self._disk is None or before is None else self._disk().since(before)
            seconds = time.perf_counter() - begin
            self.watch.add(stats, tokens=len(spans), seconds=seconds, bytes=read_bytes, disk=disk)

    def _run_alone(self, span: Span, error: ThermoclineError | None) -> None:
        """A step that failed, for one of its requests; `error`: it has been tried."""
        try:
            if error is None:
                self._run([span])
                return
        except (BadFile, IOFailure) as e:
            error = e
        span.request.error = error
        self._finish(span.request, "cancelled")

    def cancel(self, request: Request) -> None:
        """Stop a request wherever it is and free what it holds. Nothing happens to one that has finished."""
        if request.finish_reason is None:
            self._finish(request, "cancelled")

    def check_integrity(self) -> None:
        """When idle, nothing is held."""
        self.kv.check_integrity()
        if not self.running:
            assert self.kv.used == 0, f"{self.kv.used} KV blocks leaked"

    # -- schedule

    def _admit(self) -> None:
        """First come, first served: nobody overtakes a long request for which there is no room yet."""
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            table = self.kv.open(request.ids)
            if not self.kv.grow(table, request.n_prompt + request.limit - 1):
                self.kv.close(table)
                return
            self.running.append(self.waiting.popleft())
            request.table = table
            request.computed = request.cached = table.sealed * self.kv.block
            request.admitted_s = time.perf_counter()

    def _prompt_spans(self) -> list[Span]:
        spans, room = [], self.prefill_chunk
        for r in self.running:
            stop = min(r.n_prompt, r.computed + room)
            if r.computed < stop:
                spans.append(Span(r, r.computed, stop))
                room -= stop - r.computed
        return spans

    def _answer_spans(self) -> list[Span]:
        return [Span(r, r.computed, r.computed + 1) for r in self.running if r.computed >= r.n_prompt]

    # -- forward

    def _forward(self, spans: list[Span]) -> tuple[F32, FFNStats]:
        stats = FFNStats() if self.watch is None else self.watch.counting()
        batch = self._batch(spans)
        prompts = any(
            s.start < s.request.n_prompt for s in spans
        )  # even their last few tokens are not guessed
        sparsity = "exact" if prompts and self.sparsity == "predict" else self.sparsity
        self.computing = True
        try:
            logits = forward(self.model, self.kv, batch, self.ops, sparsity=sparsity, stats=stats)
        finally:
            self.computing = False
        for s in spans:
            s.request.computed = s.stop
            self.kv.seal(s.request.table, s.request.ids, s.stop)
        return logits, stats

    def _batch(self, spans: list[Span]) -> Batch:
        """As few numpy calls as will do: between kernels, each takes 3 to 5 microseconds."""
        tables = self.kv.tables([s.request.table for s in spans], [s.stop for s in spans])
        ids: list[int] = []
        positions: list[int] = []
        sequence: list[int] = []
        wanted: list[int] = []
        for i, s in enumerate(spans):
            ids += s.request.ids[s.start : s.stop]
            positions += range(s.start, s.stop)
            sequence += [i] * (s.stop - s.start)
            if s.stop == len(s.request.ids):
                wanted.append(len(ids) - 1)
        return Batch(
            ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            sequence=np.array(sequence, np.int32),
            block_table=tables[0],
            logit_rows=np.array(wanted, np.int32),
            window_table=tables[-1],
        )

    def _account(self, spans: list[Span], stats: FFNStats, before: DiskCounts | None) -> float:
        """Each answer carries its share of the step: the same neurons served them all. -> bytes read."""
        t = self.traffic
        disk = self._disk() if self._disk is not None else None
        weights = t.fixed_bytes + stats.predicted * t.gate_bytes + stats.rows * t.row_bytes
        weights += stats.predictor_bytes
        read_bytes = weights
        for s in spans:
            if s.start < s.request.n_prompt:
                continue
            d = s.request.decode
            d.active += stats.active
            d.neurons += stats.neurons
            d.rows += stats.rows
            d.rows_dense += stats.rows_dense
            d.gates_dense += stats.gates_dense
            d.predicted += stats.predicted
            d.predictor_bytes += stats.predictor_bytes
            if before is not None and disk is not None:
                known = s.request.disk or DiskCounts()
                shares = ((b - a) // len(spans) for a, b in zip(before, disk, strict=True))
                s.request.disk = DiskCounts(*(k + n for k, n in zip(known, shares, strict=True)))
            near = min(s.stop, self.spec.sliding_window or s.stop)
            read = s.stop + self.spec.windowed * (near - s.stop)
            s.request.decode_bytes += weights / len(spans) + read * self.traffic.position_bytes
            read_bytes += read * self.traffic.position_bytes
        return read_bytes

    # -- sample, emit

    def _emit(self, request: Request, logits: F32) -> None:
        try:
            token = request.sampler.sample(logits)
        except (NumericalError, UsageError) as error:  # this request's; the others go on
            request.error = error
            self._finish(request, "cancelled")
            return
        request.digest = zlib.crc32(logits.data, request.digest)  # 0.02 ms for 32000; blake2b takes 0.1
        now = time.perf_counter()
        if len(request.ids) == request.n_prompt:
            request.first_s = now
        else:
            request.token_s.append(now - request.last_s)
        request.last_s = now
        request.ids.append(token)
        logprobs = None
        if request.params.logprobs is not None:
            logprobs = request.sampler.logprobs(logits, token)
            request.logprobs.append(logprobs)
        text, reason = self._text_of(request, token)
        request.text.append(text)
        if reason is not None:
            self._finish(request, reason)
        request.chunks.append(Chunk(text, token, logprobs, reason))

    def _text_of(self, request: Request, token: int) -> tuple[str, str | None]:
        """(text that can be shown now, why the request ends here if it does)."""
        reason = "length" if len(request.ids) - request.n_prompt >= request.limit else None
        text = ""
        if token in self.spec.eos_ids or token in request.params.stop_ids:
            reason = "stop"
        elif request.detokenizer is not None:
            text = request.detokenizer.push(token)
        if reason is not None and request.detokenizer is not None:
            text += request.detokenizer.flush()
        text, stopped = request.matcher.push(text)
        if stopped:
            return text, "stop"
        return (text, None) if reason is None else (text + request.matcher.flush(), reason)

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.kv.close(request.table)
