"""A mixture larger than its memory: the answers of memory, from a GGUF or a pack, within the budget."""

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

import gguf_recurrent
import gguf_twins
import kept_twins
import numpy as np
import pytest
import test_synth
import twins
from answers import GREEDY, answers_of, chats_kept, prompts

from thermocline import _native
from thermocline.convert import importer, synthetic
from thermocline.engine.live_activity import ActivityMeter
from thermocline.errors import BadFile, IOFailure, OutOfBudget, UsageError
from thermocline.machine.tiers import read_tiers
from thermocline.model import families
from thermocline.model.tensors import TensorInfo
from thermocline.offline.training import fit_svd, fits
from thermocline.opening.open_model import open_model
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, predictors_for, write_predictors
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.budget import Decision
from thermocline.plan.disk import expert_split
from thermocline.plan.disk.expert_split import ExpertSplit, Mixture, divide, least_bytes, placed
from thermocline.plan.memory import GIB, others_of
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

Run = Callable[..., Any]
# Mixtures with biases and sinks, shared experts, layers without experts, latents, states, other norms.
PACKED = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe_stacked", "nemotron_h_moe"]


def is_mixture(name: str) -> bool:
    config, asked = kept_twins.RECORDED[name]["files"]["config.json"], twins.ASKED.get(name)
    return families.parse_config(config, None, name, asked)[0].n_experts > 1


OTHERS = [name for name in kept_twins.TWINS if name not in PACKED and is_mixture(name)]
IN_PLACE = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "llama4": "llama4", "gemma4_moe": "gemma4"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab of a small model is then several reads, and its buffers are smaller than its experts."""
    monkeypatch.setattr(expert_split, "PIECE_BYTES", 20 << 10)
    monkeypatch.setattr(expert_split, "DEPTH", 8)


def answers(model: StoredModel, decision: Decision | None, **asked: Any) -> list[Any]:
    """One by one, with what is known of their beginnings; then all together."""
    options = EngineOptions(context=64, max_batch=4, threads=2, **asked)
    opened = Session.open(model, options) if decision is None else Session(model, options, decision)
    with opened as session:
        engine = session.load()
        found = answers_of(engine, model.spec.vocab_size)
        assert engine.counts().cached_tokens > 0, "a beginning that is known"
        if decision is not None:
            assert session.store is not None and session.store.counts().missed > 0
    return found


def with_slots(model: StoredModel, slots: int, context: int = 64) -> Decision:
    """As if a budget had room for so many experts of each layer."""
    m = Mixture(model.spec, model.tensors)
    split = ExpertSplit({}, dict.fromkeys(m.records, slots), m)
    return Decision(placed(split, context, 4 * context), mixture=m)


def gives_the_bits_of_memory(model: StoredModel) -> None:
    wanted, spec = answers(model, None), model.spec
    assert all(np.isfinite(len(tokens)) for tokens, _ in wanted) and wanted[:4] == wanted[4:]
    for slots in {1, spec.n_experts_active + 1, spec.n_experts - 1}:
        assert answers(model, with_slots(model, slots)) == wanted, slots


@pytest.mark.parametrize("name", [*PACKED, *(pytest.param(n, marks=pytest.mark.slow) for n in OTHERS)])
def test_no_number_of_slots_changes_a_bit(name: str, tmp_path: Path) -> None:
    gives_the_bits_of_memory(packed(name, tmp_path))


def test_a_watch_sees_each_layers_hits_and_misses(tmp_path: Path) -> None:
    """Added up they are the disk's own counts of the steps that made tokens."""
    model = packed("qwen3_moe", tmp_path)
    options = EngineOptions(context=64, max_batch=4, threads=2)
    with Session(model, options, with_slots(model, model.spec.n_experts_active + 1)) as session:
        engine = session.load()
        engine.watch = ActivityMeter()
        engine.submit([1, 2, 3], replace(GREEDY, max_tokens=12))
        while engine.step():
            pass
        found = engine.watch.take()
    assert found is not None and found.layers is not None and found.disk is not None
    experts = [layer.experts for layer in found.layers if layer.experts is not None]
    assert len(found.layers) == model.spec.n_layers == len(experts) + 1, "one layer has no experts"
    assert sum(e.needed for e in experts) == found.disk.needed > 0
    assert sum(e.missed for e in experts) == found.disk.missed > 0
    assert all(e.needed == sum(n for _, n in e.used) for e in experts), "one token a step"


def packed(name: str, directory: Path) -> Pack:
    hf, pack = kept_twins.TWINS[name](directory / "hf"), directory / "pack"
    importer.pack(hf, pack, "q8_0", activation=twins.ASKED.get(name))
    return Pack.open(pack)


@pytest.mark.parametrize("sparsity", ["off", "exact"])
def test_experts_of_bundles_give_the_bits_of_memory_skipped_or_not(sparsity: str, tmp_path: Path) -> None:
    """Of a ReLU mixture with a shared expert and states, whose experts are records of neurons."""
    model = packed("nemotron_h_moe", tmp_path)
    wanted = answers(model, None, sparsity=sparsity)
    assert answers(model, with_slots(model, 2), sparsity=sparsity) == wanted
    other = "off" if sparsity == "exact" else "exact"
    assert answers(model, None, sparsity=other) == wanted


@pytest.mark.parametrize("name", [*IN_PLACE, "apart", "qwen3_5_moe", "deepseek2"])
def test_nor_in_a_gguf_that_runs_in_place(name: str, tmp_path: Path) -> None:
    """Experts in stacks, in tensors of their own, or with gate and up as one."""
    path = tmp_path / "m.gguf"
    if name == "qwen3_5_moe":
        gguf_recurrent.write(kept_twins.TWINS[name](tmp_path / name), path)
    elif name == "deepseek2":
        gguf_twins.write(kept_twins.TWINS["deepseek_v3"](tmp_path / "hf"), path, arch="deepseek2")
    elif name == "apart":
        gguf_twins.write(kept_twins.TWINS["mixtral"](tmp_path / "hf"), path, apart=True)
    else:
        hf = kept_twins.TWINS[name](tmp_path / "hf")
        gguf_twins.write(hf, path, arch=IN_PLACE[name], types=lambda n: "F16" if "exps" in n else None)
    model = open_model(path, tmp_path, None)
    assert not isinstance(model, Pack)
    gives_the_bits_of_memory(model)


@pytest.mark.parametrize(
    ("shape", "format"),
    [
        ("qwen3-30b-a3b", "q4_0"),
        pytest.param("qwen3-30b-a3b", "q4_k_m", marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", "mxfp4", marks=pytest.mark.slow),
    ],
)
def test_nor_in_the_formats_that_people_have(
    shape: str, format: str, tmp_path: Path, thermocline: Run
) -> None:
    """Of a pack and of a GGUF: in rows, and in groups of rows where the CPU is faster so."""
    config, pack, path = small_config(tmp_path, shape), tmp_path / "pack", tmp_path / "m.gguf"
    made = thermocline("synth", config, "--format", format, "-o", pack, "--gguf", path, "-q")
    assert made.code == 0, made.err
    found = [open_model(x, tmp_path, None) for x in (pack, path)]
    assert not isinstance(found[1], Pack)
    for model in found:
        gives_the_bits_of_memory(model)


def small_config(directory: Path, shape: str) -> Path:
    if shape != "gpt-oss-20b":
        return test_synth.config_file(directory, shape)
    path, sizes = directory / "config.json", test_synth.SMALL["llama-2-7b"]
    more = {"num_local_experts": 8, "num_experts_per_tok": 2, "experts_per_token": 2, "head_dim": 64}
    more |= {"intermediate_size": 256, "eos_token_id": 2, "pad_token_id": 0}
    path.write_text(json.dumps(synthetic.shapes()[shape] | sizes | more))
    return path


# ---- budgets


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pack and a GGUF of one mixture, in Q4_K_M."""
    from thermocline.cli import main

    base = tmp_path_factory.mktemp("files")
    config = test_synth.config_file(base, "qwen3-30b-a3b", num_experts=32)
    synth = ["synth", str(config), "--format", "q4_k_m", "-o", str(base / "pack"), "-q"]
    assert main.main([*synth, "--gguf", str(base / "m.gguf")]) == 0
    return base / "pack", base / "m.gguf"


@pytest.fixture(params=["pack", "gguf"])
def path(request: pytest.FixtureRequest, files: tuple[Path, Path]) -> Path:
    return files[request.param == "gguf"]


def others(model: StoredModel, threads: int = 2) -> dict[str, int]:
    return others_of(model.spec, context=64, kv_tokens=64, max_batch=1, threads=threads)


def least(model: StoredModel, threads: int = 2) -> int:
    return least_bytes(Mixture(model.spec, model.tensors), others(model, threads))


def options(ram: float, **asked: Any) -> EngineOptions:
    return EngineOptions(**{"context": 64, "max_batch": 1, "threads": 2, "ram": ram, "kv_tokens": 64} | asked)


def generated(session: Session) -> Any:
    engine = session.load()
    request = engine.submit(prompts(512)[0], GREEDY)
    while engine.step():
        pass
    return request.completion()


def test_what_a_kernel_reads_behind_an_expert_is_not_in_the_next_slot() -> None:
    """The next slot may be filled meanwhile: a race, though what is read there counts for nothing."""
    behind = _native.limits().arena_padding
    for rows, stride in ((64, 144), (64, 36), (3, 18), (1, 64)):
        part = TensorInfo("q4_0", (4, rows, 32), 0, 4 * rows * stride, stride)
        record = expert_split.Record.of({f"layers.0.{name}.weight": part for name in ("gate", "down")}, 0)
        end = record.slabs[-1].at + record.slabs[-1].bytes
        assert end + behind <= record.stride < end + 2 * behind and record.stride % 64 == 0


def test_a_budget_is_kept_to_the_byte_and_used(path: Path) -> None:
    model = open_model(path, "", None)
    m, low = Mixture(model.spec, model.tensors), least(model)
    whole = low + m.bytes
    dearest = max(r.stride for r in m.records.values())
    before = 0
    for budget in np.linspace(low, whole, 9).astype(int):
        s = divide(m, int(budget), others(model))
        assert s.bytes <= budget and sum(s.slots.values()) >= before
        assert max(s.slots.values()) - min(s.slots.values()) <= 1 and set(s.slots) == {0, 1, 2, 3}
        if min(s.slots.values()) < model.spec.n_experts:
            assert budget - s.bytes < 2 * dearest, "the rest holds no expert"
        before = sum(s.slots.values())
    assert (
        divide(m, low, others(model)).slots == dict.fromkeys(range(4), expert_split.LEAST)
        and before == 32 * 4
    )
    with pytest.raises(OutOfBudget, match="with its experts on disk the model still needs"):
        divide(m, low - 1, others(model))


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
    """A plan counted those of sixteen threads, whatever a session had."""
    model = open_model(path, "", None)

    def buffers(threads: int) -> int:
        ram = (least(model, threads) + Mixture(model.spec, model.tensors).bytes // 2) / GIB
        with Session.open(model, options(ram, threads=threads)) as session:
            return session.placement.bytes["cpu"]["disk buffers"]

    row = max(s.stride for r in Mixture(model.spec, model.tensors).records.values() for s in r.slabs)
    assert buffers(2) == buffers(16)
    assert buffers(64) - buffers(16) == 48 * 32 * row


def test_a_model_that_disk_saves_nothing_of_is_refused_as_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_split, "DEPTH", 4096)
    with pytest.raises(OutOfBudget, match=r"^the model needs .* weights, .* keys and values"):
        Session.open(open_model(path, "", None), options(0.05))


def test_plan_says_before_what_run_does(path: Path, thermocline: Run) -> None:
    """The same split to the byte; and for a person, how many experts of each layer there is room for."""
    model, hardware = open_model(path, "", None), "rtx4090-i9-13900k"
    threads = read_tiers(hardware).cpu.threads
    ram = (least(model, threads) + Mixture(model.spec, model.tensors).bytes // 2) / GIB
    asked = ("--ctx", "64", "--ram", f"{ram:.4f}", "--vram", "0", "-q", "--hardware", hardware)
    told = thermocline("plan", path, *asked, "--json")
    assert told.code == 0, told.err
    plan = json.loads(told.out)
    with Session.open(model, options(float(f"{ram:.4f}"), threads=threads)) as session:
        here = session.placement.json()
    assert plan["placement"] == json.loads(json.dumps(here))
    assert plan["bytes"]["ram"] == here["bytes"]["cpu"] and plan["bytes"]["disk"] == here["bytes"]["disk"]
    for layer, x in zip(plan["layers"], plan["placement"]["layers"], strict=True):
        held = x["ranges"][0]["experts"] * layer["expert"]
        assert (layer["ram"], layer["ram"] + layer["disk"]) == (held, 32 * layer["expert"])
    text = thermocline("plan", path, *asked).out
    assert re.search(r"experts \d+ ram, \d+ disk", text)
    assert re.search(r"experts +[\d.]+ MiB +[\d.]+ MiB\n", text)
    noted = json.loads(thermocline("plan", path, *asked, "--json").out)["notes"]
    assert any("there is room for" in n for n in noted)
    assert any(re.search(r"of 8 chats in `serve`, \d chats? ha(s|ve) room for 64 tokens", n) for n in noted)


def test_commands_know_them(path: Path, thermocline: Run) -> None:
    told = json.loads(thermocline("inspect", path, "--json").out)["experts"]
    assert (told["layers"], told["each"]) == (4, 32)
    assert 0 < 32 * 3 * told["expert_bytes"] < told["bytes"] <= 32 * 4 * told["expert_bytes"]
    assert "experts  " in thermocline("inspect", path).out
    model = open_model(path, "", None)
    ram = (least(model) + Mixture(model.spec, model.tensors).bytes // 2) / GIB
    tests = ["-p", "0", "-n", "8", "-r", "1", "-t", "2", "-o", "jsonl", "-q"]
    measured = json.loads(
        thermocline("bench", "-m", path, "--ram", f"{ram:.4f}", *tests).out.splitlines()[-1]
    )
    assert 0 < measured["cache_hit_rate"] < 1 and measured["disk_bytes_per_token"] > 0
    if path.is_dir():
        assert thermocline("verify", path).code == 0, "what a session left beside it is whole"


@pytest.mark.oracle
def test_a_gpu_beside_too_little_memory_is_refused_in_a_line(path: Path) -> None:
    with pytest.raises(OutOfBudget, match=r"--ram \d") as refused:
        Session.open(open_model(path, "", None), options(0.075, gpu="stand-in", vram=0.001))
    assert "\n" not in str(refused.value)


def test_a_session_says_what_it_does(path: Path, thermocline: Run, caplog: pytest.LogCaptureFixture) -> None:
    model = open_model(path, "", None)
    ram = (least(model) + Mixture(model.spec, model.tensors).bytes // 2) / GIB
    with Session.open(model, options(ram)) as session:
        done = generated(session)
        found = session.decision.experts
        assert found is not None and session.store is not None
        assert session.placement.json()["layers"][0]["ranges"][0]["experts"] == found.slots[0]
    assert f"there is room for {found.share:.0%} of its experts, the others come from disk" in caplog.text
    disk = done.figures.disk
    assert disk is not None and disk.needed > disk.missed > 0 and disk.bytes > 0


@pytest.mark.parametrize("disable", [("cache",), ("pipeline",)])
def test_switched_off_parts_change_nothing_but_time(path: Path, disable: tuple[str, ...]) -> None:
    model = open_model(path, "", None)
    ram = (least(model) + Mixture(model.spec, model.tensors).bytes // 2) / GIB
    done = []
    for off in ((), disable):
        with Session.open(model, options(ram, disable=off)) as session:
            done.append(generated(session))
    assert done[0].figures.logits_hash == done[1].figures.logits_hash
    if disable == ("cache",):
        assert done[1].figures.disk.missed > done[0].figures.disk.missed


def test_bundles_cannot_be_switched_off_where_there_are_none(path: Path) -> None:
    model = open_model(path, "", None)
    ram = (least(model) + Mixture(model.spec, model.tensors).bytes // 2) / GIB
    with pytest.raises(UsageError, match="--disable bundle: experts on disk have none"):
        Session.open(model, options(ram, disable=("bundle",)))


# ---- chats


def test_an_eighth_of_the_budget_holds_the_keys_and_values_of_chats(path: Path) -> None:
    """One at least, and never so many that what is not asked for makes a budget too small."""
    model, found = open_model(path, "", None), []
    m = Mixture(model.spec, model.tensors)
    for context in (64, 1024):
        one = others_of(model.spec, context=context, kv_tokens=context, max_batch=8, threads=2)
        low = least_bytes(m, one) / GIB + 1e-5
        for ram in (low, low + 0.003):
            asked = options(ram, context=context, kv_tokens=None, max_batch=8)
            found.append(chats_kept(model, asked))
    assert found[0] < found[1] == 8 and found[2] <= found[3] < 8, found


def test_eight_chats_where_one_fits_wait_and_give_their_bits(path: Path) -> None:
    model = open_model(path, "", None)
    with Session.open(model, options(least(model) / GIB + 0.01, max_batch=8)) as session:
        engine = session.load()
        alone = [generated(session).figures.logits_hash]
        requests = [engine.submit(prompts(512)[0], GREEDY) for _ in range(8)]
        most = 0
        while engine.step():
            most = max(most, engine.counts().running)
        assert most == 1, "64 positions hold one of them"
        assert {r.completion().figures.logits_hash for r in requests} == set(alone)


# ---- ReLU mixtures


@pytest.fixture(scope="module")
def relu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a mixture with bundles, shared experts and recurrent layers."""
    from thermocline.cli import main

    base = tmp_path_factory.mktemp("relu")
    sizes = {
        "hidden_size": 256, "vocab_size": 512, "head_dim": 64, "num_attention_heads": 4,
        "num_hidden_layers": 6, "hybrid_override_pattern": "MEME*E", "n_routed_experts": 32,
        "num_experts_per_tok": 4, "intermediate_size": 512, "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512, "mamba_num_heads": 8, "n_groups": 2, "ssm_state_size": 32,
    }  # fmt: skip
    config = base / "config.json"
    config.write_text(json.dumps(synthetic.shapes()["nemotron-3-nano-30b"] | sizes))
    assert main.main(["synth", str(config), "--format", "q8_0", "-o", str(base / "pack"), "-q"]) == 0
    return base / "pack"


def test_a_relu_mixture_runs_in_the_least_that_it_names(relu: Path) -> None:
    test_what_a_refusal_names_is_enough_and_less_is_not(relu)


def test_plan_counts_the_states_of_recurrent_layers(relu: Path, thermocline: Run) -> None:
    """The same split to the byte as a session's."""
    model, hardware = Pack.open(relu), "rtx4090-i9-13900k"
    threads = read_tiers(hardware).cpu.threads
    ram = f"{(least(model, threads) + Mixture(model.spec, model.tensors).bytes // 2) / GIB:.4f}"
    asked = ("--ctx", "64", "--ram", ram, "--vram", "0", "-q", "--hardware", hardware, "--json")
    told = thermocline("plan", relu, *asked)
    assert told.code == 0, told.err
    with Session.open(model, options(float(ram), threads=threads)) as session:
        here = session.placement.json()
        wanted = generated(session)
    assert json.loads(told.out)["placement"] == json.loads(json.dumps(here))
    assert here["bytes"]["cpu"]["recurrent states"] > 0
    with Session.open(model, options(0.5)) as session:
        assert not session.from_disk and generated(session).figures.logits_hash == wanted.figures.logits_hash


def test_predictors_name_the_same_neurons_of_experts_on_disk(tmp_path: Path) -> None:
    made = packed("smallthinker", tmp_path)
    n = made.spec.n_experts * made.spec.ffn_dim
    threshold = np.full(n, 4, np.float32)
    guess = [
        LayerPredictor(
            "sign", None, None, fit_svd.signs(fits.gate_rows(made, i)), threshold, 0, made.spec.n_experts
        )
        for i in range(made.spec.n_layers)
    ]
    write_predictors(made, guess, {})
    model, hashes = Pack.open(made.path), []
    for sparsity, decision in (("exact", None), ("predict", None), ("predict", with_slots(made, 3))):
        asked = EngineOptions(context=64, max_batch=1, threads=2, sparsity=sparsity)
        opened = (
            Session.open(model, asked)
            if decision is None
            else Session(model, asked, decision, predictors=predictors_for(model, sparsity))
        )
        with opened as session:
            engine = session.load()
            request = engine.submit(prompts(model.spec.vocab_size)[2], GREEDY)
            while engine.step():
                pass
            hashes.append(request.completion().figures.logits_hash)
    assert hashes[0] != hashes[1] == hashes[2]


def test_a_pack_of_bundles_that_is_cut_while_it_runs_fails_requests_and_no_more(
    relu: Path, tmp_path: Path
) -> None:
    shutil.copytree(relu, tmp_path / "pack")
    model = Pack.open(tmp_path / "pack")
    with Session(model, EngineOptions(context=64, max_batch=1, threads=2), with_slots(model, 4)) as session:
        engine = session.load()
        os.truncate(model.weights_path, model.weights_bytes // 4)
        request = engine.submit(prompts(512)[0], GREEDY)
        while engine.step():
            pass
        assert isinstance(request.error, BadFile | IOFailure) and "changed" in str(request.error)
        engine.check_integrity()


# ---- faults


def damaged(files: tuple[Path, Path], directory: Path) -> Path:
    path = directory / "m.gguf"
    path.write_bytes(files[1].read_bytes())
    return path


def test_a_file_that_is_replaced_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = damaged(files, tmp_path)
    model = open_model(path, "", None)
    os.utime(path, ns=(1, 1))
    with (
        Session(model, EngineOptions(context=64, max_batch=1, threads=2), with_slots(model, 4)) as session,
        pytest.raises((BadFile, IOFailure), match="chang"),
    ):
        session.load()


def test_a_file_that_is_cut_while_it_runs_fails_requests_and_no_more(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    path = damaged(files, tmp_path)
    model = open_model(path, "", None)
    with Session(model, EngineOptions(context=64, max_batch=1, threads=2), with_slots(model, 4)) as session:
        engine = session.load()
        os.truncate(path, path.stat().st_size // 2)
        request = engine.submit(prompts(512)[0], GREEDY)
        while engine.step():
            pass
        assert isinstance(request.error, BadFile | IOFailure) and "m.gguf" in str(request.error)
        assert "changed" in str(request.error)
        engine.check_integrity()


def test_an_embedding_that_stays_in_a_gguf_is_checked(files: tuple[Path, Path], tmp_path: Path) -> None:
    path = damaged(files, tmp_path)
    model = open_model(path, "", None)
    with Session(model, EngineOptions(context=64, max_batch=1, threads=2), with_slots(model, 4)) as session:
        engine = session.load()
        os.utime(path, ns=(1, 1))
        request = engine.submit([1, 2, 3], GREEDY)
        while engine.step():
            pass
        assert isinstance(request.error, BadFile)
        assert "was changed or replaced since it was opened" in str(request.error)


def test_a_pack_is_verified_once_before_its_experts_are_read_one_by_one(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(files[0], tmp_path / "pack", ignore=shutil.ignore_patterns("verified*"))
    model = Pack.open(tmp_path / "pack")

    def opened(model: Pack) -> None:
        o = EngineOptions(context=64, max_batch=1, threads=2)
        with Session(model, o, with_slots(model, 4)) as session:
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
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 64}
    config, path = test_synth.config_file(tmp_path, "qwen3-30b-a3b", **sizes), tmp_path / "m.gguf"
    assert thermocline("synth", config, "--format", "q4_0", "--gguf", path, "-q").code == 0
    model = open_model(path, "", None)
    m = Mixture(model.spec, model.tensors)
    ram = (least_bytes(m, others_of(model.spec, context=324, kv_tokens=324, max_batch=1, threads=2))) / GIB
    ram += 0.4 * m.bytes / GIB
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
