"""Clients for `bench/server/serve.py`: light ones that stream, are slow, or leave; a server to point them at.

HTTP by hand over asyncio: a client library takes more of the processor than the server under test.
As a program it asks again and again until its stdin ends, and prints how long each answer took (`polling`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

HOST = "127.0.0.1"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the bundled model tells stories
PATIENCE_S = 300.0


# ---- the server, as a person starts it


class Serving:
    """`thermocline serve` on a free port (or a UNIX socket), in a temporary folder of its own."""

    def __init__(
        self, *flags: str, program: Sequence[str] = ("-m", "thermocline"), template: str | None = TEMPLATE
    ) -> None:
        """`template` None, or a model among the flags: the model's own."""
        self.folder = tempfile.TemporaryDirectory()
        where = Path(self.folder.name)
        (where / "template.jinja").write_text(template or "")
        (where / "tmp").mkdir()
        self.log = where / "log"
        own = () if "-m" in flags or template is None else ("--template", str(where / "template.jinja"))
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", *program, "serve", "--port", "0", *own, *flags],
                stderr=log,
                env={**os.environ, "TMPDIR": str(where / "tmp")},
            )

    def __enter__(self) -> Serving:
        self.port = int(self._until(self._url).rpartition(":")[2])
        self._until(lambda: health(self.port))
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
        self.popen.wait(30)
        self.folder.cleanup()

    def _url(self) -> str:
        words = self.log.read_text().split()
        return words[words.index("on") + 1] if "on" in words else ""

    def _until(self, found: Callable[[], Any]) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (value := found()):
            if self.popen.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.05)
        return value

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> float:
        """-> seconds until it had ended."""
        began = time.monotonic()
        self.popen.send_signal(sig)
        self.popen.wait(60)
        return time.monotonic() - began


def health(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as r:
            return bool(r.status == 200)
    except OSError:
        return False


def metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as r:
        lines = r.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name.removeprefix("thermocline_"): float(value) for name, value in pairs}


def until_free(port: int) -> float:
    """-> seconds until every slot and block was free, and nobody waited."""
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE_S:
        m = metrics(port)
        free = m["slots_free"] == m["slots_total"] and m["kv_blocks_free"] == m["kv_blocks_total"]
        if free and m["requests_queued"] == 0:
            return time.monotonic() - began
        time.sleep(0.01)
    raise AssertionError(f"something is still held: {m}")


def descendants(pid: int) -> list[int]:
    said = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [d for child in map(int, said.split()) for d in (child, *descendants(child))]


def engines(pid: int) -> list[int]:
    """The processes of a server that compute, or open a model."""
    asked = ["pgrep", "-P", str(pid), "-f", "spawn_main"]
    return list(map(int, subprocess.run(asked, capture_output=True, text=True).stdout.split()))


def cpu_seconds(pid: int) -> float:
    """That all of its threads have had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- one request


@dataclass
class Call:
    """A response as it comes: `async with Call(...) as c`, then `c.pieces()` or `c.body()`."""

    port: int
    path: str
    asked: dict[str, Any] | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    head_s: float = 0.0  # from connecting to the end of the response's head

    async def __aenter__(self) -> Call:
        began = time.perf_counter()
        self.reader, self.writer = await asyncio.open_connection(HOST, self.port, limit=1 << 20)
        self.writer.write(request(self.path, self.asked))
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.head_s = time.perf_counter() - began
        self.status = int(lines[0].split()[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (x.partition(":") for x in lines[1:] if x)}
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.writer.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Each as the server wrote it: of a stream, whole events."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


def request(path: str, asked: dict[str, Any] | None) -> bytes:
    if asked is None:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Told:
    """A whole answer: of each choice its text and what was said of its tokens; when the pieces came."""

    texts: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    at: list[float] = field(default_factory=list)

    def take(self, body: dict[str, Any]) -> None:
        self.tokens = (body.get("usage") or {}).get("completion_tokens", self.tokens)
        for c in body["choices"]:
            i, said = c["index"], c.get("message") or c.get("delta") or c
            self.texts[i] = self.texts.get(i, "") + (said.get("text") or said.get("content") or "")
            about = c.get("logprobs") or {}
            found = about.get("token_logprobs") or [t["logprob"] for t in about.get("content") or ()]
            self.scores.setdefault(i, []).extend(found)
            if c.get("finish_reason"):
                self.reasons[i] = c["finish_reason"]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.at, self.at[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - 1) / (self.at[-1] - self.at[0])


class Overloaded(Exception):
    """503 with Retry-After: to be asked again."""


async def ask(port: int, path: str, asked: dict[str, Any]) -> Told:
    """Raises Overloaded, AssertionError for any other status than 200 and a stream that does not end well."""
    told = Told()
    if stream := asked.get("stream"):
        asked = asked | {"stream_options": {"include_usage": True}}
    async with Call(port, path, asked) as call:
        if call.status == 503 and "retry-after" in call.headers:
            raise Overloaded
        assert call.status == 200, (call.status, await call.body())
        if not stream:
            told.take(json.loads(await call.body()))
            return told
        arrived = [(time.perf_counter(), piece) async for piece in call.pieces()]
    found = [(at, e) for at, piece in arrived for e in piece.removesuffix(b"\n\n").split(b"\n\n")]
    *events, end = [(at, e) for at, e in found if not e.startswith(b":")]
    assert end[1] == b"data: [DONE]", end
    bodies = [(at, json.loads(e.removeprefix(b"data: "))) for at, e in events]
    for at, body in bodies:
        told.take(body)
        if any(_text(c) for c in body["choices"]):
            told.at.append(at)
    return told


def _text(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or (choice.get("delta") or {}).get("content") or "")


async def insist(port: int, path: str, asked: dict[str, Any]) -> Told:
    while True:
        try:
            return await ask(port, path, asked)
        except Overloaded:
            await asyncio.sleep(0.1)


async def gather(calls: list[Coroutine[Any, Any, Any]], together: int) -> list[Any]:
    places = asyncio.Semaphore(together)

    async def one(call: Coroutine[Any, Any, Any]) -> Any:
        async with places:
            return await call

    return await asyncio.gather(*map(one, calls))


# ---- clients that behave badly


async def leave(port: int, path: str, asked: dict[str, Any], how: str, after_s: float) -> None:
    """Ask, read what comes for `after_s`, and go: "fin", "rst" or "half" (silent, but still there)."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request(path, asked))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            while await reader.read(65536):
                pass
    sock = writer.get_extra_info("socket")
    if how == "rst":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        with contextlib.suppress(OSError):
            writer.write_eof()
        with contextlib.suppress(OSError):
            await reader.read(-1)
    writer.close()


async def dribble(port: int, text: bytes, every_s: float = 0.5) -> None:
    """A byte now and then, until it is told off; then again."""
    while True:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            for i in range(len(text)):
                writer.write(text[i : i + 1])
                await asyncio.sleep(every_s)
                if reader.at_eof():
                    break
        except OSError:
            pass
        finally:
            writer.close()


async def never_read(port: int, asked: dict[str, Any]) -> None:
    """Asks for megabytes and reads none of them."""
    while True:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        with sock, contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
            sock.send(request("/v1/completions", asked))
            await asyncio.sleep(20)


async def idle(port: int) -> None:
    """Connected, without a word, again when it is cut off."""
    while True:
        reader, writer = await asyncio.open_connection(HOST, port)
        with contextlib.suppress(OSError):
            await reader.read(-1)
        writer.close()


# ---- short requests, from a process of its own: clients that are busy would not notice an answer in time


@contextlib.contextmanager
def polling(port: int, rate: float, asked: dict[str, Any] | None = None) -> Iterator[list[float]]:
    """The list is filled, with the seconds until each answer, when the block is left.

    Of /health, which has to say 200; or of refusals, where something is asked that there is no room for.
    """
    seconds: list[float] = []
    command = [sys.executable, __file__, str(port), str(rate), json.dumps(asked)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        yield seconds
        seconds += json.loads(popen.communicate()[0])


def poll(port: int, rate: float, asked: dict[str, Any] | None, over: Callable[[], bool]) -> list[float]:
    seconds, due = [], time.perf_counter()
    data = request("/health" if asked is None else "/v1/completions", asked)
    while not over():
        begin = time.perf_counter()
        with socket.create_connection((HOST, port), 30) as s:
            s.sendall(data)
            head = s.recv(4096).lower()
            taken = time.perf_counter() - begin
        status = head.split()[1]
        assert status == b"200" or (asked and status in (b"429", b"503") and b"retry-after" in head), head
        if not (asked and status == b"200"):  # there was room after all
            seconds.append(taken)
        due = max(due + random.uniform(0.5, 1.5) / rate, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
    return seconds


def _main() -> None:
    over = threading.Event()

    def until_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=until_the_end, daemon=True).start()
    port, rate, asked = sys.argv[1:]
    print(json.dumps(poll(int(port), float(rate), json.loads(asked), over.is_set)))


if __name__ == "__main__":
    _main()
