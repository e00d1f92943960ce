"""The tensor map: which rows of a source's tensors form each packed tensor.

`tensors` makes the map of a whole model from the names that its family uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from thermocline.model.spec import Latent, ModelSpec


@dataclass(frozen=True)
class SourceSlice:
    """Rows of one source tensor that become rows of a packed tensor.

    tensor      the source tensor's name; None: all ones (a norm without weights)
    shape       the shape that the source tensor must have
    pick        ranges of its rows, in this order; empty: all. Ranges with steps take interleaved tensors
    apart:
                (range(0, n, 2), range(1, n, 2)) is the even rows, then the odd ones
    transposed  the source's columns are our rows
    plus        added to every value (a norm's weights may be stored as w - 1)
    part        the expert's matrix in a stack of them; `shape` is then [matrices, rows, columns]
    flat        its rows are single numbers: all of the tensor's, in their order (biases of experts)
    one_row     all of the tensor's numbers are one row
    decays      the values are x of decays -exp(x)
    within      the rows of the source of which our columns are made; None: all. Only of transposed ones
    """

    tensor: str | None
    shape: tuple[int, ...]
    pick: tuple[range, ...] = ()
    transposed: bool = False
    plus: float = 0.0
    part: int | None = None
    flat: bool = False
    one_row: bool = False
    decays: bool = False
    within: range | None = None

    @property
    def rows(self) -> int:
        if self.one_row:
            return 1
        return sum(map(len, self.pick)) if self.pick else self._all

    @property
    def _all(self) -> int:
        if self.flat:
            return math.prod(self.shape)
        return self.shape[-1] if self.transposed else self._height

    @property
    def _height(self) -> int:
        return self.shape[0 if self.part is None else 1]

    @property
    def first_row(self) -> int:
        """Return the row of the stack at which the matrix begins."""
        return (self.part or 0) * self._height if self.within is None else self.within.start

    @property
    def last_row(self) -> int:
        return self.first_row + self._height if self.within is None else self.within.stop

    def ranges(self, first: int, last: int) -> Iterator[range]:
        """Yield the ranges of source rows (columns, if `transposed`) for our rows [first, last), in order."""
        begin = 0 if self.transposed else self.first_row
        for r in self.pick or (range(begin, begin + self._all),):
            part = r[max(0, first) : max(0, last)]
            if part:
                yield part
            first, last = first - len(r), last - len(r)


@dataclass(frozen=True)
class TensorMap:
    """The source slices that form each packed tensor, stacked by rows, and the tensors that may be ignored.

    Packed names are those of docs/internals/pack.md, except that `layers.I.bundle` is given as
    `layers.I.up` (if gated) and `layers.I.down`, both [n_experts * ffn_dim, dim], one row per neuron. A
    spec that is not sparse has no bundles.
    """

    tensors: dict[str, tuple[SourceSlice, ...]]
    ignored: tuple[str, ...]  # patterns of whole names
    ternary: frozenset[str] = frozenset()  # source tensors that are read as ternary values
    skipped: tuple[str, ...] = ()  # patterns of what this engine has no use for, which is said in a line
    head: str = "lm_head.weight"  # the source's head, if it has one
    packed: bool = False  # the ternary tensors are stored as ternary values already, packed in bytes
    # For files that lack the tensors which `tensors` names: tensors of the same names, from others.
    otherwise: Mapping[str, tuple[SourceSlice, ...]] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # patterns of a wrapper's parts beside its text model; said in a line too

    def may_ignore(self, name: str) -> bool:
        return any(re.fullmatch(p, name) for p in (*self.ignored, *self.skipped, *self.beside))

    def is_beside(self, name: str) -> bool:
        return any(re.fullmatch(p, name) for p in self.beside)

    def skips(self, name: str) -> bool:
        return any(re.fullmatch(p, name) for p in self.skipped)


@dataclass(frozen=True)
class Names:
    """A Hugging Face family's names of tensors, without `.weight`. Most families have the defaults."""

    root: str = "model."
    embed: str = "embed_tokens"
    head: str = "lm_head"  # without the root
    layers: str = "layers"
    out_norm: str = "norm"
    attn_norm: str = "input_layernorm"
    attn_post_norm: str = "post_attention_layernorm"  # sandwich
    ffn_norm: str = "post_attention_layernorm"
    ffn_post_norm: str = "post_feedforward_layernorm"  # sandwich
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one fused tensor
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"  # equal to `up` if both are fused, gate rows first
    up: str = "mlp.up_proj"  # in an ungated FFN this is the spec's gate
    down: str = "mlp.down_proj"
    # For mixtures; gate, up and down then have {} for the expert's number. Layers of others have no experts.
    router: str = ""
    selection_bias: str = ""  # the whole name
    shared: tuple[str, str, str] = ("", "", "")  # gate, up, down; the first two equal if they are fused
    shared_router: str = ""
    router_norm: str = ""  # the whole name of its weights, as of the next
    expert_scale: str = ""
    experts_post_norm: str = ""
    shared_norms: tuple[str, str] = ("", "")  # of its input, of its answer
    stack_weight: str = ".weight"  # what the names of stacks end in
    layer_scale: str = ""  # the whole name
    per_layer: tuple[str, str, str] = ("", "", "")  # gate, down, norm
    token_inputs: tuple[str, str, str] = ("", "", "")  # table, projection, norm
    dense: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    stacked: bool = False  # all experts' gates and ups are one tensor, gates first, and all downs
    neighbours: bool = False  # rope turns elements 2i and 2i + 1 of a head
    # Of a latent attention. `kv_b` has each head's rows for keys, then those for values.
    q_a: str = "self_attn.q_a_proj"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_b: str = "self_attn.kv_b_proj"
    latent_norms: tuple[str, str] = ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
    norm_plus: float = 0.0  # norms are stored as weights minus this
    affine: bool = True  # norms have weights


def tensors(
    spec: ModelSpec, names: Names = Names(), biases: Collection[str] = (), pick: tuple[range, ...] = ()
) -> TensorMap:
    """Return the tensor map of a model.

    `biases` names those of norm, qkv, attn_out, ffn and head that have biases. `pick` puts a fused qkv's
    rows in our order.
    """
    d, width = spec.dim, spec.embed_dim or spec.dim
    out: dict[str, tuple[SourceSlice, ...]] = {}

    def norm(ours: str, theirs: str, size: int = d) -> None:
        weight = (
            SourceSlice(f"{theirs}.weight", (size,), plus=names.norm_plus)
            if names.affine
            else SourceSlice(None, (size,))
        )
        out[f"{ours}.weight"] = (weight,)
        if "norm" in biases and names.affine:
            out[f"{ours}.bias"] = (SourceSlice(f"{theirs}.bias", (size,)),)

    def linear(ours: str, kind: str, *theirs: tuple[str, int, tuple[range, ...]], columns: int = d) -> None:
        out[f"{ours}.weight"] = tuple(SourceSlice(f"{n}.weight", (r, columns), p) for n, r, p in theirs)
        if kind in biases:
            out[f"{ours}.bias"] = tuple(SourceSlice(f"{n}.bias", (r,), p) for n, r, p in theirs)

    out["embed.weight"] = (SourceSlice(f"{names.root}{names.embed}.weight", (spec.vocab_size, width)),)
    if spec.per_layer_dim:
        table, project, own_norm = (names.root + name for name in names.token_inputs)
        of_layers = spec.n_layers * spec.per_layer_dim
        out["per_layer.embed.weight"] = (SourceSlice(f"{table}.weight", (spec.vocab_size, of_layers)),)
        linear("per_layer.project", "", (project, of_layers, ()))
        norm("per_layer.norm", own_norm, spec.per_layer_dim)
    if spec.final_norm:
        norm("out_norm", names.root + names.out_norm)
    if not spec.tied_head:
        linear("head", "head", (names.head, spec.vocab_size, ()), columns=width)
    for i in range(spec.n_layers):
        a, b, (experts, _, f) = f"layers.{i}", f"{names.root}{names.layers}.{i}.", spec.ffn(i)
        if spec.norms_before and spec.mixer(i) != "none":
            norm(f"{a}.attn_norm", b + names.attn_norm)
        if spec.norms_before and experts:
            norm(f"{a}.ffn_norm", b + names.ffn_norm)
        if spec.norms_after:
            norm(f"{a}.attn_post_norm", b + names.attn_post_norm)
            norm(f"{a}.ffn_post_norm", b + names.ffn_post_norm)
        if spec.sub_norms:
            norm(f"{a}.ffn_sub_norm", f"{b}mlp.ffn_sub_norm", f)
        if (shape := spec.attention(i)) is not None:
            q, kv = shape.context, shape.kv_heads * shape.head_dim
            for part, theirs, n in zip("qk", names.qk_norms, (shape.heads, shape.kv_heads), strict=True):
                if spec.qk_norms(i) and part in shape.projections:
                    norm(f"{a}.{part}_norm", b + theirs, spec.qk_norm_size(n, shape.head_dim))
            if spec.attention_sinks:
                out[f"{a}.sinks"] = (SourceSlice(f"{b}self_attn.sinks", (spec.n_heads,)),)
            if spec.sub_norms:
                norm(f"{a}.attn_sub_norm", f"{b}self_attn.attn_sub_norm", q)
            rows = (q, kv, kv) if len(names.qkv) == 3 else (q + 2 * kv,)
            picks = (pick,) * len(rows)
            if names.neighbours:
                picks = (*(pairs(r, shape.head_dim) for r in rows[:2]), ())
            each = list(zip(names.qkv, rows, picks, strict=True))[: len(shape.projections)]
            if shape.latent is None:
                linear(f"{a}.qkv", "qkv", *((b + n, r, p) for n, r, p in each))
            else:
                out |= _latent(spec, shape.latent, names, a, b)
            linear(f"{a}.attn_out", "attn_out", (b + names.out, d, ()), columns=q)
        if not experts:
            continue
        if experts > 1:
            out |= _beside_experts(spec, names, a, b)
        if experts > 1 and spec.shared_norms:
            norm(f"{a}.experts_post_norm", b + names.experts_post_norm)
            for part, theirs in zip(("norm", "post_norm"), names.shared_norms, strict=True):
                norm(f"{a}.shared.{part}", b + theirs)
        if spec.layer_scale:
            out[f"{a}.scale"] = (SourceSlice(b + names.layer_scale, (1,)),)
        if spec.per_layer_dim:
            lets, takes, post = (b + name for name in names.per_layer)
            linear(f"{a}.per_layer.gate", "", (lets, spec.per_layer_dim, ()))
            linear(f"{a}.per_layer.down", "", (takes, d, ()), columns=spec.per_layer_dim)
            norm(f"{a}.per_layer.post_norm", post)
        own = names.dense if i in spec.dense_layers else (names.gate, names.up, names.down)
        gate, ups, downs = (
            [b + name.format(e) for e in range(experts)]
            for name in (own[0] if spec.gated else own[1], *own[1:])
        )
        up = f"{a}.up" if spec.sparse else f"{a}.up.weight"
        if names.stacked and experts > 1:
            out |= _stacked(spec, names, a, b)
            continue
        if spec.gated and names.gate == names.up:
            linear(f"{a}.gate", "ffn", *((n, 2 * f, (range(f),)) for n in gate))
            out[up] = tuple(SourceSlice(f"{n}.weight", (2 * f, d), (range(f, 2 * f),)) for n in ups)
        else:
            linear(f"{a}.gate", "ffn", *((n, f, ()) for n in gate))
            if spec.gated:
                out[up] = tuple(SourceSlice(f"{n}.weight", (f, d)) for n in ups)
        down = f"{a}.down" if spec.sparse else f"{a}.down.weight"
        out[down] = tuple(SourceSlice(f"{n}.weight", (d, f), transposed=spec.sparse) for n in downs)
        if "ffn" in biases:
            out[f"{a}.down.bias"] = (SourceSlice(f"{b}{names.down}.bias", (d,)),)
    # Old checkpoints stored inv_freq; it is computed from the config. Layers that share keys and values may
    # hold matrices of their own for them, which nobody uses.
    head = f"{names.head}.weight"
    tied = (rf"(language_model\.)?{re.escape(head)}",) if spec.tied_head else ()
    sharing = "|".join(str(i) for i in range(spec.n_layers) if spec.kv_layer(i) != i)
    unused = rf".*\.({sharing})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)"
    return TensorMap(out, (r".*\.rotary_emb\.inv_freq", *tied, unused), head=head)


def _latent(s: ModelSpec, la: Latent, names: Names, a: str, b: str) -> dict[str, tuple[SourceSlice, ...]]:
    """Return the matrices of a layer's latent attention but the last, and its norms. `a`, `b`: prefixes."""
    n, head, each = s.n_heads, la.nope + la.rope, la.nope + la.value
    q_norm, kv_norm = (f"{b}{name}.weight" for name in names.latent_norms)
    pick = tuple(r for h in range(n) for r in _turned_last(la.nope, la.rope, h * head, names.neighbours))
    out: dict[str, tuple[SourceSlice, ...]] = {"kv_a_norm": (SourceSlice(kv_norm, (la.kv_rank,)),)}
    if la.q_rank is None:
        out["q"] = (SourceSlice(f"{b}{names.qkv[0]}.weight", (n * head, s.dim), pick),)
    else:
        out["q_a"] = (SourceSlice(f"{b}{names.q_a}.weight", (la.q_rank, s.dim)),)
        out["q_a_norm"] = (SourceSlice(q_norm, (la.q_rank,)),)
        out["q_b"] = (SourceSlice(f"{b}{names.q_b}.weight", (n * head, la.q_rank), pick),)
    pick = _turned_last(la.kv_rank, la.rope, 0, names.neighbours)
    out["kv_a"] = (SourceSlice(f"{b}{names.kv_a}.weight", (la.kv_rank + la.rope, s.dim), pick),)
    kv_b, shape = f"{b}{names.kv_b}.weight", (n * each, la.kv_rank)
    keys = [range(h * each, h * each + la.nope) for h in range(n)]
    out["k_b"] = tuple(SourceSlice(kv_b, shape, transposed=True, within=rows) for rows in keys)
    out["v_b"] = tuple(SourceSlice(kv_b, shape, (range(r.stop, r.stop + la.value),)) for r in keys)
    return {f"{a}.{name}.weight": pieces for name, pieces in out.items()}


def _turned_last(plain: int, turned: int, first: int, neighbours: bool) -> tuple[range, ...]:
    """Return rows of a head from `first` on, the turned ones behind: if neighbours turn, even ones first."""
    at, end = first + plain, first + plain + turned
    return (
        (range(first, at), range(at, end, 2), range(at + 1, end, 2)) if neighbours else (range(first, end),)
    )


def _beside_experts(spec: ModelSpec, names: Names, a: str, b: str) -> dict[str, tuple[SourceSlice, ...]]:
    """Return what a layer's mixture has beside its experts: router and shared FFN. `a`, `b`: prefixes."""
    n, d, f, r = spec.n_experts, spec.dim, spec.shared_dim, spec.router
    out: dict[str, tuple[SourceSlice, ...]]
    out = {f"{a}.router.weight": (SourceSlice(f"{b}{names.router}.weight", (n, d)),)}
    if r.biased:
        out[f"{a}.router.bias"] = (SourceSlice(f"{b}{names.router}.bias", (n,)),)
    if spec.router_input == "own_norm":
        out[f"{a}.router.norm.weight"] = (SourceSlice(b + names.router_norm, (d,)),)
    if r.expert_scale:
        out[f"{a}.router.expert_scale"] = (SourceSlice(b + names.expert_scale, (n,)),)
    if r.selection_bias:
        out[f"{a}.router.selection_bias"] = (SourceSlice(b + names.selection_bias, (n,)),)
    if f:
        gate, up, down = (f"{b}{name}.weight" for name in names.shared)
        both = gate == up
        shape, first, second = ((2 * f, d), (range(f),), (range(f, 2 * f),)) if both else ((f, d), (), ())
        if not spec.gated:
            out[f"{a}.shared.gate.weight"] = (SourceSlice(up, shape),)
        else:
            out[f"{a}.shared.gate.weight"] = (SourceSlice(gate, shape, first),)
            out[f"{a}.shared.up.weight"] = (SourceSlice(up, shape, second),)
        out[f"{a}.shared.down.weight"] = (SourceSlice(down, (d, f)),)
    if spec.shared_gate:
        out[f"{a}.shared.router.weight"] = (SourceSlice(f"{b}{names.shared_router}.weight", (1, d)),)
    return out


def _stacked(spec: ModelSpec, names: Names, a: str, b: str) -> dict[str, tuple[SourceSlice, ...]]:
    """Return a layer's experts, which are two stacks: of gates and ups under them, and of downs."""
    n, f, d = spec.n_experts, spec.ffn_dim, spec.dim
    both, down = (b + name + names.stack_weight for name in (names.gate, names.down))

    def half(e: int, second: bool) -> SourceSlice:
        first = (2 * e + second) * f
        return SourceSlice(both, (n, 2 * f, d), (range(first, first + f),), part=e)

    downs = tuple(SourceSlice(down, (n, d, f), part=e, transposed=spec.sparse) for e in range(n))
    return {
        f"{a}.gate.weight": tuple(half(e, False) for e in range(n)),
        f"{a}.up" if spec.sparse else f"{a}.up.weight": tuple(half(e, True) for e in range(n)),
        f"{a}.down" if spec.sparse else f"{a}.down.weight": downs,
    }


def pairs(rows: int, head_dim: int) -> tuple[range, ...]:
    """Return where our rows are among those whose neighbours turn: in each head the even, then the odd."""
    return tuple(range(head + odd, head + head_dim, 2) for head in range(0, rows, head_dim) for odd in (0, 1))


def grouped_rows(s: ModelSpec) -> tuple[range, ...]:
    """Return the source's row ranges in our order: all q, all k, all v.

    The source groups rows by k and v head: the head's q rows, its k, its v.
    """
    per, group = s.n_heads // s.n_kv_heads, (s.n_heads // s.n_kv_heads + 2) * s.head_dim
    q, kv = (0, per * s.head_dim), s.head_dim
    parts = (q, (q[1], q[1] + kv), (q[1] + kv, q[1] + 2 * kv))
    return tuple(range(g * group + a, g * group + b) for a, b in parts for g in range(s.n_kv_heads))
