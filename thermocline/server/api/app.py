"""The routes of `thermocline serve`: OpenAI's API and llama.cpp's, over one engine.

Owns what each route does. Must not know sockets (`http.py`), who may call (`guard.py`), or the decoder.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from thermocline import __version__
from thermocline.engine.request import request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import BadFile, ThermoclineError, UsageError
from thermocline.server.api import activity, conversation, openapi, schema
from thermocline.server.api.answer_parser import AnswerParser
from thermocline.server.api.answers import Answer, ChatAnswer, CompletionAnswer
from thermocline.server.api.errors import of_engine, of_validation
from thermocline.server.api.metrics import Metrics
from thermocline.server.api.model import ServedModel
from thermocline.server.api.rendered import json_bytes, pieces, rendered
from thermocline.server.api.tools import Offer, answer_grammar
from thermocline.server.api.trials import Trials
from thermocline.server.http import sse
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.posted import Posted, posted
from thermocline.server.http.refusal import Refusal
from thermocline.server.page import assets
from thermocline.server.process.engine_process import EngineProcess, Jobs
from thermocline.server.process.messages import Finished, Token
from thermocline.text.grammar import depth

Body = TypeVar("Body", bound=BaseModel)
RETRY_LOADING_S = 2
_MOST_IGNORED = 100  # lines about fields that are left out: names are the clients' to make up
_MOST_NAMED = 20  # in one of them


class Api:
    """The application's state, on the event loop's thread; tokenising, which may take long, is on another."""

    def __init__(
        self,
        engine: EngineProcess,
        limits: ServerLimits,
        note: Callable[[str], None],
        *,
        defaults: SamplingParams,
        keys: bool,
    ) -> None:
        """`defaults`: of what a request leaves open. `keys`: clients need one, which the guard asks for."""
        self.keys, self.defaults = keys, defaults
        self.engine, self.limits, self._note = engine, limits, note
        self.metrics = Metrics(engine)
        engine.observe = self.metrics.observe
        self.model: ServedModel | None = None
        self.progress: tuple[str, int, int] | None = None
        self._said_ignored: set[str] = set()
        self._began = int(time.time())
        self.routes = self._listed()
        self._texts = asyncio.Semaphore(1)  # the template's sandbox answers one at a time
        self._conversions = asyncio.Semaphore(1)
        self._trials = Trials(limits.limit_trials)

    def close(self) -> None:
        if self.model is not None:
            self.model.close()

    # ---- before a request is taken

    async def body(self, given: Posted, kind: type[Body], path: str) -> Body:
        made, unknown = await given.apart(partial(_validated, kind, given.value, self.limits))
        if unknown:
            self._say_ignored(f"{path}: ignored {', '.join(map(repr, unknown))[:200]}")
        return made

    def _say_ignored(self, line: str) -> None:
        """Once each: a client that sends a field sends it always."""
        if line not in self._said_ignored and len(self._said_ignored) < _MOST_IGNORED:
            self._said_ignored.add(line)
            self._note(line)

    def ready_model(self, asked: str | None = None) -> ServedModel:
        """Raises 503 until it can answer, 404 for another model than the one there is."""
        if self.model is None or not self.engine.ready:
            what = (
                "Loading model" if self.engine.state in ("starting", "loading") else "The engine is not ready"
            )
            raise Refusal(503, what, headers={"retry-after": str(RETRY_LOADING_S)})
        if asked is not None and asked != self.model.name:
            raise Refusal(
                404, f"there is no model {asked[:200]!r} here, but {self.model.name!r}",
                param="model", code="model_not_found"
            )  # fmt: skip
        return self.model

    def submit(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> Jobs:
        """Raises 503 where too many wait: one HTTP request may ask for many answers."""
        model = self.model
        assert model is not None
        if self.engine.active + len(prompts) > model.max_batch + max(self.limits.limit_queue, len(prompts)):
            raise Refusal(503, "too many answers are waiting; try again", code="queue_full")
        return self.engine.submit(prompts)

    async def enforceable(self, request: Request, params: SamplingParams, fields: Sequence[str]) -> None:
        """Raises 400 where its grammar, made from these, cannot be kept to: it is tried out, in a process."""
        g, most = params.grammar, self.limits
        if g is None:
            return
        if len(g.text.encode()) > most.limit_schema_bytes or depth(g.text) > most.limit_schema_depth:
            said = f"{most.limit_schema_bytes} bytes or {most.limit_schema_depth} levels"
            raise Refusal(400, f"the grammar or schema has more than {said}")
        try:
            await self._trials.check(g, request.client.host if request.client else "")
        except UsageError as e:
            raise Refusal(400, str(e), param=fields[0] if len(fields) == 1 else None) from None

    async def apart(self, what: Callable[[], Any]) -> Any:
        """Work that may be long, on another thread."""
        async with self._texts:
            return await asyncio.to_thread(what)

    async def converted(self, what: Callable[[], Any]) -> Any:
        """The same for /tokenize and /detokenize. They wait for each other, and no prompt for them."""
        async with self._conversions:
            return await asyncio.to_thread(what)

    def jobs(
        self, model: ServedModel, ids: list[int], params: SamplingParams, n: int
    ) -> list[tuple[list[int], SamplingParams]]:
        """n answers to a prompt, seeds one apart. Raises 400 before anything is queued."""
        if len(ids) > model.context:
            raise Refusal(
                400, f"the prompt has {len(ids)} tokens, the context holds {model.context}",
                type="exceed_context_size_error", code="context_length_exceeded",
                extra={"n_prompt_tokens": len(ids), "n_ctx": model.context}
            )  # fmt: skip
        plain = replace(params, grammar=None)  # which the engine's process compiles for itself
        request = request_for(model.spec, model.context, model.tokenizer, ids, plain)
        seed = request.sampler.seed
        return [(request.ids, replace(params, seed=(seed + i) % (1 << 63))) for i in range(n)]

    def check(self, r: schema.Sampling, prompts: int = 1) -> None:
        """What is bounded beyond a field's own range."""
        for param, said in schema.excesses(r, self.limits, prompts):
            raise Refusal(400, f"{param}: {said}", param=param)

    # ---- /v1/chat/completions

    async def chat(self, request: Request) -> Response:
        given = posted(request.scope)
        work, shape = await self._chat(request, given)
        given.done()
        return await self._answered(work, shape)

    async def _chat(self, request: Request, given: Posted) -> tuple[Jobs, Answer]:
        r = await self.body(given, schema.ChatRequest, request.url.path)
        model = self.ready_model(r.model)
        self.check(r)
        if model.template is None:
            raise Refusal(400, model.why_no_template, param="messages")
        template = model.template
        offer = Offer.of(r, model.format)
        model.check_length(*conversation.texts(r.messages))
        messages = await given.apart(partial(conversation.messages, r.messages, self.limits))
        variables = conversation.variables(r, offer)
        encode = partial(template.encode, messages, variables=variables, check=model.check_length)
        try:
            ids = await self.apart(encode)
        except BadFile as e:  # it takes others: the one this template fails at is this client's
            raise Refusal(400, str(e), param="messages") from None
        stop_ids = await self.apart(lambda: template.stop_ids)
        thinking = model.format.thinks and conversation.ends_within_a_thought(model.tokenizer, ids)

        def params() -> SamplingParams:
            asked = r.max_completion_tokens if r.max_completion_tokens is not None else r.max_tokens
            logprobs = (r.top_logprobs or 0) if r.logprobs else None
            found = schema.sampling_params(r, self.defaults, logprobs=logprobs, max_tokens=asked)
            form = answer_grammar(offer, model.format, thinking, found.grammar)
            return replace(found, stop_ids=stop_ids, grammar=form)

        how = await given.apart(params)
        await self.enforceable(request, how, [*schema.grammar_fields(r), *["tools"] * offer.asked])
        work = self.submit(self.jobs(model, ids, how, r.n or 1))
        parts = partial(AnswerParser, model.format, tools=bool(offer.shown), thinking=thinking)
        return work, ChatAnswer(model.name, model.tokenizer, schema.settings(r), parts)

    # ---- /v1/completions

    async def complete(self, request: Request) -> Response:
        given = posted(request.scope)
        work, shape = await self._complete(request, given)
        given.done()
        return await self._answered(work, shape)

    async def _complete(self, request: Request, given: Posted) -> tuple[Jobs, Answer]:
        r = await self.body(given, schema.CompletionRequest, request.url.path)
        model = self.ready_model(r.model)
        prompts = _prompts(r.prompt)
        self.check(r, len(prompts))
        if r.suffix:
            raise Refusal(400, "suffix: this server does not fill in the middle", param="suffix")
        if r.best_of is not None and r.best_of != (r.n or 1):
            raise Refusal(400, "best_of: only what n says", param="best_of")
        encode = partial(model.tokenizer.encode, parse_special=True)
        limit = schema.COMPLETION_TOKENS if r.max_tokens is None else r.max_tokens
        settled = partial(schema.sampling_params, r, self.defaults, logprobs=r.logprobs, max_tokens=limit)
        params = await given.apart(settled)
        if r.echo:
            params = replace(params, prompt_logprobs=r.logprobs)
        await self.enforceable(request, params, schema.grammar_fields(r))
        jobs: list[tuple[list[int], SamplingParams]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                model.check_length(prompt)
            ids = await self.apart(partial(encode, prompt)) if isinstance(prompt, str) else prompt
            jobs += self.jobs(model, ids, params, r.n or 1)
        each = [ids for ids, _ in jobs]
        shape = partial(CompletionAnswer, model.name, model.tokenizer, schema.settings(r), each)
        made = await self.apart(shape) if r.echo else shape()
        return self.submit(jobs), made

    # ---- both

    async def _answered(self, work: Jobs, shape: Answer) -> Response:
        if shape.request.stream:
            return Events(self._events(work, shape), work)
        try:  # the guard cancels this where nobody is there to read it any more
            while (events := await work.next()) is not None:
                for event in events:
                    shape.take(*event)
            return await rendered(lambda: json_bytes(shape.whole()))
        finally:
            work.close()

    async def _events(self, work: Jobs, shape: Answer) -> AsyncIterator[bytes]:
        """Api-sent events. A comment now and then while there is nothing to say."""
        loop = asyncio.get_running_loop()
        try:
            for opening in shape.begin():
                yield sse.event(opening)
            spoke = loop.time()
            while (events := await work.next(self.limits.limit_ping_s)) is not None:
                known = any(
                    isinstance(e, Finished) and e.prompt_logprobs for _, e in events
                )  # of a whole prompt
                said = await asyncio.to_thread(_said, shape, events) if known else _said(shape, events)
                now = loop.time()
                if said or now - spoke >= self.limits.limit_ping_s:  # a call is held back until it is whole
                    spoke = now
                    yield said or sse.SILENCE
            if shape.include_usage:
                yield sse.event(shape.usage())
            yield sse.DONE
        except ThermoclineError as e:
            yield sse.event({"error": of_engine(e).error})

    # ---- the rest

    async def models(self, request: Request) -> Response:
        model = self.model or self.ready_model()  # an empty list is what clients take for the whole truth
        return JSONResponse({"object": "list", "data": [self._about(model)]})

    async def one_model(self, request: Request) -> Response:
        return JSONResponse(self._about(self.ready_model(request.path_params["model"])))

    def _about(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name, "object": "model", "created": self._began, "owned_by": "thermocline",
            "meta": {"n_vocab": model.spec.vocab_size, "n_ctx": model.context,
                     "n_ctx_train": model.spec.max_context, "n_embd": model.spec.dim},
        }  # fmt: skip

    async def health(self, request: Request) -> Response:
        e = self.engine
        age = round(e.heartbeat_age_s * 1e3)
        facts = {"live": e.alive, "ready": self.model is not None and e.ready, "heartbeat_age_ms": age}
        if facts["ready"]:
            return JSONResponse({"status": "ok", **facts})
        message = "Loading model" if e.state in ("starting", "loading") else f"The engine is {e.state}"
        if e.state == "ready":
            message = f"The engine has not been heard of for {age / 1e3:.0f} s"
        about = {"error": Refusal(503, message).error, **facts}
        if self.progress is not None and e.state == "loading":
            about["progress"] = dict(zip(("what", "done", "size"), self.progress, strict=True))
        return JSONResponse(about, 503, headers={"Retry-After": str(RETRY_LOADING_S)})

    async def props(self, request: Request) -> Response:
        model = self.ready_model()
        d = self.defaults
        sampling = {
            "temperature": d.temperature, "top_k": d.top_k, "top_p": d.top_p, "min_p": d.min_p,
            "repeat_penalty": d.repeat_penalty, "repeat_last_n": d.repeat_last_n,
        }  # fmt: skip
        return JSONResponse({
            "default_generation_settings": {"n_ctx": model.context, "params": sampling},
            "total_slots": model.max_batch,
            "model_alias": model.name,
            "chat": model.template is not None,
            "build_info": f"thermocline {__version__}",
        })  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        r = await self.body(posted(request.scope), schema.TokenizeRequest, request.url.path)
        t, most = self.ready_model().tokenizer, self.limits.limit_tokenize_bytes
        if len(r.content) > most or len(r.content.encode()) > most:
            raise Refusal(413, f"content: at most {most} bytes", param="content")
        ids = await self.converted(
            partial(t.encode, r.content, add_special=r.add_special, parse_special=r.parse_special)
        )
        return await rendered(
            partial(pieces, t, ids) if r.with_pieces else lambda: json_bytes({"tokens": ids})
        )

    async def detokenize(self, request: Request) -> Response:
        r = await self.body(posted(request.scope), schema.DetokenizeRequest, request.url.path)
        model = self.ready_model()
        if max(r.tokens, default=0) >= model.spec.vocab_size:
            raise Refusal(400, f"tokens: they are 0 to {model.spec.vocab_size - 1}", param="tokens")
        text = await self.converted(partial(model.tokenizer.decode, r.tokens))
        return await rendered(lambda: json_bytes({"content": text}))

    async def scraped(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def described(self, request: Request) -> Response:
        vocabulary = None if self.model is None else self.model.spec.vocab_size
        return JSONResponse(openapi.document(self.keys, self.limits, vocabulary))

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(openapi.page())

    def methods(self, path: str) -> Collection[str] | None:
        return next((r.methods for r in self.routes if r.path_regex.match(path)), None)

    def _listed(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/health", self.health, methods=get),
            Route("/v1/health", self.health, methods=get),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/{model:path}", self.one_model, methods=get),  # a name may have slashes
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/completions", self.complete, methods=post),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/props", self.props, methods=get),
            Route("/metrics", self.scraped, methods=get),
            Route("/openapi.json", self.described, methods=get),
            Route("/docs", self.docs, methods=get),
            *activity.routes(self.engine.subscribers, self.limits.limit_ping_s, self.limits.limit_onlookers),
            *assets.routes(),
        ]


class Events(StreamingResponse):
    """A stream whose work ends with it, also where it is given up before its first event was asked for."""

    def __init__(self, events: AsyncIterator[bytes], work: Jobs) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._work = work

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._work.close()


# ---- parts


def _validated(kind: type[Body], given: dict[str, Any], limits: ServerLimits) -> tuple[Body, list[str]]:
    """(the request, names of what is left out: the first few)."""
    try:
        made = kind.model_validate(given, context=limits)
    except ValidationError as e:
        raise of_validation(e, given) from None
    for name in sorted(schema.UNSUPPORTED.keys() & given):
        if given[name]:
            raise Refusal(400, f"{name}: not taken here; {schema.UNSUPPORTED[name]}", param=name)
    known = _fields(kind)
    return made, sorted(islice((name[:64] for name in given if name not in known), _MOST_NAMED))


def _said(shape: Answer, events: Sequence[tuple[int, Token | Finished]]) -> bytes:
    return b"".join(sse.event(body) for event in events for body in shape.take(*event))


def _fields(kind: type[BaseModel]) -> set[str]:
    return {f.alias or name for name, f in kind.model_fields.items()}


def _prompts(given: Any) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if not given or isinstance(given[0], int):
        return [given]
    return list(given)


# ---- errors


async def _refused(request: Request, e: Exception) -> Response:
    assert isinstance(e, Refusal)
    return Response(e.body(), e.status, e.headers, "application/json")


async def _engine_error(request: Request, e: Exception) -> Response:
    assert isinstance(e, ThermoclineError)
    return await _refused(request, of_engine(e))


async def _no_route(request: Request, e: Exception) -> Response:
    return await _refused(request, Refusal(404, "there is nothing here: see /docs"))


async def _wrong_method(request: Request, e: Any) -> Response:
    made = await _refused(request, Refusal(405, f"method {request.method} is not allowed on this route"))
    made.headers.update(e.headers or {})
    return made


def application(server: Api, lifespan: Any = None) -> Starlette:
    handlers: dict[Any, Any] = {
        Refusal: _refused,
        ThermoclineError: _engine_error,
        404: _no_route,
        405: _wrong_method,
    }
    made = Starlette(routes=server.routes, exception_handlers=handlers, lifespan=lifespan)
    made.router.redirect_slashes = False
    return made
