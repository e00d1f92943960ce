"""Read untrusted safetensors files and sharded checkpoints.

The `safetensors` library is not used: it maps files (a truncated one then kills the process), accepts
duplicate names, and returns whole tensors where packing needs blocks of rows. Here every size is checked
before memory is allocated, parsing takes at most 4 x metadata + 16 MiB, and data is read with pread.
Failures are BadFile, IOFailure or Unsupported and name file and field.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile, IOFailure, Unsupported
from thermocline.files.bounded import (
    _CONVERT,
    Json,
    OpenFile,
    foreign,
    parse_json,
    quoted,
    read_at,
    read_small,
)

F32 = NDArray[np.float32]

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 65_536  # per file; one parsed entry costs about 350 bytes
MAX_ENTRY_BYTES = 1 << 20  # of header text for one tensor, or for __metadata__
MAX_NAME_BYTES = 4096
MAX_DIMS = 8
MAX_SIZE = 1 << 48  # bytes of one tensor, elements of one dimension
MAX_INDEX_BYTES = 32 << 20
MAX_SHARDS = 4096

# Bits per element of every dtype in the format, so that any valid header can be described.
DTYPE_BITS = {
    **{
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
    },
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32},
    **{"I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
_NUMPY: dict[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # the dtypes that can be loaded
# --- one safetensors file ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its dtype, its shape, and the bytes [start, end) of the file that hold it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


_STRING = rb'"((?:[^"\\\x00-\x1f]++|\\.)*+)"'
_NAME = re.compile(rb"\s*+" + _STRING + rb"\s*+:\s*+", re.DOTALL)
_FLAT = re.compile(rb"\{(?:[^{}\"]++|" + _STRING + rb")*+\}", re.DOTALL)  # an object without objects in it
_EMPTY = re.compile(rb"\{\s*+\}")
_NEXT = re.compile(rb"\s*+([,}])")


def header_size(first: bytes, file_size: int, name: str) -> int:
    """Return the bytes of JSON that follow the 8-byte length, from the first bytes of a file."""
    n = int.from_bytes(first[:8], "little")
    ours = first[8:9] == b"{" and n <= MAX_HEADER_BYTES  # 896 is 80 03, as a pickle begins
    what = None if ours else foreign(first)
    if what is not None:
        raise BadFile(f"{name}: this is {what}")
    if file_size < 8 or len(first) < 8:
        raise BadFile(f"{name}: {file_size} bytes is too short for a safetensors file")
    if n > MAX_HEADER_BYTES:
        raise BadFile(
            f"{name}: claims a header of {n} bytes (at most {MAX_HEADER_BYTES}); not a safetensors file?"
        )
    if n < 2 or n > file_size - 8:
        raise BadFile(f"{name}: claims a header of {n} bytes in a file of {file_size}; truncated?")
    return n


def parse_header(
    header: bytes, file_size: int, name: str, metadata: dict[str, str] | None = None
) -> dict[str, Entry]:
    """Parse the JSON of a header into its tensors. `file_size` is that of the whole file.

    The header's metadata is added to `metadata`. The tensors must cover the data exactly: no hole, no
    overlap, no bytes after the last one. Raises BadFile.
    """
    data_start = 8 + len(header)
    entries: dict[str, Entry] = {}
    for key, body in _objects(header, name):
        if key == "__metadata__":
            found = parse_json(body, f"{name}: __metadata__")
            _check_metadata(found, name)
            if metadata is not None:
                metadata.update(found)
            continue
        if len(entries) == MAX_TENSORS:
            raise BadFile(f"{name}: more than {MAX_TENSORS} tensors in one file")
        where = f"{name}: tensor {quoted(key)}"
        if b"-" in body:  # -0 would read as 0
            raise BadFile(f"{where}: negative size")
        entries[key] = _entry(parse_json(body, where), data_start, where)
    _check_cover(entries, data_start, file_size, name)
    return entries


def _objects(text: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the (key, object) pairs of a JSON object whose values are flat objects. Keys must be unique."""
    pos, seen = 1, set[str]()
    if text[:1] != b"{":
        raise BadFile(f"{name}: header does not start with '{{'")
    empty = _EMPTY.match(text)
    if empty:
        _check_padding(text, empty.end(), name)
        return
    while True:
        m = _NAME.match(text, pos, pos + MAX_NAME_BYTES)
        body = _FLAT.match(text, m.end(), m.end() + MAX_ENTRY_BYTES) if m else None
        after = _NEXT.match(text, body.end()) if body else None
        if m is None or body is None or after is None:
            raise BadFile(f"{name}: header is not valid at byte {8 + pos}")
        key = _key(m[1], name)
        if key in seen:
            raise BadFile(f"{name}: tensor {quoted(key)} occurs twice")
        seen.add(key)
        yield key, body[0]
        pos = after.end()
        if after[1] == b"}":
            break
    _check_padding(text, pos, name)


def _check_padding(text: bytes, pos: int, name: str) -> None:
    if text[pos:].strip(b" "):
        raise BadFile(f"{name}: header goes on after its end, at byte {8 + pos}")


def _key(raw: bytes, name: str) -> str:
    try:
        key = json.loads(b'"' + raw + b'"')
        key.encode()  # a lone surrogate is no name
    except ValueError:
        raise BadFile(f"{name}: tensor name {quoted(raw)} is not valid text") from None
    if not isinstance(key, str) or not key or "\x00" in key:
        raise BadFile(f"{name}: tensor name {quoted(raw)} is not allowed")
    return key


def _check_metadata(value: Json, name: str) -> None:
    for k, v in value.items():
        if not isinstance(v, str):
            raise BadFile(f"{name}: __metadata__ {quoted(k)} is not a string")


def _entry(value: Json, data_start: int, where: str) -> Entry:
    if value.keys() != {"dtype", "shape", "data_offsets"}:
        raise BadFile(f"{where}: fields are {quoted(sorted(value))}, not dtype, shape, data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadFile(f"{where}: unknown dtype {quoted(dtype)}")
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        raise BadFile(f"{where}: shape {quoted(shape)} is not a list of at most {MAX_DIMS} sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadFile(f"{where}: data_offsets {quoted(offsets)} are not [start, end]")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise BadFile(
            f"{where}: shape {quoted(shape)} of {dtype} needs {bits / 8:g} bytes, "
            f"data_offsets give {offsets[1] - offsets[0]}"
        )
    return Entry(_INTERNED[dtype], tuple(shape), data_start + offsets[0], data_start + offsets[1])


_INTERNED = {name: name for name in DTYPE_BITS}


def _sizes(value: object) -> bool:
    """Return whether `value` is a list of integers from 0 to MAX_SIZE. True is not an integer here."""
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_SIZE for v in value)


def _check_cover(entries: dict[str, Entry], data_start: int, file_size: int, name: str) -> None:
    end = data_start
    for key in sorted(entries, key=lambda k: (entries[k].start, entries[k].end)):
        e = entries[key]
        if e.start != end:
            kind = "overlaps the one before" if e.start < end else f"leaves a hole of {e.start - end} bytes"
            raise BadFile(f"{name}: tensor {quoted(key)} {kind}")
        end = e.end
    if end != file_size:
        kind = "truncated" if end > file_size else "has bytes after the last tensor"
        raise BadFile(f"{name}: {kind}: tensors end at byte {end}, the file at {file_size}")


class SafeTensors(OpenFile):
    """One open safetensors file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            name = str(path)
            first = read_at(self._fd, 0, min(64, self.size), path).tobytes()
            n = header_size(first, self.size, name)
            header = read_at(self._fd, 8, n, path).tobytes()
            self.metadata: dict[str, str] = {}
            self.tensors = parse_header(header, self.size, name, self.metadata)
        except BaseException:
            self.close()
            raise

    def read_stored(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Read rows [first, last) as stored (bf16 as u16): [last - first, ...].

        They are along the first axis; of a stack of matrices they are counted through all of these.
        """
        e = self.tensors[name]
        if e.dtype not in _NUMPY:
            raise Unsupported(
                f"{self.path}: tensor {quoted(name)} is {e.dtype}; {', '.join(_NUMPY)} can be loaded"
            )
        shape = (e.shape[0] * e.shape[1], e.shape[2]) if len(e.shape) == 3 else e.shape
        if not shape or not 0 <= first <= last <= shape[0]:
            raise ValueError(f"rows {first}..{last} of {name} {e.shape}")
        row = (e.end - e.start) // max(1, shape[0])
        data = self.read_bytes(e.start + first * row, (last - first) * row)
        return data.view(_NUMPY[e.dtype]).reshape(last - first, *shape[1:])

    def read_rows(self, name: str, first: int, last: int) -> F32:
        """Read rows [first, last) as f32: [last - first, ...]."""
        return as_f32(self.read_stored(name, first, last))


def as_f32(stored: NDArray[Any]) -> F32:
    """Convert the result of `read_stored` to f32 (u16 is bf16)."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)


# --- a checkpoint: one file, or shards with an index -------------------------------------------------------

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """All tensors of a model directory, by name. Use it in a `with`, or close it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shards: list[SafeTensors] = []
        try:
            self.where = self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> dict[str, SafeTensors]:
        single = self.directory / SINGLE  # transformers looks for it first, too
        if os.path.lexists(single):
            shard = SafeTensors(single)
            self.shards.append(shard)
            return dict.fromkeys(shard.tensors, shard)
        if not os.path.lexists(self.directory / INDEX):
            raise no_weights(self.directory)
        return self._open_shards()

    def _open_shards(self) -> dict[str, SafeTensors]:
        index = self.directory / INDEX
        weight_map = parse_index(read_small(index, MAX_INDEX_BYTES), str(index))
        opened: dict[str, SafeTensors] = {}
        for file in dict.fromkeys(weight_map.values()):
            opened[file] = SafeTensors(_shard_path(self.directory, file))
            self.shards.append(opened[file])
        for file, shard in opened.items():
            for name in shard.tensors:
                if weight_map.get(name) != file:
                    raise BadFile(
                        f"{shard.path}: tensor {quoted(name)} is not what {INDEX} says of this shard"
                    )
        for name, file in weight_map.items():
            if name not in opened[file].tensors:
                raise BadFile(f"{index}: tensor {quoted(name)} is not in {file}")
        return {name: opened[file] for name, file in weight_map.items()}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    @property
    def tensors(self) -> Mapping[str, Entry]:
        return {name: shard.tensors[name] for name, shard in self.where.items()}


def parse_index(data: bytes, name: str) -> dict[str, str]:
    """Parse a model.safetensors.index.json: {tensor: shard file name}. Raises BadFile."""
    value = parse_json(data, name)
    unknown = value.keys() - {"metadata", "weight_map"}
    if unknown:
        raise BadFile(f"{name}: unknown key {quoted(min(unknown))}")
    weight_map = value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadFile(f"{name}: no weight_map")
    shards: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise BadFile(f"{name}: weight_map {quoted(tensor)} is not a file name")
        if file not in shards:
            _check_shard_name(file, name)
            shards[file] = file
        weight_map[tensor] = shards[file]
    if len(shards) > MAX_SHARDS:
        raise BadFile(f"{name}: {len(shards)} shards, more than {MAX_SHARDS}")
    return weight_map


def _check_shard_name(file: str, name: str) -> None:
    plain = (
        file not in ("", ".", "..")
        and len(file) <= 255
        and file.isprintable()
        and not set(file) & set("/\\:")
    )
    if not plain:
        raise BadFile(f"{name}: shard name {quoted(file)} is not a plain file name")
    if not file.endswith(".safetensors"):
        raise BadFile(f"{name}: shard {quoted(file)} is not a .safetensors file")


def _shard_path(directory: Path, file: str) -> Path:
    """Return the shard's path. A link may lead only to the model's directory or its Hugging Face cache."""
    path = directory / file
    if not os.path.lexists(path):
        raise IOFailure(f"{path}: shard is missing; download the model again")
    home, target = Path(os.path.realpath(directory)), Path(os.path.realpath(path))
    hub_cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if target.parent not in (home, hub_cache):
        raise BadFile(f"{path}: shard is a link out of the model's directory; put the file itself there")
    return path


def no_weights(directory: Path) -> Exception:
    """Return the error for a directory without safetensors, which says how to convert pickles."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as e:
        return IOFailure(f"{directory}: cannot list: {e.strerror}")
    pickles = [n for n in names if n.endswith(_PICKLES)]
    if pickles:
        return Unsupported(
            f"{directory}: the weights are pickles ({quoted(pickles[0])}), which can run code when opened; "
            + _CONVERT.replace("FILE", pickles[0] if pickles[0].isprintable() else "FILE")
        )
    if any(n.endswith(".gguf") for n in names):
        return BadFile(f"{directory}: holds GGUF files: give the path of one of them")
    return BadFile(f"{directory}: no {SINGLE} or {INDEX}")
