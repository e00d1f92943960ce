"""Requests in, tokens out: continuous batching over one forward pass, and each run's figures.

Owns requests, scheduling and `LLM`, the public way in. Must not know file formats, HTTP or flags.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from thermocline.decoder import F32, Batch, FFNStats, Norm, Weights, forward
from thermocline.errors import NumericalError, OutOfBudget, UsageError
from thermocline.kv import BlockTable, KVCache, blocks_for, bytes_for
from thermocline.sampler import Sampler, SamplingParams, TokenLogprobs
from thermocline.spec import ModelSpec
from thermocline.tokenizer import Detokenizer, Tokenizer

GIB = 2**30


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
    bytes_per_token: (
        int | None
    )  # weights and KV read from memory per decoded token (a batch shares its weights)
    logits_hash: str  # over the logits of every token: equal hashes, equal runs


@dataclass(frozen=True)
class Completion:
    text: str  # up to the stop string or end-of-text token
    token_ids: list[int]  # everything sampled, an end-of-text token included
    finish_reason: str | None  # "stop", "length" or "cancelled"; None while it runs
    seed: int  # repeats this completion
    logprobs: list[TokenLogprobs] | None
    figures: Figures


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
        keep = len(text) - max(_overlap(text, s) for s in self._stop)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
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
    submitted_s: float
    table: BlockTable = field(default_factory=BlockTable)
    computed: int = 0
    cached: int = 0
    chunks: deque[Chunk] = field(default_factory=deque)  # not fetched yet
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: NumericalError | UsageError | None = None  # sampling failed; whoever waits for chunks raises it
    admitted_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    decode: FFNStats = field(default_factory=FFNStats)
    decode_bytes: float = 0.0
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

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
            bytes_per_token=round(self.decode_bytes / decoded) if decoded else None,
            logits_hash=self.digest.hexdigest(),
        )


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

    fixed_bytes: int  # every matrix but up and down, norms and biases, once per step
    neuron_bytes: int  # one neuron's up and down rows
    position_bytes: int  # keys and values of one position

    @staticmethod
    def of(spec: ModelSpec, weights: Weights) -> Traffic:
        fixed = _nbytes(weights.head.weight, weights.head.bias) + _norm_bytes(weights.out_norm)
        for layer in weights.layers:
            f = layer.ffn
            fixed += _norm_bytes(layer.attn_norm) + _norm_bytes(layer.ffn_norm)
            fixed += _nbytes(layer.qkv.weight, layer.qkv.bias, layer.attn_out.weight, layer.attn_out.bias)
            fixed += _nbytes(f.gate.weight, f.gate.bias, f.down_bias)
        ffn = weights.layers[0].ffn
        neuron = _nbytes(ffn.up, ffn.down) // spec.ffn_dim
        return Traffic(fixed, neuron, bytes_for(spec, 1))


def _nbytes(*arrays: Any) -> int:
    return sum(a.nbytes for a in arrays if a is not None)


def _norm_bytes(norm: Norm) -> int:
    return _nbytes(norm.weight, norm.bias)


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
        exact: bool = True,
        prefill_chunk: int = 256,
        kv_tokens: int | None = None,
    ) -> None:
        """`kv_tokens`: positions the cache holds for all requests; default: `max_batch` full contexts."""
        kv_tokens = context * max_batch if kv_tokens is None else kv_tokens
        assert kv_tokens >= context, "one request must always fit"
        self.spec, self.weights, self.ops = spec, weights, ops
        self.context, self.max_batch, self.prefill_chunk, self.exact = (
            context,
            max_batch,
            prefill_chunk,
            exact,
        )
        self.tokenizer = tokenizer
        self.kv = KVCache(spec, blocks_for(kv_tokens))
        self.traffic = Traffic.of(spec, weights)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queue a prompt of token ids. Its chunks appear in `request.chunks` as `step` is called."""
        ids = list(prompt)
        if not ids and self.spec.bos_id is not None:
            ids = [self.spec.bos_id]
        self._check(ids, params)
        banned = self.spec.eos_ids if params.ignore_eos else ()
        room = self.context - len(ids) + 1  # the last token is never fed back, so it needs no position
        request = Request(
            params=params,
            sampler=Sampler(params, self.spec.vocab_size, ids, banned),
            ids=ids,
            n_prompt=len(ids),
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            detokenizer=self._detokenizer(ids),
            matcher=StopMatcher(params.stop),
            submitted_s=time.perf_counter(),
        )
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
            logits, stats = self._forward(spans)
            self._account(spans, stats)
            ready = [s.request for s in spans if s.stop == len(s.request.ids)]
            for request, row in zip(ready, logits, strict=True):
                self._emit(request, row)
        return bool(self.waiting or self.running)

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
        stats = FFNStats()
        batch = self._batch(spans)
        logits = forward(self.spec, self.weights, self.kv, batch, self.ops, exact=self.exact, stats=stats)
        for s in spans:
            s.request.computed = s.stop
            self.kv.seal(s.request.table, s.request.ids, s.stop)
        return logits, stats

    def _batch(self, spans: list[Span]) -> Batch:
        lengths = np.array([s.stop - s.start for s in spans])
        pages = [s.request.table.blocks[: blocks_for(s.stop, self.kv.block)] for s in spans]
        table = np.zeros((len(spans), max(map(len, pages))), np.int32)
        for row, blocks in zip(table, pages, strict=True):
            row[: len(blocks)] = blocks
        wanted = np.array([s.stop == len(s.request.ids) for s in spans])
        return Batch(
            ids=np.array([i for s in spans for i in s.request.ids[s.start : s.stop]], np.int32),
            positions=np.concatenate([np.arange(s.start, s.stop, dtype=np.int32) for s in spans]),
            sequence=np.repeat(np.arange(len(spans), dtype=np.int32), lengths),
            block_table=table,
            logit_rows=(np.cumsum(lengths) - 1)[wanted].astype(np.int32),
        )

    def _account(self, spans: list[Span], stats: FFNStats) -> None:
        """Each answer carries its share of the step: the same neurons served them all."""
        weights = self.traffic.fixed_bytes + stats.rows * self.traffic.neuron_bytes
        for s in spans:
            if s.start < s.request.n_prompt:
                continue
            d = s.request.decode
            d.active += stats.active
            d.neurons += stats.neurons
            d.rows += stats.rows
            d.rows_dense += stats.rows_dense
            positions = min(s.stop, self.spec.sliding_window or s.stop)
            s.request.decode_bytes += weights / len(spans) + positions * self.traffic.position_bytes

    # -- sample, emit

    def _emit(self, request: Request, logits: F32) -> None:
        try:
            token = request.sampler.sample(logits)
        except (NumericalError, UsageError) as error:  # this request's; the others go on
            request.error = error
            self._finish(request, "cancelled")
            return
        request.digest.update(logits.tobytes())
        request.last_s = time.perf_counter()
        if len(request.ids) == request.n_prompt:
            request.first_s = request.last_s
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
        if token in self.spec.eos_ids:
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

    # -- checks

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        if not ids:
            raise UsageError(
                "the prompt is empty, and this model has no beginning-of-text token; give some text"
            )
        if len(ids) > self.context:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context} "
                f"(the model's limit is {self.spec.max_context}); shorten the prompt or raise the context"
            )
        if min(ids) < 0 or max(ids) >= self.spec.vocab_size:
            raise UsageError(
                f"the prompt has token ids from {min(ids)} to {max(ids)}; "
                f"the model's are 0 to {self.spec.vocab_size - 1}"
            )
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this engine has none")

    def _detokenizer(self, ids: list[int]) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(self.tokenizer, continuing=any(not self.tokenizer.is_special(i) for i in ids))


# ---- the public way in

CONTEXT = 4096  # default context, where the model can do more
KV_POOL_BYTES = 512 << 20  # the cache is made for more than one full context as long as it stays below this
RUNTIME_BYTES = 64 << 20  # tokenizer, Python objects, allocator slack: 55 MB with a vocabulary of 50000
BUNDLED = Path(__file__).with_name("bundled")


class Stream(Iterator[Chunk]):
    """One request's tokens as they come. Closing or dropping it ends the request and frees its memory."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._llm, self._request = llm, request

    def __next__(self) -> Chunk:
        return self._llm._next(self._request)

    @property
    def completion(self) -> Completion:
        """Everything so far, with its figures; final once the stream has ended or was closed."""
        return self._request.completion()

    def close(self) -> None:
        self._llm._cancel(self._request)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run this anywhere, inside a step too: it must not wait for the lock.
        self._llm._cancel(self._request, wait=False)


class LLM:
    """A model, ready to generate.

        with LLM("path/to/model") as llm:
            print(llm.generate("Once upon a time").text)

    model      a pack, or a Hugging Face directory, packed once into `cache_dir`; None: the bundled model
    threads    None: the physical cores this process may use
    context    tokens of prompt and answer together; None: the model's own, up to 4096
    format     of the weights where the model has to be packed: f32, f16, bf16, q8_0 or q4_0
    sparsity   "exact" skips neurons that are zero, with the same answer; "off" computes all
    max_batch  requests computed together; more wait
    progress   called with (bytes done, bytes in all) while the model is packed

    Safe to use from several threads.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        threads: int | None = None,
        context: int | None = None,
        format: str = "q8_0",
        sparsity: str = "exact",
        max_batch: int = 8,
        cache_dir: str | Path | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        _check_choice("sparsity", sparsity, ("exact", "off"))
        _check_count("threads", threads)
        _check_count("context", context)
        _check_count("max_batch", max_batch)
        from thermocline import hardware, weights  # the native core: only when there is something to run
        from thermocline.config import default_cache_dir
        from thermocline.pack import Pack, resolve

        begin = time.perf_counter()
        cache_dir = default_cache_dir(os.environ) if cache_dir is None else cache_dir
        pack = Pack.open(BUNDLED if model is None else resolve(model, cache_dir, format, progress))
        self.path, self.spec, self.weight_format = pack.path, pack.spec, pack.weight_format
        self.sparsity = sparsity
        self.context = context_for(self.spec, context)
        self.threads = hardware.default_threads() if threads is None else threads
        kv_tokens = fit(
            self.spec,
            weights_bytes=pack.weights_path.stat().st_size,
            available_bytes=hardware.available_bytes(),
            context=self.context,
            max_batch=max_batch,
            threads=self.threads,
        )
        self.tokenizer = Tokenizer(pack.path, self.spec)
        loaded = weights.load(pack, threads=self.threads)
        self.weights_bytes = loaded.bytes
        self._lock = threading.Lock()
        self._leaving: deque[Request] = deque()
        self._engine: Engine | None = Engine(
            self.spec,
            loaded.weights,
            loaded.ops,
            context=self.context,
            tokenizer=self.tokenizer,
            max_batch=max_batch,
            exact=sparsity == "exact",
            kv_tokens=kv_tokens,
        )
        self.load_s = time.perf_counter() - begin

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(self, prompts: list[str], params: SamplingParams | None = None) -> list[Completion]: ...
    def generate(
        self, prompts: str | list[str], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Complete one prompt, or several at once; one token of each is computed together."""
        streams: list[Stream] = []
        try:
            for prompt in [prompts] if isinstance(prompts, str) else prompts:
                streams.append(self.stream(prompt, params))
            for stream in streams:
                for _ in stream:
                    pass
        finally:
            for stream in streams:
                stream.close()
        done = [stream.completion for stream in streams]
        return done[0] if isinstance(prompts, str) else done

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, token by token."""
        ids = self.tokenizer.encode(prompt)
        with self._lock:
            return Stream(self, self._open().submit(ids, params or SamplingParams()))

    def close(self) -> None:
        """Free the weights and the cache. Streams end."""
        with self._lock:
            if self._engine is not None:
                self._leaving.extend([*self._engine.waiting, *self._engine.running])
            self._let_go()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Engine:
        if self._engine is None:
            raise UsageError("this LLM is closed")
        return self._engine

    def _next(self, request: Request) -> Chunk:
        while True:
            with self._lock:
                self._let_go()
                if request.chunks:
                    return request.chunks.popleft()
                if request.error is not None:
                    raise request.error
                if request.finish_reason is not None:
                    raise StopIteration
                self._open().step()

    def _cancel(self, request: Request, wait: bool = True) -> None:
        """Now, or before the next step where the lock is taken and `wait` is not."""
        self._leaving.append(request)
        if self._lock.acquire(blocking=wait):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _let_go(self) -> None:
        while self._leaving:
            request = self._leaving.popleft()
            request.chunks.clear()
            if self._engine is not None:
                self._engine.cancel(request)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1")


def context_for(spec: ModelSpec, asked: int | None) -> int:
    if asked is not None and asked > spec.max_context:
        raise UsageError(
            f"a context of {asked} tokens was asked for; the model's limit is {spec.max_context}"
        )
    return min(spec.max_context, CONTEXT) if asked is None else asked


def scratch_bytes(
    spec: ModelSpec, *, context: int, max_batch: int, threads: int, prefill_chunk: int = 256
) -> int:
    """An estimate of a step's arrays: activations of a chunk, attention scores per thread, logits twice."""
    activations = prefill_chunk * (6 * spec.dim + 2 * spec.qkv_rows + 4 * spec.ffn_dim)
    scores = threads * (spec.n_heads // spec.n_kv_heads) * context
    return 4 * (activations + scores + 2 * max_batch * spec.vocab_size)


def fit(
    spec: ModelSpec,
    *,
    weights_bytes: int,
    available_bytes: int | None,
    context: int,
    max_batch: int,
    threads: int,
) -> int:
    """Positions for the KV cache: as many full contexts as are cheap, at least one; else OutOfBudget."""
    scratch = scratch_bytes(spec, context=context, max_batch=max_batch, threads=threads) + RUNTIME_BYTES
    pool = max(context, min(context * max_batch, KV_POOL_BYTES // bytes_for(spec, 1)))
    if available_bytes is None:
        return pool
    for kv_tokens in (pool, context):
        need = weights_bytes + bytes_for(spec, kv_tokens) + scratch
        if need <= available_bytes:
            return kv_tokens
    tokens = (available_bytes - weights_bytes - scratch) // bytes_for(spec, 1)
    change = f"a context of at most {tokens}" if tokens > 0 else "a smaller weight format (q4_0) or model"
    raise OutOfBudget(
        f"the model needs {need / GIB:.2f} GiB of memory ({weights_bytes / GIB:.2f} weights, "
        f"{bytes_for(spec, context) / GIB:.2f} keys and values at context {context}, "
        f"{scratch / GIB:.2f} buffers), {available_bytes / GIB:.2f} GiB is free; use {change}"
    )
