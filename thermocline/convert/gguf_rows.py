"""Read a pack's rows from a GGUF. Formats that packs have are copied; others are converted and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thermocline import _native
from thermocline.convert.rows import TensorMapSource
from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import quoted
from thermocline.files.gguf import GGUF
from thermocline.files.gguf_header import Tensor
from thermocline.model import formats, gguf_blocks, quant
from thermocline.model.tensor_map import SourceSlice, TensorMap
from thermocline.model.tensors import TensorSpec, expected_tensors
from thermocline.pack.writer import check_range

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# For rows of a type that packs do not have: the smallest format that adds an RMS error of at most `ADDED`,
# of those of as many bits the closest. Measured on random codes, with the rounding of `quant` (iq1_s 2.5 %,
# iq1_m 6.1 %, iq2_* 2.9 to 6.3 %, iq3_* 5.2 %, nvfp4 4.3 %, tq1_0 none): these types' own errors are 10 to
# 45 %. q4_1 has both values of q1_0 but for the rounding of its scale.
NEAREST = {
    "iq1_s": "q4_0", "iq1_m": "q4_k", "iq2_xxs": "q4_k", "iq2_xs": "q4_k", "iq2_s": "q4_k",
    "iq3_xxs": "q4_k", "iq3_s": "q4_k", "tq1_0": "tq2_0", "q1_0": "q4_1", "nvfp4": "q5_k",
}  # fmt: skip
ADDED = 0.07
CONVERTED = formats.DEFAULT  # for all others
_MEASURED = 8  # the error of one conversion in so many is measured


def gguf_package(need: str) -> Any:
    """Return the optional gguf package. Raises Unsupported, saying that `need` needs it."""
    try:
        import gguf
    except ImportError:
        raise Unsupported(f"{need} needs the gguf package: pip install 'thermocline[gguf]'") from None
    return gguf


class _GGUFReader:
    """Read a GGUF's tensors through the interface of a checkpoint: rows along the first axis, as f32."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.name = gguf, str(gguf.path)

    def read_stored(self, name: str, first: int, last: int) -> F32:
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> F32:
        t = self.gguf.tensors[name]
        if len(t.shape) == 1:
            return self._decoded(name, self.gguf.read_rows(name, 0, 1))[0, first:last]
        return self._decoded(name, self.gguf.read_rows(name, first, last))

    def _decoded(self, name: str, rows: U8) -> F32:
        type = self.gguf.tensors[name].type
        return (
            gguf_blocks.dequantise(type, rows) if gguf_blocks.known(type) else decoded_by_package(type, rows)
        )

    def check(self, names: Iterable[str]) -> None:
        """Raise Unsupported for the first tensor that cannot be decoded here."""
        for name in names:
            t = self.gguf.tensors[name]
            if gguf_blocks.known(t.type):
                continue
            where = f"{self.name}: tensor {quoted(name)} is {t.type}, which"
            if t.type not in NEAREST:
                raise Unsupported(
                    f"{where} is not supported; requantise the model with llama-quantize, to {CONVERTED} for "
                    "example"
                )
            gguf_package(where)
            try:
                decoded_by_package(t.type, np.zeros((1, (t.end - t.start) // t.rows), np.uint8))
            except (KeyError, NotImplementedError):
                raise Unsupported(f"{where} this gguf package does not know: pip install -U gguf") from None


def decoded_by_package(type: str, rows: U8) -> F32:
    """Return the weights of rows [rows, bytes] of a type that only the gguf package decodes."""
    package = gguf_package(f"decoding {type}")
    with np.errstate(all="ignore"):  # scales may be NaN or infinite
        weights = package.quants.dequantize(rows, package.GGMLQuantizationType[type.upper()])
    return np.ascontiguousarray(weights, np.float32)


@dataclass(frozen=True)
class Cost:
    """The effect of an import: weights copied and converted, bits a weight before and after, added error."""

    copied: int
    converted: int
    bits_before: float
    bits_after: float
    rms_error: float  # of the converted weights, as a share of their RMS

    def __str__(self) -> str:
        if not self.converted:
            return f"all weights copied bit for bit ({self.bits_before:.2f} bits a weight)"
        share = self.converted / (self.copied + self.converted)
        return (
            f"{share:.0%} of the weights converted, the others copied: {self.bits_before:.2f} -> "
            f"{self.bits_after:.2f} bits a weight, added RMS error {self.rms_error:.2%}"
        )


def bad_scale(path: Path, tensor: str, row: int) -> BadFile:
    return BadFile(
        f"{path}: tensor {quoted(tensor)}, row {row}: a scale is not a finite number; the file is damaged: "
        "fetch it again"
    )


class GGUFSource(TensorMapSource):
    """An `EncodedSource` over a GGUF."""

    def __init__(self, gguf: GGUF, tensor_map: TensorMap, vectors: Mapping[str, F32]) -> None:
        """`vectors`: packed tensors that do not come from the GGUF, by name."""
        self._vectors = vectors
        rows = _GGUFReader(gguf)
        super().__init__(
            str(gguf.path), gguf.tensors, dict.fromkeys(gguf.tensors, rows), tensor_map, "its metadata"
        )
        rows.check(sorted(set(self._names.values())))
        self._gguf, self._calls, self._noise, self._power = gguf, 0, 0.0, 0.0
        self._weights = {True: 0, False: 0}  # copied, converted
        self._bits = [0.0, 0.0]  # before, after

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        found = self._vectors.get(name)
        return super().__call__(name, first, last) if found is None else found[first:last]

    def stored(self, part: str, first: int, last: int) -> list[Tensor]:
        """Return the GGUF's tensors that rows [first, last) of one part of a packed tensor are made of."""
        pieces = [p.tensor for p, _, _ in self.spans(part, first, last)]
        return [self._gguf.tensors[self._names[name]] for name in pieces if name is not None]

    def transposed(self, part: str) -> bool:
        """Return whether a part's rows are columns in the file, whose blocks can then not be copied."""
        return any(p.transposed for p in self._tensor_map.tensors[part])

    def tensor(self, piece: SourceSlice) -> Tensor:
        """Return the GGUF's tensor that a slice is of."""
        return self._gguf.tensors[self.name_of(piece)]

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8 | None:
        rows = self._copy(name, format, first, last)
        copied = rows is not None
        if rows is None:
            rows = self._convert(name, format, first, last)
        n = rows.size // quant.FORMATS[format].block_bytes * quant.FORMATS[format].block
        behind = self.stored(name, first, last)
        self._weights[copied] += n
        self._bits[0] += (
            8 * n * sum(t.end - t.start for t in behind) / sum(math.prod(t.shape) for t in behind)
        )
        self._bits[1] += 8 * rows.size
        return rows

    def _copy(self, name: str, format: str, first: int, last: int) -> U8 | None:
        """Return rows as the file has them, or None if they cannot be copied."""
        spans = list(self.spans(name, first, last))
        if any(p.tensor is None or p.transposed or p.plus for p, _, _ in spans):
            return None
        if {self._gguf.tensors[self._names[str(p.tensor)]].type for p, _, _ in spans} != {format}:
            return None
        parts = [self._planar(self.name_of(p), format, r) for p, a, b in spans for r in p.ranges(a, b)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _planar(self, name: str, format: str, r: range) -> U8:
        """Return rows of a tensor as a pack has them. BadFile for a scale that is no number."""
        low, high = min(r[0], r[-1]), max(r[0], r[-1]) + 1
        rows = np.ascontiguousarray(self._gguf.read_rows(name, low, high)[:: r.step])
        out = np.empty_like(rows)
        bad = _native.arranged(format, rows, out)
        if bad is not None:
            raise bad_scale(self._gguf.where[name].path, name, r[bad])
        return out

    def _convert(self, name: str, format: str, first: int, last: int) -> U8:
        x = self(name, first, last)
        check_range(x, format, name)
        rows = quant.encode(format, x)
        if self._calls % _MEASURED == 0:
            with np.errstate(all="ignore"):
                difference = quant.decode(format, rows, x.shape[1]) - x
                self._noise += float(np.square(difference, dtype=np.float64).sum())
                self._power += float(np.square(x, dtype=np.float64).sum())
        self._calls += 1
        return rows

    @property
    def cost(self) -> Cost:
        n = max(1, sum(self._weights.values()))
        error = math.sqrt(self._noise / self._power) if self._power else 0.0
        return Cost(self._weights[True], self._weights[False], self._bits[0] / n, self._bits[1] / n, error)


def formats_of(source: GGUFSource, spec: ModelSpec, ranks: Sequence[int] = ()) -> tuple[str, dict[str, str]]:
    """Choose formats for packing a GGUF: (the format of most weights, formats for `expected_tensors`).

    Rows keep the file's format if packs have it; else they get the nearest. A matrix that several tensors of
    the file make up gets the finest of their formats. A bundle's down rows are columns in most files, so that
    their blocks are lost: they get the finest format of their layer's neurons.
    """
    chosen, weights = dict[str, str](), Counter[str]()
    for name, t in expected_tensors(spec, "f32", None, ranks).items():
        if t.vector or name == "pos_embed.weight" or t.role == "router":
            continue
        for unit, part, rows in _units(name, t, spec):
            types = {_format_for(x.type) for x in source.stored(part, rows.start, rows.stop)}
            if t.role == "bundle" and source.transposed(part):
                layer = name.removesuffix(".bundle")
                beside = (chosen.get(n) for n in (f"{layer}.gate.weight", f"{layer}.up"))
                types |= {format for format in beside if format is not None}
            chosen[unit] = _finest(types, t.columns)
            weights[chosen[unit]] += len(rows) * t.columns
    main = weights.most_common(1)[0][0]
    return main, chosen


def _units(name: str, t: TensorSpec, spec: ModelSpec) -> Iterator[tuple[str, str, range]]:
    """Yield what of a packed tensor has a format of its own: its name there, its part, the part's rows."""
    if name.endswith(".qkv.weight") and t.role == "attention":
        shape = spec.attention(int(name.split(".")[1]))
        assert shape is not None, "no attention in this layer"
        q, kv = shape.context, shape.kv_heads * shape.head_dim
        borders = (0, q, q + kv, q + 2 * kv)
        for n, first, last in zip(shape.projections, borders, borders[1:], strict=False):
            yield name.replace(".qkv.", f".{n}."), name, range(first, last)
    elif t.role == "bundle":
        yield from ((part, part, range(t.rows)) for part in t.parts)
    else:
        yield name, t.parts[0], range(t.rows)


def _format_for(type: str) -> str:
    return type if type in quant.FORMATS else NEAREST.get(type, CONVERTED)


def _finest(types: set[str], columns: int) -> str:
    if types == {"f16", "bf16"}:
        return "f32"  # neither holds the other
    return formats.fitting(max(types, key=lambda t: formats.FORMATS[t].bits), columns)
