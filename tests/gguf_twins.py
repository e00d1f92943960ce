"""Twins as GGUF files, laid out as llama.cpp's converter (and PowerInfer's) does it, with the `gguf` package.

Owns nothing of ours: it must not import `thermocline`, or the file would share our mistakes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn_layer_norm": "attn_norm",
    "final_layer_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.wg": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.primary_router": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "lm_head": "output",
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "model.final_layernorm": "output_norm",
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
}


EXPERTS = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}
EXPERTS |= {"gate_proj": "ffn_gate", "down_proj": "ffn_down", "up_proj": "ffn_up"}
EXPERTS |= {"gate": "ffn_gate", "down": "ffn_down", "up": "ffn_up"}


def experts_of(out: dict[str, F32], part: str, layer: str, w: F32, apart: bool) -> None:
    """Experts come in ascending order. `apart`: a tensor each, as before they were stacked."""
    _, _, number, which = part.split(".")
    if apart:
        out[f"blk.{layer}.{EXPERTS[which]}.{number}.weight"] = w
        return
    name = f"blk.{layer}.{EXPERTS[which]}_exps.weight"
    w = w[None]
    out[name] = w if name not in out else np.concatenate([out[name], w])
    assert len(out[name]) == int(number) + 1


def paired(w: F32, heads: int) -> F32:
    """llama.cpp's RoPE turns neighbours: row i and row i + half of a head come to lie side by side."""
    return w.reshape(heads, 2, len(w) // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


PAIRED = ("llama", "mistral", "mixtral", "bamboo", "arcee", "minicpm", "granitemoe",
          "granitemoeshared", "granite", "smollm3")  # fmt: skip
PLUS_ONE = ("gemma2", "gemma3_text", "nemotron")


def ungrouped(w: F32, heads: int, kv_heads: int) -> F32:
    """Falcon's rows: all of q, all of k, all of v, instead of by group."""
    parts = w.reshape(kv_heads, heads // kv_heads + 2, -1, *w.shape[1:])
    split = (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])
    return np.concatenate([p.reshape(-1, *w.shape[1:]) for p in split])


def tensors_of(hf: Path, powerinfer: bool, apart: bool = False) -> dict[str, F32]:
    from safetensors.numpy import load_file

    config = json.loads((hf / "config.json").read_text())
    heads, kind = config["num_attention_heads"], config["model_type"]
    out: dict[str, F32] = {}
    for file in sorted(hf.glob("*.safetensors")):
        for name, w in sorted(load_file(file).items()):
            stem, _, last = name.rpartition(".")
            if kind in PLUS_ONE and "norm" in stem and last == "weight":
                w = w + np.float32(1)
            if stem in WHOLE:
                out[f"{WHOLE[stem]}.{last}"] = w
                continue
            if last == "e_score_correction_bias":
                layer = stem.split("layers.")[1].split(".")[0]
                out[f"blk.{layer}.exp_probs_b.bias"] = w.reshape(-1)
                continue
            if last == "sinks":
                out[f"blk.{stem.split('.')[2]}.attn_sinks.weight"] = w
                continue
            if last.endswith(("_blocks", "_scales")):  # `gpt_oss_blocks` has them
                continue
            if kind == "gemma4_text" and (part := GEMMA4.get(".".join(name.split(".")[3:]))):
                out[f"blk.{name.split('.')[2]}.{part}"] = w
                continue
            if kind == "llama4_text" and stem.endswith(".experts"):
                rows, layer = w.swapaxes(1, 2), stem.split(".")[2]
                halves = np.split(rows, 2, axis=1) if last.startswith("gate") else [rows]
                for part, x in zip(("gate", "up") if len(halves) > 1 else ("down",), halves, strict=True):
                    out[f"blk.{layer}.ffn_{part}_exps.weight"] = np.ascontiguousarray(x)
                continue
            if kind == "gpt_oss" and stem.endswith(".experts"):
                out |= gpt_oss_experts(stem.split(".")[2], last, w)
                continue
            layer, part = stem.split(".h." if ".h." in stem else "layers.")[1].split(".", 1)
            if ".experts." in part:
                experts_of(out, part, layer, w, apart)
                continue
            if "_layernorm.norms." in part:
                each, number = f"blk.{layer}.attn_{part[10]}_norm.weight", int(part.split(".")[-1])
                shape = (heads if part[10] == "q" else kv_heads(config), len(w))
                out.setdefault(each, np.empty(shape, np.float32))[number] = w
                continue
            if part.startswith("shared_mlp"):
                halves = np.split(w, 2) if "input" in part else [w]
                for which, x in zip(("gate", "up") if "input" in part else ("down",), halves, strict=True):
                    out[f"blk.{layer}.ffn_{which}_shexp.weight"] = np.ascontiguousarray(x)
                continue
            if "_linear" in part:
                half = len(w[0]) // 2
                both = {"gate": w[:, :half], "up": w[:, half:]} if "input" in part else {"down": w}
                for which, x in both.items():
                    out[f"blk.{layer}.ffn_{which}_exps.weight"] = np.ascontiguousarray(x)
                continue
            short = LAYER[part]
            if short == "attn_kv_b" and not apart:
                of_heads = w.reshape(heads, -1, w.shape[1])
                keys, values = np.split(of_heads, [config["qk_nope_head_dim"]], axis=1)
                out[f"blk.{layer}.attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))
                out[f"blk.{layer}.attn_v_b.weight"] = np.ascontiguousarray(values)
                continue
            if kind in ("glm4_moe", "gpt_oss", "olmo2", "olmo3") and part == "post_attention_layernorm":
                short = "post_attention_norm"
            if kind.startswith("gemma") and part == "post_attention_layernorm":
                short = "post_attention_norm"
            if "query_key_value" in part:
                w = ungrouped(w, heads, kv_heads(config))
            if short in ("attn_q", "attn_k") and kind in PAIRED:
                w = paired(w, heads if short == "attn_q" else config["num_key_value_heads"])
            if short == "ffn_down" and powerinfer:
                short, w = "ffn_down_t", w.T if w.ndim == 2 else w
            out[f"blk.{layer}.{short}.{last}"] = np.ascontiguousarray(w)
    return out


GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def add_gemma4(w: Any, config: dict[str, Any], out: dict[str, F32]) -> None:
    """Lists of what differs between layers, and the divisors of the pairs that do not turn."""
    kinds, shared = [t[0] == "s" for t in config["layer_types"]], config["num_kv_shared_layers"]
    full = next(iter(config["per_layer_config"].values()))
    n, width = len(kinds), config["intermediate_size"]
    w.add_sliding_window(config["sliding_window"])
    w.add_array("gemma4.attention.sliding_window_pattern", kinds)
    w.add_uint32("gemma4.attention.shared_kv_layers", shared)
    w.add_uint32("gemma4.embedding_length_per_layer_input", config["hidden_size_per_layer_input"] or 0)
    w.add_key_length(full["head_dim"])
    w.add_value_length(full["head_dim"])
    w.add_uint32("gemma4.attention.key_length_swa", config["head_dim"])
    w.add_uint32("gemma4.attention.value_length_swa", config["head_dim"])
    w.add_rope_dimension_count(full["head_dim"])
    w.add_uint32("gemma4.rope.dimension_count_swa", config["head_dim"])
    if config["use_double_wide_mlp"]:
        w.add_feed_forward_length([width if i < n - shared else 2 * width for i in range(n)])
    if few := full.get("num_key_value_heads"):
        w.add_head_count_kv([config["num_key_value_heads"] if near else few for near in kinds])
    if config["enable_moe_block"]:
        w.add_expert_used_count(config["top_k_experts"])
    pairs = full["head_dim"] // 2
    turned = int(pairs * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    out["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)


def gpt_oss_experts(layer: str, part: str, w: F32) -> dict[str, F32]:
    """Gate and up are every second row (column, as stored) of one tensor."""
    last = "bias" if part.endswith("_bias") else "weight"
    w = w if last == "bias" else w.swapaxes(1, 2)
    if part.startswith("down"):
        return {f"blk.{layer}.ffn_down_exps.{last}": w}
    each = (("gate", w[:, 0::2]), ("up", w[:, 1::2]))
    return {f"blk.{layer}.ffn_{name}_exps.{last}": np.ascontiguousarray(x) for name, x in each}


def gpt_oss_blocks(hf: Path) -> dict[str, NDArray[np.uint8]]:
    """Experts' blocks as llama.cpp has them: the exponent, then weights i and i + 16 in byte i."""
    from safetensors.numpy import load_file

    tensors, out = load_file(hf / "model.safetensors"), dict[str, NDArray[np.uint8]]()
    for name in [n for n in tensors if n.endswith("_blocks")]:
        layer, part = name.split(".")[2], name.split(".")[-1].removesuffix("_proj_blocks")
        pairs = tensors[name]
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:3], 32)
        halves = codes[..., :16] | codes[..., 16:] << 4
        scales = tensors[name.replace("_blocks", "_scales")][..., None]
        rows = np.concatenate([scales, halves], axis=-1).reshape(*pairs.shape[:2], -1)
        each = (("gate", rows[:, 0::2]), ("up", rows[:, 1::2])) if part == "gate_up" else ((part, rows),)
        out |= {f"blk.{layer}.ffn_{p}_exps.weight": np.ascontiguousarray(x) for p, x in each}
    return out


def merged(out: dict[str, F32]) -> dict[str, F32]:
    """Experts' gates and ups in one stack, as newer files have them."""
    made = dict(out)
    for name in [n for n in out if n.endswith("ffn_gate_exps.weight")]:
        up = made.pop(name.replace("gate", "up"))
        made[name.replace("gate", "gate_up")] = np.concatenate([made.pop(name), up], axis=1)
    return made


def kv_heads(config: dict[str, Any]) -> int:
    if config["model_type"] == "falcon":
        return int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1
    return int(config.get("num_key_value_heads", config["num_attention_heads"]))


def llama3_factors(config: dict[str, Any]) -> F32:
    """What the converter stores for Llama-3's scaling: by how much each frequency is divided."""
    r, hd = config["rope_parameters"], config["head_dim"]
    old = r["original_max_position_embeddings"]
    low, high = old / r["low_freq_factor"], old / r["high_freq_factor"]
    out = []
    for i in range(hd // 2):
        wave = 2 * np.pi * r["rope_theta"] ** (2 * i / hd)
        if wave < high:
            out.append(1.0)
        elif wave > low:
            out.append(r["factor"])
        else:
            smooth = (old / wave - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"])
            out.append(1 / ((1 - smooth) / r["factor"] + smooth))
    return np.array(out, np.float32)


# type -> (a block's bytes, where its f16 scales are); a block is 256 numbers
K_SCALES = {
    "Q2_K": (84, (80, 82)), "Q3_K": (110, (108,)), "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)), "IQ1_S": (50, (0,)), "IQ2_XXS": (66, (0,)), "IQ2_XS": (74, (0,)),
    "IQ2_S": (82, (0,)), "IQ3_XXS": (98, (0,)), "IQ3_S": (110, (0,)), "IQ4_XS": (136, (0,)),
}  # fmt: skip


def k_blocks(kind: str, shape: tuple[int, ...], seed: int) -> NDArray[np.uint8]:
    """Random blocks (the package cannot make them of numbers) with scales that keep the numbers small."""
    size, scales = K_SCALES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0], shape[1] // 256, size), dtype=np.uint8)
    for at in scales:
        d = (1e-4 * (1 + rng.random(blocks.shape[:2]))).astype(np.float16)
        blocks[..., at : at + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add_norm_and_rope(w: Any, config: dict[str, Any], head_dim: int) -> None:
    if "rms_norm_eps" in config:
        w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        names = ("norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
        w.add_layer_norm_eps(next(config[n] for n in names if n in config))
    if "norm_eps" in config:  # Nemotron's, which the converter takes for both kinds
        w.add_layer_norm_rms_eps(config["norm_eps"])
    if w.arch == "nemotron":
        w.add_string("nemotron.rope.scaling.type", "none")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    near, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    w.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    grown = float(rope.get("alpha") or 1.0) ** (head_dim / (head_dim - 2))  # Hunyuan's
    w.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)) * grown)
    if near:
        w.add_float32(f"{w.arch}.rope.freq_base_swa", near["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        w.add_string(f"{w.arch}.rope.scaling.type", rope["rope_type"])
        w.add_rope_scaling_factor(rope["factor"])
        for key, theirs in (("beta_fast",) * 2, ("beta_slow",) * 2, ("attention_factor", "attn_factor")):
            if key in rope:
                w.add_float32(f"{w.arch}.rope.scaling.yarn_{theirs}", rope[key])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_latent(w: Any, config: dict[str, Any], old: bool) -> None:
    """Sizes of latents and of heads; `old`: as before attention was absorbed."""
    head, rank = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["kv_lora_rank"]
    if config["q_lora_rank"] is not None:
        w.add_q_lora_rank(config["q_lora_rank"])
    w.add_kv_lora_rank(rank)
    w.add_key_length(head if old else rank + config["qk_rope_head_dim"])
    w.add_value_length(config["v_head_dim"] if old else rank)
    if not old:
        w.add_key_length_mla(head)
        w.add_value_length_mla(config["v_head_dim"])
    if growth := (config.get("rope_parameters") or {}).get("mscale_all_dim"):
        w.add_rope_scaling_yarn_log_mul(0.1 * growth)


def add_experts(w: Any, config: dict[str, Any]) -> None:
    """Each of them that a config has is written as the converter does."""
    for keys, add in (
        (("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), w.add_expert_count),
        (("moe_num_primary_experts",), w.add_expert_count),
        (("moe_num_active_primary_experts",), w.add_expert_used_count),
        (("num_experts_per_tok", "moe_k", "moe_topk"), w.add_expert_used_count),
        (("moe_intermediate_size", "moe_ffn_hidden_size"), w.add_expert_feed_forward_length),
        (("n_shared_experts", "moe_num_shared_experts"), w.add_expert_shared_count),
        (("first_k_dense_replace", "moe_layer_start_index"), w.add_leading_dense_block_count),
        (("moe_layer_interval", "interleave_moe_layer_step"), w.add_interleave_moe_layer_step),
        (("routed_scaling_factor",), w.add_expert_weights_scale),
        (("n_group",), w.add_expert_group_count),
        (("topk_group",), w.add_expert_group_used_count),
        (("num_nextn_predict_layers",), w.add_nextn_predict_layers),
        (("attention_multiplier",), w.add_attention_scale),
        (("embedding_multiplier",), w.add_embedding_scale),
        (("residual_multiplier",), w.add_residual_scale),
        (("logits_scaling",), w.add_logit_scale),
    ):
        for key in keys:
            if config.get(key) is not None:
                add(config[key])
    if "norm_topk_prob" in config and "n_routed_experts" in config:
        w.add_expert_weights_norm(config["norm_topk_prob"])
    softmax = config.get("moe_primary_router_apply_softmax")  # SmallThinker's
    sigmoid = w.arch in ("glm4moe", "dots1", "minimax-m2") or config["model_type"] in (
        "deepseek_v3",
        "glm4_moe_lite",
    )
    if softmax is not None or sigmoid:
        import gguf

        kinds = gguf.ExpertGatingFuncType
        w.add_expert_gating_func(kinds.SOFTMAX if softmax else kinds.SIGMOID)
    if any(config.get("sliding_window_layout", ())):
        w.add_sliding_window(config["sliding_window_size"])
    if w.arch in ("minimax-m2", "hunyuan-moe", "gpt-oss", "llama4"):
        w.add_expert_feed_forward_length(config["intermediate_size"])
    if w.arch == "hunyuan-moe":
        w.add_expert_shared_feed_forward_length(config["intermediate_size"])
        w.add_rope_scaling_factor(1.0)


def add_family(w: Any, config: dict[str, Any], out: dict[str, F32]) -> None:
    """Windows, caps, scales and longrope's tensors."""
    if w.arch in ("phi3", "gemma2", "gemma3", "llama", "gpt-oss", "phimoe") and config.get("sliding_window"):
        w.add_sliding_window(config["sliding_window"])
    if w.arch == "gemma3":
        w.add_array("gemma3.attention.sliding_window_pattern", [t[0] == "s" for t in config["layer_types"]])
    for key, add in (
        ("attn_logit_softcapping", w.add_attn_logit_softcapping),
        ("final_logit_softcapping", w.add_final_logit_softcapping),
    ):
        if config.get(key):
            add(config[key])
    if w.arch == "minicpm":
        w.add_embedding_scale(float(config["scale_emb"]))
        w.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        w.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    if config["model_type"] == "olmo3":
        w.add_sliding_window(config["sliding_window"])
        w.add_sliding_window_pattern([t == "sliding_attention" for t in config["layer_types"]])
    if w.arch in ("stablelm", "gptneox"):
        # llama.cpp's converter writes true of a StableLM whose config has no such key, as 1.6B's.
        w.add_parallel_residual(config["use_parallel_residual"] or w.arch == "stablelm")
    if w.arch in ("command-r", "cohere2"):
        w.add_logit_scale(config["logit_scale"])
        w.add_string(f"{w.arch}.rope.scaling.type", "none")
    if w.arch == "cohere2":
        w.add_sliding_window(config["sliding_window"])
    if "shared_intermediate_size" in config:
        w.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        scale = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
        grown = 1 + np.log(scale) / np.log(rope["original_max_position_embeddings"])
        factor = float(np.sqrt(grown)) if scale > 1 else 1.0
        w.add_rope_scaling_attn_factors(rope.get("long_mscale", factor))
        out["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        out["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)


def write(
    hf: Path,
    path: Path,
    *,
    powerinfer: bool = False,
    rank: int = 32,
    arch: str = "llama",
    types: Any = None,
    as_f32: bool = False,
    more: Any = None,
    apart: bool = False,
    merge: bool = False,
) -> Path:
    """`types`: name -> a gguf type's name, or None for f32. Norms and biases are always f32.

    `as_f32`: what these types make of the numbers is stored, in f32.
    """
    import gguf

    config = json.loads((hf / "config.json").read_text())
    w = gguf.GGUFWriter(path, arch)
    heads = config["num_attention_heads"]
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    widths = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "moe_ffn_hidden_size")
    ffn = next(config[key] for key in widths if config.get(key))
    w.add_feed_forward_length(config.get("intermediate_size_mlp", ffn))
    w.add_head_count(heads)
    latent = "kv_lora_rank" in config
    w.add_head_count_kv(1 if latent and not apart else kv_heads(config))
    w.add_file_type(0)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    if arch != "opt":
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        add_norm_and_rope(w, config, config["qk_rope_head_dim"] if latent else head_dim)
        if latent:
            add_latent(w, config, apart)
        elif arch != "gemma4":
            w.add_key_length(head_dim)
            w.add_value_length(head_dim)
    out = tensors_of(hf, powerinfer, apart)
    out = merged(out) if merge else out
    add_experts(w, config)
    add_family(w, config, out)
    if arch == "gemma4":
        add_gemma4(w, config, out)
    if more is not None:
        more(w)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_factors(config)
    if powerinfer:
        w.add_float32("powerinfer.sparse_threshold", 0.25)
        rng = np.random.default_rng(9)
        for i in range(config["num_hidden_layers"]):
            dim = config["hidden_size"]
            out[f"blk.{i}.fc1.weight"] = rng.standard_normal((rank * (i + 1), dim), dtype=np.float32)
            out[f"blk.{i}.fc2.weight"] = rng.standard_normal((ffn, rank * (i + 1)), dtype=np.float32)
    for name, x in out.items():
        kind = types(name) if types is not None and x.ndim == 2 and "norm" not in name else None
        if kind is None:
            w.add_tensor(name, x.astype(np.float32))
        else:
            t = gguf.GGMLQuantizationType[kind]
            raw = k_blocks(kind, x.shape, len(name)) if kind in K_SCALES else None
            raw = gguf.quants.quantize(x.astype(np.float32), t) if raw is None else raw
            if as_f32:
                w.add_tensor(name, gguf.quants.dequantize(raw, t))
            else:
                w.add_tensor(name, raw, raw_dtype=t)
    if "quantization_config" in config and arch == "gpt-oss":
        for name, raw in gpt_oss_blocks(hf).items():
            w.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    if powerinfer:
        with open(path, "r+b") as f:
            f.write(b"PWRI")
            os.fsync(f.fileno())
    return path
