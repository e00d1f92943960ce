"""Readers of the config.json of Gemma 2, 3 and 4. `model/families.py` has their table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import PLAIN_ACTIVATIONS, ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.spec import ModelSpec, RopeScaling, Router
from thermocline.model.tensor_map import Names, TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]


def _gemma(keys: ConfigKeys, stop: Any, architecture: str, pattern: int, **more: Any) -> Read:
    """Gemma 2 and 3: norms around each half, stored as w - 1; scaled embeddings; windows in some layers."""
    keys.with_defaults(
        {
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        }
    )
    n, window = keys.size("num_hidden_layers", "n_layers"), keys.integer_or_none("sliding_window")
    layers = windows(keys, n, [i for i in range(n) if (i + 1) % pattern])
    seen: Json = {"sliding_window": window, "window_layers": layers}
    seen = {} if window is None or layers == () else seen
    spec = read_spec(
        keys,
        stop,
        architecture,
        activation=keys.activation("hidden_activation", PLAIN_ACTIVATIONS),
        norm_order="sandwich",
        embed_scale=math.sqrt(keys.size("hidden_size", "dim")),
        attention_scale=keys.number("query_pre_attn_scalar", 1e-3, 1e6) ** -0.5,
        attention_softcap=keys.number_or_none("attn_logit_softcapping", 1e-3, 1e6),
        logit_softcap=keys.number_or_none("final_logit_softcapping", 1e-3, 1e6),
        **seen,
        **more,
    )
    names = Names(ffn_norm="pre_feedforward_layernorm", norm_plus=1.0)
    return spec, tensors(spec, names, attention_biases(keys))


def gemma2(keys: ConfigKeys, stop: Any) -> Read:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    keys.with_defaults({"sliding_window": 4096, "query_pre_attn_scalar": 256, **caps, "hidden_act": None})
    keys.raw("hidden_act")  # an older name, which transformers ignores too
    keys.same("sliding_window", "sliding_window_size")
    return _gemma(keys, stop, "gemma2", 2)


# Those of the class: the configs of 4B, 12B and 27B, inside a wrapper, say only what differs.
_GEMMA3_SIZES: Json = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}


def gemma3(keys: ConfigKeys, stop: Any) -> Read:
    """Gemma 3's text model: qk-norm, five layers with a window to one without, and a rope for each kind."""
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "_sliding_window_pattern"))
    keys.with_defaults({"sliding_window": 4096, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6})
    keys.with_defaults({"rope_local_base_freq": 10000.0, **_GEMMA3_SIZES, **caps})
    pattern = keys.integer(
        "_sliding_window_pattern" if keys.raw("_sliding_window_pattern") else "sliding_window_pattern"
    )
    keys.default_theta = 1e6
    local, nested = keys.number("rope_local_base_freq", 1.0, 1e12), keys.raw("rope_parameters")
    if (
        isinstance(nested, dict) and "full_attention" in nested
    ):  # transformers 5: a rope for each kind of layer
        both = ConfigKeys(nested, f"{keys.name}: rope_parameters").with_defaults({"sliding_attention": None})
        near = both.group("sliding_attention")
        if near is not None:
            near.with_defaults({"rope_theta": 10000.0, "rope_type": "default"})
            local = near.number("rope_theta", 1.0, 1e12)
            if near.raw("rope_type") != "default":
                raise near.unsupported("rope_type", "is not supported for layers with a window")
            near.finish()
        keys.replace("rope_parameters", both.raw("full_attention"))
        both.finish()
    return _gemma(keys, stop, "gemma3", pattern, qk_norm=True, local_rope_theta=local)


_GEMMA4_DEFAULTS: Json = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "vocab_size_per_layer_input": 262144,
    "global_head_dim": None,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
}


def gemma4_unified(keys: ConfigKeys, stop: Any) -> Read:
    """Gemma 4 12B: images and sound come in without towers; its text model is 31B's, smaller."""
    return gemma4(keys, stop, inputs=0)


def gemma4(keys: ConfigKeys, stop: Any, inputs: int = 256) -> Read:
    """Gemma 4: two sizes of heads, normed values, a number for each layer.

    Beside that 26B has experts beside each FFN, and E2B and E4B bring rows of a table to each layer.
    """
    keys.with_defaults({**_GEMMA4_DEFAULTS, "hidden_size_per_layer_input": inputs})
    keys.require({"attention_bias": False})
    keys.same("moe_intermediate_size", "expert_intermediate_size")
    # "vision": between the parts of an image; text is causal.
    if keys.raw("use_bidirectional_attention") not in (None, False, "vision"):
        raise keys.unsupported("use_bidirectional_attention", "is not supported")
    n = keys.size("num_hidden_layers", "n_layers")
    near = windows(keys, n, [i for i in range(n) if (i + 1) % 6 and i < n - 1])
    if near is None or n - 1 in near:
        raise keys.bad("layer_types", "must end with full_attention")
    same_values = keys.flag("attention_k_eq_v")
    spec = read_spec(
        keys,
        stop,
        "gemma4",
        activation=keys.activation("hidden_activation", PLAIN_ACTIVATIONS),
        norm_order="sandwich",
        embed_scale=math.sqrt(keys.size("hidden_size", "dim")),
        attention_scale=1.0,
        logit_softcap=keys.number_or_none("final_logit_softcapping", 1e-3, 1e6),
        qk_norm=True,
        v_norm=True,
        sliding_window=keys.integer("sliding_window"),
        window_layers=near,
        values_are_keys=same_values,
        kv_shared_layers=keys.integer("num_kv_shared_layers", 0, n),
        layer_scale=True,
        **_full_heads(keys, [i for i in range(n) if i not in near], same_values),
        **_gemma4_ropes(keys),
        **_gemma4_ffn(keys, n),
        **_gemma4_inputs(keys),
    )
    return spec, tensors(spec, _GEMMA4 if spec.n_experts == 1 else _GEMMA4_MIXTURE)


def _full_heads(keys: ConfigKeys, layers: list[int], same_values: bool) -> Json:
    """Return the heads of layers without a window, which a config has in one of two spellings."""
    each, dim = keys.raw("per_layer_config"), keys.integer_or_none("global_head_dim")
    heads = keys.integer_or_none("num_global_key_value_heads")
    if each is not None:
        if not isinstance(each, dict) or set(each) != {str(i) for i in layers}:
            raise keys.bad("per_layer_config", "is not of the layers with full_attention")
        first = each[str(layers[0])]
        if not isinstance(first, dict) or any(own != first for own in each.values()):
            raise keys.unsupported("per_layer_config", "is not supported: layers of a kind differ")
        group = ConfigKeys(first, f"{keys.name}: per_layer_config")
        group.with_defaults({"head_dim": dim, "num_key_value_heads": heads})
        dim, heads = group.integer_or_none("head_dim"), group.integer_or_none("num_key_value_heads")
        group.finish()
    own = keys.integer("head_dim")
    few = keys.integer_or_none("num_key_value_heads")
    dim, heads = dim or 512, (heads if same_values else None) or few
    return {
        "full_head_dim": 0 if dim == own else dim,
        "full_kv_heads": 0 if heads is None or heads == few else heads,
    }


def _gemma4_ropes(keys: ConfigKeys) -> Json:
    """Return the ropes of layers without a window, a share of whose pairs turn, and of those with one."""
    nested = keys.group("rope_parameters")
    if nested is None:
        return {"rope_theta": 1e6, "local_rope_theta": 1e4, "rope_scaling": _proportional(0.25)}
    full, near = nested.group("full_attention"), nested.group("sliding_attention")
    nested.finish()
    if full is None or near is None:
        raise keys.bad("rope_parameters", "must have full_attention and sliding_attention")
    near.require({"rope_type": "default"})
    full.with_defaults({"rope_type": "default", "partial_rotary_factor": 1.0})
    if full.raw("rope_type") not in ("default", "proportional"):
        raise full.unsupported("rope_type", "is not supported")
    share = full.number("partial_rotary_factor", 1e-3, 1.0)
    if full.raw("rope_type") == "default" and share != 1.0:
        raise full.unsupported("partial_rotary_factor", "is not supported here")
    found = {
        "rope_theta": full.number("rope_theta", 1.0, 1e12),
        "local_rope_theta": near.number("rope_theta", 1.0, 1e12),
        "rope_scaling": _proportional(share),
    }
    full.finish()
    near.finish()
    return found


def _proportional(share: float) -> RopeScaling | None:
    return None if share == 1.0 else RopeScaling(kind="proportional", share=share)


def _gemma4_ffn(keys: ConfigKeys, n: int) -> Json:
    """Return the FFNs: of 26B an FFN for every token beside experts; of E2B wider ones in the last layers."""
    width, wide = keys.size("intermediate_size", "ffn_dim"), keys.flag("use_double_wide_mlp")
    last = range(n - keys.integer("num_kv_shared_layers", 0, n), n)
    unused = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not keys.flag("enable_moe_block"):
        for key in unused:
            keys.raw(key)
        return {"dense_layers": tuple(last), "dense_dim": 2 * width} if wide and len(last) else {}
    if wide and len(last):
        raise keys.unsupported("use_double_wide_mlp", "is not supported beside experts")
    return {
        "n_experts": keys.size("num_experts", "n_experts"),
        "n_experts_active": keys.size("top_k_experts", "n_experts_active"),
        "ffn_dim": keys.size("moe_intermediate_size", "ffn_dim"),
        "shared_dim": width,
        "shared_norms": True,
        "router_input": "own_norm",
        "router": Router(expert_scale=True),
    }


def _gemma4_inputs(keys: ConfigKeys) -> Json:
    """Return the width of what tokens bring to layers."""
    width = keys.integer_or_none("hidden_size_per_layer_input", 0)
    rows = keys.integer("vocab_size_per_layer_input")
    if width and rows != keys.size("vocab_size", "vocab_size"):
        raise keys.unsupported("vocab_size_per_layer_input", "is not supported: it is not vocab_size")
    return {"per_layer_dim": width or 0}


_GEMMA4 = Names(
    ffn_norm="pre_feedforward_layernorm",
    layer_scale="layer_scalar",
    per_layer=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
    token_inputs=("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
)
_GEMMA4_MIXTURE = replace(
    _GEMMA4,
    ffn_norm="pre_feedforward_layernorm_2",
    experts_post_norm="post_feedforward_layernorm_2",
    shared=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    shared_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm_1"),
    router="router.proj",
    router_norm="router.scale",
    expert_scale="router.per_expert_scale",
    gate="experts.gate_up_proj",
    up="experts.gate_up_proj",
    down="experts.down_proj",
    stacked=True,
    stack_weight="",
)
