"""uvicorn on a socket, with bounds that it lacks: on time, memory and connections; and how the server stops.

The guard decides which requests pass. This file decides which connections may speak, and how slowly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from thermocline.errors import ThermoclineError, place_of
from thermocline.server.http.guard import SURPLUS, Access, Admission, App, Guard
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.listener import Listener, allow_files
from thermocline.server.http.refusal import SECURITY_HEADERS, Refusal

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.4  # for cancelled requests to send their error, and for the application to end
_POLL_S = 0.05
_RESERVED = 8  # connections beyond the limit, for /health


class _Counted:
    """A transport that counts written bytes. Less the buffered ones, that is what the client has taken."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Protocol(H11Protocol):
    """One connection. `check` is called about ten times a second and ends a connection that is too slow."""

    def __init__(self, limits: ServerLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._head_since: float | None = None  # when the wait for a request's head began
        self._drain_since: float | None = None  # when an unwanted body began to arrive
        self._taken = 0
        self._taken_at = 0.0
        self.is_surplus = False

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # uvicorn writes while less than `high` is buffered; half the limit leaves space for one more piece.
        transport.set_write_buffer_limits(high=self._limits.limit_buffer_bytes // 2)
        self._counted = _Counted(transport)
        super().connection_made(cast(asyncio.Transport, self._counted))
        self._head_since = self._taken_at = self.opened = self.loop.time()
        others = cast("set[Protocol]", self.connections - {self})
        within = [c for c in others if not c.is_surplus]
        self.is_surplus = len(within) >= self._limits.limit_connections and not self._makes_room(within)
        if (
            self.is_surplus
        ):  # the guard answers: closing before the request is read would reset the connection
            self.app_state = {**self.app_state, SURPLUS: True}
            if len(others) - len(within) >= _RESERVED:
                self._makes_room([c for c in others if c.is_surplus])

    def _makes_room(self, others: list[Protocol]) -> bool:
        """Close the oldest idle connection of `others`, if there is one."""
        idle = min((c for c in others if c.is_idle), key=lambda c: c.opened, default=None)
        if idle is None:
            return False
        idle.transport.abort()
        self.connections.discard(idle)  # uvicorn removes it later, after others may have come
        return True

    def data_received(self, data: bytes) -> None:
        if self._head_since is None and self.conn.their_state is h11.IDLE:
            self._head_since = self.loop.time()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_since = None

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request. uvicorn calls this while it handles h11's error, which has a status."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        too_large = f"the headers exceed {self._limits.limit_header_bytes} bytes"
        self.refuse(status, too_large if status == 431 else f"not HTTP: {error}" if error else msg)

    def refuse(self, status: int, message: str) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refusal = Refusal(status, message, headers={"connection": "close"})
            body = refusal.body()
            headers = [*refusal.http_headers(body), *SECURITY_HEADERS]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def check(self, now: float) -> None:
        if self._head_since is not None and now - self._head_since > self._limits.limit_header_s:
            self.refuse(408, "the request's headers arrived too slowly")
        drains = self.is_idle and self.conn.their_state is h11.SEND_BODY
        self._drain_since = (self._drain_since or now) if drains else None
        too_long = self._drain_since is not None and now - self._drain_since > self._limits.limit_body_s
        if too_long or self._is_stalled(now):
            self._reset()

    def _reset(self) -> None:
        """End the connection without sending buffered bytes; the kernel's buffer may hold megabytes, too."""
        no_linger = struct.pack("ii" if os.name == "posix" else "hh", 1, 0)
        with contextlib.suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        self.transport.abort()

    def _is_stalled(self, now: float) -> bool:
        waiting = self.transport.get_write_buffer_size()
        taken = self._counted.written - waiting
        if not waiting or taken != self._taken:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at > self._limits.limit_write_stall_s


class HttpServer(uvicorn.Server):
    """uvicorn's server that stops in steps: no new connections, a grace period for requests, then an end."""

    def __init__(self, config: uvicorn.Config, limits: ServerLimits) -> None:
        super().__init__(config)
        self._limits = limits
        self._loop: asyncio.AbstractEventLoop | None = None
        self._troubles: set[str] = set()

    def _mishap(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an error that asyncio could not deliver: one line, once for each kind.

        asyncio itself prints a traceback each time. Without free files that is thousands a second, and a
        bug's message may quote a prompt.
        """
        if self.should_exit:  # a pending accept fails once its socket is closed
            return
        error = context.get("exception")
        where = "" if error is None else place_of(error)
        what = context["message"] if error is None else type(error).__name__
        if isinstance(error, OSError):
            what = error.strerror or what
        if (line := f"the server: {what}{where}") not in self._troubles:
            self._troubles.add(line)
            log.warning(line)

    async def startup(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._mishap)
        await super().startup(sockets)
        if self.should_exit:  # `stop` came before the sockets were open
            self._stop_listening()

    async def on_tick(self, counter: int) -> bool:
        self._check_connections()
        return await super().on_tick(counter)

    def _check_connections(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            cast(Protocol, connection).check(now)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.stop()  # unlike uvicorn, do not raise the signal again: a stopped server exits with 0

    def stop(self) -> None:
        """Stop the server; callable from any thread. A second call skips the grace period."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
                self._loop.call_soon_threadsafe(self._stop_listening)

    def _stop_listening(self) -> None:
        for server in getattr(self, "servers", []):
            server.close()

    async def shutdown(self, sockets: Any = None) -> None:
        loop, state = asyncio.get_running_loop(), self.server_state
        self._stop_listening()
        for connection in list(state.connections):
            with contextlib.suppress(h11.LocalProtocolError):
                connection.shutdown()
        until = loop.time() + self._limits.limit_grace_s
        while (state.connections or state.tasks) and not self.force_exit and loop.time() < until:
            self._check_connections()
            await asyncio.sleep(_POLL_S)
        if tasks := set(state.tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for connection in list(state.connections):
            cast(Protocol, connection).transport.close()
        await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.lifespan.shutdown(), LAST_WORDS_S)


def _surviving_failure(app: App, failures: list[Exception]) -> App:
    """Keep the error of a failed startup, which uvicorn drops, for the person who started the server."""

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except Exception as e:
            if scope["type"] == "lifespan":
                failures.append(e)
            raise

    return noted


def _config(app: App, limits: ServerLimits) -> uvicorn.Config:
    """Return uvicorn's configuration with every default that we do not want turned off."""
    return uvicorn.Config(
        cast(Any, app),
        loop="asyncio",
        http=cast(Any, partial(Protocol, limits)),
        ws="none",
        interface="asgi3",
        workers=1,  # else uvicorn reads $WEB_CONCURRENCY
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=limits.limit_header_bytes,
        timeout_keep_alive=cast(int, limits.limit_keep_alive_s),
    )


def run(
    app: App,
    listener: Listener,
    *,
    limits: ServerLimits,
    admission: Admission,
    access_log: bool = False,
    started: Callable[[HttpServer], None] | None = None,
) -> None:
    """Serve `app` until SIGINT or SIGTERM. The app's lifespan startup must not wait for the model to load.

    `access_log`: log a line for each request. `started` gets the server, to stop it.
    """
    connections = allow_files(limits.limit_connections)
    if connections < limits.limit_connections:
        limits = replace(limits, limit_connections=connections)
        log.warning(f"{connections} connections at most: this process may have few open files (ulimit -n)")
    a, names = admission, listener.host_names(admission.hosts)
    access = Access.of(a.keys, names, a.origins, a.public, addresses=listener.takes_addresses)
    failures: list[Exception] = []
    guard = Guard(app, access, limits, slots=a.slots, methods=a.methods, access_log=access_log)
    app = _surviving_failure(guard, failures)
    server = HttpServer(_config(app, limits), limits)
    if started is not None:
        started(server)
    try:
        server.run([listener.socket])
    except SystemExit:
        raise (failures or [ThermoclineError("the server could not be started")])[0] from None
    finally:
        listener.close()
