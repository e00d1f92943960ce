"""The process that compares a card with the CPU: python -m thermocline.session.self_check.comparison DIR GPU

DIR has a miniature, the pack `DIR/model`, and gets `DIR/answer.json`. GPU: as `gpu.find` takes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thermocline.engine.decoder import Model, bind, forward, state_storage
from thermocline.engine.kv_cache import BLOCK, KVCache, blocks_for, in_ram
from thermocline.engine.state_pool import NONE, StatePool
from thermocline.errors import ThermoclineError
from thermocline.ops.device_sizes import FEW, StepLimits
from thermocline.ops.gpu import GpuOps, pages_on
from thermocline.ops.interface import CPU, F32, Batch, FFNStats, KVLayer, KVShape, OpaqueOps, opaque
from thermocline.pack.pack import Pack
from thermocline.plan.placement import LayerPlacement, NeuronRange, Placement
from thermocline.plan.placement import gpu as device_name
from thermocline.session import gpu, gpu_weights, weights

if TYPE_CHECKING:
    from thermocline.engine.kv_cache import Storage
    from thermocline.model.spec import ModelSpec

# Tokens: queued, recorded and replayed; then a prompt. It comes last, since what follows it differs by its
# rounding: on the card it meets weights as floats, on the CPU in int8.
STEPS = (1,) * 8 + (FEW + 8,)
SURE = 0.25  # the share of a mixture's rows that count
THREADS = 2
NOTHING_LIKE = 1e9


def divided(spec: ModelSpec) -> Placement:
    """Return a placement on the first GPU, but for half of what can be divided: both have a part."""
    card = device_name(0)

    def layer(i: int) -> LayerPlacement:
        experts, _, width = spec.ffn(i)
        if not width:
            ranges: tuple[NeuronRange, ...] = ()
        elif spec.sparse and not spec.sub_norms:
            here = width // 2
            ranges = NeuronRange(card, here), NeuronRange(CPU, width - here)
        elif experts > 1:
            ids = tuple(range(experts))
            there, rest = ids[: experts // 2], ids[experts // 2 :]
            ranges = NeuronRange(card, width, whole=there), NeuronRange(CPU, width, whole=rest)
            ranges = ranges if not spec.sub_norms else (NeuronRange(CPU, width),)
        else:
            ranges = (NeuronRange(card, width),)
        return LayerPlacement(card, card, ranges)

    return Placement(tuple(map(layer, range(spec.n_layers))), card)


def logits(model: Model, ops: OpaqueOps, storage: Storage) -> Iterator[F32]:
    """Return the logits of every token of each of STEPS, of one random text."""
    spec, total = model.spec, sum(STEPS)
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, total).astype(np.int32)
    kv = KVCache(spec, blocks_for(total), storage=storage)
    kept = StatePool(spec, 1, state_storage(model, ops)).layers
    table, begin = np.arange(blocks_for(total), dtype=np.int32)[None], 0
    for turn, n in enumerate(STEPS):
        at = np.arange(begin, begin + n, dtype=np.int32)
        rows = np.arange(n, dtype=np.int32)
        slot = np.array([turn % 2 if turn else NONE], np.int32)
        after = np.array([(turn + 1) % 2], np.int32)
        batch = Batch(ids[at], at, 0 * at, table, rows, None, slot, after)
        sparsity = "exact" if spec.sparse else "off"
        yield forward(model, kv, batch, ops, sparsity=sparsity, stats=FFNStats(), states=kept)
        begin += n


def row_errors(got: F32, want: F32) -> NDArray[np.float64]:
    """Return each row's mean squared error over the truth's mean square.

    It is NOTHING_LIKE where a number is none.
    """
    error = ((got.astype(np.float64) - want) ** 2).mean(axis=1) / (want.astype(np.float64) ** 2).mean()
    return np.where(np.isfinite(error), error, NOTHING_LIKE)


def compared(pack: Pack, found: gpu.OpenGpu) -> tuple[float, float]:
    """Return the worst NMSE of a row of logits, of single tokens and of a prompt.

    Of a mixture it is the worst among the SURE best rows: rounding sends some tokens to another expert than
    the CPU's, in each layer, and changes what later ones see.
    """
    spec, device = pack.spec, found.device
    there = weights.load(pack, threads=THREADS)
    truth = list(logits(bind(spec, there.weights, there.ops), opaque(there.ops), in_ram))
    limits = StepLimits(max(STEPS), max(STEPS), blocks_for(sum(STEPS)) * BLOCK, BLOCK, 0)
    ops = GpuOps((device,), found.kernels, weights.new_ops(THREADS), spec, limits)
    made = gpu_weights.load(pack, divided(spec), (device,), ops.cpu)

    def storage(layer: int, shape: KVShape) -> KVLayer:
        return pages_on(device, shape)

    try:
        answers = list(logits(bind(spec, made, ops), opaque(ops), storage))
    finally:
        device.release()
    errors = [row_errors(y, want) for y, want in zip(answers, truth, strict=True)]
    share = SURE if spec.n_experts > 1 else 1.0
    few, many = np.concatenate(errors[:-1]), errors[-1]
    return float(np.quantile(few, share, method="higher")), float(np.quantile(many, share, method="higher"))


def main(directory: str, asked: str) -> None:
    where = Path(directory)
    try:
        found = gpu.find(asked)
        assert found is not None
        few, many = compared(Pack.open(where / "model"), found)
        answer: dict[str, float | str] = {"few": few, "many": many}
    except ThermoclineError as e:
        answer = {"failed": str(e)}
    (where / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
