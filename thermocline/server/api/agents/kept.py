"""Responses that are kept in memory, so that a request can go on from one by its id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from thermocline.server.http.refusal import Refusal


@dataclass(frozen=True)
class KeptResponse:
    body: bytes  # the response, as JSON
    conversation: tuple[bytes, ...]  # its messages and those before it, as JSON lists

    @property
    def size(self) -> int:
        """Return its bytes. What it shares with the responses before it counts for each of them."""
        return len(self.body) + sum(map(len, self.conversation))


class KeptResponses:
    """The last responses, within a number and a size. The oldest goes first."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._bytes = 0

    def keep(self, id: str, kept: KeptResponse) -> None:
        self._kept[id] = kept
        self._bytes += kept.size
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def get(self, id: str) -> KeptResponse:
        """Return a response. Refuse with 404 if it is not kept, or not any more."""
        if (found := self._kept.get(id)) is None:
            raise Refusal(404, "there is no such response, or it is not kept any more")
        return found

    def drop(self, id: str) -> None:
        """Forget a response. Refuse with 404 if there is none."""
        self._bytes -= self.get(id).size
        del self._kept[id]

    def before(self, id: str) -> tuple[bytes, ...]:
        """Return the conversation up to a response. Refuse with 400 if it is not kept."""
        if (found := self._kept.get(id)) is None:
            raise Refusal(
                400, "previous_response_id: this response is not kept any more; send all items as input",
                param="previous_response_id", code="previous_response_not_found"
            )  # fmt: skip
        return found.conversation
