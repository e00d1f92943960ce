"""A hand-over from a GPU's queue to the CPU and back by words in pinned memory.

The queue writes a number and waits. A thread of ours sees it, runs that task and writes the number back:
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html. A host function is called by a thread
of the driver's after an interrupt; others measured 26 us. Words are meant to take a few. Neither was measured
here: this has never run on a card.

NVIDIA warns that queues which wait for words may deadlock, because CUDA does not know what they wait for.
Here a queue waits for the CPU alone, and a task waits for no queue.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import Unsupported
from thermocline.ops.device import Task

SHAPE = (2, 32)  # u32 words: a row for each queue
ASKED, ANSWERED = 0, 64  # bytes into a row: a cache line each
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ; a write without flags comes after all that its queue wrote before

DoorbellCall = tuple[int, int, int]  # number, function, argument


def declare(library: Any) -> None:
    """Tell ctypes the driver's functions. AttributeError with a driver from before CUDA 11.7.

    The first version of these calls is off by default (NVreg_EnableStreamMemOPs), hence the second.
    """
    queued = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuStreamWriteValue32_v2.argtypes = queued
    library.cuStreamWaitValue32_v2.argtypes = queued
    library.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]


class StreamWords:
    """The words of one GPU's two queues, and the thread that answers.

    `words`: i32 of SHAPE, pinned. Raises Unsupported where the driver cannot do this.
    """

    def __init__(self, library: Any, words: torch.Tensor) -> None:
        try:
            declare(library)
        except AttributeError as e:
            raise Unsupported(f"the driver is older than CUDA 11.7: {e}") from None
        there = ctypes.c_uint64()
        error = library.cuMemHostGetDevicePointer_v2(ctypes.byref(there), words.data_ptr(), 0)
        if error:
            raise Unsupported(f"the driver does not map pinned memory (error {error})")
        self._library, self._there = library, there.value
        self.words: NDArray[np.uint32] = words.numpy().view(np.uint32)
        self._bell = _native.Doorbell(self.words)
        self._numbers = itertools.count(1)
        self._recorded: list[DoorbellCall] | None = None

    def call(self, queue: int, stream: int, task: Task) -> int:
        """Let a stream, which is the queue of that number, run a task. Return the driver's error, or 0.

        In a recording it is run at each replay, once that is expected. There the numbers are fixed, hence the
        0 behind the wait: no answer is left from the replay before.
        """
        number = next(self._numbers) % 0xFFFFFFFF + 1
        made = (number, task.function, task.argument)
        if self._recorded is None:
            self._bell.expect([made])  # before it is asked for: Ctrl-C may come between
        else:
            self._recorded.append(made)
        row, library = self._there + queue * SHAPE[1] * 4, self._library
        error: int = (
            library.cuStreamWriteValue32_v2(stream, row + ASKED, number, 0)
            or library.cuStreamWaitValue32_v2(stream, row + ANSWERED, number, EQUAL)
            or library.cuStreamWriteValue32_v2(stream, row + ANSWERED, 0, 0)
        )
        return error

    @contextmanager
    def recording(self, calls: list[DoorbellCall]) -> Iterator[None]:
        """Add the calls that are made within to `calls`: each replay asks for them."""
        self._recorded = calls
        try:
            yield
        finally:
            self._recorded = None

    def expect(self, calls: list[DoorbellCall]) -> None:
        """Be ready for the calls of a recording, which is replayed next."""
        self._bell.expect(calls)

    @property
    def expected(self) -> int:
        """Return how many calls have not been asked for yet: while there are any, the thread looks."""
        return self._bell.expected

    def settle(self) -> bool:
        """Forget calls of steps that were broken off, once the queues are empty; -> whether no task runs."""
        return self._bell.settle()
