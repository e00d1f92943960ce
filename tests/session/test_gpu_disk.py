"""A model larger than a GPU's memory and RAM together: neurons on all three tiers, the same answers."""

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
from test_disk_tier import PROMPT, small_buffers, wide_pack
from test_gpu import gpu_ops, logits, opt_pack, pack_of, predictors_of, stand_in
from test_options import SPEC

from thermocline import LLM, SamplingParams
from thermocline.errors import BadFile, OutOfBudget
from thermocline.ops.device import StandIn
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import FFNStats, Weights
from thermocline.pack.checksums import open_checksums
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors
from thermocline.plan import hotness, problem
from thermocline.plan.disk import disk_split
from thermocline.plan.disk.disk_split import Arrangement, Contents
from thermocline.plan.memory import GIB
from thermocline.plan.placement import Placement
from thermocline.session import gpu_weights
from thermocline.session.store import Store

pytestmark = pytest.mark.oracle

__all__ = ["small_buffers", "stand_in", "wide_pack"]  # fixtures
NEURONS = 2048
WIDE = {"intermediate_size": NEURONS}


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `small_buffers`, for the planner."""
    monkeypatch.setattr(problem, "STAGING_BYTES", 1 << 20)


def arranged(pack: Pack, places: Placement, predictors: Predictors | None, more: int = 0) -> Arrangement:
    """The least memory there can be for what is not on the device, and `more`."""
    held = {s.name for s in gpu_weights.splits(pack.spec, pack.tensors, places) if s.kept}
    contents = Contents(
        pack.spec,
        {n: t for n, t in pack.tensors.items() if n in held},
        None if predictors is None else predictors.nbytes,
        "exact" if predictors is None else "predict",
        hotness.of_pack(pack, hotness.Curve()),
        tuple(map(gpu_weights.gpu_neurons, places.layers)),
    )
    return disk_split.arrange(contents, disk_split.least_bytes(contents, {}) + more, {})


def in_part(
    pack: Pack, places: Placement, ops: GpuOps, predictors: Predictors | None = None, more: int = 0
) -> tuple[Weights, Store]:
    a, records = arranged(pack, places, predictors, more), open_checksums(pack)
    return gpu_weights.load_in_part(pack, places, a, records, (ops.device,), ops.cpu, predictors=predictors)


def places(*neurons: int, attention: bool = True, predictor: bool = False) -> Placement:
    spec = replace(SPEC, n_layers=3, ffn_dim=NEURONS)
    return Placement(tuple(placements.layer(spec, attention, predictor, n) for n in neurons), "gpu:0")


PLACED = [
    places(NEURONS, 96, 0),
    places(32, 1024, 2016, predictor=True),
    places(0, 0, 0, attention=False),
    replace(places(64, 64, NEURONS, attention=False, predictor=True), head="cpu"),
]


@pytest.mark.parametrize("where", range(len(PLACED)))
@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("predicted", [False, True])
def test_what_comes_from_disk_changes_no_bit(
    where: int, family: str, predicted: bool, tmp_path: Path, stand_in: StandIn
) -> None:
    """Against the same places with the rest in RAM: steps that are recorded, guessed or not, and prompts."""
    made = {"llama": pack_of, "opt": opt_pack}[family]
    pack = made(tmp_path, "f16", **({"ffn_dim": NEURONS} if family == "opt" else WIDE))
    assert pack.spec.ffn_dim == NEURONS
    found = predictors_of(pack) if predicted else None
    how = {"sparsity": "predict" if predicted else "exact"}
    for chunk in (1, 3, 12):
        ops = gpu_ops(stand_in, pack.spec, rank=NEURONS)
        whole = gpu_weights.load(pack, PLACED[where], (stand_in,), ops.cpu, predictors=found)
        want_stats, stats = FFNStats(), FFNStats()
        want = logits(pack.spec, whole, ops, PLACED[where], chunk, **how, stats=want_stats)
        ops = gpu_ops(stand_in, pack.spec, rank=NEURONS)
        some, disk = in_part(pack, PLACED[where], ops, found)
        got = logits(pack.spec, some, ops, PLACED[where], chunk, **how, stats=stats)
        assert np.array_equal(got, want) and stats == want_stats
        missed = disk.counts().missed
        assert missed > 0 or all(gpu_weights.gpu_neurons(x) == NEURONS for x in PLACED[where].layers)


def test_rows_on_the_gpu_take_no_memory_beside_it(tmp_path: Path) -> None:
    pack = pack_of(tmp_path, "f16", **WIDE)
    few, many = (arranged(pack, places(n, n, n), None) for n in (32, 1024))
    assert few.parts["gate rows"] - many.parts["gate rows"] == 3 * 992 * 2 * pack.spec.dim
    assert few.share < many.share < 1
    whole = arranged(pack, places(NEURONS, NEURONS, 32), None)
    assert whole.places(whole.bundles)[:2] == [0, 0] and whole.parts.get("attention", 0) < 1 << 16


def test_a_damaged_neuron_is_named_from_within_a_step(tmp_path: Path, stand_in: StandIn) -> None:
    """And the session goes on for those that are whole."""
    pack = pack_of(tmp_path, "f16", **WIDE)
    ops, where = gpu_ops(stand_in, pack.spec), places(64, 64, 64)
    made, _ = in_part(pack, where, ops)
    t = pack.tensors["layers.1.bundle"]
    with open(pack.weights_path, "r+b") as f:
        f.seek(t.offset + 64 * t.stride)
        was = f.read(t.stride * (NEURONS - 64))
        f.seek(t.offset + 64 * t.stride)
        f.write(bytes(len(was)))
    for chunk in (1, 40):
        with pytest.raises(BadFile, match=r"layers\.1\.bundle: neuron \d+: checksum mismatch"):
            logits(pack.spec, made, ops, where, chunk)
    with open(pack.weights_path, "r+b") as f:
        f.seek(t.offset + 64 * t.stride)
        f.write(was)
    fresh = gpu_ops(stand_in, pack.spec)
    truth = gpu_weights.load(pack, where, (stand_in,), fresh.cpu)
    assert np.array_equal(logits(pack.spec, made, ops, where, 1), logits(pack.spec, truth, fresh, where, 1))


# ---- a session


def opened(pack: Path, **how: Any) -> LLM:
    return LLM(pack, context=64, max_batch=1, threads=2, **how)


def said(llm: LLM) -> list[int]:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    return llm.generate(PROMPT[:60], params).token_ids


def budgets(pack: Path) -> tuple[float, float]:
    """(GiB of VRAM for half of the neurons, of RAM for the other half)"""
    with opened(pack, gpu="stand-in", vram=2.0, lazy=True) as llm:
        assert llm.session.plan is not None
        parts = llm.session.plan.bytes
        vram = llm.session.plan.used("gpu") - parts["gpu"]["neurons"] // 2
    with opened(pack, gpu="stand-in", vram=vram / GIB, lazy=True) as llm:
        assert llm.session.plan is not None and llm.session.arrangement is None
        return vram / GIB, llm.memory_bytes / GIB


def test_a_session_has_neurons_on_three_tiers(wide_pack: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(wide_pack, gpu="off") as llm:
        want = said(llm)
    vram, ram = budgets(wide_pack)
    for less in (0.001, 0.0025):
        with opened(wide_pack, gpu="stand-in", vram=vram, ram=ram - less) as llm:
            assert llm.session.plan is not None and llm.session.arrangement is not None
            assert llm.memory_bytes <= (ram - less) * GIB
            assert 0.4 < llm.session.arrangement.share < 1
            assert said(llm) == want
            assert llm.session.store is not None and llm.session.store.counts().missed > 0
    assert any("the others come from disk" in line for line in caplog.messages)


def test_less_than_the_least_is_refused_with_what_would_be_enough(wide_pack: Path) -> None:
    vram, ram = budgets(wide_pack)
    with pytest.raises(OutOfBudget) as refused:
        opened(wide_pack, gpu="stand-in", vram=vram, ram=0.3)
    enough = float(re.search(r"--ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]
    assert 0.3 < enough < ram


def test_run_says_what_came_from_disk_beside_a_gpu(wide_pack: Path, thermocline: Callable[..., Any]) -> None:
    vram, ram = budgets(wide_pack)
    argv = ["run", "-m", wide_pack, "-c", "64", "-n", "8", "--temp", "0", "--ignore-eos", "--json"]
    argv += ["--gpu", "stand-in", "--vram", f"{vram:.6f}", "--ram", f"{ram - 0.002:.6f}", "Once"]
    ran = thermocline(*map(str, argv))
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert told["gpu"]["share"] > 0.2 and told["disk_bytes_per_token"] > 0
    assert told["memory_bytes"] <= (ram - 0.002) * GIB + 1024
    assert "stand-in: " in ran.err and "come from disk when they are needed" in ran.err


def test_neurons_that_cannot_be_skipped_are_not_left_on_disk(tmp_path: Path) -> None:
    pack = pack_of(tmp_path, "f32", hidden_act="silu", intermediate_size=8192)
    with pytest.raises(OutOfBudget):
        opened(pack.path, gpu="stand-in", vram=0.56, ram=0.55)
