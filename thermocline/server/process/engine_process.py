"""The engine's process as the HTTP side sees it: jobs in, their events out, its heartbeat, its restarts.

Everything runs on the event loop's thread except the two threads that read and write the pipe, which block.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from thermocline import errors
from thermocline.engine.request import Asked
from thermocline.errors import ThermoclineError
from thermocline.offline.quick_bench import QuickBench
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
from thermocline.server.process.subscribers import Subscribers
from thermocline.server.process.suspects import CrashesEngine, Job, Suspects
from thermocline.session.options import EngineOptions, ModelOptions

log = logging.getLogger(__name__)

STALE_S = 10.0  # without a heartbeat the engine counts as not ready, unless its steps take longer
WATCH_S = 1.0  # between two checks for silence
STOP_S = 0.3  # time for an engine to end by itself before its process is killed
WRITE_S = 10.0  # the same, where it has to write the rest of a prompt cache; a killed one leaves whole files
CRASHES = 3  # in a row with nothing to compute: the engine is given up


class EngineCrashed(ThermoclineError):
    """The engine's process ended while it computed this request."""


_OWN = {kind.__name__: kind for kind in (EngineCrashed, CrashesEngine)}


def grace_of(options: EngineOptions) -> float:
    """Return the time for an engine with these options to end by itself, in seconds."""
    return STOP_S if options.prompt_cache_dir is None else WRITE_S


class Jobs:
    """The jobs of one HTTP request, whose events come in one stream."""

    def __init__(self, engine: EngineProcess, jobs: Sequence[int]) -> None:
        self._engine = engine
        self._index = {job: i for i, job in enumerate(jobs)}
        self._left = set(jobs)
        self._events: list[Event] = []
        self._comes: asyncio.Future[None] | None = None  # done when an event comes

    def put(self, event: Event) -> None:
        if event.job not in self._left:
            return
        if not isinstance(event, Token):
            self._left.discard(event.job)
        self._events.append(event)
        if self._comes is not None:
            _done(self._comes)

    async def next(self, wait_s: float | None = None) -> list[tuple[int, Token | Finished]] | None:
        """Return new events as (index of the job, event), or None after the last. Raise a failed job's error.

        Wait for at least one event, but at most `wait_s`; then return []. Only one task may call this.
        """
        if not self._events and self._left:
            await self._some(wait_s)
        if not self._events and not self._left:
            return None
        found: list[tuple[int, Token | Finished]] = []
        for event in self._events:
            if isinstance(event, Failed):
                if found:
                    break  # first return the events before the failure
                raise _raisable(event.error, event.message)
            found.append((self._index[event.job], event))
        del self._events[: len(found)]
        return found

    async def _some(self, wait_s: float | None) -> None:
        """Wait for an event with a bare future: a task and a timer a token cost more than sending it."""
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
        """Cancel the jobs that are not over. May be called again."""
        left, self._left = self._left, set()
        for job in left:
            self._engine.cancel(job)


def _raisable(name: str, message: str) -> ThermoclineError:
    kind = _OWN.get(name) or getattr(errors, name)
    made: ThermoclineError = kind(message)
    return made


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class EngineProcess:
    """The engine's process, started again when it crashes."""

    def __init__(
        self,
        files: ModelOptions,
        options: EngineOptions,
        *,
        progress: Callable[[str, int, int], None],
        opened: Callable[[ModelOpened], None],
        silence_s: float = 60.0,
        observe: Callable[[Event], None] = lambda event: None,
        beside: int | None = None,
    ) -> None:
        """`files` and `options`: `LLM`'s. `opened` is called on another thread, before the weights are read.

        `silence_s`: the process is killed after so long a silence. `observe` gets every event. `beside`: the
        budget in `options` is shared with other engines, and so many bytes of it are for none: the engine
        asks for memory (`needed`) and waits for `grant`. None: all of the budget is its own.
        """
        self.files = files
        self._options = options, beside
        self.needed: int | None = None  # bytes that it asks for, until it ends
        self._share: float | None = None  # GiB that were granted
        self._news: asyncio.Future[None] | None = None  # done when `until` has to look again
        self._progress, self._on_opened = progress, opened
        self._awaited: dict[int, Jobs] = {}  # jobs that clients wait for
        self._held: dict[int, Job] = {}  # those that the engine does not have yet, in order
        self._inside: dict[int, Job] = {}  # jobs that the engine has, even if no client waits
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
        self._measurement: asyncio.Future[Measured] | None = None
        self.restarts = self.cancelled = 0
        self.error: ThermoclineError | None = None  # why the engine will never be ready
        self.over = asyncio.Event()  # set when the process has ended for good

    # ---- life

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self.over.is_set():
            self.over.clear()
            self.error, self._crashes = None, 0
        self.state, self._heard_at = "loading", time.monotonic()
        threading.Thread(target=self._serve, name="engine's events", daemon=True).start()
        if self._watching is None:
            self._watching = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Kill a silent process, so that it is restarted: its clients would wait for ever.

        Silence is counted, not read from a clock: while Ctrl-Z stops both processes, neither is silent.
        """
        silent = 0.0
        while True:
            beaten = self._heard_at
            await asyncio.sleep(WATCH_S)
            silent = silent + WATCH_S if self.state == "ready" and self._heard_at == beaten else 0.0
            if silent >= max(self._silence_s, 3 * self.heartbeat.longest_step_s):
                self.kill()
                log.warning(f"the engine has not been heard of for {silent:.0f} s; it is ended")
                silent = 0.0

    def _serve(self) -> None:
        """Run one process from its start to its end, on a thread of its own."""
        try:
            process, here = _spawned(self.files, *self._options)
        except OSError as e:  # no process or file is left: treat it as a crash
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
                ):  # reading its files takes a while, and nobody should wait
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
                    group = self._awaited.pop(event.job, None) if over else self._awaited.get(event.job)
                    if group is not None:
                        group.put(event)
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
            case LogLine(name, level, line):
                logging.getLogger(name).log(level, line)
            case Busy():
                pass  # only `_heard_at` matters
            case MemoryNeeded(nbytes):
                self.needed = nbytes
                if self._share is not None:  # it is started again, or was started before that was granted
                    self._send(Load(self._share))
                self._look_again()
            case Measured():
                self._measured(message)
            case ModelOpened():
                self.slots = message.max_batch
            case Ready():
                self.loaded = message
                if self.state == "loading":
                    self.state = "ready"
                if self.subscribers:
                    self._send(Subscribe(True))
                self._admit()
                self._look_again()
            case EngineError(error, text):
                self.error = getattr(errors, error)(text)
                self.kill()

    def _ended(self, code: int | None) -> None:
        """Fail the jobs that were in the process, and start another process unless this was the end."""
        self._outbox = self._process = None
        inside, self._inside = self._inside, {}
        self._crashes = 0 if inside else self._crashes + 1
        if self.error is None and self._crashes >= CRASHES:
            self.error = EngineCrashed(
                f"the engine crashed {CRASHES} times in a row (exit {code}); it is given up"
            )
        is_end = self.state == "stopping" or self.error is not None
        lost = [*inside, *self._held] if is_end else list(inside)
        for job in lost:
            self._fail(job, EngineCrashed("the engine stopped while it computed this request; try again"))
        self._measured(
            Measured(None, EngineCrashed.__name__, "the engine stopped while it measured; try again")
        )
        self.heartbeat = Heartbeat()
        if is_end:
            self.state = self.state if self.state == "stopping" else "failed"
            self._share = self.needed = None
            self.over.set()
            self._look_again()
            return
        condemned = self._suspects.crashed(inside.values())
        self.restarts += 1
        self.start()
        log.warning(f"the engine crashed (exit {code}); it is started again")
        for each in condemned:
            log.warning(f"the engine crashed twice at the request {each}, which is not computed again")

    def _fail(self, job: int, e: ThermoclineError) -> None:
        self._held.pop(job, None)
        if (group := self._awaited.pop(job, None)) is not None:
            failed = Failed(job, type(e).__name__, str(e))
            self.observe(failed)
            group.put(failed)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a change of its state. Raise the error of an engine that ended for good before that."""
        while not holds():
            if self.over.is_set():
                raise self.error or EngineCrashed("the engine was stopped; try again")
            if self._news is None:
                self._news = self._loop.create_future()
            await asyncio.shield(self._news)

    def _look_again(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    def grant(self, nbytes: int) -> None:
        """Let it take so much of the budget: now if it waits for that, and when it is started again."""
        waits, self._share = self._share is None, nbytes / 2**30
        if waits:
            self._send(Load(self._share))

    async def stop(self, grace_s: float) -> None:
        """End the process for good, by force after `grace_s`."""
        self.subscribers.show(None)
        await self.unload(grace_s)

    async def unload(self, grace_s: float) -> None:
        """End the process, by force after `grace_s`. It may be started again."""
        if self.state == "starting" or self.over.is_set():
            return
        self.state = "stopping"
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._send(Stop())
        try:
            await asyncio.wait_for(self.over.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self.over.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # ---- state

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._heard_at

    @property
    def alive(self) -> bool:
        """Tell whether there was a sign of life lately; steps as long as earlier ones are allowed."""
        return self.heartbeat_age_s < max(STALE_S, 3 * self.heartbeat.longest_step_s)

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.alive

    @property
    def active(self) -> int:
        """The number of jobs that are not over, waiting ones included."""
        return len(self._awaited)

    # ---- measuring

    @property
    def measuring(self) -> bool:
        return self._measurement is not None

    async def measure(self) -> QuickBench | None:
        """Measure the machine, in about 4 s. None: a request came, which goes first.

        Raise the error of a step. Only while nothing is active or measured.
        """
        assert self._measurement is None
        self._measurement = asyncio.get_running_loop().create_future()
        self._send(Measure())
        try:
            done = await self._measurement
        finally:
            self._measurement = None
        if done.error:
            raise _raisable(done.error, done.message)
        return done.found

    def _measured(self, message: Measured) -> None:
        if self._measurement is not None and not self._measurement.done():
            self._measurement.set_result(message)

    # ---- jobs

    def submit(self, prompts: Sequence[tuple[Sequence[int], Asked]]) -> Jobs:
        """Queue prompts as jobs. Raise CrashesEngine for a prompt that crashed the engine twice.

        Raise EngineCrashed if the engine has ended for good.
        """
        if self.over.is_set():
            raise EngineCrashed("the engine stopped; try again")
        numbers = list(itertools.islice(self._numbers, len(prompts)))
        jobs = {n: Job(Submit(n, ids, params)) for n, (ids, params) in zip(numbers, prompts, strict=True)}
        for job in jobs.values():
            self._suspects.check(job)
        group = Jobs(self, numbers)
        self._awaited |= dict.fromkeys(numbers, group)
        self._held |= jobs
        self._admit()
        return group

    def _admit(self) -> None:
        """Send held jobs to a ready engine, in order. A suspect waits until it is alone."""
        while self._held and self.state == "ready":
            number, job = next(iter(self._held.items()))
            try:
                self._suspects.check(job)
            except CrashesEngine as e:  # an equal request was condemned meanwhile
                self._fail(number, e)
                continue
            if self._inside and any(map(self._suspects.has, (job, *self._inside.values()))):
                return
            self._inside[number] = self._held.pop(number)
            self._send(job.command)

    def _left(self, number: int, *, clear: bool = False) -> None:
        """Note that a job has left the engine."""
        if (job := self._inside.pop(number, None)) is not None and clear:
            self._suspects.clear(job)
        self._admit()

    def cancel(self, job: int) -> None:
        if self._awaited.pop(job, None) is None:
            return
        self.cancelled += 1
        if self._held.pop(job, None) is None:
            self._send(Cancel(job))
        else:
            self._admit()

    def _send(self, command: ToEngine) -> None:
        if self._outbox is not None:
            self._outbox.put(command)


def _spawned(files: ModelOptions, options: EngineOptions, beside: int | None) -> tuple[Any, Connection]:
    """Start the engine's process; return it and this end of its pipe."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with there:  # the process has its own copy
        try:
            given = there, files, options, beside
            process = context.Process(target=worker.main, args=given, name="engine", daemon=True)
            process.start()
        except OSError:
            here.close()
            raise
    return process, here


def _write(connection: Connection, outbox: SimpleQueue[ToEngine | None]) -> None:
    """Write commands on a thread of its own: the engine reads between steps, and a pipe holds 64 KiB."""
    with contextlib.suppress(OSError):  # the process has ended; the reader notices, too
        while (command := outbox.get()) is not None:
            connection.send(command)
