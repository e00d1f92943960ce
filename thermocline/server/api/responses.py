"""How answers are sent: whole or as a stream of events, long ones written on another thread; and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from thermocline.errors import ThermoclineError, UsageError
from thermocline.server.api.answers import Answer
from thermocline.server.api.models.hold import HOLD, STREAM_HEADERS
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.engine_process import EngineCrashed, Jobs
from thermocline.server.process.messages import Finished, Token
from thermocline.server.process.suspects import CrashesEngine
from thermocline.text.tokenizer import Tokenizer

_PIECE = 64 << 10


async def answered(jobs: Jobs, answer: Answer, ping_s: float) -> Response:
    """Return the response to a request for text, whole or streamed as the request says."""
    if answer.request.stream:
        return EventStream(events(jobs, answer, ping_s), jobs)
    try:  # if the client leaves, the guard cancels this
        while (found := await jobs.next()) is not None:
            for event in found:
                answer.take(*event)
        return await large(lambda: json_bytes(answer.whole()))
    finally:
        jobs.close()


# ---- streams


class EventStream(StreamingResponse):
    """A stream that cancels its jobs when it ends, also if the client leaves before the first event."""

    def __init__(self, content: AsyncIterator[bytes], jobs: Jobs) -> None:
        super().__init__(content, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._jobs = jobs

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._jobs.close()


async def events(jobs: Jobs, answer: Answer, ping_s: float) -> AsyncIterator[bytes]:
    """Yield server-sent events, and a comment after each `ping_s` without one."""
    loop = asyncio.get_running_loop()
    try:
        for opening in answer.begin():
            yield answer.event(opening)
        sent_at = loop.time()
        while (found := await jobs.next(ping_s)) is not None:
            # The log probabilities of a whole prompt take long to write.
            is_long = any(isinstance(e, Finished) and e.prompt_logprobs for _, e in found)
            data = await asyncio.to_thread(_written, answer, found) if is_long else _written(answer, found)
            now = loop.time()
            if data or now - sent_at >= ping_s:  # a tool call is held back until it is whole
                sent_at = now
                yield data or answer.silence
        yield answer.closing()
    except ThermoclineError as e:
        yield answer.failure(refusal_of(e))


def _written(answer: Answer, found: Sequence[tuple[int, Token | Finished]]) -> bytes:
    return b"".join(answer.event(body) for event in found for body in answer.take(*event))


# ---- long bodies


class InPieces(Response):
    """A JSON response sent in pieces: unread bytes wait here instead of in the connection's buffer."""

    media_type = "application/json"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), _PIECE):
            piece, more = bytes(self.body[at : at + _PIECE]), at + _PIECE < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


async def large(make: Callable[[], bytes]) -> Response:
    """Return a body that grows with the request. `make` writes it, on another thread."""
    return InPieces(await asyncio.to_thread(make))


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return JSON of each token with its text; a token's text is written once, however often it occurs."""
    made = {i: json_bytes({"id": i, "piece": _piece(tokenizer, i)}) for i in set(ids)}
    return b'{"tokens":[' + b",".join(map(made.__getitem__, ids)) + b"]}"


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Return a token's text, or its bytes if they are not text, as llama.cpp does."""
    data = tokenizer.spelled(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


# ---- errors


def refusal_of(e: ThermoclineError) -> Refusal:
    """Return the engine's error as HTTP: a wrong request is the client's fault, a crash the server's."""
    if isinstance(e, UsageError):
        return Refusal(400, str(e))
    if isinstance(e, CrashesEngine):  # clients send a request again after a 5xx
        return Refusal(422, str(e), code="crashes_engine")
    code = "engine_crashed" if isinstance(e, EngineCrashed) else type(e).__name__
    return Refusal(500, str(e), code=code)


async def _refused(request: Request, e: Exception) -> Response:
    """Answer with the error, or end the stream with it that began while a model was loaded."""
    assert isinstance(e, Refusal)
    if request.scope[HOLD].begun:
        return Response(e.event(request.url.path), media_type="text/event-stream")
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


HANDLERS: dict[Any, Any] = {
    Refusal: _refused,
    ThermoclineError: _engine_error,
    404: _no_route,
    405: _wrong_method,
}
