"""Plans: bytes kept to the last one, times from the machine's figures, refusals that say what would fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.cli.commands.plan import plan_text
from thermocline.convert.synthetic import read_shape
from thermocline.convert.synthetic_weights import activities
from thermocline.engine.kv_cache import bytes_for, reserved_bytes
from thermocline.engine.prefill_budget import PREFILL_CHUNK
from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import Tiers, read_tiers, render
from thermocline.model import quant
from thermocline.model.sizes import ModelSizes, sizes_of
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import expected_tensors, place
from thermocline.pack import predictor
from thermocline.pack.activity_profile import Profile
from thermocline.pack.pack import Pack
from thermocline.plan import cost, hotness, planner
from thermocline.plan import place as place_module
from thermocline.plan import subject as subjects
from thermocline.plan.further_gpus import among
from thermocline.plan.hotness import Curve, Hotness
from thermocline.plan.memory import GIB, Needs, fit
from thermocline.plan.place import larger
from thermocline.plan.planner import Plan, plan
from thermocline.plan.problem import Ask, Problem

Run = Callable[..., Any]
HIGH, LOW = read_tiers("rtx4090-i9-13900k"), read_tiers("rtx2080ti-i7-12700k")
CPU_ONLY = dataclasses.replace(HIGH, gpu=None, disk=None)
NO_DISK = dataclasses.replace(HIGH, disk=None)


def model(shape: str, format: str = "q4_0", **changes: Any) -> tuple[ModelSpec, ModelSizes]:
    spec = dataclasses.replace(read_shape(shape)[1], **changes)
    held = {n: t for n, t in expected_tensors(spec, format).items() if not t.optional}
    return spec, sizes_of(spec, held, format)


def relu(layers: int = 8, format: str = "q4_0") -> tuple[ModelSpec, ModelSizes, Hotness]:
    """Some layers of a ReGLU 7B: enough for three tiers."""
    spec, sizes = model("llama-2-7b", format, activation="relu", n_layers=layers)
    return spec, sizes, hotness.assumed(layers, spec.ffn_dim, 0.15, 0.35)


def made(spec: ModelSpec, sizes: ModelSizes, heat: Hotness, tiers: Tiers, **ask: Any) -> Plan:
    vram, ram = (None if (g := ask.pop(k, None)) is None else int(g * GIB) for k in ("vram", "ram"))
    return plan(spec, sizes, heat, tiers, Ask(ask.pop("context", 512), vram_bytes=vram, ram_bytes=ram, **ask))


def used(p: Plan, tier: str, *but: str) -> int:
    return sum(n for part, n in p.bytes[tier].items() if part not in but)


# ---- bytes


@pytest.mark.parametrize("format", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("shape", ["llama-2-7b", "opt-6.7b", "tinyllama-1.1b", "bamboo-7b", "qwen3-8b"])
def test_sizes_add_up_to_the_packs_file(shape: str, format: str) -> None:
    spec = read_shape(shape)[1]
    tensor_specs = expected_tensors(spec, format)
    assert sizes_of(spec, tensor_specs, format).weights_bytes == place(tensor_specs)[1]


def test_a_heads_format_is_measured_where_a_token_meets_few_of_the_other_weights() -> None:
    """Of SmallThinker's weights the head is a fiftieth; of a token's, an eighth."""
    for shape, wanted in (("smallthinker-21b", ("q4_0", "q6_k")), ("llama-2-70b", ("q4_0",))):
        spec = read_shape(shape)[1]
        held = {n: t for n, t in expected_tensors(spec, "q4_0").items() if not t.optional}
        held["head.weight"] = dataclasses.replace(held["head.weight"], format="q6_k")
        assert sizes_of(spec, held, "q4_0").formats == wanted


def test_a_real_pack_is_planned_with_its_own_bytes(tiny_pack: Path) -> None:
    pack = Pack.open(tiny_pack)
    subject = subjects.of_pack(tiny_pack, "exact", Curve(None, 0.26))
    assert subject.sizes.weights_bytes == pack.weights_bytes
    assert not subject.hotness.measured


@pytest.mark.parametrize("batch", [1, 3])
def test_ram_on_a_cpu_is_what_the_engine_asks_for_to_the_byte(batch: int) -> None:
    spec, sizes, heat = relu()
    ram = made(spec, sizes, heat, CPU_ONLY, batch=batch).used("ram")

    def fitting(budget: int) -> int:
        needs = Needs("exact", 512, batch, threads=8, budget=budget, kv_tokens=512 * batch)
        return fit(spec, needs, weights_bytes=sizes.weights_bytes, context=512)

    assert fitting(ram) >= 512 * batch
    with pytest.raises(OutOfBudget):
        fitting(ram - 1)


def test_keys_and_values_are_bounded_by_the_window() -> None:
    spec, sizes = model("mistral-7b", activation="relu", sliding_window=256, window_layers=tuple(range(16)))
    p = made(spec, sizes, hotness.assumed(32, spec.ffn_dim, 0.1, 0.26), CPU_ONLY, context=4096)
    assert p.bytes["ram"]["keys and values"] == reserved_bytes(spec, 4096, 4096, PREFILL_CHUNK)
    assert p.bytes["ram"]["keys and values"] < 0.7 * bytes_for(spec, 4096)


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A busy machine does not stop the solver early."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "TIME_LIMIT_S", 60.0)
        yield


each_budget = given(
    vram=st.floats(0, 6), ram=st.floats(0.2, 5), sparsity=st.sampled_from(["exact", "predict", "off"])
)


@settings(max_examples=12, deadline=None)
@each_budget
def test_no_plan_is_over_its_budget(vram: float, ram: float, sparsity: str) -> None:
    keeps_to_its_budget(vram, ram, sparsity)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@each_budget
def test_no_plan_of_twice_as_many_is_over_its_budget(vram: float, ram: float, sparsity: str) -> None:
    keeps_to_its_budget(vram, ram, sparsity)


def keeps_to_its_budget(vram: float, ram: float, sparsity: str) -> None:
    spec, sizes, heat = relu()
    sizes = sizes.with_predictors([9_000_001] * 8)
    try:
        p = made(spec, sizes, heat, LOW, vram=vram, ram=ram, sparsity=sparsity)
    except OutOfBudget as e:
        p = made(spec, sizes, heat, LOW, vram=vram, ram=wanted_ram(e), sparsity=sparsity)
        ram = wanted_ram(e)
    assert p.used("ram") <= ram * GIB and p.used("gpu") <= vram * GIB
    for layer in p.layers:
        assert (
            layer.gpu + layer.ram + layer.disk == spec.ffn_dim and min(layer.gpu, layer.ram, layer.disk) >= 0
        )
    moved = ("buffers", "runtime", "disk buffers", "keys and values")
    together = used(p, "gpu", *moved) + used(p, "ram", *moved) + used(p, "disk")
    slack = 4096 * 10 * len(p.layers)  # each slice of a tensor ends on a page
    assert sizes.weights_bytes <= together <= sizes.weights_bytes + slack


def wanted_ram(e: pytest.ExceptionInfo[OutOfBudget] | OutOfBudget) -> float:
    return float(re.search(r"--ram ([\d.]+)", str(getattr(e, "value", e)))[1])  # type: ignore[index]


# ---- times


def test_a_dense_token_takes_its_bytes_over_the_kernels_speed() -> None:
    spec, sizes = model("llama-2-7b", "q8_0")
    p = made(spec, sizes, hotness.assumed(32, spec.ffn_dim, 0.1, 0.26), CPU_ONLY, sparsity="off")
    read = sizes.weights_bytes - sizes.embed.bytes
    us = read / (cost.MATRIX_SHARE * CPU_ONLY.kernel("q8_0").gbs * 1e3)
    spent = p.predicted[0]
    assert us < spent.cpu_us < 1.03 * us and spent.bound == "CPU"
    assert p.tokens_per_s == pytest.approx(1e6 / spent.cpu_us)
    assert p.predicted[2].tokens_per_s < p.predicted[1].tokens_per_s < p.tokens_per_s  # keys and values


def test_exact_reads_gates_and_active_bundles_predict_less_than_that() -> None:
    spec, sizes, heat = relu()
    sizes = sizes.with_predictors([5_000_000] * 8)
    off, exact, predict = (
        made(spec, sizes, heat, CPU_ONLY, sparsity=s).predicted[0].cpu_us for s in ("off", "exact", "predict")
    )
    assert predict < 0.88 * exact < 0.88 * 0.75 * off


def test_more_memory_is_never_slower() -> None:
    spec, sizes, heat = relu()
    speeds = [
        made(spec, sizes, heat, LOW, vram=v, ram=r).predicted[1].tokens_per_s
        for v, r in ((0, 1.2), (0, 2), (1, 2), (2, 2), (3, 2), (3, 4))
    ]
    assert all(b >= a * 0.998 for a, b in itertools.pairwise(speeds)), speeds
    assert speeds[-1] > 5 * speeds[0]


def test_the_gpu_has_the_hottest_neurons() -> None:
    spec, sizes, heat = relu()
    p = made(spec, sizes, heat, NO_DISK, vram=1.0)
    hot = [heat.at(i, 1) for i in range(8)]
    share = sum(h[: x.gpu].sum() for h, x in zip(hot, p.layers, strict=True)) / sum(h.sum() for h in hot)
    assert 0.1 < share < 0.99 and p.share == pytest.approx(share)
    assert all(
        np.all(h[: x.gpu].min(initial=1) >= h[x.gpu :].max(initial=0))
        for h, x in zip(hot, p.layers, strict=True)
    )


def test_a_layer_is_not_split_where_waiting_costs_more_than_it_saves() -> None:
    spec, sizes, heat = relu()
    assert NO_DISK.gpu is not None
    slow = dataclasses.replace(NO_DISK, gpu=dataclasses.replace(NO_DISK.gpu, sync_us=1e6))
    p = made(spec, sizes, heat, slow, vram=0.8)
    for layer in p.layers:
        assert (layer.attention, layer.gpu) in (("gpu", spec.ffn_dim), ("ram", 0))
    split = made(spec, sizes, heat, NO_DISK, vram=0.8)
    assert any(0 < layer.gpu < spec.ffn_dim for layer in split.layers)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_gpu_attends_beside_the_cpus_neurons_where_both_halves_read_the_same(activation: str) -> None:
    """The shorter of the two is hidden. Nothing is where attention or no neuron is the CPU's."""
    spec, sizes = model("llama-2-7b", activation=activation, n_layers=2)
    heat, both = hotness.assumed(2, spec.ffn_dim, 0.15, 0.35), dataclasses.replace(spec, parallel=True)
    p = Problem(both, sizes, heat, NO_DISK, Ask(512))
    work = p.work()
    layer = next(iter(p.layers(work)))
    in_turn, beside = (
        cost.layer_columns(x, p.speeds(work), work, clusters=8, gpu=True, disk=False)
        for x in (dataclasses.replace(layer, parallel=False), layer)
    )
    hidden = (in_turn.us - in_turn.sync_us) - (beside.us - beside.sync_us)
    on_gpu = in_turn.attention
    everything = in_turn.gpu == spec.ffn_dim
    (attends,) = in_turn.gpu_us[on_gpu & everything] - in_turn.gpu_us[~on_gpu & everything]
    assert not hidden[~on_gpu].any() and not hidden[everything].any()
    apart = on_gpu & (in_turn.gpu == 0)
    assert hidden[apart] == pytest.approx(np.minimum(attends, in_turn.cpu_us[apart]))
    divided = hidden[on_gpu & ~everything]
    assert (divided > 0).all() and (divided <= attends + 1e-6).all()
    plans = [made(x, sizes, heat, NO_DISK, vram=0.72) for x in (spec, both)]
    assert plans[1].predicted[0].tokens_per_s > plans[0].predicted[0].tokens_per_s


def test_what_fits_nowhere_else_goes_to_disk_and_gates_stay_in_ram() -> None:
    spec, sizes, heat = relu()
    all_in_ram = made(spec, sizes, heat, LOW, vram=0)
    assert not all_in_ram.bytes["disk"]
    need = all_in_ram.used("ram") / GIB
    p = made(spec, sizes, heat, LOW, vram=0, ram=0.85 * need)
    assert p.bytes["disk"] and p.bytes["ram"]["disk buffers"]
    assert p.tokens_per_s <= all_in_ram.tokens_per_s  # cold bundles may come while gates are computed
    assert LOW.disk is not None
    slow = dataclasses.replace(LOW, disk=dataclasses.replace(LOW.disk, reads_per_s=3000))
    waits = made(spec, sizes, heat, slow, vram=0, ram=0.85 * need).predicted[0]
    assert waits.bound == "disk" and waits.tokens_per_s < 0.5 * p.tokens_per_s
    assert p.bytes["ram"]["gate rows"] == all_in_ram.bytes["ram"]["gate rows"]
    assert not any("predicted only" in note for note in p.notes), "`run` does it"


def test_predictors_let_gate_rows_be_on_disk_too() -> None:
    """PowerInfer-2's two phases: the gate rows that a predictor names, then the bundles they want."""
    spec, sizes, heat = relu()
    sizes = sizes.with_predictors([1_000_000] * 8)
    everything = made(spec, sizes, heat, LOW, vram=0, sparsity="predict")
    fixed = used(everything, "ram", "gate rows", "up and down rows")
    little = (fixed + (96 << 20)) / GIB  # next to nothing is left for neurons, after disk buffers
    with pytest.raises(OutOfBudget):
        made(spec, sizes, heat, LOW, vram=0, ram=little)
    p = made(spec, sizes, heat, LOW, vram=0, ram=little, sparsity="predict")
    assert p.bytes["disk"]["gate rows"] > 0.8 * everything.bytes["ram"]["gate rows"]
    assert all(layer.disk_gates in (0, layer.disk) for layer in p.layers)
    assert p.tokens_per_s < everything.tokens_per_s and p.predicted[0].bound == "disk"
    assert p.buckets[3].tokens_per_s < 8 * p.buckets[0].tokens_per_s  # 8 tokens run exact: all gate rows


def test_rows_from_disk_are_fetched_one_by_one_or_all_in_order() -> None:
    speeds = cost.Speeds(LOW, "q4_0", 1)
    assert LOW.disk is not None
    whole = 1e4 * 8192 / (LOW.disk.read_gbs * 1e3)
    one, half, every = cost.disk_us(8192, speeds, np.array([1.0, 5e3, 1e4]), np.array([10_000] * 3))
    assert one == pytest.approx(max(1e6 / LOW.disk.reads_per_s, 8192 / (LOW.disk.read_gbs * 1e3)))
    assert every == pytest.approx(whole) and 0 < half <= whole
    assert cost.disk_us(8192, speeds, np.zeros(1), np.array([10_000])).tolist() == [0]


def test_many_tokens_of_a_mixture_meet_their_own_experts_on_a_gpu() -> None:
    """In whole tiles of 32: 512 tokens, 8 of 128 experts each, are 32 of each expert; 40 are 2 or 3.

    Few tokens are one call over all that is read, and a dense layer's weights meet every token.
    """
    for batch, met in (512, 48), (40, 32), (16, 16):
        work = cost.Work("exact", batch, experts=128, active=8)
        assert cost.tokens_met("experts", work) == cost.tokens_met("any", work) == met
        assert cost.tokens_met("all", work) == batch
    spec, sizes = model("mixtral-8x7b", n_layers=1)
    problem = Problem(spec, sizes, hotness.assumed(1, spec.ffn_dim, 0.1, 0.26), HIGH, Ask(512))
    work = problem.work(batch=1024)
    layer, ones = next(problem.layers(work)), np.ones(1, np.int64)

    def us(active: int) -> float:
        places = ones > 0, ones > 1, ones * layer.sizes.neurons, ones - 1, ones > 1
        with_experts, _, _, _ = cost.layer_times(
            layer, problem.speeds(work), dataclasses.replace(work, active=active), *places
        )
        return float(with_experts[0])

    weights = layer.sizes.gate.weights + layer.sizes.bundle.weights
    assert HIGH.gpu is not None
    more = 2.0 * (8 - 2) * 1024 / 8 * weights * layer.sizes.neurons / (HIGH.gpu.gflops * 1e3)
    assert us(8) - us(2) == pytest.approx(more)


def times(layer: cost.LayerWork, tiers: Tiers, work: cost.Work, gpu: int) -> list[float]:
    """(GPU, CPU) of a layer with so many neurons on the GPU, and its attention."""
    on, off = np.ones(1, np.bool_), np.zeros(1, np.bool_)
    speeds = cost.Speeds(tiers, "q4_0", work.batch)
    found = cost.layer_times(layer, speeds, work, on, off, np.array([gpu]), np.zeros(1, np.int64), off)
    return [float(us[0]) for us in found[:2]]


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_a_mixtures_dense_layer_takes_the_time_of_one_in_a_dense_model(activation: str, batch: int) -> None:
    """On the GPU it was taken to compute the share of its neurons that tokens choose of experts."""
    how: dict[str, Any] = {"n_layers": 2, "activation": activation}
    mixed, sizes = model("qwen3-30b-a3b", dense_layers=(0,), dense_dim=6144, **how)
    dense, alone = model("qwen3-30b-a3b", n_experts=1, n_experts_active=1, ffn_dim=6144, **how)
    heat = hotness.assumed(2, 6144, 0.1, 0.26)
    ask = Ask(512, batch=batch)
    p, q = Problem(mixed, sizes, heat, HIGH, ask), Problem(dense, alone, heat, HIGH, ask)
    first, like = next(p.layers(p.work())), next(q.layers(q.work()))
    for gpu in (0, 6144):
        assert times(first, HIGH, p.work(), gpu) == pytest.approx(times(like, HIGH, q.work(), gpu))


@pytest.mark.parametrize("attention", [False, True])
def test_neurons_on_a_gpu_are_sent_what_a_cpus_attention_read(attention: bool) -> None:
    """Where both halves read the same: the stream that attention changed goes there, too."""

    def sync_us(parallel: bool) -> float:
        spec, sizes = model("falcon-40b", n_layers=1, activation="relu", parallel=parallel)
        p = Problem(spec, sizes, hotness.assumed(1, spec.ffn_dim, 0.1, 0.26), HIGH, Ask(512, batch=4))
        layer, off = next(p.layers(p.work())), np.zeros(1, np.bool_)
        some, none = np.array([1024]), np.zeros(1, np.int64)
        there = np.array([attention])
        found = cost.layer_times(layer, p.speeds(p.work()), p.work(), there, off, some, none, off)
        return float(found[3][0])

    assert HIGH.gpu is not None
    more = 0.0 if attention else 4 * 8192 * 4 / (HIGH.gpu.link_gbs * 1e3)
    assert sync_us(True) - sync_us(False) == pytest.approx(more)


def test_the_cpu_multiplies_by_each_tokens_experts_and_reads_those_needed_once() -> None:
    spec, sizes = model("qwen3-30b-a3b", n_layers=1)

    def ffn_us(batch: int, gbs: float, gflops: float) -> float:
        kernel = dataclasses.replace(HIGH.kernel("q4_0"), gbs=gbs, gflops=gflops)
        tiers = dataclasses.replace(HIGH, cpu=dataclasses.replace(HIGH.cpu, kernels={"q4_0": kernel}))
        p = Problem(spec, sizes, hotness.assumed(1, 768, 0.1, 0.26), tiers, Ask(512, batch=batch))
        layer = next(p.layers(p.work()))
        return cost.ffn_cpu_us(layer, p.speeds(p.work()), p.work(), 0) - cost.CALL_US

    for batch in (2, 8, 32):
        multiplied = ffn_us(batch, 1e9, 100) / ffn_us(1, 1e9, 100)
        assert multiplied == pytest.approx(batch)
        read = ffn_us(batch, 10, 1e9) / ffn_us(1, 10, 1e9)
        assert read == pytest.approx(spec.routed(batch) / spec.routed(1)) and read < batch


def test_predictors_are_taken_at_their_own_word() -> None:
    """What `train` measured on its samples, not the assumption; what is always active is no guess."""
    assert predictor.named_for_active({"predicted_fraction": 0.3, "active_fraction": 0.1}) == pytest.approx(3)
    assert predictor.named_for_active({"kind": "svd"}) is None
    work, hot = cost.Work("predict"), np.array([1.0, 0.5, 0.1, 0.0])
    reads = cost.Reads.of(hot, work, skips=True, excess=1.2)
    assert reads.gates[-1] == pytest.approx(1.2 * 1.6) and reads.bundles[-1] == pytest.approx(1.6)
    assert np.diff(reads.gates)[0] == 1 and np.diff(reads.gates)[3] == 0
    spec, sizes, heat = relu()
    sizes = sizes.with_predictors([1_000_000] * 8)
    few, many = (
        made(spec, sizes, dataclasses.replace(heat, excess=e), CPU_ONLY, sparsity="predict")
        for e in (1.1, 3.0)
    )
    assert few.tokens_per_s > 1.05 * many.tokens_per_s and any("name 3 neurons" in n for n in many.notes)


def test_a_larger_batch_needs_more_neurons_and_more_memory() -> None:
    spec, sizes, heat = relu()
    sizes = sizes.with_predictors([9_000_000] * 8)
    one, four = (made(spec, sizes, heat, NO_DISK, vram=0.8, batch=b, sparsity="predict") for b in (1, 4))
    kv = [
        p.bytes["gpu"].get("keys and values", 0) + p.bytes["ram"].get("keys and values", 0)
        for p in (one, four)
    ]
    assert kv[1] == 4 * kv[0]
    assert one.tokens_per_s < four.tokens_per_s < 4 * one.tokens_per_s
    assert [sum(one.hot[b]) for b in (1, 2, 4)] == sorted(sum(one.hot[b]) for b in (1, 2, 4))
    assert sum(one.hot[1]) < sum(one.hot[4]) and not any(one.hot[8])  # more than 4 tokens: nothing is asked
    assert one.layers != four.layers


def test_a_profile_gives_each_batch_its_own_hotness() -> None:
    counts = np.array([[[10, 40, 1]], [[15, 35, 1]], [[20, 25, 1]]])
    heat = hotness.profiled(Profile((1, 2, 4), (100, 50, 25), 100, "", (counts,)))
    assert heat.measured and heat.at(0, 1).tolist() == [0.4, 0.1, 0.01]
    assert heat.at(0, 3).tolist() == heat.at(0, 4).tolist() == heat.at(0, 64).tolist() == [1.0, 0.8, 0.04]


def test_neurons_never_seen_share_what_those_seen_once_have() -> None:
    """Good and Turing's estimate: two of a hundred tokens met a neuron for the only time."""
    counts = np.array([[[90, 1, 0, 1, 0, 0]]] * 2).reshape(2, 1, 6)
    heat = hotness.profiled(Profile((1, 2), (100, 50), 100, "", (counts,)))
    assert heat.at(0, 1) == pytest.approx([0.9, 0.01, 0.01, 0.02 / 3, 0.02 / 3, 0.02 / 3])


def test_the_alternative_has_a_quarter_more() -> None:
    spec, sizes, heat = relu()
    ask = Ask(512, vram_bytes=768 << 20, ram_bytes=8 * GIB)
    asked = ask, larger(Problem(spec, sizes, heat, NO_DISK, ask))
    was, more = (plan(spec, sizes, heat, NO_DISK, each) for each in asked)
    assert (more.budget.vram_bytes, more.budget.ram_bytes) == (960 << 20, 10 * GIB)
    assert more.tokens_per_s > 1.05 * was.tokens_per_s


# ---- the paper's objective


def test_paper_mode_puts_the_most_activations_on_the_gpu() -> None:
    """Without a communication bound it is greedy top-k: the neurons needed most, of all layers."""
    spec, sizes, _ = relu()
    each = [activities(spec.ffn_dim, active, 0.35) for active in np.linspace(0.05, 0.3, 8)]
    heat = hotness.independent(each, "a test", measured=True)
    assert NO_DISK.gpu is not None
    quick = dataclasses.replace(NO_DISK, gpu=dataclasses.replace(NO_DISK.gpu, sync_us=0, link_gbs=1e9))
    p = made(spec, sizes, heat, quick, vram=0.8, objective="frequency")
    cluster = -(-spec.ffn_dim // 64 // 32) * 32
    runs = [h[k : k + cluster].sum() for h in each for k in range(0, len(h), cluster)]
    best = sum(sorted(runs, reverse=True)[: sum(round(x.gpu / cluster) for x in p.layers)])
    chosen = sum(h[: x.gpu].sum() for h, x in zip(each, p.layers, strict=True))
    assert 1.001 * best >= chosen >= 0.998 * best > 0


def test_paper_mode_keeps_the_communication_constraint() -> None:
    spec, sizes, heat = relu()
    assert NO_DISK.gpu is not None
    slow = dataclasses.replace(NO_DISK, gpu=dataclasses.replace(NO_DISK.gpu, sync_us=500))
    neuron = 3 * 4096 * 18 / 32
    least = 500 / (neuron / 67.2e3 - neuron / 1008e3)  # C T_gpu + T_sync <= C T_cpu, by hand
    p = made(spec, sizes, heat, slow, vram=1.1, objective="frequency")
    counts = {x.gpu for x in p.layers}
    assert any(counts) and all(n == 0 or n >= least for n in counts) and least > 2048


@pytest.mark.parametrize("vram", [0.7, 0.9])
def test_the_shortest_token_is_not_slower_than_papers(vram: float) -> None:
    spec, sizes, heat = relu()
    time_us, paper_us = (
        1e6 / made(spec, sizes, heat, NO_DISK, vram=vram, objective=o).predicted[1].tokens_per_s
        for o in ("time", "frequency")
    )
    assert time_us <= 1.002 * paper_us


def test_solving_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS 1.16 printed a banner on its own, before the JSON of `plan --json`."""
    made(*relu(), NO_DISK, vram=0.7)
    assert capfd.readouterr().out == ""


# ---- refusals, speed


@pytest.mark.parametrize("tiers", [CPU_ONLY, NO_DISK, LOW], ids=["cpu", "gpu", "three tiers"])
def test_a_refusal_names_the_smallest_change_that_fits(tiers: Tiers) -> None:
    spec, sizes, heat = relu()
    ask = {"vram": 0.7, "ram": 0.5, "context": 4096}
    with pytest.raises(OutOfBudget) as e:
        made(spec, sizes, heat, tiers, **ask)
    need = wanted_ram(e)
    p = made(spec, sizes, heat, tiers, **{**ask, "ram": need})
    assert p.used("ram") <= need * GIB
    with pytest.raises(OutOfBudget):
        made(spec, sizes, heat, tiers, **{**ask, "ram": need - 0.02})


def test_a_refusal_names_a_context_that_fits() -> None:
    spec, sizes, heat = relu()
    short = made(spec, sizes, heat, CPU_ONLY, context=512).used("ram") / GIB
    with pytest.raises(OutOfBudget) as e:
        made(spec, sizes, heat, CPU_ONLY, context=4096, ram=short)
    context = int(re.search(r"--ctx (\d+)", str(e.value))[1])  # type: ignore[index]
    assert 512 <= context < 576  # short was rounded to the byte; buffers depend on the context too
    made(spec, sizes, heat, CPU_ONLY, context=context, ram=short)


@pytest.mark.parametrize(("format", "advised"), [("f16", True), ("q8_0", True), ("q4_0", False)])
def test_a_refusal_advises_a_smaller_format_where_there_is_a_good_one(format: str, advised: bool) -> None:
    """Not ternary weights, the smallest of all, and not what the model is in already."""
    with pytest.raises(OutOfBudget) as e:
        made(*relu(format=format), CPU_ONLY, ram=0.1)
    assert ("--format q4_0" in str(e.value)) == advised and "tq2_0" not in str(e.value)


def test_a_gpu_too_small_for_its_own_runtime_is_not_used() -> None:
    spec, sizes, heat = relu()
    p = made(spec, sizes, heat, NO_DISK, vram=0.3)
    assert not p.bytes["gpu"] and any("too small" in note for note in p.notes)


@pytest.mark.parametrize(("format", "tiers"), [("q4_0", HIGH), ("f16", LOW)], ids=["two tiers", "three"])
def test_eighty_unlike_layers_are_planned_in_seconds(format: str, tiers: Tiers) -> None:
    spec, sizes = model("llama-2-70b", format, activation="relu")
    curve = activities(spec.ffn_dim, 0.18, 0.43)
    each = [np.minimum(1.0, curve * factor) for factor in np.linspace(0.3, 1.6, 80)]
    heat = hotness.independent(each, "a test", measured=True)
    begin = time.process_time()
    p = made(spec, sizes, heat, tiers, context=4096)
    assert time.process_time() - begin < 20  # one of an idle machine
    assert p.greedy_us is not None and p.objective_us <= p.greedy_us


# ---- the command


KNOWN = ("--hardware", "rtx4090-i9-13900k")


def test_the_table_says_what_a_person_wants(thermocline: Run) -> None:
    ran = thermocline(
        "plan", "opt-30b", "--format", "f16", "--sparsity", "predict", "--active", "0.03", *KNOWN
    )
    assert ran.code == 0, ran.err
    for words in (
        r"^attention +[\d.]+ GiB", r"^keys and values ", r"^predictors ", r"^together ",
        r"^allowed +24.00 GiB +192.00 GiB", r"^speed +[\d.]+ tok/s, bound by the (GPU|CPU)", r"^time .*sync",
        r"^with 25 % more +30.00 GiB of VRAM",
        r"^batch +of 1 ", r"^hot ", r"^note +hotness: assumed: 3%",
    ):  # fmt: skip
        assert re.search(words, ran.out, re.MULTILINE), (words, ran.out)


def test_a_pack_is_planned_on_this_machine(tiny_pack: Path, thermocline: Run) -> None:
    ran = thermocline("plan", tiny_pack, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["predicted"][0]["tokens_per_s"] > 0 and not told["bytes"]["gpu"]
    assert set(told["made_from"]) == {"pack", "hardware"}


@pytest.mark.parametrize("ram", [(), ("--ram", "4.5", "--vram", "0")])  # all in memory, a part on disk
def test_a_format_that_a_hardware_file_does_not_know_is_planned_and_noted(
    ram: tuple[str, ...], thermocline: Run
) -> None:
    args = ("plan", "llama-2-7b", "--active", "0.1", "--json", *KNOWN, *ram)
    known, assumed = (json.loads(thermocline(*args, "--format", f).out) for f in ("q4_0", "q4_k"))
    assert not any("no speeds of" in note for note in known["notes"])
    assert any("no speeds of q4_k: taken as" in note for note in assumed["notes"])
    assert 0.5 < assumed["predicted"][0]["tokens_per_s"] / known["predicted"][0]["tokens_per_s"] < 1.1


def test_a_disk_is_measured_where_memory_is_too_small(
    tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thermocline.machine import disk_speed

    measured: list[Path] = []
    monkeypatch.setattr(
        disk_speed,
        "measure_disk",
        lambda path, threads: measured.append(path) or disk_speed.DiskSpeed(str(path), 1 << 40, 2.0, 1e5),
    )
    args = ("plan", "tinyllama-1.1b", "--active", "0.1", "--format", "f16", "--json")
    ran = thermocline(*args)
    assert ran.code == 0 and not measured
    assert any("without a disk" in note for note in json.loads(ran.out)["notes"])
    ran = thermocline(*args, "--ram", "1.5")
    told = json.loads(ran.out)
    assert ran.code == 0 and measured == [Path()] and told["bytes"]["disk"]
    assert "does not fit in memory; the disk of . was measured" in ran.err
    assert not any("without a disk" in note for note in told["notes"])


@pytest.mark.parametrize("args", [("llama-2-7b", "2.5"), ("qwen3-30b-a3b", "8")])
def test_what_the_disk_brings_is_arranged_as_fast_as_was_measured(
    args: tuple[str, str], tmp_path: Path, thermocline: Run
) -> None:
    assert HIGH.disk is not None
    file, speeds = tmp_path / "hw.json", []
    for gbs in (0.05, 5.0):
        disk = dataclasses.replace(HIGH.disk, arrange_gbs=gbs)
        file.write_text(render(dataclasses.replace(HIGH, gpu=None, disk=disk)))
        ran = thermocline("plan", args[0], "--format", "q4_0", "--ram", args[1], "--hardware", file, "--json")
        speeds.append(json.loads(ran.out)["predicted"][0]["tokens_per_s"])
    assert 2 * speeds[0] < speeds[1]


def test_a_disk_whose_speed_varies_is_noted(thermocline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from thermocline.machine import disk_speed

    found = disk_speed.DiskSpeed(".", 1 << 40, 2.0, 1e5, why="this disk's speed varies: 0.20 to 2.00 GB/s")
    monkeypatch.setattr(disk_speed, "measure_disk", lambda _, threads: found)
    args = ("plan", "tinyllama-1.1b", "--active", "0.1", "--format", "f16", "--ram", "1.5")
    assert found.why in json.loads(thermocline(*args, "--json").out)["notes"]
    assert found.why in thermocline(*args).out


def test_a_plan_is_written_once_and_stamped(tmp_path: Path, tiny_pack: Path, thermocline: Run) -> None:
    out = tmp_path / "plan.json"
    f32 = dataclasses.replace(HIGH.cpu, kernels={"f32": HIGH.kernel("f16"), "q8_0": HIGH.kernel("q8_0")})
    (tmp_path / "hw.json").write_text(render(dataclasses.replace(HIGH, cpu=f32)))
    args = ("plan", tiny_pack, "--hardware", tmp_path / "hw.json", "-o", out)
    assert thermocline(*args).code == 0
    told = json.loads(out.read_text())
    assert told["kind"] == "thermocline-plan" and len(told["made_from"]["pack"]) == 64
    assert thermocline(*args).code == 2 and thermocline(*args, "--force").code == 0
    assert not list(tmp_path.glob("*.tmp-*"))


TWO_GPUS = {
    "neurons": ("tinyllama-1.1b", "--active", "0.1", "--gpu", "0,1", "--vram", "0.75"),
    "neurons of each expert": ("turbosparse-mixtral", "--active", "0.1", "--vram", "5,4"),
    "experts": ("qwen3-30b-a3b", "--vram", "8,6"),
    "neurons, and some on disk": ("llama-2-7b", "--active", "0.1", "--vram", "1.5,1.2", "--ram", "2.6"),
    "experts, and some on disk": ("qwen3-30b-a3b", "--vram", "3,2.5", "--ram", "5"),
}


@pytest.mark.parametrize("args", TWO_GPUS.values(), ids=TWO_GPUS)
def test_two_gpus_have_their_own_neurons_within_their_own_memory(
    args: tuple[str, ...], thermocline: Run
) -> None:
    ran = thermocline("plan", *args, "--format", "q4_0", "--ctx", "512", *KNOWN, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert bool(told["bytes"]["disk"]) == ("--ram" in args)
    limits = args[args.index("--vram") + 1].split(",")
    assert [g["vram_bytes"] for g in told["gpus"]] == [int(float(x) * GIB) for x in (*limits, *limits)[:2]]
    for g in told["gpus"]:
        assert 0 < sum(g["bytes"].values()) <= g["vram_bytes"] and sum(g["neurons"]) > 0
    both = zip(*(g["neurons"] for g in told["gpus"]), strict=True)
    assert [sum(each) for each in both] == [x["gpu"] for x in told["layers"]]
    parts = {part for g in told["gpus"] for part in g["bytes"]}
    assert {p: sum(g["bytes"].get(p, 0) for g in told["gpus"]) for p in parts} == told["bytes"]["gpu"]


def test_a_second_gpu_makes_tokens_faster_and_has_a_column(thermocline: Run) -> None:
    args = ("plan", "tinyllama-1.1b", "--active", "0.1", "--format", "q4_0", *KNOWN, "--vram", "0.8")
    one, two = (json.loads(thermocline(*args, *gpus, "--json").out) for gpus in ((), ("--gpu", "1,0")))
    speeds = [x["predicted"][0]["tokens_per_s"] for x in (one, two)]
    assert speeds[1] > 1.2 * speeds[0] and [len(x["gpus"]) for x in (one, two)] == [1, 2]
    ran = thermocline(*args[:-1], "0.8,0.6")
    for words in (
        r"^ +GPU:0 +GPU:1 +RAM$", r"^attention +[\d.]+ MiB +- ", r"^allowed +819 MiB +614 MiB +192.00 GiB",
        r" \d+ gpu:0, \d+ gpu:1", r"the GPUs", r"^with 25 % more +1.75 GiB of VRAM", r"one after the other",
    ):  # fmt: skip
        assert re.search(words, ran.out, re.MULTILINE), (words, ran.out)


LLAMA_70B = ("plan", "llama-2-70b", "--format", "q4_0", *KNOWN, "--ctx", "4096", "--json")


def on_gpus_of(told: Any) -> Any:
    """Return the neurons of each layer on each of two GPUs [layers, 2]."""
    return np.array([g["neurons"] for g in told["gpus"]]).T


def test_a_second_gpu_takes_whole_ffns_of_a_dense_model(thermocline: Run) -> None:
    """Each costs a hand-over, which one GPU with all of it would not pay."""
    one, two = (json.loads(thermocline(*LLAMA_70B, "--vram", v).out) for v in ("24", "24,24"))
    there = on_gpus_of(two)
    assert set(map(tuple, there.tolist())) == {(28672, 0), (0, 28672)}
    assert two["bytes"]["ram"].keys().isdisjoint(["attention", "up and down rows"])
    speeds = [x["predicted"][0]["tokens_per_s"] for x in (one, two)]
    assert speeds[1] > 3 * speeds[0]
    assert HIGH.gpu is not None
    sent_us = HIGH.gpu.sync_us + 2 * 4 * 8192 / (HIGH.gpu.link_gbs * 1e3)
    handed = int(np.count_nonzero(there[:, 1])) + 1  # the stream comes to the first GPU once
    assert two["predicted"][0]["sync_us"] == pytest.approx(handed * sent_us)


def test_the_first_gpu_attends_before_it_takes_ffns_that_a_second_has_room_for(thermocline: Run) -> None:
    """A solver that knows the first alone would leave some attention to the CPU."""
    told = json.loads(thermocline(*LLAMA_70B, "--vram", "12,36").out)
    alone = json.loads(thermocline(*LLAMA_70B, "--vram", "12").out)
    assert "attention" in alone["bytes"]["ram"] and "attention" not in told["bytes"]["ram"]
    assert np.all(on_gpus_of(told).sum(axis=1) == 28672)


@pytest.mark.parametrize("ram", ["2", "8"])
def test_what_only_several_gpus_have_room_for_needs_neither_ram_nor_disk(ram: str, thermocline: Run) -> None:
    told = json.loads(thermocline(*LLAMA_70B, "--vram", "24,24", "--ram", ram).out)
    assert not any(told["bytes"]["disk"]) and np.all(on_gpus_of(told).sum(axis=1) == 28672)
    assert not any("predicted only" in note for note in told["notes"])
    alone = thermocline(*LLAMA_70B, "--vram", "24", "--ram", ram)
    said = alone.err if alone.code else json.loads(alone.out)["notes"][-1]
    assert ("the model needs" if ram == "2" else "predicted only") in said


def test_ram_that_is_too_small_beside_several_gpus_is_refused_with_what_is_needed() -> None:
    spec, sizes = model("llama-2-70b")
    heat = hotness.assumed(spec.n_layers, spec.ffn_dim, 1, 1)

    def asked(ram: int, *further: int) -> Plan:
        ask = Ask(4096, vram_bytes=12 * GIB, ram_bytes=ram, sparsity="off")
        return among(Problem(spec, sizes, heat, NO_DISK, ask, 1 + len(further)), further)

    with pytest.raises(OutOfBudget, match=r"beside 12\.00, 8\.00 GiB of VRAM, 8\.00 GiB is allowed") as e:
        asked(8 * GIB, 8 * GIB)
    found = re.search(r"--ram ([\d.]+)$", str(e.value))
    assert found is not None
    need = int(float(found[1]) * GIB)
    made = asked(need, 8 * GIB)
    assert 0.99 * need < made.used("ram") <= need and made.budget.ram_bytes == need
    with pytest.raises(OutOfBudget, match=r"beside 12\.00, 7\.00 GiB"):
        asked(need, 7 * GIB)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("llama-2-7b", "--vram", "8,4"), "the others have all neurons"),
        (("qwen3-30b-a3b", "--vram", "24,4"), "the others have all neurons"),
        (("qwen3-30b-a3b", "--vram", "8,0.4"), "0.40 GiB are too small"),
    ],
)
def test_a_second_gpu_that_takes_nothing_is_noted(args: tuple[str, ...], why: str, thermocline: Run) -> None:
    told = json.loads(thermocline("plan", *args, "--format", "q4_0", *KNOWN, "--json").out)
    assert_idle(told, why)


def test_a_second_gpu_whose_waits_cost_more_than_it_saves_is_noted(tmp_path: Path, thermocline: Run) -> None:
    assert HIGH.gpu is not None
    slow = dataclasses.replace(HIGH, gpu=dataclasses.replace(HIGH.gpu, sync_us=20000))
    (tmp_path / "hw.json").write_text(render(slow))
    args = ("plan", "tinyllama-1.1b", "--active", "0.1", "--vram", "0.8,0.8", "--json")
    told = json.loads(thermocline(*args, "--hardware", tmp_path / "hw.json").out)
    assert_idle(told, "its waits would cost more than it saves")


def assert_idle(told: Any, why: str) -> None:
    assert any(n.startswith("gpu:1 is not used") and why in n for n in told["notes"]), told["notes"]
    assert not told["gpus"][1]["bytes"] and not sum(told["gpus"][1]["neurons"])


def test_a_described_gpu_can_be_left_out(thermocline: Run) -> None:
    args = ("plan", "tinyllama-1.1b", "--format", "q4_0", *KNOWN, "--json")
    off, none = (json.loads(thermocline(*args, *a).out) for a in (("--gpu", "off"), ("--vram", "0")))
    assert off["predicted"] == none["predicted"] and off["gpus"] == none["gpus"] == []


def test_a_default_context_is_as_short_without_vram_as_without_a_gpu(thermocline: Run) -> None:
    args = ("plan", "llama-2-7b", "--format", "q4_0", *KNOWN, "--ram", "2", "--json", "-q")
    off, none = (thermocline(*args, *a) for a in (("--gpu", "off"), ("--vram", "0")))
    assert off.code == none.code == 0, none.err
    assert json.loads(off.out)["bytes"] == json.loads(none.out)["bytes"]


@pytest.mark.parametrize("fits", [True, False])
def test_a_refusal_says_where_a_model_would_fit_without_the_gpu(
    fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a GPU nothing of Nemotron 3 Nano can be on disk: 8 GiB were asked for where 4 were enough."""
    subject = subjects.of_shape("opt-6.7b", "q4_0", "exact", 0.0, Curve(None, 0.26))
    without = planner.plan(subject.spec, subject.sizes, subject.hotness, CPU_ONLY, Ask(context=512))

    def placed(subject: Any, tiers: Tiers, ask: Ask, *_: Any) -> Plan:
        if ask.vram_bytes == 0 and fits:
            return without
        raise OutOfBudget("the smallest change that fits: --ram 8")

    monkeypatch.setattr(place_module, "_placed", placed)
    with pytest.raises(OutOfBudget) as e:
        place_module.plan(subject, HIGH, Ask(context=512, vram_bytes=3 * GIB))
    assert str(e.value).endswith("--ram 8 or --gpu off" if fits else "--ram 8")


def test_the_table_has_a_row_for_each_part_of_the_bytes() -> None:
    """Routers and experts' biases were in none: the rows ended 110 MiB before what they came to together."""
    p = made(*relu(), CPU_ONLY)
    parts = dict.fromkeys(("attention", "routers", "experts' biases", "the command's own", "a new part"), GIB)
    shown = plan_text("m", "here", dataclasses.replace(p, bytes={"gpu": {}, "ram": parts, "disk": {}}), None)
    for part, text in {**dict.fromkeys(parts, "1.00"), "together": "5.00"}.items():
        assert re.search(rf"^{part} +{text} GiB", shown, re.MULTILINE), part


@pytest.mark.oracle  # the stand-in computes with torch
def test_gpus_of_this_machine_are_measured_and_closed(
    thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thermocline.ops.device import StandIn

    closed: list[StandIn] = []
    monkeypatch.setattr(
        StandIn, "close", lambda self, close=StandIn.close: (closed.append(self), close(self))
    )
    args = ("plan", "tinyllama-1.1b", "--active", "0.1", "--format", "q4_0", "--json")
    ran = thermocline(*args, "--gpu", "stand-in,stand-in", "--vram", "0.8,0.7")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert [g["vram_bytes"] for g in told["gpus"]] == [int(0.8 * GIB), int(0.7 * GIB)] and len(closed) == 2
    assert all(sum(g["neurons"]) for g in told["gpus"])


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("llama-2-7b", "--vram", "8,8"), 2, "name them with --gpu 0,1, or describe them with --hardware"),
        (("llama-2-7b", "--gpu", "none"), 2, "off, auto, a GPU's number, or stand-in"),
        (("llama-2-7b", "--gpu", "stand-in", "--vram", "1,1"), 2, "2 numbers and 1 GPU is named"),
        (("llama-2-7b", "--gpu", "0,1", "--vram", "8,8,8", *KNOWN), 2, "3 numbers and 2 GPUs are named"),
        (("llama-2-7b", "--gpu", "0,0", *KNOWN), 2, "each once, as in 0,1"),
        (("llama-2-7b", "--gpu", "0,", *KNOWN), 2, "each once, as in 0,1"),
        (("llama-2-7b", "--gpu", "stand-in", *KNOWN), 2, "each once, as in 0,1"),
        (("llama-2-7b", "--gpu", "off", "--vram", "8,8", *KNOWN), 2, "leave one of them out"),
        (("llama-2-7b", "--vram", "0,8", *KNOWN), 2, "which has attention and the head"),
        (("llama-2-7b", "--vram", "8,8", "--objective", "frequency", *KNOWN), 2, "knows one GPU"),
        (("opt-175b", "--format", "f16", *KNOWN), 5, "--ram"),
        (("opt-175b", "--format", "f16", "--vram", "4", *KNOWN), 5, "or a GPU with"),
        (("opt-30b", "--format", "f16", "--vram", "10", "--ram", "30", *KNOWN), 5, " or --vram"),
        (("opt-999b", *KNOWN), 2, "known: llama-2-7b"),
        (("opt-30b", "--hardware", "nothing"), 2, "known: rtx2080ti"),
        (("opt-30b", "--ctx", "100000", *KNOWN), 2, "limit is 2048"),
        (("opt-30b", "--ram", "-1", *KNOWN), 2, "--ram must be"),
        (("opt-30b", "--active", "0.5", "--skew", "0.01", *KNOWN), 2, "larger --skew"),
    ],
)
def test_bad_requests_are_one_line_and_a_code(
    args: tuple[str, ...], code: int, said: str, thermocline: Run
) -> None:
    ran = thermocline("plan", *args)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1), ran.err
    assert said in ran.err


@pytest.mark.oracle
def test_a_gpus_keys_and_values_are_f16(thermocline: Run) -> None:
    ran = thermocline("plan", "llama-2-7b", "--gpu", "stand-in", "--cache-type-k", "q8_0")
    assert (ran.code, ran.out, ran.err.count("\n")) == (6, "", 1), ran.err
    assert "keys and values as f16" in ran.err


def test_a_stand_in_without_torch_is_refused(thermocline: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "thermocline.ops.device", raising=False)
    ran = thermocline("plan", "llama-2-7b", "--gpu", "stand-in")
    assert (ran.code, ran.out, ran.err.count("\n")) == (6, "", 1), ran.err
    assert "torch is not installed: pip install 'thermocline[gpu]'" in ran.err


def test_gpus_are_not_planned_for_where_a_machine_has_none(tmp_path: Path, thermocline: Run) -> None:
    (tmp_path / "hw.json").write_text(render(CPU_ONLY))
    for asked in (("--gpu", "0"), ("--gpu", "0,1"), ("--vram", "8,8")):
        ran = thermocline("plan", "llama-2-7b", "--hardware", tmp_path / "hw.json", *asked)
        assert ran.code == 2 and "has no GPU to plan for" in ran.err, ran.err
    assert thermocline("plan", "llama-2-7b", "--hardware", tmp_path / "hw.json", "--gpu", "auto").code == 0


def test_doctor_writes_what_plan_reads(
    tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thermocline.machine import hardware
    from thermocline.machine.disk_speed import DiskSpeed

    monkeypatch.setattr(hardware, "measure_disk", lambda path, threads: DiskSpeed("/here", 1 << 30, 2.0, 1e5))
    # Kernels faster than memory are refused, and on a busy machine two measurements differ by any factor.
    monkeypatch.setattr(hardware, "read_gbs", lambda *_: 1e6)
    hw = tmp_path / "hw.json"
    assert thermocline("doctor", "-o", hw).code == 0
    tiers = read_tiers(str(hw))
    assert set(tiers.cpu.kernels) == set(quant.FORMATS) and tiers.gpu is None
    assert tiers.disk is not None and tiers.disk.reads_per_s == 1e5
    assert thermocline("plan", "tinyllama-1.1b", "--hardware", hw).code == 0
