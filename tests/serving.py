"""A server in a thread of this process, its engine in another, for tests that speak to it over a socket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import httpx2
from logged import logged

from thermocline.server.http import server as http
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.listener import listen
from thermocline.server.serve import ServerOptions, serve
from thermocline.session.options import EngineOptions, Keywords, ModelOptions, changed

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the bundled model tells stories
DEADLINE_S = 60.0


@dataclass
class Served:
    url: str
    notes: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    def client(self, **how: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=DEADLINE_S, **how)

    def health(self) -> dict[str, Any]:
        with self.client() as c:
            found: dict[str, Any] = c.get("/health").json()
            return found

    def until(self, ready: bool = True) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.health()["ready"] != ready:
            assert time.monotonic() < end, self.notes
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        with self.client() as c:
            lines = c.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def until_idle(self, seconds: float = DEADLINE_S) -> float:
        """-> how long it took until all slots and blocks were free."""
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            m = self.metrics()
            free = m["thermocline_slots_free"] == m["thermocline_slots_total"]
            if free and m["thermocline_kv_blocks_free"] == m["thermocline_kv_blocks_total"]:
                return time.monotonic() - begin
            time.sleep(0.02)
        raise AssertionError(f"something is still held: {m}")


@contextlib.contextmanager
def served(
    limits: ServerLimits | None = None,
    *,
    wait: bool = True,
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[Served]:
    """`options`: LLM's, and of `serve` its keys, hosts, origins, name, directory and models_max."""
    served_with = ("keys", "hosts", "origins", "name", "directory", "models_max")
    own = {k: options.pop(k) for k in served_with if k in options}
    model, keywords = options.pop("model", None), cast(Keywords, options)
    files = changed(ModelOptions(model=model, chat_template=TEMPLATE), keywords)
    asked = changed(EngineOptions(threads=1, max_batch=4), keywords)
    listener = listen("127.0.0.1", 0, has_keys=False)
    found = Served(listener.url)
    began: list[http.HttpServer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(
                files,
                asked,
                listener,
                ServerOptions(limits or ServerLimits(), sampling=sampling or {}, **own),
                started=began.append,
            )
        except BaseException as e:
            errors.append(e)

    thread = found.thread = threading.Thread(target=run, name="server")
    with logged() as found.notes:
        thread.start()
        try:
            if wait:
                found.until()
            yield found
        finally:
            while not began and thread.is_alive():
                time.sleep(0.01)
            for server in began:
                server.stop()
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    if errors:
        raise errors[0]
