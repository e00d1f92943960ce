"""Where a GPU's work is queued: CUDA, or a stand-in that does the same on the CPU with threads for queues.

A device has a main queue and one beside it (`beside`, `join`). What is queued can be recorded once and
replayed (`record`): a CUDA graph. Knows torch and the driver; must not know models or kernels.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from thermocline.errors import DeviceFailure, Unsupported

STUCK_S = 60.0  # without any end of the CPU's part of a step, while that is awaited
CPU_TASK = "CPU"  # what a task of the CPU's is called among what ran
SPIN_S = 0.02  # of a wait, without sleeping: a step takes 5 to 100 ms


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

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the device. DeviceFailure where it has no room."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In RAM, where the device copies from and to."""

    def register(self, address: int, nbytes: int) -> None:
        """Memory that there is already, to copy from as from `pinned`."""

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        """Queue work on tensors; what it returns is lost."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None: ...
    def call(self, task: Task) -> None:
        """Queue a task of the CPU's."""

    def beside(self) -> Any:
        """A context: what is queued within runs beside the main queue, after what that has now."""

    def join(self) -> None:
        """The main queue waits for what was queued beside it."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """-> what queues again all that `work` queues, which is not run now."""

    def wait(self, tasks: Sequence[Task]) -> None:
        """Until all that is queued has ended. DeviceFailure if it failed, or `tasks` are stuck."""

    def close(self) -> None: ...


def _no_progress(tasks: Sequence[Task]) -> DeviceFailure:
    running = sum(t.begun - t.ended for t in tasks)
    who = f"the CPU's part of a step ({running} under way)" if running else "the GPU"
    return DeviceFailure(
        f"{who} has not ended for {STUCK_S:g} s; this process cannot go on: end it and run again"
    )


class _Watch:
    """Notices that nothing ends any more."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks, self._ended, self._since = tasks, -1, time.monotonic()

    def check(self) -> None:
        ended, now = sum(t.ended for t in self._tasks), time.monotonic()
        if ended != self._ended:
            self._ended, self._since = ended, now
        elif now - self._since > STUCK_S:
            raise _no_progress(self._tasks)


# ---- CUDA


def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    return library


class Cuda:
    """One NVIDIA GPU. The CPU's tasks are the driver's host functions: graphs replay them without Python."""

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise Unsupported("torch sees no NVIDIA GPU: see `thermocline doctor`")
        if index >= torch.cuda.device_count():
            raise Unsupported(f"there is no GPU {index}: this machine has {torch.cuda.device_count()}")
        self.torch = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch)
        torch.cuda.set_device(self.torch)
        self._library = _driver()
        self._main, self._side = (torch.cuda.Stream(self.torch) for _ in range(2))  # type: ignore[no-untyped-call]
        self._on = self._main
        self._registered: list[int] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            made = torch.zeros(shape, dtype=dtype, device=self.torch)
            torch.cuda.synchronize(self.torch)  # other streams may use it at once
            return made
        except torch.cuda.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info(self.torch)
            raise DeviceFailure(
                f"{self.name}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free, less than was planned "
                "with: end what else uses it, or allow less with --vram"
            ) from None

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as e:
            raise DeviceFailure(f"{self.name}: no pinned memory: {str(e).splitlines()[0]}") from None

    def register(self, address: int, nbytes: int) -> None:
        error = self._library.cuMemHostRegister_v2(address, nbytes, 0)
        if error:
            raise DeviceFailure(
                f"{self.name}: the driver cannot pin {nbytes / 2**30:.2f} GiB of RAM (error {error}): allow "
                "less with --ram, or lift the limit on locked memory (ulimit -l)"
            )
        self._registered.append(address)

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        with torch.cuda.stream(self._on):
            kernel(*args)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._on):
            to.copy_(source, non_blocking=True)

    def call(self, task: Task) -> None:
        error = self._library.cuLaunchHostFunc(self._on.cuda_stream, task.function, task.argument)
        if error:
            raise DeviceFailure(f"{self.name}: the driver refused a host function (error {error})")

    @contextmanager
    def beside(self) -> Iterator[None]:
        self._side.wait_stream(self._main)
        self._on = self._side
        try:
            yield
        finally:
            self._on = self._main

    def join(self) -> None:
        self._main.wait_stream(self._side)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._main):
            work()

        def replay() -> None:
            with torch.cuda.stream(self._main):
                graph.replay()

        return replay

    def wait(self, tasks: Sequence[Task]) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._main)
        watch, begin = _Watch(tasks), time.monotonic()
        try:
            while not event.query():
                if time.monotonic() - begin > SPIN_S:
                    watch.check()
                    time.sleep(50e-6)
        except RuntimeError as e:  # torch's: what a kernel did wrong shows here
            raise DeviceFailure(f"{self.name}: {str(e).splitlines()[0]}") from None

    def close(self) -> None:
        torch.cuda.synchronize(self.torch)
        while self._registered:
            self._library.cuMemHostUnregister(self._registered.pop())


# ---- a stand-in


class _Queue:
    """What is put runs in order, on a thread."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._go, name=name, daemon=True)
        self._thread.start()
        self.error: BaseException | None = None

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _go(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as e:
                self.error = self.error or e


Signals = dict[int, threading.Event]  # of one replay, by their numbers in the recording


@dataclass(frozen=True)
class Span:
    """Something that ran: when, by time.perf_counter's clock, in which queue."""

    name: str
    stream: str
    begin_us: float
    end_us: float


class StandIn:
    """A device in RAM, for machines without a GPU and for tests: the same order, the same recordings."""

    def __init__(self) -> None:
        self.name, self.torch = "stand-in", torch.device("cpu")
        self._queues = (_Queue("main"), _Queue("beside"))
        self._on = 0
        self._signals = 0
        self._beside_done: int | None = None
        self._recorded: list[tuple[int, Callable[[Signals], None]]] | None = None
        self._live: Signals = {}
        self.watched: list[Span] | None = None  # a list: what runs is noted in it

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    pinned = zeros

    def register(self, address: int, nbytes: int) -> None:
        pass

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

    def wait(self, tasks: Sequence[Task]) -> None:
        ended, watch = threading.Event(), _Watch(tasks)
        self._queues[0].put(ended.set)
        while not ended.wait(0.05):
            watch.check()
        for queue in self._queues:
            if queue.error is not None:
                error, queue.error = queue.error, None
                raise DeviceFailure(f"{self.name}: {error!r}") from error

    def close(self) -> None:
        for queue in self._queues:
            queue.close()

    def _work(self, name: str, what: Callable[[], Any]) -> None:
        stream = ("main", "beside")[self._on]

        def work(_: Signals) -> None:
            begin = time.perf_counter()
            with torch.inference_mode():
                what()
            if self.watched is not None:
                self.watched.append(Span(name, stream, begin * 1e6, time.perf_counter() * 1e6))

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
        """What is put there next comes after all that is in the present one."""
        made, here = self._signal(), self._on
        self._on = queue
        self._await(made)
        self._on = here
