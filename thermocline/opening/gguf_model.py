"""A GGUF that runs in place: it is read as it is, and its rows become planar on their way into memory.

Nothing is written. Its weights.bin is only a layout, the one that `pack` would give it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.convert.from_gguf import files_of_metadata, gguf_hash
from thermocline.convert.gguf_rows import GGUFSource, bad_scale, formats_of
from thermocline.convert.tokenizers import has_tokenizer
from thermocline.errors import ThermoclineError
from thermocline.files.gguf import GGUF
from thermocline.files.small_files import HeldFiles
from thermocline.model.gguf_families import read_model
from thermocline.model.tensors import TensorInfo, expected_tensors, optional_among, place
from thermocline.opening.row_runs import RowRun, placed_rows, why_packed
from thermocline.opening.table_rows import TableRows, changed, unread
from thermocline.pack.blocks import bytes_of

if TYPE_CHECKING:
    from thermocline.files.bounded import FileState
    from thermocline.model.spec import ModelSpec
    from thermocline.pack.stored_model import FileRows, Progress, Run

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class GGUFModel:
    """A `StoredModel`. `parts`: the files, and what they were when their headers were read."""

    path: Path
    spec: ModelSpec
    weight_format: str
    tensors: Mapping[str, TensorInfo]
    weights_bytes: int
    parts: tuple[tuple[Path, FileState], ...]
    rows: tuple[RowRun, ...]
    made: Mapping[str, U8]  # tensors that are no rows of the files
    metadata: Mapping[str, Any]
    predictor: None = None

    @property
    def data_path(self) -> Path:
        return max(self.parts, key=lambda part: part[1][2])[0]

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.metadata)

    @cached_property
    def small_files(self) -> HeldFiles:
        return HeldFiles(self.path, files_of_metadata(self.metadata, str(self.path)))

    @property
    def stamp(self) -> tuple[str, str]:
        with GGUF(self.path) as gguf:
            return "gguf", gguf_hash(gguf)

    def ranges(self, without: Collection[str] = ()) -> list[tuple[int, int]]:
        left = sorted((t.offset, t.offset + t.bytes) for n, t in self.tensors.items() if n in without)
        borders = [0, *itertools.chain(*left), self.weights_bytes]
        return [(begin, end) for begin, end in zip(borders[::2], borders[1::2], strict=True) if begin < end]

    def begin_load(
        self,
        arena: _native.Arena,
        grouped: Collection[str] = (),
        group: int = 1,
        without: Collection[str] = (),
    ) -> RowReading:
        runs = [(begin, end, begin) for begin, end in self.ranges(without)]
        return RowReading(self, arena, runs, grouped, group)

    def has_rows(self, name: str) -> bool:
        there = name in self.tensors and name not in self.made
        return there and all(r.order is None for r in self.rows if r.of == name)

    def rows_of(self, name: str) -> TableRows:
        runs = tuple(r for r in self.rows if r.of == name)
        return TableRows(self.tensors[name], runs, self.parts)

    def read_runs(
        self,
        arena: _native.Arena,
        runs: Sequence[Run],
        progress: Progress | None = None,
        grouped: Collection[str] = (),
        group: int = 1,
    ) -> frozenset[str]:
        reading = RowReading(self, arena, runs, grouped, group)
        reading.finish(progress)
        return reading.grouped

    @cached_property
    def _rows_of(self) -> dict[str, list[RowRun]]:
        found: dict[str, list[RowRun]] = {}
        for r in self.rows:
            found.setdefault(r.of, []).append(r)
        return found

    def file_rows(self, name: str, first: int, rows: int, to: int) -> list[FileRows]:
        t = self.tensors[name]
        begin = t.offset + first * t.stride
        within = (r.within(begin, begin + rows * t.stride, to) for r in self._rows_of[name])
        return [r.in_file() for r in within if r is not None]


class RowReading:
    """Rows of a GGUF on their way into an arena."""

    def __init__(
        self,
        model: GGUFModel,
        arena: _native.Arena,
        runs: Sequence[Run],
        grouped: Collection[str] = (),
        group: int = 1,
    ) -> None:
        self._model = model
        self.grouped = frozenset(grouped).difference(model.made)
        # With what each is further on in the arena than in weights.bin.
        placed = [(r.within(*run), run[2] - run[0]) for r in model.rows for run in runs]
        moved = [(r, by) for r, by in placed if r is not None]
        self._rows = [r for r, _ in moved]
        self._size = sum(r.nbytes for r in self._rows)
        for name, data in model.made.items():
            for run in runs:
                _write(arena, model.tensors[name].offset, data, run)
        self._loading = _native.begin_rows(
            arena,
            [(str(path), state) for path, state in model.parts],
            [
                (r.format, r.columns, r.part, r.at, r.rows, r.to, r.stride, r.order, *lane)
                for r, lane in ((r, self._lane(r, by, group)) for r, by in moved)
            ],
        )

    def _lane(self, r: RowRun, by: int, group: int) -> tuple[int, int]:
        """Return (rows of a group, those of the first row's that come before it)."""
        if r.of not in self.grouped:
            return 1, 0
        return group, (r.to - by - self._model.tensors[r.of].offset) // r.stride % group

    def finish(self, progress: Progress | None = None) -> None:
        error, where = self._loading.wait(bytes_of(progress, self._size))
        if where >= 0:
            raise self._failure(error, where)

    def _failure(self, error: int, where: int) -> ThermoclineError:
        if error == _native.CHANGED:
            return changed(self._model.parts[where][0])
        run, row = self._rows[where >> _native.ROW_BITS], where & (1 << _native.ROW_BITS) - 1
        path, number = self._model.parts[run.part][0], run.row + row
        if not error:
            return bad_scale(path, run.tensor, number)
        why = "ends early" if error < 0 else os.strerror(error)
        return unread(path, why, run.tensor, number)


def _write(arena: _native.Arena, offset: int, data: U8, run: Run) -> None:
    """Write what a run has of a tensor at `offset` of weights.bin."""
    begin, end, to = run
    first, last = max(begin, offset), min(end, offset + len(data))
    if first < last:
        arena.write(to + first - begin, data[first - offset : last - offset])


def open_gguf(path: Path, activation: str | None = None) -> GGUFModel | str:
    """Open a GGUF to run in place, or return why it has to be packed. Raises as `pack` does."""
    with GGUF(path) as gguf:
        spec, tensor_map = read_model(gguf, activation)
        if gguf.powerinfer or spec.sparse:
            return "its neurons can be skipped, for which their rows have to lie together"
        source = GGUFSource(gguf, tensor_map, {})
        weight_format, chosen = formats_of(source, spec)
        expected = expected_tensors(spec, weight_format, chosen)
        optional = optional_among(tensor_map.tensors, spec)
        expected = {n: t for n, t in expected.items() if not t.optional or n in optional}
        if (why := why_packed(source, expected)) is not None:
            return why
        tensors, weights_bytes = place(expected)
        rows, made = placed_rows(gguf, source, expected, tensors)
        return GGUFModel(
            path=path,
            spec=spec,
            weight_format=weight_format,
            tensors=tensors,
            weights_bytes=weights_bytes,
            parts=tuple((part.path, part.opened_as) for part in gguf.parts),
            rows=tuple(rows),
            made=made,
            metadata=gguf.metadata,
        )
