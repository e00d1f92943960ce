"""Thermocline beside llama.cpp: the same random weights, threads and tests, run by run in alternation.

    python bench/llamacpp/vs_llamacpp.py --dir /tmp/packs --build-dir /tmp/llama.cpp --format q8_0 q4_0 --tune

Both engines stay loaded where memory has room for both (one computes, the other waits for its next line);
else they take turns, a process each. A ratio is of two runs one after the other, the first changing from pair
to pair, and above 1 where Thermocline is faster. Logits are compared first: what computes something else is
not timed. llama.cpp runs as llama-bench does (batch 2048, ubatch 512, f16 cache), with repacked weights;
flash attention and memory mapping as given, or with --tune the fastest of their four combinations, measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from build_llamacpp import PACKAGE, VERSION, build, build_driver, note, sh, source_tree

from thermocline import __version__
from thermocline.engine.kv_cache import bytes_for
from thermocline.machine import hardware
from thermocline.offline.bench import ROOF_SECONDS, Test, random_tokens
from thermocline.pack.pack import Pack

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
LOGITS_PROMPT, LOGITS_GEN = 64, 8
MAX_NMSE = 1e-3  # both round activations to int8, differently: 1e-5 to 1e-4 is usual
SPARE_BYTES = 3 << 30  # the roof's buffer, both runtimes


# ---- the two engines, one question per line


class Driver:
    """`seconds`: how long the process may live; what waits for its answer then meets its end."""

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        environ: dict[str, str] | None = None,
        seconds: float = math.inf,
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # Ctrl-C is for us
        )
        self._timer = threading.Timer(seconds, self.process.kill)
        self._timer.daemon = True
        if seconds < math.inf:
            self._timer.start()
        self.hello = self._answer()

    def ask(self, *words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def run(self, test: Test, flash: int) -> dict[str, Any]:
        return self.ask("run", test.threads, flash, test.depth, test.prompt, test.gen)

    def logits(self, threads: int, directory: Path, gen: int = LOGITS_GEN) -> np.ndarray[Any, Any]:
        """[gen + 1, vocab_size]: after the prompt, and after each token that follows it."""
        path = directory / f"{self.name}.f32"
        said = self.ask("logits", threads, 1, LOGITS_PROMPT, gen, path)
        return np.fromfile(path, np.float32).reshape(said["rows"], -1)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True)
class Settings:
    """How llama.cpp runs."""

    mmap: int
    repack: int
    flash: dict[str, int]  # by test
    why: str


@dataclass(frozen=True)
class Duel:
    """Both engines over the same weights and tokens."""

    pack: Pack
    gguf: Path
    tokens: Path
    tests: list[Test]
    isa: str
    llama_driver: Path

    def ours(self) -> Driver:
        tests = [f"{t.threads},{t.depth},{t.prompt},{t.gen}" for t in self.tests]
        command = [sys.executable, HERE / "thermocline_driver.py", self.pack.path, self.tokens, *tests]
        return Driver("thermocline", command, {"THERMOCLINE_ISA": "avx2"} if self.isa == "avx2" else None)

    def llama(self, mmap: int, repack: int) -> Driver:
        return Driver("llama.cpp", [self.llama_driver, self.gguf, self.tokens, self.n_ctx, mmap, repack])

    @property
    def n_ctx(self) -> int:
        return max(t.context + 1 for t in self.tests)

    @property
    def both_fit(self) -> bool:
        room = hardware.available_bytes()
        need = self.pack.weights_bytes + self.gguf.stat().st_size + 2 * bytes_for(self.pack.spec, self.n_ctx)
        return room is None or need + SPARE_BYTES < room


def nmse(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Squared error over squared size."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(((x - y) ** 2).sum() / (y**2).sum())


def compare_logits(duel: Duel, directory: Path) -> float:
    threads = duel.tests[0].threads
    duel = replace(duel, tests=[Test(threads, 0, LOGITS_PROMPT, LOGITS_GEN)])
    with duel.ours() as ours:
        a = ours.logits(threads, directory)
    with duel.llama(mmap=1, repack=1) as llama:
        b = llama.logits(threads, directory)
    error, agree = nmse(a, b), float((a.argmax(1) == b.argmax(1)).mean())
    note(f"logits: NMSE {error:.1e}, the same likeliest token in {agree:.0%} of {len(a)} rows")
    if not error <= MAX_NMSE:
        raise SystemExit(f"NMSE {error:.1e} is above {MAX_NMSE:.0e}: not the same model, no comparison")
    return error


# ---- measuring


def tune(duel: Duel, repack: int) -> Settings:
    """The faster of mapped and read weights over all tests, of flash and plain attention for each."""
    times: dict[int, dict[str, list[int]]] = {}
    for mmap in (0, 1):
        with duel.llama(mmap, repack) as llama:
            runs = [[min(llama.run(t, f)["ns"] for _ in range(2)) for t in duel.tests] for f in (0, 1)]
        times[mmap] = {key(t): [plain, flash] for t, plain, flash in zip(duel.tests, *runs, strict=True)}
        note(f"tune: mmap {mmap}, ns without and with flash attention: {times[mmap]}")
    mmap = min(times, key=lambda m: sum(math.log(min(pair)) for pair in times[m].values()))
    flash = {name: int(pair[1] <= pair[0]) for name, pair in times[mmap].items()}
    return Settings(mmap, repack, flash, "the fastest of mmap on/off and flash attention on/off, measured")


def key(test: Test) -> str:
    return f"{test.name}, {test.threads}"


def roof(test: Test) -> float:
    return hardware.read_gbs(test.threads, ROOF_SECONDS) or math.nan


@dataclass
class Pairs:
    """One test: pair i was run between roofs[i] and roofs[i + 1]."""

    test: Test
    ours_ns: list[int]
    llama_ns: list[int]
    roofs: list[float]
    bytes_per_token: int | None = None  # None for prompts, and where neurons are skipped
    peaks: tuple[int, int] = (0, 0)


def resident(duel: Duel, s: Settings, pairs: int) -> Iterator[Pairs]:
    """Both loaded; the first of a pair is ours in every other one."""
    with duel.ours() as ours, duel.llama(s.mmap, s.repack) as llama:
        for test in duel.tests:
            flash = s.flash[key(test)]
            for driver in (ours, llama):
                driver.run(test, flash)  # warms up
            found = Pairs(test, [], [], [roof(test)])
            for i in range(pairs):
                sides = [(ours, found.ours_ns), (llama, found.llama_ns)]
                for driver, ns in sides if i % 2 == 0 else reversed(sides):
                    said = driver.run(test, flash)
                    ns.append(said["ns"])
                    note_bytes(found, said)
                found.roofs.append(roof(test))
            found.peaks = (ours.ask("peak")["peak_rss_bytes"], llama.ask("peak")["peak_rss_bytes"])
            yield found


def in_turns(duel: Duel, s: Settings, pairs: int) -> Iterator[Pairs]:
    """One process at a time: each runs all tests once, then the other; the first changes every round."""
    found = [Pairs(t, [], [], [roof(t)]) for t in duel.tests]
    sides: list[tuple[int, Callable[[], Driver]]] = [
        (0, duel.ours),
        (1, lambda: duel.llama(s.mmap, s.repack)),
    ]
    for i in range(pairs):
        for side, start in sides if i % 2 == 0 else reversed(sides):
            with start() as driver:
                for p in found:
                    driver.run(p.test, s.flash[key(p.test)])
                    said = driver.run(p.test, s.flash[key(p.test)])
                    (p.ours_ns, p.llama_ns)[side].append(said["ns"])
                    note_bytes(p, said)
                    peak = driver.ask("peak")["peak_rss_bytes"]
                    p.peaks = (peak, p.peaks[1]) if side == 0 else (p.peaks[0], peak)
        for p in found:
            p.roofs.append(roof(p.test))
    yield from found


def note_bytes(p: Pairs, said: dict[str, Any]) -> None:
    if not p.test.prompt and said.get("rows_fraction") == 1:
        p.bytes_per_token = said["bytes_per_token"]


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
    "llama.cpp": lambda r: f"mmap {r['llama']['mmap']}, fa {r['llama']['flash']}",
}


def table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def commit() -> str | None:
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None


# ---- main


def parse_test(text: str) -> tuple[int, int, int]:
    """`pp512`, `tg64`, `tg64@4096` -> (depth, prompt, gen)"""
    found = re.fullmatch(r"(pp|tg)([1-9][0-9]*)(?:@d?([0-9]+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must look like pp512, tg64 or tg64@4096, not {text!r}")
    n, depth = int(found[2]), int(found[3] or 0)
    return (depth, n, 0) if found[1] == "pp" else (depth, 0, n)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="llama-2-7b", help="what `thermocline synth` is asked for")
    p.add_argument("--format", nargs="+", default=["f16", "q8_0", "q4_0"])
    p.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    p.add_argument(
        "--test",
        nargs="+",
        type=parse_test,
        default=[*map(parse_test, ("pp64", "pp512", "tg64", "tg64@4096"))],
    )
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--dir", type=Path, required=True, help="where the models are, or will be written")
    p.add_argument("--build-dir", type=Path, required=True, help="where llama.cpp is, or will be, built")
    p.add_argument("--llama-source", type=Path, help="an unpacked llama.cpp tree, instead of fetching one")
    p.add_argument("--llama-build", type=Path, help="its build directory, instead of making one")
    p.add_argument("--isa", choices=["native", "avx2"], default="native", help="of both engines")
    p.add_argument("--tune", action="store_true", help="measure mmap and flash attention first")
    p.add_argument("--mmap", type=int, choices=[0, 1], default=0)
    p.add_argument("--flash", type=int, choices=[0, 1], default=1)
    p.add_argument("--repack", type=int, choices=[0, 1], default=1)
    p.add_argument("--json", type=Path, default=BENCH / "results" / "vs-llamacpp.jsonl", help="appended to")
    return p.parse_args()


def models(args: argparse.Namespace, fmt: str) -> tuple[Pack, Path]:
    pack, gguf = args.dir / f"{args.shape}-{fmt}", args.dir / f"{args.shape}-{fmt}.gguf"
    if not (pack.exists() and gguf.exists()):
        synth = [sys.executable, "-m", "thermocline", "synth", args.shape]
        sh(*synth, "-o", pack, "--gguf", gguf, "--format", fmt)
    return Pack.open(pack), gguf


def measure(args: argparse.Namespace, fmt: str, driver: Path, directory: Path) -> Iterator[dict[str, Any]]:
    pack, gguf = models(args, fmt)
    # Depth outermost: llama.cpp's context is then computed once for all that use it.
    tests = sorted((Test(t, *test) for test in args.test for t in args.threads), key=lambda t: t.depth)
    tokens = directory / "tokens.i32"
    needed = sum(max(getattr(t, name) for t in tests) for name in ("depth", "prompt", "gen"))
    ids = random_tokens(pack.spec, 1, needed + LOGITS_PROMPT + LOGITS_GEN + 2)
    np.array(ids, np.int32).tofile(tokens)
    duel = Duel(pack, gguf, tokens, tests, args.isa, driver)
    error = compare_logits(duel, directory)
    given = Settings(args.mmap, args.repack, {key(t): args.flash for t in tests}, "as given")
    settings = tune(duel, args.repack) if args.tune else given
    run = resident if duel.both_fit else in_turns
    shared = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "shape": args.shape, "format": fmt}
    ours = {"version": __version__, "commit": commit(), "isa": args.isa}
    machine = {"cpu": hardware.cores().name, "arrangement": run.__name__, "nmse": error}
    for p in run(duel, settings, args.pairs):
        llama = asdict(settings) | {"flash": settings.flash[key(p.test)], "package": f"{PACKAGE} {VERSION}"}
        yield shared | machine | {"thermocline": ours, "llama": llama} | row_of(p)


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
