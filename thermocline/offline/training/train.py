"""`thermocline train`: fit predictors to a profile's samples, and keep those that read the fewest bytes.

`calibrate.py` computes the cost of each fit at every price of errors. One price is chosen for the whole
model: the lowest at which predictions, measured end to end, are as close to exact as requested.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from thermocline.errors import Unsupported, UsageError
from thermocline.machine import hardware
from thermocline.model import quant
from thermocline.model.activations import route
from thermocline.offline.training import calibrate, fit_mlp, fit_svd
from thermocline.offline.training.calibrate import PRICES, TYPICAL, Costs, LayerSamples
from thermocline.offline.training.trial import Judge, Layers, Progress, Texts, TrialJob, Verdict, past
from thermocline.pack.activity_profile import AGAIN, Rows, Samples, open_profile, open_samples
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import LayerPredictor, scores, stored, stored_bytes

if TYPE_CHECKING:
    from thermocline.files.bounded import Json
    from thermocline.model.quant import U8
    from thermocline.model.spec import ModelSpec
    from thermocline.ops.interface import F32

KINDS = ("mlp", "svd", "sign")
ROUTER_PARTS = ("weight", "bias", "selection_bias")
CHEAPEST_FIRST = ("sign", "svd", "mlp")  # by the time to fit them
BLOCK = 32  # ranks are whole blocks of int8 weights
CALIBRATION = 0.5  # share of the samples for thresholds; predictors are fitted to the others
SVD_RANK = 256  # the first SVD's rank; a wider one is computed only if ranks up to this still gain
RANK_SHARE = 0.25  # the first rank, as a share of the neurons that are active for a token
FITTED = 0.75  # share of the time after which fitting ends; after half of the time ranks stop growing


@dataclass(frozen=True)
class TrainJob:
    pack: Pack
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


@dataclass(frozen=True)
class TrainResult:
    """The predictors of a model, and a report about them."""

    layers: Layers
    report: Json  # equal for equal seeds, unless `minutes` ended a fit early
    worthwhile: bool  # whether they read fewer bytes than exact
    timing: Json  # times on this machine, which no file keeps


def check(pack: Pack) -> Samples:
    """Open a pack's samples. Raises Unsupported or UsageError, with the command that helps."""
    if not pack.spec.sparse:
        raise Unsupported(
            f"{pack.path}: its {pack.spec.activation} neurons are never exactly zero, so there is nothing to "
            "predict; it runs densely"
        )
    again = AGAIN.replace("PACK", str(pack.path))
    if open_profile(pack) is None:
        raise UsageError(f"{pack.path}: has no profile; make one with `{again}`")
    samples = open_samples(pack)
    if samples is None:
        raise UsageError(
            f"{pack.path}: has no samples to learn from; make them with `{again} --samples 4096`"
        )
    return samples


def train(r: TrainJob, samples: Samples, progress: Progress) -> TrainResult:
    """Fit predictors and choose the best ones. Raises OutOfBudget, Unsupported, UsageError or BadFile."""
    begin = time.monotonic()
    deadline = begin + 60 * r.minutes
    Judge.open_session(_asked(r)).close()  # what does not fit in memory is refused before the fits
    found = [*_shortlists(r, samples, deadline, partial(progress, "fitting"))]
    judge, near, searched = Judge.of(_asked(r), deadline, progress), None, 0
    if (quick := judge.quick()) is not None and not past(deadline):
        near, _, searched = search(found, quick, r, quick.deadline)
    price, verdict, more = search(found, judge, r, deadline, near)
    layers = [s.best[price] for s in found]
    report = {
        "kinds": list(r.kinds),
        "seed": r.seed,
        "samples": samples.n,
        "max_kld": r.max_kld,
        "max_ppl_percent": r.max_ppl,
        "met": meets(verdict, r),
        "price": float(PRICES[price]),
        "tried": searched + more,
        **verdict.facts(),
        "layers": _layer_reports(r, samples, layers, found),
    }
    fits = [found[i].seconds for i in r.pack.spec.ffn_layers]
    timing = {"seconds": time.monotonic() - begin, "fit_s": fits}
    timing["predictor_us_at_memory_speed"] = _at_memory_speed(verdict.predictor_bytes, r.threads)
    return TrainResult(layers, report, verdict.bytes < verdict.bytes_exact, timing)


def _asked(r: TrainJob) -> TrialJob:
    return TrialJob(r.pack, r.threads, r.texts, r.own, r.context, r.limit, r.seed)


def _at_memory_speed(nbytes: float, threads: int) -> float | None:
    """Return the microseconds of reading so many bytes; None if memory is too scarce to measure."""
    speed = hardware.read_gbs(threads)
    return None if speed is None else nbytes / (speed * 1e3)


# ---- fitting


@dataclass
class Shortlist:
    """The best predictor of one layer at every price. None means to read the whole gate."""

    spec: ModelSpec
    gate: int  # bytes of a gate row
    best: Layers
    objective: list[float]
    seconds: float = 0.0

    @staticmethod
    def of(spec: ModelSpec, gate: int, forced: bool) -> Shortlist:
        exact = float("inf") if forced else float(gate * spec.n_experts_active * spec.ffn_dim)
        return Shortlist(spec, gate, [None] * len(PRICES), [exact] * len(PRICES))

    def offer(self, p: LayerPredictor, a: LayerSamples) -> float:
        """Calibrate a predictor, keep it where it is best, and return its cost at a typical price."""
        p = stored(p, self.spec).decoded()  # scores come from the weights as they will be stored
        curves = calibrate.curves(scores(p, a.x), a)
        costs = self.costs(p)
        chosen = [calibrate.choose_operating_point(curves, costs, i) for i in range(len(PRICES))]
        for i, c in enumerate(chosen):
            if c.objective < self.objective[i]:
                self.objective[i] = c.objective
                self.best[i] = replace(p, threshold=c.threshold, hot=c.hot)
        return chosen[TYPICAL].objective

    def costs(self, p: LayerPredictor) -> Costs:
        first, ask = stored_bytes(self.spec, p.kind, 0 if p.first is None else len(p.first))
        return Costs(self.spec.n_experts_active * first, ask, self.gate)


def _shortlists(
    r: TrainJob, samples: Samples, deadline: float, progress: Callable[[int, int, str], None]
) -> Iterator[Shortlist]:
    spec = r.pack.spec
    for i in range(spec.n_layers):
        if i in spec.no_ffn:
            yield Shortlist(spec, 0, [None] * len(PRICES), [0.0] * len(PRICES))
            continue
        begin = time.monotonic()
        progress(i, spec.n_layers, " layers")
        made = Shortlist.of(spec, r.pack.tensors[f"layers.{i}.gate.weight"].stride, r.forced)
        fitted, kept = split(layer_samples(r.pack, i, samples.layer(i)), r.seed)
        share = (deadline - begin) / sum(later >= i for later in spec.ffn_layers)
        late, over = (partial(past, begin + part * share) for part in (0.5, FITTED))  # the rest is for trials
        fit = _LayerFit(made, gate_rows(r.pack, i), fitted, kept, r.seed + i, r.threads, late, over)
        for kind in sorted(r.kinds, key=CHEAPEST_FIRST.index):
            with contextlib.suppress(_Over):
                _fit(kind, fit)
        made.seconds = time.monotonic() - begin
        yield made
    progress(spec.n_layers, spec.n_layers, " layers")


class _Over(Exception):
    """Raised if the time for a fit is over."""


def _unless(over: Callable[[], bool]) -> None:
    if over():
        raise _Over


@dataclass(frozen=True)
class _LayerFit:
    """The input of one layer's fits."""

    made: Shortlist  # takes the fitted predictors
    gate: F32  # [neurons, dim]
    fitted: LayerSamples  # samples to fit to
    kept: LayerSamples  # samples to calibrate with
    seed: int
    threads: int
    late: Callable[[], bool]  # whether ranks may not grow any more
    over: Callable[[], bool]  # whether the time for fits is over


def _fit(kind: str, f: _LayerFit) -> None:
    """Fit predictors of a kind and offer them, no wider ones when it is late. Raises _Over."""
    made, kept = f.made, f.kept

    def offer(first: F32 | None, second: F32 | None, signs: U8 | None = None) -> float:
        none = np.zeros(len(f.gate), np.float32)
        return made.offer(LayerPredictor(kind, first, second, signs, none, 0, kept.experts), kept)

    _unless(f.over)
    match kind:
        case "sign":
            offer(None, None, fit_svd.signs(f.gate))
        case "svd":
            asked = made.spec.n_experts_active * made.spec.ffn_dim
            ranks = _ranks(made.spec, asked * made.gate, len(f.fitted.neuron) / f.fitted.n / asked)
            _cut(partial(fit_svd.svd, f.gate, f.fitted.x, seed=f.seed), ranks, made, offer, f.late)
        case "mlp":
            step = partial(_unless, f.over)
            train_rank = partial(fit_mlp.fit, f.fitted, seed=f.seed, threads=f.threads, step=step)
            _widths(lambda rank: offer(*train_rank(rank)), _first_rank(f.fitted), made.spec, f.late)


def _cut(
    svd: Callable[[int], tuple[F32, F32]],
    ranks: list[int],
    made: Shortlist,
    offer: Callable[[F32, F32], float],
    late: Callable[[], bool],
) -> None:
    """Offer rising ranks of an SVD until one is best at no price.

    The first SVD has `SVD_RANK`: a wide one takes minutes.
    """
    first, second = svd(min(SVD_RANK, max(ranks)))
    for rank in ranks:
        if rank > len(first):
            wanted = len(first) < min(second.shape[0], made.spec.dim)
            first, second = svd(max(ranks)) if wanted else (first, second)
        rank, before = min(rank, len(first)), [*made.objective]
        offer(first[:rank], np.ascontiguousarray(second[:, :rank]))
        if late() or (made.objective == before and any(o < float("inf") for o in before)):
            break


def _ranks(spec: ModelSpec, gate_bytes: int, active: float) -> list[int]:
    """Return the ranks that can pay: predictor and needed gate rows read less than the whole gate.

    Ranks grow by a half or a third.
    """
    steps = [(BLOCK << k) * m // 2 for k in range(12) for m in (2, 3)]
    ranks = sorted({s for s in steps if s % BLOCK == 0 and s <= spec.dim})
    return [s for s in ranks if _whole(spec, s) < (1 - active) * gate_bytes] or [BLOCK]


def _whole(spec: ModelSpec, rank: int) -> int:
    first, ask = stored_bytes(spec, "svd", rank)
    return spec.n_experts_active * (first + spec.ffn_dim * ask)


def _first_rank(a: LayerSamples) -> int:
    """Return the first rank: a share of a token's active neurons, less if few neurons do most of the work."""
    often = np.sort(np.bincount(a.neuron, minlength=a.neurons))[::-1].cumsum()
    busy = np.searchsorted(often, 0.8 * often[-1]) / a.neurons  # the share that makes 80 % of activations
    rank = RANK_SHARE * len(a.neuron) / a.n * (0.5 + busy)
    return max(BLOCK, round(float(rank) / BLOCK) * BLOCK)


def _widths(cost: Callable[[int], float], first: int, spec: ModelSpec, late: Callable[[], bool]) -> None:
    """Double the rank while that lowers the cost. If it never does, halve the rank instead."""
    start = cost(first)
    for factor in (2.0, 0.5):
        rank, best = first, start
        while not late():
            rank = int(rank * factor) // BLOCK * BLOCK
            if not BLOCK <= rank <= spec.dim or (now := cost(rank)) >= best:
                break
            best = now
        if best < start:
            return


# ---- samples


def layer_samples(pack: Pack, layer: int, rows: Rows) -> LayerSamples:
    """Return a layer's samples. In a mixture, the router tells the experts of each token.

    If it reads another stream than experts do, those that have an active neuron are the token's.
    """
    x, index, mass = rows[0].astype(np.float32), rows[2].astype(np.int64), rows[3].astype(np.float32)
    spec = pack.spec
    a = LayerSamples(x, rows[1], index, mass, spec.n_experts * spec.ffn_dim)
    if spec.n_experts == 1:
        return a
    chosen = np.zeros((len(x), spec.n_experts), bool)
    if spec.router_input == "ffn_norm":
        router, bias, more = (_f32(pack, f"layers.{layer}.router.{part}") for part in ROUTER_PARTS)
        assert router is not None, "a mixture has a router"
        logits = x @ router.reshape(-1, spec.dim).T + (0 if bias is None else bias)
        chosen = route(logits, spec.n_experts_active, spec.router, more) != 0
    chosen[a.token, index // spec.ffn_dim] = True  # inputs are rounded to f16, so a close choice may differ
    return replace(a, chosen=chosen)


def _f32(pack: Pack, name: str) -> F32 | None:
    return read_tensor(pack, name).reshape(-1).view("<f4") if name in pack.tensors else None


def split(a: LayerSamples, seed: int) -> tuple[LayerSamples, LayerSamples]:
    """Split samples into (those to fit to, those to calibrate with)."""
    order = np.random.default_rng(seed).permutation(a.n)
    at = max(1, a.n - round(CALIBRATION * a.n))
    return a.take(np.sort(order[:at])), a.take(np.sort(order[at:])) if at < a.n else a


def gate_rows(pack: Pack, layer: int) -> F32:
    """Return a layer's gate as f32 [n_experts * ffn_dim, dim]."""
    name = f"layers.{layer}.gate.weight"
    info = pack.tensors[name]
    used = quant.row_bytes(info.format, pack.spec.dim)
    rows = read_tensor(pack, name).reshape(-1, info.stride)[:, :used]
    return quant.decode(info.format, np.ascontiguousarray(rows), pack.spec.dim)


# ---- end to end


def meets(v: Verdict, r: TrainJob) -> bool:
    """Return whether predictions are close enough: the divergence on each text, and the mean perplexity.

    Perplexity is compared over all texts together, since it is too noisy on few tokens.
    """
    return v.worst[1].kld.value <= r.max_kld and 100 * abs(v.divergence.ratio.value - 1) <= r.max_ppl


def search(
    found: Sequence[Shortlist],
    judge: Callable[[Layers], Verdict],
    r: TrainJob,
    deadline: float,
    near: int | None = None,
) -> tuple[int, Verdict, int]:
    """Find the lowest price that is close enough: (price, its verdict, number of trials).

    The result is the highest price if none is close enough. A higher price misses less, so the search
    bisects; if `near` is given, it first moves away from that price in steps of 1, 2, 4 … After the
    deadline there is one more trial, of the highest price, if none was close enough before.
    """
    low, high, tried, step = 0, len(PRICES) - 1, 0, 1
    best: tuple[int, Verdict] | None = None
    price = TYPICAL if near is None else near
    while low <= high:
        if past(deadline):
            if best is not None:
                break
            low = price = high
        last = (price, judge([s.best[price] for s in found]))
        tried += 1
        if meets(last[1], r):
            best, high, ahead = last, price - 1, price - step
        else:
            low, ahead = price + 1, price + step
        bracketed = near is None or (best is not None and low > 0)
        price, step = (low + high) // 2 if bracketed else min(max(ahead, low), high), 2 * step
    return (*(best or last), tried)


# ---- the report


def _layer_reports(
    r: TrainJob, samples: Samples, layers: Layers, found: Sequence[Shortlist]
) -> list[dict[str, Any]]:
    def report(i: int) -> Json:
        kept = split(layer_samples(r.pack, i, samples.layer(i)), r.seed)[1]
        return {"layer": i} | _layer_report(layers[i], kept, found[i])

    return [report(i) for i in r.pack.spec.ffn_layers]


def _layer_report(p: LayerPredictor | None, a: LayerSamples, s: Shortlist) -> Json:
    """Report on one layer's predictor, with the samples that calibrated it. Bytes are those of a token."""
    share, places = a.asked, np.arange(a.neurons) % a.per_expert
    exact = s.gate * float(share.sum())
    if p is None:
        about: Json = {"kind": "exact", "rank": 0, "hot": a.per_expert, "bytes": exact}
        figures = calibrate.PredictionQuality.of(np.ones((a.n, a.neurons), bool), a)
    else:
        figures, costs = calibrate.PredictionQuality.of(p.predicted(a.x), a), s.costs(p)
        asked = costs.ask * float(share[places >= p.hot].sum())
        read = costs.first + asked + figures.predicted * a.neurons * s.gate
        rank = 0 if p.first is None else len(p.first)
        about = {"kind": p.kind, "rank": rank, "hot": p.hot, "bytes": read}
    return about | asdict(figures) | {"bytes_exact": exact}
