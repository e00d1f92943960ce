"""`Placement`: the one answer to "where does it lie".

The planner makes it, `plan --json` prints it, a plan file stores it, a session loads it and `run --json`
repeats it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from thermocline.files.bounded import Json
from thermocline.ops.interface import CPU

DISK = "disk"
# The tensors of a layer that lie with its attention: q, k and v as one, or apart; those of latents; and what
# every token takes beside its experts.
ATTENTION = tuple(f"{name}.weight" for name in (
    "qkv", "q", "k", "v", "attn_out", "attn_gate", "q_a", "q_b", "kv_a", "k_b", "v_b",
    "shared.gate", "shared.up", "shared.down", "shared.router", "per_layer.gate", "per_layer.down",
))  # fmt: skip


def gpu(index: int) -> str:
    """Return the name of a session's GPU: the first that it uses is "gpu:0"."""
    return f"gpu:{index}"


@dataclass(frozen=True)
class NeuronRange:
    """Consecutive neurons of an FFN on one device; of a mixture as many of each expert, or whole ones."""

    device: str  # CPU, or `gpu(index)`
    neurons: int  # of one expert
    # Up and down rows in memory at a time, of each expert, where the others are on disk; None: all of them.
    slots: tuple[int, ...] | None = None
    gate_slots: tuple[int, ...] | None = None  # likewise of gate rows
    experts: int | None = None  # whole ones in memory at a time, where the others are on disk; None: all
    # Rows of gate and up, and of down, in memory, where the others come in a stream; None: all of them.
    held: tuple[int, ...] | None = None
    whole: tuple[int, ...] | None = None  # the experts that are here, ascending; None: `neurons` of each


@dataclass(frozen=True)
class LayerPlacement:
    """The devices of one layer. Ranges follow each other, hottest first, and add up to the FFN's neurons.

    Where experts are whole, each is in one range.
    """

    attention: str  # a device; its keys and values lie there too
    predictor: str | None  # a device
    ranges: tuple[NeuronRange, ...]

    def neurons(self, device: str) -> int:
        """Return how many neurons of each expert are on a device."""
        return sum(r.neurons for r in self.ranges if r.device == device)

    @property
    def on_gpus(self) -> int:
        """Neurons of each expert that are on any GPU: the hottest."""
        return sum(r.neurons for r in self.ranges if r.device != CPU and r.whole is None)

    @property
    def whole(self) -> tuple[int, ...]:
        """The experts that are on any GPU whole, ascending."""
        return tuple(sorted(e for r in self.ranges if r.device != CPU for e in r.whole or ()))

    @property
    def rest(self) -> NeuronRange | None:
        """The range on the CPU, the coldest neurons; None where all are on GPUs."""
        return next((r for r in self.ranges if r.device == CPU), None)


@dataclass(frozen=True)
class Placement:
    """The devices of a model's layers and head, and the bytes that they take of each memory."""

    layers: tuple[LayerPlacement, ...]
    head: str  # a device
    context: int = 0  # tokens of one request
    kv_tokens: int = 0  # positions of the cache, for all requests
    bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # device or DISK -> part -> bytes
    tables: tuple[str, ...] = ()  # on disk: a row of each is read for a token

    @property
    def from_disk(self) -> bool:
        """Whether weights of FFNs are read from disk when a token needs them."""
        ranges = [r for x in self.layers for r in x.ranges]
        return any(x is not None for r in ranges for x in (r.slots, r.experts, r.held))

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs that have a part of it."""
        return tuple(sorted(name for name in self.bytes if name not in (CPU, DISK)))

    def used(self, device: str) -> int:
        """Return the bytes that are taken of a device's memory, or left on disk."""
        return sum(self.bytes.get(device, {}).values())

    @property
    def ram_bytes(self) -> int:
        """Return the bytes of RAM that are ever taken."""
        return self.used(CPU)

    def json(self) -> Json:
        """Return it as `plan --json` and `run --json` print it (docs/reference/keys.toml)."""
        return asdict(self)
