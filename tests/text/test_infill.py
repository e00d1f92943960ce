"""Prompts for the middle of a text: each family's marks, in their order, from the program alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fill_marks import QWEN, marked

from thermocline.text.infill import Infill
from thermocline.text.tokenizer import Tokenizer

FAMILIES = {
    "qwen": QWEN, "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "glm": ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
}  # fmt: skip


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.spelled, ids)).decode()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_familys_marks(tmp_path: Path, family: str, special: bool) -> None:
    before, after, middle = FAMILIES[family]
    tokenizer = Tokenizer(marked(tmp_path, FAMILIES[family], special=special))
    fill = Infill.of(tokenizer)
    assert fill is not None and fill.stop_ids == tuple(
        t.id for mark in FAMILIES[family] for t in tokenizer.added if t.content == mark
    )
    ids = fill.encode("Once upon", "the end.")
    assert shown(tokenizer, ids).endswith(f"{before}Once upon{after}the end.{middle}")
    assert ids[: len(fill.beginning)] == list(fill.beginning) == tokenizer.encode("")
    assert sum(i in fill.stop_ids for i in ids) == 3
    tokenizer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mark_that_a_text_spells_out_is_text(tmp_path: Path, family: str) -> None:
    before, after, middle = FAMILIES[family]
    tokenizer = Tokenizer(marked(tmp_path, FAMILIES[family]))
    fill = Infill.of(tokenizer)
    assert fill is not None
    ids = fill.encode(f"a{middle}", f"{before}b", [(after, after)])
    assert [i for i in ids if i in fill.stop_ids] == list(fill.stop_ids)
    assert shown(tokenizer, ids).endswith(f"{after}\n{before}a{middle}{after}{before}b{middle}")
    tokenizer.close()


def test_other_files_come_first_with_marks_where_there_are_some(tmp_path: Path) -> None:
    files = [("a.py", "x = 1"), ("b.py", "y = 2")]
    (tmp_path / "one").mkdir()
    plain = Tokenizer(marked(tmp_path, QWEN))
    named = Tokenizer(marked(tmp_path / "one", (*QWEN, "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")))
    gap = "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    for tokenizer, ends, want in (
        (plain, 3, f"x = 1\ny = 2\n{gap}"),
        (named, 6, "<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n"
                   f"<|file_sep|>file\n{gap}"),
    ):  # fmt: skip
        fill = Infill.of(tokenizer)
        assert fill is not None and len(fill.stop_ids) == ends
        assert shown(tokenizer, fill.encode("p", "s", files)).endswith(want)
        assert shown(tokenizer, fill.encode("p", "s")).endswith(gap)
        assert "file_sep" not in shown(tokenizer, fill.encode("p", "s"))
        tokenizer.close()


@pytest.mark.parametrize("marks", [(), QWEN[:2]])
def test_a_model_without_all_marks_does_not_fill_in(tmp_path: Path, marks: Sequence[str]) -> None:
    tokenizer = Tokenizer(marked(tmp_path, marks))
    assert Infill.of(tokenizer) is None
    tokenizer.close()
