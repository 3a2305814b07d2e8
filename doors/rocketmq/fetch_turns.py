"""Gathers the reads of many pulls: those that want the same of one topic are one fetch.

A fetch costs as much as many messages of it. Under load the messages of several queues arrive together, and wake the
pulls of all of them. While a fetch is under way, the reads of the next one gather. Fetches that wait for messages do
not hold each other up: their reads are those of one turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from raymq.store.base.errors import Bug, RayMQError
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector

#: queues of one fetch: an answer has so many times the bytes of one pull at most
QUEUES_MAX = 16


class _Wish(NamedTuple):
    """What the pulls of one fetch have in common."""

    topic: str
    max_bytes: int
    max_records: int
    wait_ms: int
    wanted: MessageSelector | None


class _Read(NamedTuple):
    """What one of them wants."""

    offset: int
    done: asyncio.Future[FetchSlice | None]


#: queue -> its read
_Fetch = dict[int, _Read]


class FetchTurns:
    """The fetches of one shard. Callers: one event loop."""

    def __init__(
        self,
        fetch: Callable[[FetchRequest], Awaitable[list[FetchSlice]]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Args: `fetch`: reads queues. It raises RayMQError."""
        self._fetch = fetch
        self._loop = loop
        #: what waits. Two pulls of one queue are in two fetches
        self._gathered: dict[_Wish, deque[_Fetch]] = {}
        #: those of which a fetch is under way
        self._under_way: set[_Wish] = set()
        self._begins = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, request: FetchRequest) -> FetchSlice | None:
        """Read one queue. Returns: None: nothing is there. Raises: RayMQError."""
        ((queue_id, offset),) = request.offsets.items()
        wish = _Wish(
            request.topic,
            request.max_bytes,
            request.max_records,
            request.wait_ms,
            request.wanted,
        )
        read = _Read(offset, self._loop.create_future())
        self._gather(wish, queue_id, read)
        return await read.done

    def _gather(self, wish: _Wish, queue_id: int, read: _Read) -> None:
        fetches = self._gathered.setdefault(wish, deque())
        if not fetches or queue_id in fetches[-1] or len(fetches[-1]) >= QUEUES_MAX:
            fetches.append({})
        fetches[-1][queue_id] = read
        if not self._begins:
            self._begins = True
            self._loop.call_soon(self._begin)

    async def stop(self) -> None:
        """End the fetches that are under way. Nothing waits for them any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        self._begins = False
        for wish in [wish for wish in self._gathered if wish not in self._under_way]:
            if wish.wait_ms:
                for reads in self._gathered.pop(wish):
                    self._start(self._run(wish, reads))
            else:
                self._under_way.add(wish)
                self._start(self._run_all(wish))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_all(self, wish: _Wish) -> None:
        """Fetch, one after the other, until nothing waits."""
        try:
            while wish in self._gathered:
                fetches = self._gathered[wish]
                reads = fetches.popleft()
                if not fetches:
                    del self._gathered[wish]
                await self._run(wish, reads)
        finally:
            self._under_way.discard(wish)

    async def _run(self, wish: _Wish, reads: _Fetch) -> None:
        request = FetchRequest(
            wish.topic,
            {queue_id: each.offset for queue_id, each in reads.items()},
            wish.max_bytes * len(reads),
            wish.max_records,
            wish.wait_ms,
            wanted=wish.wanted,
        )
        try:
            parts = {part.queue_id: part for part in await self._fetch(request)}
        except Exception as error:
            fault = error if isinstance(error, RayMQError) else Bug(f"a fetch: {error!r}")
            for each in reads.values():
                if not each.done.done():
                    each.done.set_exception(fault)
            return

        # A fetch that has found its bytes, or looked far enough with its filter, does not reach all queues.
        may_lack = len(reads) > 1 and (parts or wish.wanted is not None)
        for queue_id, each in reads.items():
            if each.done.done():
                continue
            if may_lack and queue_id not in parts:
                self._gather(wish, queue_id, each)
            else:
                each.done.set_result(parts.get(queue_id))
