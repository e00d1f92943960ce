"""HTTP by hand over a socket, for what no client library sends; a dummy server, in a thread or a process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dummy_app import Dummy
from logged import logged

from thermocline.server.http import listener, server
from thermocline.server.http.guard import Admission
from thermocline.server.http.limits import ServerLimits


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert set(value["error"]) >= {"message", "type", "param", "code"}
        error: dict[str, Any] = value["error"]
        return error


def read_answer(sock: socket.socket, *, to_head: bool = False) -> Answer:
    """One response with a Content-Length, or until the connection ends; not a byte of the next."""
    data, body = b"", b""
    while not data.endswith(b"\r\n\r\n"):
        got = sock.recv(1)
        assert got, f"the connection ended in a response's head: {data!r}"
        data += got
    lines = data.decode("latin-1").strip().split("\r\n")
    headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines[1:])}
    status = int(lines[0].split()[1])
    bodyless = to_head or status == 204
    length = int(headers.get("content-length", 1 << 40)) if not bodyless else 0
    while len(body) < length and (got := sock.recv(min(65536, length - len(body)))):
        body += got
    return Answer(status, headers, body)


def head(line: str, *headers: str, host: str | None = "localhost") -> bytes:
    hosts = [f"Host: {host}"] if host is not None else []
    return "\r\n".join((line, *hosts, *headers, "", "")).encode("latin-1")


def post(path: str, body: bytes, *headers: str, host: str = "localhost") -> bytes:
    about = ("Content-Type: application/json", f"Content-Length: {len(body)}", *headers)
    return head(f"POST {path} HTTP/1.1", *about, host=host) + body


@dataclass
class Running:
    app: Dummy
    port: int
    log: list[str]
    trouble: list[str]
    servers: list[server.HttpServer]

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.settimeout(60)
        return sock

    def ask(self, request: bytes) -> Answer:
        with self.connect() as sock:
            sock.sendall(request)
            return read_answer(sock, to_head=request.startswith(b"HEAD"))

    def get(self, path: str, *headers: str) -> Answer:
        return self.ask(head(f"GET {path} HTTP/1.1", *headers))


@contextlib.contextmanager
def serving(limits: ServerLimits | None = None, **options: Any) -> Iterator[Running]:
    opened = listener.listen("127.0.0.1", 0, has_keys=False)
    running = Running(Dummy(), opened.port, [], [], [])
    thread = threading.Thread(
        target=server.run,
        args=(running.app, opened),
        kwargs={
            "limits": limits or ServerLimits(limit_grace_s=0),
            "admission": Admission(**options),
            "access_log": True,
            "started": running.servers.append,
        },
    )
    with logged("thermocline.access") as running.log, logged("thermocline.server") as running.trouble:
        thread.start()
        try:
            yield running
        finally:
            running.servers[0].stop()
            thread.join(5)
            assert not thread.is_alive()


def wait_until(true: Any, at_most_s: float = 5) -> float:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < at_most_s
        time.sleep(0.01)
    return time.monotonic() - began


class Process:
    """The dummy as a program of its own, with this checkout's package."""

    def __init__(self, **told: Any) -> None:
        path = os.pathsep.join(p for p in sys.path if p)
        script = Path(__file__).with_name("dummy_app.py")
        self.began = time.monotonic()
        self.popen = subprocess.Popen(
            [sys.executable, "-P", str(script), json.dumps(told)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __enter__(self) -> Process:
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().strip()
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()

    def connect(self) -> socket.socket:
        unix = self.url.startswith("unix:")
        sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
        where: Any = self.url[5:] if unix else ("127.0.0.1", int(self.url.rpartition(":")[2]))
        sock.settimeout(60)
        sock.connect(where)
        return sock

    def ask(self, request: bytes) -> Any:
        with self.connect() as sock:
            sock.sendall(request)
            return read_answer(sock)

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> float:
        """Seconds from the signal to the end."""
        began = time.monotonic()
        self.popen.send_signal(sig)
        self.popen.wait(10)
        return time.monotonic() - began
