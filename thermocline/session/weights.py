"""A pack in memory: one arena for what a run needs of `weights.bin`, one for predictors, and
`decoder.Weights` pointing into them.

Knows tensor names (docs/internals/pack.md) and the arena; must not know requests or families.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from thermocline import _native
from thermocline.errors import OutOfBudget
from thermocline.machine import hardware
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import TensorInfo
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import F32, FFN, Layer, Linear, Norm, Weights
from thermocline.pack.blocks import block_ranges, memory_bytes, new_arena, read_blocks
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors, StoredMatrix, StoredPredictor

# Between two looks at the progress bar and Ctrl-C. The readers run dry at the end of a slice (of 256 MiB: 4 %
# lost), so slices double until one takes SLICE_S. A multiple of every block size.
SLICE_BYTES, SLICE_S = 64 << 20, 0.25
ALIGN = 64  # of a predictor's matrices: a cache line


@dataclass(frozen=True)
class Filled:
    """The longest run of an arena's bytes that hold weights: memory to measure the roof on."""

    arena: _native.Arena
    begin: int
    end: int

    @staticmethod
    def of(arena: _native.Arena, runs: Iterable[tuple[int, int]]) -> Filled:
        return Filled(arena, *max(runs, key=lambda run: run[1] - run[0]))


@dataclass(frozen=True)
class LoadedWeights:
    weights: Weights
    ops: Any  # CpuOps, or GpuOps over one
    bytes: int
    filled: Filled | None = None  # None: a GPU has a part of them, and RAM's speed says nothing

    def read_gbs(self, threads: int, seconds: float = hardware.ROOF_SECONDS) -> float | None:
        """GB/s of reading them over and over: the roof of a token's speed. None: nothing to measure on."""
        f = self.filled
        return None if f is None else hardware.read_gbs_of(f.arena, f.begin, f.end, threads, seconds)


def load(
    pack: Pack,
    *,
    threads: int,
    isa: str = "",
    predictors: Predictors | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LoadedWeights:
    """Read and check the pack into RAM. `progress` is called with (bytes read, bytes in all).

    Raises BadFile or IOFailure naming the first tensor that is damaged or cannot be read, OutOfBudget.
    """
    ops = new_ops(threads, isa)
    arena = new_arena(pack.weights_bytes, str(pack.path))  # what the tensors' offsets were checked against
    fill(arena, pack, progress)
    weights = assemble(pack.spec, pack.tensors, arena, ops)
    if predictors is not None:
        weights = with_predictors(weights, predictors)
    return LoadedWeights(weights, ops, memory_bytes(pack, predictors), Filled.of(arena, block_ranges(pack)))


def new_ops(threads: int, isa: str = "") -> CpuOps:
    try:
        return CpuOps(threads, isa)
    except RuntimeError:
        raise OutOfBudget(f"the system has no {threads} threads for this process; use fewer") from None


def with_predictors(weights: Weights, predictors: Predictors | None) -> Weights:
    """The same weights, with these predictors in place of what they had."""
    count = len(weights.layers)
    assert predictors is None or predictors.count == count
    return with_stored(weights, [None if predictors is None else predictors.stored(i) for i in range(count)])


def with_stored(weights: Weights, stored: Sequence[StoredPredictor | None]) -> Weights:
    """Likewise, with a predictor or none for each layer: in an arena of their own."""
    found: list[list[_native.Predictor | None]] = [[None] * len(x.experts) for x in weights.layers]
    size = sum(p.nbytes + 2 * ALIGN for p in stored if p is not None)
    if size:
        arena = new_arena(size, "the predictors")
        at = 0
        for i, p in enumerate(stored):
            if p is not None:
                found[i][:], at = _placed(p, len(found[i]), arena, at)
        arena.gather_pages()
    layers = zip(weights.layers, found, strict=True)
    return replace(weights, layers=tuple(_predicted(x, own) for x, own in layers))


def _predicted(layer: Layer, predictors: Sequence[_native.Predictor | None]) -> Layer:
    each = zip(layer.experts, predictors, strict=True)
    return replace(layer, experts=tuple(replace(f, predictor=p) for f, p in each))


def _placed(
    p: StoredPredictor, experts: int, arena: _native.Arena, at: int
) -> tuple[list[_native.Predictor], int]:
    """Its matrices written from byte `at` of the arena: each expert's predictor -> and where they end."""

    def matrices(m: StoredMatrix, parts: int) -> list[_native.Matrix]:
        nonlocal at
        begin, (rows, width) = at, (len(m.rows) // parts, m.rows.shape[1])
        arena.write(begin, np.ascontiguousarray(m.rows).ravel())
        at = -(-(begin + m.rows.nbytes) // ALIGN) * ALIGN
        fmt = _native.SIGNS if m.format == "signs" else quant.FORMATS[m.format].id
        starts = (begin + i * rows * width for i in range(parts))
        return [_native.Matrix(arena, start, fmt, rows, m.columns, width) for start in starts]

    first = None if p.first is None else matrices(p.first, 1)[0]
    parts = zip(matrices(p.second, experts), np.split(p.threshold, experts), strict=True)
    return [_native.Predictor(first, second, t, p.hot, p.kind == "mlp") for second, t in parts], at


def fill(arena: _native.Arena, pack: Pack, progress: Callable[[int, int], None] | None = None) -> None:
    """What `load` reads: the pack's bytes, checked."""
    ranges = block_ranges(pack)
    done, size = 0, sum(end - begin for begin, end in ranges)
    for begin, end in _slices(ranges):
        read_blocks(arena, pack, begin, end, begin)
        done += end - begin
        if progress is not None:
            progress(done, size)
    arena.gather_pages()


def _slices(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    step = SLICE_BYTES
    for begin, end in ranges:
        while begin < end:
            start = time.monotonic()
            yield begin, min(end, begin + step)
            begin, step = begin + step, step if time.monotonic() - start > SLICE_S else 2 * step


def assemble(
    spec: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    arena: _native.Arena,
    ops: CpuOps,
    elsewhere: Mapping[str, Any] | None = None,
) -> Weights:
    """`tensors`: where they are in the arena. `elsewhere`: those of other ops, in another memory; of neurons
    the first of each expert may be there, side by side, and the others in the arena. A router may be in both.
    """
    there = elsewhere or {}

    def beyond(
        name: str, *, expert: int | None = None, skip_bytes: int = 0, columns: int | None = None
    ) -> Any:
        """As `matrix`, of what is elsewhere."""
        rows = there[name] if expert is None else there[name].part(expert, spec.n_experts)
        return rows if columns is None else replace(rows, columns=columns, skip=skip_bytes)

    def matrix(
        name: str, *, expert: int | None = None, skip_bytes: int = 0, columns: int | None = None
    ) -> Any:
        """All rows of a tensor as one matrix, or one expert's; of a bundle, the part `skip_bytes` into each
        record. Where rows on disk take turns, the places are the same for all experts.
        """
        if name not in tensors:
            return beyond(name, expert=expert, skip_bytes=skip_bytes, columns=columns)
        info = tensors[name]
        lead, last = (info.shape[:-1], info.shape[-1]) if columns is None else (info.shape, columns)
        rows, first = math.prod(lead), 0
        if expert is not None:
            rows //= info.shape[0]
            first = expert % info.shape[0] * rows
        offset = info.offset + first * info.stride + skip_bytes
        return _native.Matrix(arena, offset, quant.FORMATS[info.format].id, rows, last, info.stride)

    def vector(name: str) -> F32 | None:
        if name not in tensors:
            return None
        info = tensors[name]
        n = math.prod(info.shape)
        row = _native.Matrix(arena, info.offset, quant.FORMATS["f32"].id, 1, n, 4 * n)
        only: F32 = ops.embed(row, np.zeros(1, np.int32))[0]
        return only

    def norm(name: str) -> Norm:
        weight = vector(f"{name}.weight")
        assert weight is not None, "Pack.open checked that it is there"
        return Norm(weight, vector(f"{name}.bias"))

    def linear(name: str) -> Linear:
        return Linear(matrix(f"{name}.weight"), vector(f"{name}.bias"))

    def ffn(layer: str, expert: int) -> FFN:
        part = partial(matrix, expert=expert)
        biases, down_bias = vector(f"{layer}.gate.bias"), vector(f"{layer}.down.bias")
        bias = None if biases is None else np.split(biases, spec.n_experts)[expert]
        if f"{layer}.gate.weight" not in there or f"{layer}.gate.weight" not in tensors:
            return neurons(part, layer, bias, down_bias)
        first = partial(beyond, expert=expert)
        n = first(f"{layer}.gate.weight").rows
        here, others = (None, None) if bias is None else (bias[:n].copy(), bias[n:].copy())
        return replace(neurons(part, layer, others, down_bias), hot=neurons(first, layer, here, None))

    def neurons(part: Callable[..., Any], layer: str, bias: F32 | None, down_bias: F32 | None) -> FFN:
        gate = Linear(part(f"{layer}.gate.weight"), bias)
        if not spec.sparse:
            up = part(f"{layer}.up.weight") if spec.gated else None
            return FFN(gate, up, part(f"{layer}.down.weight"), down_bias, bundles=False)
        row_bytes = quant.row_bytes(
            (tensors.get(f"{layer}.bundle") or there[f"{layer}.bundle"]).format, spec.dim
        )
        up = part(f"{layer}.bundle", columns=spec.dim) if spec.gated else None
        down = part(f"{layer}.bundle", columns=spec.dim, skip_bytes=row_bytes if spec.gated else 0)
        return FFN(gate, up, down, down_bias, bundles=True)

    def maybe_norm(name: str) -> Norm | None:
        return norm(name) if f"{name}.weight" in tensors else None

    def decoder_layer(i: int) -> Layer:
        a = f"layers.{i}"
        return Layer(
            attn_norm=norm(f"{a}.attn_norm"),
            qkv=linear(f"{a}.qkv"),
            attn_out=linear(f"{a}.attn_out"),
            ffn_norm=norm(f"{a}.ffn_norm"),
            experts=tuple(ffn(a, e) for e in range(spec.n_experts)),
            q_norm=vector(f"{a}.q_norm.weight"),
            k_norm=vector(f"{a}.k_norm.weight"),
            attn_sub_norm=maybe_norm(f"{a}.attn_sub_norm"),
            ffn_sub_norm=maybe_norm(f"{a}.ffn_sub_norm"),
            attn_post_norm=maybe_norm(f"{a}.attn_post_norm"),
            ffn_post_norm=maybe_norm(f"{a}.ffn_post_norm"),
            router=matrix(f"{a}.router.weight") if spec.n_experts > 1 else None,
            router_there=there.get(f"{a}.router.weight"),
        )

    embed = matrix("embed.weight")
    return Weights(
        embed=embed,
        pos_embed=matrix("pos_embed.weight") if spec.position == "learned" else None,
        layers=tuple(decoder_layer(i) for i in range(spec.n_layers)),
        out_norm=maybe_norm("out_norm"),
        head=Linear(embed, None) if spec.tied_head else linear("head"),
        project_in=matrix("project_in.weight") if spec.embed_dim is not None else None,
        project_out=matrix("project_out.weight") if spec.embed_dim is not None else None,
    )
