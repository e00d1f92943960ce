"""Bounded reading of untrusted files: regular files, small JSON, and their text in messages."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
import threading
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile, IOFailure

Json = dict[str, Any]
FileState = tuple[int, int, int, int]  # device, inode, bytes, time of writing in ns
_CONVERT = (
    'convert it once, where you trust it: python -c "import torch; from safetensors.torch import save_file; '
    "save_file({k: v.contiguous().clone() for k, v in torch.load('FILE', weights_only=True).items()}, "
    "'model.safetensors')\""
)
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs",
        "a git-lfs pointer, not the file itself: run `git lfs pull` where it came from",
    ),
    (b"<!doctype", "an HTML page, probably an error page saved by a download"),
    (b"<html", "an HTML page, probably an error page saved by a download"),
    (b"<?xml", "an XML document, probably an error page saved by a download"),
    (b"pk\x03\x04", "a zip archive or a PyTorch pickle file; only safetensors are read: " + _CONVERT),
    (b"pk\x05\x06", "an empty zip archive"),
    (b"\x80\x02", "a Python pickle, which can run code when opened; only safetensors are read: " + _CONVERT),
    (b"\x80\x03", "a Python pickle, which can run code when opened; only safetensors are read: " + _CONVERT),
    (b"\x80\x04", "a Python pickle, which can run code when opened; only safetensors are read: " + _CONVERT),
    (b"\x80\x05", "a Python pickle, which can run code when opened; only safetensors are read: " + _CONVERT),
    (b"gguf", "a GGUF file, where safetensors are expected: give it by its own path"),
    (b"\x89hdf", "an HDF5 file (Keras or TensorFlow weights)"),
    (b"%pdf", "a PDF"),
    (b"\x1f\x8b", "gzip-compressed: unpack it first"),
    (b"lmgg", "an old llama.cpp (GGML) file"),
    (b"tjgg", "an old llama.cpp (GGJT) file"),
    (b"fmgg", "an old llama.cpp (GGMF) file"),
)


def foreign(head: bytes) -> str | None:
    """Name the kind of a file that begins with `head`, if it is one of the usual mistakes; else None."""
    if not head:
        return "an empty file"
    text = head[:64].lstrip().lower()
    return next((what for magic, what in _FOREIGN if text.startswith(magic)), None)


def quoted(text: object) -> str:
    """Return text from a file in a form that is safe in a one-line message."""
    try:
        shown = ascii(text)
    except RecursionError:
        shown = "a deeply nested value"
    if not isinstance(text, str):  # arrays print on several lines
        shown = " ".join(shown.split())
    return shown if len(shown) <= 80 else shown[:76] + "...'"


_FLAGS = ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY", "O_NOINHERIT")  # the last two are for Windows
_SEEKING = threading.Lock()
_READ_ONLY = os.O_RDONLY | sum(getattr(os, name, 0) for name in _FLAGS)


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file: (file descriptor, size). Raises BadFile or IOFailure.

    Devices, FIFOs and directories are never opened, and opening never waits.
    """
    try:
        _require_regular(os.stat(path), path)
        fd = os.open(path, _READ_ONLY)
    except FileNotFoundError:
        raise IOFailure(f"{path}: no such file") from None
    except (OSError, ValueError) as e:
        raise IOFailure(f"{path}: cannot open: {getattr(e, 'strerror', None) or e}") from None
    try:
        info = os.fstat(fd)  # checked again: the file may have been replaced in between
        _require_regular(info, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, info.st_size


class OpenFile:
    """One open file. Use it in a `with`, or close it; the last reference closes it, too."""

    _fd = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd, self.size = open_regular(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    __del__ = close

    def stat(self) -> os.stat_result:
        return os.fstat(self._fd)

    def read_bytes(self, start: int, size: int) -> NDArray[np.uint8]:
        """Read raw bytes of the file."""
        return read_at(self._fd, start, size, self.path)


def file_state(s: os.stat_result) -> FileState:
    """Return the state of a file as native code compares it."""
    if sys.platform == "win32":
        return 0, 0, s.st_size, s.st_mtime_ns // 10**9 * 10**9
    return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns


def _require_regular(info: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(info.st_mode):
        kind = "a directory" if stat.S_ISDIR(info.st_mode) else "a device, pipe or socket"
        raise BadFile(f"{path}: is {kind}, not a file")


def read_at(fd: int, offset: int, size: int, path: Path) -> NDArray[np.uint8]:
    """Read exactly `size` bytes from `offset`. BadFile if the file ends first; IOFailure on a read error."""
    out = np.empty(size, np.uint8)
    view, done = out.data, 0
    while done < size:
        try:
            n = _read_some(fd, view[done : done + (1 << 30)], offset + done)
        except OSError as e:
            raise IOFailure(f"{path}: read error at byte {offset + done}: {e.strerror}") from None
        if n == 0:
            raise BadFile(f"{path}: ends at byte {offset + done}, {size - done} bytes too early")
        done += n
    return out


def _read_some(fd: int, to: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [to], offset)
    with _SEEKING:  # Windows has no preadv, and threads may share the descriptor's position
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(to))
    to[: len(data)] = data
    return len(data)


def read_small(path: Path, limit: int) -> bytes:
    """Read a whole regular file of at most `limit` bytes. Raises BadFile or IOFailure."""
    fd, size = open_regular(path)
    try:
        if size > limit:
            raise BadFile(f"{path}: {size} bytes, more than the {limit} such a file may have")
        return read_at(fd, 0, size, path).tobytes()
    finally:
        os.close(fd)


_NON_ASCII, _NON_BMP = re.compile(rb"[\x80-\xff]"), re.compile(rb"[\xf0-\xff]")


def parse_json(data: bytes, name: str, constants: list[str] | None = None) -> Json:
    """Parse an untrusted JSON object. `name` is the file, for messages.

    Raises BadFile for duplicate keys, NaN, 1e400, or so many values that memory would not be bounded. If
    `constants` is given, the names of NaN, Infinity and -Infinity are added to it instead of an error.
    """

    def constant(text: str) -> float:
        if constants is None:
            raise ValueError(f"{text} is not JSON")
        constants.append(text)
        return float(text)

    # An upper bound of json.loads' memory by objects, lists, items and bytes (a character takes 1, 2 or 4).
    width = 4 if _NON_BMP.search(data) else 2 if _NON_ASCII.search(data) else 1
    keeps = 300 * data.count(b"{") + 90 * data.count(b"[") + 260 * data.count(b",") + (1 + width) * len(data)
    if keeps > 4 * len(data) + (15 << 20):
        raise BadFile(f"{name}: too many values to be what it claims")
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as e:  # ValueError covers JSON, UTF-8 and over-long integers
        what = foreign(data) or (
            "nested too deeply" if isinstance(e, RecursionError) else f"not valid JSON ({e})"
        )
        raise BadFile(f"{name}: {what}") from None
    if not isinstance(value, dict):
        raise BadFile(f"{name}: not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"key {quoted(next(k for k in out if names.count(k) > 1))} occurs twice")
    return out


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is out of range")
    return value
