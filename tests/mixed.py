"""Tiny random packs whose tensors have formats of their own, made with numpy alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from toy import SPEC

from thermocline import _native
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32, Batch, FFNStats
from thermocline.pack.pack import Pack
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.session.weights import LoadedWeights

NEURONS = 512
BASE = replace(
    SPEC, dim=256, ffn_dim=NEURONS, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=32, max_context=512
)
SPECS = {
    "dense": replace(BASE, activation="silu", tied_head=True),
    "relu": BASE,
    "ungated": replace(BASE, gated=False),
    "drelu": replace(BASE, up_activation="relu"),
    "dense mixture": replace(BASE, activation="silu", n_experts=3, n_experts_active=2),
    "relu mixture": replace(BASE, n_experts=3, n_experts_active=2),
}


def k_mix(spec: ModelSpec) -> dict[str, str]:
    """As llama.cpp's Q4_K_M: v and down are finer in some layers. In the last, a mix of everything."""
    last = f"layers.{spec.n_layers - 1}"
    return {
        "layers.0.v.weight": "q6_k", "layers.0.down.weight": "q6_k", "layers.0.down": "q6_k",
        "head.weight": "q6_k",
        f"{last}.q.weight": "q8_0", f"{last}.k.weight": "q5_0", f"{last}.v.weight": "f16",
        f"{last}.gate.weight": "q5_k", f"{last}.up.weight": "q3_k", f"{last}.up": "q3_k",
        f"{last}.down.weight": "iq4_nl", f"{last}.down": "mxfp4",
    }  # fmt: skip


@functools.lru_cache(maxsize=8)
def _values(name: str, rows: int, columns: int) -> F32:
    rng = np.random.default_rng(_native.crc32c(name.encode()))
    made: F32 = rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(np.sqrt(columns))
    return made


class Source:
    """Rows that depend on the tensor's name alone."""

    def __init__(self, spec: ModelSpec) -> None:
        s = self.spec = spec
        neurons, inner = s.n_experts * s.ffn_dim, s.n_heads * s.head_dim
        dense_down = (s.n_experts * s.dim, s.ffn_dim)
        self.shapes = {
            "embed.weight": (s.vocab_size, s.dim), "head.weight": (s.vocab_size, s.dim),
            "qkv.weight": (s.qkv_rows, s.dim), "attn_out.weight": (s.dim, inner),
            "router.weight": (s.n_experts, s.dim), "gate.weight": (neurons, s.dim),
            "up.weight": (neurons, s.dim), "up": (neurons, s.dim), "down": (neurons, s.dim),
            "down.weight": dense_down, "qkv.bias": (1, s.qkv_rows),
        }  # fmt: skip

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        shape = self.shapes.get(name.split(".", 2)[-1] if name.startswith("layers.") else name)
        if shape is None:
            return np.ones(last - first, np.float32)  # norms
        found = _values(name, *shape)
        return found[0, first:last] if name.endswith(".bias") else found[first:last]


def pack_of(
    path: Path, kind: str | ModelSpec, formats: Mapping[str, str] | None = None, weight_format: str = "q4_k"
) -> Pack:
    """`kind`: of `SPECS`, or a spec; `formats`: as `expected_tensors` takes them; None: `k_mix`."""
    spec = SPECS[kind] if isinstance(kind, str) else kind
    formats = k_mix(spec) if formats is None else formats
    biases = [f"layers.{i}.qkv.bias" for i in range(spec.n_layers)]
    write_pack(path, spec, weight_format, Source(spec), PackExtras(formats=formats, optional=biases))
    return Pack.open(path)


def logits(spec: ModelSpec, loaded: LoadedWeights[Any], ids: Sequence[int], chunk: int, sparsity: str) -> F32:
    """Of every position, `chunk` tokens at a time."""
    model, kv, out = bind(spec, loaded.weights, loaded.ops), KVCache(spec, blocks_for(len(ids))), []
    table = np.arange(blocks_for(len(ids)), dtype=np.int32)[None]
    for start in range(0, len(ids), chunk):
        at = np.arange(start, min(len(ids), start + chunk), dtype=np.int32)
        rows = np.arange(len(at), dtype=np.int32)
        batch = Batch(np.array(ids, np.int32)[at], at, np.zeros_like(at), table, rows)
        out.append(forward(model, kv, batch, loaded.ops, sparsity=sparsity, stats=FFNStats()))
    return np.concatenate(out)
