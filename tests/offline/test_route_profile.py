"""A mixture's own routing: profiled, stored, played by the core's own cache, and what plans make of it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_routing
import test_synth
from build_docs import difference
from closed_sessions import watch_sessions

from thermocline import SamplingParams
from thermocline.cli.commands.routing.trace import POLICIES as SAID
from thermocline.engine.decoder import ffn_input
from thermocline.errors import BadFile
from thermocline.machine.tiers import read_tiers
from thermocline.offline.corpus import random_corpus
from thermocline.offline.routing.ceilings import POLICIES, ceilings, played
from thermocline.offline.routing.recorder import RouteRecorder
from thermocline.offline.routing.route_profiler import RouteJob, profile_routes, traced_passages
from thermocline.offline.routing.route_trace import read_route_trace
from thermocline.offline.routing.statistics import Choices
from thermocline.opening.open_model import open_model
from thermocline.ops.interface import opaque
from thermocline.pack.route_profile import RouteProfile, open_routes, path_of, write_routes
from thermocline.pack.stored_model import StoredModel
from thermocline.plan.disk import expert_hits, expert_plan
from thermocline.plan.disk.expert_hits import OwnRouting, missed, needs_of, own_routing
from thermocline.plan.disk.expert_split import Mixture, divide, least_bytes
from thermocline.plan.memory import GIB, others_of
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

Run = Callable[..., Any]
HARDWARE = "rtx4090-i9-13900k"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pack and a GGUF of one mixture, each with its profile."""
    from thermocline.cli import main

    base = tmp_path_factory.mktemp("routed")
    config = test_synth.config_file(base, "qwen3-30b-a3b", num_experts=32)
    synth = ["synth", str(config), "--format", "q8_0", "-o", str(base / "pack"), "-q"]
    assert main.main([*synth, "--gguf", str(base / "m.gguf")]) == 0
    for made in (base / "pack", base / "m.gguf"):
        assert main.main(["profile", str(made), "--tokens", "1024", "--ctx", "64", "-t", "2", "-q"]) == 0
    return base / "pack", base / "m.gguf"


@pytest.fixture(params=["pack", "gguf"])
def model(request: pytest.FixtureRequest, files: tuple[Path, Path]) -> StoredModel:
    return open_model(files[request.param == "gguf"], "", None)


def others(model: StoredModel, threads: int = 2) -> dict[str, int]:
    return others_of(model.spec, context=64, kv_tokens=64, max_batch=1, threads=threads)


def skewed(experts: int, active: int, tokens: int, skew: float, seed: int = 0) -> Any:
    """Return choices of which the lower numbers are likelier, unless `skew` is 0."""
    rng = np.random.default_rng(seed)
    p = (1.0 + np.arange(experts)) ** -skew
    return np.array([rng.choice(experts, active, False, p / p.sum()) for _ in range(tokens)])


# ---- the profile and its file


def test_a_profile_counts_what_routers_choose(model: StoredModel) -> None:
    """Its trace is the prompt's own choices, and its counts are of all tokens."""
    profile = open_routes(model)
    assert profile is not None and profile.tokens == profile.traced_tokens == 1024
    for i, counts in profile.counts.items():
        assert counts.sum() == 1024 * model.spec.n_experts_active
        assert np.array_equal(np.bincount(profile.traced[i].ravel(), minlength=32) > 0, counts > 0)
    assert set(profile.counts) == set(range(model.spec.n_layers))
    again = RouteProfile(profile.tokens, "x", profile.counts, profile.traced)
    assert path_of(model).name.endswith("routes.safetensors") and again.traced_tokens == 1024


def test_the_pack_s_and_the_gguf_s_profile_agree(files: tuple[Path, Path]) -> None:
    """The same weights, the same random tokens: the same choices."""
    a, b = (open_routes(open_model(path, "", None)) for path in files)
    assert a is not None and b is not None and a.corpus == b.corpus
    same = [np.mean(a.traced[i] == b.traced[i]) for i in a.traced]
    assert min(same) > 0.9, same  # rows in groups add up in another order


def test_a_damaged_or_foreign_profile_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = open_model(files[1], "", None)
    path = path_of(model)
    before = path.read_bytes()
    try:
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(BadFile, match=r"damaged; run `thermocline profile"):
            open_routes(model)
        good = _opened(model, path, before)
        counts = {i: np.full(32, 7, np.int64) for i in good.counts}
        write_routes(model, RouteProfile(1024, "", counts, good.traced))
        with pytest.raises(BadFile, match=r"layers\.0\.counts are not those of 1024 tokens"):
            open_routes(model)
        path.write_bytes(path_of(open_model(files[0], "", None)).read_bytes())
        with pytest.raises(BadFile, match="made for another pack"):
            open_routes(model)
    finally:
        path.write_bytes(before)


def _opened(model: StoredModel, path: Path, data: bytes) -> RouteProfile:
    path.write_bytes(data)
    found = open_routes(model)
    assert found is not None
    return found


def test_a_profile_with_experts_on_disk_is_that_of_memory(
    model: StoredModel, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts and trace, though experts were missing again and again, within `--ram`."""
    path = path_of(model)
    before, wanted = path.read_bytes(), open_routes(model)
    assert wanted is not None
    seen = watch_sessions(monkeypatch)
    budget = least_bytes(Mixture(model.spec, model.tensors), others(model)) + 2**20
    asked = ("--tokens", 1024, "--ctx", 64, "-t", 2, "-q")
    try:
        told = thermocline("profile", model.path, *asked, "--ram", budget / GIB)
        assert told.code == 0, told.err
        found = open_routes(model)
    finally:
        path.write_bytes(before)
    assert found is not None
    ((from_disk, memory, missed),) = seen
    assert from_disk and memory <= budget and missed > 2 * model.spec.n_experts * len(found.counts)
    for i in wanted.counts:
        assert np.array_equal(found.counts[i], wanted.counts[i])
        assert np.array_equal(found.traced[i], wanted.traced[i])


def test_an_interrupted_profile_goes_on(model: StoredModel, thermocline: Run) -> None:
    """From the counts that it left, unless the text is another one; and nothing of them stays."""
    path, wanted = path_of(model), open_routes(model)
    assert wanted is not None
    left, before = path.with_name(f"{path.name}.unfinished"), path.read_bytes()
    job = RouteJob(
        model, random_corpus(model, 1024, 64, 1), EngineOptions(context=64, max_batch=1, threads=2)
    )
    steps: list[int] = []

    def interrupt(what: str, done: int, total: int, unit: str) -> None:
        steps.append(done) if what == "counting" else None
        if steps and steps[-1] == 640:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            profile_routes(job, interrupt)
        assert left.exists() and path.read_bytes() == before
        kept = left.read_bytes()
        other = replace(job, corpus=random_corpus(model, 128, 64, 1, seed=2))
        assert profile_routes(other, lambda *_: None).resumed_tokens == 0 and not left.exists()
        left.write_bytes(kept)
        done = profile_routes(job, lambda *_: None)
        found = open_routes(model)
    finally:
        path.write_bytes(before)
    assert found is not None and done.resumed_tokens == 640 and not left.exists()
    assert 0 in steps and done.tokens_per_s is not None
    for i in wanted.counts:
        assert np.array_equal(found.counts[i], wanted.counts[i])
        assert np.array_equal(found.traced[i], wanted.traced[i])


def test_ctrl_c_says_that_the_same_command_goes_on(
    files: tuple[Path, Path], thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("thermocline.offline.activity.Passages.compute", interrupted)
    told = thermocline("profile", files[0], "--tokens", 128, "--ctx", 64)
    left = path_of(open_model(files[0], "", None)).with_name("routes.safetensors.unfinished")
    assert told.code == 130 and "the same command goes on from here" in told.err and left.exists()
    left.unlink()


def test_too_little_memory_for_a_profile_is_refused_in_one_line(model: StoredModel, thermocline: Run) -> None:
    told = thermocline("profile", model.path, "--tokens", 64, "--ram", 0.001, "-q")
    assert told.code != 0 and "use --ram" in told.err and told.err.count("\n") == 1


def test_what_profile_says_of_a_mixture(files: tuple[Path, Path], thermocline: Run) -> None:
    told = thermocline("profile", files[1], "--tokens", 128, "--ctx", 64, "-q", "--json")
    assert told.code == 0, told.err
    about = json.loads(told.out)
    assert difference("routes_profile", about) == []
    assert about["found"]["40%"] > about["found"]["10%"] > 0
    refused = thermocline("profile", files[1], "-o", files[1].parent / "x")
    assert refused.code == 2 and "-o: not of a mixture" in refused.err and refused.err.count("\n") == 1
    assert thermocline("profile", files[1], "--tokens", 1024, "--ctx", 64, "-t", 2, "-q").code == 0
    assert thermocline("verify", files[0]).code == 0


@pytest.mark.parametrize("output", ["pack", "another"])
def test_neurons_and_experts_of_a_relu_mixture_are_counted(
    output: str, tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neurons once, also where Ctrl-C comes while experts are counted; those of another text again."""
    small = {"moe_num_primary_experts": 16, "moe_ffn_hidden_size": 64, "num_hidden_layers": 2}
    config = test_synth.config_file(tmp_path, "smallthinker-4b", **small)
    pack, asked = tmp_path / "pack", ("--tokens", 256, "--ctx", 64, "--samples", 0, "-q")
    assert thermocline("synth", config, "--format", "q8_0", "-o", pack, "-q").code == 0
    asked = (*asked, *(() if output == "pack" else ("-o", tmp_path / output)))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("thermocline.offline.routing.route_profiler._chooser", interrupted)
        assert thermocline("profile", pack, *asked).code == 130
    if output == "another":
        refused = thermocline("profile", pack, *asked, "--tokens", 192)
        assert refused.code == 2 and "exists already" in refused.err
    told = thermocline("profile", pack, *asked, "--json")
    assert told.code == 0, told.err
    about, made = json.loads(told.out), tmp_path / output
    assert about["resumed_tokens"] == about["tokens"] == 256 and about["routing"]["resumed_tokens"] == 0
    assert difference("profile", about) == [] == difference("routes_profile", about["routing"])
    assert about["routing"]["experts"] == 16 and about["active_fraction"] > 0
    own = own_routing(open_model(made, "", None))
    assert own is not None and own.tokens == 256
    said = thermocline("profile", pack, *asked, "--force").out
    assert "256, " in said and " a second" in said.partition("256, ")[2][:20], "once it was whole, anew"
    assert "of neurons for a token" in said and "of 16 in each of 2 layers" in said


def test_a_trace_is_of_passages_of_all_files() -> None:
    passages = [np.zeros(512, np.int32)] * 128
    kept = traced_passages(passages)
    assert len(kept) == 16 and {i % 2 for i in kept} == {0, 1}
    assert traced_passages([np.zeros(20_000, np.int32)] * 2) != set()


# ---- the core's cache, played


def by_the_core(needs: Any, slots: int, likely: Any = None, policy: str = "experts") -> list[int]:
    return [int(n) for n in missed(needs, slots, likely, int(needs[0].sum()), policy)]


def test_the_engine_misses_what_the_replay_misses(files: tuple[Path, Path]) -> None:
    """Token by token from the first one on, in every layer, seeded by its profile, with uneven slots."""
    model = open_model(files[0], "", None)
    own = own_routing(model)
    m = Mixture(model.spec, model.tensors, own)
    assert own is not None
    ram = (least_bytes(m, others(model)) + 0.3 * m.bytes) / GIB
    options = EngineOptions(context=64, max_batch=1, threads=2, ram=ram, kv_tokens=64)
    with Session.open(model, options) as session:
        engine, split = session.load(), session.decision.experts
        assert split is not None and len(set(split.slots.values())) > 1
        recorder = RouteRecorder(2, model.spec, engine.model.weights.layers)
        engine.ops = opaque(recorder)
        recorder.begin()
        request = engine.submit([3], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        while engine.step():
            pass
        assert request.error is None
        chosen, store = recorder.choices("").chosen, session.store
        stats = [x.stats() for x in store.layers]  # type: ignore[union-attr]
    for i, (rows, found) in enumerate(zip(chosen, stats, strict=True)):
        needs = needs_of(rows, own.experts)
        expected = missed(needs, split.slots[i], own.likely[i], own.active)
        assert found["missed"] == expected.sum() > 0 and found["needed"] == needs.sum()


def test_what_is_likely_is_there_first() -> None:
    needs = np.zeros((1, 8), np.bool_)
    needs[0, [6, 7]] = True
    likely = np.arange(8, dtype=np.float32)
    assert by_the_core(needs, 2) == [2] and by_the_core(needs, 2, likely) == [0]
    assert by_the_core(needs, 8) == [0]
    with pytest.raises(ValueError, match="unknown cache policy"):
        by_the_core(needs, 2, policy="fifo")


def test_no_policy_beats_the_ceiling() -> None:
    found = Choices((skewed(24, 3, 200, 1.0), skewed(24, 3, 200, 0.3)), 24, "")
    rows = list(ceilings(found, POLICIES))
    for held in {r.held for r in rows}:
        hits = {r.policy: r.hit_rate for r in rows if r.held == held}
        assert set(hits) == set(POLICIES) == set(SAID) and hits["belady"] == max(hits.values())
    assert rows[-1].hit_rate > rows[0].hit_rate


@pytest.mark.parametrize("policy", ["lru", "lfu", "experts", "pinned"])
def test_a_batch_needs_what_its_tokens_need_together(policy: str) -> None:
    chosen = skewed(16, 2, 60, 0.5)
    needs = needs_of(chosen, 16, 3)
    assert needs.shape == (20, 16)
    assert set(np.flatnonzero(needs[4])) == {*chosen[4], *chosen[24], *chosen[44]}
    found = played(needs, 5, policy, 2, None)
    assert (found <= needs.sum(axis=1)).all() and found.sum() > 0


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "hits"), [("qwen", (0.555, 0.763, 0.914)), ("gemma", (0.551, 0.736, 0.901))]
)
def test_published_hits_are_those_of_the_core(file: str, hits: tuple[float, ...], shared_data: Path) -> None:
    """The core's cache finds what plans without a profile expect: the mean of the two."""
    found = read_route_trace(shared_data / "route-traces" / f"{file}.csv")
    rows = {r.held: r.hit_rate for r in ceilings(found, ["experts"])}
    assert [rows[held] for held in (0.1, 0.2, 0.4)] == pytest.approx(hits, abs=6e-4)


@pytest.mark.shared
@pytest.mark.parametrize(("by", "too_few"), [(2, 0.05), (4, 0.12)])
def test_hits_of_fewer_experts_are_those_of_grouped_ones(by: int, too_few: float, shared_data: Path) -> None:
    """Qwen3's experts, grouped at random: what plans without a profile expect of mixtures of 64 and of 32."""
    found, rng = read_route_trace(shared_data / "route-traces" / "qwen.csv"), np.random.default_rng(0)
    experts, layers = found.experts // by, found.chosen[::4]
    groups = [rng.permutation(found.experts) // by for _ in layers]
    needs = [needs_of(group[x], experts, 1) for group, x in zip(groups, layers, strict=True)]
    active = round(float(np.mean([n.sum(axis=1).mean() for n in needs])))
    spec: Any = SimpleNamespace(n_experts=experts, n_experts_active=active)
    for share in (0.1, 0.2, 0.3, 0.4, 0.6, 0.8):
        slots = max(1, round(share * experts))
        hits = np.mean([1 - missed(n, slots, None, active).sum() / n.sum() for n in needs])
        assert -too_few <= expert_hits.published(spec, slots) - hits <= 0.03, (share, hits)


def test_hits_without_a_profile_grow_with_slots_and_fall_with_what_a_token_takes() -> None:
    def hits(experts: int, active: int) -> list[float]:
        spec: Any = SimpleNamespace(n_experts=experts, n_experts_active=active)
        return [expert_hits.published(spec, n) for n in range(experts + 1)]

    fine, coarse, few = hits(128, 6), hits(64, 6), hits(8, 2)
    assert fine[26] == pytest.approx(0.75, abs=0.005) and fine[0] == 0 and fine[-1] == 1
    assert all(a <= b for found in (fine, coarse, few) for a, b in itertools.pairwise(found))
    assert all(c < f for c, f in zip(coarse[1:-1], fine[2:-2:2], strict=True))
    assert all(h >= n / 8 for n, h in enumerate(few))
    spec: Any = SimpleNamespace(n_experts=128, n_experts_active=6)
    assert expert_hits.published(spec, 16, 64) == fine[32]  # of the experts that are here


# ---- plans


def test_slots_go_where_they_save_most() -> None:
    """A layer of few hot experts gets fewer slots than one that uses all; both miss less than evenly."""
    chosen = {0: skewed(64, 4, 1500, 2.5), 1: skewed(64, 4, 1500, 0.0)}
    likely = {i: (np.bincount(c.ravel(), minlength=64) / 1500).astype(np.float32) for i, c in chosen.items()}
    own = OwnRouting(1500, 64, 4, likely, chosen)
    for i in chosen:
        curve = own.curve(i)
        assert curve[0] == 0 and curve[-1] == 1 and (np.diff(curve, 2) < 1e-9).all()
    flat, hot = own.curve(1), own.curve(0)
    assert hot[16] > flat[16] + 0.2


def test_a_profile_s_plan_is_what_runs_and_replays_its_trace(
    files: tuple[Path, Path], thermocline: Run
) -> None:
    """Slots by value, to the byte what a session has; misses those of the trace."""
    model = open_model(files[0], "", None)
    threads = read_tiers(HARDWARE).cpu.threads
    m = Mixture(model.spec, model.tensors, own_routing(model))
    ram = (least_bytes(m, others(model, threads)) + m.bytes // 2) / GIB
    asked = ("--ctx", "64", "--ram", f"{ram:.4f}", "--vram", "0", "-q", "--hardware", HARDWARE)
    plan = json.loads(thermocline("plan", files[0], *asked, "--json").out)
    options = EngineOptions(context=64, max_batch=1, threads=threads, ram=float(f"{ram:.4f}"), kv_tokens=64)
    with Session.open(model, options) as session:
        assert plan["placement"] == json.loads(json.dumps(session.placement.json()))
        split = session.decision.experts
    assert split is not None
    own, budget = split.mixture.routing, int(float(f"{ram:.4f}") * GIB)
    assert own is not None and split.bytes <= budget < split.bytes + 2 * max(
        r.stride for r in m.records.values()
    )
    even = divide(Mixture(model.spec, model.tensors), budget, others(model, threads))
    reads = [sum(own.missed(i, n).mean() for i, n in s.slots.items()) for s in (split, even)]
    assert reads[0] <= 1.01 * reads[1]
    note = next(n for n in plan["notes"] if "there is room for" in n)
    share = np.mean([1 - own.missed(i, n).mean() / own.active for i, n in split.slots.items()])
    assert f"{share:.0%} are expected in memory, by its profile of 1,024 tokens" in note
    assert re.search("[0-9a-f]{64}", str(plan))


def test_misses_of_a_step_are_the_trace_s(monkeypatch: pytest.MonkeyPatch, files: tuple[Path, Path]) -> None:
    """Two texts, each with its own experts: most steps miss none and some miss all, unlike a mean's."""
    model = open_model(files[0], "", None)
    own, n = own_routing(model), model.spec.n_experts_active
    assert own is not None
    m = Mixture(model.spec, model.tensors, own)
    split = divide(m, least_bytes(m, others(model)) + m.bytes // 2, others(model))
    drawn = np.array([0] * 90 + [n] * 10, np.int32)
    monkeypatch.setattr(expert_hits.OwnRouting, "missed", lambda *_: drawn)

    class Asked:
        spec = model.spec

    class Step:
        batch, routed = 1, n / model.spec.n_experts

    chances = expert_plan.miss_chances(Asked, split, 0, Step)  # type: ignore[arg-type]
    assert chances[0] == 0.9 and chances[n] == 0.1 and chances.sum() == 1


# ---- the command


def test_trace_plays_a_model_s_own_text_or_a_file(
    files: tuple[Path, Path], tmp_path: Path, thermocline: Run
) -> None:
    told = thermocline("trace", files[0], "-n", 64, "--json", "-q")
    assert told.code == 0, told.err
    about = json.loads(told.out)
    assert difference("trace", {**about, **about["caches"][0]}) == [] and about["tokens"] == 64
    assert "profile" in about["source"] and about["caches"][0]["disk_bytes_per_token"] > 0
    text = thermocline("trace", files[1], "-n", 64, "--policy", "experts,belady", "-q").out
    assert "| held |  GiB | experts | belady |" in text
    path = tmp_path / "t.csv"
    rows = "".join(f"0,1,{t},0,0,{t % 3},1\n" for t in range(30))
    path.write_text(test_routing.HEAD + test_routing.COLUMNS + rows)
    found = json.loads(thermocline("trace", "--routes", path, "--json").out)
    assert (found["new_share"], found["bytes_per_token"]) == (1.0, None)
    for bad, said in (
        (("--routes", path, "--text", path), "tokens of its own"),
        (("--routes", path, files[0]), "one of them"),
        (("--routes", path, "--batch", 20), "two steps'"),
        ((), "one of them"),
    ):
        ran = thermocline("trace", *bad)
        assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1, ran.err


def test_a_layer_s_input_is_normed_once(files: tuple[Path, Path]) -> None:
    from dataclasses import replace

    model = open_model(files[0], "", None)
    with Session.open(model, EngineOptions(context=64, max_batch=1, threads=1)) as session:
        layer, ops = session.loaded.weights.layers[0], session.loaded.ops
        h = np.ones((2, model.spec.dim), np.float32)
        assert not np.array_equal(ffn_input(model.spec, layer, 3 * h, ops), 3 * h)
        assert np.array_equal(ffn_input(replace(model.spec, norm_order="post"), layer, 3 * h, ops), 3 * h)
