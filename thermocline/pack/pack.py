"""Pack directories: open, verify and describe them. `writer.py` writes them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile
from thermocline.files.bounded import FileState, Json, OpenFile, file_state, open_regular, read_at, read_small
from thermocline.files.small_files import FilesOfDirectory
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import TensorInfo, TensorSpec
from thermocline.pack import blocks, sidecar
from thermocline.pack.manifest import Manifest, Predictor, parse_manifest, version_of
from thermocline.pack.stored_model import FileRows, Run, StoredModel, tensor_specs
from thermocline.pack.stored_model import Progress as Progress

U32 = NDArray[np.uint32]

MAX_COPIED_BYTES = 64 << 20
MAX_MANIFEST_BYTES = 4 << 20
_STEP_BYTES = 4 << 20  # read and checked at a time
NEURON_ROLES = ("gate", "up", "down", "bundle")
ROLES = (
    "embed",
    "attention",
    "mixer",
    "norm",
    "router",
    *NEURON_ROLES,
    "shared",
    "inputs",
    "head",
    "predictor",
)


@dataclass(frozen=True)
class Pack:
    """An opened pack, a `StoredModel`. All of it is checked but the contents of weights.bin.

    Those are checked when they are read.
    """

    path: Path
    spec: ModelSpec
    weight_format: str
    tensors: dict[str, TensorInfo]
    block_bytes: int
    weights_bytes: int
    checksums: U32  # one per block of weights.bin
    source: dict[str, str]
    files: dict[str, int]
    predictor: Predictor | None = None
    state: FileState = (0, 0, 0, 0)  # of weights.bin, when it was opened

    @property
    def weights_path(self) -> Path:
        return self.path / "weights.bin"

    @property
    def data_path(self) -> Path:
        return self.weights_path

    @property
    def small_files(self) -> FilesOfDirectory:
        return FilesOfDirectory(self.path)

    @property
    def stamp(self) -> tuple[str, str]:
        return "pack", sidecar.stamp(self.path)

    def ranges(self, without: Collection[str] = ()) -> list[tuple[int, int]]:
        return blocks.block_ranges(self, without)

    def begin_load(
        self,
        arena: _native.Arena,
        grouped: Collection[str] = (),
        group: int = 1,
        without: Collection[str] = (),
    ) -> blocks.BlockReading:
        return blocks.BlockReading(self, arena, [(begin, end, begin) for begin, end in self.ranges(without)])

    def has_rows(self, name: str) -> bool:
        return name in self.tensors

    def rows_of(self, name: str) -> blocks.BlockRows:
        return blocks.BlockRows(self, name)

    def read_runs(
        self,
        arena: _native.Arena,
        runs: Sequence[Run],
        progress: Progress | None = None,
        grouped: Collection[str] = (),
        group: int = 1,
    ) -> frozenset[str]:
        blocks.read_runs(self, arena, runs, progress)
        return blocks.BlockReading.grouped

    @property
    def parts(self) -> tuple[tuple[Path, FileState]]:
        return ((self.weights_path, self.state),)

    def file_rows(self, name: str, first: int, rows: int, to: int) -> list[FileRows]:
        t = self.tensors[name]
        at = t.offset + first * t.stride
        if name.endswith(".bundle"):  # records go to their place as they are, whatever they hold
            return [FileRows(name, "f32", t.stride // 4, 0, at, rows, to, t.stride)]
        return [FileRows(name, t.format, t.shape[-1], 0, at, rows, to, t.stride)]

    def tensor_specs(self, *, absent: bool = False) -> dict[str, TensorSpec]:
        """Return what the spec and the formats imply of each tensor; `absent`: of optional ones, too."""
        return tensor_specs(self, absent=absent)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Pack:
        """Open and check a pack. Raises BadFile, IOFailure or Unsupported, naming the file and field."""
        path = Path(directory)
        m = parse_manifest(read_small(path / "pack.json", MAX_MANIFEST_BYTES), str(path / "pack.json"))
        with OpenFile(path / "weights.bin") as weights:
            size, state = weights.size, file_state(weights.stat())
        if size != m.weights_bytes:
            raise BadFile(
                f"{path / 'weights.bin'}: has {size} bytes, pack.json says {m.weights_bytes}: truncated? "
                "Pack the model again"
            )
        for file, crc in m.files.items():
            if _native.crc32c(read_small(path / file, MAX_COPIED_BYTES)) != crc:
                raise BadFile(f"{path / file}: checksum mismatch: edited or damaged; pack the model again")
        return cls(
            path=path,
            spec=m.spec,
            weight_format=m.weight_format,
            tensors=m.tensors,
            block_bytes=m.block_bytes,
            weights_bytes=m.weights_bytes,
            checksums=_read_checksums(path / "checksums.bin", m),
            source=m.source,
            files=m.files,
            predictor=m.predictor,
            state=state,
        )


def _read_checksums(path: Path, m: Manifest) -> U32:
    expected = 4 * -(-m.weights_bytes // m.block_bytes)
    data = read_small(path, expected)
    if len(data) != expected or _native.crc32c(data) != m.checksums_crc32c:
        raise BadFile(f"{path}: damaged: not the checksums pack.json was written with; pack the model again")
    return np.frombuffer(data, "<u4")


def read_tensor(pack: Pack, name: str) -> NDArray[np.uint8]:
    """Read a tensor's bytes [rows, stride] from weights.bin, checked. Raises BadFile or IOFailure."""
    info, block = pack.tensors[name], pack.block_bytes
    first, last = info.offset // block, -(-(info.offset + info.bytes) // block)
    fd, size = open_regular(pack.weights_path)
    try:
        data = read_at(fd, first * block, min(last * block, size) - first * block, pack.weights_path)
    finally:
        os.close(fd)
    for b in range(first, last):
        part = data[(b - first) * block : (b - first + 1) * block]
        if _native.crc32c(part) != int(pack.checksums[b]):
            raise BadFile(_damage(pack, b))
    return data[info.offset - first * block :][: info.bytes].reshape(-1, info.stride)


def verify(pack: Pack, progress: Progress | None = None) -> list[str]:
    """Read all of weights.bin. Return one sentence for each damaged block, naming the tensors in it."""
    fd, size = open_regular(pack.weights_path)
    problems = []
    try:
        for start in range(0, size, _STEP_BYTES):
            data = read_at(fd, start, min(_STEP_BYTES, size - start), pack.weights_path)
            for at in range(0, len(data), pack.block_bytes):
                block = (start + at) // pack.block_bytes
                if _native.crc32c(data[at : at + pack.block_bytes]) != int(pack.checksums[block]):
                    problems.append(_damage(pack, block))
            if progress:
                progress(start + len(data), size)
    finally:
        os.close(fd)
    return problems


def _damage(pack: Pack, block: int) -> str:
    begin, end = block * pack.block_bytes, (block + 1) * pack.block_bytes
    inside = [n for n, t in pack.tensors.items() if t.offset < end and begin < t.offset + t.bytes]
    where = ", ".join(inside) or "padding"
    return f"{pack.weights_path}: block {block} (bytes {begin} to {end}) is damaged: {where}"


def parts_of(model: StoredModel) -> dict[str, dict[str, int]]:
    """Return the parameters and bytes of each role that a model has tensors of."""
    specs = tensor_specs(model).values()
    return {
        role: {
            "parameters": sum(t.parameters for t in specs if t.role == role and t.format != "i32"),
            "bytes": sum(t.bytes for t in specs if t.role == role),
        }
        for role in ROLES
        if any(t.role == role for t in specs)
    }


def planting(source: dict[str, str]) -> str | None:
    """Say how kind the neurons and routers of a synthetic model are; None for another source."""
    if source["kind"] != "random":
        return None
    name = f"{source['name']} "
    kinds = ["random weights"]
    if " active " in name:
        kinds.append(f"neurons {'planted as trained' if ' activity trained ' in name else 'planted, easy'}")
    if " routing " in name:
        kinds.append("routing planted as trained")
    return "; ".join(kinds)


def inspect(pack: Pack) -> Json:
    """Describe a pack, ready for JSON: spec, parameters and bytes by role, bytes per token, file sizes."""
    specs, parts = pack.tensor_specs(), parts_of(pack)
    files = ("pack.json", "weights.bin", "checksums.bin", *pack.files)
    return {
        "path": str(pack.path),
        "version": version_of(pack.tensors),
        "weight_format": pack.weight_format,
        "source": pack.source,
        "spec": dataclasses.asdict(pack.spec),
        "predictor": None if pack.predictor is None else dataclasses.asdict(pack.predictor),
        "parts": parts,
        "formats": _by_format(specs),
        "parameters": sum(p["parameters"] for p in parts.values()),
        "bytes_per_token_dense": _bytes_per_token(pack.spec, specs),
        "files": {name: (pack.path / name).stat().st_size for name in files},
    }


def _by_format(tensor_specs: Mapping[str, TensorSpec]) -> dict[str, Json]:
    """Return the tensors, parameters and bytes of each format, the format of most bytes first.

    A bundle's two rows are counted each; what lies between and behind them counts as the last one's.
    """
    found: dict[str, Json] = {}
    for t in tensor_specs.values():
        ends = [*(p.at for p in t.layout[1:]), t.stride]
        for part, end in zip(t.layout, ends, strict=True):
            sums = found.setdefault(part.format, {"tensors": 0, "parameters": 0, "bytes": 0})
            sums["tensors"] += 1
            sums["parameters"] += t.rows * t.columns if t.format != "i32" else 0
            sums["bytes"] += t.rows * (end - part.at)
    return dict(sorted(found.items(), key=lambda x: -x[1]["bytes"]))


def _bytes_per_token(spec: ModelSpec, tensor_specs: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of weights that a decoded token reads if no neuron is skipped.

    A token reads one row of the embeddings, and only the experts that it chooses.
    """
    total = 0
    for name, t in tensor_specs.items():
        if t.role == "predictor":
            continue
        payload = t.payload if t.format != "i32" else 0
        rows = t.rows
        if t.role in NEURON_ROLES:
            experts, active, _ = spec.ffn(int(name.split(".")[1]))
            rows = rows * active // experts
        total += payload if t.role == "embed" else payload * rows
        if name == "embed.weight" and spec.tied_head:
            total += payload * t.rows  # as the head
    return total
