"""Write a pack again with its neurons in another order.

Tensors are streamed from the old pack, and every block is checked. One tensor is in memory at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.files.bounded import read_small
from thermocline.model import quant
from thermocline.model.tensors import QKV, bundle_parts, formats_in
from thermocline.pack.pack import MAX_COPIED_BYTES, Pack, Progress, read_tensor
from thermocline.pack.writer import PackExtras, write_pack

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

# Tensors of a layer that have a row, or a value, for each neuron.
NEURON_TENSORS = (
    "gate.weight",
    "gate.bias",
    "bundle",
    "order",
    "ffn_sub_norm.weight",
    "predictor.fc2.weight",
    "activation_count",
)
PACK_FILES = ("pack.json", "weights.bin", "checksums.bin")


def hottest_first(counts: I64) -> I64:
    """Return the positions of neurons in order of hotness: [experts, neurons] -> [experts * neurons].

    Neurons stay with their expert.
    """
    order = np.argsort(-counts, axis=1, kind="stable")
    places: I64 = (order + np.arange(len(counts))[:, None] * counts.shape[1]).reshape(-1)
    return places


class Reordered:
    """An `EncodedSource` over a pack: neuron i of a layer is the pack's neuron `places[layer][i]`."""

    def __init__(self, pack: Pack, places: Sequence[I64]) -> None:
        self._pack, self._places = pack, places
        self._held: tuple[str, U8] = ("", np.empty((0, 0), np.uint8))

    def __call__(self, name: str, first: int, last: int, /) -> NDArray[Any]:
        layer, part = _split(name)
        if part == "order" and name not in self._pack.tensors:
            return (self._places[layer] % self._pack.spec.ffn_dim).astype(np.int32)
        dtype = "<i4" if part == "order" else "<f4"
        values = read_tensor(self._pack, name).reshape(-1).view(dtype)
        return values[self._places[layer]] if part in NEURON_TENSORS else values

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8:
        layer, part = _split(name)
        if part in ("up", "down"):
            t, spec = self._pack.tensors[f"layers.{layer}.bundle"], self._pack.spec
            up, down = bundle_parts(t, spec)
            begin = down.at if part == "down" or up is None else up.at
            rows = self._rows(f"layers.{layer}.bundle")[self._places[layer][first:last]]
            return rows[:, begin : begin + quant.row_bytes(format, spec.dim)]
        tensor, before = self._tensor_of(name, first)
        rows = self._rows(tensor)
        if part in NEURON_TENSORS:
            rows = rows[self._places[layer][first:last]]
        else:
            rows = rows[first - before : last - before]
        return rows[:, : quant.row_bytes(format, self._pack.tensors[tensor].shape[-1])]

    def _rows(self, tensor: str) -> U8:
        if self._held[0] != tensor:
            self._held = ("", np.empty((0, 0), np.uint8))  # free one tensor before reading the next
            self._held = (tensor, read_tensor(self._pack, tensor))
        return self._held[1]

    def _tensor_of(self, name: str, row: int) -> tuple[str, int]:
        """Return the tensor that has that row, and the rows before it: q, k and v may be apart."""
        if name in self._pack.tensors:
            return name, 0
        before = 0
        for n in QKV:
            part = name.replace(".qkv.", f".{n}.")
            if part not in self._pack.tensors:
                continue
            rows = self._pack.tensors[part].shape[0]
            if row < before + rows:
                return part, before
            before += rows
        raise KeyError(name)


def _split(name: str) -> tuple[int, str]:
    """Split `layers.3.gate.weight` into (3, `gate.weight`); a tensor outside of layers gives (-1, name)."""
    if not name.startswith("layers."):
        return -1, name
    _, layer, part = name.split(".", 2)
    return int(layer), part


def write_reordered(
    pack: Pack,
    dst: Path,
    places: Sequence[I64],
    finish: Callable[[Path], None],
    *,
    drop: Sequence[str],
    overwrite: bool,
    progress: Progress | None = None,
) -> None:
    """Write `pack` to `dst` with its neurons at `places`.

    `finish` adds the new pack's sidecars. If `dst` is the pack itself, its other files stay, except for those
    in `drop`. Raises the errors of `write_pack`, and BadFile or IOFailure for the old pack.
    """
    in_place = os.path.realpath(dst) == os.path.realpath(pack.path)

    def complete(directory: Path) -> None:
        if in_place:
            _carry(pack, directory, drop)
        finish(directory)

    tensor_specs = pack.tensor_specs(absent=True)
    has = {n for n, t in tensor_specs.items() if t.optional and (n in pack.tensors or n.endswith(".order"))}
    s = pack.source
    write_pack(
        dst,
        pack.spec,
        pack.weight_format,
        Reordered(pack, places),
        PackExtras(
            formats=formats_in(pack.tensors),
            predictor=pack.predictor,
            optional=has,
            files={name: read_small(pack.path / name, MAX_COPIED_BYTES) for name in pack.files},
            origin=(s["kind"], s["name"], s["hash"]),
        ),
        overwrite=overwrite or in_place,
        finish=complete,
        progress=progress,
    )


def _carry(pack: Pack, directory: Path, drop: Sequence[str]) -> None:
    for path in sorted(pack.path.iterdir()):
        if path.name not in (*PACK_FILES, *pack.files, *drop) and path.is_file():
            shutil.copy2(path, directory / path.name)
