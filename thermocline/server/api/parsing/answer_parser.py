"""Split an answer's text, as it comes, into content, thoughts and calls of functions.

The marks are those that the model's own chat template writes. Text that only looks like a mark stays text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thermocline.engine.request import overlap
from thermocline.server.api.parsing.call_forms import BARE, Call, CallForm, Schemas, form_of
from thermocline.text.grammar import Calls, CallText, Thought
from thermocline.text.tokenizer_process import Added

THINK = ("<think>", "</think>")
# The marks around a thought, by what a template has: Gemma 4's, Cohere's, Seed's, and everybody else's.
THOUGHTS = (
    ("<|channel>thought", ("<|channel>thought", "<channel|>")),
    ("<|START_THINKING|>", ("<|START_THINKING|>", "<|END_THINKING|>")),
    ("<seed:think>", ("<seed:think>", "</seed:think>")),
    (THINK[0], THINK),
    (THINK[1], THINK),
)
BEGINS = '{"name":'  # a call that is the whole answer
# In harmony, a thought and where the next message begins, an answer, and a call.
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
FINAL = "<|channel|>final<|message|>"
HARMONY = CallText("<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments")

Piece = tuple[str, str] | Call  # ("content" or "reasoning_content", text), or a call


class Parts(ABC):
    """A parser of one answer."""

    marks: Sequence[str]  # the special tokens whose names it reads as text
    hiding: Sequence[str] = ()  # those of them behind which nothing is shown, up to the next one

    def __init__(self) -> None:
        self._held = ""
        self.called = False  # a function, so far

    def push(self, text: str) -> list[Piece]:
        self._held += text
        found: list[Piece] = []
        while self._step(found):
            pass
        return found

    def stop_marks(self, added: Sequence[Added]) -> dict[int, bool]:
        """Return `SamplingParams.marks` out of a tokenizer's tokens: the marks that are no text."""
        read = (t for t in added if t.special and t.content in self.marks)
        return {t.id: t.content not in self.hiding for t in read}

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""

    @abstractmethod
    def _step(self, found: list[Piece]) -> bool:
        """Parse up to the next mark. Return False if more text is needed."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a template's answers mark thoughts and calls."""

    think: tuple[str, str] | None  # the marks around a thought
    call: CallForm | None
    harmony: bool = False  # channels, some of which are thoughts and calls (harmony.py)

    @staticmethod
    def of(template: str) -> AnswerFormat:
        if all(mark in template for mark in ("<|channel|>", "<|message|>", "<|call|>")):
            return AnswerFormat(None, None, True)
        think = next((marks for sign, marks in THOUGHTS if sign in template), None)
        return AnswerFormat(think, form_of(template))

    @property
    def calls_known(self) -> bool:
        return self.harmony or self.call is not None

    def calls(self, functions: Sequence[tuple[str, Mapping[str, Any]]], *, several: bool) -> Calls:
        """Return how calls of `functions` are written; each has the JSON schema of its arguments."""
        if self.harmony:
            return Calls(tuple(functions), "", "", HARMONY, several=False, before_text=FINAL)
        form = self.call
        assert form is not None
        several = several and bool(form.opens)  # a call that is the whole answer is the only one
        return Calls(tuple(functions), form.opens, form.closes or "", form.written, several)

    def thought(self, *, begun: bool) -> Thought | None:
        """Return the thought that may come before an answer. `begun`: the prompt ends within it."""
        if self.harmony:
            return Thought(*ANALYSIS, begun=begun)
        return None if self.think is None else Thought(*self.think, begun=begun)


class AnswerParser(Parts):
    """The parser of one answer. `thinking`: the prompt ends within a thought."""

    def __init__(
        self, format: AnswerFormat, *, tools: Schemas | None, thinking: bool, free: bool = True
    ) -> None:
        """Make a parser. `tools`: the functions that the model is shown; None: calls are text.

        `free`: no grammar made the answer, so a call may lack the mark that opens it.
        """
        super().__init__()
        self._form, self._tools = format.call if tools is not None else None, tools or {}
        self._think = format.think
        form = format.call  # its marks are shown as text where there are no tools
        names = () if form is None else (form.opens, form.closes, *form.marks)
        self.marks = tuple(filter(None, (*THINK, *_tokens(format.think), *names)))
        self._begins = () if self._form is None else self._form.begins(self._tools if free else ())
        self._begun = ""  # how the present call begins, one of these
        self._state = "think" if thinking else "start"
        self._fresh = True  # no text yet, or none since the last mark

    def flush(self) -> list[Piece]:
        held, self._held = self._held, ""
        form = self._form
        if form is not None and self._state in ("call", "bare"):
            whole = self._begun + held
            return [("content", whole)] if form.needs_close else self._calls(form, held, whole)
        self._state = "text" if self._state == "after" else self._state
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
                assert self._think is not None
                if not self._until((self._think[1],), found):
                    return False
                self._state = "start" if self._form is BARE else "text"
                return True
            case "text" if self._form is not None and self._form.opens:
                self._begun = self._until(self._begins, found)
                self._state = "call" if self._begun else "text"
                return bool(self._begun)
            case "call":
                assert self._form is not None
                return self._call(self._form, found)
            case "after":
                assert self._form is not None and self._form.closes is not None
                return self._after(self._form.closes)
            case "text":
                found += self._said(self._held)
                self._held = ""
        return False

    def _start(self) -> bool:
        """Decide how the answer begins: with a thought, with a bare call, or as text."""
        begun, opens = self._held.lstrip(), self._think[0] if self._think else None
        if opens is not None and begun.startswith(opens):
            self._held, self._state = begun.removeprefix(opens), "think"
            return True
        bare = "".join(begun.removeprefix("<|python_tag|>").split())
        if self._form is BARE and bare.startswith(BEGINS):
            self._state = "bare"
            return False
        may_be = [
            *([opens] if opens else []),
            *([BEGINS, "<|python_tag|>"] if self._form is BARE else []),
        ]
        if any(mark.startswith(begun if mark != BEGINS else bare) for mark in may_be):
            return False
        self._state = "text"
        return True

    def _until(self, marks: Sequence[str], found: list[Piece]) -> str:
        """Parse up to the first of the marks, and return it; "" if none is there yet."""
        at, mark = min(((at, m) for m in marks if (at := self._held.find(m)) >= 0), default=(0, ""))
        if mark:
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            found += [] if self._is_blank(before) else self._said(before)
            self._fresh = True
            return mark
        keep = len(self._held) - max(overlap(self._held, m) for m in marks)
        if not self._is_blank(self._held[:keep]):
            found += self._said(self._held[:keep])
            self._held, self._fresh = self._held[keep:], False
        return ""

    def _call(self, form: CallForm, found: list[Piece]) -> bool:
        opened = self._begun == form.opens
        closes = form.closes if opened or form.unopened is None else form.unopened[1]
        if closes is None or closes not in self._held:
            return False
        call, _, self._held = self._held.partition(closes)
        whole = self._begun + call + closes
        found += self._calls(form, call if opened else whole, whole)
        self._state = "text" if opened else "after"
        return True

    def _after(self, closes: str) -> bool:
        """Drop the mark that closes a call which nothing opened, if that is what follows."""
        rest = self._held.lstrip()
        if rest.startswith(closes):
            self._held = rest.removeprefix(closes)
        elif closes.startswith(rest):
            return False
        self._state = "text"
        return True

    def _calls(self, form: CallForm, text: str, else_: str) -> list[Piece]:
        """Return the calls in `text`; if it has none, return `else_` as content, so that no text is lost."""
        try:
            made = form.read(text, self._tools)
        except ValueError:
            return [("content", else_)]
        self.called = self.called or bool(made)
        return list(made)


def _tokens(think: tuple[str, str] | None) -> tuple[str, ...]:
    """Return the special tokens that may be in the marks of a thought: Gemma's is followed by a word."""
    return () if think is None else (*think, think[0].removesuffix("thought"))
