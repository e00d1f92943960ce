"""The forms in which models write calls of functions: JSON, or a notation of their family's own.

A form is known by what the model's chat template writes. `read` takes what lies between its marks.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thermocline.text.grammar import CallText, Notation
from thermocline.text.schema_kinds import kind_of, kinds

Schemas = Mapping[str, Mapping[str, Any]]  # a function's name -> the JSON schema of its arguments
_ID = string.ascii_letters + string.digits
_LONGEST_LITERAL = 64 << 10  # characters: Python reads 32,000 numbers in 0.2 s, and everybody waits


def _new_id() -> str:
    """Return nine letters and digits: Mistral's templates refuse other ids, and no client minds."""
    return "".join(secrets.choice(_ID) for _ in range(9))


# JSON can spell half of a pair of surrogates. UTF-8 cannot hold it, so no server takes it back.
_HALVES = re.compile("[\ud800-\udfff]")
_ESCAPES = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)", re.DOTALL)


def _unpaired(found: re.Match[str]) -> str:
    return "\\ufffd" if found[1] else found[0]


@dataclass(frozen=True)
class Call:
    """Half of a pair of surrogates in a name or in arguments is replaced by U+FFFD."""

    name: str
    arguments: str  # JSON
    id: str = field(default_factory=_new_id)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _HALVES.sub("\ufffd", self.name))
        arguments = _ESCAPES.sub(_unpaired, _HALVES.sub("\ufffd", self.arguments))
        object.__setattr__(self, "arguments", arguments)


@dataclass(frozen=True)
class CallForm:
    """A form of calls. Its text has no call where `read` raises ValueError."""

    signs: tuple[str, ...]  # all are in the templates that have it
    opens: str  # "": a call is the whole answer
    closes: str | None  # None: the calls go on to the end
    read: Callable[[str, Schemas], list[Call]]
    written: CallText  # so that a grammar can ask for calls
    marks: tuple[str, ...] = ()  # further special tokens whose names are read
    needs_close: bool = False  # a part of a call may look like a whole one
    # How a call that lacks `opens` begins, with a function's name, and ends. `closes` may still follow.
    unopened: tuple[str, str] | None = None

    def begins(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the texts with which a call may begin, if these functions are there to be called."""
        if self.unopened is None:
            return (self.opens,)
        return (self.opens, *(self.unopened[0].format(n) for n in names if _NAME.fullmatch(n)))


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
    return Call(name, json_object(arguments) if isinstance(arguments, str) else json.dumps(arguments))


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def json_object(text: str) -> str:
    """Return a text that is a JSON object."""
    if not isinstance(_loads(text), dict):
        raise ValueError("not an object")
    return text.strip()


# ---- arguments one by one


_NAME = re.compile(r"[\w.\-]+")
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_TIGHT_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_INVOKE = re.compile(r'<invoke name="([^"]+)">(.*?)</invoke>', re.DOTALL)
_NAMED_PARAMETER = re.compile(r'<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _functions(text: str, schemas: Schemas) -> list[Call]:
    """Read <function=f><parameter=x>…</parameter></function>: Qwen3-Coder, Qwen 3.5, Nemotron 3."""
    return _each(_FUNCTION.findall(text), _PARAMETER, schemas)


def _tight_functions(text: str, schemas: Schemas) -> list[Call]:
    """Read the same without line breaks around values: Seed."""
    return _each(_FUNCTION.findall(text), _TIGHT_PARAMETER, schemas)


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
        about = schemas.get(name, {})
        parts = about.get("properties") or {}
        values = {k.strip(): _value(v, parts.get(k.strip(), {}), about) for k, v in argument.findall(body)}
        made.append(Call(name, json.dumps(values, ensure_ascii=False)))
    return made


def _value(text: str, schema: Any, root: Any) -> Any:
    """Return an argument as its schema has it: templates write texts as they are, and the rest as JSON."""
    wanted = kinds(schema, root)
    if wanted == {"string"}:
        return text
    try:
        found = _loads(text)
    except ValueError:
        return text if "string" in wanted else _python_words(text, wanted)
    if "string" in wanted:
        return found if _is_of(found, wanted - {"string"}) else text
    return text if not wanted and isinstance(found, str) else found


def _is_of(value: Any, wanted: set[str]) -> bool:
    kind = kind_of(value)
    return kind in wanted or (kind == "integer" and "number" in wanted)


def _python_words(text: str, wanted: set[str]) -> Any:
    """Return a value of a kind that is wanted, if `text` is one in Python's words, or else the text.

    Models write those because templates print earlier arguments so.
    """
    word = text.strip()
    if len(word) > _LONGEST_LITERAL:
        return text
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes, a line in the log for each
            found = _ANY_CASE[word.lower()] if word.lower() in _ANY_CASE else ast.literal_eval(word)
        # Sets, tuples, bytes, numbers that are not finite and keys that are no texts are not JSON's.
        is_json = json.loads(json.dumps(found, allow_nan=False)) == found
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return found if is_json and _is_of(found, wanted) else text


# ---- name and JSON between marks


_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*((?:functions\.)?([^:<\s]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    r"(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)
_DEEPSEEK = re.compile("<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_FENCED = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)
_ARGS = re.compile(r"\s*([^\[\]\s]+)(?:\[CALL_ID\]([^\[\]]*))?\[ARGS\](.*)", re.DOTALL)

_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")


def _kimi(text: str, _schemas: Schemas) -> list[Call]:
    """Read functions.f:0 and JSON: Kimi-K2, whose template wants that whole name as the call's id again."""

    def call(id: str, name: str, given: str) -> Call:
        return Call(name, json_object(given), id if ":" in id else _new_id())

    return _some(call(*found) for found in _KIMI.findall(text))


def _deepseek(text: str, _schemas: Schemas) -> list[Call]:
    """Read V3.1's name and JSON, or "function", name and fenced JSON of V3 and R1."""

    def call(name: str, given: str) -> Call:
        fenced = _FENCED.fullmatch(given)
        return Call(fenced[1], json_object(fenced[2])) if fenced else Call(name.strip(), json_object(given))

    return _some(call(*found) for found in _DEEPSEEK.findall(text))


def _args(text: str, schemas: Schemas) -> list[Call]:
    """Read name[ARGS]{…}, once or several times, with the mark between: Mistral's newer form."""
    if "[ARGS]" not in text:
        return _json(text, schemas)

    def call(part: str) -> Call:
        found = _ARGS.fullmatch(part)
        if found is None:
            raise ValueError("no name")
        id = (found[2] or "").strip()
        return (
            Call(found[1], json_object(found[3]), id)
            if _MISTRAL_ID.fullmatch(id)
            else Call(found[1], json_object(found[3]))
        )

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
        return _some(_python_call(call, text.strip()) for call in calls)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("not Python") from None


def _python_call(node: ast.expr, text: str) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise ValueError("not a call by name")
    arguments = {str(k.arg): _python_value(k.value, text) for k in node.keywords}
    return Call(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


def _python_value(node: ast.expr, text: str) -> Any:
    """Return the value of a literal. JSON is read as such: its escapes differ from Python's."""
    try:
        return _loads(ast.get_source_segment(text, node) or "")
    except ValueError:
        return _literal(node)


_WORDS = {"true": True, "false": False, "null": None}
_ANY_CASE = _WORDS | {"none": None}
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
    return [Call(found[1], json_object("".join(parts)))]


def _word(found: re.Match[str]) -> str:
    """Return a bare word as JSON: a text, if it is no word of JSON's or Python's."""
    word = found[2].strip()
    return found[1] + (word if word in _WORDS else _SPOKEN.get(word) or json.dumps(word))


# ---- DSML, and JSON behind a name


_DSML = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)


def _dsml(text: str, _schemas: Schemas) -> list[Call]:
    """Read <｜DSML｜invoke name="f">, whose parameters say whether they are texts: DeepSeek-V3.2, V4."""

    def call(name: str, body: str) -> Call:
        given = {k: v if is_text == "true" else _loads(v) for k, is_text, v in _DSML_PARAMETER.findall(body)}
        return Call(name, json.dumps(given, ensure_ascii=False))

    return _some(call(*found) for found in _DSML.findall(text))


def _behind_name(text: str, _schemas: Schemas) -> list[Call]:
    """Read f>{…}: Functionary 3.1."""
    name, met, given = text.partition(">")
    if not (met and _NAME.fullmatch(name.strip())):
        raise ValueError("no function")
    return [Call(name.strip(), json_object(given))]


# ---- all forms


_LINES = Notation("<parameter=$key>\n$value\n</parameter>\n")
_TIGHT = Notation("<parameter=$key>$value</parameter>~")
_FUNCTION_CALL = "<function=$name>\n$arguments</function>"
_NAMED = '{~"name"~:~$string~,~"arguments"~:~$arguments~}'
_ACTION = '{~"tool_name"~:~$string~,~"parameters"~:~$arguments~}'
_LIST = "[~$calls~]"
_IN_LIST = CallText(_NAMED, _LIST, "~,~")
_PYTHON = CallText("$name($arguments)", "[$calls]", ",~", Notation("$key=$value", ",~", None))
_DSML_TEXT = CallText(
    '<｜DSML｜invoke name="$name">~$arguments</｜DSML｜invoke>', "$calls", "~",
    Notation('<｜DSML｜parameter name="$key" string="$is_text">$value</｜DSML｜parameter>~'),
)  # fmt: skip
_V3_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_V3_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"

HERMES = CallForm(("<tool_call>",), "<tool_call>", "</tool_call>", _json, CallText(_NAMED))
MISTRAL = CallForm(("[TOOL_CALLS]",), "[TOOL_CALLS]", None, _json, _IN_LIST)
BARE = CallForm(
    ("tools", '"parameters"'), "", None, _json,
    CallText('{~"name"~:~$string~,~"parameters"~:~$arguments~}'), ("<|python_tag|>",),
)  # fmt: skip
# What has more signs stands before what shares some of them.
FORMS = (
    CallForm(("<tool_call>", "<function="), "<tool_call>", "</tool_call>", _functions,
             CallText(_FUNCTION_CALL, notation=_LINES), unopened=("<function={}>", "</function>")),
    CallForm(("<tool_call>", "<arg_key>"), "<tool_call>", "</tool_call>", _pairs,
             CallText("$name~$arguments", notation=Notation(
                 "<arg_key>$key</arg_key>~<arg_value>$value</arg_value>~")), needs_close=True),
    CallForm(("<minimax:tool_call>",), "<minimax:tool_call>", "</minimax:tool_call>", _invokes,
             CallText('<invoke name="$name">~$arguments</invoke>', "$calls", "~", Notation(
                 '<parameter name="$key">$value</parameter>~'))),
    CallForm(("<|tool_calls_section_begin|>",), "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
             _kimi,
             CallText("<|tool_call_begin|>functions.$name:$digits<|tool_call_argument_begin|>$arguments"
                      "<|tool_call_end|>", "$calls", ""),
             ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")),
    CallForm(("<｜tool▁calls▁begin｜>", "```json"), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
             _deepseek,
             CallText(_V3_CALL.format("function<｜tool▁sep｜>$name\n```json\n$arguments\n```"), "$calls"),
             _V3_MARKS),
    CallForm(("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek,
             CallText(_V3_CALL.format("$name<｜tool▁sep｜>$arguments"), "$calls", ""), _V3_MARKS),
    CallForm(("｜DSML｜", "function_calls>"), "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", _dsml,
             _DSML_TEXT, ("｜DSML｜",)),
    CallForm(("｜DSML｜", "tool_calls>"), "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", _dsml,
             _DSML_TEXT, ("｜DSML｜",)),
    CallForm(("<|tool_call>", "<tool_call|>"), "<|tool_call>", "<tool_call|>", _gemma,
             CallText("call:$name{$arguments}",
                      notation=Notation("$key:$value", ",", (_QUOTE, _QUOTE), True)),
             (_QUOTE,)),
    CallForm(("<|tool_list_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", _python, _PYTHON),
    CallForm(("<|tool_call_start|>",), "<|tool_call_start|>", "<|tool_call_end|>", _python, _PYTHON),
    CallForm(("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", _tight_functions,
             CallText(_FUNCTION_CALL, notation=_TIGHT)),
    CallForm(("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", _json, _IN_LIST),
    CallForm(("<|START_ACTION|>",), "<|START_ACTION|>", "<|END_ACTION|>", _json,
             CallText(_ACTION.replace("{~", '{~"tool_call_id"~:~"$digits"~,~', 1), _LIST, "~,~")),
    CallForm(("Action:", "```json", "tool_name"), "Action:\n```json", "```", _json,
             CallText(_ACTION, _LIST, "~,~")),
    CallForm(("<|role_sep|>", "<|function_call|>"), "<|function_call|>", None, _json, CallText(_NAMED)),
    CallForm(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), "[TOOL_CALLS]", None, _args,
             CallText("$name[CALL_ID]$id[ARGS]$arguments"), ("[ARGS]", "[CALL_ID]")),
    CallForm(("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]", None, _args, CallText("$name[ARGS]$arguments"),
             ("[ARGS]", "[CALL_ID]")),
    CallForm(("<|tool_call|>",), "<|tool_call|>", None, _json, _IN_LIST),
    CallForm(("<function=", "</function>", "<|python_tag|>"), "<function=", "</function>", _behind_name,
             CallText("$name>$arguments")),
    HERMES,
    MISTRAL,
    BARE,
)  # fmt: skip


# In templates whose calls are not read yet, though they have the signs of another form: MiniMax M3, Glimmer,
# GigaChat 3.0 (a call is a message of its own).
UNREAD = ("]<]minimax[>[", "<atem:", "'function call'")


def form_of(template: str) -> CallForm | None:
    """Return the form of calls that a template writes; None: it writes none that is known."""
    if any(sign in template for sign in UNREAD):
        return None
    return next((form for form in FORMS if all(sign in template for sign in form.signs)), None)
