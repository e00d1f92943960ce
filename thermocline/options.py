"""Options: a field of a frozen dataclass is a flag, a line of help and an environment variable.

Field `top_k` is the flag `--top-k` (and its aliases) and the variable `THERMOCLINE_TOP_K`.
The command line wins over the environment, which wins over the default.
"""

from __future__ import annotations

import argparse
import enum
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar

from thermocline.errors import UsageError

PREFIX = "THERMOCLINE_"
POSITIONAL_SUFFIX = "_by_position"
MAX_INT = 2**31 - 1
MAX_LIST = 1000

Parse = Callable[[str], Any]
T = TypeVar("T")


# ---- parsing one value: text -> value, or ValueError saying what it must be


def whole(low: int, high: int = MAX_INT) -> Parse:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}" if high < MAX_INT else f"must be at least {low}")
        return value

    return parse


def real(low: float, high: float = math.inf) -> Parse:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not (math.isfinite(value) and low <= value <= high):
            bounds = f"from {low:g} to {high:g}" if math.isfinite(high) else f"at least {low:g}"
            raise ValueError(f"must be {bounds}")
        return value

    return parse


def count_or_all(text: str) -> int:
    value: int = whole(-1)(text)
    if value == 0:
        raise ValueError("must be -1 or at least 1")
    return value


def one_of(*names: str) -> Parse:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return text

    return parse


def some_of(*names: str) -> Parse:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        if not set(found) <= set(names):
            raise ValueError(f"must be some of {', '.join(names)}, with commas")
        return found

    return parse


def counts(low: int, high: int = MAX_INT) -> Parse:
    """Parse llama-bench's lists: `64,512`, ranges `1-4`, `0-1024+256`, `64-512*2`."""

    def parse(text: str) -> tuple[int, ...]:
        found: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10})(?:([+*])([0-9]{1,10}))?)?", part)
            if match is None:
                raise ValueError("must be numbers, or ranges such as 1-4 or 64-512*2, between commas")
            at, last, step = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
            if last < at:
                raise ValueError("must not have a range that ends before it begins")
            while at <= last and len(found) <= MAX_LIST:
                found.append(at)
                at = at * step if match[3] == "*" else at + step
        if len(found) > MAX_LIST:
            raise ValueError(f"must be at most {MAX_LIST} numbers")
        if min(found) < low or max(found) > high:
            raise ValueError(f"must be from {low} to {high}" if high < MAX_INT else f"must be at least {low}")
        return tuple(found)

    return parse


def reals(low: float, high: float = math.inf) -> Parse:
    one = real(low, high)

    def parse(text: str) -> tuple[float, ...]:
        return tuple(one(part) for part in text.split(","))

    return parse


def pair(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9}),([0-9]{1,9})", text)
    if found is None:
        raise ValueError("must be two numbers with a comma, such as 512,128")
    return int(found[1]), int(found[2])


def switch(text: str) -> bool:
    match text.strip().lower():
        case "on" | "1" | "true" | "yes" | "enabled":
            return True
        case "off" | "0" | "false" | "no" | "disabled" | "":
            return False
    raise ValueError("must be on or off")


def nonempty(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def bias(text: str) -> tuple[int, float]:
    """Parse llama.cpp's `ID+BIAS`, `ID-BIAS`: (token id, the number to add to its logit)."""
    found = re.fullmatch(r"([0-9]{1,10})([+-][0-9.eE+-]+|-inf)", text)
    try:
        token, value = (int(found[1]), float(found[2])) if found else (MAX_INT + 1, math.nan)
    except ValueError:
        token, value = MAX_INT + 1, math.nan
    if token > MAX_INT or math.isnan(value) or value == math.inf:
        raise ValueError("must look like 15043+1.5, 15043-1.5 or 15043-inf (token id, sign, amount)")
    return token, value


# ---- an option


class Given(enum.Flag):
    """The ways to give an option on the command line, besides its flag."""

    AS_FLAG = 0
    REPEATED = enum.auto()  # several times: its values are a tuple
    SEVERAL = enum.auto()  # several times, and several values after one flag
    BY_POSITION = enum.auto()  # without its flag, too
    REQUIRED = enum.auto()
    BARE = enum.auto()  # by its flag alone, too: its parser then gets an empty text


AS_FLAG, REPEATED, SEVERAL = Given.AS_FLAG, Given.REPEATED, Given.SEVERAL
BY_POSITION, REQUIRED, BARE = Given.BY_POSITION, Given.REQUIRED, Given.BARE


@dataclass(frozen=True)
class Option:
    """The facts about a field that make it an option."""

    parse: Parse
    metavar: str | None
    group: str
    help: str
    flags: tuple[str, ...]  # besides --field-name
    shown: str | None  # the default in words, where the value is a stand-in
    given: Given

    @property
    def is_tuple(self) -> bool:
        return bool(self.given & (REPEATED | SEVERAL))


def opt(
    default: Any,
    parse: Parse,
    metavar: str | None,
    group: str,
    help: str,
    *,
    flags: str = "",
    shown: str | None = None,
    given: Given = AS_FLAG,
) -> Any:
    names = tuple(flags.split())
    about = Option(parse, metavar, group, help, names, shown, given)
    return field(default=default, metadata={"option": about})


# ---- fields -> argparse


def options_of(cls: type[Any]) -> list[tuple[Field[Any], Option]]:
    return [(f, f.metadata["option"]) for f in fields(cls)]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return PREFIX + name.upper()


def switched(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable that is no flag's turns something on. Raises UsageError."""
    found: bool = parse_value(switch, variable(name), environ.get(variable(name), ""))
    return found


def _help(f: Field[Any], o: Option) -> str:
    facts = [f"env: {variable(f.name)}"]
    default = {True: "on", False: "off"}[f.default] if isinstance(f.default, bool) else f.default
    if o.shown is not None or default not in (None, (), ""):
        facts.insert(0, f"default: {default if o.shown is None else o.shown}")
    return f"{o.help} [{'; '.join(facts)}]".replace("%", "%%")


def add_arguments(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add a flag for each field. Values stay text: `read_options` parses them, wherever they came from."""
    groups: dict[str, Any] = {}
    for f, o in options_of(cls):
        if o.group not in groups:
            groups[o.group] = parser.add_argument_group(o.group)
        if BY_POSITION in o.given:
            by_position = f.name + POSITIONAL_SUFFIX
            parser.add_argument(
                by_position, metavar=f.name, nargs="?", default=argparse.SUPPRESS, help=o.help
            )
        names = sorted((flag(f.name), *o.flags), key=lambda name: name.startswith("--"))
        about: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": _help(f, o)}
        if o.parse is switch:
            groups[o.group].add_argument(*names, action=argparse.BooleanOptionalAction, **about)
        elif SEVERAL in o.given:
            groups[o.group].add_argument(*names, action="extend", nargs="+", metavar=o.metavar, **about)
        else:
            bare = {"nargs": "?", "const": ""} if BARE in o.given else {}
            groups[o.group].add_argument(*names, action="append", metavar=o.metavar, **bare, **about)


# ---- argparse and the environment -> an options object


def parse_value(parse: Parse, source: str, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as e:
        raise UsageError(f"{source} {e}, not {text!r}") from None


def _env_texts(o: Option, text: str) -> list[str]:
    """Return a variable's values: one, or of a repeated option those of a JSON list of strings."""
    if o.is_tuple and text.startswith("["):
        try:
            items = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(items, list) and all(isinstance(i, str) for i in items):
            return items
    return [text]


def _value(f: Field[Any], o: Option, given: Mapping[str, Any], environ: Mapping[str, str]) -> Any:
    if f.name in given:
        value, source = given[f.name], flag(f.name)
        if isinstance(value, bool):
            return value
        texts = [value] if isinstance(value, str) else value
    elif variable(f.name) in environ:
        source = variable(f.name)
        texts = _env_texts(o, environ[source])
    elif REQUIRED in o.given:
        raise UsageError(
            f"missing {o.metavar} ({o.help.rstrip('.').lower()}; {flag(f.name)} or {variable(f.name)})"
        )
    else:
        return f.default
    values = [parse_value(o.parse, source, t) for t in texts]
    return tuple(values) if o.is_tuple else values[-1]


def read_options(cls: type[T], given: Mapping[str, Any], environ: Mapping[str, str]) -> T:
    """Return the options. `given` is from argparse: only flags that were typed, as text."""
    given = dict(given)
    for f, _ in options_of(cls):
        by_position = given.pop(f.name + POSITIONAL_SUFFIX, None)
        if by_position is None:
            continue
        if f.name in given:
            raise UsageError(
                f"the {f.name} is given twice, as {flag(f.name)} and without a flag: {by_position!r}"
            )
        given[f.name] = by_position
    return cls(**{f.name: _value(f, o, given, environ) for f, o in options_of(cls)})
