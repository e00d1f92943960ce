"""A model larger than its memory: the same answers as without a limit, within the limit, or a refusal."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

from thermocline import LLM, SamplingParams
from thermocline.cli import main
from thermocline.convert import synthetic
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.request import request_for
from thermocline.errors import OutOfBudget, UsageError
from thermocline.offline import bench
from thermocline.offline.bench import Bench
from thermocline.offline.bench import Test as BenchTest
from thermocline.offline.need_trace import Trace, TraceRecorder
from thermocline.offline.replay import replay
from thermocline.ops.interface import opaque
from thermocline.pack.checksums import open_checksums
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, Predictors
from thermocline.plan import hotness
from thermocline.plan.disk import disk_split
from thermocline.plan.memory import GIB, others_of
from thermocline.session import store, weights
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session
from thermocline.session.store import Store

Run = Callable[..., Any]
FFN = 8192  # neurons of a layer, with 4 MiB of bundles
PROMPT = "The thermocline is a thin layer of water where warm meets cold, and " * 3
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def hf_directory(path: Path) -> Path:
    """The tiny model, its head untied, with wide layers whose neurons differ in how often they are active."""
    tiny.hf_directory(path, intermediate_size=FFN, tie_word_embeddings=False)
    rng = np.random.default_rng(5)
    tensors = tiny.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    for i in range(tiny.LAYERS):
        for name, shape in (("gate_proj", (FFN, 64)), ("up_proj", (FFN, 64)), ("down_proj", (64, FFN))):
            w = rng.standard_normal(shape) / 8
            tensors[f"model.layers.{i}.mlp.{name}.weight"] = w.astype(np.float32)
    save_file(tensors, str(path / "model.safetensors"))
    return path


@pytest.fixture(scope="module")
def wide_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In order of hotness."""
    base = tmp_path_factory.mktemp("wide")
    text = base / "text.txt"
    text.write_text(PROMPT * 20)
    source, out = hf_directory(base / "hf"), base / "pack"
    assert main.main(["pack", str(source), "-o", str(out), "--format", "f32", "-q"]) == 0
    profile = ["profile", str(out), "--corpus", str(text), "--tokens", "512", "--samples", "0", "-q"]
    assert main.main(profile) == 0
    return out


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a real model's reads would be as large as all of this one's neurons."""
    monkeypatch.setattr(disk_split, "BUFFER_BYTES", 4096)
    for module in (disk_split, store):
        monkeypatch.setattr(module, "DEPTH", 32)


def opened(pack: Path, ram: float | None = None, **asked: Any) -> LLM:
    asked = {"threads": 2, "context": 512, "max_batch": 2} | asked
    return LLM(pack, ram=ram, **asked)


def least(pack: Path, **asked: Any) -> float:
    """GiB, as the refusal says."""
    with pytest.raises(OutOfBudget) as refused:
        opened(pack, 0.001, **asked)
    return float(re.search(r"--ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]


def budgets(pack: Path) -> list[float]:
    """From what holds a few neurons of a layer to what lacks a few."""
    with opened(pack, lazy=True) as llm:
        assert llm.session.arrangement is None
        others = others_of(llm.spec, context=512, kv_tokens=512, max_batch=2, threads=2)
        most = (llm.session.weights_bytes + sum(others.values())) / GIB
    low = least(pack)
    return [low + (most - low) * part for part in (0.0, 0.1, 0.3, 0.6, 0.98)]


@pytest.mark.parametrize("sparsity", ["exact", "off"])
@pytest.mark.parametrize(("every", "tokens"), [(2, 8), pytest.param(1, 24, marks=pytest.mark.slow)])
def test_no_budget_changes_a_bit(wide_pack: Path, sparsity: str, every: int, tokens: int) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with opened(wide_pack, sparsity=sparsity) as llm:
        want = llm.generate([PROMPT, "Cold"], greedy)
    for ram in budgets(wide_pack)[::every]:
        with opened(wide_pack, ram, sparsity=sparsity) as llm:
            assert llm.session.arrangement is not None and llm.session.arrangement.bytes <= ram * GIB
            got = llm.generate([PROMPT, "Cold"], greedy)
        for a, b in zip(got, want, strict=True):
            assert (a.token_ids, a.figures.logits_hash) == (b.token_ids, b.figures.logits_hash), ram


def test_switched_off_parts_change_nothing_but_time(wide_pack: Path) -> None:
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with opened(wide_pack) as llm:
        want = llm.generate("Cold", few).figures.logits_hash
    ram, reads = budgets(wide_pack)[4], {}
    for disable in ((), ("cache",), ("bundle",), ("pipeline",), ("bundle", "cache", "pipeline")):
        with opened(wide_pack, ram, disable=disable) as llm:
            figures = llm.generate("Cold", few).figures
        assert figures.logits_hash == want and figures.disk is not None
        reads[disable] = figures.disk
    assert reads["cache",].missed > 1.5 * reads[()].missed
    assert reads["bundle",].reads > 1.5 * reads[()].reads


def test_parts_cannot_be_switched_off_where_all_is_in_memory(wide_pack: Path) -> None:
    with pytest.raises(UsageError, match="all weights are in memory"):
        opened(wide_pack, disable=("cache",))
    with pytest.raises(UsageError, match="must be one of bundle"):
        opened(wide_pack, 0.05, disable=("gpu",))
    with pytest.raises(UsageError, match=r"--gpu 0 with --disable cache: .* leave one of them out"):
        opened(wide_pack, 0.05, disable=("cache",), gpu="0")  # was left out in silence


def test_more_memory_means_fewer_misses(wide_pack: Path) -> None:
    rates = []
    for ram in budgets(wide_pack):
        with opened(wide_pack, ram) as llm:
            disk = llm.generate(PROMPT, GREEDY).figures.disk
        assert disk is not None and 0 <= disk.missed <= disk.needed and disk.needed > 0
        rates.append(1 - disk.missed / disk.needed)
    assert rates == sorted(rates) and rates[-1] > 0.8 > 0.2 > rates[0]


def test_the_least_that_a_refusal_names_is_enough_and_less_is_not(wide_pack: Path) -> None:
    enough = least(wide_pack)
    with opened(wide_pack, enough) as llm:
        assert len(llm.generate("Cold", GREEDY).token_ids) == 24
    with pytest.raises(OutOfBudget, match="on disk the model still needs"):
        opened(wide_pack, enough - 0.011)


def test_a_pack_without_a_profile_runs_too_and_says_what_would_help(
    wide_pack: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(wide_pack) as llm:
        want = llm.generate(PROMPT, GREEDY).figures.logits_hash
    pack = shutil.copytree(wide_pack, tmp_path / "pack")
    (pack / "profile.safetensors").unlink()
    with opened(pack, budgets(wide_pack)[1]) as llm:
        assert llm.generate(PROMPT, GREEDY).figures.logits_hash == want
        assert llm.session.arrangement is not None
    assert any("larger than its memory" in line for line in caplog.messages)
    assert any("thermocline profile" in line for line in caplog.messages)


def test_gates_with_biases_come_from_disk_too(tmp_path: Path) -> None:
    """OPT's: a predictor names what is fetched, the biases stay."""
    shape = synthetic.shapes()["opt-6.7b"] | {
        "hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 2048, "num_hidden_layers": 3,
        "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    synthetic.SyntheticModel.of(str(tmp_path / "config.json"), 0, 0.1, 0.26, 64).write(
        tmp_path / "pack", "f16"
    )
    pack, rng = Pack.open(tmp_path / "pack"), np.random.default_rng(3)
    spec = pack.spec
    bits = rng.integers(0, 256, (spec.n_layers, spec.ffn_dim, spec.dim // 8), dtype=np.uint8)
    zero = np.zeros(spec.ffn_dim, np.float32)
    predictors = Predictors.of(spec, [LayerPredictor("sign", None, None, b, zero, 40) for b in bits])
    contents = disk_split.Contents(
        spec, pack.tensors, predictors.nbytes, "predict", hotness.of_pack(pack, hotness.Curve())
    )
    made = disk_split.arrange(contents, disk_split.least_bytes(contents, {}), {})
    assert made.gates is not None
    loaded, _ = store.load(pack, made, open_checksums(pack), threads=2, predictors=predictors)
    whole = weights.load(pack, threads=2, predictors=predictors)
    got, want = (Engine(spec, x.weights, x.ops, EngineSettings(64, 1, "predict")) for x in (loaded, whole))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [e.submit(range(3, 20), params) for e in (got, want)]
    for engine in (got, want):
        while engine.running or engine.waiting:
            engine.step()
    assert len(requests[0].ids) == 17 + 8 and requests[0].ids == requests[1].ids
    assert requests[0].digest == requests[1].digest


def test_the_last_line_and_the_json_say_what_the_disk_did(wide_pack: Path, thermocline: Run) -> None:
    ram = budgets(wide_pack)[1]
    args = ("run", "-m", wide_pack, "--ram", str(ram), "-c", "512", "-n", "16", "--ignore-eos", "Cold")
    ran = thermocline(*args, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert 0 < told["cache_hit_rate"] < 1 and told["disk_bytes_per_token"] > 0
    assert told["disk_gb_per_s"] > 0 and 0 <= told["disk_wait_share"] < 1
    assert told["memory_bytes"] <= ram * GIB and told["token_ms_p99"] > 0
    line = thermocline(*args).err.splitlines()[-1]
    for words in (r"[\d.]+% in memory", r"disk [\d.]+ MB/token", r"waiting \d+%", r"ms a token, P99 [\d.]+"):
        assert re.search(words, line), line
    whole = json.loads(thermocline("run", "-m", wide_pack, "-n", "4", "--json", "-q", "Cold").out)
    assert whole["cache_hit_rate"] is None and whole["disk"] is None


@pytest.mark.parametrize("kept", [0.0, 0.002])
def test_plan_says_before_what_run_does(kept: float, wide_pack: Path, thermocline: Run) -> None:
    """The same split to the byte, on this machine's own figures, and with what a prompt cache may take."""
    ram = f"{budgets(wide_pack)[2] + 2 * kept:.4f}"
    asked = ("--ram", ram, "--ctx", "512", "--prompt-cache", kept)
    plan = thermocline("plan", wide_pack, *asked, "--threads", "2", "--json", "-q")
    assert plan.code == 0, plan.err
    told = json.loads(plan.out)
    assert ("prompt cache" in told["bytes"]["ram"]) == bool(kept)
    sized: dict[str, Any] = {"context": 512, "max_batch": 1, "ram": float(ram), "prompt_cache": kept}
    with LLM(wide_pack, threads=2, lazy=True, **sized) as llm:
        assert llm.session.arrangement is not None
        assert told["bytes"]["ram"] == llm.session.arrangement.parts
        assert [x["ram"] for x in told["layers"]] == [s.places for s in llm.session.arrangement.bundles]
    assert told["bytes"]["disk"]["up and down rows"] > 0
    assert any("expected in memory" in note for note in told["notes"])


@pytest.mark.slow
def test_the_promise_is_kept_in_a_process_of_its_own(tmp_path: Path, thermocline: Run) -> None:
    """Peak memory is below what was said before, and not far."""
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(tiny.config(
        hidden_size=512, intermediate_size=8192, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=8,
    )))  # fmt: skip
    pack = tmp_path / "pack"
    made = thermocline("synth", shape, "-o", pack, "--format", "q8_0", "--active", "0.1")
    assert made.code == 0, made.err
    code = "import sys; from thermocline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    tests = ["-p", "300", "-n", "24", "-r", "1", "-t", "2", "-o", "jsonl", "-q"]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, "bench", "-m", str(pack), "--ram", "0.13", *tests],
        capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    for row in rows:
        assert 0.85 * row["memory_bytes"] < row["peak_rss_bytes"] <= row["memory_bytes"] <= 0.13 * GIB
    assert rows[1]["cache_hit_rate"] > 0.5 and rows[1]["disk_bytes_per_token"] > 0


def test_it_is_said_what_answers_together_have_to_share(
    wide_pack: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "thermocline")
    with opened(wide_pack, budgets(wide_pack)[2], max_batch=8) as llm:
        assert llm.session.store is not None
    assert (
        "up to 8 answers are computed together, as long as all of them fit in 512 positions "
        "of keys and values (full contexts: 1); more wait" in caplog.messages[-1]
    )


def test_eight_sequences_at_once_read_what_their_neurons_need(tmp_path: Path, thermocline: Run) -> None:
    """More than four read the whole model in each step: 20.1 MB for 8, where 4 read 1.5."""
    shape, pack = tmp_path / "config.json", tmp_path / "pack"
    shape.write_text(json.dumps(tiny.config(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=8,
    )))  # fmt: skip
    made = thermocline("synth", shape, "-o", pack, "--format", "f32", "--active", "0.05", "--hottest-first")
    assert made.code == 0, made.err
    read = {n: bytes_per_step(Pack.open(pack), n) for n in (4, 5, 8)}
    assert read[5] < 1.5 * read[4] and read[8] < 3 * read[4], read


def bytes_per_step(pack: Pack, sequences: int) -> float:
    """Of the disk, by steps of so many answers to random prompts, in memory for 40 % of the neurons."""
    options = EngineOptions(context=128, max_batch=8, kv_tokens=1024, threads=1, ram=0.11)
    session = Session.open(pack, options)
    engine = session.load()
    assert session.arrangement is not None and session.store is not None
    counts = session.store.counts
    for i in range(sequences):
        ids = [int(x) for x in np.random.default_rng(i).integers(3, pack.spec.vocab_size, 4)]
        params = SamplingParams(max_tokens=40, temperature=1, seed=i, ignore_eos=True)
        engine.queue(request_for(pack.spec, 128, None, ids, params))
    while not all(r.n_prompt < len(r.ids) for r in engine.running) or len(engine.running) < sequences:
        engine.step()
    before = counts()
    for _ in range(24):
        engine.step()
    return counts().since(before).bytes / 24


def test_a_trace_within_a_budget_is_that_of_all_in_memory(
    wide_pack: Path, tmp_path: Path, thermocline: Run
) -> None:
    asked = ("bench", "-m", wide_pack, "-n", 4, "-d", 2, "-t", 1, "-q", "--trace")
    # A bench has keys and values of two blocks; 0.001 GiB are refused, so the budget is looked at.
    assert thermocline(*asked, tmp_path / "none", "--ram", 0.001).code == 5
    for name, more in (("a", ()), ("b", ("--ram", budgets(wide_pack)[1]))):
        ran = thermocline(*asked, tmp_path / name, *more)
        assert ran.code == 0, ran.err
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_replay_finds_what_the_engine_finds(wide_pack: Path) -> None:
    """The same code over the same slots."""
    pack, test = Pack.open(wide_pack), BenchTest(1, 0, 0, 40)
    feed, heat = bench.feed_of(pack, [test], None, 1), hotness.of_pack(pack, hotness.Curve())

    def loaded(ram: float | None) -> Bench:
        return Bench(pack, [test], feed, EngineOptions(ram=ram), lambda *_: None)

    whole = loaded(None)
    recorder = TraceRecorder(1, pack.spec, whole.engine.model.weights.layers)
    whole.ops[1] = opaque(recorder)
    recorder.begin()  # before the token that a bench does not count: the engine's caches see it, too
    whole.sample(test)
    trace = Trace.of(recorder, feed.name, "exact", 0)
    low, *_, high = budgets(wide_pack)
    for part in (0.75, 0.85):
        engine = loaded(low + (high - low) * part)
        assert isinstance(engine.session.store, Store)
        engine.sample(test)
        done = engine.session.store.counts()
        frequency = [heat.at(i, 1) for i in range(pack.spec.n_layers)]
        counts = replay(trace, engine.session.store.arrangement.bundles, frequency, "lfu")
        assert counts.needed.sum() == done.needed
        # Chunks that wait for a slot go on in the order in which reads end: 0.4 % more or fewer were seen.
        assert abs(counts.missed.sum() - done.missed) <= 0.01 * done.missed
        assert 0.5 < counts.hit_rate < 0.95
