"""How a model is computed, as its user says it: which neurons, types of keys and values, what is kept.

numpy is not imported: commands name the choices before they load anything. What the bytes of a page of keys
or values mean: `csrc/kernels/kernels.h`, and in numpy `ops.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass

from thermocline.errors import UsageError
from thermocline.model.formats import FORMATS

# Neurons of an FFN that a step computes: all that may matter ("exact": those whose gate is not zero, the same
# answer); of these, those that a predictor names; all. Each with its number in the native core.
SPARSITIES = {"exact": 1, "predict": 2, "off": 0}

# Types of keys and values, each with its number in the native core. Those in blocks are formats of weights;
# they are rotated before they are quantised.
CACHE_TYPES = {"f16": 0, "q8_0": 1, "q4_0": 2}


@dataclass(frozen=True)
class CacheTypes:
    """The type of the keys and that of the values."""

    k: str = "f16"
    v: str = "f16"

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"{self.k} keys, {self.v} values"

    @property
    def quantised(self) -> bool:
        return (self.k, self.v) != ("f16", "f16")

    def head_bytes(self, head_dim: int, latent: bool = False) -> int:
        """Return the bytes of one position's key and value in one head; a latent is both."""
        return sum(row_bytes(type, head_dim) for type in ((self.k,) if latent else (self.k, self.v)))

    def check(self, head_dim: int, latent: bool = False) -> None:
        """Raise UsageError where heads are no whole number of blocks, and for quantised latents."""
        if latent and self.quantised:
            raise UsageError(f"{self} of a model with latent attention are not supported: use f16")
        for name, type in (("keys", self.k), ("values", self.v)):
            if head_dim % FORMATS[type].block:
                raise UsageError(
                    f"{name} in {type} need heads of a multiple of {FORMATS[type].block} elements, and this "
                    f"model's have {head_dim}; use f16"
                )


PLAIN = CacheTypes()


@dataclass(frozen=True)
class PromptCacheLimits:
    """Bounds of a prompt cache: bytes of RAM, and a directory (None: none) with bytes of disk."""

    ram_bytes: int = 0
    directory: str | None = None
    disk_bytes: int = 0


NO_PROMPT_CACHE = PromptCacheLimits()


def row_bytes(type: str, head_dim: int) -> int:
    """Return the bytes of a key, or a value, of one head."""
    f = FORMATS[type]
    return head_dim // f.block * f.block_bytes
