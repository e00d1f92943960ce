"""The statistics of neurons' activity are counted rightly, and the trained model's are known."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import thermocline
from thermocline.pack.pack import Pack

ENGINE = str(Path(__file__).parents[2] / "bench" / "engine")
BUNDLED = Path(thermocline.__file__).parent / "bundled"
# The bundled model, trained: bench/engine/activity_statistics.py over 6 passages each of TinyStories,
# Sherlock Holmes and War and Peace.
TRAINED: dict[str, Any] = {
    "active": 0.050, "skew": 0.614, "varies": 0.699,
    "hits": {"10%": 0.267, "30%": 0.561, "60%": 0.829},
    "overlap": {"1": 0.150, "8": 0.101, "32": 0.095},
    "lasting": 0.544, "early": 0.732, "ahead": 0.677, "named": 5.25,
}  # fmt: skip
TEXTS = (
    "tinystories/tinystories_valid_sample.txt",
    "books/sherlock_holmes_adventures.txt",
    "books/war_and_peace.txt",
)
POINTS, RATIO = 0.03, 0.10  # the last of figures that are no shares
RATIOS = ("varies", "named")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, ENGINE)
    yield importlib.import_module("activity_statistics")
    sys.path.remove(ENGINE)


def apart(told: dict[str, Any], wanted: dict[str, Any] = TRAINED) -> dict[str, float]:
    """Return each figure's distance from the trained model's, as a share of what is allowed."""

    def flat(figures: dict[str, Any]) -> dict[str, float]:
        parts = {k: v if isinstance(v, dict) else {"": v} for k, v in figures.items()}
        return {f"{k} {held}".strip(): v for k, part in parts.items() for held, v in part.items()}

    found, limits = flat(told), {k: RATIO * TRAINED[k] for k in RATIOS}
    return {k: (found[k] - v) / limits.get(k, POINTS) for k, v in flat(wanted).items()}


@pytest.mark.slow
@pytest.mark.shared
def test_the_table_is_what_the_trained_model_says(script: ModuleType, shared_data: Path) -> None:
    model = script.Watched(Pack.open(BUNDLED), 1)
    texts = [shared_data / "text" / name for name in TEXTS]
    found = asdict(script.measure(model, *script.of_texts(model, texts, 6), 64))
    assert max(map(abs, apart(found).values())) < 0.2, found  # instruction sets round differently


# ---- the figures


def test_figures_of_activity_that_one_can_count(script: ModuleType) -> None:
    """Every second token needs neurons 0 and 1, the others 2 and 3; then two tokens need 0 and 2."""
    active = np.zeros((12, 10), bool)
    active[0:10:2, :2] = active[1:10:2, 2:4] = True
    assert script.overlap([active[:10]], 1) == 0 and script.overlap([active[:10]], 2) == 1
    assert script.lasting([active[:8]], 0.4) == 1 and script.lasting([active[:8]], 0.2) == 0.5
    assert script.skew(np.array([4.0, 1, 1, 1, 1])) == 0.6
    active[10:, [0, 2]] = True
    frequency = active.mean(axis=0)
    assert script.hits([active], frequency, 0.4) == 1
    guess = np.where(active, 1.0, 0.0).astype(np.float32)
    guess[0, 0], guess[0, 9] = 0.0, 2.0
    assert script.right(guess, active) == pytest.approx(1 - 1 / active.sum())
