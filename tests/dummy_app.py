"""An application for the server's shell: JSON, streams, a page, and one that fails. As a program it serves
itself, told by a JSON object: `{"unix": PATH}` or `{"port": N}`, `limits`, and an `Admission`'s fields.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from thermocline.errors import ThermoclineError
from thermocline.server.http import listener, server
from thermocline.server.http.guard import Admission
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.posted import posted
from thermocline.server.http.refusal import Refusal

PAGE = b"<!doctype html><title>dummy</title>"


class Dummy:
    """Counts the requests that are in it, and how they ended."""

    def __init__(self) -> None:
        self.active = self.cancelled = self.chunks = 0
        self.seen: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        self.seen.append(f"{scope['method']} {scope['path']}")
        self.headers = dict(scope["headers"])
        self.active += 1
        try:
            await self.answer(scope, send)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def answer(self, scope: Any, send: Any) -> None:
        match scope["method"], scope["path"]:
            case _, "/health" | "/v1/health":
                await reply(send, b'{"status":"ok"}')
            case _, "/":
                await reply(send, PAGE, kind=b"text/html")
            case "GET", "/state":
                state = {"active": self.active, "cancelled": self.cancelled, "chunks": self.chunks}
                await reply(send, json.dumps(state).encode())
            case "GET", "/v1/models":
                await reply(send, b'{"data":[]}')
            case "GET", "/boom":
                raise ValueError("secret prompt")
            case "POST", "/v1/echo":
                await reply(send, json.dumps(posted(scope).value).encode())
            case "POST", "/v1/refuse":
                raise Refusal(400, posted(scope).value["say"], code="chosen")
            case "POST", "/v1/stream":
                await self.stream(send, **posted(scope).value)
            case "POST", "/v1/after":
                await reply(send, b"{}")
                await asyncio.sleep(0.1)
                self.chunks += 1
            case "POST", "/v1/hang":
                await asyncio.sleep(3600)
            case _:
                await reply(send, b"Not Found", status=404, kind=b"text/plain")

    async def stream(self, send: Any, n: int, every_s: float = 0, event_bytes: int = 1) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(n):
            self.chunks += 1
            body = b"data: " + b"x" * event_bytes + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await asyncio.sleep(every_s)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def reply(send: Any, body: bytes, status: int = 200, kind: bytes = b"application/json") -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _lifespan(receive: Any, send: Any) -> None:
    for step in ("startup", "shutdown"):
        assert (await receive())["type"] == f"lifespan.{step}"
        await send({"type": f"lifespan.{step}.complete"})


def trouble(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(told: dict[str, Any]) -> int:
    keys = told.pop("keys", [])
    try:
        if "unix" in told:
            opened = listener.listen_unix(Path(told.pop("unix")))
        else:
            where = told.pop("host", "127.0.0.1"), told.pop("port", 0)
            opened = listener.listen(*where, has_keys=bool(keys), insecure=told.pop("insecure", False))
        print(opened.url, flush=True)
        limits = ServerLimits(**told.pop("limits", {}))
        if (files := told.pop("files", None)) is not None:
            import resource  # POSIX alone has it

            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        log = trouble if told.pop("log", False) else None
        admission = Admission(keys, **told)
        server.run(Dummy(), opened, limits=limits, admission=admission, log=log, trouble=trouble)
    except ThermoclineError as e:
        print(f"thermocline: {e}", file=sys.stderr)
        return e.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
