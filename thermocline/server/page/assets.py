"""The chat page's files, by an exact table of paths. No path of a request becomes a path of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent
HTML, CSS, SCRIPT, SVG = "text/html", "text/css", "text/javascript", "image/svg+xml"
FILES = {  # path of the URL -> (file, type)
    "/": ("index.html", HTML),
    "/page/style.css": ("style.css", CSS),
    "/page/chat.css": ("chat.css", CSS),
    "/page/icon.svg": ("icon.svg", SVG),
    "/page/theme.js": ("theme.js", SCRIPT),
    "/page/api.js": ("api.js", SCRIPT),
    "/page/app.js": ("app.js", SCRIPT),
    "/page/attachments.js": ("attachments.js", SCRIPT),
    "/page/calls.js": ("calls.js", SCRIPT),
    "/page/dom.js": ("dom.js", SCRIPT),
    "/page/experts.js": ("experts.js", SCRIPT),
    "/page/history.js": ("history.js", SCRIPT),
    "/page/ideas.js": ("ideas.js", SCRIPT),
    "/page/inline.js": ("inline.js", SCRIPT),
    "/page/machine.js": ("machine.js", SCRIPT),
    "/page/markdown.js": ("markdown.js", SCRIPT),
    "/page/messages.js": ("messages.js", SCRIPT),
    "/page/models.js": ("models.js", SCRIPT),
    "/page/request.js": ("request.js", SCRIPT),
    "/page/settings.js": ("settings.js", SCRIPT),
    "/page/shelf.js": ("shelf.js", SCRIPT),
    "/page/strip.js": ("strip.js", SCRIPT),
}
PATHS = frozenset(FILES)  # they hold no secret, and a person without a key needs them to enter one


def routes() -> list[Route]:
    return [Route(path, _asset(*file), methods=["GET"]) for path, file in FILES.items()]


def _asset(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of one file. Browsers ask each time and get the file only if it has changed."""
    data = (FOLDER / name).read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").split(",")
        if tag in (k.strip().removeprefix("W/") for k in known):
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    return answer
