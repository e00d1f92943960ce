"""The real routes over an engine that says what a test tells it to, on a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving import TEMPLATE

from thermocline.engine.request import Asked, Chunk, Figures
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import IOFailure, ThermoclineError
from thermocline.files.small_files import FilesOfDirectory
from thermocline.llm import BUNDLED
from thermocline.offline.quick_bench import QuickBench
from thermocline.pack.pack import Pack
from thermocline.server.api.app import application
from thermocline.server.api.models.registered import Loading
from thermocline.server.api.models.registry import Registry
from thermocline.server.api.models.served import ServedModel
from thermocline.server.api.state import Api
from thermocline.server.http import server as http
from thermocline.server.http.guard import Admission
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.listener import listen
from thermocline.server.page import assets
from thermocline.server.process.engine_process import EngineProcess, Jobs
from thermocline.server.process.messages import Event, Failed, Finished, ModelOpened, Token
from thermocline.session.options import EngineOptions, ModelOptions

FIGURES = Figures(3, 0, 5, 0.1, 30.0, 50.0, 0.05, 0.05, 1.0, 1000, "0")


class ScriptedEngine(EngineProcess):
    """`answer` is what every request gets, piece by piece; without an end where `endless`."""

    def __init__(self) -> None:
        super().__init__(ModelOptions(), EngineOptions(), progress=lambda *_: None, opened=lambda _: None)
        self.answer: Sequence[str] = ()
        self.endless = self.failing = False
        self.failure: type[ThermoclineError] = IOFailure  # where it is failing
        self.reason = "stop"
        self.stop_text: str | None = None  # the stop string that ended the answer
        self.asked: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.gone = threading.Event()  # a request was cancelled
        self.bench: QuickBench | ThermoclineError | None = None  # what a benchmark finds

    alive = True

    def start(self) -> None:
        self.state, self.slots = "ready", 4

    def submit(self, prompts: Sequence[tuple[Sequence[int], Asked]]) -> Jobs:
        jobs = [next(self._numbers) for _ in prompts]
        work = Jobs(self, jobs)
        self._awaited |= dict.fromkeys(jobs, work)
        self.prompts.append(list(prompts[0][0]))
        if isinstance(asked := prompts[0][1], SamplingParams):
            self.asked.append(asked)
        self.playing = asyncio.gather(*map(self._play, jobs))
        return work

    async def _play(self, job: int) -> None:
        for piece in self.answer:
            self._tell(Token(job, Chunk(piece, 1)))
        while self.endless and job in self._awaited:
            self._tell(Token(job, Chunk("and on ", 1)))
            await asyncio.sleep(0.005)
        if self.failing:
            self._tell(Failed(job, self.failure.__name__, "the disk is on fire"))
        else:
            self._tell(Finished(job, self.reason, 1, FIGURES, (), self.stop_text))

    def _tell(self, event: Event) -> None:
        if (work := self._awaited.get(event.job)) is not None:
            work.put(event)
            if not isinstance(event, Token):
                del self._awaited[event.job]

    async def measure(self) -> QuickBench | None:
        if isinstance(self.bench, ThermoclineError):
            raise self.bench
        return self.bench

    def cancel(self, job: int) -> None:
        if self._awaited.pop(job, None) is not None:
            self.gone.set()

    async def stop(self, grace_s: float = 2.0) -> None:
        self.over.set()


@dataclass
class Scripted:
    url: str
    engine: ScriptedEngine
    server: Api
    model: ServedModel
    in_bytes: bool = False  # answers are sent one byte at a time


@contextlib.contextmanager
def scripted(
    *,
    template: str | None = TEMPLATE,
    keys: Sequence[str] = (),
    limits: ServerLimits | None = None,
    context: int = 1 << 20,
    files: Path = BUNDLED,
) -> Iterator[Scripted]:
    engine, limits = ScriptedEngine(), limits or ServerLimits()
    models = Registry(Loading(EngineOptions(), {}, 60, 60), None, ModelOptions())
    assert models.default is not None
    models.default.engine = engine
    engine.observe = models.default.observe
    server = Api(models, limits, keys=bool(keys))
    spec = Pack.open(BUNDLED).spec
    if files != BUNDLED:
        spec = replace(spec, vocab_size=spec.vocab_size + 64)  # the tokenizer in `files` may have more tokens
    opened = ModelOpened(spec, FilesOfDirectory(files), context, 4, template)
    defaults = SamplingParams(temperature=0.7, max_tokens=None)
    model = models.default.model = ServedModel.of(opened, "scripted", engine, defaults)
    listener = listen("127.0.0.1", 0, has_keys=bool(keys))
    made = Scripted(listener.url, engine, server, model)
    began: list[http.HttpServer] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        engine.start()
        yield

    app = application(server, lifespan)

    async def dripping(scope: Any, receive: Any, send: Any) -> None:
        async def drip(message: Any) -> None:
            body = message.get("body", b"")
            if not made.in_bytes or scope["type"] != "http" or scope["method"] != "POST" or len(body) < 2:
                await send(message)
                return
            for i in range(len(body)):
                await send({**message, "body": body[i : i + 1], "more_body": True})
            if not message.get("more_body", False):
                await send({**message, "body": b""})

        await app(scope, receive, drip)

    how = {
        "limits": limits,
        "admission": Admission(keys, public=assets.PATHS, slots=4),
        "started": began.append,
    }
    thread = threading.Thread(target=http.run, args=(dripping, listener), kwargs=how, name="scripted")
    thread.start()
    try:
        yield made
    finally:
        for one in began:
            one.stop()
        thread.join(30)
        models.close()
        assert not thread.is_alive()
