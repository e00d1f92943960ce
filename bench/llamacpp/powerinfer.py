"""SmallThinker beside PowerInfer's own engine for it, and beside llama.cpp: tokens, alternating.

    python bench/llamacpp/powerinfer.py --pack DIR/smallthinker-4b-q4_0-sparse --dir DIR --build-dir DIR
        --engine POWERINFER/smallthinker --engine-build BUILD

The pack is `sparse.py --shape smallthinker-4b --active 0.4 --prepare`'s. All engines read its own weights.
Both GGUFs are written from it: PowerInfer's has down as the pack has it, a row for each neuron. That shape
alone makes its engine skip neurons. BUILD is a cmake build of `smallthinker/` in SJTU-IPADS/PowerInfer with
clang, GGML_OPENMP=OFF, BUILD_SHARED_LIBS=OFF, POWERINFER_NO_FFN_REPACK=ON and its target `llama-bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from build_llamacpp import DRIVER, build, build_driver, sh, source_tree
from engines import BENCH, HERE, Driver, commit

from thermocline.convert import to_gguf
from thermocline.machine import hardware
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import RowPart, TensorInfo
from thermocline.offline.bench import random_tokens
from thermocline.pack.pack import Pack

OURS, THEIRS, LLAMA = "thermocline", "powerinfer", "llama.cpp"
THREADS = 2


def as_the_pack_has_it(
    s: ModelSpec, prefix: str, info: TensorInfo, up: RowPart, down: RowPart
) -> Iterator[to_gguf.TensorSlice]:
    """Return both halves of a bundle with a row for each neuron."""
    rows = s.n_experts * s.ffn_dim
    for name, part in (("up", up), ("down", down)):
        yield to_gguf.TensorSlice(
            f"{prefix}ffn_{name}_exps.weight", info, 0, rows, s.dim, part=part, stack=s.n_experts
        )


def files(pack: Pack, directory: Path) -> dict[str, Path]:
    found = {name: directory / f"{pack.path.name}-{name}.gguf" for name in (THEIRS, LLAMA)}
    if not found[LLAMA].exists():
        to_gguf.write_gguf(pack, found[LLAMA])
    if not found[THEIRS].exists():
        with patch.object(to_gguf, "_bundle_of_experts", as_the_pack_has_it):
            to_gguf.write_gguf(pack, found[THEIRS])
    return found


def their_driver(engine: Path, built: Path, out: Path) -> Path:
    made = out / "powerinfer-driver"
    if not made.exists() or made.stat().st_mtime < DRIVER.stat().st_mtime:
        includes = [f"-I{engine}/include", f"-I{engine}/ggml/include"]
        archives = [*built.glob("src/*.a"), *built.glob("ggml/src/*.a"), *built.glob("powerinfer/**/*.a")]
        links = ["-Wl,--start-group", *archives, "-Wl,--end-group", "-laio", "-luring", "-lpthread", "-ldl"]
        sh("c++", "-O2", "-std=c++17", "-DEARLY_2025", DRIVER, *includes, *links, "-o", made)
    return made


def rounds(args: argparse.Namespace, commands: dict[str, list[object]]) -> dict[str, list[int]]:
    """Return the nanoseconds of each run. All models stay loaded; each round begins with another engine."""
    ns: dict[str, list[int]] = {name: [] for name in commands}
    drivers = {name: Driver(name, command) for name, command in commands.items()}
    names = list(drivers)
    for i in range(-1, args.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            mode = ("exact",) if name == OURS else ()
            said = drivers[name].ask("run", THREADS, 1, 0, 0, args.gen, *mode)
            if i >= 0:
                ns[name].append(said["ns"])
    for driver in drivers.values():
        driver.process.kill()
    return ns


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pack", type=Path, required=True)
    p.add_argument("--engine", type=Path, required=True, help="PowerInfer's folder `smallthinker`")
    p.add_argument("--engine-build", type=Path, required=True, help="where that was built")
    p.add_argument("--dir", type=Path, required=True, help="where the GGUFs are, or will be written")
    p.add_argument("--build-dir", type=Path, required=True, help="where llama.cpp is, or will be, built")
    p.add_argument("--llama-source", type=Path, help="an unpacked llama.cpp tree, instead of fetching one")
    p.add_argument("--llama-build", type=Path, help="its build directory, instead of making one")
    p.add_argument("--gen", type=int, default=32, help="tokens of a run")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", type=Path, default=BENCH / "results" / "sparse.jsonl", help="appended to")
    return p.parse_args()


def main() -> None:
    args = arguments()
    pack, context = Pack.open(args.pack), str(args.gen + 2)
    gguf = files(pack, args.dir)
    source = args.llama_source or source_tree(args.build_dir)
    libraries = build(source, args.llama_build or args.build_dir / "native", "native")
    llama = build_driver(source, libraries, args.build_dir)
    theirs = their_driver(args.engine, args.engine_build, args.build_dir)
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "tokens.i32"
        np.array(random_tokens(pack.spec, 1, args.gen + 2), np.int32).tofile(tokens)
        ours = HERE / "thermocline_driver.py"
        commands: dict[str, list[object]] = {
            OURS: [sys.executable, ours, args.pack, tokens, f"{THREADS},0,0,{args.gen}"],
            THEIRS: [theirs, gguf[THEIRS], tokens, context, 0, 1],
            LLAMA: [llama, gguf[LLAMA], tokens, context, 0, 1],
        }
        ns = rounds(args, commands)
    row: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "commit": commit()}
    row |= {"pack": pack.path.name, "cpu": hardware.cores().name, "threads": THREADS, "gen": args.gen}
    for name, runs in ns.items():
        ratios = [b / a for a, b in zip(ns[OURS], runs, strict=True)]
        row[name] = {"tok_s": args.gen * 1e9 / statistics.median(runs), "ns": runs}
        row[name]["ours_over_it"] = statistics.median(ratios)
        ratio = f"x{row[name]['ours_over_it']:.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"{name:12} {row[name]['tok_s']:6.2f} tok/s  ours over it {ratio}")
    with args.json.open("a") as f:
        f.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
