"""`/openapi.json` and `/docs`, made from the request models, so that they cannot differ."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from thermocline import __version__
from thermocline.server.api import schema
from thermocline.server.api.agents.messages_schema import CountTokensRequest, MessagesRequest
from thermocline.server.api.agents.responses_schema import ResponsesRequest
from thermocline.server.api.vectors.schema import EmbeddingsRequest, RerankRequest
from thermocline.server.http.limits import ServerLimits

EVENTS = "text/event-stream"
REF = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}

MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    about: str
    request: type[BaseModel] | None = None
    answer: str = "application/json"
    streams: bool = False
    open: bool = False  # without a key
    error: str = "Error"


OPERATIONS = (
    Operation("get", "/health", "Whether it answers: 200, or 503 while it loads or is stuck.", open=True),
    Operation("get", "/v1/health", "The same.", open=True),
    Operation("get", "/v1/models", "The models, with their states and sizes."),
    Operation("get", "/v1/models/{model}", "One of them by its name."),
    Operation("post", "/v1/chat/completions", "Answer a conversation.", schema.ChatRequest, streams=True),
    Operation("post", "/v1/completions", "Continue a text.", schema.CompletionRequest, streams=True),
    Operation("post", "/infill", "Fill in the middle of a text.", schema.InfillRequest, streams=True),
    Operation("post", "/v1/embeddings", "Vectors of texts.", EmbeddingsRequest),
    Operation("post", "/v1/rerank", "Documents by their relevance to a query.", RerankRequest),
    Operation(
        "post", "/v1/responses", "Answer items, as OpenAI's Responses.", ResponsesRequest, streams=True
    ),
    Operation("get", "/v1/responses/{id}", "A response that is kept in memory."),
    Operation("delete", "/v1/responses/{id}", "Forget it."),
    Operation(
        "post",
        "/v1/messages",
        "Answer a conversation, as Anthropic's Messages.",
        MessagesRequest,
        streams=True,
        error="MessagesError",
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "The number of tokens that it would have.",
        CountTokensRequest,
        error="MessagesError",
    ),
    Operation("post", "/tokenize", "Text to token ids.", schema.TokenizeRequest),
    Operation("post", "/detokenize", "Token ids to text.", schema.DetokenizeRequest),
    Operation("get", "/props", "Context, slots, the sampling that requests get by default."),
    Operation("get", "/activity", "What the layers do while tokens are made.", answer=EVENTS),
    Operation(
        "post",
        "/benchmark",
        "Measure what bounds this machine, while no answer is computed: 4 s.",
        schema.BenchmarkRequest,
    ),
    Operation("get", "/metrics", "Prometheus text.", answer="text/plain"),
)
# The lists of agents' APIs that have a limit, and its name.
_PARTS = "limit_messages"
_LISTS_OF_AGENTS = {
    "ResponsesRequest": {"input": _PARTS, "include": _PARTS, "tools": "limit_tools"},
    "MessageItem": {"content": _PARTS}, "CallOutputItem": {"output": _PARTS},
    "ReasoningItem": {"content": _PARTS}, "AllowedToolNames": {"tools": "limit_tools"},
    "CountTokensRequest": {"messages": _PARTS, "system": _PARTS, "tools": "limit_tools"},
    "MessagesRequest": {"messages": _PARTS, "system": _PARTS, "tools": "limit_tools"},
    "SaidMessage": {"content": _PARTS}, "AnswerMessage": {"content": _PARTS},
    "ToolResultBlock": {"content": _PARTS},
    "ContextManagement": {"edits": _PARTS},
}  # fmt: skip
STATUSES = {
    "400": "the request is wrong", "401": "no key, or a wrong one", "403": "not from there",
    "404": "no such model or response", "405": "another method", "409": "answers are computed",
    "413": "the body is too long",
    "415": "not application/json", "422": "the engine crashes at it", "408": "the body came too slowly",
    "429": "too many wait", "431": "too long headers", "499": "the client has left",
    "500": "the engine failed", "503": "not ready yet, or not now", "504": "it took too long",
}  # fmt: skip


def routes(keys: bool, limits: ServerLimits, vocabulary: Callable[[], int | None]) -> list[Route]:
    """`vocabulary` returns the number of tokens, or None before the model is known."""

    async def described(request: Request) -> Response:
        return JSONResponse(document(keys, limits, vocabulary()))

    async def docs(request: Request) -> Response:
        return HTMLResponse(page())

    return [Route("/openapi.json", described, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


def document(keys: bool, limits: ServerLimits, vocabulary: int | None) -> dict[str, Any]:
    """Return the API as OpenAPI 3.1. `keys`: a key is needed. `vocabulary`: the number of tokens."""
    models = [(o.request, "validation") for o in OPERATIONS if o.request is not None]
    _, definitions = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    _bound(definitions["$defs"], limits, vocabulary)
    paths: dict[str, Any] = {}
    for o in OPERATIONS:
        paths.setdefault(o.path, {})[o.method] = _operation(o, keys)
    components: dict[str, Any] = {
        "schemas": {**definitions["$defs"], "Error": ERROR, "MessagesError": MESSAGES_ERROR}
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Thermocline", "version": __version__},
        "paths": paths,
        "components": components,
    }


def _bound(kinds: dict[str, Any], limits: ServerLimits, vocabulary: int | None) -> None:
    """Add the server's limits. A keyword does not apply to values of other types, such as null."""
    if vocabulary is not None:
        kinds["Id"]["maximum"] = vocabulary - 1
    stop = {"minLength": 1, "maxLength": limits.limit_stop_bytes}
    for kind in ("ChatRequest", "CompletionRequest", "InfillRequest"):
        field = kinds[kind]["properties"]
        field["n"]["maximum"] = limits.limit_n
        field["stop"] |= stop | {"maxItems": limits.limit_stop, "items": stop}
        field["logit_bias"]["maxProperties"] = limits.limit_logit_bias
    kinds["InfillRequest"]["properties"]["input_extra"]["maxItems"] = limits.limit_messages
    chat = kinds["ChatRequest"]["properties"]
    chat["chat_template_kwargs"]["maxProperties"] = limits.limit_template_variables
    chat["messages"]["maxItems"] = limits.limit_messages
    chat["tools"]["maxItems"] = kinds["Allowed"]["properties"]["tools"]["maxItems"] = limits.limit_tools
    for field in ("content", "tool_calls"):
        kinds["Message"]["properties"][field]["maxItems"] = limits.limit_messages
    kinds["DetokenizeRequest"]["properties"]["tokens"]["maxItems"] = limits.limit_detokenize
    chat["top_logprobs"]["maximum"] = limits.limit_top_logprobs
    completion = kinds["CompletionRequest"]["properties"]
    completion["logprobs"]["maximum"] = limits.limit_top_logprobs
    kinds["RerankRequest"]["properties"]["documents"]["maxItems"] = limits.limit_inputs
    inputs = kinds["EmbeddingsRequest"]["properties"]["input"]
    for field, most in ((completion["prompt"], limits.limit_choices), (inputs, limits.limit_inputs)):
        for way in field["anyOf"]:
            if way.get("items", {}).get("type") in ("string", "array"):
                way["maxItems"] = most
    for kind, names in _LISTS_OF_AGENTS.items():
        for name, limit in names.items():
            kinds[kind]["properties"][name]["maxItems"] = getattr(limits, limit)
    kinds["MessagesRequest"]["properties"]["stop_sequences"] |= {"maxItems": limits.limit_stop, "items": stop}


def _operation(o: Operation, keys: bool) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": REF.format(model=o.error)}}}
    content: dict[str, Any] = {o.answer: {"schema": {"type": "object" if "json" in o.answer else "string"}}}
    if o.streams or o.answer == EVENTS:
        content[EVENTS] = {}  # no schema: OpenAPI 3.1 cannot describe a single event
    responses = {"200": {"description": "the answer", "content": content}}
    responses |= {code: {"description": about, "content": error} for code, about in STATUSES.items()}
    id = re.sub(r"[/{}]+", "_", o.path).strip("_")
    made: dict[str, Any] = {
        "summary": o.about, "operationId": f"delete_{id}" if o.method == "delete" else id
    }  # fmt: skip
    made["responses"] = responses
    if names := re.findall(r"{(.+?)}", o.path):
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if o.request is not None:
        body = {"schema": {"$ref": REF.format(model=o.request.__name__)}}
        made["requestBody"] = {"required": True, "content": {"application/json": body}}
    if keys and not o.open:
        made["security"] = [{"key": []}]
    return made


def page() -> str:
    """Return a page for people: every route with its fields. No script, nothing from other sites."""
    parts = []
    for o in OPERATIONS:
        parts.append(f"<h2><code>{o.method.upper()} {o.path}</code></h2><p>{html.escape(o.about)}</p>")
        if o.request is not None:
            parts.append(_fields(o.request))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Thermocline: the API</title>'
        '<link rel="stylesheet" href="/page/style.css"></head><body class="docs"><h1>The API</h1>'
        '<p>OpenAI\'s shapes; for machines: <a href="/openapi.json">openapi.json</a>.</p>'
        f"{''.join(parts)}</body></html>"
    )


def _kind(annotation: Any) -> str:
    """Return a field's type in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return " | ".join(map(json.dumps, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(_kind, parts))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_kind, parts))}]"
    return "null" if annotation is type(None) else str(annotation.__name__)


def _fields(model: type[BaseModel]) -> str:
    rows = []
    for name, f in model.model_fields.items():
        limits = ", ".join(
            f"{key} {getattr(m, key)}" for m in f.metadata for key in ("ge", "gt", "le") if hasattr(m, key)
        )
        about = "; ".join(filter(None, (f.description, limits)))
        cells = (f.alias or name, _kind(f.annotation), about)
        rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    return f"<table><thead><tr><th>field<th>type<th></thead><tbody>{''.join(rows)}</tbody></table>"
