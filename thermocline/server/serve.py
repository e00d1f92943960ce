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
from thermocline.server.api.app import Api, application
from thermocline.server.api.model import ServedModel
from thermocline.server.http import server as http
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.listener import Listener
from thermocline.server.http.posted import return_memory
from thermocline.server.page import assets
from thermocline.server.process.engine_process import EngineProcess
from thermocline.server.process.messages import ModelOpened

STOP_S = 0.3  # for the engine to end by itself: then its process is ended


def serve(
    options: dict[str, Any],
    listener: Listener,
    limits: ServerLimits,
    *,
    sampling: Mapping[str, Any],
    name: str | None = None,
    keys: Iterable[str] = (),
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    note: Callable[[str], None],
    log: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    started: Callable[[http.HttpServer], None] | None = None,
) -> None:
    """Until it is told to stop. Raises what the engine was refused for, or crashed of.

    `options`: LLM's; `sampling`: for what requests leave open, by `SamplingParams`' names, before what the
    model's makers recommend; `log`: takes a line for each request.
    """
    listening: list[http.HttpServer] = []
    return_memory()

    def opened(found: ModelOpened) -> None:
        if server.model is not None:
            return
        server.defaults = completed(sampling, found.recommended, note)
        server.model = ServedModel.of(found, name)

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
        options, told=note, progress=shown, opened=opened, silence_s=limits.limit_silence_s
    )
    keys = tuple(keys)
    server = Api(engine, limits, note, defaults=SamplingParams(), keys=bool(keys))
    try:
        http.run(
            application(server, lifespan),
            listener,
            limits=limits,
            keys=keys,
            hosts=hosts,
            origins=origins,
            assets=assets.PATHS,
            slots=options.get("max_batch", 8),
            methods=server.methods,
            log=log,
            trouble=note,
            started=begun,
        )
    finally:
        server.close()
    if engine.error is not None:
        raise engine.error
