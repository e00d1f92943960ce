"""`thermocline profile`: run a model over text, count active neurons, and sort its pack by hotness.

A profile is checked before anything is computed, and an interrupted one continues from its checkpoint.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thermocline import _native
from thermocline.errors import IOFailure, Unsupported, UsageError
from thermocline.offline import counting
from thermocline.offline.activity import STEP, down_norms, passage_bytes
from thermocline.offline.checkpoint import ProfileCheckpoint
from thermocline.ops.device_sizes import watch_bytes
from thermocline.pack import sidecar
from thermocline.pack.activity_profile import (
    BUCKETS,
    I32,
    I64,
    PROFILE,
    SAMPLES,
    Profile,
    write_profile,
    write_samples,
)
from thermocline.pack.reorder import hottest_first, write_reordered
from thermocline.plan.memory import scratch_bytes
from thermocline.session.session import Session

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers
    from thermocline.model.spec import ModelSpec
    from thermocline.offline.corpus import Corpus
    from thermocline.pack.pack import Pack

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int, str], None]  # what, done, total, unit

SAMPLE_COUNT, SAMPLES_BYTES = 16384, 2 << 30  # samples by default: at most this number, and this size
ASSUMED_ACTIVE = 0.25  # the share of active neurons that is assumed beforehand
SAVE_S, SAVE_BYTES = 30.0, 64 << 20  # a checkpoint is saved after this time, or with this much unsaved
STALE = ("predictors.safetensors",)  # files that a new order of neurons makes invalid


@dataclass(frozen=True)
class ProfileJob:
    """The input of a profile. `samples` tokens are kept for training. `output` may be the pack itself."""

    pack: Pack
    corpus: Corpus
    output: Path
    context: int
    samples: int
    threads: int
    workers: int
    overwrite: bool = False
    ram: float | None = None  # GiB that all of it may take; None: what is free
    sampled: tuple[int, ...] | None = None  # layers to sample, up to which the model runs; None: all of them
    active: float = 1.0  # at most about this share of neurons is active
    across: Workers | None = None  # processes or machines to divide the passages between; None: this process
    gpu: str = "off"
    vram: float | None = None


@dataclass(frozen=True)
class ProfileResult:
    """The result of a profile."""

    profile: Profile  # of the written pack
    samples: int
    samples_bytes: int
    tokens_per_s: float | None  # of the tokens counted now; None if a checkpoint had all of them
    resumed_tokens: int  # tokens that a checkpoint had
    dropped: tuple[str, ...]  # files of the old order that were removed


def computed_on(gpu: str) -> str:
    """Return what computes, in whose rounding counts and samples are."""
    return _native.isa() if gpu == "off" else f"gpu {gpu}"


def sample_bytes(spec: ModelSpec, active: float = ASSUMED_ACTIVE, layers: Sequence[int] | None = None) -> int:
    """Return the bytes of one token sampled in some layers (None: all) if `active` of the neurons are."""
    of = spec.ffn_layers if layers is None else layers
    return len(of) * (2 * spec.dim + 8 + int(6 * active * spec.n_experts * spec.ffn_dim))


def default_samples(spec: ModelSpec, passages: int) -> int:
    """Return how many tokens to sample: at most 2 GiB of samples, and 64 MiB of a passage.

    A passage's samples are in memory until they are saved: for them, all neurons are taken as active.
    """
    of_passage = max(1, SAVE_BYTES // sample_bytes(spec, active=1.0))
    return min(SAMPLE_COUNT, SAMPLES_BYTES // sample_bytes(spec), passages * of_passage)


def check_sparse(spec: ModelSpec) -> None:
    if not spec.sparse:
        raise Unsupported(
            f"{spec.architecture} with {spec.activation}: no neuron is exactly zero, so there is none to "
            "count, and every one is computed; profile a ReLU-family model instead, such as a ReLU "
            "fine-tune of this one (ProSparse, TurboSparse, ReluLLaMA)"
        )


def sampled_tokens(passages: Sequence[I32], n: int) -> list[I64]:
    """Choose the tokens of each passage to sample: a random one from each n-th part of all tokens."""
    lengths = np.array([len(p) for p in passages])
    total = int(lengths.sum())
    edges = np.arange(n + 1, dtype=np.int64) * total // max(1, n)
    drawn = np.random.PCG64(0).random_raw(n).astype(np.uint64) if n else np.empty(0, np.uint64)
    at = edges[:-1] + (drawn % np.diff(edges).astype(np.uint64)).astype(np.int64) if n else edges[:0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    cuts = np.searchsorted(at, starts)
    return [at[a:b] - s for a, b, s in zip(cuts, cuts[1:], starts, strict=False)]


def profile(r: ProfileJob, progress: Progress) -> ProfileResult:
    """Profile a pack. Raises Unsupported, UsageError, OutOfBudget or IOFailure, early if possible."""
    check_sparse(r.pack.spec)
    n = min(r.samples, r.corpus.tokens)
    _check_disk(r.pack, r.output, n)
    with open_session(r, n, progress) as session, closing(_open_checkpoint(r, n)) as checkpoint:
        if checkpoint.replaced:
            log.warning(f"{checkpoint.directory}: was an unfinished profile of something else: starting anew")
        before = r.corpus.tokens_before(checkpoint.done)
        if before:
            log.info(f"going on after {before} of {r.corpus.tokens} tokens")
        seconds = count(r, session, checkpoint, n, progress)
        session.unload()  # writing has the memory for itself
        made, size, dropped = _write(r, checkpoint, n, progress)
        checkpoint.remove()
    speed = (made.tokens - before) / seconds if made.tokens > before else None
    return ProfileResult(made, n, size, speed, before, dropped)


def _check_disk(pack: Pack, output: Path, n: int) -> None:
    parent = next(p for p in Path(os.path.realpath(output)).parents if p.is_dir())
    neurons = len(pack.spec.ffn_layers) * pack.spec.n_experts * pack.spec.ffn_dim
    need = pack.weights_bytes + 3 * neurons * len(BUCKETS) * 8 + 2 * n * sample_bytes(pack.spec)
    free = shutil.disk_usage(parent).free
    if free < need:
        raise IOFailure(
            f"{parent}: {free / 2**30:.3g} GiB are free; the pack in its new order and {n} samples need "
            f"{need / 2**30:.3g} GiB: free some, choose fewer --samples, or another disk with -o"
        )


def open_session(r: ProfileJob, n: int, progress: Progress) -> Session:
    """Open the pack within the memory that there is; read no weight. Raises OutOfBudget and UsageError."""
    if r.gpu != "off" and r.workers > 1:
        raise UsageError(f"--workers {r.workers}: a GPU computes one passage at a time; leave it out")
    ram = r.ram if r.across is None else r.across.ram(r.ram)
    options = counting.options(r.threads, r.context, ram, r.gpu, r.vram)

    def reading(what: str, done: int, of: int) -> None:
        progress(what, done, of, "B")

    session = Session.open(r.pack, options, progress=reading, beside=_own_bytes(r, n), hints=False)
    if r.workers > 1 and (session.from_disk or session.placement.tables):
        session.close()
        raise UsageError(
            f"--workers {r.workers}: a part of the model is read from disk, for one worker alone; leave it "
            "out, or give more memory (--ram)"
        )
    return session


def _own_bytes(r: ProfileJob, n: int) -> int:
    """Return the most that counting takes beside the session: workers, counts, and samples to be saved."""
    s = r.pack.spec
    neurons, layers = s.n_experts * s.ffn_dim, len(s.ffn_layers)
    scratch = scratch_bytes(s, context=r.context, max_batch=1, threads=r.threads // r.workers or 1)
    record = 5 * STEP * neurons  # f32, and whether it is 0
    if r.gpu == "off":
        workers = r.workers * (passage_bytes(s, r.context) + record) + (r.workers - 1) * scratch
    else:  # keys and values are the session's
        workers = record + watch_bytes(s, STEP)
    # The sum so far, the next one and its copy in a file; a passage's of each worker and one that is done.
    counts = (4 + r.workers) * layers * len(BUCKETS) * neurons * 8
    most = max(map(len, sampled_tokens(r.corpus.passages, n)), default=0)
    each, norms = sample_bytes(s, r.active, r.sampled), 4 * layers * neurons if n else 0
    samples = 2 * min(SAVE_BYTES + most * each, n * each) + (r.workers + 1) * most * each
    return workers + counts + norms + samples


def _open_checkpoint(r: ProfileJob, n: int) -> ProfileCheckpoint:
    output = Path(os.path.realpath(r.output))
    isa = computed_on(r.gpu)
    made_for = {"corpus": r.corpus.sha256, "context": r.context, "samples": n, "isa": isa}
    directory = output.with_name(f"{output.name}.profile-unfinished")
    return ProfileCheckpoint(directory, r.pack.spec, sidecar.stamp(r.pack.path), made_for)


def count(
    r: ProfileJob, session: Session, checkpoint: ProfileCheckpoint, n: int, progress: Progress
) -> float:
    """Count the remaining passages. Return the seconds taken. However it ends, the counts are saved."""
    passages, done = r.corpus.passages, checkpoint.done
    if done == len(passages):
        return 0.0
    tokens = r.corpus.tokens_before(done)
    begin = saved = time.monotonic()
    progress("counting", tokens, r.corpus.tokens, " tokens")
    left = [*zip(passages[done:], sampled_tokens(passages, n)[done:], strict=True)]
    norms = down_norms(r.pack) if n else []  # before the weights: a layer's rows take memory
    if r.across is None:
        counted_by = counting.in_this_process(r, session, left, norms)
    else:
        counted_by = counting.across(r, session, left, norms, _own_bytes(r, n))
    with closing(counted_by) as found:
        try:
            for these, counted in found:
                checkpoint.add(counted, len(these))
                tokens += sum(map(len, these))
                progress("counting", tokens, r.corpus.tokens, " tokens")
                if time.monotonic() - saved > SAVE_S or checkpoint.held_bytes > SAVE_BYTES:
                    checkpoint.save()
                    saved = time.monotonic()
        finally:
            checkpoint.save()
    return time.monotonic() - begin


def _write(
    r: ProfileJob, checkpoint: ProfileCheckpoint, n: int, progress: Progress
) -> tuple[Profile, int, tuple[str, ...]]:
    """Write the pack in order of hotness: (its profile, bytes of samples, names of removed files)."""
    s, passages = r.pack.spec, r.corpus.passages
    shape = (len(BUCKETS), s.n_experts, s.ffn_dim)
    windows = tuple(sum(len(p) // b for p in passages) for b in BUCKETS)
    found_counts = {i: c.reshape(shape) for i, c in zip(s.ffn_layers, checkpoint.counts, strict=True)}
    nothing = np.zeros((len(BUCKETS), s.n_experts, 0), np.int64)
    counts = tuple(found_counts.get(i, nothing) for i in range(s.n_layers))
    places = [hottest_first(c[0]) for c in counts]
    found = Profile(BUCKETS, windows, r.corpus.tokens, r.corpus.sha256, counts).reordered(places)

    in_place = os.path.realpath(r.output) == os.path.realpath(r.pack.path)
    gone = tuple(name for name in STALE if in_place and (r.pack.path / name).exists())

    def finish(directory: Path) -> None:
        write_profile(directory, found)
        if n:
            rows = checkpoint.rows({i: places[i] for i in s.ffn_layers})
            write_samples(directory, s, n, checkpoint.active(), rows)

    write_reordered(
        r.pack,
        r.output,
        places,
        finish,
        drop=(PROFILE, SAMPLES, *STALE),
        overwrite=r.overwrite,
        progress=lambda a, b: progress("reordering", a, b, "B"),
    )
    return found, (r.output / SAMPLES).stat().st_size if n else 0, gone
