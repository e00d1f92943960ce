"""The application that all clients talk to: it admits requests, and forwards each to its session's replica.

It computes nothing. Whatever a replica sends goes on to the client as it comes. If a replica is lost before
it sent anything, another one gets the request. After that a stream ends with an error event.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

from thermocline.server.http.guard import Message, Receive, Scope, Send
from thermocline.server.http.posted import BODY, posted
from thermocline.server.http.refusal import Refusal
from thermocline.server.replicas.session_key import AnsweredSessions, session_key

TRIES = 3  # replicas that a request is given to, if one after the other is lost before it says a word
KEPT = ("method", "path", "raw_path", "query_string", "scheme", "http_version", "headers", "client", "server")
_ANSWER = re.compile(rb'"id":\s?"(resp_[A-Za-z0-9_-]{1,100})"')
_DROPPED = (b"content-length", b"transfer-encoding", b"expect")


class ReplicaLost(Exception):
    """The replica that had a request has ended."""


class Replicas(Protocol):
    """The replicas, by session."""

    def answer(self, scope: Scope, body: bytes, key: str) -> AsyncIterator[list[Message]]:
        """Yield the messages of the response. Raises ReplicaLost."""


class Front:
    """An ASGI application, to be called by the guard."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas, self._answered = replicas, AnsweredSessions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        value: dict[str, Any] = posted(scope).value if BODY in scope else {}
        key = self._answered.get(value.get("previous_response_id"))
        key = key or session_key(dict(scope["headers"]), value) or uuid.uuid4().hex
        body = json.dumps(value).encode() if BODY in scope else b""
        for left in reversed(range(TRIES)):
            begun = False
            try:
                async for messages in self._replicas.answer(_plain(scope, body), body, key):
                    begun = True
                    for message in messages:
                        self._note(message, key)
                        await send(message)
                return
            except ReplicaLost:
                if begun or not left:
                    raise Refusal(
                        503, "the replica that computed this answer has ended; send it again"
                    ) from None

    def _note(self, message: Message, key: str) -> None:
        """Remember the session of an answer that has an identity: it is in the first event, or the object."""
        body = message.get("body", b"")
        if b'"resp_' in body and (found := _ANSWER.search(body)) is not None:
            self._answered.add(found[1].decode(), key)


def _plain(scope: Scope, body: bytes) -> Scope:
    """Return what of a request goes to another process, with the body's new length."""
    plain: dict[str, Any] = {name: scope[name] for name in KEPT if name in scope}
    headers = [(bytes(n), bytes(v)) for n, v in scope["headers"] if n not in _DROPPED]
    plain["headers"] = [*headers, (b"content-length", str(len(body)).encode())] if body else headers
    return {"type": "http", "asgi": {"version": "3.0"}, "raw_path": scope["path"].encode(), **plain}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
