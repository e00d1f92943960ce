"""The states of recurrent layers: slots of them, and which text each belongs to.

It owns the states of every recurrent layer, and counts the holders of each slot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from thermocline.engine.named_places import NamedPlaces
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import F32, I32, U8

CHECKPOINTS = 4  # slots beside those of running sequences
CHECKPOINT_TOKENS = 2048  # a prompt cache keeps a state after each so many tokens of a prompt, and its last
StateStorage = Callable[[int, int, int], F32]  # allocates a layer's slots, each of so many floats
NONE = -1  # no slot: the state before the first token, zeros


def slots_for(sequences: int) -> int:
    """Return the slots for so many running sequences: each reads a state and writes its next one."""
    return 2 * sequences + CHECKPOINTS


def layer_bytes(spec: ModelSpec, layer: int, sequences: int) -> int:
    """Return the bytes of one layer's states in a pool for so many sequences."""
    return 4 * slots_for(sequences) * spec.state_floats(layer)


def reserved_bytes(spec: ModelSpec, sequences: int) -> int:
    """Return the bytes of a pool for so many sequences; 0 where no layer is recurrent."""
    return sum(layer_bytes(spec, i, sequences) for i in range(spec.n_layers))


def zeros(*shape: int) -> U8:
    """Return bytes that begin at a cache line. The system backs them with memory when they are written."""
    size = int(np.prod(shape, dtype=np.int64))
    raw: U8 = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)


def states_in_ram(layer: int, slots: int, floats: int) -> F32:
    """Allocate the states of a layer."""
    return zeros(slots, 4 * floats).view(np.float32)


def _slots(spec: ModelSpec, n: int, storage: StateStorage = states_in_ram) -> dict[int, F32]:
    """Allocate n states of each recurrent layer."""
    sizes = ((i, spec.state_floats(i)) for i in range(spec.n_layers))
    return {i: storage(i, n, floats) for i, floats in sizes if floats}


class StatePool(NamedPlaces):
    """Slots, each with the states of all layers after some text. A state is never changed, only followed.

    A step reads a sequence's slot and writes another, which it keeps instead. A step that fails has changed
    nothing. A sequence holds two slots at most: its own, and the one that its next step writes.
    """

    def __init__(
        self, spec: ModelSpec, sequences: int, storage: StateStorage = states_in_ram, *, kept: int = 0
    ) -> None:
        """Make slots for so many running sequences, and `kept` more for the prompt cache."""
        self.n_slots, self.kept = slots_for(sequences) + kept, kept
        super().__init__(self.n_slots)
        self.layers = _slots(spec, self.n_slots, storage)
        self._passing: set[int] = set()  # states in the midst of a prompt, which go before others

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.layers.values())

    def spares(self, slots: int) -> bool:
        """Return whether so many slots can be taken, and half of the checkpoints stay."""
        return self.available >= slots + CHECKPOINTS // 2

    def next_checkpoint(self, computed: int) -> int:
        """Return the first position after `computed` whose state a prompt cache keeps."""
        return (computed // CHECKPOINT_TOKENS + 1) * CHECKPOINT_TOKENS

    def hold(self, name: bytes) -> int:
        """Hold the state after the text of this name. It is in passing no more."""
        slot = super().hold(name)
        self._passing.discard(slot)
        return slot

    def publish(self, slot: int, name: bytes, passing: bool = False) -> bool:
        """Name a slot. Return False if there is an equal one: then this one stays private."""
        published = super().publish(slot, name)
        if published and passing:
            self._passing.add(slot)
        return published

    def forget(self, name: bytes) -> None:
        """Take the name from its slot, if there is one: it is found no more."""
        slot = self._by_name.get(name)
        if slot is None:
            return
        self._unname(slot)
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)

    def release(self, slot: int) -> None:
        if slot == NONE:
            return
        super().release(slot)
        if slot in self._passing:
            self.let_go_first(slot)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._passing <= self._name.keys(), "a state in passing without a name"

    def _unname(self, slot: int) -> None:
        super()._unname(slot)
        self._passing.discard(slot)


class StateTurns:
    """The states of sequences that are run step by step without an engine, and all begin together."""

    def __init__(self, spec: ModelSpec, sequences: int = 1, storage: StateStorage = states_in_ram) -> None:
        self.layers = _slots(spec, 2 * sequences, storage)
        self._sequences, self._turn = sequences, 0

    def step(self, sequences: int, *, first: bool) -> tuple[I32, I32] | tuple[None, None]:
        """Return `Batch.state_from` and `state_to` of the next step of the first so many sequences."""
        if not self.layers:
            return None, None
        own = np.arange(sequences, dtype=np.int32)
        read, self._turn = own + self._turn * self._sequences, 1 - self._turn
        return np.full_like(own, NONE) if first else read, own + self._turn * self._sequences
