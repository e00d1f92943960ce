"""Options that several commands have."""

from __future__ import annotations

from typing import Any

from thermocline.cluster.address import ray_address
from thermocline.options import (
    AS_FLAG,
    BARE,
    BY_POSITION,
    nonempty,
    one_of,
    opt,
    real,
    some_of,
    switch,
    whole,
)
from thermocline.session.options import (
    ACTIVATIONS,
    CACHE_TYPES,
    FORMATS,
    LEAST_DISK,
    MOST_GIB,
    MOST_READ,
    PROMPT_CACHE_DISK,
    SPARSITIES,
    SWITCHES,
)

MODEL_HELP = (
    "A pack; a GGUF file, which runs in place; or a Hugging Face directory, packed once into the cache."
)
HUB_HELP = f"{MODEL_HELP} Or org/name[@revision][:file or quant] from the hub, fetched once."


def which_model(*, positional: bool) -> Any:
    help = MODEL_HELP if positional else HUB_HELP
    given = BY_POSITION if positional else AS_FLAG
    return opt(None, str, "PATH", "Model", help, flags="-m", shown="the bundled model", given=given)


def weight_format(help: str) -> Any:
    return opt(None, one_of(*FORMATS), "|".join(FORMATS), "Model", help, shown="a GGUF's own, else q8_0")


def cache_directory() -> Any:
    shown = "the system's cache directory"
    return opt(None, nonempty, "DIR", "Model", "Where those packs are kept.", shown=shown)


def sparsity_mode() -> Any:
    help = (
        "exact: skip neurons whose activation is zero, with the same answer; predict: also those that the "
        "pack's predictors take for zero, with nearly the same answer; off: compute all."
    )
    return opt("exact", one_of(*SPARSITIES), "|".join(SPARSITIES), "Model", help)


def _cache_type(of: str, flags: str, group: str) -> Any:
    help = (
        f"Type of {of} in the cache. q8_0 takes 53% of f16's memory, q4_0 28%; both are rotated (Hadamard) "
        "before they are quantised. On the CPU."
    )
    return opt("f16", one_of(*CACHE_TYPES), "|".join(CACHE_TYPES), group, help, flags=flags)


def cache_type_keys(group: str = "Model") -> Any:
    return _cache_type("keys", "-ctk", group)


def cache_type_values(group: str = "Model") -> Any:
    return _cache_type("values", "-ctv", group)


def prompt_cache_memory(group: str = "Model") -> Any:
    help = (
        "Memory for keys and values of finished requests, beside those of running ones: a prompt that begins "
        "alike computes only what is new."
    )
    return opt(0.0, real(0, MOST_GIB), "GIB", group, help)


def prompt_cache_directory(group: str = "Model") -> Any:
    help = (
        "Keep them in this directory, too, where the next start finds them. Several processes may share it. "
        "It holds what was asked and answered, in a form that can be read back."
    )
    return opt(None, nonempty, "DIR", group, help, shown="none")


def prompt_cache_space() -> Any:
    help = "Space that this directory may take; what was not used for the longest time goes first."
    return opt(PROMPT_CACHE_DISK, real(LEAST_DISK, MOST_GIB), "GIB", "Model", help)


def which_activation() -> Any:
    help = (
        "The activation of an FFN with ReLU, where a config or GGUF leaves it open: relu, on the gate alone; "
        "drelu, on gate and up."
    )
    return opt(None, one_of(*ACTIVATIONS), "|".join(ACTIVATIONS), "Model", help, shown="what the model says")


def thread_count(help: str = "Threads to compute with.", group: str = "Model") -> Any:
    shown = "0 = the physical cores this process may use"
    return opt(0, whole(-1, 1024), "N", group, help, flags="-t", shown=shown)


def json_output() -> Any:
    return opt(False, switch, None, "Output", "Print one JSON object on stdout.")


def quiet_output(silenced: str = "no line of figures") -> Any:
    return opt(False, switch, None, "Output", f"No progress bars and {silenced}.", flags="-q")


def memory_limit(help: str, shown: str, group: str = "Model") -> Any:
    return opt(None, real(0, 1e6), "GIB", group, help, shown=shown)


def which_gpu(group: str = "Model") -> Any:
    help = (
        "off: none; auto: one, if there is one and it helps; or its number. No card has verified this code "
        "yet, so it is asked for. stand-in: RAM that is treated as a GPU's, to try it without one."
    )
    return opt("off", nonempty, "off|auto|N", group, help, flags="--main-gpu")


def gpu_memory(group: str = "Model") -> Any:
    help = "Memory of the GPU that may be used."
    shown = "what is free there"
    return opt(None, real(0, 1e6), "GIB", group, help, shown=shown, flags="--vram-budget")


def switched_off() -> Any:
    help = (
        "To measure the disk tier's parts, work without some of them: bundle (a neuron's rows in one read), "
        "cache (neurons stay in memory), pipeline (computing while reading)."
    )
    return opt((), some_of(*SWITCHES), ",".join(SWITCHES), "Model", help, shown="nothing")


def bounded_reads(help: str = "", group: str = "Model") -> Any:
    help = help or (
        "Megabytes that a token of an answer may read from disk, of a mixture whose experts are there. Those "
        "beyond that are left out, least weight first, so answers are not exact: `thermocline eval "
        "--read-budget` says how far off they are."
    )
    return opt(None, real(0, MOST_READ), "MB", group, help, shown="all that it needs")


def ram_limit() -> Any:
    help = (
        "Memory that all of it may take. Of larger ReLU models neurons, of mixtures experts, of others parts "
        "of FFNs stay on disk."
    )
    return memory_limit(help, "what is free")


def process_count(of: str) -> Any:
    help = (
        f"Processes that share the {of}, each with the model in its memory; they share threads and memory. "
        "With --ray they are its workers, and --threads and --ram are those of each."
    )
    shown = "1; with --ray as many as there are CPUs for"
    return opt(None, whole(1, 4096), "N", "Workers", help, shown=shown)


def on_ray(group: str = "Workers", shown: str = "off") -> Any:
    help = (
        "Use the machines of a Ray cluster: HOST:PORT of its head, ray://HOST:PORT or auto. Or local, as "
        "without an address: a Ray of this machine, which ends with the command."
    )
    return opt(None, ray_address, "ADDRESS", group, help, shown=shown, given=BARE)
