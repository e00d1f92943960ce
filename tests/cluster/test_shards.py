"""Divided work: results in order, errors as they were, and a line where workers cannot be had."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ran
from divided import DiesOnce, Squares

from thermocline.cluster import ray_cluster, shards
from thermocline.cluster.address import ray_address
from thermocline.cluster.processes import LocalProcesses
from thermocline.cluster.ray_cluster import Node, RayCluster
from thermocline.cluster.ray_workers import RayWorkers
from thermocline.cluster.shards import Origin, ShardWorker
from thermocline.errors import IOFailure, NumericalError, OutOfBudget, Unsupported
from thermocline.machine import hardware


@pytest.mark.parametrize("n", [1, 7, 100])
@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("workers", [1, 3])
def test_shards_are_all_of_the_work_in_order(n: int, most: int, workers: int) -> None:
    pieces = [list(range(n))[cut] for cut in shards.sizes(n, most, workers)]
    assert [x for piece in pieces for x in piece] == list(range(n))
    assert max(map(len, pieces)) <= most
    assert len(pieces) >= min(n, 4 * workers)


def test_a_worker_of_another_version_or_instruction_set_is_refused() -> None:
    here = Origin.here()
    ShardWorker(1, here).pid()
    with pytest.raises(Unsupported, match=r"node 3: has thermocline .*0\.0\.1 divides the work"):
        ShardWorker(1, Origin("0.0.1", here.isa), "node 3").pid()
    with pytest.raises(Unsupported, match=f"set THERMOCLINE_ISA={here.isa}"):
        ShardWorker(1, Origin(here.version, "avx9000")).pid()


# ---- processes


@pytest.mark.slow
def test_processes_give_results_in_order_and_errors_as_they_were(tmp_path: Path) -> None:
    workers = LocalProcesses(2, threads=2)
    found = [*workers.map(Squares(), range(20), 0)]
    assert [n for n, _ in found] == [n * n for n in range(20)]
    assert len({pid for _, pid in found}) <= 2
    with pytest.raises(NumericalError, match=r"^5 has no square$"):
        [*workers.map(Squares(fails=5), range(20), 0)]
    with pytest.raises(IOFailure, match="a worker process was killed"):
        [*workers.map(DiesOnce(Squares(), 1, tmp_path / "died"), range(20), 0)]
    assert not multiprocessing.active_children()


def test_processes_share_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_bytes", lambda: 8 << 30)
    workers = LocalProcesses(4, threads=8)
    assert (workers.threads, workers.ram(None), workers.ram(2.0), workers.ram(64.0)) == (2, 2.0, 0.5, 2.0)
    assert LocalProcesses(4, threads=2).threads == 1


# ---- Ray that is not there


@pytest.mark.parametrize("text", ["", "local", "auto", "head:6379", "ray://10.0.0.1:10001", "[::1]:6379"])
def test_an_address_of_ray_is_taken(text: str) -> None:
    assert ray_address(text) == (text or "local")


@pytest.mark.parametrize("text", ["head", "head:0", "head:70000", "http://head:1", "a b:1", ":6379"])
def test_an_address_that_is_none_is_refused(text: str, thermocline: Callable[..., Ran]) -> None:
    told = thermocline("eval", f"--ray={text}", "-f", "x")
    assert told.code == 2 and "--ray must be HOST:PORT" in told.err, told.err


def told_without_ray(thermocline: Callable[..., Ran], *argv: str | Path) -> Ran:
    told = thermocline("eval", "-f", __file__, "-c", 64, "-q", *argv)
    assert told.err.count("\n") == 1 and told.out == "", told.err
    return told


def test_ray_that_is_absent_or_too_old_is_a_line(
    thermocline: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, of, there = importlib.util.find_spec, importlib.metadata.version, False

    def found(name: str, package: str | None = None) -> object:
        return (object() if there else None) if name == "ray" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    told = told_without_ray(thermocline, "--ray")
    assert told.code == 6 and "pip install 'thermocline[cluster]'" in told.err
    there = True
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.3" if name == "ray" else of(name))
    told = told_without_ray(thermocline, "--ray", "local")
    assert told.code == 6 and "Ray 2.9.3 is too old: 2.60 or later" in told.err


def test_a_cluster_that_cannot_be_reached_is_a_line(
    thermocline: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "check_installed", lambda: None)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # nobody listens
        told = told_without_ray(thermocline, "--ray", f"127.0.0.1:{s.getsockname()[1]}")
    assert told.code == 4 and "cannot be reached" in told.err and "ray start --head" in told.err


def test_workers_fit_into_nodes_or_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RayCluster("auto", (Node(8, 16 << 30), Node(4, 64 << 30), Node(0, 1 << 30)))
    assert cluster.places(2, 4 << 30) == 4 + 2
    assert cluster.places(4, 8 << 30) == 2 + 1
    with pytest.raises(OutOfBudget, match=r"needs 8 CPUs and 32 GiB.* at most 8 CPUs and 64 GiB"):
        cluster.places(8, 32 << 30)
    for asked, found in {
        (None, None): (4, 3),  # each has a node of 4 CPUs' threads
        (2, None): (4, 2),
        (12, None): (1, 12),
        (None, 8): (8, 1),
        (5, 2): (2, 5),
    }.items():
        workers = RayWorkers(cluster, *asked)
        assert (workers.threads, workers.most) == found, asked


def test_processes_and_workers_are_one_or_the_other(thermocline: Callable[..., Ran]) -> None:
    told = thermocline("profile", "-o", "/nowhere/pack", "--workers", "2", "--processes", "2")
    assert told.code == 2 and "leave it out" in told.err


def test_what_is_bound_to_one_process_is_refused(thermocline: Callable[..., Ran], tmp_path: Path) -> None:
    for argv in (["--gpu", "stand-in"], ["--read-budget", "5"]):
        told = thermocline("eval", "-f", __file__, "--processes", "2", *argv)
        assert told.code == 2 and argv[0] in told.err and "--processes" in told.err
