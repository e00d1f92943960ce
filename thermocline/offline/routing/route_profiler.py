"""`thermocline profile` of a mixture: run it over text, count its experts, and keep a part of the choices.

Nothing of the model is written: the profile lies beside it (`pack/route_profile.py`), and until it is whole a
checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from thermocline.engine.prefill_budget import PREFILL_CHUNK
from thermocline.errors import IOFailure, UsageError
from thermocline.offline.activity import Passages, passage_bytes, passage_positions
from thermocline.offline.corpus import Corpus
from thermocline.offline.counting import open_same, shards_of
from thermocline.offline.routing.recorder import GpuRouteRecorder, RouteRecorder, check_routed
from thermocline.offline.routing.route_checkpoint import RouteCheckpoint, RouteCounts
from thermocline.ops.interface import CPU, I32, opaque
from thermocline.pack.route_profile import U16, RouteProfile, path_of, write_routes
from thermocline.plan.memory import context_for
from thermocline.session.options import LENDS_WEIGHTS, EngineOptions
from thermocline.session.session import Session

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers
    from thermocline.model.spec import ModelSpec
    from thermocline.offline.routing.recorder import SharesOfGpu
    from thermocline.ops.interface import OpaqueOps
    from thermocline.pack.stored_model import StoredModel

log = logging.getLogger(__name__)

SAVE_S = 30.0  # a checkpoint is saved after this time
ARRAY_BYTES = 128  # of an array's own, beside its numbers
TRACED = 8192  # tokens of the trace at most: 3 MB of Qwen3-30B-A3B's 48 layers, of which 8 experts are taken

Progress = Callable[[str, int, int, str], None]  # what, done, total, unit


@dataclass(frozen=True)
class RouteJob:
    """The input of a profile. `options`: threads, and memory where the model is larger."""

    model: StoredModel
    corpus: Corpus
    options: EngineOptions
    across: Workers | None = None  # processes or machines to divide the passages between; None: this process


@dataclass(frozen=True)
class RoutesCounted:
    """The result of a profile."""

    profile: RouteProfile
    tokens_per_s: float | None  # of the tokens counted now; None if a checkpoint had all of them
    resumed_tokens: int  # tokens that a checkpoint had


def check_target(model: StoredModel) -> None:
    """Raise IOFailure if a profile cannot be written, before anything is computed."""
    path = path_of(model)
    if not os.access(path.parent, os.W_OK):
        raise IOFailure(f"{path}: its directory cannot be written to; copy the model to one that can")


def traced_passages(passages: Sequence[I32], most: int = TRACED) -> set[int]:
    """Choose passages of at most `most` tokens in all, at random: those of several files come in turn."""
    order = np.random.default_rng(0).permutation(len(passages))
    sizes = np.cumsum([len(passages[i]) for i in order])
    return {int(order[0]), *map(int, order[sizes <= most])}


def _own_bytes(spec: ModelSpec, context: int, on_gpu: bool) -> int:
    """Return what counting takes beside the session: a passage, its routers' shares, the trace.

    `on_gpu`: keys and values are the session's, and a step's shares come to a place of their own.
    """
    step = 4 * spec.n_layers * (PREFILL_CHUNK + 1) * spec.n_experts
    kept = step if on_gpu else passage_bytes(spec, context)
    rows = spec.n_layers * context * (4 * spec.n_experts + ARRAY_BYTES)
    trace = 2 * 2 * spec.n_layers * (TRACED + context) * spec.n_experts_active  # in pieces, and joined
    return kept + rows + trace


def check_routers(session: Session) -> None:
    """Raise UsageError where the CPU asks some of the routers beside a GPU, which shows only its own."""
    spec, layers = session.pack.spec, session.placement.layers
    mixtures = [i for i in range(spec.n_layers) if spec.ffn(i).experts > 1]
    unseen = sum(layers[i].attention == CPU and not layers[i].whole for i in mixtures)
    if session.gpus is not None and unseen:
        raise UsageError(
            f"--gpu {session.options.gpu}: the CPU computes {unseen} of {len(mixtures)} layers with experts, "
            "whose choices would be missing; give more --vram, or --gpu off"
        )


def profile_routes(job: RouteJob, progress: Progress) -> RoutesCounted:
    """Count the experts of a mixture, and write its profile. An interrupted one goes on where it was.

    Raises Unsupported, OutOfBudget or IOFailure, early if possible.
    """
    model, spec, corpus = job.model, job.model.spec, job.corpus
    context = context_for(spec, job.options.context)
    check_routed(spec)
    check_target(model)

    def reading(what: str, done: int, total: int) -> None:
        progress(what, done, total, "B")

    on_gpu = job.options.gpu != "off"
    options = replace(job.options, kv_tokens=passage_positions(context) if on_gpu else LENDS_WEIGHTS)
    if job.across is not None:
        options = replace(options, ram=job.across.ram(options.ram))
    beside = _own_bytes(spec, context, on_gpu)
    kept = traced_passages(corpus.passages)
    checkpoint = RouteCheckpoint(model, corpus, context)
    with Session.open(model, options, progress=reading, beside=beside) as session:
        check_routers(session)  # before the weights are read
        state = found = checkpoint.load()
        before = corpus.tokens_before(found.done)
        if before:
            log.info(f"going on after {before} of {corpus.tokens} tokens")
        begin = saved = time.monotonic()
        try:
            with closing(_chosen(job, session, beside, found)) as chosen:
                progress("counting", before, corpus.tokens, " tokens")
                for experts in chosen:
                    state = state.after([*experts], traced=state.done in kept)
                    progress("counting", corpus.tokens_before(state.done), corpus.tokens, " tokens")
                    if time.monotonic() - saved > SAVE_S:
                        checkpoint.save(state)
                        saved = time.monotonic()
        except BaseException:
            checkpoint.save(state)
            raise
    profile, now = checkpoint.profile(state), corpus.tokens - before
    write_routes(model, profile)
    checkpoint.remove()
    return RoutesCounted(profile, now / (time.monotonic() - begin) if now else None, before)


def _chosen(job: RouteJob, session: Session, beside: int, state: RouteCounts) -> Generator[U16]:
    """Yield the choices [layers, tokens, active] of each passage that is left."""
    corpus, context = job.corpus, context_for(job.model.spec, job.options.context)
    left = corpus.passages[state.done :]
    if not left:
        return
    if job.across is None:
        yield from map(_chooser(session, corpus.prefix, context), left)
        return
    options = replace(session.options, threads=None)
    path = Path(os.path.abspath(job.model.path))
    work = RoutingWork(path, job.model.stamp, corpus.prefix, context, options, beside)
    cuts = shards_of(len(left), context, job.across)
    with closing(job.across.map(work, [left[cut] for cut in cuts], session.memory_bytes)) as found:
        for several in found:
            yield from several


def _chooser(session: Session, prefix: I32, context: int) -> Callable[[I32], U16]:
    """Return a function that gives the choices of a passage."""
    spec, skip = session.pack.spec, len(prefix)
    recorder, ops = recorder_of(session)
    passages = Passages(spec, session.loaded.weights, ops, context, storage=session.storage)

    def chosen(passage: I32) -> U16:
        recorder.begin()
        for tokens in passages.compute(np.concatenate([prefix, passage])):
            recorder.take(tokens)
        return np.stack([c[skip:].astype(np.uint16) for c in recorder.choices("").chosen])

    return chosen


@dataclass(frozen=True)
class RoutingWork:
    """Asking a mixture's routers, as a worker does it."""

    model: Path
    stamp: tuple[str, str]
    prefix: I32
    context: int
    options: EngineOptions
    beside: int

    @contextlib.contextmanager
    def open(self, threads: int) -> Iterator[Callable[[Sequence[I32]], list[U16]]]:
        model = open_same(self.model, self.stamp)
        with Session.open(model, replace(self.options, threads=threads), beside=self.beside) as session:
            chosen = _chooser(session, self.prefix, self.context)
            yield lambda passages: [chosen(p) for p in passages]


def recorder_of(session: Session) -> tuple[RouteRecorder | GpuRouteRecorder, OpaqueOps]:
    """Return what looks on, and the ops that compute: the recorder itself, or the session's with a GPU.

    Raises UsageError where a GPU does not ask all routers.
    """
    check_routers(session)
    spec, loaded = session.pack.spec, session.loaded
    if session.gpus is None:
        own = RouteRecorder(session.threads, spec, loaded.weights.layers)
        return own, opaque(own)
    return GpuRouteRecorder(cast("SharesOfGpu", loaded.ops), spec), loaded.ops
