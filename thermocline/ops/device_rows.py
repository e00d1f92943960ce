"""`Kernels`, the table of functions that run on a GPU, and their operands: matrices in its memory as packs
store them, and the scratch of a stream.

The only module that both tables (torch_kernels, triton_kernels) share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from thermocline.model.formats import FORMATS
from thermocline.model.quant import row_bytes
from thermocline.model.spec import Recurrent, Router
from thermocline.model.tensors import RowPart
from thermocline.ops import device_sizes
from thermocline.ops.device_sizes import KernelSizes
from thermocline.ops.interface import Heads

Vector = torch.Tensor | None
SIGNS = "signs"  # the format of a predictor's bits: bit c % 8 of byte c / 8 is column c


@dataclass(frozen=True)
class DeviceRows:
    """A matrix on the device, in planar rows as in a pack (docs/internals/pack.md)."""

    data: torch.Tensor  # uint8 [rows, stride]; a row's bytes are contiguous
    format: str  # of quant.FORMATS, or SIGNS
    columns: int
    skip: int = 0  # byte of each row where the weights begin: in bundles, up is at 0 and down behind it
    down: RowPart | None = None  # of whole bundles of gated FFNs: down's part of each record

    def __post_init__(self) -> None:
        data = self.data
        assert data.dtype == torch.uint8 and data.ndim == 2 and data.stride(1) == 1
        assert self.skip >= 0 and self.skip + self.row_bytes <= data.shape[1]

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    def part(self, i: int, of: int) -> DeviceRows:
        """The i-th of `of` equal parts."""
        n = self.rows // of
        return replace(self, data=self.data[i * n : (i + 1) * n])

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def takes_ints(self) -> bool:
        """Return whether few tokens meet it in int8: it is in blocks."""
        return self.format != SIGNS and FORMATS[self.format].block > 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights, without what lies between rows."""
        return self.rows * self.row_bytes

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return self.data.stride(0)

    @property
    def row_bytes(self) -> int:
        return -(-self.columns // 8) if self.format == SIGNS else row_bytes(self.format, self.columns)


def joined(parts: Sequence[DeviceRows]) -> DeviceRows:
    """Equal parts that lie one behind another, as `Rows.part` gives them, as one."""
    first = parts[0]
    assert all(
        p.data.data_ptr() == first.data[:1].data_ptr() + i * first.data.nbytes for i, p in enumerate(parts)
    )
    shape = len(parts) * first.rows, first.data.shape[1]
    return replace(first, data=first.data.as_strided(shape, first.data.stride()))


class Squares(NamedTuple):
    """The end of an RMS norm: products are divided by the root of their token's mean square plus eps."""

    sums: torch.Tensor  # f32 [tokens, columns / 32], of 32 columns each
    eps: float


class BegunNorm(NamedTuple):
    """An RMS norm that begins where its stream is made: at the end of the product that is added to that.

    Columns are multiplied by their weights. The rest is left to the products that read them (`Squares`).
    """

    weight: torch.Tensor
    out: torch.Tensor  # f32 [tokens, columns]
    sums: torch.Tensor  # `Squares.sums`
    ints: Vector  # out in int8, too


@dataclass(frozen=True)
class Operand:
    """Vectors that matrices read."""

    x: torch.Tensor  # [tokens, columns]
    ints: Vector = None  # the same in int8 (`Scratch.quantised`), if what made x wrote that, too
    squares: Squares | None = None  # then x is what `BegunNorm` made

    def __len__(self) -> int:
        return len(self.x)


class Scratch:
    """Memory that one call at a time uses between its passes: calls on different streams need their own."""

    def __init__(self, floats: torch.Tensor, sizes: KernelSizes) -> None:
        """`floats`: zeros of sizes.scratch_bytes."""
        self.floats, self.sizes = floats, sizes
        # i32, 0 between calls: programs that are done, of those that make something together.
        self.arrivals = floats[len(floats) - sizes.arrivals :].view(torch.int32)

    @staticmethod
    def of(sizes: KernelSizes, device: torch.device | str) -> Scratch:
        return Scratch(torch.zeros(sizes.scratch_bytes // 4, dtype=torch.float32, device=device), sizes)

    def take(self, *shape: int) -> torch.Tensor:
        """f32 of that shape, from the start: whatever was there is gone."""
        size = 1
        for n in shape:
            size *= n
        assert size <= self.sizes.floats, f"{shape} floats of scratch, made for {self.sizes}"
        return self.floats[:size].view(shape)

    def pairs(
        self, tokens: int, experts: int, active: int, neurons: int, dim: int = 0
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return what `gate_up_pairs` leaves for `down_pairs`, and behind it answers f32 [pairs, dim].

        i32, flat: the token of each pair; each token's pairs; tiles; marks of neurons.
        """
        sizes = device_sizes.pair_sizes(tokens, experts, active, neurons)
        flat, end, tables = self.take(sum(sizes) + tokens * active * dim), 0, list[torch.Tensor]()
        for n in sizes:
            tables.append(flat[end : end + n].view(torch.int32))
            end += n
        return tables, flat[end:].view(tokens * active, dim)

    def quantised(self, tokens: int, columns: int) -> torch.Tensor:
        """i32, flat, for tokens (or pairs) in int8; apart from what `take` gives.

        columns / 4 words of each token, four columns in each; then of each token's blocks of 32 columns the
        scale (f32); then the sums of their halves, two i16.
        """
        size = device_sizes.quantised_words(tokens, columns)
        room = self.floats[self.sizes.floats : len(self.floats) - self.sizes.arrivals]
        assert size <= room.numel(), f"{tokens} tokens of {columns} in int8, made for {self.sizes}"
        return room[:size].view(torch.int32)

    def halves(self, tokens: int, columns: int) -> torch.Tensor:
        """i32, flat, for tokens (or pairs) in f16: apart from those in int8.

        columns / 2 words of each token, of columns in whole eights; then of each what it was divided by.
        """
        size = device_sizes.half_words(tokens, columns)
        room = self.floats[self.sizes.floats + self.sizes.quantised : len(self.floats) - self.sizes.arrivals]
        assert size <= room.numel(), f"{tokens} tokens of {columns} in f16, made for {self.sizes}"
        return room[:size].view(torch.int32)


class Kernels(Protocol):
    """The functions that ops queue on a GPU; `ops.kernels.torch_kernels` says what each computes."""

    def embed(self, out: torch.Tensor, table: DeviceRows, ids: torch.Tensor, scale: float, /) -> None: ...

    def norm(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: Vector,
        bias: Vector,
        eps: float,
        layer: bool,
        ints: Vector = None,
        /,
    ) -> None: ...

    def choose(
        self,
        ids: torch.Tensor,
        chosen: torch.Tensor,
        logits: torch.Tensor,
        scale: float,
        draws: torch.Tensor,
        keys: torch.Tensor,
        sums: torch.Tensor,
        /,
    ) -> None: ...

    def add_normed(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: Vector,
        bias: Vector,
        eps: float,
        layer: bool,
        scale: float,
        /,
    ) -> None: ...

    def matmul(
        self,
        out: torch.Tensor,
        w: DeviceRows,
        x: torch.Tensor,
        bias: Vector,
        add: bool,
        scratch: Scratch,
        ints: Vector = None,
        squares: Squares | None = None,
        begun: BegunNorm | None = None,
        /,
    ) -> None: ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        cos: Vector,
        sin: Vector,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        table: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        /,
    ) -> None: ...

    def project_heads(
        self,
        qkv: torch.Tensor,
        parts: Sequence[tuple[DeviceRows, Vector]],
        x: torch.Tensor,
        heads: Heads,
        cos: Vector,
        sin: Vector,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        table: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scratch: Scratch,
        ints: Vector = None,
        squares: Squares | None = None,
        /,
    ) -> None: ...

    def attention(
        self,
        out: torch.Tensor,
        qkv: torch.Tensor,
        heads: Heads,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        table: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scratch: Scratch,
        ints: Vector = None,
        /,
    ) -> None: ...

    def head_products(self, out: torch.Tensor, w: DeviceRows, x: torch.Tensor, /) -> None: ...

    def latent_store(
        self,
        q: torch.Tensor,
        queries: torch.Tensor,
        latent: torch.Tensor,
        heads: Heads,
        kv_norm: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        table: torch.Tensor,
        k: torch.Tensor,
        /,
    ) -> None: ...

    def latent_attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        heads: Heads,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        table: torch.Tensor,
        k: torch.Tensor,
        scratch: Scratch,
        /,
    ) -> None: ...

    def convolve(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Vector,
        sequence: torch.Tensor,
        runs: torch.Tensor,
        states: torch.Tensor,
        alone: bool,
        /,
    ) -> None: ...

    def scan(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        gates: torch.Tensor,
        r: Recurrent,
        decay: torch.Tensor,
        dt_bias: torch.Tensor,
        skip: Vector,
        runs: torch.Tensor,
        states: torch.Tensor,
        /,
    ) -> None: ...

    def gated_norm(
        self,
        y: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor,
        parts: int,
        eps: float,
        after: bool,
        /,
    ) -> None: ...

    def activate(
        self,
        out: torch.Tensor,
        gate: torch.Tensor,
        up: Vector,
        activation: str,
        bound: float,
        up_relu: bool,
        alpha: float = 1.0,
        /,
    ) -> None: ...

    def open(self, x: torch.Tensor, gate: torch.Tensor, /) -> None: ...

    def gate_up(
        self,
        h: torch.Tensor,
        gate: DeviceRows,
        gate_bias: Vector,
        up: DeviceRows | None,
        x: torch.Tensor,
        activation: str,
        threshold: float,
        up_relu: bool,
        named: Vector,
        weights: Vector,
        counts: Vector,
        scratch: Scratch,
        up_bias: Vector = None,
        alpha: float = 1.0,
        scales_input: bool = False,
        ints: Vector = None,
        h_ints: Vector = None,
        squares: Squares | None = None,
        /,
    ) -> None: ...

    def down(
        self,
        out: torch.Tensor,
        rows: DeviceRows,
        h: torch.Tensor,
        add: bool,
        scratch: Scratch,
        begun: BegunNorm | None = None,
        /,
    ) -> None: ...

    def down_experts(
        self,
        out: torch.Tensor,
        rows: DeviceRows,
        h: torch.Tensor,
        weights: torch.Tensor,
        add: bool,
        scratch: Scratch,
        ints: Vector = None,
        begun: BegunNorm | None = None,
        /,
    ) -> None: ...

    def gate_up_pairs(
        self,
        h: torch.Tensor,
        gate: DeviceRows,
        gate_bias: Vector,
        up: DeviceRows | None,
        x: torch.Tensor,
        activation: str,
        threshold: float,
        up_relu: bool,
        weights: torch.Tensor,
        active: int,
        counts: torch.Tensor,
        scratch: Scratch,
        up_bias: Vector = None,
        alpha: float = 1.0,
        scales_input: bool = False,
        /,
    ) -> None: ...

    def down_pairs(
        self,
        out: torch.Tensor,
        rows: DeviceRows,
        bundles: bool,
        h: torch.Tensor,
        weights: torch.Tensor,
        active: int,
        add: bool,
        scratch: Scratch,
        /,
    ) -> None: ...

    def route(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        n_active: int,
        rule: Router,
        bias: Vector,
        scale: Vector = None,
        /,
    ) -> None: ...

    def predict(
        self,
        named: torch.Tensor,
        first: DeviceRows | None,
        second: DeviceRows,
        threshold: torch.Tensor,
        hot: int,
        relu: bool,
        x: torch.Tensor,
        scratch: Scratch,
        ints: Vector = None,
        /,
    ) -> None: ...
