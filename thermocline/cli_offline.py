"""The commands that prepare a pack: profile, train, plan, eval.

Must not know kernels, tensors or scheduling. What is heavy is imported when a command runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline import config_offline, report
from thermocline.console import INTERRUPTED, Progress, emit, emit_json, note
from thermocline.errors import UsageError

if TYPE_CHECKING:
    from thermocline.plan_file import Subject
    from thermocline.profiler import Done, Request
    from thermocline.tiers import Tiers


# ---- profile


def profile(o: config_offline.ProfileOptions) -> int:
    from thermocline import profile_plot, profiler
    from thermocline.profile import summary

    plot = Path(o.plot) if o.plot is not None else None
    if plot is not None:
        profile_plot.check(plot)
    remark = (lambda text: None) if o.quiet else note
    with Progress(quiet=o.quiet) as progress:
        request = profile_request(o)
        n, text = request.samples, request.corpus
        size = report.size(n * profiler.sample_bytes(request.pack.spec))
        remark(f"{text.tokens:,} tokens of {text.name}; {n:,} samples for training, about {size}")
        try:
            done = profiler.profile(request, progress.at, remark)
        except KeyboardInterrupt:
            remark("interrupted: the same command goes on from here")
            return INTERRUPTED
    if plot is not None:
        profile_plot.draw(done.profile, plot, request.pack.path.name)
    about = {"path": str(request.output), **summary(done.profile), **_done_keys(done)}
    if o.json:
        emit_json(about)
    else:
        emit(report.table(report.profile_rows(about)))
    for name in done.dropped:
        remark(f"{name} was made for the old order of neurons and is gone: run `thermocline train` again")
    return 0


def _done_keys(done: Done) -> dict[str, Any]:
    found = {k: v for k, v in vars(done).items() if k != "profile"}
    return {**found, "dropped": list(done.dropped)}


def profile_request(o: config_offline.ProfileOptions) -> Request:
    """What cannot be profiled is refused before the text is read."""
    from thermocline import corpus, hardware, profiler, tokenizer
    from thermocline.activity import UNIT
    from thermocline.llm import BUNDLED
    from thermocline.pack import Pack
    from thermocline.pack_writer import check_target

    path = pack_directory(o.model)
    output = path if o.output is None else Path(o.output)
    if os.path.realpath(output) == os.path.realpath(BUNDLED):
        raise UsageError(
            "the bundled model is part of the program and stays as it is; -o DIR writes a profiled one"
        )
    if o.output is not None and os.path.realpath(output) != os.path.realpath(path):
        check_target(Path(os.path.realpath(output)), o.force)
    pack = Pack.open(path)
    profiler.check_sparse(pack.spec)
    limit = pack.spec.max_context
    if o.ctx > limit:
        raise UsageError(f"--ctx {o.ctx}: the model's limit is {limit}")
    context = o.ctx or min(corpus.CONTEXT, limit)
    if o.corpus:
        text = corpus.read_corpus(pack, o.corpus, o.tokens, context, UNIT)
    elif (path / tokenizer.FILE).exists():
        raise UsageError(
            "missing the text to count over: --corpus FILES, such as books or a part of Wikipedia"
        )
    else:
        text = corpus.random_corpus(pack, max(UNIT, o.tokens), context, UNIT)
    samples = profiler.default_samples(pack.spec) if o.samples < 0 else o.samples
    threads = o.threads if o.threads > 0 else hardware.default_threads()
    return profiler.Request(
        pack=pack,
        corpus=text,
        output=output,
        context=context,
        samples=min(samples, text.tokens),
        threads=threads,
        workers=o.workers,
        overwrite=o.force,
    )


def pack_directory(model: str | None) -> Path:
    """A pack named on the command line; what it is instead, and how to make one of it."""
    from thermocline.importer import resolve
    from thermocline.llm import BUNDLED

    path = BUNDLED if model is None else Path(model)
    if (path / "pack.json").exists():
        return path
    if (path / "config.json").exists() or path.suffix == ".gguf":
        raise UsageError(f"{path}: not a pack; make one with `thermocline pack {path} -o DIR`")
    return resolve(path, "", "f32")  # raises: says what it is instead


# ---- plan


def plan(o: config_offline.PlanOptions) -> int:
    from thermocline import plan as planning
    from thermocline import plan_file, report_plan
    from thermocline.llm import GIB, context_for
    from thermocline.problem import Ask

    subject = plan_subject(o)
    tiers = plan_tiers(o, subject.sizes.format)
    ask = Ask(
        context=context_for(subject.spec, o.ctx or None),
        batch=o.batch,
        sparsity=o.sparsity if subject.spec.sparse else "off",
        objective=o.objective,
        vram_bytes=None if o.vram is None else int(o.vram * GIB),
        ram_bytes=None if o.ram is None else int(o.ram * GIB),
    )
    made = planning.plan(subject.spec, subject.sizes, subject.hotness, tiers, ask)
    about = plan_file.plan_json(subject, tiers, ask, made)
    if o.output is not None:
        plan_file.write(Path(o.output), about, overwrite=o.force)
    if o.json:
        emit_json(about)
    else:
        more = planning.alternative(subject.spec, subject.sizes, subject.hotness, tiers, ask)
        same = more.layers == made.layers and more.head == made.head
        emit(report_plan.plan_text(subject.name, tiers.name, made, None if same else more))
    return 0


def plan_subject(o: config_offline.PlanOptions) -> Subject:
    from thermocline import plan_file
    from thermocline.llm import BUNDLED

    curve = plan_file.Curve(o.active, o.skew)
    path = BUNDLED if o.model is None else Path(o.model)
    if (path / "pack.json").exists():
        return plan_file.of_pack(path, o.sparsity, curve)
    share = o.predictor_share if o.sparsity == "predict" else 0.0
    return plan_file.of_shape(str(o.model), o.format, share, curve)


def plan_tiers(o: config_offline.PlanOptions, weight_format: str) -> Tiers:
    from thermocline import machine
    from thermocline.tiers import read_tiers

    if o.hardware is not None:
        return read_tiers(o.hardware)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.3 and not o.quiet:
        note(f"the machine is busy (load {load:.1f}): its speed, measured now, is a lower bound")
    return machine.tiers_here(o.threads, formats=[weight_format])
