"""The bundled model's tokenizer with marks that ask for the middle of a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from thermocline.llm import BUNDLED

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def marked(folder: Path, marks: Sequence[str], *, special: bool = False) -> Path:
    """Return a directory with the bundled model's tokenizer and `marks` as added tokens."""
    made = json.loads((BUNDLED / "tokenizer.json").read_text())
    first = len(made["model"]["vocab"])
    made["added_tokens"] += [
        {"id": first + i, "content": mark, "special": special, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for i, mark in enumerate(marks)
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return folder
