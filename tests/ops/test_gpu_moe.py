"""A mixture's experts on a device, on the CPU beside it, or on both: wherever they are, the same answer.

As test_gpu.py, whose models have one expert.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import placements
import pytest
import test_gpu_disk
import test_moe_disk
import test_plan
import test_synth
import tiny
import torch
from safetensors.numpy import save_file
from test_disk_tier import small_buffers
from test_gpu import generated, gpu_ops, logits, placed, stand_in, storage
from test_gpu_disk import small_staging
from test_moe_disk import EXPERTS, FFN
from test_options import PAIRS, SPEC, TOKENS, natively, nmse, random_weights

from thermocline import LLM, SamplingParams, _native
from thermocline.cli import main
from thermocline.engine.kv_cache import BLOCK
from thermocline.model import activations, quant
from thermocline.model.spec import ModelSpec, Router
from thermocline.ops import device_sizes, interface, reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_sizes import StepLimits, device_bytes
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import FFNStats, Layer, Linear, Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan import hotness
from thermocline.plan.memory import device_limits
from thermocline.plan.placement import Placement
from thermocline.plan.planner import Plan
from thermocline.plan.subject import Subject
from thermocline.session import gpu_tier, gpu_weights, weights

pytestmark = pytest.mark.oracle

__all__ = ["small_buffers", "small_staging", "stand_in"]  # fixtures
ACTIVE = 2
OPTIONS = (  # what an FFN shares with its layer, or is
    "norm", "activation", "activation_threshold", "up_activation", "gated", "norm_order", "post", "parallel",
    "residual_scale",
)  # fmt: skip


def mixture_of(spec: ModelSpec) -> ModelSpec:
    return replace(spec, n_experts=EXPERTS, n_experts_active=ACTIVE)


def random_mixture(spec: ModelSpec, *, biased: bool = False) -> Weights:
    """Experts with nothing in common; `biased`: their gates."""

    def layer(i: int, x: Layer) -> Layer:
        rng = np.random.default_rng(i)

        def matrix(rows: int) -> Any:
            return rng.standard_normal((rows, spec.dim), dtype=np.float32) / np.float32(spec.dim**0.5)

        def expert() -> interface.FFN:
            n = spec.ffn_dim
            bias = rng.standard_normal(n, dtype=np.float32) if biased else None
            up = matrix(n) if spec.gated else None
            down = matrix(n) / 2 if spec.sparse else np.ascontiguousarray(matrix(n).T) / 2
            return interface.FFN.whole(Linear(matrix(n), bias), up, down, None, spec.sparse)

        return replace(
            x, experts=tuple(expert() for _ in range(EXPERTS)), router=Linear(4 * matrix(EXPERTS), None)
        )

    w = random_weights(replace(spec, n_experts=1, n_experts_active=1))
    return replace(w, layers=tuple(layer(i, x) for i, x in enumerate(w.layers)))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_mixture_is_the_same_wherever_its_experts_are(name: str, stand_in: StandIn) -> None:
    """Steps of 1, 5 and 16 tokens are recorded and replayed, of 40 not."""
    spec = mixture_of(PAIRS[name][1])
    random = random_mixture(spec, biased=not spec.gated)
    truth = logits(spec, natively(random), CpuOps(2))
    assert nmse(truth, logits(spec, random, reference)) < 1e-6
    every = placements.whole(spec)
    for at, places in enumerate([every, *(placements.some(spec, s) for s in (1, 2, 3))]):
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, (TOKENS, 16, 5, 1)[at])
        assert nmse(y, truth) < 1e-6, places


def test_a_router_of_another_rule_is_the_same_wherever_its_experts_are(stand_in: StandIn) -> None:
    rule = Router(score="sigmoid", weights="normalised", epsilon=0.01, scale=2.5, biased=True,
                  selection_bias=True, groups=2, groups_kept=1, group_rule="sum2")  # fmt: skip
    spec = replace(mixture_of(SPEC), router=rule)

    def biased(i: int, x: Layer) -> Layer:
        rng = np.random.default_rng(50 + i)
        bias, selection = rng.standard_normal((2, EXPERTS), dtype=np.float32)
        assert x.router is not None
        return replace(x, router=Linear(x.router.weight, bias), selection_bias=selection)

    random = random_mixture(spec)
    random = replace(random, layers=tuple(biased(i, x) for i, x in enumerate(random.layers)))
    truth = logits(spec, natively(random), CpuOps(2))
    assert nmse(truth, logits(spec, random, reference)) < 1e-6
    assert nmse(truth, logits(mixture_of(SPEC), natively(random), CpuOps(2))) > 1e-3
    for places in (placements.whole(spec), placements.some(spec, 1)):
        assert nmse(logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, 5), truth) < 1e-6


@pytest.mark.parametrize("read", ["own_norm", "layer_input"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_router_of_another_input_is_the_same_wherever_its_layer_is(
    read: str, activation: str, stand_in: StandIn
) -> None:
    """Before attention, which may be elsewhere; or under a norm of its own, with a number for each expert."""
    scaled = read == "own_norm"
    rule = Router(weights="normalised", expert_scale=scaled)
    spec = replace(mixture_of(SPEC), activation=activation, router=rule, router_input=read)

    def own(i: int, x: Layer) -> Layer:
        rng = np.random.default_rng(50 + i)
        weight, scale = rng.standard_normal(spec.dim, np.float32), rng.standard_normal(EXPERTS, np.float32)
        return replace(x, router_norm=interface.Norm(weight, None), expert_scale=scale) if scaled else x

    random = random_mixture(spec)
    random = replace(random, layers=tuple(own(i, x) for i, x in enumerate(random.layers)))
    truth = logits(spec, natively(random), CpuOps(2))
    assert nmse(truth, logits(spec, random, reference)) < 1e-6
    plain = replace(spec, router=Router(weights="normalised"), router_input="ffn_norm")
    assert nmse(truth, logits(plain, random_mixture(plain), reference)) > 1e-3
    every = placements.whole(spec)
    for at, places in enumerate([every, *(placements.some(spec, s) for s in (1, 2, 3, 4))]):
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, (TOKENS, 16, 5, 1, 1)[at])
        assert nmse(y, truth) < 1e-6, places


@pytest.mark.parametrize("option", ["alone", "gate", "norms", "ungated"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_shared_ffn_is_the_same_wherever_its_layer_is(
    option: str, activation: str, stand_in: StandIn
) -> None:
    """Beside experts that are on the device, on both sides, or on the CPU."""
    spec = replace(mixture_of(SPEC), activation=activation, shared_dim=56, gated=option != "ungated")
    spec = replace(spec, shared_gate=option == "gate", shared_norms=option == "norms")
    random = random_mixture(spec)
    random = replace(random, layers=tuple(with_shared(spec, i, x) for i, x in enumerate(random.layers)))
    truth = logits(spec, natively(random), CpuOps(2))
    assert nmse(truth, logits(spec, random, reference)) < 1e-6
    alone = replace(spec, shared_dim=0, shared_gate=False, shared_norms=False)
    assert nmse(truth, logits(alone, random_mixture(alone), reference)) > 1e-3
    every = placements.whole(spec)
    for at, places in enumerate([every, *(placements.some(spec, s) for s in (1, 2, 3))]):
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, (TOKENS, 16, 5, 1)[at])
        assert nmse(y, truth) < 1e-6, places


def with_shared(spec: ModelSpec, i: int, x: Layer) -> Layer:
    """A mixture's layer with an FFN for every token."""
    rng, d, n = np.random.default_rng(70 + i), spec.dim, spec.shared_dim

    def matrix(rows: int, columns: int) -> Any:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    def norm() -> Any:
        return interface.Norm(1 + matrix(1, d)[0], None) if spec.shared_norms else None

    gate, up, down = matrix(n, d), matrix(n, d), 2 * matrix(d, n)
    shared = interface.FFN.whole(Linear(gate, None), up if spec.gated else None, down, None, False)
    router = 4 * matrix(1, d) if spec.shared_gate else None
    return replace(x, shared=shared, shared_router=router, shared_norm=norm(), shared_post_norm=norm(),
                   experts_post_norm=norm())  # fmt: skip


@pytest.mark.parametrize("up", ["none", "relu"])
def test_counts_are_those_of_the_cpu_whoever_goes_where(up: str, stand_in: StandIn) -> None:
    """Of dReLU `down` reads fewer rows than `up`, which the CPU sees for up to four tokens."""
    spec = replace(mixture_of(SPEC), up_activation=up)
    random = random_mixture(spec)
    native = natively(random)
    for tokens in (1, 3, 20) if up == "none" else (1, 3):
        counted = FFNStats()
        truth = logits(spec, native, CpuOps(2), None, tokens, stats=counted)
        for neurons in (96, 288):
            places = placements.every(spec, True, True, neurons)
            stats = FFNStats()
            y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, tokens, stats=stats)
            assert nmse(y, truth) < 1e-9
            assert stats == counted, (tokens, neurons)


def test_the_cpus_experts_take_the_devices_word_for_who_goes_where() -> None:
    """More tokens than a native pass has, in buffers with more rows: the router's own shares, and others."""
    spec = replace(mixture_of(SPEC), max_context=512)
    layer, tokens = natively(random_mixture(spec).layers[0]), 300
    ops, rng = CpuOps(2), np.random.default_rng(0)
    x, slot = rng.standard_normal((tokens, spec.dim), dtype=np.float32), _native.StepSlot()
    at = np.arange(tokens, dtype=np.int32)
    slot.set(_native.Step(at, 0 * at, at[None, :16].copy(), BLOCK, 0, None, None))
    bound = ops.bind_experts(spec, layer)

    def with_shares(shares: Any) -> Any:
        y = np.full((tokens + 9, spec.dim), np.nan, np.float32)
        wide = np.full((tokens + 9, EXPERTS), np.nan, np.float32)
        wide[:tokens] = shares
        task = _native.HostTask(ops.native, slot)
        task.zero(y)
        task.mixture(y, np.concatenate([x, y[:9]]), bound, 1, wide)
        task.run()
        task.take()
        assert np.isnan(y[tokens:]).all()
        return y[:tokens]

    own = np.zeros_like(x)
    ops.native.moe_add(own, x, bound, 1)
    shares = activations.route(ops.matmul(layer.router.weight, x, None), ACTIVE)
    assert nmse(with_shares(shares), own) < 1e-10
    other = np.roll(shares, 1, axis=1)
    wanted = np.zeros_like(x)
    rolled = replace(layer, experts=tuple(layer.experts[(e + 1) % EXPERTS] for e in range(EXPERTS)))
    ops.native.moe_add(wanted, x, ops.bind_experts(spec, rolled), 1)
    assert nmse(with_shares(other), wanted) < 1e-10
    task = _native.HostTask(ops.native, slot)
    for shape in ((tokens, EXPERTS - 1), (tokens - 1, EXPERTS)):
        with pytest.raises(ValueError, match="weights has the wrong shape"):
            task.mixture(np.zeros_like(x), x, bound, 1, np.zeros(shape, np.float32))


# ---- packs


def pack_of(path: Path, format: str, **changes: Any) -> Pack:
    small = {
        "hidden_size": 192, "num_hidden_layers": 3, "num_local_experts": EXPERTS, "intermediate_size": 352,
        "max_position_embeddings": 64,
    }  # fmt: skip
    small |= changes
    return test_synth.make(path, "turbosparse-mixtral", format, active=0.15, skew=0.3, rank=32, **small)


def each(pack: Pack, neurons: Sequence[int]) -> Placement:
    """That many of each expert's."""
    layers = tuple(placements.layer(pack.spec, i != 1, False, n) for i, n in enumerate(neurons))
    return Placement(layers, "gpu:0")


@pytest.mark.parametrize(
    "format", [f.name for f in quant.FORMATS.values() if f.block <= 32 and f.name != "bf16"]
)
def test_a_pack_is_split_as_its_places_say(format: str, tmp_path: Path, stand_in: StandIn) -> None:
    """Where the CPU rounds activations to int8, a few tokens go to another expert than they would: most say
    what is right then.
    """
    pack = pack_of(tmp_path, format)
    whole = weights.load(pack, threads=2)
    truth = logits(pack.spec, whole.weights, whole.ops)
    for at, neurons in enumerate([(352, 352, 352), (352, 96, 0), (32, 320, 352), (0, 64, 32)]):
        ops = gpu_ops(stand_in, pack.spec)
        made = gpu_weights.load(pack, each(pack, neurons), (stand_in,), ops.cpu)
        y = logits(pack.spec, made, ops, each(pack, neurons), chunk=(40, 5, 3, 16)[at])
        off = ((y - truth) ** 2).sum(axis=1) / (truth**2).sum(axis=1)
        if quant.FORMATS[format].block == 1:
            assert off.max() < 1e-6, neurons
        else:
            assert np.median(off) < 2e-3, neurons


@pytest.mark.parametrize("format", ["f32", "q4_0"])
def test_experts_are_sent_for_prompts_piece_by_piece(
    format: str, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step of 7 tokens on; shorter ones are the CPU's. Of q4_0 all is then computed as on the GPU."""
    pack = pack_of(tmp_path, format)
    chunk = 7 if format == "f32" else 20
    ops = gpu_ops(stand_in, pack.spec)
    every = gpu_weights.load(pack, each(pack, (352,) * 3), (stand_in,), ops.cpu)
    counted, stats = FFNStats(), FFNStats()
    truth = logits(pack.spec, every, ops, each(pack, (352,) * 3), chunk, stats=counted)
    gate, bundle = (pack.tensors[f"layers.0.{part}"].stride for part in ("gate.weight", "bundle"))
    for neurons in (32, 288):
        monkeypatch.setattr(device_sizes, "PIECE_BYTES", 96 * (gate + bundle))  # an expert in 4 pieces; in 1
        limits = StepLimits(TOKENS, TOKENS, 64, BLOCK)
        sender = GpuOps((stand_in,), torch_kernels, CpuOps(2), pack.spec, limits, send_from=7)
        made = gpu_weights.load(pack, each(pack, (neurons,) * 3), (stand_in,), sender.cpu)
        stats = FFNStats()
        y = logits(pack.spec, made, sender, each(pack, (neurons,) * 3), chunk, stats=stats)
        assert nmse(y, truth) < 1e-9
        if format == "f32":
            assert replace(stats, rows=0) == replace(counted, rows=0)


@pytest.mark.parametrize("kind", ["sign", "svd"])
def test_predictors_stay_with_the_cpus_neurons(kind: str, tmp_path: Path, stand_in: StandIn) -> None:
    """Those on the GPU are computed unasked: as if the predictor took them for hot."""
    pack = pack_of(tmp_path, "f32")
    s, rng = pack.spec, np.random.default_rng(3)
    n = EXPERTS * s.ffn_dim
    bits = rng.integers(0, 256, (n, s.dim // 8), dtype=np.uint8)
    first, second = (rng.standard_normal(shape, dtype=np.float32) for shape in ((32, s.dim), (n, 32)))
    parts: Any = (None, None, bits) if kind == "sign" else (first, second, None)

    def predictors(hot: Sequence[int]) -> Predictors:
        zero = np.zeros(n, np.float32)
        return Predictors.of(s, [LayerPredictor(kind, *parts, zero, max(40, h), EXPERTS) for h in hot])

    exact = weights.load(pack, threads=2)
    sure = logits(s, exact.weights, exact.ops, None, 1)
    for neurons, there in (((0, 96, 352), False), ((352, 32, 0), True)):
        whole = weights.load(pack, threads=2, predictors=predictors(neurons))
        counted, stats = FFNStats(), FFNStats()
        truth = logits(s, whole.weights, whole.ops, None, 1, sparsity="predict", stats=counted)
        assert nmse(truth, sure) > 0.01  # what these say matters
        places = each(pack, neurons)
        places = replace(
            places, layers=tuple(replace(x, predictor="gpu:0" if there else "cpu") for x in places.layers)
        )
        ops = gpu_ops(stand_in, s)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu, predictors=predictors((0, 0, 0)))
        y = logits(s, made, ops, places, 1, sparsity="predict", stats=stats)
        assert nmse(y, truth) < 1e-9
        for name in ("neurons", "rows_dense", "gates_dense", "predicted"):
            assert getattr(stats, name) == getattr(counted, name), name
        assert stats.active == pytest.approx(counted.active, rel=1e-3)  # gates near 0
        assert 0 < stats.predictor_bytes <= counted.predictor_bytes


def test_requests_in_company_get_the_tokens_of_the_cpu(tmp_path: Path, stand_in: StandIn) -> None:
    pack = pack_of(tmp_path, "f32")
    whole = weights.load(pack, threads=2)
    truth = generated(pack, whole.weights, whole.ops, "exact")
    places = each(pack, (352, 96, 0))
    ops = gpu_ops(stand_in, pack.spec)
    made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
    assert generated(pack, made, ops, "exact", storage=storage(places)) == truth


def test_experts_may_all_stay_on_the_cpu(tmp_path: Path, stand_in: StandIn) -> None:
    """Mixtral: attention is on the GPU, which asks the router."""
    small = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 96}
    pack = test_synth.make(tmp_path, "mixtral-8x7b", "f32", **small)
    whole = weights.load(pack, threads=2)
    places = placements.every(pack.spec, True, False)
    ops = gpu_ops(stand_in, pack.spec)
    made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
    counted, stats = FFNStats(), FFNStats()
    truth = logits(pack.spec, whole.weights, whole.ops, None, 7, stats=counted)
    assert nmse(logits(pack.spec, made, ops, places, 7, stats=stats), truth) < 1e-9 and stats == counted


@pytest.mark.parametrize("predicted", [False, True])
def test_experts_that_come_from_disk_change_no_bit(
    predicted: bool, tmp_path: Path, stand_in: StandIn
) -> None:
    """Against the same places with the rest in RAM."""
    pack = pack_of(tmp_path, "f16", intermediate_size=1024)
    n, rng = EXPERTS * 1024, np.random.default_rng(3)
    bits = rng.integers(0, 256, (n, pack.spec.dim // 8), dtype=np.uint8)
    signs = LayerPredictor("sign", None, None, bits, np.zeros(n, np.float32), 40, EXPERTS)
    found = Predictors.of(pack.spec, [signs] * 3) if predicted else None
    how, places = {"sparsity": "predict" if predicted else "exact"}, each(pack, (1024, 96, 0))
    for chunk in (1, 3, 20):
        want_stats, stats = FFNStats(), FFNStats()
        ops = gpu_ops(stand_in, pack.spec)
        whole = gpu_weights.load(pack, places, (stand_in,), ops.cpu, predictors=found)
        want = logits(pack.spec, whole, ops, places, chunk, **how, stats=want_stats)
        ops = gpu_ops(stand_in, pack.spec)
        some, disk = test_gpu_disk.in_part(pack, places, ops, found)
        got = logits(pack.spec, some, ops, places, chunk, **how, stats=stats)
        assert np.array_equal(got, want) and stats == want_stats
        assert disk.counts().missed > 0 or chunk == 20  # an expert's part of a prompt comes in order


# ---- plans and sessions


class Counting(StandIn):
    """How much is taken of the device."""

    taken = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = super().zeros(shape, dtype)
        self.taken += made.nbytes
        return made

    pinned = StandIn.zeros


@functools.cache
def heat(spec: ModelSpec) -> hotness.Hotness:
    return hotness.Curve(0.15, 0.35).hotness(spec)


def in_vram(
    gib: float, shape: str = "turbosparse-mixtral", sparsity: str = "exact"
) -> tuple[ModelSpec, Plan]:
    spec, sizes = test_plan.model(shape, n_layers=4)
    return spec, test_plan.made(spec, sizes, heat(spec), test_plan.NO_DISK, vram=gib, sparsity=sparsity)


def test_a_plan_divides_every_expert_alike() -> None:
    spec, whole = in_vram(16)
    assert {x.ram for x in whole.layers} == {0} and whole.share == pytest.approx(1)
    spec, part = in_vram(3)
    counts, neurons = [x.gpu for x in part.layers], spec.n_experts * spec.ffn_dim
    assert all(n % (32 * spec.n_experts) == 0 for n in counts) and any(0 < n < neurons for n in counts)
    assert part.share > 1.2 * sum(counts) / (4 * neurons)  # the hottest of each
    spec, dense = in_vram(16, "mixtral-8x7b")  # down is no row a neuron: experts are whole
    assert {x.gpu for x in dense.layers} == {spec.n_experts * spec.ffn_dim}


def test_a_mixtures_predictor_is_never_on_the_gpu() -> None:
    spec, sizes = test_plan.model("turbosparse-mixtral", n_layers=4)
    sizes = sizes.with_predictors([50 << 20] * 4)
    limits = device_limits(spec, 512, 1, predicted=True)
    assert limits == device_limits(spec, 512, 1, predicted=False)
    for gib in (3, 16):
        p = test_plan.made(spec, sizes, heat(spec), test_plan.NO_DISK, vram=gib, sparsity="predict")
        assert {x.predictor for x in p.layers} == {"ram"} and any(x.gpu for x in p.layers)
        assert p.bytes["gpu"]["buffers"] == device_bytes(spec, limits)


def test_experts_are_sent_for_prompts_that_are_longer() -> None:
    """Each of the CPU's weights multiplies two tokens of eight."""

    def tokens(shape: str) -> int:
        spec, sizes = test_plan.model(shape, n_layers=2)
        return gpu_tier.send_from(test_plan.NO_DISK, cast(Subject, SimpleNamespace(spec=spec, sizes=sizes)))

    assert tokens("turbosparse-mixtral") == pytest.approx(4 * tokens("bamboo-7b"), abs=4)


def test_a_gpu_takes_each_experts_hottest() -> None:
    """Not the hottest of all: an expert that is chosen often has more of those."""
    p = np.array([0.9, 0.8, 0.7, 0.6, 0.3, 0.2, 0.1, 0.05])
    assert hotness.in_turn(p, 2).tolist() == [0.9, 0.3, 0.8, 0.2, 0.7, 0.1, 0.6, 0.05]
    assert hotness.in_turn(p[::-1].copy(), 1).tolist() == p.tolist()


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """test_moe_disk's model, in no order."""
    base = tmp_path_factory.mktemp("tiny")
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": ACTIVE, "intermediate_size": FFN}
    family = {"architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral"}
    hf = tiny.hf_directory(base / "hf", **family, **experts)
    save_file(test_moe_disk.tensors(), hf / "model.safetensors")
    assert main.main(["pack", str(hf), "-o", str(base / "pack"), "--format", "f32", "-q"]) == 0
    return base / "pack"


def test_a_session_divides_a_mixture_and_takes_what_its_plan_says(
    tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU; all of it there; a quarter of the neurons there."""
    params, taken = SamplingParams(max_tokens=16, temperature=0), []
    monkeypatch.setattr("thermocline.ops.device.StandIn", Counting)

    def answers(**how: Any) -> tuple[list[int], Any]:
        with LLM(tiny_mixture, context=64, max_batch=2, threads=2, **how) as llm:
            done = llm.generate("Once upon a time", params)
            device = getattr(llm._open().ops, "device", None)
            taken.append(getattr(device, "taken", 0))
            return done.token_ids, llm.session.plan

    alone, _ = answers(gpu="off")
    whole, plan = answers(gpu="stand-in", vram=1.0)
    assert whole == alone
    assert {(x.attention, x.ram) for x in plan.layers} == {("gpu", 0)}
    less = plan.used("gpu") - plan.bytes["gpu"]["neurons"] * 3 // 4
    divided, part = answers(gpu="stand-in", vram=less / 2**30)
    assert divided == alone
    assert any(0 < x.gpu < EXPERTS * FFN for x in part.layers)
    for found, p in zip(taken[1:], (plan, part), strict=True):
        promised = p.used("gpu") - p.bytes["gpu"]["runtime"]
        assert 0.99 * promised < found <= promised


def test_a_session_has_experts_on_three_tiers(tiny_mixture: Path) -> None:
    with test_gpu_disk.opened(tiny_mixture, gpu="off") as llm:
        want = test_gpu_disk.said(llm)
    vram, ram = test_gpu_disk.budgets(tiny_mixture)
    with test_gpu_disk.opened(tiny_mixture, gpu="stand-in", vram=vram, ram=ram - 0.001) as llm:
        assert llm.session.plan is not None and any(x.gpu for x in llm.session.plan.layers)
        assert llm.memory_bytes <= (ram - 0.001) * 2**30
        assert test_gpu_disk.said(llm) == want
        assert llm.session.store is not None and llm.session.store.counts().missed > 0
