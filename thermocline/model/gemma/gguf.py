"""Configs of Gemma's GGUFs, as the readers beside expect them; `model/gguf_families.py` has the table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import Json
from thermocline.model.gguf_metadata import (
    ROPE_FACTORS,
    GGUFKeys,
    biased,
    common,
    like_llama,
    rope_factors,
    window,
)
from thermocline.model.tensor_map import SourceSlice

# Hugging Face's names of tensors -> GGUF's, beside a Llama's.
NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_WHOLE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def in_gguf(piece: SourceSlice, layer: str, name: str) -> SourceSlice | None:
    """Return where a GGUF has what Gemma 4 calls by another kind of name."""
    theirs = _WHOLE.get(name)
    return None if theirs is None else replace(piece, tensor=f"blk.{layer}.{theirs}")


def _gemma(k: GGUFKeys, architecture: str, layers_of_27b: int, period: int) -> Json:
    """Return Gemma's config.

    llama.cpp's code knows which layers have a window and the attention scale of 27B, which has
    `layers_of_27b` layers. Every `period`-th layer has no window.
    """
    config = like_llama(k, architecture)
    del config["hidden_act"]
    n, dim, heads = (config[x] for x in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    pattern = k.raw(".attention.sliding_window_pattern")
    if isinstance(pattern, list | np.ndarray) and len(pattern) == n:
        near = [bool(x) for x in pattern]
    else:
        period = k.integer(".attention.sliding_window_pattern", default=period, low=1)
        near = [(i + 1) % period > 0 for i in range(n)]
    kinds = ["sliding_attention" if x else "full_attention" for x in near]
    return {
        **config,
        **window(k),
        **biased(k, "attention_bias"),
        "query_pre_attn_scalar": dim // heads if n == layers_of_27b else config["head_dim"],
        "layer_types": kinds,
        "final_logit_softcapping": _cap(k, ".final_logit_softcapping"),
        "attn_logit_softcapping": _cap(k, ".attn_logit_softcapping"),
    }


def _cap(k: GGUFKeys, key: str) -> float | None:
    return None if k.raw(key) is None else k.number(key)


def gemma2(k: GGUFKeys) -> Json:
    """Return Gemma 2's config. Files of its first weeks lack three keys, whose values its reader knows."""
    keys = {"attn_logit_softcapping": "", "final_logit_softcapping": "", "sliding_window": "attention."}
    lacking = [name for name, part in keys.items() if k.raw(f".{part}{name}") is None]
    config = _gemma(k, "Gemma2ForCausalLM", 46, 2)
    return {name: value for name, value in config.items() if name not in lacking}


def gemma3(k: GGUFKeys) -> Json:
    local = k.number(".rope.freq_base_swa", default=10000.0)
    return _gemma(k, "Gemma3ForCausalLM", 62, 6) | {"rope_local_base_freq": local}


def gemma4(k: GGUFKeys) -> Json:
    """Return Gemma 4's config. Lists say which layers have a window, and what differs between both kinds."""
    n = k.integer(".block_count", low=1)
    near = k.raw(".attention.sliding_window_pattern")
    if not isinstance(near, list | np.ndarray) or len(near) != n:
        raise BadFile(f"{k.name}: attention.sliding_window_pattern must be a list of {n}")
    near = [bool(x) for x in near]
    full = k.integer(".attention.key_length", low=2)
    few, many = _of_kinds(k, ".attention.head_count_kv", near)
    widths = _each(k, ".feed_forward_length", n)
    for key, value in {
        ".attention.head_count_kv": many,
        ".feed_forward_length": widths[0],
        ".attention.key_length": k.integer(".attention.key_length_swa", low=2),
        ".attention.value_length": k.integer(".attention.value_length_swa", low=2),
    }.items():
        k.replace(key, value)
    config, shared = common(k, mixture=True), k.integer(".attention.shared_kv_layers", default=0)
    if widths not in ([widths[0]] * n, [widths[0]] * (n - shared) + [2 * widths[0]] * shared):
        raise Unsupported(f"{k.name}: feed_forward_length differs between layers, which is not supported")
    alone = [i for i in range(n - shared) if not near[i]]
    return {
        **config,
        **window(k),
        **_ropes(k, config["head_dim"], full),
        **_gemma4_experts(k),
        "architectures": ["Gemma4ForCausalLM"],
        "rms_norm_eps": k.number(".attention.layer_norm_rms_epsilon"),
        "layer_types": ["sliding_attention" if x else "full_attention" for x in near],
        "final_logit_softcapping": _cap(k, ".final_logit_softcapping"),
        "global_head_dim": full,
        "num_global_key_value_heads": few,
        "attention_k_eq_v": not any(f"blk.{i}.attn_v.weight" in k.gguf.tensors for i in alone),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": k.integer(".embedding_length_per_layer_input", default=0),
        "vocab_size_per_layer_input": config["vocab_size"],
    }


def _each(k: GGUFKeys, key: str, n: int) -> list[int]:
    """Return the numbers of all layers, of which a file has a list or, where they are equal, one."""
    value = k.raw(key)
    found = [int(x) for x in value] if isinstance(value, list | np.ndarray) else [k.integer(key, low=1)] * n
    if len(found) != n:
        raise BadFile(f"{k.name}: {key.removeprefix('.')} must be a list of {n}")
    return found


def _of_kinds(k: GGUFKeys, key: str, near: list[bool]) -> tuple[int, int]:
    """Return the numbers of layers without a window, and with one."""
    each = _each(k, key, len(near))
    kinds = [{x for x, is_near in zip(each, near, strict=True) if is_near == kind} for kind in (False, True)]
    if any(len(kind) != 1 for kind in kinds):
        raise Unsupported(f"{k.name}: {key.removeprefix('.')} differs between layers of a kind")
    (few,), (many,) = kinds
    return few, many


def _ropes(k: GGUFKeys, near: int, full: int) -> Json:
    """Return both ropes. Pairs of a head without a window that do not turn have a huge divisor."""
    for key, size in ((".rope.dimension_count", full), (".rope.dimension_count_swa", near)):
        if k.integer(key, default=size) != size:
            raise Unsupported(f"{k.name}: {key.removeprefix('.')} is not the head's size")
    share = 1.0
    if ROPE_FACTORS in k.gguf.tensors:
        factors = rope_factors(k, ROPE_FACTORS, full // 2)
        turned = int((factors == 1).sum())
        if not turned or (factors[:turned] != 1).any() or (factors[turned:] < 1e20).any():
            raise Unsupported(f"{k.name}: {ROPE_FACTORS} holds other divisors than 1 and 1e30")
        share = 2 * turned / full
    return {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": k.number(".rope.freq_base", default=1e6),
                "partial_rotary_factor": share,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": k.number(".rope.freq_base_swa", default=1e4),
            },
        }
    }


def _gemma4_experts(k: GGUFKeys) -> Json:
    count, width = k.integer(".expert_count", default=0), k.raw(".expert_feed_forward_length")
    if not count:
        return {"enable_moe_block": False}
    if isinstance(width, list | np.ndarray):
        sizes = {int(x) for x in width}
        if len(sizes) != 1:
            raise Unsupported(f"{k.name}: expert_feed_forward_length differs between layers")
        k.replace(".expert_feed_forward_length", sizes.pop())
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": k.integer(".expert_used_count", low=1),
        "moe_intermediate_size": k.integer(".expert_feed_forward_length", low=1),
    }
