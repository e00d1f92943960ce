"""The engine's process, run here: what it says before it ends."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from thermocline import SamplingParams
from thermocline.engine.engine import Engine
from thermocline.errors import DeviceFailure
from thermocline.ops.interface import FFNStats
from thermocline.server.process import worker
from thermocline.server.process.messages import (
    Busy,
    EngineError,
    Finished,
    FromEngine,
    Heartbeat,
    Load,
    LogLine,
    MemoryNeeded,
    ModelOpened,
    Ready,
    Stop,
    Submit,
    Token,
)
from thermocline.session.options import EngineOptions, ModelOptions, changed

OPTIONS = EngineOptions(threads=1, max_batch=2)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    kept = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for s, was in kept.items():
        signal.signal(s, was)


def said(*commands: Any, exits: bool = False, beside: int | None = None, **options: Any) -> list[Any]:
    """All messages of a worker that finds these commands when it is ready."""
    here, there = multiprocessing.Pipe()
    for command in commands:
        here.send(command)
    files = changed(ModelOptions(model=options.pop("model", None)), options)  # type: ignore[arg-type]
    asked = files, changed(OPTIONS, options), beside  # type: ignore[arg-type]
    if exits:
        with pytest.raises(SystemExit) as ended:
            worker.main(there, *asked)
        assert ended.value.code == 1
    else:
        worker.main(there, *asked)
    found: list[Any] = []
    while here.poll():
        message = here.recv()
        found += message if isinstance(message, list) else [message]
    here.close()
    # The thread that listens ends with the pipe. One that began to read later would read the next test's
    # pipe, which may have the same number.
    for thread in threading.enumerate():
        if thread.name == "commands":
            thread.join()
    there.close()
    return found


def test_it_opens_loads_answers_and_stops() -> None:
    params = SamplingParams(temperature=0, max_tokens=3)
    found = said(Submit(7, [1, 5, 9], params), Submit(8, [10**9], params), Stop())
    kinds = [type(m) for m in found]
    assert kinds.index(ModelOpened) < kinds.index(Ready)
    assert any("10" in m.message for m in found if getattr(m, "job", None) == 8), "a bad one is refused alone"


def test_one_of_several_asks_for_memory_before_it_reads_a_weight() -> None:
    found = said(Load(1.0), Stop(), beside=1 << 20, ram=2.0)
    kinds = [type(m) for m in found]
    assert kinds.index(MemoryNeeded) < kinds.index(ModelOpened) < kinds.index(Ready)
    (asked,) = (m for m in found if isinstance(m, MemoryNeeded))
    (ready,) = (m for m in found if isinstance(m, Ready))
    assert asked.nbytes == ready.memory_bytes, "to the byte"
    assert [type(m) for m in said(Stop(), beside=0, ram=2.0)] == [MemoryNeeded], "it was not granted any"


def test_one_that_does_not_fit_in_the_budget_beside_what_is_for_none_says_so_before_it_is_granted_any() -> (
    None
):
    (refused,) = said(beside=64 << 20, ram=0.1)
    assert (refused.error, "0.1 " in refused.message) == ("OutOfBudget", False)
    enough = float(refused.message.partition("--ram ")[2].split()[0])
    assert [type(m) for m in said(Stop(), beside=64 << 20, ram=enough)] == [MemoryNeeded]
    assert [type(m) for m in said(beside=64 << 20, ram=enough - 0.001)] == [EngineError]


def test_a_job_is_told_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing more: the steps end here."""
    step, steps = Engine.step, [0]

    def counted(self: Engine) -> bool:
        steps[0] += 1
        if steps[0] > 8:
            raise EOFError
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.01)
    found = said(Submit(7, [1, 5, 9], SamplingParams(temperature=0, max_tokens=3)), exits=True)
    assert [m.chunk.token_id for m in found if isinstance(m, Token)] != []
    (ended,) = (m for m in found if isinstance(m, Finished))
    assert (ended.job, ended.finish_reason, ended.figures.tokens) == (7, "length", 3)
    assert any(isinstance(m, Heartbeat) and m.counts is not None and m.counts.slots == 2 for m in found)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DeviceFailure("the card has gone"), "the engine failed: the card has gone"),
        (RuntimeError("about a secret prompt"), "the engine failed: RuntimeError at test_server_worker.py:"),
    ],
)
def test_the_error_that_ends_the_engine_is_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Engine) -> bool:
        raise error

    monkeypatch.setattr(Engine, "step", failing)
    found = said(Submit(1, [1, 2], SamplingParams()), exits=True)
    (told,) = (m.line for m in found if isinstance(m, LogLine))
    assert told.startswith(line) and "secret" not in told and "\n" not in told


@pytest.mark.parametrize("further", [1, 0])
def test_a_long_step_is_a_sign_of_life_while_it_gets_further(
    further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulsed, send = threading.Event(), worker.EngineWorker._send

    def sending(self: worker.EngineWorker, message: FromEngine) -> None:
        send(self, message)
        if isinstance(message, Busy):
            pulsed.set()

    def long(self: Engine) -> bool:
        self.stats = FFNStats()
        for _ in range(2000 if further else 40):  # 10 s are enough for one pulse on any machine
            self.stats.neurons += further
            if pulsed.wait(0.005):
                break
        raise EOFError

    monkeypatch.setattr(Engine, "step", long)
    monkeypatch.setattr(worker.EngineWorker, "_send", sending)
    monkeypatch.setattr(worker, "BUSY_S", 0.02)
    found = said(Submit(1, [1, 2], SamplingParams()), exits=True)
    assert any(isinstance(m, Busy) for m in found) == bool(further)


def test_a_model_that_cannot_be_opened_is_an_error_with_its_kind() -> None:
    (refused,) = said(model="/nowhere/at/all")
    assert isinstance(refused, EngineError) and refused.error in ("BadFile", "IOFailure", "UsageError")
    assert "/nowhere/at/all" in refused.message
