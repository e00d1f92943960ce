"""An error as clients of OpenAI's API and of Anthropic's expect it, and the headers of every response.

OpenAI's types are llama.cpp's; `code` is the HTTP status unless the error has a name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "server_error",
}
# In Anthropic's API. Others: invalid_request_error below 500, api_error from there on.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_ROUTES = "/v1/messages"
_RESPONSES_ROUTE = "/v1/responses"
TOO_LONG = "context_length_exceeded"  # code of a prompt that the context cannot hold
_LONGEST_MESSAGE = 2000
_LONGEST_PARAM = 200  # a client can make up a field name of megabytes

# Our page runs our scripts and talks to our server only, whatever a model writes. No page can frame it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Gone(Exception):
    """The client left: there is nobody to answer."""


class Refusal(Exception):
    """An HTTP error; the guard sends it. `extra`: further keys of the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {
            "message": message[:_LONGEST_MESSAGE],
            "type": type or TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": None if param is None else param[:_LONGEST_PARAM],
            "code": status if code is None else code,
            **(extra or {}),
        }
        retry = {"retry-after": "1"} if status in (429, 503) else {}
        self.headers = {**retry, **(headers or {})}

    def body(self, path: str = "") -> bytes:
        """Return the error as the path's API has it.

        It is JSON in ASCII, which is valid even if it quotes an unpaired surrogate.
        """
        return json.dumps(self.anthropic() if _is_anthropic(path) else {"error": self.error}).encode("ascii")

    def event(self, path: str) -> bytes:
        """Return the error as the last event of a stream."""
        if path == _RESPONSES_ROUTE:
            return b"event: error\ndata: " + json.dumps(self._of_responses()).encode("ascii") + b"\n\n"
        name = b"event: error\n" if _is_anthropic(path) else b""
        return name + b"data: " + self.body(path) + b"\n\n"

    def _of_responses(self) -> dict[str, object]:
        """Return the error as an event of OpenAI's Responses. Its Python client reads `error` alone."""
        about = {name: self.error[name] for name in ("message", "param")}
        return {"type": "error", "code": str(self.error["code"]), **about, "error": self.error}

    def anthropic(self) -> dict[str, object]:
        """Return the error as Anthropic's API has it. By its words Claude Code knows a prompt as too long."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        words = "prompt is too long: " if self.error["code"] == TOO_LONG else ""
        return {"type": "error", "error": {"type": kind, "message": f"{words}{self.error['message']}"}}

    def http_headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        ours = {"content-type": "application/json", "content-length": str(len(body)), **self.headers}
        return [(name.encode("ascii"), value.encode("latin-1")) for name, value in ours.items()]


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_ROUTES or path.startswith(f"{_ANTHROPIC_ROUTES}/")
