"""gpt-oss: its config, its stacks of experts, and where a GGUF has them (arXiv 2508.10925)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from thermocline.errors import Unsupported
from thermocline.files.bounded import Json
from thermocline.model.gguf_metadata import GGUFKeys, biased, like_llama, window
from thermocline.model.hf_config import ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.mixtures.gguf import experts
from thermocline.model.spec import ModelSpec, Router
from thermocline.model.tensor_map import Names, SourceSlice, TensorMap, tensors

Slices = tuple[SourceSlice, ...]
_DEFAULTS: Json = {
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 64,
    "hidden_act": "silu",  # which its code does not look at
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "quantization_config": None,
    "initial_context_length": None,
}
_ROPE: Json = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_EXPERTS = "mlp.experts."
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def gpt_oss(keys: ConfigKeys, stop: Any) -> tuple[ModelSpec, TensorMap]:
    """Sinks, a window in every second layer, biases everywhere, and a clamped SwiGLU in its experts."""
    keys.with_defaults(_DEFAULTS)
    keys.default_theta = 150000.0
    keys.same("num_experts_per_tok", "experts_per_token")
    keys.same("num_local_experts", "num_experts")
    if keys.raw("rope_scaling") is None and keys.raw("rope_parameters") is None:
        keys.replace("rope_parameters", _ROPE)
    keys.activation("hidden_act", ("silu",))
    n, near = keys.size("num_hidden_layers", "n_layers"), keys.integer_or_none("sliding_window")
    layers = windows(keys, n, range(0, n, 2))
    seen: Json = {} if near is None or layers == () else {"sliding_window": near, "window_layers": layers}
    spec = read_spec(
        keys,
        stop,
        "gpt-oss",
        activation="swiglu_oai",
        swiglu_alpha=keys.number("swiglu_alpha", 1e-3, 1e3),
        swiglu_limit=keys.number("swiglu_limit", 1e-3, 1e6),
        attention_sinks=True,
        n_experts=keys.size("num_local_experts", "n_experts"),
        n_experts_active=keys.size("num_experts_per_tok", "n_experts_active"),
        router=Router(score="logits", biased=True),
        **seen,
    )
    first, scaling = keys.integer_or_none("initial_context_length"), spec.rope_scaling
    if first is not None and scaling is not None and first != scaling.original_context:
        raise keys.bad("initial_context_length", f"differs from rope's {scaling.original_context}")
    plain = tensors(spec, Names(router="mlp.router"), attention_biases(keys))
    own = _stacks(spec, blocks=_in_blocks(keys))
    return spec, replace(plain, tensors=plain.tensors | own)


def _in_blocks(keys: ConfigKeys) -> bool:
    """Return whether experts are stored as blocks of MXFP4."""
    group = keys.group("quantization_config")
    if group is None:
        return False
    group.with_defaults({"modules_to_not_convert": None, "dequantize": False})
    if group.raw("quant_method") != "mxfp4":
        raise group.unsupported("quant_method", "is not supported here; known: mxfp4")
    group.raw("modules_to_not_convert"), group.raw("dequantize")
    group.finish()
    return True


def _stacks(spec: ModelSpec, *, blocks: bool) -> dict[str, Slices]:
    """Return the experts' tensors: gate rows are the even ones, up rows the odd ones of one stack.

    Floats are stored transposed, so that rows are columns.
    """
    e, d, f = spec.n_experts, spec.dim, spec.ffn_dim
    out: dict[str, Slices] = {}
    for i in range(spec.n_layers):
        a, b = f"layers.{i}", f"model.layers.{i}.{_EXPERTS}"
        for odd, part in enumerate(("gate", "up")):
            rows = [range(2 * f * x + odd, 2 * f * (x + 1), 2) for x in range(e)]
            if blocks:
                of = tuple(SourceSlice(b + _GATE_UP, (e, 2 * f, d), (r,)) for r in rows)
            else:
                pick, shape = (range(odd, 2 * f, 2),), (e, d, 2 * f)
                of = tuple(SourceSlice(b + _GATE_UP, shape, pick, True, part=x) for x in range(e))
            out[f"{a}.{part}.weight"] = of
            out[f"{a}.{part}.bias"] = (
                SourceSlice(f"{b}{_GATE_UP}_bias", (e, 2 * f), tuple(rows), flat=True),
            )
        shape = (e, d, f) if blocks else (e, f, d)
        out[f"{a}.down.weight"] = tuple(
            SourceSlice(b + _DOWN, shape, transposed=not blocks, part=x) for x in range(e)
        )
        out[f"{a}.down.bias"] = (SourceSlice(f"{b}{_DOWN}_bias", (e, d), flat=True),)
    return out


# --- GGUF ---------------------------------------------------------------------------------------------------

# What llama.cpp's code knows of the family.
ALWAYS: Json = {
    "activation": "swiglu_oai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "attention_sinks": True,
    "router": Router(score="logits", biased=True),
}


def laid(s: ModelSpec) -> bool:
    """Return whether layers have windows as llama.cpp's code has them: every second, or all."""
    return s.window_layers in (None, tuple(range(0, s.n_layers, 2)))


_CHOSEN = 3  # `expert_gating_func`: the softmax of the chosen logits


def gguf_config(k: GGUFKeys) -> Json:
    """Return the config that a GGUF's metadata implies.

    It has no key for the clamp's numbers, nor for the rounding of YaRN's ends: the family has one of each.
    """
    config = like_llama(k, "GptOssForCausalLM", mixture=True)
    if k.integer(".expert_gating_func", default=_CHOSEN) not in (0, _CHOSEN):
        raise Unsupported(f"{k.name}: expert_gating_func is not {_CHOSEN}, which is not supported in gpt-oss")
    scaling: Json = config.get("rope_scaling") or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling = {**scaling, "truncate": False}
    width = k.integer(".expert_feed_forward_length", default=config["intermediate_size"], low=1)
    own = {"intermediate_size": width, "rope_scaling": scaling}
    return {**config, **experts(k, "num_local_experts"), **biased(k, "attention_bias"), **window(k), **own}


def in_gguf(piece: SourceSlice, layer: str, part: str) -> SourceSlice | None:
    """Return where a GGUF has a slice of sinks or experts; None: of something else.

    Gate and up are stacks of their own there, in rows.
    """
    if part == "self_attn.sinks":
        return replace(piece, tensor=f"blk.{layer}.attn_sinks.weight")
    found = re.fullmatch(rf"mlp\.experts\.({_GATE_UP}|{_DOWN})(_bias)?", part)
    if found is None:
        return None
    which = "ffn_down" if found[1] == _DOWN else "ffn_up" if piece.pick[0].start % 2 else "ffn_gate"
    name = f"blk.{layer}.{which}_exps.{'bias' if found[2] else 'weight'}"
    experts, *rest = piece.shape
    if found[1] == _GATE_UP:
        rest[-1] //= 2
    return SourceSlice(name, (experts, *reversed(rest)), part=piece.part, flat=piece.flat)
