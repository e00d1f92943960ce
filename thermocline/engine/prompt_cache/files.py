"""The directory of `--prompt-cache-dir`: files of keys, values and states, each named after its text.

It owns the format, the checksums and the limit on the directory's size. It knows no engine and no model.

    DIR/prompt-cache.json          what it is, and the version of its format
    DIR/MODEL/TEXT.PART            MODEL: all that changes bits; TEXT: the tokens up to the end of a block
    DIR/MODEL/.of-FAMILY           empty; FAMILY: MODEL without who computes what (the CPU, a GPU's part)

A file is a header, the CRC-32C of each section and of what precedes, and the sections. It is written beside
its place, synced and renamed, so that there are whole files or none. Equal names have equal bytes, so several
processes may share a directory. There is no index: files are found by name. The time of a file's writing is
the time of its last use, and the one that was not used for the longest time goes first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path

from thermocline import _native
from thermocline.errors import BadFile, IOFailure, UsageError

log = logging.getLogger(__name__)

VERSION = 1
MARKER, MARKER_KEY = "prompt-cache.json", "thermocline_prompt_cache"
_MARKER_BYTES = 4096
_HEADER = struct.Struct("<8sII32s32s8s")  # magic, version, sections, model, text, part
_MAGIC = b"TCPREFIX"
_OURS = re.compile(r"[0-9a-f]{64}\.[ks][0-9]")
_BESIDE = re.compile(r"\.[0-9a-f]{64}\.[ks][0-9]\.[0-9a-f]{16}")
_MODEL = re.compile(r"[0-9a-f]{64}")
_OLD_S = 3600  # a file that is this old and still beside its place was left by a crash
_LOOK_EVERY = 32  # the directory is measured again when a part of its limit this small has been written
_SPARE = 20  # and then a part of this size is made free, so that this is seldom needed


class PromptFiles:
    """The files of one model. Reads and looks may come from any threads, writes from one at a time."""

    def __init__(self, directory: Path, model: bytes, limit_bytes: int) -> None:
        """`model`: 32 bytes that differ where anything differs that changes a bit of keys or values."""
        self.directory, self.limit_bytes = directory, limit_bytes
        self._model, self._own = model, directory / model.hex()
        self._measured: int | None = None  # bytes in the directory when it was last measured
        self._since = 0  # bytes written since then
        self._stuck = set[tuple[bytes, str]]()  # what is to go and stays: it is not looked at again

    @classmethod
    def open(cls, directory: Path, model: bytes, limit_bytes: int, family: bytes = b"") -> PromptFiles | None:
        """Open a directory, or make one. Return None, and log why, for one of another version.

        `family`: equal for models whose bits differ only by who computes what. Where a directory has prompts
        of such ones alone, that is logged: they are computed again.

        Raises UsageError for a directory with other files, and IOFailure.
        """
        found = cls(directory, model, limit_bytes)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            version = _version(directory)
            if version != VERSION:
                log.warning(
                    f"{directory}: a prompt cache of version {version}, and this program's is {VERSION}: it "
                    "is not used; give another directory to keep prompts on disk"
                )
                return None
            found._own.mkdir(mode=0o700, exist_ok=True)
            (probe := found._beside(b"", "k0")).touch()
            probe.unlink()
            if family:
                found._join(f".of-{family.hex()}")
        except OSError as e:
            raise IOFailure(f"{directory}: no prompt cache can be kept there: {e.strerror or e}") from e
        return found

    def _join(self, family: str) -> None:
        (self._own / family).touch()
        if _texts(self._own):
            return
        if any(_texts(mark.parent) for mark in self.directory.glob(f"*/{family}")):
            log.warning(
                f"{self.directory}: its prompts of this model have the bits of another split between CPU and "
                "GPU, or of another card or its libraries; they are computed again"
            )

    def has(self, text: bytes, part: str) -> bool:
        try:
            os.stat(self._path(text, part))
        except OSError:
            return False
        return (text, part) not in self._stuck

    def use(self, text: bytes, part: str, used_ns: int) -> None:
        """Say that a file was used, if there is one."""
        with contextlib.suppress(OSError):
            os.utime(self._path(text, part), ns=(used_ns, used_ns))

    def drop(self, text: bytes, part: str) -> None:
        """Delete a file that was found to be wrong, or look at it no more."""
        try:
            os.unlink(self._path(text, part))
        except FileNotFoundError:
            pass
        except OSError:
            self._stuck.add((text, part))

    # ---- read

    def sections(
        self, text: bytes, part: str, sizes: Sequence[int], buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield a file's sections of these sizes, each checked, in `buffer`, which the next one overwrites.

        Raises BadFile where it is not what was written, and OSError.
        """
        with open(self._path(text, part), "rb", buffering=0) as file:
            sums = self._sums(file, text, part, sizes)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for size, want in zip(sizes, sums, strict=True):
                found = _filled(file, buffer[:size])
                if found is None or _native.crc32c(found) != want:
                    raise BadFile(f"{file.name}: damaged")
                yield found

    def _sums(self, file: FileIO, text: bytes, part: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the checksums of the sections. Raises BadFile unless header and size are as they must be."""
        head = self._head(text, part, len(sizes))
        rest = struct.Struct(f"<{len(sizes) + 1}I")
        start = file.read(len(head) + rest.size)
        if os.fstat(file.fileno()).st_size != len(head) + rest.size + sum(sizes):
            raise BadFile(f"{file.name}: not of the size that it was written with")
        if len(start) < len(head) + rest.size or start[: len(head)] != head:
            raise BadFile(f"{file.name}: not of this text")
        *sums, whole = rest.unpack_from(start, len(head))
        if _native.crc32c(start[:-4]) != whole:
            raise BadFile(f"{file.name}: damaged")
        return tuple(sums)

    # ---- write

    def write(
        self,
        text: bytes,
        part: str,
        sections: Iterable[memoryview],
        sizes: Sequence[int],
        used_ns: int,
        valid: Callable[[], bool],
    ) -> int:
        """Write a file; return its bytes, or 0: there is no space within the limit, or `valid` says no.

        `valid` is asked when all sections were taken. Raises OSError, and leaves nothing then.
        """
        head, rest = self._head(text, part, len(sizes)), struct.Struct(f"<{len(sizes) + 1}I")
        nbytes = len(head) + rest.size + sum(sizes)
        if (text, part) in self._stuck or not self._make_space(nbytes):
            return 0
        beside = self._beside(text, part)
        try:
            with open(beside, "xb", buffering=0) as file:
                file.seek(len(head) + rest.size)
                sums = []
                for section in sections:
                    sums.append(_native.crc32c(section))
                    _write(file, section)
                if not valid():
                    return 0
                whole = _native.crc32c(head + rest.pack(*sums, 0)[:-4])
                file.seek(0)
                _write(file, memoryview(head + rest.pack(*sums, whole)))
                os.fsync(file.fileno())
            os.replace(beside, self._path(text, part))
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
        self.use(text, part, used_ns)  # before, an old time would look like what a crash left
        self._since += nbytes
        return nbytes

    def _make_space(self, nbytes: int) -> bool:
        """Delete what was not used for the longest time, so that a file of `nbytes` fits."""
        if nbytes > self.limit_bytes:
            return False
        due = self._measured is None or self._since * _LOOK_EVERY > self.limit_bytes
        if not due and (self._measured or 0) + self._since + nbytes <= self.limit_bytes:
            return True
        total, files = _measured(self.directory)
        if total + nbytes > self.limit_bytes:
            for _, size, path in sorted(files):
                with contextlib.suppress(OSError):
                    os.unlink(path)
                    total -= size
                if total + nbytes <= self.limit_bytes - self.limit_bytes // _SPARE:
                    break
        self._measured, self._since = total, 0
        return total + nbytes <= self.limit_bytes

    # ---- names

    def _head(self, text: bytes, part: str, sections: int) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, sections, self._model, text, part.encode())

    def _path(self, text: bytes, part: str) -> str:
        return f"{self._own}{os.sep}{text.hex()}.{part}"

    def _beside(self, text: bytes, part: str) -> Path:
        return self._own / f".{text.hex()}.{part}.{secrets.token_hex(8)}"


def _version(directory: Path) -> int | str:
    """Return the version of a directory's format; an empty one becomes one of ours. Raises UsageError."""
    marker = directory / MARKER
    try:
        with open(marker, "rb") as file:
            text = file.read(_MARKER_BYTES)
    except FileNotFoundError:
        if any(not name.startswith(".") for name in os.listdir(directory)):
            raise UsageError(
                f"{directory}: has other files and is no prompt cache; give a new or an empty directory"
            ) from None
        beside = directory / f".{MARKER}.{secrets.token_hex(8)}"
        beside.write_text(json.dumps({MARKER_KEY: VERSION}) + "\n")
        os.replace(beside, marker)
        return VERSION
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return "unknown"
    version = found.get(MARKER_KEY) if isinstance(found, dict) else None
    return version if isinstance(version, int) else "unknown"


def _measured(directory: Path) -> tuple[int, list[tuple[int, int, str]]]:
    """Return (bytes in all, [(time of the last use in ns, bytes, path)]) of the files of all models.

    What a crash left is removed. A file that is being written counts, and is not listed.
    """
    old, total = time.time_ns() - _OLD_S * 10**9, 0
    files: list[tuple[int, int, str]] = []
    for model in _entries(directory):
        if not _MODEL.fullmatch(model.name) or not model.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(model):
            whole, beside = _OURS.fullmatch(entry.name), _BESIDE.fullmatch(entry.name)
            if not (whole or beside):
                continue
            with contextlib.suppress(OSError):  # another process deleted it
                found = entry.stat(follow_symlinks=False)
                if beside and found.st_mtime_ns < old:
                    os.unlink(entry.path)
                    continue
                total += found.st_size
                if whole:
                    files.append((found.st_mtime_ns, found.st_size, entry.path))
    return total, files


def _texts(model: Path) -> bool:
    """Return whether there are files of a model."""
    return any(_OURS.fullmatch(entry.name) for entry in _entries(model))


def _entries(directory: os.PathLike[str] | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []


def _filled(file: FileIO, buffer: memoryview) -> memoryview | None:
    """Read until a buffer is full; None where the file ends before."""
    at = 0
    while at < len(buffer):
        got = file.readinto(buffer[at:])
        if not got:
            return None
        at += got
    return buffer


def _write(file: FileIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]
