"""MkDocs hook: DESIGN.md, which lies outside docs/, as a page of the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DESIGN = Path(__file__).resolve().parents[1] / "DESIGN.md"


def on_files(files: Files, config: Any) -> Files:
    text = DESIGN.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "design.md", content=text))
    return files
