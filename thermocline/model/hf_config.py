"""Read a config.json's keys: each has a type and range, is ignored for a reason, or must have one value.

Keys that several families share are read here too: rope and its scalings, windows, end tokens, sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import Json, quoted
from thermocline.model.spec import ACTIVATIONS, LIMITS, ModelSpec, RopeScaling

_TRAINING = "only used in training"
_SAMPLING = "a sampling default; generation_config.json and the command line decide"
_CODE = "describes the Python code that wrote the model"
IGNORED: dict[str, str] = {
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "embd_pdrop"), _TRAINING),
    **dict.fromkeys(("attention_dropout", "dropout", "activation_dropout", "layerdrop"), _TRAINING),
    **dict.fromkeys(("residual_dropout", "embedding_dropout"), _TRAINING),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), _TRAINING),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"), _TRAINING),
    **dict.fromkeys(
        ("initializer_range", "init_method", "init_std", "pretraining_tp", "use_cache"), _TRAINING
    ),
    **dict.fromkeys(("_name_or_path", "transformers_version", "auto_map", "custom_pipelines"), _CODE),
    **dict.fromkeys(("return_dict", "output_attentions", "output_hidden_states", "output_scores"), _CODE),
    **dict.fromkeys(
        ("return_dict_in_generate", "chunk_size_feed_forward", "torchscript", "tokenizer_class"), _CODE
    ),
    **dict.fromkeys(
        ("_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "unsloth_version"),
        _CODE,
    ),
    **dict.fromkeys(("cache_implementation", "transformers.js_config"), _CODE),
    **dict.fromkeys(("unsloth_fixed", "use_bfloat16", "tf_legacy_loss", "prefix", "finetuning_task"), _CODE),
    **dict.fromkeys(("torch_dtype", "dtype"), "each tensor says its own dtype"),
    **dict.fromkeys(("pad_token_id", "sep_token_id", "decoder_start_token_id"), "nothing is padded here"),
    **dict.fromkeys(
        ("sentence_transformers", "sbert_ce_default_activation_function"),
        "how a score is shown; it is a probability here, in the same order",
    ),
    **dict.fromkeys(("is_matryoshka", "matryoshka_dimensions"), "`pooling.py` reads them"),
    **dict.fromkeys(("id2label", "label2id", "problem_type", "task_specific_params"), "for classifiers"),
    **dict.fromkeys(("do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams"), _SAMPLING),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty", "early_stopping", "max_length"), _SAMPLING),
    **dict.fromkeys(
        ("min_length", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"), _SAMPLING
    ),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"), _SAMPLING),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"), _SAMPLING),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty"), _SAMPLING),
    **dict.fromkeys(("remove_invalid_values",), _SAMPLING),
}
# Keys that change the arithmetic, with the only values this build computes.
REQUIRED_VALUE: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "alibi": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "is_decoder": (False, True),  # encoders set it to choose a causal mask; these families always have one
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "mlp_bias": (False,),
    "is_llama_config": (True,),  # of the trainer that wrote SmolLM2
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
}
_DEFAULT_ROPE_THETA = 10000.0
_ACTIVATION_NAMES = {
    **{
        "silu": "silu",
        "swish": "silu",
        "relu": "relu",
        "relu2": "relu2",
        "fatrelu": "fatrelu",
        "gelu": "gelu",
    },
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"),
}


class ConfigKeys:
    """A config's keys, each read with its type and range. `finish` refuses keys that were not read."""

    def __init__(self, config: Json, name: str, defaults: Json | None = None) -> None:
        self._config, self._name, self._seen = config, name, set[str]()
        self.default_theta = _DEFAULT_ROPE_THETA
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Json) -> ConfigKeys:
        self._defaults = {**self._defaults, **defaults}
        return self

    @property
    def name(self) -> str:
        return self._name

    def replace(self, key: str, value: Any) -> None:
        self._config = {**self._config, key: value}

    def bad(self, key: str, why: str) -> BadFile:
        return BadFile(f"{self._name}: {key} {why}, got {quoted(self._config.get(key))}")

    def raw(self, key: str) -> Any:
        self._seen.add(key)
        if key in self._config:
            return self._config[key]
        if key not in self._defaults:
            raise BadFile(f"{self._name}: {key} is missing")
        return self._defaults[key]

    def integer(self, key: str, low: int = 1, high: int = 1 << 31) -> int:
        value = self.raw(key)
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, f"must be an integer from {low} to {high}")
        return value

    def size(self, key: str, field: str) -> int:
        """Return a size within the limits of the spec's `field`, before tables are built from it."""
        return self.integer(key, *LIMITS[field])

    def integer_or_none(self, key: str, low: int = 1, high: int = 1 << 31) -> int | None:
        return None if self.raw(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float) -> float:
        value = self.raw(key)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.bad(key, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, key: str, low: float, high: float) -> tuple[float, ...]:
        value = self.raw(key)
        if not isinstance(value, list) or any(
            type(v) not in (int, float) or not low <= v <= high for v in value
        ):
            raise self.bad(key, f"must be a list of numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def number_or_none(self, key: str, low: float, high: float) -> float | None:
        return None if self.raw(key) is None else self.number(key, low, high)

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if type(value) is not bool:
            raise self.bad(key, "must be true or false")
        return value

    def indices(self, key: str) -> tuple[int, ...]:
        """Return a list of layers; null is none."""
        value = self.raw(key)
        if value is not None and (not isinstance(value, list) or any(type(v) is not int for v in value)):
            raise self.bad(key, "must be a list of layers")
        return tuple(value or ())

    def same(self, key: str, other: str) -> None:
        """Take `other` for `key` where that is missing. Both must agree."""
        self.with_defaults({other: None})
        value = self.raw(other)
        if value is not None and self._config.get(key, value) != value:
            raise self.bad(other, f"differs from {key}: which is meant?")
        if value is not None:
            self.replace(key, value)

    def require(self, only: Json) -> None:
        """Refuse keys that have another value than these, which is what their absence means."""
        for key, value in only.items():
            if self.with_defaults({key: value}).raw(key) != value:
                raise self.unsupported(key, "is not supported")

    def group(self, key: str) -> ConfigKeys | None:
        """Return an object inside the config, or None if it is null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, "must be an object or null")
        return ConfigKeys(value, f"{self._name}: {key}")

    def activation(self, key: str, allowed: Collection[str] = ACTIVATIONS) -> str:
        value = self.raw(key)
        known = [k for k, v in _ACTIVATION_NAMES.items() if v in allowed]
        if not isinstance(value, str) or value not in known:
            raise Unsupported(
                f"{self._name}: {key} {quoted(value)} is not supported; known: {', '.join(known)}"
            )
        return _ACTIVATION_NAMES[value]

    def unsupported(self, key: str, why: str) -> Unsupported:
        return Unsupported(f"{self._name}: {key} {quoted(self._config.get(key))} {why}")

    def stop_ids(self, generation: Json | None) -> Any:
        """Return generation_config.json's eos_token_id if it has one: it is newer than config.json's."""
        return None if generation is None else generation.get("eos_token_id")

    def finish(self) -> None:
        for key in self._config.keys() - self._seen - IGNORED.keys():
            value = self._config[key]
            if key not in REQUIRED_VALUE:
                raise Unsupported(
                    f"{self._name}: key {quoted(key)} is unknown, so it may change the answer; remove it if "
                    "you are sure that it does not"
                )
            if not any(value == v and type(value) in (type(v), float) for v in REQUIRED_VALUE[key]):
                raise self.unsupported(key, "is not supported")


# --- rope ---------------------------------------------------------------------------------------------------


def rope(keys: ConfigKeys, *, partial: float | None = None) -> Json:
    """Return `ModelSpec`'s rope fields.

    They come from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling`. `partial` is
    the share of each head that rope turns if the config does not say; None: the family always turns all of
    it.
    """
    theta = None if keys.raw("rope_theta") is None else keys.number("rope_theta", 1.0, 1e12)
    scaling, parameters = keys.group("rope_scaling"), keys.group("rope_parameters")
    if scaling is not None and parameters is not None:
        raise keys.bad("rope_scaling", "is set beside rope_parameters: which is meant?")
    part = keys.raw("partial_rotary_factor") if partial is not None else None
    inner, kind, group = None, None, parameters or scaling
    if group is not None:
        inner, kind, part = _rope_group(keys, group, theta, part)
    if part is not None and (type(part) not in (int, float) or not 0 < part <= 1):
        raise keys.bad("partial_rotary_factor", "must be a number above 0, at most 1")
    if part not in (None, 1) and partial is None:
        raise Unsupported(f"{keys.name}: partial_rotary_factor {quoted(part)} is not supported here")
    share = part if part is not None else partial
    return {"rope_theta": inner or theta or keys.default_theta, "rope_scaling": kind, "share": share or 1}


def _rope_group(keys: ConfigKeys, group: ConfigKeys, theta: float | None, part: Any) -> tuple[Any, Any, Any]:
    group.with_defaults(dict.fromkeys(("rope_theta", "type", "rope_type", "partial_rotary_factor")))
    inner = theta
    if group.raw("rope_theta") is not None:
        inner = group.number("rope_theta", 1.0, 1e12)
        if theta not in (None, inner):
            raise keys.bad("rope_theta", f"differs from the {inner:g} inside rope_parameters")
    kind, old_kind = group.raw("rope_type"), group.raw("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        raise group.bad("type", f"differs from rope_type {quoted(kind)}")
    inner_part = group.raw("partial_rotary_factor")
    result = _scaling(keys, group, kind or old_kind)
    group.finish()
    return inner, result, part if inner_part is None else inner_part


def _scaling(keys: ConfigKeys, group: ConfigKeys, kind: Any) -> RopeScaling | None:
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling(kind="linear", factor=group.number("factor", 1e-3, 1e6))
        case "dynamic":  # changes nothing up to max_position_embeddings, where this engine ends
            group.number("factor", 1e-3, 1e6)
            return None
        case "llama3":
            return _llama3(keys, group)
        case "yarn":
            return _yarn(keys, group)
        case "longrope" | "su":
            return _longrope(keys, group)
    raise group.unsupported(
        "rope_type",
        f"is not supported (type {quoted(kind)}); known: default, linear, dynamic, yarn, llama3, longrope",
    )


def _original_context(keys: ConfigKeys, group: ConfigKeys, low: int = 1) -> int:
    """Return the context length before scaling: the group's, else the config's. Both must agree."""
    key = "original_max_position_embeddings"
    own, outer = (k.with_defaults({key: None}).raw(key) for k in (group, keys))
    if own is None and outer is None:
        raise BadFile(f"{group.name}: {key} is missing")
    if own is not None and outer not in (None, own):
        raise group.bad(key, f"differs from the {quoted(outer)} outside it: which is meant?")
    return (keys if own is None else group).integer(key, low)


def _llama3(keys: ConfigKeys, group: ConfigKeys) -> RopeScaling:
    low, high = group.number("low_freq_factor", 1e-3, 1e6), group.number("high_freq_factor", 1e-3, 1e6)
    if low >= high:
        raise group.bad("low_freq_factor", f"must be below high_freq_factor ({high:g})")
    original = _original_context(keys, group)
    return RopeScaling(group.number("factor", 1e-3, 1e6), low, high, original)


def _yarn(keys: ConfigKeys, group: ConfigKeys) -> RopeScaling:
    """Read YaRN (arXiv 2309.00071). Without a config key, cos and sin are scaled by 0.1 ln(factor) + 1."""
    optional = ("attention_factor", "mscale", "mscale_all_dim")
    group.with_defaults({"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **dict.fromkeys(optional)})
    factor = group.number("factor", 1.0, 1e6)
    given, mscale, all_dim = (None if group.raw(k) is None else group.number(k, 1e-3, 1e6) for k in optional)
    growth = 0.1 * math.log(factor)
    attention = growth + 1 if not (mscale and all_dim) else (growth * mscale + 1) / (growth * all_dim + 1)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=_original_context(keys, group),
        attention_factor=attention if given is None else given,
        beta_fast=group.number("beta_fast", 1e-3, 1e6),
        beta_slow=group.number("beta_slow", 1e-3, 1e6),
        truncate=group.flag("truncate"),
    )


def _longrope(keys: ConfigKeys, group: ConfigKeys) -> RopeScaling:
    """Read LongRoPE (arXiv 2402.13753): factors for contexts up to the original one, and for longer ones."""
    scales = ("attention_factor", "short_mscale", "long_mscale")
    group.with_defaults(dict.fromkeys((*scales, "factor")))
    original = _original_context(keys, group, 2)
    factor = keys.size("max_position_embeddings", "max_context") / original
    if group.raw("factor") is not None:
        factor = group.number("factor", 1e-3, 1e6)
    attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = {group.number(key, 1e-3, 1e6) for key in scales if group.raw(key) is not None}
    if len(given) > 1:
        raise group.unsupported("long_mscale", f"is not supported: {', '.join(scales)} differ")
    return RopeScaling(
        kind="longrope",
        original_context=original,
        attention_factor=min(given, default=attention),
        short_factors=group.numbers("short_factor", 1e-3, 1e6),
        long_factors=group.numbers("long_factor", 1e-3, 1e6),
    )


# --- other keys that families share -------------------------------------------------------------------------


def windows(keys: ConfigKeys, n_layers: int, default: Sequence[int]) -> tuple[int, ...] | None:
    """Return the layers with the sliding window, from `layer_types` or else `default`. None means all."""
    types = keys.raw("layer_types")
    layers = tuple(default)
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != n_layers or any(t not in known for t in types):
            raise keys.bad("layer_types", f"must be {n_layers} of {', '.join(known)}")
        layers = tuple(i for i, t in enumerate(types) if t == known[1])
    return None if len(layers) == n_layers else layers


def bos(keys: ConfigKeys) -> int | None:
    return keys.integer_or_none("bos_token_id", low=0)


def eos(keys: ConfigKeys, stop: Any) -> tuple[int, ...]:
    """Return the end tokens: an id, a list of ids or null. `stop` (generation_config.json's) has priority."""
    own = keys.raw("eos_token_id")
    ids: list[int] = []
    for value in (own, stop):
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if len(ids) > 256 or any(type(i) is not int or i < 0 for i in ids):
                raise keys.bad(
                    "eos_token_id", f"(or generation_config.json's, {quoted(stop)}) must be token ids"
                )
    return tuple(dict.fromkeys(ids))


# --- the spec ---------------------------------------------------------------------------------------------

# All but fatrelu, which has a threshold: these configs have no key for it.
PLAIN_ACTIVATIONS = tuple(a for a in ACTIVATIONS if a != "fatrelu")


def read_spec(
    keys: ConfigKeys, stop: Any, architecture: str, *, partial: float | None = None, **more: Any
) -> ModelSpec:
    """Read a spec from the keys that most configs share. `more` holds fields that a family reads itself."""
    dim, n_heads = keys.size("hidden_size", "dim"), keys.size("num_attention_heads", "n_heads")
    head_dim = more.pop("head_dim", None) or keys.integer_or_none("head_dim")
    if head_dim is None and dim % n_heads:
        raise keys.bad(
            "hidden_size", f"is not a multiple of num_attention_heads ({n_heads}), and no head_dim"
        )
    head_dim = head_dim or dim // n_heads
    shared: dict[str, Callable[[], Any]] = {
        "ffn_dim": lambda: keys.size("intermediate_size", "ffn_dim"),
        "n_kv_heads": lambda: keys.integer_or_none("num_key_value_heads") or n_heads,
        "norm": lambda: "rms",
        "norm_eps": lambda: keys.number("rms_norm_eps", 0.0, 1.0),
        "activation": lambda: keys.activation("hidden_act", PLAIN_ACTIVATIONS),
        "tied_head": lambda: keys.flag("tie_word_embeddings"),
    }
    shared = {k: f for k, f in shared.items() if k not in more}
    if more.get("position") != "learned" and "rope_theta" not in more:
        turned = rope(keys, partial=partial)
        rotary = int(head_dim * turned.pop("share"))
        more |= turned | {"rotary_dim": None if rotary == head_dim else rotary}
    return ModelSpec(
        architecture=architecture,
        dim=dim,
        n_layers=keys.size("num_hidden_layers", "n_layers"),
        n_heads=n_heads,
        head_dim=head_dim,
        vocab_size=keys.size("vocab_size", "vocab_size"),
        max_context=keys.size("max_position_embeddings", "max_context"),
        bos_id=bos(keys),
        eos_ids=eos(keys, stop),
        **{k: f() for k, f in shared.items()},
        **more,
    )


def attention_biases(keys: ConfigKeys, *more: str) -> tuple[str, ...]:
    both = ("qkv", "attn_out") if keys.flag("attention_bias") else ()
    return (*both, *more)
