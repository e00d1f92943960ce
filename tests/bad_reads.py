"""Processes with a disk that misbehaves: bad_reads.c says in which ways."""

from __future__ import annotations

import os
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
    preloaded = os.environ.get("LD_PRELOAD", "").split()  # as a sanitizer is, which has to come first
    return {"LD_PRELOAD": " ".join([*preloaded, str(library)]), "BAD_READ": what}
