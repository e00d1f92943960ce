"""Write a pack again with its matrices in other formats, and tell the error of its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from thermocline.files.bounded import read_small
from thermocline.model.mixes import formats_of, main_format
from thermocline.model.tensors import formats_in
from thermocline.offline.packing.over_texts import Progress
from thermocline.offline.packing.rows import PackRows, QuantisedRows
from thermocline.pack.pack import MAX_COPIED_BYTES, Pack
from thermocline.pack.writer import PackExtras, write_pack
from thermocline.quantise.importance import Importance, of_moments
from thermocline.quantise.moments import Moments


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
    """Errors of the written weights as a share of their RMS, by part (qkv, gate, down, ...)."""

    bits: float  # of a weight
    bits_before: float
    rms_errors: dict[str, float]
    rms_error: float


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


def bits(pack: Pack) -> float:
    """Return the bits of a weight of a pack's matrices."""
    matrices = [t for t in pack.tensor_specs().values() if not t.vector]
    nbytes, weights = sum(t.payload * t.rows for t in matrices), sum(t.parameters for t in matrices)
    return 8 * nbytes / weights
