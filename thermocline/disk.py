"""How fast a directory's disk reads: large blocks in order, and 4 KiB blocks at random.

Bounded: at most 256 MiB written and about 3 s. Direct I/O where possible, said where not.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK = 8 << 20
BLOCK = 2 << 20  # one huge page: one segment of a disk request; from 4 KiB pages the same disk gives half
PAGE = 4096
LIMIT = 256 << 20
SMALLEST = 16 << 20
WRITE_S, SEQUENTIAL_S, RANDOM_S = 1.2, 0.7, 0.5
SEQUENTIAL_THREADS, RANDOM_THREADS = 4, 16


@dataclass(frozen=True)
class Disk:
    path: str
    free_bytes: int | None
    sequential_gbs: float | None = None  # 2 MiB blocks, 4 in flight
    random_iops: float | None = None  # 4 KiB blocks, 16 in flight; Python's own cost bounds it near 200k
    direct: bool = False  # False: the page cache helped, so the figures are upper bounds
    why: str | None = None  # why there are no figures, or how to read them


def _fill(fd: int, limit: int, seconds: float) -> int:
    """Write noise, each chunk synced so that a slow disk cannot overrun the time. -> bytes written."""
    chunk = os.urandom(CHUNK)
    end = time.monotonic() + seconds
    written = 0
    while written < limit and time.monotonic() < end:
        written += os.write(fd, chunk)
        os.fsync(fd)
    return written


def open_cold(path: Path) -> tuple[int, bool]:
    """Open for reading past the page cache. -> (fd, whether that worked)."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):  # tmpfs and some network disks refuse O_DIRECT
            return os.open(path, os.O_RDONLY | direct), True
    fd = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd, False


def _buffer(nbytes: int) -> mmap.mmap:
    """Page-aligned, as direct reads need it; of huge pages where there are such."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, nbytes)
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _read(fd: int, offsets: Callable[[], Iterator[int]], nbytes: int, threads: int, seconds: float) -> float:
    """Blocks per second that `threads` readers get. Each reads into its own buffer."""
    end = time.monotonic() + seconds

    def reader(mine: Iterator[int]) -> int:
        done = 0
        with _buffer(nbytes) as buffer:
            for offset in mine:
                if time.monotonic() >= end or os.preadv(fd, [buffer], offset) != nbytes:
                    break
                done += 1
        return done

    from concurrent.futures import (
        ThreadPoolExecutor,
    )  # 10 ms (it brings logging) that `run` need not wait for

    start = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        blocks = sum(pool.map(reader, [offsets() for _ in range(threads)]))
    return blocks / (time.monotonic() - start)


def sequential_gbs(fd: int, size: int) -> float:
    """GB/s of reading a file of `size` bytes in order, over and over."""
    blocks = itertools.count()  # shared: next() is one step under the interpreter's lock

    def in_order() -> Iterator[int]:
        return ((n % (size // BLOCK)) * BLOCK for n in blocks)

    return _read(fd, in_order, BLOCK, SEQUENTIAL_THREADS, SEQUENTIAL_S) * BLOCK / 1e9


def _random_iops(fd: int, size: int) -> float:
    def at_random() -> Iterator[int]:
        dice = random.Random()
        return (dice.randrange(size // PAGE) * PAGE for _ in itertools.repeat(None))

    return _read(fd, at_random, PAGE, RANDOM_THREADS, RANDOM_S)


def measure_file(path: Path) -> Disk:
    """As `measure_disk`, over a large file that is there: nothing is written."""
    if not hasattr(os, "preadv"):
        return Disk(str(path), None, why="not measurable on this system (no preadv)")
    try:
        fd, direct = open_cold(path)
        with os.fdopen(fd, "rb", buffering=0):
            size = os.fstat(fd).st_size // BLOCK * BLOCK
            if not size:
                return Disk(str(path), None, why="too small a file to measure with")
            return Disk(str(path), None, sequential_gbs(fd, size), _random_iops(fd, size), direct)
    except OSError as e:
        return Disk(str(path), None, why=f"not measurable: {e.strerror or e}")


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.is_dir()), Path("."))


def measure_disk(directory: Path) -> Disk:
    """Write a temporary file into `directory` (or its nearest existing parent), read it cold, remove it."""
    where = _existing(directory.absolute())
    free: int | None = None
    if not hasattr(os, "preadv"):
        return Disk(str(where), free, why="not measurable on this system (no preadv)")
    try:
        stat = os.statvfs(where)
        free = stat.f_bavail * stat.f_frsize
        if free < 4 * SMALLEST:
            return Disk(str(where), free, why="too little free space to measure")
        handle, name = tempfile.mkstemp(prefix=".thermocline-disk-", dir=where)
        try:
            with os.fdopen(handle, "wb", buffering=0):
                size = _fill(handle, min(LIMIT, free // 2), WRITE_S) // BLOCK * BLOCK
            if size < SMALLEST:
                return Disk(
                    str(where), free, why=f"writes too slowly to measure ({size >> 20} MiB in {WRITE_S} s)"
                )
            fd, direct = open_cold(Path(name))
            with os.fdopen(fd, "rb", buffering=0):
                sequential, random_iops = sequential_gbs(fd, size), _random_iops(fd, size)
        finally:
            os.unlink(name)
    except OSError as e:
        return Disk(str(where), free, why=f"not measurable: {e.strerror or e}")
    why = None if direct else "direct I/O refused here: through the page cache, so an upper bound"
    return Disk(str(where), free, sequential, random_iops, direct, why)
