"""Keys that published configs have beside what changes a model: each was refused, and the model with it."""

from __future__ import annotations

import json
from typing import Any

import kept_twins
import pytest

from thermocline.errors import BadFile, Unsupported
from thermocline.model import families
from thermocline.model.spec import ModelSpec

Json = dict[str, Any]


def config(name: str) -> Json:
    found: Json = json.loads(kept_twins.config(name))
    return found


def read(given: Json) -> ModelSpec:
    return families.parse_config(given, None, "config.json")[0]


def text_of(given: Json) -> Json:
    """Return what a wrapper has around its text model, or the config itself."""
    found: Json = given.get("text_config", given)
    return found


# Keys as published, and other values of theirs, which would change the answer.
PUBLISHED: dict[str, tuple[str, Json, Json]] = {
    "Qwen2.5-7B": ("qwen2", {"use_mrope": False}, {"use_mrope": True}),
    "Qwen3.5-27B": ("qwen3_5", {"mlp_only_layers": []}, {"mlp_only_layers": [1]}),
    "Qwen3.6-27B": ("qwen3_5", {"output_gate_type": "swish"}, {"output_gate_type": "sigmoid"}),
    "Gemma 2 9B": ("gemma2", {"sliding_window_size": "sliding_window"}, {"sliding_window_size": 3}),
    "Gemma 2 27B": ("gemma2", {"_attn_implementation": "eager"}, {}),
    "Nemotron-H-8B": (
        "nemotron_h",
        {"attention_head_dim": "head_dim", "rms_norm_eps": "layer_norm_epsilon"},
        {"attention_head_dim": 24, "rms_norm_eps": 0.5},
    ),
    "Granite 4": ("granite_hybrid", {"init_method": "mup"}, {}),
    "Hunyuan-A13B": (
        "hunyuan_moe",
        {"routed_scaling_factor": 1.0, "moe_drop_tokens": False, "xdrope_section": None, "vit_patch": 1},
        {"routed_scaling_factor": 2.5, "moe_drop_tokens": True, "xdrope_section": [1]},
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_key_of_a_published_config_changes_nothing_or_is_refused(model: str) -> None:
    name, keys, other = PUBLISHED[model]
    given = config(name)
    named = {key: text_of(given).get(value, value) if isinstance(value, str) else value
             for key, value in keys.items()}  # fmt: skip
    changed = config(name)
    text_of(changed).update(named)
    assert read(changed) == read(given)
    for key, value in other.items():
        wrong = config(name)
        text_of(wrong).update(named | {key: value})
        with pytest.raises((BadFile, Unsupported), match=key):
            read(wrong)


def test_hunyuans_lists_have_one_value_for_all_layers() -> None:
    given = config("hunyuan_moe")
    layers = given["num_hidden_layers"]
    assert read(given | {"num_shared_expert": [1] * layers, "model_type": "hunyuan"}) == read(given)
    with pytest.raises(Unsupported, match="num_shared_expert"):
        read(given | {"num_shared_expert": [2] * layers})


def test_phis_mixture_has_its_makers_class_too() -> None:
    given = config("phimoe")
    assert read(given | {"architectures": ["PhiMoEForCausalLM"]}) == read(given)


def test_the_smaller_smallthinker_says_nothing_of_a_softmax() -> None:
    given = config("smallthinker")
    assert given.pop("moe_primary_router_apply_softmax") is False
    assert read(given) == read(config("smallthinker"))


def test_deepseeks_scales_may_be_powers_of_two() -> None:
    given = config("deepseek_v3")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    assert read(given | {"quantization_config": fp8}) == read(given)
    with pytest.raises(Unsupported, match="scale_fmt"):
        read(given | {"quantization_config": fp8 | {"scale_fmt": "e4m3"}})
