"""A request's body: received within its limits of size, time and memory, and read as one JSON object.

Must not know what is in it.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from thermocline.server.limits import Limits
from thermocline.server.refusal import Gone, Refusal

_OPEN_CLOSE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))


class Allowance:
    """Bytes that all bodies on their way may have together."""

    def __init__(self, total: int) -> None:
        self._left = total

    def take(self, n: int) -> None:
        if n > self._left:
            raise Refusal(503, "too many large requests are arriving; try again")
        self._left -= n

    def give_back(self, n: int) -> None:
        self._left += n


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limits: Limits, bodies: Allowance
) -> bytes:
    """All of it. Refused: too large (413), too slow on the whole or on average (408)."""
    parts: list[bytes] = []
    size, more = 0, True
    begun = asyncio.get_running_loop().time()
    try:
        while more:
            late = size / limits.limit_body_rate + limits.limit_body_stall_s
            async with asyncio.timeout_at(begun + min(limits.limit_body_s, late)):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part, more = message.get("body", b""), message.get("more_body", False)
            if size + len(part) > limits.limit_body_bytes:
                raise Refusal(413, f"the body may be {limits.limit_body_bytes} bytes")
            bodies.take(len(part))
            size += len(part)
            parts.append(part)
    except TimeoutError:
        raise Refusal(408, "the body arrived too slowly", headers={"connection": "close"}) from None
    finally:
        bodies.give_back(size)
    return b"".join(parts)


# ---- bytes -> a JSON object


def parse_json(body: bytes, limits: Limits) -> dict[str, Any]:
    """Strictly: UTF-8, no half surrogate pairs, no NaN, infinities or numbers beyond floats, no key twice.

    Of a key that is there twice parsers disagree which one counts: that is how checks are evaded.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Refusal(400, f"the body is not UTF-8, at byte {e.start}") from None
    check_json([body], limits, "the body")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number)
    except json.JSONDecodeError as e:
        raise Refusal(400, f"the body is not JSON: {e.msg}, at character {e.pos}") from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise Refusal(400, "the body has a number that is too long") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body has to be a JSON object")
    if re.search(r"\\u[dD][89a-fA-F]", text) and _has_half_a_pair(value):
        raise Refusal(400, "the body has half of a surrogate pair (\\ud800 to \\udfff alone)")
    return value


def check_json(texts: Iterable[bytes], limits: Limits, what: str) -> None:
    """Refuses what is nested too deep, or has too many values together, before anything is made of it."""
    values = 0
    for plain in map(without_strings, texts):
        if not is_at_most(limits.limit_json_depth, plain):
            raise Refusal(400, f"{what}: over {limits.limit_json_depth} lists or objects inside each other")
        values += plain.count(b",") + plain.count(b"[") + plain.count(b"{")
        if values > limits.limit_json_values:
            raise Refusal(400, f"{what}: more than {limits.limit_json_values} values")


def without_strings(body: bytes) -> bytes:
    """JSON's punctuation and numbers. Of what is no JSON, as far as it is."""
    return re.sub(rb'"[^"]*"', b"", body.replace(b"\\\\", b"").replace(b'\\"', b""))


def is_at_most(depth: int, plain: bytes) -> bool:
    """Whether brackets are nested so deep at most; before parsing, which recurses. Without a loop over bytes:
    each round removes the innermost pairs. Brackets that do not match never go away, and are not JSON.
    """
    brackets = plain.translate(_OPEN_CLOSE, _NO_BRACKETS)
    for _ in range(depth):
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            break
        brackets = shorter
    return b"[]" not in brackets and brackets.count(b"[") <= depth


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise Refusal(400, f"the key {twice[:64]!r} is there twice", param=twice[:64])
    return value


def _no_constant(name: str) -> Any:
    raise Refusal(400, f"{name} is not JSON")


def _number(text: str) -> float | int:
    """1.0 is an integer, as JSON Schema has it, and with it our description."""
    value = float(text)
    if not math.isfinite(value):
        raise Refusal(400, f"the number {text[:32]} is too large")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _has_half_a_pair(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
