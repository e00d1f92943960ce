#!/usr/bin/env python3
"""Touch memory, so that a virtual machine whose RAM grows as it is used has it: grow_ram.py GIB.

A child touches it, and may be killed for it: nothing else is lost then.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

GIB = 1 << 30
PIECE = bytes([1]) * (64 << 20)
SPARE_GIB, PATIENCE_S = (
    1.5,
    10.0,
)  # that shall be left before each GiB; memory may come later than it is asked for


def available_gib() -> float:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) / 2**20 for words in lines if words[0] == "MemAvailable:")


def touch(gib: int) -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")  # rather this process than another
    held = []
    for _ in range(gib):
        end = time.monotonic() + PATIENCE_S
        while available_gib() < SPARE_GIB and time.monotonic() < end:
            time.sleep(0.1)
        if available_gib() < SPARE_GIB:
            break
        held.append(mmap.mmap(-1, GIB))
        for at in range(0, GIB, len(PIECE)):
            held[-1][at : at + len(PIECE)] = PIECE


def main() -> int:
    gib = int(float(sys.argv[1]))
    before = available_gib()
    if (child := os.fork()) == 0:
        touch(gib)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(f"RAM available: {before:.1f} GiB, then {available_gib():.1f} GiB (status {status})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
