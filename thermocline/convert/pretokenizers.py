"""Pre-tokenizers by GGUF's names for them, as data.

A pre-tokenizer (`tokenizer.ggml.pre`) cuts text into words before a byte-level vocabulary merges bytes.
The cuts are a list of patterns, applied in turn. A pattern's matches and the text between them become the
pieces that the next pattern cuts further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text into words.

    `whole_words`: a word that is a token stays whole, whatever the merges say. `bos`: a beginning-of-text
    token goes before the text by default.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False  # the text is normalised to NFC first

    def steps(self) -> list[dict[str, Any]]:
        """Return tokenizer.json's pre-tokenizers: the cuts, then bytes as GPT-2's characters."""
        cuts = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
                for p in self.patterns]  # fmt: skip
        return [
            *cuts,
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ]


# Parts that several patterns share. Alternatives begin with different characters, so one pass finds a cut.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = rf"{_ENDINGS}|{_MARKS}|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SIGNS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_SIGNS_SLASH}|{_SPACES}"
_GPT4O = rf"{_CASED % ((_ENDINGS + '?',) * 2)}|\p{{N}}{{1,3}}|{_SIGNS_SLASH}|{_SPACES}"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_NO_HAN = "&&[^\\p{Han}]]"  # of a class, what is no Han character
_KIMI = _CASED.replace(_UPPER, _UPPER[:-1] + _NO_HAN).replace(_LOWER, _LOWER[:-1] + _NO_HAN)
_KIMI_K2 = rf"\p{{Han}}+|{_KIMI % ((_ENDINGS + '?',) * 2)}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek LLM lists the letters with case of one Unicode version, in hexadecimal here.
_CASED_RANGES = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A
38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF
1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D
1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4
1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F
2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F
A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3
104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_CASED_LETTERS = "".join("-".join(chr(int(end, 16)) for end in r.split("-")) for r in _CASED_RANGES.split())

_GPT2_PRE = PreTokenizer((_GPT2,))
_DIGITS_GPT2_PRE = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_PRE = PreTokenizer((_GPT4,), whole_words=True, bos=True)
_QWEN2_PRE = PreTokenizer((_QWEN2,), nfc=True)
_GPT4O_PRE = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS = {
    "gpt-2": _GPT2_PRE,
    "phi-2": _GPT2_PRE,
    "mpt": PreTokenizer((_GPT2,), nfc=True),
    "olmo": PreTokenizer((_GPT2,), nfc=True),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "starcoder": _DIGITS_GPT2_PRE,
    "refact": _DIGITS_GPT2_PRE,
    "smollm": _DIGITS_GPT2_PRE,
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "pixtral": _LLAMA3_PRE,
    "lfm2": _LLAMA3_PRE,
    "dbrx": PreTokenizer((_GPT4,)),
    "smaug-bpe": PreTokenizer((_GPT4,)),
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "megrez": _QWEN2_PRE,
    "stablelm2": _QWEN2_PRE,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "chatglm-bpe": PreTokenizer((_GPT4,)),
    "glm4": PreTokenizer((_GPT4,), whole_words=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, bos=True),
    "gpt-4o": _GPT4O_PRE,
    "llama4": _GPT4O_PRE,
    "minimax-m2": _GPT4O_PRE,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "kimi-k2": PreTokenizer((_KIMI_K2,)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
}

# `tokenizer.ggml.model`
BYTE_LEVEL, SENTENCEPIECE, MERGED_PIECES = "gpt2", "llama", "gemma4"

# Files of 2023, PowerInfer's among them, do not name a pre-tokenizer. Architecture -> name.
BEFORE_NAMES = {"falcon": "falcon", "gpt2": "gpt-2", "opt": "gpt-2"}

# Models whose control tokens swallow the whitespace after them, by a part of their architecture or name.
# GGUF has no key for this.
STRIPPING = ("phi-3", "phi3")
STRIPPING_TOO, NOT_STRIPPING = {"</s>"}, {"<unk>", "<s>", "<|endoftext|>"}
