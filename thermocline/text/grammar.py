"""`Grammar`: the form of an answer, as a request gives it. `Constraint`: the same, as the sampler obeys it.

`grammar_matcher.py` turns one into the other.
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
    """An answer's place in its grammar. UsageError: it cannot go on, which ends this answer alone."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocab_size]; end tokens where the text may end."""

    def accept(self, token: int) -> None:
        """Advance by the token that was sampled."""

    def is_complete(self) -> bool:
        """Tell whether only the end may follow."""


@dataclass(frozen=True)
class Thought:
    """A thought before an answer: any text between two marks."""

    opens: str
    closes: str
    begun: bool  # the prompt ends with the opening mark, so a thought must follow


@dataclass(frozen=True)
class Notation:
    """How a form writes arguments one by one, with `$key` and `$value`; `~` may be whitespace.

    `$is_text` is "true" or "false". Texts are between `quotes`: if these are empty, a text goes on to what
    follows `$value`. Other values are JSON, unless the notation is `deep`: then it holds within lists and
    objects, too.
    """

    argument: str
    between: str = ""  # arguments
    quotes: tuple[str, str] | None = ("", "")  # None: texts are JSON
    deep: bool = False


@dataclass(frozen=True)
class CallText:
    """How a form writes calls: text with `$name`, `$arguments`; `~` may be whitespace.

    `$string` is the name as JSON, `$digits` a number, `$id` nine letters and digits, as new ids are.
    """

    call: str
    all: str | None = None  # calls that are between one pair of marks, as `$calls`; None: each has its own
    between: str = "~"  # calls
    notation: Notation | None = None  # None: arguments are a JSON object


@dataclass(frozen=True)
class Calls:
    """Calls of functions as a chat template writes them."""

    functions: tuple[tuple[str, Mapping[str, Any]], ...]  # name and the JSON schema of its arguments
    opens: str  # may be empty: then a call is the whole answer
    closes: str
    written: CallText
    several: bool
    before_text: str = ""  # an answer without calls


@dataclass(frozen=True)
class Grammar:
    """The form of a whole answer: a JSON schema, a regular expression, a Lark grammar, or `answer`.

    `answer` is the form of an answer in a conversation, with the marks of the model's template.
    """

    kind: str  # of KINDS
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"grammar kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        name = KINDS[self.kind]
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as e:
            raise UsageError(
                f"the {name} is not valid Unicode: remove the unpaired surrogate at {e.start}"
            ) from None
        if not self.text.strip() or "\0" in self.text:
            raise UsageError(f"the {name} is empty or has a NUL character")
        if size > MAX_BYTES:
            raise UsageError(f"the {name} has {size} bytes; at most {MAX_BYTES} are allowed")
        if self.kind in ("json_schema", "answer") and (levels := depth(self.text)) > MAX_DEPTH:
            raise UsageError(f"the {name} is {levels} levels deep; at most {MAX_DEPTH} are allowed")

    @staticmethod
    def json_schema(schema: str | bool | Mapping[str, Any]) -> Grammar:
        """Return the grammar of a schema or its text. Properties come in the schema's order."""
        if isinstance(schema, str):
            text = Grammar("json_schema", schema).text  # checks size and depth before parsing
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
        """Return the grammar of any JSON object."""
        return Grammar("json_schema", '{"type": "object"}')

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Return the grammar of texts that match (Rust's syntax: no look-around or back references)."""
        return Grammar("regex", pattern)

    @staticmethod
    def lark(text: str) -> Grammar:
        """Return a Lark grammar, as llguidance reads it; its first rule is `start`."""
        made = Grammar("lark", text)  # checks the size before the search
        if re.search(r"^[^\S\n]*+[\w-]++\s*+::=", text, re.MULTILINE):
            raise UsageError("the grammar is GBNF (`::=`); write it as a Lark grammar (`start: ...`)")
        return made

    @staticmethod
    def answer(
        thought: Thought | None, calls: Calls | None, content: Mapping[str, Any] | Literal["text"] | None
    ) -> Grammar:
        """Return the form of an answer: an optional thought, then calls or `content` (a schema, or any text).

        None leaves a part out.
        """
        answer_parts = {
            "thought": None if thought is None else asdict(thought),
            "calls": None if calls is None else asdict(calls),
            "content": content,
        }
        return Grammar("answer", json.dumps(answer_parts, ensure_ascii=False, allow_nan=False))


def depth(text: str) -> int:
    """Return how deep the brackets of a JSON text are nested, without parsing it."""
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
