"""An answer as a row of parts: thoughts, texts and calls, each of which opens, grows and closes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from thermocline.engine.request import Chunk
from thermocline.server.api.answers import Answer, marked_text
from thermocline.server.api.chat import BegunChat
from thermocline.server.api.parsing.answer_parser import Piece
from thermocline.server.api.parsing.call_forms import Call
from thermocline.server.http import sse
from thermocline.server.process.messages import Finished

Event = dict[str, Any]


@dataclass
class AnswerPart:
    """`call` is set if it is a call; a call is whole when it opens. `is_cut`: the answer ended within it."""

    kind: Literal["thought", "text", "call"]
    id: str
    texts: list[str] = field(default_factory=list)
    call: Call | None = None
    is_cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)


class GrowingAnswer(Answer):
    """The events that answer one chat, part by part."""

    prefixes: dict[str, str]  # of the ids of parts, by their kind

    def __init__(self, begun: BegunChat, request: Any) -> None:
        super().__init__(begun.model.name, begun.model.tokenizer, request, 1)
        self.prompt_tokens = begun.prompt_tokens
        self.parts: list[AnswerPart] = []
        self.thought_tokens = 0
        self._parser = begun.parser()
        self._open: AnswerPart | None = None

    def add(self, i: int, chunk: Chunk) -> list[Event]:
        found = self._pieces(self._parser.push(marked_text(self.tokenizer, self._parser, chunk)))
        self.thought_tokens += self._open is not None and self._open.kind == "thought"
        return found

    def end(self, i: int, ended: Finished) -> list[Event]:
        self._ended[i] = ended
        last = self._pieces(self._parser.flush())
        if self._open is not None:
            self._open.is_cut = ended.finish_reason == "length"
        return [*last, *self._close(), *self.finished(ended)]

    def _pieces(self, pieces: Sequence[Piece]) -> list[Event]:
        found: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Call):
                found += [*self._close(), *self._begin("call", piece), *self._close()]
                continue
            kind: Literal["thought", "text"] = "thought" if piece[0] == "reasoning_content" else "text"
            if self._open is None or self._open.kind != kind:
                found += [*self._close(), *self._begin(kind)]
            assert self._open is not None
            self._open.texts.append(piece[1])
            found += self.grown(self._open, piece[1])
        return found

    def _begin(self, kind: Literal["thought", "text", "call"], call: Call | None = None) -> list[Event]:
        id = f"{self.prefixes[kind]}_{self.head.id.rpartition('_')[2]}{len(self.parts):04x}"
        self._open = AnswerPart(kind, id, call=call)
        self.parts.append(self._open)
        return self.opened(self._open)

    def _close(self) -> list[Event]:
        part, self._open = self._open, None
        return [] if part is None else self.closed(part)

    def event(self, body: Event) -> bytes:
        return sse.named_event(body)

    def closing(self) -> bytes:
        return b""

    @property
    def called(self) -> bool:
        return any(part.kind == "call" for part in self.parts)

    @abstractmethod
    def opened(self, part: AnswerPart) -> list[Event]:
        """Return the events that open a part. A call is whole."""

    @abstractmethod
    def grown(self, part: AnswerPart, text: str) -> list[Event]:
        """Return the events for more text of a part."""

    @abstractmethod
    def closed(self, part: AnswerPart) -> list[Event]:
        """Return the events that close a part."""

    @abstractmethod
    def finished(self, ended: Finished) -> list[Event]:
        """Return the events after the last part."""
