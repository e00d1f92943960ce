"""From the engine's steps to a stream: what comes together goes together, and silence is noticed."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import FIGURES, ScriptedEngine

from thermocline.errors import IOFailure
from thermocline.llm import LLM
from thermocline.request import Chunk
from thermocline.sampler import SamplingParams
from thermocline.server import sse, worker
from thermocline.server.app import Server
from thermocline.server.limits import Limits
from thermocline.server.messages import Beat, Ended, Failed, Stop, Submit, Token
from thermocline.server.process import Work
from thermocline.server.worker import Worker


def token(job: int, text: str) -> Token:
    return Token(job, Chunk(text, 1))


def ended(job: int) -> Ended:
    return Ended(job, "stop", 1, FIGURES, prompt_logprobs=())


# ---- the engine's side


@pytest.mark.parametrize(("gather_s", "messages"), [(0.0, 12), (1e9, 1)])
def test_tokens_of_quick_steps_go_together_and_an_end_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, gather_s: float, messages: int
) -> None:
    monkeypatch.setattr(worker, "GATHER_S", gather_s)
    here, there = multiprocessing.Pipe()
    with LLM(threads=1, gpu="off", max_batch=2) as llm:
        llm.load()
        here.send(Submit(7, [1, 5, 9], SamplingParams(temperature=0, max_tokens=12)))
        run = worker.threading.Thread(target=Worker(there, llm).run)
        run.start()
        found: list[list[Any]] = []
        while not any(isinstance(e, Ended) for events in found for e in events):
            assert here.poll(30), "the end was told"
            if isinstance(message := here.recv(), list):
                found.append(message)
        here.send(Stop())
        run.join(30)
    assert not run.is_alive()
    assert len(found) == messages
    assert [type(e) for events in found for e in events] == [Token] * 12 + [Ended]


def test_an_end_is_told_at_once_beside_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GATHER_S", 1e9)
    here, there = multiprocessing.Pipe()
    with LLM(threads=1, gpu="off", max_batch=2) as llm:
        llm.load()
        for job, tokens in ((7, 3), (8, 40)):
            here.send(Submit(job, [1, 5, 9], SamplingParams(temperature=0, max_tokens=tokens)))
        run = worker.threading.Thread(target=Worker(there, llm).run)
        run.start()
        ends: list[list[int]] = []
        while [job for jobs in ends for job in jobs] != [7, 8]:
            assert here.poll(30), "both ends were told"
            if isinstance(message := here.recv(), list):
                ends.append([e.job for e in message if isinstance(e, Ended)])
        here.send(Stop())
        run.join(30)
    assert ends == [[7], [8]]


def test_a_token_after_a_pause_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick steps are gathered for GATHER_S; the first of them is not."""
    monkeypatch.setattr(worker, "GATHER_S", 0.2)
    here, there = multiprocessing.Pipe()
    with LLM(threads=1, gpu="off", max_batch=2) as llm:
        llm.load()
        run = worker.threading.Thread(target=Worker(there, llm).run)
        run.start()
        here.send(Submit(7, [1, 5, 9], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)))
        while not isinstance(first := here.recv(), list):
            assert not isinstance(first, Beat) or first.counts is not None
        here.send(Stop())
        run.join(30)
    assert len(first) == 1


# ---- the side that speaks HTTP


def test_what_has_come_is_taken_at_once_and_a_failure_after_what_came_before_it() -> None:
    async def run() -> None:
        work = Work(ScriptedEngine(), [10, 11])
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
        work = Work(ScriptedEngine(), [12])
        work.put(ended(12))
        assert await work.next() == [(0, ended(12))]
        assert await work.next() is None

    asyncio.run(run())


def streamed(shape: Any, play: Any, ping_s: float) -> list[bytes]:
    """What a client is sent of one job."""

    async def run() -> list[bytes]:
        engine = ScriptedEngine()
        server = Server(engine, Limits(limit_ping_s=ping_s), print, defaults=SamplingParams(), keys=False)
        work = Work(engine, [5])
        playing = asyncio.get_running_loop().create_task(play(work))
        pieces: AsyncIterator[bytes] = server._events(work, shape)
        found = [piece async for piece in pieces]
        await playing
        server.close()
        return found

    return asyncio.run(run())


def test_a_stream_whose_tokens_say_nothing_is_kept_alive() -> None:
    """The text of a call is held back until it is whole: minutes, of a slow model."""

    async def play(work: Work) -> None:
        for _ in range(30):
            work.put(token(5, ""))
            await asyncio.sleep(0.01)
        work.put(ended(5))

    shape = SimpleNamespace(begin=list, take=lambda i, event: [], include_usage=False)
    *pings, done = streamed(shape, play, 0.05)
    assert done == sse.DONE
    assert set(pings) == {sse.SILENCE}
    assert 2 <= len(pings) <= 7


def test_events_that_come_together_are_one_piece() -> None:
    async def play(work: Work) -> None:
        for text in "abc":
            work.put(token(5, text))
        work.put(ended(5))

    shape = SimpleNamespace(
        begin=list,
        take=lambda i, event: [{"text": event.chunk.text}] if isinstance(event, Token) else [],
        include_usage=False,
    )
    said, done = streamed(shape, play, 10)
    assert said == b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: {"text":"c"}\n\n'
    assert done == sse.DONE
