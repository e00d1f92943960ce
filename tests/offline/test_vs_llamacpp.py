"""`vs_llamacpp.py` of bench without llama.cpp: its arithmetic, refusals, our own driver in both places."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from thermocline.machine import hardware
from thermocline.offline import bench
from thermocline.pack.pack import Pack

BENCH = Path(__file__).parents[2] / "bench/llamacpp"
TESTS = [bench.Test(1, 0, 8, 0), bench.Test(1, 0, 0, 4), bench.Test(1, 40, 0, 4)]


@pytest.fixture(scope="module")
def vs() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCH))
    spec = importlib.util.spec_from_file_location("vs_llamacpp", BENCH / "vs_llamacpp.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["vs_llamacpp"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCH))


@pytest.fixture
def duel(vs: ModuleType, tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ourselves against ourselves, with a roof of 2 GB/s."""
    monkeypatch.setattr(hardware, "read_gbs", lambda threads, seconds: 2.0)
    pack = Pack.open(tiny_pack)
    np.array(bench.random_tokens(pack.spec, 1, 200), np.int32).tofile(tmp_path / "tokens")
    made = vs.Duel(pack, tiny_pack / "weights.bin", tmp_path / "tokens", TESTS, "native", Path())
    monkeypatch.setattr(vs.Duel, "llama", lambda self, mmap, repack: self.ours())
    return made


def settings(vs: ModuleType) -> Any:
    return vs.Settings(0, 1, {vs.key(t): 1 for t in TESTS}, "as given")


@pytest.mark.parametrize(
    ("text", "expected"), [("pp512", (0, 512, 0)), ("tg64", (0, 0, 64)), ("tg8@d4096", (4096, 0, 8))]
)
def test_tests_are_written_as_they_are_called(
    vs: ModuleType, text: str, expected: tuple[int, int, int]
) -> None:
    assert vs.parse_test(text) == vs.parse_test(text.replace("@d", "@")) == expected


@pytest.mark.parametrize("text", ["pp", "tg0", "xx5", "tg5@", "pp5@d-1"])
def test_other_texts_are_refused(vs: ModuleType, text: str) -> None:
    with pytest.raises(vs.argparse.ArgumentTypeError):
        vs.parse_test(text)


def test_a_row_is_paired_ratios_and_shares_of_the_roofs_beside_them(vs: ModuleType) -> None:
    pairs = vs.Pairs(
        bench.Test(2, 0, 0, 10), [100, 200, 400], [200, 200, 1000], [4.0, 4.0, 2.0, 2.0], 40, (1, 2)
    )
    row = vs.row_of(pairs)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (2.0, 1.0, 2.5)
    assert (row["ratio_q1"], row["ratio_q3"]) == (1.5, 2.25)
    assert (row["thermocline_ts"], row["llama_ts"]) == (10e9 / 200, 10e9 / 200)
    assert row["thermocline_roof_share"] == 400 / 200 / 3  # the median of 4/4, 2/3, 1/2
    assert row["llama_roof_share"] == 0.5  # of 2/4, 2/3, 0.4/2
    shown = vs.table_line([cell(row | given(vs)) for cell in vs.COLUMNS.values()])
    assert "**2.00** (1.50–2.25; 1.00–2.50)" in shown and shown.count("|") == len(vs.COLUMNS) + 1


def given(vs: ModuleType) -> dict[str, Any]:
    return {"shape": "s", "format": "q8_0", "llama": {"mmap": 0, "flash": 1}}


@pytest.mark.parametrize("way", ["resident", "in_turns"])
def test_both_arrangements_run_every_test_and_pair(vs: ModuleType, duel: Any, way: str) -> None:
    found = list(getattr(vs, way)(duel, settings(vs), 3))
    assert [p.test for p in found] == TESTS
    for p in found:
        assert len(p.ours_ns) == len(p.llama_ns) == 3 == len(p.roofs) - 1
        assert min(*p.ours_ns, *p.llama_ns, *p.peaks) > 0
        assert p.bytes_per_token is None  # this model skips neurons
        row = vs.row_of(p)
        assert json.loads(json.dumps(row)) == row and row["thermocline_roof_share"] is None


def test_tuning_takes_the_fastest_of_four(vs: ModuleType, duel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped: 10 and 30; read: 40 and 20 with and without flash attention, and the other way round."""

    class Timed:
        def __init__(self, mmap: int) -> None:
            self.mmap = mmap

        def __enter__(self) -> Timed:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, test: bench.Test, flash: int) -> dict[str, int]:
            return {"ns": {(0, 0): 20, (0, 1): 40, (1, 0): 30, (1, 1): 10}[self.mmap, flash ^ bool(test.gen)]}

    monkeypatch.setattr(vs.Duel, "llama", lambda self, mmap, repack: Timed(mmap))
    tuned = vs.tune(duel, repack=1)
    assert tuned.mmap == 1 and tuned.flash == {"pp8, 1": 1, "tg4, 1": 0, "tg4 @ d40, 1": 0}


def test_equal_engines_have_equal_logits_and_others_are_refused(
    vs: ModuleType, duel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert vs.compare_logits(duel, tmp_path) == 0
    assert "100% of 9 rows" in capsys.readouterr().err
    logits = vs.Driver.logits

    def off(self: Any, threads: int, directory: Path) -> Any:
        found = logits(self, threads, directory)
        return found * next(factors)

    factors = iter([1.0, 1.1])
    monkeypatch.setattr(vs.Driver, "logits", off)
    with pytest.raises(SystemExit, match=r"NMSE 8\.\de-03 is above 1e-03"):
        vs.compare_logits(duel, tmp_path)
    assert vs.nmse(np.ones(4), np.full(4, 2.0)) == 0.25
    with pytest.raises(SystemExit, match="NMSE nan"):
        factors = iter([1.0, float("nan")])
        vs.compare_logits(duel, tmp_path)


def test_the_drivers_logits_are_those_of_the_tokens_given(vs: ModuleType, duel: Any, tmp_path: Path) -> None:
    """Chunks and single tokens: the prompt one longer gives the row after."""
    few = replace(duel, tests=[bench.Test(1, 0, vs.LOGITS_PROMPT, vs.LOGITS_GEN)])
    with few.ours() as driver:
        rows = driver.logits(1, tmp_path)
        driver.ask("logits", 1, 0, vs.LOGITS_PROMPT + 3, 0, tmp_path / "one")
    np.testing.assert_array_equal(np.fromfile(tmp_path / "one", np.float32), rows[3])


def test_a_driver_that_ends_is_said(vs: ModuleType, duel: Any) -> None:
    with duel.ours() as driver, pytest.raises(SystemExit, match="thermocline ended with code 1"):
        driver.ask("nonsense")
