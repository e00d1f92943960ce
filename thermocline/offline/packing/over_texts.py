"""Run a pack over a text: the inputs of its matrices, and its divergence from the pack it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from thermocline.engine.decoder import bind, for_context
from thermocline.errors import OutOfBudget, UsageError
from thermocline.machine import hardware
from thermocline.offline import evaluate
from thermocline.offline.packing.collect import collect
from thermocline.pack import blocks
from thermocline.quantise.feedback import WINDOW
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session
from thermocline.text.tokenizer import FILE, Tokenizer

if TYPE_CHECKING:
    from thermocline.model.spec import ModelSpec
    from thermocline.ops.interface import I32
    from thermocline.pack.pack import Pack
    from thermocline.quantise.moments import Moments

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
    _check_memory([pack], context, threads, moments_bytes(pack.spec))
    options = EngineOptions(threads=threads, context=context, max_batch=1)
    with Session.open(
        pack, options, progress=lambda what, done, of: progress(what, done, of, "B"), fits=True
    ) as session:
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
    context = texts.shape[1]
    _check_memory([pack, base], context, threads, 0)
    options = EngineOptions(threads=threads, context=context, max_batch=1)
    readers, ops = [], None
    for one in (pack, base):
        loaded = Session.open(one, options, fits=True).loaded
        ops = ops or loaded.ops
        model = bind(for_context(one.spec, context), loaded.weights, ops)
        readers.append(evaluate.Reader(model, ops, context=context))
    bar = lambda done, of: progress("measuring", done, of, " windows")  # noqa: E731
    return evaluate.divergence(readers[0], readers[1], texts, bar)


def _check_memory(packs: Sequence[Pack], context: int, threads: int, more: int) -> None:
    try:
        evaluate.check_memory(
            [p.spec for p in packs],
            weights_bytes=sum(blocks.memory_bytes(p, None) for p in packs) + more,
            available_bytes=hardware.available_bytes(),
            context=context,
            threads=threads,
        )
    except OutOfBudget as e:
        raise OutOfBudget(f"to run the model while packing: {e}") from None
