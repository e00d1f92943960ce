"""A server as a process: signals, ports, sockets, what it prints. Bounds are for a shared machine:
several times what is promised.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from dummy_app import Dummy
from raw_http import Process, head, post, read_answer, wait_until

from thermocline.errors import BadFile, IOFailure, UsageError
from thermocline.server.http import listener
from thermocline.server.http import server as http
from thermocline.server.http.guard import Admission
from thermocline.server.http.limits import ServerLimits

FOREVER = b'{"n":1000000000,"event_bytes":4000}'


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_within_a_second(sig: signal.Signals) -> None:
    """D7, R10: also with a connection that is kept alive. Exit code 0, nothing on stderr."""
    with Process(port=0) as server, server.connect() as kept:
        kept.sendall(head("GET /health HTTP/1.1"))
        assert read_answer(kept).status == 200
        assert server.stop(sig) < 1.5
        assert server.popen.returncode == 0
        assert server.popen.stderr is not None and server.popen.stderr.read() == ""


def test_streams_get_the_grace_then_an_error_event() -> None:
    """D7: no new connections at once; a short stream ends as it should; a long one is told and ended."""
    with Process(port=0, limits={"limit_grace_s": 0.7}, slots=4) as server, contextlib.ExitStack() as stack:
        short, long, silent = (stack.enter_context(server.connect()) for _ in range(3))
        short.sendall(post("/v1/stream", b'{"n":20,"every_s":0.02}'))
        long.sendall(post("/v1/stream", b'{"n":100000,"every_s":0.02}'))
        silent.sendall(post("/v1/hang", b"{}"))
        wait_until(lambda: json.loads(server.ask(head("GET /state HTTP/1.1")).body)["active"] == 4)
        server.popen.send_signal(signal.SIGTERM)
        began = time.monotonic()
        time.sleep(0.2)  # promised: 0.1
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        assert read_answer(short).body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        rest = read_answer(long).body
        assert b'"code": 503' in rest and b"being stopped" in rest and b"[DONE]" not in rest
        assert read_answer(silent).error["type"] == "unavailable_error"
        server.popen.wait(60)
        assert 0.6 < time.monotonic() - began < 60
        assert server.popen.returncode == 0


def test_a_client_that_reads_nothing_does_not_keep_a_stopped_server() -> None:
    with Process(port=0, limits={"limit_grace_s": 0.2}) as server, server.connect() as sock:
        sock.sendall(post("/v1/stream", FOREVER))
        time.sleep(0.3)
        assert server.stop() < 60  # FOREVER
        assert server.popen.returncode == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait_for_the_grace(second: signal.Signals) -> None:
    with Process(port=0, limits={"limit_grace_s": 120}) as server, server.connect() as sock:
        sock.sendall(post("/v1/hang", b"{}"))
        time.sleep(0.2)
        server.popen.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.popen.poll() is None
        assert server.stop(second) < 60
        assert server.popen.returncode == 0


def test_the_port_is_open_before_anything_else_is_loaded() -> None:
    """D8: a client that comes while the process still starts waits, it is not refused."""
    with Process(port=0) as server:
        assert time.monotonic() - server.began < 60  # promised: 1, of a Python that starts on an idle machine
        assert server.ask(head("GET /health HTTP/1.1")).status == 200
    with contextlib.closing(listener.listen("127.0.0.1", 0, has_keys=False)) as opened:
        assert opened.url == f"http://127.0.0.1:{opened.port}" and opened.port > 0
        with socket.create_connection(("127.0.0.1", opened.port)) as early:
            early.sendall(head("GET /health HTTP/1.1"))


def test_a_unix_socket_is_for_this_user_alone_and_leaves_nothing(tmp_path: Path) -> None:
    """C11. Its Host can be anything: no browser can come this way."""
    path = tmp_path / "sock"
    with Process(unix=str(path)) as server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert server.ask(head("GET /health HTTP/1.1", host="any")).status == 200
        with pytest.raises(IOFailure, match="in use"):
            listener.listen_unix(path)
        server.stop()
        assert not path.exists()
    with Process(unix=str(path)) as server:
        server.popen.kill()
        server.popen.wait(5)
    assert path.exists()
    listener.listen_unix(path).close()  # what a dead server left is no obstacle
    path.write_text("a file")
    with pytest.raises(IOFailure, match="is not a socket; choose another path"):
        listener.listen_unix(path)
    assert path.read_text() == "a file"
    with pytest.raises(IOFailure, match="cannot be listened on"):
        listener.listen_unix(tmp_path / "none" / "sock")


def ended(**told: Any) -> tuple[int, str]:
    process = Process(**told)
    _, stderr = process.popen.communicate(timeout=10)
    return process.popen.returncode, stderr


def test_a_port_that_is_in_use_is_one_line_and_exit_code_4() -> None:
    """C11."""
    with contextlib.closing(listener.listen("127.0.0.1", 0, has_keys=False)) as taken:
        port = taken.port
        code, stderr = ended(port=port)
    assert (code, stderr.count("\n")) == (4, 1)
    assert f"127.0.0.1:{port} is in use" in stderr and "--port" in stderr


def test_other_machines_are_let_in_only_with_a_key_or_on_purpose() -> None:
    """C11: one line, exit code 2."""
    code, stderr = ended(host="0.0.0.0")
    assert (code, stderr.count("\n")) == (2, 1) and "--insecure" in stderr and "--api-key" in stderr
    with contextlib.closing(listener.listen("0.0.0.0", 0, has_keys=True)) as opened:
        assert opened.host_names([]) is None, "a page of any name has no key"
    with pytest.raises(UsageError, match="no such host"):
        listener.listen("no.such.host.invalid", 0, has_keys=True)


def test_without_a_key_a_host_is_an_address_or_a_name_that_is_ours() -> None:
    """A page whose own name was made to resolve to this machine says that name, as Host and as Origin."""
    own = socket.gethostname().lower()
    with Process(port=0, host="0.0.0.0", insecure=True, hosts=["box.lan"]) as server:
        port = server.url.rpartition(":")[2]
        for name in ("localhost", "127.0.0.1", "192.168.1.7", "[fd00::7]", "[::1]", "box.lan", own):
            for host in (name, f"{name}:{port}", f"{name}:9999"):  # a container's port is another outside
                asked = head("GET /v1/models HTTP/1.1", f"Origin: http://{host}", host=host)
                assert server.ask(asked).status == 200, host
        bad = "evil.test box.lan.evil.test 127.0.0.1.evil.test localhost. [evil.test] 127.1 [::1 ::1 fd00::7 "
        for host in [*bad.split(), f"evil.test:{port}", "localhost:x", "localhost:1:1", "", ":80"]:
            answer = server.ask(head("GET /v1/models HTTP/1.1", f"Origin: http://{host}", host=host))
            assert (answer.status, answer.error["type"]) == (403, "permission_error"), host


def test_the_log_goes_to_stderr_when_it_is_asked_for() -> None:
    """B13, and no key in what `ps` or stderr show beyond what was typed."""
    with Process(port=0, access_log=True, keys=["sk-secret"]) as server:
        assert server.ask(head("GET /v1/models?sk-secret HTTP/1.1", "X-Api-Key: sk-secret")).status == 200
        assert server.ask(head("GET /v1/models HTTP/1.1")).status == 401
        server.stop()
        assert server.popen.stderr is not None
        lines = server.popen.stderr.read().splitlines()
    assert [line.rsplit(" ", 5)[0] for line in lines] == ["127.0.0.1 GET /v1/models"] * 2
    assert "sk-secret" not in "".join(lines)


def test_more_connections_than_files_are_a_line_and_the_next_client_is_answered() -> None:
    """`ulimit -n 64`: asyncio printed thousands of tracebacks a second, and /health did not answer."""
    with Process(port=0, files=64) as server, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(server.connect())
        assert server.ask(head("GET /health HTTP/1.1")).status == 200
        stack.close()
        server.stop()
        assert server.popen.stderr is not None
        lines = server.popen.stderr.read().splitlines()
    assert lines[0] == "32 connections at most: this process may have few open files (ulimit -n)"
    assert all(line.startswith("the server: Too many open files at ") for line in lines[1:]), lines
    assert len(lines) <= 3


@pytest.mark.parametrize(("raised", "seen"), [(BadFile("no model"), BadFile), (OSError("a bug"), OSError)])
def test_why_an_application_cannot_start_is_not_lost(
    raised: Exception, seen: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Dummy):
        async def __call__(self, scope: object, receive: object, send: object) -> None:
            raise raised

    opened = listener.listen("127.0.0.1", 0, has_keys=False)
    with pytest.raises(seen, match=str(raised)):
        http.run(Broken(), opened, limits=ServerLimits(), admission=Admission())
    assert opened.socket.fileno() == -1
    assert capsys.readouterr().err == ""
