"""Hardware files: what a person may get wrong in one is named by its key."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline.errors import BadFile, UsageError
from thermocline.machine import hardware, this_machine, tiers
from thermocline.machine.tiers import ARRANGED_GBS, parse_tiers, read_tiers, render, tiers_json
from thermocline.model import quant

Json = dict[str, Any]
GOOD = tiers_json(read_tiers("rtx4090-i9-13900k"))


def test_known_machines_are_read_by_name_and_keep_their_values(tmp_path: Path) -> None:
    assert tiers.names() == ["rtx2080ti-i7-12700k", "rtx4090-i9-13900k"]
    for name in tiers.names():
        found = read_tiers(name)
        (tmp_path / "hw.json").write_text(render(found))
        assert read_tiers(str(tmp_path / "hw.json")) == found
        assert "arXiv" in found.source and "estimate" in found.source
    assert read_tiers("rtx2080ti-i7-12700k").cpu.read_gbs == 38.4


def test_doctors_json_is_a_hardware_file_too(tmp_path: Path) -> None:
    (tmp_path / "doctor.json").write_text(json.dumps({"python": "3.11", "tiers": GOOD}))
    assert tiers_json(read_tiers(str(tmp_path / "doctor.json"))) == GOOD


@pytest.mark.parametrize("format", quant.FORMATS)
def test_kernels_are_measured_with_normal_numbers(format: str) -> None:
    """Subnormal ones take a processor many times as long: MXFP4 was planned for at a tenth of its speed."""
    row = quant.row_bytes(format, 4096)
    arena = this_machine.weights_of_any_format(64 * row)
    stored = np.array((ctypes.c_uint8 * (64 * row)).from_address(arena.address)).reshape(64, row)
    size = np.abs(quant.decode(format, stored, 4096))
    size = size[size != 0]
    assert len(size) and np.isfinite(size).all()
    # A row's sum, and its products with scales of int8 columns, stay within f32's normal numbers, too.
    assert size.min() > 1e-30 and size.max() < 1e30


def change(*path: str, to: Any) -> Callable[[Json], None]:
    def apply(value: Json) -> None:
        for key in path[:-1]:
            value = value[key]
        value[path[-1]] = to

    return apply


def drop(*path: str) -> Callable[[Json], None]:
    def apply(value: Json) -> None:
        for key in path[:-1]:
            value = value[key]
        del value[path[-1]]

    return apply


BAD: dict[str, tuple[Callable[[Json], None], str]] = {
    "missing": (drop("cpu", "read_gbs"), "cpu.read_gbs is missing"),
    "missing section": (drop("disk"), "disk is missing"),
    "unknown": (change("gpu", "tflops", to=3), "unknown key 'gpu.tflops'"),
    "negative": (change("gpu", "sync_us", to=-1), "gpu.sync_us is -1"),
    "zero": (change("disk", "read_gbs", to=0), "disk.read_gbs is 0"),
    "text": (change("cpu", "ram_bytes", to="64 GB"), "cpu.ram_bytes is '64 GB'"),
    "fraction of a byte": (change("cpu", "ram_bytes", to=1.5), "cpu.ram_bytes is 1.5"),
    "boolean": (change("cpu", "threads", to=True), "cpu.threads is True"),
    "not a number": (change("cpu", "read_gbs", to=float("nan")), "cpu.read_gbs is nan"),
    "endless": (change("cpu", "read_gbs", to=float("inf")), "cpu.read_gbs is inf"),
    "absurd": (change("gpu", "vram_bytes", to=10**30), "gpu.vram_bytes is 1000000"),
    "a list": (change("cpu", to=[]), "cpu is []"),
    "no kernels": (change("cpu", "kernels", to={}), "cpu.kernels is {}"),
    "kernel": (drop("cpu", "kernels", "q4_0", "gflops"), "cpu.kernels.q4_0.gflops is missing"),
    "faster than memory": (change("cpu", "kernels", "f16", "gbs", to=500), "cpu.kernels.f16.gbs is 500"),
    "more than all": (change("gpu", "share", to=1.2), "gpu.share is 1.2"),
    "foreign": (change("kind", to="recipe"), "kind is not"),
    "later": (change("version", to=2), "version is not 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_its_key(name: str) -> None:
    apply, said = BAD[name]
    value = copy.deepcopy(GOOD)
    apply(value)
    with pytest.raises(BadFile) as e:
        parse_tiers(value, "hw.json")
    assert said in str(e.value) and str(e.value).startswith("hw.json: ") and "\n" not in str(e.value)


def test_nan_in_the_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hw.json").write_text(json.dumps(GOOD).replace("67.2", "NaN"))
    with pytest.raises(BadFile, match="NaN"):
        read_tiers(str(tmp_path / "hw.json"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="rtx4090-i9-13900k"):
        read_tiers("rtx9090")


def test_a_format_without_figures_is_as_slow_as_any_and_a_sentence_says_so() -> None:
    tiers = read_tiers("rtx4090-i9-13900k")
    assert (tiers.kernel("q4_k").gbs, tiers.kernel("q4_k").gflops) == (53.8, 690)  # q4_0's, f16's
    assert re.search(r"no speeds of q4_k, q6_k:.*doctor -o", tiers.assumed(("q4_k", "f16", "q6_k")) or "")
    assert tiers.assumed(("q4_0", "f16")) is None


def test_memory_is_as_fast_as_the_fastest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbed measurement of memory makes no file that is refused."""
    monkeypatch.setattr(hardware, "read_gbs", lambda *_: 1e-6)
    found = this_machine.tiers_here(1, formats=["q8_0", "f32"])
    assert found.cpu.read_gbs == max(k.gbs for k in found.cpu.kernels.values())
    assert parse_tiers(tiers_json(found), "here") == found


def test_a_file_without_the_speeds_of_pieces_and_of_arranging_is_an_older_one() -> None:
    """Experts are then taken to come as fast as large reads in order."""
    old = read_tiers("rtx4090-i9-13900k")
    assert old.disk is not None and old.disk.pieced_gbs == old.disk.read_gbs
    assert old.disk.arranged_gbs == ARRANGED_GBS
    new = dataclasses.replace(old, disk=dataclasses.replace(old.disk, pieces_gbs=1.5, arrange_gbs=6.0))
    assert new.disk is not None and new.disk.pieced_gbs == 1.5 and new.disk.arranged_gbs == 6.0
    for each in (old, new):
        assert parse_tiers(json.loads(render(each)), "f") == each
    assert "pieces_gbs" not in render(old) and "arrange_gbs" not in render(old)
