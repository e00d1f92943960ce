"""A request that crashes the engine costs itself: not the server, nor those that were computed with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import FIGURES
from serving import Served, served

from thermocline.engine.request import Chunk
from thermocline.engine.sampler import SamplingParams
from thermocline.server.process import engine_process
from thermocline.server.process.engine_process import EngineCrashed, EngineProcess, Jobs
from thermocline.server.process.messages import Cancel, Cancelled, Finished, Ready, Submit, Token
from thermocline.server.process.suspects import CrashesEngine
from thermocline.session.options import EngineOptions, ModelOptions


class Engine(EngineProcess):
    """Without a process: `inside` is what one would have; the test says what becomes of it."""

    def __init__(self) -> None:
        super().__init__(
            ModelOptions(), EngineOptions(), progress=lambda *_: None,
            opened=lambda _: None
        )  # fmt: skip
        self.inside: dict[int, list[int]] = {}
        self.start()
        self._heard(Ready(0.1, 1000))

    def start(self) -> None:
        self.state = "loading"

    def _send(self, command: Any) -> None:
        match command:
            case Submit(job, ids, _):
                self.inside[job] = list(ids)
            case Cancel(job):
                self._cancelled = job

    def ask(self, *prompts: int, seed: int | None = None) -> Jobs:
        return self.submit([([p], SamplingParams(seed=seed)) for p in prompts])

    def computed(self) -> list[list[int]]:
        return list(self.inside.values())

    def crash(self) -> None:
        self.inside.clear()
        self._ended(-11)
        if self.error is None:
            self._heard(Ready(0.1, 1000))

    def finish(self) -> None:
        for job in list(self.inside):
            del self.inside[job]
            self._heard([Token(job, Chunk("a", 1)), Finished(job, "stop", 1, FIGURES, prompt_logprobs=())])


def told(story: Callable[[Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(Engine())

    asyncio.run(main())


POISON = 666


def test_a_request_that_crashes_the_engine_costs_itself_only(caplog: pytest.LogCaptureFixture) -> None:
    """Three crashes on one request ended the server; clients send what failed again, so one was enough."""

    async def story(engine: Engine) -> None:
        lost = [engine.ask(1), engine.ask(POISON, seed=1), engine.ask(2)]
        engine.crash()
        for work in lost:
            with pytest.raises(EngineCrashed):
                await work.next()
        for prompt in (1, POISON, 2, 3):
            engine.ask(prompt, seed=2)
        assert engine.computed() == [[1]], "alone, since it was there"
        engine.finish()
        assert engine.computed() == [[POISON]], "alone"
        engine.crash()
        assert engine.computed() == [[2]], "who waited meanwhile is not lost"
        engine.finish()
        assert engine.computed() == [[3]]
        engine.finish()
        with pytest.raises(CrashesEngine, match="twice"):
            engine.ask(5, POISON)
        for prompt in (1, 2):
            engine.ask(prompt)
        assert engine.computed() == [[1], [2]], "they are cleared, and computed together again"
        assert engine.error is None and engine.restarts == 2
        assert "which is not computed again" in caplog.messages[-1]

    told(story)


def test_answers_to_one_prompt_are_condemned_together() -> None:
    """n answers are n jobs: they would have been n crashes."""

    async def story(engine: Engine) -> None:
        engine.ask(*[POISON] * 8)
        engine.crash()
        again = engine.ask(*[POISON] * 8)
        assert engine.computed() == [[POISON]]
        engine.crash()
        assert engine.computed() == [] and engine.active == 0
        with pytest.raises(EngineCrashed):
            await again.next()
        assert engine.restarts == 2

    told(story)


def test_a_request_cancelled_before_the_crash_is_a_suspect_too() -> None:
    async def story(engine: Engine) -> None:
        for _ in range(2):
            engine.ask(POISON).close()
            engine.crash()
        with pytest.raises(CrashesEngine):
            engine.ask(POISON)
        assert engine.error is None

    told(story)


def test_one_that_was_cancelled_is_awaited_until_it_has_left_the_engine() -> None:
    async def story(engine: Engine) -> None:
        engine.ask(POISON)
        engine.crash()
        alone = engine.ask(POISON)
        engine.ask(1)
        alone.close()
        assert engine.computed() == [[POISON]], "a step of it may still be under way"
        engine._heard(Cancelled(engine._cancelled))
        assert engine.computed() == [[POISON], [1]]

    told(story)


def test_many_requests_that_crash_the_engine_do_not_end_the_server() -> None:
    async def story(engine: Engine) -> None:
        for prompt in range(20):
            engine.ask(prompt)
            engine.crash()
        assert engine.error is None and engine.state == "ready"

    told(story)


def test_an_engine_that_crashes_with_nothing_to_compute_is_given_up() -> None:
    async def story(engine: Engine) -> None:
        for _ in range(engine_process.CRASHES):
            engine.crash()
        assert isinstance(engine.error, EngineCrashed) and engine.over.is_set()

    told(story)


def test_an_engine_that_cannot_be_started_is_given_up_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread died of the OSError, and the server said for ever that it was loading."""

    def spawned(*asked: object) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    async def main() -> None:
        monkeypatch.setattr(engine_process, "_spawned", spawned)
        engine = EngineProcess(
            ModelOptions(), EngineOptions(), progress=lambda *_: None, opened=lambda _: None
        )
        engine.start()
        await asyncio.wait_for(engine.over.wait(), 20)
        assert isinstance(engine.error, EngineCrashed) and engine.state == "failed"

    asyncio.run(main())


# ---- a real engine


def _killed_in_its_midst(server: Served, body: dict[str, Any]) -> Any:
    """The error of a stream whose engine is killed after its first token."""
    with server.client() as c, c.stream("POST", "/v1/completions", json=body | {"stream": True}) as r:
        parts = r.iter_text()
        first = next(parts)
        found = subprocess.run(
            ["pgrep", "-P", str(os.getpid()), "-f", "spawn_main"], capture_output=True, text=True
        )
        os.kill(max(map(int, found.stdout.split())), signal.SIGKILL)
        text = first + "".join(parts)
    return json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]


@pytest.mark.slow
def test_the_third_time_it_is_refused_by_name_and_others_are_answered() -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True}
    with served() as server:
        for _ in range(2):
            assert _killed_in_its_midst(server, body)["code"] == "engine_crashed"
            server.until(ready=True)
        with server.client() as c:
            refused = c.post("/v1/completions", json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (422, "crashes_engine")
            name = error["message"].partition("(")[2].partition(")")[0]
            assert any(name in line for line in server.notes), "the log names it, and no word of it"
            assert c.post("/v1/completions", json=body | {"max_tokens": 2}).status_code == 200
