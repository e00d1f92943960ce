"""Convert a GGUF file into a pack: weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from thermocline.convert.gguf_rows import Cost, GGUFSource, formats_of
from thermocline.convert.powerinfer import activation_counts, with_predictor
from thermocline.convert.tokenizers import from_gguf, has_tokenizer
from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.files.gguf import GGUF
from thermocline.files.source_key import READING, Shard, add_content
from thermocline.model.gguf_families import read_model
from thermocline.model.tensors import optional_among
from thermocline.pack.manifest import KIND, VERSION
from thermocline.pack.pack import Progress
from thermocline.pack.writer import PackExtras, write_pack

KEPT = 2  # of a file's formats: 2 keeps each tensor's, where 1 had one for q, k and v, and no K formats
_SPECIAL = ("bos", "eos", "unknown", "padding")


def pack_gguf(
    src: Path,
    dst: Path,
    weight_format: str | None,
    *,
    overwrite: bool,
    progress: Progress | None,
    activation: str | None = None,
) -> Cost:
    """Pack a GGUF file, with all parts if it is split. Return what the conversion changed.

    `weight_format` None keeps each tensor's own format. Raises BadFile, IOFailure, Unsupported, UsageError.
    """
    with GGUF(src) as gguf:
        spec, tensor_map = read_model(gguf, activation)
        predictor = with_predictor(gguf, spec, tensor_map)
        counts = activation_counts(src, spec) if gguf.powerinfer else {}
        ranks = predictor.ranks if predictor is not None else ()
        source = GGUFSource(gguf, tensor_map, counts)
        formats: dict[str, str] = {}
        if weight_format is None:
            weight_format, formats = formats_of(source, spec, ranks)
        write_pack(
            dst,
            spec,
            weight_format,
            source,
            PackExtras(
                formats=formats,
                predictor=predictor,
                optional=optional_among((*tensor_map.tensors, *counts), spec),
                files=tokenizer_files(gguf),
                origin=("gguf", src.name, gguf_hash(gguf)),
            ),
            overwrite=overwrite,
            progress=progress,
        )
        return source.cost


def tokenizer_files(gguf: GGUF) -> dict[str, bytes]:
    return files_of_metadata(gguf.metadata, str(gguf.path))


def files_of_metadata(m: Mapping[str, Any], name: str) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json, each if the metadata has what it needs."""
    out: dict[str, bytes] = {}
    if has_tokenizer(m):
        out["tokenizer.json"] = from_gguf(m, name)
    about: dict[str, Any] = {}
    template, tokens = m.get("tokenizer.chat_template"), m.get("tokenizer.ggml.tokens")
    if isinstance(template, str):
        about["chat_template"] = template
    for which in _SPECIAL:
        i = m.get(f"tokenizer.ggml.{which}_token_id")
        if isinstance(tokens, list) and type(i) is int and 0 <= i < len(tokens):
            about[{"unknown": "unk_token", "padding": "pad_token"}.get(which, f"{which}_token")] = tokens[i]
    for flag in ("add_bos_token", "add_eos_token"):
        if type(m.get(f"tokenizer.ggml.{flag}")) is bool:
            about[flag] = m[f"tokenizer.ggml.{flag}"]
    if about:
        out["tokenizer_config.json"] = json.dumps(about).encode()
    return out


def gguf_shards(gguf: GGUF) -> list[Shard]:
    """Return the parts of a GGUF as shards, for the key of its content."""
    return [Shard(p, [(t.start, t.end) for t in p.header.tensors.values()]) for p in gguf.parts]


def gguf_hash(gguf: GGUF) -> str:
    """Return a key for the content: 32 hex digits, the same for each copy."""
    h = hashlib.blake2b(f"{KIND} {VERSION} gguf {READING} {KEPT}".encode(), digest_size=16)
    add_content(h, gguf_shards(gguf))
    return h.hexdigest()


def gguf_has_tokenizer(path: Path) -> bool:
    """Return whether a GGUF file's metadata has a tokenizer."""
    with GGUF(path) as gguf:
        return has_tokenizer(gguf.metadata)


def is_gguf(path: Path) -> bool:
    """Return whether a path is a regular file that begins like a GGUF (or PowerInfer's) or ends in .gguf."""
    if not os.path.isfile(path):
        return False
    if path.suffix == ".gguf":
        return True
    with open(path, "rb") as f:
        return f.read(4) in (b"GGUF", b"PWRI")


def inspect_gguf(path: Path) -> dict[str, Any]:
    """Describe a GGUF, ready for JSON. Nothing is converted, so any architecture will do."""
    with GGUF(path) as gguf:
        types: dict[str, dict[str, int]] = {}
        for t in gguf.tensors.values():
            sums = types.setdefault(t.type, {"tensors": 0, "parameters": 0, "bytes": 0})
            sums["tensors"] += 1
            sums["parameters"] += math.prod(t.shape)
            sums["bytes"] += t.end - t.start
        text, number = partial(_value, gguf, str, "a text"), partial(_value, gguf, float, "a number")
        return {
            "path": str(path),
            "kind": "PowerInfer" if gguf.powerinfer else "GGUF",
            "name": text("general.name"),
            "architecture": text("general.architecture"),
            "parts": len(gguf.parts),
            "file_bytes": sum(p.size for p in gguf.parts),
            "parameters": sum(t["parameters"] for t in types.values()),
            "types": types,
            "tokenizer": text("tokenizer.ggml.model"),
            "sparse_threshold": number("powerinfer.sparse_threshold"),
            "predictors": sum(bool(re.fullmatch(r"blk\.\d+\.fc1\.weight", n)) for n in gguf.tensors),
        }


def _value(gguf: GGUF, kind: type, wanted: str, key: str) -> Any:
    value = gguf.metadata.get(key)
    if value is not None and type(value) is not kind:
        raise BadFile(f"{gguf.path}: {key} is {quoted(value)}, not {wanted}")
    return value
