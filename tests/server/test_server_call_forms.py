"""Calls of functions in the forms of the families, as their templates write them."""

# ruff: noqa: E501  lines as the formats have them

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from test_server_answer_parser import pieces_of, shown

from thermocline.server.api.parsing.answer_parser import AnswerFormat
from thermocline.server.api.parsing.call_forms import FORMS, HERMES, Call
from thermocline.server.api.parsing.harmony import parser_of

ADD = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}}}
SCHEMAS = {"add": ADD, "f.g": {}}
WANT = {"a": 1, "b": "2 <x>\n{3}", "c": [{"d": True}]}
JSON = json.dumps(WANT)

# A form's signs, a call as the family writes it, and another one beside it.
CASES: dict[str, tuple[str, str, str]] = {
    "qwen3.5": ("<tool_call> <function=", f"""<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
{WANT['b']}
</parameter>
<parameter=c>
[{{"d": true}}]
</parameter>
</function>
</tool_call>""", "<tool_call>\n<function=f.g>\n</function>\n</tool_call>"),
    "glm": ("<tool_call> <arg_key>", f"""<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
<arg_key>b</arg_key>
<arg_value>{WANT['b']}</arg_value>
<arg_key>c</arg_key>
<arg_value>[{{"d": true}}]</arg_value>
</tool_call>""", "<tool_call>f.g\n</tool_call>"),
    "minimax": ("<minimax:tool_call>", f"""<minimax:tool_call>
<invoke name="add"><parameter name="a">1</parameter><parameter name="b">{WANT['b']}</parameter>
<parameter name="c">[{{"d": true}}]</parameter></invoke>
</minimax:tool_call>""", '<minimax:tool_call><invoke name="f.g">\n</invoke></minimax:tool_call>'),
    "kimi": ("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
             f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
             "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.g:1<|tool_call_argument_begin|>{}"
             "<|tool_call_end|><|tool_calls_section_end|>"),
    "deepseek v3.1": ("<｜tool▁calls▁begin｜>", f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}"
                      "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f.g<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
                      "<｜tool▁calls▁end｜>"),
    "deepseek r1": ("<｜tool▁calls▁begin｜> ```json", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
                    f"```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f.g\n```json\n{}\n```"
                    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "gemma4": ("<|tool_call> <tool_call|>", '<|tool_call>call:add{a:1,b:<|"|>' + str(WANT["b"]) + '<|"|>,'
               'c:[{<|"|>d<|"|>:true}]}<tool_call|>', "<|tool_call>call:f.g{}<tool_call|>"),
    "lfm2": ("<|tool_list_start|>", r"""<|tool_call_start|>[add(a=1, b="2 <x>\n{3}", c=[{"d": true}])]"""
             "<|tool_call_end|>", "<|tool_call_start|>[f.g()]<|tool_call_end|>"),
    "cohere": ("<|START_ACTION|>", '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "add", "parameters": '
               f"{JSON}}}\n]<|END_ACTION|>",
               '<|START_ACTION|>[{"tool_call_id": "1", "tool_name": "f.g", "parameters": {}}]<|END_ACTION|>'),
    "mistral": ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{JSON}", "[TOOL_CALLS]f.g[ARGS]{}"),
    "granite": ("<|tool_call|>", f'<|tool_call|>[{{"name": "add", "arguments": {JSON}}}]', ""),
    "nemotron nano v2": ("<TOOLCALL>", f'<TOOLCALL>[{{"name": "add", "arguments": {JSON}}}]</TOOLCALL>', ""),
    "seed": ("<seed:tool_call>", f"""<seed:tool_call>
<function=add>
<parameter=a>1</parameter>
<parameter=b>{WANT['b']}</parameter>
<parameter=c>[{{"d": true}}]</parameter>
</function>
</seed:tool_call>""", ""),
    "deepseek v3.2": ("｜DSML｜ function_calls>", f"""<｜DSML｜function_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">{WANT['b']}</｜DSML｜parameter>
<｜DSML｜parameter name="c" string="false">[{{"d": true}}]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>""", '<｜DSML｜function_calls><｜DSML｜invoke name="f.g">\n</｜DSML｜invoke></｜DSML｜function_calls>'),
    "deepseek v4": ("｜DSML｜ tool_calls>", f"""<｜DSML｜tool_calls>
<｜DSML｜invoke name="add">
<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
<｜DSML｜parameter name="b" string="true">{WANT['b']}</｜DSML｜parameter>
<｜DSML｜parameter name="c" string="false">[{{"d": true}}]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>""", '<｜DSML｜tool_calls><｜DSML｜invoke name="f.g">\n</｜DSML｜invoke></｜DSML｜tool_calls>'),
    "gigachat": ("<|role_sep|> <|function_call|>", f'<|function_call|>{{"name": "add", "arguments": {JSON}}}', ""),
    "command r+": ("Action: ```json tool_name", f"""Action:
```json
[
    {{
        "tool_name": "add",
        "parameters": {JSON}
    }}
]```""", 'Action:\n```json\n[{"tool_name": "f.g", "parameters": {}}\n]```'),
    "functionary": ("<function= </function> <|python_tag|>", f"<function=add>{JSON}</function>",
                    "<function=f.g>{}</function>"),
    "hermes": ("<tool_call>", f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>',
               '<tool_call>{"name": "f.g", "arguments": {}}</tool_call>'),
}  # fmt: skip


def read(template: str, text: str, size: int = 7, tools: Any = SCHEMAS) -> list[tuple[str, Any]]:
    """Return the pieces of an answer, the arguments of calls as objects."""
    parts = parser_of(AnswerFormat.of(template), tools=tools, thinking=False)
    pieces = shown(pieces_of(parts, text, size))
    return [(a, json.loads(b)) if a in SCHEMAS else (a, b) for a, b in pieces]


def read_in(template: str, parts: Iterable[str]) -> list[tuple[str, Any]]:
    """Return the pieces of an answer that comes in these parts, neighbours of a text joined."""
    parser = parser_of(AnswerFormat.of(template), tools=SCHEMAS, thinking=False)
    pieces = [piece for part in parts for piece in parser.push(part)]
    joined: list[tuple[str, Any]] = []
    for kind, said in shown([*pieces, *parser.flush()]):
        if kind == "content" and joined and joined[-1][0] == "content":
            joined[-1] = (kind, joined[-1][1] + said)
        else:
            joined.append((kind, json.loads(said) if kind in SCHEMAS else said))
    return joined


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_read_in_its_familys_form(name: str, size: int) -> None:
    template, one, another = CASES[name]
    called: Any = [("content", "Well. "), ("add", WANT), *([("f.g", {})] if another else [])]
    assert read(template, f"Well. {one}{another}", size) == called
    assert read(template, one, size, None) == [("content", one)]


@pytest.mark.parametrize("name", CASES)
def test_what_is_no_call_stays_text(name: str) -> None:
    """Cut off, emptied or filled with something else: nothing is lost, and nothing is invented."""
    template, one, _ = CASES[name]
    form = AnswerFormat.of(template).call
    assert form is not None
    for inside in ("", " so to say ", "[1]", "(" * 500, '{"a":' * 3000, "add{"):
        text = form.opens + inside + (form.closes or "")
        assert read(template, text, 900) == [("content", text)], inside
    for end in range(len(form.opens), len(one) // 2):
        found = read(template, one[:end], 900)
        assert found == [("content", one[:end])] or found[0][0] == "add", one[:end]  # or fewer arguments


def test_each_template_has_the_form_that_it_writes() -> None:
    """Signs that forms share decide nothing: the first whose signs are all there is taken."""
    for template, _, _ in CASES.values():
        form = AnswerFormat.of(f"{{{{ tools }}}} {template}").call
        assert form is not None and set(form.signs) <= set(template.split())
    assert AnswerFormat.of("<tool_call>").call is HERMES
    assert len({id(f.read) for f in FORMS}) == 12


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("5", "integer", 5), ("5", "string", "5"), ("5", None, 5), ('"5"', None, '"5"'), ("x y", "integer", "x y"),
     ("null", "string", "null"), ('{"a": 1}', "object", {"a": 1})],
)  # fmt: skip
def test_an_argument_is_of_its_schemas_type(text: str, kind: str | None, value: Any) -> None:
    schema = {"add": {"properties": {"a": {} if kind is None else {"type": kind}}}}
    call = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert read(CASES["qwen3.5"][0], call, tools=schema) == [("add", {"a": value})]


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("True", "boolean", True), ("FALSE", "boolean", False), ("None", ["integer", "null"], None),
        ("NULL", "null", None), ("None", "integer", "None"), ("True", ["string", "boolean"], "True"),
        ("True", None, "True"), ("None", "object", "None"), (" True\n", "boolean", True),
        ("{'a': True, 'b': [None, 'x']}", "object", {"a": True, "b": [None, "x"]}),
        ("['a', {\"b\": False}]", "array", ["a", {"b": False}]), ("['a']", "object", "['a']"),
        ("1_000", "integer", 1000), ("+5", "number", 5), ("'a'", "integer", "'a'"), ("1+2j", "null", "1+2j"),
        ("(1, 2)", "array", "(1, 2)"), ("[(1, 2), 'a']", "array", "[(1, 2), 'a']"), ("{1, 2}", "array", "{1, 2}"),
        ("{1: 2}", "object", "{1: 2}"), ("[b'a']", "array", "[b'a']"), ("['a', 1e999]", "array", "['a', 1e999]"),
        ("f(1)", "integer", "f(1)"), ("[" * 3000, "array", "[" * 3000), ("-" * 60000 + "1", "integer", "-" * 60000 + "1"),
        ("['a'," + "1," * 40000 + "]", "array", "['a'," + "1," * 40000 + "]"),
        (r"['\d']", "array", [r"\d"]), ("[0if'a']", "array", "[0if'a']"),
    ],
)  # fmt: skip
def test_an_argument_may_be_in_pythons_words(
    text: str, type_: Any, value: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """Qwen's templates print earlier arguments as Python does, so its models write True where JSON has true."""
    schema = {"add": {"properties": {"a": {} if type_ is None else {"type": type_}}}}
    call = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert read(CASES["qwen3.5"][0], call, 10**6, schema) == [("add", {"a": value})]
    assert not recwarn.list


def test_pythons_words_are_taken_where_one_of_several_schemas_is_of_their_kind() -> None:
    kinds = {"a": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}
    tools = {"add": {"properties": kinds, "$defs": {"n": {"type": "array", "items": {}}}}}
    for text, value in (("None", None), ("[True]", [True]), ("False", "False")):
        call = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
        assert read(CASES["qwen3.5"][0], call, tools=tools) == [("add", {"a": value})]


@pytest.mark.parametrize(
    ("inside", "value"),
    [("None", None), ("some words", "some words"), ("-2.5", -2.5), ("[true,{d:False}]", [True, {"d": False}]),
     ('<|"|>}},{<|"|>', "}},{"), ('{<|"|>a b<|"|>:x}', {"a b": "x"})],
)  # fmt: skip
def test_gemmas_words_need_no_quotes(inside: str, value: Any) -> None:
    assert read(CASES["gemma4"][0], f"<|tool_call>call:add{{a:{inside}}}<tool_call|>") == [
        ("add", {"a": value})
    ]


@pytest.mark.parametrize(
    ("template", "text"),
    [("<|channel>thought", "<|channel>thought\nHm.\n<channel|>Four."), ("</think>", "<think>\nHm.\n</think>Four."),
     ("<|START_THINKING|>", "<|START_THINKING|>\nHm.\n<|END_THINKING|>Four.")],
)  # fmt: skip
def test_a_thought_is_between_the_marks_of_its_family(template: str, text: str) -> None:
    assert read(template, text) == [("reasoning_content", "\nHm.\n"), ("content", "Four.")]


def test_the_tokens_of_a_familys_marks_are_read() -> None:
    """A special token is no text, unless it is a mark."""
    for name in ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'):
        marks = parser_of(
            AnswerFormat.of("<|channel>thought <|tool_call> <tool_call|>"), tools=None, thinking=False
        ).marks
        assert name in marks


def test_ids_are_what_mistrals_templates_take() -> None:
    (call,) = pieces_of(parser_of(AnswerFormat.of("[TOOL_CALLS]"), tools={}, thinking=False),
                        '[TOOL_CALLS][{"name": "add", "arguments": {}}]', 9)  # fmt: skip
    assert not isinstance(call, tuple) and len(call.id) == 9 and call.id.isalnum()


def test_a_call_keeps_the_id_that_its_familys_template_wants_again() -> None:
    def ids(name: str, text: str) -> list[str]:
        parts = parser_of(AnswerFormat.of(CASES[name][0]), tools=SCHEMAS, thinking=False)
        return [p.id for p in pieces_of(parts, text, 11) if not isinstance(p, tuple)]

    assert ids("kimi", CASES["kimi"][1] + CASES["kimi"][2]) == ["functions.add:0", "functions.f.g:1"]
    assert ids("mistral", CASES["mistral"][1]) == ["abcdefghi"]
    (new,) = ids("mistral", "[TOOL_CALLS]add[CALL_ID]no[ARGS]{}")
    assert len(new) == 9 and new.isalnum()


@pytest.mark.parametrize(
    ("text", "value"),
    [("null", None), ("5", "5"), ("x", "x"), ("true", True), ("[1]", "[1]"), ('"a"', '"a"')],
)
def test_a_text_that_may_be_something_else_is_that_where_it_is_written_so(text: str, value: Any) -> None:
    kinds = {"a": {"anyOf": [{"$ref": "#/$defs/t"}, {"type": ["null", "boolean"]}]}}
    tools = {"add": {"properties": kinds, "$defs": {"t": {"type": "string"}}}}
    call = f"<tool_call><function=add><parameter=a>\n{text}\n</parameter></function></tool_call>"
    assert read(CASES["qwen3.5"][0], call, tools=tools) == [("add", {"a": value})]


CODER = CASES["qwen3.5"][0]
ADDED = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
UNOPENED: list[tuple[str, list[tuple[str, Any]]]] = [
    (f"{ADDED}\n</tool_call>", [("add", {"a": 1})]),
    (f"Well.\n\n{ADDED}", [("content", "Well.\n\n"), ("add", {"a": 1})]),
    (f"{ADDED}</tool_call>\n{ADDED}\n", [("add", {"a": 1}), ("add", {"a": 1})]),
    (f"{ADDED}\n<function=f.g>\n</function> </tool_call>", [("add", {"a": 1}), ("f.g", {})]),
    (f"{ADDED}\n</tool_call>\n<tool_call>{ADDED}</tool_call>", [("add", {"a": 1}), ("add", {"a": 1})]),
    (f"<tool_call>{ADDED}</tool_call>\n{ADDED}</tool_call>", [("add", {"a": 1}), ("add", {"a": 1})]),
    (f"{ADDED}</tool_call></tool_call>", [("add", {"a": 1}), ("content", "</tool_call>")]),
    (f"{ADDED}\n so", [("add", {"a": 1}), ("content", "\n so")]),
    (f"{ADDED}\n</tool_", [("add", {"a": 1}), ("content", "\n</tool_")]),
    (f"<tool_<{ADDED}", [("content", "<tool_<"), ("add", {"a": 1})]),
    (f"<function=<tool_call>{ADDED}</tool_call>", [("content", "<function="), ("add", {"a": 1})]),
    *((text, [("content", text)]) for text in (
        "<function=sub>\n</function>\n</tool_call>", "See <function=add", "<function=add >x</function>",
        ADDED.removesuffix("</function>"), "<function=add></tool_call>", "</function></tool_call>")),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(UNOPENED)))
def test_a_call_that_lacks_its_opening_mark_is_read_wherever_the_borders_are(case: int) -> None:
    """Qwen3-Coder often begins at <function=NAME> and still writes the mark that closes a call."""
    text, want = UNOPENED[case]
    assert read(CODER, text, len(text)) == want
    for first in range(len(text)):
        for second in {first + 1, first + 5, len(text)}:
            parts = (text[:first], text[first:second], text[second:])
            assert read_in(CODER, parts) == want, (first, second)
    assert read(CODER, text, 1) == want


def test_a_call_without_its_opening_mark_is_text_where_no_tools_are_or_a_grammar_is() -> None:
    assert read(CODER, f"{ADDED}\n</tool_call>", 3, None) == [("content", f"{ADDED}\n</tool_call>")]
    bound = parser_of(AnswerFormat.of(CODER), tools=SCHEMAS, thinking=False, free=False)
    assert pieces_of(bound, ADDED, 3) == [("content", ADDED)]


@pytest.mark.parametrize("name", CASES)
def test_random_borders_change_nothing(name: str) -> None:
    """A stream of any answer, calls or not, says what the whole does."""
    template, one, another = CASES[name]
    draw = random.Random(name)
    for _ in range(40):
        parts = [
            draw.choice([one, another, "Well. ", "<", one[: draw.randrange(len(one))]]) for _ in range(4)
        ]
        text = "".join(parts)
        whole = read(template, text, len(text) + 1)
        pieces: list[str] = []
        at = 0
        while at < len(text):
            size = draw.choice([1, 2, 3, 10, 50])
            pieces.append(text[at : at + size])
            at += size
        assert read_in(template, pieces) == whole, text


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (r'{"a": "\ud83d\ude00"}', r'{"a": "\ud83d\ude00"}'),
        (r'{"a": "\ud83d"}', r'{"a": "\ufffd"}'),
        (r'{"a": "\ud83d\ud83d\ude00"}', r'{"a": "\ufffd\ud83d\ude00"}'),
        (r'{"a": "\ude00\ud83d"}', r'{"a": "\ufffd\ufffd"}'),
        (r'{"a": "\\ud83d"}', r'{"a": "\\ud83d"}'),
        ('{"a": "\ud83d"}', '{"a": "\ufffd"}'),
    ],
)
def test_half_a_pair_of_surrogates_is_replaced(given: str, want: str) -> None:
    call = Call("f\udc00", given)
    assert (call.name, call.arguments) == ("f\ufffd", want)
