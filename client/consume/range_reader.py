"""Reads one queue by offset, and waits for an unreachable shard: for Spark tasks, queues and checks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from raymq.client.messages.message import queue_offsets
from raymq.client.transport.connection import FetchStream
from raymq.client.transport.nearest import NearestReplicas
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import OffsetOutOfRange, RayMQError, TopicDeleted, Unavailable
from raymq.store.records.requests import FetchRequest, MessageSelector

from .consumer_config import ReadFrom
from .verify_crcs import verify_slices

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: longest wait of one fetch at the shard
WAIT_MS = 1000
RETRY_MS = 50
FETCH_BYTES = 4 << 20
FETCH_RECORDS = 10_000


class RangeReader:
    """Reads ranges of one queue over a stream that stays open. One thread at a time."""

    def __init__(
        self,
        routes: Routes,
        topic: str,
        queue_id: int,
        shard: int,
        *,
        read_from: ReadFrom = "leader",
        selector: MessageSelector | None = None,
    ) -> None:
        """Args: `read_from`: as of a consumer. `selector`: only these messages; None: all."""
        self._routes = routes
        self._topic = topic
        self._queue_id = queue_id
        self._shard = shard
        self._selector = selector
        self._clock = Clock()
        self._stream: FetchStream | None = None
        #: None: only the leader is read
        self._nearest = NearestReplicas(routes, shard) if read_from == "nearest" else None

    def fetch(
        self, first: int, last: int, *, max_bytes: int, max_records: int, timeout_s: float
    ) -> tuple[pa.Array, int]:
        """The next raw records of [first, last), perhaps with some after `last`, and the offset after them.

        There is none if the shard says that none is left up to `last`.

        Raises:
            OffsetOutOfRange: the queue does not hold `first`.
            Corrupt: a message is damaged. All messages before it were returned.
            Unavailable: for `timeout_s` no message has come, and the shard has not looked at any.
        """
        deadline_s = self._clock.monotonic() + timeout_s
        request = FetchRequest(
            self._topic,
            {self._queue_id: first},
            max_bytes,
            max_records,
            WAIT_MS,
            wanted=self._selector,
            generations=self._routes.topics.generations([self._topic]),
        )

        while True:
            try:
                if self._stream is None:
                    self._stream = self._open_stream()
                fetched = self._stream.fetch(request)
                found = verify_slices(fetched, self._routes, request, self._shard, self._nearest)
            except Unavailable:
                self.close()
                if self._clock.monotonic() > deadline_s:
                    raise
                self._clock.sleep_ms(RETRY_MS)
                self._routes.refresh()
                continue

            must_wait = self._routes.fails_over and any(
                ends_before(part.error, first) for part in found
            )
            if must_wait and self._clock.monotonic() <= deadline_s:
                # A new leader does not know yet how far the queue was confirmed before.
                self._clock.sleep_ms(RETRY_MS)
                continue

            if any(isinstance(part.error, TopicDeleted) for part in found):
                generations = self._look_again(request.generations)
                request = request._replace(generations=generations)
                continue

            # One queue was asked for, so there is one part at most.
            for part in found:
                if part.error is not None or part.records is None:
                    raise part.error or Unavailable("an empty answer", shard=self._shard)
                first = part.next_offset
                if len(part.records) or first >= last:
                    return part.records, first
                request = request._replace(offsets={self._queue_id: first})
                # It moves on, however much it does not want.
                deadline_s = self._clock.monotonic() + timeout_s

            if self._clock.monotonic() > deadline_s:
                raise Unavailable(
                    f"no message of {self._topic} queue {self._queue_id} at offset {first} or after it arrived in "
                    f"{timeout_s:g} s; the range ends at {last}",
                    shard=self._shard,
                )

    def _look_again(self, known: dict[str, int] | None) -> dict[str, int] | None:
        """Which topic of this name there is now. Its offsets are those that were asked for, or none of them.

        Args: `known`: what the shard has refused. Raises: Rejected if there is none.
        """
        topics = self._routes.topics
        topics.forget([self._topic])
        topics.find(self._topic)
        found = topics.generations([self._topic])
        if found == known:
            raise Unavailable(f"topic {self._topic} is being deleted", shard=self._shard)
        return found

    def _open_stream(self) -> FetchStream:
        if self._nearest is not None:
            return self._nearest.open()
        return self._routes.fetch_stream(self._shard)

    def close(self) -> None:
        """Close the stream. The next fetch opens another."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def ends_before(error: RayMQError | None, offset: int) -> bool:
    """Whether a shard says that a queue ends before an offset."""
    return isinstance(error, OffsetOutOfRange) and offset > int(error.fields.get("max", offset))


def read_range(
    cluster: ClusterHandle,
    topic: str,
    queue_id: int,
    shard: int,
    first: int,
    last: int,
    *,
    timeout_s: float = 60.0,
    read_from: ReadFrom = "leader",
    selector: MessageSelector | None = None,
) -> Iterator[pa.Array]:
    """Raw records of the offsets [first, last), in pieces. Waits for an unreachable shard.

    Args: `read_from`: as of a consumer. `selector`: only these messages; None: all.
    Raises: as `RangeReader.fetch`, so Unavailable after `timeout_s` without progress.
    """
    routes = Routes.of(cluster)
    with closing(
        RangeReader(routes, topic, queue_id, shard, read_from=read_from, selector=selector)
    ) as reader:
        while first < last:
            records, first = reader.fetch(
                first,
                last,
                max_bytes=FETCH_BYTES,
                max_records=min(FETCH_RECORDS, last - first),
                timeout_s=timeout_s,
            )
            if first > last:
                # After a gap of a compacted topic the next record may belong to another range.
                records = records.slice(0, int(np.searchsorted(queue_offsets(records), last)))
            if len(records):
                yield records
