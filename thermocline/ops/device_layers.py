"""A layer as a step on a device wants it, bound once: matrices there, vectors' copies, the CPU's part.

Must not know how anything is queued or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline import _native
from thermocline.model.spec import ModelSpec
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import Device
from thermocline.ops.device_rows import Rows, joined
from thermocline.ops.interface import F32, FFN, Heads, Layer, Norm

Vector = Tensor | None


@dataclass(frozen=True)
class DevicePredictor:
    """Guesses for all neurons of a layer, wherever they are."""

    first: Rows | None
    second: Rows
    threshold: Tensor
    hot: int
    relu: bool


@dataclass(frozen=True)
class DeviceNorm:
    weight: Tensor
    bias: Vector
    eps: float
    layer: bool


@dataclass(frozen=True)
class DeviceLinear:
    weight: Rows
    bias: Vector


@dataclass(frozen=True)
class DeviceJoin:
    norm: DeviceNorm | None
    scale: float

    @property
    def plain(self) -> bool:
        return self.norm is None and self.scale == 1


@dataclass(frozen=True)
class DeviceAttention:
    norm: DeviceNorm | None
    qkv: DeviceLinear
    out: DeviceLinear
    heads: Heads  # with norms on the device
    sub_norm: DeviceNorm | None
    join: DeviceJoin


@dataclass(frozen=True)
class Activation:
    """What makes a gate's value an activation."""

    kind: str
    threshold: float
    up_relu: bool


@dataclass(frozen=True)
class DeviceRoute:
    """Where tokens go."""

    router: DeviceLinear
    active: int


@dataclass(frozen=True)
class Sent:
    """The CPU's neurons of an expert: gate rows and bundles, in RAM; the gates' biases."""

    gate: Rows
    bundle: Rows
    bias: Vector


@dataclass(frozen=True)
class DeviceFFN:
    """The first neurons of a layer, or all; with `cold`, the others. Of a mixture: those of each expert, as
    many, side by side.
    """

    norm: DeviceNorm | None
    route: DeviceRoute | None
    experts: int
    gate: DeviceLinear | None  # None: no neuron is here, only the predictor
    up: Rows | None
    down: Rows | None
    down_bias: Vector
    bundles: bool
    activation: Activation
    sub_norm: DeviceNorm | None
    join: DeviceJoin
    predictor: DevicePredictor | None
    cold: _native.FFN | _native.Mixture | None
    neurons: int  # of the layer
    sent: tuple[Sent, ...]  # the cold ones, of each expert; none: they are not sent

    @property
    def here(self) -> int:
        return 0 if self.gate is None else self.gate.weight.rows

    def expert(self, e: int) -> DeviceFFN:
        """Its neurons alone."""
        assert self.gate is not None and self.down is not None
        gate, bias, up = self.gate.weight.part(e, self.experts), self.gate.bias, self.up
        return replace(
            self,
            gate=DeviceLinear(gate, None if bias is None else bias.view(self.experts, -1)[e]),
            up=None if up is None else up.part(e, self.experts),
            down=self.down.part(e, self.experts),
        )


class Binder:
    """Of one model's layers. What is not on the device at all is bound by the CPU's ops."""

    def __init__(self, device: Device, cpu: CpuOps, spec: ModelSpec) -> None:
        self._device, self._cpu, self._spec = device, cpu, spec
        self._vectors: dict[int, tuple[list[F32], Tensor]] = {}  # by the first's id, which they keep alive

    def attention(self, spec: ModelSpec, heads: Heads, layer: Layer) -> Any:
        if not isinstance(layer.qkv.weight, Rows):
            return self._cpu.bind_attention(spec, heads, layer)
        q, k = (self.vector(v) for v in (heads.q_norm, heads.k_norm))
        return DeviceAttention(
            norm=self._norm(layer.attn_norm),
            qkv=DeviceLinear(layer.qkv.weight, self.vector(layer.qkv.bias)),
            out=DeviceLinear(layer.attn_out.weight, self.vector(layer.attn_out.bias)),
            heads=replace(heads, q_norm=q, k_norm=k),  # type: ignore[arg-type]
            sub_norm=self._norm(layer.attn_sub_norm),
            join=DeviceJoin(self._norm(layer.attn_post_norm), spec.residual_scale),
        )

    def ffn(self, spec: ModelSpec, layer: Layer) -> Any:
        f = layer.experts[0]
        whole = isinstance(f.gate.weight, Rows)
        here = [x for x in (x if whole else x.hot for x in layer.experts) if x is not None]
        if not here:
            return self._cpu.bind_ffn(spec, layer)
        assert layer.router is None or (f.bundles and f.down_bias is None), "no pack has such a mixture"
        gate, up, down = _side_by_side(here)
        return DeviceFFN(
            norm=self._norm(layer.ffn_norm),
            route=self._route(spec, layer),
            experts=len(here),
            gate=None if gate is None else DeviceLinear(gate, self.vector(*(x.gate.bias for x in here))),
            up=up,
            down=down,
            down_bias=self.vector(f.down_bias),
            bundles=f.bundles,
            activation=Activation(spec.activation, spec.activation_threshold, spec.up_activation == "relu"),
            sub_norm=self._norm(layer.ffn_sub_norm),
            join=DeviceJoin(self._norm(layer.ffn_post_norm), spec.residual_scale),
            predictor=here[0].predictor,
            cold=None if whole else self._cold_part(spec, layer),
            neurons=spec.n_experts * spec.ffn_dim,
            sent=tuple(Sent(*x.sent, self.vector(x.gate.bias)) for x in layer.experts if x.sent is not None),
        )

    def _cold_part(self, spec: ModelSpec, layer: Layer) -> _native.FFN | _native.Mixture:
        if layer.router is not None:
            return self._cpu.bind_experts(spec, layer)
        return self._cpu.bind_part(spec, replace(layer.experts[0], down_bias=None))

    def _route(self, spec: ModelSpec, layer: Layer) -> DeviceRoute | None:
        if layer.router is None:
            return None
        assert layer.router_there is not None
        return DeviceRoute(DeviceLinear(layer.router_there, None), spec.n_experts_active)

    def _norm(self, norm: Norm | None) -> DeviceNorm | None:
        if norm is None:
            return None
        weight = self.vector(norm.weight)
        assert weight is not None
        return DeviceNorm(weight, self.vector(norm.bias), self._spec.norm_eps, self._spec.norm == "layer")

    def vector(self, *parts: F32 | None) -> Vector:
        """Its copy on the device, or that of several in a row: made once, for vectors of the model's."""
        given = [v for v in parts if v is not None]
        if not given:
            return None
        known = self._vectors.get(id(given[0]))
        if known is None:
            there = self._device.zeros((sum(map(len, given)),), torch.float32)
            self._device.put(there, torch.from_numpy(np.concatenate(given)))
            known = self._vectors[id(given[0])] = given, there
        return known[1]


def _side_by_side(parts: Sequence[FFN]) -> tuple[Rows | None, Rows | None, Rows | None]:
    """Gates, ups and downs of a layer's experts; None where there are none."""
    if parts[0].gate is None:
        return None, None, None
    ups = [x.up for x in parts if x.up is not None]
    gates, downs = [x.gate.weight for x in parts], [x.down for x in parts]
    return joined(gates), joined(ups) if ups else None, joined(downs)
