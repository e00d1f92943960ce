"""gpt-oss's experts, as floats and as blocks of MXFP4, from both kinds of file; what is refused.

Logits: test_twins.py and test_gguf_import.py compare them with transformers'.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import test_twins
import twins
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from thermocline.convert.importer import pack
from thermocline.errors import BadFile, ThermoclineError, Unsupported
from thermocline.files.gguf import GGUF
from thermocline.model import quant
from thermocline.model.families import parse_config, read_config
from thermocline.model.gguf_families import read_model
from thermocline.opening.gguf_model import open_gguf
from thermocline.pack.pack import Pack
from thermocline.session import weights

EXPERTS = ("gate.weight", "up.weight", "down.weight")


def in_blocks(path: Path) -> Path:
    """A twin whose experts are blocks, with numbers of our own."""
    kept_twins.TWINS["gpt_oss"](path)
    tensors = load_file(path / "model.safetensors")
    twins.put_in_blocks(tensors, seed=1)
    save_file(tensors, path / "model.safetensors")
    twins._edit_config(path, lambda c: c.update(quantization_config=twins.MXFP4))
    return path


def stored(packed: Path, name: str) -> NDArray[np.uint8]:
    p = Pack.open(packed)
    info = p.tensors[name]
    rows = np.fromfile(p.weights_path, np.uint8, info.bytes, offset=info.offset)
    return rows.reshape(-1, info.stride)


def test_blocks_stay_the_same_bytes_from_both_kinds_of_file(tmp_path: Path) -> None:
    hf = in_blocks(tmp_path / "hf")
    gguf = gguf_twins.write(hf, tmp_path / "m.gguf", arch="gpt-oss")
    pack(hf, tmp_path / "of-hf")
    pack(gguf, tmp_path / "of-gguf")
    formats = {name: t.format for name, t in Pack.open(tmp_path / "of-hf").tensors.items()}
    assert formats["layers.0.qkv.weight"] == formats["embed.weight"] == "q8_0"
    tensors = load_file(hf / "model.safetensors")
    for i in range(3):
        for part in EXPERTS:
            name = f"layers.{i}.{part}"
            assert formats[name] == "mxfp4"
            assert np.array_equal(stored(tmp_path / "of-hf", name), stored(tmp_path / "of-gguf", name))
        both = value_of(tensors, f"model.layers.{i}.mlp.experts.gate_up_proj")
        for odd, part in enumerate(EXPERTS[:2]):
            rows = stored(tmp_path / "of-hf", f"layers.{i}.{part}")
            assert np.array_equal(quant.decode("mxfp4", rows, 64), both[:, odd::2].reshape(-1, 64))


def value_of(tensors: dict[str, Any], name: str) -> NDArray[np.float32]:
    """[experts, rows, columns]: byte i of a block has weights 2i and 2i + 1, the first in the low nibble."""
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.concatenate([codes, -codes])
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    pairs = np.stack([codes[blocks & 15], codes[blocks >> 4]], axis=-1).reshape(*blocks.shape[:3], 32)
    values = pairs * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return np.asarray(values.reshape(*blocks.shape[:2], -1), np.float32)


def test_a_gguf_runs_in_place_with_the_numbers_of_its_pack(tmp_path: Path) -> None:
    gguf = gguf_twins.write(in_blocks(tmp_path / "hf"), tmp_path / "m.gguf", arch="gpt-oss")
    pack(gguf, tmp_path / "packed")
    ids = kept_twins.ids()
    model = open_gguf(gguf)
    assert not isinstance(model, str)
    in_place = weights.load(model, threads=2)
    y = test_twins.Model(model.spec, in_place.weights, in_place.ops).logits(ids, 7)
    made = Pack.open(tmp_path / "packed")
    got = weights.load(made, threads=1)
    assert np.array_equal(test_twins.Model(made.spec, got.weights, got.ops).logits(ids, 40), y)


def test_a_format_that_is_asked_for_is_every_matrix_s(tmp_path: Path) -> None:
    pack(in_blocks(tmp_path / "hf"), tmp_path / "packed", "f16")
    found = {t.format for n, t in Pack.open(tmp_path / "packed").tensors.items() if n.endswith(EXPERTS)}
    assert found == {"f16"}


def without(end: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        del tensors[next(n for n in tensors if n.endswith(end))]

    return change


def altered(end: str, how: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        name = next(n for n in tensors if n.endswith(end))
        tensors[name] = np.ascontiguousarray(how(tensors[name]))

    return change


def no_number(scales: Any) -> Any:
    scales[1, 2, 0] = 255
    return scales


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], None], type[ThermoclineError], str]] = {
    "no scales": (without("down_proj_scales"), BadFile, "down_proj is missing"),
    "scales of fewer rows": (altered("down_proj_scales", lambda x: x[:, 1:]), BadFile, "its blocks are"),
    "blocks of 8 bytes": (altered("down_proj_blocks", lambda x: x[..., :8]), BadFile, "not bytes of MXFP4"),
    "blocks of numbers": (altered("up_proj_blocks", lambda x: x.astype("f4")), BadFile, "not bytes of MXFP4"),
    "a scale that is none": (altered("up_proj_scales", no_number), BadFile, "row 194: a scale is not"),
    "fewer experts": (altered("up_proj_bias", lambda x: x[1:]), BadFile, r"config.json implies \(8, 192\)"),
    "no sinks": (without("self_attn.sinks"), BadFile, "self_attn.sinks is missing"),
    "no bias of a router": (without("router.bias"), BadFile, "router.bias is missing"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_experts_are_refused(case: str, tmp_path: Path) -> None:
    change, error, why = DAMAGED[case]
    path = in_blocks(tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(error, match=why):
        pack(path, tmp_path / "packed")


CONFIGS: dict[str, tuple[dict[str, Any], type[ThermoclineError], str]] = {
    "other blocks": ({"quantization_config": {"quant_method": "awq"}}, Unsupported, "known: mxfp4"),
    "an option of blocks": ({"quantization_config": {**twins.MXFP4, "bits": 3}}, Unsupported, "'bits'"),
    "another activation": ({"hidden_act": "gelu"}, Unsupported, "hidden_act"),
    "two counts of experts": ({"experts_per_token": 5}, BadFile, "differs from num_experts_per_tok"),
    "more chosen than there are": ({"num_experts_per_tok": 9}, BadFile, "n_experts_active is more"),
    "no limit": ({"swiglu_limit": 0}, BadFile, "swiglu_limit"),
    "an alpha beyond all": ({"swiglu_alpha": 1e9}, BadFile, "swiglu_alpha"),
    "two first contexts": ({"initial_context_length": 17}, BadFile, "differs from rope's 16"),
    "floats that are blocks": ({"quantization_config": twins.MXFP4}, BadFile, "config.json implies"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_says_something_else_is_refused(case: str, tmp_path: Path) -> None:
    changes, error, why = CONFIGS[case]
    path = kept_twins.TWINS["gpt_oss"](tmp_path / "hf")
    twins._edit_config(path, lambda c: c.update(changes))
    with pytest.raises(error, match=why):
        pack(path, tmp_path / "packed")


def test_the_published_config_is_read(tmp_path: Path) -> None:
    """Keys and values as gpt-oss-20b's, whose generation_config.json has the tokens that end an answer."""
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "pad_token_id": 199999, "quantization_config": twins.MXFP4,
        "rms_norm_eps": 1e-05, "rope_scaling": {**rope, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "transformers_version": "4.55.0", "use_cache": True,
        "vocab_size": 201088,
    }  # fmt: skip
    spec, tensor_map = parse_config(config, {"eos_token_id": [200002, 199999, 200012]}, "config.json")
    assert (spec.activation, spec.swiglu_alpha, spec.swiglu_limit) == ("swiglu_oai", 1.702, 7.0)
    assert (spec.n_experts, spec.n_experts_active, spec.ffn_dim, spec.qkv_rows) == (32, 4, 2880, 5120)
    assert spec.eos_ids == (200002, 199999, 200012) and spec.bos_id is None
    assert [spec.window(i) for i in (0, 1, 2)] == [128, None, 128]
    scaling = spec.rope_scaling
    assert scaling is not None and not scaling.truncate and spec.rope_theta == 150000.0
    assert abs(scaling.attention_factor - 1.3465735902799727) < 1e-12
    (down, *_) = tensor_map.tensors["layers.0.down.weight"]
    assert (down.shape, down.part, down.transposed) == ((32, 2880, 2880), 0, False)


def test_a_config_without_rope_has_the_family_s(tmp_path: Path) -> None:
    path = kept_twins.TWINS["gpt_oss"](tmp_path / "hf")
    twins._edit_config(path, lambda c: c.pop("rope_parameters"))
    spec, _ = read_config(path)
    scaling = spec.rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("yarn", 32.0)
    assert spec.rope_theta == 150000.0


def test_a_gguf_s_calls_of_tools_end_answers_too(tmp_path: Path) -> None:
    """GGUF's keys name two or three of the tokens; the list of tokens has them all."""
    tokens = [f"<{i}>" for i in range(twins.VOCAB)]
    tokens[7], tokens[9] = "<|return|>", "<|call|>"
    hf = kept_twins.TWINS["gpt_oss"](tmp_path / "hf")
    path = gguf_twins.write(hf, tmp_path / "m.gguf", arch="gpt-oss", more=lambda w: w.add_token_list(tokens))
    with GGUF(path) as opened:
        assert read_model(opened)[0].eos_ids == (2, 7, 9)


def test_names_say_what_they_are() -> None:
    """No tensor of the map is taken twice, and every number of a stack is taken once."""
    spec, tensor_map = parse_config(json.loads(kept_twins.config("gpt_oss")), None, "config.json")
    for i in range(spec.n_layers):
        gate, up = (tensor_map.tensors[f"layers.{i}.{p}.bias"][0] for p in ("gate", "up"))
        taken = [n for p in (gate, up) for r in p.pick for n in r]
        assert sorted(taken) == list(range(8 * 192))
    assert not re.search("blocks|scales", str(tensor_map.tensors))
