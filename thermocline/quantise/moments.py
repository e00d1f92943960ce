"""Second moments of what a model's matrices are multiplied with: the importance of their columns.

An input is named by what reads it: `layers.I.qkv`, `layers.I.attn_out`, `layers.I.ffn` (gate and up),
`layers.I.down`, `head`; of a recurrent layer `layers.I.mixer` and `layers.I.mixer_out`. In a mixture,
`ffn` and `down` have moments for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

HEAD = "head"


@dataclass
class InputMoments:
    """Sums over the rows seen of one input."""

    rows: int
    squares: F64  # [columns]
    products: list[F32] = field(default_factory=list)  # of columns within each window: [columns, columns]

    @staticmethod
    def none(columns: int, window: int = 0) -> InputMoments:
        """Return empty sums. `window`: columns whose products are summed; 0: squares alone."""
        sizes = [min(window, columns - at) for at in range(0, columns, window)] if window else []
        products = [np.zeros((n, n), np.float32) for n in sizes]
        return InputMoments(0, np.zeros(columns), products)

    def add(self, x: F32) -> None:
        """Add rows [rows, columns]."""
        self.rows += len(x)
        self.squares += np.einsum("rc,rc->c", x, x, dtype=np.float64)
        at = 0
        for sums in self.products:
            part = x[:, at : at + len(sums)]
            sums += part.T @ part
            at += len(sums)

    @property
    def importance(self) -> F32:
        """The mean square of each column; 1 where no row was seen."""
        if not self.rows:
            return np.ones(len(self.squares), np.float32)
        return (self.squares / self.rows).astype(np.float32)


Moments = dict[str, list[InputMoments]]  # by input, for each expert


def reader_of(tensor: str) -> str | None:
    """Return the input that a packed matrix is multiplied with; None for tables and other tensors."""
    name = tensor.removesuffix(".weight")
    if name in ("head", "embed"):  # the embedding, if it is the head too
        return HEAD
    layer, _, part = name.rpartition(".")
    if layer.endswith(".mixer"):
        into = part in ("in", "qkv", "z", "beta", "alpha")
        return layer if into else f"{layer}_out" if part == "out" else None
    known = {
        "q": "qkv",
        "k": "qkv",
        "v": "qkv",
        "qkv": "qkv",
        "q_a": "qkv",
        "kv_a": "qkv",
        "attn_out": "attn_out",
        "gate": "ffn",
        "up": "ffn",
    }
    known["down"] = "down"
    return f"{layer}.{known[part]}" if layer.startswith("layers.") and part in known else None
