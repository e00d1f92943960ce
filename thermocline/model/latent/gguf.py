"""The GGUF architecture of models with latent attention, `deepseek2`, as the readers beside expect it."""

from __future__ import annotations

from dataclasses import replace

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import Json
from thermocline.files.gguf import GGUF
from thermocline.model.gguf_metadata import GGUFKeys, like_llama, scaling
from thermocline.model.mixtures.gguf import SIGMOID, SOFTMAX, experts
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice

NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
KV_B = "self_attn.kv_b_proj.weight"
_GLM_FLASH = (47, 154880)  # layers and tokens of the one model of sigmoids whose first files do not say so


def deepseek2(k: GGUFKeys) -> Json:
    """Return the config of DeepSeek-V2, V3, Kimi-K2 or GLM-4.7-Flash: which one says how its router scores.

    Heads' sizes have keys of their own in files whose attention is absorbed, and the usual ones in older.
    """
    turned = k.integer(".rope.dimension_count", low=2)
    config = like_llama(k, "", mixture=True, head_dim=turned) | _sharpened(k)
    more = k.integer(".nextn_predict_layers", default=0)
    layers = config["num_hidden_layers"] - more
    k.raw(".expert_shared_feed_forward_length"), k.raw(".attention.head_count_kv")
    plain, own = (k.integer(f".attention.{key}_length", low=1) for key in ("key", "value"))
    head = k.integer(".attention.key_length_mla", default=plain, low=turned + 1)
    return {
        **config,
        **_mixture(k, layers, config["vocab_size"]),
        "num_nextn_predict_layers": more,
        "num_hidden_layers": layers,
        "num_key_value_heads": config["num_attention_heads"],  # there: 1 where attention is absorbed
        "kv_lora_rank": k.integer(".attention.kv_lora_rank", low=1),
        "q_lora_rank": _lower(k),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": head - turned,
        "v_head_dim": k.integer(".attention.value_length_mla", default=own, low=1),
    }


def _mixture(k: GGUFKeys, layers: int, vocabulary: int) -> Json:
    """Return the router's rule, which tells the families apart, and the experts' sizes."""
    default = SIGMOID if (layers, vocabulary) == _GLM_FLASH else SOFTMAX
    scores = k.integer(".expert_gating_func", default=default) or default
    if scores not in (SOFTMAX, SIGMOID):
        raise Unsupported(f"{k.name}: expert_gating_func {scores} is not supported in {k.architecture}")
    groups = k.integer(".expert_group_count", default=1) or 1
    family: Json = {"architectures": ["DeepseekV3ForCausalLM"]}
    if scores == SOFTMAX:
        method = "group_limited_greedy" if groups > 1 else "greedy"
        family = {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}
    return {
        **family,
        **experts(k, "n_routed_experts"),
        "moe_intermediate_size": k.integer(".expert_feed_forward_length", low=1),
        "n_shared_experts": k.integer(".expert_shared_count", default=0),
        "first_k_dense_replace": k.integer(".leading_dense_block_count", default=0),
        "routed_scaling_factor": k.number(".expert_weights_scale", default=1.0) or 1.0,
        "norm_topk_prob": k.flag(".expert_weights_norm", False),
        "n_group": groups,
        "topk_group": k.integer(".expert_group_used_count", default=1) or 1,
    }


def _sharpened(k: GGUFKeys) -> Json:
    """Return YaRN's scaling with the number that scores grow by; cos and sin do not, in all such models."""
    growth = 10 * k.number(".rope.scaling.yarn_log_multiplier", default=0.0)
    growth = float(f"{growth:.6g}")
    if not growth or k.text(".rope.scaling.type", "none") != "yarn":
        return {}
    return {"rope_scaling": {**scaling(k), "mscale": growth, "mscale_all_dim": growth}}


def _lower(k: GGUFKeys) -> int | None:
    rank = k.integer(".attention.q_lora_rank", default=0)
    return rank if "blk.0.attn_q_a.weight" in k.gguf.tensors else None


def head_in_gguf(piece: SourceSlice, layer: str, spec: ModelSpec, gguf: GGUF) -> SourceSlice:
    """Return a head's part of `kv_b_proj`: rows of two stacks of heads, or as it is in older files."""
    a, kv_b = spec.latent, f"blk.{layer}.attn_kv_b.weight"
    assert a is not None
    if kv_b in gguf.tensors:
        return replace(piece, tensor=kv_b)
    part, shape = ("k", (a.kv_rank, a.nope)) if piece.within else ("v", (a.value, a.kv_rank))
    first = piece.within.start if piece.within else piece.pick[0].start
    name = f"blk.{layer}.attn_{part}_b.weight"
    if name not in gguf.tensors:
        raise BadFile(f"{gguf.path}: tensor {name} is missing")
    return SourceSlice(name, (spec.n_heads, *shape), part=first // (a.nope + a.value))
