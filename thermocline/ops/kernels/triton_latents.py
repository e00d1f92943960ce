"""Device code of latent attention: products of each head with its own rows, latents into pages, scores.

`triton_kernels` launches this code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_rows import dots
from thermocline.ops.kernels.triton_target import fetch_ahead, follow, precision


@triton.jit
def head_products(
    out, data, x, rows, columns, stride, tokens, out_token, out_head, x_token, x_head,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Program (R rows, head, B tokens)."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    head, first = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64) * B
    b = tl.arange(0, B)[:, None]
    own, mine = data + head * rows * stride, x + head * x_head + first * x_token
    fetch_ahead(own, row, rows, stride)
    follow()
    left = tokens - first
    y = dots(own, row, row < rows, stride, columns, mine, left, x_token, FORMAT, B, R, G, V, U, EVEN)
    to = out + head * out_head + (first + b) * out_token + row[None, :]
    tl.store(to, y, mask=(b < left) & (row < rows)[None, :])


@triton.jit
def latent_store(
    q, queries, latent, kv_norm, cos, sin, positions, sequence, table, k, heads, width, eps,
    NOPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    A: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Program (token, head); the program behind the last head stores the latent."""
    follow()
    b, head, i = tl.program_id(0), tl.program_id(1), tl.arange(0, A)
    DIM: tl.constexpr = RANK + 2 * HALF
    is_key = head == heads
    from_query = queries + (b.to(tl.int64) * heads + head) * (NOPE + 2 * HALF) + NOPE
    from_key = latent + b.to(tl.int64) * DIM + RANK
    at = from_query
    if is_key:
        at = from_key
    turn = i < HALF
    x = tl.load(at + i, mask=turn, other=0)
    y = tl.load(at + HALF + i, mask=turn, other=0)
    c = tl.load(cos + b * HALF + i, mask=turn, other=0)
    s = tl.load(sin + b * HALF + i, mask=turn, other=0)
    x, y = x * c - y * s, y * c + x * s
    if is_key:
        d = tl.arange(0, D)
        z = tl.load(from_key - RANK + d, mask=d < RANK, other=0)
        z = z / tl.sqrt(tl.sum(z * z, axis=0) / RANK + eps) * tl.load(kv_norm + d, mask=d < RANK, other=0)
        position = tl.load(positions + b)
        page = tl.load(table + tl.load(sequence + b) * width + position // BLOCK).to(tl.int64)
        key = k + (page * BLOCK + position % BLOCK) * DIM
        tl.store(key + d, z.to(tl.float16), mask=d < RANK)
        tl.store(key + RANK + i, x.to(tl.float16), mask=turn)
        tl.store(key + RANK + HALF + i, y.to(tl.float16), mask=turn)
    else:
        to = q + (b.to(tl.int64) * heads + head) * DIM + RANK
        tl.store(to + i, x, mask=turn)
        tl.store(to + HALF + i, y, mask=turn)


@triton.jit
def dot(a, halves, acc):
    """acc + a by what was f16, as exact as f32: such numbers are whole as tf32, and `a` goes in two parts."""
    high = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    acc = tl.dot(high, halves, acc, input_precision=precision("tf32"))
    return tl.dot(a - high, halves, acc, input_precision=precision("tf32"))


@triton.jit
def latent_attend(
    parts, q, positions, sequence, table, k, heads, width, span, spans, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Program (token, H heads, span): parts [tokens, heads, spans, RANK + 2], as `triton_tokens.attend`.

    A latent's N parts of C elements are read one by one: first as keys, then as values, out of a cache.
    """
    follow()
    b, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(positions + b)
    low = s * span
    high = tl.minimum(own + 1, low + span)
    if low < high:
        DIM: tl.constexpr = RANK + ROPE
        head, d, e, p = g * H + tl.arange(0, H), tl.arange(0, C), tl.arange(0, E), tl.arange(0, BLOCK)
        at = q + (b.to(tl.int64) * heads + head)[:, None] * DIM
        real = (head < heads)[:, None]
        turned = tl.load(at + RANK + e[None, :], mask=real & (e < ROPE)[None, :], other=0) * scale
        pages = table + tl.load(sequence + b) * width
        top = tl.full((H,), float("-inf"), tl.float32)
        total = tl.zeros((H,), tl.float32)
        acc = (tl.zeros((H, C), tl.float32),) * N
        for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
            page = k + tl.load(pages + block).to(tl.int64) * BLOCK * DIM
            seen = block * BLOCK + p < high
            mine = page + p[:, None] * DIM
            ends = tl.load(mine + RANK + e[None, :], mask=seen[:, None] & (e < ROPE)[None, :], other=0)
            scores = dot(turned, tl.trans(ends.to(tl.float32)), tl.zeros((H, BLOCK), tl.float32))
            for i in tl.static_range(N):
                inside = (C * i + d < RANK)[None, :]
                plain = tl.load(at + C * i + d[None, :], mask=real & inside, other=0) * scale
                keys = tl.load(mine + C * i + d[None, :], mask=seen[:, None] & inside, other=0)
                scores = dot(plain, tl.trans(keys.to(tl.float32)), scores)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(weights, axis=1)
            new = ()
            for i in tl.static_range(N):
                inside = seen[:, None] & (C * i + d < RANK)[None, :]
                values = tl.load(mine + C * i + d[None, :], mask=inside, other=0).to(tl.float32)
                new = new + (dot(weights, values, acc[i] * fade[:, None]),)
            acc = new
            top = higher
        part = ((b.to(tl.int64) * heads + head) * spans + s) * (RANK + 2)
        for i in tl.static_range(N):
            inside = real & (C * i + d < RANK)[None, :]
            tl.store(parts + part[:, None] + C * i + d[None, :], acc[i], mask=inside)
        tl.store(parts + part + RANK, top, mask=head < heads)
        tl.store(parts + part + RANK + 1, total, mask=head < heads)
