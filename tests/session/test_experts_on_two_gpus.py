"""Whole experts on two GPUs and the CPU: what one GPU says that holds both GPUs' experts.

As test_two_devices.py, whose neurons are divided. The GPUs are stand-ins, each with queues of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_cuda
import kept_twins
import numpy as np
import placements
import pytest
import test_synth
import twins
from test_experts_on_disk import packed, small_pieces
from test_gpu import logits, slowly, stand_in
from test_gpu_experts_on_disk import alone, answers, asked, budgets, path, said, there, with_slots
from test_gpu_moe import Counting
from test_options import TOKENS, nmse
from test_two_devices import SAME, other, two_ops

from thermocline.convert import importer
from thermocline.errors import BadFile
from thermocline.machine import this_machine
from thermocline.model.sizes import aligned
from thermocline.model.spec import ModelSpec
from thermocline.opening.open_model import open_model
from thermocline.ops import cuda
from thermocline.ops.device import StandIn
from thermocline.ops.interface import CPU, FFNStats
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.pack.route_profile import RouteProfile, path_of, write_routes
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.budget import Decision
from thermocline.plan.memory import GIB
from thermocline.plan.placement import LayerPlacement, Placement, gpu
from thermocline.session import gpu as session_gpu
from thermocline.session import gpu_weights
from thermocline.session.gpu_tier import Gpus
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

pytestmark = pytest.mark.oracle

__all__ = ["budgets", "other", "path", "small_pieces", "stand_in"]  # fixtures
# With biases of all matrices, and of a model with latents, a shared expert and a dense layer.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
# Of each layer (experts on the first GPU, on the second), in quarters of a layer's; the CPU has the others.
QUARTERS = {
    "some on each": [(1, 2), (2, 1), (1, 1)],
    "none on the CPU": [(3, 1), (1, 3), (2, 2)],
    "none on the first": [(0, 3), (0, 4), (0, 1)],
    "one device has all": [(0, 4), (4, 0), (0, 0)],
}


def exact(name: str, directory: Path) -> Pack:
    """Weights in f32.

    As in test_two_devices.py: sums in another order would move activations to another integer of int8.
    """
    hf, pack = kept_twins.TWINS[name](directory / "hf"), directory / "pack"
    importer.pack(hf, pack, "f32", activation=twins.ASKED.get(name))
    return Pack.open(pack)


def mixtures(spec: ModelSpec) -> list[int]:
    return [i for i in range(spec.n_layers) if spec.ffn(i).experts > 1]


def on_two(model: StoredModel, quarters: Sequence[tuple[int, int]]) -> tuple[Placement, Placement]:
    """(on two GPUs, the same experts on one), with attention and dense layers on the first."""
    spec = model.spec

    def layers(of_two: bool) -> list[LayerPlacement]:
        made = []
        for i in range(spec.n_layers):
            a, b = (n * spec.n_experts // 4 for n in quarters[i % len(quarters)])
            if spec.ffn(i).experts < 2:
                made.append(placements.layer(spec, True, False, placements.ALL, index=i))
            elif of_two:
                made.append(placements.experts(spec, True, a, i, b, index=i))
            else:
                made.append(placements.experts(spec, True, a + b, i, index=i))
        return made

    two, one = (Placement(tuple(layers(of_two)), gpu(0), 64, 256) for of_two in (True, False))
    return two, one


@pytest.mark.parametrize("proportion", QUARTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_gpus_say_what_one_says_with_their_experts(
    family: str, proportion: str, tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    model, devices = exact(family, tmp_path), (stand_in, other)
    both, together = on_two(model, QUARTERS[proportion])
    one, two = two_ops(devices[:1], model.spec), two_ops(devices, model.spec)
    held = gpu_weights.load(model, together, devices[:1], one.cpu)
    parted = gpu_weights.load(model, both, devices, two.cpu)
    for chunk in (1, 3, 16, TOKENS):
        one.forget()  # recordings are of one cache
        counted, stats = FFNStats(), FFNStats()
        truth = logits(model.spec, held, one, together, chunk, stats=counted)
        y = logits(model.spec, parted, two, both, chunk, stats=stats)
        assert nmse(y, truth) < SAME, chunk
        assert stats == counted
    assert not two.recorded


def test_each_gpu_computes_its_own_experts_beside_the_others(
    tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    """A layer is one product of down on each GPU, of few tokens and of many."""
    model, devices = packed("qwen3_moe", tmp_path), (stand_in, other)
    places, _ = on_two(model, [(1, 2)])
    ops = two_ops(devices, model.spec)
    made = gpu_weights.load(model, places, devices, ops.cpu)
    for chunk, down in ((5, "down_experts"), (TOKENS, "down_pairs")):
        stand_in.watched, other.watched = [], []
        logits(model.spec, made, ops, places, chunk)
        ran = [[s.name for s in d.watched or []] for d in devices]
        calls = len(mixtures(model.spec)) * TOKENS // chunk
        assert [names.count(down) for names in ran] == [calls, calls]
        assert "attention" not in ran[1] and ran[0].count("CPU") == calls


def test_shares_that_are_watched_are_of_all_experts(
    tmp_path: Path, stand_in: StandIn, other: StandIn
) -> None:
    """What `profile` counts."""
    model, devices = exact("qwen3_moe", tmp_path), (stand_in, other)
    both, together = on_two(model, QUARTERS["some on each"])
    found = []
    for places, some in ((together, devices[:1]), (both, devices)):
        ops = two_ops(some, model.spec)
        ops.watch_routers()
        made = gpu_weights.load(model, places, some, ops.cpu)
        logits(model.spec, made, ops, places, 20)
        found.append(np.stack(ops.shares(20)))
    assert found[0].shape == (len(mixtures(model.spec)), 20, model.spec.n_experts)
    assert np.array_equal(found[0] > 0, found[1] > 0) and np.allclose(found[0], found[1], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompts_experts_in_ram_are_sent_beside_another_gpus(
    family: str, tmp_path: Path, stand_in: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, devices = exact(family, tmp_path), (stand_in, other)
    both, _ = on_two(model, QUARTERS["some on each"])
    all_there, one = placements.whole(model.spec), two_ops(devices[:1], model.spec)
    every = gpu_weights.load(model, all_there, devices[:1], one.cpu)
    two, counted, stats = two_ops(devices, model.spec, send_from=7), FFNStats(), FFNStats()
    parted = gpu_weights.load(model, both, devices, two.cpu)
    truth = logits(model.spec, every, one, all_there, 20, stats=counted)
    stand_in.watched = []
    assert nmse(logits(model.spec, parted, two, both, 20, stats=stats), truth) < SAME
    assert stats == counted
    assert "CPU" not in [s.name for s in stand_in.watched], "all that the CPU had was sent"


def opened(model: StoredModel, decision: Decision) -> Session:
    """A session on two devices of its own."""
    there = tuple(session_gpu.OpenGpu(StandIn(), torch_kernels, 1 << 30) for _ in range(2))
    options = EngineOptions(context=64, max_batch=4, threads=2)
    return Session(model, options, decision, gpus=Gpus(there, 1 << 31))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_comes_from_disk_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Against the same places with the CPU's experts in RAM."""
    model = packed(family, tmp_path)
    for proportion, slots in (("some on each", 1), ("none on the first", 2)):
        places, _ = on_two(model, QUARTERS[proportion])
        with opened(model, Decision(places)) as session:
            want = answers(session)
        with opened(model, with_slots(model, places, slots)) as session:
            assert answers(session) == want
            assert session.store is not None and session.store.counts().missed > 0


def test_damaged_rows_of_a_second_gpus_experts_are_refused(tmp_path: Path) -> None:
    model = packed("qwen3_moe", tmp_path)
    places, _ = on_two(model, [(1, 2)])
    theirs = places.layers[0].ranges[1]
    assert theirs.device == gpu(1) and theirs.whole is not None
    t = model.tensors["layers.0.down.weight"]
    with open(model.path / "weights.bin", "r+b") as f:
        f.seek(t.offset + theirs.whole[-1] * t.bytes // model.spec.n_experts)
        f.write(b"\xff" * 64)
    model, devices = Pack.open(model.path), (StandIn(), StandIn())
    ops = two_ops(devices, model.spec)
    with pytest.raises(BadFile, match="checksum"):
        gpu_weights.load(model, places, devices, ops.cpu)
    for device in devices:
        device.close()


def test_a_step_that_was_given_up_does_not_disturb_the_next(
    tmp_path: Path, stand_in: StandIn, other: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a step is awaited, or while a part is queued; also of a prompt whose experts are sent."""
    model, devices = packed("qwen3_moe", tmp_path), (stand_in, other)
    places, _ = on_two(model, QUARTERS["some on each"])
    ops = two_ops(devices, model.spec, send_from=20)
    made = gpu_weights.load(model, places, devices, ops.cpu)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    for chunk in (1, 20):
        first, again = FFNStats(), FFNStats()
        truth = logits(model.spec, made, ops, places, chunk, stats=first)
        for owner, name in ((StandIn, "wait"), (ops._side[0], "start"), (ops._side[0], "finish")):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(owner, name, interrupted)
                patch.setattr(torch_kernels, "norm", slowly(torch_kernels.norm))
                logits(model.spec, made, ops, places, chunk)
        assert np.array_equal(logits(model.spec, made, ops, places, chunk, stats=again), truth)
        assert again == first


def test_two_cards_of_the_driver_wait_for_each_other(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, card = exact("gpt_oss", tmp_path), fake_cuda.Card(count=2)
    both, together = on_two(model, QUARTERS["some on each"])
    one = two_ops((stand_in,), model.spec)
    held = gpu_weights.load(model, together, (stand_in,), one.cpu)
    truth = logits(model.spec, held, one, together, 5)
    fake_cuda.install(monkeypatch, card)
    devices = cuda.Cuda(0), cuda.Cuda(1)
    two = two_ops(devices, model.spec)  # type: ignore[arg-type]
    parted = gpu_weights.load(model, both, devices, two.cpu)
    assert nmse(logits(model.spec, parted, two, both, 5), truth) < SAME
    assert (
        card.faults.seen["wait_event"] == 8 * len(mixtures(model.spec)) * 2
    )  # steps, layers, there and back
    for device in devices:
        device.close()


# ---- plans and sessions


def of_two(vram: float, ram: float | None = None) -> EngineOptions:
    return asked(vram, ram, gpu="stand-in,stand-in")


def partition(x: LayerPlacement) -> list[int]:
    return sorted(e for r in x.ranges for e in (range(32) if r.whole is None else r.whole))


def test_a_second_gpu_takes_experts_that_the_first_has_no_room_for(
    path: Path, budgets: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the answer is the CPU's. Each takes what the plan says, to the byte."""
    monkeypatch.setattr("thermocline.ops.device.StandIn", Counting)
    model, (half, _) = open_model(path, "", None), budgets
    want, bare = alone(model), least(model, half)
    vram = bare + 0.6 * (half - bare)
    machine = this_machine.tiers_here(2, formats=[x.format for x in model.tensors.values()])
    monkeypatch.setattr(this_machine, "tiers_here", lambda *_, **__: machine)  # measured once
    with Session.open(model, asked(vram)) as session:
        assert session.plan is not None
        before, slower = session.placement, session.plan
    with Session.open(model, of_two(vram)) as session:
        placement, plan = session.placement, session.plan
        assert said(session) == want and plan is not None and session.gpus is not None
        assert placement.devices == ("gpu:0", "gpu:1") and not session.from_disk
        for name, opened in zip(placement.devices, session.gpus.opened, strict=True):
            device, promised = opened.device, placement.used(name) - placement.bytes[name]["runtime"]
            assert isinstance(device, Counting) and 0.99 * promised < device.taken <= promised
            assert placement.used(name) <= vram * GIB
    assert all(partition(x) == list(range(32)) for x in placement.layers)
    assert sum(len(x.whole) for x in placement.layers) > sum(len(x.whole) for x in before.layers)
    held = dict.fromkeys(("gpu:0", "gpu:1", CPU), 0)  # bytes, without padding: all are multiples of 64
    for i, x in enumerate(placement.layers):
        expert = (
            sum(model.tensors[f"layers.{i}.{part}.weight"].bytes for part in ("gate", "up", "down")) // 32
        )
        for r in x.ranges:
            held[r.device] += expert * len(range(32) if r.whole is None else r.whole)
    parts = ("gate rows", "up and down rows")
    assert held.pop(CPU) == sum(placement.bytes[CPU].get(p, 0) for p in parts) > 0
    assert held == {name: placement.bytes[name]["neurons"] for name in held}
    assert plan.share > slower.share and plan.tokens_per_s > slower.tokens_per_s
    assert any("beside each other" in note for note in plan.notes)


def test_ram_has_what_the_plan_says_and_the_biases_of_experts_that_are_elsewhere(
    tmp_path: Path, arenas: list[tuple[str, int]]
) -> None:
    """gpt-oss: the arena to the byte, with experts on two GPUs and in RAM."""
    model: StoredModel = test_synth.make(tmp_path, "gpt-oss-20b", "f16")
    with Session.open(model, asked(2.0)) as session:
        assert session.plan is not None
        there = session.plan.bytes["gpu"]
        vram = session.plan.used("gpu") - there["neurons"] * 2 // 3
    with Session.open(model, of_two(vram / GIB)) as session:
        assert session.plan is not None and session.placement.devices == ("gpu:0", "gpu:1")
        ram, counts = session.plan.bytes["ram"], [x.gpu // x.expert for x in session.plan.layers]
        assert ram == dict(session.placement.bytes[CPU]) and any(0 < n < 16 for n in counts)
        session.load()
    each = [
        t
        for n, t in model.tensors.items()
        if n.split(".")[2:] in (["gate", "bias"], ["up", "bias"], ["down", "bias"])
    ]
    assert len(each) == 3 * model.spec.n_layers
    assert 0 < ram["experts' biases"] <= sum(aligned(t.bytes) for t in each)
    weights = ("embedding", "routers", "experts' biases", "gate rows", "up and down rows")
    counted = sum(ram.get(part, 0) for part in weights)
    norms = sum(aligned(t.bytes) for n, t in model.tensors.items() if t.stride == t.bytes and t not in each)
    taken = sum(nbytes for what, nbytes in arenas if what == str(model.path))
    assert counted <= taken <= counted + norms


def test_the_second_gpu_has_the_experts_that_are_chosen_next(
    path: Path, budgets: tuple[float, float]
) -> None:
    model = open_model(path, "", None)
    layers, tokens = model.spec.n_layers, 512
    rng, active, p = np.random.default_rng(0), model.spec.n_experts_active, 1.0 / (1 + np.arange(32))
    orders = [rng.permutation(32) for _ in range(layers)]
    chosen = {
        i: np.array([order[rng.choice(32, active, False, p / p.sum())] for _ in range(tokens)], np.uint16)
        for i, order in enumerate(orders)
    }
    counts = {i: np.bincount(c.ravel(), minlength=32) for i, c in chosen.items()}
    write_routes(model, RouteProfile(tokens, "", counts, chosen))
    try:
        with Session.open(model, of_two(budgets[0])) as session:
            placement = session.placement
    finally:
        path_of(model).unlink()
    for i, x in enumerate(placement.layers):
        ranked, at = list(map(int, np.argsort(-counts[i], kind="stable"))), 0
        for device, r in itertools.zip_longest(("gpu:0", "gpu:1", "cpu"), x.ranges):
            if r is None:
                continue
            whole = r.whole or ()
            assert r.device == device and whole == tuple(sorted(ranked[at : at + len(whole)]))
            at += len(whole)
        assert at == 32


def test_what_was_on_disk_is_not_where_two_gpus_and_ram_have_room(
    path: Path, budgets: tuple[float, float]
) -> None:
    model, (vram, ram) = open_model(path, "", None), budgets
    want = alone(model)
    with Session.open(model, of_two(vram, ram)) as session:
        assert not session.from_disk and session.memory_bytes <= ram * GIB
        assert "disk buffers" not in session.placement.bytes[CPU] and "disk" not in session.placement.bytes
        assert said(session) == want
    smaller = vram - 0.75 * (vram - least(model, vram))
    with Session.open(model, of_two(smaller, ram)) as session:
        assert session.from_disk and session.memory_bytes <= ram * GIB
        assert session.placement.devices == ("gpu:0", "gpu:1") and there(session)
        assert session.decision.experts is not None and session.decision.experts.share < 1
        assert said(session) == want
        assert session.store is not None and session.store.counts().missed > 0


def least(model: StoredModel, vram: float) -> float:
    """GiB of a GPU's memory without experts."""
    with Session.open(model, asked(vram)) as session:
        assert session.plan is not None
        return vram - session.plan.bytes["gpu"]["neurons"] / GIB
