"""Mixtures of experts: which experts a token goes to, and that nothing else decides what it gets."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import test_plan
import test_synth
from test_kernels import (
    F32_NMSE,
    ISAS,
    PAIRS,
    cpu,
    ffn,
    nmse,
    normal,
    same_bits,
    stored,
    stored_bundle,
    whole,
)

from thermocline import SamplingParams, _native
from thermocline.cli import main
from thermocline.convert import synthetic, to_gguf
from thermocline.convert.importer import pack
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.errors import BadFile, Unsupported
from thermocline.model import activations, families, quant
from thermocline.model.sizes import sizes_of
from thermocline.model.spec import PLAIN_ROUTER, ROUTER_SCORES, ROUTER_WEIGHTS, Router
from thermocline.model.tensors import expected_tensors
from thermocline.offline.activity import ProfileWorker
from thermocline.offline.training import calibrate, fits
from thermocline.offline.training.calibrate import LayerSamples
from thermocline.ops import reference
from thermocline.ops.cpu import native_rule
from thermocline.ops.interface import F32, FFN, FFNStats, Layer, Linear, Norm, Weights
from thermocline.pack.activity_profile import BUCKETS, open_profile, open_samples
from thermocline.pack.pack import Pack, inspect
from thermocline.pack.predictor import LayerPredictor, Predictors, open_predictors
from thermocline.plan import cost, hotness
from thermocline.session import weights

Thermocline = Callable[..., Any]
EXPERTS, ACTIVE, DIM, NEURONS = 5, 2, 64, 288  # more than a chunk of neurons


class Mix:
    """A layer with a mixture, natively and as values. Every expert is random of its own."""

    def __init__(self, format: str, kind: str, activation: str, bundles: bool = True) -> None:
        dim, neurons = whole(format, DIM), whole(format, NEURONS)
        one = ffn(format, neurons, dim, kind, activation, bundles=bundles).spec
        self.spec = replace(one, n_experts=EXPERTS, n_experts_active=ACTIVE, residual_scale=0.5)
        router, values = stored("f32", normal(11, EXPERTS, dim) / np.float32(8))
        norm = Norm(1 + normal(12, dim) / np.float32(8), None)
        each = [self.expert(format, e, bundles) for e in range(EXPERTS)]
        self.native = self.layer(norm, [native for native, _ in each], router)
        self.numpy = self.layer(norm, [values for _, values in each], values)

    @staticmethod
    def expert(format: str, e: int, bundles: bool) -> tuple[FFN, FFN]:
        dim, neurons = whole(format, DIM), whole(format, NEURONS)
        gate, gate_values = stored(format, normal(100 + e, neurons, dim) / np.float32(8))
        wanted = normal(200 + e, neurons, dim)
        bias, after = normal(400 + e, neurons) - 1, normal(500 + e, dim)
        if bundles:
            up, down, up_values, down_values = stored_bundle(format, wanted, normal(300 + e, neurons, dim))
        else:
            up, up_values = stored(format, wanted)
            down, down_values = stored(format, normal(300 + e, dim, neurons))
        native = FFN.whole(Linear(gate, bias), up, down, after, bundles)
        return native, FFN.whole(Linear(gate_values, bias), up_values, down_values, after, bundles)

    @staticmethod
    def layer(norm: Norm, experts: list[FFN], router: Any) -> Layer:
        return Layer(None, None, None, norm, tuple(experts), router=Linear(router, None))

    def run(self, ops: Any, x: F32, h: F32, sparsity: str = "exact", record: F32 | None = None) -> Any:
        y, stats = x.copy(), FFNStats()
        bound = ops.bind_ffn(self.spec, self.numpy if ops is reference else self.native)
        ops.ffn_add(y, h, bound, sparsity, stats, record)
        return y, stats


CASES = {
    "dense": ("gated", "silu", False),
    "ReGLU": ("gated", "relu", True),
    "dReLU": ("dReLU", "relu", True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("isa", "format"), PAIRS)
def test_a_mixture_is_the_reference_whatever_a_tokens_company(isa: str, format: str, case: str) -> None:
    mix, dim = Mix(format, *CASES[case]), whole(format, DIM)
    x, h = normal(5, 13, dim), normal(6, 13, dim)
    y, _ = mix.run(cpu(isa, 2), x, h)
    if quant.FORMATS[format].block == 1:  # the reference does not round what an expert sees
        assert nmse(y - x, mix.run(reference, x, h)[0] - x) <= 10 * F32_NMSE
    assert same_bits(mix.run(cpu(isa, 2), x, h, "off")[0], y)
    for cut in (1, 4, 6):
        parts = [mix.run(cpu(isa, 3), x[at], h[at])[0] for at in (slice(0, cut), slice(cut, 13))]
        assert same_bits(np.concatenate(parts), y), cut


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES)
def test_experts_are_those_of_the_stream_that_the_router_reads(isa: str, case: str) -> None:
    """Natively as in the reference, skipping or not, and whatever a token's company."""
    mix = Mix("f32", *CASES[case])
    x, h, before = normal(5, 300, DIM), normal(6, 300, DIM), normal(7, 300, DIM)

    def run(ops: Any, at: slice, sparsity: str = "exact") -> tuple[F32, F32]:
        bound, y = ops.bind_ffn(mix.spec, mix.numpy if ops is reference else mix.native), x[at].copy()
        shares = ops.routed(before[at], bound)
        ops.ffn_add(y, h[at], bound, sparsity, FFNStats(), shares=shares)
        return y, shares

    ops, every = cpu(isa, 3), slice(None)
    truth, wanted = run(reference, every)
    y, shares = run(ops, every)
    assert np.array_equal(shares != 0, wanted != 0) and nmse(shares, wanted) <= F32_NMSE
    assert nmse(y - x, truth - x) <= 10 * F32_NMSE
    assert nmse(y - x, mix.run(ops, x, h)[0] - x) > 1e-2  # what experts read says others
    assert same_bits(run(ops, every, "off")[0], y)
    for cut in (1, 4, 257):
        parts = [run(ops, at)[0] for at in (slice(0, cut), slice(cut, 300))]
        assert same_bits(np.concatenate(parts), y), cut


@pytest.mark.parametrize("case", ("ReGLU", "dReLU"))
@pytest.mark.parametrize("format", ("f32", "q4_0"))
def test_a_tokens_experts_share_a_region_and_no_bit_changes(format: str, case: str) -> None:
    """As one by one, which more tokens and records make them; with any threads, and counted."""
    mix, dim = Mix(format, *CASES[case]), whole(format, DIM)
    mix.spec = replace(mix.spec, n_experts_active=4)
    x, h = normal(5, 2, dim), normal(6, 2, dim)
    for sparsity in ("exact", "off"):
        apart, _ = mix.run(cpu(ISAS[0], 2), x, h, sparsity)
        for threads in (1, 2, 3, 5):
            alone, stats = mix.run(cpu(ISAS[0], threads), x[:1], h[:1], sparsity)
            record = np.empty((1, EXPERTS * mix.spec.ffn_dim), np.float32)
            again, seen = mix.run(cpu(ISAS[0], threads), x[:1], h[:1], sparsity, record)
            assert same_bits(alone, apart[:1]) and same_bits(alone, again)
            assert stats.active == seen.active == int((record != 0).sum())
            assert (stats.predicted, stats.rows_dense) == (seen.predicted, seen.rows_dense)


@pytest.mark.parametrize("format", [f.name for f in quant.FORMATS.values() if f.block > 1])
def test_an_expert_is_the_ffn_it_would_be_alone(format: str) -> None:
    """One expert for each token: the mixture is that expert, to the bit, whatever the format."""
    mix = Mix(format, *CASES["ReGLU"])
    mix.spec = replace(mix.spec, n_experts_active=1, residual_scale=1.0)
    dim = whole(format, DIM)
    x, h = np.zeros((9, dim), np.float32), normal(6, 9, dim)
    y, _ = mix.run(cpu(ISAS[0]), x, h)
    norm = mix.native.ffn_norm
    assert norm is not None
    seen = cpu(ISAS[0]).norm(h, norm.weight, None, mix.spec.norm_eps, "rms")
    chosen = (seen @ mix.numpy.router.weight.T).argmax(axis=1)  # type: ignore[union-attr]
    assert len(set(chosen.tolist())) > 2
    for t, e in enumerate(chosen):
        alone = np.zeros((1, dim), np.float32)
        layer = Layer(None, None, None, None, (mix.native.experts[e],))
        ops = cpu(ISAS[0])
        ops.ffn_add(alone, seen[t : t + 1], ops.bind_ffn(mix.spec, layer), "exact", FFNStats())
        assert same_bits(alone[0], y[t]), t


@pytest.mark.parametrize("case", CASES)
def test_what_was_read_is_counted_and_recorded(case: str) -> None:
    mix, n = Mix("f32", *CASES[case]), EXPERTS * NEURONS
    for tokens in (1, 3, 40):
        x, h = normal(5, tokens, DIM), normal(6, tokens, DIM)
        _, stats = mix.run(cpu(ISAS[0]), x, h)
        _, truth = mix.run(reference, x, h)
        if case != "dense":
            assert stats == truth, tokens
        assert stats.predicted <= min(tokens * ACTIVE, EXPERTS) * NEURONS and stats.gates_dense == n
        recorded, wanted = (np.full((tokens, n), np.nan, np.float32) for _ in range(2))
        y, _ = mix.run(cpu(ISAS[0]), x, h, record=recorded)
        assert same_bits(y, mix.run(cpu(ISAS[0]), x, h)[0])
        mix.run(reference, x, h, record=wanted)
        assert nmse(recorded, wanted) <= F32_NMSE and np.array_equal(recorded != 0, wanted != 0)
        went = recorded.reshape(tokens, EXPERTS, NEURONS).any(axis=2).sum(axis=1)
        assert (went == ACTIVE).all()


def test_equal_logits_go_to_lower_experts_and_a_nan_shows() -> None:
    logits = np.array([[1, 3, 3, 3], [0, 0, 0, 0], [5, np.nan, 1, 2], [-1e9, 0, -1e9, -1e9]], np.float32)
    w = activations.route(logits, 2)
    assert [np.flatnonzero(row).tolist() for row in w] == [[1, 2], [0, 1], [0, 1], [1]]
    assert w[0, 1] == w[0, 2] == 0.5 and np.isnan(w[2, :2]).all() and w[3, 1] == 1


def numbered(experts: int) -> tuple[_native.FFN, ...]:
    """Experts of 32 dimensions, of which expert e answers e_e."""
    one, _ = stored("f32", np.zeros((8, 32), np.float32))
    gate, plain = _native.Linear(one, None), _native.Join(None, 1.0)
    return tuple(
        _native.FFN(
            norm=None, gate=gate, up=None, down=one, down_bias=np.eye(32, dtype=np.float32)[e], activation=3,
            threshold=0.0, up_relu=False, bundles=True, sub_norm=None, join=plain,
        )
        for e in range(experts)
    )  # fmt: skip


def mixture(experts: int, active: int, rule: Router = PLAIN_ROUTER, **more: Any) -> _native.Mixture:
    """One whose logits are the first elements of its input."""
    eye, plain = stored("f32", np.eye(32, dtype=np.float32)[:experts])[0], _native.Join(None, 1.0)
    router = _native.Linear(eye, more.pop("bias", None))
    return _native.Mixture(None, router, numbered(experts), active, plain, rule=native_rule(rule), **more)


def test_the_native_router_chooses_as_the_reference() -> None:
    """Experts that answer their number: x itself is the logits, ties among them."""
    tied = np.array(list(itertools.product((0, 1, 2), repeat=4)), np.float32)
    odd = np.array([[-1e9, 0, -1e9, -1e9], [1e9, 1e9, -1e9, 0]], np.float32)
    logits = np.concatenate([tied, normal(3, 50, 4) * 4, odd]).astype(np.float32)
    bias = np.array([0, 0.5, -1, 0], np.float32)
    for active, biased in itertools.product((1, 2, 3, 4), (False, True)):
        h = np.zeros((len(logits), 32), np.float32)
        h[:, :4] = logits
        y = np.zeros_like(h)
        cpu(ISAS[0]).native.moe_add(y, h, mixture(4, active, bias=bias if biased else None), 1)
        wanted = activations.route(logits + bias if biased else logits, active)
        assert np.array_equal(y[:, :4] != 0, wanted != 0)
        assert np.allclose(y[:, :4], wanted, rtol=1e-6, atol=1e-12)
        assert np.allclose(y[:, :4].sum(axis=1), 1)


RULES = [
    Router(score=score, weights=weights, epsilon=epsilon, epsilon_floor=floor, scale=scale,
           groups=groups, groups_kept=kept, group_rule=group_rule)
    for score, weights, (epsilon, floor), scale, (groups, kept, group_rule) in itertools.product(
        ROUTER_SCORES, ROUTER_WEIGHTS, ((0.0, False), (0.25, False), (0.9, True)), (1.0, 2.5),
        ((1, 1, "max"), (4, 2, "max"), (4, 2, "sum2"), (2, 1, "sum2")),
    )
    if not epsilon or weights == "normalised" or (weights == "mixed" and not floor)
]  # fmt: skip


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("active", (1, 3, 4))
def test_every_rule_is_the_references(active: int, biased: bool) -> None:
    """Ties among experts and among groups, logits of one sign, NaNs of some experts."""
    n, rng = 8, np.random.default_rng(1)
    tied = rng.integers(-1, 2, (60, n)).astype(np.float32)
    logits = np.concatenate([tied, normal(3, 60, n) * 3, -np.abs(normal(4, 20, n)), np.zeros((1, n))])
    damaged = logits[:40].copy()
    damaged[np.arange(40), rng.integers(0, n, 40)] = np.nan
    logits = np.concatenate([logits, damaged]).astype(np.float32)
    bias = (rng.integers(-2, 3, n) / 4).astype(np.float32) if biased else None
    for rule in RULES:
        cancels = rule.score == "logits" and rule.weights == "normalised"  # a sum of both signs is noise
        given = np.abs(logits) if cancels else logits
        found = np.full_like(given, 7)
        mixture(n, active, replace(rule, selection_bias=biased), selection_bias=bias).route(given, found)
        with np.errstate(all="ignore"):
            wanted = activations.route(given, active, rule, bias)
        assert np.array_equal(np.isnan(found), np.isnan(wanted)), rule
        assert np.array_equal(found != 0, wanted != 0), rule
        assert np.allclose(found, wanted, rtol=2e-6, atol=1e-9, equal_nan=True), rule


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("case", ["ReGLU", "dense"])
def test_some_experts_take_the_shares_that_they_are_given(case: str, tokens: int) -> None:
    """They have no router. Who is given nothing is computed by nobody."""
    mix = Mix("f32", *CASES[case])
    ops, x = cpu(ISAS[0]), normal(1, tokens, mix.spec.dim)
    shares = np.abs(normal(2, tokens, 2)) * (np.arange(2 * tokens).reshape(-1, 2) % 3 > 0)
    every = np.zeros((tokens, EXPERTS), np.float32)
    every[:, [1, 3]] = shares = shares.astype(np.float32)
    some = replace(mix.native, experts=(mix.native.experts[1], mix.native.experts[3]), router=None)
    plain = replace(mix.native, ffn_norm=None)
    got, wanted = np.zeros_like(x), np.zeros_like(x)
    ops.native.moe_add(got, x, ops.bind_experts(mix.spec, some), 1, None, shares)
    ops.native.moe_add(wanted, x, ops.bind_experts(mix.spec, plain), 1, None, every)
    assert np.array_equal(got, wanted) and not got[shares.sum(axis=1) == 0].any()


def test_a_damaged_router_row_shows() -> None:
    mix = Mix("f32", *CASES["ReGLU"])
    broken = mix.numpy.router.weight.copy()  # type: ignore[union-attr]
    broken[2] = np.nan
    mix.native = replace(mix.native, router=Linear(stored("f32", broken)[0], None))
    y, _ = mix.run(cpu(ISAS[0]), normal(5, 3, DIM), normal(6, 3, DIM))
    assert np.isnan(y).all()


# ---- predictors


def predicting(mix: Mix, hot: int) -> None:
    """Sign predictors of all experts in one, as `train` makes them; a third of the neurons is predicted."""
    n = EXPERTS * NEURONS
    rng = np.random.default_rng(4)
    bits = np.packbits(rng.standard_normal((n, DIM)) > 0, axis=1, bitorder="little")
    p = LayerPredictor("sign", None, None, bits, np.full(n, 4, np.float32), hot, EXPERTS)
    spec = replace(mix.spec, n_layers=1, dim=DIM, ffn_dim=NEURONS)
    stored_weights = Weights(None, None, (mix.native,), None, None)  # type: ignore[arg-type]
    mix.native = weights.with_predictors(stored_weights, Predictors.of(spec, [p])).layers[0]
    each = tuple(f.with_part(replace(f.part, predictor=p.expert(e))) for e, f in enumerate(mix.numpy.experts))
    mix.numpy = replace(mix.numpy, experts=each)


@pytest.mark.parametrize("hot", (0, 32, NEURONS))
def test_each_expert_asks_its_own_part_of_the_predictor(hot: int) -> None:
    mix = Mix("f32", *CASES["dReLU"])
    predicting(mix, hot)
    for tokens in (1, 2, 4):
        x, h = normal(5, tokens, DIM), normal(6, tokens, DIM)
        y, stats = mix.run(cpu(ISAS[0]), x, h, "predict")
        wanted, truth = mix.run(reference, x, h, "predict")
        assert nmse(y - x, wanted - x) <= F32_NMSE
        assert (stats.predicted, stats.active, stats.rows) == (truth.predicted, truth.active, truth.rows)
        everything = same_bits(y, mix.run(cpu(ISAS[0]), x, h)[0])
        assert everything == (hot == NEURONS)


def test_a_prompt_is_not_guessed_where_an_expert_gets_few_of_its_tokens() -> None:
    mix = Mix("f32", *CASES["dReLU"])
    predicting(mix, 0)
    x, h = normal(5, 6, DIM), normal(6, 6, DIM)  # at most four of six go to most experts
    assert same_bits(mix.run(cpu(ISAS[0]), x, h, "predict")[0], mix.run(cpu(ISAS[0]), x, h)[0])
    assert same_bits(mix.run(reference, x, h, "predict")[0], mix.run(reference, x, h)[0])


# ---- configs and files


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_twins.write("mixtral", tmp_path_factory.mktemp("moe") / "mixtral")


BAD_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "more chosen than there are": ({"num_experts_per_tok": 5}, BadFile, "n_experts_active is more"),
    "none chosen": ({"num_experts_per_tok": 0}, BadFile, "num_experts_per_tok"),
    "no experts": ({"num_local_experts": None}, BadFile, "num_local_experts"),
    "biases": ({"attention_bias": True}, Unsupported, "attention_bias"),
    "a shared expert": ({"shared_expert_intermediate_size": 64}, Unsupported, "shared_expert"),
    "dReLU of SiLU": (
        {"architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral"},
        Unsupported,
        "relu twice",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_is_not_understood_is_refused(case: str, mixtral: Path) -> None:
    changes, error, said = BAD_CONFIGS[case]
    config = json.loads((mixtral / "config.json").read_text()) | changes
    with pytest.raises(error, match=said):
        families.parse_config(config, None, "config.json")


def test_a_missing_expert_is_named(mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text()) | {"num_local_experts": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(mixtral / "model.safetensors")
    with pytest.raises(BadFile, match=r"(experts\.4\.w1.weight is missing|gate.weight is \(4, 64\))"):
        pack(tmp_path, tmp_path / "out", "f32")


def test_the_first_files_of_mixtral_had_a_tensor_an_expert(mixtral: Path, tmp_path: Path) -> None:
    paths = [gguf_twins.write(mixtral, tmp_path / f"{apart}.gguf", apart=apart) for apart in (False, True)]
    for path in paths:
        pack(path, path.with_suffix(".pack"))
    packed = [Pack.open(path.with_suffix(".pack")) for path in paths]
    assert packed[0].spec == packed[1].spec and packed[0].spec.n_experts == 4
    assert packed[0].weights_path.read_bytes() == packed[1].weights_path.read_bytes()
    assert "blk.0.ffn_up.3.weight" in gguf_twins.tensors_of(mixtral, False, apart=True)


@pytest.mark.parametrize("format", ("q4_0", "f16"))
def test_a_mixture_exported_and_imported_again_is_the_same(format: str, tmp_path: Path) -> None:
    made = test_synth.make(tmp_path, "mixtral-8x7b", format)
    to_gguf.write_gguf(made, tmp_path / "m.gguf")
    cost = pack(tmp_path / "m.gguf", tmp_path / "again")
    again = Pack.open(tmp_path / "again")
    assert cost is not None and cost.converted == 0 and again.tensors == made.tensors
    assert again.weights_path.read_bytes() == made.weights_path.read_bytes()


def test_relu_experts_have_no_gguf(tmp_path: Path) -> None:
    made = test_synth.make(tmp_path, "turbosparse-mixtral")
    with pytest.raises(Unsupported, match="mixtures of experts with SiLU"):
        to_gguf.write_gguf(made, tmp_path / "m.gguf")


# ---- sizes


def test_a_token_reads_the_experts_it_goes_to(tmp_path: Path) -> None:
    made = test_synth.make(tmp_path, "mixtral-8x7b", "q8_0")
    told, s = inspect(made), made.spec
    experts = sum(told["parts"][role]["bytes"] for role in ("gate", "up", "down"))
    assert told["parts"]["router"]["bytes"] == s.n_layers * 4 * s.n_experts * s.dim
    fixed = told["bytes_per_token_dense"] - experts * s.n_experts_active // s.n_experts
    rest = sum(told["parts"][role]["bytes"] for role in ("attention", "norm", "router", "head"))
    assert fixed == rest + told["parts"]["embed"]["bytes"] // s.vocab_size


def test_mixtral_has_its_size() -> None:
    for name, sparse in (("mixtral-8x7b", False), ("turbosparse-mixtral", True)):
        _, spec, mapping = synthetic.read_shape(name)
        held = {
            n: t for n, t in expected_tensors(spec, "q4_0").items() if not t.optional or n in mapping.tensors
        }
        assert sum(t.parameters for t in held.values()) / 1e9 == pytest.approx(46.70, rel=1e-3)
        assert sizes_of(spec, held, "q4_0").weights_bytes / 1e9 == pytest.approx(26.3, rel=0.01)
        assert (spec.n_experts, spec.n_experts_active, spec.sparse) == (8, 2, sparse)


# ---- synth, profile, train


@pytest.mark.parametrize("shape", ("mixtral-8x7b", "turbosparse-mixtral", "smallthinker-4b"))
def test_planted_neurons_are_active_within_the_chosen_experts(shape: str, tmp_path: Path) -> None:
    made = test_synth.make(tmp_path, shape, active=0.15, skew=0.3)
    s, loaded = made.spec, weights.load(made, threads=2)
    truth = np.load(made.path / synthetic.TRUTH)["activity"]
    assert truth.shape == (s.n_layers, s.n_experts, s.ffn_dim)
    assert truth.mean() == pytest.approx(0.15 * s.n_experts_active / s.n_experts, rel=1e-3)
    ids = np.random.default_rng(5).integers(0, s.vocab_size, 512).astype(np.int32)
    worker = ProfileWorker.on_cpu(s, loaded.weights, ids[:0], 512, 2, [])
    counts = worker.count(ids, np.empty(0, np.int64), threading.Event()).counts[:, 0] / 512
    assert counts.mean() == pytest.approx(truth.mean(), rel=0.12)
    for layer in range(s.n_layers):
        assert np.corrcoef(counts[layer], truth[layer].ravel())[0, 1] > 0.75
    loads = counts.reshape(s.n_layers, s.n_experts, -1).mean(axis=2) / truth.mean()
    assert loads.min() > 0.4 and loads.max() < 2  # no expert is left out


def test_skipping_within_experts_of_a_router_before_attention_changes_no_bit(tmp_path: Path) -> None:
    """Of 0.4 of the chosen experts' neurons that are active, as SmallThinker's makers found."""
    made = test_synth.make(tmp_path, "smallthinker-4b", "q4_0", active=0.4, skew=0.55)
    loaded, ids, hashes = weights.load(made, threads=2), [i * 7 % 512 for i in range(40)], set()
    for sparsity, chunk in (("exact", 64), ("off", 64), ("exact", 7)):
        settings = EngineSettings(context=64, max_batch=1, sparsity=sparsity, prefill_chunk=chunk)
        engine = Engine(made.spec, loaded.weights, loaded.ops, settings)
        request = engine.submit(ids, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        while engine.step():
            pass
        figures = request.completion().figures
        hashes.add(figures.logits_hash)
    assert len(hashes) == 1
    assert figures.active_fraction is not None and 0.1 < figures.active_fraction < 0.25  # planted: 0.15


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small TurboSparse-Mixtral in order of hotness, with samples."""
    where = tmp_path_factory.mktemp("profiled")
    small = {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 320}
    made = test_synth.make(where, "turbosparse-mixtral", "f32", active=0.15, skew=0.3, **small)
    argv = ["profile", made.path, "--tokens", "1024", "--samples", "384", "--ctx", "256", "-q"]
    assert main.main([str(a) for a in argv]) == 0
    return made.path


def test_a_neuron_counts_where_its_expert_was_chosen(profiled: Path) -> None:
    found, s = open_profile(Pack.open(profiled)), Pack.open(profiled).spec
    assert found is not None
    assert [c.shape for c in found.counts] == [(len(BUCKETS), s.n_experts, s.ffn_dim)] * s.n_layers
    for layer, c in enumerate(found.counts):
        assert c[0].mean() / found.windows[0] == pytest.approx(0.15 * 2 / 4, rel=0.15)
        assert (np.diff(c[0], axis=1) <= 0).all()  # hottest first, within each expert
        samples = open_samples(Pack.open(profiled))
        assert samples is not None
        with samples:
            a = fits.layer_samples(Pack.open(profiled), layer, samples.layer(layer))
        assert a.chosen is not None and (a.chosen.sum(axis=1) == s.n_experts_active).mean() > 0.99
        assert a.chosen[a.token, a.neuron // s.ffn_dim].all()


@pytest.mark.slow
def test_predictors_are_asked_by_the_chosen_experts_and_pay(
    profiled: Path, thermocline: Thermocline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "_ranks", lambda *about: [96])  # what was planted, and the moods
    bounds = ("--max-kld", "0.05", "--max-ppl", "5", "--ctx", "64", "--limit", "2")
    ran = thermocline("train", profiled, "--kind", "svd", *bounds, "--json", "-q")
    assert ran.code == 0, ran.err
    said, s = json.loads(ran.out), Pack.open(profiled).spec
    assert said["written"] and said["ffn_bytes_per_token"] < said["ffn_bytes_per_token_exact"]
    gate = 4 * s.dim
    assert all(
        x["bytes_exact"] == pytest.approx(s.n_experts_active * s.ffn_dim * gate) for x in said["layers"]
    )
    with open_predictors(Pack.open(profiled)) as predictors:  # type: ignore[union-attr]
        loaded = weights.load(Pack.open(profiled), threads=2, predictors=predictors)
    engine = Engine(s, loaded.weights, loaded.ops, EngineSettings(context=64, sparsity="predict"))
    request = engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    while engine.step():
        pass
    predicted = request.completion().figures.predicted_fraction
    assert predicted is not None and predicted < 0.9 * s.n_experts_active / s.n_experts
    assert predicted == pytest.approx(np.mean([x["predicted"] for x in said["layers"]]), rel=0.4)


def test_thresholds_are_found_among_the_tokens_that_ask() -> None:
    """Neurons of an expert calibrated with its own tokens, as if there were no others."""
    rng = np.random.default_rng(0)
    n, experts, each = 90, 3, 4
    chosen = rng.random((n, experts)) < 0.5
    chosen[:, 2] = False  # nobody went there
    mass = np.maximum(rng.standard_normal((n, experts * each)), 0).astype(np.float32)
    mass *= np.repeat(chosen, each, axis=1)
    token, neuron = np.nonzero(mass)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(token, minlength=n))])
    x = rng.standard_normal((n, 8)).astype(np.float32)
    a = LayerSamples(x, indptr, neuron, mass[token, neuron], experts * each, chosen)
    scores = (mass + rng.standard_normal(mass.shape)).astype(np.float32)
    scores[~np.repeat(chosen, each, axis=1)] = 1e6  # of others: must not matter
    found = calibrate.curves(lambda begin, end: scores[:, begin:end], a)
    assert np.isinf(found.threshold[:, 2 * each :]).all() and (found.predicted[:, 2 * each :] == 0).all()
    energy = (mass.astype(np.float64) ** 2).sum()
    for i in range(2 * each):
        mine = chosen[:, i // each]
        for price in (0, calibrate.TYPICAL):
            on = mine & (scores[:, i] >= found.threshold[price, i])
            assert found.predicted[price, i] == pytest.approx(on.mean())
            missed = (mass[~on, i].astype(np.float64) ** 2).sum() / energy
            assert found.missed[price, i] == pytest.approx(missed, abs=1e-6)
    best = calibrate.choose_operating_point(
        found, calibrate.Costs(first=10, ask=3, gate=100), calibrate.TYPICAL
    )
    share, places = np.repeat(chosen.mean(axis=0), each), np.tile(np.arange(each), experts)
    hot = places < best.hot
    read = 10 + (share * 100)[hot].sum() + (share * 3 + found.predicted[calibrate.TYPICAL] * 100)[~hot].sum()
    assert best.bytes == pytest.approx(read, rel=1e-5)


# ---- plan


def test_a_plan_counts_the_experts_a_step_goes_to() -> None:
    def us(shape: str, sparsity: str, batch: int = 1) -> float:
        spec, sizes = test_plan.model(shape, n_layers=4)
        each = np.full(spec.n_experts * spec.ffn_dim, 0.1 * spec.n_experts_active / spec.n_experts)
        heat = hotness.independent([each] * 4, "flat", measured=False, key=lambda layer: 0)
        ask = {"context": 64, "sparsity": sparsity, "batch": batch}
        return test_plan.made(spec, sizes, heat, test_plan.CPU_ONLY, **ask).predicted[0].cpu_us

    # Weights of attention, an expert, the head. A token goes to two experts, four to 1 - (3/4)^4 of them.
    attention, expert, head = 41.9e6, 176.2e6, 131.1e6
    two, many = (4 * (attention + n * expert) + head for n in (2, 8 * (1 - 0.75**4)))
    dense = us("mixtral-8x7b", "exact")
    one = 4 * (attention + expert) + head
    assert dense / us("mistral-7b", "exact") == pytest.approx(two / one, rel=0.05)
    assert us("mixtral-8x7b", "exact", 4) / dense == pytest.approx(many / two, rel=0.05)
    # dReLU: a third of an expert are gates, all read; of the rest a tenth.
    slower = cost.MATRIX_SHARE / cost.BUNDLE_SHARE
    saved = us("turbosparse-mixtral", "off") - us("turbosparse-mixtral", "exact")
    assert saved / dense == pytest.approx(0.9 * slower * 4 * 2 * expert * 2 / 3 / two, rel=0.05)
