"""A card that is not there: torch.cuda and the driver's library as `cuda.Cuda` sees them, in RAM, with a
fault at the call that a test names.

Streams are queues. What they hold runs when somebody looks (`Card.advance`), in the order that a test names,
so what only happens to come first comes last in one of the orders. What CUDA forbids while a stream is
captured, or with memory that is not the card's, is refused as CUDA would.

`Faults` counts calls by name and lets one of them, or all from it on, fail. `install` puts the card into the
machine; a session then runs all of `Cuda`'s Python.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from thermocline import _native
from thermocline.machine import hardware
from thermocline.ops import cuda, kernels
from thermocline.ops.kernels import torch_kernels
from thermocline.session.self_check import verdicts

GIB = 2**30
MAPPED = 1 << 56  # from an address in pinned memory to the same one as the card sees it
NAME = "NVIDIA Pretended"
ANY = "any"  # a name for all calls


@dataclass
class Faults:
    """`name`'s call number `at` (from 1) raises or returns `error`; if `sticky`, so does all that follows."""

    name: str = ""
    at: int = 0
    error: Any = None
    sticky: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    struck: bool = False

    def due(self, name: str) -> bool:
        self.seen[name] += 1
        self.seen[ANY] += 1
        hit = self.name in (name, ANY) and self.seen[self.name] == self.at
        self.struck = self.struck or hit
        return hit or (self.struck and self.sticky)

    def met(self, name: str) -> None:
        if self.due(name):
            raise copy.copy(self.error)  # one that was raised holds all that it has been through

    def set(self, name: str, at: int, error: Any, sticky: bool = False) -> None:
        """From now on counted anew."""
        self.name, self.at, self.error, self.sticky = name, at, error, sticky
        self.seen.clear()
        self.struck = False


# ---- what is queued

Marks = set[int]  # that were reached
Item = Callable[[Marks], bool]  # does its work, or returns False: not yet
Order = Literal["at once", "first stream first", "last stream first"]
ORDERS: tuple[Order, ...] = ("at once", "first stream first", "last stream first")


class Queues:
    """Of streams, by number: each in order, any of them before others."""

    def __init__(self, order: Order, held: dict[int, list[Item]]) -> None:
        self.order = order
        self.held = {stream: deque(items) for stream, items in held.items()}
        self.reached: Marks = set()

    def put(self, stream: int, item: Item) -> None:
        self.held.setdefault(stream, deque()).append(item)

    def one(self) -> bool:
        """Run one item, if any can run."""
        for stream in sorted(self.held, reverse=self.order == "last stream first"):
            queue = self.held[stream]
            if queue:
                item = queue.popleft()
                if item(self.reached):
                    return True
                queue.appendleft(item)
        return False

    @property
    def count(self) -> int:
        return sum(map(len, self.held.values()))


@dataclass
class Capture:
    """Of streams, by number: what they do at each replay, and how much of others' work they waited for."""

    origin: int
    held: dict[int, list[Item]] = field(default_factory=dict)
    joined: dict[int, dict[int, int]] = field(default_factory=dict)
    broken: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def __post_init__(self) -> None:
        self.join(self.origin, {})

    def join(self, stream: int, seen: dict[int, int]) -> None:
        self.held.setdefault(stream, [])
        mine = self.joined.setdefault(stream, {})
        for other, n in seen.items():
            mine[other] = max(n, mine.get(other, 0))

    def seen(self, stream: int) -> dict[int, int]:
        return self.joined[stream] | {stream: len(self.held[stream])}

    @property
    def whole(self) -> bool:
        """Whether the first stream waits for all that others do."""
        seen = self.seen(self.origin)
        return all(seen.get(stream, 0) >= len(items) for stream, items in self.held.items())


class Forbidden(RuntimeError):
    """What CUDA refuses."""


# What the driver makes of cuStreamWriteValue32 and cuStreamWaitValue32.
Words = Literal["taken", "unknown", "refused", "refused in a recording"]


@dataclass
class Card:
    """What the machine has, and what of it is in use."""

    faults: Faults = field(default_factory=Faults)
    count: int = 1
    capability: tuple[int, int] = (8, 9)
    free_bytes: int = GIB
    registered: dict[int, int] = field(default_factory=dict)
    order: Order = "at once"
    slow: bool = False  # one item is done at each look
    capture: Capture | None = None
    now: Any = None  # the present stream; None: the default one
    there: set[int] = field(default_factory=set)  # addresses of what is in its memory
    pinned: set[int] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)  # names of kernels
    gone: set[int] = field(default_factory=set)  # addresses of tasks that were freed
    words: Words = "taken"
    called: dict[int, int] = field(default_factory=dict)  # addresses of tasks, by what asks for them
    cut_off: list[int] = field(default_factory=list)  # those of tasks that were freed while they ran
    streams: int = 0
    marks: int = 0

    def __post_init__(self) -> None:
        self.queues = Queues(self.order, {})

    def queue(self, work: Callable[[], Any], stream: int | None = None) -> None:
        def item(_: Marks) -> bool:
            with torch.inference_mode():
                work()
            return True

        if stream is None:
            assert self.now is not None, "work in the default stream, which waits for all others"
            stream = self.now.cuda_stream
        self.put(stream, item)

    def put(self, stream: int, item: Item) -> None:
        if self.capture is None:
            self.queues.put(stream, item)
            if self.order == "at once":
                self.advance()
        elif stream in self.capture.held:
            self.capture.held[stream].append(item)
        else:
            self.refuse("work in a stream that is not captured is done now, and at no replay")

    def advance(self, mark: int | None = None) -> None:
        """Somebody looks: what can run does, until the mark is reached that is looked for."""
        while mark not in self.queues.reached and self.queues.one() and not self.slow:
            pass

    def finish(self) -> None:
        while self.queues.count:
            assert self.queues.one(), "streams wait for what nobody does"

    def refuse(self, why: str) -> None:
        if self.capture is not None:
            self.capture.broken = True
        raise Forbidden(f"CUDA error: {why}")

    def outside(self, what: str) -> None:
        """Refuse what a capture forbids its own thread; it is of the mode "thread_local"."""
        if self.capture is not None and self.capture.thread == threading.get_ident():
            self.refuse(f"operation not permitted when stream is capturing: {what}")

    def made(self, where: set[int], made: torch.Tensor) -> torch.Tensor:
        """Note memory until it is freed."""
        storage = made.untyped_storage()
        where.add(storage.data_ptr())
        weakref.finalize(storage, where.discard, storage.data_ptr())
        return made

    def emptied(self) -> None:
        """Give back what torch holds and nobody uses."""

    def can_wait(self, x: torch.Tensor) -> bool:
        """Whether a copy from there or to there can be queued: it is the card's memory, or pinned."""
        address, base = x.data_ptr(), x.untyped_storage().data_ptr()
        if base in self.there or base in self.pinned:
            return True
        return any(begin <= address < begin + n for begin, n in self.registered.items())

    def word(self, address: int) -> ctypes.c_uint32:
        """What the card may write to and wait for, at its own address of it."""
        here = address - MAPPED
        assert any(begin <= here < begin + 256 for begin in self.pinned), "a word that is not pinned"
        return ctypes.c_uint32.from_address(here)

    def check(self, kernel: Any, args: tuple[Any, ...]) -> None:
        """A kernel reads the card's memory, and is loaded before a capture."""
        name = getattr(kernel, "__name__", str(kernel))
        if self.capture is None:
            self.loaded.add(name)
        elif name not in self.loaded:
            self.refuse(f"operation not permitted when stream is capturing: {name} is loaded")
        for x in (getattr(kernel, "__self__", None), *args):
            x = getattr(x, "weight", x)
            x = x if isinstance(x, torch.Tensor) else getattr(x, "data", None)
            used = isinstance(x, torch.Tensor) and x.numel()
            if used and x.untyped_storage().data_ptr() not in self.there:
                self.refuse(f"an illegal memory access was encountered in {name}")


class Target:
    """A tensor that is copied to in its stream's order."""

    def __init__(self, card: Card, to: torch.Tensor, name: str) -> None:
        self.card, self.to, self.name = card, to, name

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self.card.faults.met(self.name)
        waits = self.card.can_wait(source) and self.card.can_wait(self.to)
        if non_blocking and waits:
            self.card.queue(lambda: self.to.copy_(source))
            return
        self.card.outside("a copy that somebody waits for")
        assert self.name == "put", "a copy from or to memory that is not pinned"
        self.to.copy_(source)


def driver(card: Card) -> Any:
    """libcuda: result codes, no exceptions. 712: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED; 719:
    CUDA_ERROR_LAUNCH_FAILED; 801: CUDA_ERROR_NOT_SUPPORTED; 900: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
    """

    def code() -> int:
        if isinstance(card.faults.error, BaseException) and not isinstance(card.faults.error, Exception):
            raise card.faults.error  # Ctrl-C, on its way back from the driver
        return card.faults.error if isinstance(card.faults.error, int) else 719

    def of_word(name: str) -> int:
        """Return the code of a call for a word: 0 if the driver queues it."""
        if card.faults.due(name):
            return code()
        if card.words == "refused in a recording" and card.capture is not None:
            card.capture.broken = True
            return 900
        return 801 if card.words == "refused" else 0

    class Library:
        @staticmethod
        def cuStreamWriteValue32_v2(stream: int, address: int, value: int, flags: int) -> int:
            if error := of_word("cuStreamWriteValue32"):
                return error
            assert flags == 0, "a write that may come before what was written before"

            def go() -> None:
                assert card.called.get(value) not in card.gone, "a task that is asked for was freed"
                card.word(address).value = value

            card.queue(go, stream)
            return 0

        @staticmethod
        def cuStreamWaitValue32_v2(stream: int, address: int, value: int, flags: int) -> int:
            if error := of_word("cuStreamWaitValue32"):
                return error
            assert flags == 1, "CU_STREAM_WAIT_VALUE_EQ"

            def go() -> None:
                end = time.monotonic() + 20
                while card.word(address).value != value:
                    assert time.monotonic() < end, "a stream waits for a word that nobody writes"
                    time.sleep(0)

            card.queue(go, stream)
            return 0

        @staticmethod
        def cuMemHostGetDevicePointer_v2(there: Any, here: int, flags: int) -> int:
            if card.faults.due("cuMemHostGetDevicePointer"):
                return code()
            there._obj.value = here + MAPPED
            return 0

        @staticmethod
        def cuLaunchHostFunc(stream: int, function: int, argument: int) -> int:
            if card.faults.due("cuLaunchHostFunc"):
                return code()
            call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)

            def go() -> None:
                assert argument not in card.gone, "a host function's argument was freed"
                call(argument)

            card.queue(go, stream)
            return 0

        @staticmethod
        def cuMemHostRegister_v2(address: int, nbytes: int, flags: int) -> int:
            if card.faults.due("cuMemHostRegister"):
                return code()
            if card.capture is not None:
                return 900
            if address in card.registered:
                return 712
            card.registered[address] = nbytes
            return 0

        @staticmethod
        def cuMemHostUnregister(address: int) -> int:
            failed = card.faults.due("cuMemHostUnregister")
            assert not card.queues.count, "memory is unpinned that a copy may be reading"
            del card.registered[address]
            return code() if failed else 0

    if card.words == "unknown":
        del Library.cuStreamWriteValue32_v2, Library.cuStreamWaitValue32_v2
    return Library


def queues(card: Card) -> dict[str, Any]:
    """Of torch.cuda: streams and events."""
    faults = card.faults

    class Stream:
        def __init__(self, device: Any) -> None:
            faults.met("Stream")
            card.streams += 1
            self.cuda_stream = card.streams

        def wait_stream(self, other: Stream) -> None:
            faults.met("wait_stream")
            self._wait(Mark(card, other.cuda_stream))

        def wait_event(self, event: Event) -> None:
            faults.met("wait_event")
            assert event.mark is not None, "an event that nobody has recorded"
            self._wait(event.mark)

        def _wait(self, mark: Mark) -> None:
            capture = card.capture
            if capture is not mark.capture:
                card.refuse("dependency created on uncaptured work in another stream, or on captured work")
            if capture is not None:
                capture.join(self.cuda_stream, mark.seen)
            card.put(self.cuda_stream, lambda reached: mark.number in reached)

    class Event:
        mark: Mark | None = None

        def __init__(self) -> None:
            faults.met("Event")

        def record(self, stream: Stream) -> None:
            faults.met("Event.record")
            self.mark = Mark(card, stream.cuda_stream)

        def query(self) -> bool:
            faults.met("Event.query")
            card.outside("an event is asked for")
            assert self.mark is not None and self.mark.capture is None
            card.advance(self.mark.number)
            return self.mark.number in card.queues.reached

    @contextlib.contextmanager
    def stream(on: Any) -> Iterator[None]:
        faults.met("stream")
        before, card.now = card.now, on
        yield
        card.now = before

    @contextlib.contextmanager
    def restored(on: Any) -> Iterator[None]:
        before = card.now
        try:
            with stream(on):
                yield
        finally:
            card.now = before

    return {"Stream": Stream, "Event": Event, "stream": restored}


class Mark:
    """A point of a stream, in a capture or not."""

    def __init__(self, card: Card, stream: int) -> None:
        card.marks += 1
        self.number = number = card.marks
        self.capture = card.capture if card.capture and stream in card.capture.held else None

        def reach(reached: Marks) -> bool:
            reached.add(number)
            return True

        if self.capture is None:
            card.queues.put(stream, reach)
            if card.order == "at once":
                card.advance()
            self.seen: dict[int, int] = {}
        else:
            self.capture.held[stream].append(reach)
            self.seen = self.capture.seen(stream)


def recordings(card: Card) -> dict[str, Any]:
    """Of torch.cuda: what is captured is kept, and done at each replay."""
    faults = card.faults

    class CUDAGraph:
        held: dict[int, list[Item]] | None = None

        def __init__(self) -> None:
            faults.met("CUDAGraph")

        def replay(self) -> None:
            faults.met("replay")
            card.outside("a replay")
            assert card.now is not None and self.held is not None
            run = Queues(card.order, self.held)

            def go(_: Marks) -> bool:
                while run.one() and not card.slow:
                    pass
                return run.count == 0

            card.put(card.now.cuda_stream, go)

    class graph:
        """As torch's, which leaves its stream the present one if the capture fails at its end."""

        def __init__(self, made: CUDAGraph, stream: Any, capture_error_mode: str = "global") -> None:
            assert capture_error_mode == "thread_local", "a capture that other threads' calls break"
            self.made, self.stream, self.before = made, stream, None

        def __enter__(self) -> None:
            card.outside("synchronize")
            card.finish()
            self.before, card.now = card.now, self.stream
            faults.met("capture_begin")
            card.capture = Capture(self.stream.cuda_stream)

        def __exit__(self, *_: object) -> None:
            capture, card.capture = card.capture, None
            assert capture is not None
            faults.met("capture_end")
            if capture.broken:
                card.refuse("operation failed due to a previous error during capture")
            if not capture.whole:
                card.refuse("capturing stream has unjoined work")
            self.made.held = capture.held
            card.now = self.before

    return {"CUDAGraph": CUDAGraph, "graph": graph}


def facts(card: Card) -> dict[str, Any]:
    """Of torch.cuda: what the machine has."""

    def told(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                card.faults.met(name)
            finally:
                if card.faults.struck and card.faults.sticky:  # a card that is lost runs nothing more
                    card.queues.held.clear()
            if name in ("synchronize", "empty_cache", "mem_get_info"):
                card.outside(name)
            return answer(*args)

        return call

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: card.count > 0,
        "device_count": lambda: card.count,
        "get_device_capability": lambda _: card.capability,
        "get_device_name": lambda _: NAME,
        "set_device": lambda _: None,
        "synchronize": lambda _: card.finish(),
        "empty_cache": lambda: card.emptied(),
        "mem_get_info": lambda _: (card.free_bytes, 2 * GIB),
    }
    return {name: told(name, answer) for name, answer in answers.items()}


def memory(card: Card) -> Callable[..., torch.Tensor]:
    """torch.zeros, there and pinned."""
    faults = card.faults
    zeros = torch.zeros

    def made(shape: Any, **how: Any) -> torch.Tensor:
        if how.pop("pin_memory", False):
            faults.met("pinned")
            card.outside("pinned memory")
            return card.made(card.pinned, zeros(shape, **how))
        if "device" in how:
            card.outside("memory")
            card.loaded.add("zero_")
            return card.made(card.there, zeros(shape, **how))
        return zeros(shape, **how)

    return made


def libraries(card: Card) -> Callable[..., Any]:
    """ctypes.CDLL, which finds a driver."""
    true_library = ctypes.CDLL

    def library(name: str, *args: Any, **how: Any) -> Any:
        if "cuda" not in str(name):
            return true_library(name, *args, **how)
        card.faults.met("libcuda")
        return driver(card)

    return library


def device_of(card: Card) -> type[cuda.Cuda]:
    faults = card.faults

    class Here(cuda.Cuda):
        """`Cuda`, whose kernels wait for a replay where a recording is being made."""

        def __init__(self, index: int = 0) -> None:
            super().__init__(index)
            self.torch = torch.device("cpu")

        def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            with self._failing():  # at each one, also of a part of what was reserved
                faults.met("zeros")
                card.outside("memory")
            return super().zeros(shape, dtype)

        def run(self, kernel: Callable[..., Any], *args: Any) -> None:
            super().run(self._launched, kernel, *args)

        @staticmethod
        def _launched(kernel: Callable[..., Any], *args: Any) -> None:
            faults.met("kernel")
            card.check(kernel, args)
            card.queue(lambda: kernel(*args))

        def copy(self, to: Any, source: torch.Tensor) -> None:
            super().copy(Target(card, to, "copy"), source)

        def put(self, to: Any, source: torch.Tensor) -> None:
            super().put(Target(card, to, "put"), source)

    return Here


def watched_tasks(card: Card) -> type[Any]:
    class Watched(_native.HostTask):
        """A task, whose end is noted: the driver holds its address."""

        def __init__(self, context: Any, slot: Any) -> None:
            super().__init__(context, slot)
            card.gone.discard(self.argument)

        def __del__(self) -> None:
            card.gone.add(self.argument)
            if self.begun != self.ended:
                card.cut_off.append(self.argument)

    return Watched


def watched_doorbell(card: Card) -> type[Any]:
    class Watched(_native.Doorbell):
        """Whose numbers are known: the card's word is all that the driver has of a task."""

        def expect(self, calls: list[tuple[int, int, int]]) -> None:
            card.called.update((number, argument) for number, _, argument in calls)
            super().expect(calls)

    return Watched


def install(patch: pytest.MonkeyPatch, card: Card) -> None:
    """`--gpu 0` is that card, with the kernels of torch."""
    patch.setattr(_native, "HostTask", watched_tasks(card))
    patch.setattr(_native, "Doorbell", watched_doorbell(card))
    for name, value in (facts(card) | queues(card) | recordings(card)).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "zeros", memory(card))
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(ctypes, "CDLL", libraries(card))
    patch.setattr(cuda, "Cuda", device_of(card))
    patch.setattr(kernels, "triton_kernels", torch_kernels, raising=False)
    patch.setattr(verdicts, "why_not", lambda *_: None)  # a process of its own sees no such card
    patch.setattr(
        hardware,
        "gpu",
        lambda: hardware.GpuInfo(True, [NAME] * card.count, [2 * GIB] * card.count, "", "580.0"),
    )
