"""A dense model larger than its memory: the answers of memory, from a GGUF or a pack, within the budget."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_twins
import kept_twins
import numpy as np
import pytest
import test_synth
from answers import GREEDY, answers_of, chats_kept, prompts

from thermocline.convert import importer
from thermocline.errors import BadFile, IOFailure, OutOfBudget, UsageError
from thermocline.machine.tiers import read_tiers
from thermocline.opening.open_model import open_model
from thermocline.pack.pack import Pack
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.budget import Decision
from thermocline.plan.disk import dense_plan, dense_split
from thermocline.plan.disk.dense_split import Dense, DenseSplit, divide, least_bytes, placed
from thermocline.plan.hotness import Curve
from thermocline.plan.memory import GIB, others_of
from thermocline.plan.place import plan
from thermocline.plan.problem import Ask, Problem
from thermocline.plan.subject import of_model
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

Run = Callable[..., Any]
# Gated and ungated, gate and up as one tensor, biases, tokens' inputs to layers, norms behind, states.
PACKED = ["llama3", "phi3", "phi2", "gemma4_small", "qwen3_5"]
PACKED_TOO = [
    "qwen3", "gemma3", "falcon_7b", "olmo3", "granite", "gpt_neox", "cohere2", "stablelm_12b", "lfm2",
    "granite_hybrid_dense", "starcoder2", "llama_gelu",
]  # fmt: skip
IN_PLACE = {"llama3": "llama", "qwen3": "qwen3", "gemma3": "gemma3"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model's matrices are then several records, and the ring is smaller than a layer."""
    monkeypatch.setattr(dense_split, "RECORD_BYTES", 20 << 10)
    monkeypatch.setattr(dense_split, "WINDOW", 5)
    monkeypatch.setattr(dense_split, "ARRANGING", 2)


def answers(model: StoredModel, decision: Decision | None) -> list[Any]:
    """One by one, with what is known of their beginnings; then all together."""
    options = EngineOptions(context=64, max_batch=4, threads=2)
    opened = Session.open(model, options) if decision is None else Session(model, options, decision)
    with opened as session:
        engine = session.load()
        found = answers_of(engine, model.spec.vocab_size)
        assert engine.counts().cached_tokens > 0, "a beginning that is known"
        if decision is not None:
            assert session.store is not None and session.store.counts().missed > 0
    return found


def with_records(model: StoredModel, part: float, context: int = 64) -> Decision:
    """As if a budget had room for such a part of each matrix, and for a record of it at least."""
    d = Dense(model.spec, model.tensors)
    held = {i: tuple(max(1, int(part * p.records)) for p in phases) for i, phases in d.layers.items()}
    return Decision(placed(DenseSplit({}, held, d), context, 4 * context), dense=d)


def gives_the_bits_of_memory(model: StoredModel) -> None:
    wanted = answers(model, None)
    assert wanted[:4] == wanted[4:]
    for part in (0.0, 0.6):
        assert answers(model, with_records(model, part)) == wanted, part


@pytest.mark.parametrize("name", [*PACKED, *(pytest.param(n, marks=pytest.mark.slow) for n in PACKED_TOO)])
def test_no_part_on_disk_changes_a_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_split, "RECORD_BYTES", 4 << 10)
    importer.pack(kept_twins.TWINS[name](tmp_path / "hf"), tmp_path / "pack", "q8_0")
    gives_the_bits_of_memory(Pack.open(tmp_path / "pack"))


@pytest.mark.parametrize("name", IN_PLACE)
def test_nor_in_a_gguf_that_runs_in_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_split, "RECORD_BYTES", 4 << 10)
    path = tmp_path / "m.gguf"
    hf = kept_twins.TWINS[name](tmp_path / "hf")
    gguf_twins.write(hf, path, arch=IN_PLACE[name], types=lambda n: "F16" if "ffn" in n else None)
    model = open_model(path, tmp_path, None)
    assert not isinstance(model, Pack)
    gives_the_bits_of_memory(model)


@pytest.mark.parametrize(
    "format", ["q4_0", *(pytest.param(f, marks=pytest.mark.slow) for f in ("q4_k_m", "q8_0", "f16", "q4_k"))]
)
def test_nor_in_the_formats_that_people_have(format: str, tmp_path: Path, thermocline: Run) -> None:
    """Of a pack and of a GGUF: in rows, and in groups of rows where the CPU is faster so."""
    config, pack, path = (
        test_synth.config_file(tmp_path, "llama-2-7b"),
        tmp_path / "pack",
        tmp_path / "m.gguf",
    )
    made = thermocline("synth", config, "--format", format, "-o", pack, "--gguf", path, "-q")
    assert made.code == 0, made.err
    found = [open_model(x, tmp_path, None) for x in (pack, path)]
    assert not isinstance(found[1], Pack)
    for model in found:
        gives_the_bits_of_memory(model)


# ---- budgets


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pack and a GGUF of one model, in Q4_K_M: formats differ from layer to layer."""
    from thermocline.cli import main

    base = tmp_path_factory.mktemp("files")
    config = test_synth.config_file(base, "llama-2-7b", intermediate_size=4096)
    synth = ["synth", str(config), "--format", "q4_k_m", "-o", str(base / "pack"), "-q"]
    assert main.main([*synth, "--gguf", str(base / "m.gguf")]) == 0
    return base / "pack", base / "m.gguf"


@pytest.fixture(params=["pack", "gguf"])
def path(request: pytest.FixtureRequest, files: tuple[Path, Path]) -> Path:
    return files[request.param == "gguf"]


def others(model: StoredModel, threads: int = 2) -> dict[str, int]:
    return others_of(model.spec, context=64, kv_tokens=64, max_batch=1, threads=threads)


def of(model: StoredModel) -> Dense:
    return Dense(model.spec, model.tensors)


def ffn_bytes(model: StoredModel) -> int:
    return sum(p.left_bytes(0) for p in of(model).phases)


def half(model: StoredModel, threads: int = 2) -> float:
    """GiB that hold about half of the FFNs."""
    return (least_bytes(of(model), others(model, threads)) + ffn_bytes(model) // 2) / GIB


def options(ram: float, **asked: Any) -> EngineOptions:
    return EngineOptions(**{"context": 64, "max_batch": 1, "threads": 2, "ram": ram, "kv_tokens": 64} | asked)


def generated(session: Session) -> Any:
    engine = session.load()
    request = engine.submit(prompts(512)[0], GREEDY)
    while engine.step():
        pass
    return request.completion()


def test_a_budget_is_kept_to_the_byte_and_used(path: Path) -> None:
    model = open_model(path, "", None)
    d, low = of(model), least_bytes(of(model), others(model))
    whole, before = low + ffn_bytes(model), 0.0
    for budget in np.linspace(low, whole, 9).astype(int):
        s = divide(d, int(budget), others(model))
        assert s.bytes <= budget and s.share >= before
        parts = [n / p.records for i, held in s.held.items() for n, p in zip(held, d.layers[i], strict=True)]
        assert max(parts) - min(parts) <= 1 / min(p.records for p in d.phases), "as large a part of each"
        if budget < whole:
            assert budget - s.bytes < 2 * d.piece_bytes, "the rest holds no record"
        before = s.share
    assert set(divide(d, low, others(model)).held.values()) == {(dense_split.LEAST,) * 2}
    with pytest.raises(OutOfBudget, match="with its FFNs on disk the model still needs"):
        divide(d, low - 1, others(model))


def test_chats_have_keys_and_values_of_their_own_in_an_eighth_of_the_budget(path: Path) -> None:
    """They share a stream, so that each costs its keys and values alone; nobody is refused for them."""
    model, found = open_model(path, "", None), []
    for context, more in ((64, 0.0), (64, 0.003), (1024, 0.003)):
        one = others_of(model.spec, context=context, kv_tokens=context, max_batch=8, threads=2)
        ram = least_bytes(of(model), one) / GIB + 1e-5 + more
        asked = options(ram, context=context, kv_tokens=None, max_batch=8)
        found.append(chats_kept(model, asked))
    assert found[0] < found[1] == 8 and found[2] < 8, found
    asked = options(half(model) + 0.003, kv_tokens=None, max_batch=4)
    with Session.open(model, asked) as session:
        engine = session.load()
        requests = [engine.submit(prompts(512)[0], GREEDY) for _ in range(4)]
        most = 0
        while engine.step():
            most = max(most, engine.counts().running)
        assert most == 4 and len({r.completion().figures.logits_hash for r in requests}) == 1


def test_memory_without_end_leaves_a_record_on_disk(path: Path) -> None:
    """Where all rows fit, no budget is divided; a stream has something to read."""
    model = open_model(path, "", None)
    s = divide(of(model), 1 << 40, others(model))
    left = [p.records - n for i, held in s.held.items() for n, p in zip(held, s.dense.layers[i], strict=True)]
    assert sorted(left) == [0] * (len(left) - 1) + [1]


def test_what_a_refusal_names_is_enough_and_less_is_not(path: Path) -> None:
    model = open_model(path, "", None)
    with pytest.raises(OutOfBudget) as refused:
        Session.open(model, options(0.001))
    said = str(refused.value)
    assert "\n" not in said and "is allowed; use --ram" in said
    enough = float(re.search(r"--ram ([\d.]+)", said)[1])  # type: ignore[index]
    with Session.open(model, options(enough)) as session:
        assert session.from_disk and session.memory_bytes <= enough * GIB
        assert len(generated(session).token_ids) == 5
    with pytest.raises(OutOfBudget, match="on disk"):
        Session.open(model, options(enough - 0.0002))


def test_every_thread_has_memory_to_arrange_rows_in(path: Path) -> None:
    """A plan counted those of sixteen threads, two in these tests, whatever a session had."""
    model = open_model(path, "", None)

    def buffers(threads: int) -> int:
        with Session.open(model, options(half(model, threads), threads=threads)) as session:
            return session.placement.bytes["cpu"]["disk buffers"]

    arranged = max(p.arranged_bytes for p in of(model).phases)
    assert buffers(1) == buffers(2)
    assert buffers(8) - buffers(2) >= 6 * arranged


def test_a_model_that_disk_saves_nothing_of_is_refused_as_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_split, "ARRANGING", 4096)
    with pytest.raises(OutOfBudget, match=r"^the model needs .* weights, .* keys and values"):
        Session.open(open_model(path, "", None), options(0.05))


def test_plan_says_before_what_run_does(path: Path, thermocline: Run) -> None:
    """The same split to the byte; and for a person, how much of the FFNs there is room for."""
    model, hardware = open_model(path, "", None), "rtx4090-i9-13900k"
    threads = read_tiers(hardware).cpu.threads
    ram = half(model, threads)
    asked = ("--ctx", "64", "--ram", f"{ram:.4f}", "--vram", "0", "-q", "--hardware", hardware)
    told = thermocline("plan", path, *asked, "--json")
    assert told.code == 0, told.err
    plan = json.loads(told.out)
    with Session.open(model, options(float(f"{ram:.4f}"), threads=threads)) as session:
        here = session.placement.json()
    assert plan["placement"] == json.loads(json.dumps(here))
    assert plan["bytes"]["ram"] == here["bytes"]["cpu"] and plan["bytes"]["disk"] == here["bytes"]["disk"]
    for layer, x in zip(plan["layers"], plan["placement"]["layers"], strict=True):
        assert (layer["ram"], layer["ram"] + layer["disk"]) == (x["ranges"][0]["held"][0], 4096)
    assert any("there is room for" in n and "a step, however many tokens" in n for n in plan["notes"])
    said = [
        n for n in plan["notes"] if re.search(r"of 8 chats in `serve`, \d chats? ha(s|ve) room for 64", n)
    ]
    assert len(said) == 1
    text = thermocline("plan", path, *asked).out
    assert re.search(r"neurons +\d+ ram, \d+ disk", text) or re.search(r"\d+ ram, \d+ disk", text)


def test_commands_know_them(path: Path, thermocline: Run) -> None:
    told = json.loads(thermocline("inspect", path, "--json").out)["streamed"]
    assert told == {"layers": 4, "bytes": ffn_bytes(open_model(path, "", None))}
    assert "FFNs  " in thermocline("inspect", path).out
    ram = half(open_model(path, "", None))
    tests = ["-p", "0", "-n", "8", "-r", "1", "-t", "2", "-o", "jsonl", "-q"]
    ran = thermocline("bench", "-m", path, "--ram", f"{ram:.4f}", *tests)
    measured = json.loads(ran.out.splitlines()[-1])
    assert 0 < measured["cache_hit_rate"] < 1 and measured["disk_bytes_per_token"] > 0
    if path.is_dir():
        assert thermocline("verify", path).code == 0, "what a session left beside it is whole"


@pytest.mark.oracle
def test_a_gpu_beside_too_little_memory_is_refused_in_a_line(path: Path) -> None:
    with pytest.raises(OutOfBudget, match="or --gpu off, which leaves rows of FFNs on disk") as refused:
        Session.open(open_model(path, "", None), options(0.055, gpu="stand-in", vram=0.001))
    assert "\n" not in str(refused.value)


def test_a_session_says_what_it_does(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = open_model(path, "", None)
    with Session.open(model, options(half(model))) as session:
        done = generated(session)
        found = session.decision.rows
        assert found is not None and session.store is not None
        assert session.placement.json()["layers"][0]["ranges"][0]["held"] == found.rows(0)
    assert f"there is room for {found.share:.0%} of its FFNs' rows, the others come from disk" in caplog.text
    disk = done.figures.disk
    assert disk is not None and disk.needed > disk.missed > 0 and disk.bytes > 0


def test_a_prompt_reads_as_much_as_a_token(path: Path) -> None:
    """A pass over what is missing is shared by all tokens of a step."""
    model = open_model(path, "", None)
    with Session.open(model, options(half(model))) as session:
        engine = session.load()
        request = engine.submit(prompts(512)[0], GREEDY)
        missed = []
        while engine.step():
            assert session.store is not None
            missed.append(session.store.counts().missed)
        assert request.error is None and len(set(np.diff([0, *missed]))) == 1


@pytest.mark.parametrize("disable", ["cache", "pipeline", "bundle"])
def test_a_stream_has_no_parts_to_do_without(path: Path, disable: str) -> None:
    model = open_model(path, "", None)
    with pytest.raises(UsageError, match=f"--disable {disable}: FFNs come from disk in one stream"):
        Session.open(model, options(half(model), disable=(disable,)))


def test_waits_are_of_what_the_window_does_not_cover(path: Path) -> None:
    """As fast as compute where the disk is fast; bound by missing bytes where it is slow."""
    model = open_model(path, "", None)
    subject, tiers = of_model(model, "off", Curve()), read_tiers("rtx4090-i9-13900k")
    assert tiers.disk is not None
    split = divide(of(model), 1 << 40, others(model))
    split = replace(split, held={i: (1, 1) for i in split.held})
    step_bytes = sum(map(split.streamed_bytes, split.held))
    for gbs, bound in ((1e6, False), (0.001, True)):
        slow = replace(tiers, disk=replace(tiers.disk, read_gbs=gbs))
        p = Problem(subject.spec, subject.sizes, subject.hotness, slow, Ask(context=64, sparsity="off"))
        layers = [(1.0, 2.0)] * model.spec.n_layers
        waits, compute = dense_plan.waits_us(p, split, layers, 5.0), 3.0 * len(layers) + 5.0
        assert waits + compute == pytest.approx(step_bytes / (gbs * 1e3) if bound else compute, rel=0.01)
    ask = Ask(context=64, sparsity="off", vram_bytes=0, ram_bytes=int(half(model, tiers.cpu.threads) * GIB))
    made = [plan(subject, replace(tiers, disk=replace(tiers.disk, read_gbs=g)), ask) for g in (0.1, 10.0)]
    assert made[0].tokens_per_s < made[1].tokens_per_s
    assert made[0].predicted[0].disk_us > made[1].predicted[0].disk_us >= 0
    batches = {x.batch: x.tokens_per_s for x in made[0].buckets}
    assert batches[4] > 3 * batches[1], "four sequences share the stream"


# ---- faults


def damaged(files: tuple[Path, Path], directory: Path) -> Path:
    path = directory / "m.gguf"
    path.write_bytes(files[1].read_bytes())
    return path


OPTIONS = EngineOptions(context=64, max_batch=1, threads=2)


def test_a_file_that_is_replaced_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = damaged(files, tmp_path)
    model = open_model(path, "", None)
    os.utime(path, ns=(1, 1))
    with (
        Session(model, OPTIONS, with_records(model, 0.5)) as session,
        pytest.raises((BadFile, IOFailure), match="chang"),
    ):
        session.load()


def test_a_file_that_is_cut_while_it_runs_fails_requests_and_no_more(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    path = damaged(files, tmp_path)
    model = open_model(path, "", None)
    with Session(model, OPTIONS, with_records(model, 0.2)) as session:
        engine = session.load()
        os.truncate(path, path.stat().st_size // 2)
        for _ in range(2):
            request = engine.submit(prompts(512)[0], GREEDY)
            while engine.step():
                pass
            assert isinstance(request.error, BadFile | IOFailure) and "m.gguf" in str(request.error)
            assert "changed" in str(request.error)
            engine.check_integrity()


def test_a_pack_is_verified_once_before_its_rows_are_read_one_by_one(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(files[0], tmp_path / "pack", ignore=shutil.ignore_patterns("verified*"))
    model = Pack.open(tmp_path / "pack")

    def opened(model: Pack) -> None:
        with Session(model, OPTIONS, with_records(model, 0.5)) as session:
            session.load()

    opened(model)
    kept = (model.path / "verified.safetensors").read_bytes()
    opened(model)
    assert (model.path / "verified.safetensors").read_bytes() == kept
    t = model.tensors["layers.3.down.weight"]
    with model.weights_path.open("r+b") as f:
        f.seek(t.offset + t.bytes - 1)
        f.write(b"\x7f")
    os.utime(model.weights_path, ns=(5, 5))
    with pytest.raises(BadFile, match=r"is damaged: layers.3.down.weight.*; pack the model again"):
        opened(Pack.open(model.path))


@pytest.mark.slow
def test_the_promise_is_kept_in_a_process_of_its_own(
    tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak memory is below what was said before, and not far."""
    monkeypatch.undo()
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 12}
    config, path = test_synth.config_file(tmp_path, "llama-2-7b", **sizes), tmp_path / "m.gguf"
    assert thermocline("synth", config, "--format", "q4_0", "--gguf", path, "-q").code == 0
    model = open_model(path, "", None)
    needs = others_of(model.spec, context=324, kv_tokens=324, max_batch=1, threads=2)
    ram = (least_bytes(of(model), needs) + 0.4 * ffn_bytes(model)) / GIB
    code = "import sys; from thermocline.cli.main import main; sys.exit(main(sys.argv[1:]))"
    tests = ["-p", "300", "-n", "24", "-r", "1", "-t", "2", "-o", "jsonl", "-q"]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, "bench", "-m", str(path), "--ram", f"{ram:.4f}", *tests],
        capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for row in (json.loads(line) for line in ran.stdout.splitlines()):
        assert 0.85 * row["memory_bytes"] < row["peak_rss_bytes"] <= row["memory_bytes"] <= ram * GIB, row
        assert row["disk_bytes_per_token"] is None or row["disk_bytes_per_token"] > 0
