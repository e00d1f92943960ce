"""How many chats `serve` has room for beside weights on disk, which they share: as a session chooses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from thermocline.plan.memory import chats_for
from thermocline.plan.problem import Problem

MOST_CHATS = 8  # `EngineOptions.max_batch` where nothing is asked
Parts = dict[str, int]


def chats_note(p: Problem, others: Callable[[Problem], Parts], least: Callable[[Parts], int]) -> str:
    """Say how many chats of the context a session of `MOST_CHATS` keeps in memory together.

    `others`: what a session takes beside weights; `least`: the smallest budget with that.
    """

    def of(n: int) -> Parts:
        return others(replace(p, ask=replace(p.ask, batch=n, max_batch=MOST_CHATS)))

    n = chats_for(MOST_CHATS, p.ram, of, least)
    together = "1 chat has" if n == 1 else f"{n} chats have"
    return f"of {MOST_CHATS} chats in `serve`, {together} room for {p.ask.context} tokens each; more wait"
