"""Measure a GPU for the planner: memory, link to RAM, kernel launch, and hand-over to the CPU.

Each figure is the wall-clock time of queued work until it is done, as a step would wait for it: of so much
work that its begin and the wait, 50 to 150 us, are little of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from thermocline import _native
from thermocline.machine.tiers import GpuTier
from thermocline.model import quant
from thermocline.ops.device import Device
from thermocline.ops.device_rows import DeviceRows, Scratch
from thermocline.ops.device_sizes import KernelSizes

COLUMNS = 4096  # of the matrix that kernels are measured with
PROMPT, SMALL = (512, 4096), (32, 256)  # tokens, and rows that they meet; of what stands in for a card
RUNS = 5  # figures are medians of this many runs
LAUNCHES, HANDOVERS = 200, 50  # queued at once
LEAST_S = 0.01  # of work that is queued at once
SHARE_OF_FREE = 4  # one part in this many of the free memory is used for measuring


def gpu_tier(
    device: Device, kernels: Any, free_bytes: int, format: str, *, largest: int = 1 << 30
) -> GpuTier:
    """Measure a GPU with `free_bytes` of free memory. Kernels are measured with weights of `format`."""
    size = min(largest, free_bytes // SHARE_OF_FREE) // (1 << 20) * (1 << 20)
    data = device.zeros((size,), torch.uint8)
    read = size / _seconds(device, lambda: device.run(_sum, data.view(torch.float32))) / 1e9
    w = weights(data, format)
    tokens, rows = PROMPT if device.torch.type == "cuda" else SMALL
    return GpuTier(
        vram_bytes=free_bytes,
        read_gbs=read,
        share=min(1.0, _kernel_gbs(device, kernels, w) / read),
        gflops=_gflops(device, kernels, w, tokens, rows),
        launch_us=_launch_us(device),
        sync_us=_handover_us(device),
        link_gbs=_link_gbs(device, data),
    )


def weights(data: torch.Tensor, format: str) -> DeviceRows:
    """Return as many rows of zeros as there is room for."""
    width = quant.row_bytes(format, COLUMNS)
    return DeviceRows(data[: len(data) // width * width].view(-1, width), format, COLUMNS)


def _sum(x: torch.Tensor) -> None:
    x.sum()


def _kernel_gbs(device: Device, kernels: Any, w: DeviceRows) -> float:
    return w.nbytes / _product_seconds(device, kernels, w, 1) / 1e9


def _gflops(device: Device, kernels: Any, w: DeviceRows, tokens: int, rows: int) -> float:
    """Return the speed of a prompt's products, in the int8, f16 or tf32 that the format takes."""
    some = replace(w, data=w.data[:rows])
    return 2.0 * tokens * some.rows * COLUMNS / _product_seconds(device, kernels, some, tokens) / 1e9


def _product_seconds(device: Device, kernels: Any, w: DeviceRows, tokens: int) -> float:
    sizes = KernelSizes(tokens=tokens, dim=COLUMNS, neurons=COLUMNS, heads=1, head_dim=64, positions=32)
    x, y = (device.zeros((tokens, n), torch.float32) for n in (COLUMNS, w.rows))
    scratch = Scratch(device.zeros((sizes.scratch_bytes // 4,), torch.float32), sizes)
    return _seconds(device, lambda: device.run(kernels.matmul, y, w, x, None, False, scratch))


def _launch_us(device: Device) -> float:
    """Return the microseconds of one kernel launch in a recorded step."""
    x = device.zeros((32,), torch.float32)

    def work() -> None:
        for _ in range(LAUNCHES):
            device.run(x.zero_)

    return _seconds(device, device.record(work)) / LAUNCHES * 1e6


def _handover_us(device: Device) -> float:
    """Return the microseconds to the CPU and back, through an empty task, beside the GPU's own work."""
    there, here = device.zeros((COLUMNS,), torch.float32), device.pinned((COLUMNS,), torch.float32)
    task = _native.HostTask(_native.Context(1, ""), _native.StepSlot())

    def work() -> None:
        for _ in range(HANDOVERS):
            with device.beside():
                device.copy(here, there)
                device.call(task)
                device.copy(there, here)
            device.join()

    return _seconds(device, device.record(work)) / HANDOVERS * 1e6


def _link_gbs(device: Device, data: torch.Tensor) -> float:
    size = min(len(data), 256 << 20)
    here = device.pinned((size,), torch.uint8)
    return size / _seconds(device, lambda: device.copy(data[:size], here)) / 1e9


def _seconds(device: Device, work: Callable[[], Any]) -> float:
    """Return the seconds of one of so many that LEAST_S passes."""

    def taken(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            work()
        device.wait([])
        return (time.perf_counter() - begin) / times

    taken(1)  # kernels are compiled
    times = max(1, min(1000, math.ceil(LEAST_S / taken(1))))
    return statistics.median(taken(times) for _ in range(RUNS))
