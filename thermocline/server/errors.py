"""What the schema and the engine say of a request, as refusals. Must not know routes."""

from __future__ import annotations

from pydantic import ValidationError

from thermocline.errors import ThermoclineError, UsageError
from thermocline.server.process import EngineCrashed
from thermocline.server.refusal import Refusal


def of_validation(e: ValidationError) -> Refusal:
    """The first of what is wrong, with where it is."""
    first = e.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return Refusal(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None)


def of_engine(e: ThermoclineError) -> Refusal:
    """A wrong request is the client's fault, a crash the server's."""
    if isinstance(e, UsageError):
        return Refusal(400, str(e))
    code = "engine_crashed" if isinstance(e, EngineCrashed) else type(e).__name__
    return Refusal(500, str(e), code=code)
