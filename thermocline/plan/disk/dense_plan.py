"""The plan of a dense model that is larger than memory: the split that `run` loads, and its speed."""

from __future__ import annotations

from collections.abc import Mapping

from thermocline.model.tensors import TensorInfo
from thermocline.plan import cost
from thermocline.plan.cost import Work
from thermocline.plan.disk.cache_split import Fetch
from thermocline.plan.disk.chats import chats_note
from thermocline.plan.disk.dense_split import Dense, DenseSplit, divide, least_bytes, placed
from thermocline.plan.planner import BUCKETS, LayerPlan, Plan, Prediction
from thermocline.plan.problem import Problem
from thermocline.plan.solver import Budget

NOTHING = Fetch(0.0, 0.0, 0.0)
STEPS = 4  # after so many steps the window is as full at each layer as a step later


def dense_plan(p: Problem, tensors: Mapping[str, TensorInfo]) -> Plan:
    """Return the plan of a CPU whose memory is too small. Raises OutOfBudget with a budget that is enough."""
    d = Dense(p.spec, tensors, p.tiers.cpu.threads)
    s = divide(d, p.ram, p.others())
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
        notes=(*_notes(p, s), chats_note(p, Problem.others, lambda parts: least_bytes(d, parts))),
        placement=placed(s, p.ask.context, p.ask.positions),
    )


def _layer(p: Problem, s: DenseSplit, i: int) -> LayerPlan:
    width = p.spec.ffn(i).width
    held = s.rows(i)[0] if i in s.held else width
    return LayerPlan("ram", None, 0, held, width - held, width - held)


def waits_us(p: Problem, s: DenseSplit, layers: list[tuple[float, float]], head_us: float) -> float:
    """Return how long a step waits for its rows. `layers`: the times of attention and FFN of each.

    The disk reads all the time but where the window is full: during attention and the head it reads ahead.
    """
    disk = p.tiers.disk
    assert disk is not None
    speed = disk.pieced_gbs * 1e3  # bytes a us; half a record of 1 MiB is one read
    window = float(s.dense.buffers * s.dense.piece_bytes)
    there = waited = 0.0
    for _ in range(STEPS):
        waited = 0.0
        for i, (attention, ffn) in enumerate(layers):
            there = min(window, there + attention * speed)
            needed = s.streamed_bytes(i) if i in s.held else 0
            took = max(ffn, (needed - there) / speed)
            there = min(window, there + took * speed - needed)
            waited += took - ffn
        there = min(window, there + head_us * speed)
    return waited


def prediction(p: Problem, s: DenseSplit, work: Work) -> Prediction:
    """Predict a step of a CPU that reads some rows from disk, once for all its tokens."""
    assert p.tiers.disk is not None
    v = p.speeds(work)
    head_us = cost.TOKEN_US + float(cost.head_columns(p.sizes, v, gpu=False).cpu_us[0])
    layers, arranged = [], p.tiers.disk.arranged_gbs * 1e3 * p.tiers.cpu.threads  # bytes a us
    for i, layer in enumerate(p.layers(work)):
        cpu, _ = cost.stored_times(layer, v, work, [NOTHING])
        attention = cost.attention_us(layer, v)
        arranging = s.streamed_bytes(i) / arranged if i in s.held else 0.0
        layers.append((attention, cpu - attention + arranging))
    cpu_us = head_us + sum(map(sum, layers))
    disk_us = waits_us(p, s, layers, head_us)
    speed = work.batch * 1e6 / (cpu_us + disk_us)
    return Prediction(work.depth, work.batch, speed, 0.0, cpu_us, disk_us, 0.0)


def _notes(p: Problem, s: DenseSplit) -> list[str]:
    nbytes = sum(map(s.streamed_bytes, s.held))
    notes = [
        p.tiers.assumed(p.sizes.formats),
        f"there is room for {s.share:.0%} of the FFNs' rows; a step, however many tokens it has, reads "
        f"{nbytes / 1e6:,.0f} MB",
    ]
    return [n for n in notes if n]
