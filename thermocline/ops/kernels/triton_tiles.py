"""Device code for products of many tokens: tiles of tensor cores, all rows, in the numbers that lose little.

A format decides in which numbers its rows are multiplied (`operands`):

* blocks with one scale for 32 columns: int8, with tokens as few meet them (`triton_bytes.quantise`). The
  products of a block are one exact integer; blocks are added in f32, in their order;
* f16 as such, and blocks with two scales in f16, too, with tokens in f16 (`triton_bytes.halve`);
* f32 as such, others as tf32.

A row of a tile meets no other, so no bit of a token depends on its tile or its company.

Memory: as triton_rows'. Tokens in int8 or f16 lie as `device_rows.Scratch` says, `placed` of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_bytes import quarter, scales
from thermocline.ops.kernels.triton_stored import (
    begin,
    behind,
    block,
    columns_of,
    field,
    further,
    half_of,
    kinds,
    load_words,
    loader,
    looked_up,
    numbers,
    operands,
    parts_of,
    plane_count,
    scale_count,
    together,
    units,
    words,
)
from thermocline.ops.kernels.triton_target import assembles, precision

# An integer of less than 22 bits, added to these bits, makes those of 12582912 + it as a float. So sums that
# begin with them need no conversion, of which a GPU makes an eighth as many as additions.
BITS: tl.constexpr = tl.constexpr(0x4B400000)
FLOAT: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def tile_products(
    data, row, rows, columns, stride, x, given, token, tokens, placed,
    FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """x [tokens, columns] at tokens [M], times rows [N]: [M, N].

    given: x in int8 or f16, where the format takes that; then x is not read. G: blocks, or units, at a time.
    """
    if operands(FORMAT) == "int8":
        return byte_tile(data, row, rows, columns, stride, given, token, tokens, placed, FORMAT, G)
    elif operands(FORMAT) == "f16" and scale_count(FORMAT) == 2:
        return scaled_tile(data, row, rows, columns, stride, given, token, tokens, placed, FORMAT, G, V)
    elif operands(FORMAT) == "f16":
        return half_tile(data, row, rows, columns, stride, given, token, tokens, placed, G * V)
    else:
        return float_tile(data, row, rows, columns, stride, x, token, tokens, FORMAT, G, V)


# ---- int8


@triton.jit
def byte_tile(
    data, row, rows, columns, stride, x, token, tokens, placed, FORMAT: tl.constexpr, U: tl.constexpr
):  # fmt: skip
    """Quantised x at tokens [M], times rows [N], U blocks at a time, of which there are whole steps: [M, N].

    Rows and tokens beyond the last are the last: so no load has a mask.
    """
    M: tl.constexpr = token.shape[0]
    N: tl.constexpr = row.shape[0]
    blocks = columns // 32
    at = data + tl.minimum(row, rows - 1).to(tl.int64) * stride
    mine = tl.minimum(token, tokens - 1).to(tl.int64) * blocks
    numbers = x.to(tl.pointer_type(tl.int8)) + (mine * 32)[:, None] + tl.arange(0, 32)[None, :]
    everything = tl.cast(placed, tl.int64) * blocks
    sums_at = x + everything * 9 + mine
    scale_at = (x + everything * 8).to(tl.pointer_type(tl.float32)) + mine
    begins = tl.full((M, N), BITS, tl.int32)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, blocks, U):
        d, less = scales_at(at, start, columns, FORMAT, U)
        for u in tl.static_range(U):
            q = tl.load(numbers + start * 32 + u * 32)
            w = bytes_of(at, start, u, columns, FORMAT)
            total = tl.dot(q, tl.trans(w), begins, out_dtype=tl.int32)
            y = d[u][None, :] * (total.to(tl.float32, bitcast=True) - FLOAT)
            if loader(FORMAT).minima:
                halves = tl.load(sums_at + start + u)
                under = (((halves << 16) >> 16) + (halves >> 16)).to(tl.float32)
                y -= less[u][None, :] * under[:, None]
            acc += tl.load(scale_at + start + u)[:, None] * y
    return acc


@triton.jit
def scales_at(at, start, columns, FORMAT: tl.constexpr, U: tl.constexpr):
    """The scales f32 [N] of rows' blocks `start` to start + U - 1, and their minima."""
    d, n, less, m = scales(at[:, None], None, start + tl.arange(0, U)[None, :], columns, FORMAT, None)
    if len(n) > 0:
        d = d * n[0].to(tl.float32)  # exact, as is the other
    if len(m) > 0:
        less = less * m[0].to(tl.float32)
    return each(tl.broadcast_to(d, (at.shape[0], U))), each(tl.broadcast_to(less, (at.shape[0], U)))


@triton.jit
def each(t):
    """The columns of t [N, U], as sums with nothing.

    So numbers are decoded by one thread each. Taken apart, they would be by all whose sums they scale: Triton
    moves what is small before it is converted, but nothing through a sum.
    """
    U: tl.constexpr = t.shape[1]
    out = ()
    for u in tl.static_range(U):
        out = out + (tl.sum(tl.where(tl.arange(0, U)[None, :] == u, t, 0.0), axis=1),)
    return out


@triton.jit
def bytes_of(at, start, u: tl.constexpr, columns, FORMAT: tl.constexpr):
    """The numbers of block start + u of rows [N] in int8: [N, 32]."""
    BYTES: tl.constexpr = 32 // plane_count(FORMAT)
    ZERO: tl.constexpr = loader(FORMAT).zero
    raw = tl.load((at + start * BYTES)[:, None] + u * BYTES + tl.arange(0, BYTES)[None, :])
    if FORMAT == "q8_0":
        return raw.to(tl.int8, bitcast=True)
    elif loader(FORMAT).book != "":
        low, high = found(raw, FORMAT)
        return side_by_side(low, high)
    elif plane_count(FORMAT) == 4:
        a = tl.join(two_bits(raw, 0, FORMAT), two_bits(raw, 2, FORMAT))
        c = tl.join(two_bits(raw, 1, FORMAT), two_bits(raw, 3, FORMAT))
        return tl.reshape(tl.permute(tl.join(a, c), (0, 2, 3, 1)), (at.shape[0], 32))
    elif loader(FORMAT).more == "fifth":  # bit 8 k + t of a word: of column 4 t + k
        low, high = nibbles(raw, 0)
        first = at + columns // block(FORMAT) * begin(FORMAT, "fifth") + start * 4
        word = load_words(first[:, None] + u * 4, None, 1, FORMAT)
        c = tl.arange(0, 32)[None, :]
        bit = (word >> (c % 4 * 8 + c // 4).to(tl.uint32)) & 1
        return (side_by_side(low, high) | (bit << 4).to(tl.int8)) - ZERO
    else:
        low, high = nibbles(raw, ZERO)
        return side_by_side(low, high)


@triton.jit
def side_by_side(low, high):
    """Two [N, 16] as one [N, 32]."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (low.shape[0], 32))


@triton.jit
def nibbles(raw, ZERO: tl.constexpr):
    """The low nibbles of bytes, and the high ones, less ZERO (8, or 0) in int8."""
    if assembles():
        LESS: tl.constexpr = (
            "or.b32 $0, $0, 0x80808080; sub.u32 $0, $0, 0x08080808; xor.b32 $0, $0, 0x80808080;"
            "or.b32 $1, $1, 0x80808080; sub.u32 $1, $1, 0x08080808; xor.b32 $1, $1, 0x80808080;"
            if ZERO != 0
            else ""
        )
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; shr.b32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;" + LESS,
            "=&r,=&r,r", [raw], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return (raw & 15).to(tl.int8) - ZERO, (raw >> 4).to(tl.int8) - ZERO


@triton.jit
def two_bits(raw, plane: tl.constexpr, FORMAT: tl.constexpr):
    return ((raw >> (2 * plane)) & 3).to(tl.int8) - loader(FORMAT).zero


@triton.constexpr_function
def looks_up(format):
    """PTX that puts a book's numbers at the low nibbles of four bytes, and at the high ones.

    Half a word of places at a time, low and high ones in turn: from the first 8 entries and from the last 8,
    then by their highest bits from either.
    """
    q = [f"0x{quarter(format, i):08X}" for i in range(4)]
    half = """
        prmt.b32 u, {0}, {1}, t; prmt.b32 v, {2}, {3}, t; prmt.b32 {to}, u, v, c;
    """
    return (
        "{ .reg .b32 t, c, u, v, w, z;"
        "shr.b32 c, $2, 1; and.b32 c, c, 0x44444444; or.b32 c, c, 0x32103210; and.b32 t, $2, 0x77777777;"
        + half.format(*q, to="w")
        + "shr.b32 t, t, 16; shr.b32 c, c, 16;"
        + half.format(*q, to="z")
        + "prmt.b32 $0, w, z, 0x6420; prmt.b32 $1, w, z, 0x7531; }"
    )


@triton.jit
def found(raw, FORMAT: tl.constexpr):
    """The numbers of the book at the low nibbles of bytes, and at the high ones, in int8."""
    if assembles():
        return tl.inline_asm_elementwise(
            looks_up(FORMAT), "=&r,=&r,r", [raw], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        low, high = looked_up((raw & 15).to(tl.uint32), FORMAT), looked_up((raw >> 4).to(tl.uint32), FORMAT)
        ZERO: tl.constexpr = loader(FORMAT).zero
        return ((low & 255).to(tl.int32) - ZERO).to(tl.int8), ((high & 255).to(tl.int32) - ZERO).to(tl.int8)


# ---- f16


@triton.jit
def half_tile(data, row, rows, columns, stride, x, token, tokens, placed, K: tl.constexpr):
    """x at tokens [M], times rows [N], K columns at a time: [M, N]."""
    pitch = tl.cdiv(columns, 8) * 8
    at = data + tl.minimum(row, rows - 1).to(tl.int64) * stride
    at = at.to(tl.pointer_type(tl.float16))
    mine = tl.minimum(token, tokens - 1).to(tl.int64)
    halves = x.to(tl.pointer_type(tl.float16)) + mine * pitch
    acc = tl.zeros((token.shape[0], row.shape[0]), tl.float32)
    for start in range(0, columns, K):
        c = start + tl.arange(0, K)[None, :]
        a = tl.load(halves[:, None] + c, mask=c < columns, other=0)
        w = tl.load(at[:, None] + c, mask=c < columns, other=0)
        acc = tl.dot(a, tl.trans(w), acc)
    scales = (x + tl.cast(placed, tl.int64) * (pitch // 2)).to(tl.pointer_type(tl.float32))
    return acc * tl.load(scales + mine)[:, None]


@triton.jit
def scaled_tile(
    data, row, rows, columns, stride, x, token, tokens, placed,
    FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """x at tokens [M], times rows [N] in blocks of 256 columns, G units at a time: [M, N].

    Rows and tokens beyond the last are the last, as in `byte_tile`. The weights of the next turn are made in
    this one. Else, on cards without wgmma, Triton makes them in every warp that multiplies by them, or lays
    them out for four columns of a byte each, which costs 160 moves a turn.
    """
    K: tl.constexpr = G * V * plane_count(FORMAT)
    at = data + tl.minimum(row, rows - 1).to(tl.int64) * stride
    mine = tl.minimum(token, tokens - 1).to(tl.int64)
    halves = (x.to(tl.pointer_type(tl.float16)) + mine * columns)[:, None] + tl.arange(0, K)[None, :]
    acc = tl.zeros((token.shape[0], row.shape[0]), tl.float32)
    w, scale = halves_of(loaded(at, 0, columns, FORMAT, G, V), 0, FORMAT, G, V)
    for start in range(0, columns, K):
        later = tl.minimum(start + K, columns - K)
        raw = loaded(at, later, columns, FORMAT, G, V)
        a = tl.load(halves + start)
        acc += scale[None, :] * tl.dot(a, tl.trans(w))
        w, scale = halves_of(raw, later, FORMAT, G, V)
    scales = (x + tl.cast(placed, tl.int64) * (columns // 2)).to(tl.pointer_type(tl.float32))
    return acc * tl.load(scales + mine)[:, None]


@triton.jit
def units_from(start, FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """G units from the one of column `start` on."""
    return start // (V * plane_count(FORMAT)) + tl.arange(0, G)


@triton.jit
def loaded(at, start, columns, FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """All that `halves_of` needs of rows [N]: G units from column `start` on, of one block of 256."""
    g = units_from(start, FORMAT, G, V)
    w = load_words(tl.expand_dims(at[:, None] + g * V, -1), None, V // 4, FORMAT)
    more = further(at[:, None], None, g, columns, FORMAT, V)
    n, m = parts_of(at[:, None], None, g // (behind(FORMAT) // V), columns, FORMAT, 0)
    d = field(at, None, start // 256, columns, FORMAT, "super", tl.float16, 0)
    less = d
    if loader(FORMAT).minima:
        less = field(at, None, start // 256, columns, FORMAT, "super_minimum", tl.float16, 0)
    return w, more, n, m, d, less


@triton.jit
def halves_of(raw, start, FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr):
    """The weights of those units in f16, but for a factor f32 [N]: [N, G * V * planes], in order.

    Without minima a weight is an integer of 13 bits, and f16 rounds those above 2048. With minima it is one
    of f32, less than 128, as the factor is a power of two.
    """
    w, more, n, m, d, less = raw
    w = words(w, more, units_from(start, FORMAT, G, V), FORMAT, V)
    scale, less = d.to(tl.float32), less.to(tl.float32)
    factor = scale
    if loader(FORMAT).minima:
        factor, inverse = power_of(scale, less)
        scale, less = (scale * inverse)[:, None], (less * inverse)[:, None]
    out = ()
    for plane in tl.static_range(plane_count(FORMAT)):
        t = together(numbers(w, 0, plane, FORMAT))
        by = n[half_of(plane, FORMAT)].to(tl.float32)
        if loader(FORMAT).minima:
            under = less * m[half_of(plane, FORMAT)].to(tl.float32)
            t = t * tl.expand_dims(scale * by, -1) - tl.expand_dims(under, -1)
        else:
            t *= tl.expand_dims(by, -1)
        out = out + (tl.reshape(t.to(tl.float16), (d.shape[0], G * V // behind(FORMAT), behind(FORMAT))),)
    return in_order(out), each(factor[:, None])[0]


@triton.jit
def power_of(a, b):
    """The power of two below the larger of |a| and |b|, which were f16, and its inverse; of 0 and 0, 0."""
    bits = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, b.to(tl.int32, bitcast=True) & 0x7F800000)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def in_order(planes):
    """Two or four planes [N, B, C] as one [N, B * columns]."""
    N: tl.constexpr = planes[0].shape[0]
    if len(planes) == 2:
        t = tl.permute(tl.join(planes[0], planes[1]), (0, 1, 3, 2))
    else:
        t = tl.join(tl.join(planes[0], planes[2]), tl.join(planes[1], planes[3]))
        t = tl.permute(t, (0, 1, 3, 4, 2))
    return tl.reshape(t, (N, planes[0].numel * len(planes) // N))


# ---- tf32 and f32


@triton.jit
def rounded(x):
    """To the nearest of tf32's numbers; the tensor cores would cut off instead. A NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, near, x)


@triton.jit
def tiles(data, row, rows, stride, g, columns, FORMAT: tl.constexpr, V: tl.constexpr):
    """Rows [T] and units g [G] decoded: of each plane [T, G * V], as tensor cores take them."""
    at = data + row.to(tl.int64)[:, None] * stride
    n = units(at, (row < rows)[:, None], g, columns, FORMAT, V)
    out = ()
    for plane in tl.static_range(plane_count(FORMAT)):
        t = rounded(n[plane]) if kinds(FORMAT) > 1 else n[plane]
        out = out + (tl.reshape(t, (row.shape[0], g.shape[0] * V)),)
    return out


@triton.jit
def operand(x, token, tokens, c, width, FORMAT: tl.constexpr):
    """x [tokens, width] at tokens [M] and columns [K]."""
    ok = (token < tokens)[:, None] & (c < width)[None, :]
    y = tl.load(x + token.to(tl.int64)[:, None] * width + c[None, :], mask=ok, other=0)
    return y if FORMAT == "f32" else rounded(y)


@triton.jit
def float_tile(
    data, row, rows, columns, stride, x, token, tokens,
    FORMAT: tl.constexpr, G: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """x [tokens, columns] at tokens [M], times rows [N], G units of them at a time: [M, N].

    f32 weights are multiplied as such, others exactly as tf32.
    """
    PLANES: tl.constexpr = plane_count(FORMAT)
    PRECISION: tl.constexpr = "ieee" if FORMAT == "f32" else "tf32"
    acc = tl.zeros((token.shape[0], row.shape[0]), tl.float32)
    for start in range(0, tl.cdiv(columns, V * PLANES), G):
        g = start + tl.arange(0, G)
        n = tiles(data, row, rows, stride, g, columns, FORMAT, V)
        first = tl.reshape(columns_of(g, FORMAT, V), (G * V,))
        for plane in tl.static_range(PLANES):
            mine = operand(x, token, tokens, first + behind(FORMAT) * plane, columns, FORMAT)
            acc = tl.dot(mine, tl.trans(n[plane]), acc, precision(PRECISION))
    return acc


@triton.jit
def row_products(
    out, data, g, n, columns, stride, h, token, tokens, ADD: tl.constexpr,
    FORMAT: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """out [tokens, columns] (+)= h [tokens, n] times n rows, K at a time: at tokens [M] and units g [G]."""
    PLANES: tl.constexpr = plane_count(FORMAT)
    PRECISION: tl.constexpr = "ieee" if FORMAT == "f32" else "tf32"
    acc = (tl.zeros((token.shape[0], g.shape[0] * V), tl.float32),) * PLANES
    for start in range(0, n, K):
        row = start + tl.arange(0, K)
        w = tiles(data, row, n, stride, g, columns, FORMAT, V)
        a = operand(h, token, tokens, row, n, FORMAT)
        new = ()
        for plane in tl.static_range(PLANES):
            new = new + (tl.dot(a, w[plane], acc[plane], precision(PRECISION)),)
        acc = new
    first = tl.reshape(columns_of(g, FORMAT, V), (g.shape[0] * V,))
    for plane in tl.static_range(PLANES):
        put(out, acc[plane], token, tokens, first + behind(FORMAT) * plane, columns, ADD)


@triton.jit
def put(out, acc, token, tokens, c, width, ADD: tl.constexpr):
    to = out + token.to(tl.int64)[:, None] * width + c[None, :]
    ok = (token < tokens)[:, None] & (c < width)[None, :]
    if ADD:
        acc += tl.load(to, mask=ok, other=0)
    tl.store(to, acc, mask=ok)
