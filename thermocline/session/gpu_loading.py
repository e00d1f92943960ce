"""A session's weights and ops over GPUs and the CPU beside them. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from thermocline.engine.kv_cache import in_ram
from thermocline.ops.device_places import DevicePlaces
from thermocline.ops.gpu import GpuOps, pages_on
from thermocline.ops.interface import CPU, KVLayer, KVShape, opaque
from thermocline.pack.pack import Pack
from thermocline.plan.memory import device_limits
from thermocline.plan.placement import gpu
from thermocline.plan.problem import GPU_LIBRARY_BYTES
from thermocline.session.gpu_weights import load, load_experts_in_part, load_in_part, with_tried
from thermocline.session.self_check.verdicts import Setup
from thermocline.session.store import OnDisk, Opened
from thermocline.session.weights import LoadedWeights, new_ops

if TYPE_CHECKING:
    from thermocline.files.bounded import Json
    from thermocline.model.spec import ModelSpec
    from thermocline.ops.interface import Weights
    from thermocline.pack.checksums import NeuronChecksums
    from thermocline.pack.predictor import Predictors
    from thermocline.pack.stored_model import StoredModel
    from thermocline.plan.budget import Decision
    from thermocline.plan.placement import Placement
    from thermocline.session.gpu_tier import Gpus


def opened(
    pack: StoredModel,
    decision: Decision,
    gpus: Gpus,
    predictors: Predictors | None,
    records: NeuronChecksums | None,
    *,
    threads: int,
    max_batch: int,
    progress: Callable[[int, int], None] | None,
) -> Opened:
    """Take all that is ever taken. `records`: checksums of neurons, where some come from disk."""
    placement, a, experts = decision.placement, decision.arrangement, decision.experts
    devices = tuple(one.device for one in gpus.opened)
    for i, device in enumerate(devices):
        device.reserve(placement.used(gpu(i)) - GPU_LIBRARY_BYTES)
    predicted = predictors is not None or gpus.tries
    ops = GpuOps(
        devices, gpus.opened[0].kernels, new_ops(threads), pack.spec,
        device_limits(pack.spec, placement.context, max_batch, predicted=predicted),
        gpus.send_from
    )  # fmt: skip
    store: OnDisk | None = None
    if experts is not None:
        made, store = load_experts_in_part(
            pack, placement, experts, devices, ops.cpu, threads=threads, progress=progress
        )
    elif a is None:
        made = load(pack, placement, devices, ops.cpu, predictors=predictors, progress=progress)
    else:
        assert records is not None and isinstance(pack, Pack), "neurons on disk are records of a pack"
        made, store = load_in_part(
            pack, placement, a, records, devices, ops.cpu, predictors=predictors, progress=progress
        )

    def storage(layer: int, shape: KVShape) -> KVLayer:
        if placement.layers[layer].attention == CPU:
            return in_ram(layer, shape)
        return pages_on(devices[0], shape)

    return Opened(LoadedWeights(made, opaque(ops), placement.ram_bytes), store, storage, DevicePlaces(ops))


def computed_by(placement: Placement, gpus: Gpus) -> Json:
    """Return what changes bits of keys, values and states beside GPUs: who computes which part, with what.

    A step's size changes them, too (`Gpus.send_from`, kernels of 16 tokens and fewer), so no identity says
    all: what is kept has the bits of the steps that computed it. A driver runs what Triton has compiled.
    """
    return {
        "layers": [
            [x.attention, [[r.device, r.neurons, r.whole] for r in x.ranges]] for x in placement.layers
        ],
        "cards": [asdict(Setup.of(one.device.name, driver="")) for one in gpus.opened],
        "kernels": getattr(gpus.opened[0].kernels, "__name__", ""),
    }


def tried(opened: Opened, decision: Decision, gpus: Gpus, predictors: Predictors, spec: ModelSpec) -> Weights:
    """Return a session's weights with these predictors. Recordings of steps without them are forgotten."""
    loaded, ops = opened.loaded, cast("GpuOps", opened.loaded.ops)
    ops.forget()
    return with_tried(loaded.weights, spec, decision.placement, predictors, gpus.opened[0].device)
