"""The guard: nothing reaches the application unless it is allowed. Over real sockets, but for the parsers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_http import Answer, Running, head, post, read_answer, serving, wait_until

from thermocline.errors import IOFailure, UsageError
from thermocline.options import Option, options_of, read_options
from thermocline.server.http.guard import Access
from thermocline.server.http.limits import ServerLimits, described
from thermocline.server.http.listener import api_keys

KEY, CANARY = "sk-7f3a9c-secret", "canary-5d1e"
SMALL = ServerLimits(
    limit_body_bytes=2000, limit_header_bytes=4096, limit_headers=20, limit_queue=1, limit_grace_s=0
)


@pytest.fixture(scope="module")
def open_server() -> Iterator[Running]:
    with serving(SMALL, origins=["https://chat.example"], hosts=["box.lan"]) as running:
        yield running


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    with serving(SMALL, keys=["another", KEY], public=["/"]) as running:
        yield running


# ---- C1, C10: keys, and every way to spell a path


SPELLINGS = [
    "/v1/models", "//v1/models", "/v1//models", "/./v1/models", "/v1/./models", "/x/../v1/models",
    "/v1/models/", "/v1/models/.", "/V1/MODELS", "/v1/Models", "/%761/models", "/v1%2fmodels",
    "/v1/%2e/models", "/v1/models%00", "/v1/models%20", "/v1/models;a=b", "/v1/models?key=x",
    "/v1/models#", "http://localhost/v1/models", "http://evil.test/v1/models", "//localhost/v1/models",
    "/health/../v1/models", "/health%2f..%2fv1/models", "/health/%2e%2e/v1/models",
    "/health;/../v1/models", "/health/", "/health/x", "/healthz", "/Health", "/HEALTH", "//health",
    "/./health", "/%68ealth", "/health%00", "/health%2f", "/health%0a", "/v1/health/", "/v1//health",
    "http://localhost/health", "/index.html", "/..%2f", "/%2e", "/.", "/..", "/\\", "/*", "*", "/state",
    "/metrics", "/slots", "/docs", "/openapi.json", "/boom",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "get", "TRACE"])
def test_no_spelling_and_no_method_reaches_the_application_without_a_key(
    locked: Running, method: str
) -> None:
    """C1, C10, C6: 401 from the guard, or 4xx from HTTP itself; the application saw nothing."""
    before = len(locked.app.seen)
    for path in SPELLINGS:
        for version, host in (("1.1", "localhost"), ("1.0", "localhost"), ("1.0", None)):
            answer = locked.ask(head(f"{method} {path} HTTP/{version}", "Connection: close", host=host))
            refused = (400, 401) if host else (400, 403)  # h11 refuses what is no request target
            assert answer.status in refused, (method, path, version)
    assert locked.app.seen[before:] == []


def test_a_key_opens_every_route_in_either_header(locked: Running) -> None:
    """C2."""
    assert locked.get("/v1/models", f"Authorization: Bearer {KEY}").status == 200
    assert locked.get("/v1/models", f"authorization: bearer {KEY}").status == 200
    assert locked.get("/v1/models", f"X-Api-Key: {KEY}").status == 200
    assert locked.get("/v1/models", "X-Api-Key: another").status == 200
    assert locked.get("/v1/models", "X-Api-Key: wrong", f"Authorization: Bearer {KEY}").status == 200
    assert locked.app.headers.keys().isdisjoint({b"authorization", b"x-api-key", b"cookie"})


@pytest.mark.parametrize(
    "header",
    [
        f"Authorization: {KEY}",
        f"Authorization: Basic {KEY}",
        "Authorization: Bearer",
        "Authorization: Bearer ",
        f"Authorization: Bearer {KEY[:-1]}",
        f"Authorization: Bearer {KEY}x",
        f"Authorization: Bearer {KEY.upper()}",
        f"Authorization: Bearer {KEY},another",
        "X-Api-Key:",
        f"X-Api-Key: Bearer {KEY}",
        f"X-Api-Key: {KEY[:5]}",
        f"Cookie: key={KEY}",
        "X-Api-Key: \xe4\xff",
    ],
)
def test_anything_but_exactly_a_key_opens_nothing(locked: Running, header: str) -> None:
    answer = locked.get("/v1/models", header)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert (answer.error["type"], answer.error["code"]) == ("authentication_error", 401)
    assert KEY[:5] not in answer.body.decode()


def test_two_keys_in_one_header_twice_are_refused(locked: Running) -> None:
    assert locked.get("/v1/models", "X-Api-Key: wrong", f"X-Api-Key: {KEY}").status == 400


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/", "/?a=b"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_health_and_the_page_need_no_key(locked: Running, path: str, method: str) -> None:
    assert locked.ask(head(f"{method} {path} HTTP/1.1")).status == 200


def test_posting_to_a_public_path_needs_a_key(locked: Running) -> None:
    assert locked.ask(post("/health", b"{}")).status == 401


def test_keys_are_compared_as_hashes_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: every pair, also after a match; nothing that is kept shows a key."""
    access = Access.of(["first-key", "second-key"])
    compared: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: not compared.append((a, b)) and a == b)
    assert access.has_key({b"authorization": b"Bearer first-key", b"x-api-key": b"no"})
    assert len(compared) == 4 and all(len(part) == 32 for pair in compared for part in pair)
    assert "first-key" not in repr(access)


def test_keys_come_from_a_file_and_an_empty_one_does_not_open_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \n")
    assert api_keys(["zero"], file) == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(UsageError, match="no API key"):
        api_keys([], file)
    with pytest.raises(UsageError, match="key 1"):
        api_keys(["a\r\nb"], None)
    with pytest.raises(UsageError, match="key 1"):
        api_keys([""], None)
    with pytest.raises(IOFailure, match="cannot be read"):
        api_keys([], tmp_path / "nothing")


# ---- C3, C4: Origin and Host


FOREIGN = [
    "null", "file://", "http://evil.test", "http://localhost.evil.com", "http://127.0.0.1.evil.com",
    "http://localhost:1", "https://localhost", "http://localhost@evil.test", "http://evil.test#localhost",
    "http://localhost/", "http://[::1]", "http://127.0.0.1", "https://chat.example.evil.test",
    "http://chat.example", "https://chat.example:444", "https://xchat.example", "*", "localhost",
    "chrome-extension://abc", "http://LOCALHOST.", "",
]  # fmt: skip


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_page_is_refused_and_gets_no_cors_headers(open_server: Running, origin: str) -> None:
    """C3: a request, one with a body, and a preflight."""
    before = len(open_server.app.seen)
    asked = "Access-Control-Request-Method: POST"
    private = "Access-Control-Request-Private-Network: true"
    for answer in (
        open_server.get("/v1/models", f"Origin: {origin}"),
        open_server.ask(post("/v1/echo", b"{}", f"Origin: {origin}")),
        open_server.ask(head("OPTIONS /v1/echo HTTP/1.1", f"Origin: {origin}", asked, private)),
    ):
        assert (answer.status, answer.error["type"]) == (403, "permission_error")
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert open_server.app.seen[before:] == []


def test_our_own_page_may_ask(open_server: Running) -> None:
    answer = open_server.get("/v1/models", "Origin: http://localhost")
    assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


def test_a_page_that_was_allowed_may_ask_and_preflight(open_server: Running) -> None:
    origin = "Origin: https://chat.example"
    answer = open_server.get("/v1/models", origin)
    assert (answer.status, answer.headers["vary"]) == (200, "Origin")
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in answer.headers
    asked = "Access-Control-Request-Method: POST"
    preflight = open_server.ask(head("OPTIONS /v1/echo HTTP/1.1", origin, asked))
    assert preflight.status == 204 and "content-type" in preflight.headers["access-control-allow-headers"]
    assert "access-control-allow-private-network" not in preflight.headers


@pytest.mark.parametrize(
    ("headers", "is_taken"),
    [
        ("authorization,content-type,x-stainless-lang,x-stainless-os", True),
        ("anthropic-beta, anthropic-dangerous-direct-browser-access, content-type, x-api-key", True),
        ("x-" + "a" * 2000, True), ("x-a\"b", False), ("x-a;b", False), ("x-\xe4", False), ("", False),
    ],
)  # fmt: skip
def test_clients_in_an_allowed_page_may_send_headers_of_their_own(
    open_server: Running, headers: str, is_taken: bool
) -> None:
    """The SDKs of OpenAI and Anthropic send some with every request: no browser let them."""
    about = ("Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {headers}")
    answer = open_server.ask(head("OPTIONS /v1/echo HTTP/1.1", "Origin: https://chat.example", *about))
    usual = "anthropic-version, authorization, content-type, x-api-key"
    assert (answer.status, answer.headers["vary"]) == (204, "Origin")
    assert answer.headers["access-control-allow-headers"] == (headers if is_taken else usual)


def test_a_host_is_one_of_our_names_exactly(open_server: Running) -> None:
    """C4: DNS rebinding makes a browser say the attacker's name."""
    port = open_server.port
    for name in ("localhost", "LocalHost", "127.0.0.1", "[::1]", "box.lan"):
        for host in (name, f"{name}:{port}"):
            assert open_server.ask(head("GET /v1/models HTTP/1.1", host=host)).status == 200, host
    bad = (
        "evil.test localhost.evil.test evil.localhost 127.0.0.1.evil.test localhost:1 127.0.0.2 0.0.0.0 ::1 "
    )
    bad += "localhost. [::1]:1 localhost:80@evil.test xlocalhost 127.1 2130706433 box.lan.evil.test"
    for host in [*bad.split(), f"localhost:{port}0", f"evil.test:{port}", ""]:
        answer = open_server.ask(head("GET /v1/models HTTP/1.1", host=host))
        assert (answer.status, answer.error["type"]) == (403, "permission_error"), host
    twice = open_server.ask(head("GET /v1/models HTTP/1.1", "Host: evil.test"))
    assert twice.status == 400
    assert open_server.ask(head("GET /v1/models HTTP/1.1", host=None)).status == 400
    assert open_server.ask(head("GET /v1/models HTTP/1.0", host=None)).status == 403


KINDS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"]


@pytest.mark.parametrize("kind", [*KINDS, "text/json", "application/json; charset=utf-16", ""])
def test_a_form_of_a_foreign_page_cannot_post(open_server: Running, kind: str) -> None:
    """C4: what a browser sends without asking first is refused by its kind, even without an Origin."""
    request = head("POST /v1/echo HTTP/1.1", f"Content-Type: {kind}", "Content-Length: 2") + b"{}"
    assert open_server.ask(request).status == 415


# ---- B5: bodies


def test_a_json_object_arrives(open_server: Running) -> None:
    for kind in ("application/json", "Application/JSON; charset=utf-8", 'application/json;charset="UTF-8"'):
        request = head("POST /v1/echo HTTP/1.1", f"Content-Type: {kind}", "Content-Length: 7") + b'{"a":1}'
        assert json.loads(open_server.ask(request).body) == {"a": 1}


def chunked(*parts: bytes) -> bytes:
    about = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return head("POST /v1/echo HTTP/1.1", *about) + body


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (post("/v1/echo", b'{"a":"' + b"x" * 1992 + b'"}'), 200),
        (post("/v1/echo", b'{"a":"' + b"x" * 1993 + b'"}'), 413),
        (
            head("POST /v1/echo HTTP/1.1", "Content-Type: application/json", "Content-Length: 99999999999"),
            413,
        ),
        (chunked(b'{"a":"', b"x" * 1992, b'"}', b""), 200),
        (chunked(b'{"a":"', b"x" * 1993, b'"}', b""), 413),
        (chunked(b"x" * 3000), 413),
        (post("/v1/echo", b"{}", "Content-Encoding: gzip"), 415),
        (post("/v1/echo", b"{}", "Content-Encoding: identity"), 200),
        (post("/v1/echo", b"{}", "Transfer-Encoding: chunked"), 400),
        (post("/v1/echo", b"{}", "Content-Length: 3"), 400),
        (post("/v1/echo", b"{}", "Transfer-Encoding: gzip, chunked"), 501),
        (chunked(b"{}") + b"zz\r\n", 400),
        (head("POST /v1/echo HTTP/1.1", "Content-Type: application/json", "Content-Length: -1"), 400),
        (head("POST /v1/echo HTTP/1.1", "Content-Type: application/json"), 400),
        (head("GET /v1/models HTTP/1.1", "Content-Length: 5") + b"hello", 400),
        (head("PUT /v1/models HTTP/1.1"), 405),
        (head("GET /v1/models HTTP/1.1", *(f"X-{i}: 1" for i in range(20))), 431),
        (head("GET /v1/models HTTP/1.1", "X-Long: " + "x" * 5000), 431),
        (head("GET /" + "x" * 5000 + " HTTP/1.1"), 431),
        (head("GET /" + "x" * 500_000 + " HTTP/1.1"), 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 GET / \r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX : 1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b: c\r\n\xff\r\n\r\n", 400),
    ],
)
def test_sizes_and_framing_are_checked(open_server: Running, request_bytes: bytes, status: int) -> None:
    """B5. What is refused is refused as an error of the API."""
    answer = open_server.ask(request_bytes)
    assert answer.status == status, answer
    if status != 200:
        assert answer.error["code"] == status and answer.error["type"]
        assert "content-security-policy" in answer.headers


def test_a_body_refused_unread_is_not_taken_for_a_request(open_server: Running) -> None:
    """The rest of a body that is too large must not become the connection's next request."""
    smuggled = head("GET /smuggled HTTP/1.1")
    before = len(open_server.app.seen)
    with open_server.connect() as sock:
        sock.sendall(post("/v1/echo", b"x" * 3000 + smuggled) + head("GET /health HTTP/1.1"))
        assert read_answer(sock).status == 413
        assert read_answer(sock).status == 200
    assert open_server.app.seen[before:] == ["GET /health"]


def test_all_bodies_together_are_bounded() -> None:
    """A thousand connections with 20 MiB each would be 20 GiB."""
    limits = ServerLimits(limit_bodies_bytes=3000, limit_grace_s=0)
    with serving(limits) as server, server.connect() as slow:
        slow.sendall(post("/v1/echo", b" " * 2000)[:-1])
        wait_until(lambda: server.ask(post("/v1/echo", b" " * 2000 + b"{}")).status == 503)
        slow.sendall(b" ")
        assert read_answer(slow).status == 400  # not JSON; but its bytes are given back
        assert server.ask(post("/v1/echo", b" " * 2000 + b"{}")).status == 200


# ---- B8: a queue that ends


def test_requests_beyond_the_queue_are_refused_at_once() -> None:
    """B8: two in it, one waits, all others are told to retry while those three are still there."""
    limits = dataclasses.replace(SMALL, limit_queue=1)
    with serving(limits, slots=2) as server:
        held = [server.connect() for _ in range(3)]
        for sock in held:
            sock.sendall(post("/v1/hang", b"{}"))
        wait_until(lambda: server.app.active == 3)
        answers: list[Answer] = []

        def ask() -> None:
            answers.append(server.ask(post("/v1/echo", b"{}")))

        threads = [threading.Thread(target=ask) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 60
        assert {(a.status, a.headers["retry-after"], a.error["type"]) for a in answers} == {
            (503, "1", "unavailable_error")
        }
        assert (server.app.active, server.app.cancelled) == (3, 0), "nobody had to leave for an answer"
        assert server.get("/health").status == 200
        for sock in held:
            sock.close()  # a client that leaves gives its place back
        wait_until(lambda: server.app.active == 0)
        assert server.app.cancelled == 3
        assert server.ask(post("/v1/echo", b"{}")).status == 200


@pytest.mark.slow
def test_a_refusal_takes_less_than_100_ms() -> None:
    """B8: the fastest of twenty, since a busy machine delays some."""
    with (
        serving(dataclasses.replace(SMALL, limit_queue=1), slots=2) as server,
        contextlib.ExitStack() as held,
    ):
        for _ in range(3):
            held.enter_context(server.connect()).sendall(post("/v1/hang", b"{}"))
        wait_until(lambda: server.app.active == 3)
        times: list[float] = []
        for _ in range(20):
            began = time.perf_counter()
            assert server.ask(post("/v1/echo", b"{}")).status == 503
            times.append(time.perf_counter() - began)
    assert min(times) < 0.1


# ---- B13, B14: errors and the log


def test_the_applications_errors_are_made_the_apis(open_server: Running) -> None:
    answer = open_server.get("/nothing")
    assert (answer.status, answer.error["type"], answer.error["code"]) == (404, "not_found_error", 404)
    answer = open_server.ask(post("/v1/refuse", b'{"say":"\\u00e4 \\ud83d\\ude00 <b>"}'))
    assert answer.status == 400 and answer.error["code"] == "chosen"
    assert open_server.trouble == []
    assert answer.error["message"] == "ä 😀 <b>"


def test_an_exception_is_a_500_that_tells_nobody_a_prompt(open_server: Running) -> None:
    answer = open_server.get("/boom")
    assert (answer.status, answer.error["type"]) == (500, "server_error")
    said = answer.body.decode() + "".join(open_server.trouble)
    assert "secret prompt" not in said and "Traceback" not in said
    assert re.search(r"ValueError at .*dummy_app\.py:\d+$", open_server.trouble[-1])


def test_security_headers_are_on_every_response(locked: Running) -> None:
    for answer in (locked.get("/"), locked.get("/v1/models"), locked.ask(b"nonsense\r\n\r\n")):
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers.keys().isdisjoint({"server", "date", "access-control-allow-origin"})


def test_the_log_has_one_short_line_a_request_without_secrets(locked: Running) -> None:
    """B13: a path that would start a line of its own, a long one, keys and prompts everywhere."""
    locked.log.clear()
    key = f"X-Api-Key: {KEY}"
    locked.get(f"/a%0d%0aFAKE%20GET?{CANARY}={KEY}", key, f"Referer: {CANARY}")
    locked.get("/" + "x" * 3000, key)
    locked.ask(post("/v1/echo", f'{{"prompt":"{CANARY}"}}'.encode(), key))
    locked.ask(post("/v1/refuse", f'{{"say":"{CANARY}"}}'.encode(), key))
    locked.ask(head("X" * 3000 + " /v1/models HTTP/1.1", key))
    wait_until(lambda: len(locked.log) == 5)
    assert all(line.isprintable() and len(line.encode()) <= 1024 for line in locked.log)
    assert re.fullmatch(r"127\.0\.0\.1 POST /v1/echo 200 \d+ B \d+ ms", locked.log[2])
    assert not [line for line in locked.log if KEY in line or CANARY in line]


# ---- the limits themselves


def test_every_limit_is_a_flag_with_a_unit_and_is_printed() -> None:
    printed = described(ServerLimits(limit_n=3))
    assert set(printed) == {f.name for f in dataclasses.fields(ServerLimits)}
    assert printed["limit_n"] == {**printed["limit_n"], "value": 3, "default": 8, "flag": "--limit-n"}
    assert all(p["unit"] in ("bytes", "bytes/s", "seconds", "n") and p["help"] for p in printed.values())
    json.dumps(printed)


def test_limits_are_read_like_all_options() -> None:
    read = read_options(ServerLimits, {"limit_header_s": "2.5"}, {"THERMOCLINE_LIMIT_BODY_BYTES": "1000"})
    assert (read.limit_header_s, read.limit_body_bytes, read.limit_queue) == (2.5, 1000, 64)
    with pytest.raises(UsageError, match="--limit-json-depth"):
        read_options(ServerLimits, {"limit_json_depth": "501"}, {})


def test_defaults_of_limits_are_values_their_own_flags_would_take() -> None:
    for f, o in options_of(ServerLimits):
        assert isinstance(o, Option) and o.parse(str(f.default)) == f.default


def test_work_after_a_whole_response_is_not_cancelled(open_server: Running) -> None:
    """uvicorn says that the client is gone as soon as it has its answer: a task after it may go on."""
    before = open_server.app.chunks
    assert open_server.ask(post("/v1/after", b"{}")).status == 200
    wait_until(lambda: open_server.app.chunks == before + 1)


def test_a_half_closed_request_is_a_client_that_left(open_server: Running) -> None:
    with open_server.connect() as sock:
        before = open_server.app.cancelled
        sock.sendall(post("/v1/hang", b"{}"))
        wait_until(lambda: open_server.app.active == 1)
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: open_server.app.cancelled == before + 1)
