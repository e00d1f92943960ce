"""Device code that decodes matrices as packs store them, and how what a thread holds is taken apart.

A row is read in units: V stored numbers that one thread loads at once, of one scale at most.

Memory: `at` points at the weights of a row, u8. Where a mask is false nothing is read.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Loader(NamedTuple):
    """How the rows of a format are read.

    `size`: bytes of a stored number. `block`: stored numbers with one scale, which is an f16 behind those of
    all blocks; 0: no scales. `kinds`: tensors that `numbers` makes of what is stored. `planes`: columns of
    a stored number, each `BEHIND` the one before. For few tokens: `dot`, stored numbers of a unit of `dots`,
    and `sums`, a thread's in `down_few`, of all tokens, at most.
    """

    size: int
    block: int
    kinds: int
    planes: int
    dot: int
    sums: int


@triton.constexpr_function
def loader(format):
    """The row of a format; its numbers are made by `numbers`.

    dot: x is f32, so with more than four columns a thread, its lanes' loads conflict (2 to 8 at once); and
    with fewer there is a scale to load and multiply with for every four numbers of q8_0.
    """
    return {
        "f32": Loader(size=4, block=0, kinds=1, planes=1, dot=4, sums=32),
        "f16": Loader(size=2, block=0, kinds=1, planes=1, dot=4, sums=32),
        "bf16": Loader(size=2, block=0, kinds=1, planes=1, dot=4, sums=32),
        "q8_0": Loader(size=1, block=32, kinds=4, planes=1, dot=8, sums=32),
        "q4_0": Loader(size=1, block=16, kinds=8, planes=2, dot=4, sums=16),
    }[format]


BEHIND: tl.constexpr = tl.constexpr(16)  # columns between the halves of a byte


@triton.jit
def stored(at, live, g, columns, FORMAT: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr = 0):
    """Units g + AHEAD [G] of the rows at `at` [..., 1] where `live` [..., 1]: what is stored, scale [..., G].

    Floats [..., G, V]; or uint32 [..., G, V / 4], of four stored numbers each. scale: 1 where there is none.
    """
    BLOCK: tl.constexpr = block(FORMAT)
    stored_columns = columns // plane_count(FORMAT)
    inside = live & (g < tl.cdiv(stored_columns, V) - AHEAD)
    unit = tl.expand_dims(at + g * (V * size(FORMAT)), -1) + AHEAD * V * size(FORMAT)
    ok = tl.expand_dims(inside, -1)
    if BLOCK > 0:
        # Rows of blocks begin at even bytes. Where they are aligned further, a thread's loads become one.
        pairs = tl.load(unit.to(tl.pointer_type(tl.uint16)) + tl.arange(0, V // 2), mask=ok, other=0)
        first, second = tl.split(tl.reshape(pairs, pairs.shape[:-1] + (V // 4, 2)))
        w = first.to(tl.uint32) | (second.to(tl.uint32) << 16)
        of = at + stored_columns + (g * V // BLOCK * 2) + AHEAD * V // BLOCK * 2
        scale = tl.load(of.to(tl.pointer_type(tl.float16)), mask=inside, other=0).to(tl.float32)
    else:
        v = tl.arange(0, V)
        ok = ok & ((g * V)[:, None] + v < columns - AHEAD * V)
        w = tl.load(unit.to(tl.pointer_type(number(FORMAT))) + v, mask=ok, other=0)
        scale = inside.to(tl.float32)
    return w, scale


@triton.jit
def numbers(w, zero, FORMAT: tl.constexpr):
    """The f32 numbers of what is stored, unscaled, in `kinds(FORMAT)` tensors.

    (w,); or 4, of each int32 its bytes; or 8, of bytes the low halves, then the high ones, whose columns are
    `BEHIND`.

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
    """Return t [..., N] as a tuple of N [...]: each thread holds all N, so nothing moves."""
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

    high: the numbers of the second plane, `BEHIND`; low again where there is one.
    """
    w, scale = stored(at, live, g, columns, FORMAT, V)
    n = numbers(w, 0, FORMAT)
    low, high = planes(n, kinds(FORMAT))
    return low, high, scale


@triton.jit
def planes(n, KINDS: tl.constexpr):
    """Return low, high [..., V] of tensors as `numbers` returns them."""
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
    return loader(format).kinds


@triton.constexpr_function
def size(format):
    """Bytes of a stored number."""
    return loader(format).size


@triton.constexpr_function
def block(format):
    """Stored numbers with one scale; 0: no scales."""
    return loader(format).block


@triton.constexpr_function
def plane_count(format):
    """Columns of a stored number."""
    return loader(format).planes


@triton.jit
def first_column(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """Return the first columns of units g [G]; `high` begins `BEHIND`."""
    if plane_count(FORMAT) == 2:
        return g // (BEHIND // V) * (2 * BEHIND) + g % (BEHIND // V) * V
    else:
        return g * V


@triton.jit
def columns_of(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """The column of each number of units g [G]: [G, V]."""
    return first_column(g, FORMAT, V)[:, None] + tl.arange(0, V)[None, :]
