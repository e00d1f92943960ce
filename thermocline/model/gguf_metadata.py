"""Read a GGUF's metadata with types and ranges, and translate shared keys to those of a Llama's config.

Every key of the architecture is read or refused by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import Json, quoted
from thermocline.files.gguf import GGUF

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Tokens that end an answer, whatever the keys say: llama.cpp knows them by name. The last three end a call.
_ENDS = frozenset(
    (
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>"),
        *("<|return|>", "<|eom_id|>", "<|call|>", "<|tool_response>"),
    )
)


class GGUFKeys:
    """The keys of one architecture, each read with its type and range. `finish` refuses the rest."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.name, self._seen = gguf, str(gguf.path), set[str]()
        self._instead: Json = {}
        self.architecture = self.text("general.architecture")

    def raw(self, key: str) -> Any:
        """Return the value of `key`, or None. A key that begins with a dot belongs to the architecture."""
        key = self.architecture + key if key.startswith(".") else key
        self._seen.add(key)
        return self._instead.get(key, self.gguf.metadata.get(key))

    def replace(self, key: str, value: Any) -> None:
        """Let readers find `value` under a key, where the file says more than they ask for."""
        self._instead[self.architecture + key] = value

    def _bad(self, key: str, why: str) -> BadFile:
        value = self.gguf.metadata.get(self.architecture + key if key.startswith(".") else key)
        shown = "nothing" if value is None else f"{type(value).__name__} {quoted(value)}"
        return BadFile(f"{self.name}: {key.removeprefix('.')} must be {why}, got {shown}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw(key)
        value = default if value is None else value
        if type(value) is not str:
            raise self._bad(key, "a text")
        return value

    def integer(self, key: str, default: int | None = None, low: int = 0, high: int = 1 << 31) -> int:
        value = self.raw(key)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise self._bad(key, f"an integer from {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self._bad(key, "true or false")
        return value

    def number(self, key: str, default: float | None = None, low: float = -math.inf) -> float:
        value = self.raw(key)
        value = default if value is None else value
        number = None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
        if number is None or not math.isfinite(number) or number < low:
            raise self._bad(key, "a number" if low == -math.inf else f"a number, at least {low:g}")
        # GGUF stores f32: 9.99999974e-06 was 1e-5 in the config.
        return float(str(np.float32(number))) if np.float32(number) == number else number

    def finish(self) -> None:
        for key in self.gguf.metadata:
            if key.startswith(f"{self.architecture}.") and key not in self._seen:
                raise Unsupported(
                    f"{self.name}: key {quoted(key)} is unknown, so it may change the answer; give the "
                    "model's Hugging Face directory"
                )


# --- metadata -> config.json --------------------------------------------------------------------------------


def common(k: GGUFKeys, *, mixture: bool = False, head_dim: int | None = None) -> Json:
    """Return the keys that nearly all architectures have. `mixture`: the family may have experts.

    `head_dim`: what rope turns of a head, where the family reads heads' sizes itself.
    """
    dim, heads = k.integer(".embedding_length", low=1), k.integer(".attention.head_count", low=1)
    own = head_dim is not None
    head_dim = head_dim or k.integer(".attention.key_length", default=dim // heads, low=1)
    if not own and k.integer(".attention.value_length", default=head_dim) != head_dim:
        raise Unsupported(f"{k.name}: attention.value_length is not key_length, which is not supported")
    if k.integer(".expert_count", default=0) and not mixture:
        raise Unsupported(f"{k.name}: mixtures of experts are not supported in {k.architecture}")
    k.raw(".expert_used_count"), k.raw(".vocab_size"), k.raw(".tensor_data_layout")
    return {
        "hidden_size": dim,
        "intermediate_size": k.integer(".feed_forward_length", low=1),
        "num_hidden_layers": k.integer(".block_count", low=1),
        "num_attention_heads": heads,
        "num_key_value_heads": k.integer(".attention.head_count_kv", default=heads, low=1),
        "head_dim": head_dim,
        "max_position_embeddings": k.integer(".context_length", low=1),
        "vocab_size": _rows_of(k, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in k.gguf.tensors,
        "bos_token_id": _token(k, "bos"),
        "eos_token_id": _ends(k),
    }


def like_llama(
    k: GGUFKeys,
    architecture: str,
    activation: str = "silu",
    *,
    partial: bool = False,
    mixture: bool = False,
    head_dim: int | None = None,
) -> Json:
    """Return the config of an architecture with an RMS norm and RoPE. `head_dim`: as `common`'s."""
    config = common(k, mixture=mixture, head_dim=head_dim)
    return {
        **config,
        "architectures": [architecture],
        "hidden_act": activation,
        "rms_norm_eps": k.number(".attention.layer_norm_rms_epsilon"),
        **rope(k, config["head_dim"], partial=partial),
    }


def window(k: GGUFKeys) -> Json:
    return {"sliding_window": k.integer(".attention.sliding_window", default=0) or None}


def near_layers(k: GGUFKeys, layers: int, period: int) -> Json:
    """Return which layers have the window: all but every `period`-th, if the file does not say."""
    pattern = k.raw(".attention.sliding_window_pattern")
    if isinstance(pattern, list | np.ndarray) and len(pattern) == layers:
        near = [bool(x) for x in pattern]
    else:
        period = k.integer(".attention.sliding_window_pattern", default=period, low=1)
        near = [(i + 1) % period > 0 for i in range(layers)]
    return {"layer_types": ["sliding_attention" if x else "full_attention" for x in near]}


def of_blocks(k: GGUFKeys, key: str, default: int | None = None) -> list[int]:
    """Return a number for each block, and leave the largest under the key."""
    value, n = k.raw(key), k.integer(".block_count", low=1, high=1024)
    if isinstance(value, list | np.ndarray):
        if len(value) != n or any(not 0 <= int(v) <= 1 << 31 for v in value):
            raise BadFile(f"{k.name}: {key.removeprefix('.')} must have a number for each of {n} blocks")
        found = [int(v) for v in value]
    else:
        found = [k.integer(key, default)] * n
    k.replace(key, max(found))
    return found


def biased(k: GGUFKeys, *kinds: str) -> Json:
    """Say which biases the model has, judging by its tensors: there is no key for it."""
    where = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    return {key: f"blk.0.{where[key]}.bias" in k.gguf.tensors for key in kinds or where}


def _rows_of(k: GGUFKeys, tensor: str) -> int:
    found = k.gguf.tensors.get(tensor)
    if found is None:
        raise BadFile(f"{k.name}: tensor {tensor} is missing: is this a vocabulary without a model?")
    return found.rows


def _token(k: GGUFKeys, which: str) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    return None if k.raw(key) is None else k.integer(key)


def _ends(k: GGUFKeys) -> list[int] | None:
    """Return the tokens that end an answer: those of the keys, then those known by name."""
    said = (_token(k, which) for which in ("eos", "eot", "eom"))
    tokens = k.raw("tokenizer.ggml.tokens")
    named = [i for i, t in enumerate(tokens) if t in _ENDS] if isinstance(tokens, list) else []
    return list(dict.fromkeys([*(i for i in said if i is not None), *named])) or None


def rope(k: GGUFKeys, head_dim: int, *, partial: bool = False) -> Json:
    """Return rope's theta and scaling. `partial`: the family may apply rope to a part of each head."""
    turned = k.integer(".rope.dimension_count", default=head_dim, low=2, high=head_dim)
    if turned != head_dim and not partial:
        raise Unsupported(f"{k.name}: rope.dimension_count is not the head's size, which is not supported")
    theta, kind = k.number(".rope.freq_base", default=10000.0), k.text(".rope.scaling.type", "none")
    out: Json = {"rope_theta": theta}
    if turned != head_dim:
        out["partial_rotary_factor"] = (turned + 0.25) / head_dim  # the config's reader rounds down
    found = _longrope(k, turned) if LONG_FACTORS in k.gguf.tensors else None
    if found is None and kind != "none":
        found = scaling(k)
    k.raw(".rope.scaling.original_context_length"), k.raw(".rope.scaling.finetuned")
    if ROPE_FACTORS in k.gguf.tensors:
        if found is not None:
            raise Unsupported(f"{k.name}: {ROPE_FACTORS} beside another rope scaling is not supported")
        found = _llama3_scaling(k, theta, head_dim)
    return out if found is None else {**out, "rope_scaling": found}


def scaling(k: GGUFKeys) -> Json:
    """Return the scaling of rope that keys say."""
    out: Json = {"rope_type": k.text(".rope.scaling.type"), "factor": k.number(".rope.scaling.factor")}
    if out["rope_type"] == "yarn":
        out["original_max_position_embeddings"] = k.integer(".rope.scaling.original_context_length")
        for key, theirs in _YARN.items():
            if k.raw(f".rope.scaling.yarn_{theirs}") is not None:
                out[key] = k.number(f".rope.scaling.yarn_{theirs}")
        if k.number(".rope.scaling.yarn_ext_factor", default=1.0) != 1.0:
            raise Unsupported(f"{k.name}: rope.scaling.yarn_ext_factor is not 1, which is not supported")
    return out


# Hugging Face's key -> the name that llama.cpp's converter gives it.
_YARN = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attn_factor"}


def _longrope(k: GGUFKeys, turned: int) -> Json:
    """Return longrope's scaling: factors for contexts up to the original one, and for longer ones."""
    if k.text(".rope.scaling.type", "none") not in ("none", "longrope"):
        raise Unsupported(f"{k.name}: {LONG_FACTORS} beside another rope scaling is not supported")
    original = k.integer(".rope.scaling.original_context_length", low=2)
    out: Json = {"rope_type": "longrope", "original_max_position_embeddings": original}
    if k.raw(".rope.scaling.attn_factor") is not None:
        out["attention_factor"] = k.number(".rope.scaling.attn_factor")
    for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
        out[key] = rope_factors(k, name, turned // 2).tolist()
    return out


def rope_factors(k: GGUFKeys, name: str, count: int) -> Any:
    """Return the divisors of frequencies that a tensor holds."""
    t = k.gguf.tensors.get(name)
    if t is None:
        raise BadFile(f"{k.name}: tensor {name} is missing")
    if t.type != "f32" or t.shape != (count,):
        raise BadFile(f"{k.name}: {name} is {t.type} {t.shape}, not f32 {(count,)}")
    factors = k.gguf.read_rows(name, 0, 1).view("<f4")[0].astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise BadFile(f"{k.name}: {name} holds a factor that is zero, negative or not a number")
    return factors


def _llama3_scaling(k: GGUFKeys, theta: float, head_dim: int) -> Json:
    """Find parameters of Llama-3's scaling that give a file's factors.

    GGUF keeps the factors, not the parameters that they were made from. Any parameters that give the same
    factors describe the same model. Llama 3's own are tried first.
    """
    factors = rope_factors(k, ROPE_FACTORS, head_dim // 2)
    turns = theta ** (-np.arange(head_dim // 2) * 2 / head_dim) / (2 * math.pi)  # 1 / wavelength
    top = float(factors.max())
    if top <= 1 + _SAME:
        candidates = [{"rope_type": "default"}] if factors.min() >= 1 - _SAME else []
    else:
        known = ((1.0, 4.0, original) for original in (8192, k.integer(".context_length")))
        candidates = [_llama3(top, *c) for c in (*known, _solved(turns, factors, top))]
    for scaling in candidates:
        if np.allclose(_llama3_factors(turns, scaling), factors, rtol=1e-4, atol=0):
            return scaling
    raise Unsupported(f"{k.name}: the factors in {ROPE_FACTORS} are not Llama-3's, which is not supported")


_SAME = 1e-6  # the difference within which two factors, stored as f32, are equal


def _llama3(factor: float, low: float, high: float, original: int) -> Json:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _solved(turns: Any, factors: Any, top: float) -> tuple[float, float, int]:
    """Solve for the (low, high, original) that give `factors`, if any do.

    A frequency of at most low/original turns per position is divided by `top`, and one of at least
    high/original by 1. Between them 1/factor is linear in turns. Several points between them determine the
    line. With one point or none, the ends can be chosen freely between the frequencies that exist.
    """
    slow, fast = turns[factors >= top * (1 - _SAME)], turns[factors <= 1 + _SAME]
    between = (factors < top * (1 - _SAME)) & (factors > 1 + _SAME)
    share, at = (1 / factors[between] - 1 / top) / (1 - 1 / top), turns[between]
    below, above = float(slow.max()), float(fast.min()) if len(fast) else math.inf
    if len(at) > 1:
        slope, offset = np.polyfit(at, share, 1)
        first, last = (float(-offset / slope), float((1 - offset) / slope)) if slope > 0 else (0.0, 0.0)
    elif len(at) == 1:
        least = (at[0] / share[0] - above) / (1 / share[0] - 1) if len(fast) else below
        first = (max(below, float(least)) + float(at[0])) / 2
        last = first + (float(at[0]) - first) / float(share[0])
    else:
        above = above if len(fast) else 8 * below
        first, last = (below ** (1 - x) * above**x for x in (1 / 3, 2 / 3))
    if not 0 < first < last:
        return 1.0, 4.0, 1  # the factors are not Llama-3's, which `_llama3_scaling` then finds
    original = min(1 << 31, math.ceil(1e5 / last))
    return first * original, last * original, original


def _llama3_factors(turns: Any, s: Json) -> Any:
    if s["rope_type"] == "default":
        return np.ones_like(turns)
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    smooth = (turns * s["original_max_position_embeddings"] - low) / (high - low)
    return 1 / (1 / s["factor"] + (1 - 1 / s["factor"]) * np.clip(smooth, 0, 1))
