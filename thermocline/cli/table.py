"""Facts as text: tables, sizes, speeds; and as values that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}".rstrip() + "\n" for name, value in rows)


def columns(rows: Sequence[Sequence[str]], align: str = "<") -> str:
    """Return rows of several cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{x:{align}{w}}" for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def markdown_row(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" for cell in cells) + "\n"


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def gbs(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} GB/s"
