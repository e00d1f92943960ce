"""The rows of a pack's tensors out of a checkpoint: floats, ternary values, blocks of MXFP4, scaled FP8."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.checkpoint import block_stacks, fp8_blocks, ternary
from thermocline.convert.checkpoint.block_stacks import FORMAT, BlockStack
from thermocline.convert.checkpoint.predictors import PredictorFiles
from thermocline.convert.rows import TensorMapSource
from thermocline.files.safetensors import Checkpoint
from thermocline.model.tensor_map import TensorMap

U8 = NDArray[np.uint8]


class CheckpointSource(TensorMapSource):
    """An `EncodedSource` over a checkpoint: blocks are copied bit for bit."""

    def __init__(
        self, checkpoint: Checkpoint, tensor_map: TensorMap, beside: PredictorFiles | None = None
    ) -> None:
        """`beside`: files of predictors, which `tensor_map` has."""
        tensors, where = block_stacks.seen(checkpoint, *ternary.seen(checkpoint, tensor_map))
        if beside is not None:
            tensors, where = {**tensors, **beside.tensors}, {**where, **beside.where}
        tensors, where = fp8_blocks.seen(checkpoint, tensors, where)
        super().__init__(str(checkpoint.directory), tensors, where, tensor_map)
        self._stacks = {n: x for n, x in where.items() if isinstance(x, BlockStack)}

    def formats(self) -> dict[str, str]:
        """Return the formats of the packed tensors that the checkpoint holds as blocks."""
        pieces = self._tensor_map.tensors.items()
        return {name: FORMAT for name, of in pieces if all(p.tensor in self._stacks for p in of)}

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8 | None:
        spans = list(self.spans(name, first, last))
        if format != FORMAT or any(p.tensor not in self._stacks for p, _, _ in spans):
            return None
        parts = []
        for piece, a, b in spans:
            rows = self._stacks[self.name_of(piece)]
            for r in piece.ranges(a, b):
                low, high = min(r[0], r[-1]), max(r[0], r[-1]) + 1
                parts.append(rows.planar(low, high)[:: r.step])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
