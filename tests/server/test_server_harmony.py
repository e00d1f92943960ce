"""gpt-oss's answers, in messages with channels, split wherever the tokens' borders are."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from fill_marks import marked
from scripted import scripted
from test_server_answer_parser import pieces_of, shown
from toy import SPEC, WEIGHTS, Letters

from thermocline.cli.said import Said
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.request import Chunk
from thermocline.engine.sampler import Sampler, SamplingParams
from thermocline.ops import reference
from thermocline.server.api import conversation, schema
from thermocline.server.api.answers import marked_text
from thermocline.server.api.parsing.answer_parser import AnswerFormat, AnswerParser, Piece
from thermocline.server.api.parsing.harmony import HarmonyParser, parser_of
from thermocline.server.http.limits import ServerLimits
from thermocline.text.tokenizer_process import Added

TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>{{ tools }}<|call|>"
SHOWN = TEMPLATE.replace("{{ tools }}", "{{ messages[0].content }}")
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
    tokenizer = SimpleNamespace(is_special=lambda i: i in marks, name=lambda i: marks[i], added=Marked.added)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, chat_template=SimpleNamespace(source=TEMPLATE))
    pieces = ["<|channel|>", "analysis", "<|message|>", "Two", " twos.", "<|end|>", "<|start|>", "assistant"]
    pieces += ["<|channel|>", "final", "<|message|>", "Four", ".", "<|return|>"]
    said, seen, text = Said(llm), "", ""
    assert said.marks == {i: mark == "<|message|>" for i, mark in marks.items()}
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


# ---- stop strings


class Marked(Letters):
    """A tokenizer whose first tokens are harmony's marks, which add no text."""

    added = tuple(
        Added(i, mark, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
        for i, mark in enumerate(HarmonyParser.marks)
    )

    def is_special(self, token: int) -> bool:
        return token < len(self.added)

    def token_bytes(self, token: int) -> bytes:
        return b"" if self.is_special(token) else super().token_bytes(token)

    def name(self, token: int) -> str:
        return self.added[token].content


def tokens(text: str) -> list[int]:
    marks = HarmonyParser.marks
    split = re.split(f"({'|'.join(map(re.escape, marks))})", text)
    return [i for t in split for i in ([marks.index(t)] if t in marks else Letters().encode(t)[1:])]


@pytest.mark.parametrize(
    ("stop", "reason", "pieces"),
    [
        ("analysis", "length", [("reasoning_content", "let_me_see,"), ("content", "a_final_word")]),
        ("assistant", "length", [("reasoning_content", "let_me_see,"), ("content", "a_final_word")]),
        ("final", "stop", [("reasoning_content", "let_me_see,"), ("content", "a_")]),
        ("_see", "stop", [("reasoning_content", "let_me")]),
        (",assistant", "length", [("reasoning_content", "let_me_see,"), ("content", "a_final_word")]),
        (",x", "length", [("reasoning_content", "let_me_see,"), ("content", "a_final_word")]),
        ("words", "length", [("reasoning_content", "let_me_see,"), ("content", "a_final_word")]),
    ],
)
def test_a_stop_string_is_looked_for_in_what_is_shown(
    stop: str, reason: str, pieces: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's words ended answers, and what was held back at a mark went into the head behind it."""
    head, tokenizer = "<|start|>assistant<|channel|>final<|message|>", Marked()
    answer = tokens(f"<|channel|>analysis<|message|>let_me_see,<|end|>{head}a_final_word")
    script = iter(answer)
    monkeypatch.setattr(Sampler, "sample", lambda *_: next(script))
    parser = HarmonyParser(tools=False)
    marks = parser.stop_marks(tokenizer.added)
    engine = Engine(SPEC, WEIGHTS, reference, EngineSettings(context=256), tokenizer=cast("Any", tokenizer))
    params = SamplingParams(temperature=0, max_tokens=len(answer), stop=(stop,), marks=marks)
    request = engine.submit([50], params)
    while engine.step():
        pass
    text = "".join(marked_text(cast("Any", tokenizer), parser, chunk) for chunk in request.chunks)
    assert (request.finish_reason, shown(pieces_of(parser, text, 1))) == (reason, pieces)


def test_chats_and_no_other_requests_have_marks(tmp_path: Path) -> None:
    names = [mark for mark in HarmonyParser.marks if mark != "<|call|>"]  # one is text there
    with scripted(template=SHOWN, files=marked(tmp_path, names, special=True)) as made:
        made.engine.answer = ["<|message|>Four."]
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "2 + 2?"}]}),
            ("completions", {"prompt": "2 + 2 ="}),
        ):
            got = httpx2.post(f"{made.url}/v1/{path}", json=body, timeout=60)
            assert got.status_code == 200, got.text
        named = {t.content: t.id for t in made.model.tokenizer.added}
        chat, completion = (params.marks for params in made.engine.asked)
    assert chat == {named[m]: m == "<|message|>" for m in names} and completion == {}
