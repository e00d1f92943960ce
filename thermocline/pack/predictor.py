"""Predictors of active neurons: their arithmetic in numpy (the specification), and the file that holds them.

`PACK/predictors.safetensors` is a sidecar (sidecar.py) with one predictor, or none, for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile, UsageError
from thermocline.files.bounded import Json, quoted
from thermocline.model import quant
from thermocline.model.formats import FORMATS, fitting
from thermocline.model.quant import F32, U8
from thermocline.model.spec import ModelSpec
from thermocline.pack import manifest, sidecar
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.stored_model import StoredModel

FILE, KIND = "predictors.safetensors", "predictors"
KINDS = ("mlp", "svd", "sign")
MAX_RANK = 1 << 16
STORED = "q8_0"  # the format of matrices
BLOCK = FORMATS[STORED].block


@dataclass(frozen=True)
class LayerPredictor:
    """One layer's predictor, which gives each neuron a score from x, the FFN's normed input.

    mlp   score = second . relu(first . x)
    svd   score = second . (first . x)
    sign  score = the number of x's signs that agree with the gate row's, less the number that do not

    Of a mixture, `first` is for all experts, or each has its own: they follow each other.

    A neuron is predicted active if its score is at least its threshold. Neurons [0, hot) of each expert count
    as active without a score. Neurons are numbered through all experts.
    """

    kind: str
    first: F32 | None  # [rank, dim], or [experts * rank, dim]
    second: F32 | None  # [neurons, rank]
    signs: U8 | None  # [neurons, dim / 8], bit i % 8 of byte i / 8: is the gate's weight i above 0
    threshold: F32  # [neurons]; includes the neuron's bias
    hot: int
    experts: int = 1

    def predicted(self, x: F32) -> NDArray[np.bool_]:
        """Predict which gates to compute: [tokens, dim] -> [tokens, neurons].

        A NaN score means that the gate is computed, so that damage shows.
        """
        out: NDArray[np.bool_] = ~(scores(self, x) < self.threshold)
        out.reshape(len(x), self.experts, -1)[:, :, : self.hot] = True
        return out

    def expert(self, e: int) -> LayerPredictor:
        """Return the predictor of one expert's neurons alone."""
        n = len(self.threshold) // self.experts
        own = slice(e * n, (e + 1) * n)
        second = None if self.second is None else self.second[own]
        signs = None if self.signs is None else self.signs[own]
        first = self.first
        if first is not None and second is not None and len(first) > (rank := second.shape[1]):
            first = first[e * rank : (e + 1) * rank]
        return LayerPredictor(self.kind, first, second, signs, self.threshold[own], self.hot)


def scores(p: LayerPredictor, x: F32) -> F32:
    """Return the scores of all neurons: [tokens, dim] -> [tokens, neurons]."""
    if p.first is not None and p.second is not None and len(p.first) > p.second.shape[1]:
        return np.concatenate([scores(p.expert(e), x) for e in range(p.experts)], axis=1)
    return scores_of(p, codes(p, x), 0, len(p.threshold))


def codes(p: LayerPredictor, x: F32) -> F32:
    """Return what all neurons' scores are made of: [tokens, dim] -> [tokens, rank], or signs [tokens, dim].

    Inputs of matrices are rounded as the kernels round them. All experts have one `first`.
    """
    if p.kind == "sign":
        return np.where(x > 0, np.float32(1), np.float32(-1))
    assert p.first is not None
    code = _rounded(x) @ p.first.T
    return _rounded(np.maximum(code, 0) if p.kind == "mlp" else code)


def scores_of(p: LayerPredictor, code: F32, begin: int, end: int) -> F32:
    """Return the scores of neurons [begin, end), of `codes`: [tokens, end - begin]."""
    if p.signs is not None:
        signs = np.unpackbits(p.signs[begin:end], axis=1, count=code.shape[1], bitorder="little")
        return code @ (2 * signs.astype(np.float32) - 1).T
    assert p.second is not None
    return code @ p.second[begin:end].T


def _rounded(x: F32) -> F32:
    """Return x as the kernels see it: int8 with a scale for each 32 columns, if the matrix has blocks."""
    if FORMATS[fitting(STORED, x.shape[1])].block == 1:
        return x
    blocks = x.reshape(len(x), -1, BLOCK)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    with np.errstate(all="ignore"):
        q = np.where(top > 1e-36, np.rint(blocks * (np.float32(127) / top)), np.float32(0))
    out: F32 = (q * (top / np.float32(127))).reshape(x.shape).astype(np.float32)
    return out


# ---- as stored


@dataclass(frozen=True)
class StoredMatrix:
    format: str  # of `quant.FORMATS`, or "signs"
    columns: int
    rows: U8  # [rows, row bytes]


@dataclass(frozen=True)
class StoredPredictor:
    """A `LayerPredictor` as it is stored on disk and in memory."""

    kind: str
    first: StoredMatrix | None
    second: StoredMatrix
    threshold: F32
    hot: int
    experts: int = 1

    @staticmethod
    def of(
        spec: ModelSpec,
        kind: str,
        rank: int,
        tensor: Callable[[str], U8],
        threshold: F32,
        hot: int,
    ) -> StoredPredictor:
        """Return a predictor whose rows `tensor` gives by name: `signs`, or `first` and `second`."""
        if kind == "sign":
            signs = StoredMatrix("signs", spec.dim, tensor("signs"))
            return StoredPredictor(kind, None, signs, threshold, hot, spec.n_experts)
        first = StoredMatrix(fitting(STORED, spec.dim), spec.dim, tensor("first"))
        second = StoredMatrix(fitting(STORED, rank), rank, tensor("second"))
        return StoredPredictor(kind, first, second, threshold, hot, spec.n_experts)

    @property
    def rank(self) -> int:
        return 0 if self.first is None else self.second.columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in tensors_of(self))

    @property
    def row_bytes(self) -> int:
        """Bytes of rows and thresholds that neurons have, of all neurons."""
        return self.second.rows.nbytes + self.threshold.nbytes

    def decoded(self) -> LayerPredictor:
        def matrix(m: StoredMatrix) -> F32:
            return quant.decode(m.format, m.rows, m.columns)

        if self.first is None:
            signs = self.second.rows
            return LayerPredictor(self.kind, None, None, signs, self.threshold, self.hot, self.experts)
        first, second = matrix(self.first), matrix(self.second)
        return LayerPredictor(self.kind, first, second, None, self.threshold, self.hot, self.experts)


def stored(p: LayerPredictor, spec: ModelSpec) -> StoredPredictor:
    """Return a predictor in its stored form: matrices in int8, the rank padded to whole blocks with zeros."""
    neurons, n = spec.n_experts * spec.ffn_dim, spec.n_experts
    threshold = np.ascontiguousarray(p.threshold, np.float32)
    assert p.kind in KINDS and threshold.shape == (neurons,)
    assert 0 <= p.hot <= spec.ffn_dim and p.experts == n
    if p.signs is not None:
        assert p.signs.shape == (neurons, -(-spec.dim // 8)) and p.signs.dtype == np.uint8
        return StoredPredictor(p.kind, None, StoredMatrix("signs", spec.dim, p.signs), threshold, p.hot, n)
    assert p.first is not None and p.second is not None
    rank = len(p.first)
    assert p.first.shape == (rank, spec.dim) and p.second.shape == (neurons, rank)
    missing = -rank % BLOCK
    first = _stored(np.pad(p.first, ((0, missing), (0, 0))))
    second = _stored(np.pad(p.second, ((0, 0), (0, missing))))
    return StoredPredictor(p.kind, first, second, threshold, p.hot, n)


def _stored(w: F32) -> StoredMatrix:
    format = fitting(STORED, w.shape[1])
    return StoredMatrix(format, w.shape[1], quant.encode(format, w))


def stored_bytes(spec: ModelSpec, kind: str, rank: int) -> tuple[int, int]:
    """Return a predictor's size: (bytes of `first`, bytes of `second` and threshold for each neuron)."""
    if kind == "sign":
        return 0, -(-spec.dim // 8) + 4
    rank = -(-rank // BLOCK) * BLOCK
    return rank * quant.row_bytes(fitting(STORED, spec.dim), spec.dim), quant.row_bytes(STORED, rank) + 4


# ---- the predictors of a pack


class Predictors:
    """A pack's predictors, read a layer at a time. Use it in a `with`, or close it."""

    def __init__(
        self,
        count: int,
        nbytes: int,
        read: Callable[[int], StoredPredictor | None],
        report: Json | None = None,
        close: Callable[[], None] = lambda: None,
        kinds: Sequence[str] = (),
    ) -> None:
        self.count, self.nbytes, self.report = count, nbytes, report or {}
        self.kinds = tuple(kinds)  # the kinds of the layers that have a predictor, if a file says them
        self._read, self.close = read, close

    @classmethod
    def of(cls, spec: ModelSpec, layers: Sequence[LayerPredictor | None]) -> Predictors:
        """Return predictors in memory that are equal to those that `write_predictors` would write."""
        made = [None if p is None else stored(p, spec) for p in layers]
        return cls(len(made), sum(p.nbytes for p in made if p is not None), made.__getitem__)

    def stored(self, i: int) -> StoredPredictor | None:
        return self._read(i)

    def layer(self, i: int) -> LayerPredictor | None:
        p = self._read(i)
        return None if p is None else p.decoded()

    def __enter__(self) -> Predictors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_predictors(pack: Pack, layers: Sequence[LayerPredictor | None], report: Json) -> None:
    """Do as `write_stored`, with predictors that are not stored yet."""
    write_stored(pack, Predictors.of(pack.spec, layers), report)


def write_stored(pack: Pack, predictors: Predictors, report: Json) -> None:
    """Write predictors beside the pack and replace any that are there. `report` is kept as it is.

    Raises IOFailure.
    """
    assert predictors.count == pack.spec.n_layers
    about: list[Json | None] = []
    tensors: dict[str, NDArray[Any]] = {}
    for i in range(predictors.count):
        if (p := predictors.stored(i)) is None:
            about.append(None)
            continue
        about.append({"kind": p.kind, "rank": p.rank, "hot": p.hot, "crc32c": _crc(p)})
        for name, part in tensors_of(p):
            tensors[f"layers.{i}.{name}"] = part
    shapes = {name: (a.dtype, a.shape) for name, a in tensors.items()}
    facts: Json = {"layers": about, "report": report}
    sidecar.replace(pack.path / FILE, KIND, sidecar.stamp(pack.path), facts, shapes, tensors.values())


def tensors_of(p: StoredPredictor) -> list[tuple[str, NDArray[Any]]]:
    """Return the tensors that a file has of a predictor."""
    if p.first is None:
        return [("signs", p.second.rows), ("threshold", p.threshold)]
    return [("first", p.first.rows), ("second", p.second.rows), ("threshold", p.threshold)]


def _crc(p: StoredPredictor) -> int:
    crc = 0
    for _, part in tensors_of(p):
        crc = _native.crc32c(np.ascontiguousarray(part).view(np.uint8).ravel(), crc)
    return crc


def predictors_for(pack: StoredModel, sparsity: str) -> Predictors | None:
    """Open the predictors that `sparsity` needs; None if it needs none. UsageError if the pack has none.

    Raises BadFile or IOFailure for a damaged file.
    """
    if sparsity != "predict":
        return None
    if not pack.spec.sparse:
        raise UsageError(
            f"{pack.path}: its {pack.spec.activation} neurons are never zero, so none can be predicted; "
            "use --sparsity exact"
        )
    found = open_predictors(pack) if isinstance(pack, Pack) else None
    if found is None:
        raise UsageError(f"{pack.path} has no predictors; make them with `thermocline train {pack.path}`")
    return found


def open_predictors(pack: Pack) -> Predictors | None:
    """Open a pack's predictors: its sidecar's, or those that PowerInfer's file had. None if it has neither.

    Raises BadFile for a file that is damaged or was made for another pack, and IOFailure.
    """
    found = sidecar.Sidecar.open(
        pack.path / FILE, KIND, sidecar.stamp(pack.path), f"thermocline train {pack.path}"
    )
    if found is None:
        return None if pack.predictor is None else _of_source(pack, pack.predictor)
    try:
        about = _check_about(found.facts, pack.spec, str(found.path))
        names = {f"layers.{i}.{name}" for i, a in enumerate(about) if a for name in _names(a)}
        if set(found.file.tensors) != names:
            odd = min(set(found.file.tensors) ^ names)
            raise BadFile(f"{found.path}: tensor {quoted(odd)} is missing or has no place there")
        nbytes = sum(e.end - e.start for e in found.file.tensors.values())
        read, kinds = partial(_read, found, pack.spec, about), [a["kind"] for a in about if a]
        return Predictors(len(about), nbytes, read, found.facts["report"], found.close, kinds)
    except BaseException:
        found.close()
        raise


def named_for_active(report: Json) -> float | None:
    """Return the gate rows read per active neuron, as `train` measured them; None if the report lacks it."""
    predicted, active = report.get("predicted_fraction"), report.get("active_fraction")
    if not (isinstance(predicted, float) and isinstance(active, float) and 0 < active <= predicted <= 1):
        return None
    return predicted / active


def measured_on(report: Json) -> str | None:
    """Say on which texts a predictors file was measured; None for PowerInfer's and for older files."""
    texts, kld = report.get("texts"), report.get("kld")
    if not (isinstance(texts, list) and texts and isinstance(kld, dict)):
        return None
    names, worst = ", ".join(str(t.get("name")) for t in texts), report.get("worst_text")
    return (
        f"predictors are within {kld.get('value'):.4f} nats of exact on each text they were measured on "
        f"({names}; {worst} is the furthest); on unlike text they may be further"
    )


def _names(about: Json) -> tuple[str, ...]:
    return ("signs", "threshold") if about["kind"] == "sign" else ("first", "second", "threshold")


def _check_about(facts: Json, spec: ModelSpec, name: str) -> list[Json | None]:
    layers, report = facts.get("layers"), facts.get("report")
    if type(layers) is not list or len(layers) != spec.n_layers or type(report) is not dict:
        raise BadFile(f"{name}: does not describe the pack's {spec.n_layers} layers")
    for i, a in enumerate(layers):
        if a is None:
            continue
        fits = type(a) is dict and a.keys() == {"kind", "rank", "hot", "crc32c"} and a["kind"] in KINDS
        if not fits or any(type(a[k]) is not int for k in ("rank", "hot", "crc32c")):
            raise BadFile(f"{name}: layer {i} is {quoted(a)}, not a predictor of kind {', '.join(KINDS)}")
        ranked = (
            a["rank"] == 0 if a["kind"] == "sign" else 0 < a["rank"] <= MAX_RANK and a["rank"] % BLOCK == 0
        )
        if not ranked or not 0 <= a["hot"] <= spec.ffn_dim:
            raise BadFile(f"{name}: layer {i}: rank {a['rank']} or hot {a['hot']} is out of range")
    return layers


def _read(
    found: sidecar.Sidecar, spec: ModelSpec, about: list[Json | None], i: int
) -> StoredPredictor | None:
    a = about[i]
    if a is None:
        return None
    n, neurons, rank = spec.n_experts, spec.n_experts * spec.ffn_dim, a["rank"]

    def matrix(name: str, format: str, rows: int, columns: int) -> StoredMatrix:
        width = -(-columns // 8) if format == "signs" else quant.row_bytes(format, columns)
        return StoredMatrix(format, columns, found.read(f"layers.{i}.{name}", "|u1", (rows, width)))

    threshold = found.read(f"layers.{i}.threshold", "<f4", (neurons,))
    if a["kind"] == "sign":
        signs = matrix("signs", "signs", neurons, spec.dim)
        p = StoredPredictor("sign", None, signs, threshold, a["hot"], n)
    else:
        first = matrix("first", fitting(STORED, spec.dim), rank, spec.dim)
        second = matrix("second", STORED, neurons, rank)
        p = StoredPredictor(a["kind"], first, second, threshold, a["hot"], n)
    if _crc(p) != a["crc32c"]:
        raise BadFile(f"{found.path}: layer {i}: checksum mismatch: damaged; run `thermocline train` again")
    if np.isnan(threshold).any():
        raise BadFile(f"{found.path}: layer {i}: a threshold is not a number")
    return p


def _of_source(pack: Pack, about: manifest.Predictor) -> Predictors:
    """Return the predictors of PowerInfer's files (fc1, fc2), which are tensors of the pack itself."""
    neurons = pack.spec.n_experts * pack.spec.ffn_dim

    def read(i: int) -> StoredPredictor:
        first, second = (_matrix(pack, f"layers.{i}.predictor.{fc}.weight") for fc in ("fc1", "fc2"))
        threshold = np.full(neurons, about.threshold, np.float32)
        return StoredPredictor("mlp", first, second, threshold, 0, pack.spec.n_experts)

    sizes = [t.bytes for name, t in pack.tensors.items() if ".predictor." in name]
    return Predictors(len(about.ranks), sum(sizes) + 4 * neurons * len(about.ranks), read)


def _matrix(pack: Pack, name: str) -> StoredMatrix:
    info = pack.tensors[name]
    return StoredMatrix(info.format, info.shape[-1], read_tensor(pack, name))
