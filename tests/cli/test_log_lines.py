"""Each record of the package's log is a line on stderr: whole, and clear of the progress bar."""

from __future__ import annotations

import io
import itertools
import logging
import subprocess
import sys
import time

import pytest

from thermocline.cli import console

log = logging.getLogger("thermocline.cli.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, *, quiet: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    with console.log_lines() as lines:
        lines.quiet = quiet
        log.debug("for developers")
        log.info("a fact\nof two lines")
        log.warning("a warning")
        log.error("an error")
        logging.getLogger(console.ACCESS_LOG).info("GET /")
    log.error("afterwards nobody listens")
    return stderr.getvalue()


def test_each_record_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = "thermocline: a fact\\nof two lines\nthermocline: a warning\n"
    rest = "thermocline: an error\nthermocline: GET /\n"
    assert shown(monkeypatch) == facts + rest
    assert shown(monkeypatch, quiet=True) == rest, "--access-log is asked for beside --quiet"


def test_a_line_does_not_tear_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0, 1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    with console.log_lines(), console.ProgressBar(quiet=False) as progress:
        progress.at("packing", 0, 4)
        progress.at("packing", 1, 4)
        log.info("a fact")
    before, _, after = stderr.getvalue().partition("thermocline: a fact\n")
    assert before.endswith("\r") and not before.split("\r")[-2].strip(), "the bar's line is blank by then"
    assert "packing" in before and "packing" in after


def test_the_library_is_silent_until_a_program_asks_for_its_lines() -> None:
    code = "import logging, thermocline; logging.getLogger('thermocline.llm').warning('a line')"
    asked = code.replace("thermocline;", "thermocline; logging.basicConfig(format='%(message)s');")
    run = [sys.executable, "-c"]
    assert subprocess.run([*run, code], capture_output=True, check=True).stderr == b""
    assert subprocess.run([*run, asked], capture_output=True, check=True).stderr == b"a line\n"
