"""scripts/docs: the reference says what the code says, and its check finds what it is for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import build_docs
import markdown_links
import pytest

from thermocline.cli.commands.run import RunOptions


def test_the_reference_is_what_the_code_says_now() -> None:
    assert build_docs.drift() == []


def test_a_help_text_that_changes_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    field = next(f for f in dataclasses.fields(RunOptions) if f.name == "top_k")
    changed = dataclasses.replace(field.metadata["option"], help="Keep some tokens.")
    monkeypatch.setattr(field, "metadata", {"option": changed})
    assert [line.partition(":")[0] for line in build_docs.drift()] == ["docs/reference/commands.md"]


def test_every_key_of_each_json_is_described_and_no_other() -> None:
    assert build_docs.key_problems() == []


def test_a_key_that_is_new_or_gone_is_a_problem() -> None:
    assert build_docs.difference("verify", {"path": "", "ok": True, "why": ""}) == [
        "keys.toml: [verify] lacks why",
        "keys.toml: [verify] has problems, which is not printed",
    ]


def test_markdown_has_no_dead_links_and_pages_keep_to_their_sizes() -> None:
    assert markdown_links.dead_links() == [] and markdown_links.sizes() == []


def test_each_room_s_page_names_its_files_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert markdown_links.unnamed_files() == []
    room, docs = tmp_path / "thermocline" / "hub", tmp_path / "internals"
    room.mkdir(parents=True)
    docs.mkdir()
    (room / "new.py").touch()
    (docs / "hub.md").write_text("| file | owns |\n|---|---|\n| `old.py` | names |\n")
    monkeypatch.setattr(markdown_links, "ROOT", tmp_path)
    monkeypatch.setattr(markdown_links, "DOCS", tmp_path)
    assert markdown_links.unnamed_files() == [
        "docs/internals/hub.md: lacks new.py",
        "docs/internals/hub.md: old.py is gone",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](b.md) [a](b.md#the-head) [a](#here)\n# Here", None),
        ("[a](c.md)", "no file c.md"),
        ("[a](b.md#no-head)", "no heading for b.md#no-head"),
        ("[a](#no)", "no heading for #no"),
        ("[a](../README.md)", "outside docs/"),
        ("`[a](c.md)` [b](https://example.org/c.md)\n```\n[a](c.md)\n```", None),
    ],
)
def test_a_dead_link_is_found(
    text: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("# A\n")
    (docs / "a.md").write_text(text)
    (docs / "b.md").write_text("# The `head`\n")
    monkeypatch.setattr(markdown_links, "ROOT", tmp_path)
    monkeypatch.setattr(markdown_links, "DOCS", docs)
    monkeypatch.setattr(markdown_links, "markdown_files", lambda: [docs / "a.md"])
    problems = markdown_links.dead_links()
    assert problems == [] if found is None else len(problems) == 1 and found in problems[0]
