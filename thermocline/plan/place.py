"""Where a model lies: one way in to the three methods (all in RAM; RAM and disk; a GPU beside them).

`plan` and a session ask the same functions, so that what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thermocline.errors import OutOfBudget
from thermocline.machine.tiers import Tiers
from thermocline.model.sizes import ModelSizes
from thermocline.model.spec import ModelSpec
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import Predictors
from thermocline.plan import planner
from thermocline.plan.disk_split import (
    Arrangement,
    Contents,
    arrange,
    arrangement_of,
    beside,
    contexts_for,
    in_part,
    least_bytes,
    left_on_disk,
    others_of,
)
from thermocline.plan.further_gpus import with_further
from thermocline.plan.memory import context_for, fit
from thermocline.plan.placement import CPU, LayerPlacement, NeuronRange, Placement
from thermocline.plan.plan_disk import stored_plan
from thermocline.plan.planner import Layer, Plan, fits_in
from thermocline.plan.problem import Ask, Problem
from thermocline.plan.subject import Subject, contents_of, pack_sizes

MORE = 1.25  # the budget that `alternative` tries


@dataclass(frozen=True)
class Needs:
    """A session's demands on RAM. `limit`: whether the budget is what is "free" or what is "allowed"."""

    sparsity: str
    context: int | None
    max_batch: int
    threads: int
    budget: int | None = None  # bytes; None: nobody knows
    limit: str = "free"
    kv_tokens: int | None = None  # positions of the cache; None: as many full contexts as are cheap


@dataclass(frozen=True)
class Decision:
    """A placement, and what it was made of: `arrangement` needs that once more."""

    placement: Placement
    contents: Contents | None = None  # of RAM, where the disk has neurons
    plan: Plan | None = None  # with what is predicted, where there is a GPU

    @property
    def arrangement(self) -> Arrangement | None:
        """The shares of RAM that the placement gives to neurons; None where none are on disk."""
        if self.contents is None or not self.placement.from_disk:
            return None
        return arrangement_of(beside(self.contents, self.placement), self.placement)


# ---- without a GPU


def without_gpu(pack: Pack, predictors: Predictors | None, needs: Needs) -> Decision:
    """All weights in memory if they fit in the budget, else as `arrange` has it; OutOfBudget.

    A default context is shorter where weights do not fit beside it.
    """
    spec, sizes = pack.spec, pack_sizes(pack, predictors)
    for context in contexts_for(spec, needs.context, needs.budget):
        try:
            found = fit(
                spec, weights_bytes=sizes.weights_bytes, available_bytes=needs.budget, context=context,
                max_batch=needs.max_batch, threads=needs.threads, at_least=needs.kv_tokens, limit=needs.limit
            )  # fmt: skip
            return Decision(in_ram(spec, sizes, needs, context, needs.kv_tokens or found))
        except OutOfBudget as e:
            refused = e
            if needs.budget is None or not spec.sparse:
                raise
    assert needs.budget is not None, "without a limit everything fits"
    contents, kv_tokens = contents_of(pack, predictors, needs.sparsity), needs.kv_tokens or context
    others = _others(spec, needs, context, kv_tokens)
    if least_bytes(contents, others) >= sizes.weights_bytes + sum(others.values()):
        raise refused  # a small model: what reads from disk takes more than its neurons
    a = arrange(contents, needs.budget, others, limit=needs.limit)
    return Decision(in_part(a, context, kv_tokens), contents)


def all_in_ram(pack: Pack, predictors: Predictors | None, needs: Needs) -> Decision:
    """Place all of a pack in RAM, for a caller that made sure that it fits."""
    context = context_for(pack.spec, needs.context)
    return Decision(in_ram(pack.spec, pack_sizes(pack, predictors), needs, context, needs.kv_tokens))


def _others(spec: ModelSpec, needs: Needs, context: int, kv_tokens: int) -> dict[str, int]:
    return others_of(
        spec, context=context, kv_tokens=kv_tokens, max_batch=needs.max_batch, threads=needs.threads
    )


def in_ram(
    spec: ModelSpec, sizes: ModelSizes, needs: Needs, context: int, kv_tokens: int | None = None
) -> Placement:
    """Place all of a model in RAM, whatever is free there."""
    kv_tokens = kv_tokens or context
    others = _others(spec, needs, context, kv_tokens)
    parts = {"embedding": sizes.embed.bytes, "buffers": others["buffers"], "runtime": others["runtime"]}

    def add(part: str, nbytes: int) -> None:
        if nbytes:
            parts[part] = parts.get(part, 0) + nbytes

    for x in sizes.layers:
        every = np.array(x.neurons)
        add("attention", x.attention.bytes)
        add("predictors", x.predictor.bytes)
        add("gate rows", int(x.gate_bytes(every)))
        add("up and down rows", int(x.bundle_bytes(every)))
    add("keys and values", others["keys and values"])
    add("head", sizes.head.bytes)
    predictor = CPU if needs.sparsity == "predict" else None
    layer = LayerPlacement(CPU, predictor, (NeuronRange(CPU, spec.ffn_dim),))
    return Placement((layer,) * spec.n_layers, CPU, context, kv_tokens, {CPU: parts})


# ---- as the planner predicts it


def plan(
    subject: Subject, tiers: Tiers, ask: Ask, *, whole: bool = False, further: Sequence[int] = ()
) -> Plan:
    """Return the fastest placement that fits, as a session loads it, and how fast a token then is.

    Raises OutOfBudget with the smallest change that would fit, UsageError for a format without figures.
    `whole`: also where neurons would have to be left on disk, without a GPU. `further`: bytes that are free
    on GPUs beside the first.
    """
    p = Problem(subject.spec, subject.sizes, subject.hotness, tiers, ask, 1 + len(further))
    tiers.kernel(subject.sizes.format)
    if subject.spec.sparse and tiers.disk is not None and not p.vram and not fits_in(p, disk=False):
        if whole:
            raise OutOfBudget("a shorter context leaves more to the weights")
        return stored_plan(p, subject.contents)
    made = planner.plan(subject.spec, subject.sizes, subject.hotness, tiers, ask, p.gpus)
    divided = subject.spec.sparse and made.placement.from_disk and made.placement.devices
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


def _with_slots(x: Layer, placed: LayerPlacement) -> Layer:
    """Return what `plan` prints of a layer, with the slots that its neurons in RAM have."""
    total, rest = x.gpu + x.ram + x.disk, placed.rest
    if rest is None or rest.slots is None:
        return x
    ram = sum(rest.slots)
    gates = 0 if rest.gate_slots is None else total - x.gpu - sum(rest.gate_slots)
    return replace(x, ram=ram, disk=total - x.gpu - ram, disk_gates=gates)
