"""What was posted, from its first byte until its answer is begun. Between the guard and the application.

Must not know routes, or what is in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from thermocline.server.http.body import Reservation, parse_json, read_body
from thermocline.server.http.limits import ServerLimits

BODY = "thermocline.json"  # where in the scope the application finds it
Made = TypeVar("Made")
_THREAD_FROM_BYTES = 16 << 10  # parsing and checking less than this takes under a millisecond

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Posted:
    """A request's body: bytes, then a JSON object, then nothing but its answer."""

    def __init__(self, share: Reservation, reader: Executor) -> None:
        self._share, self._reader = share, reader
        self._body = bytearray()
        self._is_large = False
        self.value: dict[str, Any] = {}

    async def receive(
        self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limits: ServerLimits
    ) -> None:
        self._body = await read_body(receive, limits, self._share)
        self._is_large = len(self._body) >= _THREAD_FROM_BYTES

    async def parse(self, limits: ServerLimits) -> None:
        self.value, memory = await self.apart(partial(parse_json, self._body, limits))
        self._share.set(memory)

    async def apart(self, what: Callable[[], Made]) -> Made:
        """Work that takes as long as the body is large: of a large one not on the event loop."""
        if not self._is_large:
            return what()
        return await asyncio.get_running_loop().run_in_executor(self._reader, what)

    def done(self) -> None:
        """All that is needed of it is known, and its memory free for others. May be called again."""
        self._body, self.value = bytearray(), {}
        self._share.give_back()


def posted(scope: MutableMapping[str, Any]) -> Posted:
    """The body: a JSON object, within its limits, in valid Unicode, with finite numbers."""
    found: Posted = scope[BODY]
    return found


def return_memory() -> None:
    """Have glibc give the system back what a large body took, as soon as it is freed.

    Left alone it learns from the first one to keep such sizes: of thirty bodies of 7 MiB, of which 18 count
    at once, the second crowd then took 345 MiB for 140.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 << 10)
