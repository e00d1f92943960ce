"""What the decoder and every table of ops share: weights, batches, statistics.

Owns the types that cross that door. Must not know how anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.model.spec import ModelSpec

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
# Neurons an FFN computes: all; those whose gate is not zero (the same answer); of the predicted ones, those.
SPARSITIES = ("off", "exact", "predict")
# Tokens that `predict` guesses for; more share too many neurons, and are computed exactly.
FEW = _native.limits().few_tokens


@dataclass(frozen=True)
class Norm:
    weight: F32  # [dim]
    bias: F32 | None


@dataclass(frozen=True)
class Linear:
    weight: Any  # an ops matrix, [out, in]
    bias: F32 | None


@dataclass(frozen=True)
class FFN:
    """One expert; `gate` and `up` (None if ungated) are [ffn_dim, dim], `down` is [dim, ffn_dim].

    With `bundles`, `down` is transposed, [ffn_dim, dim]: a row per neuron, so that a neuron can be skipped.
    """

    gate: Linear
    up: Any | None
    down: Any
    down_bias: F32 | None
    bundles: bool
    predictor: Any | None = None  # of ops' own, with bundles: guesses which neurons are active
    disk: Any | None = None  # of ops' own: up and down are places that neurons take turns in
    gate_disk: Any | None = None  # likewise of gate, with a predictor
    hot: FFN | None = None  # on a GPU: the neurons before these
    sent: tuple[Any, Any] | None = None  # of ops' own: gate rows and bundles in RAM, to be sent to a GPU


@dataclass(frozen=True)
class Layer:
    attn_norm: Norm | None
    qkv: Linear  # rows: all q heads, all k heads, all v heads
    attn_out: Linear
    ffn_norm: Norm | None
    experts: tuple[FFN, ...]  # one where there is no router
    q_norm: F32 | None = None  # [head_dim]
    k_norm: F32 | None = None
    attn_sub_norm: Norm | None = None  # of attention's output, before attn_out
    ffn_sub_norm: Norm | None = None  # of the activations, before down
    attn_post_norm: Norm | None = None  # of a half's result, before it joins the residual stream
    ffn_post_norm: Norm | None = None
    router: Any | None = None  # of a mixture: a matrix [n_experts, dim]
    router_there: Any | None = None  # on a GPU that has neurons of its experts: the same


@dataclass(frozen=True)
class Weights:
    embed: Any  # matrix [vocab_size, dim]
    pos_embed: Any | None  # matrix [max_context, dim], learned positions only
    layers: tuple[Layer, ...]
    out_norm: Norm | None
    head: Linear  # [vocab_size, dim]; the embedding again when tied
    project_in: Any | None = None  # matrix [dim, embed_dim], where embeddings are narrower
    project_out: Any | None = None  # matrix [embed_dim, dim]


@dataclass(frozen=True)
class Heads:
    """How the heads of one layer attend: all of attention but its matrices."""

    n: int
    n_kv: int
    dim: int
    window: int | None  # attend to the last `window` positions only
    scale: float  # of scores
    softcap: float | None  # scores become cap * tanh(score / cap)
    q_norm: F32 | None  # [dim], of an RMS norm
    k_norm: F32 | None
    norm_eps: float

    @staticmethod
    def of(spec: ModelSpec, index: int = 0, layer: Layer | None = None) -> Heads:
        return Heads(
            n=spec.n_heads,
            n_kv=spec.n_kv_heads,
            dim=spec.head_dim,
            window=spec.window(index),
            scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            softcap=spec.attention_softcap,
            q_norm=None if layer is None else layer.q_norm,
            k_norm=None if layer is None else layer.k_norm,
            norm_eps=spec.norm_eps,
        )


@dataclass(frozen=True)
class Batch:
    """Tokens of one step, from any number of sequences. Row r is one token.

    `sequence[r]` is a row of `block_table`; block_table[s, b] is the KV block of positions b*block and on.
    A sequence's rows are in position order, and every earlier position is in the cache or in this batch.
    Layers with a window use `window_table`; its blocks before the window may be absent, -1.
    """

    ids: I32  # [tokens]
    positions: I32  # [tokens]
    sequence: I32  # [tokens]
    block_table: I32  # [sequences, blocks]
    logit_rows: I32  # rows whose logits are wanted
    window_table: I32 | None = None  # [sequences, blocks]; None: block_table

    def table(self, window: int | None) -> I32:
        return self.block_table if window is None or self.window_table is None else self.window_table


@dataclass
class FFNStats:
    """What sparsity did, summed over layers and tokens."""

    active: int = 0  # (token, neuron) pairs with a non-zero activation
    neurons: int = 0  # (token, neuron) pairs in all
    rows: int = 0  # up/down rows read
    rows_dense: int = 0  # up/down rows a dense pass would have read
    gates_dense: int = 0  # gate rows in all
    predicted: int = 0  # gate rows read: all, or with `predict` those of neurons predicted to be active
    predictor_bytes: int = 0  # read of predictors
    # Where somebody asks and the ops know: active, rows and predicted of each layer, one after the other.
    layers: list[int] | None = None


class DiskCounts(NamedTuple):
    """What the disk did for neurons that are not all in memory."""

    needed: int = 0  # records that tokens asked for
    missed: int = 0  # of those, read from disk
    reads: int = 0
    bytes: int = 0
    waited_ns: int = 0  # of all threads, with nothing else to do

    def since(self, before: DiskCounts) -> DiskCounts:
        return DiskCounts(*(now - then for now, then in zip(self, before, strict=True)))


F16 = NDArray[np.float16]


@dataclass(frozen=True)
class KVLayer:
    """One layer's view of the storage, written and read in place."""

    k: F16  # [n_blocks, n_kv_heads, head_dim, block]: a vector holds one element of many positions' keys
    v: F16  # [n_blocks, n_kv_heads, block, head_dim]
