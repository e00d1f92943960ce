"""The house: rooms import downwards, packages stay declared, family names stay in the model's readers.

The rooms' order is `[tool.importlinter]` in pyproject.toml; `lint-imports` alone says more.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import thermocline

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(thermocline.__file__).parent
# Import names of what pyproject.toml declares, extras included, and of what those bring for certain.
DECLARED = {
    "ray", "gguf", "h11", "highspy", "huggingface_hub", "jinja2", "llguidance", "matplotlib", "numpy",
    "prometheus_client", "prompt_toolkit", "pydantic", "pydantic_core", "starlette", "tokenizers", "torch",
    "tqdm", "triton", "typing_extensions", "uvicorn",
}  # fmt: skip
FAMILIES = {"llama", "mistral", "bamboo", "opt", "minicpm", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4"}
FAMILIES |= {"qwen3-next", "qwen3.5", "qwen3.5-moe", "nemotron-h", "granite-hybrid", "lfm2", "lfm2-moe"}
FAMILIES |= {"phi3", "nemotron", "arcee", "bitnet", "falcon", "qwen3-moe"}  # that only the readers may act on
FAMILIES |= {"granite", "olmo2", "olmo3", "smollm3", "starcoder2", "stablelm", "cohere", "cohere2", "gptneox"}
FAMILIES |= {"phi2", "phimoe", "llama4"}
READERS = {"model/families.py", "model/gguf_families.py", "convert/pretokenizers.py"}
READERS |= {"model/mixtures/families.py", "model/mixtures/gguf.py", "model/mixtures/llama4.py"}
READERS |= {"model/gemma/families.py", "model/gemma/gguf.py"}
READERS |= {f"model/recurrent/{name}.py" for name in ("qwen", "mamba", "lfm2")}
READERS |= {f"model/dense/{name}.py" for name in ("families", "layer_norms", "gguf")}
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def test_every_import_goes_to_a_room_further_down() -> None:
    """In a process of its own: the linter silences every logger that is there, and changes the path."""
    code = f"from importlinter.cli import lint_imports; exit(lint_imports({str(ROOT / 'pyproject.toml')!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_room_says_what_it_owns_and_has_at_most_16_files() -> None:
    rooms = {path.parent for path in FILES.values()} - {PACKAGE}
    for room in rooms:
        code = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
        assert ast.get_docstring(code) and len(code.body) == 1, f"{room}: a docstring and nothing else"
        assert len(list(room.glob("*.py"))) <= 16, f"{room}: 16 files are the most"
    assert {p.name for p in PACKAGE.glob("*.py")} == {
        "__init__.py", "__main__.py", "errors.py", "llm.py", "options.py"
    }  # fmt: skip


def imports(tree: ast.AST) -> set[str]:
    """Return the top-level package of every import in the file, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add((node.module or "").partition(".")[0])
    return found


def parse(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FILES)
def test_only_the_standard_library_and_declared_packages_are_imported(name: str) -> None:
    assert imports(parse(name)) <= {*sys.stdlib_module_names, "thermocline", *DECLARED}


@pytest.mark.parametrize("name", sorted(set(FILES) - READERS))
def test_family_names_stay_in_the_readers(name: str) -> None:
    """A family's name as a value (not inside a sentence) means something branches on it."""
    values = {n.value for n in ast.walk(parse(name)) if isinstance(n, ast.Constant)}
    assert not values & FAMILIES


@pytest.mark.parametrize("name", ["cli.main", "cli.commands.serve", "errors"])
def test_the_command_line_starts_without_numpy(name: str) -> None:
    """Nothing heavy at module level: `--help` and `--version` answer at once."""
    assert run_python(f"import sys, thermocline.{name}; print('numpy' in sys.modules)") == "False"


def test_a_run_on_the_cpu_never_imports_torch(tiny_pack: Path) -> None:
    argv = ["run", "-m", str(tiny_pack), "-n", "2", "-q", "Once"]
    code = f"""
import sys, thermocline.cli.main, thermocline.machine.hardware
thermocline.LLM
assert thermocline.cli.main.main({argv!r}) == 0
thermocline.machine.hardware.gpu()
print('torch' in sys.modules)"""
    assert run_python(code).splitlines()[-1] == "False"


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_stub_of_the_native_core_names_what_is_there() -> None:
    native = pytest.importorskip("thermocline._native", reason="the native core is not built")
    stub = ast.parse((PACKAGE / "_native.pyi").read_text(encoding="utf-8"))
    said = {n.name: n for n in stub.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    values = {
        n.target.id for n in stub.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    assert values | set(said) == {n for n in dir(native) if not n.startswith("_")}
    for name, node in said.items():
        if isinstance(node, ast.ClassDef):
            members = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            there = {n for n in dir(getattr(native, name)) if not n.startswith("_")} - set(dir(Exception))
            assert {n for n in members if not n.startswith("_")} == there, name
