"""Layers whose neurons are on two GPUs and the CPU: what one GPU says that holds both GPUs' neurons.

The GPUs are stand-ins, each with queues of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import placements
import pytest
import test_gpu
import test_gpu_moe
import test_synth
from test_disk_tier import small_buffers
from test_gpu import Counting, generated, gpu_ops, logits, slowly, stand_in, storage
from test_gpu_disk import arranged, small_staging
from test_moe_disk import EXPERTS
from test_options import SPEC, TOKENS, nmse

from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import BLOCK
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import DeviceFailure
from thermocline.model.spec import ModelSpec
from thermocline.ops import cuda, device_sizes
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_sizes import StepLimits
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import CPU, FFNStats
from thermocline.ops.kernels import torch_kernels
from thermocline.pack import predictor
from thermocline.pack.checksums import open_checksums
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement, gpu
from thermocline.session import gpu_weights, weights

pytestmark = pytest.mark.oracle

__all__ = ["small_buffers", "small_staging", "stand_in"]  # fixtures
Making = Callable[..., Pack]
# NMSE of sums that are added up in another order: 1.4e-10 was seen where torch multiplies on Sapphire Rapids.
SAME = 1e-9


@pytest.fixture
def other() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.close()


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictors in f32.

    A matrix in int8 takes its input in int8. A number near the middle between two integers goes to either of
    them when a sum before it is added up in another order; that is a step of 1/127, and can name another
    neuron. f32 moves scores by 1e-7, so the same neurons are named, whatever the order.
    """
    monkeypatch.setattr(predictor, "STORED", "f32")


def two_ops(devices: Sequence[StandIn], spec: ModelSpec, send_from: int = 1 << 31) -> GpuOps:
    limits = StepLimits(TOKENS + 8, TOKENS, spec.max_context, BLOCK, 32)
    return GpuOps(devices, torch_kernels, CpuOps(2), spec, limits, send_from)


# ---- models of all kinds of neurons


def bamboo_pack(path: Path, format: str, **changes: Any) -> Pack:
    """dReLU: up goes through ReLU, too."""
    small = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64, "sliding_window": 64,
    }  # fmt: skip
    return test_synth.make(path, "bamboo-7b", format, active=0.15, rank=32, **(small | changes))


MODELS: dict[str, Making] = {
    "ReLU": test_gpu.pack_of,
    "ungated": test_gpu.opt_pack,
    "dReLU": bamboo_pack,
    "mixture": test_gpu_moe.pack_of,
}


def scores(spec: ModelSpec) -> Predictors:
    """Random ones, which name about half."""
    rng = np.random.default_rng(3)
    first = rng.standard_normal((32, spec.dim), dtype=np.float32)
    second = rng.standard_normal((spec.ffn_dim, 32), dtype=np.float32)
    one = LayerPredictor("svd", first, second, None, np.zeros(spec.ffn_dim, np.float32), 40)
    return Predictors.of(spec, [one] * spec.n_layers)


def signs(spec: ModelSpec, hot: int = 40) -> Predictors:
    """Likewise; the same neurons wherever they are asked, but for inputs that are nearly 0."""
    rng, n = np.random.default_rng(3), spec.n_experts * spec.ffn_dim
    bits = rng.integers(0, 256, (n, spec.dim // 8), dtype=np.uint8)
    zero = np.zeros(n, np.float32)
    one = LayerPredictor("sign", None, None, bits, zero, hot, spec.n_experts)
    return Predictors.of(spec, [one] * spec.n_layers)


# Of each layer (neurons on the first GPU, on the second), in 32nds of an FFN's; the CPU has the others.
PROPORTIONS = {
    "some on each": [(3, 2), (1, 7), (5, 1)],
    "none on the CPU": [(16, 16), (31, 1), (1, 31)],
    "one GPU alone and the CPU": [(0, 5), (6, 0), (0, 1)],
    "one device has all": [(0, 32), (32, 0), (0, 0)],
}


def divided(spec: ModelSpec, shares: Sequence[tuple[int, int]], **how: bool) -> tuple[Placement, Placement]:
    """(on two GPUs, the same neurons on one)"""
    unit, predictor, attention = spec.ffn_dim // 32, how.get("predictor", True), how.get("attention", True)

    def layers(counts: Iterator[tuple[int, ...]]) -> tuple[LayerPlacement, ...]:
        return tuple(placements.layer(spec, attention or not i, predictor, *n) for i, n in enumerate(counts))

    head = gpu(0) if attention else CPU
    two = Placement(layers((unit * a, unit * b) for a, b in shares), head)
    return two, Placement(layers((unit * (a + b),) for a, b in shares), head)


def in_32nds(make: Making, path: Path, format: str = "f32") -> Pack:
    """With neurons that bits of 32 divide."""
    name = "ffn_dim" if make is test_gpu.opt_pack else "intermediate_size"
    return make(path, format, **{name: 1024})


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("proportion", PROPORTIONS)
@pytest.mark.parametrize("sparsity", ["exact", "predict"])
@pytest.mark.parametrize("model", MODELS)
def test_two_gpus_say_what_one_says_with_their_neurons(
    model: str, sparsity: str, proportion: str, tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    pack = in_32nds(MODELS[model], tmp_path)
    guess = signs if model == "mixture" else scores
    found = guess(pack.spec) if sparsity == "predict" else None
    both, alone = divided(pack.spec, PROPORTIONS[proportion])
    devices = (stand_in, other)
    one, two = gpu_ops(stand_in, pack.spec, rank=32), two_ops(devices, pack.spec)
    held = gpu_weights.load(pack, alone, (stand_in,), one.cpu, predictors=found)
    parted = gpu_weights.load(pack, both, devices, two.cpu, predictors=found)
    for chunk in (1, 3, TOKENS):
        one.forget()  # recordings are of one cache
        counted, stats = FFNStats(), FFNStats()
        truth = logits(pack.spec, held, one, alone, chunk, sparsity=sparsity, stats=counted)
        y = logits(pack.spec, parted, two, both, chunk, sparsity=sparsity, stats=stats)
        assert nmse(y, truth) < SAME, chunk
        assert stats == counted


def answers(pack: Pack, made: Any, ops: Any, sparsity: str, **more: Any) -> list[list[int]]:
    """As test_gpu's of requests in company; alone where neurons are guessed, which a step's tokens share."""
    if sparsity == "exact":
        return generated(pack, made, ops, sparsity, **more)
    engine = Engine(pack.spec, made, ops, EngineSettings(64, 1, sparsity), **more)
    params = SamplingParams(max_tokens=12, temperature=0)
    found = []
    for n in (20, 5):
        request = engine.submit(range(3, n), params)
        while engine.step():
            pass
        assert request.error is None
        found.append(request.ids)
    return found


@pytest.mark.parametrize("sparsity", ["exact", "predict"])
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_the_cpu(
    model: str, sparsity: str, tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    """With predictors that name half of the neurons: the same half, wherever they are."""
    pack, devices = in_32nds(MODELS[model], tmp_path), (stand_in, other)
    predicted = sparsity == "predict"
    for shares in PROPORTIONS.values():
        places, _ = divided(pack.spec, shares)
        found = cpus = signs(pack.spec) if predicted else None
        if predicted and pack.spec.n_experts > 1:  # GPUs compute theirs unasked: as if they were hot
            places, _ = divided(pack.spec, [(6, 2)] * 3)
            cpus = signs(pack.spec, pack.spec.ffn_dim // 4)
        whole = weights.load(pack, threads=2, predictors=cpus)
        truth = answers(pack, whole.weights, whole.ops, sparsity)
        ops = two_ops(devices, pack.spec)
        made = gpu_weights.load(pack, places, devices, ops.cpu, predictors=found)
        assert answers(pack, made, ops, sparsity, storage=storage(places)) == truth, shares


@pytest.mark.parametrize("format", ["f16", "q4_0"])
def test_rows_of_any_format_go_where_they_belong(
    format: str, tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    """Also where the first layer's attention and the others' are on either side, and the head is in RAM."""
    pack, devices = in_32nds(test_gpu.opt_pack, tmp_path, format), (stand_in, other)
    both, alone = divided(pack.spec, [(3, 2), (16, 16), (0, 9)], predictor=False, attention=False)
    one, two = gpu_ops(stand_in, pack.spec), two_ops(devices, pack.spec)
    held = gpu_weights.load(pack, alone, (stand_in,), one.cpu)
    parted = gpu_weights.load(pack, both, devices, two.cpu)
    truth = logits(pack.spec, held, one, alone, 5)
    rounding = SAME if format == "f16" else 2e-4  # of the CPU's activations to int8
    assert nmse(logits(pack.spec, parted, two, both, 5), truth) < rounding


@pytest.mark.usefixtures("unrounded")
def test_the_hottest_neurons_may_be_on_the_second_gpu(
    tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    pack, devices = in_32nds(test_gpu.pack_of, tmp_path), (stand_in, other)
    for sparsity in ("exact", "predict"):
        found = scores(pack.spec) if sparsity == "predict" else None
        ranges = NeuronRange(gpu(1), 96), NeuronRange(gpu(0), 160), NeuronRange(CPU, 768)
        both = Placement((LayerPlacement(gpu(0), gpu(0), ranges),) * 3, gpu(0))
        alone = placements.every(pack.spec, True, True, 256)
        one, two = gpu_ops(stand_in, pack.spec, rank=32), two_ops(devices, pack.spec)
        held = gpu_weights.load(pack, alone, (stand_in,), one.cpu, predictors=found)
        parted = gpu_weights.load(pack, both, devices, two.cpu, predictors=found)
        truth = logits(pack.spec, held, one, alone, 3, sparsity=sparsity)
        assert nmse(logits(pack.spec, parted, two, both, 3, sparsity=sparsity), truth) < SAME


def test_an_ffn_that_cannot_be_divided_may_be_on_the_second_gpu(
    tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    pack, devices = test_gpu.pack_of(tmp_path, "f32", hidden_act="silu"), (stand_in, other)
    whole = weights.load(pack, threads=2)
    each = tuple(placements.layer(pack.spec, True, False, *n) for n in ((0, 512), (512, 0), (0, 0)))
    places, ops = Placement(each, gpu(0)), two_ops(devices, pack.spec)
    made = gpu_weights.load(pack, places, devices, ops.cpu)
    for chunk in (1, TOKENS):  # of further GPUs nothing is recorded
        counted, stats = FFNStats(), FFNStats()
        truth = logits(pack.spec, whole.weights, whole.ops, None, chunk, stats=counted)
        assert nmse(logits(pack.spec, made, ops, places, chunk, stats=stats), truth) < 1e-9
        assert stats == counted


@pytest.mark.parametrize("model", ["ReLU", "mixture"])
def test_a_prompts_neurons_in_ram_are_sent_beside_another_gpus(
    model: str, tmp_path: Path, stand_in: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, devices = in_32nds(MODELS[model], tmp_path), (stand_in, other)
    gate, bundle = (pack.tensors[f"layers.0.{part}"].stride for part in ("gate.weight", "bundle"))
    monkeypatch.setattr(device_sizes, "PIECE_BYTES", 96 * (gate + bundle))  # several pieces
    both, alone = divided(pack.spec, [(3, 2), (0, 7), (5, 0)])
    one, two = gpu_ops(stand_in, pack.spec), two_ops(devices, pack.spec, send_from=7)
    held = gpu_weights.load(pack, alone, (stand_in,), one.cpu)
    parted = gpu_weights.load(pack, both, devices, two.cpu)
    calls: list[Any] = []
    call = StandIn.call

    def counting(self: StandIn, task: Any) -> None:
        calls.append(task)
        call(self, task)

    monkeypatch.setattr(StandIn, "call", counting)
    counted, stats = FFNStats(), FFNStats()
    truth = logits(pack.spec, held, one, alone, 20, stats=counted)
    asked = len(calls)
    assert nmse(logits(pack.spec, parted, two, both, 20, stats=stats), truth) < SAME
    assert asked == 2 * 3 and len(calls) == asked, "all that the CPU had was sent"
    assert replace(stats, rows=0) == replace(counted, rows=0)


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("model", ["ReLU", "ungated", "mixture"])
def test_what_comes_from_disk_changes_no_bit(
    model: str, predicted: bool, tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    pack, devices = MODELS[model](tmp_path, "f16", **wide(model)), (stand_in, other)
    found = signs(pack.spec) if predicted else None
    how = {"sparsity": "predict" if predicted else "exact"}
    places, _ = divided(pack.spec, [(1, 1), (0, 2), (16, 16)])
    for chunk in (1, 3):
        want_stats, stats = FFNStats(), FFNStats()
        ops = two_ops(devices, pack.spec)
        whole = gpu_weights.load(pack, places, devices, ops.cpu, predictors=found)
        want = logits(pack.spec, whole, ops, places, chunk, **how, stats=want_stats)
        ops = two_ops(devices, pack.spec)
        a, records = arranged(pack, places, found), open_checksums(pack)
        some, disk = gpu_weights.load_in_part(pack, places, a, records, devices, ops.cpu, predictors=found)
        got = logits(pack.spec, some, ops, places, chunk, **how, stats=stats)
        assert np.array_equal(got, want) and stats == want_stats
        assert disk.counts().missed > 0


def wide(model: str) -> dict[str, int]:
    return {"ffn_dim" if model == "ungated" else "intermediate_size": 1024 if model == "mixture" else 2048}


# ---- a device of its own


def some(pack: Pack, devices: Sequence[StandIn]) -> tuple[Any, GpuOps, Placement]:
    places, _ = divided(pack.spec, [(3, 2), (0, 7), (5, 0)])
    ops = two_ops(devices, pack.spec)
    return gpu_weights.load(pack, places, devices, ops.cpu), ops, places


def test_each_gpu_computes_its_own_neurons_beside_the_others(
    tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    pack = in_32nds(test_gpu.pack_of, tmp_path)
    made, ops, places = some(pack, (stand_in, other))
    stand_in.watched, other.watched = [], []
    logits(pack.spec, made, ops, places, TOKENS)
    ran = [[s.name for s in d.watched or []] for d in (stand_in, other)]
    assert [names.count("gate_up") for names in ran] == [2, 2]  # layers in which they have neurons
    assert "attention" not in ran[1] and not ops.recorded


def test_buffers_are_what_the_planner_counts(tmp_path: Path) -> None:
    for spec in (SPEC, replace(SPEC, activation="silu"), replace(SPEC, n_experts=EXPERTS)):
        devices, limits = [Counting() for _ in range(3)], StepLimits(40, 3, 64, BLOCK, 32)
        GpuOps(devices, torch_kernels, CpuOps(1), spec, limits)
        side = device_sizes.side_device_bytes(spec, limits)
        assert [d.there for d in devices] == [device_sizes.device_bytes(spec, limits, 3), side, side]
        assert sum(d.here for d in devices) == device_sizes.host_bytes(spec, limits, 3)
        for d in devices:
            d.close()


def test_a_second_gpu_that_fails_is_reported_and_over_then(
    tmp_path: Path, stand_in: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = in_32nds(test_gpu.pack_of, tmp_path)
    made, ops, places = some(pack, (stand_in, other))
    truth = logits(pack.spec, made, ops, places, 1)
    queue = ops._side[0].queue

    def broken(*args: Any) -> None:
        raise RuntimeError("no memory there")

    with monkeypatch.context() as patch, pytest.raises(DeviceFailure, match="no memory there"):
        patch.setattr(queue, "kernels", type("Broken", (), {"gate_up": broken, "down": broken}))
        logits(pack.spec, made, ops, places, 1)
    assert np.array_equal(logits(pack.spec, made, ops, places, 1), truth)


def test_a_step_that_was_given_up_does_not_disturb_the_next(
    tmp_path: Path, stand_in: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a step is awaited, or while a part is queued."""
    pack = in_32nds(test_gpu.pack_of, tmp_path)
    made, ops, places = some(pack, (stand_in, other))
    first, again = FFNStats(), FFNStats()
    truth = logits(pack.spec, made, ops, places, 1, stats=first)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    for owner, name in ((StandIn, "wait"), (ops._side[0], "start"), (ops._side[0], "finish")):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            patch.setattr(torch_kernels, "norm", slowly(torch_kernels.norm))
            logits(pack.spec, made, ops, places, 1)
    assert np.array_equal(logits(pack.spec, made, ops, places, 1, stats=again), truth)
    assert again == first


@pytest.mark.parametrize("broken", ["", "wait_event"])
def test_two_cards_of_the_driver_wait_for_each_other(
    broken: str, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Cuda`'s Python on cards that do everything at once; a failure is a DeviceFailure there, too."""
    pack, card = in_32nds(test_gpu.pack_of, tmp_path), fake_cuda.Card(count=2)
    both, alone = divided(pack.spec, [(3, 2), (0, 7), (5, 1)])
    one = gpu_ops(stand_in, pack.spec)
    held = gpu_weights.load(pack, alone, (stand_in,), one.cpu)
    truth = logits(pack.spec, held, one, alone, 3)
    fake_cuda.install(monkeypatch, card)
    devices = cuda.Cuda(0), cuda.Cuda(1)
    two = two_ops(devices, pack.spec)  # type: ignore[arg-type]
    parted = gpu_weights.load(pack, both, devices, two.cpu)
    assert nmse(logits(pack.spec, parted, two, both, 3), truth) < SAME
    assert card.faults.seen["wait_event"] == 14 * 3 * 2  # steps, layers with two GPUs, there and back
    card.faults.set(broken, 5, RuntimeError("CUDA error: invalid resource handle"))
    if broken:
        with pytest.raises(DeviceFailure, match="invalid resource handle"):
            logits(pack.spec, parted, two, both, 3)
    assert nmse(logits(pack.spec, parted, two, both, 3), truth) < SAME
    for device in devices:
        device.close()
