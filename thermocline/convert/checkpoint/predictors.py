"""Predictors of active neurons that a model's makers trained: in its checkpoint, or in files beside it.

Each is fc2 relu(fc1 x): two matrices for a layer, or for each of its experts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.rows import RowReader, Shaped
from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.files.bounded import parse_json, quoted, read_small
from thermocline.files.safetensors import Checkpoint
from thermocline.files.torch_zip import TorchFile
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice, TensorMap
from thermocline.pack.manifest import MAX_RANK, Predictor

_OWN = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:\w+\.)*?(?:experts\.(\d+)\.)?predictor\.[\w.]+\.weight")
_FILE = re.compile(r"model_(\d+)\.pt")
_MAX_CONFIG_BYTES = 64 << 10
_THRESHOLD = "sparse_threshold"
Pair = tuple[SourceSlice, SourceSlice]  # fc1 [rank, dim] and fc2 [neurons, rank]


def in_checkpoint(checkpoint: Checkpoint, spec: ModelSpec, tensor_map: TensorMap) -> Predictor | None:
    """Return the predictors that a checkpoint has beside its FFNs, and add them to `tensor_map`; None: none.

    What the two matrices are called does not matter: their shapes tell which is which. Others (biases) stay
    unknown, and are refused by name.
    """
    found: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for name, entry in checkpoint.tensors.items():
        if spec.sparse and (m := _OWN.fullmatch(name)):
            found.setdefault((int(m[1]), int(m[2] or 0)), {})[name] = entry.shape
    if not found:
        return None
    each = [(i, e) for i in range(spec.n_layers) for e in range(spec.n_experts)]
    for i, e in each:
        if (i, e) not in found:
            raise BadFile(f"{checkpoint.directory}: expert {e} of layer {i} has no predictor, others have")
    pairs = {key: _pair(str(checkpoint.directory), found[key], spec) for key in each}
    return _mapped(str(checkpoint.directory), pairs, 0.0, spec, tensor_map)


def _pair(where: str, matrices: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> Pair:
    """Return a predictor's first and second matrix."""
    first = [n for n, s in matrices.items() if len(s) == 2 and s[1] == spec.dim and s[0] != spec.ffn_dim]
    second = [n for n, s in matrices.items() if len(s) == 2 and s[0] == spec.ffn_dim and n not in first]
    if len(matrices) != 2 or len(first) != 1 or len(second) != 1:
        said = "; ".join(f"{n} {s}" for n, s in sorted(matrices.items()))
        raise Unsupported(
            f"{where}: {quoted(said)}: a predictor is not two matrices [rank, {spec.dim}] and "
            f"[{spec.ffn_dim}, rank], which is not supported"
        )
    rank = matrices[first[0]][0]
    return SourceSlice(first[0], (rank, spec.dim)), SourceSlice(second[0], (spec.ffn_dim, rank))


def _mapped(
    where: str,
    pairs: Mapping[tuple[int, int], Pair],
    threshold: float,
    spec: ModelSpec,
    tensor_map: TensorMap,
) -> Predictor:
    """Add the predictors of (layer, expert) to `tensor_map`."""
    ranks = []
    for i in range(spec.n_layers):
        own = [pairs[i, e] for e in range(spec.n_experts)]
        of_layer = {first.shape[0] for first, _ in own}
        if len(of_layer) > 1 or max(of_layer) > MAX_RANK:
            raise Unsupported(
                f"{where}: predictors of layer {i} have ranks {sorted(of_layer)}, and only one of at most "
                f"{MAX_RANK} is supported"
            )
        ranks.append(max(of_layer))
        for part, fc in enumerate(("fc1", "fc2")):
            tensor_map.tensors[f"layers.{i}.predictor.{fc}.weight"] = tuple(pair[part] for pair in own)
    return Predictor(tuple(ranks), threshold, each=spec.n_experts > 1)


class PredictorFiles:
    """A directory of PowerInfer's predictors, model_0.pt and on: one for each layer. Use it in a `with`."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self.directory = directory
        if not os.path.isdir(directory):
            raise UsageError(f"{directory}: is not a directory of predictors, model_0.pt and on")
        if not spec.sparse or spec.n_experts > 1:
            raise UsageError(f"{directory}: predictors in files are for models with ReLU and without experts")
        numbers = sorted(int(m[1]) for f in os.listdir(directory) if (m := _FILE.fullmatch(f)))
        if numbers != list(range(spec.n_layers)):
            raise BadFile(
                f"{directory}: has {len(numbers)} files model_N.pt, and the model has layers 0 to "
                f"{spec.n_layers - 1}: another model's?"
            )
        self.threshold = self._threshold()
        self._files = ExitStack()
        self.tensors: dict[str, Shaped] = {}
        self.where: dict[str, RowReader] = {}
        self._pairs: dict[tuple[int, int], Pair] = {}
        try:
            for i in numbers:
                self._pairs[i, 0] = self._open(i, spec)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PredictorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def add_to(self, tensor_map: TensorMap, spec: ModelSpec) -> Predictor:
        return _mapped(str(self.directory), self._pairs, self.threshold, spec, tensor_map)

    def _threshold(self) -> float:
        """Return what its config.json says; 0, as PowerInfer has it, if there is none."""
        path = self.directory / "config.json"
        if not os.path.exists(path):
            return 0.0
        value = parse_json(read_small(path, _MAX_CONFIG_BYTES), str(path)).get(_THRESHOLD, 0.0)
        if type(value) not in (int, float) or not -1e6 <= value <= 1e6:
            raise BadFile(f"{path}: {_THRESHOLD} is {quoted(value)}, not a number from -1e6 to 1e6")
        return float(value)

    def _open(self, i: int, spec: ModelSpec) -> Pair:
        path = self.directory / f"model_{i}.pt"
        file = self._files.enter_context(TorchFile(path))
        if file.tensors.keys() != {"fc1.weight", "fc2.weight"}:
            raise Unsupported(
                f"{path}: its tensors are {quoted(', '.join(sorted(file.tensors)))}, not fc1.weight and "
                "fc2.weight, which is not supported"
            )
        first, second = (file.tensors[f"{fc}.weight"].shape for fc in ("fc1", "fc2"))
        rank = first[0]
        if first != (rank, spec.dim) or second != (spec.ffn_dim, rank):
            raise BadFile(
                f"{path}: fc1 is {first} and fc2 {second}, not (rank, {spec.dim}) and "
                f"({spec.ffn_dim}, rank): another model's?"
            )
        names = [f"{path.name}: {name}" for name in ("fc1.weight", "fc2.weight")]
        for name in names:
            reader = _Named(file, name.rpartition(" ")[2])
            self.tensors[name], self.where[name] = reader, reader
        return SourceSlice(names[0], first), SourceSlice(names[1], second)


class _Named:
    """A tensor of a torch file under another name."""

    def __init__(self, file: TorchFile, name: str) -> None:
        self._file, self._name, self.shape = file, name, file.tensors[name].shape

    def read_stored(self, name: str, first: int, last: int) -> NDArray[Any]:
        return self._file.read_stored(self._name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        return self._file.read_rows(self._name, first, last)
