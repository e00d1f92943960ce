"""Device code for products of rows in blocks with activations in int8: four products an instruction.

A thread has a whole block of 32 columns of a row, as eight words of four bytes, and multiplies it with all
tokens. The products of a block are one exact integer, as in the CPU's kernels (docs/internals/csrc.md).

Memory: `at` points at the weights of row 0, u8. Where a mask is false nothing is read; without one (None) all
is there. Quantised activations lie as `device_rows.Scratch.quantised` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_stored import (
    begin,
    block,
    entry,
    every_byte,
    field,
    load_words,
    loader,
    looked_up,
    parts,
    parts_of,
    plane_count,
    scale_count,
    scales_of,
)
from thermocline.ops.kernels.triton_target import assembles, follow

TOKENS: tl.constexpr = tl.constexpr(4)  # at a time: of more, words of x take the registers of sums


# ---- activations


@triton.jit
def quantise(to, x, tokens, width, B: tl.constexpr):
    """Program (token, B blocks): x [tokens, 32 * width] as `to`, where nothing that made x has done it."""
    follow()
    t, b = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    there = b < width
    at = t * width + b
    y = tl.load(x + at[:, None] * 32 + tl.arange(0, 32)[None, :], mask=there[:, None], other=0)
    put_ints(to, y, at, there, tokens * width)


@triton.jit
def put_ints(to, y, at, there, blocks):
    """Write y [B, 32] as blocks `at` [B] of so many, where `there`. As the CPU does it, bit for bit.

    A block with an infinity or a NaN has a NaN for its scale, so that it shows in every product. Bits are
    compared as integers: fused, y - y of a product would be that product's rounding error.
    """
    B: tl.constexpr = y.shape[0]
    bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    known = bits < 0x7F800000
    peak = tl.where(known, bits, 0).to(tl.float32, bitcast=True)
    most, some = tl.full((B,), 127.0, tl.float32), peak > 1e-36  # below, 127 / peak would be infinite
    inverse = tl.where(some, tl.div_rn(most, tl.where(some, peak, 1.0)), 0.0)
    q = nearest(tl.where(known[:, None], y * inverse[:, None], 0.0))
    numbers = to.to(tl.pointer_type(tl.int8)) + at[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(numbers, q.to(tl.int8), mask=there[:, None])
    scales = (to + blocks * 8).to(tl.pointer_type(tl.float32))
    tl.store(scales + at, tl.where(known, tl.div_rn(peak, most), float("nan")), mask=there)
    low, high = tl.split(tl.sum(tl.reshape(q, (B, 2, 16)), axis=2))
    tl.store(to + blocks * 9 + at, (low & 0xFFFF) | (high << 16), mask=there)


@triton.jit
def halve(to, x, width, pitch, C: tl.constexpr):
    """A token of x [.., width] in f16, divided by a power of two; `pitch` numbers, and behind all the powers.

    The largest becomes 2**13 to 2**14: so products with f16 lose what tf32 loses, and f32 holds their sums. A
    token with an infinity or a NaN has a NaN.
    """
    follow()
    t = tl.program_id(0).to(tl.int64)
    most, wrong = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    for start in range(0, width, C):
        c = start + tl.arange(0, C)
        y = tl.load(x + t * width + c, mask=c < width, other=0)
        most, wrong = tl.maximum(most, tl.abs(y)), wrong + (y - y)
    peak, odd = tl.max(most, axis=0), tl.sum(wrong, axis=0)
    exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 14), 254)
    scale = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    inverse = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    halves = to.to(tl.pointer_type(tl.float16)) + t * pitch
    for start in range(0, width, C):
        c = start + tl.arange(0, C)
        y = tl.load(x + t * width + c, mask=c < width, other=0)
        tl.store(halves + c, (y * inverse).to(tl.float16), mask=c < width)
    scales = (to + tl.num_programs(0).to(tl.int64) * (pitch // 2)).to(tl.pointer_type(tl.float32))
    tl.store(scales + t, scale + odd)


@triton.jit
def nearest(y):
    """The nearest integers, of two the even one. Assembly, so that no product is fused into it."""
    if assembles():
        return tl.inline_asm_elementwise(
            "cvt.rni.s32.f32 $0, $1;", "=r,f", [y], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((y + 12582912.0) - 12582912.0).to(tl.int32)


# ---- words of four bytes


@triton.jit
def quad(w, x, total, SIGNED: tl.constexpr):
    """total i32 [...] + the four products of the bytes of w, signed or not, and those of x."""
    if assembles():
        INSTRUCTION: tl.constexpr = (
            "dp4a.s32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.s32 $0, $1, $2, $3;"
        )
        total = tl.inline_asm_elementwise(
            INSTRUCTION, "=r,r,r,r", [w, x, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        w = w.to(tl.int32, bitcast=True)
        for i in tl.static_range(4):
            n = (w << (24 - 8 * i)) >> 24 if SIGNED else (w >> (8 * i)) & 255
            total += n * ((x << (24 - 8 * i)) >> 24)
    return total


@triton.jit
def words_of(at, ok, b, columns, FORMAT: tl.constexpr, rows):
    """Blocks b [G] of R rows: eight [R, G], in the order of columns.

    Where no further bits belong to nibbles, the last four are 16 times their numbers: that saves their shift.
    """
    BYTES: tl.constexpr = 32 // plane_count(FORMAT)
    WORDS: tl.constexpr = BYTES // 4
    LOW: tl.constexpr = 8 // plane_count(FORMAT)  # bits of a column in a byte
    MORE: tl.constexpr = loader(FORMAT).more
    first, mask = tl.expand_dims(at + b * BYTES, -1), None if ok is None else tl.expand_dims(ok, -1)
    out = ()
    if FORMAT == "q8_0":
        out = parts(load_words(first, mask, 4, FORMAT, rows)) + parts(
            load_words(first + 16, mask, 4, FORMAT, rows)
        )
    else:
        raw = parts(load_words(first, mask, WORDS, FORMAT, rows))
        if loader(FORMAT).book != "":
            odd = ()
            for i in tl.static_range(4):
                even, other = entries(raw[i], FORMAT)
                out, odd = out + (even,), odd + (other,)
            out = out + odd
        elif MORE == "pairs":
            more = further(at, mask, b, columns, FORMAT, 2, rows)
            for i in tl.static_range(8):
                some = more[i % 2] & every_byte(0x33 if i // 2 % 2 == 0 else 0xCC)
                out = out + (merged(moved(raw[i % 4], i // 4 * -4), moved(some, 4 - i // 2 * 2)),)
        elif MORE != "":
            more = further(at, mask, b, columns, FORMAT, 1, rows)
            for i in tl.static_range(8):
                n = moved(raw[i % WORDS], i // WORDS * -LOW) & every_byte(2**LOW - 1)
                out = out + (n | moved(more[0], LOW - i) & every_byte(1 << LOW),)
        elif sixteenfold(FORMAT):
            for i in tl.static_range(8):
                out = out + (raw[i % 4] & every_byte(0x0F if i < 4 else 0xF0),)
        else:
            for i in tl.static_range(8):
                out = out + (moved(raw[i % WORDS], i // WORDS * -LOW) & every_byte(2**LOW - 1),)
    return out


@triton.jit
def further(at, mask, b, columns, FORMAT: tl.constexpr, N: tl.constexpr, rows):
    """The bits that bytes lack: N words of blocks b [G]."""
    start = at + columns // block(FORMAT) * begin(FORMAT, loader(FORMAT).more)
    return parts(load_words(tl.expand_dims(start + b * (4 * N), -1), mask, N, FORMAT, rows))


@triton.jit
def moved(w, N: tl.constexpr):
    """w, N bits up, or down."""
    return w << N if N >= 0 else w >> -N


@triton.jit
def merged(low, high):
    """The low nibbles of `low` and the high ones of `high`. LLVM would make two operations of it."""
    if assembles():
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, 0x0F0F0F0F, 0xD8;", "=r,r,r", [high, low],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (low & 0x0F0F0F0F) | (high & 0xF0F0F0F0)


@triton.jit
def entries(places, FORMAT: tl.constexpr):
    """The numbers of the book at the low nibbles of `places`, and those at the high ones: signed bytes."""
    if assembles():
        # Half a word of places at a time, low and high ones in turn: from the first 8 entries and from the
        # last 8, then by their highest bits from either.
        choose = ((places >> 1) & 0x44444444) | 0x32103210
        three = places & 0x77777777
        a = permuted(permuted(quarter(FORMAT, 0), quarter(FORMAT, 1), three),
                     permuted(quarter(FORMAT, 2), quarter(FORMAT, 3), three), choose)  # fmt: skip
        three, choose = three >> 16, choose >> 16
        b = permuted(permuted(quarter(FORMAT, 0), quarter(FORMAT, 1), three),
                     permuted(quarter(FORMAT, 2), quarter(FORMAT, 3), three), choose)  # fmt: skip
        return permuted(a, b, 0x6420), permuted(a, b, 0x7531)
    else:
        low, high = looked_up(places & 0x0F0F0F0F, FORMAT), looked_up((places >> 4) & 0x0F0F0F0F, FORMAT)
        return low ^ 0x80808080, high ^ 0x80808080


@triton.jit
def permuted(a, b, places):
    """The bytes of a and b at the four places in the low half of `places`: a's are 0 to 3, b's 4 to 7."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, places], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.constexpr_function
def quarter(format, i):
    """Entries 4 i to 4 i + 3 of the book, as a word."""
    zero = loader(format).zero
    return sum(((entry(format, 4 * i + k) & 255) - zero & 255) << 8 * k for k in range(4))


@triton.constexpr_function
def sixteenfold(format):
    how = loader(format)
    return how.planes == 2 and not how.more and not how.book


@triton.constexpr_function
def signed(format):
    """Whether bytes are numbers; else they are too large by the loader's zero."""
    return loader(format).bits == 8


# ---- products


@triton.jit
def places(R: tl.constexpr, APART: tl.constexpr):
    """[R]: 0, 1 …; or half of that, and the same `APART` further."""
    i = tl.arange(0, R)
    if APART > 0:
        i = i % (R // 2) + i // (R // 2) * APART
    return i


@triton.jit
def byte_dots(
    data, live, columns, x, first, tokens, pitch,
    STRIDE: tl.constexpr, FORMAT: tl.constexpr, B: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
    APART: tl.constexpr = 0,
):  # fmt: skip
    """Each of quantised tokens x times R rows from `data` on, where `live` [R], or (None) all: [B, R].

    APART: as `places`'.

    A token has `pitch` blocks, of which these columns are those from `first` on. Its sum is the same whatever
    B and R are. STRIDE is a constant: so the loads of all rows have one address and differ by constants.
    """
    rows = (places(R, APART) * STRIDE)[:, None]
    blocks = columns // 32
    ok, any_live = None, 1
    if live is not None:
        ok, any_live = tl.broadcast_to(live[:, None], (R, G)), tl.max(live.to(tl.int32), axis=0)
    ZERO: tl.constexpr = 0 if signed(FORMAT) else loader(FORMAT).zero
    HALVES: tl.constexpr = scale_count(FORMAT) == 2
    MINIMA: tl.constexpr = loader(FORMAT).minima
    all_blocks = tokens * pitch
    token = tl.arange(0, B)[:, None]
    out = tl.zeros((B, R), tl.float32)
    T: tl.constexpr = min(B, TOKENS)
    for group in range(0, tokens if B > T else B, T):
        sums = (tl.zeros((R, G), tl.float32),) * T
        for start in range(0, blocks * any_live, G):
            b = start + tl.arange(0, G)
            inside = b < blocks
            b = tl.minimum(b, blocks - 1)  # its x has the scale 0
            w = words_of(data, ok, b, columns, FORMAT, rows)
            d, n, less, m = scales(data, ok, b, columns, FORMAT, rows)
            new = ()
            for t in tl.static_range(T):
                mine = tl.minimum(group + t, tokens - 1) * pitch + first
                numbers = (x + mine * 8) + (b * 8)[:, None] + tl.arange(0, 4)[None, :]
                q = parts(tl.load(numbers)) + parts(tl.load(numbers + 4))
                scale = tl.load((x + all_blocks * 8 + mine).to(tl.pointer_type(tl.float32)) + b)
                scale = tl.where(inside, scale, 0.0)
                low, high = tl.zeros((G,), tl.int32), tl.zeros((G,), tl.int32)
                if ZERO != 0 or MINIMA:
                    halves = tl.load(x + all_blocks * 9 + mine + b)
                    low, high = (halves << 16) >> 16, halves >> 16
                i0, i1 = -ZERO * low, -ZERO * high
                if not HALVES:
                    i0, i1 = i0 + i1, tl.zeros((G,), tl.int32)
                i0, i1 = tl.broadcast_to(i0[None, :], (R, G)), tl.broadcast_to(i1[None, :], (R, G))
                for i in tl.static_range(4):
                    i0 = quad(w[i], tl.broadcast_to(q[i][None, :], (R, G)), i0, signed(FORMAT))
                for i in tl.static_range(4, 8):
                    i1 = quad(w[i], tl.broadcast_to(q[i][None, :], (R, G)), i1, signed(FORMAT))
                if HALVES:
                    total = n[0] * i0 + n[1] * i1
                else:
                    total = i0 + (i1 >> 4) if sixteenfold(FORMAT) else i0 + i1
                    if len(n) > 0:
                        total *= n[0]
                y = d * total.to(tl.float32)
                if MINIMA:
                    if HALVES:
                        under = m[0] * low[None, :] + m[1] * high[None, :]
                    else:
                        under = tl.broadcast_to((low + high)[None, :], (R, G))
                        if len(m) > 0:
                            under *= m[0]
                    y = tl.fma(-less, under.to(tl.float32), y)
                new = new + (tl.fma(tl.broadcast_to(scale[None, :], (R, G)), y, sums[t]),)
            sums = new
        for t in tl.static_range(T):
            out = tl.where(token == group + t, tl.sum(sums[t], axis=1)[None, :], out)
    return out


@triton.jit
def scales(at, ok, b, columns, FORMAT: tl.constexpr, rows):
    """Return what scales blocks b [G] of 32 columns: an f32 factor [R, G], and integers that scale it (none,
    one or two); then of minima likewise a factor and integers.
    """
    if block(FORMAT) == 256:
        d = field(at, ok, b // 8, columns, FORMAT, "super", tl.float16, 0, rows).to(tl.float32)
        n, less, m = (), d, ()
        if FORMAT != "tq2_0":
            n, m = parts_of(at, ok, b, columns, FORMAT, 0, rows)
        if loader(FORMAT).minima:
            less = field(at, ok, b // 8, columns, FORMAT, "super_minimum", tl.float16, 0, rows).to(tl.float32)
        return d, n, less, m
    else:
        d, minima = scales_of(at, ok, b, columns, FORMAT, 0, rows)
        return d[0], (), minima[0] if loader(FORMAT).minima else d[0], ()
