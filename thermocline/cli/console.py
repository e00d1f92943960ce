"""Data on stdout, log lines and progress on stderr, and Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, ClassVar, ParamSpec, Self

from thermocline.cli.table import finite
from thermocline.errors import IOFailure

P = ParamSpec("P")
ACCESS_LOG = "thermocline.access"
INTERRUPTED = 130  # 128 + SIGINT, as shells say it
VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"}  # U+2400: pictures of control characters


def emit(text: str) -> None:
    """Write data, at once. A terminal shows control characters, which models may write, and does not obey."""
    if sys.stdout is None:
        raise IOFailure("standard output is closed")
    if sys.stdout.isatty():
        text = text.translate(VISIBLE)
    sys.stdout.write(text)
    sys.stdout.flush()


def emit_json(value: dict[str, Any]) -> None:
    """Write an object as ASCII, so that it is JSON in every locale; a number that is not finite is null."""
    emit(json.dumps(finite(value)) + "\n")


def stdin_bytes() -> BinaryIO:
    if sys.stdin is None:
        raise IOFailure("standard input is closed")
    return sys.stdin.buffer


def unfailing(show: Callable[P, None]) -> Callable[P, None]:
    """Make `show` safe for a server, which outlives its stderr: a pipe without a reader, a full disk.

    A dead stream raises OSError, a closed one ValueError. There is nobody left to report either to.
    """

    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.suppress(OSError, ValueError):
            show(*args, **kwargs)

    return shown


def _on_one_line(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class LogLines(logging.Handler):
    """A handler that writes each log record as one line on stderr. A dead stderr ends no command."""

    def __init__(self) -> None:
        super().__init__()
        self.quiet = False  # show errors alone, and the access log, which has an option of its own

    def filter(self, record: logging.LogRecord) -> bool:
        asked = not self.quiet or record.levelno >= logging.ERROR or record.name == ACCESS_LOG
        return asked and bool(super().filter(record))

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:
            return
        line = f"thermocline: {_on_one_line(record.getMessage())}"
        unfailing(ProgressBar.write_above)(line)


@contextlib.contextmanager
def log_lines() -> Iterator[LogLines]:
    """Show on stderr what the package logs meanwhile."""
    ours, lines = logging.getLogger("thermocline"), LogLines()
    before = ours.level
    ours.addHandler(lines)
    ours.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        ours.setLevel(before)
        ours.removeHandler(lines)


class ProgressBar:
    """A bar on stderr where that is a terminal and the work takes longer than a moment; nothing elsewhere."""

    PATIENCE_S = 0.5
    _on_screen: ClassVar[Any] = None

    def __init__(self, *, quiet: bool) -> None:
        self._live = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._what = ""
        self._bar: Any = None

    def at(self, what: str, done: int, total: int, unit: str = "B") -> None:
        """Show `done` of `total` bytes (or other units) of `what`, such as "packing"."""
        if not self._live:
            return
        if what != self._what:
            self._close()
            self._what, self._since = what, time.perf_counter()
        if self._bar is None and done < total and time.perf_counter() - self._since > self.PATIENCE_S:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=what, total=total, unit=unit, unit_scale=unit == "B", unit_divisor=1024, leave=False
            )
            ProgressBar._on_screen = self._bar
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = ProgressBar._on_screen = None

    @classmethod
    def write_above(cls, line: str) -> None:
        """Write a line on stderr; a bar that stands there makes way, and comes back below it."""
        if (bar := cls._on_screen) is not None:
            bar.clear()
        print(line, file=sys.stderr, flush=True)
        if bar is not None:
            bar.refresh()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def show_dim(text: str) -> None:
    """Write to stderr for a person who chats: dim on a terminal, to stand back behind the answers."""
    if sys.stderr is None:
        return
    dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    lines = "\n".join(map(_on_one_line, text.split("\n")))
    print(f"\x1b[2m{lines}\x1b[0m" if dim else lines, file=sys.stderr, flush=True)


class CtrlC:
    """Ctrl-C while an answer is generated. Before the first token it stops at once. After it, the first
    Ctrl-C still shows a token that is there, and gives up one that is being computed, perhaps by a slow
    disk. The second waits for nothing.
    """

    def __init__(self) -> None:
        self.asked = self.patient = False
        self.computing: Callable[[], bool] = lambda: False  # is what runs a step, which may be given up?

    def __enter__(self) -> Self:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # a background job of a shell ignores it
            signal.signal(signal.SIGINT, self._on)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on(self, *_: object) -> None:
        first, self.asked = not self.asked, True
        if not (first and self.patient) or self.computing():
            raise KeyboardInterrupt
