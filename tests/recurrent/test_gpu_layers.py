"""Layers of one half, and recurrent ones, on a device and the CPU beside it: the same answer."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import placements
import pytest
import recurrent_toy
import test_mixers
import torch
from gpu_cases import Kernels, normal
from recurrent_toy import in_arenas, weights_of
from test_engine import Lab, prompt
from test_gpu import Counting, gpu_ops, placed, stand_in, storage
from test_gpu_kernels import kernels
from test_options import TOKENS, nmse
from toy import GREEDY, SPEC

from thermocline.convert.random_weights.source import RandomWeights
from thermocline.convert.synthetic_weights import WeightStatistics
from thermocline.engine.decoder import bind, forward
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.kv_cache import BLOCK, KVCache, blocks_for, in_ram
from thermocline.engine.state_pool import NONE, StatePool, states_in_ram
from thermocline.model.spec import Latent, ModelSpec, Recurrent, check_spec
from thermocline.ops import device_sizes, reference
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_ffn import PartQueue, pairs_of
from thermocline.ops.device_layers import Binder, DeviceMixer
from thermocline.ops.device_rows import Operand
from thermocline.ops.device_sizes import StepLimits, device_bytes, host_bytes
from thermocline.ops.gpu import GpuOps
from thermocline.ops.interface import F32, Batch, FFNStats, Weights
from thermocline.ops.kernels import torch_kernels
from thermocline.ops.mixing.recurrent import MixerQueue
from thermocline.pack.pack import Pack
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.plan.memory import Needs
from thermocline.plan.placement import Placement
from thermocline.session import gpu, gpu_loading, gpu_tier, gpu_weights, weights

pytestmark = pytest.mark.oracle
__all__ = ["kernels", "stand_in"]  # fixtures
HALVES = replace(SPEC, n_layers=4, mixers=("attention", "none", "attention", "none"), no_ffn=(0, 2))
RECURRENT = {
    **recurrent_toy.SPECS,
    "deltanet, tiled": replace(
        recurrent_toy.SPECS["deltanet"],
        recurrent=Recurrent(conv=2, heads=6, head_dim=5, groups=3, state=7, tiled=True),
        residual_scale=0.5,
    ),
    "mamba2, biased": replace(
        recurrent_toy.SPECS["mamba2"],
        recurrent=Recurrent(conv=4, heads=6, head_dim=5, groups=3, state=9, conv_bias=True),
        activation="silu",
    ),
}
SPECS: dict[str, ModelSpec] = {
    "halves": HALVES,
    "halves, dense": replace(HALVES, activation="silu"),
    "some whole": replace(HALVES, mixers=("none", "attention", "attention", "none"), no_ffn=(2,)),
    "in a window": replace(HALVES, sliding_window=9),
    **RECURRENT,
}
LATENT = replace(
    SPEC,
    activation="silu",
    n_layers=3,
    n_kv_heads=1,
    head_dim=40,
    rotary_dim=8,
    attention_scale=0.2,
    latent=Latent(kv_rank=32, nope=32, rope=8, value=16, q_rank=32),
)


def states_of(model: Any, ops: Any) -> dict[int, F32]:
    """Return states of the layers that have some, where they are computed."""

    def made(layer: int, slots: int, floats: int) -> F32:
        own = None if ops is reference else ops.states(model.mixers[layer], slots, floats)
        return states_in_ram(layer, slots, floats) if own is None else own

    return StatePool(model.spec, 1, made).layers


def logits(
    spec: ModelSpec, w: Weights, ops: Any, places: Placement | None = None, chunk: int = TOKENS
) -> F32:
    """As test_gpu's, with states: every step reads one slot and writes the other."""
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, TOKENS).astype(np.int32)
    where = in_ram if places is None else storage(places)
    model, kv, out = bind(spec, w, ops), KVCache(spec, blocks_for(TOKENS), storage=where), []
    states = states_of(model, ops)
    table, slot = np.arange(blocks_for(TOKENS), dtype=np.int32)[None], np.array([NONE], np.int32)
    for start in range(0, TOKENS, chunk):
        at = np.arange(start, min(TOKENS, start + chunk), dtype=np.int32)
        after = (slot + 1) % 2
        every = np.arange(len(at), dtype=np.int32)
        batch = Batch(ids[at], at, np.zeros_like(at), table, every, None, slot, after)
        how: dict[str, Any] = {"sparsity": "exact", "stats": FFNStats(), "states": states}
        out.append(forward(model, kv, batch, ops, **how))
        slot = after
    return np.concatenate(out)


def pack_of(path: Path, spec: ModelSpec, format: str) -> Pack:
    made = RandomWeights(WeightStatistics.of(spec, 0, None, False))
    write_pack(path / "pack", spec, format, made, PackExtras(origin=("random", "test", "0" * 32)))
    return Pack.open(path / "pack")


@pytest.mark.parametrize("name", SPECS)
def test_layers_are_the_same_wherever_they_are(name: str, stand_in: StandIn) -> None:
    """Chunks of 5 and 1 are recorded and replayed, of 40 not."""
    spec = SPECS[name]
    check_spec(spec, name)
    random = weights_of(spec)
    truth = logits(spec, random, reference)
    for seed, chunk in enumerate((TOKENS, 5, 1)):
        places = placements.some(spec, seed) if seed else placements.whole(spec)
        y = logits(spec, placed(random, places), gpu_ops(stand_in, spec), places, chunk)
        assert nmse(y, truth) < 1e-6, places


class Direct(StandIn):
    """A device that computes what is queued at once."""

    def __init__(self, where: str) -> None:
        self.where = where

    def run(self, work: Any, *args: Any) -> None:
        work(*args)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.where)

    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)


@pytest.mark.parametrize("name", test_mixers.SPECS)
def test_a_mixers_kernels_are_the_reference(name: str, kernels: Kernels) -> None:
    """Two steps of three sequences, of which one begins with the second; slots that nobody wrote hold NaN."""
    spec = test_mixers.SPECS[name]

    def matrix(seed: int, rows: int, cols: int) -> F32:
        return normal(seed, rows, cols) / np.float32(np.sqrt(cols))

    made = test_mixers.mixer(spec, matrix)
    layer = test_mixers.layer_of(made)
    names = recurrent_toy.MATRICES & vars(made).keys()
    on_device: dict[str, Any] = {n: kernels.rows("f32", getattr(made, n))[0] for n in names}
    device, limits = Direct(kernels.device), StepLimits(40, 5, 64, BLOCK)
    b = Binder((device,), CpuOps(1), spec).mixer(spec, replace(layer, mixer=replace(made, **on_device)))
    assert isinstance(b, DeviceMixer) and b.norm_before is not None
    pairs = pairs_of(device, device_sizes.buffers(spec, limits))
    queue = PartQueue(device, kernels.ops, spec, pairs, kernels.scratch())
    mixers, x = MixerQueue(queue, spec, pairs), normal(7, 24, spec.dim)
    theirs = np.full((8, spec.state_floats(0)), np.nan, np.float32)
    ours = kernels.put(theirs)
    steps = [([9, 1], [-1, -1], [0, 5], x[:10]), ([2, 9, 3], [5, 0, -1], [1, 2, 3], x[10:])]
    for lengths, before, after, part in steps:
        batch = test_mixers.batch(lengths, before, after)
        want = part.copy()
        step = reference.step(batch, 16, None, None)
        reference.mixer_add(want, want, reference.bind_mixer(spec, layer), step, theirs)
        normed = reference.norm(part, layer.attn_norm.weight, None, spec.norm_eps, "rms")  # type: ignore[union-attr]
        mixers.begin(batch)
        mixed = mixers.mix(b, Operand(kernels.put(normed)), kernels.put(batch.sequence), ours)
        out = kernels.filled(len(part), spec.dim)
        queue.times(out, b.out, Operand(mixed))
        got = out.cpu().numpy()
        assert nmse(got, (want - part) / np.float32(spec.residual_scale)) <= 1e-9
        written = ours.cpu().numpy()
        assert np.array_equal(np.isnan(written), np.isnan(theirs))
        assert nmse(np.nan_to_num(written), np.nan_to_num(theirs)) <= 1e-9


@pytest.mark.parametrize("kind", ["deltanet", "mamba2", "conv"])
def test_no_bit_of_a_mixer_depends_on_chunks_or_company(kind: str, kernels: Kernels) -> None:
    """Of convolutions and states, that is: a matrix with more tokens goes through other kernels."""
    spec = test_mixers.SPECS[kind]
    r = spec.recurrent
    assert r is not None
    channels = spec.dim if kind == "conv" else r.channels
    x = kernels.put(normal(1, 14, max(3 * channels, channels + r.heads)))
    conv, gates = kernels.put(normal(2, r.conv * channels)), kernels.put(normal(3, 14, 2 * max(1, r.heads)))
    decay, bias = kernels.put(-np.abs(normal(4, max(1, r.heads)))), kernels.put(normal(5, max(1, r.heads)))

    def run(runs: list[list[int]], states: torch.Tensor) -> torch.Tensor:
        seen, out = kernels.filled(14, channels), kernels.filled(14, max(1, r.inner))
        sequence = np.zeros(14, np.int32)
        for s, (first, n, _, _) in enumerate(runs):
            sequence[first : first + n] = s
        where = kernels.put(np.array(runs, np.int32))
        kernels.ops.convolve(seen, x, conv, None, kernels.put(sequence), where, states, kind == "conv")
        if kind != "conv":
            skip = None if kind == "deltanet" else decay
            kernels.ops.scan(out, seen, gates, r, decay, bias, skip, where, states)
        return torch.cat([seen, out], dim=1)

    states = kernels.filled(8, spec.state_floats(0))
    whole = run([[0, 14, -1, 0], [0, 0, -1, -1]], states)
    parts, slot = torch.empty_like(whole), -1
    for first, n in ((0, 1), (1, 2), (3, 10), (13, 1)):
        after = 1 if slot != 1 else 2
        parts[first : first + n] = run([[first, n, slot, after]], states)[first : first + n]
        slot = after
    assert torch.equal(parts.nan_to_num(), whole.nan_to_num()) and torch.equal(states[slot], states[0])
    run([[0, 5, -1, 3], [5, 9, -1, 4]], states)
    assert torch.equal(run([[0, 0, -1, -1], [5, 9, 3, 5]], states)[5:].nan_to_num(), whole[5:].nan_to_num())
    assert torch.equal(states[5], states[0])


PACKS = {
    **{name: SPECS[name] for name in ("halves", "halves, dense", "deltanet", "mamba2", "conv", "alone")},
    "latent": LATENT,
    "latent, without q_b": replace(LATENT, latent=Latent(kv_rank=32, nope=32, rope=8, value=16)),
}


@pytest.mark.parametrize("format", ["f32", "q8_0"])
@pytest.mark.parametrize("name", PACKS)
def test_a_pack_is_loaded_to_where_its_places_say(
    name: str, format: str, tmp_path: Path, stand_in: StandIn
) -> None:
    spec = PACKS[name]
    pack = pack_of(tmp_path, spec, format)
    whole = weights.load(pack, threads=2)
    truth = logits(spec, whole.weights, whole.ops)
    for seed, chunk in enumerate((TOKENS, 5, 1)):
        places = placements.some(spec, seed) if seed else placements.whole(spec)
        ops = gpu_ops(stand_in, spec)
        made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
        y = logits(spec, made, ops, places, chunk)
        assert nmse(y, truth) < (1e-9 if format == "f32" else 2e-4), places  # the CPU's int8 activations


def lab_of(spec: ModelSpec, stand_in: StandIn, places: Placement) -> Lab:
    """An engine's parts, over a device."""
    limits = StepLimits(264, 4, spec.max_context, BLOCK)
    ops = GpuOps((stand_in,), torch_kernels, CpuOps(2), spec, limits)
    return Lab(ops, placed(weights_of(spec), places), False, spec)


@pytest.mark.parametrize("kind", recurrent_toy.SPECS)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_engines_requests_get_the_tokens_of_the_cpu(kind: str, seed: int, stand_in: StandIn) -> None:
    """Batches, prompts in chunks, and prompts that go on from a state that was kept."""
    spec = recurrent_toy.SPECS[kind]
    places = placements.some(spec, 1) if seed else placements.whole(spec)
    alone = Lab(CpuOps(2), in_arenas(weights_of(spec), "f32"), True, spec)
    lab, params = lab_of(spec, stand_in, places), dataclasses.replace(GREEDY, max_tokens=8)
    e = lab.engine(max_batch=4, prefill_chunk=33, storage=storage(places))
    ids = prompt(3, 100)
    for prompts in ([ids[:40], prompt(1, 5), prompt(2, 33)], [ids, [*ids[:64], 7, 8]], [[*ids, 5]]):
        requests = [e.submit(p, params) for p in prompts]
        got = [tokens for tokens, _ in lab.answers(e, *requests)]
        assert got == [alone.alone(p, params)[0] for p in prompts]
    assert requests[0].cached == 96
    e.check_integrity()


@pytest.mark.parametrize("kind", ["deltanet", "mamba2", "conv"])
def test_a_step_that_is_given_up_changes_no_state(
    kind: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is awaited before the next one, which reads what that one read."""
    spec = RECURRENT[kind]
    places = placements.whole(spec)
    ops, w = gpu_ops(stand_in, spec), placed(weights_of(spec), places)
    model, kv = bind(spec, w, ops), KVCache(spec, 2, storage=storage(places))
    states = states_of(model, ops)

    def step(position: int, before: int, after: int) -> F32:
        at = np.array([position], np.int32)
        table, first = np.arange(2, dtype=np.int32)[None], np.zeros(1, np.int32)
        slots = np.array([before], np.int32), np.array([after], np.int32)
        batch = Batch(at, at, first, table, first, None, *slots)
        return forward(model, kv, batch, ops, sparsity="exact", stats=FFNStats(), states=states)

    def interrupted(self: StandIn, tasks: Any) -> None:
        raise KeyboardInterrupt

    step(0, NONE, 0)
    first = [step(1, 0, 1), step(2, 1, 2)]
    kept = {i: np.array(x[0].tolist()) for i, x in states.items()}
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(StandIn, "wait", interrupted)
            step(1, 0, 3)
        assert np.array_equal(step(1, 0, 1), first[0]) and np.array_equal(step(2, 1, 2), first[1])
    assert all(np.array_equal(np.array(x[0].tolist()), kept[i]) for i, x in states.items())


@pytest.mark.parametrize("name", ["deltanet", "alone", "latent"])
def test_a_session_plans_all_that_is_kept_to_the_byte(name: str, tmp_path: Path) -> None:
    """States, keys and values, and latents, in the memory where their layers are computed."""
    spec = PACKS[name]
    pack = pack_of(tmp_path, spec, "f32")
    found = gpu.find_all(gpu.STAND_IN, 1.0)
    needs = Needs("exact", 64, 3, 2, 4 << 30)
    chosen = gpu_tier.planned(found, pack, needs)
    assert chosen is not None
    decision, gpus = chosen
    assert {x.attention for x in decision.placement.layers} == {"gpu:0"}
    opened = gpu_loading.opened(pack, decision, gpus, None, None, threads=2, max_batch=3, progress=None)
    settings = EngineSettings(context=64, max_batch=3, kv_tokens=decision.placement.kv_tokens)
    e = Engine(spec, opened.loaded.weights, opened.loaded.ops, settings, storage=opened.storage)
    taken = decision.placement.bytes["gpu:0"]
    assert e.kv.nbytes == taken["keys and values"]
    assert (0 if e.kv.states is None else e.kv.states.nbytes) == taken.get("recurrent states", 0)
    assert (e.kv.states is None) == (spec.recurrent is None)
    assert "recurrent states" not in decision.placement.bytes["cpu"]
    ids, params = prompt(1, 40), dataclasses.replace(GREEDY, max_tokens=6)
    whole = weights.load(pack, threads=2)
    alone = Engine(spec, whole.weights, whole.ops, settings)
    requests = [engine.submit(ids, params) for engine in (e, alone)]
    for engine in (e, alone):
        while engine.step():
            pass
    assert requests[0].token_ids == requests[1].token_ids and len(requests[0].token_ids) == 6
    gpus.release()
    gpus.close()


@pytest.mark.parametrize("name", [*RECURRENT, "latent"])
def test_buffers_and_states_are_what_the_planner_counts(name: str) -> None:
    spec = (RECURRENT | {"latent": LATENT})[name]
    counting, limits = Counting(), StepLimits(40, 3, 64, BLOCK)
    GpuOps((counting,), torch_kernels, CpuOps(1), spec, limits)
    assert counting.there == device_bytes(spec, limits)
    assert counting.here == host_bytes(spec, limits)
    counting.close()
