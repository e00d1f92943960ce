"""What any `ModelSpec` must satisfy, wherever it came from: numbers to index and allocate with."""

from __future__ import annotations

from thermocline.errors import BadFile
from thermocline.safetensors import quoted
from thermocline.spec import (
    ACTIVATIONS,
    NORM_ORDERS,
    NORMS,
    POSITIONS,
    ROPE_SCALINGS,
    UP_ACTIVATIONS,
    ModelSpec,
    RopeScaling,
)

# The largest model we would believe. Products of any four fit 2^63.
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
}


def check_spec(spec: ModelSpec, name: str) -> None:
    """BadFile, naming the field, unless every number is one the engine can index and allocate with.

    Field types are the caller's business (`pack.py` checks them); ranges and cross-checks are here.
    """
    for field, (low, high) in LIMITS.items():
        value = getattr(spec, field)
        if not low <= value <= high:
            raise BadFile(f"{name}: {field} is {value}, not within {low}..{high}")
    for field, known in (
        ("norm", NORMS),
        ("position", POSITIONS),
        ("activation", ACTIVATIONS),
        ("norm_order", NORM_ORDERS),
    ):
        if getattr(spec, field) not in known:
            raise BadFile(f"{name}: {field} {quoted(getattr(spec, field))} is not one of {', '.join(known)}")
    for problem, wrong in [*_problems(spec), *_option_problems(spec)]:
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
        (f"head_dim {s.head_dim} is odd, and rope turns pairs", s.position == "rope" and s.head_dim % 2 == 1),
        (f"norm_eps {s.norm_eps} is not within 0..1", not 0.0 <= s.norm_eps <= 1.0),
        (
            f"activation_threshold {s.activation_threshold} out of range",
            not 0.0 <= s.activation_threshold <= 1e3,
        ),
        (
            "activation_threshold is for fatrelu only",
            s.activation != "fatrelu" and s.activation_threshold != 0.0,
        ),
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
        ("rotary_dim needs rope", rotary is not None and s.position != "rope"),
        (
            "window_layers are not layers in order",
            list(layers) != sorted(set(layers)) or any(not 0 <= i < s.n_layers for i in layers),
        ),
        ("window_layers needs a sliding_window", s.window_layers is not None and s.sliding_window is None),
        ("local_rope_theta is not within 1..1e12", thetas),
        ("local_rope_theta needs rope", s.local_rope_theta is not None and s.position != "rope"),
        ("parallel halves need norms before them", s.parallel and s.norm_order != "pre"),
        ("sub_norms needs an RMS norm", s.sub_norms and s.norm != "rms"),
        ("longrope's factors do not fit", s.rope_scaling is not None and not _factors_fit(s, s.rope_scaling)),
    ]


def _within(value: float | None, low: float, high: float) -> bool:
    return value is None or low <= value <= high


def _factors_fit(s: ModelSpec, r: RopeScaling) -> bool:
    n = (s.rotary_dim or s.head_dim) // 2 if r.kind == "longrope" else 0
    both = (*r.short_factors, *r.long_factors)
    return len(r.short_factors) == len(r.long_factors) == n and all(1e-3 <= f <= 1e6 for f in both)


def _scaling_is_sane(r: RopeScaling) -> bool:
    factors = (r.factor, r.low_freq_factor, r.high_freq_factor, r.attention_factor, r.beta_fast, r.beta_slow)
    return (
        r.kind in ROPE_SCALINGS
        and all(1e-3 <= f <= 1e6 for f in factors)
        and r.low_freq_factor < r.high_freq_factor
        and 1 <= r.original_context <= 1 << 31
    )
