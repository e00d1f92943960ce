"""Read BitNet's ternary matrices (-1, 0 or 1 times a scale) as rows of f32.

A file holds them in one of two ways: as the floats they are made from, or as four values a byte beside the
scale. Floats become ternary by the rule of arXiv 2402.17764: w / mean|w|, rounded, clipped to -1..1, times
mean|w|.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.rows import RowReader, Shaped
from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import quoted
from thermocline.files.safetensors import Checkpoint, Entry, SafeTensors
from thermocline.model.tensor_map import TensorMap

F32 = NDArray[np.float32]

SCALE = "weight_scale"  # beside a packed `weight`
_PER_BYTE = 4
_STEP_BYTES = 4 << 20


def seen(
    checkpoint: Checkpoint, tensor_map: TensorMap
) -> tuple[Mapping[str, Shaped], Mapping[str, RowReader]]:
    """Return (tensors, their readers) of a checkpoint, with `tensor_map.ternary` read as ternary values."""
    tensors: dict[str, Shaped] = dict(checkpoint.tensors)
    where: dict[str, RowReader] = dict(checkpoint.where)
    for name, entry in checkpoint.tensors.items():
        if name in tensor_map.ternary or f"model.{name}" in tensor_map.ternary:
            matrix = Packed(checkpoint, name) if tensor_map.packed else Rounded(checkpoint.where[name], entry)
            tensors[name] = where[name] = matrix
    return tensors, where


class Rounded:
    """A reader that makes floats ternary as they are read."""

    def __init__(self, shard: SafeTensors, entry: Entry) -> None:
        self._shard, self._entry, self._scale = shard, entry, np.float32(0)
        self.shape = entry.shape

    def read_stored(self, name: str, first: int, last: int) -> F32:
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> F32:
        if not self._scale:
            mean = self._mean(name)
            if not np.isfinite(mean):
                raise BadFile(f"{self._shard.path}: {quoted(name)} has values that are not finite")
            self._scale = np.float32(1) / np.float32(max(mean, 1e-5))
        x = np.rint(self._shard.read_rows(name, first, last) * self._scale)
        out: F32 = np.clip(x, -1, 1) / self._scale
        return out

    def _mean(self, name: str) -> float:
        """Return the mean of |w| over the matrix, read a few MiB at a time."""
        rows, columns = self.shape
        step, total = max(1, _STEP_BYTES // (4 * columns)), 0.0
        for at in range(0, rows, step):
            part = self._shard.read_rows(name, at, min(at + step, rows))
            total += float(np.abs(part).sum(dtype=np.float64))
        return total / (rows * columns)


class Packed:
    """A reader of two-bit values. Byte row r of R holds value + 1 of rows r, r + R, r + 2R and r + 3R.

    The first of them is in the lowest two bits.
    """

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._shard, self._entry = checkpoint.where[name], checkpoint.tensors[name]
        self._where = f"{self._shard.path}: {quoted(name)}"
        if self._entry.dtype != "U8" or len(self._entry.shape) != 2:
            raise Unsupported(
                f"{self._where} is {self._entry.dtype} {self._entry.shape}, not ternary values in bytes; "
                "use a checkpoint with float weights, such as microsoft/bitnet-b1.58-2B-4T-bf16"
            )
        self.shape = (_PER_BYTE * self._entry.shape[0], self._entry.shape[1])
        beside = name.removesuffix("weight") + SCALE
        found = checkpoint.tensors.get(beside)
        if found is None or found.shape != (1,):
            raise BadFile(f"{self._where} has no {SCALE} of one number beside it: the file is incomplete")
        self._scale = np.float32(checkpoint.where[beside].read_rows(beside, 0, 1)[0])
        if not np.isfinite(self._scale):
            raise BadFile(f"{self._where} has the {SCALE} {self._scale}, which is not a finite number")

    def read_stored(self, name: str, first: int, last: int) -> F32:
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> F32:
        stored, columns = self._entry.shape
        parts = []
        for k in range(_PER_BYTE):
            a, b = max(first, k * stored), min(last, (k + 1) * stored)
            if a < b:
                at = self._entry.start + (a - k * stored) * columns
                data = self._shard.read_bytes(at, (b - a) * columns).reshape(b - a, columns)
                parts.append(data >> np.uint8(2 * k) & np.uint8(3))
        values = np.concatenate(parts)
        if (values == 3).any():
            raise BadFile(f"{self._where}: has values that are not -1, 0 or 1")
        out: F32 = (values.astype(np.float32) - 1) * self._scale
        return out
