"""The native module is built so that a mistake in it is hard to make use of."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from thermocline import _native

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the module is no ELF file")
LOADED, STACK, RELRO = 2, 0x6474E551, 0x6474E552  # PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO
FLAGS, BIND_NOW, EXECUTABLE = 30, 8, 1  # DT_FLAGS, DF_BIND_NOW, PF_X


def image() -> bytes:
    assert _native.__file__ is not None
    return Path(_native.__file__).read_bytes()


def segments(elf: bytes) -> dict[int, tuple[int, int, int]]:
    """Kind -> flags, offset, size; of a 64-bit little-endian file."""
    assert elf[:6] == b"\x7fELF\x02\x01"
    (at,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    found = (struct.unpack_from("<IIQQQQ", elf, at + i * size) for i in range(count))
    return {kind: (flags, offset, nbytes) for kind, flags, offset, _, _, nbytes in found}


def test_its_tables_are_read_only_and_its_stack_is_no_code() -> None:
    """All names are bound when it is loaded; then the tables that say where calls go cannot be written."""
    elf = image()
    found = segments(elf)
    assert not found[STACK][0] & EXECUTABLE and RELRO in found
    _, offset, size = found[LOADED]
    dynamic = dict(struct.iter_unpack("<QQ", elf[offset : offset + size]))
    assert dynamic[FLAGS] & BIND_NOW


def test_its_stacks_are_guarded() -> None:
    assert b"__stack_chk_fail\0" in image()
