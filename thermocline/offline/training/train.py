"""`thermocline train`: fit predictors to samples of each layer, and keep those that read the fewest bytes.

`calibrate.py` computes the cost of each fit at every price of errors. One price is chosen for the whole
model: the lowest at which predictions, measured end to end, are as close to exact as requested.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thermocline.errors import OutOfBudget, Unsupported, UsageError
from thermocline.machine import hardware
from thermocline.offline.counting import open_same
from thermocline.offline.training.calibrate import PRICES, TYPICAL
from thermocline.offline.training.fits import (
    LayerFit,
    check_installed,
    fit_bytes,
    fit_layer,
    gate_rows,
    layer_samples,
    predictor_bytes,
)
from thermocline.offline.training.shortlist import FittedLayer, FittedLayers, Shortlist
from thermocline.offline.training.trial import Judge, Progress, Texts, TrialJob, Verdict, past
from thermocline.pack.activity_profile import AGAIN, Profile, open_profile
from thermocline.pack.pack import Pack
from thermocline.plan.memory import gib_up, runtime_bytes, size_down, size_up
from thermocline.session.gpu import trainer
from thermocline.session.session import budget_for

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers
    from thermocline.files.bounded import Json
    from thermocline.offline.training.samples import LayerSource, Mask
    from thermocline.pack.activity_profile import Rows
    from thermocline.pack.predictor import Predictors
    from thermocline.pack.stored_model import StoredModel

log = logging.getLogger(__name__)

KINDS = ("mlp", "svd", "sign")
FITTED = 0.75  # share of the time after which fitting ends; after half of the time ranks stop growing


@dataclass(frozen=True)
class TrainJob:
    pack: Pack
    profile: Profile
    kinds: tuple[str, ...]
    forced: bool  # predict in every layer, even if reading the whole gate costs less
    max_kld: float
    max_ppl: float  # change of perplexity, in percent
    seed: int
    threads: int
    minutes: float
    texts: Texts  # texts to measure on
    own: bool  # whether to measure on a text that the model writes, too
    context: int
    limit: int  # windows of each text
    ram: float | None = None  # GiB that all of it may take; None: what is free
    across: Workers | None = None  # processes or machines to divide the layers between; None: this process
    gpu: str = "off"
    vram: float | None = None


@dataclass(frozen=True)
class TrainResult:
    """The predictors of a model, and a report about them. Remove it in the end."""

    predictors: Predictors
    report: Json  # equal for equal seeds, unless `minutes` ended a fit early
    worthwhile: bool  # whether they read fewer bytes than exact
    timing: Json  # times on this machine, which no file keeps
    fitted: FittedLayers  # the files that `predictors` are read from

    def remove(self) -> None:
        """Remove what an interrupted training would go on with: it is over."""
        self.fitted.close()
        self.fitted.remove()


def check(pack: Pack) -> Profile:
    """Open a pack's profile. Raises Unsupported or UsageError, with the command that helps."""
    if not pack.spec.sparse:
        raise Unsupported(
            f"{pack.path}: its {pack.spec.activation} neurons are never exactly zero, so there is nothing to "
            "predict; it runs densely"
        )
    found = open_profile(pack)
    if found is None:
        raise UsageError(
            f"{pack.path}: has no profile; make one with `{AGAIN.replace('PACK', str(pack.path))}`"
        )
    return found


def train(r: TrainJob, source: LayerSource, progress: Progress) -> TrainResult:
    """Fit predictors and choose the best ones. Raises OutOfBudget, Unsupported, UsageError or BadFile.

    A training that was interrupted goes on with the layers that it had not fitted.
    """
    begin = time.monotonic()
    deadline = begin + 60 * r.minutes
    check_memory(r, source)
    fitted = FittedLayers(r.pack, _made_for(r, source))
    try:
        deadline = _fit_layers(r, source, fitted, deadline, partial(progress, "fitting"))
        judge, near, searched = Judge.of(_asked(r), fitted.most_bytes, deadline, progress), None, 0
        with judge.session:
            if (quick := judge.quick()) is not None and not past(deadline):
                near, _, searched = search(_at_price(quick, fitted), r, quick.deadline)
            price, verdict, more = search(_at_price(judge, fitted), r, deadline, near)
    except BaseException:
        fitted.close()
        raise
    report = {
        "kinds": list(r.kinds),
        "seed": r.seed,
        "samples": source.n,
        "max_kld": r.max_kld,
        "max_ppl_percent": r.max_ppl,
        "met": meets(verdict, r),
        "price": float(PRICES[price]),
        "tried": searched + more,
        **verdict.facts(),
        "layers": [asdict(x) for x in fitted.reports(price)],
    }
    timing = {"seconds": time.monotonic() - begin, "fit_s": fitted.seconds}
    timing["predictor_us_at_memory_speed"] = _at_memory_speed(verdict.predictor_bytes, r.threads)
    worthwhile = verdict.bytes < verdict.bytes_exact
    return TrainResult(fitted.predictors(price), report, worthwhile, timing, fitted)


def _asked(r: TrainJob) -> TrialJob:
    return TrialJob(r.pack, r.threads, r.texts, r.own, r.context, r.limit, r.seed, r.ram, r.gpu, r.vram)


def _made_for(r: TrainJob, source: LayerSource) -> Json:
    """Return the facts on which the fits of a layer depend."""
    return {
        "samples": source.about,
        "kinds": list(r.kinds),
        "forced": r.forced,
        "seed": r.seed,
        "minutes": r.minutes,
        **({} if r.gpu == "off" else {"gpu": r.gpu}),
    }


def _at_price(judge: Judge, fitted: FittedLayers) -> Callable[[int], Verdict]:
    return lambda price: judge(fitted.predictors(price))


def check_memory(r: TrainJob, source: LayerSource) -> None:
    """Raise OutOfBudget if memory is too small for the samples, a layer's fits, or trials."""
    Judge.open_session(_asked(r), predictor_bytes(r.pack.spec, r.kinds)).close()
    source.check()
    budget, limit = budget_for(r.ram if r.across is None else r.across.ram(r.ram))
    need = fitting_bytes(r, source)
    if budget is not None and need > budget:
        raise OutOfBudget(
            f"to fit a layer's predictors to {source.n} samples takes about {size_up(need)} of memory, "
            f"{size_down(budget)} is {limit}; use --ram {gib_up(need)} or fewer --tokens of --corpus"
        )


def fitting_bytes(r: TrainJob, source: LayerSource) -> int:
    """Return about what a process takes that fits one layer."""
    return runtime_bytes(r.pack.spec) + fit_bytes(r.pack.spec, source.n, source.active)


def _at_memory_speed(nbytes: float, threads: int) -> float | None:
    """Return the microseconds of reading so many bytes; None if memory is too scarce to measure."""
    speed = hardware.read_gbs(threads)
    return None if speed is None else nbytes / (speed * 1e3)


# ---- fitting


def _fit_layers(
    r: TrainJob,
    source: LayerSource,
    fitted: FittedLayers,
    deadline: float,
    progress: Callable[[int, int, str], None],
) -> float:
    """Fit predictors to each layer that has none yet. `source` gives one after the other.

    Return the deadline, later by the time that a text took to pass.
    """
    missing = fitted.missing
    every, done = len(r.pack.spec.ffn_layers), len(r.pack.spec.ffn_layers) - len(missing)
    if done:
        log.info(f"going on after {done} of {every} layers")
    held, passed, at_once = source.held_out(r.seed), 0.0, 1 if r.across is None else r.across.most

    def asked() -> Iterator[LayerTask]:
        nonlocal passed
        asked = time.monotonic()
        for n, (i, rows) in enumerate(source.layers(missing, fitted.directory)):
            passed += time.monotonic() - asked
            left = deadline + passed - time.monotonic()
            yield LayerTask(i, rows, held, left * min(1.0, at_once / (len(missing) - n)))
            asked = time.monotonic()

    path = Path(os.path.abspath(r.pack.path))
    work = FittingWork(path, r.pack.stamp, r.kinds, r.forced, r.seed, trainer(r.gpu))
    if r.across is None:
        found: Generator[FittedLayer] = (fit_task(work, r.pack, r.threads, task) for task in asked())
    else:
        found = r.across.map(work, asked(), fitting_bytes(r, source))
    progress(done, every, " layers")
    with closing(found):
        for i, layer in zip(missing, found, strict=True):
            fitted.add(i, layer)
            done += 1
            progress(done, every, " layers")
    return deadline + passed


@dataclass(frozen=True)
class LayerTask:
    """A layer's samples, those that calibrate it, and the seconds for it."""

    layer: int
    rows: Rows
    held: Mask
    seconds: float


@dataclass(frozen=True)
class FittingWork:
    """Fitting layers, as a worker does it."""

    pack: Path
    stamp: tuple[str, str]
    kinds: tuple[str, ...]
    forced: bool
    seed: int
    device: str  # torch's name of what trains networks

    @contextmanager
    def open(self, threads: int) -> Iterator[Callable[[LayerTask], FittedLayer]]:
        check_installed(self.kinds)
        yield partial(fit_task, self, open_same(self.pack, self.stamp), threads)


def fit_task(work: FittingWork, pack: StoredModel, threads: int, task: LayerTask) -> FittedLayer:
    """Fit predictors to a layer, within its time."""
    assert isinstance(pack, Pack), "predictors are a pack's"
    begin, i, held = time.monotonic(), task.layer, task.held
    gate = pack.tensors[f"layers.{i}.gate.weight"].stride
    made, a = Shortlist(pack.spec, gate, forced=work.forced), layer_samples(pack, i, task.rows)
    kept, own = (a.take(np.flatnonzero(x)) for x in (held, held if held.all() else ~held))
    del a  # as large as both of its parts
    late, over = (partial(past, begin + part * task.seconds) for part in (0.5, FITTED))  # the rest: trials
    fit = LayerFit(made, gate_rows(pack, i), own, kept, work.seed + i, threads, late, over, work.device)
    fit_layer(work.kinds, fit)
    return FittedLayer.of(i, made, kept, time.monotonic() - begin)


# ---- end to end


def meets(v: Verdict, r: TrainJob) -> bool:
    """Return whether predictions are close enough: the divergence on each text, and the mean perplexity.

    Perplexity is compared over all texts together, since it is too noisy on few tokens.
    """
    return v.worst[1].kld.value <= r.max_kld and 100 * abs(v.divergence.ratio.value - 1) <= r.max_ppl


def search(
    judge: Callable[[int], Verdict], r: TrainJob, deadline: float, near: int | None = None
) -> tuple[int, Verdict, int]:
    """Find the lowest price that is close enough: (price, its verdict, number of trials).

    `judge` tries a price out. The result is the highest price if none is close enough. A higher price misses
    less, so the search bisects; if `near` is given, it first moves away from that price in steps of 1, 2, 4 …
    After the deadline there is one more trial, of the highest price, if none was close enough before.
    """
    low, high, tried, step = 0, len(PRICES) - 1, 0, 1
    best: tuple[int, Verdict] | None = None
    price = TYPICAL if near is None else near
    while low <= high:
        if past(deadline):
            if best is not None:
                break
            low = price = high
        last = (price, judge(price))
        tried += 1
        if meets(last[1], r):
            best, high, ahead = last, price - 1, price - step
        else:
            low, ahead = price + 1, price + step
        bracketed = near is None or (best is not None and low > 0)
        price, step = (low + high) // 2 if bracketed else min(max(ahead, low), high), 2 * step
    return (*(best or last), tried)
