"""The counts of an unfinished profile of a mixture, in one file beside the model, from which it goes on.

The counts and the trace of a passage do not depend on other passages, so a file says how many are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.pack import sidecar
from thermocline.pack.route_profile import I64, ROUTES, U16, RouteProfile, path_of, routed_layers

if TYPE_CHECKING:
    from pathlib import Path

    from thermocline.files.bounded import Json
    from thermocline.offline.corpus import Corpus
    from thermocline.pack.stored_model import StoredModel

KIND = "unfinished routes"
_SUFFIX = ".unfinished"  # behind the name of a whole profile
UNFINISHED = ROUTES + _SUFFIX  # the name in a pack


@dataclass(frozen=True)
class RouteCounts:
    """The choices of the first `done` passages of a text."""

    counts: I64  # [layers with a router, experts]
    done: int = 0
    traced: tuple[U16, ...] = ()  # [layers, tokens, active] of passages that are traced

    def after(self, chosen: Sequence[U16], *, traced: bool) -> RouteCounts:
        """Return the counts with the choices [tokens, active] of each layer for the next passage."""
        experts = self.counts.shape[1]
        counts = self.counts + np.stack([np.bincount(c.ravel(), minlength=experts) for c in chosen])
        return RouteCounts(counts, self.done + 1, (*self.traced, np.stack(chosen)) if traced else self.traced)


class RouteCheckpoint:
    """The file with the counts of an unfinished profile."""

    def __init__(self, model: StoredModel, corpus: Corpus, context: int) -> None:
        self._model, self._layers, self._stamp = model, routed_layers(model.spec), model.stamp[1]
        self._made_for: Json = {"corpus": corpus.sha256, "context": context, "isa": _native.isa()}
        self._corpus = corpus

    @property
    def path(self) -> Path:
        path = path_of(self._model)
        return path.with_name(path.name + _SUFFIX)

    def begin(self) -> None:
        """Write the file unless there is one of the same text. Raises IOFailure."""
        if not self.begun:
            self.save(self._nothing())

    @property
    def begun(self) -> bool:
        """Whether there is a file of the same text, with counts or without."""
        try:
            return self._loaded() is not None
        except (BadFile, IOFailure):
            return False

    def load(self) -> RouteCounts:
        """Return what an interrupted profile of the same text has counted, else nothing."""
        try:
            return self._loaded() or self._nothing()
        except (BadFile, IOFailure):
            return self._nothing()

    def _nothing(self) -> RouteCounts:
        return RouteCounts(np.zeros((len(self._layers), self._model.spec.n_experts), np.int64))

    def _loaded(self) -> RouteCounts | None:
        found = sidecar.Sidecar.open(self.path, KIND, self._stamp, "")
        if found is None:
            return None
        try:
            done, spec, n = found.facts.get("done"), self._model.spec, len(self._layers)
            if any(found.facts.get(k) != v for k, v in self._made_for.items()) or type(done) is not int:
                return None
            counts = found.read("counts", "<i8", (n, spec.n_experts))
            traced = found.read("traced", "<u2", (n, None, spec.n_experts_active))
            return RouteCounts(counts, done, (traced,) if traced.shape[1] else ())
        finally:
            found.close()

    def save(self, state: RouteCounts) -> None:
        """Write the counts in the place of older ones, whole or not at all. Raises IOFailure."""
        traced = self._traced(state)
        shapes = {"counts": ("i8", state.counts.shape), "traced": ("u2", traced.shape)}
        facts = {**self._made_for, "done": state.done}
        sidecar.replace(self.path, KIND, self._stamp, facts, shapes, [state.counts, traced])

    def _traced(self, state: RouteCounts) -> U16:
        none = np.empty((len(self._layers), 0, self._model.spec.n_experts_active), np.uint16)
        return np.concatenate([none, *state.traced], axis=1)

    def profile(self, state: RouteCounts) -> RouteProfile:
        """Return the profile, once all passages are counted."""
        assert state.done == len(self._corpus.passages)
        counts, traced = (
            dict(zip(self._layers, x, strict=True)) for x in (state.counts, self._traced(state))
        )
        return RouteProfile(self._corpus.tokens, self._corpus.sha256, counts, traced)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
