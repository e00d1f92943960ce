"""Engines without processes for several models, which note what memory each may take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import TEMPLATE

from thermocline.errors import BadFile
from thermocline.files.small_files import FilesOfDirectory
from thermocline.llm import BUNDLED
from thermocline.offline.quick_bench import QuickBench
from thermocline.pack.pack import Pack
from thermocline.server.api.models import registered
from thermocline.server.process.engine_process import EngineProcess, Jobs
from thermocline.server.process.messages import Load, LoadProgress, MemoryNeeded, ModelOpened, Ready, Stop

MIB = 1 << 20


@dataclass
class Machine:
    """The memory that the engines of a test share."""

    needs: dict[str, int] = field(default_factory=dict)  # bytes that a model takes, by its file's name
    broken: dict[str, int] = field(default_factory=dict)  # times that a model cannot be opened, by its name
    crashes: dict[str, int] = field(default_factory=dict)  # times that its engine crashes while it loads
    slow: set[str] = field(default_factory=set)  # models whose weights are not read before `go`
    taken: dict[str, int] = field(default_factory=dict)  # bytes by model, from its `Load` on
    most_taken: int = 0
    most_loaded: int = 0
    loads: list[str] = field(default_factory=list)  # in order
    began: list[str] = field(default_factory=list)
    go: Callable[[], object] = lambda: None
    bench: QuickBench | None = None  # what a benchmark finds


MACHINE = Machine()


class LoadingEngine(ScriptedEngine):
    """An engine that opens and loads as `MACHINE` says. Every answer is the model's name."""

    def __init__(self, files: Any, options: Any, **how: Any) -> None:
        EngineProcess.__init__(self, files, options, **how)
        self.answer, self.endless, self.failing = (), False, False
        self.reason, self.stop_text, self.bench = "stop", None, MACHINE.bench
        self.asked, self.prompts = [], []
        self.gone = threading.Event()
        self.name = Path(files.model).name

    @property
    def alive(self) -> bool:  # type: ignore[override]
        return True

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self.over.is_set():
            self.over.clear()
            self.error, self._crashes = None, 0
        self.state, self.slots, self.answer = "loading", 4, [self.name]
        MACHINE.began.append(self.name)
        if MACHINE.broken.get(self.name, 0):
            MACHINE.broken[self.name] -= 1
            self.error = BadFile(f"{self.name} is broken")
            self._loop.call_soon(self._over, 0)
        else:
            self._process = self  # whatever `kill` ends
            self._loop.call_soon(self._heard, MemoryNeeded(MACHINE.needs.get(self.name, MIB)))

    def _send(self, command: Any) -> None:
        match command:
            case Load(ram):
                MACHINE.taken[self.name] = MACHINE.needs.get(self.name, MIB)
                assert MACHINE.taken[self.name] <= ram * 2**30 + 1
                MACHINE.most_taken = max(MACHINE.most_taken, sum(MACHINE.taken.values()))
                MACHINE.most_loaded = max(MACHINE.most_loaded, len(MACHINE.taken))
                self._heard(LoadProgress("loading", MIB, 4 * MIB))
                if self.name in MACHINE.slow:
                    MACHINE.go = partial(self._loop.call_soon_threadsafe, self._read)
                else:
                    self._loop.call_soon(self._read)
            case Stop():
                self._loop.call_soon(self._over, 0)

    def _read(self) -> None:
        """All weights are read."""
        if self.state != "loading" or self.name not in MACHINE.taken:
            return
        if MACHINE.crashes.get(self.name, 0):
            MACHINE.crashes[self.name] -= 1
            return self._over(-9)
        spec = Pack.open(BUNDLED).spec
        self._on_opened(ModelOpened(spec, FilesOfDirectory(BUNDLED), 512, 4, TEMPLATE))
        MACHINE.loads.append(self.name)
        self._heard(Ready(0.1, MACHINE.needs.get(self.name, MIB)))

    def _over(self, code: int) -> None:
        if self.over.is_set() or self.state == "starting":
            return
        MACHINE.taken.pop(self.name, None)
        self._process = None
        self._ended(code)

    def kill(self) -> None:
        self._loop.call_soon(self._over, -9)

    def submit(self, prompts: Any) -> Jobs:
        assert self.name in MACHINE.taken, "it is not loaded"
        return super().submit(prompts)

    async def stop(self, grace_s: float = 2.0) -> None:
        await EngineProcess.stop(self, grace_s)


def new_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a machine for one test, whose models' engines are `LoadingEngine`."""
    machine = Machine()
    monkeypatch.setattr("several.MACHINE", machine)
    monkeypatch.setattr(registered, "EngineProcess", LoadingEngine)
    return machine
