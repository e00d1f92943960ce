"""One NVIDIA GPU as a `device.Device`: streams, graphs, hand-over to the CPU, and pinned memory.

Whatever torch, Triton or the driver raise becomes one DeviceFailure.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from thermocline import _native
from thermocline.errors import DeviceFailure, ThermoclineError, Unsupported
from thermocline.ops import doorbell
from thermocline.ops.device import Task, Watchdog
from thermocline.ops.device_sizes import LEAST_SLAB, SLAB_ALIGN, SLAB_STEP
from thermocline.ops.doorbell import DoorbellCall, StreamWords

log = logging.getLogger(__name__)

CAPABILITY = (7, 5)  # the least that torch is built for
TRITON = (8, 0)  # the least that Triton makes kernels for
PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every GPU, whichever is the thread's present one
LOOK_S = 20e-6  # between looks at whether a step has ended: Linux makes 0.1 ms of it, of 3 to 100 ms


def _driver() -> ctypes.CDLL:
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
        library.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        library.cuMemHostRegister_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        library.cuMemHostUnregister.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError) as e:  # not there, or from before CUDA 10
        raise Unsupported(f"the driver's {name} cannot be used: {e}") from None
    return library


def check(index: int) -> tuple[int, int]:
    """Return a GPU's compute capability. Unsupported where torch sees no such GPU, or is not built for it."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown} hides others)"
    try:
        count = torch.cuda.device_count()
        if index >= count:
            raise Unsupported(f"there is no GPU {index}: this process sees {count}{hidden}")
        capability = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
    except RuntimeError as e:
        raise DeviceFailure(f"GPU {index}: {_first_line(e)}") from e
    if capability < CAPABILITY:
        has, needs = (".".join(map(str, c)) for c in (capability, CAPABILITY))
        raise Unsupported(
            f"{name} is too old: its compute capability is {has}, torch needs {needs} (RTX 20, T4 or later)"
        )
    return capability


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return lines[0] if lines else type(e).__name__


class _Refused(DeviceFailure):
    """A call that the driver knows, and does not carry out here."""


class Cuda:
    """One NVIDIA GPU. Its queues hand tasks over to the CPU without Python, also from recordings.

    `words`: by words in pinned memory, where the driver takes them; else by the driver's host functions.
    """

    def __init__(self, index: int = 0, words: bool = True) -> None:
        self.records = check(index) >= TRITON  # torch's kernels bring tables from RAM, which no graph may
        self.torch, self.name = torch.device("cuda", index), f"GPU {index}"
        self._registered: list[int] = []
        self._slab: torch.Tensor | None = None  # [bytes], of zeros from `_used` on
        self._used = 0
        self._watch = Watchdog()
        with self._failing():
            self.name = torch.cuda.get_device_name(index)
            torch.cuda.set_device(self.torch)
            self.others = torch.cuda.device_count() - 1
            self._library = _driver()
            self._main, self._side = (torch.cuda.Stream(self.torch) for _ in range(2))  # type: ignore[no-untyped-call]
        self._on = self._main
        self._words: StreamWords | None = None
        if words:
            try:
                self._try_words()
            except BaseException:
                self.close()  # a queue may still have the words' addresses
                raise

    @property
    def hand_over(self) -> str:
        """Say how tasks come to the CPU."""
        return "host functions" if self._words is None else "words in pinned memory"

    def _try_words(self) -> None:
        """Hand over by words from now on, if that works, also in a recording that is replayed.

        The documentation names no property of a card to ask for.
        """
        task = _native.HostTask(_native.Context(1, ""), _native.StepSlot())
        try:
            self._words = StreamWords(self._library, self.pinned(doorbell.SHAPE, torch.int32))
            self.call(task)
            self.wait([task])
            replay = self._replay_of(lambda: self.call(task))
            for _ in range(2):
                replay()
                self.wait([task])
        except (Unsupported, _Refused) as e:
            if self._words is not None:
                self.wait([])  # a word may have been queued
            self._words = None
            why = str(e).removeprefix(f"{self.name}: ")
            log.info(
                f"{self.name}: the CPU's tasks are host functions of the driver, which take longer: {why}"
            )

    def _replay_of(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            return self.record(work)
        except DeviceFailure as e:
            why = str(e).removeprefix(f"{self.name}: ")
            raise _Refused(f"{self.name}: in a recording, {why}") from e

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Raise whatever torch, Triton and the driver raise as DeviceFailure."""
        try:
            yield
        except ThermoclineError:
            raise
        except torch.cuda.OutOfMemoryError as e:
            raise DeviceFailure(self._full()) from e
        except (
            Exception
        ) as e:  # of a kernel that cannot be compiled, Triton's and its compiler's: no common base
            raise DeviceFailure(f"{self.name}: {_first_line(e)}") from e

    def _full(self) -> str:
        try:
            free, total = torch.cuda.mem_get_info(self.torch)
            room = f"{free / 2**30:.2f} of {total / 2**30:.2f} GiB are free"
        except RuntimeError:  # of a driver that is gone
            room = "its memory is full"
        return (
            f"{self.name}: {room}, less than was planned with: end what else uses it, or allow less with "
            "--vram"
        )

    def free_bytes(self) -> int:
        """Return the free bytes of its memory, once an earlier session's are given back."""
        with self._failing():
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self.torch)[0])

    def reserve(self, nbytes: int) -> None:
        self._slab = None
        size = nbytes // SLAB_STEP * SLAB_STEP
        if size >= LEAST_SLAB:  # a smaller one would be rounded up
            with self._failing():
                torch.cuda.empty_cache()  # else it takes a larger block of what measuring left, and keeps all
            self._slab, self._used = self.zeros((size,), torch.uint8), 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._slab is not None:
            nbytes, room = math.prod(shape) * dtype.itemsize, self._slab.nbytes - self._used
            if 0 < nbytes <= room:
                part = self._slab[self._used : self._used + nbytes]
                self._used = -(-(self._used + nbytes) // SLAB_ALIGN) * SLAB_ALIGN
                return part.view(dtype).view(shape)
        with self._failing():
            made = torch.zeros(shape, dtype=dtype, device=self.torch)
            torch.cuda.synchronize(self.torch)  # other streams may use it at once
            return made

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as e:
            raise DeviceFailure(f"{self.name}: no pinned memory: {_first_line(e)}") from e

    def register(self, address: int, nbytes: int) -> bool:
        with self._failing(), torch.cuda.stream(self._main):  # its GPU is the thread's present one then
            error = self._library.cuMemHostRegister_v2(address, nbytes, PORTABLE)
        if error:
            log.warning(
                f"{self.name}: the driver cannot pin {nbytes / 2**30:.2f} GiB of RAM (error {error}), so the "
                "CPU computes its part of prompts, too: allow less with --ram, or lift the limit on locked "
                "memory (ulimit -l)"
            )
            return False
        self._registered.append(address)
        return True

    def run(self, kernel: Callable[..., Any], *args: Any) -> None:
        with self._failing(), torch.cuda.stream(self._on):
            kernel(*args)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with self._failing(), torch.cuda.stream(self._on):
            to.copy_(source, non_blocking=True)

    def put(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with self._failing():
            to.copy_(source)

    def call(self, task: Task) -> None:
        with self._failing(), torch.cuda.stream(self._on):
            stream, words = self._on.cuda_stream, self._words
            if words is not None:
                error = words.call(int(self._on is self._side), stream, task)
            else:
                error = self._library.cuLaunchHostFunc(stream, task.function, task.argument)
        if error:
            raise _Refused(f"{self.name}: the driver refused a task of the CPU's (error {error})")

    @contextmanager
    def beside(self) -> Iterator[None]:
        with self._failing():
            self._side.wait_stream(self._main)
        self._on = self._side
        try:
            yield
        finally:
            self._on = self._main

    def join(self) -> None:
        with self._failing():
            self._main.wait_stream(self._side)

    def mark(self) -> object:
        with self._failing():
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._on)
            return event

    def after(self, mark: object) -> None:
        with self._failing():
            assert isinstance(mark, torch.cuda.Event)
            self._on.wait_event(mark)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        met: BaseException | None = None
        calls: list[DoorbellCall] = []
        words = self._words
        noting = contextlib.nullcontext() if words is None else words.recording(calls)
        try:
            with self._failing(), noting:
                graph = torch.cuda.CUDAGraph()
                # What other threads do meanwhile is allowed. A capture that fails at its end leaves its
                # stream as the thread's present one, hence another context around it.
                capture = torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local")
                with torch.cuda.stream(self._main), capture:
                    try:
                        work()
                    except BaseException as e:
                        met = e
                        raise
        except DeviceFailure as e:  # a recording that was broken off ends with an error of its own
            raise met or e from None

        def replay() -> None:
            with self._failing(), torch.cuda.stream(self._main):
                if words is not None:
                    words.expect(calls)  # before it is launched: Ctrl-C may come between
                graph.replay()

        return replay

    def wait(self, tasks: Sequence[Task], mark: object = None) -> None:
        """Sleep between looks: the CPU's threads want every core, and each look takes the driver's lock."""
        watch, whole = self._watch, mark is None
        watch.begin(tasks)
        with self._failing():  # what a kernel did wrong shows here
            if whole:  # both queues: a step may have been broken off before it joined them
                self._main.wait_stream(self._side)
                mark = self.mark()
            event: Any = mark
            while not event.query():
                watch.check()
                time.sleep(LOOK_S)
            if whole:
                self._settle()
        watch.end()

    def _settle(self) -> None:
        """Wait for a task that a step asked for and, broken off there, does not wait for."""
        while self._words is not None and not self._words.settle():
            self._watch.check()
            time.sleep(LOOK_S)

    def release(self) -> None:
        if self._watch.stuck:
            return  # it would be waited for without an end
        with contextlib.suppress(DeviceFailure), self._failing():  # it was said when it was met
            torch.cuda.synchronize(self.torch)
        with contextlib.suppress(DeviceFailure):
            self._watch.begin([])
            self._settle()
        self._slab = None  # it goes with the tensors that are parts of it
        with contextlib.ExitStack() as own:
            with contextlib.suppress(DeviceFailure), self._failing():
                own.enter_context(torch.cuda.stream(self._main))  # a thread without a GPU is refused
            while self._registered:
                self._library.cuMemHostUnregister(self._registered.pop())

    def close(self) -> None:
        self.release()
        self._watch.let_go()
        if not self._watch.stuck:
            self._words = None  # its thread ends
        with contextlib.suppress(DeviceFailure), self._failing():
            torch.cuda.empty_cache()
