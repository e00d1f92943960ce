"""Plant a trained model's activity in random weights: what attention brings to gates.

The last blocks of the residual stream's columns are attention's own (`AttentionColumns`), and it writes
nowhere else. Its queries are those of planted routing: alike for all tokens, and sharp. So what it brings
lasts for a while, in a share of the heads for hundreds of tokens.
"""

from __future__ import annotations

import math

import numpy as np

from thermocline.convert.random_weights.routing import same_query
from thermocline.convert.random_weights.stored_rows import Matrix
from thermocline.convert.synthetic_weights import BLOCK, WeightStatistics

KEPT = 0.28  # of the power of values, what such attention keeps in a text of some hundred tokens


def planted(stats: WeightStatistics, name: str, plain: Matrix) -> Matrix:
    """Return a matrix of a model with a trained activity, which without would be `plain`."""
    assert stats.activity is not None
    blocks, attended = stats.spec.dim // BLOCK, stats.attended
    first, _, rest = name.removeprefix("layers.").partition(".")
    layer, kind = (int(first), rest) if name.startswith("layers.") else (0, name)
    own = blocks - attended.blocks  # the first of attention's blocks
    match kind:
        case "embed.weight" | "down":  # whose rows are the stream's columns
            sd = np.array(np.broadcast_to(plain.sd, (blocks,)))
            sd[own:] = attended.deviations(0) if kind == "embed.weight" else 0
            return Matrix(sd, plain.fixed, mirrored=plain.mirrored)
        case "shared.down.weight":
            return Matrix(plain.sd, silent=(0, *range(own, blocks)))
        case "attn_out.weight":
            shape = stats.spec.attention(layer)
            assert shape is not None
            sd = np.array([attended.added(layer) / math.sqrt(shape.context * KEPT)], np.float32)
            written = own + attended.block(layer)
            return Matrix(sd, silent=tuple(b for b in range(blocks) if b != written))
        case "qkv.weight" | "q.weight" | "q_a.weight":
            _, rms = stats.stream(layer, attended=False)
            same = same_query(stats, layer, kind == "qkv.weight", rms, stats.activity.lasting)
            return Matrix(plain.sd, (same,))
    return plain
