"""Route traces (`# route_trace v1`): a text file with the experts that tokens chose in another program."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np

from thermocline.errors import BadFile
from thermocline.files.bounded import quoted, read_small
from thermocline.offline.routing.statistics import Choices

FIRST_LINE = b"# route_trace v1"
MAX_BYTES = 256 << 20
MAX_EXPERTS = 65536
COLUMNS = ("turn", "phase", "step", "layer", "slot", "expert")
DECODING = 1  # of `phase`; 0 is the prompt


def is_route_trace(path: Path) -> bool:
    """Return whether a file begins as a route trace does."""
    if not path.is_file():
        return False
    with open(path, "rb") as f:
        return f.read(len(FIRST_LINE)) == FIRST_LINE


def read_route_trace(path: Path) -> Choices:
    """Read the tokens that were decoded. Raises BadFile if there are too few, or any lacks a choice."""
    lines = read_small(path, MAX_BYTES).decode("utf-8", "replace").splitlines()
    facts = dict(re.findall(r"(\w+)=(\S+)", " ".join(x for x in lines[:4] if x.startswith("#"))))
    experts = facts.get("n_expert", "")
    if not experts.isdecimal() or not 2 <= int(experts) <= MAX_EXPERTS:
        raise BadFile(f"{path}: n_expert is {quoted(experts)}, not a number of experts from 2 on")
    rows = csv.reader(x for x in lines if not x.startswith("#"))
    if tuple(next(rows, ())[: len(COLUMNS)]) != COLUMNS:
        raise BadFile(f"{path}: its columns are not {','.join(COLUMNS)} ...")
    try:
        numbers = np.array([[int(x) for x in row[: len(COLUMNS)]] for row in rows if row], np.int64)
    except (ValueError, OverflowError) as e:
        raise BadFile(f"{path}: a row is not one of numbers: {e}") from None
    return Choices(_by_layer(path, numbers, int(experts)), int(experts), f"{path} ({facts.get('arch', '')})")


def _by_layer(
    path: Path, rows: np.ndarray[tuple[int, int], np.dtype[np.int64]], experts: int
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], ...]:
    """Return each layer's choices [tokens, active] of rows (turn, phase, step, layer, slot, expert)."""
    rows = rows[rows[:, 1] == DECODING] if rows.ndim == 2 else np.empty((0, 6), np.int64)
    rows = rows[np.lexsort((rows[:, 4], rows[:, 2], rows[:, 0], rows[:, 3]))]
    layers, active = len(np.unique(rows[:, 3])), len(np.unique(rows[:, 4]))
    tokens = len(np.unique(rows[:, [0, 2]], axis=0))
    if tokens < 2:
        raise BadFile(f"{path}: has {tokens} decoded tokens; two at least are needed")
    if len(rows) != layers * tokens * active:
        raise BadFile(
            f"{path}: {len(rows)} choices, not {active} of each of {tokens} tokens in {layers} layers"
        )
    if rows[:, 5].min() < 0 or rows[:, 5].max() >= experts:
        raise BadFile(f"{path}: names an expert that is not one of {experts}")
    return tuple(rows[:, 5].reshape(layers, tokens, active))
