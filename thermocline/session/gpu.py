"""The GPUs that a session uses: found by name, opened, measured.

torch is imported when a GPU is asked for or there is one, never before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline.errors import Unsupported, UsageError
from thermocline.machine import hardware, this_machine, tiers
from thermocline.plan.memory import GIB

if TYPE_CHECKING:
    from thermocline.ops.device import Device
    from thermocline.ops.device_rows import Kernels
    from thermocline.pack.stored_model import StoredModel

log = logging.getLogger(__name__)

Trust = Callable[[hardware.GpuInfo, int], str | None]  # -> why a GPU's answers are not to be trusted
STAND_IN = "stand-in"  # a device in RAM: to see what a GPU would be given, and to test with
STAND_IN_GIB = 1.0  # of it, unless --vram says
PRETENDED = tiers.GpuTier(
    1 << 30, 1000.0, 0.8, 80000.0, 0.0, 0.0, 25.0
)  # its speeds: all goes there that fits
RESERVE_BYTES = 256 << 20  # of free VRAM, left to whoever else draws on the screen
DECODED_BYTES = 768 << 20  # and to torch's kernels, which work on pieces of decoded weights, keys and values


@dataclass(frozen=True)
class OpenGpu:
    """A device to plan for."""

    device: Device
    kernels: Kernels  # ops.kernels.triton_kernels, or for the stand-in ops.kernels.torch_kernels
    free_bytes: int
    others: int = 0  # GPUs beside it, which stay idle


def find(asked: str, vram: float | None = None, trust: Trust | None = None) -> OpenGpu | None:
    """Open a GPU by name: "off", "auto" (None where none can be used), its number, or STAND_IN.

    `trust` is asked about one that could be used before it is opened; None: its answers are not used, or are
    compared anyway.
    Raises Unsupported where one is asked for by number and cannot be used, and says why. Logs why one that
    is there is not used.
    """
    if asked == "off":
        return None
    if asked == STAND_IN:
        try:
            from thermocline.ops.device import StandIn
            from thermocline.ops.kernels import torch_kernels
        except ImportError as e:
            raise Unsupported(f"--gpu {asked}: {_missing(e)}") from None
        return OpenGpu(StandIn(), torch_kernels, int((vram or STAND_IN_GIB) * GIB))
    if asked != "auto" and not asked.isdigit():
        raise UsageError(f"--gpu {asked}: it is off, auto, a GPU's number, or {STAND_IN}")
    board = hardware.gpu()
    index = int(asked) if asked.isdigit() else 0
    why = unusable(board, index)
    if why is None and trust is not None:
        why = trust(board, index)
    if why is not None:
        if asked != "auto":
            raise Unsupported(f"--gpu {asked}: {why}")
        if board.found:  # else nobody misses it
            log.warning(f"the GPU is not used: {why}")
        return None
    return _cuda(index, vram)


def find_all(asked: str, vram: float | None = None, trust: Trust | None = None) -> tuple[OpenGpu, ...]:
    """Open the GPUs that are named, with commas between them, as `find` does; none where none can be used.

    `vram`: GiB of each that may be taken.
    """
    names = asked.split(",")
    numbers = [name for name in names if name != STAND_IN]
    if len(names) > 1 and (len(set(numbers)) < len(numbers) or not all(map(str.isdigit, numbers))):
        raise UsageError(f"--gpu {asked}: several GPUs are named by their numbers, each once, as in 0,1")
    found: list[OpenGpu] = []
    try:
        for name in names:
            if (one := find(name, vram, trust)) is not None:
                found.append(one)
    except BaseException:
        for one in found:
            one.device.close()
        raise
    return tuple(found)


def trainer(asked: str) -> str:
    """Return torch's name of the first GPU that is asked for, to train on: "cpu" with the stand-in or none.

    Raises as `find` does.
    """
    name, *_ = asked.split(",")
    if name in ("off", STAND_IN):
        return "cpu"
    if name != "auto" and not name.isdigit():
        raise UsageError(f"--gpu {asked}: it is off, auto, a GPU's number, or {STAND_IN}")
    index = 0 if name == "auto" else int(name)
    why = unusable(hardware.gpu(), index)
    if why is not None and name != "auto":
        raise Unsupported(f"--gpu {asked}: {why}")
    return "cpu" if why is not None else f"cuda:{index}"


def unusable(board: hardware.GpuInfo, index: int = 0) -> str | None:
    """Return why that GPU cannot be used here, or None; DeviceFailure where it does not answer.

    Loads torch only where there is a driver.
    """
    if not board.found:
        return board.why
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as e:
        return _missing(e)
    shown, built = os.environ.get("CUDA_VISIBLE_DEVICES"), torch.version.cuda
    if built is None:
        return f"torch {torch.__version__} is built without CUDA: install one that is"
    if not torch.cuda.is_available():
        if shown is not None:
            return f"CUDA_VISIBLE_DEVICES={shown} leaves no GPU here: unset it, or let it name one there is"
        return f"torch {torch.__version__} (CUDA {built}) cannot use the driver: it may be too old"
    from thermocline.ops import cuda

    try:
        cuda.check(index)
    except Unsupported as e:
        return str(e)
    return None


def _missing(e: ImportError) -> str:
    return f"{e.name} is not installed: pip install 'thermocline[gpu]'"


def untrusted(model: StoredModel, board: hardware.GpuInfo, index: int) -> str | None:
    """Return why a usable GPU's answers for a model are not to be trusted, or None."""
    import torch

    from thermocline.session.self_check import verdicts

    return verdicts.why_not(model, index, torch.cuda.get_device_name(index), board.driver)


def slower(index: int = 0) -> str | None:
    """Return what is slower on a usable GPU that Triton makes no kernels for; None: nothing."""
    import torch

    from thermocline.ops import cuda

    capability = cuda.check(index)
    if capability >= cuda.TRITON:
        return None
    return (
        f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}, which "
        "Triton makes no kernels for: torch's compute instead, several times as slow (each use of a weight "
        "decodes it to f32, no step is recorded); untested on a card"
    )


def _cuda(index: int, vram: float | None) -> OpenGpu:
    from thermocline.ops.cuda import Cuda
    from thermocline.ops.kernels import torch_kernels, triton_kernels

    note, reserve = slower(index), RESERVE_BYTES
    if note is not None:
        log.warning(note)
        reserve += DECODED_BYTES
    device = Cuda(index)
    free = max(0, device.free_bytes() - reserve)
    free = free if vram is None else min(free, int(vram * GIB))
    kernels: Kernels = triton_kernels if note is None else torch_kernels
    return OpenGpu(device, kernels, free, device.others)


def tiers_of(gpu: OpenGpu, formats: Sequence[str], threads: int) -> tiers.Tiers:
    """Measure this machine with that GPU: its speeds for the first of the formats."""
    here = this_machine.tiers_here(threads, formats=formats)
    if gpu.device.name == STAND_IN:
        return replace(here, gpu=replace(PRETENDED, vram_bytes=gpu.free_bytes))
    return this_machine.with_gpu(here, gpu.device, gpu.kernels, gpu.free_bytes, formats[0])
