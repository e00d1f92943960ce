"""The seam between work that divides into shards and what carries it: processes of this machine, or Ray.

`DividedWork` stays open in each worker, so a model is loaded once. Shards follow one by one. Their results
come back in the order of the shards, so what is made of them does not depend on who computed which.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from thermocline import __version__, _native
from thermocline.errors import ThermoclineError, Unsupported

S = TypeVar("S")
R = TypeVar("R")
S_in = TypeVar("S_in", contravariant=True)
R_out = TypeVar("R_out", covariant=True)


class DividedWork(Protocol[S_in, R_out]):
    """Work on shards. It is pickled, as are shards and results."""

    def open(self, threads: int) -> AbstractContextManager[Callable[[S_in], R_out]]:
        """Load what all shards need, in the worker. A result must depend on its shard alone."""


class Workers(Protocol):
    """Processes that carry out the work, here or on other machines."""

    @property
    def most(self) -> int:
        """The most workers that there may be."""

    def ram(self, allowed: float | None) -> float | None:
        """Return the GiB that one worker may take, if the user allowed so many; None: what is free."""

    def map(self, work: DividedWork[S, R], shards: Iterable[S], worker_bytes: int) -> Generator[R]:
        """Yield the result of each shard, in order. Close the generator to stop early.

        Shards are taken when a worker has time for them, so they may be large. `worker_bytes`: what a worker
        takes. An error that the work raises is raised here.
        """


@dataclass(frozen=True)
class Origin:
    """The facts that a worker shares with the process that divides the work, so that results are equal."""

    version: str
    isa: str

    @staticmethod
    def here() -> Origin:
        return Origin(__version__, _native.isa())

    def check(self) -> None:
        """Raise Unsupported in a worker whose results could differ."""
        mine = Origin.here()
        if mine.version != self.version:
            raise Unsupported(
                f"has thermocline {mine.version}, and {self.version} divides the work; install the same one"
            )
        if mine.isa != self.isa:
            raise Unsupported(
                f"computes with {mine.isa}, and {self.isa} is asked for, whose sums differ in the last bits; "
                f"set THERMOCLINE_ISA={mine.isa} for this command"
            )


class ShardWorker:
    """A worker's side: opens the work at the first shard, and keeps it open."""

    def __init__(self, threads: int, origin: Origin, name: str = "") -> None:
        """`name`: of the worker, for messages; "" where it does not matter which one it is."""
        self._threads, self._origin, self._name = threads, origin, name
        self._stack = ExitStack()
        self._do: Callable[[Any], Any] | None = None

    def pid(self) -> int:
        """Return the process's number, once this worker may take shards."""
        with self._named():
            self._origin.check()
        return os.getpid()

    def run(self, work: DividedWork[S, R], shard: S) -> R:
        """Do a shard of the work, which is the same each time."""
        with self._named():
            if self._do is None:
                self._do = self._stack.enter_context(work.open(self._threads))
            done: R = self._do(shard)
            return done

    def close(self) -> None:
        self._do = None
        self._stack.close()

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        try:
            yield
        except ThermoclineError as e:
            if not self._name:
                raise
            raise type(e)(f"{self._name}: {e}") from None


def sizes(n: int, most: int, workers: int) -> list[slice]:
    """Divide n pieces of work into shards: `most` pieces at most, and a few shards for each worker."""
    each = max(1, min(most, n // (4 * workers)))
    return [slice(at, at + each) for at in range(0, n, each)]
