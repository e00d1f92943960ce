"""Weight formats: the values are GGUF's, bit for bit, in planar rows; the awkward ones survive."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from thermocline.errors import Unsupported
from thermocline.model import quant

FORMATS = quant.FORMATS
NAMES = list(FORMATS)
BLOCKS = [f.name for f in FORMATS.values() if f.block > 1]
SUPER = [f.name for f in FORMATS.values() if f.block == 256]
# What the `gguf` package can encode. It searches for no better scales, and neither do these.
ENCODED_BY_GGUF = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4", "tq2_0"]


def awkward_rows(format: str) -> NDArray[np.float32]:
    """[rows, 2 blocks]: noise at many scales, zeros, ties of +max and -max, exact halves, one huge value."""
    n = 2 * max(32, FORMATS[format].block)
    rng = np.random.default_rng(7)
    noise = [rng.standard_normal((50, n)) * 10.0**e for e in (-20, -6, -2, 0, 3)]
    ties = rng.integers(-8, 9, (200, n)).astype(np.float64)
    halves = np.arange(n)[None, :] / 2 + np.array([[0.0], [-16.0], [95.5], [-n / 4]])
    codes = rng.integers(-24, 25, (50, n)) / 2  # halfway between two of mxfp4's, too
    alike = np.repeat([[3.5], [-3.5]], n, axis=1)
    spike = np.eye(3, n) * np.array([[1.0], [-7.0], [60000.0]])
    rows = [*noise, ties, halves, codes, alike, spike, np.zeros((2, n)), -np.zeros((1, n))]
    return np.concatenate(rows).astype(np.float32)


def any_bytes(format: str, rows: int, blocks: int) -> NDArray[np.uint8]:
    """Random blocks in GGUF's order: one scale in 32 is no finite number."""
    size = blocks * FORMATS[format].block_bytes
    return np.random.default_rng(3).integers(0, 256, (rows, size), np.uint8)


def of_gguf(name: str) -> Any:
    gguf = pytest.importorskip("gguf")
    return gguf.quants, gguf.GGMLQuantizationType[name.upper()]


@pytest.mark.parametrize("name", ENCODED_BY_GGUF)
def test_encoded_bytes_are_ggufs(name: str) -> None:
    quants, type = of_gguf(name)
    x = awkward_rows(name)
    theirs = quants.quantize(x, type).view(np.uint8).reshape(len(x), -1)
    rows = quant.encode(name, x)
    assert np.array_equal(quant.to_gguf(name, rows), theirs)
    assert np.array_equal(quant.from_gguf(name, theirs), rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_s_order_and_ggufs_are_inverse_whatever_the_bytes(name: str) -> None:
    for blocks in (1, 2, 17):
        data = any_bytes(name, 3, blocks)
        rows = quant.from_gguf(name, data)
        assert np.array_equal(quant.to_gguf(name, rows), data)
        assert np.array_equal(quant.from_gguf(name, quant.to_gguf(name, data)), data)  # bytes as a row


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_is_one_plane_of_all_blocks_then_the_next(name: str) -> None:
    size, data = FORMATS[name].block_bytes, any_bytes(name, 2, 5)
    each = [quant.from_gguf(name, data[:, i * size : (i + 1) * size]) for i in range(5)]
    parts, at = [], 0
    for plane in FORMATS[name].planes:
        parts += [block[:, at : at + plane.nbytes] for block in each]
        at += plane.nbytes
    row = np.concatenate(parts, axis=1)
    assert at == size and np.array_equal(quant.from_gguf(name, data), row)
    views = quant.planes(name, row)
    assert list(views) == [p.name for p in FORMATS[name].planes]
    views[FORMATS[name].planes[-1].name][:] = 0  # views, not copies
    assert not row[:, -5 * FORMATS[name].planes[-1].nbytes :].any()


def place(kind: str, i: int) -> tuple[str, int, int, int]:
    """Weight i of 32: its plane, the plane's bytes of 32 weights, its byte there and its lowest bit."""
    if kind == "quants":
        return kind, 16, i % 16, 4 * (i // 16)
    if kind == "pairs":
        return kind, 8, i % 8, 2 * (i // 8)
    return kind, 4, i % 4, i // 4 % 4 + 4 * (i // 16)  # single bits


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "q8_0"])
def test_a_weight_s_bits_lie_where_the_documentation_says(name: str) -> None:
    """Turning one over changes this weight and no other (docs/internals/pack.md has the places)."""
    data = quant.encode(name, np.random.default_rng(4).standard_normal((1, 256), dtype=np.float32) + 3)
    before = quant.decode(name, data, 256)[0]
    kinds = [p.name for p in FORMATS[name].planes if p.name in ("quants", "pairs", "fifth", "third")]
    assert kinds
    for weight, kind in itertools.product((0, 3, 4, 15, 16, 21, 31, 32, 100, 255), kinds):
        plane, size, byte, bit = place(kind, weight % 32)
        changed = data.copy()
        quant.planes(name, changed)[plane].reshape(8, size)[weight // 32, byte] ^= 1 << bit
        assert np.flatnonzero(quant.decode(name, changed, 256)[0] != before).tolist() == [weight], kind


@pytest.mark.parametrize("name", NAMES)
def test_decoded_weights_are_ggufs(name: str) -> None:
    quants, type = of_gguf(name)
    x = awkward_rows(name)
    data = quant.encode(name, x)
    theirs = quants.dequantize(quant.to_gguf(name, data), type).reshape(x.shape)
    ours = quant.decode(name, data, x.shape[1])
    assert np.array_equal(ours.view(np.uint32), theirs.astype(np.float32).view(np.uint32))


# Of the largest weight of a block. One step where the far end is clipped, else half a step; scales and
# minima are f16s (2**-11), and in blocks of 256 multiples of an f16 besides.
ERROR = {
    "f32": 0.0,
    "f16": 2**-11,
    "bf16": 2**-8,
    "q8_0": 0.57 / 127,
    "q4_0": 1.01 / 8,
    "q4_1": 1.03 / 15,
    "q5_0": 1.02 / 16,
    "q5_1": 1.05 / 31,
    "q4_k": 1 / 15 + 3 / 126,
    "q5_k": 1 / 31 + 3 / 126,
    "q6_k": 1.01 / 32 + 1 / 256,
    "q3_k": 1.01 / 4 + 1 / 32,
    "q2_k": 1 / 3 + 3 / 30,
    "iq4_nl": 14.1 / 127,
    "iq4_xs": 14.1 / 127 + 1 / 32,
    "mxfp4": 4 / 16,
    "tq2_0": 0.5 + 2**-11,
}


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_error_is_bounded(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((300, 768), dtype=np.float32)
    of = 300, -1, max(32, FORMATS[name].block)
    error = np.abs(quant.decode(name, quant.encode(name, x), 768) - x).reshape(of).max(axis=2)
    assert (error <= ERROR[name] * np.abs(x).reshape(of).max(axis=2)).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_zeros_and_of_tiny_or_huge_weights_stay_finite(name: str) -> None:
    n = FORMATS[name].block
    for scale in (0.0, 1e-44, 1e-39, 1e-20, 1e4):
        x = np.random.default_rng(1).standard_normal((4, 2 * n)).astype(np.float32) * np.float32(scale)
        y = quant.decode(name, quant.encode(name, x), 2 * n)
        assert np.isfinite(y).all() and np.abs(y).max() <= 4 * scale + 1e-7, scale


@pytest.mark.parametrize("name", SUPER)
def test_one_part_of_a_block_may_be_far_larger_than_the_others(name: str) -> None:
    x = np.full((1, 256), 1e-3, np.float32)
    x[0, 40] = -1000
    y = quant.decode(name, quant.encode(name, x), 256)[0]
    assert abs(y[40] + 1000) <= ERROR[name] * 1000 and np.isfinite(y).all()


def test_ternary_weights_survive_tq2_0() -> None:
    x = np.random.default_rng(0).integers(-1, 2, (40, 512)).astype(np.float32) * np.float32(0.3125)
    assert np.array_equal(quant.decode("tq2_0", quant.encode("tq2_0", x), 512), x)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_does_not_depend_on_the_chunking(name: str) -> None:
    x = np.random.default_rng(1).standard_normal((200, 512), dtype=np.float32)
    whole = quant.encode(name, x)
    assert np.array_equal(whole, np.concatenate([quant.encode(name, x[i : i + 1]) for i in range(200)]))
    assert np.array_equal(whole, quant.encode(name, np.asfortranarray(x)))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_no_bytes(name: str) -> None:
    data = quant.encode(name, np.empty((0, 512), np.float32))
    assert data.shape == (0, quant.row_bytes(name, 512))
    assert quant.decode(name, data, 512).shape == (0, 512)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_float_formats_keep_infinity_and_nan(name: str) -> None:
    x = np.array([[np.inf, -np.inf, np.nan, -np.nan]], np.float32)
    y = quant.decode(name, quant.encode(name, x), 4)
    assert np.array_equal(y, x, equal_nan=True)


def test_bf16_nan_with_a_low_payload_stays_nan() -> None:
    x = np.array([[0x7F800001, 0xFFFFFFFF]], np.uint32).view(
        np.float32
    )  # truncating the first would give infinity
    assert np.isnan(quant.decode("bf16", quant.encode("bf16", x), 2)).all()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_that_does_not_fill_its_blocks_is_refused(name: str) -> None:
    block = FORMATS[name].block
    with pytest.raises(Unsupported, match=f"blocks of {block}, and {block + 1} columns"):
        quant.encode(name, np.zeros((1, block + 1), np.float32))


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"'iq2_xxs'.*q4_0"):
        quant.row_bytes("iq2_xxs", 256)


def test_ids_and_sizes_are_the_contract() -> None:
    rows = [(f.name, f.id, f.block, f.block_bytes) for f in FORMATS.values()]
    assert rows == [
        ("f32", 0, 1, 4),
        ("f16", 1, 1, 2),
        ("bf16", 2, 1, 2),
        ("q8_0", 3, 32, 34),
        ("q4_0", 4, 32, 18),
        ("q4_1", 5, 32, 20),
        ("q5_0", 6, 32, 22),
        ("q5_1", 7, 32, 24),
        ("q4_k", 8, 256, 144),
        ("q5_k", 9, 256, 176),
        ("q6_k", 10, 256, 210),
        ("q3_k", 11, 256, 110),
        ("q2_k", 12, 256, 84),
        ("iq4_nl", 13, 32, 18),
        ("iq4_xs", 14, 256, 136),
        ("mxfp4", 15, 32, 17),
        ("tq2_0", 16, 256, 66),
    ]
