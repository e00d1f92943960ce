"""Device code for more than a few tokens of a mixture: each token is multiplied by its own experts alone.

(Token, expert) pairs are sorted by expert, then by token, and cut into tiles of M pairs of one expert. Grids
have as many tiles as there may be; those without pairs end at once. A pair's bits do not depend on its tile:
a row of a tile is multiplied by itself, and all tiles are of one size.

Memory: as triton_rows'. `pairs` i32: the token of each pair. `tiles` i32 [.., 3]: expert, first pair, pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_target import follow
from thermocline.ops.kernels.triton_tiles import put, row_products, tile_products
from thermocline.ops.kernels.triton_tokens import activation, up_factor


@triton.jit
def arrange(
    pairs, places, tiles, marks, weights, tokens, experts, active, pitch, n_tiles, neurons,
    E: tl.constexpr, C: tl.constexpr, A: tl.constexpr, T: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Sort the pairs of weights [tokens, experts] that are not 0, at most `active` of a token.

    A program has C tokens and T tiles, and counts all pairs for itself. places i32 [tokens, active]: a
    token's pairs, by expert, then -1. marks i32 [neurons] become 0.
    """
    follow()
    program, e = tl.program_id(0), tl.arange(0, E)
    total, before = tl.zeros((E,), tl.int32), tl.zeros((E,), tl.int32)
    for start in range(0, tokens, C):
        count = tl.sum(going_to(weights, start + tl.arange(0, C), tokens, e, experts, pitch), axis=0)
        total += count
        before += tl.where(start < program * C, count, 0)
    begin = tl.cumsum(total, axis=0) - total

    token = program * C + tl.arange(0, C)
    going = going_to(weights, token, tokens, e, experts, pitch)
    at = (begin + before)[None, :] + tl.cumsum(going, axis=0) - going
    rank = tl.cumsum(going, axis=1) - going
    tl.store(pairs + at, tl.broadcast_to(token[:, None], (C, E)), mask=going != 0)
    tl.store(places + token[:, None] * active + rank, at, mask=going != 0)
    k = tl.arange(0, A)[None, :]
    none = (k >= tl.sum(going, axis=1)[:, None]) & (k < active) & (token < tokens)[:, None]
    tl.store(places + token[:, None] * active + k, tl.full((C, A), -1, tl.int32), mask=none)

    each = tl.cdiv(total, M)
    ends = tl.cumsum(each, axis=0)
    i = program * T + tl.arange(0, T)
    mine = ((ends - each)[None, :] <= i[:, None]) & (i[:, None] < ends[None, :])  # one expert, or none
    skipped = (i[:, None] - (ends - each)[None, :]) * M
    to = tiles + 3 * i
    tl.store(to, tl.sum(tl.where(mine, e[None, :], 0), axis=1), mask=i < n_tiles)
    tl.store(to + 1, tl.sum(tl.where(mine, begin[None, :] + skipped, 0), axis=1), mask=i < n_tiles)
    left = tl.sum(tl.where(mine, total[None, :] - skipped, 0), axis=1)
    tl.store(to + 2, tl.minimum(left, M), mask=i < n_tiles)
    for start in range(program * 1024, neurons, tl.num_programs(0) * 1024):
        n = start + tl.arange(0, 1024)
        tl.store(marks + n, tl.zeros((1024,), tl.int32), mask=n < neurons)


@triton.jit
def going_to(weights, token, tokens, e, experts, pitch):
    """1 where a token [C] goes to an expert [E], else 0."""
    ok = (token < tokens)[:, None] & (e < experts)[None, :]
    return (tl.load(weights + token[:, None] * pitch + e[None, :], mask=ok, other=0) != 0).to(tl.int32)


@triton.jit
def tile_at(tiles, i):
    """(expert, first pair, pairs) of tile i."""
    tile = tiles + 3 * i
    return tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def gate_up_pairs(
    h, gate, bias, up, up_bias, x, given, given_up, weights, pairs, tiles, marks, counts,
    n, columns, gate_stride, up_stride, tokens, pitch, bound, alpha,
    ACTIVATION: tl.constexpr, UP_RELU: tl.constexpr, SCALES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    UP_FORMAT: tl.constexpr, UP_G: tl.constexpr, UP_V: tl.constexpr,
):  # fmt: skip
    """h [pairs, n]: N neurons of a tile's expert, which has n, for its tokens. The rest as gate_up_few's.

    given, given_up: as tile_products'. marks: of each neuron the bits of what one of its tiles has counted
    already.
    """
    follow()
    expert, first, count = tile_at(tiles, tl.program_id(1))
    if count == 0:
        return
    pair = first + tl.arange(0, M)
    there = tl.arange(0, M) < count
    token = tl.load(pairs + pair, mask=there, other=0)
    row = tl.program_id(0) * N + tl.arange(0, N)
    live = row < n
    share = tl.load(weights + token * pitch + expert, mask=there, other=0)[:, None]
    token = tl.where(there, token, tokens)
    y = tile_products(gate + expert * n * gate_stride, row, n, columns, gate_stride, x, given, token, tokens,
                      tokens, FORMAT, G, V)  # fmt: skip
    if bias is not None:
        y += tl.load(bias + expert * n + row, mask=live, other=0)[None, :]
    if SCALES:
        y *= share
    ok = there[:, None] & live[None, :]
    a = tl.where(ok, activation(y, bound, alpha, ACTIVATION), 0.0)
    bits = 1 + 2 * tl.max((a != 0).to(tl.int32), axis=0)
    if up is not None:
        u = tile_products(up + expert * n * up_stride, row, n, columns, up_stride, x, given_up, token, tokens,
                          tokens, UP_FORMAT, UP_G, UP_V)  # fmt: skip
        if up_bias is not None:
            u += tl.load(up_bias + expert * n + row, mask=live, other=0)[None, :]
        if SCALES:
            u *= share
        a = tl.where(a != 0, a * up_factor(u, bound, ACTIVATION, UP_RELU), 0.0)
    active = (a != 0).to(tl.int32)
    if not SCALES:
        a = tl.where(a != 0, a * share, 0.0)
    tl.store(h + pair.to(tl.int64)[:, None] * n + row[None, :], a, mask=ok)
    bits += 4 * tl.max(active, axis=0)
    new = bits & ~tl.atomic_or(marks + expert * n + row, bits, mask=live, sem="relaxed")
    new = tl.where(live, new, 0)
    tl.atomic_add(counts, tl.sum(tl.sum(active, axis=0), axis=0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(new >> 1 & 1, axis=0), sem="relaxed")
    tl.atomic_add(counts + 2, tl.sum(new & 1, axis=0), sem="relaxed")
    tl.atomic_add(counts + 3, tl.sum(new >> 2, axis=0), sem="relaxed")


@triton.jit
def down_pairs(
    answers, data, h, given, tiles, rows, columns, stride, pairs,
    M: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """answers [pairs, rows]: N rows of a tile's expert, which has `rows`, times h [pairs, columns].

    given: as tile_products'.
    """
    follow()
    expert, first, count = tile_at(tiles, tl.program_id(1))
    if count == 0:
        return
    row, pair = tl.program_id(0) * N + tl.arange(0, N), first + tl.arange(0, M)
    y = tile_products(data + expert * rows * stride, row, rows, columns, stride, h, given, pair,
                      first + count, pairs, FORMAT, G, V)  # fmt: skip
    put(answers, y, pair, first + count, row, rows, False)


@triton.jit
def down_bundle_pairs(
    answers, data, h, tiles, n, columns, stride,
    FORMAT: tl.constexpr, M: tl.constexpr, K: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """answers [pairs, columns]: h [pairs, n] times G units of the rows of a tile's expert, one a neuron."""
    follow()
    expert, first, count = tile_at(tiles, tl.program_id(1))
    if count == 0:
        return
    g, pair = tl.program_id(0) * G + tl.arange(0, G), first + tl.arange(0, M)
    row_products(answers, data + expert * n * stride, g, n, columns, stride, h, pair, first + count,
                 False, FORMAT, K, V)  # fmt: skip


@triton.jit
def add_pairs(out, answers, places, active, dim, ADD: tl.constexpr, C: tl.constexpr):
    """out [tokens, dim] (+)= a token's answers, in the order of experts: C columns a program."""
    follow()
    token, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    y = tl.zeros((C,), tl.float32)
    for k in range(0, active):
        pair = tl.load(places + token * active + k)
        end = tl.where(pair >= 0, dim, 0)
        y += tl.load(answers + pair.to(tl.int64) * dim + c, mask=c < end, other=0)
    to = out + token * dim + c
    if ADD:
        y += tl.load(to, mask=c < dim, other=0)
    tl.store(to, y, mask=c < dim)
