"""Configs of mixtures' GGUFs, as the readers beside expect them; `model/gguf_families.py` has the table."""

from __future__ import annotations

from dataclasses import replace

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.dense.gguf import granite_scales
from thermocline.model.gguf_metadata import GGUFKeys, biased, like_llama, window
from thermocline.model.tensor_map import SourceSlice

SOFTMAX, SIGMOID = 1, 2  # `expert_gating_func`


def experts(k: GGUFKeys, count: str = "num_experts") -> Json:
    """Return how many experts there are, and how many a token takes."""
    return {
        count: k.integer(".expert_count", low=1),
        "num_experts_per_tok": k.integer(".expert_used_count", low=1),
    }


def qwen3_moe(k: GGUFKeys) -> Json:
    config = like_llama(k, "Qwen3MoeForCausalLM", mixture=True)
    _gating(k, SOFTMAX)
    near = window(k)
    return {
        **config,
        **experts(k),
        **biased(k, "attention_bias"),
        **near,
        "use_sliding_window": near["sliding_window"] is not None,
        "moe_intermediate_size": _width(k),
        "norm_topk_prob": True,  # llama.cpp's code knows it
        "mlp_only_layers": _without_router(k, config["num_hidden_layers"]),
    }


def _width(k: GGUFKeys) -> int:
    return k.integer(".expert_feed_forward_length", low=1)


def _gating(k: GGUFKeys, only: int) -> None:
    """Refuse scores that are not this architecture's."""
    if k.integer(".expert_gating_func", default=only) not in (0, only):
        raise Unsupported(
            f"{k.name}: expert_gating_func is not {only}, which is not supported in {k.architecture}"
        )


def _without_router(k: GGUFKeys, layers: int) -> list[int]:
    return [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in k.gguf.tensors]


def olmoe(k: GGUFKeys) -> Json:
    _gating(k, SOFTMAX)
    config = like_llama(k, "OlmoeForCausalLM", mixture=True)
    width = config["intermediate_size"]
    if k.integer(".expert_feed_forward_length", default=width) != width:
        raise Unsupported(f"{k.name}: expert_feed_forward_length differs from feed_forward_length")
    return {**config, **experts(k), **biased(k, "attention_bias"), "norm_topk_prob": False}


def glm4_moe(k: GGUFKeys) -> Json:
    """Return GLM-4.5's config. Blocks that guess further tokens are counted as layers."""
    config = like_llama(k, "Glm4MoeForCausalLM", partial=True, mixture=True)
    k.raw(".rope.dimension_sections")
    more = k.integer(".nextn_predict_layers", default=0)
    return {
        "partial_rotary_factor": 1.0,
        **config,
        **biased(k, "attention_bias"),
        **_sigmoid_and_shared(k),
        "num_hidden_layers": config["num_hidden_layers"] - more,
        "num_nextn_predict_layers": more,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in k.gguf.tensors,
    }


def dots1(k: GGUFKeys) -> Json:
    config = like_llama(k, "Dots1ForCausalLM", mixture=True)
    return {**config, **biased(k, "attention_bias"), **_sigmoid_and_shared(k), "sliding_window": None}


def _sigmoid_and_shared(k: GGUFKeys) -> Json:
    _gating(k, SIGMOID)
    k.raw(".expert_shared_feed_forward_length")  # as many experts of `moe_intermediate_size`
    return {
        **experts(k, "n_routed_experts"),
        "moe_intermediate_size": _width(k),
        "n_shared_experts": k.integer(".expert_shared_count", default=0),
        "first_k_dense_replace": k.integer(".leading_dense_block_count", default=0),
        "routed_scaling_factor": k.number(".expert_weights_scale", default=1.0),
        "norm_topk_prob": k.flag(".expert_weights_norm", False),
        "n_group": k.integer(".expert_group_count", default=1) or 1,
        "topk_group": k.integer(".expert_group_used_count", default=1) or 1,
    }


def ernie4_5_moe(k: GGUFKeys) -> Json:
    _gating(k, SOFTMAX)
    config = like_llama(k, "Ernie4_5_MoeForCausalLM", mixture=True)
    k.raw(".expert_shared_feed_forward_length")  # as many experts of `moe_intermediate_size`
    return {
        **config,
        "moe_num_experts": k.integer(".expert_count", low=1),
        "moe_k": k.integer(".expert_used_count", low=1),
        "moe_intermediate_size": _width(k),
        "moe_num_shared_experts": k.integer(".expert_shared_count", default=0),
        "moe_layer_start_index": k.integer(".leading_dense_block_count", default=0),
        "moe_layer_interval": k.integer(".interleave_moe_layer_step", default=1, low=1),
        "use_bias": biased(k, "attention_bias")["attention_bias"],
    }


def granite_moe(k: GGUFKeys) -> Json:
    _gating(k, SOFTMAX)
    shared = k.integer(".expert_shared_feed_forward_length", default=0)
    name = "GraniteMoeSharedForCausalLM" if shared else "GraniteMoeForCausalLM"
    config = like_llama(k, name, mixture=True)
    return {
        **config,
        **experts(k, "num_local_experts"),
        **biased(k, "attention_bias"),
        **granite_scales(k, config["head_dim"]),
        **({"shared_intermediate_size": shared} if shared else {}),
    }


def granite_moe_in_gguf(piece: SourceSlice, layer: str, part: str) -> SourceSlice | None:
    """Return where a GGUF has a slice of the shared expert; None: of something else."""
    if part == "shared_mlp.input_linear.weight":
        half = "up" if piece.pick[0].start else "gate"
        return SourceSlice(f"blk.{layer}.ffn_{half}_shexp.weight", (piece.rows, piece.shape[1]))
    if part == "shared_mlp.output_linear.weight":
        return replace(piece, tensor=f"blk.{layer}.ffn_down_shexp.weight")
    return None


def minimax_m2(k: GGUFKeys) -> Json:
    _gating(k, SIGMOID)
    config = like_llama(k, "MiniMaxM2ForCausalLM", partial=True, mixture=True)
    return {**config, **experts(k, "num_local_experts"), "intermediate_size": _width(k)}


def hunyuan_moe(k: GGUFKeys) -> Json:
    _gating(k, SOFTMAX)
    config = like_llama(k, "HunYuanMoEV1ForCausalLM", mixture=True)
    for key in (".rope.scaling.factor", ".expert_shared_count"):
        k.raw(key)  # 1: theta has grown already, and there is one
    shared = k.integer(".expert_shared_feed_forward_length", default=config["intermediate_size"], low=1)
    more = experts(k) | biased(k, "attention_bias") | {"moe_intermediate_size": _width(k)}
    return config | more | {"intermediate_size": shared}


def phimoe(k: GGUFKeys) -> Json:
    """Return Phi-3.5-MoE's config. Its router has no keys, and its LayerNorms have RMS norms'."""
    _gating(k, SOFTMAX)
    config = like_llama(k, "PhimoeForCausalLM", mixture=True)
    return {
        **config,
        **experts(k, "num_local_experts"),
        **biased(k, "attention_bias"),
        **window(k),
        "lm_head_bias": "output.bias" in k.gguf.tensors,
    }
