"""From a conversation to the engine's jobs: the one way that the routes of all chat APIs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request

from thermocline.engine.sampler import SamplingParams
from thermocline.errors import BadFile
from thermocline.server.api import conversation, schema
from thermocline.server.api.models.served import ServedModel
from thermocline.server.api.parsing.answer_parser import Parts
from thermocline.server.api.parsing.harmony import parser_of
from thermocline.server.api.state import Api
from thermocline.server.api.tools import Offer, answer_grammar
from thermocline.server.http.posted import Posted
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.engine_process import Jobs


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation's tokens, and the functions that an answer to it may call."""

    ids: list[int]
    offer: Offer


@dataclass(frozen=True)
class BegunChat:
    """A conversation that the engine answers."""

    model: ServedModel
    jobs: Jobs
    parser: Callable[[], Parts]  # a parser for each answer
    prompt_tokens: int


async def chat_prompt(api: Api, given: Posted, r: schema.ChatRequest, model: ServedModel) -> ChatPrompt:
    """Return the prompt of a conversation. Refuse one that the model's template cannot render."""
    api.check(r)
    if model.template is None:
        raise Refusal(400, model.why_no_template, param="messages")
    template = model.template
    offer = Offer.of(r, model.format)
    model.check_length(*conversation.texts(r.messages))
    harmony = model.format.harmony
    turned = partial(conversation.messages, r.messages, api.limits, harmony=harmony)
    messages = await given.apart(turned)
    variables = conversation.variables(r, offer)
    encode = partial(template.encode, messages, variables=variables, check=model.check_length)
    try:
        ids = await api.prompt(encode)
    except BadFile as e:  # the template renders other conversations, so the client's is to blame
        raise Refusal(400, str(e), param="messages") from None
    return ChatPrompt(ids, offer)


async def begin_chat(
    api: Api, request: Request, given: Posted, r: schema.ChatRequest, model: ServedModel
) -> BegunChat:
    """Give a conversation to the engine. Refuse one that cannot be answered as asked."""
    prompted = await chat_prompt(api, given, r, model)
    ids, offer = prompted.ids, prompted.offer
    template = model.template
    assert template is not None
    stop_ids = await api.prompt(lambda: template.stop_ids)
    thinking = conversation.ends_within_a_thought(model.format.think, model.tokenizer, ids)
    parser = partial(parser_of, model.format, tools=offer.schemas, thinking=thinking)
    marks = parser().stop_marks(model.tokenizer.added)

    def sampling() -> SamplingParams:
        limit = r.max_completion_tokens if r.max_completion_tokens is not None else r.max_tokens
        logprobs = (r.top_logprobs or 0) if r.logprobs else None
        found = schema.sampling_params(r, model.defaults, logprobs=logprobs, max_tokens=limit)
        grammar = answer_grammar(offer, model.format, thinking, found.grammar)
        return replace(found, stop_ids=stop_ids, grammar=grammar, marks=marks)

    params = await given.apart(sampling)
    await api.check_grammar(request, params, [*schema.grammar_fields(r), *["tools"] * offer.asked])
    jobs = api.submit(model, api.prepare(model, ids, params, r.n or 1))
    return BegunChat(model, jobs, partial(parser, free=params.grammar is None), len(ids))
