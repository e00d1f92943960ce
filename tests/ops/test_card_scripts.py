"""`scripts/card`, for a machine with a card and no network, tried without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.oracle
CARD = Path(__file__).parents[2] / "scripts" / "card"


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(CARD))
    monkeypatch.setattr(sys, "argv", ["smoke", "--gpu", "stand-in", "--out", str(tmp_path / "out.json")])
    import smoke

    return smoke


def found(tmp_path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return made


def test_every_part_of_smoke_runs_on_the_stand_in(smoke: Any, tmp_path: Path) -> None:
    assert smoke.main() == 0
    parts = found(tmp_path)
    assert parts["ordering"]["worst_nmse"] < 1e-9 and parts["ordering"]["replays"] == 40
    assert {"facts", "registered", "handover_us", "roofs_gbs", "products q4_0"} <= parts.keys()


def test_a_part_that_fails_is_said_and_the_others_go_on(
    smoke: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that computes something else, which the replays show."""
    monkeypatch.setattr(smoke, "doubled", lambda y, x: y.fill_(1.0))
    assert smoke.main() == 1
    parts = found(tmp_path)
    assert "replays are wrong" in parts["ordering"]["failed"] and "us" in parts["products q8_0"]["256x256"]


@pytest.mark.skipif(os.name == "nt", reason="a script of bash")
def test_a_card_that_does_not_answer_is_not_taken_for_the_stand_in(tmp_path: Path) -> None:
    for made in ("wheels", "site/thermocline"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    env = {**os.environ, "WORK": str(tmp_path), "OUT": str(tmp_path / "out"), "PYTHON": sys.executable}
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    done = subprocess.run(
        [CARD / "run", tmp_path, "smoke"], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (3, "no GPU answers\n")
