"""Translate grammars for llguidance, and try one out in a process that can be killed.

`grammar_matcher.py` sends a kind and a text. The answer is the grammar's error, or nothing if it is usable.
It imports little of the package, so that the process starts in milliseconds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from thermocline.text.call_grammar import JSON, Rules, calls_rule, regex
from thermocline.text.confinement import Bounds, serve

SECONDS = 1.0  # of processor time
STACK_BYTES = 1 << 20  # an eighth of an engine thread's stack, so what works here works there
MEMORY_BYTES = 1 << 30
WALKS, STEPS = 4, 100  # random texts that the grammar allows, and their length in bytes
BYTES = 256


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

    def __init__(self, answer_parts: Mapping[str, Any], controls: Mapping[str, int]) -> None:
        self._parts, self._rules = answer_parts, Rules(controls)

    def lark(self) -> str:
        thought, calls, content = self._parts["thought"], self._parts["calls"], self._parts["content"]
        before, rules = "" if calls is None else calls["before_text"], self._rules
        begun = "" if thought is None or before else r"\s*" + regex(thought["opens"])
        ways = []
        if calls is not None:
            free, opens = content == "text" and calls["opens"], calls["opens"]
            said = rules.up_to("said", opens, begun) if free else f"_GAP? {rules.mark(opens)}"
            ways.append(f"{said} {calls_rule(rules, calls)}")
        if content == "text":
            call = "" if calls is None or before else ".*" + regex(opens) if opens else r"\s*\{"
            ways.append(f"{rules.mark(before)} {rules.text('TEXT', begun, call)}?")
        elif content is not None:
            ways.append(f"_GAP? {rules.mark(before)} {rules.json('content', content)}")
        start = f"({' | '.join(ways)})"
        if thought is not None:
            rest = rules.up_to("thought", thought["closes"]) + " _GAP?"
            start = (
                f"{rest} {start}" if thought["begun"] else f"({rules.mark(thought['opens'])} {rest})? {start}"
            )
        return "\n".join([f"start: {start}", *rules.lines])


def _schemas(answer_parts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of an answer, each with a label for errors."""
    for name, parameters in () if answer_parts["calls"] is None else answer_parts["calls"]["functions"]:
        yield f"the parameters of {name!r}: ", parameters
    if isinstance(answer_parts["content"], dict):
        yield "the JSON schema: ", answer_parts["content"]


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
            return "between an exclusive 0 and a fraction, 0 itself would be allowed; leave one bound out"
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
