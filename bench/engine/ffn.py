"""Where one 7B FFN's time goes: gate rows and bundles (up and down rows), in GB/s beside the run's roof.

    python bench/engine/ffn.py [--format f16 q8_0 q4_0] [--threads 1 2] [--neurons 11008] [--isa avx2]

`--neurons 128` stays in the caches and shows what the kernels could do if memory were free.
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


def measure(fmt: str, threads: int, neurons: int, isa: str) -> tuple[float, float, float]:
    """(gate, bundle, all) in GB/s: medians of 11."""
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
    activation = ACTIVATIONS.index("silu")
    one = _native.Linear(gate, None), up, down, None, activation, 0.0, False, True
    layer = _native.FFN(None, *one, None, _native.Join(None, 1.0))
    gate_s, all_s = [], []
    repeat = max(1, 2000 // neurons)
    for _ in range(11):
        begin = time.perf_counter()
        for _ in range(repeat):
            native.matmul(gate, h, None, out, False)
        middle = time.perf_counter()
        for _ in range(repeat):
            native.ffn_add(x, h, layer, 0)
        gate_s.append((middle - begin) / repeat)
        all_s.append((time.perf_counter() - middle) / repeat)
    g, a = statistics.median(gate_s), statistics.median(all_s)
    gb = neurons * row / 1e9
    return gb / g, 2 * gb / (a - g), 3 * gb / a


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", nargs="+", default=["f16", "q8_0", "q4_0"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--neurons", type=int, default=11008)
    parser.add_argument("--isa", default="", help="lower the instruction set: scalar, avx2 or avx512")
    args = parser.parse_args()
    for threads in args.threads:
        for fmt in args.format:
            roof = hardware.read_gbs(threads, 0.3) or float("nan")
            gate, bundle, ffn = measure(fmt, threads, args.neurons, args.isa)
            print(
                f"{threads} threads, {fmt}: roof {roof:.1f} GB/s, gate {gate:.1f}, bundles {bundle:.1f}, "
                f"ffn {ffn:.1f} ({ffn / roof:.0%})"
            )


if __name__ == "__main__":
    main()
