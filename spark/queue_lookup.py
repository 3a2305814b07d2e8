"""Connects to the cluster of a source, and asks it for the queues, for their ends, and for offsets by time."""

from __future__ import annotations

import re
from contextlib import closing
from typing import TYPE_CHECKING

import raymq
from raymq.cluster.consume.range_reader import RangeReader
from raymq.cluster.transport.routes import Routes
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable, require
from raymq.store.queues.raw_records import decode_records

from .offsets import HeldOffsets, TopicQueue
from .source_options import SourceOptions, Subscription

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: how long the search for a time waits for one message
_SEARCH_TIMEOUT_S = 30.0


def connect(options: SourceOptions) -> Cluster:
    """The cluster of the first address that answers. Raises: Rejected; Unavailable if none answers."""
    last: RayMQError | None = None
    for address in options.addresses:
        try:
            return raymq.connect(address, token=options.token, ca=options.ca)
        except (Unavailable, DeliveryUnknown) as error:
            last = error
    require(last is not None, "a source has an address")
    message = f"raymq.address: no shard answers at {', '.join(options.addresses)}: {last}"
    raise Unavailable(message, field="raymq.address") from None


class QueueLookup:
    """The queues of a subscription, as the cluster knows them now."""

    def __init__(self, cluster: Cluster, subscription: Subscription) -> None:
        self.cluster = cluster
        self._subscription = subscription

    def queues(self) -> dict[TopicQueue, HeldOffsets]:
        """The queues and their ends. Raises: Rejected for a topic or queue that does not exist; Unavailable."""
        found: dict[TopicQueue, HeldOffsets] = {}
        for topic in self._topics():
            for facts in self.cluster.describe_topic(topic)["queues"]:
                ends = HeldOffsets(facts["shard"], facts["min_offset"], facts["max_offset"])
                found[TopicQueue(topic, facts["queue_id"])] = ends

        assigned = self._subscription.queues
        if assigned is None:
            return found
        for queue in assigned:
            if queue not in found:
                count = sum(each.topic == queue.topic for each in found)
                raise Rejected(
                    f"assign: topic {queue.topic} has the queues 0 to {count - 1}, not {queue.queue_id}",
                    field="assign",
                    limit=count - 1,
                    found=queue.queue_id,
                )
        return {queue: found[queue] for queue in assigned}

    def _topics(self) -> list[str]:
        topics, pattern, queues = self._subscription
        if pattern is not None:
            return [name for name in self.cluster.topics() if re.fullmatch(pattern, name)]
        if topics is not None:
            return list(topics)
        return sorted({queue.topic for queue in queues or ()})

    def offset_at(self, queue: TopicQueue, ends: HeldOffsets, time_ms: int) -> int | None:
        """The offset of a queue's first message that was stored at a time or later; None if there is none.

        Store times never go back in a queue, so that it can be searched by halves: of a million messages 20 are read.
        """
        low, high = ends.first, ends.end
        is_found = False
        routes = Routes.of(self.cluster)
        with closing(RangeReader(routes, queue.topic, queue.queue_id, ends.shard)) as reader:
            while low < high:
                middle = (low + high) // 2
                offset, stored_ms = self._next_message(reader, middle, ends.end)
                if offset >= high:
                    # A gap of a compacted topic: no message is left between `middle` and `high`.
                    high = middle
                elif stored_ms >= time_ms:
                    is_found, high = True, middle
                else:
                    low = offset + 1
        return low if is_found else None

    @staticmethod
    def _next_message(reader: RangeReader, offset: int, end: int) -> tuple[int, int]:
        """Offset and store time of the first message at an offset or after it."""
        records, _ = reader.fetch(
            offset, end, max_bytes=1, max_records=1, timeout_s=_SEARCH_TIMEOUT_S
        )
        rows = decode_records(records.slice(0, 1), columns=("queue_offset", "store_time_ms"))
        return rows.column("queue_offset")[0].as_py(), rows.column("store_time_ms")[0].as_py()
