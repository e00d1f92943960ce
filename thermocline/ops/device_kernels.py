"""`Kernels`: the table of functions that a GPU's ops queue.

`ops.torch_kernels` is the specification, and says what each computes; `ops.triton_kernels` is the fast one.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from thermocline.ops.device_rows import DeviceRows, Scratch
from thermocline.ops.interface import Heads

Vector = Tensor | None


class Kernels(Protocol):
    def norm(
        self, out: Tensor, x: Tensor, weight: Vector, bias: Vector, eps: float, layer: bool, /
    ) -> None: ...

    def add_normed(
        self, x: Tensor, y: Tensor, weight: Vector, bias: Vector, eps: float, layer: bool, scale: float, /
    ) -> None: ...

    def matmul(
        self, out: Tensor, w: DeviceRows, x: Tensor, bias: Vector, add: bool, scratch: Scratch, /
    ) -> None: ...

    def rope_store(
        self,
        qkv: Tensor,
        heads: Heads,
        cos: Vector,
        sin: Vector,
        positions: Tensor,
        sequence: Tensor,
        table: Tensor,
        k: Tensor,
        v: Tensor,
        /,
    ) -> None: ...

    def attention(
        self,
        out: Tensor,
        qkv: Tensor,
        heads: Heads,
        positions: Tensor,
        sequence: Tensor,
        table: Tensor,
        k: Tensor,
        v: Tensor,
        scratch: Scratch,
        /,
    ) -> None: ...

    def activate(
        self, out: Tensor, gate: Tensor, up: Vector, activation: str, threshold: float, up_relu: bool, /
    ) -> None: ...

    def gate_up(
        self,
        h: Tensor,
        gate: DeviceRows,
        gate_bias: Vector,
        up: DeviceRows | None,
        x: Tensor,
        activation: str,
        threshold: float,
        up_relu: bool,
        named: Vector,
        weights: Vector,
        counts: Tensor,
        scratch: Scratch,
        /,
    ) -> None: ...

    def down(self, out: Tensor, rows: DeviceRows, h: Tensor, add: bool, scratch: Scratch, /) -> None: ...

    def route(self, weights: Tensor, logits: Tensor, n_active: int, /) -> None: ...

    def predict(
        self,
        named: Tensor,
        first: DeviceRows | None,
        second: DeviceRows,
        threshold: Tensor,
        hot: int,
        relu: bool,
        x: Tensor,
        scratch: Scratch,
        /,
    ) -> None: ...
