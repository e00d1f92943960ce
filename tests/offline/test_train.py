"""Predictors: each step of making them against brute force, the command as a person uses it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from build_docs import difference
from conftest import Ran

from thermocline.cli import main
from thermocline.offline.training import calibrate, fit_mlp, fit_svd, train
from thermocline.offline.training.calibrate import PRICES, Costs, Curves, LayerSamples
from thermocline.pack.pack import Pack
from thermocline.pack.predictor import FILE, open_predictors

Thermocline = Callable[..., Ran]
SEED = np.random.default_rng(0)


def activity(n: int = 60, neurons: int = 5, dim: int = 8, seed: int = 0) -> tuple[LayerSamples, np.ndarray]:
    """Random, with the masses as a dense array too."""
    rng = np.random.default_rng(seed)
    mass = np.maximum(rng.standard_normal((n, neurons)), 0).astype(np.float32)
    token, neuron = np.nonzero(mass)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(token, minlength=n))])
    x = rng.standard_normal((n, dim)).astype(np.float32)
    return LayerSamples(x, indptr, neuron, mass[token, neuron], neurons), mass


def test_samples_are_taken_with_what_belongs_to_them() -> None:
    a, mass = activity()
    rows = np.array([7, 3, 3, 59])
    assert np.array_equal(a.dense(), mass)
    assert np.array_equal(a.take(rows).dense(), mass[rows])
    assert np.array_equal(a.take(rows).x, a.x[rows])


def test_no_threshold_costs_less_than_the_calibrated_one() -> None:
    a, mass = activity()
    scores = (mass + SEED.standard_normal(mass.shape)).astype(np.float32)
    scores[:20] = np.round(scores[:20])  # ties
    found = calibrate.curves(lambda begin, end: scores[:, begin:end], a)
    energy = (mass.astype(np.float64) ** 2).sum()
    for price in (0, calibrate.TYPICAL, len(PRICES) - 1):
        for i in range(a.neurons):

            def cost(threshold: float, i: int = i, price: int = price) -> float:
                on = scores[:, i] >= threshold
                missed = (mass[~on, i].astype(np.float64) ** 2).sum() / energy
                return float(on.mean() + PRICES[price] * a.neurons * missed)

            own = cost(found.threshold[price, i])
            assert own <= min(map(cost, [*scores[:, i], np.inf])) + 1e-9
            on = scores[:, i] >= found.threshold[price, i]
            assert found.predicted[price, i] == pytest.approx(on.mean())
            missed = (mass[~on, i].astype(np.float64) ** 2).sum() / energy
            assert found.missed[price, i] == pytest.approx(missed, abs=1e-6)


def test_a_higher_price_misses_less() -> None:
    a, mass = activity(200, 20)
    scores = (mass + SEED.standard_normal(mass.shape)).astype(np.float32)
    found = calibrate.curves(lambda begin, end: scores[:, begin:end], a)
    missed, predicted = found.missed.sum(axis=1), found.predicted.sum(axis=1)
    assert (np.diff(missed) <= 1e-7).all() and (np.diff(predicted) >= -1e-7).all()
    assert missed[0] > 0.1 and missed[-1] < 1e-3


def test_neurons_are_hot_as_far_as_asking_costs_more() -> None:
    rng = np.random.default_rng(1)
    shape = (len(PRICES), 40)
    predicted = np.sort(rng.random(shape))[:, ::-1].astype(np.float32)
    zeros, ones = np.zeros(shape, np.float32), np.ones(40, np.float32)
    c = Curves(zeros, predicted, zeros, zeros, zeros, ones, 0.1)
    costs = Costs(first=500, ask=36, gate=100)
    for price in range(len(PRICES)):
        totals = [500 + h * 100 + float((36 + 100 * predicted[price, h:]).sum()) for h in range(41)]
        found = calibrate.choose_operating_point(c, costs, price)
        assert found.hot == int(np.argmin(totals))
        assert found.bytes == pytest.approx(min(totals))


def test_figures_are_counted_from_the_missed() -> None:
    a, mass = activity(300, 20)
    scores = (mass + SEED.standard_normal(mass.shape)).astype(np.float32)
    c = calibrate.curves(lambda begin, end: scores[:, begin:end], a)
    for price, hot in ((0, 0), (calibrate.TYPICAL // 2, 7), (calibrate.TYPICAL, 20)):
        on = scores >= c.threshold[price]
        on[:, :hot] = True
        found = calibrate.PredictionQuality.of(c, price, hot)
        assert found.recall == pytest.approx((on & (mass > 0)).sum() / (mass > 0).sum())
        assert found.missed_mass == pytest.approx(mass[~on].sum() / mass.sum(), abs=1e-6)
        missed = (mass[~on].astype(np.float64) ** 2).sum() / (mass.astype(np.float64) ** 2).sum()
        assert found.missed_energy == pytest.approx(missed, abs=1e-6)
        assert found.predicted == pytest.approx(on.mean()) and found.active == pytest.approx(
            (mass > 0).mean()
        )
    every = calibrate.PredictionQuality.exact(a)
    assert (every.predicted, every.recall, every.missed_mass) == (1, 1, 0) and every.active == found.active


def test_the_svd_is_the_best_of_its_rank_for_these_inputs() -> None:
    """Against the textbook: SVD of gate @ L, in full. Inputs lie mostly in a few directions."""
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((500, 32)) * np.geomspace(3, 0.01, 32)).astype(np.float32)
    x = x @ np.linalg.qr(rng.standard_normal((32, 32)))[0].astype(np.float32)
    gate = rng.standard_normal((48, 32)).astype(np.float32)
    first, second = fit_svd.svd(gate, x, 16, seed=0)
    wanted = x @ gate.T
    left, sizes, right = np.linalg.svd(wanted, full_matrices=False)
    plain = np.linalg.svd(gate)
    for rank in (1, 8, 16):
        best = np.linalg.norm(wanted - (left[:, :rank] * sizes[:rank]) @ right[:rank])
        own = np.linalg.norm(wanted - x @ first[:rank].T @ second[:, :rank].T)
        unwhitened = (plain[0][:, :rank] * plain[1][:rank]) @ plain[2][:rank]
        assert own <= best * 1.02 + 1e-3
        assert own < np.linalg.norm(wanted - x @ unwhitened.T)


@pytest.mark.oracle
def test_a_trained_predictor_learns_what_no_linear_one_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Active where |x0| is large: no linear score tells."""
    monkeypatch.setattr(fit_mlp, "STEPS", 200)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1024, 8)).astype(np.float32)
    mass = np.repeat(np.maximum(np.abs(x[:, :1]) - 1, 0), 4, axis=1)
    token, neuron = np.nonzero(mass)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(token, minlength=len(x)))])
    a = LayerSamples(x, indptr, neuron, mass[token, neuron], 4)
    first, second = fit_mlp.fit(a, 32, seed=0, threads=1)
    score = (np.maximum(x @ first.T, 0) @ second.T)[:, 0]
    active = mass[:, 0] > 0
    assert (score[active][:, None] > score[~active]).mean() > 0.9  # a linear score: half of the pairs
    again = fit_mlp.fit(a, 32, seed=0, threads=1)
    assert np.array_equal(first, again[0]) and np.array_equal(second, again[1])


# ---- the command


@pytest.fixture(scope="module")
def profiled(tiny_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pack, profiled over random letters; half of its neurons are active."""
    where = tmp_path_factory.mktemp("train")
    (where / "text").write_bytes(bytes(np.random.default_rng(0).integers(97, 123, 3000, np.uint8)))
    out = where / "pack"
    argv = ["profile", tiny_pack, "-o", out, "--corpus", where / "text", "--samples", "512", "-q"]
    assert main.main([str(a) for a in argv]) == 0
    return out


@pytest.fixture
def pack(profiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(profiled, tmp_path / "pack"))


QUICK = ("--ctx", "64", "--limit", "2", "--json", "-q", "-t", "1")


@pytest.mark.parametrize("kind", ["svd", "sign", pytest.param("mlp", marks=pytest.mark.oracle)])
def test_a_kind_that_is_asked_for_is_written_and_as_near_as_asked(
    thermocline: Thermocline, pack: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_mlp, "STEPS", 60)
    ran = thermocline("train", pack, "--kind", kind, "--max-kld", "0.02", "--max-ppl", "5", *QUICK)
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert difference("train", said) == []
    assert said["written"] and said["met"] and said["kld"]["value"] <= 0.02
    assert {layer["kind"] for layer in said["layers"]} == {kind}
    assert all(0.3 < layer["active"] < 0.7 for layer in said["layers"])
    found = open_predictors(Pack.open(pack))
    assert found is not None
    with found:
        assert found.report["kld"] == said["kld"]
    told = json.loads(thermocline("inspect", pack, "--json").out)
    assert told["predictors"]["layers_by_kind"] == {kind: 2} and told["predictors"]["kld"] == said["kld"]
    assert told["profile"]["tokens"] > 2900 and told["profile"]["samples"] == 512
    assert 0.3 < told["profile"]["hot_share"] < 0.8 and len(told["profile"]["corpus"]) == 64
    shown = thermocline("inspect", pack).out
    assert f"{kind} in 2 layers" in shown and told["profile"]["corpus"] in shown and "512 tokens" in shown
    assert f"{said['kld']['value']:.5f}" in shown
    assert said["predictor_bytes_per_token"] > 0 and said["predictor_us_at_memory_speed"] > 0
    first = (pack / FILE).read_bytes()
    thermocline("train", pack, "--kind", kind, "--max-kld", "0.02", "--max-ppl", "5", *QUICK)
    assert (pack / FILE).read_bytes() == first  # to the byte: times are said, and kept nowhere


MIX = {"english", "french", "encyclopaedia", "python", "cpp"}


@pytest.mark.oracle
def test_the_bound_holds_on_the_worst_of_several_unlike_texts_and_run_names_them_once(
    thermocline: Thermocline, pack: Path
) -> None:
    """Predictors at 0.002 nats on stories were at 0.15 on an encyclopaedia, and nothing said so."""
    argv = ("--kind", "sign", "--max-kld", "0.02", "--max-ppl", "5")
    said = json.loads(thermocline("train", pack, *argv, *QUICK).out)
    texts = {text["name"]: text["kld"]["value"] for text in said["texts"]}
    assert texts.keys() == MIX | {"its own"} and len(set(texts.values())) == 6
    assert said["kld"]["value"] == max(texts.values()) == texts[said["worst_text"]] <= 0.02
    shown = thermocline("inspect", pack).out
    assert all(f"on {name}\n" in shown for name in texts)
    ran = thermocline("run", "-m", pack, "--sparsity", "predict", "-n", "2", "x")
    assert ran.code == 0 and ran.err.count("they were measured on") == 1 and "french" in ran.err
    assert (
        "measured on" not in thermocline("run", "-m", pack, "--sparsity", "predict", "-n", "2", "-q", "x").err
    )


def test_without_time_a_trial_reads_one_window_of_each_text_and_is_the_last(
    thermocline: Thermocline, pack: Path
) -> None:
    """`--minutes 4` took 26 on a busy machine: fits, texts, windows and trials all went on after it."""
    ran = thermocline("train", pack, "--minutes", "0", *QUICK)
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["tried"] == 1 and {text["name"] for text in said["texts"]} == MIX
    assert said["tokens"] == 5 * 31
    ran = thermocline("train", pack, "--minutes", "0", "--kind", "svd", *QUICK)
    assert ran.code == 2 and "--minutes" in ran.err and not (pack / FILE).exists()


@pytest.mark.oracle
def test_a_fit_that_takes_too_long_is_given_up_and_the_cheap_ones_stay(
    thermocline: Thermocline, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def slow(
        a: LayerSamples,
        rank: int,
        seed: int,
        threads: int,
        step: Callable[[], None] = lambda: None,
        device: str = "cpu",
    ) -> None:
        begun.append(rank)
        for _ in range(100):
            clock[0] += 1.0  # seconds
            step()
        raise AssertionError("it went on")

    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(fit_mlp, "fit", slow)
    argv = ("--max-kld", "1", "--max-ppl", "99", "--minutes", "1")
    ran = thermocline("train", pack, *argv, *QUICK)
    assert ran.code == 0 and len(begun) == 2, ran.err  # of each layer one
    assert clock[0] < 60


def test_exact_is_kept_where_it_reads_less(
    thermocline: Thermocline, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of these neurons are active, without a pattern: no predictor pays."""
    monkeypatch.setattr(fit_mlp, "STEPS", 60)
    ran = thermocline("train", pack, "--max-kld", "1e-6", *QUICK[:4], "-t", "1")
    assert ran.code == 0, ran.err
    assert "exact is the better choice" in ran.err and not (pack / FILE).exists()


def test_predictors_of_random_text_are_measured_on_a_given_one(
    thermocline: Thermocline, pack: Path, tmp_path: Path
) -> None:
    (tmp_path / "held").write_text("abcdefgh " * 40)
    argv = ("--kind", "sign", "--max-kld", "1", "--max-ppl", "100", "--text", tmp_path / "held", *QUICK)
    ran = thermocline("train", pack, *argv)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["tokens"] == 2 * 31


def test_what_was_not_reached_is_an_error_and_nothing_is_written(
    thermocline: Thermocline, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "meets", lambda verdict, request: False)
    ran = thermocline("train", pack, "--kind", "sign", *QUICK)
    assert ran.code == 2 and "--max-kld" in ran.err and not (pack / FILE).exists()


def test_ctrl_c_leaves_no_half_file(
    thermocline: Thermocline, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "search", interrupt)
    before = sorted(p.name for p in pack.iterdir())
    assert thermocline("train", pack, "--kind", "sign", *QUICK).code == 130
    assert sorted(p.name for p in pack.iterdir()) == before


def test_without_profile_or_samples_the_command_that_makes_them_is_named(
    thermocline: Thermocline, pack: Path, tiny_pack: Path
) -> None:
    assert "thermocline profile" in thermocline("train", tiny_pack).err
    (pack / "samples.safetensors").unlink()
    ran = thermocline("train", pack)
    assert ran.code == 2 and "--samples" in ran.err


def test_samples_of_another_pack_are_refused(thermocline: Thermocline, pack: Path, tiny_pack: Path) -> None:
    for name in ("pack.json", "weights.bin", "checksums.bin"):
        shutil.copy(tiny_pack / name, pack / name)
    ran = thermocline("train", pack)
    assert ran.code == 3 and "made for another pack" in ran.err


def test_a_model_whose_neurons_are_never_zero_is_refused(thermocline: Thermocline, tmp_path: Path) -> None:
    source = tiny.hf_directory(tmp_path / "hf", hidden_act="silu")
    assert main.main(["pack", str(source), "-o", str(tmp_path / "p"), "--format", "f32", "-q"]) == 0
    ran = thermocline("train", tmp_path / "p")
    assert ran.code == 6 and "silu" in ran.err


def test_without_torch_only_training_is_refused(
    thermocline: Thermocline, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_mlp, "available", lambda: False)
    ran = thermocline("train", pack, "--kind", "mlp", *QUICK)
    assert ran.code == 6 and "[train]" in ran.err
    ran = thermocline("train", pack, "--kind", "sign", "--max-kld", "1", "--max-ppl", "99", *QUICK)
    assert ran.code == 0, ran.err


def test_after_the_deadline_only_the_price_that_misses_least_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "meets", lambda at, r: False)
    assert train.search(lambda price: None, None, 0.0)[::2] == (len(PRICES) - 1, 1)  # type: ignore


def test_the_search_ends_at_the_lowest_price_that_keeps_to_what_was_asked() -> None:
    """A judge that passes from one price on: bisection finds it, wherever it is."""
    for wanted in (0, 7, calibrate.TYPICAL, len(PRICES) - 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "meets", lambda at, r, wanted=wanted: at >= wanted)
            judge = lambda price: price  # noqa: E731
            price, _, tried = train.search(judge, None, float("inf"))  # type: ignore
            assert price == wanted and tried <= 7
            for near in (0, wanted, max(0, wanted - 3), min(len(PRICES) - 1, wanted + 2)):
                price, _, tried = train.search(judge, None, float("inf"), near)  # type: ignore
                assert price == wanted and tried <= (12 if near == 0 else 7)
