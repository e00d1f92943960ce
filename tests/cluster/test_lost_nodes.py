"""Shards of workers that are lost with their node, on as much of Ray as the dispatch asks for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from thermocline.cluster import ray_workers
from thermocline.errors import IOFailure

NAMES = ("RayTaskError", "OutOfMemoryError", "ActorUnavailableError", "ActorDiedError")


@dataclass(eq=False)
class Call:
    """A call of an actor. `over`: whether it has ended; `error`: how."""

    value: Any = None
    over: bool = True
    error: Exception | None = None


@dataclass
class Actors:
    """Actors in the order of their start. `placed`: how many have room; `lost`: how many answer nobody."""

    placed: int
    lost: int
    exceptions: Any
    started: list[int] = field(default_factory=list)

    def start(self, i: int) -> Any:
        self.started.append(i)
        gone = self.exceptions.ActorUnavailableError("its node is lost") if i < self.lost else None

        def run(work: Any, shard: int) -> Call:
            return Call(shard * shard, error=gone)

        pid = Call(i, over=i < self.placed)
        return SimpleNamespace(pid=SimpleNamespace(remote=lambda: pid), run=SimpleNamespace(remote=run))


@pytest.fixture
def exceptions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Errors of a Ray in which calls are over at once, or never."""
    ray, base = ModuleType("ray"), type("RayError", (Exception,), {})
    errors = SimpleNamespace(RayError=base, **{name: type(name, (base,), {}) for name in NAMES})

    def wait(calls: list[Call], **more: Any) -> tuple[list[Call], list[Call]]:
        over = [c for c in calls if c.over][:1]
        assert over, "nobody would ever wake it"
        return over, []

    def get(call: Call) -> Any:
        if call.error is not None:
            raise call.error
        return call.value

    parts = {"put": lambda x: x, "wait": wait, "get": get, "kill": lambda actor: None, "exceptions": errors}
    for name, part in parts.items():
        setattr(ray, name, part)
    monkeypatch.setitem(sys.modules, "ray", ray)
    yield errors


def squares(actors: Actors, count: int) -> list[int]:
    dispatch = ray_workers._Dispatch(actors.start, count, None, range(9))
    try:
        return [*dispatch.results()]
    finally:
        dispatch.close()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("placed", [2, 9], ids=["without room for another", "with room"])
def test_the_others_take_a_lost_workers_shards(exceptions: Any, lost: int, placed: int) -> None:
    actors = Actors(placed, lost, exceptions)
    assert squares(actors, 2) == [n * n for n in range(9)]
    assert actors.started == [0, 1, 2][: 2 + lost]


def test_a_shard_that_loses_every_worker_is_given_up(exceptions: Any) -> None:
    actors = Actors(99, 99, exceptions)
    with pytest.raises(IOFailure, match="Ray gave up a shard"):
        squares(actors, 1)
    assert len(actors.started) == 1 + ray_workers.LOSSES
