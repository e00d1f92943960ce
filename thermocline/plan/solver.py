"""Which placement each layer gets, within the memory there is: by MILP (HiGHS), with greedy as its oracle.

Every layer chooses one of its columns (`cost.layer_columns`); like layers choose together, by counts:

    min  Σ_g Σ_c us[g,c] · n[g,c]      n[g,c] whole: how many layers of group g are placed as column c
    s.t. Σ_c n[g,c] = layers of group g
         Σ Σ vram[g,c] · n[g,c] <= VRAM,   Σ Σ ram[g,c] · n[g,c] <= RAM

A column has its own time, synchronisation and the longest of three tiers included, so nothing is linearised,
and its own bytes, padding included. Its clusters on the GPU are the hottest and those on disk the coldest
by construction. The relaxation leaves at most two groups undecided, one for each memory: 80 layers take
a fraction of a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from thermocline.plan.cost import F64, I64, Columns

if TYPE_CHECKING:
    from highspy import Highs, HighsLp

UNIT = 4096.0  # of the memory rows: numbers near 1 to 10^8
GAP = 1e-3  # of the objective: less than a person can measure, or the machine model is good for
GAP_US = 0.5


@dataclass(frozen=True)
class Group:
    """`count` layers with the same columns. `value`: what is minimised, one an entry."""

    columns: Columns
    count: int
    value: F64


@dataclass(frozen=True)
class Budget:
    """Bytes that columns may take together."""

    vram_bytes: int
    ram_bytes: int


@dataclass(frozen=True)
class Choice:
    """The column of each layer, group by group, and what a solver says of it."""

    picks: tuple[tuple[int, ...], ...]  # [groups][layers of it]
    value: float
    bound: float  # nothing is below
    greedy: float | None = None  # the oracle's value, where it found something


def group(columns: Sequence[Columns], values: Sequence[F64]) -> tuple[list[Group], list[int]]:
    """(groups of equal layers, the group of each layer). Columns that others beat everywhere are left out."""
    groups: list[Group] = []
    of: list[int] = []
    seen: dict[bytes, int] = {}
    for x, value in zip(columns, values, strict=True):
        key = b"".join(
            np.ascontiguousarray(a).tobytes()
            for a in (value, x.vram_bytes, x.ram_bytes, x.gpu, x.disk, x.gates)
        )
        if key not in seen:
            seen[key] = len(groups)
            keep = undominated(value, x.vram_bytes, x.ram_bytes)
            groups.append(Group(x.pick(keep), 0, value[keep]))
        of.append(seen[key])
    return [Group(g.columns, of.count(i), g.value) for i, g in enumerate(groups)], of


def undominated(value: F64, vram: I64, ram: I64) -> I64:
    """Indices of columns that no other equals or beats in all three; of equal ones the first."""
    order = np.lexsort((ram, vram, value))  # whoever beats a column stands before it
    vram, ram = vram[order], ram[order]
    beaten = (vram[:, None] <= vram) & (ram[:, None] <= ram)
    beaten &= np.arange(len(order))[:, None] < np.arange(len(order))
    kept: I64 = np.sort(order[~beaten.any(axis=0)])
    return kept


def totals(groups: Sequence[Group], picks: Sequence[Sequence[int]]) -> tuple[float, int, int]:
    """(value, VRAM, RAM) of a choice, exactly."""
    value, vram, ram = 0.0, 0, 0
    for g, picked in zip(groups, picks, strict=True):
        for c in picked:
            value += float(g.value[c])
            vram += int(g.columns.vram_bytes[c])
            ram += int(g.columns.ram_bytes[c])
    return value, vram, ram


# ---- greedy: the oracle


def greedy(groups: Sequence[Group], budget: Budget) -> Choice | None:
    """From what takes the least, the step that saves the most for its bytes, again and again; None: no room.

    A step moves one layer to another of its columns. Bytes count as shares of the memory they are taken from.
    """
    layers = _layers(groups)
    picks = [_smallest(groups[i]) for i in layers]
    room = _room(groups, layers, picks, budget)
    return _improved(groups, picks, budget) if _spill(groups, layers, picks, room) else None


def _layers(groups: Sequence[Group]) -> list[int]:
    """The group of each layer, group by group."""
    return [i for i, g in enumerate(groups) for _ in range(g.count)]


def _improved(groups: Sequence[Group], picks: list[int], budget: Budget) -> Choice | None:
    """Steps that save time until there is none left to take; None where `picks` does not fit."""
    layers = _layers(groups)
    room = _room(groups, layers, picks, budget)
    if np.any(room < 0):
        return None
    prices = 1 / np.maximum(room, 1.0)
    steps = [_best_step(groups[i], pick, room, prices) for i, pick in zip(layers, picks, strict=True)]
    while True:
        at = max(range(len(layers)), key=lambda k: steps[k][0])
        rate, column = steps[at]
        if rate <= 0:
            break
        taken = _taken(groups[layers[at]], picks[at])[:, column]
        if np.all(taken <= room):
            room -= taken
            picks[at] = column
        steps[at] = _best_step(groups[layers[at]], picks[at], room, prices)
    grouped = tuple(
        tuple(p for i, p in zip(layers, picks, strict=True) if i == k) for k in range(len(groups))
    )
    return Choice(grouped, totals(groups, grouped)[0], -np.inf)


def fits(groups: Sequence[Group], budget: Budget) -> bool:
    """Whether greedy finds a placement."""
    layers = _layers(groups)
    picks = [_smallest(groups[i]) for i in layers]
    return _spill(groups, layers, picks, _room(groups, layers, picks, budget))


def _smallest(g: Group) -> int:
    """Nothing in VRAM, as little as possible in RAM."""
    return int(np.lexsort((g.value, g.columns.ram_bytes, g.columns.vram_bytes))[0])


def _room(groups: Sequence[Group], layers: Sequence[int], picks: Sequence[int], b: Budget) -> F64:
    """[VRAM, RAM] left; whole numbers below 2^53, so exact."""
    room = np.array([b.vram_bytes, b.ram_bytes], np.float64)
    for i, pick in zip(layers, picks, strict=True):
        room -= [groups[i].columns.vram_bytes[pick], groups[i].columns.ram_bytes[pick]]
    return room


def _taken(g: Group, pick: int) -> F64:
    """[2, columns]: what each column takes more than `pick`."""
    c = g.columns
    return np.stack([c.vram_bytes - c.vram_bytes[pick], c.ram_bytes - c.ram_bytes[pick]]).astype(np.float64)


def _spill(groups: Sequence[Group], layers: Sequence[int], picks: list[int], room: F64) -> bool:
    """Move layers to VRAM until RAM is kept: each as far as there is room. False where that is not enough."""
    for at, i in enumerate(layers):
        if room[1] >= 0:
            break
        taken = _taken(groups[i], picks[at])
        fits = np.flatnonzero(taken[0] <= room[0])
        if not len(fits):
            break
        picks[at] = int(fits[np.lexsort((taken[0][fits], taken[1][fits]))[0]])
        room -= taken[:, picks[at]]
    return bool(np.all(room >= 0))


def _best_step(g: Group, pick: int, room: F64, prices: F64) -> tuple[float, int]:
    """(time saved for its price, column) of the best step there is room for; 0: none."""
    taken = _taken(g, pick)
    saved = g.value[pick] - g.value
    saved[np.any(taken > room[:, None], axis=0) | (saved < 1e-9)] = 0.0
    rate = saved / np.maximum(prices @ np.maximum(taken, 0), 1e-12)
    return float(rate.max()), int(rate.argmax())


# ---- MILP


def solve(
    groups: Sequence[Group], budget: Budget, *, time_limit: float = 1.0, gap: float = GAP
) -> Choice | None:
    """The best choice: HiGHS's, or greedy's where the time limit left that ahead. None: nothing fits."""
    least = sum(g.count * int((g.columns.vram_bytes + g.columns.ram_bytes).min()) for g in groups)
    if min(budget.vram_bytes, budget.ram_bytes) < 0 or least > budget.vram_bytes + budget.ram_bytes:
        return None
    oracle = greedy(groups, budget)
    found = milp(groups, budget, oracle, time_limit=time_limit, gap=gap)
    if found is None or (oracle is not None and oracle.value < found.value):
        found = oracle
    return found if found is None or oracle is None else replace(found, greedy=oracle.value)


def milp(
    groups: Sequence[Group],
    budget: Budget,
    known: Choice | None = None,
    *,
    time_limit: float = 1.0,
    gap: float = GAP,
) -> Choice | None:
    """None where nothing fits, or nothing was found in time. `known`: a choice to begin from.

    First the relaxation: its bound, its rounding as another beginning, and its reduced costs. A column whose
    cost takes the bound above what is known is in no better choice, so HiGHS branches over the few that are
    left, and nothing is lost.
    """
    end = time.perf_counter() + time_limit
    relaxed = _highs(groups, budget, time_limit, gap, whole=False)
    if relaxed is None:
        return known
    counts, reduced, bound = relaxed
    known = _better(known, _rounded(groups, counts, budget))
    slack = np.inf if known is None else known.value - bound
    keep = [np.flatnonzero(r <= slack + GAP_US * 1e-3) for r in reduced]
    if known is not None and slack <= gap * abs(bound):
        return replace(known, bound=bound)
    few = [Group(g.columns.pick(k), g.count, g.value[k]) for g, k in zip(groups, keep, strict=True)]
    found = (
        _highs(few, budget, max(0.05, end - time.perf_counter()), gap, whole=True)
        if all(map(len, keep))
        else None
    )
    if found is not None:
        picks = tuple(
            tuple(int(c) for c in np.repeat(k, np.rint(n).astype(np.int64)))
            for k, n in zip(keep, found[0], strict=True)
        )
        value, vram, ram = totals(groups, picks)
        # The solver keeps rows to a tolerance; a budget is kept to the byte.
        if vram <= budget.vram_bytes and ram <= budget.ram_bytes:
            known = _better(known, Choice(picks, value, bound))
    return None if known is None else replace(known, bound=bound)


def _better(a: Choice | None, b: Choice | None) -> Choice | None:
    return min((x for x in (a, b) if x is not None), key=lambda x: x.value, default=None)


def _rounded(groups: Sequence[Group], counts: Sequence[F64], budget: Budget) -> Choice | None:
    """The relaxation's whole part; the layers it splits as small as can be; then greedy steps."""
    start: list[int] = []
    for g, n in zip(groups, counts, strict=True):
        whole = np.floor(n + 1e-6).astype(np.int64)
        start += [int(c) for c in np.repeat(np.arange(len(n)), whole)]
        start += [_smallest(g)] * (g.count - int(whole.sum()))
    return _improved(groups, start, budget)


Relaxed = tuple[list[F64], list[F64], float]  # counts and reduced costs of each group's columns, the bound


def _highs(
    groups: Sequence[Group], budget: Budget, time_limit: float, gap: float, *, whole: bool
) -> Relaxed | None:
    import highspy

    h = _silent(highspy)
    for name, setting in (
        ("threads", 1),
        ("time_limit", time_limit),
        ("mip_rel_gap", gap),
        ("mip_abs_gap", GAP_US if gap else 0.0),
    ):
        h.setOptionValue(name, setting)
    h.passModel(_model(highspy, groups, budget, whole=whole))
    h.run()
    info, solution = h.getInfo(), h.getSolution()
    if info.primal_solution_status != int(highspy.SolutionStatus.kSolutionStatusFeasible):
        return None
    ends = np.cumsum([len(g.columns) for g in groups])[:-1]
    counts = np.split(np.asarray(solution.col_value), ends)
    if whole:
        return counts, [], float(info.mip_dual_bound)
    if h.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return counts, np.split(np.asarray(solution.col_dual), ends), float(info.objective_function_value)


def _silent(highspy: ModuleType) -> Highs:
    """Return a solver that prints nothing: that of 1.16 prints a banner when it is made."""

    class Silent(highspy.Highs):  # type: ignore[name-defined,misc]
        def enableCallbacks(self) -> None:  # the first that prints
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    silent: Highs = Silent()
    return silent


def _model(highspy: ModuleType, groups: Sequence[Group], budget: Budget, *, whole: bool) -> HighsLp:
    """The problem in the docstring above, column by column: its group's row, VRAM's, RAM's."""
    lengths = [len(g.columns) for g in groups]
    n, counts = sum(lengths), [float(g.count) for g in groups]
    lp: HighsLp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n, len(groups) + 2
    lp.col_cost_ = np.concatenate([g.value for g in groups])
    lp.col_lower_ = np.zeros(n)
    lp.col_upper_ = np.full(n, np.inf)
    lp.row_lower_ = np.array([*counts, -np.inf, -np.inf])
    lp.row_upper_ = np.array([*counts, budget.vram_bytes / UNIT, budget.ram_bytes / UNIT])
    index = np.empty((n, 3), np.int32)
    index[:, 0] = np.repeat(np.arange(len(groups)), lengths)
    index[:, 1:] = [len(groups), len(groups) + 1]
    value = np.ones((n, 3))
    value[:, 1] = np.concatenate([g.columns.vram_bytes for g in groups]) / UNIT
    value[:, 2] = np.concatenate([g.columns.ram_bytes for g in groups]) / UNIT
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.arange(0, 3 * n + 1, 3, dtype=np.int32)
    lp.a_matrix_.index_, lp.a_matrix_.value_ = index.ravel(), value.ravel()
    if whole:
        lp.integrality_ = [highspy.HighsVarType.kInteger] * n
    return lp
