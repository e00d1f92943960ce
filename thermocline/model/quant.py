"""Weight formats: one row per format and its encode/decode in numpy, which define what the bytes mean.

Quantised values are GGUF's, bit for bit, in planar rows: the quants of all blocks, then their f16 scales,
so that a vector of scales is one load (see docs/internals/pack.md and `csrc/kernels/kernels.h`). Must not
know models or files.
Adding a format: a row in `FORMATS`, an entry in `_ENCODERS` and `_DECODERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """`block` weights take `block_bytes` bytes (2 of them a scale, if > 1). `id`: native code's name."""

    name: str
    id: int
    block: int
    block_bytes: int


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("f32", 0, 1, 4),
        Format("f16", 1, 1, 2),
        Format("bf16", 2, 1, 2),
        Format("q8_0", 3, 32, 34),
        Format("q4_0", 4, 32, 18),
    )
}

# Elements encoded at a time: the temporaries (about 20 bytes each) then stay in a 1-2 MiB L2 cache.
_CHUNK = 1 << 15
# The largest float below 0.5. Adding it and truncating rounds halves away from zero exactly (for |q| < 2^22);
# adding 0.5 itself would round 0.49999997 up to 1.
_BELOW_HALF = np.float32(0.49999997)


def row_bytes(format: str, n: int) -> int:
    """Bytes of one row of `n` weights. Unsupported where `n` is not a whole number of blocks."""
    f = FORMATS.get(format)
    if f is None:
        raise Unsupported(f"unknown weight format {format!r}; known: {', '.join(FORMATS)}")
    if n % f.block:
        raise Unsupported(
            f"{format} stores weights in blocks of {f.block}, and {n} columns do not divide into them; "
            "use f16 or bf16"
        )
    return n // f.block * f.block_bytes


def encode(format: str, x: F32) -> U8:
    """[rows, n] f32 -> [rows, row_bytes] bytes."""
    rows, n = x.shape
    out = np.empty((rows, row_bytes(format, n)), np.uint8)
    step = max(1, _CHUNK // max(1, n))
    encoder = _ENCODERS[format]
    with np.errstate(all="ignore"):  # a block of zeros divides by zero; NaN weights stay NaN or become noise
        for r in range(0, rows, step):
            part = np.ascontiguousarray(x[r : r + step], dtype=np.float32)
            blocks = encoder(part).reshape(len(part), out.shape[1])
            out[r : r + step] = from_gguf(format, blocks)
    return out


def decode(format: str, data: U8, n: int) -> F32:
    """[rows, row_bytes] bytes -> [rows, n] f32."""
    if data.shape[1:] != (row_bytes(format, n),):
        raise ValueError(f"{format} rows of {n} are {row_bytes(format, n)} bytes, not {data.shape[1:]}")
    with np.errstate(all="ignore"):
        blocks = np.ascontiguousarray(to_gguf(format, data))
        return _DECODERS[format](blocks).reshape(len(data), n)


def from_gguf(format: str, blocks: U8) -> U8:
    """[rows, row_bytes] in GGUF's order (each block's scale, then its quants) -> planar rows."""
    f = FORMATS[format]
    if f.block == 1:
        return blocks
    n, per_row = len(blocks), blocks.shape[1] // f.block_bytes
    b = blocks.reshape(n, per_row, f.block_bytes)
    quants = b[:, :, 2:].reshape(n, per_row * (f.block_bytes - 2))
    return np.concatenate([quants, b[:, :, :2].reshape(n, per_row * 2)], axis=1)


def to_gguf(format: str, rows: U8) -> U8:
    """Planar rows [rows, row_bytes] -> the same bytes in GGUF's order."""
    f = FORMATS[format]
    if f.block == 1:
        return rows
    quants, scales = planes(format, rows)
    return np.concatenate([scales[:, :, None].view(np.uint8), quants], axis=2).reshape(rows.shape)


def planes(format: str, rows: U8) -> tuple[U8, F16]:
    """Views of planar rows: quants [rows, blocks, their bytes] and scales [rows, blocks]."""
    size = FORMATS[format].block_bytes
    n, per_row = len(rows), rows.shape[1] // size
    quants, scales = rows[:, : per_row * (size - 2)], rows[:, per_row * (size - 2) :]
    return quants.reshape(n, per_row, size - 2), scales.view(np.float16)


def _encode_bf16(x: F32) -> U8:
    """Round to nearest even; NaN stays NaN (quiet)."""
    u = x.view(np.uint32)
    rounded = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (u >> np.uint32(16)) | np.uint32(64)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(np.uint8)


def _blocks(x: F32) -> F32:
    """[32, blocks]: a block's maximum is then 31 vector operations: 5.5x max(axis=1) of [blocks, 32]."""
    return np.ascontiguousarray(x.reshape(-1, 32).T)


def _encode_q8_0(x: F32) -> U8:
    """d = max|x| / 127, q = round(x / d), halves away from zero."""
    b = _blocks(x)
    d = np.abs(np.maximum(b.max(axis=0), -b.min(axis=0))) / np.float32(127)  # abs: zeros have d = +0
    b *= _reciprocal(d)
    b += np.copysign(_BELOW_HALF, b)
    out = np.empty((b.shape[1], 34), np.uint8)
    out[:, :2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = b.astype(np.int8).view(np.uint8).T
    return out


def _encode_q4_0(x: F32) -> U8:
    """d = (the x of largest |x|, the first if several) / -8, nibble = x / d + 8.5 truncated to 0..15."""
    b = _blocks(x)
    high, low = b.max(axis=0), b.min(axis=0)
    extreme = np.where(high > -low, high, low)
    tied = np.flatnonzero(high == -low)
    extreme[tied] = b[np.abs(b[:, tied]).argmax(axis=0), tied]
    d = extreme / np.float32(-8)
    b *= _reciprocal(d)
    b += np.float32(8.5)
    nibble = np.minimum(b.astype(np.uint8), np.uint8(15))
    out = np.empty((b.shape[1], 18), np.uint8)
    out[:, :2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = (nibble[:16] | (nibble[16:] << np.uint8(4))).T
    return out


def _reciprocal(d: F32) -> F32:
    """1/d, and 0 for 0."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _decode_q8_0(data: U8) -> F32:
    b = data.reshape(-1, 34)
    d = np.ascontiguousarray(b[:, :2]).view(np.float16).astype(np.float32)
    return d * b[:, 2:].view(np.int8).astype(np.float32)


def _decode_q4_0(data: U8) -> F32:
    b = data.reshape(-1, 18)
    d = np.ascontiguousarray(b[:, :2]).view(np.float16).astype(np.float32)
    q = np.empty((len(b), 32), np.float32)
    q[:, :16] = b[:, 2:] & np.uint8(15)
    q[:, 16:] = b[:, 2:] >> np.uint8(4)
    return d * (q - np.float32(8))


_ENCODERS: dict[str, Callable[[F32], U8]] = {
    "f32": lambda x: x.view(np.uint8),
    "f16": lambda x: x.astype(np.float16).view(np.uint8),
    "bf16": _encode_bf16,
    "q8_0": _encode_q8_0,
    "q4_0": _encode_q4_0,
}
_DECODERS: dict[str, Callable[[U8], F32]] = {
    "f32": lambda d: d.view(np.float32),
    "f16": lambda d: d.view(np.float16).astype(np.float32),
    "bf16": lambda d: (d.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32),
    "q8_0": _decode_q8_0,
    "q4_0": _decode_q4_0,
}
