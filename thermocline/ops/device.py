"""`Device`, the queues of a GPU (CUDA's: `cuda.py`), and a stand-in in RAM on threads.

A device has a main queue and one beside it (`beside`, `join`). What is queued can be recorded once and
replayed (`record`): a CUDA graph.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from thermocline.errors import DeviceFailure

STUCK_S = 60.0  # without any end of the CPU's part of a step, while that is awaited
CPU_TASK = "CPU"  # what a task of the CPU's is called among what ran


class Task(Protocol):
    """`_native.HostTask`."""

    def run(self) -> None: ...
    @property
    def begun(self) -> int: ...
    @property
    def ended(self) -> int: ...
    @property
    def function(self) -> int: ...
    @property
    def argument(self) -> int: ...


class Device(Protocol):
    name: str
    torch: Any  # its torch.device
    records: bool  # whether its kernels can be recorded

    def reserve(self, nbytes: int) -> None:
        """Take what the next `zeros` are parts of, at most `nbytes`. DeviceFailure where it has no room."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the device. DeviceFailure where it has no room."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In RAM, where the device copies from and to."""

    def register(self, address: int, nbytes: int) -> bool:
        """Make memory that there is already such as to copy from as from `pinned`.

        Return False, with a warning, where the system refuses.
        """

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Queue work on tensors; what it returns is lost."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...
    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copied when this returns, either way, on any thread: not what a queued step works on."""

    def call(self, task: Task) -> None:
        """Queue a task of the CPU's."""

    def beside(self) -> Any:
        """A context: what is queued within runs beside the main queue, after what that has now."""

    def join(self) -> None:
        """The main queue waits for what was queued beside it."""

    def mark(self) -> object:
        """Return a point of the present queue, reached once all that is in it now has ended.

        Neither `mark` nor `after` can be recorded.
        """

    def after(self, mark: object) -> None:
        """Let what is queued next wait for a mark, of this device or of another of its kind."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """-> what queues again all that `work` queues, which is not run now."""

    def wait(self, tasks: Sequence[Task], mark: object = None) -> None:
        """Until a mark is reached, or all that is queued, also beside and not joined, has ended.

        DeviceFailure if it failed, or `tasks` are stuck.
        """

    def release(self) -> None:
        """Wait for all that is queued, and let the caller free what was registered. Raise nothing."""

    def close(self) -> None:
        """`release`, and nothing can be queued any more."""


def _no_progress(tasks: Sequence[Task]) -> DeviceFailure:
    running = sum(t.begun - t.ended for t in tasks)
    who = f"the CPU's part of a step ({running} under way)" if running else "the GPU"
    return DeviceFailure(
        f"{who} has not ended for {STUCK_S:g} s; this process cannot go on: end it and run again"
    )


class Watchdog:
    """Notices that nothing ends any more. Whoever found that out once does not wait for it again."""

    def __init__(self) -> None:
        self.stuck = False

    def begin(self, tasks: Sequence[Task]) -> None:
        self._tasks, self._ended, self._since = tasks, -1, time.monotonic()

    def check(self) -> None:
        ended, now = sum(t.ended for t in self._tasks), time.monotonic()
        if ended != self._ended:
            self._ended, self._since = ended, now
        elif now - self._since > (0 if self.stuck else STUCK_S):
            self.stuck = True
            raise _no_progress(self._tasks)

    def end(self) -> None:
        self.stuck = False
        self.let_go()

    def let_go(self) -> None:
        """Tasks hold the CPU's threads. Those that are stuck are still the driver's."""
        if not self.stuck:
            self._tasks = ()


# ---- a stand-in


class _Queue:
    """Runs on a thread, in order, all that is put."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._go, name=name, daemon=True)
        self._thread.start()
        self.error: BaseException | None = None

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self, wait: bool) -> None:
        self._work.put(None)
        if wait:
            self._thread.join()

    def _go(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as e:
                self.error = self.error or e


class _Mark(threading.Event):
    """Reached, with what a queue had met by then."""

    error: BaseException | None = None


Signals = dict[int, threading.Event]  # of one replay, by their numbers in the recording


@dataclass(frozen=True)
class QueueSpan:
    """Something that ran: when, by time.perf_counter's clock, in which queue."""

    name: str
    stream: str
    begin_us: float
    end_us: float


class StandIn:
    """A device in RAM, for machines without a GPU and for tests: the same order, the same recordings."""

    records = True

    def __init__(self) -> None:
        self.name, self.torch = "stand-in", torch.device("cpu")
        self._queues = (_Queue("main"), _Queue("beside"))
        self._on = 0
        self._signals = 0
        self._beside_done: int | None = None
        self._recorded: list[tuple[int, Callable[[Signals], None]]] | None = None
        self._live: Signals = {}
        self._watch = Watchdog()
        self.watched: list[QueueSpan] | None = None  # a list: what runs is noted in it

    def reserve(self, nbytes: int) -> None:
        """RAM has no steps to round up to."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    pinned = zeros

    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def register(self, address: int, nbytes: int) -> bool:
        return True

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        self._work(getattr(kernel, "__name__", "kernel"), lambda: kernel(*args))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._work("copy", lambda: to.copy_(source))

    def call(self, task: Task) -> None:
        self._work(CPU_TASK, task.run)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._signal_to(1)
        self._on = 1
        try:
            yield
        finally:
            self._beside_done = self._signal()
            self._on = 0

    def join(self) -> None:
        if self._beside_done is not None:
            self._await(self._beside_done)
            self._beside_done = None

    def mark(self) -> object:
        assert self._recorded is None, "a mark is of one step alone"
        return self._reached(self._on)

    def _reached(self, queue: int) -> _Mark:
        reached, queues = _Mark(), self._queues

        def reach() -> None:
            reached.error = next((q.error for q in queues if q.error is not None), None)
            reached.set()

        queues[queue].put(reach)
        return reached

    def after(self, mark: object) -> None:
        assert isinstance(mark, threading.Event) and self._recorded is None
        reached = mark

        def wait(_: Signals) -> None:
            reached.wait()

        self._put(wait)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self._recorded, begin = [], self._signals
        try:
            work()
            recorded, signals = self._recorded, range(begin, self._signals)
        finally:
            self._recorded = None

        def replay() -> None:
            mine = {i: threading.Event() for i in signals}
            for queue, item in recorded:
                self._queues[queue].put(lambda item=item: item(mine))  # type: ignore[misc]

        return replay

    def wait(self, tasks: Sequence[Task], mark: object = None) -> None:
        assert mark is None or isinstance(mark, _Mark)
        marks = [self._reached(i) for i in range(len(self._queues))] if mark is None else [mark]
        self._watch.begin(tasks)
        for one in marks:
            while not one.wait(0.05):
                self._watch.check()
        self._watch.end()
        if (error := next((m.error for m in marks if m.error is not None), None)) is not None:
            for queue in self._queues:
                queue.error = None
            raise DeviceFailure(f"{self.name}: {error!r}") from error

    def release(self) -> None:
        with contextlib.suppress(DeviceFailure):  # it was said when it was met
            self.wait([])

    def close(self) -> None:
        self.release()
        for queue in self._queues:
            queue.close(wait=not self._watch.stuck)
        self._watch.let_go()

    def _work(self, name: str, what: Callable[[], Any]) -> None:
        stream = ("main", "beside")[self._on]

        def work(_: Signals) -> None:
            begin = time.perf_counter()
            with torch.inference_mode():
                what()
            if self.watched is not None:
                self.watched.append(QueueSpan(name, stream, begin * 1e6, time.perf_counter() * 1e6))

        self._put(work)

    def _put(self, work: Callable[[Signals], None]) -> None:
        if self._recorded is not None:
            self._recorded.append((self._on, work))
        else:
            self._queues[self._on].put(lambda: work(self._live))

    def _signal(self) -> int:
        made, self._signals = self._signals, self._signals + 1
        if self._recorded is None:
            self._live[made] = threading.Event()
        self._put(lambda live: live[made].set())
        return made

    def _await(self, signal: int) -> None:
        def wait(live: Signals) -> None:
            live[signal].wait()
            del live[signal]

        self._put(wait)

    def _signal_to(self, queue: int) -> None:
        """Let the queue run what it is given next after all that is in the present one."""
        made, here = self._signal(), self._on
        self._on = queue
        self._await(made)
        self._on = here
