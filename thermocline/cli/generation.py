"""The options of commands that generate text, and the model and parameters that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.cli.console import ProgressBar
from thermocline.cli.environment import cache_dir
from thermocline.cli.shared_options import (
    bounded_reads,
    cache_directory,
    cache_type_keys,
    cache_type_values,
    gpu_memory,
    prompt_cache_directory,
    prompt_cache_memory,
    prompt_cache_space,
    quiet_output,
    ram_limit,
    sparsity_mode,
    switched_off,
    thread_count,
    weight_format,
    which_activation,
    which_gpu,
    which_model,
)
from thermocline.errors import UsageError
from thermocline.options import REPEATED, bias, count_or_all, nonempty, one_of, opt, real, switch, whole
from thermocline.session.options import GENERATION_CONFIGS, EngineOptions, ModelOptions

if TYPE_CHECKING:
    from thermocline.engine.sampler import SamplingParams
    from thermocline.llm import LLM
    from thermocline.text.grammar import Grammar

MODELS_OR = "the model's, else {}"


@dataclass(frozen=True)
class GenerationOptions:
    """The options of every command that generates text."""

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
    read_budget: float | None = bounded_reads()
    disable: tuple[str, ...] = switched_off()
    cache_type_k: str = cache_type_keys()
    cache_type_v: str = cache_type_values()
    prompt_cache: float = prompt_cache_memory()
    prompt_cache_dir: str | None = prompt_cache_directory()
    prompt_cache_disk: float = prompt_cache_space()

    n_predict: int | None = opt(
        None, count_or_all, "N", "Generation", "Tokens to generate at most.",
        flags="-n --predict --max-tokens", shown="-1 = until the model ends or the context is full"
    )  # fmt: skip
    stop: tuple[str, ...] = opt(
        (), nonempty, "TEXT", "Generation", "Stop before this text appears. May be repeated.",
        flags="-r --reverse-prompt", given=REPEATED
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
        flags="-l", given=REPEATED
    )  # fmt: skip

    quiet: bool = quiet_output()


@dataclass(frozen=True)
class GrammarOptions:
    """A schema or a grammar that answers are held to: one at most. A server's requests have their own."""

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


def open_llm(
    o: GenerationOptions, progress: ProgressBar, chat_template: str | None = None, max_batch: int = 1
) -> LLM:
    """Open everything but the weights: those are read once the prompt is known to fit."""
    from thermocline.llm import LLM

    files, options = model_options(o, chat_template), engine_options(o, max_batch)
    return LLM(files=files, options=options, progress=progress.at, lazy=True)


def model_options(o: GenerationOptions, chat_template: str | None) -> ModelOptions:
    """Return which model the command line names, and how its files are read."""
    return ModelOptions(
        model=o.model,
        format=o.format,
        activation=o.activation,
        cache_dir=cache_dir(o.cache_dir),
        chat_template=chat_template,
        generation_config=o.generation_config,
    )


def engine_options(o: GenerationOptions, max_batch: int) -> EngineOptions:
    """Return the session's options that the command line names."""
    return EngineOptions(
        sparsity=o.sparsity,
        context=o.ctx_size or None,
        max_batch=max_batch,
        threads=o.threads if o.threads > 0 else None,
        ram=o.ram,
        gpu=o.gpu,
        vram=o.vram,
        disable=o.disable,
        read_budget=o.read_budget,
        cache_type_k=o.cache_type_k,
        cache_type_v=o.cache_type_v,
        prompt_cache=o.prompt_cache,
        prompt_cache_dir=o.prompt_cache_dir,
        prompt_cache_disk=o.prompt_cache_disk,
    )


def sampling(o: GenerationOptions) -> dict[str, Any]:
    """Return the parameters that are given, by `SamplingParams`' names: the rest is the model's own."""
    free = {
        "temperature": o.temp, "top_k": o.top_k, "top_p": o.top_p, "min_p": o.min_p,
        "repeat_penalty": o.repeat_penalty, "repeat_last_n": o.repeat_last_n
    }  # fmt: skip
    return {
        **{name: value for name, value in free.items() if value is not None},
        **({} if o.n_predict is None else {"max_tokens": o.n_predict if o.n_predict > 0 else None}),
        "presence_penalty": o.presence_penalty,
        "frequency_penalty": o.frequency_penalty,
        "seed": o.seed if o.seed >= 0 else None,
        "stop": o.stop,
        "logit_bias": dict(o.logit_bias),
        "ignore_eos": o.ignore_eos,
    }


def params_for(llm: LLM, o: GenerationOptions, grammar: Grammar | None) -> SamplingParams:
    from thermocline.engine.generation_config import completed

    return replace(completed(sampling(o), llm.recommended), grammar=grammar)


def grammar_of(o: GrammarOptions) -> Grammar | None:
    """Return the grammar that answers are held to. A bad one is refused before a model is opened."""
    given = {
        "--json-schema": o.json_schema, "--json-schema-file": o.json_schema_file,
        "--grammar": o.grammar, "--grammar-file": o.grammar_file
    }  # fmt: skip
    asked = [(flag, text) for flag, text in given.items() if text is not None]
    if not asked:
        return None
    from thermocline.cli.conversation import text_of
    from thermocline.text import grammar_matcher
    from thermocline.text.grammar import Grammar

    if len(asked) > 1:
        raise UsageError(f"{' and '.join(flag for flag, _ in asked)}: only one of them can be kept to")
    flag, text = asked[0]
    text = text_of(Path(text)) if flag.endswith("-file") else text
    found = Grammar.json_schema(text) if flag.startswith("--json") else Grammar.lark(text)
    grammar_matcher.check(found)
    return found
