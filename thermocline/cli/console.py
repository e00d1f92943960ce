"""What a command shows and when it stops: data on stdout, everything else on stderr, progress, Ctrl-C.

Must not know models or options.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, ParamSpec, Self

from thermocline.cli import report
from thermocline.errors import IOFailure

P = ParamSpec("P")
INTERRUPTED = 130  # 128 + SIGINT, as shells say it
VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\t\n"}  # U+2400: pictures of control characters


def emit(text: str) -> None:
    """Data, at once. A terminal is shown control characters, not made to obey them: models write anything."""
    if sys.stdout is None:
        raise IOFailure("standard output is closed")
    if sys.stdout.isatty():
        text = text.translate(VISIBLE)
    sys.stdout.write(text)
    sys.stdout.flush()


def emit_json(value: dict[str, Any]) -> None:
    """ASCII, so that it is JSON in every locale; what is not finite is null."""
    emit(json.dumps(report.finite(value)) + "\n")


def note(text: str) -> None:
    """Everything that is not data: one line on stderr."""
    if sys.stderr is None:
        return
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    print(f"thermocline: {line}", file=sys.stderr, flush=True)


def unfailing(tell: Callable[P, None]) -> Callable[P, None]:
    """Make `tell` safe for a server, which outlives its stderr: a pipe without a reader, a full disk.

    A dead stream raises OSError, a closed one ValueError. There is nobody left to report either to.
    """

    def told(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.suppress(OSError, ValueError):
            tell(*args, **kwargs)

    return told


class Progress:
    """A bar on stderr where that is a terminal and the work takes longer than a moment; nothing elsewhere."""

    PATIENCE_S = 0.5

    def __init__(self, *, quiet: bool) -> None:
        self._live = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._what = ""
        self._bar: Any = None

    def at(self, what: str, done: int, total: int, unit: str = "B") -> None:
        """`done` of `total` bytes (or other units) of `what`, such as "packing"."""
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
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        if done >= total:
            self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def remark(text: str) -> None:
    """What is neither the model's nor an error, for a person: dim where stderr is a terminal."""
    if sys.stderr is None:
        return
    dim = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    lines = "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in t) for t in text.split("\n"))
    print(f"\x1b[2m{lines}\x1b[0m" if dim else lines, file=sys.stderr, flush=True)


class CtrlC:
    """Before the first token Ctrl-C stops at once. After it, the first lets a token that is there be shown;
    one that is still being computed, perhaps by a slow disk, is given up. The second waits for nothing.
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
