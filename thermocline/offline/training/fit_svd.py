"""Predictors that need no training: a whitened, truncated SVD of the gate, and the gate's signs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thermocline.ops.interface import F32

U8 = NDArray[np.uint8]

SHRINK = 1e-3  # share of the mean variance that is added in all directions: samples do not span them all
EXTRA, ROUNDS = 32, 4  # of the randomised SVD: extra directions, and rounds of power iteration


def svd(gate: F32, x: F32, rank: int, seed: int) -> tuple[F32, F32]:
    """Return (first [rank, dim], second [neurons, rank]) such that second @ first @ x approximates gate @ x.

    The approximation is the best of its rank in the mean over inputs distributed like x [n, dim]. The first
    k directions are the best of rank k. With the inputs' covariance C = L L', it is U U' gate, where U are
    the leading left singular vectors of gate @ L (a whitened SVD). Subspace iteration finds them (arXiv
    0909.4061).
    """
    dim = gate.shape[1]
    rank = min(rank, *gate.shape)
    covariance = x.T.astype(np.float64) @ x / len(x)
    covariance[np.diag_indices(dim)] += SHRINK * np.trace(covariance) / dim + 1e-20
    root = np.linalg.cholesky(covariance).astype(np.float32)
    width = min(rank + EXTRA, *gate.shape)
    draws = np.random.default_rng(seed).standard_normal((dim, width), dtype=np.float32)
    for _ in range(ROUNDS):
        basis = np.linalg.qr(gate @ (root @ draws))[0]  # [neurons, width]
        draws = np.linalg.qr(root.T @ (gate.T @ basis))[0]
    # The left vectors of a tall matrix are those of its small Gram matrix, in its own basis.
    basis, small = np.linalg.qr(gate @ (root @ draws))
    u = np.linalg.eigh(small @ small.T)[1][:, ::-1]
    second = np.ascontiguousarray(basis @ u[:, :rank])
    first = second.T @ gate
    norm = np.linalg.norm(first, axis=1)[:, None]
    norm[norm == 0] = 1
    return first / norm, second * norm.T  # rows of one size: int8 inputs share a scale


def signs(gate: F32) -> U8:
    """Return whether each weight of the gate is above 0, as bits [neurons, ceil(dim / 8)], lowest first."""
    return np.packbits(gate > 0, axis=1, bitorder="little")
