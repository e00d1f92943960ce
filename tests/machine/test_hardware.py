"""Facts about the machine, read from made-up /proc and /sys trees; measurements only for plausibility."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from thermocline.machine import disk_speed, hardware

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(
    root: Path, *, cores: int = 4, threads_per_core: int = 2, extra: dict[str, str] | None = None
) -> Path:
    """CPUs 0..n-1 are the cores' first threads, n.. their second ones, as Linux numbers them."""
    n = cores * threads_per_core
    files = {"sys/devices/system/cpu/online": f"0-{n - 1}\n", "proc/cpuinfo": "model name\t: Fast CPU\n"}
    for cpu in range(n):
        here = f"sys/devices/system/cpu/cpu{cpu}"
        siblings = ",".join(str(c) for c in range(cpu % cores, n, cores))
        files[f"{here}/topology/core_cpus_list"] = siblings
        files |= {f"{here}/cache/index0/{k}": v for k, v in cache(1, "32K", siblings).items()}
        half = range(0, n, 2) if cpu % 2 == 0 else range(1, n, 2)
        files |= {
            f"{here}/cache/index3/{k}": v for k, v in cache(3, "8192K", ",".join(map(str, half))).items()
        }
    return tree(root, files | (extra or {}))


def cache(level: int, size: str, shared: str) -> dict[str, str]:
    return {"level": str(level), "size": size, "type": "Unified", "shared_cpu_list": shared}


def test_threads_default_to_physical_cores_not_hyperthreads(tmp_path: Path) -> None:
    found = hardware.cores(machine(tmp_path), frozenset(range(8)))
    assert (found.logical, found.physical, found.usable_physical, found.threads) == (8, 4, 4, 4)
    assert found.name == "Fast CPU"


def test_affinity_to_two_threads_of_one_core_is_one_thread(tmp_path: Path) -> None:
    assert hardware.cores(machine(tmp_path), frozenset({1, 5})).threads == 1


@pytest.mark.parametrize(("quota", "threads"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_a_cgroup_quota_lowers_the_thread_count(tmp_path: Path, quota: str, threads: int) -> None:
    root = machine(tmp_path, extra={"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": quota})
    (root / "sys/fs/cgroup/a/b").mkdir()
    assert hardware.cores(root, frozenset(range(8))).threads == threads


def test_a_version_1_quota_is_found_at_the_mount_when_the_path_is_the_hosts(tmp_path: Path) -> None:
    quota = {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"}
    files = {f"sys/fs/cgroup/cpu/{k}": v for k, v in quota.items()}
    root = tree(tmp_path, {"proc/self/cgroup": "4:cpu,cpuacct:/docker/123\n", **files})
    assert hardware.cpu_quota(root) == 1.5


def test_several_last_level_caches_add_up_and_instruction_caches_do_not(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert hardware.cache_bytes(root, frozenset(range(8))) == 2 * 8192 * 1024
    assert hardware.cache_bytes(root, frozenset({0, 2})) == 8192 * 1024
    assert hardware.cache_bytes(tmp_path / "nothing", frozenset({0})) is None


MEMINFO = "MemTotal:  16777216 kB\nMemFree: 1 kB\nMemAvailable:  8388608 kB\n"


def test_free_memory_is_the_systems_without_a_cgroup(tmp_path: Path) -> None:
    assert hardware.available_memory(tree(tmp_path, {"proc/meminfo": MEMINFO})) == (8 * GIB, None)


def test_a_cgroup_limit_counts_inactive_file_pages_as_free(tmp_path: Path) -> None:
    group = {
        "memory.max": f"{4 * GIB}",
        "memory.high": "max",
        "memory.current": f"{3 * GIB}",
        "memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    files = {f"sys/fs/cgroup/a/{k}": v for k, v in group.items()}
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n", **files})
    room, why = hardware.available_memory(root)
    assert room == 2 * GIB
    assert why is not None and "cgroup" in why


def test_a_version_1_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    group = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}
    files = {f"sys/fs/cgroup/memory/{k}": v for k, v in group.items()}
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/x\n", **files})
    assert hardware.available_memory(root) == (8 * GIB, None)


def test_a_system_without_proc_is_unknown_not_an_error(tmp_path: Path) -> None:
    assert hardware.available_memory(tmp_path) == (None, None)
    found = hardware.cores(tmp_path, frozenset({0, 1}))
    assert found.threads >= 1
    assert hardware.cpu_quota(tmp_path) is None


def test_memory_in_huge_pages_is_read_from_the_sum_of_all_maps(tmp_path: Path) -> None:
    rollup = "56e-7ff ---p 00000000 00:00 0   [rollup]\nRss:  6320 kB\nAnonHugePages:  4096 kB\n"
    root = tree(tmp_path, {"proc/self/smaps_rollup": rollup})
    assert hardware.huge_page_bytes(root) == 4 << 20
    assert hardware.huge_page_bytes(tmp_path / "elsewhere") is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody says how much is used")
def test_a_limit_of_data_is_a_limit_of_memory() -> None:
    """`ulimit -d` was not in the memory plan: what was promised could not be had, and the process aborted."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (300 << 20,) * 2)\n"
        "from thermocline.machine import hardware\nfrom thermocline.cli import main as cli\n"
        "room, why = hardware.available_memory()\n"
        "assert room is not None and room < 300 << 20 and why == 'data limit (ulimit -d)', (room, why)\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (100 << 20,) * 2)\n"
        "raise SystemExit(cli.main(['run', 'Once', '-n', '3', '-q', '-t', '1']))"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 5 and "of memory" in ran.stderr, ran.stderr


def test_this_machine_is_plausible() -> None:
    found = hardware.cores()
    assert 1 <= found.threads <= found.usable_physical <= found.logical
    assert (hardware.available_bytes() or GIB) > 0
    assert (hardware.peak_rss_bytes() or GIB) > 1 << 20
    assert hardware.own_bytes() <= (hardware.peak_rss_bytes() or 0)


def test_what_a_process_holds_itself_is_not_what_files_are_mapped_to_it(tmp_path: Path) -> None:
    status = {"proc/self/status": "VmRSS:\t    900 kB\nRssAnon:\t    300 kB\nRssFile:\t    600 kB\n"}
    assert hardware.own_bytes(tree(tmp_path, status)) == 300 << 10
    assert hardware.own_bytes(tmp_path / "elsewhere") == 0


def test_memory_speed_is_measured_and_not_when_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = hardware.read_gbs(1, 0.02)
    assert speed is not None and 0.1 < speed < 10_000
    monkeypatch.setattr(hardware, "available_bytes", lambda: 1 << 20)
    assert hardware.read_gbs(1, 0.02) is None


def test_the_disk_probe_measures_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_speed, "LIMIT", 16 << 20)
    monkeypatch.setattr(disk_speed, "SEQUENTIAL_S", 0.05)
    monkeypatch.setattr(disk_speed, "RANDOM_S", 0.05)
    monkeypatch.setattr(disk_speed, "WRITE_S", 20.0)
    monkeypatch.setattr(disk_speed, "ARRANGED_BYTES", 1 << 20)
    monkeypatch.setattr(disk_speed, "ARRANGE_S", 0.02)
    found = disk_speed.measure_disk(tmp_path / "not" / "there" / "yet", threads=2)
    assert found.path == str(tmp_path)
    assert (found.sequential_gbs or 0) > 0 and (found.random_iops or 0) > 0
    assert (found.pieces_gbs or 0) > 0 and (found.arrange_gbs or 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_disk_is_said_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    found = disk_speed.measure_disk(tmp_path)
    assert found.sequential_gbs is None
    assert found.why is not None and "Permission denied" in found.why


def test_a_disk_that_fails_while_it_is_measured_is_said_not_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk_speed, "LIMIT", 16 << 20)
    monkeypatch.setattr(disk_speed, "WRITE_S", 20.0)
    monkeypatch.setattr(disk_speed, "_fill", lambda fd, limit, seconds: limit)  # nothing is there to be read
    found = disk_speed.measure_disk(tmp_path)
    assert found.sequential_gbs is None and found.why == "not measurable: the file ends early"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_gpu_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "no NVIDIA driver" in hardware.gpu(tmp_path).why
    assert "nvidia-smi is missing" in hardware.gpu(tree(tmp_path, {"proc/driver/nvidia/version": "x"})).why


@pytest.mark.parametrize(
    ("script", "found", "said"),
    [
        ("echo 'NVIDIA H200, 143771, 580.65.06'", True, ""),
        ("echo 'NVIDIA-SMI has failed'; exit 9", False, "has failed"),
        ("true", False, "no GPU listed"),
    ],
)
def test_nvidia_smi_is_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, found: bool, said: str
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(smi))
    gpu = hardware.gpu(tmp_path)
    assert gpu.found is found and said in gpu.why
    if found:
        assert gpu.names == ["NVIDIA H200"] and gpu.memory_bytes == [143771 << 20]
        assert gpu.driver == "580.65.06"


def test_the_first_nvidia_smi_may_take_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the driver where there is no persistence mode; the card was taken for absent then."""

    def slow(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        if timeout < 30:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0, "NVIDIA H200, 143771, 580.65.06", "")

    monkeypatch.setattr(shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(subprocess, "run", slow)
    assert hardware.gpu().found


def test_advice_names_what_holds_the_machine_back() -> None:
    cores = hardware.Cores("x", 8, 8, 2, 2, None, 2)
    isa = hardware.Isa("avx2", ["avx512", "avx2", "scalar"], {"avx2": True})
    memory = hardware.Memory(GIB, GIB, None, None, 10.0, 20.0, 2)
    quiet = hardware.Hardware(
        0.0, cores, isa, None, memory, disk_speed.DiskSpeed("/", None), hardware.GpuInfo(False, [], [], "")
    )
    lines = hardware.advice(quiet, "avx2")
    assert any("2 of 8 CPUs usable: affinity" in line for line in lines)
    assert any("THERMOCLINE_ISA=avx2 lowers it" in line for line in lines)
    content = replace(quiet, cores=replace(cores, logical=2), isa=replace(isa, chosen="avx512"))
    assert hardware.advice(content) == []


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (4, 2), (6, 4), (16, 14)])
def test_a_gpu_has_two_cores_to_itself_but_half_of_them_at_most(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "default_threads", lambda: cores)
    assert hardware.threads_beside_gpu() == threads
