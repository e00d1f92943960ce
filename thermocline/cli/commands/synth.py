"""`thermocline synth`: a pack or a GGUF file of random weights in a real model's shape, for measuring."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from thermocline.cli.console import ProgressBar, emit_json
from thermocline.cli.shared_options import json_output, quiet_output, which_activation
from thermocline.cli.table import size
from thermocline.errors import UsageError
from thermocline.model.formats import FORMATS
from thermocline.model.mixes import MIXES
from thermocline.options import BY_POSITION, REQUIRED, nonempty, one_of, opt, real, switch, whole

log = logging.getLogger(__name__)
ACTIVITIES = ("trained",)  # synthetic_weights.ACTIVITIES, which needs numpy
ROUTINGS = ("qwen3-30b", "gemma-4-26b", "gpt-oss-120b")  # synthetic.ROUTINGS, which needs numpy
NAMES = tuple(dict.fromkeys([*MIXES, *FORMATS]))  # mixes, and formats that all matrices have


@dataclass(frozen=True)
class SynthOptions:
    """Write a model with a real model's shape and random weights: for measuring, not for text."""

    shape: str = opt(
        "", nonempty, "SHAPE", "Model",
        "A known shape, such as llama-2-7b or opt-6.7b (a wrong one lists them all), or a config.json.",
        given=BY_POSITION | REQUIRED
    )  # fmt: skip
    output: str | None = opt(
        None, nonempty, "DIR", "Model", "Pack directory to write.", flags="-o", shown="none"
    )
    format: str = opt(
        "q8_0", one_of(*NAMES), "NAME", "Model",
        "Formats of the matrices, as llama.cpp's files of this name mix them: q4_k_m, q5_k_m, q6_k, iq4_xs, "
        "mxfp4 ... (a wrong one lists them all)."
    )  # fmt: skip
    layers: int | None = opt(
        None, whole(1), "N", "Model", "So many layers only, for a model that fits memory.", shown="all"
    )
    activation: str | None = which_activation()
    gguf: str | None = opt(
        None, nonempty, "FILE", "Model", "GGUF file to write, with or without a pack of the same weights.",
        shown="none"
    )  # fmt: skip
    seed: int = opt(0, whole(0, 2**63 - 1), "N", "Model", "Equal seeds give equal packs.", flags="-s")
    active: float | None = opt(
        None, real(0.001, 0.9), "X", "Sparsity",
        "Mean fraction of neurons active for a token; makes a dense shape a ReLU model.",
        shown="0.1 for ReLU shapes, SmallThinker's 0.4, 0.05 with --activity trained; others stay dense"
    )  # fmt: skip
    skew: float | None = opt(
        None, real(0.001, 0.8), "X", "Sparsity",
        "Fraction of a layer's neurons that makes 80% of the activations; OPT-30B has 0.26, a ReGLU 70B "
        "0.43.",
        shown="0.26; SmallThinker's 0.55; 0.61 with --activity trained"
    )  # fmt: skip
    activity: str = opt(
        "easy", one_of("easy", *ACTIVITIES), "NAME", "Sparsity",
        "Which neurons a token needs: trained has what a trained model makes hard for caches, predictors and "
        "early reads (its own --active and --skew too); easy has a few hot neurons, and each token by itself."
    )  # fmt: skip
    rank: int = opt(
        64, whole(32), "N", "Sparsity",
        "Rank of the synthetic activation pattern (plus 10 % noise); a multiple of 32."
    )  # fmt: skip
    hottest_first: bool = opt(
        False, switch, None, "Sparsity", "Put the neurons in the order in which `profile` would put them."
    )
    routing: str = opt(
        "random", one_of("random", *ROUTINGS), "NAME", "Model",
        "How a mixture picks experts: at random, or with the skew and the locality of this trained model's "
        "trace: qwen3-30b, gemma-4-26b, gpt-oss-120b."
    )  # fmt: skip
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack and GGUF file.")
    json: bool = json_output()
    quiet: bool = quiet_output()


def synth(o: SynthOptions) -> int:
    from thermocline.convert import synthetic, to_gguf
    from thermocline.convert.random_weights.source import RandomWeights
    from thermocline.pack.pack import Pack, inspect

    if o.output is None and (o.gguf is None or o.json):
        raise UsageError(
            "--json describes a pack; give its directory with -o DIR"
            if o.gguf
            else "nothing to write; give -o DIR for a pack, --gguf FILE for a GGUF file, or both"
        )
    active, skew = synthetic.sparsity_of(o.shape, o.activity, o.active, o.skew)
    model = synthetic.SyntheticModel.of(
        o.shape, o.seed, active, skew, o.rank, o.hottest_first, o.activation, o.layers
    ).planted(o.routing, o.activity)
    formats = synthetic.formats_named(o.format, model.stats.spec)
    if o.gguf is not None:
        to_gguf.check(model.stats.spec, model.optional, o.gguf, o.force)
    with ProgressBar(quiet=o.quiet) as progress:
        if o.output is not None:
            model.write(o.output, *formats, overwrite=o.force, progress=partial(progress.at, "writing"))
            made, source = Pack.open(o.output), None
        else:
            made, source = model.unwritten(o.gguf or "", *formats), RandomWeights(model.stats)
        if o.gguf is not None:
            bar = partial(progress.at, "writing GGUF")
            kind = MIXES[o.format].file_type if o.format in MIXES else None
            to_gguf.write_gguf(made, o.gguf, source, file_type=kind, overwrite=o.force, progress=bar)
    if o.json:
        emit_json(inspect(made))
    layout = " (PowerInfer's layout)" if o.gguf is not None and to_gguf.for_powerinfer(made.spec) else ""
    places = " and ".join(p for p in (o.output, o.gguf) if p is not None)
    log.info(
        f"wrote random weights ({made.source['name']}) as {o.format} into {places}{layout}, "
        f"{size(made.weights_bytes)}"
    )
    return 0
