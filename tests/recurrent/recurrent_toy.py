"""Random models of three layers, some with states, in numpy and in arenas."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from test_engine import Lab
from test_mixers import mixer
from toy import SPEC, random_weights

from thermocline import _native
from thermocline.model import quant
from thermocline.model.spec import ModelSpec, Recurrent
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, Weights

DELTANET = Recurrent(conv=4, heads=4, head_dim=8, groups=2, state=8)
SPECS = {
    kind: dataclasses.replace(SPEC, n_layers=3, mixers=(kind, "attention", kind), recurrent=r)
    for kind, r in (("deltanet", DELTANET), ("mamba2", DELTANET), ("conv", Recurrent(conv=3)))
}
SPECS["alone"] = dataclasses.replace(  # layers of one half each
    SPECS["mamba2"], mixers=("mamba2", "attention", "none"), no_ffn=(0, 1)
)
MATRICES = {"qkv", "z", "beta", "alpha", "into", "out"}


def weights_of(spec: ModelSpec) -> Weights:
    made = random_weights(spec)

    def matrix(layer: int, seed: int, rows: int, cols: int) -> F32:
        noise: F32 = np.random.default_rng(7 * layer + seed).standard_normal((rows, cols), dtype=np.float32)
        return noise / np.float32(np.sqrt(cols))

    layers = []
    for i, layer in enumerate(made.layers):
        kind = spec.mixer(i)
        if kind != "attention":
            norm = None if kind == "none" else layer.attn_norm
            one = dataclasses.replace(spec, mixers=(kind,), n_layers=1)
            held = None if kind == "none" else mixer(one, functools.partial(matrix, i))
            layer = dataclasses.replace(layer, qkv=None, attn_out=None, attn_norm=norm, mixer=held)
        if i in spec.no_ffn:
            layer = dataclasses.replace(layer, experts=(), ffn_norm=None)
        layers.append(layer)
    return dataclasses.replace(made, layers=tuple(layers))


def in_arenas(part: Any, format: str) -> Any:
    """The same weights for `ops.cpu`; matrices in the format, or in f16 where rows are no whole blocks"""

    def matrix(x: Any) -> Any:
        f = quant.FORMATS[format if x.shape[1] % quant.FORMATS[format].block == 0 else "f16"]
        data = quant.encode(f.name, x)
        arena = _native.Arena(data.size)  # held by the matrix
        arena.write(0, data.reshape(-1))
        return _native.Matrix(arena, 0, f.id, x.shape[0], x.shape[1], data.shape[1])

    def walk(part: Any, inside: bool) -> Any:
        if isinstance(part, tuple):
            return tuple(walk(p, inside) for p in part)
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            return part
        changes = {}
        for f in dataclasses.fields(part):
            value, mixing = getattr(part, f.name), type(part).__name__ in ("DeltaNet", "Mamba2", "ShortConv")
            is_matrix = isinstance(value, np.ndarray) and value.ndim == 2
            if is_matrix and (not mixing or f.name in MATRICES):
                changes[f.name] = matrix(value)
            elif f.name != "router_copies":
                changes[f.name] = walk(value, mixing)
        return dataclasses.replace(part, **changes)

    return walk(part, False)


def recurrent_lab(kind: str, native: bool = True, format: str = "f32", threads: int = 2) -> Lab:
    spec = SPECS[kind]
    w = weights_of(spec)
    if not native:
        return Lab(reference, w, False, spec)
    return Lab(CpuOps(threads), in_arenas(w, format), True, spec)
