"""The ops of a step that is computed on GPUs, on the CPU, or on both, wherever the weights lie.

The residual stream (`Hidden`) is in one memory or the other and goes where it is wanted. A layer whose
neurons are divided is computed on all its devices at once: the CPU and further GPUs are sent the normed
stream and return one sum each (PowerInfer, arXiv 2312.12456, section 5.3). Calls only queue work
(`device.py`), so that a step is recorded once for each size of batch and replayed.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thermocline import _native
from thermocline.model.spec import ModelSpec
from thermocline.ops import choosing, device_sizes
from thermocline.ops.choosing import DeviceChooser
from thermocline.ops.cpu import CpuOps, disk_error
from thermocline.ops.device_ffn import (
    BegunFFN,
    Handed,
    Pair,
    PartQueue,
    SideGpu,
    further_twins,
    pairs_of,
    parts,
)
from thermocline.ops.device_layers import (
    Binder,
    DeviceAttention,
    DeviceFFN,
    DeviceJoin,
    DeviceLinear,
    DeviceMixer,
    DeviceNorm,
    DevicePerLayer,
    DeviceShared,
    ReadNorm,
    begun_norms,
)
from thermocline.ops.device_rows import BegunNorm, DeviceRows, Kernels, Operand, Scratch, Squares, Vector
from thermocline.ops.device_sizes import STREAMS, StepLimits
from thermocline.ops.interface import (
    F16,
    F32,
    FEW,
    I32,
    Batch,
    FFNStats,
    Heads,
    KVLayer,
    KVShape,
    Layer,
    LayerActivations,
    Linear,
    WeightMatrix,
    Weights,
)
from thermocline.ops.mixing.latent import LatentQueue
from thermocline.ops.mixing.recurrent import MixerQueue
from thermocline.ops.neuron_watch import NeuronWatch

if TYPE_CHECKING:
    from thermocline.ops.device import Device

BoundAttention = DeviceAttention | _native.Attention
BoundMixer = DeviceMixer | _native.Mixer
BoundFFN = DeviceFFN | _native.FFN | _native.Mixture
Half = Callable[[Tensor, bool], None]  # what becomes a tensor, or is added to it
BoundHalf = BoundAttention | BoundMixer | BoundFFN
BoundPerLayer = DevicePerLayer | _native.PerLayer
RECORDED = 16  # tokens of a step that is recorded and replayed; larger ones are queued anew


def pages_on(device: Device, shape: KVShape) -> KVLayer:
    """Allocate a layer's pages: k [pages, heads, head_dim, block], v [pages, heads, block, head_dim].

    Latents are [pages, block, head_dim].
    """
    assert not shape.types.quantised, "a session refuses it"
    if shape.latent:
        latents = cast("F16", device.zeros((shape.pages, shape.block, shape.head_dim), torch.float16))
        return KVLayer(shape, latents, latents)
    pages = shape.pages, shape.heads
    k = device.zeros((*pages, shape.head_dim, shape.block), torch.float16)
    v = device.zeros((*pages, shape.block, shape.head_dim), torch.float16)
    return KVLayer(shape, cast("F16", k), cast("F16", v))  # the GPU's ops alone read it


class Hidden:
    """[tokens, dim], in the device's memory or in RAM; its buffers go back when nobody holds it."""

    def __init__(self, ops: GpuOps, tokens: int, on_device: bool) -> None:
        self._ops, self._free = ops, ops.free
        self._which = heapq.heappop(self._free)  # the first: so a step takes the same ones each time
        self.device, self.host = (b[:tokens] for b in ops.streams[self._which])
        self.array: F32 = self.host.numpy()
        self.tokens, self.on_device = tokens, on_device
        self.begun: BegunFFN | None = None  # then `device` has what that FFN reads, normed
        self.ahead: Operand | None = None  # what the next half reads of it, where its norm has begun

    def __len__(self) -> int:
        return self.tokens

    def __del__(self) -> None:
        heapq.heappush(self._free, self._which)


@dataclass(frozen=True)
class DeviceStep:
    """A step's positions, pages and angles for the layers of one window, in tensors that stay."""

    cos: Vector
    sin: Vector
    positions: Tensor
    sequence: Tensor
    table: Tensor
    slot: _native.StepSlot  # the same for those on the CPU


class ProgramKey(NamedTuple):
    """Steps with the same key are one recording."""

    tokens: int
    logits: int
    sparsity: str
    chooses: bool = False  # tokens; else logits go to RAM
    turn: int = 0


class Parted(NamedTuple):
    """Shares [tokens, n] of experts, as devices are to know them."""

    own: Vector  # on the first GPU, of its experts
    cold: Vector  # there, of the CPU's
    told: Pair | None  # (in RAM, there) of all but the first GPU's
    others: tuple[Vector, ...]  # in RAM, of each further GPU's
    cpus: Vector  # in RAM, of the CPU's


@dataclass(eq=False)
class Program:
    """The tasks that a step has queued, and its counts."""

    tasks: list[_native.HostTask] = field(default_factory=list)
    known: FFNStats = field(default_factory=FFNStats)  # what needs no looking
    counts: list[Tensor] = field(default_factory=list)  # in RAM, of each device
    logits: Tensor | None = None  # in RAM, or where they are chosen from
    chooses: bool = False
    replay: Callable[[], None] | None = None


class GpuOps:
    """Ops over GPUs and the CPU beside them, for one model and one KV cache: recordings are of theirs.

    `devices`: "gpu:0" of a placement, "gpu:1" ...; the residual stream is on the first or in RAM. A step that
    several compute is queued anew each time: a recording is of one device's queues.

    `kernels`: ops.kernels.triton_kernels or ops.torch_kernels.

    `limits`: what its buffers are made for. `send_from`: tokens of a step for which the CPU's neurons are
    sent to the first GPU rather than computed beside it.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        kernels: Kernels,
        cpu: CpuOps,
        spec: ModelSpec,
        limits: StepLimits,
        send_from: int = 1 << 31,
    ) -> None:
        device = devices[0]
        self.kernels, self.cpu, self.spec = kernels, cpu, spec
        made = device_sizes.buffers(spec, limits, len(devices))
        self._pairs = pairs_of(device, made)
        second = further_twins(device, made, self._pairs)
        self._twins = {name: self._pairs[name] for name in second}, second
        self._turn = 0
        self.streams = [self._pairs[f"stream {i}"] for i in range(STREAMS)]
        self.free: list[int] = []  # a heap
        self._normed, self._sum, self._cold = (self._pairs[n] for n in ("normed", "sum", "cold"))
        self._logits, self._rows = (self._pairs[n] for n in ("logits", "rows"))
        self._routed, self._weights = (self._pairs.get(n) for n in ("routed", "weights"))
        self._named, self._named_cold = self._pairs["named"], self._pairs["named cold"]
        scratch = Scratch(self._pairs["scratch"][0], limits.sizes(spec))
        self._queue = PartQueue(device, kernels, spec, self._pairs, scratch)
        self._halves: Sequence[object] = ()  # kept, so that nothing else takes their ids
        self._begun: dict[int, ReadNorm] = {}
        self._latent = LatentQueue(self._queue, self._pairs)
        self._mixers = MixerQueue(self._queue, spec, self._pairs)
        self._side = tuple(SideGpu(d, kernels, spec, limits) for d in devices[1:])
        self.send_from = send_from
        self._slots: dict[tuple[int | None, bool, int], _native.StepSlot] = {}
        self._binder = Binder(devices, cpu, spec)
        self._programs: dict[ProgramKey, Program | None] = {}
        self._now = Program()
        self._under_way: list[Program] = []
        self._task: _native.HostTask | None = None
        self._own_slots = _native.StepSlot(), _native.StepSlot()
        self._watched: dict[int, Tensor] | None = None  # by a layer's route: shares, in RAM
        self._neurons: NeuronWatch | None = None

    @property
    def device(self) -> Device:
        """The first GPU."""
        return self._queue.device

    @device.setter
    def device(self, device: Device) -> None:
        self._queue.device = device

    # ---- what does not run on the device

    def embed(self, table: WeightMatrix, ids: I32) -> F32:
        return self.cpu.embed(table, ids)

    def matmul(self, w: WeightMatrix, x: F32, bias: F32 | None) -> F32:
        return self.cpu.matmul(w, x, bias)

    # ---- bound once

    def bind_attention(self, spec: ModelSpec, heads: Heads, layer: Layer) -> BoundAttention:
        return self._binder.attention(spec, heads, layer)

    def bind_ffn(self, spec: ModelSpec, layer: Layer) -> BoundFFN:
        return self._binder.ffn(spec, layer)

    def in_order(self, halves: Sequence[BoundHalf | None]) -> None:
        """Begin norms where the stream of their half is made, if nothing lies between.

        Experts on disk are asked for by their own layer.
        """
        between = self.spec.parallel or self.spec.per_layer_dim
        self._halves = [] if between else [half for half in halves if half is not None]
        self._begun = begun_norms(self._halves)

    def bind_per_layer(self, spec: ModelSpec, layer: Layer) -> BoundPerLayer:
        return self._binder.per_layer(spec, layer)

    def bind_mixer(self, spec: ModelSpec, layer: Layer) -> BoundMixer:
        return self._binder.mixer(spec, layer)

    def watch_routers(self) -> None:
        """Bring the shares of experts to RAM, too, from here on. Recordings of before are forgotten."""
        self._watched = {}
        self.forget()

    def shares(self, tokens: int) -> list[F32]:
        """Return the last step's shares [tokens, experts] of each layer whose router is on the first GPU."""
        assert self._watched is not None
        return [here[:tokens].numpy() for here in self._watched.values()]

    def watch_neurons(self, tokens: int, look: Callable[[LayerActivations], None]) -> None:
        """Show each FFN's neurons to `look` from here on, of steps of at most so many tokens."""
        watch = self._neurons = NeuronWatch(self.device, self.spec, tokens, look)
        shared = self.spec.n_experts > 1
        for queue in self._queues:
            queue.seen = partial(watch.computed, shared=shared)
        self.forget()

    def chooser(self, spec: ModelSpec, weights: Weights) -> DeviceChooser | None:
        return choosing.chooser(self, spec, weights)

    def _vector(self, v: F32 | None) -> Vector:
        return self._binder.vector(v)

    # ---- a step

    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None
    ) -> DeviceStep:
        """The batch's places, sent to where every step has them."""
        after = cast("choosing.QueuedStep | None", batch.after)
        self._settle(keep=None if after is None else after.program)
        self._take_turn(0 if after is None else 1 - after.turn)
        table, n = batch.table(window), len(batch.ids)
        given = {
            "positions": batch.positions,
            "sequence": batch.sequence,
            "table": table,
            "cos": cos,
            "sin": sin,
        }
        sent: dict[str, Vector] = {}
        for name, array in given.items():
            if array is None:
                sent[name] = None
                continue
            there, here = self._pairs[f"{name} {window}"]
            rows = len(array)
            part = here[:rows, : array.shape[1]] if array.ndim > 1 else here[:rows]
            part.copy_(torch.from_numpy(np.ascontiguousarray(array)))
            self.device.copy(there[:rows], here[:rows])
            sent[name] = there if name == "table" else there[:n]  # all of it: as wide in every step
        slot = self._slots.setdefault((window, cos is not None, self._turn), _native.StepSlot())
        if cos is None:
            self._mixers.begin(batch)
        step = self.cpu.step(batch, block, cos, sin, window)
        slot.set(step)
        self._own_slots[self._turn].set(step)
        return DeviceStep(**sent, slot=slot)  # type: ignore[arg-type]

    def run(
        self,
        x: F32,
        rows: I32,
        sparsity: str,
        stats: FFNStats,
        body: Callable[[Hidden, I32], Tensor],
    ) -> F32:
        """`body` over the residual stream x -> its logits, of `rows`. The second step of a size is recorded.

        (At the first one kernels are compiled, which cannot be recorded.)
        """
        tokens = len(x)
        self._settle()
        self._take_turn(0)
        if self._neurons is not None:
            self._neurons.begin_step()
        self.streams[0][1][:tokens].copy_(torch.from_numpy(x))
        self._rows[1][: len(rows)].copy_(torch.from_numpy(np.ascontiguousarray(rows)))
        self.device.copy(self._rows[0], self._rows[1])

        def work() -> None:
            self._body(Hidden(self, tokens, on_device=False), rows, body)

        program = self.queue(ProgramKey(tokens, len(rows), sparsity), work)
        self.device.wait(program.tasks)
        for side in self._side:
            side.device.wait([])
        if self._neurons is not None:
            self._neurons.end_step()
        self.ended(program, stats)
        assert program.logits is not None
        logits: F32 = program.logits.numpy().copy()
        return logits

    def queue(self, key: ProgramKey, work: Callable[[], None]) -> Program:
        """Queue what `work` does, recorded or as recorded before. It is under way until it has `ended`."""
        self.free, self._task = list(range(STREAMS)), None
        program = self._programs.get(key)
        recorded = key.tokens <= RECORDED and not self._side and self.device.records
        recorded = recorded and self._neurons is None  # each layer is waited for
        if recorded and program is None and key._replace(turn=0) in self._programs:
            program = self._programs[key] = self._record(key, work)
        if program is None:
            program = self._now = Program(chooses=key.chooses)
            self._under_way.append(program)  # also where `work` is broken off half-way
            work()
            if recorded:
                self._programs[key._replace(turn=0)] = None
        else:
            assert program.replay is not None
            self._under_way.append(program)
            program.replay()
        return program

    def ended(self, program: Program, stats: FFNStats) -> None:
        """Take in a step that was waited for: its counts into `stats`; raise what a task of the CPU's met."""
        self._under_way.remove(program)
        self._tell(program, stats)

    def _settle(self, keep: Program | None = None) -> None:
        """A step that was given up, as by Ctrl-C, ends before its buffers are written to."""
        given_up = [p for p in self._under_way if p is not keep]
        if not given_up:
            return
        self.device.wait([task for p in self._under_way for task in p.tasks])
        for side in self._side:
            side.device.wait([])
        for task in (task for p in given_up for task in p.tasks):
            with contextlib.suppress(Exception):  # what it met is nobody's any more
                task.take()
        self._under_way = [p for p in self._under_way if p is keep]

    def finish(self) -> None:
        """Wait for all that is queued. A step that is under way may still be asked what it found."""
        if self._under_way:
            self.device.wait([task for p in self._under_way for task in p.tasks])

    def _take_turn(self, turn: int) -> None:
        """Use these twins in RAM: those of the step before, if that is still under way, stay as they are."""
        self._turn = turn
        self._pairs.update(self._twins[turn])

    @property
    def several(self) -> bool:
        """Whether further GPUs compute a part."""
        return bool(self._side)

    @property
    def turn(self) -> int:
        return self._turn

    def send(self, name: str, array: NDArray[Any]) -> None:
        there, here = (part[: len(array)] for part in self._pairs[name])
        here.copy_(torch.from_numpy(array))
        self.device.copy(there, here)

    def choose(
        self, tokens: int, sparsity: str, c: DeviceChooser, body: Callable[[Hidden, I32], Tensor]
    ) -> tuple[Program, Tensor]:
        """Queue a step whose tokens are `ids`, which become those that `draws` choose: in RAM, too, then."""
        ids, draws = (self._pairs[name][0][:tokens] for name in ("ids", "draws"))
        there, here = (part[:tokens] for part in self._pairs["chosen"])
        between = [self._pairs[name][0] for name in ("keys", "digests")]

        def work() -> None:
            x = self._hidden_of(tokens)
            self.device.run(self.kernels.embed, x.device, c.table, ids, c.embed_scale)
            self._body(x, np.arange(tokens, dtype=np.int32), body)
            logits = self._now.logits
            self.device.run(self.kernels.choose, ids, there, logits, c.logit_scale, draws, *between)
            self.device.copy(here, there)

        return self.queue(ProgramKey(tokens, tokens, sparsity, True, self._turn), work), here

    @property
    def _queues(self) -> list[PartQueue]:
        return [self._queue, *(side.queue for side in self._side)]

    @property
    def recorded(self) -> dict[ProgramKey, Program]:
        """Steps that are replayed."""
        return {key: p for key, p in self._programs.items() if p is not None}

    def forget(self) -> None:
        """Forget recordings: the next steps are queued anew, perhaps to another device."""
        self._programs.clear()

    def _record(self, key: ProgramKey, work: Callable[[], None]) -> Program:
        program = self._now = Program(chooses=key.chooses)
        program.replay = self.device.record(work)
        return program

    def _body(self, x: Hidden, rows: I32, body: Callable[[Hidden, I32], Tensor]) -> None:
        self._now.counts = [queue.counts[1] for queue in self._queues]
        for queue in self._queues:
            queue.begin()
        logits = body(x, rows)
        self._close_task()
        for queue in self._queues:
            queue.end()
        self._now.logits = logits

    def _tell(self, program: Program, stats: FFNStats) -> None:
        """Add a step's counts to `stats`; raise what a task of the CPU's met."""
        stats += program.known
        for counts in program.counts:
            active, ups, gates, downs = counts.tolist()
            stats.active += active
            stats.rows += (ups if self.spec.gated else 0) + downs
            stats.predicted += gates
        met: list[Exception] = []
        for task in program.tasks:  # all of them: what is not taken now would be the next step's
            try:
                stats.count(task.take())
            except Exception as e:
                met.append(disk_error(e) if isinstance(e, _native.DiskError) else e)
        if met:
            raise met[0]

    # ---- parts of a step: queued

    def rows(self, x: Hidden, rows: I32) -> Hidden:
        """Return some of the tokens' rows: a recording knows how many, but not which."""
        if len(rows) == x.tokens:
            return x
        self._to_device(x)
        made = self._hidden_of(len(rows))
        self.device.run(_select, made.device, x.device, self._rows[0][: len(rows)])
        return made

    def norm(self, x: Hidden | F32, weight: F32, bias: F32 | None, eps: float, kind: str) -> Hidden:
        if isinstance(x, np.ndarray):  # what tokens bring to layers: before the stream is here
            return cast("Hidden", self.cpu.norm(x, weight, bias, eps, kind))
        self._to_device(x)
        made = self._hidden_of(x.tokens)
        vectors = self._vector(weight), self._vector(bias)
        self.device.run(self.kernels.norm, made.device, x.device, *vectors, eps, kind == "layer")
        return made

    def head(self, x: Hidden, rows: Linear, project: WeightMatrix | None) -> Tensor:
        """Return the logits' place: in RAM, unless tokens are chosen of them here."""
        assert project is None, "a session refuses such a model"
        there, here = (part[: x.tokens] for part in self._logits)
        if not x.tokens:  # of a prompt that goes on
            return here
        if isinstance(rows.weight, DeviceRows):
            self._to_device(x)
            head = DeviceLinear(rows.weight, self._vector(rows.bias))
            self._queue.times(there, head, Operand(x.device))
            if self._now.chooses:
                return there
            self.device.copy(here, there)
        else:
            self._to_host(x)
            assert isinstance(rows.weight, _native.Matrix)
            self._host().matmul(_native.Linear(rows.weight, rows.bias), x.array, here.numpy())
        return here

    def hidden(self, x: Hidden) -> Tensor:
        here = self._logits[1][: x.tokens]
        if x.tokens:
            self._to_device(x)
            self.device.copy(here, x.device)
        return here

    def routed(self, h: Hidden, bound: BoundFFN) -> F32:
        """Return where `ffn_add` finds the shares: on the device, or in RAM where the layer is the CPU's."""
        assert self._weights is not None
        there, here = (part[: h.tokens] for part in self._weights)
        if isinstance(bound, DeviceFFN):
            self._to_device(h)
            self._weigh(bound, Operand(h.device), h.device)
            return cast("F32", there)
        assert isinstance(bound, _native.Mixture)
        self._to_host(h)
        shares: F32 = here.numpy()
        self._host().routed(h.array, bound, shares)
        return shares

    def begin_ffn(
        self,
        x: Hidden,
        b: BoundFFN,
        sparsity: str,
        *,
        shares: F32 | None = None,
        apart: bool = False,
    ) -> Hidden:
        """Return what a layer's halves read. Where attention is here, others begin their parts of the FFN.

        A stream that the CPU has stays there, since its own layers follow each other.
        """
        if not apart:
            return x
        early = b if isinstance(b, DeviceFFN) and b.early else None
        if early is None and not x.on_device:
            h = Hidden(self, x.tokens, on_device=False)
            self._host().copy(h.array, x.array)
            return h
        if early is not None:
            self._see(x)
        self._to_device(x)
        h, ints = self._hidden_of(x.tokens), None
        if early is None or early.norm is None:
            self.device.run(h.device.copy_, x.device)
        else:
            ints = self._queue.ints("begun", x.tokens, early.readers)
            self.device.run(self.kernels.norm, h.device, x.device, *parts(early.norm), ints)
        if early is not None:
            normed = Operand(h.device, ints)
            h.begun = self._begin(early, normed, x.device, sparsity, cast("Tensor | None", shares))
        return h

    def attention_add(self, x: Hidden, h: Hidden, b: BoundAttention, step: DeviceStep, kv: KVLayer) -> None:
        if not isinstance(b, DeviceAttention):
            self._to_host(x)
            self._host().attention(x.array, x.array, b, step.slot, kv.native)
            return
        normed = self._input_of(b.norm, x, h, b.readers)
        if b.latent is None:
            attended = self._attend(b, normed, step, kv)
        else:
            attended = self._latent.attend(b, b.latent, normed, step, kv)
        begun = self._begin_norm(x, b)
        self._join(x, b.join, lambda y, add: self._queue.times(y, b.out, attended, add, begun))

    def _begin_norm(self, x: Hidden, b: BoundHalf) -> BegunNorm | None:
        """Return the norm that is to begin with the last product of b, which is added to x."""
        read = self._begun.get(id(b))
        if read is None or x.tokens > FEW:
            return None
        out, sums = (self._pairs[name][0][: x.tokens] for name in ("normed", "squares"))
        ints = self._queue.ints("normed", x.tokens, read.readers)
        x.ahead = Operand(out, ints, Squares(sums, read.norm.eps))
        return BegunNorm(read.norm.weight, out, sums, ints)

    def _attend(self, b: DeviceAttention, normed: Operand, step: DeviceStep, kv: KVLayer) -> Operand:
        n, run, k, heads = len(normed), self.device.run, self.kernels, b.heads
        qkv, attended = self._rows_of("qkv", n, heads.width), self._rows_of("attended", n, b.context)
        where = (step.positions, step.sequence, step.table, kv.k, kv.v)
        if any(b.whole_norms):
            self._project_normed(b, qkv, normed)
            run(k.rope_store, qkv, heads, step.cos, step.sin, *where)
        else:
            made_by = [(part.weight, part.bias) for part in b.qkv]
            more = (step.cos, step.sin, *where, self._queue.scratch, normed.ints, normed.squares)
            run(k.project_heads, qkv, made_by, normed.x, heads, *more)
        ints = self._queue.ints("attended", n, [b.out.weight])
        made = None if b.gate is not None or b.sub_norm is not None or heads.dim % 32 else ints
        run(k.attention, attended, qkv, b.heads, *where, self._queue.scratch, made)
        if b.gate is not None:
            gates = self._rows_of("qkv", n, b.context)  # nobody needs the queries any more
            self._queue.times(gates, b.gate, normed)
            run(k.open, attended, gates)
        if b.sub_norm is not None:
            run(k.norm, attended, attended, *parts(b.sub_norm), made := ints)
        return Operand(attended, made)

    def _project_normed(self, b: DeviceAttention, qkv: Tensor, normed: Operand) -> None:
        """qkv, its heads under norms of all of them as one."""
        first = 0
        for part in b.qkv:
            self._queue.times(qkv[:, first : first + part.weight.rows], part, normed)
            first += part.weight.rows
        ends = b.heads.n * b.heads.dim, (b.heads.n + b.heads.n_kv) * b.heads.dim
        for norm, heads_of in zip(b.whole_norms, (qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]), strict=True):
            if norm is not None:
                self.device.run(self.kernels.norm, heads_of, heads_of, norm.weight, None, norm.eps, False)

    def _rows_of(self, name: str, tokens: int, width: int) -> Tensor:
        """Return the start of a buffer as [tokens, width]: layers differ in their heads."""
        return self._pairs[name][0].view(-1)[: tokens * width].view(tokens, width)

    def bring(self, given: F32) -> F32:
        """Send what tokens bring to where every step has it; -> of each layer, (there, here)."""
        there, here = (part.view(-1)[: given.size].view(given.shape) for part in self._pairs["given"])
        here.copy_(torch.from_numpy(given))
        self.device.copy(there, here)
        return cast("F32", list(zip(there, here, strict=True)))

    def per_layer_add(self, x: Hidden, b: BoundPerLayer, given: F32) -> None:
        there, here = cast("Pair", given)
        if not isinstance(b, DevicePerLayer):
            self._to_host(x)
            self._host().per_layer(x.array, b, here.numpy())
            return
        self._to_device(x)
        run, k, a = self.device.run, self.kernels, b.activation
        let_in, y = self._rows_of("let in", *there.shape), self._sum[0][: x.tokens]
        self._queue.times(let_in, b.gate, Operand(x.device))
        run(k.activate, let_in, let_in, None, a.kind, a.bound, False, a.alpha)
        run(let_in.mul_, there)
        self._queue.times(y, b.down, Operand(let_in))
        run(k.add_normed, x.device, y, *parts(b.post_norm), 1.0)
        self._scale(x, b.scale)

    def _scale(self, x: Hidden, by: float) -> None:
        if by != 1:
            self.device.run(x.device.mul_, by)

    def states(self, bound: BoundMixer, slots: int, floats: int) -> F32 | None:
        if not isinstance(bound, DeviceMixer):
            return None
        return cast("F32", self.device.zeros((slots, floats), torch.float32))  # these ops alone read it

    def mixer_add(self, x: Hidden, h: Hidden, b: BoundMixer, step: DeviceStep, states: F32) -> None:
        """`states`: of the layer, as `states` made them."""
        if not isinstance(b, DeviceMixer):
            self._to_host(x)
            self._host().mixer(x.array, x.array, b, states)
            return
        normed = self._input_of(b.norm_before, x, h, [part.weight for part in b.first])
        mixed = Operand(self._mixers.mix(b, normed, step.sequence, cast("Tensor", states)))
        begun = self._begin_norm(x, b)
        self._join(x, b.join, lambda y, add: self._queue.times(y, b.out, mixed, add, begun))

    def ffn_add(
        self,
        x: Hidden,
        h: Hidden,
        b: BoundFFN,
        sparsity: str,
        stats: FFNStats,
        *,
        shares: F32 | None = None,
    ) -> None:
        """x += the FFN's parts: the first GPU's, the other GPUs' in their order, the CPU's."""
        if h.begun is None:
            self._see(h)
        if not isinstance(b, DeviceFFN):
            self._cpu_ffn(x, h, b, sparsity, shares)
        else:
            self._device_ffn(x, h, b, sparsity, cast("Tensor | None", shares))
        if self._neurons is not None:
            self._close_task()
            self._neurons.end(self._now.tasks)

    def _see(self, h: Hidden) -> None:
        """Show what an FFN reads, if anybody looks on."""
        if self._neurons is None:
            return
        if not h.on_device:
            self._close_task()
            self.device.copy(h.device, h.host)
        self._neurons.begin(h.device)

    def _device_ffn(self, x: Hidden, h: Hidden, b: DeviceFFN, sparsity: str, shares: Tensor | None) -> None:
        self._to_device(x)
        self._to_device(h)
        elsewhere = b.cold is not None or bool(b.others)
        begun = h.begun
        if begun is None:
            apart = elsewhere or b.route is not None
            normed = self._normalised(b.norm, h, b.readers, apart=apart)
            begun = self._begin(b, normed, h.device, sparsity, shares)
        normed, sends = begun.normed, begun.sends
        self._count(b, x.tokens)
        following = self._begin_norm(x, b)

        def experts(y: Tensor, add: bool) -> None:
            if b.own is not None:
                self._queue.add(b.own, normed, begun.named, begun.own, y, add, following)
            elif not add:
                self.device.run(y.zero_)
            if b.down_bias is not None:
                self.device.run(y.add_, b.down_bias)
            for part in b.others:
                returned = self._pairs["returned"][0][: len(y)]
                self._side[part.gpu - 1].finish(self.device, returned)
                self.device.run(y.add_, returned)
            if sends:
                ahead = x.tokens > RECORDED and not self._side  # which would wait behind what travels ahead
                sent = self._queue.send(b.pinned, normed, begun.cold, y, ahead=ahead)
                self._now.known.rows_dense += sent
            elif elsewhere:
                self.device.join()
            if b.cold is not None and not sends:
                self.device.run(y.add_, self._cold[0][: len(y)])

        half = experts if b.shared is None else partial(self._beside, b.shared, normed, h.device, experts)
        self._join(x, b.join, half)
        self._scale(x, b.scale)

    def _begin(
        self, b: DeviceFFN, normed: Operand, stream: Tensor, sparsity: str, shares: Tensor | None
    ) -> BegunFFN:
        """Ask which neurons and experts are wanted, and queue the parts of others."""
        named = self._guess(b, normed, sparsity)
        weights = self._weigh(b, normed, stream) if shares is None else shares
        if self._neurons is not None and weights is not None:
            self._neurons.routed(weights)
        shares_of = self._parted(b, weights)
        sends = bool(b.pinned) and named is None and len(normed) >= self.send_from  # all of them, unasked
        if b.others or (b.cold is not None and not sends):
            self._begin_elsewhere(b, None if sends else b.cold, normed.x, sparsity, (named, shares_of))
        return BegunFFN(normed, b.norm, named, shares_of.own, shares_of.cold, sends)

    def _beside(
        self, f: DeviceShared, normed: Operand, stream: Tensor, experts: Half, y: Tensor, add: bool
    ) -> None:
        """y (+)= the FFN of every token, while others compute experts, and their sum: each under its norm."""
        if f.experts_norm is None:
            self._queue.shared(f, normed, y, add)
            experts(y, True)
            return
        run, k, aside = self.device.run, self.kernels, self._pairs["aside"][0][: len(y)]
        assert f.norm is not None and f.post_norm is not None
        if not add:
            run(y.zero_)
        run(k.norm, aside, stream, *parts(f.norm))
        self._queue.shared(f, Operand(aside), aside, False)
        run(k.add_normed, y, aside, *parts(f.post_norm), 1.0)
        experts(aside, False)
        run(k.add_normed, y, aside, *parts(f.experts_norm), 1.0)

    def _cpu_ffn(
        self, x: Hidden, h: Hidden, b: _native.FFN | _native.Mixture, sparsity: str, shares: F32 | None
    ) -> None:
        self._to_host(x)
        self._to_host(h)
        mode, task = self.cpu.mode(sparsity), self._host()
        record = None if self._neurons is None else self._neurons.on_cpu(b.neurons)
        if isinstance(b, _native.FFN):
            task.ffn(x.array, h.array, b, mode, None, record)
        else:
            task.mixture(x.array, h.array, b, mode, shares, record)
        self._now.known.neurons += x.tokens * b.neurons
        self._now.known.gates_dense += b.neurons

    def _guess(self, b: DeviceFFN, normed: Operand, sparsity: str) -> Tensor | None:
        """[tokens, neurons / 8] bits of those to be computed, or None: all."""
        p, n = b.predictor, len(normed)
        if p is None or sparsity != "predict" or n > FEW:
            return None
        width = -(-b.neurons // 8)
        named: Tensor = self._named[0][: n * width].view(n, width)
        self.device.run(
            self.kernels.predict,
            named,
            p.first,
            p.second,
            p.threshold,
            p.hot,
            p.relu,
            normed.x,
            self._queue.scratch,
            normed.ints,
        )
        size = 0 if p.first is None else p.first.rows * p.first.row_bytes
        self._now.known.predictor_bytes += size + (b.neurons - p.hot) * (p.second.row_bytes + 4)
        return named

    def _weigh(self, b: DeviceFFN, normed: Operand, stream: Tensor) -> Tensor | None:
        """[tokens, experts]: how much of each expert a token gets. The CPU is told, so that both agree."""
        r, run = b.route, self.device.run
        if r is None or self._routed is None or self._weights is None:
            return None
        logits, weights = (part[0][: len(normed)] for part in (self._routed, self._weights))
        seen = normed
        if r.norm is not None:
            seen = Operand(self._pairs["aside"][0][: len(normed)])
            run(self.kernels.norm, seen.x, stream, *parts(r.norm))
        self._queue.times(logits, r.router, seen)
        run(self.kernels.route, weights, logits, r.active, r.rule, r.selection_bias, r.expert_scale)
        if self._watched is not None:
            if id(r) not in self._watched:
                self._watched[id(r)] = self.device.pinned(tuple(self._weights[0].shape), torch.float32)
            self.device.copy(self._watched[id(r)][: len(normed)], weights)
        return weights

    def _parted(self, b: DeviceFFN, weights: Vector) -> Parted:
        """Part [tokens, experts] into columns of each device's whole experts; without these all get all."""
        if weights is None or self._weights is None:
            return Parted(None, None, None, (None,) * len(b.others), None)
        here = self._weights[1].view(-1)[: weights.numel()]
        if b.sides is None:
            all_here = here.view(weights.shape)
            return Parted(weights, weights, (all_here, weights), (all_here,) * len(b.others), all_here)
        n, first, made = len(weights), 0, list[Pair]()
        there = self._pairs["parted"][0].view(-1)[: weights.numel()]
        for count in b.sides.counts:
            end = first + count
            made.append((there[n * first : n * end].view(n, count), here[n * first : n * end].view(n, count)))
            if count:
                self.device.run(_select_columns, made[-1][0], weights, b.sides.order[first:end])
            first = end
        told = n * b.sides.counts[0]  # where the first GPU's end
        (own, _), *others, (cold, cpus) = made
        return Parted(own, cold, (here[told:], there[told:]), tuple(x for _, x in others), cpus)

    def _begin_elsewhere(
        self,
        b: DeviceFFN,
        cold: _native.FFN | _native.Mixture | None,
        normed: Tensor,
        sparsity: str,
        asked: tuple[Vector, Parted],
    ) -> None:
        """Queue the CPU's neurons and other GPUs', beside what the first one does next.

        Each is sent the normed stream, and returns one sum. `asked`: neurons that are named, experts' shares.
        """
        n, device, (named, shares) = len(normed), self.device, asked
        task, to_host = None, [(self._normed[1][:n], normed)]
        if shares.told is not None:
            to_host.append(shares.told)
        if cold is not None:
            names = self._names_of(cold, b.neurons, named)
            if names is not None:
                to_host.append(names)
            task = self._cold_task(cold, n, sparsity, (None if names is None else names[0], shares.cpus))
        everyone = None
        if b.others and named is not None:
            everyone = self._named[1][: named.numel()].view(named.shape)
            to_host.append((everyone, named))
        with device.beside():
            for to, source in to_host:
                device.copy(to, source)
            handed = device.mark() if b.others else None
            for part, own in zip(b.others, shares.others, strict=True):
                self._side[part.gpu - 1].start(part, Handed(self._normed[1][:n], everyone, own), handed)
            if task is not None:
                device.call(task)
                device.copy(self._cold[0][:n], self._cold[1][:n])

    def _names_of(
        self, cold: _native.FFN | _native.Mixture, neurons: int, named: Vector
    ) -> tuple[Tensor, Tensor] | None:
        """Return (in RAM, here) the bits of the CPU's neurons, which are the layer's last."""
        if named is None:
            return None
        n, width = len(named), -(-cold.neurons // 8)
        there, here = (part[: n * width].view(n, width) for part in self._named_cold)
        self.device.run(there.copy_, named[:, (neurons - cold.neurons) // 8 :])
        return here, there

    def _cold_task(
        self, cold: _native.FFN | _native.Mixture, n: int, sparsity: str, asked: tuple[Vector, Vector]
    ) -> _native.HostTask:
        names, shares = asked
        task, mode = self._new_task(), self.cpu.mode(sparsity)
        rows = (self._cold[1][:n].numpy(), self._normed[1][:n].numpy())
        record = None if self._neurons is None else self._neurons.on_cpu(cold.neurons)
        task.zero(self._cold[1].numpy())
        if isinstance(cold, _native.Mixture):
            assert shares is not None, "there is a router"
            task.mixture(*rows, cold, mode, shares.numpy(), record)
        else:
            task.ffn(*rows, cold, mode, None if names is None else names.numpy(), record)
        return task

    def _count(self, b: DeviceFFN, tokens: int) -> None:
        known, rows = self._now.known, 2 if self.spec.gated else 1
        known.neurons += tokens * b.neurons
        known.gates_dense += b.neurons
        for part in b.parts:
            known.rows_dense += rows * part.neurons
            if not part.counted:
                known.active += tokens * part.neurons
                known.rows += rows * part.neurons
                known.predicted += part.neurons

    # ---- helpers

    def _input_of(
        self, norm: DeviceNorm | None, x: Hidden, h: Hidden, readers: Sequence[DeviceRows]
    ) -> Operand:
        """Return what attention or a mixer reads of x; an FFN that was begun may have it, in h."""
        self._to_device(x)
        begun = h.begun
        if begun is not None and norm is not None and norm.same_as(begun.norm):
            return begun.normed
        return self._normalised(norm, x, readers)

    def _normalised(
        self, norm: DeviceNorm | None, h: Hidden, readers: Sequence[DeviceRows], *, apart: bool = False
    ) -> Operand:
        """`apart`: not h itself, which may be x: that changes while the CPU is still being sent it, and with
        each expert.
        """
        ahead, h.ahead = h.ahead, None
        if ahead is not None:
            return ahead
        made, ints = self._normed[0][: h.tokens], None
        if norm is not None:
            ints = self._queue.ints("normed", h.tokens, readers)
            self.device.run(self.kernels.norm, made, h.device, *parts(norm), ints)
        elif apart:
            self.device.run(made.copy_, h.device)
        else:
            return Operand(h.device)
        return Operand(made, ints)

    def _join(self, x: Hidden, how: DeviceJoin, half: Half) -> None:
        if how.plain:
            half(x.device, True)
            return
        y = self._sum[0][: x.tokens]
        half(y, False)
        none = (None, None, 0.0, False)
        norm = none if how.norm is None else parts(how.norm)
        self.device.run(self.kernels.add_normed, x.device, y, *norm, how.scale)

    def _to_device(self, x: Hidden) -> None:
        if not x.on_device:
            self._close_task()
            self.device.copy(x.device, x.host)
            x.on_device = True

    def _to_host(self, x: Hidden) -> None:
        if x.on_device:
            self._close_task()
            self.device.copy(x.host, x.device)
            x.on_device = False

    def _host(self) -> _native.HostTask:
        """The task under way: what the CPU does one after the other is one."""
        if self._task is None:
            self._task = self._new_task()
        return self._task

    def _new_task(self) -> _native.HostTask:
        made = _native.HostTask(self.cpu.native, self._own_slots[self._turn])
        self._now.tasks.append(made)
        return made

    def _close_task(self) -> None:
        if self._task is not None:
            self.device.call(self._task)
            self._task = None

    def _hidden_of(self, tokens: int) -> Hidden:
        return Hidden(self, tokens, on_device=True)


def _select_columns(to: Tensor, x: Tensor, columns: Tensor) -> None:
    torch.index_select(x, 1, columns, out=to)


def _select(to: Tensor, x: Tensor, rows: Tensor) -> None:
    torch.index_select(x, 0, rows, out=to)
