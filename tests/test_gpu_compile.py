"""The Triton kernels compile for GPUs that are not here, into code as it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thermocline import quant

AHEAD = {  # each format and each target once, and both ways to multiply
    "sm_80": ("1", ["q4_0", "q8_0", "f32"]),
    "sm_89": ("4,64", ["q4_0"]),
    "sm_90": ("1", ["f16", "bf16"]),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_every_kernel_compiles_and_nothing_spills(target: str, tmp_path: Path) -> None:
    """A full-sized model's kernels for GPUs that are not here: rows come in 16 bytes at once, sums stay in
    registers. GPU_COMPILE=all: with every number of tokens (minutes); else a few of each target's.
    """
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    tokens, formats = (
        ("1,2,4,8,16,64", list(quant.FORMATS)) if os.environ.get("GPU_COMPILE") == "all" else AHEAD[target]
    )
    script = Path(__file__).with_name("gpu_compile.py")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-P", script, target, tokens, ",".join(formats)],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found and [f for f in found if f["spilled"]] == []
    by_one = [
        f
        for f in found
        if f["kernel"].startswith(("matmul_few", "gate_up_few", "down_few")) and "B=1 " in f["kernel"]
    ]
    assert [f for f in by_one if not f["wide_loads"]] == []
