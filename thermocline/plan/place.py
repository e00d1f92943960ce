"""The planner's way in, for `plan` and for sessions with a GPU: a placement, and how fast a token then is.

Without a GPU both place with the functions of `budget.py` and `disk_split.py`: what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import Tiers
from thermocline.ops.interface import CPU
from thermocline.plan import cost, planner
from thermocline.plan.cache_split import Fetch
from thermocline.plan.cost import Work
from thermocline.plan.disk_split import (
    Arrangement,
    Contents,
    arrange,
    beside,
    fetches,
    in_part,
    left_on_disk,
)
from thermocline.plan.further_gpus import with_further
from thermocline.plan.placement import LayerPlacement
from thermocline.plan.planner import BUCKETS, LayerPlan, Plan, Prediction, fits_in, hot_neurons
from thermocline.plan.problem import Ask, Problem, reads_from_disk
from thermocline.plan.solver import Budget
from thermocline.plan.subject import Subject

MORE = 1.25  # the budget that `alternative` tries


def plan(
    subject: Subject, tiers: Tiers, ask: Ask, *, whole: bool = False, further: Sequence[int] = ()
) -> Plan:
    """Return the fastest placement that fits, as a session loads it, and how fast a token then is.

    Raises OutOfBudget with the smallest change that would fit.
    `whole`: also where neurons would have to be left on disk, without a GPU. `further`: bytes that are free
    on GPUs beside the first.
    """
    p = Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask, 1 + len(further))
    if subject.smaller is not None and not p.vram and not fits_in(p, disk=False):
        p = replace(p, sizes=subject.smaller)
    stored = reads_from_disk(subject.spec)
    if stored and tiers.disk is not None and not p.vram and not fits_in(p, disk=False):
        if whole:
            raise OutOfBudget("a shorter context leaves more to the weights")
        return stored_plan(p, subject.contents)
    made = planner.plan(subject.spec, p.sizes, subject.hotness, tiers, ask, p.gpus)
    divided = stored and made.placement.from_disk and made.placement.devices
    if further:
        made = with_further(p, made, further)
    return with_gpu_and_disk(p, subject, made) if divided else made


def alternative(subject: Subject, tiers: Tiers, ask: Ask) -> Plan:
    """Return the plan with `MORE` of both memories."""
    return plan(subject, tiers, larger(Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask)))


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


# ---- memory too small, no GPU: the disk split, and a token's time


def stored_plan(p: Problem, c: Contents) -> Plan:
    """Return the plan of a CPU whose memory is too small. Raises OutOfBudget with a budget that is enough."""
    kv = sum(p.kv_layer_bytes(i) for i in range(p.spec.n_layers))
    runtime = p.fixed_ram(disk=False)["runtime"]
    others = {"keys and values": kv, "buffers": p.scratch, "runtime": runtime}
    a = arrange(c, p.ram, others)
    assert a.bytes <= p.ram, "a plan keeps its budget to the byte"
    predicted = tuple(stored_prediction(p, c, a, p.work(share=share)) for share in (0.0, 0.5, 1.0))
    return Plan(
        layers=tuple(
            _stored_layer(c, p.sizes.layers[i].neurons, *(a.places(shares)[i] for _, shares in a.kinds))
            for i in range(p.spec.n_layers)
        ),
        head="ram",
        bytes={"gpu": {}, "ram": a.parts, "disk": left_on_disk(a)},
        budget=Budget(p.vram, p.ram),
        predicted=predicted,
        buckets=tuple(stored_prediction(p, c, a, p.work(batch=b)) for b in BUCKETS),
        hot={b: tuple(hot_neurons(p, b)) for b in BUCKETS},
        share=0.0,
        objective_us=1e6 / predicted[0].tokens_per_s,
        greedy_us=None,
        notes=tuple(_stored_notes(p, c, a)),
        placement=in_part(a, p.ask.context, p.ask.context * p.ask.batch),
    )


def _stored_layer(c: Contents, neurons: int, bundles: int, gates: int | None = None) -> LayerPlan:
    """Return a layer with slots for so many bundles, and gate rows unless they are all in RAM."""
    predictor = "ram" if c.guesses else None
    return LayerPlan("ram", predictor, 0, bundles, neurons - bundles, 0 if gates is None else neurons - gates)


def _passing(c: Contents, a: Arrangement, batch: int) -> list[list[Fetch]]:
    """Return the reads of each layer for more than a few tokens: all that is not in memory, in order."""
    found: list[list[Fetch]] = [[] for _ in range(c.spec.n_layers)]
    for kind, shares in a.kinds:
        for i, (x, s) in enumerate(zip(c.rows(kind, batch), shares, strict=True)):
            n = x.asked * (len(x.need) - s.places)
            found[i // c.spec.n_experts].append(Fetch(n, 0, n * x.stride))
    return found


def stored_prediction(p: Problem, c: Contents, a: Arrangement, work: Work) -> Prediction:
    """Predict a step of a CPU that reads some neurons from disk."""
    v = p.speeds(work)
    cpu_us = cost.TOKEN_US + float(cost.head_columns(p.sizes, v, gpu=False).cpu_us[0])
    disk_us = 0.0
    few = work.batch * p.spec.routed(1) <= cost.PREDICT_TOKENS  # of an expert
    read = fetches(a, work.batch) if few else _passing(c, a, work.batch)
    for layer, mine in zip(p.layers(work), read, strict=True):
        cpu, disk = cost.stored_times(layer, v, work, mine)
        cpu_us, disk_us = cpu_us + cpu, disk_us + disk
    return Prediction(
        work.depth, work.batch, work.batch * 1e6 / (cpu_us + disk_us), 0.0, cpu_us, disk_us, 0.0
    )


def _stored_notes(p: Problem, c: Contents, a: Arrangement) -> list[str]:
    needed = sum(float(r.need.sum()) for r in c.rows("bundle"))
    gates = sum(float(r.need.sum()) for r in c.rows("gate.weight")) if a.gates else 0.0
    each = [f for layer in fetches(a) for f in layer]
    hits = 1 - sum(f.rows for f in each) / (needed + gates)
    read = sum(f.bytes for f in each)
    notes = [f"hotness: {p.hotness.source}"]
    if assumed := p.tiers.assumed(p.sizes.formats):
        notes.append(assumed)
    notes.append(
        f"of the rows that a token needs {hits:.1%} are expected in memory; {read / 1e6:.3g} MB are read"
    )
    if a.gates is not None:
        notes.append("gate rows too are on disk: fewer bytes are then read for a token")
    if c.spec.n_experts > 1:  # LOG, "A whole Mixtral in 6 to 16 GiB"
        notes.append(
            "a mixture with much of it in memory was measured at as little as half of the speed predicted"
        )
    if not c.hotness.ordered:
        notes.append("neurons are in no order of hotness: `thermocline profile` makes this faster")
    return notes
