"""A GGUF file -> a pack: its weights, its tokenizer and chat template. Must not know families or kernels."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.gguf_rows import Cost, GGUFSource, formats_of
from thermocline.convert.source_key import READING, Shard, add_content
from thermocline.convert.tokenizers import from_gguf, has_tokenizer
from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.files.gguf import GGUF
from thermocline.files.torch_zip import read_flat_tensor
from thermocline.model.gguf_families import read_model
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice, TensorMap
from thermocline.model.tensors import optional_among
from thermocline.pack.manifest import KIND, MAX_RANK, VERSION, Predictor
from thermocline.pack.pack import Progress
from thermocline.pack.writer import write_pack

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
    """Pack a GGUF, all parts of a split one. `weight_format` None: the file's own, tensor by tensor."""
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
            formats=formats,
            predictor=predictor,
            optional=optional_among((*tensor_map.tensors, *counts), spec),
            files=tokenizer_files(gguf),
            origin=("gguf", src.name, gguf_hash(gguf)),
            overwrite=overwrite,
            progress=progress,
        )
        return source.cost


def with_predictor(gguf: GGUF, spec: ModelSpec, tensor_map: TensorMap) -> Predictor | None:
    """PowerInfer's predictors of active neurons, fc2 relu(fc1 x) in each layer, added to `tensor_map`."""
    first = [gguf.tensors.get(f"blk.{i}.fc1.weight") for i in range(spec.n_layers)]
    if not any(first):
        return None
    key = "powerinfer.sparse_threshold"
    threshold = gguf.metadata.get(key, 0.0)
    if type(threshold) is not float or not -1e6 <= threshold <= 1e6:
        raise BadFile(f"{gguf.path}: {key} is {quoted(threshold)}, not a number")
    ranks = tuple(t.rows if t is not None else 1 for t in first)
    if max(ranks) > MAX_RANK:
        raise BadFile(f"{gguf.path}: a predictor of rank {max(ranks)}, more than {MAX_RANK}")
    for i, rank in enumerate(ranks):
        a = f"layers.{i}.predictor"
        tensor_map.tensors[f"{a}.fc1.weight"] = (SourceSlice(f"blk.{i}.fc1.weight", (rank, spec.dim)),)
        tensor_map.tensors[f"{a}.fc2.weight"] = (SourceSlice(f"blk.{i}.fc2.weight", (spec.ffn_dim, rank)),)
    return Predictor(ranks, threshold)


def activation_counts(src: Path, spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """How often each neuron was active, from the directory `activation` beside one of PowerInfer's files."""
    directory = src.parent / "activation"
    if not os.path.isdir(directory):
        return {}
    out = {}
    for i in range(spec.n_layers):
        path = directory / f"activation_{i}.pt"
        counts = read_flat_tensor(path)
        if len(counts) != spec.ffn_dim or not (np.isfinite(counts) & (counts >= 0)).all():
            raise BadFile(f"{path}: {len(counts)} numbers, not {spec.ffn_dim} counts: another model's?")
        out[f"layers.{i}.activation_count"] = counts.astype(np.float32)
    return out


def tokenizer_files(gguf: GGUF) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json, as far as the metadata has what they need."""
    m = gguf.metadata
    out: dict[str, bytes] = {}
    if has_tokenizer(m):
        out["tokenizer.json"] = from_gguf(m, str(gguf.path))
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
    """The parts of a GGUF, as the key of its content takes them."""
    return [Shard(p, [(t.start, t.end) for t in p.header.tensors.values()]) for p in gguf.parts]


def gguf_hash(gguf: GGUF) -> str:
    """Return a key for the content: 32 hex digits, the same for each copy."""
    h = hashlib.blake2b(f"{KIND} {VERSION} gguf {READING}".encode(), digest_size=16)
    add_content(h, gguf_shards(gguf))
    return h.hexdigest()


def is_gguf(path: Path) -> bool:
    """True for a regular file that begins as a GGUF, llama.cpp's or PowerInfer's, or is named as one."""
    if not os.path.isfile(path):
        return False
    if path.suffix == ".gguf":
        return True
    with open(path, "rb") as f:
        return f.read(4) in (b"GGUF", b"PWRI")


def inspect_gguf(path: Path) -> dict[str, Any]:
    """What a GGUF says of itself, ready for JSON: nothing is converted, and any architecture will do."""
    with GGUF(path) as gguf:
        types: dict[str, dict[str, int]] = {}
        for t in gguf.tensors.values():
            told = types.setdefault(t.type, {"tensors": 0, "parameters": 0, "bytes": 0})
            told["tensors"] += 1
            told["parameters"] += math.prod(t.shape)
            told["bytes"] += t.end - t.start
        text, number = partial(_said, gguf, str, "a text"), partial(_said, gguf, float, "a number")
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


def _said(gguf: GGUF, kind: type, wanted: str, key: str) -> Any:
    value = gguf.metadata.get(key)
    if value is not None and type(value) is not kind:
        raise BadFile(f"{gguf.path}: {key} is {quoted(value)}, not {wanted}")
    return value
