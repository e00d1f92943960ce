"""Parse the header of an untrusted GGUF file: metadata, and where the tensors are.

Versions 2 and 3, little-endian, with llama.cpp's magic or PowerInfer's. Every size is checked before memory
is allocated. The result takes at most 12 times the header's bytes. Failures are BadFile or Unsupported and
name file and field.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import foreign, quoted

MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
# The largest known vocabulary, Gemma's, takes 17 MB as tokens and merges, and 33 MB as tokenizer.json.
# This limit bounds memory too: a byte of the header costs at most 9 bytes in strings ("Ġ" is 10 bytes in the
# file, and 88 as a Python str in a list), and 12 in tensors.
MAX_HEADER_BYTES = 64 << 20
MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_STRING_BYTES = 64 << 20
MAX_ARRAY = 1 << 26
MAX_TENSORS = 65_536  # per file; one parsed entry costs about 350 bytes
MAX_NAME_BYTES = 4096
MAX_DIMS = 4
MAX_SIZE = 1 << 48  # bytes of one tensor, elements of one dimension

# id -> (name, weights in a block, bytes of a block) of every type, so that any file can be described.
TYPES: dict[int, tuple[str, int, int]] = {
    **{0: ("f32", 1, 4), 1: ("f16", 1, 2), 30: ("bf16", 1, 2), 28: ("f64", 1, 8)},
    **{24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8)},
    **{2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24)},
    **{8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110)},
    **{12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292)},
    **{16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50)},
    **{20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136)},
    **{29: ("iq1_m", 256, 56), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17)},
    **{40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18)},
}
_U32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_U64 = struct.Struct("<Q")
_SCALARS: dict[int, np.dtype[Any]] = {
    i: np.dtype(t)
    for i, t in {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", _U32: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1"}.items()
} | {10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8")}

# A metadata value: int, float, bool, str, list of str, or a numpy array of numbers or bools.
Value = Any


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `shape` is [rows..., columns], the reverse of GGUF's order; its bytes are [start, end)."""

    type: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class Header:
    """A parsed header. `bytes` is its length in the file."""

    powerinfer: bool
    metadata: dict[str, Value]
    tensors: dict[str, Tensor]
    bytes: int


class Short(Exception):
    """Raised if the header continues beyond the data that was given."""


class _Cursor:
    """Reads a header's fields one after the other, never beyond the end of the file."""

    def __init__(self, data: bytes | memoryview, file_size: int, name: str) -> None:
        self.data, self.at, self.file_size, self.name = data, 0, file_size, name

    def take(self, size: int, what: str) -> int:
        """Advance over the next `size` bytes. Return where they start. Raises BadFile or Short."""
        start, end = self.at, self.at + size
        if end > self.file_size:
            raise BadFile(
                f"{self.name}: {what} needs {size} bytes at {start}, the file ends at {self.file_size}: "
                "truncated?"
            )
        if end > MAX_HEADER_BYTES:
            raise BadFile(f"{self.name}: more than {MAX_HEADER_BYTES} bytes before the data")
        if end > len(self.data):
            raise Short
        self.at = end
        return start

    def u32(self, what: str) -> int:
        start = self.take(4, what)
        return int.from_bytes(self.data[start : start + 4], "little")

    def u64(self, what: str) -> int:
        start = self.take(8, what)
        return int.from_bytes(self.data[start : start + 8], "little")

    def count(self, what: str, limit: int, each: int) -> int:
        """Read the number of items that take at least `each` bytes each. The file must have room for them."""
        n = self.u64(what)
        if n > limit:
            raise BadFile(f"{self.name}: {what} is {n}, more than {limit}")
        if n * each > self.file_size - self.at:
            raise BadFile(
                f"{self.name}: {what} is {n}, and {self.file_size - self.at} bytes are left: truncated?"
            )
        return n

    def text(self, what: str, limit: int) -> str:
        n = self.count(f"length of {what}", limit, 1)
        start = self.take(n, what)
        try:
            return str(self.data[start : start + n], "utf-8")
        except UnicodeDecodeError:
            raise BadFile(f"{self.name}: {what} is not UTF-8 text") from None


def parse_header(data: bytes | memoryview, file_size: int, name: str) -> Header:
    """Parse the header of a file of `file_size` bytes that begins with `data`. `name` is for messages.

    Raises BadFile or Unsupported, and Short if the header is longer than `data` but may fit in the file.
    """
    c = _Cursor(data, file_size, name)
    powerinfer = _check_magic(c)
    n_tensors = c.count("the number of tensors", MAX_TENSORS, 8 + 4 + 8 + 4 + 8)
    n_keys = c.count("the number of keys", MAX_KEYS, 8 + 4 + 1)
    metadata, alignment = _metadata(c, n_keys)
    infos = _tensor_infos(c, n_tensors)
    data_start = -(-c.at // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for key, shape, kind, offset in infos:
        where = f"{name}: tensor {quoted(key)}"
        if key in tensors:
            raise BadFile(f"{where} occurs twice")
        tensors[key] = _tensor(shape, kind, data_start, offset, alignment, where)
    _check_ranges(tensors, file_size, name)
    return Header(powerinfer, metadata, tensors, c.at)


def _check_magic(c: _Cursor) -> bool:
    """Check the magic and the version. Return True for PowerInfer's magic."""
    magic = bytes(c.data[:4])
    if magic not in (MAGIC, POWERINFER_MAGIC):
        raise BadFile(f"{c.name}: this is {foreign(bytes(c.data[:64])) or 'not a GGUF file'}")
    c.take(4, "the magic")
    version = c.u32("the version")
    if version not in VERSIONS and int.from_bytes(version.to_bytes(4, "big"), "little") in (1, 2, 3):
        raise Unsupported(f"{c.name}: a big-endian GGUF file; convert it with gguf-py's gguf_convert_endian")
    if version == 1:
        raise Unsupported(f"{c.name}: GGUF version 1 of 2023; convert the model again with today's llama.cpp")
    if version not in VERSIONS:
        raise Unsupported(f"{c.name}: GGUF version {version}; this build reads 2 and 3")
    return magic == POWERINFER_MAGIC


def _metadata(c: _Cursor, n_keys: int) -> tuple[dict[str, Value], int]:
    """Read ({key: value}, the alignment of the data)."""
    out: dict[str, Value] = {}
    alignment = DEFAULT_ALIGNMENT
    for _ in range(n_keys):
        key = c.text("a key", MAX_KEY_BYTES)
        where = f"key {quoted(key)}"
        if not key or "\x00" in key:
            raise BadFile(f"{c.name}: {where} is not allowed")
        if key in out:
            raise BadFile(f"{c.name}: {where} occurs twice")
        kind = c.u32(f"the type of {where}")
        out[key] = _value(c, kind, where)
        if key == "general.alignment":
            alignment = out[key]
            power = kind == _U32 and alignment > 0 and alignment & (alignment - 1) == 0
            if not power or alignment > MAX_ALIGNMENT:
                raise BadFile(f"{c.name}: general.alignment is {quoted(out[key])}, not a power of two as u32")
    return out, alignment


def _value(c: _Cursor, kind: int, where: str) -> Value:
    if kind == _STRING:
        return c.text(where, MAX_STRING_BYTES)
    if kind == _ARRAY:
        return _array(c, where)
    if kind not in _SCALARS:
        raise BadFile(f"{c.name}: {where} has the unknown type {kind}")
    return _numbers(c, kind, 1, where)[0].item()


def _array(c: _Cursor, where: str) -> Value:
    kind = c.u32(f"the type of {where}")
    if kind == _ARRAY:
        raise Unsupported(f"{c.name}: {where} is an array of arrays, which no model uses")
    if kind != _STRING and kind not in _SCALARS:
        raise BadFile(f"{c.name}: {where} is an array of the unknown type {kind}")
    each = 8 if kind == _STRING else _SCALARS[kind].itemsize
    n = c.count(f"the length of {where}", MAX_ARRAY, each)
    if kind != _STRING:
        return _numbers(c, kind, n, where)
    return _strings(c, n, where)


def _strings(c: _Cursor, n: int, where: str) -> list[str]:
    """Read n strings. A vocabulary and its merges have 300,000: a loop of its own is five times as fast."""
    out: list[str] = []
    data, at, limit = c.data, c.at, min(len(c.data), c.file_size, MAX_HEADER_BYTES)
    for i in range(n):
        begin = at + 8
        end = begin + _U64.unpack_from(data, at)[0] if begin <= limit else limit + 1
        try:
            if end > limit:
                raise ValueError
            out.append(str(data[begin:end], "utf-8"))
            at = end
        except ValueError:
            c.at = at
            out.append(c.text(f"{where}[{i}]", MAX_STRING_BYTES))  # says what is wrong
            at = c.at
    c.at = at
    return out


def _numbers(c: _Cursor, kind: int, n: int, where: str) -> NDArray[Any]:
    dtype = _SCALARS[kind]
    start = c.take(n * dtype.itemsize, where)
    values = np.frombuffer(c.data, dtype, n, start).copy()
    if kind != _BOOL:
        return values
    if n and int(values.max()) > 1:
        raise BadFile(f"{c.name}: {where} is {int(values.max())}, not true or false")
    return values.astype(np.bool_)


def _tensor_infos(c: _Cursor, n: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """Read (name, shape, type, offset) of each tensor."""
    infos = []
    for i in range(n):
        name = c.text(f"the name of tensor {i}", MAX_NAME_BYTES)
        if not name or "\x00" in name:
            raise BadFile(f"{c.name}: tensor {i} has the name {quoted(name)}, which is not allowed")
        where = f"tensor {quoted(name)}"
        dims = c.u32(f"the dimensions of {where}")
        if not 1 <= dims <= MAX_DIMS:
            raise BadFile(f"{c.name}: {where} has {dims} dimensions, not 1 to {MAX_DIMS}")
        shape = tuple(c.u64(f"the shape of {where}") for _ in range(dims))
        infos.append((name, shape[::-1], c.u32(f"the type of {where}"), c.u64(f"the offset of {where}")))
    return infos


def _tensor(
    shape: tuple[int, ...], kind: int, data_start: int, offset: int, alignment: int, where: str
) -> Tensor:
    if kind not in TYPES:
        raise Unsupported(f"{where} has the type {kind}, which this build does not know")
    type_name, block, block_bytes = TYPES[kind]
    if any(not 1 <= n <= MAX_SIZE for n in shape) or math.prod(shape) > MAX_SIZE:
        raise BadFile(f"{where} has the shape {quoted(shape)}, with a size of 0 or too large")
    if shape[-1] % block:
        raise BadFile(
            f"{where} has {shape[-1]} columns, not a whole number of {type_name}'s blocks of {block}"
        )
    if offset % alignment:
        raise BadFile(f"{where} starts at {offset}, not a multiple of {alignment}")
    start = data_start + offset
    return Tensor(type_name, shape, start, start + math.prod(shape) // block * block_bytes)


def _check_ranges(tensors: Mapping[str, Tensor], file_size: int, name: str) -> None:
    end, last = 0, ""
    for key, t in sorted(tensors.items(), key=lambda item: item[1].start):
        if t.start < end:
            raise BadFile(f"{name}: tensor {quoted(key)} overlaps {quoted(last)}")
        if t.end > file_size:
            raise BadFile(
                f"{name}: tensor {quoted(key)} ends at byte {t.end}, the file at {file_size}: truncated?"
            )
        end, last = t.end, key
