"""Every op in plain numpy: the specification. Fast versions are tested against this, on every ISA and format.

A matrix here is a float32 array [rows, cols] (decode a stored one with `quant.decode`). Nothing here is fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline.model import quant
from thermocline.model.activations import activate, route, up_factor
from thermocline.model.spec import ModelSpec, Recurrent
from thermocline.ops.interface import (
    F16,
    F32,
    FEW,
    FFN,
    I32,
    U8,
    Batch,
    DeltaNet,
    ExpertUse,
    FFNStats,
    Heads,
    KVLayer,
    KVShape,
    LatentMatrices,
    Layer,
    Linear,
    Mamba2,
    Norm,
    ShortConv,
    Stacked,
    WeightMatrix,
    Weights,
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


def hidden(x: F32) -> F32:
    """Return rows of the stream, as `run` gives logits."""
    return x


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


def _hadamard(x: F32) -> F32:
    """Return x [..., n] under the normalised Hadamard transform, which is its own inverse.

    Of the largest power of two that divides n, at a time. It makes a block's elements alike in size.
    """
    n = x.shape[-1] & -x.shape[-1]
    y = x.reshape(-1, n)
    for _ in range(n.bit_length() - 1):
        a, b = y[:, 0::2], y[:, 1::2]
        y = np.concatenate([a + b, a - b], axis=1)
    scaled: F32 = y * (np.float32(1) / np.sqrt(np.float32(n)))
    return scaled.reshape(x.shape)


def _coded(q: F32) -> F32:
    """Return queries [..., n] as they meet quantised keys: int8 with a scale for each 32."""
    blocks = q.reshape(-1, 32)
    top = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 1e-36)
    seen: F32 = np.rint(blocks * inverse) * (top / np.float32(127))
    return seen.reshape(q.shape)


def attention(heads: Heads, qkv: F32, step: Step, kv: KVLayer) -> F32:
    """Rotate q and k, store k and v, attend. qkv -> [tokens, n_heads*head_dim]."""
    batch, table, cos, sin = step
    q, k, v = _heads_of(heads, qkv, cos, sin)
    types = kv.shape.types
    if heads.temperature:
        q = q * _temperature(heads, batch.positions)[:, None, None]
    if types.k != "f16":  # scores do not change if both sides turn
        q, k = _coded(_hadamard(q)), _hadamard(k)
    if types.v != "f16":
        v = _hadamard(v)
    for r in range(0 if heads.shares else len(qkv)):
        b, slot = divmod(int(batch.positions[r]), kv.shape.block)
        pages = kv.shape.places(table[batch.sequence[r], b : b + 1])[:, 0]  # of each head
        _store_keys(kv, pages, slot, k[r])
        _store_values(kv, pages, slot, v[r])
    out = np.empty_like(q)
    for r in range(len(qkv)):
        out[r] = _attend(heads, q[r], _end(batch, r), table[batch.sequence[r]], kv)
    return (out if types.v == "f16" else _hadamard(out)).reshape(len(qkv), -1)


def _temperature(heads: Heads, positions: I32) -> F32:
    """Return what the queries of each position are multiplied by."""
    spans = np.floor((positions + 1).astype(np.float32) / np.float32(heads.temperature_span))
    factors: F32 = np.float32(1) + np.float32(heads.temperature) * np.log1p(spans)
    return factors


def _latent_attention(heads: Heads, w: LatentMatrices, rows: F32, step: Step, kv: KVLayer) -> F32:
    """Attention to latents. rows [tokens, q_rank, or n_heads*(nope + rope); kv_rank + rope] -> [tokens,
    n_heads*value].

    A head's score is that of its plain part with `k_b` times the latent, and of its turned part with the
    latent's. `k_b` is multiplied with the query instead, and `v_b` with the weighted sum: latents stay as
    they are.
    """
    a, (batch, table, cos, sin) = heads.latent, step
    assert a is not None and cos is not None and sin is not None
    q, latent = rows[:, : -heads.dim], rows[:, -heads.dim :]
    if w.q_b is not None and w.q_norm is not None:
        q = matmul(w.q_b, norm(q, w.q_norm, None, a.norm_eps, "rms"), None)
    q = q.reshape(len(rows), heads.n, a.nope + a.rope)
    into = np.einsum("bhd,hrd->bhr", q[..., : a.nope], _values(w.k_b).reshape(heads.n, a.kv_rank, a.nope))
    q = np.concatenate([into, rotate(q[..., a.nope :], cos, sin)], axis=-1)
    plain = norm(latent[:, : a.kv_rank], w.kv_norm, None, a.norm_eps, "rms")
    turned = rotate(latent[:, None, a.kv_rank :], cos, sin)[:, 0]
    keys = np.concatenate([plain, turned], axis=-1)
    found = np.empty((len(rows), heads.n, a.kv_rank), np.float32)
    for r in range(len(rows)):
        b, slot = divmod(int(batch.positions[r]), kv.shape.block)
        pages = kv.shape.places(table[batch.sequence[r], b : b + 1])[:, 0]
        _store_values(kv, pages, slot, keys[r : r + 1])
    for r in range(len(rows)):
        found[r] = _attend(heads, q[r], _end(batch, r), table[batch.sequence[r]], kv)
    out_of = _values(w.v_b).reshape(heads.n, a.value, a.kv_rank)
    y: F32 = np.einsum("bhr,hvr->bhv", found, out_of)
    return y.reshape(len(rows), -1)


def _heads_of(heads: Heads, qkv: F32, cos: F32 | None, sin: F32 | None) -> tuple[F32, F32, F32]:
    """Return q [tokens, heads, dim], k and v [tokens, kv heads, dim]; q and k normed and turned.

    Heads that share the keys and values of another layer have none: [tokens, 0, dim].
    """
    n_kv = 0 if heads.shares else heads.n_kv
    x = qkv.reshape(len(qkv), heads.n + 2 * n_kv, heads.dim)
    q, k, v = x[:, : heads.n], x[:, heads.n : heads.n + n_kv], x[:, heads.n + n_kv :]
    if heads.v_norm is not None:
        v = norm(v, heads.v_norm, None, heads.norm_eps, "rms")
    if not heads.norms_last:
        q, k = _heads_normed(heads, q, heads.q_norm), _heads_normed(heads, k, heads.k_norm)
    if cos is not None and sin is not None:
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if heads.norms_last:
        q, k = _heads_normed(heads, q, heads.q_norm), _heads_normed(heads, k, heads.k_norm)
    return q, k, v


def _heads_normed(heads: Heads, x: F32, weight: F32 | None) -> F32:
    """Return x [tokens, heads, dim] under an RMS norm of each head, or of all as one, or LayerNorms."""
    if weight is None:
        return x
    if heads.own_norms:
        return norm(x, weight.reshape(x.shape[1:]), None, heads.norm_eps, "layer")
    seen = x.reshape(len(x), -1) if heads.whole_norms else x
    return norm(seen, weight, None, heads.norm_eps, "rms").reshape(x.shape)


def _end(batch: Batch, r: int) -> int:
    """Return one more than the last position that a token attends to."""
    return int(batch.positions[r]) + 1 if batch.ends is None else int(batch.ends[r])


def _attend(heads: Heads, q: F32, end: int, pages: I32, kv: KVLayer) -> F32:
    """Return the output [heads, dim] of one token's queries, which end before position `end`."""
    block = kv.shape.block
    start = 0 if heads.window is None else max(0, end - heads.window)
    if heads.chunked and heads.window is not None:
        start = (end - 1) // heads.window * heads.window
    skipped = start // block * block
    held = kv.shape.places(pages[start // block : (end + block - 1) // block])
    at = slice(start - skipped, end - skipped)
    keys, values = _keys_at(kv, held)[:, at], _values_at(kv, held)[:, at, : heads.value_dim]
    out = np.empty((heads.n, heads.value_dim), np.float32)
    for head in range(heads.n):
        g = head // (heads.n // heads.n_kv)  # every kv head serves a group of q heads
        scores = keys[g] @ q[head] * np.float32(heads.scale)
        if heads.softcap is not None:
            scores = np.float32(heads.softcap) * np.tanh(scores / np.float32(heads.softcap))
        sink = np.float32(-np.inf) if heads.sinks is None else heads.sinks[head]
        top = np.maximum(scores.max(), sink)
        p = np.exp(scores - top)
        out[head] = (p / (p.sum() + np.exp(sink - top))) @ values[g]
    return out


# ---- pages: csrc/kernels/kernels.h says the same


def _encoded(type: str, x: F32) -> tuple[U8, F16]:
    """Return quants [heads, dim], as a format of weights has them, a byte each; and scales [heads, blocks].

    The scale of a block that holds an infinity or NaN is NaN; where it is 0 or no number, quants are those
    of 0.
    """
    f, blocks = quant.FORMATS[type], x.reshape(len(x), -1, 32)
    assert f.quants is not None
    with np.errstate(all="ignore"):
        q, scale = _searched(blocks) if type == "q4_0" else _rounded(blocks)
    scale[~np.isfinite(blocks).all(axis=2)] = np.nan
    q = np.where((np.isfinite(scale) & (scale != 0))[..., None], q, np.uint8(f.quants.offset))
    return q.reshape(x.shape), scale


def _rounded(x: F32) -> tuple[U8, F16]:
    """Return q8_0's quants and scales of blocks [heads, blocks, 32]."""
    planes = quant.planes("q8_0", quant.encode("q8_0", x.reshape(len(x), -1)))
    return planes["quants"], np.ascontiguousarray(planes["scale"]).view(np.float16)[..., 0]


LARGEST = np.array([-9.1, -8.75, -8.4, -8.05, -7.7, -7.35, -7.0, -6.65], np.float32)


def _searched(x: F32) -> tuple[U8, F16]:
    """Return q4_0's quants and scales of blocks [heads, blocks, 32].

    Of the quants that `LARGEST` makes of a block's largest element, those with the least squared error.
    Sums are made element by element: the native core's bits.
    """
    at = np.abs(x).argmax(axis=2)[..., None]
    extreme = np.take_along_axis(x, at, axis=2)  # [heads, blocks, 1]
    inverses = LARGEST / extreme  # [heads, blocks, candidates]
    products, squares = np.zeros_like(inverses), np.zeros_like(inverses)
    for i in range(32):
        v = x[..., i : i + 1]
        r = np.clip(np.rint(v * inverses), np.float32(-8), np.float32(7))
        products, squares = products + v * r, squares + r * r
    best = (products * products / squares).argmax(axis=2)[..., None]
    d = np.take_along_axis(products / squares, best, axis=2)
    inverse = np.take_along_axis(inverses, best, axis=2)
    most = np.abs(extreme)
    searched = (most > np.float32(1e-7)) & (most < np.float32(1e5))
    d = np.where(searched, d, extreme / np.float32(-8))
    inverse = np.where(searched, inverse, np.float32(1) / d)
    q = np.clip(np.rint(x * inverse), -8, 7) + 8
    return np.nan_to_num(q).astype(np.uint8), d[..., 0].astype(np.float16)


def _planes(pages: F16 | U8, type: str, shape: KVShape) -> tuple[U8, F16]:
    """Return views of pages [..., bytes]: their quants, and scales [..., blocks of a head, block]."""
    n = shape.block * shape.head_dim * (1 if type == "q8_0" else 0.5)
    scales = pages[..., int(n) :].view(np.float16)
    return pages[..., : int(n)].view(np.uint8), scales.reshape(*scales.shape[:-1], -1, shape.block)


def _joined(q: U8, half: int) -> U8:
    """Return nibbles [heads, dim] as bytes: `half` in the low nibbles, the next as many in the high ones."""
    pairs = q.reshape(len(q), -1, 2, half)
    joined: U8 = pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)
    return joined


def _store_keys(kv: KVLayer, pages: I32, slot: int, k: F32) -> None:
    """Store k [heads, dim] as the keys of one position of these pages: dwords of 4 or 8 elements."""
    s, type = kv.shape, kv.shape.types.k
    if type == "f16":
        kv.k[pages, :, slot] = k
        return
    q, scale = _encoded(type, k)
    if type == "q4_0":
        q = _joined(q, 4)
    quants, scales = _planes(kv.k, type, s)
    quants.reshape(len(kv.k), -1, s.block, 4)[pages, :, slot] = q.reshape(s.heads, -1, 4)
    scales[pages, :, slot] = scale


def _store_values(kv: KVLayer, pages: I32, slot: int, v: F32) -> None:
    """Store v [heads, dim] as the values of one position: bytes of dwords of 4 positions."""
    s, type = kv.shape, kv.shape.types.v
    if type == "f16":
        kv.v[pages, slot] = v
        return
    q, scale = _encoded(type, v)
    if type == "q4_0":
        q = _joined(q, 16)
    quants, scales = _planes(kv.v, type, s)
    quants.reshape(len(kv.v), s.block // 4, -1, 4)[pages, slot // 4, :, slot % 4] = q.reshape(s.heads, -1)
    scales[pages, :, slot] = scale


def _keys_at(kv: KVLayer, pages: I32) -> F32:
    """Return the keys of pages [heads, n], [heads, positions, dim]."""
    s, type = kv.shape, kv.shape.types.k
    if s.latent:
        return _values_at(kv, pages)
    held = kv.k[pages]
    if type == "f16":
        return held.swapaxes(2, 3).reshape(s.heads, -1, s.head_dim).astype(np.float32)
    q, scales = _planes(held, type, s)
    if type == "q4_0":
        dwords = q.reshape(*pages.shape, -1, s.block, 4)
        q = np.stack([dwords & np.uint8(15), dwords >> np.uint8(4)], axis=3) - np.uint8(8)
    dwords = q.reshape(*pages.shape, -1, s.block, 4)
    elements = dwords.swapaxes(3, 4).reshape(*pages.shape, -1, 32, s.block).view(np.int8)
    x = elements.astype(np.float32) * scales[:, :, :, None].astype(np.float32)
    return x.reshape(*pages.shape, -1, s.block).swapaxes(2, 3).reshape(s.heads, -1, s.head_dim)


def _values_at(kv: KVLayer, pages: I32) -> F32:
    """Return the values of pages [heads, n], [heads, positions, dim]."""
    s, type = kv.shape, kv.shape.types.v
    held = kv.v[pages]
    if type == "f16":
        return held.reshape(s.heads, -1, s.head_dim).astype(np.float32)
    q, scales = _planes(held, type, s)
    dwords = q.reshape(*pages.shape, s.block // 4, -1, 4).swapaxes(3, 4)
    q = dwords.reshape(*pages.shape, s.block, s.head_dim // 32, -1)
    if type == "q4_0":
        q = np.concatenate([q & np.uint8(15), q >> np.uint8(4)], axis=4) - np.uint8(8)
    x = q.view(np.int8).astype(np.float32) * scales.swapaxes(2, 3)[..., None].astype(np.float32)
    return x.reshape(s.heads, -1, s.head_dim)


class Bound(NamedTuple):
    """A layer as the natively bound ones are: with all that the spec says of it."""

    spec: ModelSpec
    heads: Heads | None
    layer: Layer


def bind_attention(spec: ModelSpec, heads: Heads, layer: Layer) -> Bound:
    return Bound(spec, heads, layer)


def bind_ffn(spec: ModelSpec, layer: Layer) -> Bound:
    return Bound(spec, None, layer)


def in_order(halves: Sequence[Bound | None]) -> None:
    """Nothing begins before its turn."""


def attention_add(x: F32, h: F32, bound: Bound, step: Step, kv: KVLayer) -> None:
    """x += the attention block of h, in place: norm, q k v, attention, output projection. h may be x."""
    spec, heads, layer = bound
    assert heads is not None and layer.qkv is not None and layer.attn_out is not None
    h = _normed(spec, layer.attn_norm, h)
    rows = matmul(layer.qkv.weight, h, layer.qkv.bias)
    if layer.latent is None:
        a = attention(heads, rows, step, kv)
    else:
        a = _latent_attention(heads, layer.latent, rows, step, kv)
    if layer.attn_gate is not None:
        a = a * _sigmoid(matmul(layer.attn_gate, h, None))
    a = _normed(spec, layer.attn_sub_norm, a)
    _join(x, matmul(layer.attn_out.weight, a, layer.attn_out.bias), spec, layer.attn_post_norm)


def _normed(spec: ModelSpec, n: Norm | None, x: F32) -> F32:
    return x if n is None else norm(x, n.weight, n.bias, spec.norm_eps, spec.norm)


def _join(x: F32, y: F32, spec: ModelSpec, n: Norm | None) -> None:
    x += np.float32(spec.residual_scale) * _normed(spec, n, y)


# ---- recurrent layers


def bind_mixer(spec: ModelSpec, layer: Layer) -> Bound:
    return Bound(spec, None, layer)


def states(bound: Bound, slots: int, floats: int) -> None:
    """They are in RAM."""


def mixer_add(x: F32, h: F32, bound: Bound, step: Step, states: F32) -> None:
    """x += residual_scale * mixer(norm(h)), in place: each sequence from its state to its next one.

    `states` [slots, floats]. A sequence's rows are taken in their order; one without rows keeps its state.
    """
    spec, batch, m = bound.spec, step.batch, bound.layer.mixer
    assert batch.state_from is not None and batch.state_to is not None and m is not None
    h, y = _normed(spec, bound.layer.attn_norm, h), np.empty_like(x)
    for s, (old, new) in enumerate(zip(batch.state_from, batch.state_to, strict=True)):
        state = np.zeros_like(states[0]) if old < 0 else states[old].copy()
        mine = np.flatnonzero(batch.sequence == s)
        if isinstance(m, DeltaNet):
            y[mine] = deltanet(spec, m, h[mine], state)
        elif isinstance(m, Mamba2):
            y[mine] = mamba2(spec, m, h[mine], state)
        else:
            y[mine] = short_conv(spec, m, h[mine], state)
        states[new] = state
    _join(x, y, spec, None)


def _halves(r: Recurrent, channels: int, state: F32) -> tuple[F32, F32]:
    """Return views of a state: the convolution's last inputs [conv - 1, channels], oldest first, and the
    heads' [heads, state, head_dim].
    """
    n = (r.conv - 1) * channels
    return state[:n].reshape(r.conv - 1, channels), state[n:].reshape(r.heads, r.state, r.head_dim)


def _convolved(seen: F32, x: F32, weight: F32, bias: F32 | None) -> F32:
    """Return the causal convolution of x [tokens, channels] behind `seen`, which becomes the last inputs."""
    conv = weight.shape[1]
    every = np.concatenate([seen, x])
    y = np.zeros_like(x) if bias is None else np.tile(bias, (len(x), 1))
    for j in range(conv):
        y += every[j : j + len(x)] * weight[:, j]
    seen[:] = every[len(every) - conv + 1 :]
    return y


def _of_groups(r: Recurrent, x: F32) -> F32:
    """Return for each head what its group has. x [groups, state] -> [heads, state]."""
    each = r.heads // r.groups
    return np.tile(x, (each, 1)) if r.tiled else np.repeat(x, each, axis=0)


def deltanet(spec: ModelSpec, m: DeltaNet, h: F32, state: F32) -> F32:
    """Gated DeltaNet (arXiv 2412.06464) of one sequence's normed tokens, from `state` to `state`.

    A head's S [state, head_dim] fades, forgets what it has for the key by beta, and learns the value there.
    """
    r = spec.recurrent
    assert r is not None
    seen, heads = _halves(r, r.channels, state)
    qkv = _silu(_convolved(seen, matmul(m.qkv, h, None), m.conv, None))
    n, (t, _) = r.groups * r.state, h.shape
    q, k = (_unit(x.reshape(t, r.groups, r.state)) for x in (qkv[:, :n], qkv[:, n : 2 * n]))
    q, v = q / np.sqrt(np.float32(r.state)), qkv[:, 2 * n :].reshape(t, r.heads, r.head_dim)
    beta = _sigmoid(matmul(m.beta, h, None))
    decay = np.exp(m.decay * _softplus(matmul(m.alpha, h, None) + m.dt_bias))
    o = np.empty_like(v)
    for i in range(t):
        key, query = _of_groups(r, k[i])[:, :, None], _of_groups(r, q[i])[:, :, None]
        heads *= decay[i][:, None, None]
        change = (v[i] - (heads * key).sum(axis=1)) * beta[i][:, None]
        heads += key * change[:, None, :]
        o[i] = (heads * query).sum(axis=1)
    z = matmul(m.z, h, None).reshape(o.shape)
    return matmul(m.out, (norm(o, m.norm, None, spec.norm_eps, "rms") * _silu(z)).reshape(t, -1), None)


def mamba2(spec: ModelSpec, m: Mamba2, h: F32, state: F32) -> F32:
    """Mamba-2 (arXiv 2405.21060) of one sequence's normed tokens, from `state` to `state`."""
    r = spec.recurrent
    assert r is not None
    seen, heads = _halves(r, r.channels, state)
    z, rest, dt = np.split(matmul(m.into, h, None), [r.inner, r.inner + r.channels], axis=1)
    xbc = _silu(_convolved(seen, rest, m.conv, m.conv_bias))
    n, t = r.groups * r.state, len(h)
    x = xbc[:, : r.inner].reshape(t, r.heads, r.head_dim)
    b, c = (xbc[:, at : at + n].reshape(t, r.groups, r.state) for at in (r.inner, r.inner + n))
    dt = _softplus(dt + m.dt_bias)
    decay = np.exp(m.decay * dt)
    y = np.empty_like(x)
    for i in range(t):
        into, out = _of_groups(r, b[i])[:, :, None], _of_groups(r, c[i])[:, :, None]
        heads *= decay[i][:, None, None]
        heads += into * (x[i] * dt[i][:, None])[:, None, :]
        y[i] = (heads * out).sum(axis=1) + m.skip[:, None] * x[i]
    gated = (y.reshape(t, -1) * _silu(z)).reshape(t, r.groups, -1)
    weight = m.norm.reshape(r.groups, -1)
    return matmul(m.out, norm(gated, weight, None, spec.norm_eps, "rms").reshape(t, -1), None)


def short_conv(spec: ModelSpec, m: ShortConv, h: F32, state: F32) -> F32:
    """C times the convolution of B times x, of one sequence's normed tokens, from `state` to `state`."""
    r = spec.recurrent
    assert r is not None
    b, c, x = np.split(matmul(m.into, h, None), 3, axis=1)
    seen = state.reshape(r.conv - 1, spec.dim)
    return matmul(m.out, c * _convolved(seen, b * x, m.conv, None), None)


def _sigmoid(x: F32) -> F32:
    y: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return y


def _silu(x: F32) -> F32:
    return x * _sigmoid(x)


def _softplus(x: F32) -> F32:
    y: F32 = np.logaddexp(x, np.float32(0))
    return y


UNIT_EPS = np.float32(1e-6)  # of DeltaNet's queries and keys; no config says it


def _unit(x: F32) -> F32:
    """Return vectors of length 1."""
    y: F32 = x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + UNIT_EPS)
    return y


# ---- the step


def run(x: F32, rows: I32, sparsity: str, stats: FFNStats, body: Callable[[F32, I32], F32]) -> F32:
    """One step, `body`: what an ops table may put off, record, or do elsewhere."""
    return body(x, rows)


def rows(x: F32, rows: I32) -> F32:
    found: F32 = np.ascontiguousarray(x[rows])
    return found


def routed(h: F32, bound: Bound) -> F32:
    """Return how much of each expert every token gets, [tokens, experts], of a router that reads h.

    One that reads a layer's input is asked before: `ffn_add` of that layer takes what it says.
    """
    spec, layer = bound.spec, bound.layer
    assert layer.router is not None
    seen = _normed(spec, layer.router_norm, h)
    logits = matmul(layer.router.weight, seen, layer.router.bias)
    weights = route(logits, spec.n_experts_active, spec.router, layer.selection_bias)
    return weights if layer.expert_scale is None else weights * layer.expert_scale


def begin_ffn(x: F32, bound: Bound, sparsity: str, *, shares: F32 | None = None, apart: bool = False) -> F32:
    """Return what a layer's halves read: x or, `apart`, x as it is now.

    Nothing is begun here. Others read from disk what the FFN will likely need, or let another device compute
    its part, while attention is computed.
    """
    return x.copy() if apart else x


def ffn_add(
    x: F32,
    h: F32,
    bound: Bound,
    sparsity: str,
    stats: FFNStats,
    record: F32 | None = None,
    *,
    shares: F32 | None = None,
) -> None:
    """x += FFN(norm(h)), in place; h may be x. `exact` skips the neurons no token needs: same answer;
    `predict` also those that are not predicted for any of a few tokens. `shares`: what `routed` said of them.

    `record` [tokens, neurons of all experts] takes what down is multiplied with (before a sub-norm).
    """
    spec, layer = bound.spec, bound.layer
    stream, h = h, _normed(spec, layer.ffn_norm, h)
    experts, width = len(layer.experts), layer.experts[0].part.gate.weight.shape[0]
    record = np.empty((len(x), experts * width), np.float32) if record is None else record
    sparsity = "exact" if sparsity == "predict" and len(x) > FEW else sparsity
    rows = width * (2 if spec.gated else 1)
    before = stats.active, stats.rows, stats.predicted
    stats.neurons += record.size
    stats.rows_dense += experts * rows
    stats.gates_dense += record.shape[1]
    if layer.router is None:
        y = _expert(bound, layer.experts[0], h, sparsity, stats, record)
    else:
        if shares is None:
            shares = routed(h if layer.router_norm is None else stream, bound)
        y = _mixture(bound, stream, h, sparsity, stats, record, shares)
    if stats.layers is not None:
        after = stats.active, stats.rows, stats.predicted
        stats.layers += (b - a for a, b in zip(before, after, strict=True))
    if stats.experts is not None:
        went = None if shares is None else np.count_nonzero(shares, axis=0).astype(np.int32)
        stats.experts.append(None if went is None else ExpertUse(went))
    _join(x, y, spec, layer.ffn_post_norm)
    if layer.per_layer is None:
        x *= np.float32(layer.scale)


def bind_per_layer(spec: ModelSpec, layer: Layer) -> Bound:
    return Bound(spec, None, layer)


def chooser(spec: ModelSpec, weights: Weights) -> None:
    """Logits are in RAM."""


def logits_digest(logits: F32) -> int:
    """Return 32 bits of a row's bits, in whatever order they are added: sum of bits times odd weights."""
    return int(np.multiply(logits.view(np.uint32), _weights(len(logits))).sum(dtype=np.uint32))


@functools.lru_cache(maxsize=2)
def _weights(n: int) -> NDArray[np.uint32]:
    w = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B1)
    w ^= w >> np.uint32(16)
    w *= np.uint32(0x85EBCA6B)
    return w | np.uint32(1)


def bring(given: F32) -> F32:
    """Return what a step's tokens bring to layers, [layers, tokens, width], as `per_layer_add` reads it."""
    return given


def per_layer_add(x: F32, bound: Bound, given: F32) -> None:
    """x = scale * (x + norm(down(act(gate x) * given))), in place: what tokens bring to the layer."""
    spec, p = bound.spec, bound.layer.per_layer
    assert p is not None
    a = activate(matmul(p.gate, x, None), spec.activation, spec.activation_bound, spec.swiglu_alpha)
    x += _normed(spec, p.post_norm, matmul(p.down, a * given, None))
    x *= np.float32(bound.layer.scale)


def _mixture(
    bound: Bound, stream: F32, h: F32, sparsity: str, stats: FFNStats, record: F32, weights: F32
) -> F32:
    """The chosen experts' answers, weighted and added up in ascending order, then the shared FFN's.

    `stream`: h before the norm, which a shared FFN may have its own norm of.
    """
    spec, layer, n = bound.spec, bound.layer, bound.spec.ffn_dim
    y = np.zeros_like(h)
    record[:] = 0
    for e, expert in enumerate(layer.experts):
        mine = np.flatnonzero(weights[:, e])
        if len(mine):
            own = np.empty((len(mine), n), np.float32)
            shares, scaled = weights[mine, e, None], spec.router.scales_input
            answer = _expert(bound, expert, h[mine] * shares if scaled else h[mine], sparsity, stats, own)
            y[mine] += answer if scaled else shares * answer
            record[mine, e * n : (e + 1) * n] = own
    if layer.shared is None:
        return y
    if layer.experts_post_norm is None:
        return y + _shared(bound, layer.shared, h)
    own = _shared(bound, layer.shared, _normed(spec, layer.shared_norm, stream))
    return _normed(spec, layer.experts_post_norm, y) + _normed(spec, layer.shared_post_norm, own)


def _shared(bound: Bound, f: FFN, h: F32) -> F32:
    """The FFN of every token, which no statistics count."""
    unseen = np.empty((len(h), f.part.gate.weight.shape[0]), np.float32)
    y = _expert(bound, f, h, "off", FFNStats(), unseen)
    gate = bound.layer.shared_router
    return y if gate is None else y * _sigmoid(matmul(gate, h, None))


def _expert(bound: Bound, f: FFN, h: F32, sparsity: str, stats: FFNStats, record: F32) -> F32:
    """One FFN of normed h, and what it read."""
    spec, part = bound.spec, f.part
    down = _values(part.down)
    gated = matmul(part.gate.weight, h, part.gate.bias)
    limit = spec.activation_bound
    a = activate(gated, spec.activation, limit, spec.swiglu_alpha)  # [tokens, neurons]
    computed: NDArray[np.bool_] = np.ones(a.shape[1], bool)
    if sparsity == "predict" and spec.sparse and part.predictor is not None:
        assert isinstance(part.predictor, LayerPredictor)
        computed = np.asarray(part.predictor.predicted(h).any(axis=0))
        a = np.where(computed, a, np.float32(0))
    skip = sparsity != "off" and spec.sparse
    needed = np.flatnonzero((a != 0).any(axis=0)) if skip else np.arange(a.shape[1])
    if part.up is not None:
        u = matmul(_values(part.up)[needed], h, None if part.up_bias is None else part.up_bias[needed])
        a = a.copy()
        a[:, needed] *= up_factor(u, spec.activation, limit, spec.up_activation == "relu")
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
