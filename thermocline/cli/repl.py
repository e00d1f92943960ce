"""Read a person's messages: from a terminal with line editing and history, or from the lines of a pipe.

prompt_toolkit takes 60 ms to import, so only a terminal does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from thermocline.errors import BadFile, UsageError

FENCE = '"""'
MAX_LINE_BYTES = 64 << 20
MAX_REMEMBERED = 1 << 16  # characters of one message in the history


class Input(Protocol):
    def line(self, prompt: str) -> str:
        """Return a line. EOFError: the end. KeyboardInterrupt: Ctrl-C where there is nothing to clear."""


def entry(source: Input) -> tuple[str, bool] | None:
    """Return (a message or command, whether it stood between fences and is no command); None at the end."""
    try:
        first = source.line("> ")
    except EOFError:
        return None
    try:
        if first.lstrip().startswith(FENCE):
            return _fenced(source, first.lstrip()[len(FENCE) :]), True
        return _continued(source, first), False
    except EOFError:
        raise UsageError(f"the input ends inside a message: its {FENCE} or last line is missing") from None


def _fenced(source: Input, rest: str) -> str:
    lines = [rest]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(source.line(". "))
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def _continued(source: Input, text: str) -> str:
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{source.line('. ')}"
    return text


class Lines:
    """A pipe or file, which gets no prompt."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def line(self, prompt: str) -> str:
        data = self._stream.readline(MAX_LINE_BYTES + 1)
        if not data:
            raise EOFError
        if len(data) > MAX_LINE_BYTES:
            raise UsageError(f"stdin: a line of more than {MAX_LINE_BYTES >> 20} MiB")
        try:
            return data.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise BadFile(f"stdin: not UTF-8 text: {e.reason}") from None


class Terminal:
    """A line editor. Alt-Enter begins a new line, pasted text keeps its own; Ctrl-C clears a line first."""

    def __init__(self, history: Path, warn: Callable[[str], None]) -> None:
        # Asking the terminal where its cursor is leaves the answer in the input where nobody waits for it.
        os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(
            history=_history(history, warn), key_bindings=_keys()
        )

    def line(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("c-c")
    def _(event: Any) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path, warn: Callable[[str], None]) -> Any:
    """Return the history: on disk, for its owner's eyes; in memory where that cannot be."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            if len(string) <= MAX_REMEMBERED:
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
    except OSError as e:
        warn(f"{path}: {e.strerror}; what you type is forgotten at the end")
        return InMemoryHistory()
    return History(str(path))


def is_terminal() -> bool:
    return all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))
