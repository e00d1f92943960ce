"""The commands that prepare a pack or judge it: profile, train, eval.

Must not know kernels, tensors or scheduling. What is heavy is imported when a command runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from thermocline.cli import commands, offline_options, report
from thermocline.cli.console import INTERRUPTED, Progress, emit, emit_json, note
from thermocline.errors import UsageError
from thermocline.session import options

if TYPE_CHECKING:
    from thermocline.offline.evaluate import Reader
    from thermocline.offline.profiler import ProfileJob, ProfileResult
    from thermocline.offline.train import TrainJob as TrainRequest
    from thermocline.offline.trial import Texts
    from thermocline.ops.interface import I32
    from thermocline.pack.activity_profile import Samples
    from thermocline.pack.pack import Pack
    from thermocline.pack.predictor import Predictors

T = TypeVar("T")


# ---- profile


def profile(o: offline_options.ProfileOptions) -> int:
    from thermocline.offline import profile_plot, profiler
    from thermocline.pack.activity_profile import summary

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


def _done_keys(done: ProfileResult) -> dict[str, Any]:
    found = {k: v for k, v in vars(done).items() if k != "profile"}
    return {**found, "dropped": list(done.dropped)}


def profile_request(o: offline_options.ProfileOptions) -> ProfileJob:
    """What cannot be profiled is refused before the text is read."""
    from thermocline.llm import BUNDLED
    from thermocline.machine import hardware
    from thermocline.offline import corpus, profiler
    from thermocline.offline.activity import UNIT
    from thermocline.pack.pack import Pack
    from thermocline.pack.writer import check_target
    from thermocline.text import tokenizer

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
    return profiler.ProfileJob(
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
    from thermocline.convert.pack_cache import resolve
    from thermocline.llm import BUNDLED

    path = BUNDLED if model is None else Path(model)
    if (path / "pack.json").exists():
        return path
    if (path / "config.json").exists() or path.suffix == ".gguf":
        raise UsageError(f"{path}: not a pack; make one with `thermocline pack {path} -o DIR`")
    return resolve(path, "", "f32")  # raises: says what it is instead


# ---- eval


def until_interrupted(items: Iterable[T]) -> tuple[list[T], bool]:
    """(what came until Ctrl-C or the end, whether it was Ctrl-C)."""
    found: list[T] = []
    try:
        for item in items:
            found.append(item)
    except KeyboardInterrupt:
        return found, True
    return found, False


@dataclass(frozen=True)
class Side:
    """One of what is compared."""

    pack: Pack
    sparsity: str
    predictors: Predictors | None  # what `predict` needs

    @staticmethod
    def of(pack: Pack, sparsity: str) -> Side:
        from thermocline.pack.predictor import predictors_for

        return Side(pack, sparsity, predictors_for(pack, sparsity))


def evaluate(o: offline_options.EvalOptions) -> int:
    """What is done of it when Ctrl-C comes is printed like the whole."""
    from thermocline.machine import hardware

    threads = o.threads if o.threads > 0 else hardware.default_threads()
    with Progress(quiet=o.quiet) as progress:
        sides = _sides(o, progress)
        texts = _texts(o, sides)
        readers = _readers(sides, o.ctx, threads, progress)
        begin = time.perf_counter()
        bar = partial(progress.at, "evaluating", unit=" windows")
        about, windows, interrupted = _measured(readers, texts, bar)
    if not windows:
        raise KeyboardInterrupt
    facts: dict[str, Any] = {
        "model": str(sides[0].pack.path),
        "format": sides[0].pack.weight_format,
        "sparsity": sides[0].sparsity,
        "text": o.text,
        "context": o.ctx,
        "windows": windows,
    } | about
    if len(sides) == 2:
        facts["against"] |= {"model": str(sides[1].pack.path), "sparsity": sides[1].sparsity}
    seconds = time.perf_counter() - begin
    facts |= {"seconds": seconds, "tokens_per_s": windows * o.ctx / seconds}
    facts |= {"isa": hardware.isa().chosen, "threads": threads}
    if o.json:
        emit_json(facts)
    else:
        emit(report.table(report.evaluation_rows(facts)))
    return INTERRUPTED if interrupted else 0


def _sides(o: offline_options.EvalOptions, progress: Progress) -> list[Side]:
    own = Side.of(_opened(o.model, progress, o.activation), o.sparsity)
    if o.against is None:
        return [own]
    if o.against not in options.SPARSITIES:
        return [own, Side.of(_opened(o.against, progress, None), "exact")]
    if not own.pack.spec.sparse:
        raise UsageError(
            f"{own.pack.path}: its activation ({own.pack.spec.activation}) is never zero, so there is "
            f"nothing to skip and {o.against} is the same model; --against takes another pack"
        )
    if o.against == o.sparsity:
        raise UsageError(f"--sparsity and --against are both {o.against}: nothing to compare")
    return [own, Side.of(own.pack, o.against)]


def _opened(model: str | None, progress: Progress, activation: str | None) -> Pack:
    from thermocline.convert.pack_cache import resolve
    from thermocline.hub.download import locate
    from thermocline.llm import BUNDLED
    from thermocline.pack.pack import Pack

    given = BUNDLED if model is None else locate(model, progress.at)
    packing = partial(progress.at, "packing")
    return Pack.open(resolve(given, commands.cache_dir(None), None, packing, activation=activation))


def _texts(o: offline_options.EvalOptions, sides: Sequence[Side]) -> I32:
    """The windows, which are the same for both sides."""
    import numpy as np

    from thermocline.offline import evaluate
    from thermocline.text.tokenizer import FILE, Tokenizer, read_text

    for side in sides:
        evaluate.check_context(side.pack.spec, o.ctx)
        if not (side.pack.path / FILE).exists():
            raise UsageError(f"{side.pack.path}: has no tokenizer; its text would be noise")
    text = read_text(Path(o.text)).removesuffix("\n")  # as llama-perplexity does
    found = []
    for pack in {side.pack.path: side.pack for side in sides}.values():
        found.append(evaluate.windows(Tokenizer(pack.path, pack.spec), text, o.ctx, o.limit))
    sizes = {side.pack.spec.vocab_size for side in sides}
    if len(sizes) > 1 or not all(np.array_equal(found[0], other) for other in found):
        raise UsageError(
            f"{sides[1].pack.path}: has another tokenizer than {sides[0].pack.path}; "
            "only models with the same tokens can be compared"
        )
    return found[0]


def _readers(sides: Sequence[Side], context: int, threads: int, progress: Progress) -> list[Reader]:
    """Sides of one pack share its weights."""
    from thermocline.engine.decoder import bind, for_context
    from thermocline.machine import hardware
    from thermocline.offline import evaluate
    from thermocline.pack import blocks
    from thermocline.session import weights

    packs = {side.pack.path: side.pack for side in sides}
    predictors = {side.pack.path: side.predictors for side in sides if side.predictors is not None}
    evaluate.check_memory(
        [side.pack.spec for side in sides],
        weights_bytes=sum(blocks.memory_bytes(pack, predictors.get(path)) for path, pack in packs.items()),
        available_bytes=hardware.available_bytes(),
        context=context,
        threads=threads,
    )
    bar = partial(progress.at, "loading")
    loaded = {
        path: weights.load(pack, threads=threads, predictors=predictors.get(path), progress=bar)
        for path, pack in packs.items()
    }
    for one in predictors.values():
        one.close()
    ops = loaded[sides[0].pack.path].ops
    models = {
        path: bind(for_context(packs[path].spec, context), one.weights, ops) for path, one in loaded.items()
    }
    return [
        evaluate.Reader(models[side.pack.path], ops, context=context, sparsity=side.sparsity)
        for side in sides
    ]


def _measured(
    readers: Sequence[Reader], texts: I32, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], int, bool]:
    """(results, windows that they are of, whether Ctrl-C came)."""
    import numpy as np

    from thermocline.offline import evaluate

    if len(readers) == 1:
        scores, interrupted = until_interrupted(evaluate.scores(readers[0], texts, progress))
        about = asdict(evaluate.Perplexity.of(np.concatenate(scores))) if scores else {}
        return about | _active(readers[0]), len(scores), interrupted
    pairs, interrupted = until_interrupted(evaluate.comparisons(readers[0], readers[1], texts, progress))
    if not pairs:
        return {}, 0, interrupted
    found = asdict(evaluate.Divergence.of(evaluate.Comparison.join(pairs)))
    own, base = found.pop("own"), found.pop("base")
    return own | _active(readers[0]) | {"against": base | found}, len(pairs), interrupted


def _active(reader: Reader) -> dict[str, Any]:
    """Null where no neuron is ever inactive; where none is predicted."""
    s, sparse = reader.stats, reader.model.spec.sparse
    return {
        "active_fraction": s.active / max(1, s.neurons) if sparse else None,
        "predicted_fraction": s.predicted / max(1, s.gates_dense) if reader.sparsity == "predict" else None,
    }


# ---- train


def train(o: offline_options.TrainOptions) -> int:
    """Writes nothing where exact reads less and no kind was asked for, nor where fidelity was not reached."""
    from thermocline.offline import train as training
    from thermocline.pack.predictor import write_predictors

    request, samples = train_request(o)
    remark = (lambda text: None) if o.quiet else note
    with Progress(quiet=o.quiet) as progress, samples:
        if "mlp" not in request.kinds and o.kind == "auto":
            remark("without PyTorch no predictor is trained; pip install 'thermocline[train]'")
        done = training.train(request, samples, progress.at)
    forced, met = o.kind != "auto", done.report["met"]
    if forced and all(layer is None for layer in done.layers):
        raise UsageError(
            f"{request.pack.path}: no predictor of kind {o.kind} was done in time; give it more --minutes"
        )
    wanted = met and (done.worthwhile or forced)
    if wanted:
        write_predictors(request.pack, done.layers, done.report)
    about = {"path": str(request.pack.path), "written": wanted, **done.report, **done.timing}
    if o.json:
        emit_json(about)
    else:
        emit(report.table(report.train_rows(about)) + report.train_layers(about["layers"], about["fit_s"]))
    far = f"{done.report['kld']['value']:.3g} nats from it on {done.report['worst_text']}"
    if forced and not met:
        raise UsageError(
            f"{request.pack.path}: no predictor of kind {o.kind} is within --max-kld {o.max_kld:g} and "
            f"--max-ppl {o.max_ppl:g} of exact: {far}; nothing was written; profile text like that too, "
            "allow more, or measure on a --text of your own"
        )
    if not (met and done.worthwhile):
        why = "it reads fewer bytes" if met else f"no predictor is near enough to it ({far})"
        what = "written all the same, as asked" if wanted else "nothing was written"
        remark(f"--sparsity exact is the better choice for this model: {why}; {what}")
    return 0


def train_request(o: offline_options.TrainOptions) -> tuple[TrainRequest, Samples]:
    """What cannot be trained is refused before anything is computed."""
    from thermocline.machine import hardware
    from thermocline.offline import evaluate, fit_mlp
    from thermocline.offline import train as training
    from thermocline.pack.pack import Pack

    pack = Pack.open(pack_directory(o.model))
    samples = training.check(pack)
    if o.kind == "mlp":
        fit_mlp.require()
    every = tuple(k for k in training.KINDS if k != "mlp" or fit_mlp.available())
    context = o.ctx or min(512, pack.spec.max_context)
    evaluate.check_context(pack.spec, context)
    threads = o.threads if o.threads > 0 else hardware.default_threads()
    evaluate.check_memory(
        [pack.spec, pack.spec],
        weights_bytes=pack.weights_bytes,
        available_bytes=hardware.available_bytes(),
        context=context,
        threads=threads,
    )
    request = training.TrainJob(
        pack=pack,
        kinds=every if o.kind == "auto" else (o.kind,),
        forced=o.kind != "auto",
        max_kld=o.max_kld,
        max_ppl=o.max_ppl,
        seed=o.seed,
        threads=threads,
        minutes=o.minutes,
        texts=_to_measure_on(pack, o.text, context, o.limit),
        own=o.text is None,
        context=context,
        limit=o.limit,
    )
    return request, samples


def _to_measure_on(pack: Pack, text: str | None, context: int, limit: int) -> Texts:
    """The given text, or the package's mix; none of a pack without a tokenizer."""
    from thermocline.offline import evaluate
    from thermocline.offline.trial import mix
    from thermocline.text.tokenizer import FILE, Tokenizer, read_text

    if not (pack.path / FILE).exists():
        if text is None:
            return ()
        raise UsageError(f"{pack.path}: has no tokenizer, so --text cannot be read; leave it out")
    tokenizer = Tokenizer(pack.path, pack.spec)
    if text is None:
        return mix(tokenizer, context, limit)
    return ((Path(text).name, evaluate.windows(tokenizer, read_text(Path(text)), context, limit)),)


def prepared(pack: Pack) -> dict[str, Any]:
    """What `profile` and `train` left in a pack, for `inspect`; null where they did not."""
    return {"profile": _profiled(pack), "predictors": _trained(pack)}


def _profiled(pack: Pack) -> dict[str, Any] | None:
    from thermocline.pack.activity_profile import PROFILE, SAMPLES, open_profile, open_samples, summary

    if (found := open_profile(pack)) is None:
        return None
    keys = ("tokens", "corpus", "active_fraction", "hot_share", "never_active")
    about = {key: value for key, value in summary(found).items() if key in keys}
    about |= {"bytes": (pack.path / PROFILE).stat().st_size, "samples": 0, "samples_bytes": 0}
    samples = open_samples(pack)
    if samples is not None:
        with samples:
            about |= {"samples": samples.n, "samples_bytes": (pack.path / SAMPLES).stat().st_size}
    return about


def _trained(pack: Pack) -> dict[str, Any] | None:
    from thermocline.pack.predictor import FILE, open_predictors

    if not (pack.path / FILE).exists():
        return None
    found = open_predictors(pack)
    assert found is not None, "it exists"
    with found:
        layers = {kind: found.kinds.count(kind) for kind in sorted(set(found.kinds))}
        return {"bytes": found.nbytes, "layers_by_kind": layers, **found.report}
