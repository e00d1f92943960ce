"""Sizes of a model's parts: bytes in memory, bytes that a token reads, weights that it multiplies.

A part goes to one tier as a whole: a layer's attention, its predictor, the head, or any run of an FFN's
neurons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import ALIGN, TensorSpec

I64 = NDArray[np.int64]
ATTENTION_ROLES = ("attention", "mixer", "norm", "router", "shared", "inputs")  # what every token reads
LOOKUP_BYTES = 64 << 10  # read for a row of a table on disk: a pack's block
# A GPU's rows begin at multiples of so many bytes, the most that a thread loads at once. Rows of 9030 bytes
# (q6_k, 11008 columns) were loaded 2 bytes at a time, in 1.9 times the instructions.
GPU_ROW = 16
MATTERS = 0.02  # of a token's weights: less in a format costs too little time to be worth measuring it


@dataclass(frozen=True)
class FormatRead:
    """Bytes that a token reads, and weights that it multiplies, in one format.

    `format` is "" for what is too small for figures of its own: vectors, routers.
    """

    format: str
    bytes: float
    weights: float


Reads = tuple[FormatRead, ...]  # one of each format


def joined(reads: Iterable[FormatRead]) -> Reads:
    """Return the sums by format, in the order in which formats occur."""
    sums: dict[str, FormatRead] = {}
    for r in reads:
        known = sums.get(r.format, FormatRead(r.format, 0, 0))
        sums[r.format] = FormatRead(r.format, known.bytes + r.bytes, known.weights + r.weights)
    return tuple(sums.values())


@dataclass(frozen=True)
class PartSize:
    """The size of one part of a model."""

    bytes: int = 0  # in memory: each tensor from an ALIGN boundary to the next
    reads: Reads = ()  # by a token
    more: int = 0  # bytes that a GPU has between rows

    @property
    def on_gpu(self) -> int:
        """Return its bytes in a GPU's memory."""
        return self.bytes + self.more

    @property
    def read_bytes(self) -> float:
        return sum(r.bytes for r in self.reads)

    @property
    def weights(self) -> float:
        return sum(r.weights for r in self.reads)

    def __add__(self, other: PartSize) -> PartSize:
        reads = joined((*self.reads, *other.reads))
        return PartSize(self.bytes + other.bytes, reads, self.more + other.more)


@dataclass(frozen=True)
class NeuronTensors:
    """The tensors that have a row or a value for each neuron."""

    tensors: tuple[int, ...]  # bytes of each tensor, for all neurons
    on_gpu: tuple[int, ...]  # the same in a GPU's memory
    reads: Reads  # of one neuron

    @property
    def read_bytes(self) -> float:
        return sum(r.bytes for r in self.reads)

    @property
    def weights(self) -> float:
        return sum(r.weights for r in self.reads)


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one layer's parts."""

    attention: PartSize  # with norms, biases, and tensors that are kept but not read
    predictor: PartSize  # zeros if the layer has none
    neurons: int
    gate: NeuronTensors
    bundle: NeuronTensors  # up and down
    # Part of `attention`: it is in RAM, and on a GPU that has attention or neurons.
    router: PartSize = PartSize()
    biases: tuple[int, ...] = ()  # bytes of each tensor of experts' biases, which RAM has of all experts
    routed: float = 1.0  # of its neurons, those of the experts that a token goes to

    def gate_bytes(self, neurons: I64) -> I64:
        return _slices(self.gate.tensors, neurons, self.neurons)

    def bundle_bytes(self, neurons: I64) -> I64:
        return _slices(self.bundle.tensors, neurons, self.neurons)

    def gpu_bytes(self, neurons: I64) -> I64:
        """Return what a GPU has of neurons: all of their rows."""
        return _slices((*self.gate.on_gpu, *self.bundle.on_gpu), neurons, self.neurons)

    def bias_bytes(self, neurons: I64) -> I64:
        """Return what RAM has of neurons of whole experts that are on a GPU or on disk."""
        return _slices(self.biases, neurons, self.neurons)

    @property
    def record_bytes(self) -> int:
        """Return the bytes of one neuron's bundle on disk."""
        return -(-sum(self.bundle.tensors) // max(1, self.neurons))

    @property
    def gate_row_bytes(self) -> int:
        """Return the bytes of one neuron's gate row on disk."""
        return -(-sum(self.gate.tensors) // max(1, self.neurons))


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of all parts of a model."""

    format: str  # of most weights
    embed: PartSize  # a token reads one row; if tied, all as the head. `reads`: what makes layers' inputs
    head: PartSize  # if it is not the embedding
    tied: PartSize  # the embedding as the head; counted once more if the head is on another tier
    layers: tuple[LayerSizes, ...]
    tables: tuple[str, ...] = ()  # on disk; `embed` has what their rows take in memory
    left_bytes: int = 0  # of them, on disk

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats whose speed matters: `format`, and those of some share of a token's weights.

        Of experts those count that a token goes to. Of all of SmallThinker's weights the head, in another
        format, is a fiftieth; of those that a token meets, an eighth.
        """
        of_layers = (
            r
            for x in self.layers
            for r in (*x.attention.reads, *(replace(r, weights=r.weights * x.neurons * x.routed)
                                            for r in (*x.gate.reads, *x.bundle.reads)))
        )  # fmt: skip
        found = joined((*of_layers, *self.head.reads, *self.tied.reads))
        least = MATTERS * sum(r.weights for r in found)
        return tuple(
            dict.fromkeys((self.format, *(r.format for r in found if r.format and r.weights >= least)))
        )

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of all parts in one memory: weights.bin's size, and predictors beside it."""
        total = self.embed.bytes + self.head.bytes
        for x in self.layers:
            all_neurons = np.array(x.neurons)
            total += x.attention.bytes + x.predictor.bytes
            total += int(x.gate_bytes(all_neurons) + x.bundle_bytes(all_neurons))
        return total

    def with_predictors(self, layer_bytes: Sequence[int]) -> ModelSizes:
        """Return the sizes with int8 predictors of so many bytes for each layer."""
        parts = [PartSize(aligned(b), (FormatRead("q8_0", b, b),)) for b in layer_bytes]
        layers = [replace(x, predictor=x.predictor + p) for x, p in zip(self.layers, parts, strict=True)]
        return replace(self, layers=tuple(layers))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def lookup_bytes(stride: int) -> int:
    """Return the memory of a table on disk, by its rows' stride: one row, and what is read around it."""
    return aligned(stride) + max(LOOKUP_BYTES, aligned(stride) + ALIGN)


def _slices(tensors: Sequence[int], neurons: I64, of: int) -> I64:
    """Return the bytes of `neurons` out of `of` in all tensors, each tensor padded on its own."""
    total = np.zeros_like(neurons)
    for nbytes in tensors:
        own = (neurons * nbytes + of - 1) // of
        total = total + (own + ALIGN - 1) // ALIGN * ALIGN
    return total


def sizes_of(spec: ModelSpec, tensor_specs: Mapping[str, TensorSpec], weight_format: str) -> ModelSizes:
    """Return the sizes of a model that has exactly these tensors."""
    by_layer: list[dict[str, TensorSpec]] = [{} for _ in range(spec.n_layers)]
    embed = head = tied = PartSize()
    for name, t in tensor_specs.items():
        if found := re.match(r"layers\.(\d+)\.", name):
            by_layer[int(found[1])][name] = t
        elif name == "embed.weight":
            embed += PartSize(aligned(t.bytes))
            tied = _part(t) if spec.tied_head else tied
        elif t.role == "embed":
            embed += PartSize(aligned(t.bytes))
        elif name.startswith("per_layer."):  # computed by the CPU, before the first layer
            embed += _part(t)
        else:
            head += _part(t)
    layers = tuple(_layer(spec, i, own) for i, own in enumerate(by_layer))
    return ModelSizes(weight_format, embed, head, tied, layers)


def _layer(spec: ModelSpec, i: int, own: Mapping[str, TensorSpec]) -> LayerSizes:
    attention = predictor = router = PartSize()
    gate: list[TensorSpec] = []
    bundle: list[TensorSpec] = []
    experts, active, width = spec.ffn(i)
    neurons = experts * width
    for name, t in own.items():
        if name.endswith((".order", ".activation_count")):
            attention += PartSize(aligned(t.bytes))
        elif t.role == "predictor":
            predictor += PartSize(aligned(t.bytes), joined(_reads(t)))
        elif t.role == "gate":
            gate.append(t)
        elif t.role in ATTENTION_ROLES or (experts <= 1 and name.endswith("down.bias")):
            attention += _part(t)
            router += _part(t) if t.role == "router" and ".shared." not in name else PartSize()
        else:
            bundle.append(t)
    rows = _rows(gate, neurons), _rows(bundle, neurons)
    biases = (t.bytes for t in (*gate, *bundle) if t.vector and experts > 1 and not spec.sparse)
    routed = active / experts if experts > 1 else 1.0
    return LayerSizes(attention, predictor, neurons, *rows, router, tuple(biases), routed)


def gpu_stride(stride: int) -> int:
    """Return the bytes from one row of a matrix to the next on a GPU, by that in a file."""
    return -(-stride // GPU_ROW) * GPU_ROW


def _on_gpu(t: TensorSpec) -> int:
    """Return a tensor's bytes on a GPU."""
    return t.bytes if t.vector else t.rows * gpu_stride(t.stride)


def _part(t: TensorSpec) -> PartSize:
    return PartSize(aligned(t.bytes), joined(_reads(t)), aligned(_on_gpu(t)) - aligned(t.bytes))


def _reads(t: TensorSpec) -> Iterator[FormatRead]:
    """Yield what a dense pass reads of a tensor: rows without the padding between bundle records."""
    for part in t.layout:
        if t.vector:
            yield FormatRead("", 4 * t.columns * t.rows, 0)
        else:
            named = "" if t.role == "router" else part.format
            nbytes = quant.row_bytes(part.format, t.columns)
            yield FormatRead(named, nbytes * t.rows, t.columns * t.rows)


def _rows(tensors: Sequence[TensorSpec], neurons: int) -> NeuronTensors:
    if not neurons:
        return NeuronTensors((), (), ())
    found = joined(r for t in tensors for r in _reads(t))
    each = (FormatRead(r.format, r.bytes / neurons, r.weights / neurons) for r in found)
    return NeuronTensors(tuple(t.bytes for t in tensors), tuple(map(_on_gpu, tensors)), tuple(each))
