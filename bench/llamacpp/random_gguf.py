"""Write a GGUF of random weights in a shape that `thermocline synth` does not write, for vs_llamacpp.py.

    python bench/llamacpp/random_gguf.py nemotron-3-nano-30b --layers 14 --format q4_0 --dir /tmp/gguf

The file has the name that vs_llamacpp.py looks for. Rows of a matrix are drawn from a few thousand quantised
ones, so the weights say something of speed and of agreement, and nothing of sparsity. The head is as fine as
llama.cpp's own quantiser makes it, and Thermocline: else one of the two engines reads less for each token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
from numpy.typing import NDArray

from thermocline.model.block_layout import to_gguf
from thermocline.model.quant import encode

F32 = NDArray[np.float32]
POOL = 4096  # rows of each width
CHUNK = 1 << 14  # rows written at a time


@dataclass(frozen=True)
class Tensor:
    """A tensor, its shape as numpy has it. `values` makes one in f32; without it, it is a matrix."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[tuple[int, ...]], F32] | None = None
    size: float = 1.0  # of its numbers, times columns ** -0.5


Tensors = Iterator[Tensor]
RNG = np.random.default_rng(0)


def ones(shape: tuple[int, ...]) -> F32:
    return np.ones(shape, np.float32)


def small(shape: tuple[int, ...]) -> F32:
    return RNG.standard_normal(shape, dtype=np.float32) * np.float32(0.02)


def router(shape: tuple[int, ...]) -> F32:
    return RNG.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)


def kernel(shape: tuple[int, ...]) -> F32:
    return RNG.standard_normal(shape, dtype=np.float32) * np.float32(0.5)


def decay(shape: tuple[int, ...]) -> F32:
    """-exp(A_log), as Mamba-2 begins: -1 to -16."""
    return -RNG.uniform(1, 16, shape).astype(np.float32)


def time_step(shape: tuple[int, ...]) -> F32:
    """A bias whose softplus is 0.001 to 0.1."""
    dt = np.exp(RNG.uniform(math.log(1e-3), math.log(0.1), shape))
    return np.log(np.expm1(dt)).astype(np.float32)


def ends(dim: int, vocab: int, *, tied: bool = False) -> Tensors:
    yield Tensor("token_embd.weight", (vocab, dim), size=dim**0.5)
    yield Tensor("output_norm.weight", (dim,), ones)
    if not tied:
        yield Tensor("output.weight", (vocab, dim))


def attention(b: str, dim: int, heads: int, kv: int, size: int, *, gated: bool = False) -> Tensors:
    yield Tensor(f"{b}attn_q.weight", (heads * size * (2 if gated else 1), dim))
    yield Tensor(f"{b}attn_k.weight", (kv * size, dim))
    yield Tensor(f"{b}attn_v.weight", (kv * size, dim))
    yield Tensor(f"{b}attn_output.weight", (dim, heads * size), size=0.3)


def mixture(b: str, dim: int, experts: int, width: int, *, gated: bool = True) -> Tensors:
    yield Tensor(f"{b}ffn_gate_inp.weight", (experts, dim), router)
    if gated:
        yield Tensor(f"{b}ffn_gate_exps.weight", (experts, width, dim))
    yield Tensor(f"{b}ffn_up_exps.weight", (experts, width, dim))
    yield Tensor(f"{b}ffn_down_exps.weight", (experts, dim, width), size=0.5)


def shared(b: str, dim: int, width: int, *, gated: bool = True) -> Tensors:
    if gated:
        yield Tensor(f"{b}ffn_gate_shexp.weight", (width, dim))
    yield Tensor(f"{b}ffn_up_shexp.weight", (width, dim))
    yield Tensor(f"{b}ffn_down_shexp.weight", (dim, width), size=0.5)


# ---- the shapes: architecture, its keys, its tensors


def qwen36(layers: int) -> tuple[str, dict[str, Any], Tensors]:
    dim, vocab, inner, groups, state, heads = 2048, 248320, 4096, 16, 128, 32
    channels = inner + 2 * groups * state
    keys: dict[str, Any] = {
        "vocab_size": vocab, "context_length": 262144, "embedding_length": dim, "block_count": layers,
        "attention.head_count": 16, "attention.head_count_kv": 2, "attention.key_length": 256,
        "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": heads,
        "ssm.group_count": groups, "full_attention_interval": 4, "expert_count": 256, "expert_used_count": 8,
        "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512,
    }  # fmt: skip

    def tensors() -> Tensors:
        yield from ends(dim, vocab)
        for i in range(layers):
            b = f"blk.{i}."
            yield Tensor(f"{b}attn_norm.weight", (dim,), ones)
            yield Tensor(f"{b}post_attention_norm.weight", (dim,), ones)
            if (i + 1) % 4 == 0:
                yield from attention(b, dim, 16, 2, 256, gated=True)
                yield Tensor(f"{b}attn_q_norm.weight", (256,), ones)
                yield Tensor(f"{b}attn_k_norm.weight", (256,), ones)
            else:
                yield Tensor(f"{b}attn_qkv.weight", (channels, dim))
                yield Tensor(f"{b}attn_gate.weight", (inner, dim))
                yield Tensor(f"{b}ssm_conv1d.weight", (channels, 4), kernel)
                yield Tensor(f"{b}ssm_dt.bias", (heads,), time_step)
                yield Tensor(f"{b}ssm_a", (heads,), decay)
                yield Tensor(f"{b}ssm_beta.weight", (heads, dim))
                yield Tensor(f"{b}ssm_alpha.weight", (heads, dim))
                yield Tensor(f"{b}ssm_norm.weight", (128,), ones)
                yield Tensor(f"{b}ssm_out.weight", (dim, inner), size=0.3)
            yield from mixture(b, dim, 256, 512)
            yield Tensor(f"{b}ffn_gate_inp_shexp.weight", (dim,), small)
            yield from shared(b, dim, 512)

    return "qwen35moe", keys, tensors()


PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"  # Nemotron-3-Nano's 52 blocks


def nemotron(layers: int) -> tuple[str, dict[str, Any], Tensors]:
    dim, vocab, inner, groups, state, heads = 2688, 131072, 4096, 8, 128, 64
    blocks, channels = PATTERN[:layers], inner + 2 * groups * state
    keys: dict[str, Any] = {
        "vocab_size": vocab, "context_length": 262144, "embedding_length": dim, "block_count": layers,
        "attention.head_count": 32, "attention.head_count_kv": [2 * (b == "*") for b in blocks],
        "attention.key_length": 128, "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": [1856 * (b == "E") for b in blocks], "rope.dimension_count": 128,
        "ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": heads,
        "ssm.group_count": groups, "expert_count": 128, "expert_used_count": 6, "expert_shared_count": 1,
        "expert_feed_forward_length": 1856, "expert_shared_feed_forward_length": 3712,
        "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 1,
        "expert_group_used_count": 1, "expert_gating_func": 2,
    }  # fmt: skip

    def tensors() -> Tensors:
        yield from ends(dim, vocab)
        for i, kind in enumerate(blocks):
            b = f"blk.{i}."
            yield Tensor(f"{b}attn_norm.weight", (dim,), ones)
            if kind == "*":
                yield from attention(b, dim, 32, 2, 128)
            elif kind == "E":
                yield Tensor(f"{b}exp_probs_b.bias", (128,), small)
                yield from mixture(b, dim, 128, 1856, gated=False)
                yield from shared(b, dim, 3712, gated=False)
            else:
                yield Tensor(f"{b}ssm_in.weight", (inner + channels + heads, dim))
                yield Tensor(f"{b}ssm_conv1d.weight", (channels, 4), kernel)
                yield Tensor(f"{b}ssm_conv1d.bias", (channels,), small)
                yield Tensor(f"{b}ssm_dt.bias", (heads,), time_step)
                yield Tensor(f"{b}ssm_a", (heads, 1), decay)
                yield Tensor(f"{b}ssm_d", (heads, 1), ones)
                yield Tensor(f"{b}ssm_norm.weight", (groups, inner // groups), ones)
                yield Tensor(f"{b}ssm_out.weight", (dim, inner), size=0.3)

    return "nemotron_h_moe", keys, tensors()


def smallthinker(layers: int) -> tuple[str, dict[str, Any], Tensors]:
    dim, vocab = 1536, 151936
    keys: dict[str, Any] = {
        "vocab_size": vocab, "context_length": 32768, "embedding_length": dim, "block_count": layers,
        "attention.head_count": 12, "attention.head_count_kv": 2, "attention.key_length": 128,
        "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
        "rope.dimension_count": 128, "feed_forward_length": 768, "expert_count": 32, "expert_used_count": 4,
        "expert_feed_forward_length": 768, "expert_gating_func": 2,
    }  # fmt: skip

    def tensors() -> Tensors:
        yield from ends(dim, vocab, tied=True)
        for i in range(layers):
            b = f"blk.{i}."
            yield Tensor(f"{b}attn_norm.weight", (dim,), ones)
            yield Tensor(f"{b}ffn_norm.weight", (dim,), ones)
            yield from attention(b, dim, 12, 2, 128)
            yield from mixture(b, dim, 32, 768)

    return "smallthinker", keys, tensors()


SHAPES: dict[str, Callable[[int], tuple[str, dict[str, Any], Tensors]]] = {
    "qwen3.6-35b-a3b": qwen36,
    "nemotron-3-nano-30b": nemotron,
    "smallthinker-4b": smallthinker,
}


# ---- writing


class DrawnRows:
    """A tensor as GGUFWriter streams it: rows drawn from a pool of quantised ones."""

    dtype = np.dtype(np.int8)  # with uint8 GGUFWriter would take shapes to be in bytes

    def __init__(self, pool: NDArray[np.uint8], rows: int) -> None:
        self._pool, self._rows = pool, rows

    @property
    def nbytes(self) -> int:
        return int(self._rows * self._pool.shape[1])

    def tofile(self, file: IO[bytes]) -> None:
        for at in range(0, self._rows, CHUNK):
            picked = RNG.integers(0, len(self._pool), min(CHUNK, self._rows - at))
            file.write(self._pool[picked].data)


def head_format(format: str, columns: int) -> str:
    if format in ("f32", "f16", "bf16", "q8_0"):
        return format
    return "q8_0" if columns % 256 else "q6_k"


def write(path: Path, shape: str, layers: int, format: str) -> None:
    architecture, keys, made = SHAPES[shape](layers)
    tensors = list(made)
    names = [t.name for t in tensors]
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    writer: Any = gguf.GGUFWriter(path, architecture)
    writer.add_name(shape)
    for key, value in {**keys, "tokenizer.ggml.model": "none"}.items():
        name = key if key.startswith("tokenizer") else f"{architecture}.{key}"
        kind = gguf.GGUFValueType.get_type(value)
        if kind == gguf.GGUFValueType.INT32:
            kind = gguf.GGUFValueType.UINT32
        writer.add_key_value(name, value, kind)
    pools: dict[tuple[int, float, str], NDArray[np.uint8]] = {}
    for t in tensors:
        if t.values is not None:
            writer.add_tensor(t.name, t.values(t.shape))
            continue
        name = head_format(format, t.shape[-1]) if t.name == head else format
        stored = gguf.GGMLQuantizationType[name.upper()]
        at = (t.shape[-1], t.size, stored.name)
        if at not in pools:
            drawn = RNG.standard_normal((POOL, t.shape[-1]), dtype=np.float32)
            drawn *= np.float32(t.size * t.shape[-1] ** -0.5)
            pools[at] = to_gguf(name, encode(name, drawn))
        rows = DrawnRows(np.ascontiguousarray(pools[at]).view(np.uint8), math.prod(t.shape[:-1]))
        writer.add_tensor(t.name, rows, raw_shape=t.shape, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--format", default="q4_0")
    parser.add_argument("--dir", type=Path, required=True)
    o = parser.parse_args()
    write(o.dir / f"{o.shape}-{o.layers}-{o.format}.gguf", o.shape, o.layers, o.format)


if __name__ == "__main__":
    main()
