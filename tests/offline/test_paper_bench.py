"""`bench/plan/paper_*.py`: the planner's model beside the figures of PowerInfer's paper."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def ablation() -> Iterator[ModuleType]:
    bench = str(Path(__file__).parents[2] / "bench/plan")
    sys.path.insert(0, bench)
    yield importlib.import_module("paper_ablation")
    sys.path.remove(bench)


def test_each_part_of_powerinfer_is_worth_about_what_its_paper_measured(ablation: ModuleType) -> None:
    """Nothing is fitted to these figures: bandwidths and published sparsity give them within a fifth."""
    rows = list(ablation.steps())
    assert [r["step"] for r in rows] == ["llama.cpp", "+PO", "+Engine", "+Policy"]
    for r in rows:
        assert r["ours"] == pytest.approx(r["paper"], rel=0.2), r
    for column in ("ours", "theirs"):
        speeds = [r[column] for r in rows]
        assert speeds == sorted(speeds)


def test_a_batch_whose_tokens_are_alike_is_faster(ablation: ModuleType) -> None:
    case = ablation.Case("Falcon-40B", "f16", "PC-High", 8)
    with ablation.asking(8):
        alike, apart = (ablation.as_many(case, n) for n in (1, 8))
    assert alike > 1.5 * apart > 0
    assert ablation.cost.PREDICT_TOKENS == 4


def test_a_model_of_the_paper_is_planned_beside_its_figure(ablation: ModuleType) -> None:
    found = importlib.import_module("paper_plans").row("OPT-30B", "f16", "PC-High")
    assert found["paper_ts"] == 12.0 and found["bound"] == "GPU"
    assert found["as_powerinfer_ts"] == pytest.approx(12.0, rel=0.1)


def test_forecasts_say_what_they_assume(ablation: ModuleType) -> None:
    """A 7B that is all in VRAM takes its bytes over the assumed share of the roof, and its launches."""
    forecasts = importlib.import_module("forecasts")
    case, tiers = forecasts.CASES[1], forecasts.MACHINES["RTX 4090"]
    found = forecasts.decode(case, tiers)
    subject = case.subject()
    assert case.format == "q4_0" and found["gpu_share"] == 1.0
    nbytes = subject.sizes.weights_bytes - subject.sizes.embed.bytes
    for (share, launch_us), speed in zip(forecasts.ASSUMED, found["tokens_per_s"], strict=True):
        us = (
            nbytes / (share * tiers.gpu.read_gbs * 1e3)
            + subject.spec.n_layers * found["launches"] * launch_us
        )
        assert 0.8 < speed * us / 1e6 < 1, "beside that keys, values and the engine's own"
    slow, fast = forecasts.prompt("RTX 4090", tiers)["tokens_per_s"]
    assert slow > 0 and fast == pytest.approx(2 * slow, rel=0.01)
    lines = forecasts.table([{"case": case.name, "machine": "RTX 4090", **found}]).splitlines()
    assert lines[0].startswith("FORECASTS") and "0.8 and 3 us" in lines[0] and len(lines) == 3
