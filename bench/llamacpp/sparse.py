"""What skipping neurons buys: `off`, `exact` and `predict` beside llama.cpp's dense decode of the same shape.

    python bench/llamacpp/sparse.py --dir /tmp/packs --build-dir /tmp/llama.cpp --format q4_0 --threads 1 2

The pack is `thermocline synth SHAPE --active`, its predictors are synthetic_predictors.py's. llama.cpp runs
the dense twin of the same shape and format (its speed does not depend on the numbers). It does not know OPT:
give `--dense` a Llama's config.json with as many weights. Runs alternate: each round runs every engine and
mode once, in another order. A mode's share of the roof is of the bytes that this mode must read. `asked` is
`predict` with every neuron predicted: what it takes longer than `exact`, which reads the same, is the
predictor's time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from build_llamacpp import PACKAGE, VERSION, build, build_driver, sh, source_tree
from engines import BENCH, HERE, Driver, commit
from vs_llamacpp import roof

from thermocline.machine import hardware
from thermocline.offline.bench import Test, random_tokens
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import FILE

MODES = ("off", "exact", "predict", "asked")
LLAMA = "llama.cpp"


def called(shape: str) -> str:
    return Path(shape).name.removesuffix(".json")


def models(args: argparse.Namespace, fmt: str) -> tuple[Path, Path]:
    """(sparse pack, with predictors if they are asked; dense GGUF)"""
    dense, layers = args.dense or args.shape, ("--layers", str(args.layers)) if args.layers else ()
    cut = f"-{args.layers}" if args.layers else ""
    pack, gguf = (args.dir / f"{called(shape)}{cut}-{fmt}" for shape in (args.shape, dense))
    kind = "-sparse" if args.activity == "easy" else f"-{args.activity}"
    pack, gguf = pack.with_name(pack.name + kind), gguf.with_name(gguf.name + ".gguf")
    synth = [sys.executable, "-m", "thermocline", "synth"]
    if not pack.exists():
        activity = ("--active", str(args.active), "--activity", args.activity)
        sh(*synth, args.shape, *layers, "--format", fmt, "-o", pack, *activity)
    if not (pack / FILE).exists() and set(args.modes) & {"predict", "asked"}:
        command = [sys.executable, BENCH / "engine" / "synthetic_predictors.py", pack, "--kind", args.kind]
        sh(*command, "--rank", str(args.rank), "--missed", str(args.missed))
    if not gguf.exists():
        scratch = args.dir / f"{called(dense)}-{fmt}-dense.tmp"
        sh(*synth, dense, *layers, "--format", fmt, "-o", scratch, "--gguf", gguf, "--force")
        shutil.rmtree(scratch)
    return pack, gguf


def rounds(args: argparse.Namespace, pack: Path, gguf: Path, tokens: Path) -> list[dict[str, Any]]:
    """One row a thread count. Both stay loaded where memory has room, else llama.cpp has its turn after."""
    tests = [Test(t, 0, 0, args.gen) for t in args.threads]
    words = [f"{t.threads},0,0,{t.gen}" for t in tests]
    ours = [sys.executable, HERE / "thermocline_driver.py", pack, tokens, *words]
    theirs = [args.driver, gguf, tokens, str(args.gen + 2), "0", "1"]
    need = pack.joinpath("weights.bin").stat().st_size + gguf.stat().st_size + (3 << 30)
    together = need < (hardware.available_bytes() or need + 1)
    found = {(t, m): list[dict[str, Any]]() for t in tests for m in (*args.modes, LLAMA)}
    roofs: dict[Test, list[float]] = {t: [roof(t)] for t in tests}

    def turn(driver: Driver, test: Test, modes: tuple[str, ...], warm: bool = False) -> None:
        for mode in modes:
            said = driver.run(test, 1) if mode == LLAMA else driver.ask(*RUN(test), mode)
            if not warm:
                found[test, mode].append(said)

    with Driver("thermocline", ours) as mine:
        other = Driver(LLAMA, theirs) if together else None
        for test in tests:
            modes = (*args.modes, LLAMA) if other else tuple(args.modes)
            for i in range(-1, args.rounds):
                for mode in modes[i % len(modes) :] + modes[: i % len(modes)]:
                    driver = other if mode == LLAMA and other else mine
                    turn(driver, test, (mode,), warm=i < 0)
                roofs[test].append(roof(test))
        if other:
            other.process.kill()
    if not together:
        with Driver(LLAMA, theirs) as driver:
            for test in tests:
                for i in range(-1, args.rounds):
                    turn(driver, test, (LLAMA,), warm=i < 0)
                    roofs[test].append(roof(test))
    return [row_of(test, args.modes, found, roofs[test], together) for test in tests]


def RUN(test: Test) -> tuple[Any, ...]:
    return ("run", test.threads, 1, 0, 0, test.gen)


def row_of(
    test: Test,
    modes: list[str],
    found: dict[tuple[Test, str], list[dict[str, Any]]],
    roofs: list[float],
    together: bool,
) -> dict[str, Any]:
    top = statistics.median(roofs)
    ns = {m: statistics.median(said["ns"] for said in found[test, m]) for m in (*modes, LLAMA)}
    row: dict[str, Any] = {
        "threads": test.threads,
        "gen": test.gen,
        "together": together,
        "roof_gb_per_s": top,
    }
    for mode in (*modes, LLAMA):
        runs = [said["ns"] for said in found[test, mode]]
        row[mode] = {"tok_s": test.gen * 1e9 / ns[mode], "ns": runs}
        row[mode]["ratio"] = statistics.median(
            b["ns"] / a for a, b in zip(runs, found[test, LLAMA], strict=True)
        )
        if mode == LLAMA:
            continue
        last = found[test, mode][-1]
        moved = last["bytes_per_token"] * test.gen
        row[mode] |= {"bytes_per_token": last["bytes_per_token"], "roof_share": moved / ns[mode] / top}
        row[mode] |= {key: last[key] for key in ("rows_fraction", "predicted_fraction", "active_fraction")}
    if "asked" in modes:
        row["predictor_share"] = (ns["asked"] - ns["exact"]) / ns["predict"]
    return row


def show(shape: str, fmt: str, activity: str, row: dict[str, Any]) -> None:
    planted = "planted, easy" if activity == "easy" else f"planted as {activity}"
    print(f"{shape} {fmt}, {planted}, {row['threads']} threads, roof {row['roof_gb_per_s']:.1f} GB/s")
    for mode in (m for m in (*MODES, LLAMA) if m in row):
        r = row[mode]
        line = f"  {mode:10} {r['tok_s']:7.2f} tok/s  x{r['ratio']:.2f}"
        if mode != LLAMA:
            line += f"  {r['bytes_per_token'] / 1e6:7.0f} MB/token  {r['roof_share']:.0%} of the roof"
            line += f"  {r['predicted_fraction']:.1%} of gates, {r['rows_fraction']:.1%} of up and down"
        print(line)
    if "predictor_share" in row:
        print(f"  predictor: {row['predictor_share']:.1%} of a predicted token's time", flush=True)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", default="llama-2-7b", help="what `thermocline synth` is asked for")
    p.add_argument("--dense", help="what llama.cpp is given instead, where it does not know the shape")
    p.add_argument("--format", nargs="+", default=["q4_0"])
    p.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    p.add_argument("--layers", type=int, help="so many layers of the shape only")
    p.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="asked needs predict and exact"
    )
    p.add_argument("--active", type=float, default=0.11)
    p.add_argument("--activity", choices=["easy", "trained"], default="easy", help="how neurons are planted")
    p.add_argument("--kind", choices=["svd", "sign"], default="svd")
    p.add_argument("--rank", type=int, default=128)
    p.add_argument("--missed", type=float, default=0.005)
    p.add_argument("--gen", type=int, default=24, help="tokens of a run")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--dir", type=Path, required=True, help="where the models are, or will be written")
    p.add_argument("--build-dir", type=Path, required=True, help="where llama.cpp is, or will be, built")
    p.add_argument("--llama-source", type=Path, help="an unpacked llama.cpp tree, instead of fetching one")
    p.add_argument("--llama-build", type=Path, help="its build directory, instead of making one")
    p.add_argument("--json", type=Path, default=BENCH / "results" / "sparse.jsonl", help="appended to")
    p.add_argument("--prepare", action="store_true", help="make what is missing and measure nothing")
    return p.parse_args()


def main() -> None:
    args = arguments()
    for directory in (args.dir, args.build_dir, args.json.parent):
        directory.mkdir(parents=True, exist_ok=True)
    source = args.llama_source or source_tree(args.build_dir)
    libraries = build(source, args.llama_build or args.build_dir / "native", "native")
    args.driver = build_driver(source, libraries, args.build_dir)
    for fmt in args.format:
        pack, gguf = models(args, fmt)
        if args.prepare:
            continue
        spec = Pack.open(pack).spec
        with tempfile.TemporaryDirectory() as scratch:
            tokens = Path(scratch) / "tokens.i32"
            np.array(random_tokens(spec, 1, args.gen + 2), np.int32).tofile(tokens)
            rows = rounds(args, pack, gguf, tokens)
        for row in rows:
            show(called(args.shape), fmt, args.activity, row)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            about = {"time": now, "shape": called(args.shape), "format": fmt, "commit": commit()}
            about |= {
                key: getattr(args, key)
                for key in ("dense", "layers", "active", "activity", "kind", "rank", "missed")
            }
            about |= {"cpu": hardware.cores().name, "llama": f"{PACKAGE} {VERSION}"}
            with args.json.open("a") as f:
                f.write(json.dumps(about | row) + "\n")


if __name__ == "__main__":
    main()
