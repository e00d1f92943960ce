"""The plan of a CPU whose memory has no room for all neurons: the split that `run` loads, and its speed."""

from __future__ import annotations

from thermocline.plan import cost
from thermocline.plan.cost import Work
from thermocline.plan.disk.cache_split import Fetch
from thermocline.plan.disk.disk_split import (
    Arrangement,
    Contents,
    arrange,
    fetches,
    in_part,
    left_on_disk,
)
from thermocline.plan.planner import BUCKETS, LayerPlan, Plan, Prediction, hot_neurons
from thermocline.plan.problem import Problem
from thermocline.plan.solver import Budget


def stored_plan(p: Problem, c: Contents) -> Plan:
    """Return the plan of a CPU whose memory is too small. Raises OutOfBudget with a budget that is enough."""
    a = arrange(c, p.ram, p.others())
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
        placement=in_part(a, p.ask.context, p.ask.positions),
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
