"""PowerInfer's additions to a GGUF: predictors of active neurons, and activation counts beside the file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.files.gguf import GGUF
from thermocline.files.torch_zip import read_flat_tensor
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice, TensorMap
from thermocline.pack.manifest import MAX_RANK, Predictor


def with_predictor(gguf: GGUF, spec: ModelSpec, tensor_map: TensorMap) -> Predictor | None:
    """Return PowerInfer's predictors of active neurons, if the file has them, and add them to `tensor_map`.

    Each layer's predictor is fc2 relu(fc1 x).
    """
    first = [gguf.tensors.get(f"blk.{i}.fc1.weight") for i in range(spec.n_layers)]
    if not any(first):
        return None
    key = "powerinfer.sparse_threshold"
    threshold = gguf.metadata.get(key, 0.0)
    if type(threshold) is not float or not -1e6 <= threshold <= 1e6:
        raise BadFile(f"{gguf.path}: {key} is {quoted(threshold)}, not a number from -1e6 to 1e6")
    ranks = tuple(t.rows if t is not None else 1 for t in first)
    if max(ranks) > MAX_RANK:
        raise BadFile(f"{gguf.path}: a predictor has rank {max(ranks)}; at most {MAX_RANK} can be read")
    for i, rank in enumerate(ranks):
        a = f"layers.{i}.predictor"
        tensor_map.tensors[f"{a}.fc1.weight"] = (SourceSlice(f"blk.{i}.fc1.weight", (rank, spec.dim)),)
        tensor_map.tensors[f"{a}.fc2.weight"] = (SourceSlice(f"blk.{i}.fc2.weight", (spec.ffn_dim, rank)),)
    return Predictor(ranks, threshold)


def activation_counts(src: Path, spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """Return how often each neuron was active, by packed tensor name; {} if the source does not say.

    PowerInfer keeps the counts in a directory `activation` beside its file.
    """
    directory = src.parent / "activation"
    if not os.path.isdir(directory):
        return {}
    out = {}
    for i in range(spec.n_layers):
        path = directory / f"activation_{i}.pt"
        counts = read_flat_tensor(path)
        if len(counts) != spec.ffn_dim or not (np.isfinite(counts) & (counts >= 0)).all():
            raise BadFile(f"{path}: {len(counts)} numbers, not {spec.ffn_dim} counts: another model's?")
        out[f"layers.{i}.activation_count"] = counts.astype(np.float32)
    return out
