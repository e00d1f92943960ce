"""Golden files: what the engine computes and what the interfaces say, byte for byte, as it was recorded.

    GOLDEN=record pytest tests/golden        # write the files anew; say in the commit why they may change

A run's file holds, per instruction set, its token ids and the hash over all its logits. A run on the stand-in
for a GPU has tokens alone: its kernels are torch's, whose sums depend on the machine.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_models
import numpy as np
import pytest

import thermocline
from thermocline import LLM, SamplingParams, _native
from thermocline.cli import main
from thermocline.errors import OutOfBudget
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, write_predictors
from thermocline.plan import planner
from thermocline.plan.disk import disk_split
from thermocline.server.http.limits import ServerLimits
from thermocline.session import store

HERE = Path(__file__).parent
RECORD = os.environ.get("GOLDEN") == "record"
PROMPT = "The thermocline is a thin layer of water where warm meets cold."
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
RUNS = [
    (model, sparsity, where)
    for model in ("bundled", *golden_models.MODELS)
    for sparsity in ("off", "exact", "predict")
    for where in ("ram", "stand-in", "small ram", "stand-in and small ram")
    if sparsity != "predict" or model in golden_models.SPARSE
    if "small" not in where or model in golden_models.SPARSE
]
# The stand-in for a GPU computes with torch.
MARKED = [pytest.param(*run, marks=[pytest.mark.oracle] if "stand-in" in run[2] else []) for run in RUNS]
PLANS = {
    "llama-2-7b": ("--ram", "24", "--vram", "0"),
    "llama-2-70b": ("--ram", "64", "--vram", "24", "--active", "0.2"),
    "opt-6.7b": ("--ram", "6.5", "--vram", "0"),
    "opt-30b": ("--ram", "64", "--vram", "24"),
    "falcon-40b": ("--ram", "32", "--vram", "11", "--active", "0.1"),
    "bamboo-7b": ("--ram", "5", "--vram", "0"),
    "mixtral-8x7b": ("--ram", "64", "--vram", "12"),
    "turbosparse-mixtral": ("--ram", "24", "--vram", "0"),
}
HARDWARE = "rtx4090-i9-13900k"


def agrees(name: str, found: str) -> None:
    """Compare with the file `name`, or write it."""
    path = HERE / name
    if RECORD:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert found == path.read_text(), f"{name} is not as recorded"


# ---- runs


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path | None]:
    """Return the pack of a model, in q8_0, with predictors where its neurons can be skipped."""
    base = tmp_path_factory.mktemp("golden")
    made: dict[str, Path | None] = {"bundled": None}

    def pack(name: str) -> Path | None:
        if name not in made:
            source, out = golden_models.write(name, base / f"{name}-hf"), base / name
            assert main.main(["pack", str(source), "-o", str(out), "--format", "q8_0", "-q"]) == 0
            if name in golden_models.SPARSE:
                opened = Pack.open(out)
                write_predictors(opened, predictors(opened), {})
            made[name] = out
        return made[name]

    return pack


def predictors(pack: Pack) -> list[LayerPredictor]:
    """Random signs that name about half of the neurons: whole numbers, the same on every machine."""
    s, rng = pack.spec, np.random.default_rng(3)
    neurons = s.n_experts * s.ffn_dim

    def layer() -> LayerPredictor:
        bits = rng.integers(0, 256, (neurons, s.dim // 8), dtype=np.uint8)
        return LayerPredictor("sign", None, None, bits, np.zeros(neurons, np.float32), 40, s.n_experts)

    return [layer() for _ in range(s.n_layers)]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read buffers for a real model would hold all neurons of these."""
    monkeypatch.setattr(disk_split, "BUFFER_BYTES", 4096)
    for module in (disk_split, store):
        monkeypatch.setattr(module, "DEPTH", 32)


def run(pack: Path | None, sparsity: str, where: str) -> tuple[list[int], str]:
    """Return the token ids of a greedy answer, and the hash over its logits."""
    how: dict[str, Any] = {"threads": 2, "context": 256, "max_batch": 1, "sparsity": sparsity, "gpu": "off"}
    if "stand-in" in where:
        how |= {"gpu": "stand-in", "vram": 0.5}
    if "small" in where:
        how["ram"] = 1.2 * least(pack, how)
    with LLM(pack, **how) as llm:
        done = llm.generate(PROMPT, GREEDY)
    return done.token_ids, done.figures.logits_hash


def least(pack: Path | None, how: dict[str, Any]) -> float:
    """Return the GiB that the refusal of a budget names."""
    with pytest.raises(OutOfBudget) as refused:
        LLM(pack, **how, ram=0.001)
    found = re.search(r"--ram ([\d.]+)", str(refused.value))
    assert found is not None
    return float(found[1])


@pytest.mark.parametrize(("model", "sparsity", "where"), MARKED)
def test_a_run_computes_what_it_did(
    model: str,
    sparsity: str,
    where: str,
    packs: Callable[[str], Path | None],
    small_buffers: None,
) -> None:
    tokens, digest = run(packs(model), sparsity, where)
    name = f"runs/{model}-{sparsity}-{where.replace(' ', '-')}.json"
    # A matrix unit adds in the order of the other kernels: amx computes avx512's bits.
    path, isa = HERE / name, _native.isa().replace("amx", "avx512")
    was = json.loads(path.read_text()) if path.exists() else {"token_ids": {}, "logits_hash": {}}
    found = {"token_ids": was["token_ids"] | {isa: tokens}}
    if "stand-in" not in where:
        if not RECORD and isa not in was["logits_hash"]:
            pytest.skip(f"nothing was recorded for {isa}")
        found["logits_hash"] = was["logits_hash"] | {isa: digest}
    elif not RECORD and isa not in was["token_ids"]:
        pytest.skip(f"nothing was recorded for {isa}")
    agrees(name, json.dumps(found, indent=1, sort_keys=True) + "\n")


# ---- interfaces


@pytest.mark.parametrize("shape", PLANS)
def test_a_plan_says_what_it_did(
    shape: str, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "TIME_LIMIT_S", 60.0)  # a busy machine stops the solver early otherwise
    done = thermocline("plan", shape, "--hardware", HARDWARE, *PLANS[shape], "--json")
    assert done.code in (0, 5), done.err
    agrees(f"plans/{shape}.json", digits(done.out or done.err))


def digits(text: str) -> str:
    """The same with 12 digits of each number: the last ones of a logarithm are the processor's."""
    return re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda x: f"{float(x[0]):.12g}", text)


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="each Python's argparse lays help out differently"
)
@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_says_what_it_did(
    command: str, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = thermocline(*([command] if command else []), "--help")
    agrees(f"help/{command or 'thermocline'}.txt", done.out)


def test_the_api_is_described_as_it_was() -> None:
    openapi = pytest.importorskip("thermocline.server.api.openapi", reason="needs the extra server")
    found = openapi.document(False, ServerLimits(), 512)
    agrees("openapi.json", json.dumps(found, indent=1, sort_keys=True) + "\n")


def test_the_package_offers_what_it_did() -> None:
    agrees("all.txt", "\n".join(sorted(thermocline.__all__)) + "\n")
