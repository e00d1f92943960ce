"""What a layer launches on a GPU, counted: Triton's kernels are noted instead of run."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_options import natively

from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import BLOCK, KVCache
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.ops import device_sizes
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_rows import DeviceRows
from thermocline.ops.device_sizes import StepLimits
from thermocline.ops.gpu import GpuOps, pages_on
from thermocline.ops.interface import FFN, Batch, FFNPart, FFNStats, Layer, Linear, Norm, Weights
from thermocline.plan.cost import Work, launches
from thermocline.plan.problem import apart, begun_norms, divides

pytestmark = pytest.mark.oracle
DIM, FFN_DIM, HEADS, KV_HEADS, HEAD = 256, 512, 4, 2, 64
Launched = tuple[StandIn, Any, list[str]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """A device, Triton's kernels, and the names of all that is launched."""
    # Not before: other tests have kernels interpreted, which must be said before Triton is imported.
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    from thermocline.ops.kernels import triton_kernels

    names, made = list[str](), StandIn()
    run = made.run

    def noted(kernel: Any, grid: Any, *args: Any, **how: Any) -> None:
        names.append(getattr(kernel, "fn", kernel).__name__)

    def other(kernel: Callable[..., Any], *args: Any) -> None:
        if getattr(kernel, "__module__", "") != triton_kernels.__name__:
            run(names.append, getattr(kernel, "__name__", "kernel"))
        else:
            run(kernel, *args)

    monkeypatch.setattr(triton_kernels, "launch", noted)
    monkeypatch.setattr(made, "run", other)
    yield made, triton_kernels, names
    made.close()


def rows(format: str, n: int, columns: int) -> DeviceRows:
    return DeviceRows(torch.zeros((n, quant.row_bytes(format, columns)), dtype=torch.uint8), format, columns)


def llama(
    format: str, layers: int, activation: str = "silu", experts: int = 1, normed: bool = False
) -> tuple[ModelSpec, Weights]:
    """Return one whose layers are on a device: RMS norms, no biases. `normed`: heads, too."""
    spec = ModelSpec("llama", DIM, FFN_DIM, layers, HEADS, KV_HEADS, HEAD, 64, 256, "rms", 1e-5, activation)
    spec = replace(spec, n_experts=experts, n_experts_active=1, qk_norm=normed)
    norm = Norm(np.ones(DIM, np.float32), None)
    of_down = (FFN_DIM, DIM) if spec.sparse else (DIM, FFN_DIM)
    gates, ups, downs = (rows(format, experts * n, m) for n, m in ((FFN_DIM, DIM), (FFN_DIM, DIM), of_down))
    each = [[x.part(e, experts) for x in (gates, ups, downs)] for e in range(experts)]
    parts = [FFNPart(Linear(gate, None), up, down, "gpu:0") for gate, up, down in each]
    layer = Layer(
        attn_norm=norm,
        qkv=Linear(rows(format, (HEADS + 2 * KV_HEADS) * HEAD, DIM), None),
        attn_out=Linear(rows(format, DIM, HEADS * HEAD), None),
        ffn_norm=norm,
        experts=tuple(FFN((part,), None, spec.sparse) for part in parts),
    )
    if normed:
        layer = replace(layer, q_norm=np.ones(HEAD, np.float32), k_norm=np.ones(HEAD, np.float32))
    if experts > 1:
        router = Linear(np.zeros((experts, DIM), np.float32), None)
        layer = replace(layer, router=router, router_copies={"gpu:0": rows(format, experts, DIM)})
    table = natively(np.zeros((64, DIM), np.float32))
    return spec, Weights(table, None, (layer,) * layers, norm, Linear(rows(format, 64, DIM), None))


def of_step(
    device: StandIn,
    kernels: Any,
    names: list[str],
    format: str,
    tokens: int,
    layers: int,
    activation: str = "silu",
    experts: int = 1,
    normed: bool = False,
) -> list[str]:
    """Return the launches of a step, in order."""
    spec, weights = llama(format, layers, activation, experts, normed)
    limits = StepLimits(max(tokens, 4), 4, spec.max_context, BLOCK)
    ops = GpuOps((device,), kernels, CpuOps(1), spec, limits)
    kv = KVCache(spec, 2, storage=lambda layer, shape: pages_on(device, shape))
    at = np.arange(tokens, dtype=np.int32)
    batch = Batch(at, at, np.zeros_like(at), np.zeros((1, 2), np.int32), at[-1:])
    names.clear()
    forward(bind(spec, weights, ops), kv, batch, ops, sparsity="exact", stats=FFNStats())
    return list(names)


@pytest.mark.parametrize(
    "format, tokens, wanted",
    [
        (format, 1, ["heads_few", "attend", "matmul_few", "gate_up_few", "matmul_few"])
        for format in ("f16", "q4_0")
    ] + [
        ("f16", 17, ["norm", "halve", "matmul_many", "rope_store", "attend_many", "join_spans", "halve",
                     "matmul_many", "norm", "halve", "matmul_many", "halve", "matmul_many", "activate",
                     "halve", "matmul_many"]),
    ],
)  # fmt: skip
def test_launches_of_a_dense_layer(format: str, tokens: int, wanted: list[str], launched: Launched) -> None:
    """Two layers have a layer's more than one has. The first norm of few tokens has a launch of its own."""
    one, two = (of_step(*launched, format, tokens, n) for n in (1, 2))
    begin = one.index(wanted[0])
    assert one[begin : begin + len(wanted)] == wanted, one
    assert two == one[:begin] + 2 * wanted + one[begin + len(wanted) :]
    assert tokens > 1 or one[begin - 1] == "norm"


@pytest.mark.parametrize("format", ["f16", "q4_0", "q6_k"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_a_plan_counts_the_launches(format: str, tokens: int, launched: Launched) -> None:
    """Of dense and sparse FFNs, and of mixtures of both: as many whatever the number of experts."""
    kinds = (("silu", 1), ("relu", 1), ("silu", 3), ("relu", 3), ("silu", 8))
    for (activation, experts), normed in itertools.product(kinds, (False, True)):
        one, two = (of_step(*launched, format, tokens, n, activation, experts, normed) for n in (1, 2))
        spec, _ = llama(format, 1, activation, experts, normed)
        work, more = Work("exact", tokens, experts=experts), apart(spec, 0, spec.max_context)
        counted = launches(divides(spec, 0), False, format, work, more)
        begun = begun_norms(spec) if tokens == 1 else 0
        # The first layer begins with a norm. Its attention ends with the product behind its scores.
        attended = max(i for i, name in enumerate(one) if name in ("attend", "attend_many", "join_spans"))
        out = next(i for i, name in enumerate(one) if i > attended and name.startswith("matmul"))
        of_attention = out + 1 - one.index("norm")
        of_ffn = len(two) - len(one) + begun - of_attention
        assert counted == (of_attention, of_ffn), (activation, experts, one)


def test_many_spans_are_joined_by_a_launch_of_their_own(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = llama("f16", 1)
    assert spec.max_context == 256 and device_sizes.spans(256, 1) == 2
    for most, joined in ((2 * 2 * HEAD, 0), (2 * 2 * HEAD - 1, 1)):
        monkeypatch.setattr(device_sizes, "JOINED_APART", most)
        assert of_step(*launched, "f16", 1, 1).count("join_spans") == apart(spec, 0, 256) == joined


def test_launches_overlap_where_that_is_asked_for_and_the_card_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    from triton.backends.compiler import GPUTarget

    from thermocline.ops.kernels import triton_kernels, triton_target

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda **how: overlapped.append("launch_pdl" in how)

    overlapped: list[bool] = []
    for asked, arch in ((False, 90), (True, 89), (True, 90)):
        monkeypatch.setenv("THERMOCLINE_OVERLAP", str(int(asked)))
        monkeypatch.setattr(triton_target, "current_target", lambda arch=arch: GPUTarget("cuda", arch, 32))
        triton_kernels.launch(Kernel(), (1,))
    assert overlapped == [False, False, True]


def test_a_format_is_multiplied_in_the_same_numbers_wherever_that_is_said() -> None:
    """Device code knows it from how rows are read, plans and the stand-in by name."""
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    from thermocline.ops.kernels.triton_stored import operands

    assert {f for f in quant.FORMATS if operands(f) in ("f32", "tf32")} == set(device_sizes.AS_F32)
    assert {f for f in quant.FORMATS if operands(f) == "f16"} == set(device_sizes.AS_F16)


def test_every_kernel_that_is_launched_waits_for_the_one_before_it_first() -> None:
    """The compile test looks at the kernels of one token alone; prompts have others."""
    pytest.importorskip("triton", reason="triton is not installed: pip install '.[gpu]'")
    from thermocline.ops.kernels import triton_kernels

    rooms = Path(triton_kernels.__file__).parent
    host = ast.parse((rooms / "triton_kernels.py").read_text(encoding="utf-8"))
    named = {x for x in ast.walk(host) if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name)}
    launched = {(x.value.id, x.attr) for x in named if x.value.id.startswith("triton_")}  # type: ignore[attr-defined]
    kernels = {
        (path.stem, f.name): f.body
        for path in rooms.glob("triton_*.py")
        for f in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(f, ast.FunctionDef)
    }
    assert len(launched) > 30 and launched <= kernels.keys()
    for name in launched:
        said = list(map(ast.unparse, kernels[name]))
        assert "follow()" in said, name
        before = " ".join(said[1 : said.index("follow()")])  # behind the docstring
        assert not re.search(r"tl\.(load|store|atomic)", before), name
