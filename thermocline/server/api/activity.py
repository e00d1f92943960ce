"""`GET /activity`: events about the layers' activity. They contain no word of any text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from thermocline.engine.live_activity import ActivityReport, ExpertActivity, LayerActivity
from thermocline.server.api.models.registry import Registry
from thermocline.server.http import sse
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.subscribers import Reports, Subscribers

_MOST_EXPERTS = 32  # of a layer in a report: a mixture of 60 layers and 256 experts would send 150 KB


def routes(models: Registry, ping_s: float, most: int) -> list[Route]:
    """`most`: streams at once, since each holds a connection for as long as it likes."""

    async def answer(request: Request) -> Response:
        name = request.query_params.get("model") if models.several else None
        found = await models.find(name)
        if sum(len(m.engine.subscribers) for m in models.models.values()) >= most:
            raise Refusal(503, "too many clients watch the activity; try again later")
        return ActivityStream(found.engine.subscribers, ping_s)

    return [Route("/activity", answer, methods=["GET"])]


class ActivityStream(StreamingResponse):
    """One subscriber's stream. It unsubscribes at its end, also if it ends before its first event."""

    def __init__(self, subscribers: Subscribers, ping_s: float) -> None:
        self._onlookers, self._queue = subscribers, subscribers.add()
        super().__init__(events(self._queue, ping_s), media_type="text/event-stream")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._onlookers.remove(self._queue)


async def events(queue: Reports, ping_s: float) -> AsyncIterator[bytes]:
    """Yield server-sent events until the reports end or the client leaves."""
    yield sse.SILENCE
    while True:
        try:
            activity = await asyncio.wait_for(queue.get(), ping_s)
        except TimeoutError:
            yield sse.SILENCE
            continue
        if activity is None:
            return
        yield sse.event(report(activity))


def report(a: ActivityReport) -> dict[str, Any]:
    """Return an event's JSON. null: not counted, as single layers and sources of bytes on a GPU."""
    speed = _rounded(a.bytes / a.seconds / 1e9)
    return {
        "tokens": a.tokens,
        "tokens_per_s": _rounded(a.tokens / a.seconds),
        "gb_per_s": speed,
        "layers": None if a.layers is None else list(map(_layer, a.layers)),
        "tiers": {
            "gpu": {"gb_per_s": None} if a.on_gpu else None,
            "ram": {"gb_per_s": None if a.on_gpu else speed},
            "disk": _disk(a),
        },
    }  # fmt: skip


def _layer(x: LayerActivity) -> dict[str, Any]:
    made: dict[str, Any] = {
        "active": _rounded(x.active), "computed": _rounded(x.computed), "asked": _rounded(x.asked)
    }  # fmt: skip
    if x.experts is not None:
        made["experts"] = _experts(x.experts)
    return made


def _experts(e: ExpertActivity) -> dict[str, Any]:
    """Return the most used experts as [number, tokens], and the share of needed ones found in memory."""
    most = sorted(e.used, key=lambda pair: -pair[1])[:_MOST_EXPERTS]
    rate = _rounded((e.needed - e.missed) / e.needed) if e.needed else None
    return {"n": e.n, "used": [list(pair) for pair in most], "n_used": len(e.used), "hit_rate": rate}


def _disk(a: ActivityReport) -> dict[str, Any] | None:
    if a.disk is None:
        return None
    found = a.disk.hit_rate
    return {
        "gb_per_s": _rounded(a.disk.bytes / a.seconds / 1e9),
        "hit_rate": None if found is None else _rounded(found),
    }


def _rounded(x: float) -> float:
    return float(f"{x:.4g}")
