"""`--read-budget`: no token of an answer reads more, and what is left out is what has least weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_disk_experts as core
from test_disk_experts import ACTIVE, EXPERTS, F32, Bound

from thermocline import _native
from thermocline.model.modes import SPARSITIES
from thermocline.model.spec import Router

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
