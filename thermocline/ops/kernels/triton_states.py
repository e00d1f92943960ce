"""Device code of recurrent layers: convolutions, steps of states, gated norms.

`triton_kernels` launches this code. Runs i32 [sequences, 4]: a sequence's first row and its tokens, the slot
that its state is read from (-1: zeros) and the one that it is written to (-1: there is no sequence).
"""

from __future__ import annotations

import triton
import triton.language as tl

from thermocline.ops.kernels.triton_target import follow


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def softplus(x):
    return tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def taken(x, row, columns, channels, i, ok, ALONE: tl.constexpr):
    """A row's input to the convolution: x, or B times x of [B, C, x]."""
    at = x + row.to(tl.int64) * columns + i
    y = tl.load(at, mask=ok, other=0)
    if ALONE:
        y *= tl.load(at + 2 * channels, mask=ok, other=0)
    return y


@triton.jit
def convolve(
    out, x, weight, bias, sequence, runs, states, tokens, columns, channels, floats,
    CONV: tl.constexpr, ALONE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (token, or behind them sequence; C channels). weight [CONV, channels]."""
    follow()
    which, i = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)
    ok, every = i < channels, i * 0  # a condition that masks is one of each element
    if which < tokens:
        run = runs + 4 * tl.load(sequence + which)
        first, old = tl.load(run), tl.load(run + 2).to(tl.int64)
        y = tl.zeros((C,), tl.float32)
        if bias is not None:
            y += tl.load(bias + i, mask=ok, other=0)
        for j in tl.static_range(CONV):
            row = which - (CONV - 1) + j
            here = every + row >= first
            mine = taken(x, tl.maximum(row, 0), columns, channels, i, ok & here, ALONE)
            before = states + old * floats + (row - first + CONV - 1) * channels + i
            mine += tl.load(before, mask=ok & (here == 0) & (every + old >= 0), other=0)
            y += mine * tl.load(weight + j * channels + i, mask=ok, other=0)
        if ALONE:
            y *= tl.load(x + which.to(tl.int64) * columns + channels + i, mask=ok, other=0)
        else:
            y = silu(y)
        tl.store(out + which.to(tl.int64) * channels + i, y, mask=ok)
    else:
        run = runs + 4 * (which - tokens)
        first, count = tl.load(run), tl.load(run + 1)
        old, new = tl.load(run + 2).to(tl.int64), tl.load(run + 3).to(tl.int64)
        for j in tl.static_range(CONV - 1):
            at = count - (CONV - 1) + j
            here = every + at >= 0
            mine = taken(
                x, first + tl.maximum(at, 0), columns, channels, i, ok & here & (every + new >= 0), ALONE
            )
            before = states + old * floats + (count + j) * channels + i
            mine += tl.load(before, mask=ok & (here == 0) & (every + old >= 0), other=0)
            tl.store(states + new * floats + j * channels + i, mine, mask=ok & (every + new >= 0))


@triton.jit
def unit(x):
    return x / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def scan(
    out, x, gates, decay, dt_bias, skip, runs, states, columns, gates_columns, floats, conv_floats,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    TILED: tl.constexpr, DELTA: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (sequence, head, C columns of its state): the sequence's tokens, one after the other.

    x: q, k and v, or x, B and C; gates: beta and alpha, or dt.
    """
    follow()
    run, head = runs + 4 * tl.program_id(0), tl.program_id(1)
    first, count = tl.load(run), tl.load(run + 1)
    old, new = tl.load(run + 2).to(tl.int64), tl.load(run + 3).to(tl.int64)
    KEYS: tl.constexpr = GROUPS * STATE
    r, c = tl.arange(0, R), tl.program_id(2) * C + tl.arange(0, C)
    in_r, in_c = r < STATE, c < DIM
    inside = in_r[:, None] & in_c[None, :]
    group = head % GROUPS if TILED else head // (HEADS // GROUPS)
    own = conv_floats + (head * STATE + r)[:, None] * DIM + c[None, :]
    s = tl.load(states + old * floats + own, mask=inside & (own * 0 + old >= 0), other=0)
    fall, bias = tl.load(decay + head), tl.load(dt_bias + head)
    begin = first.to(tl.int64)
    row, gate = x + begin * columns, gates + begin * gates_columns + head
    to = out + (begin * HEADS + head) * DIM + c
    for _ in range(0, count):
        if DELTA:
            q = unit(tl.load(row + group * STATE + r, mask=in_r, other=0)) / tl.sqrt(STATE * 1.0)
            k = unit(tl.load(row + KEYS + group * STATE + r, mask=in_r, other=0))
            v = tl.load(row + 2 * KEYS + head * DIM + c, mask=in_c, other=0)
            beta = 1 / (1 + tl.exp(-tl.load(gate)))
            s *= tl.exp(fall * softplus(tl.load(gate + HEADS) + bias))
            change = (v - tl.sum(s * k[:, None], axis=0)) * beta
            s += k[:, None] * change[None, :]
            y = tl.sum(s * q[:, None], axis=0)
        else:
            v = tl.load(row + head * DIM + c, mask=in_c, other=0)
            k = tl.load(row + HEADS * DIM + group * STATE + r, mask=in_r, other=0)
            q = tl.load(row + HEADS * DIM + KEYS + group * STATE + r, mask=in_r, other=0)
            dt = softplus(tl.load(gate) + bias)
            s = s * tl.exp(fall * dt) + k[:, None] * (v * dt)[None, :]
            y = tl.sum(s * q[:, None], axis=0) + tl.load(skip + head) * v
        tl.store(to, y, mask=in_c)
        row, gate, to = row + columns, gate + gates_columns, to + HEADS * DIM
    tl.store(states + new * floats + own, s, mask=inside & (own * 0 + new >= 0))


@triton.jit
def gated_norm(y, gate, weight, pitch, width, weights, eps, AFTER: tl.constexpr, D: tl.constexpr):
    """Program (token, part of `width`): y = norm(y) * silu(gate); or, AFTER, norm(y * silu(gate))."""
    follow()
    b, part, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, D)
    ok = i < width
    at = y + (b * tl.num_programs(1) + part) * width + i
    x = tl.load(at, mask=ok, other=0)
    z = silu(tl.load(gate + b * pitch + part * width + i, mask=ok, other=0))
    if AFTER:
        x *= z
    x = x / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    x *= tl.load(weight + (part * width + i) % weights, mask=ok, other=0)
    if AFTER == 0:
        x *= z
    tl.store(at, x, mask=ok)
