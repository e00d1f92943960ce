"""A request's body: received within its limits of size, time and memory, and read as one JSON object."""

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
_PIECE = 64 << 10  # scanned in 0.2 ms; between two pieces other threads get their turn
_VALUE_BYTES = 100  # memory of a Python value: a short text, or one pair of an object


class MemoryBudget:
    """Bytes that the bodies of all requests in progress may take together."""

    def __init__(self, total: int) -> None:
        self.left = total


class Reservation:
    """One request's part of the budget: first the bytes of its body, then the values parsed from them."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._taken = budget, 0

    def set(self, n: int) -> None:
        if n - self._taken > self._budget.left:
            raise Refusal(503, "too many large requests are being answered; try again")
        self._budget.left -= n - self._taken
        self._taken = n

    def add(self, n: int) -> None:
        self.set(self._taken + n)

    def give_back(self) -> None:
        self.set(0)


async def read_body(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limits: ServerLimits, share: Reservation
) -> bytearray:
    """Return the whole body. Refuse one that is too large (413), too late or too slow on average (408)."""
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
                raise Refusal(413, f"the body is larger than {limits.limit_body_bytes} bytes; send less")
            share.set(len(body) + len(part))
            body += part
    except TimeoutError:
        raise Refusal(408, "the body arrived too slowly", headers={"connection": "close"}) from None
    return body


# ---- bytes -> a JSON object


def parse_json(body: bytearray, limits: ServerLimits) -> tuple[dict[str, Any], int]:
    """Return the object in `body` and the bytes it takes in memory; empty `body` once it is decoded.

    Strictly: UTF-8, no unpaired surrogate, no NaN, infinity or number beyond floats, no key twice.
    Parsers disagree which of two equal keys counts, and attackers use that to evade checks.
    """
    scan = Scan(limits, "the body")
    scan.add(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Refusal(400, f"the body is not UTF-8, at byte {e.start}") from None
    body.clear()  # else memory would hold it three times: as bytes, text and values
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_number)
    except json.JSONDecodeError as e:
        raise Refusal(400, f"the body is not JSON: {e.msg}, at character {e.pos}") from None
    except ValueError:  # Python limits the digits of an integer
        raise Refusal(400, "the body has an integer with too many digits; send it as text") from None
    if not isinstance(value, dict):
        raise Refusal(400, "the body has to be a JSON object")
    if scan.has_surrogates and any(map(_has_half_a_pair, _texts(value))):
        raise Refusal(400, "the request body contains an unpaired UTF-16 surrogate (\\ud800 to \\udfff)")
    return value, scan.memory


def check_json(texts: Iterable[bytes], limits: ServerLimits, what: str) -> None:
    """Refuse JSON texts that are nested too deep or have too many values together, before parsing them."""
    scan = Scan(limits, what)
    for text in texts:
        scan.add(text)


class Scan:
    """Values, depth and memory of JSON texts, counted before any value is made.

    A text is scanned in pieces, so that a text that is refused costs little time and memory. With one call
    of `re.sub`, nine million empty texts took 2.4 s and 755 MiB, and every other thread waited.
    """

    def __init__(self, limits: ServerLimits, what: str) -> None:
        self._limits, self._what = limits, what
        self._values = 0
        self._text, self._made = _Characters(), _Characters()  # of the texts as sent, of the parsed values
        self.has_surrogates = False

    @property
    def memory(self) -> int:
        return self._made.memory + self._values * _VALUE_BYTES

    def add(self, text: bytes | bytearray) -> None:
        """Count one text, and refuse it if a limit is exceeded. It need not be valid JSON."""
        within, quotes, brackets = 0, 0, bytearray()
        for piece in pieces(text):
            self._measure(piece)
            parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            plain = b"".join(parts[within::2])
            within ^= ~len(parts) & 1
            quotes += len(parts) - 1
            brackets += plain.translate(_OPEN_CLOSE, _NO_BRACKETS)
            self._values += sum(map(plain.count, (b",", b"[", b"{", b":")))  # a key counts, too
            most = self._limits.limit_json_values  # at most two quotes and two brackets each
            if self._values > most or quotes > 2 * most + 2 or len(brackets) > 2 * most + _PIECE:
                raise Refusal(400, f"{self._what}: more than {most} values")
        if not is_at_most(self._limits.limit_json_depth, brackets):
            why = f"lists and objects nested more than {self._limits.limit_json_depth} deep"
            raise Refusal(400, f"{self._what}: {why}")

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
            why = "one emoji makes every character of its text take 4 bytes"
            raise Refusal(413, f"{self._what}: larger than {most} bytes in memory, where {why}")


@dataclass
class _Characters:
    """A text's characters. The widest one (say, an emoji) decides how many bytes Python takes for each."""

    n: int = 0
    width: int = 1

    @property
    def memory(self) -> int:
        return self.n * self.width

    def add(self, n: int, width: int) -> None:
        self.n += n
        self.width = max(self.width, width)


def _has_any(piece: bytes, wanted: bytes) -> bool:
    return not piece.isascii() and len(piece.translate(None, wanted)) < len(piece)


def pieces(text: bytes | bytearray, size: int = _PIECE) -> Iterator[bytes]:
    """Yield the text in pieces, never cut within an escape (`\\"`, `\\u0061`)."""
    at = 0
    while at < len(text):
        piece = bytes(text[at : at + size])
        last = piece.rfind(b"\\", -5) if at + size < len(text) else -1
        if last > 0 and (last + 1 - len(piece[: last + 1].rstrip(b"\\"))) % 2:
            piece = piece[:last]
        yield piece
        at += len(piece)


def is_at_most(depth: int, plain: bytes | bytearray) -> bool:
    """Tell whether brackets are nested at most that deep. This comes before parsing, which recurses.

    Each round removes the innermost pairs, so Python loops over levels, not bytes. Brackets that do not match
    remain; they are not JSON.
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
        raise Refusal(400, f"the key {twice[:64]!r} occurs twice in an object", param=twice[:64])
    return value


def _no_constant(name: str) -> Any:
    raise Refusal(400, f"{name} is not JSON; send a finite number or null")


def _number(text: str) -> float | int:
    """Return 1.0 as an integer, as JSON Schema and so our OpenAPI description have it."""
    value = float(text)
    if not math.isfinite(value):
        raise Refusal(400, f"the number {text[:32]} is too large for a float")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _texts(value: Any) -> Iterator[str]:
    """Yield every text and key in a JSON value."""
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
