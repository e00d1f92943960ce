"""`thermocline serve` with its engine in a thread of the process that speaks HTTP, for bench/server/serve.py.

What a process of its own is for is not measured: a kernel that crashes would take the port with it.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from thermocline.cli.main import main
from thermocline.server.process import engine_process, worker


class Thread(threading.Thread):
    """As much of a multiprocessing.Process as the server looks at."""

    exitcode = 0

    def __init__(self, target: Any, args: tuple[Any, ...], name: str, daemon: bool) -> None:
        end, *options = args
        own = Connection(os.dup(end.fileno()))  # the server closes the one it has handed over
        super().__init__(target=target, args=(own, *options), name=name, daemon=daemon)

    def kill(self) -> None:
        pass  # it ends with the process


if __name__ == "__main__":
    context = SimpleNamespace(Process=Thread, Pipe=multiprocessing.Pipe)
    setattr(engine_process, "multiprocessing", SimpleNamespace(get_context=lambda how: context))  # noqa: B010
    handlers = SimpleNamespace(SIGINT=0, SIGTERM=0, SIG_IGN=0, signal=lambda *_: None)  # the main thread's
    setattr(worker, "signal", handlers)  # noqa: B010
    raise SystemExit(main())
