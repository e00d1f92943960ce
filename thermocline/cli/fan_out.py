"""The workers that --processes and --ray ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from thermocline.errors import UsageError

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers


class FannedOut(Protocol):
    """The options of a command whose work divides."""

    @property
    def gpu(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def processes(self) -> int | None: ...
    @property
    def ray(self) -> str | None: ...


def is_divided(o: FannedOut) -> bool:
    return o.ray is not None or (o.processes or 1) > 1


def check_on_cpu(o: FannedOut) -> None:
    """Raise UsageError for a GPU beside divided work."""
    if o.gpu != "off" and is_divided(o):
        raise UsageError(f"--gpu {o.gpu}: processes and machines compute on their CPUs; leave it out")


@contextlib.contextmanager
def workers_of(o: FannedOut) -> Iterator[Workers | None]:
    """Open the workers; None where this process does all of it. Raises what `ray_cluster` does."""
    from thermocline.machine import hardware

    if o.ray is not None:
        from thermocline.cluster.ray_cluster import ray_cluster
        from thermocline.cluster.ray_workers import RayWorkers

        with ray_cluster(o.ray, hardware.default_threads()) as cluster:
            yield RayWorkers(cluster, o.processes, o.threads if o.threads > 0 else None)
    elif (o.processes or 1) > 1:
        from thermocline.cluster.processes import LocalProcesses

        assert o.processes is not None
        yield LocalProcesses(o.processes, hardware.threads_for(o.threads))
    else:
        yield None
