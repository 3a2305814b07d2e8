"""Reads ahead from one shard for a consumer, with one thread, one fetch stream and long polls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from raymq.cluster.transport.connection import FetchStream
from raymq.cluster.transport.routes import Routes
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Unavailable
from raymq.store.requests import FetchSlice

from .checked import checked

#: longest wait of one fetch at the shard
WAIT_MS = 10_000
BACKOFF_MS = 20
BACKOFF_MS_MAX = 1000


class Piece(NamedTuple):
    """Records [first_offset, next_offset) of one queue. A compacted topic has gaps."""

    shard: int
    queue_id: int
    first_offset: int
    next_offset: int
    records: pa.Array


class ObservedCondition(threading.Condition):
    """A condition that also calls a listener, such as one of an event loop."""

    #: called by the notifying thread; must not block
    listener: Callable[[], None] | None = None

    def notify_all(self) -> None:
        """Wake all waiting threads and call the listener."""
        super().notify_all()
        if self.listener is not None:
            self.listener()


class ReadState:
    """The state that a consumer and its readers share. `changed` guards all of it."""

    def __init__(self, topic: str, *, fetch_bytes: int, fetch_records: int) -> None:
        self.topic = topic
        self.fetch_bytes = fetch_bytes
        self.fetch_records = fetch_records
        self.changed = ObservedCondition()
        #: fetched pieces, in offset order per queue
        self.pieces: deque[Piece] = deque()
        #: shard -> number of its pieces in `pieces`
        self.ahead: dict[int, int] = {}
        #: queue_id -> offset to fetch next; a queue that failed is missing until `seek`
        self.fetch_from: dict[int, int] = {}
        #: queue_id -> why it cannot be read
        self.failed: dict[int, RayMQError] = {}
        #: shard -> (when it became unreachable, in ms; why)
        self.down: dict[int, tuple[int, RayMQError]] = {}
        #: why the topic cannot be read at all
        self.fatal: RayMQError | None = None
        self.closed = False


class ShardReader:
    """The reading thread of one shard, at most one fetch ahead of the consumer."""

    def __init__(
        self, routes: Routes, shard: int, queues: list[int], state: ReadState, clock: Clock
    ) -> None:
        self._routes = routes
        self.shard = shard
        self.queues = queues
        self._state = state
        self._clock = clock
        self._stream: FetchStream | None = None
        self._turn = 0
        self._thread = threading.Thread(target=self._run, name=f"raymq-reader-{shard}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failures = 0
        while not self._state.closed:
            stream: FetchStream | None = None
            try:
                stream = self._routes.fetch_stream(self.shard)
                with self._state.changed:
                    self._stream = stream
                while self._fetch(stream):
                    failures = 0
            except RayMQError as error:
                if self._note(error, stream):
                    failures += 1
            finally:
                with self._state.changed:
                    self._stream = None
                if stream is not None:
                    stream.close()
            if failures and not self._state.closed:
                self._back_off(failures)

    def _back_off(self, failures: int) -> None:
        delay = min(BACKOFF_MS << min(failures - 1, 10), BACKOFF_MS_MAX)
        with self._state.changed:
            self._state.changed.wait_for(lambda: self._state.closed, delay / 1000)
        self._routes.refresh()

    def _wanted(self) -> dict[int, int]:
        offsets = {
            queue_id: self._state.fetch_from[queue_id]
            for queue_id in self.queues
            if queue_id in self._state.fetch_from
        }
        # The queues take turns as the first: a busy queue must not starve the others.
        order = list(offsets)
        turn = self._turn % max(len(order), 1)
        return {queue_id: offsets[queue_id] for queue_id in order[turn:] + order[:turn]}

    def _fetch(self, stream: FetchStream) -> bool:
        """One fetch, once the consumer has taken the pieces of this shard. False: end, or open a new stream."""
        state = self._state
        with state.changed:
            state.changed.wait_for(
                lambda: (
                    state.closed
                    or self._stream is not stream
                    or (not state.ahead.get(self.shard) and self._wanted())
                )
            )
            if state.closed or self._stream is not stream:
                return False
            self._turn += 1
            wanted = self._wanted()
        found = stream.fetch(
            state.topic,
            wanted,
            max_bytes=state.fetch_bytes,
            max_records=state.fetch_records,
            wait_ms=WAIT_MS,
        )
        found = checked(found, self._routes, state.topic, self.shard)
        with state.changed:
            state.down.pop(self.shard, None)
            for part in found:
                self._take(part, wanted)
            if found:
                state.changed.notify_all()
        return True

    def _take(self, part: FetchSlice, wanted: dict[int, int]) -> None:
        """Store the answer for one queue, unless a seek has made it obsolete. Needs the lock."""
        state, queue_id = self._state, part.queue_id
        if queue_id not in wanted or state.fetch_from.get(queue_id) != wanted[queue_id]:
            return
        if part.error is not None or part.records is None:
            del state.fetch_from[queue_id]
            state.failed[queue_id] = part.error or Unavailable("an empty answer", shard=self.shard)
            return
        if part.first_offset != wanted[queue_id] or not len(part.records):
            return
        state.fetch_from[queue_id] = part.next_offset
        piece = Piece(self.shard, queue_id, part.first_offset, part.next_offset, part.records)
        state.pieces.append(piece)
        state.ahead[self.shard] = state.ahead.get(self.shard, 0) + 1

    def _note(self, error: RayMQError, stream: FetchStream | None) -> bool:
        """Record a failure. False: the consumer itself broke the stream."""
        state = self._state
        with state.changed:
            if state.closed or (stream is not None and self._stream is not stream):
                return False
            moved = error.fields.get("field") in ("cluster_id", "shard")
            if error.retriable or moved:
                state.down.setdefault(self.shard, (self._clock.monotonic_ms(), error))
                state.changed.notify_all()
                return True
            # Such a failure does not pass by itself: a wrong token, for example.
            state.fatal = error
            state.changed.notify_all()
            state.changed.wait_for(lambda: state.closed)
            return False

    def restart(self) -> None:
        """Abandon the fetch under way, because an offset changed. Needs the lock."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abort()

    def join(self) -> None:
        """Wait for the thread, after `closed` was set and `restart` called."""
        self._thread.join()
