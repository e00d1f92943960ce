"""`thermocline eval`: the perplexity of a text, and the divergence from another model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from thermocline.cli.console import INTERRUPTED, ProgressBar, emit, emit_json
from thermocline.cli.fan_out import is_divided, workers_of
from thermocline.cli.packs import find_model
from thermocline.cli.shared_options import (
    HUB_HELP,
    bounded_reads,
    cache_type_keys,
    cache_type_values,
    gpu_memory,
    json_output,
    on_ray,
    process_count,
    quiet_output,
    ram_limit,
    sparsity_mode,
    thread_count,
    which_activation,
    which_gpu,
)
from thermocline.cli.table import percent, table
from thermocline.errors import BadFile, UsageError
from thermocline.model.modes import PLAIN, CacheTypes
from thermocline.options import BY_POSITION, REQUIRED, nonempty, opt, whole
from thermocline.session.options import SPARSITIES

if TYPE_CHECKING:
    from thermocline.cluster.shards import Workers
    from thermocline.offline.evaluate import F64, Comparison, Reader
    from thermocline.ops.interface import I32, FFNStats
    from thermocline.pack.stored_model import StoredModel
    from thermocline.session.session import Session

    Scored = F64 | Comparison  # of one window: of one model's tokens, or of two models'

T = TypeVar("T")
SHARD_TOKENS = 4096  # of a shard at most


@dataclass(frozen=True)
class EvalOptions:
    """Measure how well a model predicts a text: its perplexity; and how far it is from another."""

    model: str | None = opt(
        None, str, "PATH", "Model",
        HUB_HELP,
        flags="-m", shown="the bundled model", given=BY_POSITION
    )  # fmt: skip
    activation: str | None = which_activation()
    sparsity: str = sparsity_mode()
    ram: float | None = ram_limit()
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    threads: int = thread_count()
    processes: int | None = process_count("windows")
    ray: str | None = on_ray()
    cache_type_k: str = cache_type_keys()
    cache_type_v: str = cache_type_values()

    text: str = opt(
        "", nonempty, "FILE", "Text", "The text to predict, UTF-8, such as WikiText-2's raw test split.",
        flags="-f --file", given=REQUIRED
    )  # fmt: skip
    ctx: int = opt(
        512, whole(4), "N", "Text",
        "Tokens of a window; the second half of each is scored. Perplexities compare at equal windows only.",
        flags="-c --ctx-size"
    )  # fmt: skip
    limit: int | None = opt(
        None, whole(1), "N", "Text", "Score the first N windows only.", flags="--chunks",
        shown="the whole text"
    )  # fmt: skip

    read_budget: float | None = bounded_reads(
        "Compare predictions whose tokens read at most so many megabytes of experts from disk, and leave out "
        "what is more, with those of the same model that reads all it needs.",
        "Comparison",
    )
    against: str | None = opt(
        None, nonempty, "exact|off|PATH", "Comparison",
        "Compare predictions with those of this sparsity, or of another model with the same tokens. Its "
        "keys and values are f16.",
        shown="none"
    )  # fmt: skip

    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


def evaluate(o: EvalOptions) -> int:
    """Print the windows that are done when Ctrl-C comes like the whole text."""
    from thermocline.machine import hardware
    from thermocline.ops.interface import FFNStats

    threads = hardware.threads_for(o.threads)
    _check_divided(o)
    with ProgressBar(quiet=o.quiet) as progress, ExitStack() as stack:
        sides = _sides(o, progress)
        texts = _texts(o, sides)
        left_out, stats = None, FFNStats()
        workers = stack.enter_context(workers_of(o))
        if workers is not None:
            found: Iterator[Scored] = stack.enter_context(closing(_across(workers, o, sides, texts, stats)))
        else:
            sessions = _sessions(o, sides, threads, stack, progress)
            if o.read_budget is None:
                readers = _readers(sessions, sides, o.ctx, shares_cache(o, sides))
            else:
                (session,) = sessions.values()  # of both sides
                readers, left_out = _bounded_readers(session, sides, o.ctx, o.read_budget)
            readers[0].stats, found = stats, _read(readers, texts)
        begin = time.perf_counter()
        bar = partial(progress.at, "evaluating", total=len(texts), unit=" windows")
        scored, interrupted = until_interrupted(_shown(found, bar))
        windows, about = len(scored), _about(scored) if scored else {}
        about |= _active(stats, sides[0])
    if not windows:
        raise KeyboardInterrupt
    facts: dict[str, Any] = {
        "model": str(sides[0].pack.path),
        "format": sides[0].pack.weight_format,
        "sparsity": sides[0].sparsity,
        "cache_type_k": sides[0].types.k,
        "cache_type_v": sides[0].types.v,
        "text": o.text,
        "context": o.ctx,
        "windows": windows,
    } | about
    if len(sides) == 2:
        facts["against"] |= {"model": str(sides[1].pack.path), "sparsity": sides[1].sparsity}
    facts["read_budget_mb"] = o.read_budget
    facts["disk_left_out_per_token"] = None if left_out is None else left_out() / facts["tokens"]
    seconds = time.perf_counter() - begin
    facts |= {"seconds": seconds, "tokens_per_s": windows * o.ctx / seconds}
    facts |= {"isa": hardware.isa().chosen, "threads": threads}
    if o.json:
        emit_json(facts)
    else:
        emit(table(evaluation_rows(facts)))
    return INTERRUPTED if interrupted else 0


@dataclass(frozen=True)
class Side:
    """A model with its sparsity, which is compared with another."""

    pack: StoredModel
    sparsity: str
    types: CacheTypes = PLAIN  # of keys and values


def until_interrupted(items: Iterable[T]) -> tuple[list[T], bool]:
    """Return (the items until Ctrl-C or the end, whether it was Ctrl-C)."""
    found: list[T] = []
    try:
        for item in items:
            found.append(item)
    except KeyboardInterrupt:
        return found, True
    return found, False


def _sides(o: EvalOptions, progress: ProgressBar) -> list[Side]:
    types = CacheTypes(o.cache_type_k, o.cache_type_v)
    own = Side(find_model(o.model, progress, activation=o.activation), o.sparsity, types)
    if o.gpu != "off" and o.against is not None and o.against not in SPARSITIES:
        raise UsageError(
            f"--gpu {o.gpu} with --against {o.against}: two models do not share a GPU; leave one of them out"
        )
    if o.read_budget is not None:
        if o.against not in (None, "exact"):
            raise UsageError(
                f"--read-budget is compared with the same model that reads all it needs; leave out "
                f"--against {o.against}"
            )
        return [own, Side(own.pack, "exact")]
    if o.against is None:
        return [own]
    if o.against not in SPARSITIES:
        return [own, Side(find_model(o.against, progress, activation=None), "exact")]
    if not own.pack.spec.sparse and not types.quantised:
        raise UsageError(
            f"{own.pack.path}: its activation ({own.pack.spec.activation}) is never zero, so there is "
            f"nothing to skip and {o.against} is the same model; --against takes another pack"
        )
    if o.against == o.sparsity and not types.quantised:
        raise UsageError(f"--sparsity and --against are both {o.against}: nothing to compare")
    return [own, Side(own.pack, o.against)]


def _texts(o: EvalOptions, sides: Sequence[Side]) -> I32:
    """Return the windows, which are the same for both sides."""
    import numpy as np

    from thermocline.offline import evaluate
    from thermocline.text.tokenizer import FILE, Tokenizer, read_text

    for side in sides:
        evaluate.check_context(side.pack.spec, o.ctx)
        if not side.pack.small_files.has(FILE):
            raise UsageError(f"{side.pack.path}: has no tokenizer; its text would be noise")
    text = read_text(Path(o.text)).removesuffix("\n")  # as llama-perplexity does
    found = []
    for pack in {side.pack.path: side.pack for side in sides}.values():
        found.append(evaluate.windows(Tokenizer(pack.small_files, pack.spec), text, o.ctx, o.limit))
    sizes = {side.pack.spec.vocab_size for side in sides}
    if len(sizes) > 1 or not all(np.array_equal(found[0], other) for other in found):
        raise UsageError(
            f"{sides[1].pack.path}: has another tokenizer than {sides[0].pack.path}; "
            "only models with the same tokens can be compared"
        )
    return found[0]


def _sessions(
    o: EvalOptions, sides: Sequence[Side], threads: int, stack: ExitStack, progress: ProgressBar
) -> dict[Path, Session]:
    """Open the models within the memory that there is. Sides of one model share its weights."""
    from thermocline.offline import evaluate
    from thermocline.session.options import LENDS_WEIGHTS, EngineOptions
    from thermocline.session.side_by_side import SideModel, open_sessions

    shared = shares_cache(o, sides)
    asked: dict[Path, SideModel] = {}
    for pack in {side.pack.path: side.pack for side in sides}.values():
        mine = [side for side in sides if side.pack.path == pack.path]
        if shared:
            beside = len(mine) * evaluate.scoring_bytes(pack.spec)
        else:
            beside = sum(evaluate.reader_bytes(pack.spec, o.ctx, side.types) for side in mine)
        options = EngineOptions(
            sparsity="predict" if any(side.sparsity == "predict" for side in mine) else "exact",
            context=o.ctx,
            max_batch=evaluate.GPU_PIECE if shared else len(mine),  # each has states of its own
            kv_tokens=evaluate.positions_for(len(mine), o.ctx) if shared else LENDS_WEIGHTS,
            cache_type_k=mine[0].types.k,
            cache_type_v=mine[0].types.v,
            threads=threads,
            ram=o.ram,
            gpu=o.gpu,
            vram=o.vram,
            read_budget=o.read_budget,
        )
        asked[pack.path] = SideModel(pack, options, beside)
    opened = open_sessions([*asked.values()], stack, progress.at)
    return dict(zip(asked, opened, strict=True))


def shares_cache(o: EvalOptions, sides: Sequence[Side]) -> bool:
    """Return whether the sides of one model are to have one cache, which a GPU may hold."""
    return o.gpu != "off" and not any(side.types.quantised for side in sides)


def _readers(
    sessions: dict[Path, Session], sides: Sequence[Side], context: int, shared: bool
) -> list[Reader]:
    """Read the weights, and return a reader for each side. `shared`: in one cache, of one session."""
    from thermocline.engine.decoder import bind, for_context
    from thermocline.offline import evaluate

    ops = sessions[sides[0].pack.path].loaded.ops
    models = {
        path: bind(for_context(x.pack.spec, context), x.loaded.weights, ops) for path, x in sessions.items()
    }
    if shared:
        (session,) = sessions.values()
        spec, storage = session.pack.spec, session.storage
        caches = [evaluate.cache_for(spec, context, readers=len(sides), storage=storage)] * len(sides)
        step = None if session.gpus is None else evaluate.GPU_PIECE
    else:
        caches = [evaluate.cache_for(x.pack.spec, context, types=x.types) for x in sides]
        step = None
    return [
        evaluate.Reader(
            models[x.pack.path], ops, context=context, sparsity=x.sparsity,
            step=None if x.sparsity == "predict" else step, cache=cache,
        )
        for x, cache in zip(sides, caches, strict=True)
    ]  # fmt: skip


def _bounded_readers(
    session: Session, sides: Sequence[Side], context: int, read_budget: float
) -> tuple[list[Reader], Callable[[], int]]:
    """Return a reader that leaves out experts, and one of the same session that reads all of them.

    Both have the cache that the first one fills. The second takes what is there and changes nothing. The
    function counts the experts that were left out.
    """
    from thermocline.engine.decoder import bind, for_context
    from thermocline.offline import evaluate

    own, base = sides
    if not session.from_disk:
        raise UsageError(
            f"--read-budget {read_budget:g}: all weights are in memory, so nothing is left out and there is "
            "nothing to measure"
        )
    loaded, budget = session.loaded, session.read_budget
    assert budget is not None and session.store is not None, "experts are on disk, and bounded"
    ops, store = loaded.ops, session.store
    model = bind(for_context(own.pack.spec, context), loaded.weights, ops)
    readers = [
        evaluate.Reader(
            model, ops, context=context, sparsity=own.sparsity, step=1,
            cache=evaluate.cache_for(own.pack.spec, context, types=own.types), begin_step=budget.begin_step,
        ),
        evaluate.Reader(
            model, ops, context=context, sparsity=base.sparsity, begin_step=budget.begin_exact_step
        ),
    ]  # fmt: skip
    return readers, lambda: store.counts().left_out


def _check_divided(o: EvalOptions) -> None:
    for flag, given in (("--gpu", o.gpu != "off"), ("--read-budget", o.read_budget is not None)):
        if given and is_divided(o):
            raise UsageError(
                f"{flag}: not with --processes or --ray, where windows are read apart, on CPUs; leave it out"
            )


def _read(readers: Sequence[Reader], texts: I32) -> Iterator[Scored]:
    """Yield each window's scores, or its comparison of two readers."""
    from thermocline.offline import evaluate

    return (
        evaluate.scores(readers[0], texts)
        if len(readers) == 1
        else evaluate.comparisons(readers[0], readers[1], texts)
    )


def _shown(found: Iterable[Scored], bar: Callable[[int], None]) -> Iterator[Scored]:
    for done, window in enumerate(found, 1):
        yield window
        bar(done)


def _across(
    workers: Workers, o: EvalOptions, sides: Sequence[Side], texts: I32, stats: FFNStats
) -> Generator[Scored]:
    """Yield the same from other processes or machines, some windows at a time. Add up their `stats`."""
    from thermocline.cluster import shards

    ram = workers.ram(o.ram)
    with ExitStack() as stack, ProgressBar(quiet=True) as silent:
        sessions = _sessions(replace(o, ram=ram), sides, max(1, o.threads), stack, silent)
        nbytes = sum(session.memory_bytes for session in sessions.values())
    named = {
        n: os.path.abspath(x) for n in ("model", "against") if (x := getattr(o, n)) and os.path.exists(x)
    }
    work = ReadingWork(replace(o, ram=ram, **named), tuple(side.pack.stamp for side in sides))
    cuts = shards.sizes(len(texts), max(1, SHARD_TOKENS // o.ctx), workers.most)
    with closing(workers.map(work, [texts[cut] for cut in cuts], nbytes)) as found:
        for windows, more in found:
            yield from windows
            stats += more


@dataclass(frozen=True)
class ReadingWork:
    """Reading windows, as a worker does it. `stamps`: of both sides' models."""

    options: EvalOptions
    stamps: tuple[tuple[str, str], ...]

    @contextmanager
    def open(self, threads: int) -> Iterator[Callable[[I32], tuple[list[Scored], FFNStats]]]:
        from thermocline.ops.interface import FFNStats

        o = self.options
        with ProgressBar(quiet=True) as progress, ExitStack() as stack:
            sides = _sides(o, progress)
            for side, stamp in zip(sides, self.stamps, strict=True):
                if side.pack.stamp != stamp:
                    raise BadFile(f"{side.pack.path}: is another model here; put the same one there")
            readers = _readers(_sessions(o, sides, threads, stack, progress), sides, o.ctx, shared=False)

            def read(texts: I32) -> tuple[list[Scored], FFNStats]:
                readers[0].stats = FFNStats()
                return [*_read(readers, texts)], readers[0].stats

            yield read


def _about(scored: Sequence[Scored]) -> dict[str, Any]:
    """Return the results of all windows."""
    import numpy as np

    from thermocline.offline import evaluate

    pairs = [x for x in scored if isinstance(x, evaluate.Comparison)]
    if not pairs:
        return asdict(evaluate.Perplexity.of(np.concatenate([*scored])))
    found = asdict(evaluate.Divergence.of(evaluate.Comparison.join(pairs)))
    own, base = found.pop("own"), found.pop("base")
    return {**own, "against": base | found}


def _active(s: FFNStats, side: Side) -> dict[str, Any]:
    """Return the shares of neurons; null where none is ever inactive, or none is predicted."""
    return {
        "active_fraction": s.active / max(1, s.neurons) if side.pack.spec.sparse else None,
        "predicted_fraction": s.predicted / max(1, s.gates_dense) if side.sparsity == "predict" else None,
    }


def evaluation_rows(f: dict[str, Any]) -> list[tuple[str, str]]:
    types = CacheTypes(f["cache_type_k"], f["cache_type_v"])
    kept = f", keys and values in {types}" if types.quantised else ""
    rows = [
        ("model", f"{f['model']} ({f['format']}, {f['sparsity']}{kept})"),
        ("text", f"{f['text']}, {f['windows']} windows of {f['context']}, {f['tokens']:,} tokens scored"),
        ("perplexity", _estimate(f["perplexity"])),
    ]
    if f["active_fraction"] is not None:
        guessed = f["predicted_fraction"]
        more = "" if guessed is None else f"; {percent(guessed)} predicted and their gates computed"
        rows.append(("active", f"{percent(f['active_fraction'])} of neurons{more}"))
    if f["read_budget_mb"] is not None:
        left = f"{f['disk_left_out_per_token']:.3g} experts a token left out"
        rows.append(("read budget", f"{f['read_budget_mb']:g} MB a token; {left}"))
    several = "s" * (f["threads"] > 1)
    rows.append(("speed", f"{f['tokens_per_s']:.0f} tok/s, {f['isa']}, {f['threads']} thread{several}"))
    if "against" not in f:
        return rows
    a = f["against"]
    return [
        *rows,
        ("", ""),
        ("against", f"{a['model']} ({a['sparsity']})"),
        ("its perplexity", _estimate(a["perplexity"])),
        ("change", _estimate({"value": a["ratio"]["value"] - 1, "error": a["ratio"]["error"]}, percent=True)),
        ("mean KLD", f"{_estimate(a['kld'], digits=6)} (99 %: {a['kld_p99']:.6f}, most: {a['kld_max']:.6f})"),
        ("same top token", _estimate(a["same_top"], percent=True)),
        (
            "mean Δp",
            f"{_estimate(a['delta_p'], percent=True)} (RMS: {_estimate(a['delta_p_rms'], percent=True)})",
        ),
    ]


def _estimate(e: dict[str, float], digits: int = 4, *, percent: bool = False) -> str:
    if percent:
        return f"{100 * e['value']:.3f} ± {100 * e['error']:.3f} %"
    return f"{e['value']:.{digits}f} ± {e['error']:.{digits}f}"
