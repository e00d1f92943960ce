"""`thermocline train`: fit predictors to a profile's samples, and keep those that read the fewest bytes.

`calibrate.py` says what each fit costs at every price of errors; here one price is found for the whole model:
the lowest at which predictions are, measured end to end, as near to exact as was asked. Must not know flags.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from thermocline import calibrate, evaluate, fit, fit_mlp, hardware, quant, weights
from thermocline.calibrate import PRICES, TYPICAL, Activity, Costs
from thermocline.decoder import F32, I32, FFNStats, bind, for_context
from thermocline.engine import Engine
from thermocline.errors import Unsupported, UsageError
from thermocline.ops.reference import route
from thermocline.pack import Pack, read_tensor
from thermocline.predictor import LayerPredictor, Predictors, scores, stored, stored_bytes
from thermocline.profile import AGAIN, Rows, Samples, open_profile, open_samples
from thermocline.safetensors import Json
from thermocline.sampler import SamplingParams
from thermocline.spec import ModelSpec

KINDS = ("mlp", "svd", "sign")
BLOCK = 32  # ranks are whole blocks of int8 weights
CALIBRATION = 0.5  # of the samples; predictors are fitted to the others
SVD_RANK = 256  # fitted at first; wider only where ranks up to this still gain
RANK_SHARE = 0.25  # the rank tried first, of the neurons that are active for a token
Layers = list[LayerPredictor | None]
Progress = Callable[[str, int, int, str], None]  # what, done, in all, unit


@dataclass(frozen=True)
class Request:
    pack: Pack
    kinds: tuple[str, ...]
    forced: bool  # predict in every layer, even where reading the gate costs less
    max_kld: float
    max_ppl: float  # change of perplexity, percent
    seed: int
    threads: int
    minutes: float
    texts: I32 | None  # [windows, context] to measure on; None: what the model itself writes
    context: int
    limit: int  # windows


@dataclass(frozen=True)
class Trained:
    layers: Layers
    report: Json  # the same for equal seeds, if `minutes` cut nothing short
    worthwhile: bool  # reads less than exact does
    timing: Json  # of this machine now: kept in no file


def check(pack: Pack) -> Samples:
    """What cannot be trained on is refused, with the command that helps."""
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


def train(r: Request, samples: Samples, progress: Progress) -> Trained:
    begin = time.monotonic()
    deadline = begin + 60 * r.minutes
    found = [*_shortlists(r, samples, deadline, partial(progress, "fitting"))]
    judge, near, searched = Judge.of(r, progress), None, 0
    if (quick := judge.quick()) is not None:
        near, _, searched = search(found, quick, r, deadline)
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
    timing = {"seconds": time.monotonic() - begin, "fit_s": [s.seconds for s in found]}
    timing["predictor_us_at_memory_speed"] = _at_memory_speed(verdict.predictor_bytes, r.threads)
    return Trained(layers, report, verdict.bytes < verdict.bytes_exact, timing)


def _at_memory_speed(nbytes: float, threads: int) -> float | None:
    """Microseconds of reading them; None where memory is too scarce to measure in."""
    speed = hardware.read_gbs(threads)
    return None if speed is None else nbytes / (speed * 1e3)


# ---- fitting


@dataclass
class Shortlist:
    """One layer: at every price the best of what was offered, None for reading the whole gate."""

    spec: ModelSpec
    gate: int  # bytes of a gate row
    best: Layers
    objective: list[float]
    seconds: float = 0.0

    @staticmethod
    def of(spec: ModelSpec, gate: int, forced: bool) -> Shortlist:
        exact = float("inf") if forced else float(gate * spec.n_experts_active * spec.ffn_dim)
        return Shortlist(spec, gate, [None] * len(PRICES), [exact] * len(PRICES))

    def offer(self, p: LayerPredictor, a: Activity) -> float:
        """-> what it costs at a typical price. Its thresholds and break-even are found here."""
        p = stored(p, self.spec).decoded()  # scores of the weights as they will be
        curves = calibrate.curves(scores(p, a.x), a)
        costs = self.costs(p)
        chosen = [calibrate.choose(curves, costs, i) for i in range(len(PRICES))]
        for i, c in enumerate(chosen):
            if c.objective < self.objective[i]:
                self.objective[i] = c.objective
                self.best[i] = replace(p, threshold=c.threshold, hot=c.hot)
        return chosen[TYPICAL].objective

    def costs(self, p: LayerPredictor) -> Costs:
        first, ask = stored_bytes(self.spec, p.kind, 0 if p.first is None else len(p.first))
        return Costs(self.spec.n_experts_active * first, ask, self.gate)


def _shortlists(
    r: Request, samples: Samples, deadline: float, progress: Callable[[int, int, str], None]
) -> Iterator[Shortlist]:
    spec = r.pack.spec
    for i in range(spec.n_layers):
        begin = time.monotonic()
        progress(i, spec.n_layers, " layers")
        made = Shortlist.of(spec, r.pack.tensors[f"layers.{i}.gate.weight"].stride, r.forced)
        fitted, kept = split(activity(r.pack, i, samples.layer(i)), r.seed)
        late = partial(_past, begin + (deadline - begin) / 2 / (spec.n_layers - i))  # half is for trials
        for kind in r.kinds:
            _fit(kind, made, gate_rows(r.pack, i), fitted, kept, r, i, late)
        made.seconds = time.monotonic() - begin
        yield made
    progress(spec.n_layers, spec.n_layers, " layers")


def _past(deadline: float) -> bool:
    return time.monotonic() > deadline


def _fit(
    kind: str,
    made: Shortlist,
    gate: F32,
    fitted: Activity,
    kept: Activity,
    r: Request,
    layer: int,
    late: Callable[[], bool],
) -> None:
    def ranked(first: F32, second: F32) -> float:
        none = np.zeros(len(second), np.float32)
        return made.offer(LayerPredictor(kind, first, second, None, none, 0, kept.experts), kept)

    match kind:
        case "sign":
            none = np.zeros(len(gate), np.float32)
            made.offer(LayerPredictor(kind, None, None, fit.signs(gate), none, 0, kept.experts), kept)
        case "svd":
            asked = made.spec.n_experts_active * made.spec.ffn_dim
            ranks = _ranks(made.spec, asked * made.gate, len(fitted.neuron) / fitted.n / asked)
            _cut(partial(fit.svd, gate, fitted.x, seed=r.seed + layer), ranks, made, ranked)
        case "mlp":
            train_rank = partial(fit_mlp.fit, fitted, seed=r.seed + layer, threads=r.threads)
            _widths(lambda rank: ranked(*train_rank(rank)), _first_rank(fitted), made.spec, late)


def _cut(
    svd: Callable[[int], tuple[F32, F32]],
    ranks: list[int],
    made: Shortlist,
    offer: Callable[[F32, F32], float],
) -> None:
    """Ranks upwards until one is the best at no price. Of `SVD_RANK` at first: a wide fit takes minutes."""
    first, second = svd(min(SVD_RANK, max(ranks)))
    for rank in ranks:
        if rank > len(first):
            wanted = len(first) < min(second.shape[0], made.spec.dim)
            first, second = svd(max(ranks)) if wanted else (first, second)
        rank, before = min(rank, len(first)), [*made.objective]
        offer(first[:rank], np.ascontiguousarray(second[:, :rank]))
        if made.objective == before and any(o < float("inf") for o in before):
            break


def _ranks(spec: ModelSpec, gate_bytes: int, active: float) -> list[int]:
    """Ranks whose predictors and the gate rows needed read less than the gate: steps of a half or a third."""
    steps = [(BLOCK << k) * m // 2 for k in range(12) for m in (2, 3)]
    ranks = sorted({s for s in steps if s % BLOCK == 0 and s <= spec.dim})
    return [s for s in ranks if _whole(spec, s) < (1 - active) * gate_bytes] or [BLOCK]


def _whole(spec: ModelSpec, rank: int) -> int:
    first, ask = stored_bytes(spec, "svd", rank)
    return spec.n_experts_active * (first + spec.ffn_dim * ask)


def _first_rank(a: Activity) -> int:
    """By how many neurons are active for a token; fewer where few neurons do most of the work."""
    often = np.sort(np.bincount(a.neuron, minlength=a.neurons))[::-1].cumsum()
    busy = np.searchsorted(often, 0.8 * often[-1]) / a.neurons  # the share that makes 80 % of activations
    rank = RANK_SHARE * len(a.neuron) / a.n * (0.5 + busy)
    return max(BLOCK, round(float(rank) / BLOCK) * BLOCK)


def _widths(cost: Callable[[int], float], first: int, spec: ModelSpec, late: Callable[[], bool]) -> None:
    """Double the rank while that costs less in all, else halve it."""
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


# ---- what is fitted to


def activity(pack: Pack, layer: int, rows: Rows) -> Activity:
    x, index, mass = rows[0].astype(np.float32), rows[2].astype(np.int64), rows[3].astype(np.float32)
    spec = pack.spec
    a = Activity(x, rows[1], index, mass, spec.n_experts * spec.ffn_dim)
    if spec.n_experts == 1:
        return a
    router = read_tensor(pack, f"layers.{layer}.router.weight").view("<f4")
    chosen = route(x @ router.T, spec.n_experts_active) != 0
    chosen[a.token, index // spec.ffn_dim] = True  # inputs in f16 may say otherwise where it is close
    return replace(a, chosen=chosen)


def split(a: Activity, seed: int) -> tuple[Activity, Activity]:
    """(to fit to, to calibrate with)."""
    order = np.random.default_rng(seed).permutation(a.n)
    at = max(1, a.n - round(CALIBRATION * a.n))
    return a.take(np.sort(order[:at])), a.take(np.sort(order[at:])) if at < a.n else a


def gate_rows(pack: Pack, layer: int) -> F32:
    """[n_experts * ffn_dim, dim]."""
    name = f"layers.{layer}.gate.weight"
    info = pack.tensors[name]
    used = quant.row_bytes(info.format, pack.spec.dim)
    rows = read_tensor(pack, name).reshape(-1, info.stride)[:, :used]
    return quant.decode(info.format, np.ascontiguousarray(rows), pack.spec.dim)


# ---- end to end


@dataclass(frozen=True)
class Verdict:
    """How near to exact, and what an FFN reads for a token."""

    divergence: evaluate.Divergence
    predicted: float  # gate rows read, of all
    active: float  # neurons that are not zero, exactly computed
    bytes: float  # per token: predictors, gate, up and down rows
    bytes_exact: float
    predictor_bytes: float  # per token, of `bytes`

    def facts(self) -> Json:
        d = self.divergence
        return {
            "tokens": d.own.tokens,
            "kld": asdict(d.kld),
            "kld_p99": d.kld_p99,
            "same_top": asdict(d.same_top),
            "perplexity": asdict(d.own.perplexity),
            "perplexity_exact": asdict(d.base.perplexity),
            "perplexity_change_percent": 100 * (d.ratio.value - 1),
            "predicted_fraction": self.predicted,
            "active_fraction": self.active,
            "ffn_bytes_per_token": self.bytes,
            "ffn_bytes_per_token_exact": self.bytes_exact,
            "predictor_bytes_per_token": self.predictor_bytes,
        }


@dataclass(frozen=True)
class Judge:
    """The model, loaded once: predictors are tried in it."""

    pack: Pack
    loaded: weights.LoadedWeights
    texts: I32
    progress: Callable[[int, int, str], None]

    @staticmethod
    def of(r: Request, progress: Progress) -> Judge:
        loading = partial(progress, "loading")
        loaded = weights.load(r.pack, threads=r.threads, progress=lambda a, b: loading(a, b, "B"))
        texts = r.texts
        if texts is None:
            texts = own_text(r.pack.spec, loaded, r.limit, r.context, r.seed)
        return Judge(r.pack, loaded, texts, partial(progress, "trying"))

    def quick(self) -> Judge | None:
        """A quarter of the windows, to find out where to look; None where there are few."""
        few = max(4, len(self.texts) // 4)
        return replace(self, texts=self.texts[:few]) if len(self.texts) >= 2 * few else None

    def __call__(self, layers: Layers) -> Verdict:
        spec, ops = for_context(self.pack.spec, self.texts.shape[1]), self.loaded.ops
        trial = weights.with_predictors(self.loaded.weights, Predictors.of(spec, layers))
        own, base = (
            evaluate.Reader(bind(spec, w, ops), ops, context=self.texts.shape[1], sparsity=sparsity)
            for w, sparsity in ((trial, "predict"), (self.loaded.weights, "exact"))
        )
        d = evaluate.divergence(own, base, self.texts, lambda a, b: self.progress(a, b, " windows"))
        return self._verdict(d, own.stats, base.stats)

    def _verdict(self, d: evaluate.Divergence, own: FFNStats, base: FFNStats) -> Verdict:
        """Of exact, what its tokens would read one by one: it read them in batches, which share rows."""
        spec, t = self.pack.spec, self.pack.tensors
        gate, bundle = t["layers.0.gate.weight"].stride, t["layers.0.bundle"]
        row = quant.row_bytes(bundle.format, spec.dim)  # up, or down
        neuron = row * (2 if spec.gated else 1)
        every = spec.n_layers * spec.n_experts * spec.ffn_dim
        tokens = own.neurons / every
        active = base.active / base.neurons
        read = own.predicted * gate + own.rows * row + own.predictor_bytes
        gates = spec.n_layers * spec.n_experts_active * spec.ffn_dim
        exact, predictors = gates * gate + every * active * neuron, own.predictor_bytes / tokens
        return Verdict(d, own.predicted / own.neurons, active, read / tokens, exact, predictors)


def own_text(spec: ModelSpec, loaded: weights.LoadedWeights, count: int, context: int, seed: int) -> I32:
    """[count, context]: what the model writes by itself, which no predictor was fitted to."""
    start = spec.bos_id if spec.bos_id is not None else next(iter(spec.eos_ids), None)
    if start is None:
        raise UsageError("this model cannot begin a text by itself; give one with --text FILE")
    engine = Engine(spec, loaded.weights, loaded.ops, context=context, max_batch=4)
    free = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True)
    asked = [
        engine.submit([start], replace(free, seed=seed + i, max_tokens=context - 1)) for i in range(count)
    ]
    while engine.step():
        pass
    return np.array([r.ids[:context] for r in asked], np.int32)


def meets(v: Verdict, r: Request) -> bool:
    d = v.divergence
    return d.kld.value <= r.max_kld and 100 * abs(d.ratio.value - 1) <= r.max_ppl


def search(
    found: Sequence[Shortlist],
    judge: Callable[[Layers], Verdict],
    r: Request,
    deadline: float,
    near: int | None = None,
) -> tuple[int, Verdict, int]:
    """(the lowest price that keeps to what was asked, what it gave, how many were tried); the highest price
    where none does. Bisection: a higher price misses less. `near` a guess: in steps of 1, 2, 4 … from it.
    """
    low, high, tried, step = 0, len(PRICES) - 1, 0, 1
    best: tuple[int, Verdict] | None = None
    price = TYPICAL if near is None else near
    while low <= high and not (best is not None and _past(deadline)):
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
    r: Request, samples: Samples, layers: Layers, found: Sequence[Shortlist]
) -> list[dict[str, Any]]:
    return [
        _layer_report(p, split(activity(r.pack, i, samples.layer(i)), r.seed)[1], s)
        for i, (p, s) in enumerate(zip(layers, found, strict=True))
    ]


def _layer_report(p: LayerPredictor | None, a: Activity, s: Shortlist) -> Json:
    """On the samples that thresholds were calibrated with. Bytes: of predictor and gate, for a token."""
    share, places = a.asked, np.arange(a.neurons) % a.per_expert
    exact = s.gate * float(share.sum())
    if p is None:
        about: Json = {"kind": "exact", "rank": 0, "hot": a.per_expert, "bytes": exact}
        figures = calibrate.Figures.of(np.ones((a.n, a.neurons), bool), a)
    else:
        figures, costs = calibrate.Figures.of(p.predicted(a.x), a), s.costs(p)
        asked = costs.ask * float(share[places >= p.hot].sum())
        read = costs.first + asked + figures.predicted * a.neurons * s.gate
        rank = 0 if p.first is None else len(p.first)
        about = {"kind": p.kind, "rank": rank, "hot": p.hot, "bytes": read}
    return about | asdict(figures) | {"bytes_exact": exact}
