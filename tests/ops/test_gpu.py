"""Steps on a device and the CPU beside it, a stand-in for the device: wherever what lies, the same answer.

Kernels are `ops.kernels.torch_kernels` (test_gpu_kernels.py holds Triton's against them).
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import placements
import pytest
import torch
from test_options import LATENT, PAIRS, SPEC, TOKENS, natively, nmse, random_weights

from thermocline import LLM, _native
from thermocline.convert import synthetic
from thermocline.engine.decoder import bind, forward
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import BLOCK, KVCache, Storage, blocks_for, in_ram
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import DeviceFailure
from thermocline.machine import gpu_speed, hardware, this_machine, tiers
from thermocline.model import quant
from thermocline.model.spec import ModelSpec
from thermocline.ops import device, device_sizes
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_rows import DeviceRows
from thermocline.ops.device_sizes import StepLimits, device_bytes, host_bytes
from thermocline.ops.gpu import GpuOps, pages_on
from thermocline.ops.interface import (
    F32,
    FFN,
    Batch,
    FFNPart,
    FFNStats,
    KVLayer,
    KVShape,
    Layer,
    Linear,
    Weights,
)
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack, read_tensor
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement
from thermocline.session import gpu, gpu_weights, weights

pytestmark = pytest.mark.oracle


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    torch.set_num_threads(1)
    made = StandIn()
    yield made
    made.close()


def gpu_ops(stand_in: StandIn, spec: ModelSpec, *, sequences: int = 4, rank: int = 0) -> GpuOps:
    limits = StepLimits(TOKENS + 8, max(sequences, TOKENS), spec.max_context, BLOCK, rank)
    return GpuOps((stand_in,), torch_kernels, CpuOps(2), spec, limits)


def storage(places: Placement, device: Any = None) -> Storage:
    """`device`: None for RAM as a stand-in's."""

    def made(layer: int, shape: KVShape) -> KVLayer:
        if places.layers[layer].attention == "cpu":
            return in_ram(layer, shape)
        with contextlib.closing(StandIn()) as another:
            return pages_on(device or another, shape)

    return made


# ---- every option of the spec, over random weights


def rows(w: F32) -> DeviceRows:
    data = torch.from_numpy(np.ascontiguousarray(w)).view(torch.uint8).view(len(w), -1)
    return DeviceRows(data.clone(), "f32", w.shape[1])


def side_by_side(each: Sequence[F32]) -> list[DeviceRows]:
    whole = rows(np.concatenate(each))
    return [whole.part(e, len(each)) for e in range(len(each))]


def whole_experts(each: tuple[FFN, ...], ranges: Sequence[NeuronRange]) -> Iterator[FFN]:
    """Experts of which each is on one device."""
    there = next(r.whole for r in ranges if r.device != "cpu") or ()
    parts = [each[e].part for e in there]
    gates, downs = side_by_side([p.gate.weight for p in parts]), side_by_side([p.down for p in parts])
    ups = [None] * len(parts) if parts[0].up is None else side_by_side([p.up for p in parts])
    for e, f in enumerate(each):
        if e in there:
            i, p = there.index(e), f.part
            there_too = FFNPart(Linear(gates[i], p.gate.bias), ups[i], downs[i], "gpu:0", up_bias=p.up_bias)
            yield replace(f, parts=(there_too,))
        else:
            yield natively(f)


def parted(each: tuple[FFN, ...], ranges: Sequence[NeuronRange]) -> Any:
    """Experts whose neurons are on several devices."""

    def part(f: FFN, which: slice) -> FFNPart:
        p = f.part
        bias = None if p.gate.bias is None else p.gate.bias[which].copy()
        up = None if p.up is None else p.up[which]
        down = p.down[which] if f.bundles else p.down
        return FFNPart(Linear(p.gate.weight[which], bias), up, down)

    if any(r.whole for r in ranges):
        return tuple(whole_experts(each, ranges))
    parts: list[list[FFNPart]] = [[] for _ in each]
    first = 0
    for r in ranges:
        own = [part(f, slice(first, first + r.neurons)) for f in each]
        first += r.neurons
        if r.device == "cpu":
            own = list(natively(tuple(own)))
        else:
            gates, downs = side_by_side([p.gate.weight for p in own]), side_by_side([p.down for p in own])
            ups = [None] * len(own) if own[0].up is None else side_by_side([p.up for p in own])
            lists = zip(own, gates, ups, downs, strict=True)
            own = [FFNPart(Linear(gate, p.gate.bias), up, down, r.device) for p, gate, up, down in lists]
        for mine, p in zip(parts, own, strict=True):
            mine.append(p)
    return tuple(replace(f, parts=tuple(mine)) for f, mine in zip(each, parts, strict=True))


def everything(f: FFN) -> FFN:
    """An FFN on the device."""
    p = f.part
    up = None if p.up is None else rows(p.up)
    return FFN.whole(Linear(rows(p.gate.weight), p.gate.bias), up, rows(p.down), None, False)


def placed(w: Weights, places: Placement) -> Weights:
    """Some matrices on the device, the others native."""

    def linear(x: Linear) -> Linear:
        return Linear(rows(x.weight), x.bias)

    def layer(x: Layer, p: LayerPlacement) -> Layer:
        made = replace(natively(replace(x, experts=(), mixer=None)), experts=parted(x.experts, p.ranges))
        y: Layer = made
        on_gpu = p.attention == "gpu:0"
        if x.router is not None and (on_gpu or (p.ranges and p.ranges[0].device != "cpu")):
            y = replace(y, router_copies={"gpu:0": rows(x.router.weight)})
        if on_gpu and x.shared is not None:
            y = replace(y, shared=everything(x.shared))
            if x.shared_router is not None:
                y = replace(y, shared_router=rows(x.shared_router))
        if on_gpu and (p_l := x.per_layer) is not None:
            y = replace(y, per_layer=replace(p_l, gate=rows(p_l.gate), down=rows(p_l.down)))
        if on_gpu and x.attn_gate is not None:
            y = replace(y, attn_gate=rows(x.attn_gate))
        if x.mixer is not None:  # whose other tables stay as they are
            names = {"qkv", "z", "beta", "alpha", "into", "out"} & vars(x.mixer).keys()
            stored = rows if on_gpu else natively
            return replace(y, mixer=replace(x.mixer, **{n: stored(getattr(x.mixer, n)) for n in names}))
        if x.qkv is None or not on_gpu:
            return y
        latent = x.latent and replace(
            x.latent,
            k_b=rows(x.latent.k_b),
            v_b=rows(x.latent.v_b),
            q_b=None if x.latent.q_b is None else rows(x.latent.q_b),
        )
        return replace(y, qkv=linear(x.qkv), attn_out=linear(x.attn_out), latent=latent)

    layers = tuple(layer(x, p) for x, p in zip(w.layers, places.layers, strict=True))
    head = linear(w.head) if places.head == "gpu:0" else natively(w.head)
    return replace(natively(replace(w, layers=())), layers=layers, head=head)


def logits(
    spec: ModelSpec, w: Weights, ops: Any, places: Placement | None = None, chunk: int = TOKENS, **how: Any
) -> F32:
    """As test_options', with keys and values where their layers are."""
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, TOKENS).astype(np.int32)
    where = in_ram if places is None else storage(places, ops.device)
    model, kv, out = bind(spec, w, ops), KVCache(spec, blocks_for(TOKENS), storage=where), []
    table = np.arange(blocks_for(TOKENS), dtype=np.int32)[None]
    for start in range(0, TOKENS, chunk):
        at = np.arange(start, min(TOKENS, start + chunk), dtype=np.int32)
        batch = Batch(ids[at], at, np.zeros_like(at), table, np.arange(len(at), dtype=np.int32))
        how = dict[str, Any](sparsity="exact", stats=FFNStats()) | how
        out.append(forward(model, kv, batch, ops, **how))
    return np.concatenate(out)


REFUSED = ("embed_dim",)  # no GPU ops yet


@pytest.mark.parametrize("name", [n for n in PAIRS if n not in REFUSED])
def test_an_option_is_the_same_wherever_its_layers_are(name: str, stand_in: StandIn) -> None:
    """Chunks of 5 and 1 are recorded and replayed, of 40 not."""
    spec = PAIRS[name][1]
    random = random_weights(spec)
    truth = logits(spec, natively(random), CpuOps(2))
    for at, places in enumerate([placements.whole(spec), *(placements.some(spec, s) for s in (1, 2))]):
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, (TOKENS, 5, 1)[at])
        assert nmse(y, truth) < 1e-6, places


def test_a_gate_of_attention_is_the_same_wherever_its_layer_is(stand_in: StandIn) -> None:
    spec = replace(SPEC, attention_gate=True)
    random, rng = random_weights(spec), np.random.default_rng(4)
    gates = rng.standard_normal((spec.n_layers, 64, spec.dim), np.float32) / np.float32(8)
    layers = (replace(x, attn_gate=2 * gate) for x, gate in zip(random.layers, gates, strict=True))
    random = replace(random, layers=tuple(layers))
    truth = logits(spec, natively(random), CpuOps(2))
    assert nmse(truth, logits(SPEC, natively(random_weights(SPEC)), CpuOps(2))) > 1e-3
    for at, places in enumerate([placements.whole(spec), *(placements.some(spec, s) for s in (1, 2))]):
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, (TOKENS, 5, 1)[at])
        assert nmse(y, truth) < 1e-6, places


# ---- packs


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "hidden_act": "relu",
    "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def pack_of(path: Path, format: str, **changes: Any) -> Pack:
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    sparse = (CONFIG | changes)["hidden_act"] == "relu"
    active = 0.1 if sparse else None
    synthetic.SyntheticModel.of(str(path / "config.json"), 0, active, 0.26, 64).write(path / "pack", format)
    return Pack.open(path / "pack")


def opt_pack(path: Path, format: str, **changes: Any) -> Pack:
    """Ungated, with biases."""
    shape = synthetic.shapes()["opt-6.7b"] | {
        "hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 512, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(shape | changes))
    synthetic.SyntheticModel.of(str(path / "config.json"), 0, 0.1, 0.26, 64).write(path / "pack", format)
    return Pack.open(path / "pack")


def predictors_of(pack: Pack, kinds: Sequence[str] = ("svd", "mlp", "sign")) -> Predictors:
    """Random ones, which name about half."""
    s, rng = pack.spec, np.random.default_rng(3)

    def one(kind: str) -> LayerPredictor:
        first = rng.standard_normal((32, s.dim), dtype=np.float32)
        second = rng.standard_normal((s.ffn_dim, 32), dtype=np.float32)
        zero = np.zeros(s.ffn_dim, np.float32)
        if kind == "sign":
            bits = rng.integers(0, 256, (s.ffn_dim, s.dim // 8), dtype=np.uint8)
            return LayerPredictor(kind, None, None, bits, zero, 40)
        return LayerPredictor(kind, first, second, None, zero, 40)

    return Predictors.of(s, [one(kind) for kind in kinds])


def generated(pack: Pack, made: Weights, ops: Any, sparsity: str, **more: Any) -> list[list[int]]:
    settings = EngineSettings(context=64, max_batch=3, sparsity=sparsity, prefill_chunk=16)
    engine = Engine(pack.spec, made, ops, settings, **more)
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
    requests = [engine.submit(range(3, n), params) for n in (20, 30, 5)]
    while engine.running or engine.waiting:
        engine.step()
    for r in requests:
        assert r.error is None
    return [r.ids for r in requests]


@pytest.mark.parametrize("format", [f for f in quant.FORMATS if f != "bf16"])
def test_a_pack_is_split_as_its_places_say(format: str, tmp_path: Path, stand_in: StandIn) -> None:
    pack = pack_of(tmp_path, format)
    whole = weights.load(pack, threads=2)
    truth = logits(pack.spec, whole.weights, whole.ops)
    for seed in range(6):
        places = placements.some(pack.spec, seed) if seed else placements.whole(pack.spec)
        ops = gpu_ops(stand_in, pack.spec)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
        y = logits(pack.spec, made, ops, places, chunk=(40, 1, 3)[seed % 3])
        assert nmse(y, truth) < (1e-9 if format == "f32" else 2e-4), places  # the CPU's int8 activations


@pytest.mark.parametrize("staged", [3000, 64 << 20])
def test_rows_begin_where_a_thread_loads_the_most_at_once(
    staged: int, tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 9030 bytes were loaded 2 bytes at a time. They come by and by, and what lies between is 0."""
    monkeypatch.setattr(gpu_weights, "STAGED_BYTES", staged)
    pack = pack_of(tmp_path, "q6_k")
    made = gpu_weights.load(pack, placements.whole(pack.spec), (stand_in,), CpuOps(1))
    layer = made.layers[1]
    for name, linear in (("qkv.weight", layer.qkv), ("attn_out.weight", layer.attn_out)):
        assert linear is not None and isinstance(rows := linear.weight, DeviceRows)
        stored = read_tensor(pack, f"layers.1.{name}")
        assert stored.shape[1] % 16 and rows.stride == stored.shape[1] + -stored.shape[1] % 16
        assert np.array_equal(rows.data[:, : stored.shape[1]].numpy(), stored)
        assert not rows.data[:, stored.shape[1] :].any()


@pytest.mark.parametrize("format", ["f32", "q8_0"])
def test_a_step_of_a_prompt_that_goes_on_has_no_logits(
    format: str, tmp_path: Path, stand_in: StandIn
) -> None:
    pack = pack_of(tmp_path, format)
    places, ops = placements.whole(pack.spec), gpu_ops(stand_in, pack.spec)
    made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
    model, kv = bind(pack.spec, made, ops), KVCache(pack.spec, blocks_for(8), storage=storage(places))
    at, none = np.arange(8, dtype=np.int32), np.empty(0, np.int32)
    for _ in range(3):  # queued, recorded, replayed
        batch = Batch(at, at, np.zeros_like(at), np.zeros((1, 1), np.int32), none)
        assert forward(model, kv, batch, ops, sparsity="exact", stats=FFNStats()).shape == (0, 512)


@pytest.mark.parametrize("changes", [{}, {"architectures": ["OPTForCausalLM"]}])
@pytest.mark.parametrize("format", ["f32", "q4_0"])
def test_neurons_are_sent_for_prompts_piece_by_piece(
    format: str, changes: dict[str, Any], tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step of 7 tokens on; shorter ones are the CPU's. Counts, too, are the same wherever it is done."""
    pack = opt_pack(tmp_path, format) if changes else pack_of(tmp_path, format)
    whole = weights.load(pack, threads=2)
    counted = FFNStats()
    truth = logits(pack.spec, whole.weights, whole.ops, None, 7, stats=counted)
    gate, bundle = (pack.tensors[f"layers.0.{part}"].stride for part in ("gate.weight", "bundle"))
    for neurons in (64, 416):
        monkeypatch.setattr(device_sizes, "PIECE_BYTES", 64 * (gate + bundle))  # in 7 pieces, and in 2
        places = placements.every(pack.spec, True, False, neurons)
        limits, stats = StepLimits(TOKENS, TOKENS, 64, BLOCK), FFNStats()
        ops = GpuOps((stand_in,), torch_kernels, CpuOps(2), pack.spec, limits, send_from=7)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
        asked: list[int] = []
        call = StandIn.call

        def counting(self: StandIn, task: Any, asked: list[int] = asked, call: Any = call) -> None:
            asked.append(1)
            call(self, task)

        with monkeypatch.context() as patch:
            patch.setattr(StandIn, "call", counting)
            y = logits(pack.spec, made, ops, places, 7, stats=stats)
        assert len(asked) == 3  # of 40 tokens the last 5 are no prompt: a task for each layer
        assert nmse(y, truth) < (2e-9 if format == "f32" else 2e-4)  # 1.1e-9 on Sapphire Rapids
        if format == "f32":
            assert stats == counted


@pytest.mark.parametrize("asked_there", [False, True])
@pytest.mark.parametrize("kinds", [("sign",) * 3, ("svd", "mlp", "svd")])
def test_predictors_name_the_same_neurons_on_either_side(
    kinds: tuple[str, ...], asked_there: bool, tmp_path: Path, stand_in: StandIn
) -> None:
    """Signs exactly; codes are int8 on the CPU, so that neurons at the threshold may differ."""
    pack = pack_of(tmp_path, "f32")
    found = predictors_of(pack, kinds)
    whole = weights.load(pack, threads=2, predictors=found)
    counted = FFNStats()
    truth = logits(pack.spec, whole.weights, whole.ops, None, 1, sparsity="predict", stats=counted)
    exact = logits(pack.spec, whole.weights, whole.ops, None, 1)
    assert nmse(truth, exact) > 0.1  # these predictors are bad: what they say matters
    for neurons in ((0, 96, 512), (512, 0, 32), (96, 96, 96)):
        places = Placement(
            tuple(placements.layer(pack.spec, i != 1, asked_there, n) for i, n in enumerate(neurons)), "gpu:0"
        )
        ops, stats = gpu_ops(stand_in, pack.spec, rank=32), FFNStats()
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu, predictors=found)
        y = logits(pack.spec, made, ops, places, 1, sparsity="predict", stats=stats)
        if not asked_there:  # hot neurons are then computed unasked: nearer to exact
            assert nmse(y, exact) < nmse(truth, exact), neurons
        elif kinds[0] == "sign":
            assert nmse(y, truth) < 1e-9, neurons
            for name in ("active", "rows", "predicted"):
                assert getattr(stats, name) == getattr(counted, name)
        else:
            assert nmse(y, truth) < 0.01, neurons
            assert stats.predicted == pytest.approx(counted.predicted, rel=0.01)
        for name in ("neurons", "rows_dense", "gates_dense"):
            assert getattr(stats, name) == getattr(counted, name)


@pytest.mark.parametrize("changes", [{}, {"hidden_act": "silu"}, {"tie_word_embeddings": True}])
def test_requests_in_company_get_the_tokens_of_the_cpu(
    changes: dict[str, Any], tmp_path: Path, stand_in: StandIn
) -> None:
    pack = pack_of(tmp_path, "f32", **changes)
    whole = weights.load(pack, threads=2)
    truth = generated(pack, whole.weights, whole.ops, "exact")
    neurons = (512, 96, 0) if pack.spec.sparse else (512, 0, 512)
    places = Placement(
        tuple(placements.layer(pack.spec, i < 2, False, n) for i, n in enumerate(neurons)), "gpu:0"
    )
    for _ in range(2):
        ops = gpu_ops(stand_in, pack.spec)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
        assert generated(pack, made, ops, "exact", storage=storage(places)) == truth


# ---- a recording


def test_what_is_recorded_is_done_at_each_replay_and_not_before(stand_in: StandIn) -> None:
    """Two queues: what is queued beside waits for the main one, which waits where it joins."""
    a, b = torch.zeros(1), torch.zeros(1)
    order: list[str] = []

    def work() -> None:
        stand_in.run(a.add_, 1)
        with stand_in.beside():
            stand_in.run(lambda: (threading.Event().wait(0.02), order.append("beside")))
            stand_in.copy(b, a)
        stand_in.run(order.append, "main")
        stand_in.join()
        stand_in.run(lambda: order.append(f"joined {b.item():g}"))

    replay = stand_in.record(work)
    stand_in.wait([])
    assert not order
    for n in (1, 2):
        replay()
        stand_in.wait([])
        assert order == ["main", "beside", f"joined {n}"]
        order.clear()


def test_a_wait_is_for_both_queues_also_where_nobody_joined_them(stand_in: StandIn) -> None:
    """As after a step that was broken off: its task may go when the wait is over."""
    order: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), stand_in.beside():
        stand_in.run(lambda: (time.sleep(0.05), order.append("beside")))
        raise KeyboardInterrupt
    stand_in.wait([])
    assert order == ["beside"]


def test_a_kernel_that_fails_is_a_device_failure_and_is_over_then(stand_in: StandIn) -> None:
    stand_in.run(torch.zeros(2).copy_, torch.zeros(3))
    with pytest.raises(DeviceFailure, match=r"stand-in.*size"):
        stand_in.wait([])
    stand_in.wait([])


def test_a_cpu_that_never_answers_is_reported(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "STUCK_S", 0.2)
    gate = threading.Event()

    class Stuck:
        begun, ended, function, argument = 1, 0, 0, 0

        def run(self) -> None:
            gate.wait()

    stuck = Stuck()
    stand_in.call(stuck)
    with pytest.raises(
        DeviceFailure, match=r"the CPU's part of a step \(1 under way\) has not ended for 0.2"
    ):
        stand_in.wait([stuck])
    gate.set()
    stand_in.wait([])


def test_what_a_task_meets_is_raised_when_it_is_asked_and_only_once() -> None:
    """Never in the driver's thread: here, a step that was not set, and more tokens than there is room for."""
    w = natively(random_weights(SPEC))
    ops, slot = CpuOps(1), _native.StepSlot()
    bound, task = ops.bind_ffn(SPEC, w.layers[0]), _native.HostTask(ops.native, slot)
    x = np.zeros((2, SPEC.dim), np.float32)
    task.ffn(x, x, bound, 1)
    task.run()
    with pytest.raises(ValueError, match="no step is set"):
        task.take()
    at = np.arange(3, dtype=np.int32)
    slot.set(_native.Step(at, np.zeros(3, np.int32), np.zeros((1, 1), np.int32), BLOCK, 0, None, None))
    task.run()
    with pytest.raises(ValueError, match="more tokens than the buffers"):
        task.take()
    assert task.take() == (0, 0, 0, 0, 0)
    assert (task.begun, task.ended) == (2, 2)


def test_named_neurons_stand_for_a_predictor(tmp_path: Path) -> None:
    """The bits that a predictor would set give the bits that it gives."""
    pack = pack_of(tmp_path, "q8_0")
    found = predictors_of(pack, ("sign",) * 3)
    loaded = weights.load(pack, threads=2, predictors=found)
    x = np.random.default_rng(0).standard_normal((3, pack.spec.dim), dtype=np.float32)
    slot, at = _native.StepSlot(), np.arange(3, dtype=np.int32)
    slot.set(_native.Step(at, np.zeros(3, np.int32), np.zeros((1, 1), np.int32), BLOCK, 0, None, None))
    for i, layer in enumerate(loaded.weights.layers):
        bound = loaded.ops.bind_part(pack.spec, layer.experts[0])
        y, z = np.zeros_like(x), np.ones_like(x)
        counts = loaded.ops.native.ffn_add(y, x, bound, 2)
        p = found.layer(i)
        assert p is not None
        bits = np.packbits(p.predicted(x), axis=1, bitorder="little")
        f = layer.experts[0]
        unasked = f.with_part(replace(f.part, predictor=None))
        task = _native.HostTask(loaded.ops.native, slot)
        task.zero(z)
        task.ffn(z, x, loaded.ops.bind_part(pack.spec, unasked), 2, bits)
        task.run()
        assert task.take()[:4] == counts[:4]
        assert np.array_equal(y, z)


# ---- a session


class Counting(StandIn):
    """A stand-in that counts the bytes taken of its memory and of pinned RAM."""

    there = here = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = super().zeros(shape, dtype)
        self.there += made.nbytes
        return made

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = super().zeros(shape, dtype)
        self.here += device_sizes.pinned_bytes(made.nbytes)
        return made


def test_pinned_memory_is_taken_in_powers_of_two() -> None:
    assert [device_sizes.pinned_bytes(n) for n in (0, 1, 3, 4, 4097)] == [0, 1, 4, 4, 8192]


def test_buffers_are_what_the_planner_counts() -> None:
    """But for the model's own vectors, which it counts with their layers."""

    windowed = replace(SPEC, sliding_window=9, window_layers=(1,))
    mixture = replace(SPEC, n_experts=40)
    shared = replace(mixture, shared_dim=600, shared_gate=True)
    normed = replace(shared, activation="silu", shared_gate=False, shared_norms=True)
    dense = replace(mixture, activation="silu", dense_layers=(0,), dense_dim=600)
    silu, own = replace(SPEC, activation="silu"), replace(mixture, router_input="own_norm")
    of_two = PAIRS["two kinds of layers"][1]
    for spec in (SPEC, silu, windowed, mixture, shared, normed, dense, own, of_two, LATENT):
        counting, limits = Counting(), StepLimits(40, 3, 64, BLOCK, 32)
        ops = GpuOps((counting,), torch_kernels, CpuOps(1), spec, limits)
        assert counting.there == device_bytes(spec, limits)
        assert counting.here == host_bytes(spec, limits)
        places = placements.whole(spec)
        alone = replace(spec, n_experts=1, shared_dim=0, dense_layers=())
        w = placed(random_weights(alone), placements.whole(alone))
        before = counting.there
        bind(spec, w, ops)
        vectors = counting.there - before
        for _ in range(3):  # queued, recorded, replayed: nothing more is taken
            model, kv = bind(spec, w, ops), KVCache(spec, 1, storage=storage(places))
            at = np.zeros(1, np.int32)
            forward(model, kv, Batch(at, at, at, at[None], at), ops, sparsity="exact", stats=FFNStats())
            assert counting.there - before - vectors == 4 * spec.dim  # the last norm's weight
        counting.close()


def answers(pack: Path, **how: Any) -> tuple[list[int], Any]:
    with LLM(pack, context=64, max_batch=2, threads=2, **how) as llm:
        done = llm.generate("Once upon a time", SamplingParams(max_tokens=24, temperature=0))
        assert isinstance(llm._open().ops, GpuOps) == (llm.session.plan is not None)
        return done.token_ids, llm.session.plan


def test_a_session_divides_a_model_and_says_the_same(
    tiny_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it on the GPU; then as much as there is room for beside the buffers; then nothing."""
    alone, nothing = answers(tiny_pack, gpu="off")
    assert nothing is None
    whole, plan = answers(tiny_pack, gpu="stand-in", vram=1.0)
    assert whole == alone
    assert plan.head == "gpu" and {(x.attention, x.ram) for x in plan.layers} == {("gpu", 0)}
    less = plan.used("gpu") - plan.bytes["gpu"]["neurons"] // 2
    in_part, plan = answers(tiny_pack, gpu="stand-in", vram=less / 2**30)
    assert in_part == alone
    assert plan.used("gpu") <= less and {"attention", "head", "neurons"} & set(plan.bytes["gpu"])
    caplog.clear()
    assert answers(tiny_pack, gpu="stand-in", vram=0.1) == (alone, None)
    assert any("the GPU is not used" in line for line in caplog.messages)


def test_run_takes_a_gpus_options_and_says_what_it_is_used_for(
    tiny_pack: Path, thermocline: Callable[..., Any]
) -> None:
    argv = ["run", "-m", str(tiny_pack), "-c", "64", "-n", "8", "--temp", "0", "Once"]
    off, on = (thermocline(*argv, "--gpu", gpu) for gpu in ("off", "stand-in"))
    assert (off.code, on.code) == (0, 0), on.err
    assert on.out == off.out
    assert "stand-in: " in on.err and "of the neurons' work" in on.err and "stand-in" not in off.err
    assert thermocline(*argv, "--gpu", "fast").err == (
        "thermocline: --gpu fast: it is off, auto, a GPU's number, or stand-in\n"
    )


def test_a_gpu_that_is_not_there_is_refused_by_number_and_left_out_by_auto(
    tiny_pack: Path, thermocline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "gpu", lambda: hardware.GpuInfo(False, [], [], "no NVIDIA driver found"))
    argv = ["run", "-m", str(tiny_pack), "-c", "64", "-n", "2", "Once"]
    ran = thermocline(*argv, "--gpu", "0")
    assert (ran.code, ran.err) == (6, "thermocline: --gpu 0: no NVIDIA driver found\n")
    assert thermocline(*argv).code == 0


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_a_gpu_without_its_libraries_is_explained(
    missing: str, tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hardware, "gpu", lambda: hardware.GpuInfo(True, ["NVIDIA X"], [1 << 30], ""))
    monkeypatch.setitem(sys.modules, missing, None)
    assert gpu.unusable(hardware.gpu()) == f"{missing} is not installed: pip install 'thermocline[gpu]'"
    assert gpu.find("auto") is None
    caplog.clear()
    with LLM(tiny_pack, context=64, gpu="auto") as llm:
        assert llm.session.plan is None
    assert caplog.messages == [
        f"the GPU is not used: {missing} is not installed: pip install 'thermocline[gpu]'"
    ]


def test_a_gpu_under_a_torch_for_cpus_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    monkeypatch.setattr(hardware, "gpu", lambda: hardware.GpuInfo(True, ["NVIDIA X"], [1 << 30], ""))
    assert "is built without CUDA" in (gpu.unusable(hardware.gpu()) or "")


def test_a_device_is_measured_for_the_planner(stand_in: StandIn) -> None:
    """Figures of RAM under another name, but all there, and a hardware file takes them."""
    here = this_machine.tiers_here(1, formats=["q8_0"])
    found = this_machine.with_gpu(here, stand_in, torch_kernels, 256 << 20)
    assert found.gpu is not None and found.name.startswith("stand-in, ")
    assert tiers.parse_tiers(tiers.tiers_json(found), "here") == found


def test_what_a_device_reads_is_measured_without_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms of each kernel and 0.2 ms of each wait, by a clock of this test's."""
    now = 0.0

    class Slow(StandIn):
        def run(self, kernel: Any, *args: Any) -> None:
            nonlocal now
            now += 1e-3

        def wait(self, tasks: Any, mark: object = None) -> None:
            nonlocal now
            now += 2e-4

    slow = Slow()
    monkeypatch.setattr(gpu_speed, "time", SimpleNamespace(perf_counter=lambda: now))
    for name in ("_gflops", "_launch_us", "_handover_us", "_link_gbs"):
        monkeypatch.setattr(gpu_speed, name, lambda *_: 1.0)
    found = gpu_speed.gpu_tier(slow, torch_kernels, 64 << 20, "f16")
    slow.close()
    assert found.read_gbs == pytest.approx((16 << 20) / 1e-3 / 1e9, rel=0.03)
    assert found.share == pytest.approx(1, rel=0.03)


def test_a_device_s_prompts_are_measured_with_the_kernel_that_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product of all tokens takes 4 ms, one of a single token 1 ms, by a clock of this test's."""
    now, asked = 0.0, set()

    class Slow(StandIn):
        def run(self, kernel: Any, *args: Any) -> None:
            nonlocal now
            tokens = len(args[2]) if kernel is torch_kernels.matmul else 1
            asked.add(tokens)
            now += 4e-3 if tokens > 1 else 1e-3

    slow = Slow()
    monkeypatch.setattr(gpu_speed, "time", SimpleNamespace(perf_counter=lambda: now))
    for name in ("_launch_us", "_handover_us", "_link_gbs"):
        monkeypatch.setattr(gpu_speed, name, lambda *_: 1.0)
    found = gpu_speed.gpu_tier(slow, torch_kernels, 64 << 20, "q4_0")
    slow.close()
    assert asked == {1, 32} and found.gflops == pytest.approx(2 * 32 * 256 * 4096 / 4e-3 / 1e9)


def test_bench_measures_with_a_gpu_and_says_so(tiny_pack: Path, thermocline: Callable[..., Any]) -> None:
    argv = ["bench", "-m", str(tiny_pack), "-p", "8", "-n", "4", "-r", "1", "-o", "jsonl", "-q"]
    ran = thermocline(*argv, "--gpu", "stand-in", "-t", "2")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == 0 and [r["vram_bytes"] > 2**28 for r in rows] == [True, True], ran.err
    used = [(r["gpu_info"], r["n_gpu_layers"], r["no_kv_offload"]) for r in rows]
    assert used == [("stand-in", Pack.open(tiny_pack).spec.n_layers, False)] * 2
    without = [json.loads(x) for x in thermocline(*argv).out.splitlines()]
    assert [(r["vram_bytes"], r["gpu_info"], r["n_gpu_layers"]) for r in without] == [(None, "", 0)] * 2
    two = thermocline(*argv, "--gpu", "stand-in", "-t", "1,2")
    assert (two.code, "one number of threads" in two.err) == (2, True)


def test_a_step_that_was_given_up_does_not_disturb_the_next(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a step is awaited: what it still does is over before its buffers are used again, and what
    it counted is nobody's.
    """
    pack = pack_of(tmp_path, "f32")
    each = tuple(placements.layer(pack.spec, True, False, n) for n in (96, 512, 0))
    places = Placement(each, "gpu:0")
    ops = gpu_ops(stand_in, pack.spec)
    made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
    first, again = FFNStats(), FFNStats()
    truth = logits(pack.spec, made, ops, places, 1)
    assert np.array_equal(logits(pack.spec, made, ops, places, 1, stats=first), truth)

    def interrupted(self: StandIn, tasks: Any) -> None:
        raise KeyboardInterrupt

    for chunk in (1, 3):  # a step that is replayed, and one that is new
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(StandIn, "wait", interrupted)
            patch.setattr(torch_kernels, "norm", slowly(torch_kernels.norm))
            logits(pack.spec, made, ops, places, chunk)
    assert np.array_equal(logits(pack.spec, made, ops, places, 1, stats=again), truth)
    assert again == first


def slowly(kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        time.sleep(0.05)
        kernel(*args)

    return run
