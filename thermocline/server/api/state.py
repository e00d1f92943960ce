"""The state that all routes share, and the checks that a request passes before the engine gets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from thermocline.engine.request import Asked, request_for
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import UsageError
from thermocline.server.api import schema
from thermocline.server.api.metrics import Metrics
from thermocline.server.api.models.hold import HOLD, Hold
from thermocline.server.api.models.served import ServedModel
from thermocline.server.api.trials import Trials
from thermocline.server.http.limits import ServerLimits
from thermocline.server.http.posted import Posted
from thermocline.server.http.refusal import TOO_LONG, Refusal
from thermocline.text.grammar import depth

if TYPE_CHECKING:
    from thermocline.server.api.models.registry import Registry
    from thermocline.server.process.engine_process import Jobs

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound=schema.ApiObject)
_MOST_IGNORED = 256  # ignored fields named in the log: clients make up the names, so there is no end of them
_MOST_NAMED = 20  # fields named in one such line
_LONGEST_NAME = 64  # of a key that a client made up


class Api:
    """The application's state. Everything but tokenising runs on the event loop's thread."""

    def __init__(self, models: Registry, limits: ServerLimits, *, keys: bool) -> None:
        """`keys`: clients need a key."""
        self.keys, self.models, self.limits = keys, models, limits
        self.metrics = Metrics(models)
        models.observe = self.metrics.observe
        self._reported: set[tuple[str, str]] = set()
        self._prompts = asyncio.Semaphore(1)  # the template's process answers one request at a time
        self._conversions = asyncio.Semaphore(1)
        self._trials = Trials(limits.limit_trials)

    async def body(self, given: Posted, kind: type[Body], path: str) -> Body:
        """Return the body as a request of that kind; log the fields that are ignored."""
        made, unknown = await given.apart(partial(_validated, kind, given.value, self.limits))
        if unknown:
            self.report_ignored(path, unknown)
        return made

    def report_ignored(self, path: str, names: Sequence[str]) -> None:
        """Name each field once in the log: a client sends an unknown field with every request."""
        fresh = [name for name in names if (path, name) not in self._reported]
        if fresh := fresh[: _MOST_IGNORED - len(self._reported)]:
            self._reported |= {(path, name) for name in fresh}
            log.warning(f"{path}: ignored {', '.join(map(repr, fresh))}")

    async def model(self, request: Request, asked: str | None, *, stream: bool | None = None) -> ServedModel:
        """Return the model of that name, or the default, as `Hold.model` does."""
        hold: Hold = request.scope[HOLD]
        return await hold.model(self.models, asked, stream=bool(stream), ping_s=self.limits.limit_ping_s)

    def check(self, r: schema.Sampling, prompts: int = 1) -> None:
        """Refuse a request that exceeds one of the server's limits."""
        for param, why in schema.excesses(r, self.limits, prompts):
            raise Refusal(400, f"{param}: {why}", param=param)

    async def check_grammar(self, request: Request, params: SamplingParams, fields: Sequence[str]) -> None:
        """Refuse a grammar that cannot be enforced; a process tries it out. It was made from `fields`."""
        g, most = params.grammar, self.limits
        if g is None:
            return
        if len(g.text.encode()) > most.limit_schema_bytes or depth(g.text) > most.limit_schema_depth:
            why = f"{most.limit_schema_bytes} bytes or {most.limit_schema_depth} levels"
            raise Refusal(400, f"the grammar or schema has more than {why}")
        try:
            await self._trials.check(g, request.client.host if request.client else "")
        except UsageError as e:
            raise Refusal(400, str(e), param=fields[0] if len(fields) == 1 else None) from None

    async def prompt(self, make: Callable[[], Any]) -> Any:
        """Run work on a prompt, which may take long, on another thread. Prompts wait for each other."""
        async with self._prompts:
            return await asyncio.to_thread(make)

    async def converted(self, make: Callable[[], Any]) -> Any:
        """Run the work of /tokenize or /detokenize on another thread. No prompt waits for it."""
        async with self._conversions:
            return await asyncio.to_thread(make)

    def prepare(
        self, model: ServedModel, ids: list[int], params: SamplingParams, n: int
    ) -> list[tuple[list[int], SamplingParams]]:
        """Return n jobs for one prompt, with consecutive seeds. Refuse a bad one before any is queued."""
        if len(ids) > model.context:
            raise Refusal(
                400, f"the prompt has {len(ids)} tokens, the context holds {model.context}",
                type="exceed_context_size_error", code=TOO_LONG,
                extra={"n_prompt_tokens": len(ids), "n_ctx": model.context}
            )  # fmt: skip
        plain = replace(params, grammar=None)  # the engine's process compiles the grammar for itself
        request = request_for(model.spec, model.context, model.tokenizer, ids, plain)
        seed = request.sampler.seed
        return [(request.ids, replace(params, seed=(seed + i) % (1 << 63))) for i in range(n)]

    def submit(self, model: ServedModel, prompts: Sequence[tuple[list[int], Asked]]) -> Jobs:
        """Give the engine these jobs. Refuse with 503 if too many wait: one request may have many jobs."""
        if model.engine.active + len(prompts) > model.max_batch + max(self.limits.limit_queue, len(prompts)):
            raise Refusal(503, "too many answers are waiting; try again", code="queue_full")
        return model.engine.submit(prompts)


def _validated(kind: type[Body], given: dict[str, Any], limits: ServerLimits) -> tuple[Body, list[str]]:
    """Return the request and the names of the first fields that it ignores."""
    try:
        made = kind.model_validate(given, context=limits)
    except ValidationError as e:
        raise _invalid(e, given) from None
    for name in sorted(kind.unsupported.keys() & given):
        if given[name]:
            raise Refusal(400, f"{name}: not supported; {kind.unsupported[name]}", param=name)
    known = {f.alias or name for name, f in kind.model_fields.items()}
    return made, sorted(islice((name[:_LONGEST_NAME] for name in given if name not in known), _MOST_NAMED))


def _invalid(e: ValidationError, given: Any) -> Refusal:
    """Return the first error, with its path in the given JSON: pydantic's own path names types, too."""
    first = e.errors(include_url=False, include_input=False, include_context=False)[0]
    path: list[str] = []
    for part in first["loc"]:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and isinstance(part, int)):
            given = given[part]  # type: ignore[index]
            path.append(str(part)[:_LONGEST_NAME])
    if first["type"] == "missing":
        path.append(str(first["loc"][-1]))
    where = ".".join(path)
    return Refusal(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None)
