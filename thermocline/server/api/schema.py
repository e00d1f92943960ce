"""The bodies that clients may send: fields of OpenAI's and llama.cpp's APIs, with their ranges.

Types are strict: "1" is not a number. Unknown fields are ignored, and a line in the log names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypeAliasType

from thermocline.engine.sampler import SamplingParams
from thermocline.errors import UsageError
from thermocline.server.http.limits import ServerLimits
from thermocline.text.grammar import Grammar

Id = TypeAliasType(
    "Id", Annotated[int, Field(ge=0, le=2**31 - 1)]
)  # a named type, because its bound depends on the model
SINGLE = 2**31 - 1
Asked = TypeVar("Asked", bound="Sampling")
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions


@dataclass(frozen=True)
class AtMost:
    """Bound a list or object by one of the server's limits, and stop a list at its first error.

    Otherwise 1.3 MB of nulls made 780,001 errors in 770 MiB, to report one. Items of a list that is too long
    are not looked at. Without `limit` a list is as long as its body allows.
    """

    limit: str | None = None
    count: Callable[[Any], int] = len

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        made = handler(source)
        if made["type"] == "list":
            made = cast(CoreSchema, {**made, "fail_fast": True})
        return core_schema.with_info_before_validator_function(self._bounded, made)

    def _bounded(self, given: Any, info: ValidationInfo) -> Any:
        if self.limit is not None and isinstance(given, list | dict):
            most: int = getattr(info.context or ServerLimits(), self.limit)
            if (n := self.count(given)) > most:
                raise PydanticCustomError("too_many", "at most {most}, not {n}", {"most": most, "n": n})
        return given


def type_tag(given: Any) -> str:
    return "list" if isinstance(given, list) else "text"


# Choose among a union's types first: pydantic itself tries all of them and collects all their errors.
Texts = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[str], AtMost("limit_stop"), Tag("list")],
    Discriminator(type_tag),
]


# Fields of other servers. Ignoring one would silently give a different answer than the client asked for.
UNSUPPORTED = {
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


# How much a model should think, in all APIs of chats.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT = "of those above high, templates know high"


class ApiObject(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    unsupported: ClassVar[Mapping[str, str]] = UNSUPPORTED  # field -> what to do instead; 400 if given


class StreamOptions(ApiObject):
    include_usage: bool = False


class JsonSchema(ApiObject):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema", default=True)
    strict: bool | None = None


class AnyFormat(ApiObject):
    type: Literal["text", "json_object"]
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="of a json_object: llama.cpp's way to give a schema"
    )


class SchemaFormat(ApiObject):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[AnyFormat | SchemaFormat, Field(discriminator="type")]


class Sampling(ApiObject):
    """The fields of both ways to generate. null counts as left out."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=SINGLE, description="0 or -1: all")
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, description="answers to each prompt, computed together")
    stop: Texts | None = None
    seed: int | None = Field(None, ge=-1, le=2**63 - 1, description="-1: random")
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, le=SINGLE)
    logit_bias: Annotated[dict[str, float], AtMost("limit_logit_bias")] | None = Field(
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


class TextPart(ApiObject):
    # Parsed more widely than described, so that `conversation._part` can name an unsupported type.
    model_config = ConfigDict(json_schema_extra={"required": ["type", "text"]})
    type: str = Field(json_schema_extra={"const": "text"})
    text: str | None = Field(None, json_schema_extra={"type": "string"})


class FunctionCall(ApiObject):
    name: str
    arguments: str


class ToolCall(ApiObject):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(ApiObject):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[TextPart], AtMost("limit_messages"), Tag("list")],
            Discriminator(type_tag),
        ]
        | None
    ) = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], AtMost("limit_messages")] | None = None
    tool_call_id: str | None = None


class Function(ApiObject):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiObject):
    type: Literal["function"]
    function: Function


class FunctionName(ApiObject):
    name: str


class NamedTool(ApiObject):
    type: Literal["function"]
    function: FunctionName


class Allowed(ApiObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], AtMost("limit_tools"), Field(min_length=1)]


class AllowedTools(ApiObject):
    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def _kind(choice: Any) -> Any:
    if isinstance(choice, str):
        return "word"
    return choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(
        _kind,
        custom_error_type="tool_choice",
        custom_error_message='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
    ),
]


def _objects(messages: Any) -> int:
    """Return the number of messages, parts and calls: each becomes an object of a kilobyte."""
    lists = (m.get(key) for m in messages if isinstance(m, dict) for key in ("content", "tool_calls"))
    return len(messages) + sum(len(found) for found in lists if isinstance(found, list))


class ChatRequest(Sampling):
    messages: Annotated[list[Message], AtMost("limit_messages", _objects), Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=-1, le=SINGLE)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: Annotated[list[Tool], AtMost("limit_tools")] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most")
    chat_template_kwargs: Annotated[dict[str, Any], AtMost("limit_template_variables")] | None = None
    reasoning_effort: Effort | None = Field(None, description=EFFORT)


def kind_of_prompts(given: Any) -> str:
    """Choose the kind of list by its first item, so that 260,000 items are checked once, not three times."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else ""
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


def of_any_kind(schema: dict[str, Any]) -> None:
    """Describe the kinds of list as anyOf: an empty list is of every kind."""
    schema["anyOf"] = schema.pop("oneOf")


Ids = Annotated[list[Id], AtMost()]
Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], AtMost("limit_choices"), Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], AtMost("limit_choices"), Tag("lists")],
    Discriminator(kind_of_prompts),
]


def prompts_of(given: Any) -> Sequence[str | list[int]]:
    """Return a request's prompts as a list: it may be one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given or isinstance(given[0], int):
        return [given]
    return list(given)


class CompletionRequest(Sampling):
    prompt: Prompt = Field("", json_schema_extra=of_any_kind)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    suffix: str | None = Field(None, description="what comes after the answer, for models that fill in")
    best_of: int | None = Field(None, ge=1, description="what n says")


class InfillFile(ApiObject):
    filename: str = "file"
    text: str


class InfillRequest(Sampling):
    input_prefix: str = Field("", description="what comes before the answer")
    input_suffix: str = Field("", description="what comes after it")
    prompt: str = Field("", description="what comes after input_prefix: the beginning of the line")
    input_extra: Annotated[list[InfillFile], AtMost("limit_messages")] | None = Field(
        None, description="other files of the project"
    )
    n_predict: int | None = Field(None, ge=-1, le=SINGLE, description="max_tokens")


class TokenizeRequest(ApiObject):
    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(ApiObject):
    model: str | None = None
    tokens: Annotated[list[Id], AtMost("limit_detokenize")]


class BenchmarkRequest(ApiObject):
    model: str | None = None


# ---- the server's limits


def excesses(r: Sampling, most: ServerLimits, prompts: int) -> Iterator[tuple[str, str]]:
    """Yield (field, its bound) for each field beyond a limit."""
    n, stops, biases = r.n or 1, _texts(r.stop) or (), r.logit_bias or {}
    if n > most.limit_n:
        yield "n", f"at most {most.limit_n}"
    if n * prompts > most.limit_choices:
        yield "n", f"{n * prompts} answers; at most {most.limit_choices} at once"
    longest = most.limit_stop_bytes
    if not all(0 < len(s) <= longest and len(s.encode("utf-8", "replace")) <= longest for s in stops):
        yield "stop", f"texts of 1 to {longest} bytes"
    if not all(k.isascii() and k.isdecimal() and len(k) <= 10 for k in biases):
        yield "logit_bias", "its keys are token ids"
    rivals = r.logprobs if isinstance(r, CompletionRequest) else getattr(r, "top_logprobs", None)
    if (rivals or 0) > most.limit_top_logprobs:
        yield "logprobs", f"at most {most.limit_top_logprobs}"
    if isinstance(r, ChatRequest) and r.top_logprobs and not r.logprobs:
        yield "top_logprobs", "needs logprobs: true"


def _texts(stop: str | list[str] | None) -> tuple[str, ...] | None:
    return None if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def settings(r: Asked) -> Asked:
    """Return the request without its texts, which need not stay in memory while it is answered."""
    texts: dict[str, Any] = {"messages": [], "prompt": "", "tools": None, "chat_template_kwargs": None}
    texts |= {"suffix": None, "input_prefix": "", "input_suffix": "", "input_extra": None}
    texts |= dict.fromkeys(("grammar", "json_schema", "response_format"))
    return r.model_copy(update={k: v for k, v in texts.items() if k in type(r).model_fields})


# ---- the request as the engine takes it


def grammar_fields(r: Sampling) -> list[str]:
    """Return the given fields that constrain the answer's text."""
    return [f for f in ("grammar", "json_schema", "response_format") if getattr(r, f) is not None]


def grammar_of(r: Sampling) -> Grammar | None:
    """Return the grammar of the request, if any. Raise UsageError if it is not valid."""
    asked: list[Grammar] = []
    if r.grammar is not None:
        asked.append(Grammar.lark(r.grammar))
    if r.json_schema is not None:
        asked.append(Grammar.json_schema(r.json_schema))
    match r.response_format:
        case AnyFormat(type="text", schema_=dict()):
            raise UsageError(
                "a format of type text takes no schema; give the type json_schema or json_object"
            )
        case AnyFormat(type="json_object", schema_=given):
            asked.append(Grammar.json_schema(given) if given else Grammar.json_object())
        case SchemaFormat(json_schema=given):
            asked.append(Grammar.json_schema(given.schema_))
    if len(asked) > 1:
        raise UsageError("response_format, json_schema and grammar exclude each other; give one of them")
    return asked[0] if asked else None


def sampling_params(
    r: Sampling, d: SamplingParams, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    """Return the request's sampling options; `d` has the server's, for fields that are left out."""
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
