"""Feedback of rounding errors: an error in one column of a matrix is evened out by the columns after it.

For inputs with the covariance H, a row's error e costs e'He. Columns are rounded in order, and the best
answer of the later columns to an error has a closed form: with U'U = inverse(H) and U upper triangular,
column j's error, divided by U[j, j], times U[j, k] is taken off column k (GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thermocline.quantise.moments import InputMoments

F32 = NDArray[np.float32]

WINDOW = 1024  # columns whose covariances are summed up, by default
# Added to the diagonal of a covariance, as a share of its mean: texts that were not seen differ.
DAMPING = 0.02


@dataclass(frozen=True)
class Feedback:
    """The U of each window of columns; all windows are equally long but the last."""

    matrices: tuple[F32, ...]

    @staticmethod
    def of(moments: InputMoments) -> Feedback | None:
        """Return the feedback for a matrix with these inputs; None if their products were not summed up."""
        if not moments.products or not moments.rows:
            return None
        return Feedback(tuple(_upper(p) for p in moments.products))

    def upper(self, block: int) -> F32 | None:
        """Return all U [windows, window, window], or None where windows are no whole number of blocks."""
        window = len(self.matrices[0])
        if window % block:
            return None
        out = np.zeros((len(self.matrices), window, window), np.float32)
        for into, u in zip(out, self.matrices, strict=True):
            into[: len(u), : len(u)] = u
        return out

    def windows(self) -> Iterator[tuple[int, F32]]:
        """Yield (first column, U) of each window."""
        at = 0
        for u in self.matrices:
            yield at, u
            at += len(u)


def _upper(products: F32) -> F32:
    """Return U. H = R R' with R upper triangular has the inverse (inverse R)' (inverse R)."""
    h = products.astype(np.float64)
    h[np.diag_indices_from(h)] += DAMPING * max(float(np.diag(h).mean()), 1e-30)
    r = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    return np.triu(np.linalg.inv(r)).astype(np.float32)
