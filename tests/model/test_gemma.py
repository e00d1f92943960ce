"""Gemma 3 and 4: what their configs and files say is read or refused, and every field changes the answer."""

from __future__ import annotations

import json
import logging
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
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import KVCache, reserved_bytes
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import BadFile, Unsupported
from thermocline.files.gguf import GGUF
from thermocline.model import families
from thermocline.model.gguf_families import read_model
from thermocline.model.spec import ModelSpec, RopeScaling, Router, check_spec
from thermocline.pack.pack import Pack

IDS = kept_twins.ids()


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kept_twins.config(name))
    return found


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return families.parse_config(config(name) | changes, None, "config.json", None)[0]


ROPES = config("gemma4")["rope_parameters"]
FULL, NEAR = ROPES["full_attention"], ROPES["sliding_attention"]
# twin -> key -> another value
KEYS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_activation": "silu",
        "rms_norm_eps": 0.1,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "final_logit_softcapping": None,
        "attention_k_eq_v": False,
        "rope_parameters": ROPES | {"full_attention": FULL | {"partial_rotary_factor": 0.5}},
        "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 8,
        "use_bidirectional_attention": "all",
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gemma4_moe": {
        "top_k_experts": 2,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "enable_moe_block": False,
    },
    "gemma4_small": {
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 100,
        "rope_parameters": ROPES | {"sliding_attention": NEAR | {"rope_theta": 100.0}},
    },
}


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in KEYS.items() for k in keys])
def test_every_key_changes_the_answer_or_is_refused(name: str, key: str, tmp_path: Path) -> None:
    truth = in_numpy(loaded(kept_twins.write(name, tmp_path / name))).logits(IDS[:12], 12)
    other = kept_twins.write(name, tmp_path / "other")
    twins._edit_config(other, lambda c: c.update({key: KEYS[name][key]}))
    try:
        y = in_numpy(loaded(other)).logits(IDS[:12], 12)
    except (BadFile, Unsupported) as e:
        assert "\n" not in str(e)
        return
    assert nmse(y, truth) > 1e-5


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> test_twins.Model:
    return loaded(kept_twins.write("gemma4_moe", tmp_path_factory.mktemp("moe") / "gemma4_moe"))


FLIPS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # fields of the spec, and what layers then lack
    "router_input": ({"router_input": "ffn_norm"}, ("router_norm",)),
    "shared_norms": ({"shared_norms": False}, ("shared_norm", "shared_post_norm", "experts_post_norm")),
    "router.expert_scale": ({"router": Router()}, ("expert_scale",)),
}


@pytest.mark.parametrize("case", FLIPS)
def test_every_field_of_the_mixture_changes_the_answer(case: str, mixture: test_twins.Model) -> None:
    """Natively as in the reference."""
    fields, without = FLIPS[case]
    nothing: dict[str, Any] = dict.fromkeys(without)
    layers = tuple(replace(x, **nothing) for x in mixture.weights.layers)
    other = replace(
        mixture,
        spec=replace(mixture.spec, **fields),
        weights=replace(mixture.weights, layers=layers),
    )
    check_spec(other.spec, "a test")
    y = other.logits(IDS, 40)
    assert nmse(y, mixture.logits(IDS, 40)) > 1e-5
    assert nmse(y, in_numpy(other).logits(IDS, 40)) <= 1e-6


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no layer left that stores": ("gemma4_small", {"num_kv_shared_layers": 5}, "kv_shared_layers"),
    "a kind that nobody stores": ("gemma4_small", {"num_kv_shared_layers": 4}, "kinds that earlier ones"),
    "the last layer has a window": (
        "gemma4",
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        "layer_types must end",
    ),
    "heads of another layer": ("gemma4", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    "heads that differ": (
        "gemma4",
        {"per_layer_config": {"1": {"head_dim": 8}, "3": {"head_dim": 16}}},
        "layers of a kind differ",
    ),
    "a head's key": (
        "gemma4",
        {"per_layer_config": {key: {"rms_norm_eps": 1.0} for key in "13"}},
        "'rms_norm_eps' is unknown",
    ),
    "other tokens": ("gemma4_small", {"vocab_size_per_layer_input": 7}, "it is not vocab_size"),
    "wide and mixed": (
        "gemma4_moe",
        {"use_double_wide_mlp": True, "num_kv_shared_layers": 1},
        "use_double_wide_mlp True is not supported",
    ),
    "biased": ("gemma4", {"attention_bias": True}, "attention_bias True is not supported"),
    "both ways": ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
    "half a rope": ("gemma4", {"rope_parameters": {"full_attention": FULL}}, "sliding_attention is missing"),
    "another rope": (
        "gemma4",
        {"rope_parameters": ROPES | {"full_attention": FULL | {"rope_type": "yarn"}}},
        "rope_type 'yarn' is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_gemma_4_that_cannot_be_is_refused_in_a_line(case: str) -> None:
    name, changes, message = BAD[case]
    with pytest.raises((BadFile, Unsupported), match=message) as e:
        spec_of(name, **changes)
    assert "\n" not in str(e.value)


def test_both_spellings_of_the_larger_heads_mean_the_same() -> None:
    published = config("gemma4")
    del published["per_layer_config"]
    published |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert families.parse_config(published, None, "c", None)[0] == spec_of("gemma4")


def test_layers_that_share_keys_and_values_take_no_memory_for_them(tmp_path: Path) -> None:
    spec = spec_of("gemma4_small")
    kv = KVCache(spec, 2)
    assert [kv.layer(i) is kv.layer(spec.kv_layer(i)) for i in range(5)] == [True] * 5
    assert [spec.kv_layer(i) for i in range(5)] == [0, 1, 2, 2, 1]
    own = 64 * 2 * 2 * 2 * (16 + 32 + 16)  # positions, k and v, heads, bytes, sizes of heads
    assert kv.nbytes == own == reserved_bytes(spec, 64, 64, 1 << 20)


def test_matrices_that_sharing_layers_do_not_use_are_ignored(tmp_path: Path) -> None:
    """Published checkpoints hold them."""
    hf = kept_twins.write("gemma4_small", tmp_path / "hf")
    truth = loaded(hf).logits(IDS, 40)
    tensors = load_file(hf / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = np.zeros((64, 64), np.float32)
    tensors["model.layers.3.self_attn.v_norm.weight"] = np.zeros(16, np.float32)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((hf / "config.json").read_bytes())
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert np.array_equal(loaded(other).logits(IDS, 40), truth)
    tensors["model.layers.2.self_attn.v_norm.weight"] = np.zeros(16, np.float32)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(Unsupported, match=r"layers\.2\.self_attn\.v_norm\.weight' does not belong"):
        pack(other, tmp_path / "p", "f32")


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe", "gemma4_small"])
def test_a_known_beginning_changes_no_bit(name: str, tmp_path: Path) -> None:
    model = loaded(kept_twins.write(name, tmp_path / name))
    settings = EngineSettings(context=twins.CONTEXT, max_batch=2, prefill_chunk=16)
    engine = Engine(model.spec, model.weights, model.ops, settings)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    found = []
    for _ in range(2):  # the second finds the first's blocks
        request = engine.submit([*IDS, 7], params)
        while engine.step():
            pass
        found.append((request.ids, request.logprobs))
    assert found[0] == found[1]


# ---- wrappers

GEMMA3_4B = """{
"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
"eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
"model_type": "gemma3", "text_config": {"hidden_size": 2560, "intermediate_size": 10240,
"model_type": "gemma3_text", "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
"sliding_window": 1024}, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
"vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"}}"""


def test_a_published_wrapper_is_read() -> None:
    spec, made = families.parse_config(json.loads(GEMMA3_4B), None, "config.json", None)
    assert (spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert (spec.rope_theta, spec.local_rope_theta, spec.eos_ids) == (1e6, 1e4, (1, 106))
    assert spec.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert spec.window(4) == 1024 and spec.window(5) is None and spec.tied_head
    assert made.is_beside("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight")
    assert made.is_beside("model.multi_modal_projector.mm_soft_emb_norm.weight")


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "model."], ids=["old", "new", "text alone"]
)
def test_a_wrappers_text_part_is_read_and_a_line_says_so(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its tensors have the names of several years."""
    hf = kept_twins.write("gemma3_wrapper", tmp_path / "hf")
    tensors = load_file(hf / "model.safetensors")
    truth = loaded(hf)
    renamed = {n.replace("language_model.model.", prefix): x for n, x in tensors.items()}
    save_file(renamed, hf / "model.safetensors", {"format": "pt"})
    with caplog.at_level(logging.INFO, "thermocline"):
        pack(hf, tmp_path / "p", "f32")
    assert "its text part is read; 34 tensors of its other parts are left out" in caplog.text
    assert Pack.open(tmp_path / "p").spec == truth.spec
    packed = (tmp_path / "p" / "weights.bin").read_bytes()
    assert packed == (hf.with_name("hf-f32") / "weights.bin").read_bytes()


WRAPPERS: dict[str, tuple[dict[str, Any], str]] = {
    "no text": ({"text_config": None}, "text_config must be an object"),
    "another text": ({"text_config": {"model_type": "llama"}}, "model_type is not 'gemma3_text'"),
    "a key": ({"wings": 2}, "'wings' is unknown"),
    "a text's key": ({"text_config": config("gemma3_wrapper")["text_config"] | {"wings": 2}}, "'wings'"),
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_a_wrapper_that_is_not_understood_is_refused(case: str) -> None:
    changes, message = WRAPPERS[case]
    with pytest.raises((BadFile, Unsupported), match=message):
        spec_of("gemma3_wrapper", **changes)


def test_a_wrapped_gemma_4_is_its_text() -> None:
    inner = config("gemma4_moe")
    outer: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "eos_token_id": [2, 5],
    }
    outer |= {"text_config": {k: v for k, v in inner.items() if k != "architectures"}, "audio_config": None}
    outer |= {
        "vision_config": {},
        "boa_token_id": 256000,
        "video_token_id": 3,
        "vision_soft_tokens_per_image": 9,
    }
    spec, _ = families.parse_config(outer, None, "config.json", None)
    assert spec == replace(spec_of("gemma4_moe"), eos_ids=(2, 5))


# ---- GGUF


GGUFS: dict[str, tuple[str, Any, str]] = {
    "divisors of other ropes": ("gemma4", np.linspace(1, 8, 16), "holds other divisors than 1 and 1e30"),
    "nothing turns": ("gemma4", np.full(16, 1e30), "holds other divisors"),
    "too few divisors": ("gemma4", np.ones(8), r"rope_freqs.weight is f32 \(8,\)"),
}


@pytest.mark.parametrize("case", GGUFS)
def test_a_gguf_with_another_rope_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    name, values, message = GGUFS[case]

    def add(w: Any, config: dict[str, Any], out: dict[str, Any]) -> None:
        made(w, config, out)
        out["rope_freqs.weight"] = values.astype(np.float32)

    made = gguf_twins.add_gemma4
    monkeypatch.setattr(gguf_twins, "add_gemma4", add)
    path = gguf_twins.write(kept_twins.write(name, tmp_path / "hf"), tmp_path / "m.gguf", arch="gemma4")
    with pytest.raises((BadFile, Unsupported), match=message), GGUF(path) as file:
        read_model(file)


def test_a_gguf_may_hold_what_sharing_layers_do_not_use(tmp_path: Path) -> None:
    pytest.importorskip("gguf")

    def more(w: Any) -> None:
        w.add_tensor("blk.4.attn_k.weight", np.zeros((64, 64), np.float32))
        w.add_tensor("blk.3.attn_v.weight", np.zeros((32, 64), np.float32))

    hf = kept_twins.write("gemma4_small", tmp_path / "hf")
    path = gguf_twins.write(hf, tmp_path / "m.gguf", arch="gemma4", more=more)
    pack(path, tmp_path / "p", "f32")
    assert Pack.open(tmp_path / "p").spec == spec_of("gemma4_small")


def test_a_gguf_s_answers_end_before_what_a_function_would_say(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tokens = [f"t{i}" for i in range(twins.VOCAB)]
    tokens[2], tokens[7], tokens[9] = "<eos>", "<|tool_response>", "<turn|>"
    path = gguf_twins.write(
        kept_twins.write("gemma4", tmp_path / "hf"),
        tmp_path / "m.gguf",
        arch="gemma4",
        more=lambda w: w.add_array("tokenizer.ggml.tokens", tokens),
    )
    with GGUF(path) as file:
        assert read_model(file)[0].eos_ids == (2, 7, 9)
