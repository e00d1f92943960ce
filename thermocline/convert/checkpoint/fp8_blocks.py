"""Read matrices of 8-bit floats (E4M3) with a scale for each block of 128 x 128, as rows of f32.

A name stands for both where the file has `name` and `name_scale_inv`, which values are multiplied with.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.rows import RowReader, Shaped
from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.files.safetensors import Checkpoint

F32 = NDArray[np.float32]

BLOCK = 128
SCALE = "_scale_inv"


def seen(
    checkpoint: Checkpoint, tensors: Mapping[str, Shaped], where: Mapping[str, RowReader]
) -> tuple[Mapping[str, Shaped], Mapping[str, RowReader]]:
    """Return tensors and their readers, with each matrix of 8-bit floats and its scales as one."""
    shapes, readers = dict(tensors), dict(where)
    for name, entry in checkpoint.tensors.items():
        if entry.dtype == "F8_E4M3" and name + SCALE in checkpoint.tensors:
            del shapes[name + SCALE]
            shapes[name] = readers[name] = ScaledBlocks(checkpoint, name)
    return shapes, readers


def _values() -> F32:
    """Return each byte's value: a sign, 4 bits of exponent, 3 of mantissa; 0x7f and 0xff are no numbers."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    size[codes & 127 == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


VALUES = _values()


class ScaledBlocks:
    """A reader of rows of one such matrix."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        entry, scales = checkpoint.tensors[name], checkpoint.tensors[name + SCALE]
        self._shard, self._start, self._name = checkpoint.where[name], entry.start, name
        self.shape = entry.shape
        blocks = tuple(-(-n // BLOCK) for n in entry.shape)
        if len(blocks) != 2 or scales.shape != blocks:
            raise BadFile(
                f"{self._shard.path}: {quoted(name)} is {entry.shape}, and its scales {scales.shape}, not "
                f"one for each {BLOCK} x {BLOCK}"
            )
        self._scales = checkpoint.where[name + SCALE].read_rows(name + SCALE, 0, blocks[0])

    def read_stored(self, name: str, first: int, last: int) -> F32:
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> F32:
        columns = self.shape[1]
        raw = self._shard.read_bytes(self._start + first * columns, (last - first) * columns)
        of_rows = self._scales[np.arange(first, last) // BLOCK]
        x: F32 = VALUES[raw.reshape(last - first, columns)] * np.repeat(of_rows, BLOCK, axis=1)[:, :columns]
        if not np.isfinite(x).all():
            row = first + int((~np.isfinite(x)).any(axis=1).argmax())
            raise BadFile(
                f"{self._shard.path}: tensor {quoted(self._name)}, row {row}: a value is not a finite "
                "number; the file is damaged: fetch it again"
            )
        return x
