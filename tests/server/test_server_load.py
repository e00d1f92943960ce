"""The server under load, as `bench/server/serve.py` does, scaled down: no wrong answer, nothing kept."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import TEMPLATE, Served, served

from thermocline import LLM
from thermocline.server.http.limits import ServerLimits

BENCH = Path(__file__).parents[2] / "bench/server"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH))
    names = ("serve_clients", "serve_figures", "serve")
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCH))
        for name in names:
            del sys.modules[name]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture(scope="module")
def port(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(threads=1, gpu="off", chat_template=TEMPLATE) as made:
        yield made


def test_a_crowd_gets_the_answers_that_each_would_get_alone(bench: Any, port: int, llm: LLM) -> None:
    found = bench.serve_figures.crowd(port, llm, streaming=12, quiet=12, hostile=6, tokens=20)
    assert found["answers"] == 24 and found["wrong"] == 0 and found["polls"] > 5


def test_mixed_requests_are_answered_as_each_alone(bench: Any, port: int, llm: LLM) -> None:
    found = bench.serve_figures.mixed(port, llm, count=60)
    assert found["left"] > 5 and found["kinds"] > 30
    assert found["wrong"] == 0, found["first"]


def test_a_wrong_answer_is_noticed(bench: Any, port: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: of a model whose every text is one space longer, all are."""
    alone = bench.serve_figures.Case.alone

    def longer(case: Any, llm: LLM) -> Any:
        text, scores, reason = alone(case, llm)
        return f"{text} ", scores, reason

    monkeypatch.setattr(bench.serve_figures.Case, "alone", longer)
    found = bench.serve_figures.mixed(port, llm, count=8, seed=3)
    assert found["wrong"] >= 8 - found["left"] > 0


def test_whoever_leaves_takes_nothing_along(bench: Any, server: Served, port: int) -> None:
    """In the queue, in the prompt, in the stream, by FIN, RST or half a close; files and threads neither."""
    bench.serve_figures.leave(port, 8)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    found = bench.serve_figures.leave(port, 40, seed=2)
    assert found["cancelled"] >= 30 and found["free_p99_ms"] < 5000, "0.5 s, were the machine ours alone"
    assert abs(len(os.listdir("/proc/self/fd")) - before[0]) <= 2
    assert abs(threading.active_count() - before[1]) <= 1
    assert server.health()["ready"]


@pytest.mark.slow  # it measures how long a refusal takes
def test_a_trial_without_a_place_in_the_queue_is_refused_at_once(bench: Any) -> None:
    with served(ServerLimits(limit_queue=4), max_batch=2) as server:
        found = bench.serve_figures.overload(int(server.url.rpartition(":")[2]), seconds=2, room=6)
    assert found["refusals"] > 10
    assert found["refused_p50_ms"] < 1000, "0.1 s, were the machine ours alone"


@pytest.mark.slow
def test_a_server_that_is_stopped_tells_everybody_and_leaves_nothing(bench: Any) -> None:
    found = bench.serve.stop(1, "--threads", "1", "--gpu", "off")
    assert found["exit_codes"] == [0] and found["left_behind"] == [] and found["unheard"] == 0
    assert found["finished"] + found["told"] == 12 and found["beyond_grace"] == 0
