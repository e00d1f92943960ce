"""Put `thermocline serve` together: the models, the application and the socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thermocline.errors import ThermoclineError
from thermocline.server.api.app import PUBLIC, application, methods_of
from thermocline.server.api.models.registered import Loading
from thermocline.server.api.models.registry import OPENING_BYTES, Registry
from thermocline.server.api.state import Api
from thermocline.server.http import server as http
from thermocline.server.http.guard import Admission
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.posted import return_memory
from thermocline.server.process.engine_process import grace_of
from thermocline.session.session import budget_for

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from thermocline.server.http.listener import Listener
    from thermocline.session.options import EngineOptions, ModelOptions

MOST_GIB = 1e6  # the budget where nobody knows what is free


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
    directory: Path | None = None  # of models that clients ask for by name; None: there is one model
    models_max: int = 1  # of them, loaded at once


def assembled(
    files: ModelOptions,
    options: EngineOptions,
    settings: ServerOptions,
    lifespan: Callable[[Any], AbstractAsyncContextManager[None]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Registry, Api, Starlette]:
    """Return the models, none of which is started, the state of the routes, and the application over both."""
    models = registry_of(files, options, settings)
    if progress is not None and models.default is not None:
        models.default.told_progress = progress
    api = Api(models, settings.limits, keys=bool(settings.keys))
    return models, api, application(api, lifespan)


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

    `files` and `options`: `LLM`'s. With a directory, `files` is the model of requests without a name, None is
    none, and `options.ram` is the budget of all models. `settings.sampling` fills in options that a request
    leaves open; options missing there come from the model's recommendation.
    """
    listening: list[http.HttpServer] = []
    errors: list[ThermoclineError] = []
    return_memory()

    def begun(made: http.HttpServer) -> None:
        listening.append(made)
        if started is not None:
            started(made)

    async def watch(first: asyncio.Task[None]) -> None:
        try:
            await first
        except ThermoclineError as e:
            errors.append(e)
            listening[0].stop()

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        first = models.start()
        watching = None if first is None else asyncio.create_task(watch(first))
        try:
            yield
        finally:
            if watching is not None:
                watching.cancel()
            await models.stop(grace_of(options))

    try:
        models, _, app = assembled(files, options, settings, lifespan, progress)
    except ThermoclineError:
        listener.close()
        raise
    several = settings.models_max if models.several else 1
    admission = Admission(
        settings.keys,
        settings.hosts,
        settings.origins,
        public=PUBLIC,
        slots=options.max_batch * several,
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
        models.close()
    if errors:
        raise errors[0]


def registry_of(files: ModelOptions, options: EngineOptions, settings: ServerOptions) -> Registry:
    """Return the models of a server. Of several, what is free now is the budget, or `options.ram` if less."""
    limits, several = settings.limits, settings.directory is not None
    if several:
        budget, _ = budget_for(options.ram)
        options = replace(options, ram=MOST_GIB if budget is None else budget / 2**30)
    how = Loading(
        options,
        settings.sampling,
        limits.limit_silence_s,
        limits.limit_drain_s,
        OPENING_BYTES if several else None,
        settings.models_max if several else 1,
    )
    return Registry(how, settings.directory, files, settings.name)
