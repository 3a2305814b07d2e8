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
from raymq.store.base.errors import RayMQError, TopicDeleted, TopicMissing, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector
from raymq.store.state.topics import QueueKey

from .consumer_config import ReadFrom
from .range_reader import ends_before
from .verify_crcs import verify_slices

#: longest wait of one fetch at the shard
WAIT_MS = 10_000


class FetchedRecords(NamedTuple):
    """Records [first_offset, next_offset) of one queue, perhaps with gaps, or none: the shard looked in vain."""

    shard: int
    key: QueueKey
    first_offset: int
    next_offset: int
    records: pa.Array


@dataclass
class ReadState:
    """The state that a consumer and its readers share. `changed` guards all of it."""

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
    #: queue -> offset to fetch next. A queue that failed is missing until `seek`
    fetch_from: dict[QueueKey, int] = field(default_factory=dict)
    #: queues whose offset the caller chose: no shard has said yet that the queue holds it
    chosen: set[QueueKey] = field(default_factory=set)
    #: queues that are not read until `resume`
    paused: set[QueueKey] = field(default_factory=set)
    #: queue -> since when a new leader lacks messages that were read before, in ms
    behind_since_ms: dict[QueueKey, int] = field(default_factory=dict)
    #: queue -> why it cannot be read
    queue_errors: dict[QueueKey, RayMQError] = field(default_factory=dict)
    #: shard -> (when it became unreachable, in ms; why)
    down: dict[int, tuple[int, RayMQError]] = field(default_factory=dict)
    #: why nothing can be read at all
    fatal_error: RayMQError | None = None
    closed: bool = False
    #: topic -> how often one of its name was deleted before, if that ever happened: the topics that this reader means
    generations: dict[str, int] = field(default_factory=dict)
    #: deleted topics are no failure
    passes_over_deleted: bool = False
    #: queues of deleted topics, which are not read until another topic has the name
    deleted: set[QueueKey] = field(default_factory=set)
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
        queues: list[QueueKey],
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

    def _wanted(self) -> dict[QueueKey, int]:
        """The offsets to fetch from. The queues take turns as the first: a busy one must not starve the others."""
        state = self._state
        order = [key for key in self.queues if key in state.fetch_from and key not in state.paused]
        turn = self._turn % max(len(order), 1)
        # A fetch has the topics one after the other.
        return {key: state.fetch_from[key] for key in order[turn:] + order[:turn]}

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
        request = self._request(wanted, state.fetch_records, WAIT_MS)
        found = stream.fetch(request)
        found = verify_slices(found, self._routes, request, self.shard, self._nearest)
        self._pauses = search_pauses()

        with state.changed:
            state.down.pop(self.shard, None)
            if not found:
                state.chosen -= {key for key in wanted if state.fetch_from.get(key) == wanted[key]}
            for part in found:
                self._take(part, request.key_of(part), wanted)
            if found:
                state.notify()
            if any(key in state.behind_since_ms for key in wanted):
                state.changed.wait_for(must_return, SEARCH_PAUSE_MS / 1000)
        return True

    def _request(self, wanted: dict[QueueKey, int], max_records: int, wait_ms: int) -> FetchRequest:
        state = self._state
        topics: dict[str, dict[int, int]] = {}
        for (topic, queue_id), offset in wanted.items():
            topics.setdefault(topic, {})[queue_id] = offset
        first = next(iter(topics))
        offsets = topics.pop(first)
        return FetchRequest(
            *(first, offsets, state.fetch_bytes, max_records, wait_ms),
            wanted=state.selector,
            others=topics or None,
            generations={
                topic: state.generations[topic]
                for topic in (first, *topics)
                if topic in state.generations
            }
            or None,
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

    def _take(self, part: FetchSlice, key: QueueKey, wanted: dict[QueueKey, int]) -> None:
        """Store the answer for one queue, unless a seek or a pause has made it obsolete. Needs the lock."""
        state = self._state
        if key not in wanted or state.fetch_from.get(key) != wanted[key] or key in state.paused:
            return
        if self._is_behind(part, key, wanted[key]):
            return

        if part.error is not None or part.records is None:
            del state.fetch_from[key]
            if isinstance(part.error, (TopicMissing, TopicDeleted)):
                self._routes.topics.forget([key[0]])
                if state.passes_over_deleted:
                    state.deleted.add(key)
                    state.notify()
                    return
            state.queue_errors[key] = part.error or Unavailable("an empty answer", shard=self.shard)
            return
        if part.first_offset != wanted[key] or part.next_offset <= part.first_offset:
            return
        state.chosen.discard(key)
        state.fetch_from[key] = part.next_offset
        fetched = FetchedRecords(self.shard, key, part.first_offset, part.next_offset, part.records)
        state.unread.append(fetched)
        state.ahead[self.shard] += 1

    def _is_behind(self, part: FetchSlice, key: QueueKey, offset: int) -> bool:
        """Whether a new leader does not know yet how far the queue was confirmed: it is asked again. Needs the lock."""
        state = self._state
        since_ms = state.behind_since_ms.pop(key, None)
        if not (self._routes.fails_over and ends_before(part.error, offset)):
            return False
        now_ms = self._clock.monotonic_ms()
        since_ms = now_ms if since_ms is None else since_ms
        if key in state.chosen or now_ms - since_ms >= state.catch_up_ms:
            return False
        state.behind_since_ms[key] = since_ms
        return True

    def _handle_failure(self, error: RayMQError, stream: FetchStream | None) -> bool:
        """Record a failure. False: no pause is needed, because the consumer broke the stream itself or was closed."""
        state = self._state
        with state.changed:
            if state.closed or (stream is not None and self._stream is not stream):
                return False
            if error.retriable or moved(error):
                if self._wanted():
                    # Otherwise this consumer does not need it.
                    state.down.setdefault(self.shard, (self._clock.monotonic_ms(), error))
                state.notify()
                if not self._routes.fails_over:
                    return True
                # Another replica may lead soon: the pauses are shorter here.
                if not self._routes.knows_next(self.shard):
                    state.changed.wait_for(self._ended, next(self._pauses) / 1000)
                return False

            if isinstance(error, TopicMissing) and state.passes_over_deleted:
                # The only topic of the fetch. It is looked for again.
                for key in self._wanted():
                    del state.fetch_from[key]
                    state.deleted.add(key)
                state.notify()
                return False
            # Such a failure does not pass by itself: a wrong token, for example.
            state.fatal_error = error
            state.notify()
            state.changed.wait_for(self._ended)
            return False
