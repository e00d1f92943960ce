"""Device code over matrices as packs store them: products with few tokens and with many, FFNs that skip rows.

A row is read in units: V stored numbers, 16 bytes where there are enough, that one thread loads at once; a
unit has one scale at most. Tokens are a tuple of B sums, so that a unit is read once for all.
Must not know how it is launched: that is triton_kernels.

Memory: `data` points at the weights of row 0, u8; rows begin `stride` bytes apart. Where a mask is false
nothing is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.triton_tokens import activation


@triton.jit
def units(at, live, g, columns, FORMAT: tl.constexpr, V: tl.constexpr):
    """Units g [G] of the rows at `at` [..., 1] where `live` [..., 1]: low, high [..., G, V], scale [..., G].

    high: of q4_0, the numbers 16 columns behind; else low again. scale is 1 where a format has none.
    Conversions from bytes go through 2**23 + n, whose last bits are n: an addition, which runs at full rate;
    a conversion takes 4 (sm_90) to 8 times as long.
    """
    inside = live & (g * V < (columns // 2 if FORMAT == "q4_0" else columns))
    at_unit = tl.expand_dims(at + g * V * size(FORMAT), -1)
    v = tl.arange(0, V)
    ok = tl.expand_dims(inside, -1)
    if FORMAT == "q8_0":
        q = tl.load((at_unit + v).to(tl.pointer_type(tl.int8)), mask=ok, other=0).to(tl.int32)
        low = (q + 0x4B000080).to(tl.float32, bitcast=True) - 8388736.0
        high = low
        scale = tl.load(
            (at + columns + (g * V // 32) * 2).to(tl.pointer_type(tl.float16)), mask=inside, other=0
        )
    elif FORMAT == "q4_0":
        q = tl.load(at_unit + v, mask=ok, other=0).to(tl.int32)
        low = ((q & 15) + 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        high = ((q >> 4) + 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
        scale = tl.load(
            (at + columns // 2 + (g * V // 16) * 2).to(tl.pointer_type(tl.float16)), mask=inside, other=0
        )
    else:
        ok = ok & ((g * V)[:, None] + v < columns)
        if FORMAT == "f32":
            low = tl.load(at_unit.to(tl.pointer_type(tl.float32)) + v, mask=ok, other=0)
        elif FORMAT == "f16":
            low = tl.load(at_unit.to(tl.pointer_type(tl.float16)) + v, mask=ok, other=0).to(tl.float32)
        else:
            low = tl.load(at_unit.to(tl.pointer_type(tl.bfloat16)) + v, mask=ok, other=0).to(tl.float32)
        high = low
        scale = inside.to(tl.float32)
    return low, high, scale.to(tl.float32)


@triton.constexpr_function
def size(format):
    """Bytes of a stored number."""
    return {"f32": 4, "f16": 2, "bf16": 2}.get(format, 1)


@triton.jit
def column(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """The column of each number of units g [G]: [G, V]; of `high` it is 16 more."""
    if FORMAT == "q4_0":
        first = g // (16 // V) * 32 + g % (16 // V) * V
    else:
        first = g * V
    return first[:, None] + tl.arange(0, V)[None, :]


@triton.jit
def there(b, tokens, n):
    """n, or 0 of a token that is not there."""
    return tl.where(tokens > b, n, 0)


@triton.jit
def dots(
    data, row, live, stride, columns, x, tokens,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Rows `row` [R], read where `live`, times each token of x [tokens, columns]: a tuple of B sums [R]."""
    at = data + row.to(tl.int64)[:, None] * stride
    sums = (tl.zeros((R, G), tl.float32),) * B
    any_live = tl.max(live.to(tl.int32), axis=0)
    PLANES: tl.constexpr = 2 if FORMAT == "q4_0" else 1
    for start in range(0, tl.cdiv(columns, V * PLANES) * any_live, G):
        g = start + tl.arange(0, G)
        low, high, scale = units(at, live[:, None], g, columns, FORMAT, V)
        at_column = column(g, FORMAT, V)
        for plane in tl.static_range(PLANES):
            q = low if plane == 0 else high
            c = at_column + 16 * plane
            new = ()
            for b in tl.static_range(B):
                mine = tl.load(x + b * columns + c, mask=c < there(b, tokens, columns), other=0)
                new = new + (sums[b] + scale * tl.sum(q * mine[None, :, :], axis=2),)
            sums = new
    out = ()
    for b in tl.static_range(B):
        out = out + (tl.sum(sums[b], axis=1),)
    return out


@triton.jit
def matmul_few(
    out, data, x, bias, rows, columns, stride, tokens, ADD: tl.constexpr, RELU: tl.constexpr,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    sums = dots(data, row, live, stride, columns, x, tokens, FORMAT, B, R, G, V)
    for b in tl.static_range(B):
        y = sums[b]
        if bias is not None:
            y += tl.load(bias + row, mask=live, other=0)
        ok = row < there(b, tokens, rows)
        if ADD:
            y += tl.load(out + b * rows + row, mask=ok, other=0)
        if RELU:
            y = tl.where(y <= 0, 0.0, y)
        tl.store(out + b * rows + row, y, mask=ok)


@triton.jit
def share(weights, row, each, n):
    """What a token, of n neurons or of none, gives to the expert of each row."""
    return tl.load(weights + row // each, mask=row < n, other=0)


@triton.jit
def gate_up_few(
    h, gate, bias, up, x, named, weights, counts,
    n, columns, gate_stride, up_stride, tokens, each, pitch, threshold,
    ACTIVATION: tl.constexpr, UP_RELU: tl.constexpr,
    FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """R neurons: their gates where named and where a token goes to their expert, which has `each` of them;
    then up where a gate is open. weights: a token's are `pitch` behind the one before's.
    counts: four additions a program.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    wanted = row < n
    if named is not None:
        seen = tl.zeros((R,), tl.int32)
        for b in tl.static_range(B):
            byte = tl.load(named + b * tl.cdiv(n, 8) + row // 8, mask=row < there(b, tokens, n), other=0)
            seen |= (byte.to(tl.int32) >> (row % 8)) & 1
        wanted = wanted & (seen != 0)
    if weights is not None:
        going = tl.zeros((R,), tl.int1)
        for b in tl.static_range(B):
            going = going | (share(weights + b * pitch, row, each, there(b, tokens, n)) != 0)
        wanted = wanted & going
    gates = dots(gate, row, wanted, gate_stride, columns, x, tokens, FORMAT, B, R, G, V)
    if bias is not None:
        shift = tl.load(bias + row, mask=row < n, other=0)
    active = ()
    opened = tl.zeros((R,), tl.int1)
    for b in tl.static_range(B):
        y = gates[b] + shift if bias is not None else gates[b]
        a = tl.where(wanted & (row < there(b, tokens, n)), activation(y, threshold, ACTIVATION), 0.0)
        if weights is not None:
            a = tl.where(share(weights + b * pitch, row, each, there(b, tokens, n)) != 0, a, 0.0)
        opened = opened | (a != 0)
        active = active + (a,)
    if up is not None:
        ups = dots(up, row, opened, up_stride, columns, x, tokens, FORMAT, B, R, G, V)
    pairs = tl.zeros((R,), tl.int32)
    for b in tl.static_range(B):
        a = active[b]
        if up is not None:
            u = activation(ups[b], 0.0, "relu") if UP_RELU else ups[b]
            a = tl.where(opened, a * u, 0.0)
        mine = row < there(b, tokens, n)
        if weights is not None:
            part = share(weights + b * pitch, row, each, there(b, tokens, n))
            a = tl.where(part != 0, a, 0.0)
        pairs += ((a != 0) & mine).to(tl.int32)
        if weights is not None:
            a = tl.where(part != 0, a * part, 0.0)
        tl.store(h + b * n + row, a, mask=mine)
    tl.atomic_add(counts + 3, tl.sum((pairs > 0).to(tl.int32), axis=0), sem="relaxed")
    tl.atomic_add(counts, tl.sum(pairs, axis=0), sem="relaxed")
    tl.atomic_add(counts + 1, tl.sum(opened.to(tl.int32), axis=0), sem="relaxed")
    tl.atomic_add(counts + 2, tl.sum(wanted.to(tl.int32), axis=0), sem="relaxed")


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
    s, g = tl.program_id(0), tl.program_id(1) * G + tl.arange(0, G)
    PLANES: tl.constexpr = 2 if FORMAT == "q4_0" else 1
    acc = (tl.zeros((W, G, V), tl.float32),) * (B * PLANES)
    for c in range(s * chunks, (s + 1) * chunks):
        i = c * CHUNK + tl.arange(0, CHUNK)
        needed = tl.zeros((CHUNK,), tl.int32)
        for b in tl.static_range(B):
            needed |= (tl.load(h + b * n + i, mask=i < there(b, tokens, n), other=0) != 0).to(tl.int32)
        number = tl.where(needed != 0, tl.cumsum(needed, axis=0) - 1, -1)
        count = tl.sum(needed, axis=0)
        for k in range(0, count, R * W):
            place = k + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
            row = tl.sum(tl.where(number[:, None, None] == place[None, :, :], i[:, None, None], 0), axis=0)
            live = place < count
            at = data + row.to(tl.int64)[:, :, None] * stride
            low, high, scale = units(at, live[:, :, None], g, columns, FORMAT, V)
            new = ()
            for plane in tl.static_range(PLANES):
                q = low if plane == 0 else high
                for b in tl.static_range(B):
                    a = tl.load(h + b * n + row, mask=place < there(b, tokens, count), other=0)
                    weighed = tl.expand_dims(a[:, :, None] * scale, -1) * q
                    new = new + (acc[plane * B + b] + tl.sum(weighed, axis=0),)
            acc = new
    at_column = column(g, FORMAT, V)
    for plane in tl.static_range(PLANES):
        col = at_column + 16 * plane
        for b in tl.static_range(B):
            to = sums + (s * tokens + b) * columns + col
            tl.store(to, tl.sum(acc[plane * B + b], axis=0), mask=col < there(b, tokens, columns))


@triton.jit
def join_sums(out, sums, programs, elements, ADD: tl.constexpr, S: tl.constexpr, C: tl.constexpr):
    """out [elements] (+)= the sum of sums [programs, elements], all of a column's on their way at once."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    s = tl.arange(0, S)
    ok = (s < programs)[:, None] & (c < elements)[None, :]
    y = tl.sum(tl.load(sums + s[:, None] * elements + c[None, :], mask=ok, other=0), axis=0)
    if ADD:
        y += tl.load(out + c, mask=c < elements, other=0)
    tl.store(out + c, y, mask=c < elements)


@triton.jit
def embed(out, data, ids, columns, stride, scale, FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    b = tl.program_id(0)
    g = tl.program_id(1) * G + tl.arange(0, G)
    at = data + tl.load(ids + b).to(tl.int64) * stride + tl.zeros((1, 1), tl.int64)
    low, high, d = units(at, tl.full((1, 1), 1, tl.int1), g, columns, FORMAT, V)
    c = column(g, FORMAT, V)[None, :, :]
    tl.store(out + b * columns + c, low * d[:, :, None] * scale, mask=c < columns)
    if FORMAT == "q4_0":
        tl.store(out + b * columns + c + 16, high * d[:, :, None] * scale, mask=c + 16 < columns)


# ---- many tokens: tiles of tensor cores, all rows


@triton.jit
def rounded(x):
    """To the nearest of tf32's numbers; the tensor cores would cut off instead. A NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)


@triton.jit
def tile(data, row, rows, stride, g, columns, FORMAT: tl.constexpr, V: tl.constexpr):
    """Rows [T] and units g [G] decoded: low, high [T, G * V], as tensor cores take them."""
    at = data + row.to(tl.int64)[:, None] * stride
    low, high, d = units(at, (row < rows)[:, None], g, columns, FORMAT, V)
    shape: tl.constexpr = (row.shape[0], g.shape[0] * V)
    if FORMAT == "q8_0" or FORMAT == "q4_0":
        low, high = rounded(low * d[:, :, None]), rounded(high * d[:, :, None])
    return tl.reshape(low, shape), tl.reshape(high, shape)


@triton.jit
def operand(x, token, tokens, c, width, FORMAT: tl.constexpr):
    """x [tokens, width] at tokens [M] and columns [K]."""
    ok = (token < tokens)[:, None] & (c < width)[None, :]
    y = tl.load(x + token.to(tl.int64)[:, None] * width + c[None, :], mask=ok, other=0)
    return y if FORMAT == "f32" else rounded(y)


@triton.jit
def matmul_many(
    out, data, x, bias, rows, columns, stride, tokens, ADD: tl.constexpr, RELU: tl.constexpr,
    FORMAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """out of M tokens and N rows. f32 weights are multiplied as such, others exactly as tf32."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    token = tl.program_id(1) * M + tl.arange(0, M)
    PLANES: tl.constexpr = 2 if FORMAT == "q4_0" else 1
    PRECISION: tl.constexpr = "ieee" if FORMAT == "f32" else "tf32"
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, tl.cdiv(columns, V * PLANES), G):
        g = start + tl.arange(0, G)
        low, high = tile(data, row, rows, stride, g, columns, FORMAT, V)
        c = tl.reshape(column(g, FORMAT, V), (G * V,))
        acc = tl.dot(operand(x, token, tokens, c, columns, FORMAT), tl.trans(low), acc, PRECISION)
        if PLANES == 2:
            behind = operand(x, token, tokens, c + 16, columns, FORMAT)
            acc = tl.dot(behind, tl.trans(high), acc, PRECISION)
    if bias is not None:
        acc += tl.load(bias + row, mask=row < rows, other=0)[None, :]
    to = out + token.to(tl.int64)[:, None] * rows + row[None, :]
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
    g = tl.program_id(0) * G + tl.arange(0, G)
    token = tl.program_id(1) * M + tl.arange(0, M)
    PLANES: tl.constexpr = 2 if FORMAT == "q4_0" else 1
    PRECISION: tl.constexpr = "ieee" if FORMAT == "f32" else "tf32"
    acc = tl.zeros((M, G * V), tl.float32)
    behind = tl.zeros((M, G * V), tl.float32)
    for start in range(0, n, K):
        row = start + tl.arange(0, K)
        low, high = tile(data, row, n, stride, g, columns, FORMAT, V)
        a = operand(h, token, tokens, row, n, FORMAT)
        acc = tl.dot(a, low, acc, PRECISION)
        if PLANES == 2:
            behind = tl.dot(a, high, behind, PRECISION)
    c = tl.reshape(column(g, FORMAT, V), (G * V,))
    put(out, acc, token, tokens, c, columns, ADD)
    if PLANES == 2:
        put(out, behind, token, tokens, c + 16, columns, ADD)


@triton.jit
def put(out, acc, token, tokens, c, width, ADD: tl.constexpr):
    to = out + token.to(tl.int64)[:, None] * width + c[None, :]
    ok = (token < tokens)[:, None] & (c < width)[None, :]
    if ADD:
        acc += tl.load(to, mask=ok, other=0)
    tl.store(to, acc, mask=ok)
