"""Measure how fast a directory's disk reads: large blocks in order, 4 KiB and 256 KiB blocks at random.

Each is measured three times, in turns, and the median counts: a shared disk's speed varies by half.
A measurement writes at most 256 MiB and takes about 4 s. Reads are direct if possible; the result says if
not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline._native import U64

CHUNK = 8 << 20
BLOCK = 2 << 20
PAGE = 4096
LIMIT = 256 << 20
SMALLEST = 16 << 20
PIECE = 256 << 10  # as experts are read
TIMES, WRITE_S, SEQUENTIAL_S, RANDOM_S, PIECES_S = 3, 1.2, 0.3, 0.2, 0.3
SEQUENTIAL_DEPTH, RANDOM_DEPTH, PIECES_DEPTH = (
    4,
    128,
    64,
)  # more is not faster on the disks measured (bench/disk/reads.py)


@dataclass(frozen=True)
class DiskSpeed:
    """The measured speeds of the disk under a path."""

    path: str
    free_bytes: int | None
    sequential_gbs: float | None = None  # 2 MiB blocks, 4 in flight
    random_iops: float | None = None  # 4 KiB blocks, 128 in flight
    pieces_gbs: float | None = None  # 256 KiB blocks at random, 64 in flight
    direct: bool = False  # False: the page cache helped, so the figures are upper bounds
    why: str | None = None  # the reason why there are no figures, or a caveat


def _fill(fd: int, limit: int, seconds: float) -> int:
    """Write random bytes and return their number. Each chunk is synced, to keep to the time on slow disks."""
    chunk = os.urandom(CHUNK)
    end = time.monotonic() + seconds
    written = 0
    while written < limit and time.monotonic() < end:
        written += os.write(fd, chunk)
        os.fsync(fd)
    return written


def _measure(path: Path, offsets: U64, nbytes: int, depth: int, seconds: float) -> tuple[float, bool]:
    """Return (reads per second of `nbytes` each, whether they went past the page cache)."""
    from thermocline import _native

    reader = _native.Reader(str(path), depth=depth, buffer_bytes=nbytes)
    start = time.monotonic()
    n, error = reader.measure(offsets, nbytes, seconds)
    if error:
        raise OSError(error, os.strerror(error) if error > 0 else "the file ends early")
    return n / (time.monotonic() - start), reader.alignment > 1


def sequential_gbs(path: Path, nbytes: int) -> tuple[float, bool]:
    """Read a file's first bytes in order, over and over: (GB/s, whether the disk itself was measured)."""
    import numpy as np

    blocks = np.arange(1 << 16, dtype=np.uint64) % np.uint64(nbytes // BLOCK)
    per_s, direct = _measure(path, blocks * np.uint64(BLOCK), BLOCK, SEQUENTIAL_DEPTH, SEQUENTIAL_S)
    return per_s * BLOCK / 1e9, direct


def _at_random(path: Path, nbytes: int, block: int, depth: int, seconds: float) -> float:
    """Return reads a second."""
    import numpy as np

    blocks = np.random.default_rng().integers(0, nbytes // block, 1 << 20, dtype=np.uint64)
    return _measure(path, blocks * np.uint64(block), block, depth, seconds)[0]


def _measured(path: Path, nbytes: int, times: int = TIMES) -> tuple[float, float, float, bool]:
    """Return medians of GB/s in order, 4 KiB reads a second and GB/s of pieces; whether all were direct."""
    every = []
    for _ in range(times):
        gbs, direct = sequential_gbs(path, nbytes)
        small = _at_random(path, nbytes, PAGE, RANDOM_DEPTH, RANDOM_S)
        pieces = _at_random(path, nbytes, PIECE, PIECES_DEPTH, PIECES_S)
        every.append((gbs, small, pieces * PIECE / 1e9, direct))
    gbs, small, pieces = (statistics.median(x[i] for x in every) for i in range(3))
    return gbs, small, pieces, all(x[3] for x in every)


def measure_file(path: Path, times: int = TIMES) -> DiskSpeed:
    """Measure the disk under an existing large file, in 0.8 s for each of `times`. Nothing is written."""
    try:
        size = path.stat().st_size // BLOCK * BLOCK
        if not size:
            return DiskSpeed(str(path), None, why="too small a file to measure with")
        return DiskSpeed(str(path), None, *_measured(path, size, times))
    except OSError as e:
        return DiskSpeed(str(path), None, why=f"not measurable: {e.strerror or e}")


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.is_dir()), Path("."))


def measure_disk(directory: Path) -> DiskSpeed:
    """Write a temporary file into `directory` (or its nearest existing parent), read it cold, remove it."""
    where = _existing(directory.absolute())
    free: int | None = None
    try:
        free = shutil.disk_usage(where).free
        if free < 4 * SMALLEST:
            return DiskSpeed(str(where), free, why="too little free space to measure")
        handle, name = tempfile.mkstemp(prefix=".thermocline-disk-", dir=where)
        try:
            with os.fdopen(handle, "wb", buffering=0):
                size = _fill(handle, min(LIMIT, free // 2), WRITE_S) // BLOCK * BLOCK
                if hasattr(os, "posix_fadvise"):  # empties the page cache, if direct reads are refused
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            if size < SMALLEST:
                return DiskSpeed(
                    str(where), free, why=f"writes too slowly to measure ({size >> 20} MiB in {WRITE_S} s)"
                )
            sequential, random_iops, pieces, direct = _measured(Path(name), size)
        finally:
            os.unlink(name)
    except OSError as e:
        return DiskSpeed(str(where), free, why=f"not measurable: {e.strerror or e}")
    except ImportError as e:
        return DiskSpeed(str(where), free, why=f"not measurable: {e}")
    why = None if direct else "direct I/O refused here: through the page cache, so an upper bound"
    return DiskSpeed(str(where), free, sequential, random_iops, pieces, direct, why)
