"""Several chats at once of a model larger than memory, beside one: tokens a second of all of them together.

    python bench/disk/chats.py MODEL --ram 6 --chats 1 4 --rounds 3

As root: each run is a process in a memory cgroup. Rounds take the numbers of chats in turn. Each chat is
random tokens of its own. Timed are the steps in which all of them answer, from the 17th token on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from memory_limit import drop_from_cache, memory_limit

from thermocline.engine.request import disk_figures, request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.offline.bench import Script, random_tokens
from thermocline.opening.open_model import open_model
from thermocline.plan.memory import GIB
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

DISK = "cache_hit_rate", "disk_bytes_per_token", "disk_wait_share"  # of whole answers
WARM = 16  # tokens of each answer before the clock starts: the cache has seen them


def run(args: argparse.Namespace, chats: int) -> dict[str, Any]:
    """In a process of its own."""
    model = open_model(args.model, "", None)
    options = EngineOptions(
        sparsity=args.sparsity, ram=args.ram, max_batch=chats, context=args.ctx, threads=args.threads
    )
    with Session.open(model, options) as session:
        engine = session.load()
        params = SamplingParams(max_tokens=WARM + args.gen, temperature=0)
        requests = []
        for i in range(chats):
            ids = random_tokens(model.spec, 1 + i, args.prompt + WARM + args.gen)
            request = request_for(model.spec, engine.context, None, ids[: args.prompt], params)
            request.sampler = Script(model.spec, ids[args.prompt :])
            requests.append(engine.queue(request))
        while any(len(r.ids) - r.n_prompt < WARM for r in requests):
            engine.step()
        begin, before = time.perf_counter(), sum(len(r.ids) for r in requests)
        while all(r.finish_reason is None for r in requests):
            engine.step()
        tokens = sum(len(r.ids) for r in requests) - before
        if not tokens:
            raise SystemExit(f"keys and values of {chats} chats at once have no room; use a smaller --ctx")
        seconds = time.perf_counter() - begin
        figures = [disk_figures(r.completion().figures, session.threads) for r in requests]
        of = {key: [f[key] for f in figures if f[key] is not None] for key in DISK}
        return {"chats": chats, "tokens": tokens, "tok_s": tokens / seconds} | {
            # A step's waiting is divided among its chats.
            key: (sum(x) if key == "disk_wait_share" else statistics.mean(x)) if x else None
            for key, x in of.items()
        }


def limited(args: argparse.Namespace, chats: int) -> dict[str, Any]:
    if args.model.is_file():
        drop_from_cache(args.model)
    with memory_limit(int(args.ram * GIB)) as group:
        command: list[str | Path] = [sys.executable, *sys.argv, "--child", str(chats)]
        said = subprocess.run(group.command(command), stdout=subprocess.PIPE, text=True)
        if said.returncode:
            raise SystemExit(said.returncode)
        row: dict[str, Any] = json.loads(said.stdout)
        return row | {"charged_bytes": group.peak_bytes()}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--ram", type=float, required=True, help="GiB")
    p.add_argument("--chats", type=int, nargs="+", default=[1, 4])
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--prompt", type=int, default=32)
    p.add_argument("--gen", type=int, default=32)
    p.add_argument("--ctx", type=int, default=256)
    p.add_argument("--threads", type=int)
    p.add_argument("--sparsity", default="exact")
    p.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return p.parse_args()


def main() -> None:
    args = arguments()
    if args.child:
        print(json.dumps(run(args, args.child)))
        return
    rows = [limited(args, chats) for _ in range(args.rounds) for chats in args.chats]
    speed = {n: [row["tok_s"] for row in rows if row["chats"] == n] for n in args.chats}
    one = statistics.median(speed[args.chats[0]])
    for n, speeds in speed.items():
        median = statistics.median(speeds)
        charged = max(row["charged_bytes"] for row in rows if row["chats"] == n) / GIB
        each = ", ".join(f"{x:.2f}" for x in speeds)
        print(
            f"{n} at once: {median:.2f} tok/s ({each}), x{median / one:.2f}, charged {charged:.2f} GiB",
            end="",
        )
        of = [[row[key] for row in rows if row["chats"] == n and row[key] is not None] for key in DISK]
        if all(of):
            hits, read, waiting = map(statistics.median, of)
            print(f", hits {hits:.1%}, {read / 1e6:.0f} MB a token, waiting {waiting:.0%}", end="")
        print()


if __name__ == "__main__":
    main()
