"""Llama 4's text model: its config, its stacks of experts, and where a GGUF has them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.dense.families import rope_layers
from thermocline.model.gguf_metadata import GGUFKeys, biased, like_llama
from thermocline.model.hf_config import ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.mixtures.gguf import experts
from thermocline.model.spec import ModelSpec, Router
from thermocline.model.tensor_map import Names, SourceSlice, TensorMap, tensors

_DEFAULTS: Json = {
    "head_dim": 128,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "use_qk_norm": True,
    "for_llm_compressor": False,
}
_FFN, _EXPERTS = "feed_forward.", "feed_forward.experts."
_PARTS = ("gate_proj", "up_proj", "down_proj")
_NAMES = Names(
    router=f"{_FFN}router",
    shared=(
        f"{_FFN}shared_expert.gate_proj",
        f"{_FFN}shared_expert.up_proj",
        f"{_FFN}shared_expert.down_proj",
    ),
    dense=(f"{_FFN}gate_proj", f"{_FFN}up_proj", f"{_FFN}down_proj"),
    neighbours=True,
)


def llama4(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """Attention within chunks where rope is, to all elsewhere; the router scales experts' inputs."""
    keys.with_defaults(_DEFAULTS)
    keys.default_theta = 5e5
    keys.raw("for_llm_compressor")  # how its code lays experts out
    _unblended(keys)
    n, turned = keys.size("num_hidden_layers", "n_layers"), rope_layers(keys)
    normed, some = keys.flag("use_qk_norm") and turned != (), len(turned) < n
    width, dense = keys.size("intermediate_size", "ffn_dim"), _without_experts(keys, n)
    spec = read_spec(
        keys,
        stop,
        "llama4",
        qk_norm=normed,
        qk_norm_last=normed,
        qk_norm_turned=normed and some,
        rope_layers=turned if some else None,
        n_experts=keys.size("num_local_experts", "n_experts"),
        n_experts_active=keys.size("num_experts_per_tok", "n_experts_active"),
        ffn_dim=width,
        shared_dim=width,
        router=Router(score="sigmoid", weights="score", scales_input=True),
        dense_layers=dense,
        dense_dim=keys.size("intermediate_size_mlp", "dense_dim") if dense else 0,
        **_chunks(keys, n, turned),
        **(_tuning(keys) if some else {}),
    )
    keys.with_defaults({"intermediate_size_mlp": None}).raw("intermediate_size_mlp")
    for key in ("attn_temperature_tuning", "attn_scale", "floor_scale"):
        keys.raw(key)
    made = tensors(spec, _NAMES, attention_biases(keys))
    return spec, replace(made, tensors=made.tensors | _own(spec))


def _unblended(keys: ConfigKeys) -> None:
    """Let rope's two factors differ by nothing: published configs blend no frequency, and have one twice."""
    for key in ("rope_scaling", "rope_parameters"):
        group = keys.raw(key)
        low = group.get("low_freq_factor") if isinstance(group, dict) else None
        if isinstance(group, dict) and isinstance(low, int | float) and low == group.get("high_freq_factor"):
            keys.replace(key, {**group, "high_freq_factor": low * (1 + 1e-9)})


def _chunks(keys: ConfigKeys, n: int, turned: tuple[int, ...]) -> Json:
    """Return which layers attend within chunks: `layer_types` calls it so."""
    chunk, types = keys.integer_or_none("attention_chunk_size"), keys.raw("layer_types")
    if isinstance(types, list):
        keys.replace("layer_types", [_TYPES.get(t, t) if isinstance(t, str) else t for t in types])
    layers = windows(keys, n, turned)
    if layers == ():
        return {}
    if chunk is None:
        raise keys.bad("attention_chunk_size", "is missing, and layers attend within chunks")
    return {"sliding_window": chunk, "window_layers": layers, "window_chunked": True}


_TYPES = {"chunked_attention": "sliding_attention", "sliding_attention": "unknown"}


def _tuning(keys: ConfigKeys) -> Json:
    """Return how queries grow with their position in layers without rope."""
    tuned = keys.raw("attn_temperature_tuning")
    if type(tuned) not in (bool, int):
        raise keys.bad("attn_temperature_tuning", "must be true, false or a number")
    scale, span = keys.number("attn_scale", 0.0, 1e3), keys.integer("floor_scale")
    return {"attention_tuning": scale, "attention_tuning_span": span} if tuned else {}


def _without_experts(keys: ConfigKeys, n: int) -> tuple[int, ...]:
    """Return the layers with one FFN."""
    every, listed = keys.integer("interleave_moe_layer_step"), keys.raw("moe_layers")
    mixed = range(every - 1, n, every) if listed is None else keys.indices("moe_layers")
    return tuple(i for i in range(n) if i not in mixed)


def _own(spec: ModelSpec) -> dict[str, tuple[SourceSlice, ...]]:
    """Return norms of q and k, which have no weights, and experts: gates and ups side by side, transposed."""
    n, d, f = spec.n_experts, spec.dim, spec.ffn_dim
    out: dict[str, tuple[SourceSlice, ...]] = {}
    for i in range(spec.n_layers):
        a, b = f"layers.{i}", f"model.layers.{i}.{_EXPERTS}"
        if spec.qk_norms(i):
            ones = (SourceSlice(None, (spec.head_dim,)),)
            out |= {f"{a}.q_norm.weight": ones, f"{a}.k_norm.weight": ones}
        if i in spec.dense_layers:
            continue
        for part, rows in (("gate", range(f)), ("up", range(f, 2 * f))):
            out[f"{a}.{part}.weight"] = tuple(
                SourceSlice(f"{b}gate_up_proj", (n, d, 2 * f), (rows,), True, part=e) for e in range(n)
            )
        out[f"{a}.down.weight"] = tuple(
            SourceSlice(f"{b}down_proj", (n, f, d), transposed=True, part=e) for e in range(n)
        )
    return out


# --- GGUF ---------------------------------------------------------------------------------------------------

_MAVERICK = 128  # experts: its q and k have no norms, which no key says
NAMES = {
    f"{_FFN}router": "ffn_gate_inp",
    **{f"{_FFN}{part}": f"ffn_{part.removesuffix('_proj')}" for part in _PARTS},
    **{f"{_FFN}shared_expert.{part}": f"ffn_{part.removesuffix('_proj')}_shexp" for part in _PARTS},
}


def gguf_config(k: GGUFKeys) -> Json:
    """Return the config that a GGUF's metadata implies.

    llama.cpp's code knows the rest: chunks of 8192, every fourth layer to all positions and without rope.
    """
    config = like_llama(k, "Llama4ForCausalLM", mixture=True)
    if k.integer(".expert_gating_func", default=2) not in (0, 2):
        raise Unsupported(f"{k.name}: expert_gating_func is not 2, which is not supported in llama4")
    if k.raw(".attention.sliding_window") is not None and not k.integer(".attention.sliding_window"):
        raise Unsupported(f"{k.name}: Llama 4 without chunks is not supported")
    k.raw(".attention.chunk_size"), k.raw(".expert_shared_feed_forward_length")
    return {
        **config,
        **experts(k, "num_local_experts"),
        **biased(k, "attention_bias"),
        "intermediate_size": k.integer(".expert_feed_forward_length", low=1),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": k.integer(".interleave_moe_layer_step", default=1, low=1),
        "use_qk_norm": k.integer(".expert_count") != _MAVERICK,
    }


def in_gguf(piece: SourceSlice, layer: str, part: str) -> SourceSlice | None:
    """Return where a GGUF has a slice of experts, in rows and in stacks of their own; None: of another."""
    found = re.fullmatch(re.escape(_EXPERTS) + r"(gate_up|down)_proj", part)
    if found is None:
        return None
    experts, columns, rows = piece.shape
    if found[1] == "down":
        return SourceSlice(f"blk.{layer}.ffn_down_exps.weight", (experts, rows, columns), part=piece.part)
    which = "up" if piece.pick[0].start else "gate"
    return SourceSlice(f"blk.{layer}.ffn_{which}_exps.weight", (experts, rows // 2, columns), part=piece.part)
