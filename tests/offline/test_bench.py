"""`thermocline bench`: what it feeds and times, the keys and tables others parse, figures that agree."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import test_synth
import toy

from thermocline.cli.commands import bench as command
from thermocline.engine import decoder, engine
from thermocline.engine.kv_cache import bytes_for
from thermocline.errors import NumericalError, UsageError
from thermocline.machine import hardware
from thermocline.model import quant
from thermocline.offline import bench
from thermocline.ops import interface
from thermocline.ops.cpu import CpuOps
from thermocline.pack.pack import Pack, inspect
from thermocline.pack.writer import write_pack
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session
from thermocline.text.tokenizer import Tokenizer

Run = Callable[..., Any]

# tools/llama-bench, test::get_fields() and the two that its JSON adds, in its order.
LLAMA_BENCH_KEYS = [
    "build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type",
    "model_size", "model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll",
    "type_k", "type_v", "n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload",
    "flash_attn", "devices", "tensor_split", "tensor_buft_overrides", "load_mode", "lazy_mode",
    "embeddings", "no_op_offload", "no_host", "repack", "fit_target", "fit_min_ctx", "n_prompt", "n_gen",
    "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts",
]  # fmt: skip
# Their types in its JSON (test::get_field_type).
BOOLEANS = {"no_kv_offload", "cpu_strict", "embeddings", "no_host", "repack"}
INTEGERS = {
    *("build_number", "n_batch", "n_ubatch", "n_threads", "poll", "model_size", "model_n_params", "avg_ns"),
    *("n_gpu_layers", "main_gpu", "n_prompt", "n_gen", "n_depth", "stddev_ns", "no_op_offload", "n_cpu_moe"),
    *("fit_target", "fit_min_ctx", "flash_attn"),
}
FLOATS = {"avg_ts", "stddev_ts"}
OUR_KEYS = {
    *("test", "median_ns", "median_ts", "first_token_s", "bytes_per_token", "gb_per_s", "roof_gb_per_s"),
    *("roof_share", "roof_share_min", "roof_share_max", "from_cache", "python_share", "load_s"),
    *(
        "peak_rss_bytes",
        "active_fraction",
        "rows_fraction",
        "predicted_fraction",
        "sparsity",
        "planted",
        "isa",
        "tokens",
    ),
    *("cache_hit_rate", "disk_bytes_per_token", "disk_reads_per_token", "disk_gb_per_s", "disk_wait_share"),
    *("read_budget_mb", "disk_left_out_per_token"),
    *("token_ms_p99", "memory_bytes", "disk", "vram_bytes", "disabled"),
}


@pytest.fixture(autouse=True)
def quick_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GB/s, found at once; and no cache, so that shares are told."""
    monkeypatch.setattr(hardware, "read_gbs_of", lambda arena, begin, end, threads, seconds: 2.0)
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 0)


@pytest.fixture(scope="session")
def toy_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model without a tokenizer."""
    path = tmp_path_factory.mktemp("bench") / "pack"
    write_pack(path, toy.SPEC, "q8_0", lambda name, first, last: random_rows(name, last - first))
    return path


def random_rows(name: str, rows: int) -> np.ndarray[Any, Any]:
    if "norm" in name:
        return np.ones(rows, np.float32)
    rng = np.random.default_rng(len(name))
    return rng.standard_normal((rows, toy.SPEC.dim)).astype(np.float32) * np.float32(0.2)


def options(pack: Path, more: str) -> list[str]:
    return ["bench", "-m", str(pack), "-t", "1", "-r", "2", *more.split()]


def measured(thermocline: Run, pack: Path, more: str) -> list[dict[str, Any]]:
    ran = thermocline(*options(pack, f"-o json {more}"))
    assert ran.code == 0, ran.err
    rows: list[dict[str, Any]] = json.loads(ran.out)
    return rows


# ---- which tests


def test_tests_come_in_llama_benchs_order_with_its_names(toy_pack: Path, thermocline: Run) -> None:
    rows = measured(thermocline, toy_pack, "-p 8,16 -n 4 -pg 8,2 -pg 0,3 -d 0,40 -t 1,2 -r 1")
    shallow = ["pp8", "pp16", "tg4", "pp8+tg2", "tg3"]
    names = shallow + [f"{name} @ d40" for name in shallow]
    assert [row["test"] for row in rows] == 2 * names
    assert [row["n_threads"] for row in rows] == 10 * [1] + 10 * [2]
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in rows[3:5]] == [(8, 2, 0), (0, 3, 0)]


def test_zero_leaves_a_test_out(toy_pack: Path, thermocline: Run) -> None:
    assert [r["test"] for r in measured(thermocline, toy_pack, "-p 0 -n 3 -r 1")] == ["tg3"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("-p 0 -n 0", "nothing to measure"),
        ("-p 300", "pp300 needs a context of 300 tokens; the model's limit is 256"),
        ("-n 8 -p 0 -d 250", "tg8 @ d250 needs a context of 258"),
        ("-p 8-", "--n-prompt must be numbers, or ranges"),
        ("-pg 8", "two numbers with a comma"),
        ("-o sql", "md, csv, json, jsonl"),
        ("--text README.md -p 8 -n 8", "has no tokenizer for README.md"),
    ],
)
def test_what_cannot_be_measured_is_one_line_at_once(
    argv: str, said: str, toy_pack: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "load", None)  # never reached
    ran = thermocline("bench", "-m", toy_pack, *argv.split())
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


def test_what_does_not_fit_in_memory_is_said_before_it_is_loaded(
    toy_pack: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 0)
    monkeypatch.setattr(Session, "load", None)  # never reached
    ran = thermocline(*options(toy_pack, "-p 8 -n 3"))
    assert (ran.code, ran.out) == (5, "") and "1.0 MiB is free" in ran.err


def test_a_text_that_cannot_be_fed_is_refused(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> None:
    for name, data, code, said in (
        ("short", b"Once", 2, "4 tokens, the tests need 13"),
        ("latin", b"caf\xe9 and more of it", 3, "byte 3 is 0xe9"),
        ("absent", None, 4, "No such file"),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        ran = thermocline(*options(tiny_pack, f"--text {tmp_path / name} -p 12 -n 4"))
        assert (ran.code, ran.out) == (code, "") and said in ran.err


# ---- what is fed and timed


class Steps:
    """`forward`, written down: the positions and the ids of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []
        forward = decoder.forward

        def noted(model: Any, kv: Any, batch: interface.Batch, *rest: Any, **named: Any) -> Any:
            self.calls.append((batch.positions.tolist(), batch.ids.tolist()))
            return forward(model, kv, batch, *rest, **named)

        monkeypatch.setattr(engine, "forward", noted)


def opened(pack: Path, *tests: bench.Test, **changes: Any) -> bench.Bench:
    about = Pack.open(pack)
    feed = bench.feed_of(about, tests, changes.get("text"), 1)
    return bench.Bench(about, tests, feed, EngineOptions(), lambda *_: None)


def timed(b: bench.Bench, test: bench.Test, steps: Steps) -> list[tuple[list[int], list[int]]]:
    """The forward passes of the timed part."""
    request = b._start(test)
    steps.calls.clear()
    b._finish(request, test)
    return steps.calls


@pytest.mark.parametrize("depth", [0, 1, 31, 32, 33, 100])
def test_a_token_test_times_one_forward_pass_per_token_after_the_context(
    depth: int, toy_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = bench.Test(threads=1, depth=depth, prompt=0, gen=5)
    b = opened(toy_pack, test)
    calls = timed(b, test, Steps(monkeypatch))
    first = max(1, depth)
    assert [positions for positions, _ in calls] == [[first + i] for i in range(5)]
    assert [ids for _, ids in calls] == [[i] for i in b.feed.ids[first : first + 5]]
    b.engine.kv.check_integrity()


@pytest.mark.parametrize("depth", [0, 1, 31, 32, 33, 100])
def test_a_prompt_test_times_exactly_the_prompt_in_the_engines_own_chunks(
    depth: int, toy_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = bench.Test(threads=1, depth=depth, prompt=40, gen=0)
    b = opened(toy_pack, test)
    b.engine.prefill_chunk = 16
    steps = Steps(monkeypatch)
    for _ in range(3):  # again: nothing of a prompt comes from the cache
        calls = timed(b, test, steps)
        assert [len(positions) for positions, _ in calls] == [16, 16, 8]
        assert [at for positions, _ in calls for at in positions] == list(range(depth, depth + 40))
    assert b.engine.prefill_chunk == 16


def test_contexts_of_any_depth_are_computed_once(toy_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [bench.Test(t, d, p, n) for t in (1, 2) for d in (0, 64, 128) for p, n in ((33, 0), (0, 3))]
    steps = Steps(monkeypatch)
    b = opened(toy_pack, *tests)
    assert sum(len(positions) for positions, _ in steps.calls) == 128
    for test in tests:
        steps.calls.clear()
        b.sample(test)
        untimed = 32 if test.depth and test.gen else 1  # the last block, for its last token; or one token
        assert sum(len(positions) for positions, _ in steps.calls) == untimed + test.prompt + test.gen


def test_a_real_text_is_fed_as_it_is(
    tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a heron.")
    test = bench.Test(threads=1, depth=4, prompt=6, gen=0)
    b = opened(tiny_pack, test, text=str(text))
    ((_, ids),) = timed(b, test, Steps(monkeypatch))
    assert Tokenizer(tiny_pack).decode(b.context_ids + ids) == "Once upon "


def test_random_tokens_repeat_with_their_seed_and_never_end_a_text() -> None:
    spec = replace(toy.SPEC, eos_ids=tuple(range(3, toy.VOCAB)), bos_id=7)
    ids = bench.random_tokens(spec, 5, 200)
    assert ids == bench.random_tokens(spec, 5, 200) != bench.random_tokens(spec, 6, 200)
    assert ids[0] == 7 and set(ids[1:]) == {0, 1, 2}


def test_a_model_that_gives_nan_is_an_error(toy_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = bench.Test(1, 0, 0, 3)
    b = opened(toy_pack, test)
    forward = decoder.forward
    monkeypatch.setattr(engine, "forward", lambda *a, **k: forward(*a, **k) * np.float32("nan"))
    with pytest.raises(NumericalError):
        b.sample(test)


# ---- figures


def test_figures_agree_with_each_other(toy_pack: Path, thermocline: Run) -> None:
    prompt, tokens, both = measured(thermocline, toy_pack, "-p 40 -n 6 -pg 8,4 -d 35 -r 3")
    for row, n in ((prompt, 40), (tokens, 6), (both, 12)):
        ns, speeds = row["samples_ns"], row["samples_ts"]
        assert len(ns) == 3 and speeds == pytest.approx([n * 1e9 / t for t in ns])
        assert row["avg_ns"] == pytest.approx(statistics.fmean(ns), abs=1)
        assert row["stddev_ns"] == pytest.approx(statistics.stdev(ns), abs=1)
        assert (row["avg_ts"], row["stddev_ts"]) == pytest.approx(
            (statistics.fmean(speeds), statistics.stdev(speeds))
        )
        assert row["median_ts"] == pytest.approx(n * 1e9 / row["median_ns"])
        assert row["load_s"] > 0 and row["peak_rss_bytes"] > 1 << 20
    assert tokens["gb_per_s"] == pytest.approx(tokens["bytes_per_token"] * tokens["median_ts"] / 1e9)
    assert tokens["roof_share"] == pytest.approx(tokens["gb_per_s"] / 2)
    assert tokens["roof_share_min"] <= tokens["roof_share"] <= tokens["roof_share_max"]
    assert 0 < tokens["python_share"] < 1 and tokens["first_token_s"] is None
    assert prompt["bytes_per_token"] is prompt["gb_per_s"] is prompt["roof_share"] is None
    assert prompt["first_token_s"] == pytest.approx(prompt["median_ns"] / 1e9, rel=0.2)
    assert 0 < both["first_token_s"] < both["median_ns"] / 1e9


def test_bytes_per_token_are_what_the_engine_counts(toy_pack: Path, thermocline: Run) -> None:
    dense, sparse = (
        measured(thermocline, toy_pack, f"-p 0 -n 5 -d 32 --sparsity {s}")[0] for s in ("off", "exact")
    )
    weights = inspect(Pack.open(toy_pack))["bytes_per_token_dense"] - quant.row_bytes("q8_0", toy.SPEC.dim)
    positions = statistics.fmean(range(33, 38))  # of the five tokens; the embedding's row is not counted
    assert dense["bytes_per_token"] == round(weights + positions * bytes_for(toy.SPEC, 1))
    assert dense["rows_fraction"] == 1 > sparse["rows_fraction"] == sparse["active_fraction"]
    skippable = toy.SPEC.n_layers * toy.SPEC.ffn_dim * 2 * quant.row_bytes("q8_0", toy.SPEC.dim)
    saved = (1 - sparse["rows_fraction"]) * skippable
    assert sparse["bytes_per_token"] == pytest.approx(dense["bytes_per_token"] - saved, abs=2)


@pytest.mark.parametrize("shape", ["llama-2-7b", "bamboo-7b", "mixtral-8x7b"])
def test_a_mixs_bytes_are_those_of_each_tensors_format(shape: str, tmp_path: Path, thermocline: Run) -> None:
    """Of a model of Q4_K and Q6_K, and of a bundle whose two rows differ."""
    config = test_synth.config_file(tmp_path, shape, num_hidden_layers=4)
    assert thermocline("synth", config, "-o", tmp_path / "m", "--format", "q4_k_m", "-q").code == 0
    pack = Pack.open(tmp_path / "m")
    (row,) = measured(thermocline, tmp_path / "m", "-p 0 -n 4 --sparsity off")
    assert {"Q4_K", "Q6_K"} <= set(row["model_type"].split()[-1].split("+"))
    embedding = quant.row_bytes(pack.tensors["embed.weight"].format, pack.spec.dim)
    weights = inspect(pack)["bytes_per_token_dense"] - embedding
    positions = statistics.fmean(range(2, 6))
    assert row["bytes_per_token"] == pytest.approx(weights + positions * bytes_for(pack.spec, 1), abs=2)


def test_weights_in_the_cache_have_no_share_of_the_roof(
    toy_pack: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 1 << 30)
    (row,) = measured(thermocline, toy_pack, "-p 0 -n 3")
    assert row["from_cache"] is True and row["roof_share"] is None and row["roof_gb_per_s"] == 2


def test_without_a_roof_the_rest_is_measured(
    toy_pack: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "read_gbs_of", lambda *_: None)
    (row,) = measured(thermocline, toy_pack, "-p 0 -n 3")
    assert row["gb_per_s"] > 0 and row["roof_gb_per_s"] is None and row["roof_share"] is None


def test_roof_and_test_alternate_with_the_tests_own_threads(
    toy_pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = opened(toy_pack, bench.Test(1, 0, 0, 2), bench.Test(2, 0, 0, 2))
    seen: list[Any] = []
    sample = b.sample
    monkeypatch.setattr(b, "roof", lambda threads: seen.append(f"roof {threads}") or 2.0)
    monkeypatch.setattr(b, "sample", lambda test: seen.append(test.threads) or sample(test))
    list(bench.rows(b, 2))
    assert seen == [1, 2, "roof 1", 1, "roof 1", 1, "roof 1", "roof 2", 2, "roof 2", 2, "roof 2"]
    assert all(cast(CpuOps, b.ops[n]).native.threads == n for n in (1, 2))


# ---- what is printed


def test_json_has_llama_benchs_keys_and_types_and_then_ours(toy_pack: Path, thermocline: Run) -> None:
    for row in measured(thermocline, toy_pack, "-p 8 -n 3"):
        assert list(row)[: len(LLAMA_BENCH_KEYS)] == LLAMA_BENCH_KEYS
        assert set(row) == {*LLAMA_BENCH_KEYS, *OUR_KEYS}
        for key in LLAMA_BENCH_KEYS[:-2]:
            kind = bool if key in BOOLEANS else int if key in INTEGERS else float if key in FLOATS else str
            assert type(row[key]) is kind, key
        assert all(type(n) is int for n in row["samples_ns"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["test_time"])


def test_jsonl_is_one_row_a_line_and_csv_the_same_without_samples(toy_pack: Path, thermocline: Run) -> None:
    lines = thermocline(*options(toy_pack, "-p 8 -n 3 -o jsonl")).out.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["test"] for row in rows] == ["pp8", "tg3"]
    text = thermocline(*options(toy_pack, "-p 8 -n 3 -o csv")).out
    assert text.splitlines()[1].startswith('"')
    table = list(csv.DictReader(io.StringIO(text)))
    assert [key for key in rows[0] if not key.startswith("samples")] == list(table[0])
    assert [row["test"] for row in table] == ["pp8", "tg3"]
    assert (table[0]["bytes_per_token"], table[0]["embeddings"], table[0]["n_prompt"]) == ("", "0", "8")


def test_the_table_is_llama_benchs_with_more_columns(toy_pack: Path, thermocline: Run) -> None:
    out = thermocline(*options(toy_pack, "-p 8 -n 3 -d 32")).out
    header, rule, *cells, blank, facts, build = out.splitlines()
    titles = [title.strip() for title in header.strip("|").split("|")]
    assert titles[:7] == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert titles[7:] == ["median", "first s", "MB/token", "GB/s", "roof", "of roof", "python"]
    assert len(cells) == 2 and {len(line) for line in (header, rule, *cells)} == {len(header)}
    assert re.fullmatch(r"\|( -+[-:] \|)+", rule)
    row = dict(zip(titles, (cell.strip() for cell in cells[1].strip("|").split("|")), strict=True))
    assert (row["backend"], row["threads"], row["test"]) == ("CPU", "1", "tg3 @ d32")
    assert re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row["t/s"])
    assert row["roof"] == "2.0" and row["of roof"].endswith("%") and row["python"].endswith("%")
    assert blank == "" and "peak " in facts and re.fullmatch(r"build: \S+ \(0\)", build)


def test_ctrl_c_prints_what_is_done_and_closes_the_json(
    toy_pack: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second test's second run is interrupted: its first counts."""
    calls, sample = [0], bench.Bench.sample

    def interrupted(self: bench.Bench, test: bench.Test) -> bench.Sample:
        calls[0] += 1
        if calls[0] == 3 + 3 + 2:  # three warm-ups, three runs of pp8, the second of tg3
            raise KeyboardInterrupt
        return sample(self, test)

    monkeypatch.setattr(bench.Bench, "sample", interrupted)
    ran = thermocline(*options(toy_pack, "-p 8 -n 3,4 -r 3 -o json"))
    rows = json.loads(ran.out)
    assert ran.code == 130 and ran.err == ""
    assert [(row["test"], len(row["samples_ns"])) for row in rows] == [("pp8", 3), ("tg3", 1)]
    assert rows[1]["python_share"] is None and rows[1]["stddev_ts"] == 0


def test_ctrl_c_before_the_first_result_is_still_json(
    toy_pack: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Bench, "sample", interrupted)
    ran = thermocline(*options(toy_pack, "-p 8 -n 3 -o json"))
    assert ran.code == 130 and json.loads(ran.out) == []


def test_the_reference_lists_the_keys_as_they_are() -> None:
    reference = (Path(__file__).parents[2] / "docs/reference/json.md").read_text()
    section = reference.split("\n## `bench`\n")[1].split("\n## ")[0]
    table = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {key for cell in table for key in re.findall("`(.+?)`", cell)} == OUR_KEYS


def test_every_output_has_its_printer() -> None:
    assert tuple(command.BENCH_FORMATS) == command.BENCH_OUTPUTS


def test_tests_of_refuses_nothing_to_do() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        bench.tests_of(prompts=[0], gens=[0], pairs=[(0, 0)], depths=[0], threads=[1])
