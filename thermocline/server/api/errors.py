"""What the schema and the engine say of a request, as refusals. Must not know routes."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from thermocline.errors import ThermoclineError, UsageError
from thermocline.server.http.refusal import Refusal
from thermocline.server.process.engine_process import EngineCrashed
from thermocline.server.process.suspects import CrashesEngine

_LONGEST_NAME = 64  # of a key that a client made up


def of_validation(e: ValidationError, given: Any) -> Refusal:
    """The first of what is wrong, by its place in what was given: pydantic's way there names types, too."""
    first = e.errors(include_url=False, include_input=False, include_context=False)[0]
    path: list[str] = []
    for part in first["loc"]:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and isinstance(part, int)):
            given = given[part]  # type: ignore[index]
            path.append(str(part)[:_LONGEST_NAME])
    if first["type"] == "missing":
        path.append(str(first["loc"][-1]))
    where = ".".join(path)
    return Refusal(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None)


def of_engine(e: ThermoclineError) -> Refusal:
    """A wrong request is the client's fault, a crash the server's."""
    if isinstance(e, UsageError):
        return Refusal(400, str(e))
    if isinstance(e, CrashesEngine):  # no 5xx, which clients send again
        return Refusal(422, str(e), code="crashes_engine")
    code = "engine_crashed" if isinstance(e, EngineCrashed) else type(e).__name__
    return Refusal(500, str(e), code=code)
