"""Decode speed of a 7B-shaped Llama with random weights, against the memory roof measured in the same run.

    python bench/decode.py --dir /tmp/packs [--format q8_0 q4_0] [--threads 1 2] [--rounds 7] [--json FILE]

Every round alternates: roof, decode with t threads, roof; a share is the GB/s over the mean of the two
roofs beside it, and medians over rounds are printed. Also: Python's share of a token (its time outside native
calls). Packs are written to --dir once (7.2 + 3.8 GB) and reused.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from thermocline import _native, hardware, weights
from thermocline.decoder import Batch, FFNStats, forward
from thermocline.engine import Traffic
from thermocline.kv import KVCache, bytes_for
from thermocline.ops.cpu import CpuOps
from thermocline.pack import Pack, write_pack
from thermocline.spec import ModelSpec

LLAMA_2_7B = ModelSpec(
    architecture="llama",
    dim=4096,
    ffn_dim=11008,
    n_layers=32,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    vocab_size=32000,
    max_context=4096,
    norm="rms",
    norm_eps=1e-5,
    activation="silu",
)


class RandomWeights:
    """A TensorSource: 16 M normal numbers (sd 0.02), started at another place for every request."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.pool = (np.random.default_rng(1).standard_normal(1 << 24) * 0.02).astype(np.float32)

    def __call__(self, name: str, first: int, last: int, /) -> np.ndarray[Any, Any]:
        if "norm" in name:
            return np.ones(last - first, np.float32)
        columns = self.spec.n_heads * self.spec.head_dim if "attn_out" in name else self.spec.dim
        n = (last - first) * columns
        at = _native.crc32c(f"{name} {first}".encode()) % (len(self.pool) - n)
        return self.pool[at : at + n].reshape(last - first, columns)


class Clock:
    """Native calls of an ops object, timed: what is left of a token's time is Python's."""

    def __init__(self, native: Any) -> None:
        self.native, self.seconds = native, 0.0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.native, name)

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def decode(spec: ModelSpec, w: Any, ops: Any, kv: KVCache, table: Any, start: int, tokens: int) -> float:
    """Seconds for `tokens` single-token steps from position `start`, in the steady state."""
    ids, row = np.ones(1, np.int32), np.zeros(1, np.int32)
    begin = 0.0
    for position in range(start, start + tokens + 1):
        if position == start + 1:  # the first step warms up
            begin = time.perf_counter()
        batch = Batch(ids, np.array([position], np.int32), row, table, row)
        logits = forward(spec, w, kv, batch, ops, exact=True, stats=FFNStats())
        ids = np.array([int(np.argmax(logits[0]))], np.int32)
    return time.perf_counter() - begin


def measure(pack_dir: Path, threads: list[int], rounds: int, tokens: int) -> list[dict[str, Any]]:
    pack = Pack.open(pack_dir)
    spec = pack.spec
    begin = time.perf_counter()
    loaded = weights.load(pack, threads=max(threads))
    load_s = time.perf_counter() - begin
    context = 256
    kv = KVCache(spec, context // 32)
    table = np.arange(context // 32, dtype=np.int32)[None, :]
    ops = {t: CpuOps(t) for t in threads}
    traffic = Traffic.of(spec, loaded.weights)
    weight_bytes = traffic.fixed_bytes + traffic.neuron_bytes * spec.ffn_dim * spec.n_layers
    token_bytes = weight_bytes + bytes_for(spec, 1) * (32 + tokens // 2)
    rows: dict[int, list[tuple[float, float]]] = {t: [] for t in threads}
    for _ in range(rounds):
        for t in threads:
            before = hardware.read_gbs(t, 0.3) or 0.0
            seconds = decode(spec, loaded.weights, ops[t], kv, table, 32, tokens) / tokens
            after = hardware.read_gbs(t, 0.3) or 0.0
            rows[t].append((token_bytes / seconds / 1e9, (before + after) / 2))
    out = []
    for t in threads:
        clock = Clock(ops[t].native)
        ops[t].native = clock
        begin = time.perf_counter()
        decode(spec, loaded.weights, ops[t], kv, table, 32, tokens)
        python_share = 1 - clock.seconds / (time.perf_counter() - begin)
        ops[t].native = clock.native
        gbs = [g for g, _ in rows[t]]
        shares = sorted(g / roof for g, roof in rows[t])
        out.append(
            {
                "model": "llama-2-7b shape",
                "format": pack.weight_format,
                "isa": ops[t].native.isa,
                "threads": t,
                "tokens_per_s": round(statistics.median(gbs) * 1e9 / token_bytes, 3),
                "bytes_per_token": token_bytes,
                "gb_per_s": round(statistics.median(gbs), 2),
                "roof_gb_per_s": round(statistics.median(r for _, r in rows[t]), 2),
                "roof_share": round(statistics.median(shares), 3),
                "roof_share_min": round(shares[0], 3),
                "roof_share_max": round(shares[-1], 3),
                "python_share": round(python_share, 4),
                "rounds": rounds,
                "load_s": round(load_s, 2),
                "load_gb_per_s": round(loaded.bytes / load_s / 1e9, 2),
            }
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="where the packs are, or will be written")
    parser.add_argument("--format", nargs="+", default=["q8_0", "q4_0"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8, help="decoded per measurement")
    parser.add_argument("--json", type=Path, help="append the rows to this file, one JSON object a line")
    args = parser.parse_args()
    for fmt in args.format:
        pack_dir = args.dir / f"llama-2-7b-{fmt}"
        if not pack_dir.exists():
            print(f"writing {pack_dir}", file=sys.stderr)
            write_pack(pack_dir, LLAMA_2_7B, fmt, RandomWeights(LLAMA_2_7B))
        for row in measure(pack_dir, args.threads, args.rounds, args.tokens):
            line = json.dumps(row)
            print(line, flush=True)
            if args.json:
                with args.json.open("a") as f:
                    f.write(line + "\n")


if __name__ == "__main__":
    main()
