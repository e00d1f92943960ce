"""From the engine's steps to a stream: what comes together goes together, and silence is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import selectors
import threading
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import FIGURES, ScriptedEngine

from thermocline.engine.request import Chunk
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import IOFailure
from thermocline.llm import LLM
from thermocline.server.api.answers import Answer
from thermocline.server.api.responses import events as stream_events
from thermocline.server.http import sse
from thermocline.server.process import worker
from thermocline.server.process.engine_process import Jobs
from thermocline.server.process.messages import Failed, Finished, Stop, Submit, Token
from thermocline.server.process.worker import EngineWorker


def token(job: int, text: str) -> Token:
    return Token(job, Chunk(text, 1))


def ended(job: int) -> Finished:
    return Finished(job, "stop", 1, FIGURES, prompt_logprobs=())


# ---- the engine's side


@contextlib.contextmanager
def working(*commands: Any) -> Iterator[Connection]:
    """A worker on a thread, told these at its start: the other end of its pipe. It is stopped afterwards."""
    here, there = multiprocessing.Pipe()
    with LLM(threads=1, gpu="off", max_batch=2) as llm:
        llm.load()
        for command in commands:
            here.send(command)
        run = threading.Thread(target=EngineWorker(there, llm).run)
        run.start()
        yield here
        here.send(Stop())
        run.join(30)
    assert not run.is_alive()


def batches(here: Connection) -> Iterator[list[Any]]:
    """Yield the events of jobs, message by message."""
    while here.poll(30):
        if isinstance(message := here.recv(), list):
            yield message
    raise AssertionError("nothing more was told")


def asked(job: int, tokens: int, **more: Any) -> Submit:
    return Submit(job, [1, 5, 9], SamplingParams(temperature=0, max_tokens=tokens, **more))


@pytest.mark.parametrize(("gather_s", "messages"), [(0.0, 12), (1e9, 1)])
def test_tokens_of_quick_steps_go_together_and_an_end_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, gather_s: float, messages: int
) -> None:
    monkeypatch.setattr(worker, "GATHER_S", gather_s)
    found: list[list[Any]] = []
    with working(asked(7, 12)) as here:
        for events in batches(here):
            found.append(events)
            if any(isinstance(e, Finished) for e in events):
                break
    assert len(found) == messages
    assert [type(e) for events in found for e in events] == [Token] * 12 + [Finished]


def test_an_end_is_told_at_once_beside_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GATHER_S", 1e9)
    ends: list[list[int]] = []
    with working(asked(7, 3), asked(8, 40)) as here:
        for events in batches(here):
            ends.append([e.job for e in events if isinstance(e, Finished)])
            if [job for jobs in ends for job in jobs] == [7, 8]:
                break
    assert ends == [[7], [8]]


def test_a_token_after_a_pause_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick steps are gathered for GATHER_S; the first of them is not."""
    monkeypatch.setattr(worker, "GATHER_S", 0.2)
    with working(asked(7, 400, ignore_eos=True)) as here:
        assert len(next(batches(here))) == 1


# ---- the side that speaks HTTP


def test_events_are_returned_at_once_and_a_failure_after_earlier_events() -> None:
    async def run() -> None:
        work = Jobs(ScriptedEngine(), [10, 11])
        work.put(token(10, "a"))
        work.put(token(11, "b"))
        work.put(ended(10))
        assert await work.next() == [(0, token(10, "a")), (1, token(11, "b")), (0, ended(10))]
        asyncio.get_running_loop().call_later(0.01, work.put, token(11, "c"))
        assert await work.next(30) == [(1, token(11, "c"))]
        begin = time.monotonic()
        assert await work.next(0.05) == [], "silence"
        assert 0.04 < time.monotonic() - begin < 5
        work.put(token(11, "d"))
        work.put(Failed(11, IOFailure.__name__, "the disk is on fire"))
        assert await work.next() == [(1, token(11, "d"))]
        with pytest.raises(IOFailure, match="on fire"):
            await work.next()
        work = Jobs(ScriptedEngine(), [12])
        work.put(ended(12))
        assert await work.next() == [(0, ended(12))]
        assert await work.next() is None

    asyncio.run(run())


class Skipping(selectors.DefaultSelector):
    """Counts the time that its event loop would wait for, and does not wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0
        return super().select(timeout and 0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop by a clock of its own, which passes only while all its tasks sleep."""

    def __init__(self) -> None:
        self._waits = Skipping()
        super().__init__(self._waits)

    def time(self) -> float:
        return self._waits.now


class Spoken(Answer):
    """Each token's text is an object. An empty one says nothing."""

    def __init__(self) -> None:
        nothing: Any = SimpleNamespace(stream_options=None)
        super().__init__("any", nothing, nothing, 1)

    def take(self, i: int, event: Token | Finished) -> list[dict[str, Any]]:
        return [{"text": event.chunk.text}] if isinstance(event, Token) and event.chunk.text else []


def streamed(answer: Answer, play: Any, ping_s: float) -> list[bytes]:
    """Return the bytes that a client is sent for one job, at once: nobody sleeps."""

    async def run() -> list[bytes]:
        engine = ScriptedEngine()
        work = Jobs(engine, [5])
        playing = asyncio.get_running_loop().create_task(play(work))
        pieces: AsyncIterator[bytes] = stream_events(work, answer, ping_s)
        found = [piece async for piece in pieces]
        await playing
        return found

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(run())


def test_a_stream_whose_tokens_say_nothing_is_kept_alive() -> None:
    """The text of a call is held back until it is whole: minutes, of a slow model."""

    async def play(work: Jobs) -> None:
        for _ in range(30):
            work.put(token(5, ""))
            await asyncio.sleep(1 / 64)
        work.put(ended(5))

    *pings, done = streamed(Spoken(), play, 5 / 64)
    assert done == sse.DONE
    assert pings == [sse.SILENCE] * 6


def test_events_that_come_together_are_one_piece() -> None:
    async def play(work: Jobs) -> None:
        for text in "abc":
            work.put(token(5, text))
        work.put(ended(5))

    said, done = streamed(Spoken(), play, 10)
    assert said == b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: {"text":"c"}\n\n'
    assert done == sse.DONE
