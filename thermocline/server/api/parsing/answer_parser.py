"""Split an answer's text, as it comes, into content, thoughts and calls of functions.

The marks are those that the model's own chat template writes. Text that only looks like a mark stays text.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thermocline.engine.request import overlap
from thermocline.text.grammar import Calls

THINK = ("<think>", "</think>")
CALLS = {  # marks around a call: of Hermes and Qwen, of Mistral
    "<tool_call>": "</tool_call>",
    "[TOOL_CALLS]": None,  # the calls go on to the end
}
BARE = '{"name":'  # Llama 3 writes a call as an answer that is just this object
OTHERS = (
    "<function=",
    "<arg_key>",
    "[ARGS]",
)  # templates with these have the same marks, but their calls are not all JSON
HARMONY = "<|call|>"  # ends a call of gpt-oss
MARKS = (*THINK, *CALLS, *filter(None, CALLS.values()), "<|python_tag|>")


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


Piece = tuple[str, str] | Call  # ("content" or "reasoning_content", text), or a call


class Parts(ABC):
    """A parser of one answer."""

    marks: Sequence[str]  # the special tokens whose names it reads as text

    def __init__(self) -> None:
        self._held = ""
        self.called = False  # a function, so far

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""

    @abstractmethod
    def _step(self, found: list[Piece]) -> bool:
        """Parse up to the next mark. Return False if more text is needed."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a template's answers mark thoughts and calls."""

    thinks: bool
    call: str | None  # a key of CALLS, BARE or HARMONY; None: no calls
    harmony: bool = False  # channels (harmony.py)

    @staticmethod
    def of(template: str) -> AnswerFormat:
        if all(mark in template for mark in ("<|channel|>", "<|message|>", HARMONY)):
            return AnswerFormat(False, HARMONY, True)
        call = next((mark for mark in CALLS if mark in template), None)
        if any(other in template for other in OTHERS):
            call = None
        elif call is None and "tools" in template and '"parameters"' in template:
            call = BARE
        return AnswerFormat(THINK[0] in template or THINK[1] in template, call)

    def calls(self, functions: Sequence[tuple[str, Mapping[str, Any]]], *, several: bool) -> Calls:
        """Return how calls of `functions` are written; each has the JSON schema of its arguments."""
        assert self.call is not None
        functions = tuple(functions)
        if self.call == BARE:  # the call is the whole answer, so there is only one
            return Calls(functions, "", "", "parameters", in_list=False, several=False)
        closes = CALLS[self.call]
        return Calls(functions, self.call, closes or "", "arguments", in_list=closes is None, several=several)


class AnswerParser(Parts):
    """The parser of one answer. `thinking`: the prompt ends within a thought."""

    marks = MARKS

    def __init__(self, format: AnswerFormat, *, tools: bool, thinking: bool) -> None:
        super().__init__()
        self._mark = format.call if tools else None
        self._thinks = format.thinks
        self._state = "think" if thinking else "start"
        self._fresh = True  # no text yet, or none since the last mark

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state in ("call", "bare"):
            return self._calls(held, held if self._state == "bare" else (self._mark or "") + held)
        return [] if self.called and self._is_blank(held) else self._said(held)

    def _said(self, text: str) -> list[Piece]:
        kind = "reasoning_content" if self._state == "think" else "content"
        return [(kind, text)] if text else []

    def _is_blank(self, text: str) -> bool:
        """Tell whether `text` is just space before, between or after calls, which is not content."""
        return self._state == "text" and self._fresh and not text.strip()

    def _step(self, found: list[Piece]) -> bool:
        match self._state:
            case "start":
                return self._start()
            case "think":
                return self._until(THINK[1], "start" if self._mark == BARE else "text", found)
            case "text" if self._mark in CALLS:
                assert self._mark is not None
                return self._until(self._mark, "call", found)
            case "call":
                end = CALLS[self._mark or ""]
                if end is None or end not in self._held:
                    return False
                call, _, self._held = self._held.partition(end)
                found += self._calls(call, (self._mark or "") + call + end)
                self._state = "text"
                return True
            case "text":
                found += self._said(self._held)
                self._held = ""
        return False

    def _start(self) -> bool:
        """Decide how the answer begins: with a thought, with a bare call, or as text."""
        begun = self._held.lstrip()
        if self._thinks and begun.startswith(THINK[0]):
            self._held, self._state = begun.removeprefix(THINK[0]), "think"
            return True
        bare = "".join(begun.removeprefix("<|python_tag|>").split())
        if self._mark == BARE and bare.startswith(BARE):
            self._state = "bare"
            return False
        may_be = [
            *([THINK[0]] if self._thinks else []),
            *([BARE, "<|python_tag|>"] if self._mark == BARE else []),
        ]
        if any(mark.startswith(begun if mark != BARE else bare) for mark in may_be):
            return False
        self._state = "text"
        return True

    def _until(self, mark: str, then: str, found: list[Piece]) -> bool:
        before, met, after = self._held.partition(mark)
        if met:
            found += [] if self._is_blank(before) else self._said(before)
            self._held, self._state, self._fresh = after, then, True
            return True
        keep = len(before) - overlap(before, mark)
        if not self._is_blank(before[:keep]):
            found += self._said(before[:keep])
            self._held, self._fresh = before[keep:], False
        return False

    def _calls(self, text: str, else_: str) -> list[Piece]:
        """Return the calls in `text`; if it has none, return `else_` as content, so that no text is lost."""
        try:
            given = json.loads(text.strip().removeprefix("<|python_tag|>"))
            made = [_call(one) for one in (given if isinstance(given, list) else [given])]
        except (ValueError, KeyError, TypeError, AttributeError):
            return [("content", else_)]
        self.called = self.called or bool(made)
        return list(made)


def _call(given: Any) -> Call:
    arguments = given["arguments"] if "arguments" in given else given["parameters"]
    if not isinstance(given["name"], str):
        raise TypeError
    return Call(given["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))
