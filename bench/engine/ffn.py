"""Where one 7B FFN's time goes: gate rows and bundles (up and down rows), in GB/s beside the run's roof.

    python bench/engine/ffn.py [--format f16 q8_0 q4_0] [--threads 1 2] [--neurons 11008] [--isa avx2]
    python bench/engine/ffn.py --active 0.1 --near 0 1

`--neurons 128` stays in the caches and shows what the kernels could do if memory were free. `--active`: so
many neurons are above FATReLU's threshold, at random, and only their bundles are read. `--near`: whether rows
are asked for into the first-level cache, by turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from thermocline import _native
from thermocline.machine import hardware, this_machine
from thermocline.model import quant
from thermocline.model.spec import ACTIVATIONS
from thermocline.ops.cpu import CpuOps

DIM = 4096
OFF, EXACT = 0, 1  # csrc/engine/model_ops.h


def measure(
    fmt: str, threads: int, neurons: int, isa: str, active: float, near: list[bool]
) -> dict[bool, tuple[float, float, float]]:
    """Return (gate, bundle, all) in GB/s, medians of 11, by where rows are asked for."""
    row = quant.row_bytes(fmt, DIM)
    arena = this_machine.weights_of_any_format(3 * neurons * row)
    id_, bundle = quant.FORMATS[fmt].id, neurons * row
    gate = _native.Matrix(arena, 0, id_, neurons, DIM, row)
    up = _native.Matrix(arena, bundle, id_, neurons, DIM, 2 * row)
    down = _native.Matrix(arena, bundle + row, id_, neurons, DIM, 2 * row)
    native = CpuOps(threads, isa).native
    x, h = (
        np.zeros((1, DIM), np.float32),
        np.random.default_rng(0).standard_normal((1, DIM)).astype(np.float32),
    )
    out = np.empty((1, neurons), np.float32)
    native.matmul(gate, h, None, out, False)
    dense = active == 1
    activation = ACTIVATIONS.index("silu" if dense else "fatrelu")
    threshold = 0.0 if dense else max(0.0, float(np.quantile(out, 1 - active)))
    active = 1.0 if dense else float((out > threshold).mean())
    one = _native.Linear(gate, None), up, down, None, activation, threshold, False, True
    layer = _native.FFN(None, *one, None, _native.Join(None, 1.0))
    gate_s: dict[bool, list[float]] = {n: [] for n in near}
    all_s: dict[bool, list[float]] = {n: [] for n in near}
    repeat = max(1, 2000 // neurons)
    for n in near * 11:
        _native.rows_near(n)
        begin = time.perf_counter()
        for _ in range(repeat):
            native.matmul(gate, h, None, out, False)
        middle = time.perf_counter()
        for _ in range(repeat):
            native.ffn_add(x, h, layer, OFF if dense else EXACT)
        gate_s[n].append((middle - begin) / repeat)
        all_s[n].append((time.perf_counter() - middle) / repeat)
    gb, of = neurons * row / 1e9, {}
    for n in near:
        g, a = statistics.median(gate_s[n]), statistics.median(all_s[n])
        of[n] = gb / g, 2 * active * gb / (a - g), (1 + 2 * active) * gb / a
    return of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", nargs="+", default=["f16", "q8_0", "q4_0"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--isa", default="", help="lower the instruction set: scalar, avx2 or avx512")
    parser.add_argument("--active", type=float, default=1.0, help="share of the neurons; 1: dense")
    parser.add_argument("--near", type=int, nargs="+", default=[int(_native.rows_near())], choices=(0, 1))
    args = parser.parse_args()
    near = [bool(n) for n in args.near]
    for threads in args.threads:
        for fmt in args.format:
            roof = hardware.read_gbs(threads, 0.3) or float("nan")
            found = measure(fmt, threads, args.neurons, args.isa, args.active, near)
            for n, (gate, bundle, ffn) in found.items():
                print(
                    f"{threads} threads, {fmt}{', near' if n else ''}: roof {roof:.1f} GB/s, "
                    f"gate {gate:.1f}, bundles {bundle:.1f}, ffn {ffn:.1f} ({ffn / roof:.0%})"
                )


if __name__ == "__main__":
    main()
