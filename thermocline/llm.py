"""`LLM`, the public way in: a model's files in, an engine that fits in memory, its text out.

Owns what is decided before a weight is read (context, threads, the memory plan), and the lock around the
engine.
"""

from __future__ import annotations

import bisect
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, overload

from thermocline import hardware, weights
from thermocline.chat_template import ChatTemplate, Message
from thermocline.config import SPARSITIES, default_cache_dir
from thermocline.engine import PREFILL_CHUNK, Chunk, Completion, Engine, Request, request_for
from thermocline.errors import OutOfBudget, UsageError
from thermocline.hub_fetch import locate
from thermocline.importer import resolve
from thermocline.kv import reserved_bytes
from thermocline.pack import Pack
from thermocline.predictor import Predictors, open_predictors
from thermocline.sampler import SamplingParams
from thermocline.spec import ModelSpec
from thermocline.tokenizer import Tokenizer

GIB = 2**30
Progress = Callable[[str, int, int], None]  # ("packing" or "loading", bytes done, bytes in all)
CONTEXT = 4096  # default context where the model can do more: keys and values are reserved before it starts
KV_POOL_BYTES = 512 << 20  # the cache is made for more than one full context as long as it stays below this
RUNTIME_BYTES = 48 << 20  # 41 to 44 MB measured with a tokenizer of 256 tokens
TOKEN_BYTES = 1024
# csrc/model_ops.cpp: tokens in an FFN pass, neurons in a partial sum, tokens that get one each, tile columns.
NATIVE_TOKENS, NATIVE_CHUNK, NATIVE_FEW, NATIVE_COLUMNS = 256, 256, 4, 128
NATIVE_FLOATS, NATIVE_SPAN, NATIVE_QUERIES = 2048, 512, 16
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

    def cancel(self) -> None:
        """End it soon, without waiting: before the next token or piece of the prompt. For signal handlers."""
        self._llm._cancel(self._request, wait=False)

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

    model      a pack, or a Hugging Face directory or GGUF file, packed once into `cache_dir`; or a name on
               the hub, "org/name[@revision][:file or quant]", fetched once; None: the bundled model. A Path
               is a path
    threads    None: the physical cores this process may use
    context    tokens of prompt and answer together; None: the model's limit, but at most 4096, since memory
               for it is reserved up front; any number up to the model's limit can be asked for
    format     of the weights where the model has to be packed: f32, f16, bf16, q8_0 or q4_0; None: a GGUF's
               own, else q8_0
    sparsity   "exact" skips neurons that are zero, with the same answer; "predict" also those that the pack's
               predictors (`thermocline train`) take for zero, with nearly the same; "off" computes all
    max_batch  requests computed together; more wait
    progress   called with ("downloading", "packing" or "loading", bytes done, bytes in all)
    lazy       read the weights at the first request that can be answered: a bad one is refused at once
    chat_template  Jinja, in place of the model's own
    told       called with one line where packing a GGUF converted weights: what it cost

    Safe to use from several threads.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        threads: int | None = None,
        context: int | None = None,
        format: str | None = None,
        sparsity: str = "exact",
        max_batch: int = 8,
        cache_dir: str | Path | None = None,
        progress: Progress | None = None,
        lazy: bool = False,
        chat_template: str | None = None,
        told: Callable[[str], None] | None = None,
    ) -> None:
        _check_choice("sparsity", sparsity, SPARSITIES)
        _check_count("threads", threads)
        _check_count("context", context)
        _check_count("max_batch", max_batch)
        begin = time.perf_counter()
        self._progress = progress or (lambda what, done, total: None)
        self._template_source = chat_template
        cache_dir = default_cache_dir(os.environ) if cache_dir is None else cache_dir
        packing = partial(self._progress, "packing")
        path = None if model is None else locate(model, self._progress)
        if path is not None:
            path = resolve(path, cache_dir, format, packing, text=True, told=told)
        self._pack = Pack.open(BUNDLED if path is None else path)
        self.path, self.spec = self._pack.path, self._pack.spec
        self.sparsity, self.weight_format = sparsity, self._pack.weight_format
        self._predictors = predictors_for(self._pack, sparsity)
        self.weights_bytes = weights.memory_bytes(self._pack, self._predictors)
        self.context = context_for(self.spec, context)
        self.threads = hardware.default_threads() if threads is None else threads
        self._max_batch = max_batch
        self._kv_tokens = fit(
            self.spec,
            weights_bytes=self.weights_bytes,
            available_bytes=hardware.available_bytes(),
            context=self.context,
            max_batch=max_batch,
            threads=self.threads,
        )
        self.tokenizer = Tokenizer(self.path, self.spec)
        self._lock = threading.Lock()
        self._leaving: deque[Request] = deque()
        self._engine: Engine | None = None
        self._closed = False
        self.load_s = time.perf_counter() - begin
        if not lazy:
            self._open()

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
        return self._stream(self.tokenizer.encode(prompt, parse_special=True), params or SamplingParams())

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answer a conversation: `[{"role": "user", "content": "Hello"}]`, with "system" and "assistant".

        `variables` are for the model's chat template, such as `{"enable_thinking": False}`. What the previous
        turns computed is used again.
        """
        with self.stream_chat(messages, params, variables=variables) as stream:
            for _ in stream:
                pass
        return stream.completion

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        token_ids: Mapping[int, Sequence[int]] | None = None,
    ) -> Stream:
        """The same, token by token. `token_ids`: of earlier answers by the message's index, as generated.

        They save computing again what follows where an answer's text would become other tokens.
        """
        ids = self.chat_template.encode(messages, variables=variables, token_ids=token_ids)
        params = params or SamplingParams()
        return self._stream(ids, replace(params, stop_ids=(*params.stop_ids, *self.chat_template.stop_ids)))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's, or the one given; UsageError where there is none."""
        return ChatTemplate(self.path, self.tokenizer, self._template_source)

    def load(self) -> None:
        """Read the weights now, where `lazy` has put it off."""
        with self._lock:
            self._open()

    def _stream(self, ids: list[int], params: SamplingParams) -> Stream:
        request = request_for(self.spec, self.context, self.tokenizer, ids, params)
        with self._lock:
            return Stream(self, self._open().queue(request))

    def close(self) -> None:
        """Free the weights and the cache. Streams end."""
        if "chat_template" in self.__dict__:
            self.chat_template.close()
        with self._lock:
            if self._engine is not None:
                self._leaving.extend([*self._engine.waiting, *self._engine.running])
            self._let_go()
            self._engine, self._closed = None, True

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Engine:
        if self._closed:
            raise UsageError("this LLM is closed")
        if self._engine is None:
            self._engine = self._load()
        return self._engine

    def _load(self) -> Engine:
        begin = time.perf_counter()
        progress = partial(self._progress, "loading")
        loaded = weights.load(
            self._pack, threads=self.threads, predictors=self._predictors, progress=progress
        )
        engine = Engine(
            self.spec,
            loaded.weights,
            loaded.ops,
            context=self.context,
            tokenizer=self.tokenizer,
            max_batch=self._max_batch,
            sparsity=self.sparsity,
            kv_tokens=self._kv_tokens,
        )
        self.load_s += time.perf_counter() - begin
        return engine

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


def predictors_for(pack: Pack, sparsity: str) -> Predictors | None:
    """What `sparsity` needs beside the weights; UsageError where the pack does not have it."""
    if sparsity != "predict":
        return None
    if not pack.spec.sparse:
        raise UsageError(
            f"{pack.path}: its {pack.spec.activation} neurons are never zero: nothing to predict; "
            "use --sparsity exact"
        )
    found = open_predictors(pack)
    if found is None:
        raise UsageError(f"{pack.path} has no predictors; make them with `thermocline train {pack.path}`")
    return found


def context_for(spec: ModelSpec, asked: int | None) -> int:
    if asked is not None and asked > spec.max_context:
        raise UsageError(
            f"a context of {asked} tokens was asked for; the model's limit is {spec.max_context}"
        )
    return min(spec.max_context, CONTEXT) if asked is None else asked


def scratch_bytes(
    spec: ModelSpec, *, context: int, max_batch: int, threads: int, prefill_chunk: int = PREFILL_CHUNK
) -> int:
    """What a step allocates besides keys and values, at most: decoder.py's arrays, csrc/model_ops.cpp's."""
    tokens, dim, heads = max(prefill_chunk, max_batch), spec.dim, spec.n_heads * spec.head_dim
    ffn, group, threads4 = spec.ffn_dim, spec.n_heads // spec.n_kv_heads, 4 * threads
    arrays = tokens * (3 * dim + spec.qkv_rows + heads)  # x, twice in between, and its norm; q k v, attention
    # Inputs of a matrix, at most as f32; of the FFN, what is between its matrices, likewise as its input.
    inputs = tokens * (max(dim, heads) + 64) + NATIVE_TOKENS * 3 * (ffn + 512)
    panels = threads * (32 * max(NATIVE_FLOATS, (max(dim, heads, ffn) + 512) * 9 // 32) + 32 * tokens)
    partial = -(-ffn // NATIVE_CHUNK) * NATIVE_FEW * dim + 2 * ffn  # and neuron ids and counts
    tiles = threads * (2 * NATIVE_TOKENS * NATIVE_COLUMNS + 16 * NATIVE_COLUMNS + dim // 8 + 4)
    # A predictor's input, its code (at most as wide), its marks.
    guess = NATIVE_FEW * 3 * (dim + 512) + ffn // 4
    queries = max(group, NATIVE_QUERIES) * (spec.head_dim + 2)  # of one head: sums of a span of positions
    scores = threads * (4 * NATIVE_SPAN + NATIVE_QUERIES * (spec.head_dim + 2) + spec.head_dim)
    spans = threads4 * (-(-context // NATIVE_SPAN)) * queries
    # Of a mixture: its input, normed and gathered, an expert's answers, their sum.
    routed = NATIVE_TOKENS * (4 * dim + 2 * spec.n_experts + 2) if spec.n_experts > 1 else 0
    logits = (max_batch + 10) * spec.vocab_size  # and the sampler's sort of one request's, in f64 and i64
    return 4 * (arrays + inputs + panels + partial + tiles + guess + routed + scores + spans + logits)


def runtime_bytes(spec: ModelSpec) -> int:
    """Python, numpy, the native core; then the tokenizer, 0.7 to 0.8 KB for a token of the vocabulary."""
    return RUNTIME_BYTES + TOKEN_BYTES * spec.vocab_size


def fit(
    spec: ModelSpec,
    *,
    weights_bytes: int,
    available_bytes: int | None,
    context: int,
    max_batch: int,
    threads: int,
    at_least: int | None = None,
) -> int:
    """Positions for the KV cache: as many full contexts as are cheap, at least one; else OutOfBudget.

    `at_least`: fewer than that many positions will not do; None: `context`.
    """
    at_least = context if at_least is None else at_least

    def cache(tokens: int, context: int = context) -> int:
        return reserved_bytes(spec, tokens, context, PREFILL_CHUNK)

    def others(context: int) -> int:
        scratch = scratch_bytes(spec, context=context, max_batch=max_batch, threads=threads)
        return weights_bytes + scratch + runtime_bytes(spec)

    def least(shorter: int) -> int:  # what a session of such a context needs
        return others(shorter) + cache(-(-at_least * shorter // context), shorter)

    cheap = bisect.bisect_right(range(context * max_batch + 1), KV_POOL_BYTES, key=cache) - 1
    pool = max(at_least, cheap)
    if available_bytes is None or others(context) + cache(pool) <= available_bytes:
        return pool
    if least(context) <= available_bytes:
        return at_least
    tokens = bisect.bisect_right(range(1, context), available_bytes, key=least)
    change = f"a context of at most {tokens}" if tokens > 0 else "a smaller weight format (q4_0) or model"
    raise OutOfBudget(
        f"the model needs {least(context) / GIB:.2f} GiB of memory ({weights_bytes / GIB:.2f} weights, "
        f"{cache(at_least) / GIB:.2f} keys and values at context {context}, "
        f"{(others(context) - weights_bytes) / GIB:.2f} buffers), {available_bytes / GIB:.2f} GiB is free; "
        f"use {change}"
    )
