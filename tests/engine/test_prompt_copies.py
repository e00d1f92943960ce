"""Copies in RAM: what was not used for the longest time goes first, and the limit holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from thermocline.engine.prompt_cache.copies import PromptCopies

SIZES = [3, 5]


def sections(value: int) -> Iterator[memoryview]:
    buffer = bytearray(max(SIZES))
    for size in SIZES:  # each overwrites the one before it, as a prompt cache's do
        buffer[:size] = bytes([value] * size)
        yield memoryview(buffer)[:size]
        value += 1


def write(copies: PromptCopies, name: int, used_ns: int, *, valid: bool = True) -> int:
    return copies.write(bytes([name]), "k0", sections(name), SIZES, used_ns, lambda: valid)


def read(copies: PromptCopies, name: int) -> list[bytes]:
    return [bytes(x) for x in copies.sections(bytes([name]), "k0", SIZES, memoryview(b""))]


def test_the_longest_unused_goes_first() -> None:
    copies = PromptCopies(4 * 8)
    for name in range(4):
        assert write(copies, name, used_ns=10 - name) == 8
    copies.use(b"\x03", "k0", 20)
    copies.use(b"\x07", "k0", 20)  # there is none
    assert write(copies, 9, used_ns=15) == 8
    there = [name for name in range(10) if copies.has(bytes([name]), "k0")]
    assert there == [0, 3, 9] and copies.nbytes == 24  # a copy more than needed goes: of a 20th, 1.6 bytes
    assert read(copies, 9) == [b"\x09" * 3, b"\x0a" * 5]
    with pytest.raises(FileNotFoundError):
        read(copies, 2)


def test_what_is_too_large_or_late_is_not_kept() -> None:
    assert write(PromptCopies(7), 1, 1) == 0
    copies = PromptCopies(8)
    assert write(copies, 1, 1, valid=False) == 0
    assert not copies.has(b"\x01", "k0") and copies.nbytes == 0
