"""Read the sampling that a model's makers recommend from its generation_config.json.

A key is read, is ignored for a reason, or has a value that switches its feature off. Others are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from thermocline.engine.sampler import SamplingParams
from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.files.bounded import Json, parse_json, quoted
from thermocline.pack.manifest import GENERATION_CONFIG
from thermocline.pack.stored_model import StoredModel

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
READ = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "max_new_tokens": "max_tokens",
}
_CODE = "describes the Python code that wrote the model, or its results"
_BEAMS = "only used in beam search, which num_beams switches on"
_SPEED = "changes how tokens are computed, not which"
IGNORED: dict[str, str] = {
    "eos_token_id": "read when the model is packed",
    "bos_token_id": "read when the model is packed, from config.json",
    "do_sample": "chooses a function of transformers; here a temperature of 0 is greedy (as vLLM has it)",
    "max_length": "of prompt and answer together: the context's length, which --ctx-size sets",
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), "nothing is padded here"),
    **dict.fromkeys(("transformers_version", "_from_model_config", "trust_remote_code"), _CODE),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "output_logits"), _CODE),
    **dict.fromkeys(("return_dict_in_generate", "return_legacy_cache"), _CODE),
    **dict.fromkeys(("early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups"), _BEAMS),
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config", "max_cache_len"), _SPEED),
    **dict.fromkeys(("compile_config", "disable_compile", "prefill_chunk_size", "low_memory"), _SPEED),
    **dict.fromkeys(("use_mtp", "is_assistant", "num_assistant_tokens", "speculation_type"), _SPEED),
    **dict.fromkeys(("num_assistant_tokens_schedule", "assistant_confidence_threshold"), _SPEED),
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), _SPEED),
    **dict.fromkeys(("assistant_early_exit", "assistant_lookbehind", "target_lookbehind"), _SPEED),
    **dict.fromkeys(("assistant_ensemble_weight", "continuous_batching_config"), _SPEED),
}
OFF: Json = {  # features that this build does not have, and the value that switches each off
    **dict.fromkeys(("num_beams", "num_return_sequences", "typical_p", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("guidance_scale", "top_h"), 1),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0),
    **dict.fromkeys(("renormalize_logits", "remove_invalid_values", "token_healing"), False),
}


def recommended(model: StoredModel) -> Json:
    """Return a model's recommended sampling, by field of `SamplingParams`; {} if it recommends nothing.

    Raises BadFile or Unsupported.
    """
    files = model.small_files
    if not files.has(GENERATION_CONFIG):
        return {}
    name = files.label(GENERATION_CONFIG)
    return parsed(parse_json(files.read(GENERATION_CONFIG, MAX_BYTES), name), name)


def completed(said: Mapping[str, object], recommended: Mapping[str, object]) -> SamplingParams:
    """Return the parameters that somebody set, with the recommended ones for the rest, which are logged."""
    theirs = {name: value for name, value in recommended.items() if name not in said}
    if theirs:
        values = ", ".join(f"{name} {value}" for name, value in theirs.items())
        log.info(f"as the model's generation_config.json recommends: {values} (--generation-config off: not)")
    merged: Json = {"max_tokens": None, **theirs, **said}
    return SamplingParams(**merged)


def parsed(config: Json, name: str) -> Json:
    """Return the recommended sampling of a parsed generation_config.json. `name` is the file, for messages.

    transformers writes null for a key that is not set. Raises BadFile or Unsupported.
    """
    given = {key: value for key, value in config.items() if value is not None}
    for key, value in given.items():
        off = key in OFF and value == OFF[key] and type(value) in (type(OFF[key]), float)
        if key not in READ and key not in IGNORED and not off:
            raise Unsupported(
                f"{name}: {quoted(key)} is {quoted(value)}, which this build does not support; "
                "--generation-config off ignores that file"
            )
    found = {ours: given[key] for key, ours in READ.items() if _checked(given, key, name)}
    if found.get("repeat_penalty", 1) != 1:
        found["repeat_last_n"] = -1  # transformers looks at the whole text
    return found


def _checked(said: Json, key: str, name: str) -> bool:
    """Return whether a key is there; BadFile where its value is no such parameter."""
    if key not in said:
        return False
    try:
        SamplingParams(**{READ[key]: said[key]})
    except UsageError as e:
        why = str(e).replace(READ[key], key, 1)
        raise BadFile(f"{name}: {why}; --generation-config off ignores that file") from None
    return True
