"""Bring to RAM what the neurons of FFNs become in a step on GPUs and the CPU.

A layer's values are looked at while the next one is computed. Such steps are queued anew, not recorded: each
layer is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
from torch import Tensor

from thermocline.model.spec import ModelSpec
from thermocline.ops import device_sizes
from thermocline.ops.device_ffn import KINDS, NeuronPlace
from thermocline.ops.interface import F32, LayerActivations

if TYPE_CHECKING:
    from thermocline.ops.device import Device, Task


@dataclass
class _Room:
    """A buffer that a layer's values come to: a piece for each call that computes some of them."""

    values: Tensor  # flat
    h: Tensor
    shares: Tensor | None = None  # [tokens, experts]
    tokens: int = 0
    index: int = 0
    used: int = 0
    mark: object = None  # reached once all of it is there; None: nothing is on its way
    routed: bool = False
    parts: list[tuple[NeuronPlace, Tensor, bool]] = field(
        default_factory=list
    )  # (where, values, times shares)

    def begin(self, tokens: int, index: int) -> None:
        self.tokens, self.index, self.used, self.mark, self.routed = tokens, index, 0, None, False
        self.parts.clear()

    def take(self, place: NeuronPlace, width: int, shared: bool) -> Tensor:
        """Return [tokens, width] to be written to."""
        end = self.used + self.tokens * width
        made, self.used = self.values[self.used : end].view(self.tokens, width), end
        self.parts.append((place, made, shared))
        return made


class NeuronWatch:
    """Gathers the neurons of layer after layer, in two buffers that take turns."""

    def __init__(
        self, device: Device, spec: ModelSpec, tokens: int, look: Callable[[LayerActivations], None]
    ) -> None:
        """`tokens` of a step at most. `look` is called for each layer, in their order."""
        self._device, self._spec, self._look = device, spec, look
        sizes = device_sizes.watch_buffers(spec, tokens)
        self._rooms = [
            _Room(**{name: device.pinned(b.shape, KINDS[b.kind]) for name, b in sizes.items()})
            for _ in range(2)
        ]
        self._layers = 0

    def begin_step(self) -> None:
        """Forget what a step left that was given up."""
        self._layers = 0
        for room in self._rooms:
            room.mark = None

    @property
    def _now(self) -> _Room:
        return self._rooms[self._layers % 2]

    def begin(self, h: Tensor) -> None:
        """Begin a layer, whose FFN reads h [tokens, dim] on the device."""
        self._now.begin(len(h), self._layers)
        self._device.copy(self._now.h[: len(h)], h)

    def routed(self, shares: Tensor) -> None:
        """Take the shares of experts [tokens, experts], on the device."""
        assert self._now.shares is not None
        self._device.copy(self._now.shares[: len(shares)], shares)
        self._now.routed = True

    def computed(self, device: Device, place: NeuronPlace, values: Tensor, shared: bool) -> None:
        """Bring what a device's present queue has computed. `shared`: times the experts' shares."""
        device.copy(self._now.take(place, values.shape[1], shared), values)

    def on_cpu(self, width: int) -> F32:
        """Return where a task of the CPU's writes its neurons [tokens, width]: each expert's last ones."""
        s = self._spec
        place = NeuronPlace(0, s.n_experts, s.ffn_dim - width // s.n_experts)
        return cast("F32", self._now.take(place, width, False).numpy())

    def end(self, tasks: Sequence[Task]) -> None:
        """End a layer, all of which is queued, and look at the one before it. `tasks` of the step so far."""
        self._now.mark = self._device.mark()
        self._layers += 1
        self._seen(self._now, tasks)

    def end_step(self) -> None:
        """Look at the last layer, which was waited for."""
        self._seen(self._rooms[(self._layers + 1) % 2], ())

    def _seen(self, room: _Room, tasks: Sequence[Task]) -> None:
        if room.mark is None:
            return
        self._device.wait(tasks, room.mark)
        room.mark = None
        self._look(LayerActivations(room.index, room.h[: room.tokens].numpy(), self._joined(room)))

    def _joined(self, room: _Room) -> F32:
        experts, n = self._spec.n_experts, room.tokens
        made = np.zeros((n, experts, self._spec.ffn_dim), np.float32)
        shares = None
        if room.routed and room.shares is not None:
            given = room.shares[:n].numpy()
            shares = np.where(given == 0, np.float32(1), given)[:, :, None]
        for place, values, shared in room.parts:
            each = values.numpy().reshape(n, place.experts, -1)
            which = slice(place.expert, place.expert + place.experts)
            if shared and shares is not None:
                each = each / shares[:, which]
            made[:, which, place.first : place.first + each.shape[2]] = each
        return made.reshape(n, -1)
