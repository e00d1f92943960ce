"""Measure this machine for a hardware file: its tiers, and the speeds that the kernels reach here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from thermocline import _native
from thermocline.errors import OutOfBudget, Unsupported
from thermocline.machine import hardware
from thermocline.machine.disk_speed import DiskSpeed as MeasuredDisk
from thermocline.machine.tiers import CpuTier, DiskTier, Kernel, Tiers
from thermocline.model import quant

COLUMNS, TOKENS, ROWS = 4096, 64, 2048  # of the matrix of the measurement with many tokens: 1 GFLOP
SECONDS = 0.25
ARENA_BYTES = 512 << 20  # the most weights that a measurement with one token reads
DEFAULT_CACHE_BYTES = 32 << 20
ANY_FORMAT = 64, 112  # bytes; exponents of f16, bf16, f32 and MXFP4 among them


def tiers_here(
    threads: int = 0, *, disk: MeasuredDisk | None = None, formats: Iterable[str] = tuple(quant.FORMATS)
) -> Tiers:
    """Measure this machine's CPU in a second, and a quarter of one for each format.

    Raises Unsupported or OutOfBudget.
    """
    cores = hardware.cores()
    threads = threads if threads > 0 else cores.threads
    ram, _ = hardware.available_memory()
    roof = hardware.read_gbs(threads, hardware.DOCTOR_SECONDS)
    if ram is None or roof is None:
        raise Unsupported("this machine cannot be measured (see `thermocline doctor`); give --hardware FILE")
    cache = hardware.cache_bytes() or DEFAULT_CACHE_BYTES
    kernels = measure_kernels(threads, formats, kernel_arena(cache, ram))
    # What disturbed the one measurement may have left the other alone, and no kernel is faster than memory.
    roof = max([roof, *(k.gbs for k in kernels.values())])
    source = time.strftime("measured by thermocline doctor, %Y-%m-%d", time.gmtime())
    cpu = CpuTier(ram, roof, threads, cache, kernels)
    return Tiers(cores.name or "this machine", source, cpu, None, None if disk is None else disk_tier(disk))


def with_gpu(tiers: Tiers, device: Any, kernels: Any, free_bytes: int, format: str = "q8_0") -> Tiers:
    """Return `tiers` with this GPU's measured speeds for that format. Takes about one second."""
    from thermocline.machine.gpu_speed import gpu_tier

    found = gpu_tier(device, kernels, free_bytes, format)
    return replace(tiers, name=f"{device.name}, {tiers.name}", gpu=found)


def disk_tier(found: MeasuredDisk) -> DiskTier | None:
    if found.sequential_gbs is None or found.random_iops is None:
        return None
    return DiskTier(found.sequential_gbs, found.random_iops, found.pieces_gbs, found.arrange_gbs)


def kernel_arena(cache: int, ram: int) -> _native.Arena:
    """Allocate random weights that are too large for the caches. Raises OutOfBudget."""
    nbytes = min(16 * cache, ARENA_BYTES)
    if nbytes > ram // 2:
        raise OutOfBudget(f"{ram / 2**20:.0f} MiB of memory is too little to measure the kernels in")
    return weights_of_any_format(nbytes)


def weights_of_any_format(nbytes: int) -> _native.Arena:
    """Allocate random bytes that are normal numbers in every format: no infinities, and no subnormals.

    Processors multiply those many times slower. Bytes below 60 made half of MXFP4's and a quarter of bf16's
    numbers subnormal: MXFP4 seemed to do 16 GFLOP/s where it does hundreds.
    """
    arena = _native.Arena(nbytes)
    fill = np.random.default_rng(0).integers(*ANY_FORMAT, 1 << 20, dtype=np.uint8)
    for at in range(0, arena.nbytes, len(fill)):
        arena.write(at, fill[: arena.nbytes - at])
    return arena


def measure_kernels(threads: int, formats: Iterable[str], arena: _native.Arena) -> dict[str, Kernel]:
    context = _native.Context(threads, "")
    return {f: _kernel(context, arena, f) for f in formats}


def _kernel(context: _native.Context, arena: _native.Arena, format: str) -> Kernel:
    """Measure rows as a matrix of the engine has them: in groups, where this processor is faster so."""
    row = quant.row_bytes(format, COLUMNS)
    every = arena.nbytes // row // context.group * context.group

    def run(rows: int, tokens: int) -> Callable[[], None]:
        what = arena, 0, quant.FORMATS[format].id, rows, COLUMNS, row
        w = _native.Matrix(*what)
        if context.interleaves(w):
            w = _native.Matrix(*what, context.group)
        x, out = np.ones((tokens, COLUMNS), np.float32), np.empty((tokens, rows), np.float32)
        return lambda: context.matmul(w, x, None, out, False)

    rows = min(every, ROWS)
    return Kernel(
        gbs=every * row / _seconds(run(every, 1)) / 1e9,
        gflops=2.0 * TOKENS * rows * COLUMNS / _seconds(run(rows, TOKENS)) / 1e9,
    )


def _seconds(run: Callable[[], None]) -> float:
    """Return the median time of at least 3 runs, and of as many as fit into SECONDS / 2."""
    run()
    taken: list[float] = []
    end = time.perf_counter() + SECONDS / 2
    while len(taken) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
