"""Measure how fast a directory's disk reads: large blocks in order, 4 KiB and 256 KiB blocks at random.

Beside the first, threads check and arrange rows, as a model larger than memory has it: what the disk itself
takes of the processors counts.

A sample of the file is read once before: a virtual machine's host may fetch a file only when it is first
read, and an engine reads it again and again. Then each is measured three times, in turns, within the
sample, and the median counts: a shared disk's speed varies by half. A measurement writes at most 256 MiB and
takes about 5 s. Reads are direct if possible; the result says if not.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thermocline._native import U64

CHUNK = 8 << 20
BLOCK = 2 << 20
PAGE = 4096
LIMIT = 256 << 20
SMALLEST = 16 << 20
RUN = 4  # blocks of the sample that lie together
VARIES = 2  # times the slowest: a speed that varies more is said
REFUSED = "direct I/O refused here: through the page cache, so an upper bound"
PIECE = 256 << 10  # as experts are read
TIMES, WRITE_S, FIRST_S, SEQUENTIAL_S, RANDOM_S, PIECES_S, ARRANGE_S = 3, 1.2, 2.0, 0.3, 0.2, 0.3, 0.2
SEQUENTIAL_DEPTH, RANDOM_DEPTH, PIECES_DEPTH = (
    4,
    128,
    64,
)  # more is not faster on the disks measured (bench/disk/reads.py)
ARRANGED = "q4_0", 4096  # rows that are arranged: format and columns
ARRANGED_BYTES = 128 << 20  # four times what a stream of rows has under way


@dataclass(frozen=True)
class DiskSpeed:
    """The measured speeds of the disk under a path."""

    path: str
    free_bytes: int | None
    sequential_gbs: float | None = None  # 2 MiB blocks, 4 in flight
    random_iops: float | None = None  # 4 KiB blocks, 128 in flight
    pieces_gbs: float | None = None  # 256 KiB blocks at random, 64 in flight
    arrange_gbs: float | None = None  # rows that each thread checks and arranges, while the disk reads
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


@dataclass(frozen=True)
class TimedReads:
    """Reads of one measurement."""

    n: int
    seconds: float
    direct: bool

    @property
    def per_s(self) -> float:
        return self.n / self.seconds


def _measure(path: Path, offsets: U64, nbytes: int, depth: int, seconds: float) -> TimedReads:
    """Read `nbytes` at each of the offsets, in order, until none is left or the time is over."""
    from thermocline import _native

    reader = _native.Reader(str(path), depth=depth, buffer_bytes=nbytes)
    if reader.alignment <= 1:
        _forget(path)
    start = time.monotonic()
    n, error = reader.measure(offsets, nbytes, seconds)
    if error:
        raise OSError(error, os.strerror(error) if error > 0 else "the file ends early")
    return TimedReads(n, time.monotonic() - start, reader.alignment > 1)


def _forget(path: Path) -> None:
    """Empty the page cache of a file, which direct reads would pass by."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sample(nbytes: int) -> U64:
    """Return offsets of blocks: runs from all over a file, in any order, of at most LIMIT bytes together."""
    import numpy as np

    blocks = nbytes // BLOCK
    runs = -(-min(blocks, LIMIT // BLOCK) // RUN)
    first = np.random.default_rng(0).permutation(np.linspace(0, max(blocks - RUN, 0), runs).astype(np.uint64))
    every = (first[:, None] + np.arange(min(RUN, blocks), dtype=np.uint64)).ravel()
    return every * np.uint64(BLOCK)


def _round(path: Path, sample: U64) -> tuple[float, float, float]:
    """Return GB/s in order, 4 KiB reads a second and GB/s of pieces, all within a sample's blocks."""
    import numpy as np

    random = np.random.default_rng()

    def at_random(nbytes: int, depth: int, seconds: float) -> float:
        within = random.integers(0, BLOCK // nbytes, 1 << 20, dtype=np.uint64) * np.uint64(nbytes)
        return _measure(path, random.choice(sample, len(within)) + within, nbytes, depth, seconds).per_s

    gbs = (
        _measure(path, np.resize(sample, 1 << 16), BLOCK, SEQUENTIAL_DEPTH, SEQUENTIAL_S).per_s * BLOCK / 1e9
    )
    small = at_random(PAGE, RANDOM_DEPTH, RANDOM_S)
    return gbs, small, at_random(PIECE, PIECES_DEPTH, PIECES_S) * PIECE / 1e9


def _arranging(path: Path, sample: U64, threads: int) -> float:
    """Return the GB/s of rows that each thread checks and arranges while the disk reads."""
    import numpy as np

    from thermocline import _native

    at = np.resize(sample, 1 << 16)
    with ThreadPoolExecutor(1) as beside:
        reads = beside.submit(_measure, path, at, BLOCK, SEQUENTIAL_DEPTH, 2 * ARRANGE_S)
        speed = _native.arranging_gbs(*ARRANGED, ARRANGED_BYTES, threads, ARRANGE_S)
        reads.result()
    return speed


def _measured(path: Path, found: DiskSpeed, nbytes: int, times: int, threads: int) -> DiskSpeed:
    """Return `found` with the medians of so many rounds in a sample that has been read before.

    `threads`: those that arrange rows; 0: that is not measured.
    """
    sample = _sample(nbytes)
    first = _measure(path, sample, BLOCK, SEQUENTIAL_DEPTH, FIRST_S)
    sample = sample[: first.n]  # of a slow disk, as much as it read
    gbs, small, pieces = zip(*(_round(path, sample) for _ in range(times)), strict=True)
    arranging = [_arranging(path, sample, threads) for _ in range(times if threads else 0)]
    notes = (
        None if first.direct else REFUSED,
        _varies("{:.2f}", "GB/s in order", gbs, first.per_s * BLOCK / 1e9),
        _varies("{:.2f}", "GB/s in pieces of 256 KiB", pieces),
        _varies("{:,.0f}", "reads/s of 4 KiB", small),
    )
    return replace(
        found,
        sequential_gbs=statistics.median(gbs),
        random_iops=statistics.median(small),
        pieces_gbs=statistics.median(pieces),
        arrange_gbs=statistics.median(arranging) if arranging else None,
        direct=first.direct,
        why="; ".join(filter(None, notes)) or None,
    )


def _varies(number: str, unit: str, rounds: Sequence[float], first: float | None = None) -> str | None:
    """Return a note where the speeds of the rounds, and of what was read first, are far apart."""
    every = [*rounds, first or rounds[0]]
    if max(every) <= VARIES * min(every):
        return None
    low, high, counts = (number.format(x) for x in (min(every), max(every), statistics.median(rounds)))
    slow = " where nobody has read it lately" if first == min(every) else ""
    return f"this disk's speed varies: {low}{slow} to {high} {unit}; {counts} counts"


def measure_file(path: Path, times: int = TIMES, *, threads: int = 0) -> DiskSpeed:
    """Measure the disk under an existing large file, in 0.8 s for each of `times`. Nothing is written.

    A sample of at most 256 MiB is read before, in 2 s at most. With `threads` these arrange rows beside it,
    in 0.4 s each time.
    """
    found = DiskSpeed(str(path), None)
    try:
        size = path.stat().st_size // BLOCK * BLOCK
        if not size:
            return replace(found, why="too small a file to measure with")
        return _measured(path, found, size, times, threads)
    except OSError as e:
        return replace(found, why=f"not measurable: {e.strerror or e}")


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.is_dir()), Path("."))


def measure_disk(directory: Path, *, threads: int = 0) -> DiskSpeed:
    """Write a temporary file into `directory` (or its nearest existing parent), read it cold, remove it.

    With `threads` these arrange rows beside it.
    """
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
            if size < SMALLEST:
                return DiskSpeed(
                    str(where), free, why=f"writes too slowly to measure ({size >> 20} MiB in {WRITE_S} s)"
                )
            return _measured(Path(name), DiskSpeed(str(where), free), size, TIMES, threads)
        finally:
            os.unlink(name)
    except OSError as e:
        return DiskSpeed(str(where), free, why=f"not measurable: {e.strerror or e}")
    except ImportError as e:
        return DiskSpeed(str(where), free, why=f"not measurable: {e}")
