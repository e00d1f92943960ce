"""Options of the commands that prepare a pack.

Must not know what the options do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thermocline.options import count_or_all, nonempty, opt, switch, whole


def _json() -> Any:
    return opt(False, switch, None, "Output", "Print one JSON object on stdout.")


def _quiet() -> Any:
    return opt(False, switch, None, "Output", "No progress bars and no remarks.", flags="-q")


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
    threads: int = opt(
        0, whole(-1, 1024), "N", "Model", "Threads to compute with.", flags="-t",
        shown="0 = the physical cores this process may use"
    )  # fmt: skip
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
        shown="-1 = 4096, or what fits in 2 GiB"
    )  # fmt: skip

    plot: str | None = opt(
        None, nonempty, "FILE", "Output", "Draw the curve and the heat map into a .png, .svg or .pdf.",
        shown="none"
    )  # fmt: skip
    json: bool = _json()
    quiet: bool = _quiet()
