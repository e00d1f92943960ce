"""The one place that decides whether a request reaches the application. Everything is refused unless allowed.

In this order: connection, size and framing, Host, Origin, key, method and kind of body, the body itself, a
place. The application gets a checked JSON object, no credentials, and is cancelled when its client leaves.
Every error has OpenAI's shape. Must not know sockets, routes, or what the application does.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
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

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[bytes, bytes]
Methods = Callable[[str], Collection[str] | None]  # of a path; None if the application has no such path

ALWAYS_PUBLIC = ("/health", "/v1/health")
ONCE = {b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-length"}
METHODS = ("GET", "HEAD", "OPTIONS", "POST")
SURPLUS = "thermocline.surplus"  # in the scope's state: the connection is beyond the limit
_HOST = re.compile(
    r"(\[([0-9a-f:.]+)\]|[^\[\]:]+)(?::\d{1,5})?"
)  # a name, or an address of version 6, and a port
_LONGEST_LOG_LINE = 1000


@dataclass(frozen=True)
class Admission:
    """Who may call the server and what it takes at once: the guard's settings, apart from the limits."""

    keys: Iterable[str] = ()  # none: no key is needed
    hosts: Iterable[str] = ()  # names in Host, besides the server's own
    origins: Iterable[str] = ()  # web pages of these may call it, besides its own
    public: Iterable[str] = ()  # paths that need no key, besides /health
    slots: int = 1  # requests that the application works on at once
    methods: Methods = lambda path: None


@dataclass(frozen=True)
class Access:
    """Who may ask for what. Of the keys only hashes are kept, so that nothing can print them."""

    keys: tuple[bytes, ...]
    hosts: frozenset[str] | None  # None: any
    origins: frozenset[str]
    public: frozenset[str]
    addresses: bool = (
        False  # any IP address is a Host, too, and the port may be another's, which is forwarded
    )

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
        # Every pair is compared, in constant time: how long it takes says nothing about the keys.
        hashes = [hashlib.sha256(g).digest() for g in given]
        return any([hmac.compare_digest(h, key) for h in hashes for key in self.keys])

    def is_public(self, scope: Scope) -> bool:
        """Only the plain spelling: what a router might read as the same path needs a key."""
        path = scope["path"]
        return (
            scope["method"] in ("GET", "HEAD") and path in self.public and scope["raw_path"] == path.encode()
        )


# ---- what the request's head has to satisfy: each check returns, or raises a Refusal


def check_size(scope: Scope, limits: ServerLimits) -> Headers:
    """The headers as a dictionary. Those that decide something may be there once."""
    pairs: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in pairs)
    if size > limits.limit_header_bytes or len(pairs) > limits.limit_headers:
        raise Refusal(
            431, f"headers may be {limits.limit_header_bytes} bytes, {limits.limit_headers} of them"
        )
    names = [name for name, _ in pairs]
    for name in ONCE:
        if names.count(name) > 1:
            raise Refusal(400, f"the header {name.decode()} is there more than once")
    headers = dict(pairs)
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise Refusal(
            400, "Content-Length and Transfer-Encoding exclude each other", headers={"connection": "close"}
        )
    return headers


def check_connection(scope: Scope) -> None:
    """However many connections are held, whoever watches over the server still learns how it is."""
    is_health = scope["method"] in ("GET", "HEAD") and scope["path"] in ALWAYS_PUBLIC
    if scope.get("state", {}).get(SURPLUS) and not is_health:
        raise Refusal(503, "too many connections; try again", headers={"connection": "close"})


def check_host(headers: Headers, access: Access) -> None:
    """A page whose name was made to resolve to this machine (DNS rebinding) says its own name here."""
    if access.hosts is None:
        return
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if host in access.hosts or (access.addresses and _is_known(host, access.hosts)):
        return
    raise Refusal(403, "Host header not allowed; add it with --allow-host NAME")


def _is_known(host: str, names: Collection[str]) -> bool:
    """Tell whether it is one of the names or an IP address, with any port. A rebound name is neither."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(found[2] or found[1])
        return True
    return found[1] in names


def check_origin(headers: Headers, access: Access) -> str | None:
    """A page of another origin may not ask, unless it is allowed; then that origin, for the CORS headers."""
    if b"origin" not in headers:
        return None
    origin = headers[b"origin"].decode("latin-1").lower()
    if origin in access.origins:
        return origin
    if b"host" in headers and origin == "http://" + headers[b"host"].decode("latin-1").lower():
        return None
    raise Refusal(403, "pages of that Origin may not use this server; --allow-origin URL allows one")


def check_key(scope: Scope, headers: Headers, access: Access) -> None:
    if access.keys and not access.is_public(scope) and not access.has_key(headers):
        raise Refusal(
            401, "needs an API key: Authorization: Bearer KEY, or X-Api-Key: KEY",
            headers={"www-authenticate": "Bearer"}
        )  # fmt: skip


def check_method(scope: Scope, methods: Methods) -> None:
    """Before the body is looked at, which a method that is not there cannot get right."""
    allowed = methods(scope["path"])
    if allowed is not None and scope["method"] not in allowed:
        raise Refusal(405, "no such method here", headers={"allow": ", ".join(sorted(allowed))})


def check_content(scope: Scope, headers: Headers, limits: ServerLimits) -> None:
    """JSON is all that is taken, and only by POST: a form of a foreign page can send neither."""
    if scope["method"] not in METHODS:
        raise Refusal(405, "no such method here", headers={"allow": ", ".join(METHODS)})
    length = int(headers.get(b"content-length", b"0"))
    if scope["method"] != "POST":
        if length or b"transfer-encoding" in headers:
            raise Refusal(400, f"{scope['method']} takes no body")
        return
    kind, _, parameters = headers.get(b"content-type", b"").lower().partition(b";")
    charset = parameters.replace(b" ", b"").replace(b'"', b"")
    if kind.strip() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        raise Refusal(415, "the body has to be Content-Type: application/json, in UTF-8")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise Refusal(415, "the body may not have a Content-Encoding: send it uncompressed")
    if length > limits.limit_body_bytes:
        raise Refusal(413, f"the body may be {limits.limit_body_bytes} bytes")


# ---- one request and its answer


class Exchange:
    """What was answered so far. Every response gets the security headers; every error is made JSON."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._scope = scope
        self._swallow = False  # the application's own text of an error, which is replaced
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
        """As a response; once a stream has begun, as its last event; other answers just end."""
        if self.complete:
            return
        body = refusal.body()
        if self.status == 0:
            await self.send({"type": "http.response.start", "status": refusal.status,
                             "headers": refusal.http_headers(body)})  # fmt: skip
        elif self.is_stream:
            body = b"data: " + body + b"\n\n"
        else:
            return
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    def line(self, seconds: float) -> str:
        """For the log: no query, no header, nothing of a body; a line is a line, whatever the path is."""
        client = (self._scope.get("client") or ("-",))[0]
        path = self._scope["raw_path"].decode("ascii", "backslashreplace")[: _LONGEST_LOG_LINE // 2]
        method = self._scope["method"][:32]
        line = f"{client} {method} {path} {self.status or '-'} {self.sent_bytes} B {seconds * 1000:.0f} ms"
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)[:_LONGEST_LOG_LINE]


class Guard:
    """ASGI middleware. `slots`: requests that the application works on at once; `log` gets the access log."""

    def __init__(
        self,
        app: App,
        access: Access,
        limits: ServerLimits,
        *,
        slots: int,
        methods: Methods,
        log: Callable[[str], None] | None = None,
        trouble: Callable[[str], None] | None = None,
    ) -> None:
        self._app, self._access, self._limits = app, access, limits
        self._log, self._trouble = log, trouble
        self._methods = methods
        self._places = slots + limits.limit_queue
        self._bodies = MemoryBudget(limits.limit_bodies_bytes)
        # Large bodies are read one after the other: 13 threads at it would keep the event loop from its turn.
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
            if self._log is not None:
                self._log(exchange.line(time.monotonic() - began))

    async def _answer(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        check_connection(scope)
        headers = check_size(scope, self._limits)
        check_host(headers, self._access)
        exchange.allow_origin = check_origin(headers, self._access)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            return await self._preflight(exchange)
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
            if self._places == 0:
                raise Refusal(503, "too many requests are waiting; try again")
            self._places -= 1
            try:
                await posted.parse(self._limits)
                await self._run({**scope, BODY: posted}, receive, exchange)
            finally:
                self._places += 1
        finally:
            posted.done()

    async def _preflight(self, exchange: Exchange) -> None:
        if exchange.allow_origin is None:
            raise Refusal(403, "no page of another origin may use this server")
        headers = [
            (b"access-control-allow-methods", ", ".join(METHODS).encode()),
            (b"access-control-allow-headers", b"authorization, content-type, x-api-key"),
        ]
        await exchange.send({"type": "http.response.start", "status": 204, "headers": headers})
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, scope: Scope, receive: Receive, exchange: Exchange) -> None:
        """The application in a task of its own, which is cancelled when it may not or need not go on."""
        gone = asyncio.ensure_future(_until_gone(receive))
        task = asyncio.ensure_future(self._app(scope, partial(_when, gone), exchange.send))
        end: Refusal | None = None
        try:
            async with asyncio.timeout(self._limits.limit_request_s):
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
                if exchange.complete:  # the response is whole; what the application does after it, it may
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
        if self._trouble is not None:  # its message may quote a prompt: only what it is and where
            self._trouble(f"a request failed: {type(error).__name__}{place_of(error)}")
        return Refusal(500, "the server failed at this request; its log says where")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _when(gone: asyncio.Future[None]) -> Message:
    """`receive` for the application, which finds the body in its scope: nothing until its client is gone."""
    await asyncio.wait({gone})
    return {"type": "http.disconnect"}
