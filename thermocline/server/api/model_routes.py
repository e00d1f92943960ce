"""Routes about the models: their names and states, `/tokenize` and `/detokenize`, `/benchmark`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from thermocline import __version__
from thermocline.server.api import benchmark, schema
from thermocline.server.api.models.hold import RETRY_LOADING_S, ready
from thermocline.server.api.models.registered import RegisteredModel
from thermocline.server.api.responses import json_bytes, large, token_pieces
from thermocline.server.api.state import Api
from thermocline.server.http.posted import posted
from thermocline.server.http.refusal import Refusal


def routes(api: Api) -> list[Route]:
    get, post = ["GET"], ["POST"]
    made = _ModelRoutes(api)
    return [
        Route("/health", made.health, methods=get),
        Route("/v1/health", made.health, methods=get),
        Route("/v1/models", made.models, methods=get),
        Route("/v1/models/{model:path}", made.one_model, methods=get),  # a name may have slashes
        Route("/props", made.props, methods=get),
        Route("/tokenize", made.tokenize, methods=post),
        Route("/detokenize", made.detokenize, methods=post),
        *benchmark.routes(api),
    ]


class _ModelRoutes:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._began = int(time.time())

    async def health(self, request: Request) -> Response:
        """Answer for the only model, or for those that are loaded. The default counts until it was once."""
        models = self._api.models
        first = models.default
        if first is None or (models.several and first.loads):
            return self._health_of_all()
        e = first.engine
        age = round(e.heartbeat_age_s * 1e3)
        ready = first.model is not None and e.ready
        facts = {"live": e.alive, "ready": ready, "heartbeat_age_ms": age}
        if ready:
            return JSONResponse({"status": "ok", **facts})
        message = "Loading model" if e.state in ("starting", "loading") else f"The engine is {e.state}"
        if e.state == "ready":
            message = f"The engine has not been heard of for {age / 1e3:.0f} s"
        about = {"error": Refusal(503, message).error, **facts}
        if first.progress is not None and e.state == "loading":
            about["progress"] = _progress(first.progress)
        return JSONResponse(about, 503, headers={"Retry-After": str(RETRY_LOADING_S)})

    def _health_of_all(self) -> Response:
        """Answer that models can be asked for: those that are not loaded, will be."""
        engines = [m.engine for m in self._api.models.loaded()]
        age = max((round(e.heartbeat_age_s * 1e3) for e in engines), default=0)
        live = all(e.alive for e in engines)
        return JSONResponse({"status": "ok", "live": live, "ready": True, "heartbeat_age_ms": age})

    async def models(self, request: Request) -> Response:
        models = self._api.models
        await models.look()
        if not models.several and models.default is not None and models.default.model is None:
            ready(models)  # clients would believe an empty list for good
        listed = sorted(models.models.values(), key=lambda m: m.name)
        return JSONResponse({"object": "list", "data": list(map(self._about, listed))})

    async def one_model(self, request: Request) -> Response:
        name, models = request.path_params["model"], self._api.models
        if not models.several:
            ready(models)
        return JSONResponse(self._about(await models.find(name)))

    def _about(self, m: RegisteredModel) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if (model := m.model) is not None:
            meta = {"n_vocab": model.spec.vocab_size, "n_ctx": model.context,
                    "n_ctx_train": model.spec.max_context, "n_embd": model.spec.dim}  # fmt: skip
        if m.found is not None:
            meta["size"] = m.found.nbytes
        again = m.state == "loaded" and m.engine.state != "ready"  # it crashed, and is started again
        status: dict[str, Any] = {"value": "loading" if again else m.state}
        if m.state == "loading" and m.progress is not None:
            status["progress"] = _progress(m.progress)
        return {
            "id": m.name, "object": "model", "created": self._began, "owned_by": "thermocline",
            "status": status, "meta": meta,
        }  # fmt: skip

    async def props(self, request: Request) -> Response:
        """Answer from what is known of a loaded model. Its engine may be measured meanwhile."""
        name, models = request.query_params.get("model"), self._api.models
        found = await models.find(name) if models.several else None
        model = found.model if found is not None and found.state == "loaded" else None
        model = model or await self._api.model(request, name)
        d = model.defaults
        sampling = {
            "temperature": d.temperature, "top_k": d.top_k, "top_p": d.top_p, "min_p": d.min_p,
            "repeat_penalty": d.repeat_penalty, "repeat_last_n": d.repeat_last_n,
        }  # fmt: skip
        return JSONResponse({
            "default_generation_settings": {"n_ctx": model.context, "params": sampling},
            "total_slots": model.max_batch,
            "model_alias": model.name,
            "chat": model.template is not None,
            "build_info": f"thermocline {__version__}",
        })  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        r = await self._api.body(posted(request.scope), schema.TokenizeRequest, request.url.path)
        most = self._api.limits.limit_tokenize_bytes
        if len(r.content) > most or len(r.content.encode()) > most:
            raise Refusal(413, f"content: at most {most} bytes", param="content")
        t = (await self._api.model(request, r.model)).tokenizer
        ids = await self._api.converted(
            partial(t.encode, r.content, add_special=r.add_special, parse_special=r.parse_special)
        )
        if r.with_pieces:
            return await large(partial(token_pieces, t, ids))
        return await large(lambda: json_bytes({"tokens": ids}))

    async def detokenize(self, request: Request) -> Response:
        r = await self._api.body(posted(request.scope), schema.DetokenizeRequest, request.url.path)
        model = await self._api.model(request, r.model)
        if max(r.tokens, default=0) >= model.spec.vocab_size:
            raise Refusal(400, f"tokens: they are 0 to {model.spec.vocab_size - 1}", param="tokens")
        text = await self._api.converted(partial(model.tokenizer.decode, r.tokens))
        return await large(lambda: json_bytes({"content": text}))


def _progress(progress: tuple[str, int, int]) -> dict[str, Any]:
    return dict(zip(("what", "done", "size"), progress, strict=True))
