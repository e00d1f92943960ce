"""`thermocline profile` of a mixture: how often its experts are chosen, and what a cache of them finds."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import INTERRUPTED, ProgressBar, emit, emit_json
from thermocline.cli.fan_out import check_on_cpu, workers_of
from thermocline.cli.table import table
from thermocline.errors import UsageError

if TYPE_CHECKING:
    from thermocline.cli.commands.profile_pack import ProfileOptions
    from thermocline.offline.profiler import ProfileJob
    from thermocline.offline.routing.route_profiler import RouteJob, RoutesCounted
    from thermocline.pack.stored_model import StoredModel

log = logging.getLogger(__name__)

HELD = (0.1, 0.2, 0.4)  # shares of a layer's experts


def mixture_of(model: str | None) -> StoredModel | None:
    """Open what a name means, if it is a mixture whose experts are counted, and not its neurons."""
    from thermocline.convert.from_gguf import is_gguf
    from thermocline.opening.gguf_model import open_gguf
    from thermocline.pack.pack import Pack

    found: StoredModel | str | None = None
    if model is not None and (Path(model) / "pack.json").exists():
        found = Pack.open(model)
    elif model is not None and is_gguf(Path(model)):
        found = open_gguf(Path(model))
    if found is None or isinstance(found, str):
        return None
    return found if _of_experts(found) and not found.spec.sparse else None


def _of_experts(model: StoredModel) -> bool:
    """Return whether whole experts of it can be on disk."""
    from thermocline.plan.memory import reads_from_disk

    return reads_from_disk(model.spec) == "experts"


def profile(o: ProfileOptions, model: StoredModel) -> int:
    for flag, given in (
        ("-o", o.output), ("--samples", o.samples > 0), ("--plot", o.plot), ("--workers", o.workers > 1),
        ("--force", o.force),
    ):  # fmt: skip
        if given:
            raise UsageError(
                f"{flag}: not of a mixture, whose experts are counted and which stays as it is; leave it out "
                "(`thermocline trace` draws)"
            )
    check_on_cpu(o)
    job = _job(o, model)
    with ProgressBar(quiet=o.quiet) as progress, workers_of(o) as workers:
        try:
            about = _counted(dataclasses.replace(job, across=workers), progress)
        except KeyboardInterrupt:
            log.info("interrupted: the same command goes on from here")
            return INTERRUPTED
    if o.json:
        emit_json(about)
    else:
        emit(table(rows(about)))
    return 0


def beside_neurons(job: ProfileJob, progress: ProgressBar) -> dict[str, Any] | None:
    """Count the experts of a pack whose neurons were counted, over the same text.

    None where no expert is ever on disk whole.
    """
    from thermocline.offline.routing.route_checkpoint import RouteCheckpoint
    from thermocline.offline.routing.route_profiler import RouteJob
    from thermocline.pack.pack import Pack
    from thermocline.session.options import EngineOptions

    pack = Pack.open(job.output)
    if not _of_experts(pack):
        return None
    options = EngineOptions(
        context=job.context, max_batch=1, threads=job.threads, ram=job.ram, gpu=job.gpu, vram=job.vram
    )
    RouteCheckpoint(pack, job.corpus, job.context).begin()  # from here on the neurons are not counted again
    return _counted(RouteJob(pack, job.corpus, options, job.across), progress)


def _counted(job: RouteJob, progress: ProgressBar) -> dict[str, Any]:
    from thermocline.offline.routing import route_profiler
    from thermocline.pack.route_profile import path_of

    route_profiler.check_target(job.model)
    done = route_profiler.profile_routes(job, progress.at)
    return _about(done) | {"path": str(path_of(job.model))}


def _job(o: ProfileOptions, model: StoredModel) -> RouteJob:
    from thermocline.machine import hardware
    from thermocline.offline import corpus
    from thermocline.offline.routing.route_profiler import RouteJob
    from thermocline.session.options import EngineOptions
    from thermocline.text.tokenizer import FILE

    limit = model.spec.max_context
    if o.ctx > limit:
        raise UsageError(f"--ctx {o.ctx}: the model's limit is {limit}")
    context = o.ctx or min(corpus.CONTEXT, limit)
    if o.corpus:
        text = corpus.read_corpus(model, o.corpus, o.tokens, context, 1)
    elif model.small_files.has(FILE):
        raise UsageError(
            "missing the text to count over: --corpus FILES, such as books, or what you will ask"
        )
    else:
        text = corpus.random_corpus(model, max(2, o.tokens), context, 1)
    threads = hardware.threads_for(o.threads)
    options = EngineOptions(context=context, max_batch=1, threads=threads, ram=o.ram, gpu=o.gpu, vram=o.vram)
    return RouteJob(model, text, options)


def _about(done: RoutesCounted) -> dict[str, Any]:
    import numpy as np

    from thermocline.plan.disk.expert_hits import OwnRouting

    p = done.profile
    own = OwnRouting.of(p)
    held = {f"{share:.0%}": max(1, round(share * own.experts)) for share in HELD}
    hottest = [np.cumsum(-np.sort(-c)) / c.sum() for c in p.counts.values()]
    return {
        "tokens": p.tokens,
        "corpus": p.corpus,
        "traced": p.traced_tokens,
        "layers": len(p.counts),
        "experts": own.experts,
        "active": own.active,
        "never_chosen": int(sum(np.count_nonzero(c == 0) for c in p.counts.values())),
        "skew": {name: float(np.mean([h[n - 1] for h in hottest])) for name, n in held.items()},
        "found": {name: float(np.mean([own.found(i, n) for i in p.counts])) for name, n in held.items()},
        **{f.name: getattr(done, f.name) for f in dataclasses.fields(done) if f.name != "profile"},
    }


def rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    def said(values: dict[str, float]) -> str:
        return "  ".join(f"{name} {v:.3f}" for name, v in values.items())

    total = about["layers"] * about["experts"]
    speed = about["tokens_per_s"]
    fast = f", {speed:,.0f} a second" if speed else ""
    return [
        ("tokens", f"{about['tokens']:,}{fast}; {about['traced']:,} traced"),
        ("experts", f"{about['active']} of {about['experts']} in each of {about['layers']} layers"),
        ("never chosen", f"{about['never_chosen']:,} of {total:,}"),
        ("skew", f"{said(about['skew'])}  of choices on the hottest"),
        ("found", f"{said(about['found'])}  in memory, if so many experts are held"),
        ("profile", str(about["path"])),
    ]
