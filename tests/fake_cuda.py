"""A card that is not there: torch.cuda and the driver's library as `cuda.Cuda` sees them, in RAM, at once and
in order, with a fault at the call that a test names.

`Faults` counts calls by name and lets one of them, or all from it on, fail. `install` puts the card into the
machine; a session then runs all of `Cuda`'s Python.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from thermocline.machine import hardware
from thermocline.ops import cuda, kernels
from thermocline.ops.kernels import torch_kernels

GIB = 2**30
NAME = "NVIDIA Pretended"


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
        hit = name == self.name and self.seen[name] == self.at
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


@dataclass
class Card:
    """What the machine has, and what of it is in use."""

    faults: Faults = field(default_factory=Faults)
    count: int = 1
    capability: tuple[int, int] = (8, 9)
    free_bytes: int = GIB
    registered: dict[int, int] = field(default_factory=dict)
    capturing: list[Callable[[], None]] | None = None

    def queue(self, work: Callable[[], None]) -> None:
        if self.capturing is None:
            with torch.inference_mode():
                work()
        else:
            self.capturing.append(work)


class Graph:
    items: tuple[Callable[[], None], ...] = ()


class Target:
    """A tensor that is copied to in its stream's order."""

    def __init__(self, card: Card, to: torch.Tensor, name: str) -> None:
        self.card, self.to, self.name = card, to, name

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        self.card.faults.met(self.name)
        self.card.queue(lambda: self.to.copy_(source))


def driver(card: Card) -> Any:
    """libcuda: result codes, no exceptions. 712: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED; 719:
    CUDA_ERROR_LAUNCH_FAILED.
    """

    def code() -> int:
        return card.faults.error if isinstance(card.faults.error, int) else 719

    class Library:
        @staticmethod
        def cuLaunchHostFunc(stream: int, function: int, argument: int) -> int:
            if card.faults.due("cuLaunchHostFunc"):
                return code()
            call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
            card.queue(lambda: call(argument))
            return 0

        @staticmethod
        def cuMemHostRegister_v2(address: int, nbytes: int, flags: int) -> int:
            if card.faults.due("cuMemHostRegister"):
                return code()
            if address in card.registered:
                return 712
            card.registered[address] = nbytes
            return 0

        @staticmethod
        def cuMemHostUnregister(address: int) -> int:
            failed = card.faults.due("cuMemHostUnregister")
            del card.registered[address]
            return code() if failed else 0

    return Library


def queues(card: Card) -> dict[str, Any]:
    """Of torch.cuda: streams that do everything at once, events that have happened."""
    faults = card.faults

    class Stream:
        cuda_stream = 1

        def __init__(self, device: Any) -> None:
            faults.met("Stream")

        def wait_stream(self, other: Any) -> None:
            faults.met("wait_stream")

        def wait_event(self, event: Any) -> None:
            faults.met("wait_event")

    class Event:
        def __init__(self) -> None:
            faults.met("Event")

        def record(self, stream: Any) -> None:
            faults.met("Event.record")

        def query(self) -> bool:
            faults.met("Event.query")
            return True

    @contextlib.contextmanager
    def stream(on: Any) -> Iterator[None]:
        faults.met("stream")
        yield

    return {"Stream": Stream, "Event": Event, "stream": stream}


def recordings(card: Card) -> dict[str, Any]:
    """Of torch.cuda: what is captured is kept, and done at each replay."""
    faults = card.faults

    class CUDAGraph(Graph):
        def __init__(self) -> None:
            faults.met("CUDAGraph")

        def replay(self) -> None:
            faults.met("replay")
            for item in self.items:
                card.queue(item)

    @contextlib.contextmanager
    def graph(made: CUDAGraph, stream: Any) -> Iterator[None]:
        faults.met("capture_begin")
        items: list[Any] = []
        card.capturing = items
        try:
            yield
        finally:
            card.capturing = None
            faults.met("capture_end")
        made.items = tuple(items)

    return {"CUDAGraph": CUDAGraph, "graph": graph}


def facts(card: Card) -> dict[str, Any]:
    """Of torch.cuda: what the machine has."""

    def told(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            card.faults.met(name)
            return answer(*args)

        return call

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: card.count > 0,
        "device_count": lambda: card.count,
        "get_device_capability": lambda _: card.capability,
        "get_device_name": lambda _: NAME,
        "set_device": lambda _: None,
        "synchronize": lambda _: None,
        "empty_cache": lambda: None,
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
        elif "device" in how:
            faults.met("zeros")
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

        def run(self, kernel: Callable[..., Any], *args: Any) -> None:
            super().run(self._launched, kernel, *args)

        @staticmethod
        def _launched(kernel: Callable[..., Any], *args: Any) -> None:
            faults.met("kernel")
            card.queue(lambda: kernel(*args))

        def copy(self, to: Any, source: torch.Tensor) -> None:
            super().copy(Target(card, to, "copy"), source)

        def put(self, to: Any, source: torch.Tensor) -> None:
            super().put(Target(card, to, "put"), source)

    return Here


def install(patch: pytest.MonkeyPatch, card: Card) -> None:
    """`--gpu 0` is that card, with the kernels of torch."""
    for name, value in (facts(card) | queues(card) | recordings(card)).items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "zeros", memory(card))
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(ctypes, "CDLL", libraries(card))
    patch.setattr(cuda, "Cuda", device_of(card))
    patch.setattr(kernels, "triton_kernels", torch_kernels, raising=False)
    patch.setattr(
        hardware, "gpu", lambda: hardware.GpuInfo(True, [NAME] * card.count, [2 * GIB] * card.count, "")
    )
