"""`/v1/chat/completions`, `/v1/completions`, `/infill`: from a checked body to the engine's jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from thermocline.engine.sampler import SamplingParams
from thermocline.server.api import schema
from thermocline.server.api.answers import Answer, ChatAnswer, CompletionAnswer, InfillAnswer
from thermocline.server.api.chat import begin_chat
from thermocline.server.api.models.served import ServedModel
from thermocline.server.api.responses import answered
from thermocline.server.api.state import Api
from thermocline.server.http.posted import Posted, posted
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.engine_process import Jobs
from thermocline.text.infill import Infill

Begin = Callable[[Api, Request, Posted], Awaitable[tuple[Jobs, Answer]]]


def routes(api: Api) -> list[Route]:
    def route(path: str, begin: Begin) -> Route:
        async def handle(request: Request) -> Response:
            given = posted(request.scope)
            jobs, answer = await begin(api, request, given)
            given.done()
            return await answered(jobs, answer, api.limits.limit_ping_s)

        return Route(path, handle, methods=["POST"])

    return [
        route("/infill", _infill),
        route("/v1/chat/completions", _chat),
        route("/v1/completions", _complete),
    ]


async def _chat(api: Api, request: Request, given: Posted) -> tuple[Jobs, Answer]:
    r = await api.body(given, schema.ChatRequest, request.url.path)
    model = await api.model(request, r.model, stream=r.stream)
    begun = await begin_chat(api, request, given, r, model)
    return begun.jobs, ChatAnswer(begun.model.name, begun.model.tokenizer, schema.settings(r), begun.parser)


async def _complete(api: Api, request: Request, given: Posted) -> tuple[Jobs, Answer]:
    r = await api.body(given, schema.CompletionRequest, request.url.path)
    prompts = schema.prompts_of(r.prompt)
    api.check(r, len(prompts))
    model = await api.model(request, r.model, stream=r.stream)
    fill = _fill_in(model, "suffix") if r.suffix else None
    if fill is not None and (r.echo or not all(isinstance(p, str) for p in prompts)):
        raise Refusal(400, "suffix: the prompt has to be text, without echo", param="suffix")
    if r.best_of is not None and r.best_of != (r.n or 1):
        raise Refusal(400, "best_of: it has to be equal to n; leave it out", param="best_of")
    limit = schema.COMPLETION_TOKENS if r.max_tokens is None else r.max_tokens
    params = await given.apart(
        partial(schema.sampling_params, r, model.defaults, logprobs=r.logprobs, max_tokens=limit)
    )
    if r.echo:
        params = replace(params, prompt_logprobs=r.logprobs)
    if fill is not None:
        params = replace(params, stop_ids=fill.stop_ids)
    await api.check_grammar(request, params, schema.grammar_fields(r))
    prepared: list[tuple[list[int], SamplingParams]] = []
    for prompt in prompts:
        if isinstance(prompt, str) and fill is not None:
            model.check_length(prompt, r.suffix or "")
            ids = await api.prompt(partial(fill.encode, prompt, r.suffix or ""))
        elif isinstance(prompt, str):
            model.check_length(prompt)
            ids = await api.prompt(partial(model.tokenizer.encode, prompt, parse_special=True))
        else:
            ids = prompt
        prepared += api.prepare(model, ids, params, r.n or 1)
    each = [ids for ids, _ in prepared]
    make = partial(CompletionAnswer, model.name, model.tokenizer, schema.settings(r), each)
    answer = await api.prompt(make) if r.echo else make()
    return api.submit(model, prepared), answer


async def _infill(api: Api, request: Request, given: Posted) -> tuple[Jobs, Answer]:
    r = await api.body(given, schema.InfillRequest, request.url.path)
    api.check(r)
    model = await api.model(request, r.model, stream=r.stream)
    fill = _fill_in(model)
    if (r.n or 1) > 1:
        raise Refusal(400, "n: /infill has one answer; leave it out", param="n")
    limit = r.max_tokens if r.n_predict is None else r.n_predict
    params = await given.apart(
        partial(schema.sampling_params, r, model.defaults, logprobs=None, max_tokens=limit)
    )
    params = replace(params, stop_ids=fill.stop_ids)
    await api.check_grammar(request, params, schema.grammar_fields(r))
    before, files = r.input_prefix + r.prompt, [(f.filename, f.text) for f in r.input_extra or ()]
    model.check_length(before, r.input_suffix, *(part for file in files for part in file))
    ids = await api.prompt(partial(fill.encode, before, r.input_suffix, files))
    jobs = api.submit(model, api.prepare(model, ids, params, 1))
    return jobs, InfillAnswer(model.name, model.tokenizer, schema.settings(r), 1)


def _fill_in(model: ServedModel, param: str | None = None) -> Infill:
    if model.infill is None:
        about = "this model does not fill in the middle of a text: it has no marks for that"
        raise Refusal(400, about if param is None else f"{param}: {about}", param=param)
    return model.infill
