"""The one decoder: token ids -> logits, as plain functions over a table of ops.

Knows `ModelSpec`, the weights' shape and the KV cache's layout; must not know requests, files or families.
`ops` is `ops.reference` (numpy, the specification) or `ops.cpu` (native): same functions, same signatures.
`bind` once, then `forward` for every step.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.kv import KVCache
from thermocline.spec import ModelSpec, RopeScaling

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

# Neurons an FFN computes: all; those whose gate is not zero (the same answer); of the predicted ones, those.
SPARSITIES = ("off", "exact", "predict")
FEW = 4  # tokens that `predict` guesses for; more share too many neurons, and are computed exactly


@dataclass(frozen=True)
class Norm:
    weight: F32  # [dim]
    bias: F32 | None


@dataclass(frozen=True)
class Linear:
    weight: Any  # an ops matrix, [out, in]
    bias: F32 | None


@dataclass(frozen=True)
class FFN:
    """One expert; `gate` and `up` (None if ungated) are [ffn_dim, dim], `down` is [dim, ffn_dim].

    With `bundles`, `down` is transposed, [ffn_dim, dim]: a row per neuron, so that a neuron can be skipped.
    """

    gate: Linear
    up: Any | None
    down: Any
    down_bias: F32 | None
    bundles: bool
    predictor: Any | None = None  # of ops' own, with bundles: guesses which neurons are active
    disk: Any | None = None  # of ops' own: up and down are places that neurons take turns in
    gate_disk: Any | None = None  # likewise of gate, with a predictor
    hot: FFN | None = None  # on a GPU: the neurons before these
    sent: tuple[Any, Any] | None = None  # of ops' own: gate rows and bundles in RAM, to be sent to a GPU


@dataclass(frozen=True)
class Layer:
    attn_norm: Norm | None
    qkv: Linear  # rows: all q heads, all k heads, all v heads
    attn_out: Linear
    ffn_norm: Norm | None
    experts: tuple[FFN, ...]  # one where there is no router
    q_norm: F32 | None = None  # [head_dim]
    k_norm: F32 | None = None
    attn_sub_norm: Norm | None = None  # of attention's output, before attn_out
    ffn_sub_norm: Norm | None = None  # of the activations, before down
    attn_post_norm: Norm | None = None  # of a half's result, before it joins the residual stream
    ffn_post_norm: Norm | None = None
    router: Any | None = None  # of a mixture: a matrix [n_experts, dim]
    router_there: Any | None = None  # on a GPU that has neurons of its experts: the same


@dataclass(frozen=True)
class Weights:
    embed: Any  # matrix [vocab_size, dim]
    pos_embed: Any | None  # matrix [max_context, dim], learned positions only
    layers: tuple[Layer, ...]
    out_norm: Norm | None
    head: Linear  # [vocab_size, dim]; the embedding again when tied
    project_in: Any | None = None  # matrix [dim, embed_dim], where embeddings are narrower
    project_out: Any | None = None  # matrix [embed_dim, dim]


@dataclass(frozen=True)
class Heads:
    """How the heads of one layer attend: all of attention but its matrices."""

    n: int
    n_kv: int
    dim: int
    window: int | None  # attend to the last `window` positions only
    scale: float  # of scores
    softcap: float | None  # scores become cap * tanh(score / cap)
    q_norm: F32 | None  # [dim], of an RMS norm
    k_norm: F32 | None
    norm_eps: float

    @staticmethod
    def of(spec: ModelSpec, index: int = 0, layer: Layer | None = None) -> Heads:
        return Heads(
            n=spec.n_heads,
            n_kv=spec.n_kv_heads,
            dim=spec.head_dim,
            window=spec.window(index),
            scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            softcap=spec.attention_softcap,
            q_norm=None if layer is None else layer.q_norm,
            k_norm=None if layer is None else layer.k_norm,
            norm_eps=spec.norm_eps,
        )


@dataclass(frozen=True)
class Model:
    """What `forward` runs: the weights, and every layer's two halves as `ops` wants them, made once."""

    spec: ModelSpec
    weights: Weights
    attention: tuple[Any, ...]  # of ops.bind_attention
    ffn: tuple[Any, ...]  # of ops.bind_ffn


def bind(spec: ModelSpec, weights: Weights, ops: Any) -> Model:
    layers = weights.layers
    if spec.norm_order == "post":  # then `forward` applies the norms
        layers = tuple(replace(x, attn_norm=None, ffn_norm=None) for x in layers)
    attention = (ops.bind_attention(spec, Heads.of(spec, i, x), x) for i, x in enumerate(layers))
    return Model(spec, weights, tuple(attention), tuple(ops.bind_ffn(spec, x) for x in layers))


@dataclass(frozen=True)
class Batch:
    """Tokens of one step, from any number of sequences. Row r is one token.

    `sequence[r]` is a row of `block_table`; block_table[s, b] is the KV block of positions b*block and on.
    A sequence's rows are in position order, and every earlier position is in the cache or in this batch.
    Layers with a window use `window_table`; its blocks before the window may be absent, -1.
    """

    ids: I32  # [tokens]
    positions: I32  # [tokens]
    sequence: I32  # [tokens]
    block_table: I32  # [sequences, blocks]
    logit_rows: I32  # rows whose logits are wanted
    window_table: I32 | None = None  # [sequences, blocks]; None: block_table

    def table(self, window: int | None) -> I32:
        return self.block_table if window is None or self.window_table is None else self.window_table


@dataclass
class FFNStats:
    """What sparsity did, summed over layers and tokens."""

    active: int = 0  # (token, neuron) pairs with a non-zero activation
    neurons: int = 0  # (token, neuron) pairs in all
    rows: int = 0  # up/down rows read
    rows_dense: int = 0  # up/down rows a dense pass would have read
    gates_dense: int = 0  # gate rows in all
    predicted: int = 0  # gate rows read: all, or with `predict` those of neurons predicted to be active
    predictor_bytes: int = 0  # read of predictors
    # Where somebody asks and the ops know: active, rows and predicted of each layer, one after the other.
    layers: list[int] | None = None


class DiskCounts(NamedTuple):
    """What the disk did for neurons that are not all in memory."""

    needed: int = 0  # records that tokens asked for
    missed: int = 0  # of those, read from disk
    reads: int = 0
    bytes: int = 0
    waited_ns: int = 0  # of all threads, with nothing else to do

    def since(self, before: DiskCounts) -> DiskCounts:
        return DiskCounts(*(now - then for now, then in zip(self, before, strict=True)))


@functools.lru_cache(maxsize=8)
def _inverse_frequencies(spec: ModelSpec, local: bool) -> F32:
    """[rotary_dim/2] (RoPE: arXiv 2104.09864; frequency scaling: Llama 3.1; YaRN: arXiv 2309.00071)."""
    n = spec.rotary_dim or spec.head_dim
    theta = spec.local_rope_theta if local and spec.local_rope_theta is not None else spec.rope_theta
    exponent = np.arange(n // 2, dtype=np.float32) * np.float32(2.0 / n)
    frequency: F32 = (1.0 / np.power(np.float32(theta), exponent)).astype(np.float32)
    s = spec.rope_scaling
    if s is None or local:
        return frequency
    if s.kind == "longrope":  # `for_context` chose
        frequency = (frequency / np.array(s.short_factors, np.float32)).astype(np.float32)
        return frequency
    if s.kind == "linear":
        blend: Any = np.float32(0)
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


def for_context(spec: ModelSpec, context: int) -> ModelSpec:
    """The same model for sessions of at most `context` positions.

    Longrope's factors depend on the length: chosen once, an answer does not change as its text grows.
    """
    s = spec.rope_scaling
    if s is None or s.kind != "longrope" or context <= s.original_context:
        return spec
    return replace(spec, rope_scaling=replace(s, short_factors=s.long_factors))


def rope_tables(spec: ModelSpec, positions: I32, local: bool = False) -> tuple[F32, F32]:
    """cos and sin of every position's angles, [tokens, rotary_dim/2]."""
    angle = positions[:, None].astype(np.float32) * _inverse_frequencies(spec, local)[None, :]
    s = spec.rope_scaling
    if s is None or local or s.attention_factor == 1:
        return np.cos(angle), np.sin(angle)
    factor = np.float32(s.attention_factor)
    return np.cos(angle) * factor, np.sin(angle) * factor


def forward(model: Model, kv: KVCache, batch: Batch, ops: Any, *, sparsity: str, stats: FFNStats) -> F32:
    """One step: the batch's keys and values into `kv`, -> logits [len(logit_rows), vocab_size].

    `sparsity`: of `SPARSITIES`; a layer without predictor, or a batch of more than `FEW`, is not guessed.
    """
    x, steps = _embedded(model, batch, ops), _steps(model.spec, batch, kv, ops)
    body = partial(_layers, model, kv, steps, ops, sparsity, stats)
    return _scaled(model.spec, ops.run(x, batch.logit_rows, sparsity, stats, body))


def _layers(
    model: Model,
    kv: KVCache,
    steps: dict[int | None, Any],
    ops: Any,
    sparsity: str,
    stats: FFNStats,
    x: Any,
    rows: I32,
) -> Any:
    """The residual stream [tokens, dim], where `ops` keeps it, -> the head's logits of `rows`."""
    spec, layers = model.spec, model.weights.layers

    for i, (attention, ffn) in enumerate(zip(model.attention, model.ffn, strict=True)):
        h = x.copy() if spec.parallel else x  # what the FFN reads
        ops.read_ahead(x, ffn, sparsity)
        ops.attention_add(x, x, attention, steps[spec.window(i)], kv.layer(i))
        if spec.norm_order == "post":
            h = x = _norm(spec, layers[i].attn_norm, x, ops)
        ops.ffn_add(x, h, ffn, sparsity, stats)
        if spec.norm_order == "post":
            x = _norm(spec, layers[i].ffn_norm, x, ops)

    return _logits(model, ops.rows(x, rows), ops)


def _embedded(model: Model, batch: Batch, ops: Any) -> F32:
    """[tokens, dim], the residual stream."""
    spec, weights = model.spec, model.weights
    x: F32 = ops.embed(weights.embed, batch.ids)
    if spec.embed_scale != 1:
        x *= np.float32(spec.embed_scale)
    if weights.project_in is not None:
        x = ops.matmul(weights.project_in, x, None)
    if weights.pos_embed is not None:
        x += ops.embed(weights.pos_embed, batch.positions)
    return x


def _steps(spec: ModelSpec, batch: Batch, kv: KVCache, ops: Any) -> dict[int | None, Any]:
    """What the layers of each window have in common: where their keys and values are, and their angles."""
    steps: dict[int | None, Any] = {}
    angles: dict[bool, tuple[F32 | None, F32 | None]] = {}
    for window in kv.windows:
        local = window is not None and spec.local_rope_theta is not None
        if local not in angles:
            rope = spec.position == "rope"
            angles[local] = rope_tables(spec, batch.positions, local) if rope else (None, None)
        steps[window] = ops.step(batch, kv.block, *angles[local], window)
    return steps


def _norm(spec: ModelSpec, norm: Norm | None, x: Any, ops: Any) -> Any:
    return x if norm is None else ops.norm(x, norm.weight, norm.bias, spec.norm_eps, spec.norm)


def _logits(model: Model, x: Any, ops: Any) -> Any:
    """[rows, dim] -> [rows, vocab_size]."""
    weights = model.weights
    h = _norm(model.spec, weights.out_norm, x, ops)
    if weights.project_out is not None:
        h = ops.matmul(weights.project_out, h, None)
    return ops.matmul(weights.head.weight, h, weights.head.bias)


def _scaled(spec: ModelSpec, logits: F32) -> F32:
    if spec.logit_scale != 1:
        logits *= np.float32(spec.logit_scale)
    if spec.logit_softcap is not None:
        cap = np.float32(spec.logit_softcap)
        np.tanh(logits / cap, out=logits)
        logits *= cap
    return logits
