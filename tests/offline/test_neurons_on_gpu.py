"""Neurons that GPUs compute, counted and sampled: those that the CPU counts, wherever they are.

The GPUs are stand-ins.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_gpu
from test_gpu import stand_in, storage
from test_two_devices import MODELS, PROPORTIONS, divided, in_32nds, other
from test_within_ram import wide

from thermocline.convert import importer
from thermocline.engine.kv_cache import BLOCK
from thermocline.offline.activity import STEP, UNIT, ActivityCounts, Counted, ProfileWorker, down_norms
from thermocline.ops import device_sizes
from thermocline.ops.cpu import CpuOps
from thermocline.ops.device import StandIn
from thermocline.ops.device_sizes import StepLimits
from thermocline.ops.gpu import GpuOps
from thermocline.ops.kernels import torch_kernels
from thermocline.pack.pack import Pack
from thermocline.plan.placement import Placement
from thermocline.session import gpu_weights, weights

pytestmark = pytest.mark.oracle
__all__ = ["other", "stand_in"]  # fixtures
CONTEXT = 64
FLIPPED = 1e-5  # share of activations next to zero, which another order of additions turns to the other side


def passages(pack: Pack) -> list[Any]:
    """Of 64 and of 7 tokens, the second of which is a step of few."""
    rng = np.random.default_rng(4)
    return [rng.integers(3, pack.spec.vocab_size, n).astype(np.int32) for n in (CONTEXT, 7)]


def counted(worker: ProfileWorker, texts: Sequence[Any]) -> list[Counted]:
    return [worker.count(ids, np.arange(0, len(ids), 3), threading.Event()) for ids in texts]


def of_cpu(pack: Pack, texts: Sequence[Any]) -> list[Counted]:
    loaded, none = weights.load(pack, threads=2), np.empty(0, np.int32)
    worker = ProfileWorker.on_cpu(pack.spec, loaded.weights, none, CONTEXT, 2, down_norms(pack))
    return counted(worker, texts)


def of_gpus(
    pack: Pack, places: Placement, devices: Sequence[StandIn], texts: Sequence[Any], send_from: int
) -> list[Counted]:
    limits = StepLimits(STEP, 8, pack.spec.max_context, BLOCK)
    ops = GpuOps(devices, torch_kernels, CpuOps(2), pack.spec, limits, send_from)
    made = gpu_weights.load(pack, places, devices, ops.cpu)
    session: Any = SimpleNamespace(
        pack=pack, loaded=SimpleNamespace(weights=made, ops=ops), storage=storage(places, devices[0])
    )
    worker = ProfileWorker.on_gpu(session, np.empty(0, np.int32), CONTEXT, down_norms(pack))
    found = counted(worker, texts)
    assert not ops.recorded  # each layer is waited for
    return found


def dense(sample: Any, neurons: int) -> Any:
    """[tokens, neurons]"""
    made = np.zeros((len(sample.sizes), neurons), np.float32)
    made[np.repeat(np.arange(len(made)), sample.sizes), sample.index] = sample.mass
    return made


def alike(found: Sequence[Counted], wanted: Sequence[Counted], flipped: float = FLIPPED) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        most = max(2.0, flipped * theirs.counts[:, 0].sum())
        assert theirs.counts[:, 0].sum() > 0
        assert np.abs(mine.counts - theirs.counts).sum(axis=(0, 2)).max() <= most
        assert [s.layer for s in mine.samples] == [s.layer for s in theirs.samples]
        for a, b in zip(mine.samples, theirs.samples, strict=True):
            assert np.allclose(a.input, b.input, rtol=2e-3, atol=1e-3)
            x, y = (dense(s, theirs.counts.shape[2]) for s in (a, b))
            assert np.abs(x - y).max() <= 4e-3 * np.abs(y).max()


@pytest.mark.parametrize("send_from", [1 << 31, 9])
@pytest.mark.parametrize("proportion", PROPORTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_neurons_are_counted_wherever_they_are(
    model: str, proportion: str, send_from: int, tmp_path: Path, stand_in: StandIn, other: StandIn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """On two GPUs and the CPU, of few tokens and many; of a prompt the CPU's are sent in several pieces."""
    pack, devices = in_32nds(MODELS[model], tmp_path), (stand_in, other)
    gate, bundle = (pack.tensors[f"layers.0.{part}"].stride for part in ("gate.weight", "bundle"))
    monkeypatch.setattr(device_sizes, "PIECE_BYTES", 96 * (gate + bundle))
    places, _ = divided(pack.spec, PROPORTIONS[proportion], predictor=False)
    texts = passages(pack)
    alike(of_gpus(pack, places, devices, texts, send_from), of_cpu(pack, texts))


@pytest.mark.parametrize("attention", [True, False])
def test_layers_whose_attention_is_the_cpus_are_counted(
    attention: bool, tmp_path: Path, stand_in: StandIn
) -> None:
    """Of some layers the GPU has nothing: their inputs pass it only to be sampled."""
    pack = in_32nds(test_gpu.pack_of, tmp_path)
    places, _ = divided(pack.spec, [(0, 0), (8, 0), (0, 0)], predictor=False, attention=attention)
    texts = passages(pack)
    alike(of_gpus(pack, places, (stand_in,), texts, 1 << 31), of_cpu(pack, texts))


def test_weights_in_blocks_differ_by_the_cpus_rounding(tmp_path: Path, stand_in: StandIn) -> None:
    """Many tokens meet them in f32 on a GPU, in int8 on the CPU: of gates around zero 1 in 100 may differ."""
    hf = wide("neurons", tmp_path / "hf")
    for format, most in (("f32", FLIPPED), ("q8_0", 0.01)):
        importer.pack(hf, tmp_path / format, format)
        pack = Pack.open(tmp_path / format)
        places, _ = divided(pack.spec, [(32, 0), (8, 0)], predictor=False)
        text = passages(pack)[:1]
        (found,), (wanted,) = of_gpus(pack, places, (stand_in,), text, 1 << 31), of_cpu(pack, text)
        apart = np.abs(found.counts[:, 0] - wanted.counts[:, 0]).sum() / wanted.counts[:, 0].sum()
        assert apart <= most and (format == "f32") == (apart <= FLIPPED), format


def test_a_step_that_was_given_up_is_not_counted(tmp_path: Path, stand_in: StandIn) -> None:
    """Ctrl-C between two layers: the next passage begins with its own first layer."""
    pack = in_32nds(test_gpu.pack_of, tmp_path)
    places, _ = divided(pack.spec, [(8, 0)] * 3, predictor=False)
    texts, wanted = passages(pack), of_cpu(pack, passages(pack))
    add, calls = ActivityCounts.add, 0

    def interrupted(self: ActivityCounts, *args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        add(self, *args)

    limits = StepLimits(STEP, 8, pack.spec.max_context, BLOCK)
    ops = GpuOps((stand_in,), torch_kernels, CpuOps(2), pack.spec, limits)
    made = gpu_weights.load(pack, places, (stand_in,), ops.cpu)
    session: Any = SimpleNamespace(
        pack=pack, loaded=SimpleNamespace(weights=made, ops=ops), storage=storage(places, stand_in)
    )
    worker = ProfileWorker.on_gpu(session, np.empty(0, np.int32), CONTEXT, down_norms(pack))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivityCounts, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            counted(worker, texts[:1])
    alike(counted(worker, texts), wanted)


def test_what_a_watch_takes_is_counted(tmp_path: Path) -> None:
    """Two buffers of one layer's neurons, not of all layers'."""
    spec = replace(in_32nds(test_gpu.pack_of, tmp_path).spec, n_layers=3)
    one = 4 * UNIT * (spec.ffn_dim + spec.dim)
    assert 2 * one <= device_sizes.watch_bytes(spec, UNIT) <= 8 * one
