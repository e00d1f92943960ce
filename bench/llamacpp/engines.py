"""Thermocline and llama.cpp as processes that answer one line at a time, over one GGUF file."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from build_llamacpp import note

from thermocline.engine.kv_cache import bytes_for
from thermocline.machine import hardware
from thermocline.model.spec import ModelSpec
from thermocline.offline.bench import Test

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
LOGITS_PROMPT, LOGITS_GEN = 64, 8
MAX_NMSE = 1e-3  # both round activations to int8, differently: 1e-5 to 1e-4 is usual
# In a mixture with random routers, that sends some tokens to another expert of nearly the same score:
# Qwen3-30B-A3B, 8 layers, 5e-3 to 1e-2 with q4_k_m and q4_0; 2 layers in f16 1.5e-7.
MAX_NMSE_ROUTED = 2e-2
SPARE_BYTES = 3 << 30  # the roof's buffer, both runtimes


class Driver:
    """`seconds`: how long the process may live; what waits for its answer then meets its end."""

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        environ: dict[str, str] | None = None,
        seconds: float = math.inf,
    ) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environ or {})},
            start_new_session=True,  # Ctrl-C is for us
        )
        self._timer = threading.Timer(seconds, self.process.kill)
        self._timer.daemon = True
        if seconds < math.inf:
            self._timer.start()
        self.hello = self._answer()

    def ask(self, *words: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def run(self, test: Test, flash: int) -> dict[str, Any]:
        return self.ask("run", test.threads, flash, test.depth, test.prompt, test.gen)

    def logits(self, threads: int, directory: Path, gen: int = LOGITS_GEN) -> np.ndarray[Any, Any]:
        """[gen + 1, vocab_size]: after the prompt, and after each token that follows it."""
        path = directory / f"{self.name}.f32"
        said = self.ask("logits", threads, 1, LOGITS_PROMPT, gen, path)
        return np.fromfile(path, np.float32).reshape(said["rows"], -1)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True)
class Duel:
    """Both engines over the same weights and tokens.

    `model` is what Thermocline opens: the GGUF file itself, or a pack.
    """

    model: Path
    spec: ModelSpec
    gguf: Path
    tokens: Path
    tests: list[Test]
    isa: str
    llama_driver: Path

    def ours(self) -> Driver:
        tests = [f"{t.threads},{t.depth},{t.prompt},{t.gen}" for t in self.tests]
        command = [sys.executable, HERE / "thermocline_driver.py", self.model, self.tokens, *tests]
        return Driver("thermocline", command, environ_of(self.isa))

    def llama(self, mmap: int, repack: int) -> Driver:
        return Driver("llama.cpp", [self.llama_driver, self.gguf, self.tokens, self.n_ctx, mmap, repack])

    @property
    def n_ctx(self) -> int:
        return max(t.context + 1 for t in self.tests)

    @property
    def both_fit(self) -> bool:
        room = hardware.available_bytes()
        need = 2 * self.gguf.stat().st_size + 2 * bytes_for(self.spec, self.n_ctx)
        return room is None or need + SPARE_BYTES < room


def environ_of(isa: str) -> dict[str, str] | None:
    """Environment that makes Thermocline use what llama.cpp was built for."""
    return None if isa == "native" else {"THERMOCLINE_ISA": isa}


# ---- logits


def nmse(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Squared error over squared size."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(((x - y) ** 2).sum() / (y**2).sum())


def compare_logits(duel: Duel, directory: Path) -> float:
    threads = duel.tests[0].threads
    duel = replace(duel, tests=[Test(threads, 0, LOGITS_PROMPT, LOGITS_GEN)])
    with duel.ours() as ours:
        a = ours.logits(threads, directory)
    with duel.llama(mmap=1, repack=1) as llama:
        b = llama.logits(threads, directory)
    error, agree = nmse(a, b), float((a.argmax(1) == b.argmax(1)).mean())
    note(f"logits: NMSE {error:.1e}, the same likeliest token in {agree:.0%} of {len(a)} rows")
    most = MAX_NMSE_ROUTED if duel.spec.n_experts > 1 else MAX_NMSE
    if not error <= most:
        raise SystemExit(f"NMSE {error:.1e} is above {most:.0e}: not the same model, no comparison")
    return error


# ---- what a row of results says of where it was measured


def machine() -> dict[str, Any]:
    """Facts about this machine: lscpu's, and what the core makes of them."""
    said = _lscpu()
    names = ("Model name", "Model", "Stepping", "Hypervisor vendor", "L1d cache", "L2 cache", "L3 cache")
    cores, features = hardware.cores(), hardware.isa().features
    return {
        "cpu": said.get("Model name") or cores.name,
        "arch": platform.machine(),
        "cores": cores.physical,
        "cpus": cores.logical,
        "lscpu": {name: said[name] for name in names if name in said},
        "features": sorted(name for name, there in features.items() if there),
    }


def _lscpu() -> dict[str, str]:
    """lscpu's fields, empty where it is not installed."""
    try:
        done = subprocess.run(["lscpu", "-J"], capture_output=True, text=True, check=False)
        fields: list[dict[str, Any]] = json.loads(done.stdout)["lscpu"]
    except (OSError, ValueError, KeyError):
        return {}
    out: dict[str, str] = {}
    while fields:  # newer ones nest
        field = fields.pop()
        out[field["field"].rstrip(":")] = field["data"]
        fields += field.get("children", [])
    return out


def commit() -> str | None:
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None
