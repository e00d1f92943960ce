"""Make a tokenizer.json from a vocabulary, so that the `tokenizers` library cuts text as the original does.

The readers of a vocabulary check its values one by one. This file checks what the values mean together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from thermocline.convert.pretokenizers import PreTokenizer
from thermocline.errors import BadFile
from thermocline.files.bounded import quoted
from thermocline.text.tokenizer import BYTE_OF

Json = dict[str, Any]

MAX_TOKENS = 1 << 20
MAX_PIECE_CHARS = 256  # of one SentencePiece piece: all ways to cut it in two are tried
MAX_PIECES_CHARS = 1 << 23  # of all pieces together; Gemma's have 1.8 million
SPACE = "▁"  # SentencePiece's
# Cuts before a space that follows another character. No merge crosses such a cut if no piece contains one.
WORDS: Json = {
    "type": "Split",
    "pattern": {"Regex": f"{SPACE}*[^{SPACE}]+|{SPACE}+"},
    "behavior": "Isolated",
    "invert": False,
}
_INNER_SPACE = re.compile(f"[^{SPACE}]{SPACE}")


class Kind(IntEnum):
    """The kind of a token. GGUF uses SentencePiece's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass
class SourceVocabulary:
    """A vocabulary as GGUF and SentencePiece have it. `name` is the file, for messages."""

    name: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)  # SentencePiece: the highest score merges first
    bos: int | None = None  # put before a text
    eos: int | None = None  # put after it
    strips_right: frozenset[int] = frozenset()  # control tokens that swallow the whitespace after them

    def __post_init__(self) -> None:
        if not 0 < len(self.tokens) <= MAX_TOKENS:
            raise BadFile(f"{self.name}: has {len(self.tokens)} tokens, not 1 to {MAX_TOKENS}")
        self.tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(self.tokens)]
        self.ids = {t: i for i, t in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            i = next(i for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise BadFile(
                f"{self.name}: tokens {i} and {self.ids[self.tokens[i]]} are both {quoted(self.tokens[i])}"
            )
        for i, kind in enumerate(self.kinds):
            if kind == Kind.BYTE and not _BYTE.fullmatch(self.tokens[i]):
                raise BadFile(
                    f"{self.name}: token {i} is a byte, but is {quoted(self.tokens[i])}, not <0xNN>"
                )

    def missing_bytes(self) -> bool:
        return not all(f"<0x{b:02X}>" in self.ids for b in range(256))


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def _encoded(tokenizer: Json) -> bytes:
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def byte_level(v: SourceVocabulary, merges: list[str], pre: PreTokenizer) -> bytes:
    """Return the tokenizer.json of a GPT-2-like vocabulary: bytes as 256 characters, merges as given."""
    absent = [b for c, b in BYTE_OF.items() if c not in v.ids and b in _EVERYDAY]
    if absent:
        raise BadFile(f"{v.name}: no token for the byte 0x{absent[0]:02X}, so text with it would be lost")
    pairs = _pairs(v, merges)
    return _encoded(
        {
            **_frame(v),
            "normalizer": {"type": "NFC"} if pre.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps()},
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {**_bpe(v, pairs), "ignore_merges": pre.whole_words},
        }
    )


def _pairs(v: SourceVocabulary, merges: list[str]) -> list[tuple[str, str]]:
    """Return merges as GGUF has them, each of two tokens that make a third."""
    pairs = []
    for i, merge in enumerate(merges):
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in v.ids or right not in v.ids or left + right not in v.ids:
            raise BadFile(f"{v.name}: tokenizer.ggml.merges[{i}] {quoted(merge)} is not of two tokens that "
                          "make a third")  # fmt: skip
        pairs.append((left, right))
    return pairs


_EVERYDAY = (0x0A, *range(0x20, 0x7F))  # Falcon has no tokens for most control characters, nor for 0xF2


def sentencepiece(v: SourceVocabulary, space_prefix: bool, merges: list[str] | None = None) -> bytes:
    """Return the tokenizer.json of a Llama-like vocabulary.

    A space is ▁, characters without a piece become bytes, and merges come in the order of scores, unless
    the file has them.
    """
    unknown = next((t for t, k in zip(v.tokens, v.kinds, strict=True) if k == Kind.UNKNOWN), None)
    unknown = "<unk>" if unknown is None and "<unk>" in v.ids else unknown
    if v.missing_bytes() and unknown is None:
        raise BadFile(f"{v.name}: neither tokens for all bytes nor an unknown token: text would be lost")
    prefix = [{"type": "Prepend", "prepend": SPACE}] if space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_prefix else []
    to_space: Json = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return _encoded(
        {
            **_frame(v),
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}],
            },
            "pre_tokenizer": WORDS if _cut_by_spaces(v) else None,
            "decoder": {
                "type": "Sequence",
                "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
            "model": {
                **_bpe(v, _merges(v) if merges is None else _pairs(v, merges)),
                "unk_token": unknown,
                "fuse_unk": True,
                "byte_fallback": not v.missing_bytes(),
            },
        }
    )


def _cut_by_spaces(v: SourceVocabulary) -> bool:
    """Return whether text may be cut at spaces before merging, which takes 0.6 of the time.

    Unknown characters would join across a cut, so every byte must have a token.
    """
    return not v.missing_bytes() and SPACE in v.ids and not any(map(_INNER_SPACE.search, v.tokens))


def _merges(v: SourceVocabulary) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, best score first: SentencePiece's order as merges.

    Among equal scores SentencePiece takes the leftmost pair in the text, which a list of merges cannot
    express. In trained models only pairs that make the same piece have equal scores.
    """
    pieces = {
        t: i for i, (t, k) in enumerate(zip(v.tokens, v.kinds, strict=True))
        if k in (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED) and not _BYTE.fullmatch(t)
    }  # fmt: skip
    if sum(map(len, pieces)) > MAX_PIECES_CHARS:
        raise BadFile(f"{v.name}: its tokens have more than {MAX_PIECES_CHARS} characters together")
    pairs: list[tuple[float, int, int, str, str]] = []
    for piece, i in pieces.items():
        if len(piece) > MAX_PIECE_CHARS:
            if v.kinds[i] != Kind.NORMAL:
                continue  # such a token is found whole, not by merging
            raise BadFile(f"{v.name}: token {i} has {len(piece)} characters (limit {MAX_PIECE_CHARS})")
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                pairs.append((-v.scores[i], i, -at, left, right))
    pairs.sort()
    return [(left, right) for *_, left, right in pairs]


def _bpe(v: SourceVocabulary, merges: Sequence[tuple[str, str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": v.ids,
        "merges": merges,
    }


def _frame(v: SourceVocabulary) -> Json:
    """Return the parts that both kinds share: added tokens, and the tokens around a text."""
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": i in v.strips_right,
            "normalized": False,
            "special": kind != Kind.USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(v.tokens, v.kinds, strict=True))
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _around(v) if (v.bos, v.eos) != (None, None) else None,
    }


def _around(v: SourceVocabulary) -> Json:
    def special(token: int | None, sequence: int) -> list[Json]:
        return [] if token is None else [{"SpecialToken": {"id": v.tokens[token], "type_id": sequence}}]

    def template(name: str, sequence: int) -> list[Json]:
        text = {"Sequence": {"id": name, "type_id": sequence}}
        return [*special(v.bos, sequence), text, *special(v.eos, sequence)]

    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": {
            v.tokens[i]: {"id": v.tokens[i], "ids": [i], "tokens": [v.tokens[i]]}
            for i in (v.bos, v.eos)
            if i is not None
        },
    }
