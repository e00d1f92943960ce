"""llama.cpp with CUDA: built where there is nvcc, given as many layers as a budget of GPU memory holds."""

from __future__ import annotations

import math
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from build_llamacpp import build, build_driver, note, source_tree
from engines import Driver

OVERHEAD_BYTES = 700 << 20  # of its CUDA context and compute buffers: a first guess


def why_not(built: bool) -> str | None:
    """Why it cannot be built here with CUDA. `built`: its libraries are; the driver is still to be linked."""
    needed = ("c++",) if built else ("nvcc", "cmake", "c++")
    missing = [tool for tool in needed if shutil.which(tool) is None]
    return f"{missing[0]} is not on the PATH: llama.cpp is not built with CUDA here" if missing else None


def prepared(build_dir: Path, source: Path | None, seconds: float) -> Path | str:
    """The driver, or why there is none. A build that is cut off goes on in the next call."""
    why = why_not((build_dir / "cuda" / "bin" / "libllama.so").exists())
    if why is not None:
        return why
    try:
        build_dir.mkdir(parents=True, exist_ok=True)
        tree = source or source_tree(build_dir, seconds)
        return build_driver(tree, build(tree, build_dir / "cuda", "cuda", seconds), build_dir)
    except subprocess.TimeoutExpired:
        return f"its build was not finished after {seconds:.0f} s: run again, it goes on"
    except subprocess.CalledProcessError as e:
        if "pip" in e.cmd:
            return "its source cannot be fetched, the errors are above: without a network give --llama-source"
        tool = " ".join([Path(e.cmd[0]).name, *(a for a in e.cmd[1:3] if not Path(a).is_absolute())])
        return f"its build failed: {tool} ended with code {e.returncode}, its errors are above"
    except (OSError, StopIteration, tarfile.TarError) as e:  # a disk that is full, a package that is another
        return f"its build failed: {getattr(e, 'strerror', None) or type(e).__name__}"


@dataclass(frozen=True)
class Fitted:
    """A process that holds the model, `layers` of it (the head counts as one) on the GPU."""

    driver: Driver
    layers: int
    vram_bytes: int  # as the card says


def fitted(
    start: Callable[[int], Driver], layers: int, nbytes: int, budget: int | None, used: Callable[[], int]
) -> Fitted:
    """With the most layers that `budget` holds. `used`: bytes of the card that are taken, by anybody."""
    each, most = nbytes / (layers + 1), layers + 1
    n = most if budget is None else max(0, min(most, int((budget - OVERHEAD_BYTES) / each)))
    tried = set[int]()
    while True:
        before = used()
        driver = start(n)
        took = used() - before
        tried.add(n)
        over = 0 if budget is None else took - budget
        grows = budget is not None and n < most and n + 1 not in tried and took + each <= budget
        if n == 0 or (over <= 0 and not grows):
            return Fitted(driver, n, took)
        note(f"llama.cpp: {n} of {most} layers take {took / 2**30:.2f} GiB of {(took - over) / 2**30:.2f}")
        driver.__exit__()
        n = n + 1 if over <= 0 else max(0, n - max(1, math.ceil(over / each)))
