"""Facts about this machine: cores, instruction sets, memory, disk and GPU, with measured speeds.

A fact that the system does not offer is None and is printed as "unknown"; nothing is guessed. `root` is the
directory that holds /proc and /sys (tests use a tree of their own).
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.errors import ThermoclineError
from thermocline.machine.disk_speed import DiskSpeed, measure_disk

if TYPE_CHECKING:
    from thermocline import _native

ROOT = Path("/")
NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
ROOF_SECONDS = 0.1
ROOF_BYTES = 1 << 30  # the most bytes that one pass reads: 0.03 to 0.1 s
SMI_S = 60  # without persistence mode, the first nvidia-smi loads the driver: over ten seconds
DOCTOR_SECONDS = 0.3  # where the roof is the result, not the measure of another figure


@dataclass(frozen=True)
class Cores:
    """`threads` is the default thread count: the physical cores this process may use within its quota."""

    name: str | None
    logical: int
    physical: int | None
    usable_logical: int
    usable_physical: int
    quota: float | None  # CPUs' worth of time the cgroup grants
    threads: int


@dataclass(frozen=True)
class Isa:
    """The instruction set that the native core uses, and those that this CPU supports."""

    chosen: str
    levels: list[str]  # supported levels, best first
    features: dict[str, bool]


@dataclass(frozen=True)
class Memory:
    """The memory of this machine and its measured speed."""

    total_bytes: int | None
    available_bytes: int | None
    limited_by: str | None  # the limit that makes `available` less than the system's free memory
    cache_bytes: int | None  # last-level cache that the usable cores reach
    read_gbs_1_thread: float | None
    read_gbs: float | None  # with `threads`
    threads: int


@dataclass(frozen=True)
class GpuInfo:
    """The GPUs that the driver lists."""

    found: bool
    names: list[str]
    memory_bytes: list[int]
    why: str  # the reason why none is found or usable
    driver: str = ""  # its version
    note: str = ""  # what is slower on the first than on others


@dataclass(frozen=True)
class Hardware:
    """All facts that `doctor` prints."""

    load: float | None  # the mean number of running processes in the last minute
    cores: Cores
    isa: Isa | None
    native_error: str | None  # the reason why the native module does not load
    memory: Memory
    disk: DiskSpeed
    gpu: GpuInfo


# ---- small files


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _int(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _fields_kib(path: Path) -> dict[str, int]:
    """Read lines of the form `Name:  123 kB` into bytes by name."""
    out = {}
    for line in (_text(path) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            out[name] = int(words[0]) * 1024
    return out


def _cpu_list(text: str | None) -> frozenset[int]:
    """Parse a list of CPUs: `0-3,8` gives {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in (text or "").split(","):
        low, _, high = part.partition("-")
        if low.strip().isdigit():
            cpus |= set(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def _sysctl(name: str) -> int | None:
    if sys.platform != "darwin":
        return None
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    return _int(done.stdout.strip())


def _cgroups(root: Path, controller: str) -> list[tuple[Path, int]]:
    """Return (directory, cgroup version) of this process's group and its parents, innermost first.

    In a container the path may be the host's and not exist. The walk up then ends at the container's mount.
    """
    found: list[tuple[Path, int]] = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, names, path = parts
        if names == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in names.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        here = base / path.lstrip("/")
        while True:
            if here.is_dir():
                found.append((here, version))
            if here == base or base not in here.parents:
                break
            here = here.parent
    return found


# ---- cores


def affinity() -> frozenset[int]:
    """Return the CPUs that this process may run on."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' worth of time the cgroups grant; None without a limit."""
    quotas = []
    for group, version in _cgroups(root, "cpu"):
        if version == 2:
            words = (_text(group / "cpu.max") or "max").split()
            limit, period = _int(words[0]), _int(words[1]) if len(words) > 1 else 100_000
        else:
            limit = _int(_text(group / "cpu.cfs_quota_us"))
            period = _int(_text(group / "cpu.cfs_period_us"))
        if limit is not None and limit > 0 and period:
            quotas.append(limit / period)
    return min(quotas, default=None)


def _siblings(cpu: int, root: Path) -> frozenset[int] | None:
    """Return the hardware threads of a CPU's core; None if the system does not say."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    cpus = _cpu_list(_text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list"))
    return cpus or None


def _physical(cpus: frozenset[int], root: Path) -> int | None:
    cores = {_siblings(cpu, root) for cpu in cpus}
    return None if None in cores else len(cores)


def _cpu_name(root: Path) -> str | None:
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def cores(root: Path = ROOT, usable: frozenset[int] | None = None) -> Cores:
    """Return the cores of this machine. `usable` are the CPUs this process may use; None: by affinity."""
    usable = affinity() if usable is None else usable
    online = _cpu_list(_text(root / "sys/devices/system/cpu/online"))
    logical = len(online) or os.cpu_count() or len(usable)
    physical = _physical(online, root) if online else _sysctl("hw.physicalcpu")
    usable_physical = _physical(usable, root) or min(physical or len(usable), len(usable))
    quota = cpu_quota(root)
    threads = usable_physical if quota is None else min(usable_physical, max(1, int(quota)))
    return Cores(_cpu_name(root), logical, physical, len(usable), usable_physical, quota, threads)


def default_threads() -> int:
    return cores().threads


def threads_for(asked: int) -> int:
    """Return the threads that a command asks for, or with 0 the default."""
    return asked if asked > 0 else default_threads()


def threads_beside_gpu() -> int:
    """Return the threads that compute beside a GPU: one core queues and waits, one is the driver's.

    A thread that waits for a core holds up all others at each barrier. Half of the cores compute in any case.
    """
    threads = default_threads()
    return max(threads - 2, (threads + 1) // 2)


def isa() -> Isa:
    import thermocline._native as _native

    return Isa(_native.isa(), list(_native.isa_levels()), dict(_native.cpu_features()))


# ---- memory


class _WindowsMemory(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_ulong),
        ("load", ctypes.c_ulong),
        ("total", ctypes.c_ulonglong),
        ("available", ctypes.c_ulonglong),
        ("rest", ctypes.c_ulonglong * 5),
    )


def _windows_memory() -> tuple[int | None, int | None]:
    status = _WindowsMemory(length=ctypes.sizeof(_WindowsMemory))
    kernel32 = getattr(ctypes, "windll").kernel32  # noqa: B009  (mypy knows windll on Windows only)
    if not kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return int(status.total), int(status.available)


def _system_memory(root: Path) -> tuple[int | None, int | None]:
    """Return the system's (total, available) bytes of memory."""
    info = _fields_kib(root / "proc/meminfo")
    if info:
        return info.get("MemTotal"), info.get("MemAvailable", info.get("MemFree"))
    if sys.platform == "win32":
        return _windows_memory()
    return _sysctl("hw.memsize"), None


def _cgroup_available(group: Path, version: int) -> int | None:
    """Return the bytes that a cgroup leaves: limit - usage + inactive file pages, which are freed first."""
    if version == 2:
        limits = [_int(_text(group / name)) for name in ("memory.max", "memory.high")]
        limit = min((n for n in limits if n is not None), default=None)
        usage, inactive_key = _int(_text(group / "memory.current")), "inactive_file "
    else:
        limit = _int(_text(group / "memory.limit_in_bytes"))
        usage, inactive_key = _int(_text(group / "memory.usage_in_bytes")), "total_inactive_file "
    if limit is None or usage is None or limit >= NO_LIMIT:
        return None
    stat = (_text(group / "memory.stat") or "").splitlines()
    inactive = next((_int(line.split()[1]) for line in stat if line.startswith(inactive_key)), 0) or 0
    return max(0, limit - usage + inactive)


def _rlimit_available(root: Path, limit_name: str, used_name: str) -> int | None:
    """Return the bytes that a limit of this process leaves; None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(getattr(resource, limit_name))
    used = _fields_kib(root / "proc/self/status").get(used_name)
    if limit == resource.RLIM_INFINITY or used is None:
        return None
    return max(0, limit - used)


def available_memory(root: Path = ROOT) -> tuple[int | None, str | None]:
    """Return (bytes that can still be allocated, the limit that applies or None for the system's memory)."""
    _, free = _system_memory(root)
    limits: list[tuple[int | None, str | None]] = [(free, None)]
    limits += [(_cgroup_available(g, v), f"cgroup {g}") for g, v in _cgroups(root, "memory")]
    limits.append((_rlimit_available(root, "RLIMIT_AS", "VmSize"), "address space limit (ulimit -v)"))
    limits.append((_rlimit_available(root, "RLIMIT_DATA", "VmData"), "data limit (ulimit -d)"))
    known = [(nbytes, why) for nbytes, why in limits if nbytes is not None]
    return min(known, key=lambda r: r[0], default=(None, None))


def available_bytes() -> int | None:
    """Return the bytes that this process can still allocate; None if the system does not say."""
    return available_memory()[0]


def own_bytes(root: Path = ROOT) -> int:
    """Return the memory that this process holds and no file has; 0 if the system does not say."""
    return _fields_kib(root / "proc/self/status").get("RssAnon", 0)


def peak_rss_bytes() -> int | None:
    """Return the most memory that this process has held; None if the system does not say."""
    if peak := _fields_kib(ROOT / "proc/self/status").get("VmHWM"):
        return peak
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def huge_page_bytes(root: Path = ROOT) -> int | None:
    """Return this process's bytes in huge pages (2 MiB or more); None if the system does not say."""
    return _fields_kib(root / "proc/self/smaps_rollup").get("AnonHugePages")


def cache_bytes(root: Path = ROOT, usable: frozenset[int] | None = None) -> int | None:
    """Return the bytes of last-level cache that the usable CPUs reach. Several caches add up."""
    shares: dict[frozenset[int], tuple[int, int]] = {}  # CPUs that share it -> (level, bytes)
    for cpu in affinity() if usable is None else usable:
        for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size = _int(_text(index / "level")), _text(index / "size") or ""
            if level is None or not size.endswith("K") or _text(index / "type") == "Instruction":
                continue
            who = _cpu_list(_text(index / "shared_cpu_list")) or frozenset({cpu})
            shares[who] = max(shares.get(who, (0, 0)), (level, int(size[:-1]) * 1024))
    if not shares:
        return _sysctl("hw.l3cachesize") or _sysctl("hw.l2cachesize")
    last = max(level for level, _ in shares.values())
    return sum(size for level, size in shares.values() if level == last)


def read_gbs(threads: int, seconds: float = ROOF_SECONDS) -> float | None:
    """Measure the memory's read speed in GB/s. None if memory is too scarce.

    The test reads 16 times the last-level cache. With 4 times, the cache makes the figure 20 % too high (a
    cache of 32 MiB: 50 GB/s over 128 MiB, 42 over 512 MiB and over 2 GiB).
    """
    import thermocline._native as _native

    cache = cache_bytes() or 32 << 20
    nbytes = min(16 * cache, ROOF_BYTES)
    available = available_bytes()
    if available is not None and nbytes > available // 4:
        return None
    return float(_native.read_bandwidth(nbytes, threads, seconds))


def read_gbs_of(
    arena: _native.Arena, begin: int, end: int, threads: int, seconds: float = ROOF_SECONDS
) -> float | None:
    """Measure the GB/s of reading bytes [begin, end) of an arena. None if they are too few to measure.

    No memory is allocated. At least one pass is made, so only as many bytes are read as the caches cannot
    hold.
    """
    import thermocline._native as _native

    end = min(end, begin + max(16 * (cache_bytes() or 0), ROOF_BYTES))
    if end - begin < _native.limits().measured_bytes:
        return None
    return float(arena.read_bandwidth(begin, end, threads, seconds))


def measure_memory(threads: int) -> Memory:
    total, _ = _system_memory(ROOT)
    available, why = available_memory()
    one = read_gbs(1, DOCTOR_SECONDS)
    several = one if threads == 1 else read_gbs(threads, DOCTOR_SECONDS)
    return Memory(total, available, why, cache_bytes(), one, several, threads)


# ---- GPU


def gpu(root: Path = ROOT) -> GpuInfo:
    """List the GPUs. NVIDIA's driver answers through nvidia-smi, without loading a GPU library."""
    smi = shutil.which("nvidia-smi")
    driver = (root / "proc/driver/nvidia/version").exists()
    if smi is None:
        why = "driver loaded, but nvidia-smi is missing" if driver else "no NVIDIA driver found"
        return GpuInfo(False, [], [], why)
    query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return GpuInfo(False, [], [], f"nvidia-smi does not answer ({e})")
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines() if line.count(",") >= 2]
    if done.returncode != 0 or not rows:
        said = (done.stdout + done.stderr).strip().splitlines()
        return GpuInfo(False, [], [], f"nvidia-smi: {said[0] if said else 'no GPU listed'}")
    sizes = [(_int(mib.strip()) or 0) << 20 for _, mib, _ in rows]
    return GpuInfo(True, [name.strip() for name, _, _ in rows], sizes, "", rows[0][2].strip())


# ---- all of it


def measure(disk_dir: Path, threads: int = 0) -> Hardware:
    """Measure everything that `doctor` prints, in a few seconds, most of them for the disk."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    machine = cores()
    threads = threads if threads > 0 else machine.threads
    native_error, levels = None, None
    try:
        levels = isa()
        memory = measure_memory(threads)
    except (ImportError, ThermoclineError) as e:
        native_error = str(e)
        total, _ = _system_memory(ROOT)
        memory = Memory(total, *available_memory(), cache_bytes(), None, None, threads)
    disk = measure_disk(disk_dir, threads=0 if native_error else threads)
    return Hardware(load, machine, levels, native_error, memory, disk, gpu())


def advice(h: Hardware, isa_variable: str | None = None) -> list[str]:
    """Return advice: one sentence for each thing that slows this machine down."""
    lines = []
    c = h.cores
    if h.native_error:
        lines.append(f"the native module does not load ({h.native_error}): reinstall with `pip install .`")
    if c.usable_logical < c.logical:
        lines.append(
            f"{c.usable_logical} of {c.logical} CPUs usable: affinity (taskset, cpuset or a container)"
        )
    if c.quota is not None and c.quota < c.usable_physical:
        lines.append(
            f"{c.quota:g} CPUs' worth of time granted, {c.usable_physical} cores usable: cgroup CPU quota"
        )
    if h.isa is not None:
        best = h.isa.levels[0]
        if h.isa.chosen != best:
            reason = f"THERMOCLINE_ISA={isa_variable} lowers it" if isa_variable else "not chosen"
            lines.append(f"{best} is present, {h.isa.chosen} is used: {reason}")
    if h.memory.limited_by:
        lines.append(f"memory is limited: {h.memory.limited_by}")
    one, several = h.memory.read_gbs_1_thread, h.memory.read_gbs
    if h.load is not None and h.load > 0.3:
        lines.append(f"the machine is busy (load {h.load:.1f}): the speeds measured are lower bounds")
    elif one and several and h.memory.threads > 1 and several < 1.1 * one:
        lines.append("more threads do not read memory faster: 1 thread may do for large models")
    return lines


def from_cache(weights_bytes: int, cache_bytes: int | None, share: float | None) -> bool:
    """Return whether the weights are read from the cache, so that memory speed is no bound.

    They are if they fit, or if they nearly fit and are read faster than memory.
    """
    if cache_bytes is None:
        return False
    return weights_bytes <= cache_bytes or (
        share is not None and share > 1 and weights_bytes < 4 * cache_bytes
    )
