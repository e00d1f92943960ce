"""Random packs with a real model's shape: quantised rows made directly, at the speed of the disk.

Shapes are `bundled/shapes.json`, config.json files read as any other. Knows tensor names
(docs/internals/pack.md); must not know families or kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.convert.synthetic_weights import ACTIVE, BLOCK, F32, LOGIT_SD, Plan, Planting
from thermocline.errors import Unsupported, UsageError
from thermocline.files.bounded import parse_json, read_small
from thermocline.model import quant
from thermocline.model.families import MAX_CONFIG_BYTES, parse_config, read_config_json
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import Mapping
from thermocline.model.tensors import expected_tensors
from thermocline.pack.pack import Progress
from thermocline.pack.writer import write_pack

U8 = NDArray[np.uint8]

SHAPES = Path(__file__).parents[1] / "bundled" / "shapes.json"
TRUTH = "synth.npz"  # beside the pack's own files
_VECTOR_SD = 0.05  # norm weights 1 +- this, biases 0 +- this
_SCALE_SPREAD = 0.1  # scales of blocks differ by up to this


def shapes() -> dict[str, Any]:
    """{name: config.json}"""
    return parse_json(read_small(SHAPES, MAX_CONFIG_BYTES), str(SHAPES))


def read_shape(shape: str, activation: str | None = None) -> tuple[str, ModelSpec, Mapping]:
    """(name, spec, tensors) of a known shape or a config.json. Raises the reader's errors, or UsageError."""
    known = shapes()
    if shape in known:
        return shape, *parse_config(known[shape], None, shape, activation)
    path = Path(shape)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        raise UsageError(f"{shape}: neither a config.json nor a known shape; known: {', '.join(known)}")
    name = os.path.basename(os.path.dirname(os.path.realpath(path)))
    return name, *parse_config(read_config_json(path), None, str(path), activation)


@dataclasses.dataclass(frozen=True)
class Model:
    """A random model, all but written: what it is called, its plan, which optional tensors it has."""

    label: str
    plan: Plan
    optional: tuple[str, ...]

    @classmethod
    def of(
        cls,
        shape: str,
        seed: int,
        active: float | None,
        skew: float,
        rank: int,
        hottest_first: bool = False,
        activation: str | None = None,
    ) -> Model:
        """`active` None: `ACTIVE` for ReLU models, none for others; a number makes any model a ReLU model.

        Raises what `read_shape` and `Plan.of` raise.
        """
        name, spec, mapping = read_shape(shape, activation)
        if spec.embed_dim is not None:
            raise Unsupported(f"{name}: random models have embeddings as wide as themselves")
        if active is not None and not spec.sparse:
            spec = dataclasses.replace(spec, activation="relu")
        chosen = ACTIVE if active is None else active
        planting = Planting(chosen, skew, rank, hottest_first) if spec.sparse else None
        known = expected_tensors(spec, "f32")
        optional = tuple(n for n in mapping.tensors if n in known and known[n].optional)
        said = {"seed": seed, **(dataclasses.asdict(planting) if planting else {})}
        if not said.get("hottest_first"):
            said.pop("hottest_first", None)
        label = " ".join([name, *(f"{k} {v}" for k, v in said.items())])
        return cls(label, Plan.of(spec, seed, planting, "layers.0.gate.bias" in optional), optional)

    def write(
        self,
        dst: str | os.PathLike[str],
        weight_format: str,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write a pack, and for a ReLU model `TRUTH` into it: how often each neuron is meant to be active.

        Raises what `write_pack` raises.
        """
        key = hashlib.blake2b(f"{self.label} {self.plan.spec}".encode(), digest_size=16).hexdigest()
        write_pack(
            dst,
            self.plan.spec,
            weight_format,
            RandomWeights(self.plan),
            optional=self.optional,
            origin=("random", self.label, key),
            overwrite=overwrite,
            progress=progress,
        )
        if self.plan.planting is not None:
            with open(Path(dst) / TRUTH, "wb") as f:
                np.savez(f, activity=self.plan.truth(), label=np.array(self.label))


# --- what each tensor is ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A random matrix: `sd` of its weights by blocks of columns (one number: all the same).

    Every weight of row r in its block k of columns is fixed[k][r], for as many blocks as `fixed` has (one
    number: the same in all rows). With `silent` the first BLOCK rows are 0. With `mirrored` every odd row is
    the opposite of the one before it.
    """

    sd: F32
    fixed: tuple[F32, ...] = ()
    silent: bool = False
    mirrored: bool = False


class RandomWeights:
    """An `EncodedSource` whose rows depend on (seed, tensor, row) alone, however they are asked for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._matrix = functools.lru_cache(maxsize=2)(self._make)  # a bundle's are up's and down's

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        """Vectors: norms near 1 (exactly, where the planted constant passes), biases near 0 or planted."""
        if name.endswith(".gate.bias") and self._plan.planting:
            offsets = self._plan.offsets(_layer(name), self._plan.spec.activation_threshold)
            return offsets[first:last]
        values = _normal_values(self._bits(name, 2, first, last), 1)[:, 0] * np.float32(_VECTOR_SD)
        if "norm.weight" in name:
            values += 1
            if self._plan.constant:
                values[: max(0, BLOCK - first)] = 1
        elif name.endswith((".attn_out.bias", ".down.bias")):  # to the residual stream
            values *= np.float32(self._plan.embed_sd)
        return values

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8:
        m, columns = self._matrix(name), self._columns(name)
        rows = np.arange(first, last)
        odd = rows % 2 if m.mirrored else np.zeros_like(rows)
        sd = np.broadcast_to(m.sd, (-(-columns // BLOCK),)) * (1 - 2 * odd[:, None]).astype(np.float32)
        if m.silent:
            sd[: max(0, BLOCK - first)] = 0
        fixed = tuple(f if len(f) == 1 else f[first:last] for f in m.fixed)
        q = quant.FORMATS[format].quants
        # Of a quantised row random bytes suffice: the scales need half of theirs.
        size = 2 * columns if q is None else quant.row_bytes(format, columns)
        begin = first - first % 2 if m.mirrored else first
        bits = self._bits(name, size, begin, last)[rows - odd - begin]
        if q is None:
            return _floats(bits, format, columns, sd, fixed)
        return _blocks(bits, format, columns, sd, fixed, q)

    def _bits(self, name: str, row_bytes: int, first: int, last: int) -> U8:
        """[rows, >= row_bytes] random bytes. PCG64 jumps to any place of its stream in half a microsecond."""
        words = -(-row_bytes // 8)
        stream = np.random.PCG64(np.random.SeedSequence([self._plan.seed, *name.encode()]))
        stream.advance(first * words)
        raw = np.asarray(stream.random_raw((last - first) * words))
        return raw.astype("<u8", copy=False).view(np.uint8).reshape(last - first, 8 * words)

    def _columns(self, name: str) -> int:
        s = self._plan.spec
        if name.endswith(".attn_out.weight"):
            return s.n_heads * s.head_dim
        return s.ffn_dim if name.endswith(".down.weight") else s.dim

    def _make(self, name: str) -> Matrix:
        """Outputs of unit variance for inputs of unit variance, but for what the residual stream is given."""
        plan, s = self._plan, self._plan.spec
        quiet = (_number(0),) if plan.constant else ()  # neither reads nor writes the constant columns
        kind = re.sub(r"^layers\.\d+\.|\.weight$", "", name)
        match kind:
            case "embed":
                constant = (_number(plan.constant_value),) if plan.constant else ()
                return Matrix(_number(plan.embed_sd), constant)
            case "pos_embed":
                return Matrix(_number(plan.embed_sd), quiet)
            case "head":
                return Matrix(_number(LOGIT_SD / math.sqrt(s.dim)), quiet)
            case "attn_out":
                return Matrix(_number(plan.attn_out_sd), silent=plan.constant)
            case "down":
                return Matrix(_number(plan.down_sd), quiet, mirrored=plan.mirrored)
            case "gate" if plan.planting:
                moods = tuple(_number(m) for m in plan.moods(_layer(name)))
                return self._planted(_layer(name), s.activation_threshold, moods)
            case "up" if plan.planting and s.up_activation != "none":
                return self._planted(_layer(name), 0.0, ())  # else its mood would be the gate's
        return Matrix(_number(1 / math.sqrt(s.dim)), quiet)

    def _planted(self, layer: int, threshold: float, moods: tuple[F32, ...]) -> Matrix:
        sd = self._plan.column_sd(layer)
        if not self._plan.constant:
            return Matrix(sd, moods)
        _, constant = self._plan.normalised(layer)
        return Matrix(sd, (self._plan.offsets(layer, threshold) / np.float32(BLOCK * constant), *moods))


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _number(value: float) -> F32:
    return np.array([value], np.float32)


# --- random bytes -> rows -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _normal() -> F32:
    """[65536]: a normal distribution's quantiles, so that 16 random bits are a normal number."""
    half = np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768)], np.float32)
    return np.concatenate([half, -half[::-1]])


def _normal_values(bits: U8, n: int) -> F32:
    """[rows, >= 2 n] random bytes -> [rows, n]."""
    return np.take(
        _normal(), bits[:, : 2 * n].view("<u2"), mode="clip"
    )  # clip: no bounds check, twice as fast


def _floats(bits: U8, format: str, columns: int, sd: F32, fixed: tuple[F32, ...]) -> U8:
    x = _normal_values(bits, columns) * np.repeat(sd, BLOCK, axis=1)[:, :columns]
    for k, values in enumerate(fixed):
        x[:, k * BLOCK : (k + 1) * BLOCK] = values[:, None]
    return quant.encode(format, x)


def _blocks(bits: U8, format: str, columns: int, sd: F32, fixed: tuple[F32, ...], q: quant.Quants) -> U8:
    """Return rows with random odd quants.

    Odd quants are symmetric around 0. All quants together have a mean of -0.5 (with an rms of 4.6, of 4
    bits), which adds up wherever inputs have one sign.
    """
    n = columns // BLOCK
    out = np.empty((len(bits), quant.row_bytes(format, columns)), np.uint8)
    of = quant.planes(format, out)
    quants, scales = of["quants"], of["scale"].view(np.float16)[:, :, 0]
    size = quants.shape[1] * quants.shape[2]
    np.bitwise_or(bits[:, :size].reshape(quants.shape), np.uint8(q.odd), out=quants)
    scales[:] = _spread()[bits[:, size : size + n]] * (sd * np.float32(1 / q.odd_rms))
    for k, values in enumerate(fixed):
        quants[:, k] = q.byte_of(q.extreme)
        scales[:, k] = values / np.float32(q.extreme)
    return out


@functools.lru_cache(maxsize=1)
def _spread() -> F32:
    """[256]: factors of scales, of mean square 1."""
    spread = np.linspace(1 - _SCALE_SPREAD, 1 + _SCALE_SPREAD, 256)
    return (spread / math.sqrt(float(np.mean(spread**2)))).astype(np.float32)
