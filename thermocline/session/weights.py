"""A model in memory: an arena for its weights, another for predictors, and `Weights` that point into them.

The tensors' names: docs/internals/pack.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import numpy as np

from thermocline import _native
from thermocline.errors import BadFile, OutOfBudget
from thermocline.machine import hardware
from thermocline.model import quant
from thermocline.model.spec import RECURRENT, ModelSpec
from thermocline.model.tensors import RowPart, TensorInfo, bundle_parts
from thermocline.ops.cpu import CpuOps
from thermocline.ops.interface import (
    CPU,
    F32,
    FFN,
    DeltaNet,
    FFNPart,
    LatentMatrices,
    Layer,
    Linear,
    Mamba2,
    Mixer,
    Norm,
    PerLayer,
    ShortConv,
    Stacked,
    TokenInputs,
    WeightMatrix,
    Weights,
)
from thermocline.pack.blocks import memory_bytes as memory_bytes
from thermocline.pack.blocks import new_arena
from thermocline.pack.predictor import Predictors, StoredMatrix, StoredPredictor
from thermocline.pack.stored_model import Progress, Reading, StoredModel
from thermocline.session import embedding_rows
from thermocline.session.embedding_rows import Lookup

if TYPE_CHECKING:
    from thermocline.ops.device_rows import DeviceRows
    from thermocline.ops.interface import OpaqueOps

Table = TypeVar("Table", covariant=True)  # of ops
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
class LoadedWeights(Generic[Table]):
    weights: Weights
    ops: Table  # CpuOps, or GpuOps over one
    bytes: int
    filled: Filled | None = None  # None: a GPU has a part of them, and RAM's speed says nothing

    def opaque(self) -> LoadedWeights[OpaqueOps]:
        """Return the same weights with the kind of their ops hidden."""
        return cast("LoadedWeights[OpaqueOps]", self)

    def read_gbs(self, threads: int, seconds: float = hardware.ROOF_SECONDS) -> float | None:
        """GB/s of reading them over and over: the roof of a token's speed. None: nothing to measure on."""
        f = self.filled
        return None if f is None else hardware.read_gbs_of(f.arena, f.begin, f.end, threads, seconds)


@dataclass(frozen=True)
class BegunLoad:
    """A model on its way into an arena. One that nobody completes is given up when it goes."""

    model: StoredModel
    arena: _native.Arena
    ops: CpuOps
    grouped: frozenset[str]  # tensors whose rows will be interleaved
    reading: Reading
    tables: Mapping[str, Lookup] = field(default_factory=dict)

    @staticmethod
    def of(model: StoredModel, ops: CpuOps, tables: Sequence[str] = ()) -> BegunLoad:
        """Begin to read a model, but `tables`, which stay on disk. Raises OutOfBudget, IOFailure, BadFile."""
        arena = new_arena(model.weights_bytes, str(model.path))  # what the offsets were checked against
        grouped = frozenset(faster_in_groups(PackInMemory(model.spec, model.tensors, arena, ops)))
        reading = model.begin_load(arena, grouped, ops.native.group, tables)
        return BegunLoad(model, arena, ops, grouped, reading, embedding_rows.opened(model, tables))

    def read(self, progress: Progress | None = None) -> None:
        """Wait until all tensors are there, as `Reading.grouped` says. Raises as `load` does."""
        self.reading.finish(progress)
        self.arena.gather_pages()

    def finish(
        self, predictors: Predictors | None = None, progress: Progress | None = None
    ) -> LoadedWeights[CpuOps]:
        """Return the weights, once they are there. Raises as `load` does."""
        self.read(progress)
        model, ops = self.model, self.ops
        grouped = self.reading.grouped
        made = PackInMemory(model.spec, model.tensors, self.arena, ops, grouped=grouped, tables=self.tables)
        for name in sorted(self.grouped - grouped):
            ops.native.interleaved(self.arena, made.all_rows(name))
        weights = assemble(replace(made, grouped=self.grouped), str(model.path))
        if predictors is not None:
            weights = with_predictors(weights, predictors)
        filled = Filled.of(self.arena, model.ranges(self.tables))
        return LoadedWeights(weights, ops, memory_bytes(model, predictors, self.tables), filled)


def load(
    model: StoredModel,
    *,
    threads: int,
    isa: str = "",
    predictors: Predictors | None = None,
    progress: Progress | None = None,
    tables: Sequence[str] = (),
) -> LoadedWeights[CpuOps]:
    """Read and check a model into RAM. `progress` is called with (bytes read, bytes in all).

    `tables`: of which rows are read when a token needs them.

    Raises BadFile or IOFailure naming the first tensor that is damaged or cannot be read, OutOfBudget.
    """
    return BegunLoad.of(model, new_ops(threads, isa), tables).finish(predictors, progress)


def faster_in_groups(made: PackInMemory) -> Iterator[str]:
    """Yield the tensors that are multiplied as a whole, by a CPU that is faster then with rows in groups.

    No row of them is asked for but a tied embedding's. q, k and v are one product: all of them or none.
    """
    s = made.spec
    always = ["embed.weight" if s.tied_head else "head.weight"]
    for i in range(s.n_layers):
        a, ffn = f"layers.{i}", ("gate", "up", "down")
        always += [f"{a}.{part}.weight" for part in ("qkv", "q_b", "attn_out", *(() if s.sparse else ffn))]
        always += [f"{a}.attn_gate.weight", *(f"{a}.{n}" for n in s.mixer_matrices(i))]
        always += [f"{a}.{of}.{part}.weight" for of in ("shared", "per_layer") for part in ffn]
        shape = s.attention(i)
        if shape is not None and len(shape.projections) == 2 and shape.context % made.ops.native.group:
            always.remove(f"{a}.qkv.weight")  # k's rows are used twice, and would begin inside a group
        for names in () if shape is None else (shape.projections, ("q_a", "kv_a"), ("q", "kv_a")):
            parts = [f"{a}.{n}.weight" for n in names]
            if all(map(made.faster_in_groups, parts)):
                yield from parts
    yield from filter(made.faster_in_groups, always)


def new_ops(threads: int, isa: str = "") -> CpuOps:
    try:
        return CpuOps(threads, isa)
    except RuntimeError:
        raise OutOfBudget(f"the system has no {threads} threads for this process; use fewer") from None


def with_predictors(weights: Weights, predictors: Predictors | None) -> Weights:
    """Return the weights with these predictors in place of their own."""
    count = len(weights.layers)
    assert predictors is None or predictors.count == count
    return with_stored(weights, [None if predictors is None else predictors.stored(i) for i in range(count)])


def with_stored(weights: Weights, stored: Sequence[StoredPredictor | None]) -> Weights:
    """Return the weights with a predictor or none for each layer, in an arena of the predictors."""
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
    return replace(layer, experts=tuple(_asked(f, p) for f, p in each))


def _asked(f: FFN, predictor: _native.Predictor | None) -> FFN:
    part = f.on(CPU)
    return f if part is None else f.with_part(replace(part, predictor=predictor))


def _placed(
    p: StoredPredictor, experts: int, arena: _native.Arena, at: int
) -> tuple[list[_native.Predictor], int]:
    """Write a predictor's matrices from byte `at` of the arena. -> each expert's predictor, and the end."""

    def matrices(m: StoredMatrix, parts: int) -> list[_native.Matrix]:
        nonlocal at
        begin, (rows, width) = at, (len(m.rows) // parts, m.rows.shape[1])
        arena.write(begin, np.ascontiguousarray(m.rows).ravel())
        at = -(-(begin + m.rows.nbytes) // ALIGN) * ALIGN
        fmt = _native.SIGNS if m.format == "signs" else quant.FORMATS[m.format].id
        starts = (begin + i * rows * width for i in range(parts))
        return [_native.Matrix(arena, start, fmt, rows, m.columns, width) for start in starts]

    firsts: list[_native.Matrix | None] = [None]
    if p.first is not None:
        firsts = [*matrices(p.first, len(p.first.rows) // p.rank)]
    if len(firsts) == 1:  # for all experts
        firsts *= experts
    parts = zip(firsts, matrices(p.second, experts), np.split(p.threshold, experts), strict=True)
    return [_native.Predictor(first, second, t, p.hot, p.kind == "mlp") for first, second, t in parts], at


@dataclass(frozen=True)
class PackInMemory:
    """A model's tensors: where they are in an arena, and the rows that GPUs have."""

    spec: ModelSpec
    tensors: Mapping[str, TensorInfo]  # with their offsets in the arena
    arena: _native.Arena
    ops: CpuOps
    # By name and device: whole, or the first rows of each expert.
    on_gpus: Mapping[str, Mapping[str, DeviceRows]] = field(default_factory=dict)
    grouped: Collection[str] = ()  # tensors whose rows are interleaved
    tables: Mapping[str, Lookup] = field(default_factory=dict)  # whose rows stay on disk
    # By layer and device, experts that a GPU has whole.
    whole: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor, in RAM or on a GPU."""
        return name in self.tensors or name in self.on_gpus

    def matrix(self, name: str) -> WeightMatrix:
        """Return all rows of a tensor: those in RAM, if it is there, or those of the one GPU that has it."""
        if name in self.tables:
            return self.tables[name]
        if name in self.tensors:
            return self._in_ram(name)
        (rows,) = self.on_gpus[name].values()
        return rows

    def _in_ram(self, name: str, expert: int | None = None, part: RowPart | None = None) -> _native.Matrix:
        """Return a tensor's rows, or one expert's; of a bundle, one `part` of each record.

        Slots in which rows from disk take turns are the same for all experts.
        """
        info, group = self.tensors[name], self.ops.native.group if name in self.grouped else 1
        lead, last = (info.shape[:-1], info.shape[-1]) if part is None else (info.shape, self.spec.dim)
        part = part or RowPart(info.format, 0)
        rows, first = math.prod(lead), 0
        if expert is not None:
            rows //= info.shape[0]
            first = expert % info.shape[0] * rows
        offset = info.offset + first * info.stride + part.at
        id = quant.FORMATS[part.format].id
        return _native.Matrix(self.arena, offset, id, rows, last, info.stride, group)

    def faster_in_groups(self, name: str) -> bool:
        """Return whether this CPU multiplies a tensor (an expert's part of one) faster in groups of rows."""
        if name not in self.tensors:
            return False
        expert = 0 if len(self.tensors[name].shape) == 3 else None
        return self.ops.native.interleaves(self._in_ram(name, expert))

    def all_rows(self, name: str) -> _native.Matrix:
        """Return a tensor's rows, of all experts."""
        return self._in_ram(name)

    def vector(self, name: str) -> F32 | None:
        if name not in self.tensors:
            return None
        info = self.tensors[name]
        n = math.prod(info.shape)
        row = _native.Matrix(self.arena, info.offset, quant.FORMATS["f32"].id, 1, n, 4 * n)
        only: F32 = self.ops.embed(row, np.zeros(1, np.int32))[0]
        return only

    def norm(self, name: str) -> Norm | None:
        weight = self.vector(f"{name}.weight")
        return None if weight is None else Norm(weight, self.vector(f"{name}.bias"))

    def linear(self, name: str) -> Linear:
        return Linear(self.matrix(f"{name}.weight"), self.vector(f"{name}.bias"))

    def experts(self, layer: str, experts: int) -> tuple[FFN, ...]:
        """Return a layer's experts: one, where there is no router."""
        each = (self._of_each(f"{layer}.{part}.bias", experts) for part in ("gate", "up", "down"))
        biases = zip(*each, strict=True)
        return tuple(self.ffn(layer, e, experts, own) for e, own in enumerate(biases))

    def _of_each(self, name: str, experts: int) -> Sequence[F32 | None]:
        found = self.vector(name)
        return [None] * experts if found is None else np.split(found, experts)

    def ffn(self, layer: str, expert: int, experts: int, biases: Sequence[F32 | None]) -> FFN:
        """Return an expert. `biases`: of gate, up and down."""
        bias, up_bias, down_bias = biases
        gate = f"{layer}.gate.weight"
        if whole := self.whole.get(layer, {}):
            part = self._whole_expert(layer, expert, whole, bias)
            return FFN((replace(part, up_bias=up_bias),), down_bias, self.spec.sparse)
        gpus, in_ram = self.on_gpus.get(gate, {}), gate in self.tensors
        divided = len(gpus) + in_ram > 1
        parts, first = [], 0
        for device, rows in gpus.items():
            n = rows.rows // experts
            own = bias[first : first + n].copy() if bias is not None and divided else bias
            parts.append(self._gpu_part(layer, (expert, experts), device, own))
            first += n
        if in_ram:
            own = bias[first:].copy() if bias is not None and divided else bias
            parts.append(replace(self._cpu_part(layer, expert, own), up_bias=up_bias))
        return FFN(tuple(parts), down_bias, self.spec.sparse)

    def _whole_expert(
        self, layer: str, expert: int, whole: Mapping[str, Sequence[int]], bias: F32 | None
    ) -> FFNPart:
        """`whole`: the experts of each GPU; RAM has the others."""
        for device, there in whole.items():
            if expert in there:
                return self._gpu_part(layer, (there.index(expert), len(there)), device, bias)
        before = sum(e < expert for there in whole.values() for e in there)
        return self._cpu_part(layer, expert - before, bias)

    def shared(self, layer: str) -> FFN | None:
        """Return the FFN of every token of a mixture."""
        up = f"{layer}.shared.up.weight"
        if not self.has(f"{layer}.shared.gate.weight"):
            return None
        gate, down = (self.linear(f"{layer}.shared.{part}") for part in ("gate", "down"))
        return FFN.whole(gate, self.matrix(up) if self.has(up) else None, down.weight, None, False)

    def router(self, layer: str) -> Linear:
        return Linear(self.matrix(f"{layer}.router.weight"), self.vector(f"{layer}.router.bias"))

    def _cpu_part(self, layer: str, expert: int, bias: F32 | None) -> FFNPart:
        spec, bundle = self.spec, f"{layer}.bundle"
        gate = Linear(self._in_ram(f"{layer}.gate.weight", expert), bias)
        if not spec.sparse:
            up = self._in_ram(f"{layer}.up.weight", expert) if spec.gated else None
            down = self._in_ram(f"{layer}.down.weight", expert)
            return FFNPart(gate, up, down)
        of_up, of_down = bundle_parts(self.tensors[bundle], spec)
        up = None if of_up is None else self._in_ram(bundle, expert, of_up)
        return FFNPart(gate, up, self._in_ram(bundle, expert, of_down))

    def _gpu_part(self, layer: str, expert: tuple[int, int], device: str, bias: F32 | None) -> FFNPart:
        """Return a GPU's neurons of an expert: (which, of how many)."""
        spec = self.spec

        def rows(name: str) -> DeviceRows:
            return self.on_gpus[f"{layer}.{name}"][device].part(*expert)

        gate = Linear(rows("gate.weight"), bias)
        if not spec.sparse:
            return FFNPart(gate, rows("up.weight") if spec.gated else None, rows("down.weight"), device)
        return FFNPart(gate, *records(rows("bundle")), device)

    def qkv(self, i: int) -> Linear:
        """Return q, k and v, or q alone; they are several tensors where their formats differ.

        Where values are the keys, k's rows come twice.
        """
        layer, shape = f"layers.{i}", self.spec.attention(i)
        assert shape is not None, "no attention in this layer"
        fused, bias = f"{layer}.qkv.weight", self.vector(f"{layer}.qkv.bias")
        twice = len(shape.projections) == 2
        if fused in self.tensors or fused in self.on_gpus:
            whole = self.matrix(fused)
            if not twice:
                return Linear(whole, bias)
            if isinstance(whole, _native.Matrix):
                return Linear(Stacked((whole, self._rows_from(fused, shape.context))), bias)
            there = cast("DeviceRows", whole)
            return Linear(Stacked((there, replace(there, data=there.data[shape.context :]))), bias)
        names = shape.projections
        if shape.latent is not None:
            names = ("q" if shape.latent.q_rank is None else "q_a", "kv_a")
        parts = tuple(self.matrix(f"{layer}.{n}.weight") for n in names)
        parts = (*parts, parts[1]) if twice else parts
        return Linear(Stacked(parts) if len(parts) > 1 else parts[0], bias)

    def _rows_from(self, name: str, first: int) -> _native.Matrix:
        """Return the rows of a tensor in RAM from `first` on."""
        info, group = self.tensors[name], self.ops.native.group if name in self.grouped else 1
        at, id = info.offset + first * info.stride, quant.FORMATS[info.format].id
        return _native.Matrix(self.arena, at, id, info.shape[0] - first, info.shape[1], info.stride, group)

    def token_inputs(self) -> TokenInputs | None:
        if not self.spec.per_layer_dim:
            return None
        norm = self.vector("per_layer.norm.weight")
        assert norm is not None, "the manifest demands it"
        return TokenInputs(
            self.matrix("per_layer.embed.weight"), self.matrix("per_layer.project.weight"), norm
        )

    def per_layer(self, layer: str) -> PerLayer | None:
        if not self.spec.per_layer_dim:
            return None
        gate, down = (self.matrix(f"{layer}.per_layer.{part}.weight") for part in ("gate", "down"))
        norm = self.norm(f"{layer}.per_layer.post_norm")
        assert norm is not None, "the manifest demands it"
        return PerLayer(gate, down, norm)

    def router_norm(self, layer: str) -> Norm | None:
        """Return the norm of a router's own input, of which it takes a part: by the square root of dim."""
        norm = self.norm(f"{layer}.router.norm")
        return None if norm is None else replace(norm, weight=norm.weight * np.float32(self.spec.dim**-0.5))

    def mixer(self, i: int) -> Mixer | None:
        """Return what a recurrent layer has in place of attention."""
        kind, a, of = self.spec.mixer(i), f"layers.{i}.mixer", self.spec.mixer_vectors(i)

        def matrix(name: str) -> WeightMatrix:
            return self.matrix(f"{a}.{name}.weight")

        def table(name: str) -> F32:
            found = self.vector(f"{a}.{name}")
            assert found is not None, name
            return found.reshape(of[f"mixer.{name}"])

        if kind == "conv":
            return ShortConv(matrix("in"), table("conv.weight"), matrix("out"))
        if kind not in RECURRENT:
            return None
        conv, norm, out = table("conv.weight"), table("norm.weight"), matrix("out")
        decay, dt_bias = table("decay"), table("dt_bias")
        if kind == "mamba2":
            bias = self.vector(f"{a}.conv.bias")
            return Mamba2(matrix("in"), conv, bias, decay, dt_bias, table("skip"), norm, out)
        qkv, z, beta, alpha = map(matrix, ("qkv", "z", "beta", "alpha"))
        return DeltaNet(qkv, z, beta, alpha, conv, decay, dt_bias, norm, out)

    def _latent(self, layer: str) -> LatentMatrices | None:
        """Return the matrices of a latent attention but the first and the last."""
        kv_norm, q_b = self.vector(f"{layer}.kv_a_norm.weight"), f"{layer}.q_b.weight"
        if kv_norm is None:
            return None
        k_b, v_b = (self.matrix(f"{layer}.{name}.weight") for name in ("k_b", "v_b"))
        q_norm = self.vector(f"{layer}.q_a_norm.weight")
        there = q_b in self.tensors or q_b in self.on_gpus
        return LatentMatrices(kv_norm, k_b, v_b, q_norm, self.matrix(q_b) if there else None)

    def layer(self, i: int) -> Layer:
        a, experts = f"layers.{i}", self.spec.ffn(i).experts
        scale, shape = self.vector(f"{a}.scale"), self.spec.attention(i)
        gate, attends = f"{a}.shared.router.weight", shape is not None
        return Layer(
            attn_norm=self.norm(f"{a}.attn_norm"),
            qkv=self.qkv(i) if attends else None,
            attn_out=self.linear(f"{a}.attn_out") if attends else None,
            attn_gate=self.matrix(f"{a}.attn_gate.weight") if attends and self.spec.attention_gate else None,
            mixer=self.mixer(i),
            ffn_norm=self.norm(f"{a}.ffn_norm"),
            experts=self.experts(a, experts) if experts else (),
            q_norm=self.vector(f"{a}.q_norm.weight"),
            k_norm=self.vector(f"{a}.k_norm.weight"),
            attn_sub_norm=self.norm(f"{a}.attn_sub_norm"),
            ffn_sub_norm=self.norm(f"{a}.ffn_sub_norm"),
            attn_post_norm=self.norm(f"{a}.attn_post_norm"),
            ffn_post_norm=self.norm(f"{a}.ffn_post_norm"),
            sinks=self.vector(f"{a}.sinks"),
            latent=self._latent(a),
            router=self.router(a) if experts > 1 else None,
            selection_bias=self.vector(f"{a}.router.selection_bias"),
            shared=self.shared(a),
            shared_router=self.matrix(gate) if self.has(gate) else None,
            shared_norm=self.norm(f"{a}.shared.norm"),
            shared_post_norm=self.norm(f"{a}.shared.post_norm"),
            experts_post_norm=self.norm(f"{a}.experts_post_norm"),
            router_norm=self.router_norm(a),
            expert_scale=self.vector(f"{a}.router.expert_scale"),
            scale=1.0 if scale is None else float(scale[0]),
            per_layer=self.per_layer(a),
            router_copies=self.on_gpus.get(f"{a}.router.weight", {}),
        )


def _check_routers(weights: Weights, ops: CpuOps, name: str) -> None:
    """Raise BadFile for a router that would choose the same experts for every token: one with a NaN."""
    for i, layer in enumerate(weights.layers):
        if layer.router is None or not isinstance(layer.router.weight, _native.Matrix):
            continue
        rows = np.arange(layer.router.weight.shape[0], dtype=np.int32)
        norm = None if layer.router_norm is None else layer.router_norm.weight
        vectors = layer.router.bias, layer.selection_bias, layer.expert_scale, norm
        parts = ops.embed(layer.router.weight, rows), *vectors
        if not all(np.isfinite(x).all() for x in parts if x is not None):
            raise BadFile(
                f"{name}: the router of layer {i} holds a value that is not a finite number; the file is "
                "damaged: fetch it again"
            )


def records(bundle: DeviceRows) -> tuple[DeviceRows | None, DeviceRows]:
    """Return up (None: ungated) and down of a bundle, whose records have one behind the other."""
    first, down = replace(bundle, down=None), bundle.down
    return (None, first) if down is None else (first, replace(first, format=down.format, skip=down.at))


def assemble(made: PackInMemory, name: str) -> Weights:
    """Return the weights of a model that is in memory. Raises BadFile, which begins with `name`."""
    spec, embed = made.spec, made.matrix("embed.weight")
    weights = Weights(
        embed=embed,
        pos_embed=made.matrix("pos_embed.weight") if spec.position == "learned" else None,
        layers=tuple(made.layer(i) for i in range(spec.n_layers)),
        out_norm=made.norm("out_norm"),
        head=Linear(embed, None) if spec.tied_head else made.linear("head"),
        project_in=made.matrix("project_in.weight") if spec.embed_dim is not None else None,
        project_out=made.matrix("project_out.weight") if spec.embed_dim is not None else None,
        token_inputs=made.token_inputs(),
        token_types=made.matrix("token_types.weight") if spec.token_types else None,
        embed_norm=made.norm("embed_norm"),
        classifier=tuple(made.linear(f"classifier.{n}") for n in ("dense", "out")) if spec.classifies else (),
    )
    _check_routers(weights, made.ops, name)
    return weights
