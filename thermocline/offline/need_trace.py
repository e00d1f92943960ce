"""Traces: which neurons each token needs, recorded while a model decodes, and the file that holds them.

A trace is a sidecar of kind `trace` (docs/internals/pack.md), with a bit for each neuron, layer and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.engine.decoder import ffn_input
from thermocline.errors import BadFile, IOFailure, Unsupported
from thermocline.files.bounded import quoted
from thermocline.model.spec import ModelSpec
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, Batch, FFNStats, Layer, opaque
from thermocline.pack import sidecar
from thermocline.pack.pack import Pack

U8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]
KIND = "trace"
AGAIN = "thermocline bench -m PACK --trace FILE"


def check_sparse(spec: ModelSpec) -> None:
    if not spec.sparse:
        raise Unsupported(
            f"{spec.architecture} with {spec.activation}: every token needs every neuron: nothing to "
            "record; trace a ReLU-family model"
        )


class TraceRecorder(CpuOps):
    """The native ops. From `begin` on they record every FFN's needed neurons, one bit each."""

    def __init__(self, threads: int, spec: ModelSpec, layers: Sequence[Layer]) -> None:
        super().__init__(threads)
        self._spec, self._layers = spec, layers
        self.neurons, self.experts = spec.n_experts * spec.ffn_dim, spec.n_experts
        self._rows: list[list[U8]] | None = None

    def begin(self) -> None:
        self._rows = [[] for _ in self._layers]

    def take(self, tokens: int) -> None:
        """Do nothing: layers record as they are computed."""

    @property
    def active(self) -> list[U8]:
        """Return the needed neurons by layer [tokens, bytes], for tokens that all layers have computed."""
        assert self._rows is not None
        n = len(self._rows[self._spec.ffn_layers[-1]])
        return [np.array(rows[:n], np.uint8).reshape(n, -1 if rows else 0) for rows in self._rows]

    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None
    ) -> Any:
        self._feeding = iter(self._spec.ffn_layers)
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
        if self._rows is None:
            return super().ffn_add(x, h, bound, sparsity, stats, record, shares=shares)
        layer = next(self._feeding)
        drelu = self._spec.up_activation == "relu"
        gated = self._gates(layer, h, bound, shares) if drelu else None  # before h changes
        record = np.empty((len(x), bound.neurons), np.float32)
        super().ffn_add(x, h, bound, sparsity, stats, record, shares=shares)
        needed = record != 0 if gated is None else gated
        self._rows[layer].extend(np.packbits(needed, axis=1, bitorder="little"))
        return None

    def _gates(self, layer: int, h: F32, bound: Any, shares: F32 | None) -> Bool:
        """Return the neurons that dReLU needs: it reads an up row if the gate is above the threshold."""
        s, own = self._spec, self._layers[layer]
        h = ffn_input(s, own, h, opaque(self))
        gates = np.stack(
            [self.matmul(g.weight, h, g.bias) for g in (f.part.gate for f in own.experts)], axis=1
        )
        needed = gates > s.activation_threshold  # [tokens, n_experts, ffn_dim]
        if own.router is not None:
            shares = self.routed(h, bound) if shares is None else shares
            needed &= shares[:, :, None] != 0
        return needed.reshape(len(h), -1)


# ---- the file


@dataclass(frozen=True)
class Trace:
    """The needed neurons of consecutive tokens, in every layer of a pack."""

    tokens: int
    source: str  # the source of the tokens
    sparsity: str
    depth: int  # tokens of context before them
    neurons: int  # neurons of a layer
    experts: int  # experts of a layer
    # By layer [tokens, bytes]: bit i mod 8 of byte i / 8 is neuron i. No bytes where there is no FFN.
    active: tuple[U8, ...]

    @staticmethod
    def of(recorder: TraceRecorder, source: str, sparsity: str, depth: int) -> Trace:
        active, neurons = recorder.active, recorder.neurons
        return Trace(len(active[0]), source, sparsity, depth, neurons, recorder.experts, tuple(active))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.active)

    def layer(self, i: int) -> Bool:
        """Return whether each token needs each neuron of layer i [tokens, neurons]."""
        found = self.active[i]
        count = self.neurons if found.shape[1] else 0
        bits = np.unpackbits(found, axis=1, count=count, bitorder="little")
        return bits.view(np.bool_)


def check_target(path: Path) -> None:
    """Raise IOFailure if `path` cannot be written, before anything is computed."""
    if path.is_dir():
        raise IOFailure(f"--trace {path}: is a directory")
    if path.exists() and not path.is_file():  # root could replace /dev/null with a file
        raise IOFailure(f"--trace {path}: is a device, pipe or socket, not a file")
    if not path.absolute().parent.is_dir():
        raise IOFailure(f"--trace {path}: no such directory")


def write_trace(path: Path, pack: Pack, trace: Trace) -> None:
    """Write a trace in the place of `path`, whole or not at all. Raises IOFailure."""
    facts = {key: getattr(trace, key) for key in ("tokens", "source", "sparsity", "depth")}
    held = {f"layers.{i}.active": trace.active[i] for i in pack.spec.ffn_layers}
    shapes: Any = {name: ("u1", a.shape) for name, a in held.items()}
    sidecar.replace(path, KIND, sidecar.stamp(pack.path), facts, shapes, held.values())


def read_trace(path: Path, pack: Pack) -> Trace:
    """Read a trace. BadFile if it is damaged or belongs to another pack; IOFailure if there is none."""
    found = sidecar.Sidecar.open(path, KIND, sidecar.stamp(pack.path), AGAIN)
    if found is None:
        raise IOFailure(f"{path}: no such file; record it with `{AGAIN}`")
    try:
        return _read(found, pack.spec)
    finally:
        found.close()


def _read(found: sidecar.Sidecar, spec: ModelSpec) -> Trace:
    tokens, source, sparsity, depth = (found.facts.get(k) for k in ("tokens", "source", "sparsity", "depth"))
    if type(tokens) is not int or tokens < 1 or type(depth) is not int:
        raise BadFile(f"{found.path}: tokens is {quoted(tokens)} and depth {quoted(depth)}, not numbers")
    if not isinstance(source, str) or not isinstance(sparsity, str):
        raise BadFile(f"{found.path}: source or sparsity is missing")
    neurons = spec.n_experts * spec.ffn_dim
    shape = (tokens, -(-neurons // 8))
    held = {i: found.read(f"layers.{i}.active", "|u1", shape) for i in spec.ffn_layers}
    active = tuple(held.get(i, np.zeros((tokens, 0), np.uint8)) for i in range(spec.n_layers))
    return Trace(tokens, source, sparsity, depth, neurons, spec.n_experts, active)
