"""A recurrent layer's tensors and kinds, as the readers beside share them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from thermocline.files.bounded import Json
from thermocline.model.hf_config import ConfigKeys
from thermocline.model.spec import RECURRENT, ModelSpec, Recurrent
from thermocline.model.tensor_map import SourceSlice

Slices = dict[str, tuple[SourceSlice, ...]]
_NO_POSITIONS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def kinds(keys: ConfigKeys, key: str, known: Mapping[str, str], default: Sequence[str]) -> tuple[str, ...]:
    """Return each layer's mixer, from a list of names that `known` translates. `default`: translated too."""
    value = keys.raw(key)
    if value is None:
        return tuple(default)
    if (
        not isinstance(value, list)
        or not value
        or any(not isinstance(v, str) or v not in known for v in value)
    ):
        raise keys.bad(key, f"must be a list of {', '.join(known)}")
    return tuple(known[v] for v in value)


def with_mixers(mixers: tuple[str, ...], sizes: Recurrent) -> Json:
    """Return the spec's fields that say these layers."""
    if all(kind == "attention" for kind in mixers):
        return {}
    return {"mixers": mixers, "recurrent": sizes if set(mixers) & set(RECURRENT) else None}


def without_positions(keys: ConfigKeys) -> Json:
    """Return the spec's fields of a model whose attention has no positions, and ignore keys of rope."""
    for key in _NO_POSITIONS:
        keys.with_defaults({key: None}).raw(key)
    return {"rope_theta": 10000.0, "rope_layers": ()}


def whole(name: str, *shape: int) -> tuple[SourceSlice, ...]:
    return (SourceSlice(name, shape),)


def convolution(name: str, channels: int, width: int) -> tuple[SourceSlice, ...]:
    """Return the weights of a convolution of each channel by itself."""
    return (SourceSlice(name, (channels, 1, width), flat=True),)


def mamba2(spec: ModelSpec, ours: str, theirs: str) -> Slices:
    """Return a Mamba-2's tensors."""
    r = spec.recurrent
    assert r is not None
    m, heads = f"{ours}.mixer", r.heads
    out: Slices = {
        f"{m}.in.weight": whole(f"{theirs}.in_proj.weight", r.inner + r.channels + heads, spec.dim),
        f"{m}.out.weight": whole(f"{theirs}.out_proj.weight", spec.dim, r.inner),
        f"{m}.conv.weight": convolution(f"{theirs}.conv1d.weight", r.channels, r.conv),
        f"{m}.decay": (SourceSlice(f"{theirs}.A_log", (heads,), decays=True),),
        f"{m}.dt_bias": whole(f"{theirs}.dt_bias", heads),
        f"{m}.skip": whole(f"{theirs}.D", heads),
        f"{m}.norm.weight": whole(f"{theirs}.norm.weight", r.inner),
    }
    if r.conv_bias:
        out[f"{m}.conv.bias"] = whole(f"{theirs}.conv1d.bias", r.channels)
    return out


def unbounded_steps(keys: ConfigKeys) -> None:
    """Refuse limits of Mamba-2's time steps. Numbers that weights were initialised with are ignored."""
    limit = keys.with_defaults({"time_step_limit": None}).raw("time_step_limit")
    if limit is not None and limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise keys.unsupported("time_step_limit", "is not supported")
    for key in ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"):
        keys.with_defaults({key: None}).raw(key)
