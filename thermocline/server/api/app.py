"""The application of `thermocline serve`: all routes, and how errors become responses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from thermocline.server.api import activity, generation, metrics, model_routes, openapi
from thermocline.server.api.agents import routes as agent_routes
from thermocline.server.api.models.hold import Holding
from thermocline.server.api.responses import HANDLERS
from thermocline.server.api.state import Api
from thermocline.server.api.vectors import routes as vector_routes
from thermocline.server.page import assets

PUBLIC = assets.PATHS  # the page's files, which need no key


def application(api: Api, lifespan: Any = None) -> Starlette:
    made = Starlette(
        routes=routes(api),
        exception_handlers=HANDLERS,
        lifespan=lifespan,
        middleware=[Middleware(Holding)],
    )
    made.router.redirect_slashes = False
    return made


def routes(api: Api) -> list[Route]:
    limits = api.limits
    return [
        *model_routes.routes(api),
        *generation.routes(api),
        *vector_routes.routes(api),
        *agent_routes.routes(api),
        *metrics.routes(api.metrics),
        *openapi.routes(api.keys, limits, api.models.vocabulary),
        *activity.routes(api.models, limits.limit_ping_s, limits.limit_onlookers),
        *assets.routes(),
    ]


def methods_of(app: Starlette) -> Callable[[str], Collection[str] | None]:
    """Return a function that gives the methods of a path, or None if the path has no route."""
    listed = [r for r in app.routes if isinstance(r, Route)]
    return lambda path: next((r.methods for r in listed if r.path_regex.match(path)), None)
