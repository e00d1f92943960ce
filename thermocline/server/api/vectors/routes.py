"""`/v1/embeddings` and `/v1/rerank`: from a checked body to the engine's jobs, and the bodies of answers."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from thermocline.engine.request import PoolingParams, check_embeds
from thermocline.engine.vectors import Prompt, check_dimensions, shortened
from thermocline.errors import UsageError
from thermocline.ops.interface import F32
from thermocline.server.api.models.served import ServedModel
from thermocline.server.api.responses import json_bytes, large
from thermocline.server.api.schema import prompts_of
from thermocline.server.api.state import Api
from thermocline.server.api.vectors.reading import check, check_length, read
from thermocline.server.api.vectors.schema import Document, EmbeddingsRequest, RerankRequest
from thermocline.server.http.posted import posted
from thermocline.server.http.refusal import Refusal


def routes(api: Api) -> list[Route]:
    made = _VectorRoutes(api)
    return [
        Route("/v1/embeddings", made.embed, methods=["POST"]),
        Route("/v1/rerank", made.rerank, methods=["POST"]),
    ]


class _VectorRoutes:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def embed(self, request: Request) -> Response:
        given = posted(request.scope)
        r = await self._api.body(given, EmbeddingsRequest, request.url.path)
        model = await self._api.model(request, r.model)
        check_embeds(model.spec)
        try:
            check_dimensions(model.spec, r.dimensions)
        except UsageError as e:
            raise Refusal(400, str(e), param="dimensions") from None
        prompts = await self._api.prompt(partial(_ids_of_inputs, model, prompts_of(r.input)))
        given.done()
        vectors = await read(self._api, model, prompts)
        coded = r.encoding_format == "base64"
        used = sum(len(ids) for ids, _ in prompts)
        return await large(lambda: _embeddings(model, vectors, r.dimensions, coded, used))

    async def rerank(self, request: Request) -> Response:
        given = posted(request.scope)
        r = await self._api.body(given, RerankRequest, request.url.path)
        model = await self._api.model(request, r.model)
        if model.reranker is None:
            raise Refusal(400, model.why_no_reranker)
        prompts = await self._api.prompt(partial(_ids_of_pairs, model, r))
        given.done()
        logits = await read(self._api, model, prompts)
        scores = [model.reranker.score(v) for v in logits]
        return await large(lambda: _ranking(model, r, scores, sum(len(ids) for ids, _ in prompts)))


def _ids_of_inputs(model: ServedModel, inputs: Sequence[str | list[int]]) -> list[Prompt]:
    """Return the prompts of texts, each with the tokens that the model expects around it, and of tokens."""
    found: list[Prompt] = []
    for i, one in enumerate(inputs):
        where = "input" if len(inputs) == 1 else f"input.{i}"
        if isinstance(one, str):
            check_length(model, where, one)
            one = model.tokenizer.encode(one)
        check(model, one, PoolingParams(), where)
        found.append((one, PoolingParams()))
    return found


def _ids_of_pairs(model: ServedModel, r: RerankRequest) -> list[Prompt]:
    reranker = model.reranker
    assert reranker is not None
    found: list[Prompt] = []
    for i, document in enumerate(r.documents):
        where, text = f"documents.{i}", _text(document)
        check_length(model, where, r.query, text, r.instruction or "")
        ids, second = reranker.encode(r.query, text, r.instruction)
        pooling = PoolingParams(reranker.logits_of, second)
        check(model, ids, pooling, where)
        found.append((ids, pooling))
    return found


def _text(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


# ---- answers


def _embeddings(
    model: ServedModel, vectors: Sequence[F32], dimensions: int | None, coded: bool, used: int
) -> bytes:
    """Return OpenAI's body. A number has as few digits as tell its f32 apart from others."""
    pieces = []
    for i, whole in enumerate(vectors):
        v = shortened(model.spec, whole, dimensions)
        if coded:
            text = f'"{base64.b64encode(v.astype("<f4").tobytes()).decode()}"'
        else:
            text = f"[{','.join(v.astype(str))}]"
        pieces.append(f'{{"object":"embedding","index":{i},"embedding":{text}}}')
    head = json_bytes({"object": "list", "model": model.name, "usage": _usage(used)})
    return head[:-1] + b',"data":[' + ",".join(pieces).encode() + b"]}"


def _ranking(model: ServedModel, r: RerankRequest, scores: Sequence[float], used: int) -> bytes:
    """Return Jina's body: the most relevant documents first, of equal ones the one that was sent first."""
    order = np.argsort(-np.array(scores), kind="stable")[: r.top_n]
    results: list[dict[str, Any]] = []
    for i in order.tolist():
        result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
        if r.return_documents:
            result["document"] = {"text": _text(r.documents[i])}
        results.append(result)
    return json_bytes(
        {
            "id": f"rerank-{secrets.token_hex(12)}", "object": "list", "model": model.name,
            "usage": _usage(used), "results": results
        }
    )  # fmt: skip


def _usage(used: int) -> dict[str, int]:
    return {"prompt_tokens": used, "total_tokens": used}
