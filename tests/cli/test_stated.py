"""Documentation and CONTRIBUTING name what there is: options, parameters, files; the version stands once."""

from __future__ import annotations

import argparse
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from thermocline import LLM
from thermocline.cli import main
from thermocline.session.options import SPARSITIES, EngineOptions, Keywords

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_reference_and_help_name_every_parameter_of_llm() -> None:
    section = page("reference/python.md").split("\n## LLM\n")[1].split("\n```\n")[0]
    own = inspect.signature(LLM.__init__).parameters.keys() - {"self", "keywords"}
    assert {"files", "options"} < own
    for name in own | Keywords.__annotations__.keys():
        for text in (section, inspect.getdoc(LLM) or ""):
            assert re.search(rf"^{name} +\S", text, re.MULTILINE), name


def test_guide_and_reference_name_every_way_to_skip() -> None:
    ways = "|".join(SPARSITIES)
    assert f"`--sparsity {ways}`" in page("guide/run.md")
    assert (
        f"`--sparsity` `{ways}`" in page("reference/commands.md").split("\n## `run`\n")[1].split("\n## ")[0]
    )


def test_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {n for n in re.findall(r"`([\w./]+\.(?:py|inl|h|cpp|txt|md))`", text) if "X" not in n}
    assert "kernels.inl" in named
    there = {
        str(f.relative_to(ROOT))
        for top in ("thermocline", "csrc", "tests", "bench", "docs")
        for f in (ROOT / top).rglob("*")
    }
    there |= {f.name for f in ROOT.iterdir()}
    for name in named:
        assert any(f == name or f.endswith(f"/{name}") for f in there), name


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_lists_a_flag_once(command: str) -> None:
    (commands,) = (a for a in main.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[command]._actions:
        assert len(set(action.option_strings)) == len(action.option_strings), action.option_strings


def test_the_version_stands_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    source = project["tool"]["scikit-build"]["metadata"]["version"]["input"]
    written = re.findall(
        r'^__version__ = "[0-9.]+"$', (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(written) == 1


def test_no_gpu_is_used_unasked() -> None:
    """No card has run its kernels yet: answers must not depend on one that happens to be there."""
    assert EngineOptions().gpu == "off"  # LLM's, too: it takes these where it is given none
    assert inspect.signature(LLM.__init__).parameters["options"].default is None
    for options in (main.COMMANDS[name].options for name in ("run", "chat", "serve", "bench")):
        assert options.__dataclass_fields__["gpu"].default == "off"
