"""An answer as a person reads it at a terminal, and as the conversation keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.server.api.parsing.answer_parser import THINK, AnswerFormat, Piece
from thermocline.server.api.parsing.call_forms import Call
from thermocline.server.api.parsing.harmony import parser_of

if TYPE_CHECKING:
    from thermocline.engine.request import Chunk, Completion
    from thermocline.llm import LLM


class Said:
    """An answer as a person reads it.

    Thoughts whose marks are not text are shown between the usual marks, and not kept.
    """

    def __init__(self, llm: LLM) -> None:
        format = AnswerFormat.of(llm.chat_template.source)
        special = format.harmony or format.think not in (None, THINK)  # marks that are no text
        self._parts = parser_of(format, tools=None, thinking=False) if special else None
        self._tokenizer, self._read, self._thinks = llm.tokenizer, 0, False
        self._content: list[str] = []

    @property
    def marks(self) -> dict[int, bool]:
        """`SamplingParams.marks` of such an answer: what is not shown holds no stop string."""
        return {} if self._parts is None else self._parts.stop_marks(self._tokenizer.added)

    def add(self, chunk: Chunk) -> str:
        """Return what is shown of one more token."""
        self._read += len(chunk.text)
        if self._parts is None:
            return chunk.text
        name = self._tokenizer.name(chunk.token_id) if self._tokenizer.is_special(chunk.token_id) else ""
        return self._shown(self._parts.push(chunk.text + (name if name in self._parts.marks else "")))

    def end(self, done: Completion) -> tuple[str, Completion]:
        """Return what else is shown, and the answer as the conversation keeps it."""
        left = done.text[self._read :]  # a token may have come while it was stopped
        if self._parts is None:
            return left, done
        shown = self._shown([*self._parts.push(left), *self._parts.flush()])
        return shown, replace(done, text="".join(self._content))

    def _shown(self, pieces: Sequence[Piece]) -> str:
        shown = ""
        for piece in pieces:
            assert not isinstance(piece, Call), "there are no tools"
            kind, text = piece
            thinks = kind == "reasoning_content"
            if thinks != self._thinks:
                shown += f"{THINK[0]}\n" if thinks else f"\n{THINK[1]}\n\n"
            self._thinks = thinks
            self._content += [] if thinks else [text]
            shown += text
        return shown
