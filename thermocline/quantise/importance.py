"""Files of importances: the mean square of each column of the inputs of a model's matrices.

Ours is a safetensors file; llama.cpp's imatrix files (GGUF, or the older .dat) are read too. Importances
are by input (see `moments`), each [experts, columns].
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile
from thermocline.files.bounded import open_regular, quoted, read_small
from thermocline.files.gguf import GGUF
from thermocline.files.safetensors import SafeTensors
from thermocline.files.whole import replacing
from thermocline.model.spec import RECURRENT, ModelSpec
from thermocline.quantise.moments import HEAD, Moments

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Importance = dict[str, F32]

KEY, KIND = "thermocline", "importance 1"
MAX_BYTES = 1 << 30
_READERS = {
    "attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "attn_qkv": "qkv", "attn_output": "attn_out",
    "ffn_gate": "ffn", "ffn_up": "ffn", "ffn_down": "down", "ssm_in": "mixer", "ssm_out": "mixer_out",
}  # fmt: skip


def of_moments(moments: Moments) -> Importance:
    """Return the importances of measured inputs."""
    return {name: np.stack([m.importance for m in found]) for name, found in moments.items()}


def check(importance: Mapping[str, F32], spec: ModelSpec, where: str) -> None:
    """Raise BadFile unless these are importances of this model, finite and not negative."""
    shapes = {HEAD: (1, spec.embed_dim or spec.dim)}
    for i in range(spec.n_layers):
        experts, _, width = spec.ffn(i)
        shapes[f"layers.{i}.qkv"] = (1, spec.dim)
        if (shape := spec.attention(i)) is not None:
            shapes[f"layers.{i}.attn_out"] = (1, shape.context)
        if (out := spec.mixer_matrices(i).get("mixer.out.weight")) is not None:
            shapes |= {f"layers.{i}.mixer": (1, spec.dim), f"layers.{i}.mixer_out": (1, out[1])}
        shapes[f"layers.{i}.ffn"] = (experts, spec.dim)
        shapes[f"layers.{i}.down"] = (experts, width)
    for name, values in importance.items():
        if values.shape != shapes.get(name):
            raise BadFile(
                f"{where}: {quoted(name)} is {values.shape}, the model needs {shapes.get(name)}; "
                "measure the importance with this model"
            )
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise BadFile(f"{where}: {quoted(name)} has values that are negative or not finite: damaged")
    if not any(name.startswith("layers.") for name in importance):
        raise BadFile(f"{where}: has no importance of any of the model's layers")


def write(path: Path, importance: Mapping[str, F32]) -> None:
    """Write a file of importances, whole or not at all. Raises IOFailure."""
    header: dict[str, object] = {"__metadata__": {KEY: KIND}}
    at = 0
    for name, values in importance.items():
        end = at + 4 * values.size
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as tmp, open(tmp, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for values in importance.values():
            out.write(np.ascontiguousarray(values, "<f4").tobytes())


def read(path: Path, spec: ModelSpec) -> Importance:
    """Read a file of importances of this model, in any of three forms. Raises BadFile or IOFailure."""
    fd, size = open_regular(path)
    with open(fd, "rb") as f:
        head = f.read(9)
    if head[:4] == b"GGUF":
        found = _of_gguf(path)
    elif head[8:9] == b"{":
        found = _of_safetensors(path)
    else:
        found = _of_dat(path, read_small(path, min(size, MAX_BYTES)), spec)
    for i in range(spec.n_layers):
        if spec.mixer(i) in RECURRENT and f"layers.{i}.qkv" in found:  # its q, k and v have attention's name
            found[f"layers.{i}.mixer"] = found.pop(f"layers.{i}.qkv")
    check(found, spec, str(path))
    return found


def _of_safetensors(path: Path) -> Importance:
    file = SafeTensors(path)
    try:
        if file.metadata.get(KEY) != KIND:
            raise BadFile(
                f"{path}: not a file of importances; `thermocline pack --importance-out` writes one"
            )
        out = {}
        for name, entry in file.tensors.items():
            if entry.dtype != "F32" or len(entry.shape) != 2:
                raise BadFile(
                    f"{path}: {quoted(name)} is {entry.dtype} {quoted(entry.shape)}, not a matrix of F32"
                )
            out[name] = file.read_rows(name, 0, entry.shape[0])
        return out
    finally:
        file.close()


def _of_gguf(path: Path) -> Importance:
    """Sums of squares `NAME.in_sum2` and numbers of rows `NAME.counts`, of each expert."""
    out: Importance = {}
    with GGUF(path) as gguf:
        for name, tensor in gguf.tensors.items():
            reader = _reader(name.removesuffix(".in_sum2"))
            if not name.endswith(".in_sum2") or reader is None:
                continue
            beside = f"{name.removesuffix('.in_sum2')}.counts"
            counts = gguf.tensors.get(beside)
            if counts is None or tensor.type != "f32" or counts.type != "f32":
                raise BadFile(
                    f"{path}: {quoted(name)} has no counts beside it, or is not f32: not an imatrix"
                )
            sums = _all_rows(gguf, name)
            n = _all_rows(gguf, beside).reshape(-1, 1)
            if len(n) != len(sums):
                raise BadFile(f"{path}: {quoted(name)} has {len(sums)} rows and {len(n)} counts")
            out.setdefault(reader, np.where(n > 0, sums / np.maximum(n, 1), 1).astype(np.float32))
    return out


def _all_rows(gguf: GGUF, name: str) -> F32:
    rows = gguf.read_rows(name, 0, gguf.tensors[name].rows)
    return np.ascontiguousarray(rows).view("<f4").reshape(len(rows), -1)


def _of_dat(path: Path, data: bytes, spec: ModelSpec) -> Importance:
    """Entries of (bytes of the name, name, calls, number of values, values: means times calls)."""
    at, out = 0, Importance()

    def take(n: int) -> bytes:
        nonlocal at
        if n < 0 or at + n > len(data):
            raise BadFile(f"{path}: ends early, or is not a file of importances")
        at += n
        return data[at - n : at]

    def number() -> int:
        return int.from_bytes(take(4), "little", signed=True)

    for _ in range(number()):
        name = take(number()).decode(errors="replace")
        calls, n = number(), number()
        values = np.frombuffer(take(4 * n), "<f4") / np.float32(max(1, calls))
        reader = _reader(name)
        if reader is None:
            continue
        of_ffn = reader.endswith((".ffn", ".down"))
        experts = spec.ffn(int(reader.split(".")[1])).experts if of_ffn else 1
        if n % experts:
            raise BadFile(f"{path}: {quoted(name)} has {n} values for {experts} experts")
        out.setdefault(reader, values.reshape(experts, -1).astype(np.float32))
    return out


def _reader(name: str) -> str | None:
    """Return the input behind a GGUF's tensor; None if it is of no interest."""
    if name == "output.weight":
        return HEAD
    found = re.fullmatch(r"blk\.(\d+)\.(\w+?)(_exps)?\.weight", name)
    part = None if found is None else _READERS.get(found[2])
    return None if found is None or part is None else f"layers.{int(found[1])}.{part}"
