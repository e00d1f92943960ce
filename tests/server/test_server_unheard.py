"""A server whose stderr takes nothing any more: its reader has ended, or the disk is full. It goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from thermocline.cli.console import log_lines, unfailing

if sys.platform == "win32":
    pytest.skip("needs UNIX sockets and signals", allow_module_level=True)

DEADLINE_S = 60.0


def pipe() -> tuple[int, Callable[[], None]]:
    reading, writing = os.pipe()
    return writing, lambda: os.close(reading)


def full_disk() -> tuple[int, Callable[[], None]]:
    return os.open("/dev/full", os.O_WRONLY), lambda: None


@contextlib.contextmanager
def serving(socket: Path, stderr: int) -> Iterator[tuple[httpx2.Client, int]]:
    """(a client, the server's process id), of `thermocline serve` with the bundled model."""
    command = [sys.executable, "-P", "-m", "thermocline", "serve", "--socket", str(socket)]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--gpu", "off", "--limit-silence-s", "1", "--access-log"],
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    os.close(stderr)
    transport = httpx2.HTTPTransport(uds=str(socket))
    try:
        with httpx2.Client(base_url="http://localhost", transport=transport, timeout=DEADLINE_S) as client:
            yield client, process.pid
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def engine_of(pid: int) -> int | None:
    """The child that computes, if there is one: not the tracker that multiprocessing starts."""
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "spawn_main"], capture_output=True, text=True)
    return int(found.stdout.split()[0]) if found.stdout.split() else None


def answers(client: httpx2.Client, **more: Any) -> int:
    body = {"prompt": "Once upon a time", "max_tokens": 2} | more
    return int(client.post("/v1/completions", json=body).status_code)


@pytest.mark.slow
@pytest.mark.parametrize("stderr", [pipe, full_disk])
def test_a_server_that_nobody_hears_starts_its_engine_again(
    tmp_path: Path, stderr: Callable[[], tuple[int, Callable[[], None]]]
) -> None:
    """Telling came before acting, and raised: a killed engine stayed dead, a wedged one was never ended."""

    def ready() -> bool:
        try:
            return bool(client.get("/health").json()["ready"])
        except httpx2.TransportError:  # its socket is not there yet
            return False

    writing, close = stderr()
    with serving(tmp_path / "s", writing) as (client, pid):
        until(ready)
        close()
        assert answers(client, no_such_field=1) == 200, "that it is ignored cannot be told"
        for sig in (signal.SIGKILL, signal.SIGSTOP):
            before = engine_of(pid)
            assert before is not None
            os.kill(before, sig)
            old = (None, before)
            until(lambda old=old: engine_of(pid) not in old and ready())  # type: ignore[misc]
            assert answers(client) == 200
        assert "thermocline_engine_restarts_total 2.0" in client.get("/metrics").text


def test_without_a_stderr_notes_do_not_end_up_among_the_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`2>&-`: print's file=None is stdout."""
    monkeypatch.setattr(sys, "stderr", None)
    with log_lines():
        logging.getLogger("thermocline.cli").error("for a person")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("error", [BrokenPipeError("no reader"), ValueError("I/O on a closed file")])
def test_only_what_a_dead_stream_raises_is_left_untold(error: Exception) -> None:
    def tell(line: str) -> None:
        raise error if line == "dead" else KeyError(line)

    unfailing(tell)("dead")
    with pytest.raises(KeyError):
        unfailing(tell)("a bug")
