"""A mixture's profile: how often each layer's experts are chosen over text, and a bounded trace of choices.

It is a sidecar: `routes.safetensors` in a pack, `MODEL.gguf.routes.safetensors` beside a GGUF that runs in
place (docs/internals/pack.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.pack import sidecar

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec
    from thermocline.pack.stored_model import StoredModel

I64 = NDArray[np.int64]
U16 = NDArray[np.uint16]

ROUTES, KIND = "routes.safetensors", "routes"
AGAIN = "thermocline profile MODEL --corpus FILES"


@dataclass(frozen=True)
class RouteProfile:
    """The experts that a text's tokens chose, by layer with a router. `traced`: of some of its passages."""

    tokens: int
    corpus: str  # sha256 of the token ids and where they were cut
    counts: Mapping[int, I64]  # [experts]: tokens that chose each
    traced: Mapping[int, U16]  # [tokens, experts a token takes], the best first

    @property
    def traced_tokens(self) -> int:
        return len(next(iter(self.traced.values())))


def routed_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers in which a token chooses experts."""
    return tuple(i for i in range(spec.n_layers) if spec.ffn(i).experts > 1)


def path_of(model: StoredModel) -> Path:
    """Return where a model's profile of routing is, or would be."""
    path = model.path
    return path / ROUTES if path.is_dir() else path.with_name(f"{path.name}.{ROUTES}")


def write_routes(model: StoredModel, profile: RouteProfile) -> Path:
    """Write a profile in the place of an older one, whole or not at all. Raises IOFailure."""
    facts = {"tokens": profile.tokens, "corpus": profile.corpus, "traced": profile.traced_tokens}
    arrays: dict[str, NDArray[Any]] = {}
    for i, counts in profile.counts.items():
        arrays |= {f"layers.{i}.counts": counts, f"layers.{i}.chosen": profile.traced[i]}
    shapes = {name: (a.dtype, a.shape) for name, a in arrays.items()}
    sidecar.replace(path_of(model), KIND, model.stamp[1], facts, shapes, arrays.values())
    return path_of(model)


def open_routes(model: StoredModel) -> RouteProfile | None:
    """Read a model's profile, or return None if it has none. BadFile: damaged, or of another model."""
    path = path_of(model)
    if not path.exists():  # the stamp of a GGUF takes a second
        return None
    found = sidecar.Sidecar.open(path, KIND, model.stamp[1], AGAIN)
    if found is None:
        return None
    try:
        return _read(found, model.spec)
    finally:
        found.close()


def _read(found: sidecar.Sidecar, spec: ModelSpec) -> RouteProfile:
    tokens, corpus, traced = (found.facts.get(key) for key in ("tokens", "corpus", "traced"))
    if type(tokens) is not int or type(traced) is not int or not 1 <= traced <= tokens:
        raise BadFile(f"{found.path}: tokens {quoted(tokens)} and traced {quoted(traced)} do not agree")
    if not isinstance(corpus, str):
        raise BadFile(f"{found.path}: corpus is {quoted(corpus)}, not a hash")
    counts, chosen = {}, {}
    for i in routed_layers(spec):
        counts[i] = found.read(f"layers.{i}.counts", "<i8", (spec.n_experts,))
        chosen[i] = found.read(f"layers.{i}.chosen", "<u2", (traced, spec.n_experts_active))
        c, each = counts[i], np.sort(chosen[i], axis=1)
        if c.min() < 0 or c.max() > tokens or c.sum() != tokens * spec.n_experts_active:
            raise BadFile(f"{found.path}: layers.{i}.counts are not those of {tokens} tokens")
        if each.max() >= spec.n_experts or (each[:, 1:] == each[:, :-1]).any():
            raise BadFile(f"{found.path}: layers.{i}.chosen names an expert twice, or one that is not there")
    return RouteProfile(tokens, corpus, counts, chosen)
