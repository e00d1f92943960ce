"""Run a pack over a text: the inputs of its matrices, and its divergence from the pack it was made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from thermocline.engine.decoder import bind, for_context
from thermocline.errors import OutOfBudget, UsageError
from thermocline.offline import evaluate
from thermocline.offline.packing.collect import collect
from thermocline.quantise.feedback import WINDOW
from thermocline.session.options import LENDS_WEIGHTS, EngineOptions
from thermocline.session.side_by_side import SideModel, open_sessions
from thermocline.text.tokenizer import FILE, Tokenizer

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec
    from thermocline.ops.interface import I32
    from thermocline.pack.pack import Pack
    from thermocline.quantise.moments import Moments
    from thermocline.session.session import Session

Progress = Callable[[str, int, int, str], None]  # what, done, total, unit
CONTEXT = 512  # tokens of a text that is read as a whole


def windows_for(pack: Pack, text: str, tokens: int, skip: int = 0) -> I32:
    """Return at most `tokens` tokens of a text, in windows, after the first `skip` windows of it."""
    if not (pack.path / FILE).exists():
        raise UsageError(f"{pack.path}: has no tokenizer, so a text cannot be read")
    tokenizer, context = Tokenizer(pack.path, pack.spec), min(CONTEXT, pack.spec.max_context)
    limit = max(1, tokens // context)
    return evaluate.windows(tokenizer, text, context, skip + limit)[skip:]


def measure_inputs(pack: Pack, texts: I32, threads: int, progress: Progress) -> Moments:
    """Return the moments of the inputs of a pack's matrices over texts. Raises OutOfBudget."""
    context = texts.shape[1]
    beside = moments_bytes(pack.spec) + evaluate.reader_bytes(pack.spec, context)
    with _opened([pack], context, threads, [beside], progress) as (session,):
        return collect(
            pack.spec,
            session.loaded.weights,
            texts,
            threads=threads,
            window=WINDOW,
            progress=lambda done, of: progress("calibrating", done, of, " windows"),
        )


def moments_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the products that are summed up."""

    def products(columns: int) -> int:
        return 4 * columns * min(columns, WINDOW)

    total = products(spec.dim)
    for i in range(spec.n_layers):
        (experts, _, width), shape = spec.ffn(i), spec.attention(i)
        total += products(spec.dim) + (0 if shape is None or shape.latent else products(shape.context))
        total += experts * (products(spec.dim) + products(width))
    return total


def divergence(pack: Pack, base: Pack, texts: I32, threads: int, progress: Progress) -> evaluate.Divergence:
    """Return the divergence of a pack's predictions from those of the one it was made of. OutOfBudget."""
    context, packs = texts.shape[1], (pack, base)
    beside = [evaluate.reader_bytes(p.spec, context) for p in packs]
    with _opened(packs, context, threads, beside, progress) as sessions:
        ops, spec = sessions[0].loaded.ops, for_context(pack.spec, context)
        models = [bind(spec, x.loaded.weights, ops) for x in sessions]
        readers = [evaluate.Reader(m, ops, context=context) for m in models]
        bar = lambda done, of: progress("measuring", done, of, " windows")  # noqa: E731
        return evaluate.divergence(readers[0], readers[1], texts, bar)


@contextmanager
def _opened(
    packs: Sequence[Pack], context: int, threads: int, beside: Sequence[int], progress: Progress
) -> Iterator[list[Session]]:
    """Open sessions of the packs in the memory that is free. Raises OutOfBudget."""
    options = EngineOptions(threads=threads, context=context, max_batch=1, kv_tokens=LENDS_WEIGHTS)
    sides = [SideModel(p, options, n) for p, n in zip(packs, beside, strict=True)]
    with ExitStack() as stack:
        try:
            found = open_sessions(sides, stack, lambda what, done, of: progress(what, done, of, "B"))
        except OutOfBudget as e:
            raise OutOfBudget(f"to run the model while packing: {e}") from None
        yield found
