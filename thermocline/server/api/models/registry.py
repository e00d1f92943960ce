"""All models of a server: which are loaded, which is loaded next, and which makes room for it.

Models are loaded one after another, in the order in which they were asked for. An engine looks at its model
and says what it needs before any weight is read. Until that fits beside the others in the budget, the least
recently used one is unloaded: requests that use it end first, those that come meanwhile wait. So a model's
turn lasts at least as long as the requests that waited for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from thermocline.errors import ThermoclineError, UsageError, place_of
from thermocline.plan.memory import size_up
from thermocline.server.api.models.catalogue import ModelFiles, models_in
from thermocline.server.api.models.registered import Loading, RegisteredModel
from thermocline.server.api.models.served import ServedModel
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.engine_process import grace_of
from thermocline.server.process.messages import Event
from thermocline.session.options import ModelOptions

log = logging.getLogger(__name__)

OPENING_BYTES = 128 << 20  # of a process that looks at a model, beside those that are loaded
_MOST_NAMED = 30  # names in an error


class Registry:
    """The models by name. Everything runs on the event loop's thread but the look into the directory."""

    def __init__(
        self, how: Loading, directory: Path | None, files: ModelOptions, name: str | None = None
    ) -> None:
        """`files`: the model that requests without a name get, and how the others' files are read.

        `directory` None: that model is the only one. `name`: of that model, for clients; None: its file's.
        Raises IOFailure, UsageError.
        """
        self._how, self.directory = how, directory
        self._files = replace(files, model=None, activation=None, chat_template=None)
        self.models: dict[str, RegisteredModel] = {}
        self.default: RegisteredModel | None = None
        self.observe: Callable[[str, Event], None] = lambda name, event: None
        self.budget_bytes = _weights_budget(how)
        self.unloads = 0
        self.uses = 0  # requests that took a model or gave it back, counted where there are several
        self._queue: list[RegisteredModel] = []  # to be loaded, in order
        self._work = asyncio.Event()  # set while the queue is not empty
        self._load: asyncio.Task[None] | None = None  # of the queue's first
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking = asyncio.Lock()
        self._looks = 0
        if directory is not None:
            self._update(models_in(directory))
        if directory is None or files.model is not None:
            self._choose_default(files, name)

    def _choose_default(self, files: ModelOptions, name: str | None) -> None:
        """Make `files` the default: one of the directory by its name or path, or a model from elsewhere."""
        if self.directory is None:
            self.default = self._add(name, files)
            return
        asked = str(files.model)
        found = self.models.get(asked) or next(
            (m for m in self.models.values() if m.found and _same(m.found.path, asked)), None
        )
        known = Path(asked).name.removesuffix(".gguf") if found is None else found.name
        about = None if found is None else found.found
        if found is not None:
            files = replace(files, model=self.models.pop(known).engine.files.model)
        known = name or known
        if known in self.models:
            raise UsageError(
                f"-m {asked}: a model in {self.directory} is called {known!r}, too; choose a name (--alias)"
            )
        self.default = self._add(known, files)
        self.default.found = about

    def _add(self, name: str | None, files: ModelOptions) -> RegisteredModel:
        made = self.models[name or ""] = RegisteredModel(name, files, self._how)
        made.observe = lambda event: self.observe(made.name, event)
        return made

    # ---- the directory

    async def look(self) -> None:
        """Notice models that have come into the directory, and those that have gone."""
        if self.directory is None:
            return
        before = self._looks
        async with self._looking:
            if self._looks == before:  # else one look is for all that came during the one before it
                self._looks += 1
                self._update(await asyncio.to_thread(models_in, self.directory))

    def _update(self, found: dict[str, ModelFiles]) -> None:
        default = self.default
        for name, about in found.items():
            if default is not None and default.found is not None and default.found.path == about.path:
                self._renew(default, about)
            elif name in self.models:
                self._renew(self.models[name], about)
            else:
                self._add(name, replace(self._files, model=about.path)).found = about
        for name, m in list(self.models.items()):
            gone = name not in found and m is not self.default and m.state == "unloaded"
            if gone and not m.is_wanted and not m.leases:
                del self.models[name]

    @staticmethod
    def _renew(m: RegisteredModel, about: ModelFiles) -> None:
        """A model that is loaded stays what it was."""
        if m.state == "unloaded" and m.found is not None:
            m.found = about
            m.engine.files = replace(m.engine.files, model=about.path)

    # ---- requests

    @property
    def several(self) -> bool:
        return self.directory is not None

    async def find(self, name: str | None) -> RegisteredModel:
        """Return a model; None: the default. Refuse with 404 if there is none of that name."""
        if self.default is not None and name in (None, self.default.name):
            return self.default
        if name is None:
            await self.look()
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise Refusal(400, f"model: say which: {self._names()}", param="model", code="model_required")
        found = self.models.get(name)
        if found is None or found.state == "unloaded":
            await self.look()
            found = self.models.get(name)
        if found is None:
            why = f"there is no model {name[:200]!r} here, but {self._names()}"
            raise Refusal(404, why, param="model", code="model_not_found")
        return found

    def _names(self) -> str:
        names = sorted(m.name for m in self.models.values())
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return (", ".join(map(repr, names[:_MOST_NAMED])) or "none") + more

    async def take(self, m: RegisteredModel) -> ServedModel:
        """Return a model that stays loaded until `give_back`. Load it if need be; raise why that fails."""
        self._touch(m)
        if m.state == "loaded" and m.model is not None:
            m.take()
            return m.model
        waits = m.wait()
        self._want(m)
        try:
            return await waits
        except asyncio.CancelledError:
            m.give_up(waits)
            raise
        finally:
            self._forget(m)

    def give_back(self, m: RegisteredModel) -> None:
        m.give_back()
        self._touch(m)

    def _touch(self, m: RegisteredModel) -> None:
        self.uses += 1
        m.used_at = self.uses

    def _want(self, m: RegisteredModel) -> None:
        if m not in self._queue:
            self._queue.append(m)
            self._work.set()

    def _forget(self, m: RegisteredModel) -> None:
        """Do not load a model that no request waits for any more."""
        if m.is_wanted or m not in self._queue:
            return
        if m is not self._queue[0] or self._load is None:
            self._queue.remove(m)
        elif m.state != "loaded":
            self._load.cancel()

    def vocabulary(self) -> int | None:
        """Return the number of tokens that the only model knows; None: there are several, or it loads."""
        only = None if self.several or self.default is None else self.default.model
        return None if only is None else only.spec.vocab_size

    # ---- loading

    def start(self) -> asyncio.Task[None] | None:
        """Begin to load what is asked for. Return a task that fails as the default's first load does."""
        if not self.several:
            assert self.default is not None
            self.default.begin()
            return self._spawn(self._alone(self.default))
        self._spawn(self._serve_queue())
        return None if self.default is None else self._spawn(self._loaded_first(self.default))

    def _spawn(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _alone(self, m: RegisteredModel) -> None:
        """Follow the only model's engine to its end."""
        await m.engine.until(lambda: m.engine.state == "ready")
        m.loaded()
        await m.engine.until(lambda: False)

    async def _loaded_first(self, m: RegisteredModel) -> None:
        await self.take(m)
        self.give_back(m)

    async def _serve_queue(self) -> None:
        while True:
            await self._work.wait()
            while self._queue:
                m = self._queue[0]
                load = self._load = asyncio.create_task(self._loaded(m))
                await asyncio.wait({load})
                self._load = None
                if not load.cancelled() and (bug := load.exception()) is not None:
                    log.warning(f"{m.name}: cannot be loaded: {type(bug).__name__}{place_of(bug)}")
                    await self._unload(m, 0)
                    m.fail(ThermoclineError("internal error; the server's log says where"))
                self._queue.remove(m)
                if m.is_wanted:  # it was given up, and asked for again before it had ended
                    self._queue.append(m)
            self._work.clear()

    async def _loaded(self, m: RegisteredModel) -> None:
        """Load a model. Requests that wait for it get it, or the reason why they do not."""
        engine, began = m.engine, time.monotonic()
        if m.state == "loaded":
            return m.admit()
        try:
            m.begin()
            await engine.until(lambda: engine.needed is not None)
            await self._make_room(m, engine.needed or 0)
            m.held_bytes = self.budget_bytes - self._held_beside(m)
            engine.grant(m.held_bytes)
            await engine.until(lambda: engine.state == "ready")
        except ThermoclineError as e:
            log.warning(f"{m.name}: cannot be loaded: {e}")
            await self._unload(m, 0)
            m.fail(e)
        except asyncio.CancelledError:
            await self._unload(m, 0)
            raise
        else:
            m.loaded()
            log.info(f"{m.name}: loaded in {time.monotonic() - began:.1f} s")
            self._spawn(self._watched(m))

    async def _watched(self, m: RegisteredModel) -> None:
        """Unload a model whose engine ends for good. The next request loads it again."""
        try:
            await m.engine.until(lambda: m.state != "loaded")
        except ThermoclineError as e:
            if m.state == "loaded":
                log.warning(f"{m.name}: {e}")
                m.close()

    async def _unload(self, m: RegisteredModel, grace_s: float) -> None:
        """End an engine to the end, even if this task is cancelled meanwhile: nothing loads before that."""
        ending, cancelled = self._spawn(m.unload(grace_s)), False
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    # ---- making room

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the budget that the engines may take together."""
        return sum(m.held_bytes for m in self.models.values())

    def loaded(self) -> Iterator[RegisteredModel]:
        return (m for m in self.models.values() if m.state == "loaded")

    def _held_beside(self, m: RegisteredModel) -> int:
        return self.held_bytes - m.held_bytes

    async def _make_room(self, m: RegisteredModel, nbytes: int) -> None:
        """Unload models until `nbytes` fit beside the others: idle ones first, least recently used first."""
        while True:
            others = list(self.loaded())
            fits = self._held_beside(m) + nbytes <= self.budget_bytes
            if not others or (fits and len(others) < self._how.most):
                return
            await self._evict(min(others, key=lambda other: (other.leases > 0, other.used_at)))

    async def _evict(self, m: RegisteredModel) -> None:
        """Unload a model once the requests that use it have ended, or their time is up."""
        m.state = "unloading"
        try:
            async with asyncio.timeout(self._how.drain_s):
                await m.idle.wait()
        except TimeoutError:
            log.warning(
                f"{m.name}: {m.leases} requests did not end in {self._how.drain_s:g} s; they are ended"
            )
        except asyncio.CancelledError:  # nobody waits for its memory any more
            if m.engine.over.is_set():
                m.close()
            else:
                m.state = "loaded"  # requests that came for it meanwhile are in the queue
            raise
        self.unloads += 1
        await self._unload(m, grace_of(self._how.options))
        log.info(f"{m.name}: unloaded")

    # ---- the end

    async def stop(self, grace_s: float) -> None:
        """End all engines, by force after `grace_s`."""
        tasks = [t for t in (*self._tasks, self._load) if t is not None]
        for task in tasks:
            task.cancel()
        engines = (m.engine.stop(grace_s) for m in self.models.values())
        await asyncio.gather(*tasks, *engines, return_exceptions=True)

    def close(self) -> None:
        for m in self.models.values():
            m.close()


def _weights_budget(how: Loading) -> int:
    """Return the bytes for the models that are loaded; 0: there is one, which has its own."""
    if how.beside is None or how.options.ram is None:
        return 0
    found = int(how.options.ram * 2**30) - how.beside
    if found <= 0:
        raise UsageError(
            f"--ram {how.options.ram:g}: several models need more: a process that opens one may take "
            f"{size_up(how.beside)}"
        )
    return found


def _same(path: Path, asked: str) -> bool:
    """Tell whether `asked` is that file or directory."""
    try:
        return path.samefile(asked)
    except OSError:
        return False
