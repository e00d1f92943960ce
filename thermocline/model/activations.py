"""Activations and expert routing in numpy: the specification of both."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from thermocline.model.spec import PLAIN_ROUTER, Router

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

_erf = np.frompyfunc(math.erf, 1, 1)


def activate(g: F32, kind: str, bound: float, alpha: float = 1.0) -> F32:
    """Return the gate's activation, elementwise. `bound`: "fatrelu"'s threshold, or "swiglu_oai"'s limit."""
    y: F32
    match kind:
        case "silu":
            y = g / (1 + np.exp(-g))
        case "gelu":
            y = (0.5 * g * (1 + _erf(g / math.sqrt(2)).astype(np.float32))).astype(np.float32)
        case "gelu_tanh":
            cubed = g + np.float32(0.044715) * g**3
            y = 0.5 * g * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * cubed))
        case "relu":
            y = np.where(g <= 0, np.float32(0), g)  # a NaN stays a NaN, so that damage shows
        case "fatrelu":  # ProSparse (arXiv 2402.13516): the value passes unchanged above the threshold
            y = np.where(g <= bound, np.float32(0), g)
        case "relu2":  # squared ReLU (arXiv 2109.08668)
            y = np.where(g <= 0, np.float32(0), g * g)
        case "swiglu_oai":  # of gpt-oss; `up_factor` is the other half
            g = np.minimum(g, np.float32(bound))
            y = g / (1 + np.exp(-np.float32(alpha) * g))
        case _:
            raise ValueError(kind)
    return y


def up_factor(u: F32, kind: str, bound: float, up_relu: bool) -> F32:
    """Return what the activation `kind` is multiplied with, of up's values."""
    if kind == "swiglu_oai":
        return np.clip(u, np.float32(-bound), np.float32(bound)) + np.float32(1)
    return np.maximum(u, 0) if up_relu else u


def route(logits: F32, active: int, router: Router = PLAIN_ROUTER, selection_bias: F32 | None = None) -> F32:
    """Return each token's expert weights as `router` has them: those of `active` experts, and 0 elsewhere.

    Logits and weights are [tokens, n_experts]. Of equal scores the first is chosen. A NaN counts as the
    largest, so that damage shows. Where nothing is added to scores, logits decide, which scores follow.
    """
    out = np.zeros_like(logits)
    for row, weights in zip(logits, out, strict=True):
        scores = _scores(row, router.score)
        wanted = row if selection_bias is None and router.groups == 1 else scores
        wanted = wanted if selection_bias is None else wanted + selection_bias
        chosen = _best(_in_best_groups(wanted, router), active)
        if router.weights == "mixed":
            weights[chosen] = _mixed(row, chosen, router)
        else:
            weights[chosen] = _weights(row[chosen], scores[chosen], router)
    return out


def _scores(row: F32, score: str) -> F32:
    """Return the scores of a token's logits [n_experts]."""
    if score == "logits":
        return row
    if score == "sigmoid":
        return (1 / (1 + np.exp(-row))).astype(np.float32)
    p: F32 = np.exp(row - row.max())
    shares: F32 = p / p.sum()
    return shares


def _best(values: F32, n: int) -> I64:
    """Return where the n largest are, of equal ones the first, and NaNs before all."""
    return np.lexsort((-values, ~np.isnan(values)))[:n]


def _in_best_groups(wanted: F32, router: Router) -> F32:
    """Return what experts are chosen by, with -inf for those of other groups than the best."""
    groups = wanted.reshape(router.groups, -1)
    best_two = np.sort(groups, axis=1)[:, -2:]  # NaNs are last
    kept = _best(best_two[:, -1] if router.group_rule == "max" else best_two.sum(axis=1), router.groups_kept)
    left: F32 = np.full_like(groups, -np.inf)
    left[kept] = groups[kept]
    return left.ravel()


def _mixed(row: F32, chosen: I64, router: Router) -> list[np.float32]:
    """Return SparseMixer's weights of the chosen experts, the best first."""
    found: list[np.float32] = []
    for i, e in enumerate(chosen):
        with np.errstate(all="ignore"):
            apart = (row[e] - row) / np.maximum(np.abs(row), row[e])
        near = ~(apart > np.float32(2 * router.epsilon))
        near[chosen[:i]] = False
        found.append(np.float32(router.scale) / np.exp(row[near] - row[e]).sum(dtype=np.float32))
    return found


def _weights(logits: F32, scores: F32, router: Router) -> F32:
    """Return the weights of the chosen experts."""
    epsilon = np.float32(router.epsilon)
    if router.weights == "chosen":
        scores = np.exp(logits - logits.max())
    if router.weights != "score":
        total = scores.sum()
        scores = scores / (np.maximum(total, epsilon) if router.epsilon_floor else total + epsilon)
    return scores * np.float32(router.scale)
