"""A table whose rows stay in the file: embeddings, of which a token needs one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from thermocline import _native
from thermocline.model import quant
from thermocline.model.sizes import aligned
from thermocline.model.tensors import TensorInfo
from thermocline.pack.blocks import new_arena
from thermocline.plan.disk.disk_split import looked_up

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec
    from thermocline.pack.stored_model import RowSource, StoredModel


class Lookup:
    """The rows of `tensor`, one at a time at byte `place` of the arena."""

    def __init__(self, rows: RowSource, tensor: TensorInfo, arena: _native.Arena, place: int) -> None:
        self._rows, self._tensor, self._arena, self._place = rows, tensor, arena, place
        id = quant.FORMATS[tensor.format].id
        self._here = _native.Matrix(arena, place, id, 1, tensor.shape[1], tensor.stride)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._tensor.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows, as they are stored."""
        return self._tensor.bytes

    def row(self, i: int) -> _native.Matrix:
        """Return row i, until the next is asked for. Raises BadFile or IOFailure."""
        assert 0 <= i < self.shape[0], "the engine checked what it was given"
        self._arena.write(self._place, self._rows.read(i))
        return self._here


def opened(model: StoredModel, tables: Sequence[str]) -> dict[str, Lookup]:
    """Open the tables of a model that stay on disk, each with a row's place of its own."""
    found = {}
    for name in tables:
        t = model.tensors[name]
        arena = new_arena(aligned(t.stride), f"a row of {name}")
        found[name] = Lookup(model.rows_of(name), t, arena, 0)
    return found


def placed(spec: ModelSpec, tensors: Mapping[str, TensorInfo], at: int) -> tuple[dict[str, TensorInfo], int]:
    """Return places of a row of each table on disk, from byte `at` of an arena on, and their end."""
    found = {}
    for name in looked_up(spec, tensors):
        t = tensors[name]
        found[name] = TensorInfo(t.format, (1, t.shape[1]), at, t.stride, t.stride)
        at += aligned(t.stride)
    return found, at


def in_arena(model: StoredModel, placed: Mapping[str, TensorInfo], arena: _native.Arena) -> dict[str, Lookup]:
    """Open all tables that can stay on disk. `placed`: a row of each in the arena."""
    return {
        name: Lookup(model.rows_of(name), model.tensors[name], arena, placed[name].offset)
        for name in looked_up(model.spec, model.tensors)
    }
