"""Thermocline: a local LLM engine that computes only the neurons a token needs.

    from thermocline import LLM, SamplingParams
    print(LLM().generate("Once upon a time", SamplingParams(max_tokens=64)).text)

Importing this costs nothing: names are looked up, and what they need is imported, at first use.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thermocline.engine.request import Chunk as Chunk
    from thermocline.engine.request import Completion as Completion
    from thermocline.engine.request import Figures as Figures
    from thermocline.engine.sampler import SamplingParams as SamplingParams
    from thermocline.engine.sampler import TokenLogprobs as TokenLogprobs
    from thermocline.errors import BadFile as BadFile
    from thermocline.errors import IOFailure as IOFailure
    from thermocline.errors import NumericalError as NumericalError
    from thermocline.errors import OutOfBudget as OutOfBudget
    from thermocline.errors import ThermoclineError as ThermoclineError
    from thermocline.errors import Unsupported as Unsupported
    from thermocline.errors import UsageError as UsageError
    from thermocline.llm import LLM as LLM
    from thermocline.llm import Stream as Stream
    from thermocline.text.grammar import Grammar as Grammar

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a program that wants the lines adds its own

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(("LLM", "Stream"), "llm"),
    **dict.fromkeys(("Chunk", "Completion", "Figures"), "engine.request"),
    "Grammar": "text.grammar",
    **dict.fromkeys(("SamplingParams", "TokenLogprobs"), "engine.sampler"),
    **dict.fromkeys(
        (
            "BadFile",
            "IOFailure",
            "NumericalError",
            "OutOfBudget",
            "ThermoclineError",
            "Unsupported",
            "UsageError",
        ),
        "errors",
    ),
}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thermocline' has no attribute {name!r}")
    return getattr(import_module(f"thermocline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
