"""A request's hold on its model, until its answer is sent; and a stream that begins while the model loads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from thermocline.errors import BadFile, OutOfBudget, ThermoclineError, Unsupported, UsageError
from thermocline.plan.memory import size_down
from thermocline.server.api.models.registered import RegisteredModel
from thermocline.server.api.models.registry import Registry
from thermocline.server.api.models.served import ServedModel
from thermocline.server.http import sse
from thermocline.server.http.refusal import Refusal

HOLD = "thermocline.hold"  # key in the ASGI scope
RETRY_LOADING_S = 2
PROGRESS_S = 1.0  # between two looks at the progress
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Hold:
    """`begun`: the stream's head is sent, so the application's own is dropped, and an error is an event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held: list[Callable[[], None]] = []
        self.begun = False

    async def send(self, message: Message) -> None:
        if not self.begun or message["type"] != "http.response.start":
            await self._send(message)

    async def model(
        self, registry: Registry, name: str | None, *, stream: bool, ping_s: float
    ) -> ServedModel:
        """Return the model of that name, or the default. It stays loaded until the request ends.

        A server with one model refuses with 503 until its engine is ready. Of several, the model is loaded if
        need be; a `stream` gets comments meanwhile. Refuse with 404 if there is no such model, with 400 if it
        can never be loaded, with 503 if it cannot be loaded now.
        """
        if not registry.several:
            model = ready(registry)
            await registry.find(name)
            return model
        m = await registry.find(name)
        try:
            if stream and m.state != "loaded":
                found = await self._streamed(registry, m, ping_s)
            else:
                found = await registry.take(m)
        except ThermoclineError as e:
            never = isinstance(e, BadFile | OutOfBudget | Unsupported | UsageError)
            status, code = (400, "model_cannot_be_loaded") if never else (503, "model_not_loaded")
            raise Refusal(status, f"{m.name}: {e}", param="model", code=code) from None
        self._held.append(partial(registry.give_back, m))
        return found

    async def _streamed(self, registry: Registry, m: RegisteredModel, ping_s: float) -> ServedModel:
        taking = asyncio.create_task(registry.take(m))
        try:
            await asyncio.sleep(0)  # files that are known to be wrong are refused without a stream
            if not taking.done():
                await self._tell(m, taking, ping_s)
        except BaseException:
            taking.cancel()
            await asyncio.wait({taking})
            if not taking.cancelled() and taking.exception() is None:
                registry.give_back(m)
            raise
        return taking.result()

    async def _tell(self, m: RegisteredModel, taking: asyncio.Future[ServedModel], ping_s: float) -> None:
        loop = asyncio.get_running_loop()
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers = [(name.lower().encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": kind + headers})
        self.begun, said, said_at = True, "", 0.0
        while not taking.done():
            if (words := progress_of(m)) != said or loop.time() - said_at >= ping_s:
                said, said_at = words, loop.time()
                await self._send(
                    {"type": "http.response.body", "body": sse.comment(words), "more_body": True}
                )
            await asyncio.wait({taking}, timeout=min(PROGRESS_S, ping_s))

    def give_back(self) -> None:
        for give_back in self._held:
            give_back()


def ready(registry: Registry) -> ServedModel:
    """Return the only model of a server. Refuse with 503 until its engine is ready."""
    only = registry.default
    assert only is not None
    if only.model is None or not only.engine.ready:
        loads = only.engine.state in ("starting", "loading")
        what = "Loading model" if loads else "The engine is not ready"
        raise Refusal(503, what, headers={"retry-after": str(RETRY_LOADING_S)})
    return only.model


def progress_of(m: RegisteredModel) -> str:
    """Return in words how far a model's loading is."""
    if m.progress is not None:
        what, done, size = m.progress
        return f"{m.name}: {what}, {size_down(done)} of {size_down(size)}"
    if m.state != "loading":
        return f"{m.name}: waiting for its turn"
    is_waiting = m.engine.needed is not None and not m.held_bytes
    return f"{m.name}: {'waiting for memory' if is_waiting else 'opening'}"


class Holding:
    """ASGI middleware: each request has a `Hold` in its scope, which ends with it."""

    def __init__(self, app: Callable[[Scope, Any, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        hold = Hold(send)
        try:
            await self._app({**scope, HOLD: hold}, receive, hold.send)
        finally:
            hold.give_back()
