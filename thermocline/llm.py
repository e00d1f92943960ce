"""`LLM`, the public way in: a model's files in, an engine that fits in memory, its text out.

`LLM` opens a `Session` and owns the lock around its engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from thermocline.engine.generation_config import recommended
from thermocline.engine.request import Chunk, Completion, PoolingParams, Request, reading_for, request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.engine.vectors import DocumentRanker, Embedder
from thermocline.errors import UsageError
from thermocline.hub.download import locate
from thermocline.opening.open_model import open_model
from thermocline.session.options import (
    EngineOptions,
    Keywords,
    ModelOptions,
    changed,
    check_keywords,
    default_cache_dir,
)
from thermocline.session.session import Progress, Session, silent
from thermocline.text.chat_template import ChatTemplate, Message
from thermocline.text.grammar_matcher import Grammars
from thermocline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from thermocline.engine.engine import Engine
    from thermocline.files.small_files import SmallFiles
    from thermocline.pack.stored_model import StoredModel
    from thermocline.text.grammar import Constraint

log = logging.getLogger(__name__)
Vector = NDArray[np.float32]
BUNDLED = Path(__file__).with_name("bundled")


def opened_model(files: ModelOptions, progress: Progress) -> StoredModel:
    """Open a model; fetch it, and pack one that does not run in place, where that was not done before."""
    cache_dir = default_cache_dir(os.environ) if files.cache_dir is None else files.cache_dir
    path = BUNDLED if files.model is None else locate(files.model, progress)
    packing = partial(progress, "packing")
    return open_model(path, cache_dir, files.format, packing, text=True, activation=files.activation)


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

    @property
    def computing(self) -> bool:
        """Is a step being computed? A signal handler that raises then ends it at once, and loses only it."""
        return self._llm._computing

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

    model      a pack; a GGUF file, which runs in place; a Hugging Face directory, packed once into
               `cache_dir`; or a name on the hub, "org/name[@revision][:file or quant]", fetched once;
               None: the bundled model. A Path is a path
    threads    None: the physical cores this process may use
    context    tokens of prompt and answer together; None: the model's limit, but at most 4096, since memory
               for it is reserved up front; any number up to the model's limit can be asked for
    format     of the weights, one of `thermocline pack --format`: the model is packed in it; None: a GGUF's
               own, else q8_0
    activation  "relu", on an FFN's gate alone, or "drelu", on gate and up: where the model leaves it open
    sparsity   "exact" skips neurons that are zero, with the same answer; "predict" also those that the pack's
               predictors (`thermocline train`) take for zero, with nearly the same; "off" computes all
    max_batch  requests computed together; more wait
    cache_dir  where packed models are kept; None: the system's place for caches
    progress   called with ("downloading", "packing" or "loading", bytes done, bytes in all)
    lazy       wait for the weights at the first request that can be answered: a bad one is refused at once
    chat_template  Jinja, in place of the model's own
    ram        GiB that all of it may take together; None: what is free. Where the weights of a ReLU model
               are larger, those of the neurons that are needed least stay on disk; of a mixture, experts
    disable    of "bundle", "cache" and "pipeline": what the disk tier is to do without, to measure its parts
    read_budget  MB that a token of an answer may read of experts on disk; beyond that those with little
               weight are left out, and answers are not exact; None: it reads all that it needs
    cache_type_k  of keys: "f16", "q8_0" (53 % of its memory) or "q4_0" (28 %)
    cache_type_v  of values: the same
    prompt_cache  GiB of memory for keys and values of finished requests, beside those of running ones: a
               prompt that begins alike computes only what is new
    prompt_cache_dir  a directory where they are kept, too, and found by the next session; None: none
    prompt_cache_disk  GiB that this directory may take: what was not used for the longest time goes first
    gpu        "off"; "auto": a GPU if there is one and it helps; or its number, "0", or several, "0,1". What
               fits there is computed there, the hottest neurons first, and the rest here. Not yet verified on
               a card
    vram       GiB of each one's memory that may be taken; None: what is free
    generation_config  "auto": where no `SamplingParams` are given, they are as the model's
               generation_config.json recommends; "off": that is not read
    options    an `EngineOptions`, with the options of the engine as one value; keywords change its fields
    files      a `ModelOptions`, with the model, `format`, `activation`, `cache_dir`, `chat_template` and
               `generation_config` as one value; keywords change its fields

    Safe to use from several threads. A line for a person, such as what packing a GGUF cost or that neurons
    come from disk, goes to `logging`'s logger "thermocline".
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        options: EngineOptions | None = None,
        files: ModelOptions | None = None,
        progress: Progress | None = None,
        lazy: bool = False,
        **keywords: Unpack[Keywords],
    ) -> None:
        check_keywords(keywords)
        options = changed(options or EngineOptions(), keywords)
        files = changed(files or ModelOptions(), keywords)
        begin, progress = time.perf_counter(), progress or silent
        self._files = files
        self._model = opened_model(files if model is None else replace(files, model=model), progress)
        self.path, self.spec = self._model.path, self._model.spec
        self.sparsity, self.weight_format = options.sparsity, self._model.weight_format
        self._lock = threading.Lock()
        self._leaving: deque[Request] = deque()
        self._closed = False
        self.session = Session.open(self._model, options, progress=progress)
        self.threads = self.session.threads
        try:
            self.session.begin()
            self.tokenizer = Tokenizer(self._model.small_files, self.spec)
            self._grammars = Grammars(self.tokenizer)
            self.load_s = time.perf_counter() - begin
            if not lazy:
                self._open()
        except BaseException:
            self.close()  # nobody else can
            raise

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self.session.context

    @property
    def memory_bytes(self) -> int:
        """All the RAM that this process takes at most."""
        return self.session.memory_bytes

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> Completion: ...
    @overload
    def generate(self, prompts: list[str], params: SamplingParams | None = None) -> list[Completion]: ...
    def generate(
        self, prompts: str | list[str], params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Complete one prompt, or several at once; one token of each is computed together."""
        many = [prompts] if isinstance(prompts, str) else prompts
        done = self._together(self.stream(prompt, params) for prompt in many)
        return done[0] if isinstance(prompts, str) else done

    def best_of(self, n: int, prompt: str, params: SamplingParams | None = None) -> list[Completion]:
        """n answers to a prompt, computed together, with seeds one apart; those whose tokens the model found
        likelier on average first.
        """
        params = params or self._default_params
        asked = replace(params, logprobs=params.logprobs or 0)

        def drawn() -> Iterator[Stream]:
            seed = params.seed
            for _ in range(n):
                stream = self.stream(prompt, replace(asked, seed=seed))
                yield stream
                seed = (stream.completion.seed + 1) % (1 << 64)

        return sorted(self._together(drawn()), key=lambda c: -c.mean_logprob)

    @staticmethod
    def _together(requests: Iterable[Stream]) -> list[Completion]:
        """All of them begun, then each to its end; whatever happens, none is left behind."""
        streams: list[Stream] = []
        try:
            for stream in requests:
                streams.append(stream)  # one by one: what was begun before one is refused is closed, too
            for stream in streams:
                for _ in stream:
                    pass
        finally:
            for stream in streams:
                stream.close()
        return [stream.completion for stream in streams]

    @overload
    def embed(self, texts: str, *, dimensions: int | None = None) -> Vector: ...
    @overload
    def embed(self, texts: list[str], *, dimensions: int | None = None) -> list[Vector]: ...
    def embed(self, texts: str | list[str], *, dimensions: int | None = None) -> Vector | list[Vector]:
        """The vector of one text, [dim] f32, or of several; only of an embedding model, as it pools.

        `dimensions`: of those that the model lets vectors be cut to. A prompt that the makers recommend is
        yours to put before a text. UsageError: another model, a text that the context does not hold.
        """
        embedder = Embedder(self.spec, self.tokenizer, dimensions)
        prompts = embedder.prompts([texts] if isinstance(texts, str) else texts)
        found = list(map(embedder.cut, self._read(prompts)))
        return found[0] if isinstance(texts, str) else found

    def rerank(self, query: str, documents: list[str], *, instruction: str | None = None) -> list[float]:
        """How relevant each document is to a query, from 0 to 1, in their order; only of a reranker.

        `instruction`: what the query asks for, in place of the makers' words. UsageError: another model, a
        document that the context does not hold.
        """
        return self._ranker.scores(self._read(self._ranker.prompts(query, documents, instruction)))

    def _read(self, prompts: Sequence[tuple[Sequence[int], PoolingParams]]) -> list[Vector]:
        make = partial(reading_for, self.spec, self.context, self.tokenizer)
        requests = [make(*prompt) for prompt in prompts]  # all are checked before weights are waited for
        with self._lock:
            engine = self._open()
            streams = [Stream(self, engine.queue(request)) for request in requests]
        self._together(streams)
        return [r.vector for r in requests if r.vector is not None]

    @cached_property
    def _ranker(self) -> DocumentRanker:
        try:
            template: ChatTemplate | None = self.chat_template
        except UsageError:  # it has none
            template = None
        return DocumentRanker(self.spec, self.tokenizer, template)

    def stream(self, prompt: str, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt, token by token."""
        return self._stream(self.tokenizer.encode(prompt, parse_special=True), params or self._default_params)

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
        params = params or self._default_params
        return self._stream(ids, replace(params, stop_ids=(*params.stop_ids, *self.chat_template.stop_ids)))

    @property
    def in_place(self) -> bool:
        """Whether the model's file is read as it is, instead of a pack that was made of it."""
        return not self.path.is_dir()  # a pack is one

    @property
    def small_files(self) -> SmallFiles:
        """The model's tokenizer and chat template, as files."""
        return self._model.small_files

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's, or the one given; UsageError where there is none."""
        return ChatTemplate(self._model.small_files, self.tokenizer, self._files.chat_template)

    @cached_property
    def recommended(self) -> dict[str, Any]:
        """Sampling that the model's makers recommend, by `SamplingParams`' names; none where that is off.

        For `SamplingParams(**llm.recommended, seed=1)`. BadFile, Unsupported: a key is not understood.
        """
        return recommended(self._model) if self._files.generation_config == "auto" else {}

    @property
    def _default_params(self) -> SamplingParams:
        return SamplingParams(**self.recommended)

    def load(self) -> None:
        """Read the weights now, where `lazy` has put it off."""
        with self._lock:
            self._open()

    @property
    def engine(self) -> Engine:
        """For a server that steps it itself, from one thread and alone; read the weights if need be."""
        with self._lock:
            return self._open()

    def read_gbs(self) -> float | None:
        """GB/s of reading the weights over and over with as many threads: the roof of a token's speed.

        None before they are loaded, and where a GPU has a part of them.
        """
        with self._lock:
            return self.session.read_gbs(self.threads)

    def constraint(self, params: SamplingParams, *, checked: bool = False) -> Constraint | None:
        """Return the constraint of `params.grammar`, for `Engine.submit`. `checked`: by `grammar.check`."""
        if params.grammar is None:
            return None
        return self._grammars.constraint(params.grammar, params.stop_ids, checked=checked)

    def _stream(self, ids: list[int], params: SamplingParams) -> Stream:
        constraint = self.constraint(params)
        request = request_for(self.spec, self.context, self.tokenizer, ids, params, constraint)
        with self._lock:
            return Stream(self, self._open().queue(request))

    def close(self) -> None:
        """Free the weights and the cache. Streams end."""
        if "chat_template" in self.__dict__:
            self.chat_template.close()
        if "tokenizer" in self.__dict__:
            self.tokenizer.close()
        with self._lock:
            if (engine := self.session.engine) is not None:
                self._leaving.extend([*engine.waiting, *engine.running])
            self._let_go()
            self._closed = True
            self.session.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Engine:
        if self._closed:
            raise UsageError("this LLM is closed")
        if (engine := self.session.engine) is not None:
            return engine
        begin = time.perf_counter()
        engine = self.session.load(self.tokenizer)
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

    @property
    def _computing(self) -> bool:
        engine = self.session.engine
        return engine is not None and engine.computing

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
            if (engine := self.session.engine) is not None:
                engine.cancel(request)
