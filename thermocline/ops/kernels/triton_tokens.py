"""Device code over tokens: norms, activations, rotation, attention over pages, routes, predictors' bits.

`triton_kernels` launches this code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_bytes import put_ints
from thermocline.ops.kernels.triton_target import follow, last_of, precision


@triton.jit
def tanh(x):
    """Near 0 a series (off by x**8 / 50), since 1 - exp(-2x) has few digits there; no exp that overflows."""
    e = tl.exp(-2 * tl.abs(x))
    far = (1 - e) / (1 + e)
    s = x * x
    near = x * (1 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


@triton.jit
def activation(g, bound, alpha, KIND: tl.constexpr):
    """Compute `reference.activate`. A NaN stays one."""
    if KIND == "silu":
        return g / (1 + tl.exp(-g))
    elif KIND == "swiglu_oai":
        g = tl.where(g > bound, bound, g)
        return g / (1 + tl.exp(-alpha * g))
    elif KIND == "gelu":
        return 0.5 * g * (1 + tl.erf(g * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * g * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
    elif KIND == "relu":
        return tl.where(g <= 0, 0.0, g)
    elif KIND == "fatrelu":
        return tl.where(g <= bound, 0.0, g)
    else:
        tl.static_assert(KIND == "relu2")
        return tl.where(g <= 0, 0.0, g * g)


@triton.jit
def up_factor(u, bound, KIND: tl.constexpr, UP_RELU: tl.constexpr):
    """Compute what an activation is multiplied with, of up's values."""
    if UP_RELU:
        return tl.where(u <= 0, 0.0, u)
    elif KIND == "swiglu_oai":
        return tl.where(u > bound, bound, tl.where(u < -bound, -bound, u)) + 1
    else:
        return u


@triton.jit
def norm(
    out, ints, x, weight, bias, dim, out_pitch, pitch, eps, scale,
    LAYER: tl.constexpr, ADD: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """A program a token: out = scale * norm(x), or that added. out may be x. ints: out, quantised."""
    follow()
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    ok = i < dim
    y = tl.load(x + b * pitch + i, mask=ok, other=0)
    if weight is not None:
        if LAYER:
            y = tl.where(ok, y - tl.sum(y, axis=0) / dim, 0.0)
        y = y / tl.sqrt(tl.sum(y * y, axis=0) / dim + eps) * tl.load(weight + i, mask=ok, other=0)
        if bias is not None:
            y += tl.load(bias + i, mask=ok, other=0)
    if ADD:
        y = tl.load(out + b * out_pitch + i, mask=ok, other=0) + scale * y
    tl.store(out + b * out_pitch + i, y, mask=ok)
    if ints is not None:
        put_row(ints, y, tl.program_id(0), dim // 32, tl.num_programs(0))


@triton.jit
def put_row(ints, y, row, blocks, rows):
    """Write y [D], the blocks of one of so many rows, quantised: D may be more, but not less than 32."""
    N: tl.constexpr = y.shape[0] // 32
    b = tl.arange(0, N)
    put_ints(ints, tl.reshape(y, (N, 32)), row * blocks + b, b < blocks, rows * blocks)


@triton.jit
def activate(out, gate, up, n, bound, alpha, KIND: tl.constexpr, UP_RELU: tl.constexpr, C: tl.constexpr):
    follow()
    i = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    g = tl.load(gate + i, mask=i < n, other=0)
    a = activation(g, bound, alpha, KIND)
    if up is not None:
        a *= up_factor(tl.load(up + i, mask=i < n, other=0), bound, KIND, UP_RELU)
    tl.store(out + i, a, mask=i < n)


@triton.jit
def open(x, gate, n, WIDE: tl.constexpr, C: tl.constexpr):
    """Program (token, C numbers of it). WIDE: each has a gate of its own."""
    follow()
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * C + tl.arange(0, C)
    at = gate + b * n + i if WIDE else gate + b + 0 * i
    g = tl.load(at, mask=i < n, other=0)
    y = tl.load(x + b * n + i, mask=i < n, other=0)
    tl.store(x + b * n + i, y / (1 + tl.exp(-g)), mask=i < n)


@triton.jit
def gated(
    h, ups, named, weights, counts, n, named_stride, tokens, each, pitch, bound, alpha,
    ACTIVATION: tl.constexpr, UP_RELU: tl.constexpr, SCALES: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Replace many tokens' gates of R neurons in h by their activation times `ups`. Counts as gate_up_few."""
    follow()
    row = tl.program_id(0) * R + tl.arange(0, R)
    wanted = row < n
    if named is not None:
        seen = tl.zeros((R,), tl.int32)
        for start in range(0, tokens, T):
            token = start + tl.arange(0, T)
            ok = (token < tokens)[:, None] & (row < n)[None, :]
            at = named + token[:, None] * named_stride + row[None, :] // 8
            bit = (tl.load(at, mask=ok, other=0).to(tl.int32) >> (row % 8)[None, :]) & 1
            seen += tl.sum(bit, axis=0)
        wanted = wanted & (seen > 0)
    if weights is not None:
        going = tl.zeros((R,), tl.int32)
        for start in range(0, tokens, T):
            token = start + tl.arange(0, T)
            ok = (token < tokens)[:, None] & (row < n)[None, :]
            share = tl.load(weights + token[:, None] * pitch + row[None, :] // each, mask=ok, other=0)
            going += tl.sum((share != 0).to(tl.int32), axis=0)
        wanted = wanted & (going > 0)
    opened = tl.zeros((R,), tl.int32)
    pairs = tl.zeros((R,), tl.int32)
    for start in range(0, tokens, T):
        token = start + tl.arange(0, T)
        at = token.to(tl.int64)[:, None] * n + row[None, :]
        ok = (token < tokens)[:, None] & (row < n)[None, :]
        g = tl.load(h + at, mask=ok & wanted[None, :], other=0)
        if weights is not None:
            share = tl.load(weights + token[:, None] * pitch + row[None, :] // each, mask=ok, other=0)
            g = g * share if SCALES else g
        a = tl.where(wanted[None, :], activation(g, bound, alpha, ACTIVATION), 0.0)
        if weights is not None:
            a = tl.where(share != 0, a, 0.0)
        opened += tl.sum(((a != 0) & ok).to(tl.int32), axis=0)
        if ups is not None:
            u = tl.load(ups + at, mask=ok, other=0)
            if SCALES:
                u *= share
            a = tl.where(a != 0, a * up_factor(u, bound, ACTIVATION, UP_RELU), 0.0)
        pairs += tl.sum(((a != 0) & ok).to(tl.int32), axis=0)
        if weights is not None and not SCALES:
            a = tl.where(a != 0, a * share, 0.0)
        tl.store(h + at, a, mask=ok)
    tl.atomic_add(counts + 3, tl.sum((pairs > 0).to(tl.int32), axis=0), sem="relaxed")
    tl.atomic_add(counts, tl.sum(pairs, axis=0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum((opened > 0).to(tl.int32), axis=0), sem="relaxed")
    tl.atomic_add(counts + 2, tl.sum(wanted.to(tl.int32), axis=0), sem="relaxed")


@triton.jit
def softcap(x, n, cap, C: tl.constexpr):
    follow()
    i = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    tl.store(x + i, cap * tanh(tl.load(x + i, mask=i < n, other=0) / cap), mask=i < n)


@triton.jit
def ranks(x, i, among):
    """How many of x come before each: larger ones, NaNs, equal ones before it. among [E, E]: with whom."""
    nan = x != x
    mine, other, mine_nan, other_nan = x[:, None], x[None, :], nan[:, None], nan[None, :]
    equal = (mine == other) | (mine_nan & other_nan)
    first = equal & (i[None, :] < i[:, None])
    before = (other_nan & (mine_nan == 0)) | ((mine_nan == other_nan) & ((other > mine) | first))
    return tl.sum((before & among).to(tl.int32), axis=1)


@triton.jit
def route(
    weights, logits, bias, each, experts, n_active, epsilon, scale,
    SCORE: tl.constexpr, WEIGHTS: tl.constexpr, FLOOR: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BEST: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """A program a token. An expert is chosen by its rank, a group by that of the sum of its BEST best."""
    follow()
    b = tl.program_id(0)
    i = tl.arange(0, E)
    real = i < experts
    x = tl.load(logits + b * experts + i, mask=real, other=float("-inf"))
    everyone = (i[:, None] >= 0) & (i[None, :] >= 0)
    score, wanted = x, x
    if SCORE == "softmax":
        top = tl.sum(tl.where(ranks(x, i, everyone) == 0, x, 0.0), axis=0)
        score = tl.exp(x - top)
        score = score / tl.sum(score, axis=0)
    if SCORE == "sigmoid":
        score = 1 / (1 + tl.exp(-x))
    if bias is not None:
        wanted = score + tl.load(bias + i, mask=real, other=0)
    elif GROUPS > 1:
        wanted = score
    wanted = tl.where(real, wanted, float("-inf"))
    if GROUPS > 1:
        group = i // (experts // GROUPS)
        together = group[:, None] == group[None, :]
        own = ranks(wanted, i, together)
        best = together & (own < BEST)[None, :] & real[None, :]
        of_group = tl.sum(tl.where(best, wanted[None, :], 0.0), axis=1)
        leader = (own == 0) & real
        kept = ranks(of_group, group, leader[None, :] & (together == 0)) < KEPT
        wanted = tl.where(kept & real, wanted, float("-inf"))
    rank = ranks(wanted, i, everyone)
    chosen = (rank < n_active) & real
    if WEIGHTS == "mixed":
        for turn in range(n_active):
            best = tl.sum(tl.where(rank == turn, x, 0.0), axis=0)
            apart = (best - x) / tl.maximum(tl.abs(x), best)
            near = ((apart > 2 * epsilon) == 0) & (rank >= turn) & real
            total = tl.sum(tl.where(near, tl.exp(x - best), 0.0), axis=0)
            score = tl.where(rank == turn, 1 / total, score)
    if WEIGHTS == "chosen":
        first = ranks(tl.where(chosen, x, float("-inf")), i, everyone) == 0
        score = tl.exp(x - tl.sum(tl.where(first, x, 0.0), axis=0))
    p = tl.where(chosen, score, 0.0)
    if WEIGHTS != "score" and WEIGHTS != "mixed":
        total = tl.sum(p, axis=0)
        if FLOOR:
            total = tl.where(total < epsilon, epsilon, total)
        else:
            total = total + epsilon
        p = p / total
    p = p * scale
    if each is not None:
        p = p * tl.load(each + i, mask=real, other=0)
    tl.store(weights + b * experts + i, tl.where(chosen, p, 0.0), mask=real)


# ---- predictors


@triton.jit
def name(named, scores, threshold, n, hot, C: tl.constexpr):
    """Program (token, C bytes of eight neurons each)."""
    follow()
    b = tl.program_id(0)
    byte = tl.program_id(1) * C + tl.arange(0, C)
    i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    score = tl.load(scores + b.to(tl.int64) * n + i, mask=i < n, other=0)
    low = score < tl.load(threshold + i, mask=i < n, other=0)
    bits = ((i < n) & ((i < hot) | (low == 0))).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(named + b * tl.cdiv(n, 8) + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte * 8 < n)


@triton.jit
def signs(scores, data, x, n, columns, stride, R: tl.constexpr, C: tl.constexpr):
    """Program (token, R neurons): columns less twice those whose signs differ."""
    follow()
    b = tl.program_id(0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    at = data + row.to(tl.int64)[:, None] * stride
    differ = tl.zeros((R, C), tl.int32)
    for start in range(0, tl.cdiv(columns, 8), C):
        byte = start + tl.arange(0, C)
        i = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
        above = (tl.load(x + b.to(tl.int64) * columns + i, mask=i < columns, other=0) > 0).to(tl.int32)
        mine = tl.sum(above << tl.arange(0, 8)[None, :], axis=1)
        valid = tl.sum((i < columns).to(tl.int32) << tl.arange(0, 8)[None, :], axis=1)
        ok = (row < n)[:, None] & (byte * 8 < columns)[None, :]
        bits = (tl.load(at + byte[None, :], mask=ok, other=0).to(tl.int32) ^ mine[None, :]) & valid[None, :]
        bits = bits - ((bits >> 1) & 0x55)  # ones of each two bits, of each four, of all
        bits = (bits & 0x33) + ((bits >> 2) & 0x33)
        differ += (bits + (bits >> 4)) & 15
    score = columns - 2 * tl.sum(differ, axis=1)
    tl.store(scores + b.to(tl.int64) * n + row, score.to(tl.float32), mask=row < n)


# ---- attention


@triton.jit
def head_normed(x, y, z, i, j, turn, weight, eps, DIM: tl.constexpr, HALF: tl.constexpr, LAYER: tl.constexpr):
    """Return the three parts of a head under an RMS norm or LayerNorm of all of it."""
    rest = j < DIM
    if LAYER:
        mean = (tl.sum(x, axis=0) + tl.sum(y, axis=0) + tl.sum(z, axis=0)) / DIM
        x = tl.where(turn, x - mean, 0.0)
        y = tl.where(turn, y - mean, 0.0)
        z = tl.where(rest, z - mean, 0.0)
    total = tl.sum(x * x, axis=0) + tl.sum(y * y, axis=0) + tl.sum(z * z, axis=0)
    root = tl.sqrt(total / DIM + eps)
    x, y, z = x / root, y / root, z / root
    if weight is not None:
        x = x * tl.load(weight + i, mask=turn, other=0)
        y = y * tl.load(weight + HALF + i, mask=turn, other=0)
        z = z * tl.load(weight + j, mask=rest, other=0)
    return x, y, z


@triton.jit
def turned(x, y, c, s):
    """Turn x with y. Which products are fused is said, so that it is the same in every kernel."""
    return tl.fma(x, c, -(y * s)), tl.fma(y, c, x * s)


@triton.jit
def place_of(
    head, token, tokens, positions, sequence, table, k, v, n, n_kv, width,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the place of a key's or a value's first element, and the step to the next: of a token's `head`,
    which comes behind n queries.
    """
    position = tl.load(positions + token, mask=token < tokens, other=0)
    row = table + tl.load(sequence + token, mask=token < tokens, other=0) * width
    page = tl.load(row + position // BLOCK, mask=token < tokens, other=0).to(tl.int64)
    is_k = head < n + n_kv
    first = (page * n_kv + (head - n) % n_kv) * DIM * BLOCK
    return (k if is_k else v) + first + (position % BLOCK) * tl.where(is_k, 1, DIM), tl.where(is_k, BLOCK, 1)


@triton.jit
def first_seen(own, window, CHUNKED: tl.constexpr):
    """Return the first position that one at `own` attends to, or less than 0."""
    return own // window * window if CHUNKED else own + 1 - window


@triton.jit
def rope_store(
    qkv, q_norm, k_norm, cos, sin, positions, sequence, table, k, v, n, n_kv, width, eps, warmth, warm_span,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, A: tl.constexpr, REST: tl.constexpr,
    LAST: tl.constexpr, OWN: tl.constexpr, V_NORM: tl.constexpr, WARM: tl.constexpr,
):  # fmt: skip
    """Program (token, head). HALF elements turn with HALF others; the rest of DIM stay.

    Each element is read and written by one thread, so in place is safe. LAST: norms are behind rope; OWN:
    LayerNorms, each head's with its own weights; WARM: queries grow with their position.
    """
    follow()
    b, head, i, j = tl.program_id(0), tl.program_id(1), tl.arange(0, A), 2 * HALF + tl.arange(0, REST)
    at = qkv + (b.to(tl.int64) * tl.num_programs(1) + head) * DIM
    turn = i < HALF
    x = tl.load(at + i, mask=turn, other=0)
    y = tl.load(at + HALF + i, mask=turn, other=0)
    z = tl.load(at + j, mask=j < DIM, other=0)
    weight = q_norm
    if q_norm is not None:
        weight = q_norm if head < n else k_norm
        if OWN:
            weight += (head if head < n else head - n) * DIM
        if not LAST:
            if head < n + n_kv:
                x, y, z = head_normed(x, y, z, i, j, turn, weight, eps, DIM, HALF, OWN)
    if V_NORM:
        if head >= n + n_kv:
            x, y, z = head_normed(x, y, z, i, j, turn, None, eps, DIM, HALF, False)
    if HALF > 0:
        if head < n + n_kv:
            c = tl.load(cos + b * HALF + i, mask=turn, other=0)
            s = tl.load(sin + b * HALF + i, mask=turn, other=0)
            x, y = turned(x, y, c, s)
    if LAST:
        if head < n + n_kv:
            x, y, z = head_normed(x, y, z, i, j, turn, weight, eps, DIM, HALF, OWN)
    if WARM:
        if head < n:
            grown = 1 + warmth * tl.log(1 + tl.floor((tl.load(positions + b) + 1).to(tl.float32) / warm_span))
            x, y, z = x * grown, y * grown, z * grown
    tl.store(at + i, x, mask=turn)
    tl.store(at + HALF + i, y, mask=turn)
    tl.store(at + j, z, mask=j < DIM)
    if head >= n:
        tokens = tl.num_programs(0)
        to, step = place_of(head, b, tokens, positions, sequence, table, k, v, n, n_kv, width, DIM, BLOCK)
        tl.store(to + i * step, x.to(tl.float16), mask=turn)
        tl.store(to + (HALF + i) * step, y.to(tl.float16), mask=turn)
        tl.store(to + j * step, z.to(tl.float16), mask=j < DIM)


@triton.jit
def scores_of(q, keys, seen, cap, D: tl.constexpr, DIM: tl.constexpr, CAPPED: tl.constexpr):
    """The pieces q [H, D] by keys at `keys` [D, BLOCK]: as exact as f32, since both go through the tensor
    cores in parts.
    """
    BLOCK: tl.constexpr = seen.shape[0]
    d, p = tl.arange(0, D)[:, None], tl.arange(0, BLOCK)[None, :]
    scores = tl.zeros((q[0].shape[0], BLOCK), tl.float32)
    for i in tl.static_range(len(q)):
        piece = tl.load(keys + (i * D + d) * BLOCK + p, mask=i * D + d < DIM, other=0)
        scores = tl.dot(q[i], piece.to(tl.float32), scores, input_precision=precision("tf32x3"))
    if CAPPED:
        scores = cap * tanh(scores / cap)
    return tl.where(seen[None, :], scores, float("-inf"))


@triton.jit
def attend(
    parts, qkv, positions, sequence, table, k, v, out, ints, sinks, arrivals,
    n_kv, group, width, span, spans, window, scale, cap, pitch,
    DIM: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, H: tl.constexpr, CAPPED: tl.constexpr,
    CHUNKED: tl.constexpr, PIECES: tl.constexpr, J: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head, span): parts [tokens, heads, spans, DIM + 2] of the kv head's q heads.

    J: of a token and kv head the last program joins the spans, S at a time, of at most so many heads; 0: that
    is a launch of its own.

    A part: values weighed with exp(score - greatest), then the greatest score, then the weights' sum. Of
    spans a token does not see nothing is written. A large head is worked on in PIECES of D: as a whole it
    would need more shared memory than sm_89 has.
    """
    follow()
    b, g, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = tl.load(positions + b)
    low = tl.maximum(first_seen(own, window, CHUNKED), s * span)
    high = tl.minimum(own + 1, (s + 1) * span)
    if low < high:
        head, d, p = tl.arange(0, H), tl.arange(0, D), tl.arange(0, BLOCK)
        heads = n_kv * group
        at = qkv + b.to(tl.int64) * pitch + (g * group + head)[:, None] * DIM + d[None, :]
        q = ()
        for i in tl.static_range(PIECES):
            mine = (head < group)[:, None] & (i * D + d < DIM)[None, :]
            q = q + (tl.load(at + i * D, mask=mine, other=0) * scale,)
        pages = table + tl.load(sequence + b) * width
        top = tl.full((H,), float("-inf"), tl.float32)
        total = tl.zeros((H,), tl.float32)
        acc = (tl.zeros((H, D), tl.float32),) * PIECES
        for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
            page = (tl.load(pages + block).to(tl.int64) * n_kv + g) * DIM * BLOCK
            seen = (block * BLOCK + p >= low) & (block * BLOCK + p < high)
            scores = scores_of(q, k + page, seen, cap, D, DIM, CAPPED)
            higher = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(weights, axis=1)
            new = ()
            for i in tl.static_range(PIECES):
                ok = seen[:, None] & (i * D + d < DIM)[None, :]
                values = tl.load(v + page + p[:, None] * DIM + i * D + d[None, :], mask=ok, other=0)
                faded = acc[i] * fade[:, None]
                new = new + (
                    tl.dot(weights, values.to(tl.float32), faded, input_precision=precision("tf32x3")),
                )
            acc = new
            top = higher
        part = ((b.to(tl.int64) * heads + g * group + head) * spans + s) * (DIM + 2)
        for i in tl.static_range(PIECES):
            mine = (head < group)[:, None] & (i * D + d < DIM)[None, :]
            tl.store(parts + part[:, None] + i * D + d[None, :], acc[i], mask=mine)
        tl.store(parts + part + DIM, top, mask=head < group)
        tl.store(parts + part + DIM + 1, total, mask=head < group)
        if J > 0:
            first, end = first_span(own, window, span, CHUNKED), own // span + 1
            if last_of(arrivals + b * n_kv + g, end - first):
                join_heads(
                    out, ints, parts, sinks, b, g * group, group, heads, first, end, spans, DIM, D, J, S
                )


@triton.jit
def first_span(own, window, span, CHUNKED: tl.constexpr):
    """Return the first span that one at `own` sees."""
    return tl.maximum(first_seen(own, window, CHUNKED), 0) // span


@triton.jit
def join_heads(
    out, ints, parts, sinks, b, head, some, heads, first, end, spans,
    DIM: tl.constexpr, D: tl.constexpr, J: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """out [tokens, heads * DIM] of token b and `some` heads from `head` on, J at most: from spans first to
    end - 1, S at a time, and each head's sink, a score without a value. ints: out, quantised.
    """
    j, d = tl.arange(0, J), tl.arange(0, D)
    mine = j < some
    row = b.to(tl.int64) * heads + head + j
    at = parts + row * spans * (DIM + 2)
    top = tl.full((J,), float("-inf"), tl.float32)
    total = tl.zeros((J,), tl.float32)
    acc = tl.zeros((J, D), tl.float32)
    for begin in range(first, end, S):
        s = begin + tl.arange(0, S)
        ok = mine[:, None] & (s < end)[None, :]
        each = at[:, None] + s[None, :] * (DIM + 2)
        tops = tl.load(each + DIM, mask=ok, other=float("-inf"), cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(tops, axis=1))
        fade, weights = tl.exp(top - higher), tl.exp(tops - higher[:, None])
        sums = tl.load(each + (DIM + 1), mask=ok, other=0, cache_modifier=".cg")
        total = total * fade + tl.sum(weights * sums, axis=1)
        inside = ok[:, :, None] & (d < DIM)[None, None, :]
        values = tl.load(each[:, :, None] + d[None, None, :], mask=inside, other=0, cache_modifier=".cg")
        acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * values, axis=1)
        top = higher
    if sinks is not None:
        sink = tl.load(sinks + head + j, mask=mine, other=0)
        higher = tl.maximum(top, sink)
        fade = tl.exp(top - higher)
        total = total * fade + tl.exp(sink - higher)
        acc = acc * fade[:, None]
    y = acc / total[:, None]
    tl.store(out + row[:, None] * DIM + d[None, :], y, mask=mine[:, None] & (d < DIM)[None, :])
    if ints is not None:
        N: tl.constexpr = D // 32
        block = tl.arange(0, N)[None, :]
        place = ((b * heads + head + j) * (DIM // 32))[:, None] + block
        there = tl.reshape(mine[:, None] & (block < DIM // 32), (J * N,))
        blocks = tl.num_programs(0) * heads * (DIM // 32)
        put_ints(ints, tl.reshape(y, (J * N, 32)), tl.reshape(place, (J * N,)), there, blocks)


@triton.jit
def join_spans(
    out, ints, parts, sinks, positions, heads, span, spans, window,
    DIM: tl.constexpr, D: tl.constexpr, S: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Program (token, head): `join_heads` of one."""
    follow()
    b, head = tl.program_id(0), tl.program_id(1)
    own = tl.load(positions + b)
    first, end = first_span(own, window, span, CHUNKED), own // span + 1
    join_heads(out, ints, parts, sinks, b, head, 1, heads, first, end, spans, DIM, D, 1, S)
