"""Workers that are Ray actors. Ray places and restarts them, sends lost shards again and spills to disk."""

from __future__ import annotations

import itertools
import logging
import operator
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from thermocline.cluster.ray_cluster import RayCluster, refusal
from thermocline.cluster.shards import DividedWork, Origin, ShardWorker
from thermocline.errors import IOFailure, OutOfBudget, ThermoclineError, Unsupported

log = logging.getLogger(__name__)

S = TypeVar("S")
R = TypeVar("R")

AHEAD = 2  # shards that a worker has: one it computes, and the next, so that it waits for nobody
RETRIES = 3  # times that Ray sends a shard again whose worker died: as it does by default for its tasks
LOSSES = 2  # times that a shard goes to another actor: nodes may be lost, and a shard may kill its workers
PATIENCE_S = 30.0  # after which a person is told that no worker was placed


class RayWorkers:
    """Actors in a cluster, as many as fit, or `count`. Each has `threads` CPUs of its node."""

    def __init__(self, cluster: RayCluster, count: int | None, threads: int | None) -> None:
        smallest = min(n.cpus for n in cluster.nodes if n.cpus)
        if threads is None:
            threads = smallest if count is None else min(smallest, max(1, cluster.cpus // count))
        self._cluster, self.threads = cluster, threads
        fit = cluster.places(threads, 0)
        self.most = fit if count is None else min(count, fit)

    def ram(self, allowed: float | None) -> float | None:
        """Return what was allowed: it is for each worker, wherever it is."""
        return allowed

    def map(self, work: DividedWork[S, R], shards: Iterable[S], worker_bytes: int) -> Generator[R]:
        """Yield the result of each shard. Raises OutOfBudget or IOFailure where Ray gives up."""
        import ray

        few = max(1, operator.length_hint(shards, self.most))
        count = min(self.most, self._cluster.places(self.threads, worker_bytes), few)
        origin = Origin.here()
        actor = ray.remote(ShardWorker).options(
            num_cpus=self.threads,
            memory=worker_bytes,
            max_restarts=-1,
            max_task_retries=RETRIES,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {"THERMOCLINE_ISA": origin.isa}},  # else a newer CPU's sums differ
        )

        def started(i: int) -> Any:
            return actor.remote(self.threads, origin, f"Ray worker {i + 1}")

        dispatch = _Dispatch(started, count, ray.put(work), shards)
        try:
            yield from dispatch.results()
        finally:
            dispatch.close()


class _Dispatch:
    """Which actor has which shards. An actor without any goes, so that a lost one can take its place.

    Ray starts an actor again whose process died. One that is lost with its node goes from here: its shards go
    to others, and an actor in its place waits until the cluster has room for it.
    """

    def __init__(self, started: Callable[[int], Any], count: int, work: Any, shards: Iterable[Any]) -> None:
        self._started, self._work, self._left = started, work, enumerate(shards)
        self._again: list[tuple[int, Any]] = []  # shards of lost actors, with their numbers
        self._losses: Counter[int] = Counter()  # of each shard
        self._ended = False  # no shard is left but those
        self._actors: dict[int, Any] = {}
        # Of each call that is not over: its actor, and its shard; None: whether it may take any.
        self._calls: dict[Any, tuple[int, tuple[int, Any] | None]] = {}
        self._done: dict[int, Any] = {}
        self._numbers = itertools.count()
        for _ in range(count):
            self._begin()

    def _begin(self) -> None:
        i = next(self._numbers)
        self._actors[i] = self._started(i)
        self._calls[self._actors[i].pid.remote()] = (i, None)

    def results(self) -> Generator[Any]:
        for wanted in itertools.count():
            while wanted not in self._done and self._unfinished():
                self._wait()
            if wanted not in self._done:
                return
            yield _result(self._done.pop(wanted))

    def _unfinished(self) -> bool:
        return not self._ended or bool(self._again) or any(shard for _, shard in self._calls.values())

    def _wait(self) -> None:
        """Take in a call that is over, and give its actor more."""
        import ray

        over, _ = ray.wait([*self._calls], num_returns=1, timeout=PATIENCE_S)
        if not over:
            if all(shard is None for _, shard in self._calls.values()):
                log.info("waiting for Ray to place a worker: the cluster is busy, or a node is starting")
            over, _ = ray.wait([*self._calls], num_returns=1)
        (ref,) = over
        actor, shard = self._calls.pop(ref)
        if shard is None:
            _result(ref)
        elif self._losses[shard[0]] < LOSSES and _lost(ref):
            self._losses[shard[0]] += 1
            self._again.append(shard)
            self._replace(actor)
        else:
            self._done[shard[0]] = ref
        if actor in self._actors:
            self._give(actor)

    def _give(self, actor: int) -> None:
        """Let an actor have AHEAD shards, or go if there is none for it."""
        import ray

        held = sum(i == actor for i, _ in self._calls.values())
        while held < AHEAD and (shard := self._next()) is not None:
            self._calls[self._actors[actor].run.remote(self._work, shard[1])] = (actor, shard)
            held += 1
        if held == 0:
            ray.kill(self._actors.pop(actor))

    def _next(self) -> tuple[int, Any] | None:
        """Return the next shard's number, and where it is: Ray keeps it until its call is over."""
        import ray

        if self._again:
            return self._again.pop(0)
        shard = next(self._left, None)
        self._ended = shard is None
        return None if shard is None else (shard[0], ray.put(shard[1]))

    def _replace(self, actor: int) -> None:
        """Begin another actor in place of a lost one. The first of its calls that fails is told so."""
        import ray

        if (lost := self._actors.pop(actor, None)) is not None:
            ray.kill(lost)
            log.info("a Ray worker was lost with its node: its shards go to others")
            self._begin()

    def close(self) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)


def _lost(ref: Any) -> bool:
    """Return whether a call ended because its actor is gone, and Ray's retries did not reach it.

    A value that came is left to Ray until its turn, so that many of them may wait on disk.
    """
    import ray
    from ray import exceptions

    try:
        ray.get(ref)
    except (exceptions.ActorUnavailableError, exceptions.ActorDiedError):
        return True
    except Exception:  # `_result` raises it when its turn comes
        return False
    return False


def _result(ref: Any) -> Any:
    """Return a call's result, or raise its error as the command's own."""
    import ray
    from ray import exceptions

    try:
        return ray.get(ref)
    except exceptions.RayTaskError as e:
        if isinstance(e.cause, ThermoclineError):
            raise e.cause from None
        if isinstance(e.cause, MemoryError):
            raise OutOfBudget("a Ray worker is out of memory; use less --ram or fewer --processes") from None
        raise IOFailure(f"a Ray worker failed: {type(e.cause).__name__}: {refusal(e.cause)}") from None
    except exceptions.OutOfMemoryError:
        raise OutOfBudget(
            "a Ray worker's node is out of memory, and Ray ended it; use less --ram or fewer --processes"
        ) from None
    except exceptions.RayError as e:
        if "No module named" in str(e):
            raise Unsupported(
                "a node of the Ray cluster has no thermocline: pip install 'thermocline[cluster]' on each"
            ) from None
        raise IOFailure(
            f"Ray gave up a shard after {RETRIES} retries ({type(e).__name__}: {refusal(e)}); "
            "the same command goes on from what was done"
        ) from None
