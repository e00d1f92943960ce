"""Pooling: the one vector that a text's last hidden states become.

Sums are in f64, one token after another: a vector does not depend on the chunks that a prompt came in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thermocline.engine.sampler import check_finite
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32

SHORTEST = 1e-12  # as torch.nn.functional.normalize has it


class Pool:
    """The hidden states of one prompt, as they come."""

    def __init__(self, spec: ModelSpec, n_prompt: int) -> None:
        self.whole, self.tokens = spec.pools_all, 0
        self._kind, self._unit, self._n = spec.pooling, spec.unit_vectors, n_prompt
        self._sum = np.zeros(spec.answer_dim)

    def add(self, rows: F32) -> None:
        """Take in the next tokens' rows [tokens, dim]; the only one, unless all are pooled.

        Raises NumericalError.
        """
        for row in rows:
            check_finite(row)
            self._sum += row
            self.tokens += 1
        if not self.whole:
            self.tokens = self._n

    def vector(self) -> F32:
        """Return the vector [`answer_dim`]."""
        v = self._sum / self._n if self._kind == "mean" else self._sum
        return unit(v) if self._unit else v.astype(np.float32)


def unit(v: F32 | NDArray[np.float64]) -> F32:
    """Return a vector divided by its length."""
    wide = v.astype(np.float64)
    length = max(float(np.sqrt((wide * wide).sum())), SHORTEST)
    divided: F32 = (wide / length).astype(np.float32)
    return divided
