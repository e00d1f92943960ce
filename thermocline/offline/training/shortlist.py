"""The best predictor of each layer at every price of errors, found layer by layer and kept in files.

A layer's file is written when its fits are done. So one layer is in memory, and an interrupted training
goes on with the layers that have no file. A file has the fits that are best at some price, as stored.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.errors import BadFile, IOFailure, UsageError
from thermocline.offline.training import calibrate
from thermocline.offline.training.calibrate import (
    PRICES,
    TYPICAL,
    Costs,
    LayerSamples,
    OperatingPoint,
    PredictionQuality,
)
from thermocline.pack import sidecar
from thermocline.pack.predictor import (
    LayerPredictor,
    Predictors,
    StoredPredictor,
    codes,
    scores_of,
    stored,
    stored_bytes,
    tensors_of,
)
from thermocline.pack.writer import lock

if TYPE_CHECKING:
    from thermocline.files.bounded import Json
    from thermocline.model.spec import ModelSpec
    from thermocline.pack.pack import Pack

KIND = "fitted layer"


class Shortlist:
    """The fits of one layer, and the best of them at every price. None means to read the whole gate."""

    def __init__(self, spec: ModelSpec, gate: int, *, forced: bool) -> None:
        """`gate`: bytes of a gate row. `forced`: predict, even if reading the whole gate costs less."""
        exact = float("inf") if forced else float(gate * spec.n_experts_active * spec.ffn_dim)
        self.spec, self.gate = spec, gate
        self.fits: list[StoredPredictor] = []
        self.best: list[tuple[int, OperatingPoint] | None] = [None] * len(PRICES)
        self.objective = [exact] * len(PRICES)

    def offer(self, p: LayerPredictor, a: LayerSamples) -> float:
        """Calibrate a predictor, keep it where it is best, and return its cost at a typical price."""
        fit = stored(p, self.spec)
        p = fit.decoded()  # scores come from the weights as they will be stored
        curves = calibrate.curves(partial(scores_of, p, codes(p, a.x)), a)
        costs = self.costs(fit)
        chosen = [calibrate.choose_operating_point(curves, costs, i) for i in range(len(PRICES))]
        better = [i for i, c in enumerate(chosen) if c.objective < self.objective[i]]
        for i in better:
            self.objective[i], self.best[i] = chosen[i].objective, (len(self.fits), chosen[i])
        if better:
            self.fits.append(fit)
        return chosen[TYPICAL].objective

    def costs(self, p: StoredPredictor) -> Costs:
        first, ask = stored_bytes(self.spec, p.kind, p.rank)
        return Costs(self.spec.n_experts_active * first, ask, self.gate)


@dataclass(frozen=True)
class LayerReport:
    """A layer's figures at one price, of the samples that calibrated it. Bytes are those of a token."""

    layer: int
    kind: str
    rank: int
    hot: int
    bytes: float
    active: float
    predicted: float
    recall: float
    missed_mass: float
    missed_energy: float
    bytes_exact: float


@dataclass(frozen=True)
class FittedLayer:
    """The shortlist of a layer as its file holds it: reports and thresholds of every price, and the fits."""

    facts: Json
    tensors: dict[str, Any]

    @staticmethod
    def of(layer: int, made: Shortlist, a: LayerSamples, seconds: float) -> FittedLayer:
        """`a`: the samples that calibrated it."""
        exact = made.gate * float(a.asked.sum())
        none = LayerReport(
            layer, "exact", 0, a.per_expert, exact, **asdict(PredictionQuality.exact(a)), bytes_exact=exact
        )
        used = sorted({best[0] for best in made.best if best is not None})
        thresholds = np.zeros((len(PRICES), a.neurons), np.float32)
        reports, fits = [], []
        for i, best in enumerate(made.best):
            if best is None:
                reports.append(none)
                fits.append(-1)
                continue
            fit, point = best
            p, thresholds[i] = made.fits[fit], point.threshold
            quality = asdict(point.quality)
            reports.append(
                LayerReport(layer, p.kind, p.rank, point.hot, point.bytes, **quality, bytes_exact=exact)
            )
            fits.append(used.index(fit))
        tensors: dict[str, Any] = {"thresholds": thresholds}
        for n, fit in enumerate(used):
            tensors |= {f"{n}.{name}": x for name, x in tensors_of(made.fits[fit]) if name != "threshold"}
        facts: Json = {
            "fits": fits,
            "nbytes": [made.fits[fit].nbytes for fit in used],
            "reports": [asdict(r) for r in reports],
            "seconds": seconds,
        }
        return FittedLayer(facts, tensors)


class FittedLayers:
    """The shortlists of a pack's layers, in a directory beside it, used by one process at a time.

    `made_for` holds the facts that layers which are already there must share. Raises IOFailure, and
    UsageError if another process uses the directory.
    """

    def __init__(self, pack: Pack, made_for: Json) -> None:
        path = Path(os.path.realpath(pack.path))
        self.directory = path.with_name(f"{path.name}.train-unfinished")
        self._spec, self._stamp, self._made_for = pack.spec, sidecar.stamp(pack.path), made_for
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise IOFailure(f"{self.directory}: cannot make a directory: {e.strerror}") from None
        try:
            self._lock = lock(self.directory)
        except OSError:
            raise UsageError(
                f"{self.directory}: another process trains predictors for this pack; wait for it"
            ) from None
        self._facts = {i: facts for i in pack.spec.ffn_layers if (facts := self._known(i)) is not None}

    @property
    def missing(self) -> list[int]:
        """The layers that have no shortlist yet."""
        return [i for i in self._spec.ffn_layers if i not in self._facts]

    def _path(self, layer: int) -> Path:
        return self.directory / f"layer-{layer}.safetensors"

    def _open(self, layer: int) -> sidecar.Sidecar | None:
        return sidecar.Sidecar.open(self._path(layer), KIND, self._stamp, "thermocline train")

    def _known(self, layer: int) -> Json | None:
        """Return the facts of a layer's file, where it is whole and of the same training."""
        try:
            found = self._open(layer)
        except (BadFile, IOFailure):
            return None
        if found is None:
            return None
        with closing(found):
            same = all(found.facts.get(key) == value for key, value in self._made_for.items())
            return found.facts if same and not [*found.problems()] else None

    def add(self, layer: int, found: FittedLayer) -> None:
        """Keep a layer's shortlist."""
        facts: Json = {**self._made_for, **found.facts}
        shapes = {name: (x.dtype, x.shape) for name, x in found.tensors.items()}
        sidecar.replace(self._path(layer), KIND, self._stamp, facts, shapes, found.tensors.values())
        self._facts[layer] = facts

    def predictors(self, price: int) -> Predictors:
        """Return the predictors of all layers at a price. They are read from the files, one by one."""
        nbytes = sum(f["nbytes"][n] for f in self._facts.values() if (n := f["fits"][price]) >= 0)
        return Predictors(self._spec.n_layers, nbytes, partial(self._stored, price))

    @property
    def most_bytes(self) -> int:
        """Return the bytes of the largest predictors, of all prices."""
        return max(self.predictors(price).nbytes for price in range(len(PRICES)))

    def _stored(self, price: int, layer: int) -> StoredPredictor | None:
        facts = self._facts.get(layer)
        if facts is None or (n := facts["fits"][price]) < 0:
            return None
        report = LayerReport(**facts["reports"][price])
        found = self._open(layer)
        assert found is not None, "it was there when it was added"
        with closing(found):
            neurons = self._spec.n_experts * self._spec.ffn_dim
            threshold = found.read("thresholds", "<f4", (len(PRICES), neurons))[price]
            of = partial(found.read, dtype="|u1", shape=(None, None))
            return StoredPredictor.of(
                self._spec, report.kind, report.rank, lambda name: of(f"{n}.{name}"), threshold, report.hot
            )

    def reports(self, price: int) -> Iterator[LayerReport]:
        for facts in (self._facts[i] for i in self._spec.ffn_layers):
            yield LayerReport(**facts["reports"][price])

    @property
    def seconds(self) -> list[float]:
        """Return the time that each layer's fits took."""
        return [self._facts[i]["seconds"] for i in self._spec.ffn_layers]

    def close(self) -> None:
        if self._lock is not None:  # Windows has none
            os.close(self._lock)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
