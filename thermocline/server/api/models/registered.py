"""One of the server's models: its engine, the requests that use it, and those that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thermocline.engine.generation_config import completed
from thermocline.errors import BadFile, ThermoclineError, Unsupported
from thermocline.server.api.models.catalogue import ModelFiles
from thermocline.server.api.models.served import ServedModel
from thermocline.server.process.engine_process import EngineProcess
from thermocline.server.process.messages import Event, ModelOpened
from thermocline.session.options import EngineOptions, ModelOptions

_FOR_GOOD = (BadFile, Unsupported)  # errors that come again until the files change


@dataclass(frozen=True)
class Loading:
    """How the models of a server are loaded. `options.ram` is the budget of all of them together."""

    options: EngineOptions
    sampling: Mapping[str, Any]  # by `SamplingParams`' names; the rest is each model's own
    silence_s: float
    drain_s: float  # time that running answers get when another model takes the memory
    beside: int | None = None  # bytes of the budget for an engine that opens; None: there is one model
    most: int = 1  # models loaded at once


class RegisteredModel:
    """A model by its name. All of it but `_opened` runs on the event loop's thread."""

    def __init__(self, name: str | None, files: ModelOptions, how: Loading) -> None:
        """`name` None: its file's."""
        self._name, self._how = name, how
        self.progress: tuple[str, int, int] | None = None  # of loading
        self.told_progress: Callable[[str, int, int], None] = lambda *_: None
        self.model: ServedModel | None = None  # once it is opened
        self.found: ModelFiles | None = None  # in the directory, when that was looked through last
        self.state = "unloaded"  # loading, loaded, unloading
        self.held_bytes = 0  # of the budget
        self.leases = 0  # requests that use it
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self.used_at = 0  # by the registry's count
        self.loads = 0
        self.observe: Callable[[Event], None] = lambda event: None
        self._waiting: list[asyncio.Future[ServedModel]] = []
        self._refused: tuple[ModelFiles, ThermoclineError] | None = None
        self.engine = EngineProcess(
            files, how.options, progress=self._shown, opened=self._opened,
            silence_s=how.silence_s, beside=how.beside, observe=lambda event: self.observe(event)
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The name that clients give: its own, else the file's, which is known once it is opened."""
        return self._name or ("" if self.model is None else self.model.name)

    def _opened(self, found: ModelOpened) -> None:
        if self.model is None:  # the engine crashed and opened it again
            defaults = completed(self._how.sampling, found.recommended)
            self.model = ServedModel.of(found, self._name, self.engine, defaults)

    def _shown(self, what: str, done: int, size: int) -> None:
        self.progress = what, done, size
        self.told_progress(what, done, size)

    # ---- loading

    def begin(self) -> None:
        """Start the engine."""
        self.state, self.progress = "loading", None
        self.engine.start()

    def loaded(self) -> None:
        """Note that the engine is ready. Requests that waited for it use it from now on."""
        assert self.model is not None
        self.state, self.progress, self.loads = "loaded", None, self.loads + 1
        if self.engine.loaded is not None and self._how.beside is not None:
            self.held_bytes = self.engine.loaded.memory_bytes
            self.engine.grant(self.held_bytes)  # when it is started again
        self.admit()

    def admit(self) -> None:
        """Let requests that wait use the model, which is loaded."""
        assert self.model is not None
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                self.take()
                each.set_result(self.model)

    async def unload(self, grace_s: float) -> None:
        """End the engine, by force after `grace_s`, and give its memory back."""
        self.state = "unloading"
        await self.engine.unload(grace_s)
        self.close()

    def close(self) -> None:
        """Forget what was opened."""
        model, self.model = self.model, None
        if model is not None:
            model.close()
        self.state, self.held_bytes, self.progress = "unloaded", 0, None

    # ---- requests

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def take(self) -> None:
        self.leases += 1
        self.idle.clear()

    def give_back(self) -> None:
        self.leases -= 1
        if self.leases == 0:
            self.idle.set()

    def wait(self) -> asyncio.Future[ServedModel]:
        """Return a future of the loaded model, taken by then. Raise the error that its files have given."""
        if self._refused is not None and self._refused[0] == self.found:
            raise _again(self._refused[1])
        waits: asyncio.Future[ServedModel] = asyncio.get_running_loop().create_future()
        self._waiting.append(waits)
        return waits

    def give_up(self, waits: asyncio.Future[ServedModel]) -> None:
        """Stop waiting. A model that was taken meanwhile is given back."""
        if waits in self._waiting:
            self._waiting.remove(waits)
        elif waits.done() and not waits.cancelled() and waits.exception() is None:
            self.give_back()
        waits.cancel()

    def fail(self, error: ThermoclineError) -> None:
        """Refuse the requests that wait. Files that are wrong are refused at once, until they change."""
        if isinstance(error, _FOR_GOOD) and self.found is not None:
            self._refused = self.found, _again(error)
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_exception(_again(error))


def _again(error: ThermoclineError) -> ThermoclineError:
    """Return the error for one more request, without the frames that raised it, which hold bodies."""
    return type(error)(str(error))
