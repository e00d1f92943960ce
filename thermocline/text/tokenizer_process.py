"""The `tokenizers` library in a confined process, because a tokenizer.json is an untrusted program, too.

A pattern may never end, a replacement may fill all memory, and the library's panics end the process that
calls it. Here each of these is one request's error. The tokens' names are fetched once.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.files.small_files import SmallFiles
from thermocline.text.confined_process import WAIT_S, Ask, ConfinedProcess, ProcessEnded, paths_of

WORKER = "thermocline.text.tokenizer_worker"
FILE = "tokenizer.json"
WAIT_S_PER_BYTE = 2e-5
MAX_BYTES = 256 << 20  # the largest known (vocabulary 262144) has 33 MB
_ANY_SIZE = (1 << 32) - 1
_ERRORS = {e.__name__: e for e in (BadFile, Unsupported, UsageError)}


@dataclass(frozen=True)
class Added:
    """A token beside the model's own vocabulary, found in a text before the rest is split."""

    id: int
    content: str
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class TokenizerProcess:
    """The process of one tokenizer.json. Safe to use from several threads."""

    def __init__(self, files: SmallFiles, size: int | None = None, ends: Sequence[int] = ()) -> None:
        """`size`: of the model's vocabulary, beyond which added tokens are dropped: they stay text.

        `ends`: tokens that begin or end a text; those that look like control tokens count as such.
        """
        self._files, self._name = files, files.label(FILE)
        self._most = _ANY_SIZE if size is None else size
        self._control_ids = array("I", ends).tobytes()
        self._facts = b""
        self._twins: list[bytes] = []
        self._confined = ConfinedProcess(WORKER, paths_of("tokenizers"), self._begin)
        try:
            self._confined.start()
        except ProcessEnded as e:
            raise BadFile(f"{self._name}: not a usable tokenizer: reading it {e}") from None
        (head,) = struct.unpack_from("=I", self._facts)
        self.about: dict[str, Any] = json.loads(self._facts[4 : 4 + head])
        self.size: int = self.about["tokens"]
        self.added = [Added(*token) for token in self.about["added"]]
        names = 4 + head + 4 * self.size
        self._ends = memoryview(self._facts)[4 + head : names].cast("I")
        self._names = memoryview(self._facts)[names:]

    def _begin(self, ask: Ask) -> None:
        """Send a new process the file, then the twins."""
        ends = struct.pack("=II", self._most, len(self._control_ids)) + self._control_ids
        facts = self._done(ask(b"L" + ends + self._read()))
        if self._facts and facts != self._facts:
            raise BadFile(f"{self._name}: was replaced while in use; open the model again")
        self._facts = facts
        for twin in self._twins:
            self._done(ask(twin))

    def _done(self, reply: bytes) -> bytes:
        if reply[:1] == b"+":
            return reply[1:]
        failed = json.loads(reply[1:])
        error, why = _ERRORS[failed["error"]], failed["why"]
        raise error(why if error is UsageError else f"{self._name}: {why}")

    def _ask(self, request: bytes) -> bytes:
        try:
            return self._done(self._confined.ask(request, WAIT_S + WAIT_S_PER_BYTE * len(request)))
        except ProcessEnded as e:
            raise BadFile(
                f"{self._name}: this text {e} to tokenise with this tokenizer; shorten it"
            ) from None

    def _read(self) -> bytes:
        if not self._files.has(FILE):
            raise BadFile(
                f"{self._name}: not found; the model's directory needs a {FILE} to turn text into tokens"
            )
        return self._files.read(FILE, MAX_BYTES)

    def name(self, token: int) -> str:
        """Return the vocabulary's name of a token, "" for unused ids."""
        if not 0 <= token < self.size:
            return ""
        begin = self._ends[token - 1] if token else 0
        return str(self._names[begin : self._ends[token]], "utf-8")

    def encode(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
        flags = bytes([add_special | parse_special << 1])
        return _ids(self._ask(b"E" + flags + text))

    def twin(self, renamed: Mapping[str, str], filler: str) -> int:
        """Make a twin, a tokenizer in which added tokens have other names; return its number.

        `filler`: the beginning of the names of unused ids.
        """
        request = b"T" + json.dumps({"renamed": renamed, "filler": filler}).encode()
        self._ask(request)
        self._twins.append(request)
        return len(self._twins) - 1

    def encode_as_twin(self, twin: int, text: bytes) -> list[int]:
        """Return a text's ids by the twin, as ids of this tokenizer."""
        return _ids(self._ask(b"G" + struct.pack("=I", twin) + text))

    def canonical(self) -> str:
        """Return the whole tokenizer.json, as the library writes it."""
        return self._ask(b"J").decode()

    def close(self) -> None:
        """End the process; the next text starts another."""
        self._confined.close()


def _ids(reply: bytes) -> list[int]:
    return array("I", reply).tolist()
