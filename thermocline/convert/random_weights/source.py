"""The content of each tensor of a synthetic model: a source of rows, as `pack.writer` reads them."""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from thermocline.convert.random_weights import neurons, routing
from thermocline.convert.random_weights.stored_rows import U8, Matrix, StoredRows, normal_values
from thermocline.convert.synthetic_weights import BLOCK, F32, LOGIT_SD, WeightStatistics
from thermocline.model.spec import ModelSpec

_VECTOR_SD = 0.05  # standard deviation of norm weights around 1 and of biases around 0


class RandomWeights:
    """An `EncodedSource` whose rows depend on (seed, tensor, row) alone, in whatever pieces they are read."""

    def __init__(self, stats: WeightStatistics) -> None:
        self._stats = stats
        # two: a bundle takes rows of up and down in turn
        self._stored = functools.lru_cache(maxsize=2)(self._make)

    def __call__(self, name: str, first: int, last: int, /) -> F32:
        """Return values of a vector: norms near 1, biases near 0, or the offsets that make gates sparse.

        A norm is exactly 1 in the constant columns.
        """
        if name.endswith(".gate.bias") and self._stats.sparsity:
            offsets = self._stats.offsets(_layer(name), self._stats.spec.activation_threshold)
            return offsets[first:last]
        words = self._bits(name, 2, first, last).view("<u2")[:, 0]
        values = normal_values(words) * np.float32(_VECTOR_SD)
        if (own := _of_a_mixer(name, values, self._stats.spec)) is not None:
            return own
        if name.endswith((".scale", ".expert_scale")):
            values += 1
        elif name.endswith(".router.norm.weight"):  # its part of it is divided by this
            values = (values + 1) * np.float32(math.sqrt(self._stats.spec.dim))
        elif "norm.weight" in name:
            values += 1
            if self._stats.constant:
                values[: max(0, BLOCK - first)] = 1
        elif name.endswith((".attn_out.bias", ".down.bias")):  # to the residual stream
            values *= np.float32(self._stats.embed_sd)
        return routing.vector(self._stats, name, values, first)

    def encoded(self, name: str, format: str, first: int, last: int, /) -> U8:
        stored = self._stored(name, format)
        rows = np.arange(first, last)
        drawn = rows - rows % 2 if stored.mirrored else rows  # an opposite row is made of the same bytes
        begin = int(drawn[0]) if last > first else first
        bits = self._bits(name, stored.row_bits, begin, last)
        return stored(bits if drawn is rows else bits[drawn - begin], rows)

    def _bits(self, name: str, row_bytes: int, first: int, last: int) -> U8:
        """Return random bytes [rows, at least row_bytes]. PCG64 jumps to any position in 0.5 us."""
        words = -(-row_bytes // 8)
        stream = np.random.PCG64(np.random.SeedSequence([self._stats.seed, *name.encode()]))
        stream.advance(first * words)
        raw = np.asarray(stream.random_raw((last - first) * words))
        return raw.astype("<u8", copy=False).view(np.uint8).reshape(last - first, 8 * words)

    def _columns(self, name: str) -> int:
        s = self._stats.spec
        shape = s.attention(_layer(name)) if name.startswith("layers.") else None
        part = name.split(".")[-2]
        if shape is not None and part == "attn_out":
            return shape.context
        if ".mixer." in name:
            return s.mixer_matrices(_layer(name))[name.split(".", 2)[2]][1]
        if name == "per_layer.embed.weight":
            return s.n_layers * s.per_layer_dim
        if shape is not None and shape.latent is not None:
            matrices = shape.latent.matrices(shape.heads, s.dim)
            if part in matrices:
                return matrices[part][-1]
        return self._width(name) if name.endswith(".down.weight") else s.dim

    def _width(self, name: str) -> int:
        """Return the neurons of the FFN that a tensor belongs to."""
        s = self._stats.spec
        if ".per_layer." in name:
            return s.per_layer_dim
        return s.shared_dim if ".shared." in name else s.ffn(_layer(name)).width

    def _make(self, name: str, format: str) -> StoredRows:
        return StoredRows(self._matrix(name), format, self._columns(name))

    def _matrix(self, name: str) -> Matrix:
        """Describe a matrix that keeps the variance of its inputs (but not into the residual stream)."""
        plain = self._unplanted(name)
        if self._stats.activity is not None:
            return neurons.planted(self._stats, name, plain)
        return plain if self._stats.routing is None else routing.planted(self._stats, name, plain)

    def _unplanted(self, name: str) -> Matrix:
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
                return Matrix(_number(stats.attn_out_sd), silent=(0,) if stats.constant else ())
            case "mixer.out":
                return Matrix(
                    _number(stats.mixer_out_sd(_layer(name))), silent=(0,) if stats.constant else ()
                )
            case "down":
                sd = stats.down_sd(self._width(name), s.ffn(_layer(name)).experts)
                return Matrix(_number(sd), quiet, mirrored=stats.mirrored)
            case "per_layer.embed":
                return Matrix(_number(s.per_layer_dim**-0.5), quiet)
            case "per_layer.down":
                return Matrix(_number(s.per_layer_dim**-0.5), quiet)
            case "shared.down":
                sd = stats.down_sd(s.shared_dim, 1)
                return Matrix(_number(sd), silent=(0,) if stats.constant else ())
            case "router" if s.router_input == "layer_input":  # which no norm has scaled
                return Matrix(_number(1 / math.sqrt(s.dim) / stats.stream_sd(_layer(name))), quiet)
            case "gate" if stats.sparsity:
                moods = tuple(_number(m) for m in stats.moods(_layer(name)))
                return self._gate_like(_layer(name), s.activation_threshold, moods)
            case "up" if stats.sparsity and s.up_activation != "none":
                return self._gate_like(_layer(name), 0.0, ())  # no moods: up would share the gate's
        return Matrix(_number(1 / math.sqrt(self._columns(name))), quiet)

    def _gate_like(self, layer: int, threshold: float, moods: tuple[F32, ...]) -> Matrix:
        sd = self._stats.column_sd(layer)
        if not self._stats.constant:
            return Matrix(sd, moods)
        _, constant = self._stats.normalised(layer)
        return Matrix(sd, (self._stats.offsets(layer, threshold) / np.float32(BLOCK * constant), *moods))


def _of_a_mixer(name: str, values: F32, spec: ModelSpec) -> F32 | None:
    """Return what a recurrent layer has in f32: states that fade over some ten tokens. None: not of one."""
    scaled = values / np.float32(_VECTOR_SD)
    match name.partition(".mixer.")[2]:
        case "conv.weight":
            return scaled / np.float32(math.sqrt(spec.recurrent.conv if spec.recurrent else 1))
        case "decay":
            rate: F32 = np.exp(np.float32(0.5) * scaled - np.float32(1.5))
            return -rate
        case "dt_bias":
            return values - np.float32(1)
        case "norm.weight" | "skip":
            return values + np.float32(1)
    return None


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _number(value: float) -> F32:
    return np.array([value], np.float32)
