"""From a GGUF file to the first token, cold and warm: both engines in new processes, in alternation.

    python bench/llamacpp/first_token.py --format q4_k_m --dir /tmp/gguf --build-dir /tmp/llama

The clock starts before the process does and stops at the likeliest token after a prompt of `--prompt` tokens.
*Cold*: the file's pages have left the page cache, which is checked; a virtual machine's host may hold them
still. *Warm*: the file was read just before. llama.cpp runs with the file mapped as it is and with repacked
weights; the better median counts. `start` is the part before an engine looks at the file: Python's imports.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from build_llamacpp import PACKAGE, VERSION, build, build_driver, note, source_tree
from engines import BENCH, Driver, Duel, commit, machine
from vs_llamacpp import LOADS, add_model_options, level, model, write_tokens

from thermocline import __version__
from thermocline.convert.synthetic import read_shape
from thermocline.offline.bench import Test

STATES = ("cold", "warm")


@dataclass(frozen=True)
class FirstToken:
    """One process's way to its first token, in seconds."""

    total: float
    load: float
    prompt: float  # and the first token

    @property
    def start(self) -> float:
        return self.total - self.load - self.prompt


def cached_share(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as f,
        mmap.mmap(f.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as m,
    ):
        address = ctypes.addressof(ctypes.c_char.from_buffer(m))
        pages = (ctypes.c_ubyte * -(-size // page))()
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(1 for x in bytes(pages) if x & 1) / len(pages)


def make_cold(path: Path) -> float:
    """Drop a file from the page cache. Return the share that stayed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return cached_share(path)


def make_warm(path: Path) -> float:
    with path.open("rb", buffering=0) as f:
        while f.read(64 << 20):
            pass
    return cached_share(path)


def first_token(start: Callable[[], Driver], threads: int, prompt: int) -> FirstToken:
    begin = time.perf_counter()
    with start() as driver:
        said = driver.ask("first", threads, 1, prompt)
        total = time.perf_counter() - begin
        return FirstToken(total, driver.hello["load_s"], said["ns"] / 1e9)


def sides_of(duel: Duel) -> dict[str, Callable[[], Driver]]:
    repacked, mapped = LOADS
    return {
        "thermocline": duel.ours,
        "llama.cpp mapped": lambda: duel.llama(*mapped),
        "llama.cpp repacked": lambda: duel.llama(*repacked),
    }


def measure(duel: Duel, state: str, args: argparse.Namespace) -> dict[str, Any]:
    """`--pairs` rounds of all sides, each round in another order."""
    sides = sides_of(duel)
    found: dict[str, list[FirstToken]] = {name: [] for name in sides}
    cached = []
    prepare = make_cold if state == "cold" else make_warm
    names = list(sides)
    for i in range(args.pairs):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            cached.append(max(prepare(p) for p in {duel.gguf, weights_of(duel.model)}))
            found[name].append(first_token(sides[name], args.threads[0], args.prompt))
            said = found[name][-1]
            note(f"{state} {name}: {said.total:.2f} s (load {said.load:.2f}, prompt {said.prompt:.2f})")
    return row_of(state, found, cached)


def weights_of(model: Path) -> Path:
    return model / "weights.bin" if model.is_dir() else model


def row_of(state: str, found: dict[str, list[FirstToken]], cached: list[float]) -> dict[str, Any]:
    """Medians of each side; ratios of pairs against the better way of llama.cpp."""
    totals = {name: statistics.median(x.total for x in runs) for name, runs in found.items()}
    rival = min((n for n in totals if n != "thermocline"), key=lambda n: totals[n])
    pairs = list(zip(found["thermocline"], found[rival], strict=True))
    out: dict[str, Any] = {"state": state, "rival": rival, "cached_share": max(cached)}
    for name, of in (("ratio", whole), ("ratio_without_start", after_start)):
        ratios = sorted(of(theirs) / of(ours) for ours, theirs in pairs)
        q = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
        out |= {name: statistics.median(ratios), f"{name}_q1": q[0], f"{name}_q3": q[2]}
    for name, runs in found.items():
        out[name] = {
            key: [round(getattr(x, key), 4) for x in runs] for key in ("total", "start", "load", "prompt")
        }
    return out


def whole(x: FirstToken) -> float:
    return x.total


def after_start(x: FirstToken) -> float:
    return x.load + x.prompt


def show(row: dict[str, Any]) -> str:
    parts = [f"{row['shape']} {row['format']} {row['state']}:"]
    for name in ("thermocline", "llama.cpp mapped", "llama.cpp repacked"):
        s = {key: statistics.median(row[name][key]) for key in ("total", "start", "load", "prompt")}
        parts.append(f"{name} {s['total']:.2f} s ({s['start']:.2f} + {s['load']:.2f} + {s['prompt']:.2f});")
    parts.append(
        f"{row['ratio']:.2f} ({row['ratio_q1']:.2f}–{row['ratio_q3']:.2f}) times {row['rival']}'s speed,"
    )
    parts.append(f"{row['ratio_without_start']:.2f} without the start")
    return " ".join(parts)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(p)
    p.add_argument("--model", type=Path, help="a pack for Thermocline, instead of the file itself")
    p.add_argument("--state", nargs="+", choices=STATES, default=list(STATES))
    p.add_argument("--threads", nargs=1, type=int, default=[2])
    p.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--json", type=Path, default=BENCH / "results" / "first-token.jsonl", help="appended to")
    args = p.parse_args()
    args.shape, args.format = args.shape or "llama-2-7b", args.format or ["q4_k_m"]
    return args


def main() -> None:
    args = arguments()
    for directory in (args.dir, args.build_dir, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    source = args.llama_source or source_tree(args.build_dir)
    libraries = build(source, args.llama_build or args.build_dir / args.isa, args.isa)
    driver = build_driver(source, libraries, args.build_dir)
    spec, test = read_shape(args.shape)[1], Test(args.threads[0], 0, args.prompt, 1)
    shared = {"shape": args.shape, "layers": args.layers, "threads": args.threads[0], "prompt": args.prompt}
    shared |= {"machine": machine(), "python": sys.version.split()[0]}
    shared |= {"llama": {"package": f"{PACKAGE} {VERSION}", "isa": args.isa}}
    for fmt in args.format:
        gguf = model(args, fmt)
        with tempfile.TemporaryDirectory() as scratch:
            tokens = write_tokens(spec, [test], Path(scratch))
            duel = Duel(args.model or gguf, spec, gguf, tokens, [test], args.isa, driver)
            for state in args.state:
                row = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "format": fmt} | shared
                row |= {"file_bytes": gguf.stat().st_size, **measure(duel, state, args)}
                row["thermocline_build"] = {
                    "version": __version__,
                    "commit": commit(),
                    "level": level(args.isa),
                }
                print(show(row), flush=True)
                with args.json.open("a") as f:
                    f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
