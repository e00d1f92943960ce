"""The bodies of `/v1/embeddings`, as OpenAI's, and `/v1/rerank`, as Jina's and Cohere's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from thermocline.server.api.schema import SINGLE, ApiObject, AtMost, Id, kind_of_prompts, of_any_kind

_CUT = "texts are not cut; send a shorter one"
_PROMPTED = "put the prompt that the model's makers recommend before your texts"
_INPUTS = "limit_inputs"

SomeIds = Annotated[list[Id], AtMost(), Field(min_length=1)]
Inputs = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], AtMost(_INPUTS), Field(min_length=1), Tag("texts")]
    | Annotated[SomeIds, Tag("ids")]
    | Annotated[list[SomeIds], AtMost(_INPUTS), Field(min_length=1), Tag("lists")],
    Discriminator(kind_of_prompts),
]


class EmbeddingsRequest(ApiObject):
    # Fields of other servers that would give another vector.
    unsupported: ClassVar[Mapping[str, str]] = {
        "truncate": _CUT,
        "truncate_prompt_tokens": _CUT,
        "input_type": _PROMPTED,
        "prompt_name": _PROMPTED,
        "task": _PROMPTED,
    }
    input: Inputs = Field(json_schema_extra=of_any_kind)
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian f32; left out: float"
    )
    dimensions: int | None = Field(None, ge=1, le=SINGLE, description="where the model lets vectors be cut")
    user: str | None = None


class Document(ApiObject):
    text: str


def _kind_of_document(given: Any) -> str:
    return "text" if isinstance(given, str) else "object"


AnyDocument = Annotated[
    Annotated[str, Tag("text")] | Annotated[Document, Tag("object")], Discriminator(_kind_of_document)
]


class RerankRequest(ApiObject):
    unsupported: ClassVar[Mapping[str, str]] = {
        "max_tokens_per_doc": _CUT,
        "max_chunks_per_doc": _CUT,
        "truncate_prompt_tokens": _CUT,
        "rank_fields": "send each document as one text",
    }
    query: str
    documents: Annotated[list[AnyDocument], AtMost(_INPUTS), Field(min_length=1)]
    model: str | None = None
    top_n: int | None = Field(None, ge=1, le=SINGLE, description="left out: all documents")
    return_documents: bool | None = Field(None, description="repeat each document's text")
    instruction: str | None = Field(
        None, description="what the query asks for, in place of the makers' words"
    )
