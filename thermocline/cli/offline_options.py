"""Options of the commands that prepare a pack.

Must not know what the options do.
"""

from __future__ import annotations

from dataclasses import dataclass

from thermocline.cli.shared_options import (
    json_output,
    memory_limit,
    quiet_output,
    sparsity_mode,
    thread_count,
    which_activation,
)
from thermocline.options import count_or_all, nonempty, one_of, opt, real, switch, whole
from thermocline.session.options import FORMATS


@dataclass(frozen=True)
class ProfileOptions:
    """Count which neurons are active over text, and put the pack in order of hotness."""

    model: str | None = opt(
        None, str, "PACK", "Model", "The pack; in its place comes the same in order of hotness.", flags="-m",
        shown="the bundled model, which needs -o", positional=True
    )  # fmt: skip
    output: str | None = opt(
        None, nonempty, "DIR", "Model", "Pack directory to write.", flags="-o", shown="the pack itself"
    )
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack at -o.")
    threads: int = thread_count()
    workers: int = opt(
        1, whole(1, 256), "N", "Model", "Passages computed side by side; they share the threads."
    )

    corpus: tuple[str, ...] = opt(
        (), nonempty, "FILE", "Text", "Text files (UTF-8), several after one flag; they are read in turn.",
        shown="random tokens, for a pack without a tokenizer", many=True
    )  # fmt: skip
    tokens: int = opt(65536, count_or_all, "N", "Text", "Tokens to count at most; -1 is all.")
    ctx: int = opt(
        0, whole(0), "N", "Text", "Tokens of a passage, each of which is computed on its own.",
        shown="0 = 512, or the model's limit"
    )  # fmt: skip
    samples: int = opt(
        -1, whole(-1), "N", "Text", "Tokens whose inputs and active neurons are kept for `train`; 0: none.",
        shown="-1 = 16384, or what fits in 2 GiB"
    )  # fmt: skip

    plot: str | None = opt(
        None, nonempty, "FILE", "Output", "Draw the curve and the heat map into a .png, .svg or .pdf.",
        shown="none"
    )  # fmt: skip
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


@dataclass(frozen=True)
class EvalOptions:
    """Measure how well a model predicts a text: its perplexity; and how far it is from another."""

    model: str | None = opt(
        None, str, "PATH", "Model",
        "A pack, or a Hugging Face directory or GGUF file, packed once into the cache. "
        "Or org/name[@revision][:file or quant] from the hub, fetched once.",
        flags="-m", shown="the bundled model", positional=True
    )  # fmt: skip
    activation: str | None = which_activation()
    sparsity: str = sparsity_mode()
    threads: int = thread_count()

    text: str = opt(
        "", nonempty, "FILE", "Text", "The text to predict, UTF-8, such as WikiText-2's raw test split.",
        flags="-f --file", required=True
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

    against: str | None = opt(
        None, nonempty, "exact|off|PATH", "Comparison",
        "Compare predictions with those of this sparsity, or of another model with the same tokens.",
        shown="none"
    )  # fmt: skip

    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


TRAIN_KINDS = ("auto", "mlp", "svd", "sign")


@dataclass(frozen=True)
class TrainOptions:
    """Make predictors of active neurons from a profiled pack's samples, for --sparsity predict."""

    model: str | None = opt(
        None, str, "PACK", "Model", "The pack, after `thermocline profile`.", flags="-m", positional=True,
        required=True
    )  # fmt: skip
    kind: str = opt(
        "auto", one_of(*TRAIN_KINDS), "|".join(TRAIN_KINDS), "Model",
        "mlp: trained, needs PyTorch; svd: the gate at low rank; sign: its signs. auto: for each layer what "
        "reads the fewest bytes, none where that is exact."
    )  # fmt: skip
    max_kld: float = opt(
        0.005,
        real(0),
        "NATS",
        "Fidelity",
        "Mean KL divergence from exact that is allowed, per token, on each text it is measured on.",
    )
    max_ppl: float = opt(
        0.5,
        real(0),
        "PERCENT",
        "Fidelity",
        "Change of perplexity from exact that is allowed over all of them, in percent.",
    )
    text: str | None = opt(
        None, nonempty, "FILE", "Fidelity", "The text (UTF-8) both are measured on; none of the profile's.",
        flags="-f --file",
        shown="what the model itself writes, and five unlike ones: prose, French, an encyclopaedia, code"
    )  # fmt: skip
    ctx: int = opt(
        0, whole(0), "N", "Fidelity", "Tokens of a window of it, the second half of which is scored.",
        flags="-c --ctx-size", shown="0 = 512, or the model's limit"
    )  # fmt: skip
    limit: int = opt(16, whole(1), "N", "Fidelity", "Windows of a text at most.", flags="--chunks")
    minutes: float = opt(
        30.0, real(0), "M", "Fitting",
        "After half of this no wider predictors are trained, after three quarters none; after all of it "
        "the best found so far is taken, once it has read a window of each text."
    )  # fmt: skip
    seed: int = opt(0, whole(0, 2**31), "N", "Fitting", "Equal seeds give equal predictors.", flags="-s")
    threads: int = thread_count()
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")


@dataclass(frozen=True)
class PlanOptions:
    """Say which neurons go to the GPU, to RAM and to disk, and how fast a token then is."""

    model: str | None = opt(
        None, str, "PACK|SHAPE", "Model",
        "A pack; or a known shape, such as opt-30b (a wrong one lists them all), or a config.json.",
        flags="-m", shown="the bundled model", positional=True
    )  # fmt: skip
    format: str = opt("q8_0", one_of(*FORMATS), "|".join(FORMATS), "Model", "Weight format of a shape.")
    activation: str | None = which_activation()
    sparsity: str = sparsity_mode()
    active: float | None = opt(
        None, real(0.001, 0.9), "X", "Model",
        "Mean fraction of neurons active for a token, instead of a profile; makes dense shapes ReLU models.",
        shown="the pack's profile, else 0.1"
    )  # fmt: skip
    skew: float = opt(
        0.26, real(0.001, 0.8), "X", "Model",
        "Without a profile: fraction of a layer's neurons that makes 80% of the activations."
    )  # fmt: skip
    predictor_share: float = opt(
        0.06, real(0, 0.5), "X", "Model",
        "Of a shape, with --sparsity predict: its predictors' size, of the model's."
    )  # fmt: skip

    vram: float | None = memory_limit("Memory of the GPU that may be used.", "all the hardware has", "Budget")
    ram: float | None = memory_limit(
        "Memory that may be used.", "all the hardware has; here, all that is free", "Budget"
    )
    ctx: int = opt(
        0, whole(0), "N", "Budget", "Context length in tokens, of each sequence of the batch.",
        shown="0 = the model's limit, but at most 4096"
    )  # fmt: skip
    batch: int = opt(1, whole(1, 1024), "N", "Budget", "Sequences that are computed together.")

    hardware: str | None = opt(
        None, nonempty, "FILE|NAME", "Hardware",
        "What `thermocline doctor -o FILE` wrote, or a known machine (a wrong name lists them all).",
        shown="this machine, measured now"
    )  # fmt: skip
    threads: int = thread_count("Threads to measure this machine with.", "Hardware")
    objective: str = opt(
        "time", one_of("time", "frequency"), "time|frequency", "Hardware",
        "time: the shortest token; frequency: the most activations on the GPU, as PowerInfer's solver."
    )  # fmt: skip

    output: str | None = opt(
        None, nonempty, "FILE", "Output", "Write the plan as JSON.", flags="-o", shown="none"
    )
    force: bool = opt(False, switch, None, "Output", "Replace an existing file at -o.")
    json: bool = json_output()
    quiet: bool = quiet_output("no remarks")
