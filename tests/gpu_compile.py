"""Compiles the Triton kernels ahead of time, as their launches of full-sized models would: needs no GPU.

    python -P tests/gpu_compile.py sm_80,sm_90 1,16 [q4_0,others]

for these targets (sm_90+overlap is one), numbers of tokens, and formats of rows ("others": the kernels that
read none). Without formats it compiles all. It prints a line of JSON a kernel: registers, bytes spilled,
shared memory, loads of weights by their bytes; of a matrix product also the instructions of its longest
inner loop.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from thermocline.model import quant
from thermocline.model.sizes import gpu_stride
from thermocline.model.spec import Latent, Recurrent, Router
from thermocline.ops.device_rows import SIGNS, BegunNorm, DeviceRows, Scratch, Squares
from thermocline.ops.device_sizes import FEW, KernelSizes, choice_sizes, quantised_words
from thermocline.ops.interface import BANNED, CANDIDATES, Heads
from thermocline.ops.kernels import triton_kernels as ops

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}
DIM, NEURONS, HEADS, KV, HEAD, PAGES = 4096, 11008, 32, 8, 128, 256
OTHERS = "others"  # in a format's place
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def empty(*shape: int, type: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=type, device="meta")


def rows(format: str, n: int, columns: int, stride: int = 0, skip: int = 0) -> DeviceRows:
    width = -(-columns // 8) if format == SIGNS else quant.row_bytes(format, columns)
    return DeviceRows(empty(n, stride or gpu_stride(width), type=torch.uint8), format, columns, skip)


def unpadded(format: str, n: int, columns: int) -> DeviceRows:
    """Return rows as they are sent for a prompt: of some formats at no multiples of 16 bytes."""
    return rows(format, n, columns, quant.row_bytes(format, columns))


def scratch(tokens: int) -> Scratch:
    sizes = KernelSizes(tokens, DIM, NEURONS, 71, 512, PAGES * 32, 1024, 64 * 768, experts=64, active=8)
    return Scratch.of(sizes, "meta")


def of_rows(format: str, t: int) -> None:
    """Every kernel that decodes rows."""
    row = quant.row_bytes(format, DIM)
    stride = -(-2 * row // 512) * 512
    gate, x, h = rows(format, NEURONS, DIM), empty(t, DIM), empty(t, NEURONS)
    up, back = (rows(format, NEURONS, DIM, stride, skip) for skip in (0, row))
    ids, counts = empty(t, type=torch.int32), empty(4, type=torch.int32)
    named = empty(t, NEURONS // 8, type=torch.uint8)
    ops.embed(x, gate, ids, 1.0)
    squares, begun = of_norm(t)
    ops.matmul(h, gate, x, None, False, scratch(t), None, squares)
    ops.gate_up(h, gate, None, up, x, "relu", 0.0, False, named, None, counts, scratch(t))
    ops.gate_up(h, gate, None, up, x, "relu", 0.0, True, None, empty(t, 8), counts, scratch(t))
    if t <= FEW:
        dense = None, None, None, scratch(t)
        h_ints = empty(quantised_words(t, NEURONS), type=torch.int32) if gate.takes_ints else None
        more = None, 1.0, False, None, h_ints, squares
        ops.gate_up(h, gate, None, gate, x, "gelu", 0.0, False, *dense, *more)
        ops.matmul(x, rows(format, DIM, NEURONS), h, None, True, scratch(t), h_ints, None, begun)
        of_heads(format, t)
    else:
        ops.matmul(x, unpadded(format, DIM, NEURONS), h, None, False, scratch(t))
    ops.down(x, back, h, True, scratch(t), begun)
    of_experts(format, t)


def of_norm(t: int) -> tuple[Squares | None, BegunNorm | None]:
    """Return what few tokens' products take of a norm that has begun, and of one that they begin."""
    if t > FEW:
        return None, None
    sums, ints = empty(t, DIM // 32), empty(quantised_words(t, DIM), type=torch.int32)
    return Squares(sums, 1e-5), BegunNorm(empty(DIM), empty(t, DIM), sums, ints)


def of_heads(format: str, t: int) -> None:
    """Llama's and Qwen2's products that turn and store what they make."""
    heads = Heads(HEADS, KV, HEAD, None, 0.1, None, None, None, 1e-5)
    qkv, turn = empty(t, heads.width), empty(t, HEAD // 2)
    parts = [(rows(format, heads.width, DIM), bias) for bias in (None, empty(heads.width))]
    k, v, paged = pages(t)
    for part in parts:
        more = turn, turn, *paged, k, v, scratch(t), None, of_norm(t)[0]
        ops.project_heads(qkv, [part], empty(t, DIM), heads, *more)


def pages(t: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Keys, values, and of tokens their positions, sequences and table."""
    k, v = (empty(64, KV, *shape, type=torch.float16) for shape in ((HEAD, 32), (32, HEAD)))
    return k, v, [empty(*shape, type=torch.int32) for shape in ((t,), (t,), (4, PAGES))]


def of_experts(format: str, t: int) -> None:
    """Qwen3-30B's and gpt-oss's, and neurons of each of Mixtral's."""
    experts, active, n = 64, 8, 768
    x, shares, counts = empty(t, DIM), empty(t, experts), empty(4, type=torch.int32)
    gate, bias = rows(format, experts * n, DIM), empty(experts * n)
    down = (rows if t <= FEW else unpadded)(format, experts * DIM, n)
    if t <= FEW:
        h, more = empty(t, experts * n), (shares, counts, scratch(t))
        h_ints = empty(quantised_words(t, experts * n), type=torch.int32) if gate.takes_ints else None
        ints = None, 1.0, False, None, h_ints
        ops.gate_up(h, gate, None, gate, x, "silu", 0.0, False, None, *more, *ints)
        ops.gate_up(h, gate, bias, gate, x, "swiglu_oai", 7.0, False, None, *more, bias, 1.7, False)
        ops.down_experts(x, down, h, shares, True, scratch(t), None, of_norm(t)[1])
        return
    h, chosen = empty(t * active, n), (shares, active)
    ops.gate_up_pairs(h, gate, None, gate, x, "silu", 0.0, False, *chosen, counts, scratch(t))
    more = *chosen, counts, scratch(t), bias, 1.7, False
    ops.gate_up_pairs(h, gate, bias, gate, x, "swiglu_oai", 7.0, False, *more)
    ops.down_pairs(x, down, False, h, *chosen, True, scratch(t))
    ops.down_pairs(x, rows(format, experts * n, DIM), True, h, *chosen, True, scratch(t))


def other_heads() -> list[tuple[Heads, int]]:
    """Return heads of other kinds, and how much of each is turned."""

    def heads(n: int, n_kv: int, dim: int, window: int | None, **more: Any) -> Heads:
        weights: Any = empty(n * dim)
        return Heads(n, n_kv, dim, window, 0.1, None, weights, weights, 1e-5, **more)

    ones: Any = empty(512)
    return [
        (heads(16, 2, 512, None, v_norm=ones), 512),  # Gemma 4's, without a window and with one
        (heads(16, 8, 256, 1024, v_norm=ones, shares=True), 256),
        (heads(40, 8, 128, 8192, chunked=True, norms_last=True), 128),  # Llama 4's
        (heads(40, 8, 128, None, temperature=0.1, temperature_span=8192), 0),
        (heads(32, 8, 160, None, own_norms=True), 40),  # StableLM's
        (heads(71, 1, 64, None), 64),  # Falcon's
    ]


def of_tokens(t: int) -> None:
    """Those that see no rows, and predictors' signs."""
    x, h, weight, pairs = empty(t, DIM), empty(t, NEURONS), empty(DIM), empty(t, 8)
    q_norm: Any = empty(HEAD)
    k_norm: Any = empty(HEAD)
    heads: Any = Heads(HEADS, KV, HEAD, None, 0.1, 50.0, q_norm, k_norm, 1e-5)
    qkv, turn = empty(t, (HEADS + 2 * KV) * HEAD), empty(t, HEAD // 2)
    k, v, paged = pages(t)
    ints = empty(quantised_words(t, DIM), type=torch.int32) if t <= FEW else None
    ops.norm(x, x, weight, weight, 1e-5, True)
    ops.norm(x, x, weight, None, 1e-5, False, ints)
    ops.rope_store(qkv, heads, turn, turn, *paged, k, v)
    ops.attention(x, qkv, heads, *paged, k, v, scratch(t), ints)
    of_latents(t, paged)
    for other, turned in other_heads():
        qkv, turn = empty(t, other.width), empty(t, turned // 2) if turned else None
        shapes = (other.dim, 32), (32, other.dim)
        k, v = (empty(64, other.n_kv, *shape, type=torch.float16) for shape in shapes)
        ops.rope_store(qkv, other, turn, turn, *paged, k, v)
        if (
            t > FEW or other.dim <= HEAD
        ):  # of few tokens larger ones spill: 72 bytes at most, of 512 for sm_90
            ops.attention(empty(t, other.n * other.dim), qkv, other, *paged, k, v, scratch(t))
    of_states(t)
    ops.activate(h, h, h, "gelu", 0.0, False)
    ops.open(h, h)
    ops.open(h, empty(t, 1))
    ops.route(pairs, pairs, 2, Router(), None)
    ops.route(pairs, pairs, 2, Router("sigmoid", "normalised", groups=2, group_rule="sum2"), weight)
    ops.route(pairs, pairs, 2, Router("logits", "mixed", epsilon=0.1), None, weight)
    named = empty(t, NEURONS // 8, type=torch.uint8)
    ops.predict(named, None, rows(SIGNS, NEURONS, DIM), empty(NEURONS), 8, False, x, scratch(t))
    ops.softcap(h, 30.0)
    for words in (32000, 151936):  # one pass over candidates, and two
        ids, found = empty(t, type=torch.int32), empty(t, 3, type=torch.int32)
        keys = empty(t * sum(choice_sizes(words)), type=torch.int64)
        sums = empty(t * choice_sizes(words)[0] // CANDIDATES, type=torch.int32)
        draws = empty(t, 5 + BANNED, type=torch.float64)
        ops.choose(ids, found, empty(t, words), 1.0, draws, keys, sums)


def of_latents(t: int, paged: list[torch.Tensor]) -> None:
    """Kernels of latent attention, with DeepSeek-V3's sizes."""
    n, rank, rope, nope = 128, 512, 64, 128
    heads: Any = Heads(
        n, 1, rank + rope, None, 0.1, None, None, None, 1e-5, latent=Latent(rank, nope, rope, nope)
    )
    q, queries, latent = empty(t, n, rank + rope), empty(t, n, nope + rope), empty(t, rank + rope)
    turn, k = empty(t, rope // 2), empty(64, 32, rank + rope, type=torch.float16)
    for format in ("q8_0", "f16"):
        ops.head_products(q[:, :, :rank], rows(format, n * rank, nope), queries[:, :, :nope])
    ops.latent_store(q, queries, latent, heads, empty(rank), turn, turn, *paged, k)
    sizes = KernelSizes(t, DIM, NEURONS, n, rank + rope, PAGES * 32)
    ops.latent_attention(empty(t, n, rank), q, heads, *paged, k, Scratch.of(sizes, "meta"))


def of_states(t: int) -> None:
    """Kernels of recurrent layers, with Qwen3-Next's, Nemotron-H's and LFM2's sizes."""
    sequence, runs = empty(t, type=torch.int32), empty(8, 4, type=torch.int32)
    for r, skips in (
        (Recurrent(4, 32, 128, 16, 128), False),
        (Recurrent(4, 128, 64, 8, 128, True), True),
        (Recurrent(4, 4, 64, 1, 256), True),
    ):
        into, x, out = empty(t, r.inner + r.channels + 2 * r.heads), empty(t, r.channels), empty(t, r.inner)
        states = empty(20, (r.conv - 1) * r.channels + r.state * r.inner)
        bias, decay = empty(r.channels) if r.conv_bias else None, empty(r.heads)
        ops.convolve(x, into, empty(r.conv * r.channels), bias, sequence, runs, states, False)
        gates, skip = into[:, r.inner + r.channels :], decay if skips else None
        ops.scan(out, x, gates, r, decay, decay, skip, runs, states)
        ops.gated_norm(out, into, empty(r.inner if skips else r.head_dim), r.groups, 1e-5, skips)
    out, weight, states = empty(t, 2048), empty(3 * 2048), empty(20, 2 * 2048)
    ops.convolve(out, empty(t, 3 * 2048), weight, None, sequence, runs, states, True)


def source(kernel: Any, args: tuple[Any, ...], fixed: dict[str, Any]) -> ASTSource:
    """As the launcher would specialise it."""
    signature, constants, aligned = {}, dict(fixed), {}
    for i, (name, given) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if kernel.params[i].is_constexpr:
            constants[name], even = given, False
        elif isinstance(given, torch.Tensor):
            signature[name], even = TYPES[given.dtype], given.storage_offset() * given.itemsize % 16 == 0
        elif given is None or (type(given) is int and given == 1):
            constants[name], even = given, False
        else:
            signature[name] = "fp32" if isinstance(given, float) else "i32"
            even = type(given) is int and given % 16 == 0
        if even:
            aligned[(i,)] = [["tt.divisibility", 16]]
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    return ASTSource(kernel, signature, constexprs=constants, attrs=aligned)


def odd_strides(made: ASTSource) -> list[str]:
    """Which rows begin at other addresses than multiples of 16: their loads are narrower."""
    names = list(made.signature)
    wide = {names[i] for (i, *_) in made.attrs}
    strides = {n for n in names if n.endswith("stride") and made.signature[n] == "i32"}
    return [f"{n}=odd" for n in names if n in strides - wide]


WEIGHTS = "data", "gate", "up"  # arguments that point at stored rows
COUNTED = "matmul_few", "matmul_many"  # whose instructions are: to disassemble all took a quarter of the time


def look(made: ASTSource, compiled: Any) -> dict[str, Any]:
    """What ptxas made of it. "weights": loads of stored rows, by their bytes, as the PTX has them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command: list[str] = [str(CUOBJDUMP), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sass = ""
        if made.fn.fn.__name__ in COUNTED:
            command = [str(CUOBJDUMP), "-sass", file.name]
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    ptx = compiled.asm["ptx"]
    return {
        "registers": numbers["REG"],
        "spilled": numbers["STACK"] + numbers["LOCAL"],
        "shared": compiled.metadata.shared,
        "weights": loads_of([i for i, name in enumerate(passed(made)) if name in WEIGHTS], ptx),
        "loop": longest_loop(sass),
        "overlap": of_overlap(ptx),
        "sums": orders(compiled.asm["ttgir"]),
    }


def orders(ttgir: str) -> list[tuple[int, int, str]]:
    """Return of each sum over the columns of floats the rows, the columns, and how threads share them."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    of = (
        r'"tt.reduce"\(%\w+\) <\{axis = 1 : i32\}>(?:(?!"tt.reduce").)*?: \(tensor<(\d+)x(\d+)xf32, (#\w+)>\)'
    )
    return [(int(b), int(n), layouts[name]) for b, n, name in re.findall(of, ttgir, re.DOTALL)]


def of_overlap(ptx: str) -> dict[str, list[str]]:
    """What a kernel does to memory before it waits for the launch before it, and its words to that and the
    next one, in the order of the text. A kernel that does neither has no "before".
    """
    memory = r"(?:ld|st)\.(?:global|volatile)|ld\.acquire|prefetch\.\w+|atom|red\.global|cp\.async"
    words = re.findall(rf"^\s*(?:@\S+ )?({memory}|griddepcontrol\.\w+)", ptx, re.MULTILINE)
    said = [w for w in words if w.startswith("griddepcontrol")]
    return {"said": said, "before": sorted({*words[: words.index(said[0])]}) if said else []}


def passed(made: ASTSource) -> list[str]:
    """The arguments that are no constants, as the PTX numbers them."""
    return [name for name, kind in made.signature.items() if kind != "constexpr"]


def loads_of(arguments: list[int], ptx: str) -> dict[int, int]:
    """How many loads there are of what these arguments point at, by their bytes."""
    lines = [line.strip() for line in ptx.splitlines()]
    known: set[str] = set()
    sizes: dict[int, int] = {}
    while True:
        before, sizes = len(known), {}
        for line in lines:
            names = re.findall(r"%\w+", line.split("//")[0])
            load = re.match(r"(?:@\S+ )?ld\.global[.:\w]*?(?:\.v(\d))?\.[bus](\d+) ", line)
            if load and names and names[-1] in known:
                size = int(load[1] or 1) * int(load[2]) // 8
                sizes[size] = sizes.get(size, 0) + 1
            elif re.match(r"ld\.param", line):
                if any(re.search(rf"_param_{i}\]", line) for i in arguments):
                    known.add(names[0])
            elif not load and re.match(r"(mov|add|mad|cvta|or|selp|mul)", line) and known & {*names[1:]}:
                known.add(names[0])
        if len(known) == before:
            return sizes


def longest_loop(sass: str) -> int:
    """Instructions of the longest loop in which there is no other."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass, re.MULTILINE)
    back = re.compile(r"\bBRA\S* (?:.*, )?0x([0-9a-f]+)")
    jumps = [(int(to[1], 16), int(at, 16)) for at, said in lines if (to := back.search(said))]
    loops = [(to, at) for to, at in jumps if to < at]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return max((sum(to <= int(at, 16) <= end for at, _ in lines) for to, end in inner), default=0)


def kernels(tokens: list[int], formats: list[str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each launch of those calls, once: its name, what to compile, with which options."""
    seen: dict[str, tuple[Any, dict[str, Any]]] = {}

    def launch(
        kernel: Any,
        grid: Any,
        *args: Any,
        warps: int = 4,
        stages: int = 2,
        registers: int | None = None,
        **fixed: Any,
    ) -> None:
        made = source(kernel, args, fixed)
        said = [*(f"{k}={v}" for k, v in fixed.items()), *odd_strides(made)]
        name = " ".join([kernel.fn.__name__, *said])
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True, "maxnreg": registers}
        seen.setdefault(name, (made, options))

    ops.launch = launch
    for t in tokens:
        for format in formats:
            of_tokens(t) if format == OTHERS else of_rows(format, t)
    for name, (made, options) in seen.items():
        yield name, made, options


class Absent:
    """As much of a card's driver as kernels ask about while they are compiled."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target


def pretend(name: str) -> GPUTarget:
    """Be on sm_NN, sm_NN+overlap, or gfxNNN: an AMD GPU, gfx9 with 64 threads in a warp."""
    name = name.partition("+")[0]
    if name.startswith("gfx"):
        target = GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    else:
        target = GPUTarget("cuda", int(name[3:]), 32)
    triton.runtime.driver.set_active(Absent(target))
    return target


def compiled_for(name: str, made: ASTSource, options: dict[str, Any]) -> Any:
    target = pretend(name)
    if name.endswith("+overlap"):
        options = options | {"launch_pdl": True}
    amd = target.backend == "hip"
    known = {k: v for k, v in options.items() if k != "maxnreg"} if amd else options
    return triton.compile(made, target=target, options=known)


def amd_facts(compiled: Any) -> dict[str, Any]:
    """What LLVM says of its code."""
    assembly = compiled.asm["amdgcn"]
    said = {
        k: int(n)
        for k, n in re.findall(r"\.(vgpr_count|vgpr_spill_count|group_segment_fixed_size): *(\d+)", assembly)
    }
    return {
        "registers": said["vgpr_count"],
        "spilled": said["vgpr_spill_count"],
        "shared": said["group_segment_fixed_size"],
    }


def main(targets: str, tokens: str, formats: str = ",".join([*quant.FORMATS, OTHERS])) -> None:
    for target in targets.split(","):
        pretend(target)  # launches may depend on it
        for name, made, options in kernels([int(t) for t in tokens.split(",")], formats.split(",")):
            compiled = compiled_for(target, made, options)
            facts = {"triton": triton.__version__, "kernel": name, "target": target}
            facts |= amd_facts(compiled) if target.startswith("gfx") else look(made, compiled)
            print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
