"""A session with GPUs: whether they make a token faster, and its weights and ops over them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from thermocline.errors import DeviceFailure, OutOfBudget, Unsupported
from thermocline.machine import disk_speed, this_machine
from thermocline.model.sizes import joined
from thermocline.plan import place
from thermocline.plan.budget import Decision
from thermocline.plan.cost import Speeds
from thermocline.plan.hotness import Curve
from thermocline.plan.memory import GIB, Needs, context_for, reads_from_disk, tried_bytes
from thermocline.plan.problem import Ask, takes_experts
from thermocline.plan.subject import Subject, of_model
from thermocline.session import gpu
from thermocline.session.gpu import OpenGpu

if TYPE_CHECKING:
    from thermocline.machine.hardware import GpuInfo
    from thermocline.machine.tiers import Tiers
    from thermocline.model.modes import CacheTypes
    from thermocline.model.spec import ModelSpec
    from thermocline.pack.stored_model import StoredModel
    from thermocline.plan.planner import Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gpus:
    """A session's GPUs, in the order of their names in a placement."""

    opened: tuple[OpenGpu, ...]
    send_from: int  # tokens of a step for which neurons are sent to a GPU
    tries: bool = False  # whether there is room for predictors that are tried

    def release(self) -> None:
        """Finish what is computed with weights, before they are freed."""
        for one in self.opened:
            one.device.release()

    def close(self) -> None:
        """Close the devices, when nothing uses them any more."""
        for one in self.opened:
            one.device.close()


def chosen(pack: StoredModel, needs: Needs, asked: str, vram: float | None) -> tuple[Decision, Gpus] | None:
    """Return the placement and the GPUs; None where they would not help.

    With "auto", what a GPU cannot hold or compute is the CPU's.
    """
    found, made = tuple[OpenGpu, ...](), None

    def trust(board: GpuInfo, index: int) -> str | None:
        check(pack.spec, needs.types)
        return gpu.untrusted(pack, board, index)

    try:
        found = gpu.find_all(asked, vram, trust)
        if found:
            made = planned(found, pack, needs)
    except (OutOfBudget, Unsupported, DeviceFailure) as e:
        if asked != "auto":
            raise
        log.warning(f"the GPU is not used: {e}")
    finally:
        if made is None:
            for one in found:
                one.device.close()
    if made is not None and len(found) == 1 and (others := found[0].others):
        log.warning(f"one of {others + 1} GPUs is used, the others stay idle; --gpu N says which")
    return made


def check(spec: ModelSpec, types: CacheTypes) -> None:
    if types.quantised:
        raise Unsupported(f"a GPU keeps keys and values as f16, and {types} is asked for; use --gpu off")
    if spec.bidirectional:
        raise Unsupported(f"{spec.architecture}: an encoder has no GPU ops; use --gpu off")
    if spec.embed_dim is not None:
        raise Unsupported(
            f"{spec.architecture}: embeddings of another width than its layers have no GPU ops; use --gpu off"
        )


def planned(found: tuple[OpenGpu, ...], pack: StoredModel, needs: Needs) -> tuple[Decision, Gpus] | None:
    """Return the planner's placement; None where the GPU would not make a token faster.

    Neurons are left on disk where GPU and RAM together are too small. Raises OutOfBudget where that is not
    enough, or where the model has no neurons that could be skipped.
    """
    check(pack.spec, needs.types)
    subject = of_model(pack, needs.sparsity, Curve())
    here = gpu.tiers_of(found[0], subject.sizes.formats, needs.threads)
    try:
        return planned_of(found, subject, here, needs)
    except OutOfBudget as e:
        stored = reads_from_disk(pack.spec, gpu=True)
        if stored == "rows" or (stored == "experts" and not takes_experts(pack.spec)):
            what = "experts" if stored == "experts" else "rows of FFNs"
            raise OutOfBudget(f"{e}; or --gpu off, which leaves {what} on disk") from None
        if not stored:
            raise
        measured = this_machine.disk_tier(disk_speed.measure_file(pack.data_path, threads=needs.threads))
        if measured is None:
            raise
    return planned_of(found, subject, replace(here, disk=measured), needs)


def planned_of(
    found: tuple[OpenGpu, ...], subject: Subject, here: Tiers, needs: Needs
) -> tuple[Decision, Gpus] | None:
    """Do as `planned`, for a model that need not be a pack's, on a machine that is measured already."""
    further = [one.free_bytes for one in found[1:]]
    made = place.plan(subject, here, asked(subject.spec, needs, found[0].free_bytes), further=further)
    if not made.placement.devices:
        full = f"the GPU is not used: {found[0].free_bytes / GIB:.2f} GiB of it may be taken"
        log.warning(next((n for n in made.notes if "the GPU is not used" in n), full))
        return None
    _report(found, made)
    decision = Decision.of_plan(made, subject.contents, subject.routing)
    return decision, Gpus(found, send_from(here, subject), needs.tried > 0)


def asked(spec: ModelSpec, needs: Needs, vram_bytes: int) -> Ask:
    """Return what the planner is asked for a session."""
    return Ask(
        context=context_for(spec, needs.context),
        sparsity=needs.sparsity if spec.sparse else "off",
        vram_bytes=max(0, vram_bytes - tried_bytes(spec, needs)),
        ram_bytes=needs.budget,
        max_batch=needs.max_batch,
        kv_tokens=needs.kv_tokens,
        beside=needs.beside,
        kept=needs.kept,
    )


def _report(found: tuple[OpenGpu, ...], made: Plan) -> None:
    names = ", ".join(one.device.name for one in found)
    on_gpu, most = made.used("gpu") / GIB, sum(one.free_bytes for one in found) / GIB
    log.info(
        f"{names}: {on_gpu:.3g} of {most:.3g} GiB, {made.share:.0%} of the neurons' work; "
        f"{made.placement.ram_bytes / GIB:.3g} GiB of RAM; {made.tokens_per_s:.3g} tok/s predicted"
    )


def send_from(here: Tiers, subject: Subject) -> int:
    """Return how many tokens it takes until a weight is sent faster than the CPU multiplies by it.

    Both were measured. In a mixture only some of the tokens need it.
    """
    assert here.gpu is not None
    share, layers = subject.spec.routed(1), subject.sizes.layers
    reads = joined(r for x in layers for r in (*x.gate.reads, *x.bundle.reads))
    sent_ns = sum(r.bytes for r in reads) / here.gpu.link_gbs
    token_ns = Speeds(here, subject.sizes.format, 1).multiplied_ns(reads)
    return math.ceil(sent_ns / (share * token_ns))
