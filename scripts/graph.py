#!/usr/bin/env python3
"""Check the package's imports and signatures against the rules of DESIGN.md; exit code 1 if one is broken.

`--max-fan-out`: modules that import too many others. `--duplicate-types`: class names that stand twice.
`--parameters`: functions with too many. Without an option, all three.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "thermocline"
FAN_OUT, PARAMETERS = 12, 8
TABLES = ("model/families.py", "model/gguf_families.py")  # a line for each family: they name all readers
DEVICE_CODE = ("triton_", "torch_kernels", "device_rows")  # kernels take what a launch takes


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Return the package's modules that are imported, lazily too, but not for types alone."""
    found = set()
    typed = {id(n) for x in ast.walk(tree) if _type_checking(x) for n in ast.walk(x)}
    for node in ast.walk(tree):
        if id(node) in typed or not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module.split(".")[0] == "thermocline":
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if inner in known else node.module)
    return found


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def fan_out() -> Iterator[tuple[int, str]]:
    trees = dict(modules())
    known = {"thermocline." + name.removesuffix(".py").replace("/", ".") for name in trees}
    for name, tree in trees.items():
        if not name.startswith("cli/") and name not in TABLES:
            yield len(imports(tree, known) - {"thermocline._native"}), name


def duplicate_types() -> dict[str, list[str]]:
    """Return class names that stand in more than one module, with these."""
    where: defaultdict[str, list[str]] = defaultdict(list)
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(name)
    return {name: files for name, files in where.items() if len(files) > 1}


def parameters() -> Iterator[tuple[int, str]]:
    for name, tree in modules():
        if Path(name).name.startswith(DEVICE_CODE):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
                yield len([x for x in names if x not in ("self", "cls")]), f"{name}: {node.name}"


def main(wanted: list[str]) -> int:
    failed = 0
    if not wanted or "--max-fan-out" in wanted:
        over = sorted((n, x) for n, x in fan_out() if n > FAN_OUT)
        failed += report(f"modules that import more than {FAN_OUT}", [f"{n} {x}" for n, x in over])
    if not wanted or "--duplicate-types" in wanted:
        twice = [f"{name}: {', '.join(files)}" for name, files in sorted(duplicate_types().items())]
        failed += report("type names that stand twice", twice)
    if not wanted or "--parameters" in wanted:
        over = sorted((n, x) for n, x in parameters() if n > PARAMETERS)
        failed += report(f"functions with more than {PARAMETERS} parameters", [f"{n} {x}" for n, x in over])
    return int(failed > 0)


def report(what: str, found: list[str]) -> int:
    print(f"{len(found)} {what}")
    for line in found:
        print(f"  {line}")
    return len(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
