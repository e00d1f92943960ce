"""Today's mixtures: every field of a router changes answers, what is not understood is refused in a line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import test_twins
import twins
from safetensors.numpy import load_file, save_file
from test_twins import in_numpy, loaded, nmse

from thermocline.convert.importer import pack
from thermocline.errors import BadFile, Unsupported
from thermocline.model import families
from thermocline.model.activations import route
from thermocline.model.spec import ModelSpec, Router, check_spec
from thermocline.opening.gguf_model import open_gguf
from thermocline.pack.pack import Pack
from thermocline.session import weights

F32 = np.float32


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kept_twins.config(name))
    return found


# What a changed config has to change: {twin: {key: (value that changes logits, or an error's words)}}.
KEYS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "norm_topk_prob": False,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
        "moe_intermediate_size": 40,
        "use_sliding_window": True,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "olmoe": {"norm_topk_prob": True, "num_experts_per_tok": 2, "clip_qkv": 4.0, "num_experts": 7},
    "glm4_moe": {
        "norm_topk_prob": False,
        "n_group": 2,
        "topk_group": 3,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "n_routed_experts": 12,
        "first_k_dense_replace": 0,
        "use_qk_norm": False,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "dots1": {"sliding_window": 5, "layer_types": ["full_attention"] * 3, "norm_topk_prob": False},
    "ernie4_5_moe": {
        "moe_norm_min": 0.9,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
        "moe_layer_interval": 2,
        "use_bias": True,
        "moe_use_aux_free": False,
    },
    "granite_moe": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_experts_per_tok": 2,
    },
    "minimax_m2": {"rotary_dim": 24, "scoring_func": "softmax", "use_qk_norm": False, "head_dim": 16},
    "granite_moe_shared": {"shared_intermediate_size": 0},
    "phimoe": {
        "router_jitter_noise": 0.01,
        "num_experts_per_tok": 3,
        "attention_bias": False,
        "lm_head_bias": False,
        "sliding_window": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 0.5,
    },
    "llama4": {
        "attention_chunk_size": 5,
        "attn_temperature_tuning": False,
        "attn_scale": 2.0,
        "floor_scale": 2,
        "use_qk_norm": False,
        "no_rope_layers": [1, 1, 0, 0],
        "moe_layers": [0, 1, 2],
        "interleave_moe_layer_step": 0,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"] * 4,
        "attention_bias": True,
    },
    "hunyuan_moe": {
        "moe_topk": [3, 3, 2],
        "num_shared_expert": [2, 2, 2],
        "use_qk_norm": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "smallthinker": {
        "moe_primary_router_apply_softmax": True,
        "moe_num_active_primary_experts": 2,
        "moe_num_primary_experts": 7,
        "moe_ffn_hidden_size": 40,
        "rope_layout": [1, 1, 0],
        "rope_theta": 100.0,
        "sliding_window_layout": [0, 0, 1],
        "sliding_window_size": 4,
        "rms_norm_eps": 0.1,
        "hidden_act": "silu",
        "moe_enable_early_router": False,
        "moe_enable_secondary_experts": True,
        "norm_topk_prob": False,
        "attention_bias": True,
    },
}


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in KEYS.items() for k in keys])
def test_every_key_of_a_mixture_changes_the_answer_or_is_refused(name: str, key: str, tmp_path: Path) -> None:
    path = kept_twins.write(name, tmp_path / name)
    truth = in_numpy(loaded(path)).logits(kept_twins.ids()[:12], 12)

    def changed(c: dict[str, Any]) -> None:
        if key == "rotary_dim":
            c.pop("rope_parameters")
        c.update({key: KEYS[name][key]} | ({"sliding_window": 4} if key == "use_sliding_window" else {}))

    other = kept_twins.write(name, tmp_path / "other")
    twins._edit_config(other, changed)
    try:
        y = in_numpy(loaded(other)).logits(kept_twins.ids()[:12], 12)
    except (BadFile, Unsupported) as e:
        assert "\n" not in str(e)
        return
    assert nmse(y, truth) > 1e-5


ROUTERS: dict[str, dict[str, Any]] = {
    "score": {"score": "softmax"},
    "weights": {"weights": "score", "epsilon": 0.0},
    "scale": {"scale": 1.0},
    "groups": {"groups": 1, "groups_kept": 1, "group_rule": "max"},
    "groups kept": {"groups_kept": 3},
    "group rule": {"group_rule": "max"},
    "epsilon": {"epsilon": 0.5},
    "no bias for the choice": {"selection_bias": False},
}


def test_a_routers_weights_may_multiply_inputs_instead(tmp_path: Path) -> None:
    """Natively as in the reference, whatever a token's company."""
    model = loaded(kept_twins.write("llama4", tmp_path / "llama4"))
    spec = replace(model.spec, router=replace(model.spec.router, scales_input=False))
    ids, y = kept_twins.ids(), model.logits(kept_twins.ids(), 40)
    assert nmse(replace(model, spec=spec).logits(ids, 40), y) > 1e-4


def test_a_wrappers_text_part_is_read_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 4 as published: its text model inside another, beside one for images."""
    plain = loaded(kept_twins.write("llama4", tmp_path / "llama4"))
    path = kept_twins.write("llama4", tmp_path / "wrapped")
    twins._edit_config(path, lambda c: wrap(c))
    held = load_file(path / "model.safetensors")
    inside = {f"language_model.{name}": x for name, x in held.items()}
    inside |= {"vision_model.patch_embedding.linear.weight": np.zeros((4, 4), np.float32)}
    inside |= {"multi_modal_projector.linear_1.weight": np.zeros((4, 4), np.float32)}
    save_file(inside, path / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO):
        made = loaded(path)
    assert "its text part is read; 2 tensors of its other parts are left out" in caplog.text
    assert made.spec == plain.spec
    ids = kept_twins.ids()[:12]
    assert np.array_equal(made.logits(ids, 12), plain.logits(ids, 12))


def wrap(config: dict[str, Any]) -> None:
    text = {key: config.pop(key) for key in list(config)}
    text.pop("architectures")
    config |= {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
    config |= {"text_config": text, "vision_config": {"hidden_size": 4}, "image_token_index": 7}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> test_twins.Model:
    return loaded(kept_twins.write("glm4_moe", tmp_path_factory.mktemp("glm") / "glm4_moe"))


@pytest.mark.parametrize("case", ROUTERS)
def test_every_field_of_a_router_changes_the_answer(case: str, glm: test_twins.Model) -> None:
    """Natively as in the reference."""
    ids, spec = kept_twins.ids(), glm.spec
    spec = replace(spec, router=replace(spec.router, **ROUTERS[case]))
    made = glm.weights
    if not spec.router.selection_bias:
        made = replace(made, layers=tuple(replace(x, selection_bias=None) for x in made.layers))
    check_spec(spec, "a test")
    other = replace(glm, spec=spec, weights=made)
    y = other.logits(ids, 40)
    assert nmse(y, glm.logits(ids, 40)) > 1e-4
    assert nmse(y, in_numpy(other).logits(ids, 40)) <= 1e-6


def test_a_router_before_attention_reads_another_stream(tmp_path: Path) -> None:
    model, ids = loaded(kept_twins.write("smallthinker", tmp_path / "smallthinker")), kept_twins.ids()
    other = replace(model, spec=replace(model.spec, router_input="ffn_norm"))
    y, truth = other.logits(ids, 40), model.logits(ids, 40)
    assert nmse(y, truth) > 1e-4
    assert nmse(y, in_numpy(other).logits(ids, 40)) <= 1e-6


def test_the_shared_ffn_and_dense_layers_are_counted(tmp_path: Path) -> None:
    made = pack_of("glm4_moe", tmp_path)
    s = made.spec
    assert (s.ffn(0), s.ffn(1)) == ((1, 1, 112), (8, 3, 48)) and s.shared_dim == 96
    shared = [t for t in made.tensor_specs().values() if t.role == "shared"]
    assert sum(t.parameters for t in shared) == 2 * 3 * 96 * s.dim


def pack_of(name: str, tmp_path: Path) -> Pack:
    pack(kept_twins.write(name, tmp_path / name), tmp_path / "p", "f32")
    return Pack.open(tmp_path / "p")


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "top-k above the experts": (
        "qwen3_moe",
        {"num_experts_per_tok": 9},
        "n_experts_active is more",
    ),
    "two counts": ("qwen3_moe", {"num_experts": 6}, "num_local_experts differs from num_experts"),
    "groups that do not divide": ("glm4_moe", {"n_group": 3}, "groups do not divide the experts"),
    "groups too few": ("glm4_moe", {"topk_group": 1}, "groups have too few experts"),
    "clipped": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
    "no layer with experts": ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "that no layer has experts"),
    "layers a number": ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers"),
    "step zero": ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be an integer"),
    "biased": ("ernie4_5_moe", {"use_bias": True}, "use_bias True is not supported"),
    "other scores": ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
    "lightning attention": ("minimax_m2", {"attn_type_list": [0, 1, 1]}, "attn_type_list"),
    "layers that differ": ("hunyuan_moe", {"moe_topk": [3, 3, 2]}, "moe_topk .* layers differ"),
    "FP8": ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "a layout too short": ("smallthinker", {"rope_layout": [1, 1]}, "rope_layout must be 3 of 0 and 1"),
    "a window without size": ("smallthinker", {"sliding_window_size": None}, "sliding_window_size is miss"),
    "another key": ("smallthinker", {"moe_secondary_expert_size": 4}, "'moe_secondary_expert_size' is unk"),
    "relu and dense layers": ("glm4_moe", {"hidden_act": "relu"}, "dense_layers"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mixture_that_cannot_be_is_refused_in_a_line(case: str) -> None:
    name, change, message = BAD[case]
    with pytest.raises((BadFile, Unsupported), match=message) as e:
        families.parse_config(config(name) | change, None, "config.json", None)
    assert "\n" not in str(e.value)


QWEN3_CODER = """{
"architectures": ["Qwen3MoeForCausalLM"], "attention_dropout": 0.0, "decoder_sparse_step": 1,
"eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02,
"intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28, "mlp_only_layers": [],
"model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
"output_router_logits": false, "qkv_bias": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
"rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.52.3",
"use_cache": true, "use_qk_norm": true, "use_sliding_window": false, "vocab_size": 151936}"""


def test_a_published_config_is_read() -> None:
    s, _ = families.parse_config(json.loads(QWEN3_CODER), None, "config.json", None)
    assert s.ffn(0) == (128, 8, 768) and s.router == Router() and s.rope_theta == 1e7
    with pytest.raises(Unsupported, match="shared_expert_intermediate_size 512 is not supported"):
        changed = json.loads(QWEN3_CODER) | {"shared_expert_intermediate_size": 512}
        families.parse_config(changed, None, "config.json", None)


def edited(hf: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    tensors = load_file(hf / "model.safetensors")
    change(tensors)
    save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    return hf


TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an expert is missing": (lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight"), "is missing"),
    "an expert too many": (
        lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": np.zeros((48, 64), F32)}),
        "experts.8.up_proj.weight' does not belong to this model",
    ),
    "the shared experts are missing": (
        lambda t: t.pop("model.layers.2.mlp.shared_experts.up_proj.weight"),
        "shared_experts.up_proj.weight is missing",
    ),
    "a router of fewer": (
        lambda t: t.update({"model.layers.1.mlp.gate.weight": np.zeros((7, 64), F32)}),
        "mlp.gate.weight is .7, 64., config.json implies .8, 64.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_contradict_the_config_are_named(case: str, tmp_path: Path) -> None:
    change, message = TENSORS[case]
    hf = edited(kept_twins.write("glm4_moe", tmp_path / "hf"), change)
    with pytest.raises((BadFile, Unsupported), match=message) as e:
        pack(hf, tmp_path / "p", "f32")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("part", ["gate.weight", "gate.e_score_correction_bias"])
def test_a_router_with_a_nan_is_refused(part: str, tmp_path: Path) -> None:
    """It would choose the same experts for every token."""

    def damaged(tensors: dict[str, Any]) -> None:
        tensors[f"model.layers.2.mlp.{part}"][..., 3] = np.nan

    pack(edited(kept_twins.write("glm4_moe", tmp_path / "hf"), damaged), tmp_path / "p", "f32")
    with pytest.raises(BadFile, match="the router of layer 2 holds a value that is not a finite number"):
        weights.load(Pack.open(tmp_path / "p"), threads=1)


def test_blocks_that_guess_further_tokens_are_left_out_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def more(tensors: dict[str, Any]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), F32)
        tensors["model.layers.3.mlp.gate.weight"] = np.zeros((8, 64), F32)

    hf = edited(kept_twins.write("glm4_moe", tmp_path / "hf"), more)
    with caplog.at_level(logging.INFO, "thermocline"):
        pack(hf, tmp_path / "p", "f32")
    assert "2 tensors that guess further tokens are left out" in caplog.text
    assert Pack.open(tmp_path / "p").spec.n_layers == 3
    caplog.clear()

    def added(w: Any) -> None:
        w.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((64, 128), F32))

    path = gguf_twins.write(
        kept_twins.write("glm4_moe", tmp_path / "g"), tmp_path / "m.gguf", arch="glm4moe", more=added
    )
    with caplog.at_level(logging.INFO, "thermocline"):
        model = open_gguf(path)
    assert not isinstance(model, str) and model.spec.n_layers == 3
    assert "1 tensors that guess further tokens are left out" in caplog.text


def random_logits(seed: int, tokens: int = 50) -> Any:
    return np.random.default_rng(seed).standard_normal((tokens, 8), F32)


def test_groups_leave_the_experts_of_others_out() -> None:
    rule = Router(score="sigmoid", weights="score", groups=4, groups_kept=2, group_rule="sum2")
    logits = random_logits(1)
    for row, chosen in zip(logits, route(logits, 3, rule) != 0, strict=True):
        sums = (1 / (1 + np.exp(-row))).reshape(4, 2).sum(axis=1)
        best = set(np.argsort(-sums)[:2].tolist())
        assert chosen.sum() == 3 and set((np.flatnonzero(chosen) // 2).tolist()) <= best


def test_normalised_weights_of_softmax_are_the_softmax_of_the_chosen() -> None:
    logits = random_logits(2)
    a, b = (route(logits, 3, Router(weights=kind)) for kind in ("chosen", "normalised"))
    assert np.allclose(a, b, rtol=1e-6) and np.array_equal(a != 0, b != 0)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = random_logits(3), np.array([5, 0, 0, 0, 0, 0, 0, 0], F32)
    rule = Router(score="sigmoid", weights="score", selection_bias=True, scale=2.0)
    weights_of = route(logits, 2, rule, bias)
    assert np.allclose(weights_of[:, 0], 2 / (1 + np.exp(-logits[:, 0])), rtol=1e-6)
    assert ((weights_of != 0).sum(axis=1) == 2).all()


def test_a_default_router_means_mixtrals() -> None:
    """Packs that lack the field."""
    spec = ModelSpec("x", 8, 8, 1, 1, 1, 8, 8, 8, "rms", 1e-5, "silu", n_experts=4, n_experts_active=2)
    assert spec.router == Router() == Router("softmax", "chosen")
