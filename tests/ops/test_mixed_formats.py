"""Matrices of one layer in several formats: q, k and v apart; gate, up and down; the two rows of a bundle.

Formats are paired so that a float stands beside blocks, blocks of 32 beside blocks of 256, and kinds of
scales beside each other. What one format alone does, test_kernels.py holds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_kernels import (
    F32_NMSE,
    INT8_NMSE,
    ISAS,
    QUANTISED,
    SPANS,
    Ffn,
    attention_case,
    cpu,
    ffn,
    in_arena,
    nmse,
    normal,
    same_bits,
    stored,
)

from thermocline import _native
from thermocline.model import quant
from thermocline.model.tensors import APART, bundle_stride
from thermocline.ops import reference
from thermocline.ops.interface import F32, FFN, Heads, Layer, Linear, Norm, Stacked

MIXES = [
    ("q4_k", "q4_k", "q6_k"),  # llama.cpp's Q4_K_M
    ("q8_0", "q4_0", "q8_0"),
    ("f16", "q8_0", "f32"),  # floats beside blocks
    ("bf16", "f16", "f32"),
    ("q5_k", "q3_k", "iq4_xs"),
    ("q5_1", "mxfp4", "q2_k"),
]
TOKENS = (1, 4, 5, 12)
DIM = 512
ON = [pytest.param(isa, marks=[] if isa == _native.isa() else [pytest.mark.slow]) for isa in ISAS]


def bound(formats: tuple[str, ...]) -> float:
    """Of the power: a rounding of int8 activations, where any of them meets some."""
    return 3 * INT8_NMSE if any(f in QUANTISED for f in formats) else 1e-7


# ---- q, k and v


class Block:
    """The block around attention, with q, k and v as they are given."""

    def __init__(self) -> None:
        case = attention_case(32, 2, 2, SPANS, None)
        self.case, self.spec = case, replace(case.spec, dim=DIM)
        self.tokens = len(case.qkv)
        s = self.spec
        kv = s.n_kv_heads * s.head_dim
        self.values = [
            normal(i, rows, DIM) / np.float32(16) for i, rows in enumerate((s.qkv_rows - 2 * kv, kv, kv))
        ]
        self.bias, self.norm = normal(3, s.qkv_rows), Norm(normal(6, DIM), normal(5, DIM))
        self.out = stored("f32", normal(2, DIM, s.n_heads * s.head_dim))
        self.x, self.h = normal(7, self.tokens, DIM), normal(8, self.tokens, DIM)

    def run(self, ops: Any, qkv: Any, begin: int = 0, end: int | None = None) -> F32:
        end = self.tokens if end is None else end
        out = self.out[1 if ops is reference else 0]
        layer = Layer(self.norm, Linear(qkv, self.bias), Linear(out, None), None, experts=())
        y, part = self.x[begin:end].copy(), self.case.rows(begin, end)
        made = ops.bind_attention(self.spec, Heads.of(self.spec), layer)
        ops.attention_add(y, self.h[begin:end].copy(), made, part.step(ops), self.case.kv)  # begun before
        return y


@pytest.mark.parametrize("isa", ON)
@pytest.mark.parametrize("formats", MIXES)
def test_q_k_and_v_of_several_formats_equal_the_reference(formats: tuple[str, ...], isa: str) -> None:
    b = Block()
    parts = [stored(f, w) for f, w in zip(formats, b.values, strict=True)]
    native, values = (Stacked(tuple(p[i] for p in parts)) for i in (0, 1))
    truth, y = b.run(reference, values), b.run(cpu(isa), native)
    assert nmse(y - b.x, truth - b.x) <= bound(formats)
    assert same_bits(b.run(cpu(isa, 3), native), y)
    halves = [b.run(cpu(isa), native, *at) for at in ((0, 2), (2, b.tokens))]  # rows, then panels
    assert same_bits(np.concatenate(halves), y)


@pytest.mark.parametrize("isa", ON)
@pytest.mark.parametrize("format", ["f32", "f16", "q8_0", "q4_0", "q4_k", "q6_k", "q2_k"])
def test_q_k_and_v_apart_are_the_bits_of_the_fused_matrix(format: str, isa: str) -> None:
    b = Block()
    fused, _ = stored(format, np.concatenate(b.values))
    apart = Stacked(tuple(stored(format, w)[0] for w in b.values))
    for begin, end in ((0, 1), (0, 4), (0, b.tokens)):
        for threads in (1, 3):
            assert same_bits(
                b.run(cpu(isa, threads), apart, begin, end), b.run(cpu(isa, threads), fused, begin, end)
            ), (begin, end, threads)


def test_a_stack_says_what_it_consists_of() -> None:
    parts = tuple(stored(f, normal(i, rows, 64))[0] for i, (f, rows) in enumerate((("f16", 3), ("q8_0", 5))))
    whole = Stacked(parts)
    assert whole.shape == (8, 64) and whole.nbytes == 3 * 128 + 5 * 68


# ---- gate, up and down


def with_formats(formats: tuple[str, str, str], kind: str, activation: str, bundles: bool) -> Ffn:
    """`ffn` with gate, up and down of their own formats."""
    plain = ffn("f32", 512, DIM, kind, activation, bundles=bundles)
    part, f = plain.numpy.part, plain.numpy
    gate, gate_values = stored(formats[0], part.gate.weight)
    up_values: F32 | None = None
    if bundles:
        up, down, up_values, down_values = mixed_bundle(formats[1:], part.up, part.down)
    else:
        up, up_values = (None, None) if part.up is None else stored(formats[1], part.up)
        down, down_values = stored(formats[2], part.down)
    bias = part.gate.bias
    return replace(
        plain,
        native=FFN.whole(Linear(gate, bias), up, down, f.down_bias, bundles),
        numpy=FFN.whole(Linear(gate_values, bias), up_values, down_values, f.down_bias, bundles),
    )


def mixed_bundle(formats: tuple[str, ...], up: F32 | None, down: F32) -> Any:
    """As test_kernels' `stored_bundle`: up and down rows in one record, each in its own format."""
    wanted = [(f, w) for f, w in zip(formats, (up, down), strict=True) if w is not None]
    parts = [quant.encode(f, w) for f, w in wanted]
    starts = [0, -(-parts[0].shape[1] // APART) * APART][: len(parts)]
    rows, cols = down.shape
    records = np.full((rows, bundle_stride(starts[-1] + parts[-1].shape[1])), 0xFF, np.uint8)  # NaN between
    for at, part in zip(starts, parts, strict=True):
        records[:, at : at + part.shape[1]] = part
    arena, offset = in_arena(records)
    made = [
        (_native.Matrix(arena, offset + at, quant.FORMATS[f].id, rows, cols, records.shape[1]),
         quant.decode(f, part, cols))
        for at, part, (f, _) in zip(starts, parts, wanted, strict=True)
    ]  # fmt: skip
    last = made[-1]
    return (None, last[0], None, last[1]) if up is None else (made[0][0], last[0], made[0][1], last[1])


@pytest.mark.parametrize("isa", ON)
@pytest.mark.parametrize("formats", MIXES)
def test_a_dense_ffn_of_several_formats_equals_the_reference(formats: Any, isa: str) -> None:
    for kind, activation in (("gated", "silu"), ("ungated", "gelu_tanh"), ("dReLU", "relu")):
        f, at = with_formats(formats, kind, activation, bundles=False), (kind, activation)
        x, h = normal(5, max(TOKENS), DIM), normal(6, max(TOKENS), DIM)
        y, _ = f.run(cpu(isa), x, h)
        truth = f.run(reference, x, h)[0]
        assert nmse(y - x, truth - x) <= 2 * bound(formats), at
        for tokens, threads in itertools.product(TOKENS, (1, 3)):
            assert same_bits(f.run(cpu(isa, threads), x[:tokens], h[:tokens])[0], y[:tokens]), (*at, tokens)


@pytest.mark.parametrize("isa", ON)
@pytest.mark.parametrize("formats", MIXES)
def test_bundles_whose_rows_differ_in_format_equal_the_reference(formats: Any, isa: str) -> None:
    """However many tokens, and skipped neurons or all: the bits are the same."""
    for kind, activation in itertools.product(("gated", "ungated", "dReLU"), ("relu", "relu2")):
        f, at = with_formats(formats, kind, activation, bundles=True), (kind, activation)
        x, h = normal(5, max(TOKENS), DIM), normal(6, max(TOKENS), DIM)
        y, _ = f.run(cpu(isa), x, h)
        truth = f.run(reference, x, h)[0]
        assert nmse(y - x, truth - x) <= 2 * bound(formats[:2]) + F32_NMSE, at
        for tokens, threads in itertools.product(TOKENS, (1, 3)):
            for sparsity in ("exact", "off"):
                part, _ = f.run(cpu(isa, threads), x[:tokens], h[:tokens], sparsity=sparsity)
                assert same_bits(part, y[:tokens]), (*at, tokens, threads, sparsity)
