"""Small models with fixed weights for golden runs, one per shape of code, made with numpy alone.

Each is a Hugging Face directory with a tokenizer of one token per byte. Layers are wide enough (2,048
neurons) that a small memory budget leaves neurons on disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from numpy.typing import NDArray
from safetensors.numpy import save_file

DIM, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 64, 2048, 2, 4, 2, 16, 4
VOCAB, CONTEXT = tiny.BYTES + 2, 512

Shapes = Iterator[tuple[str, tuple[int, ...]]]
Config = dict[str, Any]


def llama_config(**changes: Any) -> Config:
    """Return the config of a ReLU Llama, with `changes` in place of its keys."""
    sizes = {"intermediate_size": FFN, "max_position_embeddings": CONTEXT, "head_dim": HEAD_DIM}
    return tiny.config(**(sizes | changes))


def _attention(at: str, out: str = "o_proj") -> Shapes:
    yield f"{at}.q_proj.weight", (HEADS * HEAD_DIM, DIM)
    yield f"{at}.k_proj.weight", (KV_HEADS * HEAD_DIM, DIM)
    yield f"{at}.v_proj.weight", (KV_HEADS * HEAD_DIM, DIM)
    yield f"{at}.{out}.weight", (DIM, HEADS * HEAD_DIM)


def _gated(at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Shapes:
    yield f"{at}.{gate}.weight", (FFN, DIM)
    yield f"{at}.{up}.weight", (FFN, DIM)
    yield f"{at}.{down}.weight", (DIM, FFN)


def llama() -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    """Gated ReLU, head tied to the embedding."""
    return llama_config(), list(_llama_tensors())


def bamboo() -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    """dReLU: a neuron is active where its gate and its up row both are."""
    config = llama_config(architectures=["BambooForCausalLM"], model_type="bamboo", tie_word_embeddings=False)
    return config, [*_llama_tensors(), ("lm_head.weight", (VOCAB, DIM))]


def _llama_tensors() -> Shapes:
    yield "model.embed_tokens.weight", (VOCAB, DIM)
    yield "model.norm.weight", (DIM,)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        yield from _attention(f"{at}.self_attn")
        yield from _gated(f"{at}.mlp")
        yield f"{at}.input_layernorm.weight", (DIM,)
        yield f"{at}.post_attention_layernorm.weight", (DIM,)


def opt() -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    """No gate, learned positions, LayerNorm and biases."""
    config = {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": DIM, "ffn_dim": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "word_embed_proj_dim": DIM,
        "max_position_embeddings": CONTEXT, "activation_function": "relu", "do_layer_norm_before": True,
        "vocab_size": VOCAB, "bos_token_id": tiny.BYTES, "eos_token_id": tiny.BYTES + 1,
        "tie_word_embeddings": True,
    }  # fmt: skip
    return config, list(_opt_tensors())


def _opt_tensors() -> Shapes:
    at = "model.decoder"
    yield f"{at}.embed_tokens.weight", (VOCAB, DIM)
    yield f"{at}.embed_positions.weight", (CONTEXT + 2, DIM)
    norms = [f"{at}.final_layer_norm"]
    for i in range(LAYERS):
        layer = f"{at}.layers.{i}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{layer}.self_attn.{name}.weight", (DIM, DIM)
            yield f"{layer}.self_attn.{name}.bias", (DIM,)
        yield f"{layer}.fc1.weight", (FFN, DIM)
        yield f"{layer}.fc1.bias", (FFN,)
        yield f"{layer}.fc2.weight", (DIM, FFN)
        yield f"{layer}.fc2.bias", (DIM,)
    for norm in norms:
        yield f"{norm}.weight", (DIM,)
        yield f"{norm}.bias", (DIM,)


def gemma3() -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    """Norms around each half, norms of q and k, a window in every other layer; nothing is skipped."""
    config = llama_config(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_activation="gelu_pytorch_tanh",
        sliding_window=9, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    )  # fmt: skip
    del config["hidden_act"]
    tensors = list(_llama_tensors())
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        tensors += [(f"{at}.{n}_feedforward_layernorm.weight", (DIM,)) for n in ("pre", "post")]
        tensors += [(f"{at}.self_attn.{n}_norm.weight", (HEAD_DIM,)) for n in ("q", "k")]
    return config, tensors


def mixtral() -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    """Four experts with SiLU, two for each token."""
    return _mixture("MixtralForCausalLM", "mixtral", "silu")


def turbosparse_mixtral() -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    """The same with dReLU in every expert."""
    return _mixture("TurboSparseMixtralForCausalLM", "turbosparsemixtral", "relu")


def _mixture(
    architecture: str, kind: str, activation: str
) -> tuple[Config, list[tuple[str, tuple[int, ...]]]]:
    config = llama_config(
        architectures=[architecture], model_type=kind, hidden_act=activation, num_local_experts=EXPERTS,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    tensors = [t for t in _llama_tensors() if ".mlp." not in t[0]] + [("lm_head.weight", (VOCAB, DIM))]
    for i in range(LAYERS):
        at = f"model.layers.{i}.block_sparse_moe"
        tensors.append((f"{at}.gate.weight", (EXPERTS, DIM)))
        for e in range(EXPERTS):
            tensors += _gated(f"{at}.experts.{e}", "w1", "w3", "w2")
    return config, tensors


MODELS: dict[str, Callable[[], tuple[Config, list[tuple[str, tuple[int, ...]]]]]] = {
    "llama": llama,
    "opt": opt,
    "bamboo": bamboo,
    "gemma3": gemma3,
    "mixtral": mixtral,
    "turbosparse_mixtral": turbosparse_mixtral,
}
SPARSE = ("llama", "opt", "bamboo", "turbosparse_mixtral")  # models whose neurons can be skipped


def write(name: str, path: Path) -> Path:
    """Write model `name` as a Hugging Face directory and return its path."""
    config, tensors = MODELS[name]()
    rng = np.random.default_rng(0)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    tiny.tokenizer().save(str(path / "tokenizer.json"))
    save_file({n: _random(rng, n, shape) for n, shape in tensors}, str(path / "model.safetensors"))
    return path


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Matrices ~ N(0, 1 / columns), norms near 1, biases near 0."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return noise * np.float32(0.1) + np.float32(0 if name.endswith("bias") else 1)
    return noise / np.float32(np.sqrt(shape[-1]))
