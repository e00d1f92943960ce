"""A model to plan for, a pack or a shape that could be one: its sizes, its hotness, its contents."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thermocline.convert import synthetic
from thermocline.model.sizes import ModelSizes
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import expected_tensors, place
from thermocline.pack.activity_profile import PROFILE
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import open_predictors
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.contents import contents_of, left_out, pack_sizes, shape_sizes, tables_of
from thermocline.plan.disk.disk_split import Contents
from thermocline.plan.disk.expert_hits import OwnRouting, own_routing, routing_hash
from thermocline.plan.hotness import Curve, Hotness

# Of each layer's predictor: bytes that all neurons share, and bytes of the rows that neurons have.
PredictorParts = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Subject:
    """A model to plan for. `made_from`: sha256 of what says so, by name."""

    name: str
    spec: ModelSpec
    sizes: ModelSizes
    hotness: Hotness
    made_from: dict[str, str]
    contents: Contents
    predictor_parts: Callable[[], PredictorParts] = tuple  # reads the predictors
    smaller: ModelSizes | None = None  # with all tables on disk that can be, where that is a choice
    routing: Callable[[], OwnRouting | None] = lambda: None  # reads a mixture's profile


def of_pack(path: Path, sparsity: str, curve: Curve) -> Subject:
    return of_model(Pack.open(path), sparsity, curve)


def of_model(model: StoredModel, sparsity: str, curve: Curve) -> Subject:
    """Return a model's subject, with its predictors where `sparsity` needs them."""
    path, spec, made_from = model.path, model.spec, dict([model.stamp])
    if (path / PROFILE).exists():
        made_from["profile"] = hashlib.sha256((path / PROFILE).read_bytes()).hexdigest()
    predicted = sparsity == "predict" and spec.sparse
    predictors = open_predictors(model) if predicted and isinstance(model, Pack) else None
    sizes, *smaller = (pack_sizes(model, predictors, tables) for tables in tables_of(model))
    contents = contents_of(model, predictors, sparsity, curve)
    made_from |= routing_hash(model)
    made = Subject(
        str(path), spec, sizes, contents.hotness, made_from, contents,
        smaller=next(iter(smaller), None), routing=partial(own_routing, model)
    )  # fmt: skip
    if predictors is None or not isinstance(model, Pack):
        return made
    predictors.close()
    return dataclasses.replace(made, predictor_parts=partial(parts_of, model))


def parts_of(pack: Pack) -> PredictorParts:
    """Read a pack's predictors, and return what each layer's takes."""
    found = open_predictors(pack)
    assert found is not None, "they were there when the subject was made"
    with found:
        stored = [found.stored(i) for i in range(found.count)]
    return tuple((0, 0) if p is None else (p.nbytes - p.row_bytes, p.row_bytes) for p in stored)


def of_shape(
    shape: str,
    weight_format: str,
    sparsity: str,
    predictor_share: float,
    curve: Curve,
    activation: str | None = None,
) -> Subject:
    """Return the subject of a known shape or a config.json.

    `predictor_share`: predictors' numbers, of the model's.
    """
    name, spec, mapping = synthetic.read_shape(shape, activation)
    if curve.active is not None and not spec.sparse:
        spec = dataclasses.replace(spec, activation="relu")
    expected = expected_tensors(spec, weight_format)
    held = {n: t for n, t in expected.items() if not t.optional or n in mapping.tensors}
    choices = left_out(spec, held)
    sizes, *smaller = (shape_sizes(spec, held, weight_format, tables) for tables in choices)
    nbytes, parts = None, PredictorParts()
    if predictor_share and spec.sparse and sparsity == "predict":
        numbers = predictor_share * sum(t.parameters for t in held.values() if not t.vector)
        each = round(numbers / spec.n_layers) * 34 // 32  # int8, a scale for each 32
        nbytes, parts = each * spec.n_layers, ((0, each),) * spec.n_layers
        sizes = sizes.with_predictors([each] * spec.n_layers)
    own = [(f.name, x) for f in dataclasses.fields(spec) if (x := getattr(spec, f.name)) != f.default]
    digest = hashlib.sha256(repr((own, sorted(held))).encode()).hexdigest()
    heat = curve.hotness(spec)
    contents = Contents(spec, place(held)[0], nbytes, sparsity, heat)
    made_from = {"shape": digest}
    return Subject(
        f"{name} {weight_format}", spec, sizes, heat, made_from, contents, lambda: parts,
        next(iter(smaller), None),
    )  # fmt: skip
