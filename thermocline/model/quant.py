"""Rows of weights in each format of `formats`, encoded and decoded in numpy: what the bytes mean.

Quantised values are GGUF's, bit for bit, in planar rows: one plane of all blocks, then the next, so that a
vector of scales is one load (see docs/internals/pack.md and `csrc/kernels/formats.inl`). To add a format:
its row in `formats`, and its encoder here, under its name; `gguf_blocks` has the decoders, `block_layout` the
planes of those whose bits lie elsewhere in a row. Encoders round to the nearest; a search for better scales
is not made here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import Unsupported
from thermocline.model import gguf_blocks
from thermocline.model.block_layout import from_gguf as from_gguf
from thermocline.model.block_layout import gguf_blocks_of
from thermocline.model.block_layout import planes as planes
from thermocline.model.block_layout import to_gguf as to_gguf
from thermocline.model.formats import FORMATS as FORMATS
from thermocline.model.formats import Quants as Quants

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Elements encoded at a time: the temporaries (about 20 bytes each) then stay in a 1-2 MiB L2 cache.
_CHUNK = 1 << 15
# The largest float below 0.5. Adding it and truncating rounds halves away from zero exactly (for |q| < 2^22);
# adding 0.5 itself would round 0.49999997 up to 1.
_BELOW_HALF = np.float32(0.49999997)
_NIBBLE, _FOUR = np.uint8(15), np.uint8(4)


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
    out[:, 2:] = (nibble[:16] | (nibble[16:] << _FOUR)).T
    return out


def _reciprocal(d: F32) -> F32:
    """1/d, and 0 for 0."""
    return np.where(d == 0, np.float32(0), np.float32(1) / d)


def _nearest_half(x: F32) -> F32:
    """x as f16 holds it."""
    return x.astype(np.float16).astype(np.float32)


def _bytes_f16(x: F32) -> U8:
    """[blocks] as f16: [blocks, 2]."""
    out: U8 = x.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return out


def _quants(x: F32, low: int, high: int) -> U8:
    """The nearest integers within [low, high], from 0 on; halves go up."""
    nearest: U8 = (np.clip(np.nan_to_num(np.floor(x + np.float32(0.5))), low, high) - low).astype(np.uint8)
    return nearest


def _divided(x: F32, d: F32) -> F32:
    """x [blocks, parts, n] / d [blocks, parts], and 0 where d is 0."""
    return x * _reciprocal(d)[:, :, None]


def _extreme(x: F32) -> F32:
    """The number of largest magnitude along the last axis."""
    at = np.abs(x).argmax(axis=-1)[..., None]
    return np.take_along_axis(x, at, axis=-1)[..., 0]


def _halves(q: U8) -> U8:
    """32 numbers of 4 bits [blocks, 32] as 16 bytes: number j and number j + 16 in byte j."""
    return q[:, :16] | q[:, 16:] << _FOUR


@_encoder
def _q4_1(x: F32) -> U8:
    """d = (max - min) / 15, q = round((x - min) / d)."""
    return _affine("q4_1", x, 15)


@_encoder
def _q5_1(x: F32) -> U8:
    return _affine("q5_1", x, 31)


def _affine(format: str, x: F32, top: int) -> U8:
    b = x.reshape(-1, 32)
    low = b.min(axis=1)
    d = (b.max(axis=1) - low) / np.float32(top)
    q = _quants((b - low[:, None]) * _reciprocal(d)[:, None], 0, top)
    scales = {"scale": _bytes_f16(d), "minimum": _bytes_f16(low)}
    if top == 15:
        return gguf_blocks_of(format, quants=_halves(q), **scales)
    return gguf_blocks_of(format, quants=_halves(q & _NIBBLE), fifth=q >> _FOUR, **scales)


@_encoder
def _q5_0(x: F32) -> U8:
    """d = (the x of largest |x|) / -16, q = x / d + 16.5 truncated to 0..31."""
    b = x.reshape(-1, 32)
    d = _extreme(b) / np.float32(-16)
    q = np.clip(np.nan_to_num(b * _reciprocal(d)[:, None] + np.float32(16.5)), 0, 31).astype(np.uint8)
    return gguf_blocks_of("q5_0", quants=_halves(q & _NIBBLE), fifth=q >> _FOUR, scale=_bytes_f16(d))


def _with_minima(x: F32, part: int, top: int, most: int) -> tuple[U8, U8, U8, U8, U8]:
    """Return q, scales, minima (integers), and the f16 scales of both, for parts of a block of 256.

    A part's minimum is at most 0. Scales and minima are multiples, up to `most`, of the largest / `most`.
    """
    b = x.reshape(-1, 256 // part, part)
    low = np.minimum(b.min(axis=2), 0)
    scale = (b.max(axis=2) - low) / np.float32(top)
    d, m = (_nearest_half(v.max(axis=1) / np.float32(most)) for v in (scale, -low))
    scales, minima = (_quants(v * _reciprocal(of)[:, None], 0, most) for v, of in ((scale, d), (-low, m)))
    q = _quants(_divided(b + (m[:, None] * minima)[:, :, None], d[:, None] * scales), 0, top)
    return q.reshape(-1, 256), scales, minima, _bytes_f16(d), _bytes_f16(m)


@_encoder
def _q4_k(x: F32) -> U8:
    """By 32: w = d scale q - m minimum, with scale and minimum of 6 bits."""
    q, scales, minima, d, m = _with_minima(x, 32, 15, 63)
    return gguf_blocks_of("q4_k", q=q, scale=scales, minimum=minima, super=d, super_minimum=m)


@_encoder
def _q5_k(x: F32) -> U8:
    q, scales, minima, d, m = _with_minima(x, 32, 31, 63)
    low, fifth = q & _NIBBLE, q >> _FOUR
    return gguf_blocks_of("q5_k", q=low, fifth=fifth, scale=scales, minimum=minima, super=d, super_minimum=m)


@_encoder
def _q2_k(x: F32) -> U8:
    """By 16: w = d scale q - m minimum, with scale and minimum of 4 bits."""
    q, scales, minima, d, m = _with_minima(x, 16, 3, 15)
    both = scales | minima << _FOUR
    return gguf_blocks_of("q2_k", pair=q, scales=both, super=d, super_minimum=m)


def _with_scales(b: F32, extreme: int, lowest: int, highest: int) -> tuple[F32, NDArray[np.float32], F32]:
    """Return x / (d scale), scales (integers) and d [blocks], for parts [blocks, parts, n] of blocks.

    The largest number of the part with the largest one becomes `extreme`, with the scale `lowest`.
    """
    scale = _extreme(b) / np.float32(extreme)
    d = _nearest_half(_extreme(scale) / np.float32(lowest))
    scales = np.clip(np.nan_to_num(np.rint(scale * _reciprocal(d)[:, None])), lowest, highest)
    return _divided(b, d[:, None] * scales), scales, d


@_encoder
def _q6_k(x: F32) -> U8:
    """By 16: w = d scale (q - 32), with scale an int8."""
    b, scales, d = _with_scales(x.reshape(-1, 16, 16), -32, -128, 127)
    q = _quants(b.reshape(-1, 256), -32, 31)
    scale = scales.astype(np.int8).view(np.uint8)
    return gguf_blocks_of("q6_k", q=q & _NIBBLE, pair=q >> _FOUR, scales=scale, super=_bytes_f16(d))


@_encoder
def _q3_k(x: F32) -> U8:
    """By 16: w = d (scale - 32) (q - 4), with scale of 6 bits."""
    b, scales, d = _with_scales(x.reshape(-1, 16, 16), -4, -32, 31)
    q = _quants(b.reshape(-1, 256), -4, 3)
    scale = (scales + 32).astype(np.uint8)
    return gguf_blocks_of(
        "q3_k", pair=q & np.uint8(3), third=q >> np.uint8(2), scale=scale, super=_bytes_f16(d)
    )


def _of_table(x: F32, table: F32) -> U8:
    """The index of the nearest number of an ascending table, the first if several."""
    return np.searchsorted((table[1:] + table[:-1]) / 2, np.nan_to_num(x)).astype(np.uint8)


@_encoder
def _iq4_nl(x: F32) -> U8:
    """d = (the x of largest |x|) / -127, q = the nearest of the table to x / d."""
    b = x.reshape(-1, 32)
    d = _extreme(b) / np.float32(-127)
    q = _of_table(b * _reciprocal(d)[:, None], gguf_blocks.IQ4)
    return gguf_blocks_of("iq4_nl", quants=_halves(q), scale=_bytes_f16(d))


@_encoder
def _iq4_xs(x: F32) -> U8:
    """By 32: w = d (scale - 32) table[q], with scale of 6 bits."""
    b, scales, d = _with_scales(x.reshape(-1, 8, 32), -127, -32, 31)
    q = _of_table(b, gguf_blocks.IQ4).reshape(-1, 32)
    scale = (scales + 32).astype(np.uint8)
    low = scale[:, ::2] & _NIBBLE | (scale[:, 1::2] & _NIBBLE) << _FOUR
    high = ((scale >> _FOUR).astype(np.uint16) << (2 * np.arange(8, dtype=np.uint16))).sum(axis=1)
    return gguf_blocks_of(
        "iq4_xs",
        quants=_halves(q).reshape(-1, 128),
        scales=low,
        scales_high=high.astype("<u2").view(np.uint8).reshape(-1, 2),
        super=_bytes_f16(d),
    )


@_encoder
def _mxfp4(x: F32) -> U8:
    """The scale is 2**(floor(log2(max|x|)) - 2), as OCP's MX formats choose it; q the nearest code.

    Of two as near, the one nearer to 0; what becomes 0 has the code of +0.
    """
    b = x.reshape(-1, 32)
    top = np.abs(b).max(axis=1)
    exponent = np.where(top > 0, np.floor(np.log2(top)) - 2, -127)
    e = np.clip(np.nan_to_num(exponent) + 127, 0, 254).astype(np.uint8)
    scaled = np.abs(b) / gguf_blocks.e8m0_half(e)[:, None]
    q = _of_table(scaled.astype(np.float32), gguf_blocks.E2M1[:8])
    q |= ((b < 0) & (q > 0)).astype(np.uint8) << np.uint8(3)
    return gguf_blocks_of("mxfp4", quants=_halves(q), exponent=e[:, None])


@_encoder
def _tq2_0(x: F32) -> U8:
    """d = max|x|, w = d (q - 1), q = round(x / d) + 1, halves away from zero."""
    b = x.reshape(-1, 256)
    d = np.abs(b).max(axis=1)
    q = b * _reciprocal(d)[:, None]
    q = np.nan_to_num(np.trunc(q + np.copysign(_BELOW_HALF, q)))
    return gguf_blocks_of("tq2_0", pair=(q + 1).astype(np.uint8), super=_bytes_f16(d))
