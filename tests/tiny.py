"""A tiny random ReLU Llama as a Hugging Face directory, made with numpy alone: what the CLI tests use"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

DIM, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 96, 2, 4, 2, 32768
BOS, EOS, BYTES = "<s>", "</s>", 256


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": BYTES + 2,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "relu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": BYTES,
        "eos_token_id": BYTES + 1,
        "tie_word_embeddings": True,
    }
    return base | changes


def tensors(seed: int = 0) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.asarray(rng.standard_normal((rows, cols)) / np.sqrt(cols), np.float32)

    kv = DIM * KV_HEADS // HEADS
    out = {"model.embed_tokens.weight": matrix(BYTES + 2, DIM), "model.norm.weight": np.ones(DIM, np.float32)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        for name, rows, cols in (
            ("self_attn.q_proj", DIM, DIM),
            ("self_attn.k_proj", kv, DIM),
            ("self_attn.v_proj", kv, DIM),
            ("self_attn.o_proj", DIM, DIM),
            ("mlp.gate_proj", FFN, DIM),
            ("mlp.up_proj", FFN, DIM),
            ("mlp.down_proj", DIM, FFN),
        ):
            out[f"{at}.{name}.weight"] = matrix(rows, cols)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{at}.{name}.weight"] = np.ones(DIM, np.float32)
    return out


def tokenizer() -> Tokenizer:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {BOS: BYTES, EOS: BYTES + 1}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BOS, EOS])
    return made


def hf_directory(path: Path, **changes: Any) -> Path:
    """`changes` are config keys."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config(**changes)))
    tokenizer().save(str(path / "tokenizer.json"))
    save_file(tensors(), str(path / "model.safetensors"))
    return path
