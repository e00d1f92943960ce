"""Models with recurrent layers: every field changes answers; a GGUF is what it was made from; checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_recurrent
import kept_twins
import numpy as np
import pytest
import twins
from test_twins import Model, in_numpy, loaded, new_states, nmse

from thermocline.convert import synthetic
from thermocline.convert.importer import pack
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, block_counts
from thermocline.errors import BadFile, Unsupported
from thermocline.model import families
from thermocline.model.spec import ModelSpec, Recurrent, check_spec
from thermocline.opening.gguf_model import GGUFModel, open_gguf
from thermocline.ops.interface import F32, Batch, FFNStats
from thermocline.pack.pack import Pack
from thermocline.session import weights

NAMES = [*gguf_recurrent.ARCHITECTURES, "granite_hybrid_dense", "qwen3_5_moe_stacked"]
IDS = kept_twins.ids()[:24]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = kept_twins.write(name, tmp_path_factory.mktemp("twins") / name)
        return made[name]

    return make


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kept_twins.config(name))
    return found


def spec_of(name: str, **changes: Any) -> ModelSpec:
    return families.parse_config(config(name) | changes, None, "config.json")[0]


# What a changed config has to change: {twin: {key: a value that changes logits, or an error's words}}.
KEYS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "linear_num_value_heads": "implies",
        "linear_key_head_dim": "implies",
        "linear_conv_kernel_dim": "implies",
        "layer_types": "missing",
        "num_experts_per_tok": 2,
        "rms_norm_eps": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
        "norm_topk_prob": "is not supported",
        "attn_output_gate": "is not supported",
        "decoder_sparse_step": "is not supported",
    },
    "qwen3_5": {"attention_bias": "is not supported", "full_attention_interval": None},
    "nemotron_h_moe": {
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "num_experts_per_tok": 2,
        "layer_norm_epsilon": 0.1,
        "n_groups": "implies",
        "use_conv_bias": "missing",
        "moe_latent_size": "is not supported",
        "mlp_hidden_act": "silu",
        "time_step_limit": "is not supported",
        "hybrid_override_pattern": "which is meant",
        "use_bias": "is not supported",
    },
    "granite_hybrid": {
        "embedding_multiplier": 2.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 2.0,
        "position_embedding_type": "rope",
        "mamba_conv_bias": "does not belong",
        "mamba_d_state": "implies",
        "mamba_d_head": "is not 128",
        "num_local_experts": "does not belong",
        "mamba_proj_bias": "is not supported",
    },
    "lfm2_moe": {
        "conv_L_cache": "implies",
        "conv_bias": "is not supported",
        "use_expert_bias": "does not belong",
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "norm_eps": 0.1,
        "num_dense_layers": "missing",
        "layer_types": "missing",
    },
    "lfm2": {"block_auto_adjust_ff_dim": "implies", "block_ffn_dim_multiplier": "implies"},
}
VALUES = {
    "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_conv_kernel_dim": 3,
    "norm_topk_prob": False, "attn_output_gate": False, "decoder_sparse_step": 2, "attention_bias": True,
    "n_groups": 3, "use_conv_bias": True, "moe_latent_size": 8, "time_step_limit": [0.1, 1.0],
    "hybrid_override_pattern": "MMMM*", "use_bias": True, "mamba_conv_bias": False, "mamba_d_state": 6,
    "mamba_d_head": 8, "num_local_experts": 0, "mamba_proj_bias": True, "conv_L_cache": 4, "conv_bias": True,
    "use_expert_bias": False, "num_dense_layers": 0, "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 2.0, "layer_types": ["full_attention"] * 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "key"), [(n, k) for n, keys in KEYS.items() for k in keys if keys[k] is not None]
)
def test_every_key_of_a_config_changes_the_answer_or_is_refused(
    name: str, key: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    path, wanted = tmp_path / name, KEYS[name][key]
    kept_twins.write(name, path)
    value = VALUES[key] if isinstance(wanted, str) and key in VALUES else wanted
    twins._edit_config(path, lambda c: c.update({key: value}))
    if isinstance(wanted, str) and key in VALUES:
        with pytest.raises((BadFile, Unsupported), match=wanted):
            pack(path, tmp_path / "packed", "f32")
        return
    ours = in_numpy(loaded(path)).logits(IDS, len(IDS))
    assert nmse(ours, in_numpy(loaded(twin(name))).logits(IDS, len(IDS))) > 1e-5


def test_layers_may_be_named_by_an_interval() -> None:
    usual = spec_of("qwen3_5", layer_types=None, full_attention_interval=3)
    assert usual.mixers == ("deltanet", "deltanet", "attention")
    assert spec_of("lfm2", layer_types=None, full_attn_idxs=[0]).mixers == ("attention", "conv", "conv")
    assert spec_of("nemotron_h", layers_block_type=None, hybrid_override_pattern="M-*-M").no_ffn == (0, 2, 4)


# ---- states


def stepped(model: Model, ids: list[int], borders: list[int], slots: list[int]) -> F32:
    """Logits of steps between `borders`; step i reads the slot before and writes `slots[i]`."""
    kv = KVCache(model.spec, *block_counts(model.spec, len(ids), len(ids), len(ids)), chunk=len(ids))
    table = kv.open(ids)
    assert kv.grow(table, len(ids))
    bound, states, out, old = bind(model.spec, model.weights, model.ops), new_states(model.spec, 4), [], -1
    for first, last, new in zip([0, *borders], [*borders, len(ids)], slots, strict=True):
        at = np.arange(first, last, dtype=np.int32)
        rows, tables = np.arange(len(at), dtype=np.int32), kv.tables([table], [last])
        batch = Batch(
            np.array(ids, np.int32)[at], at, np.zeros_like(rows), tables[0], rows, tables[-1],
            np.array([old], np.int32), np.array([new], np.int32),
        )  # fmt: skip
        kept = {i: s[old].copy() for i, s in states.items()} if old >= 0 else {}
        for _ in range(2):  # a step that is repeated finds the state that it began with
            y = forward(bound, kv, batch, model.ops, sparsity="exact", stats=FFNStats(), states=states)
        assert all(np.array_equal(states[i][old], s) for i, s in kept.items())
        out.append(y)
        old = new
    return np.concatenate(out)


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h_moe", "granite_hybrid", "lfm2_moe"])
@pytest.mark.parametrize("where", ["reference", "native"])
def test_a_state_is_a_value_in_whatever_slot(name: str, where: str, twin: Callable[[str], Path]) -> None:
    """No step changes the state that it reads, so a checkpoint is a slot that got a name."""
    model = loaded(twin(name))
    model = in_numpy(model) if where == "reference" else model
    whole = stepped(model, IDS, [], [2])
    parts = stepped(model, IDS, [1, 2, 9, 20], [0, 3, 1, 0, 2])
    assert nmse(parts, whole) <= (1e-6 if where == "reference" else 0)


def test_skipped_neurons_of_experts_change_no_bit(twin: Callable[[str], Path]) -> None:
    model = loaded(twin("nemotron_h_moe"))
    assert np.array_equal(model.logits(IDS, 7), model.logits(IDS, 7, sparsity="off"))


# ---- synthetic models

SMALL = {
    "hidden_size": 512, "n_routed_experts": 8, "moe_intermediate_size": 256, "vocab_size": 256,
    "moe_shared_expert_intermediate_size": 256, "mamba_num_heads": 8, "n_groups": 2, "ssm_state_size": 32,
    "num_attention_heads": 8, "head_dim": 64,
}  # fmt: skip


def test_a_synthetic_hybrid_has_the_zeros_that_were_asked_for(tmp_path: Path) -> None:
    """Layers of one half each add half as much to the stream, which the offsets of gates know."""
    shape = synthetic.shapes()["nemotron-3-nano-30b"] | SMALL
    (tmp_path / "config.json").write_text(json.dumps(shape))
    made = synthetic.SyntheticModel.of(str(tmp_path / "config.json"), 0, 0.1, 0.26, 64, layers=12)
    made.write(tmp_path / "pack", "q8_0")
    packed = Pack.open(tmp_path / "pack")
    assert packed.spec.no_ffn == (0, 2, 4, 5, 7, 9, 11)
    got, stats = weights.load(packed, threads=2), FFNStats()
    y = Model(packed.spec, got.weights, got.ops).logits(np.arange(3, 35).tolist(), 32, stats=stats)
    assert np.isfinite(y).all() and 0.5 < y.std() < 10
    share = stats.active / stats.neurons * packed.spec.n_experts / packed.spec.n_experts_active
    assert share == pytest.approx(0.1, rel=0.3)


# ---- GGUF

VARIANTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in gguf_recurrent.ARCHITECTURES]
VARIANTS += [("qwen3_next", {"legacy": True}), ("qwen3_5", {"more": 1}), ("qwen3_5_moe", {"more": 1})]


@pytest.mark.parametrize(("name", "how"), VARIANTS)
def test_a_gguf_is_the_model_that_it_was_made_from(
    name: str, how: dict[str, Any], twin: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_recurrent.write(twin(name), tmp_path / "m.gguf", **how)
    truth = in_numpy(loaded(twin(name))).logits(IDS, len(IDS))
    pack(path, tmp_path / "m.gguf-f32")
    model = loaded(path)
    assert nmse(in_numpy(model).logits(IDS, len(IDS)), truth) <= 1e-6
    assert nmse(model.logits(IDS, 5), truth) <= 1e-6


def test_experts_with_zeros_are_packed_so_that_neurons_lie_together(
    twin: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_recurrent.write(twin("nemotron_h_moe"), tmp_path / "m.gguf")
    assert "have to lie together" in str(open_gguf(path))


@pytest.mark.parametrize("name", [n for n in gguf_recurrent.ARCHITECTURES if "nemotron" not in n])
def test_a_gguf_runs_in_place(name: str, twin: Callable[[str], Path], tmp_path: Path) -> None:
    """Its blocks as they are, in the order of its heads; recurrent weights in f32 beside them."""
    path = gguf_recurrent.write(twin(name), tmp_path / "m.gguf", types=lambda n: of_block(n, name))
    model = open_gguf(path)
    assert isinstance(model, GGUFModel), model
    got = weights.load(model, threads=2)
    pack(path, tmp_path / "m.gguf-f32")
    packed = loaded(path)
    ours = Model(model.spec, got.weights, got.ops).logits(IDS, 7)
    assert np.array_equal(ours, packed.logits(IDS, len(IDS)))


def of_block(tensor: str, name: str) -> str | None:
    """Q8_0 for rows of whole blocks."""
    wide = ("attn_qkv", "attn_gate", "ssm_in", "shortconv", "attn_q.", "attn_k.", "attn_v.", "token_embd")
    return "Q8_0" if any(w in tensor for w in wide) and "norm" not in tensor else None


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size 8 is not supported"),
        ("nemotron_h_moe", {"attention.head_count_kv": [0, 0, 2]}, "a number for each of 5 blocks"),
        ("nemotron_h_moe", {"expert_used_count": 99}, "n_experts_active is more than n_experts"),
        ("nemotron_h_moe", {"ssm.group_count": 5}, "recurrent is out of range"),
        ("nemotron_h", {"nextn_predict_layers": 5}, "nextn_predict_layers is 5, of 5 blocks"),
        ("qwen3_5", {"ssm.time_step_rank": None}, "time_step_rank must be"),
        ("qwen3_5", {"ssm.new_key": 1}, "is unknown, so it may change the answer"),
        ("qwen3_5_moe", {"ssm.state_size": 24}, "its metadata implies"),
        ("granite_hybrid", {"ssm.inner_size": 100}, "no multiple of embedding_length"),
        ("lfm2", {"shortconv.l_cache": 5}, "its metadata implies"),
        ("lfm2_moe", {"expert_gating_func": 1}, "expert_gating_func must be"),
        ("lfm2_moe", {"leading_dense_block_count": 0}, "is missing"),
    ],
)
def test_metadata_that_lies_is_refused_in_a_line(
    name: str, changes: dict[str, Any], why: str, twin: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_recurrent.write(twin(name), tmp_path / "m.gguf", changes=changes)
    with pytest.raises((BadFile, Unsupported), match=why) as e:
        pack(path, tmp_path / "packed")
    assert "\n" not in str(e.value) and not (tmp_path / "packed").exists()


def test_a_block_that_guesses_further_tokens_is_left_out_with_a_line(
    twin: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_recurrent.write(twin("qwen3_5"), tmp_path / "m.gguf", more=1)
    with caplog.at_level(logging.INFO, logger="thermocline"):
        pack(path, tmp_path / "packed", "f32")
    assert "1 tensors that guess further tokens are left out" in caplog.text


def test_a_wrapper_loads_its_text_part_and_says_so(
    twin: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="thermocline"):
        pack(twin("qwen3_5_moe_stacked"), tmp_path / "packed", "f32")
    assert "its text part is read; 1 tensors of its other parts are left out" in caplog.text
    assert "1 tensors that guess further tokens are left out" in caplog.text


# ---- specs, packs


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_says_the_spec_again(name: str, twin: Callable[[str], Path], tmp_path: Path) -> None:
    pack(twin(name), tmp_path / "packed", "q8_0" if "lfm2" in name else "f32")
    assert Pack.open(tmp_path / "packed").spec == families.read_config(twin(name))[0]


SPEC = ModelSpec(
    "test", 32, 48, 2, 4, 2, 8, 97, 256, "rms", 1e-5, "silu",
    mixers=("deltanet", "attention"), recurrent=Recurrent(conv=4, heads=4, head_dim=8, groups=2, state=16),
)  # fmt: skip
BAD: dict[str, dict[str, Any]] = {
    "for each layer": {"mixers": ("deltanet",)},
    "mixers are not one of": {"mixers": ("deltanet", "rwkv")},
    "need each other": {"recurrent": None},
    "need RMS norms": {"norm": "layer"},
    "recurrent is out of range": {"recurrent": Recurrent(conv=4, heads=4, head_dim=8, groups=3, state=16)},
    "conv_bias is for": {"recurrent": replace(SPEC.recurrent, conv_bias=True)},  # type: ignore[type-var]
    "no_ffn are not some": {"no_ffn": (1, 0)},
    "neither a mixer nor": {"mixers": ("deltanet", "none"), "no_ffn": (1,)},
    "needs an FFN": {"no_ffn": (0, 1)},
    "is not for models with sub_norms": {"attention_gate": True, "sub_norms": True},
}


@pytest.mark.parametrize("words", BAD)
def test_a_spec_that_cannot_be_is_refused(words: str) -> None:
    check_spec(SPEC, "a test")
    with pytest.raises(BadFile, match=words):
        check_spec(replace(SPEC, **BAD[words]), "a test")


def test_the_order_of_heads_is_part_of_the_spec(twin: Callable[[str], Path]) -> None:
    """Values in turns of the groups, read as if group by group, give other answers."""
    model = in_numpy(loaded(twin("qwen3_5_moe")))
    assert model.spec.recurrent is not None
    other = replace(model, spec=replace(model.spec, recurrent=replace(model.spec.recurrent, tiled=True)))
    assert nmse(other.logits(IDS, 24), model.logits(IDS, 24)) > 1e-3


def test_the_gate_of_attention_changes_the_answer(twin: Callable[[str], Path]) -> None:
    model = in_numpy(loaded(twin("qwen3_5")))
    layers = tuple(replace(x, attn_gate=None) for x in model.weights.layers)
    other = replace(model, weights=replace(model.weights, layers=layers))
    assert nmse(other.logits(IDS, 24), model.logits(IDS, 24)) > 1e-3
