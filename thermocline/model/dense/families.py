"""Readers of the config.json of dense families with RMS norms. `model/families.py` has their table."""

from __future__ import annotations

from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]
NO_TOKENS: Json = {"bos_token_id": None, "eos_token_id": None}


def granite_scales(keys: ConfigKeys) -> Json:
    """Return Granite's four scales: of embeddings, halves, scores and logits."""
    scales = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    keys.with_defaults(dict.fromkeys(scales, 1.0))
    embed, residual, attention, logits = (keys.number(key, 1e-6, 1e6) for key in scales)
    return {
        "embed_scale": embed,
        "residual_scale": residual,
        "attention_scale": attention,
        "logit_scale": 1 / logits,
    }


def granite(keys: ConfigKeys, stop: Any) -> Read:
    """Granite 3 and 4: a Llama with four scales."""
    spec = read_spec(keys, stop, "granite", **granite_scales(keys))
    return spec, tensors(spec, biases=attention_biases(keys))


def smollm3(keys: ConfigKeys, stop: Any) -> Read:
    """SmolLM3: a Llama without rope in every fourth layer."""
    keys.with_defaults({"bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True})
    keys.with_defaults({"use_sliding_window": False, "max_window_layers": None, "num_key_value_heads": 4})
    keys.raw("max_window_layers")  # which transformers does not read
    keys.default_theta = 2e6
    n, turned = keys.size("num_hidden_layers", "n_layers"), rope_layers(keys)
    window = keys.integer_or_none("sliding_window") if keys.flag("use_sliding_window") else None
    keys.raw("sliding_window")
    near = windows(keys, n, [] if window is None else [i for i in range(n) if i not in turned])
    seen: Json = {} if window is None or near == () else {"sliding_window": window, "window_layers": near}
    if window is None and near != ():
        raise keys.bad("layer_types", "has layers with a window, and there is no sliding_window")
    spec = read_spec(keys, stop, "smollm3", rope_layers=None if len(turned) == n else turned, **seen)
    return spec, tensors(spec, biases=attention_biases(keys))


def rope_layers(keys: ConfigKeys) -> tuple[int, ...]:
    """Return the layers with rope: those with a 1 in `no_rope_layers`, or all but every so manieth."""
    keys.with_defaults({"no_rope_layers": None, "no_rope_layer_interval": 4})
    n, every = keys.size("num_hidden_layers", "n_layers"), keys.integer("no_rope_layer_interval")
    if not keys.raw("no_rope_layers"):
        return tuple(i for i in range(n) if (i + 1) % every)
    marks = keys.indices("no_rope_layers")
    if len(marks) < n or any(m not in (0, 1) for m in marks):
        raise keys.bad("no_rope_layers", f"must be {n} of 0 and 1")
    return tuple(i for i in range(n) if marks[i])


def _olmo(keys: ConfigKeys, stop: Any, architecture: str, **more: Any) -> Read:
    """OLMo 2 and 3: norms of what a half gives, none of what it takes; norms over all heads of q and k."""
    keys.with_defaults({"bos_token_id": None, "eos_token_id": 50279})
    spec = read_spec(keys, stop, architecture, norm_order="after", qk_norm=True, qk_norm_whole=True, **more)
    return spec, tensors(spec, biases=attention_biases(keys))


def olmo2(keys: ConfigKeys, stop: Any) -> Read:
    return _olmo(keys, stop, "olmo2")


def olmo3(keys: ConfigKeys, stop: Any) -> Read:
    """OLMo 3: a window in three of four layers, whose rope is not scaled."""
    keys.default_theta = 5e5
    keys.with_defaults({"sliding_window": 4096})
    n, window = keys.size("num_hidden_layers", "n_layers"), keys.integer_or_none("sliding_window")
    layers = windows(keys, n, [i for i in range(n) if (i + 1) % 4])
    theta = _near_theta(keys)
    if window is None or layers == ():
        return _olmo(keys, stop, "olmo3")
    return _olmo(keys, stop, "olmo3", sliding_window=window, window_layers=layers, local_rope_theta=theta)


def _near_theta(keys: ConfigKeys) -> float:
    """Return the theta of layers with a window. What is left is the rope of the others."""
    nested = keys.raw("rope_parameters")
    if not isinstance(nested, dict) or "full_attention" not in nested:
        inner = [g.get("rope_theta") for g in (keys.raw(k) for k in _ROPES) if isinstance(g, dict)]
        known = [keys.raw("rope_theta"), *inner]
        return float(next((t for t in known if isinstance(t, int | float)), keys.default_theta))
    both = ConfigKeys(nested, f"{keys.name}: rope_parameters").with_defaults({"sliding_attention": None})
    near, theta = both.group("sliding_attention"), keys.default_theta
    if near is not None:
        near.with_defaults({"rope_theta": theta, "rope_type": "default"})
        theta = near.number("rope_theta", 1.0, 1e12)
        near.require({"rope_type": "default"})
        near.finish()
    keys.replace("rope_parameters", both.raw("full_attention"))
    both.finish()
    return theta


_ROPES = ("rope_parameters", "rope_scaling")
