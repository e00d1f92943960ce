"""Samples to fit predictors to, layer by layer: those that `profile` kept, or of a text that passes.

A text passes in rounds, each for a group of layers. Their samples are in one file, which the next round
replaces, so there may be as many as wanted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import IOFailure, OutOfBudget, UsageError
from thermocline.offline.checkpoint import ProfileCheckpoint
from thermocline.offline.profiler import (
    ProfileJob,
    Progress,
    computed_on,
    count,
    open_session,
    sample_bytes,
)
from thermocline.pack import sidecar
from thermocline.pack.activity_profile import AGAIN, open_samples
from thermocline.session.session import budget_for

if TYPE_CHECKING:
    from thermocline.files.bounded import Json
    from thermocline.offline.corpus import Corpus
    from thermocline.pack.activity_profile import Profile, Rows, Samples
    from thermocline.pack.pack import Pack

Mask = NDArray[np.bool_]
ROUND_BYTES = 4 << 30  # of a round's samples: 16,384 tokens of a 7B, 10 % active, take 3 rounds
MARGIN = 1.5  # of activity, over the profile's mean: of a passage and of a layer


class LayerSource(Protocol):
    """Samples of a pack's layers."""

    @property
    def n(self) -> int: ...
    @property
    def active(self) -> float:
        """The share of active neurons."""

    @property
    def about(self) -> Json:
        """Facts that tell these samples from others."""

    def layers(self, wanted: Sequence[int], directory: Path) -> Iterator[tuple[int, Rows]]:
        """Yield the samples of these layers, which ascend. One layer is in memory.

        `directory` is for what is kept meanwhile.
        """

    def check(self) -> None:
        """Raise OutOfBudget where memory is too small for what gives the samples."""

    def held_out(self, seed: int) -> Mask:
        """Choose samples that calibrate predictors [n]; they are fitted to the others, if there are any."""


@dataclass(frozen=True)
class KeptSamples:
    """The samples that `profile` kept beside a pack."""

    samples: Samples
    profile: Profile

    @property
    def n(self) -> int:
        return self.samples.n

    @property
    def active(self) -> float:
        return active_share(self.profile)

    @property
    def about(self) -> Json:
        return {"kept": dict(self.samples.found.sums)}

    def check(self) -> None:
        """They are read from a file."""

    def layers(self, wanted: Sequence[int], directory: Path) -> Iterator[tuple[int, Rows]]:
        return ((i, self.samples.layer(i)) for i in wanted)

    def held_out(self, seed: int) -> Mask:
        """Choose half of the tokens."""
        held = np.zeros(self.n, np.bool_)
        held[np.random.default_rng(seed).permutation(self.n)[self.n - self.n // 2 :]] = True
        return held if held.any() else ~held


def kept_samples(pack: Pack) -> Samples:
    """Open the samples beside a pack. Raises UsageError with what helps where there are none."""
    found = open_samples(pack)
    if found is None:
        raise UsageError(
            f"{pack.path}: has no samples to learn from; give text with --corpus FILES, or make some with "
            f"`{AGAIN.replace('PACK', str(pack.path))} --samples 4096`"
        )
    return found


def active_share(profile: Profile) -> float:
    """Return the share of active neurons, in the layer that has most of them."""
    return max(float(c[0].mean()) for c in profile.counts if c.size) / profile.windows[0]


@dataclass(frozen=True)
class PassingText:
    """A text of which every token is a sample, run through a pack up to the layers that are asked for."""

    pack: Pack
    profile: Profile
    corpus: Corpus
    context: int
    threads: int
    ram: float | None
    progress: Progress
    gpu: str = "off"
    vram: float | None = None

    @property
    def n(self) -> int:
        return self.corpus.tokens

    @property
    def active(self) -> float:
        return active_share(self.profile)

    @property
    def about(self) -> Json:
        return {"corpus": self.corpus.sha256, "context": self.context, "isa": computed_on(self.gpu)}

    def held_out(self, seed: int) -> Mask:
        """Choose every second passage of a random order, so that no neighbour of theirs is fitted to."""
        sizes = [len(p) for p in self.corpus.passages]
        held = np.zeros(len(sizes), np.bool_)
        held[np.random.default_rng(seed).permutation(len(sizes))[len(sizes) // 2 :]] = True
        return np.repeat(held, sizes)

    def layers(self, wanted: Sequence[int], directory: Path) -> Iterator[tuple[int, Rows]]:
        """Let the text pass for each group of layers. An interrupted round goes on where it was."""
        for group in self._groups():
            mine = [i for i in group if i in wanted]
            if not mine:
                continue
            with closing(self._checkpoint(directory, group)) as checkpoint:
                if checkpoint.done < len(self.corpus.passages):
                    self._pass(group, checkpoint)
                places = {i: np.arange(self._neurons, dtype=np.int64) for i in mine}
                yield from zip(mine, checkpoint.rows(places), strict=True)
                checkpoint.remove()

    @property
    def _neurons(self) -> int:
        return self.pack.spec.n_experts * self.pack.spec.ffn_dim

    def check(self) -> None:
        open_session(self._job(self.pack.spec.ffn_layers[:1]), self.n, self.progress).close()

    def _groups(self) -> list[tuple[int, ...]]:
        """Divide the layers into groups of which samples fit on disk, and a passage's in memory."""
        each = sample_bytes(self.pack.spec, self._at_most, (0,))
        budget, _ = budget_for(self.ram)
        size, layers = ROUND_BYTES // (each * self.n), self.pack.spec.ffn_layers
        if budget is not None:
            size = min(size, budget // 16 // (each * self.context))
        size = max(1, min(size, len(layers)))
        while size > 1 and not self._opens(layers[:size]):
            size = -(-size // 2)
        return [tuple(layers[at : at + size]) for at in range(0, len(layers), size)]

    @property
    def _at_most(self) -> float:
        return min(1.0, MARGIN * self.active)

    def _opens(self, group: Sequence[int]) -> bool:
        try:
            open_session(self._job(group), self.n, self.progress).close()
        except OutOfBudget:
            return False
        return True

    def _job(self, group: Sequence[int]) -> ProfileJob:
        return ProfileJob(
            self.pack, self.corpus, self.pack.path, self.context, self.n, self.threads, workers=1,
            ram=self.ram, sampled=tuple(group), active=self._at_most, gpu=self.gpu, vram=self.vram,
        )  # fmt: skip

    def _checkpoint(self, directory: Path, group: tuple[int, ...]) -> ProfileCheckpoint:
        made_for = {**self.about, "layers": list(group)}
        stamp = sidecar.stamp(self.pack.path)
        return ProfileCheckpoint(directory / "round", self.pack.spec, stamp, made_for)

    def _pass(self, group: tuple[int, ...], checkpoint: ProfileCheckpoint) -> None:
        need = self.n * sample_bytes(self.pack.spec, self._at_most, group)
        free = shutil.disk_usage(checkpoint.directory).free
        if checkpoint.done == 0 and free < need:
            raise IOFailure(
                f"{checkpoint.directory}: {free / 2**30:.3g} GiB are free; samples of {len(group)} layers "
                f"need about {need / 2**30:.3g} GiB: free some, or use fewer --tokens"
            )
        job = self._job(group)
        with open_session(job, self.n, self.progress) as session:
            count(job, session, checkpoint, self.n, self.progress)
