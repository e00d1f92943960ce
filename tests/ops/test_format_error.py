"""A whole model in every mix of formats computes what its bytes mean: logits beside numpy's, end to end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from thermocline import _native
from thermocline.model import formats
from thermocline.model.mixes import MIXES, formats_of
from thermocline.ops.interface import Weights
from thermocline.pack.pack import Pack

ROOMS = [str(Path(__file__).parents[2] / "bench" / room) for room in ("engine", "llamacpp")]
OTHERS = ("sparse", "mixture", "odd")  # than dense ones


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path[:0] = ROOMS
    yield importlib.import_module("format_error")
    del sys.path[: len(ROOMS)]


@pytest.mark.parametrize(
    ("mix", "kind"),
    [
        *[(mix, "dense") for mix in MIXES],
        *[("q4_k_m", kind) for kind in OTHERS],
        *[
            pytest.param(mix, kind, marks=pytest.mark.slow)
            for mix in MIXES
            for kind in OTHERS
            if mix != "q4_k_m"
        ],
    ],
)
def test_logits_are_those_of_the_decoded_weights(
    script: ModuleType, mix: str, kind: str, tmp_path: Path
) -> None:
    """NMSE of at most 1e-6 for numbers, and of 5e-4 where activations are rounded to int8."""
    found = script.error_of(tmp_path, kind, mix, "")
    assert found.nmse <= found.limit == (1e-6 if mix in ("f32", "f16", "bf16") else 5e-4)
    assert f"| {mix} | {kind} |" in script.row_of(found) and "above" not in script.row_of(found)


@pytest.mark.parametrize("isa", _native.isa_levels()[1:])
def test_every_instruction_set_has_the_small_error(script: ModuleType, isa: str, tmp_path: Path) -> None:
    found = script.error_of(tmp_path, "dense", "q4_k_m", isa)
    assert found.nmse <= found.limit


def test_every_format_is_in_a_mix_that_is_compared(script: ModuleType, tmp_path: Path) -> None:
    """So that a new format cannot be left out."""
    found: set[str] = set()
    for kind in ("dense", "odd"):
        spec = script.model_of(tmp_path, kind).stats.spec
        found |= {f for mix in MIXES for f in formats_of(mix, spec).values()}
    assert found >= set(formats.FORMATS)


def test_a_wrong_scale_is_seen(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is close enough: 10 % in one of 17 matrices exceed it."""
    right = script.decoded

    def slightly_wrong(pack: Pack) -> Weights:
        made: Weights = right(pack)
        down = made.layers[1].experts[0].parts[0].down
        assert isinstance(down, np.ndarray)
        down *= np.float32(1.1)
        return made

    monkeypatch.setattr(script, "decoded", slightly_wrong)
    found = script.error_of(tmp_path, "dense", "q4_k_m", "")
    assert found.nmse > found.limit and "above" in script.row_of(found)
