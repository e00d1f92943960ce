"""All routes of the APIs that agents speak."""

from __future__ import annotations

from starlette.routing import Route

from thermocline.server.api.agents import messages_routes, responses_routes
from thermocline.server.api.state import Api


def routes(api: Api) -> list[Route]:
    return [*responses_routes.routes(api), *messages_routes.routes(api)]
