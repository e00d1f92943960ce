"""Record which experts a model's routers pick while it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from thermocline.engine.decoder import ffn_input
from thermocline.errors import Unsupported
from thermocline.model.spec import ModelSpec
from thermocline.offline.routing.statistics import Choices
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, Batch, FFNStats, Layer, opaque


def check_routed(spec: ModelSpec) -> None:
    """Raise Unsupported for a model without routers."""
    if spec.n_experts == 1:
        raise Unsupported(f"{spec.architecture}: has no experts to choose from; give a mixture")


def choices_of(shares: Sequence[Sequence[F32] | F32], spec: ModelSpec, source: str) -> Choices:
    """Return the choices of tokens that all layers have computed. `shares`: of each layer, token by token."""
    n, active = min(map(len, shares)), spec.n_experts_active
    # by weight, the best first, as in a trace; an expert whose weight rounds to 0 is chosen like others
    best = (np.argsort(-np.array(rows[:n]), axis=1, kind="stable")[:, :active] for rows in shares)
    return Choices(tuple(best), spec.n_experts, source)


class SharesOfGpu(Protocol):
    """`GpuOps`, which bring the shares of a step's experts to RAM."""

    def watch_routers(self) -> None: ...
    def shares(self, tokens: int) -> list[F32]: ...


class GpuRouteRecorder:
    """Records the experts that every token gets of routers on a GPU, a step at a time."""

    def __init__(self, ops: SharesOfGpu, spec: ModelSpec) -> None:
        self._ops, self._spec = ops, spec
        ops.watch_routers()

    def begin(self) -> None:
        self._steps: list[list[F32]] = []

    def take(self, tokens: int) -> None:
        """Take in a step that has ended."""
        self._steps.append([np.abs(rows) for rows in self._ops.shares(tokens)])

    def choices(self, source: str) -> Choices:
        """Return what was recorded since `begin`."""
        each = zip(*self._steps, strict=True)
        return choices_of([np.concatenate(rows) for rows in each], self._spec, source)


class RouteRecorder(CpuOps):
    """The native ops. From `begin` on they record the experts that every token gets."""

    def __init__(self, threads: int, spec: ModelSpec, layers: Sequence[Layer]) -> None:
        super().__init__(threads)
        self._spec, self._layers = spec, [x for x in layers if x.experts]
        self._chosen: list[list[F32]] | None = None
        self._layer = 0

    def take(self, tokens: int) -> None:
        """Do nothing: layers record as they are computed."""

    def begin(self) -> None:
        self._chosen = [[] for _ in self._layers]

    def choices(self, source: str) -> Choices:
        """Return what was recorded of tokens that all layers have computed."""
        assert self._chosen is not None
        routed = [rows for x, rows in zip(self._layers, self._chosen, strict=True) if x.router is not None]
        return choices_of(routed, self._spec, source)

    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None
    ) -> Any:
        self._layer = 0
        return super().step(batch, block, cos, sin, window)

    def ffn_add(
        self,
        x: F32,
        h: F32,
        bound: Any,
        sparsity: str,
        stats: FFNStats,
        record: F32 | None = None,
        *,
        shares: F32 | None = None,
    ) -> None:
        if self._chosen is not None:
            layer, self._layer = self._layer, self._layer + 1
            if self._layers[layer].router is not None:
                seen = self._shares(self._layers[layer], h, bound) if shares is None else shares
                self._chosen[layer].extend(np.abs(seen))
        super().ffn_add(x, h, bound, sparsity, stats, record, shares=shares)

    def _shares(self, layer: Layer, h: F32, bound: Any) -> F32:
        own = h if layer.router_norm is not None else ffn_input(self._spec, layer, h, opaque(self))
        return self.routed(own, bound)
