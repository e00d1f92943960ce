"""Tiny models that embed or rank, with tokenizers: a twin's random weights, and words made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
from safetensors.numpy import load_file, save_file

Json = dict[str, Any]
WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "dog",
    "ran",
    "its",
    ",",
    ".",
    "rain",
    "fell",
    "all",
    "night",
    "un",
)
MARKS = ("<|im_start|>", "<|im_end|>")


def bert(path: Path, name: str = "bert_cls", **changes: Any) -> Path:
    """An encoder with words, their pieces, and [CLS] and [SEP] around a text; keys of its config changed."""
    kept_twins.write(name, path)
    _change(path, **changes)
    pieces = [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *"abcdefghijklmnopqrstuvwxyz", *pieces]
    ids = {token: i for i, token in enumerate(dict.fromkeys(vocab))}
    added = [_added(ids[name], name) for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")]
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3],
                           "cls": ["[CLS]", 2]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": ids},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(made))
    return path


def qwen3(path: Path, name: str = "qwen3_embedding", *, after: str | None = "<|im_end|>") -> Path:
    """A Qwen3 whose tokens are bytes, marks, yes and no; `after`: the mark behind every text."""
    kept_twins.write(name, path)
    ids = {_letter(b): b for b in range(256)} | {"yes": 256, "no": 257}
    added = [_added(258 + i, mark) for i, mark in enumerate(MARKS)]
    ends = {"id": after, "ids": [258 + MARKS.index(after)], "tokens": [after]} if after else None
    behind = [] if after is None else [{"SpecialToken": {"id": after, "type_id": 0}}]
    template = {
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, *behind],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {} if ends is None else {after: ends},
    }  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    made: Json = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": template, "decoder": level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": ids,
                  "merges": []},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(made))
    _widen(path, 260)
    return path


def reranker(path: Path) -> Path:
    """A Qwen3 that writes, whose files name the tokens yes and no; 1024 positions, for its prompt."""
    qwen3(path, "qwen3", after=None)
    _change(path, max_position_embeddings=1024)
    kinds = [("Transformer", ""), ("LogitScore", "1_LogitScore")]
    modules = [
        {"path": at, "type": f"sentence_transformers.cross_encoder.modules.{kind}"} for kind, at in kinds
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    (path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 256, "false_token_id": 257}')
    return path


def _letter(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in printable else chr(256 + sorted({*range(256)} - {*printable}).index(byte))


def _added(i: int, content: str) -> Json:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": True, **plain}


def _widen(path: Path, vocabulary: int) -> None:
    """Give the model more tokens, with random embeddings."""
    config = json.loads((path / "config.json").read_text())
    tensors, rng = load_file(path / "model.safetensors"), np.random.default_rng(9)
    for name, x in tensors.items():
        if x.ndim == 2 and x.shape[0] == config["vocab_size"]:
            shape, gain = (vocabulary, x.shape[1]), 1.0 if "embed" in name else 0.8 / x.shape[1] ** 0.5
            tensors[name] = (gain * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    _change(path, vocab_size=vocabulary)


def _change(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
