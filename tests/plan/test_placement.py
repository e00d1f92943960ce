"""Small problems that brute force can answer: the MILP finds the best placement, greedy only sometimes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thermocline.plan import solver
from thermocline.plan.cost import Columns
from thermocline.plan.solver import Budget, Group, greedy, group, milp, solve, totals

PAGE = 4096


def columns(us: list[float], vram: list[int], ram: list[int]) -> Columns:
    n = len(us)
    whole, zero = np.zeros(n, np.int64), np.zeros(n)
    return Columns(
        np.zeros(n, bool), np.zeros(n, bool), whole, whole, np.zeros(n, bool), np.array(vram), np.array(ram),
        zero, np.array(us), zero, zero,
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Group], Budget]:
    """Up to 4 layers, some alike, of up to 5 columns, and a budget near what they take."""
    small = st.integers(0, 40)
    layers: list[Columns] = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 5))
        us = [float(draw(st.integers(1, 1000))) for _ in range(n)]
        vram, ram = ([PAGE * draw(small) for _ in range(n)] for _ in range(2))
        layers.append(columns(us, vram, ram))
        if draw(st.booleans()) and len(layers) < 4:
            layers.append(layers[-1])
    groups, _ = group(layers, [x.us for x in layers])
    return groups, Budget(PAGE * draw(st.integers(0, 120)), PAGE * draw(st.integers(0, 120)))


def brute_force(groups: list[Group], budget: Budget) -> float | None:
    """The least value of all choices that fit."""
    ways = [itertools.combinations_with_replacement(range(len(g.columns)), g.count) for g in groups]
    best = None
    for picks in itertools.product(*ways):
        value, vram, ram = totals(groups, picks)
        if vram <= budget.vram_bytes and ram <= budget.ram_bytes and (best is None or value < best):
            best = value
    return best


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_solver_finds_what_brute_force_finds(problem: tuple[list[Group], Budget]) -> None:
    groups, budget = problem
    best, found = brute_force(groups, budget), solve(groups, budget, time_limit=5, gap=0.0)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert found.value == pytest.approx(best, abs=1e-6)
        value, vram, ram = totals(groups, found.picks)
        assert vram <= budget.vram_bytes and ram <= budget.ram_bytes and value == found.value


@settings(max_examples=100, deadline=None)
@given(problems())
def test_greedy_is_never_better_and_never_over_the_budget(problem: tuple[list[Group], Budget]) -> None:
    groups, budget = problem
    oracle, found = greedy(groups, budget), milp(groups, budget, time_limit=5, gap=0.0)  # without its help
    if oracle is not None:
        _, vram, ram = totals(groups, oracle.picks)
        assert vram <= budget.vram_bytes and ram <= budget.ram_bytes
        assert found is not None and found.value <= oracle.value + 1e-6
        assert found.bound <= oracle.value + 1e-6


def test_greedy_can_be_worse() -> None:
    """One small bargain keeps it from the large one: else the MILP would be for nothing."""
    small = columns([100.0, 80.0], [0, PAGE], [0, 0])
    large = columns([100.0, 50.0], [0, 3 * PAGE], [0, 0])
    groups, _ = group([small, large], [small.us, large.us])
    budget = Budget(3 * PAGE, 0)
    oracle, best = greedy(groups, budget), solve(groups, budget)
    assert oracle is not None and best is not None
    assert (oracle.value, best.value, best.greedy) == (180.0, 150.0, 180.0)


def test_dominated_columns_are_left_out_and_one_of_equals_stays() -> None:
    value, vram, ram = np.array([5.0, 5.0, 6.0, 4.0]), np.array([2, 2, 2, 3]), np.array([1, 1, 1, 1])
    assert solver.undominated(value, vram, ram).tolist() == [0, 3]


def test_like_layers_are_one_group() -> None:
    x, y = columns([1.0, 2.0], [1, 0], [0, 0]), columns([1.0, 3.0], [1, 0], [0, 0])
    groups, of = group([x, y, x], [x.us, y.us, x.us])
    assert ([g.count for g in groups], of) == ([2, 1], [0, 1, 0])


def test_a_time_limit_of_nothing_leaves_greedys_answer() -> None:
    rng = np.random.default_rng(0)
    layers = [
        columns(
            sorted(rng.uniform(1, 1000, 40), reverse=True),
            sorted((PAGE * rng.integers(0, 4000, 40)).tolist()),
            [0] * 40,
        )
        for _ in range(40)
    ]
    groups, _ = group(layers, [x.us for x in layers])
    found = solve(groups, Budget(PAGE * 40_000, 0), time_limit=0.0)
    assert found is not None and found.value <= (found.greedy or 0.0)
