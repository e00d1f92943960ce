"""Turn a conversation as clients send it into what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from thermocline.server.api import schema
from thermocline.server.api.tools import Offer
from thermocline.server.http.body import check_json
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.refusal import Refusal
from thermocline.text.tokenizer import Tokenizer


def messages(
    given: Sequence[schema.Message], limits: ServerLimits, *, harmony: bool = False
) -> list[dict[str, Any]]:
    """Return the messages for a chat template: contents as text, arguments of calls as objects.

    `harmony`: the template takes a thought or a text before a call, not both.
    """
    calls = (c.function.arguments.encode() for m in given for c in m.tool_calls or ())
    check_json(calls, limits, "messages: arguments of calls")
    found = []
    for m in given:
        made = _given(m)
        if isinstance(m.content, list):
            made["content"] = "".join(map(_part, m.content))
        elif m.content is None:
            made["content"] = ""
        if m.role == "developer":
            made["role"] = "system"
        if m.tool_calls:
            made["tool_calls"] = [_given(c) | {"function": _called(c.function)} for c in m.tool_calls]
        else:
            made.pop("tool_calls", None)  # templates ask whether there is a list, not whether it is empty
        if harmony and m.tool_calls and made["content"]:
            made.pop("reasoning_content", None)
        found.append(made)
    return found


def texts(given: Sequence[schema.Message]) -> Iterator[str]:
    """Yield the texts of all messages."""
    for m in given:
        yield from (p.text or "" for p in m.content) if isinstance(m.content, list) else (m.content or "",)


def _given(fields: schema.ApiObject) -> dict[str, Any]:
    """Return the fields that are set, without copying their values as `model_dump` does."""
    return {name: value for name, value in fields if value is not None}


def _called(function: schema.FunctionCall) -> dict[str, Any]:
    return {"name": function.name, "arguments": _arguments(function.arguments)}


def _part(part: schema.TextPart) -> str:
    if part.type != "text" or part.text is None:
        why = f"a part of type {part.type[:40]!r} is not supported; send text parts only"
        raise Refusal(400, f"messages: {why}", param="messages")
    return part.text


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object, since many templates take it apart and fail at all else.

    A text that is none becomes a part of one, as in the answers of /v1/messages.
    """
    try:
        found = json.loads(text) if text.strip() else None
    except ValueError:
        found = text
    return found if isinstance(found, dict) else {} if found is None else {"arguments": text}


def variables(r: schema.ChatRequest, offer: Offer) -> dict[str, Any]:
    found = dict(r.chat_template_kwargs or {})
    if found.keys() & {"tools", "documents", "chat_template", "tokenize"}:
        raise Refusal(
            400,
            "chat_template_kwargs: tools, documents, chat_template and tokenize are reserved; leave them out",
            param="chat_template_kwargs",
        )
    if r.reasoning_effort is not None:
        most = r.reasoning_effort in ("xhigh", "max")  # templates know no more than high
        found.setdefault("reasoning_effort", "high" if most else r.reasoning_effort)
    if offer.shown:
        found["tools"] = [{"type": "function", "function": _given(f)} for f in offer.shown]
    return found


def ends_within_a_thought(think: tuple[str, str] | None, tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Tell whether the prompt `ids` ends with the mark that opens a thought; `think`: the marks."""
    if think is None:
        return False
    tail = b"".join(map(tokenizer.spelled, ids[-8:])).decode("utf-8", "replace")
    return tail.rstrip().endswith(think[0])
