"""Readers of the config.json of models with latent attention. `model/families.py` has their table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import ConfigKeys, read_spec, rope
from thermocline.model.mixtures.families import (
    SHARED,
    Read,
    dense_first,
    experts,
    sigmoid_and_shared,
    without_next,
)
from thermocline.model.spec import Latent, Router
from thermocline.model.tensor_map import tensors


def deepseek_v2(keys: ConfigKeys, stop: Any) -> Read:
    """DeepSeek-V2, V2.5 and V2-Lite: softmax scores, of V2 within the best groups of experts."""
    _unused(keys)
    keys.with_defaults({"n_group": None, "topk_group": None, "first_k_dense_replace": 0})
    keys.with_defaults({"n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"})
    keys.require({"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False})
    keys.same("n_routed_experts", "num_experts")
    limited = keys.raw("topk_method") == "group_limited_greedy"
    if not limited and keys.raw("topk_method") != "greedy":
        raise keys.unsupported("topk_method", "is not supported; known: greedy, group_limited_greedy")
    groups = [keys.integer_or_none(key, 1) or 1 for key in ("n_group", "topk_group")]
    n, kept = groups if limited else (1, 1)
    layers, shared = (
        keys.size("num_hidden_layers", "n_layers"),
        keys.integer_or_none("n_shared_experts", 0, 64),
    )
    router = Router(
        weights="score",
        scale=keys.number("routed_scaling_factor", 1e-6, 1e6),
        groups=n,
        groups_kept=kept,
    )
    mixture: Json = {
        **experts(keys, "n_routed_experts", "moe_intermediate_size"),
        **dense_first(keys, range(min(layers, keys.integer("first_k_dense_replace", 0)))),
        "shared_dim": (shared or 0) * keys.size("moe_intermediate_size", "ffn_dim"),
        "router": router,
    }
    return _read(keys, stop, "deepseek-v2", mixture)


def deepseek_v3(keys: ConfigKeys, stop: Any) -> Read:
    """DeepSeek-V3 and R1, and Kimi-K2: sigmoid scores with a bias for the choice."""
    _unused(keys)
    keys.with_defaults({"first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "norm_topk_prob": True})
    keys.same("num_nextn_predict_layers", "num_mtp_layers")
    keys.require({"scoring_func": "sigmoid", "moe_layer_freq": 1, "topk_method": "noaux_tc"})
    return _read(keys, stop, "deepseek-v3", sigmoid_and_shared(keys))


def glm4_moe_lite(keys: ConfigKeys, stop: Any) -> Read:
    """GLM-4.7-Flash: a small DeepSeek-V3."""
    _unused(keys)
    keys.with_defaults({"mlp_layer_types": None, "num_nextn_predict_layers": 1, "norm_topk_prob": True})
    keys.with_defaults({"first_k_dense_replace": None})
    keys.require({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    keys.same("num_nextn_predict_layers", "num_mtp_layers")
    n, kinds = keys.size("num_hidden_layers", "n_layers"), keys.raw("mlp_layer_types")
    first = keys.integer_or_none("first_k_dense_replace", 0)
    if kinds is not None:
        found = next((i for i, kind in enumerate(kinds) if kind != "dense"), n) if type(kinds) is list else -1
        if kinds != ["dense"] * found + ["sparse"] * (n - found) or first not in (None, found):
            raise keys.unsupported(
                "mlp_layer_types", "is not supported: the first are dense, the others sparse"
            )
        first = found
    keys.replace("first_k_dense_replace", 1 if first is None else first)
    return _read(keys, stop, "glm4-moe-lite", sigmoid_and_shared(keys))


def _read(keys: ConfigKeys, stop: Any, architecture: str, mixture: Json) -> Read:
    latent, heads = _latent(keys), keys.size("num_attention_heads", "n_heads")
    if (keys.integer_or_none("num_key_value_heads") or heads) != heads:
        raise keys.unsupported("num_key_value_heads", "is not supported: every head has keys of its own")
    scale = (latent.nope + latent.rope) ** -0.5 * _yarn_scale(keys) ** 2
    turned = rope(keys)
    del turned["share"]
    spec = read_spec(
        keys,
        stop,
        architecture,
        n_kv_heads=1,
        head_dim=latent.kv_rank + latent.rope,
        rotary_dim=latent.rope,
        attention_scale=scale,
        latent=latent,
        **turned,
        **mixture,
    )
    keys.with_defaults({"rope_interleave": True})
    made = tensors(spec, replace(SHARED, neighbours=keys.flag("rope_interleave")))
    return spec, without_next(made, spec, keys)


def _latent(keys: ConfigKeys) -> Latent:
    keys.with_defaults({"q_lora_rank": None})
    rank, nope, turned, value = (
        keys.integer(key, 1, 1 << 16)
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    for key, only in (("qk_head_dim", (nope + turned,)), ("head_dim", (turned, nope + turned))):
        if keys.with_defaults({key: None}).raw(key) not in (None, *only):
            raise keys.unsupported(
                key, "is not supported: it differs from qk_nope_head_dim and qk_rope_head_dim"
            )
    return Latent(rank, nope, turned, value, keys.integer_or_none("q_lora_rank", 1, 1 << 16))


def _yarn_scale(keys: ConfigKeys) -> float:
    """Return what YaRN multiplies q and k with: of long texts, scores stay as sharp (arXiv 2309.00071)."""
    for key in ("rope_scaling", "rope_parameters"):
        group = keys.raw(key)
        if not isinstance(group, dict) or not group.get("mscale_all_dim"):
            continue
        own = ConfigKeys(group, f"{keys.name}: {key}")
        growth = own.number("mscale_all_dim", 1e-3, 1e6)
        if "yarn" not in (group.get("rope_type"), group.get("type")):
            raise own.unsupported("mscale_all_dim", "is not supported beside another type than yarn")
        return 0.1 * growth * math.log(own.number("factor", 1.0, 1e6)) + 1.0
    return 1.0


_FP8: Json = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _check_quantised(keys: ConfigKeys) -> None:
    """Refuse weights that are stored otherwise than as floats, of 8 bits with scales of blocks too."""
    group = keys.with_defaults({"quantization_config": None}).group("quantization_config")
    if group is None:
        return
    for key, only in _FP8.items():
        if group.with_defaults({key: None}).raw(key) != only:
            raise group.unsupported(key, f"is not supported, only {only}; fetch a GGUF of this model instead")
    # "ue8m0": scales are powers of two, which says how the weights were quantised and inputs are.
    if group.with_defaults({"scale_fmt": None}).raw("scale_fmt") not in (None, "ue8m0"):
        raise group.unsupported("scale_fmt", "is not supported; fetch a GGUF of this model instead")
    group.with_defaults({"activation_scheme": None, "modules_to_not_convert": None})
    group.raw("activation_scheme"), group.raw("modules_to_not_convert")  # what they say of inputs; of names
    group.finish()


def _unused(keys: ConfigKeys) -> None:
    """Take what training and other engines need, and refuse biases of attention, which no such model has."""
    _check_quantised(keys)
    for key in ("aux_loss_alpha", "seq_aux", "ep_size"):
        keys.with_defaults({key: None}).raw(key)
    keys.with_defaults({"num_nextn_predict_layers": 0, "bos_token_id": None, "eos_token_id": None})
    keys.require({"attention_bias": False})
