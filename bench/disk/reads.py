"""How fast a disk reads at random, by size, depth and method, and when one long read beats two short ones.

    python bench/disk/reads.py [--file FILE | --dir DIR --gib 4] [--rounds 5] [-o results.jsonl]

A round measures every combination once, direct. A table of the medians follows. The last lines: at the best
depth a read takes about a + b * bytes, so one more costs as much as a / b bytes; that is then tried, with
pairs of records and a gap between them, read at once or apart, in alternation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from thermocline import _native

KIB, GIB = 1 << 10, 1 << 30
METHODS = ("io_uring", "threads")
SIZES = [s * KIB for s in (4, 8, 16, 32, 64, 128, 256, 1024, 4096)]
DEPTHS = [1, 8, 32, 64, 128, 256]
IN_FLIGHT = 256 << 20  # bytes at most: more is only memory
RECORD = 8704  # of a 7B model in q8_0: an up row and a down column
GAPS = [g * KIB for g in (0, 4, 8, 16, 32, 64, 128)]


@dataclass(frozen=True)
class Reads:
    method: str
    nbytes: int
    depth: int
    per_s: float
    gb_per_s: float
    cpu_us: float  # of this process for each read, submission and completion


def offsets(rng: np.random.Generator, file_bytes: int, nbytes: int, count: int) -> _native.U64:
    return rng.integers(0, (file_bytes - nbytes) // 512, count).astype(np.uint64) * np.uint64(512)


def measure(reader: _native.Reader, at: _native.U64, nbytes: int, seconds: float) -> tuple[float, float]:
    """-> (reads a second, seconds of CPU a read)"""
    start, cpu = time.perf_counter(), time.process_time()
    n, error = reader.measure(at, nbytes, seconds)
    if error or not n:
        raise SystemExit(f"reading failed: {error}")
    return n / (time.perf_counter() - start), (time.process_time() - cpu) / n


def sweep(path: Path, o: argparse.Namespace) -> Iterator[Reads]:
    rng, size = np.random.default_rng(0), path.stat().st_size
    for nbytes, depth, method in itertools.product(o.sizes, o.depths, METHODS):
        if nbytes * depth <= IN_FLIGHT:
            reader = _native.Reader(str(path), depth=depth, buffer_bytes=nbytes, method=method)
            at = offsets(rng, size, nbytes, 1 << 18)
            measure(reader, at[:depth], nbytes, 1.0)  # its memory is there now
            per_s, cpu = measure(reader, at[depth:], nbytes, o.seconds)
            yield Reads(method, nbytes, depth, per_s, per_s * nbytes / 1e9, cpu * 1e6)


def medians(rounds: list[list[Reads]]) -> list[Reads]:
    out = []
    for same in zip(*rounds, strict=True):
        per_s, gb, cpu = (
            statistics.median(getattr(r, f) for r in same) for f in ("per_s", "gb_per_s", "cpu_us")
        )
        out.append(Reads(same[0].method, same[0].nbytes, same[0].depth, per_s, gb, cpu))
    return out


def show(found: list[Reads]) -> None:
    print(f"{'':9} {'KiB':>5} {'depth':>5} {'reads/s':>9} {'GB/s':>6} {'CPU us':>7}")
    for r in found:
        print(
            f"{r.method:9} {r.nbytes // KIB:5} {r.depth:5} {r.per_s:9.0f} {r.gb_per_s:6.2f} {r.cpu_us:7.1f}"
        )


def show_equal_gap(found: list[Reads]) -> None:
    """Print a / b of the fastest reads of each size up to 64 KiB: the bytes that one more read costs."""
    sizes = sorted({r.nbytes for r in found if r.nbytes <= 64 * KIB})
    if len(sizes) < 2:
        print("what a read costs is not fitted: that takes two --sizes up to 65536")
        return
    seconds = [1 / max(r.per_s for r in found if r.nbytes == s) for s in sizes]
    b, a = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    print(f"a read costs {a * 1e6:.1f} us and {b * 1e6 * KIB:.2f} us a KiB: as much as {a / b / KIB:.0f} KiB")


def pairs(path: Path, o: argparse.Namespace) -> None:
    """Two records with a gap between them: read at once, over read apart."""
    rng, size = np.random.default_rng(1), path.stat().st_size
    reader = _native.Reader(str(path), depth=o.pair_depth, buffer_bytes=2 * RECORD + max(GAPS))
    for gap in GAPS:
        ratios = []
        for _ in range(o.rounds):
            first = offsets(rng, size, 2 * RECORD + gap, 1 << 17)
            both = np.stack([first, first + np.uint64(RECORD + gap)], 1).ravel()
            apart, _ = measure(reader, both, RECORD, o.seconds)
            at_once, _ = measure(reader, first, 2 * RECORD + gap, o.seconds)
            ratios.append(2 * at_once / apart)
        quartiles = np.percentile(ratios, [25, 50, 75])
        print(
            f"gap {gap // KIB:4} KiB: at once {quartiles[1]:.2f} x as fast as apart "
            f"({quartiles[0]:.2f}-{quartiles[2]:.2f})"
        )


@contextmanager
def noise(directory: Path, nbytes: int) -> Iterator[Path]:
    """A file of noise, removed afterwards."""
    handle, name = tempfile.mkstemp(prefix="reads-", dir=directory)
    try:
        with os.fdopen(handle, "wb") as f:
            rng = np.random.default_rng(0)
            for _ in range(nbytes >> 24):
                f.write(rng.bytes(1 << 24))
            f.flush()
            os.fsync(f.fileno())
        yield Path(name)
    finally:
        os.unlink(name)


def run(path: Path, o: argparse.Namespace) -> None:
    print(_native.Reader(str(path), depth=1, buffer_bytes=1).how)
    found = medians([list(sweep(path, o)) for _ in range(o.rounds)])
    show(found)
    if o.output:
        with open(o.output, "a") as f:
            f.writelines(json.dumps(asdict(r)) + "\n" for r in found)
    show_equal_gap(found)
    pairs(path, o)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a large file to read, which stays")
    parser.add_argument("--dir", type=Path, default=Path("."), help="where to make one, which does not")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.25, help="of each measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--pair-depth", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path)
    o = parser.parse_args()
    if o.file:
        run(o.file, o)
        return
    with noise(o.dir, int(o.gib * GIB)) as path:
        run(path, o)


if __name__ == "__main__":
    main()
