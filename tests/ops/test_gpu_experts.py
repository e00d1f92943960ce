"""Whole experts of a mixture that skips no neuron, on a device beside the CPU's: the same answers.

As test_gpu_moe.py, whose experts are divided. Kernels for more than a few tokens: test_gpu_pairs.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import placements
import pytest
from gpu_cases import Kernels, met, normal, whole
from test_experts_on_disk import packed
from test_gpu import gpu_ops, logits, placed, stand_in, storage
from test_gpu_kernels import FORMATS, TABLES, kernels
from test_gpu_moe import mixture_of, random_mixture, with_shared
from test_moe_disk import EXPERTS
from test_options import SPEC, TOKENS, natively, nmse

from thermocline.engine.decoder import bind, forward
from thermocline.engine.kv_cache import BLOCK, KVCache, blocks_for
from thermocline.model import activations
from thermocline.model.spec import ACTIVATIONS, SPARSE_ACTIVATIONS, ModelSpec, Router
from thermocline.ops import cuda, device_sizes, interface, reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import Device, StandIn
from thermocline.ops.device_sizes import StepLimits
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import F32, FFN, Batch, FFNStats, Layer, Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement
from thermocline.session import gpu_weights

pytestmark = pytest.mark.oracle

__all__ = ["kernels", "stand_in"]  # fixtures
DENSE = [a for a in ACTIVATIONS if a not in SPARSE_ACTIVATIONS]


# ---- kernels


def expert_case(
    kernels: Kernels,
    format: str,
    tokens: int,
    *,
    experts: int = 4,
    n: int = 32,
    activation: str = "silu",
    biased: bool = False,
    scales_input: bool = False,
    add: bool = False,
) -> None:
    """Gate, up and down of experts, of few tokens; nobody goes to the last."""
    n, dim = whole(format, n), whole(format, 40)
    (gate, g), (up, u) = (kernels.rows(format, normal(i, experts * n, dim), pad=8) for i in (1, 2))
    down, d = kernels.rows(format, normal(3, experts * dim, n), skip=8)
    x = normal(4, tokens, dim) / np.float32(dim**0.5)
    logits = normal(5, tokens, experts) - (np.arange(experts) == 3) * np.float32(99)
    shares = activations.route(logits, min(2, experts))
    bias, up_bias = (normal(6 + i, experts * n) if biased else None for i in (0, 1))

    def scaled(y: F32) -> F32:
        return y * np.repeat(shares, n, axis=1) if scales_input else y

    a = activations.activate(scaled(reference.matmul(g, met(format, x), bias)), activation, 1.5, 1.7)
    h = a * activations.up_factor(
        scaled(reference.matmul(u, met(format, x), up_bias)), activation, 1.5, False
    )
    h = np.where(np.repeat(shares, n, axis=1) != 0, h, np.float32(0))
    want = h if scales_input else h * np.repeat(shares, n, axis=1)
    out, counts = kernels.filled(tokens, experts * n), kernels.put(np.zeros(4, np.int32))
    each = kernels.put(np.pad(shares, ((0, 0), (0, 3)), constant_values=np.nan))[:, : shares.shape[1]]
    how = activation, 1.5, False, None, each, counts, kernels.scratch()
    more = kernels.some(up_bias), 1.7, scales_input
    kernels.ops.gate_up(out, gate, kernels.some(bias), up, kernels.put(x), *how, *more)
    kernels.check(out, want)
    assert counts.tolist()[2] == n * int((shares != 0).any(axis=0).sum())
    there = normal(8, tokens, dim)
    y = kernels.put(there) if add else kernels.filled(tokens, dim)
    kernels.ops.down_experts(y, down, kernels.put(want), each, add, kernels.scratch())
    seen = met(format, want)
    answers = [seen[:, e * n : (e + 1) * n] @ d[e * dim : (e + 1) * dim].T for e in range(experts)]
    kernels.check(y, np.sum(answers, axis=0) + (there if add else 0 * there))


INTERPRETED = ("f32", "q4_0", "mxfp4")  # `dots` reads the others alike, which test_gpu_kernels.py has


@pytest.mark.parametrize(
    "kernels, format, tokens",
    [c for c in product(TABLES, FORMATS, (1, 3)) if c[0] == "torch" or c[1] in INTERPRETED],
    indirect=["kernels"],
)
def test_experts_as_plain_matrices(kernels: Kernels, format: str, tokens: int) -> None:
    expert_case(kernels, format, tokens, add=tokens > 1)


@pytest.mark.parametrize("activation", DENSE)
def test_experts_of_every_activation(kernels: Kernels, activation: str) -> None:
    expert_case(kernels, "f16", 2, n=9, activation=activation, biased=activation == "swiglu_oai")


def test_shares_that_scale_an_experts_input(kernels: Kernels) -> None:
    expert_case(kernels, "f32", 2, n=9, scales_input=True)


def test_experts_that_no_token_goes_to_do_not_matter(kernels: Kernels) -> None:
    """They are not read: here they are NaN."""
    d, shares = normal(1, 3 * 8, 16), np.array([[0.5, 0, 0.5], [0, 0, 1]], np.float32)
    d[8:16] = np.nan
    rows, _ = kernels.rows("f32", d)
    h = normal(2, 2, 48) * np.repeat(shares != 0, 16, axis=1)
    out = kernels.filled(2, 8)
    kernels.ops.down_experts(out, rows, kernels.put(h), kernels.put(shares), False, kernels.scratch())
    kernels.check(out, h[:, :16] @ d[:8].T + h[:, 32:] @ d[16:].T)


def test_a_tokens_answer_does_not_depend_on_its_company(kernels: Kernels) -> None:
    """Alone, its experts are the only ones; beside others these add nothing to it."""
    rows, _ = kernels.rows("q4_0", normal(1, 3 * 32, 64))
    shares = np.array([[0.5, 0, 0.5], [0, 1, 0], [0.25, 0.75, 0]], np.float32)
    h = normal(2, 3, 3 * 64) * np.repeat(shares, 64, axis=1)
    out, alone = kernels.filled(3, 32), kernels.filled(1, 32)
    kernels.ops.down_experts(out, rows, kernels.put(h), kernels.put(shares), False, kernels.scratch())
    for t in range(3):
        kernels.ops.down_experts(
            alone, rows, kernels.put(h[t : t + 1]), kernels.put(shares[t : t + 1]), False, kernels.scratch()
        )
        kernels.check(alone, out[t : t + 1].cpu().numpy())


# ---- layers


def divided(spec: ModelSpec, *counts: int, attention: bool = True) -> Placement:
    """So many experts of each layer on the device."""
    each = (placements.experts(spec, attention, n, seed) for seed, n in enumerate(counts))
    return Placement(tuple(each), "gpu:0")


def some_of(spec: ModelSpec) -> Iterator[tuple[Placement, int]]:
    """(placement, tokens of a step): all there, some, none."""
    n = spec.n_layers
    yield placements.whole(spec), TOKENS
    yield divided(spec, *([1, EXPERTS - 1, 0] * n)[:n]), 16
    yield divided(spec, *([2, 1, EXPERTS] * n)[:n]), 5
    yield divided(spec, *([EXPERTS - 1, 2] * n)[:n], attention=bool(spec.shared_dim)), 1


def same_everywhere(spec: ModelSpec, random: Weights, stand_in: StandIn) -> None:
    """Steps of 1, 5 and 16 tokens are recorded and replayed, of 40 not. Counts are the CPU's."""
    counted = FFNStats()
    truth = logits(spec, natively(random), CpuOps(2), stats=counted)
    assert nmse(truth, logits(spec, random, reference)) < 1e-6
    for places, tokens in some_of(spec):
        stats = FFNStats()
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, tokens, stats=stats)
        assert nmse(y, truth) < 1e-6, places
        if tokens == TOKENS:
            assert stats == counted


@pytest.mark.parametrize("activation", DENSE)
def test_a_mixture_is_the_same_wherever_its_experts_are(activation: str, stand_in: StandIn) -> None:
    spec = replace(mixture_of(SPEC), activation=activation)
    if activation == "swiglu_oai":
        spec = replace(spec, swiglu_alpha=1.7, swiglu_limit=7.0)
    random = random_mixture(spec)
    if activation == "swiglu_oai":
        random = replace(random, layers=tuple(biased(spec, i, x) for i, x in enumerate(random.layers)))
    same_everywhere(spec, random, stand_in)


def biased(spec: ModelSpec, i: int, x: Layer) -> Layer:
    """gpt-oss: every matrix has a bias."""
    rng = np.random.default_rng(90 + i)

    def expert(f: FFN) -> FFN:
        gate, up = rng.standard_normal((2, spec.ffn_dim), dtype=np.float32)
        part = replace(f.part, gate=interface.Linear(f.part.gate.weight, gate), up_bias=up)
        return replace(f, parts=(part,), down_bias=rng.standard_normal(spec.dim, dtype=np.float32))

    return replace(x, experts=tuple(map(expert, x.experts)))


def test_shares_may_scale_what_experts_read(stand_in: StandIn) -> None:
    """Llama 4; its shared expert is beside them."""
    rule = Router(score="sigmoid", weights="score", scales_input=True)
    spec = replace(mixture_of(SPEC), activation="silu", router=rule, shared_dim=56)
    random = random_mixture(spec)
    random = replace(random, layers=tuple(with_shared(spec, i, x) for i, x in enumerate(random.layers)))
    same_everywhere(spec, random, stand_in)


@pytest.mark.parametrize("option", ["gate", "norms", "ungated"])
def test_beside_a_shared_ffn(option: str, stand_in: StandIn) -> None:
    spec = replace(mixture_of(SPEC), activation="silu", shared_dim=56, gated=option != "ungated")
    spec = replace(spec, shared_gate=option == "gate", shared_norms=option == "norms")
    random = random_mixture(spec)
    random = replace(random, layers=tuple(with_shared(spec, i, x) for i, x in enumerate(random.layers)))
    same_everywhere(spec, random, stand_in)


def test_a_step_that_needs_none_of_the_cpus_experts(stand_in: StandIn) -> None:
    """The router wants two experts, which are both on the device."""
    spec = replace(mixture_of(SPEC), activation="silu")
    random = random_mixture(spec)

    def one_way(x: Layer) -> Layer:
        assert x.router is not None
        bias = np.full(EXPERTS, -50, np.float32)
        bias[[1, 2]] = 50
        return replace(x, router=interface.Linear(x.router.weight, bias))

    random = replace(random, layers=tuple(map(one_way, random.layers)))
    truth = logits(spec, natively(random), CpuOps(2))
    width = spec.ffn(0).width
    ranges = (
        NeuronRange("gpu:0", width, whole=(1, 2)),
        NeuronRange("cpu", width, whole=tuple(e for e in range(EXPERTS) if e not in (1, 2))),
    )
    layer = replace(placements.experts(spec, True, 1), ranges=ranges)
    places = Placement((layer,) * spec.n_layers, "gpu:0")
    for tokens in (1, TOKENS):
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, tokens)
        assert nmse(y, truth) < 1e-6


# ---- packs


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_prompts_experts_are_sent_and_computed_as_on_the_device(
    family: str, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step of 7 tokens on; shorter ones are the CPU's. With no expert there, some, or all but one."""
    model = packed(family, tmp_path)
    spec, n, places = model.spec, model.spec.n_experts, partial(split, model)
    ops, counted = gpu_ops(stand_in, spec), FFNStats()
    every = gpu_weights.load(model, places(n), (stand_in,), ops.cpu)
    truth = logits(spec, every, ops, places(n), 20, stats=counted)
    for count in (0, 1, n - 1):
        limits = StepLimits(TOKENS, TOKENS, spec.max_context, BLOCK)
        sender, stats = GpuOps((stand_in,), torch_kernels, CpuOps(2), spec, limits, send_from=7), FFNStats()
        made = gpu_weights.load(model, places(count), (stand_in,), sender.cpu)
        y = logits(spec, made, sender, places(count), 20, stats=stats)
        # Sums in another order move a few numbers to the next integer: 2.7e-6.
        assert nmse(y, truth) < 1e-5 and stats == counted, count
        with monkeypatch.context() as patched:
            patched.delattr(torch_kernels, "gate_up_pairs")  # by which experts that were sent are computed
            few = logits(spec, made, sender, places(count), 5)
        assert nmse(few, truth) < 1e-4  # the same int8, but for numbers between two


def sender(model: StoredModel, device: Device) -> tuple[GpuOps, Weights]:
    """Ops that send the experts in RAM for steps of 7 tokens on, and a model with one expert there."""
    limits = StepLimits(TOKENS, TOKENS, model.spec.max_context, BLOCK)
    ops = GpuOps((device,), torch_kernels, CpuOps(2), model.spec, limits, send_from=7)
    return ops, gpu_weights.load(model, split(model, 1), (device,), ops.cpu)


def queued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what a stand-in is given from here on, in order; copies beside are "beside"."""
    names: list[str] = []
    run, copy = StandIn.run, StandIn.copy

    def running(self: StandIn, kernel: Callable[..., Any], *args: Any) -> None:
        names.append(getattr(kernel, "__name__", "kernel"))
        run(self, kernel, *args)

    def copying(self: StandIn, *args: Any) -> None:
        names.extend(["beside"] * self._on)
        copy(self, *args)

    monkeypatch.setattr(StandIn, "run", running)
    monkeypatch.setattr(StandIn, "copy", copying)
    return names


def prompts(model: StoredModel, device: Device) -> tuple[GpuOps, Callable[[], F32]]:
    """Return ops, and a step of all tokens: the same at each call, of one binding, so of the same experts."""
    spec, places, (ops, made) = model.spec, split(model, 1), sender(model, device)
    bound, kv = bind(spec, made, ops), KVCache(spec, blocks_for(TOKENS), storage=storage(places, device))
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, TOKENS).astype(np.int32)
    at = np.arange(TOKENS, dtype=np.int32)
    table = np.arange(blocks_for(TOKENS), dtype=np.int32)[None]
    batch = Batch(ids, at, np.zeros_like(at), table, at)
    return ops, lambda: forward(bound, kv, batch, ops, sparsity="exact", stats=FFNStats())


def test_the_next_layers_first_expert_travels_while_its_attention_is_computed(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the step before had it; so the first step of all sends nothing ahead. The bits are the same."""
    model = packed("gpt_oss", tmp_path)
    layers, experts = model.spec.n_layers, model.spec.n_experts
    _, step = prompts(model, stand_in)
    names, found = queued(monkeypatch), []
    for ahead in (0, layers - 1, layers - 1):
        names.clear()
        found.append(step())
        behind = [names[i + 1 : i + 4] for i, name in enumerate(names) if name == "down_pairs"]
        assert behind.count(["beside"] * 3) == ahead, "gate, up and down, but for the last layer"
        assert names.count("beside") == layers * (experts - 1) * 3
        assert np.array_equal(found[0], found[-1])


@pytest.mark.parametrize("order", ["first stream first", "last stream first"])
def test_a_card_waits_for_what_travels_ahead_also_behind_a_step_that_was_broken_off(
    order: fake_cuda.Order, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams run as late as they may: what is not waited for gives another answer."""
    model = packed("gpt_oss", tmp_path)
    truth = prompts(model, stand_in)[1]()
    fake_cuda.install(monkeypatch, fake_cuda.Card(order=order))
    with contextlib.closing(cuda.Cuda(0)) as device:
        ops, step = prompts(model, device)
        for _ in range(3):
            assert np.array_equal(step(), truth)
        send, left = ops._queue.send, iter(range(model.spec.n_layers - 1))

        def interrupted(*args: Any, **how: Any) -> int:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return send(*args, **how)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ops._queue, "send", interrupted)
            step()
        for _ in range(2):
            assert np.array_equal(step(), truth)


def test_an_expert_that_no_buffer_has_room_for_is_the_cpus(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sizes, "EXPERT_BYTES", 1 << 10)
    model = packed("qwen3_moe", tmp_path)
    made = gpu_weights.load(model, split(model, 1), (stand_in,), gpu_ops(stand_in, model.spec).cpu)
    assert all(p.pinned is None for x in made.layers for f in x.experts for p in f.parts)


def split(model: StoredModel, count: int) -> Placement:
    """So many experts of each layer on the device, which has all dense layers."""
    spec = model.spec

    def layer(i: int) -> LayerPlacement:
        if spec.ffn(i).experts < 2:
            return placements.layer(spec, True, False, placements.ALL, index=i)
        return placements.experts(spec, True, count, i, index=i)

    return Placement(tuple(map(layer, range(spec.n_layers))), "gpu:0")
