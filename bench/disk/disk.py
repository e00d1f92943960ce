"""A model larger than memory, ours beside llama.cpp (mmap), under one limit that counts the page cache.

    python bench/disk/disk.py --pack P --gguf G.gguf --build-dir /tmp/llama.cpp --limit 8
    python bench/disk/disk.py --pack P --limit 6 8 12 16 --variants all
    python bench/disk/disk.py --pack M.gguf --gguf M.gguf --build-dir /tmp/llama.cpp --variants all

As root: a limit is a memory cgroup. Each run is a process that loads. Rounds go through the variants in turn,
the first changing: everything on, then less and less of the disk tier. llama.cpp generates few tokens: each
takes seconds. `plan` is asked beforehand.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(room) for room in Path(__file__).resolve().parents[1].iterdir()]  # what other rooms have

import numpy as np
from build_llamacpp import PACKAGE, VERSION, build, build_driver, note, source_tree
from engines import Driver, commit
from memory_limit import drop_from_cache, memory_limit

from thermocline.machine import hardware
from thermocline.offline.bench import random_tokens
from thermocline.opening.open_model import open_model

GIB = 1 << 30
VARIANTS = {
    "all": "",
    "no pipeline": "pipeline",
    "no cache": "cache,pipeline",
    "no bundles": "bundle,cache,pipeline",
}
SHOWN = ("token_ms_p99", "cache_hit_rate", "disk_bytes_per_token", "disk_gb_per_s", "disk_wait_share")


def thermocline(*words: object) -> list[str]:
    return [sys.executable, "-m", "thermocline", *map(str, words)]


def ours(args: argparse.Namespace, limit: float, without: str) -> dict[str, Any]:
    """A row of `thermocline bench`, and what the group was charged."""
    if args.pack.is_file():
        drop_from_cache(args.pack)
    command = thermocline("bench", "-m", args.pack, "--sparsity", args.sparsity, "-t", args.threads, "-q")
    command += [
        "-p",
        "0",
        "-d",
        str(args.depth),
        "-n",
        str(args.gen),
        "-r",
        str(args.repeat),
        "-o",
        "json",
        "--ram",
        str(limit),
    ]
    command += ["--disable", without] if without else []
    with memory_limit(int(limit * GIB)) as group:
        said = subprocess.run(group.command([*command]), stdout=subprocess.PIPE, text=True, check=True)
        row: dict[str, Any] = json.loads(said.stdout)[0]
        return row | {"charged_bytes": group.peak_bytes()}


def theirs(args: argparse.Namespace, limit: float, tokens: Path) -> dict[str, Any]:
    drop_from_cache(args.gguf)
    with memory_limit(int(limit * GIB)) as group:
        command = group.command([args.driver, args.gguf, tokens, "64", "1", "0"])
        with Driver("llama.cpp", command) as driver:
            driver.ask("run", args.threads, 0, 0, 0, 1)
            said = driver.ask("run", args.threads, 0, 0, 0, args.llama_gen)
        return {"avg_ts": args.llama_gen * 1e9 / said["ns"], "charged_bytes": group.peak_bytes()}


def planned(args: argparse.Namespace, limit: float) -> dict[str, Any]:
    command = thermocline("plan", args.pack, "--ram", limit, "--sparsity", args.sparsity, "-t", args.threads)
    command += ["--ctx", str(args.depth + args.gen), "--json", "-q"]  # keys and values as in a run
    answer: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return answer | {"model": args.pack.name}  # not where it was


def rounds(args: argparse.Namespace, limit: float, tokens: Path) -> Iterator[dict[str, Any]]:
    plan = planned(args, limit)
    names = args.variants
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for i in range(args.rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            note(f"{limit:g} GiB, round {i + 1} of {args.rounds}: {name}")
            found[name].append(ours(args, limit, VARIANTS[name]))
    llama = [theirs(args, limit, tokens) for _ in range(args.llama_rounds if args.gguf else 0)]
    for name, rows in found.items():
        speeds = [ts for row in rows for ts in row["samples_ts"]]
        yield {
            "variant": name,
            "limit_gib": limit,
            "tok_s": statistics.median(speeds),
            "samples_ts": speeds,
            **{key: statistics.median(row[key] or 0.0 for row in rows) for key in SHOWN},
            "memory_bytes": rows[0]["memory_bytes"],
            "charged_bytes": max(row["charged_bytes"] for row in rows),
            "disk": rows[0]["disk"],
            "planted": rows[0]["planted"],
            "plan": plan,
            "llama_ts": [row["avg_ts"] for row in llama],
            "llama_charged_bytes": [row["charged_bytes"] for row in llama],
        }


def show(row: dict[str, Any]) -> None:
    times = row["tok_s"] / statistics.median(row["llama_ts"]) if row["llama_ts"] else float("nan")
    mean_ms = 1e3 / row["tok_s"]
    print(
        f"{row['limit_gib']:g} GiB, {row['variant']:11} {row['tok_s']:6.2f} tok/s  x{times:.1f}  hit "
        f"{row['cache_hit_rate']:.1%}  {row['disk_bytes_per_token'] / 1e6:.0f} MB/token  "
        f"{row['disk_gb_per_s']:.2f} GB/s  waiting {row['disk_wait_share']:.0%}  P99/mean "
        f"{row['token_ms_p99'] / mean_ms:.2f}  charged {row['charged_bytes'] / GIB:.2f} GiB  "
        f"{row['planted'] or ''}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pack", type=Path, required=True, help="what we run: a pack, or a GGUF in place")
    p.add_argument("--gguf", type=Path, help="what llama.cpp runs: as large, or the same")
    p.add_argument("--limit", type=float, nargs="+", default=[8.0], help="GiB; several: a sweep")
    p.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    p.add_argument("--sparsity", default="predict")
    p.add_argument("--threads", type=int, default=hardware.default_threads())
    p.add_argument("--gen", type=int, default=128)
    p.add_argument("--depth", type=int, default=0, help="tokens of context before ours generates")
    p.add_argument("--repeat", type=int, default=1, help="runs of each process")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--llama-gen", type=int, default=3)
    p.add_argument("--llama-rounds", type=int, default=1)
    p.add_argument("--build-dir", type=Path)
    p.add_argument("--llama-source", type=Path, help=f"default: {PACKAGE} {VERSION} from the package index")
    p.add_argument("--llama-build", type=Path)
    p.add_argument("--json", type=Path, default=Path("disk.jsonl"), help="rows are appended")
    args = p.parse_args()
    if args.gguf:
        if args.build_dir is None:
            p.error("--gguf needs --build-dir, where llama.cpp's driver is built")
        source = args.llama_source or source_tree(args.build_dir)
        libraries = build(source, args.llama_build or args.build_dir / "native", "native")
        args.driver = build_driver(source, libraries, args.build_dir)
    return args


def main() -> None:
    args = arguments()
    spec = open_model(args.pack, Path(tempfile.gettempdir()) / "thermocline-bench", None).spec
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "tokens.i32"
        np.array(random_tokens(spec, 1, 64), np.int32).tofile(tokens)
        for limit in args.limit:
            for row in rounds(args, limit, tokens):
                show(row)
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                about = {"time": now, "commit": commit(), "pack": args.pack.name, "sparsity": args.sparsity}
                about |= {"threads": args.threads, "gen": args.gen, "cpu": hardware.cores().name}
                with args.json.open("a") as f:
                    f.write(json.dumps(about | row) + "\n")


if __name__ == "__main__":
    main()
