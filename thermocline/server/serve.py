"""Put `thermocline serve` together: the engine's process, the application and the socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thermocline.engine.generation_config import completed
from thermocline.engine.sampler import SamplingParams
from thermocline.server.api.app import PUBLIC, application, methods_of
from thermocline.server.api.model import ServedModel
from thermocline.server.api.state import Api
from thermocline.server.http import server as http
from thermocline.server.http.guard import Admission
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.posted import return_memory
from thermocline.server.process.engine_process import EngineProcess

if TYPE_CHECKING:
    from thermocline.server.http.listener import Listener
    from thermocline.server.process.messages import ModelOpened
    from thermocline.session.options import EngineOptions, ModelOptions

STOP_S = 0.3  # time for the engine to end by itself before its process is killed


@dataclass(frozen=True)
class ServerOptions:
    """Options of one server, apart from the engine's."""

    limits: ServerLimits = field(default_factory=ServerLimits)
    name: str | None = None  # of the model, for clients; None: its file's
    sampling: Mapping[str, Any] = field(default_factory=dict)  # by `SamplingParams`' names
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    access_log: bool = False  # log a line for each request


def serve(
    files: ModelOptions,
    options: EngineOptions,
    listener: Listener,
    settings: ServerOptions,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    started: Callable[[http.HttpServer], None] | None = None,
) -> None:
    """Serve until the process is told to stop. Raise the error of an engine that cannot be started.

    `files` and `options`: `LLM`'s. `settings.sampling` fills in options that a request
    leaves open; options missing there come from the model's recommendation.
    """
    listening: list[http.HttpServer] = []
    return_memory()

    def opened(found: ModelOpened) -> None:
        if server.model is not None:
            return
        server.defaults = completed(settings.sampling, found.recommended)
        server.model = ServedModel.of(found, settings.name)

    def shown(what: str, done: int, size: int) -> None:
        server.progress = what, done, size
        if progress is not None:
            progress(what, done, size)

    def begun(made: http.HttpServer) -> None:
        listening.append(made)
        if started is not None:
            started(made)

    async def watch() -> None:
        await engine.over.wait()
        listening[0].stop()

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        engine.start()
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
            await engine.stop(STOP_S)

    engine = EngineProcess(
        files, options, progress=shown, opened=opened, silence_s=settings.limits.limit_silence_s
    )
    server = Api(engine, settings.limits, defaults=SamplingParams(), keys=bool(settings.keys))
    app = application(server, lifespan)
    admission = Admission(
        settings.keys,
        settings.hosts,
        settings.origins,
        public=PUBLIC,
        slots=options.max_batch,
        methods=methods_of(app),
    )
    try:
        http.run(
            app,
            listener,
            limits=settings.limits,
            admission=admission,
            access_log=settings.access_log,
            started=begun,
        )
    finally:
        server.close()
    if engine.error is not None:
        raise engine.error
