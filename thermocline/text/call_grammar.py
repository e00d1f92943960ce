"""Write the rules of a grammar: marks, free text, and calls of functions in any form (`grammar.CallText`).

It runs in the process of `grammar_worker.py`, and imports what that does. The lexer takes the longest match
and never goes back, so a text that goes on to a mark is one terminal with that mark.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from thermocline.text.schema_kinds import ABOUT, UNIONS, members, pointed

# Whitespace as people write JSON, but bounded. These override a schema's own "x-guidance".
JSON = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n[ \t]{0,20})",
    "lenient": False,
    "coerce_one_of": False,
}
PLACE = re.compile(r"(~|\$[a-z_]+)")  # in a form's text
KEY = r"[A-Za-z_][A-Za-z0-9_]{0,63}"  # of an argument that the schema does not name
NAME = re.compile(r"[\w.\-]+")  # of a function, where a form writes it without quotes
WITHIN = {"description", "title", "$schema", "$defs", "definitions", "strict", *ABOUT}
OF_OBJECTS = {"type", "properties", "required", "additionalProperties", *WITHIN}
OF_ARRAYS = {"type", "items", "minItems", "maxItems", *WITHIN}
OF_TEXTS = {"type", "enum", "minLength", "maxLength", "pattern", "format", *WITHIN}
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[\w.+\-]{1,64}@[A-Za-z0-9\-]{1,63}(\.[A-Za-z0-9\-]{1,63}){1,8}",
    "ipv4": r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
    "uri": r"[A-Za-z][A-Za-z0-9+.\-]{0,30}:[!-;=?-~]{1,2000}",
}
# How a text must not begin that stands where a value of one of these kinds may stand, in JSON.
BEGINNINGS = {
    "array": r"\s*\[", "object": r"\s*\{", "integer": r"\s*-?[0-9]", "number": r"\s*-?[0-9]",
    "boolean": r"\s*(true|false)", "null": r"\s*null",
}  # fmt: skip
PLAIN = ("null", "boolean", "integer", "number")  # kinds that a free text may as well be


class Rules:
    """A grammar's rules as they are made. `controls`: ids of control tokens by name, for marks."""

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        self._names = sorted(controls, key=len, reverse=True)
        self.lines = [r"_WS: /( |\n[ \t]{0,20})/", r"_GAP: /[ \n]{1,4}/"]

    def add(self, name: str, body: str) -> str:
        self.lines.append(f"{name}: {body}" if body else f'{name}: ""')
        return name

    def new(self, name: str, body: str) -> str:
        """Add a rule or, with a capital letter, a terminal, of a name that begins as `name`."""
        return self.add(f"{name}{len(self.lines)}", body)

    def atoms(self, text: str) -> list[str]:
        """Return a form's own text as literals, control tokens by their ids."""
        there = [re.escape(name) for name in self._names if name and name in text]
        pieces = re.split(f"({'|'.join(there)})", text) if there else [text]
        known = self._controls
        return [f"<[{known[p]}]>" if p in known else json.dumps(p, ensure_ascii=False) for p in pieces if p]

    def mark(self, text: str) -> str:
        return " ".join(self.atoms(text))

    def sequence(self, pattern: str, places: Mapping[str, str]) -> str:
        """Return what a form's pattern stands for."""
        made = []
        for piece in PLACE.split(pattern):
            made += ["_WS?"] if piece == "~" else [places[piece]] if piece in places else self.atoms(piece)
        return " ".join(made)

    def up_to(self, name: str, mark: str, *foreign: str) -> str:
        """Return a rule for text, maybe empty, and the mark that ends it."""
        first, *rest = self.atoms(mark)
        if first.startswith("<["):
            return f"{self.text(name.upper(), *foreign, '.*' + regex(mark))}? {first} {' '.join(rest)}"
        self.add(f"{name}[suffix={first}]", self.text(name.upper(), *foreign, least="*"))
        return f"{name} {' '.join(rest)}"

    def text(self, name: str, *foreign: str, least: str = "+") -> str:
        """Add a terminal for text that begins with none of `foreign`; return its name."""
        return self.add(name, f"/(?s:.{least})/{_but(foreign)}")

    def json(self, rule: str, schema: Mapping[str, Any]) -> str:
        return self.add(rule, f"%json {json.dumps({**schema, 'x-guidance': JSON})}")


def regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def _but(foreign: Sequence[str]) -> str:
    return f" & ~/(?s:({'|'.join(filter(None, foreign))}).*)/" if any(foreign) else ""


# ---- calls


def calls_rule(rules: Rules, calls: Mapping[str, Any]) -> str:
    """Return a rule for everything after the mark that opens the first call."""
    written, closes = calls["written"], rules.mark(calls["closes"])
    ends = [calls["closes"], written["call"].rpartition("$arguments")[2].strip("~)}")]
    functions = []
    for i, (name, parameters) in enumerate(calls["functions"]):
        if "$name" in written["call"] and not NAME.fullmatch(name):
            about = "a name that this model's form of calls can write has letters, digits and _ - . only"
            raise ValueError(f"function {name[:64]!r}: {about}")
        if written["notation"] is None:
            arguments = rules.json(f"a{i}", parameters)
        else:
            one_by_one = _Arguments(rules, written["notation"], parameters, ends)
            try:
                arguments = rules.add(f"a{i}", one_by_one.all())
            except ValueError as e:
                raise ValueError(f"the parameters of {name[:64]!r}: {e}") from None
        places = {
            "$name": json.dumps(name), "$string": json.dumps(json.dumps(name, ensure_ascii=False)),
            "$arguments": arguments, "$digits": "/[0-9]{1,4}/", "$id": "/[A-Za-z0-9]{9}/",
        }  # fmt: skip
        functions.append(rules.add(f"f{i}", rules.sequence(written["call"], places)))
    call = rules.add("call", " | ".join(functions))
    several, together = calls["several"], written["all"]
    if together is not None:
        more = f" ({rules.sequence(written['between'], {})} {call})*" if several else ""
        whole = rules.sequence(together, {"$calls": call + more})
        return f"_GAP? {whole} _GAP? {closes}" if closes else f"_GAP? {whole}"
    one = f"_GAP? {call} _GAP? {closes}" if closes else call
    return f"{one} (_GAP? {rules.mark(calls['opens'])} {one})* _GAP?" if several else one


class _Arguments:
    """The rules of one function's arguments in a notation. ValueError: they cannot be written in it."""

    def __init__(
        self, rules: Rules, notation: Mapping[str, Any], schema: Mapping[str, Any], ends: Sequence[str]
    ) -> None:
        """`ends`: marks that end a call, so no text may have them."""
        self._rules, self._root, self._ends = rules, schema, ends
        head, _, tail = notation["argument"].partition("$value")
        self._head, (self._close, gap, after) = head, tail.partition("~")
        self._after = gap + after
        self._between, self._quotes, self._deep = notation["between"], notation["quotes"], notation["deep"]
        self._named: dict[str, str] = {}  # rules of references, which may be to themselves
        self._any = ""

    def all(self) -> str:
        return self._object(self._root)

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for an object's members: in the schema's order, then others that it lets in."""
        _only(schema, OF_OBJECTS)
        known, rest = dict(schema.get("properties") or {}), schema.get("additionalProperties", True)
        required = set(schema.get("required") or ())
        for key in sorted(required - known.keys()):
            if rest is False:
                raise ValueError(f"{key!r} is required and not a property")
            known[key] = rest
        for key in known:
            python = self._quotes is None and (not key.isidentifier() or keyword.iskeyword(key))
            if python or not NAME.fullmatch(key):
                raise ValueError(f"{key[:64]!r} cannot be written as a name in this model's form of calls")
        new, between = self._rules.new, self._rules.sequence(self._between, {})
        made = [new("p", self._member(json.dumps(key), one)) for key, one in known.items()]
        others = ""
        if rest is not False:
            names = "|".join(map(regex, [*known, *(keyword.kwlist if self._quotes is None else ())]))
            key = new("KEY", f"/{KEY}/" + (f" & ~/({names})/" if names else ""))
            others = new("p", self._member(key, rest))
        follow = f"({between} {others})*" if others else ""
        begins = [f"{others} {follow}"] if others else []
        for key, one in zip(reversed(known), reversed(made), strict=True):
            needed = key in required
            begins = [f"{one} {follow}", *([] if needed else begins)]
            follow = new("m", f"{between} {one} {follow}" if needed else f"({between} {one})? {follow}")
        return f"({' | '.join(begins)})" + ("" if required else "?") if begins else ""

    def _member(self, key: str, schema: Any) -> str:
        if self._deep:
            value = self._inside(schema)
            begin = self._rules.sequence(self._head, {"$key": key})
            return f"{begin} {value} {self._rules.sequence(self._close + self._after, {})}"
        ways, others, made = self._texts(schema), self._others(schema), []
        if ways:
            after = self._rules.sequence(self._after, {})
            begin = self._rules.sequence(self._head, {"$key": key, "$is_text": '"true"'})
            made.append(f"{begin} {self._text(ways, others, self._close)} {after}")
        if others:
            value = self._value(others)
            begin = self._rules.sequence(self._head, {"$key": key, "$is_text": '"false"'})
            made.append(f"{begin} {value} {self._rules.sequence(self._close + self._after, {})}")
        if not made:
            raise ValueError("no value fits")
        return " | ".join(made)

    def _members(self, schema: Any) -> list[Mapping[str, Any]]:
        """Return the schemas that it is a choice of, each with a type."""
        found = members(schema, self._root)
        for one in found:
            if "type" not in one and "enum" not in one and one.keys() - WITHIN - {"$ref"}:
                raise ValueError(f"a schema with {min(one.keys() - WITHIN)!r} has to name its type")
        return found

    def _texts(self, schema: Any) -> list[str]:
        """Return a regular expression for each way in which a value is a text."""
        if self._quotes is None:
            return []
        free = self._quotes[0] == "" and "$is_text" not in self._head
        found = []
        for one in self._members(schema):
            if _is_any(one):
                return [".*"]
            if one.get("type") == "string" or isinstance(one.get("enum", [0])[0], str):
                found.append(_pattern(one))
        if found and free:
            plain = {m["type"]: m for m in self._members(schema) if _is_plain(m)}
            found += [{"null": "null", "boolean": "true|false"}[k] for k in plain if k in ("null", "boolean")]
        return found

    def _others(self, schema: Any) -> list[Mapping[str, Any]]:
        """Return the choices that are no texts."""
        found = self._members(schema)
        if self._quotes is None:
            return [schema] if isinstance(schema, Mapping) else [{}]
        free = self._quotes[0] == "" and "$is_text" not in self._head
        if any(map(_is_any, found)):
            return [] if free else [{}]
        rest = [m for m in found if m.get("type") != "string" and not isinstance(m.get("enum", [0])[0], str)]
        if free and len(rest) < len(found):  # a text may as well be one of these
            rest = [m for m in rest if not (_is_plain(m) and m["type"] in ("null", "boolean"))]
        return rest

    def _text(self, ways: Sequence[str], others: Sequence[Mapping[str, Any]], follows: str) -> str:
        """Return a rule for a text between quotes, or one that goes on to what follows it."""
        opens, closes = self._quotes or ("", "")
        end, rules = closes + follows, self._rules
        first, *rest = rules.atoms(closes or follows)
        stops = {e.strip() for e in (closes or follows, *self._ends)} - {""}
        foreign = [f".*{regex(stop)}" for stop in sorted(stops)]
        if not opens:
            foreign += [BEGINNINGS[k] for one in others for k in _kinds(one) if k in BEGINNINGS]
        body = f"/(?s:{'|'.join(f'({way})' for way in ways)})/{_but(foreign)}"
        rest = [*rest, *(rules.atoms(follows) if closes else [])]
        assert end, "a text has an end"
        if first.startswith("<["):
            empty = "?" if any(re.fullmatch(f"(?s:{way})", "") for way in ways) else ""
            terminal = rules.new("TEXT", f"/(?s:.+)/ & ({body})") + empty
            return " ".join([*rules.atoms(opens), terminal, first, *rest])
        terminal = rules.new("TEXT", f"({body}) {first}")
        return " ".join([*rules.atoms(opens), terminal, *rest])

    def _value(self, choices: Sequence[Mapping[str, Any]]) -> str:
        """Return a rule for a value that is no text."""
        schema = choices[0] if len(choices) == 1 else {"anyOf": list(choices)}
        return self._rules.json(f"j{len(self._rules.lines)}", _whole(schema, self._root))

    def _inside(self, schema: Any) -> str:
        """Return a rule for a value in a notation that holds within lists and objects."""
        if isinstance(schema, Mapping) and isinstance(at := schema.get("$ref"), str):
            if at not in self._named:  # it may be within itself
                self._named[at] = f"r{len(self._named)}x{len(self._rules.lines)}"
                self._rules.add(self._named[at], self._inside(pointed(at, self._root)))
            return self._named[at]
        for union in UNIONS:
            if isinstance(schema, Mapping) and schema.keys() - WITHIN == {union}:
                return f"({' | '.join(map(self._inside, schema[union]))})"
        ways, others = self._texts(schema), self._others(schema)
        made = [self._text(ways, others, "")] if ways else []
        return f"({' | '.join([*made, *map(self._deep_value, others)])})"

    def _deep_value(self, schema: Any) -> str:
        if _is_any(schema):
            return self._anything()
        if schema.get("type") == "array":
            return self._list(schema)
        if schema.get("type") == "object":
            return f'"{{" {self._object(schema)} "}}"'
        return self._rules.json(f"j{len(self._rules.lines)}", _whole(schema, self._root))

    def _list(self, schema: Mapping[str, Any]) -> str:
        _only(schema, OF_ARRAYS)
        item, least = self._inside(schema.get("items", {})), schema.get("minItems", 0)
        item = self._rules.new("i", item)
        most = schema["maxItems"] - 1 if "maxItems" in schema else ""
        if most == -1:
            return '"[" "]"'
        more = "" if most == 0 else f' ("," {item}){{{max(0, least - 1)},{most}}}'
        items = item + more
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _anything(self) -> str:
        """Return a rule for any value that is no text."""
        if not self._any:
            self._any = f"any{len(self._rules.lines)}"
            plain = self._rules.json(f"j{len(self._rules.lines)}", {"type": list(PLAIN)})
            self._rules.add(self._any, f'{plain} | {self._list({})} | "{{" {self._object({})} "}}"')
        return self._any


def _is_any(schema: Mapping[str, Any]) -> bool:
    return not schema.keys() - WITHIN


def _is_plain(schema: Mapping[str, Any]) -> bool:
    """Tell whether a schema is of a type and says no more."""
    return schema.keys() - WITHIN == {"type"} and schema["type"] in PLAIN


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    if "enum" in schema:
        return list(BEGINNINGS)
    return [schema["type"]] if "type" in schema else []


def _only(schema: Mapping[str, Any], known: set[str]) -> None:
    if unknown := schema.keys() - known:
        raise ValueError(f"{min(unknown)!r} cannot be enforced in this model's form of calls; leave it out")


def _pattern(schema: Mapping[str, Any]) -> str:
    """Return the regular expression of the texts that a schema lets in."""
    _only(schema, OF_TEXTS)
    if "enum" in schema:
        return "|".join(regex(text) for text in schema["enum"])
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    given = [key for key in ("pattern", "format") if key in schema]
    if len(given) + (bool(least) or most != "") > 1:
        raise ValueError("a text's length, pattern and format cannot be enforced together; leave all but one")
    if given == ["format"]:
        if schema["format"] not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"format {str(schema['format'])[:40]!r} is not one of {known}; leave it out")
        return FORMATS[schema["format"]]
    return _searched(schema["pattern"]) if given else f".{{{least},{most}}}" if least or most else ".*"


def _searched(pattern: str) -> str:
    """Return a pattern that is found anywhere in a text as one of the whole text."""
    depth, ways, at = 0, [""], 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|.", pattern, re.DOTALL):
        at += len(piece)
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            ways.append("")
        else:
            ways[-1] += re.sub(r"\\.|/", _escaped, piece, flags=re.DOTALL).replace("\n", r"\n")
    made = []
    for way in ways:
        begin = "" if way.startswith("^") else ".*"
        end = "" if re.search(r"(?<!\\)(\\\\)*\$$", way) else ".*"
        made.append(begin + "(" + way[not begin : len(way) - (not end)] + ")" + end)
    return "|".join(made)


def _escaped(found: re.Match[str]) -> str:
    """Return a slash as an escape, also one within a class: it would end the pattern."""
    return r"\/" if found[0] == "/" else found[0]


def _whole(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of `root` as a schema of its own."""
    if '"$ref"' not in json.dumps(schema):
        return dict(schema)
    return {"$defs": {"root": _moved(root)}, **_moved(schema)}


def _moved(schema: Any) -> Any:
    """Return a schema whose references are to `root` among the definitions."""
    if isinstance(schema, list):
        return [_moved(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {k: v if k in ("enum", "const", "default") else _moved(v) for k, v in schema.items()}
    if isinstance(at := made.get("$ref"), str) and at.startswith("#"):
        made["$ref"] = "#/$defs/root" + at.removeprefix("#")
    return made
