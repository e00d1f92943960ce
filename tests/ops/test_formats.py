"""The format tables of numpy, the native core and the GPU are one table."""

from __future__ import annotations

import numpy as np
import pytest

from thermocline import _native
from thermocline.files import gguf_header
from thermocline.model import formats, gguf_blocks, quant


def test_python_and_the_native_core_have_the_same_formats() -> None:
    assert {f.name: (f.id, f.block, f.block_bytes) for f in formats.FORMATS.values()} == _native.FORMATS


def test_a_format_s_blocks_are_gguf_s() -> None:
    sizes = {name: (block, nbytes) for name, block, nbytes in gguf_header.TYPES.values()}
    for f in formats.FORMATS.values():
        assert sizes[f.name] == (f.block, f.block_bytes)
        moved = {field for field in f.fields} ^ {plane for plane in f.planes}
        assert sum(p.nbytes for p in f.planes) == f.block_bytes
        # Only the scales of some are apart in a row and in one field in GGUF.
        assert {field.name for field in moved} in (set(), {"packed", "scales", "minima"}) or f.name == "q3_k"


@pytest.mark.oracle
def test_the_gpu_has_a_loader_for_every_format() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    from thermocline.ops.kernels.triton_stored import loader

    for f in formats.FORMATS.values():
        how = loader(f.name)
        first = f.planes[0].nbytes * (1 if f.block == 1 else 32) // f.block  # bytes of 32 columns, or of one
        assert (1 if f.block == 1 else 32) // how.planes * how.size == first
        assert how.more in ("", *(p.name for p in f.planes))
        assert how.minima == any("minim" in p.name or f.name == "q2_k" for p in f.planes)


def test_every_format_encodes_what_it_decodes() -> None:
    x = np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)
    for f in formats.FORMATS.values():
        rows = quant.encode(f.name, x)
        assert rows.shape == (3, 512 // f.block * f.block_bytes)
        assert gguf_blocks.known(f.name)
        once = quant.decode(f.name, rows, 512)
        assert np.array_equal(quant.encode(f.name, once), rows)


def test_the_extreme_quant_is_what_a_byte_full_of_it_decodes_to() -> None:
    for f in formats.FORMATS.values():
        if (q := f.quants) is None:
            continue
        for value, byte in ((q.extreme, q.byte_of(q.extreme)), (None, q.odd)):
            rows = np.zeros((1, f.block_bytes), np.uint8)
            of = quant.planes(f.name, rows)
            of["quants"][:], of["scale"].view(np.float16)[:] = byte, 1
            found = quant.decode(f.name, rows, f.block)
            assert (found == value).all() if value is not None else (found % 2 != 0).all()


@pytest.mark.parametrize(("format", "columns", "stored"), [("q8_0", 64, "q8_0"), ("q8_0", 48, "f16")])
def test_rows_that_are_no_whole_number_of_blocks_fall_back(format: str, columns: int, stored: str) -> None:
    assert formats.fitting(format, columns) == stored


def test_every_fallback_ends_at_a_format_without_blocks() -> None:
    for name in formats.FORMATS:
        assert formats.FORMATS[formats.fitting(name, 1)].block == 1


def test_the_format_advised_to_save_memory_is_small_and_still_good() -> None:
    """Not the smallest there is, which is for ternary weights."""
    small, default = (formats.FORMATS[name] for name in (formats.SMALL, formats.DEFAULT))
    assert small.bits < 0.6 * default.bits and small.block == 32
    x = np.random.default_rng(0).standard_normal((20, 512), dtype=np.float32)
    error = quant.decode(small.name, quant.encode(small.name, x), 512) - x
    assert float((error**2).mean() / (x**2).mean()) < 0.01
