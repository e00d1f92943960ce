"""The plan of a mixture whose experts do not all fit in memory: the split that `run` loads, and its speed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from thermocline.model.sizes import ModelSizes
from thermocline.model.tensors import TensorInfo
from thermocline.plan import cost
from thermocline.plan.cost import Work
from thermocline.plan.disk.cache_split import F64, Fetch
from thermocline.plan.disk.chats import chats_note
from thermocline.plan.disk.disk_split import predictors_in_memory
from thermocline.plan.disk.expert_hits import OwnRouting
from thermocline.plan.disk.expert_split import ExpertSplit, Mixture, divide, least_bytes, placed
from thermocline.plan.further_gpus import in_memory, with_further
from thermocline.plan.planner import BUCKETS, LayerPlan, Plan, Prediction, solved, times_us
from thermocline.plan.problem import Problem
from thermocline.plan.solver import Budget

NOTHING = Fetch(0.0, 0.0, 0.0)


def expert_plan(p: Problem, tensors: Mapping[str, TensorInfo], routing: OwnRouting | None = None) -> Plan:
    """Return the plan of a CPU whose memory is too small. Raises OutOfBudget with a budget that is enough."""
    m = Mixture(p.spec, tensors, routing, threads=p.tiers.cpu.threads)
    s = divide(m, p.ram, _others(p))
    assert s.bytes <= p.ram, "a plan keeps its budget to the byte"
    predicted = tuple(prediction(p, s, p.work(share=share)) for share in (0.0, 0.5, 1.0))
    return Plan(
        layers=tuple(_layer(p, s, i) for i in range(p.spec.n_layers)),
        head="ram",
        bytes={"gpu": {}, "ram": s.parts, "disk": s.left_on_disk},
        budget=Budget(p.vram, p.ram),
        predicted=predicted,
        buckets=tuple(prediction(p, s, p.work(batch=b)) for b in BUCKETS),
        hot={b: (0,) * p.spec.n_layers for b in BUCKETS},
        share=0.0,
        objective_us=1e6 / predicted[0].tokens_per_s,
        greedy_us=None,
        notes=(*_notes(p, s), chats_note(p, _others, lambda parts: least_bytes(m, parts))),
        placement=placed(s, p.ask.context, p.ask.positions),
    )


def beside_gpu(
    p: Problem, smaller: ModelSizes, tensors: Mapping[str, TensorInfo], further: Sequence[int] = ()
) -> Plan:
    """Return the plan of a GPU and a CPU whose memories together are too small.

    The solver says what the GPU has, and `with_further` what further ones have. RAM is divided among the
    other experts: as without a GPU, for fewer of them. `smaller`: with tables on disk. Raises OutOfBudget
    with a budget that is enough.
    """
    whole, m = p, Mixture(p.spec, tensors, p.routing, threads=p.tiers.cpu.threads)
    p = replace(p, sizes=smaller, staging=m.buffer_bytes)
    made = solved(p)
    if not made.placement.from_disk:  # it fits, though greedy steps found no way
        return with_further(whole, solved(whole), further)
    if not made.placement.devices:
        without = replace(p, ask=replace(p.ask, vram_bytes=0), routing=None)
        alone = expert_plan(without, tensors, p.routing)
        return replace(alone, notes=(*alone.notes, *(n for n in made.notes if "the GPU is not used" in n)))
    among_all = with_further(p, made, further)
    if among_all.placement.from_disk:
        made = among_all
    elif (found := in_memory(replace(whole, staging=0), further)) is not None:
        return found
    s = divide(m.beside(made.placement), p.ram, _others_beside(p, made))
    assert s.bytes <= p.ram, "a plan keeps its budget to the byte"
    predicted = tuple(_prediction_beside(p, s, made, p.work(share=share)) for share in (0.0, 0.5, 1.0))
    return replace(
        made,
        layers=tuple(_with_slots(x, s.slots.get(i)) for i, x in enumerate(made.layers)),
        bytes={**made.bytes, "ram": s.parts, "disk": s.left_on_disk},
        predicted=predicted,
        buckets=tuple(_prediction_beside(p, s, made, p.work(batch=b)) for b in BUCKETS),
        objective_us=1e6 / predicted[0].tokens_per_s,
        greedy_us=None,
        notes=tuple(dict.fromkeys((*made.notes, *_notes(p, s)))),
        placement=placed(s, p.ask.context, made.placement.kv_tokens, made.placement),
    )


def _others_beside(p: Problem, made: Plan) -> dict[str, int]:
    """Part -> bytes of RAM besides weights and slots, where some layers' attention is on a GPU."""
    on_cpu = [i for i, x in enumerate(made.layers) if x.attention == "ram"]
    parts = {"keys and values": sum(map(p.kv_layer_bytes, on_cpu))}
    parts["recurrent states"] = sum(map(p.state_layer_bytes, on_cpu))
    parts |= {k: n for k, n in p.fixed_ram(disk=False).items() if k != "embedding"}
    return {k: n for k, n in parts.items() if n}


def _with_slots(x: LayerPlan, slots: int | None) -> LayerPlan:
    """Return what `plan` prints of a layer, with the slots that its experts in RAM have."""
    if slots is None or not x.expert:
        return x
    ram, rest = slots * x.expert, x.ram + x.disk
    return replace(x, ram=ram, disk=rest - ram)


def _prediction_beside(p: Problem, s: ExpertSplit, made: Plan, work: Work) -> Prediction:
    """Predict a step of a GPU, of a CPU beside it, and of a disk that this one reads experts from."""
    in_memory = [replace(x, disk=0, disk_gates=0) for x in made.layers]
    v, us = p.speeds(work), times_us(p, in_memory, made.head, work, gpu=True)
    for i, (layer, x) in enumerate(zip(p.layers(work), made.layers, strict=True)):
        if i in s.slots:
            us[2] += wait_us(p, s, i, work, float(cost.ffn_cpu_us(layer, v, work, x.gpu)))
    return Prediction.of(work, us)


def _others(p: Problem) -> dict[str, int]:
    """Part -> bytes of what a session takes besides weights and slots."""
    predictors = sum(x.predictor.bytes for x in p.sizes.layers)
    return p.others() | ({"predictors": predictors_in_memory(p.spec, predictors)} if predictors else {})


def _layer(p: Problem, s: ExpertSplit, i: int) -> LayerPlan:
    n, (experts, _, width) = s.slots.get(i), p.spec.ffn(i)
    if n is None:
        return LayerPlan("ram", None, 0, experts * width, 0, 0)
    return LayerPlan("ram", None, 0, n * width, (experts - n) * width, 0, width)


def miss_chances(p: Problem, s: ExpertSplit, layer: int, work: Work) -> F64:
    """Return how likely a step reads 0, 1, 2 ... of a layer's experts.

    A profile's trace is played; without one each expert is missed on its own account.
    """
    n = round(requests(p, s, layer, work))
    if s.mixture.routing is not None:
        counts = np.bincount(s.mixture.routing.missed(layer, s.slots[layer], work.batch), minlength=n + 1)
        return np.asarray(counts / max(1, counts.sum()))
    share = 1 - s.hits(layer)
    return np.array([math.comb(n, k) * share**k * (1 - share) ** (n - k) for k in range(n + 1)])


def requests(p: Problem, s: ExpertSplit, layer: int, work: Work) -> float:
    """Return how many of the experts that RAM and disk hold a step is expected to need."""
    m = s.mixture
    if m.routing is not None and m.elsewhere.get(layer):
        return float(m.routing.needed(layer, work.batch).sum())
    return work.routed * m.counts[layer]


def wait_us(
    p: Problem, s: ExpertSplit, layer: int, work: Work, ffn_us: float, attention_us: float = 0.0
) -> float:
    """Return by how much a layer is expected to take longer: its reads run beside the experts that are there.

    And beside the CPU's attention, where the router has spoken before it. Some steps miss several and wait,
    where the mean of all would not. What has come is checked and arranged by all threads: beside the disk,
    but for the last half of the buffers, whose pieces may come together.
    """
    disk, n = p.tiers.disk, max(1.0, requests(p, s, layer, work))
    assert disk is not None
    each = s.mixture.records[layer].bytes / (disk.pieced_gbs * 1e3)
    latency = cost.IN_FLIGHT * 1e6 / disk.reads_per_s
    chances = miss_chances(p, s, layer, work)
    k = np.arange(1, len(chances))
    arrange = s.mixture.records[layer].bytes / (disk.arranged_gbs * 1e3 * p.tiers.cpu.threads)
    last = arrange * min(1.0, s.mixture.depth // 2 * s.mixture.piece_bytes / s.mixture.records[layer].bytes)
    before = attention_us if p.spec.router_input == "layer_input" else 0.0
    beside = before + ffn_us * np.maximum(0.0, 1 - k / n)
    longer = np.maximum(k * arrange - last, latency + k * each - beside) + last
    return float(chances[1:] @ longer)


def prediction(p: Problem, s: ExpertSplit, work: Work) -> Prediction:
    """Predict a step of a CPU that reads some experts from disk."""
    v = p.speeds(work)
    cpu_us = cost.TOKEN_US + float(cost.head_columns(p.sizes, v, gpu=False).cpu_us[0])
    disk_us = 0.0
    for i, layer in enumerate(p.layers(work)):
        cpu, _ = cost.stored_times(layer, v, work, [NOTHING])
        cpu_us += cpu
        if i in s.slots:
            attention = cost.attention_us(layer, v)
            disk_us += wait_us(p, s, i, work, cpu - attention, attention)
    speed = work.batch * 1e6 / (cpu_us + disk_us)
    return Prediction(work.depth, work.batch, speed, 0.0, cpu_us, disk_us, 0.0)


def _notes(p: Problem, s: ExpertSplit) -> list[str]:
    work, routing = p.work(batch=1), s.mixture.routing
    found = sum(map(s.hits, s.slots)) / len(s.slots)
    reads = {i: float(c @ np.arange(len(c))) for i in s.slots for c in [miss_chances(p, s, i, work)]}
    nbytes = sum(n * s.mixture.records[i].bytes for i, n in reads.items())
    source = "as in published traces; `thermocline profile` says what is this model's"
    if routing is not None:
        source = f"by its profile of {routing.tokens:,} tokens"
    notes = [p.tiers.assumed(p.sizes.formats)]
    notes.append(
        f"there is room for {s.share:.0%} of the experts; of those that a token goes to {found:.0%} are "
        f"expected in memory, {source}; {nbytes / 1e6:.3g} MB are read"
    )
    return [x for x in notes if x]
