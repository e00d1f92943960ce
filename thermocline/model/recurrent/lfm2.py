"""LFM2: short convolutions in most layers, attention in the others (arXiv 2511.23404)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import ConfigKeys, read_spec
from thermocline.model.recurrent.layers import convolution, kinds, whole, with_mixers
from thermocline.model.spec import ModelSpec, Recurrent, Router
from thermocline.model.tensor_map import Names, TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]
_KINDS = {"conv": "conv", "full_attention": "attention"}
_DEFAULTS: Json = {
    "tie_word_embeddings": True,
    "tie_embedding": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "conv_L_cache": 3,
    "full_attn_idxs": None,
    "layer_types": None,
    "norm_eps": 1e-5,
}
# Of training, of code, and the model's size under other names.
_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "conv_L_cache_state"),
    *("use_pos_enc", "num_heads", "block_ff_dim", "hidden_act", "theta"),
)
_NAMES = Names(
    out_norm="embedding_norm",
    attn_norm="operator_norm",
    ffn_norm="ffn_norm",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    out="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    dense=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
)
_MIXTURE = replace(
    _NAMES,
    gate="feed_forward.experts.{}.w1",
    up="feed_forward.experts.{}.w3",
    down="feed_forward.experts.{}.w2",
    router="feed_forward.gate",
    selection_bias="feed_forward.expert_bias",
)


def lfm2(keys: ConfigKeys, stop: Any) -> Read:
    """LFM2, dense. Its config says a width that its code may still change."""
    adjusted = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    keys.with_defaults({**adjusted, "block_ff_dim": None})
    if keys.raw("block_ff_dim") is not None:  # the older name, which has priority
        keys.replace("intermediate_size", keys.raw("block_ff_dim"))
    width, multiple = keys.size("intermediate_size", "ffn_dim"), keys.integer("block_multiple_of", 1, 1 << 20)
    factor = keys.number_or_none("block_ffn_dim_multiplier", 1e-3, 1e3)
    if keys.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        width = width if factor is None else multiple * -(-int(factor * width) // multiple)
    return _read(keys, stop, "lfm2", _NAMES, ffn_dim=width)


def lfm2_moe(keys: ConfigKeys, stop: Any) -> Read:
    """LFM2's mixture: sigmoids with a bias for the choice; the first layers have none."""
    keys.with_defaults({"use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0})
    keys.with_defaults({"num_dense_layers": 2})
    keys.same("num_experts", "num_local_experts")
    n, summed = keys.size("num_hidden_layers", "n_layers"), keys.flag("norm_topk_prob")
    dense = range(min(n, keys.integer("num_dense_layers", 0)))
    width = keys.size("intermediate_size", "dense_dim")
    router = Router(
        score="sigmoid",
        weights="normalised" if summed else "score",
        epsilon=1e-6 if summed else 0.0,
        scale=keys.number("routed_scaling_factor", 1e-6, 1e6),
        selection_bias=keys.flag("use_expert_bias"),
    )
    more: Json = {"dense_layers": tuple(dense), "dense_dim": width} if dense else {}
    return _read(
        keys,
        stop,
        "lfm2-moe",
        _MIXTURE,
        n_experts=keys.size("num_experts", "n_experts"),
        n_experts_active=keys.size("num_experts_per_tok", "n_experts_active"),
        ffn_dim=keys.size("moe_intermediate_size", "ffn_dim"),
        router=router,
        **more,
    )


def _read(keys: ConfigKeys, stop: Any, architecture: str, names: Names, **more: Any) -> Read:
    keys.with_defaults(_DEFAULTS)
    keys.require({"conv_bias": False})
    keys.default_theta = 1e6
    for key in _UNUSED:
        keys.with_defaults({key: None}).raw(key)
    if keys.raw("tie_embedding") is not None:  # the older name, which has priority
        keys.replace("tie_word_embeddings", keys.flag("tie_embedding"))
    n, attends = keys.size("num_hidden_layers", "n_layers"), keys.raw("full_attn_idxs")
    attends = range(n) if attends is None else keys.indices("full_attn_idxs")
    mixers = kinds(keys, "layer_types", _KINDS, ["attention" if i in attends else "conv" for i in range(n)])
    if len(mixers) != n:
        raise keys.bad("layer_types", f"must name {n} layers")
    spec = read_spec(
        keys,
        stop,
        architecture,
        norm_eps=keys.number("norm_eps", 0.0, 1.0),
        activation="silu",
        qk_norm=True,
        **with_mixers(mixers, Recurrent(conv=keys.integer("conv_L_cache", 2, 16))),
        **more,
    )
    made = tensors(spec, names)
    for i in range(n):
        m, b, d = f"layers.{i}.mixer", f"model.layers.{i}.conv", spec.dim
        if spec.mixer(i) == "conv" and spec.recurrent is not None:
            made.tensors[f"{m}.in.weight"] = whole(f"{b}.in_proj.weight", 3 * d, d)
            made.tensors[f"{m}.conv.weight"] = convolution(f"{b}.conv.weight", d, spec.recurrent.conv)
            made.tensors[f"{m}.out.weight"] = whole(f"{b}.out_proj.weight", d, d)
    return spec, made
