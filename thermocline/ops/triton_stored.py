"""Device code that decodes matrices as packs store them, and how what a thread holds is taken apart.

A row is read in units: V stored numbers that one thread loads at once, of one scale at most. Must not know
what is computed with them.

Memory: `at` points at the weights of a row, u8. Where a mask is false nothing is read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stored(at, live, g, columns, FORMAT: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr = 0):
    """Units g + AHEAD [G] of the rows at `at` [..., 1] where `live` [..., 1]: what is stored, scale [..., G].

    Floats [..., G, V]; or uint32 [..., G, V / 4], of four stored numbers each. scale: 1 where there is none.
    """
    WIDE: tl.constexpr = 32 if FORMAT == "q8_0" else 16  # stored numbers of a block
    stored_columns = columns // 2 if FORMAT == "q4_0" else columns
    inside = live & (g < tl.cdiv(stored_columns, V) - AHEAD)
    unit = tl.expand_dims(at + g * (V * size(FORMAT)), -1) + AHEAD * V * size(FORMAT)
    ok = tl.expand_dims(inside, -1)
    if FORMAT == "q8_0" or FORMAT == "q4_0":
        # Rows of blocks begin at even bytes. Where they are aligned further, a thread's loads become one.
        pairs = tl.load(unit.to(tl.pointer_type(tl.uint16)) + tl.arange(0, V // 2), mask=ok, other=0)
        first, second = tl.split(tl.reshape(pairs, pairs.shape[:-1] + (V // 4, 2)))
        w = first.to(tl.uint32) | (second.to(tl.uint32) << 16)
        of = at + stored_columns + (g * V // WIDE * 2) + AHEAD * V // WIDE * 2
        scale = tl.load(of.to(tl.pointer_type(tl.float16)), mask=inside, other=0).to(tl.float32)
    else:
        v = tl.arange(0, V)
        ok = ok & ((g * V)[:, None] + v < columns - AHEAD * V)
        w = tl.load(unit.to(tl.pointer_type(number(FORMAT))) + v, mask=ok, other=0)
        scale = inside.to(tl.float32)
    return w, scale


@triton.jit
def numbers(w, zero, FORMAT: tl.constexpr):
    """Of what is stored, f32 and unscaled: (w,); or a tuple of 4, of each int32 its bytes; or of 8, of q4_0's
    bytes the low halves, then the high ones, whose columns are 16 behind.

    2**e + n is a float whose last bits are n, wherever they begin: so two operations make a number, one that
    masks the bits where they lie and puts the exponent before them, and a subtraction.
    """
    if FORMAT == "q8_0":
        w = w ^ 0x80808080  # n + 128
        return four_of(w, zero, 0xFF, 0, 8, 128.0)
    elif FORMAT == "q4_0":
        return four_of(w, zero, 0xF, 0, 8, 8.0) + four_of(w, zero, 0xF, 4, 12, 8.0)
    else:
        return (w.to(tl.float32),)


@triton.jit
def four_of(w, zero, MASK: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ZERO: tl.constexpr):
    """The numbers that begin at these bits of both halves of w [...]."""
    above = w >> 16
    return (
        masked(w, zero, MASK, FIRST, ZERO),
        masked(w, zero, MASK, SECOND, ZERO),
        masked(above, zero, MASK, FIRST, ZERO),
        masked(above, zero, MASK, SECOND, ZERO),
    )


@triton.jit
def masked(w, zero, MASK: tl.constexpr, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """The number of w that begins at bit FIRST, less ZERO. 2**(23 - FIRST) has its last bit there."""
    bits = (w & (MASK << FIRST)) | (((150 - FIRST) << 23) + zero)
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - FIRST) + ZERO)


@triton.jit
def parts(t):
    """What each thread has along t's last axis, [..., N]: a tuple of N, [...]. Nothing moves."""
    N: tl.constexpr = t.shape[len(t.shape) - 1]
    if N == 1:
        out = (tl.reshape(t, t.shape[:-1]),)
    else:
        even, odd = tl.split(tl.reshape(t, t.shape[:-1] + (N // 2, 2)))
        evens, odds = parts(even), parts(odd)
        out = ()
        for i in tl.static_range(N // 2):
            out = out + (evens[i], odds[i])
    return out


@triton.jit
def together(a, b, c, d):
    """Four [..., N] as one, [..., N * 4], in turns. Nothing moves."""
    t = tl.join(tl.join(a, c), tl.join(b, d))  # [..., N, 2 (a or c), 2 (a or b)]
    return tl.reshape(t, a.shape[:-1] + (a.shape[len(a.shape) - 1] * 4,))


@triton.jit
def units(at, live, g, columns, FORMAT: tl.constexpr, V: tl.constexpr):
    """Units g [G] of rows, as `stored`: low, high [..., G, V], scale [..., G].

    high: of q4_0, the numbers 16 columns behind; else low again.
    """
    w, scale = stored(at, live, g, columns, FORMAT, V)
    n = numbers(w, 0, FORMAT)
    low, high = planes(n, kinds(FORMAT))
    return low, high, scale


@triton.jit
def planes(n, KINDS: tl.constexpr):
    """Of tensors as of `numbers`: low, high [..., V]."""
    if KINDS == 1:
        low = n[0]
        high = low
    else:
        low = together(n[0], n[1], n[2], n[3])
        high = low
        if KINDS == 8:
            high = together(n[4], n[5], n[6], n[7])
    return low, high


@triton.jit
def unknown_nought(n):
    """0, of n that is not negative, which the compiler cannot know.

    A constant added to it stays in a register; by itself it would be loaded anew for every number.
    """
    return tl.minimum(n, 0).to(tl.uint32)


@triton.constexpr_function
def number(format):
    return {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}[format]


@triton.constexpr_function
def kinds(format):
    """Tensors that `numbers` makes."""
    return {"q8_0": 4, "q4_0": 8}.get(format, 1)


@triton.constexpr_function
def size(format):
    """Bytes of a stored number."""
    return {"f32": 4, "f16": 2, "bf16": 2}.get(format, 1)


@triton.jit
def first_column(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """Where units g [G] begin; of `high` it is 16 columns behind."""
    if FORMAT == "q4_0":
        return g // (16 // V) * 32 + g % (16 // V) * V
    else:
        return g * V


@triton.jit
def columns_of(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """The column of each number of units g [G]: [G, V]."""
    return first_column(g, FORMAT, V)[:, None] + tl.arange(0, V)[None, :]
