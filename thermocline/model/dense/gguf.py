"""Configs of dense families' GGUFs, as their readers expect them; `model/gguf_families.py` has the table."""

from __future__ import annotations

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.gguf_metadata import GGUFKeys, biased, like_llama, near_layers, window


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
    config = like_llama(k, "GraniteForCausalLM")
    return {**config, **biased(k, "attention_bias"), **granite_scales(k, config["head_dim"])}


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
