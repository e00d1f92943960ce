"""Random packs: equal for equal seeds, sane to compute with, made in little memory, sparse as asked for."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline.convert import synthetic
from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_weights import HOT_SHARE, HOTTEST, activities
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.errors import Unsupported, UsageError
from thermocline.model import families, quant
from thermocline.model.tensors import expected_tensors
from thermocline.ops.interface import F32, Batch, FFNStats, Layer
from thermocline.pack.pack import Pack, planting, verify
from thermocline.session import weights

Run = Callable[..., Any]
TOKENS = 384
SMALL: dict[str, dict[str, Any]] = {  # a shape and what makes it small
    "llama-2-7b": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
    "opt-6.7b": {
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 512,
    },
}
SMALL["qwen3-30b-a3b"] = {
    **SMALL["llama-2-7b"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 256,
}  # fmt: skip
SMALL["mistral-7b"] = SMALL["bamboo-7b"] = SMALL["mixtral-8x7b"] = SMALL["llama-2-7b"]
SMALL["turbosparse-mixtral"] = SMALL["mixtral-8x7b"]
EXPERTS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
EXPERTS |= {"head_dim": 64, "eos_token_id": 2, "pad_token_id": 0}
SMALL["smallthinker-4b"] = {
    "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2,
    "moe_num_primary_experts": 8, "moe_num_active_primary_experts": 3, "moe_ffn_hidden_size": 256,
}  # fmt: skip
SMALL["gpt-oss-20b"] = SMALL["llama-2-7b"] | {
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": 64, "num_local_experts": 16,
    "num_experts_per_tok": 3, "experts_per_token": 3, "intermediate_size": 512,
    "layer_types": ["full_attention"] * 4,
}  # fmt: skip
SMALL["afm-4.5b"] = SMALL["llama-2-7b"] | {"head_dim": 64, "bos_token_id": 1, "eos_token_id": 2}
SMALL["glm-4.5-air"] = SMALL["llama-2-7b"] | EXPERTS


def config_file(directory: Path, shape: str, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(synthetic.shapes()[shape] | SMALL[shape] | changes))
    return path


def make(
    directory: Path,
    shape: str,
    format: str = "q8_0",
    *,
    seed: int = 0,
    active: float | None = None,
    skew: float = 0.26,
    rank: int = 64,
    **changes: Any,
) -> Pack:
    model = synthetic.SyntheticModel.of(
        str(config_file(directory, shape, **changes)), seed, active, skew, rank
    )
    model.write(directory / "pack", format, overwrite=True)
    return Pack.open(directory / "pack")


class Watched:
    """Ops that note which neurons of each layer were active, and what the engine counted."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.counted: list[float] = []  # by layer
        self.active: list[Any] = []  # by layer, [tokens, neurons]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def bind_ffn(self, spec: Any, layer: Layer) -> Any:
        return spec, layer, self._ops.bind_ffn(spec, layer)

    def begin_ffn(self, x: F32, *args: Any, apart: bool, **more: Any) -> F32:
        return x.copy() if apart else x

    def ffn_add(self, x: Any, h: Any, bound: Any, sparsity: str, stats: FFNStats, **more: Any) -> None:
        spec, layer, inner = bound
        norm, f = layer.ffn_norm, layer.experts[0].part
        normed = self._ops.norm(h, norm.weight, norm.bias, spec.norm_eps, spec.norm)
        active = self._ops.matmul(f.gate.weight, normed, f.gate.bias) > spec.activation_threshold
        if spec.up_activation == "relu":
            active &= self._ops.matmul(f.up, normed, None) > 0
        before = stats.active
        self._ops.ffn_add(x, h, inner, sparsity, stats, **more)
        self.counted.append((stats.active - before) / active.size)
        self.active.append(active)


def run(pack: Pack, tokens: int = TOKENS) -> tuple[F32, Watched]:
    """Logits of a text of random tokens, and what its layers did."""
    loaded = weights.load(pack, threads=1)
    ops = Watched(loaded.ops)
    ids = np.random.default_rng(5).integers(0, pack.spec.vocab_size, tokens).astype(np.int32)
    rows = np.arange(tokens, dtype=np.int32)
    table = np.arange(blocks_for(tokens), dtype=np.int32)[None]
    batch = Batch(ids, rows, np.zeros_like(rows), table, rows)
    kv = KVCache(pack.spec, blocks_for(tokens))
    model = bind(pack.spec, loaded.weights, ops)
    logits = forward(model, kv, batch, ops, sparsity="exact", stats=FFNStats())
    return logits, ops


# ---- shapes


@pytest.mark.parametrize("name", list(synthetic.shapes()))
def test_every_shape_is_read_by_its_reader_or_refused_by_it(name: str) -> None:
    architecture = synthetic.shapes()[name]["architectures"][0]
    if architecture in families.FAMILIES:
        assert synthetic.read_shape(name)[1].n_layers > 0
    else:
        with pytest.raises(Unsupported, match=architecture):
            synthetic.read_shape(name)


def test_shapes_have_their_models_sizes() -> None:
    """Parameters in all, as published."""
    billions = {"llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "tinyllama-1.1b": 1.10}
    billions |= {
        "qwen3-30b-a3b": 30.53,
        "olmoe-1b-7b": 6.92,
        "glm-4.5-air": 106.85,
        "ernie-4.5-21b-a3b": 21.83,
        "qwen3.6-35b-a3b": 34.66,
        "qwen3.6-27b": 26.90,
        "qwen3-next-80b": 79.67,
        "nemotron-3-nano-30b": 31.58,
        "lfm2-8b-a1b": 8.34,
        "granite-4-h-tiny": 6.94,
        "granite-3.3-8b": 8.17,
        "smollm3-3b": 3.08,
        "olmo-2-7b": 7.30,
        "phi-3.5-moe": 41.87,
        "llama-4-scout": 107.77,
    }
    billions |= {"mistral-7b": 7.24, "bamboo-7b": 7.24, "opt-6.7b": 6.66, "opt-13b": 12.85, "opt-30b": 29.97}
    for name, expected in billions.items():
        _, spec, tensor_map = synthetic.read_shape(name)
        tensor_specs = expected_tensors(spec, "q4_0")
        got = sum(t.parameters for n, t in tensor_specs.items() if not t.optional or n in tensor_map.tensors)
        assert got / 1e9 == pytest.approx(expected, rel=0.005), name


# ---- the bytes


@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_equal_seeds_give_equal_packs_and_others_do_not(format: str, tmp_path: Path) -> None:
    packs = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        packs.append(make(tmp_path / name, "llama-2-7b", format, seed=seed, active=0.1))
    a, b, c = ((p.path / "weights.bin").read_bytes() for p in packs)
    assert a == b
    assert np.mean(np.frombuffer(a, np.uint8) != np.frombuffer(c, np.uint8)) > 0.5
    assert verify(packs[0]) == []


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        *[("llama-2-7b", f) for f in ("q8_0", "q4_1", "q4_k", "iq4_xs", "mxfp4", "tq2_0", "bf16")],
        ("opt-6.7b", "q6_k"),
        ("turbosparse-mixtral", "q8_0"),
    ],
)
def test_rows_do_not_depend_on_how_they_are_asked_for(shape: str, format: str, tmp_path: Path) -> None:
    model = synthetic.SyntheticModel.of(str(config_file(tmp_path, shape)), 0, 0.1, 0.26, 64)
    source = RandomWeights(model.stats)
    for tensor_spec in expected_tensors(model.stats.spec, format).values():
        for part in tensor_spec.parts:
            if tensor_spec.vector:
                continue
            whole = source.encoded(part, tensor_spec.format, 0, tensor_spec.rows)
            cuts = sorted({0, 1, min(40, tensor_spec.rows), tensor_spec.rows // 2 + 3, tensor_spec.rows})
            pieces = [source.encoded(part, tensor_spec.format, a, b) for a, b in pairwise(cuts)]
            assert np.array_equal(whole, np.concatenate(pieces)), part


@pytest.mark.parametrize("shape", ["llama-2-7b", "opt-6.7b", "turbosparse-mixtral"])
def test_hottest_first_puts_the_same_activities_in_order(shape: str, tmp_path: Path) -> None:
    file = str(config_file(tmp_path, shape))
    anyhow, ordered = (
        synthetic.SyntheticModel.of(file, 0, 0.1, 0.26, 64, first).stats.truth() for first in (False, True)
    )
    assert (np.diff(ordered, axis=2) <= 0).all()
    assert not (np.diff(anyhow, axis=2) <= 0).all(axis=2).any()
    assert np.array_equal(ordered, -np.sort(-anyhow, axis=2))


@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_neurons_that_are_never_negative_come_in_opposite_pairs(format: str, tmp_path: Path) -> None:
    model = synthetic.SyntheticModel.of(str(config_file(tmp_path, "opt-6.7b")), 0, 0.1, 0.26, 64)
    down = RandomWeights(model.stats).encoded("layers.0.down", format, 3, 9)  # 4 and 5 are a pair
    w = quant.decode(format, down, 256)
    assert np.array_equal(w[1:4:2], -w[2:5:2])
    assert not np.array_equal(w[0:3:2], -w[1:4:2])


@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_weights_have_the_planned_deviation_and_no_mean(format: str, tmp_path: Path) -> None:
    model = synthetic.SyntheticModel.of(str(config_file(tmp_path, "llama-2-7b")), 0, None, 0.26, 64)
    rows = RandomWeights(model.stats).encoded("layers.0.qkv.weight", format, 0, 512)
    w = quant.decode(format, rows, 256).astype(np.float64)
    # MXFP4's scales are powers of two: a block's deviation is up to twice another's
    assert w.std() == pytest.approx(1 / 16, rel=0.02 if format == "mxfp4" else 0.01)
    assert abs(w.mean()) < 4 * w.std() / np.sqrt(w.size)  # four standard errors
    correlation = np.atleast_2d(np.corrcoef(w[:64]))
    assert np.abs(correlation[np.triu_indices(64, 1)]).max() < 0.35  # rows are independent


@pytest.mark.parametrize("format", [f.name for f in quant.FORMATS.values() if f.block > 1])
def test_the_blocks_of_a_sparse_models_gates_have_deviations_and_offsets_of_their_own(
    format: str, tmp_path: Path
) -> None:
    """As in f32, however few scales a format has."""
    model = synthetic.SyntheticModel.of(
        str(config_file(tmp_path, "llama-2-7b", hidden_size=1024)), 0, 0.11, 0.26, 64
    )

    def rows_of(format: str) -> Any:
        rows = RandomWeights(model.stats).encoded("layers.1.gate.weight", format, 0, 1024)
        return quant.decode(format, rows, 1024).reshape(1024, 32, 32)

    mine, exact = rows_of(format), rows_of("f32")
    loud = exact.std(axis=(0, 2)) > 0.05
    ratios = mine.std(axis=(0, 2)) / exact.std(axis=(0, 2))
    assert loud.sum() >= 2 and ratios[loud] == pytest.approx(np.ones(loud.sum()), rel=0.05)
    assert ratios[4:] == pytest.approx(np.ones(28), rel=0.15)
    offsets, wanted = mine[:, 0].mean(axis=1), exact[:, 0, 0]
    assert np.sqrt(np.mean((offsets - wanted) ** 2) / np.mean(wanted**2)) < (
        0.15 if format == "mxfp4" else 0.03
    )


def test_rows_that_leave_the_constant_columns_alone_are_zero_in_every_format(tmp_path: Path) -> None:
    model = synthetic.SyntheticModel.of(str(config_file(tmp_path, "llama-2-7b")), 0, 0.1, 0.26, 64)
    source = RandomWeights(model.stats)
    for format in quant.FORMATS:
        out = quant.decode(format, source.encoded("layers.0.attn_out.weight", format, 0, 64), 256)
        assert not out[:32].any() and out[32:].any(axis=1).all()
        down = quant.decode(format, source.encoded("layers.0.down", format, 0, 64), 256)
        assert not down[:, :32].any() and down[:, 32:].any(axis=1).all()


def test_it_takes_little_memory_whatever_the_shape(tmp_path: Path) -> None:
    """113 MB of q4_0 with rows of 262144 weights; the limit is far below what any tensor takes."""
    changes = {"intermediate_size": 1 << 18, "num_hidden_layers": 1}
    model = synthetic.SyntheticModel.of(
        str(config_file(tmp_path, "llama-2-7b", **changes)), 0, None, 0.26, 64
    )
    tracemalloc.start()
    model.write(tmp_path / "pack", "q4_0")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "pack" / "weights.bin").stat().st_size > 100e6
    assert peak < 16 << 20


# ---- what they compute


SPARSE_MIXTURES = {"turbosparse-mixtral", "smallthinker-4b"}  # in test_moe.py


@pytest.mark.parametrize("shape", sorted(SMALL.keys() - SPARSE_MIXTURES))
@pytest.mark.parametrize("format", ["f32", "q4_0", "q4_k"])
def test_logits_are_finite_and_spread_as_a_models(shape: str, format: str, tmp_path: Path) -> None:
    logits, _ = run(make(tmp_path, shape, format), tokens=64)
    assert np.isfinite(logits).all()
    assert 1.5 < logits.std() < 4
    assert len(set(logits.argmax(1).tolist())) > 32  # not one answer to everything


@pytest.mark.parametrize("active", [0.03, 0.11, 0.3])
@pytest.mark.parametrize("shape", ["llama-2-7b", "opt-6.7b", "bamboo-7b"])
def test_as_many_neurons_are_active_as_were_asked_for(shape: str, active: float, tmp_path: Path) -> None:
    pack = make(tmp_path, shape, active=active, skew=0.43 if active > 0.2 else 0.26)
    _, ops = run(pack)
    assert pack.spec.sparse
    assert np.mean(ops.counted) == pytest.approx(active, rel=0.1)
    assert ops.counted == pytest.approx([active] * pack.spec.n_layers, rel=0.25)  # every layer


@pytest.mark.parametrize("format", ["q4_k", "q6_k", "q3_k", "q2_k", "iq4_xs", "mxfp4", "tq2_0"])
def test_as_many_neurons_are_active_in_formats_of_blocks(format: str, tmp_path: Path) -> None:
    """Their scales have few bits, and offsets lie beside small weights in one block of 256."""
    pack = make(tmp_path, "llama-2-7b", format, active=0.11, num_hidden_layers=2)
    _, ops = run(pack)
    assert np.mean(ops.counted) == pytest.approx(0.11, rel=0.15 if format == "q2_k" else 0.1)


@pytest.mark.parametrize("shape", ["llama-2-7b", "opt-6.7b", "bamboo-7b"])
def test_the_recorded_truth_is_how_often_each_neuron_is_active(shape: str, tmp_path: Path) -> None:
    pack = make(tmp_path, shape, active=0.11)
    truth = np.load(pack.path / synthetic.TRUTH)["activity"]
    assert truth.shape == (pack.spec.n_layers, 1, pack.spec.ffn_dim)
    assert truth.mean(axis=(1, 2)) == pytest.approx([0.11] * pack.spec.n_layers, rel=1e-3)
    _, ops = run(pack)
    for layer, active in enumerate(ops.active):
        assert np.corrcoef(active.mean(axis=0), truth[layer, 0])[0, 1] > 0.93
    assert not np.array_equal(np.argsort(truth[0, 0]), np.argsort(truth[1, 0]))  # other neurons are hot


def test_tokens_differ_in_how_many_neurons_they_need(tmp_path: Path) -> None:
    """The bundled model's layers vary by 0.45 to 1.2 of their mean, and near layers together."""
    _, ops = run(make(tmp_path, "llama-2-7b", active=0.11))
    by_token = np.array([a.mean(axis=1) for a in ops.active])
    assert (by_token.std(axis=1) / by_token.mean(axis=1)).min() > 0.2
    near, far = np.corrcoef(by_token)[0, 1], np.corrcoef(by_token)[0, -1]
    assert near > 0.3 > far


def test_gates_can_be_predicted_at_their_rank(tmp_path: Path) -> None:
    """All but the noise of a gate's weights lies in `rank` directions, the shared ones and the offset's."""
    model = synthetic.SyntheticModel.of(str(config_file(tmp_path, "llama-2-7b")), 0, 0.11, 0.26, 64)
    rows = RandomWeights(model.stats).encoded("layers.1.gate.weight", "q8_0", 0, 512)
    spectrum = np.linalg.svd(quant.decode("q8_0", rows, 256), compute_uv=False) ** 2
    assert spectrum[:66].sum() / spectrum.sum() > 0.9 > spectrum[:48].sum() / spectrum.sum()


def test_a_dense_shape_stays_dense_unless_asked(tmp_path: Path) -> None:
    pack = make(tmp_path, "mistral-7b")
    assert not pack.spec.sparse
    assert not (pack.path / synthetic.TRUTH).exists()
    assert pack.spec == dataclasses.replace(make(tmp_path, "mistral-7b", active=0.1).spec, activation="silu")


def test_a_sliding_window_and_a_threshold_are_kept(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"architectures": ["SparseLlamaForCausalLM"], "model_type": "sparsellama"}
    changes |= {"hidden_act": "fatrelu", "hidden_act_param": 0.5}
    pack = make(tmp_path, "llama-2-7b", active=0.11, **changes)
    assert pack.spec.activation_threshold == 0.5
    assert np.mean(run(pack)[1].counted) == pytest.approx(0.11, rel=0.1)


def test_a_pack_says_how_kind_its_activity_is(tmp_path: Path) -> None:
    easy, dense = make(tmp_path, "llama-2-7b", active=0.1).source, make(tmp_path, "llama-2-7b").source
    assert planting(easy) == "random weights; neurons planted, easy"
    assert planting(dense) == "random weights"
    routed = easy | {"name": f"{easy['name']} routing qwen3-30b activity trained"}
    assert planting(routed) == "random weights; neurons planted as trained; routing planted as trained"
    assert planting({"kind": "huggingface", "name": "active"}) is None


# ---- the power law


@pytest.mark.parametrize(("active", "skew"), [(0.1, 0.26), (0.03, 0.17), (0.2, 0.43), (0.5, 0.69)])
def test_activities_are_the_published_power_law(active: float, skew: float) -> None:
    p = activities(4096, active, skew)
    assert p.mean() == pytest.approx(active, rel=1e-3)
    assert p[: int(skew * 4096)].sum() / p.sum() == pytest.approx(HOT_SHARE, rel=0.01)
    assert (np.diff(p) <= 0).all()
    assert 0 < p[-1] < p[0] <= HOTTEST


# ---- refusals


def test_a_power_law_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="no power law"):
        activities(4096, 0.5, 0.26)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "rank not a multiple": ("llama-2-7b", {"rank": 40}, "multiple of 32"),
    "rank too large": ("llama-2-7b", {"rank": 160}, "from 32 to 128"),
    "too narrow": (
        "llama-2-7b",
        {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
        "128 wide",
    ),
    "no power law": ("llama-2-7b", {"active": 0.5}, "no power law"),
    "no bias behind LayerNorm": ("opt-6.7b", {"enable_bias": False}, "gate bias"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_planted_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    shape, changes, said = REFUSED[case]
    with pytest.raises((UsageError, Unsupported), match=said):
        make(tmp_path, shape, **{"active": 0.1, **changes})
    assert not (tmp_path / "pack").exists()


# ---- the command


def test_the_command_writes_a_pack_and_says_what_it_holds(tmp_path: Path, thermocline: Run) -> None:
    argv = [
        "synth",
        config_file(tmp_path, "opt-6.7b"),
        "-o",
        tmp_path / "out",
        "--format",
        "q4_0",
        "--seed",
        "3",
    ]
    ran = thermocline(*argv, "--json")
    assert ran.code == 0, ran.err
    about = json.loads(ran.out)
    assert about["weight_format"] == "q4_0"
    assert about["source"]["name"].endswith("seed 3 active 0.1 skew 0.26 rank 64")
    assert thermocline("verify", tmp_path / "out").code == 0
    again = thermocline(*argv)
    assert again.code == 2 and "exists" in again.err
    assert thermocline(*argv, "--force").code == 0


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["no-such-model"], 2, "known: llama-2-7b, "),
        (["CONFIG"], 6, "OtherForCausalLM"),
        (["opt-6.7b", "--active", "1.5"], 2, "--active must be from 0.001 to 0.9"),
        (["llama-2-7b", "--active", "0.5"], 2, "no power law"),
    ],
)
def test_a_shape_that_cannot_be_made_is_one_line(
    argv: list[str], code: int, said: str, tmp_path: Path, thermocline: Run
) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["OtherForCausalLM"]}')
    ran = thermocline("synth", *(config if a == "CONFIG" else a for a in argv), "-o", tmp_path / "out")
    assert ran.code == code
    assert said in ran.err and ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
