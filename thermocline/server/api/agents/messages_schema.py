"""The body of `/v1/messages` and `/v1/messages/count_tokens`, as far as it can be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from thermocline.server.api.agents.responses_schema import of_kinds
from thermocline.server.api.schema import EFFORT, SINGLE, UNSUPPORTED, ApiObject, AtMost, type_tag


class TextBlock(ApiObject):
    type: Literal["text"]
    text: str


class ThinkingBlock(ApiObject):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(ApiObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


BlockTexts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextBlock], AtMost("limit_messages"), Tag("list")],
    Discriminator(type_tag),
]


class ToolResultBlock(ApiObject):
    type: Literal["tool_result"]
    tool_use_id: str
    content: BlockTexts | None = None
    is_error: bool | None = Field(None, description="ignored: templates have no place for it")


SaidBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[ToolResultBlock, Tag("tool_result")],
    of_kinds("type of block", "of users, text and tool_result are supported"),
]
AnswerBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")],
    of_kinds("type of block", "of the assistant, text, thinking and tool_use are supported"),
]


class SaidMessage(ApiObject):
    role: Literal["user", "system"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[SaidBlock], AtMost("limit_messages"), Tag("list")],
        Discriminator(type_tag),
    ]


class AnswerMessage(ApiObject):
    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("text")] | Annotated[list[AnswerBlock], AtMost("limit_messages"), Tag("list")],
        Discriminator(type_tag),
    ]


AgentMessage = Annotated[
    Annotated[SaidMessage, Tag("user")] | Annotated[AnswerMessage, Tag("assistant")],
    of_kinds("role", "user, assistant and system are supported", {"system": "user"}, key="role"),
]


class AgentTool(ApiObject):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class AnyTool(ApiObject):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call at most")


class NoTool(ApiObject):
    type: Literal["none"]


class OneTool(ApiObject):
    type: Literal["tool"]
    name: str


MessagesToolChoice = Annotated[
    Annotated[AnyTool, Tag("any")] | Annotated[NoTool, Tag("none")] | Annotated[OneTool, Tag("tool")],
    of_kinds("tool_choice", "its type is auto, any, none or tool", {"auto": "any"}),
]


class Thinking(ApiObject):
    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="if the model's template has a switch; without one it is ignored"
    )
    budget_tokens: int | None = Field(None, ge=0, le=SINGLE, description="ignored: max_tokens bounds all")


class OutputSchema(ApiObject):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiObject):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(None, description=EFFORT)
    format: OutputSchema | None = None


class ContextEdit(ApiObject):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(ApiObject):
    edits: Annotated[list[ContextEdit], AtMost("limit_messages")] | None = Field(
        None, description="those that change nothing"
    )


def _objects(messages: Any) -> int:
    lists = [m["content"] for m in messages if isinstance(m, dict) and isinstance(m.get("content"), list)]
    blocks = (b.get("content") for found in lists for b in found if isinstance(b, dict))
    return len(messages) + sum(map(len, lists)) + sum(len(b) for b in blocks if isinstance(b, list))


class CountTokensRequest(ApiObject):
    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED | {
        "container": "leave it out",
        "mcp_servers": "give tools",
        "output_format": "give output_config.format",
    }

    model: str | None = None
    messages: Annotated[list[AgentMessage], AtMost("limit_messages", _objects), Field(min_length=1)]
    system: BlockTexts | None = None
    tools: Annotated[list[AgentTool], AtMost("limit_tools")] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=0, le=SINGLE)
    stop_sequences: Annotated[list[str], AtMost("limit_stop")] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=SINGLE, description="0: all")
    stream: bool | None = None
