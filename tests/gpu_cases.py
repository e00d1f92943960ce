"""What the tests of GPU kernels share: matrices as they are stored, a paged cache, and how close is close."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_kernels import as_the_kernel_sees

from thermocline.engine.kv_cache import in_ram
from thermocline.model import quant
from thermocline.ops import reference
from thermocline.ops.device_rows import DeviceRows, Scratch
from thermocline.ops.device_sizes import FEW, KernelSizes
from thermocline.ops.interface import F32, I32, Batch, Heads, KVShape

SIZES = KernelSizes(tokens=130, dim=768, neurons=320, heads=8, head_dim=128, positions=512, rank=64)

SIXTEEN = ("q6_k", "q3_k", "q2_k")  # columns of a scale: many tokens meet these in f16


@dataclass(frozen=True)
class Kernels:
    """One table of kernels, and where its tensors live."""

    ops: ModuleType
    device: str
    nmse: float  # how far from the reference a sum may be
    slow: bool  # interpreted: a millisecond an operation, so that small matrices must do

    def put(self, a: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(a)).to(self.device)  # a copy: kernels write in place

    def some(self, a: Any) -> torch.Tensor | None:
        return None if a is None else self.put(a)

    def filled(self, *shape: int) -> torch.Tensor:
        """Full of what no kernel may leave there, or read."""
        return torch.full(shape, float("nan"), device=self.device)

    def scratch(self) -> Scratch:
        made = Scratch.of(SIZES, self.device)
        made.floats[: len(made.floats) - SIZES.arrivals].fill_(float("nan"))
        return made

    def rows(self, format: str, w: F32, skip: int = 0, pad: int = 0) -> tuple[DeviceRows, F32]:
        """Stored with `skip` bytes before each row and `pad` behind it, and what that decodes to."""
        data = quant.encode(format, w)
        wide = np.pad(data, ((0, 0), (skip, pad)), constant_values=0xFF)  # 0xFF.. is a NaN
        return DeviceRows(self.put(wide), format, w.shape[1], skip), quant.decode(format, data, w.shape[1])

    def check(self, got: torch.Tensor, want: F32) -> None:
        assert tuple(got.shape) == want.shape
        assert nmse(got.cpu().numpy(), want) <= self.nmse


def multiply_rows_alike(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply as tensor cores do: with BLAS a row's bits depend on where it lies."""

    def matmul(a: F32, b: F32, dtype: Any) -> F32:
        y: F32 = np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype), optimize=False)
        return y

    if kernels.slow:
        monkeypatch.setattr(np, "matmul", matmul)


def prepare_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter replace Triton's words once a launch. At every call of a helper it looked through
    its 600 names again: a quarter to a half of a test's time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def unless_replaced(fn: Any) -> Any:
        seen = [m for m in (tl, tl.core) if any(m is value for value in fn.__globals__.values())]
        done = all(inspect.isfunction(m.static_range) for m in seen)
        return interpreter._LangPatchScope() if done else replace(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", unless_replaced)


def nmse(got: F32, want: F32) -> float:
    power = float((want.astype(np.float64) ** 2).mean())
    off = float(((got.astype(np.float64) - want) ** 2).mean())
    return off / power if power else off


def met(format: str, x: F32) -> F32:
    """Tokens as a GPU's rows in this format meet them: as the CPU's do; many as they are, by SIXTEEN."""
    return as_the_kernel_sees(format, x) if len(x) <= FEW or format not in SIXTEEN else x


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def noise(format: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows of random bits, with scales that are numbers."""
    rng = np.random.default_rng(columns)
    data = rng.integers(0, 256, (rows, quant.row_bytes(format, columns)), np.uint8)
    for name, plane in quant.planes(format, data).items():
        if name in ("number", "scale", "minimum", "super", "super_minimum"):
            plane[:] = quant.encode(
                "f32" if format == "f32" else "f16", normal(1, rows, plane[0].size // 2)
            ).reshape(plane.shape)
    return data


def columns(format: str) -> tuple[int, ...]:
    """One block, odd numbers of them, and more than a step of every kernel takes in small."""
    return {1: (1, 33, 300), 32: (32, 96, 288), 256: (256, 512, 768)}[quant.FORMATS[format].block]


def whole(format: str, n: int) -> int:
    """n columns, or the first whole number of blocks that has as many."""
    block = quant.FORMATS[format].block
    return -(-n // block) * block


@dataclass(frozen=True)
class Attention:
    """Some sequences midway: what `rope_store` and `attention` get, and what the reference says.

    Pages are as a GPU has them: k [pages, heads, dim, block], v [pages, heads, block, dim].
    """

    heads: Heads
    qkv: F32
    batch: Batch
    cos: F32 | None
    sin: F32 | None
    k: Any
    v: Any

    def expected(self) -> tuple[F32, Any, Any]:
        """out, and k and v as they are afterwards."""
        pages, _, block, _ = self.v.shape
        shape = KVShape(pages, self.heads.n_kv, self.heads.dim, block)
        at = shape.places(np.arange(pages, dtype=np.int32)).T  # [pages, heads]
        kv = in_ram(0, shape)
        kv.k[at], kv.v[at] = self.k, self.v
        step = reference.step(self.batch, block, self.cos, self.sin, self.heads.window)
        out = reference.attention(self.heads, self.qkv, step, kv)
        return out, kv.k[at], kv.v[at]


def heads(n: int, n_kv: int, dim: int, **changes: Any) -> Heads:
    given: dict[str, Any] = {"window": None, "scale": dim**-0.5, "softcap": None}
    given |= {"q_norm": None, "k_norm": None, "norm_eps": 1e-5} | changes
    return Heads(n, n_kv, dim, **given)


def attention_case(h: Heads, lengths: list[int], tokens: int, rotary: int, block: int = 32) -> Attention:
    """Sequences of these lengths, each with its last `tokens` positions in the batch, pages in random order.

    Slots that no position has reached hold NaN; blocks before a window are absent.
    """
    rng = np.random.default_rng(len(lengths) + tokens)
    width = max(-(-n // block) for n in lengths) + 1
    pages = rng.permutation(len(lengths) * width).astype(np.int32)
    table = np.full((len(lengths), width), -1, np.int32)
    k = np.full((len(pages), h.n_kv, h.dim, block), np.nan, np.float16)
    v = np.full((len(pages), h.n_kv, block, h.dim), np.nan, np.float16)
    positions: list[int] = []
    sequence: list[int] = []
    for s, length in enumerate(lengths):
        first = length - min(tokens, length)
        start = 0 if h.window is None else max(0, first + 1 - h.window)
        stored = length if h.shares else first  # an earlier layer stored those of the step, too
        for b in range(start // block, -(-length // block)):
            page = pages[s * width + b]
            table[s, b] = page
            filled = max(0, min(block, stored - b * block))
            k[page, :, :, :filled] = rng.standard_normal((h.n_kv, h.dim, filled))
            v[page, :, :filled] = rng.standard_normal((h.n_kv, filled, h.dim))
        positions += range(first, length)
        sequence += [s] * (length - first)
    at = np.array(positions, np.int32)
    qkv = rng.standard_normal((len(at), h.width), dtype=np.float32)
    angle = at[:, None] * (0.5 ** np.arange(rotary // 2))[None, :].astype(np.float32)
    cos, sin = (np.cos(angle, dtype=np.float32), np.sin(angle, dtype=np.float32)) if rotary else (None, None)
    ids: I32 = np.zeros(len(at), np.int32)
    batch = Batch(ids, at, np.array(sequence, np.int32), table, ids[:1])
    return Attention(h, qkv, batch, cos, sin, k, v)
