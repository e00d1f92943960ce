"""Copies in RAM of what a GPU has computed, beside its own memory: they answer as the files on disk do.

On the CPU `--prompt-cache` is more blocks (`memory.KeptText`), found where they are. A GPU's blocks are in
its memory, which running requests need, so here their bytes are kept instead, within the same limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from thermocline.ops.interface import U8

_SPARE = 20  # a part of the limit this small is made free at a time, so that this is seldom needed


@dataclass
class _Copy:
    bytes: U8
    used_ns: int


class PromptCopies:
    """Stands beside `PromptFiles`. Reads and looks may come from any threads, writes from one at a time.

    A copy is never changed, so whoever reads one may go on while it is given up.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.nbytes = limit_bytes, 0
        self._copies: dict[tuple[bytes, str], _Copy] = {}

    def has(self, text: bytes, part: str) -> bool:
        return (text, part) in self._copies

    def use(self, text: bytes, part: str, used_ns: int) -> None:
        """Say that a copy was used, if there is one."""
        if (found := self._copies.get((text, part))) is not None:
            found.used_ns = used_ns

    def sections(
        self, text: bytes, part: str, sizes: Sequence[int], buffer: memoryview
    ) -> Iterator[memoryview]:
        """Yield a copy's sections of these sizes; `buffer` is not needed. Raises FileNotFoundError."""
        found = self._copies.get((text, part))
        if found is None:
            raise FileNotFoundError
        at = 0
        for size in sizes:
            yield found.bytes[at : at + size].data
            at += size

    def write(
        self,
        text: bytes,
        part: str,
        sections: Iterable[memoryview],
        sizes: Sequence[int],
        used_ns: int,
        valid: Callable[[], bool],
    ) -> int:
        """Keep a copy; return its bytes, or 0: there is no space within the limit, or `valid` says no.

        `valid` is asked when all sections were taken.
        """
        nbytes = sum(sizes)
        if not self._make_space(nbytes):
            return 0
        made, at = np.empty(nbytes, np.uint8), 0
        for section in sections:
            made[at : at + len(section)] = section
            at += len(section)
        if not valid():
            return 0
        self._copies[text, part] = _Copy(made, used_ns)
        self.nbytes += nbytes
        return nbytes

    def _make_space(self, nbytes: int) -> bool:
        """Give up what was not used for the longest time, so that a copy of `nbytes` fits."""
        if nbytes > self.limit_bytes:
            return False
        if self.nbytes + nbytes > self.limit_bytes:
            for key, copy in sorted(self._copies.items(), key=lambda item: item[1].used_ns):
                del self._copies[key]
                self.nbytes -= len(copy.bytes)
                if self.nbytes + nbytes <= self.limit_bytes - self.limit_bytes // _SPARE:
                    break
        return self.nbytes + nbytes <= self.limit_bytes
