"""What tests of `/v1/responses` and `/v1/messages` share: a template that shows all it gets, and tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
from scripted import Scripted

# Each message as its role, its thought, its text and its calls, so that a prompt tells what it was made of.
SHOWN = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{% endfor %}{% endfor %}"
    "{% if tools %}{tools: {% for t in tools %}{{ t.function.name }} {% endfor %}}{% endif %}"
    "{% if enable_thinking is defined %}{thinking: {{ enable_thinking }}}{% endif %}"
    "{% if reasoning_effort %}{effort: {{ reasoning_effort }}}{% endif %}"
    "{# <tool_call> <think> #}"
)
PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"],
}  # fmt: skip
CALL = '<tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>'


def prompt(puppet: Scripted) -> str:
    """Return the last prompt as text."""
    return puppet.model.tokenizer.decode(puppet.engine.prompts[-1])


def first_stream(ask: Callable[[], httpx2.Response]) -> str:
    """Return the first answer that is a stream: a busy machine uses up a request's time before it begins."""
    answers = (ask() for _ in range(20))
    return next(a.text for a in answers if a.headers["content-type"].startswith("text/event-stream"))


def sent_events(text: str) -> Iterator[dict[str, Any]]:
    """Yield a stream's events. Each is named by its type."""
    parts = text.split("\n\n")
    assert parts.pop() == ""
    for part in parts:
        name, _, data = part.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event
