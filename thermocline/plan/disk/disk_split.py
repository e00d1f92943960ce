"""A budget of memory divided to the byte among a model's parts: what is resident, how many neurons fit.

`run` and `plan` ask the same function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from thermocline import _native
from thermocline.errors import OutOfBudget
from thermocline.model.sizes import aligned, lookup_bytes
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import ALIGN, TensorInfo
from thermocline.ops.interface import CPU
from thermocline.plan.cost import EXCESS, PREDICT_TOKENS, named
from thermocline.plan.disk.cache_split import F64, OPERATION_BYTES, Fetch, NeuronRows, Share, fetch, split
from thermocline.plan.hotness import Hotness
from thermocline.plan.memory import (
    gib_up,
    layer_shape,
    size_down,
    size_up,
)
from thermocline.plan.placement import ATTENTION, DISK, LayerPlacement, NeuronRange, Placement

TABLES = ("embed.weight", "pos_embed.weight", "per_layer.embed.weight")
DEPTH, BUFFER_BYTES = 128, 128 << 10  # reads in flight, and of how many bytes


@dataclass(frozen=True)
class Contents:
    """The weights that memory is divided for: a pack's, or those of a shape that could be one.

    A GPU's part is left out: `tensors` lacks those that lie there whole, and the first `on_gpu` neurons of
    each layer's experts lie there too.
    """

    spec: ModelSpec
    tensors: Mapping[str, TensorInfo]
    predictor_bytes: int | None  # None: there are none
    sparsity: str
    hotness: Hotness
    on_gpu: tuple[int, ...] = ()

    @property
    def guesses(self) -> bool:
        return self.sparsity == "predict" and self.predictor_bytes is not None

    def first(self, layer: int) -> int:
        """Return the first neuron of every expert that is not on a GPU."""
        return self.on_gpu[layer] if self.on_gpu else 0

    def rows(self, kind: str, batch: int = 1) -> list[NeuronRows]:
        """`bundle` or `gate.weight`, layer by layer and expert by expert, as a step of `batch` tokens needs
        them.
        """
        found = []
        for i in range(self.spec.n_layers):
            held, first = self.tensors.get(f"layers.{i}.{kind}"), self.first(i)
            for need in np.split(self.hotness.at(i, batch), self.spec.n_experts):
                asked = max(self.spec.routed(batch), float(need[0]))  # some experts are chosen more often
                needed = self._needed(kind, batch, need, asked)[first:]
                found.append(NeuronRows(0 if held is None else held.stride, needed, asked))
        return found

    def of_kind(self, kind: str) -> dict[int, TensorInfo]:
        """By layer; of layers whose neurons are all on a GPU there is none."""
        named = ((i, f"layers.{i}.{kind}") for i in range(self.spec.n_layers))
        return {i: self.tensors[name] for i, name in named if name in self.tensors}

    def held(self, name: str) -> list[tuple[int, int]]:
        """From byte to byte of weights.bin, what of a tensor is not on a GPU."""
        t = self.tensors[name]
        if not name.endswith((".gate.weight", ".bundle")) or not self.on_gpu:
            return [(t.offset, t.offset + t.bytes)]
        n, first = self.spec.ffn_dim, self.first(int(name.split(".")[1]))
        starts = (t.offset + e * n * t.stride for e in range(self.spec.n_experts))
        return [(at + first * t.stride, at + n * t.stride) for at in starts]

    def held_bytes(self, name: str) -> int:
        return sum(end - begin for begin, end in self.held(name))

    def _needed(self, kind: str, batch: int, active: F64, asked: float) -> F64:
        if self.sparsity == "off" or (kind != "bundle" and batch > PREDICT_TOKENS):
            return np.full_like(active, asked)
        asked_for = named(active, EXCESS if self.hotness.excess is None else self.hotness.excess, asked)
        if kind != "bundle":
            return asked_for
        if self.spec.up_activation != "relu":
            return active
        # A dReLU neuron is active where gate and up are positive, and read where its gate is; profiles
        # count the former. The two are alike, so about the root; of those that a predictor names.
        opened: F64 = asked * np.sqrt(active / asked)
        return np.minimum(opened, asked_for) if self.guesses and batch <= PREDICT_TOKENS else opened


@dataclass(frozen=True)
class Arrangement:
    """A budget divided among a model's parts. `parts` add up to all the memory that is ever taken."""

    parts: dict[str, int]
    bundles: tuple[Share, ...]  # as `Contents.rows`
    gates: tuple[Share, ...] | None  # None: all gate rows are resident
    contents: Contents

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Return the share of all neurons that have a slot, on a GPU or in RAM."""
        c = self.contents
        each = c.spec.n_experts * sum(map(c.first, range(c.spec.n_layers)))
        every = c.spec.n_layers * c.spec.n_experts * c.spec.ffn_dim
        return (each + sum(s.places for s in self.bundles)) / every

    @property
    def kinds(self) -> list[tuple[str, tuple[Share, ...]]]:
        """The tensors of a layer whose rows take turns, with the places for them."""
        return [("bundle", self.bundles), *([("gate.weight", self.gates)] if self.gates is not None else [])]

    def places(self, shares: Sequence[Share]) -> list[int]:
        """Return the slots of each layer."""
        n = self.contents.spec.n_experts
        return [sum(s.places for s in shares[i : i + n]) for i in range(0, len(shares), n)]


# ---- as a placement


def in_part(a: Arrangement, context: int, kv_tokens: int, beside_gpu: Placement | None = None) -> Placement:
    """Place a model with the slots that its neurons have in RAM. `beside_gpu`: what a GPU has of it."""
    c, n = a.contents, a.contents.spec.n_experts

    def slots(shares: tuple[Share, ...] | None, layer: int) -> tuple[int, ...] | None:
        return None if shares is None else tuple(s.places for s in shares[n * layer : n * layer + n])

    def ranges(i: int) -> tuple[NeuronRange, ...]:
        there = () if beside_gpu is None else (r for r in beside_gpu.layers[i].ranges if r.device != CPU)
        left = c.spec.ffn_dim - c.first(i)
        here = NeuronRange(CPU, left, slots(a.bundles, i), slots(a.gates, i))
        return (*there, here) if left else tuple(there)

    tables = tuple(looked_up(c.spec, c.tensors))
    if beside_gpu is None:
        predictor = CPU if c.guesses else None
        layers = tuple(LayerPlacement(CPU, predictor, ranges(i)) for i in range(c.spec.n_layers))
        nbytes = {CPU: a.parts, DISK: left_on_disk(a)}
        return Placement(layers, CPU, context, kv_tokens, nbytes, tables)
    layers = tuple(replace(x, ranges=ranges(i)) for i, x in enumerate(beside_gpu.layers))
    taken = {**beside_gpu.bytes, CPU: a.parts, DISK: left_on_disk(a)}
    return Placement(layers, beside_gpu.head, context, kv_tokens, taken, tables)


def arrangement_of(c: Contents, placement: Placement) -> Arrangement:
    """Return the shares that a placement gives to neurons. `c`: what is not on a GPU."""

    def shares(gates: bool) -> Iterator[Share]:
        for x in placement.layers:
            r = x.rest
            slots = None if r is None else r.gate_slots if gates else r.slots
            for n in (0,) * c.spec.n_experts if r is None or slots is None else slots:
                whole = r is None or n == r.neurons
                yield Share(n, 0) if whole else Share(0, n)

    gates = any(r.gate_slots is not None for x in placement.layers for r in x.ranges)
    parts = dict(placement.bytes[CPU])
    return Arrangement(parts, tuple(shares(False)), tuple(shares(True)) if gates else None, c)


def beside(c: Contents, placement: Placement, predictor_parts: Sequence[tuple[int, int]] = ()) -> Contents:
    """Return what RAM and disk hold beside GPUs.

    `predictor_parts`: of each layer's predictor, the bytes that all neurons share and those of their rows.
    """
    layers = placement.layers
    first = tuple(x.on_gpus for x in layers)
    if not placement.devices:
        return c
    left = tensors_beside(c.spec, c.tensors, placement)
    nbytes = c.predictor_bytes
    if predictor_parts:
        here = zip(predictor_parts, layers, first, strict=True)
        nbytes = sum(
            shared + rows * (c.spec.ffn_dim - n) // c.spec.ffn_dim
            for (shared, rows), x, n in here
            if x.predictor in (CPU, None) and n < c.spec.ffn_dim
        )
    return replace(c, tensors=left, predictor_bytes=nbytes, on_gpu=first)


def tensors_beside(
    spec: ModelSpec, tensors: Mapping[str, TensorInfo], placement: Placement
) -> dict[str, TensorInfo]:
    """Return the tensors that RAM and disk hold some rows of."""
    return {n: t for n, t in tensors.items() if _has_rows_beside(n, spec, placement)}


def _has_rows_beside(name: str, spec: ModelSpec, placement: Placement) -> bool:
    """Whether RAM or disk hold a part of a tensor."""
    if ".predictor." in name or name.endswith((".activation_count", ".order")):
        return False
    if not name.startswith("layers."):
        return not (name == "head.weight" and placement.head != CPU)
    _, layer, part = name.split(".", 2)
    x = placement.layers[int(layer)]
    if part in ATTENTION or part in spec.mixer_matrices(int(layer)):
        return x.attention == CPU
    if part in ("gate.weight", "bundle", "up.weight", "down.weight"):
        return x.rest is not None
    return True


def left_on_disk(a: Arrangement) -> dict[str, int]:
    """Part -> bytes that are not in memory at a time."""
    c = a.contents
    parts = tables_left(c.spec, c.tensors)
    for kind, shares in a.kinds:
        part, places = "up and down rows" if kind == "bundle" else "gate rows", a.places(shares)
        for i, t in c.of_kind(kind).items():
            held = c.held_bytes(f"layers.{i}.{kind}")
            parts[part] = parts.get(part, 0) + held - places[i] * t.stride
    return parts


# ---- dividing


def arrange(c: Contents, budget: int, others: Mapping[str, int], *, limit: str = "allowed") -> Arrangement:
    """Within `budget` bytes, of which `others` are taken. OutOfBudget with what would be enough.

    Gate rows go to disk only where fewer bytes are then read. `limit`: what the budget is, for the error.
    """
    made = [_arranged(c, budget, others, gates) for gates in ((False, True) if _gates_can(c) else (False,))]
    found = [m for m in made if m is not None]
    if not found:
        need = least_bytes(c, others)
        fixed = need - sum(others.values())
        taken = ", ".join(f"{size_up(size)} {part}" for part, size in others.items())
        raise OutOfBudget(
            f"with its cold neurons on disk the model still needs {size_up(need)} of memory "
            f"({size_up(fixed)} weights, {taken}), {size_down(budget)} is {limit}; use --ram "
            f"{gib_up(need)}, a shorter context or a smaller weight format"
        )
    return min(found, key=disk_bytes) if len(found) > 1 else found[0]


def least_bytes(c: Contents, others: Mapping[str, int]) -> int:
    """The smallest budget that there is an arrangement for."""
    kinds = [("bundle", "gate.weight")] if _gates_can(c) else []
    least = []
    for on in [("bundle",), *kinds]:
        fixed = sum(_fixed(c, others, len(on) > 1).values())
        least.append(fixed + sum(x.least_bytes for kind in on for x in c.rows(kind)))
    return min(least)


def _gates_can(c: Contents) -> bool:
    """Return whether gate rows fit slots, and a predictor says which are wanted."""
    unit = _native.limits().slot_alignment
    return c.guesses and all(t.stride % unit == 0 for t in c.of_kind("gate.weight").values())


def _arranged(c: Contents, budget: int, others: Mapping[str, int], gates: bool) -> Arrangement | None:
    parts = _fixed(c, others, gates)
    bundles = c.rows("bundle")
    n = len(bundles)
    rows = [*bundles, *(c.rows("gate.weight") if gates else ())]
    shares = split(rows, budget - sum(parts.values()))
    if shares is None:
        return None
    sizes = [s.places * x.place_bytes + x.table_bytes for s, x in zip(shares, rows, strict=True)]
    parts["up and down rows"] = sum(sizes[:n])
    if gates:
        parts["gate rows"] = parts.get("gate rows", 0) + sum(sizes[n:])
    return Arrangement(parts, tuple(shares[:n]), tuple(shares[n:]) if gates else None, c)


def fetches(a: Arrangement, batch: int = 1) -> list[list[Fetch]]:
    """Return each layer's expected reads of each kind, for a step of a few tokens."""
    c = a.contents
    found: list[list[Fetch]] = [[] for _ in range(c.spec.n_layers)]
    for kind, shares in a.kinds:
        for i, (rows, share) in enumerate(zip(c.rows(kind, batch), shares, strict=True)):
            found[i // c.spec.n_experts].append(fetch(rows, share, ordered=c.hotness.ordered))
    return found


def disk_bytes(a: Arrangement) -> float:
    """A token's, with what the disk could have read in the time that each read costs beside them."""
    return sum(f.bytes + f.reads * OPERATION_BYTES for layer in fetches(a) for f in layer)


def _fixed(c: Contents, others: Mapping[str, int], gates: bool) -> dict[str, int]:
    """Part -> bytes of all but the places of neurons."""
    parts: dict[str, int] = dict(others)

    def add(part: str, nbytes: int) -> None:
        parts[part] = parts.get(part, 0) + nbytes

    for name in resident(c.spec, c.tensors, gates=gates):
        add(part_of(name), aligned(c.held_bytes(name)))
    for name in looked_up(c.spec, c.tensors):
        add(part_of(name), lookup_bytes(c.tensors[name].stride))
    if c.guesses and c.predictor_bytes:
        add("predictors", predictors_in_memory(c.spec, c.predictor_bytes))
    add("disk buffers", _buffers(c, gates))
    return parts


def resident(spec: ModelSpec, tensors: Mapping[str, TensorInfo], *, gates: bool) -> list[str]:
    """Return the tensors that are in memory whole, in file order. `gates`: gate rows come from disk."""
    left = (".bundle", ".order", ".activation_count", *((".gate.weight",) if gates else ()))
    tables = looked_up(spec, tensors)
    names = [n for n in tensors if not n.endswith(left) and ".predictor." not in n and n not in tables]
    return sorted(names, key=lambda n: tensors[n].offset)


def predictors_in_memory(spec: ModelSpec, nbytes: int) -> int:
    """Return what predictors of so many bytes take: each matrix begins at a cache line."""
    return nbytes + 2 * spec.n_layers * 64


def looked_up(spec: ModelSpec, tensors: Collection[str]) -> list[str]:
    """Tables on disk but for a row: a token needs no more of them. A tied head needs all."""
    left = ("embed.weight",) if spec.tied_head else ()
    return [n for n in TABLES if n in tensors and n not in left]


def resident_parts(
    others: Mapping[str, int], spec: ModelSpec, tensors: Mapping[str, TensorInfo], names: Sequence[str]
) -> dict[str, int]:
    """Part -> bytes of `others`, of the tensors that are in memory whole, and of a row of each table."""
    parts = dict(others)
    sizes = [(n, aligned(tensors[n].bytes)) for n in names]
    sizes += [(n, lookup_bytes(tensors[n].stride)) for n in looked_up(spec, tensors)]
    for name, nbytes in sizes:
        parts[part_of(name)] = parts.get(part_of(name), 0) + nbytes
    return parts


def tables_left(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Part -> bytes of tables that are not in memory at a time."""
    tables = [tensors[name] for name in looked_up(spec, tensors)]
    return {"embedding": sum(t.bytes - t.stride for t in tables)} if tables else {}


def part_of(name: str) -> str:
    """Return the name that `plan` has for the part of a tensor that is in memory whole."""
    if not name.startswith("layers."):
        return "embedding" if name in TABLES else "head"
    part = name.split(".", 2)[2]
    if part in ("up.weight", "down.weight", "bundle"):  # of a mixture's layer without experts
        return "up and down rows"
    return "gate rows" if part.startswith("gate.") else "attention"


def _buffers(c: Contents, gates: bool) -> int:
    """The reader's; the places that prompts pass through; what a call over records takes besides."""
    strides = pool_strides(c, gates)
    passing = sum(_native.limits().stream_slots * stride + ALIGN for stride in strides)
    call = _native.disk_scratch_bytes(layer_shape(c.spec))
    return DEPTH * buffer_bytes(strides) + passing + call


def pool_strides(c: Contents, gates: bool) -> list[int]:
    """Return the strides of the pools: layers whose records are equally long share one, gates apart."""
    kinds = ("bundle", "gate.weight") if gates else ("bundle",)
    return [stride for k in kinds for stride in sorted({t.stride for t in c.of_kind(k).values()})]


def buffer_bytes(strides: Sequence[int]) -> int:
    """A record with what is read around it, whatever the disk's blocks are."""
    return max(BUFFER_BYTES, aligned(max(strides)) + ALIGN)
