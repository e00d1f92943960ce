"""Readers of the config.json of mixtures with plain attention. `model/families.py` has their table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.dense.families import granite_scales
from thermocline.model.hf_config import ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.spec import LIMITS, ModelSpec, Router
from thermocline.model.tensor_map import Names, TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]
_EXPERTS = Names(
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    router="mlp.gate",
)
NO_TOKENS: Json = {"bos_token_id": None, "eos_token_id": None}


def qwen3_moe(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen3-MoE: a Qwen 3 of 128 small experts, a few for each token; some layers may have none."""
    keys.with_defaults({**NO_TOKENS, "norm_topk_prob": False, "use_sliding_window": False})
    keys.with_defaults({"decoder_sparse_step": 1, "mlp_only_layers": None, "max_window_layers": None})
    keys.raw("max_window_layers")  # the window, if there is one, is every layer's
    keys.require({"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0})
    n, step = keys.size("num_hidden_layers", "n_layers"), keys.integer("decoder_sparse_step")
    alone = keys.indices("mlp_only_layers")
    if all(i in alone or (i + 1) % step for i in range(n)):
        raise keys.bad("mlp_only_layers", "and decoder_sparse_step say that no layer has experts")
    window = keys.integer_or_none("sliding_window") if keys.flag("use_sliding_window") else None
    keys.raw("sliding_window")
    spec = read_spec(
        keys,
        stop,
        "qwen3-moe",
        qk_norm=True,
        sliding_window=window,
        router=_softmax(keys),
        **experts(keys, "num_experts", "moe_intermediate_size"),
        **dense_first(keys, (i for i in range(n) if i in alone or (i + 1) % step)),
    )
    return spec, tensors(spec, _EXPERTS, attention_biases(keys))


def experts(keys: ConfigKeys, count: str, width: str, active: str = "num_experts_per_tok") -> Json:
    """Return the sizes of a mixture, from the keys that say them."""
    if count == "num_experts":  # the name that other families have, and newer libraries write
        keys.same(count, "num_local_experts")
    return {
        "n_experts": keys.size(count, "n_experts"),
        "n_experts_active": keys.size(active, "n_experts_active"),
        "ffn_dim": keys.size(width, "ffn_dim"),
    }


def dense_first(keys: ConfigKeys, layers: Iterable[int]) -> Json:
    """Return the layers with one FFN, of `intermediate_size`."""
    found, width = tuple(layers), keys.size("intermediate_size", "dense_dim")
    return {"dense_layers": found, "dense_dim": width} if found else {}


def _softmax(keys: ConfigKeys) -> Router:
    """Return the router that weighs by the softmax of all logits, by their sum if `norm_topk_prob` says so.

    By their sum is the softmax of the chosen ones.
    """
    return Router(weights="chosen" if keys.flag("norm_topk_prob") else "score")


def olmoe(keys: ConfigKeys, stop: Any) -> Read:
    """OLMoE: norms over all heads of q and of k; weights are the scores, which add up to less than one."""
    keys.with_defaults({**NO_TOKENS, "eos_token_id": 50279, "norm_topk_prob": False, "clip_qkv": None})
    if keys.raw("clip_qkv") is not None:
        raise keys.unsupported("clip_qkv", "is not supported")
    spec = read_spec(
        keys,
        stop,
        "olmoe",
        qk_norm=True,
        qk_norm_whole=True,
        router=_softmax(keys),
        **experts(keys, "num_experts", "intermediate_size"),
    )
    return spec, tensors(spec, _EXPERTS, attention_biases(keys))


def glm4_moe(keys: ConfigKeys, stop: Any) -> Read:
    """GLM-4.5: shared experts, the first layers without experts, rope on half of each head."""
    keys.with_defaults({**NO_TOKENS, "partial_rotary_factor": None, "use_qk_norm": False})
    keys.with_defaults({"num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "norm_topk_prob": True})
    keys.same("num_nextn_predict_layers", "num_mtp_layers")
    spec = read_spec(
        keys,
        stop,
        "glm4-moe",
        partial=0.5,
        qk_norm=keys.flag("use_qk_norm"),
        **sigmoid_and_shared(keys),
    )
    biases = ("qkv",) if keys.flag("attention_bias") else ()
    return spec, without_next(tensors(spec, SHARED, biases), spec, keys)


def dots1(keys: ConfigKeys, stop: Any) -> Read:
    """dots.llm1: GLM-4.5's mixture with Qwen 3's attention, whose last layers may have a window."""
    keys.with_defaults({**NO_TOKENS, "sliding_window": 4096, "max_window_layers": 62})
    keys.with_defaults({"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0})
    if keys.with_defaults({"scoring_func": "sigmoid"}).raw("scoring_func") != "noaux_tc":  # both mean sigmoid
        keys.require({"scoring_func": "sigmoid"})
    keys.require({"topk_method": "noaux_tc", "moe_layer_freq": 1})
    n, window = keys.size("num_hidden_layers", "n_layers"), keys.integer_or_none("sliding_window")
    first = keys.integer("max_window_layers", 0)
    layers = windows(keys, n, () if window is None else range(min(first, n), n))
    near: Json = {} if window is None or layers == () else {"sliding_window": window, "window_layers": layers}
    spec = read_spec(keys, stop, "dots1", qk_norm=True, **near, **sigmoid_and_shared(keys))
    return spec, tensors(spec, SHARED, attention_biases(keys))


SHARED = replace(
    _EXPERTS,
    selection_bias="mlp.gate.e_score_correction_bias",
    shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
)


def sigmoid_and_shared(keys: ConfigKeys) -> Json:
    """Return DeepSeek-V3's mixture: sigmoids, biases for the choice, groups, shared experts as one FFN."""
    keys.with_defaults({"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 1})
    keys.same("n_routed_experts", "num_local_experts")
    n, groups = keys.size("num_hidden_layers", "n_layers"), keys.integer_or_none("n_group") or 1
    shared = keys.integer_or_none("n_shared_experts", 0, 64) or 0
    return {
        **experts(keys, "n_routed_experts", "moe_intermediate_size"),
        **dense_first(keys, range(min(n, keys.integer_or_none("first_k_dense_replace", 0) or 0))),
        "shared_dim": shared * keys.size("moe_intermediate_size", "ffn_dim"),
        "router": Router(
            score="sigmoid",
            weights="normalised" if keys.flag("norm_topk_prob") else "score",
            epsilon=1e-20 if keys.flag("norm_topk_prob") else 0.0,
            scale=keys.number("routed_scaling_factor", 1e-6, 1e6),
            selection_bias=True,
            groups=groups,
            groups_kept=keys.integer_or_none("topk_group") or 1,
            group_rule="sum2" if groups > 1 else "max",
        ),
    }


def without_next(made: TensorMap, spec: ModelSpec, keys: ConfigKeys) -> TensorMap:
    """Return the map without the layers behind the last, which guess further tokens."""
    more = keys.integer_or_none("num_nextn_predict_layers", 0, 16) or 0
    layers = "|".join(str(spec.n_layers + i) for i in range(more))
    return replace(made, skipped=(rf"model\.layers\.({layers})\..*",)) if more else made


def ernie4_5_moe(keys: ConfigKeys, stop: Any) -> Read:
    """ERNIE 4.5: softmax scores with a bias for the choice, shared experts, rope on neighbouring elements."""
    keys.with_defaults(_ERNIE_DEFAULTS)
    keys.default_theta = 5e5
    keys.require(_ERNIE_ONLY)
    keys.raw("moe_capacity")  # of training
    n, step = keys.size("num_hidden_layers", "n_layers"), keys.integer("moe_layer_interval")
    first, last = keys.integer("moe_layer_start_index", 0), keys.integer("moe_layer_end_index", -1)
    last = n - 1 if last == -1 else last
    shared = keys.integer_or_none("moe_num_shared_experts", 0, 64) or 0
    spec = read_spec(
        keys,
        stop,
        "ernie4.5-moe",
        **experts(keys, "moe_num_experts", "moe_intermediate_size", "moe_k"),
        **dense_first(keys, (i for i in range(n) if (i + 1) % step or not first <= i <= last)),
        shared_dim=shared * keys.size("moe_intermediate_size", "ffn_dim"),
        router=Router(
            weights="normalised",
            epsilon=keys.number("moe_norm_min", 0.0, 1.0),
            epsilon_floor=True,
            selection_bias=True,
        ),
    )
    names = replace(SHARED, selection_bias="mlp.moe_statics.e_score_correction_bias", neighbours=True)
    made = tensors(spec, names)
    for i in range(n):
        name = f"layers.{i}.router.selection_bias"
        if name in made.tensors:  # for each of one group
            made.tensors[name] = tuple(replace(p, shape=(1, *p.shape)) for p in made.tensors[name])
    return spec, replace(made, skipped=(r"model\.mtp_.*",))


_ERNIE_DEFAULTS: Json = {
    "tie_word_embeddings": True,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_norm_min": 1e-12,
    "moe_capacity": None,
}
_ERNIE_ONLY: Json = {
    "use_bias": False,
    "use_rmsnorm": True,
    "moe_gate": "topk",
    "moe_gate_act": "softmax",
    "moe_norm_gate_logits": True,
    "moe_use_aux_free": True,
}


def granite_moe(keys: ConfigKeys, stop: Any, **more: Any) -> Read:
    """Granite 3 MoE: Mixtral's router, scaled embeddings, halves, scores and logits; experts are stacked."""
    spec = read_spec(
        keys,
        stop,
        "granite-moe",
        **granite_scales(keys),
        **experts(keys, "num_local_experts", "intermediate_size"),
        **more,
    )
    return spec, tensors(spec, GRANITE, attention_biases(keys))


def granite_moe_shared(keys: ConfigKeys, stop: Any) -> Read:
    """Granite 3 MoE with a shared expert."""
    keys.with_defaults({"shared_intermediate_size": 0})
    return granite_moe(keys, stop, shared_dim=keys.integer("shared_intermediate_size", *LIMITS["shared_dim"]))


GRANITE = Names(
    gate="block_sparse_moe.input_linear",
    up="block_sparse_moe.input_linear",
    down="block_sparse_moe.output_linear",
    router="block_sparse_moe.router.layer",
    shared=("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear"),
    stacked=True,
)


def minimax_m2(keys: ConfigKeys, stop: Any) -> Read:
    """MiniMax-M2: sigmoids with a bias for the choice, norms over all heads of q and k, rope on a part."""
    keys.with_defaults({"bos_token_id": 200034, "eos_token_id": 200020, "partial_rotary_factor": None})
    keys.with_defaults({"rotary_dim": None, "head_dim": 128, "attn_type_list": None})
    keys.default_theta = 5e6
    keys.require(_MINIMAX_ONLY)
    kinds = keys.indices("attn_type_list")
    if any(kind != 1 for kind in kinds):
        raise keys.unsupported("attn_type_list", "is not supported: attention is to all positions")
    for key in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        keys.with_defaults({key: None}).raw(key)
    if (turned := keys.integer_or_none("rotary_dim")) is not None:
        keys.replace("partial_rotary_factor", (turned + 0.25) / keys.integer("head_dim"))
    spec = read_spec(
        keys,
        stop,
        "minimax-m2",
        partial=1.0,
        qk_norm=True,
        qk_norm_whole=True,
        router=Router(score="sigmoid", weights="normalised", selection_bias=True),
        **experts(keys, "num_local_experts", "intermediate_size"),
    )
    return spec, replace(tensors(spec, _MINIMAX), skipped=(r"model\.mtp\..*",))


_MINIMAX = Names(
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    router="block_sparse_moe.gate",
    selection_bias="block_sparse_moe.e_score_correction_bias",
)
_MINIMAX_ONLY: Json = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}


def phimoe(keys: ConfigKeys, stop: Any) -> Read:
    """Phi-3.5-MoE: SparseMixer's weights of two experts; LayerNorms, and biases, one of the head."""
    keys.with_defaults({"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01})
    keys.with_defaults({"lm_head_bias": False, "input_jitter_noise": None, "num_key_value_heads": 8})
    keys.with_defaults({"original_max_position_embeddings": None})
    for key in ("input_jitter_noise", "original_max_position_embeddings"):
        keys.raw(key)  # of training; longrope reads it
    keys.default_theta = 1e6
    if keys.integer("num_experts_per_tok") != 2:
        raise keys.unsupported("num_experts_per_tok", "is not supported: its router chooses two")
    spec = read_spec(
        keys,
        stop,
        "phimoe",
        norm="layer",
        sliding_window=keys.integer_or_none("sliding_window"),
        router=Router(score="logits", weights="mixed", epsilon=keys.number("router_jitter_noise", 0.0, 1.0)),
        **experts(keys, "num_local_experts", "intermediate_size"),
    )
    head = ("head",) if keys.flag("lm_head_bias") else ()
    if head and spec.tied_head:
        raise keys.unsupported("lm_head_bias", "is not supported beside tie_word_embeddings")
    return spec, tensors(spec, _PHIMOE, attention_biases(keys, "norm", *head))


_PHIMOE = Names(
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    router="block_sparse_moe.gate",
)


def hunyuan_moe(keys: ConfigKeys, stop: Any) -> Read:
    """Hunyuan-A13B: a Llama with norms of q and k behind rope, and one shared expert."""
    keys.with_defaults({"moe_topk": None, "num_experts_per_tok": None, "moe_intermediate_size": None})
    _each(keys.with_defaults({"num_shared_expert": 1}), "num_shared_expert")
    keys.require(_HUNYUAN_ONLY)
    for key in _HUNYUAN_UNUSED:
        keys.with_defaults({key: None}).raw(key)
    keys.same("head_dim", "attention_head_dim")
    keys.same("moe_topk", "num_experts_per_tok")
    for key in ("moe_topk", "moe_intermediate_size"):
        _each(keys, key)
    width = keys.size("intermediate_size", "ffn_dim")
    if keys.raw("moe_intermediate_size") is None:
        keys.replace("moe_intermediate_size", width)
    _by_alpha(keys)
    spec = read_spec(
        keys,
        stop,
        "hunyuan-moe",
        qk_norm=True,
        qk_norm_last=True,
        shared_dim=width,
        **experts(keys, "num_experts", "moe_intermediate_size", "moe_topk"),
    )
    return spec, tensors(spec, _HUNYUAN, attention_biases(keys))


_HUNYUAN = replace(
    _EXPERTS,
    router="mlp.gate.wg",
    shared=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj", "mlp.shared_mlp.down_proj"),
    qk_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
)
_HUNYUAN_ONLY: Json = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "num_shared_expert": 1,
    "moe_layer_num_skipped": 0,
    "use_mixed_mlp_moe": True,
    "position_embedding_xdrope": False,
    "group_limited_greedy": False,
    "use_rotary_pos_emb": True,
    "routed_scaling_factor": 1.0,
    "moe_drop_tokens": False,
    "add_classification_head": False,
    "xdrope_section": None,
}


# Tokens that text has no use for, sizes of what the switches above turn off, and of towers that A13B lacks.
_HUNYUAN_UNUSED = (
    *("eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "org_vocab_size", "cla_share_factor"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_group", "topk_group", "moe_random_routing_dropped_token"),
    *("text_start_id", "text_end_id", "mask_init_id", "pad_id", "image_token_id", "video_start_id"),
    *("video_end_id", "num_media_embeds", "anyres_pooling_size", "anyres_vit_max_image_size"),
    *("anyres_vit_two_views", "dense_list", "class_num", "pool_type", "skip_cls_token"),
    *("vit_add_patchemb_bias", "vit_input_resolution", "vit_mapping_type", "vit_norm_type", "vit_patch"),
    *("vit_path", "vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm"),
)


def _each(keys: ConfigKeys, key: str) -> None:
    """Take the one value of a list that has one for every layer."""
    value = keys.raw(key)
    if isinstance(value, list):
        if len(value) != keys.size("num_hidden_layers", "n_layers") or any(v != value[0] for v in value):
            raise keys.unsupported(key, "is not supported: layers differ")
        keys.replace(key, value[0])


def _by_alpha(keys: ConfigKeys) -> None:
    """Replace a scaling of rope by `alpha`, which makes theta larger and nothing else."""
    for key in ("rope_scaling", "rope_parameters"):
        group = keys.raw(key)
        if not isinstance(group, dict) or group.get("alpha") is None:
            continue
        own = ConfigKeys(group, f"{keys.name}: {key}").with_defaults(
            dict.fromkeys(("type", "rope_type", "rope_theta"))
        )
        if "dynamic" not in (own.raw("type"), own.raw("rope_type")):
            raise own.unsupported("alpha", "is not supported beside another type than dynamic")
        for other in ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            own.with_defaults({other: None}).raw(other)  # of other types
        n = keys.integer_or_none("head_dim") or keys.integer("hidden_size") // keys.integer(
            "num_attention_heads"
        )
        inner = None if own.raw("rope_theta") is None else own.number("rope_theta", 1.0, 1e12)
        theta = inner or keys.number_or_none("rope_theta", 1.0, 1e12) or keys.default_theta
        grown = theta * own.number("alpha", 1.0, 1e9) ** (n / (n - 2))
        own.finish()
        keys.replace(key, {"rope_type": "default", "rope_theta": grown})
        keys.replace("rope_theta", None)
