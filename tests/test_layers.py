"""Hold imports to a table. A new edge needs a line here, and a reason."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "thermocline"

# module -> the modules of ours it may import
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"constraint", "errors", "llm", "request", "sampler"},
    "__main__": {"cli"},
    "activity": {"decoder", "errors", "kv", "ops.cpu", "profile", "spec"},
    "bench": {
        "engine",
        "errors",
        "hardware",
        "kv",
        "llm",
        "ops.cpu",
        "pack",
        "predictor",
        "report",
        "request",
        "sampler",
        "spec",
        "store",
        "tokenizer",
        "trace",
    },
    "cache_policy": set(),
    "chat": {"errors", "llm", "report", "request", "safetensors", "sampler", "whole"},
    "chat_template": {
        "errors",
        "safetensors",
        "sandbox",
        "tokenizer",
        "tokenizer_parts",
        "tokenizer_process",
    },
    "cli": {
        "bench",
        "cli_offline",
        "cli_plan",
        "cli_serve",
        "cli_text",
        "cli_trace",
        "config",
        "config_offline",
        "console",
        "errors",
        "gguf_import",
        "gguf_out",
        "gpu",
        "hardware",
        "hub",
        "hub_fetch",
        "importer",
        "llm",
        "machine",
        "options",
        "pack",
        "report",
        "shelf",
        "sidecar",
        "synth",
        "tiers",
        "whole",
    },
    "cli_text": {
        "chat",
        "config",
        "console",
        "constraint",
        "errors",
        "grammar",
        "generation_config",
        "llm",
        "repl",
        "report",
        "request",
        "sampler",
    },
    "cli_offline": {
        "activity",
        "config",
        "config_offline",
        "config_shared",
        "console",
        "corpus",
        "decoder",
        "errors",
        "evaluate",
        "fit_mlp",
        "hardware",
        "hub_fetch",
        "importer",
        "llm",
        "pack",
        "pack_writer",
        "predictor",
        "profile",
        "profile_plot",
        "profiler",
        "report",
        "tokenizer",
        "train",
        "trial",
        "weights",
    },
    "cli_trace": {
        "bench",
        "config",
        "console",
        "disk",
        "errors",
        "hardware",
        "hotness",
        "hub_fetch",
        "importer",
        "llm",
        "machine",
        "memory",
        "pack",
        "predictor",
        "plan_file",
        "problem",
        "profile_plot",
        "replay",
        "report",
        "split",
        "store",
        "tiers",
        "trace",
    },
    "config": {"config_generation", "config_offline", "config_serve", "config_shared", "options"},
    "config_offline": {"config_shared", "options"},
    "config_shared": {"options"},
    "console": {"errors", "report"},
    "corpus": {"errors", "pack", "safetensors", "tokenizer"},
    "cost": {"sizes", "split", "tiers"},
    "decoder": {"kv", "spec"},
    "dequant": {"errors", "quant"},
    "disk": {"_native"},
    "constraint": {"errors"},
    "engine": {
        "constraint",
        "decoder",
        "errors",
        "kv",
        "pace",
        "request",
        "sampler",
        "spec",
        "tokenizer",
        "traffic",
        "watch",
    },
    "traffic": {"decoder", "kv", "spec"},
    "generation_config": {"errors", "manifest", "pack", "safetensors", "sampler"},
    "confined": {"confinement"},
    "confinement": set(),
    "grammar": {"confined", "constraint", "errors", "grammar_worker", "tokenizer"},
    "grammar_worker": {"confinement"},
    "pace": set(),
    "request": {"constraint", "decoder", "errors", "kv", "sampler", "spec", "tokenizer"},
    "errors": set(),
    "evaluate": {"decoder", "errors", "kv", "memory", "sampler", "spec", "tokenizer"},
    "gguf_header": {"errors", "safetensors"},
    "gguf_import": {
        "errors",
        "gguf_in",
        "gguf_keys",
        "gguf_model",
        "gguf_source",
        "layout",
        "manifest",
        "mapping",
        "pack",
        "pack_writer",
        "safetensors",
        "source_key",
        "spec",
        "tokenizer_convert",
        "torch_zip",
    },
    "gguf_in": {"errors", "gguf_header", "safetensors"},
    "gguf_keys": {"errors", "gguf_in", "safetensors"},
    "gguf_model": {"errors", "gguf_in", "gguf_keys", "mapping", "models", "safetensors", "spec"},
    "gguf_source": {
        "dequant",
        "errors",
        "gguf_header",
        "gguf_in",
        "layout",
        "mapped",
        "mapping",
        "pack_writer",
        "quant",
        "safetensors",
        "spec",
    },
    "gguf_out": {
        "errors",
        "gguf_header",
        "layout",
        "models",
        "pack",
        "quant",
        "safetensors",
        "spec",
        "tokenizer",
        "tokenizer_gguf",
        "whole",
    },
    "cuda": {"device", "errors"},
    "device": {"errors"},
    "gpu": {
        "arrange",
        "cuda",
        "device",
        "disk",
        "errors",
        "gpu_weights",
        "hardware",
        "kv",
        "machine",
        "memory",
        "ops.gpu",
        "ops.torch_kernels",
        "ops.triton_kernels",
        "pack",
        "plan",
        "plan_file",
        "predictor",
        "problem",
        "quant",
        "records",
        "spec",
        "store",
        "tiers",
        "weights",
    },
    "gpu_measure": {"_native", "device", "ops.device_rows", "ops.device_sizes", "quant", "tiers"},
    "gpu_weights": {
        "_native",
        "arrange",
        "decoder",
        "device",
        "layout",
        "ops.cpu",
        "ops.device_layers",
        "ops.device_rows",
        "pack",
        "predictor",
        "records",
        "sizes",
        "spec",
        "store",
        "weights",
    },
    "hardware": {"_native", "disk", "errors"},
    "hotness": {"pack", "planted", "profile", "safetensors", "spec"},
    "hub": {"errors", "safetensors"},
    "hub_fetch": {"errors", "hub"},
    "importer": {
        "errors",
        "gguf_import",
        "gguf_in",
        "gguf_source",
        "hub",
        "layout",
        "manifest",
        "mapped",
        "mapping",
        "models",
        "pack",
        "pack_writer",
        "quant",
        "safetensors",
        "source_key",
        "spec",
        "ternary",
        "tokenizer",
        "tokenizer_convert",
    },
    "kv": {"errors", "spec"},
    "layout": {"errors", "quant", "spec"},
    "llm": {
        "chat_template",
        "config",
        "constraint",
        "engine",
        "errors",
        "generation_config",
        "grammar",
        "hardware",
        "hub_fetch",
        "importer",
        "memory",
        "pack",
        "predictor",
        "request",
        "sampler",
        "store",
        "tokenizer",
        "weights",
        "gpu",
    },
    "machine": {"_native", "disk", "errors", "gpu_measure", "hardware", "quant", "tiers"},
    "manifest": {"_native", "errors", "layout", "quant", "safetensors", "spec", "spec_check"},
    "config_keys": {"errors", "safetensors", "spec", "spec_check"},
    "mapped": {"errors", "mapping", "safetensors", "spec"},
    "mapping": {"spec"},
    "memory": {"engine", "errors", "kv", "ops.device_sizes", "spec"},
    "models": {"config_keys", "errors", "mapping", "safetensors", "spec", "spec_check"},
    "ops": set(),
    "options": {"errors"},
    "ops.cpu": {"_native", "decoder", "errors", "kv", "spec"},
    "ops.device_rows": {"ops.device_sizes", "quant"},
    "ops.device_sizes": {"decoder", "spec"},
    "ops.device_layers": {"_native", "decoder", "device", "ops.cpu", "ops.device_rows", "spec"},
    "server.sse": set(),
    "ops.gpu": {
        "_native",
        "decoder",
        "device",
        "kv",
        "ops.cpu",
        "ops.device_layers",
        "ops.device_rows",
        "ops.device_sizes",
        "spec",
    },
    "ops.reference": {"decoder", "kv", "quant", "spec"},
    "ops.torch_kernels": {"decoder", "ops.device_rows"},
    "ops.triton_kernels": {
        "decoder",
        "ops.device_rows",
        "ops.device_sizes",
        "ops.triton_rows",
        "ops.triton_tokens",
    },
    "ops.triton_rows": {"ops.triton_stored", "ops.triton_tokens"},
    "ops.triton_stored": set(),
    "ops.triton_tokens": set(),
    "pack": {"_native", "errors", "layout", "manifest", "quant", "safetensors", "spec"},
    "pack_writer": {
        "_native",
        "errors",
        "layout",
        "manifest",
        "pack",
        "quant",
        "spec",
        "spec_check",
        "whole",
    },
    "placement": {"cost"},
    "plan": {"cost", "errors", "hotness", "memory", "placement", "problem", "sizes", "spec", "tiers"},
    "plan_file": {
        "arrange",
        "errors",
        "hotness",
        "layout",
        "pack",
        "plan",
        "predictor",
        "problem",
        "profile",
        "safetensors",
        "sidecar",
        "sizes",
        "spec",
        "synth",
        "tiers",
        "weights",
        "whole",
    },
    "planted": {"errors", "ops.reference", "spec"},
    "problem": {
        "cost",
        "engine",
        "hotness",
        "kv",
        "memory",
        "ops.device_sizes",
        "placement",
        "sizes",
        "spec",
        "tiers",
    },
    "profile": {"errors", "pack", "safetensors", "sidecar", "spec"},
    "profile_plot": {"errors", "profile"},
    "profiler": {
        "_native",
        "activity",
        "corpus",
        "errors",
        "hardware",
        "memory",
        "pack",
        "profile",
        "reorder",
        "sidecar",
        "spec",
        "unfinished",
        "weights",
    },
    "quant": {"errors"},
    "replay": {"cache_policy", "cost", "problem", "split", "trace"},
    "reorder": {"_native", "errors", "layout", "pack", "pack_writer", "quant", "safetensors"},
    "repl": {"errors"},
    "report": {"hardware", "llm", "plan", "request", "shelf"},
    "report_plan": {"plan", "report"},
    "safetensors": {"errors"},
    "sampler": {"constraint", "errors"},
    "sandbox": {"confined", "errors"},
    "shelf": {"errors", "hub", "pack"},
    "sidecar": {"_native", "errors", "safetensors", "whole"},
    "cli_serve": {
        "chat",
        "cli_text",
        "config_serve",
        "console",
        "errors",
        "report",
        "server.limits",
        "server.listener",
        "server.serve",
    },
    "config_generation": {"config_shared", "options"},
    "config_serve": {"config_generation", "config_shared", "options", "server.limits"},
    "server.answers": {"request", "sampler", "server.messages", "server.parts", "tokenizer"},
    "server.conversation": {
        "server.body",
        "server.limits",
        "server.parts",
        "server.refusal",
        "server.schema",
        "server.tools",
        "tokenizer",
    },
    "server.model": {
        "chat_template",
        "errors",
        "pack",
        "server.messages",
        "server.parts",
        "server.refusal",
        "spec",
        "tokenizer",
    },
    "server.app": {
        "constraint",
        "errors",
        "request",
        "sampler",
        "server.activity",
        "server.answers",
        "server.conversation",
        "server.errors",
        "server.limits",
        "server.messages",
        "server.metrics",
        "server.model",
        "server.openapi",
        "server.page",
        "server.parts",
        "server.posted",
        "server.process",
        "server.refusal",
        "server.rendered",
        "server.schema",
        "server.sse",
        "server.tools",
        "server.trials",
        "tokenizer",
    },
    "server.trials": {"constraint", "grammar", "server.refusal"},
    "server.errors": {"errors", "server.process", "server.refusal", "server.suspects"},
    "server.activity": {"server.onlookers", "server.refusal", "server.sse", "watch"},
    "server.messages": {"engine", "request", "sampler", "watch"},
    "server.metrics": {"engine", "server.messages", "server.process"},
    "server.openapi": {"server.limits", "server.schema"},
    "server.parts": {"constraint", "request"},
    "server.tools": {"constraint", "server.parts", "server.refusal", "server.schema"},
    "server.onlookers": {"watch"},
    "server.page": set(),
    "server.process": {
        "errors",
        "sampler",
        "server.messages",
        "server.onlookers",
        "server.suspects",
        "server.worker",
    },
    "server.suspects": {"errors", "server.messages"},
    "server.schema": {"constraint", "errors", "sampler", "server.limits"},
    "server.serve": {
        "generation_config",
        "sampler",
        "server.app",
        "server.http",
        "server.limits",
        "server.listener",
        "server.messages",
        "server.model",
        "server.page",
        "server.posted",
        "server.process",
    },
    "server.worker": {
        "constraint",
        "engine",
        "errors",
        "llm",
        "request",
        "sampler",
        "server.messages",
        "watch",
    },
    "whole": {"errors"},
    "watch": {"decoder"},
    "server": set(),
    "server.body": {"server.limits", "server.refusal"},
    "server.posted": {"server.body", "server.limits"},
    "server.rendered": {"tokenizer"},
    "server.guard": {"errors", "server.body", "server.limits", "server.posted", "server.refusal"},
    "server.http": {"errors", "server.guard", "server.limits", "server.listener", "server.refusal"},
    "server.limits": {"options"},
    "server.listener": {"errors"},
    "server.refusal": set(),
    "sizes": {"layout", "quant", "spec"},
    "spec": set(),
    "source_key": set(),
    "spec_check": {"errors", "safetensors", "spec"},
    "synth": {
        "errors",
        "layout",
        "mapping",
        "models",
        "pack",
        "pack_writer",
        "planted",
        "quant",
        "safetensors",
        "spec",
    },
    "template_worker": {"confinement"},
    "ternary": {"errors", "mapped", "mapping", "safetensors"},
    "tiers": {"errors", "safetensors"},
    "tokenizer": {"errors", "spec", "tokenizer_process"},
    "tokenizer_parts": set(),
    "tokenizer_process": {"confined", "errors"},
    "tokenizer_worker": {"confinement", "tokenizer_parts"},
    "tokenizer_convert": {
        "errors",
        "pretokenizers",
        "safetensors",
        "sentencepiece_model",
        "tokenizer_json",
    },
    "tokenizer_gguf": {
        "errors",
        "pretokenizers",
        "tokenizer_convert",
        "tokenizer_json",
        "tokenizer_process",
    },
    "tokenizer_json": {"errors", "pretokenizers", "safetensors", "tokenizer"},
    "predictor": {"_native", "errors", "manifest", "pack", "quant", "safetensors", "sidecar", "spec"},
    "pretokenizers": set(),
    "sentencepiece_model": {"errors", "safetensors"},
    "torch_zip": {"errors", "safetensors"},
    "unfinished": {
        "_native",
        "activity",
        "errors",
        "pack_writer",
        "profile",
        "safetensors",
        "sidecar",
        "spec",
    },
    "calibrate": set(),
    "fit": set(),
    "fit_mlp": {"calibrate", "errors"},
    "trace": {"decoder", "errors", "ops.cpu", "ops.reference", "pack", "safetensors", "sidecar", "spec"},
    "train": {
        "calibrate",
        "decoder",
        "errors",
        "fit",
        "fit_mlp",
        "hardware",
        "ops.reference",
        "pack",
        "predictor",
        "profile",
        "quant",
        "safetensors",
        "spec",
        "trial",
    },
    "trial": {
        "decoder",
        "engine",
        "errors",
        "evaluate",
        "pack",
        "predictor",
        "quant",
        "safetensors",
        "sampler",
        "spec",
        "tokenizer",
        "weights",
    },
    "arrange": {
        "_native",
        "cost",
        "engine",
        "errors",
        "hotness",
        "kv",
        "layout",
        "manifest",
        "memory",
        "sizes",
        "spec",
        "split",
    },
    "lookup": {"_native", "layout", "pack", "weights"},
    "records": {"_native", "errors", "layout", "pack", "sidecar", "weights"},
    "split": set(),
    "store": {
        "_native",
        "arrange",
        "decoder",
        "errors",
        "hotness",
        "kv",
        "layout",
        "lookup",
        "memory",
        "ops.cpu",
        "pack",
        "predictor",
        "records",
        "sizes",
        "weights",
    },
    "cli_plan": {
        "arrange",
        "config_offline",
        "console",
        "disk",
        "errors",
        "importer",
        "llm",
        "machine",
        "plan",
        "plan_disk",
        "plan_file",
        "problem",
        "report_plan",
        "tiers",
    },
    "plan_disk": {"arrange", "cost", "placement", "plan", "problem", "split"},
    "weights": {
        "_native",
        "decoder",
        "errors",
        "hardware",
        "layout",
        "ops.cpu",
        "pack",
        "predictor",
        "quant",
        "spec",
    },
}
FOREIGN = {"huggingface_hub", "numpy", "tqdm"}  # what `pip install .` brings
# Packages that few modules use: `pip install '.[gguf]'` brings gguf, `pip install .` the others.
EXTRAS = {
    "cuda": {"torch"},
    "device": {"torch"},
    "fit_mlp": {"torch"},
    "gpu": {"torch", "triton"},
    "gpu_measure": {"torch"},
    "gpu_weights": {"torch"},
    "ops.device_layers": {"torch"},
    "ops.gpu": {"torch"},
    "ops.device_rows": {"torch"},
    "ops.torch_kernels": {"torch"},
    "ops.triton_kernels": {"torch"},
    "ops.triton_rows": {"triton"},
    "ops.triton_stored": {"triton"},
    "ops.triton_tokens": {"triton"},
    "gguf_out": {"gguf"},
    "grammar": {"llguidance"},
    "grammar_worker": {"llguidance"},
    "template_worker": {"jinja2"},
    "tokenizer_worker": {"tokenizers"},
    "repl": {"prompt_toolkit"},
    "server.activity": {"starlette"},
    "server.app": {"pydantic", "starlette"},
    "server.errors": {"pydantic"},
    "server.http": {"h11", "uvicorn"},
    "server.metrics": {"prometheus_client"},
    "server.openapi": {"pydantic"},
    "server.page": {"starlette"},
    "server.rendered": {"starlette"},
    "server.schema": {"pydantic", "pydantic_core", "typing_extensions"},
    "placement": {"highspy"},
    "profile_plot": {"matplotlib"},
}
FAMILIES = {"llama", "mistral", "bamboo", "opt", "minicpm", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"}
FAMILIES |= {"nemotron", "arcee", "bitnet", "falcon"}  # names that only models.py may act on


def modules() -> dict[str, Path]:
    """Name below `thermocline` -> file."""
    out = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        out[name.removesuffix(".__init__")] = path
    return out


MODULES = modules()
KNOWN = {*MODULES, "_native"}


def imports(tree: ast.AST) -> set[str]:
    """Every module the file imports, anywhere in it, as a dotted name."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            found |= {f"{base}.{a.name}" if is_ours(f"{base}.{a.name}") else base for a in node.names}
    return found


def is_ours(name: str) -> bool:
    return name.removeprefix("thermocline.") in KNOWN and name.startswith("thermocline.")


def parse(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_table(name: str) -> None:
    assert name in MAY_IMPORT, f"{name} is new: give it a row here, and one on its page in docs/internals"
    ours = {i.removeprefix("thermocline.") for i in imports(parse(name)) if i.startswith("thermocline.")}
    assert ours <= MAY_IMPORT[name], f"{name} may not import {sorted(ours - MAY_IMPORT[name])}"


def test_the_table_has_no_rows_without_a_file() -> None:
    assert set(MAY_IMPORT) <= set(MODULES)


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        ready = [m for m, uses in MAY_IMPORT.items() if m not in order and uses - {"_native"} <= set(order)]
        assert ready, f"cycle among {sorted(set(MAY_IMPORT) - set(order))}"
        order += ready


@pytest.mark.parametrize("name", MODULES)
def test_only_the_standard_library_and_declared_packages_are_imported(name: str) -> None:
    roots = {i.partition(".")[0] for i in imports(parse(name))}
    assert roots <= {*sys.stdlib_module_names, "thermocline", *FOREIGN, *EXTRAS.get(name, set())}


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"models", "gguf_model", "pretokenizers"}))
def test_family_names_stay_in_models(name: str) -> None:
    """A family's name as a value (not inside a sentence) means something branches on it."""
    values = {n.value for n in ast.walk(parse(name)) if isinstance(n, ast.Constant)}
    assert not values & FAMILIES


@pytest.mark.parametrize("name", ["cli", "config", "__main__", "errors"])
def test_the_command_line_starts_without_numpy(name: str) -> None:
    """Nothing heavy at module level: `--help` and `--version` answer at once."""
    code = f"import sys, thermocline.{name if name != '__main__' else 'cli'}; print('numpy' in sys.modules)"
    assert run_python(code) == "False"


def test_a_run_on_the_cpu_never_imports_torch(tiny_pack: Path) -> None:
    argv = ["run", "-m", str(tiny_pack), "-n", "2", "-q", "Once"]
    code = f"""
import sys, thermocline.cli, thermocline.hardware
thermocline.LLM
assert thermocline.cli.main({argv!r}) == 0
thermocline.hardware.gpu()
print('torch' in sys.modules)"""
    assert run_python(code).splitlines()[-1] == "False"


def run_python(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=env, check=True
    )
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
