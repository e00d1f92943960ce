"""The ops, natively: the same functions as `ops.reference`, on matrices inside a weight arena.

Owns output arrays and the translation of `ModelSpec` into integers; the work is in csrc/engine/model_ops.cpp.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.model.modes import SPARSITIES
from thermocline.model.spec import (
    ACTIVATIONS,
    GROUP_RULES,
    ROUTER_SCORES,
    ROUTER_WEIGHTS,
    ModelSpec,
    Router,
)
from thermocline.ops.interface import (
    CPU,
    F32,
    FFN,
    I32,
    Batch,
    DeltaNet,
    ExpertUse,
    FFNStats,
    Heads,
    KVLayer,
    LatentMatrices,
    Layer,
    Linear,
    Mamba2,
    Mixer,
    NeuronCache,
    Norm,
    ShortConv,
    WeightMatrix,
    Weights,
    stacked,
)

FIRST = np.zeros(1, np.int32)
NO_CACHE = NeuronCache(None, None)
MIXER_KINDS = (DeltaNet, Mamba2, ShortConv)  # csrc/engine/model_ops.h numbers them so


@runtime_checkable
class RowTable(Protocol):
    """A table that is not in memory."""

    @property
    def shape(self) -> tuple[int, int]: ...
    def row(self, i: int) -> _native.Matrix:
        """Return row i, as the only one of a matrix, until the next is asked for."""


class CpuOps:
    """Ops over one native thread pool. `isa` lowers this instance's instruction set (tests); "": the best."""

    def __init__(self, threads: int, isa: str = "") -> None:
        self.native = _native.Context(threads, isa)

    def embed(self, table: WeightMatrix | RowTable, ids: I32) -> F32:
        if not isinstance(table, _native.Matrix):
            assert isinstance(table, RowTable), "neither in memory nor a table of rows"
            return self._embed_one_by_one(table, ids)
        out = np.empty((len(ids), table.shape[1]), np.float32)
        self.native.embed(table, ids, out)
        return out

    def _embed_one_by_one(self, table: RowTable, ids: I32) -> F32:
        """Read each row once, neighbours after each other."""
        rows, places = np.unique(ids, return_inverse=True)
        found = np.empty((len(rows), table.shape[1]), np.float32)
        for i, row in enumerate(rows):
            self.native.embed(table.row(int(row)), FIRST, found[i : i + 1])
        return found[places]

    def norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, kind: str) -> F32:
        out = np.empty(x.shape, np.float32)
        self.native.norm(x, weight, bias, eps, kind == "layer", out)
        return out

    def matmul(self, w: WeightMatrix, x: F32, bias: F32 | None) -> F32:
        out = np.empty((len(x), w.shape[0]), np.float32)
        self.native.matmul(_native_matrix(w), x, bias, out, False)
        return out

    def head(self, x: F32, rows: Linear, project: WeightMatrix | None) -> F32:
        h = x if project is None else self.matmul(project, x, None)
        return self.matmul(rows.weight, h, rows.bias)

    def hidden(self, x: F32) -> F32:
        return x

    def matmul_add(self, x: F32, w: WeightMatrix, h: F32, bias: F32 | None) -> None:
        self.native.matmul(_native_matrix(w), h, bias, x, True)

    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None
    ) -> _native.Step:
        table = batch.table(window)
        states = batch.state_from, batch.state_to
        where = batch.positions, batch.sequence, table, block, window or 0
        return _native.Step(*where, cos, sin, *states, batch.ends)

    def bind_attention(self, spec: ModelSpec, heads: Heads, layer: Layer) -> _native.Attention:
        assert layer.qkv is not None and layer.attn_out is not None
        qkv = _native.Stack(tuple(map(_native_matrix, stacked(layer.qkv.weight))), layer.qkv.bias)
        out = _linear(layer.attn_out.weight, layer.attn_out.bias)
        sub_norm, join = _norm(spec, layer.attn_sub_norm), _join(spec, layer.attn_post_norm)
        gate = None if layer.attn_gate is None else _native_matrix(layer.attn_gate)
        norm, latent = _norm(spec, layer.attn_norm), _latent(heads, layer.latent)
        return _native.Attention(norm, qkv, out, native_heads(heads), sub_norm, join, gate, latent)

    def bind_ffn(self, spec: ModelSpec, layer: Layer) -> _native.FFN | _native.Mixture:
        norm, join = _norm(spec, layer.ffn_norm), _join(spec, layer.ffn_post_norm, scale_after_ffn(layer))
        if layer.router is None:
            return self._expert(spec, layer.experts[0], norm, join, _norm(spec, layer.ffn_sub_norm))
        return self._mixture(spec, layer, norm, join)

    def in_order(self, halves: Sequence[object]) -> None:
        """Let experts on disk be read ahead, by what their router says of the stream a layer before."""
        for after, bound in itertools.pairwise(halves[1::2]):
            if not isinstance(bound, _native.Mixture) or not isinstance(after, _native.Mixture):
                continue
            if bound.reads is not None and after.reads is not None:
                after.before(bound)

    def bind_mixer(self, spec: ModelSpec, layer: Layer) -> _native.Mixer:
        r, m = spec.recurrent, layer.mixer
        assert r is not None and m is not None
        headed = None if isinstance(m, ShortConv) else m
        mamba = m if isinstance(m, Mamba2) else None
        return _native.Mixer(
            kind=MIXER_KINDS.index(type(m)),
            norm=_norm(spec, layer.attn_norm),
            proj=_native.Stack(tuple(map(_native_matrix, _first_matrices(m))), None),
            out=_linear(m.out, None),
            join=_join(spec, None),
            conv=np.ascontiguousarray(m.conv.T),
            conv_bias=None if mamba is None else mamba.conv_bias,
            heads=0 if headed is None else r.heads,
            groups=r.groups or 1,
            rows=r.state or 1,
            cols=r.head_dim or 1,
            tiled=r.tiled,
            decay=None if headed is None else headed.decay,
            step_bias=None if headed is None else headed.dt_bias,
            skip=None if mamba is None else mamba.skip,
            gated_norm=None if headed is None else headed.norm,
            norm_eps=spec.norm_eps,
        )

    def states(self, bound: _native.Mixer, slots: int, floats: int) -> None:
        """Leave them in RAM."""

    def mixer_add(self, x: F32, h: F32, bound: _native.Mixer, step: _native.Step, states: F32) -> None:
        self.native.mixer_add(x, h, bound, step, states)

    def bind_experts(self, spec: ModelSpec, layer: Layer) -> _native.Mixture:
        """Return the CPU's neurons of a mixture's experts, as `bind_part` does.

        Without a router calls are given the shares: so where other experts are elsewhere.
        """
        assert layer.shared is None, "who computes the shared FFN?"
        return self._mixture(spec, layer, None, _native.Join(None, 1.0))

    def _mixture(
        self, spec: ModelSpec, layer: Layer, norm: _native.Norm | None, join: _native.Join
    ) -> _native.Mixture:
        gate, shared, router = layer.shared_router, None, layer.router
        if layer.shared is not None:
            own = _native.Join(_norm(spec, layer.shared_post_norm), 1.0)
            shared = self._expert(spec, layer.shared, _norm(spec, layer.shared_norm), own, None)
        return _native.Mixture(
            norm=norm,
            router=None if router is None else _linear(router.weight, router.bias),
            experts=tuple(self.bind_part(spec, f) for f in layer.experts),
            active=spec.n_experts_active,
            join=join,
            rule=native_rule(spec.router),
            selection_bias=layer.selection_bias,
            shared=shared,
            shared_router=None if gate is None else _native_matrix(gate),
            router_norm=_norm(spec, layer.router_norm),
            expert_scale=layer.expert_scale,
            experts_norm=_norm(spec, layer.experts_post_norm),
            disk=layer.experts_on_disk,
        )

    def bind_part(self, spec: ModelSpec, f: FFN) -> _native.FFN:
        """Return the CPU's neurons of an FFN, without the norm before and the norm of the sum."""
        return self._expert(spec, f, None, _native.Join(None, 1.0), None)

    def _expert(
        self,
        spec: ModelSpec,
        f: FFN,
        norm: _native.Norm | None,
        join: _native.Join,
        sub_norm: _native.Norm | None,
    ) -> _native.FFN:
        part = f.on(CPU)
        assert part is not None, "no neurons in RAM"
        cache, predictor = part.cache or NO_CACHE, part.predictor
        assert predictor is None or isinstance(predictor, _native.Predictor)
        gates_on_disk = cache.gates is not None or part.stream is not None  # there are fewer rows than biases
        return _native.FFN(
            norm=norm,
            gate=_linear(part.gate.weight, None if gates_on_disk else part.gate.bias),
            up=None if part.up is None else _native_matrix(part.up),
            down=_native_matrix(part.down),
            down_bias=f.down_bias,
            activation=ACTIVATIONS.index(spec.activation),
            threshold=spec.activation_threshold,
            up_relu=spec.up_activation == "relu",
            bundles=f.bundles,
            sub_norm=sub_norm,
            join=join,
            predictor=predictor,
            disk=cache.bundles,
            gate_disk=cache.gates,
            gate_bias=part.gate.bias if gates_on_disk else None,
            up_bias=part.up_bias,
            alpha=spec.swiglu_alpha,
            limit=spec.swiglu_limit,
            stream=part.stream,
        )

    def bind_per_layer(self, spec: ModelSpec, layer: Layer) -> _native.PerLayer:
        p = layer.per_layer
        assert p is not None, "its tokens bring nothing"
        gate, down = _native_matrix(p.gate), _native_matrix(p.down)
        join = _native.Join(_norm(spec, p.post_norm), 1.0, layer.scale)
        return _native.PerLayer(gate, down, ACTIVATIONS.index(spec.activation), join)

    def mode(self, sparsity: str) -> int:
        """Return the core's number of a sparsity."""
        return SPARSITIES[sparsity]

    def bring(self, given: F32) -> F32:
        return given

    def chooser(self, spec: ModelSpec, weights: Weights) -> None:
        """Return nothing: logits are in RAM."""

    def per_layer_add(self, x: F32, bound: _native.PerLayer, given: F32) -> None:
        self.native.per_layer_add(x, bound, given)

    def attention(self, heads: Heads, qkv: F32, step: _native.Step, kv: KVLayer) -> F32:
        """Compute what the reference does. `qkv` is worked on in place."""
        out = np.empty((len(qkv), heads.n * heads.dim), np.float32)
        self.native.attention(qkv, native_heads(heads), step, kv.native, out)
        return out

    def attention_add(
        self, x: F32, h: F32, bound: _native.Attention, step: _native.Step, kv: KVLayer
    ) -> None:
        self.native.attention_add(x, h, bound, step, kv.native)

    def run(self, x: F32, rows: I32, sparsity: str, stats: FFNStats, body: Callable[[F32, I32], F32]) -> F32:
        return body(x, rows)

    def rows(self, x: F32, rows: I32) -> F32:
        return np.ascontiguousarray(x[rows])

    def routed(self, h: F32, bound: _native.FFN | _native.Mixture) -> F32:
        assert isinstance(bound, _native.Mixture), "one expert has no router"
        out = np.empty((len(h), bound.experts), np.float32)
        self.native.routed(h, bound, out)
        return out

    def begin_ffn(
        self,
        x: F32,
        bound: _native.FFN | _native.Mixture,
        sparsity: str,
        *,
        shares: F32 | None = None,
        apart: bool = False,
    ) -> F32:
        if bound.from_disk:
            if isinstance(bound, _native.FFN):
                self.native.read_ahead(x, bound, SPARSITIES[sparsity])
            else:
                self.native.read_ahead(x, bound, SPARSITIES[sparsity], shares)
        return x.copy() if apart else x

    def ffn_add(
        self,
        x: F32,
        h: F32,
        bound: _native.FFN | _native.Mixture,
        sparsity: str,
        stats: FFNStats,
        record: F32 | None = None,
        *,
        shares: F32 | None = None,
    ) -> None:
        mode = SPARSITIES[sparsity]
        use: ExpertUse | None = None
        try:
            if isinstance(bound, _native.FFN):
                counts = self.native.ffn_add(x, h, bound, mode, record)
            elif stats.experts is None:
                counts = self.native.moe_add(x, h, bound, mode, record, shares)
            else:
                before, used = bound.reads, np.empty((len(x), bound.experts), np.float32)
                counts = self.native.moe_add(x, h, bound, mode, record, shares, used)
                use = _expert_use(used, before, bound.reads)
        except _native.DiskError as e:
            raise disk_error(e) from None
        stats.neurons += len(x) * bound.neurons
        stats.gates_dense += bound.neurons
        stats.count(counts)
        if stats.layers is not None:
            stats.layers += counts[0], counts[1], counts[3]
        if stats.experts is not None:
            stats.experts.append(use)


def _expert_use(used: F32, before: tuple[int, int] | None, after: tuple[int, int] | None) -> ExpertUse:
    """Return where a call's tokens went. `used`: its weights; `before`, `after`: its layer's reads."""
    tokens = np.count_nonzero(used, axis=0).astype(np.int32)
    if before is None or after is None:
        return ExpertUse(tokens)
    return ExpertUse(tokens, after[0] - before[0], after[1] - before[1])


def disk_error(e: _native.DiskError) -> BadFile | IOFailure:
    """Return the error of a record that could not be read, or is not what was packed."""
    error, name, neuron, changed = e.args
    where = name if neuron < 0 else f"{name}: neuron {neuron}"
    since = "the file has changed since it was opened: load the model again"
    if error == _native.CHANGED:
        return IOFailure(f"{where}: {since}")
    if error == _native.NOT_FINITE:
        return BadFile(f"{where}: a scale is not a finite number; the file is damaged: fetch it again")
    if error == 0:
        damaged = "pack it again" if neuron >= 0 else "it was read as something else before"
        why = since if changed else f"the file is damaged: {damaged}"
        return BadFile(f"{where}: checksum mismatch; {why}")
    if error < 0:
        return IOFailure(f"{where}: the file ends early" + (f"; {since}" if changed else ""))
    return IOFailure(f"{where}: {os.strerror(error)}")


def _native_matrix(w: WeightMatrix) -> _native.Matrix:
    assert isinstance(w, _native.Matrix), "the CPU computes with matrices in an arena"
    return w


def _linear(w: WeightMatrix, bias: F32 | None) -> _native.Linear:
    return _native.Linear(_native_matrix(w), bias)


def _first_matrices(m: Mixer) -> tuple[WeightMatrix, ...]:
    """Return the matrices under each other that a mixer's input meets."""
    return (m.qkv, m.z, m.beta, m.alpha) if isinstance(m, DeltaNet) else (m.into,)


def _norm(spec: ModelSpec, norm: Norm | None) -> _native.Norm | None:
    if norm is None:
        return None
    return _native.Norm(norm.weight, norm.bias, spec.norm_eps, spec.norm == "layer")


def _latent(heads: Heads, w: LatentMatrices | None) -> _native.Latent | None:
    a = heads.latent
    if w is None or a is None:
        return None
    return _native.Latent(
        nope=a.nope,
        rope=a.rope,
        q_norm=None if w.q_norm is None else _native.Norm(w.q_norm, None, a.norm_eps, False),
        q_b=None if w.q_b is None else _native_matrix(w.q_b),
        kv_norm=_native.Norm(w.kv_norm, None, a.norm_eps, False),
        k_b=_native_matrix(w.k_b),
        v_b=_native_matrix(w.v_b),
    )


def native_heads(h: Heads) -> _native.Heads:
    return _native.Heads(
        h.n, h.n_kv, h.dim, h.window or 0, h.scale, h.softcap or 0.0, h.q_norm, h.k_norm, h.norm_eps,
        sinks=h.sinks, whole_norms=h.whole_norms, norms_last=h.norms_last, v_norm=h.v_norm, shares=h.shares,
        own_norms=h.own_norms, chunked=h.chunked, temperature=h.temperature,
        temperature_span=h.temperature_span,
        value_dim=0 if h.latent is None else h.value_dim,
    )  # fmt: skip


def native_rule(r: Router) -> _native.RouterRule:
    return _native.RouterRule(
        score=ROUTER_SCORES.index(r.score),
        weights=ROUTER_WEIGHTS.index(r.weights),
        epsilon=r.epsilon,
        epsilon_floor=r.epsilon_floor,
        scale=r.scale,
        groups=r.groups,
        groups_kept=r.groups_kept,
        group_rule=GROUP_RULES.index(r.group_rule),
        scales_input=r.scales_input,
    )


def _join(spec: ModelSpec, norm: Norm | None, after: float = 1.0) -> _native.Join:
    return _native.Join(_norm(spec, norm), spec.residual_scale, after)


def scale_after_ffn(layer: Layer) -> float:
    """Return what the stream is multiplied with behind the FFN, unless that is not the layer's end."""
    return layer.scale if layer.per_layer is None else 1.0
