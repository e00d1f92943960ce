"""Does `plan` tell the truth? Its tokens per second beside measured ones, run by run, on this machine's CPU.

    python bench/plan/plan_honesty.py PACK... [--threads 1 2] [--rounds 7] [--tokens 48]
        [--sparsity exact predict]

Memory that is shared with neighbours changes its speed within seconds, so the hardware is measured before and
after every run, as `doctor` does it, and each run is compared with the plan for the mean of both; modes of
sparsity take turns. Runs during which other processes took over 5 % of the processors, or around which the
kernels' speed changed by over 15 %, are left out, whatever they show; how many is said. A sparse pack without
a profile is profiled in memory, over random tokens, and `predict` uses the predictors that it has. One JSON
line a pack, mode and thread count goes to stdout, a summary to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.machine import hardware, this_machine
from thermocline.machine.tiers import CpuTier, Kernel, Tiers
from thermocline.offline.activity import UNIT, ProfileWorker, count_passages
from thermocline.offline.bench import Bench, feed_of, tests_of
from thermocline.offline.corpus import CONTEXT, random_corpus
from thermocline.pack.activity_profile import BUCKETS, Profile
from thermocline.pack.pack import Pack
from thermocline.plan import subject as subjects
from thermocline.plan.hotness import Curve, profiled
from thermocline.plan.planner import plan
from thermocline.plan.problem import Ask
from thermocline.session.options import EngineOptions

OTHERS, UNSTEADY = 0.05, 1.15


def tiers_between(before: Kernel, after: Kernel, roof: float, weight_format: str, threads: int) -> Tiers:
    gbs, gflops = (before.gbs + after.gbs) / 2, (before.gflops + after.gflops) / 2
    cpu = CpuTier(1 << 40, roof, threads, hardware.cache_bytes() or 1, {weight_format: Kernel(gbs, gflops)})
    return Tiers("this machine", "bench/plan/plan_honesty.py", cpu, None, None)


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


def profile_of(pack: Pack, bench: Bench, threads: int, tokens: int) -> Profile:
    """What `thermocline profile --tokens` would count, of the weights that are loaded already."""
    corpus = random_corpus(pack, tokens, CONTEXT, UNIT)
    worker = ProfileWorker.on_cpu(pack.spec, bench.engine.model.weights, corpus.prefix, CONTEXT, threads, [])
    none = [np.empty(0, np.int64)] * len(corpus.passages)
    passages = [found.counts for found in count_passages([worker], corpus.passages, none)]
    counts = np.sum(passages, axis=0)
    shape = (len(BUCKETS), pack.spec.n_experts, pack.spec.ffn_dim)
    windows = tuple(sum(len(p) // b for p in corpus.passages) for b in BUCKETS)
    return Profile(BUCKETS, windows, corpus.tokens, corpus.sha256, tuple(c.reshape(shape) for c in counts))


@dataclass(frozen=True)
class Subjects:
    """A loaded pack, and what `plan` knows of it in each mode."""

    pack: Pack
    bench: Bench
    by_mode: dict[str, subjects.Subject]

    @staticmethod
    def of(path: Path, threads: int, tokens: int, modes: Sequence[str], counted: int) -> Subjects:
        pack = Pack.open(path)
        tests = tests_of(prompts=[], gens=[tokens], pairs=[], depths=[0], threads=[threads])
        most = "predict" if "predict" in modes else modes[0]
        feed = feed_of(pack, tests, None, 1)
        bench = Bench(pack, tests, feed, EngineOptions(sparsity=most), lambda *_: None)
        by_mode = {m: subjects.of_pack(path, m, Curve(None, 0.26)) for m in modes}
        if pack.spec.sparse and not by_mode[modes[0]].hotness.measured:
            found = profile_of(pack, bench, threads, counted)
            by_mode = {
                m: replace(s, hotness=replace(profiled(found), excess=s.hotness.excess))
                for m, s in by_mode.items()
            }
        bench.warm_up()
        return Subjects(pack, bench, by_mode)


def runs_of(x: Subjects, rounds: int, tokens: int, seconds: float) -> tuple[dict[str, list[Any]], int]:
    """(each mode's runs, how many were disturbed)"""
    test, weight_format = x.bench.tests[0], x.pack.weight_format
    arena = this_machine.kernel_arena(hardware.cache_bytes() or this_machine.DEFAULT_CACHE_BYTES, 1 << 40)

    def kernel() -> tuple[Kernel, float]:
        found = this_machine.measure_kernels(test.threads, [weight_format], arena)[weight_format]
        return found, hardware.read_gbs(test.threads, 0.2) or found.gbs

    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in x.by_mode}
    disturbed, end, after = 0, time.monotonic() + seconds, kernel()
    while min(map(len, runs.values())) < rounds and time.monotonic() < end:
        for mode, subject in x.by_mode.items():
            x.bench.engine.sparsity = mode
            others = Others()
            before, sample, after = after, x.bench.sample(test), kernel()
            share, change = others.share(), after[0].gbs / before[0].gbs
            if share > OTHERS or not 1 / UNSTEADY < change < UNSTEADY:
                disturbed += 1
                continue
            roof = (before[1] + after[1]) / 2
            tiers = tiers_between(before[0], after[0], roof, weight_format, test.threads)
            ask = Ask(tokens, sparsity=mode)
            made = plan(x.pack.spec, subject.sizes, subject.hotness, tiers, ask)
            runs[mode].append(
                {
                    "measured_ts": 1e9 * tokens / sample.ns,
                    "predicted_ts": made.predicted[1].tokens_per_s,
                    "kernel_gbs": tiers.kernel(weight_format).gbs,
                    "kernel_gflops": tiers.kernel(weight_format).gflops,
                    "kernel_gbs_change": change,
                    "others_share": share,
                    "roof_gbs": roof,
                    **fractions(sample.figures),
                }
            )
    return runs, disturbed


def fractions(figures: Any) -> dict[str, float]:
    return {name: getattr(figures, name) for name in ("rows_fraction", "predicted_fraction")}


def rows_of(x: Subjects, rounds: int, tokens: int, seconds: float) -> Iterator[dict[str, Any]]:
    found, disturbed = runs_of(x, rounds, tokens, seconds)
    for mode, runs in found.items():
        if not runs:
            raise SystemExit(f"{x.pack.path}: {disturbed} runs, all disturbed or unsteady; try again")
        ratios = [r["predicted_ts"] / r["measured_ts"] for r in runs]
        yield {
            "pack": x.pack.path.name,
            "format": x.pack.weight_format,
            "sparsity": mode,
            "threads": x.bench.tests[0].threads,
            "cpu": hardware.cores().name,
            "isa": hardware.isa().chosen,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hotness": x.by_mode[mode].hotness.source,
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
    parser.add_argument("--sparsity", nargs="+", default=["exact"])
    parser.add_argument("--counted", type=int, default=1024, help="tokens of the profile made in memory")
    args = parser.parse_args()
    for path in args.packs:
        for threads in args.threads:
            subjects = Subjects.of(path, threads, args.tokens, args.sparsity, args.counted)
            for row in rows_of(subjects, args.rounds, args.tokens, args.seconds):
                print(json.dumps(row), flush=True)
                print(summary(row), file=sys.stderr)


def summary(row: dict[str, Any]) -> str:
    return (
        f"{row['pack']}, {row['sparsity']}, {row['threads']} threads: "
        f"measured {row['measured_ts']:.2f} tok/s, predicted {row['predicted_ts']:.2f}; "
        f"{len(row['runs'])} runs (of all modes {row['disturbed']} disturbed), "
        f"ratio of a run {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})"
    )


if __name__ == "__main__":
    main()
