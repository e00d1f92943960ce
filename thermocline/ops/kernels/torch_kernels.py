"""The GPU's ops in plain torch, on any device: what `triton_kernels` must compute, and its stand-in on a CPU.

Same functions and signatures as there. All write into tensors of the caller's; activations and sums are f32;
no value of the device is read on the host, but for sequences' runs of rows and experts' tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from thermocline.model.formats import FORMATS
from thermocline.model.gguf_blocks import E2M1, IQ4
from thermocline.model.spec import Recurrent, Router
from thermocline.ops.device_rows import SIGNS, BegunNorm, Scratch, Squares, Vector
from thermocline.ops.device_rows import DeviceRows as Rows
from thermocline.ops.device_sizes import AS_F16, FEW
from thermocline.ops.interface import CANDIDATES, Heads

Tensor = torch.Tensor
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
NOUGHT = {"q4_0": 8, "q5_0": 16, "q6_k": 32, "q3_k": 4, "tq2_0": 1}  # what stands for 0
PIECE = 1 << 22  # weights, or numbers of keys, that are floats at once: in all 16 to 24 bytes of each
Times = Callable[[Rows, Tensor, Tensor | None], Tensor]
BOOKS = {"iq4_nl": IQ4, "iq4_xs": IQ4, "mxfp4": E2M1}  # numbers are places in these


def embed(out: Tensor, table: Rows, ids: Tensor, scale: float) -> None:
    """out [B, dim] = the rows of ids i32 [B], times scale."""
    torch.mul(_decode(table, table.data[ids]), scale, out=out)


def norm(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer: bool,
    ints: Vector = None,
) -> None:
    """out [B, dim] = RMS norm of x, or layer norm; without a weight x as it is. out may be x.

    ints: out goes there, too, in int8, as `Scratch.quantised` says. So in `attention`. `matmul`, `gate_up`
    and `predict` are given that with x, for rows in blocks. Where they are not, they make it themselves.
    """
    out.copy_(_normed(x, weight, bias, eps, layer))
    _put_ints(ints, out)


def add_normed(
    x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: bool, scale: float
) -> None:
    """x [B, dim] += scale * norm(y)."""
    x += scale * _normed(y, weight, bias, eps, layer)


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
    """out [B, rows] = x [B, columns] times w transposed, plus bias; or that added to what is there.

    out may be some columns of a wider tensor. Tokens meet rows in blocks as the CPU's do, in int8
    (`_as_bytes`), here and in `gate_up`, `down_experts` and `predict`. More than FEW, and pairs of a
    mixture, are floats where 16 columns have a scale.
    squares, begun: at most FEW tokens have these. begun is the norm of out, which is not a part of a tensor.
    """
    _put(out, _times(w, x, bias, ints, squares), add)
    _begin_norm(out, begun)


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
    """Norms and turns the heads of q and k inside qkv [B, (n + 2 n_kv) * d], and stores k and v as f16.

    cos, sin [B, r / 2] turn the first r elements of each head. table i32 [sequences, blocks] has a page for
    each block of positions; k [pages, n_kv, d, block], v [pages, n_kv, block, d]. Heads that share those of
    another layer have queries alone, qkv [B, n * d], and store nothing. Norms of all heads as one are not
    made here.
    """
    t, block = len(qkv), v.shape[2]
    n_kv = 0 if heads.shares else heads.n_kv
    parts = qkv.view(t, heads.n + 2 * n_kv, heads.dim)
    n_qk = heads.n + n_kv
    q, keys, values = parts[:, : heads.n], parts[:, heads.n : n_qk], parts[:, n_qk:]
    if heads.v_norm is not None:
        values.copy_(_normed(values, values.new_ones(()), None, heads.norm_eps, False))
    for part, weight in ((q, heads.q_norm), (keys, heads.k_norm)):
        if not heads.norms_last:
            _norm_heads(heads, part, weight)
        if cos is not None and sin is not None:
            _turn(part, cos, sin)
        if heads.norms_last:
            _norm_heads(heads, part, weight)
    if heads.temperature:
        spans = torch.floor((positions + 1).float() / heads.temperature_span)
        q *= (1 + heads.temperature * torch.log1p(spans))[:, None, None]
    if heads.shares:
        return
    at = positions.long()
    page, slot = table[sequence.long(), at // block].long(), at % block
    k[page, :, :, slot] = keys.to(k.dtype)
    v[page, :, slot] = values.to(v.dtype)


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
    """Makes qkv of x by matrices and their biases, the columns of one behind another's, then `rope_store`.

    A matrix has whole heads. What is left of keys and values in qkv is not said.
    """
    first = 0
    for w, bias in parts:
        matmul(qkv[:, first : first + w.rows], w, x, bias, False, scratch, ints, squares)
        first += w.rows
    rope_store(qkv, heads, cos, sin, positions, sequence, table, k, v)


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
    """out [B, n * d]: each token's heads against its sequence's positions up to its own, which are stored.

    With `ints` d is a multiple of 32.
    """
    for s in _pieces(len(qkv), table.shape[1] * v.shape[2] * heads.n_kv * heads.dim):
        _attend(out[s], qkv[s], heads, positions[s], sequence[s], table, k, v)
    _put_ints(ints, out)


def _attend(
    out: Tensor,
    qkv: Tensor,
    heads: Heads,
    positions: Tensor,
    sequence: Tensor,
    table: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    t, block, group = len(qkv), v.shape[2], heads.n // heads.n_kv
    q = qkv[:, : heads.n * heads.dim].view(t, heads.n_kv, group, heads.dim)
    pages = table[sequence.long()].long().clamp(min=0)  # absent ones are masked
    own = positions[:, None]
    at = torch.arange(pages.shape[1] * block, device=qkv.device)
    seen = at <= own
    if heads.window is not None:
        seen &= at >= own // heads.window * heads.window if heads.chunked else at > own - heads.window
    seen = seen[:, None, None]
    keys = k[pages].permute(0, 2, 3, 1, 4).reshape(t, heads.n_kv, heads.dim, -1).float()
    values = v[pages].transpose(1, 2).reshape(t, heads.n_kv, -1, heads.dim).float()
    scores = q @ keys * heads.scale
    if heads.softcap is not None:
        scores = heads.softcap * torch.tanh(scores / heads.softcap)
    scores = torch.where(seen, scores, -math.inf)
    if heads.sinks is None:
        p = scores.softmax(dim=-1)
    else:
        sinks = torch.as_tensor(heads.sinks, device=qkv.device).view(heads.n_kv, group, 1)
        p = torch.cat([scores, sinks.expand(t, -1, -1, -1)], dim=-1).softmax(dim=-1)[..., :-1]
    zero = values.new_zeros(())  # what an unused slot holds may be no number, and would show through a 0
    torch.matmul(p, torch.where(seen.mT, values, zero), out=out.view(q.shape))


def head_products(out: Tensor, w: Rows, x: Tensor) -> None:
    """out [B, heads, rows] = each head's x [B, heads, columns] times its own rows of w [heads * rows].

    Both may be parts of wider heads.
    """
    own = _decode(w, w.data).view(x.shape[1], -1, w.columns)
    out.copy_(torch.einsum("bhc,hrc->bhr", x, own))


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
    """Turns the last elements of queries [B, n, nope + rope] into those of q [B, n, d], and stores latents.

    latent [B, d] gets its norm and is turned on its way, as f16, to k [pages, block, d].
    """
    a, block = heads.latent, k.shape[1]
    assert a is not None
    q[..., a.kv_rank :] = queries[..., a.nope :]
    _turn(q[..., a.kv_rank :], cos, sin)
    key = latent[:, None].clone()
    key[..., : a.kv_rank] = _normed(key[..., : a.kv_rank], kv_norm, None, a.norm_eps, False)
    _turn(key[..., a.kv_rank :], cos, sin)
    at = positions.long()
    k[table[sequence.long(), at // block].long(), at % block] = key[:, 0].to(k.dtype)


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
    """out [B, n, kv_rank]: each token's heads against its sequence's latents up to its own."""
    for s in _pieces(len(q), table.shape[1] * k.shape[1] * heads.dim):
        pages = table[sequence[s].long()].long().clamp(min=0)
        keys = k[pages].flatten(1, 2).float()
        seen = (torch.arange(keys.shape[1], device=q.device) <= positions[s, None])[:, None]
        p = torch.where(seen, q[s] @ keys.mT * heads.scale, -math.inf).softmax(dim=-1)
        values = torch.where(seen.mT, keys[..., : heads.value_dim], keys.new_zeros(()))
        out[s].copy_(p @ values)


def _norm_heads(heads: Heads, part: Tensor, weight: object) -> None:
    """Norms, in place, heads [B, heads, d]: by a weight [d], or LayerNorms by each one's own."""
    if weight is not None and part.shape[1]:
        own = torch.as_tensor(weight, device=part.device)
        own = own.view(part.shape[1:]) if heads.own_norms else own
        part.copy_(_normed(part, own, None, heads.norm_eps, heads.own_norms))


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
    """out [B, channels] = SiLU of the causal convolution of x [B, columns]; or, alone, C * that of B * x.

    weight [conv, channels], flat. runs i32 [sequences, 4]: a sequence's first row and its tokens, the slot
    that its state is read from (-1: zeros) and the one that it is written to (-1: there is no sequence). A
    state begins with the last inputs [conv - 1, channels].
    """
    channels = out.shape[1]
    w = weight.view(-1, channels)
    for first, n, old, new in runs.tolist():
        if new < 0:
            continue
        rows, size = x[first : first + n], (len(w) - 1) * channels
        mine = rows[:, :channels] * rows[:, 2 * channels : 3 * channels] if alone else rows[:, :channels]
        seen = states.new_zeros(size) if old < 0 else states[old, :size]
        every = torch.cat([seen.view(-1, channels), mine])
        y = torch.zeros_like(mine) if bias is None else bias.repeat(n, 1)
        for j in range(len(w)):
            y = y + every[j : j + n] * w[j]
        out[first : first + n] = y * rows[:, channels : 2 * channels] if alone else _silu(y)
        states[new, :size] = every[n:].reshape(-1)


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
    """out [B, heads * d] = what heads find in their states, token by token; without `skip` by the delta rule.

    x [B, channels]: q, k and v with gates beta and alpha (`reference.deltanet`), or x, B and C with dt
    (`reference.mamba2`). runs as `convolve`'s. A state ends with the heads' [heads, state, d].
    """
    keys, each, inner = r.groups * r.state, r.heads // r.groups, r.inner
    at = torch.arange(r.heads, device=x.device)
    group = at % r.groups if r.tiled else at // each
    size = r.heads * r.state * r.head_dim
    for first, n, old, new in runs.tolist():
        if new < 0:
            continue
        s = states.new_zeros(size) if old < 0 else states[old, -size:].clone()
        s = s.view(r.heads, r.state, r.head_dim)
        for t in range(first, first + n):
            if skip is None:
                q, k = (_unit(p.view(r.groups, r.state))[group] for p in (x[t, :keys], x[t, keys : 2 * keys]))
                v = x[t, 2 * keys :].view(r.heads, r.head_dim)
                fade = (decay * _softplus(gates[t, r.heads : 2 * r.heads] + dt_bias)).exp()
                s = s * fade[:, None, None]
                change = (v - (s * k[:, :, None]).sum(dim=1)) * gates[t, : r.heads].sigmoid()[:, None]
                y = (s := s + k[:, :, None] * change[:, None]) * (q / math.sqrt(r.state))[:, :, None]
                out[t] = y.sum(dim=1).flatten()
            else:
                v = x[t, :inner].view(r.heads, r.head_dim)
                k, q = (x[t, i : i + keys].view(r.groups, r.state)[group] for i in (inner, inner + keys))
                dt = _softplus(gates[t, : r.heads] + dt_bias)
                s = s * (decay * dt).exp()[:, None, None] + k[:, :, None] * (v * dt[:, None])[:, None]
                out[t] = ((s * q[:, :, None]).sum(dim=1) + skip[:, None] * v).flatten()
        states[new, -size:] = s.flatten()


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, parts: int, eps: float, after: bool) -> None:
    """y [B, n] = RMS norm of each part, times SiLU of the gate [B, n]; `after`: of the product.

    weight is that of a part, or of all.
    """
    z = _silu(gate)
    x = (y * z if after else y).view(len(y), parts, -1)
    x = _normed(x, weight.view(-1, x.shape[2]), None, eps, False).view(y.shape)
    y.copy_(x if after else x * z)


def activate(
    out: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    bound: float,
    up_relu: bool,
    alpha: float = 1.0,
) -> None:
    """out [B, n] = the gate's activation, times up. out may be gate."""
    a = _activation(gate, activation, bound, alpha)
    if up is not None:
        a = a * (_activation(up, "relu", 0.0) if up_relu else _up_factor(up, activation, bound))
    out.copy_(a)


def open(x: Tensor, gate: Tensor) -> None:
    """x [B, n] times the sigmoid of gate [B, n], or of [B, 1]."""
    x *= gate.sigmoid()


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
    """h [B, n] = act(gate x + gate_bias) * (up x + up_bias).

    Neurons that `named` u8 [B, ceil(n / 8)] has for no token are 0 for all. With `weights` [B, experts] they
    are those of as many experts, side by side, and also times their expert's, if that is not 0: else just 0.
    `scales_input`: gate and up are times that, in place of their product.
    counts i32 [4] += (token, neuron) pairs that are not 0, neurons whose gate is open for some token (their
    up rows are read), gate rows read, neurons that are not 0 for some token (`down` reads theirs). Of up to
    FEW tokens no other rows are read. Without counts, which FEW tokens may be, all are.
    h_ints: h goes there in int8, too, but for experts that no token goes to; then no neurons are named.
    """
    what = gate, gate_bias, up, x, activation, bound, up_relu, named, weights, counts
    _gate_up(partial(_times, ints=ints, squares=squares), h, *what, up_bias, alpha, scales_input)
    _put_ints(h_ints, h)


def down(
    out: Tensor, rows: Rows, h: Tensor, add: bool, scratch: Scratch, begun: BegunNorm | None = None
) -> None:
    """out [B, dim] (+)= h [B, n] times rows, one a neuron; those that are 0 for all tokens add nothing."""
    _put(out, _bundled(rows, h), add)
    _begin_norm(out, begun)


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
    """out [B, dim] (+)= the sum over experts of h [B, experts * n] times their rows [experts * dim, n].

    Experts that weights [B, experts] has for no token are not read. B is at most FEW.
    """
    experts, dim = weights.shape[1], out.shape[1]
    h = _met(rows, h, ints)
    y, needed = torch.zeros_like(out), (weights != 0).any(dim=0)
    for e, own in enumerate(h.view(len(h), experts, -1).unbind(dim=1)):
        mine = rows.data[e * dim : (e + 1) * dim]
        for s in _pieces(dim, rows.columns):
            w = _decode(rows, mine[s])
            y[:, s] += own @ torch.where(needed[e], w, w.new_zeros(())).T
    _put(out, y, add)
    _begin_norm(out, begun)


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
    """h [B * active, n] = as `gate_up`'s, of the experts that each token goes to: (token, expert) pairs, by
    expert, then by token. What is behind the last pair is nothing's.

    weights [B, experts]: of a token at most `active` are not 0. x [B, dim] meets rows as many tokens do,
    however many there are. scratch keeps for `down_pairs` what was sorted. (Here the host reads which tokens
    go where.)
    """
    n, first = gate.rows // weights.shape[1], 0
    for e, tokens in _going(weights):
        end, which, mine = first + len(tokens), slice(e * n, (e + 1) * n), slice(e, e + 1)
        rows = (None if w is None else replace(w, data=w.data[which]) for w in (gate, up))
        biases = (None if b is None else b[which] for b in (gate_bias, up_bias))
        (own, own_up), (bias, own_up_bias) = rows, biases
        assert own is not None
        what = own, bias, own_up, x[tokens], activation, bound, up_relu, None, weights[tokens, mine], counts
        _gate_up(_tiled, h[first:end], *what, own_up_bias, alpha, scales_input)
        first = end


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
    """out [B, dim] (+)= the sum over a token's experts, in their order, of h [pairs, n] times their rows.

    h, weights, active and scratch: `gate_up_pairs`'s. An expert has dim rows of n columns, or with `bundles`
    n of dim.
    """
    y, first = torch.zeros_like(out), 0
    for e, tokens in _going(weights):
        own, mine = rows.part(e, weights.shape[1]), h[first : first + len(tokens)]
        y[tokens] += _bundled(own, mine) if bundles else _tiled(own, mine, None)
        first += len(tokens)
    _put(out, y, add)


def _going(weights: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield experts that tokens go to, with those tokens."""
    for e, shares in enumerate(weights.unbind(dim=1)):
        tokens = shares.nonzero()[:, 0]
        if len(tokens):
            yield e, tokens


def route(
    weights: Tensor,
    logits: Tensor,
    n_active: int,
    rule: Router,
    selection_bias: Vector,
    expert_scale: Vector = None,
) -> None:
    """weights [B, n_experts] = of each token's n_active best experts their weights as `rule` says, else 0;
    each by the expert's own scale [n_experts].

    Of equals the first; a NaN is larger than all, so that it shows.
    """
    zero, scores = logits.new_zeros(()), _scores(logits, rule.score)
    wanted = logits if selection_bias is None and rule.groups == 1 else scores
    wanted = wanted if selection_bias is None else wanted + selection_bias
    if rule.groups > 1:
        wanted = _in_best_groups(wanted, rule)
    ranks = _ranks(wanted)
    chosen = ranks < n_active
    if rule.weights == "mixed":
        scores = _mixed(logits, ranks, n_active, rule)
    if rule.weights == "chosen":
        top = torch.where(chosen, logits, zero - math.inf).amax(dim=1, keepdim=True)
        scores = (logits - top).exp()
    p = torch.where(chosen, scores, zero)
    if rule.weights not in ("score", "mixed"):
        total = p.sum(dim=1, keepdim=True)
        p = p / (total.clamp(min=rule.epsilon) if rule.epsilon_floor else total + rule.epsilon)
    scaled = p * rule.scale if expert_scale is None else p * rule.scale * expert_scale
    weights.copy_(torch.where(chosen, scaled, zero))


def _mixed(logits: Tensor, ranks: Tensor, n_active: int, rule: Router) -> Tensor:
    """SparseMixer's weights of the n_active best of each token."""
    zero = logits.new_zeros(())
    found = torch.zeros_like(logits)
    for i in range(n_active):
        best = torch.where(ranks == i, logits, zero).sum(dim=1, keepdim=True)
        apart = (best - logits) / torch.maximum(logits.abs(), best)
        near = ~(apart > 2 * rule.epsilon) & (ranks >= i)
        total = torch.where(near, (logits - best).exp(), zero).sum(dim=1, keepdim=True)
        found = torch.where(ranks == i, 1 / total, found)
    return found


def _scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(dim=1)
    return logits.sigmoid() if score == "sigmoid" else logits


def _ranks(x: Tensor) -> Tensor:
    """Return how many of the last dimension come before each: larger ones, NaNs, equal ones before it."""
    nan, at = x.isnan(), torch.arange(x.shape[-1], device=x.device)
    mine, other = x[..., :, None], x[..., None, :]
    mine_nan, other_nan = nan[..., :, None], nan[..., None, :]
    equal = (mine == other) | (mine_nan & other_nan)
    first = equal & (at < at[:, None])
    before = (other_nan & ~mine_nan) | ((mine_nan == other_nan) & ((other > mine) | first))
    return before.sum(dim=-1)


def _in_best_groups(wanted: Tensor, rule: Router) -> Tensor:
    """Return what experts are chosen by, with -inf for those of other groups than the best."""
    groups = wanted.view(len(wanted), rule.groups, -1)
    best = _ranks(groups) < (1 if rule.group_rule == "max" else 2)
    kept = _ranks(torch.where(best, groups, groups.new_zeros(())).sum(dim=2)) < rule.groups_kept
    return torch.where(kept[:, :, None], groups, groups.new_zeros(()) - math.inf).view(wanted.shape)


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
    """named u8 [B, ceil(n / 8)] = bits of the neurons with second . f(first . x) >= threshold f32 [n].

    f is relu or nothing; without `first`, it is f(x). Signs in `second`: how many of x's agree, less how many
    do not. Neurons [0, hot) are named always, and those of a score that is no number.
    """
    if second.format == SIGNS:
        bytes_of = second.data[:, second.skip : second.skip + second.row_bytes]
        mine = torch.where(x > 0, 1.0, -1.0)
        pieces = _pieces(second.rows, second.columns)
        scores = torch.cat([mine @ (2.0 * _bits(bytes_of[s], second.columns) - 1.0).T for s in pieces], dim=1)
    else:
        code = x if first is None else _times(first, x, None, ints)
        scores = _times(second, code.clamp(min=0) if relu else code, None)
    bits = ~(scores < threshold)
    bits[:, :hot] = True
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8))
    values = torch.bitwise_left_shift(torch.ones_like(padded), _eight(x.device).repeat(named.shape[1]))
    named.copy_((padded * values).view(*named.shape, 8).sum(dim=2))


def softcap(x: Tensor, cap: float) -> None:
    """x = cap * tanh(x / cap)."""
    x.div_(cap).tanh_().mul_(cap)


def choose(
    ids: Tensor, chosen: Tensor, logits: Tensor, scale: float, draws: Tensor, keys: Tensor, sums: Tensor
) -> None:
    """Choose a token for each row of logits [B, vocabulary], which count times `scale`.

    draws f64 [B, 5 + BANNED]: top k, top p, min p, temperature, random number; banned tokens, -1 is none.
    ids i32 [B]: the tokens. chosen i32 [B, 3]: token, digest, 0; or, of the first logit that is NaN or
    infinite, its token's complement, digest, its bits. keys i64, sums i32: for what lies between passes.

    A key is a logit, and below it how early its token is: so keys are distinct, and their order is that of
    the sampler. What is kept of the CANDIDATES largest is added up in f64.
    """
    x = logits * scale
    bits, i = x.view(torch.int32).long(), torch.arange(x.shape[1], device=x.device)
    digests = (bits * _digest_weights(i)).sum(1) & 0xFFFFFFFF
    ordered = torch.where(x == 0, 0, bits)  # -0 as 0
    ordered = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    banned = draws[:, 5:].long()
    ordered = ordered.masked_fill((i[None, :, None] == banned[:, None, :]).any(2), -(1 << 31))
    ordered = torch.where(torch.isfinite(x), ordered, 0x7FFFFFFF)
    best = (ordered << 32 | 0x7FFFFFFF - i).topk(CANDIDATES, dim=1).values
    token, high = 0x7FFFFFFF - (best & 0x7FFFFFFF), best >> 32
    values = torch.where(high < 0, high ^ 0x7FFFFFFF, high).int().view(torch.float32).double()
    top_k, top_p, min_p, temperature, number = draws[:, :5, None].unbind(1)
    below, place = values - values[:, :1], torch.arange(CANDIDATES, device=x.device)
    p = torch.exp(below).masked_fill(place >= top_k, 0)
    kept = (place < top_k) & (p >= min_p)
    reached = (p / p.sum(1, keepdim=True)).masked_fill(~kept, 0).cumsum(1)
    kept &= (top_p == 1) | (place <= ((reached < top_p) & kept).sum(1, keepdim=True))
    odds = torch.exp(below / temperature).masked_fill(~kept, 0).cumsum(1)
    at = torch.minimum(odds <= number * odds[:, -1:], odds < odds[:, -1:]).sum(1, keepdim=True)
    odd = high[:, :1] == 0x7FFFFFFF
    at = at.masked_fill(odd, 0)
    ids.copy_(token.gather(1, at)[:, 0])
    chosen[:, 0] = torch.where(odd[:, 0], ~token[:, 0], ids)
    chosen[:, 1] = (digests ^ 1 << 31) - (1 << 31)
    chosen[:, 2] = torch.where(odd, bits.gather(1, token[:, :1]), 0)[:, 0]


# ---- parts


def _digest_weights(i: Tensor) -> Tensor:
    w = i * 0x9E3779B1 & 0xFFFFFFFF
    return ((w ^ w >> 16) * 0x85EBCA6B & 0xFFFFFFFF) | 1


def _decode(w: Rows, data: Tensor) -> Tensor:
    """Stored rows [n, stride] -> f32 [n, columns]."""
    part = data[:, w.skip : w.skip + w.row_bytes]
    if w.format in PLAIN:
        return _viewed(part, PLAIN[w.format]).float()
    of = _planes(w, part)
    scales, minima = _scales(w, of)
    q = _numbers(w, of).view(*scales.shape, -1)
    y = q * scales[..., None]
    return (y if minima is None else y - minima[..., None]).view(len(part), w.columns)


def _planes(w: Rows, part: Tensor) -> dict[str, Tensor]:
    """The bytes of each plane, [rows, blocks, bytes of a block]."""
    out, at, format = dict[str, Tensor](), 0, FORMATS[w.format]
    blocks = w.columns // format.block
    for plane in format.planes:
        end = at + blocks * plane.nbytes
        whole = part[:, at:end].clone(memory_format=torch.contiguous_format)  # aligned
        out[plane.name] = whole.view(len(part), blocks, plane.nbytes)
        at = end
    return out


def _numbers(w: Rows, of: dict[str, Tensor]) -> Tensor:
    """f32 [rows, blocks of 32 columns, 32], unscaled: bits of all planes, and what they stand for."""

    def spread(plane: str, bits: int, count: int) -> Tensor:
        """`bits` bits at each of `count` places of a block's bytes, place by place."""
        data = of[plane].reshape(len(of[plane]), w.columns // 32, -1)
        return torch.cat([(data >> bits * i) & (2**bits - 1) for i in range(count)], dim=2)

    if w.format == "q8_0":
        return of["quants"].view(torch.int8).float()
    if "quants" in of:
        q, low = spread("quants", 4, 2), 4
    else:
        q, low = spread("pairs", 2, 4), 2
    if "quants" in of and "pairs" in of:
        q |= spread("pairs", 2, 4) << low
    for plane in {"fifth", "third"} & of.keys():
        q |= spread(plane, 1, 8) << low
    if (book := BOOKS.get(w.format)) is not None:
        return torch.as_tensor(book, device=q.device)[q.int()]
    return q.float() - NOUGHT.get(w.format, 0)


def _scales(w: Rows, of: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Scales and minima f32 [rows, blocks of 32 columns, 1], or 2 where a block has two of each."""
    shape = len(next(iter(of.values()))), w.columns // 32, -1
    if "super" in of:
        n, m = _integers(w.format, of)
        scales = (_floats(of["super"]) * n.float()).view(shape)
        return scales, None if m is None else (_floats(of["super_minimum"]) * m.float()).view(shape)
    if "exponent" in of:
        e = of["exponent"].int()
        return torch.where(e < 2, (e + 1) << 21, (e - 1) << 23).view(torch.float32), None  # 2**(e - 128)
    return _floats(of["scale"]), -_floats(of["minimum"]) if "minimum" in of else None


def _integers(format: str, of: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """The integers [rows, blocks, 8 or 16] that scale parts of blocks of 256 columns, and those of minima."""

    def places(plane: str, bits: int, count: int) -> Tensor:
        """Numbers of `bits` bits, `count` one after the other in a byte, or in two."""
        data = of[plane] if count * bits == 8 else of[plane].view(torch.int16).int()
        shifts = bits * torch.arange(count, device=data.device)
        found: Tensor = (data[..., None] >> shifts.to(data.dtype)) & (2**bits - 1)
        return found.flatten(2)

    if format in ("q4_k", "q5_k"):
        n, high = of["scales"], of["minima"]
        return n & 63, torch.cat((high & 15, high >> 4), dim=2) << 2 | n >> 6
    if format == "q2_k":
        return of["scales"] & 15, of["scales"] >> 4
    if format == "q6_k":
        return of["scales"].view(torch.int8), None
    if format == "q3_k":
        return (places("scales", 4, 2) | places("scales_high", 2, 4) << 4).int() - 32, None
    if format == "iq4_xs":
        return (places("scales", 4, 2) | places("scales_high", 2, 8) << 4) - 32, None
    return torch.ones(8, dtype=torch.uint8, device=of["super"].device), None


def _floats(halves: Tensor) -> Tensor:
    """f16 [..., 2] bytes -> f32 [..., 1]."""
    return halves.view(torch.float16).float()


def _viewed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [n, bytes] as numbers, copied only where they are not aligned."""
    size = dtype.itemsize
    aligned = part.stride(0) % size == 0 and part.storage_offset() % size == 0
    return (part if aligned else part.clone(memory_format=torch.contiguous_format)).view(dtype)


def _gate_up(
    times: Times,
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
    up_bias: Tensor | None,
    alpha: float,
    scales_input: bool,
) -> None:
    n, zero = gate.rows, x.new_zeros(())
    share = None if weights is None else weights.repeat_interleave(n // weights.shape[1], dim=1)
    wanted = torch.ones_like(h, dtype=torch.bool) if share is None else share != 0
    if named is not None:
        wanted &= _bits(named, n).bool().any(dim=0)
    scales = share if scales_input and share is not None else x.new_ones(())
    a = _activation(times(gate, x, gate_bias) * scales, activation, bound, alpha)
    a = torch.where(wanted, a, zero)
    opened = wanted if counts is None else wanted & (a != 0).any(dim=0)
    if counts is not None:
        counts[2] += wanted.any(dim=0).sum()
        counts[1] += (a != 0).any(dim=0).sum()
    if up is not None:
        u = times(up, x, up_bias) * scales
        u = _activation(u, "relu", 0.0) if up_relu else _up_factor(u, activation, bound)
        a = torch.where(opened, a * u, zero)
    if counts is not None:
        counts[0] += (a != 0).sum()
        counts[3] += (a != 0).any(dim=0).sum()
    h.copy_(a if share is None or scales_input else torch.where(wanted, a * share, zero))


def _times(
    w: Rows, x: Tensor, bias: Tensor | None, ints: Vector = None, squares: Squares | None = None
) -> Tensor:
    y = _exactly(w, _met(w, x, ints), None)
    if squares is not None:
        y *= (squares.sums.sum(dim=1, keepdim=True) / w.columns + squares.eps).rsqrt()
    return y if bias is None else y + bias


def _begin_norm(x: Tensor, begun: BegunNorm | None) -> None:
    if begun is None:
        return
    begun.sums.copy_((x * x).view(len(x), -1, 32).sum(dim=2))
    torch.mul(x, begun.weight, out=begun.out)
    _put_ints(begun.ints, begun.out)


def _tiled(w: Rows, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return what many tokens give, however many they are."""
    return _exactly(w, x if w.format in AS_F16 else _met(w, x), bias)


def _exactly(w: Rows, x: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.cat([x @ _decode(w, w.data[s]).T for s in _pieces(w.rows, w.columns)], dim=1)
    return y if bias is None else y + bias


def _bundled(rows: Rows, h: Tensor) -> Tensor:
    """h [B, n] times rows, one a neuron."""
    needed, y = (h != 0).any(dim=0)[:, None], h.new_zeros(len(h), rows.columns)
    for s in _pieces(rows.rows, rows.columns):
        w = _decode(rows, rows.data[s])
        y += h[:, s] @ torch.where(needed[s], w, w.new_zeros(()))
    return y


def _pieces(n: int, each: int) -> list[slice]:
    """Return n things of so many numbers each in turn, as many at once as make a PIECE."""
    step = max(1, PIECE // max(1, each))
    return [slice(i, min(n, i + step)) for i in range(0, n, step)]


def _met(w: Rows, x: Tensor, ints: Vector = None) -> Tensor:
    """Return x as these rows meet it."""
    if w.format in PLAIN or (len(x) > FEW and w.format in AS_F16):
        return x
    q, scales = _as_bytes(x) if ints is None else _from_ints(ints)
    return (q * scales[..., None]).view(x.shape)


def _as_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [B, columns] in blocks of 32 -> integers from -127 to 127 f32 [B, blocks, 32], scales [B, blocks].

    A block with an infinity or a NaN has a NaN for its scale. As the CPU's kernels do it (`x_quantize`).
    """
    blocks = x.reshape(len(x), -1, 32)
    wrong = (blocks - blocks).sum(dim=2)
    peak = torch.where(wrong == 0, blocks.abs().amax(dim=2), 0.0)
    inverse = torch.where(peak > 1e-36, 127.0 / peak, 0.0)
    q = torch.where((wrong == 0)[..., None], blocks * inverse[..., None], 0.0)
    return q.round(), peak / 127.0 + wrong


def _put_ints(ints: Vector, x: Tensor) -> None:
    """Write x in int8 as `Scratch.quantised` says, if there is a place for it."""
    if ints is not None:
        q, scales = _as_bytes(x)
        numbers, of_blocks, halves = _in_ints(ints)
        numbers.copy_(q.flatten())
        of_blocks.copy_(scales.flatten())
        halves.copy_(q.view(-1, 16).sum(dim=1))


def _from_ints(ints: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers f32 [blocks, 32] and scales [blocks]."""
    numbers, scales, _ = _in_ints(ints)
    return numbers.view(-1, 32).float(), scales


def _in_ints(ints: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return where the numbers, the scales and the sums of halves are."""
    n = len(ints) // 10  # blocks
    return (
        ints[: 8 * n].view(torch.int8),
        ints[8 * n : 9 * n].view(torch.float32),
        ints[9 * n :].view(torch.int16),
    )


def _put(out: Tensor, y: Tensor, add: bool) -> None:
    if add:
        out += y
    else:
        out.copy_(y)


def _normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, layer: bool) -> Tensor:
    if weight is None:
        return x
    if layer:
        x = x - x.mean(dim=-1, keepdim=True)
    y = x * ((x * x).mean(dim=-1, keepdim=True) + eps).rsqrt() * weight
    return y if bias is None else y + bias


def _turn(part: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates, in place, the first 2 n elements of heads [B, heads, d] by angles [B, n]."""
    n = cos.shape[1]
    a, b = part[..., :n].clone(), part[..., n : 2 * n].clone()
    c, s = cos[:, None], sin[:, None]
    part[..., :n], part[..., n : 2 * n] = a * c - b * s, b * c + a * s


def _up_factor(u: Tensor, kind: str, bound: float) -> Tensor:
    return u.clamp(-bound, bound) + 1 if kind == "swiglu_oai" else u


def _activation(g: Tensor, kind: str, threshold: float, alpha: float = 1.0) -> Tensor:
    match kind:
        case "silu":
            return g / (1 + (-g).exp())
        case "gelu":
            return 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        case "swiglu_oai":
            g = g.clamp(max=threshold)
            return g / (1 + (-alpha * g).exp())
    zero = g.new_zeros(())
    match kind:
        case "relu":
            return torch.where(g <= 0, zero, g)  # a NaN stays one
        case "fatrelu":
            return torch.where(g <= threshold, zero, g)
        case "relu2":
            return torch.where(g <= 0, zero, g * g)
    raise ValueError(kind)


def _bits(data: Tensor, n: int) -> Tensor:
    """u8 [rows, ceil(n / 8)] -> f32 [rows, n] of 0 and 1."""
    return ((data[:, :, None] >> _eight(data.device)) & 1).view(len(data), -1)[:, :n].float()


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _softplus(x: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x)


def _unit(x: Tensor) -> Tensor:
    return x * ((x * x).sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def _eight(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
