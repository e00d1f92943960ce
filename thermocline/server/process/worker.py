"""The engine's process: a loop that takes commands, runs steps and sends their results.

A crash ends this process alone: the process that speaks HTTP goes on, reports it and starts another.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue

from thermocline.engine.engine import Engine
from thermocline.engine.live_activity import ActivityMeter, ActivityReport
from thermocline.engine.request import Asked, PoolingParams, Request
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import ThermoclineError, raised_at
from thermocline.llm import LLM, opened_model
from thermocline.offline import quick_bench
from thermocline.server.process.messages import (
    Busy,
    Cancel,
    Cancelled,
    EngineError,
    Event,
    Failed,
    Finished,
    FromEngine,
    Heartbeat,
    Load,
    LoadProgress,
    LogLine,
    Measure,
    Measured,
    MemoryNeeded,
    ModelOpened,
    Ready,
    Stop,
    Submit,
    Subscribe,
    ToEngine,
    Token,
)
from thermocline.session.options import EngineOptions, ModelOptions
from thermocline.session.session import memory_needed
from thermocline.text.grammar import Grammar

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.1  # between two heartbeats; while idle, at most
ACTIVITY_S = 0.25  # between two reports of activity
GATHER_S = 0.004  # tokens of quicker steps share a message, which costs each process about 0.1 ms
BUSY_S = 1.0  # between two checks of a step that takes longer
_SENDING = threading.Lock()  # the pipe has one writer at a time


def main(connection: Connection, files: ModelOptions, options: EngineOptions, beside: int | None) -> None:
    """Open an LLM and run its engine until the connection ends or Stop comes.

    `beside`: the budget in `options` is shared with other engines, and so many bytes of it are for none. Ask
    for a part of it before any weight is read. None: all of the budget is this engine's.
    """
    for one in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # they reach whole process groups; the other process sends Stop
        signal.signal(one, signal.SIG_IGN)
    with (
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionError),  # the other process has ended
        _relayed(connection),
    ):
        try:
            if beside is not None:
                files, options = _granted(connection, files, options, beside)
            llm = _opened(connection, files, options)
            llm.load()
        except ThermoclineError as e:
            connection.send(EngineError(type(e).__name__, str(e)))
            return
        with llm:
            try:
                EngineWorker(connection, llm).run()
            except Exception as e:
                log.warning(f"the engine failed: {_where(e)}")
                sys.exit(1)


class Relay(logging.Handler):
    """Sends what this process logs to the one that started it, which has somewhere to write it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(logging.INFO)
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError), _SENDING:  # nobody is there any more
            self._connection.send(LogLine(record.name, record.levelno, record.getMessage()))


@contextlib.contextmanager
def _relayed(connection: Connection) -> Iterator[None]:
    ours, relay = logging.getLogger("thermocline"), Relay(connection)
    before = ours.level
    ours.addHandler(relay)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)
        ours.removeHandler(relay)


def _granted(
    connection: Connection, files: ModelOptions, options: EngineOptions, beside: int
) -> tuple[ModelOptions, EngineOptions]:
    """Look at the model, ask for memory and wait for it. Return the options to load the model with."""
    found = opened_model(files, _progress(connection))
    connection.send(MemoryNeeded(memory_needed(found, options, beside)))
    while not isinstance(command := connection.recv(), Load):
        if isinstance(command, Stop):
            raise EOFError
    return replace(files, model=found.path), replace(options, ram=command.ram)


def _progress(connection: Connection) -> Callable[[str, int, int], None]:
    last = 0.0

    def progress(what: str, done: int, size: int) -> None:
        nonlocal last
        if time.monotonic() - last >= HEARTBEAT_S or done == size:
            last = time.monotonic()
            connection.send(LoadProgress(what, done, size))

    return progress


def _opened(connection: Connection, files: ModelOptions, options: EngineOptions) -> LLM:
    llm = LLM(files=files, options=options, lazy=True, progress=_progress(connection))
    connection.send(
        ModelOpened(
            llm.spec, llm.small_files, llm.context, options.max_batch, files.chat_template, llm.recommended
        )
    )
    return llm


def _where(e: BaseException) -> str:
    """Return an error as a line. Of a bug only its place: its message may quote a text."""
    if isinstance(e, ThermoclineError):
        return str(e)
    at = raised_at(e)
    place = "" if at is None else f" at {Path(at[0]).name}:{at[1]}"
    return type(e).__name__ + place


def _listen(connection: Connection, commands: SimpleQueue[ToEngine], wanted: threading.Event) -> None:
    """Receive commands on a thread of its own: polling the pipe took 30 us of each step.

    `wanted` is set with each command that a measurement should not keep waiting.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            command = connection.recv()
            commands.put(command)
            if isinstance(command, Submit | Stop):
                wanted.set()
    commands.put(Stop())  # the other process has ended
    wanted.set()


class EngineWorker:
    def __init__(self, connection: Connection, llm: LLM) -> None:
        self._connection, self._llm = connection, llm
        self._over = threading.Event()
        self._engine: Engine = llm.engine
        self._jobs: dict[int, Request] = {}
        self._commands: SimpleQueue[ToEngine] = SimpleQueue()
        self._wanted = threading.Event()
        self._gathered: list[Event] = []
        self._heartbeat_sent_at = self._reported_at = self._tokens_sent_at = 0.0
        self._steps, self._longest = 0, 0.0

    def run(self) -> None:
        self._send(Ready(self._llm.load_s, self._llm.memory_bytes))
        heard = self._connection, self._commands, self._wanted
        threading.Thread(target=self._prepare, name="grammars", daemon=True).start()
        threading.Thread(target=_listen, args=heard, name="commands", daemon=True).start()
        watch = threading.Thread(target=self._watch_steps, name="busy", daemon=True)
        watch.start()
        busy = False
        try:
            while self._obey(wait=not busy):
                begin = time.monotonic()
                busy = self._engine.step()
                if busy or self._jobs:
                    self._steps += 1
                    self._longest = max(self._longest, time.monotonic() - begin)
                self._tell(at_once=not busy)
                self._send_heartbeat()
        finally:
            self._over.set()
            watch.join()  # the thread refers to the engine, which must be freed before the interpreter ends

    def _send(self, message: FromEngine) -> None:
        with _SENDING:
            self._connection.send(message)

    def _watch_steps(self) -> None:
        """Send Busy while a long step goes from layer to layer, on a thread of its own."""
        step, neurons = self._engine.stats, 0
        with contextlib.suppress(OSError):  # the other process has ended
            while not self._over.wait(BUSY_S):
                now = self._engine.stats
                if now is step and now.neurons > neurons:
                    self._send(Busy())
                step, neurons = now, now.neurons

    def _prepare(self) -> None:
        """Build the grammars' vocabulary before a client waits for it: 50,000 tokens take 0.6 s."""
        with contextlib.suppress(ThermoclineError):  # llguidance is not installed
            self._llm.constraint(SamplingParams(grammar=Grammar.json_object()), checked=True)
        self._llm.tokenizer.close()  # the other process tokenises; this one needs only the tokens' names

    def _obey(self, wait: bool) -> bool:
        """Carry out the commands that have come. Return False to stop."""
        while True:
            try:
                command = self._commands.get(wait, HEARTBEAT_S)
            except Empty:
                return True
            wait = False
            match command:
                case Submit(job, ids, params):
                    self._submit(job, list(ids), params)
                case Cancel(job):
                    if (request := self._jobs.pop(job, None)) is not None:
                        self._engine.cancel(request)
                        self._send(Cancelled(job))
                case Subscribe(on):
                    self._engine.watch = (
                        ActivityMeter(on_gpu=self._llm.session.plan is not None) if on else None
                    )
                case Measure():
                    self._measure()
                case Stop():
                    return False

    def _measure(self) -> None:
        """Measure the machine, until a request comes. The engine has nothing to do meanwhile."""
        self._wanted.clear()

        def wanted() -> bool:
            self._send(Busy())  # no heartbeat is sent meanwhile
            return self._wanted.is_set()

        try:
            if self._jobs or not self._commands.empty():
                raise quick_bench.BrokenOff
            found = quick_bench.measure(self._llm.session, self._engine, wanted)
            self._send(Measured(found))
        except quick_bench.BrokenOff:
            self._send(Measured(None))
        except ThermoclineError as e:
            self._send(Measured(None, type(e).__name__, str(e)))

    def _submit(self, job: int, ids: list[int], params: Asked) -> None:
        try:
            if isinstance(params, PoolingParams):
                self._jobs[job] = self._engine.read(ids, params)
                return
            constraint = self._llm.constraint(params, checked=True)  # the other process has checked it
            self._jobs[job] = self._engine.submit(ids, params, constraint)
        except ThermoclineError as e:
            self._send([Failed(job, type(e).__name__, str(e))])

    def _tell(self, at_once: bool) -> None:
        self._gathered += self._events()
        now = time.monotonic()
        over = any(not isinstance(event, Token) for event in self._gathered)
        if self._gathered and (at_once or over or now - self._tokens_sent_at >= GATHER_S):
            self._tokens_sent_at = now
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
                reason, seed = request.finish_reason, request.sampler.seed
                met, vector = request.matcher.met, request.vector
                found.append(Finished(job, reason, seed, figures, scores, met, vector))
            else:
                continue
            del self._jobs[job]
        return found

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_sent_at < HEARTBEAT_S:
            return
        self._heartbeat_sent_at = now
        counts, activity = self._engine.counts(), self._activity(now)
        self._send(Heartbeat(counts, self._steps, self._longest, self._tiers(), activity))

    def _activity(self, now: float) -> ActivityReport | None:
        if self._engine.watch is None or now - self._reported_at < ACTIVITY_S:
            return None
        self._reported_at = now
        return self._engine.watch.take()

    def _tiers(self) -> dict[str, float] | None:
        if self._llm.session.store is None:
            return None
        c = self._llm.session.store.counts()
        return {"needed": c.needed, "missed": c.missed, "bytes": c.bytes, "waited_s": c.waited_ns / 1e9}
