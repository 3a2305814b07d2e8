"""Gathers the reads of many pulls: those that want the same of one topic are one fetch.

A fetch costs as much as many messages of it. Under load the messages of several queues arrive together, and wake the
pulls of all of them. While a fetch is under way, the reads of the next one gather. Fetches that wait for messages do
not hold each other up: their reads are those of one turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from raymq.store.base.errors import Bug, RayMQError
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector

#: queues of one fetch: an answer has so many times the bytes of one pull at most
QUEUES_MAX = 16
#: fetches of one wish that are under way, if pulls of the same queues begin at different offsets
UNDER_WAY_MAX = 4


class _Wish(NamedTuple):
    """What the pulls of one fetch have in common."""

    topic: str
    max_bytes: int
    max_records: int
    wait_ms: int
    wanted: MessageSelector | None


class _Read(NamedTuple):
    """Pulls of one queue from one offset."""

    offset: int
    done: list[asyncio.Future[FetchSlice | None]]

    @property
    def is_wanted(self) -> bool:
        """Whether one of them still waits."""
        return not all(each.done() for each in self.done)


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
        #: what waits. Pulls of one queue from two offsets are in two fetches
        self._gathered: dict[_Wish, deque[_Fetch]] = {}
        #: how many fetches of a wish that does not wait for messages are under way
        self._under_way: Counter[_Wish] = Counter()
        self._begins = False
        self._has_stopped = False
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
        done: asyncio.Future[FetchSlice | None] = self._loop.create_future()
        self._gather(wish, queue_id, offset, done)
        return await done

    def _gather(
        self, wish: _Wish, queue_id: int, offset: int, done: asyncio.Future[FetchSlice | None]
    ) -> None:
        fetches = self._gathered.setdefault(wish, deque())
        if not self._begins:
            self._begins = True
            self._loop.call_soon(self._begin)
        for reads in fetches:
            same = reads.get(queue_id)
            if same is not None and same.offset == offset:
                same.done.append(done)
                return
        if not fetches or queue_id in fetches[-1] or len(fetches[-1]) >= QUEUES_MAX:
            fetches.append({})
        fetches[-1][queue_id] = _Read(offset, [done])

    async def stop(self) -> None:
        """End the fetches that are under way. Nothing waits for them any more."""
        self._has_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        self._begins = False
        for wish in list(self._gathered):
            self._begin_some(wish)

    def _begin_some(self, wish: _Wish) -> None:
        """Begin those fetches of a wish that need not wait for others."""
        fetches = self._gathered.get(wish)
        while fetches and not self._has_stopped and self._may_begin(wish, len(fetches)):
            reads = fetches.popleft()
            wanted = {queue_id: each for queue_id, each in reads.items() if each.is_wanted}
            if not wanted:
                continue
            if wish.wait_ms:
                self._start(self._run(wish, wanted))
            else:
                self._under_way[wish] += 1
                self._start(self._run_in_turn(wish, wanted))
        if not fetches:
            self._gathered.pop(wish, None)

    def _may_begin(self, wish: _Wish, waiting: int) -> bool:
        # The last one still gathers.
        under_way = self._under_way[wish]
        return bool(wish.wait_ms) or not under_way or (waiting > 1 and under_way < UNDER_WAY_MAX)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_in_turn(self, wish: _Wish, reads: _Fetch) -> None:
        """Fetch, and begin what has gathered meanwhile."""
        try:
            await self._run(wish, reads)
        finally:
            self._under_way[wish] -= 1
            if not self._under_way[wish]:
                del self._under_way[wish]
            self._begin_some(wish)

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
                for done in each.done:
                    if not done.done():
                        done.set_exception(fault)
            return

        # A fetch that has found its bytes, or looked far enough with its filter, does not reach all queues.
        may_lack = len(reads) > 1 and (parts or wish.wanted is not None)
        for queue_id, each in reads.items():
            if may_lack and queue_id not in parts:
                # Alone, so that its answer is the last one.
                self._start(self._run(wish, {queue_id: each}))
                continue
            for done in each.done:
                if not done.done():
                    done.set_result(parts.get(queue_id))
