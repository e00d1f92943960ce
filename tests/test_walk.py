"""DESIGN.md's walk of a token names functions that exist, and files that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEP = re.compile(r"\[([\w/]+\.py)<br>([\w.]+)\]")  # a box of the diagram: a file, and what it defines


def walk() -> str:
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    return text[text.index("## The walk of a token") : text.index("## From a model to a session")]


def defined(tree: ast.Module) -> set[str]:
    """Return the functions of a module by name, and its methods as Class.method."""
    found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    for cls in tree.body:
        if isinstance(cls, ast.ClassDef):
            found |= {f"{cls.name}.{n.name}" for n in cls.body if isinstance(n, ast.FunctionDef)}
    return found | {name.split(".")[-1] for name in found}


def lost(text: str) -> list[str]:
    """Return the steps whose file or function is gone."""
    missing = []
    for file, name in STEP.findall(text):
        path = ROOT / "thermocline" / file
        if not path.exists() or name not in defined(ast.parse(path.read_text(encoding="utf-8"))):
            missing.append(f"{file}: {name}")
    return missing


def test_the_walk_names_functions_that_exist() -> None:
    assert len(STEP.findall(walk())) >= 6, "the diagram is read"
    assert lost(walk()) == []


def test_a_step_that_is_gone_is_found() -> None:
    text = "[engine/engine.py<br>Engine.step] [engine/engine.py<br>Engine.stride] [engine/gone.py<br>step]"
    assert lost(text) == ["engine/engine.py: Engine.stride", "engine/gone.py: step"]


def test_the_steps_fit_on_a_screen() -> None:
    """`step`, `forward` and `ffn_add` can be recited: none is longer than 50 lines."""
    for file, name in (
        ("engine/engine.py", "step"),
        ("engine/decoder.py", "forward"),
        ("ops/cpu.py", "ffn_add"),
    ):
        tree = ast.parse((ROOT / "thermocline" / file).read_text(encoding="utf-8"))
        (node,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
        assert node.end_lineno is not None and node.end_lineno - node.lineno < 50, f"{file}: {name}"
