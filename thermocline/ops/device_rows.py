"""What the GPU kernels work on: matrices in device memory as packs store them, and the scratch of a stream.

The only module that both kernel tables (torch_kernels, triton_kernels) share. Must not know models or layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thermocline.quant import row_bytes

FEW = 16  # tokens for which sparse kernels skip rows; of more, nearly every row is needed by some token
SIGNS = "signs"  # the format of a predictor's bits: bit c % 8 of byte c / 8 is column c
SPAN = 128  # positions, or neurons, that one program adds up before sums are joined in order
MAX_SUMS = 96  # joined of `down`: more spread a matrix over more programs, and cost as much to write and add


@dataclass(frozen=True)
class Rows:
    """A matrix on the device, in planar rows as in a pack (DESIGN.md)."""

    data: torch.Tensor  # uint8 [rows, stride]; a row's bytes are contiguous
    format: str  # of quant.FORMATS, or SIGNS
    columns: int
    skip: int = 0  # byte of each row where the weights begin: in bundles, up is at 0 and down behind it

    def __post_init__(self) -> None:
        data = self.data
        assert data.dtype == torch.uint8 and data.ndim == 2 and data.stride(1) == 1
        assert self.skip >= 0 and self.skip + self.row_bytes <= data.shape[1]

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return self.data.stride(0)

    @property
    def row_bytes(self) -> int:
        return -(-self.columns // 8) if self.format == SIGNS else row_bytes(self.format, self.columns)


@dataclass(frozen=True)
class Sizes:
    """The largest call that a scratch is for."""

    tokens: int
    dim: int
    neurons: int  # of one `gate_up` or `down`
    heads: int
    head_dim: int
    positions: int  # block table's width times the positions of a block
    rank: int = 0  # of predictors; 0: there are none, 1: of signs only


class Scratch:
    """Memory that one call at a time uses between its passes: calls on different streams need their own."""

    def __init__(self, sizes: Sizes, device: torch.device | str) -> None:
        self.sizes = sizes
        self.floats = torch.empty(self.bytes_for(sizes) // 4, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.floats.nbytes

    @staticmethod
    def bytes_for(s: Sizes) -> int:
        few = min(s.tokens, FEW)
        steps = {s.tokens, *range(few, s.tokens, FEW)}  # most tokens with spans of each length
        parts = max(t * spans(s.positions, t) for t in steps)
        attention = parts * s.heads * (s.head_dim + 2)
        down = few * MAX_SUMS * s.dim
        up = s.tokens * s.neurons if s.tokens > FEW else 0
        asked = s.tokens * (s.rank + s.neurons) if s.rank else 0
        return 4 * max(attention, down, up, asked)

    def take(self, *shape: int) -> torch.Tensor:
        """f32 of that shape, from the start: whatever was there is gone."""
        size = 1
        for n in shape:
            size *= n
        assert size <= self.floats.numel(), f"{shape} floats of scratch, made for {self.sizes}"
        return self.floats[:size].view(shape)


def span_of(tokens: int) -> int:
    """Positions that one program of attention reads: with more tokens fewer programs fill the device."""
    return SPAN * -(-tokens // FEW)


def spans(positions: int, tokens: int) -> int:
    return -(-positions // span_of(tokens))
