"""The options of each command: one frozen dataclass. `options.py` makes flags, help and variables of it.

Must not know what the options do.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thermocline.cli.generation_options import Form as Form
from thermocline.cli.generation_options import Generation as Generation
from thermocline.cli.generation_options import cache_directory, ram_limit, weight_format, which_model
from thermocline.cli.offline_options import EvalOptions, PlanOptions, ProfileOptions, TrainOptions
from thermocline.cli.serve_options import ServeOptions as ServeOptions
from thermocline.cli.shared_options import (
    gpu_memory,
    json_output,
    quiet_output,
    sparsity_mode,
    switched_off,
    thread_count,
    which_activation,
    which_gpu,
)
from thermocline.options import (
    PREFIX,
    Parse,
    counts,
    json_object,
    nonempty,
    one_of,
    opt,
    options_of,
    pair,
    parse_value,
    real,
    reals,
    some_of,
    switch,
    variable,
    whole,
)
from thermocline.session.options import ACTIVATIONS as ACTIVATIONS
from thermocline.session.options import FORMATS as FORMATS
from thermocline.session.options import GENERATION_CONFIGS as GENERATION_CONFIGS
from thermocline.session.options import SPARSITIES as SPARSITIES
from thermocline.session.options import SWITCHES as SWITCHES
from thermocline.session.options import default_cache_dir

CACHE_POLICIES = ("pinned", "lru", "s3fifo", "lfu", "belady")
BENCH_OUTPUTS = ("md", "csv", "json", "jsonl")


# Variables that are no option's twin: ISA lowers the instruction set, DEBUG=1 shows tracebacks.
ARM = platform.machine().lower() in ("aarch64", "arm64")
OTHER_VARIABLES: dict[str, Parse] = {
    "ISA": one_of("scalar", *(("neon",) if ARM else ("avx2", "avxvnni", "avx512"))),
    "DEBUG": switch,
}


# ---- the options of each command


@dataclass(frozen=True)
class RunOptions(Form, Generation):
    """Generate text from a prompt."""

    prompt: str | None = opt(
        None, str, "TEXT", "Prompt", "Text to continue; `-` reads stdin. The flag may be left out.",
        flags="-p", positional=True
    )  # fmt: skip
    file: str | None = opt(None, nonempty, "PATH", "Prompt", "Read the prompt from a file.", flags="-f")

    n_best: int = opt(
        1,
        whole(1, 64),
        "N",
        "Sampling",
        "Generate N answers with consecutive seeds and print the most likely one.",
    )
    logprobs: int | None = opt(
        None, whole(0, 100), "N", "Output", "With --json: log-probabilities of each token and its N rivals.",
        shown="none"
    )  # fmt: skip
    json: bool = json_output()
    display_prompt: bool = opt(True, switch, None, "Output", "Print the prompt before its continuation.")


@dataclass(frozen=True)
class ChatOptions(Form, Generation):
    """Talk with a model that was made to chat; /help there lists its commands."""

    system: str | None = opt(
        None, nonempty, "TEXT", "Conversation", "What the model is told before the first message.",
        flags="-sys --system-prompt", shown="nothing"
    )  # fmt: skip
    template: str | None = opt(
        None, nonempty, "FILE", "Conversation", "A chat template (Jinja) in place of the model's own.",
        flags="--chat-template-file", shown="the model's"
    )  # fmt: skip
    template_vars: Mapping[str, Any] | None = opt(
        None, json_object, "JSON", "Conversation",
        "Variables for the template, such as '{\"enable_thinking\": false}'.",
        flags="--chat-template-kwargs", shown="none"
    )  # fmt: skip


@dataclass(frozen=True)
class PackOptions:
    """Turn a Hugging Face directory or a GGUF file into a pack, or a pack into a GGUF file."""

    source: str = opt(
        "",
        nonempty,
        "SRC",
        "Model",
        "Hugging Face directory or GGUF file; or a pack.",
        positional=True,
        required=True,
    )
    output: str = opt(
        "",
        nonempty,
        "DIR",
        "Model",
        "Pack directory to write; or, of a pack, NAME.gguf.",
        flags="-o",
        required=True,
    )
    format: str | None = weight_format("Weight format.")
    activation: str | None = which_activation()
    force: bool = opt(False, switch, None, "Model", "Replace an existing pack.")
    json: bool = json_output()
    quiet: bool = quiet_output()


@dataclass(frozen=True)
class SynthOptions:
    """Write a pack with a real model's shape and random weights: for measuring, not for text."""

    shape: str = opt(
        "", nonempty, "SHAPE", "Model",
        "A known shape, such as llama-2-7b or opt-6.7b (a wrong one lists them all), or a config.json.",
        positional=True, required=True
    )  # fmt: skip
    output: str = opt("", nonempty, "DIR", "Model", "Pack directory to write.", flags="-o", required=True)
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


@dataclass(frozen=True)
class InspectOptions:
    """Say what is in a pack: the model, sizes per part, bytes per token."""

    model: str | None = which_model(positional=True)
    json: bool = json_output()


@dataclass(frozen=True)
class VerifyOptions:
    """Check every byte of a pack, and of what was made for it, against their checksums."""

    model: str | None = which_model(positional=True)
    json: bool = json_output()
    quiet: bool = quiet_output()


@dataclass(frozen=True)
class BenchOptions:
    """Measure prompt and token speed, beside the memory speed of the same run."""

    model: str | None = which_model(positional=False)
    format: str | None = weight_format("Weight format of what is packed into the cache.")
    activation: str | None = which_activation()
    cache_dir: str | None = cache_directory()
    threads: tuple[int, ...] = opt(
        (0,), counts(0, 1024), "N,...", "Model", "Threads to compute with; a test is repeated for each.",
        flags="-t", shown="0 = the physical cores this process may use"
    )  # fmt: skip
    sparsity: str = sparsity_mode()
    ram: float | None = ram_limit()
    gpu: str = which_gpu()
    vram: float | None = gpu_memory()
    disable: tuple[str, ...] = switched_off()

    n_prompt: tuple[int, ...] = opt(
        (512,), counts(0), "N,...", "Tests", "Prompt tokens, computed together; 0 leaves this test out.",
        flags="-p", shown="512"
    )  # fmt: skip
    n_gen: tuple[int, ...] = opt(
        (128,), counts(0), "N,...", "Tests", "Tokens, generated one by one; 0 leaves this test out.",
        flags="-n", shown="128"
    )  # fmt: skip
    pg: tuple[tuple[int, int], ...] = opt(
        (), pair, "PP,TG", "Tests", "A prompt of PP tokens, then TG generated ones. May be repeated.",
        flags="-pg", repeat=True
    )  # fmt: skip
    n_depth: tuple[int, ...] = opt(
        (0,), counts(0), "N,...", "Tests", "Tokens already in the context; each test is repeated for each.",
        flags="-d", shown="0"
    )  # fmt: skip
    repetitions: int = opt(5, whole(1, 10000), "N", "Tests", "How often each test is run.", flags="-r")
    text: str | None = opt(
        None,
        nonempty,
        "FILE",
        "Tests",
        "Feed this text, which decides what is sparse.",
        shown="random tokens",
    )
    seed: int = opt(1, whole(0, 2**63 - 1), "N", "Tests", "Seed of the random tokens.", flags="-s")

    trace: str | None = opt(
        None, nonempty, "FILE", "Neurons on disk",
        "Instead of tests: generate -n tokens after -d and record which neurons each needs.", shown="none"
    )  # fmt: skip
    replay: str | None = opt(
        None, nonempty, "FILE", "Neurons on disk",
        "Instead of tests: play a trace through caches; the model does not run.", shown="none"
    )  # fmt: skip
    policy: tuple[str, ...] = opt(
        (), some_of(*CACHE_POLICIES), ",".join(CACHE_POLICIES), "Neurons on disk",
        "With --replay: who leaves a full cache. pinned: nobody; belady: who is needed last, the optimum.",
        shown="all"
    )  # fmt: skip
    budgets: tuple[float, ...] = opt(
        (), reals(0, 1e6), "GIB,...", "Neurons on disk", "With --replay: as --ram, several.",
        shown="places for 10 to 90 % of the neurons"
    )  # fmt: skip
    batch: int = opt(
        1, whole(1, 64), "N", "Neurons on disk", "With --replay: decode N parts of the trace side by side."
    )  # fmt: skip
    hardware: str | None = opt(
        None, nonempty, "FILE|NAME", "Neurons on disk",
        "With --replay: what `thermocline doctor -o FILE` wrote; it must have a disk.",
        shown="this machine, measured now"
    )  # fmt: skip
    plot: str | None = opt(
        None, nonempty, "FILE", "Neurons on disk",
        "With --replay: draw hit rates over the cache's size into a .png, .svg or .pdf.", shown="none"
    )  # fmt: skip

    output_format: str = opt(
        "md", one_of(*BENCH_OUTPUTS), "|".join(BENCH_OUTPUTS), "Output", "How results are printed.",
        flags="-o --output"
    )  # fmt: skip
    quiet: bool = opt(False, switch, None, "Output", "No progress bars.", flags="-q")


@dataclass(frozen=True)
class DoctorOptions:
    """Measure this machine, and say what holds it back."""

    disk: str | None = opt(
        None, nonempty, "DIR", "Model", "Directory whose disk is measured.", shown="the cache directory"
    )
    threads: int = thread_count("Threads to measure memory with.")
    output: str | None = opt(
        None, nonempty, "FILE", "Output", "Write what `plan --hardware FILE` reads.", flags="-o", shown="none"
    )
    json: bool = json_output()


@dataclass(frozen=True)
class PullOptions:
    """Fetch a model from the hub, or its newest version; print where it is."""

    model: str = opt(
        "", nonempty, "NAME", "Model", "Hub name, org/name[@revision][:file or quant].", flags="-m",
        positional=True, required=True
    )  # fmt: skip
    quiet: bool = opt(False, switch, None, "Output", "No progress bars.", flags="-q")


@dataclass(frozen=True)
class LsOptions:
    """List the packs and hub models in the caches."""

    cache_dir: str | None = cache_directory()
    json: bool = json_output()


@dataclass(frozen=True)
class RmOptions:
    """Remove a pack or a hub model, with all its versions, from the caches."""

    name: str = opt(
        "", nonempty, "NAME", "Model", "Model name as `thermocline ls` prints it, or an unambiguous prefix.",
        positional=True, required=True
    )  # fmt: skip
    cache_dir: str | None = cache_directory()
    yes: bool = opt(False, switch, None, "Model", "Do not ask.", flags="-y")


COMMANDS: dict[str, type[Any]] = {
    "run": RunOptions,
    "chat": ChatOptions,
    "serve": ServeOptions,
    "pack": PackOptions,
    "synth": SynthOptions,
    "inspect": InspectOptions,
    "verify": VerifyOptions,
    "profile": ProfileOptions,
    "train": TrainOptions,
    "plan": PlanOptions,
    "bench": BenchOptions,
    "eval": EvalOptions,
    "doctor": DoctorOptions,
    "pull": PullOptions,
    "ls": LsOptions,
    "rm": RmOptions,
}


def check_environment(environ: Mapping[str, str]) -> list[str]:
    """-> THERMOCLINE_ variables that nothing reads: most likely typing mistakes."""
    known = {variable(f.name) for cls in COMMANDS.values() for f, _ in options_of(cls)}
    for name, parse in OTHER_VARIABLES.items():
        known.add(variable(name))
        if variable(name) in environ:
            parse_value(parse, variable(name), environ[variable(name)])
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


# ---- places


def cache_dir(given: str | None) -> Path:
    return Path(given) if given else default_cache_dir(os.environ)


def default_state_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Where this system keeps what a program remembers: XDG_STATE_HOME wins everywhere."""
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base) / "thermocline"
    if platform == "win32":
        return (
            Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "thermocline" / "state"
        )
    if platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "thermocline"
    return Path.home() / ".local" / "state" / "thermocline"


def debugging(environ: Mapping[str, str]) -> bool:
    return environ.get(variable("debug"), "").lower() in ("1", "on", "true", "yes", "enabled")
