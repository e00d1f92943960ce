"""Decode GGUF's block formats to f32 in numpy, bit for bit like llama.cpp's reference.

These formats are only read: packs hold the formats of `quant.py`. Each docstring lists a block's fields in
order, with their bytes; `d` and `m` are f16. To add a format, write a function and add it to `_DECODERS`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported
from thermocline.model import quant

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

SUPER = 256  # weights in a block of the K formats


def dequantise(type: str, rows: U8) -> F32:
    """Decode rows as GGUF stores them: [rows, row bytes] -> [rows, columns]. Raises Unsupported."""
    n = len(rows)
    if type in quant.FORMATS:
        f = quant.FORMATS[type]
        columns = rows.shape[1] // f.block_bytes * f.block
        return quant.decode(type, quant.from_gguf(type, np.ascontiguousarray(rows)), columns)
    found = _DECODERS.get(type)
    if found is None:
        raise Unsupported(
            f"weights of type {type} are not supported; known: {', '.join([*quant.FORMATS, *_DECODERS])}"
        )
    block_bytes, decoder = found
    with np.errstate(all="ignore"):  # scales may be NaN or infinite
        return decoder(np.ascontiguousarray(rows).reshape(-1, block_bytes)).reshape(n, -1)


def known(type: str) -> bool:
    return type in quant.FORMATS or type in _DECODERS


def _f16(b: U8, at: int) -> F32:
    """Return the f16 at byte `at` of each block, as f32 [blocks, 1]."""
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(np.float32)


def _split(b: U8, group: int, *shifts: int, mask: int) -> U8:
    """Split bytes into bit fields [blocks, n]: of each `group` of bytes, the fields at each shift in turn."""
    parts = b.reshape(len(b), -1, 1, group) >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return (parts & np.uint8(mask)).reshape(len(b), -1)


def _scaled(q: NDArray[np.generic], d: F32) -> F32:
    """Scale q [blocks, n] by d [blocks, groups], one scale for each n / groups values."""
    return d[:, :, None] * q.astype(np.float32).reshape(len(q), d.shape[1], -1)


def _q4_1(b: U8) -> F32:
    """d 2, m 2, nibbles 16: w = d q + m; low nibbles first."""
    return _f16(b, 0) * _split(b[:, 4:], 16, 0, 4, mask=15).astype(np.float32) + _f16(b, 2)


def _fifth_bits(b: U8) -> U8:
    """Spread the 32 bits of 4 bytes, lowest first, each to bit 4 of a byte: [blocks, 32]."""
    return np.unpackbits(np.ascontiguousarray(b), axis=1, bitorder="little") << np.uint8(4)


def _q5_0(b: U8) -> F32:
    """d 2, fifth bits 4, nibbles 16: w = d (q - 16)."""
    q = _split(b[:, 6:], 16, 0, 4, mask=15) | _fifth_bits(b[:, 2:6])
    return _f16(b, 0) * (q.astype(np.float32) - np.float32(16))


def _q5_1(b: U8) -> F32:
    """d 2, m 2, fifth bits 4, nibbles 16: w = d q + m."""
    q = _split(b[:, 8:], 16, 0, 4, mask=15) | _fifth_bits(b[:, 4:8])
    return _f16(b, 0) * q.astype(np.float32) + _f16(b, 2)


def _q2_k(b: U8) -> F32:
    """scale and minimum nibbles 16, 2-bit q 64, d 2, m 2: w = d scale q - m minimum, by groups of 16."""
    d, m = (
        _f16(b, 80) * (b[:, :16] & 15).astype(np.float32),
        _f16(b, 82) * (b[:, :16] >> 4).astype(np.float32),
    )
    return _scaled(_split(b[:, 16:80], 32, 0, 2, 4, 6, mask=3), d) - m[:, :, None]


def _q3_k(b: U8) -> F32:
    """third bits 32, 2-bit q 64, 6-bit scales 12, d 2: w = d (scale - 32)(q - 4), by groups of 16.

    Scales: low nibbles in 8 bytes (all low ones first), the two high bits in the other 4.
    """
    scales = _split(b[:, 96:104], 8, 0, 4, mask=15) | _split(
        b[:, 104:108], 4, 0, 2, 4, 6, mask=3
    ) << np.uint8(4)
    d = _f16(b, 108) * (scales.astype(np.float32) - np.float32(32))
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


def _q4_k(b: U8) -> F32:
    """d 2, m 2, scales and minima 12, nibbles 128: w = d scale q - m minimum, by groups of 32."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _split(b[:, 16:], 32, 0, 4, mask=15)
    return _scaled(q, _f16(b, 0) * scales) - (_f16(b, 2) * minima)[:, :, None]


def _q5_k(b: U8) -> F32:
    """d 2, m 2, scales and minima 12, fifth bits 32, nibbles 128: w as in q4_k."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    q = _split(b[:, 48:], 32, 0, 4, mask=15) | _split(b[:, 16:48], 32, *range(8), mask=1) << np.uint8(4)
    return _scaled(q, _f16(b, 0) * scales) - (_f16(b, 2) * minima)[:, :, None]


def _q6_k(b: U8) -> F32:
    """nibbles 128, high bits 64, int8 scales 16, d 2: w = d scale (q - 32), by groups of 16."""
    d = _f16(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    q = _split(b[:, :128], 64, 0, 4, mask=15) | _split(b[:, 128:192], 32, 0, 2, 4, 6, mask=3) << np.uint8(4)
    return _scaled(q.astype(np.float32) - np.float32(32), d)


_DECODERS: dict[str, tuple[int, Callable[[U8], F32]]] = {
    "q4_1": (20, _q4_1),
    "q5_0": (22, _q5_0),
    "q5_1": (24, _q5_1),
    "q2_k": (84, _q2_k),
    "q3_k": (110, _q3_k),
    "q4_k": (144, _q4_k),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
}
