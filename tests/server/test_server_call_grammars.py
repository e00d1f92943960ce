"""Conditions on calls hold in every family's form: what a random model can write is a call that fits."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_server_answer_parser import pieces_of, shown
from test_server_call_forms import CASES

from thermocline.errors import UsageError
from thermocline.server.api.parsing.answer_parser import AnswerFormat
from thermocline.server.api.parsing.call_forms import FORMS, Call
from thermocline.server.api.parsing.harmony import HarmonyParser, parser_of
from thermocline.server.api.schema import ChatRequest
from thermocline.server.api.tools import Offer, answer_grammar
from thermocline.text.grammar import Grammar
from thermocline.text.grammar_matcher import GrammarConstraint, Grammars

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

STORY: Any = [{"role": "user", "content": "Once upon a time"}]
MODES = {"enum": ["fast", "slow </", "", "null", "7"]}
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What to look for."},
        "mode": MODES,
        "code": {"type": "string", "pattern": r"^[A-Z]{2}(/|-)[0-9]+[/\/.\n]?$|^none"},
        "short": {"type": "string", "minLength": 2, "maxLength": 6},
        "day": {"type": "string", "format": "date"},
        "most": {"type": "integer", "minimum": 3, "maximum": 40},
        "share": {"type": ["number", "null"]},
        "exact": {"type": "boolean"},
        "where": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "name": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 1, "maxItems": 3},
        "either": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "array", "maxItems": 2,
                             "items": {"type": "integer", "minimum": 0, "maximum": 9}}]},
    },
    "required": ["text", "mode", "code", "short", "most", "where", "tags"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "of": {"enum": ["a b", "c"]},
                           "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 1}},
            "required": ["x"], "additionalProperties": False,
        }
    },
}  # fmt: skip
LOOSE = {"type": "object", "properties": {"a": {"type": "boolean"}},
         "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99}}  # fmt: skip
SCHEMAS: dict[str, Any] = {"find": FIND, "find_all": LOOSE, "stop": None}
TOOLS = [
    {"type": "function", "function": {"name": n, **({"parameters": s} if s else {})}}
    for n, s in SCHEMAS.items()
]
HARMONY = "<|start|>assistant<|channel|>analysis<|message|>{{ tools }}<|call|>"
TEMPLATES = {name: case[0] for name, case in CASES.items()} | {
    "harmony": HARMONY,
    "lfm2.5": "<|tool_call_start|>",
    "mistral small": "[TOOL_CALLS] [ARGS] [CALL_ID]",
    "mistral nemo": "[TOOL_CALLS]",
    "llama": '{{ tools }} "parameters"',
}
ENDS = (
    "</parameter>",
    "\n</parameter>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    '<|"|>',
    "<|end|><|start|>assistant",
    "</",
    '"',
    "]",
)


class Vocabulary:
    """A tokenizer of 256 bytes and some control tokens."""

    def __init__(self, controls: Sequence[str]) -> None:
        self.names = [*controls, "</s>"]
        self.vocab_size, self.eos_ids = 256 + len(self.names), (255 + len(self.names),)

    def is_control(self, token: int) -> bool:
        return token >= 256

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def name(self, token: int) -> str:
        return self.names[token - 256] if token >= 256 else f"byte {token}"

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return list(text.encode())

    def spelled(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else self.name(token).encode()


def marks_of(template: str) -> list[str]:
    """Return what a family's marks are as control tokens: those between bars, as vocabularies have them."""
    format = AnswerFormat.of(template)
    if format.harmony:
        return list(HarmonyParser.marks)
    assert format.call is not None
    names = (format.call.opens, format.call.closes, *format.call.marks)
    return [
        n
        for n in dict.fromkeys(names)
        if n and ("|" in n or "｜" in n or n[0] == "[") and "DSML｜" not in n[2:]
    ]


def grammar(template: str, **asked: Any) -> Grammar:
    format = AnswerFormat.of(template)
    r = ChatRequest.model_validate({"messages": STORY, "tools": TOOLS} | asked)
    made = answer_grammar(Offer.of(r, format), format, False, None)
    assert made is not None
    return made


def start(template: str, controls: Sequence[str], **asked: Any) -> tuple[GrammarConstraint, Vocabulary]:
    vocabulary: Any = Vocabulary(controls)
    return Grammars(vocabulary).constraint(grammar(template, **asked)), vocabulary


def written(constraint: GrammarConstraint, vocabulary: Vocabulary, draw: random.Random) -> str:
    """Return what a random model writes; it likes letters, digits and what ends things."""
    likes = np.ones(vocabulary.vocab_size)
    likes[list(b'abz059</>"|]}`')] = 8
    likes[128:256] = 0.02
    likes[:32] = 0.1
    likes[256:] = 40
    said, ends = b"", [e.encode() for e in ENDS]
    plan = b""  # a mark that it is about to spell out, as no random letters would
    for _ in range(6000):
        allowed = constraint.allowed()
        assert allowed.any(), said
        chances = allowed * likes
        if b"<|constrain|>" in said:  # in JSON: a mark that is spelled out in a text would be read as one
            ends = [b'"', b"]"]
        plan = plan if plan or draw.random() > 0.1 else draw.choice(ends)
        if plan and allowed[plan[0]]:
            token, plan = plan[0], plan[1:]
        else:
            token, plan = draw.choices(range(len(chances)), chances.tolist())[0], b""
        constraint.accept(token)
        if token in vocabulary.eos_ids:
            return said.decode()
        said += vocabulary.spelled(token)
        if constraint.is_complete():
            return said.decode()
    raise AssertionError(f"no end: {said[-300:]!r}")


def calls_in(template: str, text: str, draw: random.Random) -> list[tuple[str, Any]]:
    """Return the calls of an answer that has nothing else, read in whole and in random pieces."""
    format, schemas = AnswerFormat.of(template), {n: s or {} for n, s in SCHEMAS.items()}
    whole = pieces_of(parser_of(format, tools=schemas, thinking=False), text, len(text))
    for size in (1, draw.randrange(2, 12)):
        streamed = pieces_of(parser_of(format, tools=schemas, thinking=False), text, size)
        assert shown(streamed) == shown(whole)
    texts = [p for p in whole if not isinstance(p, Call) and p[0] == "content"]
    assert all(not text.strip() for _, text in texts), (text, whole)
    return [(p.name, json.loads(p.arguments)) for p in whole if isinstance(p, Call)]


def test_every_form_is_here() -> None:
    assert {id(AnswerFormat.of(t).call) for t in TEMPLATES.values()} - {id(None)} == set(map(id, FORMS))


@pytest.mark.parametrize("spelled", [False, True], ids=["tokens", "spelled"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_random_model_writes_calls_that_fit(name: str, spelled: bool) -> None:
    template = TEMPLATES[name]
    controls = [] if spelled else marks_of(template)
    if not (spelled or controls):
        pytest.skip("no mark of this form is a token")
    for seed in range(6):
        draw = random.Random(f"{name} {seed}")
        choice = {"tool_choice": {"type": "function", "function": {"name": list(SCHEMAS)[seed % 3]}}}
        asked = choice if seed < 5 else {"tool_choice": "required", "parallel_tool_calls": False}
        text = written(*start(template, controls, **asked), draw)
        made = calls_in(template, text, draw)
        assert len(made) == 1, text
        called, arguments = made[0]
        assert seed == 5 or called == list(SCHEMAS)[seed % 3]
        jsonschema.validate(arguments, SCHEMAS[called] or {"const": {}})


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_no_such_call_is_masked(name: str) -> None:
    """An answer without a call, and another function's name."""
    template = TEMPLATES[name]
    controls = marks_of(template)
    constraint, vocabulary = start(template, controls, tool_choice="required")
    allowed = constraint.allowed()
    assert not allowed[ord("H")] and not allowed[vocabulary.eos_ids[0]] and allowed.any()
    one = CASES.get(name, ("", "", ""))[1]
    if one:  # of a function that is not among these
        constraint, _ = start(template, [], tool_choice="required")
        text = one.encode()
        taken = 0
        while taken < len(text) and constraint.allowed()[text[taken]]:
            constraint.accept(text[taken])
            taken += 1
        assert b"add" not in text[:taken]


def strict(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    function = {"name": name, "strict": True, "parameters": {"type": "object", **parameters}}
    return {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("template", "parameters", "said"),
    [
        ("qwen3.5", {"properties": {"a": {"type": "string", "format": "ipv6"}}}, "format 'ipv6' is not one"),
        ("qwen3.5", {"properties": {"a": {"minimum": 3}}}, "'minimum' has to name its type"),
        ("qwen3.5", {"anyOf": [{"required": ["a"]}]}, "'f': 'anyOf' cannot be enforced in this model's form"),
        ("glm", {"properties": {"a": {"type": "string", "pattern": "a", "maxLength": 3}}}, "all but one"),
        ("glm", {"properties": {"a b>": {}}}, "'a b>' cannot be written as a name"),
        ("glm", {"required": ["a"], "additionalProperties": False}, "required property 'a'"),
        ("minimax", {"properties": {"a": {"$ref": "#/$defs/x"}}}, "x"),
        ("lfm2", {"properties": {"from": {}}}, "'from' cannot be written as a name"),
    ],
)  # fmt: skip
def test_a_schema_that_a_form_cannot_hold_is_refused_by_name(
    template: str, parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        start(TEMPLATES[template], [], **strict(parameters))
    assert "\n" not in str(refused.value)


def test_a_name_that_a_form_cannot_write_is_refused() -> None:
    for template, refuses in (("qwen3.5", True), ("kimi", True), ("hermes", False)):
        if not refuses:
            assert start(TEMPLATES[template], [], **strict({}, "a b"))
            continue
        with pytest.raises(UsageError, match="function 'a b': a name that this model's form"):
            start(TEMPLATES[template], [], **strict({}, "a b"))


def takes(template: str, text: str, **asked: Any) -> bool:
    constraint, vocabulary = start(template, [], **asked)
    for byte in text.encode():
        if not constraint.allowed()[byte]:
            return False
        constraint.accept(byte)
    return constraint.is_complete() or bool(constraint.allowed()[vocabulary.eos_ids[0]])


CODER = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
A_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Four."
STOP = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
ONE = {"parallel_tool_calls": False}
MUST = {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("template", "asked", "text", "want"),
    [
        ("<tool_call> <function=", MUST, CODER + CODER, True),
        ("<tool_call> <function=", MUST | ONE, CODER + CODER, False),
        ("<tool_call> <function=", MUST, f"Well. {CODER}", False),
        ("<tool_call> <function=", ONE, f"Well. {CODER}", True),
        ("<tool_call> <function=", ONE, "Well, <tool", True),
        ("<tool_call> <function= <think>", MUST, f"<think>Hm</think>\n\n{CODER}", True),
        ("<tool_call> <function= <seed:think>", MUST, f"<seed:think>Hm</seed:think>\n\n{CODER}", True),
        (HARMONY, MUST, A_THOUGHT + STOP, True),
        (HARMONY, MUST, STOP, True),
        (HARMONY, MUST, A_THOUGHT + FINAL, False),
        (HARMONY, MUST, FINAL, False),
        (HARMONY, ONE, A_THOUGHT + FINAL, True),
        (HARMONY, ONE, A_THOUGHT + STOP, True),
        (HARMONY, ONE, "Four.", False),
    ],
)
def test_thoughts_and_texts_stay_free(template: str, asked: dict[str, Any], text: str, want: bool) -> None:
    assert takes(template, text, **asked) == want
