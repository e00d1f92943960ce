"""Rows as GGUF stores them, as f32, in numpy: bit for bit what llama.cpp's reference makes of the bytes.

In each comment a block's fields in order, with their bytes; `d` and `m` are f16. To add a format: a function
of its name. Formats that packs have too (`formats`) are decoded here as well, by `quant`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Decode = Callable[[U8], F32]

SUPER = 256  # weights in a block of the K formats


def dequantise(type: str, rows: U8) -> F32:
    """Return the weights [rows, columns] of rows [rows, bytes]. Raises Unsupported, naming `type`."""
    found = _DECODERS.get(type)
    if found is None:
        raise Unsupported(f"weights of type {type} are not supported; known: {', '.join(_DECODERS)}")
    block_bytes, decoder = found
    with np.errstate(all="ignore"):  # scales may be NaN or infinite
        blocks = decoder(np.ascontiguousarray(rows).reshape(-1, block_bytes))
    return blocks.reshape(len(rows), rows.shape[1] // block_bytes * math.prod(blocks.shape[1:]))


def known(type: str) -> bool:
    """Tell whether `dequantise` takes this type."""
    return type in _DECODERS


_DECODERS: dict[str, tuple[int, Decode]] = {}  # bytes of a block, function


def _decoder(block_bytes: int) -> Callable[[Decode], Decode]:
    """Register the function under its name."""

    def register(function: Decode) -> Decode:
        _DECODERS[function.__name__[1:]] = block_bytes, function
        return function

    return register


def _f16_at(b: U8, at: int) -> F32:
    """Return the f16 at byte `at` of each block: [blocks, 1]."""
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _split(b: U8, group: int, *shifts: int, mask: int) -> U8:
    """Return `mask` at each shift in turn, of one `group` of bytes after the other: [blocks, n]."""
    groups = b.shape[1] // group
    parts = b.reshape(len(b), groups, 1, group) >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return (parts & np.uint8(mask)).reshape(len(b), groups * len(shifts) * group)


def _scaled(q: NDArray[np.generic], d: F32) -> F32:
    """Scale q [blocks, n] by d [blocks, groups], one scale for each n / groups values."""
    groups = d.shape[1]
    return d[:, :, None] * q.astype(np.float32).reshape(len(q), groups, q.shape[1] // groups)


@_decoder(4)
def _f32(b: U8) -> F32:
    return b.view(np.float32)


@_decoder(2)
def _f16(b: U8) -> F32:
    return b.view(np.float16).astype(np.float32)


@_decoder(2)
def _bf16(b: U8) -> F32:
    """The upper half of an f32."""
    return (b.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


@_decoder(34)
def _q8_0(b: U8) -> F32:
    """d 2, int8 32: w = d q."""
    return _f16_at(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


@_decoder(18)
def _q4_0(b: U8) -> F32:
    """d 2, nibbles 16: w = d (q - 8); low nibbles first."""
    return _f16_at(b, 0) * (_split(b[:, 2:], 16, 0, 4, mask=15).astype(np.float32) - np.float32(8))


@_decoder(20)
def _q4_1(b: U8) -> F32:
    """d 2, m 2, nibbles 16: w = d q + m; low nibbles first."""
    return _f16_at(b, 0) * _split(b[:, 4:], 16, 0, 4, mask=15).astype(np.float32) + _f16_at(b, 2)


def _fifth_bits(b: U8) -> U8:
    """Spread the 32 bits of 4 bytes, lowest first, each to bit 4 of a byte: [blocks, 32]."""
    return np.unpackbits(np.ascontiguousarray(b), axis=1, bitorder="little") << np.uint8(4)


@_decoder(22)
def _q5_0(b: U8) -> F32:
    """d 2, fifth bits 4, nibbles 16: w = d (q - 16)."""
    q = _split(b[:, 6:], 16, 0, 4, mask=15) | _fifth_bits(b[:, 2:6])
    return _f16_at(b, 0) * (q.astype(np.float32) - np.float32(16))


@_decoder(24)
def _q5_1(b: U8) -> F32:
    """d 2, m 2, fifth bits 4, nibbles 16: w = d q + m."""
    q = _split(b[:, 8:], 16, 0, 4, mask=15) | _fifth_bits(b[:, 4:8])
    return _f16_at(b, 0) * q.astype(np.float32) + _f16_at(b, 2)


@_decoder(84)
def _q2_k(b: U8) -> F32:
    """scale and minimum nibbles 16, 2-bit q 64, d 2, m 2: w = d scale q - m minimum, by groups of 16."""
    d, m = (
        _f16_at(b, 80) * (b[:, :16] & 15).astype(np.float32),
        _f16_at(b, 82) * (b[:, :16] >> 4).astype(np.float32),
    )
    return _scaled(_split(b[:, 16:80], 32, 0, 2, 4, 6, mask=3), d) - m[:, :, None]


@_decoder(110)
def _q3_k(b: U8) -> F32:
    """third bits 32, 2-bit q 64, 6-bit scales 12, d 2: w = d (scale - 32)(q - 4), by groups of 16.

    Scales: low nibbles in 8 bytes (all low ones first), the two high bits in the other 4.
    """
    scales = _split(b[:, 96:104], 8, 0, 4, mask=15) | _split(
        b[:, 104:108], 4, 0, 2, 4, 6, mask=3
    ) << np.uint8(4)
    d = _f16_at(b, 108) * (scales.astype(np.float32) - np.float32(32))
    third = _split(b[:, :32], 32, *range(8), mask=1) << np.uint8(2)
    q = (_split(b[:, 32:96], 32, 0, 2, 4, 6, mask=3) | third).astype(np.float32) - np.float32(4)
    return _scaled(q, d)


def _scales_and_minima(b: U8) -> tuple[F32, F32]:
    """Unpack 8 scales and 8 minima of 6 bits from 12 bytes.

    Bytes 0-3 hold the first four scales and bytes 4-7 the first four minima, each with the high two bits of
    another one above. Bytes 8-11 hold the low nibbles of the others: scales in the low half, minima above.
    """
    low, middle, high = b[:, :4], b[:, 4:8], b[:, 8:12]
    scales = np.hstack([low & 63, (high & 15) | (low >> 6) << np.uint8(4)])
    minima = np.hstack([middle & 63, (high >> 4) | (middle >> 6) << np.uint8(4)])
    return scales.astype(np.float32), minima.astype(np.float32)


@_decoder(144)
def _q4_k(b: U8) -> F32:
    """d 2, m 2, scales and minima 12, nibbles 128: w = d scale q - m minimum, by groups of 32."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _split(b[:, 16:], 32, 0, 4, mask=15)
    return _scaled(q, _f16_at(b, 0) * scales) - (_f16_at(b, 2) * minima)[:, :, None]


@_decoder(176)
def _q5_k(b: U8) -> F32:
    """d 2, m 2, scales and minima 12, fifth bits 32, nibbles 128: w as in q4_k."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _split(b[:, 48:], 32, 0, 4, mask=15) | _split(b[:, 16:48], 32, *range(8), mask=1) << np.uint8(4)
    return _scaled(q, _f16_at(b, 0) * scales) - (_f16_at(b, 2) * minima)[:, :, None]


@_decoder(210)
def _q6_k(b: U8) -> F32:
    """nibbles 128, high bits 64, int8 scales 16, d 2: w = d scale (q - 32), by groups of 16."""
    d = _f16_at(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    q = _split(b[:, :128], 64, 0, 4, mask=15) | _split(b[:, 128:192], 32, 0, 2, 4, 6, mask=3) << np.uint8(4)
    return _scaled(q.astype(np.float32) - np.float32(32), d)


IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # the 16 values of iq4_nl and iq4_xs
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # doubled


def e8m0_half(e: U8) -> F32:
    """Return 2**(e - 128): half of what an E8M0 scale says, for codes that are doubled."""
    e = e.astype(np.uint32)
    return np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23)).view(np.float32)


@_decoder(18)
def _iq4_nl(b: U8) -> F32:
    """d 2, nibbles 16: w = d IQ4[q]; low nibbles first."""
    return _f16_at(b, 0) * IQ4[_split(b[:, 2:], 16, 0, 4, mask=15)]


@_decoder(136)
def _iq4_xs(b: U8) -> F32:
    """d 2, scales' high bits 2, low nibbles 4, nibbles 128: w = d (scale - 32) IQ4[q], by groups of 32."""
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> (2 * np.arange(8, dtype=np.uint16)) & 3
    low = _split(b[:, 4:8], 1, 0, 4, mask=15)
    scale = (low | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - np.float32(32)
    return _scaled(IQ4[_split(b[:, 8:], 16, 0, 4, mask=15)], _f16_at(b, 0) * scale)


@_decoder(17)
def _mxfp4(b: U8) -> F32:
    """E8M0 1, nibbles 16: w = 2**(e - 128) E2M1[q], of doubled codes; low nibbles first."""
    return e8m0_half(b[:, :1]) * E2M1[_split(b[:, 1:], 16, 0, 4, mask=15)]


@_decoder(66)
def _tq2_0(b: U8) -> F32:
    """2-bit q 64, d 2: w = d (q - 1)."""
    q = _split(b[:, :64], 32, 0, 2, 4, 6, mask=3)
    return _f16_at(b, 64) * (q.astype(np.float32) - np.float32(1))
