"""Convert a GGUF's vocabulary or a SentencePiece model to tokenizer.json, once, at import.

Every pack then has a tokenizer.json, and one library (`tokenizers`) reads it. Input is untrusted and checked
in full. Failures are BadFile or Unsupported and name file and field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thermocline.convert import pretokenizers as names
from thermocline.convert.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from thermocline.convert.tokenizer_json import (
    MAX_TOKENS,
    SPACE,
    Kind,
    SourceVocabulary,
    byte_level,
    sentencepiece,
)
from thermocline.errors import BadFile, Unsupported
from thermocline.files import sentencepiece as sentencepiece_model
from thermocline.files.bounded import parse_json, quoted, read_small

MAX_JSON_BYTES = 64 << 20
MAX_MERGES = 1 << 22
MAX_TOKEN_CHARS = 4096
WHOLE = "tokenizer.huggingface.json"  # a whole tokenizer.json, used if `tokenizer.ggml.model` is none


# ---- from GGUF


def from_gguf(metadata: Mapping[str, Any], name: str) -> bytes:
    """Return the tokenizer.json for a GGUF's `tokenizer.ggml.*` keys. `name` is the file, for messages.

    Raises BadFile, and Unsupported for an unknown kind of vocabulary or pre-tokenizer.
    """
    m = _Metadata(metadata, name)
    if WHOLE in metadata and not _has_vocabulary(metadata):
        return m.whole()
    model = m.text("model")
    if model not in (names.SENTENCEPIECE, names.BYTE_LEVEL, names.MERGED_PIECES):
        raise Unsupported(
            f"{name}: tokenizer.ggml.model {quoted(model)} is not known; {names.SENTENCEPIECE} and "
            f"{names.MERGED_PIECES} (SentencePiece) and {names.BYTE_LEVEL} (byte-level) ones can be read"
        )
    tokens = m.strings("tokens", MAX_TOKENS, MAX_TOKEN_CHARS)
    kinds = m.kinds(len(tokens))
    if model == names.BYTE_LEVEL:
        pre = _pre_tokenizer(m)
        bos, eos = m.around(len(tokens), pre.bos)
        vocabulary = SourceVocabulary(name, tokens, kinds, bos=bos, eos=eos)
        return byte_level(vocabulary, m.strings("merges", MAX_MERGES, 2 * MAX_TOKEN_CHARS + 1), pre)
    if model == names.MERGED_PIECES:
        bos, _ = m.around(len(tokens), True)
        vocabulary = SourceVocabulary(name, tokens, kinds, bos=bos)
        return sentencepiece(vocabulary, False, m.strings("merges", MAX_MERGES, 2 * MAX_TOKEN_CHARS + 1))
    if m.flag("remove_extra_whitespaces", False):
        raise Unsupported(f"{name}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    bos, eos = m.around(len(tokens), True, defaults=(1, 2))
    vocabulary = SourceVocabulary(name, tokens, kinds, m.scores(len(tokens)), bos=bos, eos=eos)
    called = f"{metadata.get('general.architecture')} {metadata.get('general.name')}".lower()
    if any(part in called for part in names.STRIPPING):
        vocabulary.strips_right = frozenset(
            i for i, t in enumerate(tokens)
            if t in names.STRIPPING_TOO or (kinds[i] == Kind.CONTROL and t not in names.NOT_STRIPPING)
        )  # fmt: skip
    return sentencepiece(vocabulary, m.flag("add_space_prefix", True))


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    return _has_vocabulary(metadata) or WHOLE in metadata


def _has_vocabulary(metadata: Mapping[str, Any]) -> bool:
    model = metadata.get("tokenizer.ggml.model")
    return model is not None and not (isinstance(model, str) and model in ("none", "no_vocab"))


def _pre_tokenizer(m: _Metadata) -> PreTokenizer:
    key = "tokenizer.ggml.pre"
    if key in m.metadata:
        pre = m.text("pre")
    else:
        architecture = m.metadata.get("general.architecture")
        pre = names.BEFORE_NAMES.get(str(architecture), "")
        if not pre:
            raise Unsupported(f"{m.name}: has no {key}, which says how text is cut into words; "
                              "convert the model again with a newer llama.cpp")  # fmt: skip
    if pre not in PRE_TOKENIZERS:
        raise Unsupported(
            f"{m.name}: {key} {quoted(pre)} is not known; these are: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[pre]


@dataclass(frozen=True)
class _Metadata:
    """Typed access to the `tokenizer.ggml.*` keys. `name` is the file, for messages."""

    metadata: Mapping[str, Any]
    name: str

    def text(self, key: str) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, str):
            raise self._bad(key, value, "a name")
        return value

    def whole(self) -> bytes:
        value = self.metadata.get(WHOLE)
        if not isinstance(value, str) or not _is_unicode(value):
            raise BadFile(f"{self.name}: {WHOLE} is {quoted(value)}, not a text")
        return value.encode()

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool | np.bool_):
            raise self._bad(key, value, "true or false")
        return bool(value)

    def id(self, key: str, size: int, default: int | None) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < size:
            raise self._bad(key, value, f"a token from 0 to {size - 1}")
        return int(value)

    def strings(self, key: str, limit: int, chars: int) -> list[str]:
        values = self._list(key)
        if len(values) > limit:
            raise BadFile(f"{self.name}: tokenizer.ggml.{key} has {len(values)} entries (limit {limit})")
        for i, value in enumerate(values):
            if not isinstance(value, str) or len(value) > chars or not _is_unicode(value):
                raise self._bad(f"{key}[{i}]", value, f"text of at most {chars} characters")
        return values

    def kinds(self, size: int) -> list[int]:
        if "tokenizer.ggml.token_type" not in self.metadata:
            return [Kind.NORMAL] * size
        kinds = self._list("token_type", size)
        known = set(Kind)
        for i, kind in enumerate(kinds):
            if isinstance(kind, bool) or not isinstance(kind, int) or kind not in known:
                raise self._bad(f"token_type[{i}]", kind, "1 to 6")
        return kinds

    def scores(self, size: int) -> list[float]:
        scores = self._list("scores", size)
        for i, score in enumerate(scores):
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise self._bad(f"scores[{i}]", score, "a number")
        return scores

    def around(
        self, size: int, bos: bool, defaults: tuple[int | None, int | None] = (None, None)
    ) -> tuple[int | None, int | None]:
        """Return the ids to put before and after a text."""
        out = []
        for which, default, added in zip(("bos", "eos"), defaults, (bos, False), strict=True):
            default = default if default is not None and default < size else None
            token = self.id(f"{which}_token_id", size, default)
            out.append(token if self.flag(f"add_{which}_token", added) else None)
        return out[0], out[1]

    def _list(self, key: str, size: int | None = None) -> list[Any]:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        values = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(values, list):
            raise self._bad(key, value, "a list")
        if size is not None and len(values) != size:
            raise BadFile(f"{self.name}: tokenizer.ggml.{key} has {len(values)} entries for {size} tokens")
        return values

    def _bad(self, key: str, value: object, wanted: str) -> BadFile:
        shown = "missing" if value is None else quoted(value)
        return BadFile(f"{self.name}: tokenizer.ggml.{key} is {shown}, not {wanted}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- from a SentencePiece model


SENTENCEPIECE, ADDED_TOKENS, CONFIG = "tokenizer.model", "added_tokens.json", "tokenizer_config.json"


def from_directory(directory: Path) -> bytes:
    """Return the tokenizer.json for a Hugging Face directory with a tokenizer.model and maybe added tokens.

    Raises BadFile, IOFailure, Unsupported.
    """
    added: dict[int, tuple[str, bool]] = {}
    path = directory / ADDED_TOKENS
    if path.exists():
        for token, i in parse_json(read_small(path, MAX_JSON_BYTES), str(path)).items():
            added[_id(i, path)] = (token, False)
    path, config = directory / CONFIG, {}
    if path.exists():
        config = parse_json(read_small(path, MAX_JSON_BYTES), str(path))
        decoder = config.get("added_tokens_decoder", {})
        if not isinstance(decoder, dict):
            raise BadFile(f"{path}: added_tokens_decoder is {quoted(decoder)}, not tokens by id")
        for i, token in decoder.items():
            if not isinstance(token, dict) or not isinstance(token.get("content"), str):
                raise BadFile(f"{path}: added_tokens_decoder {quoted(i)} is {quoted(token)}, not a token")
            added[_id(i, path)] = (token["content"], token.get("special") is True)
    bos, eos = (config.get(f"add_{which}_token", which == "bos") is True for which in ("bos", "eos"))
    return from_sentencepiece(directory / SENTENCEPIECE, added, bos=bos, eos=eos)


def _id(value: object, path: Path) -> int:
    if not re.fullmatch("[0-9]{1,7}", str(value)):
        raise BadFile(f"{path}: {quoted(value)} is not a token id")
    return int(str(value))


def from_sentencepiece(
    path: Path | str,
    added: Mapping[int, tuple[str, bool]] | None = None,
    *,
    bos: bool = True,
    eos: bool = False,
) -> bytes:
    """Return the tokenizer.json for a SentencePiece model.

    `added` holds more tokens by id: (text, whether it is special). Raises BadFile, IOFailure, Unsupported.
    """
    name = str(path)
    model = sentencepiece_model.parse(read_small(Path(path), sentencepiece_model.MAX_BYTES), name)
    for i, (token, special) in sorted((added or {}).items()):
        if i > len(model.pieces):
            raise BadFile(f"{name}: added token {i} leaves a gap after {len(model.pieces) - 1}")
        if i == len(model.pieces):
            model.add(token, Kind.CONTROL if special else Kind.USER_DEFINED)
        elif model.pieces[i] != token:
            raise BadFile(f"{name}: token {i} is {quoted(model.pieces[i])}, not {quoted(token)} as added")
        elif special and model.kinds[i] != Kind.UNKNOWN:
            model.kinds[i] = Kind.CONTROL
    tokens = [
        t.replace(SPACE, " ") if k == Kind.USER_DEFINED else t
        for t, k in zip(model.pieces, model.kinds, strict=True)
    ]
    vocabulary = SourceVocabulary(name, tokens, model.kinds, model.scores)
    if bos:
        vocabulary.bos = vocabulary.ids.get("<s>", vocabulary.ids.get("<bos>"))
    if eos:
        vocabulary.eos = vocabulary.ids.get("</s>", vocabulary.ids.get("<eos>"))
    return sentencepiece(vocabulary, model.space_prefix)
