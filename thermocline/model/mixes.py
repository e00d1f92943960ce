"""Mixes: which format each matrix of a model gets under a name such as q4_k_m.

The rules are those by which llama.cpp's files of these names are made, so that sizes and qualities can be
compared tensor by tensor. numpy is not imported: commands name mixes before they load anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thermocline.model.formats import fitting

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec


@dataclass(frozen=True)
class Mix:
    """A mix: its name, the format of most weights, and GGUF's name for such a file."""

    name: str
    base: str
    file_type: str


MIXES: dict[str, Mix] = {
    m.name: m
    for m in (
        Mix("f32", "f32", "ALL_F32"),
        Mix("f16", "f16", "MOSTLY_F16"),
        Mix("bf16", "bf16", "MOSTLY_BF16"),
        Mix("q8_0", "q8_0", "MOSTLY_Q8_0"),
        Mix("q6_k", "q6_k", "MOSTLY_Q6_K"),
        Mix("q5_k_m", "q5_k", "MOSTLY_Q5_K_M"),
        Mix("q5_k_s", "q5_k", "MOSTLY_Q5_K_S"),
        Mix("q5_1", "q5_1", "MOSTLY_Q5_1"),
        Mix("q5_0", "q5_0", "MOSTLY_Q5_0"),
        Mix("q4_k_m", "q4_k", "MOSTLY_Q4_K_M"),
        Mix("q4_k_s", "q4_k", "MOSTLY_Q4_K_S"),
        Mix("q4_1", "q4_1", "MOSTLY_Q4_1"),
        Mix("q4_0", "q4_0", "MOSTLY_Q4_0"),
        Mix("iq4_nl", "iq4_nl", "MOSTLY_IQ4_NL"),
        Mix("iq4_xs", "iq4_xs", "MOSTLY_IQ4_XS"),
        Mix("mxfp4", "mxfp4", "MOSTLY_MXFP4_MOE"),
        Mix("q3_k_l", "q3_k", "MOSTLY_Q3_K_L"),
        Mix("q3_k_m", "q3_k", "MOSTLY_Q3_K_M"),
        Mix("q3_k_s", "q3_k", "MOSTLY_Q3_K_S"),
        Mix("q2_k", "q2_k", "MOSTLY_Q2_K"),
        Mix("tq2_0", "tq2_0", "MOSTLY_TQ2_0"),
    )
}
NUMBERS = ("f32", "f16", "bf16")
FFN = ("gate", "up", "down")


def formats_of(mix: str, spec: ModelSpec, *, importance: bool = False) -> dict[str, str]:
    """Return the format of every matrix of a model: {packed tensor: format}.

    Names are those that `expected_tensors` takes: attention's three matrices are named apart, and so are up
    and down of bundles. `importance` says that column importances will be used: a few rules depend on it.
    Rows that a format's blocks do not divide get its fallback. A format that is no mix's name is every
    matrix's.
    """
    m, columns = MIXES.get(mix), _columns(spec)
    if m is None:
        return {name: fitting(mix, n) for name, n in columns.items()}
    return {
        name: m.base if m.base in NUMBERS else fitting(_wanted(m, name, spec, columns[name], importance), n)
        for name, n in columns.items()
    }


def main_format(mix: str, formats: dict[str, str]) -> str:
    """Return the format that a pack's manifest names: the mix's own, if a matrix has it."""
    base = MIXES[mix].base if mix in MIXES else mix
    return base if base in formats.values() else Counter(formats.values()).most_common(1)[0][0]


def _columns(spec: ModelSpec) -> dict[str, int]:
    """Return the columns of every matrix whose format a mix chooses."""
    width = spec.embed_dim or spec.dim
    out = {"embed.weight": width}
    if spec.embed_dim is not None:
        out |= {"project_in.weight": spec.embed_dim, "project_out.weight": spec.dim}
    for i in range(spec.n_layers):
        if (shape := spec.attention(i)) is not None:
            out[f"layers.{i}.attn_out.weight"] = shape.context
            if shape.latent is None:
                parts = ("q.weight", "k.weight", "v.weight", *(("attn_gate.weight",) * spec.attention_gate))
                out |= {f"layers.{i}.{part}": spec.dim for part in parts}
            else:
                found = shape.latent.matrices(shape.heads, spec.dim).items()
                out |= {f"layers.{i}.{part}.weight": size[-1] for part, size in found}
        out |= {f"layers.{i}.{part}": shape[1] for part, shape in spec.mixer_matrices(i).items()}
        if not spec.ffn(i).experts:
            continue
        out |= {f"layers.{i}.{part}": spec.dim for part in _parts(spec)}
        down = f"layers.{i}.down" if spec.sparse else f"layers.{i}.down.weight"
        out[down] = spec.dim if spec.sparse else spec.ffn(i).width
        if spec.shared_dim and i not in spec.dense_layers:
            shared = f"layers.{i}.shared"
            out |= {f"{shared}.{part}": spec.dim for part in ("gate.weight", "up.weight")[: 1 + spec.gated]}
            out[f"{shared}.down.weight"] = spec.shared_dim
    if not spec.tied_head:
        out["head.weight"] = width
    return out


def _parts(spec: ModelSpec) -> Iterator[str]:
    yield "gate.weight"
    if spec.gated:
        yield "up" if spec.sparse else "up.weight"


def _wanted(m: Mix, name: str, spec: ModelSpec, columns: int, importance: bool) -> str:
    """Return a matrix's format before its fallback."""
    if name == "head.weight" or (name == "embed.weight" and spec.tied_head):
        return _head(m, columns)
    if name == "embed.weight":
        return {"tq2_0": "q4_k", "mxfp4": "q8_0"}.get(m.name, m.base)
    if not name.startswith("layers."):
        return "q8_0" if m.name == "mxfp4" and spec.n_experts > 1 else m.base
    layer, _, part = name.removeprefix("layers.").removesuffix(".weight").partition(".")
    i, layers = int(layer), spec.n_layers
    if m.name == "mxfp4":  # of a mixture, only the experts
        expert = part in FFN and i not in spec.dense_layers
        return "mxfp4" if spec.n_experts == 1 or expert else "q8_0"
    if part == "v":
        return _value(m, i, spec)
    if part == "k" and spec.n_experts == 8:
        return "q8_0"
    if part in ("down", "shared.down"):
        return _down(m, i, layers, importance)
    if part in ("mixer.beta", "mixer.alpha"):  # a row a head: what states fade by
        return "q8_0"
    if part == "attn_out":
        return _attention_out(m, spec.n_experts)
    return m.base


def _head(m: Mix, columns: int) -> str:
    """Return the head's format: finer than most, since nothing behind it evens its errors out."""
    if m.name in ("q8_0", "mxfp4") or fitting(m.base, columns) != m.base:
        return "q8_0"
    return "q6_k"


def _more_bits(layer: int, layers: int) -> bool:
    """Tell whether a layer is in the first or last eighth, or is every third one between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _value(m: Mix, layer: int, spec: ModelSpec) -> str:
    """Return the format of attention's values: few weights, and sensitive ones."""
    grouped = spec.n_heads // spec.n_kv_heads
    format = {
        "q2_k": "q4_k" if grouped >= 4 else "q3_k",
        "q3_k_m": "q5_k" if layer < 2 else "q4_k",
        "q3_k_l": "q5_k",
        "q4_k_s": "q5_k" if layer < 4 else "q4_k",
        "q4_k_m": "q6_k" if _more_bits(layer, spec.n_layers) else "q4_k",
        "q5_k_m": "q6_k" if _more_bits(layer, spec.n_layers) else "q5_k",
    }.get(m.name, m.base)
    if m.name in ("iq4_nl", "iq4_xs") and grouped >= 4:
        format = "q5_k"
    if spec.n_layers == 80 and grouped > 1 and format in ("q3_k", "q4_k"):  # 70B: an eighth of q's rows
        format = "q5_k"
    return "q8_0" if spec.n_experts == 8 else format


def _down(m: Mix, layer: int, layers: int, importance: bool) -> str:
    first = layer < layers // 8
    if m.name in ("iq4_nl", "iq4_xs") and first and not importance:
        return "q5_k"
    if m.name in ("q4_0", "q5_0") and first and importance:
        return m.name.replace("_0", "_1")
    return {
        "q2_k": "q3_k",
        "q3_k_m": "q5_k" if layer < layers // 16 else "q4_k",
        "q3_k_l": "q5_k",
        "q4_k_s": "q5_k" if first else "q4_k",
        "q4_k_m": "q6_k" if _more_bits(layer, layers) else "q4_k",
        "q5_k_m": "q6_k" if _more_bits(layer, layers) else "q5_k",
    }.get(m.name, m.base)


def _attention_out(m: Mix, experts: int) -> str:
    if experts == 8:
        coarse = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")
        return "q5_k" if m.name in coarse else m.base
    return {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(m.name, m.base)
