"""Wakes the pulls that wait for messages of a queue."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Arrivals:
    """Wakes the pulls that wait for a queue. Callers: one event loop."""

    def __init__(self) -> None:
        self._waiting: defaultdict[tuple[str, int], list[asyncio.Event]] = defaultdict(list)

    def next(self, topic: str, queue_id: int) -> asyncio.Event:
        """An event that the next arrival in a queue sets."""
        waiting = self._waiting[topic, queue_id]
        if not waiting:
            waiting.append(asyncio.Event())
        return waiting[0]

    def note(self, topic: str, queue_id: int) -> None:
        """Messages have arrived in a queue."""
        for event in self._waiting.pop((topic, queue_id), ()):
            event.set()
