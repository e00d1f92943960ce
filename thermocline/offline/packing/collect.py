"""Run a model over text and sum up the second moments of what each of its matrices is multiplied with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thermocline import _native
from thermocline.engine.decoder import bind, for_context, forward
from thermocline.engine.kv_cache import KVCache, blocks_for
from thermocline.engine.request import check_writes
from thermocline.engine.state_pool import StateTurns
from thermocline.errors import NumericalError
from thermocline.model import quant
from thermocline.model.spec import RECURRENT, ModelSpec
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import (
    F32,
    I32,
    Batch,
    FFNStats,
    Heads,
    KVLayer,
    Layer,
    Linear,
    Norm,
    WeightMatrix,
    Weights,
    stacked,
)
from thermocline.quantise.moments import HEAD, InputMoments, Moments

STEP = 256  # tokens computed together


@dataclass(frozen=True)
class BoundHalf:
    """A layer's half, and which layer it is."""

    index: int
    layer: Layer
    native: Any  # the FFN; an attention's heads; a recurrent layer's mixers


class InputCollector(CpuOps):
    """The native ops, which also sum up the moments of the inputs of matrices. One step is one text."""

    def __init__(self, threads: int, spec: ModelSpec, window: int = 0) -> None:
        super().__init__(threads)
        self._spec, self._window = spec, window
        layers = range(spec.n_layers)  # each half is bound in their order
        self._attending = iter([i for i in layers if spec.attention(i) is not None])
        self._feeding = iter(spec.ffn_layers)
        self._recurring = iter([i for i in layers if spec.mixer(i) in RECURRENT])
        self._columns: dict[int, Sequence[_native.Matrix]] = {}  # by width, as `_columns_of`
        self.moments: Moments = {}

    def _add(self, name: str, x: F32, expert: int = 0, experts: int = 1) -> None:
        found = self.moments.get(name)
        if found is None:
            found = [InputMoments.none(x.shape[1], self._window) for _ in range(experts)]
            self.moments[name] = found
        found[expert].add(x)

    def bind_attention(self, spec: ModelSpec, heads: Heads, layer: Layer) -> Any:
        native = heads if heads.latent is None else super().bind_attention(spec, heads, layer)
        return BoundHalf(next(self._attending), layer, native)

    def bind_ffn(self, spec: ModelSpec, layer: Layer) -> Any:
        return BoundHalf(next(self._feeding), layer, super().bind_ffn(spec, layer))

    def bind_mixer(self, spec: ModelSpec, layer: Layer) -> Any:
        """Bind the layer as it is, and with matrices that give what its last one reads, part by part."""
        plain, m = replace(spec, residual_scale=1.0), layer.mixer
        assert m is not None
        parts = [
            super(InputCollector, self).bind_mixer(plain, replace(layer, mixer=replace(m, out=columns)))
            for columns in self._columns_of(m.out.shape[1])
        ]
        return BoundHalf(next(self._recurring), layer, (super().bind_mixer(spec, layer), parts))

    def _columns_of(self, width: int) -> Sequence[_native.Matrix]:
        """Return matrices [dim, width] whose rows are those of the identity, in turn; then of zeros."""
        if width not in self._columns:
            dim, f32 = self._spec.dim, quant.FORMATS["f32"].id
            rows = np.eye(-(-width // dim) * dim, width, dtype=np.float32)
            arena = _native.Arena(rows.nbytes)
            arena.write(0, rows.view(np.uint8).reshape(-1))
            starts = range(0, len(rows), dim)
            self._columns[width] = [
                _native.Matrix(arena, 4 * width * at, f32, dim, width, 4 * width) for at in starts
            ]
        return self._columns[width]

    def mixer_add(self, x: F32, h: F32, bound: Any, step: Any, states: F32) -> None:
        half: BoundHalf = bound
        native, parts = half.native
        assert half.layer.mixer is not None
        name, width = f"layers.{half.index}.mixer", half.layer.mixer.out.shape[1]
        self._add(name, self._normed(half.layer.attn_norm, h))
        seen = [np.zeros_like(x) for _ in parts]
        for part, out in zip(parts, seen, strict=True):  # each writes the same next state
            super().mixer_add(out, h, part, step, states)
        self._add(f"{name}_out", np.ascontiguousarray(np.concatenate(seen, axis=1)[:, :width]))
        super().mixer_add(x, h, native, step, states)

    def attention_add(self, x: F32, h: F32, bound: Any, step: Any, kv: KVLayer) -> None:
        half: BoundHalf = bound
        name, layer = f"layers.{half.index}", half.layer
        seen = self._normed(layer.attn_norm, h)
        assert layer.qkv is not None and layer.attn_out is not None
        self._add(f"{name}.qkv", seen)
        if layer.latent is not None:  # what its other matrices read is not seen from here
            return super().attention_add(x, h, half.native, step, kv)
        qkv = [self.matmul(w, seen, None) for w in stacked(layer.qkv.weight)]
        rows = qkv[0] if len(qkv) == 1 else np.concatenate(qkv, axis=1)
        if layer.qkv.bias is not None:
            rows += layer.qkv.bias
        a = self.attention(half.native, rows, step, kv)
        if layer.attn_gate is not None:
            a /= 1 + np.exp(-self.matmul(layer.attn_gate, seen, None))
        a = self._normed(layer.attn_sub_norm, a)
        self._add(f"{name}.attn_out", a)
        y = self.matmul(layer.attn_out.weight, a, layer.attn_out.bias)
        x += np.float32(self._spec.residual_scale) * self._normed(layer.attn_post_norm, y)

    def routed(self, h: F32, bound: Any) -> F32:
        half: BoundHalf = bound
        return super().routed(h, half.native)

    def begin_ffn(
        self, x: F32, bound: Any, sparsity: str, *, shares: F32 | None = None, apart: bool = False
    ) -> F32:
        """Begin nothing: all weights are in memory."""
        return x.copy() if apart else x

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
        half: BoundHalf = bound
        seen = self._normed(half.layer.ffn_norm, h)
        record = np.empty((len(x), half.native.neurons), np.float32)
        super().ffn_add(x, h, half.native, sparsity, stats, record, shares=shares)
        name, (experts, _, width) = f"layers.{half.index}", self._spec.ffn(half.index)
        for e in range(experts):
            own = record[:, e * width : (e + 1) * width]
            mine = slice(None) if experts == 1 else (own != 0).any(axis=1)
            self._add(f"{name}.ffn", seen[mine], e, experts)
            down = self._normed(half.layer.ffn_sub_norm, np.ascontiguousarray(own[mine]))
            self._add(f"{name}.down", down, e, experts)

    def head(self, x: F32, rows: Linear, project: WeightMatrix | None) -> F32:
        """Sum up the head's input; the logits themselves are not needed."""
        self._add(HEAD, x if project is None else self.matmul(project, x, None))
        return np.zeros((len(x), 1), np.float32)

    def _normed(self, norm: Norm | None, x: F32) -> F32:
        if norm is None:
            return x
        return self.norm(x, norm.weight, norm.bias, self._spec.norm_eps, self._spec.norm)


def collect(
    spec: ModelSpec,
    weights: Weights,
    texts: I32,
    *,
    threads: int,
    window: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Moments:
    """Return the moments over texts [texts, tokens].

    Raises NumericalError, and UsageError for a model that embeds.
    """
    check_writes(spec)
    ops = InputCollector(threads, spec, window)
    context = texts.shape[1]
    model = bind(for_context(spec, context), weights, ops)
    kv = KVCache(spec, blocks_for(context))
    table, states = np.arange(blocks_for(context), dtype=np.int32)[None], StateTurns(spec)
    for i, ids in enumerate(texts):
        for at in range(0, context, STEP):
            end = min(at + STEP, context)
            tokens = np.arange(end - at, dtype=np.int32)
            sequence, turn = np.zeros(end - at, np.int32), states.step(1, first=at == 0)
            batch = Batch(ids[at:end], tokens + at, sequence, table, tokens, table, *turn)
            forward(model, kv, batch, ops, sparsity="exact", stats=FFNStats(), states=states.layers)
        if progress is not None:
            progress(i + 1, len(texts))
    for name, found in ops.moments.items():
        if not all(np.isfinite(m.squares).all() for m in found):
            raise NumericalError(f"the inputs of {name} are NaN or infinite: the model's weights are damaged")
    return ops.moments
