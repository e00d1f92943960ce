"""A real Ray on this machine: divided work gives the same bytes though a worker is killed, and nothing stays.

One Ray after the other: each takes some seconds to start, so a test asks several things of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran
from divided import DiesOnce, Squares
from test_divided import files_of

from thermocline.cluster.ray_cluster import ray_cluster
from thermocline.cluster.ray_workers import RayWorkers
from thermocline.errors import IOFailure, NumericalError, OutOfBudget
from thermocline.offline import counting

pytestmark = [pytest.mark.slow]
if importlib.util.find_spec("ray") is None:  # not imported: Ray reads its environment when it is
    pytest.skip("needs Ray: pip install '.[test-all]'", allow_module_level=True)
if not Path("/proc").is_dir():
    pytest.skip("looks up processes in /proc", allow_module_level=True)


@pytest.fixture(autouse=True)
def workers_know_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes import what they unpickle."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def children() -> list[str]:
    """Return the command lines of this process's living children that are Ray's."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            line = (path / "cmdline").read_text()
        except (OSError, ValueError):
            continue
        if parent == os.getpid() and "ray" in line:
            found.append(line)
    return found


def test_a_profile_on_ray_is_the_same_bytes_though_a_worker_is_killed(
    thermocline: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -9` in the middle: Ray starts the worker again, and sends it what it had."""
    text, died = tmp_path / "text.txt", tmp_path / "died"
    text.write_text("Once upon a time there was a king who had three sons. " * 120)
    on_ray = RayWorkers.map

    def killing(self: RayWorkers, work: Any, shards: Sequence[Any], worker_bytes: int) -> Generator[Any]:
        return on_ray(self, DiesOnce(work, 1, died), shards, worker_bytes)

    monkeypatch.setattr(RayWorkers, "map", killing)
    monkeypatch.setattr(counting, "SHARD_TOKENS", 128)
    asked = ("profile", "--corpus", text, "--ctx", 64, "--samples", 100, "-q", "-t", 1, "--json")
    for name, more in (("one", []), ("divided", ["--ray", "--processes", "2"])):
        told = thermocline(*asked, "-o", tmp_path / name, *more)
        assert (told.code, told.err) == (0, "")
        assert json.loads(told.out)["tokens"] > 1000  # Ray says nothing there
    assert died.exists() and int(died.read_text()) != os.getpid()
    assert files_of(tmp_path / "one") == files_of(tmp_path / "divided")
    assert not children()


def test_workers_on_ray_say_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ray_cluster("local", 2) as cluster:
        import ray

        assert Path.cwd() == tmp_path
        assert str(tmp_path) not in ray.get(ray.remote(lambda: sys.path).remote()), (
            "nothing is imported from there"
        )
        assert cluster.cpus == 2 and len(cluster.nodes) == 1
        hosts = [n["NodeManagerAddress"] for n in ray.nodes()]
        assert hosts == ["127.0.0.1"]  # no other machine can reach it
        workers = RayWorkers(cluster, None, 1)
        found = [*workers.map(Squares(), range(20), 0)]
        assert [n for n, _ in found] == [n * n for n in range(20)] and os.getpid() not in {
            p for _, p in found
        }
        with pytest.raises(NumericalError, match=r"^Ray worker \d: 5 has no square$"):
            [*workers.map(Squares(fails=5), range(20), 0)]
        with pytest.raises(OutOfBudget, match=r"a worker needs 1 CPUs and 1.02e\+03 GiB"):
            [*workers.map(Squares(), range(20), 1 << 40)]
        always = DiesOnce(Squares(), 0, tmp_path / "no" / "such" / "directory")
        with pytest.raises(IOFailure, match="a Ray worker failed: FileNotFoundError"):
            [*workers.map(always, range(4), 0)]
        early = workers.map(Squares(), range(1000), 0)
        next(early)
        early.close()  # as Ctrl-C does
    assert not children()
