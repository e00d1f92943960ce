"""Every error a client can meet, in OpenAI's shape with llama.cpp's types. Must not know routes."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from thermocline.errors import ThermoclineError, UsageError
from thermocline.server.process import EngineCrashed

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """`more`: further keys of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        retry_after: int | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_after = status, message, param, retry_after
        self.type = type or TYPES.get(status, "invalid_request_error")
        self.code, self.more = status if code is None else code, more or {}

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error | self.more}


def of_validation(e: ValidationError) -> ApiError:
    """The first of what is wrong, with where it is."""
    first = e.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return ApiError(400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None)


def of_engine(e: ThermoclineError) -> ApiError:
    """What the engine says of a request; a crash is the server's fault, a wrong request the client's."""
    if isinstance(e, UsageError):
        return ApiError(400, str(e))
    code = "engine_crashed" if isinstance(e, EngineCrashed) else type(e).__name__
    return ApiError(500, str(e), code=code)
