"""Read GGUF files, split ones too: metadata, and rows of tensors as they are stored.

The `gguf` package is not used: it maps files (a truncated one then kills the process), trusts counts that
it has not checked, and keeps a numpy array for every string. Data is read with pread here. Failures are
BadFile, IOFailure or Unsupported and name file and field.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile, IOFailure
from thermocline.files.bounded import OpenFile, file_state, quoted, read_at
from thermocline.files.gguf_header import Header, Short, Value, parse_header

U8 = NDArray[np.uint8]

MAX_PARTS = 4096
_FIRST_READ = 16 << 20  # nearly every header: one that continues is parsed again


class GGUFPart(OpenFile):
    """One open GGUF file: a whole model, or a part of a split one. The owner closes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.opened_as = file_state(self.stat())
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> Header:
        step = _FIRST_READ
        while True:
            data = read_at(self._fd, 0, min(step, self.size), self.path).data
            try:
                return parse_header(data, self.size, str(self.path))
            except Short:
                step *= 2


class GGUF:
    """A model's GGUF. `path` may be any part of a split one. Use it in a `with`, or close it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: list[GGUFPart] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.metadata: dict[str, Value] = self.parts[0].header.metadata
        self.powerinfer = self.parts[0].header.powerinfer

    def _open(self) -> None:
        given = GGUFPart(self.path)
        self.parts = [given]
        count = _split(given, "split.count", 1)
        if count > 1:
            given.close()
            self.parts = []
            for path in _part_paths(self.path, count):
                self.parts.append(GGUFPart(path))
            self._check_parts(count)
        self.where = {name: part for part in self.parts for name in part.header.tensors}
        self.tensors = {name: part.header.tensors[name] for name, part in self.where.items()}

    def _check_parts(self, count: int) -> None:
        seen: dict[str, GGUFPart] = {}
        for i, part in enumerate(self.parts):
            no, own = _split(part, "split.no", -1), _split(part, "split.count", 1)
            if (no, own) != (i, count) or part.header.powerinfer != self.parts[0].header.powerinfer:
                raise BadFile(
                    f"{part.path}: says it is part {no + 1} of {own}, and its name part {i + 1} of {count}"
                )
            for name in part.header.tensors:
                if name in seen:
                    raise BadFile(f"{part.path}: tensor {quoted(name)} is in {seen[name].path.name} too")
                seen[name] = part
        total = _split(self.parts[0], "split.tensors.count", len(seen))
        if total != len(seen):
            raise BadFile(f"{self.parts[0].path}: split.tensors.count is {total}, the parts hold {len(seen)}")

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def read_rows(self, name: str, first: int, last: int) -> U8:
        """Read rows [first, last) of a tensor as stored: [last - first, row bytes]."""
        t = self.tensors[name]
        if not 0 <= first <= last <= t.rows:
            raise ValueError(f"rows {first}..{last} of {name} {t.shape}")
        row = (t.end - t.start) // t.rows
        data = self.where[name].read_bytes(t.start + first * row, (last - first) * row)
        return data.reshape(last - first, row)


def _split(part: GGUFPart, key: str, default: int) -> int:
    value = part.header.metadata.get(key, default)
    if type(value) is not int or not (-1 if key == "split.no" else 0) <= value <= 1 << 31:
        raise BadFile(f"{part.path}: {key} is {quoted(value)}, not a number of parts")
    return value


def _part_paths(path: Path, count: int) -> list[Path]:
    m = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name, re.DOTALL)
    if m is None or int(m[3]) != count or count > MAX_PARTS:
        raise BadFile(
            f"{path}: one of {count} parts, which must be named NAME-00001-of-{count:05d}.gguf and so on"
        )
    paths = [path.with_name(f"{m[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    for p in paths:
        if not os.path.lexists(p):
            raise IOFailure(f"{p}: part is missing; all {count} must be in one directory")
    return paths
