"""llama.cpp from PyPI's source package of llama-cpp-python, built outside the repository, and the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
NEEDLESS = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")
NATIVE = ["-DGGML_NATIVE=ON"]
AVX2 = ["-DGGML_NATIVE=OFF", *(f"-DGGML_{x}=ON" for x in ("SSE42", "AVX", "AVX2", "FMA", "F16C", "BMI2"))]
AVX2 += [f"-DGGML_{x}=OFF" for x in ("AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")]
CUDA = [*NATIVE, "-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native"]
OPTIONS = {"native": NATIVE, "avx2": AVX2, "cuda": CUDA}
DRIVER = Path(__file__).with_name("llama_driver.cpp")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sh(*command: str | Path, seconds: float | None = None) -> None:
    """subprocess.TimeoutExpired where it takes longer."""
    note("+ " + " ".join(map(str, command)))
    subprocess.run([str(c) for c in command], check=True, stdout=sys.stderr, timeout=seconds)


def source_tree(build_dir: Path) -> Path:
    """llama.cpp, as the source package holds it; fetched once."""
    tree = build_dir / f"{PACKAGE.replace('-', '_')}-{VERSION}" / "vendor" / "llama.cpp"
    if not tree.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        sh(*pip, "-d", build_dir, f"{PACKAGE}=={VERSION}")
        with tarfile.open(next(build_dir.glob(f"*{VERSION}.tar.gz"))) as archive:
            archive.extractall(build_dir, filter="data")
    return tree


def build(source: Path, build_dir: Path, isa: str, seconds: float | None = None) -> Path:
    """Directory of the libraries, made if they are not there. `isa`: of OPTIONS. What `seconds` cut short is
    continued by the next call.
    """
    if not (build_dir / "bin" / "libllama.so").exists():
        options = [f"-DLLAMA_BUILD_{x}=OFF" for x in NEEDLESS] + OPTIONS[isa]
        sh("cmake", "-S", source, "-B", build_dir, "-DCMAKE_BUILD_TYPE=Release", *options)
        sh(
            "cmake",
            "--build",
            build_dir,
            "--target",
            "llama",
            "-j",
            str(os.cpu_count() or 1),
            seconds=seconds,
        )
    return build_dir / "bin"


def build_driver(source: Path, libraries: Path, out: Path) -> Path:
    made = out / f"llama-driver-{libraries.parent.name}"
    if not made.exists() or made.stat().st_mtime < DRIVER.stat().st_mtime:
        links = ["-lllama", "-lggml", "-lggml-cpu", "-lggml-base", f"-Wl,-rpath,{libraries}"]
        links += ["-Wl,--allow-shlib-undefined"]  # a driver's library need not be there to link
        includes = [f"-I{source}/include", f"-I{source}/ggml/include", f"-L{libraries}"]
        sh("c++", "-O2", "-std=c++17", DRIVER, *includes, *links, "-o", made)
    return made
