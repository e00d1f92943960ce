"""The bits of a block: their places in GGUF and in the planes of a pack's row. Both ways, bit for bit.

A row of a pack is planar: one plane of all its blocks, then the next. Most planes are fields of GGUF's block
as they are. The others hold the same bits in the order in which the kernels use them: every 32 weights have
16 bytes of low nibbles (weight j and weight j + 16 in byte j), 4 bytes of single bits, or 8 of pairs, so that
a vector's weights are made with one shift and one mask, and no format has loops of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from thermocline.model.formats import FORMATS

U8 = NDArray[np.uint8]
View = Callable[[str, U8], dict[str, U8]]  # the parts of rows in one order
Ints = NDArray[np.int64]
Index = Ints | slice


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

    @cached_property
    def by_shift(self) -> list[tuple[Index, Index, int]]:
        """Return for each shift the places of its numbers, the places of their bytes, and the shift."""
        each = [(self.shift == shift, int(shift)) for shift in np.unique(self.shift)]
        return [(_index(self.of[which]), _index(self.byte[which]), shift) for which, shift in each]


def _index(places: Ints) -> Index:
    """Return a slice where there is one: it copies nothing."""
    steps = np.unique(np.diff(places))
    if len(steps) > 1 or not (steps > 0).all():
        return places
    return slice(int(places[0]), int(places[-1]) + 1, int(steps[0]) if len(steps) else 1)


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


_WEIGHTS = 1 << 17  # moved at a time: what is made of them then stays in a 1 MiB L2 cache


def from_gguf(format: str, blocks: U8) -> U8:
    """Return rows of blocks in GGUF's order [rows, row_bytes], one block after the other, as planar rows."""
    return _rearranged(format, blocks, _gguf_fields, planes)


def to_gguf(format: str, rows: U8) -> U8:
    """Return planar rows [rows, row_bytes] in GGUF's order."""
    return _rearranged(format, rows, planes, _gguf_fields)


def _rearranged(format: str, rows: U8, source: View, target: View) -> U8:
    f = FORMATS[format]
    if len(f.fields) == 1:
        return rows
    layouts = _MOVED.get(format, ({}, {}))
    if source is planes:
        layouts = layouts[::-1]
    out = np.empty_like(rows)
    step = max(1, _WEIGHTS // max(1, rows.shape[1] // f.block_bytes * f.block))
    for first in range(0, len(rows), step):
        given, made = (
            view(format, part[first : first + step]) for view, part in ((source, rows), (target, out))
        )
        moved = _moved(format, *layouts, given)
        for name, field in made.items():
            field[:] = moved[name].T.reshape(field.shape) if name in moved else given[name]
    return out


def _moved(format: str, source: Layout, target: Layout, fields: dict[str, U8]) -> dict[str, U8]:
    """Return the target's fields, each [bytes, blocks]: a byte of all blocks is then shifted in one loop."""
    if not source:
        return {}
    used = {b.field for number in source.values() for b in number}
    turned = {name: np.ascontiguousarray(_flat(fields[name]).T) for name in used}
    return _written(target, _numbers(source, turned), _sizes(format))


def _flat(field: U8) -> U8:
    return field.reshape(-1, field.shape[2])


def _gguf_fields(format: str, rows: U8) -> dict[str, U8]:
    """Return views of rows in GGUF's order: each field's bytes [rows, blocks, bytes of a block]."""
    f, out, at = FORMATS[format], dict[str, U8](), 0
    blocks = rows.reshape(len(rows), rows.shape[1] // f.block_bytes, f.block_bytes)
    for field in f.fields:
        out[field.name] = blocks[:, :, at : at + field.nbytes]
        at += field.nbytes
    return out


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
    """Return each kind of number of fields [bytes, blocks]: [numbers, blocks]."""
    out = dict[str, U8]()
    blocks = next(iter(fields.values())).shape[1]
    for kind, number in layout.items():
        size = 1 + max(int(bits.of.max()) for bits in number)
        made = out[kind] = np.zeros((size, blocks), np.uint8)
        for b in number:
            for of, byte, shift in b.by_shift:
                part = fields[b.field][byte] >> np.uint8(shift)
                part &= np.uint8(2**b.count - 1)
                made[of] |= part << np.uint8(b.at) if b.at else part
    return out


def _written(layout: Layout, numbers: dict[str, U8], sizes: dict[str, int]) -> dict[str, U8]:
    """Return the fields that hold numbers [numbers, blocks]: [bytes, blocks]."""
    out = dict[str, U8]()
    for kind, number in layout.items():
        values = numbers[kind]
        for b in number:
            field = out.setdefault(b.field, np.zeros((sizes[b.field], values.shape[1]), np.uint8))
            for of, byte, shift in b.by_shift:
                part = values[of] >> np.uint8(b.at)
                part &= np.uint8(2**b.count - 1)
                part <<= np.uint8(shift)
                field[byte] |= part
    return out


def gguf_blocks_of(format: str, **numbers: U8) -> U8:
    """Return GGUF's blocks [blocks, bytes] of numbers and fields, each [blocks, n].

    Numbers are by kind ("q", "pair", "third", "fifth", "scale", "minimum"); fields by their name.
    """
    f = FORMATS[format]
    layout = _MOVED[format][0] if format in _MOVED else {}
    of = {name: value for name, value in numbers.items() if name not in layout}
    written = _written(layout, {name: numbers[name].T for name in layout}, _sizes(format))
    of |= {name: field.T for name, field in written.items()}
    return np.concatenate([of[field.name] for field in f.fields], axis=1)
