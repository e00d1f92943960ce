"""How a model's last hidden states become a vector, as sentence-transformers' files beside a model say it.

Also how the makers of a reranker read its answer. GGUF has one key for both, `pooling_type`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import Json, parse_json, quoted, read_small
from thermocline.model.spec import ModelSpec, check_spec
from thermocline.model.tensor_map import TensorMap

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
MAX_BYTES = 512 << 10
_FOLDER = re.compile(r"\d+_\w{1,40}")
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# The keys that files had before `pooling_mode`.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# Qwen3-Reranker's first files do not say that it answers yes or no: its card does, with these tokens.
_QWEN_RERANKER = re.compile(r"qwen3[-_ ]?reranker", re.IGNORECASE)
QWEN_YES_NO = (9693, 2152)


@dataclass(frozen=True)
class Modules:
    """The modules that a modules.json lists behind the transformer."""

    pooling: str = "none"
    unit_vectors: bool = False
    score_tokens: tuple[int, ...] = ()


def read_modules(path: Path) -> Modules:
    """Read the modules of a model in directory `path`. Raises BadFile, IOFailure, Unsupported."""
    name = str(path / MODULES)
    if not os.path.exists(name):
        return Modules()
    listed = parse_json(b'{"modules":' + read_small(path / MODULES, MAX_BYTES) + b"}", name)["modules"]
    if not isinstance(listed, list) or not all(isinstance(m, dict) for m in listed) or len(listed) > 16:
        raise BadFile(f"{name}: is not a list of modules")
    found, kinds = Modules(), [str(m.get("type")).rpartition(".")[2] for m in listed]
    if kinds[:1] != ["Transformer"] or len(set(kinds)) < len(kinds):
        raise Unsupported(
            f"{name}: modules {quoted(', '.join(kinds))} are not a Transformer and what follows"
        )
    for module, kind in zip(listed[1:], kinds[1:], strict=True):
        if kind == "Pooling" and not found.unit_vectors:
            found = replace(found, pooling=_pooling(*_config(path, module, name)))
        elif kind == "Normalize" and found.pooling != "none":
            found = replace(found, unit_vectors=True)
        elif kind == "LogitScore" and found == Modules():
            found = replace(found, score_tokens=_score_tokens(*_config(path, module, name)))
        else:
            raise Unsupported(
                f"{name}: module {quoted(kind)} is not supported here; known: Pooling and then Normalize, or "
                "LogitScore"
            )
    if found.pooling != "none":
        _check_prompts(path)
    return found


def _config(path: Path, module: Json, name: str) -> tuple[Json, str]:
    folder = module.get("path")
    if not isinstance(folder, str) or not _FOLDER.fullmatch(folder):
        raise BadFile(f"{name}: path {quoted(folder)} is not a folder beside it, such as 1_Pooling")
    file = path / folder / "config.json"
    return parse_json(read_small(file, MAX_BYTES), str(file)), str(file)


def _pooling(config: Json, name: str) -> str:
    known = {*_FLAGS, "pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt"}
    for key in config:
        if key not in known:
            raise Unsupported(f"{name}: key {quoted(key)} is unknown, so it may change the vectors")
    if config.get("include_prompt", True) is not True:
        raise Unsupported(
            f"{name}: include_prompt is not true, which is not supported: texts are pooled whole"
        )
    modes = config.get("pooling_mode", [mode for key, mode in _FLAGS.items() if config.get(key)])
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise Unsupported(f"{name}: pooling {quoted(modes)} is not supported; known: {', '.join(_MODES)}")
    return _MODES[modes[0]]


def _score_tokens(config: Json, name: str) -> tuple[int, ...]:
    ids = config.get("true_token_id"), config.get("false_token_id")
    if any(type(i) is not int for i in ids):
        raise Unsupported(f"{name}: true_token_id and false_token_id are {quoted(ids)}, not two tokens")
    return ids  # type: ignore[return-value]


def _check_prompts(path: Path) -> None:
    """Raise Unsupported if the makers put a text before every input: requests cannot say that here."""
    file = path / PROMPTS
    if not os.path.exists(file):
        return
    default = parse_json(read_small(file, MAX_BYTES), str(file)).get("default_prompt_name")
    if default is not None:
        raise Unsupported(
            f"{file}: default_prompt_name {quoted(default)} is not supported; set it to null, and put the "
            "prompt before your texts"
        )


def embedding(
    spec: ModelSpec, tensor_map: TensorMap, modules: Modules, config: Json, name: str
) -> tuple[ModelSpec, TensorMap]:
    """Return the model that answers with vectors, which needs no head. `name` is the config's file."""
    if "auto_map" in config:
        raise Unsupported(
            f"{name}: auto_map: the model has code of its own, which may attend in another way than its "
            "architecture; it is not supported as an embedding model"
        )
    made = replace(
        spec,
        tied_head=True,
        pooling=modules.pooling,
        unit_vectors=modules.unit_vectors,
        matryoshka=_matryoshka(config, spec, name),
    )
    check_spec(made, name)
    tensors = {ours: pieces for ours, pieces in tensor_map.tensors.items() if not ours.startswith("head.")}
    head = re.escape(tensor_map.head)
    return made, replace(tensor_map, tensors=tensors, ignored=(*tensor_map.ignored, head), head="")


def _matryoshka(config: Json, spec: ModelSpec, name: str) -> tuple[int, ...] | None:
    """Return the lengths that vectors may be cut to, by the keys that vLLM reads too."""
    dims, said = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if said is not None and type(said) is not bool:
        raise BadFile(f"{name}: is_matryoshka must be true or false, got {quoted(said)}")
    if dims is None:
        return () if said else None
    if not isinstance(dims, list) or len(dims) > 256 or any(type(d) is not int for d in dims):
        raise BadFile(f"{name}: matryoshka_dimensions must be a list of lengths, got {quoted(dims)}")
    if not all(1 <= d <= spec.dim for d in dims):
        raise BadFile(f"{name}: matryoshka_dimensions must be from 1 to {spec.dim}, got {quoted(dims)}")
    return tuple(sorted(set(dims)))


def yes_or_no(spec: ModelSpec, *names: Any) -> ModelSpec:
    """Return the spec with Qwen3-Reranker's tokens for yes and no, if one of a model's names is its."""
    called = any(_QWEN_RERANKER.search(n) for n in names if isinstance(n, str))
    fits = not spec.embeds and max(QWEN_YES_NO) < spec.vocab_size
    return replace(spec, score_tokens=QWEN_YES_NO) if called and fits else spec
