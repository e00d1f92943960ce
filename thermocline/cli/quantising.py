"""The steps of `pack --format q4_k_m`: the source as it is, its inputs, the pack, what it cost."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import ProgressBar, emit_json
from thermocline.cli.table import percent, size
from thermocline.errors import UsageError

if TYPE_CHECKING:
    from thermocline.cli.commands.pack import PackOptions
    from thermocline.offline.evaluate import Divergence
    from thermocline.ops.interface import I32
    from thermocline.pack.pack import Pack

log = logging.getLogger(__name__)
MEASURED_TOKENS = 8192


def quantise(o: PackOptions) -> int:
    from thermocline.machine import hardware
    from thermocline.offline.packing import over_texts
    from thermocline.offline.packing import quantise_pack as steps
    from thermocline.pack.pack import Pack, inspect
    from thermocline.pack.writer import check_target
    from thermocline.quantise import importance

    check_target(Path(os.path.realpath(o.output)), o.force)
    threads = hardware.threads_for(o.threads)
    begin = time.perf_counter()
    with ProgressBar(quiet=o.quiet) as progress, _source(o, progress) as pack:
        known = {} if o.importance is None else importance.read(Path(o.importance), pack.spec)
        moments = {}
        if o.calibrate is not None:
            texts = over_texts.windows_for(pack, _text(o.calibrate), o.calibrate_tokens)
            moments = over_texts.measure_inputs(pack, texts, threads, progress.at)
        if o.importance_out is not None:
            importance.write(Path(o.importance_out), importance.of_moments(moments))
        assert o.format is not None
        job = steps.QuantiseJob(pack, Path(o.output), o.format, threads, known, moments, overwrite=o.force)
        made = steps.quantise(job, progress.at)
        written, cost = Pack.open(o.output), None
        found = _measured(o, pack)
        if found is not None:
            cost = over_texts.divergence(written, pack, found[1], threads, progress.at)
    about = inspect(written)
    about["quantised"] = {
        "format": o.format,
        "bits": made.bits,
        "bits_before": made.bits_before,
        "rms_error": made.rms_error,
        "rms_errors": made.rms_errors,
        "measured_on": None if found is None else found[0],
        **_cost(cost),
        "seconds": time.perf_counter() - begin,
    }
    if o.json:
        emit_json(about)
    _say(o, about, cost)
    return 0


def _cost(d: Divergence | None) -> dict[str, float | None]:
    if d is None:
        return dict.fromkeys(("kld", "kld_error", "kld_p99", "same_top", "perplexity_ratio"))
    return {
        "kld": d.kld.value,
        "kld_error": d.kld.error,
        "kld_p99": d.kld_p99,
        "same_top": d.same_top.value,
        "perplexity_ratio": d.ratio.value,
    }


def _say(o: PackOptions, about: dict[str, Any], cost: Divergence | None) -> None:
    q = about["quantised"]
    log.info(f"packed {o.source} as {o.format} into {o.output}, {size(sum(about['files'].values()))}")
    down = f", of down rows {percent(q['rms_errors']['down'])}" if _bundled(about, q) else ""
    log.info(
        f"{q['bits_before']:.2f} -> {q['bits']:.2f} bits a weight, RMS error {percent(q['rms_error'])}{down}"
    )
    if cost is None:
        log.info("--measure FILE or --calibrate FILE would measure what that costs")
        return
    log.info(
        f"mean KL divergence {cost.kld.value:.6f} ± {cost.kld.error:.6f}, same top token "
        f"{percent(cost.same_top.value)}, perplexity {cost.ratio.value - 1:+.2%}, on {q['measured_on']}"
    )


def _bundled(about: dict[str, Any], q: dict[str, Any]) -> bool:
    """Tell whether down was turned into rows of neurons."""
    return "bundle" in about["parts"] and "down" in q["rms_errors"]


@contextmanager
def _source(o: PackOptions, progress: ProgressBar) -> Iterator[Pack]:
    """Give the source as a pack: itself, or a copy that is removed in the end, with weights as they are."""
    from thermocline.convert import importer
    from thermocline.hub import download
    from thermocline.model.families import check_activation
    from thermocline.pack.pack import Pack

    found = download.locate(o.source, progress.at)
    if (Path(found) / "pack.json").exists():
        opened = Pack.open(found)
        if o.predictors is not None:
            raise UsageError(f"{o.source}: is a pack already; give --predictors when it is made")
        if o.activation is not None:
            check_activation(opened.spec, o.activation, o.source)
        if os.path.realpath(found) == os.path.realpath(o.output):
            raise UsageError(f"{o.output}: is the source itself; choose another directory")
        yield opened
        return
    copy = Path(f"{os.path.realpath(o.output)}.source-{os.getpid()}")
    try:
        importer.pack(
            found,
            copy,
            importer.exact_format(Path(found)),
            progress=lambda done, of: progress.at("reading", done, of),
            activation=o.activation,
            predictors=o.predictors,
        )
        yield Pack.open(copy)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _text(path: str) -> str:
    from thermocline.text.tokenizer import read_text

    return read_text(Path(path))


def _measured(o: PackOptions, pack: Pack) -> tuple[str, I32] | None:
    """Return (name, windows) of the text on which the result is measured; None if there is none."""
    import numpy as np

    from thermocline.offline.packing import over_texts

    if o.measure is not None:
        return o.measure, over_texts.windows_for(pack, _text(o.measure), MEASURED_TOKENS)
    if o.calibrate is not None:
        used = over_texts.windows_for(pack, _text(o.calibrate), o.calibrate_tokens)
        rest = over_texts.windows_for(pack, _text(o.calibrate), MEASURED_TOKENS, skip=len(used))
        if len(rest):
            return f"{o.calibrate}, behind what calibrated", rest
        return f"{o.calibrate}, which calibrated (it is short: --measure takes another)", used
    if o.importance is None:
        return None
    from thermocline.offline.training.trial import MIX

    parts = [
        over_texts.windows_for(pack, _text(str(path)), MEASURED_TOKENS // 4)
        for path in sorted(MIX.glob("*.txt"))
    ]
    return "the package's texts", np.concatenate(parts)
