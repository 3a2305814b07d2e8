"""Wakes the pulls that wait for messages of a queue."""

from __future__ import annotations

import asyncio


class Arrival:
    """The next messages of a queue. Callers: one event loop."""

    def __init__(self) -> None:
        self._has_come = False
        self._waiting: set[asyncio.Future[None]] = set()

    async def within(self, timeout_s: float) -> bool:
        """Wait for it. Returns: whether it came in time."""
        if self._has_come:
            return True
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        self._waiting.add(woken)
        timer = loop.call_later(timeout_s, _end, woken)
        try:
            await woken
            # It may have come in the turn of the loop in which the time was up.
            return self._has_come
        finally:
            timer.cancel()
            self._waiting.discard(woken)

    def wake(self) -> None:
        """Wake all that wait for it: it has come."""
        self._has_come = True
        for woken in self._waiting:
            _end(woken)


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
            found.wake()


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
