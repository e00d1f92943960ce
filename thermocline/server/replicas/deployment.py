"""Replicas and their front as deployments of Ray Serve, which places, watches, drains and replaces them.

The one file that imports Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.registry import Collector

from thermocline.cluster.ray_cluster import RayCluster, refusal
from thermocline.errors import IOFailure, OutOfBudget, ThermoclineError
from thermocline.server.http.guard import Access, Guard, Message, Scope
from thermocline.server.http.limits import ServerLimits
from thermocline.server.replicas.front import Front, ReplicaLost
from thermocline.server.replicas.replica import Replica, ReplicaOptions

APP = "thermocline"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
HEALTH_S = 2.0  # between two looks at a replica
_ERROR = re.compile(r"thermocline\.errors\.\w+: (.+)")
METRICS_S = 5.0  # between two exports of a replica's metrics to Ray


@dataclass(frozen=True)
class DeploymentOptions:
    """The deployment: replicas, and who may talk to their front at which address."""

    replica: ReplicaOptions
    replicas: int
    threads: int  # of a replica
    access: Access
    host: str
    port: int
    ram_bytes: int = 0  # of a replica; 0: not counted


def check_fits(o: DeploymentOptions, cluster: RayCluster) -> None:
    """Raise OutOfBudget if the cluster has not the CPUs or memory for all replicas."""
    fit = cluster.places(o.threads, o.ram_bytes)
    if fit < o.replicas:
        raise OutOfBudget(
            f"--replicas {o.replicas}: {fit} of {o.threads} CPUs each fit in the cluster; use fewer "
            "of them, fewer --threads, or more nodes"
        )


def deploy(o: DeploymentOptions) -> None:
    """Deploy, or update what is deployed: replica after replica, each after it has answered its requests.

    Returns when all are healthy. Raises what keeps a replica from starting.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    limits = o.replica.server.limits
    serve.start(http_options={"host": o.host, "port": o.port})
    ongoing = o.replica.engine.max_batch + limits.limit_queue
    slots = o.replicas * ongoing
    memory = {"memory": o.ram_bytes} if o.ram_bytes else {}
    replicas = serve.deployment(
        ReplicaDeployment,
        name="replica",
        num_replicas=o.replicas,
        max_ongoing_requests=ongoing,
        ray_actor_options={"num_cpus": o.threads, **memory},
        request_router_config={"request_router_class": ROUTER},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=limits.limit_grace_s,
    )
    front = serve.deployment(
        serve.ingress()(FrontDeployment),
        name="front",
        max_ongoing_requests=slots + limits.limit_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=limits.limit_grace_s,
    )
    try:
        serve.run(front.bind(replicas.bind(o.replica), o.access, limits, slots), name=APP, route_prefix="/")
    except RuntimeError as e:
        raise IOFailure(f"the replicas could not be started: {_why(e)}") from None


def _why(e: RuntimeError) -> str:
    """Return the last error of a replica, which Ray shows with a traceback around it."""
    from ray import serve

    app = serve.status().applications.get(APP)
    told = "" if app is None else "\n".join(d.message for d in app.deployments.values())
    said = _ERROR.findall(told)
    return str(said[-1]) if said else refusal(e)


def shut_down() -> None:
    """End the deployment."""
    from ray import serve

    serve.shutdown()


class ReplicaDeployment:
    """A replica as Ray Serve calls it."""

    async def __init__(self, o: ReplicaOptions) -> None:  # type: ignore[misc]
        logging.getLogger("thermocline").setLevel(logging.INFO)
        self._replica = Replica(o)
        await self._replica.start()
        self._exporting = asyncio.ensure_future(_export(self._replica))

    def check_health(self) -> None:
        """Raise if the engine has ended: Ray Serve then replaces this replica."""
        self._replica.check()

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
        about = (b"x-thermocline-replica", str(os.getpid()).encode())
        async with contextlib.aclosing(self._replica.answer(scope, body)) as found:
            async for messages in found:
                for m in messages:
                    if m["type"] == "http.response.start":
                        m["headers"] = [*m["headers"], about]
                yield messages

    async def __del__(self) -> None:
        if hasattr(self, "_exporting"):
            self._exporting.cancel()
            await self._replica.stop()


async def _export(replica: Replica) -> None:
    """Give Ray this replica's metrics, again and again; Ray adds which replica it is."""
    from ray.serve import metrics

    gauges: dict[str, Any] = {}
    while True:
        collector: Collector = replica.api.metrics.registry
        for sample in (s for family in collector.collect() for s in family.samples):
            if sample.name not in gauges:
                keys = tuple(sample.labels)
                gauges[sample.name] = metrics.Gauge(sample.name, "of one replica", tag_keys=keys)
            gauges[sample.name].set(sample.value, tags=dict(sample.labels))
        await asyncio.sleep(METRICS_S)


class FrontDeployment:
    """The front as Ray Serve calls it."""

    def __init__(self, replicas: Any, access: Access, limits: ServerLimits, slots: int) -> None:
        self._replicas, self._access, self._limits, self._slots = replicas, access, limits, slots

    def __serve_build_asgi_app__(self) -> Guard:
        front = Front(OfServe(self._replicas))
        return Guard(front, self._access, self._limits, slots=self._slots, methods=lambda path: None)


class OfServe:
    """The replicas behind a handle of Ray Serve, whose router hashes the session."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def answer(self, scope: Scope, body: bytes, key: str) -> AsyncIterator[list[Message]]:
        from ray.exceptions import RayActorError, RayTaskError

        call = self._handle.options(stream=True, method_name="answer", session_id=key).remote(scope, body)
        try:
            async for messages in call:
                yield messages
        except RayTaskError as e:
            raise ThermoclineError(f"a replica failed: {type(e.cause).__name__}") from None
        except RayActorError:
            raise ReplicaLost from None
        finally:
            with contextlib.suppress(Exception):
                call.cancel()
