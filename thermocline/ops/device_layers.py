"""A layer as a step on GPUs wants it, bound once: matrices there, vectors' copies, the CPU's part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import _native
from thermocline.model.spec import ModelSpec, Router
from thermocline.ops.cpu import CpuOps, scale_after_ffn
from thermocline.ops.device import Device
from thermocline.ops.device_rows import DeviceRows, Vector, joined
from thermocline.ops.interface import (
    CPU,
    F32,
    FFN,
    DeltaNet,
    FFNPart,
    Heads,
    LatentMatrices,
    Layer,
    Linear,
    Mamba2,
    Norm,
    ShortConv,
    WeightMatrix,
    gpu_index,
    stacked,
)

MIXER_KINDS = {DeltaNet: "deltanet", Mamba2: "mamba2", ShortConv: "conv"}
FIRST_GPU = "gpu:0"  # has the residual stream, if not RAM


@dataclass(frozen=True)
class DevicePredictor:
    """Guesses for all neurons of a layer, wherever they are."""

    first: DeviceRows | None
    second: DeviceRows
    threshold: Tensor
    hot: int
    relu: bool


@dataclass(frozen=True)
class DeviceNorm:
    weight: Tensor
    bias: Vector
    eps: float
    layer: bool

    def same_as(self, other: DeviceNorm | None) -> bool:
        """Return whether both make the same of the same: they are one model's."""
        return other is not None and self.weight is other.weight and self.bias is other.bias


@dataclass(frozen=True)
class DeviceLinear:
    weight: DeviceRows
    bias: Vector


@dataclass(frozen=True)
class DeviceJoin:
    norm: DeviceNorm | None
    scale: float

    @property
    def plain(self) -> bool:
        return self.norm is None and self.scale == 1


@dataclass(frozen=True)
class DeviceLatent:
    """A latent attention's matrices before the last."""

    queries: DeviceLinear  # or what `q_b` takes, under a norm
    latent: DeviceLinear
    kv_norm: Tensor
    k_b: DeviceRows
    v_b: DeviceRows
    q_norm: Vector
    q_b: DeviceLinear | None


@dataclass(frozen=True)
class DeviceAttention:
    norm: DeviceNorm | None
    qkv: tuple[DeviceLinear, ...]  # rows one behind the other: q, k and v as one, or apart
    out: DeviceLinear
    heads: Heads  # with norms on the device, but those of all heads as one
    whole_norms: tuple[DeviceNorm | None, DeviceNorm | None]  # of q and k
    gate: DeviceLinear | None  # what attention gives is multiplied by its sigmoid
    sub_norm: DeviceNorm | None
    join: DeviceJoin
    latent: DeviceLatent | None = None

    @property
    def readers(self) -> tuple[DeviceRows, ...]:
        """Return what reads the normed stream."""
        first = self.qkv if self.latent is None else (self.latent.queries, self.latent.latent)
        return tuple(x.weight for x in (*first, self.gate) if x is not None)

    @property
    def context(self) -> int:
        """Return the size of what it gives: all heads' values."""
        return self.heads.n * self.heads.dim


@dataclass(frozen=True)
class DeviceMixer:
    """A recurrent layer's mixer; `kind` is one of spec.RECURRENT."""

    kind: str
    norm_before: DeviceNorm | None
    first: tuple[DeviceLinear, ...]  # one behind the other
    out: DeviceLinear
    conv: Tensor  # [conv, channels], flat
    conv_bias: Vector
    decay: Vector
    dt_bias: Vector
    skip: Vector
    norm: Vector
    join: DeviceJoin


@dataclass(frozen=True)
class Activation:
    """The function that makes a gate's value an activation."""

    kind: str
    bound: float
    up_relu: bool
    alpha: float = 1.0


@dataclass(frozen=True)
class DeviceRoute:
    """Chooses the experts of a token."""

    router: DeviceLinear
    active: int
    rule: Router
    selection_bias: Vector
    expert_scale: Vector
    norm: DeviceNorm | None  # of the stream; None: it reads what experts read, or the layer's input


@dataclass(frozen=True)
class DevicePart:
    """Neurons of a layer on one GPU; of a mixture as many of each expert, side by side, or whole experts."""

    gpu: int  # the number of that GPU
    first: int  # of an expert's neurons, the first that is here
    experts: int
    gate: DeviceLinear
    up: DeviceRows | None
    down: DeviceRows
    bundles: bool
    activation: Activation
    sub_norm: DeviceNorm | None
    # Of whole experts as plain matrices, whose `down` has the rows of one behind those of another:
    whole: bool = False
    up_bias: Vector = None
    answers: DeviceRows | None = None  # [dim, experts]: what each adds to its answer
    scales_input: bool = False  # as `Router`'s

    @property
    def neurons(self) -> int:
        return self.gate.weight.rows

    @property
    def readers(self) -> tuple[DeviceRows, ...]:
        return (self.gate.weight,) if self.up is None else (self.gate.weight, self.up)

    @property
    def counted(self) -> bool:
        """Return whether kernels count what is computed; else it is all of it."""
        return self.bundles or self.whole

    def expert(self, e: int) -> DevicePart:
        """Return one expert's neurons."""
        n = self.neurons // self.experts
        one = replace(self.cut(slice(e * n, (e + 1) * n)), experts=1)
        return replace(one, down=self.down.part(e, self.experts)) if self.whole else one

    def cut(self, which: slice) -> DevicePart:
        """Return some of the neurons."""

        def rows(w: DeviceRows) -> DeviceRows:
            return replace(w, data=w.data[which])

        bias, up_bias = (None if b is None else b[which] for b in (self.gate.bias, self.up_bias))
        up, gate = None if self.up is None else rows(self.up), DeviceLinear(rows(self.gate.weight), bias)
        return replace(self, gate=gate, up=up, down=rows(self.down), up_bias=up_bias)


@dataclass(frozen=True)
class DeviceShared:
    """The FFN that every token takes beside its experts, on the first GPU."""

    part: DevicePart
    router: DeviceLinear | None  # a token takes the sigmoid of what it says
    norm: DeviceNorm | None  # of the stream; None: it reads what experts read
    post_norm: DeviceNorm | None
    experts_norm: DeviceNorm | None  # of the experts' sum; then the others are there, too


@dataclass(frozen=True)
class ExpertSides:
    """The devices of a mixture's whole experts: the first GPU, `DeviceFFN.others`, the CPU.

    `order`: the numbers of the experts, one device's behind another's. `counts`: how many each has.
    """

    order: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True)
class DeviceFFN:
    """A layer's FFN that the first GPU begins and ends: parts on GPUs, then the CPU's neurons."""

    norm: DeviceNorm | None
    route: DeviceRoute | None
    shared: DeviceShared | None
    parts: tuple[DevicePart, ...]
    cold: _native.FFN | _native.Mixture | None  # the CPU's neurons
    pinned: tuple[
        DevicePart, ...
    ]  # the same, of each expert, as GPUs read them in RAM; none: they are not sent
    down_bias: Vector
    join: DeviceJoin
    predictor: DevicePredictor | None
    neurons: int  # of the layer
    scale: float  # of the stream behind it
    sides: ExpertSides | None = None  # where whole experts are on several devices
    early: bool = False  # it reads what attention does, which is here: others begin before that

    @property
    def own(self) -> DevicePart | None:
        """Return the part on the first GPU."""
        return next((p for p in self.parts if p.gpu == 0), None)

    @property
    def readers(self) -> tuple[DeviceRows, ...]:
        """Return what reads the normed stream on the first GPU."""
        parts = [*(p for p in self.parts if p.gpu == 0), *self.pinned]
        found = list[DeviceRows | None]()
        if self.shared is not None:
            parts.append(self.shared.part)
        if self.route is not None:
            found.append(self.route.router.weight)
        if self.predictor is not None:
            found.append(self.predictor.first)
        found += (w for p in parts for w in p.readers)
        return tuple(w for w in found if w is not None)

    @property
    def alone(self) -> bool:
        """Return whether the first GPU computes all of it."""
        return self.cold is None and not self.others

    @property
    def others(self) -> tuple[DevicePart, ...]:
        """Return the parts on further GPUs, a GPU's at most one."""
        return tuple(p for p in self.parts if p.gpu)


@dataclass(frozen=True)
class ReadNorm:
    """The norm that a half of a layer begins with, and the matrices that read what it makes."""

    norm: DeviceNorm
    readers: Sequence[DeviceRows]


def begun_norms(halves: Sequence[object]) -> dict[int, ReadNorm]:
    """Return the norms that begin in the half before theirs, by that one's id, of halves in their order.

    They are those between two halves that the first GPU computes alone, of which one ends in a product that
    adds to the stream, and of which the next one has nothing but products read the norm.
    """
    found = {id(half): _read_norm(after) for half, after in pairwise(halves) if _ends_in_product(half)}
    return {half: norm for half, norm in found.items() if norm is not None}


def _read_norm(half: object) -> ReadNorm | None:
    norm: DeviceNorm | None = None
    readers: Sequence[DeviceRows] = ()
    if isinstance(half, DeviceAttention):
        norm, readers = half.norm, half.readers
    elif isinstance(half, DeviceMixer):
        norm, readers = half.norm_before, [part.weight for part in half.first]
    elif isinstance(half, DeviceFFN) and half.alone and half.predictor is None:
        norm, readers = half.norm, half.readers
    if norm is None or norm.layer or norm.bias is not None or len(norm.weight) % 32:
        return None  # of a LayerNorm the root is not all that is left
    return ReadNorm(norm, readers)


def _ends_in_product(half: object) -> bool:
    if isinstance(half, DeviceAttention | DeviceMixer):
        return half.join.plain
    if not isinstance(half, DeviceFFN) or not half.alone or half.own is None:
        return False
    plain = half.join.plain and half.scale == 1 and half.down_bias is None
    return plain and (half.shared is None or half.shared.experts_norm is None)


@dataclass(frozen=True)
class DevicePerLayer:
    """Takes what a token brings to a layer into the stream, on the first GPU."""

    gate: DeviceLinear
    down: DeviceLinear
    post_norm: DeviceNorm
    activation: Activation
    scale: float  # of the stream behind it


class DeviceVectors:
    """Copies on a device of the model's vectors, each made once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[int, tuple[list[F32], Tensor]] = {}  # by the first's id, which they keep alive

    def of(self, *vectors: F32 | None) -> Vector:
        """Return the copy of a vector, or of several in a row; None if there is none."""
        given = [v for v in vectors if v is not None]
        if not given:
            return None
        known = self._known.get(id(given[0]))
        if known is None:
            there = self._device.zeros((sum(map(len, given)),), torch.float32)
            self._device.put(there, torch.from_numpy(np.concatenate(given)))
            known = self._known[id(given[0])] = given, there
        return known[1]

    def numbers(self, of: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Return numbers as a vector there."""
        there: Tensor = self._device.zeros((len(of),), torch.int32)
        self._device.put(there, torch.from_numpy(np.array(of, np.int32)))
        return there

    def columns(self, vectors: Sequence[F32]) -> DeviceRows:
        """Return a matrix there that has these columns."""
        flat = torch.from_numpy(np.stack(vectors, axis=1).reshape(-1))
        there = self._device.zeros((len(flat),), torch.float32)
        self._device.put(there, flat)
        return DeviceRows(there.view(torch.uint8).view(len(vectors[0]), -1), "f32", len(vectors))


class Binder:
    """Binds the layers of one model; those that no GPU has a part of are bound by the CPU's ops."""

    def __init__(self, devices: Sequence[Device], cpu: CpuOps, spec: ModelSpec) -> None:
        self._cpu, self._spec = cpu, spec
        self._vectors = tuple(map(DeviceVectors, devices))
        self.vectors = self._vectors[0]
        self.vector = self.vectors.of

    def attention(self, spec: ModelSpec, heads: Heads, layer: Layer) -> DeviceAttention | _native.Attention:
        assert layer.qkv is not None and layer.attn_out is not None
        if not isinstance(stacked(layer.qkv.weight)[0], DeviceRows):
            return self._cpu.bind_attention(spec, heads, layer)
        whole = [Norm(v, None) if v is not None and heads.whole_norms else None
                 for v in (heads.q_norm, heads.k_norm)]  # fmt: skip
        own = (None, None) if heads.whole_norms else (heads.q_norm, heads.k_norm)
        q, k, sinks = (self.vector(v) for v in (*own, heads.sinks))
        gate = layer.attn_gate
        return DeviceAttention(
            norm=self._norm(layer.attn_norm),
            qkv=self._stack(layer.qkv),
            out=self._linear(layer.attn_out),
            heads=replace(heads, q_norm=q, k_norm=k, sinks=sinks),  # type: ignore[arg-type]
            whole_norms=(self._norm(whole[0]), self._norm(whole[1])),
            gate=None if gate is None else DeviceLinear(_rows(gate), None),
            sub_norm=self._norm(layer.attn_sub_norm),
            join=DeviceJoin(self._norm(layer.attn_post_norm), spec.residual_scale),
            latent=None if layer.latent is None else self._latent(heads, layer.qkv, layer.latent),
        )

    def _latent(self, heads: Heads, first: Linear, w: LatentMatrices) -> DeviceLatent:
        assert first.bias is None, "no model has one"
        kv_norm, parts = self.vector(w.kv_norm), list(map(_rows, stacked(first.weight)))
        assert kv_norm is not None
        if len(parts) == 1:
            (whole,) = parts
            lower = whole.rows - heads.dim
            parts = [replace(whole, data=whole.data[at]) for at in (slice(lower), slice(lower, None))]
        queries, latent = (DeviceLinear(part, None) for part in parts)
        return DeviceLatent(
            queries=queries,
            latent=latent,
            kv_norm=kv_norm,
            k_b=_rows(w.k_b),
            v_b=_rows(w.v_b),
            q_norm=self.vector(w.q_norm),
            q_b=None if w.q_b is None else DeviceLinear(_rows(w.q_b), None),
        )

    def mixer(self, spec: ModelSpec, layer: Layer) -> DeviceMixer | _native.Mixer:
        m = layer.mixer
        assert m is not None
        if not isinstance(m.out, DeviceRows):
            return self._cpu.bind_mixer(spec, layer)
        headed, skip = None if isinstance(m, ShortConv) else m, m.skip if isinstance(m, Mamba2) else None
        matrices = (m.qkv, m.z, m.beta, m.alpha) if isinstance(m, DeltaNet) else (m.into,)
        conv = self.vector(np.ascontiguousarray(m.conv.T).reshape(-1))
        assert conv is not None
        return DeviceMixer(
            kind=MIXER_KINDS[type(m)],
            norm_before=self._norm(layer.attn_norm),
            first=tuple(DeviceLinear(_rows(w), None) for w in matrices),
            out=DeviceLinear(_rows(m.out), None),
            conv=conv,
            conv_bias=self.vector(m.conv_bias) if isinstance(m, Mamba2) else None,
            decay=None if headed is None else self.vector(headed.decay),
            dt_bias=None if headed is None else self.vector(headed.dt_bias),
            skip=self.vector(skip),
            norm=None if headed is None else self.vector(headed.norm),
            join=DeviceJoin(None, spec.residual_scale),
        )

    def ffn(self, spec: ModelSpec, layer: Layer) -> DeviceFFN | _native.FFN | _native.Mixture:
        f = layer.experts[0]
        mixture = layer.router is not None
        alone = f.predictor is None and FIRST_GPU not in layer.router_copies
        there = [i for i, p in enumerate(f.parts) if p.device != CPU]
        early = spec.parallel and not spec.shared_norms and _mixes_on_gpu(layer)
        if alone and not there:
            apart = early and not mixture
            return self._beside_attention(spec, layer) if apart else self._cpu.bind_ffn(spec, layer)
        whole = _whole_experts(layer) if mixture and not f.bundles else {}
        each = ([(layer.experts[i], layer.experts[i].part) for i in which] for which in whole.values())
        parts = [self._whole(spec, layer, x, gpu) for gpu, x in zip(whole, each, strict=True)]
        in_ram = [(x, p) for x in layer.experts if (p := x.on(CPU)) is not None]
        pinned = [(x, replace(p.pinned, gate=replace(p.pinned.gate, bias=p.gate.bias), up_bias=p.up_bias))
                  for x, p in in_ram if p.pinned is not None]  # fmt: skip
        shared_norm = early and _equal(layer.attn_norm, layer.ffn_norm)
        return DeviceFFN(
            norm=self._norm(layer.attn_norm if shared_norm else layer.ffn_norm),
            route=self._route(spec, layer),
            shared=self._shared(spec, layer),
            parts=tuple(parts or [self._part(spec, layer, i) for i in there]),
            cold=self._cold(spec, layer) if in_ram else None,
            pinned=self._pinned(spec, layer, pinned),
            down_bias=None if mixture else self.vector(f.down_bias),
            join=DeviceJoin(self._norm(layer.ffn_post_norm), spec.residual_scale),
            predictor=f.predictor,
            neurons=spec.n_experts * spec.ffn_dim if mixture or spec.n_experts == 1 else spec.dense_dim,
            scale=scale_after_ffn(layer),
            sides=self._sides(whole, len(layer.experts)),
            early=early,
        )

    def _beside_attention(self, spec: ModelSpec, layer: Layer) -> DeviceFFN:
        """Return an FFN that the CPU computes with its norm, while the first GPU attends."""
        cold = self._cpu.bind_ffn(spec, replace(layer, scale=1.0))
        plain, scale = DeviceJoin(None, 1.0), scale_after_ffn(layer)
        return DeviceFFN(None, None, None, (), cold, (), None, plain, None, cold.neurons, scale, early=True)

    def _sides(self, whole: Mapping[int, Sequence[int]], experts: int) -> ExpertSides | None:
        """`whole`: as `_whole_experts`."""
        cold = sorted(set(range(experts)).difference(*whole.values()))
        each = [whole.get(0, ()), *(which for gpu, which in whole.items() if gpu), cold]
        if max(map(len, each)) == experts:
            return None
        return ExpertSides(self.vectors.numbers([e for which in each for e in which]), tuple(map(len, each)))

    def per_layer(self, spec: ModelSpec, layer: Layer) -> DevicePerLayer | _native.PerLayer:
        p = layer.per_layer
        assert p is not None
        post_norm = self._norm(p.post_norm)
        if not isinstance(p.gate, DeviceRows) or post_norm is None:
            return self._cpu.bind_per_layer(spec, layer)
        gate, down = (DeviceLinear(_rows(w), None) for w in (p.gate, p.down))
        return DevicePerLayer(gate, down, post_norm, _activation(spec), layer.scale)

    def _part(self, spec: ModelSpec, layer: Layer, at: int) -> DevicePart:
        """Return part `at` of all experts."""
        before, each = layer.experts[0].parts[:at], [x.parts[at] for x in layer.experts]
        first = sum(p.gate.weight.shape[0] for p in before)
        return self._part_of(spec, layer, each, first, gpu_index(each[0].device))

    def _part_of(
        self, spec: ModelSpec, layer: Layer, each: Sequence[FFNPart], first: int, gpu: int
    ) -> DevicePart:
        vector = self._vectors[gpu].of
        ups = [_rows(p.up) for p in each if p.up is not None]
        return DevicePart(
            gpu=gpu,
            first=first,
            experts=len(each),
            gate=DeviceLinear(
                joined([_rows(p.gate.weight) for p in each]), vector(*(p.gate.bias for p in each))
            ),
            up=joined(ups) if ups else None,
            down=joined([_rows(p.down) for p in each]),
            bundles=layer.experts[0].bundles,
            activation=_activation(spec),
            sub_norm=self._norm(layer.ffn_sub_norm, gpu),
        )

    def _pinned(
        self, spec: ModelSpec, layer: Layer, each: Sequence[tuple[FFN, FFNPart]]
    ) -> tuple[DevicePart, ...]:
        """Return what can be sent: whole experts as one part."""
        if layer.router is None or layer.experts[0].bundles:
            return tuple(self._part_of(spec, layer, [p], 0, 0) for _, p in each)
        return (self._whole(spec, layer, each, 0),) if each else ()

    def _whole(
        self, spec: ModelSpec, layer: Layer, each: Sequence[tuple[FFN, FFNPart]], gpu: int
    ) -> DevicePart:
        """Return these experts, which lie side by side."""
        made = self._part_of(spec, replace(layer, ffn_sub_norm=None), [p for _, p in each], 0, gpu)
        vectors = self._vectors[gpu]
        answers = [x.down_bias for x, _ in each if x.down_bias is not None]
        return replace(
            made,
            whole=True,
            up_bias=vectors.of(*(p.up_bias for _, p in each)),
            answers=vectors.columns(answers) if answers else None,
            scales_input=spec.router.scales_input,
        )

    def _shared(self, spec: ModelSpec, layer: Layer) -> DeviceShared | None:
        if layer.shared is None:
            return None
        gate = layer.shared_router
        return DeviceShared(
            part=self._part_of(spec, replace(layer, ffn_sub_norm=None, experts=(layer.shared,)),
                               layer.shared.parts, 0, 0),
            router=None if gate is None else DeviceLinear(_rows(gate), None),
            norm=self._norm(layer.shared_norm),
            post_norm=self._norm(layer.shared_post_norm),
            experts_norm=self._norm(layer.experts_post_norm),
        )  # fmt: skip

    def _cold(self, spec: ModelSpec, layer: Layer) -> _native.FFN | _native.Mixture:
        if layer.router is not None:
            alone = replace(layer, shared=None, shared_router=None, experts_post_norm=None)
            alone = replace(alone, router_norm=None, expert_scale=None)
            here = tuple(x for x in layer.experts if x.on(CPU) is not None)
            if len(here) < len(layer.experts):  # the device asks the router, and gives the shares of these
                alone = replace(alone, experts=here, router=None, selection_bias=None)
            return self._cpu.bind_experts(spec, alone)
        return self._cpu.bind_part(spec, replace(layer.experts[0], down_bias=None))

    def _route(self, spec: ModelSpec, layer: Layer) -> DeviceRoute | None:
        if layer.router is None:
            return None
        router = DeviceLinear(_rows(layer.router_copies[FIRST_GPU]), self.vector(layer.router.bias))
        bias, scale = self.vector(layer.selection_bias), self.vector(layer.expert_scale)
        norm = self._norm(layer.router_norm)
        return DeviceRoute(router, spec.n_experts_active, spec.router, bias, scale, norm)

    def _linear(self, x: Linear) -> DeviceLinear:
        return DeviceLinear(_rows(x.weight), self.vector(x.bias))

    def _stack(self, x: Linear) -> tuple[DeviceLinear, ...]:
        bias, made, first = self.vector(x.bias), list[DeviceLinear](), 0
        for part in map(_rows, stacked(x.weight)):
            own = None if bias is None else bias[first : first + part.rows]
            made.append(DeviceLinear(part, own))
            first += part.rows
        return tuple(made)

    def _norm(self, norm: Norm | None, gpu: int = 0) -> DeviceNorm | None:
        if norm is None:
            return None
        vector = self._vectors[gpu].of
        weight = vector(norm.weight)
        assert weight is not None
        return DeviceNorm(weight, vector(norm.bias), self._spec.norm_eps, self._spec.norm == "layer")


def _whole_experts(layer: Layer) -> dict[int, list[int]]:
    """Return the numbers of the experts that GPUs have whole, by GPU, ascending."""
    each = [(gpu_index(x.part.device), i) for i, x in enumerate(layer.experts) if x.on(CPU) is None]
    return {gpu: [i for at, i in each if at == gpu] for gpu in sorted({at for at, _ in each})}


def _activation(spec: ModelSpec) -> Activation:
    up_relu = spec.up_activation == "relu"
    return Activation(spec.activation, spec.activation_bound, up_relu, spec.swiglu_alpha)


def _mixes_on_gpu(layer: Layer) -> bool:
    """Return whether a layer's attention, or mixer, is on a GPU."""
    first = layer.mixer.out if layer.mixer is not None else None
    if layer.qkv is not None:
        first = stacked(layer.qkv.weight)[0]
    return isinstance(first, DeviceRows)


def _equal(a: Norm | None, b: Norm | None) -> bool:
    """Return whether two norms have the same numbers: packs have one that two halves share twice."""
    if a is None or b is None or not np.array_equal(a.weight, b.weight):
        return False
    if a.bias is None or b.bias is None:
        return a.bias is b.bias
    return np.array_equal(a.bias, b.bias)


def _rows(w: WeightMatrix) -> DeviceRows:
    assert isinstance(w, DeviceRows), "a GPU computes with rows in its memory"
    return w
