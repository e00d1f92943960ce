"""Make synthetic models: random packs with a real model's shape, written at the speed of the disk.

Quantised rows are made directly, without floats. Shapes are the config.json files in `bundled/shapes.json`,
which are read like any other.
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

from thermocline.convert.synthetic_weights import (
    ACTIVE,
    BLOCK,
    F32,
    LOGIT_SD,
    SyntheticSparsity,
    WeightStatistics,
)
from thermocline.errors import Unsupported, UsageError
from thermocline.files.bounded import parse_json, read_small
from thermocline.model import quant
from thermocline.model.families import MAX_CONFIG_BYTES, parse_config, read_config_json
from thermocline.model.spec import ModelSpec
from thermocline.model.tensor_map import TensorMap
from thermocline.model.tensors import expected_tensors
from thermocline.pack.pack import Progress
from thermocline.pack.writer import PackExtras, write_pack

U8 = NDArray[np.uint8]

SHAPES = Path(__file__).parents[1] / "bundled" / "shapes.json"
TRUTH = "synth.npz"  # beside the pack's own files
_VECTOR_SD = 0.05  # standard deviation of norm weights around 1 and of biases around 0
_SCALE_SPREAD = 0.1  # the scales of blocks differ by up to this share


def shapes() -> dict[str, Any]:
    """Return the known shapes: {name: config.json}."""
    return parse_json(read_small(SHAPES, MAX_CONFIG_BYTES), str(SHAPES))


def read_shape(shape: str, activation: str | None = None) -> tuple[str, ModelSpec, TensorMap]:
    """Return (name, spec, tensor map) of a known shape or a config.json.

    Raises UsageError for an unknown shape, and the errors of `parse_config`.
    """
    known = shapes()
    if shape in known:
        return shape, *parse_config(known[shape], None, shape, activation)
    path = Path(shape)
    if path.is_dir():
        path /= "config.json"
    if not path.exists():
        raise UsageError(f"{shape}: is neither a config.json nor a known shape; known: {', '.join(known)}")
    name = os.path.basename(os.path.dirname(os.path.realpath(path)))
    return name, *parse_config(read_config_json(path), None, str(path), activation)


@dataclasses.dataclass(frozen=True)
class SyntheticModel:
    """A synthetic model before it is written: its name, its weights' statistics, its optional tensors."""

    label: str
    stats: WeightStatistics
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
    ) -> SyntheticModel:
        """Describe a synthetic model of a shape.

        `active` is the mean share of active neurons. None means `ACTIVE` for a ReLU model and no sparsity
        for others; a number makes any model a ReLU model. Raises Unsupported, and the errors of `read_shape`
        and `WeightStatistics.of`.
        """
        name, spec, tensor_map = read_shape(shape, activation)
        if spec.embed_dim is not None:
            raise Unsupported(
                f"{name}: its embeddings have another width than its layers, which a synthetic model cannot; "
                "choose another shape"
            )
        if active is not None and not spec.sparse:
            spec = dataclasses.replace(spec, activation="relu")
        chosen = ACTIVE if active is None else active
        sparsity = SyntheticSparsity(chosen, skew, rank, hottest_first) if spec.sparse else None
        known = expected_tensors(spec, "f32")
        optional = tuple(n for n in tensor_map.tensors if n in known and known[n].optional)
        said = {"seed": seed, **(dataclasses.asdict(sparsity) if sparsity else {})}
        if not said.get("hottest_first"):
            said.pop("hottest_first", None)
        label = " ".join([name, *(f"{k} {v}" for k, v in said.items())])
        return cls(
            label, WeightStatistics.of(spec, seed, sparsity, "layers.0.gate.bias" in optional), optional
        )

    def write(
        self,
        dst: str | os.PathLike[str],
        weight_format: str,
        *,
        overwrite: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write the pack. A ReLU model's pack also gets `TRUTH`: how often each neuron is meant to be active.

        Raises the errors of `write_pack`.
        """
        key = hashlib.blake2b(f"{self.label} {self.stats.spec}".encode(), digest_size=16).hexdigest()
        write_pack(
            dst,
            self.stats.spec,
            weight_format,
            RandomWeights(self.stats),
            PackExtras(optional=self.optional, origin=("random", self.label, key)),
            overwrite=overwrite,
            progress=progress,
        )
        if self.stats.sparsity is not None:
            with open(Path(dst) / TRUTH, "wb") as f:
                np.savez(f, activity=self.stats.truth(), label=np.array(self.label))


# --- the content of each tensor -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A random matrix, described by blocks of BLOCK columns.

    `sd` is the standard deviation of the weights of each block; one number holds for all blocks. In the
    first len(fixed) blocks, all weights of row r are fixed[k][r]; one number holds for all rows. `silent`
    sets the first BLOCK rows to 0. `mirrored` makes every odd row the opposite of the row before it.
    """

    sd: F32
    fixed: tuple[F32, ...] = ()
    silent: bool = False
    mirrored: bool = False


class RandomWeights:
    """An `EncodedSource` whose rows depend on (seed, tensor, row) alone, in whatever pieces they are read."""

    def __init__(self, stats: WeightStatistics) -> None:
        self._stats = stats
        self._matrix = functools.lru_cache(maxsize=2)(
            self._make
        )  # two: a bundle takes rows of up and down in turn

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        """Return values of a vector: norms near 1, biases near 0, or the offsets that make gates sparse.

        A norm is exactly 1 in the constant columns.
        """
        if name.endswith(".gate.bias") and self._stats.sparsity:
            offsets = self._stats.offsets(_layer(name), self._stats.spec.activation_threshold)
            return offsets[first:last]
        values = _normal_values(self._bits(name, 2, first, last), 1)[:, 0] * np.float32(_VECTOR_SD)
        if "norm.weight" in name:
            values += 1
            if self._stats.constant:
                values[: max(0, BLOCK - first)] = 1
        elif name.endswith((".attn_out.bias", ".down.bias")):  # to the residual stream
            values *= np.float32(self._stats.embed_sd)
        return values

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8:
        m, columns = self._matrix(name), self._columns(name)
        rows = np.arange(first, last)
        odd = rows % 2 if m.mirrored else np.zeros_like(rows)
        sd = np.broadcast_to(m.sd, (-(-columns // BLOCK),)) * (1 - 2 * odd[:, None]).astype(np.float32)
        if m.silent:
            sd[: max(0, BLOCK - first)] = 0
        fixed = tuple(f if len(f) == 1 else f[first:last] for f in m.fixed)
        floats = quant.FORMATS[format].block == 1
        # As many random bytes as a row has are enough: a scale of two bytes takes one of them.
        size = 2 * columns if floats else quant.row_bytes(format, columns)
        begin = first - first % 2 if m.mirrored else first
        bits = self._bits(name, size, begin, last)[rows - odd - begin]
        return (_floats if floats else _blocks)(bits, format, columns, sd, fixed)

    def _bits(self, name: str, row_bytes: int, first: int, last: int) -> U8:
        """Return random bytes [rows, at least row_bytes]. PCG64 jumps to any position in 0.5 us."""
        words = -(-row_bytes // 8)
        stream = np.random.PCG64(np.random.SeedSequence([self._stats.seed, *name.encode()]))
        stream.advance(first * words)
        raw = np.asarray(stream.random_raw((last - first) * words))
        return raw.astype("<u8", copy=False).view(np.uint8).reshape(last - first, 8 * words)

    def _columns(self, name: str) -> int:
        s = self._stats.spec
        if name.endswith(".attn_out.weight"):
            return s.n_heads * s.head_dim
        return s.ffn_dim if name.endswith(".down.weight") else s.dim

    def _make(self, name: str) -> Matrix:
        """Describe a matrix. It keeps the variance of its inputs, except into the residual stream."""
        stats, s = self._stats, self._stats.spec
        quiet = (_number(0),) if stats.constant else ()  # such a matrix leaves the constant columns alone
        kind = re.sub(r"^layers\.\d+\.|\.weight$", "", name)
        match kind:
            case "embed":
                constant = (_number(stats.constant_value),) if stats.constant else ()
                return Matrix(_number(stats.embed_sd), constant)
            case "pos_embed":
                return Matrix(_number(stats.embed_sd), quiet)
            case "head":
                return Matrix(_number(LOGIT_SD / math.sqrt(s.dim)), quiet)
            case "attn_out":
                return Matrix(_number(stats.attn_out_sd), silent=stats.constant)
            case "down":
                return Matrix(_number(stats.down_sd), quiet, mirrored=stats.mirrored)
            case "gate" if stats.sparsity:
                moods = tuple(_number(m) for m in stats.moods(_layer(name)))
                return self._gate_like(_layer(name), s.activation_threshold, moods)
            case "up" if stats.sparsity and s.up_activation != "none":
                return self._gate_like(_layer(name), 0.0, ())  # no moods: up would share the gate's
        return Matrix(_number(1 / math.sqrt(s.dim)), quiet)

    def _gate_like(self, layer: int, threshold: float, moods: tuple[F32, ...]) -> Matrix:
        sd = self._stats.column_sd(layer)
        if not self._stats.constant:
            return Matrix(sd, moods)
        _, constant = self._stats.normalised(layer)
        return Matrix(sd, (self._stats.offsets(layer, threshold) / np.float32(BLOCK * constant), *moods))


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _number(value: float) -> F32:
    return np.array([value], np.float32)


# --- random bytes -> rows -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _normal() -> F32:
    """Return the 65536 quantiles of a normal distribution: 16 random bits choose a normal number."""
    half = np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768)], np.float32)
    return np.concatenate([half, -half[::-1]])


def _normal_values(bits: U8, n: int) -> F32:
    """Turn random bytes [rows, at least 2 n] into normal numbers [rows, n]."""
    return np.take(
        _normal(), bits[:, : 2 * n].view("<u2"), mode="clip"
    )  # clip: no bounds check, twice as fast


def _floats(bits: U8, format: str, columns: int, sd: F32, fixed: tuple[F32, ...]) -> U8:
    x = _normal_values(bits, columns) * np.repeat(sd, BLOCK, axis=1)[:, :columns]
    for k, values in enumerate(fixed):
        x[:, k * BLOCK : (k + 1) * BLOCK] = values[:, None]
    return quant.encode(format, x)


# For each quantised format: the bits that make every quant of a byte odd, the RMS of odd quants, a byte
# full of the extreme quant, and that quant's value. Odd quants are symmetric around 0. All quants have a
# mean of -0.5 (their RMS is 4.6 in q4_0), which adds up where all inputs have one sign.
_ODD = {
    "q8_0": (0x01, math.sqrt((128**2 - 1) / 3), 0x7F, 127),
    "q4_0": (0x11, math.sqrt((8**2 - 1) / 3), 0x00, -8),
}


def _blocks(bits: U8, format: str, columns: int, sd: F32, fixed: tuple[F32, ...]) -> U8:
    odd, rms, full, extreme = _ODD[format]
    n = columns // BLOCK
    out = np.empty((len(bits), quant.row_bytes(format, columns)), np.uint8)
    quants, scales = quant.planes(format, out)
    size = quants.shape[1] * quants.shape[2]
    np.bitwise_or(bits[:, :size].reshape(quants.shape), np.uint8(odd), out=quants)
    scales[:] = _spread()[bits[:, size : size + n]] * (sd * np.float32(1 / rms))
    for k, values in enumerate(fixed):
        quants[:, k] = full
        scales[:, k] = values / np.float32(extreme)
    return out


@functools.lru_cache(maxsize=1)
def _spread() -> F32:
    """Return 256 factors for scales, with a mean square of 1."""
    spread = np.linspace(1 - _SCALE_SPREAD, 1 + _SCALE_SPREAD, 256)
    return (spread / math.sqrt(float(np.mean(spread**2)))).astype(np.float32)
