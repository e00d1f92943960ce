"""A benchmark of a few seconds with the model that is loaded: what bounds its tokens on this machine.

It reads memory and the model's file, and lets the engine make a few tokens. It writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from thermocline.engine.request import Figures, disk_figures
from thermocline.engine.sampler import SamplingParams
from thermocline.machine import hardware
from thermocline.machine.disk_speed import DiskSpeed, measure_file
from thermocline.offline.bench import random_tokens

if TYPE_CHECKING:
    from thermocline.engine.engine import Engine
    from thermocline.session.session import Session

Bound = Literal["memory", "disk", "processor"]
PROMPT, TOKENS = 8, 48  # given, made at most: a few blocks of the cache of keys and values
MOST_S = 3.0  # for the tokens; a step that has begun goes on
FROM_DISK = 0.3  # a token waits for the disk for so much of its time: the disk is the bound
FROM_MEMORY = 0.6  # a token reads memory at so much of its measured speed: memory is the bound


@dataclass(frozen=True)
class QuickBench:
    """Figures of one measurement. Speeds are in GB/s; None: not measured."""

    threads: int
    memory_gbs: float | None  # the roof: weights read over and over, with as many threads
    disk: DiskSpeed  # under the model's file
    figures: Figures  # of the tokens
    disk_wait_share: float | None  # of the tokens' time, in which threads waited for the disk
    disk_gbs: float | None  # read while the tokens were made
    from_cache: bool  # the weights are so few that the processor's cache holds them
    on_gpu: bool
    seconds: float  # that all of it took

    @property
    def gbs(self) -> float | None:
        """Return the speed at which the tokens read memory."""
        return _gbs(self.figures)

    @property
    def roof_share(self) -> float | None:
        """Return the tokens' share of memory's speed. None where it is no roof."""
        if self.gbs is None or not self.memory_gbs or self.from_cache or self.on_gpu:
            return None
        return self.gbs / self.memory_gbs

    @property
    def bound(self) -> Bound | None:
        """Return what a token waits for most. None where a GPU has a part, whose memory is not measured."""
        if self.disk_wait_share is not None and self.disk_wait_share >= FROM_DISK:
            return "disk"
        if self.on_gpu or self.figures.tokens_per_s is None:
            return None
        return "memory" if self.roof_share is not None and self.roof_share >= FROM_MEMORY else "processor"


def _gbs(f: Figures) -> float | None:
    return f.bytes_per_token * f.tokens_per_s / 1e9 if f.bytes_per_token and f.tokens_per_s else None


class BrokenOff(Exception):
    """Somebody wants the engine."""


def measure(session: Session, engine: Engine, wanted: Callable[[], bool]) -> QuickBench:
    """Measure in three parts, in about 4 s. Nobody else may step the engine meanwhile.

    `wanted` is asked between parts and steps: raise BrokenOff if it is true. Raise the error of a step.
    """

    def check() -> None:
        if wanted():
            raise BrokenOff

    begin = time.monotonic()
    check()
    roof = session.read_gbs(session.threads) or hardware.read_gbs(session.threads)
    check()
    disk = measure_file(session.pack.data_path, times=1)
    check()
    figures = _tokens(session, engine, check)
    of_disk = disk_figures(figures, session.threads)
    gbs = _gbs(figures)
    share = gbs / roof if gbs and roof else None
    return QuickBench(
        threads=session.threads,
        memory_gbs=roof,
        disk=disk,
        figures=figures,
        disk_wait_share=of_disk["disk_wait_share"],
        disk_gbs=of_disk["disk_gb_per_s"],
        from_cache=hardware.from_cache(session.weights_bytes, hardware.cache_bytes(), share),
        on_gpu=session.gpus is not None,
        seconds=time.monotonic() - begin,
    )


def _tokens(session: Session, engine: Engine, check: Callable[[], None]) -> Figures:
    """Return the figures of a few tokens after a random prompt."""
    n = max(2, min(TOKENS, engine.context - PROMPT))
    ids = random_tokens(session.pack.spec, 0, min(PROMPT, engine.context - n))
    request = engine.submit(ids, SamplingParams(max_tokens=n, temperature=0, seed=0, ignore_eos=True))
    end = time.monotonic() + MOST_S
    try:
        while request.finish_reason is None:
            if time.monotonic() > end and len(request.token_ids) >= 3:
                break
            check()
            engine.step()
            if request.error is not None:
                raise request.error
            request.chunks.clear()
    finally:
        engine.cancel(request)
    return request.figures()
