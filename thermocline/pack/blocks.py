"""Blocks of weights.bin, the units of its checksums: which of them a load reads, and how they are checked."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile, IOFailure, OutOfBudget, ThermoclineError
from thermocline.model.sizes import lookup_bytes
from thermocline.pack.stored_model import Progress, Run, StoredModel

if TYPE_CHECKING:
    from thermocline.pack.pack import Pack
    from thermocline.pack.predictor import Predictors

NOTHING = -1


def new_arena(size: int, what: str) -> _native.Arena:
    """Allocate `size` bytes for `what`. Raises OutOfBudget."""
    try:
        return _native.Arena(size)
    except MemoryError:
        raise OutOfBudget(f"the system has no {size / 2**30:.1f} GiB of memory for {what}") from None


def memory_bytes(
    model: StoredModel, predictors: Predictors | None = None, tables: Collection[str] = ()
) -> int:
    """Return the bytes that a load keeps in memory. `tables`: tensors of which it reads rows from disk."""
    weights = sum(end - begin for begin, end in model.ranges(tables))
    weights += sum(lookup_bytes(model.tensors[name].stride) for name in tables)
    return weights + (0 if predictors is None else predictors.nbytes)


def block_ranges(pack: Pack, without: Collection[str] = ()) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) of weights.bin that a load reads, in whole blocks.

    Blocks that hold only predictors or tensors `without` are left out.
    """
    block, out = pack.block_bytes, list[tuple[int, int]]()
    held = (t for n, t in pack.tensors.items() if ".predictor." not in n and n not in without)
    wanted = ((t.offset, t.offset + t.bytes) for t in held)
    for begin, end in sorted(wanted):
        begin, end = begin // block * block, min(pack.weights_bytes, -(-end // block) * block)
        if out and begin <= out[-1][1]:
            begin = out.pop()[0]
        out.append((begin, end))
    return out


class BlockReading:
    """Whole blocks of a pack's weights.bin on their way into an arena."""

    grouped: frozenset[str] = frozenset()  # they are checked as they are

    def __init__(self, pack: Pack, arena: _native.Arena, runs: Sequence[Run]) -> None:
        self._pack, self._size = pack, sum(end - begin for begin, end, _ in runs)
        self._loading = _native.begin_blocks(
            arena, str(pack.weights_path), list(runs), pack.checksums, pack.block_bytes
        )

    def finish(self, progress: Progress | None = None) -> None:
        error, block = self._loading.wait(bytes_of(progress, self._size))
        if block >= 0:
            raise block_error(self._pack, error, block)


class BlockRows:
    """The rows of a tensor of a pack, a `RowSource`. Owns one block of weights.bin.

    Read like neurons, past the page cache; in whole blocks, so that their checksums are the pack's.
    """

    def __init__(self, pack: Pack, name: str) -> None:
        self._pack, self._tensor = pack, pack.tensors[name]
        try:
            self._reader = _native.Reader(str(pack.weights_path), depth=1, buffer_bytes=pack.block_bytes)
        except OSError as e:
            raise IOFailure(f"{pack.weights_path}: cannot open: {e.strerror or e}") from None
        self._buffer = self._reader.buffer(0)
        self._row = np.empty(self._tensor.stride, np.uint8)
        self._held = NOTHING  # the block that is in it

    def read(self, i: int) -> NDArray[np.uint8]:
        """Return row i. A block that two rows share, one after the other, is read once."""
        size, begin = self._pack.block_bytes, self._tensor.offset + i * self._tensor.stride
        end = begin + self._tensor.stride
        for block in range(begin // size, -(-end // size)):
            self._hold(block)
            first, last = max(begin, block * size), min(end, (block + 1) * size)
            part = self._buffer[first - block * size : last - block * size]
            self._row[first - begin : last - begin] = part
        return self._row

    def _hold(self, block: int) -> None:
        if block == self._held:
            return
        begin = block * self._pack.block_bytes
        nbytes = min(self._pack.block_bytes, self._pack.weights_bytes - begin)
        self._held = NOTHING
        while not self._reader.submit([(begin, nbytes, 0, block)]):
            self._reader.take(True)  # what a Ctrl-C left on its way
        while not (done := self._reader.take(True)):
            pass
        error = done[0][1]
        if error or _native.crc32c(self._buffer[:nbytes]) != self._pack.checksums[block]:
            raise block_error(self._pack, error, block)
        self._held = block


def bytes_of(progress: Progress | None, size: int) -> Callable[[int], None] | None:
    """Return a progress of `size` bytes as the native core calls it."""
    return None if progress is None else lambda done: progress(done, size)


def read_runs(
    pack: Pack, arena: _native.Arena, runs: Sequence[Run], progress: Progress | None = None
) -> None:
    """Read bytes [begin, end) of weights.bin to byte `to` of the arena, each run; checked."""
    whole, edges = list[Run](), list[Run]()
    for run in runs:
        for piece in _pieces(run, pack.block_bytes, pack.weights_bytes):
            begin, end, _ = piece
            aligned = begin % pack.block_bytes == 0
            ends = end % pack.block_bytes == 0 or end == pack.weights_bytes
            (whole if aligned and ends else edges).append(piece)
    if edges:  # a block is checked whole
        edge = new_arena(pack.block_bytes, "a block")
    for begin, end, to in edges:
        block = begin // pack.block_bytes * pack.block_bytes
        BlockReading(pack, edge, [(block, min(pack.weights_bytes, block + pack.block_bytes), 0)]).finish()
        arena.copy(to, edge, begin - block, end - begin)
    done = sum(end - begin for begin, end, _ in edges)
    size = done + sum(end - begin for begin, end, _ in whole)
    BlockReading(pack, arena, whole).finish(progress and (lambda n, _: progress(done + n, size)))


def _pieces(run: Run, block: int, size: int) -> Iterator[Run]:
    """Cut a run at its first and its last border of blocks."""
    begin, end, to = run
    first, last = -(-begin // block) * block, end if end == size else end // block * block
    borders = sorted({begin, end, *(b for b in (first, last) if begin < b < end)})
    for a, b in itertools.pairwise(borders):
        yield a, b, to + a - begin


def block_error(pack: Pack, error: int, block: int) -> ThermoclineError:
    """Return the error for a block. `error` is an errno, -1 for an early end, 0 for a wrong checksum."""
    at = block * pack.block_bytes
    where = f"byte {at} ({_tensor_at(pack, at)})"
    if error:
        why = "ends early" if error < 0 else os.strerror(error)
        return IOFailure(f"{pack.weights_path}: {why} at {where}")
    return BadFile(f"{pack.weights_path}: checksum mismatch at {where}; the file is damaged: pack it again")


def _tensor_at(pack: Pack, offset: int) -> str:
    end = offset + pack.block_bytes
    inside = [n for n, t in pack.tensors.items() if t.offset < end and offset < t.offset + t.bytes]
    return inside[0] if inside else "padding"
