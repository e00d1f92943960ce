"""A table of a GGUF whose rows stay in the file: each is read, and made planar, when a token needs it.

Owns the open files. Through the page cache: there is no whole block to check, and common tokens' rows stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.convert.gguf_rows import bad_scale
from thermocline.errors import BadFile, IOFailure
from thermocline.files.bounded import FileState, OpenFile, file_state, quoted
from thermocline.model.tensors import TensorInfo
from thermocline.opening.row_runs import RowRun

U8 = NDArray[np.uint8]


def changed(path: Path) -> BadFile:
    return BadFile(f"{path}: was changed or replaced since it was opened; open the model again")


def unread(path: Path, why: str, tensor: str, row: int) -> IOFailure:
    return IOFailure(f"{path}: {why} at tensor {quoted(tensor)}, row {row}")


class TableRows:
    """The rows of a tensor, a `RowSource`. `runs`: where they are, in the order of `parts`, without `order`.

    A file that is replaced meanwhile is read as it was; one that is written or cut is an error at each row.
    """

    def __init__(
        self, tensor: TensorInfo, runs: Sequence[RowRun], parts: Sequence[tuple[Path, FileState]]
    ) -> None:
        self._tensor, self._parts = tensor, parts
        self._runs = [((r.to - tensor.offset) // r.stride, r) for r in runs]  # with its first row
        self._files = {part: OpenFile(parts[part][0]) for part in dict.fromkeys(r.part for r in runs)}
        self._out = np.empty((1, tensor.stride), np.uint8)
        for part in self._files:
            self._check(part)

    def read(self, i: int) -> U8:
        """Return row i, planar, until the next is asked for."""
        first, run = next((f, r) for f, r in self._runs if f <= i < f + r.rows)
        path, number = self._parts[run.part][0], run.row + i - first
        try:
            row = self._files[run.part].read_bytes(run.at + (i - first) * run.stride, run.stride)
        except (BadFile, IOFailure) as e:
            self._check(run.part)  # one that was cut is a changed one
            raise unread(path, str(e).removeprefix(f"{path}: "), run.tensor, number) from None
        self._check(run.part)  # a file that was changed may have given anything
        if _native.arranged(run.format, row[None], self._out) is not None:
            raise bad_scale(path, run.tensor, number)
        out: U8 = self._out[0]
        return out

    def _check(self, part: int) -> None:
        path, expected = self._parts[part]
        if file_state(self._files[part].stat()) != expected:
            raise changed(path)
