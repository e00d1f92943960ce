"""Write a pack again with its matrices in other formats, and measure what that cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thermocline.engine.decoder import bind, for_context
from thermocline.errors import OutOfBudget, UsageError
from thermocline.files.bounded import read_small
from thermocline.machine import hardware
from thermocline.model.mixes import MIXES, formats_of
from thermocline.model.spec import ModelSpec
from thermocline.model.tensors import formats_in
from thermocline.offline import evaluate
from thermocline.offline.packing.collect import collect
from thermocline.offline.packing.rows import PackRows, QuantisedRows
from thermocline.ops.interface import I32
from thermocline.pack import blocks
from thermocline.pack.pack import MAX_COPIED_BYTES, Pack
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.quantise.feedback import WINDOW
from thermocline.quantise.importance import Importance, of_moments
from thermocline.quantise.moments import Moments
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

Progress = Callable[[str, int, int, str], None]  # what, done, total, unit
CONTEXT = 512  # tokens of a text that is read as a whole


@dataclass(frozen=True)
class QuantiseJob:
    """The input: a pack, where to write the other one, and how.

    mix            a name of `MIXES`, or a format that all matrices get
    importance     of columns, where it was measured before
    moments        measured now; errors are then evened out
    """

    pack: Pack
    output: Path
    mix: str
    threads: int
    importance: Importance = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    overwrite: bool = False


@dataclass(frozen=True)
class Quantised:
    """What was written: errors of weights as a share of their RMS, by part (qkv, gate, down, ...)."""

    bits: float  # of a weight
    bits_before: float
    rms_errors: dict[str, float]
    rms_error: float


def windows_for(pack: Pack, text: str, tokens: int, skip: int = 0) -> I32:
    """Return at most `tokens` tokens of a text, in windows, after the first `skip` windows of it."""
    from thermocline.text.tokenizer import FILE, Tokenizer

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

    layer = products(spec.dim) + products(spec.n_heads * spec.head_dim)
    layer += spec.n_experts * (products(spec.dim) + products(spec.ffn_dim))
    return spec.n_layers * layer + products(spec.dim)


def quantise(job: QuantiseJob, progress: Progress) -> Quantised:
    """Write the pack. Raises the errors of `write_pack`, and BadFile for weights that are not finite."""
    pack, spec = job.pack, job.pack.spec
    importance = job.importance | of_moments(job.moments)
    formats = {n: f for n, f in formats_in(pack.tensors).items() if ".predictor." in n}
    formats |= formats_of(job.mix, spec, importance=bool(importance))
    rows = QuantisedRows(PackRows(pack), importance, job.moments, job.threads)
    present = {n for n, t in pack.tensor_specs().items() if t.optional}
    write_pack(
        job.output,
        spec,
        main_format(job.mix, formats),
        rows,
        PackExtras(
            formats=formats,
            predictor=pack.predictor,
            optional=present,
            files={name: read_small(pack.path / name, MAX_COPIED_BYTES) for name in pack.files},
            origin=(pack.source["kind"], pack.source["name"], pack.source["hash"]),
        ),
        overwrite=job.overwrite,
        progress=lambda done, of: progress("quantising", done, of, "B"),
    )
    errors = rows.errors.values()
    power = sum(e.power for e in errors)
    total = math.sqrt(sum(e.error for e in errors) / power) if power else 0.0
    by_part = {part: e.rms for part, e in rows.errors.items()}
    return Quantised(bits(Pack.open(job.output)), bits(pack), by_part, total)


def main_format(mix: str, formats: dict[str, str]) -> str:
    """Return the format that a pack's manifest names: the mix's own, if a matrix has it."""
    base = MIXES[mix].base if mix in MIXES else mix
    return base if base in formats.values() else Counter(formats.values()).most_common(1)[0][0]


def bits(pack: Pack) -> float:
    """Return the bits of a weight of a pack's matrices."""
    matrices = [t for t in pack.tensor_specs().values() if not t.vector]
    return 8 * sum(t.payload * t.rows for t in matrices) / sum(t.parameters for t in matrices)


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
