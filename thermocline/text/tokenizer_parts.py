"""The parts that a tokenizer.json may have: those that families of models need, within bounds.

The library would run anything: a replacement by a million characters, a template of a thousand texts. This
file imports nothing of the package, because it runs in the tokenizer's process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Part = dict[str, Any]

# The look of control tokens. Some files do not mark chat tokens as special, and Phi-3's not its "</s>".
CONTROL = re.compile(r"<[|｜]\S*[|｜]>|</?(?:start|end)_of_\w+>|</?s>")
MARKER = re.compile(
    r"\W\S*\w\S*\W"
)  # the look of any marker: <think>, [TOOL_CALLS], <|im_end|>; no word matches

PARTS = {
    "normalizer": {
        "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled",
        "Prepend", "Replace", "Strip", "StripAccents",
    },
    "pre_tokenizer": {
        "BertPreTokenizer", "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts",
        "Whitespace", "WhitespaceSplit",
    },
    "decoder": {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"},
    "post_processor": {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"},
    "model": {"BPE", "Unigram", "WordLevel", "WordPiece"},
}  # fmt: skip
INNER = ("normalizers", "pretokenizers", "decoders", "processors")  # keys of a Sequence's parts
MOST_PARTS = 64  # of one kind; known files have 8
MOST_PATTERN = 4096  # characters; DeepSeek's have 900
MOST_WRITTEN = 64  # characters that a part inserts; known files have 3
MOST_GROWTH = 256  # of a text, by all replacements together; known files have 1
MOST_TOKEN = 4096  # characters of one; known files have 128, and runs of 512 spaces
MOST_WORD = 1024  # characters that WordPiece splits, in a time that grows with their square; known files: 100
MOST_AROUND = 64  # tokens put around a text
MOST_ID = 1 << 21
MOST_CHARSMAP = 1 << 20  # characters of Precompiled's table; known files have 320 thousand


class UnusableTokenizer(Exception):
    """A tokenizer.json is refused: for a part that no family has (`unsupported`), else for a size."""

    def __init__(self, why: str, *, unsupported: bool = False) -> None:
        super().__init__(why)
        self.unsupported = unsupported


def check(kind: str, state: Part | None) -> None:
    """Raise UnusableTokenizer for a part that no family needs. `kind`: a key of PARTS."""
    parts = [] if state is None else list(_flat(kind, state))
    if len(parts) > MOST_PARTS:
        raise UnusableTokenizer(f"its {kind} has {len(parts)} steps (limit {MOST_PARTS})")
    growth = 1.0
    for part in parts:
        name = str(part.get("type"))
        if name not in PARTS[kind]:
            raise UnusableTokenizer(f"its {kind} has a {name[:40]} step, which Thermocline does not know",
                          unsupported=True)  # fmt: skip
        if why := _excess(part):
            raise UnusableTokenizer(f"its {kind}'s {name} {why}")
        growth *= _growth(part)
    if growth > MOST_GROWTH:
        raise UnusableTokenizer(f"its {kind} makes a text {growth:.0f} times as long (limit {MOST_GROWTH})")


def _flat(kind: str, state: Part) -> Iterator[Part]:
    if state.get("type") != "Sequence":
        yield state
        return
    for inner in next((state[name] for name in INNER if name in state), []):
        yield from _flat(kind, inner)


def _excess(part: Part) -> str:
    """Return how a part exceeds its bounds, or ""."""
    pattern = _pattern(part)
    written = str(part.get("content") or part.get("prepend") or "")
    if len(pattern) > MOST_PATTERN:
        return f"has a pattern of {len(pattern)} characters (limit {MOST_PATTERN})"
    if len(written) > MOST_WRITTEN:
        return f"writes {len(written)} characters at once (limit {MOST_WRITTEN})"
    if len(str(part.get("precompiled_charsmap", ""))) > MOST_CHARSMAP:
        return f"has a table of more than {MOST_CHARSMAP} characters"
    if part["type"] == "TemplateProcessing":
        return _template(part)
    return ""


def _template(part: Part) -> str:
    """Return how a template exceeds its bounds, or "": its items are put beside every text."""
    for items in (part["single"], part["pair"]):
        ids = [
            len(part["special_tokens"][i["SpecialToken"]["id"]]["ids"]) for i in items if "SpecialToken" in i
        ]
        if sum(ids) > MOST_AROUND:
            return f"puts {sum(ids)} tokens around a text (limit {MOST_AROUND})"
    texts = sum("Sequence" in item for item in part["single"])
    return "" if texts == 1 else f"writes a text {texts} times"


def _pattern(part: Part) -> str:
    pattern = part.get("pattern")
    return str(next(iter(pattern.values()), "")) if isinstance(pattern, dict) else ""


def _growth(part: Part) -> float:
    """Return how many times as long a text may become. An expression may match one character, or none."""
    if part["type"] == "Replace":
        matched = len(_pattern(part)) if "String" in part["pattern"] else 0
        return max(1.0, len(part["content"]) / matched if matched else 1.0 + len(part["content"]))
    if part["type"] == "BertNormalizer":
        return 3.0  # a space on both sides of a Chinese character
    return 1.0


def check_words(longest: int) -> None:
    """Raise UnusableTokenizer for a WordPiece that looks for pieces in words of any length."""
    if longest > MOST_WORD:
        raise UnusableTokenizer(f"splits words of {longest} characters (limit {MOST_WORD})")


def check_tokens(vocabulary: dict[str, int]) -> int:
    """Return the highest id. Raise UnusableTokenizer for a token that is too long or has too high an id."""
    longest = max(map(len, vocabulary), default=0)
    if longest > MOST_TOKEN:
        raise UnusableTokenizer(f"has a token of {longest} characters (limit {MOST_TOKEN})")
    highest = max(vocabulary.values(), default=-1)
    if highest > MOST_ID:
        raise UnusableTokenizer(f"has the token {highest} (limit {MOST_ID})")
    return highest
