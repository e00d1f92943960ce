"""gpt-oss's answers, in messages with channels, split wherever the tokens' borders are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_server_answer_parser import pieces_of, shown

from thermocline.cli.said import Said
from thermocline.engine.request import Chunk
from thermocline.server.api import conversation, schema
from thermocline.server.api.parsing.answer_parser import AnswerFormat, AnswerParser, Piece
from thermocline.server.api.parsing.harmony import HarmonyParser, parser_of
from thermocline.server.http.limits import ServerLimits

TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>{{ tools }}<|call|>"
THOUGHT = "<|channel|>analysis<|message|>Let me <b>see</b>.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Four."
CALL = "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
ARGUMENTS = '{"a": 1, "b": "<|"}'
CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "a thought and an answer": (
        THOUGHT + FINAL, [("reasoning_content", "Let me <b>see</b>."), ("content", "Four.")]
    ),
    "with its end": (THOUGHT + FINAL + "<|return|>", [("reasoning_content", "Let me <b>see</b>."),
                                                      ("content", "Four.")]),
    "an answer alone": ("<|channel|>final<|message|>1 < 2 <|en", [("content", "1 < 2 <|en")]),
    "a call": (THOUGHT + CALL + ARGUMENTS + "<|call|>", [("reasoning_content", "Let me <b>see</b>."),
                                                         ("add", ARGUMENTS)]),
    "a call without its end": (CALL.removeprefix("<|start|>assistant") + ARGUMENTS, [("add", ARGUMENTS)]),
    "a call that is cut off": (CALL + '{"a": 1, "b', [("content", '{"a": 1, "b')]),
    "a call that is cut off before its arguments": (THOUGHT + CALL, [("reasoning_content",
                                                                      "Let me <b>see</b>.")]),
    "a call named before its channel": (
        f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", [("add", ARGUMENTS)]
    ),
    "a text before a call": (
        f"<|channel|>commentary<|message|>I add.<|end|>{CALL}{ARGUMENTS}<|call|>",
        [("content", "I add."), ("add", ARGUMENTS)],
    ),
    "two calls": (f"{CALL}1<|call|>{CALL}2<|call|>", [("add", "1"), ("add", "2")]),
    "no channel": ("<|message|>Four.<|end|>", [("content", "Four.")]),
    "a thought that is cut off": ("<|channel|>analysis<|message|>Let", [("reasoning_content", "Let")]),
    "a head that is cut off": (THOUGHT + "<|start|>assistant<|chan", [("reasoning_content",
                                                                       "Let me <b>see</b>.")]),
    "nothing": ("", []),
    "what a grammar forced": ('{"a": 1}', [("content", '{"a": 1}')]),
    "a text of other marks": ("<think>no</think>", [("content", "<think>no</think>")]),
}  # fmt: skip


def split(text: str, size: int, *, tools: bool = True) -> list[Piece]:
    parts = parser_of(AnswerFormat.of(TEMPLATE), tools={} if tools else None, thinking=False)
    return pieces_of(parts, text, size)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_borders_of_tokens_change_nothing(case: str, size: int) -> None:
    text, pieces = CASES[case]
    assert shown(split(text, size)) == pieces


def test_without_tools_a_call_is_text() -> None:
    assert shown(split(CALL + ARGUMENTS + "<|call|>", 4, tools=False)) == [("content", ARGUMENTS)]


def test_only_a_template_with_channels_is_harmony() -> None:
    assert AnswerFormat.of(TEMPLATE).harmony and AnswerFormat.of(TEMPLATE).think is None
    phi = AnswerFormat.of("<|user|>{{ content }}<|end|><think>")
    assert not phi.harmony
    parser = parser_of(phi, tools=None, thinking=False)
    assert isinstance(parser, AnswerParser)
    assert "<|end|>" not in parser.marks and "<|end|>" in HarmonyParser.marks


def test_a_thought_or_a_text_before_a_call_goes_back_to_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    said = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "reasoning_content": "Add.", "tool_calls": [call]},
        {"role": "assistant", "content": "I add.", "reasoning_content": "Add.", "tool_calls": [call]},
    ]
    given = schema.ChatRequest.model_validate({"messages": said}).messages
    _, alone, both = conversation.messages(given, ServerLimits(), harmony=True)
    assert alone["reasoning_content"] == "Add." and not {"thinking", "reasoning_content"} & both.keys()
    assert "reasoning_content" in conversation.messages(given, ServerLimits())[2]


def test_at_a_terminal_thoughts_are_shown_and_not_kept() -> None:
    marks = {i: m for i, m in enumerate(HarmonyParser.marks)}
    ids = {m: i for i, m in marks.items()}
    tokenizer = SimpleNamespace(is_special=lambda i: i in marks, name=lambda i: marks[i])
    llm: Any = SimpleNamespace(tokenizer=tokenizer, chat_template=SimpleNamespace(source=TEMPLATE))
    pieces = ["<|channel|>", "analysis", "<|message|>", "Two", " twos.", "<|end|>", "<|start|>", "assistant"]
    pieces += ["<|channel|>", "final", "<|message|>", "Four", ".", "<|return|>"]
    said, seen, text = Said(llm), "", ""
    for piece in pieces:
        own = "" if piece in ids else piece
        text += own
        seen += said.add(Chunk(own, ids.get(piece, 99)))
    done: Any = completion(text)
    left, kept = said.end(done)
    assert seen + left == "<think>\nTwo twos.\n</think>\n\nFour." and kept.text == "Four."


def completion(text: str) -> Any:
    from dataclasses import make_dataclass

    return make_dataclass("Completion", [("text", str)], frozen=True)(text)
