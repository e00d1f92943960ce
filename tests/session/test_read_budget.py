"""`--read-budget`: no token of an answer reads more, and what is left out is what has least weight."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_disk_experts as core
import test_synth
import tiny
from test_disk_experts import ACTIVE, EXPERTS, F32, Bound

from thermocline import LLM, SamplingParams, _native
from thermocline.errors import UsageError
from thermocline.machine import hardware
from thermocline.model.modes import SPARSITIES
from thermocline.model.spec import Router
from thermocline.offline import evaluate
from thermocline.pack.pack import Pack
from thermocline.plan.budget import Decision
from thermocline.plan.disk import expert_split
from thermocline.plan.disk.expert_split import ExpertSplit, Mixture, least_bytes, placed
from thermocline.plan.memory import GIB, others_of
from thermocline.session.options import EngineOptions
from thermocline.session.session import Session

Run = Callable[..., Any]
TEXT = "Once upon a time there was a little girl called Lily. She had a red ball and a dog. " * 8
TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
RULES = {
    "chosen": (Router(), True),
    "normalised": (Router(score="sigmoid", weights="normalised", epsilon=1e-20), True),
    "normalised and scaled": (Router(weights="normalised", scale=2.5, expert_scale=True), True),
    "score": (Router(score="sigmoid", weights="score"), False),
    "mixed": (Router(weights="mixed", epsilon=0.01), False),
}


# ---- a layer


def files_of(m: core.Model) -> _native.ExpertFiles:
    return _native.ExpertFiles(list(map(core.state, m.files)), depth=core.DEPTH, piece_bytes=core.PIECE)


def weights(*rows: dict[int, float]) -> F32:
    """How much of which expert each token gets."""
    found = np.zeros((len(rows), EXPERTS), np.float32)
    for row, chosen in zip(found, rows, strict=True):
        row[list(chosen)] = list(chosen.values())
    return found


def without(given: F32, experts: Sequence[int], router: Router, normalised: bool) -> F32:
    """What the specification makes of `given`."""
    scale = core.SCALES if router.expert_scale else np.ones(EXPERTS, np.float32)
    before = (given / scale).sum(axis=1)
    left = given.copy()
    left[:, list(experts)] = 0
    after = (left / scale).sum(axis=1)
    return (left * (before / after)[:, None]).astype(np.float32) if normalised else left


def answer(bound: Bound, shares: F32, dim: int) -> F32:
    h = np.random.default_rng(3).standard_normal((len(shares), dim)).astype(np.float32)
    x = np.zeros_like(h)
    bound.context.moe_add(x, h, bound.mixture, SPARSITIES["exact"], None, shares)
    return x


def expert_bytes(m: core.Model) -> int:
    """What the read of an expert takes, whole pages of each piece: at most."""
    files = files_of(m)
    disk = core.on_disk(m, 0, files=files, load=False)
    most = 0
    for e in range(EXPERTS):
        before = disk.stats()["bytes"]
        answer(disk, weights({e: 1.0}), m.dim)
        most = max(most, disk.stats()["bytes"] - before)
    return most


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("least", [1, 5, 9])
def test_the_expert_of_least_weight_is_left_out_and_the_rest_weighs_as_the_rule_says(
    name: str, least: int, tmp_path: Path
) -> None:
    """Of three experts that are missing two are read. That with least weight is none of a fixed number."""
    router, normalised = RULES[name]
    m = replace(core.model(tmp_path), router=router)
    files = files_of(m)
    memory, disk = core.in_memory(m), core.on_disk(m, 1, files=files)  # that has expert 0
    given = weights({1: 0.35, 5: 0.4, 9: 0.25} | {least: 0.1} | {0: 0.05})
    files.begin_step(int(2.5 * expert_bytes(m)))
    got = answer(disk, given, m.dim)
    wanted = answer(memory, without(given, [least], router, normalised), m.dim)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    other = answer(memory, without(given, [least], router, not normalised), m.dim)
    assert not np.allclose(got, other, rtol=1e-3, atol=1e-4), "the two rules differ here"
    assert disk.stats()["left_out"] == 1 and disk.stats()["missed"] == 2


def test_an_expert_in_memory_is_never_left_out(tmp_path: Path) -> None:
    m = core.model(tmp_path)
    files = files_of(m)
    memory, disk = core.in_memory(m), core.on_disk(m, 2, files=files)
    given = weights({0: 0.1, 1: 0.2, 7: 0.7})
    files.begin_step(0)
    got = answer(disk, given, m.dim)
    np.testing.assert_allclose(
        got, answer(memory, without(given, [7], Router(), True), m.dim), rtol=1e-4, atol=1e-5
    )
    assert disk.stats()["left_out"] == 1 and disk.stats()["bytes"] == bytes_loaded(m, 2)


def test_what_is_left_out_behind_a_read_only_step_counts_as_used(tmp_path: Path) -> None:
    """The first call that a budget bounded still took the step for one that leaves caches as they are."""
    m = core.model(tmp_path)
    files = files_of(m)
    disk = core.on_disk(m, 1, files=files)  # that has expert 0
    for _ in range(2):
        answer(disk, weights({0: 1.0}), m.dim)
    files.begin_step(None, read_only=True)
    answer(disk, weights({0: 1.0}), m.dim)
    files.begin_step(0)
    answer(disk, weights({5: 1.0}), m.dim)
    assert disk.stats()["left_out"] == 1
    files.begin_step()
    for _ in range(2):
        answer(disk, weights({5: 1.0}), m.dim)
    assert disk.stats()["missed"] == 1, "it took the slot when it was read"


def bytes_loaded(m: core.Model, quota: int) -> int:
    return core.on_disk(m, quota).stats()["bytes"]


def test_a_token_all_of_whose_experts_are_left_out_gets_nothing_of_them(tmp_path: Path) -> None:
    m = core.model(tmp_path, shared=True)
    files = files_of(m)
    memory, disk = core.in_memory(m), core.on_disk(m, 1, files=files)
    files.begin_step(0)
    got = answer(disk, weights({3: 0.5, 4: 0.5}), m.dim)
    assert (got == answer(memory, weights({}), m.dim)).all(), "the shared FFN alone"
    assert disk.stats()["left_out"] == 2


@pytest.mark.parametrize("tokens", [2, 5])
def test_tokens_computed_together_share_their_budgets(tokens: int, tmp_path: Path) -> None:
    """An expert counts with the weight that all tokens give it, and all of them do without it."""
    m = core.model(tmp_path)
    files = files_of(m)
    memory, disk = core.in_memory(m), core.on_disk(m, 1, files=files)
    rows = [{0: 0.5, 3: 0.3, 8: 0.2}, {0: 0.1, 4: 0.5, 8: 0.4}, *[{0: 0.9, 3: 0.1}] * (tokens - 2)]
    given = weights(*rows)  # 8: 0.6; 4: 0.5; 3: 0.3 to 0.6
    files.begin_step(int(2.5 * expert_bytes(m)))
    got = answer(disk, given, m.dim)
    least = [3] if tokens == 2 else [4]
    np.testing.assert_allclose(
        got, answer(memory, without(given, least, Router(), True), m.dim), rtol=1e-4, atol=1e-5
    )


def test_a_layer_takes_what_those_before_it_left(tmp_path: Path) -> None:
    """Half an expert for each of two layers: the second one reads one, unless the first did."""
    m = core.model(tmp_path)
    files, each = files_of(m), expert_bytes(m)
    layers = [core.on_disk(m, 1, files=files) for _ in range(2)]
    files.begin_step(each)
    for layer in layers:
        answer(layer, weights({5: 1.0}), m.dim)
    assert [layer.stats()["left_out"] for layer in layers] == [1, 0]
    files.begin_step(2 * each)
    for layer in layers:
        answer(layer, weights({6: 0.6, 7: 0.4}), m.dim)
    assert [layer.stats()["left_out"] for layer in layers] == [2, 1], "one each"


@pytest.mark.parametrize("disable", [0, _native.NO_CACHE])
@pytest.mark.parametrize("quota", [2, 5])
def test_no_call_reads_more_than_it_may(quota: int, disable: int, tmp_path: Path) -> None:
    """Few tokens and many, fewer slots than they need: what was found in memory is not evicted meanwhile."""
    m = core.model(tmp_path)
    files, each = files_of(m), expert_bytes(m)
    disk = core.on_disk(m, quota, passing=2, files=files, disable=disable)
    rng, bounded = np.random.default_rng(1), 0
    for tokens in (1, 3, 12, 1, 7, 40, 2, 12) * 3:
        before, most = disk.stats(), int(each * rng.integers(0, 5))
        files.begin_step(most)
        rows = [
            dict.fromkeys(rng.choice(EXPERTS, ACTIVE, replace=False).tolist(), 1 / 3) for _ in range(tokens)
        ]
        disk.guess(rng.standard_normal((tokens, m.dim)).astype(np.float32))
        answer(disk, weights(*rows), m.dim)
        after = disk.stats()
        assert after["bytes"] - before["bytes"] <= most
        bounded += after["left_out"] > before["left_out"]
    assert bounded > 5 and disk.stats()["missed"] > 5


def test_an_unbounded_step_behind_a_bounded_one_has_the_bits_of_memory(tmp_path: Path) -> None:
    m = core.model(tmp_path)
    files = files_of(m)
    memory, disk = core.in_memory(m), core.on_disk(m, 3, files=files)
    for h in core.calls(m.dim):
        files.begin_step(0)
        disk.run(h)
        files.begin_step()
        assert disk.run(h) == memory.run(h)
    assert disk.stats()["left_out"] > 0


def test_a_read_only_step_has_the_bits_of_memory_and_leaves_no_trace(tmp_path: Path) -> None:
    """Whatever is computed in between, the other calls miss what they would have missed."""
    m = core.model(tmp_path)
    memory = core.in_memory(m)

    def misses(between: bool) -> list[int]:
        files = files_of(m)
        disk, found = core.on_disk(m, 4, passing=3, files=files), []
        for h, other in zip(core.calls(m.dim), core.calls(m.dim, seed=9), strict=True):
            if between:
                files.begin_step(read_only=True)
                for each in (other, h[:1], np.repeat(other, 5, axis=0)):
                    assert disk.run(each) == memory.run(each)
            files.begin_step()
            before = disk.stats()["missed"]
            assert disk.run(h) == memory.run(h)
            found.append(disk.stats()["missed"] - before)
        return found

    plain = misses(between=False)
    assert misses(between=True) == plain and sum(plain) > 10


# ---- a session


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a mixture with a tokenizer."""
    from thermocline.cli import main

    base = tmp_path_factory.mktemp("budget")
    config = test_synth.config_file(base, "qwen3-30b-a3b", num_experts=32)
    assert main.main(["synth", str(config), "--format", "q4_0", "-o", str(base / "pack"), "-q"]) == 0
    tiny.tokenizer().save(str(base / "pack" / "tokenizer.json"))
    return base / "pack"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of a small model are smaller than its experts."""
    monkeypatch.setattr(expert_split, "PIECE_BYTES", 20 << 10)
    monkeypatch.setattr(expert_split, "DEPTH", 8)


def opened(path: Path, read_budget: float | None, slots: int = 6, **asked: Any) -> Session:
    """A session with so many slots for the experts of each layer."""
    model, options = Pack.open(path), EngineOptions(context=64, threads=2, read_budget=read_budget, **asked)
    m = Mixture(model.spec, model.tensors)
    split = ExpertSplit({}, dict.fromkeys(m.records, slots), m)
    return Session(model, options, Decision(placed(split, 64, 4 * 64), mixture=m))


def prompts(n: int) -> list[list[int]]:
    return [[(7 * i + i * i + 31 * k) % 256 for i in range(10 + k)] for k in range(n)]


def generated(session: Session, prompt: list[int], params: SamplingParams = GREEDY) -> Any:
    engine = session.load()
    request = engine.submit(prompt, params)
    while engine.step():
        pass
    return request.completion()


def test_a_budget_that_bears_all_changes_no_bit(path: Path) -> None:
    with opened(path, None) as plain, opened(path, 1e6) as bounded:
        for prompt in prompts(2):
            exact, done = generated(plain, prompt), generated(bounded, prompt)
            assert done.figures.logits_hash == exact.figures.logits_hash
            assert done.figures.disk.left_out == 0 < done.figures.disk.missed


@pytest.mark.parametrize("chats", [1, 3, 6])
def test_no_token_of_an_answer_reads_more(chats: int, path: Path) -> None:
    """Several chats at once read as many times more. Prompts read all that they need."""
    mb = 0.15  # an expert of this model is read in 0.12 MB, a layer's part is a third of one
    with opened(path, mb, max_batch=8) as session:
        engine, read, left = session.load(), [], 0
        assert session.store is not None
        requests = [engine.submit(p, GREEDY) for p in prompts(chats)]
        while not all(r.computed >= r.n_prompt for r in requests):
            engine.step()
        while engine.running:
            before, answers = session.store.counts(), len(engine.running)
            engine.step()
            found = session.store.counts().since(before)
            assert found.bytes <= mb * 1e6 * answers
            read.append(found.bytes)
            left += found.left_out
        assert left > 0 and max(read) > 0.5 * mb * 1e6 * chats, "it is used"


def test_prompts_are_not_cut(path: Path) -> None:
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with opened(path, None) as plain, opened(path, 0.0) as bounded:
        for prompt in [[5], *prompts(2)]:  # one token is a prompt, too
            exact, done = generated(plain, prompt, first), generated(bounded, prompt, first)
            assert done.figures.logits_hash == exact.figures.logits_hash


def test_nothing_is_read_for_answers_with_a_budget_of_0(path: Path) -> None:
    with opened(path, 0.0) as session:
        disk = generated(session, prompts(1)[0]).figures.disk
    assert (disk.bytes, disk.reads, disk.missed) == (0, 0, 0) and disk.left_out > 0 and disk.hit_rate < 1


def test_equal_histories_give_equal_tokens_and_others_need_not(path: Path) -> None:
    """What is left out depends on what is in memory, so on what the session has computed before."""
    found = []
    for before in ([1], [1], [2]):
        with opened(path, 0.2) as session:
            for k in before:
                generated(session, prompts(3)[k])
            done = generated(session, prompts(1)[0])
            found.append((done.token_ids, done.figures.logits_hash))
    assert found[0] == found[1] != found[2]


# ---- what people see


def ram(path: Path) -> float:
    """GiB with room for about half of the experts."""
    model = Pack.open(path)
    m, others = (
        Mixture(model.spec, model.tensors),
        others_of(model.spec, context=64, kv_tokens=64, max_batch=1, threads=2),
    )
    return (least_bytes(m, others) + m.bytes // 3) / GIB


def test_run_says_that_its_answer_is_not_exact_and_what_was_left_out(path: Path, thermocline: Run) -> None:
    asked = [
        "run",
        "-m",
        path,
        "--ram",
        f"{ram(path):.4f}",
        "-c",
        "64",
        "-t",
        "2",
        "-n",
        "20",
        "--ignore-eos",
    ]
    asked += ["--temp", "0", "--read-budget", "0.1", "Once upon"]
    told = thermocline(*asked, "--json")
    figures = json.loads(told.out)
    assert figures["read_budget_mb"] == 0.1 and figures["disk_left_out_per_token"] > 0
    assert figures["disk_bytes_per_token"] <= 0.1e6 and 0 < figures["cache_hit_rate"] < 1
    (said,) = (line for line in told.err.splitlines() if "not exact" in line)
    assert "left out where a token would read more than 0.1 MB" in said
    assert "experts a token left out" in told.err
    plain = json.loads(thermocline(*asked[:-3], asked[-1], "--json").out)
    assert plain["read_budget_mb"] is None and plain["disk_left_out_per_token"] == 0


def test_bench_counts_them(path: Path, thermocline: Run) -> None:
    asked = [
        "bench",
        "-m",
        path,
        "--ram",
        f"{ram(path):.4f}",
        "-p",
        "0",
        "-n",
        "16",
        "-r",
        "1",
        "-t",
        "2",
        "-q",
    ]
    row = json.loads(thermocline(*asked, "--read-budget", "0.1", "-o", "jsonl").out.splitlines()[-1])
    assert row["read_budget_mb"] == 0.1 and row["disk_left_out_per_token"] > 0
    table = thermocline(*asked, "--read-budget", "0.1").out
    assert "left out" in table and "not exact: 0.1 MB a token at most" in table
    assert "left out" not in thermocline(*asked).out


def test_eval_measures_how_far_off_answers_are(
    path: Path, tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less divergence the more may be read, none if that is all; the base is the exact run."""
    monkeypatch.setattr(evaluate, "LOGITS", 1 << 16)
    text = tmp_path / "text"
    text.write_text(TEXT)
    asked = ["eval", "-m", path, "-f", text, "-c", "32", "--chunks", "2", "-t", "2", "--json", "-q"]
    exact = json.loads(thermocline(*asked).out)
    assert exact["read_budget_mb"] is None
    free = int(ram(path) * GIB) + (1 << 20) + 2 * evaluate.reader_bytes(Pack.open(path).spec, 32)
    monkeypatch.setattr(hardware, "available_bytes", lambda: free)
    monkeypatch.setattr(hardware, "own_bytes", lambda: 0)
    found = [json.loads(thermocline(*asked, "--read-budget", mb).out) for mb in ("0", "0.2", "1000")]
    kld = [f["against"]["kld"]["value"] for f in found]
    left = [f["disk_left_out_per_token"] for f in found]
    assert kld[0] > kld[1] > kld[2] == 0 and left[0] > left[1] > left[2] == 0
    for f in found:
        assert f["against"]["perplexity"]["value"] == exact["perplexity"]["value"]
    assert found[2]["perplexity"]["value"] == exact["perplexity"]["value"]
    said = thermocline(*asked[:-2], "--read-budget", "0.2", "-q").out
    assert "0.2 MB a token; " in said and "experts a token left out" in said and "mean KLD" in said


def test_eval_names_a_budget_that_is_enough_for_both_readers(
    path: Path, tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they score with is counted: it was not, and 13 MiB more were taken than allowed."""
    monkeypatch.setattr(evaluate, "LOGITS", 1 << 16)
    (text := tmp_path / "text").write_text(TEXT)
    asked = ["eval", "-m", path, "-f", text, "-c", "32", "--chunks", "1", "-t", "2", "--read-budget", "0"]
    refused = thermocline(*asked, "--ram", "0.001")
    assert refused.code != 0 and "the command's own" in refused.err
    least = refused.err.split("use --ram ")[1].split(",")[0]
    assert thermocline(*asked, "--ram", least, "--json", "-q").code == 0


def test_eval_refuses_what_would_measure_nothing(path: Path, tmp_path: Path, thermocline: Run) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    asked = ["eval", "-m", path, "-f", text, "-c", "32", "--read-budget", "1"]
    told = thermocline(*asked)
    assert told.code == 2 and "all weights are in memory, so nothing is left out" in told.err
    told = thermocline(*asked, "--against", "off")
    assert told.code == 2 and "leave out --against off" in told.err


@pytest.mark.parametrize(
    ("shape", "activation", "why"),
    [
        ("mistral-7b", "silu", "a token needs all of this model"),
        ("llama-2-7b", "relu", "only whole experts can be left out"),
    ],
)
def test_models_without_experts_to_leave_out_are_refused(
    shape: str, activation: str, why: str, tmp_path: Path
) -> None:
    model = test_synth.make(tmp_path, shape, hidden_act=activation)
    with pytest.raises(UsageError, match=f"^--read-budget 30: .*{why}.*; leave it out$"):
        Session.open(model, EngineOptions(read_budget=30))


def test_a_mixture_that_is_all_in_memory_says_that_nothing_is_left_out(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        LLM(path, read_budget=0.0, threads=2, context=64) as bounded,
        LLM(path, threads=2, context=64) as plain,
    ):
        done = [x.generate("Once", GREEDY).figures.logits_hash for x in (bounded, plain)]
    assert done[0] == done[1] and "all weights are in memory, so nothing is left out" in caplog.text


@pytest.mark.parametrize("mb", [-1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number_of_megabytes(mb: float) -> None:
    with pytest.raises(UsageError, match="read_budget is"):
        EngineOptions(read_budget=mb)
