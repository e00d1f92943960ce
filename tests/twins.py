"""Tiny random Hugging Face model directories ("twins"), one per kind of model we read, and their true logits.

Every parameter is random, norm weights and biases too, so that a dropped or swapped tensor shows. Owns
nothing of ours: it must not import `thermocline`, or the twin would share our mistakes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB = 131  # prime: no block, tile or vector width divides it
CONTEXT = 64
FATRELU_THRESHOLD = 0.05

Json = dict[str, Any]


def _edit_config(path: Path, change: Callable[[Json], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _randomise(model: Any, seed: int) -> None:
    """Matrices ~ N(0, gain/sqrt(columns)), vectors near 1 (norm weights) or 0 (biases).

    Gains near 1 keep the noise of an f16 KV cache at an NMSE of about 1e-8, while a wrong window, rope
    scaling or position costs 1e-3 and more, a wrong threshold 2e-5.
    """
    import torch

    rng = np.random.default_rng(seed)
    for name, p in sorted(model.named_parameters()):
        with torch.no_grad():
            p.copy_(torch.from_numpy(random_tensor(name, tuple(p.shape), rng)))


def random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    if name.endswith("A_log"):  # a state that outlives some tokens
        return np.asarray(0.4 * rng.standard_normal(shape) - 1.5, dtype=np.float32)
    if name.endswith(
        ("e_score_correction_bias", "expert_bias")
    ):  # decides between experts whose scores are no near tie
        step = 0.4 if "moe_statics" in name else 0.25
        return np.asarray(step * rng.integers(0, 2, shape), dtype=np.float32)
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) >= 2:
        gain = 1.0 if "q_proj" in name or "k_proj" in name else 0.8
        value = noise * (1.0 if "embed" in name else gain / np.sqrt(shape[-1]))
    else:
        value = 0.1 * noise + (0.0 if name.endswith("bias") else 1.0)
    return np.asarray(value, dtype=np.float32)


def _save(model: Any, path: Path, seed: int, shard: str = "5GB") -> Path:
    _randomise(model, seed)
    model.save_pretrained(path, max_shard_size=shard)
    return path


def _llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    base: Json = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(base | changes))


def _llama(path: Path, seed: int, shard: str = "5GB", **changes: Any) -> Path:
    from transformers import LlamaForCausalLM

    return _save(LlamaForCausalLM(_llama_config(**changes)), path, seed, shard)


def llama(path: Path, seed: int = 0) -> Path:
    """Llama-2 with grouped-query attention and SiLU."""
    return _llama(path, seed)


def llama_sharded(path: Path, seed: int = 0) -> Path:
    """The same in several shards with an index."""
    return _llama(path, seed, shard="60KB")


def llama_relu_tied(path: Path, seed: int = 1) -> Path:
    """ReLU, tied head, biased attention, and a head_dim that is not dim / n_heads."""
    return _llama(
        path,
        seed,
        hidden_act="relu",
        tie_word_embeddings=True,
        attention_bias=True,
        head_dim=24,
        num_key_value_heads=1,
    )


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3(path: Path, seed: int = 2) -> Path:
    """Llama-3 frequency scaling in transformers 5's `rope_parameters`, and several end tokens."""
    rope = {"rope_theta": 10000.0, **LLAMA3_ROPE}
    return _llama(path, seed, rope_parameters=rope, eos_token_id=[2, 3])


def llama3_old(path: Path, seed: int = 2) -> Path:
    """The same weights, spelled as before transformers 5: top-level `rope_theta` and `rope_scaling`."""

    def old_spelling(config: Json) -> None:
        del config["rope_parameters"]
        config |= {"rope_theta": 10000.0, "rope_scaling": dict(LLAMA3_ROPE), "torch_dtype": "float32"}

    _edit_config(llama3(path, seed), old_spelling)
    return path


def llama_fatrelu(path: Path, seed: int = 7) -> Path:
    """ProSparse: transformers has no such class, so `hf_logits` puts the activation into a Llama.

    The activation jumps at its threshold: of 20 seeds this one has the fewest gates within f16 noise of it.
    """

    def prosparse(config: Json) -> None:
        config |= {
            "architectures": ["SparseLlamaForCausalLM"],
            "model_type": "sparsellama",
            "hidden_act": "fatrelu",
            "hidden_act_param": FATRELU_THRESHOLD,
        }

    _edit_config(_llama(path, seed, hidden_act="relu"), prosparse)
    return path


def sparse_lm(path: Path) -> Path:
    """Sakana's SparseLM: a Llama with ReLU whose config says SiLU, which its code does not look at."""

    def sakana(config: Json) -> None:
        config |= {"architectures": ["SparseLlamaForCausalLM"], "model_type": "llama_sparse_relu"}
        config |= {"hidden_act": "silu"}

    _edit_config(_llama(path, 62, hidden_act="relu"), sakana)
    return path


def llama_gelu(path: Path, seed: int = 6) -> Path:
    """GELU (erf) in a gated FFN."""
    return _llama(path, seed, hidden_act="gelu")


def mistral(path: Path, seed: int = 4) -> Path:
    """A sliding window shorter than the context."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**(_llama_config().to_dict() | {"model_type": "mistral", "sliding_window": 9}))
    return _save(MistralForCausalLM(config), path, seed)


def bamboo(path: Path, seed: int = 8) -> Path:
    """dReLU: transformers has no such class, so `hf_logits` puts the second ReLU into a Mistral."""

    def renamed(config: Json) -> None:
        config |= {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu"}

    _edit_config(mistral(path, seed), renamed)
    return path


def _mixtral(path: Path, seed: int, **changes: Any) -> Path:
    """Routers mostly read what the token's embedding says in a few columns: else a rounding error somewhere
    would choose another expert, and nothing could be compared.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
    base = _llama_config().to_dict() | {"model_type": "mixtral"} | experts
    model = MixtralForCausalLM(MixtralConfig(**(base | changes)))
    _randomise(model, seed)
    rng = np.random.default_rng(seed)
    wanted = np.array([rng.permutation([3.0, 2.0, -1.0, -2.0]) for _ in range(VOCAB)], np.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :4] = torch.from_numpy(wanted)
        for layer in model.model.layers:
            layer.mlp.gate.weight[:, :4] = torch.eye(4)
    model.save_pretrained(path)
    return path


def mixtral(path: Path, seed: int = 32) -> Path:
    """Four experts, two for each token."""
    return _mixtral(path, seed)


def mixtral_relu(path: Path, seed: int = 33) -> Path:
    """ReLU in every expert: their neurons are skipped."""
    return _mixtral(path, seed, hidden_act="relu")


def turbosparse_mixtral(path: Path, seed: int = 34) -> Path:
    """dReLU in every expert: transformers has no such class, so `hf_logits` puts it into a Mixtral."""

    def renamed(config: Json) -> None:
        config |= {"architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral"}

    _edit_config(mixtral_relu(path, seed), renamed)
    return path


def opt(path: Path, seed: int = 5) -> Path:
    """Learned positions (offset 2), LayerNorm, biases everywhere, ungated ReLU, tied head."""
    return _opt(path, seed, word_embed_proj_dim=64, do_layer_norm_before=True)


def _opt(path: Path, seed: int, **changes: Any) -> Path:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        **changes,
    )
    return _save(OPTForCausalLM(config), path, seed)


# ---- other families: `transformers`' own classes, with every option that its config has


def _transformers(name: str, path: Path, seed: int, **changes: Any) -> Path:
    return _save(_model(name, **changes), path, seed)


def _model(name: str, **changes: Any) -> Any:
    import transformers

    base = _llama_config().to_dict()
    for key in ("model_type", "architectures", "rope_parameters", "transformers_version"):
        base.pop(key, None)
    cls = getattr(transformers, CONFIG_CLASSES.get(name, f"{name}Config"))
    known = cls()
    config = cls(**({k: v for k, v in base.items() if hasattr(known, k)} | changes))
    return getattr(transformers, f"{name}ForCausalLM")(config)


CONFIG_CLASSES = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
    "Llama4": "Llama4TextConfig",
}


def qwen2(path: Path) -> Path:
    """Biases on q, k and v, and a window in the later layers."""
    return _transformers(
        "Qwen2", path, 10, use_sliding_window=True, sliding_window=9, max_window_layers=1, head_dim=16
    )


def qwen2_drelu(path: Path) -> Path:
    """SparseQwen2: a config that says relu, and code with relu twice, which `hf_logits` puts in."""
    return _transformers("Qwen2", path, 10, hidden_act="relu")


def qwen3(path: Path) -> Path:
    """Norms of each head's q and k; a head_dim that is not dim / heads."""
    return _transformers("Qwen3", path, 11, head_dim=24)


def gemma2(path: Path) -> Path:
    """Soft caps low enough to matter, windows in every other layer."""
    return _transformers(
        "Gemma2",
        path,
        12,
        sliding_window=9,
        query_pre_attn_scalar=10,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
        tie_word_embeddings=True,
    )


def gemma3(path: Path) -> Path:
    """qk-norm, biases, a rope of its own for the layers with a window, another scaled for the others."""
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    return _transformers(
        "Gemma3",
        path,
        13,
        sliding_window=9,
        query_pre_attn_scalar=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=ropes,
        attention_bias=True,
        tie_word_embeddings=True,
    )


def gemma3_wrapper(path: Path) -> Path:
    """Gemma 3 of 4B and more: a text model inside one of images, whose config says only what differs."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = json.loads((gemma3(path) / "config.json").read_text())
    eyes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={k: v for k, v in text.items() if k not in ("architectures", "transformers_version")},
        vision_config={**eyes, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    return _save(Gemma3ForConditionalGeneration(config), path, 13)


SLIDING, FULL = "sliding_attention", "full_attention"


def _gemma4_config(layers: list[str], **changes: Any) -> Json:
    ropes = {
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 500.0},
    }
    base: Json = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "sliding_window": 9,
        "global_head_dim": 32,
        "rope_parameters": ropes,
        "final_logit_softcapping": 20.0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    }
    return base | changes


def _gemma4(path: Path, seed: int, layers: list[str], **changes: Any) -> Path:
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    model = Gemma4ForCausalLM(Gemma4TextConfig(**_gemma4_config(layers, **changes)))
    _randomise(model, seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for key, p in model.named_buffers():
            if key.endswith("layer_scalar"):
                p.copy_(torch.from_numpy(random_tensor(key, tuple(p.shape), rng)))
    steer({key: p.detach().numpy() for key, p in model.named_parameters()}, seed)
    model.save_pretrained(path)
    return path


def gemma4(path: Path) -> Path:
    """Gemma 4 31B: heads of two sizes, values that are the keys where there is no window."""
    layers = [SLIDING, FULL, SLIDING, FULL]
    return _gemma4(path, 60, layers, attention_k_eq_v=True, num_global_key_value_heads=1)


def gemma4_unified(path: Path) -> Path:
    """Gemma 4 12B, whose config has no word of experts and tables."""
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    drop = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    config = {k: v for k, v in _gemma4_config([SLIDING, FULL]).items() if k not in drop}
    return _save(Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**config)), path, 63)


def gemma4_moe(path: Path) -> Path:
    """Gemma 4 26B-A4B: experts beside the FFN of each layer, a router that reads the stream."""
    layers = [SLIDING, SLIDING, FULL]
    more = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
    more |= {"num_experts": EXPERTS, "top_k_experts": ACTIVE, "moe_intermediate_size": 48}
    return _gemma4(path, 61, layers, **more)


def gemma4_small(path: Path) -> Path:
    """Gemma 4 E2B: rows of a table for each layer, the last layers share keys and values, and are wider."""
    layers = [SLIDING, FULL, SLIDING, SLIDING, FULL]
    more = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 32}
    return _gemma4(path, 62, layers, **more)


def phi3(path: Path) -> Path:
    """q, k, v and gate, up fused; three quarters of each head turned."""
    return _transformers("Phi3", path, 14, sliding_window=9, pad_token_id=0, partial_rotary_factor=0.75)


def _phi3_longrope(path: Path, original: int) -> Path:
    rng = np.random.default_rng(3)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": original,
        "short_factor": (1 + rng.random(8)).round(3).tolist(),
        "long_factor": (2 + 3 * rng.random(8)).round(3).tolist(),
    }
    return _transformers(
        "Phi3", path, 15, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=original
    )


def phi3_longrope_short(path: Path) -> Path:
    """Longrope within its original context."""
    return _phi3_longrope(path, CONTEXT)


def phi3_longrope_long(path: Path) -> Path:
    """And beyond."""
    return _phi3_longrope(path, 20)


def nemotron(path: Path) -> Path:
    """Ungated squared ReLU, LayerNorm stored as w - 1, half of each head turned."""
    return _transformers("Nemotron", path, 16, hidden_act="relu2", norm_eps=1e-5, partial_rotary_factor=0.5)


def nemotron_biased(path: Path) -> Path:
    return _transformers("Nemotron", path, 17, hidden_act="relu2", attention_bias=True, mlp_bias=True)


def arcee(path: Path) -> Path:
    """Ungated squared ReLU in a Llama."""
    return _transformers("Arcee", path, 18, hidden_act="relu2")


def arcee_biased(path: Path) -> Path:
    return _transformers("Arcee", path, 36, hidden_act="relu2", attention_bias=True, mlp_bias=True)


def bitnet(path: Path) -> Path:
    """Norms before attention's and the FFN's last matrices, gated squared ReLU."""
    return _transformers("BitNet", path, 19, hidden_act="relu2")


def bitnet_online(path: Path) -> Path:
    """microsoft/bitnet-b1.58-2B-4T-bf16: float weights, made ternary by the model's own linear layers."""

    def online(config: Json) -> None:
        config["quantization_config"] = {**AUTOBITLINEAR, "quantization_mode": "online"}

    path = _transformers("BitNet", path, 28, hidden_act="relu2", tie_word_embeddings=True)
    _edit_config(path, online)
    return path


def bitnet_offline(path: Path) -> Path:
    """microsoft/bitnet-b1.58-2B-4T: ternary values, four a byte, and a number a matrix."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.bitnet import pack_weights

    path = bitnet_online(path)
    rng, out = np.random.default_rng(29), dict[str, torch.Tensor]()
    for name, w in load_file(path / "model.safetensors").items():
        if "_proj" in name:
            ternary = torch.from_numpy(rng.integers(-1, 2, tuple(w.shape)).astype(np.float32))
            scale = torch.tensor([1.2 * (0.8 + 0.4 * rng.random()) / w.shape[1] ** 0.5])
            out[name], out[f"{name}_scale"] = pack_weights(ternary), scale.bfloat16()
        else:
            out[name] = w
    save_file(out, path / "model.safetensors", {"format": "pt"})
    offline = {**AUTOBITLINEAR, "quantization_mode": "offline"}
    _edit_config(path, lambda config: config.update(quantization_config=offline))
    return path


AUTOBITLINEAR = {"quant_method": "bitnet", "linear_class": "autobitlinear"}


def falcon_7b(path: Path) -> Path:
    """One k and v head, one norm for both halves, side by side."""
    return _falcon(path, 20)


def falcon_40b(path: Path) -> Path:
    """Groups of heads, interleaved; two norms."""
    return _falcon(path, 21, new_decoder_architecture=True, num_kv_heads=2)


def falcon_11b(path: Path) -> Path:
    """Groups of heads, one norm for both halves."""
    return _falcon(path, 30, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1)


def falcon_rw(path: Path) -> Path:
    """One after the other, a k and v head for each q head, biases."""
    return _falcon(path, 22, multi_query=False, parallel_attn=False, bias=True, activation="relu")


def _falcon(path: Path, seed: int, **changes: Any) -> Path:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        ffn_hidden_size=112,
        **({"alibi": False} | changes),
    )
    return _save(FalconForCausalLM(config), path, seed)


def opt_350m(path: Path) -> Path:
    """Norms after each half, no last one, embeddings narrower than the model."""
    return _opt(path, 23, word_embed_proj_dim=32, do_layer_norm_before=False)


def llama_linear(path: Path) -> Path:
    return _llama(path, 24, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0})


def llama_dynamic(path: Path) -> Path:
    """Within the model's limit dynamic scaling is none."""
    return _llama(path, 25, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0})


def llama_yarn(path: Path) -> Path:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return _llama(path, 26, rope_parameters=rope)


def llama_yarn_beta(path: Path) -> Path:
    """The blend elsewhere than by default, and cos and sin grown by another factor."""
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return _llama(
        path, 31, rope_parameters=rope | {"beta_fast": 1.5, "beta_slow": 0.25, "attention_factor": 1.4}
    )


def minicpm(path: Path) -> Path:
    """muP: transformers has no such class, so `hf_logits` scales a Llama."""

    def scaled(config: Json) -> None:
        config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"} | MUP

    _edit_config(_llama(path, 27, hidden_act="relu"), scaled)
    return path


def minicpm_s(path: Path) -> Path:
    """MiniCPM-S: the same with FATReLU."""
    _edit_config(minicpm(path), lambda c: c.update(hidden_act="fatrelu", hidden_act_param=FATRELU_THRESHOLD))
    return path


# ---- mixtures: routers that mostly read what the token's embedding says in a few columns, as `_mixtral`'s

EXPERTS, ACTIVE = 8, 3


def _mixture(name: str, path: Path, seed: int, **changes: Any) -> Path:
    """Eight experts, three for each token. What routers add to scores is random and decides some choices."""
    import torch

    model = _model(name, **({"num_experts_per_tok": ACTIVE, "tie_word_embeddings": False} | changes))
    _randomise(model, seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for key, p in model.named_buffers():
            if key.endswith("bias"):
                p.copy_(torch.from_numpy(random_tensor(key, tuple(p.shape), rng)))
    tensors = {key: p.detach().numpy() for key, p in model.named_parameters()}
    steer(tensors, seed)
    model.save_pretrained(path)
    return path


def steer(tensors: dict[str, NDArray[np.float32]], seed: int) -> None:
    """Let routers mostly read what a token's embedding says in the first columns, in place."""
    routers = [
        w
        for name, w in tensors.items()
        if re.search(r"\.(gate|gate\.wg|router|router\.layer|primary_router|router\.proj)\.weight$", name)
        and ".experts." not in name
    ]
    if not routers:
        return
    rng, n = np.random.default_rng(seed), len(routers[0])
    names = ("embed_tokens.weight", "embeddings.weight")
    (embed,) = (w for name, w in tensors.items() if name.endswith(names))
    levels = np.linspace(3, -2.5, n)  # not symmetric: sums of two sigmoids would be alike
    embed[:, :n] = [rng.permutation(levels) for _ in range(len(embed))]
    for w in routers:
        w *= np.float32(0.1)
        w[:, :n] += np.eye(n, dtype=np.float32)


def qwen3_moe(path: Path) -> Path:
    """Weights that add up to one, q and k normed by head, and the second layer without experts."""
    more = {"moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 24}
    return _mixture("Qwen3Moe", path, 40, num_experts=EXPERTS, **more)


def qwen3_moe_scores(path: Path) -> Path:
    """Weights as they are scored, experts in every second layer, biases, and a window."""
    more = {"moe_intermediate_size": 48, "norm_topk_prob": False, "decoder_sparse_step": 2}
    more |= {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9}
    return _mixture("Qwen3Moe", path, 41, num_experts=EXPERTS, head_dim=16, **more)


def _gpt_oss(path: Path, seed: int, **changes: Any) -> Path:
    """Rows of whole blocks of 32, so that experts can be blocks; activations on both sides of the limit."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    more: Json = {"sliding_window": 9, "swiglu_limit": 0.9, "intermediate_size": 96, "head_dim": 24}
    more |= {"rope_parameters": rope | {"beta_fast": 2.0, "beta_slow": 0.1, "truncate": False}}
    return _mixture("GptOss", path, seed, num_local_experts=EXPERTS, **(more | changes))


def gpt_oss(path: Path) -> Path:
    """Sinks, a window in every second layer, YaRN that cuts nothing off, biases, clamped experts."""
    return _gpt_oss(path, 55)


def gpt_oss_plain(path: Path) -> Path:
    """Without biases of attention, windows where the config says, another clamp, plain rope."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    rope = {"rope_type": "default", "rope_theta": 500.0}
    more: Json = {"attention_bias": False, "swiglu_alpha": 0.8, "swiglu_limit": 2.0, "layer_types": kinds}
    return _gpt_oss(path, 51, rope_parameters=rope, **more)


def gpt_oss_blocks(path: Path) -> Path:
    """As published: experts in blocks of MXFP4, low nibbles first."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(_gpt_oss(path, 52) / "model.safetensors")
    put_in_blocks(tensors, 52)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _edit_config(path, lambda c: c.update(quantization_config=MXFP4))
    return path


def put_in_blocks(tensors: dict[str, NDArray[Any]], seed: int) -> None:
    """Random blocks in place of the stacks of experts."""
    rng = np.random.default_rng(seed)
    for name in [n for n in tensors if re.search(r"experts\.\w+_proj$", n)]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = rng.integers(119, 124, blocks.shape[:3], dtype=np.uint8)


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}


def olmoe(path: Path) -> Path:
    """Norms over all heads of q and k; weights that do not add up to one."""
    return _mixture("Olmoe", path, 42, num_experts=EXPERTS, intermediate_size=48)


GROUPED = {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
GROUPED |= {"moe_intermediate_size": 48, "first_k_dense_replace": 1, "norm_topk_prob": True}


def glm4_moe(path: Path) -> Path:
    """GLM-4.5: two shared experts, the best of groups, a scale, a quarter of each head turned."""
    more = {"n_shared_experts": 2, "use_qk_norm": True, "partial_rotary_factor": 0.25, "head_dim": 24}
    return _mixture("Glm4Moe", path, 43, **GROUPED, **more)


def glm4_moe_air(path: Path) -> Path:
    """GLM-4.5-Air: biases on q, k and v, no groups; weights as they are scored."""
    more = {"n_shared_experts": 1, "attention_bias": True, "head_dim": 16, "n_group": 1, "topk_group": 1}
    return _mixture("Glm4Moe", path, 44, **(GROUPED | more | {"norm_topk_prob": False}))


def dots1(path: Path) -> Path:
    """dots.llm1: norms of q and k, and a window in the last layer."""
    more = {"n_shared_experts": 1, "sliding_window": 9, "max_window_layers": 2, "head_dim": 16}
    return _mixture("Dots1", path, 45, **GROUPED, **more)


def ernie4_5_moe(path: Path) -> Path:
    """ERNIE 4.5: rope on neighbours; the sum of weights is bounded from below, here by what matters."""
    more = {"moe_num_experts": EXPERTS, "moe_k": ACTIVE, "moe_num_shared_experts": 2, "moe_norm_min": 0.7}
    more |= {"moe_layer_start_index": 1, "moe_intermediate_size": 48, "head_dim": 16}
    return _mixture("Ernie4_5_Moe", path, 46, **more)


def granite_moe(path: Path) -> Path:
    """Granite 3 MoE: stacked experts, and four scales."""
    scales = {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
    more = {"num_local_experts": EXPERTS, "intermediate_size": 48, "logits_scaling": 1.3}
    return _mixture("GraniteMoe", path, 47, **scales, **more)


def minimax_m2(path: Path) -> Path:
    """MiniMax-M2: norms over all heads of q and k, half of each head turned."""
    more = {"num_local_experts": EXPERTS, "intermediate_size": 48, "head_dim": 24, "rotary_dim": 12}
    return _mixture("MiniMaxM2", path, 48, **more)


def hunyuan_moe(path: Path) -> Path:
    """Hunyuan-A13B: norms of q and k behind rope, whose theta grows by alpha; one shared expert."""
    rope = {"rope_type": "dynamic", "type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 50.0}
    more = {"moe_topk": ACTIVE, "intermediate_size": 48, "head_dim": 24, "rope_parameters": rope}
    return _mixture("HunYuanMoEV1", path, 49, num_experts=EXPERTS, **more)


def granite_moe_shared(path: Path) -> Path:
    """The same with a shared expert, whose gate and up are one tensor."""
    scales = {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
    more = {"num_local_experts": EXPERTS, "intermediate_size": 48, "shared_intermediate_size": 80}
    return _mixture("GraniteMoeShared", path, 60, logits_scaling=1.3, **scales, **more)


def phimoe(path: Path) -> Path:
    """Phi-3.5-MoE: SparseMixer, LayerNorms, biases, longrope with a scale of its own."""
    rng = np.random.default_rng(4)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": CONTEXT}
    rope |= {f"{kind}_factor": (1 + rng.random(8)).round(3).tolist() for kind in ("short", "long")}
    rope |= {"short_mscale": 1.25, "long_mscale": 1.25}
    more: Json = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 48}
    more |= {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.22, "sliding_window": 9}
    return _mixture("Phimoe", path, 103, rope_parameters=rope, **more)


def phimoe_plain(path: Path) -> Path:
    """Without biases of attention and head, and its factors as published."""
    more = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 48}
    return _mixture("Phimoe", path, 85, **more)


LLAMA4: Json = {
    "num_local_experts": EXPERTS,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "head_dim": 24,
}
LLAMA4 |= {"num_experts_per_tok": 1, "attention_chunk_size": 9, "floor_scale": 4, "attn_scale": 0.5}


def llama4(path: Path) -> Path:
    """Scout: chunks with rope, all positions without it, norms behind rope, a router of inputs."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 1.0, "original_max_position_embeddings": 32}
    return _mixture(
        "Llama4", path, 83, no_rope_layer_interval=2, rope_parameters=rope, num_hidden_layers=4, **LLAMA4
    )


def llama4_maverick(path: Path) -> Path:
    """Maverick: experts in every second layer, no norms of q and k; two experts, and no tuning."""
    more: Json = {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False}
    more |= {"num_experts_per_tok": 2, "attention_bias": True, "no_rope_layers": [0, 1, 1]}
    return _mixture("Llama4", path, 84, **(LLAMA4 | more))


# ---- dense families


def granite(path: Path) -> Path:
    """Granite 3: four scales."""
    scales = {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
    return _transformers("Granite", path, 61, logits_scaling=1.3, **scales)


def granite_biased(path: Path) -> Path:
    return _transformers("Granite", path, 68, attention_multiplier=0.3, attention_bias=True)


def smollm3(path: Path) -> Path:
    """A layer without rope, and a window there."""
    more = {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}
    return _transformers("SmolLM3", path, 65, pad_token_id=0, attention_bias=True, **more)


def smollm3_list(path: Path) -> Path:
    """The layers without rope in a list; the last ones have it."""
    return _transformers("SmolLM3", path, 66, pad_token_id=0, no_rope_layers=[0, 1, 1])


def smollm3_interval(path: Path) -> Path:
    """Every fourth layer without rope, as published."""
    return _transformers("SmolLM3", path, 67, pad_token_id=0, num_hidden_layers=4)


def olmo2(path: Path) -> Path:
    """Norms of what halves give, and over all heads of q and of k."""
    return _transformers("Olmo2", path, 62)


def olmo3(path: Path) -> Path:
    """Windows in most layers, whose rope is not scaled by YaRN as the others'."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    ropes = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return _transformers("Olmo3", path, 63, sliding_window=9, layer_types=kinds, rope_parameters=ropes)


def _smallthinker(path: Path, seed: int, **changes: Any) -> Path:
    """SmallThinker: transformers has no such class, so `_SmallThinker` computes it."""
    from safetensors.numpy import save_file

    config: Json = {
        "architectures": ["SmallThinkerForCausalLM"], "model_type": "smallthinker", "vocab_size": VOCAB,
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 24, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 1000.0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "moe_ffn_hidden_size": 48,
        "moe_num_primary_experts": EXPERTS, "moe_num_active_primary_experts": ACTIVE,
        "moe_primary_router_apply_softmax": False, "rope_layout": [0, 1, 1], "sliding_window_size": 9,
        "sliding_window_layout": [0, 1, 1],
    } | changes  # fmt: skip
    d, rows = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    kv, f = config["num_key_value_heads"] * config["head_dim"], config["moe_ffn_hidden_size"]
    experts = (f"block_sparse_moe.experts.{e}." for e in range(config["moe_num_primary_experts"]))
    matrices: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (rows, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, rows), "input_layernorm": (d,), "post_attention_layernorm": (d,),
        "block_sparse_moe.primary_router": (config["moe_num_primary_experts"], d),
    }  # fmt: skip
    for e in experts:
        matrices |= {e + "gate": (f, d), e + "up": (f, d), e + "down": (d, f)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, d), "model.norm": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (VOCAB, d)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in matrices.items()}
    rng = np.random.default_rng(seed)
    tensors = {f"{n}.weight": random_tensor(f"{n}.weight", shapes[n], rng) for n in sorted(shapes)}
    steer(tensors, seed)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def smallthinker(path: Path) -> Path:
    """21B's kind: a layer without rope and window, two with both; sigmoids by their sum."""
    return _smallthinker(path, 60)


def smallthinker_softmax(path: Path) -> Path:
    """4B's kind: rope everywhere, no window, a tied head; weights are a softmax."""
    more: Json = {"rope_layout": [1] * 3, "sliding_window_layout": [0] * 3, "tie_word_embeddings": True}
    return _smallthinker(path, 61, moe_primary_router_apply_softmax=True, **more)


# ---- recurrent layers

DELTANET: Json = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 8}
DELTANET |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "head_dim": 16}
DELTANET |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SHARED: Json = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "num_experts": EXPERTS}


def qwen3_next(path: Path) -> Path:
    """What a group of heads reads in one tensor; experts, and one of all tokens behind a gate."""
    return _mixture("Qwen3Next", path, 60, partial_rotary_factor=0.5, **DELTANET, **SHARED)


def qwen3_5(path: Path) -> Path:
    """Qwen3.5, dense, with a tied head and a DeltaNet whose kernel sees three tokens."""
    more = DELTANET | {"linear_conv_kernel_dim": 3, "tie_word_embeddings": True}
    return _transformers("Qwen3_5", path, 61, **more)


def qwen3_5_moe(path: Path) -> Path:
    """Qwen3.5's mixture as libraries write it: a tensor for each expert."""
    return _mixture("Qwen3_5Moe", path, 62, **DELTANET, **SHARED)


def qwen3_5_moe_stacked(path: Path) -> Path:
    """As published: experts in two stacks, a layer that guesses further tokens, and a tower for images."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(qwen3_5_moe(path) / "model.safetensors")
    own, base = {}, "model.language_model.layers"
    for i in range(3):
        at = f"layers.{i}.mlp.experts"
        (root,) = {n.split(at)[0] for n in tensors if at in n}

        def of(e: int, part: str, at: str = root + at) -> Any:
            return tensors.pop(f"{at}.{e}.{part}_proj.weight")

        gates = [np.concatenate([of(e, "gate"), of(e, "up")]) for e in range(EXPERTS)]
        own[f"{base}.{i}.mlp.experts.gate_up_proj"] = np.stack(gates)
        own[f"{base}.{i}.mlp.experts.down_proj"] = np.stack([of(e, "down") for e in range(EXPERTS)])
    for name, value in tensors.items():
        bare = name.removeprefix("model.").removeprefix("language_model.")
        own[name if name == "lm_head.weight" else f"model.language_model.{bare}"] = value
    own |= {"mtp.fc.weight": np.ones((4, 4), np.float32), "model.visual.patch.bias": np.ones(4, np.float32)}
    save_file(own, path / "model.safetensors", {"format": "pt"})

    def wrapped(config: Json) -> None:
        inner = dict(config)
        config.clear()
        config |= {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
        config |= {"text_config": inner, "vision_config": {"depth": 1}, "image_token_id": 5}
        config |= {"tie_word_embeddings": False, "vision_start_token_id": 6, "vision_end_token_id": 7}
        inner.pop("architectures")

    _edit_config(path, wrapped)
    return path


MAMBA: Json = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "conv_kernel": 4,
}
MAMBA |= {"head_dim": 16, "chunk_size": 8, "time_step_min": 1e-9}


def nemotron_h(path: Path) -> Path:
    """Nemotron-H: each layer is one of Mamba-2, attention without positions, and squared ReLU."""
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]
    return _transformers("NemotronH", path, 63, layers_block_type=kinds, **MAMBA)


def nemotron_h_moe(path: Path) -> Path:
    """Nemotron-3-Nano: mixtures of ungated squared ReLU, and one of all tokens; no bias of convolutions."""
    kinds = ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]
    more = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 48, "routed_scaling_factor": 1.7}
    more |= {"moe_shared_expert_intermediate_size": 40, "use_conv_bias": False}
    return _mixture("NemotronH", path, 64, layers_block_type=kinds, **MAMBA, **more)


GRANITE: Json = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12}
GRANITE |= {"mamba_d_conv": 4, "mamba_chunk_size": 8, "shared_intermediate_size": 40, "logits_scaling": 1.3}
GRANITE |= {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
GRANITE |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}


def granite_hybrid(path: Path) -> Path:
    """Granite 4: stacked experts beside the FFN of all tokens, attention without positions."""
    more = {"num_local_experts": EXPERTS, "intermediate_size": 48}
    return _mixture("GraniteMoeHybrid", path, 65, **GRANITE, **more)


def granite_hybrid_dense(path: Path) -> Path:
    """Granite 4's smallest: one FFN, and rope."""
    more = {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True}
    return _transformers("GraniteMoeHybrid", path, 66, **GRANITE, **more)


CONV: Json = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "norm_eps": 1e-5}


def lfm2(path: Path) -> Path:
    """Short convolutions, and a width that the code makes of the config's."""
    return _transformers("Lfm2", path, 67, intermediate_size=168, block_multiple_of=16, **CONV)


def lfm2_moe(path: Path) -> Path:
    """LFM2's mixture behind a first layer without."""
    more = {"num_experts": EXPERTS, "moe_intermediate_size": 48, "num_dense_layers": 1}
    return _mixture("Lfm2Moe", path, 68, routed_scaling_factor=1.2, **CONV, **more)


def starcoder2(path: Path) -> Path:
    """Ungated, biases everywhere, a window."""
    return _transformers("Starcoder2", path, 70, hidden_act="gelu_pytorch_tanh", sliding_window=9)


def starcoder2_plain(path: Path) -> Path:
    return _transformers("Starcoder2", path, 71, hidden_act="gelu_pytorch_tanh", use_bias=False)


def stablelm(path: Path) -> Path:
    """StableLM 2 1.6B: biases on q, k and v, half of each head turned."""
    return _transformers("StableLm", path, 72, use_qkv_bias=True, partial_rotary_factor=0.5)


def stablelm_12b(path: Path) -> Path:
    """StableLM 2 12B: halves in parallel behind one norm, norms of every head's q and k."""
    return _transformers("StableLm", path, 73, qk_layernorm=True, use_parallel_residual=True)


def cohere(path: Path) -> Path:
    """Command R: parallel halves, rope on neighbours, scaled logits."""
    return _transformers("Cohere", path, 74, logit_scale=0.5, attention_bias=True, tie_word_embeddings=True)


def cohere_plus(path: Path) -> Path:
    """Command R+: norms of every head's q and k."""
    return _transformers("Cohere", path, 75, logit_scale=0.25, use_qk_norm=True, tie_word_embeddings=True)


def cohere2(path: Path) -> Path:
    """Command R7B: rope where a window is, and neither elsewhere."""
    more = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return _transformers("Cohere2", path, 76, logit_scale=0.5, tie_word_embeddings=True, **more)


def cohere2_pattern(path: Path) -> Path:
    """Every fourth layer to all positions, as published."""
    return _transformers("Cohere2", path, 77, sliding_window=9, num_hidden_layers=4, tie_word_embeddings=True)


def gpt_neox(path: Path) -> Path:
    """Pythia: parallel halves with a norm each, q, k and v by head, a quarter of each head turned."""
    return _transformers("GPTNeoX", path, 78, hidden_act="gelu", rotary_pct=0.25, attention_bias=True)


def gpt_neox_in_turn(path: Path) -> Path:
    """Halves one after the other, another theta, no biases of attention."""
    more = {"use_parallel_residual": False, "attention_bias": False, "rotary_emb_base": 500}
    return _transformers("GPTNeoX", path, 79, hidden_act="gelu", rotary_pct=0.5, **more)


def phi2(path: Path) -> Path:
    """Parallel halves behind one norm, a bias of the head."""
    return _transformers("Phi", path, 80, hidden_act="gelu_new", partial_rotary_factor=0.5)


LATENT: Json = {"head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 12}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 24, "q_lora_rank": 24, "n_shared_experts": 2}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


def deepseek_v2(path: Path) -> Path:
    """DeepSeek-V2: latent attention, YaRN that sharpens scores, the best of groups by their best expert."""
    more = {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "rope_parameters": DEEPSEEK_YARN}
    return _mixture("DeepseekV2", path, 60, **(GROUPED | LATENT | more))


def deepseek_v2_lite(path: Path) -> Path:
    """DeepSeek-V2-Lite: queries come directly, and there are no groups."""
    more = {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
    return _mixture("DeepseekV2", path, 61, **(GROUPED | LATENT | more))


def deepseek_v3(path: Path) -> Path:
    """DeepSeek-V3: the best of groups by their two best experts, with biases."""
    more: Json = {"rope_parameters": DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    more |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "q_lora_rank": 32}
    return _mixture("DeepseekV3", path, 62, **(GROUPED | LATENT | more))


def glm4_moe_lite(path: Path) -> Path:
    """GLM-4.7-Flash: as V3; rows that no vector divides, and rope on halves."""
    more: Json = {
        "kv_lora_rank": 37,
        "qk_nope_head_dim": 13,
        "v_head_dim": 8,
        "q_lora_rank": 19,
        "n_group": 1,
    }
    more |= {"topk_group": 1, "rope_interleave": False, "rms_norm_eps": 1e-5}
    return _mixture("Glm4MoeLite", path, 63, **(GROUPED | LATENT | more))


# What a user has to say of them: their configs leave open which ReLU it is.
ASKED = {"mixtral_relu": "relu", "qwen2_drelu": "drelu"}
MUP = {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 16}


TWINS: dict[str, Callable[[Path], Path]] = {
    f.__name__: f
    for f in (
        llama,
        llama_sharded,
        llama_relu_tied,
        llama3,
        llama3_old,
        llama_fatrelu,
        sparse_lm,
        llama_gelu,
        mistral,
        bamboo,
        mixtral,
        mixtral_relu,
        turbosparse_mixtral,
        opt,
        qwen2,
        qwen2_drelu,
        qwen3,
        gemma2,
        gemma3,
        gemma3_wrapper,
        gemma4,
        gemma4_moe,
        gemma4_unified,
        gemma4_small,
        phi3,
        phi3_longrope_short,
        phi3_longrope_long,
        nemotron,
        nemotron_biased,
        arcee,
        arcee_biased,
        bitnet,
        bitnet_online,
        bitnet_offline,
        falcon_7b,
        falcon_40b,
        falcon_11b,
        falcon_rw,
        opt_350m,
        llama_linear,
        llama_dynamic,
        llama_yarn,
        llama_yarn_beta,
        minicpm,
        minicpm_s,
        qwen3_moe,
        qwen3_moe_scores,
        gpt_oss,
        gpt_oss_plain,
        gpt_oss_blocks,
        olmoe,
        glm4_moe,
        glm4_moe_air,
        dots1,
        ernie4_5_moe,
        granite_moe,
        minimax_m2,
        hunyuan_moe,
        granite_moe_shared,
        phimoe,
        phimoe_plain,
        llama4,
        llama4_maverick,
        granite,
        granite_biased,
        smollm3,
        smollm3_list,
        smollm3_interval,
        olmo2,
        olmo3,
        smallthinker,
        smallthinker_softmax,
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        qwen3_5_moe_stacked,
        nemotron_h,
        nemotron_h_moe,
        granite_hybrid,
        granite_hybrid_dense,
        lfm2,
        lfm2_moe,
        starcoder2,
        starcoder2_plain,
        stablelm,
        stablelm_12b,
        cohere,
        cohere_plus,
        cohere2,
        cohere2_pattern,
        gpt_neox,
        gpt_neox_in_turn,
        phi2,
        deepseek_v2,
        deepseek_v2_lite,
        deepseek_v3,
        glm4_moe_lite,
    )
}


def _plain(path: Path, config: Json, name: str, **changes: Any) -> Any:
    """transformers' model of that name with a twin's weights, without the keys that it does not know."""
    import transformers
    from safetensors.torch import load_file

    drop = ("architectures", "model_type", "hidden_act_param", *MUP)
    plain = {k: v for k, v in config.items() if k not in drop} | changes
    cls = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")(cls(**plain, attn_implementation="eager"))
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model


def _fatrelu_model(path: Path, config: Json) -> Any:
    """A Llama whose activation is x where x > threshold, else 0 (arXiv 2402.13516, eq. 5)."""
    import torch

    class FATReLU(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > config["hidden_act_param"], x, torch.zeros_like(x))

    model = _plain(path, config, "Llama", hidden_act="relu")
    for layer in model.model.layers:
        layer.mlp.act_fn = FATReLU()
    return model


def _bamboo_model(path: Path, config: Json) -> Any:
    """A Mistral whose FFN is down(relu(gate x) * relu(up x)) (arXiv 2406.05955)."""
    return _with_drelu(_plain(path, config, "Mistral"))


def _with_drelu(model: Any) -> Any:
    import torch

    for layer in model.model.layers:
        layer.mlp.up_proj = torch.nn.Sequential(layer.mlp.up_proj, torch.nn.ReLU())
    return model


def _turbosparse_mixtral_model(path: Path, config: Json) -> Any:
    """A Mixtral whose experts are down(relu(gate x) * relu(up x))."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    class Experts(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.gate_up, self.down = inner.gate_up_proj, inner.down_proj

        def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows = []
            for t, ids, shares in zip(x, chosen, weights, strict=True):
                each = [torch.relu(self.gate_up[e] @ t).chunk(2) for e in ids]
                parts = [s * (self.down[e] @ (g * u)) for e, s, (g, u) in zip(ids, shares, each, strict=True)]
                rows.append(sum(parts))
            return torch.stack(rows)

    kept = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    model = MixtralForCausalLM.from_pretrained(
        path, config=MixtralConfig(**kept), dtype=torch.float32, attn_implementation="eager"
    )
    for layer in model.model.layers:
        layer.mlp.experts = Experts(layer.mlp.experts)
    return model


def _minicpm_model(path: Path, config: Json) -> Any:
    """Embeddings times scale_emb, halves scale_depth / sqrt(layers), logits base / dim."""
    import torch

    class Scaled(torch.nn.Module):
        def __init__(self, inner: Any, scale: float) -> None:
            super().__init__()
            self.inner, self.scale = inner, scale

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = self.inner(*args, **kwargs)
            return (out[0] * self.scale, *out[1:]) if isinstance(out, tuple) else out * self.scale

    fatrelu = config["hidden_act"] == "fatrelu"
    model = _fatrelu_model(path, config) if fatrelu else _plain(path, config, "Llama")
    depth = MUP["scale_depth"] / len(model.model.layers) ** 0.5
    model.model.embed_tokens = Scaled(model.model.embed_tokens, MUP["scale_emb"])
    for layer in model.model.layers:
        layer.self_attn, layer.mlp = Scaled(layer.self_attn, depth), Scaled(layer.mlp, depth)
    model.lm_head = Scaled(model.lm_head, MUP["dim_model_base"] / config["hidden_size"])
    return model


def _bitnet_model(path: Path, config: Json) -> Any:
    """transformers' BitNet with the weights its own quantised layers compute with, and float activations."""
    import torch
    from safetensors.torch import load_file
    from transformers import BitNetConfig, BitNetForCausalLM
    from transformers.integrations.bitnet import WeightQuant, unpack_weights

    mode = config.pop("quantization_config")["quantization_mode"]
    model = BitNetForCausalLM(BitNetConfig(**config, attn_implementation="eager"))
    weights = load_file(path / "model.safetensors")
    with torch.compiler.set_stance("force_eager"):  # they are marked for compilation, which needs a minute
        for name in [n for n in weights if n.endswith("_proj.weight")]:
            if mode == "online":
                weights[name] = WeightQuant.forward(None, weights[name])
            else:
                scale = weights.pop(f"{name}_scale").float()
                weights[name] = unpack_weights(weights[name], torch.float32) * scale
    model.load_state_dict({"lm_head.weight": weights["model.embed_tokens.weight"], **weights})
    return model


def _gpt_oss_blocks_model(path: Path, config: Json) -> Any:
    """transformers' gpt-oss with the numbers that it makes of the blocks."""
    import torch
    from safetensors.torch import load_file
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    del config["quantization_config"]
    model = GptOssForCausalLM(GptOssConfig(**config, attn_implementation="eager"))
    weights = load_file(path / "model.safetensors")
    for name in [n.removesuffix("_blocks") for n in weights if n.endswith("_blocks")]:
        blocks, scales = (weights.pop(f"{name}_{part}") for part in ("blocks", "scales"))
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict(weights)
    return model


class _SmallThinker:
    """SmallThinker as its paper and llama.cpp's graph have it, in float64 (arXiv 2507.20984)."""

    def __init__(self, path: Path, config: Json) -> None:
        from safetensors.torch import load_file

        self.config = config
        self.weights = {name: w.double() for name, w in load_file(path / "model.safetensors").items()}

    def eval(self) -> Any:
        return self

    def __call__(self, ids: Any) -> Any:
        import types

        w, c = self.weights, self.config
        x = w["model.embed_tokens.weight"][ids[0]]
        for i in range(c["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            chosen, shares = self._routed(layer, x)  # of the layer's input, as it is
            x = x + self._attended(i, layer, self._normed(layer + "input_layernorm", x))
            h = self._normed(layer + "post_attention_layernorm", x)
            x = x + self._experts(layer, h, chosen, shares)
        head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
        logits = self._normed("model.norm", x) @ w[f"{head}.weight"].T
        return types.SimpleNamespace(logits=logits.float()[None])

    def _normed(self, name: str, x: Any) -> Any:
        mean = (x * x).mean(-1, keepdim=True)
        return x / (mean + self.config["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def _routed(self, layer: str, x: Any) -> Any:
        logits = x @ self.weights[f"{layer}block_sparse_moe.primary_router.weight"].T
        values, chosen = logits.topk(self.config["moe_num_active_primary_experts"], dim=-1)
        if self.config["moe_primary_router_apply_softmax"]:
            return chosen, values.softmax(-1)
        return chosen, values.sigmoid() / values.sigmoid().sum(-1, keepdim=True)

    def _experts(self, layer: str, h: Any, chosen: Any, shares: Any) -> Any:
        import torch

        out = torch.zeros_like(h)
        for t in range(len(h)):
            for e, share in zip(chosen[t].tolist(), shares[t], strict=True):
                name = f"{layer}block_sparse_moe.experts.{e}."
                gate, up, down = (self.weights[f"{name}{part}.weight"] for part in ("gate", "up", "down"))
                out[t] += share * (down @ (torch.relu(gate @ h[t]) * (up @ h[t])))
        return out

    def _attended(self, i: int, layer: str, h: Any) -> Any:
        import torch

        c, n = self.config, len(h)
        heads, dim = c["num_attention_heads"], c["head_dim"]

        def of(part: str) -> Any:
            return (h @ self.weights[f"{layer}self_attn.{part}_proj.weight"].T).view(n, -1, dim)

        q, k, v = of("q"), of("k"), of("v")
        if c["rope_layout"][i]:
            q, k = self._turned(q), self._turned(k)
        group = heads // c["num_key_value_heads"]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        behind = torch.arange(n)[:, None] - torch.arange(n)[None, :]
        hidden = behind < 0
        if c["sliding_window_layout"][i]:
            hidden |= behind >= c["sliding_window_size"]
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", p, v).reshape(n, -1)
        return out @ self.weights[f"{layer}self_attn.o_proj.weight"].T

    def _turned(self, x: Any) -> Any:
        import torch

        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        angles = torch.arange(len(x)).double()[:, None] * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def hf_model(path: Path) -> Any:
    """transformers' own model for a twin directory, in float32, with plain attention."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "llama_sparse_relu":
        model = _plain(path, config, "Llama", hidden_act="relu")
    elif config["architectures"] == ["SparseLlamaForCausalLM"]:
        model = _fatrelu_model(path, config)
    elif config["architectures"] == ["BambooForCausalLM"]:
        model = _bamboo_model(path, config)
    elif config["architectures"] == ["SmallThinkerForCausalLM"]:
        return _SmallThinker(path, config)
    elif config["architectures"] == ["TurboSparseMixtralForCausalLM"]:
        model = _turbosparse_mixtral_model(path, config)
    elif config["architectures"] == ["MiniCPMForCausalLM"]:
        model = _minicpm_model(path, config)
    elif config["model_type"] == "gpt_oss" and "quantization_config" in config:
        model = _gpt_oss_blocks_model(path, config)
    elif "quantization_config" in config:
        model = _bitnet_model(path, config)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if path.name == "qwen2_drelu":
        model = _with_drelu(model)
    return model.eval()


def hf_logits(path: Path, ids: list[int]) -> NDArray[np.float32]:
    """transformers' logits for one sequence: [len(ids), vocab_size]."""
    import torch

    with torch.no_grad():
        logits = hf_model(path)(torch.tensor([ids])).logits[0]
    return np.ascontiguousarray(logits.numpy())


# ---- models that embed: sentence-transformers' files say how hidden states become a vector


def _embedder(path: Path, model: Any, seed: int, pooling: str, *, unit: bool) -> Path:
    """Save a bare model with its modules; `pooling`: as Pooling's config has it."""
    _save(model, path, seed)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if unit else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    modes = dict.fromkeys(
        ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken"), False
    )
    config = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, **config, "include_prompt": True})
    )
    return path


def qwen3_embedding(path: Path) -> Path:
    """Qwen3-Embedding: a bare Qwen3 under the name of one with a head, and its last token."""
    from transformers import Qwen3Config, Qwen3Model

    base = _llama_config().to_dict() | {"model_type": "qwen3", "head_dim": 24, "tie_word_embeddings": True}
    _embedder(path, Qwen3Model(Qwen3Config(**base)), 61, "lasttoken", unit=True)
    _edit_config(path, lambda config: config.update(architectures=["Qwen3ForCausalLM"], is_matryoshka=True))
    return path


def mistral_embedding(path: Path) -> Path:
    """E5-Mistral: a bare Mistral, with a window, and its last token."""
    from transformers import MistralConfig, MistralModel

    base = _llama_config().to_dict() | {"model_type": "mistral", "sliding_window": 9}
    return _embedder(path, MistralModel(MistralConfig(**base)), 62, "lasttoken", unit=True)


def qwen3_mean(path: Path) -> Path:
    """All tokens of a decoder, without Normalize; vectors may be cut to two lengths."""
    from transformers import Qwen3Config, Qwen3Model

    base = _llama_config().to_dict() | {"model_type": "qwen3", "tie_word_embeddings": True}
    _embedder(path, Qwen3Model(Qwen3Config(**base)), 63, "mean_tokens", unit=False)
    _edit_config(path, lambda config: config.update(matryoshka_dimensions=[32, 16]))
    return path


_ENCODER: Json = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}


def _encoder(name: str, path: Path, seed: int, pooling: str, **changes: Any) -> Path:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(_ENCODER | changes))
    return _embedder(path, getattr(transformers, f"{name}Model")(config), seed, pooling, unit=True)


def bert_cls(path: Path) -> Path:
    """BGE: a BERT, and its first token."""
    return _encoder("Bert", path, 64, "cls_token")


def bert_mean(path: Path) -> Path:
    """E5, all-MiniLM: a BERT, and all tokens; another epsilon and activation."""
    return _encoder("Bert", path, 65, "mean_tokens", layer_norm_eps=1e-5, hidden_act="gelu_new")


def xlm_roberta(path: Path) -> Path:
    """BGE-M3, multilingual E5: positions begin behind the padding's, and there is one type."""
    changes = {"type_vocab_size": 1, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1}
    return _encoder("XLMRoberta", path, 66, "cls_token", **changes)


EMBEDDERS: dict[str, Callable[[Path], Path]] = {
    f.__name__: f for f in (qwen3_embedding, mistral_embedding, qwen3_mean, bert_cls, bert_mean, xlm_roberta)
}
LENGTHS = (40, 7, 1)  # of the texts whose vectors are kept


def hf_vectors(path: Path, ids: list[int]) -> NDArray[np.float32]:
    """transformers' hidden states of the first tokens, pooled as the files say: [len(LENGTHS), dim]."""
    import torch
    from transformers import AutoModel

    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    pooling = json.loads((path / "1_Pooling" / "config.json").read_text())
    found = []
    for n in LENGTHS:
        with torch.no_grad():
            hidden = model(torch.tensor([ids[:n]])).last_hidden_state[0].double()
        kinds = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}
        (v,) = (v for mode, v in kinds.items() if pooling[f"pooling_mode_{mode}"])
        found.append(v / v.norm() if "Normalize" in (path / "modules.json").read_text() else v)
    return np.stack([v.float().numpy() for v in found])


def _ranker(name: str, path: Path, seed: int, **changes: Any) -> Path:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(_ENCODER | {"num_labels": 1} | changes))
    return _save(getattr(transformers, f"{name}ForSequenceClassification")(config), path, seed)


def bert_ranker(path: Path) -> Path:
    """MS MARCO's cross-encoders: a BERT that reads a pair, with types."""
    return _ranker("Bert", path, 67)


def xlm_roberta_ranker(path: Path) -> Path:
    """BGE's rerankers: a pair without types."""
    changes = {"type_vocab_size": 1, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1}
    return _ranker("XLMRoberta", path, 68, **changes)


RANKERS: dict[str, Callable[[Path], Path]] = {f.__name__: f for f in (bert_ranker, xlm_roberta_ranker)}
PAIRS = ((20, 40), (3, 7), (1, 2))  # where the second text begins, and where it ends


def hf_scores(path: Path, ids: list[int]) -> NDArray[np.float32]:
    """transformers' logits of pairs of the first tokens: [len(PAIRS), 1]."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.set_num_threads(1)
    loaded = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    found, typed = [], json.loads((path / "config.json").read_text())["type_vocab_size"] > 1
    for second, end in PAIRS:
        types = [int(typed and p >= second) for p in range(end)]
        with torch.no_grad():
            made = loaded.eval()(torch.tensor([ids[:end]]), token_type_ids=torch.tensor([types]))
        found.append(made.logits[0].numpy())
    return np.stack(found)
