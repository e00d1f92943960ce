"""Every op in plain numpy: the specification. Fast versions are tested against this, on every ISA and format.

A matrix here is a float32 array [rows, cols] (decode a stored one with `quant.decode`). Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.model.activations import activate, route
from thermocline.model.spec import ModelSpec
from thermocline.ops.interface import (
    F32,
    FEW,
    FFN,
    I32,
    Batch,
    FFNStats,
    Heads,
    KVLayer,
    Layer,
    Linear,
    Norm,
    Stacked,
    WeightMatrix,
)
from thermocline.pack.predictor import LayerPredictor


def embed(table: WeightMatrix, ids: I32) -> F32:
    """[rows, dim], [tokens] -> [tokens, dim]."""
    return _values(table)[ids].astype(np.float32)


def norm(x: F32, weight: F32, bias: F32 | None, eps: float, kind: str) -> F32:
    """RMSNorm (arXiv 1910.07467) or LayerNorm over the last axis. [tokens, dim] -> [tokens, dim]."""
    if kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    y: F32 = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps)) * weight
    return y if bias is None else y + bias


def matmul(w: WeightMatrix, x: F32, bias: F32 | None) -> F32:
    """[out, in], [tokens, in] -> [tokens, out]."""
    y = x @ _values(w).T
    return y if bias is None else y + bias


def head(x: F32, rows: Linear, project: WeightMatrix | None) -> F32:
    """Return the logits of x; `project`: where embeddings are narrower than the stream."""
    h = x if project is None else matmul(project, x, None)
    return matmul(rows.weight, h, rows.bias)


def matmul_add(x: F32, w: WeightMatrix, h: F32, bias: F32 | None) -> None:
    """x += matmul(w, h, bias), in place: the residual."""
    x += matmul(w, h, bias)


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    """RoPE, half-rotation layout, of the first 2n elements. x [tokens, heads, dim]; cos, sin [tokens, n]."""
    n = cos.shape[1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


class Step(NamedTuple):
    batch: Batch
    table: I32  # [sequences, blocks]
    cos: F32 | None  # [tokens, head_dim/2]
    sin: F32 | None


def step(batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None) -> Step:
    """Return all that the layers of one step share. `block`: positions in a page of the cache.

    `window`: theirs, or a wider one; None: any. Pages before it may be absent.
    """
    return Step(batch, batch.table(window), cos, sin)


def attention(heads: Heads, qkv: F32, step: Step, kv: KVLayer) -> F32:
    """Rotate q and k, store k and v (as f16), attend causally. qkv -> [tokens, n_heads*head_dim]."""
    batch, table, cos, sin = step
    t, hd = len(qkv), heads.dim
    n_q, n_kv = heads.n * hd, heads.n_kv * hd
    q = qkv[:, :n_q].reshape(t, heads.n, hd)
    k = qkv[:, n_q : n_q + n_kv].reshape(t, heads.n_kv, hd)
    v = qkv[:, n_q + n_kv :].reshape(t, heads.n_kv, hd)
    if heads.q_norm is not None and heads.k_norm is not None:
        q = norm(q, heads.q_norm, None, heads.norm_eps, "rms")
        k = norm(k, heads.k_norm, None, heads.norm_eps, "rms")
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)

    block = kv.v.shape[2]
    for r in range(t):
        b, slot = divmod(int(batch.positions[r]), block)
        page = table[batch.sequence[r], b]
        kv.k[page, :, :, slot], kv.v[page, :, slot] = k[r], v[r]

    out = np.empty((t, heads.n, hd), np.float32)
    for r in range(t):
        end = int(batch.positions[r]) + 1
        start = 0 if heads.window is None else max(0, end - heads.window)
        skipped = start // block * block
        pages = table[batch.sequence[r], start // block : (end + block - 1) // block]
        at = slice(start - skipped, end - skipped)
        # [kv_heads, positions, head_dim], then every kv head serves a group of q heads
        keys = kv.k[pages].transpose(1, 0, 3, 2).reshape(heads.n_kv, -1, hd)[:, at]
        keys = keys.astype(np.float32)
        values = kv.v[pages].swapaxes(0, 1).reshape(heads.n_kv, -1, hd)[:, at].astype(np.float32)
        for head in range(heads.n):
            g = head // (heads.n // heads.n_kv)
            scores = keys[g] @ q[r, head] * np.float32(heads.scale)
            if heads.softcap is not None:
                scores = np.float32(heads.softcap) * np.tanh(scores / np.float32(heads.softcap))
            p = np.exp(scores - scores.max())
            out[r, head] = (p / p.sum()) @ values[g]
    return out.reshape(t, -1)


class Bound(NamedTuple):
    """A layer as the natively bound ones are: with all that the spec says of it."""

    spec: ModelSpec
    heads: Heads | None
    layer: Layer


def bind_attention(spec: ModelSpec, heads: Heads, layer: Layer) -> Bound:
    return Bound(spec, heads, layer)


def bind_ffn(spec: ModelSpec, layer: Layer) -> Bound:
    return Bound(spec, None, layer)


def attention_add(x: F32, h: F32, bound: Bound, step: Step, kv: KVLayer) -> None:
    """x += the attention block of h, in place: norm, q k v, attention, output projection. h may be x."""
    spec, heads, layer = bound
    assert heads is not None
    qkv = matmul(layer.qkv.weight, _normed(spec, layer.attn_norm, h), layer.qkv.bias)
    a = _normed(spec, layer.attn_sub_norm, attention(heads, qkv, step, kv))
    _join(x, matmul(layer.attn_out.weight, a, layer.attn_out.bias), spec, layer.attn_post_norm)


def _normed(spec: ModelSpec, n: Norm | None, x: F32) -> F32:
    return x if n is None else norm(x, n.weight, n.bias, spec.norm_eps, spec.norm)


def _join(x: F32, y: F32, spec: ModelSpec, n: Norm | None) -> None:
    x += np.float32(spec.residual_scale) * _normed(spec, n, y)


def run(x: F32, rows: I32, sparsity: str, stats: FFNStats, body: Callable[[F32, I32], F32]) -> F32:
    """One step, `body`: what an ops table may put off, record, or do elsewhere."""
    return body(x, rows)


def rows(x: F32, rows: I32) -> F32:
    found: F32 = np.ascontiguousarray(x[rows])
    return found


def read_ahead(h: F32, bound: Bound, sparsity: str) -> None:
    """Nothing is read here. Natively: what `ffn_add` will likely need of `h`, while attention is computed."""


def ffn_add(x: F32, h: F32, bound: Bound, sparsity: str, stats: FFNStats, record: F32 | None = None) -> None:
    """x += FFN(norm(h)), in place; h may be x. `exact` skips the neurons no token needs: same answer;
    `predict` also those that are not predicted for any of a few tokens.

    `record` [tokens, n_experts * ffn_dim] takes what down is multiplied with (before a sub-norm).
    """
    spec, layer = bound.spec, bound.layer
    h = _normed(spec, layer.ffn_norm, h)
    record = np.empty((len(x), spec.n_experts * spec.ffn_dim), np.float32) if record is None else record
    sparsity = "exact" if sparsity == "predict" and len(x) > FEW else sparsity
    rows = spec.ffn_dim * (2 if spec.gated else 1)
    before = stats.active, stats.rows, stats.predicted
    stats.neurons += record.size
    stats.rows_dense += spec.n_experts * rows
    stats.gates_dense += record.shape[1]
    if layer.router is None:
        y = _expert(bound, layer.experts[0], h, sparsity, stats, record)
    else:
        y = _mixture(bound, h, sparsity, stats, record)
    if stats.layers is not None:
        after = stats.active, stats.rows, stats.predicted
        stats.layers += (b - a for a, b in zip(before, after, strict=True))
    _join(x, y, spec, layer.ffn_post_norm)


def _mixture(bound: Bound, h: F32, sparsity: str, stats: FFNStats, record: F32) -> F32:
    """The chosen experts' answers, weighted and added up in ascending order."""
    spec, layer = bound.spec, bound.layer
    assert layer.router is not None
    weights = route(matmul(layer.router, h, None), spec.n_experts_active)
    y, n = np.zeros_like(h), spec.ffn_dim
    record[:] = 0
    for e, expert in enumerate(layer.experts):
        mine = np.flatnonzero(weights[:, e])
        if len(mine):
            own = np.empty((len(mine), n), np.float32)
            y[mine] += weights[mine, e, None] * _expert(bound, expert, h[mine], sparsity, stats, own)
            record[mine, e * n : (e + 1) * n] = own
    return y


def _expert(bound: Bound, f: FFN, h: F32, sparsity: str, stats: FFNStats, record: F32) -> F32:
    """One FFN of normed h, and what it read."""
    spec, part = bound.spec, f.part
    down = _values(part.down)
    gated = matmul(part.gate.weight, h, part.gate.bias)
    a = activate(gated, spec.activation, spec.activation_threshold)  # [tokens, ffn_dim]
    computed: NDArray[np.bool_] = np.ones(spec.ffn_dim, bool)
    if sparsity == "predict" and spec.sparse and part.predictor is not None:
        assert isinstance(part.predictor, LayerPredictor)
        computed = np.asarray(part.predictor.predicted(h).any(axis=0))
        a = np.where(computed, a, np.float32(0))
    skip = sparsity != "off" and spec.sparse
    needed = np.flatnonzero((a != 0).any(axis=0)) if skip else np.arange(spec.ffn_dim)
    if part.up is not None:
        u = matmul(_values(part.up)[needed], h, None)
        a = a.copy()
        a[:, needed] *= np.maximum(u, 0) if spec.up_activation == "relu" else u
    stats.active += int((a != 0).sum())
    lives = skip and spec.up_activation == "relu" and len(h) <= FEW  # of few tokens, up is read before down
    downs = int((a != 0).any(axis=0).sum()) if lives else len(needed)
    stats.rows += downs + (len(needed) if part.up is not None else 0)
    stats.predicted += int(computed.sum())
    record[:] = a
    a = _normed(spec, bound.layer.ffn_sub_norm, a)
    y: F32 = a[:, needed] @ (down if f.bundles else down.T)[needed]
    return y if f.down_bias is None else y + f.down_bias


def _values(w: WeightMatrix) -> F32:
    if isinstance(w, Stacked):
        return np.concatenate([_values(part) for part in w.parts])
    assert isinstance(w, np.ndarray), "the reference computes with arrays"
    return w
