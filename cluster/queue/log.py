"""What a durable queue is in the log: a topic of its items, and one of who was given which of them.

Topic NAME has one queue with the items; any consumer may read it. Topic %TAKEN%NAME, on the same shard, has a
record for each time that items were given away: {"by": writer, "next": first item not given, "given": [[request,
first, count]...]}. The end of that topic is the queue's whole state, so nothing else must survive.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from raymq.cluster.consume.range_reader import read_range
from raymq.cluster.messages.message import decode_records
from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.produce.queue_sequence import BatchReceipt, new_producer_id
from raymq.cluster.transport.routes import Routes
from raymq.store.clock import Clock
from raymq.store.errors import Rejected, Unavailable
from raymq.store.record import Row

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

TAKEN_PREFIX = "%TAKEN%"
#: records of %TAKEN%NAME that are read to begin: requests further back are not answered again
TAIL_RECORDS = 10_000
#: after so long a record that is not acknowledged is looked for in the log instead
DELIVERY_TIMEOUT_MS = 10_000
#: how often the shard is asked whether it shows a record that it stored
VISIBLE_POLL_MS = 10


class Taken(NamedTuple):
    """The items [first, first + count), given to one request."""

    request: int
    first: int
    count: int  # type: ignore[assignment]  # hides tuple.count


def make_topics(cluster: Cluster, name: str) -> int:
    """Make the topics of a queue where they are missing. Returns: the shard that has them.

    Raises: Rejected for a bad name, or a topic of that name with several queues or a compacted one.
    """
    found = cluster.topics().get(name)
    if found is None:
        home = zlib.crc32(name.encode()) % cluster.shards
    elif found.get("compacted"):
        # Items are counted by their offsets, and there are gaps.
        raise Rejected(
            f"topic {name!r} is compacted, which drops items that nobody got: choose another name",
            field="name",
            limit="a topic that is not compacted",
        )
    elif found["queues"] == 1:
        home = int(found["shards"][0])
    else:
        raise Rejected(
            f"topic {name!r} has {found['queues']} queues: a Queue is a topic with one, choose another name",
            field="name",
            limit="a topic with one queue",
        )
    for topic in (TAKEN_PREFIX + name, *(() if found else (name,))):
        # Every shard knows every topic.
        for shard in range(cluster.shards):
            arguments = {"name": topic, "queues": 1, "shards": [home]}
            cluster.call(shard, "create_topic", arguments)
    return home


class TakenLog:
    """Writes %TAKEN%NAME as its only writer. One thread at a time.

    Invariant: a record by this writer is in the log only if no later writer has begun to read it. Each
    writer has a producer id of its own, which it writes first; then it fences every other id it finds
    (their next record is refused, wherever they run), and only then reads where the queue stands. A receipt
    does not mean that readers see the record yet, but they see records in the log's order: before each
    reading it writes a record and waits until that is seen.
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
            self._routes,
            producer_id=self._id,
            delivery_timeout_ms=DELIVERY_TIMEOUT_MS,
            clock=clock,
        )
        #: the first item that was not given
        self.next = 0
        #: one behind the last item
        self.end = 0
        #: what was given lately, oldest first
        self.given: list[Taken] = []

    def open(self) -> None:
        """Fence earlier writers and read where the queue stands. Raises: RayMQError, then start anew."""
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
        # Items are deleted like all messages when they are old: what is gone is given to nobody.
        self.next = max(first, int(given[-1]["next"])) if given else first
        self.given = [Taken(*each) for record in given for each in record["given"]]

    def _await_visible(self, offset: int) -> None:
        """Wait until readers see our record at `offset`, and so all before it. Raises: Unavailable."""
        give_up = self._clock.monotonic_ms() + DELIVERY_TIMEOUT_MS
        while self.ranges(self._topic)[1] <= offset:
            if self._clock.monotonic_ms() > give_up:
                raise Unavailable(
                    f"{self._topic}: offset {offset} is stored and after {DELIVERY_TIMEOUT_MS} ms not readable",
                    shard=self._shard,
                )
            self._clock.sleep_ms(VISIBLE_POLL_MS)

    def ranges(self, topic: str) -> tuple[int, int]:
        """[first, end) of a topic's only queue now."""
        low, high = self._cluster.call(self._shard, "queue_ranges", {"topic": topic})["0"]
        return int(low), int(high)

    def _tail(self) -> Iterator[dict[str, Any]]:
        first, end = self.ranges(self._topic)
        first = max(first, end - TAIL_RECORDS)
        for records in read_range(self._cluster, self._topic, 0, self._shard, first, end):
            for body in decode_records(records, columns=("body",)).column(0).to_pylist():
                yield json.loads(body)

    def write(self, following: int, given: list[Taken]) -> Future[BatchReceipt]:
        """Give items away. They are given when the future has a receipt; with an error nobody knows."""
        return self._write({"by": self._id, "next": following, "given": given})

    def _write(self, record: dict[str, Any]) -> Future[BatchReceipt]:
        body = json.dumps(record, separators=(",", ":")).encode()
        row = Row(body, None, None, Clock().now_ms())
        return self._sender.send(self._topic, 0, row)

    def close(self) -> None:
        """End at once: a record that is not answered may or may not be in the log."""
        self._sender.close()
