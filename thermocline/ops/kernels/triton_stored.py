"""Device code that decodes matrices as packs store them, and how what a thread holds is taken apart.

A weight is scale * number - minimum. A row is read in units: V stored numbers that one thread loads at once,
of one block of 32 columns, and the block's scales. A stored number is a float; or a byte with bits of 1, 2 or
4 columns, whose further bits may lie in a plane of their own. `stored` makes words of them, each with the
numbers of four columns, and `numbers` makes floats of a word.

Memory: `at` points at the weights of a row, u8. Where a mask is false nothing is read.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl

from thermocline.model import gguf_blocks
from thermocline.model.formats import FORMATS


class Loader(NamedTuple):
    """How the rows of a format are read.

    `planes`: columns of a stored number, each `behind` the one before. `bits`: of a column's number, of which
    `zero` means 0; without any, stored numbers are floats. `more`: the plane of the bits that bytes lack.
    `book`: numbers are places in this table. `scales`: of 32 columns. `minima`: there are as many.
    `size`: bytes of a stored number. `align`: rows begin at multiples of so many.

    Stored numbers of a unit: `unit`; `dot` in `dots`; in `down_few` as many as make `sums` of all tokens.
    """

    planes: int
    bits: int
    zero: int = 0
    more: str = ""
    book: str = ""
    scales: int = 1
    minima: bool = False
    size: int = 1
    align: int = 2
    unit: int = 16
    dot: int = 4
    sums: int = 16


@triton.constexpr_function
def loader(format):
    """The row of a format; its words are made by `words`, its scales by `scales_of`.

    dot: x is f32, so with more than four columns a thread, its lanes' loads conflict (2 to 8 at once); and
    with fewer there are scales to load and multiply with for every few stored numbers.
    """
    return {
        "f32": Loader(1, 0, size=4, align=4, unit=4, sums=32),
        "f16": Loader(1, 0, size=2, unit=8, sums=32),
        "bf16": Loader(1, 0, size=2, unit=8, sums=32),
        "q8_0": Loader(1, 8, 128, dot=8, sums=32),
        "q4_0": Loader(2, 4, 8),
        "q4_1": Loader(2, 4, minima=True),
        "q5_0": Loader(2, 5, 16, "fifth"),
        "q5_1": Loader(2, 5, 0, "fifth", minima=True),
        "q4_k": Loader(2, 4, minima=True, dot=8),
        "q5_k": Loader(2, 5, 0, "fifth", minima=True),
        "q6_k": Loader(2, 6, 32, "pairs", scales=2, unit=8, dot=8),
        "q3_k": Loader(4, 3, 4, "third", scales=2, unit=8, sums=8),
        "q2_k": Loader(4, 2, scales=2, minima=True, unit=8, sums=8),
        "iq4_nl": Loader(2, 8, 128, book="iq4"),
        "iq4_xs": Loader(2, 8, 128, book="iq4"),
        "mxfp4": Loader(2, 8, 128, book="e2m1", align=1),
        "tq2_0": Loader(4, 2, 1, unit=8, sums=8),
    }[format]


def _begins():
    """For each format, the weights of a block, and the bytes of one that come before each plane's."""
    made = {}
    for f in FORMATS.values():
        before = accumulate((p.nbytes for p in f.planes), initial=0)
        made[f.name] = f.block, {p.name: at for p, at in zip(f.planes, before, strict=False)}
    return made


# Being constexpr, they are part of a compiled kernel's key.
BEGINS: tl.constexpr = tl.constexpr(_begins())
BOOKS: tl.constexpr = tl.constexpr({"iq4": gguf_blocks.IQ4.tolist(), "e2m1": gguf_blocks.E2M1.tolist()})


# ---- units of a row


@triton.jit
def stored(at, live, g, columns, FORMAT: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr = 0):
    """Units g + AHEAD [G] of the rows at `at` [..., 1] where `live` [..., 1]: words, scales, minima.

    words: floats ([..., G, V],); or uint32 [..., G, V / 4], a tensor for all planes or one for each.
    scales, minima: [..., G], as many as the format's row says. Floats have a scale of 1.
    """
    inside = live & (g < tl.cdiv(columns // plane_count(FORMAT), V) - AHEAD)
    unit = tl.expand_dims(at + g * (V * size(FORMAT)), -1) + AHEAD * V * size(FORMAT)
    ok = tl.expand_dims(inside, -1)
    if kinds(FORMAT) == 1:
        v = tl.arange(0, V)
        ok = ok & ((g * V)[:, None] + v < columns - AHEAD * V)
        w = (tl.load(unit.to(tl.pointer_type(number(FORMAT))) + v, mask=ok, other=0),)
        scales = (inside.to(tl.float32),)
        minima = ()
    else:
        more = further(at, ok, g, columns, FORMAT, V, AHEAD)
        w = words(load_words(unit, ok, V // 4, FORMAT), more, g, FORMAT, V)
        UNITS: tl.constexpr = behind(FORMAT) // V  # of a block. AHEAD is whole ones of 256 columns
        scales, minima = scales_of(at, inside, g // UNITS, columns, FORMAT, AHEAD // UNITS)
    return w, scales, minima


@triton.jit
def load_words(at, ok, N: tl.constexpr, FORMAT: tl.constexpr, rows=None):
    """Words of four bytes, [..., N], from `at` [..., 1] on. Where rows are aligned, they come at once.

    rows: as `read`'s.
    """
    ALIGNED: tl.constexpr = loader(FORMAT).align > 1
    at = at.to(tl.pointer_type(tl.uint16)) + tl.arange(0, 2 * N) if ALIGNED else at + tl.arange(0, 4 * N)
    if rows is not None:
        at = at + tl.expand_dims(rows // 2 if ALIGNED else rows, -1)
        at = tl.max_contiguous(at, (1, 2, 2 * N if ALIGNED else 4 * N))  # see `read`
    pairs = read(at, ok)
    if not ALIGNED:
        pairs = paired(pairs, tl.uint16)
    return paired(pairs, tl.uint32)


@triton.jit
def read(at, ok, rows=None):
    """Read what is at `at` where `ok` (None: everywhere), else 0.

    rows [R, 1]: how far each lies behind `at` [G]. Such constants are added last, so that they become part of
    the loads. Neighbouring lanes take neighbouring numbers: else Triton 3.6 moves them from lane to lane.
    """
    if rows is not None:
        at = tl.max_contiguous(at + rows, (1, 2))
    if ok is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=ok, other=0)


@triton.jit
def paired(t, TYPE: tl.constexpr):
    """Two neighbours of t [..., N] as one number of twice their bits, the first in the low ones."""
    N: tl.constexpr = t.shape[len(t.shape) - 1] // 2
    first, second = tl.split(tl.reshape(t, t.shape[:-1] + (N, 2)))
    return first.to(TYPE) | (second.to(TYPE) << (TYPE.primitive_bitwidth // 2))


@triton.jit
def field(
    at, ok, i, columns, FORMAT: tl.constexpr, PLANE: tl.constexpr, TYPE: tl.constexpr, AHEAD: tl.constexpr,
    rows=None,
):  # fmt: skip
    """Numbers i + AHEAD [G] of a plane: [..., G]. rows: as `read`'s."""
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    of = at + (columns // block(FORMAT) * begin(FORMAT, PLANE) + i * SIZE) + AHEAD * SIZE
    return read(of.to(tl.pointer_type(TYPE)), ok, None if rows is None else rows // SIZE)


@triton.jit
def words(w, more, g, FORMAT: tl.constexpr, V: tl.constexpr):
    """Words [..., G, V / 4] of stored numbers as `numbers` takes them: as they are, or each plane's own.

    more: the bits that they lack, as `further` has loaded them.
    """
    LOW: tl.constexpr = 8 // plane_count(FORMAT)  # bits of a column in a stored number
    MORE: tl.constexpr = loader(FORMAT).bits - LOW
    if FORMAT == "q8_0":
        out = (w ^ 0x80808080,)  # n + 128
    elif whole(FORMAT):
        if loader(FORMAT).more != "":
            bits = more[0] >> begin_of(g, FORMAT, V)
        out = ()
        for plane in tl.static_range(plane_count(FORMAT)):
            n = (w >> (LOW * plane)) & every_byte(2**LOW - 1)
            if loader(FORMAT).more != "":
                n |= ((bits >> (behind(FORMAT) // 4 * plane)) & every_byte(2**MORE - 1)) << LOW
            else:
                n = looked_up(n, FORMAT)
            out = out + (n,)
    else:
        out = (w,)
    return out


@triton.jit
def further(at, ok, g, columns, FORMAT: tl.constexpr, V: tl.constexpr, AHEAD: tl.constexpr = 0):
    """The words with the bits that bytes lack: ([..., G, V / 4],), or 1 for V / 4, or ()."""
    PLANE: tl.constexpr = loader(FORMAT).more
    UNITS: tl.constexpr = behind(FORMAT) // V  # of a block
    out = ()
    if PLANE != "":
        start = at + columns // block(FORMAT) * begin(FORMAT, PLANE)
        if PLANE == "pairs":  # byte k of 8: two bits of each of the columns k, k + 8, k + 16, k + 24
            of = start + (g // UNITS * 8 + g % UNITS * (V // 4) % 2 * 4)
            out = (load_words(tl.expand_dims(of, -1) + AHEAD // UNITS * 8, ok, V // 4, FORMAT),)
        else:  # bit 8 k + t of a word: of column 4 t + k
            of = tl.expand_dims(start + g // UNITS * 4, -1) + AHEAD // UNITS * 4
            out = (load_words(of, ok, 1, FORMAT),)
    return out


@triton.jit
def begin_of(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """The bit of `further`'s bytes where the first plane's begin; plane p's begin p * behind / 4 later."""
    first = g % (behind(FORMAT) // V) * (V // 4)  # the unit's first word, of a block's
    if loader(FORMAT).more == "pairs":
        shift = tl.expand_dims(first // 2 * 2, -1)
    else:
        shift = tl.expand_dims(first, -1) + tl.arange(0, V // 4)
    return shift.to(tl.uint32)


@triton.jit
def scales_of(at, ok, i, columns, FORMAT: tl.constexpr, AHEAD: tl.constexpr, rows=None):
    """The scales and the minima of blocks i + AHEAD [G] of 32 columns: tuples of [..., G]."""
    if block(FORMAT) == 256:
        d = field(at, ok, i // 8, columns, FORMAT, "super", tl.float16, AHEAD // 8, rows).to(tl.float32)
        n, m = parts_of(at, ok, i, columns, FORMAT, AHEAD, rows)
        scales = ()
        for half in tl.static_range(scale_count(FORMAT)):
            scales = scales + (d * n[half].to(tl.float32),)
        minima = ()
        if loader(FORMAT).minima:
            d = field(at, ok, i // 8, columns, FORMAT, "super_minimum", tl.float16, AHEAD // 8, rows).to(
                tl.float32
            )
            for half in tl.static_range(scale_count(FORMAT)):
                minima = minima + (d * m[half].to(tl.float32),)
    elif FORMAT == "mxfp4":
        e = field(at, ok, i, columns, FORMAT, "exponent", tl.uint8, AHEAD, rows).to(tl.int32)
        power = tl.where(e < 2, (e + 1) << 21, (e - 1) << 23)  # half of 2**(e - 127)
        power = power.to(tl.float32, bitcast=True)
        scales = (power if ok is None else tl.where(ok, power, 0.0),)
        minima = ()
    else:
        scales = (field(at, ok, i, columns, FORMAT, "scale", tl.float16, AHEAD, rows).to(tl.float32),)
        minima = ()
        if loader(FORMAT).minima:
            minima = (-field(at, ok, i, columns, FORMAT, "minimum", tl.float16, AHEAD, rows).to(tl.float32),)
    return scales, minima


@triton.jit
def parts_of(at, ok, i, columns, FORMAT: tl.constexpr, AHEAD: tl.constexpr, rows=None):
    """The integers that scale blocks i + AHEAD [G] of a block of 256 columns, and those of their minima."""
    b = i % 8
    m = ()
    if FORMAT == "q4_k" or FORMAT == "q5_k":
        n = field(at, ok, i, columns, FORMAT, "scales", tl.uint8, AHEAD, rows).to(tl.int32)
        high = field(at, ok, i // 8 * 4 + b % 4, columns, FORMAT, "minima", tl.uint8, AHEAD // 2, rows).to(
            tl.int32
        )
        s = (n & 63,)
        m = (((high >> (b // 4 * 4)) & 15) << 2 | n >> 6,)
    elif FORMAT == "q6_k":
        n = field(at, ok, i, columns, FORMAT, "scales", tl.uint16, AHEAD, rows).to(tl.int32)
        s = ((n << 24) >> 24, (n << 16) >> 24)
    elif FORMAT == "q3_k":
        n = field(at, ok, i, columns, FORMAT, "scales", tl.uint8, AHEAD, rows).to(tl.int32)
        high = field(at, ok, i // 2, columns, FORMAT, "scales_high", tl.uint8, AHEAD // 2, rows).to(tl.int32)
        high = high >> (b % 2 * 4)
        s = ((n & 15 | (high & 3) << 4) - 32, (n >> 4 | (high & 12) << 2) - 32)
    elif FORMAT == "q2_k":
        n = field(at, ok, i, columns, FORMAT, "scales", tl.uint16, AHEAD, rows).to(tl.int32)
        s = (n & 15, (n >> 8) & 15)
        m = ((n >> 4) & 15, n >> 12)
    elif FORMAT == "iq4_xs":
        n = field(at, ok, i // 2, columns, FORMAT, "scales", tl.uint8, AHEAD // 2, rows).to(tl.int32)
        high = field(at, ok, i // 8, columns, FORMAT, "scales_high", tl.uint16, AHEAD // 8, rows).to(tl.int32)
        s = (((n >> (b % 2 * 4)) & 15 | ((high >> (b * 2)) & 3) << 4) - 32,)
    else:
        s = (ok.to(tl.int32),)
    return s, m


@triton.jit
def looked_up(places, FORMAT: tl.constexpr):
    """The numbers of the book, plus its zero, at four places of 4 bits, a byte each.

    A bit of the place chooses between two numbers, for all four bytes at once.
    """
    found = ()
    for place in tl.static_range(16):
        found = found + (entry(FORMAT, place),)
    for bit in tl.static_range(4):
        mask = ((places >> bit) & 0x01010101) * 0xFF
        left = ()
        for i in tl.static_range(8 >> bit):
            left = left + (found[2 * i] ^ (mask & (found[2 * i] ^ found[2 * i + 1])),)
        found = left
    return found[0]


# ---- what a thread holds


@triton.jit
def numbers(w, zero, plane: tl.constexpr, FORMAT: tl.constexpr):
    """The f32 numbers, unscaled, of a plane's columns: four of a word, or one. w: `stored`'s, each [...].

    2**e + n is a float whose last bits are n, wherever they begin: so two operations make a number, one that
    masks the bits where they lie and puts the exponent before them, and a subtraction.
    """
    BITS: tl.constexpr = loader(FORMAT).bits
    if kinds(FORMAT) == 1:
        return (w[0].to(tl.float32),)
    elif whole(FORMAT):
        return four_of(w[plane], zero, BITS, 0, loader(FORMAT).zero)
    else:
        return four_of(w[0], zero, BITS, BITS * plane, loader(FORMAT).zero)


@triton.jit
def four_of(w, zero, BITS: tl.constexpr, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """The numbers that begin at this bit of each byte of w [...]."""
    above = w >> 16
    return (
        masked(w, zero, BITS, FIRST, ZERO),
        masked(w, zero, BITS, FIRST + 8, ZERO),
        masked(above, zero, BITS, FIRST, ZERO),
        masked(above, zero, BITS, FIRST + 8, ZERO),
    )


@triton.jit
def masked(w, zero, BITS: tl.constexpr, FIRST: tl.constexpr, ZERO: tl.constexpr):
    """The number of w that begins at bit FIRST, less ZERO. 2**(23 - FIRST) has its last bit there."""
    bits = (w & ((2**BITS - 1) << FIRST)) | (((150 - FIRST) << 23) + zero)
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
def together(n):
    """One or four [..., N] as one, [..., N * 4], in turns. Nothing moves."""
    if len(n) == 1:
        return n[0]
    else:
        t = tl.join(tl.join(n[0], n[2]), tl.join(n[1], n[3]))  # [..., N, 2 (0 or 2), 2 (0 or 1)]
        return tl.reshape(t, t.shape[:-3] + (t.shape[len(t.shape) - 3] * 4,))


@triton.jit
def units(at, live, g, columns, FORMAT: tl.constexpr, V: tl.constexpr):
    """The weights of units g [G] of rows, as `stored`'s: of each plane [..., G, V]."""
    w, scales, minima = stored(at, live, g, columns, FORMAT, V)
    out = ()
    for plane in tl.static_range(plane_count(FORMAT)):
        n = together(numbers(w, 0, plane, FORMAT))
        if kinds(FORMAT) > 1:
            n *= tl.expand_dims(scales[half_of(plane, FORMAT)], -1)
        if loader(FORMAT).minima:
            n -= tl.expand_dims(minima[half_of(plane, FORMAT)], -1)
        out = out + (n,)
    return out


@triton.jit
def unknown_nought(n):
    """0, of n that is not negative, which the compiler cannot know.

    A constant added to it stays in a register; by itself it would be loaded anew for every number.
    """
    return tl.minimum(n, 0).to(tl.uint32)


# ---- what follows from a format's row


@triton.constexpr_function
def number(format):
    return {"f32": tl.float32, "f16": tl.float16, "bf16": tl.bfloat16}[format]


@triton.constexpr_function
def kinds(format):
    """Tensors of numbers that one of stored numbers becomes."""
    return 4 * loader(format).planes if loader(format).bits else 1


@triton.constexpr_function
def size(format):
    """Bytes of a stored number."""
    return loader(format).size


@triton.constexpr_function
def block(format):
    """Columns of a block as the format counts them."""
    return BEGINS.value[format][0]


@triton.constexpr_function
def begin(format, plane):
    """Bytes of a block that lie before this plane's."""
    return BEGINS.value[format][1][plane]


@triton.constexpr_function
def plane_count(format):
    """Columns of a stored number."""
    return loader(format).planes


@triton.constexpr_function
def behind(format):
    """Columns from one plane to the next: stored numbers of 32 columns."""
    return 32 // loader(format).planes


@triton.constexpr_function
def scale_count(format):
    return loader(format).scales


@triton.constexpr_function
def operands(format):
    """The numbers in which a tile of many tokens is multiplied by rows: see triton_tiles."""
    if loader(format).bits:
        return "int8" if loader(format).scales == 1 else "f16"
    return format if format in ("f32", "f16") else "tf32"


@triton.constexpr_function
def half_of(plane, format):
    """Which of the scales is a plane's."""
    return plane * loader(format).scales // loader(format).planes


@triton.constexpr_function
def whole(format):
    """Whether each plane has words of its own, of numbers that begin at their bytes."""
    return loader(format).more != "" or loader(format).book != ""


@triton.constexpr_function
def every_byte(n):
    return 0x01010101 * n


@triton.constexpr_function
def entry(format, place):
    """A number of the book, in every byte."""
    how = loader(format)
    return every_byte(int(BOOKS.value[how.book][place]) + how.zero)


@triton.jit
def first_column(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """Return the first columns of units g [G]; those of the next plane are `behind`."""
    if plane_count(FORMAT) == 1:
        return g * V
    else:
        return g // (behind(FORMAT) // V) * 32 + g % (behind(FORMAT) // V) * V


@triton.jit
def columns_of(g, FORMAT: tl.constexpr, V: tl.constexpr):
    """The column of each number of units g [G], of the first plane: [G, V]."""
    return first_column(g, FORMAT, V)[:, None] + tl.arange(0, V)[None, :]
