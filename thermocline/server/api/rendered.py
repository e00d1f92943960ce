"""Answers that grow with what was asked: written on another thread, sent in pieces. Must not know routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from thermocline.text.tokenizer import Tokenizer

_PIECE = 64 << 10


class Whole(Response):
    """An answer, in pieces: what a client does not read waits here, not in its connection's buffer."""

    media_type = "application/json"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for at in range(0, len(self.body), _PIECE):
            piece, more = bytes(self.body[at : at + _PIECE]), at + _PIECE < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})


async def rendered(made: Callable[[], bytes]) -> Response:
    """JSON that grows with what was asked for, written on another thread."""
    return Whole(await asyncio.to_thread(made))


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Each token with its text, which is written once however often it is there."""
    made = {i: json_bytes({"id": i, "piece": _piece(tokenizer, i)}) for i in set(ids)}
    return b'{"tokens":[' + b",".join(map(made.__getitem__, ids)) + b"]}"


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """llama.cpp's: bytes where they are no text."""
    data = tokenizer.spelled(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
