"""A process that runs untrusted programs: started at the first use, reused, and killed if it hangs.

It has a minimal environment, no terminal, and no file but two pipes. `confinement.py` sets its limits from
within.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from thermocline.text.confinement import LENGTH

# The process limits its own processor time. This limit is for a process that waits, or has no timer. It is
# counted in slices, so that a pause of the whole system (a closed lid, Ctrl-Z) counts as one slice.
SLICE_S = 0.1
WAIT_S = 10.0 if hasattr(signal, "setitimer") else 0.8
KILLED = 9  # SIGKILL, which Windows does not name
DYING_S = 1.0  # time for the system to report how a process ended
KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "SYSTEMROOT", "TZ")
WORKERS = Path(__file__).parents[2]  # the directory of the package

Ask = Callable[[bytes], bytes]
_Asked = SimpleQueue[tuple[threading.Event, int] | None]


class ProcessEnded(Exception):
    """The process ended before it answered. The message says why, as the end of a sentence with "it".

    `killed`: by the clock, the system or a person, so that another try may succeed.
    """

    def __init__(self, why: str, *, killed: bool = False) -> None:
        super().__init__(why)
        self.killed = killed


class ConfinedProcess:
    """One worker's process, safe to use from several threads. The next request restarts one that ended."""

    def __init__(
        self, worker: str, paths: Sequence[str], begin: Callable[[Ask], None] = lambda ask: None
    ) -> None:
        """`worker`: a module with `main`. `paths`: for its imports. `begin` sends the first requests."""
        self._worker, self._paths, self._begin = worker, [str(WORKERS), *paths], begin
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: _Asked = SimpleQueue()
        self._watcher: threading.Thread | None = None

    def ask(self, request: bytes, wait_s: float = WAIT_S) -> bytes:
        """Return the answer. Raise ProcessEnded if there is none, at the latest after `wait_s` of waiting."""
        with self._lock:
            self._started()
            return self._ask(request, wait_s)

    def start(self) -> None:
        """Start the process now, unless it runs."""
        with self._lock:
            self._started()

    def close(self) -> None:
        """End the process; the next request starts another."""
        with self._lock:
            self._stop()
            if self._watcher is not None:
                self._watcher.join()  # no request is under way, so it ends at once

    def _started(self) -> None:
        if self._process is not None:
            return
        self._process, self._asked = _start(self._worker, self._paths), SimpleQueue()
        watched = self._process, self._asked
        self._watcher = threading.Thread(target=_watch, args=watched, name="confined", daemon=True)
        self._watcher.start()
        try:
            self._begin(lambda request: self._ask(request, WAIT_S + len(request) * 1e-6))
        except BaseException:
            self._stop()
            raise

    def _ask(self, request: bytes, wait_s: float) -> bytes:
        process = self._process
        if process is None:
            raise ProcessEnded("stopped")
        assert process.stdin is not None and process.stdout is not None
        done = threading.Event()
        self._asked.put((done, max(1, round(wait_s / SLICE_S))))
        try:
            process.stdin.write(LENGTH.pack(len(request)))
            process.stdin.write(request)
            process.stdin.flush()
            head = process.stdout.read(LENGTH.size)
            size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else -1
            reply = process.stdout.read(size) if size > 0 else b""
        except (BrokenPipeError, OSError):
            size, reply = -1, b""
        except BaseException:  # Ctrl-C: this answer would be taken for the next request's
            self._stop()
            raise
        finally:
            done.set()
        if len(reply) != size:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the pipe has closed, so the process ends
                process.wait(DYING_S)
            code = self._stop()
            raise ProcessEnded(_why(code), killed=code == -KILLED)
        return reply

    def _stop(self) -> int:
        """End the process; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        self._asked.put(None)
        process.kill()
        with contextlib.suppress(BrokenPipeError, OSError):  # bytes that the process did not read
            process.stdin.close()
        process.stdout.close()
        return process.wait()

    def __del__(self) -> None:
        self._stop()


def paths_of(*packages: str) -> list[str]:
    """Return the packages' directories. LookupError names a package that is not installed."""
    found = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise LookupError(name)
        found.append(str(Path(spec.origin).parents[1]))
    return found


def _start(worker: str, paths: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start without `site` (which takes 10 ms), in a process group that Ctrl-C does not reach."""
    code = f"import sys; sys.path += {list(paths)!r}; from {worker} import main; main()"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in KEPT if name in os.environ},
        start_new_session=sys.platform != "win32",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
    )


def _watch(process: subprocess.Popen[bytes], asked: _Asked) -> None:
    """Kill a process that waits too long. One thread serves all requests: starting one took 0.1 ms."""
    while (request := asked.get()) is not None:
        done, slices = request
        if not any(done.wait(SLICE_S) for _ in range(slices)):
            process.kill()


def _why(code: int) -> str:
    if sys.platform == "win32":
        return "takes too long, or too much memory"
    if code in (-signal.SIGPROF, -signal.SIGKILL):
        return "takes too long"
    return "is nested too deeply" if code == -signal.SIGSEGV else "takes too much memory"
