"""Keys, values and states on a device, one place at a time: to RAM and back, beside the engine's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thermocline.ops.gpu import GpuOps
    from thermocline.ops.interface import U8


class DevicePlaces:
    """Reads and writes places on the first GPU of some ops, from any threads."""

    def __init__(self, ops: GpuOps) -> None:
        self._ops = ops

    def flat(self, array: Any) -> Tensor:
        """Return a layer's pages or slots as [places, bytes of one], which share its memory."""
        there: Tensor = array
        return there.view(len(there), -1).view(torch.uint8)

    def get(self, to: U8, there: Tensor, place: int) -> None:
        """Copy a place to RAM. All steps that wrote to it must have ended."""
        self._ops.device.put(torch.from_numpy(to), there[place])

    def put(self, there: Tensor, place: int, data: U8) -> None:
        """Copy a place from RAM. No step that is queued may know it (`settle`)."""
        self._ops.device.put(there[place], torch.from_numpy(data))

    def settle(self) -> None:
        """Wait for what the engine has queued: a step that was given up may still write to places.

        For the engine's thread.
        """
        self._ops.finish()
