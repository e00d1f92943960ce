"""One layer's fits: predictors of each kind, at the ranks that pay, offered to the layer's shortlist."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from thermocline.model import quant
from thermocline.model.activations import route
from thermocline.offline.training import calibrate, fit_mlp, fit_svd
from thermocline.offline.training.calibrate import PRICES, LayerSamples
from thermocline.offline.training.shortlist import Shortlist
from thermocline.pack.activity_profile import Rows
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import LayerPredictor, stored_bytes

if TYPE_CHECKING:
    from thermocline.model.quant import U8
    from thermocline.model.spec import ModelSpec
    from thermocline.ops.interface import F32

ROUTER_PARTS = ("weight", "bias", "selection_bias")
CHEAPEST_FIRST = ("sign", "svd", "mlp")  # by the time to fit them
BLOCK = 32  # ranks are whole blocks of int8 weights
SVD_RANK = 256  # the first SVD's rank; a wider one is computed only if ranks up to this still gain
RANK_SHARE = 0.25  # the first rank, as a share of the neurons that are active for a token


class _Over(Exception):
    """Raised if the time for a fit is over."""


def _unless(over: Callable[[], bool]) -> None:
    if over():
        raise _Over


@dataclass(frozen=True)
class LayerFit:
    """The input of one layer's fits."""

    made: Shortlist  # takes the fitted predictors
    gate: F32  # [neurons, dim]
    fitted: LayerSamples  # samples to fit to
    kept: LayerSamples  # samples to calibrate with
    seed: int
    threads: int
    late: Callable[[], bool]  # whether ranks may not grow any more
    over: Callable[[], bool]  # whether the time for fits is over
    device: str = "cpu"  # torch's name of what trains


def check_installed(kinds: Sequence[str]) -> None:
    """Raise Unsupported if a kind is trained, and what trains it is missing here."""
    if "mlp" in kinds:
        fit_mlp.require()


def fit_layer(kinds: Sequence[str], f: LayerFit) -> None:
    """Fit predictors of these kinds and offer them, the cheapest ones first, as long as there is time."""
    for kind in sorted(kinds, key=CHEAPEST_FIRST.index):
        with contextlib.suppress(_Over):
            _fit(kind, f)


def _fit(kind: str, f: LayerFit) -> None:
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
            train_rank = partial(
                fit_mlp.fit, f.fitted, seed=f.seed, threads=f.threads, step=step, device=f.device
            )
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


def predictor_bytes(spec: ModelSpec, kinds: Sequence[str]) -> int:
    """Return about what a model's predictors take, if each layer has the largest of these kinds."""
    sizes = (stored_bytes(spec, kind, min(SVD_RANK, spec.dim)) for kind in kinds)
    each = max(first + ask * spec.n_experts * spec.ffn_dim for first, ask in sizes)
    return len(spec.ffn_layers) * each


def fit_bytes(spec: ModelSpec, n: int, active: float) -> int:
    """Return about what the fits of a layer take, to `n` samples of which a share `active` is not zero."""
    neurons, dim = spec.n_experts * spec.ffn_dim, spec.dim
    entries = int(n * active * neurons)
    samples = n * dim * (2 + 2 * 4) + entries * (6 + 2 * 12 + 36 // 2)  # as read; in f32, in halves; sorted
    rank = max(SVD_RANK, dim // 4)
    fits = 2 * 4 * neurons * dim + 20 * dim * dim + 5 * 4 * rank * (neurons + dim)
    curves = 8 * len(PRICES) * 4 * neurons + n * 4 * (calibrate.SCORED + rank)
    return samples + fits + curves


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


def gate_rows(pack: Pack, layer: int) -> F32:
    """Return a layer's gate as f32 [n_experts * ffn_dim, dim]."""
    name = f"layers.{layer}.gate.weight"
    info = pack.tensors[name]
    used = quant.row_bytes(info.format, pack.spec.dim)
    rows = read_tensor(pack, name).reshape(-1, info.stride)[:, :used]
    return quant.decode(info.format, np.ascontiguousarray(rows), pack.spec.dim)
