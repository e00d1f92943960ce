"""A confined process has nothing to tell, nowhere to send it, and costs who asks one error at most."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from thermocline.text.confined_process import ConfinedProcess, ProcessEnded

ALL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
WORKER = """
import ctypes, errno, os, resource, signal, socket, subprocess, threading, time
from thermocline.text.confinement import Bounds, serve

def failed(what):
    try:
        what()
    except OSError as e:
        return errno.errorcode[e.errno]
    except RuntimeError as e:
        return "no thread"
    return "done"

HERE = os.getpid()
ASKS = {
    "environment": lambda: repr(dict(os.environ)),
    "open": lambda: failed(lambda: open("/etc/passwd")),
    "write": lambda: failed(lambda: open("/tmp/confined", "w")),
    "socket": lambda: failed(socket.socket),
    "pipe": lambda: failed(os.pipe),
    "fork": lambda: failed(os.fork),
    "exec": lambda: failed(lambda: os.execv("/bin/true", ["true"])),
    "thread": lambda: failed(lambda: threading.Thread(target=int).start()),
    "kill": lambda: failed(lambda: os.kill(os.getppid(), 0)),
    "others' limits": lambda: failed(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))),
    "privileges": lambda: failed(lambda: os.setuid(0)),
    "unlink": lambda: failed(lambda: os.unlink("/tmp/confined")),
    "raise a limit": lambda: failed(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))),
    "limits": lambda: repr([resource.getrlimit(getattr(resource, "RLIMIT_" + n)) for n in
                            ("CORE", "FSIZE", "NOFILE", "NPROC")]),
    "memory": lambda: repr(len(bytearray(64 << 20))),
    "loop": lambda: [0 for _ in iter(int, 1)],
    "sleep": lambda: time.sleep(600),
    "abort": os.abort,
    "overflow": lambda: ctypes.string_at(0),
    "pid": lambda: str(HERE),
}

def answer(request):
    try:
        return str(ASKS[request.decode()]()).encode()
    except MemoryError:
        return b"MemoryError"

def main():
    memory = {b"memory": 48 << 20}
    serve(answer, lambda request: Bounds(0.2, memory.get(request, 1 << 30)), most_bytes=1 << 30)
"""


@pytest.fixture
def confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfinedProcess]:
    (tmp_path / "prober.py").write_text(WORKER)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("THERMOCLINE_API_KEY", "secret")
    made = ConfinedProcess("prober", [str(tmp_path)])
    yield made
    made.close()


def ask(confined: ConfinedProcess, what: str) -> str:
    return confined.ask(what.encode()).decode()


# ---- what it knows, and what it can do


def test_it_inherits_nothing_of_the_environment(confined: ConfinedProcess) -> None:
    """A stranger's template could write a token of the hub's into an answer."""
    assert "secret" not in ask(confined, "environment")
    process = confined._process
    assert process is not None
    if sys.platform == "linux":
        assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()


@pytest.mark.skipif(not ALL, reason="no seccomp here, or no table of this machine's system calls")
@pytest.mark.parametrize(
    "what",
    ["open", "write", "socket", "pipe", "fork", "exec", "kill", "others' limits", "privileges", "unlink"],
)
def test_the_kernel_refuses_what_a_worker_does_not_need(confined: ConfinedProcess, what: str) -> None:
    assert ask(confined, what) == "EPERM"


@pytest.mark.skipif(not ALL, reason="no seccomp here, or no table of this machine's system calls")
def test_it_starts_no_thread_and_gains_no_privileges(confined: ConfinedProcess) -> None:
    assert ask(confined, "thread") == "no thread"
    process = confined._process
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert "NoNewPrivs:\t1\n" in status and "Seccomp:\t2\n" in status


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
def test_its_limits_are_hard(confined: ConfinedProcess) -> None:
    assert ask(confined, "limits") == repr([(0, 0)] * 4)
    assert ask(confined, "memory") == "MemoryError"


# ---- what it costs whoever asks


@pytest.mark.skipif(sys.platform == "win32", reason="no timer of processor time, other signals")
@pytest.mark.parametrize(
    ("what", "why"),
    [("loop", "takes too long"), ("abort", "takes too much memory"), ("overflow", "nested too deeply")],
)
def test_a_request_that_ends_the_process_costs_itself_alone(
    confined: ConfinedProcess, what: str, why: str
) -> None:
    first = ask(confined, "pid")
    with pytest.raises(ProcessEnded, match=why):
        ask(confined, what)
    assert ask(confined, "pid") != first, "another process serves the next request"


def test_a_process_that_stands_still_is_ended(confined: ConfinedProcess) -> None:
    """A sleeping process takes no processor time: the clock is ours."""
    with pytest.raises(ProcessEnded, match="takes too long"):
        confined.ask(b"sleep", 0.1)
    assert ask(confined, "pid")


def test_requests_of_many_threads_each_have_their_own_answer(confined: ConfinedProcess) -> None:
    expected = {what: ask(confined, what) for what in ("pid", "limits", "environment")}
    with ThreadPoolExecutor(8) as pool:
        asked = list(expected) * 100
        assert list(pool.map(lambda what: ask(confined, what), asked)) == [expected[what] for what in asked]


def test_the_first_request_is_sent_to_each_process(tmp_path: Path, confined: ConfinedProcess) -> None:
    begun: list[bytes] = []
    again = ConfinedProcess("prober", [str(tmp_path)], lambda first: begun.append(first(b"pid")))
    for _ in range(2):
        assert again.ask(b"pid") == again.ask(b"pid") == begun[-1]
        again.close()
    assert len(begun) == 2
