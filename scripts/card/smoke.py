#!/usr/bin/env python3
"""The first minute on a card: does what the engine relies on hold, and what do its parts cost?

    scripts/card/smoke.py --gpu 0 --out smoke.json       # or --gpu stand-in, to try it without a card

A line of JSON for each part; all of them in FILE. A part that fails is a line, too, and the others go on; the
exit code is then 1.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thermocline import _native
from thermocline.machine import gpu_speed, hardware
from thermocline.model import quant
from thermocline.ops import cuda
from thermocline.ops.device import Device, Task
from thermocline.ops.device_rows import BegunNorm, DeviceRows, Kernels, Scratch, Squares
from thermocline.ops.device_sizes import KernelSizes, quantised_words
from thermocline.session import gpu

LAYERS, REPLAYS = 12, 2000  # of the recording whose answers are compared
ARENA_BYTES = 4 << 30  # registered at once
ROOF_BYTES = (1 << 30, 8 << 30)  # read at once: a short read shows the launch, too
CHAIN_LAYERS, CHAIN_REPLAYS = 32, 500  # of launches that overlap, beside those that do not
L2_BYTES = 512 << 20  # matrices together are larger than any L2
GEMV = [(12288, 4096), (4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096), (28672, 7168), (1024, 4096)]


def told(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return (done.stdout + done.stderr).strip()


def facts() -> dict[str, Any]:
    shm, query = (
        Path("/dev/shm"),
        "name,driver_version,memory.used,pcie.link.gen.current,pcie.link.width.current",
    )
    tools = ("nvcc", "cmake", "ninja", "c++", "gcc", "nvidia-smi")
    return {
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "triton": told(sys.executable, "-P", "-c", "import triton; print(triton.__version__)"),
        "isa": _native.isa(), "cores": str(hardware.cores()), "available_bytes": hardware.available_bytes(),
        "overcommit": Path("/proc/sys/vm/overcommit_memory").read_text().strip(),
        "shm": str(shutil.disk_usage(shm)) if shm.is_dir() else None, "tmp": str(shutil.disk_usage("/tmp")),
        "locked_memory": told("bash", "-c", "ulimit -l"), "tools": {t: shutil.which(t) for t in tools},
        "nvidia-smi": told("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"),
    }  # fmt: skip


# ---- what the engine relies on


def doubled(y: torch.Tensor, x: torch.Tensor) -> None:
    torch.mul(x, 2.0, out=y)


def added(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> None:
    torch.add(y, z, out=x)
    x.mul_(0.25)


class Divided:
    """Layers in small. On the main queue y = 2 x, beside it the CPU's z = W x; then x = (y + z) / 4."""

    def __init__(self, device: Device, threads: int, layers: int, dim: int = 512) -> None:
        self.device, self.layers, self.dim = device, layers, dim
        self.w = np.random.default_rng(0).standard_normal((dim, dim)).astype(np.float32) / dim**0.5
        self._arena = _native.Arena(self.w.nbytes)
        self._arena.write(0, self.w.view(np.uint8).ravel())
        self._context = _native.Context(threads, "")
        matrix = _native.Matrix(self._arena, 0, quant.FORMATS["f32"].id, dim, dim, dim * 4)
        self._linear = _native.Linear(matrix, None)
        self.x, self.y, self.z = (device.zeros((1, dim), torch.float32) for _ in range(3))
        self.there, self.back, self.begin, self.out = (
            device.pinned((1, dim), torch.float32) for _ in range(4)
        )
        self.tasks: list[Task] = []

    def work(self) -> None:
        d = self.device
        d.copy(self.x, self.begin)
        for _ in range(self.layers):
            task = _native.HostTask(self._context, _native.StepSlot())
            task.matmul(self._linear, self.there.numpy(), self.back.numpy())
            self.tasks.append(task)
            with d.beside():
                d.copy(self.there, self.x)
                d.call(task)
                d.copy(self.z, self.back)
            d.run(doubled, self.y, self.x)
            d.join()
            d.run(added, self.x, self.y, self.z)
        d.copy(self.out, self.x)

    def recorded(self) -> Callable[[], None]:
        """Queue it once, then record it."""
        self.work()
        self.device.wait(self.tasks)
        self.tasks.clear()
        return self.device.record(self.work)

    def expected(self, x: Any) -> Any:
        y = x.astype(np.float64)
        for _ in range(self.layers):
            y = 0.25 * (2 * y + y @ self.w.T.astype(np.float64))
        return y


def ordering(device: Device, threads: int, replays: int) -> dict[str, Any]:
    """Replay a recording with new contents; compare every answer."""
    case, rng = Divided(device, threads, LAYERS), np.random.default_rng(1)
    replay, errors, begin = case.recorded(), [], time.perf_counter()
    for _ in range(replays):
        x = rng.standard_normal((1, case.dim), dtype=np.float32)
        case.begin.copy_(torch.from_numpy(x))
        replay()
        device.wait(case.tasks)
        want = case.expected(x)
        errors.append(float(((case.out.numpy() - want) ** 2).mean() / (want**2).mean()))
    us = (time.perf_counter() - begin) / replays / case.layers * 1e6
    assert max(errors) < 1e-9, f"{sum(not e < 1e-9 for e in errors)} of {replays} replays are wrong"
    return {"replays": replays, "worst_nmse": max(errors), "us_a_layer": us}


def registered(device: Device, nbytes: int) -> dict[str, Any]:
    """Pin an arena as the engine does, and copy from it within a recording."""
    arena, begin = _native.Arena(nbytes), time.perf_counter()
    arena.write(0, np.arange(1 << 20, dtype=np.uint8))
    device.register(arena.address, arena.nbytes)
    took = time.perf_counter() - begin
    window = (ctypes.c_uint8 * arena.nbytes).from_address(arena.address)
    here = torch.from_numpy(np.ctypeslib.as_array(window))[: 1 << 20]
    there = device.zeros((1 << 20,), torch.uint8)
    device.record(lambda: device.copy(there, here))()
    device.wait([])
    assert torch.equal(there.cpu(), here), "other bytes arrived"
    device.release()
    return {"gib_per_s": arena.nbytes / 2**30 / took}


# ---- what its parts cost


def seconds(device: Device, work: Callable[[], Any], runs: int = 7) -> float:
    """Return the median time of queued work until the host knows that it is done."""
    work()
    device.wait([])
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        work()
        device.wait([])
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def handover(device: Device, threads: int) -> dict[str, float]:
    """Return what a layer costs whose CPU part is nearly nothing, with so many threads."""
    case = Divided(device, threads, 48, dim=64)
    return {"us_a_layer": seconds(device, case.recorded(), 20) / case.layers * 1e6}


def by_host_functions(gpu: str) -> float:
    """Return the microseconds of a hand-over without words in pinned memory."""
    device = cuda.Cuda(int(gpu), words=False)
    try:
        return gpu_speed._handover_us(device)
    finally:
        device.close()


def roofs(device: Device, sizes: tuple[int, ...]) -> dict[str, float]:
    """Return GB/s of reading and copying in the card's memory, and of the link."""
    found: dict[str, float] = {}
    for nbytes in sizes:
        data = device.zeros((nbytes // 4,), torch.float32)
        halves = data[: len(data) // 2], data[len(data) // 2 :]
        found[f"read_{nbytes >> 20}_MiB"] = (
            nbytes / seconds(device, partial(device.run, torch.sum, data)) / 1e9
        )
        found[f"copy_{nbytes >> 20}_MiB"] = nbytes / seconds(device, partial(device.copy, *halves)) / 1e9
        del data, halves
    here, there = device.pinned((1 << 26,), torch.float32), device.zeros((1 << 26,), torch.float32)
    found["to_device"] = here.nbytes / seconds(device, lambda: device.copy(there, here)) / 1e9
    found["from_device"] = here.nbytes / seconds(device, lambda: device.copy(here, there)) / 1e9
    return found


def products(
    device: Device, kernels: Kernels, format: str, shapes: list[tuple[int, int]], most: int
) -> dict[str, Any]:
    """Return microseconds and GB/s of matrices with one token, recorded, over more than the L2 holds."""
    found = {}
    for rows, columns in shapes:
        width = quant.row_bytes(format, columns)
        copies = max(2, most // (rows * width))
        data = torch.randint(0, 60, (copies, rows, width), dtype=torch.uint8, device=device.torch)
        x, y = (device.zeros((1, n), torch.float32) for n in (columns, rows))
        scratch = Scratch.of(KernelSizes(1, columns, max(rows, columns), 1, 64, 32), device.torch)
        every = [DeviceRows(part, format, columns) for part in data]

        def work(x: Any = x, y: Any = y, every: Any = every, scratch: Any = scratch) -> None:
            for w in every:
                device.run(kernels.matmul, y, w, x, None, False, scratch)

        work()  # compiles
        device.wait([])
        us = seconds(device, device.record(work)) / copies * 1e6
        found[f"{rows}x{columns}"] = {"us": us, "gbs": rows * width / us / 1e3}
    return found


def overlap(device: Device, kernels: Kernels, layers: int, dim: int, replays: int) -> dict[str, Any]:
    """Replay a chain of dependent launches; the same with int8 written by what makes vectors; that of
    launches that overlap; and both ways one whose norms begin in products. Every bit is compared, of the last
    two with each other. torch's kernels know nothing of overlaps.
    """
    sizes = {"up": (4 * dim, dim), "down": (dim, 4 * dim)}
    made = {
        name: torch.randint(0, 44, (layers, n, quant.row_bytes("q4_0", m)), dtype=torch.uint8)
        for name, (n, m) in sizes.items()
    }
    ups, downs = (
        [DeviceRows(part, "q4_0", sizes[name][1]) for part in data.to(device.torch)]
        for name, data in made.items()
    )
    x, normed, h = (device.zeros((1, n), torch.float32) for n in (dim, dim, 4 * dim))
    begin, out = (device.pinned((1, dim), torch.float32) for _ in range(2))
    weight = torch.ones(dim, device=device.torch)
    scratch = Scratch.of(KernelSizes(1, dim, 4 * dim, 1, 64, 32), device.torch)

    places = [device.zeros((quantised_words(1, n),), torch.int32) for n in (dim, 4 * dim)]
    sums = device.zeros((1, dim // 32), torch.float32)
    begun, squares = BegunNorm(weight, normed, sums, places[0]), Squares(sums, 1e-5)

    def chain(ints: bool, begins: bool) -> None:
        of_normed, of_h = places if ints else (None, None)
        device.copy(x, begin)
        for i, (up, down) in enumerate(zip(ups, downs, strict=True)):
            if i == 0 or not begins:
                device.run(kernels.norm, normed, x, weight, None, 1e-5, False, of_normed)
            what = (up, None, None, normed, "relu", 0.0, False, None, None, None, scratch)
            root = squares if i and begins else None
            device.run(kernels.gate_up, h, *what, None, 1.0, False, of_normed, of_h, root)
            more = (scratch, of_h, None, begun if begins else None)
            device.run(kernels.matmul, x, down, h, None, True, *more)
        device.copy(out, x)

    replay, us = [], []
    before = os.environ.get("THERMOCLINE_OVERLAP", "")
    for asked, ints, begins in (
        *(("0", False, False), ("0", True, False), ("1", True, False)),
        *(("0", True, True), ("1", True, True)),
    ):
        os.environ["THERMOCLINE_OVERLAP"] = asked
        chain(ints, begins)  # compiles
        device.wait([])
        replay.append(device.record(partial(chain, ints, begins)))
        us.append(seconds(device, replay[-1], 20) / layers * 1e6)
    os.environ["THERMOCLINE_OVERLAP"] = before
    wrong = 0
    for _ in range(replays):
        begin.copy_(torch.randn((1, dim)))
        answers = []
        for again in replay:
            again()
            device.wait([])
            answers.append(out.clone().view(torch.int32))
        pairs = (0, 1), (0, 2), (3, 4)
        wrong += not all(torch.equal(answers[i], answers[j]) for i, j in pairs)
    assert wrong == 0, f"{wrong} of {replays} replays have other bits where launches are fewer, or overlap"
    how = "_quantised_apart", "", "_overlapping", "_begun", "_begun_overlapping"
    return {"replays": replays, **{f"us_a_layer{name}": t for name, t in zip(how, us, strict=True)}}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--gpu", default="0", help="its number, or stand-in")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    tried = args.gpu == gpu.STAND_IN
    opened = gpu.find(args.gpu)
    assert opened is not None
    device, kernels, n = opened.device, opened.kernels, hardware.default_threads()
    shapes, most = ([(256, 256)], 1 << 20) if tried else (GEMV, L2_BYTES)
    parts: dict[str, Callable[[], Any]] = {
        "facts": facts,
        "ordering": lambda: ordering(device, max(1, n - 2), 40 if tried else REPLAYS),
        "registered": lambda: registered(device, 16 << 20 if tried else ARENA_BYTES),
        "launch_us": lambda: gpu_speed._launch_us(device),
        "handover_us": lambda: gpu_speed._handover_us(device),
        **({} if tried else {
            "hand_over": lambda: device.hand_over,  # type: ignore[attr-defined]
            "handover_us by host functions": partial(by_host_functions, args.gpu),
        }),
        "roofs_gbs": lambda: roofs(device, (1 << 20,) if tried else ROOF_BYTES),
        **{f"48 layers, {t} threads": partial(handover, device, t) for t in {n, max(1, n - 2)}},
    }  # fmt: skip
    parts["overlap"] = partial(
        overlap, device, kernels, *((2, 64, 3) if tried else (CHAIN_LAYERS, 4096, CHAIN_REPLAYS))
    )
    for format in ("f16", "q4_0", "q8_0"):
        parts[f"products {format}"] = partial(products, device, kernels, format, shapes, most)
    found, failed = dict[str, Any](), 0
    for name, part in parts.items():
        begin = time.perf_counter()
        try:
            found[name] = part()
        except Exception as e:  # whatever it is, the next part is worth its second
            traceback.print_exc()
            found[name], failed = {"failed": f"{type(e).__name__}: {e}"}, failed + 1
        print(
            json.dumps({name: found[name], "s": round(time.perf_counter() - begin, 2)}, default=str),
            flush=True,
        )
        args.out.write_text(json.dumps(found, indent=1, default=str))
    device.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
