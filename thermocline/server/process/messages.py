"""What passes between the process that speaks HTTP and the one that computes.

Plain values only: both sides pickle them. Must not know HTTP or the engine's insides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thermocline.engine.engine import Counts
from thermocline.engine.live_activity import ActivityReport
from thermocline.engine.request import Chunk, Figures
from thermocline.engine.sampler import SamplingParams, TokenLogprobs

# ---- to the engine


@dataclass(frozen=True)
class Submit:
    job: int
    ids: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True)
class Cancel:
    job: int


@dataclass(frozen=True)
class Look:
    """Somebody wants to see what the layers do, or nobody does any more."""

    on: bool


@dataclass(frozen=True)
class Stop:
    """End as soon as the present step is over."""


# ---- from it


@dataclass(frozen=True)
class Progress:
    """Before it is ready."""

    what: str  # downloading, packing, loading
    done: int
    size: int


@dataclass(frozen=True)
class Told:
    """A line for whoever runs the server."""

    line: str


@dataclass(frozen=True)
class Opened:
    """The model's files are known, its weights are still to be read: requests can be checked."""

    path: str  # of the pack
    context: int
    max_batch: int
    template: str | None  # in place of the model's own
    recommended: Mapping[str, Any] = field(default_factory=dict)  # sampling, by the model's makers


@dataclass(frozen=True)
class Ready:
    load_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Refused:
    """It will never be ready. `error`: of thermocline.errors."""

    error: str
    message: str


@dataclass(frozen=True)
class Token:
    job: int
    chunk: Chunk


@dataclass(frozen=True)
class Ended:
    job: int
    finish_reason: str
    seed: int
    figures: Figures
    prompt_logprobs: tuple[TokenLogprobs, ...]  # of the prompt's tokens after the first, if asked for


@dataclass(frozen=True)
class Failed:
    """This request; the others go on. `error`: of thermocline.errors."""

    job: int
    error: str
    message: str


@dataclass(frozen=True)
class Dropped:
    """A cancelled job has left the engine."""

    job: int


@dataclass(frozen=True)
class Beat:
    """Sent between two steps, and while idle: what the engine holds."""

    counts: Counts | None = None
    steps: int = 0
    longest_step_s: float = 0.0
    tiers: dict[str, float] | None = None  # what the disk did: needed, missed, bytes, waited_s
    activity: ActivityReport | None = None  # now and then, while somebody looks and tokens are made


@dataclass(frozen=True)
class Pulse:
    """Sent within a step that takes long: it has got further."""


Event = Token | Ended | Failed
FromEngine = Progress | Told | Opened | Ready | Refused | Dropped | Beat | Pulse | list[Event]
ToEngine = Submit | Cancel | Look | Stop
