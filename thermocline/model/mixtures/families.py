"""Readers of the config.json of mixtures with plain attention. `model/families.py` has their table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import ConfigKeys, attention_biases, read_spec
from thermocline.model.spec import ModelSpec, Router
from thermocline.model.tensor_map import Names, TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]
_EXPERTS = Names(
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    router="mlp.gate",
)
_NO_TOKENS: Json = {"bos_token_id": None, "eos_token_id": None}


def qwen3_moe(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen3-MoE: a Qwen 3 of 128 small experts, a few for each token; some layers may have none."""
    keys.with_defaults({**_NO_TOKENS, "norm_topk_prob": False, "use_sliding_window": False})
    keys.with_defaults({"decoder_sparse_step": 1, "mlp_only_layers": None, "max_window_layers": None})
    keys.raw("max_window_layers")  # the window, if there is one, is every layer's
    n, step = keys.size("num_hidden_layers", "n_layers"), keys.integer("decoder_sparse_step")
    alone = keys.indices("mlp_only_layers")
    window = keys.integer_or_none("sliding_window") if keys.flag("use_sliding_window") else None
    keys.raw("sliding_window")
    spec = read_spec(
        keys,
        stop,
        "qwen3-moe",
        qk_norm=True,
        sliding_window=window,
        router=_softmax(keys),
        **_experts(keys, "num_experts", "moe_intermediate_size"),
        **_dense(keys, (i for i in range(n) if i in alone or (i + 1) % step)),
    )
    return spec, tensors(spec, _EXPERTS, attention_biases(keys))


def _experts(keys: ConfigKeys, count: str, width: str, active: str = "num_experts_per_tok") -> Json:
    """Return the sizes of a mixture, from the keys that say them."""
    if count == "num_experts":  # the name that other families have, and newer libraries write
        keys.same(count, "num_local_experts")
    return {
        "n_experts": keys.size(count, "n_experts"),
        "n_experts_active": keys.size(active, "n_experts_active"),
        "ffn_dim": keys.size(width, "ffn_dim"),
    }


def _dense(keys: ConfigKeys, layers: Iterable[int]) -> Json:
    """Return the layers with one FFN, of `intermediate_size`."""
    found, width = tuple(layers), keys.size("intermediate_size", "dense_dim")
    return {"dense_layers": found, "dense_dim": width} if found else {}


def _softmax(keys: ConfigKeys) -> Router:
    """Return the router that weighs by the softmax of all logits, by their sum if `norm_topk_prob` says so.

    By their sum is the softmax of the chosen ones.
    """
    return Router(weights="chosen" if keys.flag("norm_topk_prob") else "score")
