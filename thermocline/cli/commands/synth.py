"""`thermocline synth`: a pack of random weights in a real model's shape, for measuring."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from thermocline.cli.console import ProgressBar, emit_json
from thermocline.cli.shared_options import json_output, quiet_output, which_activation
from thermocline.cli.table import size
from thermocline.options import BY_POSITION, REQUIRED, nonempty, one_of, opt, real, switch, whole
from thermocline.session.options import FORMATS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SynthOptions:
    """Write a pack with a real model's shape and random weights: for measuring, not for text."""

    shape: str = opt(
        "", nonempty, "SHAPE", "Model",
        "A known shape, such as llama-2-7b or opt-6.7b (a wrong one lists them all), or a config.json.",
        given=BY_POSITION | REQUIRED
    )  # fmt: skip
    output: str = opt("", nonempty, "DIR", "Model", "Pack directory to write.", flags="-o", given=REQUIRED)
    format: str = opt("q8_0", one_of(*FORMATS), "|".join(FORMATS), "Model", "Weight format.")
    activation: str | None = which_activation()
    gguf: str | None = opt(
        None, nonempty, "FILE", "Model", "Write the same weights as a GGUF file too, for llama.cpp.",
        shown="none"
    )  # fmt: skip
    seed: int = opt(0, whole(0, 2**63 - 1), "N", "Model", "Equal seeds give equal packs.", flags="-s")
    active: float | None = opt(
        None, real(0.001, 0.9), "X", "Sparsity",
        "Mean fraction of neurons active for a token; makes a dense shape a ReLU model.",
        shown="0.1 for ReLU shapes; others stay dense"
    )  # fmt: skip
    skew: float = opt(
        0.26, real(0.001, 0.8), "X", "Sparsity",
        "Fraction of a layer's neurons that makes 80% of the activations; OPT-30B has 0.26, a ReGLU 70B 0.43."
    )  # fmt: skip
    rank: int = opt(
        64, whole(32), "N", "Sparsity",
        "Rank of the synthetic activation pattern (plus 10 % noise); a multiple of 32."
    )  # fmt: skip
    hottest_first: bool = opt(
        False, switch, None, "Sparsity", "Put the neurons in the order in which `profile` would put them."
    )
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack and GGUF file.")
    json: bool = json_output()
    quiet: bool = quiet_output()


def synth(o: SynthOptions) -> int:
    from thermocline.convert import synthetic, to_gguf
    from thermocline.pack.pack import Pack, inspect

    model = synthetic.SyntheticModel.of(
        o.shape, o.seed, o.active, o.skew, o.rank, o.hottest_first, o.activation
    )
    if o.gguf is not None:
        to_gguf.check(model.stats.spec, model.optional, o.gguf, o.force)
    with ProgressBar(quiet=o.quiet) as progress:
        model.write(o.output, o.format, overwrite=o.force, progress=partial(progress.at, "writing"))
        made = Pack.open(o.output)
        if o.gguf is not None:
            bar = partial(progress.at, "writing GGUF")
            to_gguf.write_gguf(made, o.gguf, overwrite=o.force, progress=bar)
    about = inspect(made)
    if o.json:
        emit_json(about)
    layout = " (PowerInfer's layout)" if made.spec.sparse else ""
    too = f" and {o.gguf}{layout}" if o.gguf is not None else ""
    nbytes = size(sum(about["files"].values()))
    log.info(f"wrote random weights ({made.source['name']}) as {o.format} into {o.output}{too}, {nbytes}")
    return 0
