"""The key of a model's files, by which the cache finds the pack made of them.

Knows files and bytes; must not know formats, models or packs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

HASH_ALL_BELOW = 256 << 20
SAMPLE_BYTES = 4096
MAX_SAMPLES = 4096
_STEP_BYTES = 4 << 20  # hashed at a time
# Raised where an importer makes something else of the same files: packs of before are not found again.
READING = 2

Span = tuple[int, int]  # the bytes [start, end) of a file


class DataFile(Protocol):
    @property
    def size(self) -> int: ...
    def read_bytes(self, start: int, size: int) -> NDArray[np.uint8]: ...
    def stat(self) -> os.stat_result: ...


@dataclass(frozen=True)
class Shard:
    """One file with tensors, and where in it they are."""

    file: DataFile
    spans: Sequence[Span]

    @property
    def header(self) -> Span:
        """The bytes in front of the first tensor."""
        return 0, min((start for start, _ in self.spans), default=self.file.size)


def sampled(shards: Sequence[Shard]) -> bool:
    """True where the content is too much to hash on every start, so that a change may go unnoticed."""
    return sum(s.file.size for s in shards) > HASH_ALL_BELOW


def add_content(h: Any, shards: Sequence[Shard]) -> None:
    """Update hash `h` with all bytes of the shards; of more than 256 MiB with headers and samples.

    A sample is 4 KiB from the middle of a tensor, of at most 4096 tensors, evenly chosen: under a second for
    100 GB. It tells a retrained or replaced tensor, and no damaged block; `identity` is for those.
    """
    every = -(-sum(len(s.spans) for s in shards) // MAX_SAMPLES)
    for s in shards:
        h.update(f"{s.file.size} {len(s.spans)} ".encode())
        for start, end in _samples(s, every) if sampled(shards) else _steps((0, s.file.size)):
            h.update(s.file.read_bytes(start, end - start).data)


def _samples(shard: Shard, every: int) -> Iterator[Span]:
    yield from _steps(shard.header)
    for start, end in shard.spans[::every]:
        size = min(SAMPLE_BYTES, end - start)
        first = start + (end - start - size) // 2
        yield first, first + size


def _steps(span: Span) -> Iterator[Span]:
    start, end = span
    yield from ((at, min(at + _STEP_BYTES, end)) for at in range(start, end, _STEP_BYTES))


def identity(shards: Sequence[Shard]) -> str | None:
    """8 hex digits that change with a file's size, time of writing or inode; None where all is hashed."""
    if not sampled(shards):
        return None
    stats = [s.file.stat() for s in shards]
    said = " ".join(f"{s.st_size},{s.st_mtime_ns},{s.st_ino}" for s in stats)
    return hashlib.blake2b(said.encode(), digest_size=4).hexdigest()
