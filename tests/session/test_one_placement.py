"""One placement: `plan --json` prints it before a weight is read, and `run --json` repeats it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_disk_tier import hf_directory, small_buffers, wide_pack

from thermocline import LLM, SamplingParams
from thermocline.cli import main
from thermocline.errors import OutOfBudget, UsageError
from thermocline.machine import disk_speed, this_machine
from thermocline.machine.tiers import Tiers, read_tiers, render
from thermocline.plan import problem
from thermocline.plan.disk.disk_split import arrangement_of, beside
from thermocline.plan.memory import GIB
from thermocline.plan.placement import Placement
from thermocline.session import gpu

__all__ = ["small_buffers", "wide_pack"]  # fixtures
Run = Callable[..., Any]
ORDER = ["gpu:0", "gpu:1", "cpu"]
OPEN: dict[str, Any] = {"threads": 2, "context": 512, "max_batch": 1}
ORACLE = pytest.mark.oracle  # a stand-in is torch's


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `small_buffers`, for the planner."""
    monkeypatch.setattr(problem, "STAGING_BYTES", 1 << 20)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Tiers:
    """The machine that both commands measure: its figures are fixed, it has a disk and no GPU."""
    known = read_tiers("rtx4090-i9-13900k")
    kernels = known.cpu.kernels | {"f32": known.cpu.kernels["f16"]}
    here = replace(known, gpu=None, cpu=replace(known.cpu, threads=2, kernels=kernels))
    monkeypatch.setattr(this_machine, "tiers_here", lambda *_, **__: replace(here, disk=None))
    monkeypatch.setattr(this_machine, "disk_tier", lambda _: here.disk)
    monkeypatch.setattr(disk_speed, "measure_file", lambda _, threads: None)
    return here


def budgets(pack: Path, where: str) -> dict[str, float]:
    """Return GiB that leave the whole model in RAM, some neurons on disk, or some on a GPU of that size."""
    with LLM(pack, **OPEN, lazy=True) as llm:
        every = llm.session.placement.bytes["cpu"]
        rows, most = every["up and down rows"], sum(every.values())
    if where == "RAM":
        return {"ram": 2 * most / GIB}
    if where == "RAM and disk":
        return {"ram": (most - rows / 3) / GIB}
    with LLM(pack, **OPEN, gpu="stand-in", vram=2.0, lazy=True) as llm:
        there = llm.session.placement.bytes["gpu:0"]
        vram = sum(there.values()) - there["neurons"] // 2
    if where == "GPU":
        return {"ram": 4.0, "vram": vram / GIB}
    with LLM(pack, **OPEN, gpu="stand-in", vram=vram / GIB, lazy=True) as llm:
        return {"ram": llm.memory_bytes / GIB - 0.002, "vram": vram / GIB}


@pytest.mark.parametrize(
    "where",
    ["RAM", "RAM and disk", pytest.param("GPU", marks=ORACLE), pytest.param("GPU and disk", marks=ORACLE)],
)
def test_what_is_planned_is_what_runs(
    where: str, wide_pack: Path, machine: Tiers, tmp_path: Path, thermocline: Run
) -> None:
    asked = budgets(wide_pack, where)
    if "vram" in asked:
        pretended = replace(gpu.PRETENDED, vram_bytes=int(asked["vram"] * GIB))
        machine = replace(machine, gpu=pretended)
    (tmp_path / "here.toml").write_text(render(machine))
    limits = [x for name, gib in asked.items() for x in (f"--{name}", repr(gib))]
    planned = thermocline(
        "plan", wide_pack, "--hardware", tmp_path / "here.toml", "--ctx", "512", *limits, "--json"
    )
    assert planned.code == 0, planned.err
    how = ["--gpu", "stand-in"] if "vram" in asked else []
    ran = thermocline(
        "run", "-m", wide_pack, "-c", "512", "-t", "2", "-n", "1", *how, *limits, "--json", "Cold"
    )
    assert ran.code == 0, ran.err
    placement = json.loads(planned.out)["placement"]
    assert placement == json.loads(ran.out)["placement"]
    ranges = [r for x in placement["layers"] for r in x["ranges"]]
    assert any(r["device"] == "gpu:0" for r in ranges) == where.startswith("GPU")
    assert any(r["slots"] is not None for r in ranges) == where.endswith("disk")
    assert all(sum(r["neurons"] for r in x["ranges"]) == 8192 for x in placement["layers"])


@pytest.mark.parametrize("where", ["RAM and disk", pytest.param("GPU and disk", marks=ORACLE)])
def test_the_shares_of_memory_are_those_of_the_placement(where: str, wide_pack: Path, machine: Tiers) -> None:
    """A session has nothing but its placement to load from: slots there and back are the same shares."""
    how: dict[str, Any] = {**OPEN, **budgets(wide_pack, where), "lazy": True}
    with LLM(wide_pack, **how, gpu="stand-in" if "GPU" in where else "off") as llm:
        placement, a = llm.session.placement, llm.session.arrangement
        assert a is not None and llm.session.decision.contents is not None
        again = arrangement_of(beside(llm.session.decision.contents, placement), placement)
        assert (again.bundles, again.gates, again.bytes) == (a.bundles, a.gates, llm.memory_bytes)
        slots = [s for x in placement.layers if x.rest is not None for s in x.rest.slots or ()]
        assert sum(slots) == sum(s.places for s in a.bundles) > 0


def said(pack: Path, **how: Any) -> tuple[list[int], Placement]:
    with LLM(pack, **{**OPEN, **how}) as llm:
        done = llm.generate("Cold", SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        return done.token_ids, llm.session.placement


@ORACLE
def test_a_second_gpu_takes_the_hottest_neurons_that_the_first_has_no_room_for(
    wide_pack: Path, machine: Tiers
) -> None:
    """And the answer is the CPU's."""
    want, _ = said(wide_pack)
    how = budgets(wide_pack, "GPU")
    one = said(wide_pack, gpu="stand-in", **how)
    two = said(wide_pack, gpu="stand-in,stand-in", **how)
    assert one[0] == two[0] == want
    assert two[1].devices == ("gpu:0", "gpu:1") and one[1].devices == ("gpu:0",)
    for y in two[1].layers:
        assert [r.device for r in y.ranges] == sorted({r.device for r in y.ranges}, key=ORDER.index)
        assert sum(r.neurons for r in y.ranges) == 8192
    assert sum(x.on_gpus for x in two[1].layers) > sum(x.on_gpus for x in one[1].layers)
    assert two[1].used("cpu") < one[1].used("cpu")
    assert all(two[1].used(name) <= how["vram"] * GIB for name in two[1].devices)


@ORACLE
def test_a_second_gpu_takes_ffns_that_neither_the_first_nor_ram_has_room_for(
    tmp_path: Path, machine: Tiers
) -> None:
    """Of a model without ReLU, whose rows no session leaves on disk beside a GPU; the answer is the CPU's."""
    source, pack = hf_directory(tmp_path / "hf"), tmp_path / "pack"
    config = json.loads((source / "config.json").read_text()) | {"hidden_act": "silu"}
    (source / "config.json").write_text(json.dumps(config))
    assert main.main(["pack", str(source), "-o", str(pack), "--format", "f32", "-q"]) == 0
    want, _ = said(pack)
    with LLM(pack, **OPEN, gpu="stand-in", vram=2.0, lazy=True) as llm:
        there, here = (llm.session.placement.bytes[name] for name in ("gpu:0", "cpu"))
    one = there["neurons"] // len(llm.session.placement.layers)
    vram = (sum(there.values()) - one) / GIB
    how: dict[str, Any] = {"ram": (sum(here.values()) + one // 2) / GIB}
    with pytest.raises(OutOfBudget):
        said(pack, gpu="stand-in", vram=vram, **how)
    got, placement = said(pack, gpu="stand-in,stand-in", vram=vram, **how)
    assert got == want
    assert sorted(r.device for x in placement.layers for r in x.ranges) == ["gpu:0", "gpu:1"]
    assert {x.attention for x in placement.layers} == {"gpu:0"} and not placement.from_disk


def test_several_gpus_are_named_once_each_by_number(wide_pack: Path) -> None:
    for wrong in ("0,0", "0,auto", "0,"):
        with pytest.raises(UsageError, match="each once"):
            LLM(wide_pack, **OPEN, gpu=wrong)
