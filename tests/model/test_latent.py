"""Latent attention: what is kept of a position, files old and new, 8-bit floats, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import tiny
import twins
from safetensors.numpy import load_file
from test_mixtures import config, edited
from test_twins import Model, loaded, nmse

from thermocline import _native
from thermocline.convert.importer import pack
from thermocline.engine.kv_cache import KVCache, bytes_for
from thermocline.engine.prefill_budget import PREFILL_CHUNK
from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.model import families
from thermocline.model.modes import CacheTypes
from thermocline.opening.gguf_model import GGUFModel, open_gguf
from thermocline.ops.cpu import CpuOps
from thermocline.pack.pack import Pack
from thermocline.plan.memory import layer_shape
from thermocline.session import weights

F32 = np.float32


def spec_of(name: str, **changes: Any) -> Any:
    return families.parse_config(config(name) | changes, None, name)[0]


def test_one_vector_a_position_is_kept() -> None:
    spec = spec_of("deepseek_v2")
    assert spec.latent is not None and bytes_for(spec, 10) == 10 * 3 * 2 * (32 + 8)
    kv = KVCache(spec, 4)
    assert kv.nbytes == 4 * kv.block * bytes_for(spec, 1)


def test_latents_are_kept_as_they_are(tmp_path: Path) -> None:
    for types in (CacheTypes("q8_0", "q8_0"), CacheTypes("f16", "q8_0")):
        with pytest.raises(UsageError, match="latent attention are not supported: use f16"):
            KVCache(spec_of("deepseek_v3"), 4, types=types)


@pytest.mark.parametrize("format", ["f32", "q4_0", "q8_0"])
def test_its_scratch_is_below_its_bound_and_not_far(format: str, tmp_path: Path) -> None:
    kept = kept_twins.write("deepseek_v3", tmp_path / "hf")
    twins._edit_config(kept, lambda c: c.update(max_position_embeddings=1024))
    pack(kept, tmp_path / "p", format)
    tiny.tokenizer()
    made = Pack.open(tmp_path / "p")
    got = weights.load(made, threads=2)
    Model(made.spec, got.weights, got.ops).logits([7] * (PREFILL_CHUNK + 20), PREFILL_CHUNK)
    bound = _native.scratch_bytes(layer_shape(made.spec), tokens=PREFILL_CHUNK, positions=1024, threads=2)
    assert 0.25 * bound < got.ops.native.scratch_bytes <= bound


# ---- GGUF


def test_files_from_before_absorption_give_the_same_answers(tmp_path: Path) -> None:
    hf = kept_twins.write("deepseek_v2", tmp_path / "hf")
    path = gguf_twins.write(hf, tmp_path / "old.gguf", arch="deepseek2", apart=True)
    pack(path, tmp_path / "old.gguf-f32")
    truth = kept_twins.logits("deepseek_v2")
    assert "rows and columns exchanged" in str(open_gguf(path))  # so it is packed once
    assert nmse(loaded(path).logits(kept_twins.ids(), 40), truth) <= 1e-6


def test_a_file_in_place_computes_what_its_pack_does(tmp_path: Path) -> None:
    hf = kept_twins.write("deepseek_v3", tmp_path / "hf")
    kinds = lambda n: None if "kv_a" in n else "F16"  # noqa: E731
    path = gguf_twins.write(hf, tmp_path / "m.gguf", arch="deepseek2", types=kinds)
    model = open_gguf(path)
    assert isinstance(model, GGUFModel), model
    pack(path, tmp_path / "p")
    made, ops = Pack.open(tmp_path / "p"), CpuOps(2)
    one, other = (Model(m.spec, weights.BegunLoad.of(m, ops).finish().weights, ops) for m in (model, made))
    ids = kept_twins.ids()
    assert np.array_equal(one.logits(ids, 1), other.logits(ids, len(ids)))


def test_a_router_that_a_file_does_not_name_is_softmax(tmp_path: Path) -> None:
    """As in the first files of DeepSeek-V2; of V3 they say it."""
    for name, score in (("deepseek_v2", "softmax"), ("deepseek_v3", "sigmoid")):
        hf = kept_twins.write(name, tmp_path / name)
        model = open_gguf(gguf_twins.write(hf, tmp_path / f"{name}.gguf", arch="deepseek2"))
        assert not isinstance(model, str) and model.spec.router.score == score


# ---- 8-bit floats


def e4m3(byte: int) -> float:
    """The value of an 8-bit float, as its standard draws it."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


def write_raw(path: Path, tensors: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> None:
    """Write a safetensors file of dtypes that numpy does not have."""
    header, at = {}, 0
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(x.tobytes() for _, x in tensors.values())
    )


def in_8_bits(hf: Path, floats: Path) -> None:
    """Matrices of attention and FFNs as random 8-bit floats with scales; `floats`: the same in f32."""
    rng, table = np.random.default_rng(5), np.array([e4m3(i) for i in range(256)], F32)
    stored, plain = {}, {}
    for name, x in load_file(hf / "model.safetensors").items():
        if x.ndim != 2 or "mlp.gate.weight" in name or not name.startswith("model.layers."):
            stored[name], plain[name] = ("F32", x), ("F32", x)
            continue
        codes = rng.integers(0, 127, x.shape, dtype=np.uint8) | rng.integers(0, 2, x.shape, np.uint8) << 7
        scales = (rng.uniform(1, 2, [-(-n // 128) for n in x.shape]) / 100 / x.shape[1] ** 0.5).astype(F32)
        each = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: x.shape[0], : x.shape[1]]
        stored[name], stored[f"{name}_scale_inv"] = ("F8_E4M3", codes), ("F32", scales)
        plain[name] = ("F32", table[codes] * each)
    write_raw(floats / "model.safetensors", plain)
    write_raw(hf / "model.safetensors", stored)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def test_8_bit_floats_are_read_with_their_blocks_scales(tmp_path: Path) -> None:
    """Rows and columns that no block divides: an FFN of 112, and one of 144."""
    hf, floats = (kept_twins.write("deepseek_v3", tmp_path / name) for name in ("fp8", "f32"))
    in_8_bits(hf, floats)
    twins._edit_config(hf, lambda c: c.update(quantization_config=FP8))
    ids = kept_twins.ids()
    one, other = (loaded(path).logits(ids, len(ids)) for path in (hf, floats))
    assert np.isfinite(one).all() and np.array_equal(one, other)


def test_8_bit_floats_that_are_damaged_are_named(tmp_path: Path) -> None:
    hf = kept_twins.write("deepseek_v3", tmp_path / "hf")
    in_8_bits(hf, kept_twins.write("deepseek_v3", tmp_path / "other"))
    twins._edit_config(hf, lambda c: c.update(quantization_config=FP8))
    path, name = hf / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    raw = bytearray(path.read_bytes())
    n = int.from_bytes(raw[:8], "little")
    start = json.loads(raw[8 : 8 + n])[name]["data_offsets"][0] + 8 + n
    raw[start + 3 * 96] = 0x7F
    path.write_bytes(raw)
    with pytest.raises(BadFile, match=r"o_proj.weight., row 3: a value is not a finite number"):
        pack(hf, tmp_path / "p", "f32")


# ---- configs


def test_kimi_k2_is_a_deepseek_v3() -> None:
    assert spec_of("deepseek_v3", model_type="kimi_k2") == spec_of("deepseek_v3")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases": ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
    "other scores": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    "another choice": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    "weights that add up": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    "shared keys": ("deepseek_v3", {"num_key_value_heads": 2}, "every head has keys of its own"),
    "another format": ("deepseek_v3", {"quantization_config": {"quant_method": "gptq"}}, "fetch a GGUF"),
    "other blocks": ("deepseek_v3", {"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, "64, 64"),
    "an unknown key": ("deepseek_v3", {"index_topk": 2048}, "index_topk"),
    "ReLU": ("deepseek_v3", {"hidden_act": "relu", "first_k_dense_replace": 0}, "latent is for plain"),
    "no latent": ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused_in_a_line(case: str) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises((BadFile, Unsupported), match=message) as e:
        families.parse_config(config(name) | changes, None, "config.json", "relu" if case == "ReLU" else None)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_nope_head_dim": 16, "v_head_dim": 20},
        {"rope_interleave": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    ],
)
def test_a_key_of_attention_changes_the_answer(changes: dict[str, Any], tmp_path: Path) -> None:
    ids, truth = kept_twins.ids()[:20], kept_twins.logits("deepseek_v3")[:20]
    hf = kept_twins.write("deepseek_v3", tmp_path / "hf")
    twins._edit_config(hf, lambda c: c.update(changes) or c.pop("qk_head_dim"))
    try:
        y = loaded(hf).logits(ids, 20)
    except (BadFile, Unsupported) as e:  # a tensor of another shape
        assert "kv_b_proj" in str(e) or "q_b_proj" in str(e)
        return
    assert nmse(y, truth) > 1e-5


def test_the_scale_of_scores_grows_with_yarn() -> None:
    spec = spec_of("deepseek_v3")
    assert spec.attention_scale == pytest.approx((32 + 8) ** -0.5 * (0.1 * np.log(4) + 1) ** 2)
    assert spec.rope_scaling is not None and spec.rope_scaling.attention_factor == 1


def test_blocks_that_guess_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def more(tensors: dict[str, Any]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), F32)

    hf = edited(kept_twins.write("deepseek_v3", tmp_path / "hf"), more)
    with caplog.at_level(logging.INFO, "thermocline"):
        pack(hf, tmp_path / "p", "f32")
    assert "1 tensors that guess further tokens are left out" in caplog.text
