"""Read matrices of all experts that a checkpoint holds as blocks of MXFP4.

A name stands for blocks and scales where the file has `name_blocks` [experts, rows, blocks, 16] and
`name_scales` beside it. Rows are counted through all experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.rows import RowReader, Shaped
from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.files.safetensors import Checkpoint
from thermocline.model import quant

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

FORMAT = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_NO_NUMBER = 255  # a scale's byte


def seen(
    checkpoint: Checkpoint, tensors: Mapping[str, Shaped], where: Mapping[str, RowReader]
) -> tuple[Mapping[str, Shaped], Mapping[str, RowReader]]:
    """Return tensors and their readers, with each pair of blocks and scales as one."""
    shapes, readers = dict(tensors), dict(where)
    for name in checkpoint.tensors:
        stem = name.removesuffix(_BLOCKS)
        if stem != name and stem + _SCALES in checkpoint.tensors and stem not in tensors:
            del shapes[name], shapes[stem + _SCALES]
            shapes[stem] = readers[stem] = BlockStack(checkpoint, stem)
    return shapes, readers


class BlockStack:
    """A reader of rows of MXFP4 blocks: weight 2i is in byte i's low nibble, 2i + 1 in its high one."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        names = name + _BLOCKS, name + _SCALES
        blocks, scales = (checkpoint.tensors[n] for n in names)
        self._shards = [checkpoint.where[n] for n in names]
        self._starts, self._name = (blocks.start, scales.start), names[1]
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or {blocks.dtype, scales.dtype} != {"U8"}:
            raise BadFile(
                f"{self._shards[0].path}: {quoted(names[0])} is {blocks.dtype} {blocks.shape}, not bytes of "
                "MXFP4 [experts, rows, blocks, 16]"
            )
        if scales.shape != blocks.shape[:3]:
            raise BadFile(
                f"{self._shards[1].path}: {quoted(names[1])} is {scales.shape}, "
                f"and its blocks are {blocks.shape}"
            )
        self._blocks = blocks.shape[2]
        self.shape = (*blocks.shape[:2], 32 * self._blocks)

    def read_stored(self, name: str, first: int, last: int) -> F32:
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> F32:
        return quant.decode(FORMAT, self.planar(first, last), self.shape[2])

    def planar(self, first: int, last: int) -> U8:
        """Return rows as a pack has them: all quants, then all exponents."""
        n, width = last - first, self._blocks
        quants, exponents = (
            shard.read_bytes(start + first * width * size, n * width * size).reshape(n, width, size)
            for shard, start, size in zip(self._shards, self._starts, (16, 1), strict=True)
        )
        if (exponents == _NO_NUMBER).any():
            row = first + int((exponents == _NO_NUMBER).any(axis=(1, 2)).argmax())
            raise BadFile(
                f"{self._shards[1].path}: tensor {quoted(self._name)}, row {row}: a scale is not a finite "
                "number; the file is damaged: fetch it again"
            )
        out = np.empty((n, width, 16), np.uint8)
        front, back = quants[:, :, :8], quants[:, :, 8:]  # weights 0 to 15, and 16 to 31
        out[:, :, 0::2] = (front & np.uint8(15)) | (back << np.uint8(4))
        out[:, :, 1::2] = (front >> np.uint8(4)) | (back & np.uint8(0xF0))
        return np.concatenate([out.reshape(n, -1), exponents.reshape(n, -1)], axis=1)
