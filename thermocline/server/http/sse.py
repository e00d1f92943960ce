"""Server-sent events, as bytes."""

from __future__ import annotations

import json
from typing import Any

SILENCE = b": \n\n"  # a comment: the stream is alive
DONE = b"data: [DONE]\n\n"


def comment(text: str) -> bytes:
    """Return a line that clients skip. `text` has no line break."""
    return f": {text}\n\n".encode()


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Return an event that is named by its `type`."""
    return f"event: {body['type']}\n".encode() + event(body)
