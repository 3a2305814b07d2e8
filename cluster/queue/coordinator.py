"""The one process that decides who is given which item of a durable queue; as a Ray actor, its only shell.

It moves no items: getters read them from the shard, putters write them there. It keeps no state that the
log has not (log.TakenLog), so it may die at any time and a successor goes on.
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
from typing import TYPE_CHECKING, Any

from raymq.cluster.transport.connection import Connection, FetchStream
from raymq.cluster.transport.routes import Routes
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Unavailable

from .local_socket import METHODS, LocalServer, door_path
from .log import Taken, TakenLog

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

log = logging.getLogger("raymq")

#: how long the shard holds the question whether there are more items
WATCH_MS = 5_000
RETRY_S = 0.1
RETRY_MAX_S = 2.0
#: a shard that cannot be reached for so long is told
ANSWER_S = 30.0
#: requests whose items are given again when they are asked for again
REMEMBERED = 50_000
#: room that a putter took is free again after so long: longer than a put may take
RESERVED_S = 150.0
#: the shard is asked this often which items it still has
LOOK_S = 60.0


@dataclass(eq=False)
class Getter:
    """A request for items that waits."""

    count: int
    #: all of them now, or None
    now: bool
    done: asyncio.Future[Taken | None]
    #: in a record that is being written: it cannot be withdrawn
    allotted: bool = False
    #: calls that wait for it; with none it is given nothing any more
    asking: int = 0


@dataclass(eq=False)
class Putter:
    """A request for room that waits."""

    count: int
    maxsize: int
    done: asyncio.Future[bool]


class QueueCoordinator:
    """Gives items to getters in the order of their calls, and room to putters. One event loop.

    All methods may be called again with the same request number, also at a successor: items that were
    given to a number are given to that number again, and to no other.
    """

    def __init__(self, cluster: Cluster, name: str, shard: int) -> None:
        """Neither blocks nor fails: the log is read by the first call, and again until that succeeds."""
        self._cluster = cluster
        self._name = name
        self._shard = shard
        self._clock = Clock()
        self._door: LocalServer | None = None
        self._main: asyncio.Task[None] | None = None
        self._log: TakenLog | None = None
        self._watch: EndWatch | None = None
        self._opened = asyncio.Event()
        #: why the log could not be read or written last
        self._trouble: Exception | None = None
        self._wake = asyncio.Event()
        #: when the shard was asked last which items there are
        self._looked_s = 0.0
        #: the first item that was not given, and one behind the last one that is known of
        self._next = 0
        self._end = 0
        self._given: OrderedDict[int, Taken] = OrderedDict()
        #: by request, in the order of the calls
        self._getters: dict[int, Getter] = {}
        self._putters: dict[int, Putter] = {}
        #: request -> (items, until when) that may be on their way
        self._reserved: dict[int, tuple[int, float]] = {}

    # --- getters --------------------------------------------------------------------------------

    async def take(self, request: int, count: int, wait_s: float) -> tuple[int, int] | None:
        """Give the next `count` items to `request`; None when there are not so many.

        Args: `wait_s` is for one item; 0: only what is there now, seen from after the call.
        Returns: (first, count). Raises: Unavailable while the shard does not answer.
        Durable: that they are given, at return.
        """
        await self._ready()
        if request not in self._given and request not in self._getters:
            old = self._clock.monotonic() - self._looked_s > LOOK_S
            if old or (not wait_s and self._end - self._next < count):
                await self._look()
            if request not in self._getters and request not in self._given:
                done = asyncio.get_running_loop().create_future()
                self._getters[request] = Getter(count, not wait_s, done)
                self._wake.set()
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
        found = self._given.get(request)
        return None if found is None else (found.first, found.count)

    def _withdraw(self, request: int) -> None:
        getter = self._getters.get(request)
        if getter is not None and not getter.allotted:
            del self._getters[request]
            getter.done.set_result(None)

    async def forget(self, request: int) -> None:
        """Nobody waits for this request any more. What was given to it stays given."""
        self._withdraw(request)

    # --- putters --------------------------------------------------------------------------------

    async def reserve(self, request: int, count: int, maxsize: int, wait_s: float) -> bool:
        """ByteLimiter for `count` items in a queue of at most `maxsize`; False when there is none in time."""
        await self._ready()
        if request in self._reserved:
            return True
        await self._look()
        putter = self._putters.get(request)
        if putter is None:
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            putter = self._putters[request] = Putter(count, maxsize, done)
            self._admit()
        if not putter.done.done() and wait_s:
            await asyncio.wait({putter.done}, timeout=wait_s)
        if not putter.done.done():
            self._putters.pop(request, None)
            putter.done.set_result(False)
            # It may have stood before one that needs less.
            self._admit()
        return putter.done.result()

    async def release(self, request: int, end: int) -> None:
        """The items of a `reserve` are in the log, before offset `end` (0: none of them is)."""
        self._reserved.pop(request, None)
        self._note_end(end)
        self._admit()

    def _admit(self) -> None:
        """Give room in the order of the calls: a large request is not starved by small ones."""
        now = self._clock.monotonic()
        for request, (_, until) in list(self._reserved.items()):
            if until < now:
                del self._reserved[request]
        for request, putter in list(self._putters.items()):
            used = self._end - self._next + sum(count for count, _ in self._reserved.values())
            if used + putter.count > putter.maxsize:
                return
            del self._putters[request]
            self._reserved[request] = (putter.count, now + RESERVED_S)
            putter.done.set_result(True)

    # --- everybody ------------------------------------------------------------------------------

    async def size(self) -> int:
        """Items that are in the log and not given."""
        await self._ready()
        await self._look()
        return self._end - self._next

    async def describe(self) -> dict[str, Any]:
        """{"pid", "next", "end", "getters", "putters"} as known here."""
        await self._ready()
        return {
            "pid": os.getpid(),
            "next": self._next,
            "end": self._end,
            "getters": len(self._getters),
            "putters": len(self._putters),
        }

    async def close(self) -> None:
        """End; who waits is told nothing and asks the successor."""
        main, self._main = self._main, None
        if main is not None:
            main.cancel()
            await asyncio.wait({main})
        if self._door is not None:
            self._door.close()
        await asyncio.to_thread(self._close_parts)

    # --- the loop -------------------------------------------------------------------------------

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
        """Nobody knows yet what was given: the same request number may be asked again."""
        return Unavailable(
            f"queue {self._name!r}: shard {self._shard} does not answer: {self._trouble!r}",
            shard=self._shard,
        )

    async def _run(self) -> None:
        """Open the log, serve until something is unknown, open it again: the log knows."""
        wait_s = RETRY_S
        await self._open_door()
        while True:
            try:
                opened = await asyncio.to_thread(self._open)
            except Exception as error:
                # Not only RayMQError: whoever waits would wait for ever.
                self._trouble = error
                log.warning("queue %s: %r", self._name, error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, RETRY_MAX_S)
                continue
            wait_s = RETRY_S
            self._take_over(opened)
            try:
                await self._serve(opened)
            except Exception as error:
                # As a rule not written, written and not answered, or fenced by a successor.
                self._trouble = error
                log.warning("queue %s: %r; reading it again", self._name, error)
                self._opened.clear()

    async def _open_door(self) -> None:
        try:
            path = door_path(self._cluster, self._name)
            self._door = LocalServer(path, {method: getattr(self, method) for method in METHODS})
            await self._door.open()
        except (OSError, RayMQError) as error:
            log.warning("queue %s: its callers must use actor calls: %r", self._name, error)

    def _open(self) -> TakenLog:
        """In a thread: blocks."""
        self._close_parts()
        opened = TakenLog(self._cluster, self._name, self._shard, self._clock)
        try:
            opened.open()
        except BaseException:
            opened.close()
            raise
        self._log = opened
        return opened

    def _close_parts(self) -> None:
        opened, self._log = self._log, None
        if opened is not None:
            opened.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _take_over(self, opened: TakenLog) -> None:
        self._next = opened.next
        self._end = max(opened.end, opened.next)
        loop = asyncio.get_running_loop()

        def tell(end: int) -> None:
            # The loop ends with its process; nothing is lost that the next look does not find.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._note_end, end)

        self._watch = EndWatch(Routes.of(self._cluster), self._name, self._shard, tell)
        self._given.clear()
        self._remember(opened.given)
        for getter in self._getters.values():
            # Its record is not in the log, or it was answered just now.
            getter.allotted = False
        self._opened.set()

    async def _serve(self, opened: TakenLog) -> None:
        """Give away: while one record is being written, requests gather for the next."""
        while True:
            self._wake.clear()
            given = self._allot()
            if not given:
                await self._wake.wait()
                continue
            following = given[-1].first + given[-1].count
            await asyncio.wrap_future(opened.write(following, given))
            self._next = max(self._next, following)
            self._remember(given)
            self._admit()

    def _allot(self) -> list[Taken]:
        """Items for who waits, as far as there are any."""
        given: list[Taken] = []
        following = self._next
        for request, getter in list(self._getters.items()):
            if not getter.asking:
                # It was told Unavailable; whoever still wants the items asks again.
                self._withdraw(request)
            elif following + getter.count <= self._end:
                getter.allotted = True
                given.append(Taken(request, following, getter.count))
                following += getter.count
            elif getter.now:
                self._withdraw(request)
        if self._watch is not None and len(given) < len(self._getters):
            self._watch.look_from(self._end)
        return given

    def _remember(self, given: list[Taken]) -> None:
        for taken in given:
            self._given[taken.request] = taken
            getter = self._getters.pop(taken.request, None)
            if getter is not None:
                getter.done.set_result(taken)
        while len(self._given) > REMEMBERED:
            self._given.popitem(last=False)

    async def _look(self) -> None:
        """Ask the shard where the items end. Whoever put before this call is counted."""
        opened = self._log
        if opened is None:
            return
        try:
            first, end = await asyncio.to_thread(opened.ranges, self._name)
        except RayMQError as error:
            if not error.retriable:
                raise
            # What is known is all that can be given now.
            return
        self._looked_s = self._clock.monotonic()
        # Items that were deleted meanwhile are given to nobody.
        self._next = max(self._next, first)
        self._note_end(max(end, first))

    def _note_end(self, end: int) -> None:
        if end > self._end:
            self._end = end
            self._wake.set()


class CoordinatorActor(QueueCoordinator):
    """The keeper in a process of its own."""

    def __init__(self, cluster: Cluster, name: str, shard: int) -> None:
        """As QueueCoordinator's."""
        super().__init__(cluster, name, shard)
        # The default of 5 ms makes the event loop wait that long for a thread that has an answer for it.
        sys.setswitchinterval(0.0005)


class EndWatch:
    """Tells when a topic's end moves, by a long poll at its shard; only while it is asked to."""

    def __init__(self, routes: Routes, topic: str, shard: int, tell: Callable[[int], None]) -> None:
        self._routes = routes
        self._topic = topic
        self._shard = shard
        self._tell = tell
        self._changed = threading.Condition()
        self._from: int | None = None
        self._closed = False
        self._stream: FetchStream | None = None
        self._thread = threading.Thread(target=self._run, name="raymq-queue-watch", daemon=True)
        self._thread.start()

    def look_from(self, end: int) -> None:
        """Tell, once, when there is something at or behind `end`."""
        with self._changed:
            self._from = end
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._closed:
            connection: Connection | None = None
            stream: FetchStream | None = None
            try:
                connection = self._routes.connect(self._shard)
                stream = connection.fetch_stream()
                with self._changed:
                    self._stream = stream
                while self._ask(stream):
                    pass
            except RayMQError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)
                if not self._closed:
                    self._routes.refresh()
            finally:
                with self._changed:
                    self._stream = None
                if stream is not None:
                    stream.close()
                if connection is not None:
                    connection.close()

    def _ask(self, stream: FetchStream) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._from is not None)
            start = self._from
        if self._closed or start is None:
            return False
        found = stream.fetch(self._topic, {0: start}, max_bytes=1, max_records=1, wait_ms=WATCH_MS)
        for part in found:
            if part.error is not None:
                raise part.error
            with self._changed:
                if self._from == start:
                    self._from = None
            self._tell(part.max_offset)
        return True

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            if self._stream is not None:
                self._stream.abort()
            self._changed.notify_all()
        self._thread.join()
