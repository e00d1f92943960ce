"""The Triton kernels compile for GPUs that are not here, into code as it should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thermocline.model import quant

pytestmark = pytest.mark.oracle

# Every number of tokens that has code of its own: more than 16 are multiplied in tiles of 32, 64 or 128.
TOKENS = "1,2,4,8,16,32,64,128"
# Tokens and formats. A usual format has one token on each target, with one Triton or the other; the most
# usual two have both Tritons somewhere. So have the kernels that read no rows, of few tokens and of many: two
# thirds of a target's time. All of them on all targets with both took over 20 minutes of a processor.
OTHERS = "others"  # as gpu_compile.py's command has it
AHEAD = {
    ("sm_80", "newest"): [("1", ["f16", "q4_k"]), ("16", ["q4_0"]), ("128", ["q4_k", "f32", OTHERS])],
    ("sm_80", "older"): [("1", ["q4_0", "q8_0", "q6_k", "f32", OTHERS]), ("32", ["q8_0"])],
    ("sm_89", "newest"): [("1", ["q4_0", "q8_0", "q6_k", OTHERS]), ("4", ["q4_0"]), ("128", ["q6_k"])],
    ("sm_89", "older"): [("1", ["f16", "q4_k"]), ("64", ["q4_0", OTHERS])],
    ("sm_90", "newest"): [("1", ["f16", "bf16", "q4_k"]), ("64", ["iq4_xs", OTHERS])],
    ("sm_90", "older"): [("1", ["q6_k", OTHERS]), ("2", ["q6_k"]), ("128", ["q6_k"])],
    ("sm_90+overlap", "newest"): [("1", ["q4_0", OTHERS])],
    ("sm_90+overlap", "older"): [("1", ["q8_0"])],
}
SQUARES = "matmul_few", "heads_few", "gate_up_few", "down_experts_few"  # see norms that begin early
# Bytes that come at once of a row, and how often of one; of a q8_0 block twice.
WIDE = {"f32": (16, 1), "f16": (8, 1), "bf16": (8, 1), "q8_0": (16, 2)} | {
    f: (8, 1) for f in ("q2_k", "q3_k", "tq2_0")
}
# Instructions of the inner loop a weight, with one token.
INSTRUCTIONS = {"q4_0": 0.9, "q8_0": 0.65, "q4_k": 1.5, "q6_k": 1.55}
# The same of 64 columns and rows with 128 tokens, whose weights become f16: by a thread each, 226 to 271.
# Made in each warp that multiplies by them, up to 1212. Second: of rows at no multiples of 16 bytes.
OF_HALVES = {"q6_k": (280, 420), "q3_k": (280, 495), "q2_k": (265, 515)}


def installed(triton: str) -> dict[str, str]:
    """The environment that has this Triton. The older one is a folder, where CI has put it."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if triton == "newest":
        pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
        return env
    folder = env.get("OLDER_TRITON", "")
    if not folder:
        pytest.skip("OLDER_TRITON is no folder: pip install --no-deps --target FOLDER triton==3.6.0")
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH")]))}


@pytest.mark.parametrize("triton", ["newest", "older"])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90+overlap"])
def test_every_kernel_compiles_and_nothing_spills(target: str, triton: str, tmp_path: Path) -> None:
    """A full-sized model's kernels for GPUs that are not here: rows come in wide loads, and sums stay in
    registers. GPU_COMPILE=all: with every number of tokens (minutes); else a few of each.
    """
    env = installed(triton) | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[1] / "gpu_compile.py"
    everything = os.environ.get("GPU_COMPILE") == "all"
    found = []
    wanted = [(TOKENS, [*quant.FORMATS, OTHERS])] if everything else AHEAD[target, triton]
    for tokens, formats in wanted:
        command = [sys.executable, "-P", str(script), target, tokens, ",".join(formats)]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        found += [json.loads(line) for line in done.stdout.splitlines()]
    assert (triton == "older") == all(f["triton"].startswith("3.6.") for f in found)
    assert [f for f in found if f["spilled"]] == []
    for f in found:
        if f["kernel"].startswith(("matmul_few", "heads_few", "gate_up_few")) and "B=1 " in f["kernel"]:
            check_products(f)
        if f["kernel"].startswith("matmul_many") and "M=128 " in f["kernel"]:
            check_tiles(f)
    check_overlap(found, target.endswith("+overlap"), any(OTHERS in formats for _, formats in wanted))
    check_squares([f for f in found if f["kernel"].startswith(SQUARES)])


def check_products(f: dict[str, Any]) -> None:
    """With one token: what a thread takes of a row at once comes in one load, or two."""
    of = dict(part.split("=") for part in f["kernel"].split()[1:])
    rows, matrices = int(of["R"]), 2 if f["kernel"].startswith("gate_up") else 1
    size, loads = WIDE.get(of["FORMAT"], (16, 1))
    assert f["weights"].get(str(size), 0) >= rows * matrices * loads * int(of["U"]), f
    if of.get("ALL") == "True" and matrices == 1 and of["FORMAT"] in INSTRUCTIONS:
        assert f["loop"] / (32 * rows) <= INSTRUCTIONS[of["FORMAT"]], f


def check_tiles(f: dict[str, Any]) -> None:
    """With 128 tokens: weights that become f16 are made once for all warps of a program."""
    of = dict(part.split("=") for part in f["kernel"].split()[1:])
    if of["FORMAT"] in OF_HALVES:
        assert f["loop"] <= OF_HALVES[of["FORMAT"]][of.get("stride") == "odd"], f


def check_squares(found: list[dict[str, Any]]) -> None:
    """A token's squares are added in one order: all threads add up those of one, however many there are.

    Those of 32 columns are added as 16 tokens' are, but for the number of warps.
    """
    of_stream, orders = 0, dict[int, set[str]]()
    for tokens, columns, layout in (x for f in found for x in f["sums"]):
        warps = [int(n) for n in re.findall(r"warpsPerCTA = \[(\d+), (\d+)\]", layout)[0]]
        if (tokens, columns) == (16, 32):  # no product has so many rows a program
            orders.setdefault(warps[0] * warps[1], set()).add(layout)
        elif columns >= 128:
            of_stream += 1
            assert warps[0] == 1 and "threadsPerWarp = [1, 32]" in layout, layout
    assert of_stream and orders and all(len(layouts) == 1 for layouts in orders.values()), orders


def check_overlap(found: list[dict[str, Any]], asked: bool, others: bool) -> None:
    """Every kernel waits for the launch before it, and before that at most has weights brought to the L2."""
    words = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] if asked else []
    assert [f for f in found if f["overlap"]["said"] != words] == []
    early = {f["kernel"].split()[0]: f["overlap"]["before"] for f in found if f["overlap"]["before"]}
    ahead = ["matmul_few", "heads_few", "gate_up_few", *["head_products"] * others] if asked else []
    assert early == {name: ["prefetch.global"] for name in ahead}


def test_loads_are_counted_of_the_weights_alone() -> None:
    """Wide ones of activations were counted, too: weights could have come byte by byte."""
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    import gpu_compile  # not before: see test_gpu_launches

    ptx = """
        ld.param.u64 %rd1, [matmul_few_param_0];
        ld.param.u64 %rd2, [matmul_few_param_1];
        add.s64 %rd3, %rd1, 64;
        mad.wide.s32 %rd4, %r9, 18, %rd2;
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd3 + 0 ];
        ld.global.L1::evict_first.b8 { %rs1 }, [ %rd4 + 0 ];
        ld.global.b8 { %rs2 }, [ %rd4 + 1 ];
    """
    assert gpu_compile.loads_of([0], ptx) == {16: 1} and gpu_compile.loads_of([1], ptx) == {1: 2}


def test_every_number_of_tokens_has_code_that_is_compiled() -> None:
    """GPU_COMPILE=all leaves out no launch of a matrix kernel, whatever the number of tokens."""
    env = installed("newest")
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
    env["PYTHONPATH"] = here
    command = [sys.executable, "-P", "-c", script, TOKENS]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_every_kernel_compiles_for_amd(target: str, tmp_path: Path) -> None:
    """No card has run them. Many spill there: nothing is tuned for it. One has those that read no rows."""
    env = installed("newest") | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[1] / "gpu_compile.py"
    everything = os.environ.get("GPU_COMPILE") == "all"
    tokens, formats = (TOKENS, list(quant.FORMATS)) if everything else ("1", ["q4_0"])
    if everything or target == "gfx1100":
        formats.append(OTHERS)
    command = [sys.executable, "-P", str(script), target, tokens, ",".join(formats)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = {json.loads(line)["kernel"].split()[0] for line in done.stdout.splitlines()}
    assert {"matmul_few", "gate_up_few", "down_few", "quantise"} <= found
    assert ("attend" in found) == (OTHERS in formats)
