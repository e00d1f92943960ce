"""Every class of errors.py, provoked by something a person could type, ends in its documented exit code."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

from thermocline import errors
from thermocline.cli import main
from thermocline.cli.console import INTERRUPTED
from thermocline.errors import ThermoclineError
from thermocline.machine import hardware


def too_long_a_prompt(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["run", "-m", str(pack), "-c", "8", "far more than eight bytes"]


def truncated_weights(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    shutil.copytree(pack, tmp / "pack")
    with open(tmp / "pack" / "weights.bin", "r+b") as f:
        f.truncate(5000)
    return ["run", "-m", str(tmp / "pack"), "hello"]


def missing_model(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["run", "-m", str(tmp / "nothing"), "hello"]


def too_little_memory(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(hardware, "available_bytes", lambda: 1 << 20)
    patch.setattr(hardware, "own_bytes", lambda: 0)
    return ["run", "-m", str(pack), "hello"]


def unknown_architecture(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    tiny.hf_directory(tmp / "hf", architectures=["NeverHeardOfForCausalLM"])
    return ["run", "-m", str(tmp / "hf"), "hello"]


def weights_that_are_nan(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    tiny.hf_directory(tmp / "hf")
    broken = tiny.tensors()
    broken["model.norm.weight"] = np.full(tiny.DIM, np.nan, np.float32)
    save_file(broken, str(tmp / "hf" / "model.safetensors"))
    return ["run", "-m", str(tmp / "hf"), "--format", "f32", "--cache-dir", str(tmp / "cache"), "hello"]


def a_gpu_that_fails(pack: Path, tmp: Path, patch: pytest.MonkeyPatch) -> list[str]:
    from thermocline.ops.kernels import torch_kernels

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    patch.setattr(torch_kernels, "norm", fail)
    return ["run", "-m", str(pack), "--gpu", "stand-in", "-q", "hello"]


Provoke = Callable[[Path, Path, pytest.MonkeyPatch], list[str]]
PROVOKED: dict[type[ThermoclineError], Provoke] = {
    errors.UsageError: too_long_a_prompt,
    errors.BadFile: truncated_weights,
    errors.IOFailure: missing_model,
    errors.OutOfBudget: too_little_memory,
    errors.Unsupported: unknown_architecture,
    errors.NumericalError: weights_that_are_nan,
    errors.DeviceFailure: a_gpu_that_fails,
}


def classes() -> list[type[ThermoclineError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ThermoclineError)]


def test_every_class_is_provoked() -> None:
    assert set(PROVOKED) == set(classes()) - {ThermoclineError}


NEED_TORCH = {errors.DeviceFailure}  # the stand-in for a GPU computes with it


@pytest.mark.parametrize(
    "error",
    [pytest.param(e, marks=[pytest.mark.oracle] if e in NEED_TORCH else []) for e in PROVOKED],
    ids=lambda e: e.__name__,
)
def test_it_ends_in_one_line_and_its_exit_code(
    error: type[ThermoclineError],
    tiny_pack: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thermocline: Callable[..., Any],
) -> None:
    ran = thermocline(*PROVOKED[error](tiny_pack, tmp_path, monkeypatch))
    assert (ran.code, ran.out) == (error.exit_code, ""), ran.err
    assert ran.err.startswith("thermocline: ") and ran.err.count("\n") == 1


def test_exit_codes_are_distinct_and_the_references() -> None:
    documented = {int(n) for n in re.findall(r"^\| (\d+) \|", reference(), re.MULTILINE)}
    ours = [c.exit_code for c in classes()]
    assert sorted(ours) == list(range(1, len(ours) + 1))
    assert documented == {0, *ours, INTERRUPTED, main.BROKEN_PIPE}


def reference() -> str:
    page = Path(__file__).parents[2] / "docs/reference/errors-and-exit-codes.md"
    return page.read_text(encoding="utf-8")


def test_a_bug_is_one_line_and_the_way_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, thermocline: Callable[..., Any]
) -> None:
    def broken(o: object) -> int:
        raise RuntimeError("oh\nno")

    options = main.COMMANDS["doctor"].options
    monkeypatch.setitem(main.COMMANDS, "doctor", main.Command(options, broken))
    ran = thermocline("doctor")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "RuntimeError" in ran.err and "THERMOCLINE_DEBUG=1" in ran.err
    monkeypatch.setenv("THERMOCLINE_DEBUG", "1")
    assert "Traceback" in thermocline("doctor").err
