"""A table whose rows stay in weights.bin: embeddings, of which a token needs one.

Owns one block of the file, and its bytes in memory.
"""

from __future__ import annotations

from thermocline import _native
from thermocline.model.tensors import TensorInfo
from thermocline.pack.blocks import block_error
from thermocline.pack.pack import Pack

NOTHING = -1


class Lookup:
    """The rows of `tensor`, one at a time at byte `place` of the arena, where `here` is a matrix of one row.

    Read like neurons, past the page cache; in whole blocks, so that their checksums are the pack's.
    """

    def __init__(
        self, pack: Pack, tensor: TensorInfo, arena: _native.Arena, place: int, here: _native.Matrix
    ) -> None:
        self._pack, self._tensor, self._arena, self._place, self._here = pack, tensor, arena, place, here
        self._reader = _native.Reader(str(pack.weights_path), depth=1, buffer_bytes=pack.block_bytes)
        self._buffer = self._reader.buffer(0)
        self._held = NOTHING  # the block that is in it

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._tensor.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows, as they are stored."""
        return self._tensor.bytes

    def row(self, i: int) -> _native.Matrix:
        """Row i, until the next is asked for. A block that two rows share, one after the other, is read once.

        Raises BadFile or IOFailure.
        """
        assert 0 <= i < self.shape[0], "the engine checked what it was given"
        size, begin = self._pack.block_bytes, self._tensor.offset + i * self._tensor.stride
        end = begin + self._tensor.stride
        for block in range(begin // size, -(-end // size)):
            self._hold(block)
            first, last = max(begin, block * size), min(end, (block + 1) * size)
            part = self._buffer[first - block * size : last - block * size]
            self._arena.write(self._place + first - begin, part)
        return self._here

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
