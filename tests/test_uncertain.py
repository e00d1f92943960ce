"""Sources that say less than a model needs, or two things: what decides, and that it is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import twins

from thermocline import importer
from thermocline.errors import UsageError
from thermocline.pack import Pack


def test_the_activation_that_a_user_chose_is_in_the_pack_and_in_the_caches_key(
    tmp_path: Path, thermocline: Callable[..., Any]
) -> None:
    src, cache = twins.qwen2_drelu(tmp_path / "SparseQwen2"), tmp_path / "cache"
    bench = ["bench", "-m", src, "-p", "4", "-n", "0", "-r", "1", "--cache-dir", cache]
    refused = thermocline(*bench)
    assert refused.code == 6 and refused.err.count("\n") == 1 and "--activation drelu" in refused.err
    assert thermocline(*bench, "--activation", "drelu").code == 0
    packs = [importer.resolve(src, cache, None, activation=a) for a in ("drelu", "relu")]
    assert [Pack.open(p).spec.up_activation for p in packs] == ["relu", "none"]
    assert len(list(cache.iterdir())) == 2
    assert importer.resolve(packs[0], cache, None, activation="drelu") == packs[0]
    with pytest.raises(UsageError, match="its activation is drelu, not relu"):
        importer.resolve(packs[0], cache, None, activation="relu")
    out = tmp_path / "out"
    assert thermocline("pack", src, "-o", out, "--activation", "relu").code == 0
    assert Pack.open(out).spec.up_activation == "none"
    for command in (["inspect"], ["plan"]):
        assert thermocline(*command, out).code == 0
    wrong = thermocline("plan", out, "--activation", "drelu")
    assert wrong.code == 2 and "its activation is relu, not drelu" in wrong.err
