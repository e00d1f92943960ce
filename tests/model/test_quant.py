"""Weight formats: the values are GGUF's, bit for bit, in planar rows; the awkward ones survive."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from thermocline.errors import Unsupported
from thermocline.model import quant

NAMES = list(quant.FORMATS)
GGUF = {name: name.upper() for name in quant.FORMATS}


def awkward_rows() -> NDArray[np.float32]:
    """[rows, 64]: noise at many scales, zeros, ties between +max and -max, exact halves, one huge value."""
    rng = np.random.default_rng(7)
    noise = [rng.standard_normal((50, 64)) * 10.0**e for e in (-20, -6, -2, 0, 3)]
    ties = rng.integers(-8, 9, (200, 64)).astype(np.float64)
    halves = np.arange(64)[None, :] / 2 + np.array([[0.0], [-16.0], [95.5]])
    spike = np.eye(3, 64) * np.array([[1.0], [-7.0], [60000.0]])
    return np.concatenate([*noise, ties, halves, spike, np.zeros((2, 64)), -np.zeros((1, 64))]).astype(
        np.float32
    )


@pytest.mark.parametrize("name", NAMES)
def test_encoded_bytes_are_ggufs(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    x = awkward_rows()
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[GGUF[name]]).view(np.uint8)
    rows = quant.encode(name, x)
    assert np.array_equal(quant.to_gguf(name, rows), theirs.reshape(len(x), -1))
    assert np.array_equal(quant.from_gguf(name, theirs.reshape(len(x), -1)), rows)


@pytest.mark.parametrize(("name", "quants"), [("q8_0", 64), ("q4_0", 32)])
def test_a_row_is_its_quants_then_its_scales(name: str, quants: int) -> None:
    x = awkward_rows()
    blocks = quant.encode(name, x[:, :32]), quant.encode(name, x[:, 32:])
    row = np.concatenate([*(b[:, :-2] for b in blocks), *(b[:, -2:] for b in blocks)], axis=1)
    assert np.array_equal(quant.encode(name, x), row) and row.shape[1] == quants + 4


@pytest.mark.parametrize("name", NAMES)
def test_decoded_weights_are_ggufs(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    data = quant.encode(name, awkward_rows())
    theirs = gguf.quants.dequantize(quant.to_gguf(name, data), gguf.GGMLQuantizationType[GGUF[name]])
    assert np.array_equal(
        quant.decode(name, data, 64).view(np.uint32), theirs.astype(np.float32).view(np.uint32)
    )


@pytest.mark.parametrize("name", NAMES)
def test_round_trip_error_is_within_half_a_step(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((300, 96), dtype=np.float32)
    error = np.abs(quant.decode(name, quant.encode(name, x), 96) - x).reshape(300, 3, 32).max(axis=2)
    peak = np.abs(x).reshape(300, 3, 32).max(axis=2)
    # q8_0: half a step, and up to 127 * 2^-11 of one because d is an f16.
    # q4_0 clips the far end (+8 steps becomes +7): one whole step there.
    bound = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.57 / 127, "q4_0": 1.01 / 8}[name]
    assert (error <= bound * peak).all()


@pytest.mark.parametrize("name", NAMES)
def test_encoding_does_not_depend_on_the_chunking(name: str) -> None:
    x = np.random.default_rng(1).standard_normal((700, 128), dtype=np.float32)
    whole = quant.encode(name, x)
    assert np.array_equal(whole, np.concatenate([quant.encode(name, x[i : i + 1]) for i in range(700)]))
    assert np.array_equal(whole, quant.encode(name, np.asfortranarray(x)))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_are_no_bytes(name: str) -> None:
    data = quant.encode(name, np.empty((0, 64), np.float32))
    assert data.shape == (0, quant.row_bytes(name, 64))
    assert quant.decode(name, data, 64).shape == (0, 64)


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


@pytest.mark.parametrize("name", [f.name for f in quant.FORMATS.values() if f.block > 1])
def test_a_row_that_does_not_fill_its_blocks_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="blocks of 32, and 33 columns"):
        quant.encode(name, np.zeros((1, 33), np.float32))


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"'q3_k'.*q4_0"):
        quant.row_bytes("q3_k", 32)


def test_ids_and_sizes_are_the_contract() -> None:
    rows = [(f.name, f.id, f.block, f.block_bytes) for f in quant.FORMATS.values()]
    assert rows == [
        ("f32", 0, 1, 4),
        ("f16", 1, 1, 2),
        ("bf16", 2, 1, 2),
        ("q8_0", 3, 32, 34),
        ("q4_0", 4, 32, 18),
    ]
