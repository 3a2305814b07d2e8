"""The two topics of a durable queue: one holds its items, one records which request received which items.

Topic NAME has one queue with the items. Any consumer may read it. Topic %TAKEN%NAME, on the same shard, has a record
for each assignment: {"by": writer, "next": first unassigned item, "given": [[request, first, count]...]}. The end of
the second topic is the whole state of the queue, so that nothing else has to survive.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

from raymq.client.consume.range_reader import read_range
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.queue_sequence import BatchReceipt, new_producer_id
from raymq.client.topics.add_queues import TAKEN_PREFIX
from raymq.client.topics.new_topic import create_everywhere
from raymq.client.transport.routes import Routes
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.record import SmallBatch

#: records of %TAKEN%NAME that a new coordinator reads: it cannot repeat the answers to earlier requests
TAIL_RECORDS = 10_000
#: an assignment record without a receipt for this long is looked for in the log
DELIVERY_TIMEOUT_MS = 10_000
#: interval at which the shard is asked whether a stored record is readable
VISIBLE_POLL_MS = 10


class Assignment(NamedTuple):
    """The items [first, first + count), assigned to one request."""

    request: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count


def make_topics(cluster: Cluster, name: str) -> int:
    """Create the topics of a queue that are missing. Returns: their shard.

    Raises: Rejected for a bad name, or a topic of that name with several queues or a compacted one.
    """
    topics = cluster.topics()
    # An earlier call may have made only the first of the two. Its shard stays, also if shards were added since.
    found = topics.get(name) or topics.get(TAKEN_PREFIX + name)
    if found is None:
        home = zlib.crc32(name.encode()) % cluster.shards
    elif found.get("compacted"):
        # Items are counted by offset, and compaction leaves gaps.
        raise Rejected(
            f"topic {name!r} is compacted, and compaction drops items before they are read: choose another name",
            field="name",
            limit="a topic that is not compacted",
        )
    elif found["queues"] == 1:
        home = int(found["shards"][0])
    else:
        raise Rejected(
            f"topic {name!r} has {found['queues']} queues: a Queue needs a topic with one: choose another name",
            field="name",
            limit="a topic with one queue",
        )

    for topic in (TAKEN_PREFIX + name, name):
        if topic != name or name not in topics:
            create_everywhere(cluster, {"name": topic, "queues": 1, "shards": [home]})
    return home


class AssignmentLog:
    """Writes %TAKEN%NAME as its only writer. One thread at a time.

    Invariant: the log holds a record by this writer only if no later writer has begun to read the log.

    Each writer has its own producer id, which it writes first. It then fences every other producer id that it finds,
    so that the next record of that other writer is refused, wherever it runs. Only then does the writer read the state
    of the queue.

    A receipt does not mean that the record is readable yet. Records become readable in log order. Before each reading
    the writer therefore writes a record, and waits until that record is readable.
    """

    def __init__(self, cluster: Cluster, name: str, shard: int, clock: Clock) -> None:
        self._cluster = cluster
        self._items = name
        self._topic = TAKEN_PREFIX + name
        self._shard = shard
        self._clock = clock

        self._routes = Routes.of(cluster)
        self._id = new_producer_id()
        self._sender = BatchSender(
            self._routes, producer_id=self._id, delivery_timeout_ms=DELIVERY_TIMEOUT_MS, clock=clock
        )

        #: first unassigned item
        self.next_unassigned = 0
        #: offset after the last item
        self.end = 0
        #: recent assignments, oldest first
        self.given: list[Assignment] = []

    def open(self) -> None:
        """Fence earlier writers and read the queue's state. Raises: RayMQError. Call it again on a new instance."""
        fenced = {self._id}
        while True:
            self._await_visible(self._write({"by": self._id}).result().last_offset)
            records = list(self._tail())
            others = {int(record["by"]) for record in records} - fenced
            if not others:
                break
            for writer in sorted(others):
                self._routes.call(self._shard, "init_producer", {"producer_id": writer})
            fenced |= others

        first, self.end = self.ranges(self._items)
        given = [record for record in records if "next" in record]
        # Items are deleted by age like all messages: deleted items are never assigned.
        self.next_unassigned = max(first, int(given[-1]["next"])) if given else first
        self.given = [Assignment(*each) for record in given for each in record["given"]]

    def _await_visible(self, offset: int) -> None:
        """Wait until the record at `offset`, and every record before it, is readable. Raises: Unavailable."""
        deadline_ms = self._clock.monotonic_ms() + DELIVERY_TIMEOUT_MS
        while self.ranges(self._topic)[1] <= offset:
            if self._clock.monotonic_ms() > deadline_ms:
                raise Unavailable(
                    f"{self._topic}: offset {offset} is stored but not readable after {DELIVERY_TIMEOUT_MS} ms",
                    shard=self._shard,
                )
            self._clock.sleep_ms(VISIBLE_POLL_MS)

    def ranges(self, topic: str) -> tuple[int, int]:
        """[first, end) of a topic's only queue."""
        low, high = self._cluster.call(self._shard, "queue_ranges", {"topic": topic})["0"]
        return int(low), int(high)

    def _tail(self) -> Iterator[dict[str, Any]]:
        first, end = self.ranges(self._topic)
        first = max(first, end - TAIL_RECORDS)
        for records in read_range(self._cluster, self._topic, 0, self._shard, first, end):
            for body in decode_records(records, columns=("body",)).column(0).to_pylist():
                yield json.loads(body)

    def write(self, following: int, given: list[Assignment]) -> Future[BatchReceipt]:
        """Write assignments. They hold when the future has a receipt. After an error their state is unknown."""
        return self._write({"by": self._id, "next": following, "given": given})

    def _write(self, record: Mapping[str, object]) -> Future[BatchReceipt]:
        body = json.dumps(record, separators=(",", ":")).encode()
        batch = SmallBatch([body], [None], [None], [Clock().now_ms()])
        return self._sender.send(self._topic, 0, batch)

    def close(self) -> None:
        """Close at once: an unacknowledged record may or may not be in the log."""
        self._sender.close()
