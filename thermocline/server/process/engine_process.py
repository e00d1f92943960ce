"""The engine's process as the HTTP side sees it: jobs in, their events out, its heartbeat, its restarts.

Everything runs on the event loop's thread but the pipe's two ends, which block. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from thermocline import errors
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import ThermoclineError
from thermocline.server.process import worker
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
    LoadProgress,
    LogLine,
    ModelOpened,
    Ready,
    Stop,
    Submit,
    Subscribe,
    ToEngine,
    Token,
)
from thermocline.server.process.subscribers import Subscribers
from thermocline.server.process.suspects import CrashesEngine, Job, Suspects

STALE_S = 10.0  # without a beat the engine is not ready any more, unless its steps are known to take longer
WATCH_S = 1.0  # between two looks at whether it is silent
CRASHES = 3  # in a row, with nothing to compute, are given up


class EngineCrashed(ThermoclineError):
    """The engine's process ended in the midst of this request."""


_OWN = {kind.__name__: kind for kind in (EngineCrashed, CrashesEngine)}


class Jobs:
    """What one HTTP request has the engine do: several jobs, whose events come in one stream."""

    def __init__(self, engine: EngineProcess, jobs: Sequence[int]) -> None:
        self._engine = engine
        self._index = {job: i for i, job in enumerate(jobs)}
        self._left = set(jobs)
        self._events: list[Event] = []
        self._comes: asyncio.Future[None] | None = None  # who waits for an event

    def put(self, event: Event) -> None:
        if event.job not in self._left:
            return
        if not isinstance(event, Token):
            self._left.discard(event.job)
        self._events.append(event)
        if self._comes is not None:
            _done(self._comes)

    async def next(self, wait_s: float | None = None) -> list[tuple[int, Token | Finished]] | None:
        """What has come: (which job, what of it); None after the last. Raises what ended one of them early.

        Waits for one event at least, `wait_s` at most: then nothing has come. One task at a time may ask.
        """
        if not self._events and self._left:
            await self._some(wait_s)
        if not self._events and not self._left:
            return None
        found: list[tuple[int, Token | Finished]] = []
        for event in self._events:
            if isinstance(event, Failed):
                if found:
                    break  # what came before it first
                kind = _OWN.get(event.error) or getattr(errors, event.error)
                raise kind(event.message)
            found.append((self._index[event.job], event))
        del self._events[: len(found)]
        return found

    async def _some(self, wait_s: float | None) -> None:
        """By hand: a task and a timer for each token cost more than what is said of it."""
        loop = asyncio.get_running_loop()
        comes = self._comes = loop.create_future()
        alarm = None if wait_s is None else loop.call_later(wait_s, _done, comes)
        try:
            await comes
        finally:
            self._comes = None
            if alarm is not None:
                alarm.cancel()

    def close(self) -> None:
        """Those that are not over are cancelled. May be called again."""
        left, self._left = self._left, set()
        for job in left:
            self._engine.cancel(job)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class EngineProcess:
    """One engine, started again when it crashes."""

    def __init__(
        self,
        options: dict[str, Any],
        *,
        told: Callable[[str], None],
        progress: Callable[[str, int, int], None],
        opened: Callable[[ModelOpened], None],
        silence_s: float = 60.0,
        observe: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """`options`: LLM's. `opened` is called on another thread, before the weights are read.

        `silence_s`: without a sign of it the process is ended. `observe` sees every event, wanted or not.
        """
        self._options, self._told, self._progress, self._on_opened = options, told, progress, opened
        self._jobs: dict[int, Jobs] = {}  # that clients wait for
        self._held: dict[int, Job] = {}  # of them, those that the engine does not have yet, in their order
        self._inside: dict[int, Job] = {}  # that the engine has, also where no client waits any more
        self._suspects = Suspects()
        self._silence_s = silence_s
        self._watching: asyncio.Task[None] | None = None
        self.observe = observe
        self._numbers = itertools.count()
        self._process: Any = None
        self._outbox: SimpleQueue[ToEngine | None] | None = None  # while there is a process
        self._heard_at = 0.0
        self._crashes = 0
        self.state = "starting"  # loading, ready, stopping, failed
        self.heartbeat = Heartbeat()
        self.subscribers = Subscribers(lambda on: self._send(Subscribe(on)))
        self.slots = 0  # jobs that are computed together
        self.loaded: Ready | None = None
        self.restarts = self.cancelled = 0
        self.error: ThermoclineError | None = None  # why it never will be ready
        self.over = asyncio.Event()  # set when it cannot go on

    # ---- life

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.state, self._heard_at = "loading", time.monotonic()
        threading.Thread(target=self._serve, name="engine's events", daemon=True).start()
        if self._watching is None:
            self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Ends a process that was ready and is silent: its clients would wait for ever; a crash is mended.

        Silence is counted, not read from a clock: where ^Z stopped both processes, neither was silent.
        """
        silent = 0.0
        while True:
            beaten = self._heard_at
            await asyncio.sleep(WATCH_S)
            silent = silent + WATCH_S if self.state == "ready" and self._heard_at == beaten else 0.0
            if silent >= max(self._silence_s, 3 * self.heartbeat.longest_step_s):
                self.kill()
                self._told(f"the engine has not been heard of for {silent:.0f} s; it is ended")
                silent = 0.0

    def _serve(self) -> None:
        """On a thread of its own: a process from its start to its end."""
        try:
            process, here = _spawned(self._options)
        except OSError as e:  # no process or file is left: as an engine that ended at once
            return self._call(self._ended, e.errno)
        outbox: SimpleQueue[ToEngine | None] = SimpleQueue()
        writer = threading.Thread(target=_write, args=(here, outbox), name="engine's commands", daemon=True)
        writer.start()
        self._call(self._begun, process, outbox)
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: FromEngine = here.recv()
                if isinstance(
                    message, ModelOpened
                ):  # it may read files for a while, which nobody should wait for
                    message = self._prepared(message)
                self._call(self._heard, message)
        process.join()
        outbox.put(None)
        writer.join()
        here.close()
        self._call(self._ended, process.exitcode)

    def _prepared(self, message: ModelOpened) -> ModelOpened | EngineError:
        try:
            self._on_opened(message)
        except ThermoclineError as e:
            return EngineError(type(e).__name__, str(e))
        return message

    def _call(self, what: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *args)

    def _begun(self, process: Any, outbox: SimpleQueue[ToEngine | None]) -> None:
        self._process, self._outbox = process, outbox
        if self.subscribers:
            self._send(Subscribe(True))
        if self.state == "stopping":
            self.kill()

    def _heard(self, message: FromEngine) -> None:
        self._heard_at = time.monotonic()
        match message:
            case list():
                for event in message:
                    self._crashes = 0
                    self.observe(event)
                    over = not isinstance(event, Token)
                    work = self._jobs.pop(event.job, None) if over else self._jobs.get(event.job)
                    if work is not None:
                        work.put(event)
                    if over:
                        self._left(event.job, clear=isinstance(event, Finished))
            case Cancelled(job):
                self._left(job)
            case Heartbeat():
                self.heartbeat = message
                if message.activity is not None:
                    self.subscribers.show(message.activity)
            case LoadProgress(what, done, size):
                self._progress(what, done, size)
            case LogLine(line):
                self._told(line)
            case Busy():
                pass  # it is alive
            case ModelOpened():
                self.slots = message.max_batch
            case Ready():
                self.loaded = message
                if self.state == "loading":
                    self.state = "ready"
                self._admit()
            case EngineError(error, text):
                self.error = getattr(errors, error)(text)
                self.kill()

    def _ended(self, code: int | None) -> None:
        """The process is gone: what it had in hand fails; another one is started unless this was the end."""
        self._outbox = self._process = None
        inside, self._inside = self._inside, {}
        self._crashes = 0 if inside else self._crashes + 1
        if self.error is None and self._crashes >= CRASHES:
            self.error = EngineCrashed(
                f"the engine crashed {CRASHES} times in a row (exit {code}); giving up"
            )
        is_end = self.state == "stopping" or self.error is not None
        lost = [*inside, *self._held] if is_end else list(inside)
        for job in lost:
            self._fail(job, EngineCrashed("the engine stopped in the midst of this request"))
        self.heartbeat = Heartbeat()
        if is_end:
            self.state = self.state if self.state == "stopping" else "failed"
            self.over.set()
            return
        condemned = self._suspects.crashed(inside.values())
        self.restarts += 1
        self.start()
        self._told(f"the engine crashed (exit {code}); it is started again")
        for each in condemned:
            self._told(f"the engine crashed twice at the request {each}, which is not computed again")

    def _fail(self, job: int, e: ThermoclineError) -> None:
        self._held.pop(job, None)
        if (work := self._jobs.pop(job, None)) is not None:
            failed = Failed(job, type(e).__name__, str(e))
            self.observe(failed)
            work.put(failed)

    async def stop(self, grace_s: float) -> None:
        """Ends the process, by force where it does not end by itself."""
        self.state = "stopping"
        if self._watching is not None:
            self._watching.cancel()
        self.subscribers.show(None)
        self._send(Stop())
        try:
            await asyncio.wait_for(self.over.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self.over.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # ---- how it is

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def alive(self) -> bool:
        """Has it been heard of lately? A step that takes long is no silence where others took as long."""
        return self.heartbeat_age_s < max(STALE_S, 3 * self.heartbeat.longest_step_s)

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.alive

    @property
    def active(self) -> int:
        """Jobs that are not over, waiting ones included."""
        return len(self._jobs)

    # ---- jobs

    def submit(self, prompts: Sequence[tuple[Sequence[int], SamplingParams]]) -> Jobs:
        """Raises CrashesEngine for what the engine crashed at before."""
        numbers = list(itertools.islice(self._numbers, len(prompts)))
        jobs = {n: Job(Submit(n, ids, params)) for n, (ids, params) in zip(numbers, prompts, strict=True)}
        for job in jobs.values():
            self._suspects.check(job)
        work = Jobs(self, numbers)
        self._jobs |= dict.fromkeys(numbers, work)
        self._held |= jobs
        self._admit()
        return work

    def _admit(self) -> None:
        """What is held goes to an engine that is ready, in its order; a suspect waits until it is alone."""
        while self._held and self.state == "ready":
            number, job = next(iter(self._held.items()))
            try:
                self._suspects.check(job)
            except CrashesEngine as e:  # its like was condemned while this one was held
                self._fail(number, e)
                continue
            if self._inside and any(map(self._suspects.has, (job, *self._inside.values()))):
                return
            self._inside[number] = self._held.pop(number)
            self._send(job.command)

    def _left(self, number: int, *, clear: bool = False) -> None:
        """The engine does not have it any more."""
        if (job := self._inside.pop(number, None)) is not None and clear:
            self._suspects.clear(job)
        self._admit()

    def cancel(self, job: int) -> None:
        if self._jobs.pop(job, None) is None:
            return
        self.cancelled += 1
        if self._held.pop(job, None) is None:
            self._send(Cancel(job))
        else:
            self._admit()

    def _send(self, command: ToEngine) -> None:
        if self._outbox is not None:
            self._outbox.put(command)


def _spawned(options: dict[str, Any]) -> tuple[Any, Connection]:
    """The engine's process and this end of its pipe."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with there:  # the process has its own
        try:
            process = context.Process(target=worker.main, args=(there, options), name="engine", daemon=True)
            process.start()
        except OSError:
            here.close()
            raise
    return process, here


def _write(connection: Connection, outbox: SimpleQueue[ToEngine | None]) -> None:
    """On a thread of its own: the engine reads between two steps, and a pipe holds 64 KiB."""
    with contextlib.suppress(OSError):  # it has ended: the reader notices, too
        while (command := outbox.get()) is not None:
            connection.send(command)
