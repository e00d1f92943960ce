"""The kinds of values that a JSON schema lets in: which texts are values of it, and which parts it has.

Used where arguments are read and where a grammar asks for them; it imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ABOUT = {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
UNIONS = ("anyOf", "oneOf")
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def kind_of(value: Any) -> str:
    return KINDS.get(type(value), "null")


def kinds(schema: Any, root: Any) -> set[str]:
    """Return the kinds of values that `schema`, a part of `root`, names; none: it names no kind."""
    found: set[str] = set()
    try:
        choices = members(schema, root)
    except ValueError:
        return found
    for member in choices:
        if "enum" in member:
            found |= set(map(kind_of, member["enum"]))
        elif isinstance(member.get("type"), str):
            found.add(member["type"])
        else:
            return set()
    return found


def members(schema: Any, root: Any, seen: set[str] | None = None) -> list[Mapping[str, Any]]:
    """Return the schemas that `schema` is a choice of: each has one type, an enum of one type, or neither.

    A reference is followed once, since a choice is the same twice; so this takes linear time.
    """
    seen = set() if seen is None else seen
    if not isinstance(schema, Mapping):
        return [{}]
    rest = schema.keys() - ABOUT
    if isinstance(at := schema.get("$ref"), str) and rest == {"$ref"}:
        if at in seen:
            return []
        seen.add(at)
        return members(pointed(at, root), root, seen)
    for union in UNIONS:
        choices = schema.get(union)
        if rest in ({union}, {union, "type"}) and isinstance(choices, list):
            return [m for choice in choices for m in members(choice, root, seen)]
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if isinstance(schema.get("enum"), list):
        texts = [v for v in schema["enum"] if isinstance(v, str)]
        others = [v for v in schema["enum"] if not isinstance(v, str)]
        return [{"enum": values} for values in (texts, others) if values]
    if isinstance(types := schema.get("type"), list):
        return [{**schema, "type": one} for one in types]
    return [schema]


def pointed(at: str, root: Any) -> Any:
    """Return what a reference such as #/$defs/x is to. Raise ValueError if there is nothing."""
    if not at.startswith("#"):
        raise ValueError(f"the reference {at[:80]!r} leads out of the schema")
    for step in at.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            root = root[int(step)] if isinstance(root, Sequence) else root[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"the reference {at[:80]!r} leads nowhere") from None
    return root
