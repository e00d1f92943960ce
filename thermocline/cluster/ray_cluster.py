"""A connection to Ray: a cluster at an address, or one of this machine that ends with the command.

A local Ray listens on the loopback address alone and asks for a token that only this process knows, since who
may talk to Ray may run code.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thermocline.cluster.address import LOCAL, host_and_port
from thermocline.errors import IOFailure, OutOfBudget, ThermoclineError, Unsupported, UsageError
from thermocline.machine import hardware

log = logging.getLogger(__name__)

OLDEST = (2, 60)  # has tokens and the router by session; nothing older was tried
STORE_BYTES = 256 << 20  # of a local Ray's objects; more of them go to its temporary directory
REACH_S = 5.0  # to reach a cluster's port
_TOKEN = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, with all that Ray may use of it."""

    cpus: int
    memory_bytes: int


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process is connected to."""

    address: str
    nodes: tuple[Node, ...]

    @property
    def cpus(self) -> int:
        return sum(n.cpus for n in self.nodes)

    def places(self, cpus: int, nbytes: int) -> int:
        """Return how many workers fit. Raises OutOfBudget where none does, in words of the largest node."""
        each = [min(n.cpus // cpus, n.memory_bytes // max(1, nbytes)) for n in self.nodes]
        if sum(each) == 0:
            cpu, memory = max(n.cpus for n in self.nodes), max(n.memory_bytes for n in self.nodes)
            raise OutOfBudget(
                f"--ray {self.address}: a worker needs {cpus} CPUs and {nbytes / 2**30:.3g} GiB, which no "
                f"node has: there are at most {cpu} CPUs and {memory / 2**30:.3g} GiB; use fewer --threads, "
                "less --ram, or larger nodes"
            )
        return sum(each)


def check_installed() -> None:
    """Raise Unsupported where Ray is absent or too old; do not import it."""
    if importlib.util.find_spec("ray") is None:
        raise Unsupported("--ray needs Ray: pip install 'thermocline[cluster]'")
    version = importlib.metadata.version("ray")
    if tuple(map(int, re.findall(r"[0-9]+", version)[:2])) < OLDEST:
        raise Unsupported(
            f"Ray {version} is too old: {OLDEST[0]}.{OLDEST[1]} or later is needed; "
            "pip install -U 'thermocline[cluster]', on every node"
        )


@contextlib.contextmanager
def ray_cluster(address: str, cpus: int | None = None) -> Iterator[RayCluster]:
    """Connect to a cluster, or start one of `cpus` CPUs (None: the physical cores) and end it.

    A command writes its data afterwards: standard output is Ray's meanwhile, and goes to the log.

    Raises Unsupported, UsageError or IOFailure in bounded time.
    """
    check_installed()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:
        _keep_to_this_machine()
    else:
        if address != "auto":
            _check_reachable(address)
        _use_the_token()
    import ray

    with contextlib.redirect_stdout(_ToLog()):
        try:
            _connect(address, hardware.default_threads() if cpus is None else cpus)
            yield RayCluster(address, _nodes())
        finally:
            ray.shutdown()


class _ToLog(io.TextIOBase):
    """Standard output meanwhile: Ray prints there that a worker died, before a command's JSON."""

    def write(self, text: str) -> int:
        log.debug(text.strip())
        return len(text)


def _keep_to_this_machine() -> None:
    """Let a local Ray be reached from this machine alone, and with a token.

    Ray reads these variables when it is imported, and its processes inherit them. So they stay.
    """
    if "ray" in sys.modules:
        return
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # in spite of its name: nodes use 127.0.0.1
    if not _TOKEN & os.environ.keys():
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _use_the_token() -> None:
    """Show a cluster the token of `ray start`, if this user has one: Ray alone asks without it, for 20 s."""
    if not _TOKEN & os.environ.keys() and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ["RAY_AUTH_MODE"] = "token"


def _check_reachable(address: str) -> None:
    try:
        socket.create_connection(host_and_port(address), REACH_S).close()
    except OSError as e:
        raise IOFailure(
            f"--ray {address}: cannot be reached ({e.strerror or e}); is `ray start --head` running there?"
        ) from None


def _connect(address: str, cpus: int) -> None:
    import ray

    about: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        about |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        # Ray's processes import from the directory that this one is in, before all others. In a checkout that
        # is a thermocline without its compiled core.
        with contextlib.chdir(os.sep):
            ray.init(address, namespace="thermocline", **about)
    except ThermoclineError:
        raise
    except Exception as e:  # Ray raises ConnectionError, RuntimeError, ValueError and classes of its own
        raise IOFailure(f"--ray {address}: {refusal(e)}") from None


def refusal(e: BaseException) -> str:
    """Return what Ray says, as one line: the first sentences, without its advice over many lines."""
    text = " ".join(str(e).split()) or type(e).__name__
    if text.startswith("Failed to connect to Ray cluster"):
        return "the cluster does not answer: another version of Ray, or another token (RAY_AUTH_TOKEN)?"
    if "ersion mismatch" in text:
        text = re.sub(r".*?(Version mismatch)", r"\1", text)
        return f"{text[:300]}; install the same Ray and Python on every node"
    return text if len(text) <= 300 else text[:297] + "..."


def _nodes() -> tuple[Node, ...]:
    import ray

    found = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    nodes = tuple(Node(int(r.get("CPU", 0)), int(r.get("memory", 0))) for r in found)
    if not any(n.cpus for n in nodes):
        raise UsageError(
            "the Ray cluster has no node with CPUs; start one with `ray start --address HOST:PORT`"
        )
    return nodes
