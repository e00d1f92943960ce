"""What bench/gpu.py measures on and keeps: the file of records, the machine, the two engines side by side."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_llama
import numpy as np
import torch
from build_llamacpp import PACKAGE, VERSION, note
from gpu_models import Model, Shape, made, write_gguf
from gpu_report import LLAMA, OURS, key_of, targets_json
from vs_llamacpp import Driver

from thermocline import gpu, hardware
from thermocline.bench import random_tokens
from thermocline.errors import OutOfBudget, UsageError
from thermocline.memory import GIB

KIND = "thermocline-gpu-bench"

# ---- what is kept


@dataclass
class Results:
    """The file, written after every record."""

    path: Path
    facts: dict[str, Any]  # of every record
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(path: Path, facts: dict[str, Any]) -> Results:
        found = json.loads(path.read_text()) if path.exists() else {"kind": KIND, "items": {}}
        if found.get("kind") != KIND:
            raise UsageError(f"{path}: not written by bench/gpu.py; give another --results")
        return Results(path, facts, found["items"])

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.items[key] = {**self.facts, "time": now, **record}
        whole = {"kind": KIND, "items": self.items, "targets": targets_json(self.items)}
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(whole, indent=1) + "\n")
        partial.replace(self.path)


@dataclass(frozen=True)
class Clock:
    end: float

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


@dataclass
class Machine:
    """What is measured on, and with what."""

    args: argparse.Namespace
    device: gpu.Gpu
    results: Results
    clock: Clock
    directory: Path
    driver: Path | str  # llama.cpp's, or why there is none
    progress: Callable[[str, int, int], None]
    model: Model | None = None  # the last one made

    def used(self) -> int:
        """Bytes of the card that are taken, by anybody."""
        if self.device.device.torch.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device.device.torch)
        return int(total - free)

    def missing(self, shape: Shape, vram: str) -> list[str]:
        """Keys of records that can be made and are not there."""
        engines = [OURS] if isinstance(self.driver, str) else [OURS, LLAMA]
        keys = [key_of(shape.label, vram, engine) for engine in engines]
        return [key for key in keys if key not in self.results.items]

    def model_of(self, shape: Shape) -> Model:
        if self.model is None or self.model.shape != shape:
            self.model = None
            sparsity = self.args.sparsity if shape.spec().sparse else "exact"
            self.model = made(shape, sparsity, self.directory)
        return self.model

    def session_of(self, model: Model, vram: str) -> gpu.Session:
        """Raises OutOfBudget."""
        g = self.device
        if vram != "all":
            g = replace(g, free_bytes=min(g.free_bytes, int(float(vram) * GIB)))
        found = gpu.tiers_of(g, model.shape.format, self.args.threads)
        free = hardware.available_bytes()
        session = gpu.planned_of(
            g, model.subject, found, sparsity=self.sparsity_of(model), context=self.context(model),
            max_batch=1, ram=free, told=note
        )  # fmt: skip
        if session is None:
            raise OutOfBudget("the plan is to leave the GPU alone")
        if vram == "all" and any(x.gpu < model.pack.spec.ffn_dim for x in session.plan.layers):
            raise OutOfBudget("not all of it fits in the GPU's memory")
        return session

    def sparsity_of(self, model: Model) -> str:
        if not model.pack.spec.sparse:
            return "off"
        return "exact" if model.predictors is None else "predict"

    def context(self, model: Model) -> int:
        return min(model.pack.spec.max_context, max(self.args.prompt, self.args.gen + 8) + 64)


# ---- two engines


@dataclass
class Side:
    """An engine that is loaded."""

    decode: Callable[[], int]  # nanoseconds
    prefill: Callable[[], int]
    decode_ns: list[int] = field(default_factory=list)
    prefill_ns: list[int] = field(default_factory=list)


def alternate(sides: list[Side], runs: int) -> None:
    """Each once a round, after one that does not count; the first changes from round to round."""
    for i in range(-1, runs):
        for side in sides if i % 2 == 0 else reversed(sides):
            decode, prefill = side.decode(), side.prefill()
            if i >= 0:
                side.decode_ns.append(decode)
                side.prefill_ns.append(prefill)


def speeds(side: Side, args: argparse.Namespace, times: float = 1.0) -> dict[str, Any]:
    """`times`: what is not there would have taken it as long again."""

    def ts(tokens: int, ns: float) -> float:
        return tokens * 1e9 / (ns * times)

    d, p = side.decode_ns, side.prefill_ns
    return {
        "tok_s": ts(args.gen, statistics.median(d)),
        "tok_s_range": [ts(args.gen, max(d)), ts(args.gen, min(d))],
        "prompt_tok_s": ts(args.prompt, statistics.median(p)),
        "prompt_tok_s_range": [ts(args.prompt, max(p)), ts(args.prompt, min(p))],
        "gen": args.gen,
        "prompt": args.prompt,
        "decode_ns": d,
        "prompt_ns": p,
    }


class Rival:
    """llama.cpp, loaded with as many layers on the GPU as the memory holds."""

    def __init__(self, m: Machine, model: Model, vram: str) -> None:
        self.m, self.model, spec = m, model, model.pack.spec
        self.gguf, tokens = m.directory / "model.gguf", m.directory / "tokens.i32"
        room = min(hardware.available_bytes() or 0, shutil.disk_usage(m.directory).free) - m.args.spare
        self.layers = min(spec.n_layers, int(spec.n_layers * room / model.weights_bytes))
        if self.layers < 1:
            raise OutOfBudget("there is no room for a layer of llama.cpp's file")
        self.own = write_gguf(model, self.gguf, self.layers)
        needed = max(m.args.prompt, m.args.gen) + 2
        np.array(random_tokens(spec, 1, needed), np.int32).tofile(tokens)
        context = m.context(model)

        def start(layers: int) -> Driver:
            command = [m.driver, self.gguf, tokens, str(context), "1", "0", str(layers)]
            driver = Driver(LLAMA, command)
            driver.ask("run", m.args.threads, 1, 0, 0, 1)  # makes its context
            return driver

        # Of fewer layers the budget is as much smaller, so that the same share of them is on the GPU.
        budget = None if vram == "all" else int(float(vram) * GIB * self.layers / spec.n_layers)
        self.fitted = gpu_llama.fitted(start, self.layers, self.gguf.stat().st_size, budget, m.used)
        ask, threads = self.fitted.driver.ask, m.args.threads
        self.side = Side(
            lambda: int(ask("run", threads, 1, 0, 0, m.args.gen)["ns"]),
            lambda: int(ask("run", threads, 1, 0, m.args.prompt, 0)["ns"]),
        )

    def record(self) -> dict[str, Any]:
        of = self.model.pack.spec.n_layers
        return speeds(self.side, self.m.args, of / self.layers) | {
            "package": f"{PACKAGE} {VERSION}",
            "same_weights": self.own,
            "gpu_layers": self.fitted.layers,
            "vram_bytes": self.fitted.vram_bytes,
            "layers": self.layers,
            "of_layers": of,
            "scaled": self.layers < of,
        }

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *_: object) -> None:
        self.fitted.driver.__exit__()
        self.gguf.unlink(missing_ok=True)
