"""`bench --replay`: policies against what they are by definition; times against the planner's."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline import _native
from thermocline.cli.commands.bench import CACHE_POLICIES
from thermocline.machine.tiers import BUNDLED, read_tiers
from thermocline.offline.cache_policies import POLICIES, next_uses
from thermocline.offline.need_trace import Trace
from thermocline.offline.replay import ReplayCounts, even_shares, replay, times
from thermocline.plan import cost, planner
from thermocline.plan.disk.cache_split import Fetch, Share
from thermocline.plan.hotness import Curve
from thermocline.plan.problem import Ask, Problem
from thermocline.plan.subject import of_pack

Run = Callable[..., Any]
Sets = list[set[int]]


def missed(policy: str, sets: Sets, neurons: int, slots: int, frequency: Any = None) -> list[list[int]]:
    needs = np.zeros((len(sets), neurons), np.bool_)
    for row, wanted in zip(needs, sets, strict=True):
        row[list(wanted)] = True
    made = POLICIES[policy](needs, slots, np.zeros(neurons) if frequency is None else frequency, 0)
    return [made.step(np.flatnonzero(row)).tolist() for row in needs]


def random_sets(seed: int, steps: int, neurons: int, skew: float = 1.0) -> Sets:
    rng = np.random.default_rng(seed)
    p = 0.6 * (1 + np.arange(neurons)) ** -skew
    return [set(np.flatnonzero(rng.random(neurons) < p).tolist()) for _ in range(steps)]


def total(found: list[list[int]]) -> int:
    return sum(map(len, found))


def test_every_policy_the_options_name_is_there() -> None:
    assert tuple(POLICIES) == CACHE_POLICIES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [1, 3, 8, 20])
def test_no_policy_holds_more_than_its_slots_or_forgets_what_was_there(policy: str, slots: int) -> None:
    """What is asked for twice in a row, and fits, is found the second time."""
    sets = random_sets(slots, 60, 40)
    found = missed(policy, sets, 40, slots)
    assert all(set(m) <= s and m == sorted(m) for m, s in zip(found, sets, strict=True))
    assert found[0] == sorted(n for n in sets[0] if n >= slots)  # the hottest are there at first
    for wanted, first in zip(sets, found, strict=True):
        assert len(wanted) - len(first) <= slots  # found: they were there
    assert total(missed(policy, sets, 40, 40)) == 0


def fewest_misses(sets: Sets, slots: int) -> int:
    """By trying every content that a cache can have."""

    @functools.cache
    def best(step: int, inside: frozenset[int]) -> int:
        if step == len(sets):
            return 0
        there = inside | sets[step]
        kept = map(frozenset, itertools.combinations(sorted(there), min(slots, len(there))))
        return len(sets[step] - inside) + min(best(step + 1, k) for k in kept)

    return best(0, frozenset(range(slots)))


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_optimum_and_nobody_is_below_it(seed: int) -> None:
    sets = random_sets(seed, 9, 7, skew=0.7)
    for slots in (1, 2, 3, 4):
        optimum = fewest_misses(sets, slots)
        assert total(missed("belady", sets, 7, slots)) == optimum
        for policy in POLICIES:
            assert total(missed(policy, sets, 7, slots)) >= optimum, policy


def test_the_next_use_is_the_first_step_from_there_on() -> None:
    needs = np.array([[0, 1, 0], [1, 0, 0], [0, 1, 0]], np.bool_)
    assert next_uses(needs).tolist() == [[1, 0, 3], [1, 2, 3], [3, 2, 3], [3, 3, 3]]


@pytest.mark.parametrize("slots", [2, 5, 11])
def test_lru_keeps_what_was_used_last(slots: int) -> None:
    """Neurons are asked for in ascending order, as a call does: one that is needed later in the step can lose
    its slot to one that is needed before it."""
    sets = random_sets(7, 80, 24, skew=0.6)
    last = {n: -1 for n in range(slots)}
    expected: list[list[int]] = []
    for step, wanted in enumerate(sets):
        expected.append([])
        for n in sorted(wanted):
            if n not in last:
                expected[-1].append(n)
                oldest = min(last, key=lambda m: (last[m], -m))
                if last[oldest] == step:
                    continue  # all slots are of this step: it passes through
                del last[oldest]
            last[n] = step
    assert missed("lru", sets, 24, slots) == expected


def test_a_step_of_many_misses_evicts_nothing_that_scores_higher() -> None:
    """A call has 1024 slots of its own. Those that found none took a better record's slot, before the same
    step needed that: hits of a layer with 4000 misses were half of what a fixed set finds."""
    neurons, slots = 6000, 1500
    assert neurons - slots > 2 * _native.limits().stream_slots
    cache = _native.CacheReplay("pinned", neurons=neurons, hot=0, slots=slots, likely=None)
    out = np.empty(neurons, np.int32)
    for _ in range(3):
        n = cache.step(np.arange(neurons, dtype=np.int32), out)
        assert sorted(out[:n]) == list(range(slots, neurons))


def test_a_step_that_names_no_set_of_neurons_is_refused() -> None:
    cache = _native.CacheReplay("lfu", neurons=10, hot=0, slots=3, likely=None)
    out = np.empty(10, np.int32)
    for wrong in ([3, 3], [4, 2], [-1], [10]):
        with pytest.raises(ValueError, match="ascending"):
            cache.step(np.array(wrong, np.int32), out)
    with pytest.raises(ValueError, match="too short"):
        cache.step(np.arange(4, dtype=np.int32), out[:3])
    with pytest.raises(ValueError, match="unknown cache policy"):
        _native.CacheReplay("random", neurons=10, hot=0, slots=3, likely=None)
    with pytest.raises(ValueError, match="more slots"):
        _native.CacheReplay("lfu", neurons=10, hot=8, slots=3, likely=None)


def test_lfu_forgets_old_uses_and_lru_forgets_at_once() -> None:
    """Neuron 9 was needed 20 times; then 8 is, once. LRU gives up 9 for it, LFU later."""
    busy: Sets = [{9}] * 20 + [{8}, {9}]
    assert missed("lru", busy, 10, 1)[-1] == [9]
    assert missed("lfu", busy, 10, 1)[-1] == []
    later: Sets = [{9}] * 20 + [{8}] * int(3 * _native.limits().half_life) + [{9}]
    assert missed("lfu", later, 10, 1)[-1] == [9]


def test_lfu_begins_with_what_a_profile_knows() -> None:
    """One use of a neuron that is hardly ever needed does not push out one that mostly is."""
    sets: Sets = [{5}, {0}]
    assert missed("lfu", sets, 10, 1)[-1] == [0]
    frequency = np.array([0.9, *[0.01] * 9])
    assert missed("lfu", sets, 10, 1, frequency)[-1] == []


def test_s3fifo_keeps_what_is_used_again_through_a_scan() -> None:
    sets: Sets = [{0, 1, 2, 3}] * 4 + [{n} for n in range(20, 80)] + [{0, 1, 2, 3}]
    assert missed("s3fifo", sets, 80, 20)[-1] == []
    assert missed("lru", sets, 80, 20)[-1] == [0, 1, 2, 3]


# ---- whole traces


def a_trace(tokens: int = 24, neurons: int = 40, layers: int = 2, experts: int = 1) -> Trace:
    active = []
    for i in range(layers):
        bits = np.zeros((tokens, neurons), np.bool_)
        for row, wanted in zip(bits, random_sets(i, tokens, neurons), strict=True):
            row[list(wanted)] = True
        active.append(np.packbits(bits, axis=1, bitorder="little"))
    return Trace(tokens, "a test", "exact", 0, neurons, experts, tuple(active))


def test_what_is_pinned_is_always_found_and_the_policy_has_the_rest() -> None:
    t, nothing = a_trace(), [np.zeros(40)] * 2
    counts = replay(t, [Share(8, 6), Share(40, 0)], nothing, "lru")
    assert counts.needed.T.tolist() == [t.layer(i).sum(1).tolist() for i in range(2)]
    assert counts.missed[:, 1].sum() == 0
    cold = [{n - 8 for n in np.flatnonzero(row).tolist() if n >= 8} for row in t.layer(0)]
    assert counts.missed[:, 0].tolist() == [len(m) for m in missed("lru", cold, 32, 6)]
    assert counts.hit_rate == 1 - counts.missed.sum() / counts.needed.sum()


def test_every_expert_has_places_of_its_own() -> None:
    t, some = a_trace(experts=4), np.linspace(0.9, 0.1, 40)
    shares = [Share(0, 3), Share(4, 2), Share(10, 0), Share(0, 5)] * 2
    counts = replay(t, shares, [some] * 2, "lfu")
    for i in range(2):
        found = [0] * t.tokens
        for e, s in enumerate(shares[:4]):
            first = 10 * e + s.hot
            cold = [
                {n - first for n in np.flatnonzero(row).tolist() if first <= n < 10 * e + 10}
                for row in t.layer(i)
            ]
            own = missed("lfu", cold, 10 - s.hot, s.quota, some[first : 10 * e + 10]) if s.quota else []
            found = [a + len(b) for a, b in zip(found, own or [[]] * t.tokens, strict=True)]
        assert counts.missed[:, i].tolist() == found


def test_parts_of_a_trace_side_by_side_need_what_any_of_them_needs() -> None:
    t = a_trace()
    counts = replay(t, even_shares(40, 2, 0.5), [np.zeros(40)] * 2, "lru", batch=3)
    for i in range(2):
        bits = t.layer(i)
        assert counts.needed[:, i].tolist() == (bits[:8] | bits[8:16] | bits[16:]).sum(1).tolist()


SLOW = {"read_gbs": 1.0, "reads_per_s": 1e4}


def machine_file(path: Path, disk: dict[str, float] | None) -> Path:
    value = json.loads((BUNDLED / "rtx4090-i9-13900k.json").read_text())
    value["cpu"]["kernels"]["f32"] = value["cpu"]["kernels"]["f16"]
    path.write_text(json.dumps(value | {"disk": disk, "gpu": None}))
    return path


@pytest.fixture
def problem(tiny_pack: Path, tmp_path: Path) -> Problem:
    s = of_pack(tiny_pack, "exact", Curve())
    tiers = read_tiers(str(machine_file(tmp_path / "machine.json", SLOW)))
    return Problem(s.spec, s.sizes, s.hotness, tiers, Ask(64))


def test_without_misses_a_step_takes_what_plan_says(problem: Problem) -> None:
    p = problem
    work = p.work()
    needed = np.array([[float(x.reads.bundles[-1]) for x in p.layers(work)]])
    said = planner.plan(p.spec, p.sizes, p.hotness, p.tiers, p.ask).predicted[1]
    took = times(p, ReplayCounts(needed, np.zeros_like(needed)))
    assert took.us[0] == pytest.approx(1e6 / said.tokens_per_s, rel=1e-6)
    assert took.waited_us[0] == 0


def test_misses_cost_what_plan_says_they_do(problem: Problem) -> None:
    """The planner's expectation of one layer, and a step in which exactly that happens."""
    work = problem.work()
    v = problem.speeds(work)
    layer = next(problem.layers(work))
    needed, missed = float(layer.reads.bundles[-1]), 20.0
    us, waited = cost.step_us(layer, v, work, np.array([needed]), np.array([missed]))
    cpu, disk = cost.stored_times(layer, v, work, [Fetch(missed, missed, missed * layer.sizes.record_bytes)])
    assert (us[0], waited[0]) == pytest.approx((cpu + disk, disk), rel=1e-6)
    assert waited[0] > missed * 1e6 / SLOW["reads_per_s"] - 100


# ---- the command


@pytest.fixture
def replayed(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> Callable[..., Any]:
    hardware = machine_file(tmp_path / "machine.json", SLOW)
    path = tmp_path / "a.trace"
    assert thermocline("bench", "-m", tiny_pack, "--trace", path, "-n", 16, "-q").code == 0

    def run(*argv: Any) -> Any:
        return thermocline("bench", "-m", tiny_pack, "--replay", path, "--hardware", hardware, *argv)

    return run


def test_a_replay_tells_each_policy_at_each_size(replayed: Run) -> None:
    rows = json.loads(replayed("-o", "json", "-q").out)
    assert {r["policy"] for r in rows} == set(POLICIES) and len(rows) == 9 * len(POLICIES)
    for policy in POLICIES:
        own = [r for r in rows if r["policy"] == policy]
        assert all(a["places"] < b["places"] for a, b in itertools.pairwise(own))
        assert own[0]["hit_rate"] < own[-1]["hit_rate"] and own[0]["tokens_per_s"] < own[-1]["tokens_per_s"]
    best = {r["places"]: r["hit_rate"] for r in rows if r["policy"] == "belady"}
    assert all(r["hit_rate"] <= best[r["places"]] for r in rows)


def test_a_budget_is_divided_as_run_divides_it(replayed: Run) -> None:
    """A whole model in memory misses nothing; less than the least is refused with what would do."""
    rows = json.loads(replayed("--budgets", "4", "--policy", "lru,belady", "-o", "json").out)
    assert [(r["policy"], r["budget_gib"], r["places"], r["hit_rate"]) for r in rows] == [
        ("lru", 4.0, 1.0, 1.0),
        ("belady", 4.0, 1.0, 1.0),
    ]
    ran = replayed("--budgets", "0.001")
    assert ran.code == 5 and "use --ram" in ran.err


@pytest.mark.oracle
def test_a_table_for_people_and_a_picture(replayed: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install 'thermocline[plot]'")
    ran = replayed("--policy", "lfu", "--plot", tmp_path / "a.svg", "--batch", "2")
    assert ran.code == 0 and ran.out.count("lfu") == 9
    assert "16 tokens of random, seed 1 · batch 2" in ran.out
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_the_reference_lists_the_keys_of_a_replay(replayed: Run) -> None:
    text = (Path(__file__).parents[2] / "docs/reference/json.md").read_text()
    section = text.split("\n## `bench --replay`\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {key for cell in cells for key in re.findall("`(.+?)`", cell)}
    assert named == set(json.loads(replayed("--policy", "lru", "-o", "json").out)[0])


def test_more_sequences_than_tokens_and_a_machine_without_a_disk_are_refused(
    replayed: Run, tmp_path: Path
) -> None:
    ran = replayed("--batch", "17")
    assert ran.code == 2 and "16 tokens" in ran.err
    ran = replayed("--hardware", machine_file(tmp_path / "none.json", None))
    assert ran.code == 2 and "disk" in ran.err and ran.out == ""
