"""The socket: clients that are slow, silent or many, and how a server starts and stops. Limits are shortened;
what is measured on a shared machine has a bound several times the one that is promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from raw_http import Process, Running, head, post, read_answer, serving, wait_until

from thermocline.server.http import listener
from thermocline.server.http import server as http
from thermocline.server.http.limits import ServerLimits

QUICK = ServerLimits(
    limit_header_s=0.4,
    limit_keep_alive_s=0.4,
    limit_body_s=0.8,
    limit_body_stall_s=0.4,
    limit_write_stall_s=0.4,
    limit_grace_s=0,
)
FOREVER = b'{"n":1000000000,"event_bytes":4000}'


@pytest.fixture(scope="module")
def quick() -> Iterator[Running]:
    with serving(QUICK, slots=64) as running:
        yield running


def trickle(sock: socket.socket, data: bytes, every_s: float) -> float:
    """Byte by byte until the server answers or hangs up: after how many seconds it did."""
    began = time.monotonic()
    sock.setblocking(True)
    for n in range(len(data)):
        sock.settimeout(every_s)
        with contextlib.suppress(TimeoutError):
            sock.recv(1, socket.MSG_PEEK)
            break
        try:
            sock.sendall(data[n : n + 1])
        except OSError:
            break
    sock.settimeout(5)
    return time.monotonic() - began


def is_closed(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


# ---- B6: slow heads and bodies


@pytest.mark.parametrize("start", [b"", head("GET /health HTTP/1.1")])
def test_headers_that_trickle_in_are_given_up(quick: Running, start: bytes) -> None:
    """B6: also for a connection's second request, whose time begins with its first byte."""
    with quick.connect() as sock:
        sock.sendall(start)
        if start:
            assert read_answer(sock).status == 200
        assert 0.2 < trickle(sock, head("GET /health HTTP/1.1", "X: " + "y" * 1000), 0.05) < 20
        assert read_answer(sock).error["code"] == 408
        assert is_closed(sock)


def test_a_connection_that_says_nothing_is_closed(quick: Running) -> None:
    with quick.connect() as new, quick.connect() as kept:
        kept.sendall(head("GET /health HTTP/1.1"))
        assert read_answer(kept).status == 200
        assert read_answer(new).status == 408
        assert is_closed(new) and is_closed(kept)


@pytest.mark.parametrize("sent", [b"", b"{"])
def test_a_body_that_does_not_come_is_given_up(quick: Running, sent: bytes) -> None:
    with quick.connect() as sock:
        sock.sendall(post("/v1/echo", b"x" * 1000)[:-1000] + sent)
        began = time.monotonic()
        answer = read_answer(sock)
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert is_closed(sock) and time.monotonic() - began < 20


def test_a_body_below_the_least_speed_is_given_up_before_its_time_is_over() -> None:
    limits = dataclasses.replace(QUICK, limit_body_s=30)
    with serving(limits) as server, server.connect() as sock:
        sock.sendall(post("/v1/echo", b" " * 1000)[:-1000])
        assert trickle(sock, b" " * 1000, 0.05) < 20  # 20 bytes a second, where 1024 are asked for
        assert read_answer(sock).status == 408


def test_a_body_that_is_fast_enough_but_endless_is_given_up() -> None:
    limits = dataclasses.replace(QUICK, limit_body_rate=1)
    with serving(limits) as server, server.connect() as sock:
        sock.sendall(post("/v1/echo", b" " * 1000)[:-1000])
        assert 0.5 < trickle(sock, b" " * 1000, 0.05) < 20
        assert read_answer(sock).status == 408


def test_a_refused_body_is_not_received_for_ever(quick: Running) -> None:
    with quick.connect() as sock:
        sock.sendall(head("POST /v1/echo HTTP/1.1", "Content-Type: text/plain", "Content-Length: 99999999"))
        assert read_answer(sock).status == 415
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 30:
                sock.sendall(b"x" * 1000)
                time.sleep(0.01)
        assert time.monotonic() - began < 20


# ---- B7: clients that do not read


def test_a_client_that_never_reads_is_cut_off_and_its_request_cancelled() -> None:
    """B7: what waits for it stays below the limit, then its generator is closed and its place is free."""
    limits = dataclasses.replace(QUICK, limit_buffer_bytes=1 << 20)
    with serving(limits) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post("/v1/stream", FOREVER))
        wait_until(lambda: server.app.active == 1)
        wait_until(lambda: server.app.active == 0)
        assert server.app.cancelled == 1
        # The kernel's own send buffer is at most 4 MiB (net.ipv4.tcp_wmem), besides ours.
        assert server.app.chunks * 4000 < (5 << 20) + 100_000


def test_an_answer_that_was_sent_whole_but_never_read_does_not_keep_its_connection() -> None:
    with serving(QUICK) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post("/v1/stream", b'{"n":1,"event_bytes":8000000}', "Connection: close"))
        wait_until(lambda: server.app.chunks == 1)
        time.sleep(1)
        with pytest.raises(ConnectionError):  # reset: most of it is missing
            while sock.recv(1 << 20):
                pass


def test_a_client_that_reads_slowly_keeps_its_answer() -> None:
    """The limit is on silence, not on how long the whole takes: some bytes wait here for over a second."""
    limits = dataclasses.replace(QUICK, limit_write_stall_s=0.6)
    with serving(limits) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.connect(("127.0.0.1", server.port))
        sock.sendall(post("/v1/stream", b'{"n":1,"event_bytes":8000000}', "Connection: close"))
        got = 0
        while part := sock.recv(100_000, socket.MSG_WAITALL):
            got += len(part)
            time.sleep(0.02)
        assert got > 8_000_000 and server.app.cancelled == 0


def test_a_stream_is_cancelled_when_its_client_hangs_up(quick: Running) -> None:
    before = quick.app.cancelled
    for path, body in (("/v1/stream", b'{"n":100000,"every_s":0.01}'), ("/v1/hang", b"{}")):
        with quick.connect() as sock:
            sock.sendall(post(path, body))
            wait_until(lambda: quick.app.active == 1)
        assert wait_until(lambda: quick.app.active == 0) < 0.5
    assert quick.app.cancelled == before + 2


def test_a_request_that_takes_too_long_is_ended_with_an_error() -> None:
    limits = dataclasses.replace(QUICK, limit_request_s=0.3)
    with serving(limits) as server:
        assert server.ask(post("/v1/hang", b"{}")).error["code"] == 504
        stream = server.ask(post("/v1/stream", b'{"n":1000,"every_s":0.01}', "Connection: close"))
        assert stream.status == 200 and b'"code": 504' in stream.body and b"[DONE]" not in stream.body
        assert server.app.active == 0


# ---- many connections


@pytest.mark.slow
def test_good_clients_do_not_notice_hostile_ones() -> None:
    """B6, B7, R6: 64 slow headers and 32 that never read. Promised: health in 100 ms for 99 of 100. Here a
    hundred clients share two cores with the server and other work: 300 ms, for 95 of 100."""
    stop = threading.Event()
    limits = {"limit_header_s": 0.4, "limit_write_stall_s": 0.4, "limit_grace_s": 0}
    with Process(port=0, limits=limits, slots=64) as server:
        times = health_times(server, stop)
    assert sorted(times)[94] < 0.3, sorted(times)[-10:]


def health_times(server: Process, stop: threading.Event) -> list[float]:

    def hostile(n: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), server.connect() as sock:
                if n % 3 == 0:
                    sock.sendall(post("/v1/stream", FOREVER))
                    stop.wait(0.6)
                else:
                    trickle(sock, head("GET /health HTTP/1.1", "X: " + "y" * 5), 0.2)

    threads = [threading.Thread(target=hostile, args=(n,)) for n in range(96)]
    for thread in threads:
        thread.start()
    times: list[float] = []
    try:
        for _ in range(100):
            began = time.perf_counter()
            assert server.ask(head("GET /health HTTP/1.1")).status == 200
            times.append(time.perf_counter() - began)
            time.sleep(0.005)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return times


def test_connections_are_bounded_and_idle_ones_make_room() -> None:
    """More than the limit at work: 503 with Retry-After. Waiting for nothing: closed for who comes."""
    limits = ServerLimits(limit_connections=4, limit_grace_s=0)
    with serving(limits, slots=9) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(4)]
        time.sleep(0.1)
        assert server.get("/health").status == 200
        assert is_closed(idle[0])  # the oldest
        busy = [stack.enter_context(server.connect()) for _ in range(4)]
        for n, sock in enumerate(busy):
            sock.sendall(post("/v1/hang", b"{}"))
            wait_until(lambda n=n: server.app.active == n + 1)
        for _ in range(5):
            answer = server.get("/v1/models")
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.headers["connection"] == "close"
        busy[0].close()
        wait_until(lambda: server.app.active == 3)
        assert server.get("/health").status == 200


def test_however_many_connections_are_held_health_is_told() -> None:
    """They shut out whoever watches over the server, too. Nothing else comes in behind such a request."""
    limits = ServerLimits(limit_connections=3, limit_grace_s=0)
    with serving(limits, slots=9) as server, contextlib.ExitStack() as stack:
        for n in range(3):
            stack.enter_context(server.connect()).sendall(post("/v1/hang", b"{}"))
            wait_until(lambda n=n: server.app.active == n + 1)
        silent = [stack.enter_context(server.connect()) for _ in range(40)]
        for path in ("/health", "/v1/health"):
            assert server.get(path).status == 200
        assert server.ask(post("/health", b"{}")).status == 503
        with server.connect() as sock:
            sock.sendall(head("GET /health HTTP/1.1") + post("/v1/hang", b"{}"))
            assert [read_answer(sock).status for _ in range(2)] == [200, 503]
        assert server.app.active == 3
        assert is_closed(silent[0]), "only a few are kept beyond the limit"


def test_listening_ends_with_the_signal_not_with_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow_tick(server: http.HttpServer) -> None:
        while not server.should_exit:
            await asyncio.sleep(1)

    monkeypatch.setattr(http.HttpServer, "main_loop", slow_tick)
    with serving(QUICK) as server:
        wait_until(lambda: server.get("/health").status == 200)
        server.servers[0].stop()

        def is_refused() -> bool:
            with contextlib.suppress(ConnectionError), server.connect():
                return False
            return True

        assert wait_until(is_refused) < 0.5


def test_open_files_are_raised_to_what_the_connections_need() -> None:
    resource = pytest.importorskip("resource", reason="this system has no such limit")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        assert listener.allow_files(300) == 300
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (428, before[1])
        listener.allow_files(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 428
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
