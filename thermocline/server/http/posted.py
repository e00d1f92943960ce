"""A posted body, from its first byte until its answer begins: between the guard and the application."""

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

BODY = "thermocline.json"  # key of the body in the ASGI scope
Made = TypeVar("Made")
_THREAD_FROM_BYTES = 16 << 10  # parsing and checking a smaller body takes under a millisecond

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


class Posted:
    """A request's body: bytes, then a JSON object, then forgotten."""

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
        """Run work whose time grows with the body. For a large body it runs on the reader's thread."""
        if not self._is_large:
            return what()
        return await asyncio.get_running_loop().run_in_executor(self._reader, what)

    def grow(self, n: int) -> None:
        """Count `n` bytes more, of what a server has kept and is parsed with the body."""
        self._share.add(n)
        self._is_large = self._is_large or n >= _THREAD_FROM_BYTES

    def done(self) -> None:
        """Forget the body and free its part of the budget. May be called again."""
        self._body, self.value = bytearray(), {}
        self._share.give_back()


def posted(scope: MutableMapping[str, Any]) -> Posted:
    """Return the body that the guard has checked: a JSON object, valid Unicode, finite numbers."""
    found: Posted = scope[BODY]
    return found


def return_memory() -> None:
    """Make glibc return a large body's memory to the system as soon as it is freed.

    By default glibc learns from the first large body to keep such blocks. A second round of thirty bodies of
    7 MiB, 18 of them at once, then took 345 MiB instead of 140.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 256 << 10)
