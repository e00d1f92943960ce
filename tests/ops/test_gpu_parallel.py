"""Layers whose halves read the same stream: others begin with the FFN before the first GPU attends.

The truth is the same layer with the FFN begun behind attention: no bit differs.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import placements
import pytest
from placements import ALL
from test_gpu import gpu_ops, logits, placed, predictors_of, stand_in, storage
from test_options import SPEC, TOKENS, random_weights

from thermocline.convert import synthetic
from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import BLOCK, KVCache
from thermocline.model.spec import ModelSpec
from thermocline.ops import device_layers
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_layers import DeviceFFN
from thermocline.ops.device_sizes import StepLimits
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import F32, Batch, FFNStats, LayerActivations, Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.plan.placement import Placement
from thermocline.session import gpu_weights

pytestmark = pytest.mark.oracle
__all__ = ["stand_in"]  # a fixture

BOTH = replace(SPEC, norm="layer", parallel=True)
# As a family has them: (its spec, whether both halves have one norm).
FAMILIES: dict[str, tuple[ModelSpec, bool]] = {
    "Falcon 7B": (replace(BOTH, activation="gelu", gated=False, n_kv_heads=1), True),
    "Falcon 40B": (replace(BOTH, activation="gelu", gated=False), False),
    "Falcon 7B, ReLU": (replace(BOTH, gated=False, n_kv_heads=1), True),
    "Falcon 40B, ReLU": (replace(BOTH, gated=False), False),
    "Phi": (replace(BOTH, activation="gelu_tanh", gated=False, rotary_dim=8), True),
    "Command R": (replace(BOTH, activation="silu", logit_scale=0.25), True),
    "Command R+": (replace(BOTH, activation="silu", qk_norm=True, qk_norm_each=True), True),
    "GPT-NeoX": (replace(BOTH, activation="gelu", gated=False, rotary_dim=4), False),
    "StableLM 2 12B": (replace(BOTH, activation="silu", qk_norm=True, qk_norm_each=True, rotary_dim=4), True),
    "RMS norms, ReLU": (replace(SPEC, parallel=True), False),
    "residual scale, ReLU": (replace(SPEC, parallel=True, residual_scale=0.3, layer_scale=True), True),
}


def weights_of(spec: ModelSpec, one_norm: bool) -> Weights:
    """Random ones. A norm of both halves is there twice, as in a pack."""
    w = random_weights(spec)
    if not one_norm:
        return w

    def layer(x: Any) -> Any:
        n = x.attn_norm
        bias = None if n.bias is None else n.bias.copy()
        return replace(x, ffn_norm=replace(n, weight=n.weight.copy(), bias=bias))

    return replace(w, layers=tuple(map(layer, w.layers)))


def two_norms(w: Weights, layer: int) -> Weights:
    """Return weights of which a layer's halves have a norm each."""
    layers = list(w.layers)
    norm = layers[layer].ffn_norm
    assert norm is not None
    layers[layer] = replace(layers[layer], ffn_norm=replace(norm, weight=norm.weight * np.float32(1.5)))
    return replace(w, layers=tuple(layers))


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Bind FFNs that are begun where their turn is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_layers, "_mixes_on_gpu", lambda layer: False)
        yield


WAYS: tuple[Callable[[], AbstractContextManager[None]], ...] = (in_turn, contextlib.nullcontext)


def early_ones(spec: ModelSpec, w: Weights, ops: GpuOps) -> list[bool]:
    return [isinstance(b, DeviceFFN) and b.early for b in bind(spec, w, ops).ffn]


def places_of(spec: ModelSpec) -> Iterator[Placement]:
    """Attention on the GPU, with some neurons, none and all; one layer's attention in RAM."""
    counts = (0, 96, ALL) if spec.sparse else (0, ALL)
    for n in counts:
        yield placements.every(spec, True, False, n)
    each = tuple(placements.layer(spec, i != 0, False, counts[-1 - i]) for i in range(spec.n_layers))
    yield Placement(each, "gpu:0")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_ffn_that_is_begun_early_changes_no_bit(name: str, stand_in: StandIn) -> None:
    """Steps that are recorded, replayed, and of many tokens."""
    spec, one_norm = FAMILIES[name]
    random = weights_of(spec, one_norm)
    for places in places_of(spec):
        w = placed(random, places)
        for chunk in (1, 5, TOKENS):
            stats, early = FFNStats(), FFNStats()
            with in_turn():
                truth = logits(spec, w, gpu_ops(stand_in, spec), places, chunk, stats=stats)
            y = logits(spec, w, gpu_ops(stand_in, spec), places, chunk, stats=early)
            assert np.array_equal(y, truth) and early == stats, (places, chunk)
        wanted = [x.attention == "gpu:0" for x in places.layers]
        assert early_ones(spec, w, gpu_ops(stand_in, spec)) == wanted
        with in_turn():
            assert not any(early_ones(spec, w, gpu_ops(stand_in, spec)))


# ---- what is queued when


def divided(spec: ModelSpec, stand_in: StandIn, one_norm: bool = False) -> tuple[Weights, GpuOps, Placement]:
    places = placements.every(spec, True, False, 96)
    return placed(weights_of(spec, one_norm), places), gpu_ops(stand_in, spec), places


PARTS = ("norm", "call", "attention", "gate_up", "join")


def queued(
    spec: ModelSpec,
    made: tuple[Weights, GpuOps, Placement],
    patch: pytest.MonkeyPatch,
    names: tuple[str, ...] = PARTS,
) -> list[str]:
    """Return what a step of one token queues, in order."""
    w, ops, places = made
    found, real = list[str](), {name: getattr(StandIn, name) for name in ("run", "copy", "call", "join")}

    def noting(name: str) -> Callable[..., None]:
        def noted(self: StandIn, *args: Any) -> None:
            found.append(getattr(args[0], "__name__", "kernel") if name == "run" else name)
            real[name](self, *args)

        return noted

    model, kv = bind(spec, w, ops), KVCache(spec, 1, storage=storage(places, ops.device))
    at = np.zeros(1, np.int32)
    batch = Batch(at, at, at, at[None], at)
    with patch.context() as own:
        for name in real:
            own.setattr(StandIn, name, noting(name))
        forward(model, kv, batch, ops, sparsity="exact", stats=FFNStats())
    return [name for name in found if name in names]


@pytest.mark.parametrize("one_norm", [False, True])
def test_the_cpus_task_is_queued_before_attention_where_both_read_the_same(
    one_norm: bool, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And joined behind the neurons of the GPU. A norm that both halves have is applied once."""
    each = ["norm", "call", *(["norm"] * (not one_norm)), "attention", "gate_up", "join"]
    got = queued(BOTH, divided(BOTH, stand_in, one_norm), monkeypatch)
    assert got == BOTH.n_layers * each + ["norm"]


def test_the_cpus_task_is_queued_behind_attention_elsewhere(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(BOTH, parallel=False)
    each = ["norm", "attention", "norm", "call", "gate_up", "join"]
    assert queued(spec, divided(spec, stand_in), monkeypatch) == spec.n_layers * each + ["norm"]


@pytest.mark.parametrize("neurons", [0, 96])
def test_a_stream_that_the_cpu_has_stays_there(
    neurons: int, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of the CPU's alone are one task, and their stream crosses once: to the layer that is the GPU's.

    Where the GPU has a part of the FFN, its part ends there, and the next layer's attention brings it back.
    """
    spec = replace(BOTH, n_layers=3)
    each = [placements.layer(spec, False, False, neurons)] * 2 + [placements.layer(spec, True, False, ALL)]
    places = Placement(tuple(each), "gpu:0")
    made = placed(weights_of(spec, False), places), gpu_ops(stand_in, spec), places
    found = queued(spec, made, monkeypatch, ("call", "copy"))
    begins, ends = ["copy"] * 6, ["copy"] * 2  # where tokens are and go; counts and logits
    beside = ["copy", "call", "copy"]  # to the CPU, its neurons, their sum
    first, second = ["call", "copy", "copy", *beside], ["copy", "call", "copy", *beside]
    assert found == begins + ([*first, *second] if neurons else ["call", "copy"]) + ends


@pytest.mark.parametrize("neurons", [0, 96])
def test_attention_does_not_wait_for_the_cpus_task(
    neurons: int, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of the CPU's that ends only when its layer's attention has run."""
    attended, call, attention = threading.Semaphore(0), StandIn.call, torch_kernels.attention

    def waiting(self: StandIn, task: Any) -> None:
        def run() -> None:
            assert attended.acquire(timeout=20)
            task.run()

        late: Any = SimpleNamespace(run=run)
        call(self, late)

    def noted(*args: Any) -> None:
        attention(*args)
        attended.release()

    places = placements.every(BOTH, True, False, neurons)
    w, ops = placed(weights_of(BOTH, True), places), gpu_ops(stand_in, BOTH)
    with in_turn():
        truth = logits(BOTH, w, ops, places, 1)
    ops.forget()
    monkeypatch.setattr(torch_kernels, "attention", noted)
    monkeypatch.setattr(StandIn, "call", waiting)
    assert np.array_equal(logits(BOTH, w, ops, places, 1), truth)


# ---- beside predictors, further GPUs, and somebody who looks on


def falcon(path: Path) -> Pack:
    """ReLU, with biases."""
    shape = synthetic.shapes()["falcon-40b"] | {
        "hidden_size": 256, "ffn_hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_kv_heads": 2, "vocab_size": 512, "activation": "relu", "bias": True,
        "max_position_embeddings": 64,
    }  # fmt: skip
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape))
    synthetic.SyntheticModel.of(str(path / "config.json"), 0, 0.1, 0.26, 64).write(path / "pack", "f32")
    return Pack.open(path / "pack")


@pytest.mark.parametrize("asked_there", [False, True])
def test_predictors_are_asked_early_and_change_no_bit(
    asked_there: bool, tmp_path: Path, stand_in: StandIn
) -> None:
    pack = falcon(tmp_path)
    found = predictors_of(pack)
    for counts in ((0, 96, 512), (96, 96, 0)):
        each = tuple(placements.layer(pack.spec, True, asked_there, n) for n in counts)
        places, said, stats = Placement(each, "gpu:0"), list[F32](), [FFNStats(), FFNStats()]
        for counted, how in zip(stats, WAYS, strict=True):
            ops = gpu_ops(stand_in, pack.spec, rank=32)
            made = gpu_weights.load(pack, places, (stand_in,), ops.cpu, predictors=found)
            with how():
                said.append(logits(pack.spec, made, ops, places, 1, sparsity="predict", stats=counted))
        assert np.array_equal(said[0], said[1]) and stats[0] == stats[1]


@pytest.mark.parametrize("send_from", [1 << 31, 7])
def test_parts_of_further_gpus_begin_early_and_change_no_bit(
    send_from: int, tmp_path: Path, stand_in: StandIn
) -> None:
    """Also where the CPU's neurons are sent to the first one."""
    pack, second = falcon(tmp_path), StandIn()
    each = tuple(placements.layer(pack.spec, True, False, *n) for n in ((96, 64), (0, 96), (64, 448)))
    places, limits = Placement(each, "gpu:0"), StepLimits(TOKENS, TOKENS, 64, BLOCK)
    said = list[list[F32]]()
    for how in WAYS:
        devices = (stand_in, second)
        ops = GpuOps(devices, torch_kernels, CpuOps(2), pack.spec, limits, send_from)
        made = gpu_weights.load(pack, places, devices, ops.cpu)
        with how():
            said.append([logits(pack.spec, made, ops, places, chunk) for chunk in (1, TOKENS)])
    second.close()
    assert all(np.array_equal(a, b) for a, b in zip(*said, strict=True))


def test_who_looks_on_sees_what_an_ffn_reads_that_is_begun_early(stand_in: StandIn) -> None:
    w, _, places = divided(BOTH, stand_in)
    seen: list[list[LayerActivations]] = [[], []]
    for found, how in zip(seen, WAYS, strict=True):

        def look(x: LayerActivations, found: list[LayerActivations] = found) -> None:
            found.append(replace(x, h=x.h.copy(), values=x.values.copy()))

        ops = gpu_ops(stand_in, BOTH)
        ops.watch_neurons(TOKENS, look)
        with how():
            logits(BOTH, w, ops, places, 5)
    assert len(seen[0]) == len(seen[1]) == BOTH.n_layers * TOKENS // 5
    for a, b in zip(*seen, strict=True):
        assert a.index == b.index and np.array_equal(a.h, b.h) and np.array_equal(a.values, b.values)
        assert a.h.any() and a.values.any()
