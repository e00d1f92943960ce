"""How fast `weights.load` reads a pack, as a share of what the disk gives, in alternating runs.

    python bench/engine/load.py -m PACK [--rounds 7] [--cached]

A round: the disk alone (direct reads of the same file into a few buffers), then a load into fresh memory, as
a user's is, then one more into the same memory. The two differ by what the system takes to hand out memory:
nearly nothing, but the host of a virtual machine may have to find it first, and be slower at that than the
disk (LOG 2026-11-21).
`--cached` reads the file into the page cache first.
"""

from __future__ import annotations

import argparse
import statistics
import time

from thermocline import _native
from thermocline.machine import disk_speed
from thermocline.pack.pack import Pack
from thermocline.session import weights


def disk_gbs(pack: Pack) -> float:
    gbs, direct = disk_speed.sequential_gbs(pack.weights_path, pack.weights_bytes)
    if not direct:
        print("direct reads are refused here: the page cache helps the disk's figure")
    return gbs


def load_gbs(pack: Pack) -> tuple[float, float]:
    arena = _native.Arena(pack.weights_bytes)

    def fill_gbs() -> float:
        start = time.perf_counter()
        weights.fill(arena, pack)
        return pack.weights_bytes / (time.perf_counter() - start) / 1e9

    return fill_gbs(), fill_gbs()


def fill_cache(pack: Pack) -> None:
    with open(pack.weights_path, "rb", buffering=0) as f:
        while f.read(16 << 20):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cached", action="store_true")
    o = parser.parse_args()
    pack, rounds = Pack.open(o.model), []
    if o.cached:
        fill_cache(pack)
    for _ in range(o.rounds):
        measured = disk_gbs(pack), *load_gbs(pack)
        rounds.append(measured)
        print("disk {:.2f}  load {:.2f}  again {:.2f} GB/s".format(*measured), flush=True)
    disk_alone, *loads = zip(*rounds, strict=True)
    print(f"medians: disk {statistics.median(disk_alone):.2f} GB/s")
    for what, gbs in zip(("load", "again"), loads, strict=True):
        shares = sorted(one / raw for one, raw in zip(gbs, disk_alone, strict=True))
        share, low, high = statistics.median(shares), shares[0], shares[-1]
        print(f"{what} {statistics.median(gbs):.2f} GB/s: {share:.0%} of the disk ({low:.0%} to {high:.0%})")


if __name__ == "__main__":
    main()
