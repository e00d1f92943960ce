"""Answers split into text, thoughts and calls, wherever the tokens' borders are."""

from __future__ import annotations

import json

import pytest

from thermocline.server.api.parsing.answer_parser import AnswerFormat, AnswerParser, Parts, Piece
from thermocline.server.api.parsing.call_forms import BARE, Call

HERMES = AnswerFormat.of("{% if tools %}<tool_call>{% endif %}<think>")
MISTRAL = AnswerFormat.of("{{ tools }}[TOOL_CALLS]")
LLAMA = AnswerFormat.of('{% if tools %} {"name": function, "parameters": {}} {% endif %}')
LLAMA_THINKS = AnswerFormat.of('{% if tools %} {"name": function, "parameters": {}} {% endif %}<think>')
PLAIN = AnswerFormat.of("{{ messages }}")
SUM = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def split(
    format: AnswerFormat, text: str, size: int, *, tools: bool = True, thinking: bool = False
) -> list[Piece]:
    return pieces_of(AnswerParser(format, tools={} if tools else None, thinking=thinking), text, size)


def pieces_of(parts: Parts, text: str, size: int) -> list[Piece]:
    """Return what a parser makes of a text in steps of `size`, neighbours of a kind joined."""
    found: list[Piece] = []
    for at in range(0, len(text), size):
        found += parts.push(text[at : at + size])
    joined: list[Piece] = []
    for piece in [*found, *parts.flush()]:
        last = joined[-1] if joined else None
        if isinstance(piece, tuple) and isinstance(last, tuple) and last[0] == piece[0]:
            joined[-1] = (piece[0], last[1] + piece[1])
        else:
            joined.append(piece)
    assert parts.called == any(isinstance(p, Call) for p in joined)
    return joined


def shown(pieces: list[Piece]) -> list[tuple[str, str]]:
    return [(p.name, p.arguments) if isinstance(p, Call) else p for p in pieces]


ARGUMENTS = json.dumps({"a": 1, "b": 2})
CASES = [
    (PLAIN, "Hello <think> [TOOL_CALLS]", [("content", "Hello <think> [TOOL_CALLS]")]),
    (HERMES, "  <think>two\nand two</think>\n\nfour",
     [("reasoning_content", "two\nand two"), ("content", "\n\nfour")]),
    (HERMES, "a <think> in a text", [("content", "a <think> in a text")]),
    (HERMES, f"See:\n<tool_call>\n{SUM}\n</tool_call>", [("content", "See:\n"), ("add", ARGUMENTS)]),
    (HERMES, f"<tool_call>{SUM}</tool_call>\n<tool_call>{SUM}</tool_call>",
     [("add", ARGUMENTS), ("add", ARGUMENTS)]),
    (HERMES, f"<think>a</think>\n\n<tool_call>{SUM}</tool_call>\n",
     [("reasoning_content", "a"), ("add", ARGUMENTS)]),
    (HERMES, f"<tool_call>{SUM}</tool_call>\n so", [("add", ARGUMENTS), ("content", "\n so")]),
    (HERMES, "\n ", [("content", "\n ")]),
    (HERMES, "<tool_call>no JSON</tool_call>!", [("content", "<tool_call>no JSON</tool_call>!")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "1 and 2"}</tool_call>',
     [("content", '<tool_call>{"name": "add", "arguments": "1 and 2"}</tool_call>')]),
    (HERMES, f"<tool_call>{SUM}", [("add", ARGUMENTS)]),
    (HERMES, "1 < 2 <tool", [("content", "1 < 2 <tool")]),
    (MISTRAL, f"[TOOL_CALLS][{SUM}, {SUM}]", [("add", ARGUMENTS), ("add", ARGUMENTS)]),
    (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', [("add", ARGUMENTS)]),
    (LLAMA, ' {\n "name" : 5}', [("content", ' {\n "name" : 5}')]),
    (LLAMA_THINKS, f"<think>a</think>\n{SUM}", [("reasoning_content", "a"), ("add", ARGUMENTS)]),
    (LLAMA, '{"x": 1}', [("content", '{"x": 1}')]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_borders_of_tokens_change_nothing(case: int, size: int) -> None:
    format, text, want = CASES[case]
    assert shown(split(format, text, size)) == want


def test_a_prompt_may_end_within_a_thought() -> None:
    pieces = split(HERMES, "so</think>four", 1, thinking=True)
    assert pieces == [("reasoning_content", "so"), ("content", "four")]
    assert split(HERMES, "cut short", 3, thinking=True) == [("reasoning_content", "cut short")]


def test_without_tools_a_call_is_text() -> None:
    text = f"<tool_call>{SUM}</tool_call>"
    assert split(HERMES, text, 2, tools=False) == [("content", text)]


def test_calls_have_names_of_their_own() -> None:
    a, b = split(MISTRAL, f"[TOOL_CALLS][{SUM}, {SUM}]", 5)
    assert isinstance(a, Call) and isinstance(b, Call) and a.id != b.id and LLAMA.call == BARE
