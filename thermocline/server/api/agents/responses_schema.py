"""The body of `/v1/responses`, as far as it can be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag

from thermocline.server.api.schema import (
    EFFORT,
    SINGLE,
    UNSUPPORTED,
    AnyFormat,
    ApiObject,
    AtMost,
    Effort,
    type_tag,
)


class ItemPart(ApiObject):
    model_config = ConfigDict(json_schema_extra={"required": ["type", "text"]})
    # Parsed more widely than described, so that a part that is not text is refused by its type's name.
    type: str = Field(json_schema_extra={"enum": ["input_text", "output_text"]})
    text: str | None = Field(None, json_schema_extra={"type": "string"})


PartTexts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[ItemPart], AtMost("limit_messages"), Tag("list")],
    Discriminator(type_tag),
]


class MessageItem(ApiObject):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: PartTexts


class CallItem(ApiObject):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(ApiObject):
    type: Literal["function_call_output"]
    call_id: str
    output: PartTexts


class ReasoningText(ApiObject):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ApiObject):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], AtMost("limit_messages")] | None = None
    encrypted_content: str | None = Field(None, description="of an answer of this server")


def _kind_of(given: Any, key: str) -> str:
    if isinstance(given, str):
        return "word"
    found = given.get(key) if isinstance(given, dict) else getattr(given, key, None)
    return "" if found is None else found if isinstance(found, str) else "?"


def of_kinds(
    what: str, wanted: str, tags: Mapping[str, str] | None = None, *, key: str = "type"
) -> Discriminator:
    """Return the discriminator of a union of `what` by the field `key`; `wanted` says which kinds there are.

    `tags`: the tags of kinds that are not tags themselves; "" is an object without the field.
    """
    found = tags or {}
    return Discriminator(
        lambda given: found.get(kind := _kind_of(given, key), kind),
        custom_error_type=what.replace(" ", "_"),
        custom_error_message=f"{what}: {wanted}",
    )


_ITEMS = "message, function_call, function_call_output and reasoning are supported"
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    of_kinds("type of item", _ITEMS, {"": "message"}),
]


class FunctionTool(ApiObject):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


# Codex sends these with every request. The model is not shown them, so it calls none.
HiddenKind = Literal["custom", "image_generation", "local_shell", "namespace", "tool_search", "web_search"]
NOT_SHOWN: tuple[str, ...] = get_args(HiddenKind)


class OtherTool(ApiObject):
    type: HiddenKind


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    of_kinds(
        "type of tool",
        f"function is supported, {', '.join(NOT_SHOWN)} are ignored",
        dict.fromkeys(NOT_SHOWN, "other"),
    ),
]


class ToolName(ApiObject):
    type: Literal["function"]
    name: str


class AllowedToolNames(ApiObject):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], AtMost("limit_tools"), Field(min_length=1)]


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[ToolName, Tag("function")]
    | Annotated[AllowedToolNames, Tag("allowed_tools")],
    of_kinds("tool_choice", '"none", "auto", "required", or {"type": "function", "name": ...}'),
]


class NamedSchema(ApiObject):
    type: Literal["json_schema"]
    name: str = "schema"
    schema_: dict[str, Any] = Field(alias="schema")


class TextConfig(ApiObject):
    format: Annotated[AnyFormat | NamedSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="ignored")


class ReasoningConfig(ApiObject):
    effort: Effort | None = Field(None, description=EFFORT)
    summary: str | None = Field(None, description="ignored: thoughts are sent as they are")


# OpenAI's bounds. Three events of a stream repeat the metadata.
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


def _objects(items: Any) -> int:
    lists = (i.get(key) for i in items if isinstance(i, dict) for key in ("content", "output"))
    return len(items) + sum(len(found) for found in lists if isinstance(found, list))


class ResponsesRequest(ApiObject):
    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED | {
        "background": "leave it out",
        "conversation": "give previous_response_id, or all items",
        "prompt": "give instructions and input",
        "context_management": "shorten the input",
    }

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[Item], AtMost("limit_messages", _objects), Field(min_length=1), Tag("list")],
        Discriminator(type_tag),
    ]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, description="a response that is still kept")
    store: bool | None = Field(None, description="true: keep the response in memory for the next request")
    tools: Annotated[list[ResponsesTool], AtMost("limit_tools")] | None = None
    tool_choice: ResponsesToolChoice | None = Field(
        None, description='"none", "auto", "required", or {"type": "function", "name": ...}'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[str], AtMost("limit_messages")] | None = Field(
        None, description='"reasoning.encrypted_content": thoughts in a form that can be sent back'
    )
    max_output_tokens: int | None = Field(None, ge=1, le=SINGLE)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=0, description="/v1/chat/completions has them")
    truncation: Literal["disabled"] | None = None
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16, description="sent back")
    stream: bool | None = None
