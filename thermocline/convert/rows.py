"""Read rows of a pack's tensors out of the tensors of other files, as a `TensorMap` describes."""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import quoted
from thermocline.files.safetensors import as_f32
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice, TensorMap

F32 = NDArray[np.float32]
log = logging.getLogger(__name__)
COMPARED = 1 << 20  # numbers compared at a time


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


class RowReader(Protocol):
    """A reader of rows [first, last) of a tensor, as stored (bf16 as u16) or as f32.

    Rows are along the first axis; of a stack of matrices they are counted through all of these.
    """

    def read_stored(self, name: str, first: int, last: int) -> NDArray[Any]: ...
    def read_rows(self, name: str, first: int, last: int) -> F32: ...


def _found(name: str, tensors: Container[str]) -> str | None:
    """Return the tensor's name in the files.

    Checkpoints of the bare model lack the `model.` prefix; the text part of a wrapper has one more.
    """
    bare = name.removeprefix("model.")
    names = (name, bare, f"model.language_model.{bare}", f"language_model.{name}")
    return next((n for n in names if n in tensors), None)


def _as_stored(tensor_map: TensorMap, tensors: Container[str]) -> TensorMap:
    """Return the map with the tensors that the files have, of those that libraries write differently."""
    lacking = {
        ours
        for ours in tensor_map.otherwise
        if all(_found(str(p.tensor), tensors) is None for p in tensor_map.tensors[ours])
    }
    own = {ours: pieces for ours, pieces in tensor_map.otherwise.items() if ours in lacking}
    return replace(tensor_map, tensors=tensor_map.tensors | own)


def with_own_head(
    spec: ModelSpec, tensor_map: TensorMap, tensors: Mapping[str, Shaped], where: Mapping[str, RowReader]
) -> tuple[ModelSpec, TensorMap]:
    """Untie the head if the config says `tie_word_embeddings` but the files hold a different head.

    transformers and llama.cpp's converter do the same. A head that repeats the embeddings is left out.
    """
    (piece,) = tensor_map.tensors["embed.weight"]
    embed, head = _found(str(piece.tensor), tensors), _found(tensor_map.head, tensors)
    if not spec.tied_head or head is None or embed is None or _equal(embed, head, tensors, where):
        return spec, tensor_map
    own = {"head.weight": (replace(piece, tensor=tensor_map.head),)}
    return replace(spec, tied_head=False), replace(tensor_map, tensors=tensor_map.tensors | own)


def _equal(a: str, b: str, tensors: Mapping[str, Shaped], where: Mapping[str, RowReader]) -> bool:
    if tensors[a].shape != tensors[b].shape:
        return False
    rows, step = tensors[a].shape[0], max(1, COMPARED // math.prod(tensors[a].shape[1:]))
    return all(
        np.array_equal(
            where[a].read_rows(a, r, min(r + step, rows)), where[b].read_rows(b, r, min(r + step, rows))
        )
        for r in range(0, rows, step)
    )


class TensorMapSource:
    """A `TensorSource` over shards that keeps at most one matrix: a down projection, read by columns."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Shaped],
        where: Mapping[str, RowReader],
        tensor_map: TensorMap,
        said_by: str = "config.json",
    ) -> None:
        self._name, self._tensors, self._where = name, tensors, where
        self._tensor_map = tensor_map = _as_stored(tensor_map, tensors)
        self._held: tuple[str, NDArray[Any]] = ("", np.empty(0))
        wanted = [p for pieces in tensor_map.tensors.values() for p in pieces if p.tensor is not None]
        self._names = {str(p.tensor): self._locate(p, said_by) for p in wanted}
        self._check_all_used()

    def _locate(self, piece: SourceSlice, said_by: str) -> str:
        name = str(piece.tensor)
        found = _found(name, self._tensors)
        if found is None:
            raise BadFile(f"{self._name}: tensor {name} is missing")
        shape = self._tensors[found].shape
        if shape != piece.shape:
            raise BadFile(f"{self._name}: tensor {found} is {quoted(shape)}, {said_by} implies {piece.shape}")
        return found

    def _check_all_used(self) -> None:
        used = set(self._names.values())
        for name in self._tensors:
            if name not in used and not self._tensor_map.may_ignore(name):
                raise Unsupported(f"{self._name}: tensor {quoted(name)} does not belong to this model")
        if left := [name for name in self._tensors if self._tensor_map.skips(name)]:
            log.info("%s: %d tensors that guess further tokens are left out", self._name, len(left))
        if left := [name for name in self._tensors if self._tensor_map.is_beside(name)]:
            log.info(
                "%s: its text part is read; %d tensors of its other parts are left out", self._name, len(left)
            )

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        parts = [self._read(*span) for span in self.spans(name, first, last)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spans(self, name: str, first: int, last: int) -> Iterator[tuple[SourceSlice, int, int]]:
        """Yield (source slice, first, last) for the parts of rows [first, last) of a packed tensor."""
        start = 0
        for piece in self._tensor_map.tensors[name]:
            a, b = max(first, start), min(last, start + piece.rows)
            if a < b:
                yield piece, a - start, b - start
            start += piece.rows

    def name_of(self, piece: SourceSlice) -> str:
        """Return the name that a slice's tensor has in the files."""
        assert piece.tensor is not None, "a norm without weights has none"
        return self._names[piece.tensor]

    def _read(self, piece: SourceSlice, first: int, last: int) -> F32:
        if piece.tensor is None:
            return np.ones((last - first, *piece.shape[1:]), np.float32)
        name = self._names[piece.tensor]
        parts = [self._rows(name, piece, r) for r in piece.ranges(first, last)]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if piece.decays:
            x = -np.exp(x)
        return x + np.float32(piece.plus) if piece.plus else x

    def _rows(self, name: str, piece: SourceSlice, rows: range) -> F32:
        """Return rows of a source tensor: in the source's order, backwards, or with a step."""
        low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
        if piece.one_row:
            return self._where[name].read_rows(name, 0, piece.shape[0]).reshape(1, -1)
        if piece.flat:
            columns = piece.shape[-1] if len(piece.shape) > 1 else 1
            first = low // columns
            numbers = self._where[name].read_rows(name, first, -(-high // columns)).reshape(-1)
            return numbers[low - first * columns : high - first * columns][:: rows.step]
        if not piece.transposed:
            return self._where[name].read_rows(name, low, high)[:: rows.step]
        key = f"{name} {piece.first_row}"
        if self._held[0] != key:
            self._held = ("", np.empty(0))  # free one matrix before reading the next
            self._held = (key, self._where[name].read_stored(name, piece.first_row, piece.last_row))
        return as_f32(np.ascontiguousarray(self._held[1][:, low:high][:, :: rows.step].T))
