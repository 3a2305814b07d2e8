"""Assigns the items of one durable queue to requests, in a process of its own, a Ray actor.

Items do not pass through the coordinator, because a get reads them from the shard and a put writes them there. All
state of a coordinator is in the log (assignment_log.py), so that it may die at any time and a successor continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raymq.client.transport.connection import FetchStream
from raymq.client.transport.fetch_thread import FetchThread
from raymq.client.transport.routes import Routes
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.records.requests import FetchRequest

from .assignment_log import Assignment, AssignmentLog
from .local_socket import METHODS, LocalServer, socket_path

logger = logging.getLogger("raymq")

#: longest wait of one long poll for more items
WATCH_MS = 5_000
RETRY_S = 0.1
RETRY_MAX_S = 2.0
#: a call fails when the shard has not answered for this long
ANSWER_S = 30.0
#: requests whose items are returned again when the request is repeated
ASSIGNMENTS_KEPT = 50_000
#: requests that were given up and are not served any more
GIVEN_UP_KEPT = 10_000
#: reserved room is released after this time, which is longer than a put may take
RESERVED_S = 150.0
#: interval at which the shard is asked which items exist
REFRESH_S = 60.0


@dataclass(eq=False)
class WaitingGet:
    """A request that waits for items."""

    count: int
    #: `get_nowait`: answered now, with None if fewer items are there
    at_once: bool
    done: asyncio.Future[Assignment | None]
    #: the request is part of a record that is being written, so that it cannot be withdrawn
    assigned: bool = False
    #: calls that wait for this request. Without any, no items are assigned to it
    asking: int = 0


@dataclass(eq=False)
class ArrivingTake:
    """A call that asks for items and does not wait for them yet."""

    #: its caller is gone
    is_forgotten: bool = False


@dataclass(eq=False)
class WaitingPut:
    """A request that waits for room."""

    count: int
    maxsize: int
    done: asyncio.Future[bool]


class QueueCoordinator:
    """Assigns items to gets in the order of their calls, and room to puts. One event loop.

    Every method may be called again with the same request number, even at a successor. Items that were assigned to a
    number are returned to that number again, and to no other.
    """

    def __init__(self, cluster: Cluster, name: str, shard: int) -> None:
        """Never blocks or fails: the first call reads the log, and repeats that until it succeeds."""
        self._cluster = cluster
        self._name = name
        self._shard = shard
        self._clock = Clock()

        self._server: LocalServer | None = None
        self._main: asyncio.Task[None] | None = None
        self._log: AssignmentLog | None = None
        self._watch: EndWatcher | None = None
        self._opened = asyncio.Event()

        #: the latest failure to read or write the log
        self._last_error: Exception | None = None
        self._wake = asyncio.Event()

        #: when the shard was last asked which items exist
        self._refreshed_s = 0.0
        #: first unassigned item
        self._next_unassigned = 0
        #: offset after the last known item
        self._known_end = 0
        self._assigned: OrderedDict[int, Assignment] = OrderedDict()

        #: request -> waiting get or put, in the order of the calls
        self._getters: dict[int, WaitingGet] = {}
        #: requests that were given up before their call came
        self._given_up: OrderedDict[int, None] = OrderedDict()
        #: request -> calls that do not wait for items yet, because the log is not open, for example
        self._arriving: dict[int, list[ArrivingTake]] = {}
        self._putters: dict[int, WaitingPut] = {}
        #: request -> (items, deadline) whose put may be in flight
        self._reserved: dict[int, tuple[int, float]] = {}

    # --- getters ----------------------------------------------------------------------------------

    async def take(self, request: int, count: int, wait_s: float) -> tuple[int, int] | None:
        """Assign the next `count` items to `request`; None when there are fewer.

        Args: `wait_s`: seconds to wait for one item; 0: take only items that exist at the call.
        Returns: (first, count). Raises: Unavailable while the shard does not answer.
        Durable: the assignment, at return.
        """
        if not await self._register(request, count, wait_s):
            return None

        getter = self._getters.get(request)
        if getter is not None:
            getter.asking += 1
            try:
                if wait_s:
                    await asyncio.wait({getter.done}, timeout=wait_s)
                    self._withdraw(request)
                if not getter.done.done():
                    await asyncio.wait({getter.done}, timeout=ANSWER_S)
                if not getter.done.done():
                    raise self._unavailable()
            finally:
                getter.asking -= 1

        found = self._assigned.get(request)
        return None if found is None else (found.first, found.count)

    async def _register(self, request: int, count: int, wait_s: float) -> bool:
        """Have a request wait for its items, if these are not assigned yet. Returns: False if it is forgotten."""
        call = ArrivingTake()
        self._arriving.setdefault(request, []).append(call)
        try:
            await self._ready()
            if request in self._assigned or request in self._getters:
                return True
            old = self._clock.monotonic() - self._refreshed_s > REFRESH_S
            if old or (not wait_s and self._known_end - self._next_unassigned < count):
                await self._refresh_end()
        finally:
            calls = self._arriving[request]
            calls.remove(call)
            if not calls:
                del self._arriving[request]

        if request not in self._getters and request not in self._assigned:
            if call.is_forgotten or request in self._given_up:
                return False
            done = asyncio.get_running_loop().create_future()
            self._getters[request] = WaitingGet(count, not wait_s, done)
            self._wake.set()
        return True

    async def give_up(self, request: int) -> bool:
        """Withdraw a request whose one call was interrupted, also if that call comes later: Ray may change the order.

        Returns: whether items are assigned to it, so that its caller may ask for them again.
        """
        await self._ready()
        getter = self._getters.get(request)
        if request in self._assigned or (getter is not None and getter.assigned):
            return True
        if getter is None and request not in self._arriving:
            self._given_up[request] = None
            while len(self._given_up) > GIVEN_UP_KEPT:
                self._given_up.popitem(last=False)
        await self.forget(request)
        return False

    def _withdraw(self, request: int) -> None:
        getter = self._getters.get(request)
        if getter is not None and not getter.assigned:
            del self._getters[request]
            getter.done.set_result(None)

    async def forget(self, request: int) -> None:
        """No caller waits for this request any more. Items assigned to it stay assigned."""
        for call in self._arriving.get(request, ()):
            call.is_forgotten = True
        self._withdraw(request)

    # --- putters ----------------------------------------------------------------------------------

    async def reserve(self, request: int, count: int, maxsize: int, wait_s: float) -> bool:
        """Reserve room for `count` items in a queue of at most `maxsize`. Returns: False when none is free in time."""
        await self._ready()
        if request in self._reserved:
            return True

        await self._refresh_end()
        putter = self._putters.get(request)
        if putter is None:
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            putter = self._putters[request] = WaitingPut(count, maxsize, done)
            self._admit()

        if not putter.done.done() and wait_s:
            await asyncio.wait({putter.done}, timeout=wait_s)
        if not putter.done.done():
            self._putters.pop(request, None)
            putter.done.set_result(False)
            # The put may have been queued before one that needs less room.
            self._admit()
        return putter.done.result()

    async def release(self, request: int, end: int) -> None:
        """End a reservation: its items are in the log before offset `end`, or none is (0).

        A request that still waits for room gets none.
        """
        self._reserved.pop(request, None)
        putter = self._putters.pop(request, None)
        if putter is not None:
            putter.done.set_result(False)
        self._advance_end(end)
        self._admit()

    def _admit(self) -> None:
        """Grant room in the order of the calls, so that small requests do not starve a large one."""
        now_s = self._clock.monotonic()
        for request, (_, deadline_s) in list(self._reserved.items()):
            if deadline_s < now_s:
                del self._reserved[request]
        for request, putter in list(self._putters.items()):
            used = (
                self._known_end
                - self._next_unassigned
                + sum(count for count, _ in self._reserved.values())
            )
            if used + putter.count > putter.maxsize:
                return
            del self._putters[request]
            self._reserved[request] = (putter.count, now_s + RESERVED_S)
            putter.done.set_result(True)

    # --- state ------------------------------------------------------------------------------------

    async def size(self) -> int:
        """Items in the log that are not assigned."""
        await self._ready()
        await self._refresh_end()
        return self._known_end - self._next_unassigned

    async def describe(self) -> dict[str, Any]:
        """{"pid", "next", "end", "getters", "putters"} as this process knows them."""
        await self._ready()
        return {
            "pid": os.getpid(),
            "next": self._next_unassigned,
            "end": self._known_end,
            "getters": len(self._getters),
            "putters": len(self._putters),
        }

    async def close(self) -> None:
        """Stop. Waiting callers get no answer and call the successor."""
        main, self._main = self._main, None
        if main is not None:
            main.cancel()
            await asyncio.wait({main})
        if self._server is not None:
            self._server.close()
        await asyncio.to_thread(self._close_parts)

    # --- the loop ---------------------------------------------------------------------------------

    async def _ready(self) -> None:
        if self._main is not None and self._opened.is_set():
            return
        if self._main is None:
            self._main = asyncio.create_task(self._run())
        try:
            await asyncio.wait_for(self._opened.wait(), ANSWER_S)
        except asyncio.TimeoutError:
            raise self._unavailable() from None

    def _unavailable(self) -> Unavailable:
        """The outcome is unknown: the caller may repeat the same request number."""
        return Unavailable(
            f"queue {self._name!r}: shard {self._shard} does not answer: {self._last_error!r}",
            shard=self._shard,
        )

    async def _run(self) -> None:
        """Open the log and serve. After a write with an unknown outcome, read the log again."""
        wait_s = RETRY_S
        await self._listen()

        while True:
            try:
                log = await asyncio.to_thread(self._open)
            except Exception as error:
                # Catches any exception, not only RayMQError, because waiting callers must not hang.
                self._last_error = error
                logger.warning("queue %s: %r", self._name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
                continue

            wait_s = RETRY_S
            self._take_over(log)
            try:
                await self._serve(log)
            except Exception as error:
                # The record was not written, or was written without an answer, or a successor fenced this writer.
                self._last_error = error
                logger.warning("queue %s: %r; reading it again", self._name, error)
                self._opened.clear()

    async def _listen(self) -> None:
        try:
            path = socket_path(self._cluster, self._name)
            self._server = LocalServer(path, {method: getattr(self, method) for method in METHODS})
            await self._server.open()
        except (OSError, RayMQError) as error:
            logger.warning("queue %s: its callers must use actor calls: %r", self._name, error)

    def _open(self) -> AssignmentLog:
        """Open the log as its new writer. Callers: a thread of its own, because the call blocks."""
        self._close_parts()
        log = AssignmentLog(self._cluster, self._name, self._shard, self._clock)
        try:
            log.open()
        except BaseException:
            log.close()
            raise
        self._log = log
        return log

    def _close_parts(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _take_over(self, log: AssignmentLog) -> None:
        self._next_unassigned = log.next_unassigned
        self._known_end = max(log.end, log.next_unassigned)
        loop = asyncio.get_running_loop()

        def notify(end: int) -> None:
            # The loop may have ended with its process. The next refresh finds the same end.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._advance_end, end)

        self._watch = EndWatcher(Routes.of(self._cluster), self._name, self._shard, notify)
        self._assigned.clear()
        self._remember(log.given)
        for getter in self._getters.values():
            # Its record is not in the log, or the line above has answered it.
            getter.assigned = False
        self._opened.set()

    async def _serve(self, log: AssignmentLog) -> None:
        """Assign items: while one record is written, requests collect for the next."""
        while True:
            self._wake.clear()
            assignments = self._assign()
            if not assignments:
                await self._wake.wait()
                continue
            following = assignments[-1].first + assignments[-1].count
            await asyncio.wrap_future(log.write(following, assignments))
            self._next_unassigned = max(self._next_unassigned, following)
            self._remember(assignments)
            self._admit()

    def _assign(self) -> list[Assignment]:
        """Assign the available items to waiting gets."""
        assignments: list[Assignment] = []
        following = self._next_unassigned

        for request, getter in list(self._getters.items()):
            if not getter.asking:
                # The request's callers got Unavailable. A caller that still wants the items repeats the request.
                self._withdraw(request)
            elif following + getter.count <= self._known_end:
                getter.assigned = True
                assignments.append(Assignment(request, following, getter.count))
                following += getter.count
            elif getter.at_once:
                self._withdraw(request)

        if self._watch is not None and len(assignments) < len(self._getters):
            self._watch.watch_from(self._known_end)
        return assignments

    def _remember(self, assignments: list[Assignment]) -> None:
        for taken in assignments:
            self._assigned[taken.request] = taken
            getter = self._getters.pop(taken.request, None)
            if getter is not None:
                getter.done.set_result(taken)
        while len(self._assigned) > ASSIGNMENTS_KEPT:
            self._assigned.popitem(last=False)

    async def _refresh_end(self) -> None:
        """Ask the shard for the end of the items. Puts that returned before this call are counted."""
        log = self._log
        if log is None:
            return
        try:
            first, end = await asyncio.to_thread(log.ranges, self._name)
        except RayMQError as error:
            if not error.retriable:
                raise
            # Only known items can be assigned now.
            return
        self._refreshed_s = self._clock.monotonic()
        # Deleted items are never assigned.
        self._next_unassigned = max(self._next_unassigned, first)
        self._advance_end(max(end, first))

    def _advance_end(self, end: int) -> None:
        if end > self._known_end:
            self._known_end = end
            self._wake.set()


class CoordinatorActor(QueueCoordinator):
    """The coordinator as a Ray actor in its own process."""

    def __init__(self, cluster: Cluster, name: str, shard: int) -> None:
        """Like `QueueCoordinator.__init__`."""
        super().__init__(cluster, name, shard)
        # With the default of 5 ms the event loop waits that long for a thread that has an answer for it.
        sys.setswitchinterval(0.0005)


class EndWatcher(FetchThread):
    """Reports when the end of a topic moves, by a long poll at its shard. Polls only on request."""

    def __init__(
        self, routes: Routes, topic: str, shard: int, notify: Callable[[int], None]
    ) -> None:
        self._topic = topic
        self._notify = notify
        self._from: int | None = None
        self._closed = False
        changed = threading.Condition()
        super().__init__(routes, shard, changed, lambda: self._closed, name="raymq-queue-watch")

    def watch_from(self, end: int) -> None:
        """Report once when there is an item at `end` or after it."""
        with self._changed:
            self._from = end
            self._changed.notify_all()

    def _fetch(self, stream: FetchStream) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._ended() or self._from is not None)
            start = self._from
        if self._ended() or start is None:
            return False
        for fetched in stream.fetch(self._request(start)):
            if fetched.error is not None:
                raise fetched.error
            with self._changed:
                if self._from == start:
                    self._from = None
            self._notify(fetched.max_offset)
        return True

    def _request(self, start: int) -> FetchRequest:
        generations = self._routes.topics.generations([self._topic])
        return FetchRequest(self._topic, {0: start}, 1, 1, WATCH_MS, generations=generations)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self.restart()
            self._changed.notify_all()
        self.join()
