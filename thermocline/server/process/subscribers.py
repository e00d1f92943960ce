"""Subscribers to the activity stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from thermocline.engine.live_activity import ActivityReport

Reports = asyncio.Queue[ActivityReport | None]


class Subscribers:
    """Clients that watch the activity. Each gets the newest report; a slow one misses some."""

    def __init__(self, switch: Callable[[bool], None]) -> None:
        """`switch` is called with True when the first comes, and with False when the last leaves."""
        self._switch = switch
        self._queues: set[Reports] = set()

    def __len__(self) -> int:
        return len(self._queues)

    def add(self) -> Reports:
        queue: Reports = asyncio.Queue(maxsize=1)
        self._queues.add(queue)
        if len(self._queues) == 1:
            self._switch(True)
        return queue

    def remove(self, queue: Reports) -> None:
        self._queues.remove(queue)
        if not self._queues:
            self._switch(False)

    def show(self, activity: ActivityReport | None) -> None:
        """Give all subscribers a report; None ends their streams."""
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(activity)
