"""A mixture larger than a GPU's memory and RAM together: experts on all three tiers, the same answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import placements
import pytest
import test_synth
from answers import GREEDY, answers_of, prompts
from test_experts_on_disk import packed, small_pieces
from test_gpu_moe import Counting

from thermocline.cli import main
from thermocline.errors import BadFile, OutOfBudget, UsageError
from thermocline.machine.tiers import Tiers, read_tiers, render
from thermocline.model.sizes import aligned
from thermocline.opening.open_model import open_model
from thermocline.ops.device import StandIn
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.pack.route_profile import RouteProfile, path_of, write_routes
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.budget import Decision
from thermocline.plan.disk.expert_hits import OwnRouting
from thermocline.plan.disk.expert_split import ExpertSplit, Mixture, placed
from thermocline.plan.memory import GIB
from thermocline.plan.placement import LayerPlacement, Placement
from thermocline.session import gpu
from thermocline.session.gpu_tier import Gpus
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

pytestmark = pytest.mark.oracle

__all__ = ["small_pieces"]  # a fixture
Run = Callable[..., Any]
# With biases, with latents and a shared expert and a layer without experts, with states.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_stacked"]


def split(model: StoredModel, *shares: float) -> Placement:
    """That share of each layer's experts on the device, with attention."""
    spec = model.spec

    def layer(i: int) -> LayerPlacement:
        experts = spec.ffn(i).experts
        if experts < 2:
            return placements.layer(spec, True, False, placements.ALL if i % 2 else 0, index=i)
        return placements.experts(spec, True, round(shares[i % len(shares)] * experts), i, index=i)

    return Placement(tuple(map(layer, range(spec.n_layers))), "gpu:0", 64, 256)


def with_slots(model: StoredModel, places: Placement, slots: int) -> Decision:
    """With so many slots for the experts of each layer that are not on the device."""
    m = Mixture(model.spec, model.tensors).beside(places)
    s = ExpertSplit({}, {i: min(slots, n) for i, n in m.counts.items()}, m)
    return Decision(placed(s, places.context, places.kv_tokens, places), mixture=m)


def opened(model: StoredModel, decision: Decision) -> Session:
    """A session on a device of its own."""
    there = gpu.OpenGpu(StandIn(), torch_kernels, 1 << 30)
    options = EngineOptions(context=64, max_batch=4, threads=2)
    return Session(model, options, decision, gpus=Gpus((there,), 1 << 31))


def answers(session: Session) -> list[Any]:
    """All answers; steps of one are recorded."""
    return answers_of(session.load(), session.pack.spec.vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_comes_from_disk_changes_no_bit(family: str, tmp_path: Path) -> None:
    """Against the same places with the rest in RAM: no cache, no company changes a bit there."""
    model = packed(family, tmp_path)
    for shares, slots in (((0.5, 0.25), 1), ((0.25, 1.0), 2), ((0.75, 0.0), 1)):
        places = split(model, *shares)
        with opened(model, Decision(places)) as session:
            want = answers(session)
        with opened(model, with_slots(model, places, slots)) as session:
            assert answers(session) == want
            assert session.store is not None and session.store.counts().missed > 0


def test_a_damaged_expert_is_named_from_within_a_step(tmp_path: Path) -> None:
    """And the session goes on for what does not need it."""
    model = packed("gpt_oss", tmp_path)
    decision = with_slots(model, split(model, 0.25), 1)
    assert decision.mixture is not None
    slabs = [(i, r.slabs[0]) for i, r in decision.mixture.records.items()]
    with opened(model, decision) as session:
        want = answers(session)
        engine = session.load()
        kept = model.parts[0][0].read_bytes()
        with open(model.parts[0][0], "r+b") as f:
            for i, slab in slabs:
                for e in decision.mixture.here(i):
                    for run in model.file_rows(slab.tensor, e * slab.rows, slab.rows, 0):
                        f.seek(run.at)
                        f.write(bytes(16))
        request = engine.submit(prompts(model.spec.vocab_size)[0][::-1], GREEDY)
        while engine.step():
            pass
        assert isinstance(request.error, BadFile)
        named = r"layers\.\d+\.gate\.weight, of the experts beside the GPU, expert \d: checksum mismatch"
        assert re.search(named, str(request.error))
        engine.check_integrity()
        model.parts[0][0].write_bytes(kept)
    again = Pack.open(model.path)
    with opened(again, with_slots(again, split(again, 0.25), 1)) as session:
        assert answers(session) == want


# ---- plans and sessions


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF, which runs in place."""
    base = tmp_path_factory.mktemp("mixture")
    config = test_synth.config_file(base, "qwen3-30b-a3b", num_experts=32, moe_intermediate_size=512)
    out = ["-o", str(base / "pack"), "--gguf", str(base / "m.gguf"), "-q"]
    assert main.main(["synth", str(config), "--format", "f16", *out]) == 0
    return base / "m.gguf"


def asked(vram: float, ram: float | None = None, **more: Any) -> EngineOptions:
    how: dict[str, Any] = {"context": 64, "max_batch": 1, "threads": 2, "gpu": "stand-in"}
    return EngineOptions(**how | {"vram": vram, "ram": ram} | more)


def said(session: Session) -> list[int]:
    engine = session.load()
    request = engine.submit(prompts(512)[0], GREEDY)
    while engine.step():
        pass
    return request.completion().token_ids


def there(session: Session) -> int:
    """Experts on the device."""
    return sum(len(x.whole) for x in session.placement.layers)


@pytest.fixture(scope="module")
def budgets(path: Path) -> tuple[float, float]:
    """(GiB of VRAM for half of the experts, of RAM for a quarter of them)"""
    model = open_model(path, "", None)
    with Session.open(model, asked(2.0)) as session:
        assert session.plan is not None
        neurons = session.plan.bytes["gpu"]["neurons"]
        vram = (session.plan.used("gpu") - neurons // 2) / GIB
    with Session.open(model, asked(vram)) as session:
        return vram, (session.memory_bytes - neurons // 4) / GIB


def alone(model: StoredModel) -> list[int]:
    """What the CPU says with all of it in memory."""
    with Session.open(model, EngineOptions(context=64, max_batch=1, threads=2)) as session:
        return said(session)


def test_a_session_has_experts_beside_ram_and_takes_what_its_plan_says(
    path: Path, budgets: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thermocline.ops.device.StandIn", Counting)
    model = open_model(path, "", None)
    want, every = alone(model), 32 * model.spec.n_layers
    vram, _ = budgets
    for gib, least, most in ((2.0, every, every), (vram, 1, every - 1)):
        with Session.open(model, asked(gib)) as session:
            assert said(session) == want and least <= there(session) <= most
            assert not session.from_disk and session.gpus is not None and session.plan is not None
            promised = session.plan.used("gpu") - session.plan.bytes["gpu"]["runtime"]
            device = session.gpus.opened[0].device
            assert isinstance(device, Counting) and 0.99 * promised < device.taken <= promised
            assert any("the first of each layer" in n for n in session.plan.notes)


def test_ram_has_the_biases_of_experts_that_are_elsewhere(
    tmp_path: Path, arenas: list[tuple[str, int]]
) -> None:
    """gpt-oss: the CPU's memory has those of all experts, and a plan counts them."""
    model: StoredModel = test_synth.make(tmp_path, "gpt-oss-20b", "f16")
    with Session.open(model, asked(2.0)) as session:
        assert session.plan is not None and there(session) == 16 * model.spec.n_layers
        session.load()
        ram = session.plan.bytes["ram"]
    theirs = re.compile(r"layers\.\d+\.(gate|up|down)\.bias")
    biases = [aligned(t.bytes) for n, t in model.tensors.items() if theirs.fullmatch(n)]
    assert len(biases) == 3 * model.spec.n_layers and ram["experts' biases"] == sum(biases)
    # Norms, and biases of attention and head, are small, and count where their matrices are.
    counted = re.compile(theirs.pattern + r"|layers\.\d+\.router\.bias")
    vectors = [(n, t) for n, t in model.tensors.items() if t.stride == t.bytes or theirs.fullmatch(n)]
    small = [aligned(t.bytes) for n, t in vectors if not counted.fullmatch(n)]
    taken = sum(nbytes for what, nbytes in arenas if what == str(model.path))
    assert taken == ram["embedding"] + ram["routers"] + ram["experts' biases"] + sum(small)


def test_a_session_has_experts_on_three_tiers(
    path: Path, budgets: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    model = open_model(path, "", None)
    want = alone(model)
    vram, ram = budgets
    with Session.open(model, asked(vram, ram)) as session:
        found = session.decision.experts
        assert found is not None and there(session) and 0.5 < found.share < 1
        assert session.memory_bytes <= ram * GIB
        dearest = max(r.stride for r in found.mixture.records.values())
        assert ram * GIB - session.memory_bytes < 2 * dearest, "the rest holds no expert"
        assert said(session) == want
        assert session.store is not None and session.store.counts().missed > 0
    assert f"there is room for {found.share:.0%} of its experts" in caplog.text


def test_reads_beside_a_gpu_are_not_bounded(path: Path, budgets: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match=r"--read-budget 30: beside a GPU .* or give --gpu off"):
        Session.open(open_model(path, "", None), asked(*budgets, read_budget=30.0))


def test_less_than_the_least_is_refused_with_what_would_be_enough(
    path: Path, budgets: tuple[float, float]
) -> None:
    model = open_model(path, "", None)
    vram, _ = budgets
    with pytest.raises(OutOfBudget) as refused:
        Session.open(model, asked(vram, 0.55))
    enough = float(re.search(r"--ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]
    assert "\n" not in str(refused.value) and enough > 0.55
    with Session.open(model, asked(vram, enough)) as session:
        assert session.from_disk and len(said(session)) == 5


def machine(vram: float) -> Tiers:
    known = read_tiers("rtx4090-i9-13900k")
    kernels = known.cpu.kernels | {"f32": known.cpu.kernels["f16"]}
    card = replace(gpu.PRETENDED, vram_bytes=int(vram * GIB))
    return replace(known, gpu=card, cpu=replace(known.cpu, threads=2, kernels=kernels))


@pytest.mark.parametrize("where", ["beside RAM", "beside RAM and disk"])
def test_what_is_planned_is_what_runs(
    where: str,
    path: Path,
    budgets: tuple[float, float],
    tmp_path: Path,
    thermocline: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, disk = open_model(path, "", None), where.endswith("disk")
    vram, ram = budgets
    here = machine(vram)
    bare = replace(here, gpu=None, disk=None)
    monkeypatch.setattr("thermocline.machine.this_machine.tiers_here", lambda *_, **__: bare)
    monkeypatch.setattr("thermocline.machine.this_machine.disk_tier", lambda _: here.disk)
    monkeypatch.setattr("thermocline.machine.disk_speed.measure_file", lambda _, threads: None)
    (tmp_path / "here.toml").write_text(render(replace(here, disk=here.disk if disk else None)))
    limits = ["--vram", repr(vram), "--ram", repr(ram if disk else 4.0)]
    command = ["plan", path, "--hardware", tmp_path / "here.toml", "--ctx", "64", *limits]
    planned = thermocline(*command, "--json")
    assert planned.code == 0, planned.err
    plan = json.loads(planned.out)
    with Session.open(model, asked(vram, ram if disk else 4.0)) as session:
        placement = json.loads(json.dumps(session.placement.json()))
        assert plan["placement"] == placement and session.from_disk == disk
    ranges = [x["ranges"] for x in placement["layers"]]
    assert all(sum(r["neurons"] * len(r["whole"] or range(32)) for r in each) == 32 * 512 for each in ranges)
    text = thermocline(*command).out
    assert re.search(r"experts (\d+ gpu, )?\d+ ram, \d+ disk" if disk else r"experts \d+ gpu", text), text
    for x in plan["layers"]:
        assert x["gpu"] % 512 == 0 and x["gpu"] + x["ram"] + x["disk"] == 32 * 512


def test_the_gpu_has_the_experts_that_are_chosen_most(path: Path, budgets: tuple[float, float]) -> None:
    """By the profile's counts; what a token needs of the others is what its trace has."""
    model = open_model(path, "", None)
    layers, tokens = model.spec.n_layers, 512
    rng, active = np.random.default_rng(0), model.spec.n_experts_active
    p = 1.0 / (1 + np.arange(32))
    orders = [rng.permutation(32) for _ in range(layers)]
    chosen = {
        i: np.array([order[rng.choice(32, active, False, p / p.sum())] for _ in range(tokens)], np.uint16)
        for i, order in enumerate(orders)
    }
    counts = {i: np.bincount(c.ravel(), minlength=32) for i, c in chosen.items()}
    vram, _ = budgets
    write_routes(model, RouteProfile(tokens, "", counts, chosen))
    try:
        with Session.open(model, asked(vram)) as session:
            placement, plan = session.placement, session.plan
        assert plan is not None and any("chosen most" in n for n in plan.notes)
        taken = 0.0
        for i, x in enumerate(placement.layers):
            ranked = np.argsort(-counts[i], kind="stable")
            assert x.whole == tuple(sorted(map(int, ranked[: len(x.whole)])))
            taken += counts[i][list(x.whole)].sum() / tokens / active
            beside = OwnRouting(tokens, 32, active, {i: p.astype(np.float32)}, {i: chosen[i]})
            beside = beside.without({i: x.whole})
            rest = np.isin(chosen[i], x.whole, invert=True).sum(axis=1)
            assert beside.requests(i) == pytest.approx(rest.mean())
            assert beside.missed(i, 32 - len(x.whole)).sum() == 0
        assert plan.share == pytest.approx(taken / layers, abs=1e-6)
        assert plan.share > 1.2 * sum(len(x.whole) for x in placement.layers) / (32 * layers)
    finally:
        path_of(model).unlink()
