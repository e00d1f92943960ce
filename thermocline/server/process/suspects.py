"""Suspects: requests that were in the engine when it crashed, any of which may have crashed it.

Each suspect is computed alone the next time. One that ends is cleared. One that crashes the engine again is
condemned: it is not computed any more.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from thermocline.engine.sampler import SamplingParams
from thermocline.errors import ThermoclineError
from thermocline.server.process.messages import Submit

KEPT = 1024  # suspects; the one seen longest ago is dropped first


class CrashesEngine(ThermoclineError):
    """The engine crashed twice at this request, the second time with no other request in it."""


@dataclass(frozen=True)
class Job:
    """A command with its fingerprint, which is computed only while there are suspects."""

    command: Submit

    @cached_property
    def print(self) -> str:
        """A hash of the prompt and all options except the seed, which the server may have drawn."""
        params = self.command.params
        asked = repr(replace(params, seed=None) if isinstance(params, SamplingParams) else params).encode()
        return hashlib.sha256(array("q", self.command.ids).tobytes() + asked).hexdigest()[:16]


class Suspects:
    def __init__(self) -> None:
        self._crashes: OrderedDict[str, int] = OrderedDict()

    def has(self, job: Job) -> bool:
        """Tell whether the job is a suspect, which has to be computed alone."""
        return bool(self._crashes) and job.print in self._crashes

    def check(self, job: Job) -> None:
        """Raise CrashesEngine if the job is condemned."""
        if self.has(job) and self._crashes[job.print] > 1:
            raise CrashesEngine(
                f"the engine crashed twice at this request ({job.print}); it is not computed again"
            )

    def crashed(self, jobs: Iterable[Job]) -> list[str]:
        """Count a crash with these jobs. Return the fingerprint that it condemns, if any (one at most)."""
        prints = {job.print for job in jobs}
        for each in prints:
            self._crashes[each] = self._crashes.pop(each, 0) + 1
        while len(self._crashes) > KEPT:
            self._crashes.popitem(last=False)
        return [each for each in prints if self._crashes.get(each, 0) > 1]

    def clear(self, job: Job) -> None:
        """Forget a suspect that came to its end."""
        if self.has(job):
            del self._crashes[job.print]
