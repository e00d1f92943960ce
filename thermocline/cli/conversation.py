"""A conversation as a person has it: messages, commands that begin with a slash, saving and loading.

Each turn sends the whole conversation; the engine finds what it has already computed. Nothing is forgotten
in silence: a conversation that no longer fits is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.table import table
from thermocline.errors import BadFile, UsageError
from thermocline.files.bounded import parse_json, quoted, read_small
from thermocline.files.whole import replacing

if TYPE_CHECKING:
    from thermocline.engine.request import Completion
    from thermocline.engine.sampler import SamplingParams
    from thermocline.llm import LLM, Stream

MAX_FILE_BYTES = 64 << 20
MAX_SEED = 2**64
# Prints an answer as it comes; what there is of it by Ctrl-C. None: interrupted before there was an answer.
Speak = Callable[[Callable[[], "Stream"]], "Completion | None"]
HELP = (
    ("/regen", "another answer to the last message"),
    ("/clear", "forget the conversation, but for the system prompt"),
    ("/system TEXT", "tell the model something before the first message; without TEXT, nothing"),
    ("/read FILE", "put a text file before your next message"),
    ("/save FILE", "write the conversation to a file (JSON)"),
    ("/load FILE", "go on with a saved one"),
    ("/exit", "leave; so does Ctrl-D, or Ctrl-C twice"),
    ('"""', "begins and ends a message of several lines; a \\ at a line's end continues it too"),
    ("Ctrl-C", "stops an answer; what there is of it stays"),
)


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    ids: tuple[int, ...] = ()  # the answer's, as generated; none where its text is not exactly theirs


class Conversation:
    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        speak: Speak,
        show: Callable[[str], None],
        *,
        system: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin without a turn. `show` displays what is not the model's, such as figures."""
        self.llm, self.params, self.system, self.variables = llm, params, system, variables
        self._speak, self._show = speak, show
        self.turns: list[Turn] = []
        self._unanswered: str | None = None  # interrupted before the first token
        self._read: list[str] = []

    def take(self, text: str, literal: bool = False) -> bool:
        """Take a message, or (unless `literal`) a command. False: the person is done."""
        if text.startswith("/") and not literal:
            name, _, rest = text.partition(" ")
            return self._command(name.strip(), rest.strip())
        if text.strip():
            self._answer(self.turns, "\n\n".join([*self._read, text]))
            self._read = []
        return True

    def regenerate(self) -> None:
        """Answer the last message again, with the next seed where one was given."""
        if self.params.seed is not None:
            self.params = replace(self.params, seed=(self.params.seed + 1) % MAX_SEED)
        if self._unanswered is not None:
            self._answer(self.turns, self._unanswered)
        elif self.turns:
            self._answer(self.turns[:-1], self.turns[-1].question)
        else:
            raise UsageError("nothing to regenerate yet")

    def clear(self) -> None:
        self.turns, self._unanswered, self._read = [], None, []

    def save(self, path: Path) -> None:
        if path.exists():
            load(path)  # what is not a conversation is not written over
        text = json.dumps({"messages": self._messages(self.turns)}, ensure_ascii=False, indent=1) + "\n"
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")

    def load(self, path: Path) -> None:
        system, turns = load(path)
        self.clear()
        self.system, self.turns = system, turns

    # -- one turn

    def _messages(self, turns: list[Turn], question: str | None = None) -> list[dict[str, Any]]:
        said = [] if self.system is None else [("system", self.system)]
        for turn in turns:
            said += [("user", turn.question), ("assistant", turn.answer)]
        if question is not None:
            said.append(("user", question))
        return [{"role": role, "content": text} for role, text in said]

    def _answer(self, before: list[Turn], question: str) -> None:
        messages = self._messages(before, question)
        first = len(messages) - 2 * len(before)  # where the first answer is
        known = {first + 2 * i: turn.ids for i, turn in enumerate(before) if turn.ids}
        try:
            done = self._speak(
                lambda: self.llm.stream_chat(messages, self.params, variables=self.variables, token_ids=known)
            )
        except UsageError as e:
            raise self._full(messages) or e from None
        if done is None:
            self.turns, self._unanswered = before, question
            self._show("interrupted; /regen asks again")
            return
        self.turns = [*before, Turn(question, done.text, self._ids_of(done))]
        self._unanswered = None
        self._show(figures_line(done))
        used = done.figures.prompt_tokens + done.figures.tokens
        if done.finish_reason == "length" and used > self.llm.context:
            self._show(f"the context of {self.llm.context} tokens is full: {self._way_out()}")

    def _ids_of(self, done: Completion) -> tuple[int, ...]:
        ends = {*self.llm.spec.eos_ids, *self.llm.chat_template.stop_ids}
        ids = tuple(done.token_ids)
        if done.finish_reason == "stop" and ids[-1] in ends:
            ids = ids[:-1]
        return ids if self.llm.tokenizer.decode(ids) == done.text else ()

    def _full(self, messages: list[dict[str, Any]]) -> UsageError | None:
        """Return the error of a conversation that is too long; None if it is not."""
        try:
            tokens = len(self.llm.chat_template.encode(messages, variables=self.variables))
        except UsageError:
            return None
        if tokens <= self.llm.context:
            return None
        return UsageError(
            f"with this message the conversation has {tokens} tokens, the context holds {self.llm.context}: "
            f"{self._way_out()}"
        )

    def _way_out(self) -> str:
        limit = self.llm.spec.max_context
        more = f", `-c N` at the start makes room for up to {limit}" if limit > self.llm.context else ""
        return f"/clear begins a new conversation{more}"

    # -- commands

    def _command(self, name: str, rest: str) -> bool:
        match name:
            case "/exit" | "/quit" | "/bye":
                return False
            case "/help" | "/?":
                self._show(table(HELP).rstrip("\n"))
            case "/regen":
                self.regenerate()
            case "/clear":
                self.clear()
                self._show("a new conversation")
            case "/system":
                self.system = rest or None
                self._show("the system prompt is set" if rest else "no system prompt")
            case "/read" | "/save" | "/load":
                self._with_file(name, _path(name, rest))
            case _:
                raise UsageError(f"{name} is no command; /help lists them (a space before it makes it text)")
        return True

    def _with_file(self, name: str, path: Path) -> None:
        match name:
            case "/read":
                self._read.append(text_of(path))
                self._show(f"{len(self._read[-1])} characters go before your next message")
            case "/save":
                self.save(path)
                self._show(f"saved to {path}")
            case "/load":
                self.load(path)
                turns = len(self.turns)
                self._show(f"{turns} turn{'s' * (turns != 1)}")


def _path(command: str, text: str) -> Path:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text:
        raise UsageError(f"{command} needs the name of a file")
    return Path(text).expanduser()


def text_of(path: Path) -> str:
    try:
        return read_small(path, MAX_FILE_BYTES).decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as e:
        raise BadFile(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from None


def load(path: Path) -> tuple[str | None, list[Turn]]:
    """Read a saved conversation: perhaps a system prompt, then questions and answers in turn."""
    found = parse_json(read_small(path, MAX_FILE_BYTES), str(path)).get("messages")
    if not isinstance(found, list):
        raise BadFile(f"{path}: not a saved conversation: it has no list of messages")
    for m in found:
        if not isinstance(m, dict) or m.keys() != {"role", "content"} or not isinstance(m["content"], str):
            raise BadFile(f"{path}: {quoted(m)} is not a message with a role and a text")
    system = found.pop(0)["content"] if found and found[0]["role"] == "system" else None
    if [m["role"] for m in found] != ["user", "assistant"] * (len(found) // 2):
        raise BadFile(f"{path}: its messages are not those of a user and an assistant in turn")
    texts = [m["content"] for m in found]
    return system, [Turn(q, a) for q, a in zip(texts[::2], texts[1::2], strict=True)]


def figures_line(done: Completion) -> str:
    """Return one turn's figures for a person."""
    f = done.figures
    parts = [f"{f.tokens} token{'s' * (f.tokens != 1)}"]
    if done.finish_reason == "cancelled":
        parts.append("stopped")
    if f.tokens_per_s:
        parts.append(f"{f.tokens_per_s:.1f} tok/s")
    speed = f", {f.prompt_tokens_per_s:.0f} tok/s" if f.prompt_tokens_per_s else ""
    parts.append(f"prompt {f.prompt_tokens} ({f.cached_tokens} known{speed})")
    return " · ".join(parts)
