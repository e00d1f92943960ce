"""Try out clients' grammars, a few at a time: clients take turns, and only so many grammars wait.

This runs on the event loop's thread; each trial is a process of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from thermocline.server.http.refusal import Refusal
from thermocline.text import grammar_matcher
from thermocline.text.grammar import Grammar

AT_ONCE = 2  # a trial takes up to a second of a processor and 1 GiB


@dataclass(eq=False)
class _Trial:
    grammar: Grammar
    client: str
    askers: int = 0
    end: asyncio.Future[BaseException | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Trials:
    """A queue of trials. Each grammar is tried once, however many requests have it."""

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._asked: dict[Grammar, _Trial] = {}  # waiting and running
        self._waiting: dict[str, deque[_Trial]] = {}  # by client; the first client has the next turn
        self._running: set[asyncio.Task[None]] = set()

    async def check(self, g: Grammar, client: str) -> None:
        """Raise UsageError if `g` cannot be enforced, Refusal if too many grammars wait.

        The verdict on a grammar that was tried before comes at once.
        """
        if grammar_matcher.is_tried(g):
            return grammar_matcher.check(g)
        trial = self._asked.get(g) or self._queue(g, client)
        trial.askers += 1
        try:
            error = await asyncio.shield(trial.end)
        finally:
            trial.askers -= 1
            if trial.askers == 0:
                self._give_up(trial)
        if error is not None:
            raise error

    def _queue(self, g: Grammar, client: str) -> _Trial:
        if sum(map(len, self._waiting.values())) >= self._most:
            self._make_room(client)
        trial = self._asked[g] = _Trial(g, client)
        self._waiting.setdefault(client, deque()).append(trial)
        self._begin()
        return trial

    def _make_room(self, client: str) -> None:
        """Drop the last trial of the client with the most, so that no client shuts others out."""
        greedy = max(self._waiting, key=lambda c: len(self._waiting[c]))
        if len(self._waiting[greedy]) <= len(self._waiting.get(client, ())) + 1:
            raise _full()
        last = self._waiting[greedy][-1]
        self._remove(last)
        last.end.set_result(_full())

    def _remove(self, trial: _Trial) -> None:
        queue = self._waiting[trial.client]
        queue.remove(trial)
        if not queue:
            del self._waiting[trial.client]
        del self._asked[trial.grammar]

    def _give_up(self, trial: _Trial) -> None:
        """Drop a trial that nobody waits for, unless it runs already."""
        if trial in self._waiting.get(trial.client, ()):
            self._remove(trial)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < AT_ONCE:
            client, queue = next(iter(self._waiting.items()))
            trial = queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # its next turn comes after everybody else's
            task = asyncio.create_task(asyncio.to_thread(grammar_matcher.check, trial.grammar))
            self._running.add(task)
            task.add_done_callback(partial(self._ended, trial))

    def _ended(self, trial: _Trial, task: asyncio.Task[None]) -> None:
        self._running.remove(task)
        del self._asked[trial.grammar]
        stopped = Refusal(503, "the server is being stopped")
        trial.end.set_result(stopped if task.cancelled() else task.exception())
        self._begin()


def _full() -> Refusal:
    return Refusal(503, "too many grammars wait to be tried out; try again", code="queue_full")
