"""GPU kernels equal the reference: in plain torch, and in Triton (interpreted, where there is no GPU).

Sums are f32 over the weights a format decodes to, so both are held to `ops.reference` over `quant.decode`.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import replace
from itertools import product
from typing import Any

import gpu_cases
import numpy as np
import pytest
import torch
from gpu_cases import (
    SIXTEEN,
    Attention,
    Kernels,
    attention_case,
    columns,
    heads,
    met,
    multiply_rows_alike,
    normal,
    prepare_once_a_launch,
    whole,
)

from thermocline.engine.kv_cache import in_ram
from thermocline.engine.sampler import Sampler, SamplingParams
from thermocline.model import activations, quant
from thermocline.model.spec import ACTIVATIONS, PLAIN_ROUTER, SPARSE_ACTIVATIONS, Latent, Router
from thermocline.ops import choosing, device_sizes, reference
from thermocline.ops.device_rows import BegunNorm, DeviceRows, Scratch, Squares
from thermocline.ops.device_sizes import FEW, choice_sizes, span_of, spans
from thermocline.ops.interface import CANDIDATES, F32, Batch, ChosenToken, KVShape, LatentMatrices, TokenDraw
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.predictor import LayerPredictor

pytestmark = pytest.mark.oracle

FORMATS = list(quant.FORMATS)
TOKENS = (1, 2, 3, 4, 8, 16, 17, 64)
SOME = (1, 3, 17)
TABLES = ("torch", "torch in pieces", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are defined


def usual(table: str, format: str, tokens: int) -> bool:
    """Interpreted, every number of tokens in one format, and one and many in each: the code is the same."""
    some = (1, 17) if table == "triton" else SOME
    return DEVICE == "cuda" or table == "torch" or format == "q4_0" or tokens in some


each_format_and_batch = pytest.mark.parametrize(
    "kernels, format, tokens",
    [c for c in product(TABLES, FORMATS, TOKENS) if usual(*c)],
    indirect=["kernels", "format"],
)


@pytest.fixture(params=TABLES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if request.param != "triton":
        if request.param == "torch in pieces":
            monkeypatch.setattr(torch_kernels, "PIECE", 999)
        return Kernels(torch_kernels, DEVICE, 1e-10, slow=False)
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    from thermocline.ops.kernels import triton_kernels

    # Small matrices, yet as many rows a program as of large ones: fewer are tested by themselves.
    monkeypatch.setattr(triton_kernels, "DOT_PROGRAMS", 1)
    if DEVICE == "cpu":
        prepare_once_a_launch(monkeypatch)
    return Kernels(triton_kernels, DEVICE, 1e-6, slow=DEVICE == "cpu")


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_embeddings_are_their_rows(kernels: Kernels, format: str) -> None:
    for n in columns(format):
        table, w = kernels.rows(format, normal(1, 11, n), pad=8)
        ids = np.array([10, 0, 10, 3], np.int32)
        out = kernels.filled(len(ids), n)
        kernels.ops.embed(out, table, kernels.put(ids), 2.5)
        kernels.check(out, reference.embed(w, ids) * np.float32(2.5))


def test_norms_of_some_columns(kernels: Kernels) -> None:
    x, weight = normal(1, 3, 50), normal(2, 20)
    want = x.copy()
    want[:, 7:27] = reference.norm(x[:, 7:27], weight, None, 1e-5, "rms")
    out = kernels.put(x)
    kernels.ops.norm(out[:, 7:27], out[:, 7:27], kernels.put(weight), None, 1e-5, False)
    kernels.check(out, want)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("biased", [False, True])
def test_norms(kernels: Kernels, kind: str, biased: bool) -> None:
    for tokens, dim in (2, 5), (3, 33), (17, 300):
        x, weight = 3 * normal(1, tokens, dim) + 1, normal(2, dim)
        bias = normal(3, dim) if biased else None
        want = reference.norm(x, weight, bias, 1e-5, kind)
        out, mine = kernels.filled(tokens, dim), kernels.put(x)
        args = kernels.put(weight), kernels.some(bias), 1e-5, kind == "layer"
        kernels.ops.norm(out, mine, *args)
        kernels.check(out, want)
        kernels.ops.norm(mine, mine, *args)
        kernels.check(mine, want)
        y = kernels.put(normal(4, tokens, dim))
        kernels.ops.add_normed(y, kernels.put(x), *args, 0.5)
        kernels.check(y, normal(4, tokens, dim) + np.float32(0.5) * want)


def test_without_a_weight_nothing_is_normed(kernels: Kernels) -> None:
    x, y = normal(1, 3, 40), normal(2, 3, 40)
    out, there = kernels.filled(3, 40), kernels.put(y)
    kernels.ops.norm(out, kernels.put(x), None, None, 1e-5, False)
    kernels.ops.add_normed(there, kernels.put(x), None, None, 1e-5, False, 0.25)
    assert np.array_equal(out.cpu().numpy(), x)
    kernels.check(there, y + np.float32(0.25) * x)


@each_format_and_batch
def test_a_matrix_product(kernels: Kernels, format: str, tokens: int) -> None:
    for i, n in enumerate(columns(format)[: 2 if kernels.slow and tokens > 1 else 3]):
        rows = (1, 9, 7)[i] if kernels.slow else (1, 37, 70)[i]
        w, decoded = kernels.rows(format, normal(1, rows, n), skip=4 * i, pad=4)
        x, bias = normal(2, tokens, n), normal(3, rows)
        cases = ((None, False), (bias, False), (bias, True))
        for b, add in cases[i : i + 1] if kernels.slow else cases:
            there = normal(4, tokens, rows)
            out = kernels.put(there) if add else kernels.filled(tokens, rows)
            kernels.ops.matmul(out, w, kernels.put(x), kernels.some(b), add, kernels.scratch())
            kernels.check(out, reference.matmul(decoded, met(format, x), b) + (there if add else 0))


def test_tokens_in_int8_are_what_the_cpu_makes_of_them(kernels: Kernels) -> None:
    """Bit for bit: ties go to the even number; blocks of nothing, of next to nothing, and with no number."""
    x = normal(1, 3, 32 * 37)
    x[0, :32], x[1, 32:64], x[2, 64:96] = 0, 1e-38, (np.arange(32) - 15.5) * 8
    x[0, 96:128] = np.arange(32) + 0.5
    x[0, 127] = 127  # so that the others are ties
    x[1, 130], x[2, 200] = np.nan, -np.inf
    q, scales, sums = wanted = in_int8(x)
    if kernels.ops is torch_kernels:
        given = room_for_ints(kernels, x.shape)
        torch_kernels._put_ints(given, kernels.put(x))
    else:
        w, _ = kernels.rows("q4_0", normal(2, 1, 32 * 37))
        given = kernels.ops._quantised(kernels.put(x), kernels.scratch(), None, w)
    check_ints(given, wanted)
    assert np.isnan(scales).sum() == 2 and (q[0, 3, :4] == (0, 2, 2, 4)).all() and sums.any()


Ints = tuple[Any, F32, Any]


def in_int8(x: F32) -> Ints:
    """Numbers [tokens, blocks, 32], scales [tokens, blocks], sums of halves, as the CPU makes them."""
    blocks = x.reshape(len(x), -1, 32)
    peak = np.abs(blocks).max(axis=2)
    known = np.isfinite(peak)
    inverse = np.where(
        known & (peak > 1e-36), np.float32(127) / np.where(peak > 1e-36, peak, 1), np.float32(0)
    )
    q = np.rint(np.where(known[..., None], blocks, np.float32(0)) * inverse[..., None])
    scales = np.where(known, peak / np.float32(127), np.float32(np.nan))
    return q, scales, q.reshape(*peak.shape, 2, 16).sum(axis=3)


def room_for_ints(kernels: Kernels, shape: tuple[int, ...]) -> torch.Tensor:
    words = device_sizes.quantised_words(*shape)
    return torch.full((words,), 0x55555555, dtype=torch.int32, device=kernels.device)


def check_ints(given: torch.Tensor, wanted: Ints) -> None:
    """Bit for bit."""
    q, scales, sums = wanted
    numbers, d, halves = np.split(given.cpu().numpy(), [q.size // 4, q.size // 4 + scales.size])
    assert np.array_equal(numbers.view(np.int8).reshape(q.shape), q)
    assert np.array_equal(d.view(np.float32).reshape(scales.shape), scales, equal_nan=True)
    assert np.array_equal(halves.view(np.int16).reshape(sums.shape), sums)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_leaves_what_it_makes_in_int8_too(kernels: Kernels, kind: str) -> None:
    """As if that was read and quantised, also where it is no number."""
    for tokens, dim in (1, 32), (3, 96), (16, 288):
        x, weight = 3 * normal(1, tokens, dim) + 1, normal(2, dim)
        x[tokens // 2, 5] = np.nan if tokens > 1 else 2
        bias = kernels.put(normal(3, dim)) if kind == "layer" else None
        out, ints = kernels.filled(tokens, dim), room_for_ints(kernels, x.shape)
        kernels.ops.norm(out, kernels.put(x), kernels.put(weight), bias, 1e-5, kind == "layer", ints)
        check_ints(ints, in_int8(out.cpu().numpy()))


@pytest.mark.parametrize("format, tokens", [("q4_0", 1), ("q8_0", 3), ("f16", 3)], indirect=["format"])
def test_neurons_are_left_in_int8_too(kernels: Kernels, format: str, tokens: int) -> None:
    """Of each 32 by the program that ends last; twice, since programs count themselves. h does not differ."""
    n, scratch, x = 64, kernels.scratch(), kernels.put(normal(1, tokens, 32))
    gate, up = (kernels.rows(format, normal(i, n, 32))[0] for i in (2, 3))
    for seed in 4, 5:
        what = gate, kernels.put(normal(seed, n)), up, x, "silu", 0.0, False, None, None, None, scratch
        h, alike = kernels.filled(tokens, n), kernels.filled(tokens, n)
        ints = room_for_ints(kernels, h.shape)
        kernels.ops.gate_up(alike, *what)
        kernels.ops.gate_up(h, *what, None, 1.0, False, None, ints)
        assert torch.equal(h, alike)
        check_ints(ints, in_int8(h.cpu().numpy()))
        assert not bool(scratch.arrivals.any())


@pytest.mark.parametrize("tokens", [1, 3])
def test_neurons_of_whole_experts_are_left_in_int8_too(kernels: Kernels, tokens: int) -> None:
    """But for the last one's, to whom nobody goes: those are not read."""
    experts, n, dim, scratch = 3, 32, 32, kernels.scratch()
    shares = np.array([[0.25, 0.75, 0], [1, 0, 0], [0, 1, 0]], np.float32)[:tokens]
    gate, down = (kernels.rows("q8_0", normal(i, experts * n, dim))[0] for i in (1, 2))
    h, counts = kernels.filled(tokens, experts * n), kernels.put(np.zeros(4, np.int32))
    weights, ints = kernels.put(shares), room_for_ints(kernels, h.shape)
    more = "silu", 0.0, False, None, weights, counts, scratch, None, 1.0, False, None, ints
    kernels.ops.gate_up(h, gate, None, gate, kernels.put(normal(3, tokens, dim)), *more)
    words = ints[: h.numel() // 4].view(torch.int8).view(tokens, experts, n).cpu().numpy()
    wanted, _, _ = in_int8(h.cpu().numpy())
    assert np.array_equal(words[:, :2], wanted.reshape(tokens, experts, n)[:, :2])
    outs = [kernels.filled(tokens, dim) for _ in range(2)]
    kernels.ops.down_experts(outs[0], down, h, weights, False, scratch)
    kernels.ops.down_experts(outs[1], down, kernels.filled(*h.shape), weights, False, scratch, ints)
    assert torch.equal(*outs) and bool(outs[0].any())


def begun_norm(kernels: Kernels, tokens: int, dim: int) -> BegunNorm:
    """A place for one of so many columns."""
    ints = room_for_ints(kernels, (tokens, dim))
    there = kernels.filled(tokens, dim), kernels.filled(tokens, dim // 32)
    return BegunNorm(kernels.put(normal(31, dim)), *there, ints)


def check_begun(x: torch.Tensor, plain: torch.Tensor, begun: BegunNorm) -> None:
    """Of a stream x, which is `plain`, as it would be without that."""
    stream = x.cpu().numpy()
    assert torch.equal(x, plain) and torch.equal(begun.out, x * begun.weight)
    squares = (stream * stream).reshape(len(stream), -1, 32).sum(axis=2)
    assert np.allclose(begun.sums.cpu().numpy(), squares, rtol=1e-6)
    assert begun.ints is not None
    check_ints(begun.ints, in_int8(begun.out.cpu().numpy()))


@pytest.mark.parametrize(
    "format, tokens", [("q4_0", 1), ("q8_0", 3), ("f16", 1), ("f16", 16)], indirect=["format"]
)
def test_a_norm_begins_with_the_product_before_it(kernels: Kernels, format: str, tokens: int) -> None:
    """Of each 32 columns by the program that ends last; twice, since programs count themselves."""
    dim, scratch = 64, kernels.scratch()
    w, _ = kernels.rows(format, normal(1, dim, 32))
    for seed in 2, 3:
        h, there = kernels.put(normal(seed, tokens, 32)), normal(seed + 2, tokens, dim)
        x, plain, begun = kernels.put(there), kernels.put(there), begun_norm(kernels, tokens, dim)
        kernels.ops.matmul(plain, w, h, None, True, scratch)
        kernels.ops.matmul(x, w, h, None, True, scratch, None, None, begun)
        check_begun(x, plain, begun)
        assert not bool(scratch.arrivals.any())


def test_a_norm_begins_with_experts_answers(kernels: Kernels) -> None:
    tokens, dim, scratch = 3, 32, kernels.scratch()
    w, _ = kernels.rows("q8_0", normal(1, 2 * dim, 32))
    shares = kernels.put(np.array([[1, 0], [0.5, 0.5], [1, 0]], np.float32))
    h, there = kernels.put(normal(2, tokens, 64)), normal(3, tokens, dim)
    begun = begun_norm(kernels, tokens, dim)
    x, plain = kernels.put(there), kernels.put(there)
    kernels.ops.down_experts(plain, w, h, shares, True, scratch)
    kernels.ops.down_experts(x, w, h, shares, True, scratch, None, begun)
    check_begun(x, plain, begun)


@pytest.mark.parametrize("format, tokens", [("q4_0", 1), ("q6_k", 16), ("f16", 3)], indirect=["format"])
def test_a_norm_begins_with_a_sum_of_bundles(kernels: Kernels, format: str, tokens: int) -> None:
    """Also where those of q6_k are joined for 8 tokens at a time."""
    dim, scratch = 256 if format == "q6_k" else 96, kernels.scratch()
    rows, _ = kernels.rows(format, normal(1, 24, dim))
    h, there = kernels.put(normal(2, tokens, 24)), normal(3, tokens, dim)
    begun = begun_norm(kernels, tokens, dim)
    x, plain = kernels.put(there), kernels.put(there)
    kernels.ops.down(plain, rows, h, True, scratch)
    kernels.ops.down(x, rows, h, True, scratch, begun)
    check_begun(x, plain, begun)


@pytest.mark.parametrize("format, tokens", [("q4_0", 1), ("q4_0", 3), ("f16", 3)], indirect=["format"])
def test_products_end_a_norm_that_has_begun(kernels: Kernels, format: str, tokens: int) -> None:
    """Their sums are divided by the root, before biases and activations."""
    dim, eps = 96, 0.25
    x, sums, bias = normal(1, tokens, dim), np.abs(normal(2, tokens, dim // 32)), normal(3, 32)
    factor = np.float32(1) / np.sqrt(sums.sum(axis=1, keepdims=True) / dim + np.float32(eps))
    squares, mine = Squares(kernels.put(sums), eps), kernels.put(x)
    (gate, a), (up, b) = (kernels.rows(format, normal(i, 32, dim)) for i in (4, 5))
    gates, ups = (np.asarray(met(format, x) @ w.T * factor, np.float32) for w in (a, b))
    out, h = kernels.filled(tokens, 32), kernels.filled(tokens, 32)
    kernels.ops.matmul(out, gate, mine, kernels.put(bias), False, kernels.scratch(), None, squares)
    kernels.check(out, gates + bias)
    more = "relu", 0.0, False, None, None, None, kernels.scratch(), None, 1.0, False, None, None, squares
    kernels.ops.gate_up(h, gate, kernels.put(bias), up, mine, *more)
    kernels.check(h, np.maximum(gates + bias, 0) * ups)


@pytest.mark.parametrize("tokens", [1, 3])
def test_products_read_what_is_in_int8_already(kernels: Kernels, tokens: int) -> None:
    """It is not x here: so it is not made anew. Rows of floats read x."""
    x, other = normal(1, tokens, 96), normal(2, tokens, 96)
    ints = room_for_ints(kernels, x.shape)
    kernels.ops.norm(kernels.filled(tokens, 96), kernels.put(other), None, None, 0.0, False, ints)
    first, a = kernels.rows("q8_0", normal(3, 32, 96))
    plain, b = kernels.rows("f16", normal(4, 32, 96))
    mine, seen = kernels.put(x), met("q8_0", other)
    for w, want in (first, seen @ a.T), (plain, x @ b.T):
        out = kernels.filled(tokens, 32)
        kernels.ops.matmul(out, w, mine, None, False, kernels.scratch(), ints)
        kernels.check(out, want)
    h, none = kernels.filled(tokens, 32), (None, None, None)
    more = "relu", 0.0, False, *none, kernels.scratch(), None, 1.0, False, ints
    kernels.ops.gate_up(h, first, None, plain, mine, *more)
    kernels.check(h, np.maximum(seen @ a.T, 0) * (x @ b.T))
    second, c = kernels.rows("q8_0", normal(5, 9, 32))
    scores = np.asarray(met("q8_0", np.asarray(seen @ a.T, np.float32)) @ c.T, np.float32)
    check_named(kernels, scores, 0, 9, (first, second, False, mine), ints)


@pytest.mark.parametrize("format", ["q4_0", "q5_1", "q8_0", "mxfp4"], indirect=True)
def test_many_tokens_meet_several_blocks_a_turn(kernels: Kernels, format: str) -> None:
    """Other tests have odd numbers of these blocks: one a turn. Of 16 blocks four are."""
    for blocks in 4, 6, 16:
        w, decoded = kernels.rows(format, normal(1, 7, 32 * blocks))
        x, out = normal(2, 17, 32 * blocks), kernels.filled(17, 7)
        kernels.ops.matmul(out, w, kernels.put(x), None, False, kernels.scratch())
        kernels.check(out, reference.matmul(decoded, met(format, x), None))


@pytest.mark.parametrize("format", ["f16", *SIXTEEN], indirect=True)
def test_many_tokens_of_any_size_are_met_in_f16(kernels: Kernels, format: str) -> None:
    """Each is scaled to what f16 has, and one that is no number shows alone."""
    n = 75 if format == "f16" else 512
    w, decoded = kernels.rows(format, normal(1, 9, n))
    x = normal(2, 20, n)
    x *= np.array([1, 1e-38, 1e-30, 1e-4, 1e5, 1e30] + [1] * 14, np.float32)[:, None]
    x[7], x[8, 3], x[9, 74] = 0, np.inf, np.nan
    x[10] = np.where(np.arange(n) == 40, np.float32(1e6), x[10])  # beside it the others are small
    out = kernels.filled(20, 9)
    kernels.ops.matmul(out, w, kernels.put(x), None, False, kernels.scratch())
    got, want = out.cpu().numpy(), reference.matmul(decoded, x, None)
    for token in range(20):
        if token in (8, 9):
            assert not np.isfinite(got[token]).any()
        else:
            check_relative(kernels, got[token], want[token])


def check_relative(kernels: Kernels, got: F32, want: F32) -> None:
    """Held to the reference by the size of the largest."""
    size = max(np.float32(1e-38), np.abs(want).max())
    assert gpu_cases.nmse(got / size, want / size) <= kernels.nmse


# The scales of a row's first and second 256 columns, then those of their minima.
SCALES = [(1e-3, 2e-3, 3e-4, 1e-4), (0, 6e-8, 0, 0), (6e-8, 0, 0, 6e-8), (60000, 60000, 0, 60000)]
SCALES += [(1, 1e-7, 1e-7, 1), (-1e-3, 1e-3, 2e-3, -2e-3), (0, 0, 0, 0), (6e-8, 1, 60000, 6e-8)]


@pytest.mark.parametrize("format", SIXTEEN, indirect=True)
def test_many_tokens_meet_scales_of_any_size(kernels: Kernels, format: str) -> None:
    """In f16, whose numbers are 6e-8 to 65504: all integers that there are, by scales that there may be."""
    data = gpu_cases.noise(format, len(SCALES), 512)
    scales = np.array(SCALES, np.float16)
    for name, part in ("super", scales[:, :2]), ("super_minimum", scales[:, 2:]):
        if name in (planes := quant.planes(format, data)):
            planes[name][:] = np.ascontiguousarray(part).view(np.uint8).reshape(planes[name].shape)
    x, out = normal(2, 17, 512), kernels.filled(17, len(SCALES))
    w, decoded = DeviceRows(kernels.put(data), format, 512), quant.decode(format, data, 512)
    kernels.ops.matmul(out, w, kernels.put(x), None, False, kernels.scratch())
    want = reference.matmul(decoded, x, None)
    for row in range(len(SCALES)):
        check_relative(kernels, out[:, row].cpu().numpy(), want[:, row])


@pytest.mark.parametrize("format", ["f16", *SIXTEEN], indirect=True)
def test_of_many_tokens_no_number_of_them_changes_a_bit(
    kernels: Kernels, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has 32, 64 or 128 of them."""
    if kernels.ops is torch_kernels:
        pytest.skip("torch's products have orders of their own")
    multiply_rows_alike(kernels, monkeypatch)
    w, _ = kernels.rows(format, normal(1, 5, 512))
    x, outs = kernels.put(normal(2, 70, 512)), []
    for tokens in 17, 40, 70:
        outs.append(kernels.filled(tokens, 5))
        kernels.ops.matmul(outs[-1], w, x[:tokens], None, False, kernels.scratch())
    assert all(torch.equal(outs[0], out[:17]) for out in outs) and torch.equal(outs[1], outs[2][:40])


def rope_store_and_attend(kernels: Kernels, c: Attention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own = [kernels.some(x) for x in (c.heads.q_norm, c.heads.k_norm, c.heads.sinks)]
    h: Any = replace(c.heads, q_norm=own[0], k_norm=own[1], sinks=own[2])
    qkv, k, v = (kernels.put(x) for x in (c.qkv, c.k, c.v))
    batch = c.batch
    paged = [kernels.put(x) for x in (batch.positions, batch.sequence, batch.block_table)]
    kernels.ops.rope_store(qkv, h, kernels.some(c.cos), kernels.some(c.sin), *paged, k, v)
    out = kernels.filled(len(c.qkv), h.n * h.dim)
    kernels.ops.attention(out, qkv, h, *paged, k, v, kernels.scratch())
    if len(out) <= FEW and h.dim % 32 == 0:
        alike, ints = kernels.filled(*out.shape), room_for_ints(kernels, out.shape)
        kernels.ops.attention(alike, qkv, h, *paged, k, v, kernels.scratch(), ints)
        assert torch.equal(alike, out)
        check_ints(ints, in_int8(out.cpu().numpy()))
    return out, k, v


ATTENTIONS = {
    "one head": attention_case(heads(1, 1, 64), [1], 1, 64),
    "grouped": attention_case(heads(6, 2, 64), [37, 5], 1, 64),
    "head_dim 80, turned in part": attention_case(heads(2, 1, 80), [70], 2, 32),
    "head_dim 128, no rope": attention_case(heads(2, 2, 128), [33], 3, 0),
    "window": attention_case(heads(2, 1, 64, window=20), [190, 3], 2, 64),
    "window within a block": attention_case(heads(2, 1, 64, window=3), [66, 129], 2, 64),
    "softcap": attention_case(heads(4, 2, 64, softcap=2.0, scale=0.3), [150], 1, 64),
    "small heads, blocks of 16": attention_case(heads(2, 1, 16), [20, 40], 2, 16, block=16),
    "normed": attention_case(heads(4, 2, 64, q_norm=normal(1, 64), k_norm=normal(2, 64)), [40], 2, 64),
    "normed behind rope": attention_case(
        heads(4, 2, 64, q_norm=normal(1, 64), k_norm=normal(2, 64), norms_last=True), [40], 2, 32
    ),
    "each head normed by its own": attention_case(
        heads(4, 2, 48, q_norm=normal(1, 192), k_norm=normal(2, 96), own_norms=True), [40], 2, 32
    ),
    "large heads in pieces": attention_case(heads(2, 1, 208, softcap=3.0), [40, 70], 2, 208),
    "values normed": attention_case(heads(4, 2, 64, v_norm=np.ones(64, np.float32)), [40], 2, 64),
    "another layer's keys": attention_case(
        heads(4, 2, 64, q_norm=normal(1, 64), shares=True, window=30), [40, 9], 2, 64
    ),
    "a window of chunks": attention_case(heads(2, 1, 64, window=40, chunked=True), [79, 81, 200], 3, 64),
    "chunks within a block": attention_case(heads(2, 1, 16, window=5, chunked=True), [66, 130], 6, 16),
    "queries that grow": attention_case(heads(2, 1, 64, temperature=0.3, temperature_span=7), [40, 5], 3, 0),
    "sinks": attention_case(heads(4, 2, 64, sinks=4 * normal(3, 4)), [300, 7], 2, 64),
    "sinks, window, softcap": attention_case(
        heads(3, 1, 64, sinks=4 * normal(4, 3), window=20, softcap=2.0), [190, 3], 2, 64
    ),
    "a prompt": attention_case(heads(2, 1, 16), [40, 33], 20, 16),
    "a prompt in longer spans": attention_case(heads(1, 1, 16), [270], 17, 16),
    "a prompt of three heads a key": attention_case(heads(6, 2, 48, softcap=2.0), [70, 9, 33], 24, 48),
    "a prompt of many heads a key": attention_case(heads(70, 1, 16), [40], 20, 16),
    "a prompt of large heads": attention_case(heads(2, 1, 208), [40, 9], 17, 208),
    "a prompt in a window": attention_case(heads(2, 1, 16, window=20), [190, 3, 60], 40, 16),
    "a prompt in chunks": attention_case(heads(2, 1, 16, window=24, chunked=True), [90, 60], 40, 16),
    "several spans": attention_case(heads(2, 1, 16), [300, 128, 129], 1, 16),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention(kernels: Kernels, case: str) -> None:
    c = ATTENTIONS[case]
    out, k, v = rope_store_and_attend(kernels, c)
    want, k_want, v_want = c.expected()
    kernels.check(out, want)
    for got, stored in (k, k_want), (v, v_want):
        assert np.array_equal(np.isnan(got.cpu().numpy()), np.isnan(stored))
        assert gpu_cases.nmse(np.nan_to_num(got.cpu().numpy()), np.nan_to_num(stored)) <= 1e-8  # f16 rounds


def test_a_prompt_where_there_is_no_wgmma(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards before sm_90 have tiles of 32 queries, and heads of 65 to 128 in two pieces."""
    if kernels.ops is torch_kernels:
        pytest.skip("torch has no tiles")
    c = attention_case(heads(3, 1, 80, softcap=2.0), [40, 9], 17, 80)
    monkeypatch.setattr(kernels.ops, "by_warpgroups", lambda: False)
    kernels.check(rope_store_and_attend(kernels, c)[0], c.expected()[0])


PROJECTED = {
    "all turned": attention_case(heads(4, 2, 16), [37, 5, 130], 1, 16),
    "an odd number of pairs": attention_case(heads(1, 1, 24), [40, 9], 2, 24),
    "without rope": attention_case(heads(2, 1, 16), [70], 3, 0),
    "turned in part": attention_case(heads(2, 1, 16), [40], 2, 8),
    "normed": attention_case(heads(2, 1, 16, q_norm=normal(1, 16), k_norm=normal(2, 16)), [40], 2, 16),
    "another layer's keys": attention_case(heads(4, 2, 16, shares=True), [40, 9], 2, 16),
    "queries that grow": attention_case(heads(2, 1, 16, temperature=0.3, temperature_span=7), [40], 3, 0),
    "a prompt": attention_case(heads(2, 1, 16), [40, 33], 20, 16),
}


@pytest.mark.parametrize("case", PROJECTED)
@pytest.mark.parametrize("format", ["q4_0", "f16"], indirect=True)
def test_heads_are_made_turned_and_stored(kernels: Kernels, format: str, case: str) -> None:
    """Not a bit is other than that of a product and of `rope_store` behind it; matrices differ in format."""
    c = PROJECTED[case]
    h: Any = replace(c.heads, q_norm=kernels.some(c.heads.q_norm), k_norm=kernels.some(c.heads.k_norm))
    x, t, n = kernels.put(normal(1, len(c.qkv), 96)), len(c.qkv), h.n * h.dim
    sizes = ((format, n), ("f16" if format == "q4_0" else "q8_0", h.width - n))
    made = [kernels.rows(f, normal(1, size, 96))[0] for f, size in sizes if size]
    parts = [(w, kernels.put(normal(9, w.rows)) if i else None) for i, w in enumerate(made)]
    turn = kernels.some(c.cos), kernels.some(c.sin)
    paged = [kernels.put(y) for y in (c.batch.positions, c.batch.sequence, c.batch.block_table)]
    squares = Squares(kernels.put(np.abs(normal(2, t, 3))), 1e-5) if t <= FEW else None
    outs = []
    for at_once in (True, False):
        qkv, k, v = kernels.filled(t, h.width), kernels.put(c.k), kernels.put(c.v)
        if at_once:
            more = kernels.scratch(), None, squares
            kernels.ops.project_heads(qkv, parts, x, h, *turn, *paged, k, v, *more)
        else:
            first = 0
            for w, bias in parts:
                mine, more = qkv[:, first : first + w.rows], (kernels.scratch(), None, squares)
                kernels.ops.matmul(mine, w, x, bias, False, *more)
                first += w.rows
            kernels.ops.rope_store(qkv, h, *turn, *paged, k, v)
        outs.append((qkv[:, :n], k, v))
    for got, want in zip(*outs, strict=True):
        assert torch.equal(got.nan_to_num(), want.nan_to_num()) and torch.equal(got.isnan(), want.isnan())
    assert not bool(outs[0][0].isnan().any())


def test_a_tile_of_tokens_changes_no_bit(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that share tiles with others, or with a broken sequence, find the same."""
    if kernels.ops is torch_kernels:
        pytest.skip("torch's products have orders of their own")
    multiply_rows_alike(kernels, monkeypatch)
    c = attention_case(heads(5, 1, 16, window=30), [40, 33, 7, 90], 20, 16)
    qkv, k, v = (kernels.put(x) for x in (c.qkv, c.k, c.v))
    paged = [kernels.put(x) for x in (c.batch.positions, c.batch.sequence, c.batch.block_table)]
    kernels.ops.rope_store(qkv, c.heads, kernels.some(c.cos), kernels.some(c.sin), *paged, k, v)

    def attended(first: int) -> torch.Tensor:
        """Rows from `first` on, by themselves."""
        t = len(qkv) - first
        assert t > FEW and span_of(t) == span_of(len(qkv)), "sums are joined alike"
        out, where = kernels.filled(t, c.heads.n * c.heads.dim), (x[first:] for x in paged[:2])
        more = *where, paged[2], k, v, kernels.scratch()
        kernels.ops.attention(out, qkv[first:], c.heads, *more)
        return out

    whole = attended(0)
    assert bool(whole.isfinite().all())
    for first in 1, 2:
        assert torch.equal(attended(first), whole[first:])
    broken = paged[1] == 1
    qkv[broken] = float("nan")
    pages = paged[2][1]
    k[pages[pages >= 0].long()] = v[pages[pages >= 0].long()] = float("nan")
    again = attended(0)
    assert torch.equal(again[~broken], whole[~broken]) and bool(again[broken].isnan().all())


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("format", ["f16", "q8_0", "q4_0"], indirect=True)
def test_products_of_heads(kernels: Kernels, format: str, tokens: int) -> None:
    """Each head's own rows; inputs and outputs are parts of wider heads."""
    n, columns, each = 3, whole(format, 20), 9 if kernels.slow else 37
    w, decoded = kernels.rows(format, normal(1, n * each, columns))
    x, out = normal(2, tokens, n, columns + 5), kernels.filled(tokens, n, each + 3)
    kernels.ops.head_products(out[:, :, :each], w, kernels.put(x)[:, :, :columns])
    want = np.einsum("bhc,hrc->bhr", x[..., :columns], decoded.reshape(n, each, columns))
    kernels.check(out[:, :, :each], want)
    assert bool(out[:, :, each:].isnan().all())


LATENTS = {  # heads, (rank, nope, rope, value), lengths, tokens of each
    "odd": (3, (37, 13, 8, 11), [37, 5], 1),
    "many heads, several spans": (37, (16, 5, 4, 3), [300, 128, 129], 1),
    "in parts": (2, (200, 24, 16, 20), [70], 2),
    "a prompt": (2, (32, 8, 8, 8), [40, 33], 20),
    "a prompt in longer spans": (1, (16, 4, 2, 4), [270], 17),
}


@pytest.mark.parametrize("case", LATENTS)
def test_latent_attention(kernels: Kernels, case: str) -> None:
    """Slots that no position has reached hold NaN."""
    n, (rank, nope, rope, value), lengths, tokens = LATENTS[case]
    latent, block = Latent(rank, nope, rope, value, norm_eps=1e-5), 32
    h = heads(n, 1, rank + rope, scale=0.3, latent=latent)
    shape = KVShape(sum(-(-x // block) for x in lengths), 1, h.dim, block, latent=True)
    kv = in_ram(0, shape)
    kv.k[:] = np.nan
    table, first, positions, sequence = np.full((len(lengths), 10), -1, np.int32), shape.pages, [], []
    for s, length in enumerate(lengths):
        for b in range(-(-length // block)):
            first -= 1
            table[s, b] = first
            kv.k[first, : length - b * block] = normal(s + b, h.dim, min(block, length - b * block)).T
        positions += range(length - min(tokens, length), length)
        sequence += [s] * min(tokens, length)
    at, mine = np.array(positions, np.int32), np.array(sequence, np.int32)
    angles = at[:, None] * np.array([0.7**i for i in range(rope // 2)], np.float32)
    cos, sin, t = np.cos(angles), np.sin(angles), len(at)
    (k_rows, k_b), (v_rows, v_b) = (
        kernels.rows("f16", normal(i, n * r, c)) for i, (r, c) in enumerate(((rank, nope), (value, rank)))
    )
    w, rows = LatentMatrices(normal(5, rank), k_b, v_b), normal(6, t, n * (nope + rope) + h.dim)
    device = [kernels.put(x) for x in (at, mine, table, kv.k)]
    q, found, out = (kernels.filled(t, n, size) for size in (h.dim, rank, value))
    queries = kernels.put(rows[:, : -h.dim]).view(t, n, -1)
    ops, turned = kernels.ops, (kernels.put(cos), kernels.put(sin))
    ops.head_products(q[:, :, :rank], k_rows, queries[:, :, :nope])
    key = kernels.put(rows[:, -h.dim :])
    ops.latent_store(q, queries, key, h, kernels.put(w.kv_norm), *turned, *device)
    ops.latent_attention(found, q, h, *device, kernels.scratch())
    ops.head_products(out, v_rows, found)
    batch = Batch(at, at, mine, table, at)
    want = reference._latent_attention(h, w, rows, reference.step(batch, block, cos, sin), kv)
    kernels.check(out.view(t, -1), want)
    got = device[3].cpu().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(kv.k))
    assert gpu_cases.nmse(np.nan_to_num(got), np.nan_to_num(kv.k)) <= 1e-8


@pytest.mark.parametrize("each", [True, False])
def test_gates_of_numbers_and_of_tokens(kernels: Kernels, each: bool) -> None:
    x, gate = normal(1, 3, 1100), 3 * normal(2, 3, 1100 if each else 1)
    y = kernels.put(x)
    kernels.ops.open(y, kernels.put(gate))
    kernels.check(y, x / (1 + np.exp(-gate)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(kernels: Kernels, activation: str) -> None:
    gate, up = 4 * normal(1, 3, 50), normal(2, 3, 50)
    gate[0, :4] = 0, -0.0, 0.05, -30
    plain = activations.activate(gate, activation, 0.05, 1.702)
    for u, relu, want in (
        (None, False, plain),
        (up, False, plain * activations.up_factor(up, activation, 0.05, False)),
        (up, True, plain * np.maximum(up, 0)),
    ):
        out = kernels.put(gate)
        kernels.ops.activate(out, out, kernels.some(u), activation, 0.05, relu, 1.702)
        kernels.check(out, want)


def test_a_gate_that_is_no_number_stays_none(kernels: Kernels) -> None:
    for activation in ACTIVATIONS:
        out = kernels.filled(1, 3)
        kernels.ops.activate(out, out, None, activation, 0.05, False)
        assert bool(out.isnan().all())


# ---- FFNs that skip neurons


def packed(bits: Any) -> Any:
    return np.packbits(bits, axis=1, bitorder="little")


def expected_h(
    gate: F32,
    bias: F32 | None,
    up: F32 | None,
    x: F32,
    activation: str,
    up_relu: bool,
    named: Any,
    weights: F32 | None,
    x_up: F32 | None = None,
) -> tuple[F32, list[int]]:
    """h and the counts, as `reference.ffn_add` computes them. x_up: what up meets, if not x."""
    a = activations.activate(reference.matmul(gate, x, bias), activation, 0.05)
    wanted = np.ones_like(a, bool) if named is None else np.broadcast_to(named.any(axis=0), a.shape)
    share = None if weights is None else np.repeat(weights, len(gate) // weights.shape[1], axis=1)
    if share is not None:
        wanted = wanted & (share != 0)
    a = np.where(wanted, a, np.float32(0))
    opened = int((a != 0).any(axis=0).sum())
    if up is not None:
        u = reference.matmul(up, x if x_up is None else x_up, None)
        a = a * (np.maximum(u, 0) if up_relu else u)
    counts = [(a != 0).sum(), opened, wanted.any(axis=0).sum(), (a != 0).any(axis=0).sum()]
    return a if share is None else a * share, [int(n) for n in counts]


def ffn_case(
    kernels: Kernels,
    format: str,
    tokens: int,
    n: int,
    dim: int,
    activation: str = "relu",
    up_relu: bool = False,
    gated: bool = True,
    biased: bool = False,
    share: float | None = None,  # of neurons named for a token
    weights: F32 | None = None,
) -> None:
    dim = whole(format, dim)
    gate, g = kernels.rows(format, normal(1, n, dim), pad=4)
    up, u = kernels.rows(format, normal(2, n, dim), skip=4)
    x = normal(3, tokens, dim) / np.float32(dim**0.5)
    bias = normal(4, n) - np.float32(1) if biased else None
    named = None if share is None else np.random.default_rng(5).random((tokens, n)) < share
    seen = met(format, x)
    want, numbers = expected_h(g, bias, u if gated else None, seen, activation, up_relu, named, weights)
    h, counts = kernels.filled(tokens, n), kernels.put(np.array([1, 2, 3, 4], np.int32))
    # Both are parts of wider rows: of a divided layer's names, and of all experts' weights.
    wide = None if named is None else np.pad(packed(named), ((0, 0), (0, 3)), constant_values=0xFF)
    bits = None if wide is None else kernels.put(wide)[:, :-3]
    each = None if weights is None else kernels.put(np.pad(weights, ((0, 0), (0, 3))))[:, :-3]
    more = activation, 0.05, up_relu, bits, each, counts, kernels.scratch()
    kernels.ops.gate_up(h, gate, kernels.some(bias), up if gated else None, kernels.put(x), *more)
    kernels.check(h, want)
    differ = int(((h.cpu().numpy() != 0) != (want != 0)).sum())
    if tokens <= FEW or kernels.nmse < 1e-9:
        assert differ == 0
        assert counts.tolist() == [n + i + 1 for i, n in enumerate(numbers)]
    else:  # tensor cores round a gate near 0 to either side
        assert differ <= 1 + want.size // 1000
        assert counts[0] == (h != 0).sum() + 1 and counts[3] == (h != 0).any(dim=0).sum() + 4
        assert abs(int(counts[1]) - numbers[1] - 2) <= differ and counts[2] == numbers[2] + 3


@each_format_and_batch
def test_gate_and_up(kernels: Kernels, format: str, tokens: int) -> None:
    n = 19 if kernels.slow else 70
    ffn_case(kernels, format, tokens, n // 2, 96, biased=True)
    ffn_case(kernels, format, tokens, n, 64, share=0.1)


@pytest.mark.parametrize("activation", SPARSE_ACTIVATIONS)
@pytest.mark.parametrize("up_relu", [False, True])
def test_gates_of_every_kind(kernels: Kernels, activation: str, up_relu: bool) -> None:
    ffn_case(kernels, "f16", 2, 20, 40, activation, up_relu)
    ffn_case(kernels, "f16", 2, 1, 40, activation, up_relu, share=1.0)
    ffn_case(kernels, "q8_0", 1, 9, 32, activation, gated=False, biased=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_dense_ffns_gate_and_up_are_one_call(kernels: Kernels, activation: str) -> None:
    """All its neurons, uncounted; gate and up differ in format."""
    n, dim = 11, 64
    gate, g = kernels.rows("q8_0", normal(1, n, dim), pad=4)
    up, u = kernels.rows("f16", normal(2, n, dim))
    for tokens, gated, up_relu in (1, True, False), (3, True, True), (2, False, False):
        x, bias = normal(3, tokens, dim), normal(4, n)
        h = kernels.filled(tokens, n)
        what = kernels.put(x), activation, 0.05, up_relu, None, None, None, kernels.scratch(), None, 1.702
        kernels.ops.gate_up(h, gate, kernels.put(bias), up if gated else None, *what)
        seen = met("q8_0", x)
        want = activations.activate(reference.matmul(g, seen, bias), activation, 0.05, 1.702)
        if gated:
            y = reference.matmul(u, x, None)
            want *= np.maximum(y, 0) if up_relu else activations.up_factor(y, activation, 0.05, False)
        kernels.check(h, want)


def test_where_nothing_is_named_nothing_is_active(kernels: Kernels, format: str) -> None:
    for tokens in 1, 17:
        ffn_case(kernels, format, tokens, 37, 64, share=0.0)


def down_case(kernels: Kernels, format: str, tokens: int, n: int, dim: int, active: float, add: bool) -> None:
    rows, w = kernels.rows(format, normal(1, n, dim), skip=4)
    h = np.where(np.random.default_rng(2).random((tokens, n)) < active, normal(3, tokens, n), np.float32(0))
    there = normal(4, tokens, dim)
    out = kernels.put(there) if add else kernels.filled(tokens, dim)
    kernels.ops.down(out, rows, kernels.put(h), add, kernels.scratch())
    kernels.check(out, (h @ w) + (there if add else 0))


@each_format_and_batch
def test_down(kernels: Kernels, format: str, tokens: int) -> None:
    for dim in columns(format)[-1:] if kernels.slow else columns(format):
        down_case(kernels, format, tokens, 150, dim, 0.2, True)
    down_case(kernels, format, tokens, 1, whole(format, 64), 1.0, False)


def test_down_of_nothing_adds_nothing(kernels: Kernels) -> None:
    for tokens, add in (1, False), (1, True), (17, False):
        down_case(kernels, "q8_0", tokens, 40, 64, 0.0, add)


def test_rows_that_no_token_needs_do_not_matter(kernels: Kernels) -> None:
    """They are not read: here they are NaN."""
    w = normal(1, 40, 64)
    h = np.where(np.arange(40) % 5 == 0, normal(2, 2, 40), np.float32(0))
    broken = np.where((np.arange(40) % 5 == 0)[:, None], w, np.float32(np.nan))
    rows, _ = kernels.rows("f32", broken)
    out = kernels.filled(2, 64)
    kernels.ops.down(out, rows, kernels.put(h), False, kernels.scratch())
    kernels.check(out, h @ w)


def test_neurons_of_many_experts_are_added_by_few_programs(kernels: Kernels) -> None:
    """More chunks of neurons than `down` joins: a program takes several."""
    down_case(kernels, "f32", 1, 128 * 97 + 5, 32, 0.01, False)


# ---- mixtures


@each_format_and_batch
def test_an_expert_weighs_its_neurons_and_is_computed_for_its_own_tokens(
    kernels: Kernels, format: str, tokens: int
) -> None:
    """To the last expert nobody goes."""
    experts, n = 4, 9 if kernels.slow else 15
    weights = activations.route(normal(7, tokens, experts) - np.array([0, 0, 0, 9], np.float32), 2)
    ffn_case(kernels, format, tokens, experts * n, 64, biased=True, weights=weights)
    ffn_case(kernels, format, tokens, n, 64, up_relu=True, weights=weights[:, 1:2])
    ffn_case(kernels, format, tokens, n, 64, share=0.3, weights=weights[:, 3:])


@pytest.mark.parametrize("tokens", [2, 17])
def test_what_an_expert_makes_of_others_tokens_does_not_matter(kernels: Kernels, tokens: int) -> None:
    """Token 0 is broken, and goes to the first expert only; there it shows."""
    n, dim = 6, 32
    rows = [kernels.rows("f32", normal(i, 2 * n, dim)) for i in (1, 2)]
    x, weights = normal(3, tokens, dim), np.tile(np.array([[0.25, 0.75]], np.float32), (tokens, 1))
    x[0], weights[0] = np.nan, (1, 0)
    h, counts = kernels.filled(tokens, 2 * n), kernels.put(np.zeros(4, np.int32))
    more = "relu", 0.0, False, None, kernels.put(weights), counts, kernels.scratch()
    kernels.ops.gate_up(h, rows[0][0], None, rows[1][0], kernels.put(x), *more)
    got = h.cpu().numpy()
    assert np.isnan(got[0, :n]).all() and (got[0, n:] == 0).all()
    want, _ = expected_h(rows[0][1], None, rows[1][1], x[1:], "relu", False, None, weights[1:])
    kernels.check(h[1:], want)


@pytest.mark.parametrize("tokens", [1, 17])
def test_a_share_that_is_no_number_shows(kernels: Kernels, tokens: int) -> None:
    gate, _ = kernels.rows("f32", np.abs(normal(1, 8, 16)))
    weights = np.tile(np.array([[np.nan, 0]], np.float32), (tokens, 1))
    h, x = kernels.filled(tokens, 8), kernels.put(np.abs(normal(2, tokens, 16)))
    more = kernels.put(weights), kernels.put(np.zeros(4, np.int32)), kernels.scratch()
    kernels.ops.gate_up(h, gate, None, None, x, "relu", 0.0, False, None, *more)
    assert bool(h[:, :4].isnan().all()) and bool((h[:, 4:] == 0).all())


@pytest.mark.parametrize("experts, active", [(1, 1), (3, 2), (8, 2), (60, 4)])
def test_routes(kernels: Kernels, experts: int, active: int) -> None:
    logits = np.round(normal(1, 20, experts), 1)  # so that some are equal
    out = kernels.filled(20, experts)
    kernels.ops.route(out, kernels.put(logits), active, PLAIN_ROUTER, None)
    want = activations.route(logits, active)
    kernels.check(out, want)
    assert np.array_equal(out.cpu().numpy() != 0, want != 0)


ROUTERS = {
    "DeepSeek-V3's": Router(score="sigmoid", weights="normalised", epsilon=1e-20, scale=2.5, groups=4,
                            groups_kept=2, group_rule="sum2"),
    "DeepSeek-V2's": Router(weights="score", scale=16.0, groups=3, groups_kept=1),
    "ERNIE's": Router(weights="normalised", epsilon=0.3, epsilon_floor=True),
    "Llama 4's": Router(score="logits", weights="score"),
    "GLM's": Router(score="sigmoid", weights="normalised", epsilon=1e-20),
    "Phi's": Router(score="logits", weights="mixed", epsilon=0.2),
}  # fmt: skip


@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("name", ROUTERS)
def test_routes_by_every_rule(kernels: Kernels, name: str, biased: bool) -> None:
    """Ties among experts and groups, and NaNs; with a bias, also a number for each expert."""
    rule = replace(ROUTERS[name], selection_bias=biased)
    logits = np.round(normal(1, 30, 12), 1)
    logits[20:25, 7] = np.nan
    bias = np.round(normal(2, 12), 1) if biased else None
    out = kernels.filled(30, 12)
    scale = normal(3, 12) if biased else np.ones(12, np.float32)
    own = (kernels.put(bias), kernels.put(scale)) if biased else (None,)
    kernels.ops.route(out, kernels.put(logits), 3, rule, *own)
    found, want = out.cpu().numpy(), activations.route(logits, 3, rule, bias) * scale
    assert np.array_equal(np.isnan(found), np.isnan(want)) and np.array_equal(found != 0, want != 0)
    assert np.allclose(found, want, rtol=1e-5, atol=1e-8, equal_nan=True)


def test_a_logit_that_is_no_number_is_chosen(kernels: Kernels) -> None:
    logits = np.array([[1, np.nan, 3, 2], [np.nan, 9, np.nan, 0]], np.float32)
    out = kernels.filled(2, 4)
    kernels.ops.route(out, kernels.put(logits), 2, PLAIN_ROUTER, None)
    assert np.array_equal(out.cpu().numpy(), activations.route(logits, 2), equal_nan=True)


# ---- predictors


def check_named(
    kernels: Kernels, scores: F32, hot: int, n: int, parts: tuple[Any, ...], ints: torch.Tensor | None = None
) -> None:
    """Each neuron's threshold lies between two tokens' scores, as far from both as it can."""
    ordered, middle = np.sort(scores, axis=0), len(scores) // 2
    threshold = (ordered[middle] + ordered[middle - 1]) / 2 if middle else ordered[0] - 1
    named = torch.full((len(scores), -(-n // 8)), 0xFF, dtype=torch.uint8, device=kernels.device)
    first, second, relu, x = parts
    at = kernels.put(threshold.astype(np.float32))
    kernels.ops.predict(named, first, second, at, hot, relu, x, kernels.scratch(), ints)
    want = scores >= threshold
    want[:, :hot] = True
    assert np.array_equal(named.cpu().numpy(), packed(want))


@pytest.mark.parametrize("tokens", SOME)
@pytest.mark.parametrize("relu", [True, False])
def test_predictors_of_two_matrices(kernels: Kernels, tokens: int, relu: bool) -> None:
    for format, dim, rank, n in ("q8_0", 96, 32, 37), ("f16", 33, 32, 9):
        first, a = kernels.rows(format, normal(1, rank, dim))
        second, b = kernels.rows("q8_0", normal(2, n, rank))
        x = normal(3, tokens, dim)
        code = met(format, x) @ a.T
        code = met("q8_0", np.maximum(code, 0) if relu else code)
        scores = np.asarray(code @ b.T, np.float32)
        parts = first, second, relu, kernels.put(x)
        check_named(kernels, scores, 5, n, parts)


@pytest.mark.parametrize("tokens", SOME)
@pytest.mark.parametrize("dim", [8, 64, 77])
def test_predictors_of_signs(kernels: Kernels, tokens: int, dim: int) -> None:
    n = 21
    signs = packed(normal(1, n, dim) > 0)
    x, at = normal(2, tokens, dim), np.float32(dim % 2) + np.arange(n, dtype=np.float32) - 10
    x[0, :2] = 0, np.nan
    p = LayerPredictor("sign", None, None, signs, at, 3)
    named = kernels.put(np.full((tokens, 3), 0xFF, np.uint8))
    rows = DeviceRows(kernels.put(signs), "signs", dim)
    kernels.ops.predict(named, None, rows, kernels.put(at), 3, False, kernels.put(x), kernels.scratch())
    assert np.array_equal(named.cpu().numpy(), packed(p.predicted(x)))


def test_a_score_that_is_no_number_is_named(kernels: Kernels) -> None:
    second, _ = kernels.rows("f32", normal(1, 9, 8))
    named = kernels.put(np.zeros((1, 2), np.uint8))
    at = kernels.put(np.full(9, 1e9, np.float32))
    kernels.ops.predict(named, None, second, at, 0, False, kernels.filled(1, 8), kernels.scratch())
    assert named.tolist() == [[0xFF, 1]]


# ---- what is true of all


def test_two_runs_give_equal_bits(kernels: Kernels) -> None:
    c = ATTENTIONS["several spans"]
    first, second = (rope_store_and_attend(kernels, c)[0] for _ in range(2))
    assert torch.equal(first, second)
    rows, _ = kernels.rows("q8_0", normal(1, 300, 64))
    h = kernels.put(normal(2, 2, 300))
    outs = [kernels.filled(2, 64) for _ in range(2)]
    for out in outs:
        kernels.ops.down(out, rows, h, False, kernels.scratch())
    assert torch.equal(*outs)


def test_torch_decodes_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix that is larger than the memory left for that, on a card without Triton."""
    sizes: list[int] = []
    decode = torch_kernels._decode

    def seen(w: DeviceRows, data: torch.Tensor) -> torch.Tensor:
        sizes.append(len(data) * w.columns)
        return decode(w, data)

    monkeypatch.setattr(torch_kernels, "PIECE", 999)
    monkeypatch.setattr(torch_kernels, "_decode", seen)
    table = Kernels(torch_kernels, DEVICE, 1e-10, slow=False)
    rows, _ = table.rows("q8_0", normal(1, 40, 64))
    out, wide = table.filled(2, 40), table.filled(2, 64)
    torch_kernels.matmul(out, rows, table.put(normal(2, 2, 64)), None, False, table.scratch())
    torch_kernels.down(wide, rows, table.put(normal(3, 2, 40)), False, table.scratch())
    shares = table.put(np.ones((2, 2), np.float32))
    torch_kernels.down_experts(
        table.filled(2, 20), rows, table.put(normal(4, 2, 128)), shares, False, table.scratch()
    )
    assert sizes == [15 * 64, 15 * 64, 10 * 64] * 2 + [15 * 64, 5 * 64] * 2


def test_a_products_bits_do_not_depend_on_company(
    kernels: Kernels, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 16 tokens: alone, among others, and with fewer rows a program."""
    if kernels.ops is torch_kernels:
        pytest.skip("torch's products have orders of their own")
    n = columns(format)[-1]
    w, _ = kernels.rows(format, normal(1, 5, n))
    x = kernels.put(normal(2, 16, n))
    outs = []
    for tokens, programs in (1, 1), (1, 3), (3, 1), (16, 1):
        monkeypatch.setattr(kernels.ops, "DOT_PROGRAMS", programs)
        out = kernels.filled(tokens, 5)
        kernels.ops.matmul(out, w, x[:tokens], None, False, kernels.scratch())
        outs.append(out[0])
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("format", ["q4_0", "f16"], indirect=True)
def test_a_norms_bits_do_not_depend_on_company(kernels: Kernels, format: str) -> None:
    """One that begins with a product and ends with another: up to 16 tokens."""
    if kernels.ops is torch_kernels:
        pytest.skip("torch's products have orders of their own")
    dim, outs = 32, list[torch.Tensor]()
    w, _ = kernels.rows(format, normal(1, dim, dim))
    h, there = kernels.put(normal(2, 16, dim)), normal(3, 16, dim)
    for tokens in 1, 16:
        x, y = kernels.put(there[:tokens]), kernels.filled(tokens, dim)
        begun = begun_norm(kernels, tokens, dim)
        kernels.ops.matmul(x, w, h[:tokens], None, True, kernels.scratch(), None, None, begun)
        more = kernels.scratch(), begun.ints, Squares(begun.sums, 1e-5)
        kernels.ops.matmul(y, w, begun.out, None, False, *more)
        outs.append(y[0])
    assert all(torch.equal(outs[0], out) for out in outs)


def test_scratch_is_enough_for_every_smaller_call() -> None:
    s = gpu_cases.SIZES
    made = Scratch.of(s, "cpu")
    assert made.floats.nbytes == s.scratch_bytes
    for tokens in range(1, s.tokens + 1):
        for positions in range(32, s.positions + 1, 32):
            made.take(tokens, s.heads, spans(positions, tokens), s.head_dim + 2)


def test_both_tables_have_the_same_functions() -> None:
    triton_kernels = pytest.importorskip(
        "thermocline.ops.kernels.triton_kernels", reason="triton is not installed"
    )

    def public(module: Any) -> dict[str, str]:
        there = inspect.getmembers(module, inspect.isfunction)
        own = {n: str(inspect.signature(f)) for n, f in there if f.__module__ == module.__name__}
        return {n: s for n, s in own.items() if not n.startswith("_") and n != "launch"}

    assert public(torch_kernels) == public(triton_kernels)


# ---- tokens

DRAWS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(),
    SamplingParams(temperature=1.3, top_k=CANDIDATES, top_p=1.0, min_p=0.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.0, logit_bias={7: -np.inf}),
    SamplingParams(temperature=3.0, top_k=9, top_p=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.0, min_p=0.0),
    SamplingParams(temperature=1e-9, top_k=1, top_p=1.0, min_p=1.0),
]
# Of one program, of two, and of so many that their candidates take a second pass.
VOCABULARIES = (100, 257, 1500)


def chosen(kernels: Kernels, logits: F32, draws: list[TokenDraw], scale: float = 1.0) -> list[ChosenToken]:
    rows, n = logits.shape
    sizes = choice_sizes(n)
    wide = kernels.put(np.pad(logits, ((0, 0), (0, 3)), constant_values=1e9))[:, :n]  # rows with a pitch
    ids, found = (torch.full(shape, -5, dtype=torch.int32, device=DEVICE) for shape in ((rows,), (rows, 3)))
    keys = torch.full((rows * sum(sizes),), 1 << 62, dtype=torch.int64, device=DEVICE)
    sums = torch.full((rows * sizes[0] // CANDIDATES,), 77, dtype=torch.int32, device=DEVICE)
    kernels.ops.choose(ids, found, wide, scale, kernels.put(choosing.as_numbers(draws)), keys, sums)
    made = [choosing.as_choice(*row) for row in found.tolist()]
    assert ids.tolist() == [choice.token for choice in made]  # what the next step reads
    return made


@pytest.mark.parametrize("n", VOCABULARIES)
@pytest.mark.parametrize("steps", [1, 0.25], ids=["distinct", "with ties"])
def test_a_token_is_the_one_that_the_sampler_chooses(
    kernels: Kernels, n: int, steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sizes, "KEYS", 256)
    x = 3 * normal(n, len(DRAWS), n)
    if steps < 1:
        x = np.round(x / np.float32(steps)) * np.float32(steps)  # zeros of both signs, too
    best = x.argmax(axis=1).tolist()
    samplers = [Sampler(replace(p, seed=3), n, banned=(best[1],) * p.ignore_eos) for p in DRAWS]
    for _ in range(1 if kernels.slow else 30):
        draws = [draw for s in samplers if (draw := s.draw())]
        found = chosen(kernels, x, draws, 0.5)
        half = x * np.float32(0.5)
        assert [c.token for c in found] == [s.sample(row) for s, row in zip(samplers, half, strict=True)]
        assert [c.digest for c in found] == [reference.logits_digest(row) for row in half]
        assert all(c.odd is None for c in found)
    assert found[1].token != best[1]


@pytest.mark.parametrize("odd", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_logit_that_is_no_number_is_found(kernels: Kernels, odd: float) -> None:
    x = normal(1, 2, 100)
    x[0, [80, 70]] = odd
    first, second = chosen(kernels, x, [TokenDraw(1, 1.0, 0.0, 1.0, 0.0, (70,))] * 2)
    assert first.token == 70 and first.odd is not None and str(first.odd) in (str(odd), "nan", "-nan")
    assert second.odd is None and second.token == x[1].argmax()


def test_softcap(kernels: Kernels) -> None:
    x = 40 * normal(1, 3, 50)
    mine = kernels.put(x)
    kernels.ops.softcap(mine, 30.0)
    kernels.check(mine, np.float32(30) * np.tanh(x / np.float32(30)))
