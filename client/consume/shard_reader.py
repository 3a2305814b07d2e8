"""Reads ahead from one shard for a consumer, with one thread, one fetch stream and long polls."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from raymq.client.transport.ask import SEARCH_PAUSE_MS, moved, search_pauses
from raymq.client.transport.connection import FetchStream
from raymq.client.transport.fetch_thread import FetchThread
from raymq.client.transport.nearest import NearestReplicas
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector

from .consumer_config import ReadFrom
from .range_reader import ends_before
from .verify_crcs import verify_slices

#: longest wait of one fetch at the shard
WAIT_MS = 10_000


class FetchedRecords(NamedTuple):
    """Records [first_offset, next_offset) of one queue, perhaps with gaps, or none: the shard looked in vain."""

    shard: int
    queue_id: int
    first_offset: int
    next_offset: int
    records: pa.Array


@dataclass
class ReadState:
    """The state that a consumer and its readers share. `changed` guards all of it."""

    topic: str
    fetch_bytes: int
    fetch_records: int
    #: how long a new leader may take to know the end of a queue that was read before
    catch_up_ms: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    #: `notify` also calls it, on any thread. It must not block
    listener: Callable[[], None] | None = None
    #: fetched and not returned yet, in offset order per queue
    unread: deque[FetchedRecords] = field(default_factory=deque)
    #: shard -> number of its entries in `unread`
    ahead: Counter[int] = field(default_factory=Counter)
    #: queue_id -> offset to fetch next. A queue that failed is missing until `seek`
    fetch_from: dict[int, int] = field(default_factory=dict)
    #: queues whose offset the caller chose: no shard has said yet that the queue holds it
    chosen: set[int] = field(default_factory=set)
    #: queue_id -> since when a new leader lacks messages that were read before, in ms
    behind_since_ms: dict[int, int] = field(default_factory=dict)
    #: queue_id -> why it cannot be read
    queue_errors: dict[int, RayMQError] = field(default_factory=dict)
    #: shard -> (when it became unreachable, in ms; why)
    down: dict[int, tuple[int, RayMQError]] = field(default_factory=dict)
    #: why the topic cannot be read at all
    fatal_error: RayMQError | None = None
    closed: bool = False
    #: only these messages; None: all
    selector: MessageSelector | None = None
    #: called by readers now and then, to look for queues that were added to the topic. It must not block
    look_for_queues: Callable[[], None] = lambda: None

    def notify(self) -> None:
        """Wake all waiting threads and call the listener. Needs the lock."""
        self.changed.notify_all()
        if self.listener is not None:
            self.listener()


class ShardReader(FetchThread):
    """The reading thread of one shard, at most one fetch ahead of the consumer."""

    def __init__(
        self,
        routes: Routes,
        shard: int,
        queues: list[int],
        state: ReadState,
        clock: Clock,
        *,
        read_from: ReadFrom = "leader",
    ) -> None:
        self.queues = queues
        self._state = state
        self._clock = clock
        self._turn = 0
        self._pauses = search_pauses()
        #: None: only the leader is read
        self._nearest = NearestReplicas(routes, shard) if read_from == "nearest" else None
        name = f"raymq-reader-{shard}"
        super().__init__(routes, shard, state.changed, lambda: state.closed, name=name)

    def _open_stream(self) -> FetchStream:
        return super()._open_stream() if self._nearest is None else self._nearest.open()

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
        """One fetch, once the consumer has taken all of this shard. False: end, or open a new stream."""
        state = self._state

        def must_return() -> bool:
            return state.closed or self._stream is not stream

        def may_fetch() -> bool:
            return not state.ahead[self.shard] and bool(self._wanted())

        state.look_for_queues()
        if self.shard in state.down:
            self._check_back(stream)
        with state.changed:
            state.changed.wait_for(lambda: must_return() or may_fetch())
            if must_return():
                return False
            self._turn += 1
            wanted = self._wanted()
        found = stream.fetch(self._request(wanted, state.fetch_records, WAIT_MS))
        found = verify_slices(found, self._routes, state.topic, self.shard, self._nearest)
        self._pauses = search_pauses()

        with state.changed:
            state.down.pop(self.shard, None)
            if not found:
                state.chosen -= {
                    queue_id
                    for queue_id in wanted
                    if state.fetch_from.get(queue_id) == wanted[queue_id]
                }
            for part in found:
                self._take(part, wanted)
            if found:
                state.notify()
            if any(queue_id in state.behind_since_ms for queue_id in wanted):
                state.changed.wait_for(must_return, SEARCH_PAUSE_MS / 1000)
        return True

    def _request(self, wanted: dict[int, int], max_records: int, wait_ms: int) -> FetchRequest:
        state = self._state
        return FetchRequest(
            state.topic, wanted, state.fetch_bytes, max_records, wait_ms, wanted=state.selector
        )

    def _check_back(self, stream: FetchStream) -> None:
        """Note that a shard that was unreachable answers again. Raises: RayMQError if it does not.

        The next fetch would note it late: it waits for a message, or for the consumer to take what was read before.
        """
        state = self._state
        with state.changed:
            wanted = self._wanted()
        if wanted:
            stream.fetch(self._request(wanted, 1, 0))
            with state.changed:
                state.down.pop(self.shard, None)

    def _take(self, part: FetchSlice, wanted: dict[int, int]) -> None:
        """Store the answer for one queue, unless a seek has made it obsolete. Needs the lock."""
        state, queue_id = self._state, part.queue_id
        if queue_id not in wanted or state.fetch_from.get(queue_id) != wanted[queue_id]:
            return
        if self._is_behind(part, wanted[queue_id]):
            return

        if part.error is not None or part.records is None:
            del state.fetch_from[queue_id]
            state.queue_errors[queue_id] = part.error or Unavailable(
                "an empty answer", shard=self.shard
            )
            return
        if part.first_offset != wanted[queue_id] or part.next_offset <= part.first_offset:
            return
        state.chosen.discard(queue_id)
        state.fetch_from[queue_id] = part.next_offset
        fetched = FetchedRecords(
            self.shard, queue_id, part.first_offset, part.next_offset, part.records
        )
        state.unread.append(fetched)
        state.ahead[self.shard] += 1

    def _is_behind(self, part: FetchSlice, offset: int) -> bool:
        """Whether a new leader does not know yet how far the queue was confirmed: it is asked again. Needs the lock."""
        state, queue_id = self._state, part.queue_id
        since_ms = state.behind_since_ms.pop(queue_id, None)
        if not (self._routes.fails_over and ends_before(part.error, offset)):
            return False
        now_ms = self._clock.monotonic_ms()
        since_ms = now_ms if since_ms is None else since_ms
        if queue_id in state.chosen or now_ms - since_ms >= state.catch_up_ms:
            return False
        state.behind_since_ms[queue_id] = since_ms
        return True

    def _handle_failure(self, error: RayMQError, stream: FetchStream | None) -> bool:
        """Record a failure. False: no pause is needed, because the consumer broke the stream itself or was closed."""
        state = self._state
        with state.changed:
            if state.closed or (stream is not None and self._stream is not stream):
                return False
            if error.retriable or moved(error):
                state.down.setdefault(self.shard, (self._clock.monotonic_ms(), error))
                state.notify()
                if not self._routes.fails_over:
                    return True
                # Another replica may lead soon: the pauses are shorter here.
                if not self._routes.knows_next(self.shard):
                    state.changed.wait_for(lambda: state.closed, next(self._pauses) / 1000)
                return False
            # Such a failure does not pass by itself: a wrong token, for example.
            state.fatal_error = error
            state.notify()
            state.changed.wait_for(lambda: state.closed)
            return False
