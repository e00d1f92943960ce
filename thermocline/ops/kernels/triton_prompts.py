"""Device code of more tokens than `triton_tokens.attend` is for: attention by tiles of tokens.

`triton_kernels` launches this code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_target import follow
from thermocline.ops.kernels.triton_tokens import first_seen, tanh


@triton.jit
def halves(x):
    """x as two f16, whose sum is as exact as f32 but for what is below 2**-25."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def attend_many(
    parts, qkv, positions, sequence, table, k, v,
    tokens, n_kv, group, width, span, spans, window, scale, cap, pitch,
    DIM: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, R: tl.constexpr, CAPPED: tl.constexpr,
    CHUNKED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv head, span): parts as `triton_tokens.attend`'s, of R // group consecutive tokens.

    A tile's R rows are its tokens' q heads. The tile's sequences take turns, each with sums of its own; a
    page is read once for all of its tokens. To a row that does not see a page it adds exact zeros, so that
    no bit depends on which tokens share a tile.
    """
    follow()
    tile, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r, d, p = tl.arange(0, R), tl.arange(0, D), tl.arange(0, BLOCK)
    each = R // group
    token = tile * each + r // group
    real = (r < each * group) & (token < tokens)
    own = tl.load(positions + token, mask=real, other=-1)
    of = tl.load(sequence + token, mask=real, other=-1)
    first = tl.maximum(first_seen(own, window, CHUNKED), s * span)
    end = tl.minimum(own + 1, (s + 1) * span)
    real = real & (first < end)
    head = g * group + r % group
    at = qkv + (tile * each).to(tl.int64) * pitch
    mine_at = r // group * pitch + head * DIM
    part = ((token.to(tl.int64) * (n_kv * group) + head) * spans + s) * (DIM + 2)
    q = ()
    for i in tl.static_range(PIECES):
        known = real[:, None] & (i * D + d < DIM)[None, :]
        q = q + (halves(tl.load(at + mine_at[:, None] + i * D + d[None, :], mask=known, other=0) * scale),)
    for turn in range(
        tl.min(tl.where(real, of, 1 << 30), axis=0), tl.max(tl.where(real, of, -1), axis=0) + 1
    ):
        mine = real & (of == turn)
        low = tl.min(tl.where(mine, first, 1 << 30), axis=0)
        high = tl.max(tl.where(mine, end, 0), axis=0)
        pages = table + turn * width
        top = tl.full((R,), float("-inf"), tl.float32)
        total = tl.zeros((R,), tl.float32)
        acc = (tl.zeros((R, D), tl.float32),) * PIECES
        for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
            page = (tl.load(pages + block).to(tl.int64) * n_kv + g) * DIM * BLOCK
            position = block * BLOCK + p
            scores = tl.zeros((R, BLOCK), tl.float32)
            for i in tl.static_range(PIECES):
                e = (i * D + d)[:, None]
                keys = tl.load(k + page + e * BLOCK + p[None, :], mask=e < DIM, other=0)
                scores = tl.dot(q[i][1], keys, scores)
                scores = tl.dot(q[i][0], keys, scores)
            if CAPPED:
                scores = cap * tanh(scores / cap)
            seen = mine[:, None] & (position[None, :] >= first[:, None]) & (position[None, :] < end[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # of rows that have seen nothing yet
            weights = tl.exp(scores - base[:, None])
            fade = tl.exp(top - base)
            total = total * fade + tl.sum(weights, axis=1)
            filled = (position >= low) & (position < high)  # other slots may hold no number
            new = ()
            for i in tl.static_range(PIECES):
                ok = filled[:, None] & (i * D + d < DIM)[None, :]
                values = tl.load(v + page + p[:, None] * DIM + i * D + d[None, :], mask=ok, other=0)
                new = new + (tl.dot(weights.to(tl.float16), values, acc[i] * fade[:, None]),)
            acc = new
            top = higher
        for i in tl.static_range(PIECES):
            asked = mine[:, None] & (i * D + d < DIM)[None, :]
            tl.store(parts + part[:, None] + i * D + d[None, :], acc[i], mask=asked)
        tl.store(parts + part + DIM, top, mask=mine)
        tl.store(parts + part + DIM + 1, total, mask=mine)
