"""Thermocline beside llama.cpp: the same file, threads and tests, run by run in alternation.

    python bench/llamacpp/vs_llamacpp.py --row q4_k_m-7b --isa avx2 --dir /tmp/gguf --build-dir /tmp/llama
    python bench/llamacpp/vs_llamacpp.py --shape llama-2-7b --format q8_0 q4_0 --test tg64 pp512 ...

A row of `ROWS` names a shape, a format and tests. The GGUF file is written by `thermocline synth` where it is
not there yet, and both engines read it. Both stay loaded where memory has room for both (one computes, the
other waits for its next line); else they take turns, a process each. A ratio is of two runs one after the
other, the first changing from pair to pair, and above 1 where Thermocline is faster. Logits are compared
first: what computes something else is not timed.

llama.cpp runs as llama-bench does (batch 2048, ubatch 512, f16 cache). Each test is timed with what was
fastest for it in a trial before: weights repacked or mapped as they are, flash attention or not. --way fixes
it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from build_llamacpp import PACKAGE, VERSION, build, build_driver, note, sh, source_tree
from engines import (
    BENCH,
    LOGITS_GEN,
    LOGITS_PROMPT,
    Driver,
    Duel,
    commit,
    compare_logits,
    machine,
)

from thermocline import __version__
from thermocline.convert.synthetic import read_shape
from thermocline.machine import hardware
from thermocline.model.spec import ModelSpec
from thermocline.offline.bench import ROOF_SECONDS, Test, random_tokens


@dataclass(frozen=True)
class Row:
    """What is measured under one name."""

    shape: str
    format: str
    tests: tuple[str, ...]
    threads: tuple[int, ...] = (1, 2)


BOTH = ("tg64", "pp128", "pp512")
ROWS = {
    "q4_k_m-7b": Row("llama-2-7b", "q4_k_m", BOTH),
    "q4_k_m-1.1b": Row("tinyllama-1.1b", "q4_k_m", BOTH),
    "q5_k_m-7b": Row("llama-2-7b", "q5_k_m", ("tg64", "pp128")),
    "q6_k-7b": Row("llama-2-7b", "q6_k", ("tg64", "pp128")),
    "iq4_xs-7b": Row("llama-2-7b", "iq4_xs", ("tg64", "pp128")),
    "mxfp4": Row("gpt-oss-20b-like", "mxfp4", ("tg64", "pp128")),
    "qwen3-30b": Row("qwen3-30b-a3b", "q4_0", ("tg64", "pp128")),
    "q4_0-7b": Row("llama-2-7b", "q4_0", ("tg64",)),  # whose share of the roof K-quants are held to
    "f16-1.1b": Row("tinyllama-1.1b", "f16", ("pp512", "tg64")),
    "f16-7b": Row("llama-2-7b", "f16", ("pp512",), (2,)),
}


# ---- measuring


@dataclass(frozen=True)
class Way:
    """How llama.cpp runs a test."""

    mmap: int
    repack: int
    flash: int

    @property
    def load(self) -> tuple[int, int]:
        return self.mmap, self.repack


LOADS = ((0, 1), (1, 0))  # repacked, into memory of its own; mapped, as the file has it


def trial(duel: Duel) -> dict[Test, Way]:
    """The fastest way for each test, of both loads with and without flash attention."""
    ns: dict[Test, dict[Way, int]] = {t: {} for t in duel.tests}
    for mmap, repack in LOADS:
        with duel.llama(mmap, repack) as llama:
            for flash in (0, 1):
                for t in duel.tests:
                    ns[t][Way(mmap, repack, flash)] = min(llama.run(t, flash)["ns"] for _ in range(2))
    for t, found in ns.items():
        shown = ", ".join(
            f"mmap {w.mmap} repack {w.repack} fa {w.flash}: {n / 1e6:.0f}" for w, n in found.items()
        )
        note(f"trial of {t.name}, {t.threads} threads, ms: {shown}")
    return {t: min(found, key=lambda w: found[w]) for t, found in ns.items()}


def by_load(ways: dict[Test, Way]) -> dict[tuple[int, int], list[Test]]:
    """The tests of each way to load."""
    out: dict[tuple[int, int], list[Test]] = {}
    for test, way in ways.items():
        out.setdefault(way.load, []).append(test)
    return out


def roof(test: Test) -> float:
    return hardware.read_gbs(test.threads, ROOF_SECONDS) or math.nan


@dataclass
class Pairs:
    """One test: pair i was run between roofs[i] and roofs[i + 1]."""

    test: Test
    ours_ns: list[int] = field(default_factory=list)
    llama_ns: list[int] = field(default_factory=list)
    roofs: list[float] = field(default_factory=list)
    bytes_per_token: int | None = None  # None for prompts, and where neurons are skipped
    peaks: tuple[int, int] = (0, 0)


def resident(duel: Duel, ways: dict[Test, Way], pairs: int) -> Iterator[Pairs]:
    """Both loaded; the first of a pair is ours in every other one."""
    with duel.ours() as ours:
        for load, tests in by_load(ways).items():
            with duel.llama(*load) as llama:
                yield from (alternate(ours, llama, t, ways[t].flash, pairs, duel.spec) for t in tests)


def alternate(ours: Driver, llama: Driver, test: Test, flash: int, pairs: int, spec: ModelSpec) -> Pairs:
    for driver in (ours, llama):
        driver.run(test, flash)  # warms up
    found = Pairs(test, roofs=[roof(test)])
    for i in range(pairs):
        sides = [(ours, found.ours_ns), (llama, found.llama_ns)]
        for driver, ns in sides if i % 2 == 0 else reversed(sides):
            said = driver.run(test, flash)
            ns.append(said["ns"])
            note_bytes(found, said, spec)
        found.roofs.append(roof(test))
    found.peaks = (ours.ask("peak")["peak_rss_bytes"], llama.ask("peak")["peak_rss_bytes"])
    return found


def in_turns(duel: Duel, ways: dict[Test, Way], pairs: int) -> Iterator[Pairs]:
    """One process at a time: each runs all tests once, then the other; the first changes every round."""
    found = {t: Pairs(t, roofs=[roof(t)]) for t in duel.tests}
    theirs: list[tuple[int, Callable[[], Driver], list[Test]]] = [
        (1, lambda load=load: duel.llama(*load), tests)  # type: ignore[misc]
        for load, tests in by_load(ways).items()
    ]
    sides = [(0, duel.ours, duel.tests), *theirs]
    for i in range(pairs):
        for side, start, tests in sides if i % 2 == 0 else reversed(sides):
            with start() as driver:
                for t in tests:
                    p = found[t]
                    driver.run(t, ways[t].flash)
                    said = driver.run(t, ways[t].flash)
                    (p.ours_ns, p.llama_ns)[side].append(said["ns"])
                    note_bytes(p, said, duel.spec)
                    peak = driver.ask("peak")["peak_rss_bytes"]
                    p.peaks = (peak, p.peaks[1]) if side == 0 else (p.peaks[0], peak)
        for p in found.values():
            p.roofs.append(roof(p.test))
    yield from found.values()


def note_bytes(p: Pairs, said: dict[str, Any], spec: ModelSpec) -> None:
    """Keep what both engines read for a token: of a mixture, its experts. Skipped neurons have none."""
    if not (p.test.prompt or spec.sparse):
        p.bytes_per_token = said.get("bytes_per_token", p.bytes_per_token)  # llama.cpp's driver says none


# ---- what it says


def row_of(p: Pairs) -> dict[str, Any]:
    tokens = p.test.prompt + p.test.gen
    ratios = sorted(theirs / ours for ours, theirs in zip(p.ours_ns, p.llama_ns, strict=True))
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    beside = [(a + b) / 2 for a, b in zip(p.roofs, p.roofs[1:], strict=False)]

    def share(samples: list[int]) -> float | None:
        if p.bytes_per_token is None:
            return None
        moved = p.bytes_per_token * p.test.gen
        return statistics.median(moved / ns / r for ns, r in zip(samples, beside, strict=True))

    return {
        "test": p.test.name,
        "threads": p.test.threads,
        "thermocline_ts": tokens * 1e9 / statistics.median(p.ours_ns),
        "llama_ts": tokens * 1e9 / statistics.median(p.llama_ns),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_q1": quartiles[0],
        "ratio_q3": quartiles[2],
        "ratio_max": ratios[-1],
        "bytes_per_token": p.bytes_per_token,
        "roof_gb_per_s": statistics.median(p.roofs),
        "thermocline_roof_share": share(p.ours_ns),
        "llama_roof_share": share(p.llama_ns),
        "thermocline_peak_rss_bytes": p.peaks[0],
        "llama_peak_rss_bytes": p.peaks[1],
        "thermocline_ns": p.ours_ns,
        "llama_ns": p.llama_ns,
        "roofs_gb_per_s": p.roofs,
    }


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model": lambda r: f"{r['shape']} {r['format']}",
    "threads": lambda r: str(r["threads"]),
    "test": lambda r: r["test"],
    "thermocline t/s": lambda r: f"{r['thermocline_ts']:.2f}",
    "llama.cpp t/s": lambda r: f"{r['llama_ts']:.2f}",
    "ratio (quartiles; min–max)": lambda r: (
        f"**{r['ratio']:.2f}** ({r['ratio_q1']:.2f}–{r['ratio_q3']:.2f}; "
        f"{r['ratio_min']:.2f}–{r['ratio_max']:.2f})"
    ),
    "roof GB/s": lambda r: f"{r['roof_gb_per_s']:.1f}",
    "of roof": lambda r: (
        ""
        if r["thermocline_roof_share"] is None
        else f"{r['thermocline_roof_share']:.0%} / {r['llama_roof_share']:.0%}"
    ),
    "peak GiB": lambda r: (
        f"{r['thermocline_peak_rss_bytes'] / 2**30:.2f} / {r['llama_peak_rss_bytes'] / 2**30:.2f}"
    ),
    "llama.cpp": lambda r: f"{'repacked' if r['llama']['repack'] else 'as it is'}, fa {r['llama']['flash']}",
}


def table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


# ---- main


def parse_test(text: str) -> tuple[int, int, int]:
    """`pp512`, `tg64`, `tg64@4096` -> (depth, prompt, gen)"""
    found = re.fullmatch(r"(pp|tg)([1-9][0-9]*)(?:@d?([0-9]+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must look like pp512, tg64 or tg64@4096, not {text!r}")
    n, depth = int(found[2]), int(found[3] or 0)
    return (depth, n, 0) if found[1] == "pp" else (depth, 0, n)


def parse_way(text: str) -> Way:
    """`mmap,repack,flash`, each 0 or 1."""
    if re.fullmatch(r"[01],[01],[01]", text) is None:
        raise argparse.ArgumentTypeError(f"must be MMAP,REPACK,FLASH, each 0 or 1, not {text!r}")
    return Way(*map(int, text.split(",")))


def add_model_options(p: argparse.ArgumentParser) -> None:
    """Which file, and where llama.cpp is."""
    p.add_argument("--shape", help="what `thermocline synth` is asked for")
    p.add_argument("--format", nargs="+", help="formats or mixes, as `synth --format` takes them")
    p.add_argument("--gguf", type=Path, help="an existing file; --shape is then its model's config.json")
    p.add_argument("--layers", type=int, help="so many layers of the shape only: a file that fits memory")
    p.add_argument("--dir", type=Path, required=True, help="where the models are, or will be written")
    p.add_argument("--build-dir", type=Path, required=True, help="where llama.cpp is, or will be, built")
    p.add_argument("--llama-source", type=Path, help="an unpacked llama.cpp tree, instead of fetching one")
    p.add_argument("--llama-build", type=Path, help="its build directory, instead of making one")
    p.add_argument("--isa", choices=["native", "avx2"], default="native", help="of both engines")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--row", choices=list(ROWS), help="shape, format, tests and threads under one name")
    add_model_options(p)
    p.add_argument("--threads", nargs="+", type=int)
    p.add_argument("--test", nargs="+", type=parse_test)
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--way", type=parse_way, help="how llama.cpp runs (MMAP,REPACK,FLASH), instead of a trial")
    p.add_argument("--logits-only", action="store_true", help="compare logits and time nothing")
    p.add_argument("--json", type=Path, default=BENCH / "results" / "vs-llamacpp.jsonl", help="appended to")
    args = p.parse_args()
    row = ROWS[args.row] if args.row else Row("llama-2-7b", "q4_0", ("pp64", "pp512", "tg64", "tg64@4096"))
    args.shape, args.format = args.shape or row.shape, args.format or [row.format]
    args.threads, args.test = args.threads or row.threads, args.test or [parse_test(t) for t in row.tests]
    return args


def model(args: argparse.Namespace, fmt: str) -> Path:
    """The GGUF file that both engines open, made if it is not there."""
    name = Path(args.shape).name.removesuffix(".json") + (f"-{args.layers}" if args.layers else "")
    gguf: Path = args.gguf or args.dir / f"{name}-{fmt}.gguf"
    if not gguf.exists():
        layers = ("--layers", args.layers) if args.layers else ()
        synth = [sys.executable, "-m", "thermocline", "synth", args.shape, *layers]
        sh(*synth, "--gguf", gguf, "--format", fmt)
    return gguf


def measure(args: argparse.Namespace, fmt: str, driver: Path, directory: Path) -> Iterator[dict[str, Any]]:
    gguf = model(args, fmt)
    spec = read_shape(args.shape)[1]
    # Depth outermost: llama.cpp's context is then computed once for all that use it.
    tests = sorted((Test(t, *test) for test in args.test for t in args.threads), key=lambda t: t.depth)
    duel = Duel(gguf, spec, gguf, write_tokens(spec, tests, directory), tests, args.isa, driver)
    error = compare_logits(duel, directory)
    shared = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "shape": args.shape, "format": fmt}
    shared |= {"layers": args.layers, "file_bytes": gguf.stat().st_size, "nmse": error}
    if args.logits_only:
        return
    ways = {t: args.way for t in tests} if args.way else trial(duel)
    run = resident if duel.both_fit else in_turns
    ours_facts = {"version": __version__, "commit": commit(), "isa": args.isa, "level": level(args.isa)}
    where = {"machine": machine(), "arrangement": run.__name__}
    why = "as given" if args.way else "the fastest of both loads and flash attention on/off, in a trial"
    for p in run(duel, ways, args.pairs):
        llama = asdict(ways[p.test]) | {"why": why, "package": f"{PACKAGE} {VERSION}", "isa": args.isa}
        yield shared | where | {"thermocline": ours_facts, "llama": llama} | row_of(p)


def level(isa: str) -> str:
    """The instruction set that Thermocline uses."""
    return hardware.isa().levels[0] if isa == "native" else isa


def write_tokens(spec: ModelSpec, tests: list[Test], directory: Path) -> Path:
    path = directory / "tokens.i32"
    needed = sum(max(getattr(t, name) for t in tests) for name in ("depth", "prompt", "gen"))
    ids = random_tokens(spec, 1, needed + LOGITS_PROMPT + LOGITS_GEN + 2)
    np.array(ids, np.int32).tofile(path)
    return path


def main() -> None:
    args = arguments()
    for directory in (args.dir, args.build_dir, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    source = args.llama_source or source_tree(args.build_dir)
    libraries = build(source, args.llama_build or args.build_dir / args.isa, args.isa)
    driver = build_driver(source, libraries, args.build_dir)
    print(table_line(list(COLUMNS)))
    print(table_line(["---"] * len(COLUMNS)), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for fmt in args.format:
            for row in measure(args, fmt, driver, Path(scratch)):
                print(table_line([cell(row) for cell in COLUMNS.values()]), flush=True)
                with args.json.open("a") as f:
                    f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
