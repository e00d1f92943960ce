"""`thermocline pack`: other people's files -> a pack, or a pack -> a GGUF file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thermocline.cli.console import ProgressBar, emit_json
from thermocline.cli.packs import formats_said, open_pack
from thermocline.cli.shared_options import json_output, quiet_output, thread_count, which_activation
from thermocline.cli.table import size
from thermocline.errors import UsageError
from thermocline.model.formats import FORMATS
from thermocline.model.mixes import MIXES, NUMBERS
from thermocline.options import BY_POSITION, REQUIRED, nonempty, one_of, opt, switch, whole

log = logging.getLogger(__name__)
NAMES = tuple(dict.fromkeys([*MIXES, *FORMATS]))  # mixes, and formats that all matrices have


@dataclass(frozen=True)
class PackOptions:
    """Turn a Hugging Face directory or a GGUF file into a pack, or a pack into a GGUF file."""

    source: str = opt(
        "",
        nonempty,
        "SRC",
        "Model",
        "Hugging Face directory or GGUF file; or a pack.",
        given=BY_POSITION | REQUIRED,
    )
    output: str = opt(
        "",
        nonempty,
        "DIR",
        "Model",
        "Pack directory to write; or, of a pack, NAME.gguf.",
        flags="-o",
        given=REQUIRED,
    )
    format: str | None = opt(
        None, one_of(*NAMES), "NAME", "Model",
        "Formats of the matrices, as llama.cpp's files of this name mix them: q4_k_m, q5_k_m, q6_k, q4_0, "
        "iq4_xs, mxfp4 ... (a wrong one lists them all).",
        shown="a GGUF's own, else q8_0"
    )  # fmt: skip
    activation: str | None = which_activation()
    predictors: str | None = opt(
        None, nonempty, "DIR", "Model",
        "PowerInfer's predictors for this Hugging Face directory: one of files model_0.pt, model_1.pt ...",
        shown="those in the model itself"
    )  # fmt: skip
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack.")

    calibrate: str | None = opt(
        None, nonempty, "FILE", "Quality",
        "A text like those that the model will read, UTF-8. The model runs over it, and what it does to the "
        "inputs of matrices decides which errors cost how much, and how they are evened out.",
        shown="none"
    )  # fmt: skip
    calibrate_tokens: int = opt(
        16384, whole(512), "N", "Quality", "Tokens of that text to run over; more are more even, and slower."
    )
    importance: str | None = opt(
        None, nonempty, "FILE", "Quality",
        "Importances of columns that were measured before: by --importance-out, or by llama-imatrix (GGUF or "
        ".dat).",
        shown="none"
    )  # fmt: skip
    importance_out: str | None = opt(
        None, nonempty, "FILE", "Quality", "Write the importances that --calibrate measures.", shown="none"
    )
    measure: str | None = opt(
        None, nonempty, "FILE", "Quality",
        "Measure the divergence of the pack from its source on this text.",
        shown="what follows in --calibrate's text; with --importance, the package's own texts"
    )  # fmt: skip
    threads: int = thread_count("Threads to quantise and to compute with.", "Quality")
    json: bool = json_output()
    quiet: bool = quiet_output()


def pack(o: PackOptions) -> int:
    from thermocline.convert import importer
    from thermocline.hub import download
    from thermocline.pack.pack import Pack, inspect

    if o.output.endswith(".gguf"):
        return export(o)
    if quantises(o):
        from thermocline.cli.quantising import quantise

        return quantise(o)
    with ProgressBar(quiet=o.quiet) as progress:
        bar = partial(progress.at, "packing")
        source = download.locate(o.source, progress.at)
        cost = importer.pack(
            source,
            o.output,
            o.format,
            overwrite=o.force,
            progress=bar,
            activation=o.activation,
            predictors=o.predictors,
        )
    about = inspect(Pack.open(o.output))
    if o.json:
        emit_json(about)
    log.info(
        f"packed {o.source} as {formats_said(about)} into {o.output}, {size(sum(about['files'].values()))}"
    )
    if cost is not None:
        log.info(str(cost))
    return 0


def quantises(o: PackOptions) -> bool:
    """Tell whether weights are searched for; formats that hold nearly everything are only rounded to."""
    asked = [f for f in ("calibrate", "importance", "measure") if getattr(o, f) is not None]
    if asked and o.format is None:
        raise UsageError(f"--{asked[0]} is of use with --format only: say which, such as --format q4_k_m")
    if o.importance_out is not None and o.calibrate is None:
        raise UsageError("--importance-out writes what --calibrate measures: give a text, --calibrate FILE")
    return o.format is not None and (bool(asked) or o.format not in (*NUMBERS, "q8_0"))


def export(o: PackOptions) -> int:
    """Write a pack as one GGUF file."""
    from thermocline.convert import from_gguf, to_gguf
    from thermocline.pack.pack import inspect

    if o.predictors is not None:
        raise UsageError("--predictors is for a pack that is written; a GGUF keeps those of its pack")
    opened = open_pack(o.source, o.activation)
    how = formats_said(inspect(opened))
    if o.format not in (None, how):
        raise UsageError(f"{o.source}: has {how} weights, which a GGUF keeps; not {o.format}")
    with ProgressBar(quiet=o.quiet) as progress:
        bar = partial(progress.at, "writing GGUF")
        to_gguf.write_gguf(opened, o.output, overwrite=o.force, progress=bar)
    about = from_gguf.inspect_gguf(Path(o.output))
    if o.json:
        emit_json(about)
    nbytes, layout = size(about["file_bytes"]), "llama.cpp's"
    if to_gguf.for_powerinfer(opened.spec):
        layout = "PowerInfer's"
    log.info(f"wrote {o.source} as {how} into {o.output}, {nbytes}, in {layout} layout")
    return 0
