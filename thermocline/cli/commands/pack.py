"""`thermocline pack`: other people's files -> a pack, or a pack -> a GGUF file."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thermocline.cli.console import ProgressBar, emit_json
from thermocline.cli.packs import formats_said, open_pack
from thermocline.cli.shared_options import json_output, quiet_output, weight_format, which_activation
from thermocline.cli.table import size
from thermocline.errors import UsageError
from thermocline.options import BY_POSITION, REQUIRED, nonempty, opt, switch

log = logging.getLogger(__name__)


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
    format: str | None = weight_format("Weight format.")
    activation: str | None = which_activation()
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack.")
    json: bool = json_output()
    quiet: bool = quiet_output()


def pack(o: PackOptions) -> int:
    from thermocline.convert import importer
    from thermocline.hub import download
    from thermocline.pack.pack import Pack, inspect

    if o.output.endswith(".gguf"):
        return export(o)
    with ProgressBar(quiet=o.quiet) as progress:
        bar = partial(progress.at, "packing")
        source = download.locate(o.source, progress.at)
        cost = importer.pack(
            source, o.output, o.format, overwrite=o.force, progress=bar, activation=o.activation
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


def export(o: PackOptions) -> int:
    """Write a pack as one GGUF file."""
    from thermocline.convert import from_gguf, to_gguf
    from thermocline.pack.pack import inspect

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
    nbytes, layout = size(about["file_bytes"]), "PowerInfer's" if opened.spec.sparse else "llama.cpp's"
    log.info(f"wrote {o.source} as {how} into {o.output}, {nbytes}, in {layout} layout")
    return 0
