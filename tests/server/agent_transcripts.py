"""Sessions of coding agents as they come over the wire, written by hand: the requests of 20 turns.

An agent sends all of its conversation each turn. The files and the system prompts are made up, as
long as asked for. What the assistant says is the transcript's, whatever the model under test answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

TURNS = 20
FILES = ("store.py", "codec.py", "tests/test_store.py", "README.md")
WORDS = (
    "index", "shard", "merge", "flush", "header", "offset", "record", "cursor", "page", "lock", "queue",
    "reader", "writer", "segment",
)  # fmt: skip
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
EDIT = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "old": {"type": "string"}, "new": {"type": "string"}},
    "required": ["path", "old", "new"],
    "additionalProperties": False,
}
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "timeout_ms": {"type": "number"},
    },
    "required": ["command"],
}


def text(seed: int, size: int) -> str:
    """Return `size` characters of prose that no other seed gives."""
    found = [f"Note {seed}."]
    while sum(map(len, found)) + len(found) < size:
        n = len(found) + 31 * seed
        found.append(f"The {WORDS[n % 14]} of {WORDS[n * 5 % 13]} {n} is at {WORDS[n * 3 % 11]}.")
    return " ".join(found)[:size]


def _turns(size: int) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield for each turn what the assistant says, the tool, its arguments, and the result."""
    for i in range(TURNS):
        path = FILES[i % 4]
        match i % 3:
            case 0:
                yield f"I will read {path}.", "read", {"path": path}, text(i, size)
            case 1:
                arguments = {"path": path, "old": f"x = {i}\n", "new": f'x = {i + 1}  # "größer"\n'}
                yield "", "edit", arguments, "ok"
            case _:
                yield f"Now the tests, {i}.", "shell", {"command": ["pytest", "-q", path]}, f"{i} passed\n"


def codex(system: int, result: int) -> Iterator[dict[str, Any]]:
    """Yield the bodies of /v1/responses, as Codex 0.14x sends them; sizes in characters."""
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "name": name,
            "description": f"Run {name}.",
            "strict": False,
            "parameters": schema,
        }
        for name, schema in (("shell", SHELL), ("read", PATH), ("edit", EDIT))
    ]
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>Ask before you delete.</permissions>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "<environment_context>/w</environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Repair the store."}]},
    ]  # fmt: skip
    for i, (said, name, arguments, out) in enumerate(_turns(result)):
        yield {
            "model": "tiny", "input": [*items],
            "instructions": "You are a coding agent. " + text(900, system),
            "tools": [*tools, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto", "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
            "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199-made-up",
            "client_metadata": {"turn": str(i)},
        }  # fmt: skip
        items.append({"type": "reasoning", "summary": [], "content": None,
                      "encrypted_content": "thermocline:VGhpbms="})  # fmt: skip
        if said:
            items.append({"type": "message", "role": "assistant",
                          "content": [{"type": "output_text", "text": said}]})  # fmt: skip
        items += [
            {
                "type": "function_call",
                "name": name,
                "arguments": json.dumps(arguments),
                "call_id": f"call{i}",
            },
            {"type": "function_call_output", "call_id": f"call{i}", "output": out},
        ]


def claude_code(system: int, result: int) -> Iterator[dict[str, Any]]:
    """Yield the bodies of /v1/messages, as Claude Code 2.1 sends them; sizes in characters.

    The header's hash and the places of `cache_control` differ in each request.
    """
    tools: list[dict[str, Any]] = [
        {"name": name, "description": f"Run {name}.", "input_schema": schema}
        for name, schema in (("shell", SHELL), ("read", PATH), ("edit", EDIT))
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>The day is a Thursday.</system-reminder>"},
            {"type": "text", "text": "Repair the store."}]}]  # fmt: skip
    cached = {"cache_control": {"type": "ephemeral"}}
    for i, (said, name, arguments, out) in enumerate(_turns(result)):
        last = messages[-1]["content"]
        marked = {"role": "user", "content": [*last[:-1], last[-1] | cached]}
        header = f"cc_version=2.1.177.{i:03x}; cc_entrypoint=cli; cch={i * 4099:05x};"
        yield {
            "model": "tiny", "max_tokens": 32000, "stream": True, "temperature": 1, "tools": tools,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: {header}"},
                {"type": "text", "text": "You are a coding agent."},
                {"type": "text", "text": text(900, system)} | cached],
            "messages": [*messages[:-1], marked],
            "thinking": {"type": "enabled", "budget_tokens": 31999}, "metadata": {"user_id": "made up"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }  # fmt: skip
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": "Think", "signature": "thermocline"},
            *([{"type": "text", "text": said}] if said else []),
            {"type": "tool_use", "id": f"toolu_{i}", "name": name, "input": arguments},
        ]
        messages += [
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": out, "is_error": False}]},
        ]  # fmt: skip
