"""Config readers: what is understood is exact, and what is not understood is refused by name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thermocline.errors import BadFile, IOFailure, ThermoclineError, Unsupported, UsageError
from thermocline.model import families, hf_config
from thermocline.model.spec import ModelSpec, RopeScaling
from thermocline.model.tensor_map import SourceSlice, TensorMap

Json = dict[str, Any]

LLAMA: Json = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MISTRAL: Json = LLAMA | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 32,
}
SPARSE: Json = LLAMA | {
    "architectures": ["SparseLlamaForCausalLM"],
    "model_type": "sparsellama",
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.01,
}
OPT: Json = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 64,
    "ffn_dim": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 100,
    "word_embed_proj_dim": 64,
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
LLAMA3: Json = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

OTHER = {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type", "hidden_act")}
QWEN2: Json = OTHER | {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
GEMMA2: Json = OTHER | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16}
PHI3: Json = OTHER | {"architectures": ["Phi3ForCausalLM"], "hidden_act": "silu"}
BITNET: Json = OTHER | {"architectures": ["BitNetForCausalLM"], "hidden_act": "relu2"}
MINICPM: Json = OTHER | {"architectures": ["MiniCPMForCausalLM"], "hidden_act": "relu"}
FALCON: Json = {
    "architectures": ["FalconForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "layer_norm_epsilon": 1e-5,
}
LONGROPE: Json = {
    "type": "longrope",
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def spec_of(config: Json, generation: Json | None = None) -> ModelSpec:
    return families.parse_config(config, generation, "config.json")[0]


def mapping_of(config: Json) -> TensorMap:
    return families.parse_config(config, None, "config.json")[1]


# --- what is understood -------------------------------------------------------------------------------------

LLAMA_2_7B = """{"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
"initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
"num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling":
null, "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version":
"4.31.0.dev0", "use_cache": true, "vocab_size": 32000}"""
LLAMA_32_1B = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size":
8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
"num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
"rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true,
"torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
"vocab_size": 128256}"""
MISTRAL_NEMO = """{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
"eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
"model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 131072}"""
OPT_6B = """{"_name_or_path": "facebook/opt-6.7b", "_remove_final_layer_norm": false,
"activation_dropout": 0.0, "activation_function": "relu", "architectures":
["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before":
true, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 16384, "hidden_size": 4096,
"init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
"num_attention_heads": 32, "num_hidden_layers": 32, 
"pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "transformers_version":
"4.21.0.dev0", "use_cache": true, "vocab_size": 50272, "word_embed_proj_dim": 4096}"""


def test_configs_like_the_published_ones_are_read() -> None:
    s = spec_of(json.loads(LLAMA_2_7B))
    assert (s.n_kv_heads, s.head_dim, s.rope_theta, s.rope_scaling, s.eos_ids) == (
        32,
        128,
        10000.0,
        None,
        (2,),
    )
    s = spec_of(json.loads(LLAMA_32_1B))
    assert s.tied_head and s.head_dim == 64 and s.eos_ids == (128001, 128008, 128009)
    assert s.rope_theta == 500000.0 and s.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    s = spec_of(json.loads(MISTRAL_NEMO))
    assert (s.architecture, s.head_dim, s.sliding_window, s.qkv_rows) == ("mistral", 128, None, 6144)
    s = spec_of(json.loads(OPT_6B))
    assert (s.norm, s.position, s.gated, s.activation, s.tied_head) == (
        "layer",
        "learned",
        False,
        "relu",
        True,
    )
    assert s.norm_eps == 1e-5 and s.sparse


def test_left_out_keys_take_transformers_documented_values() -> None:
    config = {
        k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "bos_token_id", "eos_token_id")
    }
    s = spec_of(config)
    assert (s.n_kv_heads, s.head_dim, s.bos_id, s.eos_ids, s.rope_theta) == (4, 16, 1, (2,), 10000.0)
    assert spec_of({k: v for k, v in MISTRAL.items() if k != "sliding_window"}).sliding_window == 4096


def test_a_null_window_means_none() -> None:
    assert spec_of(MISTRAL | {"sliding_window": None}).sliding_window is None
    assert spec_of(MISTRAL).sliding_window == 32


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {
            "rope_theta": 5e5,
            "rope_scaling": {**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3"},
        },
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "type": "llama3"}, "rope_theta": 5e5},
    ],
)
def test_every_spelling_of_llama_3_scaling_is_the_same_model(spelling: Json) -> None:
    s = spec_of(LLAMA | spelling)
    assert s.rope_theta == 5e5 and s.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize("spelling", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}])
def test_no_scaling_is_no_scaling(spelling: Json) -> None:
    assert spec_of(LLAMA | spelling).rope_scaling is None


@pytest.mark.parametrize(
    ("name", "ours"),
    [("relu", "relu"), ("relu2", "relu2"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("swish", "silu")],
)
def test_activations_are_named_our_way(name: str, ours: str) -> None:
    assert spec_of(LLAMA | {"hidden_act": name}).activation == ours
    assert spec_of(OPT | {"activation_function": name}).activation == ours


def test_prosparse_carries_its_threshold() -> None:
    s = spec_of(SPARSE)
    assert (s.activation, s.activation_threshold, s.sparse) == ("fatrelu", 0.01, True)
    s = spec_of(SPARSE | {"hidden_act": "relu", "hidden_act_param": None})
    assert (s.activation, s.activation_threshold) == ("relu", 0.0)


def test_generation_configs_end_tokens_win() -> None:
    assert spec_of(LLAMA, {"eos_token_id": [5, 6, 5]}).eos_ids == (5, 6)
    assert spec_of(LLAMA, {"eos_token_id": 7}).eos_ids == (7,)
    assert spec_of(LLAMA, {"eos_token_id": None, "temperature": 0.6}).eos_ids == (2,)
    assert spec_of(LLAMA | {"eos_token_id": None}).eos_ids == ()


def test_keys_that_trainers_and_runtimes_leave_in_a_config_are_known() -> None:
    """As published: SmolLM2's, and Phi-4 mini's, whose other values would change the arithmetic."""
    smol: Json = {"is_llama_config": True, "rope_interleaved": False}
    smol |= {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}}}
    assert spec_of(LLAMA | smol) == spec_of(LLAMA)
    mini = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
    assert spec_of(PHI3 | mini) == spec_of(PHI3)
    for key, value in (("full_attn_mod", 2), ("interpolate_factor", 4), ("lm_head_bias", True)):
        with pytest.raises(Unsupported, match=key):
            spec_of(PHI3 | mini | {key: value})


def test_a_model_without_norm_weights_gets_ones() -> None:
    tensors = mapping_of(OPT | {"layer_norm_elementwise_affine": False, "enable_bias": False}).tensors
    assert tensors["out_norm.weight"] == (SourceSlice(None, (64,)),)
    assert not any(name.endswith(".bias") for name in tensors)


# hf_quant_config.json's "quantization", and how it is refused.
MODELOPT: dict[str, tuple[Any, type[Exception], str]] = {
    "FP8": (
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        Unsupported,
        "hf_quant_config.json: weights that ModelOpt quantised to 'FP8' are not supported; take the bf16",
    ),
    "NVFP4": ({"quant_algo": "NVFP4", "group_size": 16}, Unsupported, "'NVFP4' .* or a GGUF"),
    "an object": ({"quant_algo": {"a": "\n"}}, Unsupported, "are not supported"),
    "no algorithm": ({"kv_cache_quant_algo": "FP8"}, BadFile, "not an object with quant_algo"),
    "a list": ([], BadFile, "not an object with quant_algo"),
    "nothing": (None, BadFile, "quantization is None"),
}


@pytest.mark.parametrize("case", MODELOPT)
def test_weights_that_modelopt_quantised_are_refused_by_their_algorithm(case: str, tmp_path: Path) -> None:
    """Its older checkpoints say so in a file of their own alone, which nobody looked at."""
    told, error, message = MODELOPT[case]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    about = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": told}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    with pytest.raises(error, match=message) as caught:
        families.read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_modelopt_may_quantise_keys_and_values_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    about = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    assert families.read_config(tmp_path)[0] == spec_of(LLAMA)


def test_every_ignored_key_has_a_reason_and_no_double_meaning() -> None:
    assert all(len(reason) > 10 for reason in hf_config.IGNORED.values())
    assert not hf_config.IGNORED.keys() & hf_config.REQUIRED_VALUE.keys()
    spec_of(LLAMA | dict.fromkeys(hf_config.IGNORED, "anything"))


def test_remote_code_in_a_config_is_never_looked_at(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"auto_map": {"AutoConfig": "evil.Config"}}))
    families.read_config(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("base", ["mistral", "qwen2", "gemma2", "phi3"])
def test_relu_that_may_be_on_gate_or_on_gate_and_up_is_asked_for(base: str) -> None:
    """SparseQwen2 computes dReLU under a config that says what a ReGLU's would: it loaded as ReGLU."""
    config = {"mistral": MISTRAL, "qwen2": QWEN2, "gemma2": GEMMA2, "phi3": PHI3}[base]
    key = "hidden_activation" if base == "gemma2" else "hidden_act"
    config = config | {key: "relu"}
    with pytest.raises(Unsupported, match="choose --activation relu or --activation drelu"):
        spec_of(config)
    for asked, up in (("relu", "none"), ("drelu", "relu")):
        s = families.parse_config(config, None, "config.json", asked)[0]
        assert (s.activation, s.up_activation) == ("relu", up)


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_sparse_qwen_is_asked_for_whatever_its_config_says(activation: str, tmp_path: Path) -> None:
    path = tmp_path / "SparseQwen2-7B"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN2 | {"hidden_act": activation}))
    with pytest.raises(Unsupported, match="choose --activation relu or --activation drelu"):
        families.read_config(path)
    assert families.read_config(path, "drelu")[0].up_activation == "relu"
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert families.read_config(tmp_path)[0].activation == "silu"


CERTAIN: dict[str, tuple[Json, str]] = {
    "ReluLLaMA": (LLAMA | {"hidden_act": "relu"}, "relu"),
    "MiniCPM": (MINICPM, "relu"),
    "OPT": (OPT, "relu"),
    "Falcon": (FALCON | {"activation": "relu"}, "relu"),
    "Bamboo": (
        MISTRAL | {"architectures": ["BambooForCausalLM"], "model_type": "bamboo", "hidden_act": "relu"},
        "drelu",
    ),
    "Llama": (LLAMA, "silu"),
    "Qwen 2": (QWEN2, "silu"),
    "ProSparse": (SPARSE, "fatrelu"),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_an_activation_that_contradicts_the_config_is_an_error(name: str) -> None:
    config, said = CERTAIN[name]
    for asked in ("relu", "drelu"):
        if asked == said:
            assert families.parse_config(config, None, "config.json", asked)[0] == spec_of(config)
        else:
            with pytest.raises(UsageError, match=f"its activation is {said}, not {asked}"):
                families.parse_config(config, None, "config.json", asked)


def test_a_model_type_is_its_architectures_or_left_out() -> None:
    """SakanaAI's SparseLM has ProSparse's architecture, a left-over silu, and a model_type of its own."""
    for config in (LLAMA, MISTRAL, SPARSE, OPT):
        assert spec_of({k: v for k, v in config.items() if k != "model_type"}) == spec_of(config)
        with pytest.raises(BadFile, match="model_type contradicts architectures, which imply"):
            spec_of(config | {"model_type": "sparse_llama_relu"})
    sakana = SPARSE | {"model_type": "llama_sparse_relu", "hidden_act": "silu"}
    assert spec_of({k: v for k, v in sakana.items() if k != "hidden_act_param"}).activation == "relu"
    with pytest.raises(Unsupported, match="hidden_act_param"):
        spec_of(sakana | {"hidden_act_param": 0.01})
    with pytest.raises(BadFile, match="imply 'llama', got 'mistral'"):
        spec_of(LLAMA | {"model_type": "mistral"})


# --- what is refused ----------------------------------------------------------------------------------------

Case = tuple[Json, Json, type[ThermoclineError], str]
BAD: dict[str, Case] = {
    "no architecture": (LLAMA, {"architectures": None}, BadFile, "architectures"),
    "two architectures": (LLAMA, {"architectures": ["LlamaForCausalLM", "X"]}, BadFile, "architectures"),
    "architecture a number": (LLAMA, {"architectures": [7]}, BadFile, "architectures"),
    "architecture unknown": (
        LLAMA,
        {"architectures": ["GPT2LMHeadModel"]},
        Unsupported,
        "not supported;.* all that are: docs",
    ),
    "key unknown": (LLAMA, {"attention_sinks": 4}, Unsupported, "'attention_sinks' is unknown"),
    "key unknown, null": (LLAMA, {"logit_softcap": None}, Unsupported, "'logit_softcap' is unknown"),
    "Gemma 3n": (LLAMA, {"architectures": ["Gemma3nForCausalLM"]}, Unsupported, "four residual streams"),
    "key of another family": (LLAMA, {"sliding_window": 4096}, Unsupported, "'sliding_window' is unknown"),
    "key with a line break": (LLAMA, {"a\nb": 1}, Unsupported, r"'a\\nb' is unknown"),
    "quantised": (
        LLAMA,
        {"quantization_config": {"quant_method": "gptq"}},
        Unsupported,
        "quantization_config",
    ),
    "bias in the FFN": (LLAMA, {"mlp_bias": True}, Unsupported, "mlp_bias True is not supported"),
    "rotary over a part": (LLAMA, {"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor"),
    "rotary interleaved": (LLAMA, {"rope_interleaved": True}, Unsupported, "rope_interleaved"),
    "flag as a number": (LLAMA, {"mlp_bias": 0}, Unsupported, "mlp_bias 0"),
    "encoder": (LLAMA, {"is_encoder_decoder": True}, Unsupported, "is_encoder_decoder"),
    "pruned": (LLAMA, {"pruned_heads": {"1": [2]}}, Unsupported, "pruned_heads"),
    "activation unknown": (LLAMA, {"hidden_act": "mish"}, Unsupported, "hidden_act 'mish' is not supported"),
    "activation a list": (LLAMA, {"hidden_act": ["silu"]}, Unsupported, "hidden_act"),
    "fatrelu in a plain Llama": (LLAMA, {"hidden_act": "fatrelu"}, Unsupported, "hidden_act 'fatrelu'"),
    "size zero": (LLAMA, {"hidden_size": 0}, BadFile, "hidden_size"),
    "size negative": (LLAMA, {"intermediate_size": -1}, BadFile, "intermediate_size"),
    "size 2^31": (LLAMA, {"intermediate_size": 1 << 31}, BadFile, "intermediate_size"),
    "size 2^64": (LLAMA, {"vocab_size": 1 << 64}, BadFile, "vocab_size"),
    "size of a thousand digits": (LLAMA, {"vocab_size": 10**1000}, BadFile, "vocab_size"),
    "layers without end": (LLAMA, {"num_hidden_layers": 1 << 30}, BadFile, "num_hidden_layers"),
    "size a float": (LLAMA, {"hidden_size": 64.0}, BadFile, "hidden_size"),
    "size a string": (LLAMA, {"hidden_size": "64"}, BadFile, "hidden_size must be an integer"),
    "size true": (LLAMA, {"num_hidden_layers": True}, BadFile, "num_hidden_layers"),
    "size null": (LLAMA, {"vocab_size": None}, BadFile, "vocab_size"),
    "heads zero": (LLAMA, {"num_attention_heads": 0}, BadFile, "num_attention_heads"),
    "heads do not divide": (
        LLAMA,
        {"num_attention_heads": 7},
        BadFile,
        "not a multiple of num_attention_heads",
    ),
    "kv heads do not divide": (LLAMA, {"num_key_value_heads": 3}, BadFile, "n_heads 4 is not a multiple"),
    "kv heads zero": (LLAMA, {"num_key_value_heads": 0}, BadFile, "num_key_value_heads"),
    "head_dim odd": (LLAMA, {"head_dim": 15}, BadFile, "head_dim 15 is odd"),
    "head_dim huge": (LLAMA, {"head_dim": 1 << 20}, BadFile, "head_dim"),
    "context zero": (LLAMA, {"max_position_embeddings": 0}, BadFile, "max_position_embeddings"),
    "eps negative": (LLAMA, {"rms_norm_eps": -1e-5}, BadFile, "rms_norm_eps"),
    "eps infinite": (LLAMA, {"rms_norm_eps": float("inf")}, BadFile, "rms_norm_eps"),
    "eps not a number": (LLAMA, {"rms_norm_eps": float("nan")}, BadFile, "rms_norm_eps"),
    "eps a string": (LLAMA, {"rms_norm_eps": "1e-5"}, BadFile, "rms_norm_eps must be a number"),
    "bos beyond the vocabulary": (LLAMA, {"bos_token_id": 100}, BadFile, "not below vocab_size 100"),
    "eos beyond the vocabulary": (LLAMA, {"eos_token_id": [2, 100]}, BadFile, "not below vocab_size 100"),
    "eos negative": (LLAMA, {"eos_token_id": -1}, BadFile, "eos_token_id"),
    "eos true": (LLAMA, {"eos_token_id": True}, BadFile, "eos_token_id"),
    "eos nested": (LLAMA, {"eos_token_id": [[2]]}, BadFile, "eos_token_id"),
    "eos thousands": (LLAMA, {"eos_token_id": [1] * 1000}, BadFile, "eos_token_id"),
    "tied a string": (
        LLAMA,
        {"tie_word_embeddings": "false"},
        BadFile,
        "tie_word_embeddings must be true or false",
    ),
    "theta zero": (LLAMA, {"rope_theta": 0}, BadFile, "rope_theta"),
    "theta huge": (LLAMA, {"rope_theta": 1e300}, BadFile, "rope_theta"),
    "two thetas": (
        LLAMA,
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        BadFile,
        "rope_theta differs",
    ),
    "two scalings": (LLAMA, {"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, BadFile, "which is meant"),
    "scaling unknown": (LLAMA, {"rope_scaling": {"type": "ntk", "factor": 2.0}}, Unsupported, "'ntk'"),
    "scaling linear without factor": (
        LLAMA,
        {"rope_scaling": {"type": "linear"}},
        BadFile,
        "factor is missing",
    ),
    "scaling yarn without context": (
        LLAMA,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        BadFile,
        "original_max_position_embeddings is missing",
    ),
    "scaling yarn, mscale a string": (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "1"}},
        BadFile,
        "mscale must be a number",
    ),
    "two original contexts": (
        PHI3,
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64},
        BadFile,
        "original_max_position_embeddings differs from the 64 outside it",
    ),
    "longrope of too few factors": (
        PHI3,
        {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
        BadFile,
        "longrope",
    ),
    "longrope of words": (
        PHI3,
        {"rope_scaling": LONGROPE | {"short_factor": ["a"]}},
        BadFile,
        "short_factor",
    ),
    "longrope of a number no float holds": (
        PHI3,
        {"rope_scaling": LONGROPE | {"short_factor": [10**400] * 8}},
        BadFile,
        "short_factor must be a list of numbers",
    ),
    "part of a head above all": (PHI3, {"partial_rotary_factor": 1.5}, BadFile, "partial_rotary_factor"),
    "an odd part of a head": (PHI3, {"partial_rotary_factor": 0.2}, BadFile, "rotary_dim is 3"),
    "layer types too few": (GEMMA2, {"layer_types": ["full_attention"]}, BadFile, "layer_types must be 2 of"),
    "layer types unknown": (GEMMA2, {"layer_types": ["chunked_attention"] * 2}, BadFile, "layer_types"),
    "soft cap zero": (GEMMA2, {"attn_logit_softcapping": 0}, BadFile, "attn_logit_softcapping"),
    "both directions": (GEMMA2, {"use_bidirectional_attention": True}, Unsupported, "use_bidirectional"),
    "Falcon with alibi": (FALCON, {"alibi": True}, Unsupported, "alibi True"),
    "Falcon with two norms and one head": (FALCON, {"num_ln_in_parallel_attn": 2}, Unsupported, "num_ln_in"),
    "Qwen's window a string": (QWEN2, {"use_sliding_window": "yes"}, BadFile, "use_sliding_window"),
    "muP without width": (MINICPM, {"dim_model_base": 0}, BadFile, "dim_model_base"),
    "ternary weights": (
        BITNET,
        {"quantization_config": {"quant_method": "bitnet"}},
        Unsupported,
        "quantization_config",
    ),
    "scaling without type": (LLAMA, {"rope_scaling": {"factor": 2.0}}, Unsupported, "rope_type"),
    "scaling two types": (
        LLAMA,
        {"rope_scaling": LLAMA3 | {"type": "linear"}},
        BadFile,
        "differs from rope_type",
    ),
    "scaling a list": (LLAMA, {"rope_scaling": [8.0]}, BadFile, "rope_scaling must be an object"),
    "scaling incomplete": (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3"}},
        BadFile,
        "low_freq_factor is missing",
    ),
    "scaling key unknown": (
        LLAMA,
        {"rope_scaling": LLAMA3 | {"mscale": 1.0}},
        Unsupported,
        "'mscale' is unknown",
    ),
    "scaling divides by zero": (
        LLAMA,
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}},
        BadFile,
        "must be below",
    ),
    "scaling factor zero": (
        LLAMA,
        {"rope_scaling": LLAMA3 | {"factor": 0.0}},
        BadFile,
        "factor must be a number",
    ),
    "window zero": (MISTRAL, {"sliding_window": 0}, BadFile, "sliding_window"),
    "window a float": (MISTRAL, {"sliding_window": 32.0}, BadFile, "sliding_window"),
    "Mistral with bias": (MISTRAL, {"attention_bias": True}, Unsupported, "attention_bias"),
    "threshold missing": (SPARSE, {"hidden_act_param": None}, BadFile, "hidden_act_param must be a number"),
    "threshold negative": (SPARSE, {"hidden_act_param": -0.1}, BadFile, "hidden_act_param"),
    "threshold without use": (
        SPARSE,
        {"hidden_act": "relu"},
        Unsupported,
        "hidden_act_param 0.01 has no meaning",
    ),
    "OPT projects to nothing": (OPT, {"word_embed_proj_dim": 0}, BadFile, "word_embed_proj_dim"),
    "OPT heads do not divide": (OPT, {"num_attention_heads": 5}, BadFile, "num_attention_heads"),
    "OPT bias a string": (OPT, {"enable_bias": "yes"}, BadFile, "enable_bias"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_config_we_do_not_fully_understand_is_refused_naming_the_key(case: str) -> None:
    base, change, error, message = BAD[case]
    started = time.process_time()
    with pytest.raises(error, match=message) as caught:
        spec_of(base | change)
    text = str(caught.value)
    assert time.process_time() - started < 10 and text.startswith("config.json: ")
    assert "\n" not in text and len(text) < 700


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
def test_a_missing_required_key_is_named(config: Json) -> None:
    optional = ("model_type", "num_key_value_heads", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    optional += ("word_embed_proj_dim", "do_layer_norm_before", "activation_function")
    for key in config.keys() - optional:
        with pytest.raises(BadFile, match=key):
            spec_of({k: v for k, v in config.items() if k != key})


@pytest.mark.parametrize("eos", ["2", [2, "3"], {"id": 2}, -1, True, 2.0, 1 << 70])
def test_generation_configs_end_tokens_are_checked(eos: Any) -> None:
    with pytest.raises(BadFile, match=r"eos_token_id|token id"):
        spec_of(LLAMA, {"eos_token_id": eos})


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * depth + b"]" * depth + b"}"


FILES: dict[str, tuple[Callable[[Path], Any], type[ThermoclineError], str]] = {
    "absent": (lambda p: None, IOFailure, "no such file"),
    "empty": (lambda p: p.write_bytes(b""), BadFile, "an empty file"),
    "directory": (lambda p: p.mkdir(), BadFile, "is a directory"),
    "FIFO": (os.mkfifo, BadFile, "pipe"),
    "endless device": (lambda p: p.symlink_to("/dev/zero"), BadFile, "device"),
    "git-lfs pointer": (
        lambda p: p.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        BadFile,
        "git lfs pull",
    ),
    "HTML": (lambda p: p.write_bytes(b"<!doctype html>"), BadFile, "HTML page"),
    "zip": (lambda p: p.write_bytes(b"PK\x03\x04"), BadFile, "zip archive"),
    "cut short": (lambda p: p.write_bytes(b'{"architectures": ["Lla'), BadFile, "not valid JSON"),
    "a list": (lambda p: p.write_bytes(b"[]"), BadFile, "not a JSON object"),
    "a number": (lambda p: p.write_bytes(b"1"), BadFile, "not a JSON object"),
    "NaN": (lambda p: p.write_bytes(b'{"a": NaN}'), BadFile, "NaN is not JSON"),
    "1e999": (lambda p: p.write_bytes(b'{"a": 1e999}'), BadFile, "out of range"),
    "endless integer": (lambda p: p.write_bytes(b'{"a": ' + b"1" * 10000 + b"}"), BadFile, "not valid JSON"),
    "key twice": (lambda p: p.write_bytes(b'{"a": 1, "a": 2}'), BadFile, "'a' occurs twice"),
    "key twice inside": (lambda p: p.write_bytes(b'{"b": {"a": 1, "a": 2}}'), BadFile, "'a' occurs twice"),
    "Latin-1": (lambda p: p.write_bytes(b'{"a": "\xe9"}'), BadFile, "not valid JSON"),
    "UTF-16": (lambda p: p.write_bytes('{"a": 1}'.encode("utf-16")), BadFile, "not valid JSON"),
    "nested": (lambda p: p.write_bytes(nested(100_000)), BadFile, "nested too deeply"),
    "too large": (lambda p: p.write_bytes(b" " * (1 << 20)), BadFile, "1048576 bytes, more than"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "hf_quant_config.json"])
def test_a_file_that_is_no_config_is_said_in_a_line_at_once(file: str, kind: str, tmp_path: Path) -> None:
    make, error, message = FILES[kind]
    if file != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    make(tmp_path / file)
    if file != "config.json" and kind == "absent":
        families.read_config(tmp_path)
        return
    started = time.process_time()
    with pytest.raises(error, match=message) as caught:
        families.read_config(tmp_path)
    assert time.process_time() - started < 10
    assert file in str(caught.value) and "\n" not in str(caught.value)
