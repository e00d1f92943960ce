"""Express a tokenizer.json in a GGUF's `tokenizer.ggml.*` keys, or keep the JSON itself if they cannot.

The keys are read back by `tokenizers.from_gguf` and the result is compared with the original.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from thermocline.convert import pretokenizers as names
from thermocline.convert.pretokenizers import PRE_TOKENIZERS
from thermocline.convert.tokenizer_json import WORDS, Kind
from thermocline.convert.tokenizers import WHOLE, from_gguf
from thermocline.errors import BadFile, Unsupported
from thermocline.files.small_files import FilesOfDirectory
from thermocline.text.tokenizer_process import TokenizerProcess

Json = dict[str, Any]

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def to_gguf(path: Path, bos: int | None, eos: int | None, vocab_size: int) -> Json:
    """Return GGUF keys and values for a tokenizer.json.

    `bos` and `eos` are the ids that the model itself has: GGUF uses one key for both. llama.cpp wants as many
    tokens as the model has, so missing ones are added as unused. A tokenizer that the keys cannot express
    is kept whole under a key that llama.cpp and PowerInfer do not read.
    """
    library = TokenizerProcess(FilesOfDirectory(path.parent), vocab_size)
    original: Json = json.loads(library.canonical())
    library.close()
    keys = {f"tokenizer.ggml.{k}": v for k, v in _keys(original, bos, eos).items()}
    try:
        if _meaning(json.loads(from_gguf(keys, ""))) == _meaning(original):
            missing = range(len(keys["tokenizer.ggml.tokens"]), vocab_size)
            keys["tokenizer.ggml.tokens"] += [f"[PAD{i}]" for i in missing]
            keys["tokenizer.ggml.token_type"] += [int(Kind.UNUSED)] * len(missing)
            if pieces := keys.get("tokenizer.ggml.scores"):
                pieces += [-float(len(pieces))] * len(missing)
            return keys
    except (BadFile, Unsupported):
        pass
    return {"tokenizer.ggml.model": "none", WHOLE: path.read_bytes().decode()}


def _keys(t: Json, bos: int | None, eos: int | None) -> Json:
    """Return the keys that a tokenizer.json would have; {} if no keys can be right."""
    model, (first, last) = t["model"], _around(t)
    added = {a["id"]: a for a in t["added_tokens"]}
    vocab = {i: token for token, i in model["vocab"].items()} if model["type"] == "BPE" else {}
    vocab |= {i: a["content"] for i, a in added.items()}
    alone = first in ([], [bos]) and last in ([], [eos])
    if not vocab or sorted(vocab) != list(range(len(vocab))) or not alone:
        return {}
    tokens, pieces, merges = [vocab[i] for i in range(len(vocab))], _cuts(t) is None, _merges(model)
    out: Json = {
        "model": names.SENTENCEPIECE if pieces else names.BYTE_LEVEL,
        "tokens": tokens,
        "token_type": [int(_kind(token, added.get(i), t, pieces)) for i, token in enumerate(tokens)],
        "add_bos_token": bool(first),
        "add_eos_token": bool(last),
        **{f"{k}_token_id": i for k, i in (("bos", bos), ("eos", eos)) if i is not None},
    }
    if pieces:
        prefix = any(n["type"] == "Prepend" for n in (t["normalizer"] or {}).get("normalizers", []))
        return {**out, "scores": _scores(tokens, merges), "add_space_prefix": prefix}
    pre = next((name for name, p in PRE_TOKENIZERS.items() if _is_the_same(p, t)), "")
    return {**out, "pre": pre, "merges": [" ".join(pair) for pair in merges]} if merges else {}


def _is_the_same(pre: names.PreTokenizer, t: Json) -> bool:
    return (
        pre.steps() == _cuts(t)
        and pre.nfc == (t["normalizer"] == {"type": "NFC"})
        and pre.whole_words == bool(t["model"].get("ignore_merges"))
    )


def _kind(token: str, added: Json | None, t: Json, pieces: bool) -> Kind:
    if pieces and token == t["model"].get("unk_token"):
        return Kind.UNKNOWN
    if added is not None:
        return Kind.CONTROL if added["special"] else Kind.USER_DEFINED
    return Kind.BYTE if pieces and _BYTE.fullmatch(token) else Kind.NORMAL


def _scores(tokens: list[str], merges: list[tuple[str, str]]) -> list[float]:
    """Return scores in the order of merges: the first merge into a piece gives it the highest.

    SentencePiece uses only the order of scores.
    """
    rank: dict[str, int] = {}
    for left, right in merges:
        rank.setdefault(left + right, len(rank))
    return [-float(rank.get(token, len(rank))) for token in tokens]


# ---- the meaning of a tokenizer.json, however it is written


def _meaning(t: Json) -> Json:
    model = {k: v for k, v in t["model"].items() if v not in (None, False) and k not in ("vocab", "merges")}
    added = [{k: v for k, v in a.items() if k != "normalized"} for a in t["added_tokens"]]
    return {
        "vocabulary": t["model"]["vocab"] | {a["content"]: a["id"] for a in t["added_tokens"]},
        "merges": _merges(t["model"]),
        "model": model,
        "added": sorted(added, key=lambda a: int(a["id"])),
        "normalised": any(a["normalized"] for a in t["added_tokens"]) and t["normalizer"] is not None,
        "normalizer": t["normalizer"],
        "cuts": _cuts(t),
        "around": _around(t),
        "decoder": "bytes" if t["decoder"] and t["decoder"]["type"] == "ByteLevel" else t["decoder"],
    }


def _merges(model: Json) -> list[tuple[str, str]]:
    return [(left, right) for left, right in model.get("merges", [])]


def _cuts(t: Json) -> list[Json] | None:
    """Return the pre-tokenizer's steps, or None if its cuts change nothing.

    A ByteLevel step that also cuts counts as two steps.
    """
    pre = t["pre_tokenizer"]
    if pre in (None, WORDS):
        return None
    out: list[Json] = []
    for step in pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            out += (
                PRE_TOKENIZERS["gpt-2"].steps() if step["use_regex"] else PRE_TOKENIZERS["gpt-2"].steps()[-1:]
            )
        elif step == {"type": "Digits", "individual_digits": True}:  # Granite's: \p{N} but for 13 new digits
            out += PRE_TOKENIZERS["starcoder"].steps()[:1]
        else:
            out.append(step)
    return out


def _around(t: Json) -> tuple[list[int], list[int]]:
    """Return the ids that go before and after a text."""
    post = t["post_processor"]
    parts = [] if post is None else post["processors"] if post["type"] == "Sequence" else [post]
    for part in parts:
        if part["type"] == "TemplateProcessing":
            ids, before, after = part["special_tokens"], list[int](), list[int]()
            side = before
            for p in part["single"]:
                side = after if "Sequence" in p else side
                side += ids[p["SpecialToken"]["id"]]["ids"] if "SpecialToken" in p else []
            return before, after
        if part["type"] != "ByteLevel":  # ByteLevel only changes offsets
            return [-1], []
    return [], []
