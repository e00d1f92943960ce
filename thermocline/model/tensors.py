"""The tensors that a spec implies: their shapes, formats, rows and strides.

The writer and the opener of packs both use them. A pack.json can only repeat them, so a hostile one cannot
make native code read out of bounds. docs/internals/pack.md describes the format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thermocline.errors import Unsupported
from thermocline.model import quant
from thermocline.model.formats import fitting
from thermocline.model.spec import QKV as QKV
from thermocline.model.spec import AttentionShape, ModelSpec

ALIGN = 4096
APART = 64  # where a record's two rows differ in format, down's begins at a multiple of so many bytes


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in weights.bin: `bytes` from `offset`, with a row (or bundle record) every `stride` bytes."""

    format: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    stride: int
    down_format: str | None = None  # of a bundle's down rows, where it is not that of its up rows


@dataclass(frozen=True)
class RowPart:
    """A part of each row of a tensor: weights in `format` from byte `at` on. Bundles' records have two."""

    format: str
    at: int


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a spec implies: `rows` rows, each of all `parts` in turn, each part `columns` wide."""

    format: str
    shape: tuple[int, ...]
    rows: int
    columns: int
    stride: int
    parts: tuple[str, ...]  # names to read from a source
    role: str  # the group in which `inspect` counts it: one of pack.py's ROLES
    vector: bool = False  # norms, biases, order: never quantised, read whole
    optional: bool = False
    down_format: str | None = None  # as TensorInfo's
    first: int = 0  # the row of the source at which it begins: k's rows follow q's

    @property
    def bytes(self) -> int:
        return self.rows * self.stride

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * len(self.parts)

    @property
    def layout(self) -> tuple[RowPart, ...]:
        """Return where each of `parts` lies in a row of a matrix."""
        return _layout(self.format, self.down_format, self.columns, len(self.parts))

    @property
    def payload(self) -> int:
        """Return the bytes of weights in a row, without what lies between and behind them."""
        if self.vector:
            return 4 * self.columns
        return sum(quant.row_bytes(p.format, self.columns) for p in self.layout)


def _layout(format: str, down_format: str | None, columns: int, parts: int) -> tuple[RowPart, ...]:
    first = RowPart(format, 0)
    if parts == 1:
        return (first,)
    at = quant.row_bytes(format, columns)
    if down_format is None:
        return first, RowPart(format, at)
    return first, RowPart(down_format, -(-at // APART) * APART)


def bundle_parts(t: TensorInfo, spec: ModelSpec) -> tuple[RowPart | None, RowPart]:
    """Return (up, None if ungated; down) of a bundle's records."""
    *up, down = _layout(t.format, t.down_format, spec.dim, 2 if spec.gated else 1)
    return (up[0] if up else None), down


def bundle_stride(record_bytes: int) -> int:
    """Return the stride of bundle records: a multiple of 512 bytes, so that direct I/O reads one record.

    If that wastes more than 1/8, the stride is a multiple of 64 bytes (a cache line).
    """
    wide = -(-record_bytes // 512) * 512
    return wide if (wide - record_bytes) * 8 <= record_bytes else -(-record_bytes // 64) * 64


def expected_tensors(
    spec: ModelSpec,
    weight_format: str,
    formats: Mapping[str, str] | None = None,
    ranks: Sequence[int] = (),
    own_predictors: bool = False,
) -> dict[str, TensorSpec]:
    """Return every tensor that a pack of `spec` has or may have, in file order.

    `formats` gives matrices formats of their own; other names in it mean nothing. Its names are those of
    tensors, and `layers.I.q.weight`, `k.weight` and `v.weight` (else as `qkv.weight`): where these differ,
    there are three tensors in place of the fused one. The rows of a bundle are `layers.I.up` (else as gate)
    and `layers.I.down` (else as up). `ranks` are the ranks of each layer's predictor, if the model has
    predictors; `own_predictors`: every expert has one. Raises Unsupported for rows that do not fill whole
    blocks of their format.
    """
    out: dict[str, TensorSpec] = {}
    own = formats or {}

    def matrix(name: str, role: str, *shape: int, format: str = "") -> None:
        format = format or own.get(name, weight_format)
        rows, stride = math.prod(shape[:-1]), _row_bytes(name, format, shape[-1])
        out[name] = TensorSpec(format, shape, rows, shape[-1], stride, (name,), role)

    def vector(name: str, role: str, *shape: int, format: str = "f32", optional: bool = True) -> None:
        rows, stride = math.prod(shape[:-1]), 4 * shape[-1]
        out[name] = TensorSpec(format, shape, rows, shape[-1], stride, (name,), role, True, optional)

    def norm(name: str, size: int = spec.dim) -> None:
        vector(f"{name}.weight", "norm", size, optional=False)
        if spec.norm == "layer":
            vector(f"{name}.bias", "norm", size)

    matrix("embed.weight", "embed", spec.vocab_size, spec.embed_dim or spec.dim)
    if spec.embed_dim is not None:
        matrix("project_in.weight", "head", spec.dim, spec.embed_dim)
    if spec.per_layer_dim:
        width = spec.n_layers * spec.per_layer_dim
        rows = own.get("per_layer.embed.weight", fitting(weight_format, width))
        matrix("per_layer.embed.weight", "embed", spec.vocab_size, width, format=rows)
        matrix("per_layer.project.weight", "head", width, spec.dim)
        vector("per_layer.norm.weight", "norm", spec.per_layer_dim, optional=False)
    if spec.position == "learned":
        matrix("pos_embed.weight", "embed", spec.max_context, spec.dim, format="f32")
    if spec.token_types:
        matrix("token_types.weight", "embed", spec.token_types, spec.dim, format="f32")
    if spec.embed_norm:
        norm("embed_norm")
    for i in range(spec.n_layers):
        a, (experts, _, neurons) = f"layers.{i}", spec.ffn(i)
        shape = spec.attention(i)
        if spec.norms_before and spec.mixer(i) != "none":
            norm(f"{a}.attn_norm")
        if shape is not None:
            if shape.latent is None:
                out |= _qkv(a, shape, spec.dim, weight_format, own)
                vector(f"{a}.qkv.bias", "attention", shape.qkv_rows)
            else:
                for name, size in shape.latent.norms.items():
                    vector(f"{a}.{name}.weight", "norm", size, optional=False)
                for name, of in shape.latent.matrices(shape.heads, spec.dim).items():
                    format = own.get(f"{a}.{name}.weight", fitting(weight_format, of[-1]))
                    matrix(f"{a}.{name}.weight", "attention", *of, format=format)
            heads = zip(QKV[:2], (shape.heads, shape.kv_heads), strict=True)
            for part, n in heads if spec.qk_norms(i) else ():
                if part in shape.projections:
                    size = spec.qk_norm_size(n, shape.head_dim)
                    vector(f"{a}.{part}_norm.weight", "norm", size, optional=False)
            if spec.attention_sinks:
                vector(f"{a}.sinks", "attention", shape.heads, optional=False)
            if spec.attention_gate:
                matrix(f"{a}.attn_gate.weight", "attention", shape.context, spec.dim)
            if spec.sub_norms:
                norm(f"{a}.attn_sub_norm", shape.context)
                norm(f"{a}.ffn_sub_norm", neurons)
            for name in ("attn_post_norm", "ffn_post_norm") if spec.norms_after else ():
                norm(f"{a}.{name}")
            matrix(f"{a}.attn_out.weight", "attention", spec.dim, shape.context)
            vector(f"{a}.attn_out.bias", "attention", spec.dim)
        for name, sizes in spec.mixer_matrices(i).items():
            format = own.get(f"{a}.{name}", fitting(weight_format, sizes[1]))
            matrix(f"{a}.{name}", "mixer", *sizes, format=format)
        for name, own_sizes in spec.mixer_vectors(i).items():
            vector(f"{a}.{name}", "mixer", *own_sizes, optional=False)
        if not experts:
            continue
        if spec.norms_before:
            norm(f"{a}.ffn_norm")
        if experts > 1:  # f32: rounding may change the chosen expert; this is 1/40000 of Mixtral's weights
            matrix(f"{a}.router.weight", "router", experts, spec.dim, format="f32")
            for name in router_biases(spec):
                vector(f"{a}.{name}", "router", experts, optional=False)
            if spec.router_input == "own_norm":
                norm(f"{a}.router.norm")
        gate = own.get(f"{a}.gate.weight", weight_format)
        matrix(f"{a}.gate.weight", "gate", experts, neurons, spec.dim, format=gate)
        if not spec.router.scales_input:  # an expert's answer follows its input's scale
            vector(f"{a}.gate.bias", "gate", experts, neurons)
        if spec.sparse:
            up = own.get(f"{a}.up", gate)
            out[f"{a}.bundle"] = _bundle(a, spec, (experts, neurons), up, own.get(f"{a}.down", up))
            vector(f"{a}.order", "bundle", experts, neurons, format="i32")
        else:
            if spec.gated:
                up = own.get(f"{a}.up.weight", gate)
                matrix(f"{a}.up.weight", "up", experts, neurons, spec.dim, format=up)
            down = own.get(f"{a}.down.weight", fitting(weight_format, neurons))
            matrix(f"{a}.down.weight", "down", experts, spec.dim, neurons, format=down)
        if experts == 1:
            vector(f"{a}.down.bias", "bundle" if spec.sparse else "down", spec.dim)
        elif (
            not spec.sparse and not spec.router.scales_input
        ):  # added to an expert's answer before that is weighed
            vector(f"{a}.down.bias", "down", experts, spec.dim)
            if spec.gated:
                vector(f"{a}.up.bias", "up", experts, neurons)
        if experts > 1 and spec.shared_dim:
            matrix(f"{a}.shared.gate.weight", "shared", spec.shared_dim, spec.dim)
            if spec.gated:
                matrix(f"{a}.shared.up.weight", "shared", spec.shared_dim, spec.dim)
            down = own.get(f"{a}.shared.down.weight", fitting(weight_format, spec.shared_dim))
            matrix(f"{a}.shared.down.weight", "shared", spec.dim, spec.shared_dim, format=down)
            for name in ("shared.norm", "shared.post_norm", "experts_post_norm") if spec.shared_norms else ():
                norm(f"{a}.{name}")
            if spec.shared_gate:
                matrix(f"{a}.shared.router.weight", "router", 1, spec.dim, format="f32")
        if spec.per_layer_dim:
            matrix(f"{a}.per_layer.gate.weight", "inputs", spec.per_layer_dim, spec.dim)
            down = own.get(f"{a}.per_layer.down.weight", fitting(weight_format, spec.per_layer_dim))
            matrix(f"{a}.per_layer.down.weight", "inputs", spec.dim, spec.per_layer_dim, format=down)
            norm(f"{a}.per_layer.post_norm")
        if spec.layer_scale:
            vector(f"{a}.scale", "norm", 1, optional=False)
        if ranks:
            codes = (experts, ranks[i]) if own_predictors else (ranks[i],)
            matrix(f"{a}.predictor.fc1.weight", "predictor", *codes, spec.dim)
            fc2 = f"{a}.predictor.fc2.weight"
            format = own.get(fc2, fitting(weight_format, ranks[i]))
            matrix(fc2, "predictor", experts * neurons, ranks[i], format=format)
        if spec.sparse:
            vector(f"{a}.activation_count", "predictor", experts * neurons)
    if spec.final_norm:
        norm("out_norm")
    if spec.embed_dim is not None:
        matrix("project_out.weight", "head", spec.embed_dim, spec.dim)
    if spec.classifies:  # f32: as large as a thousandth of the model, and all of its answer
        matrix("classifier.dense.weight", "head", spec.dim, spec.dim, format="f32")
        vector("classifier.dense.bias", "head", spec.dim, optional=False)
        matrix("classifier.out.weight", "head", 1, spec.dim, format="f32")
        vector("classifier.out.bias", "head", 1, optional=False)
    if not spec.tied_head:
        matrix("head.weight", "head", spec.vocab_size, spec.embed_dim or spec.dim)
        vector("head.bias", "head", spec.vocab_size)
    return out


def formats_in(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the formats of a pack's tensors as `expected_tensors` takes them."""
    out: dict[str, str] = {}
    for name, t in tensors.items():
        out |= named_formats(name, t.format, t.down_format)
    return out


def named_formats(name: str, format: str, down_format: str | None) -> dict[str, str]:
    """Return one tensor's formats, by the names that `expected_tensors` has for them."""
    if not name.endswith(".bundle"):
        return {name: format}
    layer = name.removesuffix(".bundle")
    return {f"{layer}.up": format, f"{layer}.down": down_format or format}


def optional_among(names: Iterable[str], spec: ModelSpec) -> list[str]:
    """Return those of `names` that are optional tensors of a pack of `spec`."""
    known = expected_tensors(spec, "f32")
    return [n for n in names if n in known and known[n].optional]


def _qkv(
    layer: str, shape: AttentionShape, columns: int, weight_format: str, own: Mapping[str, str]
) -> dict[str, TensorSpec]:
    """Return q, k and v, or those of them that a layer has: one tensor, or one each if formats differ."""
    fused = f"{layer}.qkv.weight"
    otherwise = own.get(fused, weight_format)
    formats = {n: own.get(f"{layer}.{n}.weight", otherwise) for n in shape.projections}
    kv = shape.kv_heads * shape.head_dim
    rows = {"q": shape.context, "k": kv, "v": kv}
    if len(set(formats.values())) == 1:
        formats, rows = {"qkv": formats["q"]}, {"qkv": shape.qkv_rows}
    out, first = dict[str, TensorSpec](), 0
    for n, format in formats.items():
        name = f"{layer}.{n}.weight"
        stride = _row_bytes(name, format, columns)
        out[name] = TensorSpec(
            format, (rows[n], columns), rows[n], columns, stride, (fused,), "attention", first=first
        )
        first += rows[n]
    return out


def router_biases(spec: ModelSpec) -> list[str]:
    """Return the names of a router's vectors with a number for each expert, without the layer's."""
    r, name = spec.router, "router."
    has = {"bias": r.biased, "selection_bias": r.selection_bias, "expert_scale": r.expert_scale}
    return [name + part for part, there in has.items() if there]


def _bundle(layer: str, spec: ModelSpec, shape: tuple[int, int], up: str, down: str) -> TensorSpec:
    parts = (f"{layer}.up", f"{layer}.down") if spec.gated else (f"{layer}.down",)
    format, down_format = (up, None if up == down else down) if spec.gated else (down, None)
    for part, of in zip(parts, (format, down), strict=False):
        _row_bytes(part, of, spec.dim)
    last = _layout(format, down_format, spec.dim, len(parts))[-1]
    stride = bundle_stride(last.at + quant.row_bytes(last.format, spec.dim))
    return TensorSpec(
        format, shape, math.prod(shape), spec.dim, stride, parts, "bundle", down_format=down_format
    )


def _row_bytes(name: str, format: str, columns: int) -> int:
    try:
        return quant.row_bytes(format, columns)
    except Unsupported as e:
        raise Unsupported(f"{name}: {e}") from None


def place(tensor_specs: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorInfo], int]:
    """Place tensors in weights.bin: ({name: its place}, total bytes), in order, on `ALIGN` boundaries."""
    out, offset = {}, 0
    for name, t in tensor_specs.items():
        out[name] = TensorInfo(t.format, t.shape, offset, t.bytes, t.stride, t.down_format)
        offset = -(-(offset + t.bytes) // ALIGN) * ALIGN
    return out, offset
