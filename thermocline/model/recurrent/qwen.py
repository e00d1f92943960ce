"""Qwen3-Next, 3.5 and 3.6: gated DeltaNet in three layers of four, and attention behind a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from thermocline.files.bounded import Json
from thermocline.model.hf_config import ConfigKeys, read_spec
from thermocline.model.recurrent.layers import Slices, convolution, kinds, whole, with_mixers
from thermocline.model.spec import ModelSpec, Recurrent, Router
from thermocline.model.tensor_map import Names, SourceSlice, TensorMap, tensors

Read = tuple[ModelSpec, TensorMap]
_KINDS = {"linear_attention": "deltanet", "full_attention": "attention"}
_DEFAULTS: Json = {
    "bos_token_id": None,
    "eos_token_id": None,
    "hidden_act": "silu",
    "head_dim": 256,
    "partial_rotary_factor": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NAMES = Names(norm_plus=1.0)
_MIXTURE = replace(
    _NAMES,
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    router="mlp.gate",
    shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"),
    shared_router="mlp.shared_expert_gate",
)


def qwen3_5(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen3.5 and 3.6, dense."""
    spec = _spec(keys, stop, "qwen3.5")
    return spec, _with_layers(tensors(spec, _NAMES), spec, keys, _apart)


def qwen3_5_moe(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen3.5 and 3.6's mixtures: their experts are two stacks, or tensors of their own."""
    spec = _spec(keys, stop, "qwen3.5-moe", **_experts(keys))
    made = _with_layers(tensors(spec, _MIXTURE), spec, keys, _apart)
    stacks = _stacks(spec)
    own = {name: made.tensors[name] for name in stacks}
    return spec, replace(made, tensors=made.tensors | stacks, otherwise=own)


def qwen3_next(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen3-Next: what a group of heads reads is fused, group by group."""
    keys.require({"decoder_sparse_step": 1, "norm_topk_prob": True})
    keys.with_defaults({"intermediate_size": None}).raw("intermediate_size")  # of layers without experts
    spec = _spec(keys, stop, "qwen3-next", **_experts(keys))
    return spec, _with_layers(tensors(spec, _MIXTURE), spec, keys, _fused)


def _experts(keys: ConfigKeys) -> Json:
    keys.same("num_experts", "num_local_experts")
    return {
        "n_experts": keys.size("num_experts", "n_experts"),
        "n_experts_active": keys.size("num_experts_per_tok", "n_experts_active"),
        "ffn_dim": keys.size("moe_intermediate_size", "ffn_dim"),
        "shared_dim": keys.size("shared_expert_intermediate_size", "shared_dim"),
        "shared_gate": True,
        "router": Router(),
    }


def _spec(keys: ConfigKeys, stop: Any, architecture: str, **more: Any) -> ModelSpec:
    keys.with_defaults(_DEFAULTS)
    keys.require({"attn_output_gate": True, "attention_bias": False})
    keys.with_defaults({"mlp_only_layers": None, "output_gate_type": None})
    if keys.indices("mlp_only_layers"):
        raise keys.unsupported("mlp_only_layers", "is not supported")
    if keys.raw("output_gate_type") not in (None, "swish", "silu"):  # of the gated norm behind a DeltaNet
        raise keys.unsupported("output_gate_type", "is not supported")
    for key in ("mamba_ssm_dtype", "mtp_use_dedicated_embeddings"):
        keys.with_defaults({key: None}).raw(key)
    _without_grids(keys)
    n, every = keys.size("num_hidden_layers", "n_layers"), keys.integer("full_attention_interval", 1, 1024)
    usual = ["deltanet" if (i + 1) % every else "attention" for i in range(n)]
    sizes = Recurrent(
        conv=keys.integer("linear_conv_kernel_dim", 2, 16),
        heads=keys.integer("linear_num_value_heads", 1, 1024),
        head_dim=keys.integer("linear_value_head_dim", 1, 1024),
        groups=keys.integer("linear_num_key_heads", 1, 1024),
        state=keys.integer("linear_key_head_dim", 1, 1024),
    )
    mixers = kinds(keys, "layer_types", _KINDS, usual)
    if len(mixers) != n:
        raise keys.bad("layer_types", f"must name {n} layers")
    own = {"qk_norm": True, "attention_gate": "attention" in mixers, **with_mixers(mixers, sizes)}
    return read_spec(keys, stop, architecture, partial=0.25, **own, **more)


def _without_grids(keys: ConfigKeys) -> None:
    """Drop rope's sections for images: the positions of text are the same in all."""
    for key in ("rope_parameters", "rope_scaling"):
        group = keys.with_defaults({key: None}).raw(key)
        if isinstance(group, dict):
            kept = {k: v for k, v in group.items() if k not in ("mrope_section", "mrope_interleaved")}
            keys.replace(key, kept)


def _with_layers(
    made: TensorMap, spec: ModelSpec, keys: ConfigKeys, deltanet: Callable[[ModelSpec, str, str], Slices]
) -> TensorMap:
    """Return the map with all layers' mixers, and with q and its gate, whose rows lie head by head.

    A layer that guesses further tokens is left out; some files count it as one behind the last.
    """
    h, out = spec.head_dim, made.tensors
    rows = 2 * spec.n_heads * h
    for i in range(spec.n_layers):
        a, b = f"layers.{i}", f"model.layers.{i}"
        if spec.mixer(i) == "deltanet":
            out |= deltanet(spec, f"{a}.mixer", f"{b}.linear_attn")
            continue
        q, gate = (
            SourceSlice(f"{b}.self_attn.q_proj.weight", (rows, spec.dim), _runs(first, h, 2 * h, rows))
            for first in (0, h)
        )
        out[f"{a}.qkv.weight"] = (q, *out[f"{a}.qkv.weight"][1:])
        out[f"{a}.attn_gate.weight"] = (gate,)
    more = keys.with_defaults({"mtp_num_hidden_layers": None}).integer_or_none("mtp_num_hidden_layers", 0, 16)
    behind = "|".join(str(spec.n_layers + i) for i in range(more or 0))
    skipped = (r"(model\.)?mtp\..*", *((rf"model\.layers\.({behind})\..*",) if behind else ()))
    return replace(made, tensors=out, skipped=skipped)


def _runs(first: int, length: int, step: int, end: int) -> tuple[range, ...]:
    return tuple(range(at, at + length) for at in range(first, end, max(1, step)))  # sizes are checked later


def _beside(spec: ModelSpec, m: str, b: str) -> Slices:
    """Return the tensors that DeltaNets have in either spelling."""
    r = spec.recurrent
    assert r is not None
    return {
        f"{m}.out.weight": whole(f"{b}.out_proj.weight", spec.dim, r.inner),
        f"{m}.conv.weight": convolution(f"{b}.conv1d.weight", r.channels, r.conv),
        f"{m}.decay": (SourceSlice(f"{b}.A_log", (r.heads,), decays=True),),
        f"{m}.dt_bias": whole(f"{b}.dt_bias", r.heads),
        f"{m}.norm.weight": whole(f"{b}.norm.weight", r.head_dim),
    }


def _apart(spec: ModelSpec, m: str, b: str) -> Slices:
    r, d = spec.recurrent, spec.dim
    assert r is not None
    return {
        f"{m}.qkv.weight": whole(f"{b}.in_proj_qkv.weight", r.channels, d),
        f"{m}.z.weight": whole(f"{b}.in_proj_z.weight", r.inner, d),
        f"{m}.beta.weight": whole(f"{b}.in_proj_b.weight", r.heads, d),
        f"{m}.alpha.weight": whole(f"{b}.in_proj_a.weight", r.heads, d),
        **_beside(spec, m, b),
    }


def _fused(spec: ModelSpec, m: str, b: str) -> Slices:
    return fused(spec, m, f"{b}.in_proj_qkvz.weight", f"{b}.in_proj_ba.weight") | _beside(spec, m, b)


def fused(spec: ModelSpec, m: str, qkvz: str, ba: str) -> Slices:
    """Return what a DeltaNet reads with, where each group's q, k, v and z are one after the other.

    So are each group's b and a in another tensor.
    """
    r, d = spec.recurrent, spec.dim
    assert r is not None
    each, values = r.heads // r.groups, r.inner // r.groups
    group = 2 * (r.state + values)
    rows = group * r.groups

    def taken(*parts: tuple[int, int]) -> tuple[SourceSlice, ...]:
        pick = tuple(run for first, length in parts for run in _runs(first, length, group, rows))
        return (SourceSlice(qkvz, (rows, d), pick),)

    def of_ba(first: int) -> tuple[SourceSlice, ...]:
        pick = _runs(first, each, 2 * each, 2 * r.heads)
        return (SourceSlice(ba, (2 * r.heads, d), pick),)

    return {
        f"{m}.qkv.weight": taken((0, r.state), (r.state, r.state), (2 * r.state, values)),
        f"{m}.z.weight": taken((2 * r.state + values, values)),
        f"{m}.beta.weight": of_ba(0),
        f"{m}.alpha.weight": of_ba(each),
    }


def _stacks(spec: ModelSpec) -> Slices:
    """Return all layers' experts as two stacks: each expert's gates and ups, and its downs."""
    n, f, d, out = spec.n_experts, spec.ffn_dim, spec.dim, Slices()
    for i in range(spec.n_layers):
        a, b = f"layers.{i}", f"model.layers.{i}.mlp.experts"
        for half, part in enumerate(("gate", "up")):
            firsts = ((2 * e + half) * f for e in range(n))
            out[f"{a}.{part}.weight"] = tuple(
                SourceSlice(f"{b}.gate_up_proj", (n, 2 * f, d), (range(at, at + f),), part=e)
                for e, at in enumerate(firsts)
            )
        out[f"{a}.down.weight"] = tuple(SourceSlice(f"{b}.down_proj", (n, d, f), part=e) for e in range(n))
    return out
