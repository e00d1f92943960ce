"""A refusal of a chat, said in the words of the API that the client speaks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from thermocline.server.http.refusal import Refusal


@contextlib.contextmanager
def renamed(params: Mapping[str, str]) -> Iterator[None]:
    """Let a refusal name the client's field instead of the chat's."""
    try:
        yield
    except Refusal as e:
        theirs = params.get(str(e.error["param"]))
        if theirs is None:
            raise
        said = str(e.error["message"]).removeprefix(f"{e.error['param']}: ")
        code = e.error["code"]
        raise Refusal(
            e.status, f"{theirs}: {said}", param=theirs, headers=e.headers,
            code=code if isinstance(code, str | int) else None
        ) from None  # fmt: skip
