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

from thermocline.convert.synthetic import shapes
from thermocline.machine import hardware
from thermocline.model.mixes import MIXES
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
    files = tiny_pack, pack.spec, tiny_pack / "weights.bin", tmp_path / "tokens"
    made = vs.Duel(*files, TESTS, "native", Path())
    monkeypatch.setattr(vs.Duel, "llama", lambda self, mmap, repack: self.ours())
    return made


def ways(vs: ModuleType) -> Any:
    """The second test as the file has its weights, the others repacked."""
    return {t: vs.Way(int(t.name == "tg4"), int(t.name != "tg4"), 1) for t in TESTS}


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
    return {"shape": "s", "format": "q8_0", "llama": {"mmap": 0, "repack": 1, "flash": 1}}


@pytest.mark.parametrize("way", ["resident", "in_turns"])
def test_both_arrangements_run_every_test_and_pair(vs: ModuleType, duel: Any, way: str) -> None:
    found = list(getattr(vs, way)(duel, ways(vs), 2))
    assert {p.test for p in found} == set(TESTS) and len(found) == len(TESTS)
    for p in found:
        assert len(p.ours_ns) == len(p.llama_ns) == 2 == len(p.roofs) - 1
        assert min(*p.ours_ns, *p.llama_ns, *p.peaks) > 0
        assert p.bytes_per_token is None  # this model skips neurons
        row = vs.row_of(p)
        assert json.loads(json.dumps(row)) == row and row["thermocline_roof_share"] is None


def test_llama_cpp_runs_each_test_its_fastest_way(
    vs: ModuleType, duel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped: 10 and 30 without and with flash attention, repacked: 40 and 20; prompts vice versa."""

    class Timed:
        def __init__(self, mmap: int, repack: int) -> None:
            assert mmap != repack
            self.mmap = mmap

        def __enter__(self) -> Timed:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, test: bench.Test, flash: int) -> dict[str, int]:
            ns = {(1, 0): 10, (1, 1): 30, (0, 0): 40, (0, 1): 20}[self.mmap, flash]
            return {"ns": ns if test.gen else 50 - ns}

    monkeypatch.setattr(vs.Duel, "llama", lambda self, mmap, repack: Timed(mmap, repack))
    assert vs.trial(duel) == {
        TESTS[0]: vs.Way(mmap=0, repack=1, flash=0),
        TESTS[1]: vs.Way(mmap=1, repack=0, flash=0),
        TESTS[2]: vs.Way(mmap=1, repack=0, flash=0),
    }


def test_a_way_is_three_digits(vs: ModuleType) -> None:
    assert vs.parse_way("1,0,1") == vs.Way(1, 0, 1)
    with pytest.raises(vs.argparse.ArgumentTypeError):
        vs.parse_way("1,2,1")


def test_every_row_is_a_known_shape_in_a_known_mix(vs: ModuleType) -> None:
    for row in vs.ROWS.values():
        assert row.shape in shapes() and row.format in MIXES
        assert all(vs.parse_test(t) for t in row.tests) and row.threads


def test_a_result_says_where_it_was_measured(vs: ModuleType) -> None:
    facts = vs.machine()
    assert facts["cores"] is None or facts["cores"] > 0
    assert facts["arch"] and isinstance(facts["features"], list)
    assert json.loads(json.dumps(facts)) == facts


def test_equal_engines_have_equal_logits(vs: ModuleType, duel: Any, tmp_path: Path, capsys: Any) -> None:
    assert vs.compare_logits(duel, tmp_path) == 0
    assert "100% of 9 rows" in capsys.readouterr().err


@pytest.mark.parametrize(("factor", "said"), [(1.1, r"8\.\de-03 is above 1e-03"), (float("nan"), "nan")])
def test_engines_with_other_logits_are_refused(
    vs: ModuleType, duel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, said: str
) -> None:
    logits = vs.Driver.logits

    def off(self: Any, threads: int, directory: Path) -> Any:
        found = logits(self, threads, directory)
        return found * next(factors)

    factors = iter([1.0, factor])
    monkeypatch.setattr(vs.Driver, "logits", off)
    with pytest.raises(SystemExit, match=f"NMSE {said}"):
        vs.compare_logits(duel, tmp_path)
    assert sys.modules["engines"].nmse(np.ones(4), np.full(4, 2.0)) == 0.25


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


def test_the_first_token_is_the_likeliest_after_the_prompt(vs: ModuleType, duel: Any, tmp_path: Path) -> None:
    few = replace(duel, tests=[bench.Test(1, 0, vs.LOGITS_PROMPT, vs.LOGITS_GEN)])
    with few.ours() as driver:
        said = driver.ask("first", 1, 1, vs.LOGITS_PROMPT)
        rows = driver.logits(1, tmp_path)
    assert said["token"] == rows[0].argmax() and said["ns"] > 0


# ---- from a file to the first token


@pytest.fixture
def first(vs: ModuleType) -> ModuleType:
    return importlib.import_module("first_token")


@pytest.mark.skipif(sys.platform != "linux", reason="page caches are asked about as Linux answers")
def test_a_file_leaves_the_page_cache_and_comes_back(first: ModuleType, tmp_path: Path) -> None:
    """Where the file system has one: in memory, nothing can leave."""
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    cold, warm = first.make_cold(file), first.make_warm(file)
    assert 0 <= cold <= warm == 1


def test_the_better_way_of_llama_cpp_is_the_rival(first: ModuleType) -> None:
    def runs(*totals: float) -> list[Any]:
        return [first.FirstToken(total, load=total / 2, prompt=total / 4) for total in totals]

    found = {
        "thermocline": runs(1, 2, 4),
        "llama.cpp mapped": runs(2, 2, 2),
        "llama.cpp repacked": runs(3, 8, 9),
    }
    row = first.row_of("cold", found, [0.0, 0.1])
    assert row["rival"] == "llama.cpp mapped" and row["cached_share"] == 0.1
    assert (row["ratio"], row["ratio_q1"], row["ratio_q3"]) == (1.0, 0.75, 1.5)
    assert row["ratio_without_start"] == 1.0 and row["thermocline"]["start"] == [0.25, 0.5, 1.0]
    assert "1.00 (0.75–1.50) times llama.cpp mapped's speed" in first.show(
        row | {"shape": "s", "format": "f"}
    )
    assert json.loads(json.dumps(row)) == row


def test_both_engines_start_anew_for_every_first_token(first: ModuleType, duel: Any) -> None:
    args = first.argparse.Namespace(pairs=1, threads=[1], prompt=4)
    duel = replace(duel, tests=[bench.Test(1, 0, 4, 1)])
    row = first.measure(duel, "warm", args)
    for name in ("thermocline", "llama.cpp mapped", "llama.cpp repacked"):
        assert len(row[name]["total"]) == 1
        assert all(s > 0 for s in row[name]["start"])  # load and prompt are a part of the whole
