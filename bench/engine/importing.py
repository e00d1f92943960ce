"""How long `thermocline pack` takes for a GGUF, beside reading and writing its bytes, in alternating runs.

    python bench/engine/importing.py --gguf FILE --dir DIR [--format F] [--rounds 3]

A round: a plain copy of the file into DIR (16 MiB at a time, synced), then an import into DIR in a process
of its own, whose peak memory is asked for; each after the file is dropped from the page cache. What they
write is removed.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

BUFFER = 16 << 20


def forget(path: Path) -> None:
    """Out of the page cache, so that the next reader asks the disk."""
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(src: Path, dst: Path) -> float:
    start = time.perf_counter()
    with open(src, "rb", buffering=0) as f, open(dst, "wb", buffering=0) as out:
        buffer = memoryview(bytearray(BUFFER))
        while n := f.readinto(buffer):
            out.write(buffer[:n])
        os.fsync(out.fileno())
    return time.perf_counter() - start


def pack(src: Path, dst: Path, format: str | None) -> float:
    arguments = ["pack", str(src), "-o", str(dst), "-q", *(["--format", format] if format else [])]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "thermocline", *arguments], check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", required=True, type=Path)
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--format")
    parser.add_argument("--rounds", type=int, default=3)
    o = parser.parse_args()
    copied, packed, ratios = o.dir / "copied.bin", o.dir / "packed", []
    for _ in range(o.rounds):
        forget(o.gguf)
        reading = copy(o.gguf, copied)
        copied.unlink()
        forget(o.gguf)
        importing = pack(o.gguf, packed, o.format)
        size = sum(p.stat().st_size for p in packed.iterdir())
        shutil.rmtree(packed)
        ratios.append(importing / reading)
        print(
            f"copy {reading:.1f} s, import {importing:.1f} s: {ratios[-1]:.2f} times; "
            f"{o.gguf.stat().st_size / 1e9:.1f} GB in, {size / 1e9:.1f} GB out"
        )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"median {statistics.median(ratios):.2f} times; peak memory of an import {peak:.0f} MiB")


if __name__ == "__main__":
    main()
