"""Every option of the spec: it changes the logits, natively as in the reference, on every instruction set.

A model with all kinds of tensors is random; `flips` says for each field of `ModelSpec` what else it may be.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from thermocline import _native
from thermocline.engine.decoder import bind, for_context, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.model import quant
from thermocline.model.spec import Latent, ModelSpec, RopeScaling
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import (
    F32,
    FFN,
    Batch,
    FFNStats,
    LatentMatrices,
    Layer,
    Linear,
    Norm,
    PerLayer,
    TokenInputs,
    Weights,
)

ISAS = _native.isa_levels()
TOKENS = 40
SPEC = ModelSpec(
    architecture="test",
    dim=64,
    ffn_dim=288,  # more than a chunk of neurons
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=37,
    max_context=64,
    norm="rms",
    norm_eps=1e-5,
    activation="relu",
)
YARN = RopeScaling(kind="yarn", factor=4.0, original_context=64, attention_factor=1.2, beta_fast=2.0)
LONG = RopeScaling(kind="longrope", original_context=64, short_factors=(1.5,) * 8, long_factors=(3.0,) * 8)
LLAMA3 = RopeScaling(4.0, 1.0, 4.0, 16)
WINDOW = replace(SPEC, sliding_window=9)
KINDS = replace(WINDOW, window_layers=(1,))
NORMED = replace(SPEC, qk_norm=True)
TUNED = replace(SPEC, rope_layers=(1,), attention_tuning=0.3, attention_tuning_span=3)
CLAMPED = replace(SPEC, activation="swiglu_oai", swiglu_limit=0.5, swiglu_alpha=1.702)
SMALL = Latent(kv_rank=37, nope=13, rope=8, value=11, q_rank=19)  # that no vector divides
LATENT = replace(
    SPEC, activation="silu", n_kv_heads=1, head_dim=45, rotary_dim=8, attention_scale=0.2, latent=SMALL
)
# field -> (a spec, what the field may be instead)
FLIPS: dict[str, tuple[ModelSpec, Any]] = {
    "norm": (SPEC, "layer"),
    "norm_eps": (SPEC, 0.5),
    "activation": (SPEC, "relu2"),
    "activation_threshold": (replace(SPEC, activation="fatrelu"), 0.4),
    "up_activation": (SPEC, "relu"),
    "gated": (SPEC, False),
    "position": (SPEC, "learned"),
    "rope_theta": (SPEC, 100.0),
    "rope_scaling": (SPEC, YARN),
    "sliding_window": (SPEC, 9),
    "tied_head": (SPEC, True),
    "norm_order": (SPEC, "sandwich"),
    "final_norm": (SPEC, False),
    "parallel": (SPEC, True),
    "embed_dim": (SPEC, 32),
    "embed_scale": (SPEC, 3.0),
    "residual_scale": (SPEC, 0.3),
    "logit_scale": (SPEC, 0.3),
    "logit_softcap": (SPEC, 2.0),
    "attention_scale": (SPEC, 0.6),
    "attention_softcap": (SPEC, 0.7),
    "qk_norm": (SPEC, True),
    "qk_norm_whole": (NORMED, True),
    "qk_norm_last": (NORMED, True),
    "qk_norm_each": (NORMED, True),
    "qk_norm_turned": (replace(NORMED, rope_layers=(1,)), True),
    "window_chunked": (WINDOW, True),
    "attention_tuning": (TUNED, 0.9),
    "attention_tuning_span": (TUNED, 7),
    "sub_norms": (SPEC, True),
    "rotary_dim": (SPEC, 8),
    "v_norm": (SPEC, True),
    "window_layers": (WINDOW, (1,)),
    "full_head_dim": (KINDS, 32),
    "full_kv_heads": (KINDS, 1),
    "values_are_keys": (SPEC, True),
    "kv_shared_layers": (SPEC, 1),
    "rope_layers": (SPEC, (0,)),
    "local_rope_theta": (WINDOW, 50.0),
    "attention_sinks": (SPEC, True),
    "swiglu_alpha": (CLAMPED, 3.0),
    "swiglu_limit": (CLAMPED, 0.2),
    "layer_scale": (SPEC, True),
    "per_layer_dim": (SPEC, 8),
    "latent": (LATENT, replace(SMALL, norm_eps=0.5)),
}
MORE = {
    "post": (SPEC, replace(SPEC, norm_order="post")),
    "after": (SPEC, replace(SPEC, norm_order="after")),
    "sub_norms, dense": (replace(SPEC, activation="silu"), replace(SPEC, activation="silu", sub_norms=True)),
    "sub_norms, ungated": (replace(SPEC, gated=False), replace(SPEC, gated=False, sub_norms=True)),
    "sub_norms, dReLU": (SPEC, replace(SPEC, up_activation="relu", sub_norms=True)),
    "latent, without q_b": (LATENT, replace(LATENT, latent=replace(SMALL, q_rank=None))),
    "latent, many heads": (LATENT, replace(LATENT, n_heads=37)),
    "linear": (SPEC, replace(SPEC, rope_scaling=RopeScaling(kind="linear", factor=3.0))),
    "proportional": (SPEC, replace(SPEC, rope_scaling=RopeScaling(kind="proportional", share=0.25))),
    "longrope": (SPEC, replace(SPEC, rope_scaling=LONG)),
    "longrope, long": (SPEC, for_context(replace(SPEC, rope_scaling=LONG), 65)),
    "two kinds of layers": (
        SPEC,
        replace(
            KINDS,
            n_layers=4,
            window_layers=(0, 2),
            full_head_dim=32,
            full_kv_heads=1,
            values_are_keys=True,
            kv_shared_layers=2,
            v_norm=True,
            qk_norm=True,
            layer_scale=True,
            per_layer_dim=8,
        ),
    ),
    "all at once": (
        SPEC,
        replace(
            WINDOW, qk_norm=True, norm_order="sandwich", attention_softcap=1.0, rotary_dim=8, sub_norms=True
        ),
    ),
}
PAIRS = {**{k: (s, replace(s, **{k: v})) for k, (s, v) in FLIPS.items()}, **MORE}
SIZES = {"dim", "ffn_dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_context"}
ELSEWHERE = {"architecture", "bos_id", "eos_ids"}  # a label; what requests begin and end with
# tests/model/test_mixtures.py, tests/ops/test_moe.py
EXPERTS = {
    "n_experts",
    "n_experts_active",
    "router",
    "router_input",
    "shared_dim",
    "shared_gate",
    "shared_norms",
    "dense_layers",
    "dense_dim",
}
# tests/model/test_recurrent.py
LAYERS = {"mixers", "recurrent", "no_ffn", "attention_gate"}
# tests/model/test_embedding.py
VECTORS = {
    "pooling",
    "unit_vectors",
    "matryoshka",
    "score_tokens",
    "bidirectional",
    "embed_norm",
    "token_types",
    "classifies",
}


def first_rows(s: ModelSpec) -> int:
    """Return the rows of attention's first matrix."""
    la = s.latent
    return s.qkv_rows if la is None else (la.q_rank or s.n_heads * (la.nope + la.rope)) + s.head_dim


def random_weights(spec: ModelSpec) -> Weights:
    """The same numbers for the same tensor, whatever the options."""

    def values(name: str, *shape: int) -> F32:
        out: F32 = np.random.default_rng([*name.encode()]).standard_normal(shape, dtype=np.float32)
        return out

    def matrix(name: str, rows: int, cols: int) -> F32:
        return values(name, rows, cols) * np.float32(1 / np.sqrt(cols))

    def norm(name: str, size: int = spec.dim) -> Norm:
        weight = 1 + np.float32(0.2) * values(name, size)
        return Norm(weight, values(name + "b", size) if spec.norm == "layer" else None)

    def latent(a: str, la: Latent) -> LatentMatrices:
        heads = spec.n_heads
        return LatentMatrices(
            kv_norm=norm(a + "kvn", la.kv_rank).weight,
            k_b=matrix(a + "kb", heads * la.kv_rank, la.nope),
            v_b=matrix(a + "vb", heads * la.value, la.kv_rank),
            q_norm=norm(a + "qan", la.q_rank).weight if la.q_rank else None,
            q_b=matrix(a + "qb", heads * (la.nope + la.rope), la.q_rank) if la.q_rank else None,
        )

    def layer(i: int) -> Layer:
        a, s = f"{i}.", spec
        shape = s.attention(i)
        assert shape is not None
        sandwich, d, f, q = s.norms_after, s.dim, s.ffn_dim, shape.context
        qkv, stores = matrix(a + "qkv", shape.qkv_rows, d), len(shape.projections) > 1
        if len(shape.projections) == 2:
            qkv = np.concatenate([qkv, qkv[q:]])
        down = matrix(a + "down", f, d) * np.float32(0.5)
        return Layer(
            attn_norm=norm(a + "an") if s.norms_before else None,
            qkv=Linear(qkv if s.latent is None else matrix(a + "qkv", first_rows(s), d), None),
            latent=None if s.latent is None else latent(a, s.latent),
            attn_out=Linear(matrix(a + "out", d, q), values(a + "ob", d)),
            ffn_norm=norm(a + "fn") if s.norms_before else None,
            experts=(
                FFN.whole(
                    gate=Linear(matrix(a + "gate", f, d), None),
                    up=matrix(a + "up", f, d) if s.gated else None,
                    down=down if s.sparse else np.ascontiguousarray(down.T),
                    down_bias=values(a + "db", d),
                    bundles=s.sparse,
                ),
            ),
            q_norm=norm(a + "qn", s.qk_norm_size(s.n_heads, shape.head_dim)).weight
            if s.qk_norms(i)
            else None,
            k_norm=norm(a + "kn", s.qk_norm_size(s.n_kv_heads, shape.head_dim)).weight
            if s.qk_norms(i) and stores
            else None,
            attn_sub_norm=norm(a + "as", q) if s.sub_norms else None,
            ffn_sub_norm=norm(a + "fs", f) if s.sub_norms else None,
            attn_post_norm=norm(a + "ap") if sandwich else None,
            ffn_post_norm=norm(a + "fp") if sandwich else None,
            sinks=3 * values(a + "sinks", s.n_heads) if s.attention_sinks else None,
            scale=0.5 if s.layer_scale else 1.0,
            per_layer=PerLayer(
                matrix(a + "pg", s.per_layer_dim, d), matrix(a + "pd", d, s.per_layer_dim), norm(a + "pn")
            )
            if s.per_layer_dim
            else None,
        )

    width, given = spec.embed_dim or spec.dim, spec.n_layers * spec.per_layer_dim
    embed = values("embed", spec.vocab_size, width)
    return Weights(
        embed=embed,
        pos_embed=values("pos", spec.max_context, spec.dim) if spec.position == "learned" else None,
        layers=tuple(layer(i) for i in range(spec.n_layers)),
        out_norm=norm("on") if spec.final_norm else None,
        head=Linear(embed if spec.tied_head else matrix("head", spec.vocab_size, width), None),
        project_in=matrix("pi", spec.dim, width) if spec.embed_dim else None,
        project_out=matrix("po", width, spec.dim) if spec.embed_dim else None,
        token_inputs=TokenInputs(
            values("table", spec.vocab_size, given),
            matrix("tp", given, spec.dim),
            norm("tn", spec.per_layer_dim).weight,
        )
        if given
        else None,
    )


def natively(part: Any) -> Any:
    """Every matrix as a native one."""
    if isinstance(part, np.ndarray) and part.ndim == 2:
        arena = _native.Arena(part.nbytes)
        arena.write(0, np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        return _native.Matrix(
            arena, 0, quant.FORMATS["f32"].id, part.shape[0], part.shape[1], 4 * part.shape[1]
        )
    if isinstance(part, tuple):
        return tuple(map(natively, part))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return type(part)(*(natively(getattr(part, f.name)) for f in dataclasses.fields(part)))
    return part


def logits(
    spec: ModelSpec, weights: Weights, ops: Any, chunk: int = TOKENS, *, sparsity: str = "exact"
) -> F32:
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, TOKENS).astype(np.int32)
    model, kv, out = bind(spec, weights, ops), KVCache(spec, blocks_for(TOKENS)), []
    table = np.arange(blocks_for(TOKENS), dtype=np.int32)[None]
    for start in range(0, TOKENS, chunk):
        at = np.arange(start, min(TOKENS, start + chunk), dtype=np.int32)
        rows = np.arange(len(at), dtype=np.int32)
        batch = Batch(ids[at], at, np.zeros_like(rows), table, rows)
        out.append(forward(model, kv, batch, ops, sparsity=sparsity, stats=FFNStats()))
    return np.concatenate(out)


def nmse(y: F32, truth: F32) -> float:
    return float(((y.astype(np.float64) - truth) ** 2).sum() / (truth.astype(np.float64) ** 2).sum())


def test_every_field_is_flipped_or_tested_elsewhere() -> None:
    fields = {f.name for f in dataclasses.fields(ModelSpec)}
    assert set(FLIPS) == fields - SIZES - ELSEWHERE - EXPERTS - LAYERS - VECTORS


@pytest.mark.parametrize("name", PAIRS)
def test_an_option_changes_the_logits(name: str) -> None:
    before, after = (logits(s, random_weights(s), reference) for s in PAIRS[name])
    assert nmse(after, before) > 1e-4


@pytest.mark.parametrize("field", ["factor", "low_freq_factor", "high_freq_factor", "original_context"])
def test_a_field_of_llama_3s_scaling_changes_the_logits(field: str) -> None:
    assert_scaling_changes(LLAMA3, field, {"low_freq_factor": 2.0, "high_freq_factor": 8.0}.get(field, 7))


@pytest.mark.parametrize(
    "field", ["factor", "original_context", "attention_factor", "beta_fast", "beta_slow", "truncate"]
)
def test_a_field_of_yarns_scaling_changes_the_logits(field: str) -> None:
    assert_scaling_changes(
        YARN, field, {"truncate": False, "beta_slow": 0.1, "beta_fast": 1.5}.get(field, 3.0)
    )


def assert_scaling_changes(scaling: RopeScaling, field: str, value: Any) -> None:
    specs = (
        replace(SPEC, rope_theta=100.0, rope_scaling=s) for s in (scaling, replace(scaling, **{field: value}))
    )
    before, after = (logits(s, random_weights(s), reference) for s in specs)
    assert nmse(after, before) > 1e-7


OTHERS = [pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS if isa != _native.isa()]


@pytest.mark.parametrize("isa", [_native.isa(), *OTHERS])
@pytest.mark.parametrize("name", PAIRS)
def test_an_option_is_native_and_changes_no_invariant(name: str, isa: str) -> None:
    """Equal to the reference; the same bits for chunks, threads, and without skipping."""
    spec = PAIRS[name][1]
    weights = random_weights(spec)
    native = natively(weights)
    y = logits(spec, native, CpuOps(1, isa))
    assert nmse(y, logits(spec, weights, reference)) <= 1e-6
    for threads, chunk, sparsity in ((3, 1, "exact"), (2, 3, "off"), (1, 7, "off"), (2, TOKENS, "off")):
        again = logits(spec, native, CpuOps(threads, isa), chunk, sparsity=sparsity)
        assert np.array_equal(again, y), (threads, chunk, sparsity)
