"""How neurons of a trained model are active, and the columns of the residual stream that make it so.

Attention has columns that nothing else writes to, in blocks. Gates of a layer read one block, the one that
its own attention has just written to. A block serves up to `VISITS` layers. Each adds the same share of what
the block then holds. So at any depth the same share of a gate's variance is new, and early reads cannot know
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
VISITS = 8  # with each the block's deviation grows, to 5 times the first in all


@dataclass(frozen=True)
class SyntheticActivity:
    """The habits of a trained model's neurons. The parts are shares of a gate's variance.

    active     mean share of active neurons
    skew       share of neurons that makes 80 % of the activations; gates' offsets are normal
    moods      part that all gates of a layer share: some tokens need more neurons than others
    attention  part that attention brings, from tokens that it looks at for a while
    newest     share of `attention` that the layer's own attention brings
    lasting    share of heads that look at the same tokens for hundreds of others
    noise      part in so many columns that no predictor of a low rank knows it

    The rest of the variance is in `SyntheticSparsity.rank` columns.
    """

    name: str
    active: float
    skew: float
    moods: float
    attention: float
    newest: float
    lasting: float
    noise: float


def blocks_of(layers: int) -> int:
    """Return how many blocks of columns the attention of so many layers has."""
    return -(-layers // VISITS)


@dataclass(frozen=True)
class AttentionColumns:
    """The blocks of columns that attention alone writes to, layer by layer in turn.

    `share`: of a block's variance, what a layer adds. `top`: the deviation that the last layers leave.
    """

    layers: int
    share: float
    top: float

    @property
    def blocks(self) -> int:
        return blocks_of(self.layers)

    def block(self, layer: int) -> int:
        """Return the block that a layer's attention writes to."""
        return layer % self.blocks

    def deviations(self, layers: int) -> F64:
        """Return each block's deviation after so many layers [blocks]. Before all, it is the embeddings'."""
        to_come = [len(range(b, self.layers, self.blocks)) for b in range(self.blocks)]
        missing = [n - len(range(b, layers, self.blocks)) for b, n in enumerate(to_come)]
        deviations: F64 = self.top * (1 - self.share) ** (np.array(missing, np.float64) / 2)
        return deviations

    def added(self, layer: int) -> float:
        """Return the deviation of what a layer's attention adds."""
        return float(self.deviations(layer + 1)[self.block(layer)]) * math.sqrt(self.share)
