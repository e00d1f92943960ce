"""The messages between the process that speaks HTTP and the one that computes: plain values, pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thermocline.engine.engine import Counts
from thermocline.engine.live_activity import ActivityReport
from thermocline.engine.request import Asked, Chunk, Figures
from thermocline.engine.sampler import TokenLogprobs
from thermocline.files.small_files import SmallFiles
from thermocline.model.spec import ModelSpec
from thermocline.offline.quick_bench import QuickBench
from thermocline.ops.interface import F32

# ---- to the engine


@dataclass(frozen=True)
class Submit:
    job: int
    ids: Sequence[int]
    params: Asked


@dataclass(frozen=True)
class Cancel:
    job: int


@dataclass(frozen=True)
class Subscribe:
    """Turn reports of the layers' activity on (a client watches) or off (nobody does)."""

    on: bool


@dataclass(frozen=True)
class Load:
    """Load the model within so much memory. The answer to `MemoryNeeded`."""

    ram: float  # GiB


@dataclass(frozen=True)
class Measure:
    """Measure the machine, unless there is something to compute."""


@dataclass(frozen=True)
class Stop:
    """End after the current step."""


# ---- from the engine


@dataclass(frozen=True)
class LoadProgress:
    """The progress of loading, sent before the engine is ready."""

    what: str  # downloading, packing, loading
    done: int
    size: int


@dataclass(frozen=True)
class MemoryNeeded:
    """The model was looked at, and is loaded once `Load` comes: several engines share a budget."""

    nbytes: int  # of the whole budget


@dataclass(frozen=True)
class LogLine:
    """A record of the engine's log, for the server's loggers."""

    name: str  # of the logger
    level: int
    line: str


@dataclass(frozen=True)
class ModelOpened:
    """The model's files are known: requests can be checked while the weights are read."""

    spec: ModelSpec
    files: SmallFiles  # the tokenizer, the chat template
    context: int
    max_batch: int
    template: str | None  # replaces the model's own
    recommended: Mapping[str, Any] = field(
        default_factory=dict
    )  # sampling options from generation_config.json


@dataclass(frozen=True)
class Ready:
    load_s: float
    memory_bytes: int


@dataclass(frozen=True)
class EngineError:
    """The engine cannot start. `error` names a class of thermocline.errors."""

    error: str
    message: str


@dataclass(frozen=True)
class Token:
    job: int
    chunk: Chunk


@dataclass(frozen=True)
class Finished:
    job: int
    finish_reason: str
    seed: int
    figures: Figures
    prompt_logprobs: tuple[TokenLogprobs, ...]  # of all tokens but the first, if requested
    stop: str | None = None  # the stop string that ended the answer
    vector: F32 | None = None  # of a prompt that was read


@dataclass(frozen=True)
class Failed:
    """This job failed; others go on. `error` names a class of thermocline.errors."""

    job: int
    error: str
    message: str


@dataclass(frozen=True)
class Cancelled:
    """A cancelled job has left the engine."""

    job: int


@dataclass(frozen=True)
class Heartbeat:
    """The engine's state, sent between two steps and while idle."""

    counts: Counts | None = None
    steps: int = 0
    longest_step_s: float = 0.0
    tiers: dict[str, float] | None = None  # counts of the disk: needed, missed, bytes, waited_s
    activity: ActivityReport | None = None  # now and then, while a client watches and tokens are made


@dataclass(frozen=True)
class Busy:
    """Sent during a long step that makes progress."""


@dataclass(frozen=True)
class Measured:
    """The end of `Measure`. `found` is None if it was broken off, because a request came, or it failed."""

    found: QuickBench | None
    error: str = ""  # names a class of thermocline.errors, if it failed
    message: str = ""


Event = Token | Finished | Failed
FromEngine = (
    LoadProgress
    | MemoryNeeded
    | LogLine
    | ModelOpened
    | Ready
    | EngineError
    | Cancelled
    | Heartbeat
    | Busy
    | Measured
    | list[Event]
)
ToEngine = Submit | Cancel | Subscribe | Load | Measure | Stop
