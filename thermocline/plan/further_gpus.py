"""GPUs beside the first: each takes the hottest neurons that are left in RAM, while that saves time.

Attention, keys and values, predictors and the head stay where the solver put them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from thermocline.ops.device_sizes import side_device_bytes
from thermocline.ops.interface import CPU
from thermocline.plan import cost
from thermocline.plan.cost import LayerWork
from thermocline.plan.placement import LayerPlacement, NeuronRange, gpu
from thermocline.plan.planner import LayerPlan, Plan
from thermocline.plan.problem import GPU_RUNTIME_BYTES, Problem, divides

STEP = 32  # neurons of each expert that are moved at a time


def with_further(p: Problem, made: Plan, free: Sequence[int]) -> Plan:
    """Return the plan with neurons on further GPUs, of which so many bytes are free."""
    if divides(p.spec, 0) != "any" or not made.placement.devices:
        return made
    fixed = {"buffers": side_device_bytes(p.spec, p.limits), "runtime": GPU_RUNTIME_BYTES}
    for index, nbytes in enumerate(free, 1):
        added = _worthwhile(p, made, _filled(p, made, nbytes - sum(fixed.values())))
        if any(added):
            made = _moved(p, made, gpu(index), added, fixed)
    return made


def _bytes(x: LayerWork, neurons: int) -> int:
    n = np.array(neurons)
    return int(x.sizes.gate_bytes(n) + x.sizes.bundle_bytes(n))


def _filled(p: Problem, made: Plan, room: int) -> list[int]:
    """Return the neurons of each layer that a GPU takes: those first that are needed most for their bytes."""
    layers, step = list(p.layers(p.work())), STEP * p.spec.n_experts
    added = [0] * len(layers)

    def next_of(i: int) -> tuple[float, int, int] | None:
        """(less the value of a byte, the layer, bytes) of the step after those that are taken."""
        x, begin = layers[i], made.layers[i].gpu + added[i]
        end = min(x.sizes.neurons, begin + step)
        if end == begin:
            return None
        more = _bytes(x, added[i] + end - begin) - _bytes(x, added[i])
        value = float(x.reads.bundles[end] - x.reads.bundles[begin])
        return -value / max(1, more), i, more

    # A mixture's router is on the first GPU, where that has neurons of the layer.
    able = [i for i, x in enumerate(made.layers) if x.gpu or p.spec.n_experts == 1]
    heap = [first for i in able if (first := next_of(i)) is not None]
    heapq.heapify(heap)
    while heap:
        _, i, nbytes = heapq.heappop(heap)
        if nbytes > room:
            continue  # a layer's next step is as large: it takes no more
        room -= nbytes
        begin = made.layers[i].gpu + added[i]
        added[i] += min(layers[i].sizes.neurons, begin + STEP * p.spec.n_experts) - begin
        if (following := next_of(i)) is not None:
            heapq.heappush(heap, following)
    return added


def _worthwhile(p: Problem, made: Plan, added: Sequence[int]) -> list[int]:
    """Leave out layers that would take longer: each hand-over costs time. One GPU's speed stands for both."""
    work = p.work()
    v, kept = p.speeds(work), list[int]()
    for x, layer, n in zip(made.layers, p.layers(work), added, strict=True):
        gpus = np.array([x.gpu, x.gpu + n])
        both = np.full(2, True)
        where = both & (x.attention == "gpu"), both & (x.predictor == "gpu")
        disk = np.array([x.disk, max(0, x.disk - max(0, n - x.ram))])
        times = cost.layer_times(layer, v, work, *where, gpus, disk, both & (x.disk_gates > 0) & (disk > 0))
        before, after = np.sum(times, axis=0)
        kept.append(n if after < before else 0)
    return kept


def _moved(p: Problem, made: Plan, device: str, added: Sequence[int], fixed: dict[str, int]) -> Plan:
    """Return the plan with each layer's next neurons on a further GPU."""
    sizes, experts = list(p.layers(p.work())), p.spec.n_experts
    ram = dict(made.bytes["ram"])
    for x, layer, n in zip(made.layers, sizes, added, strict=True):
        for part, of in (
            ("gate rows", layer.sizes.gate_bytes),
            ("up and down rows", layer.sizes.bundle_bytes),
        ):
            left = np.array([x.ram + x.disk * (part == "gate rows"), 0])
            left[1] = max(0, left[0] - n)
            was, now = of(left)
            ram[part] = ram.get(part, 0) - int(was - now)
    there = {**fixed, "neurons": sum(_bytes(x, n) for x, n in zip(sizes, added, strict=True))}
    total = {
        part: made.bytes["gpu"].get(part, 0) + there.get(part, 0) for part in {**made.bytes["gpu"], **there}
    }
    layers = tuple(_layer(x, n) for x, n in zip(made.layers, added, strict=True))
    each = zip(made.placement.layers, added, strict=True)
    placement = replace(
        made.placement,
        layers=tuple(_placed(x, device, n // experts) for x, n in each),
        bytes={**made.placement.bytes, device: there, CPU: ram},
    )
    notes = (*made.notes, f"the speed is that of one GPU: what is on {device} makes it faster")
    return replace(
        made, layers=layers, placement=placement, notes=notes, bytes={**made.bytes, "gpu": total, "ram": ram}
    )


def _layer(x: LayerPlan, n: int) -> LayerPlan:
    disk = x.disk - max(0, n - x.ram)
    return replace(x, gpu=x.gpu + n, ram=max(0, x.ram - n), disk=disk, disk_gates=min(disk, x.disk_gates))


def _placed(x: LayerPlacement, device: str, n: int) -> LayerPlacement:
    """Return a layer's ranges with `n` neurons of each expert moved from RAM to a GPU."""

    def ranges() -> Iterator[NeuronRange]:
        for r in x.ranges:
            if r.device != CPU:
                yield r
                continue
            yield NeuronRange(device, n)
            if r.neurons > n:
                yield replace(r, neurons=r.neurons - n)

    return replace(x, ranges=tuple(ranges())) if n else x
