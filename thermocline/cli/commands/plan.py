"""`thermocline plan`: which neurons belong on the GPU, in RAM and on disk, and how fast a token then is."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thermocline.cli.console import emit, emit_json
from thermocline.cli.shared_options import (
    cache_type_keys,
    cache_type_values,
    json_output,
    memory_limit,
    prompt_cache_directory,
    prompt_cache_memory,
    quiet_output,
    sparsity_mode,
    thread_count,
    which_activation,
)
from thermocline.cli.table import size, table
from thermocline.errors import OutOfBudget, UsageError
from thermocline.model.modes import CacheTypes, PromptCacheLimits
from thermocline.options import BY_POSITION, nonempty, one_of, opt, real, reals, switch, whole
from thermocline.session.options import FORMATS

if TYPE_CHECKING:
    from thermocline.machine.tiers import Tiers
    from thermocline.plan.planner import Plan, Prediction
    from thermocline.plan.problem import Ask
    from thermocline.plan.subject import Subject

log = logging.getLogger(__name__)

GIB = 2**30
TIERS = ("gpu", "ram", "disk")
PARTS = (
    "embedding", "attention", "keys and values", "recurrent states", "prompt cache", "predictors", "neurons",
    "gate rows", "up and down rows", "routers", "experts' biases", "experts", "head", "buffers",
    "disk buffers", "runtime", "the command's own",
)  # fmt: skip


@dataclass(frozen=True)
class PlanOptions:
    """Say which neurons go to the GPU, to RAM and to disk, and how fast a token then is."""

    model: str | None = opt(
        None, str, "PACK|GGUF|SHAPE", "Model",
        "A pack, a GGUF file, a config.json, or a known shape, such as opt-30b (a wrong one lists them all).",
        flags="-m", shown="the bundled model", given=BY_POSITION
    )  # fmt: skip
    format: str = opt("q8_0", one_of(*FORMATS), "|".join(FORMATS), "Model", "Weight format of a shape.")
    activation: str | None = which_activation()
    sparsity: str = sparsity_mode()
    active: float | None = opt(
        None, real(0.001, 0.9), "X", "Model",
        "Mean fraction of neurons active for a token, instead of a profile; makes dense shapes ReLU models.",
        shown="the pack's profile, else 0.1"
    )  # fmt: skip
    skew: float = opt(
        0.26, real(0.001, 0.8), "X", "Model",
        "Without a profile: fraction of a layer's neurons that makes 80% of the activations."
    )  # fmt: skip
    predictor_share: float = opt(
        0.06, real(0, 0.5), "X", "Model",
        "Of a shape, with --sparsity predict: its predictors' size, of the model's."
    )  # fmt: skip

    vram: tuple[float, ...] | None = opt(
        None, reals(0, 1e6), "GIB[,GIB...]", "Budget",
        "Memory of each GPU that may be used. With --hardware, as many numbers as GPUs.",
        shown="all the hardware has; here, what is free there"
    )  # fmt: skip
    ram: float | None = memory_limit(
        "Memory that may be used.", "all the hardware has; here, all that is free", "Budget"
    )
    ctx: int = opt(
        0, whole(0), "N", "Budget", "Context length in tokens, of each sequence of the batch.",
        shown="0 = the model's limit, but at most 4096"
    )  # fmt: skip
    batch: int = opt(1, whole(1, 1024), "N", "Budget", "Sequences that are computed together.")
    cache_type_k: str = cache_type_keys("Budget")
    cache_type_v: str = cache_type_values("Budget")
    prompt_cache: float = prompt_cache_memory("Budget")
    prompt_cache_dir: str | None = prompt_cache_directory("Budget")

    hardware: str | None = opt(
        None, nonempty, "FILE|NAME", "Hardware",
        "What `thermocline doctor -o FILE` wrote, or a known machine (a wrong name lists them all).",
        shown="this machine, measured now"
    )  # fmt: skip
    gpu: str | None = opt(
        None, nonempty, "off|auto|N[,N...]", "Hardware",
        "The GPUs to plan for, by their numbers, as in `run`: of this machine, measured now; with --hardware "
        "as many as are named, all like the one it describes. stand-in: RAM that is treated as a GPU's.",
        flags="--main-gpu", shown="with --hardware its GPU, here off"
    )  # fmt: skip
    threads: int = thread_count("Threads to measure this machine with.", "Hardware")
    objective: str = opt(
        "time", one_of("time", "frequency"), "time|frequency", "Hardware",
        "time: the shortest token; frequency: the most activations on the GPU, as PowerInfer's solver."
    )  # fmt: skip

    output: str | None = opt(
        None, nonempty, "FILE", "Output", "Write the plan as JSON.", flags="-o", shown="none"
    )
    force: bool = opt(False, switch, None, "Output", "Replace an existing file at -o.")
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")

    @property
    def cache(self) -> CacheTypes:
        return CacheTypes(self.cache_type_k, self.cache_type_v)

    @property
    def kept(self) -> PromptCacheLimits:
        return PromptCacheLimits(int(self.prompt_cache * GIB), self.prompt_cache_dir)


def plan(o: PlanOptions) -> int:
    from thermocline.plan import place, plan_file

    subject = plan_subject(o)
    o.cache.check(subject.spec.head_dim, subject.spec.latent is not None)
    machine = described_machine(o) if o.hardware is not None else machine_here(o, subject)
    machine, ask, made = planned(o, subject, machine)
    tiers = machine.tiers
    about = plan_file.plan_json(subject, tiers, ask, made)
    if o.output is not None:
        plan_file.write(Path(o.output), about, overwrite=o.force)
    if o.json:
        emit_json(about)
    else:
        more = place.alternative(subject, tiers, ask, machine.further)
        same = more.layers == made.layers and more.head == made.head
        emit(plan_text(subject.name, tiers.name, made, None if same else more))
    return 0


def planned(o: PlanOptions, subject: Subject, machine: Machine) -> tuple[Machine, Ask, Plan]:
    """Plan for the first context to try that leaves nothing on disk, else for the last."""
    from thermocline.plan import place
    from thermocline.plan.memory import contexts_for

    tiers, further = machine.tiers, machine.further
    ram = tiers.cpu.ram_bytes if o.ram is None else int(o.ram * GIB)
    if o.cache.quantised and tiers.gpu is not None and machine.vram_bytes != 0:
        raise UsageError(
            f"{tiers.name}: a GPU keeps keys and values as f16, and {o.cache} is asked for;"
            " plan with --vram 0"
        )
    on_cpu = tiers.gpu is None or machine.vram_bytes == 0
    contexts = contexts_for(subject.spec, o.ctx or None, ram if on_cpu else None, o.cache)
    for context in contexts:
        ask, last = ask_of(o, subject, context, machine.vram_bytes), context == contexts[-1]
        try:
            return machine, ask, place.plan(subject, tiers, ask, whole=not last, further=further)
        except OutOfBudget:
            if last and (tiers.disk is not None or o.hardware is not None):
                raise
    tiers, notes = measured(o, subject, tiers)
    made = place.plan(subject, tiers, ask, further=further)
    return replace(machine, tiers=tiers), ask, replace(made, notes=(*made.notes, *notes))


def ask_of(o: PlanOptions, subject: Subject, context: int, vram_bytes: int | None) -> Ask:
    from thermocline.plan.problem import Ask

    return Ask(
        context=context,
        batch=o.batch,
        sparsity=o.sparsity if subject.spec.sparse else "off",
        objective=o.objective,
        vram_bytes=vram_bytes,
        ram_bytes=None if o.ram is None else int(o.ram * GIB),
        cache=o.cache,
        kept=o.kept,
    )


def plan_subject(o: PlanOptions) -> Subject:
    from thermocline.convert.from_gguf import is_gguf
    from thermocline.convert.pack_cache import resolve
    from thermocline.llm import BUNDLED
    from thermocline.opening.gguf_model import open_gguf
    from thermocline.plan import subject as subjects
    from thermocline.plan.hotness import Curve

    curve = Curve(o.active, o.skew)
    path = BUNDLED if o.model is None else Path(o.model)
    if (path / "pack.json").exists():
        return subjects.of_pack(resolve(path, "", None, activation=o.activation), o.sparsity, curve)
    if is_gguf(path):
        found = open_gguf(path, o.activation)
        if isinstance(found, str):
            raise UsageError(
                f"{path}: {found}: make a pack of it with `thermocline pack {path} -o DIR`, and plan DIR"
            )
        return subjects.of_model(found, o.sparsity, curve)
    share = o.predictor_share if o.sparsity == "predict" else 0.0
    return subjects.of_shape(str(o.model), o.format, o.sparsity, share, curve, o.activation)


@dataclass(frozen=True)
class Machine:
    """A machine to plan for. `vram_bytes`: of its first GPU, None is all; `further`: of those beside it."""

    tiers: Tiers
    vram_bytes: int | None
    further: tuple[int, ...] = ()


def described_machine(o: PlanOptions) -> Machine:
    """Return a hardware file's machine, with as many of its GPU as are named or have a limit."""
    from thermocline.machine.tiers import read_tiers

    assert o.hardware is not None
    tiers, limits = read_tiers(o.hardware), o.vram or ()
    names = [str(i) for i in range(max(1, len(limits)))] if o.gpu in (None, "auto") else o.gpu.split(",")
    if o.gpu == "off":
        if len(limits) > 1:
            raise UsageError("--gpu off with --vram for several GPUs; leave one of them out")
        return Machine(replace(tiers, gpu=None), None)
    if not all(map(str.isdigit, names)) or len(set(names)) < len(names):
        raise UsageError(
            f"--gpu {o.gpu} with --hardware: name GPUs by their numbers, each once, as in 0,1; or off"
        )
    if tiers.gpu is None:
        if o.gpu not in (None, "auto") or len(names) > 1:
            raise UsageError(f"{tiers.name} has no GPU to plan for; leave --gpu and --vram out")
        return Machine(tiers, None)
    vram = [None if x is None else int(x * GIB) for x in _limits(o, len(names))]
    return Machine(tiers, vram[0], tuple(tiers.gpu.vram_bytes if n is None else n for n in vram[1:]))


def _limits(o: PlanOptions, gpus: int) -> list[float | None]:
    """Return the limit of each GPU; one number is that of all, as in `run`."""
    if gpus > 1 and o.objective == "frequency":
        raise UsageError("--objective frequency is PowerInfer's, which knows one GPU; name one")
    if o.vram is None or len(o.vram) == 1:
        return [None if o.vram is None else o.vram[0]] * gpus
    if len(o.vram) != gpus:
        several = "GPU is" if gpus == 1 else "GPUs are"
        raise UsageError(
            f"--vram has {len(o.vram)} numbers and {gpus} {several} named; give one, or one for each GPU"
        )
    if not o.vram[0]:
        raise UsageError("--vram 0 of the first GPU, which has attention and the head: leave it out of --gpu")
    return list(o.vram)


def machine_here(o: PlanOptions, subject: Subject) -> Machine:
    """Measure this machine, with the GPUs that are named; with "auto", as in `run`, with one it can use."""
    from thermocline.machine import this_machine
    from thermocline.session import gpu, gpu_tier

    asked, formats, found = o.gpu or "off", subject.sizes.formats, tuple[gpu.OpenGpu, ...]()
    if asked == "off" and len(o.vram or ()) > 1:
        raise UsageError(
            "--vram for several GPUs: name them with --gpu 0,1, or describe them with --hardware"
        )
    limits = _limits(o, len(asked.split(",")))
    try:
        found = gpu.find_all(asked, None if None in limits else max(filter(None, limits), default=0.0))
        if found:
            gpu_tier.check(subject.spec, o.cache)
        _say_if_busy()
        if not found:
            return Machine(this_machine.tiers_here(o.threads, formats=formats), None)
        free = [
            one.free_bytes if x is None else min(one.free_bytes, int(x * GIB))
            for one, x in zip(found, limits, strict=True)
        ]
        first = replace(found[0], free_bytes=free[0])
        return Machine(gpu.tiers_of(first, formats, o.threads), free[0], tuple(free[1:]))
    finally:
        for one in found:
            one.device.close()


def _say_if_busy() -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.3:
        log.warning(f"the machine is busy (load {load:.1f}): its speed, measured now, is a lower bound")


def measured(o: PlanOptions, subject: Subject, tiers: Tiers) -> tuple[Tiers, list[str]]:
    """Add this machine's disk, which is measured only where memory is too small: that takes seconds.

    The notes say what to know about its speed.
    """
    from thermocline.machine import disk_speed, this_machine

    model, threads = Path(subject.name), tiers.cpu.threads
    files = [file for file in (model / "weights.bin", model) if file.is_file()]
    if files:
        found = disk_speed.measure_file(files[0], threads=threads)
    else:
        found = disk_speed.measure_disk(Path(), threads=threads)
    why = f"not measured: {found.why}" if found.sequential_gbs is None else "measured"
    log.info(f"it does not fit in memory; the disk of {found.path} was {why}")
    return replace(tiers, disk=this_machine.disk_tier(found)), [found.why] if found.why else []


def plan_text(model: str, hardware: str, plan: Plan, more: Plan | None) -> str:
    facts = [("model", model), ("hardware", hardware)]
    speed = [("speed", _speed(plan)), ("time", _spent(plan.predicted[0]))]
    speed += [("batch", _batches(plan))]
    if any(plan.hot[1]):
        speed.append(("hot", _hot(plan)))
    speed.append(("with 25 % more", _more(plan, more)))
    notes = [("note" if i == 0 else "", line) for i, line in enumerate(plan.notes)]
    layers = [("layers" if i == 0 else "", line) for i, line in enumerate(_layers(plan))]
    return f"{table(facts)}\n{_byte_table(plan)}\n{table([*layers, *speed, *notes])}"


def _byte_table(plan: Plan) -> str:
    columns: dict[str, Mapping[str, int]] = {t: plan.bytes[t] for t in TIERS if t == "ram" or plan.bytes[t]}
    limits = {"gpu": plan.budget.vram_bytes, "ram": plan.budget.ram_bytes, **plan.allowed}
    if plan.further and "gpu" in columns:  # a column for each
        del columns["gpu"]
        columns = {device: plan.placement.bytes.get(device, {}) for device in plan.allowed} | columns
    rows = [["", *(name.upper() for name in columns)]]
    known = dict.fromkeys([*PARTS, *(part for held in columns.values() for part in held)])
    for part in known:
        if any(part in held for held in columns.values()):
            rows.append([part, *(size(held[part]) if part in held else "-" for held in columns.values())])
    rows.append(["together", *(size(sum(held.values())) for held in columns.values())])
    rows.append(["allowed", *(size(limits[name]) if name in limits else "" for name in columns)])
    first = max(len(row[0]) for row in rows)
    return "".join(
        f"{row[0]:<{first}}" + "".join(f"{x:>13}" for x in row[1:]).rstrip() + "\n" for row in rows
    )


def _layers(plan: Plan) -> list[str]:
    """Return like layers as one line: `0-17  attention gpu · 4096 neurons gpu, 6912 ram`."""
    lines, first, on = [], 0, [_neurons(plan, i) for i in range(len(plan.layers))]
    for i, layer in enumerate(plan.layers):
        if i + 1 < len(plan.layers) and (plan.layers[i + 1], on[i + 1]) == (layer, on[i]):
            continue
        each = layer.expert or 1
        counts = (f"{n // each} {tier}" for tier, n in on[i].items() if n)
        neurons = ", ".join(counts) + " (gate rows too)" * (layer.disk_gates > 0)
        predictor = f" · predictor {layer.predictor}" if layer.predictor is not None else ""
        which, what = f"{first}-{i}" if i > first else f"{i}", "experts" if layer.expert else "neurons"
        lines.append(f"{which:<6} attention {layer.attention}{predictor} · {what} {neurons}")
        first = i + 1
    if len(lines) <= 8:
        return [*lines, f"head {plan.head}"]
    where = Counter(layer.attention for layer in plan.layers)
    attention = ", ".join(f"{n} {t}" for t, n in sorted(where.items()))
    if any(layer.expert for layer in plan.layers):
        return [
            f"attention {attention} · head {plan.head}",
            f"experts of a layer: {_experts(plan)} (each: --json)",
        ]
    each_tier = ((tier, [x[tier] for x in on]) for tier in on[0] if tier != "ram")
    neurons = ", ".join(f"{min(n)} to {max(n)} {tier}" for tier, n in each_tier)
    return [
        f"attention {attention} · head {plan.head}",
        f"neurons of a layer: {neurons}{_with_gates(plan)} (each: --json)",
    ]


def _neurons(plan: Plan, layer: int) -> dict[str, int]:
    """Return how many of a layer's neurons each tier has; of several GPUs, each of them."""
    x = plan.layers[layer]
    on_gpus = {device: plan.neurons(layer, device) for device in plan.allowed} if plan.further else {}
    return (on_gpus or {"gpu": x.gpu}) | {"ram": x.ram, "disk": x.disk}


def _experts(plan: Plan) -> str:
    """Return how many experts of a layer are where: `30 to 34 gpu, 20 ram, the others disk`."""
    whole = [(x.expert, _neurons(plan, i)) for i, x in enumerate(plan.layers) if x.expert]
    said = list[str]()
    for tier in whole[0][1]:
        n = [on[tier] // expert for expert, on in whole]
        if max(n) and tier != "disk":
            said.append(f"{min(n)} to {max(n)} {tier}" if min(n) < max(n) else f"{min(n)} {tier}")
    return ", ".join([*said, *(["the others disk"] if any(on["disk"] for _, on in whole) else [])])


def _with_gates(plan: Plan) -> str:
    layers = sum(layer.disk_gates > 0 for layer in plan.layers)
    return f", with their gate rows in {layers} layers" if layers else ""


def _speed(plan: Plan) -> str:
    start, half, full = plan.predicted
    share = (
        f", {plan.share:.0%} of the neurons' work on the GPU{'s' * bool(plan.further)}" if plan.share else ""
    )
    return (
        f"{start.tokens_per_s:.3g} tok/s, bound by the {start.bound}{share} "
        f"({half.tokens_per_s:.3g} after {half.depth} tokens, {full.tokens_per_s:.3g} after {full.depth})"
    )


def _spent(p: Prediction) -> str:
    times = (("GPU", p.gpu_us), ("CPU", p.cpu_us), ("disk", p.disk_us), ("sync", p.sync_us))
    total = sum(us for _, us in times)
    return (
        " + ".join(f"{name} {us / 1e3:.3g}" for name, us in times if us) + f" = {total / 1e3:.3g} ms a step"
    )


def _batches(plan: Plan) -> str:
    return ", ".join(f"of {p.batch} {p.tokens_per_s:.3g} tok/s" for p in plan.buckets)


def _hot(plan: Plan) -> str:
    neurons = sum(layer.gpu + layer.ram + layer.disk for layer in plan.layers)
    shares = (f"{sum(counts) / neurons:.1%} in a batch of {batch}" for batch, counts in plan.hot.items())
    return f"neurons not worth asking a predictor about: {', '.join(shares)}"


def _more(plan: Plan, more: Plan | None) -> str:
    if more is None:
        return "nothing changes: the budget is not what bounds it"
    was, now = plan.predicted[1].tokens_per_s, more.predicted[1].tokens_per_s
    vram = f"{size(sum(more.allowed.values()))} of VRAM, " if more.budget.vram_bytes else ""
    change = f"{now / was - 1:+.0%}" if abs(now / was - 1) >= 0.005 else "no faster"
    return f"{vram}{size(more.budget.ram_bytes)} of RAM: {more.tokens_per_s:.3g} tok/s ({change})"
