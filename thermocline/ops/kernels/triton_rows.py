"""Device code over matrices as packs store them: products with few tokens and with many, FFNs that skip rows.

A unit of a row (triton_stored) is read once for all tokens: they are an axis, B, of the sums.
`triton_kernels` launches this code.

Memory: `data` points at the weights of row 0, u8; rows begin `stride` bytes apart. Where a mask is false
nothing is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_bytes import byte_dots, places, put_ints
from thermocline.ops.kernels.triton_stored import (
    behind,
    columns_of,
    first_column,
    half_of,
    kinds,
    loader,
    numbers,
    parts,
    plane_count,
    scale_count,
    stored,
    together,
    units,
    unknown_nought,
)
from thermocline.ops.kernels.triton_target import fetch_ahead, follow, last_of
from thermocline.ops.kernels.triton_tiles import row_products, tile_products
from thermocline.ops.kernels.triton_tokens import activation, place_of, turned, up_factor


@triton.jit
def dots(
    data, row, live, stride, columns, x, tokens, pitch,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Each token of x [tokens, columns], `pitch` apart, times rows `row` [R], read where `live`: [B, R].

    A thread has U units of each row at once. EVEN: columns are whole units. A token's sum is the same
    whatever B and R are.
    """
    at = data + row.to(tl.int64)[:, None] * stride
    at_token = x + tl.minimum(tl.arange(0, B), tokens - 1)[:, None, None] * pitch
    sums = tl.zeros((B, R, G), tl.float32)
    any_live = tl.max(live.to(tl.int32), axis=0)
    nought = unknown_nought(columns)
    PLANES: tl.constexpr = plane_count(FORMAT)
    for start in range(0, tl.cdiv(columns, V * PLANES) * any_live, G * U):
        g = start + tl.arange(0, G)
        held = ()
        for u in tl.static_range(U):
            w, scales, minima = stored(at, live[:, None], g, columns, FORMAT, V, u * G)
            held = held + ((all_parts(w), scales, minima),)
        for u in tl.static_range(U):
            inside = (g + u * G) * (V * PLANES) < columns
            first = first_column(tl.where(inside, g + u * G, 0), FORMAT, V)  # beyond the end weights are 0
            w, scales, minima = held[u]
            for half in tl.static_range(scale_count(FORMAT)):
                new = tl.zeros((B, R, G), tl.float32) if kinds(FORMAT) > 1 else sums
                total = tl.zeros((B, 1, G), tl.float32)
                for i in tl.static_range(V // 4):
                    for plane in tl.static_range(PLANES):
                        if half_of(plane, FORMAT) == half:
                            q = four(w, i, plane, nought, FORMAT)
                            c = first[:, None] + (behind(FORMAT) * plane + 4 * i) + tl.arange(0, 4)[None, :]
                            c = c[None, :, :]
                            mine = parts(
                                tl.load(at_token + c)
                                if EVEN
                                else tl.load(at_token + c, mask=c < columns, other=0)
                            )
                            for j in tl.static_range(4):
                                new += q[j][None, :, :] * mine[j][:, None, :]
                                total += mine[j][:, None, :]
                sums = sums + scales[half][None, :, :] * new if kinds(FORMAT) > 1 else new
                if loader(FORMAT).minima:
                    sums -= minima[half][None, :, :] * total
    return tl.sum(sums, axis=2)


@triton.jit
def products(
    data, first, live, columns, x, q, tokens, pitch, begin,
    STRIDE: tl.constexpr, FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    V: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr, APART: tl.constexpr = 0,
):  # fmt: skip
    """Tokens times R rows from number `first` on (APART: as `places`'), where `live` [R]: [B, R].

    Rows in blocks are multiplied by quantised tokens `q`, others by x. Of a token's `pitch` columns they are
    those from `begin` on.
    """
    if kinds(FORMAT) > 1:
        at = data + tl.cast(first, tl.int64) * STRIDE
        return byte_dots(
            at, live, columns, q, begin // 32, tokens, pitch // 32, STRIDE, FORMAT, B, R, G, APART
        )
    else:
        row = first + places(R, APART)
        return dots(data, row, live, STRIDE, columns, x + begin, tokens, pitch, FORMAT, B, R, G, V, U, EVEN)


@triton.jit
def all_parts(tensors):
    """Return the parts of each tensor of a tuple."""
    out = ()
    for i in tl.static_range(len(tensors)):
        out = out + (parts(tensors[i]),)
    return out


@triton.jit
def four(w, i: tl.constexpr, plane: tl.constexpr, nought, FORMAT: tl.constexpr):
    """The numbers of a plane that four stored ones of a unit have, from 4 i on: w, all its parts."""
    if kinds(FORMAT) > 1:
        q = numbers(nth(w, i), nought, plane, FORMAT)
    else:
        q = ()
        for j in tl.static_range(4):
            q = q + numbers(nth(w, 4 * i + j), nought, plane, FORMAT)
    return q


@triton.jit
def squares_of(squares, tokens, blocks, B: tl.constexpr, N: tl.constexpr):
    """[B, N] sums of squares of blocks of 32. N is not less than the threads of a program: so all of them add
    up one token's, and do it in one order whatever B is. Compile tests look at that.
    """
    token, i = tl.arange(0, B)[:, None], tl.arange(0, N)[None, :]
    return tl.load(squares + token * blocks + i, mask=(token < tokens) & (i < blocks), other=0)


@triton.jit
def inverse_roots(squares, columns, eps):
    """[B, 1]: an RMS norm's factor of each token, of what `squares_of` has."""
    return (1 / tl.sqrt(tl.sum(squares, axis=1) / columns + eps))[:, None]


@triton.jit
def begin_norm(to, ints, squares, weight, x, arrivals, first, columns, tokens, R: tl.constexpr):
    """Write a stream's 32 columns as `BegunNorm` says, by the last of their programs, which have R each.

    It works as if there were 16 tokens: so squares are added in one order whatever their number.
    """
    block, token = first // 32, tl.arange(0, 16)
    if last_of(arrivals + block, 32 // R):
        at, here = token[:, None] * columns + (block * 32 + tl.arange(0, 32))[None, :], token < tokens
        y = tl.load(x + at, mask=here[:, None], other=0, cache_modifier=".cg")
        tl.store(squares + token * (columns // 32) + block, tl.sum(y * y, axis=1), mask=here)
        y *= tl.load(weight + block * 32 + tl.arange(0, 32))[None, :]
        tl.store(to + at, y, mask=here[:, None])
        if ints is not None:
            put_ints(ints, y, token * (columns // 32) + block, here, tokens * (columns // 32))


@triton.jit
def matmul_few(
    out, data, x, q, bias, squares, eps, begun, begun_ints, begun_squares, weight, arrivals,
    rows, columns, stride: tl.constexpr, tokens, pitch,
    ADD: tl.constexpr, RELU: tl.constexpr, ALL: tl.constexpr, N: tl.constexpr,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """ALL: rows are whole steps of R. squares: N of x, which a norm has begun. begun: the norm of out, if it
    has a weight.
    """
    first = tl.program_id(0) * R
    fetch_ahead(data, first + tl.arange(0, R), rows, stride)
    follow()
    if squares is not None:
        met = squares_of(squares, tokens, columns // 32, B, N)
    row, b = first + tl.arange(0, R), tl.arange(0, B)[:, None]
    live = None if ALL and kinds(FORMAT) > 1 else row < rows
    y = products(data, first, live, columns, x, q, tokens, columns, 0, stride, FORMAT, B, R, G, V, U, EVEN)
    ok = (b < tokens) & (row < rows)[None, :]
    to = out + b * pitch + row[None, :]
    if squares is not None:
        y *= inverse_roots(met, columns, eps)
    if bias is not None:
        y += tl.load(bias + row, mask=row < rows, other=0)[None, :]
    if ADD:
        y += tl.load(to, mask=ok, other=0)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)
    tl.store(to, y, mask=ok)
    if weight is not None:
        begin_norm(begun, begun_ints, begun_squares, weight, out, arrivals, first, rows, tokens, R)


@triton.jit
def heads_few(
    qkv, data, x, q, bias, squares, eps, cos, sin, positions, sequence, table, k, v,
    rows, columns, stride: tl.constexpr, tokens, pitch, before, n, n_kv, width,
    DIM: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, FORMAT: tl.constexpr, B: tl.constexpr,
    R: tl.constexpr, G: tl.constexpr, V: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """R / 2 rows of a head, and those half a head behind them, which they turn with: queries to qkv, keys and
    values to their pages. `before`: heads of the matrices before this one. squares: as matmul_few's.
    """
    HALF: tl.constexpr = DIM // 2
    PROGRAMS: tl.constexpr = DIM // R  # of a head
    mine, i = tl.program_id(0) // PROGRAMS, tl.program_id(0) % PROGRAMS * (R // 2)
    first, head = mine * DIM + i, before + mine
    row = first + places(R, HALF)
    fetch_ahead(data, row, rows, stride)
    follow()
    if squares is not None:
        met = squares_of(squares, tokens, columns // 32, B, N)
    live = None if kinds(FORMAT) > 1 else row < rows  # all are
    y = products(
        data, first, live, columns, x, q, tokens, columns, 0, stride, FORMAT, B, R, G, V, U, EVEN, HALF
    )
    if squares is not None:
        y *= inverse_roots(met, columns, eps)
    if bias is not None:
        y += tl.load(bias + row)[None, :]
    a, b = tl.split(tl.permute(tl.reshape(y, (B, 2, R // 2)), (0, 2, 1)))
    token, i = tl.arange(0, B)[:, None], i + tl.arange(0, R // 2)[None, :]
    ok = (token < tokens) & (i < HALF)
    if cos is not None:
        if head < n + n_kv:
            c = tl.load(cos + token * HALF + i, mask=ok, other=0)
            s = tl.load(sin + token * HALF + i, mask=ok, other=0)
            a, b = turned(a, b, c, s)
    if head < n:
        at = qkv + token * pitch + head * DIM + i
        tl.store(at, a, mask=ok)
        tl.store(at + HALF, b, mask=ok)
    else:
        to, step = place_of(head, token, tokens, positions, sequence, table, k, v, n, n_kv, width, DIM, BLOCK)
        tl.store(to + i * step, a.to(tl.float16), mask=ok)
        tl.store(to + (HALF + i) * step, b.to(tl.float16), mask=ok)


@triton.jit
def gate_up_few(
    h, ints, arrivals, gate, bias, up, up_bias, x, q, squares, eps, named, weights, counts,
    n, columns, gate_stride: tl.constexpr, up_stride: tl.constexpr, named_stride,
    tokens, each, pitch, bound, alpha,
    ACTIVATION: tl.constexpr, UP_RELU: tl.constexpr, SCALES: tl.constexpr, ALL: tl.constexpr, N: tl.constexpr,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
    U: tl.constexpr, EVEN: tl.constexpr,
    UP_FORMAT: tl.constexpr, UP_G: tl.constexpr, UP_V: tl.constexpr, UP_U: tl.constexpr,
    UP_EVEN: tl.constexpr,
):  # fmt: skip
    """R neurons: their gates where named and where a token goes to their expert, which has `each` of them;
    then up where a gate is open. weights: a token's are `pitch` behind the one before's. SCALES: they scale
    gate and up.
    counts: four additions a program; None: up does not wait for the gate. ALL: and rows are whole steps of R.
    ints: of each 32 neurons the last program quantises them. squares: as matmul_few's.
    """
    first = tl.program_id(0) * R
    if named is None and weights is None:
        fetch_ahead(gate, first + tl.arange(0, R), n, gate_stride)
        if up is not None and counts is None:
            fetch_ahead(up, first + tl.arange(0, R), n, up_stride)
    follow()
    if squares is not None:
        met = squares_of(squares, tokens, columns // 32, B, N)
    row, b = first + tl.arange(0, R), tl.arange(0, B)[:, None]
    mine = (b < tokens) & (row < n)[None, :]
    wanted = row < n
    if named is not None:
        bits = tl.load(named + b * named_stride + row[None, :] // 8, mask=mine, other=0).to(tl.int32)
        wanted = wanted & (tl.max((bits >> (row % 8)[None, :]) & 1, axis=0) != 0)
    if weights is not None:
        share = tl.load(weights + b * pitch + row[None, :] // each, mask=mine, other=0)
        wanted = wanted & (tl.max((share != 0).to(tl.int32), axis=0) != 0)
        going = mine & (share != 0)
    else:
        going = mine
    asked = None if ALL and kinds(FORMAT) > 1 else wanted
    y = products(gate, first, asked, columns, x, q, tokens, columns, 0, gate_stride,
                 FORMAT, B, R, G, V, U, EVEN)  # fmt: skip
    if squares is not None:
        inverse = inverse_roots(met, columns, eps)
        y *= inverse
    if bias is not None:
        y += tl.load(bias + row, mask=row < n, other=0)[None, :]
    if SCALES:
        y *= share
    a = tl.where(wanted[None, :] & going, activation(y, bound, alpha, ACTIVATION), 0.0)
    opened = wanted
    asked = None if ALL and kinds(UP_FORMAT) > 1 else wanted
    if counts is not None:
        opened = tl.max((a != 0).to(tl.int32), axis=0) != 0
        asked = opened
    if up is not None:
        u = products(up, first, asked, columns, x, q, tokens, columns, 0, up_stride,
                     UP_FORMAT, B, R, UP_G, UP_V, UP_U, UP_EVEN)  # fmt: skip
        if squares is not None:
            u *= inverse
        if up_bias is not None:
            u += tl.load(up_bias + row, mask=row < n, other=0)[None, :]
        if SCALES:
            u *= share
        a = tl.where(opened[None, :] & going, a * up_factor(u, bound, ACTIVATION, UP_RELU), 0.0)
    active = (a != 0).to(tl.int32)
    if weights is not None and not SCALES:
        a = tl.where(going, a * share, 0.0)
    tl.store(h + b * n + row[None, :], a, mask=mine)
    if ints is not None:
        made = True
        if weights is not None:
            made = tl.max(wanted.to(tl.int32), axis=0) != 0  # of one expert, so the same for all of a block
        if made:
            block, token = first // 32, tl.arange(0, B)
            if last_of(arrivals + block, 32 // R):
                at = h + token[:, None] * n + (block * 32 + tl.arange(0, 32))[None, :]
                neurons = tl.load(at, mask=(token < tokens)[:, None], other=0, cache_modifier=".cg")
                put_ints(ints, neurons, token * (n // 32) + block, token < tokens, tokens * (n // 32))
    if counts is not None:
        tl.atomic_add(counts, tl.sum(tl.sum(active, axis=0), axis=0), sem="relaxed")
        tl.atomic_add(counts + 1, tl.sum(opened.to(tl.int32), axis=0), sem="relaxed")
        tl.atomic_add(counts + 2, tl.sum(wanted.to(tl.int32), axis=0), sem="relaxed")
        tl.atomic_add(counts + 3, tl.sum(tl.max(active, axis=0), axis=0), sem="relaxed")


@triton.jit
def down_few(
    sums, data, h, n, columns, stride, tokens, chunks,
    FORMAT: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """sums [programs, tokens, columns]: what `chunks` chunks of neurons add to G units of columns.

    Of each chunk the neurons that some token needs are numbered; R * W of them are read at a time, so that
    few among many still come side by side. W: warps, each with rows of its own.
    """
    follow()
    s, g = tl.program_id(0), tl.program_id(1) * G + tl.arange(0, G)
    nought = unknown_nought(columns)
    KINDS: tl.constexpr = kinds(FORMAT)
    SCALES: tl.constexpr = scale_count(FORMAT)
    MINIMA: tl.constexpr = SCALES if loader(FORMAT).minima else 0
    token = tl.arange(0, B)
    acc = (tl.zeros((W, G, V if KINDS == 1 else V // 4), tl.float32),) * (B * KINDS)
    less = (tl.zeros((W, G), tl.float32),) * (B * MINIMA)
    for c in range(s * chunks, (s + 1) * chunks):
        i = c * CHUNK + tl.arange(0, CHUNK)
        here = (token < tokens)[:, None] & (i < n)[None, :]
        used = tl.load(h + token[:, None] * n + i[None, :], mask=here, other=0) != 0
        needed = tl.max(used.to(tl.int32), axis=0)
        number = tl.where(needed != 0, tl.cumsum(needed, axis=0) - 1, -1)
        count = tl.sum(needed, axis=0)
        for k in range(0, count, R * W):
            place = k + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
            row = tl.sum(tl.where(number[:, None, None] == place[None, :, :], i[:, None, None], 0), axis=0)
            live = place < count
            at = data + row.to(tl.int64)[:, :, None] * stride
            w, scales, minima = stored(at, live[:, :, None], g, columns, FORMAT, V)
            mine = live[:, :, None] & (token < tokens)[None, None, :]
            a = tl.load(h + token[None, None, :] * n + row[:, :, None], mask=mine, other=0)
            weights = of_tokens(a, scales, B)
            words = ()
            for k in tl.static_range(len(w)):
                words = words + (parts(tl.permute(w[k], (1, 2, 3, 0))),)
            for r in tl.static_range(R):
                q = ()
                for plane in tl.static_range(plane_count(FORMAT)):
                    q = q + numbers(nth(words, r), nought, plane, FORMAT)
                new = ()
                for b in tl.static_range(B):
                    for kind in tl.static_range(KINDS):
                        weight = weights[b * SCALES + half_of(kind // 4, FORMAT)][r]
                        new = new + (acc[b * KINDS + kind] + weight[:, :, None] * q[kind],)
                acc = new
            if MINIMA > 0:
                taken = of_tokens(a, minima, B)
                for r in tl.static_range(R):
                    new = ()
                    for m in tl.static_range(B * MINIMA):
                        new = new + (less[m] + taken[m][r],)
                    less = new
    at_column = columns_of(g, FORMAT, V)
    for b in tl.static_range(B):
        end = tl.where(tokens > b, columns, 0)
        to = sums + (s * tokens + b) * columns + at_column
        for plane in tl.static_range(plane_count(FORMAT)):
            y = together(acc[b * KINDS + 4 * plane : b * KINDS + min(4 * plane + 4, KINDS)])
            if MINIMA > 0:
                y -= less[b * MINIMA + half_of(plane, FORMAT)][:, :, None]
            next = behind(FORMAT) * plane
            tl.store(to + next, tl.sum(y, axis=0), mask=at_column + next < end)


@triton.jit
def down_experts_few(
    out, data, h, q, weights, begun, begun_ints, begun_squares, weight, arrivals,
    rows, columns, stride: tl.constexpr, tokens, experts, pitch,
    ADD: tl.constexpr, FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    V: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """R rows of every expert's `rows`, times what h [tokens, experts * columns] has for it, in their order.

    What no token goes to is not read. weights: as gate_up_few's. begun: as matmul_few's.
    """
    follow()
    first = tl.program_id(0) * R
    row, b = first + tl.arange(0, R), tl.arange(0, B)
    y = tl.zeros((B, R), tl.float32)
    for e in range(0, experts):
        share = tl.load(weights + b * pitch + e, mask=b < tokens, other=0)
        wanted = tl.zeros((R,), tl.int32) + tl.max((share != 0).to(tl.int32), axis=0) != 0
        y += products(data, e * rows + first, (row < rows) & wanted, columns, h, q, tokens, experts * columns,
                      e * columns, stride, FORMAT, B, R, G, V, U, EVEN)  # fmt: skip
    ok = (b < tokens)[:, None] & (row < rows)[None, :]
    to = out + b[:, None] * rows + row[None, :]
    if ADD:
        y += tl.load(to, mask=ok, other=0)
    tl.store(to, y, mask=ok)
    if weight is not None:
        begin_norm(begun, begun_ints, begun_squares, weight, out, arrivals, first, rows, tokens, R)


@triton.jit
def of_tokens(a, scales, B: tl.constexpr):
    """a [R, W, B] times each of the scales [R, W, G]: of each token and scale, R tensors [W, G]."""
    scaled = ()
    for i in tl.static_range(len(scales)):
        scaled = scaled + (parts(a[:, :, None, :] * tl.expand_dims(scales[i], 3)),)
    out = ()
    for b in tl.static_range(B):
        for i in tl.static_range(len(scales)):
            out = out + (parts(tl.permute(scaled[i][b], (1, 2, 0))),)
    return out


@triton.jit
def nth(tuples, i: tl.constexpr):
    """Return the i-th of each tuple."""
    out = ()
    for k in tl.static_range(len(tuples)):
        out = out + (tuples[k][i],)
    return out


@triton.jit
def join_sums(
    out, sums, begun, begun_ints, begun_squares, weight, programs, elements, columns, before, blocks,
    ADD: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out [elements] (+)= the sum of sums [programs, elements], all of a column's on their way at once.

    begun: the norm of tokens, which have `columns` and of 32 so many `blocks` together; `before` elements of
    theirs come before these.
    """
    follow()
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.arange(0, S)
    ok = (s < programs)[:, None] & (c < elements)[None, :]
    y = tl.sum(tl.load(sums + s[:, None] * elements + c[None, :], mask=ok, other=0), axis=0)
    if ADD:
        y += tl.load(out + c, mask=c < elements, other=0)
    tl.store(out + c, y, mask=c < elements)
    if weight is not None:
        at, block = before + c, tl.program_id(0) * (C // 32) + tl.arange(0, C // 32)
        there, block = block * 32 < elements, before // 32 + block
        tl.store(begun_squares + block, tl.sum(tl.reshape(y * y, (C // 32, 32)), axis=1), mask=there)
        y *= tl.load(weight + at % columns)
        tl.store(begun + at, y, mask=c < elements)
        if begun_ints is not None:
            put_ints(begun_ints, tl.reshape(y, (C // 32, 32)), block, there, blocks)


@triton.jit
def embed(out, data, ids, columns, stride, scale, FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    follow()
    b = tl.program_id(0)
    g = tl.program_id(1) * G + tl.arange(0, G)
    at = data + tl.load(ids + b).to(tl.int64) * stride + tl.zeros((1, 1), tl.int64)
    n = units(at, tl.full((1, 1), 1, tl.int1), g, columns, FORMAT, V)
    for plane in tl.static_range(plane_count(FORMAT)):
        c = columns_of(g, FORMAT, V)[None, :, :] + behind(FORMAT) * plane
        tl.store(out + b * columns + c, n[plane] * scale, mask=c < columns)


# ---- many tokens: tiles of tensor cores, all rows


@triton.jit
def matmul_many(
    out, data, x, given, bias, rows, columns, stride, tokens, pitch, ADD: tl.constexpr, RELU: tl.constexpr,
    FORMAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """out of M tokens and N rows. given: as tile_products'."""
    follow()
    row = tl.program_id(0) * N + tl.arange(0, N)
    token = tl.program_id(1) * M + tl.arange(0, M)
    acc = tile_products(data, row, rows, columns, stride, x, given, token, tokens, tokens, FORMAT, G, V)
    if bias is not None:
        acc += tl.load(bias + row, mask=row < rows, other=0)[None, :]
    to = out + token.to(tl.int64)[:, None] * pitch + row[None, :]
    ok = (token < tokens)[:, None] & (row < rows)[None, :]
    if ADD:
        acc += tl.load(to, mask=ok, other=0)
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)
    tl.store(to, acc, mask=ok)


@triton.jit
def down_many(
    out, data, h, n, columns, stride, tokens, ADD: tl.constexpr,
    FORMAT: tl.constexpr, M: tl.constexpr, K: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """out of M tokens and G units of columns, K neurons at a time."""
    follow()
    g = tl.program_id(0) * G + tl.arange(0, G)
    token = tl.program_id(1) * M + tl.arange(0, M)
    row_products(out, data, g, n, columns, stride, h, token, tokens, ADD, FORMAT, K, V)
