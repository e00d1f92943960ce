"""Sidecars: safetensors files beside a pack that belong to it, stamped with the hash of its pack.json.

The metadata key `thermocline` holds canonical JSON: kind, version, pack, and facts of the kind. The key
`crc32c` holds the CRC-32C of each tensor and of the header.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.files.bounded import Json, parse_json, quoted, read_small
from thermocline.files.safetensors import SafeTensors
from thermocline.files.whole import replacing

VERSION = 2  # 1 had no checksums
KEY, SUMS = "thermocline", "crc32c"
DIGITS = 8  # hex digits of a checksum: the header's length is fixed before checksums are known
MAX_MANIFEST_BYTES = 4 << 20
_DTYPES = {
    "<i8": "I64", "<i4": "I32", "<u4": "U32", "<u2": "U16", "|u1": "U8", "|i1": "I8", "<f2": "F16",
    "<f4": "F32",
}  # fmt: skip

TensorShapes = Mapping[str, tuple[DTypeLike, tuple[int, ...]]]  # name -> dtype, shape


def stamp(directory: Path) -> str:
    """Return the stamp that ties a file to the pack in `directory`: the sha256 of its pack.json."""
    return hashlib.sha256(read_small(directory / "pack.json", MAX_MANIFEST_BYTES)).hexdigest()


def write(path: Path, kind: str, pack: str, facts: Json, shapes: TensorShapes, arrays: Iterable[Any]) -> None:
    """Write a sidecar to `path`. `arrays` has one array for each tensor of `shapes`, in that order.

    Arrays are written as they are produced, so that one is in memory at a time. Raises OSError.
    """
    dtypes = {name: np.dtype(dtype).newbyteorder("<") for name, (dtype, _) in shapes.items()}
    about = {"kind": kind, "version": VERSION, "pack": pack, **facts}
    facts_text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    header: Json = {"__metadata__": {KEY: facts_text, SUMS: "0" * DIGITS * (len(shapes) + 1)}}
    at = 0
    for name, (_, shape) in shapes.items():
        end = at + dtypes[name].itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _DTYPES[dtypes[name].str], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head, sums = len(text).to_bytes(8, "little") + text, ""
    with open(path, "wb") as out:
        out.write(head)
        for (name, (_, shape)), array in zip(shapes.items(), arrays, strict=True):
            assert array.shape == shape, (name, array.shape, shape)
            data = np.ascontiguousarray(array, dtypes[name]).reshape(-1).view(np.uint8)
            sums += _hex(_native.crc32c(data))
            out.write(data.data)
        out.seek(0)
        out.write(_signed(head, sums))
        out.flush()
        os.fsync(out.fileno())


def _hex(crc: int) -> str:
    return f"{crc:0{DIGITS}x}"


def _signed(head: bytes, sums: str) -> bytes:
    """Return the header (with its length) with all checksums filled in.

    The header's own checksum is computed with zeros in its place.
    """
    old, zeros = json.dumps("0" * (len(sums) + DIGITS)).encode(), "0" * DIGITS
    blank = head.replace(old, json.dumps(sums + zeros).encode(), 1)
    return head.replace(old, json.dumps(sums + _hex(_native.crc32c(blank))).encode(), 1)


def replace(
    path: Path, kind: str, pack: str, facts: Json, shapes: TensorShapes, arrays: Iterable[Any]
) -> None:
    """Write a sidecar in the place of `path`: afterwards that is the old file or the complete new one.

    Raises IOFailure.
    """
    with replacing(path) as tmp:
        write(tmp, kind, pack, facts, shapes, arrays)


@dataclass(frozen=True)
class Sidecar:
    """An opened sidecar. `read` checks each tensor that it returns."""

    path: Path
    facts: Json
    file: SafeTensors
    sums: dict[str, str]  # checksums by tensor
    again: str | None  # the command that makes the file; None: of several kinds of files, each has its own

    @staticmethod
    def open(path: Path, kind: str | None, pack: str, again: str | None) -> Sidecar | None:
        """Open a sidecar; None if there is no file.

        `kind` None accepts any kind. `pack` is the pack's stamp. `again` is the command that makes the file,
        for messages, where the caller knows it. Raises BadFile or IOFailure.
        """
        if not os.path.lexists(path):
            return None
        file = SafeTensors(path)
        try:
            facts, sums = _facts(file, kind, again), _sums(file, again)
            if facts.get("pack") != pack:
                raise BadFile(f"{path}: made for another pack; {_make(again)}")
            return Sidecar(path, facts, file, sums, again)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        self.file.close()

    def read(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
        """Read a whole tensor. A None in `shape` accepts any size. Raises BadFile or IOFailure."""
        entry = self.file.tensors.get(name)
        if entry is None:
            raise BadFile(f"{self.path}: tensor {name} is missing; {_make(self.again)}")
        fits = len(entry.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, entry.shape, strict=True)
        )
        if entry.dtype != _DTYPES[dtype] or not fits:
            have = f"{entry.dtype} {quoted(entry.shape)}"
            want = f"{_DTYPES[dtype]} {shape}"
            raise BadFile(f"{self.path}: tensor {name} is {have}, not {want}; {_make(self.again)}")
        return self._checked(name).view(dtype).reshape(entry.shape)

    def _checked(self, name: str) -> NDArray[np.uint8]:
        entry = self.file.tensors[name]
        data = self.file.read_bytes(entry.start, entry.end - entry.start)
        if _hex(_native.crc32c(data)) != self.sums[name]:
            raise BadFile(f"{self.path}: checksum mismatch in {name}: damaged; {_make(self.again)}")
        return data

    def problems(self) -> Iterator[str]:
        """Yield one sentence for each damaged tensor."""
        for name in self.file.tensors:
            try:
                self._checked(name)
            except (BadFile, IOFailure) as e:
                yield str(e)


def problems(directory: Path) -> Iterator[str]:
    """Read all bytes of a pack's sidecars and yield one sentence for each problem."""
    pack = stamp(directory)
    for path in sorted(directory.glob("*.safetensors")):
        try:
            found = Sidecar.open(path, None, pack, None)
        except (BadFile, IOFailure) as e:
            yield str(e)
            continue
        if found is not None:
            with contextlib.closing(found):
                yield from found.problems()


def _make(again: str | None) -> str:
    return "make it again" if again is None else f"run `{again}` again"


def _sums(file: SafeTensors, again: str | None) -> dict[str, str]:
    """Return the checksum of each tensor. BadFile if the header's own checksum is wrong."""
    head = file.read_bytes(0, 8)
    head = file.read_bytes(0, 8 + int.from_bytes(head.tobytes(), "little"))
    text, names = file.metadata.get(SUMS, ""), list(file.tensors)
    own = text[len(names) * DIGITS :]
    blank = head.tobytes().replace(f'{own}"'.encode(), b"0" * DIGITS + b'"', 1)
    if len(own) != DIGITS or _hex(_native.crc32c(blank)) != own:
        raise BadFile(f"{file.path}: checksum mismatch in its header: damaged; {_make(again)}")
    return {name: text[i * DIGITS : (i + 1) * DIGITS] for i, name in enumerate(names)}


def _facts(file: SafeTensors, kind: str | None, again: str | None) -> Json:
    text = file.metadata.get(KEY)
    if text is None:
        raise BadFile(f"{file.path}: not a {kind or 'sidecar'} file of Thermocline's: no metadata {KEY!r}")
    facts = parse_json(text.encode(), f"{file.path}: metadata")
    if (kind is not None and facts.get("kind") != kind) or facts.get("version") != VERSION:
        have = f"{quoted(facts.get('kind'))} version {quoted(facts.get('version'))}"
        want = f"version {VERSION}" if kind is None else f"{kind} version {VERSION}"
        raise BadFile(f"{file.path}: is {have}, not {want}; {_make(again)}")
    return facts
