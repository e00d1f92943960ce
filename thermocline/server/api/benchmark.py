"""`POST /benchmark`: what bounds this machine, measured while no answer is computed."""

from __future__ import annotations

import math
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from thermocline.offline.quick_bench import QuickBench
from thermocline.server.api import schema
from thermocline.server.api.models.hold import RETRY_LOADING_S
from thermocline.server.api.state import Api
from thermocline.server.http.posted import posted
from thermocline.server.http.refusal import Refusal

BUSY = "benchmark_busy"  # code of a refusal while the engine has something else to do


def routes(api: Api) -> list[Route]:
    return [Route("/benchmark", _Benchmark(api).answer, methods=["POST"])]


class _Benchmark:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._ended_at = -math.inf

    async def answer(self, request: Request) -> Response:
        r = await self._api.body(posted(request.scope), schema.BenchmarkRequest, request.url.path)
        self._check()  # so that none is loaded in vain
        model, models = await self._api.model(request, r.model), self._api.models
        self._check()
        if not model.engine.ready:  # it has crashed, and is started again
            raise Refusal(503, "The engine is not ready", headers={"retry-after": str(RETRY_LOADING_S)})
        uses = models.uses
        try:
            found = await model.engine.measure()
        finally:
            self._ended_at = time.monotonic()
        if found is None or models.uses != uses:  # of this model, or of one beside it
            raise Refusal(409, "a request came, which went first; measure again later", code=BUSY)
        return JSONResponse({"model": model.name, **report(found)})

    def _check(self) -> None:
        """Refuse while any model has something to do, or soon after the last benchmark."""
        models = list(self._api.models.models.values())
        if any(m.engine.measuring for m in models):
            raise Refusal(409, "a benchmark is running; wait for its end", code=BUSY)
        if any(m.engine.active for m in models):
            raise Refusal(409, "answers are being computed; measure when there are none", code=BUSY)
        if self._api.models.several and any(m.state == "loading" for m in models):
            raise Refusal(409, "a model is being loaded; measure when it is there", code=BUSY)
        wait_s = self._ended_at + self._api.limits.limit_benchmark_s - time.monotonic()
        if wait_s > 0:
            raise Refusal(
                429, f"the last benchmark was a moment ago; try again in {math.ceil(wait_s)} s",
                headers={"retry-after": str(math.ceil(wait_s))}
            )  # fmt: skip


def report(b: QuickBench) -> dict[str, Any]:
    """Return the answer's JSON. null: not measured."""
    f, d = b.figures, b.disk
    return {
        "bound": b.bound,
        "threads": b.threads,
        "on_gpu": b.on_gpu,
        "memory": {"gb_per_s": _rounded(b.memory_gbs)},
        "disk": {
            "gb_per_s": _rounded(d.sequential_gbs), "pieces_gb_per_s": _rounded(d.pieces_gbs),
            "direct": d.direct, "why": None if d.sequential_gbs is not None else d.why,
        },
        "answer": {
            "tokens": f.tokens,
            "tokens_per_s": _rounded(f.tokens_per_s),
            "bytes_per_token": f.bytes_per_token,
            "gb_per_s": _rounded(b.gbs),
            "roof_share": _rounded(b.roof_share),
            "from_cache": b.from_cache,
            "disk_gb_per_s": _rounded(b.disk_gbs),
            "disk_wait_share": _rounded(b.disk_wait_share),
        },
        "seconds": _rounded(b.seconds),
    }  # fmt: skip


def _rounded(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.4g}")
