"""The key of a request's session: requests with equal keys go to one replica, which holds their prefix.

A client may name its session in a header, or in the fields that its API has for that. Else the key is made of
the beginning of the conversation, which its later turns repeat.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

HEADERS = (b"x-session-id", b"session_id", b"session-id")  # the second is Codex's
FIELDS = ("prompt_cache_key", "user")  # OpenAI's: one is made for this, the other names who asks
BEGINNING = 4096  # characters of a conversation's first messages
PROMPT = 256  # characters of a bare prompt, which grows at its end from turn to turn
MOST_ANSWERS = 65536  # whose session is remembered: 10 MB


def session_key(headers: Mapping[bytes, bytes], body: Mapping[str, Any]) -> str | None:
    """Return a key of 32 hex digits; None where nothing tells one conversation from another."""
    for name in HEADERS:
        if value := headers.get(name):
            return _hashed("header", value.decode("latin-1"))
    for field in FIELDS:
        if isinstance(value := body.get(field), str) and value:
            return _hashed(field, value)
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and isinstance(value := metadata.get("user_id"), str) and value:
        return _hashed("user_id", value)
    beginning = _beginning(body)
    return _hashed("text", beginning) if beginning else None


def _beginning(body: Mapping[str, Any]) -> str:
    """Return the first characters of the conversation, in whatever API's words."""
    parts: list[Any] = [body.get("system"), body.get("instructions")]
    for name in ("messages", "input", "prompt"):
        said = body.get(name)
        if isinstance(said, list):
            parts.append(_opening(said))
        elif isinstance(said, str):
            parts.append(said[:PROMPT] if name == "prompt" else said)
    return "".join(json.dumps(part)[:BEGINNING] for part in parts if part)


def _opening(said: list[Any]) -> list[Any]:
    """Return the messages up to the user's first: what one agent sends first differs there, and stays."""
    users = (i for i, m in enumerate(said) if isinstance(m, dict) and m.get("role") == "user")
    return said[: next(users, 0) + 1]


def _hashed(kind: str, value: str) -> str:
    return hashlib.sha256(f"{kind}\0{value}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


class AnsweredSessions:
    """The sessions of answers that a later request may name as `previous_response_id`: the last 65,536."""

    def __init__(self, most: int = MOST_ANSWERS) -> None:
        self._most = most
        self._keys: OrderedDict[str, str] = OrderedDict()

    def add(self, answer: str, key: str) -> None:
        self._keys[answer] = key
        if len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def get(self, answer: object) -> str | None:
        return self._keys.get(answer) if isinstance(answer, str) else None
