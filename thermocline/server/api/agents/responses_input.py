"""Turn a request of `/v1/responses` into a chat."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

from thermocline.server.api import schema
from thermocline.server.api.agents import responses_schema as given
from thermocline.server.api.agents.chat_parts import call, named_tool, tool
from thermocline.server.http.refusal import Refusal

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"  # of `include`
_MOST_INCLUDED = 20  # named in a line of the log
_OURS = "thermocline:"  # a thought of this server as clients send it back
PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


def sealed(thought: str) -> str:
    """Return a thought as `encrypted_content`. It is not secret: it only has to come back as it was."""
    return _OURS + base64.b64encode(thought.encode("utf-8", "surrogatepass")).decode()


def _unsealed(text: str) -> str:
    try:
        if text.startswith(_OURS):
            return base64.b64decode(text.removeprefix(_OURS), validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        pass
    raise Refusal(
        400, "input: the encrypted_content of a reasoning item is not this server's; leave the item out",
        param="input"
    )  # fmt: skip


def messages(items: str | Sequence[given.Item]) -> list[schema.Message]:
    """Return the messages of a request's input: a thought, a text and calls in a row are one of them."""
    if isinstance(items, str):
        return [schema.Message.model_construct(role="user", content=items)]
    found: list[schema.Message] = []
    answer: dict[str, Any] = {}  # the fields of the assistant's message that grows
    for item in items:
        if not _joins(item, answer):
            found += _assistant(answer)
            answer = {}
        match item:
            case given.ReasoningItem():
                answer["reasoning_content"] = _thought(item)
            case given.CallItem():
                made = call(item.call_id, item.name, item.arguments)
                answer.setdefault("tool_calls", []).append(made)
            case given.MessageItem(role="assistant"):
                answer["content"] = _text(item.content)
            case given.MessageItem():
                found.append(schema.Message.model_construct(role=item.role, content=_text(item.content)))
            case given.CallOutputItem():
                found.append(
                    schema.Message.model_construct(
                        role="tool", content=_text(item.output), tool_call_id=item.call_id
                    )
                )
    return [*found, *_assistant(answer)]


def _joins(item: given.Item, answer: dict[str, Any]) -> bool:
    """Tell whether an item goes on with the assistant's message."""
    match item:
        case given.MessageItem(role="assistant"):
            return "content" not in answer and "tool_calls" not in answer
        case given.CallItem():
            return True
    return False


def _assistant(answer: dict[str, Any]) -> list[schema.Message]:
    return [schema.Message.model_construct(role="assistant", **answer)] if answer else []


def _thought(item: given.ReasoningItem) -> str:
    if item.content is not None:
        return "".join(part.text for part in item.content)
    return "" if item.encrypted_content is None else _unsealed(item.encrypted_content)


def _text(content: str | Sequence[given.ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(map(_part, content))


def _part(part: given.ItemPart) -> str:
    if part.type not in ("input_text", "output_text") or part.text is None:
        why = f"a part of type {part.type[:40]!r} is not supported; send text parts only"
        raise Refusal(400, f"input: {why}", param="input")
    return part.text


def chat(r: given.ResponsesRequest, conversation: Sequence[schema.Message]) -> schema.ChatRequest:
    """Return the request as a chat. `conversation`: what is kept of it, and its input."""
    if LOGPROBS in (r.include or ()):
        raise Refusal(400, f"include: {LOGPROBS} is not supported; ask /v1/chat/completions", param="include")
    config = r.reasoning or given.ReasoningConfig.model_construct()
    text = r.text or given.TextConfig.model_construct()
    return schema.ChatRequest.model_construct(
        messages=_one_system(r.instructions, conversation),
        temperature=r.temperature,
        top_p=r.top_p,
        max_tokens=r.max_output_tokens,
        response_format=_format(text.format),
        tools=_tools(r.tools),
        tool_choice=_choice(r.tool_choice),
        parallel_tool_calls=r.parallel_tool_calls,
        reasoning_effort=config.effort,
        stream=r.stream,
    )


def _one_system(instructions: str | None, conversation: Sequence[schema.Message]) -> list[schema.Message]:
    """Return the messages with the instructions and the system's first ones joined to one message.

    Codex sends instructions and a developer's message, and many templates take one system message, the first.
    """
    n = next((i for i, m in enumerate(conversation) if m.role not in ("system", "developer")), None)
    first = conversation[:n]
    texts = [*([instructions] if instructions else []), *(str(m.content or "") for m in first)]
    if not texts:
        return list(conversation)
    system = schema.Message.model_construct(role="system", content="\n\n".join(texts))
    return [system, *conversation[len(first) :]]


def _format(asked: Any) -> schema.AnyFormat | schema.SchemaFormat | None:
    if isinstance(asked, given.NamedSchema):
        made = schema.JsonSchema.model_construct(name=asked.name, schema_=asked.schema_)
        return schema.SchemaFormat.model_construct(type="json_schema", json_schema=made)
    found: schema.AnyFormat | None = asked
    return found


def _tools(asked: Sequence[given.ResponsesTool] | None) -> list[schema.Tool] | None:
    if asked is None:
        return None
    return [
        tool(t.name, t.description, t.parameters, t.strict)
        for t in asked
        if isinstance(t, given.FunctionTool)
    ]


def _choice(asked: Any) -> Any:
    match asked:
        case given.ToolName():
            return named_tool(asked.name)
        case given.AllowedToolNames():
            named = [named_tool(t.name) for t in asked.tools]
            allowed = schema.Allowed.model_construct(mode=asked.mode, tools=named)
            return schema.AllowedTools.model_construct(type="allowed_tools", allowed_tools=allowed)
    return asked


def ignored(r: given.ResponsesRequest) -> Iterator[str]:
    """Yield the names of what a request has that changes nothing here."""
    for kind in sorted({t.type for t in r.tools or () if isinstance(t, given.OtherTool)}):
        yield f"tools of type {kind}"
    if r.text is not None and r.text.verbosity is not None:
        yield "text.verbosity"
    if r.reasoning is not None and r.reasoning.summary is not None:
        yield "reasoning.summary"
    for name in sorted({*(r.include or ())} - {ENCRYPTED})[:_MOST_INCLUDED]:
        yield f"include of {name[:64]}"


# ---- conversations that are kept


def written(conversation: Sequence[schema.Message]) -> bytes:
    """Return messages as JSON, to be kept."""
    kept = [m.model_dump(exclude_none=True) for m in conversation]
    return json.dumps(kept, ensure_ascii=True, separators=(",", ":")).encode()


def read(kept: bytes) -> list[schema.Message]:
    """Return the messages that `written` wrote."""
    return [schema.Message.model_validate(m) for m in json.loads(kept)]
