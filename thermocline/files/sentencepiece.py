"""Read untrusted SentencePiece models: the fields that decide how text becomes pieces.

The protocol buffer is parsed here: its format has five rules, and the protobuf runtime is a large dependency.
No memory is allocated from a size in the file. Failures are BadFile or Unsupported.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from thermocline.errors import BadFile, Unsupported
from thermocline.files.bounded import foreign, quoted

MAX_BYTES = 16 << 20  # the largest known model (a vocabulary of 262144) has 4.7 MB
MAX_PIECES = 1 << 20

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_BPE = 2
_ALGORITHMS = {1: "unigram", 3: "word", 4: "char"}


@dataclass
class SentencePieceModel:
    """Pieces by id, with scores and kinds. `space_prefix`: a space is added before a text."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    space_prefix: bool = True

    def add(self, piece: str, kind: int, score: float = 0.0) -> None:
        self.pieces.append(piece)
        self.kinds.append(kind)
        self.scores.append(score)


Value = int | memoryview


def _fields(data: memoryview, where: str) -> Iterator[tuple[int, int, Value]]:
    """Yield (field, wire type, value) of a message.

    A value is an integer, or the bytes of a text, a message or a number of fixed size.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        wire = key & 7
        if wire == _VARINT:
            number, at = _varint(data, at, where)
            yield key >> 3, wire, number
            continue
        if wire == _BYTES:
            size, at = _varint(data, at, where)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise BadFile(f"{where}: not a SentencePiece model: wire type {wire}")
        if size > len(data) - at:
            raise BadFile(f"{where}: truncated: a field of {size} bytes where {len(data) - at} are left")
        yield key >> 3, wire, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise BadFile(f"{where}: truncated: ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, at
    raise BadFile(f"{where}: not a SentencePiece model: a number of more than 10 bytes")


def parse(data: bytes, name: str) -> SentencePieceModel:
    """Parse a SentencePiece model. `name` is the file, for messages. Raises BadFile or Unsupported."""
    what = foreign(data[:64])
    if what is not None:
        raise BadFile(f"{name}: this is {what}")
    model = SentencePieceModel()
    algorithm, squeeze, charsmap, escapes = 1, True, False, True
    for number, wire, value in _fields(memoryview(data), name):
        if number in (1, 2, 3) and wire != _BYTES:
            raise BadFile(f"{name}: not a SentencePiece model: field {number} is not a message")
        if not isinstance(value, memoryview):
            continue
        if number == 1:
            _add_piece(model, value, name)
        elif number == 2:  # the trainer's options
            for n, w, v in _fields(value, f"{name}: trainer_spec"):
                if n == 3 and w == _VARINT and isinstance(v, int):
                    algorithm = v
                if n == 24 and w == _VARINT and v:
                    raise Unsupported(f"{name}: writes whitespace as a suffix, which is not supported")
        elif number == 3:  # the normaliser's options
            for n, w, v in _fields(value, f"{name}: normalizer_spec"):
                charsmap |= n == 2 and w == _BYTES and isinstance(v, memoryview) and len(v) > 0
                if w == _VARINT and n == 3:
                    model.space_prefix = bool(v)
                squeeze = bool(v) if w == _VARINT and n == 4 else squeeze
                escapes = bool(v) if w == _VARINT and n == 5 else escapes
    _require_supported(model, name, algorithm, charsmap or squeeze or not escapes)
    return model


def _require_supported(model: SentencePieceModel, name: str, algorithm: int, normalises: bool) -> None:
    if not model.pieces:
        raise BadFile(f"{name}: not a SentencePiece model: it has no pieces")
    if algorithm != _BPE:
        called = _ALGORITHMS.get(algorithm, f"of type {algorithm}")
        raise Unsupported(f"{name}: a {called} model; of SentencePiece's, BPE models can be read")
    if normalises:
        raise Unsupported(
            f"{name}: rewrites text (nmt_nfkc, or spaces) before it is cut, which is not supported; "
            "if the model has a tokenizer.json, put it beside this file"
        )


def _add_piece(model: SentencePieceModel, data: memoryview, name: str) -> None:
    where = f"{name}: piece {len(model.pieces)}"
    if len(model.pieces) == MAX_PIECES:
        raise BadFile(f"{name}: more than {MAX_PIECES} pieces")
    piece, score, kind = "", 0.0, 1
    for number, wire, value in _fields(data, where):
        if number == 1 and wire == _BYTES and isinstance(value, memoryview):
            try:
                piece = value.tobytes().decode()
            except UnicodeDecodeError:
                raise BadFile(f"{where}: {quoted(value.tobytes())} is not UTF-8") from None
        elif number == 2 and wire == _FIXED32 and isinstance(value, memoryview):
            score = struct.unpack("<f", value)[0]
        elif number == 3 and wire == _VARINT and isinstance(value, int):
            kind = value
    if not math.isfinite(score) or not 1 <= kind <= 6:
        raise BadFile(f"{where}: score {score}, type {kind}")
    model.add(piece, kind, score)
