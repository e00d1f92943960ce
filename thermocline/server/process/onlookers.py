"""Subscribers to the activity stream. Must not know HTTP, or what a report says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thermocline.engine.live_activity import ActivityReport

Reports = asyncio.Queue[ActivityReport | None]


class Onlookers:
    """Each gets the newest report: a slow one misses some, and holds up nobody."""

    def __init__(self, look: Callable[[bool], None]) -> None:
        """`look` is told when the first one comes, and when the last one goes."""
        self._look = look
        self._queues: set[Reports] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def add(self) -> Reports:
        queue: Reports = asyncio.Queue(maxsize=1)
        self._queues.add(queue)
        if len(self._queues) == 1:
            self._look(True)
        return queue

    def remove(self, queue: Reports) -> None:
        self._queues.remove(queue)
        if not self._queues:
            self._look(False)

    def show(self, activity: ActivityReport | None) -> None:
        """None: there will be no more."""
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(activity)
