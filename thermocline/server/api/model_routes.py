"""Routes about the one model: its name and state, `/tokenize` and `/detokenize`."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from thermocline import __version__
from thermocline.server.api import schema
from thermocline.server.api.model import ServedModel
from thermocline.server.api.responses import json_bytes, large, token_pieces
from thermocline.server.api.state import RETRY_LOADING_S, Api
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
    ]


class _ModelRoutes:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._began = int(time.time())

    async def health(self, request: Request) -> Response:
        e = self._api.engine
        age = round(e.heartbeat_age_s * 1e3)
        ready = self._api.model is not None and e.ready
        facts = {"live": e.alive, "ready": ready, "heartbeat_age_ms": age}
        if ready:
            return JSONResponse({"status": "ok", **facts})
        message = "Loading model" if e.state in ("starting", "loading") else f"The engine is {e.state}"
        if e.state == "ready":
            message = f"The engine has not been heard of for {age / 1e3:.0f} s"
        about = {"error": Refusal(503, message).error, **facts}
        if self._api.progress is not None and e.state == "loading":
            about["progress"] = dict(zip(("what", "done", "size"), self._api.progress, strict=True))
        return JSONResponse(about, 503, headers={"Retry-After": str(RETRY_LOADING_S)})

    async def models(self, request: Request) -> Response:
        model = self._api.model or self._api.ready_model()  # clients would believe an empty list for good
        return JSONResponse({"object": "list", "data": [self._about(model)]})

    async def one_model(self, request: Request) -> Response:
        return JSONResponse(self._about(self._api.ready_model(request.path_params["model"])))

    def _about(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name, "object": "model", "created": self._began, "owned_by": "thermocline",
            "meta": {"n_vocab": model.spec.vocab_size, "n_ctx": model.context,
                     "n_ctx_train": model.spec.max_context, "n_embd": model.spec.dim},
        }  # fmt: skip

    async def props(self, request: Request) -> Response:
        model, d = self._api.ready_model(), self._api.defaults
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
        t, most = self._api.ready_model().tokenizer, self._api.limits.limit_tokenize_bytes
        if len(r.content) > most or len(r.content.encode()) > most:
            raise Refusal(413, f"content: at most {most} bytes", param="content")
        ids = await self._api.converted(
            partial(t.encode, r.content, add_special=r.add_special, parse_special=r.parse_special)
        )
        if r.with_pieces:
            return await large(partial(token_pieces, t, ids))
        return await large(lambda: json_bytes({"tokens": ids}))

    async def detokenize(self, request: Request) -> Response:
        r = await self._api.body(posted(request.scope), schema.DetokenizeRequest, request.url.path)
        model = self._api.ready_model()
        if max(r.tokens, default=0) >= model.spec.vocab_size:
            raise Refusal(400, f"tokens: they are 0 to {model.spec.vocab_size - 1}", param="tokens")
        text = await self._api.converted(partial(model.tokenizer.decode, r.tokens))
        return await large(lambda: json_bytes({"content": text}))
