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

from thermocline.server.body import Share, parse_json, read_body
from thermocline.server.limits import Limits

BODY = "thermocline.json"  # where in the scope the application finds it
Made = TypeVar("Made")
_THREAD_FROM_BYTES = 16 << 10  # parsing and checking less than this takes under a millisecond

# glibc keeps what is freed for itself: 445 MiB after 30 bodies of 19 MiB, unless it is told to give it back.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


class Posted:
    """A request's body: bytes, then a JSON object, then nothing but its answer."""

    def __init__(self, share: Share, reader: Executor) -> None:
        self._share, self._reader = share, reader
        self._body = bytearray()
        self._is_large = False
        self.value: dict[str, Any] = {}

    async def receive(
        self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limits: Limits
    ) -> None:
        self._body = await read_body(receive, limits, self._share)
        self._is_large = len(self._body) >= _THREAD_FROM_BYTES

    async def parse(self, limits: Limits) -> None:
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
        if self._is_large and _TRIM is not None:
            self._is_large = False
            self._reader.submit(_TRIM, 0)


def posted(scope: MutableMapping[str, Any]) -> Posted:
    """The body: a JSON object, within its limits, in valid Unicode, with finite numbers."""
    found: Posted = scope[BODY]
    return found
