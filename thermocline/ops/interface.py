"""`Ops`, and the types that the decoder and every table of ops share: weights, batches, statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, NewType, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.model.modes import CACHE_TYPES, PLAIN, CacheTypes, row_bytes
from thermocline.model.spec import Latent, ModelSpec

if TYPE_CHECKING:
    from thermocline.ops.device_layers import DevicePredictor
    from thermocline.pack.predictor import LayerPredictor

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
# Tokens that `predict` guesses for; more share too many neurons, and are computed exactly.
FEW = _native.limits().few_tokens
PAGE_RUN = _native.limits().page_run
CPU = "cpu"  # a device's name, as in a placement; the GPUs of a session are "gpu:0", "gpu:1"


def gpu_index(device: str) -> int:
    """Return N of "gpu:N"."""
    return int(device.removeprefix("gpu:"))


class WeightMatrix(Protocol):
    """A matrix of weights, wherever and however it is stored; ops know their own kinds."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Stacked:
    """Matrices of one width, one under the other, as one: q, k and v where their formats differ."""

    parts: tuple[WeightMatrix, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(p.shape[0] for p in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)


def stacked(w: WeightMatrix) -> tuple[WeightMatrix, ...]:
    """Return the matrices that `w` consists of: itself, if it is no stack."""
    return w.parts if isinstance(w, Stacked) else (w,)


@dataclass(frozen=True)
class Norm:
    weight: F32  # [dim]
    bias: F32 | None


@dataclass(frozen=True)
class LatentMatrices:
    """The matrices of a latent attention behind the first ones. RMS norms have no bias."""

    kv_norm: F32  # [kv_rank]
    k_b: WeightMatrix  # [heads * kv_rank, nope]: a head's query, for latents
    v_b: WeightMatrix  # [heads * value, kv_rank]: a head's output, of what it found
    q_norm: F32 | None = None  # [q_rank]
    q_b: WeightMatrix | None = None  # [heads * (nope + rope), q_rank]


@dataclass(frozen=True)
class Linear:
    weight: WeightMatrix  # [out, in]
    bias: F32 | None


@dataclass(frozen=True)
class NeuronCache:
    """The slots in memory in which the rows of neurons that lie on disk take turns."""

    bundles: _native.DiskRows | None  # None: they are all in memory
    gates: _native.DiskRows | None  # None: all gate rows are in memory


@dataclass(frozen=True)
class FFNPart:
    """Consecutive neurons of an FFN on one device; `gate` and `up` (None if ungated) have a row for each.

    With a cache the rows of `up` and `down`, and perhaps of `gate`, are its slots.
    """

    gate: Linear
    up: WeightMatrix | None
    down: WeightMatrix
    device: str = CPU
    predictor: _native.Predictor | LayerPredictor | None = None  # guesses which of these neurons are active
    cache: NeuronCache | None = None
    pinned: FFNPart | None = None  # the same rows of RAM as GPUs read them, so that they can be sent to one
    up_bias: F32 | None = None  # never of bundles
    stream: _native.StreamedLayer | None = (
        None  # gate, up and down are their first rows; the others come here
    )


@dataclass(frozen=True)
class FFN:
    """One expert: the sum of its parts, whose neurons follow each other, hottest first; the CPU's are last.

    With `bundles`, `down` is transposed, [neurons, dim]: a row per neuron, so that a neuron can be skipped.
    Else it is [dim, neurons], and there is one part.
    """

    parts: tuple[FFNPart, ...]
    down_bias: F32 | None
    bundles: bool
    predictor: DevicePredictor | None = None  # on the first GPU, for the neurons of all parts

    @staticmethod
    def whole(
        gate: Linear, up: WeightMatrix | None, down: WeightMatrix, down_bias: F32 | None, bundles: bool
    ) -> FFN:
        """Return an FFN whose neurons are all in RAM."""
        return FFN((FFNPart(gate, up, down),), down_bias, bundles)

    @property
    def part(self) -> FFNPart:
        """Return the only part."""
        (only,) = self.parts
        return only

    def on(self, device: str) -> FFNPart | None:
        """Return the part on a device, if there is one."""
        return next((p for p in self.parts if p.device == device), None)

    def with_part(self, part: FFNPart) -> FFN:
        """Return this FFN with another part in place of the one on the same device."""
        return replace(self, parts=tuple(part if p.device == part.device else p for p in self.parts))


@dataclass(frozen=True)
class PerLayer:
    """Matrices that take a token's own input to a layer into the stream, where the stream lets it."""

    gate: WeightMatrix  # [width, dim]
    down: WeightMatrix  # [dim, width]
    post_norm: Norm


@dataclass(frozen=True)
class DeltaNet:
    """A gated DeltaNet's weights. `spec.recurrent` has the sizes; `reference.deltanet` computes it."""

    qkv: WeightMatrix  # [channels, dim]: all groups' queries, all groups' keys, all heads' values
    z: WeightMatrix  # [inner, dim]
    beta: WeightMatrix  # [heads, dim]
    alpha: WeightMatrix  # [heads, dim]
    conv: F32  # [channels, conv]
    decay: F32  # [heads]: below 0
    dt_bias: F32  # [heads]
    norm: F32  # [head_dim]: of each head's answer
    out: WeightMatrix  # [dim, inner]


@dataclass(frozen=True)
class Mamba2:
    """A Mamba-2's weights; `reference.mamba2` computes it."""

    into: WeightMatrix  # [inner + channels + heads, dim]: z, then x, B and C, then dt
    conv: F32  # [channels, conv]
    conv_bias: F32 | None  # [channels]
    decay: F32  # [heads]: below 0
    dt_bias: F32  # [heads]
    skip: F32  # [heads]: D
    norm: F32  # [inner]: of each group's answers
    out: WeightMatrix  # [dim, inner]


@dataclass(frozen=True)
class ShortConv:
    """A short convolution's weights; `reference.short_conv` computes it."""

    into: WeightMatrix  # [3 * dim, dim]: B, C and x
    conv: F32  # [dim, conv]
    out: WeightMatrix  # [dim, dim]


Mixer = DeltaNet | Mamba2 | ShortConv


@dataclass(frozen=True)
class Layer:
    attn_norm: Norm | None  # before attention or a mixer
    # Rows: all q heads, all k heads, all v heads; or q's (or what `latent.q_b` takes), a latent's. Perhaps
    # `Stacked`. None: no attention.
    qkv: Linear | None
    attn_out: Linear | None
    ffn_norm: Norm | None
    # One where there is no router, none without FFN. All have the same parts, or lie whole on some device.
    experts: tuple[FFN, ...]
    q_norm: F32 | None = None  # [head_dim], or of all heads
    k_norm: F32 | None = None
    attn_sub_norm: Norm | None = None  # of attention's output, before attn_out
    ffn_sub_norm: Norm | None = None  # of the activations, before down
    attn_post_norm: Norm | None = None  # of a half's result, before it joins the residual stream
    ffn_post_norm: Norm | None = None
    sinks: F32 | None = None  # [n_heads]: a score that each head's softmax has besides
    attn_gate: WeightMatrix | None = None  # [n_heads * head_dim, dim]
    mixer: Mixer | None = None
    latent: LatentMatrices | None = None
    router: Linear | None = None  # of a mixture: [n_experts, dim]
    selection_bias: F32 | None = None  # [n_experts]
    shared: FFN | None = None  # what every token takes beside its experts; never in bundles
    shared_router: WeightMatrix | None = None  # [1, dim]
    # With norms of their own: of the shared FFN's input and answer, of the experts' sum.
    shared_norm: Norm | None = None
    shared_post_norm: Norm | None = None
    experts_post_norm: Norm | None = None
    router_norm: Norm | None = None  # of the stream, for the router; None: it reads what experts read
    expert_scale: F32 | None = None  # [n_experts]
    scale: float = 1.0  # of the stream behind the layer
    per_layer: PerLayer | None = None
    # Where the experts come from disk: their matrices say where they lie in slot 0 of its pool.
    experts_on_disk: _native.DiskExperts | None = None
    router_copies: Mapping[str, WeightMatrix] = field(default_factory=dict)  # on GPUs, by device


@dataclass(frozen=True)
class TokenInputs:
    """Inputs that tokens bring to layers: rows of a table, and a projection of their embeddings."""

    embed: WeightMatrix  # [vocab_size, layers * width]
    project: WeightMatrix  # [layers * width, dim]
    norm: F32  # [width], of each layer's part of the projection


@dataclass(frozen=True)
class Weights:
    embed: WeightMatrix  # [vocab_size, dim]
    pos_embed: WeightMatrix | None  # [max_context, dim], learned positions only
    layers: tuple[Layer, ...]
    out_norm: Norm | None
    head: Linear  # [vocab_size, dim]; the embedding again when tied
    project_in: WeightMatrix | None = None  # [dim, embed_dim], where embeddings are narrower
    project_out: WeightMatrix | None = None  # [embed_dim, dim]
    token_inputs: TokenInputs | None = None
    token_types: WeightMatrix | None = None  # [types, dim]
    embed_norm: Norm | None = None  # of the sum of a token's embeddings
    classifier: tuple[Linear, ...] = ()  # [dim, dim], and behind a tanh [1, dim]


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
    sinks: F32 | None = None  # [n]: one more score of each head, whose value is 0
    whole_norms: bool = False  # of all heads as one: [n * dim], [n_kv * dim]
    norms_last: bool = False  # behind rope
    v_norm: F32 | None = None  # [dim], ones
    shares: bool = False  # it has queries alone: an earlier layer stored the keys and values
    chunked: bool = False  # attend to the positions of the same `window` ones, counted from the first
    temperature: float = 0.0  # q *= 1 + temperature * log(1 + floor((position + 1) / temperature_span))
    temperature_span: int = 1
    own_norms: bool = False  # LayerNorms, every head's with its own weights: [n * dim], [n_kv * dim]
    latent: Latent | None = None  # there is one key, `dim` wide; values are its first elements

    @property
    def width(self) -> int:
        """Return the size of a token's q, k and v."""
        return (self.n + (0 if self.shares else 2 * self.n_kv)) * self.dim

    @property
    def value_dim(self) -> int:
        """Return the size of a value."""
        return self.dim if self.latent is None else self.latent.kv_rank

    @staticmethod
    def of(spec: ModelSpec, index: int = 0, layer: Layer | None = None) -> Heads:
        """Return the heads of a layer that has attention."""
        shape = spec.attention(index)
        assert shape is not None, "no attention in this layer"
        stores = len(shape.projections) > 1
        return Heads(
            n=shape.heads,
            n_kv=shape.kv_heads,
            dim=shape.head_dim,
            window=spec.window(index),
            scale=shape.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            softcap=spec.attention_softcap,
            q_norm=None if layer is None else layer.q_norm,
            k_norm=None if layer is None else layer.k_norm,
            norm_eps=spec.norm_eps,
            sinks=None if layer is None else layer.sinks,
            whole_norms=spec.qk_norm_whole,
            norms_last=spec.qk_norm_last,
            v_norm=np.ones(shape.head_dim, np.float32) if spec.v_norm and stores else None,
            shares=not stores,
            own_norms=spec.qk_norm_each,
            chunked=spec.window_chunked and spec.window(index) is not None,
            temperature=0.0 if spec.turns(index) else spec.attention_tuning,
            temperature_span=spec.attention_tuning_span,
            latent=shape.latent,
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
    # Of models with recurrent layers: the slots that each sequence's states are read from, -1 being zeros,
    # and written to. No slot is both in one step.
    state_from: I32 | None = None  # [sequences]
    state_to: I32 | None = None  # [sequences]
    # Of encoders: one more than the last position that a token attends to, its sequence's last, whose tokens
    # are all in this batch. None: its own.
    ends: I32 | None = None  # [tokens]
    types: I32 | None = None  # [tokens]: rows of the table of types; None: the first
    # The step that chooses `ids`, which hold nothing yet: row r has the token of its row r.
    after: ChoosingStep | None = field(default=None, kw_only=True)

    def table(self, window: int | None) -> I32:
        return self.block_table if window is None or self.window_table is None else self.window_table


@dataclass(frozen=True)
class ExpertUse:
    """A step's use of one layer's experts."""

    tokens: I32  # [experts]: tokens that went to each
    needed: int = 0  # experts on disk that tokens asked for
    missed: int = 0  # of those, experts that were not in memory


@dataclass(frozen=True)
class LayerActivations:
    """An FFN's input and neurons in a step."""

    index: int  # its number among the step's FFNs
    h: F32  # [tokens, dim], the stream that `ffn_add` read, before the norm
    values: F32  # [tokens, experts * neurons], what down is multiplied with, before a sub-norm and shares


@dataclass
class FFNStats:
    """The work that sparsity left, summed over layers and tokens."""

    active: int = 0  # (token, neuron) pairs with a non-zero activation
    neurons: int = 0  # (token, neuron) pairs in all
    rows: int = 0  # up/down rows read
    rows_dense: int = 0  # up/down rows a dense pass would have read
    gates_dense: int = 0  # gate rows in all
    predicted: int = 0  # gate rows read: all, or with `predict` those of neurons predicted to be active
    predictor_bytes: int = 0  # read of predictors
    # Where somebody asks and the ops know: active, rows and predicted of each layer, one after the other.
    layers: list[int] | None = None
    experts: list[ExpertUse | None] | None = None  # of each layer, where `layers` is asked for

    def __iadd__(self, other: FFNStats) -> FFNStats:
        """Add another step's sums, but not its layers."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def count(self, counted: tuple[int, int, int, int, int]) -> None:
        """Add what the native core returns of an FFN."""
        active, rows, rows_dense, gates, asked = counted
        self.active += active
        self.rows += rows
        self.rows_dense += rows_dense
        self.predicted += gates
        self.predictor_bytes += asked


SUMS = tuple(f.name for f in fields(FFNStats) if f.name not in ("layers", "experts"))


class DiskCounts(NamedTuple):
    """Reads from disk for what is not all in memory of FFNs."""

    needed: int = 0  # records that tokens asked for
    missed: int = 0  # of those, read from disk
    reads: int = 0
    bytes: int = 0
    waited_ns: int = 0  # of all threads, with nothing else to do
    left_out: int = 0  # records that tokens asked for, but a read budget had nothing left for

    @property
    def hit_rate(self) -> float | None:
        """Return the share of the records found in memory, of those that were asked for; None: none was."""
        asked = self.needed + self.left_out
        return (self.needed - self.missed) / asked if asked else None

    def since(self, before: DiskCounts) -> DiskCounts:
        return DiskCounts(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True)
class KVShape:
    """The pages of one layer: `block` positions of a kv head in each, `pages` for each head.

    Runs of pages of one head lie side by side, so that blocks that follow each other are a stream.
    """

    pages: int
    heads: int
    head_dim: int
    block: int
    types: CacheTypes = PLAIN
    latent: bool = False  # a key is its value too

    @property
    def k_bytes(self) -> int:
        """Return the bytes of a page of one head's keys."""
        return self.block * row_bytes(self.types.k, self.head_dim)

    @property
    def v_bytes(self) -> int:
        return self.block * row_bytes(self.types.v, self.head_dim)

    def places(self, pages: I32) -> I32:
        """Return where these pages of every head are among all, [heads, pages]."""
        first = pages // PAGE_RUN * PAGE_RUN
        run = np.minimum(PAGE_RUN, self.pages - first)
        heads = np.arange(self.heads, dtype=np.int32)[:, None]
        return (first * self.heads + heads * run + pages - first).astype(np.int32)


@dataclass(frozen=True)
class KVLayer:
    """One layer's keys and values, written and read in place.

    Keys in f16 are [heads * pages, head_dim, block], so that a vector holds one element of many positions,
    and values [heads * pages, block, head_dim]. Quantised ones are [heads * pages, bytes of a page]
    (kernels.h says which byte is what). Latents are [pages, block, head_dim], both keys and values.
    `shape.places` says where a page is. A GPU's are its own arrays, of the shape that its kernels want.
    """

    shape: KVShape
    k: F16 | U8
    v: F16 | U8  # of latents: k

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + (0 if self.shape.latent else self.v.nbytes)

    @cached_property
    def native(self) -> _native.KVPages:
        """Return the pages as the native core takes them, checked."""
        s = self.shape
        k_type, v_type = CACHE_TYPES[s.types.k], CACHE_TYPES[s.types.v]
        values = None if s.latent else self.v
        return _native.KVPages(self.k, values, k_type, v_type, s.heads, s.head_dim, s.block)


# ---- tokens that are chosen where logits are computed

CANDIDATES = 64  # of a row's logits, the most that its token is drawn from
BANNED = 8  # tokens of a row, at most


@dataclass(frozen=True)
class TokenDraw:
    """How a row's token is chosen from its logits alone; `engine.sampler` says what each filter keeps."""

    top_k: int  # 1 to CANDIDATES; 1: greedy
    top_p: float
    min_p: float
    temperature: float  # above 0
    number: float  # random, in [0, 1)
    banned: tuple[int, ...] = ()  # never chosen: BANNED at most


class ChosenToken(NamedTuple):
    token: int
    digest: int  # `reference.logits_digest` of the row
    odd: float | None = None  # a logit that is NaN or infinite, the first: `token`'s


class ChoosingStep(Protocol):
    """A step that is queued. Nothing of it is kept unless `choices` is called, and returns."""

    def choices(self) -> list[ChosenToken]:
        """Wait for the step; add its work to the statistics it began with. -> a choice for each row."""


class Chooser(Protocol):
    """Begins steps of one token for each sequence, whose next tokens are chosen where their logits are."""

    def begin(
        self,
        batch: Batch,
        draws: Sequence[TokenDraw],
        sparsity: str,
        stats: FFNStats,
        body: Callable[[ResidualStream, I32], Logits],
        /,
    ) -> ChoosingStep:
        """Queue a step of `batch`, whose `Ops.step`s were made. It may be `after` one that is under way."""


# ---- the ops


class ResidualStream(Protocol):
    """The residual stream of a step, [tokens, dim], where its ops keep it."""

    def __len__(self) -> int: ...


H = TypeVar("H", bound=ResidualStream)
S = TypeVar("S")  # made of a step's batch
A = TypeVar("A")  # a bound attention
F = TypeVar("F")  # a bound FFN
M = TypeVar("M")  # a bound mixer
L = TypeVar("L")  # logits, where they are computed
P = TypeVar("P")  # a bound PerLayer


class Ops(Protocol[H, S, A, F, M, P, L]):
    """Everything that the decoder asks of a table of ops, whose own types go back to it.

    `ops.reference` says what each computes.
    """

    def embed(self, table: WeightMatrix, ids: I32, /) -> F32: ...
    def matmul(self, w: WeightMatrix, x: F32, bias: F32 | None, /) -> F32: ...
    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None, /
    ) -> S: ...
    def bind_attention(self, spec: ModelSpec, heads: Heads, layer: Layer, /) -> A: ...
    def bind_ffn(self, spec: ModelSpec, layer: Layer, /) -> F: ...
    def bind_per_layer(self, spec: ModelSpec, layer: Layer, /) -> P: ...
    def in_order(self, halves: Sequence[A | M | F | None], /) -> None:
        """Know what is bound of a model, in its order: of each layer its attention or mixer, then its FFN.

        Some of what one needs may begin with those before it.
        """

    def bring(self, given: F32, /) -> F32: ...
    def bind_mixer(self, spec: ModelSpec, layer: Layer, /) -> M: ...
    def run(
        self, x: F32, rows: I32, sparsity: str, stats: FFNStats, body: Callable[[H, I32], L], /
    ) -> F32: ...
    def norm(self, x: H, weight: F32, bias: F32 | None, eps: float, kind: str, /) -> H: ...
    def rows(self, x: H, rows: I32, /) -> H: ...
    def head(self, x: H, rows: Linear, project: WeightMatrix | None, /) -> L: ...
    def hidden(self, x: H, /) -> L:
        """Return what `run` gives of rows of the stream, in place of logits: the rows themselves."""

    def begin_ffn(self, x: H, bound: F, sparsity: str, /, *, shares: F32 | None, apart: bool) -> H:
        """Begin what of an FFN can be done before its layer's attention; -> what both of them read.

        `apart`: that is x as it is now, whatever becomes of x. Else the FFN reads x when its turn has come.
        """

    def routed(self, h: H, bound: F, /) -> F32: ...
    def attention_add(self, x: H, h: H, bound: A, step: S, kv: KVLayer, /) -> None: ...
    def states(self, bound: M, slots: int, floats: int, /) -> F32 | None:
        """Allocate the states of a mixer; None: they are in RAM."""

    def mixer_add(self, x: H, h: H, bound: M, step: S, states: F32, /) -> None: ...
    def ffn_add(
        self, x: H, h: H, bound: F, sparsity: str, stats: FFNStats, /, *, shares: F32 | None
    ) -> None: ...
    def per_layer_add(self, x: H, bound: P, given: F32, /) -> None: ...
    def chooser(self, spec: ModelSpec, weights: Weights, /) -> Chooser | None:
        """Return what chooses tokens where logits are computed; None: logits are looked at in RAM."""


StepHandle = NewType("StepHandle", object)
BoundAttention = NewType("BoundAttention", object)
BoundFFN = NewType("BoundFFN", object)
BoundMixer = NewType("BoundMixer", object)
Logits = NewType("Logits", object)
BoundPerLayer = NewType("BoundPerLayer", object)
OpaqueOps = Ops[ResidualStream, StepHandle, BoundAttention, BoundFFN, BoundMixer, BoundPerLayer, Logits]


def opaque(ops: Ops[H, S, A, F, M, P, L]) -> OpaqueOps:
    """Return the same ops with their own types hidden: a caller gives back to them what they made."""
    return cast(OpaqueOps, ops)
