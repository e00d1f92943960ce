"""Does `plan` tell the truth? Its tokens per second beside measured ones, run by run, on this machine's CPU.

    python bench/plan_honesty.py PACK... [--threads 1 2] [--rounds 7] [--tokens 48] [--sparsity exact]

Memory that is shared with neighbours changes its speed within seconds, so the hardware is measured before and
after every run, as `doctor` does it, and each run is compared with the plan for the mean of both. Runs during
which other processes took over 3 % of the processors are left out, whatever they show; how many is said. One
JSON line a pack and thread count goes to stdout, a summary to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from thermocline import hardware, machine, plan_file
from thermocline.bench import Bench, feed_of, tests_of
from thermocline.pack import Pack
from thermocline.plan import plan
from thermocline.problem import Ask
from thermocline.tiers import Cpu, Kernel, Tiers


def tiers_between(before: Kernel, after: Kernel, roof: float, weight_format: str, threads: int) -> Tiers:
    gbs, gflops = (before.gbs + after.gbs) / 2, (before.gflops + after.gflops) / 2
    cpu = Cpu(1 << 40, roof, threads, hardware.cache_bytes() or 1, {weight_format: Kernel(gbs, gflops)})
    return Tiers("this machine", "bench/plan_honesty.py", cpu, None, None)


class Others:
    """The share of this machine's processors that other processes take; 0 where the system does not say."""

    def __init__(self) -> None:
        self.begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        stat = Path("/proc/stat")
        jiffies = [int(n) for n in stat.read_text().splitlines()[0].split()[1:]] if stat.exists() else [0] * 8
        busy = (sum(jiffies[:3]) + sum(jiffies[5:8])) / os.sysconf("SC_CLK_TCK")
        return busy, time.process_time(), time.perf_counter()

    def share(self) -> float:
        busy, own, wall = (b - a for a, b in zip(self.begin, self._now(), strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))


def measure(
    path: Path, threads: int, rounds: int, tokens: int, sparsity: str, curve: plan_file.Curve, seconds: float
) -> dict[str, Any]:
    pack = Pack.open(path)
    subject = plan_file.of_pack(path, sparsity, curve)
    tests = tests_of(prompts=[], gens=[tokens], pairs=[], depths=[0], threads=[threads])
    bench = Bench(pack, tests, feed_of(pack, tests, None, 1), sparsity=sparsity, progress=lambda *_: None)
    bench.warm_up()
    cache, ram = hardware.cache_bytes() or machine.DEFAULT_CACHE_BYTES, 1 << 40
    weight_format = pack.weight_format

    def kernel() -> tuple[Kernel, float]:
        found = machine.measure_kernels(threads, [weight_format], cache, ram)[weight_format]
        return found, hardware.read_gbs(threads, 0.2) or found.gbs

    runs: list[dict[str, float]] = []
    disturbed, end = 0, time.monotonic() + seconds
    while len(runs) < rounds and time.monotonic() < end:
        others = Others()
        before, sample, after = kernel(), bench.sample(tests[0]), kernel()
        if others.share() > 0.03:
            disturbed += 1
            continue
        roof = (before[1] + after[1]) / 2
        tiers = tiers_between(before[0], after[0], roof, weight_format, threads)
        made = plan(pack.spec, subject.sizes, subject.hotness, tiers, Ask(tokens, sparsity=sparsity))
        runs.append(
            {
                "measured_ts": 1e9 * tokens / sample.ns,
                "predicted_ts": made.predicted[1].tokens_per_s,
                "kernel_gbs": tiers.kernel(weight_format).gbs,
                "kernel_gbs_change": after[0].gbs / before[0].gbs,
                "roof_gbs": roof,
            }
        )
    if not runs:
        raise SystemExit(f"{path}: {disturbed} runs, all disturbed by other processes; try again")
    ratios = [r["predicted_ts"] / r["measured_ts"] for r in runs]
    return {
        "pack": path.name,
        "format": weight_format,
        "sparsity": sparsity,
        "threads": threads,
        "cpu": hardware.cores().name,
        "isa": hardware.isa().chosen,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "disturbed": disturbed,
        "measured_ts": statistics.median(r["measured_ts"] for r in runs),
        "predicted_ts": statistics.median(r["predicted_ts"] for r in runs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packs", nargs="+", type=Path)
    parser.add_argument("--threads", nargs="+", type=int, default=[hardware.default_threads()])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=50, help="for each pack and thread count")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--sparsity", default="exact")
    parser.add_argument("--active", type=float, help="planted, of a random pack (synth --active)")
    parser.add_argument("--skew", type=float, default=0.26)
    args = parser.parse_args()
    curve = plan_file.Curve(args.active, args.skew)
    for path in args.packs:
        for threads in args.threads:
            row = measure(path, threads, args.rounds, args.tokens, args.sparsity, curve, args.seconds)
            print(json.dumps(row), flush=True)
            print(summary(row), file=sys.stderr)


def summary(row: dict[str, Any]) -> str:
    return (
        f"{row['pack']}, {row['threads']} threads: measured {row['measured_ts']:.2f} tok/s, "
        f"predicted {row['predicted_ts']:.2f}; {len(row['runs'])} runs ({row['disturbed']} disturbed), "
        f"ratio of a run {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
    )


if __name__ == "__main__":
    main()
