"""Files beside a pack that were made for it: safetensors, stamped with the hash of its pack.json.

One metadata key, `thermocline`, holds canonical JSON: kind, version, pack, and what the kind adds.
Must not know which kinds there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thermocline.errors import BadFile, IOFailure
from thermocline.safetensors import Json, SafeTensors, parse_json, quoted, read_small

VERSION = 1
KEY = "thermocline"
MAX_MANIFEST_BYTES = 4 << 20
_DTYPES = {"<i8": "I64", "<i4": "I32", "<u4": "U32", "|u1": "U8", "|i1": "I8", "<f2": "F16", "<f4": "F32"}

Layout = Mapping[str, tuple[DTypeLike, tuple[int, ...]]]  # name -> dtype, shape


def stamp(directory: Path) -> str:
    """What ties a file to the pack in `directory`: the sha256 of its pack.json."""
    return hashlib.sha256(read_small(directory / "pack.json", MAX_MANIFEST_BYTES)).hexdigest()


def write(path: Path, kind: str, pack: str, facts: Json, layout: Layout, arrays: Iterable[Any]) -> None:
    """Write `arrays`, one for each tensor of `layout` and in its order, as they come."""
    dtypes = {name: np.dtype(dtype).newbyteorder("<") for name, (dtype, _) in layout.items()}
    about = {"kind": kind, "version": VERSION, "pack": pack, **facts}
    header: Json = {"__metadata__": {KEY: json.dumps(about, sort_keys=True, separators=(",", ":"))}}
    at = 0
    for name, (_, shape) in layout.items():
        end = at + dtypes[name].itemsize * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": _DTYPES[dtypes[name].str], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for (name, (_, shape)), array in zip(layout.items(), arrays, strict=True):
            assert array.shape == shape, (name, array.shape, shape)
            out.write(np.ascontiguousarray(array, dtypes[name]).data)
        out.flush()
        os.fsync(out.fileno())


def replace(path: Path, kind: str, pack: str, facts: Json, layout: Layout, arrays: Iterable[Any]) -> None:
    """The same in place of what is at `path`: afterwards that is the old file or the whole new one."""
    tmp = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        write(tmp, kind, pack, facts, layout, arrays)
        os.replace(tmp, path)
    except OSError as e:
        raise IOFailure(f"{path}: cannot write: {e.strerror}") from None
    finally:
        with contextlib.suppress(OSError):  # where it could not be made, it cannot be removed
            tmp.unlink()


@dataclass(frozen=True)
class Sidecar:
    """An opened file of this pack and kind. `read` checks what it gives."""

    path: Path
    facts: Json
    file: SafeTensors

    @staticmethod
    def open(path: Path, kind: str, pack: str, again: str) -> Sidecar | None:
        """None where there is none. `pack`: its stamp; `again`: the command that makes it, for errors."""
        if not os.path.lexists(path):
            return None
        file = SafeTensors(path)
        try:
            return Sidecar(path, _facts(file, kind, pack, again), file)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        self.file.close()

    def read(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> NDArray[Any]:
        """A whole tensor. `shape` None: any number."""
        entry = self.file.tensors.get(name)
        if entry is None:
            raise BadFile(f"{self.path}: tensor {name} is missing")
        fits = len(entry.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, entry.shape, strict=True)
        )
        if entry.dtype != _DTYPES[dtype] or not fits:
            have = f"{entry.dtype} {quoted(entry.shape)}"
            raise BadFile(f"{self.path}: tensor {name} is {have}, not {_DTYPES[dtype]} {shape}")
        return self.file.read_bytes(entry.start, entry.end - entry.start).view(dtype).reshape(entry.shape)


def _facts(file: SafeTensors, kind: str, pack: str, again: str) -> Json:
    text = file.metadata.get(KEY)
    if text is None:
        raise BadFile(f"{file.path}: not a {kind} file of Thermocline's: no metadata {KEY!r}")
    facts = parse_json(text.encode(), f"{file.path}: metadata")
    if facts.get("kind") != kind or facts.get("version") != VERSION:
        have = f"{quoted(facts.get('kind'))} version {quoted(facts.get('version'))}"
        raise BadFile(f"{file.path}: is {have}, not {kind} version {VERSION}; run `{again}` again")
    if facts.get("pack") != pack:
        raise BadFile(f"{file.path}: made for another pack; run `{again}` again")
    return facts
