"""Rows of random weights, made as each format stores them: random bytes under scales of a wanted deviation.

No floats are rounded, so a gigabyte takes about a second. Weights have no mean. Where a format's quants have
one, either the minimum takes it away, or only odd quants are drawn, or the signs of scales are random: a mean
of a tenth of the deviation adds up wherever inputs have one sign. To add a format: its row in `_DRAWS`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.synthetic_weights import BLOCK, F32, F64, I64
from thermocline.model import gguf_blocks, quant

U8 = NDArray[np.uint8]

_SCALE_SPREAD = 0.1  # the scales of blocks differ by up to this share


@dataclass(frozen=True)
class Matrix:
    """A random matrix, described by blocks of BLOCK columns.

    `sd` is the standard deviation of the weights of each block; one number holds for all blocks. In the
    first len(fixed) blocks, all weights of row r are fixed[k][r]; one number holds for all rows. `silent`
    are blocks of BLOCK rows that are 0. `mirrored` makes every odd row the opposite of the row before it.
    """

    sd: F32
    fixed: tuple[F32, ...] = ()
    silent: tuple[int, ...] = ()
    mirrored: bool = False


# ---- what random bytes mean in each format

Put = Callable[[dict[str, U8], U8], None]  # writes the scales of parts [rows, blocks, parts] into planes


@dataclass(frozen=True)
class Draw:
    """How random bytes become weights of a format: weight = scale * (value - mean of all values).

    `planes` are filled with random bytes, with these bits set in each. All `values` are then equally likely.
    Every `part` weights share a scale. `put` stores it as an integer up to `top`, plus `stored_zero`; without
    `put` it is a number of its own. `signed` gives scales a random sign.
    """

    planes: dict[str, int]
    values: F64
    part: int = BLOCK
    put: Put | None = None
    top: int = 0
    stored_zero: int = 0
    signed: bool = False

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def deviation(self) -> float:
        return float(np.sqrt((self.values**2).mean() if self.signed else self.values.var()))


def _whole_scales(of: dict[str, U8], scales: U8) -> None:
    of["scales"][:] = scales


def _scales_and_minima(of: dict[str, U8], scales: U8) -> None:
    """Six bits each; the minimum has the scale's number."""
    of["scales"][:] = scales | scales << np.uint8(6)
    high = scales >> np.uint8(2)
    of["minima"][:] = high[..., :4] | high[..., 4:] << np.uint8(4)


def _scales_and_minima_of_16(of: dict[str, U8], scales: U8) -> None:
    of["scales"][:] = scales | scales << np.uint8(4)


def _low_and_high_scales(of: dict[str, U8], scales: U8) -> None:
    """Four bits two a byte, then two bits four a byte."""
    of["scales"][:] = scales[..., ::2] & np.uint8(15) | scales[..., 1::2] << np.uint8(4)
    high = scales >> np.uint8(4)
    of["scales_high"][:] = sum(high[..., i::4] << np.uint8(2 * i) for i in range(4))


def _odd(bits: int) -> F64:
    """The odd integers of so many bits: unlike all of them, they are symmetric around 0."""
    return np.arange(1 - 2 ** (bits - 1), 2 ** (bits - 1), 2, dtype=np.float64)


def _all(bits: int) -> F64:
    return np.arange(2**bits, dtype=np.float64)


_IQ4, _E2M1 = gguf_blocks.IQ4.astype(np.float64), gguf_blocks.E2M1.astype(np.float64) / 2
_NIBBLES, _ODD_NIBBLES = {"quants": 0}, {"quants": 0x11}
_FIFTH, _PAIRS = {"fifth": 0}, {"pairs": 0}
_DRAWS: dict[str, Draw] = {
    "q8_0": Draw({"quants": 1}, _odd(8)),
    "q5_0": Draw(_ODD_NIBBLES | _FIFTH, _odd(5)),
    "q5_1": Draw(_NIBBLES | _FIFTH, _all(5)),
    "q4_0": Draw(_ODD_NIBBLES, _odd(4)),
    "q4_1": Draw(_NIBBLES, _all(4)),
    "iq4_nl": Draw(_NIBBLES, _IQ4, signed=True),
    "mxfp4": Draw(_NIBBLES, _E2M1),
    "q6_k": Draw(_ODD_NIBBLES | _PAIRS, _odd(6), 16, _whole_scales, 127),
    "q5_k": Draw(_NIBBLES | _FIFTH, _all(5), 32, _scales_and_minima, 63),
    "q4_k": Draw(_NIBBLES, _all(4), 32, _scales_and_minima, 63),
    "q3_k": Draw({"pairs": 0x55, "third": 0}, _odd(3), 16, _low_and_high_scales, 31, stored_zero=32),
    "q2_k": Draw(_PAIRS, _all(2), 16, _scales_and_minima_of_16, 15),
    "iq4_xs": Draw(_NIBBLES, _IQ4, 32, _low_and_high_scales, 31, stored_zero=32, signed=True),
    "tq2_0": Draw(_PAIRS, np.array([-1.0, 0, 0, 1]), 256),
}


# ---- rows


class StoredRows:
    """The rows of one matrix in one format, made of random bytes: `row_bits` of them for each row."""

    def __init__(self, matrix: Matrix, format: str, columns: int) -> None:
        self._m, self._format, self._columns = matrix, quant.FORMATS[format], columns
        self.mirrored = matrix.mirrored
        self._draw = _DRAWS.get(format)
        self._drawn = self._drawn_as_numbers()
        self.row_bits = 2 * self._drawn
        self._first = 0  # the first random number's column; those before it are fixed
        if self._draw is None or self._drawn == columns:
            return
        self._first = BLOCK * len(matrix.fixed)
        blocks = columns // self._format.block
        self._random = {p.name: blocks * p.nbytes for p in self._format.planes if p.name in self._draw.planes}
        self._parts = columns // self._draw.part
        used = sum(self._random.values()) + self._parts + 2 * (self._drawn - self._first)
        self.row_bits = max(used, quant.row_bytes(format, columns))
        self._deviations = self._by_part(self._draw.part)
        if self._draw.put is not None:
            self._supers, self._codes = _codes(self._draw, self._deviations, self._format.block)
        elif format == "mxfp4":
            self._codes = _exponents(self._deviations / self._draw.deviation)

    def __call__(self, bits: U8, rows: I64) -> U8:
        """Return rows of the matrix [rows, row_bytes] of random bytes [rows, at least row_bits].

        `rows` are their numbers. An odd row of a mirrored matrix has to get its predecessor's bytes.
        """
        out = np.empty((len(rows), quant.row_bytes(self._format.name, self._columns)), np.uint8)
        of, at = quant.planes(self._format.name, out), 0
        if self._drawn < self._columns:
            at = self._fill(of, bits)
        if self._drawn:
            self._put_numbers(of, bits[:, at:], rows)
        if self._m.mirrored:
            _negate(of, rows % 2 == 1, self._format.name)
        if self._m.silent:
            out[np.isin(rows // BLOCK, self._m.silent)] = (
                0  # a row of zero bytes is a row of zeros in every format
            )
        return out

    def _drawn_as_numbers(self) -> int:
        """Return how many columns, from the first on, are numbers before they are rounded to the format.

        In formats of blocks these are the blocks with fixed columns. TQ2_0 has one scale for 256 weights, so
        its rows are numbers as a whole where deviations differ.
        """
        m, block = self._m, self._format.block
        if self._draw is None or (self._format.name == "tq2_0" and len(m.sd) > 1):
            return self._columns
        return -(-len(m.fixed) * BLOCK // block) * block

    def _by_part(self, part: int) -> F32:
        """Return the deviation of each part of a row [parts]; [1] if there is one for all."""
        sd = self._m.sd
        return sd if len(sd) == 1 else np.repeat(sd, BLOCK // part) if part < BLOCK else sd

    def _fill(self, of: dict[str, U8], bits: U8) -> int:
        """Fill all planes. Return how many bytes of each row are used."""
        assert self._draw is not None
        at = 0
        for name, size in self._random.items():
            plane = of[name]
            raw = bits[:, at : at + size].reshape(plane.shape)
            np.bitwise_or(raw, np.uint8(self._draw.planes[name]), out=plane)
            at += size
        if self._format.name == "tq2_0":
            _three_of_four(of["pairs"])
        self._put_scales(of, bits[:, at : at + self._parts])
        return at + self._parts

    def _put_scales(self, of: dict[str, U8], chosen: U8) -> None:
        """Fill the planes of scales. `chosen`: a random byte for each part [rows, parts]."""
        d = self._draw
        assert d is not None
        if d.put is not None:
            blocks = len(chosen), self._columns // self._format.block, self._format.block // d.part
            d.put(of, _looked_up(self._codes, chosen).reshape(blocks))
            of["super"].view(np.float16)[:, :, 0] = self._supers
            if "super_minimum" in of:
                of["super_minimum"].view(np.float16)[:, :, 0] = self._supers * np.float32(d.mean)
        elif "exponent" in of:
            of["exponent"][:, :, 0] = _looked_up(self._codes, chosen)
        else:
            scales = _spread(d.signed)[chosen] * (self._deviations * np.float32(1 / d.deviation))
            of["super" if "super" in of else "scale"].view(np.float16)[:, :, 0] = scales
            if "minimum" in of:
                of["minimum"].view(np.float16)[:, :, 0] = scales * np.float32(-d.mean)

    def _put_numbers(self, of: dict[str, U8], bits: U8, rows: I64) -> None:
        """Fill the first columns by rounding numbers."""
        m, n, first = self._m, self._drawn, self._first
        sd = np.broadcast_to(m.sd, (-(-self._columns // BLOCK),))[: -(-n // BLOCK)]
        words = np.ascontiguousarray(bits[:, : 2 * (n - first)]).view("<u2")
        fixed = [f if len(f) == 1 else f[rows] for f in m.fixed]
        x = np.empty((len(rows), n), np.float32)
        if self._format.name == "tq2_0":
            _put_ternary(x, words, sd, fixed)
        else:
            x[:, first:] = normal_values(words) * np.repeat(sd, BLOCK)[first:n]
            for k, values in enumerate(fixed):
                x[:, k * BLOCK : (k + 1) * BLOCK] = values[:, None]
        made = quant.encode(self._format.name, x)
        for name, plane in quant.planes(self._format.name, made).items():
            of[name][:, : plane.shape[1]] = plane


def _negate(of: dict[str, U8], which: NDArray[np.bool_], format: str) -> None:
    """Negate rows: all of their numbers with a sign."""
    if format == "mxfp4":
        of["quants"][which] ^= np.uint8(0x88)
    for name in of.keys() & {"number", "scale", "minimum", "super", "super_minimum"}:
        of[name][which, :, -1] ^= np.uint8(0x80)


def _three_of_four(pairs: U8) -> None:
    """Make every pair of bits 0, 1 or 2, in place: 1 as often as the others together."""
    low = pairs & np.uint8(0x55)
    pairs &= ~(low << np.uint8(1))


# ---- tables that a random byte looks up


@functools.lru_cache(maxsize=2)
def _spread(signed: bool) -> F32:
    """Return 256 factors for scales, with a mean square of 1."""
    spread = np.linspace(1 - _SCALE_SPREAD, 1 + _SCALE_SPREAD, 256)
    if signed:
        spread[1::2] *= -1
    return (spread / math.sqrt(float(np.mean(spread**2)))).astype(np.float32)


def _looked_up(tables: U8, chosen: U8) -> U8:
    """Return the entry of each part's table [parts or 1, 256] that its byte chooses [rows, parts]."""
    if len(tables) == 1:
        return np.take(tables[0], chosen)
    first = np.arange(len(tables), dtype=np.intp) * 256
    return np.take(tables.reshape(-1), chosen + first)


def _codes(draw: Draw, deviations: F32, block: int) -> tuple[F32, U8]:
    """Return the scale of scales of each block [blocks or 1], and each part's 256 stored scales.

    A scale is the integer above or below the wanted one, so often that the mean square is right. Scales of
    scales have 6 significant bits: their products with a mean of 1.5 to 15.5 are then exact in f16.
    """
    per_block = block // draw.part if len(deviations) > 1 else 1
    wanted = deviations.astype(np.float64) / draw.deviation  # [parts]
    largest = wanted.reshape(-1, per_block).max(axis=1) * (1 + _SCALE_SPREAD) / draw.top
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(largest, 2.0**-40))) - 5, -24))
    supers = np.ceil(largest / step) * step  # [blocks]
    each = np.repeat(np.where(supers > 0, supers, 1), per_block)
    scales = (wanted / each)[:, None] * np.abs(_spread(False).astype(np.float64))  # [parts, 256]
    floor = np.floor(scales)
    above = (scales**2 - floor**2) / (2 * floor + 1)
    chance = np.arange(256) * 0.6180339887 % 1  # every stretch of 256 bytes has all chances
    codes = floor + (chance < above)
    if draw.signed:
        codes[:, 1::2] *= -1
    return supers.astype(np.float32), (codes + draw.stored_zero).astype(np.uint8)


def _exponents(wanted: F32) -> U8:
    """Return each block's 256 E8M0 bytes [blocks or 1, 256]: the power of two above or below, in turn."""
    safe = np.maximum(wanted.astype(np.float64), 2.0**-126)
    low = np.floor(np.log2(safe))
    above = ((safe / np.exp2(low)) ** 2 - 1) / 3
    return (127 + low[:, None] + ((np.arange(256) + 0.5) / 256 < above[:, None])).astype(np.uint8)


# ---- numbers


@functools.lru_cache(maxsize=1)
def _quantiles() -> F32:
    """Return the 65536 quantiles of a normal distribution: 16 random bits choose a normal number."""
    half = np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768)], np.float32)
    return np.concatenate([half, -half[::-1]])


def normal_values(words: NDArray[np.uint16]) -> F32:
    """Turn random words into normal numbers."""
    return np.take(_quantiles(), words, mode="clip")  # clip: no bounds check, twice as fast


def _put_ternary(x: F32, words: NDArray[np.uint16], sd: F32, fixed: list[F32]) -> None:
    """Fill `x` with numbers of these deviations, of which every 256 have one magnitude or are zero.

    Its last columns get random numbers, one of each word. Fixed blocks get their value on average.
    """
    most = np.repeat(np.maximum.reduceat(sd, np.arange(0, len(sd), 8)), 8)[: len(sd)]
    for k, values in enumerate(fixed):
        octet = slice(k // 8 * 8, k // 8 * 8 + 8)
        most[octet] = np.maximum(most[octet], np.abs(values).max())
    chance = np.divide(sd, most, out=np.zeros_like(sd), where=most > 0) ** 2
    n, first = x.shape[1], x.shape[1] - words.shape[1]
    size, chance = (np.repeat(v, BLOCK)[first:n] for v in (most, chance))
    signed = np.where(words & 1, size, -size)
    x[:, first:] = np.where(words >> 1 < chance * 32768, signed, np.float32(0))
    turn = (np.arange(BLOCK) + 0.5) / BLOCK
    for k, values in enumerate(fixed):
        share = np.abs(values) / max(float(most[k]), 1e-30)
        some = np.where(turn < share[:, None], most[k], 0) * np.sign(values)[:, None]
        x[:, k * BLOCK : (k + 1) * BLOCK] = some
