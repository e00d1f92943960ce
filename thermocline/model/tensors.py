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
from thermocline.model.spec import ModelSpec

ALIGN = 4096


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in weights.bin: `bytes` from `offset`, with a row (or bundle record) every `stride` bytes."""

    format: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    stride: int


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

    @property
    def bytes(self) -> int:
        return self.rows * self.stride

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * len(self.parts)


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
) -> dict[str, TensorSpec]:
    """Return every tensor that a pack of `spec` has or may have, in file order.

    `formats` gives matrices and bundles formats of their own; other names in it mean nothing. `ranks` are the
    ranks of each layer's predictor, if the model has predictors. Raises Unsupported for rows that do not fill
    whole blocks of their format.
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

    experts, neurons = spec.n_experts, spec.ffn_dim
    matrix("embed.weight", "embed", spec.vocab_size, spec.embed_dim or spec.dim)
    if spec.embed_dim is not None:
        matrix("project_in.weight", "head", spec.dim, spec.embed_dim)
    if spec.position == "learned":
        matrix("pos_embed.weight", "embed", spec.max_context, spec.dim, format="f32")
    for i in range(spec.n_layers):
        a = f"layers.{i}"
        norm(f"{a}.attn_norm")
        matrix(f"{a}.qkv.weight", "attention", spec.qkv_rows, spec.dim)
        vector(f"{a}.qkv.bias", "attention", spec.qkv_rows)
        for name in ("q_norm", "k_norm") if spec.qk_norm else ():
            vector(f"{a}.{name}.weight", "norm", spec.head_dim, optional=False)
        if spec.sub_norms:
            norm(f"{a}.attn_sub_norm", spec.n_heads * spec.head_dim)
            norm(f"{a}.ffn_sub_norm", neurons)
        for name in ("attn_post_norm", "ffn_post_norm") if spec.norm_order == "sandwich" else ():
            norm(f"{a}.{name}")
        matrix(f"{a}.attn_out.weight", "attention", spec.dim, spec.n_heads * spec.head_dim)
        vector(f"{a}.attn_out.bias", "attention", spec.dim)
        norm(f"{a}.ffn_norm")
        if experts > 1:  # f32: rounding may change the chosen expert; this is 1/40000 of Mixtral's weights
            matrix(f"{a}.router.weight", "router", experts, spec.dim, format="f32")
        gate = own.get(f"{a}.gate.weight", weight_format)  # up rows are computed with gate rows: one format
        matrix(f"{a}.gate.weight", "gate", experts, neurons, spec.dim, format=gate)
        vector(f"{a}.gate.bias", "gate", experts, neurons)
        if spec.sparse:
            out[f"{a}.bundle"] = _bundle(a, spec, gate)
            vector(f"{a}.order", "bundle", experts, neurons, format="i32")
        else:
            if spec.gated:
                matrix(f"{a}.up.weight", "up", experts, neurons, spec.dim, format=gate)
            whole = neurons % quant.FORMATS[weight_format].block == 0  # otherwise f16, like llama.cpp
            down = own.get(f"{a}.down.weight", weight_format if whole else "f16")
            matrix(f"{a}.down.weight", "down", experts, spec.dim, neurons, format=down)
        if experts == 1:
            vector(f"{a}.down.bias", "bundle" if spec.sparse else "down", spec.dim)
        if ranks:
            matrix(f"{a}.predictor.fc1.weight", "predictor", ranks[i], spec.dim)
            fc2 = f"{a}.predictor.fc2.weight"
            whole = ranks[i] % quant.FORMATS[weight_format].block == 0
            format = own.get(fc2, weight_format if whole else "f16")
            matrix(fc2, "predictor", experts * neurons, ranks[i], format=format)
        if spec.sparse:
            vector(f"{a}.activation_count", "predictor", experts * neurons)
    if spec.final_norm:
        norm("out_norm")
    if spec.embed_dim is not None:
        matrix("project_out.weight", "head", spec.embed_dim, spec.dim)
    if not spec.tied_head:
        matrix("head.weight", "head", spec.vocab_size, spec.embed_dim or spec.dim)
    return out


def optional_among(names: Iterable[str], spec: ModelSpec) -> list[str]:
    """Return those of `names` that are optional tensors of a pack of `spec`."""
    known = expected_tensors(spec, "f32")
    return [n for n in names if n in known and known[n].optional]


def _bundle(layer: str, spec: ModelSpec, weight_format: str) -> TensorSpec:
    parts = (f"{layer}.up", f"{layer}.down") if spec.gated else (f"{layer}.down",)
    stride = bundle_stride(len(parts) * _row_bytes(f"{layer}.bundle", weight_format, spec.dim))
    shape = (spec.n_experts, spec.ffn_dim)
    return TensorSpec(weight_format, shape, math.prod(shape), spec.dim, stride, parts, "bundle")


def _row_bytes(name: str, format: str, columns: int) -> int:
    try:
        return quant.row_bytes(format, columns)
    except Unsupported as e:
        raise Unsupported(f"{name}: {e}") from None


def place(tensor_specs: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorInfo], int]:
    """Place tensors in weights.bin: ({name: its place}, total bytes), in order, on `ALIGN` boundaries."""
    out, offset = {}, 0
    for name, t in tensor_specs.items():
        out[name] = TensorInfo(t.format, t.shape, offset, t.bytes, t.stride)
        offset = -(-(offset + t.bytes) // ALIGN) * ALIGN
    return out, offset
