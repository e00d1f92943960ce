"""Bodies for `bench/server/serve.py bodies`, and for the tests: the costliest found, of every route.

Each is a single request of one client. It may hold up the others for 100 ms, and take 64 MiB.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
CHAT, TEXT, IDS, PLAIN = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MOST = 1 << 18  # values
MIB = 1 << 20


@dataclass(frozen=True)
class Posted:
    path: str
    about: str
    body: bytes


def lists(n: int = MOST) -> Iterator[Posted]:
    """Of `n` values, wherever a list or an object may be."""
    user = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "a"}}
    some = n - 16
    many: dict[str, list[Any]] = {
        "nulls": [None] * some,
        "ids": [1] * some,
        "ids, then null": [1] * (some - 1) + [None],
        "negative ids": [-1] * some,
        "texts": ["a"] * some,
        "lists": [[1]] * (some // 2),
        "objects": [{}] * (some // 2),
    }
    pairs = {f"k{i}": 1 for i in range(some // 2)}
    for about, values in many.items():
        yield Posted(TEXT, f"prompt: {about}", _json({"prompt": values}))
        yield Posted(TEXT, f"stop: {about}", _json({"prompt": "a", "stop": values}))
        yield Posted(PLAIN, f"tokens: {about}", _json({"tokens": values}))
        yield Posted(CHAT, f"messages: {about}", _json({"messages": values}))
        yield Posted(CHAT, f"parts: {about}", _json({"messages": [{"role": "user", "content": values}]}))
        yield Posted(CHAT, f"tools: {about}", _json({"messages": [user], "tools": values}))
    yield Posted(TEXT, "prompt: one list", _json({"prompt": [[1] * some]}))
    yield Posted(TEXT, "logit_bias", _json({"prompt": "a", "logit_bias": pairs}))
    yield Posted(TEXT, "unknown fields", _json({"prompt": "a", "max_tokens": 1, **pairs}))
    yield Posted(CHAT, "messages", _json({"messages": [user] * (n // 5)}))
    yield Posted(CHAT, "tools", _json({"messages": [user], "tools": [tool] * (n // 7)}))
    yield Posted(CHAT, "calls", _json({"messages": [_called("{}") for _ in range(n // 12)]}))
    yield Posted(CHAT, "arguments", _json({"messages": [_called(_json(many["lists"]).decode())]}))
    yield Posted(CHAT, "variables", _json({"messages": [user], "chat_template_kwargs": pairs}))
    yield Posted(CHAT, "schema", _json({"messages": [user], "json_schema": {"enum": many["ids"]}}))


def texts(size: int) -> Iterator[Posted]:
    """Of `size` bytes, wherever a text may be, of all kinds."""
    n = size - 256
    kinds = {
        "letters": b"a b " * (n // 4),
        "escaped quotes": rb"\"" * (n // 2),
        "escaped letters": rb"\u00e9" * (n // 6),
        "pairs": rb"\ud83d\ude00" * (n // 12),
        "emojis": "\U0001f600".encode() * (n // 4),
        "one emoji": "\U0001f600".encode() + b"a" * (n - 4),
    }
    for about, raw in kinds.items():
        yield Posted(TEXT, f"prompt: {about}", b'{"prompt":"%s"}' % raw)
        yield Posted(CHAT, f"message: {about}", b'{"messages":[{"role":"user","content":"%s"}]}' % raw)
        yield Posted(IDS, f"content: {about}", b'{"content":"%s"}' % raw)
    text = kinds["letters"].decode()
    user = {"role": "user", "content": "a"}
    for field in ("grammar", "user", text):
        body = {"messages": [user], "max_tokens": 1, field: text if field != text else 1}
        yield Posted(CHAT, f"{field[:8]}: a text", _json(body))
    answer = {"role": "assistant", "reasoning_content": text}
    for about, message in (("name", {**user, "name": text}), ("thought", answer), ("call", _called(text))):
        yield Posted(CHAT, f"{about}: a text", _json({"messages": [message], "max_tokens": 1}))
    yield Posted(TEXT, "no end of a text", b'{"prompt":["' + rb"\"" * (n // 2))
    yield Posted(TEXT, "texts without commas", b'{"prompt":[' + b'""' * (n // 2))
    yield Posted(TEXT, "brackets that close nothing", b'{"prompt":' + b"]" * n)


def _called(arguments: str) -> dict[str, Any]:
    function = {"name": "a", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"function": function}]}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def answered() -> Iterator[Posted]:
    """The largest answers to what is not refused, by the default limits."""
    text = "\x01" * (64 << 10)
    yield Posted(IDS, "most tokens", _json({"content": text}))
    yield Posted(IDS, "most tokens with pieces", _json({"content": text, "with_pieces": True}))
    yield Posted(PLAIN, "most ids", _json({"tokens": [300 + i % 3000 for i in range(1 << 16)]}))


def everything() -> Iterator[Posted]:
    yield from lists()
    for size in (1, 8, 20):
        yield from texts(size * MIB)
    yield from answered()


# ---- what they cost


def bodies(port: int, pid: int, rounds: int) -> dict[str, Any]:
    """How long /health took at most while each was in hand, and the memory it took; the best round counts.

    Then thirty conversations of 7 MiB at once, and what is kept after them.
    """
    worst_ms: dict[str, float] = {}
    worst_mib: dict[str, float] = {}
    statuses: set[int] = set()
    began = _mib(pid, "VmRSS")
    for posted in everything():
        name = f"{posted.path} {posted.about}, {len(posted.body) / MIB:.1f} MiB"
        costs = [_cost(port, pid, [posted]) for _ in range(rounds)]
        worst_ms[name], worst_mib[name] = min(c[0] for c in costs), min(c[1] for c in costs)
        statuses |= {status for c in costs for status in c[2]}
    crowd = _cost(port, pid, 30 * [next(texts(7 * MIB))])
    return {"bodies": len(worst_ms), "statuses": sorted(statuses),
            "stall_max_ms": max(worst_ms.values()), "stalls_ms": _top(worst_ms),
            "memory_max_mib": max(worst_mib.values()), "memory_mib": _top(worst_mib),
            "crowd_statuses": sorted(crowd[2]), "crowd_ms": crowd[0], "crowd_mib": crowd[1],
            "kept_mib": _mib(pid, "VmRSS") - began}  # fmt: skip


def _top(found: dict[str, float]) -> dict[str, float]:
    return {name: round(found[name], 1) for name in sorted(found, key=found.__getitem__)[:-6:-1]}


def _cost(port: int, pid: int, posted: Sequence[Posted]) -> tuple[float, float, set[int]]:
    """(ms that somebody else waited at most, MiB at the peak over those before, statuses)."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda p=p: statuses.append(_post(port, p))) for p in posted]
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    before, waited = _mib(pid, "VmRSS"), [0.0]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        waited.append(_health_s(port))
        time.sleep(0.002)
    for _ in range(10):  # what is done afterwards: freeing it
        waited.append(_health_s(port))
        time.sleep(0.01)
    return 1e3 * max(waited), _mib(pid, "VmHWM") - before, set(statuses)


def _post(port: int, posted: Posted) -> int:
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    try:
        connection.request("POST", posted.path, posted.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:  # refused by its length, and closed before all of it was sent
        return 413
    finally:
        connection.close()


def _health_s(port: int) -> float:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=300)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    taken = time.perf_counter() - began
    assert answer.status == 200, answer.read()
    connection.close()
    return taken


def _mib(pid: int, key: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no {key}")
