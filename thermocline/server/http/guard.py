"""The one place that decides whether a request reaches the application. Everything is refused unless allowed.

It checks, in this order: connection, size and framing, Host, Origin, key, method and kind of body, the body
itself, and whether a slot is free. The application gets a checked JSON object and no credentials, and is
cancelled when its client leaves. Every error has the shape of the path's API.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from thermocline.errors import place_of
from thermocline.server.http.body import MemoryBudget, Reservation
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.posted import BODY, Posted
from thermocline.server.http.refusal import SECURITY_HEADERS, Gone, Refusal

log = logging.getLogger(__name__)
access = logging.getLogger("thermocline.access")  # a line for each request, where that is asked for

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[bytes, bytes]
Methods = Callable[[str], Collection[str] | None]  # of a path; None if the application has no such path

ALWAYS_PUBLIC = ("/health", "/v1/health")
ONCE = {b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-length"}
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "POST")
SURPLUS = "thermocline.surplus"  # key in the scope's state of a connection beyond the limit
_HOST = re.compile(r"(\[([0-9a-f:.]+)\]|[^\[\]:]+)(?::\d{1,5})?")  # a name or an IPv6 address, and a port
_USUAL_HEADERS = b"anthropic-version, authorization, content-type, x-api-key"
_HEADER_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{1,4096}")
_LONGEST_LOG_LINE = 1000


@dataclass(frozen=True)
class Admission:
    """The guard's settings apart from the limits: who may call the server, and how many at once."""

    keys: Iterable[str] = ()  # none: no key is needed
    hosts: Iterable[str] = ()  # names in Host, besides the server's own
    origins: Iterable[str] = ()  # web pages of these may call it, besides its own
    public: Iterable[str] = ()  # paths that need no key, besides /health
    slots: int = 1  # requests that the application works on at once
    methods: Methods = lambda path: None


@dataclass(frozen=True)
class Access:
    """The rules on callers. Only hashes of the keys are kept, so that nothing can print a key."""

    keys: tuple[bytes, ...]
    hosts: frozenset[str] | None  # None: any
    origins: frozenset[str]
    public: frozenset[str]
    addresses: bool = False  # Host may be any IP address, with any port, since a forwarded port differs

    @classmethod
    def of(
        cls,
        keys: Iterable[str] = (),
        hosts: Iterable[str] | None = None,
        origins: Iterable[str] = (),
        public: Iterable[str] = (),
        *,
        addresses: bool = False,
    ) -> Access:
        return cls(
            tuple(hashlib.sha256(key.encode()).digest() for key in keys),
            None if hosts is None else frozenset(host.lower() for host in hosts),
            frozenset(origin.lower() for origin in origins),
            frozenset((*ALWAYS_PUBLIC, *public)),
            addresses,
        )

    def has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = [token.strip()] if scheme.lower() == b"bearer" else []
        given += [headers[b"x-api-key"]] if b"x-api-key" in headers else []
        # All pairs are compared in constant time, so that the time tells nothing about the keys.
        hashes = [hashlib.sha256(g).digest() for g in given]
        return any([hmac.compare_digest(h, key) for h in hashes for key in self.keys])

    def is_public(self, scope: Scope) -> bool:
        """Tell whether the path needs no key. Only its plain spelling counts: a router may accept others."""
        path = scope["path"]
        return (
            scope["method"] in ("GET", "HEAD") and path in self.public and scope["raw_path"] == path.encode()
        )


# ---- checks of a request's head: each returns, or raises a Refusal


def check_size(scope: Scope, limits: ServerLimits) -> Headers:
    """Return the headers as a dictionary. Headers that decide something may occur once."""
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in pairs)
    if size > limits.limit_header_bytes or len(pairs) > limits.limit_headers:
        raise Refusal(
            431, f"the headers exceed {limits.limit_header_bytes} bytes or a count of {limits.limit_headers}"
        )
    names = [name for name, _ in pairs]
    for name in ONCE:
        if names.count(name) > 1:
            raise Refusal(400, f"the header {name.decode()} occurs more than once")
    headers = dict(pairs)
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise Refusal(
            400, "Content-Length and Transfer-Encoding exclude each other", headers={"connection": "close"}
        )
    return headers


def check_connection(scope: Scope) -> None:
    """Refuse a connection beyond the limit, except to /health: monitoring must always get an answer."""
    is_health = scope["method"] in ("GET", "HEAD") and scope["path"] in ALWAYS_PUBLIC
    if scope.get("state", {}).get(SURPLUS) and not is_health:
        raise Refusal(503, "too many connections; try again", headers={"connection": "close"})


def check_host(headers: Headers, access: Access) -> None:
    """Refuse an unknown Host: a page whose name was made to resolve here (DNS rebinding) sends its own."""
    if access.hosts is None:
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if host in access.hosts or (access.addresses and _is_known(host, access.hosts)):
        return
    raise Refusal(403, "Host header not allowed; add it with --allow-host NAME")


def _is_known(host: str, names: Collection[str]) -> bool:
    """Tell whether `host` is one of the names or an IP address, with any port. A rebound name is neither."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(found[2] or found[1])
        return True
    return found[1] in names


def check_origin(headers: Headers, access: Access) -> str | None:
    """Return the request's origin if it needs CORS headers; refuse origins that are not allowed."""
    if b"origin" not in headers:
        return None
    origin = headers[b"origin"].decode("latin-1").lower()
    if origin in access.origins:
        return origin
    if b"host" in headers and origin == "http://" + headers[b"host"].decode("latin-1").lower():
        return None
    raise Refusal(403, "Origin not allowed; add it with --allow-origin URL")


def check_key(scope: Scope, headers: Headers, access: Access) -> None:
    if access.keys and not access.is_public(scope) and not access.has_key(headers):
        raise Refusal(
            401, "no valid API key; send Authorization: Bearer KEY, or X-Api-Key: KEY",
            headers={"www-authenticate": "Bearer"}
        )  # fmt: skip


def check_method(scope: Scope, methods: Methods) -> None:
    """Refuse a method that the path does not have, before its body is looked at."""
    allowed = methods(scope["path"])
    if allowed is not None and scope["method"] not in allowed:
        raise _wrong_method(scope, sorted(allowed))


def _wrong_method(scope: Scope, allowed: Iterable[str]) -> Refusal:
    message = f"method {scope['method'][:32]} is not allowed on this route"
    return Refusal(405, message, headers={"allow": ", ".join(allowed)})


def check_content(scope: Scope, headers: Headers, limits: ServerLimits) -> None:
    """Refuse a body other than JSON by POST. A form on another site's page can send everything else."""
    if scope["method"] not in METHODS:
        raise _wrong_method(scope, METHODS)
    length = int(headers.get(b"content-length", b"0"))
    if scope["method"] != "POST":
        if length or b"transfer-encoding" in headers:
            raise Refusal(400, f"{scope['method']} takes no body; use POST")
        return
    kind, _, parameters = headers.get(b"content-type", b"").lower().partition(b";")
    charset = parameters.replace(b" ", b"").replace(b'"', b"")
    if kind.strip() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        raise Refusal(415, "the body has to be JSON in UTF-8; send Content-Type: application/json")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refusal(415, "Content-Encoding is not supported; send the body uncompressed")
    if length > limits.limit_body_bytes:
        raise Refusal(413, f"the body is larger than {limits.limit_body_bytes} bytes; send less")


# ---- one request and its answer


class Exchange:
    """The response so far. Every response gets the security headers; every error becomes JSON."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._scope = scope
        self._swallow = False  # drop the application's own text of an error: ours replaces it
        self.allow_origin: str | None = None
        self.status = 0
        self.sent_bytes = 0
        self.complete = False
        self.is_stream = False

    async def send(self, message: Message) -> None:
        if self._swallow:
            return
        if message["type"] == "http.response.start":
            status, headers = message["status"], [(n.lower(), v) for n, v in message.get("headers", [])]
            kind = dict(headers).get(b"content-type", b"")
            if status >= 400 and not kind.startswith(b"application/json"):
                kept = {
                    n.decode(): v.decode("latin-1") for n, v in headers if n in (b"allow", b"retry-after")
                }
                await self.refuse(Refusal(status, HTTPStatus(status).phrase, headers=kept))
                self._swallow = True
                return
            self.status, self.is_stream = status, kind.startswith(b"text/event-stream")
            message = {**message, "headers": self._with_ours(headers)}
        else:
            self.sent_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        await self._send(message)

    def _with_ours(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        names = {name for name, _ in headers}
        ours = [(n, v) for n, v in SECURITY_HEADERS if n != b"cache-control" or n not in names]
        if self.allow_origin is not None:
            ours += [(b"access-control-allow-origin", self.allow_origin.encode()), (b"vary", b"Origin")]
        return [h for h in headers if h[0] not in {name for name, _ in ours}] + ours

    async def refuse(self, refusal: Refusal) -> None:
        """Send the error as the response, or as a stream's last event. Any other response just ends."""
        if self.complete:
            return
        path = self._scope["path"]
        body = refusal.body(path)
        if self.status == 0:
            await self.send({"type": "http.response.start", "status": refusal.status,
                             "headers": refusal.http_headers(body)})  # fmt: skip
        elif self.is_stream:
            body = refusal.event(path)
        else:
            return
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    def line(self, seconds: float) -> str:
        """Return one line for the access log: no query, no header, nothing of the body, no line break."""
        client = (self._scope.get("client") or ("-",))[0]
        path = self._scope["raw_path"].decode("ascii", "backslashreplace")[: _LONGEST_LOG_LINE // 2]
        method = self._scope["method"][:32]
        line = f"{client} {method} {path} {self.status or '-'} {self.sent_bytes} B {seconds * 1000:.0f} ms"
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)[:_LONGEST_LOG_LINE]


class Guard:
    """ASGI middleware. `slots`: requests that the application works on at once. `access_log`: log each."""

    def __init__(
        self,
        app: App,
        access: Access,
        limits: ServerLimits,
        *,
        slots: int,
        methods: Methods,
        access_log: bool = False,
    ) -> None:
        self._app, self._access, self._limits = app, access, limits
        self._logs_access = access_log
        self._methods = methods
        self._free = slots + limits.limit_queue
        self._bodies = MemoryBudget(limits.limit_bodies_bytes)
        # One thread reads large bodies: 13 threads would keep the event loop from running.
        self._reader = ThreadPoolExecutor(1, "bodies")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        exchange, began = Exchange(scope, send), time.monotonic()
        try:
            await self._answer(scope, receive, exchange)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except Gone:
            pass
        finally:
            if self._logs_access:
                access.info(exchange.line(time.monotonic() - began))

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        check_connection(scope)
        headers = check_size(scope, self._limits)
        check_host(headers, self._access)
        exchange.allow_origin = check_origin(headers, self._access)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            return await self._preflight(exchange, headers)
        check_key(scope, headers, self._access)
        check_method(scope, self._methods)
        check_content(scope, headers, self._limits)
        secret = (b"authorization", b"x-api-key", b"cookie")
        scope = {**scope, "headers": [(n, v) for n, v in scope["headers"] if n not in secret]}
        if scope["method"] != "POST":
            return await self._run(scope, receive, exchange)
        posted = Posted(Reservation(self._bodies), self._reader)
        try:
            await posted.receive(receive, self._limits)
            if self._free == 0:
                raise Refusal(503, "too many requests are waiting; try again")
            self._free -= 1
            try:
                await posted.parse(self._limits)
                await self._run({**scope, BODY: posted}, receive, exchange)
            finally:
                self._free += 1
        finally:
            posted.done()

    async def _preflight(self, exchange: Exchange, headers: Headers) -> None:
        if exchange.allow_origin is None:
            raise Refusal(403, "Origin not allowed; add it with --allow-origin URL")
        # Clients send headers of their own: openai-js x-stainless-*, Anthropic's SDK anthropic-beta.
        asked = headers.get(b"access-control-request-headers", b"")
        allowed = [
            (b"access-control-allow-methods", ", ".join(METHODS).encode()),
            (b"access-control-allow-headers", asked if _HEADER_NAMES.fullmatch(asked) else _USUAL_HEADERS),
        ]
        await exchange.send({"type": "http.response.start", "status": 204, "headers": allowed})
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """Run the application in its own task. Cancel the task when its time is up or the client leaves."""
        gone = asyncio.ensure_future(_until_gone(receive))
        task = asyncio.ensure_future(self._app(scope, partial(_when, gone), exchange.send))
        end: Refusal | None = None
        try:
            async with asyncio.timeout(self._limits.limit_request_s):
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.complete:  # the application may still finish work after its response
                    await asyncio.wait({task})
        except TimeoutError:
            end = Refusal(504, f"the request took more than {self._limits.limit_request_s:g} s")
        except asyncio.CancelledError:
            end = Refusal(503, "the server is being stopped")
        finally:
            task.cancel()
            await asyncio.wait({task})
            gone.cancel()
        end = end or self._failure(task)
        if end is not None:
            raise end

    def _failure(self, task: asyncio.Future[None]) -> Refusal | None:
        error = None if task.cancelled() else task.exception()
        if error is None or isinstance(error, Refusal):
            return error
        # The message may quote a prompt, so only its type and place are logged.
        log.warning(f"a request failed: {type(error).__name__}{place_of(error)}")
        return Refusal(500, "internal error; the server's log says where")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _when(gone: asyncio.Future[None]) -> Message:
    """Act as the application's `receive`: wait until the client leaves. The body is in the scope."""
    await asyncio.wait({gone})
    return {"type": "http.disconnect"}
