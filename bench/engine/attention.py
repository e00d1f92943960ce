"""Attention at depth, in GB/s of keys and values beside the run's roof; with -m, whole tokens too.

    python bench/engine/attention.py [--cache f16 q8_0 q4_0 q8_0/q4_0] [--shape llama-2-7b tinyllama-1.1b]
        [--isa avx2 avx512] [--threads 1 2] [--depth 4096] [--model MODEL] [-o FILE]

Pages are full of random numbers, and lie in memory as a long prompt leaves them. Layers go in turn, more of
them than the caches hold, and so do the types of the cache and the roof: a figure is the median of its
rounds, and a share of the roof that of ratios within a round. `-m` (a pack or a GGUF) computes
tokens after such pages: all types over the same weights, in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.convert.synthetic import read_shape
from thermocline.engine.decoder import bind, forward, rope_tables
from thermocline.engine.kv_cache import KVCache, blocks_for, bytes_for
from thermocline.machine import hardware
from thermocline.model.modes import CacheTypes
from thermocline.model.spec import ModelSpec
from thermocline.opening.open_model import open_model
from thermocline.ops.cpu import CpuOps, native_heads
from thermocline.ops.interface import F16, U8, Batch, FFNStats, Heads
from thermocline.pack.stored_model import StoredModel
from thermocline.session import weights

LEAST_BYTES = 512 << 20  # of all layers' keys and values: none of them is in a cache when its turn comes
ROOF_SECONDS = 0.3


def types_of(said: str) -> CacheTypes:
    k, _, v = said.partition("/")
    return CacheTypes(k, v or k)


def fill(pages: F16 | U8, type: str, scale_bytes: int) -> None:
    """Small random numbers: f16, or quants and behind them in each page scales near 1/16."""
    rng = np.random.default_rng(0)
    if type == "f16":
        some = rng.standard_normal(1 << 20, dtype=np.float32).astype(np.float16)
        flat = pages.reshape(-1)
        for at in range(0, len(flat), len(some)):
            flat[at : at + len(some)] = some[: len(flat) - at]
        return
    each: U8 = rng.integers(0, 256, (pages.shape[1],), dtype=np.uint8)
    each[-scale_bytes:] = rng.uniform(0.02, 0.1, scale_bytes // 2).astype(np.float16).view(np.uint8)
    pages[:] = each


def filled(spec: ModelSpec, positions: int, types: CacheTypes) -> KVCache:
    kv = KVCache(spec, blocks_for(positions), types=types)
    scales = kv.block * spec.head_dim // 32 * 2
    for i in range(spec.n_layers):
        fill(kv.layer(i).k, types.k, scales)
        fill(kv.layer(i).v, types.v, scales)
    return kv


def one_token(spec: ModelSpec, position: int) -> Batch:
    table = np.arange(blocks_for(position + 1), dtype=np.int32)[None]
    at = np.array([position], np.int32)
    return Batch(np.array([3], np.int32), at, 0 * at, table, 0 * at)


def attention_of(spec: ModelSpec, depth: int, types: CacheTypes, ops: CpuOps) -> Callable[[], float]:
    """Return a call that attends to all positions in every layer, and returns the GB/s of reading them."""
    layer_bytes = bytes_for(spec, depth, types) // spec.n_layers
    many = dataclasses.replace(spec, n_layers=-(-LEAST_BYTES // layer_bytes))
    kv, batch = filled(many, depth, types), one_token(spec, depth - 1)
    cos, sin = rope_tables(spec, batch.positions)
    step = ops.step(batch, kv.block, cos, sin)
    qkv = np.random.default_rng(1).standard_normal((1, spec.qkv_rows), dtype=np.float32)
    out = np.empty((1, spec.n_heads * spec.head_dim), np.float32)
    made = native_heads(Heads.of(spec))

    def call() -> float:
        begin = time.perf_counter()
        for i in range(many.n_layers):
            ops.native.attention(qkv, made, step, kv.layer(i).native, out)
        return many.n_layers * layer_bytes / (time.perf_counter() - begin) / 1e9

    return call


def tokens_of(stored: StoredModel, depth: int, types: CacheTypes, loaded: Any) -> Callable[[], float]:
    """Return a call that computes tokens after `depth` positions, and returns how many a second."""
    model = bind(stored.spec, loaded.weights, loaded.ops)
    kv, count = filled(stored.spec, depth + 1, types), 6

    def call() -> float:
        begin = time.perf_counter()
        for _ in range(count):
            forward(model, kv, one_token(stored.spec, depth), loaded.ops, sparsity="off", stats=FFNStats())
        return count / (time.perf_counter() - begin)

    return call


def in_turn(calls: dict[str, Callable[[], float]], threads: int, rounds: int) -> dict[str, list[float]]:
    """Figures of each call and of the roof, a round after the other; the first one warms up."""
    every = calls | {"roof": lambda: hardware.read_gbs(threads, ROOF_SECONDS) or float("nan")}
    found: dict[str, list[float]] = {name: [] for name in every}
    for i in range(rounds + 1):
        for name, call in every.items():
            figure = call()
            if i:
                found[name].append(figure)
    return found


def ratio(found: dict[str, list[float]], name: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(found[name], found[other], strict=True))


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for isa, threads in ((i, t) for i in args.isa for t in args.threads):
        about = {"isa": CpuOps(1, isa).native.isa, "threads": threads, "depth": args.depth}
        for shape in args.shape:
            spec = dataclasses.replace(read_shape(shape)[1], max_context=args.depth + 1)
            ops = CpuOps(threads, isa)
            for cache in args.cache:
                calls = {cache: attention_of(spec, args.depth, types_of(cache), ops)}
                found = in_turn(calls, threads, args.rounds)
                gbs, roof = (statistics.median(found[name]) for name in (cache, "roof"))
                yield about | {"shape": shape, "cache": cache, "gbs": gbs, "roof_gbs": roof,
                               "of_roof": ratio(found, cache, "roof")}  # fmt: skip
        if args.model is not None:
            stored = open_model(args.model, "", None)
            loaded = weights.load(stored, threads=threads, isa=isa)
            found = in_turn(
                {c: tokens_of(stored, args.depth, types_of(c), loaded) for c in args.cache},
                threads,
                args.rounds,
            )
            for cache in args.cache:
                yield about | {"model": str(args.model), "cache": cache,
                               "tokens_per_s": statistics.median(found[cache]),
                               "of_first": ratio(found, cache, args.cache[0])}  # fmt: skip


def said(row: dict[str, Any]) -> str:
    where = f"{row['isa']}, {row['threads']} threads, {row['cache']} cache at {row['depth']}"
    if "gbs" in row:
        return (
            f"{row['shape']}, {where}: {row['gbs']:.1f} of {row['roof_gbs']:.1f} GB/s ({row['of_roof']:.0%})"
        )
    return f"{row['model']}, {where}: {row['tokens_per_s']:.2f} tokens/s ({row['of_first']:.2f} x the first)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", nargs="+", default=["f16", "q8_0", "q4_0"], help="TYPE, or KEYS/VALUES")
    parser.add_argument("--shape", nargs="*", default=["llama-2-7b"])
    parser.add_argument(
        "--isa", nargs="+", default=[""], help="scalar, avx2, avx512 ...; the best if not said"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-m", "--model", type=Path, help="a pack or a GGUF: measure its tokens too")
    parser.add_argument("-o", "--output", type=Path, help="append a JSON line a row")
    args = parser.parse_args()
    for row in rows(args):
        print(said(row), flush=True)
        if args.output is not None:
            with args.output.open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
