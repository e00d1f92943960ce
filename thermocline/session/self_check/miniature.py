"""A miniature of a model: a small pack of random weights, with its kinds of layers and its formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_weights import WeightStatistics
from thermocline.model.spec import Latent, ModelSpec
from thermocline.model.tensors import TensorInfo, formats_in, optional_among
from thermocline.pack.writer import PackExtras, write_pack

if TYPE_CHECKING:
    from thermocline.pack.stored_model import StoredModel

# A width's rest by this stays, so that whole blocks stay whole and odd ends stay odd.
BLOCK = 256
COLUMNS, NEURONS = 512, 1024
FEW_COLUMNS, FEW_NEURONS, MANY_EXPERTS = 256, 256, 8  # where there are more experts than that
MOST_EXPERTS = 16  # unless a router chooses as many, or out of more groups: 512 (Qwen3-Next) take too long
TOKENS = 512
CONTEXT = 64  # positions that are looked up in a table


@dataclass(frozen=True)
class Miniature:
    """The description of a miniature. Equal ones say the same about a card."""

    spec: ModelSpec
    weight_format: str
    formats: Mapping[str, str]
    optional: tuple[str, ...]

    @classmethod
    def of(cls, model: StoredModel) -> Miniature:
        """Describe the miniature of a model: the first layer of each kind, in the formats that it has."""
        spec = model.spec
        every = {n: t for n, t in model.tensors.items() if ".predictor." not in n}
        chosen = _one_of_each_kind(spec, every)
        names = {n: renamed for n in every if (renamed := _renamed(n, chosen)) is not None}
        small = _small(spec, chosen)
        formats = formats_in({names[n]: t for n, t in every.items() if n in names})
        optional = optional_among(names.values(), small)
        return cls(small, model.weight_format, formats, tuple(optional))

    @property
    def label(self) -> str:
        """Return its name for a person, such as "llama, q4_0 and f32"."""
        return f"{self.spec.architecture}, {' and '.join(self.matrix_formats)}"

    @property
    def matrix_formats(self) -> list[str]:
        return sorted({*self.formats.values()} - {"f32"}) or ["f32"]

    def write(self, path: Path) -> None:
        """Write the pack. Raises the errors of `write_pack`."""
        weights = RandomWeights(
            WeightStatistics.of(self.spec, 0, None, "layers.0.gate.bias" in self.optional)
        )
        origin = ("random", "self-check", "0" * 32)
        extras = PackExtras(formats=dict(self.formats), optional=self.optional, origin=origin)
        write_pack(path, self.spec, self.weight_format, weights, extras)


def _one_of_each_kind(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> list[int]:
    """Return the first layer of each kind: of those that compute alike and are stored alike."""
    stored: dict[int, list[tuple[str, str, str | None]]] = {}
    for name, t in tensors.items():
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            stored.setdefault(int(layer), []).append((part, t.format, t.down_format))
    first: dict[object, int] = {}
    for i in range(spec.n_layers):
        kind = (
            spec.mixer(i), spec.window(i), spec.turns(i), spec.ffn(i), spec.kv_layer(i) == i,
            tuple(sorted(stored.get(i, []), key=str)),
        )  # fmt: skip
        first.setdefault(kind, i)
    return sorted(first.values())


def _renamed(name: str, chosen: list[int]) -> str | None:
    """Return a tensor's name in the miniature; None: its layer is not there."""
    if not name.startswith("layers."):
        return name
    head, layer, part = name.split(".", 2)
    return f"{head}.{chosen.index(int(layer))}.{part}" if int(layer) in chosen else None


def _small(spec: ModelSpec, chosen: list[int]) -> ModelSpec:
    """Return the spec of those layers, with few columns, neurons, experts and tokens; heads stay."""

    def among(layers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at for at, i in enumerate(chosen) if i in layers)

    many = spec.n_experts > MANY_EXPERTS
    columns, neurons = (FEW_COLUMNS, FEW_NEURONS) if many else (COLUMNS, NEURONS)
    return replace(
        spec,
        n_layers=len(chosen),
        dim=_cut(spec.dim, columns),
        ffn_dim=_cut(spec.ffn_dim, neurons),
        n_experts=_experts(spec),
        dense_dim=_cut(spec.dense_dim, NEURONS),
        shared_dim=_cut(spec.shared_dim, NEURONS),
        latent=_latent(spec.latent, columns),
        vocab_size=min(spec.vocab_size, TOKENS),
        max_context=min(spec.max_context, CONTEXT) if spec.position == "learned" else spec.max_context,
        bos_id=None,
        eos_ids=(),
        window_layers=None if spec.window_layers is None else among(spec.window_layers),
        rope_layers=None if spec.rope_layers is None else among(spec.rope_layers),
        dense_layers=among(spec.dense_layers),
        no_ffn=among(spec.no_ffn),
        mixers=tuple(spec.mixers[i] for i in chosen) if spec.mixers else (),
        kv_shared_layers=sum(spec.kv_layer(i) != i for i in chosen),
    )


def _cut(n: int, most: int) -> int:
    return n if n < most + BLOCK else most + n % BLOCK


def _experts(spec: ModelSpec) -> int:
    """Return how many experts are left: as many in each group, and more than are chosen."""
    groups, kept = spec.router.groups, spec.router.groups_kept
    each = max(MOST_EXPERTS // groups, -(-2 * spec.n_experts_active // kept))
    return min(spec.n_experts, groups * each)


def _latent(latent: Latent | None, columns: int) -> Latent | None:
    """Return latents whose queries have fewer columns; the kernels see what keys and values have."""
    if latent is None or latent.q_rank is None:
        return latent
    return replace(latent, q_rank=_cut(latent.q_rank, columns))
