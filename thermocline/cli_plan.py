"""`thermocline plan`.

Must not know how a plan is found. What is heavy is imported when the command runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline import config_offline
from thermocline.console import emit, emit_json, note
from thermocline.errors import OutOfBudget

if TYPE_CHECKING:
    from thermocline.plan import Plan
    from thermocline.plan_file import Subject
    from thermocline.problem import Ask, Problem
    from thermocline.tiers import Tiers

GIB = 2**30


def plan(o: config_offline.PlanOptions) -> int:
    from thermocline import plan as planning
    from thermocline import plan_file, report_plan

    subject = plan_subject(o)
    tiers, ask, made = planned(o, subject, plan_tiers(o, subject.sizes.format))
    about = plan_file.plan_json(subject, tiers, ask, made)
    if o.output is not None:
        plan_file.write(Path(o.output), about, overwrite=o.force)
    if o.json:
        emit_json(about)
    else:
        same_way = (subject.spec, subject.sizes, subject.hotness, tiers, ask, stored(subject))
        more = planning.alternative(*same_way)
        same = more.layers == made.layers and more.head == made.head
        emit(report_plan.plan_text(subject.name, tiers.name, made, None if same else more))
    return 0


def planned(o: config_offline.PlanOptions, subject: Subject, tiers: Tiers) -> tuple[Tiers, Ask, Plan]:
    """For the first context to try that leaves nothing on disk, else for the last."""
    from thermocline import plan as planning
    from thermocline.arrange import contexts_for

    ram = tiers.cpu.ram_bytes if o.ram is None else int(o.ram * GIB)
    contexts = contexts_for(subject.spec, o.ctx or None, ram if tiers.gpu is None else None)
    for context in contexts:
        ask, last = ask_of(o, subject, context), context == contexts[-1]
        in_part = stored(subject) if last else nothing
        try:
            return (
                tiers,
                ask,
                planning.plan(subject.spec, subject.sizes, subject.hotness, tiers, ask, in_part),
            )
        except OutOfBudget:
            if last and (tiers.disk is not None or o.hardware is not None):
                raise
    tiers = measured(o, subject, tiers)
    return tiers, ask, planning.plan(subject.spec, subject.sizes, subject.hotness, tiers, ask, in_part)


def nothing(problem: Problem) -> Plan:
    raise OutOfBudget("a shorter context leaves more to the weights")


def ask_of(o: config_offline.PlanOptions, subject: Subject, context: int) -> Ask:
    from thermocline.problem import Ask

    return Ask(
        context=context,
        batch=o.batch,
        sparsity=o.sparsity if subject.spec.sparse else "off",
        objective=o.objective,
        vram_bytes=None if o.vram is None else int(o.vram * GIB),
        ram_bytes=None if o.ram is None else int(o.ram * GIB),
    )


def stored(subject: Subject) -> Callable[[Problem], Plan] | None:
    """Its plan where it is in memory in part; None where that cannot be."""
    from thermocline import plan_disk

    return partial(plan_disk.stored_plan, c=subject.contents) if subject.spec.sparse else None


def plan_subject(o: config_offline.PlanOptions) -> Subject:
    from thermocline import plan_file
    from thermocline.importer import resolve
    from thermocline.llm import BUNDLED

    curve = plan_file.Curve(o.active, o.skew)
    path = BUNDLED if o.model is None else Path(o.model)
    if (path / "pack.json").exists():
        return plan_file.of_pack(resolve(path, "", None, activation=o.activation), o.sparsity, curve)
    share = o.predictor_share if o.sparsity == "predict" else 0.0
    return plan_file.of_shape(str(o.model), o.format, o.sparsity, share, curve, o.activation)


def plan_tiers(o: config_offline.PlanOptions, weight_format: str) -> Tiers:
    from thermocline import machine
    from thermocline.tiers import read_tiers

    if o.hardware is not None:
        return read_tiers(o.hardware)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.3 and not o.quiet:
        note(f"the machine is busy (load {load:.1f}): its speed, measured now, is a lower bound")
    return machine.tiers_here(o.threads, formats=[weight_format])


def measured(o: config_offline.PlanOptions, subject: Subject, tiers: Tiers) -> Tiers:
    """With this machine's disk, which is measured only where memory is too small: that takes seconds."""
    from thermocline import disk, machine

    pack = Path(subject.name)
    found = disk.measure_file(pack / "weights.bin") if pack.is_dir() else disk.measure_disk(Path())
    if not o.quiet:
        why = f"not measured: {found.why}" if found.sequential_gbs is None else "measured"
        note(f"it does not fit in memory; the disk of {found.path} was {why}")
    return replace(tiers, disk=machine.disk_tier(found))
