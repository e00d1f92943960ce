"""`thermocline bench`: llama-bench's tests, columns and keys, beside the memory's own speed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import INTERRUPTED, ProgressBar, emit
from thermocline.cli.packs import find_model
from thermocline.cli.shared_options import (
    bounded_reads,
    cache_directory,
    cache_type_keys,
    cache_type_values,
    gpu_memory,
    ram_limit,
    sparsity_mode,
    switched_off,
    weight_format,
    which_activation,
    which_gpu,
    which_model,
)
from thermocline.cli.table import finite, markdown_row, size
from thermocline.options import REPEATED, counts, nonempty, one_of, opt, pair, reals, some_of, switch, whole

if TYPE_CHECKING:
    from thermocline.offline.bench import Bench

CACHE_POLICIES = ("pinned", "lru", "s3fifo", "lfu", "belady")
BENCH_OUTPUTS = ("md", "csv", "json", "jsonl")


@dataclass(frozen=True)
class BenchOptions:
    """Measure prompt and token speed, beside the memory speed of the same run."""

    model: str | None = which_model(positional=False)
    format: str | None = weight_format("Weight format of what is packed into the cache.")
    activation: str | None = which_activation()
    cache_dir: str | None = cache_directory()
    threads: tuple[int, ...] = opt(
        (0,), counts(0, 1024), "N,...", "Model", "Threads to compute with; a test is repeated for each.",
        flags="-t", shown="0 = the physical cores this process may use"
    )  # fmt: skip
    sparsity: str = sparsity_mode()
    ram: float | None = ram_limit()
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    read_budget: float | None = bounded_reads()
    disable: tuple[str, ...] = switched_off()
    cache_type_k: str = cache_type_keys()
    cache_type_v: str = cache_type_values()

    n_prompt: tuple[int, ...] = opt(
        (512,), counts(0), "N,...", "Tests", "Prompt tokens, computed together; 0 leaves this test out.",
        flags="-p", shown="512"
    )  # fmt: skip
    n_gen: tuple[int, ...] = opt(
        (128,), counts(0), "N,...", "Tests", "Tokens, generated one by one; 0 leaves this test out.",
        flags="-n", shown="128"
    )  # fmt: skip
    pg: tuple[tuple[int, int], ...] = opt(
        (), pair, "PP,TG", "Tests", "A prompt of PP tokens, then TG generated ones. May be repeated.",
        flags="-pg", given=REPEATED
    )  # fmt: skip
    n_depth: tuple[int, ...] = opt(
        (0,), counts(0), "N,...", "Tests", "Tokens already in the context; each test is repeated for each.",
        flags="-d", shown="0"
    )  # fmt: skip
    repetitions: int = opt(5, whole(1, 10000), "N", "Tests", "How often each test is run.", flags="-r")
    text: str | None = opt(
        None,
        nonempty,
        "FILE",
        "Tests",
        "Feed this text, which decides what is sparse.",
        shown="random tokens",
    )
    seed: int = opt(1, whole(0, 2**63 - 1), "N", "Tests", "Seed of the random tokens.", flags="-s")

    trace: str | None = opt(
        None, nonempty, "FILE", "Neurons on disk",
        "Instead of tests: generate -n tokens after -d and record which neurons each needs.", shown="none"
    )  # fmt: skip
    replay: str | None = opt(
        None, nonempty, "FILE", "Neurons on disk",
        "Instead of tests: play a trace through caches; the model does not run.", shown="none"
    )  # fmt: skip
    policy: tuple[str, ...] = opt(
        (), some_of(*CACHE_POLICIES), ",".join(CACHE_POLICIES), "Neurons on disk",
        "With --replay: who leaves a full cache. pinned: nobody; belady: who is needed last, the optimum.",
        shown="all"
    )  # fmt: skip
    budgets: tuple[float, ...] = opt(
        (), reals(0, 1e6), "GIB,...", "Neurons on disk", "With --replay: as --ram, several.",
        shown="places for 10 to 90 % of the neurons"
    )  # fmt: skip
    batch: int = opt(
        1, whole(1, 64), "N", "Neurons on disk", "With --replay: decode N parts of the trace side by side."
    )  # fmt: skip
    hardware: str | None = opt(
        None, nonempty, "FILE|NAME", "Neurons on disk",
        "With --replay: what `thermocline doctor -o FILE` wrote; it must have a disk.",
        shown="this machine, measured now"
    )  # fmt: skip
    plot: str | None = opt(
        None, nonempty, "FILE", "Neurons on disk",
        "With --replay: draw hit rates over the cache's size into a .png, .svg or .pdf.", shown="none"
    )  # fmt: skip

    output_format: str = opt(
        "md", one_of(*BENCH_OUTPUTS), "|".join(BENCH_OUTPUTS), "Output", "How results are printed.",
        flags="-o --output"
    )  # fmt: skip
    quiet: bool = opt(False, switch, None, "Output", "No progress bars.", flags="-q")


def bench(o: BenchOptions) -> int:
    from thermocline.cli.commands import bench_trace
    from thermocline.offline import bench as benchmark

    if o.trace is not None or o.replay is not None:
        return bench_trace.replay(o) if o.trace is None else bench_trace.record(o)

    interrupted = False

    def rows() -> Iterator[dict[str, Any]]:
        """Yield rows until Ctrl-C; those that were measured by then are printed."""
        nonlocal interrupted
        try:
            yield from benchmark.rows(loaded, o.repetitions)
        except KeyboardInterrupt:
            interrupted = True

    with ProgressBar(quiet=o.quiet) as progress, contextlib.closing(open_bench(o, progress)) as loaded:
        for text in BENCH_FORMATS[o.output_format](rows()):
            emit(text)
    return INTERRUPTED if interrupted else 0


def open_bench(o: BenchOptions, progress: ProgressBar) -> Bench:
    """Open the model for its tests. A test that cannot be run is refused before the weights are read."""
    from thermocline.machine import hardware
    from thermocline.offline import bench as benchmark
    from thermocline.session.options import EngineOptions

    model = find_model(o.model, progress, activation=o.activation, format=o.format, cache=o.cache_dir)
    tests = benchmark.tests_of(
        prompts=o.n_prompt,
        gens=o.n_gen,
        pairs=o.pg,
        depths=o.n_depth,
        threads=[t or hardware.default_threads() for t in o.threads],
    )
    benchmark.check_context(model.spec, tests)
    feed = benchmark.feed_of(model, tests, o.text, o.seed)
    options = EngineOptions(
        sparsity=o.sparsity,
        ram=o.ram,
        disable=o.disable,
        read_budget=o.read_budget,
        gpu=o.gpu,
        vram=o.vram,
        cache_type_k=o.cache_type_k,
        cache_type_v=o.cache_type_v,
    )
    return benchmark.Bench(model, tests, feed, options, progress.at)


# ---- rows in, text as llama-bench prints it out, each row as it comes

Rows = Iterable[dict[str, Any]]
SAMPLES = ("samples_ns", "samples_ts")  # lists: in JSON only, as llama-bench has it


def bench_json(rows: Rows) -> Iterator[str]:
    before = "[\n"
    for row in rows:
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in finite(row).items()]
        yield before + "  {\n" + ",\n".join(lines) + "\n  }"
        before = ",\n"
    yield "\n]\n" if before == ",\n" else "[\n]\n"


def bench_jsonl(rows: Rows) -> Iterator[str]:
    for row in rows:
        yield json.dumps(finite(row)) + "\n"


def bench_csv(rows: Rows) -> Iterator[str]:
    for i, row in enumerate(rows):
        cells = {key: value for key, value in row.items() if key not in SAMPLES}
        text = io.StringIO()
        if i == 0:
            text.write(",".join(cells) + "\n")
        writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow([int(v) if isinstance(v, bool) else "" if v is None else v for v in cells.values()])
        yield text.getvalue()


BenchColumn = tuple[str, int, Callable[[dict[str, Any]], str]]  # title, width (below 0: left), a row's cell
BENCH_COLUMNS: tuple[BenchColumn, ...] = (
    ("model", -30, lambda r: r["model_type"]),
    ("size", 10, lambda r: _binary(r["model_size"])),
    ("params", 10, lambda r: _decimal(r["model_n_params"])),
    ("backend", -10, lambda r: r["backends"]),
    ("threads", 7, lambda r: str(r["n_threads"])),
    ("test", 15, lambda r: r["test"]),
    ("t/s", 20, lambda r: f"{r['avg_ts']:.2f} ± {r['stddev_ts']:.2f}"),
    ("median", 9, lambda r: f"{r['median_ts']:.2f}"),
    ("first s", 7, lambda r: _known(r["first_token_s"], "{:.3f}")),
    ("MB/token", 9, lambda r: _known(r["bytes_per_token"], "{:.2f}", 1e-6)),
    ("GB/s", 6, lambda r: _known(r["gb_per_s"], "{:.1f}")),
    ("roof", 6, lambda r: _known(r["roof_gb_per_s"], "{:.1f}")),
    ("of roof", 7, lambda r: "cache" if r["from_cache"] else _known(r["roof_share"], "{:.0%}")),
    ("python", 6, lambda r: _known(r["python_share"], "{:.1%}")),
)

DISK_COLUMNS: tuple[BenchColumn, ...] = (
    ("in memory", 9, lambda r: _known(r["cache_hit_rate"], "{:.1%}")),
    ("disk MB", 8, lambda r: _known(r["disk_bytes_per_token"], "{:.2f}", 1e-6)),
    ("disk GB/s", 9, lambda r: _known(r["disk_gb_per_s"], "{:.2f}")),
    ("waiting", 7, lambda r: _known(r["disk_wait_share"], "{:.1%}")),
    ("P99 ms", 8, lambda r: _known(r["token_ms_p99"], "{:.2f}")),
)
BUDGET_COLUMNS: tuple[BenchColumn, ...] = (
    ("left out", 8, lambda r: _known(r["disk_left_out_per_token"], "{:.2f}")),
)


def bench_markdown(rows: Rows) -> Iterator[str]:
    last = None
    for row in rows:
        columns = BENCH_COLUMNS if row["disk"] is None else BENCH_COLUMNS + DISK_COLUMNS
        columns += () if row["disk"] is None or row["read_budget_mb"] is None else BUDGET_COLUMNS
        if last is None:
            yield markdown_row(f"{title:{_align(width)}}" for title, width, _ in columns)
            yield markdown_row("-" * (abs(w) - 1) + ("-" if w < 0 else ":") for _, w, _ in columns)
        yield markdown_row(f"{cell(row):{_align(width)}}" for _, width, cell in columns)
        last = row
    if last is not None:
        facts = [f"load {last['load_s']:.2f} s", f"peak {size(last['peak_rss_bytes'])}"]
        facts += [f"tokens: {last['tokens']}", last["sparsity"], last["isa"]]
        facts += [last["planted"]] if last["planted"] else []
        if last["disk"] is not None:
            facts += [f"{size(last['memory_bytes'])} in all, the rest on disk: {last['disk']}"]
            facts += [f"without {last['disabled']}"] if last["disabled"] else []
            if last["read_budget_mb"] is not None:
                facts += [f"not exact: {last['read_budget_mb']:g} MB a token at most"]
        yield f"\n{' · '.join(facts)}\nbuild: {last['build_commit']} ({last['build_number']})\n"


BENCH_FORMATS = {"md": bench_markdown, "csv": bench_csv, "json": bench_json, "jsonl": bench_jsonl}


def _align(width: int) -> str:
    return f"<{-width}" if width < 0 else f">{width}"


def _known(value: float | None, format: str, scale: float = 1.0) -> str:
    return "" if value is None else format.format(value * scale)


def _binary(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


def _decimal(count: int) -> str:
    return f"{count / 1e6:.2f} M" if count < 1e9 else f"{count / 1e9:.2f} B"
