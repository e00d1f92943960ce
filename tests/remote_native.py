"""`thermocline._native` in another process: a core built for another processor, behind remote_core.cpp.

As a pytest plugin it takes the native module's place, so that any test of the core runs on that core:
`REMOTE_CORE="qemu-aarch64 core" pytest -p remote_native tests/test_kernels.py`. REMOTE_LEVELS: only these
instruction sets. What csrc/bindings/bindings.cpp does (checking arguments) it does not.
"""

from __future__ import annotations

import itertools
import os
import shlex
import struct
import subprocess
import sys
import types
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thermocline.model.formats import FORMATS

SIGNS = len(FORMATS)  # csrc/kernels/formats.h: after the others
NONE = 2**64 - 1
F32 = NDArray[np.float32]

_core = subprocess.Popen(
    shlex.split(os.environ["REMOTE_CORE"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
_arenas = itertools.count()


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def array(a: NDArray[Any] | bytes) -> bytes:
    data = a if isinstance(a, bytes) else a.tobytes()
    return u64(len(data)) + data


def values(a: NDArray[Any] | None) -> bytes:
    return u64(0) if a is None else u64(1) + array(a)


def packed(part: Any, kind: type) -> bytes:
    """A part of a layer, or what stands for its absence."""
    if part is not None:
        return bytes(part.packed)
    matrix, norm = u64(NONE, 0, 0, 0, 0, 0, 1), values(None) * 2 + f32(0) + u64(0)
    absent: dict[type, bytes] = {Matrix: matrix, Norm: norm, Latent: u64(0, 0, 0, 0) + norm * 2 + matrix * 3}
    return absent[kind]


def ask(what: str, *fields: bytes) -> bytes:
    assert _core.stdin is not None and _core.stdout is not None
    _core.stdin.write(array(what.encode()) + b"".join(fields))
    _core.stdin.flush()
    size = _core.stdout.read(8)
    if len(size) < 8:
        raise RuntimeError(f"the core ended with {_core.wait()} in {what}")
    return _core.stdout.read(struct.unpack("<Q", size)[0])


def numbers(answer: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(answer) // 8}q", answer))


def take(answer: bytes, *outs: NDArray[Any]) -> bytes:
    """The arrays at the answer's beginning into `outs`; what is left."""
    for out in outs:
        out[...] = np.frombuffer(answer[: out.nbytes], out.dtype).reshape(out.shape)
        answer = answer[out.nbytes :]
    return answer


def isa_levels() -> list[str]:
    wanted = os.environ.get("REMOTE_LEVELS", "").split()
    return [level for level in ask("levels").decode().split() if not wanted or level in wanted]


def limits() -> types.SimpleNamespace:
    padding, few, run = numbers(ask("limits"))
    return types.SimpleNamespace(arena_padding=padding, few_tokens=few, page_run=run)


def isa() -> str:
    return isa_levels()[0]


def cache_page_bytes(type: int, dim: int, block: int) -> int:
    return numbers(ask("cache_page_bytes", u64(type, dim, block)))[0]


def crc32c(buffer: Any, seed: int = 0) -> int:
    return numbers(ask("crc32c", array(bytes(buffer)), u64(seed)))[0]


class Arena:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.id = nbytes, next(_arenas)
        if not numbers(ask("arena", u64(self.id, nbytes)))[0]:
            raise MemoryError

    def __del__(self) -> None:
        if _core.poll() is None:
            ask("free", u64(self.id))

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        ask("write", u64(self.id, offset), array(data))

    def fence(self) -> None:
        assert numbers(ask("fence", u64(self.id)))[0]


class Matrix:
    def __init__(
        self, arena: Arena, offset: int, format: int, rows: int, cols: int, stride: int, group: int = 1
    ) -> None:
        self.arena, self.shape, self.interleaved = arena, (rows, cols), group > 1
        self.of = offset, format, rows, cols, stride
        self.packed = u64(arena.id, *self.of, group)


class Part:
    """`held`: the matrices' arenas live as long as the part."""

    def __init__(self, packed: bytes, *held: Any) -> None:
        self.packed, self.held = packed, held


class Norm(Part):
    def __init__(self, weight: F32, bias: F32 | None, eps: float, layer: bool) -> None:
        super().__init__(values(weight) + values(bias) + f32(eps) + u64(layer))


class Linear(Part):
    def __init__(self, weight: Matrix, bias: F32 | None) -> None:
        super().__init__(weight.packed + values(bias), weight)
        self.weight = weight


class Stack(Part):
    def __init__(self, parts: tuple[Matrix, ...], bias: F32 | None) -> None:
        matrices = b"".join(part.packed for part in parts)
        super().__init__(u64(len(parts)) + matrices + values(bias), *parts)


class Heads(Part):
    def __init__(
        self,
        n: int,
        n_kv: int,
        dim: int,
        window: int,
        scale: float,
        softcap: float,
        q_norm: F32 | None,
        k_norm: F32 | None,
        eps: float,
        sinks: F32 | None = None,
        whole_norms: bool = False,
        norms_last: bool = False,
        v_norm: F32 | None = None,
        shares: bool = False,
        own_norms: bool = False,
        chunked: bool = False,
        temperature: float = 0.0,
        temperature_span: float = 1.0,
        value_dim: int = 0,
    ) -> None:
        sizes = u64(n, n_kv, dim, min(window, 2**31 - 1))
        norms = values(q_norm) + values(k_norm) + f32(eps)
        rest = values(sinks) + u64(whole_norms, norms_last) + values(v_norm)
        rest += u64(shares, own_norms, chunked, value_dim) + f32(temperature, temperature_span)
        super().__init__(sizes + f32(scale, softcap) + norms + rest)


class Join(Part):
    def __init__(self, norm: Norm | None, scale: float, after: float = 1.0) -> None:
        super().__init__(packed(norm, Norm) + f32(scale, after))


class Step(Part):
    def __init__(
        self,
        positions: NDArray[np.int32],
        sequence: NDArray[np.int32],
        table: NDArray[np.int32],
        block: int,
        window: int,  # csrc/bindings/bindings.cpp holds the heads to it
        cos: F32 | None,
        sin: F32 | None,
        state_from: NDArray[np.int32] | None = None,
        state_to: NDArray[np.int32] | None = None,
    ) -> None:
        arrays = b"".join(values(a) for a in (positions, sequence, table, cos, sin))
        rotary = 0 if cos is None else 2 * cos.shape[1]
        super().__init__(arrays + u64(len(positions), block, table.shape[1], rotary))


class Attention(Part):
    def __init__(
        self,
        norm: Norm | None,
        qkv: Stack,
        out: Linear,
        heads: Heads,
        sub_norm: Norm | None,
        join: Join,
        gate: Matrix | None = None,
        latent: Latent | None = None,
    ) -> None:
        parts = packed(norm, Norm) + qkv.packed + out.packed + heads.packed
        super().__init__(
            parts + packed(sub_norm, Norm) + join.packed + packed(gate, Matrix) + packed(latent, Latent),
            qkv,
            out,
            gate,
            latent,
        )


class Latent(Part):
    def __init__(
        self,
        *,
        nope: int,
        rope: int,
        q_norm: Norm | None,
        q_b: Matrix | None,
        kv_norm: Norm,
        k_b: Matrix,
        v_b: Matrix,
    ) -> None:
        rank = v_b.shape[1]
        sizes = u64(nope, rope, rank, v_b.shape[0] // (k_b.shape[0] // rank))
        norms = packed(q_norm, Norm) + kv_norm.packed
        matrices = packed(q_b, Matrix) + k_b.packed + v_b.packed
        super().__init__(sizes + norms + matrices, q_b, k_b, v_b)


class PerLayer(Part):
    def __init__(self, gate: Matrix, down: Matrix, activation: int, join: Join) -> None:
        super().__init__(gate.packed + down.packed + u64(activation) + join.packed, gate, down)


class Predictor(Part):
    def __init__(self, first: Matrix | None, second: Matrix, threshold: F32, hot: int, relu: bool) -> None:
        parts = packed(first, Matrix) + second.packed + values(threshold) + u64(hot, relu)
        super().__init__(parts, first, second)


class FFN(Part):
    def __init__(
        self,
        norm: Norm | None,
        gate: Linear,
        up: Matrix | None,
        down: Matrix,
        down_bias: F32 | None,
        activation: int,
        threshold: float,
        up_relu: bool,
        bundles: bool,
        sub_norm: Norm | None,
        join: Join,
        predictor: Predictor | None = None,
        disk: None = None,
        gate_disk: None = None,
        gate_bias: None = None,
        up_bias: F32 | None = None,
        alpha: float = 1.0,
        limit: float = 0.0,
    ) -> None:
        assert disk is gate_disk is gate_bias is None, "no disk over there"
        parts = packed(norm, Norm) + gate.packed + packed(up, Matrix) + down.packed + values(down_bias)
        rest = u64(activation) + f32(threshold) + u64(up_relu, bundles) + packed(sub_norm, Norm) + join.packed
        guess = packed(None, Matrix) * 2 + values(None) + u64(0, 0) if predictor is None else predictor.packed
        guess += values(up_bias) + f32(alpha, limit)
        super().__init__(parts + rest + guess, gate, up, down, predictor)
        self.neurons = gate.weight.shape[0]


class KVPages:
    def __init__(
        self,
        k: NDArray[Any],
        v: NDArray[Any] | None,
        k_type: int,
        v_type: int,
        heads: int,
        dim: int,
        block: int,
    ) -> None:
        self.k, self.v, self.shape = k, k[:0] if v is None else v, u64(k_type, v_type, heads, dim, block)

    @property
    def packed(self) -> bytes:
        return self.shape + array(self.k) + array(self.v)


class Context:
    def __init__(self, threads: int, isa: str = "") -> None:
        self.threads, self.isa = threads, isa or isa_levels()[0]
        self.id = u64(*numbers(ask("context", u64(threads), array(self.isa.encode()))))

    @property
    def group(self) -> int:
        return int(numbers(ask("group", self.id))[0])

    def interleaves(self, w: Matrix) -> bool:
        return not w.interleaved and bool(numbers(ask("interleaves", self.id))[0])

    def interleaved(self, arena: Arena, w: Matrix) -> Matrix:
        (group,) = numbers(ask("interleaved", self.id, u64(arena.id), w.packed))
        return Matrix(arena, *w.of, group)

    def embed(self, w: Matrix, ids: NDArray[np.int32], out: F32) -> None:
        take(ask("embed", self.id, w.packed, array(ids)), out)

    def norm(self, x: F32, weight: F32, bias: F32 | None, eps: float, layer: bool, out: F32) -> None:
        norm = Norm(weight, bias, eps, layer).packed
        take(ask("norm", self.id, norm, array(x), u64(x.shape[1])), out)

    def matmul(self, w: Matrix, x: F32, bias: F32 | None, out: F32, add: bool) -> None:
        take(ask("matmul", self.id, w.packed, values(bias), array(x), array(out), u64(add)), out)

    def attention(self, qkv: F32, heads: Heads, step: Step, kv: KVPages, out: F32) -> None:
        fields = heads.packed, step.packed, kv.packed, array(qkv)
        take(ask("attention", self.id, *fields), kv.k, kv.v, qkv, out)

    def attention_add(self, x: F32, h: F32, layer: Attention, step: Step, kv: KVPages) -> None:
        fields = layer.packed, step.packed, kv.packed, array(x), array(h)
        take(ask("attention_add", self.id, *fields), kv.k, kv.v, x)

    def per_layer_add(self, x: F32, layer: PerLayer, given: F32) -> None:
        take(ask("per_layer_add", self.id, layer.packed, array(x), array(given)), x)

    def ffn_add(
        self, x: F32, h: F32, layer: FFN, sparsity: int, record: F32 | None = None
    ) -> tuple[int, ...]:
        recorded = () if record is None else (record,)
        fields = layer.packed, array(x), array(h), u64(sparsity, len(recorded))
        return tuple(numbers(take(ask("ffn_add", self.id, *fields), x, *recorded)))


sys.modules["thermocline._native"] = sys.modules[__name__]
