"""Full-sized random models out of a few layers on disk, to measure placements with: each layer of a model is
one of those, read once more to a place of its own.

Which bytes a layer has does not change how long it takes; how many, and where, does. What a layer adds to the
residual stream of a ReLU model is planned for DEPTH layers, so small that the intended activity is the same
at every depth.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from synthetic_predictors import SEED, hot_neurons, predictor_of, record, shifted

from thermocline.convert import synthetic, to_gguf
from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_weights import WeightStatistics
from thermocline.model.spec import ModelSpec
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors, named_for_active
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.plan import subject as subjects
from thermocline.plan.hotness import Curve

LAYERS = 2  # on disk
DEPTH = 10_000
MISSED = 0.005  # of the activations' mass, by predictors
CALIBRATED = 256  # tokens that predictors are calibrated with


@dataclass(frozen=True)
class Shape:
    """What is measured: a known shape or a config.json; `active` of its neurons, None: dense as it is."""

    name: str
    format: str
    active: float | None = None
    skew: float = 0.26

    @property
    def label(self) -> str:
        return f"{Path(self.name).name.removesuffix('.json')} {self.format}"

    def config(self) -> dict[str, Any]:
        known = synthetic.shapes()
        found: dict[str, Any] = known.get(self.name) or json.loads(Path(self.name).read_text())
        if self.active is not None and found["model_type"] == "falcon":
            found = found | {"bias": True}  # behind a layer norm, the gates' biases make neurons sparse
        return found

    def spec(self) -> ModelSpec:
        name = self.name if self.name in synthetic.shapes() else str(Path(self.name).resolve())
        spec = synthetic.read_shape(name)[1]
        relu = self.active is not None and not spec.sparse
        return replace(spec, activation="relu") if relu else spec


@dataclass(frozen=True)
class Model:
    """All layers of a shape, in `pack`'s tensors; what the planner knows of it."""

    shape: Shape
    pack: Pack
    subject: subjects.Subject
    predictors: Predictors | None

    @property
    def weights_bytes(self) -> int:
        return self.subject.sizes.weights_bytes


def order(layers: int) -> list[int]:
    """Which layer on disk each one is: drawn, since the same one again and again would add up."""
    return [int(i) for i in np.random.default_rng(SEED).integers(0, min(LAYERS, layers), layers)]


def written(shape: Shape, config: dict[str, Any], directory: Path, name: str) -> Pack:
    """A pack of LAYERS layers, its hottest neurons first."""
    where = directory / name
    where.mkdir(parents=True, exist_ok=True)
    layers = config["num_hidden_layers"]
    few = config | {"num_hidden_layers": min(LAYERS, layers)}
    (where / "config.json").write_text(json.dumps(few))
    model = synthetic.SyntheticModel.of(str(where), 0, shape.active, shape.skew, rank_for(few), True)
    plan, key = model.stats, hashlib.blake2b(repr((shape, few)).encode(), digest_size=16).hexdigest()
    deep = replace(plan.spec, n_layers=DEPTH if plan.spec.sparse else layers)
    source = RandomWeights(WeightStatistics.of(deep, plan.seed, plan.sparsity, not plan.constant))
    write_pack(
        where / "pack",
        plan.spec,
        shape.format,
        source,
        PackExtras(optional=model.optional, origin=("random", model.label, key)),
        overwrite=True,
    )
    return Pack.open(where / "pack")


def rank_for(config: dict[str, Any]) -> int:
    """Of the planted gates, and of predictors: 128, less in a narrow model."""
    return min(128, int(config["hidden_size"]) // 4 // 32 * 32)


def repeated(pack: Pack, layers: int) -> Pack:
    """The pack with as many layers, each with the bytes of one that it has."""
    tensors = {n: t for n, t in pack.tensors.items() if not n.startswith("layers.")}
    for i, which in enumerate(order(layers)):
        own = f"layers.{which}."
        tensors |= {
            f"layers.{i}.{n.removeprefix(own)}": t for n, t in pack.tensors.items() if n.startswith(own)
        }
    return replace(pack, spec=replace(pack.spec, n_layers=layers), tensors=tensors)


def made(shape: Shape, sparsity: str, directory: Path) -> Model:
    config = shape.config()
    layers = config["num_hidden_layers"]
    few = written(shape, config, directory, "sparse")
    pack = repeated(few, layers)
    described = directory / "sparse" / "config.json"
    described.write_text(json.dumps(config))
    curve = Curve(shape.active, shape.skew)
    subject = subjects.of_shape(str(described.parent), shape.format, sparsity, 0.0, curve)
    if sparsity != "predict" or not pack.spec.sparse:
        return Model(shape, pack, subject, None)
    predictors = predictors_of(few, pack.spec, rank_for(config))
    each, rest = divmod(predictors.nbytes, layers)
    sizes = subject.sizes.with_predictors([each + (i < rest) for i in range(layers)])
    heat = replace(subject.hotness, excess=named_for_active(predictors.report))
    return Model(shape, pack, replace(subject, sizes=sizes, hotness=heat), predictors)


def predictors_of(few: Pack, spec: ModelSpec, rank: int) -> Predictors:
    """synthetic_predictors' of the layers on disk, for all that repeat them."""
    found = record(few, min(CALIBRATED, few.spec.max_context), SEED, None)
    layers, named, active = [], [], []
    for i, (x, activations) in enumerate(found):
        p = shifted(predictor_of(few, i, "svd", rank), x, activations, MISSED)
        p = replace(p, hot=hot_neurons(few, i, "svd", rank, activations))
        named.append(float(p.predicted(x).mean()))
        active.append(float((activations != 0).mean()))
        layers.append(p)
    own = Predictors.of(few.spec, layers)
    which = order(spec.n_layers)
    report = {
        "predicted_fraction": statistics.mean(named),
        "active_fraction": statistics.mean(active),
    }
    return Predictors(
        spec.n_layers, own.nbytes * spec.n_layers // few.spec.n_layers, lambda i: own.stored(which[i]), report
    )


# ---- for llama.cpp


def dense_twin(spec: ModelSpec) -> dict[str, Any]:
    """A Llama's config with as many weights: llama.cpp computes all of them, whatever they are."""
    ffn = spec.ffn_dim if spec.gated else -(-2 * spec.ffn_dim // 96) * 32  # three matrices instead of two
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": spec.dim, "intermediate_size": ffn, "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads, "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim, "vocab_size": spec.vocab_size, "rms_norm_eps": 1e-5,
        "max_position_embeddings": spec.max_context, "tie_word_embeddings": spec.tied_head,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def write_gguf(model: Model, path: Path, layers: int) -> bool:
    """Of as many layers. -> are they the model's own weights? (A dense Llama's; else its twin's.)"""
    own = model.pack.spec.architecture == "llama" and not model.pack.spec.sparse
    pack = model.pack
    if not own:
        shape = replace(model.shape, active=None)
        pack = written(shape, dense_twin(pack.spec), path.parent, "dense")
    to_gguf.write_gguf(repeated(pack, layers), path, overwrite=True)
    return own
