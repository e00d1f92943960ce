"""Predictors that need no training: a truncated SVD of the gate in its inputs' own directions, and its signs.

Must not know packs, files or thresholds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thermocline.ops.interface import F32

U8 = NDArray[np.uint8]

SHRINK = 1e-3  # of the inputs' mean variance, added in all directions: samples do not know them all
EXTRA, ROUNDS = 32, 4  # of the randomised SVD: directions too many, rounds of power iteration


def svd(gate: F32, x: F32, rank: int, seed: int) -> tuple[F32, F32]:
    """(first [rank, dim], second [neurons, rank]): second @ first @ x is as near to gate @ x as rank allows,
    in the mean over inputs distributed as x [n, dim]. Cut after any rank, it is the best of that rank.

    With covariance C = L L', the best rows are those that the leading left singular vectors U of gate @ L
    span: U U' gate (a whitened SVD). Found by subspace iteration (arXiv 0909.4061).
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
    # Of a tall matrix only the left vectors are wanted: those of its small Gram matrix, on its own basis.
    basis, small = np.linalg.qr(gate @ (root @ draws))
    u = np.linalg.eigh(small @ small.T)[1][:, ::-1]
    second = np.ascontiguousarray(basis @ u[:, :rank])
    first = second.T @ gate
    norm = np.linalg.norm(first, axis=1)[:, None]
    norm[norm == 0] = 1
    return first / norm, second * norm.T  # rows of one size: int8 inputs share a scale


def signs(gate: F32) -> U8:
    """[neurons, ceil(dim / 8)]: is each weight above 0, the first in the lowest bit."""
    return np.packbits(gate > 0, axis=1, bitorder="little")
