"""Tokenise, in the confined process of `tokenizer_process.py`: the only user of `tokenizers`.

Besides `confinement.py` and `tokenizer_parts.py` this file imports nothing of the package. A request is a
letter and its data. An answer is `+` and the result, or `-` and JSON with the error. Whatever the library
raises becomes such an error, even its panics, which are not Exceptions.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterable, Mapping, Set
from itertools import accumulate
from typing import Any

from tokenizers import AddedToken, Tokenizer

from thermocline.text.confinement import Bounds, serve
from thermocline.text.tokenizer_parts import (
    CONTROL,
    MARKER,
    PARTS,
    UnusableTokenizer,
    check,
    check_tokens,
    check_words,
)

# Measured with 262,144 tokens and with GPT-NeoX: 0.03 us and 22 bytes for a byte of the file, 0.6 us and
# 210 bytes for a byte of text. The margins allow for slow machines and for texts that normalising lengthens.
CPU_S, CPU_S_PER_BYTE = 2.0, 5e-6
MEMORY_BYTES, PER_FILE_BYTE, PER_TEXT_BYTE = 512 << 20, 64, 640
MOST_MEMORY_BYTES = 32 << 30
MAX_GAPS = 1 << 16  # ids that a vocabulary leaves out; known files leave out none


class Unwritable(Exception):
    """A text contains the name of a control token, which this vocabulary cannot write as text."""


class Loaded:
    """A tokenizer and its twins."""

    def __init__(self, data: bytes, size: int, ends: Iterable[int]) -> None:
        """`size`: of the model's vocabulary. `ends`: tokens that begin or end a text."""
        self.tok = tok = _within(_library(data), size)
        vocabulary: dict[str, int] = tok.get_vocab(with_added_tokens=True)
        self._highest = check_tokens(vocabulary)
        self._names = [""] * (self._highest + 1)
        for name, i in vocabulary.items():
            self._names[i] = name
        self.added = sorted(tok.get_added_tokens_decoder().items())
        for i, token in self.added:
            self._names[i] = token.content
        unknown = getattr(tok.model, "unk_token", None)
        self._unknown: int | None = None if unknown is None else tok.token_to_id(unknown)
        self.controls = {i: t.content for i, t in self.added if t.special or CONTROL.fullmatch(t.content)}
        named = {i: self._names[i] for i in ends if i < len(self._names)}
        self.controls |= {i: name for i, name in named.items() if MARKER.fullmatch(name)}
        if self._unknown is not None:
            self.controls.pop(self._unknown, None)
        added = dict(self.added)
        special = {i for i, t in self.added if t.special}
        tok.add_special_tokens([added.get(i, name) for i, name in self.controls.items() if i not in special])
        self.twins: list[Twin] = []

    def facts(self) -> bytes:
        """Return the tokenizer's facts as bytes: JSON, then where each name ends, then all names by id."""
        spelt = [name.encode() for name in self._names]
        about = {
            "tokens": len(spelt),
            "added": [
                (i, t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
                for i, t in self.added
            ],
            "controls": list(self.controls),
            "unknown": self._unknown,
            "byte_fallback": bool(getattr(self.tok.model, "byte_fallback", False)),
            "decoder": _state(self.tok.decoder),
        }
        head = json.dumps(about).encode()
        head += b" " * (-len(head) % 4)
        ends = array("I", accumulate(map(len, spelt))).tobytes()
        return struct.pack("=I", len(head)) + head + ends + b"".join(spelt)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.tok.encode_special_tokens = not parse_special
        found = self.tok.encode(text, add_special_tokens=add_special)
        ids: list[int] = found.ids
        if parse_special or self.controls.keys().isdisjoint(ids):
            return ids
        around = found.special_tokens_mask
        return [i for n, token in enumerate(ids) for i in ([token] if around[n] else self._spelt(token))]

    def _spelt(self, token: int) -> list[int]:
        """Return [token], or the spelling of a control token that merging made of text."""
        if token not in self.controls:
            return [token]
        return spelt(self.tok, self.controls[token], self.controls.keys())


class Twin:
    """A tokenizer over the same model in which some added tokens have other names."""

    def __init__(self, loaded: Loaded, renamed: Mapping[str, str], fillers: Iterable[str]) -> None:
        """`renamed`: new names of control tokens. `fillers`: names for the ids that are unused."""
        self.tok = tok = Tokenizer(loaded.tok.model)
        tok.normalizer, tok.pre_tokenizer = loaded.tok.normalizer, loaded.tok.pre_tokenizer
        names = [renamed.get(t.content, t.content) for _, t in loaded.added]
        # The library numbers added tokens from the count of tokens on. Without fillers, an added token could
        # get the id of one in the vocabulary.
        tok.add_tokens([name for name, _ in zip(fillers, range(_gaps(tok)), strict=False)])
        tok.add_tokens(
            [
                AddedToken(
                    name,
                    single_word=t.single_word and t.content == name,
                    lstrip=t.lstrip,
                    rstrip=t.rstrip,
                    # A new name must be found whatever surrounds it.
                    normalized=t.normalized and t.content == name,
                )
                for name, (_, t) in zip(names, loaded.added, strict=True)
            ]
        )
        self._id_of = {tok.token_to_id(n): i for n, (i, _) in zip(names, loaded.added, strict=True)}
        self._controls = {i: t.content for i, t in loaded.added if t.content in renamed}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i in self.tok.encode(text, add_special_tokens=False).ids:
            if i in self._id_of:
                ids.append(self._id_of[i])
            elif i in self._controls:  # a unigram model may make it of text
                ids += spelt(self.tok, self._controls[i], self._controls.keys())
            else:
                ids.append(i)
        return ids


def spelt(tok: Any, name: str, controls: Set[int]) -> list[int]:
    """Return a control token's name as ids of text, in two pieces, with none of `controls`."""
    ids: list[int] = [t.id for part in (name[:1], name[1:]) for t in tok.model.tokenize(part)]
    if not controls.isdisjoint(ids):
        raise Unwritable(f"this model's tokenizer cannot write {name!r} as plain text; leave it out")
    return ids


def _library(data: bytes) -> Any:
    try:
        tok = Tokenizer.from_buffer(data)
    except ValueError as e:
        raise UnusableTokenizer(f"not a tokenizer: {e}") from None
    tok.no_truncation()  # some files cut or pad prompts, which would go unnoticed
    tok.no_padding()
    check("model", {"type": type(tok.model).__name__})
    check_words(getattr(tok.model, "max_input_chars_per_word", 0))
    for kind in PARTS.keys() - {"model"}:
        check(kind, _state(getattr(tok, kind)))
    return tok


def _within(tok: Any, size: int) -> Any:
    """Return the tokenizer without the added tokens that a model of `size` tokens lacks.

    Gemma 3 1B shares its file with larger models: <image_soft_token> is one beyond its own.
    """
    if any(i >= size for i in tok.get_added_tokens_decoder()):
        state = json.loads(tok.to_str())
        state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < size]
        tok = Tokenizer.from_str(json.dumps(state))
    for token in tok.encode("", add_special_tokens=True).ids:
        if token >= size:
            raise UnusableTokenizer(
                f"puts the token {token} around texts, but the model's are 0 to {size - 1}"
            )
    return tok


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _gaps(tok: Any) -> int:
    ids = tok.get_vocab(with_added_tokens=False).values()
    gaps: int = max(ids, default=-1) + 1 - len(ids)
    if gaps > MAX_GAPS:
        raise UnusableTokenizer(
            f"its {len(ids)} tokens leave out {gaps} ids up to {max(ids)}; the most is {MAX_GAPS}"
        )
    return gaps


# ---- requests


class TokenizerWorker:
    def __init__(self) -> None:
        self._loaded: Loaded | None = None
        self._memory = MEMORY_BYTES

    def bounds(self, request: bytes) -> Bounds:
        if request[:1] == b"L":
            self._memory = MEMORY_BYTES + PER_FILE_BYTE * len(request)
            return Bounds(CPU_S + CPU_S_PER_BYTE * len(request), self._memory)
        return Bounds(CPU_S + CPU_S_PER_BYTE * len(request), self._memory + PER_TEXT_BYTE * len(request))

    def answer(self, request: bytes) -> bytes:
        try:
            return b"+" + self._answer(request[:1], request[1:])
        except UnusableTokenizer as e:
            return _no("Unsupported" if e.unsupported else "BadFile", str(e))
        except Unwritable as e:
            return _no("UsageError", str(e))
        except MemoryError:
            return _no("BadFile", "it takes too much memory")
        except BaseException as e:  # a panic is no Exception
            return _no("BadFile", f"the tokenizers library fails on it: {' '.join(str(e).split())[:200]}")

    def _answer(self, what: bytes, given: bytes) -> bytes:
        if what == b"L":
            size, ends = struct.unpack_from("=II", given)
            self._loaded = Loaded(given[8 + ends :], size, array("I", given[8 : 8 + ends]))
            return self._loaded.facts()
        assert self._loaded is not None, "the first request"
        if what == b"E":
            add, parse = given[0] & 1, given[0] & 2
            ids = self._loaded.encode(given[1:].decode(), add_special=bool(add), parse_special=bool(parse))
            return array("I", ids).tobytes()
        if what == b"T":
            asked = json.loads(given)
            self._loaded.twins.append(Twin(self._loaded, asked["renamed"], _fillers(asked["filler"])))
            return b""
        if what == b"G":
            (twin,) = struct.unpack_from("=I", given)
            return array("I", self._loaded.twins[twin].encode(given[4:].decode())).tobytes()
        assert what == b"J"
        text: str = self._loaded.tok.to_str()
        return text.encode()


def _fillers(name: str) -> Iterable[str]:
    return (name + "".join(chr(97 + int(digit)) for digit in str(i)) for i in range(MAX_GAPS))


def _no(error: str, why: str) -> bytes:
    return b"-" + json.dumps({"error": error, "why": " ".join(why.split())[:300]}).encode()


def main() -> None:
    worker = TokenizerWorker()
    serve(worker.answer, worker.bounds, most_bytes=MOST_MEMORY_BYTES)
