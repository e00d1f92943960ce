"""`ModelSpec`, the one description to which every family of models is reduced.

`families.py` fills it in from a config.json, and `pack/manifest.py` from a pack.json. A family's name is
only a label here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thermocline.errors import BadFile
from thermocline.files.bounded import quoted

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "fatrelu", "relu2", "swiglu_oai")
UP_ACTIVATIONS = ("none", "relu")
# Activations that are exactly zero for gate <= threshold: skipping such neurons does not change the answer.
SPARSE_ACTIVATIONS = ("relu", "fatrelu", "relu2")


NORM_ORDERS = ("pre", "post", "sandwich", "after")
ROPE_SCALINGS = ("linear", "yarn", "llama3", "longrope", "proportional")
ROUTER_SCORES = ("softmax", "sigmoid", "logits")
ROUTER_WEIGHTS = ("chosen", "score", "normalised", "mixed")
GROUP_RULES = ("max", "sum2")
ROUTER_INPUTS = ("ffn_norm", "own_norm", "layer_input")
QKV = ("q", "k", "v")
# Of a layer: attention; a recurrent layer, whose state is of one size however long the text; or nothing.
MIXERS = ("attention", "deltanet", "mamba2", "conv", "none")
RECURRENT = ("deltanet", "mamba2", "conv")
POOLINGS = ("none", "last", "mean", "cls")


def later(default: Any) -> Any:
    """Return a field that the first packs of version 2 lack; a pack without it means `default`."""
    return field(default=default, metadata={"later": True})


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rope's frequencies for long contexts.

    llama3 blends by wavelength, and yarn by turns in the original context. longrope divides each frequency by
    its own factor; the session's context decides which of two sets of factors. proportional turns only the
    first `share` of a head's pairs (i, i + half of a head), at the frequencies that they have anyway.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 1
    kind: str = later("llama3")
    attention_factor: float = later(1.0)  # yarn and longrope: cos and sin are multiplied by it
    beta_fast: float = later(32.0)  # yarn
    beta_slow: float = later(1.0)  # yarn
    truncate: bool = later(True)  # yarn: blend between whole elements
    short_factors: tuple[float, ...] = later(())  # longrope: contexts up to the original one
    long_factors: tuple[float, ...] = later(())  # longrope: longer ones
    share: float = later(1.0)  # proportional


@dataclass(frozen=True)
class Router:
    """How a mixture's router picks experts for a token, and weighs what they give.

    Every expert has a score. The `n_experts_active` best are chosen by score plus selection bias, of equal
    ones the first; if there are groups, out of the best groups. Weights are those of the chosen experts:
    "chosen" is the softmax of their logits, "score" their scores, "normalised" their scores by their sum.
    "mixed" (arXiv 2409.12136): of each in turn, the best first, its share of the softmax of those not chosen
    before it whose logits are within 2 `epsilon` of its own, relatively.
    """

    score: str = "softmax"  # of the logits: "softmax" of all experts', "sigmoid", or "logits" as they are
    weights: str = "chosen"
    epsilon: float = 0.0  # normalised: added to the sum; mixed: half the distance
    epsilon_floor: bool = False  # normalised: `epsilon` is the least sum instead
    scale: float = 1.0  # of the weights
    biased: bool = False  # logits have a bias
    selection_bias: bool = False  # added to scores for the choice alone
    groups: int = 1  # of consecutive experts, as many in each
    groups_kept: int = 1
    scales_input: bool = later(False)  # weights multiply an expert's input in place of its answer
    group_rule: str = "max"  # a group's score: "max" of its experts', or "sum2", the sum of its two best
    expert_scale: bool = later(False)  # each expert's weight is multiplied by a number of its own, at last


PLAIN_ROUTER = Router()  # Mixtral's: the softmax of the chosen logits


@dataclass(frozen=True)
class Recurrent:
    """The sizes of recurrent layers: each head has a state [state, head_dim], behind a causal convolution.

    DeltaNet (arXiv 2412.06464): a head's value has `head_dim` elements, and the heads of a group share a
    query and a key of `state`. Mamba-2 (arXiv 2405.21060): x has `head_dim` elements, and the heads of a
    group share C and B of `state`. A short convolution has no heads; its channels are the model's.
    """

    conv: int  # tokens that the convolution sees; its last weight is the token's own
    heads: int = 0
    head_dim: int = 0
    groups: int = 0
    state: int = 0
    conv_bias: bool = False  # mamba2
    tiled: bool = False  # head h belongs to group h % groups; else groups are consecutive heads

    @property
    def inner(self) -> int:
        """Return the size of all heads' values: what the last matrix reads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the channels of a convolution before heads: q, k and v, or x, B and C."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True)
class Latent:
    """Attention whose heads share one latent vector a position (DeepSeek-V2, arXiv 2405.04434).

    A position's latent is `kv_rank` normed numbers and `rope` turned ones, as one key of all heads. A head's
    query, `nope` plain and `rope` turned numbers, goes through a matrix of its own to meet it; what it finds,
    `kv_rank` wide, goes through another to become `value` numbers.
    """

    kv_rank: int
    nope: int
    rope: int
    value: int
    q_rank: int | None = None  # queries come through a normed vector of so many numbers; None: directly
    norm_eps: float = 1e-6  # of the norms of both

    @property
    def norms(self) -> dict[str, int]:
        """Return the sizes of a layer's norms of vectors in between, by name."""
        return ({} if self.q_rank is None else {"q_a_norm": self.q_rank}) | {"kv_a_norm": self.kv_rank}

    def matrices(self, heads: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's matrices but the last, by name."""
        q = heads * (self.nope + self.rope)
        queries = (
            {"q": (q, dim)} if self.q_rank is None else {"q_a": (self.q_rank, dim), "q_b": (q, self.q_rank)}
        )
        return {
            **queries,
            "kv_a": (self.kv_rank + self.rope, dim),
            "k_b": (heads, self.kv_rank, self.nope),  # each head's transposed
            "v_b": (heads, self.value, self.kv_rank),
        }


class AttentionShape(NamedTuple):
    """A layer's attention: `heads` of queries, which share `kv_heads` of keys and values.

    With a latent there is one key, `head_dim` wide, and values are its first elements.
    """

    heads: int
    kv_heads: int
    head_dim: int
    projections: tuple[str, ...] = QKV  # matrices that it has; without v, values are the raw keys
    latent: Latent | None = None

    @property
    def context(self) -> int:
        """Return the size of what attention gives: all heads' values."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value)

    @property
    def qkv_rows(self) -> int:
        """Return the rows of the matrices that it has."""
        return (self.heads + (len(self.projections) - 1) * self.kv_heads) * self.head_dim

    @property
    def cached(self) -> tuple[int, bool]:
        """Return the size of a key, and whether it is a latent: no values are kept beside it."""
        return self.head_dim, self.latent is not None


class FFNShape(NamedTuple):
    """A layer's FFN: `width` neurons in each of `experts`, of which a token takes `active`."""

    experts: int
    active: int
    width: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. A dense FFN is a mixture with `n_experts == 1`.

    With more experts, a router picks `n_experts_active` for each token, as `router` says. Their weighted
    outputs are added up in ascending order, then that of the shared FFN, which every token takes. With
    `shared_norms` both sums are normed before they are added, and the shared FFN's input has its own norm.

    An FFN computes y = sum_i h_i * down_i + b over its neurons i:
    gated    h_i = act(gate_i . x + b_i) * up_act(up_i . x)
    ungated  h_i = act(gate_i . x + b_i), so that fc1 of other programs is the gate here
    """

    architecture: str
    dim: int
    ffn_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm: str
    norm_eps: float
    activation: str
    activation_threshold: float = 0.0  # fatrelu only: active means gate > threshold
    up_activation: str = "none"  # "relu" makes it dReLU
    gated: bool = True
    position: str = "rope"  # rope pairs element i with i + head_dim/2 (half rotation)
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # attend to the last `sliding_window` positions only
    tied_head: bool = False
    n_experts: int = 1
    n_experts_active: int = 1
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    # x += f(norm(x)); post: x = norm(x + f(x)); sandwich: x += norm'(f(norm(x))); after: x += norm'(f(x))
    norm_order: str = later("pre")
    final_norm: bool = later(True)
    parallel: bool = later(False)  # attention and FFN read the same x
    embed_dim: int | None = later(None)  # projected to and from dim; None: dim itself
    embed_scale: float = later(1.0)
    residual_scale: float = later(1.0)  # x += residual_scale * f(x)
    logit_scale: float = later(1.0)
    logit_softcap: float | None = later(None)  # logits become cap * tanh(logits / cap)
    attention_scale: float | None = later(None)  # scores are multiplied by it; None: head_dim ** -0.5
    attention_softcap: float | None = later(None)
    qk_norm: bool = later(False)  # an RMS norm of every head's q and k, before rope
    qk_norm_whole: bool = later(False)  # of all heads as one instead
    qk_norm_last: bool = later(False)  # behind rope instead
    qk_norm_turned: bool = later(False)  # in layers with rope only
    qk_norm_each: bool = later(False)  # LayerNorms without biases instead; every head has its own weights
    sub_norms: bool = later(False)  # RMS norms of the inputs of attn_out and down
    rotary_dim: int | None = later(None)  # rope turns the first `rotary_dim` elements of a head; None: all
    v_norm: bool = later(False)  # an RMS norm of every head's v, without a weight
    window_layers: tuple[int, ...] | None = later(None)  # layers with the sliding window; None: all
    # Of layers without a window, where others have one; 0: as those have it.
    full_head_dim: int = later(0)
    full_kv_heads: int = later(0)
    values_are_keys: bool = later(False)  # they have no v: values are the keys before norm and rope
    kv_shared_layers: int = later(0)  # the last layers attend to what the last others of their kind stored
    window_chunked: bool = later(False)  # in place of the last `sliding_window` positions: of every so many
    rope_layers: tuple[int, ...] | None = later(None)  # layers whose q and k turn; None: all
    # In layers without rope q *= 1 + tuning * log(1 + floor((position + 1) / span)).
    attention_tuning: float = later(0.0)
    attention_tuning_span: int = later(8192)
    local_rope_theta: float | None = later(None)  # unscaled, in layers with a window; None: rope_theta
    # swiglu_oai: g * sigmoid(alpha * g) of the gate, at most `limit`, times 1 + up, within +-limit
    swiglu_alpha: float = later(1.0)
    swiglu_limit: float = later(0.0)
    attention_sinks: bool = later(False)  # a score of each head's own joins its softmax, and adds no value
    # One expert has no router; a pack that lacks the field has Mixtral's, which is this.
    router: Router = field(default=PLAIN_ROUTER, metadata={"later": True})
    # All layers attend to latents: n_kv_heads is 1.
    latent: Latent | None = field(default=None, metadata={"later": True})
    shared_dim: int = later(0)  # width of the FFN that every token takes beside its experts
    shared_gate: bool = later(False)  # the shared FFN is multiplied by sigmoid(w . x)
    shared_norms: bool = later(False)
    # What the router reads: "ffn_norm", as experts do; "own_norm": the stream under a norm of its own, by
    # the square root of dim; "layer_input": the stream before attention.
    router_input: str = later("ffn_norm")
    # Layers with one plain FFN of another width, and no router.
    dense_layers: tuple[int, ...] = later(())
    dense_dim: int = later(0)  # its width
    layer_scale: bool = later(False)  # a layer's answer, the stream, is multiplied by a number
    per_layer_dim: int = later(0)  # width of what each token brings to each layer, behind its FFN
    mixers: tuple[str, ...] = later(())  # of each layer one of MIXERS; (): attention in all
    recurrent: Recurrent | None = field(default=None, metadata={"later": True})
    no_ffn: tuple[int, ...] = later(())  # layers that are a mixer alone
    attention_gate: bool = later(False)  # what attention gives is multiplied by the sigmoid of a matrix's
    # Of models that answer with a vector: the last hidden state of which tokens it is, "mean" being all
    # tokens' and "cls" the first one's. "none": the model writes text.
    pooling: str = later("none")
    unit_vectors: bool = later(False)  # a vector is divided by its length
    # Lengths that a vector may be cut to, whose first numbers say most; (): any; None: it is used whole.
    matryoshka: tuple[int, ...] | None = later(None)
    # Of a reranker that writes: its score is the logit of the first one, less that of the second.
    score_tokens: tuple[int, ...] = later(())
    bidirectional: bool = later(False)  # an encoder: a token attends to those after it too
    embed_norm: bool = later(False)  # a norm of the sum of a token's embeddings
    # Rows of a table of types. A token's embeddings include the first; in a pair's second text, the next.
    token_types: int = later(0)
    # A classifier: its vector passes a matrix, tanh and another matrix, which leaves one number for the text.
    classifies: bool = later(False)

    @property
    def embeds(self) -> bool:
        """Return whether the model answers with a vector in place of text."""
        return self.pooling != "none"

    @property
    def pools_all(self) -> bool:
        """Return whether its vectors are made of all of a text's tokens."""
        return self.pooling == "mean"

    @property
    def answer_dim(self) -> int:
        """Return the numbers of what it says of a text, where it embeds."""
        return 1 if self.classifies else self.dim

    @property
    def sparse(self) -> bool:
        """Return whether inactive neurons can be skipped without changing the answer."""
        return self.activation in SPARSE_ACTIVATIONS

    @property
    def activation_bound(self) -> float:
        """Return the number that its activation has: fatrelu's threshold, swiglu_oai's limit."""
        return self.activation_threshold or self.swiglu_limit

    @property
    def norms_before(self) -> bool:
        """Return whether a half's input has a norm (or, in post order, the stream behind the half)."""
        return self.norm_order != "after"

    @property
    def norms_after(self) -> bool:
        """Return whether a half's result has a norm before it joins the stream."""
        return self.norm_order in ("sandwich", "after")

    def attention(self, layer: int) -> AttentionShape | None:
        """Return the shape of a layer's attention; None: it has none."""
        if self.mixer(layer) != "attention":
            return None
        full = self.window(layer) is None
        kv_heads, head_dim = self.n_kv_heads, self.head_dim
        if full:
            kv_heads, head_dim = self.full_kv_heads or kv_heads, self.full_head_dim or head_dim
        own = 1 if self.kv_layer(layer) != layer else 2 if full and self.values_are_keys else 3
        return AttentionShape(self.n_heads, kv_heads, head_dim, QKV[:own], self.latent)

    def kv_layer(self, layer: int) -> int:
        """Return the layer that stored the keys and values that a layer attends to."""
        first = self.n_layers - self.kv_shared_layers
        if layer < first or self.sliding_window is None:
            return min(layer, max(0, first - 1))
        return _storing(self.n_layers, first, self.window_layers)[layer]

    def mixer(self, layer: int) -> str:
        """Return which of MIXERS a layer has."""
        return self.mixers[layer] if self.mixers else "attention"

    def state_floats(self, layer: int) -> int:
        """Return the numbers of one sequence's state in a layer: the convolution's inputs, and the heads'."""
        r, kind = self.recurrent, self.mixer(layer)
        if r is None or kind not in RECURRENT:
            return 0
        if kind == "conv":
            return (r.conv - 1) * self.dim
        return (r.conv - 1) * r.channels + r.state * r.inner

    def mixer_matrices(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of a recurrent layer's matrices by name: first those that read the stream."""
        kind, d, r = self.mixer(layer), self.dim, self.recurrent
        if r is None or kind not in RECURRENT:
            return {}
        if kind == "conv":
            return {"mixer.in.weight": (3 * d, d), "mixer.out.weight": (d, d)}
        if kind == "mamba2":
            into = {"mixer.in.weight": (r.inner + r.channels + r.heads, d)}
        else:
            into = {"mixer.qkv.weight": (r.channels, d), "mixer.z.weight": (r.inner, d)}
            into |= {"mixer.beta.weight": (r.heads, d), "mixer.alpha.weight": (r.heads, d)}
        return {**into, "mixer.out.weight": (d, r.inner)}

    def mixer_vectors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what a recurrent layer has in f32, by name."""
        kind, r = self.mixer(layer), self.recurrent
        if r is None or kind not in RECURRENT:
            return {}
        if kind == "conv":
            return {"mixer.conv.weight": (self.dim, r.conv)}
        out: dict[str, tuple[int, ...]] = {"mixer.conv.weight": (r.channels, r.conv)}
        if r.conv_bias:
            out["mixer.conv.bias"] = (r.channels,)
        out |= {"mixer.decay": (r.heads,), "mixer.dt_bias": (r.heads,)}
        if kind == "mamba2":
            out["mixer.skip"] = (r.heads,)
        return {**out, "mixer.norm.weight": (r.head_dim if kind == "deltanet" else r.inner,)}

    @property
    def attentions(self) -> tuple[AttentionShape, ...]:
        """Return the shapes that the attention of layers has, each once."""
        found = map(self.attention, range(self.n_layers))
        return tuple(dict.fromkeys(shape for shape in found if shape is not None))

    def ffn(self, layer: int) -> FFNShape:
        """Return the shape of a layer's FFN, without the shared one; all zeros where there is none."""
        if layer in self.no_ffn:
            return FFNShape(0, 0, 0)
        if layer in self.dense_layers:
            return FFNShape(1, 1, self.dense_dim)
        return FFNShape(self.n_experts, self.n_experts_active, self.ffn_dim)

    @property
    def ffn_layers(self) -> tuple[int, ...]:
        """Return the layers that have an FFN, beside a shared one."""
        return tuple(i for i in range(self.n_layers) if i not in self.no_ffn)

    def routed(self, tokens: int) -> float:
        """Return the expected share of experts that some of `tokens` independent tokens choose."""
        return 1.0 - (1.0 - self.n_experts_active / self.n_experts) ** tokens

    def window(self, layer: int) -> int | None:
        """Return how many positions a layer attends to; None means all."""
        return self.sliding_window if self.window_layers is None or layer in self.window_layers else None

    def qk_norm_size(self, heads: int, head_dim: int) -> int:
        """Return the size of the norm of so many heads."""
        return heads * head_dim if self.qk_norm_whole or self.qk_norm_each else head_dim

    def turns(self, layer: int) -> bool:
        """Return whether rope turns a layer's q and k."""
        return self.position == "rope" and (self.rope_layers is None or layer in self.rope_layers)

    def qk_norms(self, layer: int) -> bool:
        """Return whether a layer norms q and k."""
        return self.qk_norm and (not self.qk_norm_turned or self.turns(layer))

    @property
    def windowed(self) -> float:
        """Return the share of layers with the sliding window."""
        return 1.0 if self.window_layers is None else len(self.window_layers) / self.n_layers

    @property
    def qkv_rows(self) -> int:
        """Return the rows of q, k and v, where all layers' attention is of one shape."""
        (shape,) = self.attentions
        return shape.qkv_rows


@functools.lru_cache(maxsize=8)
def _storing(n_layers: int, first: int, near: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the last layer before `first` of each layer's kind; layers before it are their own."""
    windowed = set(range(n_layers) if near is None else near)
    last: dict[bool, int] = {}
    found = []
    for i in range(n_layers):
        if i < first:
            last[i in windowed] = i
        found.append(i if i < first else last.get(i in windowed, i))
    return tuple(found)


# Limits of a model that can be real. Products of any four fit 2^63.
LIMITS: dict[str, tuple[int, int]] = {
    "dim": (1, 1 << 16),
    "ffn_dim": (1, 1 << 20),
    "n_layers": (1, 1024),
    "n_heads": (1, 1024),
    "n_kv_heads": (1, 1024),
    "head_dim": (1, 1024),
    "vocab_size": (1, 1 << 22),
    "max_context": (1, 1 << 24),
    "n_experts": (1, 1024),
    "n_experts_active": (1, 1024),
    "shared_dim": (0, 1 << 20),
    "dense_dim": (0, 1 << 20),
    "full_head_dim": (0, 1024),
    "full_kv_heads": (0, 1024),
    "per_layer_dim": (0, 1 << 16),
}


def check_spec(spec: ModelSpec, name: str) -> None:
    """Raise BadFile, naming the field, unless the engine can index and allocate with every number.

    Types are not checked here but by the caller. `name` is the file, for messages.
    """
    for key, (low, high) in LIMITS.items():
        value = getattr(spec, key)
        if not low <= value <= high:
            raise BadFile(f"{name}: {key} is {value}, not within {low}..{high}")
    for key, known in (
        ("norm", NORMS),
        ("position", POSITIONS),
        ("activation", ACTIVATIONS),
        ("norm_order", NORM_ORDERS),
        ("router_input", ROUTER_INPUTS),
        ("pooling", POOLINGS),
    ):
        if getattr(spec, key) not in known:
            raise BadFile(f"{name}: {key} {quoted(getattr(spec, key))} is not one of {', '.join(known)}")
    for problems in (
        _problems,
        _option_problems,
        _kind_problems,
        _mixture_problems,
        _mixer_problems,
        _latent_problems,
        _pooling_problems,
    ):
        for problem, wrong in problems(spec):
            if wrong:
                raise BadFile(f"{name}: {problem}")


def _problems(s: ModelSpec) -> list[tuple[str, bool]]:
    r = s.rope_scaling
    ids = [*s.eos_ids, *([] if s.bos_id is None else [s.bos_id])]
    return [
        (
            f"n_heads {s.n_heads} is not a multiple of n_kv_heads {s.n_kv_heads}",
            s.n_heads % s.n_kv_heads != 0,
        ),
        (
            f"head_dim {s.head_dim} is odd, and rope turns pairs",
            s.position == "rope" and s.latent is None and s.head_dim % 2 == 1,
        ),
        (f"norm_eps {s.norm_eps} is not within 0..1", not 0.0 <= s.norm_eps <= 1.0),
        (
            f"activation_threshold {s.activation_threshold} out of range",
            not 0.0 <= s.activation_threshold <= 1e3,
        ),
        (
            "activation_threshold is for fatrelu only",
            s.activation != "fatrelu" and s.activation_threshold != 0.0,
        ),
        *_clamp_problems(s),
        (f"up_activation {quoted(s.up_activation)} is unknown", s.up_activation not in UP_ACTIVATIONS),
        ("up_activation needs a gated FFN", s.up_activation != "none" and not s.gated),
        (f"rope_theta {s.rope_theta} is not within 1..1e12", not 1.0 <= s.rope_theta <= 1e12),
        (
            "sliding_window is out of range",
            s.sliding_window is not None and not 1 <= s.sliding_window <= 1 << 31,
        ),
        ("n_experts_active is more than n_experts", s.n_experts_active > s.n_experts),
        ("sub_norms are for one expert", s.sub_norms and s.n_experts > 1),
        (
            f"a token id of {ids} is not below vocab_size {s.vocab_size}",
            any(not 0 <= i < s.vocab_size for i in ids),
        ),
        ("too many eos_ids", len(s.eos_ids) > 256),
        ("rope_scaling is out of range", r is not None and not _scaling_is_sane(r)),
    ]


def _clamp_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    clamped = s.activation == "swiglu_oai"
    return [
        ("swiglu_oai needs a gated FFN, whose up has no activation",
         clamped and (not s.gated or s.up_activation != "none")),
        ("swiglu_limit is out of range", not 0.0 <= s.swiglu_limit <= 1e6),
        ("swiglu_limit is for swiglu_oai, which needs one", clamped != (s.swiglu_limit > 0.0)),
        ("swiglu_alpha is out of range", not 1e-3 <= s.swiglu_alpha <= 1e3),
        ("swiglu_alpha is for swiglu_oai only", not clamped and s.swiglu_alpha != 1.0),
    ]  # fmt: skip


def _option_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    scales = ("embed_scale", "residual_scale", "logit_scale", "attention_scale")
    caps = ("logit_softcap", "attention_softcap")
    thetas = s.local_rope_theta is not None and not 1.0 <= s.local_rope_theta <= 1e12
    layers = s.window_layers or ()
    rotary = s.rotary_dim
    return [
        *((f"{n} is out of range", not _within(getattr(s, n), -1e6, 1e6)) for n in scales),
        *((f"{n} is out of range", not _within(getattr(s, n), 1e-3, 1e6)) for n in caps),
        ("embed_dim is out of range", not _within(s.embed_dim, 1, 1 << 16)),
        (
            f"rotary_dim is {rotary}: not an even part of a head",
            rotary is not None and (rotary % 2 == 1 or not 2 <= rotary <= s.head_dim),
        ),
        (
            "qk_norm_whole and qk_norm_last need qk_norm",
            not s.qk_norm and (s.qk_norm_whole or s.qk_norm_last),
        ),
        ("qk_norm_whole and qk_norm_last exclude each other", s.qk_norm_whole and s.qk_norm_last),
        (
            "qk_norm_each needs qk_norm alone",
            s.qk_norm_each and (not s.qk_norm or s.qk_norm_whole or s.qk_norm_last),
        ),
        (
            "qk_norm_turned needs qk_norm and rope_layers",
            s.qk_norm_turned and not (s.qk_norm and s.rope_layers),
        ),
        ("window_chunked needs a sliding_window", s.window_chunked and s.sliding_window is None),
        ("attention_tuning is not within 0..1e3", not 0.0 <= s.attention_tuning <= 1e3),
        ("attention_tuning needs rope_layers", s.attention_tuning > 0 and s.rope_layers is None),
        ("attention_tuning_span is out of range", not 1 <= s.attention_tuning_span <= 1 << 31),
        ("rotary_dim needs rope", rotary is not None and s.position != "rope"),
        ("window_layers are not layers in order", not _in_order(layers, s.n_layers)),
        ("rope_layers are not layers in order", not _in_order(s.rope_layers or (), s.n_layers)),
        ("rope_layers needs rope", s.rope_layers is not None and s.position != "rope"),
        ("window_layers needs a sliding_window", s.window_layers is not None and s.sliding_window is None),
        ("local_rope_theta is not within 1..1e12", thetas),
        ("local_rope_theta needs rope", s.local_rope_theta is not None and s.position != "rope"),
        ("parallel halves need norms before them", s.parallel and s.norm_order != "pre"),
        ("sub_norms needs an RMS norm", s.sub_norms and s.norm != "rms"),
        ("longrope's factors do not fit", s.rope_scaling is not None and not _factors_fit(s, s.rope_scaling)),
    ]


def _kind_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    """Return what is wrong with layers of different kinds."""
    kinds = {s.window(i) for i in range(s.n_layers)}
    both, first = len(kinds) == 2, s.n_layers - s.kv_shared_layers
    before = {s.window(i) for i in range(max(0, first))}
    heads, dim = s.full_kv_heads, s.full_head_dim
    scaling = s.rope_scaling
    return [
        ("full_head_dim and full_kv_heads need layers with and without a window", bool(dim or heads) > both),
        ("n_heads is not a multiple of full_kv_heads", heads > 0 and s.n_heads % heads != 0),
        ("full_head_dim is odd, and rope turns pairs", s.position == "rope" and dim % 2 == 1),
        ("full_head_dim excludes a rotary_dim and longrope",
         dim > 0 and (s.rotary_dim is not None or (scaling is not None and scaling.kind == "longrope"))),
        ("layer_scale and per_layer_dim exclude norm_order post",
         s.norm_order == "post" and (s.layer_scale or s.per_layer_dim > 0)),
        ("values_are_keys needs layers without a window", s.values_are_keys and None not in kinds),
        ("kv_shared_layers are not some of the layers, of kinds that earlier ones have",
         not 0 <= s.kv_shared_layers < s.n_layers or before != kinds),
    ]  # fmt: skip


def _mixture_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    r, mixture, dense = s.router, s.n_experts > 1, s.dense_layers
    known = r.score in ROUTER_SCORES and r.weights in ROUTER_WEIGHTS and r.group_rule in GROUP_RULES
    fit = 1 <= r.groups_kept <= r.groups <= s.n_experts and s.n_experts % r.groups == 0
    each = s.n_experts // max(1, r.groups)
    return [
        ("router has a rule that is unknown", not known),
        ("router is for mixtures", not mixture and r != PLAIN_ROUTER),
        ("router_input is unknown", s.router_input not in ROUTER_INPUTS),
        ("router_input is for mixtures", not mixture and s.router_input != "ffn_norm"),
        ("router.epsilon is not within 0..1", not 0.0 <= r.epsilon <= 1.0),
        (
            "router.epsilon needs normalised or mixed weights",
            r.weights not in ("normalised", "mixed") and r.epsilon != 0.0,
        ),
        (
            "router's mixed weights are of logits alone",
            r.weights == "mixed" and (r.score != "logits" or r.selection_bias or r.groups > 1),
        ),
        ("router.scales_input is for experts whose neurons are all computed", r.scales_input and s.sparse),
        ("router.epsilon_floor needs an epsilon", r.epsilon_floor and r.epsilon == 0.0),
        ("router.scale is out of range", not _within(r.scale, 1e-6, 1e6)),
        ("router.groups do not divide the experts", not fit),
        ("router's groups have too few experts", fit and each * r.groups_kept < s.n_experts_active),
        ("router.group_rule sum2 needs two experts a group", r.group_rule == "sum2" and each < 2),
        ("shared_dim is for mixtures", s.shared_dim > 0 and not mixture),
        ("shared_gate needs a shared_dim", s.shared_gate and not s.shared_dim),
        ("router_input is for mixtures", not mixture and s.router_input != "ffn_norm"),
        (
            "shared_norms need a shared_dim, and exclude a shared_gate",
            s.shared_norms and (not s.shared_dim or s.shared_gate),
        ),
        ("dense_layers are for models whose neurons are all computed", bool(dense) and s.sparse),
        (
            "dense_layers are not some of the layers, in order",
            not _in_order(dense, s.n_layers),
        ),
        ("dense_dim and dense_layers need each other", bool(dense) != (s.dense_dim > 0)),
    ]


def _mixer_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    r, kinds = s.recurrent, set(s.mixers)
    known = kinds <= set(MIXERS) and len(s.mixers) in (0, s.n_layers)
    empty = known and any(s.mixer(i) == "none" for i in s.no_ffn if i < s.n_layers)
    heads = bool(kinds & {"deltanet", "mamba2"})
    plain = s.norm == "rms" and s.norm_order == "pre" and not s.parallel and s.position == "rope"
    return [
        (f"mixers are not one of {', '.join(MIXERS)} for each layer", not known),
        ("mixers and recurrent need each other", (r is not None) != bool(kinds & set(RECURRENT))),
        ("mixers besides attention need RMS norms before each half, and rope or no positions",
         bool(kinds - {"attention"}) and not plain),
        ("no_ffn are not some of the layers, in order", not _in_order(s.no_ffn, s.n_layers)),
        ("no_ffn needs an FFN in some layer", len(s.no_ffn) == s.n_layers),
        ("no_ffn needs RMS norms before each half", bool(s.no_ffn) and not plain),
        ("a layer has neither a mixer nor an FFN", empty),
        ("a layer of no_ffn is one of dense_layers", bool(set(s.no_ffn) & set(s.dense_layers))),
        ("attention_gate is not for models with sub_norms", s.attention_gate and s.sub_norms),
        ("recurrent is out of range", r is not None and not _recurrent_is_sane(r, heads)),
        ("recurrent.conv_bias is for mamba2", r is not None and r.conv_bias and "mamba2" not in kinds),
        ("recurrent.tiled is for heads", r is not None and r.tiled and not heads),
    ]  # fmt: skip


def _recurrent_is_sane(r: Recurrent, heads: bool) -> bool:
    sizes = (r.heads, r.head_dim, r.groups, r.state)
    if not 2 <= r.conv <= 16 or not heads:
        return 2 <= r.conv <= 16 and not any(sizes)
    return all(1 <= n <= 1024 for n in sizes) and r.heads % r.groups == 0


def _latent_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    la = s.latent
    if la is None:
        return []
    sizes = (la.kv_rank, la.nope, la.rope, la.value, la.q_rank or 1)
    plain = s.n_kv_heads == 1 and s.norm == "rms" and s.position == "rope" and s.rope_layers is None
    plain &= s.sliding_window is None and s.norm_order == "pre"
    others = (s.qk_norm, s.sub_norms, s.attention_sinks, s.attention_softcap is not None, s.sparse)
    return [
        ("latent has a size that is not within 1..65536", not all(1 <= n <= 1 << 16 for n in sizes)),
        ("latent.norm_eps is not within 0..1", not 0.0 <= la.norm_eps <= 1.0),
        ("head_dim is not that of the latent", s.head_dim != la.kv_rank + la.rope),
        ("rotary_dim is not that of the latent", s.rotary_dim != la.rope),
        ("latent needs an attention_scale", s.attention_scale is None),
        ("latent is for plain attention with one key and rope, and for neurons that are all computed",
         not plain or any(others)),
    ]  # fmt: skip


def _pooling_problems(s: ModelSpec) -> list[tuple[str, bool]]:
    cuts, types, plain = s.matryoshka or (), s.token_types, s.window(0) is None and s.latent is None
    return [
        ("unit_vectors and matryoshka need pooling",
         not s.embeds and (s.unit_vectors or s.matryoshka is not None)),
        ("pooling cls is for encoders", s.pooling == "cls" and not s.bidirectional),
        ("classifies needs an encoder's plain cls", s.classifies and (s.pooling != "cls" or s.unit_vectors)),
        ("score_tokens are not two tokens of a model that writes",
         bool(s.score_tokens) and (s.embeds or len(s.score_tokens) != 2
                                   or not all(0 <= i < s.vocab_size for i in s.score_tokens))),
        ("matryoshka are not lengths in order", not _in_order(cuts, s.dim + 1) or 0 in cuts),
        ("a model with pooling has no head of its own", s.embeds and not s.tied_head),
        ("bidirectional needs pooling, attention in all layers without windows, and no recurrence",
         s.bidirectional and not (s.embeds and plain and s.sliding_window is None and not s.mixers)),
        ("token_types is not within 0..1024", not 0 <= types <= 1024),
        ("embed_norm and token_types exclude an embed_dim and a per_layer_dim",
         (s.embed_norm or types > 0) and (s.embed_dim is not None or s.per_layer_dim > 0)),
    ]  # fmt: skip


def _in_order(layers: tuple[int, ...], n_layers: int) -> bool:
    return list(layers) == sorted(set(layers)) and all(0 <= i < n_layers for i in layers)


def _within(value: float | None, low: float, high: float) -> bool:
    return value is None or low <= value <= high


def _factors_fit(s: ModelSpec, r: RopeScaling) -> bool:
    n = (s.rotary_dim or s.head_dim) // 2 if r.kind == "longrope" else 0
    both = (*r.short_factors, *r.long_factors)
    return len(r.short_factors) == len(r.long_factors) == n and all(1e-3 <= f <= 1e6 for f in both)


def _scaling_is_sane(r: RopeScaling) -> bool:
    if not 0.0 < r.share <= 1.0 or (r.share != 1.0 and r.kind != "proportional"):
        return False
    factors = (r.factor, r.low_freq_factor, r.high_freq_factor, r.attention_factor, r.beta_fast, r.beta_slow)
    return (
        r.kind in ROPE_SCALINGS
        and all(1e-3 <= f <= 1e6 for f in factors)
        and r.low_freq_factor < r.high_freq_factor
        and 1 <= r.original_context <= 1 << 31
    )
