"""Work that divides, for tests, and workers that are no processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thermocline.cluster.shards import DividedWork
from thermocline.errors import NumericalError


@dataclass(frozen=True)
class InTurn:
    """Workers that take turns in this process, `most` of them. What crosses the border is pickled."""

    most: int

    def ram(self, allowed: float | None) -> float | None:
        return allowed

    def map(self, work: DividedWork[Any, Any], shards: Iterable[Any], worker_bytes: int) -> Generator[Any]:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(pickle.loads(pickle.dumps(work)).open(1)) for _ in range(self.most)]
            for i, shard in enumerate(shards):
                yield pickle.loads(pickle.dumps(opened[i % self.most](pickle.loads(pickle.dumps(shard)))))


@dataclass(frozen=True)
class Squares:
    """Squares numbers, and says which process did. Fails at `fails`."""

    fails: int | None = None

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[Callable[[int], tuple[int, int]]]:
        yield self._square

    def _square(self, n: int) -> tuple[int, int]:
        if n == self.fails:
            raise NumericalError(f"{n} has no square")
        return n * n, os.getpid()


@dataclass(frozen=True)
class DiesOnce:
    """Other work, whose process is killed (as by `kill -9`) before its shard number `at`, the first time."""

    work: Any
    at: int
    died: Path

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[Callable[[Any], Any]]:
        with self.work.open(threads) as do:
            done = 0

            def dying(shard: Any) -> Any:
                nonlocal done
                if done == self.at and not self.died.exists():
                    self.died.write_text(str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGKILL)
                done += 1
                return do(shard)

            yield dying


@dataclass(frozen=True)
class Killing:
    """Workers of which one dies."""

    workers: Any
    died: Path

    @property
    def most(self) -> int:
        most: int = self.workers.most
        return most

    def ram(self, allowed: float | None) -> float | None:
        return allowed

    def map(self, work: DividedWork[Any, Any], shards: Iterable[Any], worker_bytes: int) -> Generator[Any]:
        found: Generator[Any] = self.workers.map(DiesOnce(work, 1, self.died), shards, worker_bytes)
        return found
