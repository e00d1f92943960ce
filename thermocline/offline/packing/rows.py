"""Rows of one pack for another: decoded, and encoded anew by the search."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.model import quant
from thermocline.model.tensors import QKV, bundle_parts
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.stored_model import tensor_specs
from thermocline.quantise import encoder
from thermocline.quantise.feedback import Feedback
from thermocline.quantise.importance import Importance
from thermocline.quantise.moments import Moments, reader_of

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass
class RoundingError:
    """The squares of errors and of weights, summed up."""

    error: float = 0.0
    power: float = 0.0

    def add(self, was: F32, now: F32) -> None:
        self.error += float(np.square(now - was, dtype=np.float64).sum())
        self.power += float(np.square(was, dtype=np.float64).sum())

    @property
    def rms(self) -> float:
        """Return the root of the mean square of errors, as a share of the weights'."""
        return float(np.sqrt(self.error / self.power)) if self.power else 0.0


class PackRows:
    """A `TensorSource` over a pack. One tensor is in memory at a time."""

    def __init__(self, pack: Pack) -> None:
        self.pack = pack
        self._vectors = {name for name, t in tensor_specs(pack).items() if t.vector}
        self._held: tuple[str, U8] = ("", np.empty((0, 0), np.uint8))

    def __call__(self, name: str, first: int, last: int, /) -> NDArray[Any]:
        if name in self._vectors:
            values = self._tensor(name).reshape(-1)
            return values.view("<i4" if self.pack.tensors[name].format == "i32" else "<f4")[first:last]
        pieces = self.stored(name, first, last)
        x = [quant.decode(format, rows, self._columns(name)) for format, rows in pieces]
        return x[0] if len(x) == 1 else np.concatenate(x)

    def stored(self, name: str, first: int, last: int) -> list[tuple[str, U8]]:
        """Return rows as the pack has them, with their format; those of q, k and v may be apart."""
        layer, _, part = name.rpartition(".")
        if part in ("up", "down"):
            up, down = bundle_parts(self.pack.tensors[f"{layer}.bundle"], self.pack.spec)
            where = down if part == "down" or up is None else up
            rows = self._tensor(f"{layer}.bundle")[first:last, where.at :]
            return [(where.format, _narrow(rows, where.format, self.pack.spec.dim))]
        out, before, held = [], 0, self.pack.tensors
        apart = (name.replace(".qkv.", f".{n}.") for n in QKV)
        for tensor in [name] if name in held else [n for n in apart if n in held]:
            info = held[tensor]
            height = math.prod(info.shape[:-1])
            a, b = max(first - before, 0), min(last - before, height)
            if a < b:
                out.append((info.format, _narrow(self._tensor(tensor)[a:b], info.format, info.shape[-1])))
            before += height
        return out

    def _tensor(self, name: str) -> U8:
        if self._held[0] != name:
            self._held = ("", np.empty((0, 0), np.uint8))  # free one tensor before reading the next
            self._held = (name, read_tensor(self.pack, name))
        return self._held[1]

    def _columns(self, name: str) -> int:
        found = self.pack.tensors.get(name)  # else rows of bundles, or of q, k and v
        return self.pack.spec.dim if found is None else found.shape[-1]


def _narrow(rows: U8, format: str, columns: int) -> U8:
    """Return rows without what lies behind their weights."""
    return np.ascontiguousarray(rows[:, : quant.row_bytes(format, columns)])


@dataclass
class QuantisedRows:
    """An `EncodedSource` that searches for the bytes of a pack's rows, and sums up their errors.

    importance    of the columns of inputs; may lack some
    moments       of the inputs, with products where errors are to be evened out
    """

    rows: PackRows
    importance: Importance
    moments: Moments
    threads: int
    errors: dict[str, RoundingError] = field(default_factory=dict)  # by part: qkv, gate, down, ...
    _feedback: dict[tuple[str, int], Feedback | None] = field(default_factory=dict)  # of one input's experts
    _down: tuple[str, F32, U8] | None = None

    def __call__(self, name: str, first: int, last: int, /) -> NDArray[Any]:
        return self.rows(name, first, last)

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8:
        stored = self.rows.stored(name, first, last)
        if all(was == format for was, _ in stored):
            return np.concatenate([rows for _, rows in stored])
        if re.fullmatch(r"layers\.\d+\.down", name):
            was, made = self._transposed(name, format)
            return self._counted(name, format, was[first:last], made[first:last])
        x = self._decoded(name, first, last)
        out, height = [], self._rows_of_expert(name)
        at = first
        while at < last:
            end = min(last, (at // height + 1) * height)
            importance, feedback = self._input(name, at // height)
            part = x[at - first : end - first]
            out.append(encoder.encode(format, part, importance, feedback, threads=self.threads))
            at = end
        return self._counted(name, format, x, np.concatenate(out))

    def _decoded(self, name: str, first: int, last: int) -> F32:
        x: F32 = self.rows(name, first, last)
        encoder.check_finite(x, name, first)
        return x

    def _rows_of_expert(self, name: str) -> int:
        s = self.rows.pack.spec
        part = re.sub(r"^layers\.\d+\.|\.weight$", "", name)
        if s.n_experts > 1 and part in ("gate", "up", "down"):
            return s.ffn(int(name.split(".")[1])).width if s.sparse or part != "down" else s.dim
        return 1 << 62

    def _input(self, name: str, expert: int) -> tuple[F32 | None, Feedback | None]:
        s = self.rows.pack.spec
        reader = reader_of(name) if s.tied_head or name != "embed.weight" else None
        if reader is None:
            return None, None
        key, known = (reader, expert), self.importance.get(reader)
        if key not in self._feedback:
            if not any(r == reader for r, _ in self._feedback):
                self._feedback.clear()  # it is large
            found = self.moments.get(reader)
            self._feedback[key] = None if found is None else Feedback.of(found[expert])
        return (None if known is None else known[expert]), self._feedback[key]

    def _transposed(self, name: str, format: str) -> tuple[F32, U8]:
        """Return all rows of a layer's down in bundles, decoded and encoded."""
        if self._down is None or self._down[0] != name:
            self._down = None
            s = self.rows.pack.spec
            x = self._decoded(name, 0, s.n_experts * s.ffn_dim)
            made = []
            for e in range(s.n_experts):
                own, feedback = x[e * s.ffn_dim : (e + 1) * s.ffn_dim], self._input(name, e)[1]
                made.append(
                    encoder.encode(format, own, threads=self.threads)
                    if feedback is None
                    else encoder.encode_transposed(format, own, feedback, threads=self.threads)
                )
            self._down = name, x, np.concatenate(made)
        return self._down[1:]

    def _counted(self, name: str, format: str, was: F32, made: U8) -> U8:
        part = name.removesuffix(".weight").rpartition(".")[2]
        error = self.errors.setdefault(part, RoundingError())
        error.add(was, quant.decode(format, made, was.shape[1]))
        return made
