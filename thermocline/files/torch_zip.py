"""Read tensors from `torch.save` files without pickle.

PowerInfer keeps its activation counts and its predictors in such files. Of a pickle's opcodes only those are
understood that describe tensors in a dictionary; nothing is looked up and nothing is called. An archive with
any other content is refused, however harmless it is.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile
from thermocline.files.bounded import OpenFile, open_regular, quoted, read_at
from thermocline.files.safetensors import as_f32

MAX_BYTES = 64 << 20  # of a flat tensor
_MAX_PICKLE = 1 << 20
_MAX_DIRECTORY = 4 << 20
_MAX_TENSORS = 4096
_TYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",  # as_f32 knows it
    "IntStorage": "<i4",
    "LongStorage": "<i8",
}
_FLAT = ("<f4", "<f8", "<f2", "<i4", "<i8")
_MATRICES = ("<f4", "<f2", "<u2")


class _NotUnderstoodError(Exception):
    """Something in a file that is not of the kind that is read here."""


@dataclass(frozen=True)
class TorchTensor:
    """A tensor that fills a storage of the file, row by row: its bytes begin at `start`."""

    dtype: str
    shape: tuple[int, ...]
    start: int = 0


class TorchFile(OpenFile):
    """The tensors of a saved `state_dict`, by name. Use it in a `with`, or close it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            found = _loaded(self._fd, self.size, path)
            if not isinstance(found, dict) or any(t.dtype not in _MATRICES for t in found.values()):
                raise _NotUnderstoodError
            self.tensors: dict[str, TorchTensor] = found
        except _NotUnderstoodError:
            self.close()
            raise BadFile(
                f"{path}: is not a torch file of named matrices, and other pickles are not read"
            ) from None
        except BaseException:
            self.close()
            raise

    def read_stored(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Read rows [first, last) as stored (bf16 as u16)."""
        t = self.tensors[name]
        if not 0 <= first <= last <= t.shape[0]:
            raise ValueError(f"rows {first}..{last} of {name} {t.shape}")
        row = math.prod(t.shape[1:]) * np.dtype(t.dtype).itemsize
        data = read_at(self._fd, t.start + first * row, (last - first) * row, self.path)
        return data.view(t.dtype).reshape(last - first, *t.shape[1:])

    def read_rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        x = as_f32(self.read_stored(name, first, last))
        if not np.isfinite(x).all():
            raise BadFile(f"{self.path}: tensor {quoted(name)} holds a value that is not a finite number")
        return x


def read_flat_tensor(path: Path) -> NDArray[np.float64]:
    """Return the numbers of a 1-D tensor. BadFile if the file holds anything else; IOFailure."""
    fd, size = open_regular(path)
    try:
        if size > MAX_BYTES:
            raise BadFile(f"{path}: {size} bytes, more than the {MAX_BYTES} such a file may have")
        t = _loaded(fd, size, path)
        if not isinstance(t, TorchTensor) or len(t.shape) != 1 or t.dtype not in _FLAT:
            raise _NotUnderstoodError
        nbytes = t.shape[0] * np.dtype(t.dtype).itemsize
        return read_at(fd, t.start, nbytes, path).view(t.dtype).astype(np.float64)
    except _NotUnderstoodError:
        raise BadFile(
            f"{path}: is not a torch file of one flat tensor, and other pickles are not read"
        ) from None
    finally:
        os.close(fd)


# ---- the archive


@dataclass(frozen=True)
class _Member:
    start: int
    size: int


def _loaded(fd: int, size: int, path: Path) -> TorchTensor | dict[str, TorchTensor]:
    """Return an archive's tensor, or its named ones. Raises _NotUnderstoodError, BadFile, IOFailure."""
    members = _members(fd, size, path)
    order = members.get("byteorder")
    if order is not None and (order.size != 6 or _read(fd, order, path) != b"little"):
        raise _NotUnderstoodError
    pickled = members.get("data.pkl")
    if pickled is None or pickled.size > _MAX_PICKLE:
        raise _NotUnderstoodError
    found = _value(_read(fd, pickled, path))
    if isinstance(found, _Tensor):
        return _placed(found, members)
    if not isinstance(found, dict) or len(found) > _MAX_TENSORS:
        raise _NotUnderstoodError
    out = {}
    for name, t in found.items():
        if not isinstance(name, str) or not isinstance(t, _Tensor):
            raise _NotUnderstoodError
        out[name] = _placed(t, members)
    return out


def _read(fd: int, m: _Member, path: Path) -> bytes:
    return read_at(fd, m.start, m.size, path).tobytes()


def _members(fd: int, size: int, path: Path) -> dict[str, _Member]:
    """Return where the members of a zip file are, without their common folder. None is compressed.

    The end of the file says where the directory is, as torch writes it: no comment behind it. Zip64's fields
    are not read: such a file has more than 4 GiB.
    """
    tail = 22
    if size < tail:
        raise _NotUnderstoodError
    end = read_at(fd, size - tail, tail, path).tobytes()
    magic, *_, entries, nbytes, at, comment = struct.unpack("<4sHHHHIIH", end)
    if magic != b"PK\x05\x06" or comment or nbytes > _MAX_DIRECTORY or at + nbytes > size:
        raise _NotUnderstoodError
    directory, here = read_at(fd, at, nbytes, path).tobytes(), 0
    out: dict[str, _Member] = {}
    for _ in range(entries):
        if here + 46 > nbytes or directory[here : here + 4] != b"PK\x01\x02":
            raise _NotUnderstoodError
        (method,) = struct.unpack_from("<H", directory, here + 10)
        packed, length, name_len, extra, note = struct.unpack_from("<IIHHH", directory, here + 20)
        (local,) = struct.unpack_from("<I", directory, here + 42)
        name = directory[here + 46 : here + 46 + name_len].decode("utf-8", "replace").partition("/")[2]
        here += 46 + name_len + extra + note
        if method or packed != length or name in out or here > nbytes or local + 30 > size:
            raise _NotUnderstoodError
        out[name] = _Member(*_begin(fd, local, length, size, path))
    return out


def _begin(fd: int, local: int, length: int, size: int, path: Path) -> tuple[int, int]:
    header = read_at(fd, local, 30, path).tobytes()
    name, extra = struct.unpack_from("<HH", header, 26)
    start = local + 30 + name + extra
    if header[:4] != b"PK\x03\x04" or start + length > size:
        raise _NotUnderstoodError
    return start, length


# ---- the pickle


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _Storage:
    kind: str
    key: str
    numbers: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    shape: tuple[int, ...]


def _placed(t: _Tensor, members: dict[str, _Member]) -> TorchTensor:
    dtype, m = _TYPES.get(t.storage.kind), members.get(f"data/{t.storage.key}")
    if dtype is None or m is None or m.size != t.storage.numbers * np.dtype(dtype).itemsize:
        raise _NotUnderstoodError
    return TorchTensor(dtype, t.shape, m.start)


_MARK = object()
_NO_HOOKS: dict[Any, Any] = {}


def _value(data: bytes) -> Any:
    """Return the value that a pickle of protocol 2 describes, of tensors, dictionaries, texts and numbers."""
    reader = _Pickle(data)
    try:
        return reader.value()
    except (
        IndexError,
        KeyError,
        StopIteration,
        TypeError,
        ValueError,
        struct.error,
    ):  # the stack is not what it needs
        raise _NotUnderstoodError from None


class _Pickle:
    """A reader of a few opcodes (the names in comments are those of Python's `pickletools`)."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def value(self) -> Any:
        if self._take(2) != b"\x80\x02":
            raise _NotUnderstoodError
        while (op := self._take(1)) != b".":
            self._do(op)
        if self._at != len(self._data) or len(self._stack) != 1:
            raise _NotUnderstoodError
        return self._stack[0]

    def _take(self, n: int) -> bytes:
        if not 0 <= n <= len(self._data) - self._at:
            raise _NotUnderstoodError
        self._at += n
        return self._data[self._at - n : self._at]

    def _number(self, n: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._take(n), "little", signed=signed)

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode("ascii")

    def _above_mark(self) -> list[Any]:
        at = next(i for i in reversed(range(len(self._stack))) if self._stack[i] is _MARK)
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _do(self, op: bytes) -> None:
        push, pop = self._stack.append, self._stack.pop
        match op:
            case b"(":  # MARK
                push(_MARK)
            case b"}":  # EMPTY_DICT
                push({})
            case b")":  # EMPTY_TUPLE
                push(())
            case b"K":  # BININT1
                push(self._number(1))
            case b"M":  # BININT2
                push(self._number(2))
            case b"J":  # BININT
                push(self._number(4, signed=True))
            case b"\x8a":  # LONG1
                push(self._number(self._number(1), signed=True))
            case b"X":  # BINUNICODE
                push(self._take(self._number(4)).decode())
            case b"\x88" | b"\x89":  # NEWTRUE, NEWFALSE
                push(op == b"\x88")
            case b"\x85" | b"\x86" | b"\x87":  # TUPLE1 to TUPLE3
                last = [pop() for _ in range(op[0] - 0x84)]
                push(tuple(reversed(last)))
            case b"t":  # TUPLE
                push(tuple(self._above_mark()))
            case b"c":  # GLOBAL
                push(_Global(f"{self._line()}.{self._line()}"))
            case b"q":  # BINPUT
                self._memo[self._number(1)] = self._stack[-1]
            case b"r":  # LONG_BINPUT
                self._memo[self._number(4)] = self._stack[-1]
            case b"h":  # BINGET
                push(self._memo[self._number(1)])
            case b"j":  # LONG_BINGET
                push(self._memo[self._number(4)])
            case b"Q":  # BINPERSID
                push(_storage(pop()))
            case b"R":  # REDUCE: one of two functions, which are not called
                arguments, function = pop(), pop()
                push(_made(function, arguments))
            case b"s" | b"u":  # SETITEM, SETITEMS
                items = [pop(), pop()][::-1] if op == b"s" else self._above_mark()
                _set(self._stack[-1], items)
            case b"b":  # BUILD: a state_dict's `_metadata`, versions of modules
                if not isinstance(pop(), dict) or not isinstance(self._stack[-1], dict):
                    raise _NotUnderstoodError
            case _:
                raise _NotUnderstoodError


def _set(to: Any, items: list[Any]) -> None:
    if not isinstance(to, dict) or len(items) % 2:
        raise _NotUnderstoodError
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str) or key in to:
            raise _NotUnderstoodError
        to[key] = value


def _storage(about: Any) -> _Storage:
    word, kind, key, where, numbers = about
    on_device = isinstance(where, str) and where.partition(":")[0] in ("cpu", "cuda")
    if word != "storage" or not isinstance(kind, _Global) or not isinstance(key, str) or not on_device:
        raise _NotUnderstoodError
    module, _, name = kind.name.rpartition(".")
    if module != "torch" or type(numbers) is not int or numbers < 0:
        raise _NotUnderstoodError
    return _Storage(name, key, numbers)


def _made(function: Any, arguments: Any) -> Any:
    if function == _Global("collections.OrderedDict") and arguments == ():
        return {}
    if function != _Global("torch._utils._rebuild_tensor_v2"):
        raise _NotUnderstoodError
    storage, offset, shape, stride, grad, hooks = arguments
    if not isinstance(storage, _Storage) or offset != 0 or grad is not False or hooks != _NO_HOOKS:
        raise _NotUnderstoodError
    if any(type(n) is not int or n < 1 for n in shape) or storage.numbers != math.prod(shape):
        raise _NotUnderstoodError
    rows_first = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if not 1 <= len(shape) <= 2 or stride != rows_first:
        raise _NotUnderstoodError
    return _Tensor(storage, shape)
