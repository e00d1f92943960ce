"""The thread that runs tasks when words ask for them; a test plays the GPU's queues."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from thermocline import _native

ASKED, ANSWERED = 0, 16


class Bell:
    def __init__(self) -> None:
        self.words = np.zeros((2, 32), np.uint32)
        self.native = _native.Doorbell(self.words)

    def ask(self, queue: int, number: int) -> None:
        self.words[queue, ASKED] = number

    def answered(self, queue: int, number: int) -> None:
        until(lambda: self.words[queue, ANSWERED] == number)
        self.words[queue, ANSWERED] = 0


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0)


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    assert made.native.settle()


def task() -> _native.HostTask:
    return _native.HostTask(_native.Context(1, ""), _native.StepSlot())


def call(number: int, t: _native.HostTask) -> tuple[int, int, int]:
    return number, t.function, t.argument


def test_calls_are_answered_in_the_order_in_which_queues_ask(bell: Bell) -> None:
    """Not in that in which they are expected; a number may be expected again, as by each replay."""
    tasks = [task() for _ in range(3)]
    for replay in range(1, 4):
        bell.native.expect([call(7 + i, t) for i, t in enumerate(tasks)])
        for queue, i in ((1, 2), (0, 0), (1, 1)):
            assert tasks[i].ended == replay - 1
            bell.ask(queue, 7 + i)
            bell.answered(queue, 7 + i)
            assert tasks[i].ended == replay
        assert not bell.native.expected and not bell.words.any()


def test_a_task_that_fails_is_answered_and_says_so_when_it_is_asked(bell: Bell) -> None:
    failing, out = task(), np.ones((1, 4), np.float32)
    failing.zero(out)  # of a step that nobody has set
    bell.native.expect([call(1, failing)])
    bell.ask(0, 1)
    bell.answered(0, 1)
    with pytest.raises(ValueError, match="no step is set"):
        failing.take()


def test_what_nobody_has_asked_for_is_forgotten_once_it_is_settled(bell: Bell) -> None:
    """It may be freed then. A queue that asks for it all the same is not answered."""
    old, new = task(), task()
    bell.native.expect([call(1, old)])
    assert bell.native.expected == 1 and bell.native.settle() and not bell.native.expected
    bell.ask(0, 1)
    bell.native.expect([call(2, new)])
    bell.ask(1, 2)
    bell.answered(1, 2)
    assert (old.begun, new.ended) == (0, 1)


def test_it_is_not_settled_while_a_task_runs(bell: Bell) -> None:
    running, over = threading.Event(), threading.Event()

    def run(_: int) -> None:
        running.set()
        assert over.wait(20)

    slow = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(run)
    address = ctypes.cast(slow, ctypes.c_void_p).value
    assert address is not None
    bell.native.expect([(1, address, 0), call(2, task())])
    bell.ask(0, 1)
    assert running.wait(20)
    assert not bell.native.settle() and bell.native.expected == 1
    over.set()
    bell.answered(0, 1)
    assert bell.native.settle() and not bell.native.expected


def test_no_call_has_the_number_of_an_empty_word(bell: Bell) -> None:
    with pytest.raises(ValueError, match="0 is no call's number"):
        bell.native.expect([call(0, task())])
    with pytest.raises(ValueError, match="words are"):
        _native.Doorbell(np.zeros((1, 16), np.uint32))
