"""`/v1/chat/completions` and `/v1/completions`: from a checked body to the engine's jobs and their answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from thermocline.engine.sampler import SamplingParams
from thermocline.server.api import schema
from thermocline.server.api.answers import Answer, ChatAnswer, CompletionAnswer
from thermocline.server.api.chat import begin_chat
from thermocline.server.api.responses import answered
from thermocline.server.api.state import Api
from thermocline.server.http.posted import Posted, posted
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.engine_process import Jobs


def routes(api: Api) -> list[Route]:
    async def chat(request: Request) -> Response:
        given = posted(request.scope)
        jobs, answer = await _chat(api, request, given)
        given.done()
        return await answered(jobs, answer, api.limits.limit_ping_s)

    async def complete(request: Request) -> Response:
        given = posted(request.scope)
        jobs, answer = await _complete(api, request, given)
        given.done()
        return await answered(jobs, answer, api.limits.limit_ping_s)

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
    ]


async def _chat(api: Api, request: Request, given: Posted) -> tuple[Jobs, Answer]:
    r = await api.body(given, schema.ChatRequest, request.url.path)
    api.ready_model(r.model)
    begun = await begin_chat(api, request, given, r)
    return begun.jobs, ChatAnswer(begun.model.name, begun.model.tokenizer, schema.settings(r), begun.parser)


async def _complete(api: Api, request: Request, given: Posted) -> tuple[Jobs, Answer]:
    r = await api.body(given, schema.CompletionRequest, request.url.path)
    model = api.ready_model(r.model)
    prompts = _prompts(r.prompt)
    api.check(r, len(prompts))
    if r.suffix:
        raise Refusal(400, "suffix: this server does not fill in the middle; leave it out", param="suffix")
    if r.best_of is not None and r.best_of != (r.n or 1):
        raise Refusal(400, "best_of: it has to be equal to n; leave it out", param="best_of")
    limit = schema.COMPLETION_TOKENS if r.max_tokens is None else r.max_tokens
    params = await given.apart(
        partial(schema.sampling_params, r, api.defaults, logprobs=r.logprobs, max_tokens=limit)
    )
    if r.echo:
        params = replace(params, prompt_logprobs=r.logprobs)
    await api.check_grammar(request, params, schema.grammar_fields(r))
    prepared: list[tuple[list[int], SamplingParams]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            model.check_length(prompt)
            ids = await api.prompt(partial(model.tokenizer.encode, prompt, parse_special=True))
        else:
            ids = prompt
        prepared += api.prepare(model, ids, params, r.n or 1)
    each = [ids for ids, _ in prepared]
    make = partial(CompletionAnswer, model.name, model.tokenizer, schema.settings(r), each)
    answer = await api.prompt(make) if r.echo else make()
    return api.submit(prepared), answer


def _prompts(given: Any) -> Sequence[str | list[int]]:
    """Return a request's prompts as a list: it may be one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given or isinstance(given[0], int):
        return [given]
    return list(given)
