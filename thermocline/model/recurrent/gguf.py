"""Configs of recurrent models' GGUFs, as the readers beside expect them, and where their layers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from thermocline.errors import BadFile
from thermocline.files.bounded import Json
from thermocline.files.gguf import GGUF
from thermocline.model.gguf_metadata import GGUFKeys, like_llama, of_blocks
from thermocline.model.mixtures.gguf import experts
from thermocline.model.recurrent.layers import Slices, whole
from thermocline.model.recurrent.qwen import fused
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice

Located = tuple[ModelSpec, Slices]
ATTENTION, DELTANET = "full_attention", "linear_attention"

# Hugging Face's names of tensors -> GGUF's, besides those that all families have.
QWEN = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
NEMOTRON = {
    "backbone.embeddings": "token_embd",
    "backbone.norm_f": "output_norm",
    "lm_head": "output",
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
GRANITE = {"block_sparse_moe.router.layer": "ffn_gate_inp", "shared_mlp.output_linear": "ffn_down"}
LFM2 = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
}


# --- metadata -> config.json --------------------------------------------------------------------------------


def _next_layers(k: GGUFKeys) -> int:
    """Return how many of the blocks guess further tokens: the last ones."""
    more, n = k.integer(".nextn_predict_layers", default=0), k.integer(".block_count", low=1, high=1024)
    if more >= n:
        raise BadFile(f"{k.name}: nextn_predict_layers is {more}, of {n} blocks")
    return more


def _qwen(k: GGUFKeys, architecture: str, *, mixture: bool) -> Json:
    """Return the config of a Qwen with DeltaNets."""
    more, width = _next_layers(k), k.integer(".expert_feed_forward_length", default=1)
    if k.raw(".feed_forward_length") is None:
        k.replace(".feed_forward_length", width)
    config = like_llama(k, architecture, partial=True, mixture=mixture)
    k.raw(".rope.dimension_sections")  # of text's positions all are the same
    n = config["num_hidden_layers"] - more
    every, said = (
        k.integer(".full_attention_interval", default=4, low=1),
        k.raw(".attention.recurrent_layers"),
    )
    recurrent = [bool((i + 1) % every) for i in range(n)]
    if isinstance(said, list | np.ndarray) and len(said) >= n:
        recurrent = [bool(x) for x in said[:n]]
    heads = k.integer(".ssm.time_step_rank", low=1, high=1024)
    own = {
        "num_hidden_layers": n,
        "mtp_num_hidden_layers": more,
        "layer_types": [DELTANET if r else ATTENTION for r in recurrent],
        "linear_conv_kernel_dim": k.integer(".ssm.conv_kernel"),
        "linear_key_head_dim": k.integer(".ssm.state_size"),
        "linear_num_key_heads": k.integer(".ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": k.integer(".ssm.inner_size") // heads,
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
    }
    if not mixture:
        return config | own
    shared = k.integer(".expert_shared_feed_forward_length", default=width, low=1)
    del config["intermediate_size"]
    mix = {"moe_intermediate_size": width, "shared_expert_intermediate_size": shared}
    return config | own | experts(k) | mix


def qwen3_next(k: GGUFKeys) -> Json:
    return _qwen(k, "Qwen3NextForCausalLM", mixture=True)


def qwen3_5(k: GGUFKeys) -> Json:
    return _qwen(k, "Qwen3_5ForCausalLM", mixture=False)


def qwen3_5_moe(k: GGUFKeys) -> Json:
    return _qwen(k, "Qwen3_5MoeForCausalLM", mixture=True)


def nemotron_h(k: GGUFKeys) -> Json:
    """Return Nemotron-H's config: a block without kv heads and without an FFN is Mamba-2."""
    more = _next_layers(k)
    widths, kv = of_blocks(k, ".feed_forward_length"), of_blocks(k, ".attention.head_count_kv")
    k.raw(".attention.layer_norm_epsilon")  # of the layers that guess further tokens
    config = like_llama(k, "NemotronHForCausalLM", "relu2", partial=True, mixture=True)
    n, mixture = config["num_hidden_layers"] - more, bool(k.integer(".expert_count", default=0))
    ffn = "E" if mixture else "-"
    blocks = "".join(ffn if w else "*" if h else "M" for w, h in zip(widths[:n], kv[:n], strict=True))
    heads = k.integer(".ssm.time_step_rank", low=1, high=1024)
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor", "hidden_act"):
        config.pop(key, None)
    own: Json = {
        "num_hidden_layers": n,
        "num_nextn_predict_layers": more,
        "hybrid_override_pattern": blocks,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "conv_kernel": k.integer(".ssm.conv_kernel"),
        "mamba_num_heads": heads,
        "mamba_head_dim": k.integer(".ssm.inner_size") // heads,
        "n_groups": k.integer(".ssm.group_count"),
        "ssm_state_size": k.integer(".ssm.state_size"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in k.gguf.tensors),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in k.gguf.tensors),
    }
    return config | own | (_nemotron_experts(k) if mixture else {})


def _nemotron_experts(k: GGUFKeys) -> Json:
    latent = k.integer(".moe_latent_size", default=0)
    k.integer(".expert_gating_func", default=2, low=2, high=2)  # sigmoid, which llama.cpp's code knows
    return {
        **experts(k, "n_routed_experts"),
        "moe_intermediate_size": k.integer(".expert_feed_forward_length", low=1),
        "moe_shared_expert_intermediate_size": k.integer(".expert_shared_feed_forward_length", low=1),
        "n_shared_experts": k.integer(".expert_shared_count", default=1),
        "moe_latent_size": latent or None,
        "norm_topk_prob": k.flag(".expert_weights_norm", True),
        "routed_scaling_factor": k.number(".expert_weights_scale", default=1.0),
        "n_group": k.integer(".expert_group_count", default=1) or 1,
        "topk_group": k.integer(".expert_group_used_count", default=1) or 1,
    }


def granite_hybrid(k: GGUFKeys) -> Json:
    """Return Granite 4's config: a block without kv heads is Mamba-2. Rope's switch has an odd name."""
    kv, width = of_blocks(k, ".attention.head_count_kv"), k.integer(".feed_forward_length", low=1)
    config = like_llama(k, "GraniteMoeHybridForCausalLM", mixture=True)
    heads, count = k.integer(".ssm.time_step_rank", low=1, high=1024), k.integer(".expert_count", default=0)
    inner, shared = (
        k.integer(".ssm.inner_size"),
        k.integer(".expert_shared_feed_forward_length", default=width),
    )
    if inner % config["hidden_size"]:
        raise BadFile(f"{k.name}: ssm.inner_size is {inner}, no multiple of embedding_length")
    own: Json = {
        "layer_types": [ATTENTION if h else DELTANET for h in kv],
        "position_embedding_type": "rope" if k.flag(".rope.scaling.finetuned", True) else None,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in k.gguf.tensors),
        "embedding_multiplier": k.number(".embedding_scale", default=1.0),
        "residual_multiplier": k.number(".residual_scale", default=1.0),
        "attention_multiplier": k.number(".attention.scale", default=config["head_dim"] ** -0.5),
        "logits_scaling": k.number(".logit_scale", default=1.0),
        "mamba_d_conv": k.integer(".ssm.conv_kernel"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_groups": k.integer(".ssm.group_count"),
        "mamba_d_state": k.integer(".ssm.state_size"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in k.gguf.tensors),
        "num_local_experts": count,
        "shared_intermediate_size": shared if count else width,
    }
    k.raw(".expert_feed_forward_length")
    return config | own | (experts(k, "num_local_experts") if count else {})


def lfm2(k: GGUFKeys) -> Json:
    return _lfm2(k, "Lfm2ForCausalLM") | {"block_auto_adjust_ff_dim": False}


def lfm2_moe(k: GGUFKeys) -> Json:
    config = _lfm2(k, "Lfm2MoeForCausalLM")
    k.integer(".expert_gating_func", default=2, low=2, high=2)
    return {
        **config,
        **experts(k),
        "moe_intermediate_size": k.integer(".expert_feed_forward_length", low=1),
        "num_dense_layers": k.integer(".leading_dense_block_count", default=0),
        "norm_topk_prob": k.flag(".expert_weights_norm", True),  # llama.cpp's code knows it
        "routed_scaling_factor": k.number(".expert_weights_scale", default=1.0) or 1.0,
    }


def _lfm2(k: GGUFKeys, architecture: str) -> Json:
    """Return LFM2's config: a block without kv heads is a short convolution."""
    kv = of_blocks(k, ".attention.head_count_kv")
    config = like_llama(k, architecture, mixture=True)
    k.raw(".attention.sliding_window")
    own = {
        "layer_types": [ATTENTION if h else "conv" for h in kv],
        "conv_L_cache": k.integer(".shortconv.l_cache"),
        "norm_eps": config.pop("rms_norm_eps"),
    }
    return config | own


# --- tensors ------------------------------------------------------------------------------------------------


def _layers(spec: ModelSpec, kind: str, made: Callable[[str, str], Slices]) -> Slices:
    out = Slices()
    for i in range(spec.n_layers):
        if spec.mixer(i) == kind:
            out |= made(f"layers.{i}.mixer", f"blk.{i}")
    return out


def _numbers(gguf: GGUF, name: str) -> tuple[SourceSlice, ...]:
    """Return all numbers of a tensor, however the file arranges them; a missing one is said later."""
    found = gguf.tensors.get(name)
    return (SourceSlice(name, (1,) if found is None else found.shape, flat=True),)


def _shared_gates(spec: ModelSpec, gguf: GGUF) -> Slices:
    out = Slices()
    for i in range(spec.n_layers if spec.shared_gate else 0):
        name = f"blk.{i}.ffn_gate_inp_shexp.weight"
        shape = gguf.tensors[name].shape if name in gguf.tensors else (1, spec.dim)
        out[f"layers.{i}.shared.router.weight"] = (SourceSlice(name, shape, one_row=len(shape) == 1),)
    return out


def deltanets(spec: ModelSpec, gguf: GGUF) -> Located:
    """Return where a GGUF has a Qwen's DeltaNets, and the spec with their order of heads.

    Qwen3.5's values are in turns, one of each group. The first files of Qwen3-Next have q, k, v and z fused.
    """
    r, d, apart = spec.recurrent, spec.dim, any(n.endswith(".ssm_alpha.weight") for n in gguf.tensors)
    if r is None:
        return spec, _shared_gates(spec, gguf)

    def made(m: str, b: str) -> Slices:
        out: Slices = {
            f"{m}.out.weight": whole(f"{b}.ssm_out.weight", d, r.inner),
            f"{m}.conv.weight": (SourceSlice(f"{b}.ssm_conv1d.weight", (r.channels, r.conv), flat=True),),
            f"{m}.decay": _numbers(gguf, f"{b}.ssm_a"),
            f"{m}.dt_bias": whole(f"{b}.ssm_dt.bias", r.heads),
            f"{m}.norm.weight": whole(f"{b}.ssm_norm.weight", r.head_dim),
            f"{m}.qkv.weight": whole(f"{b}.attn_qkv.weight", r.channels, d),
            f"{m}.z.weight": whole(f"{b}.attn_gate.weight", r.inner, d),
        }
        if apart:
            out[f"{m}.beta.weight"] = whole(f"{b}.ssm_beta.weight", r.heads, d)
            out[f"{m}.alpha.weight"] = whole(f"{b}.ssm_alpha.weight", r.heads, d)
            return out
        together = fused(spec, m, f"{b}.ssm_in.weight", f"{b}.ssm_ba.weight")
        first = f"{b}.ssm_in.weight" in gguf.tensors
        return out | {
            n: p for n, p in together.items() if first or n.endswith(("beta.weight", "alpha.weight"))
        }

    out = _layers(spec, "deltanet", made) | _shared_gates(spec, gguf)
    tiled = apart and r.groups < r.heads
    return replace(spec, recurrent=replace(r, tiled=tiled)), out


def mambas(spec: ModelSpec, gguf: GGUF) -> Located:
    """Return where a GGUF has Mamba-2s, and the shared FFN of a Granite."""
    r, d = spec.recurrent, spec.dim
    if r is None:
        return spec, {}

    def made(m: str, b: str) -> Slices:
        rows = r.inner + r.channels + r.heads
        out: Slices = {
            f"{m}.in.weight": whole(f"{b}.ssm_in.weight", rows, d),
            f"{m}.out.weight": whole(f"{b}.ssm_out.weight", d, r.inner),
            f"{m}.conv.weight": (SourceSlice(f"{b}.ssm_conv1d.weight", (r.channels, r.conv), flat=True),),
            f"{m}.decay": _numbers(gguf, f"{b}.ssm_a"),
            f"{m}.dt_bias": whole(f"{b}.ssm_dt.bias", r.heads),
            f"{m}.skip": _numbers(gguf, f"{b}.ssm_d"),
            f"{m}.norm.weight": _numbers(gguf, f"{b}.ssm_norm.weight"),
        }
        if r.conv_bias:
            out[f"{m}.conv.bias"] = whole(f"{b}.ssm_conv1d.bias", r.channels)
        return out

    return spec, _layers(spec, "mamba2", made)


def granites(spec: ModelSpec, gguf: GGUF) -> Located:
    spec, out = mambas(spec, gguf)
    d, width, mixture = spec.dim, spec.shared_dim or spec.ffn_dim, spec.n_experts > 1
    for i in range(spec.n_layers):
        for part in ("gate", "up", "down"):
            ours = f"layers.{i}.shared.{part}.weight" if mixture else f"layers.{i}.{part}.weight"
            theirs = f"blk.{i}.ffn_{part}{'_shexp' if mixture else ''}.weight"
            out[ours] = whole(theirs, *((d, width) if part == "down" else (width, d)))
    return spec, out


def convolutions(spec: ModelSpec, gguf: GGUF) -> Located:
    r, d = spec.recurrent, spec.dim
    if r is None:
        return spec, {}

    def made(m: str, b: str) -> Slices:
        return {
            f"{m}.in.weight": whole(f"{b}.shortconv.in_proj.weight", 3 * d, d),
            f"{m}.conv.weight": (SourceSlice(f"{b}.shortconv.conv.weight", (d, r.conv), flat=True),),
            f"{m}.out.weight": whole(f"{b}.shortconv.out_proj.weight", d, d),
        }

    return spec, _layers(spec, "conv", made)
