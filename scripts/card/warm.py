#!/usr/bin/env python3
r"""Compile, without a card, the kernels that bench/gpu/gpu.py's models launch on one: into $TRITON_CACHE_DIR.

    TRITON_CACHE_DIR=/tmp/thermocline-card/triton \
        scripts/card/warm.py --target sm_90 --shape llama-2-7b --vram all

The engine runs on a device whose memory is nowhere, and what it launches is compiled instead of started. So a
launch has the key here that it has there, if Triton, its Python and this tree are the same. The folder's path
has to be the same, too: Triton writes it into the files. Further options are bench/gpu/gpu.py's, the same
as there; what a plan leaves to the CPU is loaded.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

sys.path += [str(room) for room in (Path(__file__).resolve().parents[2] / "bench").iterdir()]

import gpu as bench
from gpu_run import Loaded
from gpu_sides import Clock, Machine, NotOnThisCard

from thermocline.machine import gpu_speed
from thermocline.ops.device import StandIn, Task
from thermocline.ops.kernels import triton_kernels
from thermocline.session.gpu import OpenGpu

VRAM_BYTES = 78 << 30  # of an H100 that is otherwise idle


class Nowhere(StandIn):
    """A device without memory. Kernels are called where they are queued; nothing is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.torch = torch.device("meta")

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def call(self, task: Task) -> None:
        pass

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        if kernel.__module__ == triton_kernels.__name__:  # torch's need no compiling
            kernel(*args)


class Absent:
    """As much of a card's driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(device: StandIn, args: argparse.Namespace, directory: Path) -> None:
    """Launch all that measuring these shapes does, once."""
    opened = OpenGpu(device, triton_kernels, VRAM_BYTES)
    data = device.zeros((1 << 30,), torch.uint8)  # as much as a card is measured with
    for format in dict.fromkeys(("f16", *args.format)):
        weights = gpu_speed.weights(data, format)
        gpu_speed._kernel_gbs(device, triton_kernels, weights)
        gpu_speed._gflops(device, triton_kernels, weights, *gpu_speed.PROMPT)
    m = Machine(args, opened, None, Clock(time.monotonic() + args.budget_s), directory, "", lambda *_: None)  # type: ignore[arg-type]
    for shape, vram in bench.work_of(args):
        name = f"{shape.label}, {vram}"
        try:
            loaded = Loaded(m.model_of(shape), m.session_of(m.model_of(shape), vram))
        except NotOnThisCard as e:
            print(f"{name}: {e}")
            continue
        try:
            loaded.decode(1)
            loaded.prefill(args.prompt)
        finally:
            loaded.close()
        print(name, flush=True)
        m.clear()


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--target", required=True, help="sm_80, sm_89, sm_90 and so on")
    own, rest = p.parse_known_args(argv)
    args = bench.arguments(rest)
    if "TRITON_CACHE_DIR" not in os.environ:
        p.error("TRITON_CACHE_DIR names no folder")
    target = GPUTarget("cuda", int(own.target.removeprefix("sm_")), 32)
    triton.runtime.driver.set_active(Absent(target))
    JITFunction.__getitem__ = lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)
    found = {"compiled": 0, "there": 0}

    def note(cache_hit: bool, **_: Any) -> None:
        found["there" if cache_hit else "compiled"] += 1

    triton.knobs.compilation.listener = note
    device = Nowhere()
    try:
        with tempfile.TemporaryDirectory(dir=args.dir) as directory:
            launches(device, args, Path(directory))
    finally:
        device.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
