"""A session's weights and ops over GPUs and the CPU beside them. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from thermocline.engine.kv_cache import in_ram
from thermocline.ops.gpu import GpuOps
from thermocline.pack.checksums import Records
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors
from thermocline.plan.memory import device_limits
from thermocline.plan.place import Decision
from thermocline.plan.placement import CPU, Placement
from thermocline.session.gpu_tier import Gpus
from thermocline.session.gpu_weights import LayerPlace, Places, load, load_in_part
from thermocline.session.store import Opened
from thermocline.session.weights import LoadedWeights, new_ops


def opened(
    pack: Pack,
    decision: Decision,
    gpus: Gpus,
    predictors: Predictors | None,
    records: Records | None,
    *,
    threads: int,
    max_batch: int,
    progress: Callable[[int, int], None] | None,
) -> Opened:
    """Take all that is ever taken. `records`: checksums of neurons, where some come from disk."""
    placement, a = decision.placement, decision.arrangement
    device, places = gpus.opened[0].device, places_of(placement, pack.spec.n_experts)
    ops = GpuOps(
        device, gpus.opened[0].kernels, new_ops(threads), pack.spec,
        device_limits(pack.spec, placement.context, max_batch, predicted=predictors is not None),
        gpus.send_from
    )  # fmt: skip
    store = None
    if a is None:
        made = load(pack, places, device, ops.cpu, predictors=predictors, progress=progress)
    else:
        assert records is not None
        made, store = load_in_part(
            pack, places, a, records, device, ops.cpu, predictors=predictors, progress=progress
        )

    def storage(layer: int, shape: tuple[int, ...]) -> Any:
        on_device = placement.layers[layer].attention != CPU
        return device.zeros(shape, torch.float16) if on_device else in_ram(layer, shape)

    return Opened(LoadedWeights(made, ops, placement.used(CPU)), store, storage)


def places_of(placement: Placement, experts: int) -> Places:
    def place(device: str | None) -> bool:
        return device not in (None, CPU)

    layers = tuple(
        LayerPlace(place(x.attention), place(x.predictor), x.on_gpus * experts) for x in placement.layers
    )
    return Places(layers, placement.head != CPU)
