"""Options of the commands that prepare a pack.

Must not know what the options do.
"""

from __future__ import annotations

from dataclasses import dataclass

from thermocline.options import nonempty, one_of, opt, switch, whole

SPARSITIES = ("exact", "off")


@dataclass(frozen=True)
class EvalOptions:
    """Measure how well a model predicts a text: its perplexity; and how far it is from another."""

    model: str | None = opt(
        None, str, "PATH", "Model",
        "A pack, or a Hugging Face directory or GGUF file, packed once into the cache. "
        "Or org/name[@revision][:file or quant] from the hub, fetched once.",
        flags="-m", shown="the bundled model", positional=True
    )  # fmt: skip
    sparsity: str = opt(
        "exact", one_of(*SPARSITIES), "|".join(SPARSITIES), "Model",
        "exact: skip neurons whose activation is zero, with the same answer; off: compute all."
    )  # fmt: skip
    threads: int = opt(
        0, whole(-1, 1024), "N", "Model", "Threads to compute with.",
        flags="-t", shown="0 = the physical cores this process may use"
    )  # fmt: skip

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

    json: bool = opt(False, switch, None, "Output", "Print one JSON object on stdout.")
    quiet: bool = opt(False, switch, None, "Output", "No progress bars.", flags="-q")
