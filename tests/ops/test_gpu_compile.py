"""The Triton kernels compile for GPUs that are not here, into code as it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from thermocline.model import quant

pytestmark = pytest.mark.oracle

# Every number of tokens that has code of its own: more than 16 are multiplied in tiles of 32, 64 or 128.
TOKENS = "1,2,4,8,16,32,64,128"
AHEAD = {  # each format and each target once, and both ways to multiply
    "sm_80": ("1", ["q4_0", "q8_0", "f32"]),
    "sm_89": ("4,64", ["q4_0"]),
    "sm_90": ("1", ["f16", "bf16"]),
}


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90"])
def test_every_kernel_compiles_and_nothing_spills(target: str, tmp_path: Path) -> None:
    """A full-sized model's kernels for GPUs that are not here: 16 bytes of x or of rows come at once, and
    sums stay in registers. GPU_COMPILE=all: with every number of tokens (minutes); else a few of each.
    """
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    tokens, formats = (
        (TOKENS, list(quant.FORMATS)) if os.environ.get("GPU_COMPILE") == "all" else AHEAD[target]
    )
    script = Path(__file__).parents[1] / "gpu_compile.py"
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


def test_every_number_of_tokens_has_code_that_is_compiled() -> None:
    """GPU_COMPILE=all leaves out no launch of a matrix kernel, whatever the number of tokens."""
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    script = """if True:
        import sys, gpu_compile
        listed = [int(t) for t in sys.argv[1].split(",")]
        possible = [*range(1, 20), 33, 64, 65, 128, 129, 300]
        for f in gpu_compile.quant.FORMATS:
            names = [{n for n, _, _ in gpu_compile.kernels(t, [f]) if f in n} for t in (listed, possible)]
            assert names[0] and names[0] == names[1], names[1] - names[0]
    """
    # No empty entry: that is the current directory, whose package has no compiled core.
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    here = os.pathsep.join(filter(None, paths))
    env = {**os.environ, "PYTHONPATH": here}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-P", "-c", script, TOKENS]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
