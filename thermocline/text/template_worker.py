"""Render chat templates, in the process of `template_process.py`. One JSON object in, one out.

A template is an untrusted program: jinja2's sandbox keeps it from Python, `confinement.py` from the machine.
Besides that file, this one imports nothing of the package.

The answer tells who wrote each character: the template (or the model's files), the model in an earlier
answer, or anybody else.
"""

from __future__ import annotations

import codecs
import html  # noqa: F401  filters import it at their first use, which is too late here
import json
import pprint  # noqa: F401  likewise
import re
import textwrap  # noqa: F401  likewise
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex

import jinja2.debug  # noqa: F401  imported to rewrite tracebacks, too late here
from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

from thermocline.text.confinement import Bounds, serve

CPU_S = 0.4
MEMORY_BYTES = 256 << 20  # address space beyond that of the messages
MEMORY_PER_BYTE = 32  # of the messages
MOST_MEMORY_BYTES = 2 << 30  # 56 MB of messages
OUTPUT_CHARS = 1 << 20  # and twice the messages' size
CODECS = (
    "ascii",
    "latin-1",
    "unicode-escape",
    "utf-8",
    "utf-16",
)  # of jinja2 and templates, which load at their first use
# Some templates build control tokens from roles: "<|" + role + "|>". Any other role counts as foreign text.
ROLES = {"system", "developer", "user", "assistant", "tool", "ipython", "function", "model", "environment"}

FOREIGN, OWN, SPOKEN = 0, 1, 2
ANSWERS = 256 - SPOKEN  # answers with distinct marks; the next one has the first's mark again

# ---- text with its origin


class TracedText(str):
    """A string with a byte per character for its author: FOREIGN, OWN, or SPOKEN and more for an answer.

    A method that is not defined here returns a plain str, which counts as foreign. So a control token may be
    lost, but never forged.
    """

    __slots__ = ("_mask",)
    _mask: bytes

    def __new__(cls, text: str = "", mask: bytes | None = None) -> TracedText:
        self = super().__new__(cls, text)
        self._mask = _mask_of(text) if mask is None else mask
        return self

    def __str__(self) -> TracedText:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> TracedText:
        if isinstance(key, slice):
            at = key
        else:
            i = index(key)  # for a name it raises TypeError, which jinja2 takes as "undefined"
            at = slice(i, i + 1 or None)
        return TracedText(super().__getitem__(key), self._mask[at])

    def __iter__(self) -> Iterator[TracedText]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: str) -> TracedText:
        if not isinstance(other, str):
            return NotImplemented
        return TracedText(super().__add__(other), self._mask + _mask_of(other))

    def __radd__(self, other: str) -> TracedText:
        return TracedText(str.__add__(other, self), _mask_of(other) + self._mask)

    def __mul__(self, n: SupportsIndex) -> TracedText:
        return TracedText(super().__mul__(n), self._mask * int(n))

    __rmul__ = __mul__

    def join(self, parts: Iterable[str]) -> TracedText:
        parts = list(parts)
        return TracedText(super().join(parts), self._mask.join(map(_mask_of, parts)))

    def strip(self, chars: str | None = None) -> TracedText:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> TracedText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TracedText:
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> TracedText:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str) -> TracedText:
        return self[: len(self) - len(suffix)] if suffix and self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(super().splitlines(keepends), None)

    def partition(self, sep: str) -> tuple[str, str, str]:
        a, b, c = self._located(list(super().partition(sep)), None)
        return a, b, c

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        a, b, _ = super().rpartition(sep)
        return self[: len(a)], self[len(a) : len(a) + len(b)], self[len(a) + len(b) :]

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return super().replace(old, new, count)
        return TracedText(new).join(self.split(old, count))

    def upper(self) -> str:
        return self._recased(super().upper())

    def lower(self) -> str:
        return self._recased(super().lower())

    def title(self) -> str:
        return self._recased(super().title())

    def capitalize(self) -> str:
        return self._recased(super().capitalize())

    def _recased(self, text: str) -> str:
        return TracedText(text, self._mask) if len(text) == len(self) else text

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Return `parts` as slices of this text, separated by `sep`; None: by text that begins no part."""
        out: list[str] = []
        at = 0
        for part in parts:
            start = self.find(part, at) if sep is None else at
            out.append(self[start : start + len(part)])
            at = start + len(part) + len(sep or "")
        return out


def _mask_of(text: str) -> bytes:
    return text._mask if isinstance(text, TracedText) else bytes(len(text))


def own(text: str) -> TracedText:
    return TracedText(text, bytes([OWN]) * len(text))


def spoken(value: Any, mark: int) -> Any:
    """Mark all texts in an answer of the model."""
    if isinstance(value, str):
        return TracedText(value, bytes([mark]) * len(value))
    if isinstance(value, dict):
        return {k: spoken(v, mark) for k, v in value.items()}
    return [spoken(v, mark) for v in value] if isinstance(value, list) else value


# ---- the language of templates, as in transformers


class Origins(CodeGenerator):
    """Generates code that marks every string in a template's source as OWN."""

    def visit_Const(self, node: nodes.Const, frame: Any) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.own({str(value)!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.concat(map(str, (")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(group)!r})"


class GenerationBlock(Extension):
    """`{% generation %}`, which marks answers for training. Here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> Any:
        return caller()


class RaisedByTemplate(TemplateError):
    """The template called raise_exception."""


class Environment(ImmutableSandboxedEnvironment):
    code_generator_class = Origins
    own = staticmethod(own)
    concat = staticmethod(own("").join)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])
        del self.globals["lipsum"]  # a known way out of the sandbox, and of no use here
        self.globals |= {"dict": _dict, "raise_exception": _raise, "strftime_now": _strftime_now}
        self.filters |= {"tojson": _tojson, "safe": lambda text: text, "join": _join}

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        """Raise at once. jinja2 would return an undefined value, which raises only when it is used."""
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise(message: str) -> None:
    raise RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    joined: str = do_join(context, value, TracedText(d), attribute)
    return joined


# ---- one request


Reply = dict[str, Any]


class Arguments(dict[str, Any]):
    """A call's arguments. Many templates take them apart; DeepSeek's and others join them to a text, as JSON.

    It has no attribute of its own: a template would find that in place of an argument.
    """

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def message_of(message: Reply, i: int) -> Reply:
    role = message["role"]
    marked = spoken(message, SPOKEN + i % ANSWERS) if role == "assistant" else message
    for call in marked.get("tool_calls") or ():
        function = call.get("function", call)
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = Arguments(function["arguments"])
    return {**marked, "role": own(role) if role in ROLES else role}


def render(template: Template, ask: dict[str, Any], room: int) -> Reply:
    messages = [message_of(m, i) for i, m in enumerate(ask["messages"])]
    tokens = {name: own(text) for name, text in ask["tokens"].items()}
    pieces: list[str] = []
    for piece in template.generate({**ask["variables"], **tokens, "messages": messages}):
        room -= len(piece)
        if room < 0:
            return {"error": "bad", "why": "its output has no end"}
        pieces.append(piece)
    text = own("").join(pieces)
    runs = re.finditer(rb"([^\0])\1*", text._mask, re.DOTALL)
    return {"text": text, "spans": [(*m.span(), m[0][0]) for m in runs]}


def answer(compiled: Callable[[str], Template], line: bytes) -> Reply:
    """Render, and return any error as an answer: an untrusted program can raise anything."""
    try:
        ask = json.loads(line)
        return render(compiled(ask["template"]), ask, OUTPUT_CHARS + 2 * len(line))
    except RaisedByTemplate as e:
        return {"error": "refused", "why": e.message}
    except SecurityError as e:
        return {"error": "bad", "why": f"it does something that templates must not do: {e}"}
    except MemoryError:
        return {"error": "bad", "why": "it takes too much memory"}
    except RecursionError:
        return {"error": "bad", "why": "it calls itself without end, or is nested too deeply"}
    except Exception as e:
        line_number = getattr(e, "lineno", None) or _line_of(e)
        return {"error": "bad", "why": f"line {line_number}: {type(e).__name__}: {e}"}


def _line_of(e: BaseException) -> int:
    line, at = 0, e.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename == "<template>":
            line = at.tb_lineno
        at = at.tb_next
    return line


def bounds(request: bytes) -> Bounds:
    return Bounds(CPU_S, MEMORY_BYTES + MEMORY_PER_BYTE * len(request))


def main() -> None:
    for name in CODECS:
        codecs.lookup(name)
    compiled = lru_cache(maxsize=1)(Environment().from_string)

    def reply(request: bytes) -> bytes:
        return json.dumps(answer(compiled, request)).encode()

    serve(reply, bounds, most_bytes=MOST_MEMORY_BYTES)
