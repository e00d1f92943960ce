"""Twins with recurrent layers as GGUF files, laid out as llama.cpp's converter does it.

Owns nothing of ours: it must not import `thermocline`, or the file would share our mistakes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Json = dict[str, Any]
ARCHITECTURES = {
    "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe", "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h_moe", "granite_hybrid": "granitehybrid", "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
}  # fmt: skip
WHOLE = {
    "embed_tokens": "token_embd", "embeddings": "token_embd", "norm": "output_norm", "norm_f": "output_norm",
    "embedding_norm": "token_embd_norm", "lm_head": "output",
}  # fmt: skip
LAYER = {
    "input_layernorm": "attn_norm", "norm": "attn_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "q_layernorm": "attn_q_norm", "k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mixer.gate": "ffn_gate_inp", "feed_forward.gate": "ffn_gate_inp",
    "router.layer": "ffn_gate_inp", "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
    "shared_expert.gate_proj": "ffn_gate_shexp", "shared_expert.up_proj": "ffn_up_shexp",
    "shared_expert.down_proj": "ffn_down_shexp", "shared_expert_gate": "ffn_gate_inp_shexp",
    "shared_experts.up_proj": "ffn_up_shexp", "shared_experts.down_proj": "ffn_down_shexp",
    "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha",
    "in_proj_ba": "ssm_ba", "linear_attn.out_proj": "ssm_out", "linear_attn.norm": "ssm_norm",
    "mixer.in_proj": "ssm_in", "mamba.in_proj": "ssm_in", "mixer.out_proj": "ssm_out",
    "mamba.out_proj": "ssm_out", "mixer.norm": "ssm_norm", "mamba.norm": "ssm_norm", "conv1d": "ssm_conv1d",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def _short(part: str) -> str:
    """Return GGUF's name of a layer's tensor: that of the longest known end."""
    known = [end for end in LAYER if part == end or part.endswith(f".{end}")]
    return LAYER[max(known, key=len)]


def tiled(w: F32, groups: int, heads: int, axis: int = 0) -> F32:
    """Heads that come group by group, in turns of the groups."""
    shape = w.shape
    split = (*shape[:axis], groups, heads // groups, shape[axis] // heads, *shape[axis + 1 :])
    return np.ascontiguousarray(w.reshape(split).swapaxes(axis, axis + 1).reshape(shape))


def _in_turns(name: str, w: F32, c: Json) -> F32:
    """Reorder what belongs to value heads, as the converter of Qwen3.5 does."""
    groups, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    keys = 2 * groups * c["linear_key_head_dim"]
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([w[:keys], tiled(w[keys:], groups, heads)])
    if "linear_attn.out_proj" in name:
        return tiled(w, groups, heads, axis=1)
    if re.search(r"linear_attn\.(in_proj_[zba]\.weight|A_log|dt_bias)$", name):
        return tiled(w, groups, heads)
    return w


def _unfused(w: F32, c: Json) -> tuple[F32, F32]:
    """Qwen3-Next's rows of q, k, v and of z, which come group by group in one tensor."""
    groups, k = c["linear_num_key_heads"], c["linear_key_head_dim"]
    v = c["linear_num_value_heads"] // groups * c["linear_value_head_dim"]
    parts = np.split(w.reshape(groups, -1, w.shape[1]), [k, 2 * k, 2 * k + v], axis=1)
    q, k_, v_, z = (p.reshape(-1, w.shape[1]) for p in parts)
    return np.concatenate([q, k_, v_]), z


def tensors_of(hf: Path, c: Json, legacy: bool) -> dict[str, F32]:
    from safetensors.numpy import load_file

    out: dict[str, F32] = {}
    arch = ARCHITECTURES[hf.name]
    for name, w in sorted(load_file(hf / "model.safetensors").items()):
        name = name.replace("language_model.", "")
        if arch in ("qwen35", "qwen35moe"):
            w = _in_turns(name, w, c)
        if arch.startswith("qwen") and name.endswith("norm.weight") and "linear_attn" not in name:
            w = w + np.float32(1)
        m = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
        if m is None:
            stem, _, last = name.removeprefix("model.").removeprefix("backbone.").rpartition(".")
            out[f"{WHOLE[stem]}.{last}"] = w
            continue
        b, part = f"blk.{m[1]}", m[2]
        stem, _, last = part.rpartition(".")
        if part.endswith("A_log"):
            decay = -np.exp(w)
            out[f"{b}.ssm_a"] = decay if arch.startswith("qwen") else decay[:, None]
        elif part.endswith(("mixer.D", "mamba.D")):
            out[f"{b}.ssm_d"] = w[:, None]
        elif part.endswith("dt_bias"):
            out[f"{b}.ssm_dt.bias"] = w
        elif part.endswith(("e_score_correction_bias", "expert_bias")):
            out[f"{b}.exp_probs_b.bias"] = w
        elif expert := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", part):
            stack = f"{b}.ffn_{EXPERTS[expert[2]]}_exps.weight"
            out[stack] = np.concatenate([out[stack], w[None]]) if stack in out else w[None]
            assert len(out[stack]) == int(expert[1]) + 1
        elif "input_linear" in part or "output_linear" in part:
            end = "exps" if w.ndim == 3 else "shexp"
            half = w.shape[-2] // 2
            both = {"gate": w[..., :half, :], "up": w[..., half:, :]} if "input" in part else {"down": w}
            out |= {f"{b}.ffn_{p}_{end}.weight": np.ascontiguousarray(x) for p, x in both.items()}
        elif "in_proj_qkvz" in part:
            if legacy:
                out[f"{b}.ssm_in.weight"] = w
            else:
                out[f"{b}.attn_qkv.weight"], out[f"{b}.attn_gate.weight"] = _unfused(w, c)
        else:
            short = _short(stem)
            if arch == "granitehybrid" and short == "post_attention_norm":
                short = "ffn_norm"
            out[f"{b}.{short}.{last}"] = _shaped(stem, last, w, c, arch)
    return out


def _shaped(stem: str, last: str, w: F32, c: Json, arch: str) -> F32:
    if last == "weight" and ("conv1d" in stem or stem == "conv.conv"):
        return w[:, 0]
    if stem in ("mixer.norm", "mamba.norm"):
        return w.reshape(c.get("n_groups") or c["mamba_n_groups"], -1)
    if stem.endswith("shared_expert_gate"):
        return w.reshape(-1)
    if arch == "granitehybrid" and stem.endswith(("q_proj", "k_proj")):
        heads = c["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
        return w.reshape(heads, 2, len(w) // heads // 2, -1).swapaxes(1, 2).reshape(w.shape)
    return w


def _mamba(w: Any, c: Json, prefix: str) -> None:
    heads = c["mamba_num_heads"] if prefix == "n" else c["mamba_n_heads"]
    w.add_ssm_conv_kernel(c["conv_kernel"] if prefix == "n" else c["mamba_d_conv"])
    w.add_ssm_state_size(c["ssm_state_size"] if prefix == "n" else c["mamba_d_state"])
    w.add_ssm_group_count(c["n_groups"] if prefix == "n" else c["mamba_n_groups"])
    w.add_ssm_inner_size(heads * (c["mamba_head_dim"] if prefix == "n" else c["mamba_d_head"]))
    w.add_ssm_time_step_rank(heads)
    w.add_rope_scaling_finetuned(False)


def _add_qwen(w: Any, c: Json, more: int) -> None:
    w.add_block_count(c["num_hidden_layers"] + more)
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    w.add_rope_dimension_count(int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]))
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_ssm_state_size(c["linear_key_head_dim"])
    w.add_ssm_group_count(c["linear_num_key_heads"])
    w.add_ssm_time_step_rank(c["linear_num_value_heads"])
    w.add_ssm_inner_size(c["linear_num_value_heads"] * c["linear_value_head_dim"])
    recurrent = [t == "linear_attention" for t in c["layer_types"]]
    w.add_array(f"{w.arch}.attention.recurrent_layers", recurrent + [False] * more)
    w.add_uint32(f"{w.arch}.full_attention_interval", 4)
    if w.arch != "qwen3next":
        w.add_rope_dimension_sections([11, 11, 10, 0])
    if more:
        w.add_nextn_predict_layers(more)
    if "num_experts" in c:
        w.add_expert_count(c["num_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    else:
        w.add_feed_forward_length(c["intermediate_size"])


def _add_nemotron(w: Any, c: Json, more: int) -> None:
    kinds = c["layers_block_type"]
    w.add_block_count(len(kinds))
    width = c["moe_intermediate_size"] if "moe" in kinds else c["intermediate_size"]
    w.add_feed_forward_length([width if k in ("moe", "mlp") else 0 for k in kinds])
    w.add_head_count_kv([c["num_key_value_heads"] if k == "full_attention" else 0 for k in kinds])
    w.add_layer_norm_rms_eps(c["layer_norm_epsilon"])
    w.add_layer_norm_eps(c["layer_norm_epsilon"])
    w.add_rope_dimension_count(8)
    _mamba(w, c, "n")
    if "moe" in kinds:
        w.add_expert_count(c["n_routed_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        w.add_expert_shared_feed_forward_length(c["moe_shared_expert_intermediate_size"])
        w.add_expert_shared_count(1)
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_group_count(c["n_group"])


def _add_granite(w: Any, c: Json, more: int) -> None:
    w.add_block_count(c["num_hidden_layers"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count_kv([c["num_key_value_heads"] * (k == "full_attention") for k in c["layer_types"]])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_attention_scale(c["attention_multiplier"])
    w.add_embedding_scale(c["embedding_multiplier"])
    w.add_residual_scale(c["residual_multiplier"])
    w.add_logit_scale(c["logits_scaling"])
    w.add_expert_count(c["num_local_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
    w.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"])
    _mamba(w, c, "mamba")


def _add_lfm2(w: Any, c: Json, more: int) -> None:
    w.add_block_count(c["num_hidden_layers"])
    w.add_head_count_kv([c["num_key_value_heads"] * (k == "full_attention") for k in c["layer_types"]])
    w.add_layer_norm_rms_eps(c["norm_eps"])
    w.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    w.add_shortconv_l_cache(c["conv_L_cache"])
    if w.arch == "lfm2":
        width, multiple = int(2 * c["intermediate_size"] / 3), c["block_multiple_of"]
        w.add_feed_forward_length(-(-width // multiple) * multiple)
        return
    import gguf

    w.add_feed_forward_length(c["intermediate_size"])
    w.add_expert_count(c["num_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    w.add_leading_dense_block_count(c["num_dense_layers"])
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_weights_scale(c["routed_scaling_factor"])


def write(
    hf: Path,
    path: Path,
    *,
    types: Callable[[str], str | None] = lambda name: None,
    more: int = 0,
    legacy: bool = False,
    changes: Json | None = None,
) -> Path:
    """`types`: a matrix's name -> a gguf type's, None for f32. `more`: blocks that guess further tokens.

    `legacy`: q, k, v and z in one tensor, as the first files of Qwen3-Next. `changes`: metadata to write
    otherwise; None: not at all.
    """
    import gguf

    c = json.loads((hf / "config.json").read_text())
    arch = ARCHITECTURES[hf.name]
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_head_count(c["num_attention_heads"])
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    add = {"q": _add_qwen, "n": _add_nemotron, "g": _add_granite, "l": _add_lfm2}[arch[0]]
    add(w, c, more)
    for key, value in (changes or {}).items():
        w.kv_data[0].pop(f"{arch}.{key}", None)
        if isinstance(value, list):
            w.add_array(f"{arch}.{key}", value)
        elif value is not None:
            w.add_uint32(f"{arch}.{key}", value)
    for name, x in tensors_of(hf, c, legacy).items():
        kind = types(name) if x.ndim > 1 and not name.endswith(("conv1d.weight", "conv.weight")) else None
        kind = None if re.search(r"ssm_(a|d|norm)\b", name) else kind
        if kind is None:
            w.add_tensor(name, x.astype(np.float32))
            continue
        t = gguf.GGMLQuantizationType[kind]
        w.add_tensor(name, gguf.quants.quantize(x.astype(np.float32), t), raw_dtype=t)
    for i in range(more):
        w.add_tensor(f"blk.{c['num_hidden_layers'] + i}.nextn.eh_proj.weight", np.ones((4, 4), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
