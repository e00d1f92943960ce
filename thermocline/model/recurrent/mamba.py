"""Nemotron-H and Granite 4: Mamba-2 in most layers, attention without positions in a few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.dense.families import granite_scales
from thermocline.model.hf_config import PLAIN_ACTIVATIONS, ConfigKeys, attention_biases, read_spec
from thermocline.model.mixtures.families import GRANITE
from thermocline.model.recurrent.layers import (
    kinds,
    mamba2,
    unbounded_steps,
    with_mixers,
    without_positions,
)
from thermocline.model.spec import ModelSpec, Recurrent, Router
from thermocline.model.tensor_map import Names, TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]

# --- Nemotron-H ---------------------------------------------------------------------------------------------

_BLOCKS = {
    "linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-",
}  # fmt: skip
_NEMOTRON_DEFAULTS: Json = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "mlp_hidden_act": "relu2",
    "hybrid_override_pattern": None,
    "layers_block_type": None,
    "num_hidden_layers": None,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "use_conv_bias": True,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "intermediate_size": None,
    "num_nextn_predict_layers": 0,
}
_NEMOTRON_ONLY: Json = {
    "use_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "moe_latent_size": None,
    "n_shared_experts": 1,
    "sliding_window": None,
}
# Of training, of other code, of layers that guess further tokens; sizes that others imply.
_NEMOTRON_UNUSED = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "use_mamba_kernels", "num_logits_to_keep"),
    *("residual_in_fp32", "rescale_prenorm_residual", "moe_shared_expert_overlap", "norm_eps"),
    *(
        "mtp_layers_block_type",
        "mtp_hybrid_override_pattern",
        "num_query_groups",
        "max_seq_len",
    ),
)
_NEMOTRON_NAMES = Names(
    root="backbone.",
    embed="embeddings",
    out_norm="norm_f",
    attn_norm="norm",
    ffn_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
)
_NEMOTRON_MIXTURE = replace(
    _NEMOTRON_NAMES,
    up="mixer.experts.{}.up_proj",
    down="mixer.experts.{}.down_proj",
    router="mixer.gate",
    selection_bias="mixer.gate.e_score_correction_bias",
    shared=("", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
)


def nemotron_h(keys: ConfigKeys, stop: Any) -> Read:
    """Nemotron-H: each layer is Mamba-2, attention, an FFN or a mixture; the last two of squared ReLU."""
    keys.with_defaults(_NEMOTRON_DEFAULTS)
    keys.require(_NEMOTRON_ONLY)
    for key in _NEMOTRON_UNUSED:
        keys.with_defaults({key: None}).raw(key)
    unbounded_steps(keys)
    keys.same("head_dim", "attention_head_dim")
    keys.same("layer_norm_epsilon", "rms_norm_eps")
    blocks = _blocks(keys)
    keys.replace("num_hidden_layers", len(blocks))
    if "E" in blocks and "-" in blocks:
        raise keys.unsupported("layers_block_type", "is not supported: plain FFNs beside mixtures")
    mixture = "E" in blocks
    sizes = Recurrent(
        conv=keys.integer("conv_kernel", 2, 16),
        heads=keys.integer("mamba_num_heads", 1, 1024),
        head_dim=keys.integer("mamba_head_dim", 1, 1024),
        groups=keys.integer("n_groups", 1, 1024),
        state=keys.integer("ssm_state_size", 1, 1024),
        conv_bias=keys.flag("use_conv_bias"),
    )
    mixers = tuple({"M": "mamba2", "*": "attention"}.get(b, "none") for b in blocks)
    spec = read_spec(
        keys,
        stop,
        "nemotron-h-moe" if mixture else "nemotron-h",
        norm_eps=keys.number("layer_norm_epsilon", 0.0, 1.0),
        activation=keys.activation("mlp_hidden_act", PLAIN_ACTIVATIONS),
        gated=False,
        no_ffn=tuple(i for i, b in enumerate(blocks) if b in "M*"),
        **with_mixers(mixers, sizes),
        **without_positions(keys),
        **(_mixture(keys) if mixture else _unused(keys)),
    )
    if keys.flag("attention_bias"):
        raise keys.unsupported("attention_bias", "is not supported for Nemotron-H")
    made = tensors(spec, _NEMOTRON_MIXTURE if mixture else _NEMOTRON_NAMES)
    for i in range(spec.n_layers):
        if spec.mixer(i) == "mamba2":
            made.tensors.update(mamba2(spec, f"layers.{i}", f"backbone.layers.{i}.mixer"))
    more = keys.integer("num_nextn_predict_layers", 0, 16)
    behind = "|".join(str(spec.n_layers + i) for i in range(more))  # in a GGUF
    skipped = (r"(backbone\.)?mtp\..*", *((rf"model\.layers\.({behind})\..*",) if behind else ()))
    return spec, replace(made, skipped=skipped)


def _blocks(keys: ConfigKeys) -> str:
    """Return a letter for each layer, from a text of such or a list of names."""
    pattern, count = keys.raw("hybrid_override_pattern"), keys.integer_or_none("num_hidden_layers")
    named = "".join(kinds(keys, "layers_block_type", _BLOCKS, ()))
    keys.with_defaults({"layer_types": None}).raw("layer_types")
    if pattern is not None and (not isinstance(pattern, str) or not pattern or set(pattern) - set("M*E-")):
        raise keys.bad("hybrid_override_pattern", "must be a text of M, *, E and -")
    if pattern and named and pattern != named:
        raise keys.bad("hybrid_override_pattern", "differs from layers_block_type: which is meant?")
    found: str = pattern or named
    if not found:
        raise keys.bad("layers_block_type", "must name the layers")
    if count not in (None, len(found)) or len(found) > 1024:
        raise keys.bad("num_hidden_layers", f"is not the number of layers that are named, {len(found)}")
    return found


def _mixture(keys: ConfigKeys) -> Json:
    keys.same("n_routed_experts", "num_local_experts")
    keys.raw("intermediate_size")  # of FFNs, which there are none of
    groups, summed = keys.integer("n_group"), keys.flag("norm_topk_prob")
    return {
        "n_experts": keys.size("n_routed_experts", "n_experts"),
        "n_experts_active": keys.size("num_experts_per_tok", "n_experts_active"),
        "ffn_dim": keys.size("moe_intermediate_size", "ffn_dim"),
        "shared_dim": keys.size("moe_shared_expert_intermediate_size", "shared_dim"),
        "router": Router(
            score="sigmoid",
            weights="normalised" if summed else "score",
            epsilon=1e-20 if summed else 0.0,
            scale=keys.number("routed_scaling_factor", 1e-6, 1e6),
            selection_bias=True,
            groups=groups,
            groups_kept=keys.integer("topk_group"),
            group_rule="sum2" if groups > 1 else "max",
        ),
    }


def _unused(keys: ConfigKeys) -> Json:
    """Ignore the keys of mixtures."""
    own = ("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size")
    for key in (*own, "moe_shared_expert_intermediate_size", "norm_topk_prob", "n_group", "topk_group"):
        keys.with_defaults({key: None}).raw(key)
    keys.raw("routed_scaling_factor")
    return {}


# --- Granite 4 ----------------------------------------------------------------------------------------------

_GRANITE_KINDS = {
    "mamba": "mamba2", "linear_attention": "mamba2", "attention": "attention", "full_attention": "attention",
}  # fmt: skip
_GRANITE_DEFAULTS: Json = {
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "position_embedding_type": None,
    "num_local_experts": 8,
    "layer_types": None,
    "mamba_chunk_size": None,
    "normalization_function": "rmsnorm",
}
_GRANITE_DENSE = Names(
    gate="shared_mlp.input_linear", up="shared_mlp.input_linear", down="shared_mlp.output_linear"
)


def granite_hybrid(keys: ConfigKeys, stop: Any) -> Read:
    """Granite 4: a Granite whose layers are mostly Mamba-2; perhaps experts beside the FFN of all tokens."""
    keys.with_defaults(_GRANITE_DEFAULTS)
    keys.require({"mamba_proj_bias": False, "normalization_function": "rmsnorm"})
    keys.raw("mamba_chunk_size")
    unbounded_steps(keys)
    keys.same("layer_types", "layers_block_type")
    n, positions = keys.size("num_hidden_layers", "n_layers"), keys.raw("position_embedding_type")
    if positions not in (None, "rope", "nope"):
        raise keys.unsupported("position_embedding_type", "is not supported")
    mixers = kinds(keys, "layer_types", _GRANITE_KINDS, ["mamba2"] * n)
    if len(mixers) != n:
        raise keys.bad("layer_types", f"must name {n} layers")
    experts = keys.integer_or_none("num_local_experts", 0, 1024) or 0
    spec = read_spec(
        keys,
        stop,
        "granite-hybrid",
        **granite_scales(keys),
        **with_mixers(mixers, _granite_sizes(keys)),
        **({} if positions == "rope" else without_positions(keys)),
        **_granite_ffn(keys, experts),
    )
    biases = attention_biases(keys)
    made = tensors(spec, GRANITE if experts else _GRANITE_DENSE, biases)
    for i in range(n):
        if spec.mixer(i) == "mamba2":
            made.tensors.update(mamba2(spec, f"layers.{i}", f"model.layers.{i}.mamba"))
    return spec, made


def _granite_sizes(keys: ConfigKeys) -> Recurrent:
    heads, dim = keys.integer("mamba_n_heads", 1, 1024), keys.size("hidden_size", "dim")
    inner = keys.integer("mamba_expand", 1, 64) * dim
    if keys.raw("mamba_d_head") == "auto":
        keys.replace("mamba_d_head", inner // heads)
    each = keys.integer("mamba_d_head", 1, 1024)
    if each * heads != inner:
        raise keys.bad("mamba_d_head", f"times mamba_n_heads is not {inner}")
    return Recurrent(
        conv=keys.integer("mamba_d_conv", 2, 16),
        heads=heads,
        head_dim=each,
        groups=keys.integer("mamba_n_groups", 1, 1024),
        state=keys.integer("mamba_d_state", 1, 1024),
        conv_bias=keys.flag("mamba_conv_bias"),
    )


def _granite_ffn(keys: ConfigKeys, experts: int) -> Json:
    """Return the sizes of a layer's FFN: one that all tokens take, and experts beside it, if there are."""
    width = keys.size("shared_intermediate_size", "ffn_dim")
    active = keys.with_defaults({"num_experts_per_tok": None}).raw("num_experts_per_tok")
    if not experts:
        keys.with_defaults({"intermediate_size": None}).raw("intermediate_size")
        return {"ffn_dim": width}
    if active is None:
        keys.replace("num_experts_per_tok", 2)
    return {
        "n_experts": experts,
        "n_experts_active": keys.size("num_experts_per_tok", "n_experts_active"),
        "ffn_dim": keys.size("intermediate_size", "ffn_dim"),
        "shared_dim": width,
    }
