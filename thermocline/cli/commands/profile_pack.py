"""`thermocline profile`: count active neurons over text, and put a pack in order of hotness."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.commands.routing import profile_routes
from thermocline.cli.console import INTERRUPTED, ProgressBar, emit, emit_json
from thermocline.cli.fan_out import check_on_cpu, is_divided, workers_of
from thermocline.cli.packs import pack_directory
from thermocline.cli.shared_options import (
    gpu_memory,
    json_output,
    memory_limit,
    on_ray,
    process_count,
    quiet_output,
    thread_count,
    which_gpu,
)
from thermocline.cli.table import size, table
from thermocline.errors import UsageError
from thermocline.options import BY_POSITION, SEVERAL, count_or_all, nonempty, opt, switch, whole

if TYPE_CHECKING:
    from thermocline.offline.profiler import ProfileJob, ProfileResult

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileOptions:
    """Count which neurons are active over text, and order the pack by it; of a mixture, count its experts."""

    model: str | None = opt(
        None, str, "PACK|GGUF", "Model",
        "The pack; in its place comes the same in order of hotness. A mixture without ReLU, which may be a "
        "GGUF, stays as it is.",
        flags="-m", shown="the bundled model, which needs -o", given=BY_POSITION
    )  # fmt: skip
    output: str | None = opt(
        None, nonempty, "DIR", "Model", "Pack directory to write.", flags="-o", shown="the pack itself"
    )
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack at -o.")
    ram: float | None = memory_limit(
        "Memory that all of it may take. Of a larger model neurons or experts stay on disk.", "what is free"
    )
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    threads: int = thread_count()
    workers: int = opt(
        1, whole(1, 256), "N", "Model", "Passages computed side by side; they share the threads."
    )
    processes: int | None = process_count("passages")
    ray: str | None = on_ray()

    corpus: tuple[str, ...] = opt(
        (), nonempty, "FILE", "Text", "Text files (UTF-8), several after one flag; they are read in turn.",
        shown="random tokens, for a pack without a tokenizer", given=SEVERAL
    )  # fmt: skip
    tokens: int = opt(65536, count_or_all, "N", "Text", "Tokens to count at most; -1 is all.")
    ctx: int = opt(
        0, whole(0), "N", "Text", "Tokens of a passage, each of which is computed on its own.",
        shown="0 = 512, or the model's limit"
    )  # fmt: skip
    samples: int = opt(
        -1, whole(-1), "N", "Text", "Tokens whose inputs and active neurons are kept for `train`; 0: none.",
        shown="-1 = 16384, at most 2 GiB in all and 64 MiB a passage"
    )  # fmt: skip

    plot: str | None = opt(
        None, nonempty, "FILE", "Output", "Draw the curve and the heat map into a .png, .svg or .pdf.",
        shown="none"
    )  # fmt: skip
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


def profile(o: ProfileOptions) -> int:
    from thermocline.offline import profile_plot, profiler
    from thermocline.offline.routing.after_neurons import neurons_counted
    from thermocline.pack.activity_profile import summary

    if (mixture := profile_routes.mixture_of(o.model)) is not None:
        return profile_routes.profile(o, mixture)
    plot = Path(o.plot) if o.plot is not None else None
    if plot is not None:
        profile_plot.check(plot)
    check_on_cpu(o)
    if o.workers > 1 and is_divided(o):
        raise UsageError(
            f"--workers {o.workers}: is for one process, not beside --processes or --ray; leave it out"
        )
    with ProgressBar(quiet=o.quiet) as progress, ExitStack() as stack:
        request = profile_request(o)
        n, text = request.samples, request.corpus
        nbytes = size(n * profiler.sample_bytes(request.pack.spec))
        log.info(f"{text.tokens:,} tokens of {text.name}; {n:,} samples for training, about {nbytes}")
        if (counted := neurons_counted(request)) is not None:
            log.info("the neurons are counted already: going on with the experts")
        else:
            _check_output(o, request.pack.path)
        request = replace(request, across=stack.enter_context(workers_of(o)))
        try:
            done = counted or profiler.profile(request, progress.at)
            routing = profile_routes.beside_neurons(request, progress)
        except KeyboardInterrupt:
            log.info("interrupted: the same command goes on from here")
            return INTERRUPTED
    if plot is not None:
        profile_plot.draw(done.profile, plot, request.pack.path.name)
    about = {"path": str(request.output), **summary(done.profile), **_done_keys(done)}
    if o.json:
        emit_json(about | {"routing": routing})
    else:
        emit(table(profile_rows(about)))
        if routing is not None:
            emit(table(profile_routes.rows(routing)))
    for name in done.dropped:
        log.warning(
            f"{name} was made for the old order of neurons and is gone: run `thermocline train` again"
        )
    return 0


def _done_keys(done: ProfileResult) -> dict[str, Any]:
    found = {k: v for k, v in vars(done).items() if k != "profile"}
    return {**found, "dropped": list(done.dropped)}


def _check_output(o: ProfileOptions, pack: Path) -> None:
    """Raise UsageError or IOFailure unless the profiled pack may be written."""
    from thermocline.pack.writer import check_target

    if o.output is not None and os.path.realpath(o.output) != os.path.realpath(pack):
        check_target(Path(os.path.realpath(o.output)), o.force)


def profile_request(o: ProfileOptions) -> ProfileJob:
    """Return the options as a request. A pack that cannot be profiled is refused before the text is read."""
    from thermocline.llm import BUNDLED
    from thermocline.machine import hardware
    from thermocline.offline import corpus, profiler
    from thermocline.offline.activity import UNIT
    from thermocline.offline.routing.route_checkpoint import UNFINISHED
    from thermocline.pack.pack import Pack
    from thermocline.text import tokenizer

    path = pack_directory(o.model)
    output = path if o.output is None else Path(o.output)
    if os.path.realpath(output) == os.path.realpath(BUNDLED):
        raise UsageError(
            "the bundled model is part of the program and stays as it is; -o DIR writes a profiled one"
        )
    if not (output / UNFINISHED).exists():  # else what is there may be this profile's
        _check_output(o, path)
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
    samples = profiler.default_samples(pack.spec, len(text.passages)) if o.samples < 0 else o.samples
    threads = hardware.threads_for(o.threads)
    return profiler.ProfileJob(
        pack=pack,
        corpus=text,
        output=output,
        context=context,
        samples=min(samples, text.tokens),
        threads=threads,
        workers=o.workers,
        overwrite=o.force,
        ram=o.ram,
        gpu=o.gpu,
        vram=o.vram,
    )


def profile_rows(about: dict[str, Any]) -> list[tuple[str, str]]:
    layers, hot = about["active_per_layer"], [x for x in about["hot_share_per_layer"] if x is not None]
    batches = ", ".join(f"of {b} {share:.1%}" for b, share in about["needed_by_batch"].items() if b != "1")
    speed = about["tokens_per_s"]
    spread = f"{min(hot):.1%} to {max(hot):.1%} of a layer's"
    rows = [
        ("tokens", f"{about['tokens']:,}" + (f", {speed:,.0f} a second" if speed else "")),
        ("active", f"{about['active_fraction']:.2%} of neurons for a token"),
        ("needed", f"by a batch {batches}"),
        (
            "hot",
            f"{about['hot_share']:.1%} of neurons make 80% of activations ({spread})",
        ),
        *(
            (f"{which} layer", f"{about[f'{which}_layer']}, {layers[about[f'{which}_layer']]:.2%} active")
            for which in ("hottest", "coldest")
        ),
        ("never active", f"{about['never_active']:,} of {about['neurons']:,} neurons"),
        ("samples", f"{about['samples']:,}, {size(about['samples_bytes'])}"),
        ("pack", f"{about['path']}, in order of hotness"),
    ]
    return rows
