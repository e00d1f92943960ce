"""Prompts for the middle of a text, of models that were trained to fill it in.

Such a model knows three marks. It reads what is before the gap and what is after it, and writes the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thermocline.text.chat_template import GuardedEncoder
from thermocline.text.template_process import OWN, Span
from thermocline.text.tokenizer import Tokenizer

# The marks of each family, before what is before the gap, before what is after it, and before the answer:
# Qwen and Gemma, StarCoder and Granite, DeepSeek, GLM.
_GAPS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
_FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))  # before a project, and each file
_PADS = ("<|fim_pad|>", "<fim_pad>")
_PROJECT, _FILE = "project", "file"  # names where a model expects some


@dataclass(frozen=True)
class Infill:
    """A model's marks, and the tokens that end an answer: after any mark, the middle is over."""

    gap: tuple[str, str, str]
    files: tuple[str, str] | None
    stop_ids: tuple[int, ...]
    beginning: tuple[int, ...]  # of every prompt
    encoder: GuardedEncoder

    @staticmethod
    def of(tokenizer: Tokenizer) -> Infill | None:
        """Return how a model is asked to fill in. None: it has no marks for that."""
        ids = {t.content: t.id for t in tokenizer.added}
        gap = next((marks for marks in _GAPS if ids.keys() >= {*marks}), None)
        if gap is None:
            return None
        files = next((marks for marks in _FILES if ids.keys() >= {*marks}), None)
        marks = (*gap, *(files or ()), *(pad for pad in _PADS if pad in ids))
        return Infill(
            gap,
            files,
            tuple(ids[mark] for mark in marks),
            tuple(tokenizer.encode("")),
            GuardedEncoder(tokenizer, "".join(marks)),
        )

    def encode(self, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
        """Return the prompt for what is between two texts. `files`: names and texts of others beside them.

        A mark that a text spells out is text.
        """
        return [*self.beginning, *self._encoded((*self._others(files), *self._around(before, after)))]

    def _others(self, files: Sequence[tuple[str, str]]) -> Iterable[tuple[str, str]]:
        if self.files is None:
            return [("", f"{text}\n") for _, text in files]
        if not files:
            return []
        project, file = self.files
        named = [(file, f"{name}\n{text}\n") for name, text in files]
        return [(project, f"{_PROJECT}\n"), *named, (file, f"{_FILE}\n")]

    def _around(self, before: str, after: str) -> Iterable[tuple[str, str]]:
        return zip(self.gap, (before, after, ""), strict=True)

    def _encoded(self, parts: Iterable[tuple[str, str]]) -> list[int]:
        """Return the ids of marks, each with the text after it."""
        said: list[str] = []
        spans: list[Span] = []
        at = 0
        for mark, text in parts:
            spans.append((at, at + len(mark), OWN))
            said += (mark, text)
            at += len(mark) + len(text)
        return self.encoder.encode("".join(said), spans, 0, at)
