"""Options of a session, with the words for their choices, and the system's cache directory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypedDict, TypeVar

from thermocline.errors import UsageError
from thermocline.model import formats, modes

FORMATS = tuple(formats.FORMATS)
SPARSITIES = tuple(modes.SPARSITIES)
CACHE_TYPES = tuple(modes.CACHE_TYPES)
GENERATION_CONFIGS = ("auto", "off")
ACTIVATIONS = ("drelu", "relu")
LENDS_WEIGHTS = 1  # `kv_tokens` of a session whose weights others use, with keys and values of their own
SWITCHES = ("bundle", "cache", "pipeline")  # of the disk tier
MOST_READ = 1e9  # MB of a read budget
MOST_GIB = 1e6
PROMPT_CACHE_DISK, LEAST_DISK = 20.0, 0.001  # GiB of a prompt cache's directory


@dataclass(frozen=True)
class EngineOptions:
    """Options that a session is opened with. Making one checks them: UsageError names the wrong one."""

    sparsity: str = "exact"
    context: int | None = None  # tokens of prompt and answer; None: the model's limit, but at most 4096
    max_batch: int = 8  # requests computed together
    kv_tokens: int | None = None  # positions of the cache; None: as many full contexts as are cheap
    cache_type_k: str = "f16"  # of keys
    cache_type_v: str = "f16"  # of values
    threads: int | None = None  # None: the physical cores this process may use
    ram: float | None = None  # GiB that all of it may take; None: what is free
    gpu: str = "off"  # "off", "auto", a GPU's number, several with commas, or "stand-in"
    vram: float | None = None  # GiB of a GPU's memory that may be taken; None: what is free
    disable: Sequence[str] = ()  # parts of the disk tier to do without
    read_budget: float | None = None  # MB of experts that a token reads from disk at most; lossy; None: all
    prompt_cache: float = 0.0  # GiB of RAM for keys and values of finished requests, beside running ones
    prompt_cache_dir: str | Path | None = None  # where they are kept on disk; None: nowhere
    prompt_cache_disk: float = PROMPT_CACHE_DISK  # GiB that this directory may take

    def __post_init__(self) -> None:
        _check_choice("sparsity", self.sparsity, SPARSITIES)
        for part in self.disable:
            _check_choice("disable", part, SWITCHES)
        for name in ("cache_type_k", "cache_type_v"):
            _check_choice(name, getattr(self, name), CACHE_TYPES)
        for name in ("threads", "context", "max_batch", "kv_tokens"):
            _check_count(name, getattr(self, name))
        if self.read_budget is not None and not 0 <= self.read_budget <= MOST_READ:
            raise UsageError(f"read_budget is {self.read_budget}; it must be 0 to {MOST_READ:.0e} MB")
        if self.gpu != "off" and self.disable:
            raise UsageError(
                f"--gpu {self.gpu} with --disable {','.join(self.disable)}: the disk tier's parts are "
                "measured without a GPU; leave one of them out"
            )
        self._check_prompt_cache()
        if self.gpu not in ("off", "auto") and self.cache.quantised:
            raise UsageError(
                f"--gpu {self.gpu} with keys and values in {self.cache}: a GPU keeps them as f16; leave one "
                "of them out"
            )

    def _check_prompt_cache(self) -> None:
        for name, least in (("prompt_cache", 0.0), ("prompt_cache_disk", LEAST_DISK)):
            if not least <= (value := getattr(self, name)) <= MOST_GIB:
                raise UsageError(f"{name} is {value}; it must be {least:g} to {MOST_GIB:.0e} GiB")
        if self.prompt_cache_dir is not None and (self.sparsity == "predict" or self.read_budget is not None):
            flag = "--sparsity predict" if self.sparsity == "predict" else "--read-budget"
            raise UsageError(
                f"--prompt-cache-dir with {flag}: keys and values of such answers are not exact, and other "
                "sessions would take them; leave one of them out"
            )

    @property
    def kept(self) -> modes.PromptCacheLimits:
        """The bounds of the prompt cache."""
        where = None if self.prompt_cache_dir is None else str(self.prompt_cache_dir)
        return modes.PromptCacheLimits(
            int(self.prompt_cache * 2**30), where, int(self.prompt_cache_disk * 2**30)
        )

    @property
    def cache(self) -> modes.CacheTypes:
        return modes.CacheTypes(self.cache_type_k, self.cache_type_v)


@dataclass(frozen=True)
class ModelOptions:
    """The model that is opened, and how its files are read. Making one checks them, as `EngineOptions`."""

    model: str | Path | None = None  # a directory, a GGUF file, a name on the hub; None: the bundled model
    format: str | None = None  # of weights that have to be packed; None: a GGUF's own, else q8_0
    activation: str | None = None  # where the model leaves it open
    cache_dir: str | Path | None = None  # of packed models; None: the system's cache directory
    chat_template: str | None = None  # Jinja, in place of the model's own
    generation_config: str = "auto"  # "off": the file with recommended sampling is not read

    def __post_init__(self) -> None:
        if self.activation is not None:
            _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)


class Keywords(TypedDict, total=False):
    """Fields of `EngineOptions` and `ModelOptions` that `LLM` takes as keywords."""

    sparsity: str
    context: int | None
    max_batch: int
    threads: int | None
    ram: float | None
    gpu: str
    vram: float | None
    disable: Sequence[str]
    read_budget: float | None
    cache_type_k: str
    cache_type_v: str
    prompt_cache: float
    prompt_cache_dir: str | Path | None
    prompt_cache_disk: float
    format: str | None
    activation: str | None
    cache_dir: str | Path | None
    chat_template: str | None
    generation_config: str


Options = TypeVar("Options", EngineOptions, ModelOptions)


def changed(options: Options, keywords: Keywords) -> Options:
    """Return the options with the keywords that are fields of theirs."""
    own: Mapping[str, object] = {f.name: keywords[f.name] for f in fields(options) if f.name in keywords}  # type: ignore[literal-required]
    return replace(options, **own)  # type: ignore[arg-type]


def check_keywords(keywords: Keywords) -> None:
    """Raise TypeError for a keyword that is no option, as Python does for a parameter."""
    unknown = keywords.keys() - Keywords.__annotations__.keys()
    if unknown:
        raise TypeError(f"LLM() got an unexpected keyword argument {min(unknown)!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1")


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return the directory of caches on this system: XDG_CACHE_HOME wins everywhere."""
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "thermocline"
    if platform == "win32":
        return (
            Path(environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "thermocline" / "cache"
        )
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "thermocline"
    return Path.home() / ".cache" / "thermocline"
