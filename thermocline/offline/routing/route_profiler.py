"""`thermocline profile` of a mixture: run it over text, count its experts, and keep a part of the choices.

Nothing of the model is written: the profile lies beside it (`pack/route_profile.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import IOFailure
from thermocline.offline.activity import Passages
from thermocline.offline.corpus import Corpus
from thermocline.offline.routing.recorder import RouteRecorder, check_routed
from thermocline.ops.interface import I32
from thermocline.pack.route_profile import I64, U16, RouteProfile, path_of, routed_layers
from thermocline.session.session import Session

if TYPE_CHECKING:
    from thermocline.pack.stored_model import StoredModel
    from thermocline.session.options import EngineOptions

TRACED = 8192  # tokens of the trace at most: 3 MB of Qwen3-30B-A3B's 48 layers, of which 8 experts are taken

Progress = Callable[[str, int, int, str], None]  # what, done, total, unit


@dataclass(frozen=True)
class RouteJob:
    """The input of a profile. `options`: threads, and memory where the model is larger."""

    model: StoredModel
    corpus: Corpus
    options: EngineOptions


@dataclass(frozen=True)
class RoutesCounted:
    """The result of a profile."""

    profile: RouteProfile
    tokens_per_s: float


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


def profile_routes(job: RouteJob, progress: Progress) -> RoutesCounted:
    """Count the experts of a mixture. Raises Unsupported, OutOfBudget or IOFailure, early if possible."""
    model, spec, corpus = job.model, job.model.spec, job.corpus
    check_routed(spec)
    check_target(model)

    def reading(what: str, done: int, total: int) -> None:
        progress(what, done, total, "B")

    with Session.open(model, job.options, progress=reading) as session:
        weights = session.loaded.weights
        recorder = RouteRecorder(session.threads, spec, weights.layers)
        steps = Passages(spec, weights, recorder, session.context)
        layers, kept = routed_layers(spec), traced_passages(corpus.passages)
        counts: dict[int, I64] = {i: np.zeros(spec.n_experts, np.int64) for i in layers}
        traced: dict[int, list[U16]] = {i: [] for i in layers}
        done, begin = 0, time.monotonic()
        for number, passage in enumerate(corpus.passages):
            progress("counting", done, corpus.tokens, " tokens")
            recorder.begin()
            steps.compute(np.concatenate([corpus.prefix, passage]))
            chosen = recorder.choices(corpus.name).chosen
            for i, all_of in zip(layers, chosen, strict=True):
                mine = all_of[len(corpus.prefix) :]
                counts[i] += np.bincount(mine.ravel(), minlength=spec.n_experts)
                if number in kept:
                    traced[i].append(mine.astype(np.uint16))
            done += len(passage)
        progress("counting", done, corpus.tokens, " tokens")
    trace = {i: np.concatenate(parts) for i, parts in traced.items()}
    seconds = time.monotonic() - begin
    return RoutesCounted(RouteProfile(done, corpus.sha256, counts, trace), done / seconds)
