"""Readers of the config.json of dense families with LayerNorms. `model/families.py` has their table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import PLAIN_ACTIVATIONS, ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.spec import LIMITS, ModelSpec
from thermocline.model.tensor_map import Names, SourceSlice, TensorMap, grouped_rows, pairs, tensors

Read = tuple[ModelSpec, TensorMap]
_ALL = ("norm", "qkv", "attn_out", "ffn")


def starcoder2(keys: ConfigKeys, stop: Any) -> Read:
    """StarCoder 2: an ungated FFN, biases everywhere, and a window."""
    keys.with_defaults({"bos_token_id": 50256, "eos_token_id": 50256, "tie_word_embeddings": True})
    keys.with_defaults({"use_bias": True, "num_key_value_heads": 2})
    keys.require({"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True})
    for key in _STARCODER_UNUSED:
        keys.with_defaults({key: None}).raw(key)
    spec = read_spec(
        keys,
        stop,
        "starcoder2",
        norm="layer",
        norm_eps=keys.number("norm_epsilon", 0.0, 1.0),
        gated=False,
        sliding_window=keys.integer_or_none("sliding_window"),
    )
    names = Names(up="mlp.c_fc", down="mlp.c_proj")
    return spec, tensors(spec, names, _ALL if keys.flag("use_bias") else ("norm",))


# What transformers does not read either: older names, and how exact a softmax is.
_STARCODER_UNUSED = (
    "activation_function",
    "layer_norm_epsilon",
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
)


def stablelm(keys: ConfigKeys, stop: Any) -> Read:
    """StableLM 2: a gated FFN; the 12B has norms of each head's q and k, and its halves in parallel."""
    keys.with_defaults({"bos_token_id": 0, "eos_token_id": 0, "partial_rotary_factor": None})
    keys.with_defaults({"use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False})
    keys.require({"rotary_scaling_factor": 1.0})
    parallel, normed = keys.flag("use_parallel_residual"), keys.flag("qk_layernorm")
    spec = read_spec(
        keys,
        stop,
        "stablelm",
        partial=0.25,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 0.0, 1.0),
        parallel=parallel,
        qk_norm=normed,
        qk_norm_each=normed,
    )
    names = Names(ffn_norm="input_layernorm") if parallel else Names()
    made = tensors(spec, names, ("norm", "qkv") if keys.flag("use_qkv_bias") else ("norm",))
    for i in range(spec.n_layers if normed else 0):
        for letter, heads in (("q", spec.n_heads), ("k", spec.n_kv_heads)):
            each = f"model.layers.{i}.self_attn.{letter}_layernorm.norms"
            made.tensors[f"layers.{i}.{letter}_norm.weight"] = tuple(
                SourceSlice(f"{each}.{h}.weight", (spec.head_dim,)) for h in range(heads)
            )
            made.tensors.pop(f"layers.{i}.{letter}_norm.bias", None)
    return spec, made


def cohere(keys: ConfigKeys, stop: Any) -> Read:
    """Command R: one norm for both halves, which are in parallel; rope on neighbours; scaled logits."""
    keys.default_theta = 5e5
    keys.with_defaults({"use_qk_norm": False})
    return _cohere(keys, stop, "cohere", normed=keys.flag("use_qk_norm"))


def cohere2(keys: ConfigKeys, stop: Any) -> Read:
    """Command R7B and A: the same, with a window and rope in three of four layers, neither in the others."""
    keys.with_defaults({"sliding_window": 4096, "sliding_window_pattern": 4})
    keys.with_defaults({"_sliding_window_pattern": None, "layer_switch": None})
    keys.require(_COHERE2_ONLY)
    for key in ("_sliding_window_pattern", "layer_switch"):
        keys.raw(key)  # `layer_types` and the pattern say which layers
    n, window = keys.size("num_hidden_layers", "n_layers"), keys.integer_or_none("sliding_window")
    every = keys.integer("sliding_window_pattern")
    layers = windows(keys, n, [i for i in range(n) if (i + 1) % every])
    turned = None if window is None else layers
    near: Json = {} if window is None or layers == () else {"sliding_window": window, "window_layers": layers}
    return _cohere(keys, stop, "cohere2", normed=False, rope_layers=turned, **near)


_COHERE2_ONLY: Json = {
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": True,
    "use_qk_norm": False,
}


def _cohere(keys: ConfigKeys, stop: Any, architecture: str, *, normed: bool, **more: Any) -> Read:
    keys.with_defaults({"bos_token_id": 5, "eos_token_id": 255001, "tie_word_embeddings": True})
    keys.with_defaults({"logit_scale": 0.0625, "model_max_length": None})
    if (longer := keys.integer_or_none("model_max_length", *LIMITS["max_context"])) is not None:
        keys.replace("max_position_embeddings", longer)  # which Command R's config understates
    spec = read_spec(
        keys,
        stop,
        architecture,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 0.0, 1.0),
        parallel=True,
        logit_scale=keys.number("logit_scale", 1e-6, 1e6),
        qk_norm=normed,
        qk_norm_each=normed,
        **more,
    )
    made = tensors(spec, Names(ffn_norm="input_layernorm", neighbours=True), attention_biases(keys))
    for i in range(spec.n_layers if normed else 0):
        for letter, heads in (("q", spec.n_heads), ("k", spec.n_kv_heads)):
            shape = heads, spec.head_dim
            own = SourceSlice(f"model.layers.{i}.self_attn.{letter}_norm.weight", shape, flat=True)
            turned = replace(own, pick=pairs(heads * spec.head_dim, spec.head_dim))
            made.tensors[f"layers.{i}.{letter}_norm.weight"] = (turned,)
    return spec, made


def gpt_neox(keys: ConfigKeys, stop: Any) -> Read:
    """GPT-NeoX, Pythia: halves in parallel with a norm each, q, k and v of each head in turn."""
    keys.with_defaults({"bos_token_id": 0, "eos_token_id": 2, "attention_bias": True, "hidden_act": "gelu"})
    keys.with_defaults({"use_parallel_residual": True, "rotary_pct": None, "rotary_emb_base": None})
    keys.with_defaults({"partial_rotary_factor": None, "classifier_dropout": None})
    keys.raw("classifier_dropout")
    for ours, theirs in (("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")):
        if (value := keys.raw(theirs)) is not None:
            keys.replace(ours, value)
    spec = read_spec(
        keys,
        stop,
        "gptneox",
        partial=0.25,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 0.0, 1.0),
        gated=False,
        parallel=keys.flag("use_parallel_residual"),
    )
    biases = ("norm", "ffn", *attention_biases(keys))
    made = tensors(spec, _NEOX, biases, grouped_rows(spec))
    masks = (r".*\.attention\.(masked_)?bias", r".*\.attention\.rotary_emb\.inv_freq")  # of old files
    return spec, replace(made, ignored=(*made.ignored, *masks))


_NEOX = Names(
    root="gpt_neox.",
    embed="embed_in",
    out_norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    head="embed_out",
)


def phi(keys: ConfigKeys, stop: Any) -> Read:
    """Phi 1 and 2: one norm for both halves, which are in parallel; a part of each head turns; biases."""
    keys.with_defaults({"partial_rotary_factor": None, "hidden_act": "gelu_new"})
    keys.require({"qk_layernorm": False})
    spec = read_spec(
        keys,
        stop,
        "phi2",
        partial=0.5,
        norm="layer",
        norm_eps=keys.number("layer_norm_eps", 0.0, 1.0),
        activation=keys.activation("hidden_act", PLAIN_ACTIVATIONS),
        gated=False,
        parallel=True,
    )
    return spec, tensors(spec, _PHI, (*_ALL, "head"))


_PHI = Names(
    out_norm="final_layernorm",
    ffn_norm="input_layernorm",
    out="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
)
