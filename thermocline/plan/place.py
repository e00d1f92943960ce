"""The planner's way in, for `plan` and for sessions with a GPU: a placement, and how fast a token then is.

Without a GPU both place with the functions of `budget.py` and `disk_split.py`: what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import Tiers
from thermocline.ops.interface import CPU
from thermocline.plan import planner
from thermocline.plan.disk.dense_plan import dense_plan
from thermocline.plan.disk.disk_split import (
    arrange,
    beside,
    in_part,
    left_on_disk,
)
from thermocline.plan.disk.expert_plan import beside_gpu, expert_plan
from thermocline.plan.disk.neuron_plan import stored_plan
from thermocline.plan.further_gpus import among
from thermocline.plan.memory import reads_from_disk
from thermocline.plan.planner import LayerPlan, Plan, fits_in
from thermocline.plan.problem import Ask, Problem, takes_experts
from thermocline.plan.subject import Subject

if TYPE_CHECKING:
    from thermocline.plan.placement import LayerPlacement

MORE = 1.25  # the budget that `alternative` tries


def plan(
    subject: Subject, tiers: Tiers, ask: Ask, *, whole: bool = False, further: Sequence[int] = ()
) -> Plan:
    """Return the fastest placement that fits, as a session loads it, and how fast a token then is.

    Raises OutOfBudget with the smallest change that would fit.
    `whole`: also where a part of the FFNs would have to be left on disk, without a GPU. `further`: bytes that
    are free on GPUs beside the first.
    """
    try:
        made = _placed(subject, tiers, ask, whole, further)
    except OutOfBudget as e:
        if _fits_without_gpu(subject, tiers, ask, whole):
            raise OutOfBudget(f"{e} or --gpu off") from None
        raise
    return replace(made, further=tuple(further)) if further else made


def _fits_without_gpu(subject: Subject, tiers: Tiers, ask: Ask, whole: bool) -> bool:
    """Return whether a model that does not fit beside a GPU does without one: then more may be on disk."""
    if tiers.gpu is None or ask.vram_bytes == 0:
        return False
    try:
        _placed(subject, tiers, replace(ask, vram_bytes=0), whole, ())
    except OutOfBudget:
        return False
    return True


def _placed(subject: Subject, tiers: Tiers, ask: Ask, whole: bool, further: Sequence[int]) -> Plan:
    p = Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask, 1 + len(further))
    if p.vram and takes_experts(subject.spec):
        p = replace(p, routing=subject.routing())
    if subject.smaller is not None and not p.vram and not fits_in(p, disk=False):
        p = replace(p, sizes=subject.smaller)
    stored = reads_from_disk(subject.spec, gpu=bool(p.vram))
    if stored is not None and tiers.disk is not None and not p.vram and not fits_in(p, disk=False):
        if whole:
            raise OutOfBudget("a shorter context leaves more to the weights")
        if stored == "rows":
            return dense_plan(p, subject.contents.tensors)
        if stored == "experts":
            return expert_plan(p, subject.contents.tensors, subject.routing())
        return stored_plan(p, subject.contents)
    divisible = stored == "experts" and tiers.disk is not None and takes_experts(subject.spec)
    if divisible and not fits_in(p, disk=False):
        return beside_gpu(p, subject.smaller or p.sizes, subject.contents.tensors, further)
    made = among(p, further) if further else planner.solved(p)
    divided = stored == "neurons" and made.placement.from_disk and made.placement.devices
    return with_gpu_and_disk(p, subject, made) if divided else made


def alternative(subject: Subject, tiers: Tiers, ask: Ask, further: Sequence[int] = ()) -> Plan:
    """Return the plan with `MORE` of each memory."""
    more = larger(Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask))
    return plan(subject, tiers, more, further=[int(n * MORE) for n in further])


def larger(p: Problem) -> Ask:
    return replace(p.ask, vram_bytes=int(p.vram * MORE), ram_bytes=int(p.ram * MORE))


def with_gpu_and_disk(p: Problem, subject: Subject, made: Plan) -> Plan:
    """Divide RAM among the neurons that are not on the GPU: as without one, for fewer neurons."""
    contents = beside(subject.contents, made.placement, subject.predictor_parts())
    others = p.fixed_ram(disk=False)
    others.pop("embedding")  # one row of it
    on_cpu = [i for i, x in enumerate(made.placement.layers) if x.attention == CPU]
    others["keys and values"] = sum(map(p.kv_layer_bytes, on_cpu))
    a = arrange(contents, p.ram, others)
    placement = in_part(a, p.ask.context, made.placement.kv_tokens, made.placement)
    nbytes = {**made.bytes, "ram": a.parts, "disk": left_on_disk(a)}
    layers = tuple(map(_with_slots, made.layers, placement.layers))
    return replace(made, layers=layers, bytes=nbytes, placement=placement)


def _with_slots(x: LayerPlan, placed: LayerPlacement) -> LayerPlan:
    """Return what `plan` prints of a layer, with the slots that its neurons in RAM have."""
    total, rest = x.gpu + x.ram + x.disk, placed.rest
    if rest is None or rest.slots is None:
        return x
    ram = sum(rest.slots)
    gates = 0 if rest.gate_slots is None else total - x.gpu - sum(rest.gate_slots)
    return replace(x, ram=ram, disk=total - x.gpu - ram, disk_gates=gates)
