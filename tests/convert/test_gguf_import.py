"""GGUF files and PowerInfer's, imported: the same logits as the model they were made from."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_files
import gguf_twins
import kept_twins
import numpy as np
import pytest
import test_synth
import test_twins
import twins
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_twins import nmse

from thermocline.convert import gguf_rows, to_gguf
from thermocline.convert.importer import pack
from thermocline.convert.pack_cache import resolve
from thermocline.engine import decoder
from thermocline.errors import BadFile, IOFailure, Unsupported, UsageError
from thermocline.files.gguf import GGUF
from thermocline.model import quant
from thermocline.model.gguf_families import read_model
from thermocline.pack.pack import Pack, inspect, read_tensor, verify

gguf = pytest.importorskip("gguf")
Run = Callable[..., Any]
PLAIN = {"hidden_act": "silu"}
# twin -> (architecture, PowerInfer's layout)
CASES: dict[str, tuple[str, bool]] = {
    "llama": ("llama", False),
    "llama_sharded": ("llama", False),
    "llama3": ("llama", False),
    "llama_relu_tied": ("llama", True),
    "bamboo": ("bamboo", True),
    "opt": ("opt", True),
    **dict.fromkeys(
        ("llama_linear", "llama_yarn", "llama_yarn_beta", "mistral", "mixtral"), ("llama", False)
    ),
    **{name: (name, False) for name in ("qwen2", "qwen3", "gemma2", "gemma3", "phi3", "nemotron", "arcee")},
    **dict.fromkeys(("phi3_longrope_short", "phi3_longrope_long"), ("phi3", False)),
    "nemotron_biased": ("nemotron", False),
    "arcee_biased": ("arcee", False),
    **dict.fromkeys(("falcon_7b", "falcon_40b", "falcon_11b"), ("falcon", False)),
    "falcon_relu": ("falcon", True),
    "minicpm": ("minicpm", False),
    "qwen2_drelu": ("qwen2", False),
    "qwen3_moe": ("qwen3moe", False),
    "gpt_oss": ("gpt-oss", False),
    "olmoe": ("olmoe", False),
    **dict.fromkeys(("glm4_moe", "glm4_moe_air"), ("glm4moe", False)),
    "dots1": ("dots1", False),
    "ernie4_5_moe": ("ernie4_5-moe", False),
    "granite_moe": ("granitemoe", False),
    "minimax_m2": ("minimax-m2", False),
    "hunyuan_moe": ("hunyuan-moe", False),
    "granite_moe_shared": ("granitemoe", False),
    **dict.fromkeys(("phimoe", "phimoe_plain"), ("phimoe", False)),
    "llama4": ("llama4", False),
    **dict.fromkeys(("granite", "granite_biased"), ("granite", False)),
    "olmo2": ("olmo2", False),
    "olmo3": ("olmo2", False),
    "smollm3_interval": ("smollm3", False),
    **dict.fromkeys(("gemma4", "gemma4_moe", "gemma4_small"), ("gemma4", False)),
    **dict.fromkeys(("smallthinker", "smallthinker_softmax"), ("smallthinker", False)),
    **dict.fromkeys(("starcoder2", "starcoder2_plain"), ("starcoder2", False)),
    **dict.fromkeys(("stablelm", "stablelm_12b"), ("stablelm", False)),
    **dict.fromkeys(("cohere", "cohere_plus"), ("command-r", False)),
    "cohere2_pattern": ("cohere2", False),
    **dict.fromkeys(("gpt_neox", "gpt_neox_in_turn"), ("gptneox", False)),
    "phi2": ("phi2", False),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"), ("deepseek2", False)
    ),
}
# What GGUF has no key for, and so is always this.
IMPLIED: dict[str, dict[str, Any]] = {
    "bamboo": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "falcon_relu": {"activation": "relu"},
    "minicpm": {"hidden_act": "silu"},
    "gpt_oss": {"swiglu_limit": 7.0},
    "dots1": {"sliding_window": None, "layer_types": None},
    **{key: {"sliding_window": None} for key in ("starcoder2", "starcoder2_plain")},
    "ernie4_5_moe": {"moe_norm_min": 1e-12},
    **{key: {"router_jitter_noise": 0.01} for key in ("phimoe", "phimoe_plain")},
    "llama4": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": [*["chunked_attention"] * 3, "full_attention"],
    },
    "glm4_moe_lite": {"rope_interleave": True},
}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            recipe = kept_twins.TWINS["falcon_40b" if name == "falcon_relu" else name]
            made[name] = recipe(tmp_path_factory.mktemp("twins") / name)
            twins._edit_config(made[name], lambda c: c.update(IMPLIED.get(name, {})))
        return made[name]

    return make


KEPT = {name for name in kept_twins.LOGITS if name in CASES and name not in IMPLIED}


@pytest.mark.parametrize(
    "name", [n if n in KEPT else pytest.param(n, marks=pytest.mark.oracle) for n in CASES]
)
def test_logits_through_gguf_are_transformers(name: str, twin: Callable[[str], Path], tmp_path: Path) -> None:
    arch, powerinfer = CASES[name]
    path = gguf_twins.write(twin(name), tmp_path / "m.gguf", arch=arch, powerinfer=powerinfer)
    ids = kept_twins.ids()[:24]
    pack(path, tmp_path / "m.gguf-f32", activation=twins.ASKED.get(name))
    model = test_twins.loaded(path)
    assert model.spec.eos_ids == (2,)
    truth = kept_twins.logits(name)[:24] if name in KEPT else twins.hf_logits(twin(name), ids)
    assert nmse(model.logits(ids, 24), truth) <= 1e-6


# (theta, a head's size, factor, low, high, original context, context), as published; then others like them.
LLAMA3_SETS = {
    "Llama 3.1 8B to 405B, 3.3": (5e5, 128, 8.0, 1.0, 4.0, 8192, 131072),
    "Llama 3.2 1B": (5e5, 64, 32.0, 1.0, 4.0, 8192, 131072),
    "Llama 3.2 3B": (5e5, 128, 32.0, 1.0, 4.0, 8192, 131072),
    "Llama 4 Scout": (5e5, 128, 16.0, 1.0, 1.0, 8192, 10485760),
    "EXAONE 4": (1e6, 128, 16.0, 1.0, 4.0, 8192, 131072),
    "one frequency between": (1e4, 16, 8.0, 1.0, 4.0, 8192, 131072),
    "none between": (1e6, 24, 8.0, 1.0, 2.0, 2048, 65536),
    "all between": (1e4, 16, 4.0, 1.0, 8.0, 131072, 524288),
    "none divided in full": (1e4, 16, 2.0, 1.0, 4.0, 32768, 65536),
    "low is not 1": (5e5, 128, 8.0, 3.0, 7.0, 5000, 40000),
    "factor 1": (5e5, 64, 1.0, 1.0, 4.0, 8192, 8192),
}


@pytest.fixture(scope="module")
def by_head_dim(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    root = tmp_path_factory.mktemp("heads")

    def make(head_dim: int) -> Path:
        if not (root / str(head_dim)).exists():
            kept_twins.llama(root / str(head_dim), 3, head_dim=head_dim)
        return root / str(head_dim)

    return make


@pytest.mark.parametrize("case", LLAMA3_SETS)
def test_llama_3s_scaling_is_found_from_its_factors(
    case: str, by_head_dim: Callable[[int], Path], tmp_path: Path
) -> None:
    """A GGUF keeps what each frequency is divided by, not the parameters that it follows from."""
    theta, head_dim, factor, low, high, original, context = LLAMA3_SETS[case]
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": low}
    rope |= {"high_freq_factor": high, "original_max_position_embeddings": original}
    hf = shutil.copytree(by_head_dim(head_dim), tmp_path / "hf")
    changes = {"rope_parameters": rope, "max_position_embeddings": context}
    twins._edit_config(hf, lambda c: c.update(changes))
    spec = read(gguf_twins.write(hf, tmp_path / "m.gguf"))
    plain = decoder._inverse_frequencies(replace(spec, rope_scaling=None), False, True)
    ours = plain / decoder._inverse_frequencies(spec, False, True)
    theirs = gguf_twins.llama3_factors({"head_dim": head_dim, **changes})
    assert np.abs(ours / theirs - 1).max() < 2e-5


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -1.0, 0.5])
def test_rope_factors_that_are_none_are_refused(
    factor: float, by_head_dim: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    factors[3] = factor
    monkeypatch.setattr(gguf_twins, "llama3_factors", lambda config: factors)
    hf = shutil.copytree(by_head_dim(16), tmp_path / "hf")
    twins._edit_config(hf, lambda c: c.update(rope_parameters=twins.LLAMA3_ROPE | {"rope_theta": 1e4}))
    with pytest.raises((BadFile, Unsupported), match=r"rope_freqs.weight"):
        read(gguf_twins.write(hf, tmp_path / "m.gguf"))


def named(name: str) -> Callable[[Any], None]:
    return lambda w: w.add_name(name)


def read(path: Path, activation: str | None = None) -> Any:
    with GGUF(path) as opened:
        return read_model(opened, activation)[0]


@pytest.mark.parametrize("why", ["its name", "its file's name", "PowerInfer's"])
def test_a_gguf_with_relu_is_not_read_as_silu_where_only_its_name_tells(
    why: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    """No key says an activation. SparseQwen2 went through llama.cpp's converter as a Qwen 2 with SiLU."""
    file = tmp_path / ("SparseQwen2-7B.gguf" if why == "its file's name" else "m.gguf")
    more = named("SparseQwen2 7B" if why == "its name" else "Qwen2 7B")
    path = gguf_twins.write(
        twin("qwen2_drelu"), file, arch="qwen2", more=more, powerinfer=why == "PowerInfer's"
    )
    with pytest.raises(Unsupported, match="--activation relu or --activation drelu"):
        read(path)
    assert (read(path, "drelu").activation, read(path, "drelu").up_activation) == ("relu", "relu")
    assert (read(path, "relu").activation, read(path, "relu").up_activation) == ("relu", "none")


def test_a_gguf_that_says_nothing_is_silu_unless_the_user_knows_better(
    twin: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_twins.write(twin("llama"), tmp_path / "m.gguf", more=named("Llama 2 7B"))
    assert read(path).activation == "silu" and read(path, "relu").activation == "relu"
    for_certain = gguf_twins.write(twin("llama_relu_tied"), tmp_path / "p.gguf", powerinfer=True)
    assert read(for_certain, "relu") == read(for_certain)
    with pytest.raises(UsageError, match="its activation is relu, not drelu"):
        read(for_certain, "drelu")


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_gguf_and_the_directory_it_was_made_from_give_the_same_pack(
    name: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    arch, powerinfer = CASES[name]
    path = gguf_twins.write(twin(name), tmp_path / "m.gguf", arch=arch, powerinfer=powerinfer)
    pack(path, tmp_path / "a", "f32")
    pack(twin(name), tmp_path / "b", "f32")
    a, b = Pack.open(tmp_path / "a"), Pack.open(tmp_path / "b")
    assert a.spec.__dict__ | {"bos_id": None} == b.spec.__dict__ | {"bos_id": None}
    for tensor, t in b.tensors.items():
        mine = np.fromfile(a.weights_path, np.uint8, t.bytes, offset=a.tensors[tensor].offset)
        assert np.array_equal(mine, np.fromfile(b.weights_path, np.uint8, t.bytes, offset=t.offset)), tensor
    assert a.source["kind"] == "gguf" and verify(a) == []


@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_a_pack_exported_and_imported_again_is_the_same(format: str, tmp_path: Path) -> None:
    """Blocks are copied bit for bit, the order of q's and k's rows undone."""
    made = test_synth.make(tmp_path, "llama-2-7b", format)
    to_gguf.write_gguf(made, tmp_path / "m.gguf")
    cost = pack(tmp_path / "m.gguf", tmp_path / "again")
    again = Pack.open(tmp_path / "again")
    assert cost is not None and cost.converted == 0 and "bit for bit" in str(cost)
    assert (again.weight_format, again.tensors) == (format, made.tensors)
    assert again.weights_path.read_bytes() == made.weights_path.read_bytes()


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # of which K formats have blocks


def decoded(p: Pack) -> dict[str, Any]:
    """Every matrix's weights; q, k and v as one."""
    out: dict[str, Any] = {}
    for name, t in p.tensor_specs().items():
        for part, of in zip(t.parts, t.layout, strict=True):
            rows = read_tensor(p, name)[:, of.at : of.at + quant.row_bytes(of.format, t.columns)]
            made = quant.decode(of.format, np.ascontiguousarray(rows), t.columns)
            out[part] = np.concatenate([out[part], made]) if t.first else made
    return out


@pytest.mark.parametrize("mix", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q2_K", "Q3_K"), ("IQ4_XS", "Q5_K")])
def test_a_file_of_k_quants_keeps_every_block(mix: tuple[str, str], tmp_path: Path) -> None:
    """As llama-quantize mixes them: v, down and the head are finer, in some layers."""
    hf = kept_twins.llama(tmp_path / "hf", 3, **WIDE)
    finer = ("blk.0.ffn_down", "blk.0.attn_v", "blk.1.ffn_up", "output")

    def types(name: str) -> str:
        return mix[any(part in name for part in finer)]

    path = gguf_twins.write(hf, tmp_path / "k.gguf", types=types)
    plain = gguf_twins.write(hf, tmp_path / "f.gguf", types=types, as_f32=True)
    cost = pack(path, tmp_path / "own")
    assert cost is not None and cost.converted == 0 and cost.bits_before == cost.bits_after
    pack(plain, tmp_path / "exact", "f32")
    own, exact = (Pack.open(tmp_path / name) for name in ("own", "exact"))
    truth = decoded(exact)
    for name, w in decoded(own).items():
        assert np.array_equal(w, truth[name]), name
    formats = {n: t.format for n, t in own.tensors.items()}
    coarse, fine = (type.lower() for type in mix)
    assert own.weight_format == coarse and formats["layers.1.qkv.weight"] == coarse
    assert [formats[f"layers.0.{n}.weight"] for n in "qkv"] == [coarse, coarse, fine]
    assert (formats["layers.1.gate.weight"], formats["layers.1.up.weight"]) == (coarse, fine)
    to_gguf.write_gguf(own, tmp_path / "again.gguf")
    theirs, ours = (gguf.GGUFReader(tmp_path / f) for f in ("k.gguf", "again.gguf"))
    mine = {t.name: t for t in ours.tensors}
    for t in theirs.tensors:
        assert mine[t.name].tensor_type == t.tensor_type
        assert mine[t.name].data.tobytes() == t.data.tobytes(), t.name


def test_a_files_template_and_special_ids_come_along(twin: Callable[[str], Path], tmp_path: Path) -> None:
    def told(w: Any) -> None:
        w.add_tokenizer_model("none")
        w.add_token_list([f"<{i}>" for i in range(twins.VOCAB)])
        w.add_chat_template("{{ messages }}")

    path = gguf_twins.write(twin("llama"), tmp_path / "m.gguf", more=told)
    pack(path, tmp_path / "p")
    about = json.loads((tmp_path / "p" / "tokenizer_config.json").read_text())
    assert about["chat_template"] == "{{ messages }}"
    assert (about["bos_token"], about["eos_token"]) == ("<1>", "<2>")


@pytest.mark.parametrize("arch", ["rwkv7", "grok", "clip", "qwen2vl", "bitnet"])
def test_mixtures_and_pictures_are_refused_in_a_line(arch: str, tmp_path: Path) -> None:
    w = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    w.add_tensor("token_embd.weight", np.zeros((2, 32), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(Unsupported, match=f"architecture '?\"?{arch}") as e:
        pack(tmp_path / "m.gguf", tmp_path / "p")
    assert "\n" not in str(e.value) and not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("name", "arch", "key", "value", "why"),
    [
        ("minicpm", "minicpm", "minicpm.embedding_scale", None, "embedding_scale must be"),
        ("minicpm", "minicpm", "minicpm.residual_scale", None, "residual_scale must be"),
        ("minicpm", "minicpm", "minicpm.logit_scale", None, "logit_scale must be"),
        ("minicpm", "minicpm", "minicpm.logit_scale", 0.0, "logit_scale must be"),
        ("phi3_longrope_long", "phi3", "phi3.rope.scaling.original_context_length", None, "original_context"),
        ("phi3_longrope_long", "phi3", "phi3.rope.scaling.type", "yarn", "beside another"),
        ("llama_yarn", "llama", "llama.rope.scaling.yarn_log_multiplier", 0.1, "yarn_log_multiplier"),
        ("falcon_11b", "falcon", "falcon.rope.freq_base", None, "freq_base must be"),
        ("llama_linear", "llama", "llama.rope.scaling.factor", None, "scaling.factor must be"),
        ("gemma3", "gemma3", "gemma3.attention.sliding_window_pattern", "x", "sliding_window_pattern must"),
        ("nemotron", "nemotron", "nemotron.rope.dimension_count", 99, "dimension_count must be"),
        ("qwen3", "qwen3", "qwen3.rope.dimension_count", 8, "dimension_count is not"),
        ("qwen2", "qwen2", "qwen2.attention.sliding_window", 9, "sliding_window"),
    ],
)
def test_a_key_a_family_needs_or_does_not_know_is_named(
    name: str, arch: str, key: str, value: Any, why: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    def changed(w: Any) -> None:
        w.kv_data[0].pop(key, None)
        if value is not None:
            w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    path = gguf_twins.write(twin(name), tmp_path / "m.gguf", arch=arch, more=changed)
    with pytest.raises((BadFile, Unsupported), match=why) as e:
        pack(path, tmp_path / "p")
    assert "\n" not in str(e.value)


def test_gemmas_windows_without_a_pattern_are_llama_cpps(twin: Callable[[str], Path], tmp_path: Path) -> None:
    def without(w: Any) -> None:
        w.kv_data[0].pop("gemma3.attention.sliding_window_pattern")

    path = gguf_twins.write(twin("gemma3"), tmp_path / "m.gguf", arch="gemma3", more=without)
    pack(path, tmp_path / "p")
    assert Pack.open(tmp_path / "p").spec.window_layers is None  # of 3 layers every one: each sixth has none


def test_a_gemma_2_of_the_first_weeks_has_the_caps_and_the_window_of_all_gemma_2s(
    twin: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its file says none of them: llama.cpp, which wrote it, knew them."""
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")

    def without(w: Any) -> None:
        for key in keys:
            w.kv_data[0].pop(f"gemma2.{key}")

    spec = read(gguf_twins.write(twin("gemma2"), tmp_path / "m.gguf", arch="gemma2", more=without))
    assert (spec.attention_softcap, spec.logit_softcap, spec.sliding_window) == (50.0, 30.0, 4096)


def a_hybrids(w: Any) -> None:
    """Add what llama.cpp's converter writes of each Granite 4, with Mamba layers or none."""
    layers, width = (w.kv_data[0][f"granite.{key}"].value for key in ("block_count", "feed_forward_length"))
    heads = w.kv_data[0].pop("granite.attention.head_count_kv").value
    w.add_head_count_kv([heads] * layers)
    w.add_ssm_conv_kernel(4)
    w.add_ssm_state_size(256)
    w.add_ssm_group_count(1)
    w.add_ssm_inner_size(1536)
    w.add_ssm_time_step_rank(48)
    w.add_rope_scaling_finetuned(True)
    w.add_expert_count(0)
    w.add_expert_used_count(0)
    w.add_expert_shared_feed_forward_length(width)


def test_a_granite_4_without_mamba_layers_is_a_granite(twin: Callable[[str], Path], tmp_path: Path) -> None:
    older = gguf_twins.write(twin("granite"), tmp_path / "3.gguf", arch="granite")
    newer = gguf_twins.write(twin("granite"), tmp_path / "4.gguf", arch="granite", more=a_hybrids)
    assert read(newer) == read(older)


def test_a_granite_whose_layers_differ_is_refused(twin: Callable[[str], Path], tmp_path: Path) -> None:
    def uneven(w: Any) -> None:
        heads = w.kv_data[0].pop("granite.attention.head_count_kv").value
        w.add_head_count_kv([heads] * (w.kv_data[0]["granite.block_count"].value - 1) + [0])

    path = gguf_twins.write(twin("granite"), tmp_path / "m.gguf", arch="granite", more=uneven)
    with pytest.raises(Unsupported, match="head_count_kv differs between layers"):
        read(path)


def test_answers_end_with_tokens_that_a_file_has_and_no_key_names(
    twin: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of Llama 3.1's three, files name one or two: a call of a tool went on past its end."""
    tokens = [f"<{i}>" for i in range(twins.VOCAB)]
    tokens[5], tokens[8], tokens[9] = "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"

    def told(w: Any) -> None:
        w.add_token_list(tokens)
        w.kv_data[0].pop("tokenizer.ggml.eos_token_id")
        w.add_eos_token_id(9)

    assert read(gguf_twins.write(twin("llama"), tmp_path / "m.gguf", more=told)).eos_ids == (9, 5, 8)


@pytest.mark.oracle
@pytest.mark.parametrize(("family", "arch", "layers"), [("Gemma2", "gemma2", 46), ("Gemma3", "gemma3", 62)])
def test_gemma_27bs_scale_of_scores_is_told_by_its_layers(
    family: str, arch: str, layers: int, tmp_path: Path
) -> None:
    """dim / heads (16 here) instead of the head's size (24): GGUF has no key for it."""
    for n, scale in ((layers, 16), (layers - 1, 24)):
        sizes = {"num_hidden_layers": n, "head_dim": 24, "query_pre_attn_scalar": scale}
        window = {"sliding_window": 9, "hidden_size": 64, "vocab_size": 16, "tie_word_embeddings": True}
        hf = twins._transformers(family, tmp_path / f"{n}", 3, intermediate_size=32, **sizes, **window)
        path = gguf_twins.write(hf, tmp_path / f"{n}.gguf", arch=arch)
        pack(path, tmp_path / f"{n}-gguf")
        pack(hf, tmp_path / f"{n}-hf", "f32")
        a, b = Pack.open(tmp_path / f"{n}-gguf").spec, Pack.open(tmp_path / f"{n}-hf").spec
        assert a.attention_scale == b.attention_scale == scale**-0.5


def mixed_types(name: str) -> str:
    """As llama-quantize does q4_0: a finer head; v finer than q and k; one gate finer than its up."""
    if name.startswith(("output", "token")) or "attn_v" in name or name == "blk.1.ffn_gate.weight":
        return "Q8_0"
    return "Q4_0" if "ffn_down" not in name else "F16"


def test_tensors_of_another_format_keep_theirs(twin: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_twins.write(twin("llama"), tmp_path / "m.gguf", types=mixed_types)
    cost = pack(path, tmp_path / "p")
    assert cost is not None and cost.converted == 0
    p = Pack.open(tmp_path / "p")
    formats = {n: t.format for n, t in p.tensors.items()}
    assert formats["head.weight"] == formats["layers.0.v.weight"] == "q8_0"
    assert formats["layers.0.q.weight"] == formats["layers.0.k.weight"] == "q4_0"
    assert formats["layers.0.gate.weight"] == "q4_0" and formats["layers.0.down.weight"] == "f16"
    assert (formats["layers.1.gate.weight"], formats["layers.1.up.weight"]) == ("q8_0", "q4_0")
    told = inspect(p)
    assert sum(part["bytes"] for part in told["parts"].values()) == sum(t.bytes for t in p.tensors.values())
    ids = np.random.default_rng(0).integers(3, twins.VOCAB, 24).tolist()
    pack(path, tmp_path / "m.gguf-f32", "f32")
    pack(path, tmp_path / "own.gguf-f32")
    exact = test_twins.loaded(path).logits(ids, 24)
    assert nmse(test_twins.loaded(tmp_path / "own.gguf").logits(ids, 24), exact) < 2e-3
    pack(path, tmp_path / "small", "q4_0")
    assert {t.format for n, t in Pack.open(tmp_path / "small").tensors.items() if "norm" not in n} <= {
        "q4_0", "f16"
    }  # fmt: skip


@pytest.mark.parametrize("type", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0"])
def test_types_packs_do_not_have_go_to_the_nearest_and_the_cost_is_said(type: str, tmp_path: Path) -> None:
    """Decoded by the package; the weights that packs have are copied."""
    hf = kept_twins.llama(tmp_path / "hf", 3, **WIDE)
    path = gguf_twins.write(hf, tmp_path / "m.gguf", types=lambda n: "F16" if "ffn_down" in n else type)
    plain = gguf_twins.write(
        hf, tmp_path / "f.gguf", types=lambda n: "F16" if "ffn_down" in n else type, as_f32=True
    )
    cost = pack(path, tmp_path / "own")
    own, near = Pack.open(tmp_path / "own"), gguf_rows.NEAREST[type.lower()]
    assert own.weight_format == near and own.tensors["layers.0.down.weight"].format == "f16"
    assert cost is not None and cost.converted > cost.copied > 0
    assert cost.rms_error <= (0 if type == "TQ1_0" else gguf_rows.ADDED) and "added RMS error" in str(cost)
    assert cost.bits_before < cost.bits_after < 8.5
    pack(plain, tmp_path / "exact", "f32")
    truth = decoded(Pack.open(tmp_path / "exact"))
    for name, w in decoded(own).items():
        assert nmse(w, truth[name]) <= 1.2 * gguf_rows.ADDED**2, name


def random_nvfp4(rows: int, columns: int) -> Any:
    """Scales of a byte for 16 numbers each, none of which is no number."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (rows, columns // 64, 36), dtype=np.uint8)
    blocks[..., :4] = rng.integers(40, 72, blocks[..., :4].shape)
    return blocks.reshape(rows, -1)


def test_the_nearest_format_of_each_type_is_near() -> None:
    """Or the table lies: random codes, as this build rounds them."""
    for type, near in gguf_rows.NEAREST.items():
        if type in ("q1_0", "iq1_m"):  # the package has no decoder; scales lie in bits of other fields
            continue
        if type == "tq1_0":
            x = np.random.default_rng(1).standard_normal((8, 512), dtype=np.float32)
            rows = gguf.quants.quantize(x, gguf.GGMLQuantizationType.TQ1_0)
        else:
            rows = random_nvfp4(8, 512) if type == "nvfp4" else gguf_twins.k_blocks(type.upper(), (8, 512), 1)
        x = gguf_rows.decoded_by_package(type, rows)
        stored = quant.decode(near, quant.encode(near, x), 512)
        assert nmse(stored, x) <= (0 if type == "tq1_0" else gguf_rows.ADDED**2), type


def test_without_the_package_such_a_file_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 3, **WIDE)
    path = gguf_twins.write(hf, tmp_path / "m.gguf", types=lambda n: "IQ2_XS" if "ffn_up" in n else "F16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    for format in (None, "q8_0"):
        with pytest.raises(
            Unsupported, match=r"ffn_up.weight'? is iq2_xs.*pip install 'thermocline\[gguf\]'"
        ):
            pack(path, tmp_path / "p", format)
    assert not (tmp_path / "p").exists()


def test_rows_that_256_does_not_divide_fall_back(twin: Callable[[str], Path], tmp_path: Path) -> None:
    """llama.cpp's own files have such rows in its fallbacks already; what is converted here gets them too."""
    path = gguf_twins.write(
        twin("llama"), tmp_path / "m.gguf", types=lambda n: "Q5_0" if "down" not in n else None
    )
    pack(path, tmp_path / "p")
    assert {t.format for n, t in Pack.open(tmp_path / "p").tensors.items() if "norm" not in n} == {
        "q5_0",
        "f32",
    }
    assert gguf_rows._finest({"q4_k"}, 96) == "q5_0" and gguf_rows._finest({"q6_k"}, 96) == "q8_0"
    assert gguf_rows._finest({"q4_k", "q6_k"}, 256) == "q6_k" and gguf_rows._finest({"q2_k"}, 33) == "f16"


@pytest.mark.parametrize("powerinfer", [True, False])
def test_records_keep_ups_blocks_and_downs_where_the_file_has_them(powerinfer: bool, tmp_path: Path) -> None:
    """PowerInfer's files have down by neurons; else they are columns, and get the finest format."""
    hf = kept_twins.llama(tmp_path / "hf", 1, hidden_act="relu", **WIDE)
    kinds = {"ffn_gate": "Q5_K", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "ffn_down_t": "Q3_K"}
    path = gguf_twins.write(
        hf, tmp_path / "m.gguf", powerinfer=powerinfer, types=lambda n: kinds.get(n.split(".")[-2])
    )
    cost = pack(path, tmp_path / "p", activation=None if powerinfer else "relu")
    p = Pack.open(tmp_path / "p")
    t = p.tensors["layers.0.bundle"]
    assert p.tensors["layers.0.gate.weight"].format == "q5_k" and t.format == "q4_k"
    assert t.down_format == ("q3_k" if powerinfer else "q6_k")
    downs = p.spec.n_layers * p.spec.ffn_dim * p.spec.dim
    assert cost is not None and cost.converted == (0 if powerinfer else downs)


def powerinfer_model(hf: Path, directory: Path, rank: int = 32) -> Path:
    """PowerInfer's files: the model, predictors in it (`rank` wide, then two and three times that),
    activation counts beside it."""
    import torch

    (directory / "activation").mkdir(parents=True)
    for i in range(3):
        torch.save(torch.arange(112) * (i + 1), directory / "activation" / f"activation_{i}.pt")
    return gguf_twins.write(hf, directory / "m.powerinfer.gguf", powerinfer=True, rank=rank)


@pytest.mark.oracle
def test_powerinfers_predictors_and_counts_are_kept(
    twin: Callable[[str], Path], tmp_path: Path, thermocline: Run
) -> None:
    path = powerinfer_model(twin("llama_relu_tied"), tmp_path / "src")
    pack(path, tmp_path / "p", "f32")
    p = Pack.open(tmp_path / "p")
    assert p.predictor is not None and (p.predictor.ranks, p.predictor.threshold) == ((32, 64, 96), 0.25)
    rng = np.random.default_rng(9)
    for i in range(3):
        for part, shape in (("fc1", (32 * (i + 1), 64)), ("fc2", (112, 32 * (i + 1)))):
            t = p.tensors[f"layers.{i}.predictor.{part}.weight"]
            mine = np.fromfile(p.weights_path, np.float32, t.bytes // 4, offset=t.offset).reshape(shape)
            assert np.array_equal(mine, rng.standard_normal(shape, dtype=np.float32))
        t = p.tensors[f"layers.{i}.activation_count"]
        mine = np.fromfile(p.weights_path, np.float32, 112, offset=t.offset)
        assert np.array_equal(mine, np.arange(112) * (i + 1))
    assert "threshold 0.25" in thermocline("inspect", tmp_path / "p").out
    assert "3 layers, threshold 0.25" in thermocline("inspect", path).out
    pack(twin("llama_relu_tied"), tmp_path / "bare", "f32")
    bare = inspect(Pack.open(tmp_path / "bare"))
    assert inspect(p)["bytes_per_token_dense"] == bare["bytes_per_token_dense"]


@pytest.mark.oracle
def test_another_models_counts_are_refused(twin: Callable[[str], Path], tmp_path: Path) -> None:
    import torch

    path = powerinfer_model(twin("llama_relu_tied"), tmp_path / "src")
    counts = tmp_path / "src" / "activation" / "activation_1.pt"
    for wrong in (torch.ones(111), -torch.ones(112), torch.full((112,), torch.nan)):
        torch.save(wrong, counts)
        with pytest.raises(BadFile, match=r"activation_1\.pt: .* counts"):
            pack(path, tmp_path / "p")
    counts.unlink()
    with pytest.raises(IOFailure, match=r"activation_1\.pt: no such file"):
        pack(path, tmp_path / "p")


# --- what is refused ----------------------------------------------------------------------------------------


def rewritten(path: Path, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    """A copy of a GGUF with metadata added, replaced or dropped."""
    reader = gguf.GGUFReader(path)
    out = path.with_name("changed.gguf")
    w = gguf.GGUFWriter(out, changes.pop("general.architecture", "llama"))
    skip = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", *drop}
    for key, f in reader.fields.items():
        if key not in skip and key not in changes:
            w.add_key_value(key, f.contents(), f.types[0])
    for key, (value, kind) in changes.items():
        w.add_key_value(key, value, kind)
    for t in reader.tensors:
        if t.name not in drop:
            w.add_tensor(t.name, np.array(t.data), raw_dtype=t.tensor_type)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return out


def kinds() -> Any:
    return gguf.GGUFValueType


LIES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...], str]] = {
    "no heads": (lambda: {"llama.attention.head_count": (0, kinds().UINT32)}, (), "head_count must be"),
    "heads as text": (lambda: {"llama.attention.head_count": ("4", kinds().STRING)}, (), "got str '4'"),
    "heads as float": (lambda: {"llama.attention.head_count": (4.0, kinds().FLOAT32)}, (), "got float"),
    "negative layers": (lambda: {"llama.block_count": (-1, kinds().INT32)}, (), "block_count must be"),
    "many layers": (lambda: {"llama.block_count": (1 << 30, kinds().UINT32)}, (), "num_hidden_layers"),
    "one layer more": (lambda: {"llama.block_count": (4, kinds().UINT32)}, (), r"blk\.3.* is missing"),
    "one layer fewer": (lambda: {"llama.block_count": (2, kinds().UINT32)}, (), "does not belong"),
    "wider": (lambda: {"llama.embedding_length": (128, kinds().UINT32)}, (), "its metadata implies"),
    "experts": (lambda: {"llama.expert_count": (8, kinds().UINT32)}, (), "expert_used_count must be"),
    "half rope": (lambda: {"llama.rope.dimension_count": (8, kinds().UINT32)}, (), "dimension_count"),
    "eps NaN": (lambda: {"llama.attention.layer_norm_rms_epsilon": (np.nan, kinds().FLOAT32)}, (), "number"),
    "eos outside": (lambda: {"tokenizer.ggml.eos_token_id": (999, kinds().UINT32)}, (), "token id"),
    "unknown key": (lambda: {"llama.residual_scale": (2.0, kinds().FLOAT32)}, (), "residual_scale' is unk"),
    "no width": (dict, ("llama.embedding_length",), "embedding_length must be .* got nothing"),
    "no norm": (dict, ("output_norm.weight",), "output_norm.weight is missing"),
    "no embedding": (dict, ("token_embd.weight",), "token_embd.weight is missing"),
    "another family": (lambda: {"general.architecture": "mamba"}, (), "'mamba' is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_refused_in_a_line(
    lie: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    changes, drop, said = LIES[lie]
    path = gguf_twins.write(twin("llama"), tmp_path / "m.gguf")
    with pytest.raises((BadFile, Unsupported), match=said) as caught:
        pack(rewritten(path, changes(), drop), tmp_path / "p")
    assert "\n" not in str(caught.value) and not (tmp_path / "p").exists()


def test_the_commands_take_a_gguf(twin: Callable[[str], Path], tmp_path: Path, thermocline: Run) -> None:
    path = gguf_twins.write(
        twin("llama"), tmp_path / "m.gguf", types=lambda n: "F16" if "ffn_down" in n else "Q8_0"
    )
    told = thermocline("inspect", path, "--json")
    assert told.code == 0 and json.loads(told.out)["architecture"] == "llama"
    assert json.loads(told.out)["types"]["q8_0"]["tensors"] == 2 + 3 * 6
    assert "llama" in thermocline("inspect", path).out
    ran = thermocline("pack", path, "-o", tmp_path / "p")
    assert ran.code == 0 and "as q8_0" in ran.err and "bits a weight" in ran.err
    first = resolve(path, tmp_path / "cache", None)
    assert resolve(path, tmp_path / "cache", None) == first and "own" in first.name


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_gguf_without_a_tokenizer_is_refused_before_its_weights_are_read(
    command: str, twin: Callable[[str], Path], tmp_path: Path, thermocline: Run
) -> None:
    path, cache = gguf_twins.write(twin("llama"), tmp_path / "m.gguf"), tmp_path / "cache"
    ran = thermocline(command, "-m", path, *(["hello"] if command == "run" else []))
    assert ran.code == 3 and f"{path}: has no tokenizer" in ran.err and ran.err.count("\n") == 1
    assert thermocline("bench", "-m", path, "-p", "4", "-n", "0", "-r", "1").code == 0
    given = ["-m", path, "--cache-dir", cache, "--format", "f16"]
    for packed in range(2):  # with its pack in the cache, which `bench` made, too
        ran = thermocline(command, *given, *(["hello"] if command == "run" else []))
        assert ran.code == 3 and f"{path}: has no tokenizer" in ran.err and ran.err.count("\n") == 1
        assert ran.out == "" and (cache.exists() and len(list(cache.iterdir()))) == packed
        assert thermocline("bench", *given, "-p", "4", "-n", "0", "-r", "1").code == 0


def test_whoever_packs_says_what_it_cost_once(tmp_path: Path, thermocline: Run) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 3, **WIDE)
    path = gguf_twins.write(hf, tmp_path / "m.gguf", types=lambda n: "IQ3_S" if "down" not in n else None)
    bench = ["bench", "-m", path, "-p", "4", "-n", "0", "-r", "1", "--cache-dir"]
    told = thermocline(*bench, tmp_path / "a").err
    assert told.count(f"{path}: ") == 2 and f"{path}: is packed first, because its iq3_s has to be" in told
    assert "of the weights converted" in told and "added RMS" in told
    assert thermocline(*bench, tmp_path / "a").err == ""
    assert thermocline(*bench, tmp_path / "b", "-q").err == ""


def test_run_says_what_packing_cost(tmp_path: Path, thermocline: Run) -> None:
    hf = kept_twins.llama(tmp_path / "hf", 0, vocab_size=259, **WIDE)

    def spoken(w: Any) -> None:
        w.add_tokenizer_model("llama")
        w.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))])
        w.add_token_scores([0.0] * 259)
        w.add_token_types([2, 3, 3, *[6] * 256])

    path = gguf_twins.write(
        hf, tmp_path / "m.gguf", types=lambda n: "IQ2_S" if "down" not in n else None, more=spoken
    )
    run = ["run", "-m", path, "--format", "f16", "-n", "1", "hello", "--cache-dir", tmp_path / "cache"]
    assert "of the weights converted" in thermocline(*run).err
    assert "converted" not in thermocline(*run).err


# --- random sizes -------------------------------------------------------------------------------------------

U32, F32, STRING = gguf_files.U32, gguf_files.F32, gguf_files.STRING
EDGES = (0, 1, 2, 3, 1 << 10, 1 << 16, 1 << 20, 1 << 24, (1 << 24) + 1, (1 << 31) + 1, (1 << 32) - 1)
HEADS = st.integers(0, 65) | st.sampled_from(EDGES)
SIZES = st.integers(1, 1 << 14) | st.sampled_from(EDGES)
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1e-6, 1e-5, 1.0, 2.0, 1e4, 1e12, 1e30, -1.0])
SANE = st.fixed_dictionaries(
    {
        "embedding_length": st.sampled_from([64, 96, 256]),
        "attention.head_count": st.sampled_from([1, 4, 8]),
        "attention.head_count_kv": st.sampled_from([1, 2]),
        "attention.key_length": st.sampled_from([2, 16, 128]),
        "feed_forward_length": st.integers(1, 1 << 14),
        "block_count": st.integers(1, 9),
        "context_length": st.integers(1, 1 << 17),
        "attention.layer_norm_rms_epsilon": st.sampled_from([0.0, 1e-6, 1e-5]),
        "rope.freq_base": st.sampled_from([1.0, 1e4, 5e5]),
        "rope.scaling.factor": st.sampled_from([0.5, 1.0, 8.0]),
    }
)
WILD = {
    **dict.fromkeys(("embedding_length", "feed_forward_length", "block_count", "context_length"), SIZES),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "attention.key_length"), HEADS),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"), FLOATS),
}
ONE_WILD = st.sampled_from(list(WILD)).flatmap(lambda key: WILD[key].map(lambda value: {key: value}))


def as_spec(m: dict[str, Any]) -> dict[str, Any] | None:
    """What the numbers mean, or None where no engine of ours could compute it: written down a second time."""
    heads, kv, size = (m[f"attention.{k}"] for k in ("head_count", "head_count_kv", "key_length"))
    eps, theta, factor = m["attention.layer_norm_rms_epsilon"], m["rope.freq_base"], m["rope.scaling.factor"]
    whole = {
        "dim": (m["embedding_length"], 1 << 16),
        "ffn_dim": (m["feed_forward_length"], 1 << 20),
        "n_layers": (m["block_count"], 1 << 10),
        "n_heads": (heads, 1 << 10),
        "n_kv_heads": (kv, 1 << 10),
        "head_dim": (size, 1 << 10),
        "max_context": (m["context_length"], 1 << 24),
    }
    fit = all(1 <= value <= limit for value, limit in whole.values()) and heads % kv == 0 and size % 2 == 0
    if not fit or not 0 <= eps <= 1 or not 1 <= theta <= 1e12 or not 1e-3 <= factor <= 1e6:
        return None
    return {k: value for k, (value, _) in whole.items()} | {"norm_eps": eps, "rope_theta": theta}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SANE, ONE_WILD | st.just({}))
def test_sizes_are_read_as_they_are_or_refused_in_a_line(
    tmp_path: Path, sane: dict[str, Any], wild: dict[str, Any]
) -> None:
    said = sane | wild
    keys: list[tuple[Any, int, Any]] = [
        ("general.architecture", STRING, "llama"), ("llama.rope.scaling.type", STRING, "linear"),
        *((f"llama.{k}", F32 if isinstance(v, float) else U32, v) for k, v in said.items()),
    ]  # fmt: skip
    file = gguf_files.gguf_file(keys, [("token_embd.weight", (32, 3), 0, 384)])
    path = tmp_path / "m.gguf"
    path.write_bytes(file.data)
    expected = as_spec(said)
    try:
        with GGUF(path) as opened:
            spec, tensor_map = read_model(opened)
    except (BadFile, Unsupported) as e:
        assert expected is None, f"refused what is in range: {e}"
        assert "\n" not in str(e) and str(path) in str(e) and len(str(e)) < 400
        return
    assert expected is not None
    found = {k: getattr(spec, k) for k in expected}
    assert found == pytest.approx(expected, rel=1e-6) and spec.vocab_size == 3
    assert spec.rope_scaling is not None and spec.rope_scaling.factor == pytest.approx(
        said["rope.scaling.factor"]
    )
    assert len(tensor_map.tensors) >= 5 * spec.n_layers
