"""The GPU's ops in Triton: the functions of `torch_kernels`, launched. Contracts are stated there.

Owns grids and configurations; device code is in the other files here. Nothing is allocated, waited
for or read back, and no grid depends on what is in device memory, so each call can be part of a CUDA graph.
Sums have one order: two runs give equal bits.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from thermocline.ops import device_sizes
from thermocline.ops.device_rows import SIGNS, BegunNorm, Scratch, Squares, Vector
from thermocline.ops.device_rows import DeviceRows as Rows
from thermocline.ops.device_sizes import (
    BANNED,
    CANDIDATES,
    FEW,
    MAX_SUMS,
    PAIRS,
    SPAN,
    choice_sizes,
    joins_at_once,
    pair_tiles,
    span_of,
    spans,
)
from thermocline.ops.kernels import (
    triton_bytes,
    triton_choice,
    triton_grouped,
    triton_latents,
    triton_prompts,
    triton_rows,
    triton_states,
    triton_tokens,
)
from thermocline.ops.kernels.triton_stored import loader, operands
from thermocline.ops.kernels.triton_target import by_warpgroups, overlaps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.model.spec import Recurrent, Router
    from thermocline.ops.interface import Heads

Tensor = torch.Tensor
SQUARES = 128  # of a token's blocks, at least, that a program adds up: one a thread
ELEMENTWISE = 1024  # numbers a program of 4 warps: two 16-byte loads a thread
# Few tokens, by their number. Chosen from what ptxas makes of them: nothing spilled, 8 warps an SM and more.
DOT_ROWS = {1: 8, 2: 8, 4: 8, 8: 4, 16: 4}  # of a program: what a thread reads of x serves them all
DOT_SUMS = 64, 32  # of a thread, at most; second: where a stored number has several columns
DOT_BYTES = {1: 8, 2: 8, 4: 16, 8: 16, 16: 8}  # of each row, that a thread has on their way
BYTE_ROWS = {1: 8, 2: 8, 4: 4, 8: 4, 16: 4}  # the same, of rows in blocks
BYTE_WARPS = 4  # of a program: with 8 rows of q4_0, 4096 of them are 64 KiB on their way to an SM of an H100
DOT_REGISTERS = 168, 255  # three programs of 4 warps an SM, or two: the second where sums of floats need it
DOT_PROGRAMS = 264  # two for each SM of an H100: a small matrix is cut into fewer rows a program
DOWN_ROWS = {1: 8, 2: 8, 4: 8, 8: 4, 16: 2}
DOWN_WARPS = 4
DOWN_SUMS = 128  # of a thread, at most: four stored numbers, for as many tokens at once as that allows
DOWN_COLUMNS = 128  # of a program, for many tokens: its sums stay in registers
STATE_FLOATS = 4096  # of a program of 4 warps: 32 of a thread
LATENT_HEADS = 16  # of a program, the least that tensor cores multiply
LATENT_WARPS, LATENT_COLUMNS = 8, 128  # sums of more columns, or of fewer warps, spill on an H100
HEAD_PIECE = 128  # elements of a head that a program of `attend` multiplies at once
JOINED = 8192  # numbers of spans that a program joins at once: 64 of a thread
# Queries of a program for many tokens: the least of a wgmma, fewer of larger heads. Four warps spill.
TILE_ROWS, TILE_WARPS = 64, 8
# The same of heads of 65 to 128 without wgmma, and the piece of a head. Of 64 rows of 128 Triton lays 8 warps
# side by side, so that each multiplies all rows by keys: 640 instructions of tensor cores for a page, where
# two tiles of 32 have 384. Triton 3.6 spilled 8 to 32 bytes there.
NARROW_ROWS, NARROW_WARPS, NARROW_PIECE = 32, 4, 64
# That a program of `matmul_many` has on their way in int8. Half, where as many spill: of 5 bits, for 64 or
# more tokens with minima, for 64 of numbers from a book, of rows at no multiples of 16 bytes, whose loads are
# narrow (8 to 48 bytes; half have 7 % more instructions).
MANY_BLOCKS = 4
MANY_COLUMNS = 64  # that a program of `matmul_many` has on their way: x of them stays in shared memory

PAIR_ROWS, PAIR_WARPS = 64, 8  # of a program for (token, expert) pairs: of 128 rows, gate and up spill
ARRANGED, ARRANGED_WARPS = 4096, 8  # shares of experts that a program sorts at once


class Shape(NamedTuple):
    """How a row is read: units of V numbers, G of them at a time."""

    v: int
    g: int
    warps: int


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    warps: int = 4,
    stages: int = 2,
    registers: int | None = None,
    **fixed: Any,
) -> None:
    """The one place that starts a kernel. Products and sums may be fused, whatever the default.

    registers: of a thread, at most. Where nothing is said, ptxas spills a few bytes to use fewer.
    """
    how = {"num_warps": warps, "num_stages": stages, "maxnreg": registers, "enable_fp_fusion": True}
    if overlaps():
        how["launch_pdl"] = True
    kernel[grid](*args, **fixed, **how)


def embed(out: Tensor, table: Rows, ids: Tensor, scale: float) -> None:
    s = _shape(table)
    grid = len(ids), _ceil(_units(table, s), s.g)
    fixed: dict[str, Any] = {"FORMAT": table.format, "G": s.g, "V": s.v}
    launch(triton_rows.embed, grid, out, _at(table), ids, table.columns, table.stride, scale, **fixed)


def norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    ints: Vector = None,
) -> None:
    _norm(out, x, weight, bias, eps, layer, 1.0, False, ints)


def add_normed(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: bool, scale: float
) -> None:
    _norm(x, y, weight, bias, eps, layer, scale, True)


def matmul(
    out: Tensor,
    w: Rows,
    x: Tensor,
    bias: Tensor | None,
    add: bool,
    scratch: Scratch,
    ints: Vector = None,
    squares: Squares | None = None,
    begun: BegunNorm | None = None,
) -> None:
    _matmul(out, w, x, bias, add, False, scratch, ints, squares, begun)


def rope_store(
    qkv: Tensor,
    heads: Heads,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    half = 0 if cos is None else cos.shape[1]
    rest, n_kv = heads.dim - 2 * half, 0 if heads.shares else heads.n_kv
    k_norm = heads.q_norm if heads.k_norm is None else heads.k_norm  # of heads that have no keys: any
    args = qkv, heads.q_norm, k_norm, cos, sin, positions, sequence, table, k, v, heads.n, n_kv
    launch(
        triton_tokens.rope_store,
        (len(qkv), heads.n + 2 * n_kv),
        *args,
        table.shape[1],
        heads.norm_eps,
        heads.temperature,
        float(heads.temperature_span),
        warps=1,
        DIM=heads.dim,
        HALF=half,
        BLOCK=_block(v),
        A=_power(half),
        REST=_power(rest),
        LAST=heads.norms_last and heads.q_norm is not None,
        OWN=heads.own_norms,
        V_NORM=heads.v_norm is not None,
        WARM=heads.temperature != 0,
    )


def project_heads(
    qkv: Tensor,
    parts: Sequence[tuple[Rows, Vector]],
    x: Tensor,
    heads: Heads,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    k: Tensor,
    v: Tensor,
    scratch: Scratch,
    ints: Vector = None,
    squares: Squares | None = None,
) -> None:
    t, first, where = len(qkv), 0, (cos, sin, positions, sequence, table, k, v)
    at_once = t <= FEW and _turns_in_pairs(heads, cos)
    for w, bias in parts:
        if at_once:
            _project(qkv, first, w, bias, x, heads, where, _quantised(x, scratch, ints, w), squares)
        else:
            matmul(qkv[:, first : first + w.rows], w, x, bias, False, scratch, ints, squares)
        first += w.rows
    if not at_once:
        rope_store(qkv, heads, *where)


def attention(
    out: Tensor,
    qkv: Tensor,
    heads: Heads,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    k: Tensor,
    v: Tensor,
    scratch: Scratch,
    ints: Vector = None,
) -> None:
    t, width, block = len(qkv), table.shape[1], _block(v)
    span, n_spans = span_of(t), spans(width * block, t)
    window = width * block if heads.window is None else heads.window
    parts = scratch.take(t, heads.n, n_spans, heads.dim + 2)
    group, wide = heads.n // heads.n_kv, max(16, _power(heads.dim))
    rows, piece, warps = _tile(group, wide) if t > FEW else (0, min(wide, HEAD_PIECE), 4)
    fixed: dict[str, Any] = {"DIM": heads.dim, "BLOCK": block, "D": piece, "PIECES": _ceil(heads.dim, piece)}
    fixed |= {"CAPPED": heads.softcap is not None, "CHUNKED": heads.chunked}
    where = parts, qkv, positions, sequence, table, k, v
    ends = window, heads.scale, heads.softcap or 0.0, qkv.shape[1]
    if t > FEW:
        tiles = _ceil(t, rows // group), heads.n_kv, n_spans
        sizes = t, heads.n_kv, group, width, span, n_spans
        fixed["R"] = rows
        launch(triton_prompts.attend_many, tiles, *where, *sizes, *ends, warps=warps, **fixed)
    else:
        stages = 2 if heads.dim <= 2 * piece else 1  # of 512: 72 KiB of shared memory instead of 132
        how = out, ints, heads.sinks, scratch.arrivals
        args = *where, *how, heads.n_kv, group, width, span, n_spans, *ends
        tokens = t, heads.n_kv, n_spans
        fixed |= {"J": 0, "S": 1}
        if at_once := joins_at_once(n_spans, group, heads.dim):
            some = _power(group)
            fixed |= {"J": some, "S": min(16, _power(n_spans), max(1, JOINED // (some * wide)))}
        fixed["H"] = max(16, _power(group))
        warps = 4 if fixed["H"] < 128 else 8  # of Falcon's 71 heads a key, 4 spill
        launch(triton_tokens.attend, tokens, *args, stages=stages, warps=warps, **fixed)
        if at_once:
            return
    launch(
        triton_tokens.join_spans,
        (t, heads.n),
        *(out, ints, parts, heads.sinks, positions, heads.n, span, n_spans, window),
        DIM=heads.dim,
        D=wide,
        S=min(16, _power(n_spans)),
        CHUNKED=heads.chunked,
    )


def head_products(out: Tensor, w: Rows, x: Tensor) -> None:
    t, heads, each = out.shape
    assert out.stride(2) == x.stride(2) == 1 and w.rows == heads * each
    at_once = min(FEW, _power(t))
    rows, warps, fixed = _dots(w, at_once)
    args = out, _at(w), x, each, w.columns, w.stride, t, *out.stride()[:2], *x.stride()[:2]
    grid, most = (_ceil(each, rows), heads, _ceil(t, at_once)), DOT_REGISTERS[at_once > 4]
    launch(triton_latents.head_products, grid, *args, warps=warps, registers=most, **fixed)


def latent_store(
    q: Tensor,
    queries: Tensor,
    latent: Tensor,
    heads: Heads,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    k: Tensor,
) -> None:
    a = heads.latent
    assert a is not None
    args = q, queries, latent, kv_norm, cos, sin, positions, sequence, table, k, heads.n, table.shape[1]
    fixed = {"NOPE": a.nope, "RANK": a.kv_rank, "HALF": a.rope // 2, "BLOCK": _block(k, 1)}
    fixed |= {"A": _power(a.rope // 2), "D": _power(a.kv_rank)}
    launch(triton_latents.latent_store, (len(q), heads.n + 1), *args, a.norm_eps, warps=1, **fixed)


def latent_attention(
    out: Tensor,
    q: Tensor,
    heads: Heads,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    k: Tensor,
    scratch: Scratch,
) -> None:
    a, t, width, block = heads.latent, len(q), table.shape[1], _block(k, 1)
    assert a is not None
    span, n_spans = span_of(t), spans(width * block, t)
    parts, wide = scratch.take(t, heads.n, n_spans, a.kv_rank + 2), max(16, _power(a.kv_rank))
    launch(
        triton_latents.latent_attend,
        (t, _ceil(heads.n, LATENT_HEADS), n_spans),
        *(parts, q, positions, sequence, table, k, heads.n, width, span, n_spans, heads.scale),
        warps=LATENT_WARPS,
        stages=1,
        RANK=a.kv_rank,
        ROPE=a.rope,
        BLOCK=block,
        C=min(wide, LATENT_COLUMNS),
        N=_ceil(wide, LATENT_COLUMNS),
        E=max(16, _power(a.rope)),
        H=LATENT_HEADS,
    )
    launch(
        triton_tokens.join_spans,
        (t, heads.n),
        *(out, None, parts, None, positions, heads.n, span, n_spans, width * block),
        DIM=a.kv_rank,
        D=wide,
        S=min(16, _power(n_spans)),
        CHUNKED=False,
    )


def convolve(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence: Tensor,
    runs: Tensor,
    states: Tensor,
    alone: bool,
) -> None:
    t, channels = out.shape
    fixed: dict[str, Any] = {"CONV": len(weight) // channels, "ALONE": alone, "C": 256}
    args = out, x, weight, bias, sequence, runs, states, t, x.stride(0), channels, states.shape[1]
    launch(triton_states.convolve, (t + len(runs), _ceil(channels, 256)), *args, warps=2, **fixed)


def scan(
    out: Tensor,
    x: Tensor,
    gates: Tensor,
    r: Recurrent,
    decay: Tensor,
    dt_bias: Tensor,
    skip: Tensor | None,
    runs: Tensor,
    states: Tensor,
) -> None:
    rows, floats = _power(r.state), states.shape[1]
    columns = min(_power(r.head_dim), max(1, STATE_FLOATS // rows))
    fixed: dict[str, Any] = {"HEADS": r.heads, "DIM": r.head_dim, "GROUPS": r.groups, "STATE": r.state}
    fixed |= {"TILED": r.tiled, "DELTA": skip is None, "R": rows, "C": columns}
    args = out, x, gates, decay, dt_bias, skip, runs, states, x.stride(0), gates.stride(0), floats
    grid = len(runs), r.heads, _ceil(r.head_dim, columns)
    launch(triton_states.scan, grid, *args, (r.conv - 1) * r.channels, **fixed)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, parts: int, eps: float, after: bool) -> None:
    width = y.shape[1] // parts
    fixed: dict[str, Any] = {"AFTER": after, "D": _power(width)}
    warps = min(16, max(1, _power(width) // 256))
    args = y, gate, weight, gate.stride(0), width, len(weight), eps
    launch(triton_states.gated_norm, (len(y), parts), *args, warps=warps, **fixed)


def activate(
    out: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    bound: float,
    up_relu: bool,
    alpha: float = 1.0,
) -> None:
    n = out.numel()
    fixed: dict[str, Any] = {"KIND": activation, "UP_RELU": up_relu, "C": ELEMENTWISE}
    launch(triton_tokens.activate, (_ceil(n, ELEMENTWISE),), out, gate, up, n, bound, alpha, **fixed)


def open(x: Tensor, gate: Tensor) -> None:
    t, n = x.shape
    each = gate.shape[1]
    launch(triton_tokens.open, (t, _ceil(n, ELEMENTWISE)), x, gate, n, WIDE=each > 1, C=ELEMENTWISE)


def gate_up(
    h: Tensor,
    gate: Rows,
    gate_bias: Tensor | None,
    up: Rows | None,
    x: Tensor,
    activation: str,
    bound: float,
    up_relu: bool,
    named: Tensor | None,
    weights: Tensor | None,
    counts: Tensor | None,
    scratch: Scratch,
    up_bias: Tensor | None = None,
    alpha: float = 1.0,
    scales_input: bool = False,
    ints: Vector = None,
    h_ints: Vector = None,
    squares: Squares | None = None,
) -> None:
    assert up is None or (up.columns, up.rows) == (gate.columns, gate.rows)
    t, n = h.shape
    each, pitch = (n, 0) if weights is None else (n // weights.shape[1], weights.stride(0))
    width = 0 if named is None else named.stride(0)  # more than these neurons' bytes, of a divided layer's
    how: dict[str, Any] = {"ACTIVATION": activation, "UP_RELU": up_relu}
    how["SCALES"] = scales_input and weights is not None
    if t > FEW:
        assert counts is not None, "many tokens of a dense FFN go through its matrices one by one"
        ups = None if up is None else scratch.take(t, n)
        _matmul(h, gate, x, gate_bias, False, False, scratch)
        if up is not None and ups is not None:
            _matmul(ups, up, x, up_bias, False, False, scratch)
        rows = 16
        args: tuple[Any, ...] = h, ups, named, weights, counts, n, width, t, each, pitch, bound, alpha
        launch(triton_tokens.gated, (_ceil(n, rows),), *args, **how, R=rows, T=64)
        return
    rows, warps, fixed = _products(gate, t)
    up_at, up_stride = (None, 0) if up is None else (_at(up), up.stride)
    quantised = _quantised(x, scratch, ints, gate, *([] if up is None else [up]))
    assert h_ints is None or (named is None and each % 32 == 0)
    arrivals = None if h_ints is None else scratch.arrivals
    of_norm, blocks = _squares(squares, x)
    args = h, h_ints, arrivals, _at(gate), gate_bias, up_at, up_bias, x, quantised, *of_norm
    sizes = n, gate.columns, gate.stride, up_stride, width, t, each, pitch, bound, alpha
    of_up = _products(gate if up is None else up, t)[2]
    how |= {"ALL": counts is None and n % rows == 0, "N": blocks}
    fixed |= {f"UP_{name}": of_up[name] for name in ("FORMAT", "G", "V", "U", "EVEN")}
    launch(
        triton_rows.gate_up_few,
        (_ceil(n, rows),),
        *(*args, named, weights, counts, *sizes),
        warps=warps,
        registers=_registers(gate, t),
        **fixed,
        **how,
    )


def down(
    out: Tensor, rows: Rows, h: Tensor, add: bool, scratch: Scratch, begun: BegunNorm | None = None
) -> None:
    t = len(h)
    if t > FEW:
        assert begun is None
        _down_many(out, rows, h, add)
        return
    at_once = DOWN_SUMS // (4 * loader(rows.format).planes)
    for i in range(0, t, at_once):
        _down_few(out, rows, h, slice(i, min(t, i + at_once)), add, scratch, begun)


def down_experts(
    out: Tensor,
    rows: Rows,
    h: Tensor,
    weights: Tensor,
    add: bool,
    scratch: Scratch,
    ints: Vector = None,
    begun: BegunNorm | None = None,
) -> None:
    t, experts = weights.shape
    own = replace(rows, data=rows.data[: out.shape[1]])  # an expert's
    at_once, warps, fixed = _products(own, t)
    quantised, shape = _quantised(h, scratch, ints, own), (own.rows, own.columns, own.stride)
    what = out, _at(rows), h, quantised, weights, *_begun(begun, out, scratch)
    args = *what, *shape, t, experts, weights.stride(0)
    grid = (_ceil(own.rows, at_once),)
    launch(
        triton_rows.down_experts_few, grid, *args, warps=warps, registers=_registers(own, t), ADD=add, **fixed
    )


def gate_up_pairs(
    h: Tensor,
    gate: Rows,
    gate_bias: Tensor | None,
    up: Rows | None,
    x: Tensor,
    activation: str,
    bound: float,
    up_relu: bool,
    weights: Tensor,
    active: int,
    counts: Tensor,
    scratch: Scratch,
    up_bias: Tensor | None = None,
    alpha: float = 1.0,
    scales_input: bool = False,
) -> None:
    assert x.is_contiguous()
    (t, experts), pitch = weights.shape, weights.stride(0)
    tiles, e = pair_tiles(t, experts, active), _power(experts)
    (pairs, places, tile, marks), _ = scratch.pairs(t, experts, active, gate.rows)
    chunk, some = (min(_power(n), _ceil(ARRANGED, e)) for n in (t, tiles))
    what = pairs, places, tile, marks, weights, t, experts, active, pitch, tiles, gate.rows
    fixed: dict[str, Any] = {"E": e, "C": chunk, "A": _power(active), "T": some, "M": PAIRS}
    grid = (max(_ceil(t, chunk), _ceil(tiles, some)),)
    launch(triton_grouped.arrange, grid, *what, warps=ARRANGED_WARPS, **fixed)

    n, at_up, other = gate.rows // experts, None if up is None else _at(up), up or gate
    given = _given(x, scratch, gate)
    for_up = given if operands(gate.format) == operands(other.format) else _given(x, scratch, other)
    args = h, _at(gate), gate_bias, at_up, up_bias, x, given, for_up, weights, pairs, tile, marks, counts
    sizes = n, gate.columns, gate.stride, other.stride, t, pitch, bound, alpha
    fixed = {"ACTIVATION": activation, "UP_RELU": up_relu, "SCALES": scales_input}
    fixed |= {"M": PAIRS, "N": PAIR_ROWS, **_many(gate, PAIRS)}
    fixed |= {f"UP_{name}": given for name, given in _many(other, PAIRS).items()}
    over = _ceil(n, PAIR_ROWS), tiles
    how = {"stages": 3, "warps": PAIR_WARPS, "registers": DOT_REGISTERS[1]}
    launch(triton_grouped.gate_up_pairs, over, *args, *sizes, **how, **fixed)


def down_pairs(
    out: Tensor,
    rows: Rows,
    bundles: bool,
    h: Tensor,
    weights: Tensor,
    active: int,
    add: bool,
    scratch: Scratch,
) -> None:
    assert out.is_contiguous()
    (t, dim), experts = out.shape, weights.shape[1]
    n = rows.rows // experts if bundles else rows.columns
    tiles = pair_tiles(t, experts, active)
    (_, places, tile, _), answers = scratch.pairs(t, experts, active, experts * n, dim)
    if bundles:
        s, g = _bundle_units(rows)
        fixed: dict[str, Any] = {"FORMAT": rows.format, "M": PAIRS, "K": 32, "G": g, "V": s.v}
        grid = _ceil(_units(rows, s), g), tiles
        launch(
            triton_grouped.down_bundle_pairs,
            grid,
            *(answers, _at(rows), h, tile),
            n,
            dim,
            rows.stride,
            stages=3,
            warps=PAIR_WARPS,
            **fixed,
        )
    else:
        grid = _ceil(dim, PAIR_ROWS), tiles
        fixed = {"M": PAIRS, "N": PAIR_ROWS, **_many(rows, PAIRS)}
        args = answers, _at(rows), h, _given(h, scratch, rows), tile, dim, n, rows.stride, len(h)
        how = {"stages": 3, "warps": PAIR_WARPS, "registers": DOT_REGISTERS[1]}
        launch(triton_grouped.down_pairs, grid, *args, **how, **fixed)
    ends = t, _ceil(dim, ELEMENTWISE)
    launch(triton_grouped.add_pairs, ends, out, answers, places, active, dim, ADD=add, C=ELEMENTWISE)


def route(
    weights: Tensor,
    logits: Tensor,
    n_active: int,
    rule: Router,
    selection_bias: Vector,
    expert_scale: Vector = None,
) -> None:
    t, experts = logits.shape
    fixed: dict[str, Any] = {
        "SCORE": rule.score,
        "WEIGHTS": rule.weights,
        "FLOOR": rule.epsilon_floor,
        "GROUPS": rule.groups,
    }
    fixed |= {"KEPT": rule.groups_kept, "BEST": 2 if rule.group_rule == "sum2" else 1, "E": _power(experts)}
    args = weights, logits, selection_bias, expert_scale, experts, n_active, rule.epsilon, rule.scale
    launch(triton_tokens.route, (t,), *args, **fixed)


def predict(
    named: Tensor,
    first: Rows | None,
    second: Rows,
    threshold: Tensor,
    hot: int,
    relu: bool,
    x: Tensor,
    scratch: Scratch,
    ints: Vector = None,
) -> None:
    t, n = len(x), second.rows
    rank = 0 if first is None else first.rows
    both = scratch.take(t * (n + rank))
    scores, code = both[: t * n].view(t, n), both[t * n :].view(t, rank)
    if second.format == SIGNS:
        fixed = {"R": 16, "C": min(64, _power(second.row_bytes))}
        args = scores, _at(second), x, n, second.columns, second.stride
        launch(triton_tokens.signs, (t, _ceil(n, 16)), *args, **fixed)
    else:
        if first is not None:
            _matmul(code, first, x, None, False, relu, scratch, ints)
            x = code
        _matmul(scores, second, x, None, False, False, scratch)
    launch(triton_tokens.name, (t, _ceil(n, 8 * 32)), named, scores, threshold, n, hot, C=32)


def softcap(x: Tensor, cap: float) -> None:
    launch(triton_tokens.softcap, (_ceil(x.numel(), ELEMENTWISE),), x, x.numel(), cap, C=ELEMENTWISE)


def choose(
    ids: Tensor, chosen: Tensor, logits: Tensor, scale: float, draws: Tensor, keys: Tensor, sums: Tensor
) -> None:
    rows, n = logits.shape
    pitch, sizes = logits.stride(0), choice_sizes(n)
    fixed = {"WIDTH": draws.shape[1], "K": CANDIDATES}
    parts = sizes[0] // CANDIDATES
    grid, source = (rows, parts), (logits, draws, n, pitch, scale)
    launch(triton_choice.candidates, grid, keys, sums, *source, **fixed, BANS=BANNED, C=device_sizes.KEYS)
    for before, after in itertools.pairwise(sizes):
        more, keys = keys, keys[rows * before :]
        launch(
            triton_choice.fewer,
            (rows, after // CANDIDATES),
            keys,
            more,
            before,
            K=CANDIDATES,
            C=device_sizes.KEYS,
        )
    found = (ids, chosen, keys, sums, logits, draws, sizes[-1], parts, pitch, scale)
    launch(triton_choice.draw, (rows,), *found, **fixed, C=_power(sizes[-1]), S=_power(parts))


# ---- parts


def _turns_in_pairs(heads: Heads, cos: Vector) -> bool:
    """Return whether each element of a head depends on one of the other half at most: so no norm does."""
    alone = heads.q_norm is None and heads.k_norm is None and heads.v_norm is None and not heads.temperature
    return alone and heads.dim % 8 == 0 and (cos is None or 2 * cos.shape[1] == heads.dim)


def _project(
    qkv: Tensor,
    first: int,
    w: Rows,
    bias: Vector,
    x: Tensor,
    heads: Heads,
    where: tuple[Vector, ...],
    ints: Vector,
    squares: Squares | None,
) -> None:
    """Queue the product that makes heads, turns them and stores them: of qkv the columns from `first` on."""
    assert x.is_contiguous() and first % heads.dim == w.rows % heads.dim == 0
    t, (_, _, _, _, table, _, v) = len(qkv), where
    rows, warps, fixed = _products(w, t)
    rows = fixed["R"] = max(2, rows)
    assert table is not None and v is not None
    of_norm, blocks = _squares(squares, x)
    fixed |= {"DIM": heads.dim, "BLOCK": _block(v), "N": blocks}
    n_kv = 0 if heads.shares else heads.n_kv
    shape = w.rows, w.columns, w.stride, t, qkv.stride(0), first // heads.dim, heads.n, n_kv, table.shape[1]
    launch(
        triton_rows.heads_few,
        (w.rows // rows,),
        *(qkv, _at(w), x, ints, bias, *of_norm, *where),
        *shape,
        warps=warps,
        registers=_registers(w, t),
        **fixed,
    )


def _norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    scale: float,
    add: bool,
    ints: Vector = None,
) -> None:
    dim = x.shape[1]
    wide = _power(dim)
    fixed: dict[str, Any] = {"LAYER": layer, "ADD": add, "D": wide}
    warps = min(16, max(1, wide // 256))  # two 16-byte loads a thread
    args = out, ints, x, weight, bias, dim, out.stride(0), x.stride(0), eps, scale
    launch(triton_tokens.norm, (len(x),), *args, warps=warps, **fixed)


def _quantised(x: Tensor, scratch: Scratch, ints: Vector, *matrices: Rows) -> Tensor | None:
    """Queue x [B, columns] in int8, where one of the matrices is in blocks: for all of its products.

    ints: that was made with x, and there is nothing to queue.
    """
    if not any(w.takes_ints for w in matrices):
        return None
    if ints is not None:
        return ints
    assert x.is_contiguous()
    t, width = len(x), x.shape[1] // 32
    to, at_once = scratch.quantised(*x.shape), min(32, _power(width))
    grid = t, _ceil(width, at_once)
    launch(triton_bytes.quantise, grid, to, x, t, width, B=at_once)
    return to


def _squares(squares: Squares | None, x: Tensor) -> tuple[tuple[Vector, float], int]:
    """Return what kernels take of a norm that has begun, and the number of blocks that they read at once."""
    if squares is None:
        return (None, 0.0), 1
    blocks = x.shape[1] // 32
    assert squares.sums.is_contiguous() and squares.sums.shape == (len(x), blocks)
    return (squares.sums, squares.eps), max(SQUARES, _power(blocks))


def _begun(begun: BegunNorm | None, x: Tensor, scratch: Scratch) -> tuple[Vector, ...]:
    """Return what kernels take that begin the norm of x."""
    if begun is None:
        return (None,) * 5
    assert x.is_contiguous() and begun.out.is_contiguous() and x.shape == begun.out.shape
    assert x.shape[1] % 32 == 0 and begun.sums.is_contiguous()
    return begun.out, begun.ints, begun.sums, begun.weight, scratch.arrivals


def _matmul(
    out: Tensor,
    w: Rows,
    x: Tensor,
    bias: Tensor | None,
    add: bool,
    relu: bool,
    scratch: Scratch,
    ints: Vector = None,
    squares: Squares | None = None,
    begun: BegunNorm | None = None,
) -> None:
    assert x.is_contiguous() and out.stride(1) == 1
    t = len(x)
    fixed: dict[str, Any] = {"ADD": add, "RELU": relu}
    shape = w.rows, w.columns, w.stride, t, out.stride(0)
    if t <= FEW:
        rows, warps, how = _products(w, t)
        of_norm, blocks = _squares(squares, x)
        q, of_out = _quantised(x, scratch, ints, w), _begun(begun, out, scratch)
        fixed |= {"ALL": w.rows % rows == 0, "N": blocks, **how}
        args: tuple[Any, ...] = out, _at(w), x, q, bias, *of_norm, *of_out, *shape
        grid, most = (_ceil(w.rows, rows),), _registers(w, t)
        launch(triton_rows.matmul_few, grid, *args, warps=warps, registers=most, **fixed)
    else:
        assert squares is None and begun is None
        m = _tokens_at_once(w, t)
        fixed |= {"M": m, "N": 64, **_many(w, m)}
        tiles = _ceil(w.rows, 64), _ceil(t, m)
        args = out, _at(w), x, _given(x, scratch, w), bias, *shape
        how = {"stages": 3, "warps": _warps(w, m), "registers": DOT_REGISTERS[1]}
        launch(triton_rows.matmul_many, tiles, *args, **how, **fixed)


def _down_many(out: Tensor, rows: Rows, h: Tensor, add: bool) -> None:
    t, n = h.shape
    m, (s, g) = _tokens_at_once(rows, t), _bundle_units(rows)
    fixed: dict[str, Any] = {"ADD": add, "FORMAT": rows.format, "M": m, "K": 32, "G": g, "V": s.v}
    args = out, _at(rows), h, n, rows.columns, rows.stride, t
    grid = _ceil(_units(rows, s), g), _ceil(t, m)
    launch(triton_rows.down_many, grid, *args, stages=3, warps=_warps(rows, m), **fixed)


def _down_few(
    out: Tensor, rows: Rows, h: Tensor, which: slice, add: bool, scratch: Scratch, begun: BegunNorm | None
) -> None:
    """Queue `down` of some tokens."""
    mine, columns, how = h[which], rows.columns, loader(rows.format)
    t, n = mine.shape
    tokens, chunks = _power(t), _ceil(n, SPAN)
    s = _shape(rows, max(4, min(how.unit, how.sums // tokens)), 1)
    each = _ceil(chunks, MAX_SUMS)
    programs = _ceil(chunks, each)
    sums = scratch.take(programs, t, columns)
    fixed: dict[str, Any] = {"FORMAT": rows.format, "B": tokens, "CHUNK": SPAN, "R": DOWN_ROWS[tokens]}
    fixed |= {"W": DOWN_WARPS, "G": s.g, "V": s.v}
    args = sums, _at(rows), mine, n, columns, rows.stride, t, each
    grid = programs, _ceil(_units(rows, s), s.g)
    launch(triton_rows.down_few, grid, *args, warps=DOWN_WARPS, **fixed)
    at_once, (*of_norm, _) = 64, _begun(begun, out, scratch)
    joins = (_ceil(t * columns, at_once),)
    sizes = programs, t * columns, columns, which.start * columns, len(out) * (columns // 32)
    fixed = {"ADD": add, "S": _power(programs), "C": at_once}
    launch(triton_rows.join_sums, joins, out[which], sums, *of_norm, *sizes, **fixed)


def _given(x: Tensor, scratch: Scratch, w: Rows) -> Tensor | None:
    """Queue x [B, columns] as `tile_products` takes it, where it does not take f32."""
    assert x.is_contiguous()
    if operands(w.format) == "int8":
        return _quantised(x, scratch, None, w)
    if operands(w.format) == "f16":
        to, width = scratch.halves(*x.shape), x.shape[1]
        fixed: dict[str, Any] = {"C": min(4096, _power(width))}
        launch(triton_bytes.halve, (len(x),), to, x, width, _ceil(width, 8) * 8, **fixed)
        return to
    return None


def _tokens_at_once(w: Rows, tokens: int) -> int:
    """Tokens of a program, of many. Products of f32 have no tensor cores: of 64, sums spill, of 128 6 KB."""
    return min(32 if w.format == "f32" else 128, _power(tokens))


def _many(w: Rows, m: int) -> dict[str, Any]:
    """For products with many tokens, m of a program: how `tile_products` reads rows."""
    if operands(w.format) == "int8":
        return {"FORMAT": w.format, "G": _blocks_at_once(w, m), "V": 0}
    v = _shape(w).v
    return {"FORMAT": w.format, "G": min(32, MANY_COLUMNS // loader(w.format).planes) // v, "V": v}


def _blocks_at_once(w: Rows, m: int) -> int:
    """Blocks that `byte_tile` takes at a time: whole steps."""
    blocks, how = w.columns // 32, loader(w.format)
    half = how.more != "" or (m >= 64 and how.minima) or (m == 64 and how.book != "") or w.stride % 16 != 0
    return min(MANY_BLOCKS // 2 if half else MANY_BLOCKS, blocks & -blocks)


def _bundle_units(w: Rows) -> tuple[Shape, int]:
    """For products with many tokens of rows that are each a neuron's: units, and how many a program has."""
    s = _shape(w)
    return s, min(64, DOWN_COLUMNS // loader(w.format).planes) // s.v


def _shape(w: Rows, v: int = 0, warps: int = 4) -> Shape:
    """Units of v numbers, or the format's; as many as `warps` warps read at once, where rows are so long."""
    v = v or loader(w.format).unit
    g = min(32 * warps, _power(_units(w, Shape(v, 0, 0))))
    return Shape(v, g, max(1, g // 32))


def _dots(w: Rows, tokens: int) -> tuple[int, int, dict[str, Any]]:
    """For products with few tokens: rows of a program, its warps, and how `dots` reads them."""
    b, how = _power(tokens), loader(w.format)
    v = how.dot
    s, rows = _shape(w, v), min(DOT_ROWS[b], DOT_SUMS[how.planes > 1] // b)
    while rows > 1 and _ceil(w.rows, rows) < DOT_PROGRAMS:
        rows //= 2
    at_once = max(1, DOT_BYTES[b] // (v * how.size * max(1, how.planes // 2)))
    fixed = {"B": b, "R": rows, "G": s.g, "V": v, "U": at_once, "EVEN": w.columns % v == 0}
    return rows, s.warps, {"FORMAT": w.format, **fixed}


def _products(w: Rows, tokens: int) -> tuple[int, int, dict[str, Any]]:
    """Return the same for quantised tokens, where w is in blocks: a thread has one of each row."""
    if not loader(w.format).bits:
        return _dots(w, tokens)
    b, blocks = _power(tokens), w.columns // 32
    rows, g = BYTE_ROWS[b], min(32 * BYTE_WARPS, _power(blocks))
    while rows > 1 and _ceil(w.rows, rows) < DOT_PROGRAMS:
        rows //= 2
    floats = {"V": 0, "U": 1, "EVEN": True}  # means nothing here
    fixed = {"FORMAT": w.format, "B": b, "R": rows, "G": g, **floats}
    return rows, max(1, g // 32), fixed


def _registers(w: Rows, tokens: int) -> int:
    """Return the most registers of a thread in products with few tokens."""
    return DOT_REGISTERS[not loader(w.format).bits and tokens > 4]


def _warps(w: Rows, m: int) -> int:
    """Warps of a program for m tokens: of 128, with rows in blocks, 4 spill."""
    return 4 if m < 128 or loader(w.format).bits == 0 else 8


def _units(w: Rows, s: Shape) -> int:
    return _ceil(w.columns // loader(w.format).planes, s.v)


def _at(w: Rows) -> Tensor:
    """Return the data from the weights of row 0 on; Triton sees how far its address is aligned."""
    assert w.format == SIGNS or (w.stride | w.skip) % loader(w.format).align == 0, (
        "loads are of whole numbers"
    )
    return w.data[:, w.skip :] if w.skip else w.data


def _tile(group: int, wide: int) -> tuple[int, int, int]:
    """Return of attention by tiles the rows, the elements of a head at once, and the warps."""
    if wide == 128 and group <= NARROW_ROWS and not by_warpgroups():
        return NARROW_ROWS, NARROW_PIECE, NARROW_WARPS
    rows = max(TILE_ROWS * HEAD_PIECE // max(wide, HEAD_PIECE), _power(group))
    return rows, min(wide, HEAD_PIECE), TILE_WARPS


def _block(v: Tensor, dimension: int = 2) -> int:
    block = v.shape[dimension]
    assert _power(block) == block and 16 <= block <= SPAN, "pages of 16 to 128 positions, a power of two"
    return block


def _power(n: int) -> int:
    """The power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def _ceil(n: int, parts: int) -> int:
    return -(-n // parts)
