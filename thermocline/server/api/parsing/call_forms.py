"""The forms in which models write calls of functions: JSON, or a notation of their family's own.

A form is known by what the model's chat template writes. `read` takes what lies between its marks.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # a function's name -> the JSON schema of its arguments
_ID = string.ascii_letters + string.digits


def _new_id() -> str:
    """Return nine letters and digits: Mistral's templates refuse other ids, and no client minds."""
    return "".join(secrets.choice(_ID) for _ in range(9))


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=_new_id)


@dataclass(frozen=True)
class CallForm:
    """A form of calls. Its text has no call where `read` raises ValueError."""

    signs: tuple[str, ...]  # all are in the templates that have it
    opens: str  # "": a call is the whole answer
    closes: str | None  # None: the calls go on to the end
    read: Callable[[str, Schemas], list[Call]]
    marks: tuple[str, ...] = ()  # further special tokens whose names are read
    key: str | None = None  # of a JSON call's arguments, where a grammar can ask for calls
    in_list: bool = False
    needs_close: bool = False  # a part of a call may look like a whole one


# ---- JSON


def _json(text: str, _schemas: Schemas) -> list[Call]:
    """Read one call, or a list of them: Hermes, Qwen, Granite; Mistral's list; Llama 3's object; Cohere."""
    given = _loads(text.strip().removeprefix("<|python_tag|>"))
    return [_named(one) for one in (given if isinstance(given, list) else [given])]


def _named(given: Any) -> Call:
    if not isinstance(given, dict):
        raise ValueError("not a call")
    name = given.get("name", given.get("tool_name"))
    arguments = given.get("arguments", given.get("parameters"))
    if not isinstance(name, str) or arguments is None:
        raise ValueError("not a call")
    return Call(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def _object(text: str) -> str:
    """Return a text that is a JSON object."""
    if not isinstance(_loads(text), dict):
        raise ValueError("not an object")
    return text.strip()


# ---- arguments one by one


_NAME = re.compile(r"[\w.\-]+")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_INVOKE = re.compile(r'<invoke name="([^"]+)">(.*?)</invoke>', re.DOTALL)
_NAMED_PARAMETER = re.compile(r'<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _functions(text: str, schemas: Schemas) -> list[Call]:
    """Read <function=f><parameter=x>…</parameter></function>: Qwen3-Coder, Qwen 3.5, Nemotron 3."""
    return _each(_FUNCTION.findall(text), _PARAMETER, schemas)


def _invokes(text: str, schemas: Schemas) -> list[Call]:
    """Read <invoke name="f"><parameter name="x">…</parameter></invoke>: MiniMax."""
    return _each(_INVOKE.findall(text), _NAMED_PARAMETER, schemas)


def _pairs(text: str, schemas: Schemas) -> list[Call]:
    """Read f<arg_key>x</arg_key><arg_value>…</arg_value>: GLM."""
    return _each([(text.partition("<arg_key>")[0], text)], _ARGUMENT, schemas)


def _each(found: Sequence[tuple[str, str]], argument: re.Pattern[str], schemas: Schemas) -> list[Call]:
    if not found or not all(_NAME.fullmatch(name.strip()) for name, _ in found):
        raise ValueError("no function")
    made = []
    for name, body in ((name.strip(), body) for name, body in found):
        kinds = schemas.get(name, {}).get("properties", {})
        values = {k.strip(): _value(v, kinds.get(k.strip(), {})) for k, v in argument.findall(body)}
        made.append(Call(name, json.dumps(values, ensure_ascii=False)))
    return made


def _value(text: str, schema: Any) -> Any:
    """Return an argument as its schema has it: templates write texts as they are, and the rest as JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        found = _loads(text)
    except ValueError:
        return text
    return text if kind is None and isinstance(found, str) else found


# ---- name and JSON between marks


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*(?:functions\.)?([^:<\s]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
    r"(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)
_ARGS = re.compile(r"\s*([^\[\]\s]+)(?:\[CALL_ID\][^\[\]]*)?\[ARGS\](.*)", re.DOTALL)


def _kimi(text: str, _schemas: Schemas) -> list[Call]:
    return _some(Call(name, _object(given)) for name, given in _KIMI.findall(text))


def _deepseek(text: str, _schemas: Schemas) -> list[Call]:
    """Read V3.1's name and JSON, or "function", name and fenced JSON of V3 and R1."""

    def call(name: str, given: str) -> Call:
        fenced = _FENCED.fullmatch(given)
        return Call(fenced[1], _object(fenced[2])) if fenced else Call(name.strip(), _object(given))

    return _some(call(*found) for found in _DEEPSEEK.findall(text))


def _args(text: str, schemas: Schemas) -> list[Call]:
    """Read name[ARGS]{…}, once or several times, with the mark between: Mistral's newer form."""
    if "[ARGS]" not in text:
        return _json(text, schemas)

    def call(part: str) -> Call:
        found = _ARGS.fullmatch(part)
        if found is None:
            raise ValueError("no name")
        return Call(found[1], _object(found[2]))

    return _some(call(part) for part in text.split("[TOOL_CALLS]"))


def _some(calls: Iterator[Call]) -> list[Call]:
    found = list(calls)
    if not found:
        raise ValueError("no call")
    return found


# ---- notations


def _python(text: str, _schemas: Schemas) -> list[Call]:
    """Read [f(x="a", y=1), …]: LFM2."""
    try:
        made = ast.parse(text.strip(), mode="eval").body
        calls = made.elts if isinstance(made, ast.List) else [made]
        return [_python_call(call) for call in calls]
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not Python") from None


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("not a call by name")
    arguments = {str(k.arg): _literal(k.value) for k in node.keywords}
    return Call(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


_WORDS = {"true": True, "false": False, "null": None}
_SPOKEN = {"True": "true", "False": "false", "None": "null"}  # Python's words, which templates may write


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, in Python's words or JSON's."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(k or node)): _literal(v) for k, v in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


_QUOTE = '<|"|>'
_GEMMA = re.compile(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", re.DOTALL)
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.\-]*)\s*:")
_BARE_WORD = re.compile(r'([:\[,]\s*)([A-Za-z_][^,:{}\[\]"]*)')


def _gemma(text: str, _schemas: Schemas) -> list[Call]:
    """Read call:f{x:<|"|>text<|"|>,y:[1,2]}: Gemma 4. Texts are between quotes of its own, keys are bare."""
    found = _GEMMA.fullmatch(text)
    if found is None:
        raise ValueError("no call")
    parts = found[2].split(_QUOTE)  # outside, inside, outside ...
    if len(parts) % 2 == 0:
        raise ValueError("a quote is open")
    parts[::2] = [_BARE_WORD.sub(_word, _BARE_KEY.sub(r'\1"\2":', part)) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return [Call(found[1], _object("".join(parts)))]


def _word(found: re.Match[str]) -> str:
    """Return a bare word as JSON: a text, if it is no word of JSON's or Python's."""
    word = found[2].strip()
    return found[1] + (word if word in _WORDS else _SPOKEN.get(word) or json.dumps(word))


HERMES = CallForm(("<tool_call>",), "<tool_call>", "</tool_call>", _json, key="arguments")
MISTRAL = CallForm(("[TOOL_CALLS]",), "[TOOL_CALLS]", None, _json, key="arguments", in_list=True)
BARE = CallForm(("tools", '"parameters"'), "", None, _json, ("<|python_tag|>",), key="parameters")
# What has more signs stands before what shares some of them.
FORMS = (
    CallForm(("<tool_call>", "<function="), "<tool_call>", "</tool_call>", _functions),
    CallForm(("<tool_call>", "<arg_key>"), "<tool_call>", "</tool_call>", _pairs, needs_close=True),
    CallForm(("<minimax:tool_call>",), "<minimax:tool_call>", "</minimax:tool_call>", _invokes),
    CallForm(
        ("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        _kimi, ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    CallForm(
        ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        _deepseek, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    CallForm(("<|tool_call>", "<tool_call|>"), "<|tool_call>", "<tool_call|>", _gemma, (_QUOTE,)),
    CallForm(("<|tool_list_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", _python),
    CallForm(("<|tool_call_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", _python),
    CallForm(("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _functions),
    CallForm(("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", _json),
    CallForm(("<|START_ACTION|>",), "<|START_ACTION|>", "<|END_ACTION|>", _json),
    CallForm(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", None, _args, ("[ARGS]", "[CALL_ID]")),
    CallForm(("<|tool_call|>",), "<|tool_call|>", None, _json),
    HERMES,
    MISTRAL,
    BARE,
)  # fmt: skip


# In templates whose calls are not read yet, though they have the signs of another form: GigaChat, MiniMax M3,
# Glimmer, Command R+.
UNREAD = ("<|role_sep|>", "]<]minimax[>[", "<atem:", "Action:")


def form_of(template: str) -> CallForm | None:
    """Return the form of calls that a template writes; None: it writes none that is known."""
    if any(sign in template for sign in UNREAD):
        return None
    return next((form for form in FORMS if all(sign in template for sign in form.signs)), None)
