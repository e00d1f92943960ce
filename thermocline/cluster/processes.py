"""Workers that are processes of this machine. Each loads what it needs for itself."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, TypeVar

from thermocline.cluster.shards import DividedWork, Origin, ShardWorker
from thermocline.errors import IOFailure
from thermocline.machine import hardware

S = TypeVar("S")
R = TypeVar("R")

_here: list[
    Callable[[Any], Any]
] = []  # in a worker's process: an executor hands its initializer's result to nobody


class LocalProcesses:
    """So many processes, which share the threads and the memory."""

    def __init__(self, count: int, threads: int) -> None:
        self.most, self.threads = count, max(1, threads // count)

    def ram(self, allowed: float | None) -> float | None:
        """Return an equal part: processes that measured at once what is free would all see the same bytes."""
        free = hardware.available_bytes()
        known = [x for x in (allowed, None if free is None else free / 2**30) if x is not None]
        return min(known) / self.most if known else None

    def map(self, work: DividedWork[S, R], shards: Iterable[S], worker_bytes: int) -> Generator[R]:
        """Yield the result of each shard. Raises IOFailure if a process dies."""
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            self.most,
            multiprocessing.get_context("spawn"),
            _begin,
            (work, self.threads),
        )
        try:
            given: deque[Future[R]] = deque()
            for shard in shards:
                given.append(pool.submit(_run, shard))
                if len(given) > self.most:  # one waits for the process that is done first
                    yield given.popleft().result()
            while given:
                yield given.popleft().result()
        except BrokenProcessPool:
            raise IOFailure(
                "a worker process was killed, maybe for its memory; use fewer --processes or less --ram"
            ) from None
        except BaseException:
            # An error, Ctrl-C, a closed generator: nobody wants the shards that are running.
            for process in set(multiprocessing.active_children()) - before:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(work: DividedWork[Any, Any], threads: int) -> None:
    # Ctrl-C reaches all of them; the first process ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = ShardWorker(threads, Origin.here())
    _here.append(partial(worker.run, work))
    multiprocessing.util.Finalize(None, _end, (worker,), exitpriority=0)


def _end(worker: ShardWorker) -> None:
    _here.clear()
    worker.close()


def _end_with_parent() -> None:
    """End this process when the first one is gone: it waits for shards that nobody sends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(shard: Any) -> Any:
    return _here[0](shard)
