"""Pieces of source tensors: any rows, in any order, in any step of reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from thermocline.convert.rows import TensorMapSource
from thermocline.files.safetensors import Checkpoint
from thermocline.model.tensor_map import SourceSlice, TensorMap

W = np.random.default_rng(0).standard_normal((12, 6), dtype=np.float32)
PIECES = {
    "all": (SourceSlice("w", (12, 6)), W),
    "the end": (SourceSlice("w", (12, 6), (range(2, 12),)), W[2:]),
    "even, then odd": (SourceSlice("w", (12, 6), (range(0, 12, 2), range(1, 12, 2))), np.r_[W[::2], W[1::2]]),
    "groups": (SourceSlice("w", (12, 6), (range(0, 2), range(6, 8))), W[[0, 1, 6, 7]]),
    "backwards": (SourceSlice("w", (12, 6), (range(11, 2, -3),)), W[[11, 8, 5]]),
    "columns": (SourceSlice("w", (12, 6), transposed=True), W.T),
    "some columns": (
        SourceSlice("w", (12, 6), (range(4, 6), range(0, 3, 2)), transposed=True), W.T[[4, 5, 0, 2]]
    ),
    "plus one": (SourceSlice("w", (12, 6), plus=1.0), W + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_is_the_rows_it_says_however_it_is_read(name: str, tmp_path: Path) -> None:
    piece, truth = PIECES[name]
    save_file({"w": W}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        both = TensorMap({"x": (piece, SourceSlice("w", (12, 6), transposed=piece.transposed))}, ())
        source = TensorMapSource("here", checkpoint.tensors, checkpoint.where, both)
        rows = np.concatenate([truth, W.T if piece.transposed else W])
        assert piece.rows == len(truth)
        for step in (1, 2, 5, len(rows)):
            parts = [source("x", i, min(len(rows), i + step)) for i in range(0, len(rows), step)]
            assert np.array_equal(np.concatenate(parts), rows), step
