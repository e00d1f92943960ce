"""What clients may send: fields of OpenAI's API and llama.cpp's, with their ranges. Must not know engines.

Types are strict: "1" is no number. A field that nobody here knows is left out, and said in the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag
from typing_extensions import TypeAliasType

from thermocline.constraint import Grammar
from thermocline.errors import UsageError
from thermocline.sampler import SamplingParams
from thermocline.server.limits import Limits

Text = Annotated[str, Field(max_length=256)]
Id = TypeAliasType("Id", Annotated[int, Field(ge=0, le=2**31 - 1)])  # a name: its bound depends on the model
SINGLE = 2**31 - 1
COMPLETION_TOKENS = 16  # of /v1/completions where a client says nothing, as OpenAI has it


class Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Request):
    include_usage: bool = False


class JsonSchema(Request):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema", default=True)
    strict: bool | None = None


class AnyFormat(Request):
    type: Literal["text", "json_object"]


class SchemaFormat(Request):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")]


class Sampling(Request):
    """What both ways to generate take. null is as if the field were not there."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=SINGLE, description="0 or -1: all")
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, description="answers to each prompt, computed together")
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-1, le=2**63 - 1, description="-1: random; the answer's is told")
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=SINGLE)
    logit_bias: dict[str, float] | None = Field(
        None,
        description="token id -> added to its logit; -100 bans",
        json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    )
    max_tokens: int | None = Field(
        None, ge=-1, le=SINGLE, description="-1: until the context is full; 0: none"
    )
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = Field(None, description="llama.cpp's way to give a schema")
    grammar: str | None = Field(None, description="a Lark grammar")
    user: str | None = None


class TextPart(Request):
    # Parsed more widely than it says: `conversation._part` can then name the type that is not understood.
    model_config = ConfigDict(json_schema_extra={"required": ["type", "text"]})
    type: str = Field(json_schema_extra={"const": "text"})
    text: str | None = Field(None, json_schema_extra={"type": "string"})


class FunctionCall(Request):
    name: str
    arguments: str


class ToolCall(Request):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Request):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Request):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Request):
    type: Literal["function"]
    function: Function


class FunctionName(Request):
    name: str


class NamedTool(Request):
    type: Literal["function"]
    function: FunctionName


class Allowed(Request):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(Request):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _form(choice: Any) -> Any:
    if isinstance(choice, str):
        return "word"
    return choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _form,
        custom_error_type="tool_choice",
        custom_error_message='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
    ),
]


class ChatRequest(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1, le=SINGLE)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None


class CompletionRequest(Sampling):
    prompt: str | list[str] | list[Id] | list[list[Id]] = ""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    suffix: str | None = Field(
        None, json_schema_extra={"maxLength": 0}, description="none: nothing is filled in"
    )
    best_of: int | None = Field(None, ge=1, description="what n says")


class TokenizeRequest(Request):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Request):
    tokens: list[Id]


# ---- what is not taken

# Other servers' fields. Without them an answer would be a different one than was asked for, and nobody told.
UNKEPT = {
    "chat_template": "a template is the server's to choose (--template)",
    "documents": "put them into a message",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "audio": "answers are text",
    "guided_json": "give response_format or json_schema",
    "guided_choice": "give response_format or grammar",
    "guided_regex": "give grammar",
    "guided_grammar": "give grammar",
    "structured_outputs": "give response_format or grammar",
    "regex": "give grammar",
    "ebnf": "give grammar",
}


# ---- what is bounded by the server's limits


def excesses(r: Sampling, most: Limits, prompts: int) -> Iterator[tuple[str, str]]:
    """(field, what it may be) of those beyond a limit."""
    n, stops, biases = r.n or 1, _texts(r.stop) or (), r.logit_bias or {}
    if n > most.limit_n:
        yield "n", f"at most {most.limit_n}"
    if n * prompts > most.limit_choices:
        yield "n", f"{n * prompts} answers, at most {most.limit_choices} at once"
    if len(stops) > most.limit_stop:
        yield "stop", f"at most {most.limit_stop} texts"
    if not all(0 < len(s.encode("utf-8", "replace")) <= most.limit_stop_bytes for s in stops):
        yield "stop", f"texts of 1 to {most.limit_stop_bytes} bytes"
    if len(biases) > most.limit_logit_bias:
        yield "logit_bias", f"at most {most.limit_logit_bias} tokens"
    if not all(k.isascii() and k.isdecimal() and len(k) <= 10 for k in biases):
        yield "logit_bias", "its keys are token ids"
    rivals = r.logprobs if isinstance(r, CompletionRequest) else getattr(r, "top_logprobs", None)
    if (rivals or 0) > most.limit_top_logprobs:
        yield "logprobs", f"at most {most.limit_top_logprobs}"
    if isinstance(r, ChatRequest) and r.top_logprobs and not r.logprobs:
        yield "top_logprobs", "needs logprobs: true"


def _texts(stop: str | list[str] | None) -> tuple[str, ...] | None:
    return None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


# ---- the same, as the engine has it


def grammar_fields(r: Sampling) -> list[str]:
    """Those that say what a text has to be."""
    return [f for f in ("grammar", "json_schema", "response_format") if getattr(r, f) is not None]


def grammar_of(r: Sampling) -> Grammar | None:
    """The one that is asked for. Raises UsageError where it cannot be one."""
    asked: list[Grammar] = []
    if r.grammar is not None:
        asked.append(Grammar.lark(r.grammar))
    if r.json_schema is not None:
        asked.append(Grammar.json_schema(r.json_schema))
    match r.response_format:
        case AnyFormat(type="json_object"):
            asked.append(Grammar.json_object())
        case SchemaFormat(json_schema=given):
            asked.append(Grammar.json_schema(given.schema_))
    if len(asked) > 1:
        raise UsageError("response_format, json_schema and grammar: only one of them can be kept")
    return asked[0] if asked else None


def sampling_params(
    r: Sampling, d: SamplingParams, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    """`d`: what the server was started with, for what the request leaves open."""
    stop = _texts(r.stop)
    given = {int(k): -math.inf if v <= -100 else v for k, v in (r.logit_bias or {}).items()}
    asked = d.max_tokens if max_tokens is None else max_tokens
    return replace(
        d,
        max_tokens=None if asked == -1 else asked,
        temperature=_or(r.temperature, d.temperature),
        top_k=max(0, _or(r.top_k, d.top_k)),
        top_p=_or(r.top_p, d.top_p),
        min_p=_or(r.min_p, d.min_p),
        repeat_penalty=_or(r.repeat_penalty, d.repeat_penalty),
        repeat_last_n=_or(r.repeat_last_n, d.repeat_last_n),
        presence_penalty=_or(r.presence_penalty, d.presence_penalty),
        frequency_penalty=_or(r.frequency_penalty, d.frequency_penalty),
        seed=_or(r.seed, d.seed) if r.seed != -1 else None,
        stop=_or(stop, d.stop),
        logit_bias={**d.logit_bias, **given},
        logprobs=logprobs,
        ignore_eos=_or(r.ignore_eos, d.ignore_eos),
        grammar=grammar_of(r),
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
