"""The ops of a step that is computed on a GPU, on the CPU, or on both: where what lies decides.

The residual stream (`Hidden`) is in one memory or the other and goes where it is wanted. A layer whose
neurons are on both sides is computed on both at once: the CPU is sent the normed stream and returns one sum
(PowerInfer, arXiv 2312.12456, section 5.3). Calls only queue work (`device.py`), so that a step is recorded
once for each size of batch and replayed. Owns the buffers of a step; must not know requests or plans.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thermocline import _native
from thermocline.model.spec import ModelSpec
from thermocline.ops import device_sizes
from thermocline.ops.cpu import CpuOps, disk_error
from thermocline.ops.device import Device
from thermocline.ops.device_layers import (
    Binder,
    DeviceAttention,
    DeviceFFN,
    DeviceJoin,
    DeviceLinear,
    DeviceNorm,
    Sent,
    Vector,
)
from thermocline.ops.device_rows import Rows, Scratch
from thermocline.ops.device_sizes import STREAMS, Buffer, Limits, buffers
from thermocline.ops.interface import F32, FEW, I32, SPARSITIES, Batch, FFNStats, Heads, KVLayer, Layer

RECORDED = 16  # tokens of a step that is recorded and replayed; larger ones are queued anew


class Hidden:
    """[tokens, dim], in the device's memory or in RAM; its buffers go back when nobody holds it."""

    def __init__(self, ops: GpuOps, tokens: int, on_device: bool) -> None:
        self._ops, self._free = ops, ops.free
        self._which = heapq.heappop(self._free)  # the first: so a step takes the same ones each time
        self.device, self.host = (b[:tokens] for b in ops.streams[self._which])
        self.array: F32 = self.host.numpy()
        self.tokens, self.on_device = tokens, on_device

    def copy(self) -> Hidden:
        return self._ops.copied(self)

    def __len__(self) -> int:
        return self.tokens

    def __del__(self) -> None:
        heapq.heappush(self._free, self._which)


@dataclass(frozen=True)
class DeviceStep:
    """What the attentions of a window have in common; its tensors are the same in every step."""

    cos: Vector
    sin: Vector
    positions: Tensor
    sequence: Tensor
    table: Tensor
    slot: _native.StepSlot  # the same for those on the CPU


@dataclass
class Program:
    """What a step has queued, and what it counts."""

    tasks: list[_native.HostTask] = field(default_factory=list)
    known: FFNStats = field(default_factory=FFNStats)  # what needs no looking
    logits: Tensor | None = None  # in RAM
    replay: Callable[[], None] | None = None


class GpuOps:
    """Ops over a device and the CPU beside it, for one model and one KV cache: recordings are of theirs.

    `kernels`: ops.triton_kernels or ops.torch_kernels.

    `limits`: what its buffers are made for. `send_from`: tokens of a step for which the CPU's neurons are
    sent to the device rather than computed beside it.
    """

    def __init__(
        self,
        device: Device,
        kernels: Any,
        cpu: CpuOps,
        spec: ModelSpec,
        limits: Limits,
        send_from: int = 1 << 31,
    ) -> None:
        self.device, self.kernels, self.cpu, self.spec = device, kernels, cpu, spec
        self._pairs = {name: self._made(b) for name, b in buffers(spec, limits).items()}
        self.streams = [self._pairs[f"stream {i}"] for i in range(STREAMS)]
        self.free: list[int] = []  # a heap
        self._normed, self._sum, self._cold = (self._pairs[n] for n in ("normed", "sum", "cold"))
        self._qkv, self._attended = (self._pairs[n][0] for n in ("qkv", "attended"))
        self._hidden = [self._pairs[n][0] for n in ("gate", "up") if n in self._pairs]
        self._logits, self._rows, self._counts = (self._pairs[n] for n in ("logits", "rows", "counts"))
        self._routed, self._weights = (self._pairs.get(n) for n in ("routed", "weights"))
        self._named, self._named_cold = self._pairs["named"][0], self._pairs["named cold"]
        self._scratch = Scratch(self._pairs["scratch"][0], limits.sizes(spec))
        self._pieces = [self._pairs[f"piece {i}"][0] for i in range(2 if spec.sparse else 0)]
        self.send_from = send_from
        self._slots: dict[int | None, _native.StepSlot] = {}
        self._binder = Binder(device, cpu, spec)
        self._programs: dict[tuple[Any, ...], Program | None] = {}
        self._now = Program()
        self._under_way: Program | None = None
        self._task: _native.HostTask | None = None
        self._slot = _native.StepSlot()

    # ---- what does not run on the device

    def embed(self, table: Any, ids: I32) -> F32:
        return self.cpu.embed(table, ids)

    # ---- bound once

    def bind_attention(self, spec: ModelSpec, heads: Heads, layer: Layer) -> Any:
        return self._binder.attention(spec, heads, layer)

    def bind_ffn(self, spec: ModelSpec, layer: Layer) -> Any:
        return self._binder.ffn(spec, layer)

    def _vector(self, v: F32 | None) -> Vector:
        return self._binder.vector(v)

    # ---- a step

    def step(
        self, batch: Batch, block: int, cos: F32 | None, sin: F32 | None, window: int | None = None
    ) -> DeviceStep:
        """The batch's places, sent to where every step has them."""
        self._settle()
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
        slot = self._slots.setdefault(window, _native.StepSlot())
        step = self.cpu.step(batch, block, cos, sin, window)
        slot.set(step)
        self._slot.set(step)
        return DeviceStep(**sent, slot=slot)  # type: ignore[arg-type]

    def run(
        self,
        x: F32,
        rows: I32,
        sparsity: str,
        stats: FFNStats,
        body: Callable[[Any, Any], Any],
    ) -> F32:
        """`body` over the residual stream x -> its logits, of `rows`. The second step of a size is recorded.

        (At the first one kernels are compiled, which cannot be recorded.)
        """
        tokens, key = len(x), (len(x), len(rows), sparsity)
        self._settle()
        self.free, self._task = list(range(STREAMS)), None
        self.streams[0][1][:tokens].copy_(torch.from_numpy(x))
        self._rows[1][: len(rows)].copy_(torch.from_numpy(np.ascontiguousarray(rows)))
        self.device.copy(self._rows[0], self._rows[1])

        def work() -> None:
            self._body(Hidden(self, tokens, on_device=False), rows, body)

        if tokens > RECORDED or key not in self._programs:
            program = self._now = self._under_way = Program()  # also where `work` is broken off half-way
            work()
            if tokens <= RECORDED:
                self._programs[key] = None
        else:
            known = self._programs[key]
            program = self._record(work) if known is None else known
            self._programs[key] = program
            assert program.replay is not None
            self._under_way = program
            program.replay()
        self.device.wait(program.tasks)
        self._under_way = None
        self._tell(program, stats)
        assert program.logits is not None
        logits: F32 = program.logits.numpy().copy()
        return logits

    def _settle(self) -> None:
        """A step that was given up, as by Ctrl-C, ends before its buffers are written to."""
        if self._under_way is not None:
            self.device.wait(self._under_way.tasks)
            for task in self._under_way.tasks:
                with contextlib.suppress(Exception):  # what it met is nobody's any more
                    task.take()
            self._under_way = None

    @property
    def recorded(self) -> dict[tuple[Any, ...], Program]:
        """Steps that are replayed, by (tokens, logits, sparsity)."""
        return {key: p for key, p in self._programs.items() if p is not None}

    def forget(self) -> None:
        """What was recorded: the next steps are queued anew, perhaps to another device."""
        self._programs.clear()

    def _record(self, work: Callable[[], None]) -> Program:
        program = self._now = Program()
        program.replay = self.device.record(work)
        return program

    def _body(self, x: Hidden, rows: I32, body: Callable[[Any, Any], Any]) -> None:
        self.device.run(self._counts[0].zero_)
        logits = body(x, rows)
        self._close_task()
        self.device.copy(self._counts[1], self._counts[0])
        self._now.logits = logits

    def _tell(self, program: Program, stats: FFNStats) -> None:
        """What the step did, into `stats`; raises what a task of the CPU's met."""
        k = program.known
        for name in ("neurons", "rows_dense", "gates_dense", "predictor_bytes"):
            setattr(stats, name, getattr(stats, name) + getattr(k, name))
        active, ups, gates, downs = self._counts[1].tolist()
        stats.active += active + k.active
        stats.rows += (ups if self.spec.gated else 0) + downs + k.rows
        stats.predicted += gates + k.predicted
        met: list[Exception] = []
        for task in program.tasks:  # all of them: what is not taken now would be the next step's
            try:
                active, rows, rows_dense, gates, asked = task.take()
            except Exception as e:
                met.append(disk_error(e) if isinstance(e, _native.DiskError) else e)
                continue
            stats.active += active
            stats.rows += rows
            stats.rows_dense += rows_dense
            stats.predicted += gates
            stats.predictor_bytes += asked
        if met:
            raise met[0]

    # ---- parts of a step: queued

    def copied(self, x: Hidden) -> Hidden:
        made = self._hidden_of(x.tokens)
        if not x.on_device:
            self._to_device(x)
        self.device.run(made.device.copy_, x.device)
        return made

    def rows(self, x: Hidden, rows: I32) -> Hidden:
        """Those rows, of the tokens: known when recorded, but for which they are."""
        if len(rows) == x.tokens:
            return x
        self._to_device(x)
        made = self._hidden_of(len(rows))
        self.device.run(_select, made.device, x.device, self._rows[0][: len(rows)])
        return made

    def norm(self, x: Any, weight: F32, bias: F32 | None, eps: float, kind: str) -> Any:
        if not isinstance(x, Hidden):
            return self.cpu.norm(x, weight, bias, eps, kind)
        self._to_device(x)
        made = self._hidden_of(x.tokens)
        vectors = self._vector(weight), self._vector(bias)
        self.device.run(self.kernels.norm, made.device, x.device, *vectors, eps, kind == "layer")
        return made

    def matmul(self, w: Any, x: Any, bias: F32 | None) -> Any:
        """Of a Hidden: the head, whose answer is wanted in RAM."""
        if not isinstance(x, Hidden):
            return self.cpu.matmul(w, x, bias)
        there, here = (part[: x.tokens] for part in self._logits)
        if isinstance(w, Rows):
            self._to_device(x)
            self._times(there, DeviceLinear(w, self._vector(bias)), x.device)
            self.device.copy(here, there)
        else:
            self._to_host(x)
            linear = _native.Linear(w, bias)
            self._host().matmul(linear, x.array, here.numpy())
        return here

    def read_ahead(self, h: Hidden, bound: Any, sparsity: str) -> None:
        """Nothing: the CPU's part comes when its task does."""

    def attention_add(self, x: Hidden, h: Hidden, b: Any, step: DeviceStep, kv: KVLayer) -> None:
        if not isinstance(b, DeviceAttention):
            self._to_host(x)
            self._to_host(h)
            self._host().attention(x.array, h.array, b, step.slot, kv.k, kv.v)
            return
        self._to_device(x)
        self._to_device(h)
        n, run, k = x.tokens, self.device.run, self.kernels
        qkv, attended = self._qkv[:n], self._attended[:n]
        self._times(qkv, b.qkv, self._normalised(b.norm, h))
        where = (step.positions, step.sequence, step.table, kv.k, kv.v)
        run(k.rope_store, qkv, b.heads, step.cos, step.sin, *where)
        run(k.attention, attended, qkv, b.heads, *where, self._scratch)
        if b.sub_norm is not None:
            run(k.norm, attended, attended, *_parts(b.sub_norm))
        self._join(x, b.join, lambda y, add: self._times(y, b.out, attended, add))

    def ffn_add(self, x: Hidden, h: Hidden, b: Any, sparsity: str, stats: FFNStats) -> None:
        if not isinstance(b, DeviceFFN):
            self._cpu_ffn(x, h, b, sparsity)
            return
        self._to_device(x)
        self._to_device(h)
        normed = self._normalised(b.norm, h, apart=b.cold is not None or b.route is not None)
        named, weights = self._guess(b, normed, sparsity), self._weigh(b, normed)
        sends = bool(b.sent) and x.tokens >= self.send_from
        if b.cold is not None and not sends:
            self._begin_cold(b, b.cold, normed, sparsity, named)
        self._count(b, x.tokens)

        def neurons(y: Tensor, add: bool) -> None:
            if b.gate is not None:
                self._neurons(b, normed, named, weights, y, add)
            elif not add:
                self.device.run(y.zero_)
            if b.down_bias is not None:
                self.device.run(y.add_, b.down_bias)
            if sends:
                self._send(b, normed, weights, y)
            elif b.cold is not None:
                self.device.join()
                self.device.run(y.add_, self._cold[0][: len(y)])

        self._join(x, b.join, neurons)

    def _cpu_ffn(self, x: Hidden, h: Hidden, b: Any, sparsity: str) -> None:
        self._to_host(x)
        self._to_host(h)
        mode, task = SPARSITIES.index(sparsity), self._host()
        if isinstance(b, _native.FFN):
            task.ffn(x.array, h.array, b, mode)
        else:
            task.mixture(x.array, h.array, b, mode)
        self._now.known.neurons += x.tokens * b.neurons
        self._now.known.gates_dense += b.neurons

    def _guess(self, b: DeviceFFN, normed: Tensor, sparsity: str) -> Tensor | None:
        """[tokens, neurons / 8] bits of those to be computed, or None: all."""
        p, n = b.predictor, len(normed)
        if p is None or sparsity != "predict" or n > FEW:
            return None
        width = -(-b.neurons // 8)
        named: Tensor = self._named[: n * width].view(n, width)
        self.device.run(
            self.kernels.predict, named, p.first, p.second, p.threshold, p.hot, p.relu, normed, self._scratch
        )
        size = 0 if p.first is None else p.first.rows * p.first.row_bytes
        self._now.known.predictor_bytes += size + (b.neurons - p.hot) * (p.second.row_bytes + 4)
        return named

    def _weigh(self, b: DeviceFFN, normed: Tensor) -> Tensor | None:
        """[tokens, experts]: how much of each expert a token gets. The CPU is told, so that both agree."""
        if b.route is None or self._routed is None or self._weights is None:
            return None
        logits, weights = (part[0][: len(normed)] for part in (self._routed, self._weights))
        self._times(logits, b.route.router, normed)
        self.device.run(self.kernels.route, weights, logits, b.route.active)
        return weights

    def _begin_cold(
        self,
        b: DeviceFFN,
        cold: _native.FFN | _native.Mixture,
        normed: Tensor,
        sparsity: str,
        named: Tensor | None,
    ) -> None:
        """The CPU's neurons, beside what the device does next: the normed stream there, one sum back."""
        n, device, task = len(normed), self.device, self._new_task()
        to_host = [(self._normed[1][:n], normed)]
        rows = (self._cold[1][:n].numpy(), self._normed[1][:n].numpy())
        task.zero(self._cold[1].numpy())
        if isinstance(cold, _native.Mixture):
            assert self._weights is not None
            there, here = (part[:n] for part in self._weights)
            task.mixture(*rows, cold, SPARSITIES.index(sparsity), here.numpy())
            to_host.append((here, there))
        else:
            names = None
            if named is not None:
                width = -(-cold.neurons // 8)
                there, here = (part[: n * width].view(n, width) for part in self._named_cold)
                device.run(there.copy_, named[:, b.here // 8 :])
                to_host.append((here, there))
                names = here.numpy()
            task.ffn(*rows, cold, SPARSITIES.index(sparsity), names)
        with device.beside():
            for to, source in to_host:
                device.copy(to, source)
            device.call(task)
            device.copy(self._cold[0][:n], self._cold[1][:n])

    def _neurons(
        self,
        b: DeviceFFN,
        normed: Tensor,
        named: Tensor | None,
        weights: Tensor | None,
        y: Tensor,
        add: bool,
    ) -> None:
        if not b.bundles:
            self._dense(b, normed, y, add)
        elif weights is None or len(normed) <= device_sizes.FEW:
            mine = None if named is None else named[:, : -(-b.here // 8)]
            self._bundles(b, normed, mine, weights, y, add)
        else:  # all tokens through each expert: of so many, some go to every one
            for e in range(b.experts):
                self._bundles(b.expert(e), normed, None, weights[:, e : e + 1], y, add or e > 0)

    def _dense(self, b: DeviceFFN, normed: Tensor, y: Tensor, add: bool) -> None:
        n, k, run, a = len(normed), self.kernels, self.device.run, b.activation
        assert b.gate is not None and b.down is not None
        h, up = self._hidden[0][: n * b.here].view(n, b.here), None
        self._times(h, b.gate, normed)
        if b.up is not None:
            up = self._hidden[1][: n * b.here].view(n, b.here)
            self._times(up, DeviceLinear(b.up, None), normed)
        run(k.activate, h, h, up, a.kind, a.threshold, a.up_relu)
        if b.sub_norm is not None:
            run(k.norm, h, h, *_parts(b.sub_norm))
        self._times(y, DeviceLinear(b.down, None), h, add)

    def _bundles(
        self,
        b: DeviceFFN,
        normed: Tensor,
        named: Tensor | None,
        weights: Tensor | None,
        y: Tensor,
        add: bool,
    ) -> None:
        n, k, run, a = len(normed), self.kernels, self.device.run, b.activation
        assert b.gate is not None and b.down is not None
        h = self._hidden[0][: n * b.here].view(n, b.here)
        what = (b.gate.weight, b.gate.bias, b.up, normed, a.kind, a.threshold, a.up_relu)
        run(k.gate_up, h, *what, named, weights, self._counts[0], self._scratch)
        if b.sub_norm is not None:
            run(k.norm, h, h, *_parts(b.sub_norm))
        run(k.down, y, b.down, h, add, self._scratch)

    def _send(self, b: DeviceFFN, normed: Tensor, weights: Tensor | None, y: Tensor) -> None:
        """y += the cold neurons' part, computed here: a piece comes while the one before is computed."""
        pieces = [(e, piece) for e, s in enumerate(b.sent) for piece in self._cut(s)]

        def room(i: int) -> tuple[Tensor, Tensor]:
            (_, s), buffer = pieces[i], self._pieces[i % 2]
            gates, all_ = s.gate.rows * s.gate.stride, s.gate.rows * (s.gate.stride + s.bundle.stride)
            return buffer[:gates].view(s.gate.rows, -1), buffer[gates:all_].view(s.gate.rows, -1)

        def come(i: int) -> None:
            with self.device.beside():
                for to, source in zip(room(i), (pieces[i][1].gate, pieces[i][1].bundle), strict=True):
                    self.device.copy(to, source.data)

        come(0)
        for i, (e, s) in enumerate(pieces):
            self.device.join()
            if i + 1 < len(pieces):
                come(i + 1)  # to where the piece before this one was: it has been computed by then
            gate, bundle = (replace(x, data=at) for x, at in zip((s.gate, s.bundle), room(i), strict=True))
            down = replace(bundle, skip=bundle.row_bytes) if self.spec.gated else bundle
            up = bundle if self.spec.gated else None
            own = replace(b, gate=DeviceLinear(gate, s.bias), up=up, down=down)
            self._bundles(own, normed, None, None if weights is None else weights[:, e : e + 1], y, True)
            self._now.known.rows_dense += (2 if self.spec.gated else 1) * gate.rows

    def _cut(self, s: Sent) -> Iterator[Sent]:
        """Into pieces that a buffer has room for."""
        size = len(self._pieces[0]) // (s.gate.stride + s.bundle.stride) // 32 * 32
        assert size, "a piece holds no 32 neurons"
        for first in range(0, s.gate.rows, size):
            which = slice(first, first + size)
            gate, bundle = (replace(x, data=x.data[which]) for x in (s.gate, s.bundle))
            yield Sent(gate, bundle, None if s.bias is None else s.bias[which])

    def _count(self, b: DeviceFFN, tokens: int) -> None:
        known, rows = self._now.known, 2 if self.spec.gated else 1
        known.neurons += tokens * b.neurons
        known.rows_dense += rows * b.here
        known.gates_dense += b.neurons
        if not b.bundles:
            known.active += tokens * b.here
            known.rows += rows * b.here
            known.predicted += b.here

    # ---- helpers

    def _normalised(self, norm: DeviceNorm | None, h: Hidden, apart: bool = False) -> Tensor:
        """`apart`: not h itself, which may be x: that changes while the CPU is still being sent it, and with
        each expert.
        """
        made = self._normed[0][: h.tokens]
        if norm is not None:
            self.device.run(self.kernels.norm, made, h.device, *_parts(norm))
        elif apart:
            self.device.run(made.copy_, h.device)
        else:
            return h.device
        return made

    def _times(self, y: Tensor, w: DeviceLinear, x: Tensor, add: bool = False) -> None:
        self.device.run(self.kernels.matmul, y, w.weight, x, w.bias, add, self._scratch)

    def _join(self, x: Hidden, how: DeviceJoin, half: Callable[[Tensor, bool], None]) -> None:
        if how.plain:
            half(x.device, True)
            return
        y = self._sum[0][: x.tokens]
        half(y, False)
        none = (None, None, 0.0, False)
        parts = none if how.norm is None else _parts(how.norm)
        self.device.run(self.kernels.add_normed, x.device, y, *parts, how.scale)

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
        made = _native.HostTask(self.cpu.native, self._slot)
        self._now.tasks.append(made)
        return made

    def _close_task(self) -> None:
        if self._task is not None:
            self.device.call(self._task)
            self._task = None

    def _hidden_of(self, tokens: int) -> Hidden:
        return Hidden(self, tokens, on_device=True)

    def _made(self, b: Buffer) -> tuple[Tensor, Tensor]:
        """On the device and, where it has a twin, in RAM."""
        kind = {"f32": torch.float32, "i32": torch.int32, "u8": torch.uint8}[b.kind]
        there = self.device.zeros(b.shape, kind)
        return there, self.device.pinned(b.shape, kind) if b.here else there


def _parts(n: DeviceNorm) -> tuple[Tensor, Vector, float, bool]:
    return n.weight, n.bias, n.eps, n.layer


def _select(to: Tensor, x: Tensor, rows: Tensor) -> None:
    torch.index_select(x, 0, rows, out=to)
