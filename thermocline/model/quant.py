"""Rows of weights in each format of `formats`, encoded and decoded in numpy: what the bytes mean.

Quantised values are GGUF's, bit for bit, in planar rows: one field of all blocks, then the next, so that a
vector of scales is one load (see docs/internals/pack.md and `csrc/kernels/formats.inl`). To add a format:
its row in `formats`, and its encoder here, under its name; `gguf_blocks` has the decoders.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported
from thermocline.model import gguf_blocks
from thermocline.model.formats import FORMATS as FORMATS
from thermocline.model.formats import Quants as Quants

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Elements encoded at a time: the temporaries (about 20 bytes each) then stay in a 1-2 MiB L2 cache.
_CHUNK = 1 << 15
# The largest float below 0.5. Adding it and truncating rounds halves away from zero exactly (for |q| < 2^22);
# adding 0.5 itself would round 0.49999997 up to 1.
_BELOW_HALF = np.float32(0.49999997)


def row_bytes(format: str, n: int) -> int:
    """Return the bytes of one row of `n` weights. Raises Unsupported if `n` is no whole number of blocks."""
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
    """Return weights [rows, n] as rows of bytes, [rows, row_bytes]."""
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
    """Return the weights of rows [rows, row_bytes], f32 [rows, n]."""
    if data.shape[1:] != (row_bytes(format, n),):
        raise ValueError(f"{format} rows of {n} are {row_bytes(format, n)} bytes, not {data.shape[1:]}")
    return gguf_blocks.dequantise(format, to_gguf(format, data))


def from_gguf(format: str, blocks: U8) -> U8:
    """Return rows of blocks in GGUF's order [rows, row_bytes], one block after the other, as planar rows."""
    f = FORMATS[format]
    if len(f.fields) == 1:
        return blocks
    n, per_row = len(blocks), blocks.shape[1] // f.block_bytes
    b = blocks.reshape(n, per_row, f.block_bytes)
    of, at = dict[str, U8](), 0
    for field in f.fields:
        of[field.name] = b[:, :, at : at + field.nbytes].reshape(n, per_row * field.nbytes)
        at += field.nbytes
    return np.concatenate([of[name] for name in f.planes], axis=1)


def to_gguf(format: str, rows: U8) -> U8:
    """Return planar rows [rows, row_bytes] in GGUF's order."""
    f = FORMATS[format]
    if len(f.fields) == 1:
        return rows
    of = planes(format, rows)
    return np.concatenate([of[field.name] for field in f.fields], axis=2).reshape(rows.shape)


def planes(format: str, rows: U8) -> dict[str, U8]:
    """Return views of planar rows: each field's bytes [rows, blocks, bytes of a block]."""
    f = FORMATS[format]
    n, per_row = len(rows), rows.shape[1] // f.block_bytes
    size, out, at = {field.name: field.nbytes for field in f.fields}, dict[str, U8](), 0
    for name in f.planes:
        end = at + per_row * size[name]
        out[name] = rows[:, at:end].reshape(n, per_row, size[name])
        at = end
    return out


Encode = Callable[[F32], U8]
_ENCODERS: dict[str, Encode] = {}


def _encoder(function: Encode) -> Encode:
    """Register the function under its name."""
    _ENCODERS[function.__name__[1:]] = function
    return function


@_encoder
def _f32(x: F32) -> U8:
    return x.view(np.uint8)


@_encoder
def _f16(x: F32) -> U8:
    return x.astype(np.float16).view(np.uint8)


@_encoder
def _bf16(x: F32) -> U8:
    """Round to nearest even; NaN stays NaN (quiet)."""
    u = x.view(np.uint32)
    rounded = (u + (np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (u >> np.uint32(16)) | np.uint32(64)
    return np.where(np.isnan(x), quiet, rounded).astype(np.uint16).view(np.uint8)


def _blocks(x: F32) -> F32:
    """[32, blocks]: a block's maximum is then 31 vector operations: 5.5x max(axis=1) of [blocks, 32]."""
    return np.ascontiguousarray(x.reshape(-1, 32).T)


@_encoder
def _q8_0(x: F32) -> U8:
    """d = max|x| / 127, q = round(x / d), halves away from zero."""
    b = _blocks(x)
    d = np.abs(np.maximum(b.max(axis=0), -b.min(axis=0))) / np.float32(127)  # abs: zeros have d = +0
    b *= _reciprocal(d)
    b += np.copysign(_BELOW_HALF, b)
    out = np.empty((b.shape[1], 34), np.uint8)
    out[:, :2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    out[:, 2:] = b.astype(np.int8).view(np.uint8).T
    return out


@_encoder
def _q4_0(x: F32) -> U8:
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
