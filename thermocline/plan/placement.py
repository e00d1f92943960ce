"""`Placement`: the one answer to "where does it lie".

The planner makes it, `plan --json` prints it, a plan file stores it, a session loads it and `run --json`
repeats it.
"""

from __future__ import annotations

from dataclasses import dataclass

CPU = "cpu"


def gpu(index: int) -> str:
    """Return the name of a session's GPU: the first that it uses is "gpu:0"."""
    return f"gpu:{index}"


@dataclass(frozen=True)
class NeuronRange:
    """Consecutive neurons of a layer's FFN on one device; of a mixture, as many of each expert."""

    device: str  # CPU, or `gpu(index)`
    neurons: int  # of one expert


@dataclass(frozen=True)
class LayerPlacement:
    """Where one layer is. The ranges follow each other, hottest first, and add up to the FFN's neurons."""

    attention: str  # a device; its keys and values lie there too
    predictor: str | None  # a device
    ranges: tuple[NeuronRange, ...]

    def neurons(self, device: str) -> int:
        """Return how many neurons of each expert are on a device."""
        return sum(r.neurons for r in self.ranges if r.device == device)


@dataclass(frozen=True)
class Placement:
    """Where every layer of a model and its head are."""

    layers: tuple[LayerPlacement, ...]
    head: str  # a device
