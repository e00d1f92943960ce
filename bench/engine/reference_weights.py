"""A pack's weights as values: what `ops.reference` computes with, for comparisons of whole models."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from thermocline.model import quant
from thermocline.model.tensors import QKV, RowPart, bundle_parts
from thermocline.ops.interface import F32, FFN, Layer, Linear, Norm, Weights
from thermocline.pack.pack import Pack, read_tensor


def decoded(pack: Pack) -> Weights:
    """A pack's weights as `ops.reference` takes them."""
    spec = pack.spec

    def rows(name: str) -> F32:
        t = pack.tensors[name]
        return part_of(read_tensor(pack, name), RowPart(t.format, 0), t.shape[-1])

    def part_of(found: NDArray[np.uint8], part: RowPart, columns: int) -> F32:
        own = found[:, part.at : part.at + quant.row_bytes(part.format, columns)]
        return quant.decode(part.format, np.ascontiguousarray(own), columns)

    def qkv(name: str) -> Linear:
        names = [n for n in (f"{name}.{x}.weight" for x in ("qkv", *QKV)) if n in pack.tensors]
        return Linear(np.concatenate([rows(n) for n in names]), vector(f"{name}.qkv.bias"))

    def vector(name: str) -> F32 | None:
        return read_tensor(pack, name).view(np.float32).ravel() if name in pack.tensors else None

    def norm(name: str) -> Norm | None:
        weight = vector(f"{name}.weight")
        return None if weight is None else Norm(weight, vector(f"{name}.bias"))

    def linear(name: str) -> Linear:
        return Linear(rows(f"{name}.weight"), vector(f"{name}.bias"))

    def experts(name: str) -> Iterator[FFN]:
        n = spec.ffn_dim
        gate, gate_bias = rows(f"{name}.gate.weight"), vector(f"{name}.gate.bias")
        bias = vector(f"{name}.down.bias")
        if spec.sparse:
            t, records = pack.tensors[f"{name}.bundle"], read_tensor(pack, f"{name}.bundle")
            up, down = (None if p is None else part_of(records, p, spec.dim) for p in bundle_parts(t, spec))
        else:
            up = rows(f"{name}.up.weight") if spec.gated else None
            down = rows(f"{name}.down.weight")
        assert down is not None
        for e in range(spec.n_experts):
            own = slice(e * n, (e + 1) * n)
            outputs = own if spec.sparse else slice(e * spec.dim, (e + 1) * spec.dim)
            mine = Linear(gate[own], None if gate_bias is None else gate_bias[own])
            yield FFN.whole(mine, None if up is None else up[own], down[outputs], bias, bundles=spec.sparse)

    def layer(i: int) -> Layer:
        a = f"layers.{i}"
        norms = norm(f"{a}.attn_norm"), norm(f"{a}.ffn_norm")
        return Layer(
            norms[0], qkv(a), linear(f"{a}.attn_out"), norms[1],
            tuple(experts(a)), router=linear(f"{a}.router") if spec.n_experts > 1 else None,
        )  # fmt: skip

    embed = rows("embed.weight")
    position = rows("pos_embed.weight") if spec.position == "learned" else None
    head = Linear(embed, None) if spec.tied_head else linear("head")
    return Weights(embed, position, tuple(map(layer, range(spec.n_layers))), norm("out_norm"), head)
