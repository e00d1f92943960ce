"""The small files of a model by name: a directory's, or held in memory where one GGUF has what they say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thermocline.errors import BadFile
from thermocline.files.bounded import read_small


class SmallFiles(Protocol):
    @property
    def origin(self) -> Path:
        """The directory or the file that they belong to."""

    def has(self, name: str) -> bool: ...

    def read(self, name: str, limit: int) -> bytes:
        """Return a file's bytes, at most `limit`. Raises BadFile or IOFailure."""

    def label(self, name: str) -> str:
        """Return what messages call the file."""


@dataclass(frozen=True)
class FilesOfDirectory:
    origin: Path

    def has(self, name: str) -> bool:
        return os.path.exists(self.origin / name)

    def read(self, name: str, limit: int) -> bytes:
        return read_small(self.origin / name, limit)

    def label(self, name: str) -> str:
        return str(self.origin / name)


@dataclass(frozen=True)
class HeldFiles:
    """Files that are on no disk. Another process can be sent them."""

    origin: Path
    contents: Mapping[str, bytes]

    def has(self, name: str) -> bool:
        return name in self.contents

    def read(self, name: str, limit: int) -> bytes:
        data = self.contents[name]
        if len(data) > limit:
            raise BadFile(
                f"{self.label(name)}: {len(data)} bytes, more than the {limit} such a file may have"
            )
        return data

    def label(self, name: str) -> str:
        return f"{self.origin}: its {name}"


def small_files(of: SmallFiles | Path | str) -> SmallFiles:
    """Return the small files of a directory, if `of` is its path."""
    return FilesOfDirectory(Path(of)) if isinstance(of, str | Path) else of
