"""`bench --trace` and `bench --replay`: which neurons tokens need, and the hits of caches for them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.commands.bench import BENCH_FORMATS, CACHE_POLICIES, BenchOptions
from thermocline.cli.console import INTERRUPTED, ProgressBar, emit
from thermocline.cli.packs import find_pack
from thermocline.cli.table import markdown_row, size
from thermocline.errors import UsageError
from thermocline.session.options import EngineOptions

if TYPE_CHECKING:
    from thermocline.offline.need_trace import Trace
    from thermocline.offline.replay import ReplayCounts
    from thermocline.pack.pack import Pack
    from thermocline.plan.disk.cache_split import Share
    from thermocline.plan.problem import Problem
    from thermocline.plan.subject import Subject

log = logging.getLogger(__name__)

SWEEP = tuple(range(10, 100, 10))  # percent of the neurons


def record(o: BenchOptions) -> int:
    """Write the tokens that are recorded when Ctrl-C comes like the whole."""
    from thermocline.machine import hardware
    from thermocline.offline import bench as benchmark
    from thermocline.offline import need_trace

    if o.replay is not None:
        raise UsageError("--trace and --replay are both given: record first, then replay the file")
    assert o.trace is not None
    _check_unused(
        o, ("gpu", "vram", "read_budget", "disable"), "--trace records what the CPU computes, exactly"
    )
    target = Path(o.trace)
    need_trace.check_target(target)
    with ProgressBar(quiet=o.quiet) as progress:
        pack = _packed(o, progress)
        need_trace.check_sparse(pack.spec)
        if o.n_gen[0] == 0:
            raise UsageError("-n is 0: no token to record")
        test = benchmark.Test(o.threads[0] or hardware.default_threads(), o.n_depth[0], 0, o.n_gen[0])
        benchmark.check_context(pack.spec, [test])
        feed = benchmark.feed_of(pack, [test], o.text, o.seed)
        options = EngineOptions(
            sparsity=o.sparsity, ram=o.ram, cache_type_k=o.cache_type_k, cache_type_v=o.cache_type_v
        )
        bench = benchmark.Bench(pack, [test], feed, options, progress.at)
        a = bench.session.arrangement
        gates_there = not bench.session.from_disk or (a is not None and a.gates is None)
        if pack.spec.up_activation == "relu" and not gates_there:
            raise UsageError(
                "dReLU's trace needs every gate in memory; give more --ram, or leave out --sparsity predict"
            )
        recorder = need_trace.TraceRecorder(test.threads, pack.spec, bench.engine.model.weights.layers)
        interrupted = False
        try:
            bench.watch(test, recorder)
        except KeyboardInterrupt:
            interrupted = True
        made = need_trace.Trace.of(recorder, feed.name, o.sparsity, test.given)
        if made.tokens == 0:
            raise KeyboardInterrupt
        need_trace.write_trace(target, pack, made)
    log.info(f"recorded {made.tokens} tokens of {made.source} into {target}, {size(made.nbytes)}")
    return INTERRUPTED if interrupted else 0


def _check_unused(o: BenchOptions, names: Sequence[str], why: str) -> None:
    """Raise UsageError if an option is set that changes nothing of what is asked for."""
    for name in names:
        if getattr(o, name) not in (None, "off", ()):
            raise UsageError(f"--{name.replace('_', '-')}: {why}; leave it out")


def _packed(o: BenchOptions, progress: ProgressBar) -> Pack:
    from thermocline.pack.pack import Pack

    return Pack.open(
        find_pack(o.model, progress, activation=o.activation, format=o.format, cache=o.cache_dir)
    )


# ---- replay


@dataclass(frozen=True)
class Case:
    """A size of the cache. `budget`: the GiB that the shares come from; None: the shares were asked for."""

    budget: float | None
    shares: Sequence[Share]


def replay(o: BenchOptions) -> int:
    from thermocline.offline import need_trace, profile_plot

    assert o.replay is not None
    _check_unused(
        o,
        ("ram", "gpu", "vram", "read_budget", "disable"),
        "--replay runs no model: --budgets are its memory",
    )
    if o.plot is not None:
        profile_plot.check(Path(o.plot))
    with ProgressBar(quiet=o.quiet) as progress:
        pack = _packed(o, progress)
        need_trace.check_sparse(pack.spec)
        found = need_trace.read_trace(Path(o.replay), pack)
        if o.batch > found.tokens:
            raise UsageError(f"--batch {o.batch}: {o.replay} has {found.tokens} tokens")
        problem, frequency = _problem(o, pack, found)
        cases = _cases(o, pack, found)
        rows = list(_rows(o, found, problem, frequency, cases, progress))
    if o.plot is not None:
        profile_plot.draw_replay(rows, Path(o.plot), pack.path.name, found.source)
    text = replay_text(rows) if o.output_format == "md" else "".join(BENCH_FORMATS[o.output_format](rows))
    emit(text)
    return 0


def _problem(o: BenchOptions, pack: Pack, found: Trace) -> tuple[Problem, list[Any]]:
    """Return (the problem that gives a step's time, each layer's frequencies by the profile, in order)."""
    import numpy as np

    from thermocline.plan import subject as subjects
    from thermocline.plan.hotness import Curve
    from thermocline.plan.problem import Ask, Problem

    subject = subjects.of_pack(pack.path, found.sparsity, Curve())
    ask = Ask(found.depth + found.tokens, batch=o.batch, sparsity=found.sparsity)
    tiers = _tiers(o, pack, subject)
    problem = Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask)
    heat = subject.hotness
    if not heat.ordered:
        log.warning(
            f"{pack.path}: has no profile, so its neurons are in no order; run `thermocline profile` first"
        )
    nothing = np.zeros(found.neurons)
    return problem, [heat.at(i, 1) if heat.ordered else nothing for i in range(pack.spec.n_layers)]


def _tiers(o: BenchOptions, pack: Pack, subject: Subject) -> Any:
    from thermocline.machine import disk_speed, hardware, this_machine
    from thermocline.machine.tiers import read_tiers

    if o.hardware is None:
        measured = disk_speed.measure_disk(pack.path, threads=hardware.threads_for(o.threads[0]))
        tiers = this_machine.tiers_here(o.threads[0], disk=measured, formats=subject.sizes.formats)
        why = f": {measured.why}" if measured.why else ""
    else:
        tiers, why = read_tiers(o.hardware), ""
    if assumed := tiers.assumed(subject.sizes.formats):
        log.warning(assumed)
    if tiers.disk is None:
        raise UsageError(f"{tiers.name}: no disk was measured{why}; give --hardware FILE with one")
    return tiers


def _cases(o: BenchOptions, pack: Pack, found: Trace) -> list[Case]:
    from thermocline.machine import hardware
    from thermocline.offline.replay import even_shares
    from thermocline.pack.predictor import predictors_for
    from thermocline.plan.budget import without_gpu
    from thermocline.plan.disk.cache_split import Share
    from thermocline.plan.memory import GIB, Needs

    parts, neurons = pack.spec.n_layers * found.experts, pack.spec.ffn_dim
    if not o.budgets:
        return [Case(None, even_shares(neurons, parts, p / 100)) for p in SWEEP]
    predictors = predictors_for(pack, found.sparsity)
    cases = []
    for gib in o.budgets:
        needs = Needs(
            found.sparsity,
            context=found.depth + found.tokens,
            max_batch=o.batch,
            threads=o.threads[0] or hardware.default_threads(),
            budget=int(gib * GIB),
            limit="allowed",
        )
        a = without_gpu(pack, predictors, needs).arrangement
        cases.append(Case(gib, [Share(neurons, 0)] * parts if a is None else a.bundles))
    return cases


def _rows(
    o: BenchOptions,
    found: Trace,
    problem: Problem,
    frequency: Sequence[Any],
    cases: Sequence[Case],
    progress: ProgressBar,
) -> Iterator[dict[str, Any]]:
    from thermocline.offline.replay import replay as play
    from thermocline.plan.disk.cache_split import Share

    policies = o.policy or CACHE_POLICIES
    total = len(cases) * len(policies)
    for i, (case, policy) in enumerate((c, p) for c in cases for p in policies):
        progress.at("replaying", i, total, " caches")
        counts = play(found, case.shares, frequency, policy, o.batch)
        free = [Share(0, s.places) for s in case.shares]
        pinned = any(s.hot and s.quota for s in case.shares) and policy != "pinned"
        unpinned = play(found, free, frequency, policy, o.batch).hit_rate if pinned else counts.hit_rate
        yield _row(case, policy, found, o.batch, problem, counts) | {"hit_rate_unpinned": unpinned}
    progress.at("replaying", total, total, " caches")


def _row(
    case: Case, policy: str, found: Trace, batch: int, problem: Problem, counts: ReplayCounts
) -> dict[str, Any]:
    import numpy as np

    from thermocline.offline.replay import times

    took = times(problem, counts)
    fed, n = list(problem.spec.ffn_layers), found.experts
    neurons, steps = found.neurons * len(fed), len(counts.needed)
    record = problem.sizes.layers[fed[0]].record_bytes
    shares = [s for i in fed for s in case.shares[i * n : (i + 1) * n]]
    return {
        "policy": policy,
        "budget_gib": case.budget,
        "places": sum(s.places for s in shares) / neurons,
        "pinned": sum(s.hot for s in shares) / neurons,
        "hit_rate": counts.hit_rate,
        "disk_bytes_per_token": int(counts.missed.sum()) * record / (steps * batch),
        "tokens_per_s": batch * took.tokens_per_s,
        "mean_ms": float(took.us.mean()) / 1e3,
        "p99_ms": float(np.percentile(took.us, 99)) / 1e3,
        "waiting_share": float(took.waited_us.sum() / took.us.sum()),
        "active_fraction": float(counts.needed[:, fed].mean()) / found.neurons,
        "tokens": steps * batch,
        "batch": batch,
        "source": found.source,
        "hardware": problem.tiers.name,
    }


def replay_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table for a person: a row for each policy and size of the cache."""
    first = rows[0]
    titles = ["budget", "in memory", "pinned", "policy", "hits", "unpinned", "MB/token"]
    lines = [[*titles, "tok/s", "mean ms", "P99 ms", "waiting"]]
    for r in rows:
        budget = "" if r["budget_gib"] is None else f"{r['budget_gib']:g} GiB"
        shares = [f"{r[key]:.1%}" for key in ("places", "pinned")]
        hits = [f"{r['hit_rate']:.1%}", f"{r['hit_rate_unpinned']:.1%}"]
        speed = [f"{r['disk_bytes_per_token'] / 1e6:.3g}", f"{r['tokens_per_s']:.2f}"]
        speed += [f"{r['mean_ms']:.1f}", f"{r['p99_ms']:.1f}", f"{r['waiting_share']:.0%}"]
        lines.append([budget, *shares, r["policy"], *hits, *speed])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "".join(markdown_row(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in lines[:1])
    text += markdown_row("-" * (w - 1) + ":" for w in widths)
    text += "".join(
        markdown_row(f"{c:>{w}}" for c, w in zip(line, widths, strict=True)) for line in lines[1:]
    )
    facts = [f"{first['tokens']} tokens of {first['source']}", f"batch {first['batch']}"]
    facts += [f"{first['active_fraction']:.1%} of neurons needed", f"times predicted for {first['hardware']}"]
    return f"{text}\n{' · '.join(facts)}\n"
