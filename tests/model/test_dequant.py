"""GGUF's block formats: bit for bit what the `gguf` package makes of the same bytes, whatever the bytes."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline.errors import Unsupported
from thermocline.files.gguf_header import TYPES
from thermocline.model.gguf_blocks import _DECODERS, dequantise

gguf = pytest.importorskip("gguf")
FORMATS = list(_DECODERS)
BLOCKS = {name: (block, size) for name, block, size in TYPES.values()}


@pytest.mark.parametrize("type", FORMATS)
def test_any_bytes_mean_what_the_package_says(type: str) -> None:
    """Random bytes have NaN and infinite scales among them: one f16 in 32 is not finite."""
    rng, (block, size) = np.random.default_rng(0), BLOCKS[type]
    rows = rng.integers(0, 256, (48, 40 * size), np.uint8)
    ours = dequantise(type, rows)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type.upper()])
    assert ours.dtype == np.float32 and ours.shape == (48, 40 * block)
    theirs = theirs.reshape(ours.shape)
    finite = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), ~finite)
    assert np.array_equal(ours[finite].view(np.uint32), theirs[finite].view(np.uint32))
    if _DECODERS[type][0] > 4 and type != "mxfp4":  # its scale is a power of two, always
        assert not finite.all()


@pytest.mark.parametrize("type", _DECODERS)
def test_zero_times_a_negative_scale_is_the_packages_zero(type: str) -> None:
    """Signs of zeros too: scales of -0 and +0, all quants alike."""
    size = BLOCKS[type][1]
    rows = np.repeat(np.array([0x00, 0x80, 0x88, 0xFF], np.uint8)[:, None], size * 2, axis=1)
    ours = dequantise(type, rows)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[type.upper()]).reshape(ours.shape)
    same = np.isnan(ours) | (ours.view(np.uint32) == theirs.view(np.uint32))
    assert same.all() and np.array_equal(np.isnan(ours), np.isnan(theirs))


def test_types_without_a_decoder_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="iq2_xs"):
        dequantise("iq2_xs", np.zeros((1, 74), np.uint8))
