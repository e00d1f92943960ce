"""Make synthetic models: random packs with a real model's shape, written at the speed of the disk.

Quantised rows are made directly, without floats. Shapes are the config.json files in `bundled/shapes.json`,
which are read like any other.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_weights import (
    ACTIVE,
    ACTIVITIES,
    SKEW,
    SyntheticRouting,
    SyntheticSparsity,
    WeightStatistics,
)
from thermocline.errors import Unsupported, UsageError
from thermocline.files.bounded import Json, parse_json, read_small
from thermocline.model.families import MAX_CONFIG_BYTES, parse_config, read_config_json
from thermocline.model.mixes import formats_of, main_format
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import TensorMap
from thermocline.model.tensors import expected_tensors, place
from thermocline.pack.manifest import BLOCK_BYTES
from thermocline.pack.pack import Pack, Progress
from thermocline.pack.writer import PackExtras, write_pack

SHAPES = Path(__file__).parents[1] / "bundled" / "shapes.json"
# Models whose makers say how many of the chosen experts' neurons are active: (that share, a skew it allows).
TRAINED = dict.fromkeys(("smallthinker-4b", "smallthinker-21b"), (0.4, 0.55))  # arXiv 2507.20984
# How routers of trained models pick experts, fitted to a trace of each (docs/log/2026-11.md has both).
ROUTINGS = {r.name: r for r in (
    SyntheticRouting("qwen3-30b", slow=1.8, token=0.78),
    SyntheticRouting("gemma-4-26b", slow=1.7, token=0.84),
    SyntheticRouting("gpt-oss-120b", slow=1.0, token=0.8),
)}  # fmt: skip
GATE_BIAS = "layers.0.gate.bias"
TRUTH = "synth.npz"  # beside the pack's own files


def shapes() -> dict[str, Any]:
    """Return the known shapes: {name: config.json}."""
    return parse_json(read_small(SHAPES, MAX_CONFIG_BYTES), str(SHAPES))


def read_shape(
    shape: str, activation: str | None = None, layers: int | None = None
) -> tuple[str, ModelSpec, TensorMap]:
    """Return (name, spec, tensor map) of a known shape or a config.json, with so many layers if given.

    Raises UsageError for an unknown shape, and the errors of `parse_config`.
    """
    known = shapes()
    if shape in known:
        return shape, *parse_config(_cut(known[shape], layers), None, shape, activation)
    path = Path(shape)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        raise UsageError(f"{shape}: is neither a config.json nor a known shape; known: {', '.join(known)}")
    name = os.path.basename(os.path.dirname(os.path.realpath(path)))
    return name, *parse_config(_cut(read_config_json(path), layers), None, str(path), activation)


# Of a config: what each layer is, as a list of names or a text.
_KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")


def _cut(config: Json, layers: int | None) -> Json:
    """Return a config with so many layers, and lists about each as long; kinds begin anew behind the last."""
    if layers is None:
        return config
    kinds = {k: config[k] for k in _KINDS if isinstance(config.get(k), list | str) and config[k]}
    longer = {k: (v * -(-layers // len(v)))[:layers] for k, v in kinds.items()}
    n = config.get("num_hidden_layers")
    lists = {k: v[:layers] for k, v in config.items() if isinstance(v, list) and len(v) == n}
    return config | lists | longer | {"num_hidden_layers": layers}


def formats_named(name: str, spec: ModelSpec) -> tuple[str, dict[str, str]]:
    """Return (most matrices' format, all formats as `expected_tensors` takes them) of a mix or a format."""
    formats = formats_of(name, spec)
    return main_format(name, formats), formats


def sparsity_of(
    shape: str, activity: str, active: float | None, skew: float | None
) -> tuple[float | None, float | None]:
    """Return (active, skew) as `SyntheticModel.of` takes them: a trained activity has its own.

    Makers' figures (`TRAINED`) and given ones go before.
    """
    if (kind := ACTIVITIES.get(activity)) is None or (active is None and shape in TRAINED):
        return active, skew
    return kind.active if active is None else active, kind.skew if skew is None else skew


@dataclasses.dataclass(frozen=True)
class SyntheticModel:
    """A synthetic model before it is written: its name, its weights' statistics, its optional tensors."""

    label: str
    stats: WeightStatistics
    optional: tuple[str, ...]

    @classmethod
    def of(
        cls,
        shape: str,
        seed: int,
        active: float | None,
        skew: float | None,
        rank: int,
        hottest_first: bool = False,
        activation: str | None = None,
        layers: int | None = None,
    ) -> SyntheticModel:
        """Describe a synthetic model of a shape, with so many layers if given.

        `active` is the mean share of active neurons. None means that of `TRAINED`, or else `ACTIVE`, for a
        ReLU model and no sparsity for others; a number makes any model a ReLU model. `skew` None likewise.
        Raises Unsupported, and the errors of `read_shape` and `WeightStatistics.of`.
        """
        name, spec, tensor_map = read_shape(shape, activation, layers)
        if spec.embed_dim is not None:
            raise Unsupported(
                f"{name}: its embeddings have another width than its layers, which a synthetic model cannot; "
                "choose another shape"
            )
        if active is not None and not spec.sparse:
            spec = dataclasses.replace(spec, activation="relu", swiglu_alpha=1.0, swiglu_limit=0.0)
        mean, steep = TRAINED.get(shape, (ACTIVE, SKEW)) if active is None else (active, SKEW)
        steep = steep if skew is None else skew
        sparsity = SyntheticSparsity(mean, steep, rank, hottest_first) if spec.sparse else None
        known = expected_tensors(spec, "f32")
        optional = tuple(n for n in tensor_map.tensors if n in known and known[n].optional)
        said = {} if layers is None else {"layers": layers}
        said |= {"seed": seed, **(dataclasses.asdict(sparsity) if sparsity else {})}
        if not said.get("hottest_first"):
            said.pop("hottest_first", None)
        label = " ".join([name, *(f"{k} {v}" for k, v in said.items())])
        stats = WeightStatistics.of(spec, seed, sparsity, GATE_BIAS in optional)
        return cls(label, stats, optional)

    def planted(self, routing: str = "random", activity: str = "easy") -> SyntheticModel:
        """Return the model with one of `ROUTINGS` and of `ACTIVITIES`, where other than "random" and "easy".

        Raises Unsupported for a model without routers or another kind of gates, and UsageError.
        """
        s, said = self.stats, ""
        said += "" if routing == "random" else f" routing {routing}"
        said += "" if activity == "easy" else f" activity {activity}"
        if not said:
            return self
        stats = WeightStatistics.of(
            s.spec,
            s.seed,
            s.sparsity,
            GATE_BIAS in self.optional,
            ROUTINGS.get(routing),
            ACTIVITIES.get(activity),
        )
        return dataclasses.replace(self, label=self.label + said, stats=stats)

    def write(
        self,
        dst: str | os.PathLike[str],
        weight_format: str,
        formats: Mapping[str, str] | None = None,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write the pack. A ReLU model's pack also gets `TRUTH`: how often each neuron is meant to be active.

        `formats` are those of the matrices that have their own. Raises the errors of `write_pack`.
        """
        key = hashlib.blake2b(f"{self.label} {self.stats.spec}".encode(), digest_size=16).hexdigest()
        write_pack(
            dst,
            self.stats.spec,
            weight_format,
            RandomWeights(self.stats),
            PackExtras(formats=formats or {}, optional=self.optional, origin=("random", self.label, key)),
            overwrite=overwrite,
            progress=progress,
        )
        if self.stats.sparsity is not None:
            with open(Path(dst) / TRUTH, "wb") as f:
                np.savez(f, activity=self.stats.truth(), label=np.array(self.label))

    def unwritten(
        self, path: str | os.PathLike[str], weight_format: str, formats: Mapping[str, str] | None = None
    ) -> Pack:
        """Return the pack that `write` would write, under a name: with `RandomWeights` enough for a GGUF."""
        spec = self.stats.spec
        every = expected_tensors(spec, weight_format, formats)
        tensors, nbytes = place({n: t for n, t in every.items() if not t.optional or n in self.optional})
        none, origin = np.empty(0, np.uint32), {"kind": "random", "name": self.label, "hash": ""}
        return Pack(Path(path), spec, weight_format, tensors, BLOCK_BYTES, nbytes, none, origin, {})
