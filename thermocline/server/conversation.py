"""A conversation as its client sends it, as chat templates take it. Must not know routes or the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from thermocline.server import schema
from thermocline.server.body import check_json
from thermocline.server.limits import Limits
from thermocline.server.parts import THINK
from thermocline.server.refusal import Refusal
from thermocline.server.tools import Offer
from thermocline.tokenizer import Tokenizer


def messages(given: Sequence[schema.Message], limits: Limits) -> list[dict[str, Any]]:
    """As chat templates have them: texts, and arguments of calls as objects."""
    calls = (c.function.arguments.encode() for m in given for c in m.tool_calls or ())
    check_json(calls, limits, "messages: arguments of calls")
    found = []
    for m in given:
        made = m.model_dump(exclude_none=True)
        if isinstance(m.content, list):
            made["content"] = "".join(map(_part, m.content))
        elif m.content is None:
            made["content"] = ""
        if m.role == "developer":
            made["role"] = "system"
        for call in made.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        found.append(made)
    return found


def _part(part: schema.TextPart) -> str:
    if part.type != "text" or part.text is None:
        raise Refusal(400, f"messages: a part of type {part.type[:40]!r}; only text is understood here",
                       param="messages")  # fmt: skip
    return part.text


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def variables(r: schema.ChatRequest, offer: Offer) -> dict[str, Any]:
    found = dict(r.chat_template_kwargs or {})
    if found.keys() & {"tools", "documents", "chat_template", "tokenize"}:
        raise Refusal(
            400, "chat_template_kwargs: variables of the template alone", param="chat_template_kwargs"
        )
    if r.reasoning_effort is not None:
        found.setdefault("reasoning_effort", r.reasoning_effort)
    if offer.shown:
        functions = (f.model_dump(exclude_none=True) for f in offer.shown)
        found["tools"] = [{"type": "function", "function": f} for f in functions]
    return found


def ends_within_a_thought(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """`ids`: the prompt's."""
    tail = b"".join(map(tokenizer.spelled, ids[-8:])).decode("utf-8", "replace")
    return tail.rstrip().endswith(THINK[0])
