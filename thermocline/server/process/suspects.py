"""Requests that were in the engine when it crashed: which of them crash it, and are not computed again.

A crash tells only that one of its requests may be to blame. Each of them is computed alone the next time: one
that ends is cleared, one that crashes the engine again is condemned. Must not know HTTP or processes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from thermocline.errors import ThermoclineError
from thermocline.server.process.messages import Submit

KEPT = 1024  # suspects, the one that was seen longest ago leaves first


class CrashesEngine(ThermoclineError):
    """The engine crashed twice at this request, the second time at it alone."""


@dataclass(frozen=True)
class Job:
    """A command and the fingerprint of what it asks for, which is only computed where there are suspects."""

    command: Submit

    @cached_property
    def print(self) -> str:
        """A hash of the prompt and the options but the seed, which the server draws where none is given."""
        asked = repr(replace(self.command.params, seed=None)).encode()
        return hashlib.sha256(array("q", self.command.ids).tobytes() + asked).hexdigest()[:16]


class Suspects:
    def __init__(self) -> None:
        self._crashes: OrderedDict[str, int] = OrderedDict()

    def has(self, job: Job) -> bool:
        """Tell whether it has to be computed alone."""
        return bool(self._crashes) and job.print in self._crashes

    def check(self, job: Job) -> None:
        """Raise CrashesEngine where it is condemned."""
        if self.has(job) and self._crashes[job.print] > 1:
            raise CrashesEngine(
                f"the engine crashed twice at this request ({job.print}); it is not computed again"
            )

    def crashed(self, jobs: Iterable[Job]) -> list[str]:
        """Take note of what was in the engine; -> fingerprints that are condemned by it: of one at most."""
        prints = {job.print for job in jobs}
        for each in prints:
            self._crashes[each] = self._crashes.pop(each, 0) + 1
        while len(self._crashes) > KEPT:
            self._crashes.popitem(last=False)
        return [each for each in prints if self._crashes.get(each, 0) > 1]

    def clear(self, job: Job) -> None:
        """It came to its end."""
        if self.has(job):
            del self._crashes[job.print]
