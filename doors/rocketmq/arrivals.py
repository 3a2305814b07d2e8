"""Wakes the pulls that wait for messages of a queue."""

from __future__ import annotations

import asyncio


class Arrival:
    """The next messages of a queue. Callers: one event loop."""

    def __init__(self) -> None:
        self._has_come = False
        self._waiting: set[asyncio.Future[bool]] = set()

    async def within(self, timeout_s: float) -> bool:
        """Wait for it. Returns: whether it came in time."""
        if self._has_come:
            return True
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()
        self._waiting.add(woken)
        timer = loop.call_later(timeout_s, _wake, woken, False)
        try:
            return await woken
        finally:
            timer.cancel()
            self._waiting.discard(woken)

    def come(self) -> None:
        """Wake all that wait for it."""
        self._has_come = True
        for woken in self._waiting:
            _wake(woken, True)


class Arrivals:
    """The arrivals in all queues. Callers: one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], Arrival] = {}

    def next(self, topic: str, queue_id: int) -> Arrival:
        """The next arrival in a queue."""
        key = topic, queue_id
        found = self._waiting.get(key)
        if found is None:
            found = self._waiting[key] = Arrival()
        return found

    def note(self, topic: str, queue_id: int) -> None:
        """Messages have arrived in a queue."""
        found = self._waiting.pop((topic, queue_id), None)
        if found is not None:
            found.come()


def _wake(woken: asyncio.Future[bool], has_come: bool) -> None:
    if not woken.done():
        woken.set_result(has_come)
