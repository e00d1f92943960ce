"""The workflows of CI: valid, pinned by major version, and naming only what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
        assert job["timeout-minutes"] and job["runs-on"], path.name
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_names_scripts_that_are_there_and_pins_its_actions(path: Path) -> None:
    for step in steps(path):
        assert ("uses" in step) != ("run" in step), step
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1")), step
        for named in re.findall(r"(?:^| )((?:scripts|tests|\.ci)/[\w./]+)", step.get("run", "")):
            assert (ROOT / named).exists(), named


def test_there_are_checks_a_quick_matrix_and_everything() -> None:
    ci = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert set(ci["jobs"]) == {"check", "quick", "full"}
    matrix = ci["jobs"]["quick"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
