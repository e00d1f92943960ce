"""The weight formats, a row each: name, blocks, fields of a block, and what follows from them.

Everything that differs between formats and is no code stands here. The code is numpy's in `quant` and
`gguf_blocks`, the kernels' in `csrc/kernels/formats.inl` (with a row in `formats.h`), and the GPU's in
`ops/triton_stored.py`. numpy is not imported: commands name formats before they load anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_F16_MAX = 65504.0


@dataclass(frozen=True)
class Field:
    """Bytes of each block, under a name."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Quants:
    """Integers q of a format whose weights are scale * q, with one f16 `scale` for each block.

    `bits` of the field `quants` hold (q + offset) mod 2**bits. `extreme` is the q that the largest weight of
    a block becomes.
    """

    bits: int
    offset: int
    extreme: int

    def byte_of(self, q: int) -> int:
        """Return a byte full of `q`."""
        return self._repeated((q + self.offset) % 2**self.bits)

    @property
    def odd(self) -> int:
        """The bits of a byte that make every quant in it odd."""
        return self._repeated(1)

    @property
    def odd_rms(self) -> float:
        """The root of the mean square of all odd quants."""
        return math.sqrt((4 ** (self.bits - 1) - 1) / 3)

    def _repeated(self, stored: int) -> int:
        return sum(stored << at for at in range(0, 8, self.bits))


@dataclass(frozen=True)
class Format:
    """A weight format.

    `id`: the native code's. `block`: weights of a block; rows are whole blocks. `fields`: of a block, in
    GGUF's order. `planes`: the fields in the order of a pack's row, which has one of them of all blocks, then
    the next. `file_type`: GGUF's name for a file of mostly this format. `largest`: the largest weight that
    does not become infinite. `fallback`: the format of rows that are no whole number of blocks. `quants`:
    None where weights are not scale * integer.
    """

    name: str
    id: int
    block: int
    fields: tuple[Field, ...]
    planes: tuple[str, ...]
    file_type: str
    largest: float = math.inf
    fallback: str = "f16"
    quants: Quants | None = None

    @property
    def block_bytes(self) -> int:
        return sum(f.nbytes for f in self.fields)

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of the scales."""
        return 8 * self.block_bytes / self.block


def _number(name: str, id: int, nbytes: int, file_type: str, largest: float = math.inf) -> Format:
    """A format without blocks."""
    return Format(name, id, 1, (Field("number", nbytes),), ("number",), file_type, largest)


def _scaled(name: str, id: int, quants: Quants) -> Format:
    """A format of blocks of 32 with one f16 scale."""
    fields = Field("scale", 2), Field("quants", 32 * quants.bits // 8)
    largest = _F16_MAX * abs(quants.extreme)
    return Format(name, id, 32, fields, ("quants", "scale"), f"MOSTLY_{name.upper()}", largest, quants=quants)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _number("f32", 0, 4, "ALL_F32"),
        _number("f16", 1, 2, "MOSTLY_F16", _F16_MAX),
        _number("bf16", 2, 2, "MOSTLY_BF16"),
        _scaled("q8_0", 3, Quants(bits=8, offset=0, extreme=127)),
        _scaled("q4_0", 4, Quants(bits=4, offset=8, extreme=-8)),
    )
}

DEFAULT = "q8_0"  # of a pack, and of rows that come in a format without a row here


def fitting(format: str, columns: int) -> str:
    """Return the format of rows of `columns` weights where `format` is wanted: itself, or its fallback."""
    while columns % FORMATS[format].block:
        format = FORMATS[format].fallback
    return format


def smallest() -> str:
    """Return the format with the fewest bits a weight."""
    return min(FORMATS.values(), key=lambda f: f.bits).name
