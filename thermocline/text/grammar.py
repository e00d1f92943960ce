"""What an answer has to be: `Grammar`, as a request says it, and `Constraint`, as the sampler obeys it.

Must not know how a grammar is enforced (`grammar_matcher.py`), models or requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import UsageError

MAX_BYTES = 64 << 10
MAX_DEPTH = 64  # brackets within brackets
KINDS = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "grammar",
    "answer": "answer's form",
}


class Constraint(Protocol):
    """One answer on its way. UsageError where it cannot go on; that ends this answer alone."""

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab_size]: the tokens that may come next; those that end a text where it may end."""

    def accept(self, token: int) -> None:
        """It came."""

    def is_complete(self) -> bool:
        """Nothing but the end may follow."""


@dataclass(frozen=True)
class Thought:
    """What a model may think before its answer: any text between two marks."""

    opens: str
    closes: str
    begun: bool  # within the prompt: it has to come, and its first mark is there


@dataclass(frozen=True)
class Calls:
    """Calls of functions as a chat template writes them: `{"name": ..., ARGUMENTS: {...}}` between marks."""

    functions: tuple[tuple[str, Mapping[str, Any]], ...]  # name and the JSON schema of its arguments
    opens: str  # may be empty: the object is all there is
    closes: str
    arguments: str  # the key
    in_list: bool  # one list for all calls, one mark for the list
    several: bool


@dataclass(frozen=True)
class Grammar:
    """What an answer must be, whole: text that fits a JSON schema, a regular expression or a Lark grammar;
    or an answer of a conversation, with the marks of the model's template."""

    kind: str  # of KINDS
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"grammar kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        name = KINDS[self.kind]
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as e:
            raise UsageError(f"the {name} is not valid Unicode: a lone surrogate at {e.start}") from None
        if not self.text.strip() or "\0" in self.text:
            raise UsageError(f"the {name} is empty or has a NUL character")
        if size > MAX_BYTES:
            raise UsageError(f"the {name} has {size} bytes; at most {MAX_BYTES} can be taken")
        if self.kind in ("json_schema", "answer") and (levels := depth(self.text)) > MAX_DEPTH:
            raise UsageError(f"the {name} is {levels} levels deep; at most {MAX_DEPTH} can be taken")

    @staticmethod
    def json_schema(schema: str | bool | Mapping[str, Any]) -> Grammar:
        """A schema, or its text. Properties come in the schema's order."""
        if isinstance(schema, str):
            text = Grammar("json_schema", schema).text  # its size and depth, before anything reads it
            try:
                schema = json.loads(text)
            except ValueError as e:
                raise UsageError(f"the JSON schema is not JSON: {e}") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise UsageError('the JSON schema must be an object, such as {"type": "object"}')
        try:
            return Grammar("json_schema", json.dumps(dict(schema), ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as e:
            raise UsageError(f"the JSON schema cannot be written as JSON: {e}") from None

    @staticmethod
    def json_object() -> Grammar:
        """Any JSON object."""
        return Grammar("json_schema", '{"type": "object"}')

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """All of the answer matches it (Rust's syntax: no look-around, no back references)."""
        return Grammar("regex", pattern)

    @staticmethod
    def lark(text: str) -> Grammar:
        """A Lark grammar, as llguidance reads it; its first rule is `start`."""
        made = Grammar("lark", text)  # its size, before anything reads it
        if re.search(r"^[^\S\n]*+[\w-]++\s*+::=", text, re.MULTILINE):
            raise UsageError("the grammar is GBNF (`::=`); write it as a Lark grammar (`start: ...`)")
        return made

    @staticmethod
    def answer(
        thought: Thought | None, calls: Calls | None, content: Mapping[str, Any] | Literal["text"] | None
    ) -> Grammar:
        """Maybe a thought, then calls, or else `content`: by a JSON schema, or any text. None: not this."""
        form = {
            "thought": None if thought is None else asdict(thought),
            "calls": None if calls is None else asdict(calls),
            "content": content,
        }
        return Grammar("answer", json.dumps(form, ensure_ascii=False, allow_nan=False))


def depth(text: str) -> int:
    """Brackets within brackets, of JSON, without parsing it."""
    deepest = depth = 0
    quoted = escaped = False
    for c in text:
        if quoted:
            quoted = escaped or c != '"'
            escaped = c == "\\" and not escaped
        elif c == '"':
            quoted = True
        elif c in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in "]}":
            depth -= 1
    return deepest
