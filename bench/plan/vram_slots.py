"""Play route traces over experts in VRAM: a fixed set by a profile, or slots that follow the text.

    python bench/plan/vram_slots.py TRACE.csv ... [--held 0.1 0.2 0.4] [--json]

The first half of a trace's decoded tokens is the profile ("own"), the second half is played. With "none", the
experts that come first in the file are in VRAM at first. An expert that is not there is computed by the CPU,
so that a miss need not be followed by an upload. Policies:

    fixed      the hottest of the profile; never an upload
    best fixed the hottest of the played half itself: no fixed set has more hits
    slots      the core's cache of experts, which uploads what it missed
    by cost N  after each token, the missed expert with the highest decayed frequency takes the place of the
               lowest, as long as that is expected to save N uses

`saved`: of the CPU's work for experts, what the GPU takes over, less an upload's cost in uses of an expert.
An upload reads the expert from RAM once, as the CPU's own product does: it costs 1 use where the link hides
it, and RAM's speed over the link's where nothing does (2.4: 60 and 25 GB/s, assumed).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline.files.bounded import read_small
from thermocline.offline.routing.route_trace import MAX_BYTES, read_route_trace
from thermocline.plan.disk.expert_hits import F32, Bool, missed, needs_of

HALF_LIFE, PRIOR = 16, 8  # the core's (csrc/storage/policy.h)
SAVES = (1.0, 2.0, 4.0, 8.0)  # uses that an upload must be expected to save
EXPOSED = 2.4  # uses that an upload costs where nothing hides it


@dataclass(frozen=True)
class Row:
    """What a policy makes of a trace's second half, mean over layers."""

    trace: str
    profile: str
    held: float
    policy: str
    hits: float  # of the requests
    upload_mb: float  # a token, of all layers
    saved: float  # of the CPU's work for experts, where links hide uploads
    saved_exposed: float  # where nothing does


def by_cost(needs: Bool, slots: int, likely: F32 | None, saves: float) -> tuple[int, int]:
    """(hits, uploads) of a layer whose slots begin with the likeliest experts; None: nobody knows which."""
    here = np.zeros(needs.shape[1], np.bool_)
    here[hottest(likely, len(here), slots)] = True
    prior, steps = (np.zeros(len(here)), 0) if likely is None else (PRIOR * likely, PRIOR)
    uses, decay = np.zeros(needs.shape[1]), 2 ** (-1 / HALF_LIFE)
    residence = 1 / (1 - decay)  # steps whose uses a decayed sum has, and as many are expected to come
    hits = uploads = 0
    for need in needs:
        hits += int(np.count_nonzero(need & here))
        uses = decay * uses + need
        rate = (prior + uses) / (steps + residence)  # uses a step
        while True:
            new = int(np.argmax(np.where(need & ~here, rate, -1.0)))
            old = int(np.argmin(np.where(here, rate, np.inf)))
            if here[new] or not need[new] or (rate[new] - rate[old]) * residence <= saves:
                break
            here[new], here[old] = True, False
            uploads += 1
    return hits, uploads


def hottest(likely: F32 | None, experts: int, slots: int) -> NDArray[np.intp]:
    """Return so many experts, the likeliest, or the first ones."""
    return np.argsort(np.zeros(experts) if likely is None else -likely, kind="stable")[:slots]


def rows_of(path: Path, helds: Sequence[float]) -> Iterator[Row]:
    """Yield each size and policy."""
    found = read_route_trace(path)
    head = read_small(path, MAX_BYTES)[:4000].decode()
    expert_bytes = int(re.findall(r"expert_bytes=(\d+)", head)[0])
    needs = [needs_of(x, found.experts) for x in found.chosen]
    half = len(needs[0]) // 2
    for held, profile in itertools.product(helds, ("own", "none")):
        slots, counts = round(held * found.experts), dict[str, list[tuple[int, int]]]()
        for need in needs:
            played = need[half:]
            likely = need[:half].mean(axis=0).astype(np.float32) if profile == "own" else None
            best = played.mean(axis=0).astype(np.float32)
            for name, order in (("fixed", likely), ("best fixed", best)):
                hits = int(played[:, hottest(order, found.experts, slots)].sum())
                counts.setdefault(name, []).append((hits, 0))
            misses = int(missed(played, slots, likely, found.chosen[0].shape[1]).sum())
            counts.setdefault("slots", []).append((int(played.sum()) - misses, misses))
            for saves in SAVES:
                counts.setdefault(f"by cost {saves:g}", []).append(by_cost(played, slots, likely, saves))
        requests = sum(int(n[half:].sum()) for n in needs)
        for name, each in counts.items():
            hits, uploads = (sum(x) for x in zip(*each, strict=True))
            mb = uploads * expert_bytes / (len(needs[0]) - half) / 1e6
            saved = [(hits - uses * uploads) / requests for uses in (1.0, EXPOSED)]
            yield Row(path.stem, profile, held, name, hits / requests, mb, *saved)


def main() -> None:
    """Print a table, or a line of JSON for each row."""
    arguments = argparse.ArgumentParser(description="experts in VRAM: fixed, or slots")
    arguments.add_argument("traces", nargs="+", type=Path)
    arguments.add_argument("--held", nargs="+", type=float, default=[0.1, 0.2, 0.4])
    arguments.add_argument("--json", action="store_true")
    o = arguments.parse_args()
    for path in o.traces:
        for r in rows_of(path, o.held):
            text = f"{r.trace:8} {r.held:4.0%} profile {r.profile:4} {r.policy:10} hits {r.hits:.3f}, "
            text += f"{r.upload_mb:7.1f} MB a token, saved {r.saved:.3f}, exposed {r.saved_exposed:.3f}"
            print(json.dumps(asdict(r)) if o.json else text)


if __name__ == "__main__":
    main()
