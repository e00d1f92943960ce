"""Check all Markdown of the repository: relative links, their headings, and pages with a greatest size."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MOST_BYTES = {"README.md": 8192, "DESIGN.md": 12288}


def unnamed_files() -> list[str]:
    """List files of a room that its page does not name, and files that a page names and that are gone."""
    found = []
    for page in sorted((DOCS / "internals").glob("*.md")):
        room, text = ROOT / "thermocline" / page.stem, page.read_text(encoding="utf-8")
        if not room.is_dir():
            continue
        files = {f.name for f in room.rglob("*.py")} - {"__init__.py"}
        first = [row.split("|")[1:3] for row in text.splitlines() if row.startswith("|")]
        named = {n for cells in first for n in re.findall(r"`(?:\w+/)*(\w+\.py)`", " ".join(cells))}
        gone = named - files - {"llm.py", "options.py"}
        found += [f"docs/internals/{page.name}: lacks {n}" for n in sorted(files - named)]
        found += [f"docs/internals/{page.name}: {n} is gone" for n in sorted(gone)]
    return found


def sizes() -> list[str]:
    lengths = {name: (ROOT / name).stat().st_size for name in MOST_BYTES}
    return [
        f"{name}: {lengths[name]} bytes, at most {most}"
        for name, most in MOST_BYTES.items()
        if lengths[name] > most
    ]


def markdown_files() -> list[Path]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = sorted(ROOT / name for name in names.split("\0") if name and (ROOT / name).exists())
    environments = {f.parent for f in ROOT.glob("*/pyvenv.cfg")}  # of a name that git does not ignore
    return [f for f in found if environments.isdisjoint(f.parents)]


def without_code(text: str) -> str:
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2[`~]*\s*$", "", text, flags=re.M | re.S)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)


def anchors(path: Path) -> set[str]:
    """What both GitHub and MkDocs call the headings; where they differ there is nothing to link to."""
    text = re.sub(
        r"^( *)(```+|~~~+).*?^\1\2[`~]*\s*$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    headings = re.findall(r"^#{1,6} +(.+?)(?: +\{.*\})?\s*#*$", text, flags=re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).replace("`", "").strip().lower() for h in headings]
    github = {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in plain}
    mkdocs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip()) for h in plain}
    return {a for a in github & mkdocs if a.isascii()}


def dead_links() -> list[str]:
    found = []
    for path in markdown_files():
        for target in re.findall(
            r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", without_code(path.read_text(encoding="utf-8"))
        ):
            if re.match(r"[a-z][a-z+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            there = path if not name else (path.parent / name).resolve()
            where = path.relative_to(ROOT)
            if not there.exists():
                found.append(f"{where}: no file {target}")
            elif DOCS in path.parents and name and DOCS not in there.parents:
                found.append(f"{where}: {target} is outside docs/, which the site does not have")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                found.append(f"{where}: no heading for {target}")
    return found
