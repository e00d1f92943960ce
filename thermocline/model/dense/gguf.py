"""Configs of dense families' GGUFs, as their readers expect them; `model/gguf_families.py` has the table."""

from __future__ import annotations

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.gguf_metadata import (
    GGUFKeys,
    biased,
    common,
    like_llama,
    near_layers,
    of_blocks,
    rope,
    window,
)


def granite_scales(k: GGUFKeys, head_dim: int) -> Json:
    """Return Granite's four scales."""
    if not k.flag(".rope.scaling.finetuned", True):
        raise Unsupported(f"{k.name}: Granite without rope is not supported")
    return {
        "embedding_multiplier": k.number(".embedding_scale", default=1.0),
        "residual_multiplier": k.number(".residual_scale", default=1.0),
        "attention_multiplier": k.number(".attention.scale", default=head_dim**-0.5),
        "logits_scaling": k.number(".logit_scale"),
    }


def granite(k: GGUFKeys) -> Json:
    _without_mamba(k)
    config = like_llama(k, "GraniteForCausalLM")
    return {**config, **biased(k, "attention_bias"), **granite_scales(k, config["head_dim"])}


def _without_mamba(k: GGUFKeys) -> None:
    """Read the keys of a Granite 4 without Mamba layers: llama.cpp's converter writes a hybrid's for it."""
    if len(set(of_blocks(k, ".attention.head_count_kv", k.integer(".attention.head_count", low=1)))) > 1:
        raise Unsupported(f"{k.name}: attention.head_count_kv differs between layers")
    if not any(".ssm_" in name for name in k.gguf.tensors):
        for part in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
            k.raw(f".ssm.{part}")
    if not k.integer(".expert_count", default=0):
        k.raw(".expert_shared_feed_forward_length")


def olmo2(k: GGUFKeys) -> Json:
    """Return OLMo 2's config, or OLMo 3's, which has windows."""
    near = window(k)
    config = like_llama(k, "Olmo2ForCausalLM" if near["sliding_window"] is None else "Olmo3ForCausalLM")
    if near["sliding_window"] is None:
        return {**config, **biased(k, "attention_bias")}
    theta, layers = config.pop("rope_theta"), near_layers(k, config["num_hidden_layers"], 4)
    far = {"rope_theta": theta, **(config.pop("rope_scaling", None) or {"rope_type": "default"})}
    ropes = {
        "full_attention": far,
        "sliding_attention": {"rope_theta": k.number(".rope.freq_base_swa", default=theta)},
    }
    return {**config, **biased(k, "attention_bias"), **near, **layers, "rope_parameters": ropes}


def smollm3(k: GGUFKeys) -> Json:
    """Return SmolLM3's config. llama.cpp's code knows that every fourth layer has no rope."""
    config = like_llama(k, "SmolLM3ForCausalLM")
    return {**config, **biased(k, "attention_bias"), "no_rope_layer_interval": 4}


def _layer_normed(
    k: GGUFKeys,
    architecture: str,
    activation: str = "silu",
    eps: str = "layer_norm_eps",
    partial: bool = True,
) -> Json:
    """Return the config of an architecture with LayerNorms. `eps`: its reader's name of their epsilon."""
    config = common(k)
    turned = rope(k, config["head_dim"], partial=partial)
    whole = {"partial_rotary_factor": 1.0} if partial else {}
    return {
        **config,
        "architectures": [architecture],
        "hidden_act": activation,
        eps: k.number(".attention.layer_norm_epsilon"),
        **whole,
        **turned,
    }


def starcoder2(k: GGUFKeys) -> Json:
    config = _layer_normed(k, "Starcoder2ForCausalLM", "gelu_pytorch_tanh", "norm_epsilon", False)
    return {**config, **window(k), "use_bias": biased(k, "mlp_bias")["mlp_bias"]}


def stablelm(k: GGUFKeys) -> Json:
    """Return StableLM's config. Its key of parallel halves says true of files whose model had no such key."""
    config = _layer_normed(k, "StableLmForCausalLM")
    k.raw(".use_parallel_residual")
    return {
        **config,
        "use_qkv_bias": biased(k, "attention_bias")["attention_bias"],
        "qk_layernorm": "blk.0.attn_q_norm.weight" in k.gguf.tensors,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in k.gguf.tensors,
    }


def cohere(k: GGUFKeys) -> Json:
    config = _layer_normed(k, "CohereForCausalLM", partial=False)
    return {
        **config,
        **biased(k, "attention_bias"),
        "logit_scale": k.number(".logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in k.gguf.tensors,
    }


def cohere2(k: GGUFKeys) -> Json:
    config = _layer_normed(k, "Cohere2ForCausalLM", partial=False)
    layers = near_layers(k, config["num_hidden_layers"], 4)
    return {
        **config,
        **biased(k, "attention_bias"),
        **window(k),
        **layers,
        "logit_scale": k.number(".logit_scale"),
    }


def gpt_neox(k: GGUFKeys) -> Json:
    config = _layer_normed(k, "GPTNeoXForCausalLM", "gelu")
    return {
        **config,
        "attention_bias": "blk.0.attn_qkv.bias" in k.gguf.tensors,
        "use_parallel_residual": k.flag(".use_parallel_residual", True),
    }


def phi2(k: GGUFKeys) -> Json:
    return _layer_normed(k, "PhiForCausalLM", "gelu_new")


NEOX_NAMES = {
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
PHI_NAMES = {
    "model.final_layernorm": "output_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
