"""A model in files as a session takes it: a pack, or a GGUF that runs in place.

Its tensors lie in weights.bin, which a pack has on disk and a GGUF only in memory: with the same layout, so
that planner, budget and kernels see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from thermocline.files.bounded import FileState
from thermocline.files.small_files import SmallFiles
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import TensorInfo, TensorSpec, expected_tensors, formats_in
from thermocline.pack.manifest import Predictor, ranks_of

if TYPE_CHECKING:
    from thermocline import _native

U8 = NDArray[np.uint8]
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Run = tuple[int, int, int]  # of weights.bin: from byte, to byte, where in the arena


@dataclass(frozen=True)
class FileRows:
    """Consecutive rows of a tensor as a file has them. Row r goes to byte to + stride * order[r].

    `order` None: r; an order of -1: nowhere. `part`: which of the model's files; `at`: the first byte there.
    `planar`: as in memory, else in GGUF's order.
    """

    tensor: str
    format: str
    columns: int
    part: int
    at: int
    rows: int
    to: int
    stride: int
    order: NDArray[np.int32] | None = None
    planar: bool = True


class Reading(Protocol):
    """Weights on their way into an arena. One that nobody finishes is given up when it goes."""

    @property
    def grouped(self) -> frozenset[str]:
        """The tensors whose rows come interleaved in groups."""

    def finish(self, progress: Progress | None = None) -> None:
        """Wait until all are there, checked. Raises BadFile or IOFailure, naming the first bad tensor."""


class RowSource(Protocol):
    """The rows of one tensor, in files."""

    def read(self, i: int) -> U8:
        """Return row i as weights.bin has it, checked, until the next is asked for.

        Raises BadFile or IOFailure, and may be asked again.
        """


class StoredModel(Protocol):
    @property
    def path(self) -> Path:
        """The pack's directory, or the GGUF file."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def weight_format(self) -> str:
        """The format of most weights."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def weights_bytes(self) -> int:
        """The size of weights.bin."""

    @property
    def predictor(self) -> Predictor | None: ...
    @property
    def small_files(self) -> SmallFiles:
        """The tokenizer, the chat template, what its makers recommend."""

    @property
    def stamp(self) -> tuple[str, str]:
        """(its kind, the hash of what it is), for files that were made for it."""

    @property
    def data_path(self) -> Path:
        """A file with the weights: the disk under it is what they are read from."""

    def ranges(self, without: Collection[str] = ()) -> list[tuple[int, int]]:
        """Return the ranges of weights.bin that are kept in memory, where all are but tensors `without`."""

    def begin_load(
        self,
        arena: _native.Arena,
        grouped: Collection[str] = (),
        group: int = 1,
        without: Collection[str] = (),
    ) -> Reading:
        """Begin to read `ranges`, each to its own place in an arena as large as weights.bin.

        The rows of the tensors `grouped` may be interleaved in groups of `group` on the way.
        """

    def has_rows(self, name: str) -> bool:
        """Return whether `rows_of` can read a tensor."""

    def rows_of(self, name: str) -> RowSource:
        """Open a tensor that stays in its file. Raises IOFailure, or BadFile for a file that has changed."""

    def read_runs(
        self,
        arena: _native.Arena,
        runs: Sequence[Run],
        progress: Progress | None = None,
        grouped: Collection[str] = (),
        group: int = 1,
    ) -> frozenset[str]:
        """Read runs that begin and end between rows. Raises as `Reading.finish` does.

        Return which of the tensors `grouped`, of which runs have all rows or none, came in groups of `group`.
        """

    @property
    def parts(self) -> Sequence[tuple[Path, FileState]]:
        """The files that hold the weights, and what they were when their headers were read."""

    def file_rows(self, name: str, first: int, rows: int, to: int) -> list[FileRows]:
        """Return where rows [first, first + rows) of a matrix are; the first of them goes to byte `to`."""


def tensor_specs(model: StoredModel, *, absent: bool = False) -> dict[str, TensorSpec]:
    """Return what the spec and the formats imply of each tensor; `absent`: of optional ones, too."""
    of_predictors = ranks_of(model.predictor)
    every = expected_tensors(model.spec, model.weight_format, formats_in(model.tensors), *of_predictors)
    return every if absent else {n: t for n, t in every.items() if n in model.tensors}
