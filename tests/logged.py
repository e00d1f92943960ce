"""Gathers the lines that the package logs, on threads and in processes that pytest does not see."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def logged(name: str = "thermocline") -> Iterator[list[str]]:
    """Gather what the logger `name` and those below it log meanwhile."""
    logger, lines = logging.getLogger(name), Lines()
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield lines.lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(lines)
