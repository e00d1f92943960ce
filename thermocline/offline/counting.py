"""Counting the passages of a profile: in this process, or divided between others, here or on other machines.

The counts and samples of a passage are its own, so nothing depends on how passages are divided.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.cluster import shards
from thermocline.convert.from_gguf import is_gguf
from thermocline.errors import BadFile
from thermocline.offline.activity import (
    Counted,
    ProfileWorker,
    count_passages,
    counted_together,
    passage_positions,
)
from thermocline.opening.gguf_model import open_gguf
from thermocline.pack.activity_profile import I32, I64
from thermocline.pack.pack import Pack
from thermocline.session.options import LENDS_WEIGHTS, EngineOptions
from thermocline.session.session import Session

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers
    from thermocline.offline.profiler import ProfileJob
    from thermocline.ops.interface import F32
    from thermocline.pack.stored_model import StoredModel

SHARD_TOKENS = 4096  # of a shard at most: what is computed again when a machine is lost

Piece = tuple[I32, I64]  # a passage, and its tokens to sample


def options(
    threads: int, context: int, ram: float | None, gpu: str = "off", vram: float | None = None
) -> EngineOptions:
    """Return the options of a session that counts. With a GPU it has passages' keys and values, too."""
    positions = LENDS_WEIGHTS if gpu == "off" else passage_positions(context)
    return EngineOptions(
        threads=threads, context=context, max_batch=1, kv_tokens=positions, ram=ram, gpu=gpu, vram=vram
    )


def in_this_process(
    r: ProfileJob, session: Session, left: Sequence[Piece], norms: list[F32]
) -> Generator[tuple[list[I32], Counted]]:
    """Yield passages with their counts, one at a time. `left`: passages, and their tokens to sample."""
    workers = _workers(r, session, norms)
    passages, wanted = [p for p, _ in left], [w for _, w in left]
    with closing(count_passages(workers, passages, wanted)) as found:
        for passage, counted in zip(passages, found, strict=True):
            yield [passage], counted


def _workers(r: ProfileJob, session: Session, norms: list[F32]) -> list[ProfileWorker]:
    prefix, sampled = r.corpus.prefix, r.sampled
    if session.gpus is not None:
        return [ProfileWorker.on_gpu(session, prefix, r.context, norms, sampled)]
    weights, threads = session.loaded.weights, max(1, r.threads // r.workers)
    return [
        ProfileWorker.on_cpu(r.pack.spec, weights, prefix, r.context, threads, norms, sampled)
        for _ in range(r.workers)
    ]


def across(
    r: ProfileJob, session: Session, left: Sequence[Piece], norms: list[F32], beside: int
) -> Generator[tuple[list[I32], Counted]]:
    """Yield the same from other processes or machines, in shards. `beside`: a worker's own bytes."""
    assert r.across is not None
    work = CountingWork(
        Path(os.path.abspath(r.pack.path)), r.pack.stamp, r.corpus.prefix, r.context, norms,
        r.sampled, r.across.ram(r.ram), beside,
    )  # fmt: skip
    cuts = shards_of(len(left), r.context, r.across)
    with closing(r.across.map(work, [left[cut] for cut in cuts], session.memory_bytes)) as found:
        for cut, counted in zip(cuts, found, strict=True):
            yield [passage for passage, _ in left[cut]], counted


def shards_of(passages: int, context: int, workers: Workers) -> list[slice]:
    """Divide passages of so many tokens into shards."""
    return shards.sizes(passages, max(1, SHARD_TOKENS // context), workers.most)


@dataclass(frozen=True)
class CountingWork:
    """Counting, as a worker of `across` does it."""

    pack: Path
    stamp: tuple[str, str]
    prefix: I32
    context: int
    norms: list[F32]
    sampled: tuple[int, ...] | None
    ram: float | None
    beside: int

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[Callable[[Sequence[Piece]], Counted]]:
        pack = open_same(self.pack, self.stamp)
        asked = options(threads, self.context, self.ram)
        with Session.open(pack, asked, beside=self.beside, hints=False) as session:
            weights, never = session.loaded.weights, threading.Event()
            worker = ProfileWorker.on_cpu(
                pack.spec, weights, self.prefix, self.context, threads, self.norms, self.sampled
            )
            yield lambda shard: counted_together([worker.count(*part, never) for part in shard])


def open_same(path: Path, stamp: tuple[str, str]) -> StoredModel:
    """Open a model on a worker's machine. Raises BadFile if it is not the one that the work is about."""
    found = open_gguf(path) if is_gguf(path) else Pack.open(path)
    if isinstance(found, str) or found.stamp != stamp:
        raise BadFile(
            f"{path}: is another model here; put the same one there, or in a directory that all nodes share"
        )
    return found
