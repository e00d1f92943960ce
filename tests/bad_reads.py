"""Processes with a disk that misbehaves: bad_reads.c says in which ways."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def library(directory: Path) -> Path:
    """The library, compiled; the test is skipped where that cannot be."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    source, built = Path(__file__).with_suffix(".c"), directory / "bad_reads.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source, "-ldl", "-pthread"], check=True)
    return built


def environment(library: Path, what: str) -> dict[str, str]:
    """Of a process whose reads go wrong; inside it `ctypes.CDLL(None).bad_reads(b"eio 3")` changes how."""
    return {"LD_PRELOAD": str(library), "BAD_READ": what}
