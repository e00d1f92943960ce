"""`/v1/messages` and `/v1/messages/count_tokens`: through a chat to Anthropic's message."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from thermocline.server.api import schema
from thermocline.server.api.agents import messages_input
from thermocline.server.api.agents.messages_answer import MessageAnswer
from thermocline.server.api.agents.messages_schema import CountTokensRequest, MessagesRequest
from thermocline.server.api.agents.renamed import renamed
from thermocline.server.api.chat import begin_chat, chat_prompt
from thermocline.server.api.responses import answered
from thermocline.server.api.state import Api
from thermocline.server.http.posted import posted


def routes(api: Api) -> list[Route]:
    made = _MessagesRoutes(api)
    return [
        Route("/v1/messages", made.create, methods=["POST"]),
        Route("/v1/messages/count_tokens", made.count_tokens, methods=["POST"]),
    ]


class _MessagesRoutes:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def create(self, request: Request) -> Response:
        api, given, path = self._api, posted(request.scope), request.url.path
        r = await api.body(given, MessagesRequest, path)
        model = await api.model(request, r.model, stream=r.stream)
        if ignored := list(messages_input.ignored(r, model)):
            api.report_ignored(path, ignored)
        chat = await given.apart(lambda: messages_input.chat(r, model))
        with renamed(messages_input.PARAMS):
            begun = await begin_chat(api, request, given, chat, model)
        given.done()
        answer = MessageAnswer(begun, schema.settings(chat))
        return await answered(begun.jobs, answer, api.limits.limit_ping_s)

    async def count_tokens(self, request: Request) -> Response:
        api, given = self._api, posted(request.scope)
        r = await api.body(given, CountTokensRequest, request.url.path)
        model = await api.model(request, r.model)
        chat = await given.apart(lambda: messages_input.chat(r, model))
        with renamed(messages_input.PARAMS):
            prompted = await chat_prompt(api, given, chat, model)
        return JSONResponse({"input_tokens": len(prompted.ids)})
