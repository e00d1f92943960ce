"""`thermocline train`: predictors of active neurons, where they are worth their reading."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import INTERRUPTED, ProgressBar, emit, emit_json
from thermocline.cli.fan_out import check_on_cpu, workers_of
from thermocline.cli.packs import pack_directory
from thermocline.cli.predictor_table import fidelity_rows
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
from thermocline.cli.table import columns, table
from thermocline.errors import UsageError
from thermocline.options import (
    BY_POSITION,
    REQUIRED,
    SEVERAL,
    count_or_all,
    nonempty,
    one_of,
    opt,
    real,
    whole,
)

if TYPE_CHECKING:
    from thermocline.offline.training.samples import LayerSource
    from thermocline.offline.training.train import TrainJob, TrainResult
    from thermocline.offline.training.trial import Texts
    from thermocline.pack.pack import Pack

log = logging.getLogger(__name__)

TRAIN_KINDS = ("auto", "mlp", "svd", "sign")


@dataclass(frozen=True)
class TrainOptions:
    """Make predictors of active neurons from a profiled pack's samples, for --sparsity predict."""

    model: str | None = opt(
        None, str, "PACK", "Model", "The pack, after `thermocline profile`.", flags="-m",
        given=BY_POSITION | REQUIRED
    )  # fmt: skip
    kind: str = opt(
        "auto", one_of(*TRAIN_KINDS), "|".join(TRAIN_KINDS), "Model",
        "mlp: trained, needs PyTorch; svd: the gate at low rank; sign: its signs. auto: for each layer what "
        "reads the fewest bytes, none where that is exact."
    )  # fmt: skip
    max_kld: float = opt(
        0.005,
        real(0),
        "NATS",
        "Fidelity",
        "Mean KL divergence from exact that is allowed, per token, on each text it is measured on.",
    )
    max_ppl: float = opt(
        0.5,
        real(0),
        "PERCENT",
        "Fidelity",
        "Change of perplexity from exact that is allowed over all of them, in percent.",
    )
    text: str | None = opt(
        None, nonempty, "FILE", "Fidelity", "The text (UTF-8) both are measured on; none of the profile's.",
        flags="-f --file",
        shown="what the model itself writes, and five unlike ones: prose, French, an encyclopaedia, code"
    )  # fmt: skip
    ctx: int = opt(
        0, whole(0), "N", "Fidelity", "Tokens of a window of it, the second half of which is scored.",
        flags="-c --ctx-size", shown="0 = 512, or the model's limit"
    )  # fmt: skip
    limit: int = opt(16, whole(1), "N", "Fidelity", "Windows of a text at most.", flags="--chunks")
    corpus: tuple[str, ...] = opt(
        (), nonempty, "FILE", "Fitting",
        "Text files (UTF-8) to fit to, several after one flag, in place of the profile's samples. They are "
        "read in turn, and pass through the model in rounds, each for some layers.",
        shown="the samples of the profile", given=SEVERAL
    )  # fmt: skip
    tokens: int = opt(
        16384, count_or_all, "N", "Fitting",
        "Tokens of --corpus at most; -1 is all. Half of them calibrate what is fitted to the others."
    )  # fmt: skip
    minutes: float = opt(
        30.0, real(0), "M", "Fitting",
        "Of fits and trials. After half of this no wider predictors are trained, after three quarters none; "
        "after all of it the best found so far is taken, once it has read a window of each text."
    )  # fmt: skip
    seed: int = opt(0, whole(0, 2**31), "N", "Fitting", "Equal seeds give equal predictors.", flags="-s")
    ram: float | None = memory_limit(
        "Memory that all of it may take. Of a larger model neurons stay on disk.", "what is free", "Fitting"
    )
    gpu: str = which_gpu("Fitting")
    vram: float | None = gpu_memory("Fitting")
    threads: int = thread_count()
    processes: int | None = process_count("layers' fits")
    ray: str | None = on_ray()
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


def train(o: TrainOptions) -> int:
    """Write nothing where exact reads less and no kind was asked for, nor where fidelity was not reached."""
    from thermocline.offline.training import train as training

    check_on_cpu(o)
    with ProgressBar(quiet=o.quiet) as progress, ExitStack() as stack:
        request = train_request(o)
        source = sample_source(o, request, stack, progress)
        if "mlp" not in request.kinds and o.kind == "auto":
            log.warning("without PyTorch no predictor is trained; pip install 'thermocline[train]'")
        try:
            with workers_of(o) as workers:
                done = training.train(replace(request, across=workers), source, progress.at)
        except KeyboardInterrupt:
            log.info("interrupted: the same command goes on with the layers that are missing")
            return INTERRUPTED
        stack.callback(done.remove)
        return _finished(o, request, done)


def _finished(o: TrainOptions, request: TrainJob, done: TrainResult) -> int:
    """Write the predictors if they are wanted, and say so."""
    from thermocline.pack.predictor import write_stored

    forced, met, pack = o.kind != "auto", done.report["met"], request.pack
    if forced and all(layer["kind"] == "exact" for layer in done.report["layers"]):
        raise UsageError(
            f"{pack.path}: no predictor of kind {o.kind} was done in time; give it more --minutes"
        )
    wanted = met and (done.worthwhile or forced)
    if wanted:
        write_stored(pack, done.predictors, done.report)
    about = {"path": str(pack.path), "written": wanted, **done.report, **done.timing}
    if o.json:
        emit_json(about)
    else:
        emit(table(train_rows(about)) + train_layers(about["layers"], about["fit_s"]))
    far = f"{done.report['kld']['value']:.3g} nats from it on {done.report['worst_text']}"
    if forced and not met:
        raise UsageError(
            f"{pack.path}: no predictor of kind {o.kind} is within --max-kld {o.max_kld:g} and "
            f"--max-ppl {o.max_ppl:g} of exact: {far}; nothing was written; profile text like that too, "
            "allow more, or measure on a --text of your own"
        )
    if not (met and done.worthwhile):
        why = "it reads fewer bytes" if met else f"no predictor is near enough to it ({far})"
        what = "written all the same, as asked" if wanted else "nothing was written"
        log.info(f"--sparsity exact is the better choice for this model: {why}; {what}")
    return 0


def train_request(o: TrainOptions) -> TrainJob:
    """Return the options as a request. A pack that cannot be trained for is refused at once."""
    from thermocline.machine import hardware
    from thermocline.offline import evaluate
    from thermocline.offline.training import fit_mlp
    from thermocline.offline.training import train as training
    from thermocline.pack.pack import Pack

    pack = Pack.open(pack_directory(o.model))
    profile = training.check(pack)
    if o.kind == "mlp":
        fit_mlp.require()
    every = tuple(k for k in training.KINDS if k != "mlp" or fit_mlp.available())
    context = o.ctx or min(512, pack.spec.max_context)
    evaluate.check_context(pack.spec, context)
    return training.TrainJob(
        pack=pack,
        profile=profile,
        kinds=every if o.kind == "auto" else (o.kind,),
        forced=o.kind != "auto",
        max_kld=o.max_kld,
        max_ppl=o.max_ppl,
        seed=o.seed,
        threads=hardware.threads_for(o.threads),
        minutes=o.minutes,
        texts=_to_measure_on(pack, o.text, context, o.limit),
        own=o.text is None,
        context=context,
        limit=o.limit,
        ram=o.ram,
        gpu=o.gpu,
        vram=o.vram,
    )


def sample_source(o: TrainOptions, request: TrainJob, stack: ExitStack, progress: ProgressBar) -> LayerSource:
    """Return the samples that the profile kept, or those of a text that is to pass."""
    from thermocline.offline import corpus
    from thermocline.offline.activity import UNIT
    from thermocline.offline.training.samples import KeptSamples, PassingText, kept_samples

    pack, profile = request.pack, request.profile
    if not o.corpus:
        return KeptSamples(stack.enter_context(kept_samples(pack)), profile)
    context = min(corpus.CONTEXT, pack.spec.max_context)
    text = corpus.read_corpus(pack, o.corpus, o.tokens, context, UNIT)
    return PassingText(pack, profile, text, context, request.threads, o.ram, progress.at, o.gpu, o.vram)


def _to_measure_on(pack: Pack, text: str | None, context: int, limit: int) -> Texts:
    """Return the given text, or the package's mix; none for a pack without a tokenizer."""
    from thermocline.offline import evaluate
    from thermocline.offline.training.trial import mix
    from thermocline.text.tokenizer import FILE, Tokenizer, read_text

    if not (pack.path / FILE).exists():
        if text is None:
            return ()
        raise UsageError(f"{pack.path}: has no tokenizer, so --text cannot be read; leave it out")
    tokenizer = Tokenizer(pack.path, pack.spec)
    if text is None:
        return mix(tokenizer, context, limit)
    return ((Path(text).name, evaluate.windows(tokenizer, read_text(Path(text)), context, limit)),)


def train_rows(r: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of the whole model."""
    samples = f"{r['samples']:,}, seed {r['seed']}, {r['seconds']:.0f} s, {r['tried']} trials"
    where = r["path"] if r["written"] else "nothing written"
    return [("pack", where), ("samples", samples), *fidelity_rows(r), ("", "")]


def train_layers(layers: Sequence[dict[str, Any]], fit_s: Sequence[float]) -> str:
    rows = [
        ("layer", "kind", "rank", "hot", "active", "predicted", "recall", "missed mass", "bytes", "fit s")
    ]
    for x, seconds in zip(layers, fit_s, strict=True):
        shares = (f"{x[k]:.2%}" for k in ("active", "predicted", "recall", "missed_mass"))
        bytes_ = f"{x['bytes'] / x['bytes_exact']:.0%} of gate"
        rows.append(
            (str(x["layer"]), x["kind"], str(x["rank"]), str(x["hot"]), *shares, bytes_, f"{seconds:.1f}")
        )
    return columns(rows, ">")
