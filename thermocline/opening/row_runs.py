"""Which rows of a GGUF's tensors go where in weights.bin, if its tensors keep their formats.

`TensorMap` says which source rows make a tensor, `expected_tensors` its format. Whatever is rows of a file
as they are becomes a `RowRun`, which native code reads. The rest is a few bytes (norms, biases), made here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.gguf_rows import GGUFSource
from thermocline.files.gguf import GGUF
from thermocline.files.gguf_header import Tensor
from thermocline.model import formats
from thermocline.model.tensor_map import SourceSlice
from thermocline.model.tensors import TensorInfo, TensorSpec
from thermocline.pack.stored_model import FileRows
from thermocline.pack.writer import encoded_rows

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]


@dataclass(frozen=True)
class RowRun:
    """Consecutive rows of a tensor of a GGUF. Row r goes to byte to + stride * order[r] of weights.bin.

    `order` None: r; an order of -1: nowhere. `part`: which file; `at`: the first byte there; `row`: the
    number of the first row in the tensor. `of`: the tensor of weights.bin.
    """

    of: str
    tensor: str
    part: int
    format: str
    columns: int
    row: int
    at: int
    rows: int
    to: int
    stride: int
    order: I32 | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are read: a row has as many there as in weights.bin."""
        return self.rows * self.stride

    def in_file(self) -> FileRows:
        return FileRows(
            self.tensor, self.format, self.columns, self.part, self.at, self.rows, self.to, self.stride,
            self.order, planar=False
        )  # fmt: skip

    def within(self, begin: int, end: int, to: int) -> RowRun | None:
        """Return the rows that lie in [begin, end) of weights.bin, as if that began at byte `to`."""
        first, last = max(0, -(-(begin - self.to) // self.stride)), (end - self.to) // self.stride
        moved = self.to + to - begin
        if self.order is not None:
            inside = (self.order >= first) & (self.order < last)
            order = np.where(inside, self.order - first, -1).astype(np.int32)
            moved += first * self.stride
            return replace(self, to=moved, order=order) if inside.any() else None
        last = min(last, self.rows)
        if first >= last:
            return None
        skipped = first * self.stride
        return replace(
            self, row=self.row + first, at=self.at + skipped, rows=last - first, to=moved + skipped
        )


def why_packed(source: GGUFSource, expected: Mapping[str, TensorSpec]) -> str | None:
    """Return why the tensors cannot be rows of the file as they are; None if they can."""
    for name, t in expected.items():
        if t.vector or _is_exact(t):
            continue
        if source.transposed(t.parts[0]):
            return f"its {name} is there with rows and columns exchanged: a newer file has attn_k_b"
        for stored in source.stored(t.parts[0], t.first, t.first + t.rows):
            if stored.type not in formats.FORMATS:
                return f"its {stored.type} has to be converted to {t.format}"
            if stored.type != t.format:
                return f"its {name} has parts in {stored.type} and others, which {t.format} has to hold"
    return None


def _is_exact(t: TensorSpec) -> bool:
    """Return whether a matrix is f32 however it is stored: routers and positions, a few rows."""
    return t.format == "f32" and (t.role == "router" or t.parts == ("pos_embed.weight",))


def placed_rows(
    gguf: GGUF, source: GGUFSource, expected: Mapping[str, TensorSpec], tensors: Mapping[str, TensorInfo]
) -> tuple[list[RowRun], dict[str, U8]]:
    """Return (rows that are read as they are, in the files' order; the bytes of all other tensors)."""
    runs: list[RowRun] = []
    made: dict[str, U8] = {}
    for name, t in expected.items():
        if not t.vector and all(_is_rows(source, piece, t) for piece, _, _ in _spans(source, t)):
            runs += _runs_of(gguf, source, t, name, tensors[name].offset)
        else:
            made[name] = np.concatenate(list(encoded_rows(t, source)))
    return sorted(_joined(runs), key=lambda r: (r.part, r.at)), made


def _spans(source: GGUFSource, t: TensorSpec) -> Iterator[tuple[SourceSlice, int, int]]:
    """Yield (source slice, its first row, its last) for all rows of a matrix."""
    return source.spans(t.parts[0], t.first, t.first + t.rows)


def _is_rows(source: GGUFSource, piece: SourceSlice, t: TensorSpec) -> bool:
    if piece.tensor is None or piece.transposed or piece.plus:
        return False
    stored = source.tensor(piece)
    return stored.type == t.format and stored.shape[-1] == t.columns


def _runs_of(gguf: GGUF, source: GGUFSource, t: TensorSpec, ours: str, to: int) -> Iterator[RowRun]:
    parts = {id(part): i for i, part in enumerate(gguf.parts)}
    for piece, begin, end in _spans(source, t):
        name = source.name_of(piece)
        where, stored = parts[id(gguf.where[name])], gguf.tensors[name]
        assert _row_bytes(stored) == t.stride, "a row has the bytes that GGUF gives it"
        first, last, order = _order(list(piece.ranges(begin, end)))
        at = stored.start + first * t.stride
        yield RowRun(ours, name, where, t.format, t.columns, first, at, last - first, to, t.stride, order)
        to += (end - begin) * t.stride


def _row_bytes(stored: Tensor) -> int:
    return (stored.end - stored.start) // stored.rows


def _order(ranges: Sequence[range]) -> tuple[int, int, I32 | None]:
    """Return source rows [first, last) that cover some ranges, and where each goes; None: one by one."""
    if len(ranges) == 1 and ranges[0].step == 1:
        return ranges[0].start, ranges[0].stop, None
    rows = np.concatenate([np.arange(r.start, r.stop, r.step) for r in ranges])
    first, last = int(rows.min()), int(rows.max()) + 1
    order = np.full(last - first, -1, np.int32)
    order[rows - first] = np.arange(len(rows), dtype=np.int32)
    assert np.count_nonzero(order >= 0) == len(rows), "no row is taken twice"
    return first, last, order


def _joined(runs: list[RowRun]) -> list[RowRun]:
    """Return the runs, those of a tensor that follow one another in file and arena (experts) as one."""
    out: list[RowRun] = []
    for r in runs:
        p = out[-1] if out else None
        same = p is not None and (p.of, p.tensor) == (r.of, r.tensor)
        follows = same and p is not None and p.order is None and r.order is None
        if p is not None and follows and (p.at + p.nbytes, p.to + p.nbytes) == (r.at, r.to):
            out[-1] = replace(p, rows=p.rows + r.rows)
        else:
            out.append(r)
    return out
