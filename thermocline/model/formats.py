"""The weight formats, a row each: name, blocks, fields of a block, and what follows from them.

Everything that differs between formats and is no code stands here. The code is numpy's in `quant`,
`block_layout` and `gguf_blocks`, the kernels' in `csrc/kernels/formats.inl` (with a row in `formats.h`), and
the GPU's in `ops/kernels/triton_stored.py`. numpy is not imported: commands name formats before they load
anything.
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
    GGUF's order. `planes`: what a block gives to each part of a pack's row, which has one plane of all
    blocks, then the next; they have the bytes of the fields, and where their names differ the bits are moved
    (`block_layout`). `file_type`: GGUF's name for a file of mostly this format. `largest`: the largest weight
    that does not become infinite. `fallback`: the format of rows that are no whole number of blocks.
    `quants`: None where weights are not scale * integer.
    """

    name: str
    id: int
    block: int
    fields: tuple[Field, ...]
    planes: tuple[Field, ...]
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


def _fields(**nbytes: int) -> tuple[Field, ...]:
    return tuple(Field(name, n) for name, n in nbytes.items())


def _number(name: str, id: int, nbytes: int, file_type: str, largest: float = math.inf) -> Format:
    """A format without blocks."""
    number = _fields(number=nbytes)
    return Format(name, id, 1, number, number, file_type, largest)


def _blocks_of_32(
    name: str,
    id: int,
    fields: tuple[Field, ...],
    planes: str,
    largest: float,
    quants: Quants | None = None,
    file_type: str = "",
) -> Format:
    """A format of blocks of 32. `planes`: the fields in a row's order."""
    of = {f.name: f for f in fields}
    ordered = tuple(of[plane] for plane in planes.split())
    file_type = file_type or f"MOSTLY_{name.upper()}"
    return Format(name, id, 32, fields, ordered, file_type, largest, quants=quants)


def _scaled(name: str, id: int, quants: Quants) -> Format:
    """A format of blocks of 32 with one f16 scale."""
    fields = _fields(scale=2, quants=32 * quants.bits // 8)
    return _blocks_of_32(name, id, fields, "quants scale", _F16_MAX * abs(quants.extreme), quants)


def _super(
    name: str,
    id: int,
    fields: tuple[Field, ...],
    planes: tuple[Field, ...],
    fallback: str,
    largest: float,
    file_type: str = "",
) -> Format:
    """A format of blocks of 256, with scales for parts of a block and an f16 scale of those scales."""
    file_type = file_type or f"MOSTLY_{name.upper()}"
    return Format(name, id, 256, fields, planes, file_type, _F16_MAX * largest, fallback)


# Scales and minima of 6 bits, for 8 parts each: "packed" in GGUF, apart in a row.
_K_SCALES = _fields(scales=8, minima=4, super=2, super_minimum=2)
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _number("f32", 0, 4, "ALL_F32"),
        _number("f16", 1, 2, "MOSTLY_F16", _F16_MAX),
        _number("bf16", 2, 2, "MOSTLY_BF16"),
        _scaled("q8_0", 3, Quants(bits=8, offset=0, extreme=127)),
        _scaled("q4_0", 4, Quants(bits=4, offset=8, extreme=-8)),
        _blocks_of_32(
            "q4_1", 5, _fields(scale=2, minimum=2, quants=16), "quants scale minimum", _F16_MAX / 2
        ),
        _blocks_of_32("q5_0", 6, _fields(scale=2, fifth=4, quants=16), "quants fifth scale", _F16_MAX * 16),
        _blocks_of_32(
            "q5_1",
            7,
            _fields(scale=2, minimum=2, fifth=4, quants=16),
            "quants fifth scale minimum",
            _F16_MAX / 2,
        ),
        _super(
            "q4_k",
            8,
            _fields(super=2, super_minimum=2, packed=12, quants=128),
            (Field("quants", 128), *_K_SCALES),
            "q5_0",
            63 * 15 / 2,
            "MOSTLY_Q4_K_M",
        ),
        _super(
            "q5_k",
            9,
            _fields(super=2, super_minimum=2, packed=12, fifth=32, quants=128),
            (*_fields(quants=128, fifth=32), *_K_SCALES),
            "q5_1",
            63 * 31 / 2,
            "MOSTLY_Q5_K_M",
        ),
        _super(
            "q6_k",
            10,
            _fields(quants=128, pairs=64, scales=16, super=2),
            _fields(quants=128, pairs=64, scales=16, super=2),
            "q8_0",
            127 * 31,
        ),
        _super(
            "q3_k",
            11,
            _fields(third=32, pairs=64, packed=12, super=2),
            _fields(pairs=64, third=32, scales=8, scales_high=4, super=2),
            "q4_0",
            31 * 3,
            "MOSTLY_Q3_K_M",
        ),
        _super(
            "q2_k",
            12,
            _fields(scales=16, pairs=64, super=2, super_minimum=2),
            _fields(pairs=64, scales=16, super=2, super_minimum=2),
            "q4_0",
            15 * 3 / 2,
        ),
        _blocks_of_32("iq4_nl", 13, _fields(scale=2, quants=16), "quants scale", _F16_MAX * 113),
        _super(
            "iq4_xs",
            14,
            _fields(super=2, scales_high=2, scales=4, quants=128),
            _fields(quants=128, scales=4, scales_high=2, super=2),
            "iq4_nl",
            31 * 113,
        ),
        _blocks_of_32(
            "mxfp4",
            15,
            _fields(exponent=1, quants=16),
            "quants exponent",
            math.inf,
            file_type="MOSTLY_MXFP4_MOE",
        ),
        _super("tq2_0", 16, _fields(pairs=64, super=2), _fields(pairs=64, super=2), "q4_0", 1),
    )
}

DEFAULT = "q8_0"  # of a pack, and of rows that come in a format without a row here
# What a user is told to try whose model does not fit. Below four bits answers suffer (tq2_0 is for ternary
# weights alone), and blocks of 32 divide nearly every model's rows.
SMALL = "q4_0"


def fitting(format: str, columns: int) -> str:
    """Return the format of rows of `columns` weights where `format` is wanted: itself, or its fallback."""
    while columns % FORMATS[format].block:
        format = FORMATS[format].fallback
    return format
