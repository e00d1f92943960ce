"""What bench/gpu/gpu.py measures on: the machine, and the two engines side by side."""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_llama
import numpy as np
import torch
from build_llamacpp import PACKAGE, VERSION
from engines import Driver
from gpu_models import Model, Shape, made, write_gguf
from gpu_report import LLAMA, OURS, key_of
from gpu_results import Results

from thermocline.errors import DeviceFailure, OutOfBudget
from thermocline.machine import hardware
from thermocline.offline.bench import random_tokens
from thermocline.plan.memory import GIB
from thermocline.session import gpu, gpu_tier
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session, needs_of

SLACK_S = 20.0  # that llama.cpp may go on for when the time is over


class NotOnThisCard(OutOfBudget):
    """Its memory is too small, which no later call changes."""


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
    device: gpu.OpenGpu
    results: Results
    clock: Clock
    directory: Path
    driver: Path | str  # llama.cpp's, or why there is none
    progress: Callable[[str, int, int], None]
    model: Model | None = None  # the last one made

    def more(self) -> bool:
        """Time."""
        return self.clock.left > 0

    def check_card(self) -> None:
        """After a failure: another model's turn, unless it was the card's last word."""
        try:
            self.device.device.zeros((1,), torch.uint8)
            self.device.device.wait([])
        except DeviceFailure as e:
            raise DeviceFailure(f"the card answers no more: run again, it goes on ({e})") from None

    def clear(self) -> None:
        """What there is of models."""
        self.model = None
        for path in self.directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

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
        return [key for key in keys if self.results.wanted(key)]

    def model_of(self, shape: Shape) -> Model:
        if self.model is None or self.model.shape != shape:
            self.model = None
            sparsity = self.args.sparsity if shape.spec().sparse else "exact"
            self.model = made(shape, sparsity, self.directory)
        return self.model

    def session_of(self, model: Model, vram: str) -> Session:
        """Raises NotOnThisCard, and OutOfBudget where RAM is too small."""
        g = self.device
        if vram != "all":
            g = replace(g, free_bytes=min(g.free_bytes, int(float(vram) * GIB)))
        found = gpu.tiers_of(g, (model.shape.format,), self.args.threads)
        options = EngineOptions(
            sparsity=self.sparsity_of(model), context=self.context(model), max_batch=1,
            threads=self.args.threads
        )  # fmt: skip
        planned = gpu_tier.planned_of((g,), model.subject, found, needs_of(options))
        if planned is None:
            raise NotOnThisCard("the plan is to leave the GPU alone")
        decision, gpus = planned
        if vram == "all" and any(x.on_gpus < model.pack.spec.ffn_dim for x in decision.placement.layers):
            raise NotOnThisCard("not all of it fits in the GPU's memory")
        return Session(model.pack, options, decision, predictors=model.predictors, gpus=gpus)

    def sparsity_of(self, model: Model) -> str:
        if not model.pack.spec.sparse:
            return "off"
        return "exact" if model.predictors is None else "predict"

    def context(self, model: Model) -> int:
        return min(model.pack.spec.max_context, max(int(self.args.prompt), int(self.args.gen) + 8) + 64)


# ---- two engines


@dataclass
class Side:
    """An engine that is loaded."""

    decode: Callable[[], int]  # nanoseconds
    prefill: Callable[[], int]
    decode_ns: list[int] = field(default_factory=list)
    prefill_ns: list[int] = field(default_factory=list)


def alternate(sides: list[Side], runs: int, more: Callable[[], bool] = lambda: True) -> None:
    """Each once a round, after one that does not count; the first changes from round to round.

    No round is begun but the first that counts when there is no `more` time.
    """
    for i in range(-1, runs):
        if i > 0 and not more():
            break
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


class Lost(Exception):
    """llama.cpp ended, or did not answer in time."""


class Rival:
    """llama.cpp, loaded with as many layers on the GPU as the memory holds. Raises OutOfBudget and Lost."""

    def __init__(self, m: Machine, model: Model, vram: str) -> None:
        self.m, self.model, spec = m, model, model.pack.spec
        self.gguf, tokens = m.directory / "model.gguf", m.directory / "tokens.i32"
        room = min(hardware.available_bytes() or 0, shutil.disk_usage(m.directory).free) - m.args.spare
        self.layers = min(spec.n_layers, int(spec.n_layers * room / model.weights_bytes))
        if self.layers < 1:
            raise OutOfBudget("there is no room for a layer of llama.cpp's file")
        self.driver: Driver | None = None
        try:
            self.own = write_gguf(model, self.gguf, self.layers)
            needed = max(m.args.prompt, m.args.gen) + 2
            np.array(random_tokens(spec, 1, needed), np.int32).tofile(tokens)
            # Of fewer layers the budget is as much smaller, so that the same share of them is on the GPU.
            budget = None if vram == "all" else int(float(vram) * GIB * self.layers / spec.n_layers)
            start = partial(self._start, [self.gguf, tokens, str(m.context(model)), "1", "0"])
            self.fitted = gpu_llama.fitted(start, self.layers, self.gguf.stat().st_size, budget, m.used)
        except BaseException:
            self.__exit__()
            raise
        self.side = Side(partial(self._run, 0, m.args.gen), partial(self._run, m.args.prompt, 0))

    def _start(self, arguments: list[str | Path], layers: int) -> Driver:
        with losing():
            seconds = max(0.0, self.m.clock.left) + SLACK_S
            self.driver = Driver(LLAMA, [self.m.driver, *arguments, str(layers)], seconds=seconds)
        self._run(0, 1)  # makes its context
        return self.driver

    def _run(self, prompt: int, gen: int) -> int:
        """Nanoseconds."""
        assert self.driver is not None
        with losing():
            return int(self.driver.ask("run", self.m.args.threads, 1, 0, prompt, gen)["ns"])

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
        if self.driver is not None:
            self.driver.__exit__()
        self.gguf.unlink(missing_ok=True)


@contextmanager
def losing() -> Iterator[None]:
    """What a process that ends, or says something else, raises: as Lost."""
    try:
        yield
    except (SystemExit, OSError, ValueError, KeyError) as e:  # a Driver, a pipe, JSON
        raise Lost(f"{LLAMA}: {e}") from e
