"""tool_choice: a call that is asked for comes, of the right function, with arguments that fit its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from agent_shapes import prompt
from scripted import Scripted, scripted
from serving import Served, served

from thermocline.server.api.parsing.answer_parser import AnswerFormat
from thermocline.server.api.schema import ChatRequest
from thermocline.server.api.tools import Offer, answer_grammar
from thermocline.server.http.refusal import Refusal

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SHOW = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | length if tools else '' }}"
HERMES = SHOW + "{# <tool_call> #}"
TEMPLATES = {
    "hermes": HERMES,
    "mistral": SHOW + "{# [TOOL_CALLS] #}",
    "llama": SHOW + '{# {"name": ..., "parameters": ...} #}',
    "thinks": HERMES + "{# <think> #}",
    "coder": HERMES + "{# <function= #}",
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
POINT: dict[str, Any] = {
         "type": "object", "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"$ref": "#/$defs/n"}},
         "required": ["x", "y"], "additionalProperties": False, "$defs": {"n": DIGIT}}  # fmt: skip
ADD = {"type": "object", "properties": {"point": POINT["properties"]["x"], "how": {"enum": ["fast", "slow"]}},
       "required": ["point", "how"], "additionalProperties": False, "$defs": {"n": DIGIT}}  # fmt: skip
SCHEMAS: dict[str, Any] = {"move": POINT, "add_all": ADD, "stop": None}
TOOLS: Any = [
    {"type": "function", "function": {"name": n, **({"parameters": s} if s else {})}}
    for n, s in SCHEMAS.items()
]
STORY: Any = [{"role": "user", "content": "Once upon a time"}]


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(name="story", chat_template=TEMPLATES[request.param]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def fits(call: Any) -> None:
    """A call as clients have it."""
    assert call.type == "function" and call.id
    schema = SCHEMAS[call.function.name] or {"const": {}}
    jsonschema.validate(json.loads(call.function.arguments), schema)


# ---- what comes out


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_a_required_call_comes_whole_and_fits(client: openai.OpenAI, seed: int) -> None:
    done = client.chat.completions.create(
        model="story", messages=STORY, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=300, temperature=1.2, seed=seed,
    ).choices[0]  # fmt: skip
    assert done.finish_reason == "tool_calls" and done.message.content is None, done
    (call,) = done.message.tool_calls or ()
    fits(call)


def test_a_stream_has_the_same_call(client: openai.OpenAI) -> None:
    asked: Any = {"model": "story", "messages": STORY, "tools": TOOLS, "tool_choice": "required", "seed": 4,
                  "max_tokens": 300}  # fmt: skip
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    (want,) = whole.message.tool_calls or ()
    chunks = [
        c.choices[0] for c in client.chat.completions.create(**asked, parallel_tool_calls=False, stream=True)
    ]
    (got,) = [call for c in chunks for call in c.delta.tool_calls or ()]
    assert got.function is not None and (got.index, got.type) == (0, "function") and got.id
    assert (got.function.name, got.function.arguments) == (want.function.name, want.function.arguments)
    assert "".join(c.delta.content or "" for c in chunks) == ""
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_function_is_called_once_and_no_other(client: openai.OpenAI, name: str) -> None:
    """Also where the model may not end its answer by itself."""
    for more in ({}, {"ignore_eos": True}):
        done = client.chat.completions.create(
            model="story", messages=STORY, tools=TOOLS, tool_choice=named(name), max_tokens=300, seed=1,
            extra_body=more,
        ).choices[0]  # fmt: skip
        (call,) = done.message.tool_calls or ()
        assert (call.function.name, done.finish_reason) == (name, "tool_calls")
        fits(call)


def test_one_of_the_allowed_functions_has_to_be_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("stop")]}}
    done = client.chat.completions.create(
        model="story",
        messages=STORY,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=300,
    ).choices[0]
    assert [c.function.name for c in done.message.tool_calls or ()] == ["stop"]


def test_each_of_several_answers_is_a_call(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="story", messages=STORY, tools=TOOLS, tool_choice="required", parallel_tool_calls=False,
        max_tokens=300, n=3, logprobs=True,
    )  # fmt: skip
    for choice in done.choices:
        (call,) = choice.message.tool_calls or ()
        fits(call)


# ---- what may come: grammars, a character at a time

CALL = '<tool_call>\n{"name": "move", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
THINKS, PLAIN = AnswerFormat.of("<tool_call> <think>"), AnswerFormat.of("<tool_call>")
LISTED, BARE = AnswerFormat.of("[TOOL_CALLS]"), AnswerFormat.of('{{ tools }} "parameters"')
POINTS = '{"name": "move", "arguments": {"x": 1, "y": 2}}'
OBJECT = {"type": "json_schema", "json_schema": {"schema": POINT}}


def takes(format: AnswerFormat, text: str, *, thinking: bool = False, **asked: Any) -> bool:
    """Whether the grammar of a request takes this answer, to its end."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    from thermocline.server.api.schema import grammar_of
    from thermocline.text.grammar_worker import _Bytes, limits, problem, source

    r = ChatRequest.model_validate({"messages": STORY, "tools": TOOLS} | asked)
    g = answer_grammar(Offer.of(r, format), format, thinking, grammar_of(r))
    assert g is not None and not problem(g.kind, g.text)
    there = LLTokenizer(TokenizerWrapper(_Bytes()))
    m = LLMatcher(there, source(g.kind, g.text), log_level=0, limits=limits())
    assert not m.is_error(), m.get_error()
    return bool(m.try_consume_tokens(list(text.encode())) == len(text.encode()) and m.is_accepting())


STRICT: Any = [{"type": "function", "function": {"name": "move", "parameters": POINT, "strict": True}}]
MUST, ONE = {"tool_choice": "required"}, {"parallel_tool_calls": False}
ANSWERS: list[tuple[AnswerFormat, dict[str, Any], str, bool]] = [
    (PLAIN, MUST, CALL, True),
    (PLAIN, MUST, f"\n{CALL}\n{CALL}", True),
    (PLAIN, MUST | ONE, f"{CALL}\n{CALL}", False),
    (PLAIN, MUST, f"I will. {CALL}", False),
    (PLAIN, MUST, "", False),
    (PLAIN, MUST, CALL.replace("1", "10"), False),
    (PLAIN, MUST, CALL.replace("move", "remove"), False),
    (PLAIN, {"tool_choice": named("stop")}, CALL, False),
    # thoughts stay free, and what is in them is no call
    (THINKS, MUST, f"<think>\nShould I <tool_call>?\n</think>\n\n{CALL}", True),
    (THINKS, MUST, CALL, True),
    (THINKS, MUST, f"<think>{CALL}</think>", False),
    (THINKS, MUST, f"<think></think>Well. {CALL}", False),
    # where it may call: text, or calls that are as asked
    (PLAIN, ONE, "Hello <tool", True),
    (PLAIN, ONE, f"I will. {CALL}", True),
    (PLAIN, ONE, f"I will. {CALL} {CALL}", False),
    (PLAIN, ONE, CALL.replace("1", "10"), True),
    (PLAIN, {"tools": STRICT}, CALL.replace("1", "10"), False),
    (PLAIN, {"tools": STRICT}, f"{CALL}{CALL}", True),
    (PLAIN, {"tools": STRICT}, "<tool_call>what?</tool_call>", False),
    (THINKS, {"tools": STRICT}, f"<think><tool_call></think>So: {CALL}", True),
    (THINKS, {"tools": STRICT}, f"<think><tool_call></think><think>{CALL}", False),
    # beside a response_format
    (PLAIN, {"response_format": OBJECT}, CALL, True),
    (PLAIN, {"response_format": OBJECT}, '{"x": 1, "y": 2}', True),
    (PLAIN, {"response_format": OBJECT}, "Hello", False),
    (PLAIN, {"response_format": OBJECT} | MUST, '{"x": 1, "y": 2}', False),
    (THINKS, {"response_format": OBJECT, "tools": None}, '<think>Hm</think>\n\n{"x": 1, "y": 2}', True),
    (BARE, {"response_format": OBJECT}, '{"x": 1, "y": 2}', True),
    # the other forms
    (LISTED, MUST, f"[TOOL_CALLS] [{POINTS}, {POINTS}]", True),
    (LISTED, MUST | ONE, f"[TOOL_CALLS][{POINTS}]", True),
    (LISTED, MUST | ONE, f"[TOOL_CALLS][{POINTS}, {POINTS}]", False),
    (LISTED, ONE, f"Well: [TOOL_CALLS][{POINTS}]", True),
    (BARE, MUST, POINTS.replace("arguments", "parameters"), True),
    (BARE, MUST, "Hello", False),
    (BARE, ONE, "Hello {", True),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(ANSWERS)))
def test_an_answer_is_taken_where_it_is_what_was_asked_for(case: int) -> None:
    format, asked, text, want = ANSWERS[case]
    assert takes(format, text, **asked) == want


def test_a_thought_that_the_prompt_began_is_ended_before_the_call() -> None:
    assert takes(THINKS, f"I should.</think>\n\n{CALL}", thinking=True, tool_choice="required")
    assert not takes(THINKS, CALL, thinking=True, tool_choice="required")
    assert takes(THINKS, 'Hm</think>{"x": 1, "y": 2}', thinking=True, response_format=OBJECT, tools=None)


def test_nothing_is_asked_of_a_free_answer() -> None:
    for asked in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}):
        r = ChatRequest.model_validate({"messages": STORY, "tools": TOOLS} | asked)
        assert answer_grammar(Offer.of(r, THINKS), THINKS, False, None) is None


# ---- none


@pytest.fixture
def puppet() -> Iterator[Scripted]:
    with scripted(template=HERMES) as made:
        yield made


def test_none_shows_no_tools_and_calls_none(puppet: Scripted) -> None:
    puppet.engine.answer = [CALL]
    with openai.OpenAI(base_url=f"{puppet.url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": "scripted", "messages": STORY, "tools": TOOLS}
        free = client.chat.completions.create(**asked, tool_choice="auto").choices[0]
        none = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert [c.function.name for c in free.message.tool_calls or ()] == ["move"]
    assert none.message.tool_calls is None and none.message.content == CALL and none.finish_reason == "stop"
    shown, hidden = puppet.engine.prompts
    assert len(shown) > len(hidden), "the template writes how many tools there are"


@pytest.mark.parametrize("asked", [{}, {"parallel_tool_calls": False}, {"response_format": OBJECT}])
def test_a_call_without_its_mark_counts_only_where_no_grammar_is(asked: dict[str, Any]) -> None:
    """A grammar takes it for text, so it would get around a condition on calls."""
    with scripted(template=TEMPLATES["coder"]) as made:
        made.engine.answer = ["<function=stop>\n</function>\n</tool_call>"]
        body = {"messages": STORY, "tools": TOOLS, **asked}
        got = httpx2.post(f"{made.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert got["finish_reason"] == ("stop" if asked else "tool_calls")
    assert ("tool_calls" in got["message"]) == (not asked)


# ---- earlier answers


# As templates are, that ask whether an answer has calls, and take arguments one by one.
ASKS = (
    "{% for m in messages %}[{{ m.role }}]{% if 'tool_calls' in m %}calls: {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}"
)


def told(*, template: str = ASKS, **answer: Any) -> str:
    """Return the prompt of a conversation that goes on after an answer."""
    said: Any = [*STORY, {"role": "assistant", **answer}, {"role": "user", "content": "So?"}]
    with scripted(template=template) as made:
        got = httpx2.post(f"{made.url}/v1/chat/completions", json={"messages": said}, timeout=60)
        assert got.status_code == 200, got.text
        return prompt(made)


def test_an_answer_with_an_empty_list_of_calls_called_nothing() -> None:
    """Clients send it back as they got it from other servers, and templates wrote the head of a call."""
    assert told(content="A fox", tool_calls=[]) == f"[user]{STORY[0]['content']}[assistant]A fox[user]So?"


@pytest.mark.parametrize(
    ("text", "shown"),
    [('{"x": 1}', "x=1"), ("", ""), (" ", ""), ("null", ""), ("{}", ""), ("[1]", "arguments=[1]"),
     ('"so"', 'arguments="so"'), ('{"x": ', 'arguments={"x": '), ("5", "arguments=5")],
)  # fmt: skip
def test_arguments_of_earlier_calls_are_objects_for_templates(text: str, shown: str) -> None:
    """Other arguments made every later turn a 400, and nothing that a client could add mended it."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    want = f"[user]{STORY[0]['content']}[assistant]calls: f({shown})[user]So?"
    assert told(tool_calls=[call]) == want


@pytest.mark.parametrize(("effort", "shown"), [("low", "low"), ("xhigh", "high"), ("max", "high")])
def test_efforts_above_high_are_high_for_templates(effort: str, shown: str) -> None:
    """They were a 400 here, and high in the other two APIs."""
    with scripted(template="{{ reasoning_effort }}") as made:
        body = {"messages": STORY, "reasoning_effort": effort}
        got = httpx2.post(f"{made.url}/v1/chat/completions", json=body, timeout=60)
        assert got.status_code == 200 and prompt(made) == shown


@pytest.mark.parametrize(
    "written", ["'{' + a + '}'", "a + ''", "'' ~ a", "a", "a | string", "a | tojson", "('%s' % a)"]
)
def test_arguments_of_earlier_calls_are_json_where_a_template_writes_them_as_a_text(written: str) -> None:
    """DeepSeek V3's and R1's templates join them to texts: any conversation with a call was a 400."""
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
        f"<{{{{ {written} }}}}>{{% endfor %}}{{% endfor %}}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é", "y": [null]}'}}
    want = '{"x": "é", "y": [null]}'
    want = f"{{{want}}}" if "{" in written else want
    assert told(template=template, tool_calls=[call]) == f"<{want}>"


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"tool_choice": named("fly")}, "tool_choice", "no function 'fly'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        ({"tool_choice": named("move"), "tools": None}, "tool_choice", "no tools"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice", "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
         "response_format", "the JSON schema: "),
        ({"tool_choice": "required", "grammar": 'start: "a"'}, "grammar", "cannot be combined"),
        ({"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "odd", "parameters": {"type": "string"}}}]}, "tools", "'odd'"),
        ({"tool_choice": "required", "tools": [*TOOLS, {"type": "function", "function": {
            "name": "odd", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}]},
         "tools", "the parameters of 'odd': .*uniqueItems"),
        ({"tools": [{"type": "function", "function": {"name": "odd", "strict": True, "parameters": {
            "type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/properties/a"}}}}}]},
         "tools", "the parameters of 'odd': no text fits"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_honoured_are_refused_in_one_line(
    puppet: Scripted, changes: dict[str, Any], param: str, said: str
) -> None:
    with openai.OpenAI(base_url=f"{puppet.url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": "scripted", "messages": STORY, "tools": TOOLS}
        extra = {k: v for k, v in changes.items() if k == "grammar"}
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            client.chat.completions.create(**asked | {k: v for k, v in changes.items() if k not in extra},
                                           extra_body=extra)  # fmt: skip
    assert str(refused.value.param).startswith(param) and "\n" not in str(refused.value.body)
    assert not puppet.engine.asked


@pytest.mark.parametrize("text", ["[" * 990, "[" * 100_000, '{"a":' * 3000, f"[{'[],' * 300_000}[]]"])
def test_arguments_of_earlier_calls_are_bounded_as_the_body_is(puppet: Scripted, text: str) -> None:
    """They are JSON within a string, which the body's own bounds do not see: 990 brackets were a 500."""
    call: Any = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    messages: Any = [*STORY, {"role": "assistant", "tool_calls": [call]}]
    client = openai.OpenAI(base_url=f"{puppet.url}/v1", api_key="any", max_retries=0)
    refused = r"arguments of calls: (lists and objects nested|more than)"
    with client, pytest.raises(openai.BadRequestError, match=refused):
        client.chat.completions.create(model="scripted", messages=messages)


def test_a_template_whose_calls_nobody_knows_has_none() -> None:
    for choice in ("auto", "required", named("move")):
        r = ChatRequest.model_validate({"messages": STORY, "tools": TOOLS, "tool_choice": choice})
        with pytest.raises(Refusal, match="the form of calls in this model's chat template is not supported"):
            Offer.of(r, AnswerFormat.of("{{ messages }}"))
