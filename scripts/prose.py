#!/usr/bin/env python3
"""Print docstrings that begin with a word that makes a reader guess; exit code 1 at 3 % or more."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

VAGUE = {"What", "Of", "Who", "As", "Those", "These", "That", "Where", "Its", "It", "Likewise", "The same"}
LIMIT = 0.03


def docstrings(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, text) of every docstring below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield str(path), getattr(node, "lineno", 1), text


def vague(text: str) -> bool:
    first = text.split(maxsplit=2)
    return first[0].rstrip(",;:'’") in VAGUE or " ".join(first[:2]) in VAGUE


def main(folders: list[str]) -> int:
    found = [x for folder in folders for x in docstrings(Path(folder))]
    bad = [x for x in found if vague(x[2])]
    unknown = [x for x in found if "ust not know" in x[2]]
    for path, line, text in bad:
        print(f"{path}:{line}: {text.splitlines()[0][:90]}")
    for path, line, _ in unknown:
        print(f'{path}:{line}: says "must not know": the import contract does')
    share = len(bad) / max(1, len(found))
    print(f"{len(bad)} of {len(found)} docstrings ({share:.1%}) begin with a vague word")
    print(f"{len(unknown)} say what a file must not know")
    return int(share >= LIMIT or bool(unknown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["thermocline"]))
