"""GPUs beside the first: each takes the hottest neurons that are left in RAM, while that saves time.

Of a mixture that skips no neuron it takes whole experts, of other models that skip none whole FFNs.
Attention, keys and values, predictors and the head stay where the solver put them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from thermocline.errors import OutOfBudget
from thermocline.ops.device_sizes import side_device_bytes
from thermocline.ops.interface import CPU
from thermocline.plan import cost
from thermocline.plan.cost import LayerWork
from thermocline.plan.memory import GIB, gib_up, size_down, size_up
from thermocline.plan.placement import DISK, LayerPlacement, NeuronRange, gpu
from thermocline.plan.planner import (
    PREDICTED_ONLY,
    LayerPlan,
    Plan,
    attending,
    gpu_share,
    hands_over_us,
    predictions,
    solved,
    whole_experts,
)
from thermocline.plan.problem import GPU_RUNTIME_BYTES, Problem, divides
from thermocline.plan.solver import Budget

STEP = 32  # neurons of each expert that are moved at a time, where experts are divided


def among(p: Problem, free: Sequence[int]) -> Plan:
    """Return the fastest plan for GPUs of which those beside the first have so many bytes free.

    Where FFNs cannot be divided, the first GPU has what makes a token fastest there, or all attention before
    any of them: further GPUs take FFNs alone. RAM may have room for less than the solver leaves there.
    Raises OutOfBudget.
    """
    if not any(divides(p.spec, i) == "all" for i in range(p.spec.n_layers)):
        return with_further(p, solved(p), free)
    budget = Budget(p.vram, p.ram)
    found, refused = list[Plan](), None
    for more in (0, 1 << 50):
        larger = replace(p, ask=replace(p.ask, ram_bytes=p.ram + more))
        for way in (solved, attending) if p.ask.objective == "time" else (solved,):
            try:
                made = with_further(larger, way(larger), free)
            except OutOfBudget as e:
                refused = refused or e
                continue
            if (need := made.used("ram")) <= p.ram:
                found.append(replace(made, budget=budget))
            else:
                refused = OutOfBudget(_refusal(p, free, need))
        if any(not x.placement.from_disk for x in found):
            break
    if not found:
        assert refused is not None
        raise refused
    return min(found, key=lambda x: (x.placement.from_disk, -x.tokens_per_s))


def _refusal(p: Problem, free: Sequence[int], need: int) -> str:
    there = ", ".join(f"{n / GIB:.2f}" for n in (p.vram, *free))
    return (
        f"the model needs {size_up(need)} of RAM beside {there} GiB of VRAM, {size_down(p.ram)} is allowed; "
        f"a change that fits: --ram {gib_up(need)}"
    )


def with_further(p: Problem, made: Plan, free: Sequence[int]) -> Plan:
    """Return the plan with neurons on further GPUs, of which so many bytes are free.

    RAM has neurons that a token needs more often than those on disk, so these move last.
    """
    if not made.placement.devices:
        return made
    first = made
    fixed = {"buffers": side_device_bytes(p.spec, p.limits), "runtime": GPU_RUNTIME_BYTES}
    idle = list[str]()
    for index, nbytes in enumerate(free, 1):
        room = nbytes - sum(fixed.values())
        added = _worthwhile(p, made, _filled(p, made, room))
        if any(added):
            made = _moved(p, made, gpu(index), added, fixed)
        else:
            idle.append(f"{gpu(index)} is not used: {_why_idle(p, made, room, nbytes)}")
    made = made if made is first else _described(p, made)
    if not made.placement.from_disk:
        made = replace(made, notes=tuple(n for n in made.notes if not n.startswith(PREDICTED_ONLY)))
    return replace(made, notes=(*made.notes, *idle))


def _why_idle(p: Problem, made: Plan, room: int, nbytes: int) -> str:
    """Return why a further GPU takes nothing."""
    if all(divides(p.spec, i) == "none" for i in range(p.spec.n_layers)):
        return "a norm sees all of a token's activations, so the experts stay in RAM"
    if not any(x.gpu < s.neurons for x, s in zip(made.layers, p.sizes.layers, strict=True)):
        return "the others have all neurons"
    if not any(_step(p, i, x) for i, x in enumerate(made.layers)):
        return "the first asks no router"
    if not any(_filled(p, made, room)):
        return f"{nbytes / GIB:.2f} GiB are too small"
    return "its waits would cost more than it saves"


def in_memory(p: Problem, free: Sequence[int]) -> Plan | None:
    """Return a plan that leaves nothing on disk, where further GPUs have room for what the solver leaves."""
    try:
        made = with_further(p, solved(p), free)
    except OutOfBudget:
        return None
    return None if made.placement.from_disk else made


def _bytes(x: LayerWork, neurons: int) -> int:
    return int(x.sizes.gpu_bytes(np.array(neurons)))


def _step(p: Problem, layer: int, x: LayerPlan) -> int:
    """Return how many neurons of a layer are moved at a time; 0: none."""
    experts, _, width = p.spec.ffn(layer)
    if experts > 1 and x.attention != "gpu" and not x.gpu:
        return 0  # the first GPU does not ask its router
    whole = 0 if x.gpu else width
    return {"any": STEP * experts, "experts": width, "all": whole}.get(divides(p.spec, layer), 0)


def _filled(p: Problem, made: Plan, room: int) -> list[int]:
    """Return the neurons of each layer that a GPU takes: those first that are needed most for their bytes."""
    layers, steps = list(p.layers(p.work())), [_step(p, i, x) for i, x in enumerate(made.layers)]
    added = [0] * len(layers)

    def next_of(i: int) -> tuple[float, int, int] | None:
        """(less the value of a byte, the layer, bytes) of the step after those that are taken."""
        x, begin = layers[i], made.layers[i].gpu + added[i]
        end = min(x.sizes.neurons, begin + steps[i])
        if end == begin:
            return None
        more = _bytes(x, added[i] + end - begin) - _bytes(x, added[i])
        value = float(x.reads.bundles[end] - x.reads.bundles[begin])
        return -value / max(1, more), i, more

    heap = [first for i in range(len(layers)) if (first := next_of(i)) is not None]
    heapq.heapify(heap)
    while heap:
        _, i, nbytes = heapq.heappop(heap)
        if nbytes > room:
            continue  # a layer's next step is as large: it takes no more
        room -= nbytes
        begin = made.layers[i].gpu + added[i]
        added[i] += min(layers[i].sizes.neurons, begin + steps[i]) - begin
        if (following := next_of(i)) is not None:
            heapq.heappush(heap, following)
    return added


def _worthwhile(p: Problem, made: Plan, added: Sequence[int]) -> list[int]:
    """Leave out layers that would take longer: each hand-over costs time. One GPU's speed stands for both."""
    work = p.work()
    v, kept = p.speeds(work), list[int]()
    for i, (x, layer, n) in enumerate(zip(made.layers, p.layers(work), added, strict=True)):
        gpus = np.array([x.gpu, x.gpu + n])
        both = np.full(2, True)
        where = both & (x.attention == "gpu"), both & (x.predictor == "gpu")
        disk = np.array([x.disk, max(0, x.disk - max(0, n - x.ram))])
        times = cost.layer_times(layer, v, work, *where, gpus, disk, both & (x.disk_gates > 0) & (disk > 0))
        before, after = np.sum(times, axis=0)
        before += hands_over_us(v, p.spec.dim, x)
        after += hands_over_us(v, p.spec.dim, _layer(p, i, x, n))
        kept.append(n if after < before else 0)
    return kept


def _moved(p: Problem, made: Plan, device: str, added: Sequence[int], fixed: dict[str, int]) -> Plan:
    """Return the plan with each layer's next neurons on a further GPU."""
    sizes = list(p.layers(p.work()))
    layers = tuple(_layer(p, i, x, n) for i, (x, n) in enumerate(zip(made.layers, added, strict=True)))
    there = {**fixed, "neurons": sum(_bytes(x, n) for x, n in zip(sizes, added, strict=True))}
    nbytes = {tier: dict(parts) for tier, parts in made.bytes.items()}
    for was, now, layer in zip(made.layers, layers, sizes, strict=True):
        before, after = _held(layer, was), _held(layer, now)
        for tier, part in before:
            _add(nbytes[tier], part, after[tier, part] - before[tier, part])
    for part, n in there.items():
        _add(nbytes["gpu"], part, n)
    if not any(x.disk for x in layers):
        nbytes["ram"].pop("disk buffers", None)
    each = zip(made.placement.layers, layers, added, strict=True)
    taken = {name: parts for name, parts in made.placement.bytes.items() if name not in (CPU, DISK)}
    taken |= {device: there} | {
        name: nbytes[tier] for name, tier in ((CPU, "ram"), (DISK, "disk")) if nbytes[tier]
    }
    ranges = (_placed(p, i, x, after, device, n) for i, (x, after, n) in enumerate(each))
    placement = replace(made.placement, layers=tuple(ranges), bytes=taken)
    return replace(made, layers=layers, placement=placement, bytes=nbytes)


def _add(parts: dict[str, int], part: str, nbytes: int) -> None:
    if now := parts.pop(part, 0) + nbytes:
        parts[part] = now


def _held(layer: LayerWork, x: LayerPlan) -> dict[tuple[str, str], int]:
    """(tier, part) -> what RAM and disk hold of a layer's neurons."""
    s, gates_on_disk = layer.sizes, x.disk if x.expert else x.disk_gates
    found = {
        ("ram", "gate rows"): s.gate_bytes(np.array(x.ram + x.disk - gates_on_disk)),
        ("ram", "up and down rows"): s.bundle_bytes(np.array(x.ram)),
        ("ram", "experts' biases"): s.bias_bytes(np.array(x.gpu + x.disk)),
        ("disk", "gate rows"): s.gate_bytes(np.array(gates_on_disk)),
        ("disk", "up and down rows"): s.bundle_bytes(np.array(x.disk)),
    }
    return {where: int(nbytes) for where, nbytes in found.items()}


def _layer(p: Problem, layer: int, x: LayerPlan, n: int) -> LayerPlan:
    if not n:
        return x
    disk, width = x.disk - max(0, n - x.ram), p.spec.ffn(layer).width
    expert = width if divides(p.spec, layer) == "experts" else 0
    gates, ram = min(disk, x.disk_gates), max(0, x.ram - n)
    taken = replace(x, gpu=x.gpu + n, further=x.further + n)
    return replace(taken, ram=ram, disk=disk, disk_gates=gates, expert=expert)


def _placed(
    p: Problem, layer: int, x: LayerPlacement, after: LayerPlan, device: str, n: int
) -> LayerPlacement:
    """Return a layer's ranges with `n` neurons moved from RAM, or disk, to a GPU: `after`."""
    there, rest = [r for r in x.ranges if r.device != CPU], x.rest
    if not n or rest is None:
        return x
    if after.expert:
        on = [*((r.device, len(r.whole or ())) for r in there), (device, n // after.expert)]
        return replace(x, ranges=whole_experts(after, p.ranked(layer), on))
    each = n // max(1, p.spec.ffn(layer).experts)
    left = replace(rest, neurons=rest.neurons - each)
    left = left if after.disk else replace(left, slots=None, gate_slots=None)
    return replace(x, ranges=(*there, NeuronRange(device, each), *([left] if left.neurons else [])))


def _described(p: Problem, made: Plan) -> Plan:
    """Predict it."""
    predicted, buckets = predictions(p, made.layers, made.head, gpu=True)
    notes, share = made.notes, gpu_share(p, made.layers)
    if any(len(x.ranges) > 1 for x in made.placement.layers):
        note = "the speed is that of GPUs that compute one after the other; they do it beside each other"
        notes = (*notes, note)
    return replace(made, predicted=predicted, buckets=buckets, share=share, notes=notes)
