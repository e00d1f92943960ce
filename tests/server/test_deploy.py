"""Two replicas under a real Ray Serve: sessions stay on their replica; a lost one harms its own alone."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran

from thermocline.cli.commands.deploy import DeployOptions, deployment_of

STREAMS, TOKENS, WAIT_S = 64, 400, 120


def test_what_replicas_cannot_do_is_refused(thermocline: Callable[..., Ran]) -> None:
    for argv in (["--socket", "/tmp/x"], ["--gpu", "stand-in"]):
        told = thermocline("deploy", *argv)
        assert told.code == 2 and argv[0] in told.err and "leave it out" in told.err


def test_replicas_get_paths_that_hold_in_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = deployment_of(DeployOptions(cache_dir="packs", prompt_cache_dir="prompts", port=0)).replica
    paths = made.files.cache_dir, made.engine.prompt_cache_dir
    assert paths == (str(tmp_path / "packs"), str(tmp_path / "prompts"))


@pytest.fixture
def port() -> Iterator[int]:
    """The port of two replicas. Nothing of them is there afterwards."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install '.[test-all]'")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        number: int = s.getsockname()[1]
    command = ["deploy", "--replicas", "2", "-t", "1", "--parallel", "64", "--port", str(number)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "thermocline", *command],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in iter(process.stderr.readline, ""):
                lines.append(line)
                if "2 replicas answer at" in line:
                    break
            assert "2 replicas answer at" in lines[-1], lines
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield number
        finally:
            process.terminate()
            assert process.wait() == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", number), 1).close()


class Stream:
    """An answer that is read on a thread of its own."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.begun = threading.Event()
        self.replica, self.events = 0, list[str]()
        self._port, self._body = port, json.dumps(body | {"stream": True})
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        try:
            client.request("POST", "/v1/completions", self._body, {"content-type": "application/json"})
            answer = client.getresponse()
            self.replica = int(answer.headers["x-thermocline-replica"])
            for line in answer:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
                    self.begun.set()
        finally:
            self.begun.set()
            client.close()


def body_of(n: int, more: str = "", tokens: int = 1) -> dict[str, Any]:
    text = f"Story {n}. " + "Once upon a time there was a king. " * 8
    return {"prompt": text + more, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def replica_of(port: int, body: dict[str, Any]) -> int:
    stream = Stream(port, body)
    stream.thread.join()
    return stream.replica


def whole(stream: Stream) -> bool:
    return stream.events[-1] == "[DONE]" and '"length"' in stream.events[-2] and len(stream.events) > TOKENS


def lost_amid_streams(port: int) -> list[Stream]:
    """Kill a replica while it streams, and wait for another; -> its streams that were not over."""
    streams = [Stream(port, body_of(n, tokens=TOKENS)) for n in range(STREAMS)]
    for stream in streams:
        assert stream.begun.wait(WAIT_S)
    killed = streams[-1].replica  # its last stream has the most before it
    os.kill(killed, signal.SIGKILL)
    for stream in streams:
        stream.thread.join()
    assert len({s.replica for s in streams}) == 2
    assert all(whole(s) for s in streams if s.replica != killed)

    deadline = time.monotonic() + WAIT_S
    while len(found := {replica_of(port, body_of(n)) for n in range(20)}) < 2:
        assert time.monotonic() < deadline, "the replica was not replaced"
    assert killed not in found
    return [s for s in streams if not whole(s)]


@pytest.mark.slow
def test_sessions_stay_and_a_lost_replica_harms_its_own_alone(port: int) -> None:
    first = [replica_of(port, body_of(n)) for n in range(20)]
    second = [replica_of(port, body_of(n, "He had a son.")) for n in range(20)]
    assert first == second and len(set(first)) == 2

    broken = next(filter(None, (lost_amid_streams(port) for _ in range(5))), [])
    assert broken, "all streams were over each time: this machine answers before it kills"
    for stream in broken:
        assert '"error"' in stream.events[-1] and "send it again" in stream.events[-1]
