"""`thermocline serve`, put together: an engine's process, the application over it, and what listens.

Must not know flags.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from thermocline.engine.generation_config import completed
from thermocline.engine.sampler import SamplingParams
from thermocline.server.api.app import Server, application
from thermocline.server.api.model import Model
from thermocline.server.http import server as http
from thermocline.server.http.limits import Limits
from thermocline.server.http.listener import Listener
from thermocline.server.http.posted import return_memory
from thermocline.server.page import assets
from thermocline.server.process.engine_process import EngineProcess
from thermocline.server.process.messages import Opened
from thermocline.session.options import EngineOptions, ModelOptions

STOP_S = 0.3  # for the engine to end by itself: then its process is ended


def serve(
    files: ModelOptions,
    options: EngineOptions,
    listener: Listener,
    limits: Limits,
    *,
    sampling: Mapping[str, Any],
    name: str | None = None,
    keys: Iterable[str] = (),
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    access_log: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    started: Callable[[http.Server], None] | None = None,
) -> None:
    """Until it is told to stop. Raises what the engine was refused for, or crashed of.

    `files` and `options`: `LLM`'s; `sampling`: for what requests leave open, by `SamplingParams`' names,
    before what the model's makers recommend; `access_log`: log a line for each request.
    """
    listening: list[http.Server] = []
    return_memory()

    def opened(found: Opened) -> None:
        if server.model is not None:
            return
        server.defaults = completed(sampling, found.recommended)
        server.model = Model.of(found, name)

    def shown(what: str, done: int, size: int) -> None:
        server.progress = what, done, size
        if progress is not None:
            progress(what, done, size)

    def begun(made: http.Server) -> None:
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

    engine = EngineProcess(files, options, progress=shown, opened=opened, silence_s=limits.limit_silence_s)
    keys = tuple(keys)
    server = Server(engine, limits, defaults=SamplingParams(), keys=bool(keys))
    try:
        http.run(
            application(server, lifespan),
            listener,
            limits=limits,
            keys=keys,
            hosts=hosts,
            origins=origins,
            assets=assets.PATHS,
            slots=options.max_batch,
            methods=server.methods,
            access_log=access_log,
            started=begun,
        )
    finally:
        server.close()
    if engine.error is not None:
        raise engine.error
