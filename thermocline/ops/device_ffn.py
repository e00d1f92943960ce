"""The neurons of FFNs on GPUs: `PartQueue` queues a part's on one device, `SideGpu` those of a further GPU.

A step's residual stream is on the first GPU or in RAM. A further GPU is sent the normed stream through RAM,
computes its part beside the first one and the CPU, and returns one sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thermocline.model.spec import ModelSpec
from thermocline.ops import device_sizes
from thermocline.ops.device import Device
from thermocline.ops.device_layers import DeviceLinear, DeviceNorm, DevicePart, DeviceShared
from thermocline.ops.device_rows import BegunNorm, DeviceRows, Kernels, Operand, Scratch, Vector
from thermocline.ops.device_sizes import Buffer, StepLimits

Seen = Callable[[Device, "NeuronPlace", Tensor], None]  # told the neurons [tokens, n] that a queue computed
Pair = tuple[Tensor, Tensor]  # on the device and, where it has a twin, in RAM
KINDS = {
    "f32": torch.float32,
    "i32": torch.int32,
    "u8": torch.uint8,
    "f64": torch.float64,
    "i64": torch.int64,
}


def pairs_of(device: Device, made: Mapping[str, Buffer]) -> dict[str, Pair]:
    """Return new buffers."""

    def pair(b: Buffer) -> Pair:
        there = device.zeros(b.shape, KINDS[b.kind])
        return there, device.pinned(b.shape, KINDS[b.kind]) if b.here else there

    return {name: pair(b) for name, b in made.items()}


def further_twins(device: Device, made: Mapping[str, Buffer], pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return the buffers that have two twins in RAM, each with the second one."""
    return {
        name: (pairs[name][0], device.pinned(b.shape, KINDS[b.kind]))
        for name, b in made.items()
        if b.here == 2
    }


def parts(n: DeviceNorm) -> tuple[Tensor, Vector, float, bool]:
    """Return a norm as kernels take it."""
    return n.weight, n.bias, n.eps, n.layer


@dataclass(frozen=True)
class NeuronPlace:
    """Neurons of some experts, one expert's behind another's: of each as many, from `first` on."""

    expert: int
    experts: int
    first: int


class PartQueue:
    """Queues the neurons of parts on one device, in buffers of its own."""

    def __init__(
        self, device: Device, kernels: Kernels, spec: ModelSpec, pairs: Mapping[str, Pair], scratch: Scratch
    ) -> None:
        self.device, self.kernels, self.spec, self.scratch = device, kernels, spec, scratch
        self._pairs = pairs
        self._hidden = [pairs[n][0] for n in ("gate", "up") if n in pairs]
        self._opened = pairs["opened"][0] if "opened" in pairs else None
        self._pieces = [pairs[name][0] for name in ("piece 0", "piece 1") if name in pairs]
        self.seen: Seen | None = None
        # Whole experts in RAM, layer after layer: those that this step has sent, that the last one did, and
        # those of which the first is on its way.
        self._sent_now, self._sent_before = list[DevicePart](), list[DevicePart]()
        self._ahead: DevicePart | None = None

    @property
    def counts(self) -> Pair:
        return self._pairs["counts"]

    def begin(self) -> None:
        """Begin to count a step, and what it sends."""
        if self._sent_now:
            self._sent_before, self._sent_now = self._sent_now, []
        self.device.run(self.counts[0].zero_)

    def end(self) -> None:
        """Return a step's counts to RAM."""
        self.device.copy(self.counts[1], self.counts[0])

    def ints(self, name: str, tokens: int, readers: Iterable[DeviceRows], times: int = 1) -> Vector:
        """Return where what these matrices read goes in int8, too: once for all of them, with what makes it.

        None: they read floats. `times`: a token has as many of their inputs, side by side.
        """
        columns = {w.columns for w in readers if w.takes_ints}
        if tokens > device_sizes.FEW or not columns:
            return None
        (n,) = columns
        return self._pairs[f"{name} ints"][0][: device_sizes.quantised_words(tokens, n * times)]

    def times(
        self, y: Tensor, w: DeviceLinear, x: Operand, add: bool = False, begun: BegunNorm | None = None
    ) -> None:
        more = self.scratch, x.ints, x.squares, begun
        self.device.run(self.kernels.matmul, y, w.weight, x.x, w.bias, add, *more)

    def add(
        self,
        p: DevicePart,
        normed: Operand,
        named: Vector,
        weights: Vector,
        y: Tensor,
        add: bool,
        begun: BegunNorm | None = None,
    ) -> None:
        """y (+)= the part's neurons. `named`: bits of the neurons of all parts."""
        if p.whole:
            assert weights is not None, "there is a router"
            self._experts(p, normed, weights, y, add, begun)
        elif not p.bundles:
            self._dense(p, normed, y, add, begun=begun)
        else:
            mine = None if named is None else named[:, p.first // 8 : p.first // 8 + -(-p.neurons // 8)]
            self._bundles(p, NeuronPlace(0, p.experts, p.first), normed, mine, weights, y, add, begun)

    def shared(self, f: DeviceShared, normed: Operand, y: Tensor, add: bool) -> None:
        """y (+)= the FFN of every token."""
        opened = None
        if f.router is not None:
            assert self._opened is not None
            opened = self._opened[: len(normed)]
            self.times(opened, f.router, normed)
        self._dense(f.part, normed, y, add, opened)

    def _dense(
        self,
        p: DevicePart,
        normed: Operand,
        y: Tensor,
        add: bool,
        opened: Vector = None,
        begun: BegunNorm | None = None,
    ) -> None:
        """`opened` [tokens, 1]: a token takes its sigmoid of the answer."""
        n, k, run, a = len(normed), self.kernels, self.device.run, p.activation
        h, up = self._neurons(n, p), None
        ints = self.ints("gate", n, [p.down])
        made = None if opened is not None or p.sub_norm is not None else ints
        if n <= device_sizes.FEW:  # in one launch
            what = (p.gate.weight, p.gate.bias, p.up, normed.x, a.kind, a.bound, a.up_relu)
            more = (None, None, None, self.scratch, None, a.alpha, False, normed.ints, made, normed.squares)
            run(k.gate_up, h, *what, *more)
        else:
            self.times(h, p.gate, normed)
            if p.up is not None:
                up = self._hidden[1][: n * p.neurons].view(n, p.neurons)
                self.times(up, DeviceLinear(p.up, None), normed)
            run(k.activate, h, h, up, a.kind, a.bound, a.up_relu, a.alpha)
        if opened is not None:  # down has no bias
            run(k.open, h, opened)
        if p.sub_norm is not None:
            run(k.norm, h, h, *parts(p.sub_norm), made := ints)
        self.times(y, DeviceLinear(p.down, None), Operand(h, made), add, begun)

    def _bundles(
        self,
        p: DevicePart,
        place: NeuronPlace,
        normed: Operand,
        named: Vector,
        weights: Vector,
        y: Tensor,
        add: bool,
        begun: BegunNorm | None = None,
    ) -> None:
        n, k, run, a = len(normed), self.kernels, self.device.run, p.activation
        if weights is not None and n > device_sizes.FEW:
            assert p.sub_norm is None, "mixtures have none"
            if self.seen is None:
                self._down_pairs(p, self._gate_up_pairs(p, normed, weights), weights, y, add)
                return
            if p.experts > 1:  # all tokens through each: who looks on is shown all of its neurons
                for e in range(p.experts):
                    one, shares = NeuronPlace(e, 1, place.first), weights[:, e : e + 1]
                    self._bundles(p.expert(e), one, normed, None, shares, y, add or e > 0)
                return
        h = self._neurons(n, p)
        what = (p.gate.weight, p.gate.bias, p.up, normed.x, a.kind, a.bound, a.up_relu, named, weights)
        more = (self.counts[0], self.scratch, None, 1.0, False, normed.ints, None, normed.squares)
        run(k.gate_up, h, *what, *more)
        if self.seen is not None:
            self.seen(self.device, place, h)
        if p.sub_norm is not None:
            run(k.norm, h, h, *parts(p.sub_norm))
        run(k.down, y, p.down, h, add, self.scratch, begun)

    def _neurons(self, tokens: int, p: DevicePart) -> Tensor:
        return self._hidden[0][: tokens * p.neurons].view(tokens, p.neurons)

    def _experts(
        self,
        p: DevicePart,
        normed: Operand,
        weights: Tensor,
        y: Tensor,
        add: bool,
        begun: BegunNorm | None = None,
    ) -> None:
        """y (+)= whole experts that some token goes to."""
        last = begun if p.answers is None else None
        self._down(p, self._gate_up(p, normed, weights), weights, y, add, last)
        self._answers(p, weights, y, begun)

    def _gate_up(self, p: DevicePart, normed: Operand, weights: Tensor) -> Operand:
        """Return the neurons of whole experts, for `_down`."""
        n, a = len(normed), p.activation
        if n > device_sizes.FEW:
            return Operand(self._gate_up_pairs(p, normed, weights))
        h, ints = self._neurons(n, p), self.ints("gate", n, [p.down], p.experts)
        what = (p.gate.weight, p.gate.bias, p.up, normed.x, a.kind, a.bound, a.up_relu, None, weights)
        more = (self.counts[0], self.scratch, p.up_bias, a.alpha, p.scales_input)
        self.device.run(self.kernels.gate_up, h, *what, *more, normed.ints, ints, normed.squares)
        return Operand(h, ints)

    def _down(
        self,
        p: DevicePart,
        h: Operand,
        weights: Tensor,
        y: Tensor,
        add: bool,
        begun: BegunNorm | None = None,
    ) -> None:
        if len(y) > device_sizes.FEW:
            self._down_pairs(p, h.x, weights, y, add)
        else:
            more = (weights, add, self.scratch, h.ints, begun)
            self.device.run(self.kernels.down_experts, y, p.down, h.x, *more)

    def _gate_up_pairs(self, p: DevicePart, normed: Operand, weights: Tensor) -> Tensor:
        """Return the neurons of more tokens: of each those of its experts, which are sorted in scratch."""
        a, n, active = p.activation, p.neurons // p.experts, self._active(p)
        pairs = len(normed) * active
        h = self._hidden[0][: pairs * n].view(pairs, n)
        what = (p.gate.weight, p.gate.bias, p.up, normed.x, a.kind, a.bound, a.up_relu, weights, active)
        more = (self.counts[0], self.scratch, p.up_bias, a.alpha, p.scales_input)
        self.device.run(self.kernels.gate_up_pairs, h, *what, *more)
        return h

    def _down_pairs(self, p: DevicePart, h: Tensor, weights: Tensor, y: Tensor, add: bool) -> None:
        how = p.bundles, h, weights, self._active(p), add, self.scratch
        self.device.run(self.kernels.down_pairs, y, p.down, *how)

    def _active(self, p: DevicePart) -> int:
        """Return how many of the part's experts a token goes to at most."""
        return min(p.experts, self.spec.n_experts_active)

    def _answers(self, p: DevicePart, weights: Tensor, y: Tensor, begun: BegunNorm | None = None) -> None:
        if p.answers is not None:
            self.times(y, DeviceLinear(p.answers, None), Operand(weights), True, begun)

    # ---- neurons that lie in RAM

    def send(
        self,
        pinned: Sequence[DevicePart],
        normed: Operand,
        weights: Vector,
        y: Tensor,
        *,
        ahead: bool = False,
    ) -> int:
        """y += the neurons of parts in RAM, one for each expert, piece by piece; -> the up and down rows.

        A piece comes while the one before it is computed. `ahead`: the first expert that comes next, as the
        last step had it, begins to come while the queue goes on to that layer. It may not be recorded.
        """
        if pinned[0].whole:
            assert weights is not None, "there is a router"
            following = self._next(pinned[0]) if ahead else None
            self._send_experts(pinned[0], normed, weights, y, following)
        else:
            pieces = [(e, piece) for e, p in enumerate(pinned) for piece in self._cut(p)]
            sent = self._sent([(piece.gate.weight, piece.down) for _, piece in pieces])
            for (e, piece), (gates, bundles) in zip(pieces, sent, strict=True):
                up = None if piece.up is None else replace(piece.up, data=bundles.data)
                here = replace(piece, gate=replace(piece.gate, weight=gates), up=up, down=bundles)
                shares = None if weights is None else weights[:, e : e + 1]
                self._bundles(here, NeuronPlace(e, 1, piece.first), normed, None, shares, y, True)
        return sum((2 if p.up is not None else 1) * p.neurons for p in pinned)

    def _next(self, p: DevicePart) -> DevicePart | None:
        """Return what the last step sent behind p, if it did as this one does."""
        at = len(self._sent_now)
        self._sent_now.append(p)
        before = self._sent_before[at : at + 2]
        return before[1] if len(before) == 2 and before[0] is p else None

    def _send_experts(
        self, p: DevicePart, normed: Operand, weights: Tensor, y: Tensor, following: DevicePart | None
    ) -> None:
        """y += whole experts in RAM, each in two pieces: its gate and up rows, then its down rows."""
        each = [p.expert(e) for e in range(p.experts)]
        sent = self._sent([piece for x in each for piece in _pieces(x)], 2 if self._ahead is p else 0)
        for e, one in enumerate(each):
            gate, *up = next(sent)
            here = replace(one, gate=replace(one.gate, weight=gate), up=up[0] if up else None)
            shares = weights[:, e : e + 1]
            h = self._gate_up(here, normed, shares)
            (down,) = next(sent)
            self._down(replace(one, down=down), h, shares, y, True)
        if following is not None:  # both buffers are free once all of this is computed
            for i, piece in enumerate(_pieces(following.expert(0))):
                self._come(piece, i)
        self._ahead = following
        self._answers(p, weights, y)

    def _sent(self, pieces: Sequence[Sequence[DeviceRows]], came: int = 0) -> Iterator[list[DeviceRows]]:
        """Yield pieces of what lies in RAM, as they lie here; each comes while the one before is computed.

        `came`: how many are here, or on their way.
        """
        if not came:
            self._come(pieces[0], 0)
        for i, piece in enumerate(pieces):
            self.device.join()
            if came <= i + 1 < len(pieces):
                # To where the piece before this one was: it has been computed by then.
                self._come(pieces[i + 1], i + 1)
            rooms = self._room(piece, i)
            yield [replace(rows, data=room) for rows, room in zip(piece, rooms, strict=True)]

    def _room(self, piece: Sequence[DeviceRows], i: int) -> Iterator[Tensor]:
        """Yield where the rows of piece i go."""
        buffer, at = self._pieces[i % 2], 0
        for rows in piece:
            yield buffer[at : at + rows.rows * rows.stride].view(rows.rows, -1)
            at += rows.rows * rows.stride

    def _come(self, piece: Sequence[DeviceRows], i: int) -> None:
        with self.device.beside():
            for to, source in zip(self._room(piece, i), piece, strict=True):
                self.device.copy(to, source.data)

    def _cut(self, p: DevicePart) -> Iterator[DevicePart]:
        """Cut a part into pieces that a buffer has room for."""
        size = len(self._pieces[0]) // (p.gate.weight.stride + p.down.stride) // 32 * 32
        assert size, "a piece holds no 32 neurons"
        begin = self.spec.ffn_dim - p.neurons  # they are an expert's last
        for first in range(0, p.neurons, size):
            yield replace(p.cut(slice(first, first + size)), first=begin + first)


def _pieces(expert: DevicePart) -> tuple[tuple[DeviceRows, ...], tuple[DeviceRows, ...]]:
    """Return what of a whole expert comes together: gate and up, then down."""
    up = () if expert.up is None else (expert.up,)
    return (expert.gate.weight, *up), (expert.down,)


@dataclass(frozen=True)
class BegunFFN:
    """An FFN of which the CPU and other GPUs compute their parts: what the first one needs for its own."""

    normed: Operand
    norm: DeviceNorm | None  # that made it
    named: Vector  # bits of the neurons to be computed; None: all
    own: Vector  # shares of the first GPU's experts
    cold: Vector  # those of the CPU's
    sends: bool  # the CPU's neurons come here, and it computes nothing


@dataclass(frozen=True)
class Handed:
    """Tensors in RAM that the first GPU hands to another: of a layer's FFN, one row a token."""

    normed: Tensor
    named: Vector
    weights: Vector  # shares of all experts, or of those that the other has whole


class SideGpu:
    """A further GPU: it computes its parts beside the first one."""

    def __init__(self, device: Device, kernels: Kernels, spec: ModelSpec, limits: StepLimits) -> None:
        pairs = pairs_of(device, device_sizes.side_buffers(spec, limits))
        self._normed, self._named = pairs["normed"][0], pairs["named"][0]
        self._weights = pairs["weights"][0] if "weights" in pairs else None
        self._sum = pairs["sum"]
        scratch = Scratch(pairs["scratch"][0], device_sizes.side_sizes(spec, limits))
        self.queue = PartQueue(device, kernels, spec, pairs, scratch)
        self._done: object = None

    @property
    def device(self) -> Device:
        return self.queue.device

    def start(self, p: DevicePart, given: Handed, handed: object) -> None:
        """Queue a part, to begin at the mark `handed`."""
        device, n = self.device, len(given.normed)
        device.after(handed)
        normed, named, weights = self._normed[:n], None, None
        device.copy(normed, given.normed)
        if given.named is not None:
            named = self._named[: given.named.numel()].view(given.named.shape)
            device.copy(named, given.named)
        if given.weights is not None:
            assert self._weights is not None
            weights = self._weights.view(-1)[: given.weights.numel()].view(given.weights.shape)
            device.copy(weights, given.weights)
        self.queue.add(p, Operand(normed), named, weights, self._sum[0][:n], add=False)
        device.copy(self._sum[1][:n], self._sum[0][:n])
        self._done = device.mark()

    def finish(self, first: Device, into: Tensor) -> None:
        """Queue on the first GPU: wait for the sum, and copy it there."""
        first.after(self._done)
        first.copy(into, self._sum[1][: len(into)])
