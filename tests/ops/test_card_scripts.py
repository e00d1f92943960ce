"""`scripts/card`, for a machine with a card and no network, tried without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_gpu_compile import installed

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
    assert parts["overlap"]["replays"] == 3


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


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "hidden_act": "silu",
    "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# A card that starts nothing: tensors have addresses there, and launches go on to its driver.
ON_A_CARD = """if True:
    import json, sys, types, warm
    from pathlib import Path

    class Card(warm.Absent):
        launcher_cls = staticmethod(lambda src, metadata: lambda *_: None)
        utils = types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
            load_binary=lambda *_: (None, None, 32, 0, 1024),
        )

    found = []
    warm.triton.runtime.driver.set_active(Card(warm.GPUTarget("cuda", int(sys.argv[1]), 32)))
    warm.triton.knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
    warm.launches(warm.StandIn(), warm.bench.arguments(sys.argv[3:]), Path(sys.argv[2]))
    print(json.dumps(found))
"""


@pytest.mark.parametrize("triton", ["newest", "older"])
def test_a_card_finds_what_was_compiled_before(triton: str, tmp_path: Path) -> None:
    """None of its launches compiles anything."""
    env = installed(triton) | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CARD), env.get("PYTHONPATH")]))
    (tmp_path / "t.json").write_text(json.dumps(CONFIG))
    model = ["--shape", str(tmp_path / "t.json"), "--format", "q4_0", "--vram", "all", "--threads", "1"]
    model += ["--gen", "4", "--prompt", "32"]

    def said(*command: str) -> Any:
        done = subprocess.run([sys.executable, "-P", *command], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    made = said(str(CARD / "warm.py"), "--target", "sm_90", *model)
    assert made["compiled"] > 12 and made["there"] == 0
    on_card = said("-c", ON_A_CARD, "90", str(tmp_path), *model)
    assert on_card == [True] * made["compiled"]
