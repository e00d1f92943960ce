"""The one decoder: token ids -> logits, or hidden states, as plain functions over a table of ops.

`ops` is `ops.reference` (numpy, the specification), `CpuOps` (native) or `GpuOps`. `bind` once, then
`forward` for every step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from thermocline.engine.kv_cache import KVCache
from thermocline.engine.state_pool import StatePool, StateStorage, states_in_ram
from thermocline.model.spec import ModelSpec, RopeScaling
from thermocline.ops.interface import (
    F32,
    I32,
    A,
    Batch,
    BoundAttention,
    BoundFFN,
    BoundMixer,
    BoundPerLayer,
    Chooser,
    ChoosingStep,
    F,
    FFNStats,
    H,
    Heads,
    L,
    Layer,
    Logits,
    M,
    Norm,
    OpaqueOps,
    Ops,
    P,
    ResidualStream,
    S,
    StepHandle,
    TokenDraw,
    Weights,
    opaque,
)

States = Mapping[int, F32]  # of each recurrent layer: [slots, its `state_floats`]
NO_STATES: States = MappingProxyType({})
RECURRENT_STEP = (None, False)  # a step of no window and no angles


class Kept(NamedTuple):
    """A step's place in what sessions keep: pages, states, and for each kind of layer where its own are."""

    kv: KVCache
    states: States
    steps: dict[tuple[int | None, bool], StepHandle]
    given: F32 | None  # what tokens bring to layers, [layers, tokens, width]


@dataclass(frozen=True)
class Model:
    """The weights, and every layer's halves as `ops` wants them, made once."""

    spec: ModelSpec
    weights: Weights
    attention: tuple[BoundAttention | None, ...]  # None: a layer without
    mixers: tuple[BoundMixer | None, ...]
    ffn: tuple[BoundFFN | None, ...]
    per_layer: tuple[BoundPerLayer, ...] = ()  # of a model whose tokens bring something to each layer
    chooser: Chooser | None = None  # where logits need not be brought to RAM for that


def bind(spec: ModelSpec, weights: Weights, ops: Ops[H, S, A, F, M, P, L]) -> Model:
    """Return a model that `forward` runs with these ops."""
    layers, table = weights.layers, opaque(ops)
    if spec.norm_order == "post":  # then `forward` applies the norms
        layers = tuple(replace(x, attn_norm=None, ffn_norm=None) for x in layers)
    attention = tuple(
        None if x.qkv is None else table.bind_attention(spec, Heads.of(spec, i, x), x)
        for i, x in enumerate(layers)
    )
    mixers = tuple(None if x.mixer is None else table.bind_mixer(spec, x) for x in layers)
    ffns = tuple(table.bind_ffn(spec, x) if x.experts else None for x in layers)
    mixed = (m if a is None else a for a, m in zip(attention, mixers, strict=True))
    table.in_order(tuple(itertools.chain.from_iterable(zip(mixed, ffns, strict=True))))
    own = tuple(table.bind_per_layer(spec, x) for x in layers if x.per_layer is not None)
    chooser = table.chooser(spec, weights)
    return Model(spec, weights, attention, mixers, ffns, own, chooser)


@functools.lru_cache(maxsize=8)
def _inverse_frequencies(spec: ModelSpec, local: bool, full: bool) -> F32:
    """[rotary_dim/2] of layers with a window or, `full`, without one (`local`: with a theta of their own).

    (RoPE: arXiv 2104.09864; frequency scaling: Llama 3.1; YaRN: arXiv 2309.00071)
    """
    n = spec.rotary_dim or (spec.full_head_dim if full else 0) or spec.head_dim
    theta = spec.local_rope_theta if local and spec.local_rope_theta is not None else spec.rope_theta
    exponent = np.arange(n // 2, dtype=np.float32) * np.float32(2.0 / n)
    # As f32, numpy's last bit of a power would be the processor's: with AVX-512 it has one of its own.
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    frequency: F32 = (1.0 / power).astype(np.float32)
    s = spec.rope_scaling
    if s is None or local:
        return frequency
    if s.kind == "longrope":  # `for_context` chose
        frequency = (frequency / np.array(s.short_factors, np.float32)).astype(np.float32)
        return frequency
    if s.kind == "proportional":
        turned = int(s.share * n // 2)
        frequency = np.concatenate([frequency[:turned], np.zeros(n // 2 - turned, np.float32)])
        return frequency
    if s.kind == "linear":
        blend: F32 | np.float32 = np.float32(0)
    elif s.kind == "yarn":
        blend = _yarn_blend(s, n, theta)
    else:
        turns = s.original_context * frequency / (2 * np.pi)  # within the original context
        blend = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0)
    scaled: F32 = ((1 - blend) * frequency / s.factor + blend * frequency).astype(np.float32)
    return scaled


def _yarn_blend(s: RopeScaling, n: int, theta: float) -> F32:
    """1 for elements that turn more than beta_fast times within the original context, 0 below beta_slow."""
    low, high = (
        n * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (s.beta_fast, s.beta_slow)
    )
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, n - 1)
    ramp = (np.arange(n // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
    blend: F32 = (1 - np.clip(ramp, 0, 1)).astype(np.float32)
    return blend


def state_storage(model: Model, ops: OpaqueOps) -> StateStorage:
    """Return what allocates the states of a layer where it is computed."""

    def made(layer: int, slots: int, floats: int) -> F32:
        mixer = model.mixers[layer]
        assert mixer is not None, "no state is kept of this layer"
        own = ops.states(mixer, slots, floats)
        return states_in_ram(layer, slots, floats) if own is None else own

    return made


def state_pool(model: Model, ops: OpaqueOps, sequences: int, kept: int) -> StatePool:
    """Return slots where the layers are computed, for so many running sequences, and `kept` more."""
    return StatePool(model.spec, sequences, state_storage(model, ops), kept=kept)


def for_context(spec: ModelSpec, context: int) -> ModelSpec:
    """Return the same model for sessions of at most `context` positions.

    Longrope's factors depend on the length: chosen once, an answer does not change as its text grows.
    """
    s = spec.rope_scaling
    if s is None or s.kind != "longrope" or context <= s.original_context:
        return spec
    return replace(spec, rope_scaling=replace(s, short_factors=s.long_factors))


def rope_tables(spec: ModelSpec, positions: I32, local: bool = False, full: bool = False) -> tuple[F32, F32]:
    """cos and sin of every position's angles, [tokens, rotary_dim/2]."""
    angle = positions[:, None].astype(np.float32) * _inverse_frequencies(spec, local, full)[None, :]
    s = spec.rope_scaling
    if s is None or local or s.attention_factor == 1:
        return np.cos(angle), np.sin(angle)
    factor = np.float32(s.attention_factor)
    return np.cos(angle) * factor, np.sin(angle) * factor


def forward(
    model: Model,
    kv: KVCache,
    batch: Batch,
    ops: Ops[H, S, A, F, M, P, L],
    *,
    sparsity: str,
    stats: FFNStats,
    states: States = NO_STATES,
) -> F32:
    """Compute one step: the batch's keys and values into `kv`, -> logits [len(logit_rows), vocab_size].

    Of a model that embeds, [len(logit_rows), `answer_dim`] instead: last hidden states, or a classifier's.
    `states` has the slots of every recurrent layer.
    `sparsity`: of `SPARSITIES`; a layer without predictor, or a batch of more than `FEW`, is not guessed.
    """
    table = opaque(ops)
    x, steps = _embedded(model, batch, table), _steps(model.spec, batch, kv, table)
    kept = Kept(kv, states, steps, _given(model, x, batch, table))
    body = partial(_layers, model, kept, table, sparsity, stats)
    return _scaled(model.spec, table.run(x, batch.logit_rows, sparsity, stats, body))


def begin(
    model: Model,
    kv: KVCache,
    batch: Batch,
    draws: Sequence[TokenDraw],
    ops: OpaqueOps,
    *,
    sparsity: str,
    stats: FFNStats,
    states: States = NO_STATES,
) -> ChoosingStep:
    """Begin a step of one token for each sequence, as `forward`; `draws` say how the next ones are chosen."""
    assert model.chooser is not None
    kept = Kept(kv, states, _steps(model.spec, batch, kv, ops), None)
    body = partial(_layers, model, kept, ops, sparsity, stats)
    return model.chooser.begin(batch, draws, sparsity, stats, body)


def _layers(
    model: Model,
    kept: Kept,
    ops: OpaqueOps,
    sparsity: str,
    stats: FFNStats,
    x: ResidualStream,
    rows: I32,
) -> Logits:
    """Run the residual stream [tokens, dim] through the layers; -> the head's logits of `rows`."""
    spec, layers, (kv, states, steps, given) = model.spec, model.weights.layers, kept

    for i, (attention, mixer, ffn) in enumerate(zip(model.attention, model.mixers, model.ffn, strict=True)):
        h, shares = x, None  # what both halves read
        if ffn is not None:
            shares = ops.routed(x, ffn) if spec.router_input == "layer_input" else None
            h = ops.begin_ffn(x, ffn, sparsity, shares=shares, apart=spec.parallel)
        if attention is not None:
            ops.attention_add(x, h, attention, steps[spec.window(i), spec.turns(i)], kv.layer(i))
        if mixer is not None:
            ops.mixer_add(x, h, mixer, steps[RECURRENT_STEP], states[i])
        if spec.norm_order == "post":
            h = x = _norm(spec, layers[i].attn_norm, x, ops)
        if ffn is not None:
            ops.ffn_add(x, h, ffn, sparsity, stats, shares=shares)
        if given is not None:
            ops.per_layer_add(x, model.per_layer[i], given[i])
        if spec.norm_order == "post":
            x = _norm(spec, layers[i].ffn_norm, x, ops)

    return _logits(model, ops.rows(x, rows), ops)


def _embedded(model: Model, batch: Batch, ops: OpaqueOps) -> F32:
    """Return the residual stream [tokens, dim] of a batch."""
    spec, weights = model.spec, model.weights
    x = ops.embed(weights.embed, batch.ids)
    if spec.embed_scale != 1:
        x *= np.float32(spec.embed_scale)
    if weights.project_in is not None:
        x = ops.matmul(weights.project_in, x, None)
    if weights.pos_embed is not None:
        x += ops.embed(weights.pos_embed, batch.positions)
    if weights.token_types is not None:
        x += ops.embed(weights.token_types, np.zeros(1, np.int32) if batch.types is None else batch.types)
    if weights.embed_norm is not None:
        x = np.asarray(
            ops.norm(x, weights.embed_norm.weight, weights.embed_norm.bias, spec.norm_eps, spec.norm)
        )
    return x


def _given(model: Model, x: F32, batch: Batch, ops: OpaqueOps) -> F32 | None:
    """Return what a batch's tokens bring to each layer, [layers, tokens, width], if they bring something.

    (norm(project x / sqrt(dim)) + sqrt(width) * the table's row) / sqrt(2), of each layer by itself.
    """
    spec, width, inputs = model.spec, model.spec.per_layer_dim, model.weights.token_inputs
    if inputs is None:
        return None
    projected = ops.matmul(inputs.project, x, None).reshape(-1, width) * np.float32(spec.dim**-0.5)
    normed = np.asarray(ops.norm(projected, inputs.norm, None, spec.norm_eps, spec.norm))
    normed += ops.embed(inputs.embed, batch.ids).reshape(-1, width) * np.float32(width**0.5)
    normed *= np.float32(2**-0.5)
    each = normed.reshape(len(x), spec.n_layers, width).swapaxes(0, 1)
    return ops.bring(np.ascontiguousarray(each))


def _steps(
    spec: ModelSpec, batch: Batch, kv: KVCache, ops: OpaqueOps
) -> dict[tuple[int | None, bool], StepHandle]:
    """Return, for the layers of each window with and without rope, their pages and their angles."""
    kinds = dict.fromkeys(
        (spec.window(i), spec.turns(i)) if spec.attention(i) is not None else RECURRENT_STEP
        for i in range(spec.n_layers)
    )
    angles: dict[tuple[bool, bool], tuple[F32, F32]] = {}
    steps: dict[tuple[int | None, bool], StepHandle] = {}
    for window, turns in kinds:
        local = window is not None and spec.local_rope_theta is not None
        full = window is None and spec.full_head_dim > 0
        if turns and (local, full) not in angles:
            angles[local, full] = rope_tables(spec, batch.positions, local, full)
        cos, sin = angles[local, full] if turns else (None, None)
        steps[window, turns] = ops.step(batch, kv.block, cos, sin, window)
    return steps


def _norm(spec: ModelSpec, norm: Norm | None, x: ResidualStream, ops: OpaqueOps) -> ResidualStream:
    return x if norm is None else ops.norm(x, norm.weight, norm.bias, spec.norm_eps, spec.norm)


def ffn_input(spec: ModelSpec, layer: Layer, h: F32, ops: OpaqueOps) -> F32:
    """Return what a layer's gates read, of what `ffn_add` is given: normed, unless `forward` has done so."""
    return h if spec.norm_order == "post" else np.asarray(_norm(spec, layer.ffn_norm, h, ops))


def _logits(model: Model, x: ResidualStream, ops: OpaqueOps) -> Logits:
    """[rows, dim] -> [rows, vocab_size], or [rows, `answer_dim`] of a model that embeds."""
    weights = model.weights
    if weights.classifier:
        dense, out = weights.classifier
        h = np.tanh(ops.matmul(dense.weight, np.asarray(x), dense.bias))
        return cast("Logits", ops.matmul(out.weight, h, out.bias))
    normed = _norm(model.spec, weights.out_norm, x, ops)
    return ops.hidden(normed) if model.spec.embeds else ops.head(normed, weights.head, weights.project_out)


def _scaled(spec: ModelSpec, logits: F32) -> F32:
    if spec.embeds:
        return logits
    if spec.logit_scale != 1:
        logits *= np.float32(spec.logit_scale)
    if spec.logit_softcap is not None:
        cap = np.float32(spec.logit_softcap)
        np.tanh(logits / cap, out=logits)
        logits *= cap
    return logits
