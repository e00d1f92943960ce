"""A request's body: received within its limits of size, time and memory, and read as one JSON object.

Must not know what is in it.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.refusal import Gone, Refusal

_OPEN_CLOSE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_CONTINUATIONS, _BEYOND_LATIN_1, _BEYOND_16_BITS = (
    bytes(range(*r)) for r in ((0x80, 0xC0), (0xC4, 0x100), (0xF0, 0x100))
)
_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
_PIECE = 64 << 10  # looked at in 0.2 ms, between which other threads get their turn
_VALUE_BYTES = 100  # of Python's memory, a short text or a pair of an object


class MemoryBudget:
    """Bytes that the bodies of all requests in hand may have together."""

    def __init__(self, total: int) -> None:
        self.left = total


class Reservation:
    """One request's part of an allowance: its body while it arrives, then what was read from it."""

    def __init__(self, of: MemoryBudget) -> None:
        self._of, self._taken = of, 0

    def set(self, n: int) -> None:
        if n - self._taken > self._of.left:
            raise Refusal(503, "too many large requests are being answered; try again")
        self._of.left -= n - self._taken
        self._taken = n

    def give_back(self) -> None:
        self.set(0)


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limits: ServerLimits, share: Reservation
) -> bytearray:
    """Receive all of it. Refuse one that is too large (413), or too slow on the whole or on average (408)."""
    body, more = bytearray(), True
    begun = asyncio.get_running_loop().time()
    try:
        while more:
            late = len(body) / limits.limit_body_rate + limits.limit_body_stall_s
            async with asyncio.timeout_at(begun + min(limits.limit_body_s, late)):
                message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part, more = message.get("body", b""), message.get("more_body", False)
            if len(body) + len(part) > limits.limit_body_bytes:
                raise Refusal(413, f"the body may be {limits.limit_body_bytes} bytes")
            share.set(len(body) + len(part))
            body += part
    except TimeoutError:
        raise Refusal(408, "the body arrived too slowly", headers={"connection": "close"}) from None
    return body


# ---- bytes -> a JSON object


def parse_json(body: bytearray, limits: ServerLimits) -> tuple[dict[str, Any], int]:
    """Read `body` as (an object, the bytes it takes in memory), and empty it as soon as it is text.

    Strictly: UTF-8, no half surrogate pairs, no NaN, infinities or numbers beyond floats, no key twice.
    Of a key that is there twice parsers disagree which one counts: that is how checks are evaded.
    """
    scan = Scan(limits, "the body")
    scan.add(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Refusal(400, f"the body is not UTF-8, at byte {e.start}") from None
    body.clear()  # it would be there three times: as bytes, text and values
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number)
    except json.JSONDecodeError as e:
        raise Refusal(400, f"the body is not JSON: {e.msg}, at character {e.pos}") from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise Refusal(400, "the body has a number that is too long") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body has to be a JSON object")
    if scan.has_surrogates and any(map(_has_half_a_pair, _texts(value))):
        raise Refusal(400, "the request body contains an unpaired UTF-16 surrogate (\\ud800 to \\udfff)")
    return value, scan.memory


def check_json(texts: Iterable[bytes], limits: ServerLimits, what: str) -> None:
    """Refuse what is nested too deep, or has too many values together, before anything is made of it."""
    scan = Scan(limits, what)
    for text in texts:
        scan.add(text)


class Scan:
    """JSON texts' values, depth and memory, counted before any value is made.

    A piece at a time, so that neither time nor memory grows on what is refused: nine million empty texts
    took one call of `re.sub` 2.4 s and 755 MiB, and every other thread waited for it.
    """

    def __init__(self, limits: ServerLimits, what: str) -> None:
        self._limits, self._what = limits, what
        self._values = 0
        self._text, self._made = _Characters(), _Characters()  # as they came, as values have them
        self.has_surrogates = False

    @property
    def memory(self) -> int:
        return self._made.memory + self._values * _VALUE_BYTES

    def add(self, text: bytes | bytearray) -> None:
        """Count one text. Of what is no JSON, as far as it is."""
        within, quotes, brackets = 0, 0, bytearray()
        for piece in pieces(text):
            self._measure(piece)
            parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            plain = b"".join(parts[within::2])
            within ^= ~len(parts) & 1
            quotes += len(parts) - 1
            brackets += plain.translate(_OPEN_CLOSE, _NO_BRACKETS)
            self._values += sum(map(plain.count, (b",", b"[", b"{", b":")))  # a key is one, too
            most = self._limits.limit_json_values  # a text each at most, and what is opened is closed
            if self._values > most or quotes > 2 * most + 2 or len(brackets) > 2 * most + _PIECE:
                raise Refusal(400, f"{self._what}: more than {most} values")
        if not is_at_most(self._limits.limit_json_depth, brackets):
            said = f"over {self._limits.limit_json_depth} lists or objects inside each other"
            raise Refusal(400, f"{self._what}: {said}")

    def _measure(self, piece: bytes) -> None:
        escapes = piece.replace(b"\\\\", b"")
        escaped, pair = escapes.count(b"\\u"), _PAIR.search(escapes) is not None
        self.has_surrogates |= pair
        n = len(piece.translate(None, _CONTINUATIONS))
        width = 4 if _has_any(piece, _BEYOND_16_BITS) else 2 if _has_any(piece, _BEYOND_LATIN_1) else 1
        self._text.add(n, width)
        self._made.add(n - 5 * escaped, 4 if pair else max(width, 2 if escaped else 1))
        most = 2 * self._limits.limit_body_bytes
        if max(self._text.memory, self._made.memory) > most:
            said = "a single emoji makes all characters of its text take 4 bytes"
            raise Refusal(413, f"{self._what}: may be {most} bytes in memory, where {said}")


@dataclass
class _Characters:
    """Of a text. The widest, such as an emoji, decides how many bytes Python takes for each."""

    n: int = 0
    width: int = 1

    @property
    def memory(self) -> int:
        return self.n * self.width

    def add(self, n: int, width: int) -> None:
        self.n += n
        self.width = max(self.width, width)


def _has_any(piece: bytes, of: bytes) -> bool:
    return not piece.isascii() and len(piece.translate(None, of)) < len(piece)


def pieces(text: bytes | bytearray, size: int = _PIECE) -> Iterator[bytes]:
    """All of it, cut between two escapes, never within one (`\\"`, `\\u0061`)."""
    at = 0
    while at < len(text):
        piece = bytes(text[at : at + size])
        last = piece.rfind(b"\\", -5) if at + size < len(text) else -1
        if last > 0 and (last + 1 - len(piece[: last + 1].rstrip(b"\\"))) % 2:
            piece = piece[:last]
        yield piece
        at += len(piece)


def is_at_most(depth: int, plain: bytes | bytearray) -> bool:
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


def _texts(value: Any) -> Iterator[str]:
    """Every text and key in it."""
    rest = [value]
    while rest:
        match rest.pop():
            case str() as text:
                yield text
            case list() as items:
                rest += items
            case dict() as pairs:
                rest += pairs.keys()
                rest += pairs.values()


def _has_half_a_pair(text: str) -> bool:
    try:
        for at in range(0, len(text), _PIECE):
            text[at : at + _PIECE].encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
