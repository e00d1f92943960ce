"""One engine and its application, in a process of its own. Calls come from the front, not from a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from thermocline.errors import ThermoclineError
from thermocline.server.api.app import methods_of
from thermocline.server.http.guard import Access, Guard, Message, Scope
from thermocline.server.process.engine_process import grace_of
from thermocline.server.serve import ServerOptions, assembled
from thermocline.session.options import EngineOptions, ModelOptions


@dataclass(frozen=True)
class ReplicaOptions:
    """A model and how it is served, the same for every replica."""

    files: ModelOptions
    engine: EngineOptions
    server: ServerOptions


class Replica:
    """An engine, once `start` has returned."""

    def __init__(self, o: ReplicaOptions) -> None:
        self.models, self.api, app = assembled(o.files, o.engine, o.server)
        self._grace_s = grace_of(o.engine)
        assert self.models.default is not None, "a replica has one model"
        self.engine = self.models.default.engine
        # The front has checked who asks and from where. Here the body is bounded and parsed again, and the
        # application is cancelled when its client leaves.
        access = Access.of(hosts=None)
        self._app = Guard(app, access, o.server.limits, slots=o.engine.max_batch, methods=methods_of(app))

    async def start(self) -> None:
        """Wait until the model is loaded. Raises the error of an engine that cannot be started."""
        self.models.start()
        await self.engine.until(lambda: self.engine.state == "ready")

    def check(self) -> None:
        """Raise ThermoclineError if this engine answers nobody any more."""
        if self.engine.over.is_set() or self.engine.state == "failed":
            raise self.engine.error or ThermoclineError("the engine has ended")

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
        """Yield a response's messages, as many at a time as there are. Close it when the client leaves."""
        made: asyncio.Queue[Message | None] = asyncio.Queue()
        left, given = asyncio.Event(), [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not given:
                await left.wait()
            return given.pop() if given else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            made.put_nowait(message)

        task = asyncio.ensure_future(self._app(dict(scope), receive, send))
        task.add_done_callback(lambda _: made.put_nowait(None))
        try:
            over = False
            while not over:
                some = [await made.get()]
                while not made.empty():
                    some.append(made.get_nowait())
                over = some[-1] is None
                if messages := [m for m in some if m is not None]:
                    yield messages
            task.result()
        finally:
            left.set()
            await asyncio.wait({task})

    async def stop(self) -> None:
        await self.models.stop(self._grace_s)
        self.models.close()
