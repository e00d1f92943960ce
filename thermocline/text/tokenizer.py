"""Text to token ids and back, by a tokenizer.json.

A separate process turns text into ids (`tokenizer_process.py`); this file turns ids into text. A token stands
for bytes, not characters: `Detokenizer` gathers bytes and returns whole characters. So no text is decoded
twice, and a token costs the same however long the text is.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thermocline.errors import BadFile, Unsupported, UsageError
from thermocline.files.small_files import SmallFiles, small_files
from thermocline.model.spec import ModelSpec
from thermocline.text.tokenizer_process import FILE as FILE
from thermocline.text.tokenizer_process import Added, TokenizerProcess


class Tokenizer:
    """The tokenizer.json among a model's small files. `spec` bounds the ids, names the eos tokens."""

    def __init__(self, source: SmallFiles | Path | str, spec: ModelSpec | None = None) -> None:
        """`source`: the files, or the directory that they are in."""
        files = small_files(source)
        name = files.label(FILE)
        size = None if spec is None else spec.vocab_size
        ends = () if spec is None else tuple(i for i in (spec.bos_id, *spec.eos_ids) if i is not None)
        self._process = found = TokenizerProcess(files, size, ends)  # control tokens, whatever the file says
        highest = found.size - 1
        if spec is not None and highest >= spec.vocab_size:
            found.close()
            raise BadFile(
                f"{name}: has the token {highest}, but the model's tokens are 0 to {spec.vocab_size - 1}; "
                "it belongs to another model"
            )
        self.vocab_size: int = spec.vocab_size if spec is not None else found.size
        self.eos_ids: tuple[int, ...] = spec.eos_ids if spec is not None else ()
        self._special = {t.id for t in found.added if t.special}
        self._controls = {i: found.name(i) for i in found.about["controls"]}
        self._bytes_of, self._trim = _decoder(found.about["decoder"], name)

    @property
    def added(self) -> Sequence[Added]:
        return self._process.added

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text. `add_special` adds the tokens that the model expects around a text.

        `parse_special`: "<s>" in the text is the control token. Use it for trusted text only (the user's own
        prompt, a chat template). Otherwise "<s>" is three characters of text.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as e:
            raise UsageError(
                f"the text is not valid Unicode: remove the unpaired surrogate at character {e.start}"
            ) from None
        return self._process.encode(data, add_special=add_special, parse_special=parse_special)

    def renamed(self, names: Mapping[str, str], filler: str) -> Callable[[bytes], list[int]]:
        """Return `encode` of a twin of this tokenizer, in which added tokens have other names.

        `filler`: the beginning of the names of unused ids.
        """
        return partial(self._process.encode_as_twin, self._process.twin(names, filler))

    def close(self) -> None:
        """End the process; the next text starts another."""
        self._process.close()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids` without special tokens. Invalid bytes become U+FFFD."""
        detokenizer = Detokenizer(self)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def is_special(self, token: int) -> bool:
        return token in self._special

    def name(self, token: int) -> str:
        """Return the vocabulary's name of a token, "" for unused ids."""
        return self._process.name(token)

    def spelled(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, or its name if it adds none."""
        return self.token_bytes(token) or self.name(token).encode()

    def most_bytes(self, tokens: int) -> int | None:
        """Return the most bytes that a text of so many tokens can have: a longer one need not be tokenised.

        Normalising may shorten a text to a quarter ("𝐀" becomes "A"), hence the factor 4. None: there is no
        bound, because the token for unknown text may stand for any text.
        """
        about = self._process.about
        if about["unknown"] is not None and not about["byte_fallback"]:
            return None
        return 4 * max(len(self.spelled(i)) for i in range(self.vocab_size)) * tokens

    def is_control(self, token: int) -> bool:
        """Tell whether a token is not text, but says where text ends or who speaks."""
        return token in self._special or token in self._controls

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text (UTF-8); none for special tokens and unused ids."""
        return b"" if token in self._special else self._bytes_of(self._process.name(token))


class Detokenizer:
    """Turns ids into text as they come, in whole characters: bytes of an incomplete one wait.

    `continuing`: the text continues another, so a space at its start is kept.
    """

    def __init__(self, tokenizer: Tokenizer, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = not continuing

    def push(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        if self._at_start and data:
            data = self._tokenizer._trim(data)
            self._at_start = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """Return the waiting bytes as text, at the end. The Detokenizer can then be used for another text."""
        return self._utf8.decode(b"", final=True)


def read_text(path: Path) -> str:
    """Return a text file's characters unchanged. Raise BadFile if it is empty or not UTF-8 text."""
    data = path.read_bytes()
    if not data:
        raise BadFile(f"{path}: is empty; give a file with text")
    if b"\0" in data:
        raise BadFile(f"{path}: not a text file: byte {data.index(0)} is 0x00")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadFile(f"{path}: not UTF-8 text: byte {e.start} is 0x{data[e.start]:02x}") from None


def _decoder(
    state: dict[str, Any] | None, name: str
) -> tuple[Callable[[str], bytes], Callable[[bytes], bytes]]:
    """Return the file's decoder as two functions: a token's name to its bytes, and the trim of the first."""
    if state is None:
        raise Unsupported(
            f"{name}: has no decoder, which is needed to turn tokens into text; use a complete tokenizer.json"
        )
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    steps = [_step(part, name) for part in parts]

    def bytes_of(text: str) -> bytes:
        for step in steps:
            if (data := step(text)) is not None:
                if isinstance(data, bytes):
                    return data
                text = data
        return text.encode()

    return bytes_of, _trim(parts, name)


Step = Callable[
    [str], "str | bytes | None"
]  # returns text for the next step, final bytes, or None for no change


def _step(part: dict[str, Any], name: str) -> Step:
    match part["type"]:
        case "ByteLevel":
            return _byte_level
        case "ByteFallback":
            return _byte_fallback
        case "Metaspace":
            replacement = part["replacement"]
            return lambda text: text.replace(replacement, " ")
        case "Replace" if "String" in part["pattern"]:
            old, new = part["pattern"]["String"], part["content"]
            return lambda text: text.replace(old, new)
        case "WordPiece":
            return partial(_word_piece, part["prefix"], part["cleanup"])
        case "Fuse" | "Strip":
            return lambda text: None
    raise Unsupported(f"{name}: its decoder has a {part['type']} step, which Thermocline does not know")


def _trim(parts: list[dict[str, Any]], name: str) -> Callable[[bytes], bytes]:
    """Return the function that trims a text's first token: SentencePiece adds a space there."""
    for i, part in enumerate(parts):
        if part["type"] == "Strip":
            fused = any(p["type"] == "Fuse" for p in parts[:i])
            if not fused or part["start"] > 1 or part["stop"]:
                raise Unsupported(
                    f"{name}: its decoder strips more than one character from the start of the text"
                )
            content = part["content"].encode() if part["start"] else b""
            return lambda data: data.removeprefix(content)
        if part["type"] == "WordPiece":
            return lambda data: data.removeprefix(b" ")
        if part["type"] == "Metaspace" and part["prepend_scheme"] != "never":
            return lambda data: data.replace(b" ", b"")  # as the library does: every space of the first token
    return lambda data: data


# What a word loses before it, as the library's decoder has it.
_CLEANED = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _word_piece(prefix: str, cleanup: bool, text: str) -> str:
    """Return a word's beginning, after a space, or how it goes on."""
    text = text.removeprefix(prefix) if text.startswith(prefix) else f" {text}"
    for old, new in _CLEANED if cleanup else ():
        text = text.replace(old, new)
    return text


def _byte_fallback(text: str) -> bytes | None:
    """Return the byte that `<0xE2>` names."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            return None
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes: printable ones unchanged, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    """Return the bytes of a token in GPT-2's alphabet. An added token with other characters is plain text."""
    try:
        return bytes([BYTE_OF[c] for c in text])
    except KeyError:
        return text.encode()
