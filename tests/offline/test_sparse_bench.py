"""`synthetic_predictors.py` and `sparse.py` of bench, without llama.cpp."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from thermocline.offline import bench
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import open_predictors

BENCH = Path(__file__).parents[2] / "bench"
ROOMS = [str(BENCH / room) for room in ("llamacpp", "engine")]
CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
 "hidden_act": "silu",
 "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
 "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
 "bos_token_id": 1, "eos_token_id": 2}"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    sys.path[:0] = ROOMS
    yield importlib.import_module("synthetic_predictors"), importlib.import_module("sparse")
    del sys.path[: len(ROOMS)]


@pytest.fixture(scope="module")
def synthetic(
    scripts: tuple[ModuleType, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    from thermocline.cli import main

    path = tmp_path_factory.mktemp("sparse")
    (path / "shape.json").write_text(CONFIG)
    synth = ["synth", str(path / "shape.json"), "-o", str(path / "pack"), "--active", "0.11", "-q"]
    assert main.main(synth) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys, "argv", ["synthetic_predictors", str(path / "pack"), "--rank", "96", "--tokens", "64"]
        )
        scripts[0].main()
    found = open_predictors(Pack.open(path / "pack"))
    assert found is not None
    found.close()
    return path / "pack", found.report


def test_synthetic_predictors_find_nearly_all_of_a_random_models_activations(
    synthetic: tuple[Path, dict[str, Any]],
) -> None:
    _, report = synthetic
    assert 0.08 < report["active_fraction"] < 0.14
    assert report["active_fraction"] < report["predicted_fraction"] < 2 * report["active_fraction"]


def test_a_round_runs_every_mode_and_divides_rightly(
    scripts: tuple[ModuleType, ModuleType],
    synthetic: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ourselves in llama.cpp's place, under a roof of 2 GB/s."""
    sparse, (pack, _) = scripts[1], synthetic
    monkeypatch.setattr(sparse, "roof", lambda test: 2.0)
    tokens = tmp_path / "tokens.i32"
    np.array(bench.random_tokens(Pack.open(pack).spec, 1, 6), np.int32).tofile(tokens)
    other = tmp_path / "other"
    driver = f"{sys.executable} {BENCH / 'llamacpp/thermocline_driver.py'}"
    other.write_text(f'#!/bin/sh\nexec {driver} {pack} "$2" 1,0,0,4\n')
    other.chmod(0o755)
    asked = {"threads": [1], "gen": 4, "rounds": 2, "driver": other, "modes": list(sparse.MODES)}
    args = type("Args", (), asked)()
    (row,) = sparse.rounds(args, pack, pack / "weights.bin", tokens)
    assert row["together"] and all(len(row[m]["ns"]) == 2 for m in (*sparse.MODES, sparse.LLAMA))
    assert row["off"]["predicted_fraction"] == row["exact"]["predicted_fraction"] == 1
    assert row["predict"]["predicted_fraction"] < 0.4 and row["asked"]["predicted_fraction"] == 1
    assert row["predict"]["bytes_per_token"] < row["exact"]["bytes_per_token"] < row["off"]["bytes_per_token"]
    moved = row["predict"]["bytes_per_token"] * row["predict"]["tok_s"] / 1e9
    assert row["predict"]["roof_share"] == pytest.approx(moved / 2.0)
    assert row["llama.cpp"]["ratio"] == 1
    args.modes = ["exact"]
    (row,) = sparse.rounds(args, pack, pack / "weights.bin", tokens)
    sparse.show("toy", "q8_0", "easy", row)
    assert "predictor_share" not in row and set(sparse.MODES) & row.keys() == {"exact"}
