"""`thermocline deploy`: from flags to replicas under Ray Serve, on this machine or on a cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.cli.commands.serve import (
    ServeOptions,
    check_server_installed,
    limits_of,
    listening,
    print_limits,
)
from thermocline.cli.generation import engine_options, model_options, sampling
from thermocline.cli.shared_options import on_ray
from thermocline.cluster.address import LOCAL
from thermocline.errors import UsageError
from thermocline.options import opt, switch, whole

if TYPE_CHECKING:
    from thermocline.server.replicas.deployment import DeploymentOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeployOptions(ServeOptions):
    """Serve a model with several engines behind one address, which Ray Serve places on machines."""

    replicas: int = opt(2, whole(1, 1024), "N", "Replicas", "Engines, each with the model in its memory.")
    ray: str | None = on_ray("Replicas", "local")
    undeploy: bool = opt(False, switch, None, "Replicas", "End what was deployed to the cluster.")


def deploy(o: DeployOptions) -> int:
    """Stay until Ctrl-C where Ray is this command's own. On a cluster the replicas outlive the command."""
    from thermocline.cluster.ray_cluster import check_installed, ray_cluster
    from thermocline.machine import hardware

    if o.print_limits:
        return print_limits(o)
    if o.socket is not None:
        raise UsageError(f"--socket {o.socket}: replicas are reached at --host and --port; leave it out")
    if o.gpu != "off":
        raise UsageError(f"--gpu {o.gpu}: replicas compute on their CPUs; leave it out")
    check_installed()
    check_server_installed()
    address = o.ray or LOCAL
    if o.undeploy and address == LOCAL:
        raise UsageError("--undeploy: ends what is on a cluster; name it with --ray ADDRESS")
    request = None if o.undeploy else deployment_of(o)
    own = max(1, hardware.default_threads(), o.replicas * o.threads)
    from thermocline.server.replicas import deployment

    with ray_cluster(address, own) as cluster:
        if request is None:
            deployment.shut_down()
            log.info(f"ended what was deployed to {address}")
            return 0
        deployment.check_fits(request, cluster)
        try:
            deployment.deploy(request)
            log.info(f"{request.replicas} replicas answer at http://{request.host}:{request.port}")
            if address == LOCAL:
                _wait()
        finally:
            if address == LOCAL:
                deployment.shut_down()
    return 0


def deployment_of(o: DeployOptions) -> DeploymentOptions:
    """Return the options as a deployment. An address that `serve` would refuse is refused in its words."""
    from thermocline.cli.conversation import text_of
    from thermocline.machine import hardware
    from thermocline.server.api.app import PUBLIC
    from thermocline.server.http.guard import Access
    from thermocline.server.http.listener import api_keys
    from thermocline.server.replicas.deployment import DeploymentOptions
    from thermocline.server.replicas.replica import ReplicaOptions
    from thermocline.server.serve import ServerOptions

    keys = api_keys(o.api_key, None if o.api_key_file is None else Path(o.api_key_file))
    own = (o.ray or LOCAL) == LOCAL  # else the port is one of the cluster, where an update finds it in use
    listener = listening(o if own else replace(o, port=0), bool(keys))
    names, addresses = listener.host_names(o.allow_host), listener.takes_addresses
    bound, port = f":{listener.port}", listener.port if own else o.port
    listener.close()
    names = None if names is None else {name.replace(bound, f":{port}") for name in names}
    template = None if o.template is None else text_of(Path(o.template))
    threads = o.threads if o.threads > 0 else max(1, hardware.default_threads() // o.replicas)
    files, engine = model_options(o, template), engine_options(o, o.parallel)
    if files.model is not None and os.path.exists(files.model):
        files = replace(files, model=_absolute(files.model))
    files = replace(files, cache_dir=_absolute(files.cache_dir))
    engine = replace(engine, prompt_cache_dir=_absolute(engine.prompt_cache_dir))
    server = ServerOptions(limits_of(o), o.alias, sampling(o))
    return DeploymentOptions(
        ReplicaOptions(files, replace(engine, threads=threads), server),
        o.replicas,
        threads,
        Access.of(keys, names, o.allow_origin, PUBLIC, addresses=addresses),
        o.host,
        port,
        0 if o.ram is None else int(o.ram * 2**30),
    )


def _absolute(path: str | Path | None) -> str | None:
    """Return a path that a replica understands, whose working directory is not this one."""
    return None if path is None else os.path.abspath(path)


def _wait() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        while not ended.wait(1.0):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
