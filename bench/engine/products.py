"""How fast one thread multiplies a matrix with tokens, in TOP/s (2 operations for each weight and token).

    python bench/engine/products.py [--format q4_0 q4_k q6_k] [--tokens 8 64 512] [--isa amx avx512]
    python bench/engine/products.py --tokens 1 --rows 65536 --ahead 0 8192

--ahead: bytes ahead of its use that a group of rows is asked for; it shows where rows come from memory.
Instruction sets and distances take turns, in one process. The thread's processor time counts, the least of
all rounds: a neighbour that takes the processor away does not show, one that takes its caches does.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from thermocline import _native
from thermocline.machine.this_machine import weights_of_any_format
from thermocline.model import quant
from thermocline.ops.cpu import CpuOps


def measure(
    fmt: str, tokens: int, isas: list[str], ahead: list[int], rounds: int, cols: int, rows: int
) -> dict[str, float]:
    """Return TOP/s of each instruction set and distance. Rows lie in groups where that is faster."""
    row = quant.row_bytes(fmt, cols)
    arena = weights_of_any_format(rows * row)
    x = np.random.default_rng(0).standard_normal((tokens, cols)).astype(np.float32)
    out = np.empty((tokens, rows), np.float32)
    jobs = {}
    for isa in isas:
        native = CpuOps(1, isa).native
        matrix = _native.Matrix(arena, 0, quant.FORMATS[fmt].id, rows, cols, row)
        if native.interleaves(matrix):
            matrix = _native.Matrix(arena, 0, quant.FORMATS[fmt].id, rows, cols, row, native.group)
        for distance in ahead:
            jobs[f"{isa}, {distance} ahead" if len(ahead) > 1 else isa] = native, matrix, distance
    least = dict.fromkeys(jobs, float("inf"))
    for _ in range(rounds):
        for name, (native, matrix, distance) in jobs.items():
            _native.group_ahead(distance)
            begin = time.process_time()
            native.matmul(matrix, x, None, out, False)
            least[name] = min(least[name], time.process_time() - begin)
    return {name: 2e-12 * tokens * cols * rows / s for name, s in least.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--format", nargs="+", default=["q4_0", "q4_k", "q6_k"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--isa", nargs="+", default=_native.isa_levels()[:2])
    parser.add_argument("--ahead", nargs="+", type=int, default=[_native.group_ahead()])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cols", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for fmt in args.format:
        for tokens in args.tokens:
            found = measure(fmt, tokens, args.isa, args.ahead, args.rounds, args.cols, args.rows)
            if args.json:
                print(json.dumps({"format": fmt, "tokens": tokens, "tops": found}), flush=True)
            else:
                print(f"{fmt}, {tokens} tokens: " + ", ".join(f"{i} {v:.3f} TOP/s" for i, v in found.items()))


if __name__ == "__main__":
    main()
