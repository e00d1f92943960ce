"""pack.json: rendered in one way only, and checked in full against its spec.

docs/internals/pack.md describes the format.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thermocline import _native
from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import Json, parse_json, quoted
from thermocline.model import quant
from thermocline.model.spec import Latent, ModelSpec, Recurrent, RopeScaling, Router, check_spec
from thermocline.model.tensors import ALIGN, TensorInfo, expected_tensors, named_formats, place

KIND, VERSION = "thermocline-pack", 2
NEWEST = 3  # which only packs have that version 2 cannot say, so that older builds open all others
OLD_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0", "i32")  # version 2's
BLOCK_BYTES = 65536
GENERATION_CONFIG = "generation_config.json"
COPIED = (
    *("tokenizer.json", "tokenizer_config.json", GENERATION_CONFIG),
    *("chat_template.jinja", "chat_template.json"),
)
MAX_WEIGHTS_BYTES = 1 << 48
MAX_RANK = 1 << 16


@dataclass(frozen=True)
class Predictor:
    """The facts about a model's own predictors of active neurons that their weights do not say."""

    ranks: tuple[int, ...]  # by layer
    threshold: float  # a neuron is predicted active if its logit is at least this
    each: bool = False  # every expert has a predictor of its own, of this rank


@dataclass(frozen=True)
class Manifest:
    """A checked pack.json."""

    spec: ModelSpec
    weight_format: str
    tensors: dict[str, TensorInfo]
    block_bytes: int
    weights_bytes: int
    checksums_crc32c: int
    source: dict[str, str]  # kind, name, hash
    files: dict[str, int]  # copied file -> its CRC-32C
    predictor: Predictor | None = None


def version_of(tensors: Mapping[str, TensorInfo]) -> int:
    """Return the version of a pack of these tensors: the oldest that can say what they are."""
    for name, t in tensors.items():
        up = tensors.get(name.replace(".gate.weight", ".up.weight"), t)
        beside = tensors.get(name.replace(".gate.weight", ".bundle"), t)
        if t.format not in OLD_FORMATS or t.down_format is not None or name.endswith(".q.weight"):
            return NEWEST
        if t.format not in (up.format, beside.format) or up.format != beside.format:
            return NEWEST
    return VERSION


def render_manifest(m: Manifest) -> bytes:
    """Return the bytes of pack.json. `parse_manifest` accepts no others, so it notices every changed byte."""
    value: Json = {
        "format": KIND,
        "version": version_of(m.tensors),
        "block_bytes": m.block_bytes,
        "weights_bytes": m.weights_bytes,
        "weight_format": m.weight_format,
        "spec": dataclasses.asdict(m.spec),
        "source": m.source,
        "checksums_crc32c": m.checksums_crc32c,
        "files": m.files,
        "tensors": {name: _tensor(t) for name, t in m.tensors.items()},
    }
    if m.predictor is not None:
        p = m.predictor
        value["predictor"] = {"ranks": p.ranks, "threshold": p.threshold} | ({"each": True} if p.each else {})
    return _render(value)


def _tensor(t: TensorInfo) -> Json:
    """Return a tensor's fields, without a down format that it does not have."""
    return {k: v for k, v in dataclasses.asdict(t).items() if v is not None}


def _render(value: Json) -> bytes:
    """Render `value` and its crc32c as JSON, one tensor a line."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items() if k != "tensors"]
    tensors = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value["tensors"].items()]
    lines.append(' "tensors": {\n' + ",\n".join(tensors) + "\n }")
    lines.append(f' "crc32c": {_native.crc32c(canonical.encode())}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


_KEYS = {
    "format": str,
    "version": int,
    "block_bytes": int,
    "weights_bytes": int,
    "weight_format": str,
    "spec": dict,
    "source": dict,
    "checksums_crc32c": int,
    "files": dict,
    "tensors": dict,
    "crc32c": int,
}


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Parse a manifest and check it against its spec. `name` is the file, for messages.

    Raises BadFile or Unsupported, naming the field.
    """
    value = parse_json(data, name)
    if value.get("format") != KIND:
        raise BadFile(f"{name}: not a pack: format is {quoted(value.get('format'))}, not {KIND}")
    if type(value.get("version")) is int and value["version"] > NEWEST:
        raise Unsupported(
            f"{name}: pack version {quoted(value['version'])}; this build reads {NEWEST}: update it"
        )
    _check_keys(value, _KEYS | ({"predictor": dict} if "predictor" in value else {}), name)
    crc = value.pop("crc32c")
    if _render(value) != data:
        raise BadFile(
            f"{name}: checksum mismatch (crc32c says {quoted(crc)}): edited or damaged; pack it again"
        )
    if 1 <= value["version"] < VERSION:
        raise BadFile(
            f"{name}: pack version {value['version']}; this build reads {VERSION}: pack the model again"
        )
    if value["version"] < VERSION or value["block_bytes"] != BLOCK_BYTES:
        raise BadFile(
            f"{name}: version must be {VERSION} and block_bytes {BLOCK_BYTES}; pack the model again"
        )
    spec = _parse_spec(value["spec"], f"{name}: spec")
    weights_bytes = _size(value, "weights_bytes", MAX_WEIGHTS_BYTES, name)
    predictor = _parse_predictor(value["predictor"], spec, name) if "predictor" in value else None
    tensors = _parse_tensors(value["tensors"], spec, value["weight_format"], predictor, weights_bytes, name)
    if value["version"] != version_of(tensors):
        raise BadFile(
            f"{name}: version is {value['version']}, and its tensors are of version {version_of(tensors)}; "
            "pack the model again"
        )
    return Manifest(
        spec=spec,
        weight_format=value["weight_format"],
        tensors=tensors,
        block_bytes=BLOCK_BYTES,
        weights_bytes=weights_bytes,
        checksums_crc32c=_size(value, "checksums_crc32c", 0xFFFFFFFF, name),
        source=_parse_source(value["source"], f"{name}: source"),
        files=_parse_files(value["files"], f"{name}: files"),
        predictor=predictor,
    )


def _check_keys(value: Json, types: Mapping[str, type], name: str) -> None:
    """Raise BadFile unless `value` has exactly these keys, with exactly these types."""
    for key in (*types, *value):
        if key not in value:
            raise BadFile(f"{name}: {key} is missing")
        if key not in types:
            raise BadFile(f"{name}: unknown key {quoted(key)}")
        if type(value[key]) is not types[key]:
            raise BadFile(f"{name}: {key} is {quoted(value[key])}, not of type {types[key].__name__}")


def _size(value: Json, key: str, limit: int, name: str) -> int:
    number = value[key]
    if type(number) is not int or not 0 <= number <= limit:
        raise BadFile(f"{name}: {key} is {quoted(number)}, not an integer from 0 to {limit}")
    return number


# Checks of a JSON value for a field of ModelSpec, by the annotation of the field.
_FIELD_TYPES: dict[str, Callable[[Any], bool]] = {
    "str": lambda v: type(v) is str and len(v) <= 64 and v.isprintable(),
    "int": lambda v: type(v) is int,
    "float": lambda v: type(v) is float,
    "bool": lambda v: type(v) is bool,
    "int | None": lambda v: v is None or type(v) is int,
    "float | None": lambda v: v is None or type(v) is float,
    "tuple[float, ...]": lambda v: type(v) is list and all(type(i) is float for i in v),
    "tuple[int, ...] | None": lambda v: v is None or _FIELD_TYPES["tuple[int, ...]"](v),
    "tuple[int, ...]": lambda v: type(v) is list and all(type(i) is int for i in v),
    "tuple[str, ...]": lambda v: type(v) is list and all(_FIELD_TYPES["str"](i) for i in v),
    "Recurrent | None": lambda v: v is None or type(v) is dict,
    "RopeScaling | None": lambda v: v is None or type(v) is dict,
    "Router": lambda v: type(v) is dict,
    "Latent | None": lambda v: v is None or type(v) is dict,
}


def _parse_fields(cls: type[Any], value: Json, name: str) -> Json:
    fields = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    value = {f.name: _json(f.default) for f in dataclasses.fields(cls) if "later" in f.metadata} | value
    for key in (*fields, *value):
        if key not in value or key not in fields:
            raise BadFile(f"{name}: {quoted(key)} is {'missing' if key in fields else 'unknown'}")
        if not _FIELD_TYPES[fields[key]](value[key]):
            raise BadFile(f"{name}: {key} is {quoted(value[key])}, not {fields[key]}")
    return {k: tuple(v) if type(v) is list else v for k, v in value.items()}


def _json(default: Any) -> Any:
    if type(default) is Router:
        return dataclasses.asdict(default)
    return list(default) if type(default) is tuple else default


def _parse_spec(value: Json, name: str) -> ModelSpec:
    fields = _parse_fields(ModelSpec, value, name)
    nested = {"rope_scaling": RopeScaling, "router": Router, "recurrent": Recurrent, "latent": Latent}
    for key, cls in nested.items():
        if fields[key] is not None:
            fields[key] = cls(**_parse_fields(cls, fields[key], f"{name}: {key}"))
    spec = ModelSpec(**fields)
    check_spec(spec, name)
    return spec


_TENSOR_KEYS = {"format": str, "shape": list, "offset": int, "bytes": int, "stride": int}


def _parse_tensors(
    value: Json,
    spec: ModelSpec,
    weight_format: str,
    predictor: Predictor | None,
    weights_bytes: int,
    name: str,
) -> dict[str, TensorInfo]:
    formats: dict[str, str] = {}
    for tensor, fields in value.items():
        if type(fields) is dict:
            formats |= named_formats(tensor, fields.get("format", ""), fields.get("down_format"))
    formats = {t: f for t, f in formats.items() if type(f) is str and f in quant.FORMATS}
    expected = expected_tensors(spec, weight_format, formats, *ranks_of(predictor))
    missing = [n for n, t in expected.items() if n not in value and not t.optional]
    if missing:
        raise BadFile(f"{name}: tensor {missing[0]} is missing")
    out: dict[str, TensorInfo] = {}
    for tensor, fields in value.items():
        where = f"{name}: tensor {quoted(tensor)}"
        tensor_spec = expected.get(tensor)
        if tensor_spec is None:
            raise BadFile(f"{where} does not belong to this model")
        if type(fields) is not dict:
            raise BadFile(f"{where} is not an object")
        _check_keys(fields, _TENSOR_KEYS | ({"down_format": str} if "down_format" in fields else {}), where)
        offset = _size(fields, "offset", weights_bytes, where)
        info = replace(place({tensor: tensor_spec})[0][tensor], offset=offset)
        if _tensor(info) | {"shape": list(info.shape)} != fields:
            raise BadFile(f"{where} is {quoted(fields)}, and the model needs {quoted(_tensor(info))}")
        out[tensor] = info
    if weight_format not in {out[n].format for n, t in expected.items() if n in out and not t.vector}:
        raise BadFile(f"{name}: weight_format is {quoted(weight_format)}, which no matrix has")
    _check_ranges(out, weights_bytes, name)
    return out


def ranks_of(p: Predictor | None) -> tuple[tuple[int, ...], bool]:
    """Return what `expected_tensors` takes of predictors: ranks, and whether every expert has its own."""
    return ((), False) if p is None else (p.ranks, p.each)


def _check_ranges(tensors: Mapping[str, TensorInfo], weights_bytes: int, name: str) -> None:
    end = 0
    for tensor, t in sorted(tensors.items(), key=lambda item: item[1].offset):
        if t.offset % ALIGN or t.offset < end:
            raise BadFile(f"{name}: tensor {tensor} at {t.offset} is misaligned or overlaps the one before")
        end = t.offset + t.bytes
    if weights_bytes != -(-end // ALIGN) * ALIGN:
        raise BadFile(f"{name}: weights_bytes is {weights_bytes}, and the tensors end at {end}")


def _parse_predictor(value: Json, spec: ModelSpec, name: str) -> Predictor:
    where = f"{name}: predictor"
    _check_keys(
        value, {"ranks": list, "threshold": float} | ({"each": bool} if "each" in value else {}), where
    )
    ranks = value["ranks"]
    if len(ranks) != spec.n_layers or any(type(r) is not int or not 1 <= r <= MAX_RANK for r in ranks):
        raise BadFile(f"{where}: ranks are not one from 1 to {MAX_RANK} for each of {spec.n_layers} layers")
    if not -1e6 <= value["threshold"] <= 1e6:
        raise BadFile(f"{where}: threshold is {value['threshold']}, not a number from -1e6 to 1e6")
    if not value.get("each", True) or ("each" in value and spec.n_experts == 1):
        raise BadFile(f"{where}: each is for mixtures, and true")
    return Predictor(tuple(ranks), value["threshold"], "each" in value)


def _parse_source(value: Json, name: str) -> dict[str, str]:
    _check_keys(value, {"kind": str, "name": str, "hash": str}, name)
    return dict(value)


def _parse_files(value: Json, name: str) -> dict[str, int]:
    for file in value:
        if file not in COPIED:
            raise BadFile(f"{name}: {quoted(file)} is not a file a pack holds")
        _size(value, file, 0xFFFFFFFF, name)
    return dict(value)
