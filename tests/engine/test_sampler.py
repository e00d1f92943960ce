"""The sampler filters in the documented order, draws reproducibly, and refuses nonsense by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from thermocline.engine.sampler import SORTED, Sampler, SamplingParams, TokenLogprobs, best, kept
from thermocline.errors import NumericalError, UsageError
from thermocline.ops.interface import F32

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}  # every filter off


def logits_of(*p: float) -> F32:
    return np.log(np.array(p, np.float32))


def noise(seed: int = 0, vocab: int = 1000) -> F32:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def draws(params: SamplingParams, n: int = 50) -> list[int]:
    sampler = Sampler(params, 1000)
    return [sampler.sample(noise(i)) for i in range(n)]


def test_temperature_0_takes_the_lowest_id_of_the_largest() -> None:
    sampler = Sampler(SamplingParams(temperature=0), 4)
    assert sampler.sample(np.array([1, 5, 5, 2], np.float32)) == 1


def test_same_seed_same_tokens_20_of_20() -> None:
    assert len({tuple(draws(SamplingParams(seed=7))) for _ in range(20)}) == 1


def test_another_seed_gives_other_tokens() -> None:
    assert draws(SamplingParams(seed=7)) != draws(SamplingParams(seed=8))


def test_without_a_seed_the_chosen_one_is_reported_and_repeats_the_run() -> None:
    first = Sampler(SamplingParams(), 1000)
    tokens = [first.sample(noise(i)) for i in range(50)]
    assert tokens == draws(SamplingParams(seed=first.seed))
    assert first.seed != Sampler(SamplingParams(), 1000).seed


def test_draws_follow_the_probabilities() -> None:
    sampler = Sampler(SamplingParams(seed=1, **OPEN), 3)
    counts = np.bincount([sampler.sample(logits_of(0.6, 0.3, 0.1)) for _ in range(6000)], minlength=3)
    assert np.abs(counts / 6000 - [0.6, 0.3, 0.1]).max() < 0.03  # 4.7 standard deviations


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.0}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # top-p sees what top-k left: 0.45 of 0.70 is 0.64
    ],
)
def test_each_filter_keeps_what_it_documents(changed: dict[str, Any], left: list[int]) -> None:
    params = SamplingParams(**{**OPEN, **changed})
    assert kept(logits_of(0.45, 0.25, 0.15, 0.10, 0.05), params).tolist() == left


@pytest.mark.parametrize("top_k", [0, 3, 40])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.4])
def test_filters_are_what_one_would_do_by_hand(top_k: int, top_p: float, min_p: float) -> None:
    for seed in range(10):
        x = noise(seed)
        left = sorted(range(1000), key=lambda i: -x[i])[: top_k or None]
        odds = [math.exp(float(x[i])) for i in left]
        total, before, nucleus = sum(odds), 0.0, 0
        while nucleus < len(left) and before < top_p * total:
            before += odds[nucleus]
            nucleus += 1
        expected = [i for i, o in zip(left[:nucleus], odds, strict=False) if o >= min_p * odds[0]]
        assert kept(x, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)).tolist() == expected


def sorted_whole(x: F32, params: SamplingParams, draws: Iterable[float]) -> list[int]:
    """Return the tokens of these draws as one would find them by sorting everything."""
    order = np.argsort(-x, kind="stable")[: params.top_k or None]
    below = x[order].astype(np.float64) - x.max()
    sums = np.cumsum(np.exp(below))
    n = int(np.searchsorted(sums, params.top_p * sums[-1])) + 1 if params.top_p < 1 else len(order)
    n = min(n, int((below >= math.log(params.min_p)).sum()) if params.min_p else n)
    sums = np.cumsum(np.exp(below[:n] / params.temperature))
    return [int(order[np.searchsorted(sums, u * sums[-1], side="right")]) for u in draws]


def shapes(vocab: int) -> dict[str, F32]:
    """Logits of a large vocabulary, from nearly certain to all alike, with all that upsets bins."""
    rng = np.random.default_rng(0)
    flat = rng.standard_normal(vocab).astype(np.float32)
    peaked = (2.5 * flat).astype(np.float32)
    peaked[:200] += np.linspace(0, 14, 200, dtype=np.float32)
    banned, far = flat.copy(), flat.copy()
    banned[::3] = -math.inf
    far[5], far[7], far[9] = 80, -1e38, -1e30
    ties = np.round(flat * 2).astype(np.float32)
    alike = np.full(vocab, 0.5, np.float32)
    return {"flat": flat, "peaked": peaked, "banned": banned, "far": far, "ties": ties, "alike": alike}


@pytest.mark.parametrize("shape", shapes(1000))
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 30.0},
        {"top_p": 0.9},
        {"top_p": 0.5, "temperature": 0.6},
        {"top_k": 9000, "top_p": 0.8},
        {"min_p": 0.01},
        {"min_p": 0.01, "top_p": 0.9},
    ],
)
def test_no_vocabulary_is_sorted_and_seeds_draw_as_if_it_were(
    shape: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send top_k 0 and min_p 0: 152,000 words took 11 to 33 ms a token to sort. 100 draws of each."""
    params = SamplingParams(**{**OPEN, "seed": 11, **changed})
    x = shapes(20_000)[shape]
    expected = sorted_whole(x, params, np.random.Generator(np.random.Philox(11)).random(100))
    sizes: list[int] = []
    argsort = np.argsort

    def spy(a: F32, **how: Any) -> Any:
        sizes.append(len(a) if a.min() < a.max() else 0)  # equals are in order already
        return argsort(a, **how)

    monkeypatch.setattr(np, "argsort", spy)
    sampler = Sampler(params, len(x), banned=tuple(np.flatnonzero(np.isinf(x)).tolist()))
    logits = np.nan_to_num(x, neginf=0)
    assert [sampler.sample(logits) for _ in range(100)] == expected
    assert max(sizes) <= SORTED


def test_temperature_comes_after_the_filters() -> None:
    """At temperature 100 all are about equally likely, but only what min-p kept before can be drawn."""
    sampler = Sampler(SamplingParams(seed=0, **{**OPEN, "min_p": 0.5, "temperature": 100.0}), 4)
    assert {sampler.sample(logits_of(0.5, 0.3, 0.15, 0.05)) for _ in range(200)} == {0, 1}


@pytest.mark.parametrize("k", [0, 1, 2, 7, 40, 999, 1000, 5000])
@pytest.mark.parametrize("kinds", [2, 50, 10**6])
def test_best_is_a_stable_sort_whatever_the_ties(k: int, kinds: int) -> None:
    x = np.random.default_rng(k).integers(0, kinds, 1000).astype(np.float32)
    expected = sorted(range(1000), key=lambda i: (-x[i], i))[: k or None]
    assert best(x, k).tolist() == expected


def test_repeat_penalty_pushes_recent_tokens_down_on_both_sides_of_zero() -> None:
    params = SamplingParams(temperature=0, repeat_penalty=2.0)
    assert Sampler(params, 2, prompt=[0]).sample(np.array([3, 2], np.float32)) == 1
    assert Sampler(params, 2, prompt=[0]).sample(np.array([-2, -3], np.float32)) == 1
    assert Sampler(params, 2, prompt=[]).sample(np.array([3, 2], np.float32)) == 0


def test_penalties_forget_what_left_the_window() -> None:
    params = SamplingParams(temperature=0, presence_penalty=5.0, repeat_last_n=2)
    x = np.array([3, 2, 1], np.float32)
    assert Sampler(params, 3, prompt=[0, 1, 1]).sample(x) == 0
    assert Sampler(params, 3, prompt=[1, 0, 1]).sample(x) == 2
    sampler = Sampler(params, 3)
    assert [sampler.sample(x) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_frequency_penalty_counts_and_presence_penalty_does_not() -> None:
    x = np.array([3.0, 1.5], np.float32)
    assert Sampler(SamplingParams(temperature=0, frequency_penalty=1.0), 2, prompt=[0]).sample(x) == 0
    assert Sampler(SamplingParams(temperature=0, frequency_penalty=1.0), 2, prompt=[0, 0]).sample(x) == 1
    assert Sampler(SamplingParams(temperature=0, presence_penalty=1.0), 2, prompt=[0, 0]).sample(x) == 0


def test_repeat_last_n_of_minus_1_is_everything_and_0_is_nothing() -> None:
    x = np.array([3.0, 2.5], np.float32)
    far = [0] + [5] * 500
    for last_n, token in ((-1, 1), (0, 0), (64, 0)):
        params = SamplingParams(temperature=0, presence_penalty=1.0, repeat_last_n=last_n)
        assert Sampler(params, 6, prompt=far).sample(np.append(x, [-9] * 4).astype(np.float32)) == token


def test_a_bias_moves_and_minus_infinity_bans() -> None:
    x = np.array([3, 2, 1], np.float32)
    assert Sampler(SamplingParams(temperature=0, logit_bias={2: 5}), 3).sample(x) == 2
    assert Sampler(SamplingParams(temperature=0, logit_bias={0: -math.inf}), 3).sample(x) == 1
    assert Sampler(SamplingParams(temperature=0), 3, banned=(0, 1)).sample(x) == 2


def test_the_callers_logits_stay_as_they_are() -> None:
    x = noise()
    before = x.copy()
    params = SamplingParams(repeat_penalty=1.5, logit_bias={1: 4.0}, seed=0)
    Sampler(params, 1000, prompt=[1, 2]).sample(x)
    assert (x == before).all()


def test_what_is_banned_is_never_kept_however_many_are_asked_for() -> None:
    """A draw next to 1 may be rounded up to it, and would then be of the last that was kept."""
    x = np.array([-math.inf, 1.0, -math.inf, 0.0], np.float32)
    for top_k in (0, 3):
        assert kept(x, SamplingParams(top_k=top_k, top_p=1, min_p=0)).tolist() == [1, 3]


def test_logprobs_are_the_models_own() -> None:
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={2: 100.0})
    sampler = Sampler(params, 3)
    x = logits_of(0.5, 0.3, 0.2)
    report = TokenLogprobs.of(x, sampler.sample(x), 2)
    assert report.logprob == pytest.approx(math.log(0.2), abs=1e-6)
    assert [i for i, _ in report.top] == [0, 1]
    assert report.top[0][1] == pytest.approx(math.log(0.5), abs=1e-6)


def test_logprobs_of_0_is_the_chosen_token_alone() -> None:
    assert TokenLogprobs.of(logits_of(0.5, 0.3, 0.2), 1, 0).top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_numbers_are_a_numerical_error(bad: float) -> None:
    x = noise()
    x[17] = bad
    with pytest.raises(NumericalError, match="token 17"):
        Sampler(SamplingParams(temperature=0), 1000).sample(x)


@pytest.mark.parametrize("temperature", [1e-308, 1e-6, 1e6, 1e308])
def test_no_temperature_overflows(temperature: float) -> None:
    token = Sampler(SamplingParams(temperature=temperature, seed=0), 1000).sample(noise())
    assert 0 <= token < 1000
    everything: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": {3: -math.inf}}
    params = SamplingParams(temperature=temperature, seed=1, **everything)
    token = Sampler(params, 50_000).sample(noise(vocab=50_000))
    assert 0 <= token < 50_000 and token != 3


@pytest.mark.parametrize(
    "changed",
    [
        {"repeat_penalty": 5e-324},
        {"repeat_penalty": 1e308},
        {"presence_penalty": -1e308, "frequency_penalty": -1e308},
        {"presence_penalty": 1e308, "frequency_penalty": -1e308},
        {"logit_bias": {1: 1e308, 2: -1e308, 3: -math.inf}, "repeat_penalty": 1e-300},
    ],
)
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_no_penalty_overflows(changed: dict[str, Any], temperature: float) -> None:
    """A penalty of 5e-324 left no token to draw from, and ended the engine with every request in it."""
    sampler = Sampler(SamplingParams(temperature=temperature, seed=0, **changed), 1000, prompt=range(4))
    tokens = [sampler.sample(noise()) for _ in range(9)]
    assert all(0 <= t < 1000 for t in tokens) and 3 not in tokens[1:] * ("logit_bias" in changed)


@pytest.mark.parametrize("value", [1e39, 1e308])
def test_a_huge_bias_is_the_largest(value: float) -> None:
    assert Sampler(SamplingParams(logit_bias={7: value}, seed=0), 1000).sample(noise()) == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", True),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", "a bare string"),
        ("stop", ("",)),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("grammar", "[0-9]+"),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 10**400}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_a_refusal_names_the_value_and_the_range() -> None:
    with pytest.raises(UsageError, match=r"top_p is 1\.5; it must be at least 0 and at most 1"):
        SamplingParams(top_p=1.5)


def test_a_bias_for_a_token_the_model_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="0 to 999"):
        Sampler(SamplingParams(logit_bias={1000: 1.0}), 1000)


def test_banning_every_token_is_refused() -> None:
    with pytest.raises(UsageError, match="every token"):
        Sampler(SamplingParams(), 2, banned=(0, 1)).sample(np.zeros(2, np.float32))
