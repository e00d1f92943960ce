"""Model families: read a Hugging Face config.json into a `ModelSpec` and a `TensorMap`.

Every key of a config is read here, or `hf_config.py` ignores it or requires one value. Any other key is
refused by name. To add a family, write one reader function and add its line to `FAMILIES`.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.files.bounded import Json, parse_json, quoted, read_small
from thermocline.model.dense import families as dense
from thermocline.model.dense import layer_norms
from thermocline.model.embedding import encoders, pooling
from thermocline.model.gemma import families as gemma
from thermocline.model.hf_config import PLAIN_ACTIVATIONS, ConfigKeys, attention_biases, read_spec, windows
from thermocline.model.latent import families as latent
from thermocline.model.mixtures import families as mixtures
from thermocline.model.mixtures import gpt_oss, llama4
from thermocline.model.recurrent import lfm2, mamba, qwen
from thermocline.model.relu import smallthinker
from thermocline.model.spec import ModelSpec, check_spec
from thermocline.model.tensor_map import Names, SourceSlice, TensorMap, grouped_rows, tensors

QUANTISED = "hf_quant_config.json"  # of NVIDIA's ModelOpt, which at first said nothing in config.json
MAX_CONFIG_BYTES = 512 << 10  # parsing takes at most 33 times the size: less than 4 x metadata + 16 MiB
Read = tuple[ModelSpec, TensorMap]
# transformers' defaults for keys that a config may leave out. Any other missing key is an error.
_DEFAULTS: Json = {
    "num_key_value_heads": None,  # n_heads
    "head_dim": None,  # dim / n_heads
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_types": None,
    "sliding_window": None,
}


# Published models whose code has dReLU, whatever family and activation their configs name.
_UNSURE = re.compile(r"sparse-?qwen", re.IGNORECASE)


def read_config(path: Path, activation: str | None = None) -> Read:
    """Read the model in Hugging Face directory `path` from its config.json and generation_config.json.

    Files of sentence-transformers beside it say whether it embeds. Raises BadFile, IOFailure, Unsupported,
    UsageError; see `parse_config`.
    """
    config_path, generation_path = path / "config.json", path / "generation_config.json"
    config, generation = read_config_json(config_path), None
    _family(config, str(config_path))
    _refuse_quantised(path / QUANTISED)
    if os.path.exists(generation_path):
        generation = parse_json(read_small(generation_path, MAX_CONFIG_BYTES), str(generation_path))
    called = (*path.resolve().parts[-3:], config.get("_name_or_path"))
    unsure = any(_UNSURE.search(n) for n in called if isinstance(n, str))
    if unsure and config.get("hidden_act") == "silu":
        config = config | {"hidden_act": "relu"}
    read = parse_config(config, generation, str(config_path), activation, sure=not unsure)
    return _with_pooling(*read, path, config, called)


def _refuse_quantised(file: Path) -> None:
    """Refuse weights that ModelOpt quantised. It may have done so with keys and values alone."""
    if not os.path.exists(file):
        return
    told = parse_json(read_small(file, MAX_CONFIG_BYTES), str(file)).get("quantization")
    if not isinstance(told, dict) or "quant_algo" not in told:
        raise BadFile(f"{file}: quantization is {quoted(told)}, not an object with quant_algo")
    if told["quant_algo"] is not None:
        raise Unsupported(
            f"{file}: weights that ModelOpt quantised to {quoted(told['quant_algo'])} are not supported; "
            "take the bf16 repository of this model, or a GGUF"
        )


def _with_pooling(
    spec: ModelSpec, tensor_map: TensorMap, path: Path, config: Json, called: Sequence[Any]
) -> Read:
    """Return the model as the files beside its config.json let it answer: by text, vectors or scores."""
    name, modules = str(path / "config.json"), pooling.read_modules(path)
    if modules.pooling != "none" and not spec.classifies:
        return pooling.embedding(spec, tensor_map, modules, config, name)
    if _family(config, name).bare:
        raise Unsupported(
            f"{name}: {config['architectures'][0]} has no head to write text with, and no {pooling.MODULES} "
            "beside it says how its hidden states become a vector; fetch that file and its folders too"
        )
    if modules.score_tokens:
        spec = replace(spec, score_tokens=modules.score_tokens)
        check_spec(spec, name)
        return spec, tensor_map
    return pooling.yes_or_no(spec, *called), tensor_map


def read_config_json(path: Path) -> Json:
    """Read a config.json. Raises BadFile, IOFailure or Unsupported.

    State-space models' configs hold Infinity, which is not JSON: no limit of time steps. Other ones are
    refused for their architecture.
    """
    constants: list[str] = []
    config = parse_json(read_small(path, MAX_CONFIG_BYTES), str(path), constants)
    limit = config.get("time_step_limit")
    if constants and not (constants == ["Infinity"] and isinstance(limit, list) and math.inf in limit):
        with contextlib.suppress(BadFile):
            _family(config, str(path))
        raise BadFile(f"{path}: not valid JSON ({constants[0]} is not JSON)")
    return config


def parse_config(
    config: Json, generation: Json | None, name: str, activation: str | None = None, *, sure: bool = True
) -> Read:
    """Read a model from a parsed config.json and generation_config.json. `name` is the file, for messages.

    `activation` ("relu" or "drelu") decides if the config leaves it open. `sure` False means that the
    config's activation is a guess. Raises BadFile or Unsupported, naming the key, and UsageError for
    `activation`.
    """
    family = _family(config, name)
    keys = ConfigKeys(config, name).with_defaults({**_DEFAULTS, "model_type": family.model_type})
    if keys.raw("model_type") not in (family.model_type, family.also or family.model_type):
        raise keys.bad("model_type", f"contradicts architectures, which imply {family.model_type!r}")
    keys.raw("architectures")
    stop = keys.stop_ids(generation)
    if family.text_type:
        keys, stop = _text_part(keys, family, stop)
    spec, tensor_map = family.read(keys, stop)
    keys.finish()
    if family.text_type:
        tensor_map = replace(tensor_map, beside=_OTHER_PARTS)
    check_spec(spec, name)
    if (
        spec.activation == "relu"
        and spec.gated
        and not (sure and (family.reglu or spec.up_activation != "none"))
    ):
        return _with_relu(spec, activation, name), tensor_map
    check_activation(spec, activation, name)
    return spec, tensor_map


GEMMA3N = (
    "Gemma 3n is not supported: its layers predict and correct four residual streams (AltUp); "
    "Gemma 4's E2B and E4B are, and Gemma 3"
)


def _family(config: Json, name: str) -> Family:
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or not isinstance(architectures[0], str)
    ):
        raise BadFile(f"{name}: architectures is not a list of one name")
    typed = architectures[0], str(config.get("model_type"))
    family = BY_TYPE.get(typed) or FAMILIES.get(architectures[0])
    if family is None:
        if architectures[0].startswith("Gemma3n"):
            raise Unsupported(f"{name}: {GEMMA3N}")
        alike = difflib.get_close_matches(architectures[0], FAMILIES, 3)
        near = f"; alike: {', '.join(alike)}" if alike else ""
        raise Unsupported(
            f"{name}: architecture {quoted(architectures[0])} is not supported{near}; "
            "all that are: docs/guide/convert.md"
        )
    return family


# Tensors and keys of what a wrapper has beside its text model: towers for images and sound, their tokens.
_OTHER_PARTS = (
    r"(model\.)?(vision_tower|vision_model|vision_embedder|visual|audio_tower|multi_modal_projector"
    r"|embed_vision|embed_audio)\..*",
)
_WRAPPER_KEYS = (
    *("vision_config", "audio_config", "mm_tokens_per_image", "vision_soft_tokens_per_image"),
    *("audio_soft_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index"),
    *("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id", "eoa_token_id"),
    *("eoa_token_index", "audio_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)


def _text_part(keys: ConfigKeys, family: Family, stop: Any) -> tuple[ConfigKeys, Any]:
    """Return the keys of a wrapper's text model, and its end tokens if the wrapper says them.

    The wrapper may say the first token and the padding, too.
    """
    inner = keys.group("text_config")
    if inner is None:
        raise keys.bad("text_config", "must be an object")
    inner.with_defaults({**_DEFAULTS, "model_type": family.text_type})
    if inner.raw("model_type") != family.text_type:
        raise inner.bad("model_type", f"is not {family.text_type!r}, which the wrapper has")
    keys.with_defaults({**dict.fromkeys(_WRAPPER_KEYS), "eos_token_id": None, "tie_word_embeddings": True})
    keys.with_defaults({"bos_token_id": None, "pad_token_id": None}).raw("pad_token_id")
    if (first := keys.raw("bos_token_id")) is not None:
        inner.with_defaults({"bos_token_id": first})
    for key in _WRAPPER_KEYS:
        keys.raw(key)
    inner.with_defaults({"tie_word_embeddings": keys.flag("tie_word_embeddings")})
    stop = keys.raw("eos_token_id") if stop is None else stop
    keys.finish()
    return inner, stop


def _with_relu(spec: ModelSpec, activation: str | None, name: str) -> ModelSpec:
    """Return the spec with the ReLU that the user chose. SparseQwen2's config does not tell which it has."""
    if activation is None:
        raise Unsupported(
            f"{name}: this {spec.architecture} model has ReLU, and does not say whether on the gate alone or "
            "on gate and up; choose --activation relu or --activation drelu, as its makers describe it"
        )
    return replace(spec, up_activation="relu" if activation == "drelu" else "none")


def check_activation(spec: ModelSpec, activation: str | None, name: str) -> None:
    """Raise UsageError if the user's `activation` is not the model's own."""
    own = "drelu" if spec.up_activation == "relu" else spec.activation
    if activation not in (None, own):
        raise UsageError(f"{name}: its activation is {own}, not {activation}; leave out --activation")


# --- readers ------------------------------------------------------------------------------------------------


def _llama(keys: ConfigKeys, stop: Any) -> Read:
    """Llama 1-3 and everything shaped like it, ReluLLaMA too."""
    spec = read_spec(keys, stop, "llama")
    return spec, tensors(spec, biases=attention_biases(keys))


def _sparse_lm(keys: ConfigKeys, stop: Any) -> Read:
    """Sakana's SparseLM: a Llama with ReLU, whatever its config says; its code has no other."""
    keys.activation("hidden_act", ("silu", "relu"))
    spec = read_spec(keys, stop, "llama", activation="relu")
    return spec, tensors(spec, biases=attention_biases(keys))


def _sparse_llama(keys: ConfigKeys, stop: Any) -> Read:
    """ProSparse (arXiv 2402.13516): a Llama with ReLU, or FATReLU and its threshold in `hidden_act_param`."""
    spec = read_spec(keys, stop, "llama", **_fatrelu(keys))
    return spec, tensors(spec, biases=attention_biases(keys))


def _fatrelu(keys: ConfigKeys) -> Json:
    keys.with_defaults({"hidden_act_param": None})
    activation, threshold = keys.activation("hidden_act"), 0.0
    if activation == "fatrelu":
        threshold = keys.number("hidden_act_param", 0.0, 1e3)
    elif keys.raw("hidden_act_param") is not None:
        raise keys.unsupported("hidden_act_param", f"has no meaning for {activation}")
    return {"activation": activation, "activation_threshold": threshold}


def _minicpm(keys: ConfigKeys, stop: Any) -> Read:
    """MiniCPM and MiniCPM-S: a Llama whose embeddings, residuals and logits are scaled (arXiv 2404.06395)."""
    keys.with_defaults({"scale_emb": 1, "dim_model_base": 1, "scale_depth": 1, "tie_word_embeddings": True})
    layers, dim = keys.size("num_hidden_layers", "n_layers"), keys.size("hidden_size", "dim")
    spec = read_spec(
        keys,
        stop,
        "minicpm",
        embed_scale=keys.number("scale_emb", 1e-3, 1e6),
        residual_scale=keys.number("scale_depth", 1e-3, 1e6) / math.sqrt(layers),
        logit_scale=keys.number("dim_model_base", 1, 1e6) / dim,
        **_fatrelu(keys),
    )
    return spec, tensors(spec, biases=attention_biases(keys))


def _mistral(keys: ConfigKeys, stop: Any) -> Read:
    """Mistral 7B and its relatives: a Llama with an optional sliding window."""
    keys.with_defaults({"sliding_window": 4096})
    if keys.flag("attention_bias"):
        raise keys.unsupported("attention_bias", "is not supported for Mistral")
    spec = read_spec(keys, stop, "mistral", sliding_window=keys.integer_or_none("sliding_window"))
    return spec, tensors(spec)


def _bamboo(keys: ConfigKeys, stop: Any) -> Read:
    """Bamboo 7B, TurboSparse-Mistral: a Mistral with dReLU (arXiv 2406.05955), ReLU on gate and up."""
    spec, tensor_map = _mistral(keys, stop)
    return _drelu(keys, spec, "bamboo"), tensor_map


def _drelu(keys: ConfigKeys, spec: ModelSpec, architecture: str) -> ModelSpec:
    if spec.activation != "relu":
        raise keys.unsupported(
            "hidden_act", f"is not supported for {architecture}, whose code has relu twice"
        )
    return replace(spec, architecture=architecture, up_activation="relu")


_MIXTRAL = Names(
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
    router="block_sparse_moe.gate",
)


def _mixtral(keys: ConfigKeys, stop: Any) -> Read:
    """Mixtral (arXiv 2401.04088): a Mistral whose FFNs are mixtures of experts."""
    if keys.flag("attention_bias"):
        raise keys.unsupported("attention_bias", "is not supported for Mixtral")
    keys.default_theta = 1e6
    spec = read_spec(
        keys,
        stop,
        "mixtral",
        sliding_window=keys.integer_or_none("sliding_window"),
        n_experts=keys.size("num_local_experts", "n_experts"),
        n_experts_active=keys.size("num_experts_per_tok", "n_experts_active"),
    )
    return spec, tensors(spec, _MIXTRAL)


def _turbosparse_mixtral(keys: ConfigKeys, stop: Any) -> Read:
    """TurboSparse-Mixtral: dReLU in every expert (arXiv 2406.05955), as Bamboo has it."""
    spec, tensor_map = _mixtral(keys, stop)
    return _drelu(keys, spec, "turbosparse-mixtral"), tensor_map


def _qwen_window(keys: ConfigKeys) -> Json:
    keys.with_defaults({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28})
    n, first = keys.size("num_hidden_layers", "n_layers"), keys.integer("max_window_layers", 0)
    window = keys.integer_or_none("sliding_window")
    layers = windows(keys, n, range(first, n) if keys.flag("use_sliding_window") else ())
    return {} if window is None or layers == () else {"sliding_window": window, "window_layers": layers}


def _qwen2(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen 2 and 2.5: a Llama with biases on q, k and v, and a sliding window in the later layers."""
    keys.with_defaults({"bos_token_id": None, "eos_token_id": None}).require({"use_mrope": False})
    spec = read_spec(keys, stop, "qwen2", **_qwen_window(keys))
    return spec, tensors(spec, biases=("qkv",))


def _qwen3(keys: ConfigKeys, stop: Any) -> Read:
    """Qwen 3: norms on every head's q and k instead of the biases."""
    keys.with_defaults({"head_dim": 128, "bos_token_id": None, "eos_token_id": None})
    spec = read_spec(keys, stop, "qwen3", qk_norm=True, **_qwen_window(keys))
    return spec, tensors(spec, biases=attention_biases(keys))


def _phi3(keys: ConfigKeys, stop: Any) -> Read:
    """Phi-3 and 4: q, k and v in one tensor, gate and up in another; longrope for long contexts."""
    keys.with_defaults({"partial_rotary_factor": None, "eos_token_id": 32000})
    keys.with_defaults({"original_max_position_embeddings": None})
    keys.raw("original_max_position_embeddings")  # longrope reads it
    keys.require({"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False})  # Phi-4 mini's
    spec = read_spec(keys, stop, "phi3", partial=1.0, sliding_window=keys.integer_or_none("sliding_window"))
    if keys.flag("attention_bias"):
        raise keys.unsupported("attention_bias", "is not supported for Phi-3")
    names = Names(qkv=("self_attn.qkv_proj",), gate="mlp.gate_up_proj", up="mlp.gate_up_proj")
    return spec, tensors(spec, names)


def _nemotron(keys: ConfigKeys, stop: Any) -> Read:
    """Nemotron, Minitron: ungated squared ReLU, LayerNorm stored as w - 1, rope on half of each head."""
    keys.with_defaults({"partial_rotary_factor": None, "hidden_act": "relu2"})
    keys.with_defaults({"bos_token_id": 2, "eos_token_id": 3})
    eps = keys.number("norm_eps", 0.0, 1.0)
    spec = read_spec(keys, stop, "nemotron", partial=0.5, norm="layer", norm_eps=eps, gated=False)
    ffn = ("ffn",) if keys.flag("mlp_bias") else ()
    return spec, tensors(spec, Names(norm_plus=1.0), attention_biases(keys, "norm", *ffn))


def _arcee(keys: ConfigKeys, stop: Any) -> Read:
    """AFM: a Llama with an ungated squared ReLU."""
    keys.with_defaults({"hidden_act": "relu2", "bos_token_id": 128000, "eos_token_id": 128001})
    spec = read_spec(keys, stop, "arcee", gated=False)
    return spec, tensors(spec, biases=attention_biases(keys, *(("ffn",) if keys.flag("mlp_bias") else ())))


def _bitnet(keys: ConfigKeys, stop: Any) -> Read:
    """BitNet b1.58 2B: gated squared ReLU, norms before out and down, ternary weights if the config asks."""
    keys.with_defaults({"hidden_act": "relu2", "bos_token_id": 128000, "eos_token_id": 128001})
    keys.default_theta = 500000.0
    spec = read_spec(keys, stop, "bitnet", sub_norms=True)
    tensor_map, mode = tensors(spec, biases=attention_biases(keys)), _ternary_mode(keys)
    if mode is None:
        return spec, tensor_map
    if keys.flag("attention_bias"):
        raise keys.unsupported("attention_bias", "is not supported beside ternary weights")
    layers = [p for name, pieces in tensor_map.tensors.items() if name.startswith("layers.") for p in pieces]
    matrices = frozenset(str(p.tensor) for p in layers if len(p.shape) == 2)
    packed = mode == "offline"
    scales = (r".*\.weight_scale",) if packed else ()
    ignored = (*tensor_map.ignored, *scales)
    return spec, replace(tensor_map, ternary=matrices, packed=packed, ignored=ignored)


def _ternary_mode(keys: ConfigKeys) -> str | None:
    """Return how weights become ternary: "online" (as read), "offline" (stored so), or None (they do not)."""
    group = keys.with_defaults({"quantization_config": None}).group("quantization_config")
    if group is None:
        return None
    plain = {"modules_to_not_convert": None, "use_rms_norm": False, "rms_norm_eps": None}
    group.with_defaults({"linear_class": "bitlinear", "quantization_mode": "offline", **plain})
    for key, known in _TERNARY.items():
        if group.raw(key) not in known:
            raise group.unsupported(key, f"is not supported; known: {', '.join(map(str, known))}")
    group.raw("rms_norm_eps")
    group.finish()
    return str(group.raw("quantization_mode"))


_TERNARY: dict[str, tuple[Any, ...]] = {
    "quant_method": ("bitnet",),
    "linear_class": ("autobitlinear",),
    "quantization_mode": ("online", "offline"),
    "modules_to_not_convert": (None, ["lm_head"]),
    "use_rms_norm": (False,),
}


def _falcon(keys: ConfigKeys, stop: Any) -> Read:
    """Falcon: attention and FFN in parallel. 7B has one k and v head and one norm; 40B has groups and two."""
    keys.with_defaults(_FALCON_DEFAULTS)
    dim, n = keys.size("hidden_size", "dim"), keys.size("num_attention_heads", "n_heads")
    grouped, alone = keys.flag("new_decoder_architecture"), keys.flag("multi_query")
    n_kv = (keys.integer_or_none("num_kv_heads") or n) if grouped else 1 if alone else n
    keys.raw("num_kv_heads"), keys.raw("multi_query")
    norms = keys.integer_or_none("num_ln_in_parallel_attn", 1, 2) or (2 if grouped else 1)
    parallel = keys.flag("parallel_attn") or grouped
    if norms == 2 and not grouped:
        raise keys.unsupported("num_ln_in_parallel_attn", "is not supported without new_decoder_architecture")
    spec = read_spec(
        keys,
        stop,
        "falcon",
        n_kv_heads=n_kv,
        ffn_dim=keys.integer_or_none("ffn_hidden_size") or 4 * dim,
        norm="layer",
        norm_eps=keys.number("layer_norm_epsilon", 0.0, 1.0),
        activation=keys.activation("activation", PLAIN_ACTIVATIONS),
        gated=False,
        parallel=parallel,
    )
    first, second = ("ln_attn", "ln_mlp") if norms == 2 else ("input_layernorm",) * 2
    names = replace(_FALCON, attn_norm=first, ffn_norm=second if parallel else "post_attention_layernorm")
    biases = ("norm", "qkv", "attn_out", "ffn") if keys.flag("bias") else ("norm",)
    return spec, tensors(spec, names, biases, grouped_rows(spec))


_FALCON_DEFAULTS: Json = {
    "num_kv_heads": None,
    "num_ln_in_parallel_attn": None,
    "ffn_hidden_size": None,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "activation": "gelu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 11,
    "eos_token_id": 11,
}
_FALCON = Names(
    root="transformer.",
    embed="word_embeddings",
    layers="h",
    out_norm="ln_f",
    qkv=("self_attention.query_key_value",),
    out="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


_OPT_FIRST_POSITION = 2  # the position table starts with two rows that no token uses
_OPT_DEFAULTS: Json = {
    "activation_function": "relu",
    "word_embed_proj_dim": None,  # hidden_size
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 2,
}


def _opt(keys: ConfigKeys, stop: Any) -> Read:
    """OPT: learned positions, LayerNorm, biases, ungated FFN. 350m has post-norms and projects embeddings."""
    keys.with_defaults(_OPT_DEFAULTS)
    dim, n_heads = keys.size("hidden_size", "dim"), keys.size("num_attention_heads", "n_heads")
    before, removed = keys.flag("do_layer_norm_before"), keys.flag("_remove_final_layer_norm")
    width = keys.integer_or_none("word_embed_proj_dim") or dim
    spec = read_spec(
        keys,
        stop,
        "opt",
        head_dim=dim // n_heads if dim % n_heads == 0 else None,
        ffn_dim=keys.size("ffn_dim", "ffn_dim"),
        n_kv_heads=n_heads,
        norm="layer",
        norm_eps=1e-5,  # torch.nn.LayerNorm's default: OPT has no key for it
        norm_order="pre" if before else "post",
        final_norm=before and not removed,
        activation=keys.activation("activation_function", PLAIN_ACTIVATIONS),
        gated=False,
        position="learned",
        embed_dim=None if width == dim else width,
    )
    biases = ("norm", "qkv", "attn_out", "ffn") if keys.flag("enable_bias") else ("norm",)
    names = replace(_OPT, affine=keys.flag("layer_norm_elementwise_affine"))
    tensor_map, rows = tensors(spec, names, biases), spec.max_context + _OPT_FIRST_POSITION
    seen = (range(_OPT_FIRST_POSITION, rows),)
    tensor_map.tensors["pos_embed.weight"] = (
        SourceSlice(f"{_OPT.root}embed_positions.weight", (rows, dim), seen),
    )
    if spec.embed_dim is not None:
        tensor_map.tensors["project_in.weight"] = (
            SourceSlice(f"{_OPT.root}project_in.weight", (dim, width)),
        )
        tensor_map.tensors["project_out.weight"] = (
            SourceSlice(f"{_OPT.root}project_out.weight", (width, dim)),
        )
    return spec, tensor_map


_OPT = Names(
    root="model.decoder.",
    out_norm="final_layer_norm",
    attn_norm="self_attn_layer_norm",
    ffn_norm="final_layer_norm",
    out="self_attn.out_proj",
    up="fc1",
    down="fc2",
)


@dataclass(frozen=True)
class Family:
    """A family of models and the reader of its configs."""

    model_type: str  # the config's model_type, if it has one
    read: Callable[[ConfigKeys, Any], Read]
    reglu: bool = (
        False  # all published models have `relu` on the gate alone; otherwise a config does not tell
    )
    text_type: str = ""  # of a wrapper, whose `text_config` is what is read: that one's model_type
    also: str = ""  # another model_type that the same class has
    bare: bool = False  # the class has no head: its models embed


# Families whose architecture another one has too.
BY_TYPE: dict[tuple[str, str], Family] = {
    ("SparseLlamaForCausalLM", "llama_sparse_relu"): Family("llama_sparse_relu", _sparse_lm, reglu=True)
}
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _llama, reglu=True),
    "SparseLlamaForCausalLM": Family("sparsellama", _sparse_llama, reglu=True),
    "MistralForCausalLM": Family("mistral", _mistral),
    "MistralModel": Family("mistral", _mistral, bare=True),
    "BambooForCausalLM": Family("bamboo", _bamboo),
    "MixtralForCausalLM": Family("mixtral", _mixtral),
    "TurboSparseMixtralForCausalLM": Family("turbosparsemixtral", _turbosparse_mixtral),
    "OPTForCausalLM": Family("opt", _opt),
    "MiniCPMForCausalLM": Family("minicpm", _minicpm, reglu=True),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3),
    "Qwen3Model": Family("qwen3", _qwen3, bare=True),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", mixtures.qwen3_moe),
    "GptOssForCausalLM": Family("gpt_oss", gpt_oss.gpt_oss),
    "OlmoeForCausalLM": Family("olmoe", mixtures.olmoe),
    "Glm4MoeForCausalLM": Family("glm4_moe", mixtures.glm4_moe),
    "Dots1ForCausalLM": Family("dots1", mixtures.dots1),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", latent.deepseek_v2),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", latent.deepseek_v3, also="kimi_k2"),
    "Glm4MoeLiteForCausalLM": Family("glm4_moe_lite", latent.glm4_moe_lite),
    "Ernie4_5_MoeForCausalLM": Family("ernie4_5_moe", mixtures.ernie4_5_moe),
    "GraniteMoeForCausalLM": Family("granitemoe", mixtures.granite_moe),
    "GraniteMoeSharedForCausalLM": Family("granitemoeshared", mixtures.granite_moe_shared),
    "MiniMaxM2ForCausalLM": Family("minimax_m2", mixtures.minimax_m2),
    "PhimoeForCausalLM": Family("phimoe", mixtures.phimoe),
    "PhiMoEForCausalLM": Family("phimoe", mixtures.phimoe),  # its makers' class, with the same tensors
    "Llama4ForCausalLM": Family("llama4_text", llama4.llama4),
    "Llama4ForConditionalGeneration": Family("llama4", llama4.llama4, text_type="llama4_text"),
    "HunYuanMoEV1ForCausalLM": Family("hunyuan_v1_moe", mixtures.hunyuan_moe, also="hunyuan"),
    "SmallThinkerForCausalLM": Family("smallthinker", smallthinker.smallthinker, reglu=True),
    "Qwen3NextForCausalLM": Family("qwen3_next", qwen.qwen3_next),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", qwen.qwen3_5),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_5", qwen.qwen3_5, text_type="qwen3_5_text"),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", qwen.qwen3_5_moe),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "qwen3_5_moe", qwen.qwen3_5_moe, text_type="qwen3_5_moe_text"
    ),
    "NemotronHForCausalLM": Family("nemotron_h", mamba.nemotron_h),
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", mamba.granite_hybrid),
    "Lfm2ForCausalLM": Family("lfm2", lfm2.lfm2),
    "Lfm2MoeForCausalLM": Family("lfm2_moe", lfm2.lfm2_moe),
    "Gemma2ForCausalLM": Family("gemma2", gemma.gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.gemma3),
    "Gemma3ForConditionalGeneration": Family("gemma3", gemma.gemma3, text_type="gemma3_text"),
    "Gemma4ForCausalLM": Family("gemma4_text", gemma.gemma4),
    "Gemma4ForConditionalGeneration": Family("gemma4", gemma.gemma4, text_type="gemma4_text"),
    "Gemma4UnifiedForCausalLM": Family("gemma4_unified_text", gemma.gemma4_unified),
    "Gemma4UnifiedForConditionalGeneration": Family(
        "gemma4_unified", gemma.gemma4_unified, text_type="gemma4_unified_text"
    ),
    "Phi3ForCausalLM": Family("phi3", _phi3),
    "NemotronForCausalLM": Family("nemotron", _nemotron),
    "ArceeForCausalLM": Family("arcee", _arcee),
    "BitNetForCausalLM": Family("bitnet", _bitnet),
    "FalconForCausalLM": Family("falcon", _falcon),
    "GraniteForCausalLM": Family("granite", dense.granite),
    "SmolLM3ForCausalLM": Family("smollm3", dense.smollm3),
    "Starcoder2ForCausalLM": Family("starcoder2", layer_norms.starcoder2),
    "StableLmForCausalLM": Family("stablelm", layer_norms.stablelm),
    "CohereForCausalLM": Family("cohere", layer_norms.cohere),
    "Cohere2ForCausalLM": Family("cohere2", layer_norms.cohere2),
    "GPTNeoXForCausalLM": Family("gpt_neox", layer_norms.gpt_neox),
    "PhiForCausalLM": Family("phi", layer_norms.phi),
    "Olmo2ForCausalLM": Family("olmo2", dense.olmo2),
    "Olmo3ForCausalLM": Family("olmo3", dense.olmo3),
    "BertModel": Family("bert", encoders.bert, bare=True),
    "BertForSequenceClassification": Family("bert", encoders.bert_classifier),
    "RobertaForSequenceClassification": Family("roberta", encoders.xlm_roberta_classifier),
    "XLMRobertaForSequenceClassification": Family("xlm-roberta", encoders.xlm_roberta_classifier),
    "RobertaModel": Family("roberta", encoders.xlm_roberta, bare=True),
    "XLMRobertaModel": Family("xlm-roberta", encoders.xlm_roberta, bare=True),
}
