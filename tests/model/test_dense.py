"""Dense families that are no Llama: published configs are read, every key changes answers or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kept_twins
import pytest
import twins
from test_twins import in_numpy, loaded, nmse

from thermocline.convert import synthetic
from thermocline.errors import BadFile, Unsupported
from thermocline.model import families
from thermocline.model.spec import ModelSpec

Json = dict[str, Any]
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
# What a changed config has to change: the logits, or it is refused.
KEYS: dict[str, Json] = {
    "granite": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "olmo2": {
        "rms_norm_eps": 0.5,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "olmo3": {"sliding_window": 4, "layer_types": ["full_attention"] * 3, **PLAIN, "attention_bias": True},
    "smollm3": {
        "no_rope_layers": [1, 1, 1],
        "sliding_window": 4,
        "layer_types": ["full_attention"] * 3,
        "mlp_bias": True,
        "attention_bias": False,
    },
    "starcoder2": {"use_bias": False, "norm_epsilon": 0.5, "sliding_window": 4, "mlp_type": "gated"},
    "stablelm": {"use_qkv_bias": False, "use_parallel_residual": True, "qk_layernorm": True, **PLAIN},
    "stablelm_12b": {"use_parallel_residual": False, "qk_layernorm": False, "layer_norm_eps": 0.5},
    "cohere": {"logit_scale": 1.0, "use_qk_norm": True, "attention_bias": False, "layer_norm_eps": 0.5},
    "cohere2": {
        "logit_scale": 1.0,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "rotary_pct": 0.5,
        "use_parallel_block": False,
        "position_embedding_type": "alibi",
    },
    "gpt_neox": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 0.5,
        "rotary_emb_base": 100,
        "hidden_act": "relu",
    },
    "phi2": {
        "qk_layernorm": True,
        "layer_norm_eps": 0.5,
        "hidden_act": "relu",
        "partial_rotary_factor": 0.25,
    },
}


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in KEYS.items() for k in keys])
def test_every_key_changes_the_answer_or_is_refused(name: str, key: str, tmp_path: Path) -> None:
    ids = kept_twins.ids()[:12]
    truth = in_numpy(loaded(kept_twins.write(name, tmp_path / name))).logits(ids, 12)

    def changed(c: Json) -> None:
        if key.startswith(("rot", "partial")):
            c.pop("rope_parameters")
        c[key] = KEYS[name][key]

    other = kept_twins.write(name, tmp_path / "other")
    twins._edit_config(other, changed)
    try:
        y = in_numpy(loaded(other)).logits(ids, 12)
    except (BadFile, Unsupported) as e:
        assert "\n" not in str(e)
        return
    assert nmse(y, truth) > 1e-6


def read(**config: Any) -> ModelSpec:
    return families.parse_config(config, None, "config.json")[0]


STARCODER2: Json = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 0,
    "eos_token_id": 0,
    "attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 4608, "initializer_range": 0.018042, "intermediate_size": 18432, "mlp_type": "default",
    "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "model_type": "starcoder2",
    "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 36, "num_hidden_layers": 32,
    "num_key_value_heads": 4, "residual_dropout": 0.1, "rope_theta": 1000000, "sliding_window": 4096,
    "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "use_bias": True,
    "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
STABLELM: Json = {
    "architectures": ["StableLmForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 100257,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 5120,
    "intermediate_size": 13824, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096,
    "model_type": "stablelm", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.25, "qk_layernorm": True, "rope_scaling": None, "rope_theta": 10000,
    "tie_word_embeddings": False, "use_parallel_residual": True, "use_qkv_bias": False, "vocab_size": 100352,
}  # fmt: skip
COMMAND_R: Json = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "model_type": "cohere",
    "max_position_embeddings": 8192, "model_max_length": 131072, "num_attention_heads": 64,
    "num_hidden_layers": 40, "num_key_value_heads": 64, "pad_token_id": 0, "pretraining_tp": 1,
    "rope_theta": 8000000.0, "use_cache": True, "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R7B: Json = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096, "model_type": "cohere2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 0,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj",
    "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096,
    "sliding_window_pattern": 4, "use_cache": True, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
    "vocab_size": 256000,
}  # fmt: skip
PYTHIA: Json = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 16384, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 32,
    "num_hidden_layers": 32, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
    "use_cache": True, "use_parallel_residual": True, "vocab_size": 50432,
}  # fmt: skip
PHI_2: Json = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 50256, "embd_pdrop": 0.0,
    "eos_token_id": 50256, "hidden_act": "gelu_new", "hidden_size": 2560, "intermediate_size": 10240,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "phi", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4, "qk_layernorm": False,
    "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 51200,
}  # fmt: skip
OLMO_3: Json = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "layer_types": [["sliding_attention", "full_attention"][(i + 1) % 4 == 0] for i in range(32)],
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
                     "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"},
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
}  # fmt: skip


def test_published_configs_are_read() -> None:
    star, stable, r, r7 = (read(**c) for c in (STARCODER2, STABLELM, COMMAND_R, COMMAND_R7B))
    neox, phi, olmo = (read(**c) for c in (PYTHIA, PHI_2, OLMO_3))
    assert (star.norm, star.gated, star.sliding_window, star.tied_head) == ("layer", False, 4096, True)
    assert (stable.rotary_dim, stable.parallel, stable.qk_norm_each) == (40, True, True)
    assert (r.parallel, r.logit_scale, r.max_context, r.qk_norm) == (True, 0.0625, 131072, False)
    assert r7.rope_layers == r7.window_layers == tuple(i for i in range(32) if i % 4 != 3)
    assert (neox.rotary_dim, neox.parallel, neox.activation) == (32, True, "gelu")
    assert (phi.rotary_dim, phi.activation, phi.tied_head) == (32, "gelu_tanh", False)
    assert (olmo.norm_order, olmo.local_rope_theta, olmo.window(3), olmo.window(0)) == (
        "after",
        5e5,
        None,
        4096,
    )
    assert olmo.rope_scaling is not None and olmo.rope_scaling.kind == "yarn"


def test_published_shapes_are_what_they_are() -> None:
    granite, smol, scout, phi = (
        synthetic.read_shape(n)[1] for n in ("granite-3.3-8b", "smollm3-3b", "llama-4-scout", "phi-3.5-moe")
    )
    assert (granite.embed_scale, granite.attention_scale, granite.logit_scale) == (12, 1 / 128, 1 / 16)
    assert smol.rope_layers == tuple(i for i in range(36) if i % 4 != 3)
    assert scout.rope_layers == scout.window_layers and scout.window(0) == 8192 and scout.window(3) is None
    assert scout.ffn(0) == (16, 1, 8192) and (scout.shared_dim, scout.attention_tuning) == (8192, 0.1)
    assert phi.router.weights == "mixed" and phi.norm == "layer"


def test_an_old_gpt_neox_brings_masks_that_are_left_out() -> None:
    _, made = families.parse_config(PYTHIA, None, "config.json")
    for name in ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"):
        assert made.may_ignore(f"gpt_neox.layers.0.{name}")
    assert not made.may_ignore("gpt_neox.layers.0.attention.dense.bias")


def test_a_config_without_a_rule_for_its_layers_is_refused() -> None:
    for config, change in (
        (json.loads(kept_twins.config("smollm3")), {"no_rope_layers": [1, 2, 1]}),
        (json.loads(kept_twins.config("smollm3")), {"layer_types": ["sliding_attention"] * 2}),
        (OLMO_3, {"layer_types": ["chunked_attention"] * 32}),
    ):
        with pytest.raises(BadFile, match="must be"):
            read(**config | change)
