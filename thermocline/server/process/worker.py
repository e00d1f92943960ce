"""The engine's process: a loop over commands, steps, and what they brought forth.

A crash here is one process's: whoever speaks HTTP goes on, says so and starts another. Must not know HTTP.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from thermocline.engine.engine import Engine
from thermocline.engine.live_activity import ActivityMeter, ActivityReport
from thermocline.engine.request import Request
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import ThermoclineError, raised_at
from thermocline.llm import LLM
from thermocline.server.process.messages import (
    Beat,
    Cancel,
    Dropped,
    Ended,
    Event,
    Failed,
    FromEngine,
    Look,
    Opened,
    Progress,
    Pulse,
    Ready,
    Refused,
    Stop,
    Submit,
    ToEngine,
    Token,
    Told,
)
from thermocline.text.grammar import Grammar

BEAT_S = 0.1  # between two beats, at most while idle
LOOK_S = 0.25  # between two reports of activity
GATHER_S = 0.004  # tokens of steps that are quicker go together: a message costs both processes about 0.1 ms
PULSE_S = 1.0  # between two looks at a step that takes longer


def main(connection: Connection, options: dict[str, Any]) -> None:
    """`options`: LLM's. Ends with the connection, or when it is told to."""
    for one in (signal.SIGINT, signal.SIGTERM):  # these reach whole groups: the other process says when
        signal.signal(one, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionError):  # nobody is there any more
        try:
            llm = _opened(connection, options)
            llm.load()
        except ThermoclineError as e:
            connection.send(Refused(type(e).__name__, str(e)))
            return
        with llm:
            try:
                Worker(connection, llm).run()
            except Exception as e:
                connection.send(Told(f"the engine failed: {_where(e)}"))
                sys.exit(1)


def _opened(connection: Connection, options: dict[str, Any]) -> LLM:
    last = 0.0

    def progress(what: str, done: int, size: int) -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_S or done == size:
            last = time.monotonic()
            connection.send(Progress(what, done, size))

    llm = LLM(**options, lazy=True, progress=progress, told=lambda line: connection.send(Told(line)))
    template = options.get("chat_template")
    connection.send(
        Opened(str(llm.path), llm.context, options.get("max_batch", 8), template, llm.recommended)
    )
    return llm


def _where(e: BaseException) -> str:
    """A line; a bug's says no more than where it is, since its message may quote a text."""
    if isinstance(e, ThermoclineError):
        return str(e)
    at = raised_at(e)
    place = "" if at is None else f" at {Path(at[0]).name}:{at[1]}"
    return type(e).__name__ + place


def _listen(connection: Connection, commands: SimpleQueue[ToEngine]) -> None:
    """On a thread of its own: to ask the pipe between two steps took 30 us of each."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            commands.put(connection.recv())
    commands.put(Stop())  # nobody is there any more


class Worker:
    def __init__(self, connection: Connection, llm: LLM) -> None:
        self._connection, self._llm = connection, llm
        self._sending = threading.Lock()  # a pipe is one writer's at a time
        self._over = threading.Event()
        self._engine: Engine = llm.engine
        self._jobs: dict[int, Request] = {}
        self._commands: SimpleQueue[ToEngine] = SimpleQueue()
        self._gathered: list[Event] = []
        self._beaten = self._looked = self._sent = 0.0
        self._steps, self._longest = 0, 0.0

    def run(self) -> None:
        self._send(Ready(self._llm.load_s, self._llm.memory_bytes))
        heard = self._connection, self._commands
        threading.Thread(target=self._prepare, name="grammars", daemon=True).start()
        threading.Thread(target=_listen, args=heard, name="commands", daemon=True).start()
        pulse = threading.Thread(target=self._pulse, name="pulse", daemon=True)
        pulse.start()
        busy = False
        try:
            while self._obey(wait=not busy):
                begin = time.monotonic()
                busy = self._engine.step()
                if busy or self._jobs:
                    self._steps += 1
                    self._longest = max(self._longest, time.monotonic() - begin)
                self._tell(at_once=not busy)
                self._beat()
        finally:
            self._over.set()
            pulse.join()  # it holds the engine, which has to go before the interpreter does

    def _send(self, message: FromEngine) -> None:
        with self._sending:
            self._connection.send(message)

    def _pulse(self) -> None:
        """On a thread of its own: a step of minutes is no silence while it goes from layer to layer."""
        step, neurons = self._engine.stats, 0
        with contextlib.suppress(OSError):  # nobody is there any more
            while not self._over.wait(PULSE_S):
                now = self._engine.stats
                if now is step and now.neurons > neurons:
                    self._send(Pulse())
                step, neurons = now, now.neurons

    def _prepare(self) -> None:
        """The first grammar's vocabulary takes 0.6 s for 50,000 tokens: not while somebody waits for it."""
        with contextlib.suppress(ThermoclineError):  # without the library there are none
            self._llm.constraint(SamplingParams(grammar=Grammar.json_object()), checked=True)
        self._llm.tokenizer.close()  # texts are the other process's: this one needs what tokens are called

    def _obey(self, wait: bool) -> bool:
        """What was asked for meanwhile. False: to stop."""
        while True:
            try:
                command = self._commands.get(wait, BEAT_S)
            except Empty:
                return True
            wait = False
            match command:
                case Submit(job, ids, params):
                    self._submit(job, list(ids), params)
                case Cancel(job):
                    if (request := self._jobs.pop(job, None)) is not None:
                        self._engine.cancel(request)
                        self._send(Dropped(job))
                case Look(on):
                    self._engine.watch = ActivityMeter(on_gpu=self._llm.plan is not None) if on else None
                case Stop():
                    return False

    def _submit(self, job: int, ids: list[int], params: SamplingParams) -> None:
        try:
            constraint = self._llm.constraint(params, checked=True)  # by the other process
            self._jobs[job] = self._engine.submit(ids, params, constraint)
        except ThermoclineError as e:
            self._send([Failed(job, type(e).__name__, str(e))])

    def _tell(self, at_once: bool) -> None:
        self._gathered += self._events()
        now = time.monotonic()
        over = any(not isinstance(event, Token) for event in self._gathered)
        if self._gathered and (at_once or over or now - self._sent >= GATHER_S):
            self._sent = now
            self._send(self._gathered)
            self._gathered = []

    def _events(self) -> list[Event]:
        found: list[Event] = []
        for job, request in list(self._jobs.items()):
            while request.chunks:
                found.append(Token(job, request.chunks.popleft()))
            if request.error is not None:
                found.append(Failed(job, type(request.error).__name__, str(request.error)))
            elif request.finish_reason is not None:
                figures, scores = request.figures(), tuple(request.prompt_logprobs)
                found.append(Ended(job, request.finish_reason, request.sampler.seed, figures, scores))
            else:
                continue
            del self._jobs[job]
        return found

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        counts, activity = self._engine.counts(), self._activity(now)
        self._send(Beat(counts, self._steps, self._longest, self._tiers(), activity))

    def _activity(self, now: float) -> ActivityReport | None:
        if self._engine.watch is None or now - self._looked < LOOK_S:
            return None
        self._looked = now
        return self._engine.watch.take()

    def _tiers(self) -> dict[str, float] | None:
        if self._llm.store is None:
            return None
        c = self._llm.store.counts()
        return {"needed": c.needed, "missed": c.missed, "bytes": c.bytes, "waited_s": c.waited_ns / 1e9}
