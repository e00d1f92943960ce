"""The core on other systems than this one: compiled for Windows, and run on ARM under an emulator.

Both need what CONTRIBUTING names (`apt-get install ...`), and are skipped, saying so, without it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CSRC = TESTS.parent / "csrc"
CORE = sorted(
    path for path in CSRC.rglob("*.cpp") if not path.stem.startswith("bindings")
)  # all that is not Python's
FLAGS = "-std=c++17 -O2 -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror -Wno-ignored-attributes"
OF_THE_SYSTEM = re.compile(
    r"#\s*include\s*<(unistd|fcntl|pthread|sched|signal|dlfcn|windows|io|sys/\w+|mach/\w+)\.h>"
)

ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
WINDOWS_COMPILER = "x86_64-w64-mingw32-g++-posix"
# What CMakeLists.txt compiles these with. The rest has -O3 there too, which here would be time lost.
FILE_FLAGS = {
    "isa_neon": "-O3 -march=armv8.2-a+dotprod -fno-schedule-insns",
    "isa_avx2": "-mavx2 -mfma -mf16c",
    "isa_avxvnni": "-mavx2 -mfma -mf16c -mavxvnni",
    "isa_avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
    " -Wno-uninitialized -Wno-maybe-uninitialized",
    "isa_amx": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
    " -mamx-tile -mamx-int8 -Wno-uninitialized -Wno-maybe-uninitialized -Wno-unused-function",
    "search_avx2": "-mavx2 -mfma",
    "search_avx512": "-mavx2 -mfma -mavx512f -mavx512bw -mavx512vl -mavx512dq",
}
X86 = {"isa_avx2", "isa_avxvnni", "isa_avx512", "isa_amx", "search_avx2", "search_avx512"}
ARM = {"isa_neon"}
# Of test_kernels.py: what csrc/bindings/bindings.cpp refuses. It is not in the core that answers here.
OF_THE_BINDINGS = "not refused and not no_other"
# Emulated, the whole file takes minutes (ARM_TESTS=all). Of the slow tests the suite runs the smallest.
SLOW = (
    "ffn_add",
    "every_kind_of_ffn",
    "dense_ffn",
    "ffn_records",
    "tokens_skipping",
    "active_set",
    "matmul",
    "any_shape",
    "any_ffn",
    "interleaved_rows",
    "nan_weight",
    "window",
)
SMALL = (
    "without_biases",
    "active_set[neon-q4_0-dReLU]",
    "active_set[neon-q5_k-gated]",
    *(f"in_turn[neon-{format}]" for format in ("q4_k", "q3_k")),
    *(f"matmul_add-neon-{format}" for format in ("q8_0", "bf16", "q2_k")),
)


def need(*programs: str) -> None:
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"needs {program} (CONTRIBUTING.md says how to get it)")


def compiled(compiler: str, source: Path, *flags: str) -> None:
    own = FILE_FLAGS.get(source.stem, "").split()
    done = subprocess.run(
        [compiler, *FLAGS.split(), f"-I{CSRC}", *own, *flags, str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{source.name}: {done.stderr}"


def test_only_two_files_of_the_core_ask_the_system() -> None:
    asking = {p.name for p in CSRC.rglob("*.*") if OF_THE_SYSTEM.search(p.read_text(encoding="utf-8"))}
    assert asking == {"system.cpp", "uring.cpp"}


@pytest.mark.oracle
def test_the_core_compiles_for_windows() -> None:
    need(WINDOWS_COMPILER)
    for source in CORE:
        if source.stem not in ARM:
            defines = "-DTHERMOCLINE_X86=1", "-DTHERMOCLINE_AVXVNNI=1"
            compiled(WINDOWS_COMPILER, source, *defines, "-fsyntax-only")


@pytest.fixture(scope="session")
def arm_core(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command that runs the core, built for ARM, behind tests/remote_core.cpp."""
    need(ARM_COMPILER, ARM_EMULATOR)
    out = tmp_path_factory.mktemp("arm")
    sources = [source for source in CORE if source.stem not in X86] + [TESTS / "remote_core.cpp"]
    objects = [str(out / f"{source.parent.name}-{source.stem}.o") for source in sources]  # two are store.cpp
    for source, object in zip(sources, objects, strict=True):
        compiled(ARM_COMPILER, source, "-DTHERMOCLINE_ARM=1", "-c", "-o", object)
    subprocess.run([ARM_COMPILER, "-static", "-pthread", *objects, "-o", str(out / "core")], check=True)
    return shlex.join([ARM_EMULATOR, str(out / "core")])


def run_tests_on(core: str, levels: str, *pytest_arguments: str) -> str:
    """Run a test file of the core on another one; its output."""
    path = os.pathsep.join([str(TESTS), *(p for p in sys.path if p)])
    env = {**os.environ, "PYTHONPATH": path, "REMOTE_CORE": core, "REMOTE_LEVELS": levels}
    argv = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "remote_native",
        "-p",
        "no:cacheprovider",
        "-x",
        "-n0",
        "-m",
        "",
    ]
    done = subprocess.run(
        [*argv, *pytest_arguments], cwd=TESTS.parent, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.oracle
def test_the_kernels_for_arm_pass_the_kernel_tests(arm_core: str) -> None:
    everything = os.environ.get("ARM_TESTS") == "all"
    k = OF_THE_BINDINGS
    if not everything:
        k += f" and (not ({' or '.join(SLOW)}) or {' or '.join(SMALL)})"
    levels = "neon scalar" if everything else "neon"
    out = run_tests_on(arm_core, levels, str(TESTS / "ops" / "test_kernels.py"), "-k", k)
    assert int(re.findall(r"(\d+) passed", out)[-1]) >= (250 if everything else 40)
    assert "skipped" not in out
