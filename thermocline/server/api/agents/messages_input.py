"""Turn a request of `/v1/messages` into a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from thermocline.server.api import schema
from thermocline.server.api.agents import messages_schema as given
from thermocline.server.api.agents.chat_parts import call, named_tool, tool
from thermocline.server.api.models.served import ServedModel
from thermocline.server.http.refusal import Refusal

PARAMS = {
    "stop": "stop_sequences", "max_completion_tokens": "max_tokens", "response_format": "output_config",
}  # fmt: skip
# Claude Code's first block of `system`. It changes with every request, so no prompt would begin like the last
# one. It is addressed to Anthropic's accounting, not to the model.
_HEADER = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
HEADER = "the block x-anthropic-billing-header of system"
# Variables by which templates turn thoughts on and off, and how a template reads them.
_SWITCHES = (
    ("enable_thinking", r"\benable_thinking\b"),
    ("thinking", r"(?<![\w.])thinking is (?:not )?defined"),
)


def chat(r: given.CountTokensRequest, model: ServedModel) -> schema.ChatRequest:
    """Return the request as a chat with `model`."""
    output = r.output_config or given.OutputConfig.model_construct()
    asked: dict[str, Any] = {}
    if isinstance(r, given.MessagesRequest):
        if isinstance(r.messages[-1], given.AnswerMessage):
            about = "the last one is the assistant's, and answers are not continued; end with a user's"
            raise Refusal(400, f"messages: {about}", param="messages")
        asked = {
            "max_tokens": r.max_tokens, "stop": r.stop_sequences, "temperature": r.temperature,
            "top_p": r.top_p, "top_k": r.top_k, "stream": r.stream,
        }  # fmt: skip
    choice = r.tool_choice
    switch = thinking_switch(model)
    return schema.ChatRequest.model_construct(
        messages=list(_messages(r)),
        response_format=_format(output.format),
        tools=_tools(r.tools),
        tool_choice=_choice(choice),
        parallel_tool_calls=not (isinstance(choice, given.AnyTool) and choice.disable_parallel_tool_use),
        reasoning_effort=output.effort,
        chat_template_kwargs=None
        if r.thinking is None or switch is None
        else {switch: r.thinking.type != "disabled"},
        **asked,
    )


def thinking_switch(model: ServedModel) -> str | None:
    """Return the variable by which the model's template turns thoughts on and off, if it has one."""
    source = "" if model.template is None else model.template.source
    return next((name for name, sign in _SWITCHES if re.search(sign, source)), None)


def _messages(r: given.CountTokensRequest) -> Iterator[schema.Message]:
    if system := _system(r.system):
        yield schema.Message.model_construct(role="system", content=system)
    for m in r.messages:
        if isinstance(m.content, str):
            yield schema.Message.model_construct(role=m.role, content=m.content)
        elif isinstance(m, given.AnswerMessage):
            yield _assistant(m.content)
        else:
            yield from _said(m.role, m.content)


def _system(system: str | Sequence[given.TextBlock] | None) -> str:
    """Return the system prompt, without Claude Code's header; between two blocks there is an empty line."""
    if system is None or isinstance(system, str):
        return system or ""
    return "\n\n".join(b.text for b in system[has_header(system) :])


def has_header(system: str | Sequence[given.TextBlock] | None) -> bool:
    """Tell whether the first block is Claude Code's header and nothing else."""
    if not system or isinstance(system, str):
        return False
    return _HEADER.fullmatch(system[0].text) is not None


def _assistant(blocks: Sequence[given.AnswerBlock]) -> schema.Message:
    texts, thoughts, calls = [], [], []
    for b in blocks:
        match b:
            case given.TextBlock():
                texts.append(b.text)
            case given.ThinkingBlock():
                thoughts.append(b.thinking)
            case given.ToolUseBlock():
                arguments = json.dumps(b.input, ensure_ascii=False)
                calls.append(call(b.id, b.name, arguments))
    return schema.Message.model_construct(
        role="assistant",
        content="".join(texts),
        reasoning_content="".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _said(role: str, blocks: Sequence[given.SaidBlock]) -> Iterator[schema.Message]:
    """Yield a user's message: each result of a tool is one of its own, and texts in a row are one."""
    texts: list[str] = []
    for b in blocks:
        match b:
            case given.TextBlock():
                texts.append(b.text)
            case given.ToolResultBlock():
                if texts:
                    yield schema.Message.model_construct(role=role, content="\n\n".join(texts))
                    texts = []
                yield schema.Message.model_construct(
                    role="tool", content=_result(b.content), tool_call_id=b.tool_use_id
                )
    if texts or not blocks:
        yield schema.Message.model_construct(role=role, content="\n\n".join(texts))


def _result(content: str | Sequence[given.TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n\n".join(b.text for b in content)


def _format(asked: given.OutputSchema | None) -> schema.SchemaFormat | None:
    if asked is None:
        return None
    made = schema.JsonSchema.model_construct(schema_=asked.schema_)
    return schema.SchemaFormat.model_construct(type="json_schema", json_schema=made)


def _tools(asked: Sequence[given.AgentTool] | None) -> list[schema.Tool] | None:
    if asked is None:
        return None
    return [tool(t.name, t.description, t.input_schema, t.strict) for t in asked]


def _choice(asked: Any) -> Any:
    match asked:
        case given.AnyTool(type="any"):
            return "required"
        case given.OneTool():
            return named_tool(asked.name)
        case given.NoTool():
            return "none"
    return None if asked is None else "auto"


def ignored(r: given.CountTokensRequest, model: ServedModel) -> Iterator[str]:
    """Yield the names of what a request has that changes nothing here."""
    if has_header(r.system):
        yield HEADER
    thinks = model.format.think is not None or model.format.harmony
    asked = r.thinking
    if asked is not None and thinking_switch(model) is None and thinks == (asked.type == "disabled"):
        yield f"thinking of type {asked.type}"
    if asked is not None and asked.budget_tokens is not None:
        yield "thinking.budget_tokens"
