"""Parts of a chat that requests of both APIs become."""

from __future__ import annotations

from typing import Any

from thermocline.server.api import schema


def tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> schema.Tool:
    function = schema.Function.model_construct(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return schema.Tool.model_construct(type="function", function=function)


def named_tool(name: str) -> schema.NamedTool:
    """Return the choice of one tool."""
    function = schema.FunctionName.model_construct(name=name)
    return schema.NamedTool.model_construct(type="function", function=function)


def call(id: str, name: str, arguments: str) -> schema.ToolCall:
    function = schema.FunctionCall.model_construct(name=name, arguments=arguments)
    return schema.ToolCall.model_construct(id=id, function=function)
