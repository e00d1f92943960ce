"""The application of `thermocline serve`: all routes, and how errors become responses."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from thermocline.errors import ThermoclineError
from thermocline.server.api import activity, generation, metrics, model_routes, openapi
from thermocline.server.api.agents import messages_routes, responses_routes
from thermocline.server.api.responses import refusal_of
from thermocline.server.api.state import Api
from thermocline.server.http.refusal import Refusal
from thermocline.server.page import assets

PUBLIC = assets.PATHS  # the page's files, which need no key


def application(api: Api, lifespan: Any = None) -> Starlette:
    handlers: dict[Any, Any] = {
        Refusal: _refused,
        ThermoclineError: _engine_error,
        404: _no_route,
        405: _wrong_method,
    }
    made = Starlette(routes=routes(api), exception_handlers=handlers, lifespan=lifespan)
    made.router.redirect_slashes = False
    return made


def routes(api: Api) -> list[Route]:
    limits = api.limits
    return [
        *model_routes.routes(api),
        *generation.routes(api),
        *responses_routes.routes(api),
        *messages_routes.routes(api),
        *metrics.routes(api.metrics),
        *openapi.routes(api.keys, limits, lambda: None if api.model is None else api.model.spec.vocab_size),
        *activity.routes(api.engine.subscribers, limits.limit_ping_s, limits.limit_onlookers),
        *assets.routes(),
    ]


def methods_of(app: Starlette) -> Callable[[str], Collection[str] | None]:
    """Return a function that gives the methods of a path, or None if the path has no route."""
    listed = [r for r in app.routes if isinstance(r, Route)]
    return lambda path: next((r.methods for r in listed if r.path_regex.match(path)), None)


async def _refused(request: Request, e: Exception) -> Response:
    assert isinstance(e, Refusal)
    return Response(e.body(request.url.path), e.status, e.headers, "application/json")


async def _engine_error(request: Request, e: Exception) -> Response:
    assert isinstance(e, ThermoclineError)
    return await _refused(request, refusal_of(e))


async def _no_route(request: Request, e: Exception) -> Response:
    return await _refused(request, Refusal(404, "there is no such route; /docs lists the routes"))


async def _wrong_method(request: Request, e: Any) -> Response:
    made = await _refused(request, Refusal(405, f"method {request.method} is not allowed on this route"))
    made.headers.update(e.headers or {})
    return made
