"""Activations and expert routing in numpy: the specification of both."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

_erf = np.frompyfunc(math.erf, 1, 1)


def activate(g: F32, kind: str, threshold: float) -> F32:
    """Return the gate's activation, elementwise. `threshold` is for "fatrelu" only."""
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
            y = np.where(g <= threshold, np.float32(0), g)
        case "relu2":  # squared ReLU (arXiv 2109.08668)
            y = np.where(g <= 0, np.float32(0), g * g)
        case _:
            raise ValueError(kind)
    return y


def route(logits: F32, active: int) -> F32:
    """Return each token's expert weights: the softmax of its `active` largest logits, and 0 elsewhere.

    Logits and weights are [tokens, n_experts]. Among equal logits the first is chosen. A NaN counts as the
    largest, so that damage shows.
    """
    out = np.zeros_like(logits)
    for row, weights in zip(logits, out, strict=True):
        chosen = np.lexsort((-row, ~np.isnan(row)))[:active]
        p = np.exp(row[chosen] - row[chosen[0]])
        weights[chosen] = p / p.sum()
    return out
