"""Every native op equals the reference, on every instruction set, weight format and awkward shape.

Two kinds of claim. Values: close to `ops.reference`, within a stated error. Bits: not changed by the number
of tokens or threads, by skipping zero neurons, or by where a row lies. So values are checked with 130 tokens
on one thread, and everything else by its bits against that. A format or an op that lacks a native side fails
here.
"""

from __future__ import annotations

import inspect
import itertools
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from thermocline import _native
from thermocline.engine.decoder import rope_tables
from thermocline.engine.kv_cache import in_ram
from thermocline.model import quant
from thermocline.model.modes import CACHE_TYPES, PLAIN, CacheTypes
from thermocline.model.spec import ACTIVATIONS, ROUTER_WEIGHTS, SPARSE_ACTIVATIONS, Latent, ModelSpec
from thermocline.model.tensors import bundle_stride
from thermocline.ops import reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import (
    F32,
    FFN,
    Batch,
    FFNStats,
    Heads,
    KVLayer,
    KVShape,
    LatentMatrices,
    Layer,
    Linear,
    Norm,
    Stacked,
)

ISAS = _native.isa_levels()
FORMATS = list(quant.FORMATS)
# Every format on this machine's own instruction set, and each other set with some of them.
PAIRS = [
    pytest.param(isa, format, marks=[] if isa == _native.isa() or j % len(ISAS) == i else [pytest.mark.slow])
    for i, isa in enumerate(ISAS)
    for j, format in enumerate(FORMATS)
]
# Of the long checks, of whole FFNs: a format of each kind of arithmetic, and each other set with one format.
# What an FFN is made of is checked with every pair above.
KINDS_OF_FORMATS = ("f16", "q4_0", "q4_k", "q6_k", "q2_k")
FFN_PAIRS = [
    pytest.param(isa, format, marks=[] if quick else [pytest.mark.slow])
    for i, isa in enumerate(ISAS)
    for j, format in enumerate(FORMATS)
    for quick in [format in KINDS_OF_FORMATS if isa == _native.isa() else j == 3 * i]
]
QUANTISED = [f.name for f in quant.FORMATS.values() if f.block > 1]

# Up to 4 tokens are multiplied row by row, more in tiles of at most 16; each size is code of its own.
TOKENS = (*range(1, 12), 17, 64, 65, 130)
# A rounding is 6e-8, a sum of a few thousand some 1e-6 at worst: squared, with room for the order of sums.
F32_NMSE = 1e-10
# llama.cpp's bound for int8 activations (tests/test-backend-ops): a step of 2 peak/254 is about 3e-5 of the
# power.
INT8_NMSE = 5e-4


@cache
def cpu(isa: str, threads: int = 1) -> CpuOps:
    return CpuOps(threads, isa)


def columns(format: str) -> tuple[int, ...]:
    """Around every vector and block width; odd numbers of 32-blocks leave AVX-512's four-block step a tail.

    Chunks of 16 blocks: one that is short, one that is whole, and both.
    """
    if quant.FORMATS[format].block == 256:
        return 256, 512, 768, 2816
    if format in QUANTISED:
        return 32, 64, 96, 160, 288, 512, 2880
    return 1, 3, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 129, 160, 300


def whole(format: str, n: int) -> int:
    """The next number of columns, from n on, that is whole blocks."""
    block = quant.FORMATS[format].block
    return -(-n // block) * block


def normal(seed: int, *shape: int) -> F32:
    out: F32 = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return out


def nmse(y: F32, truth: F32) -> float:
    error = float(((y.astype(np.float64) - truth) ** 2).sum())
    power = float((truth.astype(np.float64) ** 2).sum())
    return error / power if power else (0.0 if error == 0 else math.inf)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def in_arena(records: NDArray[np.uint8]) -> tuple[_native.Arena, int]:
    """Bytes at the very end of an arena: where the padding it promises ends, nothing can be read."""
    page = mmap.PAGESIZE
    offset = -(records.size + _native.limits().arena_padding) % page
    arena = _native.Arena(offset + records.size)
    arena.fence()
    arena.write(offset, np.ascontiguousarray(records).reshape(-1))
    return arena, offset


def stored(format: str, w: F32) -> tuple[_native.Matrix, F32]:
    """w [rows, cols] as a native matrix, and as the float32 values it then has."""
    data = quant.encode(format, w)
    arena, offset = in_arena(data)
    rows, cols = w.shape
    matrix = _native.Matrix(arena, offset, quant.FORMATS[format].id, rows, cols, data.shape[1])
    return matrix, quant.decode(format, data, cols)


def stored_bundle(
    format: str, up: F32 | None, down: F32
) -> tuple[_native.Matrix | None, _native.Matrix, F32 | None, F32]:
    """Up and down rows interleaved as a pack has them -> the matrices (up, down), and their values."""
    parts = [quant.encode(format, w) for w in (up, down) if w is not None]
    row, (rows, cols) = parts[0].shape[1], down.shape
    records = np.full((rows, bundle_stride(row * len(parts))), 0xFF, np.uint8)  # padding that would show: NaN
    for i, part in enumerate(parts):
        records[:, i * row : (i + 1) * row] = part
    arena, offset = in_arena(records)

    def matrix(skip: int) -> _native.Matrix:
        return _native.Matrix(arena, offset + skip, quant.FORMATS[format].id, rows, cols, records.shape[1])

    values = [quant.decode(format, part, cols) for part in parts]
    return (None, matrix(0), None, values[0]) if up is None else (matrix(0), matrix(row), *values)


def as_the_kernel_sees(format: str, x: F32) -> F32:
    """Quantised weights meet int8 activations, per block of 32: q = rint(x * 127/max), scale max/127."""
    if format not in QUANTISED:
        return x
    blocks = x.reshape(-1, 32)
    peak = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.where(peak > 0, np.float32(127) / np.where(peak > 0, peak, 1), np.float32(0))
    rounded: F32 = (peak / np.float32(127)) * np.rint(blocks * inverse)
    return rounded.reshape(x.shape)


SPEC = ModelSpec(
    architecture="test",
    dim=32,
    ffn_dim=32,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=32,
    vocab_size=7,
    max_context=1024,
    norm="rms",
    norm_eps=1e-5,
    activation="relu",
)


# ---- one check per op of the reference


def check_embed(isa: str, format: str) -> None:
    for cols in columns(format):
        matrix, w = stored(format, normal(cols, 9, cols) * np.float32(30))
        ids = np.array([8, 0, 3, 3], np.int32)
        assert same_bits(cpu(isa).embed(matrix, ids), reference.embed(w, ids)), cols
        assert cpu(isa).embed(matrix, ids[:0]).shape == (0, cols)


def check_norm(isa: str, format: str) -> None:
    for dim, kind, biased in itertools.product((1, 3, 8, 15, 16, 17, 31, 100, 300), ("rms", "layer"), (0, 1)):
        x, weight = normal(dim, 5, dim) * np.float32(3) + np.float32(0.5), normal(1, dim)
        bias = normal(2, dim) if biased else None
        y = cpu(isa).norm(x, weight, bias, 1e-5, kind)
        assert nmse(y, reference.norm(x, weight, bias, 1e-5, kind)) <= F32_NMSE, (dim, kind, biased)
        alone = [cpu(isa).norm(x[t : t + 1], weight, bias, 1e-5, kind) for t in range(5)]
        assert same_bits(np.concatenate(alone), y)
        assert same_bits(cpu(isa, 3).norm(x, weight, bias, 1e-5, kind), y)
    zeros = np.zeros((1, 17), np.float32)
    assert not cpu(isa).norm(zeros, normal(0, 17), None, 1e-5, "rms").any()


def check_matmul(isa: str, format: str) -> None:
    ops = cpu(isa)
    for cols, rows in itertools.product(columns(format), (1, 2, 3, 4, 5, 17, 67)):
        if cols > 300 and rows in (2, 3, 4, 17):
            continue
        matrix, w = stored(format, normal(rows, rows, cols))
        x, bias = normal(cols, max(TOKENS), cols), normal(3, rows)
        y = ops.matmul(matrix, x, bias)
        truth = reference.matmul(w, as_the_kernel_sees(format, x), bias)
        assert nmse(y, truth) <= F32_NMSE, (rows, cols)
        assert nmse(y, reference.matmul(w, x, bias)) <= (INT8_NMSE if format in QUANTISED else F32_NMSE)
        assert nmse(ops.matmul(matrix, x, None), truth - bias) <= F32_NMSE
        for tokens in TOKENS:
            assert same_bits(ops.matmul(matrix, x[:tokens], bias), y[:tokens]), (rows, cols, tokens)


def check_head(isa: str, format: str) -> None:
    ops, (cols, wide) = cpu(isa), (columns(format)[0], columns(format)[-1])
    (head, w), (project, p) = stored(format, normal(1, 17, cols)), stored(format, normal(2, cols, wide))
    x, h, bias = normal(3, 5, wide), normal(4, 5, cols), normal(5, 17)
    assert same_bits(ops.head(h, Linear(head, bias), None), ops.matmul(head, h, bias))
    y, truth = ops.head(x, Linear(head, bias), project), reference.head(x, Linear(w, bias), p)
    assert nmse(y, truth) <= (3 * INT8_NMSE if format in QUANTISED else F32_NMSE)


def check_matmul_add(isa: str, format: str) -> None:
    ops = cpu(isa)
    for cols, rows in itertools.product(columns(format), (1, 17, 67)):
        matrix, w = stored(format, normal(rows, rows, cols))
        h, bias, x = normal(cols, 130, cols), normal(3, rows), normal(4, 130, rows)
        y, truth = x.copy(), x.copy()
        ops.matmul_add(y, matrix, h, bias)
        reference.matmul_add(truth, w, as_the_kernel_sees(format, h), bias)
        assert nmse(y, truth) <= F32_NMSE, (rows, cols)
        for tokens in (1, 3, 9):
            part = x[:tokens].copy()
            ops.matmul_add(part, matrix, h[:tokens], bias)
            assert same_bits(part, y[:tokens]), (rows, cols, tokens)


@dataclass
class Case:
    """An attention problem: sequences whose pages are shuffled over a cache already full of other tokens."""

    spec: ModelSpec
    qkv: F32
    kv: KVLayer
    batch: Batch
    cos: F32 | None
    sin: F32 | None
    sinks: F32 | None = None  # [heads]

    def run(self, ops: Any) -> tuple[F32, KVLayer]:
        kv = KVLayer(self.kv.shape, self.kv.k.copy(), self.kv.v.copy())
        heads = replace(Heads.of(self.spec), sinks=self.sinks)
        return ops.attention(heads, self.qkv.copy(), self.step(ops), kv), kv

    def step(self, ops: Any) -> Any:
        return ops.step(self.batch, self.kv.shape.block, self.cos, self.sin)

    def rows(self, begin: int, end: int) -> Case:
        b, at = self.batch, slice(begin, end)
        cut = replace(b, ids=b.ids[at], positions=b.positions[at], sequence=b.sequence[at])
        cos, sin = (None, None) if self.cos is None or self.sin is None else (self.cos[at], self.sin[at])
        return replace(self, qkv=np.ascontiguousarray(self.qkv[at]), batch=cut, cos=cos, sin=sin)


def full_pages(rng: np.random.Generator, shape: KVShape) -> KVLayer:
    """Pages full of random numbers: every quant there is, and scales of either sign."""
    kv = in_ram(0, shape)
    for x, type in ((kv.k, shape.types.k), (kv.v, shape.types.v)):
        if type == "f16":
            x[...] = rng.standard_normal(x.shape)
            continue
        x[...] = rng.integers(0, 256, x.shape)
        scales = shape.head_dim // 32 * shape.block
        at = x[..., -2 * scales :].view(np.float16)
        at[...] = rng.standard_normal(at.shape) * 2.0 ** (-6 if type == "q8_0" else -3)
    return kv


def attention_case(
    head_dim: int,
    kv_heads: int,
    group: int,
    spans: list[tuple[int, int]],
    window: int | None,
    block: int = 32,
    types: CacheTypes = PLAIN,
) -> Case:
    """`spans`: for each sequence, the positions [start, stop) that are in the call."""
    rope = head_dim % 2 == 0
    spec = replace(
        SPEC,
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        sliding_window=window,
        position="rope" if rope else "learned",
    )
    rng = np.random.default_rng(head_dim)
    pages = [-(-stop // block) for _, stop in spans]
    shuffled = rng.permutation(sum(pages) + 3).astype(np.int32)
    table = np.full(
        (len(spans), max(pages)), -1, np.int32
    )  # an entry past a sequence's end is never looked at
    for s, n in enumerate(pages):
        table[s, :n] = shuffled[sum(pages[:s]) : sum(pages[:s]) + n]
    positions = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in spans])
    sequence = np.repeat(np.arange(len(spans), dtype=np.int32), [b - a for a, b in spans])
    cos, sin = rope_tables(spec, positions) if rope else (None, None)
    return Case(
        spec,
        normal(7, len(positions), spec.qkv_rows),
        full_pages(rng, KVShape(len(shuffled), kv_heads, head_dim, block, types)),
        Batch(np.zeros_like(positions), positions, sequence, table, np.zeros(0, np.int32)),
        cos,
        sin,
    )


SPANS = [
    (0, 5),
    (70, 73),
    (31, 34),
    (63, 64),
]  # a new prompt, and others in the middle, at and across page edges
ATTENTION = [
    *(attention_case(hd, 2, 2, SPANS, None) for hd in (1, 2, 3, 33, 34, 64, 80, 128)),
    *(attention_case(16, 3, group, SPANS, None) for group in (1, 2, 4)),
    *(attention_case(24, 2, 2, SPANS, window) for window in (1, 2, 31, 32, 33, 1000)),
    *(attention_case(8, 1, 3, SPANS, 9, block) for block in (1, 5, 64)),
    attention_case(32, 2, 4, [(699, 700)], None),
    attention_case(32, 1, 2, [(690, 700), (0, 40)], 500),
    attention_case(
        32, 1, 1, [(1500, 1540)], None
    ),  # spans of 512, few tasks: worked on side by side, then joined
    attention_case(16, 5, 1, [(1500, 1503)], None),  # one thread: spans in a row; more: side by side
    attention_case(32, 1, 2, [(699, 700)], 189),  # of a window, only the first position is in the first span
    attention_case(16, 1, 20, [(1023, 1026)], 600),  # more queries for a head than one turn takes
    *(attention_case(64, 1, group, SPANS, None) for group in (3, 5, 7, 8)),
    *(
        replace(case, sinks=4 * normal(9, case.spec.n_heads))
        for case in (
            attention_case(64, 2, 8, SPANS, None),
            attention_case(24, 2, 3, SPANS, 32),
            attention_case(32, 1, 1, [(1500, 1540)], None),
            attention_case(32, 1, 2, [(690, 700), (0, 40)], 500, types=CacheTypes("q8_0", "q4_0")),
        )
    ),
]
KINDS_OF_CACHE = [CacheTypes(k, v) for k in CACHE_TYPES for v in CACHE_TYPES]
QUANTISED_ATTENTION = [
    *(
        attention_case(hd, 2, 2, SPANS, None, types=CacheTypes(t, t))
        for t in ("q8_0", "q4_0")
        for hd in (32, 64, 96, 128, 160, 256)
    ),
    *(
        attention_case(64, 2, group, SPANS, None, types=t)
        for t, group in zip(KINDS_OF_CACHE, (1, 2, 3, 4, 5, 6, 7, 8, 20), strict=True)
    ),
    *(
        attention_case(32, 1, 3, SPANS, window, block, types=t)
        for t in KINDS_OF_CACHE[1:]
        for window, block in ((None, 4), (9, 12), (33, 32), (None, 64), (1000, 48))
    ),
    *(attention_case(96, 1, 2, [(690, 700), (0, 40)], 500, types=t) for t in KINDS_OF_CACHE[1:]),
    *(attention_case(32, 1, 1, [(1500, 1540)], None, types=CacheTypes(t, t)) for t in ("q8_0", "q4_0")),
    attention_case(
        544, 1, 2, [(20, 50)], None, types=CacheTypes("q4_0", "q8_0")
    ),  # more columns than scales at a time
]


def check_attention(isa: str, format: str) -> None:
    for case in (*ATTENTION, *QUANTISED_ATTENTION):
        at = (case.spec, case.kv.shape)
        truth, truth_kv = case.run(reference)
        y, kv = case.run(cpu(isa))
        assert nmse(y, truth) <= (F32_NMSE if case.kv.shape.types.v == "f16" else INT8_NMSE), at
        # Rotation rounds like numpy, so the cache holds the same bits: nothing else in it was touched either.
        assert same_bits(kv.k, truth_kv.k) and same_bits(kv.v, truth_kv.v), at
        for threads in (2, 3, 5):
            assert same_bits(case.run(cpu(isa, threads))[0], y), (at, threads)
        part, start = replace(case, kv=kv), 0
        for step in itertools.cycle((1, 2)):
            if start >= len(y):
                break
            assert same_bits(part.rows(start, start + step).run(cpu(isa))[0], y[start : start + step]), at
            start += step


def check_attention_add(isa: str, format: str) -> None:
    for kind, biased in itertools.product(("rms", "layer"), (False, True)):
        assert_attention_block(isa, format, kind, biased)
    assert_latents(isa, format)


def assert_attention_block(isa: str, format: str, kind: str, biased: bool) -> None:
    """The block around attention: norm, projections, residual; nothing depends on the batch."""
    case, dim = attention_case(whole(format, 128) // 4, 2, 2, SPANS, None), whole(format, 96)
    spec, tokens = replace(case.spec, dim=dim, norm=kind), len(case.qkv)
    qkv, qkv_values = stored(format, normal(1, spec.qkv_rows, dim) / np.float32(8))
    out, out_values = stored(format, normal(2, dim, spec.n_heads * spec.head_dim))
    bias = (normal(3, spec.qkv_rows), normal(4, dim), normal(5, dim)) if biased else (None, None, None)
    norm = Norm(normal(6, dim), bias[2])
    x, h = normal(7, tokens, dim), normal(8, tokens, dim)
    gate, gate_values = stored(format, normal(10, spec.n_heads * spec.head_dim, dim) / np.float32(8))

    def run(ops: Any, a: Any, b: Any, g: Any, begin: int = 0, end: int = tokens) -> F32:
        opened = g if biased else None
        layer = Layer(norm, Linear(a, bias[0]), Linear(b, bias[1]), norm, experts=(), attn_gate=opened)
        y, part = x[begin:end].copy(), case.rows(begin, end)
        kv = case.kv
        bound = ops.bind_attention(spec, Heads.of(spec), layer)
        ops.attention_add(y, h[begin:end].copy(), bound, part.step(ops), kv)
        return y

    truth = run(reference, qkv_values, out_values, gate_values)
    y = run(cpu(isa), qkv, out, gate)
    # the last bit of a key may round to another f16 in the cache
    assert nmse(y - x, truth - x) <= (3 * INT8_NMSE if format in QUANTISED else 1e-7), kind
    halves = [run(cpu(isa, 3), qkv, out, gate, *at) for at in ((0, 2), (2, tokens))]
    assert same_bits(np.concatenate(halves), y)


def latent_case(latent: Latent, heads: int, dim: int) -> Case:
    """Latents beyond a span of positions, and more heads than a turn takes."""
    case = attention_case(latent.kv_rank + latent.rope, 1, heads, [*SPANS, (599, 603)], None)
    rope = {"position": "rope", "rotary_dim": latent.rope, "attention_scale": 0.3}
    spec = replace(case.spec, dim=dim, latent=latent, **rope)
    cos, sin = rope_tables(spec, case.batch.positions)
    kv = full_pages(np.random.default_rng(1), replace(case.kv.shape, latent=True))
    return replace(case, spec=spec, kv=kv, cos=cos, sin=sin)


def assert_latents(isa: str, format: str) -> None:
    size = cache(lambda n: whole(format, n))
    part = max(7, quant.FORMATS[format].block // 4)  # 20 heads of so many are whole blocks
    assert_latent_block(isa, format, Latent(size(40), size(24), 8, part, size(40)))
    if isa == ISAS[0] or quant.FORMATS[format].block == 1:
        assert_latent_block(isa, format, Latent(size(70), size(9), 6, part))


def assert_latent_block(isa: str, format: str, latent: Latent) -> None:
    """The block around latent attention: all that belongs to a head; nothing depends on the batch."""
    heads, dim = 20, whole(format, 96)
    case = latent_case(latent, heads, dim)
    tokens, rank, lower = len(case.qkv), latent.kv_rank, latent.q_rank or 1
    shapes = latent.matrices(heads, dim) | {"out": (dim, heads * latent.value)}
    made = {}
    for name, (*rows, cols) in shapes.items():
        made[name] = stored(format, normal(len(name), math.prod(rows), cols) / np.float32(math.sqrt(cols)))
    kv_norm, q_norm = (1 + normal(n, n) / np.float32(9) for n in (rank, lower))
    x, h = normal(7, tokens, dim), normal(8, tokens, dim)

    def run(ops: Any, begin: int = 0, end: int = tokens) -> F32:
        w = {n: pair[ops is reference] for n, pair in made.items()}
        lowered = latent.q_rank is not None
        own = LatentMatrices(kv_norm, w["k_b"], w["v_b"], q_norm if lowered else None, w.get("q_b"))
        first = Stacked((w["q_a" if lowered else "q"], w["kv_a"]))
        layer = Layer(None, Linear(first, None), Linear(w["out"], None), None, experts=(), latent=own)
        y, part = x[begin:end].copy(), case.rows(begin, end)
        bound = ops.bind_attention(case.spec, Heads.of(case.spec, 0, layer), layer)
        ops.attention_add(y, h[begin:end].copy(), bound, part.step(ops), case.kv)
        return y

    truth, y = run(reference), run(cpu(isa))
    assert nmse(y - x, truth - x) <= (6 * INT8_NMSE if format in QUANTISED else 1e-6)
    for threads, *cuts in ((3, 0, 2, tokens), (1, 0, 7, tokens)):
        parts = [run(cpu(isa, threads), *at) for at in itertools.pairwise(cuts)]
        assert same_bits(np.concatenate(parts), y)


def changed(f: FFN, **changes: Any) -> FFN:
    return f.with_part(replace(f.part, **changes))


def bound_ffn(ops: Any, spec: ModelSpec, f: FFN) -> Any:
    return ops.bind_ffn(spec, Layer(None, None, None, None, (f,)))


@dataclass(frozen=True)
class Ffn:
    """One FFN as native matrices and as their values."""

    spec: ModelSpec
    format: str
    native: FFN
    numpy: FFN

    def run(
        self, ops: Any, x: F32, h: F32, *, sparsity: str = "exact", record: F32 | None = None
    ) -> tuple[F32, FFNStats]:
        y, stats = x.copy(), FFNStats()
        bound = bound_ffn(ops, self.spec, self.numpy if ops is reference else self.native)
        ops.ffn_add(y, h, bound, sparsity, stats, record)
        return y, stats

    def truth(self, x: F32, h: F32) -> tuple[F32, FFNStats]:
        return self.run(reference, x, as_the_kernel_sees(self.format, h))


KINDS = {"gated": (True, "none"), "ungated": (False, "none"), "dReLU": (True, "relu")}


def ffn(
    format: str,
    ffn_dim: int,
    dim: int,
    kind: str,
    activation: str,
    shift: F32 | float | None = -1.0,
    bundles: bool = True,
) -> Ffn:
    """`shift`: the gate's bias (None: none, nor one after down); activations are N(0, 1) before it."""
    gated, up_activation = KINDS[kind]
    spec = replace(
        SPEC,
        dim=dim,
        ffn_dim=ffn_dim,
        activation=activation,
        activation_threshold=0.3 if activation == "fatrelu" else 0.0,
        gated=gated,
        up_activation=up_activation,
    )
    gate, gate_values = stored(format, normal(1, ffn_dim, dim) / np.float32(math.sqrt(dim)))
    wanted = normal(2, ffn_dim, dim) if gated else None
    if bundles:
        up, down, up_values, down_values = stored_bundle(format, wanted, normal(3, ffn_dim, dim))
    else:
        up, up_values = (None, None) if wanted is None else stored(format, wanted)
        down, down_values = stored(format, normal(3, dim, ffn_dim))
    bias = None if shift is None else np.broadcast_to(np.float32(shift), ffn_dim).copy()
    after = None if shift is None else normal(4, dim)
    return Ffn(
        spec,
        format,
        FFN.whole(Linear(gate, bias), up, down, after, bundles),
        FFN.whole(Linear(gate_values, bias), up_values, down_values, after, bundles),
    )


def ffn_shapes(format: str) -> list[tuple[int, int]]:
    """(neurons, dim): around the 256 neurons of a chunk, the 4 of a group, the 128 columns of a tile."""
    dims = tuple(
        sorted(
            {whole(format, n) for n in ((32, 96, 160, 288) if format in QUANTISED else (1, 17, 33, 129, 300))}
        )
    )
    return list(zip((257, 5, 600, 1, 256, 255), itertools.cycle(dims), strict=False))


FFNS = [*itertools.product(KINDS, SPARSE_ACTIVATIONS)]
IN_BUNDLES = [a for a in ACTIVATIONS if a != "swiglu_oai"]  # whose up may have a bias
FFNS += [("gated", a) for a in IN_BUNDLES if a not in SPARSE_ACTIVATIONS]


def check_ffn_add(isa: str, format: str) -> None:
    """Every kind of FFN, and every shape: not each of both, for that takes seconds."""
    assert_ffns(
        isa, format, [(*pair, shape) for pair, shape in zip(FFNS, itertools.cycle(ffn_shapes(format)))]
    )


def assert_ffns(isa: str, format: str, cases: list[tuple[str, str, tuple[int, int]]]) -> None:
    ops = cpu(isa)
    for kind, activation, (ffn_dim, dim) in cases:
        f, at = ffn(format, ffn_dim, dim, kind, activation), (ffn_dim, dim, kind, activation)
        x, h = normal(5, max(TOKENS), dim), normal(6, max(TOKENS), dim)
        y, _ = f.run(ops, x, h)
        assert nmse(y, f.truth(x, h)[0]) <= F32_NMSE, at
        for tokens in TOKENS:
            part, stats = f.run(ops, x[:tokens], h[:tokens])
            assert same_bits(part, y[:tokens]), (*at, tokens)
            if tokens in (1, 9):  # one pass: the neurons read are the union over the call's tokens
                if f.spec.sparse:
                    assert stats == f.truth(x[:tokens], h[:tokens])[1], (*at, tokens)
                assert same_bits(f.run(ops, x[:tokens], h[:tokens], sparsity="off")[0], part), (*at, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("isa", "format"), [pair.values for pair in FFN_PAIRS if not pair.marks])
def test_every_kind_of_ffn_in_every_shape_equals_the_reference(isa: str, format: str, kind: str) -> None:
    assert_ffns(isa, format, [(*f, shape) for f in FFNS if f[0] == kind for shape in ffn_shapes(format)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("isa", "format"), FFN_PAIRS)
def test_a_dense_ffn_equals_the_reference(isa: str, format: str, kind: str) -> None:
    """Without bundles; its second input is quantised too. Nor do tokens, threads or `exact` change a bit."""
    shapes = ((32, 288), (96, 160), (544, 96), (1056, 32))
    for sizes, activation in zip(shapes, itertools.cycle(("silu", "gelu_tanh", "relu"))):
        ffn_dim, dim = (whole(format, n) for n in sizes)
        f, at = ffn(format, ffn_dim, dim, kind, activation, bundles=False), (ffn_dim, dim, activation)
        x, h = normal(5, max(TOKENS), dim), normal(6, max(TOKENS), dim)
        y, stats = f.run(cpu(isa), x, h)
        truth, counted = f.truth(x, h)
        assert nmse(y - x, truth - x) <= (3 * INT8_NMSE if format in QUANTISED else F32_NMSE), at
        rows = ffn_dim * (2 if f.spec.gated else 1)
        assert (stats.neurons, stats.rows, stats.rows_dense) == (counted.neurons, rows, rows)
        assert abs(stats.active - counted.active) <= counted.neurons // 1000
        ways = [(tokens, 1, "exact") for tokens in TOKENS]
        ways += itertools.product((1, 4, 5, 64), (1, 3), ("exact", "off"))
        for tokens, threads, sparsity in ways:
            part, _ = f.run(cpu(isa, threads), x[:tokens], h[:tokens], sparsity=sparsity)
            assert same_bits(part, y[:tokens]), (*at, tokens, threads)


@pytest.mark.parametrize(("isa", "format"), FFN_PAIRS)
def test_a_clamped_swiglu_equals_the_reference(isa: str, format: str) -> None:
    """gpt-oss's, whose up has a bias too. Values are beyond the limit on all sides."""
    for sizes in ((32, 288), (96, 160), (1056, 32)):
        neurons, dim = (whole(format, n) for n in sizes)
        f = ffn(format, neurons, dim, "gated", "swiglu_oai", bundles=False)
        f = replace(f, spec=replace(f.spec, swiglu_alpha=ALPHA, swiglu_limit=0.9))
        bias = normal(8, neurons)
        f = replace(
            f,
            **{
                k: g.with_part(replace(g.part, up_bias=bias))
                for k, g in (("native", f.native), ("numpy", f.numpy))
            },
        )
        x, h = normal(5, max(TOKENS), dim), normal(6, max(TOKENS), dim)
        y, _ = f.run(cpu(isa), x, h)
        truth, _ = f.truth(x, h)
        assert nmse(y - x, truth - x) <= (3 * INT8_NMSE if format in QUANTISED else F32_NMSE), sizes
        for tokens, threads in itertools.product((1, 4, 5, 64), (1, 3)):
            part, _ = f.run(cpu(isa, threads), x[:tokens], h[:tokens])
            assert same_bits(part, y[:tokens]), (*sizes, tokens, threads)


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_a_clamped_swiglu_is_the_formula(isa: str) -> None:
    g = np.array([[-40, -7.5, -1, 0, 0.5, 6.9, 7.1, 100, np.nan, 1, 1, 1]], np.float32)
    u = np.array([[1, -0.5, -8, 3, 7.1, 100, -100, 0, 1, -1, np.nan, 6.5]], np.float32)
    n = g.shape[1]
    eye = np.eye(n, dtype=np.float32)
    native, still = stored("f32", eye)[0], stored("f32", 0 * eye)[0]
    if isa == "reference":
        native, still = eye, 0 * eye
    spec = replace(SPEC, dim=n, ffn_dim=n, activation="swiglu_oai", swiglu_alpha=ALPHA, swiglu_limit=LIMIT)
    f = FFN.whole(Linear(still, g[0]), still, native, None, False)
    f = f.with_part(replace(f.part, up_bias=u[0]))
    ops, y = reference if isa == "reference" else cpu(isa), np.zeros((1, n), np.float32)
    hidden = np.empty((1, n), np.float32)
    ops.ffn_add(y, np.zeros((1, n), np.float32), bound_ffn(ops, spec, f), "off", FFNStats(), hidden)
    low = np.minimum(g.astype(np.float64), LIMIT)
    truth = (np.clip(u.astype(np.float64), -LIMIT, LIMIT) + 1) * low / (1 + np.exp(-ALPHA * low))
    assert np.allclose(hidden, truth, rtol=1e-5, atol=1e-28, equal_nan=True)


@pytest.mark.parametrize("bundles", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", KINDS_OF_FORMATS)
def test_what_an_ffn_records_is_what_down_is_multiplied_with(format: str, kind: str, bundles: bool) -> None:
    """And it changes no bit of the result, whatever path the tokens take."""
    neurons, dim = whole(format, 544), whole(format, 96)
    f = ffn(format, neurons, dim, kind, "relu", bundles=bundles)
    x, h = normal(5, 300, dim), normal(6, 300, dim)
    for tokens, sparsity in itertools.product((1, 4, 5, 300), ("exact", "off")):
        a, b = x[:tokens], h[:tokens]
        want, got = (np.full((tokens, neurons), np.nan, np.float32) for _ in range(2))
        f.run(reference, a, as_the_kernel_sees(format, b), record=want)
        y, stats = f.run(cpu(ISAS[0], 3), a, b, sparsity=sparsity, record=got)
        plain, plain_stats = f.run(cpu(ISAS[0], 3), a, b, sparsity=sparsity)
        assert same_bits(y, plain) and replace(stats, rows=0) == replace(plain_stats, rows=0)
        # Recording, few tokens take the path of many, which does not spare dReLU the down rows that up kills.
        assert stats.rows >= plain_stats.rows if kind == "dReLU" else stats.rows == plain_stats.rows
        assert stats.active == int((got != 0).sum())
        assert nmse(got, want) <= F32_NMSE


CHECKS: dict[str, Callable[[str, str], None]] = {
    name.removeprefix("check_"): check for name, check in dict(globals()).items() if name.startswith("check_")
}
# Not ops: `attention`, `ffn_add` and `mixer_add` are made of them, and are compared with them whole.
PARTS = {"rotate", "activate", "route", "deltanet", "mamba2", "short_conv", "logits_digest"}
BINDERS = {
    "step",
    "bind_attention",
    "bind_ffn",
    "bind_mixer",
    "bind_per_layer",
    "bind_part",
    "bind_experts",
}  # arguments of the ops, made ready
OF_MIXTURES = {"routed"}  # tests/ops/test_moe.py
HINTS = {
    "begin_ffn",
    "in_order",
    "run",
    "rows",
    "states",
    "bring",
    "chooser",
    "mode",
}  # compute nothing: test_disk.py, test_gpu.py


def public_functions(where: Any) -> set[str]:
    """Of a module or a class, without what it imports."""
    home = getattr(where, "__module__", where.__name__)
    return {
        name
        for name, f in vars(where).items()
        if inspect.isfunction(f) and not name.startswith("_") and f.__module__ == home
    }


# tests/recurrent/test_mixers.py, tests/model/test_embedding.py; twins
ELSEWHERE = {"mixer_add", "hidden", "per_layer_add"}
OPS = sorted(public_functions(reference) - PARTS - BINDERS - OF_MIXTURES - HINTS - ELSEWHERE)


@pytest.mark.parametrize(
    ("op", "isa", "format"),
    [
        pytest.param(op, *pair.values, marks=pair.marks)
        for op in OPS
        for pair in (FFN_PAIRS if op == "ffn_add" else PAIRS)
    ],
)
def test_a_native_op_equals_the_reference(op: str, isa: str, format: str) -> None:
    if op in ("norm", "attention") and format != "f32":
        return  # they read no weights
    CHECKS[op](isa, format)


def test_every_op_of_the_reference_is_native_and_checked() -> None:
    assert set(OPS) == set(CHECKS) == public_functions(CpuOps) - BINDERS - OF_MIXTURES - HINTS - ELSEWHERE


def test_every_format_is_native_and_no_other() -> None:
    arena = _native.Arena(4096)
    for format in quant.FORMATS.values():
        row = quant.row_bytes(format.name, 256)
        assert _native.Matrix(arena, 0, format.id, 2, 256, row).row_bytes == row
    with pytest.raises(ValueError, match="unknown weight format"):
        _native.Matrix(arena, 0, max(_native.SIGNS, *(f.id for f in quant.FORMATS.values())) + 1, 2, 64, 512)


# ---- the active set


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("isa", "format"), FFN_PAIRS)
def test_the_answer_is_right_for_every_active_set(isa: str, format: str, kind: str) -> None:
    n, dim = 300, whole(format, 96)
    x, h = normal(5, 70, dim), normal(6, 70, dim)
    one = np.full(n, -100, np.float32)
    one[200] = 100
    for shift, tokens, rows in (
        (-100, 3, 0),
        (-100, 70, 0),
        (one, 3, 1),
        (one, 70, 1),
        (100, 3, n),
        (100, 70, n),
    ):
        f = ffn(format, n, dim, kind, "relu", np.asarray(shift, np.float32))
        y, stats = f.run(cpu(isa), x[:tokens], h[:tokens])
        truth, counted = f.truth(x[:tokens], h[:tokens])
        assert nmse(y, truth) <= F32_NMSE, (shift, tokens)
        if kind != "dReLU":  # where up decides too
            assert counted.rows == rows * (2 if f.spec.gated else 1)
        assert (stats.rows, stats.neurons) == (counted.rows, tokens * n)
        assert same_bits(f.run(cpu(isa), x[:tokens], h[:tokens], sparsity="off")[0], y)
    quiet = ffn(format, n, dim, kind, "relu", -100.0)
    assert quiet.native.down_bias is not None
    assert same_bits(quiet.run(cpu(isa), x, h)[0], x + quiet.native.down_bias)


@pytest.mark.parametrize("activation", IN_BUNDLES)
@pytest.mark.parametrize(("isa", "format"), FFN_PAIRS)
def test_tokens_skipping_and_threads_change_no_bit(isa: str, format: str, activation: str) -> None:
    n, dim = 645, whole(format, 416)  # chunks of neurons and tiles of columns, the last of each short
    x, h = normal(5, 70, dim), normal(6, 70, dim)
    for kind in KINDS:
        f = ffn(format, n, dim, kind, activation, -1.5)
        y, _ = f.run(cpu(isa), x, h)
        for threads, (begin, end) in zip((2, 3, 5, 1), ((0, 70), (3, 11), (60, 69), (69, 70)), strict=True):
            for sparsity in ("exact", "off"):
                part, _ = f.run(cpu(isa, threads), x[begin:end], h[begin:end], sparsity=sparsity)
                assert same_bits(part, y[begin:end]), (kind, threads, begin, sparsity)


@pytest.mark.parametrize(("isa", "format"), PAIRS)
def test_threads_change_no_bit_of_a_matmul(isa: str, format: str) -> None:
    cols = whole(format, 96)
    matrix, _ = stored(format, normal(1, 517, cols))
    x, bias = normal(2, 9, cols), normal(3, 517)
    y = cpu(isa).matmul(matrix, x, bias)
    for threads, tokens in itertools.product((2, 3, 5), (1, 9)):
        assert same_bits(cpu(isa, threads).matmul(matrix, x[:tokens], bias), y[:tokens]), (threads, tokens)


# ---- interleaved rows


def interleaved(isa: str, format: str, w: F32) -> tuple[_native.Matrix, _native.Matrix]:
    """The same rows in two arenas: one behind the other, and interleaved."""
    planar, data = stored(format, w)[0], quant.encode(format, w)
    arena, offset = in_arena(data)
    matrix = _native.Matrix(arena, offset, quant.FORMATS[format].id, *w.shape, data.shape[1])
    return planar, cpu(isa).native.interleaved(arena, matrix)


@pytest.mark.parametrize("isa, format", [p for p in PAIRS if p.values[1] in QUANTISED])
def test_interleaved_rows_give_the_bits_of_rows_in_turn(isa: str, format: str) -> None:
    for cols, rows in itertools.product(columns(format), (32, 96)):
        planar, matrix = interleaved(isa, format, normal(rows, rows, cols))
        assert matrix.interleaved and not planar.interleaved
        assert cpu(isa).native.interleaves(planar) == (isa not in ("scalar", "neon"))
        assert not cpu(isa).native.interleaves(matrix)
        ids = np.array([rows - 1, 0, 17, 17], np.int32)
        assert same_bits(cpu(isa).embed(matrix, ids), cpu(isa).embed(planar, ids)), cols
        x, bias, before = normal(cols, 12, cols), normal(3, rows), normal(4, 12, rows)
        y, added = cpu(isa).matmul(planar, x, bias), before.copy()
        cpu(isa).matmul_add(added, planar, x, bias)
        for tokens, threads in itertools.product((1, 2, 3, 4, 5, 12), (1, 3)):
            of = cols, rows, tokens, threads
            assert same_bits(cpu(isa, threads).matmul(matrix, x[:tokens], bias), y[:tokens]), of
            out = before[:tokens].copy()
            cpu(isa, threads).matmul_add(out, matrix, x[:tokens], bias)
            assert same_bits(out, added[:tokens]), of


@pytest.fixture
def restored_ahead() -> Iterator[None]:
    before, near = _native.group_ahead(), _native.rows_near()
    yield
    _native.group_ahead(before)
    _native.rows_near(near)


@pytest.mark.usefixtures("restored_ahead")
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in ("scalar", "neon")])
def test_what_is_asked_for_ahead_changes_no_bit(isa: str) -> None:
    """Also beyond the end of memory, where the last group lies."""
    for format in ("q4_0", "q6_k"):
        planar, matrix = interleaved(isa, format, normal(1, 96, 512))
        x = normal(2, 3, 512)
        y = cpu(isa).matmul(planar, x, None)
        for bytes in (0, 64, 8192, 1 << 30):
            _native.group_ahead(bytes)
            assert _native.group_ahead() == bytes
            assert same_bits(cpu(isa).matmul(matrix, x, None), y), bytes
        for near in (False, True):
            _native.rows_near(near)
            assert _native.rows_near() == near
            assert same_bits(cpu(isa).matmul(planar, x, None), y), near


def test_what_cannot_be_interleaved_is_refused() -> None:
    native, row = cpu(ISAS[0]).native, quant.row_bytes("q4_k", 256)
    arena, other = _native.Arena(256 * row), _native.Arena(64)
    q4_k, f32 = quant.FORMATS["q4_k"].id, quant.FORMATS["f32"].id
    for matrix in (
        _native.Matrix(arena, 0, f32, 32, 8, 32),  # no blocks
        _native.Matrix(arena, 0, q4_k, 33, 256, row),  # no whole groups
        _native.Matrix(arena, 0, q4_k, 32, 256, 2 * row),  # gaps
        native.interleaved(arena, _native.Matrix(arena, 0, q4_k, 32, 256, row)),
    ):
        assert not native.interleaves(matrix)
        with pytest.raises(ValueError, match="cannot be interleaved"):
            native.interleaved(arena, matrix)
    with pytest.raises(ValueError, match="another arena"):
        native.interleaved(other, _native.Matrix(arena, 0, q4_k, 32, 256, row))


@pytest.mark.skipif("avx512" not in ISAS, reason="all instruction sets of this CPU have groups of 16 rows")
def test_rows_interleaved_for_another_instruction_set_are_refused() -> None:
    _, matrix = interleaved("avx512", "q4_k", normal(1, 32, 256))
    x, out, bound = normal(2, 1, 256), np.empty((1, 32), np.float32), cpu("avx2")
    calls: list[Callable[[], object]] = [
        lambda: bound.matmul(matrix, x, None),
        lambda: bound.embed(matrix, np.zeros(1, np.int32)),
        lambda: bound.matmul_add(out, matrix, x, None),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="another instruction set"):
            call()


def test_interleaved_neurons_in_bundles_and_rows_below_half_a_group_are_refused() -> None:
    isa = ISAS[0]
    planar, matrix = interleaved(isa, "q4_k", normal(1, 256, 256))
    gate, plain = _native.Linear(matrix, None), _native.Linear(planar, None)
    join = _native.Join(None, 1.0)
    for gates, up, down in ((gate, planar, planar), (plain, matrix, planar), (plain, planar, matrix)):
        with pytest.raises(ValueError, match="rows of neurons are interleaved"):
            _native.FFN(None, gates, up, down, None, ACTIVATIONS.index("relu"), 0.0, False, True, None, join)
    short = stored("q4_k", normal(2, 8, 256))[0]
    with pytest.raises(ValueError, match="no whole groups"):
        _native.Stack((short, matrix), None)


@pytest.mark.parametrize("isa", ISAS)
def test_dense_activations_skip_nothing(isa: str) -> None:
    f = ffn("f32", 40, 33, "gated", "silu", -100.0)
    assert f.run(cpu(isa), normal(1, 2, 33), normal(2, 2, 33), sparsity="exact")[1].rows == 80


def test_an_ffn_without_biases_equals_the_reference() -> None:
    for isa, kind in itertools.product(ISAS, KINDS):
        f = ffn("f32", 129, 33, kind, "relu", None)
        for tokens in (1, 20):
            x, h = normal(1, tokens, 33), normal(2, tokens, 33)
            assert nmse(f.run(cpu(isa), x, h)[0], f.truth(x, h)[0]) <= F32_NMSE


@pytest.mark.parametrize("isa", ISAS)
def test_gate_and_down_may_differ_in_format(isa: str) -> None:
    """The up row's format must be the gate's (they share the input); down's is its own only when ungated."""
    for (i, gate), step in itertools.product(enumerate(FORMATS), (1, 5)):
        down = FORMATS[(i + step) % len(FORMATS)]
        dim = max(whole(gate, 96), whole(down, 96))
        a, b = ffn(gate, 130, dim, "ungated", "relu"), ffn(down, 130, dim, "ungated", "relu")
        native = changed(a.native, down=b.native.part.down)
        mixed = Ffn(a.spec, gate, native, changed(a.numpy, down=b.numpy.part.down))
        for tokens in (1, 20):
            x, h = normal(1, tokens, dim), normal(2, tokens, dim)
            assert nmse(mixed.run(cpu(isa), x, h)[0], mixed.truth(x, h)[0]) <= F32_NMSE, (gate, down)


# ---- values


@pytest.mark.parametrize("isa", ISAS)
def test_every_half_precision_weight_decodes_exactly(isa: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for format in ("f16", "bf16"):
        arena, offset = in_arena(patterns.view(np.uint8))
        matrix = _native.Matrix(arena, offset, quant.FORMATS[format].id, 1, 1 << 16, 1 << 17)
        y = cpu(isa).embed(matrix, np.zeros(1, np.int32))[0]
        truth = quant.decode(format, patterns.view(np.uint8)[None], 1 << 16)[0]
        number = ~np.isnan(truth)
        assert same_bits(y[number], truth[number]) and np.isnan(y[~number]).all()


# What a test sets the scales of random blocks to; every byte of other planes means something.
def sound_scales(format: str, rows: NDArray[np.uint8], scale: F32, minimum: F32) -> None:
    """Give each block these f16s [rows, 1], and mxfp4 the power of two below |scale|."""
    of = quant.planes(format, rows)
    for name, value in (("scale", scale), ("super", scale), ("minimum", minimum), ("super_minimum", minimum)):
        if name in of:
            of[name].view(np.float16)[:] = value[:, :, None]
    if "exponent" in of:
        of["exponent"][:] = (127 + np.floor(np.log2(np.abs(scale))))[:, :, None]


def stored_bytes(format: str, data: NDArray[np.uint8], cols: int) -> tuple[_native.Matrix, F32]:
    arena, offset = in_arena(data)
    matrix = _native.Matrix(arena, offset, quant.FORMATS[format].id, len(data), cols, data.shape[1])
    return matrix, quant.decode(format, data, cols)


@pytest.mark.parametrize(("isa", "format"), [p for p in PAIRS if p.values[1] in QUANTISED])
def test_any_bytes_are_multiplied_as_numpy_decodes_them(isa: str, format: str) -> None:
    """All bits of numbers and of scales, encoders write them or not: by row, by panel, one by one."""
    rng, ops = np.random.default_rng(0), cpu(isa)
    for cols in columns(format)[:5]:
        data = rng.integers(0, 256, (133, quant.row_bytes(format, cols)), np.uint8)
        sign = np.where(rng.integers(0, 2, (2, 133, 1)), np.float32(1), np.float32(-1))
        scale, minimum = sign * rng.uniform(0.01, 2, (2, 133, 1)).astype(np.float16).astype(np.float32)
        sound_scales(format, data, scale, minimum)
        matrix, w = stored_bytes(format, data, cols)
        assert same_bits(ops.embed(matrix, np.arange(133, dtype=np.int32)), w), cols
        x = normal(1, 17, cols)
        y, seen = ops.matmul(matrix, x, None), as_the_kernel_sees(format, x).astype(np.float64)
        # Minima and scales * numbers may cancel, in a weight too: measured by the larger of both.
        size = np.abs(seen) @ (np.abs(w) + 2 * np.abs(w).max(axis=1, keepdims=True)).T
        assert (np.abs(y - seen @ w.astype(np.float64).T) <= 2e-6 * size).all(), cols
        for t in range(17):
            assert same_bits(ops.matmul(matrix, x[t : t + 1], None), y[t : t + 1]), (cols, t)


@pytest.mark.parametrize(("isa", "format"), [p for p in PAIRS if p.values[1] in QUANTISED])
def test_the_extremes_multiply_exactly(isa: str, format: str) -> None:
    """Every byte of numbers, the ends of the scales, +-127 as x: no sum saturates, none is rounded.

    -128 too, which q8_0's encoder never writes: AVX2 multiplies by |w|. x is in one block, so that no sum
    needs more than a float's 24 bits.
    """
    f, cols = quant.FORMATS[format], 2 * max(256, quant.FORMATS[format].block)
    small = [p.name for p in f.planes if p.name in ("scales", "scales_high", "minima")]
    for scales in (0x00, 0x7F, 0x80, 0xFF) if small else (0,):
        data = np.repeat(np.arange(256, dtype=np.uint8)[:, None], quant.row_bytes(format, cols), axis=1)
        half = np.full((256, 1), 0.5, np.float32)
        sound_scales(format, data, half, half / 2)
        of = quant.planes(format, data)
        for name in small:
            of[name][:] = scales
        matrix, w = stored_bytes(format, data, cols)
        for at, sign in itertools.product((0, 7, 8, 15), (1, -1)):
            x = np.zeros((5, cols), np.float32)
            x[:, 32 * at : 32 * at + 32] = sign * 127
            x[:, 32 * at + 5 : 32 * at + 20 : 2] *= -1
            for tokens in (1, 5):
                truth = x[:tokens].astype(np.float64) @ w.T
                assert np.array_equal(cpu(isa).matmul(matrix, x[:tokens], None), truth), (scales, at, tokens)
        assert same_bits(cpu(isa).embed(matrix, np.arange(256, dtype=np.int32)), w)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_no_kernel_reads_past_the_padding(isa: str, format: str) -> None:
    """A row alone at the end of an arena, with few blocks: a read past the padding kills this process."""
    block = quant.FORMATS[format].block
    for blocks in (*range(1, 4), *(range(4, 18) if block < 256 else ()), 33):
        cols = blocks * block
        x, one = normal(0, 5, cols), np.zeros(1, np.int32)
        matrix, w = stored(format, normal(1, 1, cols))
        for tokens in (1, 2, 3, 4, 5):
            assert np.isfinite(cpu(isa).matmul(matrix, x[:tokens], None)).all()
            assert cpu(isa).embed(matrix, one).tolist() == w.tolist()
            f = ffn(format, 1, cols, "gated", "relu", 100.0)
            assert np.isfinite(f.run(cpu(isa), x[:tokens], x[:tokens])[0]).all(), (blocks, tokens)


@pytest.mark.parametrize(("isa", "format"), [p for p in PAIRS if p.values[1] in QUANTISED])
def test_a_scale_that_is_no_number_is_not_swallowed(isa: str, format: str) -> None:
    """In a damaged file one f16 in 32 is infinite or NaN; the row's result has to say so."""
    f, cols = quant.FORMATS[format], whole(format, 96)
    for name in [p.name for p in f.planes if p.nbytes == 2 and not p.name.startswith("scales")]:
        data = quant.encode(format, normal(1, 3, cols) + np.float32(0.5))
        of = quant.planes(format, data)[name].view(np.uint16)
        for bad in (0x7C00, 0xFC00, 0x7E00):
            of[1, -1] = bad
            matrix, w = stored_bytes(format, data, cols)
            y = cpu(isa).embed(matrix, np.arange(3, dtype=np.int32))
            with np.errstate(invalid="ignore"):
                assert np.array_equal(y, w, equal_nan=True) and not np.isfinite(w[1]).all()
            for tokens in (1, 5):
                shown = np.isfinite(cpu(isa).matmul(matrix, normal(2, tokens, cols), None))
                assert shown.all(axis=0).tolist() == [True, False, True] and not shown[:, 1].any()


@pytest.mark.parametrize("isa", ISAS)
def test_the_cache_rounds_to_f16_as_numpy_does(isa: str) -> None:
    """Every f16, every midpoint between two, and the floats beside: ties to even, overflow, subnormals."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
    edge = np.array([65519.996, 65520, 1e9, np.inf, 1e-45, 2.9802322e-08], np.float32)
    v = np.concatenate([halves, middles, *beside, edge])
    v = np.concatenate([v, -v])
    spec = replace(SPEC, head_dim=len(v))
    qkv = np.concatenate([np.zeros(2 * len(v), np.float32), v])[None]
    kv = in_ram(0, KVShape(1, 1, len(v), 1))
    zero = np.zeros(1, np.int32)
    step = cpu(isa).step(Batch(zero, zero, zero, zero[None], zero), 1, None, None)
    cpu(isa).attention(Heads.of(spec), qkv, step, kv)
    with np.errstate(over="ignore"):
        assert same_bits(kv.v.reshape(-1), v.astype(np.float16))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
def test_the_cache_rounds_to_blocks_as_the_reference_does(type: str, isa: str) -> None:
    """From zeros and sizes that a scale cannot say to those that f16 cannot; what is no number says so."""
    case = attention_case(64, 1, 1, [(0, 32)], None, types=CacheTypes(type, type))
    case.qkv[:] *= (np.float32(10) ** np.arange(-16, 16, dtype=np.float32))[:, None]
    case.qkv[3], case.qkv[5, 64:], case.qkv[7, 70], case.qkv[9, 130] = 0, 1e-8, np.nan, np.inf
    with np.errstate(all="ignore"):
        truth = case.run(reference)[1]
    kv = case.run(cpu(isa))[1]
    for x, y in ((kv.k, truth.k), (kv.v, truth.v)):
        bytes = 64 * 32 * (8 if type == "q8_0" else 4) // 8
        assert same_bits(x[:, :bytes], y[:, :bytes])
        scales, wanted = (a[:, bytes:].view(np.float16) for a in (x, y))
        number = ~np.isnan(wanted)
        assert same_bits(scales[number], wanted[number]) and np.isnan(scales[~number]).all()
        assert not number.all() and np.isinf(wanted).any() and (wanted == 0).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 37])
def test_what_lies_in_a_page_after_a_text_and_before_a_window_is_not_read(
    window: int | None, isa: str
) -> None:
    """A page was another text's before: what is no number there is none here, whatever its weight of 0."""
    for t in CACHE_TYPES:
        case = attention_case(32, 1, 2, [(0, 70)], window, types=CacheTypes(t, t))
        y, kv = case.run(cpu(isa))
        pages = case.kv.shape.places(case.batch.block_table[0])[0]
        spoil(kv, pages[2], slice(6, None))
        if window is not None:
            spoil(kv, pages[0], slice(None))
            spoil(kv, pages[1], slice(0, 1))  # position 32; position 69 attends from 33 on
        assert same_bits(replace(case.rows(69, 70), kv=kv).run(cpu(isa))[0], y[69:]), t


def spoil(kv: KVLayer, page: int, slots: slice) -> None:
    """Make NaN of one head's keys and values of 32 elements at some positions of a page."""
    for x, type, f16_slots in (
        (kv.k, kv.shape.types.k, (slice(None), slots)),
        (kv.v, kv.shape.types.v, slots),
    ):
        if type == "f16":
            x[page][f16_slots] = np.nan
        else:
            x[page, -2 * kv.shape.block :].view(np.float16)[slots] = np.nan


def activated(isa: str, activation: str, values: F32, threshold: float = 0.0) -> F32:
    """The activation alone: an ungated FFN whose two matrices are the identity."""
    n = values.shape[1]
    eye, _ = stored("f32", np.eye(n, dtype=np.float32))
    spec = replace(SPEC, dim=n, ffn_dim=n, activation=activation, activation_threshold=threshold, gated=False)
    clamped = activation == "swiglu_oai"
    if clamped:
        spec = replace(spec, swiglu_alpha=ALPHA, swiglu_limit=LIMIT)
    y = np.zeros_like(values)
    bound = bound_ffn(cpu(isa), spec, FFN.whole(Linear(eye, None), None, eye, None, not clamped))
    cpu(isa).ffn_add(y, values, bound, "off", FFNStats())
    return y


ALPHA, LIMIT = 1.702, 7.0  # swiglu_oai's, in gpt-oss


def exactly(activation: str, g: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    """In float64, overflow-proof: silu is g/(1+e^-g)."""
    match activation:
        case "silu":
            return g * np.exp(-np.logaddexp(0, -g))
        case "gelu":
            return np.asarray(g * np.vectorize(math.erfc)(-g / math.sqrt(2)) / 2, np.float64)
        case "gelu_tanh":
            return g * np.exp(-np.logaddexp(0, -2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        case "relu" | "fatrelu":
            return np.where(g > threshold, g, 0)
        case "relu2":
            return np.where(g > 0, g * g, 0)
        case "swiglu_oai":
            g = np.minimum(g, LIMIT)
            return g * np.exp(-np.logaddexp(0, -float(np.float32(ALPHA)) * g))
    raise ValueError(activation)


# Largest |error| allowed: relative * |truth| + absolute. SiLU and GELU-tanh are one e^x (2e-7), a sum, a
# division; where e^x would overflow they stop at 1e-34 instead of 0. GELU-tanh's cube and GELU's 1 + erf
# cancel for g < 0.
# swiglu_oai rounds alpha * g, of up to 88, before e^x.
ERROR = {
    "swiglu_oai": (1.2e-5, 1e-34),
    "silu": (6e-7, 1e-34),
    "gelu_tanh": (3e-6, 1e-10),
    "gelu": (3e-7, 4e-7),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("isa", ISAS)
def test_activations_are_accurate_over_the_whole_range(isa: str, activation: str) -> None:
    magnitudes = np.concatenate([np.geomspace(1e-44, 1e4, 200), np.linspace(0, 110, 300), [0.3, 0.300001]])
    g = np.concatenate([magnitudes, -magnitudes, [0.0, -0.0]]).astype(np.float32)
    threshold = float(np.float32(0.3)) if activation == "fatrelu" else 0.0
    truth = exactly(activation, g.astype(np.float64), threshold)
    relative, absolute = ERROR.get(activation, (6e-8, 1e-45))
    for width in (1, 7, 16, 33):  # every place in a vector, and its tail
        padded = np.resize(g, (-(-len(g) // width), width))
        y = activated(isa, activation, padded, threshold).reshape(-1)[: len(g)]
        error = np.abs(y - truth) - relative * np.abs(truth)
        assert error.max() <= absolute, g[error.argmax()]


@pytest.mark.parametrize("isa", ISAS)
def test_a_gate_at_the_threshold_is_inactive(isa: str) -> None:
    above = np.nextafter(np.float32(0.25), np.float32(1))
    g = np.array([[0.25, above, -1, 0, -0.0, 0.2499]], np.float32)
    assert activated(isa, "fatrelu", g, 0.25).tolist() == [[0, float(above), 0, 0, 0, 0]]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_zero_and_tiny_activations_stay_harmless(isa: str, format: str) -> None:
    cols = whole(format, 64)
    matrix, _ = stored(format, normal(1, 5, cols))
    for scale in (0.0, 1e-42, 1e-38, 1e-36):  # below 3.7e-37 the quantiser's 127/max is infinite
        x = normal(2, 3, cols) * np.float32(scale)
        y = cpu(isa).matmul(matrix, x, None)
        assert np.abs(y).max() <= 1e3 * scale, scale


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_nan_activations_are_not_swallowed(isa: str, format: str) -> None:
    """A damaged model ends in NumericalError, not in token 0: what is broken must reach the logits."""
    cols = whole(format, 64)
    matrix, _ = stored(format, normal(1, 5, cols))
    for tokens, at, bad in itertools.product((1, 5), (0, 17, 63, cols - 1, slice(None)), (np.nan, np.inf)):
        x = normal(2, tokens, cols)
        x[:, at] = bad
        with np.errstate(invalid="ignore"):
            assert not np.isfinite(cpu(isa).matmul(matrix, x, None)).any(), (tokens, at, bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", SPARSE_ACTIVATIONS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_weight_of_a_neuron_is_not_taken_for_an_inactive_one(
    isa: str, activation: str, kind: str
) -> None:
    """A ReLU that says 0 to NaN would hide it: the damaged neuron would just never be active."""
    for bundles, part, tokens in itertools.product((True, False), ("gate", "up"), (1, 9)):
        if part == "up" and kind == "ungated":
            continue
        f = ffn("f32", 64, 96, kind, activation, 0.0, bundles)
        bias = np.zeros(64, np.float32)
        x, h = normal(1, tokens, 96), normal(2, tokens, 96)
        if part == "gate":
            bias[33] = np.nan
            f = replace(f, native=changed(f.native, gate=Linear(f.native.part.gate.weight, bias)))
        else:
            bad = normal(2, 64, 96)
            bad[:, 5] = np.nan
            up, _ = stored("f32", bad)
            f = replace(f, native=changed(f.native, up=up))
        for sparsity in ("exact", "off"):
            shown = np.isnan(f.run(cpu(isa), x, h, sparsity=sparsity)[0]).all(axis=1)
            # where dReLU's up is not positive, its gate does not matter
            some = kind == "dReLU" and part == "gate"
            assert shown.any() if some else shown.all(), (bundles, part, tokens)


@pytest.mark.parametrize("isa", ISAS)
def test_a_window_wider_than_any_position_is_none(isa: str) -> None:
    """2^32 was cut to 0 positions, 2^31 to a negative number of them."""
    case = attention_case(24, 2, 2, SPANS, None)
    for window in (2**31 - 1, 2**31, 2**32, 2**63):
        wide = replace(case, spec=replace(case.spec, sliding_window=window))
        assert same_bits(wide.run(cpu(isa))[0], case.run(cpu(isa))[0]), window


@pytest.mark.parametrize("isa", ISAS)
def test_attention_to_an_overflowed_key_is_nan(isa: str) -> None:
    """A key beyond f16 has an infinite score; the softmax of that is no number, as in the reference."""
    case = attention_case(32, 1, 1, [(0, 3)], None)
    case.qkv[1, 32:64] = 1e9
    with np.errstate(all="ignore"):
        truth, _ = case.run(reference)
    assert np.array_equal(np.isnan(case.run(cpu(isa))[0]), np.isnan(truth))


@pytest.mark.parametrize("isa", ["reference", *ISAS])
def test_a_sink_takes_its_share_of_the_softmax(isa: str) -> None:
    """One more score of each head, without a value. Of -inf: none; a large one leaves nothing."""
    case = attention_case(64, 2, 2, [(0, 40)], 9)
    ops = reference if isa == "reference" else cpu(isa)
    plain = case.run(ops)[0]
    q, k, v = (x.astype(np.float64).reshape(40, -1, 64) for x in np.split(case.qkv, (256, 384), axis=1))
    assert case.cos is not None and case.sin is not None
    q, k = (reference.rotate(x, case.cos, case.sin) for x in (q, k))
    k, v = (x.astype(np.float16).astype(np.float64) for x in (k, v))
    at = np.arange(40)
    seen = (at <= at[:, None]) & (at > at[:, None] - 9)
    for sinks in (np.array([-3, 0.5, 2, 6], np.float32), np.array([0, -1e4, 90, 1], np.float32)):
        truth = np.empty((40, 4, 64))
        for head, sink in enumerate(sinks):
            scores = np.where(seen, q[:, head] @ k[:, head // 2].T / 8, -np.inf)
            weights = np.exp(scores)
            truth[:, head] = weights @ v[:, head // 2] / (weights.sum(axis=1) + np.exp(float(sink)))[:, None]
        y = replace(case, sinks=sinks).run(ops)[0].reshape(40, 4, 64)
        for head, sink in enumerate(sinks):
            error = ((y[:, head] - truth[:, head]) ** 2).sum() / (truth[:, head] ** 2).sum()
            assert error <= F32_NMSE or (sink == 90 and np.abs(y[:, head]).max() < 1e-30), (head, sink)
    assert nmse(plain.reshape(40, 4, 64)[:, 1], y[:, 1]) <= 1e-12  # of -1e4
    assert nmse(plain, y.reshape(40, -1)) > 0.01


# ---- random shapes


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, str, int, int, int, int]:
    isa, format = draw(st.sampled_from(ISAS)), draw(st.sampled_from(FORMATS))
    unit = quant.FORMATS[format].block
    cols = unit * draw(st.integers(1, max(400, 3 * unit) // unit))
    return isa, format, draw(st.integers(1, 300)), cols, draw(st.integers(1, 70)), draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_any_shape_multiplies_right(shape: tuple[str, str, int, int, int, int]) -> None:
    isa, format, rows, cols, tokens, threads = shape
    matrix, w = stored(format, normal(rows, rows, cols))
    x = normal(cols, tokens, cols)
    y = cpu(isa, threads).matmul(matrix, x, None)
    seen = as_the_kernel_sees(format, x).astype(np.float64)
    # Against the sum of magnitudes: a random sum may cancel, and then no bound on its own size holds.
    assert (np.abs(y - seen @ w.T) <= 2e-6 * (np.abs(seen) @ np.abs(w.T))).all()


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from(sorted(KINDS)), st.sampled_from(SPARSE_ACTIVATIONS), st.floats(-3, 3))
def test_any_ffn_is_exact_and_splits_into_its_tokens(
    shape: tuple[str, str, int, int, int, int], kind: str, activation: str, shift: float
) -> None:
    isa, format, neurons, dim, tokens, threads = shape
    f = ffn(format, neurons, dim, kind, activation, shift)
    x, h = normal(5, tokens, dim), normal(6, tokens, dim)
    y, stats = f.run(cpu(isa, threads), x, h)
    dense, all_rows = f.run(cpu(isa), x, h, sparsity="off")
    assert same_bits(y, dense) and stats.active == all_rows.active and stats.rows <= all_rows.rows
    cut = tokens // 2
    parts = [f.run(cpu(isa, threads), x[at], h[at])[0] for at in (slice(0, cut), slice(cut, tokens))]
    assert same_bits(np.concatenate(parts), y)


# ---- what the bindings refuse


class Good:
    """Arguments that are accepted; each bad call changes one."""

    def __init__(self) -> None:
        self.arena = _native.Arena(65536)
        self.c = _native.Context(1)
        self.w = self.matrix()  # [8, 32]
        self.x, self.y = np.zeros((2, 32), np.float32), np.zeros((2, 8), np.float32)
        self.v8, self.v32 = np.zeros(8, np.float32), np.zeros(32, np.float32)
        self.ids = np.zeros(2, np.int32)
        self.table = np.zeros((1, 2), np.int32)

    def matrix(
        self, offset: int = 0, format: int = 0, rows: int = 8, cols: int = 32, stride: int = 128
    ) -> _native.Matrix:
        return _native.Matrix(self.arena, offset, format, rows, cols, stride)

    def load(self, begin: int, end: int, block: int = 512, checksums: int = 1) -> None:
        crcs = np.zeros(checksums, np.uint32)
        _native.begin_blocks(self.arena, "/dev/zero", [(begin, end, begin)], crcs, block)

    def embed(self, ids: Any = None, out: Any = None) -> None:
        self.c.embed(self.w, self.ids if ids is None else ids, self.x if out is None else out)

    def norm(self, **changes: Any) -> None:
        good = {
            "x": self.x,
            "weight": self.v32,
            "bias": None,
            "eps": 1e-5,
            "layer": False,
            "out": self.x.copy(),
        }
        self.c.norm(*(good | changes).values())

    def matmul(self, **changes: Any) -> None:
        good: dict[str, Any] = {"w": self.w, "x": self.x, "bias": self.v8, "out": self.y, "add": False}
        self.c.matmul(*(good | changes).values())

    def step(self, **changes: Any) -> _native.Step:
        good: dict[str, Any] = {
            "positions": np.array([6, 7], np.int32),
            "sequence": self.ids,
            "table": self.table,
            "block": 4,
            "window": 0,
            "cos": np.zeros((2, 3), np.float32),
            "sin": np.zeros((2, 3), np.float32),
        }
        return _native.Step(*(good | changes).values())

    def heads(self, **changes: Any) -> _native.Heads:
        good: dict[str, Any] = {"n": 4, "n_kv": 2, "dim": 6, "window": 0, "scale": 0.5, "softcap": 0.0}
        good |= {"q_norm": None, "k_norm": None, "eps": 1e-5, "sinks": None}
        return _native.Heads(*(good | changes).values())

    def attention(self, **changes: Any) -> None:
        good: dict[str, Any] = {
            "qkv": np.zeros((2, 48), np.float32),  # 4 heads, 2 kv heads, head_dim 6
            "heads": self.heads(),
            "step": self.step(),
            "kv": self.kv(),
            "out": np.zeros((2, 24), np.float32),
        }
        self.c.attention(*(good | changes).values())

    def kv(self, **changes: Any) -> _native.KVPages:
        """Three pages of each of 2 kv heads, 4 positions each, head_dim 6."""
        good: dict[str, Any] = {"k": f16s(6, 6, 4), "v": f16s(6, 4, 6), "k_type": 0, "v_type": 0}
        return _native.KVPages(*(good | {"heads": 2, "dim": 6, "block": 4} | changes).values())

    def layer(self, **changes: Any) -> _native.Attention:
        good: dict[str, Any] = {
            "norm": _native.Norm(self.v32, None, 1e-5, False),
            "qkv": _native.Stack((self.matrix(rows=48),), zeros(48)),
            "out": _native.Linear(self.matrix(rows=32, cols=24), self.v32),
            "heads": self.heads(),
            "sub_norm": None,
            "join": _native.Join(None, 1.0),
        }
        return _native.Attention(*(good | changes).values())

    def latent(self, **changes: Any) -> _native.Latent:
        """Of 4 heads: latents of 8 plain elements and 6 turned ones, queries of 5 and 6, values of 6."""
        good: dict[str, Any] = {"nope": 5, "rope": 6, "q_norm": None, "q_b": None}
        good |= {"kv_norm": _native.Norm(self.v8, None, 1e-6, False)}
        good |= {"k_b": self.matrix(rows=32, cols=5), "v_b": self.matrix(rows=24, cols=8)}
        return _native.Latent(**(good | changes))

    def latent_heads(self, **changes: Any) -> _native.Heads:
        return _native.Heads(4, 1, 14, 0, 0.5, 0.0, None, None, 1e-5, **({"value_dim": 8} | changes))

    def latent_layer(self, **changes: Any) -> _native.Attention:
        good: dict[str, Any] = {"norm": None, "qkv": self.stack((44, 32), (14, 32))}
        good |= {"out": _native.Linear(self.matrix(rows=32, cols=24), None), "heads": self.latent_heads()}
        good |= {"sub_norm": None, "join": _native.Join(None, 1.0), "latent": self.latent()}
        return _native.Attention(**(good | changes))

    def latent_add(self, **changes: Any) -> None:
        kv = _native.KVPages(f16s(3, 4, 14), None, 0, 0, 1, 14, 4)
        good: dict[str, Any] = {"x": self.x.copy(), "h": self.x, "layer": self.latent_layer()}
        self.c.attention_add(*(good | {"step": self.step(), "kv": kv} | changes).values())

    def stack(self, *shapes: tuple[int, int]) -> _native.Stack:
        return _native.Stack(tuple(self.matrix(rows=rows, cols=cols) for rows, cols in shapes), None)

    def attention_add(self, **changes: Any) -> None:
        good: dict[str, Any] = {"x": self.x.copy(), "h": self.x, "layer": self.layer(), "step": self.step()}
        self.c.attention_add(*(good | {"kv": self.kv()} | changes).values())

    def ffn(self, **changes: Any) -> _native.FFN:
        good: dict[str, Any] = {
            "norm": _native.Norm(self.v32, None, 1e-5, False),
            "gate": _native.Linear(self.w, self.v8),
            "up": self.w,
            "down": self.w,
            "down_bias": self.v32,
            "activation": 3,
            "threshold": 0.0,
            "up_relu": False,
            "bundles": True,
            "sub_norm": None,
            "join": _native.Join(None, 1.0),
        }
        return _native.FFN(**(good | changes))

    def wide_expert(self) -> _native.FFN:
        """Of 9 neurons instead of 8."""
        w = self.matrix(rows=9)
        return self.ffn(norm=None, gate=_native.Linear(w, None), up=w, down=w)

    def mixture(self, **changes: Any) -> _native.Mixture:
        expert, join = self.ffn(norm=None), _native.Join(None, 1.0)
        good: dict[str, Any] = {
            "norm": None,
            "router": _native.Linear(self.matrix(rows=3), None),
            "experts": (expert,) * 3,
            "active": 2,
            "join": join,
            "rule": self.rule(),
        }
        return _native.Mixture(**(good | changes))

    @staticmethod
    def rule(**changes: Any) -> _native.RouterRule:
        good: dict[str, Any] = {
            "score": 0, "weights": 0, "epsilon": 0, "epsilon_floor": False, "scale": 1, "groups": 1,
            "groups_kept": 1, "group_rule": 0,
        }  # fmt: skip
        return _native.RouterRule(**(good | changes))

    def moe_add(self, x: Any = None, h: Any = None, record: Any = None, **changes: Any) -> None:
        x, h = self.x.copy() if x is None else x, self.x if h is None else h
        self.c.moe_add(x, h, self.mixture(**changes), 1, record)

    def ffn_add(self, x: Any = None, h: Any = None, record: Any = None, **changes: Any) -> None:
        x, h = self.x.copy() if x is None else x, self.x if h is None else h
        self.c.ffn_add(x, h, self.ffn(**changes), 1, record)


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


def f16s(*shape: int) -> NDArray[np.float16]:
    return np.zeros(shape, np.float16)


def some_bytes(*shape: int) -> NDArray[np.uint8]:
    return np.zeros(shape, np.uint8)


def read_only(*shape: int) -> F32:
    out: F32 = np.zeros(shape, np.float32)
    out.flags.writeable = False
    return out


NOBODY: Any = None  # where a type is asked for


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


BAD: dict[str, Callable[[Good], Any]] = {
    "latents of two kv heads": lambda g: _native.Heads(4, 2, 14, 0, 0.5, 0.0, None, None, 1e-5, value_dim=8),
    "latents that are all value": lambda g: g.latent_heads(value_dim=14),
    "latents' heads without latents": lambda g: g.latent_layer(latent=None),
    "latents without their heads": lambda g: g.latent_layer(heads=g.heads(n_kv=1, dim=14)),
    "latents' queries of other rows": lambda g: g.latent_layer(qkv=g.stack((45, 32), (14, 32))),
    "latents of other rows": lambda g: g.latent_layer(qkv=g.stack((44, 32), (13, 32))),
    "latents' output of another width": lambda g: g.latent_layer(
        out=_native.Linear(g.matrix(rows=32, cols=25), None)
    ),
    "latents of another rank": lambda g: g.latent_layer(heads=g.latent_heads(value_dim=7)),
    "latents whose k_b is of other heads": lambda g: g.latent(k_b=g.matrix(rows=31, cols=5)),
    "latents whose k_b is of another part": lambda g: g.latent(k_b=g.matrix(rows=32, cols=6)),
    "latents whose v_b divides no heads": lambda g: g.latent(v_b=g.matrix(rows=25, cols=8)),
    "latents whose q_b has no norm": lambda g: g.latent(q_b=g.matrix(rows=44)),
    "latents whose q_b is of other rows": lambda g: g.latent(
        q_b=g.matrix(rows=45), q_norm=_native.Norm(g.v32, None, 1e-6, False)
    ),
    "latents under a layer norm": lambda g: g.latent(kv_norm=_native.Norm(g.v8, None, 1e-6, True)),
    "latents that turn an odd part": lambda g: g.latent(rope=5),
    "latents that turn another part": lambda g: g.latent_add(step=g.step(cos=zeros(2, 2), sin=zeros(2, 2))),
    "latents that do not turn": lambda g: g.latent_add(step=g.step(cos=None, sin=None)),
    "latents beside values": lambda g: g.latent_add(
        kv=_native.KVPages(f16s(3, 14, 4), f16s(3, 4, 14), 0, 0, 1, 14, 4)
    ),
    "keys and values as latents": lambda g: g.attention_add(
        kv=_native.KVPages(f16s(3, 4, 6), None, 0, 0, 1, 6, 4)
    ),
    "latents in blocks": lambda g: _native.KVPages(some_bytes(3, 68), None, 1, 1, 1, 32, 2),
    "latents of pages that are not there": lambda g: g.latent_add(step=g.step(table=ints(0, 3)[None])),
    "context without threads": lambda g: _native.Context(0),
    "context with too many threads": lambda g: _native.Context(1025),
    "context of an unknown isa": lambda g: _native.Context(1, "sse9"),
    "arena of negative size": lambda g: _native.Arena(-1),
    "arena written past its end": lambda g: g.arena.write(65530, zeros(7, dtype=np.uint8)),
    "arena written from beyond": lambda g: g.arena.write(65537, zeros(0, dtype=np.uint8)),
    "arena written at a wrapping offset": lambda g: g.arena.write(2**64 - 1, zeros(2, dtype=np.uint8)),
    "arena written with floats": lambda g: g.arena.write(0, zeros(4)),
    "arena written with every other byte": lambda g: g.arena.write(0, zeros(8, dtype=np.uint8)[::2]),
    "matrix of format -1": lambda g: g.matrix(format=-1),
    "matrix of an unknown format": lambda g: g.matrix(format=99),
    "matrix without rows": lambda g: g.matrix(rows=0),
    "matrix without columns": lambda g: g.matrix(cols=0),
    "matrix of wrapping rows": lambda g: g.matrix(rows=2**57, stride=128),
    "matrix of wrapping columns": lambda g: g.matrix(cols=2**62, stride=0),
    "matrix whose rows overlap": lambda g: g.matrix(stride=124),
    "matrix of wrapping stride": lambda g: g.matrix(stride=2**63),
    "matrix past the arena": lambda g: g.matrix(rows=513),
    "matrix whose last row ends outside": lambda g: g.matrix(offset=65536 - 8 * 128 + 4),
    "matrix outside the arena": lambda g: g.matrix(offset=65540),
    "matrix at a wrapping offset": lambda g: g.matrix(offset=2**64 - 128),
    "f32 matrix off by two": lambda g: g.matrix(offset=2),
    "f32 matrix of odd stride": lambda g: g.matrix(stride=130),
    "q8_0 matrix at an odd byte": lambda g: g.matrix(offset=1, format=3, stride=34),
    "q4_0 matrix of half a block": lambda g: g.matrix(format=4, cols=48, stride=64),
    "matrix without an arena": lambda g: _native.Matrix(NOBODY, 0, 0, 8, 32, 128),
    "embed of id -1": lambda g: g.embed(ids=ints(0, -1)),
    "embed of an id past the table": lambda g: g.embed(ids=ints(0, 8)),
    "embed of 64-bit ids": lambda g: g.embed(ids=zeros(2, dtype=np.int64)),
    "embed into too few rows": lambda g: g.embed(out=zeros(1, 32)),
    "embed into narrow rows": lambda g: g.embed(out=zeros(2, 31)),
    "embed into float64": lambda g: g.embed(out=zeros(2, 32, dtype=np.float64)),
    "embed into every other column": lambda g: g.embed(out=zeros(2, 64)[:, ::2]),
    "embed into a transposed array": lambda g: g.embed(out=zeros(32, 2).T),
    "embed into a read-only array": lambda g: g.embed(out=read_only(2, 32)),
    "norm of a vector": lambda g: g.norm(x=zeros(32)),
    "norm with a short weight": lambda g: g.norm(weight=zeros(31)),
    "norm with a long bias": lambda g: g.norm(bias=zeros(33)),
    "norm into too few rows": lambda g: g.norm(out=zeros(1, 32)),
    "norm with float64 weight": lambda g: g.norm(weight=zeros(32, dtype=np.float64)),
    "matmul of narrow x": lambda g: g.matmul(x=zeros(2, 31)),
    "matmul of strided x": lambda g: g.matmul(x=zeros(2, 64)[:, ::2]),
    "matmul of f16 x": lambda g: g.matmul(x=zeros(2, 32, dtype=np.float16)),
    "matmul with a short bias": lambda g: g.matmul(bias=zeros(7)),
    "matmul with a strided bias": lambda g: g.matmul(bias=zeros(16)[::2]),
    "matmul into too few rows": lambda g: g.matmul(out=zeros(1, 8)),
    "matmul into narrow rows": lambda g: g.matmul(out=zeros(2, 7)),
    "matmul by an array": lambda g: g.matmul(w=zeros(8, 32)),
    "matmul by nothing": lambda g: g.matmul(w=None),
    "heads with too few sinks": lambda g: g.heads(sinks=zeros(3)),
    "attention of narrow qkv": lambda g: g.attention(qkv=zeros(2, 47)),
    "heads, none": lambda g: g.heads(n=0),
    "heads without kv heads": lambda g: g.heads(n_kv=0),
    "heads, negative": lambda g: g.heads(n=-4),
    "heads, 3 over 2": lambda g: g.heads(n=3),
    "heads of no elements": lambda g: g.heads(dim=0),
    "heads with a negative window": lambda g: g.heads(window=-1),
    "attention with another head_dim": lambda g: g.attention(
        heads=g.heads(dim=8), qkv=zeros(2, 64), out=zeros(2, 32)
    ),
    "attention into narrow rows": lambda g: g.attention(out=zeros(2, 23)),
    "attention into too few rows": lambda g: g.attention(out=zeros(1, 24)),
    "attention with wide cos": lambda g: g.attention(step=g.step(cos=zeros(2, 6), sin=zeros(2, 6))),
    "attention with rope on odd heads": lambda g: g.attention(
        qkv=zeros(2, 40),
        heads=g.heads(dim=5),
        kv=g.kv(k=f16s(6, 5, 4), v=f16s(6, 4, 5), dim=5),
        out=zeros(2, 20),
    ),
    "attention over other heads' pages": lambda g: g.attention(
        kv=g.kv(k=f16s(3, 6, 4), v=f16s(3, 4, 6), heads=1)
    ),
    "attention in other blocks": lambda g: g.attention(step=g.step(block=8)),
    "attention without pages": lambda g: g.attention(kv=g.kv(k=f16s(0, 6, 4), v=f16s(0, 4, 6))),
    "pages of signed k": lambda g: g.kv(k=zeros(6, 6, 4, dtype=np.int16)),
    "pages that the heads do not divide": lambda g: g.kv(k=f16s(5, 6, 4), v=f16s(5, 4, 6)),
    "pages of no heads": lambda g: g.kv(heads=0),
    "pages with v of other blocks": lambda g: g.kv(v=f16s(6, 5, 6)),
    "pages with fewer of v": lambda g: g.kv(v=f16s(4, 4, 6)),
    "pages of strided k": lambda g: g.kv(k=f16s(12, 6, 4)[::2]),
    "pages of type -1": lambda g: g.kv(k_type=-1),
    "pages of an unknown type": lambda g: g.kv(v_type=3),
    "pages of no elements": lambda g: g.kv(k=f16s(6, 0, 4), v=f16s(6, 4, 0), dim=0),
    "pages of no positions": lambda g: g.kv(k=f16s(6, 6, 0), v=f16s(6, 0, 6), block=0),
    "pages of f16 as bytes": lambda g: g.kv(k=some_bytes(6, 48)),
    "pages of q8_0 in f16": lambda g: g.kv(k_type=1),
    "pages of q8_0 with half a block": lambda g: g.kv(
        k=some_bytes(6, 4 * 48), v=f16s(6, 4, 48), k_type=1, dim=48
    ),
    "pages of q8_0 that are too short": lambda g: g.kv(
        k=some_bytes(6, 4 * 34 - 1), v=f16s(6, 4, 32), k_type=1, dim=32
    ),
    "pages of q8_0 values that end within four": lambda g: g.kv(
        k=f16s(6, 32, 6), v=some_bytes(6, 6 * 34), v_type=1, dim=32, block=6
    ),
    "pages of q4_0 as q8_0": lambda g: g.kv(k=some_bytes(6, 4 * 18), v=f16s(6, 4, 32), k_type=1, dim=32),
    "page bytes of an unknown type": lambda g: _native.cache_page_bytes(3, 32, 32),
    "attention on a page that is not there": lambda g: g.attention(step=g.step(table=ints(3, 0)[None])),
    "step in empty blocks": lambda g: g.step(block=0),
    "step with cos alone": lambda g: g.step(sin=None),
    "step with short sin": lambda g: g.step(sin=zeros(1, 3)),
    "step with narrow sin": lambda g: g.step(sin=zeros(2, 2)),
    "step at position -1": lambda g: g.step(positions=ints(0, -1)),
    "step past the block table": lambda g: g.step(positions=ints(0, 8)),
    "step with few positions": lambda g: g.step(positions=ints(0)),
    "step of sequence -1": lambda g: g.step(sequence=ints(0, -1)),
    "step of an unknown sequence": lambda g: g.step(sequence=ints(0, 1)),
    "step with few sequences": lambda g: g.step(sequence=ints(0)),
    "step without a table": lambda g: g.step(table=zeros(1, 0, dtype=np.int32)),
    "step on page -1": lambda g: g.step(table=ints(0, -1)[None]),
    "step with a negative window": lambda g: g.step(window=-1),
    "step whose window begins in an absent page": lambda g: g.step(table=ints(-1, 0)[None], window=4),
    "step whose first token's window begins in an absent page": lambda g: g.step(
        positions=ints(3, 7), table=ints(-1, 0)[None], window=1
    ),
    "attention without a window on a step with one": lambda g: g.attention(step=g.step(window=8)),
    "attention that looks further back than its step": lambda g: g.attention(
        heads=g.heads(window=3), step=g.step(window=2)
    ),
    "layer with narrow qkv": lambda g: g.layer(qkv=_native.Stack((g.matrix(rows=47),), None)),
    "layer whose q, k and v are narrow": lambda g: g.layer(qkv=g.stack((24, 32), (12, 32), (11, 32))),
    "stack of nothing": lambda g: g.stack(),
    "stack of too many": lambda g: g.stack(*((12, 32),) * 5),
    "stack of several widths": lambda g: g.stack((24, 32), (12, 32), (12, 16)),
    "stack with a short bias": lambda g: _native.Stack((g.w, g.w), zeros(15)),
    "stack of what is no matrix": lambda g: _native.Stack((g.w, None), None),
    "layer without qkv": lambda g: g.layer(qkv=None),
    "layer with a short norm": lambda g: g.layer(norm=_native.Norm(zeros(31), None, 1e-5, False)),
    "layer with a narrow output": lambda g: g.layer(out=_native.Linear(g.matrix(rows=32, cols=23), None)),
    "layer with a short output": lambda g: g.layer(out=_native.Linear(g.matrix(rows=31, cols=24), None)),
    "layer with a gate of other rows": lambda g: g.layer(gate=g.matrix(rows=23)),
    "layer with a narrow gate": lambda g: g.layer(gate=g.matrix(rows=24, cols=16)),
    "layer with a gate of signs": lambda g: g.layer(gate=g.matrix(rows=24, format=_native.SIGNS)),
    "layer of fewer heads": lambda g: g.layer(heads=g.heads(n=2)),
    "linear with a short bias": lambda g: _native.Linear(g.w, zeros(7)),
    "linear with a strided bias": lambda g: _native.Linear(g.w, zeros(16)[::2]),
    "norm part with a long bias": lambda g: _native.Norm(zeros(32), zeros(33), 1e-5, True),
    "attention block of narrow x": lambda g: g.attention_add(x=zeros(2, 31), h=zeros(2, 31)),
    "attention block of other h": lambda g: g.attention_add(h=zeros(1, 32)),
    "attention block of other tokens": lambda g: g.attention_add(x=zeros(1, 32), h=zeros(1, 32)),
    "attention block without pages": lambda g: g.attention_add(kv=g.kv(k=f16s(0, 6, 4), v=f16s(0, 4, 6))),
    "attention block into a read-only array": lambda g: g.attention_add(x=read_only(2, 32)),
    "attention block of an ffn": lambda g: g.attention_add(layer=g.ffn()),
    "ffn of other x": lambda g: g.ffn_add(h=zeros(1, 32)),
    "ffn recorded for other tokens": lambda g: g.ffn_add(record=zeros(1, 8)),
    "ffn recorded for other neurons": lambda g: g.ffn_add(record=zeros(2, 9)),
    "ffn recorded into a read-only array": lambda g: g.ffn_add(record=read_only(2, 8)),
    "ffn recorded in f64": lambda g: g.ffn_add(record=zeros(2, 8, dtype=np.float64)),
    "ffn of narrow x": lambda g: g.ffn_add(x=zeros(2, 31), h=zeros(2, 31)),
    "ffn with a narrow gate": lambda g: g.ffn(gate=_native.Linear(g.matrix(cols=16), None)),
    "ffn with more gates than downs": lambda g: g.ffn(gate=_native.Linear(g.matrix(rows=9), None)),
    "ffn with few ups": lambda g: g.ffn(up=g.matrix(rows=7)),
    "ffn with narrow ups": lambda g: g.ffn(up=g.matrix(cols=16)),
    "ffn with ups of signs": lambda g: g.ffn(up=g.matrix(format=_native.SIGNS)),
    "ffn with bundles' down and no bundles": lambda g: g.ffn(bundles=False),
    "ffn with a short norm": lambda g: g.ffn(norm=_native.Norm(zeros(31), None, 1e-5, False)),
    "ffn with narrow downs": lambda g: g.ffn(down=g.matrix(cols=16)),
    "ffn without gates": lambda g: g.ffn(gate=None),
    "ffn without downs": lambda g: g.ffn(down=None),
    "ffn with a short down bias": lambda g: g.ffn(down_bias=zeros(31)),
    "ffn with activation -1": lambda g: g.ffn(activation=-1),
    "ffn with a clamped activation that has no limit": lambda g: g.ffn(activation=6, bundles=False),
    "ffn with a clamped activation in bundles": lambda g: g.ffn(activation=6, limit=7.0),
    "ffn with a bias of up in bundles": lambda g: g.ffn(up_bias=zeros(g.w.shape[0])),
    "ffn with an unknown activation": lambda g: g.ffn(activation=len(ACTIVATIONS)),
    "ffn with a negative threshold": lambda g: g.ffn(threshold=-0.5),
    "ffn with a threshold that is no number": lambda g: g.ffn(threshold=math.nan),
    "ffn into a read-only array": lambda g: g.ffn_add(x=read_only(2, 32)),
    "mixture of fewer experts than routed to": lambda g: g.mixture(experts=(g.ffn(norm=None),)),
    "mixture of what is no ffn": lambda g: g.mixture(experts=(g.w,) * 3),
    "mixture of an expert with a norm": lambda g: g.mixture(experts=(g.ffn(),) * 3),
    "mixture of an expert with a join": lambda g: g.mixture(
        experts=(g.ffn(norm=None, join=_native.Join(None, 2.0)),) * 3
    ),
    "mixture of experts of other sizes": lambda g: g.mixture(
        experts=(g.ffn(norm=None), g.ffn(norm=None), g.wide_expert())
    ),
    "mixture with a narrow router": lambda g: g.mixture(
        router=_native.Linear(g.matrix(rows=3, cols=16), None)
    ),
    "mixture with a router of signs": lambda g: g.mixture(
        router=_native.Linear(g.matrix(rows=3, format=_native.SIGNS), None)
    ),
    "mixture with a short selection bias": lambda g: g.mixture(selection_bias=zeros(2)),
    "mixture whose shared ffn has a norm": lambda g: g.mixture(shared=g.ffn()),
    "mixture whose shared ffn is in bundles": lambda g: g.mixture(shared=g.ffn(norm=None)),
    "mixture with a gate of nothing shared": lambda g: g.mixture(shared_router=g.matrix(rows=1)),
    "mixture with groups that do not divide": lambda g: g.mixture(rule=g.rule(groups=2)),
    "mixture with groups that are too small": lambda g: g.mixture(rule=g.rule(groups=3)),
    "mixture with groups of one by two": lambda g: g.mixture(
        active=1, rule=g.rule(groups=3, groups_kept=3, group_rule=1)
    ),
    "rule of more groups than there are": lambda g: g.rule(groups_kept=2),
    "rule of no group": lambda g: g.rule(groups_kept=0),
    "rule with an unknown score": lambda g: g.rule(score=3),
    "rule with unknown weights": lambda g: g.rule(weights=len(ROUTER_WEIGHTS)),
    "rule with an unknown rule of groups": lambda g: g.rule(group_rule=2),
    "mixture of no active experts": lambda g: g.mixture(active=0),
    "mixture of too many active experts": lambda g: g.mixture(active=4),
    "mixture with a short norm": lambda g: g.mixture(norm=_native.Norm(zeros(31), None, 1e-5, False)),
    "mixture of narrow x": lambda g: g.moe_add(x=zeros(2, 31), h=zeros(2, 31)),
    "mixture recorded for one expert's neurons": lambda g: g.moe_add(record=zeros(2, 8)),
    "mixture of others' shares": lambda g: g.c.moe_add(g.x, g.x, g.mixture(), 1, None, zeros(2, 4)),
    "mixture without a router or shares": lambda g: g.moe_add(router=None),
    "shares of no router": lambda g: g.c.routed(g.x, g.mixture(router=None), zeros(2, 3)),
    "reads ahead of no router": lambda g: g.c.read_ahead(g.x, g.mixture(router=None), 1),
    "mixture of no experts": lambda g: g.mixture(router=None, experts=()),
    "shares of other tokens": lambda g: g.c.routed(g.x, g.mixture(), zeros(3, 3)),
    "shares of narrow h": lambda g: g.c.routed(zeros(2, 31), g.mixture(), zeros(2, 3)),
    "reads ahead of others' shares": lambda g: g.c.read_ahead(g.x, g.mixture(), 1, zeros(1, 3)),
    "mixture into a read-only array": lambda g: g.moe_add(x=read_only(2, 32)),
    "load of odd blocks": lambda g: g.load(1, 2),
    "load in tiny blocks": lambda g: g.load(0, 2, block=1),
    "load past the arena": lambda g: g.load(0, 65537, checksums=200),
    "load backwards": lambda g: g.load(1024, 512, checksums=9),
    "load without checksums": lambda g: g.load(0, 513),
    "bandwidth of nothing": lambda g: _native.read_bandwidth(0, 1, 0.01),
    "bandwidth without threads": lambda g: _native.read_bandwidth(1 << 20, 0, 0.01),
    "bandwidth past the arena": lambda g: _native.Arena(2 << 20).read_bandwidth(0, 3 << 20, 1, 0.01),
    "bandwidth of too little": lambda g: _native.Arena(2 << 20).read_bandwidth(
        1 << 20, (2 << 20) - 1, 1, 0.01
    ),
    "bandwidth backwards": lambda g: _native.Arena(2 << 20).read_bandwidth(2 << 20, 0, 1, 0.01),
    "bandwidth of an arena without threads": lambda g: _native.Arena(2 << 20).read_bandwidth(
        0, 2 << 20, 0, 0.01
    ),
}


def test_the_good_arguments_are_accepted() -> None:
    g = Good()
    g.embed(), g.norm(), g.matmul(), g.attention(), g.attention_add(), g.ffn_add()
    g.ffn_add(gate=_native.Linear(g.w, None), up=None, down_bias=None)
    g.ffn_add(norm=None), g.attention_add(layer=g.layer(norm=None))
    g.attention_add(layer=g.layer(gate=g.matrix(rows=24)))
    g.ffn_add(down=g.matrix(rows=32, cols=8, stride=32), bundles=False)
    g.attention(step=g.step(cos=None, sin=None))
    g.latent_add()


@pytest.mark.parametrize("call", BAD)
def test_bad_arguments_are_refused(call: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        BAD[call](Good())


def test_good_arguments_of_a_mixture_are_not_refused() -> None:
    g = Good()
    g.moe_add(), g.moe_add(record=zeros(2, 24)), g.mixture(active=3)
    g.c.moe_add(g.x.copy(), g.x, g.mixture(), 1, None, zeros(2, 3)), g.c.routed(g.x, g.mixture(), zeros(2, 3))
    g.moe_add(x=zeros(0, 32), h=zeros(0, 32))


def test_no_tokens_are_no_work() -> None:
    g = Good()
    none, no_ids = zeros(0, 32), zeros(0, dtype=np.int32)
    g.embed(ids=no_ids, out=none)
    g.norm(x=none, out=none)
    g.matmul(x=none, out=zeros(0, 8))
    g.ffn_add(x=none, h=none)
    step = g.step(positions=no_ids, sequence=no_ids, cos=zeros(0, 3), sin=zeros(0, 3))
    g.attention(qkv=zeros(0, 48), step=step, out=zeros(0, 24))
    g.attention_add(x=none, h=none, step=step)


def test_a_matrix_keeps_its_arena_alive() -> None:
    matrix, w = stored("f32", normal(0, 4, 32))  # `stored` lets go of the arena
    held = [_native.Arena(1 << 16) for _ in range(50)]
    assert same_bits(cpu(ISAS[0]).embed(matrix, np.arange(4, dtype=np.int32)), w) and held
