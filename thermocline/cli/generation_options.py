"""What every command that generates text can be told. Must not know what the options do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thermocline.cli.shared_options import (
    gpu_memory,
    memory_limit,
    quiet_output,
    sparsity_mode,
    switched_off,
    thread_count,
    which_activation,
    which_gpu,
)
from thermocline.options import bias, count_or_all, nonempty, one_of, opt, real, switch, whole
from thermocline.session.options import FORMATS, GENERATION_CONFIGS

MODEL_HELP = "A pack, or a Hugging Face directory or GGUF file, packed once into the cache."
MODELS_OR = "the model's, else {}"
HUB_HELP = f"{MODEL_HELP} Or org/name[@revision][:file or quant] from the hub, fetched once."


def which_model(*, positional: bool) -> Any:
    help = MODEL_HELP if positional else HUB_HELP
    return opt(None, str, "PATH", "Model", help, flags="-m", shown="the bundled model", positional=positional)


def weight_format(help: str) -> Any:
    return opt(None, one_of(*FORMATS), "|".join(FORMATS), "Model", help, shown="a GGUF's own, else q8_0")


def ram_limit() -> Any:
    help = "Memory that all of it may take. Of a larger ReLU model, neurons needed least stay on disk."
    return memory_limit(help, "what is free")


def cache_directory() -> Any:
    shown = "the system's cache directory"
    return opt(None, nonempty, "DIR", "Model", "Where those packs are kept.", shown=shown)


@dataclass(frozen=True)
class Generation:
    """What every command that generates text can be told."""

    model: str | None = which_model(positional=False)
    format: str | None = weight_format("Weight format of what is packed into the cache.")
    activation: str | None = which_activation()
    cache_dir: str | None = cache_directory()
    ctx_size: int = opt(
        0, whole(0), "N", "Model",
        "Context length in tokens, prompt and answer together; memory for it is reserved up front.",
        flags="-c --context-length --max-model-len", shown="0 = the model's limit, but at most 4096"
    )  # fmt: skip
    threads: int = thread_count()
    sparsity: str = sparsity_mode()
    ram: float | None = ram_limit()
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    disable: tuple[str, ...] = switched_off()

    n_predict: int | None = opt(
        None, count_or_all, "N", "Generation", "Tokens to generate at most.",
        flags="-n --predict --max-tokens", shown="-1 = until the model ends or the context is full"
    )  # fmt: skip
    stop: tuple[str, ...] = opt(
        (), nonempty, "TEXT", "Generation", "Stop before this text appears. May be repeated.",
        flags="-r --reverse-prompt", repeat=True
    )  # fmt: skip
    ignore_eos: bool = opt(False, switch, None, "Generation", "Never generate the end-of-text token.")

    seed: int = opt(
        -1, whole(-1, 2**63 - 1), "N", "Sampling", "Seed of the random choices; the one used is in the JSON.",
        flags="-s", shown="-1 = random"
    )  # fmt: skip
    generation_config: str = opt(
        "auto", one_of(*GENERATION_CONFIGS), "|".join(GENERATION_CONFIGS), "Sampling",
        "auto: what is not said here is as the model's makers recommend, in its generation_config.json; off: "
        "that is not read."
    )  # fmt: skip
    temp: float | None = opt(
        None, real(0), "X", "Sampling", "Temperature; 0 always takes the likeliest token.",
        flags="--temperature", shown=MODELS_OR.format(0.8)
    )  # fmt: skip
    top_k: int | None = opt(
        None,
        whole(0),
        "K",
        "Sampling",
        "Keep the K likeliest tokens; 0 keeps all.",
        shown=MODELS_OR.format(40),
    )
    top_p: float | None = opt(
        None, real(0, 1), "P", "Sampling",
        "Keep the fewest tokens that have this probability together; 1 keeps all.",
        shown=MODELS_OR.format(0.95)
    )  # fmt: skip
    min_p: float | None = opt(
        None, real(0, 1), "P", "Sampling",
        "Drop tokens below this share of the likeliest one's probability; 0 is off.",
        shown=MODELS_OR.format(0.05)
    )  # fmt: skip
    repeat_penalty: float | None = opt(
        None, real(0.01), "X", "Sampling", "Divide recent tokens' positive scores by this; 1 is off.",
        shown=MODELS_OR.format(1.0)
    )  # fmt: skip
    repeat_last_n: int | None = opt(
        None, whole(-1), "N", "Sampling", "How many recent tokens the penalties look at; -1 is all, 0 none.",
        shown="64, or -1 with the model's penalty"
    )  # fmt: skip
    presence_penalty: float = opt(
        0.0, real(-100, 100), "X", "Sampling", "Subtract this from recent tokens' scores; 0 is off."
    )
    frequency_penalty: float = opt(
        0.0, real(-100, 100), "X", "Sampling", "Subtract this once per recent appearance; 0 is off."
    )
    logit_bias: tuple[tuple[int, float], ...] = opt(
        (), bias, "ID(+|-)BIAS", "Sampling", "Add to a token's score: 15043+1.5, 15043-inf. May be repeated.",
        flags="-l", repeat=True
    )  # fmt: skip

    quiet: bool = quiet_output()


@dataclass(frozen=True)
class Form:
    """What an answer has to be, whole: one of these at most. (A server is told by each request.)"""

    json_schema: str | None = opt(
        None, nonempty, "SCHEMA", "Generation", "The answer has to be JSON of this schema; {} is any.",
        flags="-j", shown="anything"
    )  # fmt: skip
    json_schema_file: str | None = opt(
        None, nonempty, "FILE", "Generation", "The schema is in this file.", flags="-jf", shown="none"
    )
    grammar: str | None = opt(
        None, nonempty, "GRAMMAR", "Generation", "The answer has to be of this Lark grammar.",
        shown="anything"
    )  # fmt: skip
    grammar_file: str | None = opt(
        None, nonempty, "FILE", "Generation", "The grammar is in this file.", shown="none"
    )
