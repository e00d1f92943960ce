"""Plant a router's choices in random weights: an expert's own part, a slow part, and the token's.

The last two blocks of the residual stream's columns are the router's: no FFN writes to either. In the first,
mixers write nothing, so a token's embedding stays as it was. In the other, embeddings are 0, so it holds
what attention alone brings. That is slow: queries read the constant columns for the most part, so they are
alike, and they are sharp, so a head looks at a few positions until a better one comes. RoPE turns some
elements of a query quickly and some slowly, so choices fade over all spans. Routers read the three parts
with weights that undo the columns' deviations, so at any depth the ratios are those of `SyntheticRouting`.
"""

from __future__ import annotations

import math

import numpy as np

from thermocline.convert.random_weights.stored_rows import Matrix, normal_values
from thermocline.convert.synthetic_weights import (
    ATTENTION_ADDS,
    BLOCK,
    F32,
    FFN_ADDS,
    WeightStatistics,
    random_order,
)
from thermocline.model.spec import AttentionShape

SHARP = 3.0  # the deviation of attention's scores: queries' part that is the same for all tokens
KEPT = 0.36  # of the power of values, what attention this sharp keeps among a few hundred positions
# Elements of a head before and from this part of a half on: with theta 10000, RoPE turns them once in 6 to
# 250 tokens, and in 2000 and more.
FAST, SLOW = 0.4, 0.625
GATED = 0.29  # the mean square of sigmoid(z) of a normal z


def planted(stats: WeightStatistics, name: str, plain: Matrix) -> Matrix:
    """Return a matrix of a model with planted routing, which without would be `plain`."""
    blocks = stats.spec.dim // BLOCK
    first, _, rest = name.removeprefix("layers.").partition(".")
    layer, kind = (int(first), rest) if name.startswith("layers.") else (0, name)
    match kind:
        case "embed.weight" | "pos_embed.weight":
            return _but(plain, blocks, blocks - 1)
        case "down":  # a row for each neuron
            return _but(plain, blocks, blocks - 2, blocks - 1)
        case "attn_out.weight":
            return Matrix(plain.sd, silent=(0, blocks - 2))
        # What a recurrent layer reads out of its state is another for each token.
        case "mixer.out.weight" | "shared.down.weight":
            return Matrix(plain.sd, silent=(0, blocks - 2, blocks - 1))
        case "down.weight":
            each = range(0, stats.spec.ffn(layer).experts * blocks, blocks)
            return Matrix(
                plain.sd, silent=tuple(b for e in each for b in (e, e + blocks - 2, e + blocks - 1))
            )
        case "router.weight":
            return _router(stats, layer)
        case "qkv.weight" | "q.weight" | "q_a.weight":
            norm = _deviation(stats, layer) if stats.spec.norms_before else 1.0
            return Matrix(plain.sd, (same_query(stats, layer, kind == "qkv.weight", norm),))
    return plain


def vector(stats: WeightStatistics, name: str, values: F32, first: int) -> F32:
    """Return a vector of a model with columns of its own, from element `first` on."""
    if not stats.own_blocks:
        return values
    if name.endswith((".attn_out.bias", ".down.bias")):
        column = (first + np.arange(values.shape[-1])) // BLOCK
        values[..., (column == 0) | (column >= stats.spec.dim // BLOCK - stats.own_blocks)] = 0
    elif (
        name.endswith(".selection_bias")
        and stats.routing is not None
        and stats.spec.router.score == "softmax"
    ):
        values /= stats.spec.n_experts  # as are scores; else biases alone would choose
    elif name.endswith((".q_norm.weight", ".q_a_norm.weight")):
        values *= np.float32(_sharpness(stats, int(name.split(".")[1])))
    return values


def _but(plain: Matrix, blocks: int, *silent: int) -> Matrix:
    """Return a matrix with zeros in some blocks of columns."""
    sd = np.array(np.broadcast_to(plain.sd, (blocks,)))
    sd[list(silent)] = 0
    return Matrix(sd, plain.fixed, plain.silent, plain.mirrored)


def _router(stats: WeightStatistics, layer: int) -> Matrix:
    """Describe a router: what it reads is divided by its deviation, and by what a norm has divided it by."""
    s, own = stats.spec, stats.routing
    assert own is not None
    blocks, embedded = s.dim // BLOCK, stats.embed_sd * s.embed_scale
    norm = 1.0 if s.router_input == "layer_input" else _deviation(stats, layer)
    even = (random_order(s.n_experts, stats.seed, layer, 3) + 0.5) / s.n_experts * 2 - 1
    same = math.sqrt(3) * even * norm / (BLOCK * stats.constant_value * s.embed_scale)
    slow = _slow(stats, layer if s.parallel or s.router_input == "layer_input" else layer + 1)
    sd = np.zeros(blocks)
    sd[-2] = own.token * norm / (math.sqrt(BLOCK) * embedded)
    sd[-1] = own.slow * norm / (math.sqrt(BLOCK) * slow) if slow else 0
    return Matrix(sd.astype(np.float32), (same.astype(np.float32),))


def same_query(stats: WeightStatistics, layer: int, fused: bool, norm: float, lasting: float = 0.0) -> F32:
    """Return the weights of a query's rows on constant columns; 0 in rows of keys and values.

    `norm` is what the norm before has divided these columns by. If `lasting` is given, such a share of the
    heads has only elements that RoPE turns slowly: they look at the same tokens for hundreds of others. The
    rest has only fast ones.
    """
    s, shape = stats.spec, stats.spec.attention(layer)
    assert shape is not None
    if shape.latent is not None:
        rows = shape.latent.matrices(shape.heads, s.dim)["q" if shape.latent.q_rank is None else "q_a"][0]
    else:
        rows = shape.heads * shape.head_dim
    order = random_order(rows, stats.seed, layer, 4)
    z = normal_values((order * 65536 // rows).astype(np.uint16))
    if lasting:
        z *= _turning(shape, s.rotary_dim, lasting).reshape(-1)
    z *= np.float32(SHARP * norm / (BLOCK * stats.constant_value * s.embed_scale))
    if shape.latent is None and not s.qk_norms(layer):  # else the norm that follows has the sharpness
        z *= np.float32(_sharpness(stats, layer) / SHARP)
    return np.concatenate([z, np.zeros(shape.qkv_rows - rows, np.float32)]) if fused else z


def _turning(shape: AttentionShape, rotary_dim: int | None, lasting: float) -> F32:
    """Return factors for elements of queries [heads, head_dim]: 0 for those of another speed than the head.

    The first heads have slow elements, the others fast ones. These grow, so that scores are as large.
    """
    half = (rotary_dim or shape.head_dim) // 2
    place = np.arange(shape.head_dim)
    speed = np.where(place < 2 * half, place % half / half, 1.0)  # 0 is the fastest, 1 does not turn
    slow = np.arange(shape.heads)[:, None] < lasting * shape.heads
    factors = np.where(slow, speed >= SLOW, speed < FAST).astype(np.float32)
    factors /= np.sqrt(factors.mean(axis=1, keepdims=True))
    return factors


def _sharpness(stats: WeightStatistics, layer: int) -> float:
    """Return the deviation of a query's elements that makes the scores' deviation `SHARP`."""
    s, shape = stats.spec, stats.spec.attention(layer)
    if s.attention_scale is None or shape is None or shape.latent is not None:
        return SHARP
    return SHARP / (s.attention_scale * math.sqrt(shape.head_dim))


def _slow(stats: WeightStatistics, layers: int) -> float:
    """Return the deviation of the slow columns, to which the attention of so many layers has written."""
    s = stats.spec
    found = [shape for i in range(layers) if (shape := s.attention(i)) is not None]
    kept = KEPT * (GATED if s.attention_gate else 1.0)
    each = [1.0 if s.norms_after else stats.attn_out_sd**2 * shape.context * kept for shape in found]
    return s.residual_scale * math.sqrt(sum(each))


def _deviation(stats: WeightStatistics, layer: int) -> float:
    """Return about how large the residual stream is behind a layer's mixer."""
    s = stats.spec
    mixed = sum(s.mixer(i) != "none" for i in range(layer + 1))
    fed = sum(s.ffn(i).experts > 0 for i in range(layer))
    added = mixed * KEPT * ATTENTION_ADDS / s.n_layers + fed * FFN_ADDS / s.n_layers
    if s.norms_after:
        added = mixed + fed
    return math.sqrt((stats.embed_sd * s.embed_scale) ** 2 + s.residual_scale**2 * added)
