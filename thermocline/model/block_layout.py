"""The bits of a block: their places in GGUF and in the planes of a pack's row. Both ways, bit for bit.

A row of a pack is planar: one plane of all its blocks, then the next. Most planes are fields of GGUF's block
as they are. The others hold the same bits in the order in which the kernels use them: every 32 weights have
16 bytes of low nibbles (weight j and weight j + 16 in byte j), 4 bytes of single bits, or 8 of pairs, so that
a vector's weights are made with one shift and one mask, and no format has loops of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from thermocline.model.formats import FORMATS

U8 = NDArray[np.uint8]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Bits:
    """`count` bits of each of some numbers, from bit `at` of the number on: their place in one field.

    `of`: the numbers; `byte`, `shift`: for each where its bits begin. No two with one shift share a byte.
    """

    field: str
    of: Ints
    byte: Ints
    shift: Ints
    count: int
    at: int = 0


Number = tuple[Bits, ...]  # all bits of a kind of number of a block
Layout = dict[str, Number]  # by kind

_W = np.arange(256)  # weights of a block
_IN = _W % 32  # a weight's place in its 32
_PARTS = np.arange(8)
_GROUPS = np.arange(16)


def _bits(field: str, of: Ints, byte: Ints, shift: Ints | int, count: int, at: int = 0) -> Bits:
    shifts = np.full(len(of), shift) if isinstance(shift, int) else shift
    return Bits(field, of, byte, shifts, count, at)


def _whole(field: str, byte: Ints, shift: Ints, count: int) -> Number:
    return (_bits(field, np.arange(len(byte)), byte, shift, count),)


# ---- the kernels' order
_NIBBLES = _whole("quants", _W // 32 * 16 + _IN % 16, _IN // 16 * 4, 4)
_T, _K = _IN % 16 // 4, _IN % 4
_PAIRS = _whole("pairs", _W // 32 * 8 + _IN % 8, _IN // 8 * 2, 2)
_PLANAR_K: Layout = {
    "scale": _whole("scales", _PARTS, 0 * _PARTS, 6),
    "minimum": (
        _bits("scales", _PARTS, _PARTS, 6, 2),
        _bits("minima", _PARTS, _PARTS % 4, _PARTS // 4 * 4, 4, at=2),
    ),
}


def _single(field: str, weights: int = 256) -> Number:
    """One bit of each weight: bit 8k + t of a u32 for weight 4t + k, bit 8k + 4 + t for 16 + 4t + k."""
    return _whole(field, (_W // 32 * 4 + _K)[:weights], (_IN // 16 * 4 + _T)[:weights], 1)


# ---- GGUF's
_IN_TURN = _W // 128 * 32 + _IN, _W % 128 // 32 * 2  # pairs of 32 bytes, one shift after the other
_K_QUANTS = _whole("quants", _W // 64 * 32 + _IN, _W % 64 // 32 * 4, 4)
_BY_SHIFT = _IN, _W // 32  # single bits of 32 bytes
_PACKED_K: Layout = {
    "scale": (
        _bits("packed", _PARTS[:4], _PARTS[:4], 0, 6),
        _bits("packed", _PARTS[4:], _PARTS[4:] + 4, 0, 4),
        _bits("packed", _PARTS[4:], _PARTS[:4], 6, 2, at=4),
    ),
    "minimum": (
        _bits("packed", _PARTS[:4], _PARTS[4:], 0, 6),
        _bits("packed", _PARTS[4:], _PARTS[4:] + 4, 4, 4),
        _bits("packed", _PARTS[4:], _PARTS[4:], 6, 2, at=4),
    ),
}
_NATURAL_FIFTH = _whole("fifth", np.arange(32) // 8, np.arange(32) % 8, 1)

# format -> GGUF's layout, the row's. Fields that are in neither are planes as they are.
_MOVED: dict[str, tuple[Layout, Layout]] = {
    "q5_0": ({"fifth": _NATURAL_FIFTH}, {"fifth": _single("fifth", 32)}),
    "q5_1": ({"fifth": _NATURAL_FIFTH}, {"fifth": _single("fifth", 32)}),
    "q4_k": ({"q": _K_QUANTS} | _PACKED_K, {"q": _NIBBLES} | _PLANAR_K),
    "q5_k": (
        {"q": _K_QUANTS, "fifth": _whole("fifth", *_BY_SHIFT, 1)} | _PACKED_K,
        {"q": _NIBBLES, "fifth": _single("fifth")} | _PLANAR_K,
    ),
    "q6_k": (
        {
            "q": _whole("quants", _W // 128 * 64 + _W % 64, _W % 128 // 64 * 4, 4),
            "pair": _whole("pairs", *_IN_TURN, 2),
        },
        {"q": _NIBBLES, "pair": _PAIRS},
    ),
    "q3_k": (
        {
            "pair": _whole("pairs", *_IN_TURN, 2),
            "third": _whole("third", *_BY_SHIFT, 1),
            "scale": (
                _bits("packed", _GROUPS, _GROUPS % 8, _GROUPS // 8 * 4, 4),
                _bits("packed", _GROUPS, _GROUPS % 4 + 8, _GROUPS // 4 * 2, 2, at=4),
            ),
        },
        {
            "pair": _PAIRS,
            "third": _single("third"),
            "scale": (
                _bits("scales", _GROUPS, _GROUPS // 2, _GROUPS % 2 * 4, 4),
                _bits("scales_high", _GROUPS, _GROUPS // 4, _GROUPS % 4 * 2, 2, at=4),
            ),
        },
    ),
    "q2_k": ({"pair": _whole("pairs", *_IN_TURN, 2)}, {"pair": _PAIRS}),
    "tq2_0": ({"pair": _whole("pairs", *_IN_TURN, 2)}, {"pair": _PAIRS}),
}


def from_gguf(format: str, blocks: U8) -> U8:
    """Return rows of blocks in GGUF's order [rows, row_bytes], one block after the other, as planar rows."""
    f = FORMATS[format]
    if len(f.fields) == 1:
        return blocks
    n, per_row = len(blocks), blocks.shape[1] // f.block_bytes
    b = blocks.reshape(n * per_row, f.block_bytes)
    of, at = dict[str, U8](), 0
    for field in f.fields:
        of[field.name] = b[:, at : at + field.nbytes]
        at += field.nbytes
    if format in _MOVED:
        of |= _written(_MOVED[format][1], _numbers(_MOVED[format][0], of), _sizes(format))
    return np.concatenate([of[p.name].reshape(n, per_row * p.nbytes) for p in f.planes], axis=1)


def to_gguf(format: str, rows: U8) -> U8:
    """Return planar rows [rows, row_bytes] in GGUF's order."""
    f = FORMATS[format]
    if len(f.fields) == 1:
        return rows
    n, per_row = len(rows), rows.shape[1] // f.block_bytes
    of = {name: plane.reshape(n * per_row, plane.shape[2]) for name, plane in planes(format, rows).items()}
    if format in _MOVED:
        of |= _written(_MOVED[format][0], _numbers(_MOVED[format][1], of), _sizes(format))
    return np.concatenate([of[field.name] for field in f.fields], axis=1).reshape(rows.shape)


def planes(format: str, rows: U8) -> dict[str, U8]:
    """Return views of planar rows: each plane's bytes [rows, blocks, bytes of a block]."""
    f = FORMATS[format]
    n, per_row = len(rows), rows.shape[1] // f.block_bytes
    out, at = dict[str, U8](), 0
    for plane in f.planes:
        end = at + per_row * plane.nbytes
        out[plane.name] = rows[:, at:end].reshape(n, per_row, plane.nbytes)
        at = end
    return out


@cache
def _sizes(format: str) -> dict[str, int]:
    f = FORMATS[format]
    return {field.name: field.nbytes for field in (*f.fields, *f.planes)}


def _numbers(layout: Layout, fields: dict[str, U8]) -> dict[str, U8]:
    """Return each kind of number of blocks, [blocks, numbers]."""
    out = dict[str, U8]()
    for kind, number in layout.items():
        size = 1 + max(int(bits.of.max()) for bits in number)
        blocks = len(next(iter(fields.values())))
        made = np.zeros((blocks, size), np.uint8)
        for b in number:
            part = fields[b.field][:, b.byte] >> b.shift.astype(np.uint8) & np.uint8(2**b.count - 1)
            made[:, b.of] |= part << np.uint8(b.at)
        out[kind] = made
    return out


def _written(layout: Layout, numbers: dict[str, U8], sizes: dict[str, int]) -> dict[str, U8]:
    """Return the fields that hold these numbers."""
    out = dict[str, U8]()
    for kind, number in layout.items():
        for b in number:
            values = numbers[kind]
            field = out.setdefault(b.field, np.zeros((len(values), sizes[b.field]), np.uint8))
            for shift in np.unique(b.shift):
                which = b.shift == shift
                part = values[:, b.of[which]] >> np.uint8(b.at) & np.uint8(2**b.count - 1)
                field[:, b.byte[which]] |= part << np.uint8(shift)
    return out


def gguf_blocks_of(format: str, **numbers: U8) -> U8:
    """Return GGUF's blocks [blocks, bytes] of numbers and fields, each [blocks, n].

    Numbers are by kind ("q", "pair", "third", "fifth", "scale", "minimum"); fields by their name.
    """
    f = FORMATS[format]
    layout = _MOVED[format][0] if format in _MOVED else {}
    of = {name: value for name, value in numbers.items() if name not in layout}
    of |= _written(layout, {name: numbers[name] for name in layout}, _sizes(format))
    return np.concatenate([of[field.name] for field in f.fields], axis=1)
