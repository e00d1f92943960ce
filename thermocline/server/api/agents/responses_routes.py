"""`/v1/responses`: from a checked body through a chat to OpenAI's response object."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from thermocline.server.api import schema
from thermocline.server.api.agents import responses_input
from thermocline.server.api.agents.kept import KeptResponse, KeptResponses
from thermocline.server.api.agents.renamed import renamed
from thermocline.server.api.agents.responses_answer import ResponseAnswer
from thermocline.server.api.agents.responses_schema import ResponsesRequest
from thermocline.server.api.chat import begin_chat
from thermocline.server.api.responses import InPieces, answered, json_bytes
from thermocline.server.api.state import Api
from thermocline.server.http.posted import posted
from thermocline.server.http.refusal import Refusal


def routes(api: Api) -> list[Route]:
    made = _ResponsesRoutes(api)
    return [
        Route("/v1/responses", made.create, methods=["POST"]),
        Route("/v1/responses/{id}", made.one, methods=["GET", "DELETE"]),
    ]


class _ResponsesRoutes:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._kept = KeptResponses(api.limits.limit_kept_responses, api.limits.limit_kept_bytes)

    async def create(self, request: Request) -> Response:
        api, given, path = self._api, posted(request.scope), request.url.path
        r = await api.body(given, ResponsesRequest, path)
        before = () if r.previous_response_id is None else self._kept.before(r.previous_response_id)
        model = await api.model(request, r.model, stream=r.stream)
        given.grow(sum(map(len, before)))
        if ignored := list(responses_input.ignored(r)):
            api.report_ignored(path, ignored)

        def turned() -> tuple[schema.ChatRequest, tuple[bytes, ...]]:
            said = responses_input.messages(r.input)
            kept = (*before, responses_input.written(said)) if r.store is not False else ()
            told = [m for part in before for m in responses_input.read(part)]
            if len(told) + len(said) > api.limits.limit_messages:
                raise Refusal(400, f"input: at most {api.limits.limit_messages} messages", param="input")
            return responses_input.chat(r, [*told, *said]), kept

        chat, conversation = await given.apart(turned)
        with renamed(responses_input.PARAMS):
            begun = await begin_chat(api, request, given, chat, model)

        def keep(made: dict[str, object], said: schema.Message) -> None:
            last = responses_input.written([said])
            self._kept.keep(str(made["id"]), KeptResponse(json_bytes(made), (*conversation, last)))

        plain = r.model_copy(update={"input": "", "instructions": None, "tools": None})
        answer = ResponseAnswer(begun, plain, None if r.store is False else keep)
        given.done()
        return await answered(begun.jobs, answer, api.limits.limit_ping_s)

    async def one(self, request: Request) -> Response:
        id = request.path_params["id"]
        if request.method == "DELETE":
            self._kept.drop(id)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        return InPieces(self._kept.get(id).body)
