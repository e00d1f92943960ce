"""llama.cpp from the source package of llama-cpp-python, built outside the repository, and the driver."""

from __future__ import annotations

import os
import signal
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


def sh(*command: object, seconds: float | None = None) -> None:
    """subprocess.TimeoutExpired where it takes longer: then all that it started ends, too."""
    note("+ " + " ".join(map(str, command)))
    given = [str(c) for c in command]
    with subprocess.Popen(given, stdout=sys.stderr, start_new_session=True) as process:
        try:
            code = process.wait(seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code:
        raise subprocess.CalledProcessError(code, given)


def source_tree(build_dir: Path, seconds: float | None = None) -> Path:
    """llama.cpp, as the source package holds it; fetched once."""
    package = build_dir / f"{PACKAGE.replace('-', '_')}-{VERSION}"
    if not package.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        sh(*pip, "-d", build_dir, f"{PACKAGE}=={VERSION}", seconds=seconds)
        with tarfile.open(next(build_dir.glob(f"*{VERSION}.tar.gz"))) as archive:
            archive.extractall(build_dir / "unpacking", filter="data")
        (build_dir / "unpacking" / package.name).rename(package)  # whole or not at all
    return package / "vendor" / "llama.cpp"


def build(source: Path, build_dir: Path, isa: str, seconds: float | None = None) -> Path:
    """Directory of the libraries, made if they are not there. `isa`: of OPTIONS. What `seconds` cut short is
    continued by the next call.
    """
    if not (build_dir / "bin" / "libllama.so").exists():
        options = [f"-DLLAMA_BUILD_{x}=OFF" for x in NEEDLESS] + OPTIONS[isa]
        configure = ["cmake", "-S", source, "-B", build_dir, "-DCMAKE_BUILD_TYPE=Release", *options]
        sh(*configure, seconds=seconds)
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
