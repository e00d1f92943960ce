"""Configs of mixtures' GGUFs, as the readers beside expect them; `model/gguf_families.py` has the table."""

from __future__ import annotations

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.gguf_metadata import GGUFKeys, biased, like_llama, window

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
