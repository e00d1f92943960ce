"""SmallThinker (arXiv 2507.20984): its config, and what a GGUF says of it.

Its routers read the residual stream before attention. Its experts are ReGLU.
"""

from __future__ import annotations

from typing import Any

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.gguf_metadata import GGUFKeys, like_llama, window
from thermocline.model.hf_config import ConfigKeys, read_spec
from thermocline.model.mixtures.gguf import SIGMOID, SOFTMAX, experts
from thermocline.model.spec import ModelSpec, Router
from thermocline.model.tensor_map import Names, TensorMap, tensors

_NAMES = Names(
    gate="block_sparse_moe.experts.{}.gate",
    up="block_sparse_moe.experts.{}.up",
    down="block_sparse_moe.experts.{}.down",
    router="block_sparse_moe.primary_router",
)
_DEFAULTS: Json = {
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_layout": None,
    "sliding_window_layout": None,
    "sliding_window_size": None,
    "moe_primary_router_apply_softmax": False,  # 4B's config leaves it out, and its code then means this
}
# Its code computes nothing else. These say so where a config has them.
_ONLY: Json = {
    "hidden_act": "relu",
    "norm_topk_prob": True,
    "moe_enable_early_router": True,
    "moe_enable_secondary_experts": False,
}
_SIGMOIDS = Router(score="sigmoid", weights="normalised")
_PERIOD = 4  # in a GGUF, every fourth layer from the first on attends to all positions, and has no rope


def smallthinker(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """Weights: sigmoids of the chosen by their sum, or a softmax. Layers without rope, or with a window."""
    keys.with_defaults(_DEFAULTS).require(_ONLY)
    for key in ("model_name", "profile_sparsity"):  # a label, and a switch of its makers' measurements
        keys.with_defaults({key: None}).raw(key)
    softmax = keys.flag("moe_primary_router_apply_softmax")
    spec = read_spec(
        keys,
        stop,
        "smallthinker",
        activation="relu",
        ffn_dim=keys.size("moe_ffn_hidden_size", "ffn_dim"),
        n_experts=keys.size("moe_num_primary_experts", "n_experts"),
        n_experts_active=keys.size("moe_num_active_primary_experts", "n_experts_active"),
        router=Router() if softmax else _SIGMOIDS,
        router_input="layer_input",
        rope_layers=_layers(keys, "rope_layout"),
        **_near(keys),
    )
    if keys.flag("attention_bias"):
        raise keys.unsupported("attention_bias", "is not supported for SmallThinker")
    return spec, tensors(spec, _NAMES)


def _near(keys: ConfigKeys) -> Json:
    """Return the sliding window and its layers, if any layer has it."""
    size = keys.integer_or_none("sliding_window_size")
    layers = _layers(keys, "sliding_window_layout", missing=())
    if layers == ():
        return {}
    if size is None:
        raise keys.bad("sliding_window_size", "is missing, and sliding_window_layout has layers with it")
    return {"sliding_window": size, "window_layers": layers}


def _layers(keys: ConfigKeys, key: str, missing: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
    """Return the layers that a list of 0 and 1 names; None: all."""
    n, layout = keys.size("num_hidden_layers", "n_layers"), keys.raw(key)
    if layout is None:
        return missing
    if not isinstance(layout, list) or len(layout) != n or any(x not in (0, 1) for x in layout):
        raise keys.bad(key, f"must be {n} of 0 and 1")
    found = tuple(i for i, x in enumerate(layout) if x)
    return None if len(found) == n else found


# --- GGUF ---------------------------------------------------------------------------------------------------

NAMES = {"block_sparse_moe.primary_router": "ffn_gate_inp"}
# What llama.cpp's code knows of the family.
ALWAYS: Json = {"activation": "relu", "router_input": "layer_input"}
_WINDOW = 4096  # its code's, whatever a file says


def laid(s: ModelSpec) -> bool:
    """Return whether llama.cpp's code routes, turns and windows as this model does."""
    rules = s.router in (Router(), _SIGMOIDS)
    if s.sliding_window is None:
        return rules and s.rope_layers is None
    near = tuple(i for i in range(s.n_layers) if i % _PERIOD)
    return rules and s.sliding_window == _WINDOW and s.rope_layers == s.window_layers == near


def gguf_config(k: GGUFKeys) -> Json:
    """Return the config that a GGUF's metadata implies.

    A window says which layers have it, and which have rope: llama.cpp's code knows them.
    """
    config = like_llama(k, "SmallThinkerForCausalLM", "relu", mixture=True)
    scores = k.integer(".expert_gating_func", default=SOFTMAX)
    if scores not in (SOFTMAX, SIGMOID):
        raise Unsupported(f"{k.name}: expert_gating_func is neither {SOFTMAX} nor {SIGMOID}")
    width = k.integer(".expert_feed_forward_length", default=config.pop("intermediate_size"), low=1)
    near = window(k)["sliding_window"]
    layout = [int(i % _PERIOD > 0 or near is None) for i in range(config["num_hidden_layers"])]
    chosen = experts(k)
    return {
        **config,
        "moe_ffn_hidden_size": width,
        "moe_num_primary_experts": chosen["num_experts"],
        "moe_num_active_primary_experts": chosen["num_experts_per_tok"],
        "moe_primary_router_apply_softmax": scores == SOFTMAX,
        "rope_layout": layout,
        "sliding_window_layout": [x * (near is not None) for x in layout],
        "sliding_window_size": near,
    }
