"""Device code that chooses a token of a row of logits: `torch_kernels.choose` says how.

Keys of 64 bits hold a logit and its token, so the order of candidates is that of integers, and no sum decides
who is one. A program keeps the largest of its keys, and fewer programs those of theirs.
"""

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_target import follow

LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def candidates(
    keys, sums, logits, draws, n, pitch, scale,
    WIDTH: tl.constexpr, BANS: tl.constexpr, K: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """The K largest keys of each C logits, and the sum of their digest."""
    follow()
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i = part * C + tl.arange(0, C)
    x = tl.load(logits + row.to(tl.int64) * pitch + i, mask=i < n, other=0.0) * scale
    bits = x.to(tl.int32, bitcast=True)
    w = i.to(tl.uint32) * 0x9E3779B1
    w = ((w ^ (w >> 16)) * 0x85EBCA6B) | 1
    digest = tl.where(i < n, bits.to(tl.uint32, bitcast=True) * w, 0)
    tl.store(sums + row * parts + part, tl.sum(digest.to(tl.int32, bitcast=True), axis=0))
    order = tl.where(x == 0, 0, bits)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    for b in tl.static_range(BANS):
        order = tl.where(
            i == tl.load(draws + row * WIDTH + (WIDTH - BANS) + b).to(tl.int32), -0x80000000, order
        )
    order = tl.where((bits & 0x7F800000) == 0x7F800000, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - i).to(tl.int64)
    found = tl.topk(tl.where(i < n, key, LEAST), K)
    tl.store(keys + (row.to(tl.int64) * parts + part) * K + tl.arange(0, K), found)


@triton.jit
def fewer(out, keys, n, K: tl.constexpr, C: tl.constexpr):
    """The K largest of each C keys, of n in a row."""
    follow()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * C + tl.arange(0, C)
    found = tl.topk(tl.load(keys + row * n + i, mask=i < n, other=LEAST), K)
    tl.store(out + (row * tl.num_programs(1) + part) * K + tl.arange(0, K), found)


@triton.jit
def draw(
    ids, chosen, keys, sums, logits, draws, n, parts, pitch, scale,
    WIDTH: tl.constexpr, K: tl.constexpr, C: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """A token of the K largest of n keys, at most C; `parts` sums of the digest, at most S."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    i, place, s = tl.arange(0, C), tl.arange(0, K), tl.arange(0, S)
    best = tl.topk(tl.load(keys + row * n + i, mask=i < n, other=LEAST), K)
    token, high = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), (best >> 32).to(tl.int32)
    value = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
    value = tl.where(high == 0x7FFFFFFF, 0.0, value).to(tl.float64)
    at = draws + row * WIDTH
    top_k, top_p, min_p, temperature, number = (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    )  # fmt: skip
    below = value - tl.max(value, axis=0)
    p = tl.where(place < top_k, tl.exp(below), 0.0)
    kept = (place < top_k) & (p >= min_p)
    reached = tl.cumsum(tl.where(kept, p / tl.sum(p, axis=0), 0.0), axis=0)
    last = tl.sum(((reached < top_p) & kept).to(tl.int32), axis=0)
    kept = kept & (place <= tl.where(top_p == 1, K, last))
    odds = tl.cumsum(tl.where(kept, tl.exp(below / temperature), 0.0), axis=0)
    most = tl.max(odds, axis=0)
    drawn = tl.sum(((odds <= number * most) & (odds < most)).to(tl.int32), axis=0)
    odd = tl.max(high, axis=0) == 0x7FFFFFFF
    drawn = tl.where(odd, 0, drawn)
    mine = tl.sum(tl.where(place == drawn, token, 0), axis=0)
    digest = tl.sum(tl.load(sums + row * parts + s, mask=s < parts, other=0), axis=0)
    bits = (tl.load(logits + row * pitch + mine) * scale).to(tl.int32, bitcast=True)
    tl.store(ids + row, mine)
    tl.store(chosen + row * 3, tl.where(odd, -1 - mine, mine))
    tl.store(chosen + row * 3 + 1, digest)
    tl.store(chosen + row * 3 + 2, tl.where(odd, bits, 0))
