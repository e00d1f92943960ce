"""Translate grammars for llguidance, and try one out in a process that can be killed.

`grammar_matcher.py` sends a kind and a text. The answer is the grammar's error, or nothing if it is usable.
Besides `confinement.py` this file imports nothing of the package, so that the process starts in milliseconds.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from thermocline.text.confinement import Bounds, serve

SECONDS = 1.0  # of processor time
STACK_BYTES = 1 << 20  # an eighth of an engine thread's stack, so what works here works there
MEMORY_BYTES = 1 << 30
WALKS, STEPS = 4, 100  # random texts that the grammar allows, and their length in bytes
BYTES = 256
# Whitespace as people write JSON, but bounded. These override a schema's own "x-guidance".
JSON = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,20})",
    "lenient": False,
    "coerce_one_of": False,
}


def source(kind: str, text: str, controls: Mapping[str, int] | None = None) -> str:
    """Return the grammar as llguidance takes it. Raise ValueError if it is not one of that kind.

    `controls`: ids of control tokens by name, for an answer's marks.
    """
    match kind:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON))
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "answer":
            text = _Answer(json.loads(text), controls or {}).lark()
    return str(LLMatcher.grammar_from_lark(text))


# ---- an answer in a conversation


class _Answer:
    """`Grammar.answer` as Lark.

    The lexer takes the longest match and never goes back, so free text must exclude everything else that may
    begin there. It excludes marks even if they are tokens, since a model may also spell one out.
    """

    def __init__(self, form: Mapping[str, Any], controls: Mapping[str, int]) -> None:
        self._form, self._controls = form, controls
        self._rules = [r"_WS: /( |\n[ \t]{0,20})/", r"_GAP: /[ \n]{1,4}/"]

    def lark(self) -> str:
        thought, calls, content = self._form["thought"], self._form["calls"], self._form["content"]
        begun = "" if thought is None else r"\s*" + _regex(thought["opens"])
        ways = []
        if calls is not None:
            free = content == "text" and calls["opens"]
            opens = (
                self._up_to("said", calls["opens"], begun) if free else f"_GAP? {self._mark(calls['opens'])}"
            )
            ways.append(f"{opens} {self._calls(calls)}")
        if content == "text":
            call = "" if calls is None else ".*" + _regex(calls["opens"]) if calls["opens"] else r"\s*\{"
            ways.append(self._text("TEXT", begun, call) + "?")
        elif content is not None:
            ways.append("_GAP? " + self._json("content", content))
        start = f"({' | '.join(ways)})"
        if thought is not None:
            rest = self._up_to("thought", thought["closes"]) + " _GAP?"
            start = (
                f"{rest} {start}" if thought["begun"] else f"({self._mark(thought['opens'])} {rest})? {start}"
            )
        return "\n".join([f"start: {start}", *self._rules])

    def _calls(self, calls: Mapping[str, Any]) -> str:
        """Return a rule for everything after the mark that opens the first call."""
        colon = '_WS? ":" _WS?'
        for i, (f, parameters) in enumerate(calls["functions"]):
            name, key = _literal(f), _literal(calls["arguments"])
            self._rules.append(f'f{i}: {name} _WS? "," _WS? {key} {colon} a{i}')
            self._json(f"a{i}", parameters)
        any_ = " | ".join(f"f{i}" for i in range(len(calls["functions"])))
        self._rules.append(f'call: "{{" _WS? {_literal("name")} {colon} ({any_}) _WS? "}}"')
        several, opens, closes = calls["several"], self._mark(calls["opens"]), self._mark(calls["closes"])
        if calls["in_list"]:
            more = '(_WS? "," _WS? call)*' if several else ""
            return f'_GAP? "[" _WS? call {more} _WS? "]"'
        one = f"_GAP? call _GAP? {closes}" if closes else "call"
        return f"{one} (_GAP? {opens} {one})* _GAP?" if several else one

    def _mark(self, name: str) -> str:
        return f"<[{self._controls[name]}]>" if name in self._controls else json.dumps(name) if name else ""

    def _up_to(self, rule: str, mark: str, *foreign: str) -> str:
        """Return a rule for text, maybe empty, and the mark that ends it."""
        if mark in self._controls:
            return f"{self._text(rule.upper(), *foreign, '.*' + _regex(mark))}? {self._mark(mark)}"
        self._rules.append(
            f"{rule}[suffix={json.dumps(mark)}]: {self._text(rule.upper(), *foreign, least='*')}"
        )
        return rule

    def _text(self, name: str, *foreign: str, least: str = "+") -> str:
        """Add a terminal for text that begins with none of `foreign`; return its name."""
        but = f" & ~/(?s:({'|'.join(filter(None, foreign))}).*)/" if any(foreign) else ""
        self._rules.append(f"{name}: /(?s:.{least})/{but}")
        return name

    def _json(self, rule: str, schema: Mapping[str, Any]) -> str:
        self._rules.append(f"{rule}: %json {json.dumps({**schema, 'x-guidance': JSON})}")
        return rule


def _literal(key: str) -> str:
    """Return a JSON string as a literal of Lark."""
    return json.dumps(json.dumps(key, ensure_ascii=False))


def _regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _schemas(form: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of an answer, each with a label for errors."""
    for name, parameters in () if form["calls"] is None else form["calls"]["functions"]:
        yield f"the parameters of {name!r}: ", parameters
    if isinstance(form["content"], dict):
        yield "the JSON schema: ", form["content"]


# ---- the trial


def limits() -> LLParserLimits:
    """Return the library's limits with fewer lexer states (1 to 2 KB each); errors quote no grammar."""
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class _Bytes:
    """The smallest vocabulary: the 256 bytes and an end."""

    eos_token_id, bos_token_id = BYTES, None
    special_token_ids = (BYTES,)
    tokens = (*(bytes([b]) for b in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def problem(kind: str, text: str) -> str:
    """Return the grammar's error, or ""."""
    if kind != "answer":
        return _problem(kind, text, WALKS)
    schemas = list(_schemas(json.loads(text)))  # each alone: a walk would not get past a thought
    walks = max(1, min(WALKS, 40 // max(1, len(schemas))))  # four walks for each of 60 functions took 0.8 s
    for about, schema in schemas:
        if wrong := _problem("json_schema", json.dumps(schema), walks):
            return about + wrong
    return _problem(kind, text, 0)


def _problem(kind: str, text: str, walks: int) -> str:
    try:
        begin = LLMatcher(
            LLTokenizer(TokenizerWrapper(_Bytes())), source(kind, text), log_level=0, limits=limits()
        )
    except ValueError as e:
        return str(e)
    if begin.is_error():
        return str(begin.get_error())
    if kind == "json_schema":
        if warnings := begin.get_grammar_warnings():
            return str(warnings[0])
        if _lets_zero_in(json.loads(text)):
            return (
                "with an exclusive bound of 0 and a bound below 1, 0 itself would pass; leave one bound out"
            )
    draw = random.Random(0)
    found = (_walk(begin.deep_copy(), draw) for _ in range(walks))
    return next(filter(None, found), "")


def _walk(matcher: LLMatcher, draw: random.Random) -> str:
    """Write a random text that the grammar allows; return an error, or ""."""
    for _ in range(STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return str(matcher.get_error()).replace("NoExtensionBias", "no text fits it")
        allowed = [b for b in range(BYTES) if mask >> b & 1]
        if not allowed:
            return "" if mask >> BYTES & 1 else "no text fits it"
        if not matcher.consume_token(draw.choice(allowed)):
            return str(matcher.get_error())
    return ""


def _lets_zero_in(schema: Any) -> bool:
    """Tell whether llguidance 1.9 wrongly allows 0: exclusiveMinimum 0, maximum below 1, or mirrored."""
    if isinstance(schema, list):
        return any(map(_lets_zero_in, schema))
    if not isinstance(schema, dict):
        return False
    bounds = {k: v for k, v in schema.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    low, high = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
    above = low == 0 and any(0 < bounds.get(k, 1) < 1 for k in ("maximum", "exclusiveMaximum"))
    below = high == 0 and any(-1 < bounds.get(k, -1) < 0 for k in ("minimum", "exclusiveMinimum"))
    return above or below or any(map(_lets_zero_in, schema.values()))


def answer(request: bytes) -> bytes:
    kind, _, text = request.decode().partition("\n")
    return problem(kind, text).encode()


def main() -> None:
    bounds = Bounds(SECONDS, MEMORY_BYTES)
    serve(answer, lambda request: bounds, most_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES)
