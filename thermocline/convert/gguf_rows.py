"""Read a pack's rows from a GGUF. Formats that packs have are copied; others are converted and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.rows import TensorMapSource
from thermocline.errors import Unsupported
from thermocline.files.bounded import quoted
from thermocline.files.gguf import GGUF
from thermocline.files.gguf_header import Tensor
from thermocline.model import formats, gguf_blocks, quant
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import SourceSlice, TensorMap
from thermocline.model.tensors import expected_tensors
from thermocline.pack.writer import check_range

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

CONVERTED = formats.DEFAULT  # for rows of a format that packs do not have
_MEASURED = 8  # the error of one conversion in so many is measured


class _GGUFReader:
    """Read a GGUF's tensors through the interface of a checkpoint: rows along the first axis, as f32."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.name = gguf, str(gguf.path)

    def read_stored(self, name: str, first: int, last: int) -> F32:
        return self.read_rows(name, first, last)

    def read_rows(self, name: str, first: int, last: int) -> F32:
        t = self.gguf.tensors[name]
        if not gguf_blocks.known(t.type):
            raise Unsupported(
                f"{self.name}: tensor {quoted(name)} is {t.type}, which is not supported; requantise the "
                f"model with llama-quantize, to {CONVERTED} for example"
            )
        if len(t.shape) == 1:
            return gguf_blocks.dequantise(t.type, self.gguf.read_rows(name, 0, 1))[0, first:last]
        return gguf_blocks.dequantise(t.type, self.gguf.read_rows(name, first, last))


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


class GGUFSource(TensorMapSource):
    """An `EncodedSource` over a GGUF."""

    def __init__(self, gguf: GGUF, tensor_map: TensorMap, vectors: Mapping[str, F32]) -> None:
        """`vectors`: packed tensors that do not come from the GGUF, by name."""
        self._vectors = vectors
        rows = _GGUFReader(gguf)
        super().__init__(
            str(gguf.path), gguf.tensors, dict.fromkeys(gguf.tensors, rows), tensor_map, "its metadata"
        )
        self._gguf, self._calls, self._noise, self._power = gguf, 0, 0.0, 0.0
        self._weights = {True: 0, False: 0}  # copied, converted
        self._bits = [0.0, 0.0]  # before, after

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        found = self._vectors.get(name)
        return super().__call__(name, first, last) if found is None else found[first:last]

    def stored(self, part: str) -> list[Tensor]:
        """Return the GGUF's tensors that one part of a packed tensor is made of."""
        pieces = self._tensor_map.tensors[part]
        return [self._gguf.tensors[self._names[p.tensor]] for p in pieces if p.tensor is not None]

    def tensor(self, piece: SourceSlice) -> Tensor:
        """Return the GGUF's tensor that a slice is of."""
        return self._gguf.tensors[self.name_of(piece)]

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8 | None:
        rows = self._copy(name, format, first, last)
        copied = rows is not None
        if rows is None:
            rows = self._convert(name, format, first, last)
        n = rows.size // quant.FORMATS[format].block_bytes * quant.FORMATS[format].block
        behind = self.stored(name)
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
        parts = []
        for piece, a, b in spans:
            for r in piece.ranges(a, b):
                low, high = min(r[0], r[-1]), max(r[0], r[-1]) + 1
                parts.append(self._gguf.read_rows(self._names[str(piece.tensor)], low, high)[:: r.step])
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return quant.from_gguf(format, np.ascontiguousarray(rows))

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
    """Choose formats for packing a GGUF: (the format of most weights, {packed tensor: its format}).

    A tensor keeps the file's format if packs have it; else it gets `CONVERTED`. A packed tensor whose parts
    differ gets the finest of their formats.
    """
    chosen, weights = dict[str, str](), Counter[str]()
    every = expected_tensors(spec, "f32", None, ranks)
    tensor_specs = {
        n: t for n, t in every.items() if not t.vector and n != "pos_embed.weight" and t.role != "router"
    }
    for name, tensor_spec in tensor_specs.items():
        parts = list(tensor_spec.parts)
        if tensor_spec.role == "gate":  # one format with the rows that are computed beside it
            beside = (name.replace("gate", "up"), name.replace("gate.weight", "bundle"))
            parts += [p for n in beside if n in tensor_specs for p in tensor_specs[n].parts]
        types = {t.type if t.type in quant.FORMATS else CONVERTED for p in parts for t in source.stored(p)}
        chosen[name] = _finest(types, tensor_spec.columns)
        weights[chosen[name]] += tensor_spec.parameters
    main = weights.most_common(1)[0][0]
    return main, chosen


def _finest(types: set[str], columns: int) -> str:
    if types == {"f16", "bf16"}:
        return "f32"  # neither holds the other
    return formats.fitting(max(types, key=lambda t: formats.FORMATS[t].bits), columns)
