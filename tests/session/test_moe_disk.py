"""A mixture of experts larger than its memory: the answers of memory, and every expert with its own share."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_disk
import test_plan
import test_synth
import tiny
from safetensors.numpy import save_file
from test_disk import DIM, Case, within
from test_disk_tier import small_buffers  # noqa: F401

from thermocline import LLM, SamplingParams, _native
from thermocline.cli import main
from thermocline.convert.synthetic import read_shape
from thermocline.errors import BadFile, OutOfBudget
from thermocline.machine import hardware
from thermocline.model.modes import SPARSITIES
from thermocline.model.sizes import sizes_of
from thermocline.model.spec import PLAIN_ROUTER, ModelSpec
from thermocline.model.tensors import expected_tensors, place
from thermocline.offline import bench
from thermocline.offline.bench import Bench
from thermocline.offline.bench import Test as BenchTest
from thermocline.offline.need_trace import Trace, TraceRecorder
from thermocline.offline.replay import needs_of, replay
from thermocline.offline.training import fit_svd, fits
from thermocline.ops.cpu import CpuOps, native_rule
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import LayerPredictor, write_predictors
from thermocline.plan import hotness
from thermocline.plan.cost import IN_FLIGHT, LayerWork, Reads, Speeds, Work, step_us, stored_times
from thermocline.plan.disk import expert_split
from thermocline.plan.disk.cache_split import Fetch, Share
from thermocline.plan.disk.disk_split import Arrangement, Contents
from thermocline.plan.disk.neuron_plan import stored_prediction
from thermocline.plan.memory import GIB, others_of, reads_from_disk
from thermocline.plan.problem import Ask, Problem
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session
from thermocline.session.store import Store

Run = Callable[..., Any]
EXPERTS, FFN = 4, 4096
PROMPTS = ["The thermocline is a thin layer of water, " * 3, "Cold", "Warm", "What lies"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tensors() -> dict[str, Any]:
    """The tiny model with four wide experts in every layer, two for each token, and dReLU."""
    rng = np.random.default_rng(5)
    made = {name: w for name, w in tiny.tensors().items() if ".mlp." not in name}
    for i in range(tiny.LAYERS):
        moe = f"model.layers.{i}.block_sparse_moe"
        shapes = {"gate": (EXPERTS, 64)}
        for e in range(EXPERTS):
            shapes |= {f"experts.{e}.w{n}": (64, FFN) if n == 2 else (FFN, 64) for n in (1, 2, 3)}
        for name, shape in shapes.items():
            made[f"{moe}.{name}.weight"] = (rng.standard_normal(shape) / 8).astype(np.float32)
    return made


def predicting(pack: Pack) -> None:
    """Signs of every layer's gates; nearly half of the neurons are named."""
    n = EXPERTS * FFN
    layers = [
        LayerPredictor(
            "sign",
            None,
            None,
            fit_svd.signs(fits.gate_rows(pack, i)),
            np.full(n, 4, np.float32),
            64,
            EXPERTS,
        )
        for i in range(pack.spec.n_layers)
    ]
    write_predictors(pack, layers, {})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In order of hotness, with predictors."""
    base = tmp_path_factory.mktemp("mixture")
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": FFN}
    hf = tiny.hf_directory(
        base / "hf",
        architectures=["TurboSparseMixtralForCausalLM"],
        model_type="turbosparsemixtral",
        **experts,
    )
    save_file(tensors(), hf / "model.safetensors")
    text, out = base / "text.txt", base / "pack"
    text.write_text(" ".join(PROMPTS) * 10)
    assert main.main(["pack", str(hf), "-o", str(out), "--format", "f32", "-q"]) == 0
    profile = ["profile", str(out), "--corpus", str(text), "--tokens", "512", "--samples", "0", "-q"]
    assert main.main(profile) == 0
    predicting(Pack.open(out))
    return out


def opened(pack: Path, ram: float | None = None, **asked: Any) -> LLM:
    return LLM(pack, threads=2, context=256, max_batch=4, ram=ram, **asked)


def least(pack: Path, **asked: Any) -> float:
    """GiB, as the refusal says."""
    with pytest.raises(OutOfBudget, match="on disk the model still needs") as refused:
        opened(pack, 0.001, **asked)
    return float(re.search(r"--ram ([\d.]+)", str(refused.value))[1])  # type: ignore[index]


def budgets(pack: Path, **asked: Any) -> list[float]:
    """From what holds a few neurons of each expert to what lacks a few."""
    with opened(pack, lazy=True, **asked) as llm:
        others = others_of(llm.spec, context=256, kv_tokens=256, max_batch=4, threads=2)
        most = (llm.session.weights_bytes + sum(others.values())) / GIB
    low = least(pack, **asked)
    return [low + (most - low) * part for part in (0.0, 0.3, 0.98)]


@pytest.mark.parametrize("sparsity", SPARSITIES)
@pytest.mark.parametrize("tried", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_no_budget_changes_a_bit(mixture: Path, sparsity: str, tried: int) -> None:
    """Of a prompt, and of one to four tokens decoded together, each of which goes where it likes."""
    batches = [PROMPTS[:n] for n in range(1, 5)]

    def answers(llm: LLM) -> list[Any]:
        every = [a for batch in batches for a in llm.generate(batch, GREEDY)]
        return [(a.token_ids, a.figures.logits_hash) for a in every]

    with opened(mixture, sparsity=sparsity) as llm:
        wanted = answers(llm)
    gates_left = []
    for ram in budgets(mixture, sparsity=sparsity)[:tried]:
        with opened(mixture, ram, sparsity=sparsity) as llm:
            assert llm.session.arrangement is not None and llm.session.arrangement.bytes <= ram * GIB
            gates_left.append(llm.session.arrangement.gates is not None)
            assert answers(llm) == wanted, ram
    assert gates_left[0] == (sparsity == "predict")


def test_a_step_that_ends_during_attention_spoils_nothing(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C: reads were begun for that layer, and the next step begins with the first."""
    with opened(mixture, sparsity="predict") as llm:
        wanted = llm.generate("Cold", GREEDY).figures.logits_hash
    ends, real = 0, CpuOps.attention_add

    def attention_add(*args: Any) -> None:
        nonlocal ends
        real(*args)
        ends -= 1
        if ends == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(CpuOps, "attention_add", attention_add)
    with opened(mixture, budgets(mixture, sparsity="predict")[1], sparsity="predict") as llm, within(20):
        for calls in range(tiny.LAYERS + 1, 3 * tiny.LAYERS + 1):  # in the steps after the prompt's
            ends = calls
            with pytest.raises(KeyboardInterrupt):
                llm.generate("Cold", GREEDY)
            assert llm.generate("Cold", GREEDY).figures.logits_hash == wanted


@pytest.mark.slow
def test_switched_off_parts_change_nothing_but_time(mixture: Path) -> None:
    with opened(mixture, sparsity="predict") as llm:
        want = llm.generate("Cold", GREEDY).figures.logits_hash
    ram, reads = budgets(mixture, sparsity="predict")[1], {}
    for disable in ((), ("cache",), ("bundle",), ("pipeline",), ("bundle", "cache", "pipeline")):
        with opened(mixture, ram, sparsity="predict", disable=disable) as llm:
            figures = llm.generate("Cold", GREEDY).figures
        assert figures.logits_hash == want and figures.disk is not None
        reads[disable] = figures.disk
    assert reads["cache",].missed > 1.2 * reads[()].missed
    assert reads["bundle",].reads > 1.5 * reads[()].reads


@pytest.mark.parametrize("sparsity", ["exact", "predict"])
def test_the_least_that_a_refusal_names_is_enough_and_less_is_not(mixture: Path, sparsity: str) -> None:
    enough = least(mixture, sparsity=sparsity)
    with opened(mixture, enough, sparsity=sparsity) as llm:
        assert len(llm.generate("Cold", GREEDY).token_ids) == 12
    with pytest.raises(OutOfBudget, match="on disk the model still needs"):
        opened(mixture, enough - 0.011, sparsity=sparsity)


def test_a_mixture_that_skips_nothing_takes_turns_expert_by_expert(
    tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As people run it: what is too little says how much is enough, and that gives the same answer."""
    monkeypatch.setattr(expert_split, "DEPTH", 4)
    monkeypatch.setattr(expert_split, "ARRANGED_ROWS", 64)
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": FFN}
    hf = tiny.hf_directory(
        tmp_path / "hf",
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        hidden_act="silu",
        **experts,
    )
    save_file(tensors(), hf / "model.safetensors")
    assert thermocline("pack", hf, "-o", tmp_path / "pack", "--format", "f32", "-q").code == 0
    command = ("run", "-m", tmp_path / "pack", "-c", "64", "-t", "2", "-n", "8", "--temp", "0", "--json")
    whole = json.loads(thermocline(*command, "Cold").out)
    ran = thermocline(*command, "--ram", "0.02", "Cold")
    assert ran.code == OutOfBudget.exit_code and ran.err.count("\n") == 1
    enough = re.search(r"with its experts on disk the model still needs .*--ram ([\d.]+), a shorter", ran.err)
    assert enough is not None, ran.err
    told = json.loads(thermocline(*command, "--ram", enough[1], "Cold").out)
    assert (told["token_ids"], told["logits_hash"]) == (whole["token_ids"], whole["logits_hash"])
    assert told["memory_bytes"] <= float(enough[1]) * GIB < whole["memory_bytes"]
    assert told["disk"] is not None and told["disk_bytes_per_token"] > 0 and whole["disk"] is None
    assert [x["ranges"][0]["experts"] for x in told["placement"]["layers"]] == [1] * tiny.LAYERS


@pytest.mark.parametrize("sparsity", [pytest.param("exact", marks=pytest.mark.slow), "predict"])
def test_plan_says_before_what_run_does(mixture: Path, sparsity: str, thermocline: Run) -> None:
    """The same split to the byte."""
    ram = f"{budgets(mixture, sparsity=sparsity)[1]:.4f}"
    options = ("--ctx", "256", "--threads", "2", "--sparsity", sparsity, "--json", "-q")
    plan = thermocline("plan", mixture, "--ram", ram, *options)
    assert plan.code == 0, plan.err
    told = json.loads(plan.out)
    asked: Any = {"context": 256, "max_batch": 1, "sparsity": sparsity}
    with LLM(mixture, threads=2, ram=float(ram), lazy=True, **asked) as llm:
        a = llm.session.arrangement
    assert a is not None and told["bytes"]["ram"] == a.parts
    assert [x["ram"] for x in told["layers"]] == a.places(a.bundles)
    on_disk = [] if a.gates is None else [EXPERTS * FFN - n for n in a.places(a.gates)]
    assert [x["disk_gates"] for x in told["layers"]] == (on_disk or [0] * tiny.LAYERS)
    shares = np.array([s.places for s in a.bundles]).reshape(-1, EXPERTS)
    assert shares.min() > 0 and len(set(shares[0])) > 1, "experts have what the profile says they need"


def test_a_damaged_neuron_is_named_with_its_expert(mixture: Path) -> None:
    """The hottest of the last expert, once the checksums of all are known."""
    pack, ram = Pack.open(mixture), budgets(mixture)[1]
    with opened(mixture, ram) as llm:
        llm.generate("Cold", GREEDY)
    t = pack.tensors["layers.1.bundle"]

    def damage() -> None:
        with pack.weights_path.open("r+b") as f:
            at = f.seek(t.offset + (EXPERTS - 1) * FFN * t.stride)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 1]))

    damage()
    with pytest.raises(BadFile, match=r"layers.1.bundle, expert 3: neuron 0: checksum"):
        opened(mixture, ram)
    damage()  # of the damage, too


def test_a_replay_finds_what_the_engine_finds(mixture: Path) -> None:
    """Each expert has its own places, and time passes for all of them."""
    pack, test = Pack.open(mixture), BenchTest(2, 0, 0, 64)
    feed, heat = bench.feed_of(pack, [test], None, 1), hotness.of_pack(pack, hotness.Curve())

    def loaded(ram: float | None) -> Bench:
        return Bench(pack, [test], feed, EngineOptions(ram=ram), lambda *_: None)

    whole = loaded(None)
    recorder = TraceRecorder(2, pack.spec, whole.engine.model.weights.layers)
    whole.watch(test, recorder)
    trace = Trace.of(recorder, feed.name, "exact", 0)
    chosen = needs_of(trace, 0, 1).reshape(64, EXPERTS, FFN).any(axis=2)
    assert (chosen.sum(axis=1) == 2).all()
    engine = loaded(budgets(mixture)[2])
    assert isinstance(engine.session.store, Store)
    done = engine.sample(test).figures.disk
    assert done is not None
    frequency = [heat.at(i, 1) for i in range(pack.spec.n_layers)]
    counts = replay(trace, engine.session.store.arrangement.bundles, frequency, "lfu")
    assert counts.needed.sum() == done.needed
    assert counts.hit_rate == pytest.approx(1 - done.missed / done.needed, abs=0.01)


def test_drelus_trace_is_refused_where_gates_are_on_disk(
    mixture: Path, tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is not where `--ram` is given, but where a model lacks memory: of what is free, too."""
    options = ("--sparsity", "predict", "-n", "2", "-t", "2", "-q")
    record = ("bench", "-m", mixture, "--trace", tmp_path / "a", *options)
    ran = thermocline(*record, "--ram", "1")
    assert ran.code == 0, ran.err
    free = int(budgets(mixture, sparsity="predict")[0] * GIB)
    monkeypatch.setattr(hardware, "available_bytes", lambda: free)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 0)
    ran = thermocline(*record)
    assert ran.code == 2 and "every gate in memory" in ran.err


# ---- how long it takes


def disk_us(spec: ModelSpec, tokens: int) -> float:
    """Of a step of so many tokens, with half of each expert's bundles in memory."""
    tensor_specs, heat = expected_tensors(spec, "q4_0"), hotness.Curve(0.1).hotness(spec)
    p = Problem(spec, sizes_of(spec, tensor_specs, "q4_0"), heat, test_plan.HIGH, Ask(64, vram_bytes=0))
    c = Contents(spec, place(tensor_specs)[0], None, "exact", heat)
    shares = (Share(0, spec.ffn_dim // 2),) * (spec.n_layers * spec.n_experts)
    return stored_prediction(p, c, Arrangement({}, shares, None, c), p.work(batch=tokens)).disk_us


def test_eight_tokens_are_few_to_each_of_eight_experts() -> None:
    """They read what they need; twenty, and eight of a dense model, all that is not in memory."""
    shape = read_shape("turbosparse-mixtral")[1]
    # A quarter of the neurons takes a quarter of the time. dReLU reads several times as much.
    spec = dataclasses.replace(shape, n_layers=2, ffn_dim=shape.ffn_dim // 4, up_activation="none")
    dense = dataclasses.replace(spec, n_experts=1, n_experts_active=1)
    assert 10 * disk_us(spec, 8) < disk_us(spec, 20)
    assert 10 * disk_us(dense, 4) < disk_us(dense, 8)


def test_each_chosen_expert_waits_for_its_own_last_read() -> None:
    spec, disk = read_shape("turbosparse-mixtral")[1], test_plan.HIGH.disk
    assert disk is not None
    work, speeds = Work("exact", routed=0.25, experts=8), Speeds(test_plan.HIGH, "q4_0", 1)
    sizes = sizes_of(spec, expected_tensors(spec, "q4_0"), "q4_0").layers[0]
    layer = LayerWork(sizes, Reads.of(np.full(sizes.neurons, 0.1), work, skips=True), 0, 0, spec.dim)
    few = 12.0  # reads, hidden behind the FFN
    waits = stored_times(layer, speeds, work, [Fetch(few, few, few * sizes.record_bytes)])[1]
    assert waits == pytest.approx(2 * IN_FLIGHT * 1e6 / disk.reads_per_s, rel=0.01)
    assert step_us(layer, speeds, work, np.array([9e3]), np.array([few]))[1] == pytest.approx(waits, rel=0.01)


# ---- reads ahead


def routed(experts: tuple[_native.FFN, ...]) -> _native.Mixture:
    """Two experts, of which a token's first number chooses one."""
    router, plain = _native.Arena(2 * 4 * DIM), _native.Join(None, 1.0)
    values = np.zeros((2, DIM), np.float32)
    values[:, 0] = 1, -1
    router.write(0, values.view(np.uint8).ravel())
    by = _native.Linear(_native.Matrix(router, 0, 0, 2, DIM, 4 * DIM), None)
    return _native.Mixture(None, by, experts, 1, plain, rule=native_rule(PLAIN_ROUTER))


def moe_add(context: _native.Context, m: _native.Mixture, h: test_disk.F32, record: bool = False) -> bytes:
    x, kept = np.ones_like(h), np.zeros((len(h), m.neurons), np.float32) if record else None
    context.moe_add(x, h, m, SPARSITIES["predict"], kept)
    return x.tobytes() + (b"" if kept is None else kept.tobytes())


def predicted(path: Path, gates: tuple[int, int] | None) -> tuple[Case, _native.Mixture, _native.Mixture]:
    """An FFN, and a mixture of twice the same, in memory and on disk."""
    case = Case(test_disk.neurons(path, "q8_0"), predictor=test_disk.scores())
    reader = _native.Reader(str(path), depth=16, buffer_bytes=8192)
    there = tuple(case.on_disk(0, 60, gates=gates, reader=reader)[0] for _ in range(2))
    return case, routed((case.in_memory(), case.in_memory())), routed(there)


@pytest.mark.parametrize("record", [False, True])
def test_reads_begun_for_one_token_do_not_disturb_a_prompts(tmp_path: Path, record: bool) -> None:
    """Nor a recorded token's, which goes the prompts' way and knows no slots of a call of few."""
    _, memory, disk = predicted(tmp_path / "f", (0, 60))
    context = _native.Context(2)
    for h in test_disk.calls():
        context.read_ahead(h[:1], disk, SPARSITIES["predict"])
        with within(20):
            assert moe_add(context, disk, h, record) == moe_add(context, memory, h, record), len(h)


@pytest.mark.parametrize("gates", [None, (0, 60)])
@pytest.mark.parametrize("expert", [0, 1])
def test_what_is_read_ahead_in_vain_may_be_damaged(
    tmp_path: Path, expert: int, gates: tuple[int, int] | None
) -> None:
    """Of either expert: a token's two have the same reads."""
    context = _native.Context(2)
    for seed in range(4):
        case, memory, disk = predicted(tmp_path / f"f{seed}", gates)
        h, guess, neuron = test_disk.guessed_in_vain(case, seed)
        both = np.concatenate([guess, guess, h])
        both[:, 0] = 0.1, -0.1, 0.1
        h[:, 0] = (0.1, -0.1)[expert]
        with test_disk.damaged(case.made, neuron):
            context.read_ahead(both, disk, SPARSITIES["predict"])
            with within(20):
                assert moe_add(context, disk, h) == moe_add(context, memory, h)


# ---- the clock


def test_uses_of_an_expert_are_forgotten_while_others_are_chosen(tmp_path: Path) -> None:
    """After ten half-lives of tokens, not of its own calls, what it needed then gives way at once."""
    near, (far, rows) = (Case(test_disk.neurons(tmp_path / name)).on_disk(0, 400) for name in ("near", "far"))
    mixture = routed((near[0], far))
    context, rng = _native.Context(1), np.random.default_rng(1)
    old, new = (np.abs(rng.standard_normal((1, DIM))).astype(np.float32) for _ in range(2))
    for _ in range(20):
        context.moe_add(np.zeros_like(old), -old, mixture, SPARSITIES["exact"])
    assert rows.stats()["needed"] > 0 == near[1].stats()["needed"]
    for _ in range(640):
        context.moe_add(np.zeros_like(old), old, mixture, SPARSITIES["exact"])
    missed = []
    for _ in range(2):
        before = rows.stats()["missed"]
        context.moe_add(np.zeros_like(new), -new, mixture, SPARSITIES["exact"])
        missed.append(rows.stats()["missed"] - before)
    assert missed[0] > 50 and missed[1] == 0


@pytest.mark.parametrize(("experts", "left"), [(8, "neurons"), (16, "experts")])
def test_experts_of_a_router_before_attention_come_from_disk_too(
    experts: int, left: str, tmp_path: Path
) -> None:
    """SmallThinker's: the same logits as in memory, whether neurons are skipped or not."""
    small = {"moe_ffn_hidden_size": 512, "num_hidden_layers": 4, "moe_num_primary_experts": experts}
    made = test_synth.make(tmp_path, "smallthinker-4b", "q4_0", active=0.4, skew=0.55, **small)

    def run(ram: float | None, sparsity: str) -> Any:
        options = EngineOptions(context=64, max_batch=1, ram=ram, sparsity=sparsity, threads=2, gpu="off")
        engine = Session.open(made, options).load()
        ids = [i * 7 % 512 for i in range(20)]
        request = engine.submit(ids, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        while engine.step():
            pass
        return request.completion().figures

    truth = run(None, "exact").logits_hash
    with pytest.raises(OutOfBudget) as refused:
        run(0.001, "exact")
    ram = float(re.search(r"--ram ([\d.]+)", str(refused.value))[1]) + 0.001  # type: ignore[index]
    for sparsity in ("exact", "off"):
        figures = run(ram, sparsity)
        assert figures.logits_hash == truth and figures.disk.missed > 0
    assert reads_from_disk(made.spec) == left and reads_from_disk(made.spec, gpu=True) == "neurons"
