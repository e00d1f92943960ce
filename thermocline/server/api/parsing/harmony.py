"""Answers in harmony, gpt-oss's form: messages of an answer, each with a channel, some to a function.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    … <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

The analysis channel is thought. Others are content, unless they are to a function.
"""

from __future__ import annotations

import contextlib
import re

from thermocline.engine.request import overlap
from thermocline.server.api.parsing.answer_parser import AnswerFormat, AnswerParser, Parts, Piece
from thermocline.server.api.parsing.call_forms import Call, Schemas, json_object

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINNINGS = ("<|channel|>", "<|start|>", "<|constrain|>", _MESSAGE, "to=")
_CHANNEL, _TO = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=([^\s<]+)")


def parser_of(format: AnswerFormat, *, tools: Schemas | None, thinking: bool, free: bool = True) -> Parts:
    """Return the parser of one answer. `thinking`: the prompt ends within a thought.

    `tools`: the functions that the model is shown; None: calls are text. `free`: no grammar made the answer.
    """
    if format.harmony:
        return HarmonyParser(tools=tools is not None)
    return AnswerParser(format, tools=tools, thinking=thinking, free=free)


class HarmonyParser(Parts):
    """The parser of one answer; the prompt ends where the first message's channel begins."""

    hiding = (*_ENDS, "<|channel|>", "<|constrain|>")  # a head is behind each, up to the message
    marks = (*hiding, _MESSAGE)

    def __init__(self, *, tools: bool) -> None:
        super().__init__()
        self._tools = tools
        self._body: str | None = None  # what a message is: a kind of text, or "to NAME"; None: in a head
        self._first = True

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._body is None:  # a head without a message: text, if nothing came before it
            return [("content", held)] if held and self._first else []
        if self._body.startswith("to "):
            with contextlib.suppress(ValueError):
                return self._said(json_object(held), whole=True)
            self._body = "content"  # the answer was cut off within the call
        return self._said(held, whole=True)

    def _step(self, found: list[Piece]) -> bool:
        return self._head(found) if self._body is None else self._message(found)

    def _head(self, found: list[Piece]) -> bool:
        head, met, rest = self._held.partition(_MESSAGE)
        if not met:
            begun = head.lstrip()
            if self._first and begun and not any(b.startswith(begun[: len(b)]) for b in _BEGINNINGS):
                self._body = "content"  # not harmony: a grammar's answer
                return True
            return False
        channel, to = _CHANNEL.search(head), _TO.search(head)
        self._body = "reasoning_content" if channel is not None and channel[1] == "analysis" else "content"
        if to is not None and self._tools:
            self._body = f"to {to[1].removeprefix('functions.')}"
        self._held, self._first = rest, False
        return True

    def _message(self, found: list[Piece]) -> bool:
        ends = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        if ends:
            at, mark = min(ends)
            found += self._said(self._held[:at], whole=True)
            self._held, self._body, self._first = self._held[at + len(mark) :], None, False
            return bool(self._held)
        keep = max(overlap(self._held, mark) for mark in _ENDS)
        if keep < len(self._held) and not str(self._body).startswith("to "):
            found += self._said(self._held[: len(self._held) - keep], whole=False)
            self._held = self._held[len(self._held) - keep :]
        return False

    def _said(self, text: str, *, whole: bool) -> list[Piece]:
        kind = str(self._body)
        if kind.startswith("to ") and whole:
            self.called = True
            return [Call(kind.removeprefix("to "), text.strip())]
        return [(kind, text)] if text else []
