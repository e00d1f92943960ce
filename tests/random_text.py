"""Random texts of all kinds, and the originals that they are compared with. `python tests/random_text.py`
compares 100,000 texts for each tokenizer (a few minutes); the tests a share of them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thermocline.text.tokenizer import Detokenizer, Tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TOKENIZERS = DATA / "tokenizers"

_RANGES = [(0x20, 0x7F), (0, 0x20), (0x80, 0x250), (0x250, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000)]
_RANGES += [(0x1F300, 0x1FAFF), (0x10000, 0x110000), (0x300, 0x36F), (0x2000, 0x2070), (0x660, 0x66A)]
_BITS = ["<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "[INST]", "<0x0A>", "<0xE2>", "<|padding|>"]
_BITS += [
    "▁",
    "▁▁",
    "Ġ",
    "'s",
    "'LL",
    "\r\n",
    "\u200d",
    "\ufe0f",
    "\ufeff",
    "\ufffd",
    "ﬁ",
    "👩‍👩‍👧",
    "🇫🇷",
    "e\u0301",
]
_BITS += [
    "the",
    "The",
    " of",
    "ing",
    "return",
    "def f(x):",
    "http://a.b/c?d=e",
    "3.14159",
    "مرحبا",
    "שלום",
    "日本語",
]
_RUNS = [
    " ",
    "\n",
    "\t",
    "\r\n",
    "a",
    "A",
    "0",
    "=",
    "-",
    ".",
    "_",
    "👍",
    "日",
    "\u0301",
    "\xa0",
    "▁",
    "ab",
    " \n",
]


def random_text(rng: random.Random) -> str:
    return "".join(_bit(rng) for _ in range(rng.choice((1, 3, 8, 20))))


def _bit(rng: random.Random) -> str:
    match rng.randrange(6):
        case 0:
            low, high = rng.choice(_RANGES)
            return "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 12)))
        case 1:
            return rng.choice(_BITS)
        case 2:
            return rng.choice(_RUNS) * rng.choice((1, 2, 3, 4, 7, 16, 40, 100))
        case 3:
            return str(rng.randrange(10 ** rng.randrange(1, 20)))
        case 4:
            return "".join(
                rng.choice("abcdefghijklmnopqrstuvwxyzABCDEF '\n") for _ in range(rng.randrange(30))
            )
    return " " + rng.choice(_BITS)


# ---- the real ones: ours, and the original's own way to encode (without control tokens) and decode

Original = tuple[Tokenizer, Callable[[str], list[int]], Callable[[list[int]], str]]


def sentencepiece(path: str, home: Path) -> Original:
    """Our tokenizer.json of a model, beside Google's library on the model itself."""
    from sentencepiece import SentencePieceProcessor

    from thermocline.convert.tokenizers import from_sentencepiece

    (home / "tokenizer.json").write_bytes(from_sentencepiece(TOKENIZERS / path))
    theirs = SentencePieceProcessor(model_file=str(TOKENIZERS / path))
    return Tokenizer(home), theirs.encode, theirs.decode


def hugging_face(build: Callable[[], Any], home: Path) -> Original:
    theirs = build()
    theirs.save(str(home / "tokenizer.json"))
    theirs.encode_special_tokens = True
    return (
        Tokenizer(home),
        lambda text: theirs.encode(text, add_special_tokens=False).ids,
        lambda ids: theirs.decode(ids, skip_special_tokens=True),
    )


def _gpt2(vocab: str, merges: str) -> Any:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    tok = Library(models.BPE.from_file(str(TOKENIZERS / vocab), str(TOKENIZERS / merges)))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(
        [t for t in ("<|endoftext|>", "<s>", "</s>", "<pad>") if tok.token_to_id(t) is not None]
    )
    return tok


def _neox() -> Any:
    from tokenizers import Tokenizer as Library

    return Library.from_file(str(TOKENIZERS / "gpt_neox_20B" / "tokenizer.json"))


REAL: dict[str, Callable[[Path], Original]] = {
    "llama2": lambda home: sentencepiece("llama2/tokenizer.model", home),
    "mistral": lambda home: sentencepiece("mistral/tokenizer.model.v1", home),
    "gpt2": lambda home: hugging_face(lambda: _gpt2("gpt2/vocab.json", "gpt2/merges.txt"), home),
    "opt": lambda home: hugging_face(lambda: _gpt2("opt/gpt2-vocab.json", "opt/gpt2-merges.txt"), home),
    "neox": lambda home: hugging_face(_neox, home),
}


def compare(original: Original, seed: int, count: int) -> list[tuple[str, str]]:
    """(what, text) of each difference."""
    ours, encode, decode = original
    rng, differences = random.Random(seed), []
    for _ in range(count):
        text = random_text(rng)
        ids = ours.encode(text, add_special=False)
        if ids != encode(text):
            differences.append(("ids", text))
        detokenizer = Detokenizer(ours)
        if "".join(map(detokenizer.push, ids)) + detokenizer.flush() != decode(ids):
            differences.append(("text", text))
    return differences


if __name__ == "__main__":
    import tempfile

    count, failed = int(sys.argv[1]) if sys.argv[1:] else 100_000, False
    for name, open_original in REAL.items():
        with tempfile.TemporaryDirectory() as directory:
            found = compare(open_original(Path(directory)), 1, count)
        print(f"{name}: {count} texts, {len(found)} differences", *map(repr, found[:3]), flush=True)
        failed |= bool(found)
    sys.exit(failed)
