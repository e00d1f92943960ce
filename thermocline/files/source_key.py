"""The key of a model's files, by which the cache finds the pack that was made from them."""

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
# Raise this when an importer makes a different pack of the same files, so that old packs are not found.
READING = 2

Span = tuple[int, int]  # the bytes [start, end) of a file


class DataFile(Protocol):
    @property
    def size(self) -> int: ...
    def read_bytes(self, start: int, size: int) -> NDArray[np.uint8]: ...
    def stat(self) -> os.stat_result: ...


@dataclass(frozen=True)
class Shard:
    """One file of tensors, and the bytes that hold them."""

    file: DataFile
    spans: Sequence[Span]

    @property
    def header(self) -> Span:
        """Return the bytes before the first tensor."""
        return 0, min((start for start, _ in self.spans), default=self.file.size)


def sampled(shards: Sequence[Shard]) -> bool:
    """Return whether the files are too large to hash at every start. A change may then go unnoticed."""
    return sum(s.file.size for s in shards) > HASH_ALL_BELOW


def add_content(h: Any, shards: Sequence[Shard]) -> None:
    """Update hash `h` with all bytes of the shards. Beyond 256 MiB only headers and samples are hashed.

    A sample is 4 KiB from the middle of a tensor. At most 4096 tensors, evenly chosen, are sampled, which
    takes less than a second for 100 GB. Samples show a retrained or replaced tensor, but not a damaged
    block; `identity` is for that.
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


def states(shards: Sequence[Shard]) -> str:
    """Return a text that changes with a file's size, inode, time of writing and time of change.

    The latter cannot be set back: a file that is written anew in its place, with its old time of writing, has
    another. The device is left out, since some file systems get another number at each start.
    """
    stats = [s.file.stat() for s in shards]
    return " ".join(f"{s.st_size},{s.st_ino},{s.st_mtime_ns},{s.st_ctime_ns}" for s in stats)


def identity(shards: Sequence[Shard]) -> str | None:
    """Return 8 hex digits of `states`; None if the content is hashed in full."""
    if not sampled(shards):
        return None
    return hashlib.blake2b(states(shards).encode(), digest_size=4).hexdigest()
