"""Tries one grammar out, in a process that may be killed: it may take for ever, or overflow the stack.

Run by grammar.py: `KIND` and the text on stdin; what is wrong with it on stdout, nothing if it can be used.
Must not import anything of ours: the process starts without our package.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

SECONDS = 1.0  # of processor time
STACK_BYTES = 1 << 20  # an eighth of what a thread of the engine has: what is fine here is fine there
MEMORY_BYTES = 1 << 30
WALKS, STEPS = 4, 100  # random texts that the grammar allows, and how long
BYTES = 256
# Whitespace as people write JSON, never without end; a schema's own "x-guidance" cannot loosen the rest.
JSON = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,20})",
    "lenient": False,
    "coerce_one_of": False,
}


def source(kind: str, text: str) -> str:
    """The grammar as llguidance takes it; ValueError where it is no grammar of that kind."""
    if kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(text, overrides=JSON))
    return str(LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text))


def limits() -> LLParserLimits:
    """The library's own, with fewer states: they are 1 to 2 KB each. Its errors then show no grammar."""
    return LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


class _Bytes:
    """The smallest vocabulary."""

    eos_token_id, bos_token_id = BYTES, None
    special_token_ids = (BYTES,)
    tokens = (*(bytes([b]) for b in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def problem(kind: str, text: str) -> str:
    """What is wrong with the grammar, or nothing."""
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
            return "between an exclusive 0 and a fraction 0 itself would be let in; leave one bound out"
    draw = random.Random(0)
    found = (_walk(begin.deep_copy(), draw) for _ in range(WALKS))
    return next(filter(None, found), "")


def _walk(matcher: LLMatcher, draw: random.Random) -> str:
    """Write some text that the grammar allows."""
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
    """Library 1.9 takes 0 where exclusiveMinimum is 0 and the maximum below 1, and where it is mirrored."""
    if isinstance(schema, list):
        return any(map(_lets_zero_in, schema))
    if not isinstance(schema, dict):
        return False
    bounds = {k: v for k, v in schema.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    low, high = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
    above = low == 0 and any(0 < bounds.get(k, 1) < 1 for k in ("maximum", "exclusiveMaximum"))
    below = high == 0 and any(-1 < bounds.get(k, -1) < 0 for k in ("minimum", "exclusiveMinimum"))
    return above or below or any(map(_lets_zero_in, schema.values()))


def _bound() -> None:
    """The system ends what takes too much of it. Windows has neither: whoever waits has a clock, too."""
    with contextlib.suppress(ImportError, AttributeError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(AttributeError):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal kills


def main() -> None:
    kind, _, text = sys.stdin.buffer.read().decode().partition("\n")
    _bound()
    threading.stack_size(STACK_BYTES)
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(problem(kind, text)))
    thread.start()
    thread.join()
    sys.stdout.buffer.write(told[0].encode())  # IndexError: it failed, and said why


if __name__ == "__main__":
    main()
