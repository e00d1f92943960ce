"""`thermocline plan`.

Must not know how a plan is found. What is heavy is imported when the command runs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
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

SPARE_BYTES = 1 << 30  # with so much beside its weights a model needs no disk, and none is measured


def plan(o: config_offline.PlanOptions) -> int:
    from thermocline import plan as planning
    from thermocline import plan_disk, plan_file, report_plan
    from thermocline.arrange import contexts_for, on_disk
    from thermocline.memory import GIB
    from thermocline.problem import Ask

    subject = plan_subject(o)
    tiers = plan_tiers(o, subject)
    stored = partial(plan_disk.stored_plan, c=subject.contents) if on_disk(subject.spec) else None
    ram = tiers.cpu.ram_bytes if o.ram is None else int(o.ram * GIB)
    asks = [
        Ask(
            context=context,
            batch=o.batch,
            sparsity=o.sparsity if subject.spec.sparse else "off",
            objective=o.objective,
            vram_bytes=None if o.vram is None else int(o.vram * GIB),
            ram_bytes=None if o.ram is None else int(o.ram * GIB),
        )
        for context in contexts_for(subject.spec, o.ctx or None, None if tiers.gpu is not None else ram)
    ]
    made, ask = planned(subject, tiers, asks, stored)
    about = plan_file.plan_json(subject, tiers, ask, made)
    if o.output is not None:
        plan_file.write(Path(o.output), about, overwrite=o.force)
    if o.json:
        emit_json(about)
    else:
        more = planning.alternative(subject.spec, subject.sizes, subject.hotness, tiers, ask, stored)
        same = more.layers == made.layers and more.head == made.head
        emit(report_plan.plan_text(subject.name, tiers.name, made, None if same else more))
    return 0


def planned(
    subject: Subject, tiers: Tiers, asks: Sequence[Ask], stored: Callable[[Problem], Plan] | None
) -> tuple[Plan, Ask]:
    """For the first ask that leaves nothing on disk, else for the last."""
    from thermocline import plan as planning

    for ask in asks[:-1]:
        with contextlib.suppress(OutOfBudget):
            made = planning.plan(subject.spec, subject.sizes, subject.hotness, tiers, ask, stored)
            if not made.bytes["disk"]:
                return made, ask
    last = asks[-1]
    return planning.plan(subject.spec, subject.sizes, subject.hotness, tiers, last, stored), last


def plan_subject(o: config_offline.PlanOptions) -> Subject:
    from thermocline import plan_file
    from thermocline.llm import BUNDLED

    curve = plan_file.Curve(o.active, o.skew)
    path = BUNDLED if o.model is None else Path(o.model)
    if (path / "pack.json").exists():
        return plan_file.of_pack(path, o.sparsity, curve)
    share = o.predictor_share if o.sparsity == "predict" else 0.0
    return plan_file.of_shape(str(o.model), o.format, o.sparsity, share, curve)


def plan_tiers(o: config_offline.PlanOptions, subject: Subject) -> Tiers:
    from thermocline import hardware, machine
    from thermocline.disk import measure_file
    from thermocline.memory import GIB
    from thermocline.tiers import read_tiers

    if o.hardware is not None:
        return read_tiers(o.hardware)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.3 and not o.quiet:
        note(f"the machine is busy (load {load:.1f}): its speed, measured now, is a lower bound")
    disk, allowed = None, hardware.available_bytes() if o.ram is None else int(o.ram * GIB)
    weights = Path(o.model or "") / "weights.bin"
    if allowed is not None and subject.sizes.weights_bytes + SPARE_BYTES > allowed and weights.exists():
        disk = measure_file(weights)
    return machine.tiers_here(o.threads, disk=disk, formats=[subject.sizes.format])
